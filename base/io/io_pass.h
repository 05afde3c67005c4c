/*
 * The io back end that hands every call on to another one: what wraps a back end begins with it and puts
 * its own functions into the table. A file keeps the flags that it was opened with.
 */
#ifndef FSDP_IO_PASS_H
#define FSDP_IO_PASS_H

#include "base/io/io.h"

typedef struct fsdp_io_pass {
    fsdp_io base;              /* first: to be handed out */
    fsdp_io *inner;            /* borrowed */
    fsdp_io_ops ops;           /* of its files, too */
} fsdp_io_pass;

typedef struct fsdp_pass_file {
    fsdp_file base;
    fsdp_file *inner;
    fsdp_io_pass *owner;
    unsigned flags;
} fsdp_pass_file;

/* pass lies where it stays: its files lead to it. */
void fsdp_io_pass_begin(fsdp_io_pass *pass, const char *name, fsdp_io *inner);

/* What is in the table for open: of use to those who put another there. */
int fsdp_io_pass_open(fsdp_io *io, const char *path, unsigned flags, fsdp_file **file_out);

#endif
