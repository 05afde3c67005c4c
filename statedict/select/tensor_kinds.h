/*
 * Kinds of tensors for which no dtype or layout of the library stands: a source lists them as values, by
 * their class. They are weights in any case, so that only --drop tensors:KIND leaves them out.
 *
 *   quantized, sparse, jagged, meta   of PyTorch
 *   void                              arrays of NumPy whose elements have a size and no type
 *   flat                              a flat parameter of FSDP1: its names are not in the file
 *   other                             further classes of tensors, numbers of unusual size
 */
#ifndef FSDP_TENSOR_KINDS_H
#define FSDP_TENSOR_KINDS_H

#include <fsdp/sd.h>

/* The kind of the tensor that an entry is, or that its value holds; NULL: none. An object that a checkpoint
 * holds as a blob is looked into. *is_subclass_out: the value is a tensor whose members may be listed, too
 * (selection.c). */
const char *fsdp_tensor_kind(const fsdp_entry *entry, bool *is_subclass_out);

/* True for a value that holds each rank's piece of a parameter: a flat parameter of its unit is next to
 * it. */
bool fsdp_is_flat_piece(const fsdp_sd *sd, const fsdp_entry *entry);

/* True for a value with a plain tensor in it. */
bool fsdp_value_holds_tensor(const fsdp_value *value);

/* The kind of this name, as fsdp_tensor_kind returns it; NULL when there is none. */
const char *fsdp_tensor_kind_named(const char *name);
/* "quantized, sparse, ..." */
const char *fsdp_tensor_kinds(void);

#endif
