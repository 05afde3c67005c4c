/* The parts of a state dict: see model_part.h. */
#include "statedict/select/model_part.h"

#include "base/core/mem.h"
#include "base/data/name_path.h"

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

static void find_root(fsdp_parts *parts)
{
    bool found = descend_to_model(parts);
    for (int i = 0; i < OUTER_KEYS && !found; i++) {
        const fsdp_parts before = *parts;
        found = descend(parts, outer_keys[i]) && descend_to_model(parts);
        if (!found)
            *parts = before;
    }
    for (int depth = 0; depth < DEEPEST && found; depth++)
        found = descend_to_model(parts);
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

/* Tensors are taken for a trainer's only under names that no layer has. */
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
                                        "extra",    "seed",      "model_args",  "extra_state"};
    for (size_t i = 0; i < sizeof starts / sizeof *starts; i++)
        if (begins(text, size, starts[i]))
            return true;
    bool is_plain = entry->kind == FSDP_ENTRY_VALUE || is_word(text, size, "train");
    return is_plain && is_list_word(text, size, words, sizeof words / sizeof *words);
}

const char *fsdp_part_label_of(const fsdp_parts *parts, const fsdp_entry *entry, size_t *size_out)
{
    const char *name = entry->name;
    size_t size = element_at(entry, 0);
    const char *dot = memchr(name, '.', size);
    size = dot ? (size_t)(dot - name) : size;
    (void)parts;
    if (size + 1 < entry->name_size && is_list_word(name, size, outer_keys, OUTER_KEYS - 1)) {
        name += size + 1;
        size_t rest = entry->name_size - size - 1;
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
    const char *label = fsdp_part_label_of(parts, entry, &size);
    if (is_ema(label, size))
        return FSDP_PART_WEIGHTS;
    if (is_state(entry, label, size))
        return FSDP_PART_STATE;
    if (parts->root_size == 0)
        return FSDP_PART_MODEL;
    return entry->kind == FSDP_ENTRY_VALUE ? FSDP_PART_STATE : FSDP_PART_WEIGHTS;
}

/* Names without a known path may be a model whose own names begin with "model.": then the model is all of
 * it, unless a trainer's parts stand beside it, or its names begin with the key once more. */
static bool is_root_sure(const fsdp_parts *parts)
{
    static const char *const insides[] = {"model.", "transformer.", "lm_head."};
    bool beside = false, doubled = false;
    if (parts->knows_paths)
        return true;
    for (size_t i = 0; i < fsdp_sd_count(parts->sd); i++) {
        const fsdp_entry *entry = fsdp_sd_at(parts->sd, i);
        if (!is_below(entry, parts->root, parts->root_size)) {
            fsdp_parts flat = *parts;
            flat.root_size = 0;
            if (entry->kind != FSDP_ENTRY_VALUE && fsdp_part_of(&flat, entry) == FSDP_PART_MODEL)
                return false;
            beside = true;
            continue;
        }
        for (int k = 0; k < 3; k++)
            doubled = doubled || begins(entry->name + parts->root_size,
                                        entry->name_size - parts->root_size, insides[k]);
    }
    return beside || doubled;
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
        (void)descend_to_model(parts);
        return FSDP_OK;
    }
    return fsdp_fail(err, FSDP_ERR_USAGE,
                     "there is no part '%.100s': no name begins with '%.100s.'", part, part);
}

fsdp_status fsdp_parts_find(const fsdp_sd *sd, bool knows_paths, const char *part,
                            fsdp_parts *parts_out, fsdp_error *err)
{
    *parts_out = (fsdp_parts){.sd = sd, .knows_paths = knows_paths, .root = ""};
    parts_out->state_is_optim = fsdp_sd_state_is_optim(sd);
    if (part)
        return take_part(parts_out, part, err);
    find_root(parts_out);
    if (parts_out->root_size > 0 && !is_root_sure(parts_out))
        parts_out->root_size = 0;
    return FSDP_OK;
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

fsdp_status fsdp_parts_add_rules(const fsdp_parts *parts, fsdp_text *rules, size_t *count_out,
                                 fsdp_error *err)
{
    size_t count = 0;
    if (parts->root_size > 0) {
        fsdp_text_addf(rules, "s/^");
        for (size_t i = 0; i < parts->root_size; i++) {
            if (strchr(".[]()*+?{}|^$\\/", parts->root[i]))
                fsdp_text_addf(rules, "\\");
            fsdp_text_add(rules, parts->root + i, 1);
        }
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

bool fsdp_entry_is_double(const fsdp_sd *sd, const fsdp_entry *entry)
{
    const char *mark = memrchr(entry->name, '#', entry->name_size);
    size_t size = mark ? (size_t)(mark - entry->name) : 0;
    return mark && size + 1 < entry->name_size &&
           strspn(mark + 1, "0123456789") + size + 1 == entry->name_size &&
           fsdp_sd_find(sd, entry->name, size) >= 0;
}
