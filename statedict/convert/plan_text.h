/*
 * The plan of a conversion as a text: what `fsdp-convert --plan-out` writes and `--apply` reads. JSON, one
 * output after the other, the same bytes for the same sources and options.
 *
 *   head      what decides everything: the writer, from, to, options, the source's files with size and time
 *   "hash"    of the head: the hash of the plan, which staging directories are known by (resume.h)
 *   contents  values, outputs with their parts, bytes: all of it follows from the head
 *   "xxh3"    of everything before it
 *
 * --apply takes from, to and options (plan_options.c), makes the plan anew and compares the bytes: nothing
 * else of the file is read but the source's files, to name the one that changed (plan_order.c).
 */
#ifndef FSDP_PLAN_TEXT_H
#define FSDP_PLAN_TEXT_H

#include "base/data/json.h"
#include "base/core/mem.h"
#include "kernels/kernels.h"
#include <fsdp/convert.h>
#include "base/text.h"

struct convert_job;

enum { FSDP_PLAN_VERSION = 1, FSDP_PLAN_HASH = 2 * sizeof(fsdp_hash) + 1 };
#define FSDP_PLAN_START "{\"fsdp_plan\": "
#define FSDP_PLAN_MOST ((size_t)1 << 30)   /* bytes of a plan */

/* The hash of the plan as hexadecimal digits; FSDP_ERR_DAMAGED when opts.plan_hash is another one. */
fsdp_status fsdp_plan_identify(const struct convert_job *job, char hash_out[FSDP_PLAN_HASH], fsdp_error *err);
/* The whole text of a prepared job. FSDP_ERR_USAGE for paths and expressions that JSON cannot spell. */
fsdp_status fsdp_plan_spell(struct convert_job *job, const fsdp_convert_plan *plan, fsdp_text *text,
                            fsdp_error *err);
/* Closes the text: its own hash. FSDP_ERR_LIMIT for one that nobody would read. */
fsdp_status fsdp_plan_close(fsdp_text *text, fsdp_error *err);
/* Is that last hash right? */
bool fsdp_plan_is_whole(const char *text, size_t size);

/* Prepares a conversion and spells its plan. What would stop it is the status. path: of the file that it is
 * for, or NULL. */
fsdp_status fsdp_convert_plan_text(const char *from, const char *to, const fsdp_convert_opts *opts,
                                   const char *path, fsdp_text *text, fsdp_error *err);
/* FSDP_ERR_USAGE when the file would lie in the result, or replace a file of the source; FSDP_ERR_EXISTS when
 * it would replace what is no plan. path NULL: no file. */
fsdp_status fsdp_plan_check_path(const fsdp_checkpoint *from, const char *to, const char *path,
                                 fsdp_error *err);

/* --- plan_options.c --------------------------------------------------------------------------- */

/* A head that is spelled, and the first string in it that JSON cannot spell. */
typedef struct plan_head {
    fsdp_text *text;
    const char *unspelled;
} plan_head;

void fsdp_plan_add_string(plan_head *head, const char *string);
/* Whole: a plan means the same wherever it is applied from. */
void fsdp_plan_add_path(plan_head *head, const char *path);
/* The members of the object "options". */
void fsdp_plan_add_options(plan_head *head, const fsdp_convert_opts *opts);

/* The object itself; strings and lists go into the arena. The mesh is to be freed, also after a failure. */
fsdp_status fsdp_plan_read_options(fsdp_json *json, fsdp_arena *arena, fsdp_convert_opts *opts,
                                   fsdp_mesh **mesh_out, fsdp_error *err);
fsdp_status fsdp_plan_read_string(fsdp_json *json, fsdp_arena *arena, const char **out, fsdp_error *err);

#endif
