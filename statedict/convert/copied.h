/*
 * Files that an inference stack wants beside the weights (--copy-from): config.json, the tokenizer, licences.
 * docs/formats.md, "Copied files".
 *
 *   open (which files, under the rules that weights are read by)  ->  fit (against what is written: dtype,
 *   vocabulary, tied weights; edits of config.json)  ->  write (into the staging directory, with a record of
 *   name and hash that the weights keep)  ->  check (read back)
 *
 * The record says later which files in such a directory are ours to replace.
 */
#ifndef FSDP_COPIED_H
#define FSDP_COPIED_H

#include "base/io/io.h"
#include "formats/target.h"
#include "statedict/convert/model_config.h"
#include "statedict/convert/ties.h"
#include <fsdp/convert.h>

typedef struct fsdp_copied_file fsdp_copied_file;

typedef struct fsdp_copies {
    struct fsdp_source *source;        /* the directory; NULL: nothing is copied */
    fsdp_arena arena;
    fsdp_copied_file *files;
    size_t count, room;
    fsdp_model_config config;
    fsdp_text record;          /* {"name": hash}, of which the hashes are zero before write */
} fsdp_copies;

/* May such a file be copied at all? */
bool fsdp_copied_name(const char *name, bool with_code);

/* opts->copy_from NULL: nothing. FSDP_ERR_NOT_FOUND when it is not there, or holds nothing to copy. */
fsdp_status fsdp_copies_open(fsdp_io *io, const fsdp_convert_opts *opts, const char *to, fsdp_copies *copies,
                             fsdp_error *err);

/* What is written beside the copies. */
typedef struct fsdp_copies_beside {
    const fsdp_target_entry *entries;
    const bool *is_model;      /* per entry: not of the optimizer */
    size_t count;
    const fsdp_ties *ties;
} fsdp_copies_beside;
/* FSDP_ERR_USAGE names what does not fit: a vocabulary of another size, weights that are tied and should not
 * be, or the other way round. */
fsdp_status fsdp_copies_fit(fsdp_copies *copies, const fsdp_convert_opts *opts,
                            const fsdp_copies_beside *beside, fsdp_error *err);

int64_t fsdp_copies_bytes(const fsdp_copies *copies);
const char *fsdp_copies_record(const fsdp_copies *copies);     /* NULL: nothing is copied */
/* Into the directory; what lies there under their names is replaced. */
fsdp_status fsdp_copies_write(fsdp_copies *copies, fsdp_io *io, const char *dir, bool sync, fsdp_error *err);
fsdp_status fsdp_copies_check(const fsdp_copies *copies, fsdp_io *io, const char *dir, fsdp_error *err);
void fsdp_copies_release(fsdp_copies *copies);

/* For plans. */
const char *fsdp_copies_path(const fsdp_copies *copies, size_t i, fsdp_file_info *info_out);
const char *fsdp_copies_name(const fsdp_copies *copies, size_t i);
/* "dtype float32 -> bfloat16", or "" */
const char *fsdp_copies_change(const fsdp_copies *copies, size_t i);

/* Names in a directory of that format that its own record has, and that are still what was copied: ours. None
 * when it cannot be read. Released with fsdp_io_names_release. */
void fsdp_copied_list_ours(fsdp_io *io, const char *dir, const char *format, fsdp_io_names *names_out);

#endif
