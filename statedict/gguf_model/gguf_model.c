/*
 * config.json of a model out of the key-value pairs of a GGUF file: the inverse of gguf_config.c. See
 * gguf_values.h.
 */
#include "statedict/gguf_model/gguf_values.h"

#include "base/core/mem.h"
#include "statedict/models/config.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const fsdp_value *find_below(const fsdp_sd *sd, const char *architecture, const char *key)
{
    char name[FSDP_GGUF_KEY];
    fsdp_gguf_spell_key(name, architecture, key);
    return fsdp_gguf_pair(sd, name);
}

/* GGUF's floats are f32: the fewest digits that come back as the same one. */
static void add_float(fsdp_text *out, double value)
{
    char text[32];
    for (int digits = 1; digits <= 9; digits++) {
        snprintf(text, sizeof text, "%.*g", digits, value);
        if (strtof(text, NULL) == (float)value)
            break;
    }
    fsdp_text_addf(out, "%s%s", text, strpbrk(text, ".e") ? "" : ".0");
}

static bool is_number(const fsdp_value *value)
{
    return value && (value->kind == FSDP_VALUE_I64 || value->kind == FSDP_VALUE_BOOL ||
                     (value->kind == FSDP_VALUE_F64 && isfinite(value->as.f64)));
}

static double number_of(const fsdp_value *value)
{
    return value->kind == FSDP_VALUE_I64    ? (double)value->as.i64
           : value->kind == FSDP_VALUE_BOOL ? (double)value->as.boolean
                                            : value->as.f64;
}

static void add_member(fsdp_text *out, const char *member, const fsdp_value *value)
{
    fsdp_text_addf(out, ",\n  \"%s\": ", member);
    if (value->kind == FSDP_VALUE_BOOL)
        fsdp_text_addf(out, "%s", value->as.boolean ? "true" : "false");
    else if (value->kind == FSDP_VALUE_I64)
        fsdp_text_addf(out, "%" PRId64, value->as.i64);
    else
        add_float(out, value->as.f64);
}

static bool has_key(const fsdp_gguf_names *gguf, const char *key)
{
    for (size_t i = 0; i < gguf->key_count; i++)
        if (strcmp(gguf->keys[i].key, key) == 0)
            return true;
    return false;
}

/* Numbers that every config.json needs, and those of the family. */
static bool is_needed(const fsdp_gguf_key *key)
{
    static const char *const keys[] = {"block_count", "context_length", "embedding_length",
                                       "attention.head_count"};
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++)
        if (strcmp(key->key, keys[i]) == 0 && key->member[0] != '$')
            return true;
    return key->is_needed;
}

/* True where config.json gets no member of the key: it is of a key before or is computed, vocab_size is that
 * of the tensor, and a name of formulas is none. */
static bool has_no_member(const fsdp_gguf_names *gguf, size_t at)
{
    for (size_t i = 0; i < gguf->back_count; i++)
        if (strcmp(gguf->back[i].member, gguf->keys[at].member) == 0)
            return true;
    for (size_t i = 0; i < at; i++)
        if (strcmp(gguf->keys[i].member, gguf->keys[at].member) == 0)
            return true;
    return strcmp(gguf->keys[at].key, "vocab_size") == 0 || gguf->keys[at].member[0] == '$';
}

static fsdp_status fail_missing(const fsdp_gguf_names *gguf, const char *key, fsdp_error *err)
{
    return fsdp_fail(err, FSDP_ERR_USAGE,
                     "the number '%s.%s' is missing, and a config.json needs it",
                     gguf->architecture, key);
}

/* Tensors of layers that a config.json does not count would be left unread. */
static fsdp_status check_count(const fsdp_gguf_names *gguf, const char *key,
                               const fsdp_value *value, fsdp_error *err)
{
    bool is_count = strcmp(key, "block_count") == 0 || strcmp(key, "decoder_block_count") == 0;
    return !is_count || !is_number(value) || number_of(value) >= 1
               ? FSDP_OK
               : fsdp_fail(err, FSDP_ERR_DAMAGED,
                           "'%s.%s' is %g, but a model has at least one such layer",
                           gguf->architecture, key, number_of(value));
}

static bool is_flag(const fsdp_architecture *family, const char *member)
{
    return fsdp_architecture_member(family, member, strlen(member))->kind == FSDP_MEMBER_FLAG;
}

/* Adds the number of a key, or null where that means this number, which is 0 without the key. A file
 * without a base of rotary positions has 10000, and the family's default may be another one; a flag without
 * a key is false. */
static void add_number(const fsdp_architecture *family, const fsdp_gguf_key *key,
                       const fsdp_value *value, fsdp_text *out)
{
    const fsdp_value usual_base = fsdp_value_f64(10000), no = fsdp_value_bool(false);
    const char *null = fsdp_architecture_member(family, key->member, strlen(key->member))->null;
    bool is_window = strcmp(key->key, "attention.sliding_window") == 0;
    if (is_window && family->gguf.window == FSDP_WINDOW_EVERY &&
        !(is_number(value) && number_of(value) > 0))
        return; /* layer_types say that no layer has one, and transformers asks for a number */
    if (!value && strcmp(key->key, "rope.freq_base") == 0)
        value = &usual_base;
    if (!is_number(value) && is_flag(family, key->member))
        value = &no;
    if (null && (is_number(value) ? number_of(value) : 0) == strtod(null, NULL))
        fsdp_text_addf(out, ",\n  \"%s\": null", key->member);
    else if (is_number(value))
        add_member(out, key->member, value);
}

static fsdp_status add_members(const fsdp_sd *sd, const fsdp_architecture *family, fsdp_text *out,
                               fsdp_error *err)
{
    const fsdp_gguf_names *gguf = &family->gguf;
    for (size_t i = 0; i < gguf->key_count; i++) {
        const fsdp_gguf_key *key = &gguf->keys[i];
        const fsdp_value *value = find_below(sd, gguf->architecture, key->key);
        bool is_missing = !is_number(value) || number_of(value) == 0;
        if (value && value->kind == FSDP_VALUE_LIST)
            return fsdp_fail(err, FSDP_ERR_USAGE,
                             "'%s.%s' has a number for each layer, but a config.json of '%s' has "
                             "one for all; --copy-from DIR takes the model's",
                             gguf->architecture, key->key, family->model_type);
        if (is_missing && is_needed(key))
            return fail_missing(gguf, key->key, err);
        FSDP_TRY(check_count(gguf, key->key, value, err));
        if (!has_no_member(gguf, i))
            add_number(family, key, value, out);
    }
    return FSDP_OK;
}

static void add_whole(fsdp_text *out, const fsdp_architecture *family, const char *member,
                      int64_t number)
{
    fsdp_value value =
        is_flag(family, member) ? fsdp_value_bool(number != 0) : fsdp_value_i64(number);
    add_member(out, member, &value);
}

/* --- members that follow from others ------------------------------------------------------------- */

/* 0: the value is not a number. */
static int64_t whole_of(const fsdp_value *value)
{
    if (!is_number(value))
        return 0;
    return value->kind == FSDP_VALUE_I64 ? value->as.i64 : value->as.boolean;
}

/* Takes the whole numbers of the keys as members of formulas; one that a file lacks is 0. */
static fsdp_status take_numbers(const fsdp_sd *sd, fsdp_config *known, fsdp_error *err)
{
    const fsdp_gguf_names *gguf = &known->architecture->gguf;
    known->values =
        fsdp_arena_alloc(&known->arena, gguf->key_count + gguf->back_count, sizeof *known->values);
    if (!known->values)
        return fsdp_fail_memory(err, "config.json");
    for (size_t i = 0; i < gguf->key_count; i++) {
        const fsdp_value *value = find_below(sd, gguf->architecture, gguf->keys[i].key);
        if (!is_number(value) || value->kind != FSDP_VALUE_F64)
            known->values[known->count++] = (fsdp_config_value){
                .name = gguf->keys[i].member, .is_there = true, .number = whole_of(value)};
    }
    return FSDP_OK;
}

static fsdp_status add_computed(const fsdp_sd *sd, fsdp_config *known, fsdp_text *out,
                                fsdp_error *err)
{
    const fsdp_gguf_names *gguf = &known->architecture->gguf;
    for (size_t i = 0; i < gguf->back_count; i++) {
        const fsdp_gguf_back *back = &gguf->back[i];
        const char *tensor = "tensor ";
        int64_t number;
        if (strncmp(back->formula, tensor, strlen(tensor)) == 0) {
            const char *name = back->formula + strlen(tensor);
            number = fsdp_sd_find(sd, name, strlen(name)) >= 0;
        } else {
            FSDP_TRY(fsdp_formula_compute(known, back->formula, 0, &number, err));
        }
        known->values[known->count++] =
            (fsdp_config_value){.name = back->member, .is_there = true, .number = number};
        if (back->member[0] != '$')
            add_whole(out, known->architecture, back->member, number);
    }
    return FSDP_OK;
}

/* A file may have another number than the one that follows from config.json. */
static fsdp_status check_formulas(const fsdp_sd *sd, const fsdp_config *known, fsdp_error *err)
{
    const fsdp_gguf_names *gguf = &known->architecture->gguf;
    for (size_t i = 0; i < gguf->key_count; i++) {
        const char *name = gguf->keys[i].member;
        const fsdp_config_member *member =
            fsdp_architecture_member(known->architecture, name, strlen(name));
        const fsdp_value *value = find_below(sd, gguf->architecture, gguf->keys[i].key);
        int64_t number;
        if (name[0] != '$')
            continue;
        if (!is_number(value))
            return fail_missing(gguf, gguf->keys[i].key, err);
        FSDP_TRY(fsdp_formula_compute(known, member->otherwise, 0, &number, err));
        if (number_of(value) != (double)number)
            return fsdp_fail(err, FSDP_ERR_USAGE,
                             "cannot make a config.json from '%s.%s' %g where %" PRId64
                             " is expected; --copy-from DIR takes one",
                             gguf->architecture, gguf->keys[i].key, number_of(value), number);
    }
    return FSDP_OK;
}

/* A number that llama.cpp has a key for, and transformers computes some of the model with this one alone. */
static fsdp_status check_fixed(const fsdp_sd *sd, const fsdp_config *known, fsdp_error *err)
{
    const fsdp_gguf_names *gguf = &known->architecture->gguf;
    for (size_t i = 0; i < gguf->key_count; i++) {
        const fsdp_value *value = find_below(sd, gguf->architecture, gguf->keys[i].key);
        for (size_t f = 0; f < gguf->fixed_count && is_number(value); f++) {
            double number;
            if (strcmp(gguf->fixed[f].member, gguf->keys[i].member) != 0)
                continue;
            FSDP_TRY(fsdp_formula_number(known, gguf->fixed[f].number, 0, &number, err));
            if ((float)number_of(value) != (float)number)
                return fsdp_fail(err, FSDP_ERR_USAGE,
                                 "cannot make a config.json from '%s.%s' %g, since transformers "
                                 "computes with %s; --copy-from DIR takes one",
                                 gguf->architecture, gguf->keys[i].key, number_of(value),
                                 gguf->fixed[f].number);
        }
    }
    return FSDP_OK;
}

/* Names of formulas that are a number in every model of the family. */
static fsdp_status check_fixed_formulas(const fsdp_config *known, fsdp_error *err)
{
    const fsdp_architecture *family = known->architecture;
    for (size_t i = 0; i < family->gguf.fixed_count; i++) {
        const fsdp_gguf_fixed *fixed = &family->gguf.fixed[i];
        const char *name = fixed->member;
        int64_t number, wanted;
        if (name[0] != '$')
            continue;
        FSDP_TRY(fsdp_formula_compute(known, name, 0, &number, err));
        FSDP_TRY(fsdp_formula_compute(known, fixed->number, 0, &wanted, err));
        if (number != wanted)
            return fsdp_fail(err, FSDP_ERR_USAGE,
                             "cannot make a config.json from numbers of '%s': %s is %" PRId64
                             " where %" PRId64 " is expected; --copy-from DIR takes one",
                             family->gguf.architecture,
                             fsdp_architecture_member(family, name, strlen(name))->otherwise,
                             number, wanted);
    }
    return FSDP_OK;
}

/* transformers may have another default than the number with which llama.cpp computes. Lists that hold a
 * number for each layer have the usual ones. */
static fsdp_status add_fixed(const fsdp_config *known, fsdp_text *out, fsdp_error *err)
{
    const fsdp_architecture *family = known->architecture;
    for (size_t i = 0; i < family->gguf.fixed_count; i++) {
        const fsdp_gguf_fixed *fixed = &family->gguf.fixed[i];
        const fsdp_config_member *member =
            fsdp_architecture_member(family, fixed->member, strlen(fixed->member));
        double number;
        bool is_usual = !member->otherwise || strcmp(member->otherwise, fixed->number) == 0;
        if (is_usual || fixed->member[0] == '$' || strstr(fixed->number, "layer "))
            continue;
        FSDP_TRY(fsdp_formula_number(known, fixed->number, 0, &number, err));
        if (fsdp_member_is_whole(member))
            add_whole(out, family, fixed->member, (int64_t)number);
        else
            fsdp_text_addf(out, ",\n  \"%s\": %s", fixed->member, fixed->number);
    }
    return FSDP_OK;
}

/* The activation of families that llama.cpp tells from a tensor. */
static void add_gated(const fsdp_sd *sd, const fsdp_gguf_names *gguf, fsdp_text *out)
{
    if (!gguf->gate)
        return;
    const bool has_gate = fsdp_sd_find(sd, gguf->gate, strlen(gguf->gate)) >= 0;
    const char *words = has_gate ? gguf->gated : gguf->activations;
    fsdp_text_addf(out, ",\n  \"feed_forward_proj\": \"%.*s\"", (int)strcspn(words, "|"), words);
}

static fsdp_status add_others(const fsdp_sd *sd, const fsdp_architecture *family, fsdp_text *out,
                              fsdp_error *err)
{
    fsdp_config known = {.architecture = family, .path = "the pairs of GGUF"};
    fsdp_status st = take_numbers(sd, &known, err);
    if (st == FSDP_OK)
        st = add_computed(sd, &known, out, err);
    if (st == FSDP_OK)
        st = check_formulas(sd, &known, err);
    if (st == FSDP_OK)
        st = check_fixed(sd, &known, err);
    if (st == FSDP_OK)
        st = check_fixed_formulas(&known, err);
    if (st == FSDP_OK)
        st = add_fixed(&known, out, err);
    fsdp_arena_release(&known.arena);
    return st;
}

/* --- rotary positions ---------------------------------------------------------------------------- */

/* The part of a head that is rotated, in digits from which transformers computes the same width. */
static fsdp_status add_rotary(const fsdp_sd *sd, const fsdp_gguf_names *gguf, fsdp_text *out,
                              fsdp_error *err)
{
    const fsdp_value *rotated = find_below(sd, gguf->architecture, "rope.dimension_count");
    const fsdp_value *length = find_below(sd, gguf->architecture, "attention.key_length");
    const fsdp_value *all = find_below(sd, gguf->architecture, "embedding_length");
    const fsdp_value *heads = find_below(sd, gguf->architecture, "attention.head_count");
    if (!is_number(rotated) || has_key(gguf, "rope.dimension_count"))
        return FSDP_OK;
    double width = is_number(length)                    ? number_of(length)
                   : is_number(all) && is_number(heads) ? number_of(all) / number_of(heads)
                                                        : 0;
    double pairs = number_of(rotated);
    if (pairs == width && !gguf->rotary)
        return FSDP_OK;
    if (!gguf->rotary || !(pairs > 0 && pairs <= width))
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "cannot make a config.json from '%s.rope.dimension_count' %g in heads of "
                         "%g; --copy-from DIR takes one",
                         gguf->architecture, pairs, width);
    char text[32];
    for (int digits = 1; digits <= 17; digits++) {
        snprintf(text, sizeof text, "%.*g", digits, pairs / width);
        if (floor(width * strtod(text, NULL)) == pairs)
            break;
    }
    fsdp_text_addf(out, ",\n  \"%s\": %s%s", gguf->rotary, text, strpbrk(text, ".e") ? "" : ".0");
    return FSDP_OK;
}

/* Numbers of scaling that get no member of config.json: only the usual ones change nothing. */
static fsdp_status check_yarn(const fsdp_sd *sd, const char *architecture, fsdp_error *err)
{
    static const struct {
        const char *key;
        double usual;
    } numbers[] = {{"attn_factor", 1},
                   {"yarn_ext_factor", 1},
                   {"yarn_attn_factor", 1},
                   {"yarn_beta_fast", 32},
                   {"yarn_beta_slow", 1}};
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) {
        char key[64];
        snprintf(key, sizeof key, "rope.scaling.%s", numbers[i].key);
        const fsdp_value *value = find_below(sd, architecture, key);
        if (is_number(value) && number_of(value) != numbers[i].usual)
            return fsdp_fail(err, FSDP_ERR_USAGE,
                             "cannot make a config.json from '%s.%s' %g; --copy-from DIR takes one",
                             architecture, key, number_of(value));
    }
    return FSDP_OK;
}

/* llama.cpp has a tenth of the scale of attention in YaRN. */
static double find_mscale(const fsdp_sd *sd, const char *architecture)
{
    const fsdp_value *value = find_below(sd, architecture, "rope.scaling.yarn_log_multiplier");
    return is_number(value) ? 10 * number_of(value) : 0;
}

static fsdp_status check_mscale(const fsdp_sd *sd, const fsdp_gguf_names *gguf, bool is_yarn,
                                fsdp_error *err)
{
    double scale = find_mscale(sd, gguf->architecture);
    if ((scale != 0) == (is_yarn && gguf->has_mscale))
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_USAGE,
                     "cannot make a config.json from '%s.rope.scaling.yarn_log_multiplier' %g; "
                     "--copy-from DIR takes one",
                     gguf->architecture, scale / 10);
}

/* transformers gives layers with a window its own default of rope_theta, unless each type of layers has its
 * base; "rope_scaling" alone is what older versions of transformers read. */
static bool needs_types(const fsdp_sd *sd, const fsdp_architecture *family)
{
    const fsdp_value *base = find_below(sd, family->gguf.architecture, "rope.freq_base");
    const fsdp_config_member *member = fsdp_architecture_member(family, "rope_theta", 10);
    double number = is_number(base) ? number_of(base) : 10000;
    return family->gguf.ropes_differ && !has_key(&family->gguf, "rope.freq_base_swa") &&
           number != strtod(member->otherwise, NULL);
}

static void add_scaling_numbers(const fsdp_sd *sd, const fsdp_gguf_names *gguf, const char *type,
                                fsdp_text *out)
{
    const char *architecture = gguf->architecture;
    const bool is_yarn = strcmp(type, "yarn") == 0;
    const fsdp_value *length = find_below(sd, architecture, "rope.scaling.original_context_length");
    fsdp_text_addf(out, "{\"rope_type\": \"%s\"", type);
    if (strcmp(type, "default") != 0)
        add_member(out, "factor", find_below(sd, architecture, "rope.scaling.factor"));
    if (is_yarn && is_number(length))
        add_member(out, "original_max_position_embeddings", length);
    if (is_yarn && gguf->is_unrounded)
        fsdp_text_addf(out, ", \"truncate\": false");
    double mscale = find_mscale(sd, architecture);
    const fsdp_value scale = fsdp_value_f64((double)(float)mscale);
    for (int i = 0; i < 2 && mscale != 0; i++)
        add_member(out, i == 0 ? "mscale" : "mscale_all_dim", &scale);
}

/* Adds the scaling of rotary frequencies. */
static fsdp_status add_scaling(const fsdp_sd *sd, const fsdp_architecture *family, fsdp_text *out,
                               fsdp_error *err)
{
    const char *architecture = family->gguf.architecture;
    const fsdp_value *scaling = find_below(sd, architecture, "rope.scaling.type");
    const fsdp_value *base = find_below(sd, architecture, "rope.freq_base");
    const fsdp_value usual_base = fsdp_value_f64(10000);
    const char *type =
        scaling && scaling->kind == FSDP_VALUE_STRING ? scaling->as.bytes.data : "none";
    bool is_none = strcmp(type, "none") == 0, is_yarn = strcmp(type, "yarn") == 0;
    if (!is_none && ((!is_yarn && strcmp(type, "linear") != 0) ||
                     !is_number(find_below(sd, architecture, "rope.scaling.factor"))))
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "cannot make a config.json from '%s.rope.scaling.type' '%.40s'; "
                         "--copy-from DIR takes one",
                         architecture, type);
    FSDP_TRY(check_yarn(sd, architecture, err));
    FSDP_TRY(check_mscale(sd, &family->gguf, is_yarn, err));
    if (needs_types(sd, family)) {
        base = is_number(base) ? base : &usual_base;
        fsdp_text_addf(out, ",\n  \"rope_parameters\": {\"full_attention\": ");
        add_scaling_numbers(sd, &family->gguf, is_none ? "default" : type, out);
        add_member(out, "rope_theta", base);
        fsdp_text_addf(out, "}, \"sliding_attention\": {\"rope_type\": \"default\"");
        add_member(out, "rope_theta", base);
        fsdp_text_addf(out, "}}");
    } else if (!is_none || family->gguf.is_scaled) {
        type = is_none ? "default" : type;
        fsdp_text_addf(out, ",\n  \"rope_scaling\": ");
        add_scaling_numbers(sd, &family->gguf, type, out);
        fsdp_text_addf(out, "}");
    }
    return FSDP_OK;
}

/* Members that follow from several pairs, or from tensors. */
static void add_tensors(const fsdp_sd *sd, fsdp_text *out)
{
    static const char *const tokens[][2] = {{"tokenizer.ggml.bos_token_id", "bos_token_id"},
                                            {"tokenizer.ggml.eos_token_id", "eos_token_id"},
                                            {"tokenizer.ggml.padding_token_id", "pad_token_id"}};
    for (size_t i = 0; i < sizeof tokens / sizeof *tokens; i++)
        if (is_number(fsdp_gguf_pair(sd, tokens[i][0])))
            add_member(out, tokens[i][1], fsdp_gguf_pair(sd, tokens[i][0]));
    if (!is_number(
            fsdp_gguf_pair(sd, tokens[2][0]))) /* transformers' own may be beyond the vocabulary */
        fsdp_text_addf(out, ",\n  \"%s\": null", tokens[2][1]);
    int64_t table = fsdp_sd_find(sd, "token_embd.weight", strlen("token_embd.weight"));
    const fsdp_entry *entry = table < 0 ? NULL : fsdp_sd_at(sd, (size_t)table);
    if (entry && entry->kind == FSDP_ENTRY_TENSOR && entry->ndim == 2)
        fsdp_text_addf(out, ",\n  \"vocab_size\": %" PRId64, entry->shape[0]);
    bool is_tied = fsdp_sd_find(sd, "output.weight", strlen("output.weight")) < 0;
    fsdp_text_addf(out, ",\n  \"tie_word_embeddings\": %s", is_tied ? "true" : "false");
}

/* --- windows ------------------------------------------------------------------------------------- */

static double window_of(const fsdp_sd *sd, const char *architecture)
{
    const fsdp_value *window = find_below(sd, architecture, "attention.sliding_window");
    return is_number(window) ? number_of(window) : 0;
}

/* The types of layers, by the list of those with a window, their period, or the family's. Without a window
 * all have full attention. */
static fsdp_status add_layer_types(const fsdp_sd *sd, const fsdp_gguf_names *gguf, fsdp_text *out,
                                   fsdp_error *err)
{
    const fsdp_value *pattern =
        find_below(sd, gguf->architecture, "attention.sliding_window_pattern");
    const fsdp_value *count = find_below(sd, gguf->architecture, "block_count");
    double layers = number_of(count);
    double period = is_number(pattern) ? number_of(pattern) : gguf->window_period;
    bool is_list = pattern && pattern->kind == FSDP_VALUE_LIST;
    if (!(layers >= 0 && layers <= FSDP_CONFIG_LIST) ||
        (is_list && (double)pattern->as.list.count < layers) ||
        !(period >= 0 && period <= FSDP_CONFIG_LIST && floor(period) == period))
        return fsdp_fail(err, FSDP_ERR_DAMAGED,
                         "'%s.attention.sliding_window_pattern' does not fit %g layers",
                         gguf->architecture, layers);
    for (size_t i = 0; (double)i < layers; i++) {
        const fsdp_value *item = is_list ? &pattern->as.list.items[i] : NULL;
        bool has_one = item          ? is_number(item) && number_of(item) != 0
                       : period == 0 ? true
                                     : (i + 1) % (size_t)period != 0;
        fsdp_text_addf(out, "%s\"%s\"", i == 0 ? ",\n  \"layer_types\": [" : ", ",
                       has_one && window_of(sd, gguf->architecture) > 0 ? "sliding_attention"
                                                                        : "full_attention");
    }
    fsdp_text_addf(out, "]");
    return FSDP_OK;
}

/* llama.cpp slides where a file says so, which the family needs a member for. */
static fsdp_status add_windows(const fsdp_sd *sd, const fsdp_gguf_names *gguf, fsdp_text *out,
                               fsdp_error *err)
{
    if (gguf->window == FSDP_WINDOW_EVERY)
        return add_layer_types(sd, gguf, out, err);
    if (window_of(sd, gguf->architecture) <= 0 || has_key(gguf, "attention.sliding_window"))
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_USAGE,
                     "cannot make a config.json of a '%s' with attention.sliding_window; "
                     "--copy-from DIR takes one",
                     gguf->architecture);
}

/* --- the whole ----------------------------------------------------------------------------------- */

/* Finds the family of the files of an architecture. One with experts has a key for their number, one with a
 * window for its length. */
static fsdp_status find_family(const fsdp_sd *sd, fsdp_arena *arena,
                               const fsdp_architecture **family_out, fsdp_error *err)
{
    const fsdp_value *named = fsdp_gguf_pair(sd, "general.architecture");
    const char *architecture =
        named && named->kind == FSDP_VALUE_STRING ? named->as.bytes.data : "";
    bool has_experts = is_number(find_below(sd, architecture, "expert_count"));
    bool has_window = window_of(sd, architecture) > 0;
    const fsdp_architecture *without = NULL; /* a key for the window */
    for (size_t i = 0;; i++) {
        FSDP_TRY(fsdp_architecture_at(arena, i, family_out, err));
        if (!*family_out)
            break;
        const fsdp_gguf_names *gguf = &(*family_out)->gguf;
        if (!gguf->architecture || gguf->one_way || strcmp(gguf->architecture, architecture) != 0 ||
            has_key(gguf, "expert_count") != has_experts)
            continue;
        if (!has_window || has_key(gguf, "attention.sliding_window"))
            return FSDP_OK;
        without = without ? without : *family_out;
    }
    *family_out = without;
    return without ? FSDP_OK
                   : fsdp_fail(err, FSDP_ERR_USAGE,
                               "cannot make a config.json: the architecture '%.60s' is unknown; "
                               "--copy-from DIR takes the model's",
                               architecture);
}

static fsdp_status add_config(const fsdp_sd *sd, fsdp_arena *arena, fsdp_text *out, fsdp_error *err)
{
    const fsdp_architecture *family;
    FSDP_TRY(find_family(sd, arena, &family, err));
    fsdp_text_addf(out, "{\n  \"architectures\": [\"%s\"],\n  \"model_type\": \"%s\"",
                   family->class_name, family->model_type);
    FSDP_TRY(add_members(sd, family, out, err));
    FSDP_TRY(add_windows(sd, &family->gguf, out, err));
    FSDP_TRY(add_others(sd, family, out, err));
    FSDP_TRY(add_rotary(sd, &family->gguf, out, err));
    FSDP_TRY(add_scaling(sd, family, out, err));
    add_gated(sd, &family->gguf, out);
    add_tensors(sd, out);
    fsdp_text_addf(out, "\n}\n");
    return out->failed ? fsdp_fail_memory(err, "config.json") : FSDP_OK;
}

fsdp_status fsdp_gguf_config_text(const fsdp_sd *sd, fsdp_text *out, fsdp_error *err)
{
    fsdp_arena arena = {0};
    fsdp_status st = add_config(sd, &arena, out, err);
    fsdp_arena_release(&arena);
    return st;
}
