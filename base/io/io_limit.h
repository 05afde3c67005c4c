/*
 * The io back end that keeps to a rate: bytes read and bytes written are each held to so many a second, over
 * all its files and threads. For work beside something that needs the disk or the network more.
 *
 * A transfer is cut to a short piece and waits until those before it have had their time; after a pause an
 * eighth of a second's bytes go through at once. Waits are slept in slices, so that a stop is soon seen: then
 * a call that would wait fails with -ECANCELED. Small ones (what a cleanup needs) go through all the same.
 */
#ifndef FSDP_IO_LIMIT_H
#define FSDP_IO_LIMIT_H

#include "base/io/io.h"

typedef struct fsdp_io_limit_opts {
    int64_t bytes_per_second;          /* at least 1 */
    /* All called from any thread, and with user. NULL: never stopped; the system's clock. */
    bool (*stopped)(void *user);
    int64_t (*now_ns)(void *user);
    void (*sleep_ns)(void *user, int64_t ns);
    void *user;
} fsdp_io_limit_opts;

/* Borrows inner until it is freed. */
fsdp_status fsdp_io_limit_create(fsdp_io *inner, const fsdp_io_limit_opts *opts, fsdp_io **io_out,
                                 fsdp_error *err);
/* All its files are closed before. Accepts NULL. */
void fsdp_io_limit_free(fsdp_io *io);

#endif
