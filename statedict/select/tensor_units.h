/*
 * Tensors of subclasses without a storage of their own (torchao's AffineQuantizedTensor and Float8Tensor): a
 * source lists such a tensor as a value of its class, and its members (the numbers, their scale) below its
 * name. Only together they are weights, so that a selection takes all of them or none.
 */
#ifndef FSDP_TENSOR_UNITS_H
#define FSDP_TENSOR_UNITS_H

#include "statedict/select/selection.h"

/* Fills in the kinds and the units of selected, which has an item per entry of sd. A member has the kind of
 * its unit. */
fsdp_status fsdp_units_find(const fsdp_sd *sd, fsdp_selected *selected, fsdp_error *err);

/* FSDP_ERR_USAGE names a unit of which the selection takes only some entries. */
fsdp_status fsdp_units_check(const fsdp_sd *sd, const fsdp_selected *selected, fsdp_error *err);

static inline bool fsdp_unit_has_member(const fsdp_selected *selected, size_t entry)
{
    return selected[entry].unit != 0 && selected[entry].unit != entry + 1;
}

#endif
