/*
 * The transformer of toy_transformer.h, trained over units: one per block, and the root with the embedding,
 * which is tied with the head. In every mode, each rank compares its values with the record of one rank
 * that ran the microbatches of all, one after the other, without synchronisation.
 */
#ifndef FSDP_TRANSFORMER_UNITS_H
#define FSDP_TRANSFORMER_UNITS_H

#include "tests/support/nets/toy_transformer.h"
#include <fsdp/optim.h>

enum { TRANSFORMER_STEPS = 20, TRANSFORMER_MOST_RANKS = 8, TRANSFORMER_ELEMENTS = 1216 };

typedef struct transformer_mode {
    int reshard, root_reshard, prefetch, inputs;
    int64_t replicas;          /* 0, 1: none; else a mesh of (replicas, rest) */
    fsdp_dtype dtype;          /* as stored; NONE: f32 */
    fsdp_dtype param_dtype, reduce_dtype;
    bool from_comm, separate;
    bool sgd;                  /* in place of AdamW */
    double tolerance;          /* 0: equal bits */
} transformer_mode;

/* The results of a run. */
typedef struct transformer_record {
    double losses[TRANSFORMER_STEPS][TRANSFORMER_MOST_RANKS];  /* per microbatch */
    float grads[TRANSFORMER_STEPS][TRANSFORMER_ELEMENTS];
    float weights[TRANSFORMER_ELEMENTS];
} transformer_record;

/* Trains on one rank, in a world of its own, with `microbatches` per step; ignores reshard, prefetch and
 * meshes of the mode. Several threads may call it at once. */
fsdp_status transformer_train_alone(const transformer_mode *mode, int microbatches,
                                    transformer_record *record_out, fsdp_error *err);

/* Collective: each rank has the microbatch of its number. Fails on any difference from the record. */
fsdp_status transformer_train_and_compare(fsdp_world *world, const transformer_mode *mode,
                                          const transformer_record *expected, fsdp_error *err);

/* "reshard 1, prefetch 2, ..." */
void transformer_mode_describe(const transformer_mode *mode, char *out, size_t out_size);

#endif
