/*
 * A directory with a folder for each rank of tensor, pipeline and expert parallelism (Megatron's
 * mp_rank_TT_PPP_EEE) as one source: the names of a rank's file begin with "tpT.ppP.epE.", by which a map
 * joins the parts. The files are compared first: a wrong one must not become part of a model.
 */
#include "formats/frameworks/framework_folder.h"
#include "base/core/mem.h"
#include "base/data/box_internal.h"
#include "base/data/name_table.h"
#include "formats/source/source_facts.h"
#include "kernels/kernels.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

/* === the ranks agree ========================================================================== */

/*
 *   values     steps and sizes of the model are those of the file before
 *   tensors    whole ones are the same on all ranks: the map takes the first of each. Parts have one dtype
 *   names      the ranks of a stage have the same weights: a part that one lacks would be left out unseen
 *   copies     no two ranks have equal parts: one file is a copy of the other
 */

/* A file, and the rank in each kind of parallelism. */
typedef struct fsdp_folder_rank {
    fsdp_source *source;
    int64_t tensor, pipeline, expert;
} fsdp_folder_rank;

enum { HEAD = 64 << 10 }; /* bytes of a tensor that are compared */

typedef struct holder {
    size_t rank, tensor;
} holder;

typedef struct agreement {
    const fsdp_framework_row *row;
    const fsdp_folder_rank *ranks;
    fsdp_facts facts;
    fsdp_name_table
        names; /* of replicated tensors, with the ranks that share them -> number in holders */
    holder *holders;
    size_t count, room;
    fsdp_arena arena;
    fsdp_source_reader reader;
    char *heads;            /* of two tensors */
    fsdp_name_table staged; /* weights of each stage -> ranks that have them */
    fsdp_name_table prints; /* hashes of the parts of a rank -> the first rank with them */
} agreement;

/* The hashes of the parts that no other rank has. */
typedef struct part_print {
    fsdp_text text;
    bool tells;
} part_print;

static bool is_listed(const char *list, const char *name, size_t size)
{
    return list && strlen(name) == size && fsdp_framework_matches(list, name, NULL);
}

/* --- values --------------------------------------------------------------------------------------- */

static fsdp_status compare_values(agreement *all, size_t rank, fsdp_error *err)
{
    const fsdp_source *source = all->ranks[rank].source;
    for (size_t i = 0; i < fsdp_source_entry_count(source); i++) {
        const fsdp_source_entry *entry = fsdp_source_entry_at(source, i);
        if (entry->value && is_listed(all->row->agreed, entry->name, entry->name_size))
            FSDP_TRY(fsdp_facts_note(&all->facts, entry->name, entry->name_size,
                                     fsdp_source_path(source), entry->value, err));
    }
    return FSDP_OK;
}

/* --- tensors -------------------------------------------------------------------------------------- */

/* The first elements of a tensor, as many as HEAD holds. */
static fsdp_box head_of(const fsdp_source_tensor *tensor)
{
    fsdp_box box = fsdp_box_whole(tensor->ndim, tensor->shape);
    int64_t left = HEAD / (int64_t)fsdp_dtype_size(tensor->dtype); /* elements */
    for (int dim = tensor->ndim - 1; dim >= 0; dim--) {
        box.len[dim] = box.len[dim] < left ? box.len[dim] : left;
        left = box.len[dim] < tensor->shape[dim] ? 1
               : box.len[dim] > 0                ? left / box.len[dim]
                                                 : left;
    }
    return box;
}

static fsdp_status read_head(agreement *all, const holder *at, int which, size_t *bytes_out,
                             fsdp_error *err)
{
    fsdp_source *source = all->ranks[at->rank].source;
    const fsdp_source_tensor *tensor = fsdp_source_tensor_at(source, at->tensor);
    fsdp_box box = head_of(tensor);
    *bytes_out = (size_t)fsdp_box_count(&box) * fsdp_dtype_size(tensor->dtype);
    if (!all->heads && !(all->heads = fsdp_alloc(2, HEAD)))
        return fsdp_fail_memory(err, "comparing ranks");
    return fsdp_source_read(source, at->tensor, &box, all->heads + which * HEAD, &all->reader, err);
}

static fsdp_status compare_heads(agreement *all, const holder *a, const holder *b, bool *same_out,
                                 fsdp_error *err)
{
    size_t bytes;
    fsdp_source *first = all->ranks[a->rank].source, *second = all->ranks[b->rank].source;
    const fsdp_source_tensor *one = fsdp_source_tensor_at(first, a->tensor);
    const fsdp_source_tensor *other = fsdp_source_tensor_at(second, b->tensor);
    *same_out = one->ndim == other->ndim &&
                (one->ndim == 0 ||
                 memcmp(one->shape, other->shape, (size_t)one->ndim * sizeof *one->shape) == 0);
    if (!*same_out)
        return FSDP_OK;
    FSDP_TRY(read_head(all, a, 0, &bytes, err));
    FSDP_TRY(read_head(all, b, 1, &bytes, err));
    *same_out = memcmp(all->heads, all->heads + HEAD, bytes) == 0;
    return FSDP_OK;
}

/* The ranks that have a tensor of this name whole, in front of it. */
static void spell_sharers(const agreement *all, size_t rank, const fsdp_source_entry *entry,
                          fsdp_text *key)
{
    const fsdp_folder_rank *at = &all->ranks[rank];
    if (!is_listed(all->row->replicated, entry->name, entry->name_size))
        fsdp_text_addf(key, "tp%" PRId64 ".", at->tensor);
    if (strstr(entry->name, ".layers."))
        fsdp_text_addf(key, "pp%" PRId64 ".", at->pipeline);
    if (strstr(entry->name, ".experts."))
        fsdp_text_addf(key, "ep%" PRId64 ".", at->expert);
    fsdp_text_add(key, entry->name, entry->name_size);
}

static fsdp_status add_holder(agreement *all, const fsdp_text *key, const holder *next,
                              fsdp_error *err)
{
    const char *kept = fsdp_arena_strndup(&all->arena, key->data, key->size);
    if (!kept || !fsdp_grow(&all->holders, &all->room, all->count + 1, sizeof *all->holders) ||
        !fsdp_name_table_put(&all->names, kept, key->size, all->count))
        return fsdp_fail_memory(err, "comparing ranks");
    all->holders[all->count++] = *next;
    return FSDP_OK;
}

static fsdp_status compare_tensor(agreement *all, const fsdp_text *key, const holder *next,
                                  const fsdp_source_entry *entry, fsdp_error *err)
{
    const uint64_t *known = fsdp_name_table_find(&all->names, key->data, key->size);
    char shown[200];
    bool is_same;
    if (!known)
        return add_holder(all, key, next, err);
    const holder *first = &all->holders[*known];
    FSDP_TRY(compare_heads(all, first, next, &is_same, err));
    if (is_same)
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_DAMAGED,
                     "'%s' and '%s' have different values of '%s', which is whole in "
                     "both" FSDP_TWO_SAVES,
                     fsdp_source_path(all->ranks[first->rank].source),
                     fsdp_source_path(all->ranks[next->rank].source),
                     fsdp_printable(entry->name, entry->name_size, shown, sizeof shown));
}

/* The parts of one tensor have one dtype. */
static fsdp_status compare_dtype(agreement *all, size_t rank, const fsdp_source_entry *entry,
                                 fsdp_error *err)
{
    const fsdp_source *source = all->ranks[rank].source;
    const char *dtype = fsdp_dtype_name(fsdp_source_tensor_at(source, entry->tensor)->dtype);
    fsdp_text what = {0};
    fsdp_value value = {0};
    fsdp_text_addf(&what, "the dtype of '%s' in stage %" PRId64, entry->name,
                   all->ranks[rank].pipeline);
    fsdp_status st =
        what.failed ? fsdp_fail_memory(err, "comparing ranks")
                    : fsdp_value_set_bytes(&value, FSDP_VALUE_STRING, dtype, strlen(dtype), err);
    if (st == FSDP_OK)
        st = fsdp_facts_note(&all->facts, what.data, what.size, fsdp_source_path(source), &value,
                             err);
    fsdp_value_release(&value);
    fsdp_text_release(&what);
    return st;
}

static bool is_weight(const agreement *all, const fsdp_source_entry *entry)
{
    return entry->is_tensor && is_listed(all->row->weights, entry->name, entry->name_size) &&
           !strstr(entry->name, "_extra_state");
}

static fsdp_status compare_tensors(agreement *all, size_t rank, fsdp_error *err)
{
    const fsdp_source *source = all->ranks[rank].source;
    for (size_t i = 0; i < fsdp_source_entry_count(source); i++) {
        const fsdp_source_entry *entry = fsdp_source_entry_at(source, i);
        const holder next = {rank, entry->tensor};
        fsdp_text key = {0};
        if (entry->is_alias || !is_weight(all, entry))
            continue;
        FSDP_TRY(compare_dtype(all, rank, entry, err));
        spell_sharers(all, rank, entry, &key);
        fsdp_status st = key.failed ? fsdp_fail_memory(err, "comparing ranks")
                                    : compare_tensor(all, &key, &next, entry, err);
        fsdp_text_release(&key);
        FSDP_TRY(st);
    }
    return FSDP_OK;
}

/* --- names ---------------------------------------------------------------------------------------- */

/* The count of ranks that have the weight in this stage; NULL when there is no memory. */
static uint64_t *count_of(agreement *all, size_t rank, const fsdp_source_entry *entry)
{
    fsdp_text key = {0};
    uint64_t *count = NULL;
    fsdp_text_addf(&key, "pp%" PRId64 ".", all->ranks[rank].pipeline);
    fsdp_text_add(&key, entry->name, entry->name_size);
    if (!key.failed && !(count = fsdp_name_table_find(&all->staged, key.data, key.size))) {
        const char *kept = fsdp_arena_strndup(&all->arena, key.data, key.size);
        count = kept ? fsdp_name_table_enter(&all->staged, kept, key.size, 0) : NULL;
    }
    fsdp_text_release(&key);
    return count;
}

static bool has_weight(const agreement *all, size_t rank, const fsdp_source_entry *wanted)
{
    const fsdp_source *source = all->ranks[rank].source;
    for (size_t i = 0; i < fsdp_source_entry_count(source); i++) {
        const fsdp_source_entry *entry = fsdp_source_entry_at(source, i);
        if (entry->is_tensor && entry->name_size == wanted->name_size &&
            memcmp(entry->name, wanted->name, wanted->name_size) == 0)
            return true;
    }
    return false;
}

static fsdp_status refuse_lack(const agreement *all, size_t count, size_t rank,
                               const fsdp_source_entry *entry, fsdp_error *err)
{
    size_t lacking = 0;
    char shown[200];
    while (lacking + 1 < count && (all->ranks[lacking].pipeline != all->ranks[rank].pipeline ||
                                   has_weight(all, lacking, entry)))
        lacking++;
    return fsdp_fail(err, FSDP_ERR_DAMAGED, "'%s' has '%s', but '%s' does not" FSDP_TWO_SAVES,
                     fsdp_source_path(all->ranks[rank].source),
                     fsdp_printable(entry->name, entry->name_size, shown, sizeof shown),
                     fsdp_source_path(all->ranks[lacking].source));
}

static fsdp_status count_names(agreement *all, size_t rank, fsdp_error *err)
{
    const fsdp_source *source = all->ranks[rank].source;
    for (size_t i = 0; i < fsdp_source_entry_count(source); i++) {
        const fsdp_source_entry *entry = fsdp_source_entry_at(source, i);
        uint64_t *holders = is_weight(all, entry) ? count_of(all, rank, entry) : NULL;
        if (is_weight(all, entry) && !holders)
            return fsdp_fail_memory(err, "comparing ranks");
        if (holders)
            ++*holders;
    }
    return FSDP_OK;
}

static fsdp_status compare_names(agreement *all, size_t count, size_t rank, fsdp_error *err)
{
    const fsdp_source *source = all->ranks[rank].source;
    uint64_t in_stage = 0;
    for (size_t i = 0; i < count; i++)
        in_stage += all->ranks[i].pipeline == all->ranks[rank].pipeline;
    for (size_t i = 0; i < fsdp_source_entry_count(source); i++) {
        const fsdp_source_entry *entry = fsdp_source_entry_at(source, i);
        uint64_t *holders = is_weight(all, entry) ? count_of(all, rank, entry) : NULL;
        if (holders && *holders < in_stage)
            return refuse_lack(all, count, rank, entry, err);
    }
    return FSDP_OK;
}

/* --- copies --------------------------------------------------------------------------------------- */

static fsdp_status add_print(agreement *all, const holder *at, part_print *print, fsdp_error *err)
{
    const fsdp_source_tensor *tensor =
        fsdp_source_tensor_at(all->ranks[at->rank].source, at->tensor);
    size_t bytes;
    FSDP_TRY(read_head(all, at, 0, &bytes, err));
    fsdp_hash hash = fsdp_kernels_get()->hash(all->heads, bytes);
    fsdp_text_add(&print->text, (const char *)&hash, sizeof hash);
    print->tells |= fsdp_fact_tells(all->heads, bytes, fsdp_dtype_size(tensor->dtype));
    return FSDP_OK;
}

static fsdp_status enter_print(agreement *all, size_t rank, const part_print *print,
                               fsdp_error *err)
{
    if (!print->tells)
        return FSDP_OK;
    const char *kept = fsdp_arena_strndup(&all->arena, print->text.data, print->text.size);
    uint64_t *first =
        kept ? fsdp_name_table_enter(&all->prints, kept, print->text.size, rank) : NULL;
    if (!first)
        return fsdp_fail_memory(err, "comparing ranks");
    if (*first == rank)
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_DAMAGED,
                     "'%s' and '%s' have the same parts of weights: one is a copy of the other; "
                     "put each rank's own file there",
                     fsdp_source_path(all->ranks[*first].source),
                     fsdp_source_path(all->ranks[rank].source));
}

/* Experts are of one expert rank; all others of those are the same in each. */
static fsdp_status compare_parts(agreement *all, size_t rank, fsdp_error *err)
{
    const fsdp_source *source = all->ranks[rank].source;
    part_print dense = {0}, experts = {0};
    fsdp_status st = FSDP_OK;
    fsdp_text_addf(&dense.text, "ep%" PRId64 ".", all->ranks[rank].expert);
    fsdp_text_addf(&experts.text, "experts.");
    for (size_t i = 0; i < fsdp_source_entry_count(source) && st == FSDP_OK; i++) {
        const fsdp_source_entry *entry = fsdp_source_entry_at(source, i);
        const holder at = {rank, entry->tensor};
        if (!entry->is_alias && is_weight(all, entry) &&
            !is_listed(all->row->replicated, entry->name, entry->name_size))
            st = add_print(all, &at, strstr(entry->name, ".experts.") ? &experts : &dense, err);
    }
    if (st == FSDP_OK && (dense.text.failed || experts.text.failed))
        st = fsdp_fail_memory(err, "comparing ranks");
    if (st == FSDP_OK)
        st = enter_print(all, rank, &dense, err);
    if (st == FSDP_OK)
        st = enter_print(all, rank, &experts, err);
    fsdp_text_release(&dense.text);
    fsdp_text_release(&experts.text);
    return st;
}

/* --- the whole -------------------------------------------------------------------------------------- */

/* FSDP_ERR_DAMAGED when two files differ in what the row says that they have alike. */
static fsdp_status folder_ranks_agree(const fsdp_framework_row *row, const fsdp_folder_rank *ranks,
                                      size_t count, fsdp_error *err)
{
    agreement all = {.row = row, .ranks = ranks};
    fsdp_status st = FSDP_OK;
    for (size_t i = 0; i < count && st == FSDP_OK; i++)
        st = compare_values(&all, i, err);
    for (size_t i = 0; i < count && st == FSDP_OK; i++)
        st = compare_tensors(&all, i, err);
    for (size_t i = 0; i < count && st == FSDP_OK; i++)
        st = count_names(&all, i, err);
    for (size_t i = 0; i < count && st == FSDP_OK; i++)
        st = compare_names(&all, count, i, err);
    for (size_t i = 0; i < count && st == FSDP_OK; i++)
        st = compare_parts(&all, i, err);
    fsdp_facts_release(&all.facts);
    fsdp_name_table_release(&all.names);
    fsdp_name_table_release(&all.staged);
    fsdp_name_table_release(&all.prints);
    fsdp_arena_release(&all.arena);
    fsdp_source_reader_release(&all.reader);
    fsdp_free(all.holders);
    fsdp_free(all.heads);
    return st;
}

/* === the ranks as one source =================================================================== */

enum { COORDINATES = 3, SHARDS_MOST = 4096 };
enum { TENSOR, PIPELINE, EXPERT };

typedef struct shard {
    int64_t at[COORDINATES]; /* as its folder has them */
    char *key;
} shard;

typedef struct shard_list {
    const fsdp_folder *folder;
    const char *first; /* name of the first folder */
    int letters;       /* of each name, in front of the numbers: "mp_rank_" */
    fsdp_source_part *parts;
    shard *shards;
    size_t count;
    int coordinates;            /* of each folder */
    int64_t sizes[COORDINATES]; /* ranks of each coordinate */
    int roles[COORDINATES];     /* what the coordinates count */
} shard_list;

static void release(shard_list *list, bool closes)
{
    for (size_t i = 0; i < list->count; i++) {
        if (closes)
            fsdp_source_close(list->parts[i].source);
        fsdp_free(list->shards[i].key);
    }
    fsdp_free(list->parts);
    fsdp_free(list->shards);
}

/* --- folders -------------------------------------------------------------------------------------- */

/* "mp_rank_01_002": 1 and 2. The numbers follow the last letters of the name. */
static fsdp_status add_shard(shard_list *list, const char *name, fsdp_error *err)
{
    const char *path = list->folder->path, *at = name + strcspn(name, "0123456789");
    shard *next = &list->shards[list->count];
    int count = 0;
    if (list->count == 0)
        list->first = name, list->letters = (int)(at - name);
    for (; *at && count < COORDINATES; count++) {
        next->at[count] = strtoll(at, NULL, 10);
        if (next->at[count] >= SHARDS_MOST)
            return fsdp_fail(err, FSDP_ERR_LIMIT, "'%s' has more than %d ranks", path, SHARDS_MOST);
        if (next->at[count] >= list->sizes[count])
            list->sizes[count] = next->at[count] + 1;
        at += strspn(at, "0123456789");
        at += *at == '_';
    }
    if (list->count > 0 && count != list->coordinates)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "'%s' has folders of two kinds, such as '%s' and '%s'; move those of one "
                         "checkpoint into a directory of their own",
                         path, list->first, name);
    list->coordinates = count;
    list->count++;
    return FSDP_OK;
}

static fsdp_status list_shards(shard_list *list, fsdp_error *err)
{
    const fsdp_folder *folder = list->folder;
    list->parts = fsdp_alloc(folder->names.count, sizeof *list->parts);
    list->shards = fsdp_alloc(folder->names.count, sizeof *list->shards);
    if (!list->parts || !list->shards)
        return fsdp_fail_memory(err, folder->path);
    for (size_t i = 0; i < folder->names.count; i++)
        if (fsdp_framework_matches(folder->row->markers[0], folder->names.items[i], NULL))
            FSDP_TRY(add_shard(list, folder->names.items[i], err));
    return FSDP_OK;
}

static bool has_shard(const shard_list *list, const int64_t at[COORDINATES])
{
    for (size_t i = 0; i < list->count; i++)
        if (memcmp(list->shards[i].at, at, sizeof list->shards[i].at) == 0)
            return true;
    return false;
}

/* Each rank has a folder. */
static fsdp_status check_complete(const shard_list *list, fsdp_error *err)
{
    int64_t at[COORDINATES] = {0}, all = 1, seen = 0;
    for (int d = 0; d < list->coordinates; d++)
        all *= list->sizes[d]; /* each is at most SHARDS_MOST */
    for (; seen < all && has_shard(list, at); seen++)
        for (int d = list->coordinates - 1; d >= 0 && ++at[d] == list->sizes[d]; d--)
            at[d] = 0;
    if (seen == all)
        return seen == (int64_t)list->count
                   ? FSDP_OK
                   : fsdp_fail(err, FSDP_ERR_USAGE, "'%s' has two folders that belong to one rank",
                               list->folder->path);
    fsdp_text name = {0};
    fsdp_text_addf(&name, "%.*s%02" PRId64, list->letters, list->first, at[0]);
    for (int d = 1; d < list->coordinates; d++)
        fsdp_text_addf(&name, "_%03" PRId64, at[d]);
    fsdp_status st = name.failed
                         ? fsdp_fail_memory(err, "a name")
                         : fsdp_fail(err, FSDP_ERR_DAMAGED,
                                     "'%s/%s' is missing: this checkpoint has %" PRId64 " ranks",
                                     list->folder->path, name.data, all);
    fsdp_text_release(&name);
    return st;
}

/* --- what the folders' numbers count ---------------------------------------------------------------- */

/* A whole number of the options with which the run was started; 0: not there. */
static int64_t find_argument(const shard_list *list, const char *name)
{
    const fsdp_source *source = list->parts[0].source;
    for (size_t i = 0; i < fsdp_source_entry_count(source); i++) {
        const fsdp_source_entry *entry = fsdp_source_entry_at(source, i);
        if (!entry->is_tensor && entry->value && entry->value->kind == FSDP_VALUE_I64 &&
            fsdp_bytes_are(entry->name, entry->name_size, name))
            return entry->value->as.i64;
    }
    return 0;
}

/* A second number is the stage of a pipeline, or that of experts where there is no pipeline. */
static void find_roles(shard_list *list)
{
    bool has_stages = find_argument(list, "args.pipeline_model_parallel_size") != 1;
    bool has_experts = find_argument(list, "args.expert_model_parallel_size") > 1;
    list->roles[0] = TENSOR;
    list->roles[1] = list->coordinates == 2 && has_experts && !has_stages ? EXPERT : PIPELINE;
    list->roles[2] = EXPERT;
}

/* Compares the numbers of folders with the options of the run, where they are stored. */
static fsdp_status check_sizes(shard_list *list, fsdp_error *err)
{
    static const char *const names[] = {"args.tensor_model_parallel_size",
                                        "args.pipeline_model_parallel_size",
                                        "args.expert_model_parallel_size"};
    int64_t experts = find_argument(list, "args.expert_tensor_parallel_size");
    for (int d = 0; d < list->coordinates; d++) {
        int64_t size = find_argument(list, names[list->roles[d]]);
        if (size > 0 && size < list->sizes[d])
            return fsdp_fail(err, FSDP_ERR_DAMAGED,
                             "'%s' has folders of %" PRId64
                             " ranks, but their files say that %s is %" PRId64
                             "; some are from a different save",
                             list->folder->path, list->sizes[d], names[list->roles[d]], size);
        if (size > list->sizes[d] && size <= SHARDS_MOST)
            list->sizes[d] = size;
    }
    if (experts > 0 && experts != list->sizes[0])
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "'%s' has %" PRId64 " parts of each expert and %" PRId64
                         " of other weights, which cannot be joined; save it from Megatron with "
                         "--ckpt-format torch_dist",
                         list->folder->path, experts, list->sizes[0]);
    return check_complete(list, err);
}

/* --- the whole -------------------------------------------------------------------------------------- */

static fsdp_status open_shard(shard_list *list, size_t number, const char *name,
                              const fsdp_source_opts *opts, fsdp_error *err)
{
    const fsdp_folder *folder = list->folder;
    fsdp_text path = {0};
    fsdp_text_addf(&path, "%s/%s/%s", folder->path, name, folder->row->shards);
    fsdp_status st = path.failed                     ? fsdp_fail_memory(err, "a path")
                     : !fsdp_folder_may_look(folder) ? fsdp_folder_fail_looks(folder->path, err)
                                                     : FSDP_OK;
    if (st == FSDP_OK)
        st = fsdp_folder_check_links(folder, path.data + strlen(folder->path) + 1, err);
    if (st == FSDP_OK)
        st = fsdp_source_open(folder->io, path.data, opts, &list->parts[number].source, err);
    fsdp_text_release(&path);
    return st;
}

static fsdp_status open_shards(shard_list *list, const fsdp_source_opts *opts, fsdp_error *err)
{
    const fsdp_folder *folder = list->folder;
    size_t number = 0;
    for (size_t i = 0; i < folder->names.count; i++)
        if (fsdp_framework_matches(folder->row->markers[0], folder->names.items[i], NULL))
            FSDP_TRY(open_shard(list, number++, folder->names.items[i], opts, err));
    return FSDP_OK;
}

static fsdp_status make_keys(shard_list *list, fsdp_error *err)
{
    for (size_t i = 0; i < list->count; i++) {
        int64_t at[COORDINATES] = {0};
        fsdp_text text = {0};
        for (int d = 0; d < list->coordinates; d++)
            at[list->roles[d]] = list->shards[i].at[d];
        fsdp_text_addf(&text, "tp%" PRId64 ".pp%" PRId64 ".ep%" PRId64, at[TENSOR], at[PIPELINE],
                       at[EXPERT]);
        list->shards[i].key = text.failed ? NULL : fsdp_strndup(text.data, text.size);
        fsdp_text_release(&text);
        if (!list->shards[i].key)
            return fsdp_fail_memory(err, list->folder->path);
        list->parts[i].key = list->shards[i].key;
    }
    return FSDP_OK;
}

static fsdp_status compare_ranks(const shard_list *list, fsdp_error *err)
{
    fsdp_folder_rank *ranks = fsdp_alloc(list->count, sizeof *ranks);
    if (!ranks)
        return fsdp_fail_memory(err, list->folder->path);
    for (size_t i = 0; i < list->count; i++) {
        int64_t at[COORDINATES] = {0};
        for (int d = 0; d < list->coordinates; d++)
            at[list->roles[d]] = list->shards[i].at[d];
        ranks[i] = (fsdp_folder_rank){list->parts[i].source, at[TENSOR], at[PIPELINE], at[EXPERT]};
    }
    fsdp_status st = folder_ranks_agree(list->folder->row, ranks, list->count, err);
    fsdp_free(ranks);
    return st;
}

static fsdp_status prepare(shard_list *list, const fsdp_source_opts *opts, fsdp_error *err)
{
    FSDP_TRY(list_shards(list, err));
    FSDP_TRY(open_shards(list, opts, err));
    find_roles(list);
    FSDP_TRY(compare_ranks(list, err));
    FSDP_TRY(check_sizes(list, err));
    return make_keys(list, err);
}

fsdp_status fsdp_folder_open_shards(const fsdp_folder *folder, const fsdp_source_opts *opts,
                                    fsdp_source **source_out, fsdp_error *err)
{
    shard_list list = {.folder = folder};
    fsdp_status st = prepare(&list, opts, err);
    bool joins = st == FSDP_OK;
    if (joins) /* it takes the sources over */
        st = fsdp_source_join(folder->path, list.parts, list.count, opts, source_out, err);
    release(&list, !joins);
    return st;
}
