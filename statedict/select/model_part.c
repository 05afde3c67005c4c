/* The parts of a state dict: see model_part.h. */
#include "statedict/select/model_part.h"

#include "base/core/mem.h"
#include "base/data/name_path.h"
#include "statedict/models/models.h"

#include <stdlib.h>
#include <string.h>
#include <strings.h>

enum { DEEPEST = 4 };

/* Keys under which programs keep the model, the most telling one first. */
static const char *const model_keys[] = {
    "model_state_dict", "model_state", "model_states", "model_weights",
    "state_dict",       "model",       "module"};
/* Keys around such a key. */
static const char *const outer_keys[] = {"app", "checkpoint", "state"};
/* Elements that torch.compile, DDP, FSDP and checkpointing put into names. */
static const char *const wrappers[] = {"_orig_mod", "_fsdp_wrapped_module",
                                       "_checkpoint_wrapped_module", "module", "state_dict"};
enum {
    MODEL_KEYS = sizeof model_keys / sizeof *model_keys,
    OUTER_KEYS = sizeof outer_keys / sizeof *outer_keys,
    WRAPPERS = sizeof wrappers / sizeof *wrappers
};

/* --- elements of names ------------------------------------------------------------------------- */

static bool is_word(const char *text, size_t size, const char *word)
{
    return strlen(word) == size && memcmp(text, word, size) == 0;
}

/* The size of the element of a name that begins at `at`: of the dict key there where nesting is known. */
static size_t element_at(const fsdp_entry *entry, size_t at)
{
    int32_t defaults[FSDP_PATH_DEFAULT_MOST];
    const int32_t *path = entry->path;
    size_t count = entry->path_count, begin = 0;
    if (!path) {
        count = fsdp_path_default(entry->name, entry->name_size, defaults);
        path = defaults;
    }
    for (size_t i = 0; i < count; i++) {
        size_t bytes = fsdp_path_bytes(path[i]);
        if (begin == at)
            return bytes;
        begin += bytes + 1;
    }
    return entry->name_size - at;
}

static bool is_below(const fsdp_entry *entry, const char *root, size_t size)
{
    return entry->name_size > size && (size == 0 || memcmp(entry->name, root, size) == 0);
}

/* --- the model --------------------------------------------------------------------------------- */

static bool is_list_word(const char *text, size_t size, const char *const *words, size_t count)
{
    for (size_t i = 0; i < count; i++)
        if (is_word(text, size, words[i]))
            return true;
    return false;
}

/* The first tensor below the root whose next key is `key`, with more behind it; its root grows by the key. */
static bool descend(fsdp_parts *parts, const char *key)
{
    for (size_t i = 0; i < fsdp_sd_count(parts->sd); i++) {
        const fsdp_entry *entry = fsdp_sd_at(parts->sd, i);
        size_t at = parts->root_size;
        if (entry->kind == FSDP_ENTRY_VALUE || !is_below(entry, parts->root, at))
            continue;
        size_t size = element_at(entry, at);
        if (at + size + 1 < entry->name_size && is_word(entry->name + at, size, key)) {
            parts->root = entry->name;
            parts->root_size = at + size + 1;
            return true;
        }
    }
    return false;
}

static bool descend_to_model(fsdp_parts *parts)
{
    for (int i = 0; i < MODEL_KEYS; i++)
        if (descend(parts, model_keys[i]))
            return true;
    return false;
}

/* --- parts by their names ---------------------------------------------------------------------- */

static bool begins(const char *text, size_t size, const char *start)
{
    size_t n = strlen(start);
    return size >= n && strncasecmp(text, start, n) == 0;
}

static bool is_ema(const char *text, size_t size)
{
    return begins(text, size, "ema") ||
           (size >= 4 && strncasecmp(text + size - 4, "_ema", 4) == 0) ||
           begins(text, size, "shadow_params") || begins(text, size, "swa_");
}

/* A tensor counts as the trainer's only under a name that no layer has, or when it is a scalar of a known
 * name: the "step" or "loss" of a flat dict, not "logit_scale". */
static bool is_state(const fsdp_entry *entry, const char *text, size_t size)
{
    static const char *const starts[] = {"lr_sched",    "scheduler", "dataloader",  "rng",
                                         "cuda_rng",    "torch_rng", "train_state", "loops",
                                         "callbacks",   "metrics",   "data_loader", "random_state",
                                         "grad_scaler", "best_",     "numpy_rng",   "python_rng"};
    static const char *const words[] = {"train",    "random",    "scaler",      "hyper_parameters",
                                        "step",     "steps",     "global_step", "epoch",
                                        "iter",     "iteration", "iter_num",    "loss",
                                        "val_loss", "args",      "config",      "lr",
                                        "extra",    "seed",      "model_args",  "extra_state",
                                        "common"};
    for (size_t i = 0; i < sizeof starts / sizeof *starts; i++)
        if (begins(text, size, starts[i]))
            return true;
    bool is_scalar = entry->ndim == 0 && text + size == entry->name + entry->name_size;
    bool is_plain = entry->kind == FSDP_ENTRY_VALUE || is_scalar || is_word(text, size, "train");
    return is_plain && is_list_word(text, size, words, sizeof words / sizeof *words);
}

/* Megatron keeps objects beside the weights: "decoder.layers.mlp._extra_state/shard_0_2". */
static bool is_sharded_object(const fsdp_entry *entry)
{
    static const char mark[] = "/shard_";
    const char *found = entry->kind == FSDP_ENTRY_VALUE
                            ? memmem(entry->name, entry->name_size, mark, sizeof mark - 1)
                            : NULL;
    size_t digits = found ? strspn(found + sizeof mark - 1, "0123456789._") : 0;
    return digits > 0 && found + sizeof mark - 1 + digits == entry->name + entry->name_size;
}

/* A value of one of Megatron's ranks, whose files are read as one: "tp0.pp1.iteration". */
static bool is_of_rank(const fsdp_entry *entry)
{
    static const char digits[] = "0123456789";
    const char *at = entry->name;
    if (entry->kind != FSDP_ENTRY_VALUE || strncmp(at, "tp", 2) != 0)
        return false;
    at += 2 + strspn(at + 2, digits);
    return strncmp(at, ".pp", 3) == 0 && at[3 + strspn(at + 3, digits)] == '.';
}

/* The bytes of the keys above the model that stand above the entry, too: "model." of "model.ema.w" where the
 * root is "model.model.". */
static size_t shared_keys(const fsdp_parts *parts, const fsdp_entry *entry)
{
    size_t shared = 0;
    if (is_below(entry, parts->root, parts->root_size))
        return 0;
    for (size_t i = 0; i < parts->root_size && i + 1 < entry->name_size; i++) {
        if (entry->name[i] != parts->root[i])
            break;
        if (entry->name[i] == '.')
            shared = i + 1;
    }
    return shared;
}

const char *fsdp_part_label_of(const fsdp_parts *parts, const fsdp_entry *entry, size_t *size_out)
{
    size_t at = shared_keys(parts, entry);
    const char *name = entry->name + at;
    size_t size = element_at(entry, at);
    const char *dot = memchr(name, '.', size);
    size = dot ? (size_t)(dot - name) : size;
    size_t rest = entry->name_size - at;
    if (size + 1 < rest && is_list_word(name, size, outer_keys, OUTER_KEYS - 1)) {
        name += size + 1;
        rest -= size + 1;
        dot = memchr(name, '.', rest);
        size = dot ? (size_t)(dot - name) : rest;
    }
    *size_out = size;
    return name;
}

fsdp_part_kind fsdp_part_of(const fsdp_parts *parts, const fsdp_entry *entry)
{
    size_t size;
    if (parts->root_size > 0 && is_below(entry, parts->root, parts->root_size))
        return FSDP_PART_MODEL;
    if (fsdp_entry_is_optim(entry, parts->state_is_optim))
        return FSDP_PART_OPTIM;
    if (entry->kind == FSDP_ENTRY_VALUE && parts->known.only_tensors)
        return FSDP_PART_STATE;
    const char *label = fsdp_part_label_of(parts, entry, &size);
    if (is_ema(label, size))
        return FSDP_PART_WEIGHTS;
    if (is_state(entry, label, size) || is_sharded_object(entry) || is_of_rank(entry))
        return FSDP_PART_STATE;
    if (parts->root_size == 0)
        return FSDP_PART_MODEL;
    return entry->kind == FSDP_ENTRY_VALUE ? FSDP_PART_STATE : FSDP_PART_WEIGHTS;
}

/* --- the root ---------------------------------------------------------------------------------- */

/* True when no weights of a model lie below the root `outer` beside the root `inner`. */
static bool holds_rest(const fsdp_parts *outer, const fsdp_parts *inner)
{
    for (size_t i = 0; i < fsdp_sd_count(outer->sd); i++) {
        const fsdp_entry *entry = fsdp_sd_at(outer->sd, i);
        size_t at = outer->root_size;
        if (entry->kind == FSDP_ENTRY_VALUE || !is_below(entry, outer->root, at) ||
            is_below(entry, inner->root, inner->root_size))
            continue;
        const fsdp_parts plain = {.sd = outer->sd, .root = ""};
        fsdp_entry rest = *entry;
        rest.name += at;
        rest.name_size -= at;
        rest.path = NULL;
        if (fsdp_part_of(&plain, &rest) == FSDP_PART_MODEL)
            return false;
    }
    return true;
}

/* A model may have a member "model": the root goes deeper only where no weights stay outside. */
static void descend_within(fsdp_parts *parts)
{
    for (int depth = 0; depth < DEEPEST; depth++) {
        fsdp_parts inner = *parts;
        if (!descend_to_model(&inner) || !holds_rest(parts, &inner))
            return;
        *parts = inner;
    }
}

static void find_root(fsdp_parts *parts)
{
    bool found = descend_to_model(parts);
    for (int i = 0; i < OUTER_KEYS && !found; i++) {
        const fsdp_parts before = *parts;
        found = descend(parts, outer_keys[i]) && descend_to_model(parts);
        if (!found)
            *parts = before;
    }
    if (found)
        descend_within(parts);
}

/*
 * "model." in a native checkpoint is the key above the model, or part of the model's own names, as in
 * "model.layers.0" of Llama and "model.transformer.wte" of OLMo. It is the key, which is stripped, only when
 * all weights of the model have it, and one of these is certain:
 *   - entries of a trainer stand beside it: optim.*, or values such as fsdp-train's train.*;
 *   - "lm_head." follows it, which transformers puts below no "model.";
 *   - the element follows it that transformers puts first in the names of config.json's model_type.
 */
static bool is_root_sure(const fsdp_parts *parts, const char *first)
{
    bool is_sure = false;
    if (parts->known.paths)
        return true;
    for (size_t i = 0; i < fsdp_sd_count(parts->sd); i++) {
        const fsdp_entry *entry = fsdp_sd_at(parts->sd, i);
        const char *inner = entry->name + parts->root_size;
        if (!is_below(entry, parts->root, parts->root_size)) {
            fsdp_parts flat = *parts;
            flat.root_size = 0;
            if (entry->kind != FSDP_ENTRY_VALUE && fsdp_part_of(&flat, entry) == FSDP_PART_MODEL)
                return false;
            is_sure = true;
            continue;
        }
        size_t size = entry->name_size - parts->root_size;
        is_sure =
            is_sure || begins(inner, size, "lm_head.") || (first && begins(inner, size, first));
    }
    return is_sure;
}

/* "ema" is also the part of "state_dict_ema" and "ema_model". */
static bool is_part(const char *label, size_t size, const char *part)
{
    size_t n = strlen(part);
    return is_word(label, size, part) ||
           (size > n + 1 && label[size - n - 1] == '_' && memcmp(label + size - n, part, n) == 0) ||
           (size > n + 1 && label[n] == '_' && memcmp(label, part, n) == 0);
}

static fsdp_status take_part(fsdp_parts *parts, const char *part, fsdp_error *err)
{
    find_root(parts); /* its keys stand above other parts, too */
    for (size_t i = 0; i < fsdp_sd_count(parts->sd); i++) {
        const fsdp_entry *entry = fsdp_sd_at(parts->sd, i);
        size_t label_size;
        const char *label = fsdp_part_label_of(parts, entry, &label_size);
        size_t size = (size_t)(label - entry->name) + label_size;
        if (entry->kind == FSDP_ENTRY_VALUE || size + 1 >= entry->name_size ||
            entry->name[size] != '.' || !is_part(label, label_size, part))
            continue;
        parts->root = entry->name;
        parts->root_size = size + 1;
        descend_within(parts);
        return FSDP_OK;
    }
    return fsdp_fail(err, FSDP_ERR_USAGE,
                     "no part is named '%.100s': no name begins with '%.100s.'", part, part);
}

fsdp_status fsdp_parts_find(const fsdp_sd *sd, fsdp_names_known known, const char *part,
                            fsdp_parts *parts_out, fsdp_error *err)
{
    *parts_out = (fsdp_parts){.sd = sd, .known = known, .root = ""};
    parts_out->state_is_optim = fsdp_sd_state_is_optim(sd);
    if (part)
        return take_part(parts_out, part, err);
    find_root(parts_out);
    if (parts_out->root_size == 0)
        return FSDP_OK;
    const fsdp_architecture *model = NULL;
    const char *type = known.model_type ? known.model_type : "";
    fsdp_arena arena = {0};
    fsdp_status st = fsdp_architecture_find(&arena, type, strlen(type), &model, err);
    if (st == FSDP_OK &&
        !is_root_sure(parts_out, model && model->bases[0][0] ? model->bases[0] : NULL))
        parts_out->root_size = 0;
    fsdp_arena_release(&arena);
    return st;
}

/* --- rules that strip --------------------------------------------------------------------------- */

static bool has_element(const char *name, size_t size, const char *word)
{
    size_t n = strlen(word);
    for (size_t at = 0; at + n < size; at++)
        if ((at == 0 || name[at - 1] == '.') && name[at + n] == '.' &&
            memcmp(name + at, word, n) == 0)
            return true;
    return false;
}

static bool is_used(const fsdp_parts *parts, const char *wrapper)
{
    for (size_t i = 0; i < fsdp_sd_count(parts->sd); i++) {
        const fsdp_entry *entry = fsdp_sd_at(parts->sd, i);
        if (entry->kind == FSDP_ENTRY_VALUE || fsdp_part_of(parts, entry) != FSDP_PART_MODEL)
            continue;
        if (has_element(entry->name + parts->root_size, entry->name_size - parts->root_size,
                        wrapper))
            return true;
    }
    return false;
}

/* Adds text that matches itself. */
static void add_literal(fsdp_text *rules, const char *text, size_t size)
{
    for (size_t i = 0; i < size; i++) {
        if (strchr(".[]()*+?{}|^$\\/", text[i]))
            fsdp_text_addf(rules, "\\");
        fsdp_text_add(rules, text + i, 1);
    }
}

fsdp_status fsdp_parts_add_rules(const fsdp_parts *parts, fsdp_text *rules, size_t *count_out,
                                 fsdp_error *err)
{
    size_t count = 0;
    if (parts->root_size > 0) {
        fsdp_text_addf(rules, "s/^");
        add_literal(rules, parts->root, parts->root_size);
        fsdp_text_addf(rules, "//");
        fsdp_text_add(rules, "", 1);
        count++;
    }
    for (int i = 0; i < WRAPPERS; i++) {
        if (!is_used(parts, wrappers[i]))
            continue;
        fsdp_text_addf(rules, "s/(^|\\.)(%s\\.)+/\\1/g", wrappers[i]);
        fsdp_text_add(rules, "", 1);
        count++;
    }
    *count_out = count;
    return rules->failed ? fsdp_fail_memory(err, "rules of names") : FSDP_OK;
}

/* The place of the element "state" in the name of an optimizer's tensor; NULL: it has none. */
static const char *state_of(const fsdp_entry *entry)
{
    static const char element[] = "state.";
    for (size_t at = 0; at + sizeof element - 1 < entry->name_size; at++)
        if ((at == 0 || entry->name[at - 1] == '.') &&
            memcmp(entry->name + at, element, sizeof element - 1) == 0)
            return entry->name + at;
    return NULL;
}

fsdp_status fsdp_parts_add_optim_rule(const fsdp_parts *parts, fsdp_text *rules, size_t *count,
                                      fsdp_error *err)
{
    static const char root[] = "optim.";
    for (size_t i = 0; i < fsdp_sd_count(parts->sd); i++) {
        const fsdp_entry *entry = fsdp_sd_at(parts->sd, i);
        bool is_state =
            entry->kind != FSDP_ENTRY_VALUE && fsdp_part_of(parts, entry) == FSDP_PART_OPTIM;
        const char *state = is_state ? state_of(entry) : NULL;
        size_t size = state ? (size_t)(state - entry->name) : 0;
        if (!state)
            continue;
        if (is_word(entry->name, size, root))
            return FSDP_OK;
        fsdp_text_addf(rules, "s/^");
        add_literal(rules, entry->name, size);
        fsdp_text_addf(rules, "(state|param_groups)\\./%s\\1./", root);
        fsdp_text_add(rules, "", 1);
        (*count)++;
        return rules->failed ? fsdp_fail_memory(err, "rules of names") : FSDP_OK;
    }
    return FSDP_OK;
}
