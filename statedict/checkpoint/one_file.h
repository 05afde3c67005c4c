/*
 * A checkpoint in one file: a full checkpoint's shard file with the manifest's text after HDF5's end-of-file
 * address. This library opens it like a native directory, other programs as an HDF5 file.
 */
#ifndef FSDP_ONE_FILE_H
#define FSDP_ONE_FILE_H

#include "statedict/manifest/manifest.h"

/* True when the path is such a file, damaged or not. False for one that cannot be read. */
bool fsdp_is_one_file(fsdp_io *io, const char *path);

/* As fsdp_manifest_read; the size in its only file record becomes that of the whole file. */
fsdp_status fsdp_one_file_read(fsdp_io *io, const char *path, fsdp_manifest *manifest_out,
                               fsdp_error *err);

/* Turns a finished shard file into such a file. */
fsdp_status fsdp_one_file_append(fsdp_io *io, const char *path, const fsdp_manifest *manifest,
                                 bool durable, fsdp_error *err);

#endif
