/* How a conversion touches files: past the page cache, at a rate, or both, around the io it was given. */
#ifndef FSDP_CONVERT_IO_H
#define FSDP_CONVERT_IO_H

#include "base/io/io.h"
#include <fsdp/convert.h>

typedef struct fsdp_convert_io {
    fsdp_convert_opts opts;    /* with open.access through limit and direct */
    fsdp_io *limit, *direct;   /* or NULL */
} fsdp_convert_io;

/* opts NULL: the defaults. The struct stays where it is until the end. */
fsdp_status fsdp_convert_io_begin(fsdp_convert_io *how, const fsdp_convert_opts *opts, fsdp_error *err);
/* All files are closed before. Tells where the page cache was used all the same. */
void fsdp_convert_io_end(fsdp_convert_io *how);

/* The source of a conversion, as its options say. */
fsdp_status fsdp_convert_open(const char *from, const fsdp_convert_opts *opts,
                              fsdp_checkpoint **checkpoint_out, fsdp_error *err);

/* Memory that all threads together take for it. */
int64_t fsdp_convert_io_room(const fsdp_convert_opts *opts);

#endif
