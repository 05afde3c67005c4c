/* What the files of the room share: the object, its layers, and the arrays of a microbatch. */
#ifndef FSDP_TRANSFORMER_INTERNAL_H
#define FSDP_TRANSFORMER_INTERNAL_H

#include "runtime/transformer/linear_layer.h"
#include "runtime/transformer/transformer.h"
#include "statedict/models/formula.h"

typedef struct model_norm {
    fsdp_param *weight, *bias; /* bias NULL: none */
    int64_t columns;
} model_norm;

typedef struct model_block {
    fsdp_unit *unit;
    int64_t number;
    model_norm norm1, norm2;
    fsdp_linear qkv;           /* three in one, or weight NULL: q, k, v */
    fsdp_linear q, k, v, output;
    model_norm q_norm, k_norm; /* of each head, before rotation; weight NULL: none */
    fsdp_linear gate, up, down;        /* gate.weight NULL: none */
} model_block;

/* A layer's activations, from forward to backward: rows are tokens of all sequences. */
typedef struct block_arrays {
    float *mean1, *inverse1, *normed1;
    float *qkv;                /* q, k, v next to each other in a row (packed), or one after another */
    float *heads, *heads_inverse;      /* q and k before their norm, one after the other */
    float *attended, *log_sum;
    float *middle;             /* the input plus attention */
    float *mean2, *inverse2, *normed2;
    float *gate, *up, *active;
} block_arrays;

struct fsdp_transformer {
    fsdp_transformer_config config;
    fsdp_transformer_opts opts;
    fsdp_ctl *ctl;
    fsdp_model *model;
    fsdp_root *root;
    fsdp_nn *nn;
    const fsdp_nn_ops *ops;

    fsdp_param *tokens, *positions, *head;     /* positions NULL: rotary */
    model_norm last_norm;
    model_block *blocks;

    /* Arrays, for as many rows as the largest microbatch had. */
    int64_t sequences, length, room_rows;
    int64_t *inputs, *targets;                 /* rows */
    float *cosines, *sines;                    /* of positions up to the context's end */
    int64_t angle_room;
    float **block_inputs;                      /* layers + 1, each rows x width */
    block_arrays *arrays;                      /* of each layer, which share one with recompute */
    float *last_mean, *last_inverse, *last_normed;
    float *dx, *dnormed, *dqkv, *dheads, *dattended, *dactive, *dgate, *dup;
    float *logits;                             /* of some rows */
    int64_t logit_rows;
    double *losses;                            /* of rows */
    fsdp_f32_params params;                    /* as f32; gradients are f32, too */
};

static inline int64_t model_rows(const fsdp_transformer *t)
{
    return t->sequences * t->length;
}

/* A tensor by its role: its bit (of a layer: in form.parts) and its shape, of weights out x in. */
typedef struct model_part {
    uint64_t bit;
    int ndim;
    int64_t shape[2];
} model_part;

/* --- the form (transformer_config.c) ------------------------------------------------------------ */

/* Finds the part of a role outside the layers, as fsdp_model_find_part does. */
bool fsdp_model_find_other(const fsdp_transformer_config *config, const char *role,
                           model_part *part_out);
/* Finds the description of the config's family, in the arena. */
fsdp_status fsdp_model_describe(const fsdp_transformer_config *config, fsdp_arena *arena,
                                const fsdp_architecture **model_out, fsdp_error *err);

/* --- a layer's parts (block.c) ----------------------------------------------------------------- */

/* False: a layer has no use for the role. */
bool fsdp_model_find_part(const fsdp_transformer_config *config, const char *role, model_part *part_out);
/* The role of a part without which a layer of these parts cannot be computed; NULL: none is missing. */
const char *fsdp_model_missing_part(uint64_t parts);
/* Copies the whole name of a tensor, of `layer` where it has one per layer. */
void fsdp_model_tensor_name(const fsdp_architecture *model, const char *name, int64_t layer,
                            char name_out[FSDP_MODEL_NAME]);
/* Declares the layer's parameters and its unit, in the order of the description. */
fsdp_status fsdp_model_declare_block(fsdp_transformer *t, const fsdp_architecture *model, model_block *block,
                                     fsdp_error *err);
/* Adds a parameter of f32. */
fsdp_status fsdp_model_add_param(fsdp_transformer *t, const char *name, int ndim, const int64_t *shape,
                                 fsdp_param **param_out, fsdp_error *err);

fsdp_status fsdp_model_alloc(fsdp_transformer *t, int64_t rows, int64_t columns, float **data_out,
                             fsdp_error *err);
fsdp_status fsdp_model_make_block_arrays(fsdp_transformer *t, int64_t rows, block_arrays *arrays,
                                         fsdp_error *err);
void fsdp_model_free_block_arrays(fsdp_transformer *t, block_arrays *arrays);
/* All layers share them. */
fsdp_status fsdp_model_make_block_grads(fsdp_transformer *t, int64_t rows, fsdp_error *err);
void fsdp_model_free_block_grads(fsdp_transformer *t);

/* --- computation --------------------------------------------------------------------------------- */

fsdp_status fsdp_model_norm(fsdp_transformer *t, const model_norm *norm, const fsdp_nn_norm *call,
                            fsdp_error *err);
fsdp_status fsdp_model_norm_grad(fsdp_transformer *t, const model_norm *norm,
                                 const fsdp_nn_norm_grad *call, fsdp_error *err);

/* Sampling keeps keys and values of earlier tokens. NULL: none. */
typedef struct key_cache {
    float *keys, *values;      /* of one layer: sequences x room x kv_heads * head_dim */
    int64_t room, used;
} key_cache;

/* x (rows x width) -> y; between the unit's hooks. */
fsdp_status fsdp_model_block(fsdp_transformer *t, const model_block *block, const float *x, float *y,
                             const key_cache *cache, fsdp_error *err);
/* t->dx: the gradient of the block's result becomes that of its input x. */
fsdp_status fsdp_model_block_grad(fsdp_transformer *t, const model_block *block, const float *x,
                                  fsdp_error *err);

#endif
