/*
 * The io back end that forwards every call to another one: a wrapper starts with this table and replaces
 * entries by its own functions. A file keeps the flags that it was opened with.
 */
#ifndef FSDP_IO_PASS_H
#define FSDP_IO_PASS_H

#include "base/io/io.h"

typedef struct fsdp_io_pass {
    fsdp_io base;              /* first: the caller's handle */
    fsdp_io *inner;            /* borrowed */
    fsdp_io_ops ops;           /* of its files, too */
} fsdp_io_pass;

typedef struct fsdp_pass_file {
    fsdp_file base;
    fsdp_file *inner;
    fsdp_io_pass *owner;
    unsigned flags;
} fsdp_pass_file;

/* pass must not move: its files point to it. */
void fsdp_io_pass_begin(fsdp_io_pass *pass, const char *name, fsdp_io *inner);

/* The table's open, for wrappers that replace it. */
int fsdp_io_pass_open(fsdp_io *io, const char *path, unsigned flags, fsdp_file **file_out);

#endif
