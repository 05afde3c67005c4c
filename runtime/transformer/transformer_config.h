/*
 * The shape of a transformer and what it computes, as config.json of Hugging Face gives them. A member that
 * changes the computation is honoured or refused by its name; members that transformers itself does not read
 * for these models are ignored.
 */
#ifndef FSDP_TRANSFORMER_CONFIG_H
#define FSDP_TRANSFORMER_CONFIG_H

#include "base/text.h"
#include "kernels/nn.h"
#include "statedict/models/rope.h"
#include <fsdp/status.h>

enum { FSDP_MODEL_LAYERS = 4096, FSDP_MODEL_NAME = 128 };

/*
 * The form says what a model is made of. It is made once, from the description of the family in
 * statedict/models and the members of config.json; this room asks the form, never the family. A family whose
 * description has only what the form can say is trained without code of its own.
 */
typedef struct fsdp_transformer_form {
    uint64_t parts;                    /* the tensors that a layer has: bits of transformer_parts.c */
    char embedding[FSDP_MODEL_NAME];   /* the name of its weight */
    bool is_in_by_out;                 /* weights of the layers' projections are stored in x out */
    bool is_rotary;                    /* heads are rotated; else learned positions are added */
    bool is_gated;                     /* MLP: down(f(gate(x)) * up(x)); else down(f(up(x))) */
    bool has_layer_norm;               /* norms subtract the mean; else RMS */
    bool has_kv_heads, has_head_dim;   /* members of their own; else they follow from the heads */
} fsdp_transformer_form;

typedef struct fsdp_transformer_config {
    char model_type[64];
    fsdp_transformer_form form;
    int64_t layers, width, inner, heads, kv_heads, head_dim, vocab, context;
    double norm_eps, initializer_range;
    fsdp_nn_function activation;
    bool is_tied;                      /* the head is the embedding's weight */
    bool attention_bias, output_bias;  /* of q, k, v; of the projection after attention */
    bool mlp_bias;
    bool scales_attention;             /* gpt2: scores by 1 / sqrt(head_dim) */
    bool scales_by_layer;              /* gpt2: also by 1 / (layer + 1) */
    bool has_dropout;                  /* a rate that is not 0, which training here takes for 0 */
    fsdp_rope rope;
    int64_t window;                    /* 0: none */
    bool is_windowed[FSDP_MODEL_LAYERS];
    int64_t bos, eos;                  /* -1: none */
} fsdp_transformer_config;

/* Adds the model_types that can be trained, in the order of the alphabet. */
void fsdp_transformer_families(const char *separator, fsdp_text *text);
/* Fills in what a config.json means that has no member but model_type. FSDP_ERR_USAGE as below. */
FSDP_CHECKED fsdp_status fsdp_transformer_config_init(fsdp_transformer_config *config, const char *model_type,
                                                      fsdp_error *err);

/* FSDP_ERR_USAGE names what this model cannot be; FSDP_ERR_DAMAGED: not the text of a config. `origin` is the
 * path for messages. */
FSDP_CHECKED fsdp_status fsdp_transformer_config_parse(const char *text, size_t size, const char *origin,
                                                 fsdp_transformer_config *config_out, fsdp_error *err);
/* Sizes that fit together: FSDP_ERR_USAGE otherwise. */
FSDP_CHECKED fsdp_status fsdp_transformer_config_check(const fsdp_transformer_config *config,
                                                       const char *origin, fsdp_error *err);
/* Adds the text of a config.json that transformers reads. */
FSDP_CHECKED fsdp_status fsdp_transformer_config_write(const fsdp_transformer_config *config, fsdp_text *text,
                                                       fsdp_error *err);

#endif
