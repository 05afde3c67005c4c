/* Estimates the size of a checkpoint and checks, before its first byte, that the disk has space for it. */
#ifndef FSDP_SPACE_H
#define FSDP_SPACE_H

#include "base/io/io.h"
#include <fsdp/checkpoint.h>

/* The options that decide the size of a state dict on a disk. */
typedef struct fsdp_volume {
    fsdp_kind kind;
    int world;
    bool compress, with_view;
    int64_t more;              /* bytes needed next to it; negative: bytes that exist already */
    bool is_exact;             /* the room asked for has no tenth to spare */
} fsdp_volume;

/* The bytes that will be written, about. Compressed data counts as 0, since its size is unknown. */
int64_t fsdp_volume_bytes(const fsdp_sd *sd, const fsdp_volume *volume);

/* The bytes that must be free: the above, a tenth more, and volume->more. */
int64_t fsdp_volume_room(const fsdp_sd *sd, const fsdp_volume *volume);

/* FSDP_ERR_NO_SPACE when the file system of DIR has less than `room` bytes (fsdp_volume_room) or too few
 * inodes free. FSDP_OK with space_out->free_bytes -1 when the file system does not report them. */
fsdp_status fsdp_require_space(fsdp_io *io, const char *dir, const fsdp_volume *volume, int64_t room,
                               fsdp_space *space_out, fsdp_error *err);

#endif
