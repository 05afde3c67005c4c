/*
 * Files that an inference stack needs next to the weights: config.json, the tokenizer, licences. They come
 * from a directory (--copy-from), from next to the weights, or from the checkpoint, where a trainer keeps
 * them as values. A model's further modules (sentence-transformers) are copied with the folders they are in.
 * docs/formats.md, "Copied files".
 *
 *   open (lists the files, with the checks that reading weights has)  ->  fit (compares them with the result:
 *   dtype, tied weights; edits config.json)  ->  write (into the staging directory, with a record
 *   of names and hashes that the weights keep)  ->  check (reads them back)
 *
 * A later overwrite may replace the files that this record lists (output_place.c).
 */
#ifndef FSDP_COPIED_H
#define FSDP_COPIED_H

#include "base/io/io.h"
#include "formats/target.h"
#include "kernels/kernels.h"
#include "statedict/models/config.h"
#include "statedict/select/selection.h"
#include <fsdp/convert.h>

typedef struct fsdp_copied_file {
    const char *name;
    const char *path;          /* in the source; NULL: the checkpoint carries it as a value */
    int64_t size, mtime_ns;    /* of that path */
    int number;                /* in the source */
    bool has_text;
    fsdp_text text;            /* what is written, if it has_text: edited or carried */
    char change[96];           /* "dtype float32 -> bfloat16", or "" */
    const char *code;          /* classes that a program runs when it loads the file; NULL: none */
    fsdp_hash hash;            /* of the bytes that were written */
} fsdp_copied_file;

typedef struct fsdp_copies {
    struct fsdp_source *source;        /* the directory; NULL: none */
    const char *carrier;       /* the checkpoint whose values are files; borrowed */
    fsdp_arena arena;
    fsdp_copied_file *files;
    size_t count, room;
    const fsdp_config_file *known;     /* the config.json of the conversion; borrowed */
    const fsdp_config_file *config;    /* among the copies: the one above, or own; NULL: none */
    fsdp_config_file own;
    bool copies_made;          /* known was made of the source, and is copied */
    int tied;                  /* tie_word_embeddings of it: 1, 0, or -1: it is not there */
    bool unties;               /* config.json says that embeddings are not tied, whatever it said before */
    bool has_adapter;          /* the result is an adapter: its settings go along with it, and only with it */
    fsdp_text record;          /* {"name": hash}, empty without copies; the hashes are zero before write */
    int64_t bytes;             /* of all copies, after fit */
} fsdp_copies;

/* True when a file of this name may be copied. */
bool fsdp_copied_name(const char *name, bool with_code);

/* The two ends of a conversion. */
typedef struct fsdp_copies_places {
    const char *from, *to;
    const fsdp_sd *sd;         /* of the source */
    const fsdp_config_file *config;
    const struct fsdp_gguf_files *made;        /* other files that were made of the source */
    bool copies_made;          /* config was made of the source, and goes along */
    bool unties;               /* an adapter made an output of its own */
} fsdp_copies_places;
/* Lists the files of opts->copy_from; where that is NULL and the format is hf, the files that the source
 * carries as values. FSDP_ERR_NOT_FOUND when the directory does not exist or has no file to copy. */
fsdp_status fsdp_copies_open(fsdp_io *io, const fsdp_convert_opts *opts, const fsdp_copies_places *places,
                             fsdp_copies *copies, fsdp_error *err);

/* The tensors of the result, next to which the copies lie. */
typedef struct fsdp_copies_beside {
    const fsdp_target_entry *entries;
    const bool *is_model;      /* per entry: of the model, not of the optimizer */
    size_t count;
    const fsdp_convert_tie *ties;      /* names that are left out */
    size_t tie_count;
} fsdp_copies_beside;
/* Compares the copies with the result and edits config.json. FSDP_ERR_USAGE names weights that are tied in
 * only one of the two. */
fsdp_status fsdp_copies_fit(fsdp_copies *copies, const fsdp_convert_opts *opts,
                            const fsdp_copies_beside *beside, fsdp_error *err);

/* Writes the copies into the directory, and replaces files of their names. */
fsdp_status fsdp_copies_write(fsdp_copies *copies, fsdp_io *io, const char *dir, bool sync, fsdp_error *err);
fsdp_status fsdp_copies_check(const fsdp_copies *copies, fsdp_io *io, const char *dir, fsdp_error *err);
void fsdp_copies_release(fsdp_copies *copies);

/* The hash that the record has for a file of these bytes. */
fsdp_status fsdp_copied_hash(fsdp_io *io, const char *path, fsdp_hash *hash_out, fsdp_error *err);

/* --- edits of config.json --- */

typedef struct fsdp_config_edits {
    const char *dtype;         /* the new "dtype" and "torch_dtype", where they are strings, also in members
                                * NAME_config (not quantization_config); NULL: unchanged */
    bool no_code;              /* remove every "auto_map" */
    bool no_quantization;      /* remove every "quantization_config" */
    bool untied;               /* "tie_word_embeddings" is false, also where the text lacks it */
} fsdp_config_edits;

typedef struct fsdp_edited_config {
    fsdp_text text;            /* the edited text, empty without edits; the caller releases it */
    char was[32];              /* the first dtype that was replaced, or "" */
} fsdp_edited_config;
/* FSDP_ERR_DAMAGED, with the position, for a text that is not a JSON object. */
fsdp_status fsdp_model_config_edit(const char *text, size_t size, const char *path,
                                   const fsdp_config_edits *edits, fsdp_edited_config *out,
                                   fsdp_error *err);

#endif
