/* Dice that fall alike on every machine: what a seed decides, every rank decides by itself. */
#ifndef FSDP_DICE_H
#define FSDP_DICE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct random_dice {
    uint64_t state;
} random_dice;

/* Dice of their own for each purpose, so that a throw more of one does not change the others. */
random_dice dice_for(uint64_t seed, uint64_t purpose, uint64_t number);
uint64_t dice_bits(random_dice *dice);
int dice_below(random_dice *dice, int n);             /* 0 .. n - 1 */
bool dice_hits(random_dice *dice, int percent);

/* Two numbers made one, well spread. */
uint64_t mix(uint64_t a, uint64_t b);
uint64_t hash_bytes(uint64_t hash, const void *data, size_t size);

#endif
