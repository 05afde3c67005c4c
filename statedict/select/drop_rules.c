/* Parses the arguments of --drop and applies them to entries, and to texts: see drop_rules.h, metadata.h. */
#include "statedict/select/drop_rules.h"
#include "base/core/mem.h"
#include "base/data/value_internal.h"
#include "formats/source.h"
#include "statedict/select/expression.h"
#include "statedict/select/metadata.h"

#include <inttypes.h>
#include <string.h>

/* === kinds of tensors ========================================================================= */

static const char quantized[] = "quantized", sparse[] = "sparse", jagged[] = "jagged",
                  meta[] = "meta", untyped[] = "void", flat[] = "flat", other[] = "other";
static const char *const kinds[] = {quantized, sparse, jagged, meta, untyped, flat, other};
enum { KIND_COUNT = sizeof kinds / sizeof *kinds };

/* "quantized, sparse, ..." */
static const char *tensor_kinds(void)
{
    return "quantized, sparse, jagged, meta, void, flat, other";
}

/* The kind of this name, as fsdp_tensor_kind returns it; NULL when there is none. */
static const char *tensor_kind_named(const char *name)
{
    for (int i = 0; i < KIND_COUNT; i++)
        if (strcmp(kinds[i], name) == 0)
            return kinds[i];
    return NULL;
}

/* --- classes ---------------------------------------------------------------------------------- */

/* The first rule whose beginning and end a class has names its kind. The readers' names of classes:
 * formats/torch/torch_names.c, formats/npy/npz_read.c, formats/hdf5_child/hdf5_child_type.c. */
static const struct {
    const char *begin, *end, *kind;
    bool is_subclass; /* without a storage of its own */
} classes[] = {
    {"torch._utils._rebuild_qtensor", "", quantized, false},
    {"torch._utils._rebuild_sparse", "", sparse, false},
    {"torch._utils._rebuild_nested", "", jagged, false},
    {"torch.nested.", "Tensor", jagged, false},
    {"torch._utils._rebuild_meta", "", meta, false},
    {"torch._utils._rebuild_", "", other, false},
    {"torch.", "Tensor", other, true},
    {"torchao.", "Tensor", quantized, true},
    {"torchao.optim.subclass_", "", quantized, true},
    {"torchao.prototype.low_bit_optim.subclass_", "", quantized, true},
    {"optimum.quanto.", "Tensor", quantized, true},
    {"torchtune.", "Tensor", quantized, true},
    {"transformer_engine.", "Tensor", quantized, true},
    {"numpy array of '|V", "'", untyped, false},
    {"numpy array of '<V", "'", untyped, false},
    {"numpy array of '>V", "'", untyped, false},
    {"numpy array of '<f", "'", other, false},
    {"numpy array of '>f", "'", other, false},
    {"numpy array of '<c", "'", other, false},
    {"numpy array of '>c", "'", other, false},
    {"floating type of ", "", other, false},
    {"integer of ", "", other, false},
    {"", "Tensor", other, true},
};

static bool fits(const char *text, size_t size, const char *begin, const char *end)
{
    size_t first = strlen(begin), last = strlen(end);
    return size >= first + last && memcmp(text, begin, first) == 0 &&
           memcmp(text + size - last, end, last) == 0;
}

/* The rule of a class, -1 for none. */
static int rule_of(const fsdp_value *value)
{
    for (int i = 0; i < (int)(sizeof classes / sizeof *classes); i++)
        if (fits(value->as.bytes.data, value->as.bytes.size, classes[i].begin, classes[i].end))
            return i;
    return -1;
}

/* --- values ----------------------------------------------------------------------------------- */

static bool has_items(const fsdp_value *value)
{
    return value->kind == FSDP_VALUE_LIST || value->kind == FSDP_VALUE_DICT;
}

static const char *kind_of_value(const fsdp_value *value)
{
    int rule = value->kind == FSDP_VALUE_CLASS ? rule_of(value) : -1;
    const char *kind = rule >= 0 ? classes[rule].kind : NULL;
    for (size_t i = 0; !kind && has_items(value) && i < value->as.list.count; i++)
        kind = kind_of_value(&value->as.list.items[i]);
    return kind;
}

static bool holds_tensor(const fsdp_value *value)
{
    bool is_found = value->kind == FSDP_VALUE_TENSOR;
    for (size_t i = 0; !is_found && has_items(value) && i < value->as.list.count; i++)
        is_found = holds_tensor(&value->as.list.items[i]);
    return is_found;
}

/* The value in a blob, a torch.save file, or NULL; the caller closes the source. */
static const fsdp_value *open_blob(const fsdp_value *value, fsdp_source **source_out)
{
    size_t size = value->kind == FSDP_VALUE_OPAQUE ? value->as.bytes.size : 0;
    *source_out = NULL;
    if (size < 4 || memcmp(value->as.bytes.data, "PK\3\4", 4) != 0 ||
        fsdp_source_open_blob(value->as.bytes.data, size, source_out, NULL) != FSDP_OK)
        return NULL;
    return fsdp_source_entry_at(*source_out, 0)->value;
}

bool fsdp_value_holds_tensor(const fsdp_value *value)
{
    fsdp_source *source;
    const fsdp_value *inside = open_blob(value, &source);
    bool is_found = holds_tensor(inside ? inside : value);
    fsdp_source_close(source);
    return is_found;
}

/* --- entries ---------------------------------------------------------------------------------- */

/* "flat_param", "_flat_param", "flat_param_3" after the last dot. */
static bool is_flat_name(const char *name, size_t size)
{
    static const char word[] = "flat_param";
    const char *end = name + size, *last = end;
    while (last > name && last[-1] != '.')
        last--;
    if (last < end && *last == '_')
        last++;
    if ((size_t)(end - last) < sizeof word - 1 || memcmp(last, word, sizeof word - 1) != 0)
        return false;
    last += sizeof word - 1;
    if (last < end && *last == '_')
        last++;
    while (last < end && *last >= '0' && *last <= '9')
        last++;
    return last == end;
}

static bool has_flat(const fsdp_sd *sd, const char *prefix, size_t size)
{
    static const char last[] = "_flat_param";
    fsdp_text name = {0};
    fsdp_text_add(&name, prefix, size);
    fsdp_text_add(&name, last, sizeof last - 1);
    int64_t number = name.failed ? -1 : fsdp_sd_find(sd, name.data, name.size);
    fsdp_text_release(&name);
    return number >= 0 && fsdp_sd_at(sd, (size_t)number)->kind == FSDP_ENTRY_TENSOR;
}

bool fsdp_is_flat_piece(const fsdp_sd *sd, const fsdp_entry *entry)
{
    bool is_piece = false;
    if (entry->kind != FSDP_ENTRY_VALUE || !fsdp_value_per_rank(&entry->value) ||
        !fsdp_value_holds_tensor(&entry->value))
        return false;
    for (size_t at = entry->name_size; at-- > 0 && !is_piece;)
        if (at == 0 || entry->name[at - 1] == '.')
            is_piece = has_flat(sd, entry->name, at);
    return is_piece;
}

static bool is_subclass(const fsdp_value *value)
{
    int rule = value->kind == FSDP_VALUE_CLASS ? rule_of(value) : -1;
    return rule >= 0 && classes[rule].is_subclass;
}

const char *fsdp_tensor_kind(const fsdp_entry *entry, bool *is_subclass_out)
{
    *is_subclass_out = false;
    if (entry->kind != FSDP_ENTRY_VALUE)
        return entry->kind == FSDP_ENTRY_TENSOR && entry->ndim == 1 &&
                       is_flat_name(entry->name, entry->name_size)
                   ? flat
                   : NULL;
    fsdp_source *source;
    const fsdp_value *inside = open_blob(&entry->value, &source);
    const char *kind = kind_of_value(inside ? inside : &entry->value);
    *is_subclass_out = is_subclass(inside ? inside : &entry->value);
    fsdp_source_close(source);
    return kind;
}

/* === rules ==================================================================================== */

typedef struct drop_rule {
    enum {
        DROP_VALUES,
        DROP_OPAQUE,
        DROP_OPTIM,
        DROP_DTYPE,
        DROP_TENSORS,
        DROP_METADATA,
        DROP_NAMES
    } kind;
    fsdp_dtype dtype;
    const char *tensor_kind; /* see drop_rules.h */
    regex_t expression;      /* DROP_NAMES, DROP_METADATA */
} drop_rule;

struct fsdp_drop_rules {
    const fsdp_select_opts *opts;
    drop_rule *items;
    size_t count;
};

static const char metadata_word[] = "metadata";

bool fsdp_drop_is_of_metadata(const char *drop)
{
    const size_t size = sizeof metadata_word - 1;
    return strncmp(drop, metadata_word, size) == 0 && (drop[size] == ':' || drop[size] == '\0');
}

/* The expression of "metadata:REGEX"; "metadata" takes all. */
static const char *metadata_expression(const char *drop)
{
    const char *colon = drop + sizeof metadata_word - 1;
    return *colon ? colon + 1 : "";
}

static fsdp_status parse_drop(const char *text, drop_rule *rule, fsdp_error *err)
{
    static const char *const words[] = {"values", "opaque", "optim"};
    for (int i = 0; i < 3; i++) {
        rule->kind = i == 0 ? DROP_VALUES : i == 1 ? DROP_OPAQUE : DROP_OPTIM;
        if (strcmp(text, words[i]) == 0)
            return FSDP_OK;
    }
    if (strncmp(text, FSDP_DROP_DTYPE, strlen(FSDP_DROP_DTYPE)) == 0) {
        rule->kind = DROP_DTYPE;
        rule->dtype = fsdp_dtype_from_typed(text + 6, strlen(text + 6));
        return rule->dtype != FSDP_DTYPE_NONE
                   ? FSDP_OK
                   : fsdp_fail(err, FSDP_ERR_USAGE, "no dtype is named '%.40s'", text + 6);
    }
    if (strncmp(text, FSDP_DROP_TENSORS, strlen(FSDP_DROP_TENSORS)) == 0) {
        rule->kind = DROP_TENSORS;
        rule->tensor_kind = tensor_kind_named(text + strlen(FSDP_DROP_TENSORS));
        return rule->tensor_kind
                   ? FSDP_OK
                   : fsdp_fail(err, FSDP_ERR_USAGE,
                               "--drop '%.60s' names no kind of tensors; known are %s", text,
                               tensor_kinds());
    }
    bool is_metadata = fsdp_drop_is_of_metadata(text);
    FSDP_TRY(fsdp_expression_compile(is_metadata ? metadata_expression(text) : text, REG_NOSUB,
                                     &rule->expression, err));
    rule->kind = is_metadata ? DROP_METADATA : DROP_NAMES;
    return FSDP_OK;
}

fsdp_status fsdp_drop_rules_create(const fsdp_select_opts *opts, fsdp_drop_rules **rules_out,
                                   fsdp_error *err)
{
    FSDP_TRY(fsdp_expressions_check(opts->drops, opts->drop_count, "--drop", err));
    fsdp_drop_rules *rules = fsdp_alloc(1, sizeof *rules);
    fsdp_status st = FSDP_OK;
    if (rules)
        *rules = (fsdp_drop_rules){.opts = opts,
                                   .items = fsdp_alloc(opts->drop_count, sizeof *rules->items)};
    if (!rules || !rules->items)
        st = fsdp_fail_memory(err, "rules");
    while (st == FSDP_OK && rules->count < opts->drop_count) {
        st = parse_drop(opts->drops[rules->count], &rules->items[rules->count], err);
        rules->count += st == FSDP_OK;
    }
    if (st != FSDP_OK) {
        fsdp_drop_rules_free(rules);
        return st;
    }
    *rules_out = rules;
    return FSDP_OK;
}

void fsdp_drop_rules_free(fsdp_drop_rules *rules)
{
    if (!rules)
        return;
    for (size_t i = 0; i < rules->count; i++)
        if (rules->items[i].kind == DROP_NAMES || rules->items[i].kind == DROP_METADATA)
            regfree(&rules->items[i].expression);
    fsdp_free(rules->items);
    fsdp_free(rules);
}

/* --drop values keeps tensors that a source lists as values (above). */
static bool takes(const drop_rule *rule, const fsdp_droppable *what)
{
    const fsdp_entry *entry = what->entry;
    bool is_value = entry->kind == FSDP_ENTRY_VALUE && !what->tensor_kind;
    switch (rule->kind) {
    case DROP_VALUES: return is_value && !fsdp_value_holds_tensor(&entry->value);
    case DROP_OPAQUE: return is_value && fsdp_value_is_opaque(&entry->value);
    case DROP_OPTIM: return what->is_optim;
    case DROP_DTYPE: return what->dtype == rule->dtype;
    case DROP_TENSORS: return what->tensor_kind == rule->tensor_kind;
    case DROP_METADATA: return false;
    case DROP_NAMES: break;
    }
    return fsdp_expression_matches(&rule->expression, entry->name, entry->name_size);
}

bool fsdp_drop_rules_take(const fsdp_drop_rules *rules, const fsdp_droppable *what)
{
    for (size_t i = 0; i < rules->count; i++)
        if (takes(&rules->items[i], what))
            return true;
    return false;
}

static bool take_metadata(const fsdp_drop_rules *rules, const char *key, size_t size)
{
    for (size_t i = 0; i < rules->count; i++)
        if (rules->items[i].kind == DROP_METADATA &&
            fsdp_expression_matches(&rules->items[i].expression, key, size))
            return true;
    return false;
}

static bool matches_some(const fsdp_sd *sd, const regex_t *expression)
{
    for (size_t i = 0; i < fsdp_sd_count(sd); i++) {
        const fsdp_entry *entry = fsdp_sd_at(sd, i);
        if (fsdp_expression_matches(expression, entry->name, entry->name_size))
            return true;
    }
    return false;
}

fsdp_status fsdp_drop_rules_check(const fsdp_drop_rules *rules, const fsdp_sd *sd, fsdp_error *err)
{
    for (size_t i = 0; i < rules->count; i++)
        if (rules->items[i].kind == DROP_NAMES && !matches_some(sd, &rules->items[i].expression))
            return fsdp_fail(err, FSDP_ERR_USAGE,
                             "--drop '%.200s' matches no name; list them with fsdp-ls",
                             rules->opts->drops[i]);
    return FSDP_OK;
}

static bool matches_some_key(const fsdp_text_pairs *metadata, const regex_t *expression)
{
    for (size_t i = 0; i < metadata->count; i++)
        if (fsdp_expression_matches(expression, metadata->items[i].key,
                                    metadata->items[i].key_size))
            return true;
    return false;
}

/* FSDP_ERR_USAGE names an expression that matches no key of the metadata. */
static fsdp_status check_metadata(const fsdp_drop_rules *rules, const fsdp_text_pairs *metadata,
                                  fsdp_error *err)
{
    for (size_t i = 0; i < rules->count; i++)
        if (rules->items[i].kind == DROP_METADATA &&
            !matches_some_key(metadata, &rules->items[i].expression))
            return fsdp_fail(
                err, FSDP_ERR_USAGE,
                "--drop '%.200s' matches no key of the metadata; list them with fsdp-ls --json",
                rules->opts->drops[i]);
    return FSDP_OK;
}

/* === metadata ================================================================================= */

void fsdp_metadata_choice_release(fsdp_metadata_choice *choice)
{
    fsdp_free(choice->kept);
    fsdp_text_pairs_release(&choice->left_out);
    *choice = (fsdp_metadata_choice){0};
}

/* Hashes of all tensors that trainers of diffusion models write beside them. */
static bool is_hash(const fsdp_text_pair *pair)
{
    static const char *const keys[] = {"sshs_model_hash", "sshs_legacy_hash",
                                       "modelspec.hash_sha256"};
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++)
        if (fsdp_bytes_are(pair->key, pair->key_size, keys[i]))
            return true;
    return false;
}

/* The keys as they are chosen. */
typedef struct choosing {
    const fsdp_metadata_from *from;
    const fsdp_drop_rules *drops;
    bool keeps; /* the format can hold them */
    fsdp_text_pairs contradicting, kept;
    fsdp_metadata_choice *choice;
} choosing;

static fsdp_status choose(choosing *work, const fsdp_text_pair *pair, fsdp_error *err)
{
    char key[160];
    if (take_metadata(work->drops, pair->key, pair->key_size))
        return FSDP_OK;
    if (!work->keeps || (work->from->is_changed && is_hash(pair)))
        return fsdp_text_pairs_add(&work->choice->left_out, pair, err);
    if (work->from->renamed > 0 && fsdp_bytes_are(pair->key, pair->key_size, "tensor_names"))
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "the metadata of '%s' joins quantized tensors by their names "
                         "('tensor_names' of torchao), of which %" PRId64
                         " change; keep them with --names keep and without --rename, or leave the "
                         "texts out with --drop metadata",
                         work->from->path, work->from->renamed);
    const fsdp_text_pair *files =
        fsdp_text_pairs_find(&work->contradicting, pair->key, pair->key_size);
    if (files)
        return fsdp_fail(err, FSDP_ERR_DAMAGED,
                         "%s of '%s' contradict each other: '%s' of their metadata has two texts; "
                         "leave it out with --drop metadata:REGEX",
                         files->text, work->from->path,
                         fsdp_printable(pair->key, pair->key_size, key, sizeof key));
    return fsdp_text_pairs_add(&work->kept, pair, err);
}

static fsdp_status choose_all(choosing *work, fsdp_error *err)
{
    fsdp_text_pairs all = {0};
    const fsdp_metadata_from *from = work->from;
    fsdp_status st = fsdp_text_pairs_parse(&all, from->carried, from->path, err);
    if (st == FSDP_OK && from->contradicting)
        st = fsdp_text_pairs_parse(&work->contradicting, from->contradicting, from->path, err);
    if (st == FSDP_OK)
        st = check_metadata(work->drops, &all, err);
    for (size_t i = 0; i < all.count && st == FSDP_OK; i++)
        st = choose(work, &all.items[i], err);
    fsdp_text_pairs_release(&all);
    return st;
}

static fsdp_status spell_kept(const choosing *work, fsdp_error *err)
{
    fsdp_text text = {0};
    if (work->kept.count == 0)
        return FSDP_OK;
    fsdp_text_pairs_spell(&work->kept, &text);
    if (text.failed) {
        fsdp_text_release(&text);
        return fsdp_fail_memory(err, "metadata");
    }
    work->choice->kept = text.data;
    return FSDP_OK;
}

fsdp_status fsdp_metadata_choose(const fsdp_metadata_from *from, const fsdp_select_opts *opts,
                                 const fsdp_format *target, fsdp_metadata_choice *choice,
                                 fsdp_error *err)
{
    fsdp_drop_rules *drops = NULL;
    choosing work = {.from = from, .keeps = target->caps.metadata, .choice = choice};
    if (!from->carried)
        return FSDP_OK;
    FSDP_TRY(fsdp_drop_rules_create(opts, &drops, err));
    work.drops = drops;
    fsdp_status st = choose_all(&work, err);
    if (st == FSDP_OK)
        st = spell_kept(&work, err);
    fsdp_text_pairs_release(&work.kept);
    fsdp_text_pairs_release(&work.contradicting);
    fsdp_drop_rules_free(drops);
    return st;
}
