/* Going on with an export that was cut off: see export_resume.h. */
#include "statedict/convert/export_resume.h"

#include "base/core/mem.h"
#include "statedict/commit/commit_internal.h"

#include <string.h>

/* Smaller ones are sooner read again than looked up. */
enum { NOTED_LEAST = 64 << 10 };

void fsdp_export_agree_on_slabs(fsdp_export_place *place, int64_t least, int64_t *slab_bytes)
{
    if (!place->is_taken_up || place->unit == *slab_bytes)
        return;
    if (place->unit >= least && place->unit < *slab_bytes) {
        *slab_bytes = place->unit;
        return;
    }
    place->unit = *slab_bytes;
    fsdp_resume_end(&place->notes);
    fsdp_marker_remove(place->io, place->staging, FSDP_RESUME_NAME);
    fsdp_resume_begin(&place->notes, place->io, place->staging, place->hash, place->unit, false);
}

static char *file_of(const fsdp_export_place *place, const fsdp_target_place *lies)
{
    return lies->file[0] ? fsdp_path_join(place->path, lies->file)
                         : fsdp_strndup(place->path, strlen(place->path));
}

static bool read_back(const fsdp_export_place *place, const fsdp_export_piece *piece, void *data)
{
    fsdp_target_place lies;
    fsdp_file *file = NULL;
    if (place->format->ops->place(piece->target, piece->entry, piece->box, &lies, NULL) != FSDP_OK)
        return false;
    char *path = file_of(place, &lies);
    int64_t offset = lies.offset + piece->first * (int64_t)piece->element_size;
    bool fine = path && place->io->ops->open(place->io, path, FSDP_IO_READ, &file) == 0 &&
                fsdp_io_read(file, path, data, piece->size, offset, NULL) == FSDP_OK;
    (void)fsdp_io_close(&file, path, NULL); /* only read */
    fsdp_free(path);
    return fine;
}

static size_t note_size(const fsdp_export_piece *piece)
{
    return piece->casts ? sizeof(fsdp_export_done) : sizeof(fsdp_hash);
}

bool fsdp_export_is_there(const fsdp_export_place *place, const fsdp_export_piece *piece,
                          void *data, fsdp_export_done *done_out)
{
    fsdp_export_done noted = {0};
    if (!place->is_taken_up || !place->format->ops->place || piece->size < NOTED_LEAST ||
        !fsdp_resume_get(&place->notes, piece->number, &noted, note_size(piece)) ||
        !read_back(place, piece, data))
        return false;
    fsdp_hash hash = fsdp_kernels_get()->hash(data, piece->size);
    if (memcmp(&noted.hash, &hash, sizeof hash) != 0)
        return false;
    *done_out = noted;
    return true;
}

void fsdp_export_note(const fsdp_export_place *place, const fsdp_export_piece *piece,
                      const fsdp_export_done *done)
{
    if (piece->size >= NOTED_LEAST)
        fsdp_resume_put(&place->notes, piece->number, done, note_size(piece));
}
