/* adapter_config.json of PEFT. */
#ifndef FSDP_ADAPTER_CONFIG_H
#define FSDP_ADAPTER_CONFIG_H

#include "base/core/mem.h"
#include "base/io/io.h"
#include <regex.h>

/* A factor for the modules that an expression matches. */
typedef struct fsdp_alpha_pattern {
    regex_t expression;
    double alpha;
} fsdp_alpha_pattern;

typedef struct fsdp_adapter_config {
    double alpha;              /* lora_alpha */
    fsdp_alpha_pattern *patterns;      /* alpha_pattern, in its order */
    size_t pattern_count, pattern_room;
    bool divides_by_root;      /* use_rslora: the factor is alpha / sqrt(rank) */
    bool is_transposed;        /* fan_in_fan_out */
    bool is_lora;              /* peft_type */
    bool ties_weights;         /* ensure_weight_tying: a tied weight is trained with the other one */
    char start[24];            /* init_lora_weights, if it is a word */
    const char *variant;       /* a member that asks for another product than LoRA's; NULL: none */
} fsdp_adapter_config;

/* Reads DIR/adapter_config.json. Release the config after a failure, too. */
fsdp_status fsdp_adapter_config_read(fsdp_io *io, const char *dir, fsdp_adapter_config *config,
                                     fsdp_error *err);
void fsdp_adapter_config_release(fsdp_adapter_config *config);

/* The factor of a module's product. */
double fsdp_adapter_factor(const fsdp_adapter_config *config, const char *module, size_t size, int64_t rank);

#endif
