/*
 * The order in which a model of transformers has its parameters, by which optimizers number them. Files of
 * safetensors have the order of names, where "layers.10" is before "layers.2".
 *
 * The orders are data: parameter_orders.txt, which tests/peers/parameter_orders.py makes of the models of
 * transformers. Local, without I/O.
 */
#ifndef FSDP_PARAMETER_ORDER_H
#define FSDP_PARAMETER_ORDER_H

#include "base/core/mem.h"
#include <fsdp/status.h>

typedef struct fsdp_parameter {
    const char *name;
    size_t size;
    size_t entry;              /* the caller's */
    bool is_norm;              /* of an nn.LayerNorm, which no name shows */
    bool is_buffer;            /* no parameter */
    const int32_t *key;        /* private */
    int key_count;
} fsdp_parameter;

/*
 * Sorts the parameters of a model of this type, and fills in is_norm and is_buffer. *is_known_out is false,
 * and the order is the old one, when the type or one of the names is not known. The arena holds what is
 * needed meanwhile.
 */
fsdp_status fsdp_parameters_sort(const char *model_type, fsdp_parameter *parameters, size_t count,
                                 fsdp_arena *arena, bool *is_known_out, fsdp_error *err);

#endif
