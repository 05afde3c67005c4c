/*
 * A random configuration of training: a model, the units around it, how they work, and the optimizer. All
 * that a checkpoint stores (the model, the optimizer) follows from the seed; the rest from the seed and the
 * number of ranks. The events of a step are drawn during that step (step.c).
 */
#ifndef FSDP_CASE_H
#define FSDP_CASE_H

#include "tests/random/dice.h"
#include <fsdp/fsdp.h>

enum { CASE_LAYERS = 5, CASE_PARAMS = 48, CASE_UNITS = 12, CASE_AHEAD = 3, CASE_NAME = 40 };
enum { CASE_ROOT = -1 };       /* in place of a layer: what lies in none */
enum { CASE_ROOT_UNIT = 0 };   /* the first of the units */

/* Purposes of dice. */
enum { DICE_MODEL = 1, DICE_UNITS, DICE_POOLS, DICE_STEP, DICE_BETWEEN, DICE_GRADS, DICE_SAVE,
       DICE_DETOURS };

typedef struct case_param {
    char name[CASE_NAME];
    int ndim;
    int64_t shape[3], count;
    fsdp_dtype dtype, grad_dtype;      /* as stored; of its gradient, NONE: as gathered */
    bool is_frozen, has_alias;
    int layer;
    bool is_inner;                     /* below layers.N.in */
    int unit;
    int dim;                           /* cut there */
    bool on_flat_mesh;                 /* of a grid: over all ranks, unlike its unit */
} case_param;

/* Over which ranks a unit is cut. */
typedef enum case_cut { CUT_AS_MESH, CUT_ALL, CUT_NONE } case_cut;

typedef struct case_unit {
    char name[CASE_NAME];
    int layer;
    bool is_list;                      /* of two layers, this one and the next */
    case_cut cut;
    int shards;                        /* so many pieces */
    int reshard;
    fsdp_dtype param_dtype, reduce_dtype;
    bool offloads;
    double divide;                     /* 0: by the ranks */
    bool forces_sum, takes_unused, has_separate_comm, keeps_storage, gathers_async;
    bool reshards_last, reshards_never;        /* after backward */
    bool stays_sharded_in_backward;
    int input_buffers;                 /* 0: the default */
    int ahead_count[2], ahead[2][CASE_AHEAD];  /* prefetched in forward, in backward */
    fsdp_wrap_unit_opts wrap;
} case_unit;

typedef enum case_clip { CLIP_NEVER, CLIP_MEASURES, CLIP_CUTS } case_clip;

typedef struct training_case {
    uint64_t seed;
    int ranks;                         /* whose microbatches there are */
    bool is_alone;                     /* one rank has them all */
    bool is_plain;                     /* nothing is drawn that lets sums come out in another order */
    int replicas;                      /* 0: a mesh of one dim */
    bool is_flat;                      /* the FSDP1 face */
    bool wraps_by_name, uses_orig, is_unlimited;       /* of that */
    fsdp_wrap_comm_hook hook;
    case_param params[CASE_PARAMS];
    int param_count, layers;
    int layer_unit[CASE_LAYERS], inner_unit[CASE_LAYERS];      /* or -1 */
    case_unit units[CASE_UNITS];
    int unit_count;
    bool is_adamw, has_master, is_nested;
    double momentum;
    bool has_groups, has_own_hypers, maximizes, is_nesterov;   /* the optimizer: two groups, no defaults */
    bool is_finalized_by_hand;
    bool accumulates;                  /* backwards without reduction, or without all-reduce */
    bool repeats;                      /* layers run twice in a forward */
    case_clip clip;
    int steps;
} training_case;

void case_draw(training_case *c, uint64_t seed, int ranks);
/* For one rank that runs the microbatches of all. */
void case_make_alone(training_case *c);

/* Whether one rank alone must have the same bits: docs/runtime.md, "Sums are the same everywhere". */
bool case_promises_bits(const training_case *c);
/* Gradients are added up in it. */
fsdp_dtype case_reduce_dtype(const training_case *c, const case_param *param);
/* In so many pieces. */
int case_shards(const training_case *c, const case_param *param);
bool case_is_hybrid(const training_case *c);
void case_print(const training_case *c);

/* Between the two files of this: units and what they do. */
void case_draw_units(training_case *c);

#endif
