/*
 * A directory with a folder for each rank of tensor, pipeline and expert parallelism (Megatron's
 * mp_rank_TT_PPP_EEE) as one source: the names of a rank's file begin with "tpT.ppP.epE.", by which a map
 * joins the parts. See framework_folder.h.
 */
#include "formats/frameworks/framework_folder.h"

#include "base/core/mem.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

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
                         "'%s' has folders of two kinds, such as '%s' and '%s': move those of one "
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
                   : fsdp_fail(err, FSDP_ERR_USAGE, "'%s' has two folders of one rank",
                               list->folder->path);
    fsdp_text name = {0};
    fsdp_text_addf(&name, "%.*s%02" PRId64, list->letters, list->first, at[0]);
    for (int d = 1; d < list->coordinates; d++)
        fsdp_text_addf(&name, "_%03" PRId64, at[d]);
    fsdp_status st =
        name.failed ? fsdp_fail_memory(err, "a name")
                    : fsdp_fail(err, FSDP_ERR_DAMAGED,
                                "'%s/%s' is missing, a rank of this checkpoint, which has %" PRId64
                                " of them",
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
                             "'%s' has folders of %" PRId64 " ranks, and their files say that %s "
                             "is %" PRId64 ": those of another save lie among them",
                             list->folder->path, list->sizes[d], names[list->roles[d]], size);
        if (size > list->sizes[d] && size <= SHARDS_MOST)
            list->sizes[d] = size;
    }
    if (experts > 0 && experts != list->sizes[0])
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "'%s' has %" PRId64 " parts of each expert and %" PRId64
                         " of other weights, which cannot be joined here: Megatron saves them as "
                         "one with --ckpt-format torch_dist",
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
    fsdp_status st = fsdp_folder_ranks_agree(list->folder->row, ranks, list->count, err);
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
