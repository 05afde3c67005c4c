/*
 * Llama 3.1's scaling of rotary frequencies, as the tensor that llama.cpp reads: a divisor for each frequency
 * of a head.
 */
#ifndef FSDP_ROPE_FACTORS_H
#define FSDP_ROPE_FACTORS_H

#include <fsdp/value.h>

enum { FSDP_ROPE_MOST = 4096 };

/* Computes the divisors from rope_scaling or rope_parameters of config.json. *count_out is 0 for a model
 * without this scaling. FSDP_ERR_USAGE: it has one, and a number of it is missing. */
fsdp_status fsdp_rope_factors(const fsdp_value *config, float factors_out[FSDP_ROPE_MOST], int *count_out,
                              fsdp_error *err);

#endif
