/*
 * Room frameworks: what frameworks leave on the disk around their checkpoints: runs, steps, folders for the
 * model and the optimizer, configurations next to them.
 *
 * In: a path as a person types it. Out: the path of the one checkpoint that it means, which detect opens, and
 * the directory that holds its configuration; or a message that names the format and the program that reads
 * it.
 *
 *   framework_table.c  the frameworks, as data: a new one is a row
 *   framework_config.c fsdp_framework_config: where config.json and the tokenizer are
 *   framework_modules.c fsdp_framework_modules: folders of a model's further modules
 *   framework_shards.c the files of several ranks, opened as one source after a check that they agree
 *   framework_folder.c names that match patterns, and what each look into a directory keeps to
 *   frameworks.c       fsdp_framework_resolve: run -> newest step -> part, by the table, pointers and what is
 *                      there; fsdp_framework_open, which opens all parts of a row as one source
 *
 * Names out of a directory are used only in that directory. Caller: statedict.
 */
#ifndef FSDP_FRAMEWORKS_H
#define FSDP_FRAMEWORKS_H

#include "base/io/io.h"
#include "base/text.h"
#include "formats/source.h"

enum { FSDP_FRAMEWORK_MARKERS = 3, FSDP_FRAMEWORK_PARTS = 4 };

/* A part next to the model, which is read with it or left out. */
typedef struct fsdp_framework_part {
    const char *names;         /* a pattern: '#' is the number of the model; or "DIR/NAME" */
    const char *key;           /* above its names in the whole: "optim"; "": none */
    const char *own_key;       /* that all its names may have already, which key replaces; NULL: none */
} fsdp_framework_part;

/* A directory of a framework. Names are patterns: '*' is any text, '#' is a number, {r} the number of a
 * rank or {r} itself; a list has '|' between its patterns. */
typedef struct fsdp_framework_row {
    const char *made_by;
    const char *markers[FSDP_FRAMEWORK_MARKERS];  /* names of the directory, all of which must be there */
    const char *member;        /* the model: one of the markers; of several the one with the highest number
                                * that opens; with {r} a pattern of rank files; ".": the directory itself,
                                * whose path with "/." is the model without the parts. NULL: nothing can be
                                * opened */
    const char *checked;       /* a pattern of rank files that must open: the member may be one of them
                                * without the others; NULL: none */
    const char *pointer;       /* in place of member: a file whose text is the name of the model ... */
    const char *pointed;       /* ... or the number in a name of this pattern; NULL: always the name */
    bool counts_models;        /* '#' is the number of a model, not of a step: the person chooses one */
    fsdp_framework_part parts[FSDP_FRAMEWORK_PARTS];
    const char *shards;        /* in place of member: the file in each folder of the first marker, whose name
                                * has the numbers of a tensor and a pipeline rank */
    const char *weights;       /* with shards: tensors of the model, which have one dtype on all ranks */
    const char *replicated;    /* those that all tensor ranks have whole */
    const char *agreed;        /* values that all ranks have alike */
    bool is_one;               /* the parts are always read with the model, whose names stay as they are */
    const char *others;        /* what else is next to the model and is left out; NULL: nothing */
    bool yields;               /* to weights of transformers next to it: hubs hold the same ones twice */
    const char *say;           /* recognised only: what to do with it; it yields, too */
} fsdp_framework_row;

/* Recognises a file of another program by its first bytes. */
typedef struct fsdp_framework_file {
    const char *made_by;
    const char *head;
    size_t head_size;
    const char *suffix;        /* NULL: any */
    const char *say;
} fsdp_framework_file;

extern const fsdp_framework_row fsdp_framework_rows[];
extern const size_t fsdp_framework_row_count;
extern const fsdp_framework_file fsdp_framework_files[];
extern const size_t fsdp_framework_file_count;
/* Lists the names of steps in a run ("checkpoint-#"), up to NULL. */
extern const char *const fsdp_framework_steps[];
/* Names of files that hold no model; of weights that formats/ reads, and of those that it does not read. */
extern const char fsdp_framework_no_model[], fsdp_framework_weights[], fsdp_framework_foreign_weights[];

/* Folders of a checkpoint that may hold the configuration of its model ("huggingface", "."), and the names of
 * which one must be there, both up to NULL. */
extern const char *const fsdp_framework_configs[], *const fsdp_framework_config_names[];

/* The files that loaders read next to weights, and those of them that are weights, indexes or states. */
extern const char fsdp_framework_beside[], fsdp_framework_not_beside[];
/* Files that may be pickles, or hold some. */
extern const char fsdp_framework_pickles[];
/* The file that lists the modules of a model which lie in folders next to its first one. */
extern const char fsdp_framework_module_list[];

/* The resolver reports its choices to the user. */
typedef void (*fsdp_framework_note)(void *context, const char *text);

typedef struct fsdp_framework_way {
    fsdp_framework_note note;  /* NULL: none */
    void *context;
    bool is_chosen;            /* the person named the format: a pointer to nothing is not followed */
    bool whole;                /* a directory with parts next to its model is the checkpoint, not the model */
} fsdp_framework_way;

/*
 * Finds the checkpoint that a directory or file means; *path_out is NULL when it is the path itself, and the
 * caller frees it. FSDP_ERR_USAGE: there are several, which the message names, or too many files to open;
 * FSDP_ERR_NOT_FOUND: the format is recognised and cannot be read, and the message names what can.
 */
fsdp_status fsdp_framework_resolve(fsdp_io *io, const char *path, const fsdp_framework_way *way,
                                   char **path_out, fsdp_error *err);

/* Opens the path as fsdp_source_open does, or as one source all parts of a directory that has several. */
fsdp_status fsdp_framework_open(fsdp_io *io, const char *path, const fsdp_source_opts *opts,
                                fsdp_source **source_out, fsdp_error *err);

/* Finds the directory that holds the configuration of the checkpoint at the path (a directory, a file or a
 * pattern of rank files): its own, or the one above that has a row's pointer. The caller frees
 * *dir_out; NULL: none. */
fsdp_status fsdp_framework_config(fsdp_io *io, const char *path, char **dir_out, fsdp_error *err);

/* Lists the folders ("2_Dense") that the text of fsdp_framework_module_list names, without the directory
 * itself. The caller releases them, also after an error. FSDP_ERR_DAMAGED: one leads out of the directory. */
fsdp_status fsdp_framework_modules(const char *text, size_t size, const char *path, fsdp_io_names *names_out,
                                   fsdp_error *err);

/* Returns true when the name matches a pattern of the list; *number_out: what '#' stood for, or -1. */
bool fsdp_framework_matches(const char *list, const char *name, int64_t *number_out);

/* Returns the pattern with '#' replaced by the digits that it stands for in the name, which a pattern of the
 * list matches; unchanged where it stands for none. The caller frees it; NULL: no memory. */
char *fsdp_framework_spell(const char *list, const char *name, const char *pattern);

#endif
