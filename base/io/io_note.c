/* The io back end that notes what is read: see io_note.h. */
#include "base/io/io_note.h"

#include <errno.h>
#include <string.h>

static fsdp_io *inner_io(fsdp_io *io)
{
    return ((fsdp_io_note *)io)->inner;
}

/* --- files ------------------------------------------------------------------------------------ */

static int note_file(fsdp_io_note *note, const char *path)
{
    fsdp_io_noted item = {.path = fsdp_arena_strndup(&note->arena, path, strlen(path))};
    if (!item.path || !fsdp_grow(&note->items, &note->room, note->count + 1, sizeof *note->items))
        return -ENOMEM;
    int result = note->inner->ops->info(note->inner, path, &item.info);
    if (result == 0)
        note->items[note->count++] = item;
    return result;
}

/* Fails when the path cannot be recorded, so that no read is missing from the notes. */
static int note_open(fsdp_io *io, const char *path, unsigned flags, fsdp_file **file_out)
{
    int result = inner_io(io)->ops->open(inner_io(io), path, flags, file_out);
    if (result < 0 || (flags & FSDP_IO_MODE) != FSDP_IO_READ)
        return result;
    result = note_file((fsdp_io_note *)io, path);
    if (result < 0)
        (void)(*file_out)->ops->close(*file_out); /* only read: nothing can be lost */
    return result;
}

/* --- names ------------------------------------------------------------------------------------ */

static int note_unlink(fsdp_io *io, const char *path)
{
    return inner_io(io)->ops->unlink(inner_io(io), path);
}

static int note_list(fsdp_io *io, const char *path, int (*visit)(void *context, const char *name),
                     void *context)
{
    return inner_io(io)->ops->list(inner_io(io), path, visit, context);
}

static int note_info(fsdp_io *io, const char *path, fsdp_file_info *info_out)
{
    return inner_io(io)->ops->info(inner_io(io), path, info_out);
}

/* Open files use the inner back end's operations. Readers create no names, except a spool of unpacked data,
 * which is unlinked as soon as it is open. */
static const fsdp_io_ops note_ops = {
    .name = "note",
    .open = note_open,
    .unlink = note_unlink,
    .list = note_list,
    .info = note_info,
};

void fsdp_io_note_begin(fsdp_io_note *note, fsdp_io *inner)
{
    *note = (fsdp_io_note){.io = {&note_ops, inner->trust, inner->host}, .inner = inner};
}

void fsdp_io_note_release(fsdp_io_note *note)
{
    fsdp_free(note->items);
    fsdp_arena_release(&note->arena);
}
