/* File operations of a conversion: layers around the given io that bypass the page cache, limit the rate, and
 * open each file once while the conversion is planned. */
#ifndef FSDP_CONVERT_IO_H
#define FSDP_CONVERT_IO_H

#include "base/io/io.h"
#include "base/text.h"
#include <fsdp/convert.h>

typedef struct fsdp_convert_io {
    fsdp_convert_opts opts;    /* with open.access through all of them */
    fsdp_io *limit, *direct;   /* or NULL */
    fsdp_io *cache;            /* the outermost */
} fsdp_convert_io;

/* opts NULL: the defaults. The struct must not move until fsdp_convert_io_end. */
fsdp_status fsdp_convert_io_begin(fsdp_convert_io *how, const fsdp_convert_opts *opts, fsdp_error *err);
/* Call after all files are closed. A notice names files for which the page cache was used nevertheless. */
void fsdp_convert_io_end(fsdp_convert_io *how);

/* Opens the source of a conversion with the options' format and limits. */
fsdp_status fsdp_convert_open(const char *from, const fsdp_convert_opts *opts,
                              fsdp_checkpoint **checkpoint_out, fsdp_error *err);

/* Adds the names of the classes and functions that a program runs when it loads the file, with ", " between
 * them. A file that is not understood may run anything, and names says so. */
fsdp_status fsdp_convert_file_code(const char *path, const fsdp_access *access, fsdp_text *names,
                                   fsdp_error *err);

/* Memory of these layers for all threads together. */
int64_t fsdp_convert_io_room(const fsdp_convert_opts *opts);

#endif
