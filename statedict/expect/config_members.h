/* config.json as the values of formulas. */
#ifndef FSDP_CONFIG_MEMBERS_H
#define FSDP_CONFIG_MEMBERS_H

#include "base/io/io.h"
#include "statedict/expect/formula.h"

/* Fills in config, which borrows path; release its arena also after a failure. FSDP_ERR_USAGE when the table
 * does not have the model's type. */
fsdp_status fsdp_config_members_read(const char *text, size_t size, const char *path,
                                     fsdp_config *config, fsdp_error *err);

/* The members that a config.json of any model has. */
typedef struct fsdp_model_kind {
    char type[64];             /* model_type, "" when there is none */
    char class_name[128];      /* the first of architectures, or "" */
    bool is_tied;              /* tie_word_embeddings, or where it is absent the architecture's default */
    bool is_quantized;
    int64_t layers;            /* num_hidden_layers, of the text's model where it has one of its own; or 0 */
    int64_t further_layers;    /* num_nextn_predict_layers: those behind them that predict further tokens */
} fsdp_model_kind;
fsdp_status fsdp_model_kind_read(const char *text, size_t size, const char *path, fsdp_model_kind *kind_out,
                                 fsdp_error *err);
/* The text of DIR/config.json, or where dir is NULL of the one that lies beside the checkpoint at the path,
 * and its own path. The caller frees both, which are NULL when none can be read; err says why. */
char *fsdp_config_find(fsdp_io *io, const char *dir, const char *path, size_t *size_out, char **path_out,
                       fsdp_error *err);
/* Likewise Meta's params.json beside the checkpoint, which has numbers of the model under other names. */
char *fsdp_params_find(fsdp_io *io, const char *path, size_t *size_out, char **path_out);
/* Reads DIR/config.json, or where dir is NULL the one that lies beside the checkpoint at the path. All
 * members are empty when it cannot be read. */
void fsdp_model_kind_find(fsdp_io *io, const char *dir, const char *path, fsdp_model_kind *kind_out);

#endif
