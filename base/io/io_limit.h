/*
 * The io back end that limits the rate: reads and writes are each limited to bytes_per_second over all files
 * and threads, to leave disk and network to other programs.
 *
 * A transfer is cut to a short piece and waits until earlier ones are paid for at the rate; after a pause an
 * eighth of a second's bytes go through at once. Waits sleep in slices and check `stopped`: after a stop a
 * call that would wait fails with -ECANCELED, except small ones, which a cleanup needs.
 */
#ifndef FSDP_IO_LIMIT_H
#define FSDP_IO_LIMIT_H

#include "base/io/io.h"

typedef struct fsdp_io_limit_opts {
    int64_t bytes_per_second;          /* at least 1 */
    /* Called from any thread. NULL: never stopped; the system's clock. */
    bool (*stopped)(void *context);
    int64_t (*now_ns)(void *context);
    void (*sleep_ns)(void *context, int64_t ns);
    void *context;
} fsdp_io_limit_opts;

/* Borrows inner until it is freed. */
fsdp_status fsdp_io_limit_create(fsdp_io *inner, const fsdp_io_limit_opts *opts, fsdp_io **io_out,
                                 fsdp_error *err);
/* All its files are closed before. Accepts NULL. */
void fsdp_io_limit_free(fsdp_io *io);

#endif
