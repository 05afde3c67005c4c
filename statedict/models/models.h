/*
 * Room models: descriptions of the models of Hugging Face's transformers, and their config.json.
 *
 * A family of models is one text, builtin/FAMILY.model (docs/models.md has the format): members of
 * config.json with their defaults, the tensors with shapes, conditions and roles, and what llama.cpp calls
 * all that. No other file of the project lists families: a new one is a new text.
 *
 *   models.c        finds a description and reads its text
 *   config.c        config.json, read once: its members; formulas over them for shapes and conditions
 *                   ("2 * intermediate_size", "layer in mlp_only_layers")
 *   config_file.c   finds config.json next to a checkpoint
 *   rope.c          the rotary positions of a config.json
 *   params_config.c a config.json of Meta's params.json
 *
 * In: a model_type, or the text of a config.json, which may be hostile. Out: structs in an arena of the
 * caller. Callers: rooms of statedict above this one, and runtime/transformer, which declares its parameters
 * by role.
 */
#ifndef FSDP_MODELS_H
#define FSDP_MODELS_H

#include "base/core/mem.h"
#include <fsdp/status.h>
#include <stdbool.h>
#include <stddef.h>

/* A member of config.json; where it is absent, `otherwise` counts. Members whose name begins with '$'
 * are names for formulas only. */
typedef enum fsdp_member_kind {
    FSDP_MEMBER_WHOLE,         /* a whole number, a boolean, or the count of a list or object */
    FSDP_MEMBER_FLAG,          /* true or false, which are 1 and 0 in formulas */
    FSDP_MEMBER_REAL,          /* formulas do not use it */
    FSDP_MEMBER_REALS,         /* likewise: a list of such numbers */
    FSDP_MEMBER_WORD           /* likewise: "silu" */
} fsdp_member_kind;
typedef struct fsdp_config_member {
    const char *name;
    const char *otherwise;     /* a formula, a number, numbers, a word; NULL: no default */
    const char *null;          /* the whole number that null means; NULL: null is as absent */
    fsdp_member_kind kind;
} fsdp_config_member;

/* A tensor, or with {layer} or {expert} in its name one per layer, per expert. */
typedef struct fsdp_tensor_row {
    const char *name;          /* {base}: the prefix of the model without its head, which heads do not have */
    const char *shape;         /* formulas with ", " between them; "?": any shape */
    const char *role;          /* "q_proj", "q_proj.bias", "embed" ...: the same in all families; "": none */
    const char *when;          /* the tensor exists; NULL: always */
    const char *may_lack;      /* it need not be stored; NULL: it must */
    int spelling;              /* from 1 on; 0: the row belongs to every spelling */
} fsdp_tensor_row;

/* A key of GGUF below the name of the architecture, and its member of config.json. */
typedef struct fsdp_gguf_key {
    const char *key, *member;
    bool is_needed;            /* llama.cpp computes this model with such a number only, which is not 0 */
} fsdp_gguf_key;

/* A member for which llama.cpp computes with one number, whatever config.json says. */
typedef struct fsdp_gguf_fixed {
    const char *member;
    const char *number;        /* a real one, a word, a formula; with `layer`, of each item of a list; of
                                * reals the numbers, with spaces between them */
} fsdp_gguf_fixed;

/* A member that a file has no key for, computed from those that have one. */
typedef struct fsdp_gguf_back {
    const char *member, *formula;
} fsdp_gguf_back;

/* The model of a tokenizer with which llama.cpp runs a family, beside byte-level BPE and SentencePiece's. */
typedef enum fsdp_token_model {
    FSDP_TOKENS_USUAL,         /* no other one */
    FSDP_TOKENS_UNIGRAM,       /* Unigram as T5's, in place of SentencePiece's */
    FSDP_TOKENS_WORDPIECE      /* WordPiece, which the family needs */
} fsdp_token_model;

typedef enum fsdp_window_use {
    FSDP_WINDOW_NEVER, FSDP_WINDOW_ALWAYS, FSDP_WINDOW_IF_USED,
    FSDP_WINDOW_EVERY          /* some layers have one, by layer_types; see window_period */
} fsdp_window_use;

/* The model as llama.cpp knows it. */
typedef struct fsdp_gguf_names {
    const char *architecture;  /* NULL: llama.cpp does not have it, or this project no map for its names */
    bool one_way;              /* a file of this architecture becomes a model of another family */
    bool has_factors;          /* it reads Llama 3.1's scaling of rotary frequencies from a tensor */
    bool needs_output;         /* it does not take the embedding for an output that is not in the file */
    bool has_no_output;        /* it always takes the embedding for the output */
    bool is_scaled;            /* transformers scales its rotary positions where config.json says nothing */
    bool has_mscale;           /* YaRN scales attention by mscale_all_dim, for which there is a key */
    bool is_unrounded;         /* its models do not round the range of YaRN, but llama.cpp does */
    bool has_long_factors;     /* it reads the factors of long and short contexts from tensors */
    bool ropes_differ;         /* transformers has rotary numbers per type of layers, and scales none of
                                * those with a window */
    bool is_encoder;           /* it computes embeddings of texts: pooling has a key */
    const char *pre;           /* the pattern of words of its tokenizer */
    fsdp_token_model tokenizer;        /* that llama.cpp has for this family */
    const char *activations;   /* those that llama.cpp computes, with '|' between them */
    const char *gate, *gated;  /* a tensor, and the activations where a file has it; NULL: none */
    const char *scaled_output; /* the member with which transformers divides the output by the root of its
                                * width, and llama.cpp does not; NULL: none */
    fsdp_window_use window;    /* whether transformers gives it a sliding window */
    int window_period;         /* of EVERY: each layer of that number has none, where nothing else is said */
    bool lists_windows;        /* of EVERY: a key says which layers have one */
    const fsdp_gguf_key *keys; /* in the order of a file */
    size_t key_count;
    const fsdp_gguf_fixed *fixed;
    size_t fixed_count;
    const fsdp_gguf_back *back;    /* each may use those before it */
    size_t back_count;
    const char *rotary;        /* the member that tells which part of a head is rotated; NULL: all of it */
} fsdp_gguf_names;

typedef struct fsdp_architecture {
    const char *model_type;
    const char *class_name;    /* the model with its output; NULL: it has none */
    const char *const *bases;  /* "model.", "": prefixes of the model without its head; the usual one first */
    size_t base_count;
    int spellings;
    const char *form;          /* what the trainer computes and tensors and members do not tell, in the words
                                * of docs/models.md; NULL: nobody has said it */
    const fsdp_config_member *members;
    size_t member_count;
    const fsdp_tensor_row *rows;   /* none: only bases are known, and its tensors are not checked */
    size_t row_count;
    fsdp_gguf_names gguf;
} fsdp_architecture;

/* Reads the description of a model_type into the arena. *architecture_out is NULL when there is none. */
fsdp_status fsdp_architecture_find(fsdp_arena *arena, const char *model_type, size_t size,
                                   const fsdp_architecture **architecture_out, fsdp_error *err);
/* Reads description i, in the order of the alphabet; *architecture_out is NULL after the last. */
fsdp_status fsdp_architecture_at(fsdp_arena *arena, size_t i, const fsdp_architecture **architecture_out,
                                 fsdp_error *err);
/* Reads the text of a description; name is for messages. FSDP_ERR_USAGE names the line that is wrong. */
fsdp_status fsdp_architecture_parse(fsdp_arena *arena, const char *name, const char *text,
                                    const fsdp_architecture **architecture_out, fsdp_error *err);

/* NULL: there is none. */
const fsdp_config_member *fsdp_architecture_member(const fsdp_architecture *architecture, const char *name,
                                                   size_t size);
/* True where formulas may use the member. */
static inline bool fsdp_member_is_whole(const fsdp_config_member *member)
{
    return member->kind == FSDP_MEMBER_WHOLE || member->kind == FSDP_MEMBER_FLAG;
}
/* The first row of the role, from row `from` on; NULL: none. */
const fsdp_tensor_row *fsdp_architecture_role(const fsdp_architecture *architecture, const char *role,
                                              size_t from);

#endif
