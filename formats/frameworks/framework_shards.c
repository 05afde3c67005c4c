/*
 * A directory with a folder for each rank of tensor and pipeline parallelism (Megatron's mp_rank_TT_PPP) as
 * one source: the names of a rank's file begin with "tpT.ppP.", by which a map joins the parts. See
 * framework_folder.h.
 */
#include "formats/frameworks/framework_folder.h"

#include "base/core/mem.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

enum { COORDINATES = 3, SHARDS_MOST = 4096 };

typedef struct shard_list {
    fsdp_source_part *parts;
    char **keys;
    size_t count;
} shard_list;

static void release(shard_list *shards, bool closes)
{
    for (size_t i = 0; i < shards->count; i++) {
        if (closes)
            fsdp_source_close(shards->parts[i].source);
        fsdp_free(shards->keys[i]);
    }
    fsdp_free(shards->parts);
    fsdp_free(shards->keys);
}

/* "mp_rank_01_002": 1 and 2. The numbers follow the last letters of the name. */
static int read_coordinates(const char *name, int64_t out[COORDINATES])
{
    int count = 0;
    const char *at = name + strcspn(name, "0123456789");
    while (*at && count < COORDINATES) {
        out[count++] = strtoll(at, NULL, 10);
        at += strspn(at, "0123456789");
        at += *at == '_';
    }
    return count;
}

static fsdp_status make_key(const fsdp_folder *folder, const char *name, char **key_out,
                            fsdp_error *err)
{
    int64_t at[COORDINATES] = {0};
    fsdp_text text = {0};
    if (read_coordinates(name, at) == COORDINATES)
        return fsdp_fail(
            err, FSDP_ERR_USAGE,
            "'%s/%s' is a rank of expert parallelism, whose files cannot be joined here: "
            "Megatron saves them as one with --ckpt-format torch_dist",
            folder->path, name);
    fsdp_text_addf(&text, "tp%" PRId64 ".pp%" PRId64, at[0], at[1]);
    *key_out = text.failed ? NULL : fsdp_strndup(text.data, text.size);
    fsdp_text_release(&text);
    return *key_out ? FSDP_OK : fsdp_fail_memory(err, folder->path);
}

static fsdp_status open_shard(const fsdp_folder *folder, const char *name,
                              const fsdp_source_opts *opts, shard_list *shards, fsdp_error *err)
{
    fsdp_text path = {0};
    fsdp_source_part *part = &shards->parts[shards->count];
    FSDP_TRY(make_key(folder, name, &shards->keys[shards->count], err));
    part->key = shards->keys[shards->count++];
    fsdp_text_addf(&path, "%s/%s/%s", folder->path, name, folder->row->shards);
    fsdp_status st = path.failed ? fsdp_fail_memory(err, "a path")
                     : !fsdp_folder_may_look(folder)
                         ? fsdp_folder_fail_looks(folder->path, err)
                         : fsdp_source_open(folder->io, path.data, opts, &part->source, err);
    fsdp_text_release(&path);
    return st;
}

fsdp_status fsdp_folder_open_shards(const fsdp_folder *folder, const fsdp_source_opts *opts,
                                    fsdp_source **source_out, fsdp_error *err)
{
    shard_list shards = {.parts = fsdp_alloc(folder->names.count, sizeof *shards.parts),
                         .keys = fsdp_alloc(folder->names.count, sizeof *shards.keys)};
    fsdp_status st = shards.parts && shards.keys ? FSDP_OK : fsdp_fail_memory(err, folder->path);
    for (size_t i = 0; i < folder->names.count && st == FSDP_OK; i++)
        if (fsdp_framework_matches(folder->row->markers[0], folder->names.items[i], NULL))
            st = shards.count < SHARDS_MOST
                     ? open_shard(folder, folder->names.items[i], opts, &shards, err)
                     : fsdp_fail(err, FSDP_ERR_LIMIT, "'%s' has more than %d ranks", folder->path,
                                 SHARDS_MOST);
    bool joins = st == FSDP_OK;
    if (joins) /* it takes the sources over */
        st = fsdp_source_join(folder->path, shards.parts, shards.count, opts, source_out, err);
    release(&shards, !joins);
    return st;
}
