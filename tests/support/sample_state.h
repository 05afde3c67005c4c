/*
 * States for tests: tensors of every dtype, awkward shape and layout, with values, aliases and flat
 * buffers. The value of an element is a function of seed, entry and position in the whole tensor, so
 * any rank of any layout can fill its boxes and count the wrong bytes in them. Uses public headers
 * only.
 */
#ifndef FSDP_SAMPLE_STATE_H
#define FSDP_SAMPLE_STATE_H

#include <fsdp/fsdp.h>

typedef enum state_model {
    STATE_SMALL,               /* a handful of tensors, 2 KiB: crash tests */
    STATE_EVERYTHING,          /* every dtype, shape, odd name and kind of value */
    STATE_BLOCKS,              /* tensors of several hash blocks: 17 MiB */
    STATE_MEGABYTE             /* 1 MiB, for disks that are nearly full */
} state_model;

enum { STATE_VARIANTS = 18 };  /* of the layouts that the tensors of a state have */

typedef struct test_state {
    fsdp_sd *sd;
    int rank;
    void **memory;             /* owned; one block per tensor entry or flat buffer */
    size_t count, capacity;
} test_state;

/* The part of `rank` in a state on `world` ranks. */
typedef struct state_part {
    state_model model;
    int world, rank, variant;
} state_part;

/* filled: with the contents of `seed`; otherwise with memory and values that no seed gives. */
fsdp_status test_state_create(const state_part *part, bool filled, uint64_t seed, test_state *state_out,
                              fsdp_error *err);
void test_state_release(test_state *state);

/* The number of bytes of this rank's boxes and values that differ from those of the seed. */
int64_t test_state_differing(const test_state *state, uint64_t seed);

/* test_state_differing for any state dict of that model, such as a full state; and for its tensors alone. */
int64_t test_sd_differing(const fsdp_sd *sd, int rank, uint64_t seed);
int64_t test_tensors_differing(const fsdp_sd *sd, int rank, uint64_t seed);

/* --- sampling ------------------------------------------------------------------------------------ */

/* A test with many cases runs every n-th: n is FSDP_TEST_SAMPLE where that is set (1: all). Else it is
 * `usual`, FSDP_TEST_FEWER times as much (slow builds), and not below FSDP_TEST_LEAST. */
int64_t test_sample(int64_t usual);
/* test_sample for a test that runs all cases, or at least every `most`-th unless FSDP_TEST_SAMPLE is set. */
int64_t test_sample_at_most(int64_t most);
/* The number of cases of a sample of `cases`, at least 1. */
int test_sample_of(int cases, int64_t most);

/* Chooses cases by number, the first one always, so that every loop around them is sampled evenly. */
typedef struct test_sampler {
    int64_t every, seen, taken;
} test_sampler;
bool test_sampler_takes(test_sampler *sampler);

#endif
