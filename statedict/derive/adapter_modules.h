/*
 * The modules that the settings of an adapter name: by expressions of Python, by ends of names, by layers.
 * A module is matched by the name that it has in the model, as PEFT does.
 */
#ifndef FSDP_ADAPTER_MODULES_H
#define FSDP_ADAPTER_MODULES_H

#include "base/data/json.h"
#include "statedict/derive/python_expression.h"

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

/* Takes an object of the JSON; null and the like stand for none. */
fsdp_status fsdp_module_numbers_read(fsdp_json *json, fsdp_module_numbers *numbers, fsdp_error *err);
/* Replaces *number by that of the first expression which matches; it stays when none does. */
fsdp_status fsdp_module_numbers_find(const fsdp_module_numbers *numbers, const fsdp_module_name *module,
                                     double *number, fsdp_error *err);
void fsdp_module_numbers_release(fsdp_module_numbers *numbers);

/* Names of modules, or of their ends, or an expression for whole names: target_modules, exclude_modules. */
typedef struct fsdp_module_list {
    fsdp_arena arena;
    fsdp_module_name *names;
    size_t count, room;
    fsdp_python_expression expression;
    bool is_given, is_expression;
} fsdp_module_list;

/* Takes a string, which is an expression, or a list of names; anything else stands for none. */
fsdp_status fsdp_module_list_read(fsdp_json *json, fsdp_module_list *list, fsdp_error *err);
/* *is_end_out: a name of the list is only the end of the module's. */
fsdp_status fsdp_module_list_has(const fsdp_module_list *list, const fsdp_module_name *module,
                                 bool *has_out, bool *is_end_out, fsdp_error *err);
void fsdp_module_list_release(fsdp_module_list *list);

/* Layers of a model by their numbers: layers_to_transform, layers_pattern. */
typedef struct fsdp_module_layers {
    int64_t *numbers;
    size_t count, room;
    fsdp_module_list above;    /* names in front of a layer's number; none: any */
} fsdp_module_layers;

/* Takes a number or a list of numbers. */
fsdp_status fsdp_module_layers_read(fsdp_json *json, fsdp_module_layers *layers, fsdp_error *err);
/* Takes the names in front of a number. FSDP_ERR_USAGE: one is an expression. */
fsdp_status fsdp_module_layers_read_above(fsdp_json *json, fsdp_module_layers *layers, fsdp_error *err);
/* True also when no layers are named. */
bool fsdp_module_layers_have(const fsdp_module_layers *layers, const fsdp_module_name *module);
void fsdp_module_layers_release(fsdp_module_layers *layers);

#endif
