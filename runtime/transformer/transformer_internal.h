/* What the files of the room share: the object, its layers, and the arrays of a microbatch. */
#ifndef FSDP_TRANSFORMER_INTERNAL_H
#define FSDP_TRANSFORMER_INTERNAL_H

#include "runtime/transformer/linear_layer.h"
#include "runtime/transformer/transformer.h"
#include "statedict/models/config.h"

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

/* --- transformer_parts.c ------------------------------------------------------------------------- */

/* Makes config->form of a config whose sizes are set. FSDP_ERR_USAGE names what this room has no code for. */
fsdp_status fsdp_model_make_form(const fsdp_config *values, fsdp_transformer_config *config, fsdp_error *err);
/* Finds the description of the config's family, in the arena. */
fsdp_status fsdp_model_describe(const fsdp_transformer_config *config, fsdp_arena *arena,
                                const fsdp_architecture **model_out, fsdp_error *err);
/* Declares all parameters, and a unit per layer. */
fsdp_status fsdp_model_declare(fsdp_transformer *t, fsdp_error *err);
/* Takes the batch's sequences. Sets inputs and, with_targets, targets; makes arrays of their rows, and angles
 * of that many positions. */
fsdp_status fsdp_model_take_batch(fsdp_transformer *t, const fsdp_token_batch *batch, bool with_targets,
                                  int64_t positions, fsdp_error *err);
void fsdp_model_free_arrays(fsdp_transformer *t);
/* A random number in (0, 1), a function of its arguments alone. */
double fsdp_model_uniform(uint64_t seed, const char *purpose, uint64_t i);

#endif
