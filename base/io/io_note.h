/*
 * The io back end that records the files it opens for reading, with size and time at that moment. A plan
 * compares the record later, to see whether a source has changed.
 *
 * Only calls with paths pass here: an open file belongs to the inner back end and outlives the notes.
 */
#ifndef FSDP_IO_NOTE_H
#define FSDP_IO_NOTE_H

#include "base/io/io.h"

typedef struct fsdp_io_noted {
    const char *path;          /* as it was asked for; the same one may be there again */
    fsdp_file_info info;
} fsdp_io_noted;

/* One thread's work. */
typedef struct fsdp_io_note {
    fsdp_io io;                /* to be handed out */
    fsdp_io *inner;
    fsdp_io_noted *items;
    size_t count, room;
    fsdp_arena arena;
} fsdp_io_note;

/* Borrows inner. */
void fsdp_io_note_begin(fsdp_io_note *note, fsdp_io *inner);
void fsdp_io_note_release(fsdp_io_note *note);

#endif
