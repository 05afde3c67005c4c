/*
 * A multilayer perceptron that is trained in shards: layers y = relu(x W^T + b), the last one without relu;
 * the loss is the mean of (y - t)^2 over this rank's rows and results. The bench `step` and tests train it.
 * In: a model, a plan, units, rows; out: parameters and the gradients of a microbatch. It calls the public
 * headers of the runtime, kernels/nn.h and the trainer's linear_layer.h.
 *
 * Values and arrays are f32 in host memory, whatever dtype parameters have.
 */
#ifndef FSDP_MLP_H
#define FSDP_MLP_H

#include "runtime/transformer/linear_layer.h"
#include <fsdp/root.h>

typedef struct fsdp_mlp_plan {
    int layers;
    const int64_t *widths;     /* layers + 1: of the input, and of each layer's result */
    int64_t rows;              /* of a microbatch, on each rank */
    const char *const *names;  /* of layers; NULL: "layers.0", "layers.1", ... */
    fsdp_dtype dtype;          /* of parameters as stored; NONE: f32 */
    bool has_root_bias;        /* "bias" of the root, added to the last layer's result */
    const char *tensor_dim;    /* NULL, or the mesh dim over which layers are cut in pairs: the first by the
                                * columns of its result, the second by those of its weight, and its results
                                * are added up. A last layer without a second is whole */
    fsdp_comm *tensor;         /* the ranks of that dim, which share rows */
} fsdp_mlp_plan;

typedef enum fsdp_mlp_cut { FSDP_MLP_WHOLE, FSDP_MLP_COLUMNS, FSDP_MLP_SUMS } fsdp_mlp_cut;

typedef struct fsdp_mlp_layer {
    fsdp_linear linear;        /* weight NULL: the root's bias alone */
    fsdp_mlp_cut cut;
    float *y;                  /* the result, after relu */
    /* The caller's, until the root is made: */
    fsdp_unit *unit;           /* NULL: the root's, whose hooks are called around all layers */
    size_t member;             /* of the unit */
    bool has_relu;             /* default: all but the last one */
    bool is_skipped;           /* takes no part; as wide as its input */
} fsdp_mlp_layer;

typedef struct fsdp_mlp {
    fsdp_model *model;         /* borrowed, as the root */
    fsdp_root *root;
    fsdp_comm *tensor;
    fsdp_nn *nn;
    fsdp_f32_params params;
    int64_t rows;
    float *arrays;             /* hold all of the following and the layers' results */
    int64_t array_count;
    float *x, *t;              /* inputs and targets of a microbatch */
    float *dy, *dx;            /* gradients of a layer's result and input */
    int layer_count;           /* the root's bias is one of them */
    fsdp_mlp_layer layers[];
} fsdp_mlp;

/* Local. Declares the parameters in `model`, which outlives the MLP. *mlp_out is the caller's. */
FSDP_CHECKED fsdp_status fsdp_mlp_declare(fsdp_model *model, const fsdp_mlp_plan *plan, fsdp_mlp **mlp_out,
                                          fsdp_error *err);
/* Local, once the model has its root, which is borrowed. Makes the arrays. */
FSDP_CHECKED fsdp_status fsdp_mlp_set_root(fsdp_mlp *mlp, fsdp_root *root, fsdp_error *err);
void fsdp_mlp_free(fsdp_mlp *mlp);     /* accepts NULL */

/* Bytes of arrays and of copies of parameters. */
int64_t fsdp_mlp_bytes(const fsdp_mlp *mlp);

/* --- a microbatch -------------------------------------------------------------------------------- */

/* Local. x and t become rows of a data set from `first` on: element i of all its inputs or targets is
 * fsdp_uniform(seed, "x" or "t", i). */
void fsdp_mlp_fill(fsdp_mlp *mlp, uint64_t seed, int64_t first);

/* Collective, with all hooks of a forward and a backward. fsdp_root_begin_microbatch comes before it where a
 * step has several. */
FSDP_CHECKED fsdp_status fsdp_mlp_run(fsdp_mlp *mlp, double *loss_out, fsdp_error *err);

/* Its parts, for programs that do more between them. The loss makes dy; backward ends with end_backward. */
FSDP_CHECKED fsdp_status fsdp_mlp_forward(fsdp_mlp *mlp, fsdp_error *err);
double fsdp_mlp_loss(fsdp_mlp *mlp);
FSDP_CHECKED fsdp_status fsdp_mlp_backward(fsdp_mlp *mlp, fsdp_error *err);
/* One layer of backward, with its hooks. */
FSDP_CHECKED fsdp_status fsdp_mlp_backward_layer(fsdp_mlp *mlp, int layer, fsdp_error *err);

#endif
