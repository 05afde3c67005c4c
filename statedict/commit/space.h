/* Is there room for a checkpoint, asked before its first byte is written. See space.c. */
#ifndef FSDP_SPACE_H
#define FSDP_SPACE_H

#include "base/io/io.h"
#include <fsdp/checkpoint.h>

/* What decides how much a state dict takes on a disk. */
typedef struct fsdp_volume {
    fsdp_kind kind;
    int world;
    bool compress, with_view;
    int64_t more;              /* bytes that are needed beside it; negative: that are there already */
    bool is_exact;             /* the room asked for has nothing to spare */
} fsdp_volume;

/* About what will be written. Compressed data counts as nothing: only what is around it is known. */
int64_t fsdp_volume_bytes(const fsdp_sd *sd, const fsdp_volume *volume);

/* What must be free: that and a tenth more, and volume->more. */
int64_t fsdp_volume_room(const fsdp_sd *sd, const fsdp_volume *volume);

/* FSDP_ERR_NO_SPACE when the file system that will hold DIR has not room bytes free (fsdp_volume_room), or no
 * node for each file; nothing when it cannot tell: then space_out->free_bytes is -1. */
fsdp_status fsdp_require_space(fsdp_io *io, const char *dir, const fsdp_volume *volume, int64_t room,
                               fsdp_space *space_out, fsdp_error *err);

#endif
