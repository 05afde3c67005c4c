/*
 * The MLP of runtime/mlp as the layers of a toy, and the same in plain C by one rank with whole parameters,
 * with the same bits: each element of a product is one chain of fused multiply-adds.
 */
#ifndef FSDP_TOY_MLP_H
#define FSDP_TOY_MLP_H

#include "tests/bench/mlp.h"
#include "tests/support/nets/toy.h"

enum { MLP_LAYERS = TOY_LAYERS, MLP_WIDTH = 8, MLP_ROWS = 4, MLP_ROOT = -1 };

/* A fsdp_mlp_plan that holds its lists, units and the mesh. */
typedef struct mlp_plan {
    int layers;
    int64_t widths[MLP_LAYERS + 1];
    const char *names[MLP_LAYERS];
    int groups[MLP_LAYERS];            /* neighbours with the same number are members of one unit;
                                        * MLP_ROOT: the root's own */
    bool is_skipped[MLP_LAYERS];
    bool is_linear;                    /* no relu */
    bool has_root_bias;
    int mesh_ndim;
    int64_t mesh_shape[3];
    const char *mesh_names[3];
    fsdp_dtype dtype;
    const char *tensor_dim;            /* NULL, or the last dim of the mesh */
    fsdp_unit_opts opts;               /* without mesh */
    int root_reshard;
} mlp_plan;

/* Units "L0", "L1", ... over `ranks` ranks ("dp"), the root without parameters, default options. */
mlp_plan mlp_plan_default(int layers, int64_t ranks);

/* The plan is borrowed. Values are those of mlp_values_init. After a failure toy_free was called. */
fsdp_status mlp_create(toy *net, fsdp_world *world, const mlp_plan *plan, fsdp_error *err);
fsdp_status mlp_add_adamw(toy *net, fsdp_error *err);
/* Within mlp_create, or in its place: the parameters of net->plan in a net that has a model; then, with
 * net->unit and net->root, the arrays. */
fsdp_status mlp_declare(toy *net, fsdp_error *err);
fsdp_status mlp_set_root(toy *net, fsdp_error *err);

/* fsdp_mlp_forward and fsdp_mlp_run on the rows of a microbatch. */
fsdp_status mlp_forward(toy *net, uint64_t microbatch, fsdp_error *err);
fsdp_status mlp_microbatch(toy *net, uint64_t microbatch, double *loss_out, fsdp_error *err);

/* --- in plain C --------------------------------------------------------------------------------- */

typedef struct mlp_values {
    float weight[MLP_LAYERS][MLP_WIDTH * MLP_WIDTH], bias[MLP_LAYERS][MLP_WIDTH];
} mlp_values;

void mlp_values_init(const mlp_plan *plan, mlp_values *values_out);
/* Rounds to values of a dtype. */
void mlp_values_round(mlp_values *values, fsdp_dtype dtype);
double mlp_plain_microbatch(const mlp_plan *plan, const mlp_values *values, uint64_t microbatch,
                            mlp_values *grads_out);

/* AdamW with the default options; computed in f64, stored in f32. */
typedef struct mlp_moments { mlp_values first, second; int step; } mlp_moments;
void mlp_plain_adamw(mlp_values *values, const mlp_values *grads, mlp_moments *moments);

/* A rank with whole parameters, which adds up gradients with the others, over the last dim of the mesh first,
 * as shards do. */
typedef struct mlp_replica {
    mlp_values values, grads;
    mlp_moments moments;
    double loss;
} mlp_replica;
/* gathered: values to compute with in place of the replica's; NULL: none. Gradients are rounded to the net's
 * dtype of gradients, and added up in f32. */
fsdp_status mlp_replica_backward(mlp_replica *replica, fsdp_world *world, const toy *net, uint64_t microbatch,
                                 const mlp_values *gathered, fsdp_error *err);
/* Divides the sums of a layer's gradients, for the mean. */
void mlp_replica_divide(mlp_replica *replica, int layer, double divisor);

/* All values, gathered by the units. */
fsdp_status mlp_gather(toy *net, mlp_values *values_out, fsdp_error *err);

fsdp_status mlp_expect(toy *net, const mlp_values *values, double tolerance, fsdp_error *err);
fsdp_status mlp_expect_grads(toy *net, const mlp_values *grads, double tolerance, fsdp_error *err);

#endif
