/*
 * Tensors of a quantized model whose numbers are weights only together with a scale in another tensor: a cast
 * of one of them would keep its numbers and lose the weights.
 */
#ifndef FSDP_SCALES_H
#define FSDP_SCALES_H

#include "statedict/select/selection.h"

typedef struct fsdp_scales_report {
    int64_t integers;          /* weights of integers or bytes with scales, and tensors of subclasses, that
                                * no cast changes */
    int64_t known;             /* of them, MXFP4, of which --dequant makes plain weights */
} fsdp_scales_report;

/* FSDP_ERR_USAGE names the tensors that the selection casts although a scale belongs to them, each with its
 * scale. selected has an item per entry of sd. */
fsdp_status fsdp_scales_check(const fsdp_sd *sd, const fsdp_selected *selected,
                              fsdp_scales_report *report_out, fsdp_error *err);

#endif
