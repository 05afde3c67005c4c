/*
 * Training of a random net, and its expected results. Gradients are a function of seed, step, parameter,
 * rank and gathered values, so that every rank can compute those of all ranks: a reduced gradient must be
 * their mean within the precision of the dtypes. random_training.py compares the bits that runs print.
 */
#ifndef FSDP_TRAINER_H
#define FSDP_TRAINER_H

#include "tests/random/net.h"

enum { TRAINER_VISITS = 2 * CASE_LAYERS };

/* The gradient of one parameter, in a step. */
typedef struct random_grad {
    double *data;              /* as it was gathered last */
    double *sum, *size;        /* of the gradients of all ranks: the sum, and that of their sizes */
    bool is_given;             /* by some rank */
    bool is_touched;           /* in this backward */
} random_grad;

typedef struct trainer_visit {
    int layer, unit;
} trainer_visit;

typedef struct trainer {
    random_net *net;
    const training_case *c;
    net_pools pools;
    bool has_detours;          /* does on the way what must change nothing */
    int rank;                  /* that we are */
    int as_rank;               /* whose microbatch it is: another one's where one rank runs all */
    int step, microbatch;
    random_dice dice;                 /* of this microbatch */
    trainer_visit visits[TRAINER_VISITS];      /* of the last forward */
    int visit_count, gives;
    bool has_root_run;
    random_grad grads[CASE_PARAMS];
    uint64_t forward_hash;     /* of everything gathered in forward */
    int wrong;                 /* what was not as it must be; each is printed */
} trainer;

fsdp_status trainer_create(trainer *t, random_net *net, fsdp_error *err);
void trainer_release(trainer *t);

/* All steps. Prints what is to be compared with other runs. */
fsdp_status trainer_run(trainer *t, fsdp_error *err);

/* A forward alone: what it gathers is what the shards hold. */
fsdp_status trainer_evaluate(trainer *t, fsdp_error *err);

/* --- within: one microbatch (step.c) ------------------------------------------------------------ */

fsdp_status trainer_run_microbatch(trainer *t, int microbatch, bool is_last, fsdp_error *err);

/* Some unit, outside of the hooks, and maybe back. */
fsdp_status trainer_gather_something(trainer *t, fsdp_error *err);
/* Begins one, and leaves it somewhere: everything is as before. */
fsdp_status trainer_abandon_microbatch(trainer *t, fsdp_error *err);

/* --- within: values (values.c) ------------------------------------------------------------------ */

void trainer_forget_grads(trainer *t);
/* Checks that the unit has gathered what its shards hold. */
fsdp_status trainer_see_unit(trainer *t, int unit, fsdp_error *err);
/* Gradients of a unit's parameters, some of them none. */
fsdp_status trainer_give_grads(trainer *t, int unit, fsdp_error *err);
/* The reduced ones are what all ranks gave. */
void trainer_check_grads(trainer *t);

/* A number of this rank's part; those of all ranks add up to the same however tensors are cut. */
uint64_t trainer_hash_grads(const trainer *t);
uint64_t trainer_hash_weights(const trainer *t);

#endif
