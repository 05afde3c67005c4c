/*
 * config.json as key-value pairs of GGUF: see gguf_values.h. Keys, and what llama.cpp computes, come from the
 * description of the family (statedict/models).
 */
#include "statedict/gguf_model/gguf_values.h"

#include "base/core/mem.h"
#include "base/text.h"
#include "formats/frameworks.h"
#include "statedict/models/config.h"
#include "statedict/models/rope.h"
#include "statedict/sd/layout_internal.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* --- numbers of config.json -------------------------------------------------------------------- */

/* A key of the family's description with its number. */
typedef struct gguf_number {
    const char *key, *member;
    fsdp_member_kind kind;
    double value;
    bool is_there;
} gguf_number;

typedef struct model_config {
    const char *path;
    const fsdp_value *json;
    fsdp_config formulas; /* the same members, for formulas of the family */
    const fsdp_architecture *family;
    const char *architecture; /* in llama.cpp */
    const fsdp_sd *sd;        /* tensors under the names of GGUF; NULL: not known */
    fsdp_rope rope;        /* of all layers, or where types of layers differ, of full attention */
    fsdp_rope window_rope; /* of layers with a window */
    gguf_number *numbers;
    size_t count;
} model_config;

/* Numbers that tensors tell, the first ones of every model: a default of transformers does not count. */
enum { NEEDED = 4 };
static const char *const of_tensors[] = {
    "block_count",          "embedding_length",           "attention.head_count",
    "context_length",       "feed_forward_length",        "attention.head_count_kv",
    "attention.key_length", "attention.value_length",     "vocab_size",
    "expert_count",         "expert_feed_forward_length", "tokenizer.ggml.token_type_count"};

static bool is_of_tensors(const char *key)
{
    for (size_t i = 0; i < sizeof of_tensors / sizeof *of_tensors; i++)
        if (strcmp(of_tensors[i], key) == 0)
            return true;
    return false;
}

/* NULL: the family has no such key. */
static gguf_number *find_number(const model_config *config, const char *key)
{
    for (size_t i = 0; i < config->count; i++)
        if (strcmp(config->numbers[i].key, key) == 0)
            return &config->numbers[i];
    return NULL;
}

static bool has_number(const model_config *config, const char *key)
{
    const gguf_number *number = find_number(config, key);
    return number && number->is_there;
}

/* 0 where there is none. */
static double number_of(const model_config *config, const char *key)
{
    return has_number(config, key) ? find_number(config, key)->value : 0;
}

static const fsdp_config_member *describe(const model_config *config, const char *member)
{
    return fsdp_architecture_member(config->family, member, strlen(member));
}

/* The name of a formula tells nobody anything: its formula has members of config.json. */
static const char *shown_name(const model_config *config, const char *member)
{
    return member[0] == '$' ? describe(config, member)->otherwise : member;
}

/* Numbers of rotary positions are NAN where there are none. */
static bool take_rope(double number, double *number_out)
{
    if (!isnan(number))
        *number_out = number;
    return !isnan(number);
}

/* Where types of layers differ, scaling is that of full attention alone. */
static fsdp_status read_ropes(model_config *config, fsdp_error *err)
{
    static const char full[] = "full_attention", window[] = "sliding_attention";
    const fsdp_value *json = config->json;
    FSDP_TRY(fsdp_rope_read(json, config->path, &config->rope, err));
    config->window_rope = config->rope;
    if (!config->family->gguf.ropes_differ)
        return FSDP_OK;
    if (!config->rope.differs && config->rope.member &&
        (strcmp(config->rope.member, "rope_parameters") == 0 ||
         fsdp_config_at(json, "rope_parameters")))
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "'%s' has rope_parameters that are not those of types of layers, and it "
                         "is unclear what transformers takes from them; write '%s' and '%s' there",
                         config->path, full, window);
    config->window_rope.kind = FSDP_ROPE_DEFAULT;
    config->window_rope.type = "default";
    if (!config->rope.differs)
        return FSDP_OK;
    FSDP_TRY(fsdp_rope_read_of(json, full, config->path, &config->rope, err));
    return fsdp_rope_read_of(json, window, config->path, &config->window_rope, err);
}

/* A number of config.json, of which those of rotary positions may be in objects. */
static bool read_member(const model_config *config, const char *member, double *number_out)
{
    if (strcmp(member, "rope_theta") == 0)
        return take_rope(config->rope.theta, number_out);
    if (strcmp(member, "original_max_position_embeddings") == 0)
        return take_rope(config->rope.original_context, number_out);
    if (strcmp(member, "rope_local_base_freq") == 0 &&
        !fsdp_config_at(config->json, "rope_local_base_freq"))
        return take_rope(config->window_rope.theta, number_out);
    return fsdp_config_real(config->json, member, number_out);
}

/* The number of a member. A default that names another member is a second name of this one (n_layer). */
static bool find_member(const model_config *config, const char *member, bool takes_default,
                        double *number_out)
{
    const fsdp_config_member *known = describe(config, member), *next = known;
    for (int names = 0; next && names < 4; names++) {
        known = next;
        if (read_member(config, known->name, number_out))
            return true;
        if (known->null && fsdp_config_is_null(config->json, known->name)) {
            *number_out = strtod(known->null, NULL);
            return true;
        }
        next = known->otherwise ? describe(config, known->otherwise) : NULL;
    }
    return known && takes_default &&
           fsdp_config_number(&config->formulas, known->name, number_out, NULL) == FSDP_OK;
}

/* Floats of GGUF are f32. */
static fsdp_status check_number(const model_config *config, const char *member, double number,
                                bool is_float, fsdp_error *err)
{
    bool is_fine = is_float ? isfinite((float)number) : number >= -1 && number <= INT32_MAX;
    return is_fine ? FSDP_OK
                   : fsdp_fail(err, FSDP_ERR_USAGE, "'%s': %s %g is out of range for GGUF",
                               config->path, shown_name(config, member), number);
}

/* Python takes null in place of a flag as false. */
static bool is_null_flag(const model_config *config, const char *member)
{
    const fsdp_config_member *known = describe(config, member);
    return known && known->kind == FSDP_MEMBER_FLAG && !known->null &&
           fsdp_config_is_null(config->json, member);
}

/* A text in place of a number is not the default. */
static fsdp_status check_kind(const model_config *config, const char *member, fsdp_error *err)
{
    const fsdp_value *value = fsdp_config_at(config->json, member);
    if (is_null_flag(config, member))
        return fsdp_fail(err, FSDP_ERR_USAGE, "'%s' says %s null; write true or false",
                         config->path, member);
    double number;
    if (!value)
        return FSDP_OK;
    if (fsdp_config_real(config->json, member, &number))
        return check_number(config, member, number,
                            describe(config, member)->kind == FSDP_MEMBER_REAL, err);
    return fsdp_fail(err, FSDP_ERR_DAMAGED, "'%s': %s is %s, not a number", config->path, member,
                     value->kind == FSDP_VALUE_STRING ? "a text" : "a list or an object");
}

/* Takes the members of config.json for formulas. */
static fsdp_status take_members(model_config *config, const fsdp_config_file *file, fsdp_error *err)
{
    const fsdp_gguf_names *gguf = &config->family->gguf;
    for (size_t i = 0; i < gguf->key_count; i++)
        FSDP_TRY(check_kind(config, gguf->keys[i].member, err));
    return fsdp_config_take(file, &config->formulas, err);
}

static fsdp_status read_numbers(model_config *config, fsdp_error *err)
{
    const fsdp_gguf_names *gguf = &config->family->gguf;
    config->numbers =
        fsdp_arena_alloc(&config->formulas.arena, gguf->key_count, sizeof *config->numbers);
    if (!config->numbers)
        return fsdp_fail_memory(err, config->path);
    for (size_t i = 0; i < gguf->key_count; i++) {
        const fsdp_gguf_key *key = &gguf->keys[i];
        gguf_number *number = &config->numbers[config->count++];
        *number = (gguf_number){
            .key = key->key, .member = key->member, .kind = describe(config, key->member)->kind};
        number->is_there =
            key->member[0] != '$' &&
            find_member(config, key->member, !is_of_tensors(key->key), &number->value);
        if (number->is_there)
            FSDP_TRY(check_number(config, key->member, number->value,
                                  number->kind == FSDP_MEMBER_REAL, err));
    }
    return FSDP_OK;
}

/* Computes the numbers of names that are not members. */
static fsdp_status compute_numbers(model_config *config, fsdp_error *err)
{
    for (size_t i = 0; i < config->count; i++) {
        gguf_number *number = &config->numbers[i];
        if (number->member[0] != '$')
            continue;
        FSDP_TRY(fsdp_config_number(&config->formulas, number->member, &number->value, err));
        FSDP_TRY(check_number(config, number->member, number->value, false, err));
        number->is_there = true;
    }
    return FSDP_OK;
}

/* --- the numbers of the tensors --------------------------------------------------------------- */

static const fsdp_entry *find_tensor(const fsdp_sd *sd, const char *name)
{
    int64_t at = fsdp_sd_find(sd, name, strlen(name));
    const fsdp_entry *entry = at < 0 ? NULL : fsdp_sd_at(sd, (size_t)at);
    return entry && entry->kind != FSDP_ENTRY_VALUE
               ? fsdp_sd_at(sd, fsdp_sd_tensor_of(sd, (size_t)at))
               : NULL;
}

/* The tensor decides where config.json has no such number, and two numbers are a contradiction. */
static fsdp_status set_number(const model_config *config, const char *key, double value,
                              const char *tensor, fsdp_error *err)
{
    gguf_number *number = find_number(config, key);
    if (!number)
        return FSDP_OK;
    if (number->is_there && number->value != value)
        return fsdp_fail(
            err, FSDP_ERR_DAMAGED,
            "'%s' says %s %g, but '%s' has %g; --copy-from takes the config of the same model",
            config->path, number->member, number->value, tensor, value);
    number->is_there = true;
    number->value = value;
    return FSDP_OK;
}

/* A model with an encoder and a decoder has layers of both. */
static bool has_decoder(const model_config *config)
{
    return find_number(config, "decoder_block_count") != NULL;
}

/* Numbers that are a dim of a tensor. */
static fsdp_status take_dims(const model_config *config, const fsdp_sd *sd, fsdp_error *err)
{
    static const char inner[] = "feed_forward_length", of_experts[] = "expert_feed_forward_length";
    const bool is_packed = fsdp_architecture_role(config->family, "gate_up", 0) != NULL;
    const struct {
        const char *tensor;
        int dim;
        const char *key;
    } dims[] = {
        {"enc.blk.0.ffn_up.weight", 0, inner},
        {"blk.0.ssm_norm.weight", 0, "ssm.group_count"},
        {"enc.blk.0.attn_rel_b.weight", 0, "attention.relative_buckets_count"},
        {"enc.blk.0.attn_rel_b.weight", 1, "attention.head_count"},
        {"token_embd.weight", 0, "vocab_size"},
        {"token_embd.weight", 1, "embedding_length"},
        {"position_embd.weight", 0, "context_length"},
        {"token_types.weight", 0, "tokenizer.ggml.token_type_count"},
        {is_packed ? "blk.0.ffn_down.weight" : "blk.0.ffn_up.weight", is_packed, inner},
        {"blk.0.ffn_up_exps.weight", 0, "expert_count"},
        {"blk.0.ffn_up_exps.weight", 1, find_number(config, of_experts) ? of_experts : inner},
    };
    for (size_t i = 0; i < sizeof dims / sizeof *dims; i++) {
        const fsdp_entry *tensor = find_tensor(sd, dims[i].tensor);
        if (tensor && tensor->ndim > dims[i].dim)
            FSDP_TRY(set_number(config, dims[i].key, (double)tensor->shape[dims[i].dim],
                                dims[i].tensor, err));
    }
    return FSDP_OK;
}

/* Counts heads by the rows of queries and keys. */
static fsdp_status take_heads(const model_config *config, const fsdp_sd *sd, fsdp_error *err)
{
    const char *encoder[] = {"enc.blk.0.attn_q.weight", "enc.blk.0.attn_k.weight"};
    const char *usual[] = {"blk.0.attn_q.weight", "blk.0.attn_k.weight"};
    const char *const *names = has_decoder(config) ? encoder : usual;
    const fsdp_entry *queries = find_tensor(sd, names[0]), *keys = find_tensor(sd, names[1]);
    double heads = number_of(config, "attention.head_count");
    if (!queries || !keys || queries->ndim != 2 || keys->ndim != 2 || heads < 1)
        return FSDP_OK;
    double width = (double)queries->shape[0] / heads;
    double groups = (double)keys->shape[0] / width;
    if (width != floor(width) || groups != floor(groups))
        return fsdp_fail(err, FSDP_ERR_DAMAGED,
                         "'%s' says %s %g, and that many are not in the %" PRId64
                         " rows of '%s': --copy-from takes the config of the same model",
                         config->path, find_number(config, "attention.head_count")->member, heads,
                         queries->shape[0], names[0]);
    bool is_usual = !has_number(config, "attention.key_length") && !has_decoder(config) &&
                    width * heads == number_of(config, "embedding_length");
    if (!is_usual) {
        FSDP_TRY(set_number(config, "attention.key_length", width, names[0], err));
        FSDP_TRY(set_number(config, "attention.value_length", width, names[0], err));
    }
    return set_number(config, "attention.head_count_kv", groups, names[1], err);
}

/* The largest number after `begin` among the names of tensors; -1: there is none. */
static int64_t find_last_layer(const fsdp_sd *sd, const char *begin)
{
    const size_t begin_size = strlen(begin);
    int64_t most = -1, layer;
    for (size_t i = 0; i < fsdp_sd_count(sd); i++) {
        const fsdp_entry *entry = fsdp_sd_at(sd, i);
        char name[32];
        size_t size = entry->name_size < sizeof name - 1 ? entry->name_size : sizeof name - 1;
        memcpy(name, entry->name, size);
        name[size] = '\0';
        if (entry->kind != FSDP_ENTRY_VALUE && strncmp(name, begin, begin_size) == 0 &&
            sscanf(name + begin_size, "%9" SCNd64 ".", &layer) == 1 && layer > most)
            most = layer;
    }
    return most;
}

/* Layers after those of config.json predict further tokens, and have a key of their own in some families. */
static fsdp_status count_layers(const model_config *config, const fsdp_sd *sd, fsdp_error *err)
{
    double count = (double)find_last_layer(sd, has_decoder(config) ? "enc.blk." : "blk.") + 1;
    gguf_number *layers = find_number(config, "block_count");
    gguf_number *further = find_number(config, "nextn_predict_layers");
    if (count < 1 || !layers)
        return FSDP_OK;
    bool has_more = layers->is_there && count > layers->value;
    if (has_more && !further)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "'%s' says %s %g, but there are tensors of %g layers, and llama.cpp "
                         "computes all of them; convert the copy without the further ones that "
                         "--to hf -X 'layers\\.%g\\.' makes",
                         config->path, layers->member, layers->value, count, layers->value);
    if (has_more) {
        further->is_there = true;
        further->value = count - layers->value;
    }
    layers->is_there = true;
    layers->value = count;
    return FSDP_OK;
}

static fsdp_status count_decoder(const model_config *config, const fsdp_sd *sd, fsdp_error *err)
{
    const int64_t last = find_last_layer(sd, "dec.blk.");
    char name[32];
    if (!has_decoder(config))
        return FSDP_OK;
    if (last < 0)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "the model has no tensors of a decoder, but llama.cpp computes every '%s' "
                         "with one",
                         config->architecture);
    snprintf(name, sizeof name, "dec.blk.%" PRId64, last);
    return set_number(config, "decoder_block_count", (double)last + 1, name, err);
}

static fsdp_status check_layers(const model_config *config, fsdp_error *err)
{
    double count = number_of(config, "block_count");
    if (number_of(config, "decoder_block_count") > count)
        count = number_of(config, "decoder_block_count");
    return count <= FSDP_CONFIG_LIST
               ? FSDP_OK
               : fsdp_fail(err, FSDP_ERR_LIMIT,
                           "'%s': a model of %g layers is not written; the most is %d",
                           config->path, count, FSDP_CONFIG_LIST);
}

/* Takes numbers that config.json leaves out from tensors, or where they follow from others. */
static fsdp_status complete(const model_config *config, const fsdp_sd *sd, fsdp_error *err)
{
    gguf_number *further = find_number(config, "nextn_predict_layers");
    if (further)
        further->is_there = false; /* checkpoints without these layers have the member, too */
    if (sd) {
        FSDP_TRY(count_layers(config, sd, err));
        FSDP_TRY(count_decoder(config, sd, err));
        FSDP_TRY(take_dims(config, sd, err));
        FSDP_TRY(take_heads(config, sd, err));
    }
    for (size_t i = 0; i < NEEDED; i++) {
        const gguf_number *number = find_number(config, of_tensors[i]);
        bool is_computed = number && number->member[0] == '$';
        if (!is_computed && number_of(config, of_tensors[i]) < 1)
            return fsdp_fail(err, FSDP_ERR_USAGE, "'%s' has no %s, which GGUF needs", config->path,
                             number ? number->member : of_tensors[i]);
    }
    gguf_number *inner = find_number(config, "feed_forward_length");
    if (inner && !inner->is_there) {
        inner->value = 4 * number_of(config, "embedding_length");
        inner->is_there = true;
    }
    return check_layers(config, err);
}

/* --- what llama.cpp has no key for ------------------------------------------------------------ */

static fsdp_status refuse(const model_config *config, const char *what, fsdp_error *err)
{
    return fsdp_fail(err, FSDP_ERR_USAGE,
                     "'%s' says %s, but llama.cpp has no key for that in '%s'; --copy-from DIR "
                     "with a config.json without it writes the model without it",
                     config->path, what, config->architecture);
}

static fsdp_status refuse_number(const model_config *config, const char *member, double number,
                                 fsdp_error *err)
{
    char what[96];
    snprintf(what, sizeof what, "%.64s %g", member, number);
    return refuse(config, what, err);
}

/* Formulas count with the numbers that tensors told, too. */
static void take_numbers(model_config *config)
{
    for (size_t i = 0; i < config->count; i++)
        for (size_t k = 0; k < config->formulas.count; k++)
            if (config->numbers[i].is_there && config->numbers[i].kind != FSDP_MEMBER_REAL &&
                strcmp(config->formulas.values[k].name, config->numbers[i].member) == 0) {
                config->formulas.values[k].is_there = true;
                config->formulas.values[k].number = (int64_t)config->numbers[i].value;
            }
}

static fsdp_status refuse_fixed(const model_config *config, const char *member, double number,
                                double fixed, fsdp_error *err)
{
    return fsdp_fail(err, FSDP_ERR_USAGE,
                     "'%s' says %s %g, but llama.cpp computes every '%s' with %g", config->path,
                     shown_name(config, member), number, config->architecture, fixed);
}

/* NAN: the item of a list is not a number, nor true or false. */
static double number_of_item(const fsdp_value *item)
{
    return item->kind == FSDP_VALUE_I64    ? (double)item->as.i64
           : item->kind == FSDP_VALUE_BOOL ? (double)item->as.boolean
           : item->kind == FSDP_VALUE_F64  ? item->as.f64
                                           : NAN;
}

/* Compares a list with the numbers, which are those of transformers where there is no list. */
static fsdp_status check_fixed_list(const model_config *config, const fsdp_gguf_fixed *fixed,
                                    fsdp_error *err)
{
    const fsdp_value *list = fsdp_config_at(config->json, fixed->member);
    size_t i = 0, count = list && list->kind == FSDP_VALUE_LIST ? list->as.list.count : 0;
    const char *at = fixed->number;
    for (char *end; i < count; i++, at = end) {
        double wanted = strtod(at, &end);
        if (end == at || number_of_item(&list->as.list.items[i]) != wanted)
            break;
    }
    return !list || (i == count && *at == '\0')
               ? FSDP_OK
               : fsdp_fail(err, FSDP_ERR_USAGE,
                           "'%s' says another %s than [%s], with which llama.cpp computes every "
                           "'%s'",
                           config->path, fixed->member, fixed->number, config->architecture);
}

/* Compares each layer's item of a list, which may be true or false. */
static fsdp_status check_fixed_layers(const model_config *config, const fsdp_gguf_fixed *fixed,
                                      fsdp_error *err)
{
    const fsdp_value *list = fsdp_config_at(config->json, fixed->member);
    bool is_list = list && list->kind == FSDP_VALUE_LIST;
    double layers = number_of(config, "block_count"), wanted;
    for (size_t i = 0; is_list && i < list->as.list.count && (double)i < layers; i++) {
        double number = number_of_item(&list->as.list.items[i]);
        FSDP_TRY(fsdp_formula_number(&config->formulas, fixed->number, (int64_t)i, &wanted, err));
        if (number != wanted)
            return fsdp_fail(
                err, FSDP_ERR_USAGE,
                "'%s' says %s %g for layer %zu, but llama.cpp computes every '%s' with %g "
                "there",
                config->path, fixed->member, number, i, config->architecture, wanted);
    }
    return FSDP_OK;
}

static fsdp_status check_fixed_word(const model_config *config, const fsdp_gguf_fixed *fixed,
                                    fsdp_error *err)
{
    const char *word = fsdp_config_word(config->json, fixed->member);
    if (!word || strcmp(word, fixed->number) == 0)
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_USAGE,
                     "'%s' says %s '%.64s', but llama.cpp computes every '%s' with '%s'",
                     config->path, fixed->member, word, config->architecture, fixed->number);
}

/* Members for which llama.cpp has one number, or one word, in all models of the family. */
static fsdp_status check_fixed(const model_config *config, fsdp_error *err)
{
    const fsdp_gguf_names *gguf = &config->family->gguf;
    for (size_t i = 0; i < gguf->fixed_count; i++) {
        const fsdp_gguf_fixed *fixed = &gguf->fixed[i];
        double number, wanted;
        if (describe(config, fixed->member)->kind == FSDP_MEMBER_REALS) {
            FSDP_TRY(check_fixed_list(config, fixed, err));
            continue;
        }
        if (describe(config, fixed->member)->kind == FSDP_MEMBER_WORD) {
            FSDP_TRY(check_fixed_word(config, fixed, err));
            continue;
        }
        if (strstr(fixed->number, "layer ")) {
            FSDP_TRY(check_fixed_layers(config, fixed, err));
            continue;
        }
        FSDP_TRY(fsdp_formula_number(&config->formulas, fixed->number, 0, &wanted, err));
        if (wanted != 0 && is_null_flag(config, fixed->member))
            return refuse_fixed(config, fixed->member, 0, wanted, err);
        if (fsdp_config_number(&config->formulas, fixed->member, &number, NULL) == FSDP_OK &&
            number != wanted)
            return refuse_fixed(config, fixed->member, number, wanted, err);
    }
    return FSDP_OK;
}

/* Numbers without which llama.cpp computes something else. */
static fsdp_status check_needed(const model_config *config, fsdp_error *err)
{
    for (size_t i = 0; i < config->count; i++) {
        const gguf_number *number = &config->numbers[i];
        if (config->family->gguf.keys[i].is_needed && (!number->is_there || number->value == 0))
            return fsdp_fail(err, FSDP_ERR_USAGE,
                             "'%s' says %s null or 0, but llama.cpp computes no '%s' without it",
                             config->path, number->member, config->architecture);
    }
    return FSDP_OK;
}

/* GPT-NeoX has two names for the base of rotary frequencies. */
static fsdp_status check_base(const model_config *config, fsdp_error *err)
{
    const gguf_number *base = find_number(config, "rope.freq_base");
    double own, theta = config->rope.theta;
    if (!base || strcmp(base->member, "rope_theta") == 0 || isnan(theta) ||
        !fsdp_config_real(config->json, base->member, &own) || own == theta)
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_USAGE, "'%s' says %s %g and rope_theta %g; leave one out",
                     config->path, base->member, own, theta);
}

/* llama.cpp takes the embedding for the output that a file lacks, but not for all families. */
static fsdp_status check_output(const model_config *config, fsdp_error *err)
{
    const fsdp_gguf_names *gguf = &config->family->gguf;
    double is_tied = 0;
    (void)find_member(config, "tie_word_embeddings", true, &is_tied);
    if (gguf->has_no_output && is_tied == 0)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "'%s' says tie_word_embeddings false, but llama.cpp takes the embedding "
                         "for the output of every '%s'",
                         config->path, config->architecture);
    if (!gguf->needs_output || is_tied == 0)
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_USAGE,
                     "'%s' says tie_word_embeddings true, but llama.cpp loads no '%s' whose output "
                     "is the embedding",
                     config->path, config->architecture);
}

/* llama.cpp scales attention of YaRN by 0.1 ln(factor) + 1. */
static bool has_usual_attention(const fsdp_rope *rope, double factor)
{
    double usual = 1 + 0.1 * log(factor);
    if (!isnan(rope->attention_factor))
        return fabs(rope->attention_factor - usual) <= 1e-6 * usual;
    return isnan(rope->mscale) && isnan(rope->mscale_all_dim);
}

/* Of families with mscale llama.cpp scales attention by 0.1 ln(factor) mscale_all_dim + 1, twice, and the
 * rotary positions not at all, as transformers does where both numbers are the same one. */
static bool has_usual_mscale(const fsdp_rope *rope)
{
    return isnan(rope->attention_factor) && rope->mscale_all_dim > 0 &&
           rope->mscale == rope->mscale_all_dim;
}

/* transformers rounds the range of frequencies where config.json does not say truncate false. */
static fsdp_status check_yarn(const model_config *config, double factor, fsdp_error *err)
{
    const bool is_unrounded = config->family->gguf.is_unrounded;
    const double truncate = isnan(config->rope.truncate) ? 1 : config->rope.truncate;
    const struct {
        const char *name;
        double number, value;
    } fixed[] = {{"beta_fast", config->rope.beta_fast, 32},
                 {"beta_slow", config->rope.beta_slow, 1},
                 {"truncate", truncate, is_unrounded ? 0 : 1}};
    for (size_t i = 0; i < sizeof fixed / sizeof *fixed; i++)
        if (!isnan(fixed[i].number) && fixed[i].number != fixed[i].value)
            return refuse_number(config, fixed[i].name, fixed[i].number, err);
    bool is_usual = config->family->gguf.has_mscale ? has_usual_mscale(&config->rope)
                                                    : has_usual_attention(&config->rope, factor);
    return is_usual ? FSDP_OK : refuse(config, "an attention_factor or mscale of YaRN", err);
}

/* The part of a head that is rotated. */
static double find_rotary(const model_config *config)
{
    double part = 1;
    const char *member = config->family->gguf.rotary;
    if (!take_rope(config->rope.partial_factor, &part) && member)
        (void)find_member(config, member, true, &part);
    return part;
}

static double head_width(const model_config *config)
{
    return has_number(config, "attention.key_length")
               ? number_of(config, "attention.key_length")
               : number_of(config, "embedding_length") / number_of(config, "attention.head_count");
}

/* transformers rounds down the width that is rotated, and rotates pairs. */
static fsdp_status check_rotary(const model_config *config, fsdp_error *err)
{
    double part = find_rotary(config), width = floor(head_width(config) * part);
    bool is_fine = part == 1 || (config->family->gguf.rotary && part > 0 && part < 1 &&
                                 width >= 2 && fmod(width, 2) == 0);
    return is_fine ? FSDP_OK : refuse_number(config, "partial_rotary_factor", part, err);
}

/* The factors of long and short contexts: a number for each pair of the rotated part of a head. */
static fsdp_status check_long_factors(const model_config *config, fsdp_error *err)
{
    const fsdp_value *lists[] = {config->rope.long_factor, config->rope.short_factor};
    const double pairs = floor(head_width(config) * find_rotary(config)) / 2;
    for (int i = 0; i < 2; i++)
        if (!lists[i] || lists[i]->kind != FSDP_VALUE_LIST ||
            (double)lists[i]->as.list.count != pairs || pairs > FSDP_ROPE_MOST)
            return fsdp_fail(err, FSDP_ERR_DAMAGED, "'%s': %s_factor is not a list of %g numbers",
                             config->path, i == 0 ? "long" : "short", pairs);
    return config->rope.original_context > 1 ? FSDP_OK
                                             : fsdp_fail(err, FSDP_ERR_USAGE,
                                                         "'%s' says rope_type 'longrope' without "
                                                         "original_max_position_embeddings",
                                                         config->path);
}

/* Computes how transformers scales attention: by the logarithm of how much longer the context became. */
static double long_attention(const model_config *config)
{
    const fsdp_rope *rope = &config->rope;
    double factor = isnan(rope->factor)
                        ? number_of(config, "context_length") / rope->original_context
                        : rope->factor;
    if (!isnan(rope->attention_factor))
        return rope->attention_factor;
    return factor <= 1 ? 1 : sqrt(1 + log(factor) / log(rope->original_context));
}

/* Layers with a window have a base of their own where a key says it, and llama.cpp scales none of them, but
 * for YaRN's scale of attention in models with that key. */
static fsdp_status check_window_rope(const model_config *config, fsdp_error *err)
{
    static const char base[] = "rope.freq_base_swa";
    const fsdp_rope *rope = &config->rope, *windows = &config->window_rope;
    if (!config->family->gguf.ropes_differ)
        return FSDP_OK;
    if (windows->kind != FSDP_ROPE_DEFAULT ||
        (rope->kind == FSDP_ROPE_YARN && find_number(config, base)))
        return refuse(config, "a scaling of rotary positions in layers of sliding attention", err);
    double one = number_of(config, "rope.freq_base"), other = one;
    if (!find_number(config, base) && take_rope(windows->theta, &other) && other != one)
        return refuse(config, "another rope_theta for layers of sliding attention", err);
    return FSDP_OK;
}

static fsdp_status check_rope(const model_config *config, fsdp_error *err)
{
    const fsdp_rope *rope = &config->rope;
    bool is_yarn = rope->kind == FSDP_ROPE_YARN;
    bool has_key = is_yarn || (rope->kind == FSDP_ROPE_LINEAR && !config->family->gguf.has_mscale);
    bool is_plain = rope->kind == FSDP_ROPE_DEFAULT ||
                    (rope->kind == FSDP_ROPE_LLAMA3 && config->family->gguf.has_factors);
    FSDP_TRY(check_rotary(config, err));
    if (config->family->gguf.is_scaled && !rope->member)
        return fsdp_fail(
            err, FSDP_ERR_USAGE,
            "'%s' has neither rope_parameters nor rope_scaling, for which transformers "
            "has YaRN's numbers in '%s'; write them there",
            config->path, config->family->model_type);
    if (rope->differs)
        return refuse(config, "rope_parameters for several types of layers", err);
    FSDP_TRY(check_window_rope(config, err));
    if (rope->kind == FSDP_ROPE_LONGROPE && config->family->gguf.has_long_factors)
        return check_long_factors(config, err);
    if (!has_key && !is_plain) {
        char what[96];
        snprintf(what, sizeof what, "rope_type '%.64s'", rope->type);
        return refuse(config, what, err);
    }
    if (has_key && !(rope->factor > 0))
        return fsdp_fail(err, FSDP_ERR_USAGE, "'%s' says rope_type '%s' without a factor",
                         config->path, rope->type);
    return is_yarn ? check_yarn(config, rope->factor, err) : FSDP_OK;
}

/* Whether a type of layers slides; true, too, where more layers than those of full attention do. */
static bool has_sliding_layers(const model_config *config)
{
    const fsdp_value *types = fsdp_config_at(config->json, "layer_types");
    double full = 0;
    if (!types || types->kind != FSDP_VALUE_LIST)
        return !find_member(config, "max_window_layers", true, &full) ||
               full < number_of(config, "block_count");
    for (size_t i = 0; i < types->as.list.count; i++) {
        const fsdp_value *type = &types->as.list.items[i];
        if (type->kind == FSDP_VALUE_STRING &&
            fsdp_bytes_are(type->as.bytes.data, type->as.bytes.size, "sliding_attention"))
            return true;
    }
    return false;
}

/* Reads whether a layer has a window: layer_types say it, or a period. */
static bool has_window(const model_config *config, size_t layer)
{
    const fsdp_value *types = fsdp_config_at(config->json, "layer_types");
    double period = config->family->gguf.window_period;
    if (types)
        return fsdp_bytes_are(types->as.list.items[layer].as.bytes.data,
                              types->as.list.items[layer].as.bytes.size, "sliding_attention");
    (void)find_member(config, "sliding_window_pattern", true, &period);
    return period < 1 || fmod((double)layer + 1, period) != 0;
}

static fsdp_status check_layer_types(const model_config *config, size_t layers, fsdp_error *err)
{
    const fsdp_value *types = fsdp_config_at(config->json, "layer_types");
    if (types && (types->kind != FSDP_VALUE_LIST || types->as.list.count < layers))
        return fsdp_fail(err, FSDP_ERR_DAMAGED, "'%s': layer_types is not a list of %zu layers",
                         config->path, layers);
    for (size_t i = 0; types && i < layers; i++) {
        const fsdp_value *type = &types->as.list.items[i];
        if (type->kind != FSDP_VALUE_STRING ||
            (!fsdp_bytes_are(type->as.bytes.data, type->as.bytes.size, "sliding_attention") &&
             !fsdp_bytes_are(type->as.bytes.data, type->as.bytes.size, "full_attention")))
            return refuse(config, "other layer_types than sliding_attention and full_attention",
                          err);
    }
    return FSDP_OK;
}

/* llama.cpp has a window in all layers but each of a period, or where a key lists them. */
static fsdp_status check_windows(const model_config *config, fsdp_error *err)
{
    const fsdp_gguf_names *gguf = &config->family->gguf;
    size_t layers = (size_t)number_of(config, "block_count"), count = 0;
    gguf_number *window = find_number(config, "attention.sliding_window");
    bool is_usual = true;
    FSDP_TRY(check_layer_types(config, layers, err));
    for (size_t i = 0; i < layers; i++) {
        bool has_one = has_window(config, i);
        count += has_one;
        is_usual = is_usual && has_one == ((i + 1) % (size_t)gguf->window_period != 0);
    }
    if (count > 0 && (!window || !window->is_there || window->value <= 0))
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "'%s' has layers of sliding attention, but no sliding_window",
                         config->path);
    if (count == 0 && gguf->lists_windows)
        return fsdp_fail(
            err, FSDP_ERR_USAGE,
            "'%s' has no layer of sliding attention, and llama.cpp has no '%s' without "
            "one",
            config->path, config->family->model_type);
    if (is_usual || gguf->lists_windows)
        return FSDP_OK;
    if (count > 0 || !window || gguf->keys[window - config->numbers].is_needed)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "'%s' has other layer_types than llama.cpp, which gives a window to all "
                         "layers of '%s' but each whose number is a multiple of %d",
                         config->path, config->architecture, gguf->window_period);
    window->is_there = false;
    return FSDP_OK;
}

/* A window that is as long as the context changes nothing. */
static fsdp_status check_window(const model_config *config, fsdp_error *err)
{
    double window, used = 0, length = number_of(config, "context_length");
    bool is_used = config->family->gguf.window == FSDP_WINDOW_ALWAYS;
    if (config->family->gguf.window == FSDP_WINDOW_EVERY)
        return check_windows(config, err);
    if (config->family->gguf.window == FSDP_WINDOW_IF_USED)
        is_used = find_member(config, "use_sliding_window", true, &used) && used != 0 &&
                  has_sliding_layers(config);
    if (!is_used || !find_member(config, "sliding_window", true, &window) || window <= 0 ||
        window >= length)
        return FSDP_OK;
    bool is_said = fsdp_config_at(config->json, "sliding_window") != NULL;
    return fsdp_fail(err, FSDP_ERR_USAGE,
                     "'%s' %s sliding_window %.0f in a context of %.0f, but llama.cpp has no key "
                     "for that in '%s'; --copy-from DIR with a config.json that has null "
                     "there writes the model without",
                     config->path, is_said ? "says" : "has no sliding_window, which means", window,
                     length, config->architecture);
}

static bool has_rope(const model_config *config)
{
    return find_number(config, "rope.freq_base") != NULL;
}

/* The first of these names that the family has counts. */
static fsdp_status check_activation(const model_config *config, fsdp_error *err)
{
    static const char *const members[] = {"hidden_activation", "hidden_act", "activation_function",
                                          "activation"};
    size_t at = 0;
    while (at < sizeof members / sizeof *members && !describe(config, members[at]))
        at++;
    const char *word =
        at < sizeof members / sizeof *members ? fsdp_config_word(config->json, members[at]) : NULL;
    char what[96];
    if (!word || fsdp_framework_matches(config->family->gguf.activations, word, NULL))
        return FSDP_OK;
    snprintf(what, sizeof what, "%s '%.64s'", members[at], word);
    return refuse(config, what, err);
}

/* llama.cpp tells the activation of some families from a tensor, and config.json in two members. */
static fsdp_status check_gated(const model_config *config, fsdp_error *err)
{
    static const char *const members[] = {"feed_forward_proj", "dense_act_fn"};
    const fsdp_gguf_names *gguf = &config->family->gguf;
    if (!gguf->gate || !config->sd)
        return FSDP_OK;
    const bool has_gate = find_tensor(config->sd, gguf->gate) != NULL;
    const char *words = has_gate ? gguf->gated : gguf->activations;
    for (size_t i = 0; i < sizeof members / sizeof *members; i++) {
        const fsdp_config_member *member = describe(config, members[i]);
        const char *word = fsdp_config_word(config->json, members[i]);
        if (!word && member)
            word = member->otherwise;
        if (word && !fsdp_framework_matches(words, word, NULL))
            return fsdp_fail(err, FSDP_ERR_USAGE,
                             "'%s' says %s '%.64s', but llama.cpp computes a '%s' that %s the "
                             "tensor '%s' with '%.*s'",
                             config->path, members[i], word, config->architecture,
                             has_gate ? "has" : "lacks", gguf->gate, (int)strcspn(words, "|"),
                             words);
    }
    return FSDP_OK;
}

/* llama.cpp makes as many layers as the encoder has, and each holds one of the decoder, too. */
static fsdp_status check_decoder(const model_config *config, fsdp_error *err)
{
    const double encoder = number_of(config, "block_count");
    const double decoder = number_of(config, "decoder_block_count");
    return decoder <= encoder
               ? FSDP_OK
               : fsdp_fail(err, FSDP_ERR_USAGE,
                           "'%s' has %g layers in the encoder and %g in the decoder, but llama.cpp "
                           "loads no '%s' with more layers in the decoder",
                           config->path, encoder, decoder, config->architecture);
}

static fsdp_status check_told(const model_config *config, fsdp_error *err)
{
    FSDP_TRY(check_decoder(config, err));
    FSDP_TRY(check_activation(config, err));
    FSDP_TRY(check_gated(config, err));
    FSDP_TRY(check_window(config, err));
    FSDP_TRY(check_needed(config, err));
    FSDP_TRY(check_fixed(config, err));
    FSDP_TRY(check_output(config, err));
    FSDP_TRY(check_base(config, err));
    return has_rope(config) ? check_rope(config, err) : FSDP_OK;
}

/* --- pairs ------------------------------------------------------------------------------------ */

/* Readers ask for a float, a whole number or a boolean. */
static fsdp_status add_number(fsdp_named_values *out, const char *architecture, const char *key,
                              double number, fsdp_member_kind kind, fsdp_error *err)
{
    char name[FSDP_GGUF_KEY];
    fsdp_gguf_spell_key(name, architecture, key);
    fsdp_value value = kind == FSDP_MEMBER_REAL   ? fsdp_value_f64((double)(float)number)
                       : kind == FSDP_MEMBER_FLAG ? fsdp_value_bool(number != 0)
                                                  : fsdp_value_i64((int64_t)number);
    return fsdp_named_values_add(out, name, &value, err);
}

static fsdp_status add_rope(const model_config *config, fsdp_named_values *out, fsdp_error *err)
{
    const fsdp_rope *rope = &config->rope;
    const char *architecture = config->architecture;
    if (!find_number(config, "rope.dimension_count"))
        FSDP_TRY(add_number(out, architecture, "rope.dimension_count",
                            head_width(config) * find_rotary(config), FSDP_MEMBER_WHOLE, err));
    if (rope->kind == FSDP_ROPE_LONGROPE)
        return add_number(out, architecture, "rope.scaling.attn_factor", long_attention(config),
                          FSDP_MEMBER_REAL, err);
    bool is_yarn = rope->kind == FSDP_ROPE_YARN;
    if (!is_yarn && rope->kind != FSDP_ROPE_LINEAR)
        return FSDP_OK;
    char name[128];
    double length = number_of(config, "context_length");
    snprintf(name, sizeof name, "%s.rope.scaling.type", architecture);
    FSDP_TRY(fsdp_named_values_add_text(out, name, rope->type, err));
    FSDP_TRY(check_number(config, "factor", rope->factor, true, err));
    FSDP_TRY(
        add_number(out, architecture, "rope.scaling.factor", rope->factor, FSDP_MEMBER_REAL, err));
    if (take_rope(rope->original_context, &length))
        FSDP_TRY(check_number(config, "original_max_position_embeddings", length, false, err));
    if (!is_yarn)
        return FSDP_OK;
    FSDP_TRY(add_number(out, architecture, "rope.scaling.original_context_length", length,
                        FSDP_MEMBER_WHOLE, err));
    return config->family->gguf.has_mscale
               ? add_number(out, architecture, "rope.scaling.yarn_log_multiplier",
                            0.1 * rope->mscale_all_dim, FSDP_MEMBER_REAL, err)
               : FSDP_OK;
}

/* The layers that have a window, where llama.cpp reads a list of them. */
static fsdp_status add_windows(const model_config *config, fsdp_named_values *out, fsdp_error *err)
{
    char name[128];
    int64_t layers = (int64_t)number_of(config, "block_count");
    fsdp_value list = {.kind = FSDP_VALUE_NULL};
    if (!config->family->gguf.lists_windows || !has_number(config, "attention.sliding_window"))
        return FSDP_OK;
    FSDP_TRY(fsdp_value_set_items(&list, FSDP_VALUE_LIST, (size_t)layers, err));
    for (int64_t i = 0; i < layers; i++)
        list.as.list.items[i] = fsdp_value_bool(has_window(config, (size_t)i));
    snprintf(name, sizeof name, "%s.attention.sliding_window_pattern", config->architecture);
    return fsdp_named_values_add(out, name, &list, err);
}

static fsdp_status add_pairs(const model_config *config, const char *directory,
                             fsdp_named_values *out, fsdp_error *err)
{
    size_t size = strlen(directory);
    while (size > 0 && directory[size - 1] == '/')
        size--;
    size_t first = size;
    while (first > 0 && directory[first - 1] != '/')
        first--;
    char name[200];
    snprintf(name, sizeof name, "%.*s", (int)(size - first), directory + first);
    FSDP_TRY(fsdp_named_values_add_text(out, "general.architecture", config->architecture, err));
    FSDP_TRY(fsdp_named_values_add_text(out, "general.type", "model", err));
    FSDP_TRY(fsdp_named_values_add_text(out, "general.name",
                                        fsdp_utf8_valid(name, strlen(name)) ? name : "model", err));
    for (size_t i = 0; i < config->count; i++)
        if (config->numbers[i].is_there)
            FSDP_TRY(add_number(out, config->architecture, config->numbers[i].key,
                                config->numbers[i].value, config->numbers[i].kind, err));
    FSDP_TRY(add_windows(config, out, err));
    return has_rope(config) ? add_rope(config, out, err) : FSDP_OK;
}

/* A number, or the first of a list of them (eos_token_id); true is 1. */
static bool read_number(const fsdp_value *json, const char *member, double *number_out)
{
    const fsdp_value *value = fsdp_config_at(json, member);
    if (!value || value->kind != FSDP_VALUE_LIST)
        return fsdp_config_real(json, member, number_out);
    const fsdp_value *first = value->as.list.count > 0 ? value->as.list.items : NULL;
    bool is_whole = first && first->kind == FSDP_VALUE_I64;
    if (is_whole || (first && first->kind == FSDP_VALUE_F64))
        *number_out = is_whole ? (double)first->as.i64 : first->as.f64;
    return is_whole || (first && first->kind == FSDP_VALUE_F64);
}

/* -1: config.json has no such token. */
static fsdp_status read_token(const model_config *config, const char *member, int64_t *token_out,
                              fsdp_error *err)
{
    double number = -1;
    if (read_number(config->json, member, &number))
        FSDP_TRY(check_number(config, member, number, false, err));
    *token_out = (int64_t)number;
    return FSDP_OK;
}

static fsdp_status make_pairs(model_config *config, const fsdp_gguf_model *model,
                              fsdp_named_values *out, fsdp_gguf_tokens *tokens_out, fsdp_error *err)
{
    const char *type = fsdp_config_word(config->json, "model_type");
    if (!config->family || !config->family->gguf.architecture)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "'%s' has the model type '%.64s', whose numbers are unknown; "
                         "convert_hf_to_gguf.py of llama.cpp knows more families",
                         config->path, type ? type : "");
    config->architecture = config->family->gguf.architecture;
    FSDP_TRY(read_ropes(config, err));
    FSDP_TRY(take_members(config, model->config, err));
    FSDP_TRY(read_numbers(config, err));
    FSDP_TRY(compute_numbers(config, err));
    *tokens_out = (fsdp_gguf_tokens){.pre = config->family->gguf.pre,
                                     .tokenizer = config->family->gguf.tokenizer};
    FSDP_TRY(read_token(config, "bos_token_id", &tokens_out->bos, err));
    FSDP_TRY(read_token(config, "eos_token_id", &tokens_out->eos, err));
    FSDP_TRY(read_token(config, "pad_token_id", &tokens_out->pad, err));
    FSDP_TRY(complete(config, model->sd, err));
    take_numbers(config);
    FSDP_TRY(check_told(config, err));
    tokens_out->vocab_size =
        has_number(config, "vocab_size") ? (int64_t)number_of(config, "vocab_size") : -1;
    return add_pairs(config, model->directory, out, err);
}

fsdp_status fsdp_gguf_config(const fsdp_gguf_model *model, fsdp_named_values *out,
                             fsdp_gguf_tokens *tokens_out, fsdp_error *err)
{
    model_config config = {.path = fsdp_config_name(model->config),
                           .json = &model->config->json,
                           .family = model->config->architecture,
                           .sd = model->sd};
    fsdp_status st = make_pairs(&config, model, out, tokens_out, err);
    fsdp_arena_release(&config.formulas.arena);
    return st;
}

fsdp_status fsdp_gguf_values(fsdp_io *io, const fsdp_gguf_model *model, fsdp_named_values *out,
                             fsdp_gguf_found *found_out, fsdp_error *err)
{
    fsdp_gguf_tokens tokens = {.pre = "default"};
    *found_out = FSDP_GGUF_NO_TOKENIZER;
    FSDP_TRY(fsdp_gguf_config(model, out, &tokens, err));
    tokens.memory = model->memory;
    return fsdp_gguf_tokenizer(io, model->directory, &tokens, out, found_out, err);
}
