/*
 * The shape and mathematics of a transformer, as config.json of Hugging Face gives them. A member that
 * changes the mathematics is honoured or refused by its name; members that transformers itself does not read
 * for these models are ignored.
 */
#ifndef FSDP_TRANSFORMER_CONFIG_H
#define FSDP_TRANSFORMER_CONFIG_H

#include "base/text.h"
#include "kernels/nn.h"
#include <fsdp/status.h>

typedef enum fsdp_family { FSDP_GPT2, FSDP_LLAMA, FSDP_MISTRAL, FSDP_QWEN2 } fsdp_family;

typedef enum fsdp_rope_kind { FSDP_ROPE_DEFAULT, FSDP_ROPE_LINEAR, FSDP_ROPE_LLAMA3 } fsdp_rope_kind;

typedef struct fsdp_rope {
    fsdp_rope_kind kind;
    double theta, factor;
    double low_freq_factor, high_freq_factor, original_context;        /* of llama3 */
} fsdp_rope;

/*
 * The form says what a model is made of. The room's files ask it, never the family: a family whose form is
 * known here needs no code of its own. fsdp_transformer_config_init makes it.
 */
typedef struct fsdp_transformer_form {
    const char *embedding;             /* the name of its weight */
    bool has_packed_qkv;               /* q, k and v are one projection, next to each other in a row */
    bool is_in_by_out;                 /* weights of the layers' projections are stored in x out */
    bool is_rotary;                    /* heads are rotated; else learned positions are added */
    bool is_gated;                     /* MLP: down(f(gate(x)) * up(x)); else down(f(up(x))) */
    bool has_layer_norm;               /* norms subtract the mean and add a bias; else RMS */
    bool scales_projections;           /* new weights that add to the residual stream: / sqrt(2 layers) */
} fsdp_transformer_form;

enum { FSDP_MODEL_LAYERS = 4096 };

typedef struct fsdp_transformer_config {
    fsdp_family family;
    fsdp_transformer_form form;
    int64_t layers, width, inner, heads, kv_heads, head_dim, vocab, context;
    double norm_eps, initializer_range;
    fsdp_nn_function activation;
    bool is_tied;                      /* the head is the embedding's weight */
    bool attention_bias, output_bias;  /* of q, k, v; of the projection behind attention */
    bool mlp_bias;
    bool scales_attention;             /* gpt2: scores by 1 / sqrt(head_dim) */
    bool scales_by_layer;              /* gpt2: also by 1 / (layer + 1) */
    bool has_dropout;                  /* a rate that is not 0, which training here takes for 0 */
    fsdp_rope rope;
    int64_t window;                    /* 0: none */
    bool is_windowed[FSDP_MODEL_LAYERS];
    int64_t bos, eos;                  /* -1: none */
} fsdp_transformer_config;

/* The name in model_type. */
const char *fsdp_family_name(fsdp_family family);
/* False: there is no such family. */
bool fsdp_family_find(const char *name, fsdp_family *family_out);

/* Defaults of a family: what its config.json means that has no members. */
void fsdp_transformer_config_init(fsdp_transformer_config *config, fsdp_family family);

/* FSDP_ERR_USAGE names what this model cannot be; FSDP_ERR_DAMAGED: not the text of a config. `origin` is the
 * path for messages. */
FSDP_CHECKED fsdp_status fsdp_transformer_config_parse(const char *text, size_t size, const char *origin,
                                                 fsdp_transformer_config *config_out, fsdp_error *err);
/* Sizes that fit together: FSDP_ERR_USAGE otherwise. */
FSDP_CHECKED fsdp_status fsdp_transformer_config_check(const fsdp_transformer_config *config,
                                                       const char *origin, fsdp_error *err);
/* The text of a config.json that transformers reads. */
void fsdp_transformer_config_write(const fsdp_transformer_config *config, fsdp_text *text);

#endif
