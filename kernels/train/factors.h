/*
 * Numbers that depend only on the settings of a step or of a reduction, which every processor computes with:
 * C loops and kernels of GPUs, which thus round alike.
 */
#ifndef FSDP_FACTORS_H
#define FSDP_FACTORS_H

#include "kernels/loops.h"
#include "kernels/train/tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

fsdp_adamw_factors fsdp_adamw_factors_of(const fsdp_adamw_step *step);
fsdp_sgd_factors fsdp_sgd_factors_of(const fsdp_sgd_step *step);
/* 1 / divisor if that is exact, so that a product with it is the quotient; else 1. */
double fsdp_exact_reciprocal(double divisor);

/* Pieces of FSDP_LOOP_BLOCK elements whose power sums are added to one, before these are added. */
enum { FSDP_POWER_GROUP = 128 };

#ifdef __cplusplus
}
#endif
#endif
