/*
 * Checks before the first byte that a checkpoint fits on the disk. The size is estimated from the
 * description alone, on one rank, and rather too high than too low.
 */
#include "statedict/commit/space.h"

#include "statedict/commit/commit_internal.h"
#include "statedict/manifest/large_value.h"
#include "statedict/sd/layout_internal.h"

#include <string.h>

enum {
    FILE_BYTES = 8 << 10, /* superblock, root group, heads of indexes; manifest's entry of it */
    BOX_BYTES = 700,      /* a dataset, its link and its index record */
    MAPPING_BYTES = 160,  /* of the view */
    ENTRY_BYTES = 500,    /* in the manifest, and the view's dataset */
    NAME_COPIES = 6,      /* of a name: in files, index, manifest and view, there escaped */
    SPARE_PART = 10,      /* required beyond the estimate: a tenth */
    FIXED_FILES = 4       /* the directory, its marker, the manifest, the view */
};

static void add(int64_t *sum, int64_t count, int64_t bytes)
{
    int64_t product;
    if (fsdp_mul_overflow(count, bytes, &product) || fsdp_add_overflow(*sum, product, sum))
        *sum = INT64_MAX;
}

static void add_data(int64_t *sum, const fsdp_entry *entry, const fsdp_volume *volume)
{
    if (volume->compress)
        return; /* the compressed size is unknown */
    if (volume->kind != FSDP_LOCAL) {
        add(sum, 1, fsdp_entry_bytes(entry));
        return;
    }
    if (entry->flat >= 0)
        return;
    for (int rank = 0; rank < volume->world; rank++)
        add(sum, 1, fsdp_entry_local_bytes(entry, rank));
}

static void add_flats(int64_t *sum, const fsdp_sd *sd, const fsdp_volume *volume)
{
    if (volume->kind != FSDP_LOCAL || volume->compress)
        return;
    for (size_t i = 0; i < fsdp_sd_flat_count(sd); i++) {
        const fsdp_flat *flat = fsdp_sd_flat_at(sd, i);
        int64_t copies = volume->world / fsdp_mesh_size(flat->mesh);
        int64_t bytes = flat->count * (int64_t)fsdp_dtype_size(flat->dtype);
        add(sum, copies > 1 ? copies : 1, bytes);
    }
}

int64_t fsdp_volume_bytes(const fsdp_sd *sd, const fsdp_volume *volume)
{
    int64_t sum = 0;
    int files = volume->kind == FSDP_FULL ? 1 : volume->world;
    bool view = volume->kind != FSDP_FULL && volume->with_view;
    add(&sum, files + view, FILE_BYTES);
    add_flats(&sum, sd, volume);
    for (size_t i = 0; i < fsdp_sd_count(sd); i++) {
        const fsdp_entry *entry = fsdp_sd_at(sd, i);
        add(&sum, 1, ENTRY_BYTES + NAME_COPIES * (int64_t)entry->name_size);
        if (entry->kind == FSDP_ENTRY_VALUE)
            add(&sum, 1, (int64_t)fsdp_value_bytes(&entry->value));
        if (entry->kind != FSDP_ENTRY_TENSOR)
            continue;
        add_data(&sum, entry, volume);
        add(&sum, files, BOX_BYTES + 2 * (int64_t)entry->name_size + (view ? MAPPING_BYTES : 0));
    }
    return sum;
}

int64_t fsdp_volume_room(const fsdp_sd *sd, const fsdp_volume *volume)
{
    int64_t room = fsdp_volume_bytes(sd, volume);
    add(&room, 1, volume->more);
    if (room < 0) /* more exists than is needed: files reserve whole pieces */
        return 0;
    add(&room, 1, room / SPARE_PART);
    return room;
}

/* --- the file system -------------------------------------------------------------------------- */

static fsdp_status check_room(const char *dir, const fsdp_space *space, int64_t wanted,
                              int64_t files, bool is_exact, fsdp_error *err)
{
    if (wanted > space->free_bytes)
        return fsdp_fail(err, FSDP_ERR_NO_SPACE,
                         "'%s' needs about %lld bytes%s, and its file system has %lld free; free "
                         "some space there, or save to another file system",
                         dir, (long long)wanted, is_exact ? "" : ", including a tenth to spare",
                         (long long)space->free_bytes);
    if (files > space->free_files)
        return fsdp_fail(err, FSDP_ERR_NO_SPACE,
                         "'%s' needs %lld files, but its file system can take %lld; remove some, "
                         "or save to another file system",
                         dir, (long long)files, (long long)space->free_files);
    return FSDP_OK;
}

fsdp_status fsdp_require_space(fsdp_io *io, const char *dir, const fsdp_volume *volume,
                               int64_t room, fsdp_space *space_out, fsdp_error *err)
{
    char *path = NULL, *parent = NULL;
    int files = volume->kind == FSDP_FULL ? 1 : volume->world;
    *space_out = (fsdp_space){.free_bytes = -1, .free_files = -1};
    FSDP_TRY(fsdp_path_split(dir, &path, &parent, err));
    int result = io->ops->space(io, parent, space_out);
    fsdp_free(path);
    fsdp_free(parent);
    if (result == 0)
        return check_room(dir, space_out, room, files + FIXED_FILES, volume->is_exact, err);
    *space_out = (fsdp_space){.free_bytes = -1, .free_files = -1};
    return FSDP_OK;
}
