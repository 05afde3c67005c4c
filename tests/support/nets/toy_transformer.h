/*
 * The arithmetic of a small transformer, in plain C: tokens and places are embedded, blocks of causal
 * attention with two heads and of an MLP, each after a layer norm, and a head that is tied with the
 * embedding. Every function does the same arithmetic in the same order wherever it runs.
 *
 * runtime/transformer does not take its place: it adds to gradients row by row, so that W microbatches of one
 * rank give other bits than W ranks with one each, and its parameters are stored as f32 only. Tests of units
 * compare bits, also of bf16 parameters.
 */
#ifndef FSDP_TOY_TRANSFORMER_H
#define FSDP_TOY_TRANSFORMER_H

#include <fsdp/model.h>

enum {
    TRANSFORMER_VOCAB = 11,
    TRANSFORMER_WIDTH = 8,
    TRANSFORMER_HEADS = 2,
    TRANSFORMER_TOKENS = 6,
    TRANSFORMER_HIDDEN = 12,
    TRANSFORMER_BLOCKS = 2,
    TRANSFORMER_STREAM = TRANSFORMER_TOKENS * TRANSFORMER_WIDTH
};

/* Parameters in order: of the embedding and the last norm, and of a block. */
enum { ROOT_EMBED, ROOT_PLACES, ROOT_NORM, ROOT_NORM_BIAS, ROOT_PARAMS };
enum {
    BLOCK_NORM_1,
    BLOCK_NORM_1_BIAS,
    BLOCK_QKV,
    BLOCK_QKV_BIAS,
    BLOCK_OUT,
    BLOCK_OUT_BIAS,
    BLOCK_NORM_2,
    BLOCK_NORM_2_BIAS,
    BLOCK_UP,
    BLOCK_UP_BIAS,
    BLOCK_DOWN,
    BLOCK_DOWN_BIAS,
    BLOCK_PARAMS
};
enum { LARGEST_PARAM = 3 * TRANSFORMER_WIDTH * TRANSFORMER_WIDTH };

typedef struct transformer_param {
    const char *name;          /* in a block: the part after "blocks.0." */
    int ndim;
    int64_t shape[2];
} transformer_param;
extern const transformer_param transformer_root_params[ROOT_PARAMS];
extern const transformer_param transformer_block_params[BLOCK_PARAMS];

/* Values of forward that backward needs. */
typedef struct norm_state {
    float normal[TRANSFORMER_STREAM], scale[TRANSFORMER_TOKENS];
} norm_state;

typedef struct block_state {
    norm_state norm_1, norm_2;
    float h1[TRANSFORMER_STREAM], qkv[3 * TRANSFORMER_STREAM];
    float weights[TRANSFORMER_HEADS][TRANSFORMER_TOKENS][TRANSFORMER_TOKENS];
    float attended[TRANSFORMER_STREAM], h2[TRANSFORMER_STREAM];
    float up[TRANSFORMER_TOKENS * TRANSFORMER_HIDDEN], active[TRANSFORMER_TOKENS * TRANSFORMER_HIDDEN];
} block_state;

typedef struct head_state {
    norm_state norm;
    float h[TRANSFORMER_STREAM], chances[TRANSFORMER_TOKENS * TRANSFORMER_VOCAB];
} head_state;

/* x: a row per token. Forward replaces x by the block's output, backward replaces dx by the gradient of the
 * block's input and adds to the gradients. */
void transformer_embed(const float *const *root, const int *tokens, float *x_out);
void transformer_block_forward(const float *const *block, float *x, block_state *state_out);
/* The mean loss over tokens; the target of t is tokens[t + 1]. */
double transformer_head_forward(const float *const *root, const float *x, const int *tokens,
                                head_state *state_out);

void transformer_head_backward(const float *const *root, const head_state *state, const int *tokens,
                               float *const *grads, float *dx_out);
void transformer_block_backward(const float *const *block, const block_state *state, float *const *grads,
                                float *dx);
void transformer_embed_backward(const int *tokens, const float *dx, float *const *grads);

#endif
