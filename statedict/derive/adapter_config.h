/* adapter_config.json of PEFT, and the modules that it names. */
#ifndef FSDP_ADAPTER_CONFIG_H
#define FSDP_ADAPTER_CONFIG_H

#include "base/io/io.h"
#include "base/data/json.h"
#include "statedict/derive/python_expression.h"

/*
 * The modules that the settings of an adapter name: by expressions of Python, by ends of names, by layers.
 * A module is matched by the name that it has in the model, as PEFT does.
 */

/* A module's name as bytes. */
typedef struct fsdp_module_name {
    const char *text;
    size_t size;
} fsdp_module_name;

/* Numbers for the modules that expressions match: alpha_pattern, rank_pattern. */
typedef struct fsdp_module_numbers {
    struct fsdp_module_number *items;
    size_t count, room;
    size_t states;             /* of all expressions: memory and time are bounded */
} fsdp_module_numbers;

/* Names of modules, or of their ends, or an expression for whole names: target_modules, exclude_modules. */
typedef struct fsdp_module_list {
    fsdp_arena arena;
    fsdp_module_name *names;
    size_t count, room;
    fsdp_python_expression expression;
    bool is_given, is_expression;
} fsdp_module_list;

/* Layers of a model by their numbers: layers_to_transform, layers_pattern. */
typedef struct fsdp_module_layers {
    int64_t *numbers;
    size_t count, room;
    fsdp_module_list above;    /* names in front of a layer's number; none: any */
} fsdp_module_layers;

/* The settings. */
typedef struct fsdp_adapter_config {
    double alpha, rank;        /* lora_alpha, r: of the modules that no pattern matches */
    fsdp_module_numbers alphas, ranks; /* alpha_pattern, rank_pattern */
    fsdp_module_list targets, excluded;        /* target_modules, exclude_modules */
    fsdp_module_layers layers; /* layers_to_transform, layers_pattern */
    bool divides_by_root;      /* use_rslora: the factor is alpha / sqrt(rank) */
    bool is_transposed;        /* fan_in_fan_out */
    bool is_lora;              /* peft_type */
    bool has_lengths;          /* use_dora: each product comes with magnitudes */
    bool ties_weights;         /* ensure_weight_tying: a tied weight is trained with the other one */
    char start[24];            /* init_lora_weights, if it is a word */
    const char *variant;       /* a member that asks for another product than LoRA's; NULL: none */
} fsdp_adapter_config;

/* Reads DIR/adapter_config.json. Release the config after a failure, too. */
fsdp_status fsdp_adapter_config_read(fsdp_io *io, const char *dir, fsdp_adapter_config *config,
                                     fsdp_error *err);
void fsdp_adapter_config_release(fsdp_adapter_config *config);

/* Compares what the adapter has for a module with the settings, and finds the factor of its product.
 * FSDP_ERR_DAMAGED: PEFT would not put an adapter there, or one of another rank or kind. */
typedef struct fsdp_adapter_module {
    fsdp_module_name name;
    int64_t rank;
    bool has_lengths;
} fsdp_adapter_module;
fsdp_status fsdp_adapter_factor(const fsdp_adapter_config *config, const fsdp_adapter_module *module,
                                double *factor_out, fsdp_error *err);

#endif
