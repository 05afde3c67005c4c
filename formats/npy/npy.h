/*
 * Room npy: NumPy arrays, one .npy file or the members of an .npz.
 *
 * In: a file whose bytes may be hostile, or the tensors of a packed target. Out: the catalog of a source
 * (source.h), or files that numpy.load reads.
 *
 *   npz_read.c    the header of an array, and the formats "npy" and "npz" as sources
 *   npz_write.c   the formats "npy" and "npz" as packed targets (target/packed.h)
 *
 * The header is a Python dict literal, which is parsed, never evaluated:
 *
 *     "\x93NUMPY", version (two bytes), length (u16, from version 2 on u32), "{'descr': '<f4', ...}"
 *
 * Only the list of detect refers to this room. It calls zip, source and target.
 */
#ifndef FSDP_NPY_H
#define FSDP_NPY_H

#include "formats/target.h"

extern const fsdp_format_writer fsdp_npz_writer, fsdp_npy_writer;    /* npz_write.c */

#endif
