/*
 * The model of the runtime's tests: layers in a row, a unit for each, and a root around them. This header
 * builds a toy, calls the hooks of a step, and frees it. toy_mlp.h and toy_transformer.h compute its layers,
 * training.h trains it with either face, state_net.h gives it everything that a state dict can hold.
 */
#ifndef FSDP_TOY_H
#define FSDP_TOY_H

#include "tests/support/ranks/worlds.h"
#include <fsdp/optim.h>
#include <fsdp/wrap.h>

enum { TOY_LAYERS = 10 };

typedef struct toy {
    world_rank *rank;          /* NULL: built by toy_begin_in */
    fsdp_world *world;
    const void *user;
    const struct mlp_plan *plan;       /* NULL: no MLP */
    struct fsdp_mlp *mlp;
    fsdp_mesh *mesh;
    fsdp_mesh *other_mesh;     /* NULL: none; freed with the toy */
    fsdp_model *model;
    fsdp_wrap *wrap;               /* NULL: units without the FSDP1 face */
    fsdp_root *root;
    fsdp_optim *optim;
    fsdp_unit_opts opts;       /* of units to be made; first: the default ones over the mesh */
    bool runs_root;            /* a step calls the hooks of the root's own unit, too */
    int layers;
    fsdp_unit *unit[TOY_LAYERS];       /* the root's own: its layer calls no hooks */
    fsdp_param *weight[TOY_LAYERS], *bias[TOY_LAYERS];
    fsdp_param *own;           /* of the root */
} toy;

typedef fsdp_status (*toy_body)(toy *net, fsdp_error *err);
typedef fsdp_status (*toy_layer_body)(toy *net, int layer, fsdp_error *err);

typedef struct toy_case {
    int mesh_ndim;
    int64_t mesh_shape[3];
    const char *mesh_names[3];
    toy_body declare;          /* parameters, maybe units; NULL: nothing */
    toy_body body;
    const void *user;
    fsdp_unit_opts opts;       /* without mesh; all zero: default */
} toy_case;

/* --- building ------------------------------------------------------------------------------------------- */

/* Makes a mesh and a model without parameters. Call toy_free in any case. */
fsdp_status toy_begin(toy *net, world_rank *rank, const toy_case *what, fsdp_error *err);
fsdp_status toy_begin_in(toy *net, fsdp_world *world, int ndim, const int64_t *shape,
                         const char *const *names, fsdp_error *err);
/* The ranks of the mesh, from the last one on. */
fsdp_status toy_begin_backwards(toy *net, fsdp_world *world, int ndim, const int64_t *shape,
                                const char *const *names, fsdp_error *err);
void toy_free(toy *net);

/* Layers that have a weight each: "L0.w", "L1.w", ..., f32. */
fsdp_status toy_add_weights(toy *net, int layers, int ndim, const int64_t *shape, fsdp_error *err);
/* A unit "L0", "L1", ... for each layer, with net->opts; then the root. */
fsdp_status toy_wrap(toy *net, fsdp_error *err);
/* An optimizer of the face that wrapped the model. */
fsdp_status toy_add_adamw(toy *net, const fsdp_adamw_opts *opts, fsdp_error *err);
fsdp_status toy_add_sgd(toy *net, const fsdp_sgd_opts *opts, fsdp_error *err);

/* --- a step --------------------------------------------------------------------------------------------- */

/* Forward and backward call the hooks, and the body between a layer's two hooks; NULL: no body. */
fsdp_status toy_forward_layer(toy *net, int layer, toy_layer_body body, fsdp_error *err);
fsdp_status toy_forward(toy *net, toy_layer_body body, fsdp_error *err);
fsdp_status toy_backward_layer(toy *net, int layer, toy_layer_body body, fsdp_error *err);
/* Layers alone, from the last one on; and with what ends a backward. */
fsdp_status toy_backward_layers(toy *net, toy_layer_body body, fsdp_error *err);
fsdp_status toy_backward(toy *net, toy_layer_body body, fsdp_error *err);

/* Bodies: adds one to every element of the gradient of a layer's weight; makes the gradient, no more. */
fsdp_status toy_add_ones(toy *net, int layer, fsdp_error *err);
fsdp_status toy_touch_grad(toy *net, int layer, fsdp_error *err);

/* --- expectations --------------------------------------------------------------------------------------- */

/* For bodies: a failed cr_assert in a thread would end it without the others. */
#define EXPECT(condition)                                                                         \
    do {                                                                                          \
        if (!(condition))                                                                         \
            return fsdp_fail(err, FSDP_ERR_INTERNAL, "line %d: %s", __LINE__, #condition);        \
    } while (0)

/* Expects that a call fails with these words; reports the line of the call. */
#define EXPECT_REFUSAL(call, words)                                                               \
    do {                                                                                          \
        fsdp_error refusal = {0};                                                                 \
        fsdp_error *why = &refusal;                                                               \
        fsdp_status refused = (call);                                                             \
        if (refused == FSDP_OK || !strstr(refusal.text, words))                                   \
            return fsdp_fail(err, FSDP_ERR_INTERNAL, "line %d: status %d, '%s' lacks '%s'",       \
                             __LINE__, refused, refusal.text, words);                             \
    } while (0)

/* Every element of the shards of all layers' weights has this value. */
fsdp_status toy_expect_weights(const toy *net, float value, fsdp_error *err);

/* --- running -------------------------------------------------------------------------------------------- */

/* Runs the case on the ranks of its mesh: toy_begin, declare, body, toy_free. */
fsdp_status toy_run_on(const char *device, const toy_case *what, fsdp_error *err);
/* toy_run_on with another body; its ranks get the case as user. */
fsdp_status toy_run_with(const char *device, world_body body, const toy_case *what, fsdp_error *err);

#endif
