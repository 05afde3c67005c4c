/*
 * config.json of a model: it is read once, into a tree of values and the members that any model has, and
 * handed on. The numbers of formulas are taken from it for the description of its family.
 */
#ifndef FSDP_CONFIG_H
#define FSDP_CONFIG_H

#include "base/io/io.h"
#include "statedict/models/models.h"
#include <fsdp/value.h>

enum {
    FSDP_CONFIG_BYTES = 16 << 20,
    FSDP_CONFIG_VALUES = 1 << 20   /* at most, in a config.json */
};

/* The members that a config.json of any model has. */
typedef struct fsdp_model_kind {
    char type[64];             /* model_type, "" when there is none */
    char class_name[128];      /* the first of architectures, or "" */
    bool is_tied;              /* tie_word_embeddings, or where it is absent the default of the description */
    bool is_quantized;
    int64_t layers;            /* num_hidden_layers, of the text's model where it has one of its own; or 0 */
    int64_t further_layers;    /* num_nextn_predict_layers: those after them that predict further tokens */
} fsdp_model_kind;

/* A config.json that was read. Zero-initialised there is none. */
typedef struct fsdp_config_file {
    const char *text;          /* NULL: there is none */
    size_t size;
    const char *path;          /* NULL: the text was made of other files */
    bool is_object;            /* the text is a JSON object, which may have a member twice */
    fsdp_value json;           /* the object; null where there is an error */
    fsdp_error error;          /* what is wrong with the text, or FSDP_OK */
    fsdp_model_kind kind;      /* empty where there is an error */
    bool is_untied;            /* the caller says that tie_word_embeddings is false, whatever it was */
    const fsdp_architecture *architecture;     /* the description of its model_type; NULL: there is none */
    fsdp_arena arena;          /* has all of this */
} fsdp_config_file;

/* Reads a text, which is copied; path: see above. FSDP_ERR_DAMAGED, which the file keeps: the text is not a
 * JSON object, or has a member twice, in itself or in an object that is read here. Release the file after a
 * failure, too. */
fsdp_status fsdp_config_parse(const char *text, size_t size, const char *path, fsdp_config_file *file_out,
                              fsdp_error *err);
/* Reads DIR/config.json, or where dir is NULL the one that lies next to the checkpoint at the path. There is
 * none after a failure to read it, which err has. */
void fsdp_config_find(fsdp_io *io, const char *dir, const char *path, fsdp_config_file *file_out,
                      fsdp_error *err);
/* Likewise Meta's params.json next to the checkpoint, which has numbers of the model under other names. */
void fsdp_params_find(fsdp_io *io, const char *path, fsdp_config_file *file_out);
void fsdp_config_release(fsdp_config_file *file);

/* Fails as the reading of the text did. */
fsdp_status fsdp_config_check(const fsdp_config_file *file, fsdp_error *err);
/* Returns the path, or "config.json", for messages. */
const char *fsdp_config_name(const fsdp_config_file *file);
/* Returns tie_word_embeddings of the model, or of its part for text, as 1 or 0; -1: it is not there. */
int fsdp_config_says_tied(const fsdp_config_file *file);

/* A member of an object; NULL where it is absent or null, or where object is NULL or of another kind. */
const fsdp_value *fsdp_config_at(const fsdp_value *object, const char *name);
/* True for a member that is there and null. */
bool fsdp_config_is_null(const fsdp_value *object, const char *name);
/* Copies a number, a boolean as 0 or 1; false when the member is neither. */
bool fsdp_config_real(const fsdp_value *object, const char *name, double *number_out);
/* A text without zero bytes; NULL when the member is none. */
const char *fsdp_config_word(const fsdp_value *object, const char *name);

/* --- formulas --- */

/*
 * Formulas over members of config.json, for descriptions of models: integers, names of members, "layer",
 * + - * / %, == != >, && || !, "layer in LIST", and 'ForCausalLM', which is 1 when the name of the model's
 * class ends with that text. A true condition is 1.
 *
 * In: a formula of a description, which is trusted, and members, which are not. Out: a number, computed with
 * overflow checks.
 */

enum { FSDP_CONFIG_LIST = 4096 };

/* A member as config.json has it. */
typedef struct fsdp_config_value {
    const char *name;
    bool is_there;             /* and not null */
    int64_t number;            /* of an object or a list: the number of its items */
    int64_t *items;            /* of a list of integers, sorted */
} fsdp_config_value;

typedef struct fsdp_config {
    const fsdp_architecture *architecture;     /* its description */
    const fsdp_config_file *file;
    const char *path;          /* for messages */
    fsdp_arena arena;
    const char *class_name;    /* the first of "architectures"; "" or NULL: there is none */
    bool is_class_known;       /* the description has the class; otherwise its heads are not known */
    bool any_class;            /* every 'CLASS' in a formula is 1 */
    fsdp_config_value *values; /* of the description's members */
    size_t count;
} fsdp_config;

/* Tells whether a description has the tensors of the model, which are others where it is quantized. */
bool fsdp_config_has_tensors(const fsdp_config_file *file);
/* Fills in config, whose description is that of the model's type; borrows file. Release its arena after a
 * failure, too. FSDP_ERR_USAGE when no description has the type, or when it has no tensors. */
fsdp_status fsdp_config_read(const fsdp_config_file *file, fsdp_config *config, fsdp_error *err);
/* Likewise for a file whose description need not have tensors, but must be there. */
fsdp_status fsdp_config_take(const fsdp_config_file *file, fsdp_config *config, fsdp_error *err);
/* Computes a member, or its default, of whatever kind but a word. */
fsdp_status fsdp_config_number(const fsdp_config *config, const char *name, double *number_out,
                               fsdp_error *err);

/* FSDP_ERR_USAGE names a member that makes no sense. */
fsdp_status fsdp_formula_compute(const fsdp_config *config, const char *formula, int64_t layer,
                                 int64_t *value_out, fsdp_error *err);
/* Likewise for a text that may also be a real number. */
fsdp_status fsdp_formula_number(const fsdp_config *config, const char *text, int64_t layer,
                                double *number_out, fsdp_error *err);
/* Computes one dim of "A, B, C" and moves *shape_at after it; *shape_at becomes NULL after the last. */
fsdp_status fsdp_formula_next_dim(const fsdp_config *config, const char **shape_at, int64_t layer,
                                  int64_t *value_out, fsdp_error *err);

#endif
