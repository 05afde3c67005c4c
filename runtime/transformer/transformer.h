/*
 * A transformer (gpt2, llama, mistral, qwen2, qwen3) that is trained in shards: config -> parameters with
 * the names and orientation of Hugging Face, forward, backward, and sampling. Each layer is a unit;
 * embedding, last norm and head are the root's own. In: a config, and ids of tokens. Out: the root to train,
 * losses, logits and next ids. The room calls the public headers of the runtime and kernels/nn.h, and asks a
 * world where its memory lies; trainers and tools call this header and transformer_config.h.
 *
 *   transformer_config.c   config.json <-> fsdp_transformer_config
 *   transformer_parts.c    tensors by their roles: the form of a family, parameters, units; arrays
 *   transformer.c          linear layers (linear_layer.h); one layer, forward and backward; ids -> loss and
 *                          gradients, logits, or next ids
 *
 * Names in state dicts are those of Hugging Face after "model." (state.h). A tied head is an alias.
 * Gradients are sums over ranks, not means: `scale` of a microbatch divides by the tokens of the whole step,
 * so that the loss is the mean over all of them, however they are split over ranks and microbatches.
 */
#ifndef FSDP_TRANSFORMER_H
#define FSDP_TRANSFORMER_H

#include "runtime/transformer/transformer_config.h"
#include <fsdp/root.h>

typedef struct fsdp_transformer fsdp_transformer;

typedef struct fsdp_transformer_opts {
    fsdp_unit_opts unit;       /* mesh, dims, reshard_after_forward: of every unit */
    bool is_mixed;             /* gathered parameters are bf16 numbers; shards, gradients and activations are
                                * f32 */
    bool recompute;            /* layers keep their input only and run again in backward */
    int threads;               /* of this rank's computation; 0: 1 */
    int64_t logit_room;        /* elements of logits that are made at a time; 0: 2^24 (64 MiB) */
} fsdp_transformer_opts;

/* Collective. Parameters are zero until fsdp_transformer_init or a load. *transformer_out is the caller's. */
FSDP_CHECKED fsdp_status fsdp_transformer_create(fsdp_world *world, const fsdp_transformer_config *config,
                                                 const fsdp_transformer_opts *opts,
                                                 fsdp_transformer **transformer_out, fsdp_error *err);
void fsdp_transformer_free(fsdp_transformer *transformer);     /* accepts NULL */

fsdp_root *fsdp_transformer_root(fsdp_transformer *transformer);       /* borrowed */
int64_t fsdp_transformer_param_count(const fsdp_transformer *transformer);     /* elements; a tied one once */

/* Local. Values of a new model, each a function of seed, name and element alone: weights are normal with
 * initializer_range (gpt2's c_proj: / sqrt(2 layers)), norms 1, biases 0. */
FSDP_CHECKED fsdp_status fsdp_transformer_init(fsdp_transformer *transformer, uint64_t seed, fsdp_error *err);

/* Sequences of this rank, which may be none: row s of ids has `stride` elements. Ids are checked. */
typedef struct fsdp_token_batch {
    const int64_t *ids;
    int64_t sequences, length, stride;
    bool is_agreed;            /* all ranks have prepared theirs and agreed on it: the call begins without an
                                * exchange */
} fsdp_token_batch;

/* Local. Checks a microbatch for fsdp_transformer_train and makes memory for it. */
FSDP_CHECKED fsdp_status fsdp_transformer_prepare(fsdp_transformer *transformer,
                                                  const fsdp_token_batch *batch, fsdp_error *err);

/*
 * Collective. Forward and backward of this rank's sequences, `length` tokens each and one more as the last
 * target (stride > length). *loss_out is the sum of the losses of their tokens; gradients are of scale times
 * it. fsdp_root_begin_microbatch comes before it where a step has several.
 */
FSDP_CHECKED fsdp_status fsdp_transformer_train(fsdp_transformer *transformer, const fsdp_token_batch *batch,
                                                double scale, double *loss_out, fsdp_error *err);
/* Collective. Computes the loss as above, without gradients. */
FSDP_CHECKED fsdp_status fsdp_transformer_evaluate(fsdp_transformer *transformer,
                                                   const fsdp_token_batch *batch, double *loss_out,
                                                   fsdp_error *err);
/* Collective. logits_out: sequences x length x vocab, of this rank's sequences. */
FSDP_CHECKED fsdp_status fsdp_transformer_logits(fsdp_transformer *transformer, const fsdp_token_batch *batch,
                                                 float *logits_out, fsdp_error *err);

typedef struct fsdp_sampling {
    double temperature;        /* 0: greedy, the lowest of equal ids */
    int64_t top_k;             /* 0: all */
    double top_p;              /* 0 or 1: all */
    uint64_t seed;             /* of the draws, with the number of the sequence and of the new id */
    int64_t count;             /* new ids per sequence */
} fsdp_sampling;

/* Collective, with the same batch on every rank. ids_out: sequences x count. Ids after the context's end
 * continue from its last half. */
FSDP_CHECKED fsdp_status fsdp_transformer_sample(fsdp_transformer *transformer, const fsdp_token_batch *batch,
                                                 const fsdp_sampling *sampling, int64_t *ids_out,
                                                 fsdp_error *err);

#endif
