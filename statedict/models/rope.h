/*
 * Rotary positions as config.json asks for them, in the spelling of transformers 5 (rope_parameters) or 4
 * (rope_scaling next to the numbers of the model). The trainer, GGUF and its way back read them here alone;
 * each refuses by name the types that it cannot do.
 */
#ifndef FSDP_ROPE_H
#define FSDP_ROPE_H

#include <fsdp/value.h>

typedef enum fsdp_rope_kind {
    FSDP_ROPE_DEFAULT, FSDP_ROPE_LINEAR, FSDP_ROPE_DYNAMIC, FSDP_ROPE_YARN, FSDP_ROPE_LONGROPE,
    FSDP_ROPE_LLAMA3,
    FSDP_ROPE_OTHER            /* a type that is not known here ("proportional") */
} fsdp_rope_kind;

/* Numbers that config.json does not have are NAN. */
typedef struct fsdp_rope {
    fsdp_rope_kind kind;
    const char *type;          /* its name, which for OTHER is borrowed from config.json */
    const char *member;        /* that has it: "rope_scaling" or "rope_parameters" */
    bool differs;              /* between types of layers: rope_parameters has an object for each */
    double theta, factor, original_context, partial_factor;
    double low_freq_factor, high_freq_factor;      /* of llama3 */
    double attention_factor;   /* of yarn and longrope */
    double beta_fast, beta_slow, mscale, mscale_all_dim, truncate;     /* of yarn */
    const fsdp_value *short_factor, *long_factor;  /* of longrope: lists, borrowed; NULL: none */
} fsdp_rope;

/* Reads them; path is for messages. Where config.json has both members, rope_scaling replaces the other, as
 * in transformers. FSDP_ERR_DAMAGED: a member is not of its kind. */
fsdp_status fsdp_rope_read(const fsdp_value *config, const char *path, fsdp_rope *rope_out, fsdp_error *err);

/* Likewise of the layers of a type ("full_attention"), where rope_parameters has an object for each type. */
fsdp_status fsdp_rope_read_of(const fsdp_value *config, const char *layers, const char *path,
                              fsdp_rope *rope_out, fsdp_error *err);

/* What the scaling divides a frequency by: default, linear and llama3, whose numbers are all there. */
double fsdp_rope_divisor(const fsdp_rope *rope, double frequency);

enum { FSDP_ROPE_MOST = 4096 };

/* Computes the divisor of each frequency of a head, which llama.cpp reads as a tensor. *count_out is 0 for
 * models that are not scaled as Llama 3.1. FSDP_ERR_USAGE: one is, and a number is missing. */
fsdp_status fsdp_rope_divisors(const fsdp_rope *rope, const fsdp_value *config,
                               float divisors_out[FSDP_ROPE_MOST], int *count_out, fsdp_error *err);

#endif
