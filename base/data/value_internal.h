/* The private part of value.h: values that only readers of other programs' checkpoints make. */
#ifndef FSDP_VALUE_INTERNAL_H
#define FSDP_VALUE_INTERNAL_H

#include <fsdp/value.h>

/* Turns value into one with an item per rank: count null items (as.list of the value that
 * fsdp_value_per_rank returns). It counts as opaque, since no other program knows it. */
FSDP_CHECKED fsdp_status fsdp_value_set_per_rank(fsdp_value *value, size_t count, fsdp_error *err);

/* True for a value that is, or holds, something that only its writer understands: OPAQUE, CLASS, TENSOR. */
bool fsdp_value_is_opaque(const fsdp_value *value);

#endif
