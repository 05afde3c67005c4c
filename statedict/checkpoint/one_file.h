/*
 * A checkpoint in one file: a full checkpoint's shard file with the manifest's text behind the end that
 * HDF5 knows. It is opened like a directory of ours, and by other programs as the HDF5 file it is.
 */
#ifndef FSDP_ONE_FILE_H
#define FSDP_ONE_FILE_H

#include "statedict/manifest/manifest.h"

/* True when the path is such a file, damaged or not. False for one that cannot be read. */
bool fsdp_is_one_file(fsdp_io *io, const char *path);

/* As fsdp_manifest_read; the size of its only file is that of all the path holds. */
fsdp_status fsdp_one_file_read(fsdp_io *io, const char *path, fsdp_manifest *manifest_out,
                               fsdp_error *err);

/* Turns a finished shard file into such a file. */
fsdp_status fsdp_one_file_append(fsdp_io *io, const char *path, const fsdp_manifest *manifest,
                                 bool durable, fsdp_error *err);

#endif
