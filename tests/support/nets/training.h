/*
 * Training of a toy, a linear MLP: layers.0 .. layers.2 as units and a bias of the root, on reproducible
 * values; wrapped by fsdp_wrap_create, or by plain units. Tests compare runs by their net_result.
 */
#ifndef FSDP_TRAINING_H
#define FSDP_TRAINING_H

#include "tests/support/nets/toy.h"
#include "tests/support/nets/unit_tuning.h"
#include <fsdp/optim.h>

enum { NET_LAYERS = 3, NET_IN = 5, NET_HIDDEN = 7, NET_OUT = 3, NET_MOST = 16 };
enum { NET_STEPS = 8, NET_WEIGHTS = NET_HIDDEN * NET_HIDDEN + NET_HIDDEN };

/* Settings of plain units; the result must not depend on them. */
typedef struct net_units {
    int reshard;
    bool keeps, is_async, offloads;
    unit_tuning tuning;
} net_units;

typedef struct net_setup {
    bool is_plain;             /* units, no flat parameters */
    const net_units *units;    /* of those; NULL: default options */
    fsdp_wrap_opts wrap;           /* without mesh and policy */
    fsdp_wrap_unit_opts layer;   /* of the layers, when has_layer_opts */
    bool has_layer_opts;
    int replicas;              /* 0: a mesh of one dim */
    bool is_backwards;         /* it has the ranks from the last one on */
    int steps, microbatches;   /* a rank's, the last of which reduces */
    bool all_reduce_each;      /* no accumulating: every microbatch reduces, the results add up */
    double clip;               /* 0: none */
    double divide;             /* 0: the ranks */
    fsdp_wrap_comm_hook hook;
    void *hook_context;
    const fsdp_optim_group *groups;
    size_t group_count;
    bool is_sgd;
} net_setup;
net_setup net_setup_default(void);

/* The result of all ranks. */
typedef struct net_result {
    double losses[NET_STEPS][NET_MOST];
    double norms[NET_STEPS];
    float weights[NET_LAYERS][NET_WEIGHTS], root_bias[NET_OUT];
} net_result;

/* Makes the wrapped model with values and an optimizer. Call toy_free in any case. */
fsdp_status net_build(toy *net, fsdp_world *world, const net_setup *setup, fsdp_error *err);

/* One forward and backward on the values of that number. */
fsdp_status net_microbatch(toy *net, int step, int number, double *loss_out, fsdp_error *err);
/* Steps begin .. begin + steps - 1 of a setup. */
fsdp_status net_train(toy *net, const net_setup *setup, int begin, int steps, net_result *result,
                      fsdp_error *err);
fsdp_status net_keep_weights(toy *net, net_result *result, fsdp_error *err);

/* Builds, trains and keeps the result. Call toy_free in any case. */
fsdp_status net_work(toy *net, fsdp_world *world, const net_setup *setup, net_result *result,
                     fsdp_error *err);
/* net_work on n ranks that are threads. */
fsdp_status net_run(int ranks, const char *device, const net_setup *setup, net_result *result,
                    fsdp_error *err);
bool net_equal(const net_result *a, const net_result *b);

#endif
