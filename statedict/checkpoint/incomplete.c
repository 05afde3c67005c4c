/* Checkpoints with missing files: see incomplete.h. */
#include "statedict/checkpoint/incomplete.h"

#include "base/core/mem.h"
#include "formats/source.h"
#include "statedict/commit/commit_internal.h"

#include <errno.h>
#include <string.h>

fsdp_status fsdp_incomplete_allow(fsdp_checkpoint *checkpoint, const fsdp_open_opts *opts,
                                  fsdp_error *err)
{
    if (!opts || !opts->allow_missing)
        return FSDP_OK;
    return fsdp_filter_create(opts->allow_missing, NULL, &checkpoint->may_lack, err);
}

fsdp_status fsdp_incomplete_mark(fsdp_checkpoint *checkpoint, size_t entry, fsdp_error *err)
{
    size_t count = fsdp_sd_count(checkpoint->manifest.sd);
    if (!checkpoint->is_missing)
        checkpoint->is_missing = fsdp_alloc(count, sizeof *checkpoint->is_missing);
    if (!checkpoint->is_missing)
        return fsdp_fail_memory(err, "the list of what is missing");
    checkpoint->missing_count += !checkpoint->is_missing[entry];
    checkpoint->is_missing[entry] = true;
    return FSDP_OK;
}

/* --- checkpoints of ours ---------------------------------------------------------------------- */

bool fsdp_incomplete_is_lost(const fsdp_checkpoint *checkpoint, int file)
{
    char name[FSDP_SHARD_NAME_SIZE];
    fsdp_file_info info;
    fsdp_shard_name(file, checkpoint->manifest.file_count, name);
    char *path = checkpoint->is_one_file ? NULL : fsdp_path_join(checkpoint->path, name);
    bool lost = path && checkpoint->io->ops->info(checkpoint->io, path, &info) == -ENOENT;
    fsdp_free(path);
    return lost;
}

fsdp_status fsdp_incomplete_lose(fsdp_checkpoint *checkpoint, size_t number, int file,
                                 fsdp_error *err)
{
    const fsdp_entry *entry = fsdp_sd_at(checkpoint->manifest.sd, number);
    char shown[160], name[FSDP_SHARD_NAME_SIZE];
    if (fsdp_filter_selects(checkpoint->may_lack, entry->name, entry->name_size))
        return fsdp_incomplete_mark(checkpoint, number, err);
    fsdp_shard_name(file, checkpoint->manifest.file_count, name);
    return fsdp_fail(err, FSDP_ERR_DAMAGED,
                     "'%s/%s' is missing, which holds a part of '%s', and --allow-missing does not "
                     "match its name",
                     checkpoint->path, name,
                     fsdp_printable(entry->name, entry->name_size, shown, sizeof shown));
}

typedef struct lost_search {
    const fsdp_checkpoint *checkpoint;
    int file; /* that holds a part of the entry, or -1 */
} lost_search;

static fsdp_status find_lost(void *context, int file, fsdp_error *err)
{
    lost_search *search = context;
    (void)err;
    if (!fsdp_native_of(search->checkpoint)->readers[file])
        search->file = file;
    return FSDP_OK;
}

fsdp_status fsdp_incomplete_mark_lost(fsdp_checkpoint *checkpoint, fsdp_error *err)
{
    const fsdp_sd *sd = checkpoint->manifest.sd;
    for (size_t i = 0; i < fsdp_sd_count(sd); i++) {
        const fsdp_entry *entry = fsdp_sd_at(sd, i);
        lost_search search = {checkpoint, -1};
        if (entry->kind != FSDP_ENTRY_TENSOR)
            continue;
        fsdp_box whole = fsdp_box_whole(entry->ndim, entry->shape);
        FSDP_TRY(fsdp_checkpoint_locate(checkpoint, i, &whole, find_lost, &search, err));
        if (search.file >= 0)
            FSDP_TRY(fsdp_incomplete_lose(checkpoint, i, search.file, err));
    }
    for (size_t i = 0; checkpoint->is_missing && i < fsdp_sd_count(sd); i++) {
        const fsdp_entry *entry = fsdp_sd_at(sd, i);
        if (entry->kind == FSDP_ENTRY_ALIAS && checkpoint->is_missing[entry->target])
            FSDP_TRY(fsdp_incomplete_mark(checkpoint, i, err));
    }
    return FSDP_OK;
}
