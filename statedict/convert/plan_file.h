/*
 * The plan of a conversion as a text: what `fsdp-convert --plan-out` writes and `--apply` reads. JSON, one
 * output after the other, the same bytes for the same sources and options.
 *
 *   head      what decides everything: the writer, from, to, options, the source's files with size and time
 *   "hash"    of the head: the hash of the plan, which staging directories are known by (resume.h)
 *   contents  values, outputs with their parts, bytes: all of it follows from the head
 *   "xxh3"    of everything before it
 *
 * Who applies a plan makes it anew and compares: nothing of the contents is ever trusted. convert.c and
 * export.c make the text, plan_read.c reads it.
 */
#ifndef FSDP_PLAN_FILE_H
#define FSDP_PLAN_FILE_H

#include "formats/target.h"
#include "statedict/checkpoint/checkpoint_internal.h"
#include "statedict/convert/copied.h"
#include <fsdp/convert.h>
#include <fsdp/text.h>

enum { FSDP_PLAN_VERSION = 1, FSDP_PLAN_HASH = 2 * sizeof(fsdp_hash) + 1 };
#define FSDP_PLAN_START "{\"fsdp_plan\": "
#define FSDP_PLAN_MOST ((size_t)1 << 30)   /* bytes of a plan */

/* What is planned. */
typedef struct fsdp_planned {
    const fsdp_checkpoint *from;
    const char *to;
    const fsdp_convert_opts *opts;
    int64_t chunk_bytes;       /* of an encoded target */
    const fsdp_sd *sd;         /* the target's description */
    const size_t *source;      /* per entry of it: entry of the source */
    const fsdp_copies *copies; /* files that are copied beside it, or NULL */
    const fsdp_ties *ties;     /* names that are left out, or NULL */
} fsdp_planned;

/* The hash of the plan as hexadecimal digits; FSDP_ERR_DAMAGED when opts->plan_hash is another one. */
fsdp_status fsdp_plan_identify(const fsdp_planned *planned, char hash_out[FSDP_PLAN_HASH], fsdp_error *err);
/* The same, and the head's text. FSDP_ERR_USAGE for paths and expressions that JSON cannot spell. */
fsdp_status fsdp_plan_head(const fsdp_planned *planned, fsdp_text *text, char hash_out[FSDP_PLAN_HASH],
                           fsdp_error *err);

/* The contents, behind the head. A checkpoint of ours, */
fsdp_status fsdp_plan_add_files(const fsdp_planned *planned, const fsdp_convert_plan *plan, const int *owners,
                                fsdp_text *text, fsdp_error *err);
/* or a target of another program. opts: as for its create, whose io is not used. */
fsdp_status fsdp_plan_add_target(const fsdp_planned *planned, const fsdp_convert_plan *plan,
                                 const fsdp_target_format *format, const fsdp_target_opts *opts,
                                 fsdp_text *text, fsdp_error *err);

/* Closes the text: its own hash. FSDP_ERR_LIMIT for one that nobody would read. */
fsdp_status fsdp_plan_close(fsdp_text *text, fsdp_error *err);
/* All of it for a conversion into our own format or another one. What would stop it is the status. path: of
 * the file that it is for, or NULL. */
fsdp_status fsdp_convert_plan_text(const char *from, const char *to, const fsdp_convert_opts *opts,
                                   const char *path, fsdp_text *text, fsdp_error *err);
/* FSDP_ERR_USAGE when the file would lie in the result, or replace a file of the source; FSDP_ERR_EXISTS when
 * it would replace what is no plan. path NULL: no file. */
fsdp_status fsdp_plan_check_path(const fsdp_checkpoint *from, const char *to, const char *path,
                                 fsdp_error *err);
/* Is that last hash right? */
bool fsdp_plan_is_whole(const char *text, size_t size);

#endif
