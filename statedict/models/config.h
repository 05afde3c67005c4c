/*
 * config.json, read once: as a tree of values, as the members that any model has, and as the numbers of
 * formulas.
 */
#ifndef FSDP_CONFIG_H
#define FSDP_CONFIG_H

#include "base/io/io.h"
#include "statedict/models/formula.h"
#include <fsdp/value.h>

enum {
    FSDP_CONFIG_BYTES = 16 << 20,
    FSDP_CONFIG_VALUES = 1 << 20   /* at most, in a config.json */
};

/* Reads the text of config.json, an object, into the arena: the values need no release. path is for messages.
 * FSDP_ERR_DAMAGED: no JSON, or a member comes twice. */
fsdp_status fsdp_config_parse(fsdp_arena *arena, const char *text, size_t size, const char *path,
                              fsdp_value *config_out, fsdp_error *err);

/* A member of an object; NULL where it is absent or null, or where object is NULL or of another kind. */
const fsdp_value *fsdp_config_at(const fsdp_value *object, const char *name);
/* True for a member that is there and null. */
bool fsdp_config_is_null(const fsdp_value *object, const char *name);
/* Copies a number, a boolean as 0 or 1; false when the member is neither. */
bool fsdp_config_real(const fsdp_value *object, const char *name, double *number_out);
/* A text without zero bytes; NULL when the member is none. */
const char *fsdp_config_word(const fsdp_value *object, const char *name);

/* The members that a config.json of any model has. */
typedef struct fsdp_model_kind {
    char type[64];             /* model_type, "" when there is none */
    char class_name[128];      /* the first of architectures, or "" */
    bool is_tied;              /* tie_word_embeddings, or where it is absent the default of the description */
    bool is_quantized;
    int64_t layers;            /* num_hidden_layers, of the text's model where it has one of its own; or 0 */
    int64_t further_layers;    /* num_nextn_predict_layers: those after them that predict further tokens */
} fsdp_model_kind;
fsdp_status fsdp_model_kind_read(const char *text, size_t size, const char *path, fsdp_model_kind *kind_out,
                                 fsdp_error *err);

/* Fills in config, whose description is that of the model's type; borrows text and path. Release its arena
 * after a failure, too. FSDP_ERR_USAGE when no description has the type, or when it has no tensors. */
fsdp_status fsdp_config_read(const char *text, size_t size, const char *path, fsdp_config *config,
                             fsdp_error *err);
/* Fills in the class and the numbers of formulas; architecture, json, text, size and path are there. */
fsdp_status fsdp_config_take(fsdp_config *config, fsdp_error *err);
/* Computes a member, or its default, of whatever kind but a word. */
fsdp_status fsdp_config_number(const fsdp_config *config, const char *name, double *number_out,
                               fsdp_error *err);

/* The text of DIR/config.json, or where dir is NULL of the one that lies next to the checkpoint at the path,
 * and its own path. The caller frees both, which are NULL when none can be read; err says why. */
char *fsdp_config_find(fsdp_io *io, const char *dir, const char *path, size_t *size_out, char **path_out,
                       fsdp_error *err);
/* Likewise Meta's params.json next to the checkpoint, which has numbers of the model under other names. */
char *fsdp_params_find(fsdp_io *io, const char *path, size_t *size_out, char **path_out);
/* Reads DIR/config.json, or where dir is NULL the one that lies next to the checkpoint at the path. All
 * members are empty when it cannot be read. */
void fsdp_model_kind_find(fsdp_io *io, const char *dir, const char *path, fsdp_model_kind *kind_out);

#endif
