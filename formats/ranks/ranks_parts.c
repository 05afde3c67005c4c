/*
 * Parts of tensor parallelism whose files do not say how they were cut: Meta's consolidated.00.pth, 01, ...
 * Each file has every name; rules below give the dim in which the parts of a name lie one behind the other,
 * and params.json beside the files gives the length that they have together. See ranks.h.
 */
#include "base/core/mem.h"
#include "base/data/json.h"
#include "formats/ranks/ranks.h"
#include "formats/source.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

static const char parts_pattern[] = "consolidated.{r}.pth", params_name[] = "params.json";

bool rank_parts_are(const char *pattern)
{
    return strcmp(pattern, parts_pattern) == 0;
}

/* --- params.json -------------------------------------------------------------------------------- */

/* vocab_size is none of them: Llama 2 has -1 there, and Code Llama less than its words. */
enum { DIM, HEADS, KV_HEADS, HEAD_DIM, PARAMS };
static const char *const params[PARAMS] = {"dim", "n_heads", "n_kv_heads", "head_dim"};

enum { PARAMS_BYTES = 1 << 20, PARAM_MOST = 1 << 28 };

static fsdp_status read_members(fsdp_json *json, int64_t out[PARAMS], fsdp_error *err)
{
    fsdp_json_members members = {.names = params, .count = PARAMS};
    int which;
    FSDP_TRY(fsdp_json_enter_object(json, err));
    for (;;) {
        FSDP_TRY(fsdp_json_next_member(json, &members, &which, err));
        if (which < 0)
            return fsdp_json_finish(json, err);
        if (fsdp_json_peek(json) == FSDP_JSON_NULL) {
            FSDP_TRY(fsdp_json_null(json, err));
            continue;
        }
        FSDP_TRY(fsdp_json_i64(json, &out[which], err));
        if (out[which] < 1 || out[which] > PARAM_MOST)
            return fsdp_json_fail(json, err, "'%s' is %" PRId64 ", which no model has",
                                  params[which], out[which]);
    }
}

/* One file that has no such numbers beside it is read as it is. */
static fsdp_status take_params(const fsdp_json *json, const int64_t found[PARAMS],
                               rank_parts *parts, fsdp_error *err)
{
    int64_t groups = found[KV_HEADS] > 0 ? found[KV_HEADS] : found[HEADS];
    int64_t width = found[HEAD_DIM];
    if (parts->count == 1 && (found[DIM] < 1 || found[HEADS] < 1)) {
        parts->count = 0;
        return FSDP_OK;
    }
    if (found[DIM] < 1 || found[HEADS] < 1)
        return fsdp_json_fail(json, err, "it has no number '%s', by which the files are joined",
                              params[found[DIM] < 1 ? DIM : HEADS]);
    if (width < 1 && found[DIM] % found[HEADS] != 0)
        return fsdp_json_fail(json, err, "'dim' is no multiple of 'n_heads'");
    width = width < 1 ? found[DIM] / found[HEADS] : width;
    parts->dim = found[DIM];
    parts->queries = found[HEADS] * width;
    parts->keys = groups * width;
    parts->width = width;
    return FSDP_OK;
}

static fsdp_status read_params(const char *text, size_t size, const char *path, rank_parts *parts,
                               fsdp_error *err)
{
    int64_t found[PARAMS] = {0};
    fsdp_json json;
    fsdp_json_init(&json, text, size, path);
    fsdp_status st = read_members(&json, found, err);
    if (st == FSDP_OK)
        st = take_params(&json, found, parts, err);
    fsdp_json_release(&json);
    return st;
}

/* --- the set ------------------------------------------------------------------------------------ */

/* The name of a file that is not there, with as many digits as its neighbours have. */
static void spell_file(const rank_group *group, size_t rank, char *out, size_t room)
{
    const char *rest = group->pattern + group->stem + 3;
    size_t digits = strlen(group->files[0].name) - group->stem - strlen(rest);
    snprintf(out, room, "%.*s%0*zu%s", (int)group->stem, group->pattern, (int)digits, rank, rest);
}

static fsdp_status check_gaps(const rank_files *set, fsdp_error *err)
{
    char name[64];
    for (size_t i = 0; i < set->group->count; i++) {
        if (set->group->files[i].rank == (int)i)
            continue;
        spell_file(set->group, i, name, sizeof name);
        return fsdp_fail(err, FSDP_ERR_DAMAGED,
                         "'%s': '%s' is missing, which has a part of the tensors", set->where,
                         name);
    }
    return FSDP_OK;
}

fsdp_status rank_parts_read(const fsdp_probe *probe, const char *directory, rank_files *set,
                            fsdp_error *err)
{
    char *path = fsdp_path_join(directory, params_name), *text = NULL;
    size_t size;
    set->parts.count = (int64_t)set->group->count;
    fsdp_status st = path ? check_gaps(set, err) : fsdp_fail_memory(err, "a path");
    if (st == FSDP_OK && !fsdp_io_exists(probe->io, path))
        st = fsdp_fail(err, FSDP_ERR_DAMAGED,
                       "'%s' is missing, by whose numbers the files are joined: it comes with "
                       "them",
                       path);
    if (st == FSDP_OK)
        st = fsdp_source_read_file(probe->io, path, PARAMS_BYTES, &text, &size, err);
    if (st == FSDP_OK)
        st = read_params(text, size, path, &set->parts, err);
    fsdp_free(text);
    fsdp_free(path);
    return st;
}

/* --- the rules ---------------------------------------------------------------------------------- */

typedef enum part_length { ANY, QUERIES, KEYS } part_length;

/* Names by their end, the dim in which they are cut, and the length of that dim in the whole. */
static const struct part_rule {
    const char *end;
    int dim; /* -1: the shape decides */
    part_length length;
} rules[] = {
    {"tok_embeddings.weight", -1, ANY},  {"output.weight", 0, ANY},
    {"attention.wq.weight", 0, QUERIES}, {"attention.wk.weight", 0, KEYS},
    {"attention.wv.weight", 0, KEYS},    {"attention.wo.weight", 1, QUERIES},
    {"feed_forward.w1.weight", 0, ANY},  {"feed_forward.w2.weight", 1, ANY},
    {"feed_forward.w3.weight", 0, ANY},
};

static const struct part_rule *find_rule(const char *name, size_t size)
{
    for (size_t i = 0; i < sizeof rules / sizeof *rules; i++) {
        size_t n = strlen(rules[i].end);
        if (fsdp_bytes_end(name, size, rules[i].end) && (size == n || name[size - n - 1] == '.'))
            return &rules[i];
    }
    return NULL;
}

/* A part, and its place in the whole. */
typedef struct placed_part {
    rank_files *set;
    const torch_item *found;
    const torch_tensor *tensor;
    int dim;
    int64_t copies; /* files that hold equal parts: of keys with fewer heads than files */
    int64_t shape[FSDP_MAX_DIMS];
} placed_part;

static fsdp_status fail_length(const placed_part *at, int64_t together, int64_t wanted,
                               fsdp_error *err)
{
    const rank_files *set = at->set;
    const char *lines = at->dim == 0 ? "rows" : "columns";
    char shown[200], next[64];
    fsdp_printable(at->found->name, at->found->name_size, shown, sizeof shown);
    spell_file(set->group, set->group->count, next, sizeof next);
    if (together < wanted)
        return fsdp_fail(err, FSDP_ERR_DAMAGED,
                         "'%s': '%s' is missing: the files before it have %" PRId64 " of the "
                         "%" PRId64 " %s that '%s' has by %s",
                         set->where, next, together, wanted, lines, shown, params_name);
    return fsdp_fail(err, FSDP_ERR_DAMAGED,
                     "'%s': '%s' has %" PRId64 " %s by %s, and the files have %" PRId64, set->where,
                     shown, wanted, lines, params_name, together);
}

/* One file is whole, also where params.json has other numbers, unless it has an equal part of them. */
static fsdp_status check_length(const placed_part *at, int64_t together, int64_t wanted,
                                fsdp_error *err)
{
    bool is_part = together < wanted && wanted % together == 0;
    bool is_good = together == wanted || (at->set->parts.count == 1 && !is_part);
    return is_good ? FSDP_OK : fail_length(at, together, wanted, err);
}

/* Embeddings are cut in the dim of the model up to Llama 2, and by words since Llama 3. */
static fsdp_status choose_dim(placed_part *at, fsdp_error *err)
{
    const rank_parts *parts = &at->set->parts;
    int64_t columns = at->tensor->shape[1];
    at->dim = columns == parts->dim ? 0 : 1;
    return at->dim == 0 ? FSDP_OK : check_length(at, columns * parts->count, parts->dim, err);
}

static bool is_length(int64_t length)
{
    return length > 0 && length <= PARAM_MOST;
}

/* Heads of keys that are fewer than the files lie in several of them. */
static fsdp_status share_keys(placed_part *at, int64_t *together, fsdp_error *err)
{
    const rank_parts *parts = &at->set->parts;
    int64_t groups = parts->keys / parts->width;
    char shown[200], next[64];
    if (at->tensor->shape[0] != parts->width || parts->count <= groups)
        return FSDP_OK;
    spell_file(at->set->group, at->set->group->count, next, sizeof next);
    if (parts->count % groups != 0)
        return fsdp_fail(err, FSDP_ERR_DAMAGED,
                         "'%s': '%s' is missing: %" PRId64 " files cannot share the %" PRId64
                         " heads that '%s' has by %s",
                         at->set->where, next, parts->count, groups,
                         fsdp_printable(at->found->name, at->found->name_size, shown, sizeof shown),
                         params_name);
    at->copies = parts->count / groups;
    *together /= at->copies;
    return FSDP_OK;
}

static fsdp_status place_part(placed_part *at, const struct part_rule *rule, fsdp_error *err)
{
    const rank_parts *parts = &at->set->parts;
    const torch_tensor *tensor = at->tensor;
    int64_t wanted = rule->length == QUERIES ? parts->queries
                     : rule->length == KEYS  ? parts->keys
                                             : 0;
    int64_t together;
    char shown[200];
    at->copies = 1;
    if (tensor->ndim != 2 || tensor->data || !is_length(tensor->shape[0]) ||
        !is_length(tensor->shape[1]))
        return fsdp_fail(
            err, FSDP_ERR_DAMAGED, "'%s': '%s' is not the part of a matrix", at->set->where,
            fsdp_printable(at->found->name, at->found->name_size, shown, sizeof shown));
    memcpy(at->shape, tensor->shape, 2 * sizeof *at->shape);
    at->dim = rule->dim;
    if (rule->dim < 0)
        FSDP_TRY(choose_dim(at, err));
    together = at->shape[at->dim] * parts->count;
    if (rule->length == KEYS)
        FSDP_TRY(share_keys(at, &together, err));
    if (wanted > 0)
        FSDP_TRY(check_length(at, together, wanted, err));
    at->shape[at->dim] = together;
    return FSDP_OK;
}

static fsdp_status add_part(const placed_part *at, fsdp_error *err)
{
    rank_files *set = at->set;
    const torch_item *found = at->found;
    int64_t lo[FSDP_MAX_DIMS] = {0};
    fsdp_source_chunk chunk;
    rank_entry *entry;
    FSDP_TRY(rank_files_entry(set, found->name, found->name_size, &entry, err));
    FSDP_TRY(rank_files_spread(set, entry, at->tensor->dtype, 2, at->shape, err));
    entry->readings[RANK_LEFT_TO_RIGHT].fails = true;
    lo[at->dim] = set->rank / at->copies * at->tensor->shape[at->dim];
    torch_tensor_chunk(at->tensor, lo, &chunk);
    return rank_files_add_chunk(set, &entry->readings[RANK_ORDERED], set->rank, 2, &chunk, err);
}

/* A tensor without a rule is whole in each file, and equal in all. */
static fsdp_status add_whole(rank_files *set, const torch_item *found, torch_tensor *tensor,
                             fsdp_error *err)
{
    char shown[200];
    FSDP_TRY(rank_files_tensor(set, found, tensor, err));
    const uint64_t *number = fsdp_name_table_find(&set->names, found->name, found->name_size);
    const rank_entry *entry = number ? &set->entries[*number] : NULL;
    if (!entry || entry->item_count < 2 || entry->items[entry->item_count - 1].is_same)
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_REFUSED,
                     "'%s': '%s' differs between '%s' and '%s', and no rule says how its parts are "
                     "joined",
                     set->where, fsdp_printable(found->name, found->name_size, shown, sizeof shown),
                     set->group->files[0].name, set->group->files[set->rank].name);
}

fsdp_status rank_files_part(void *context, const torch_item *found, torch_tensor *tensor,
                            fsdp_error *err)
{
    placed_part at = {.set = context, .found = found, .tensor = tensor};
    const struct part_rule *rule = find_rule(found->name, found->name_size);
    if (!rule)
        return add_whole(context, found, tensor, err);
    FSDP_TRY(place_part(&at, rule, err));
    return add_part(&at, err);
}
