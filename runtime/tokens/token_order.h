/* The order in which an epoch reads sequences: a permutation that is computed per number, without memory. */
#ifndef FSDP_TOKEN_ORDER_H
#define FSDP_TOKEN_ORDER_H

#include <stdint.h>

/* The place of number k of [0, count) in this epoch; a bijection of [0, count) for every seed and epoch. */
uint64_t fsdp_token_order(uint64_t seed, uint64_t epoch, uint64_t count, uint64_t k);

#endif
