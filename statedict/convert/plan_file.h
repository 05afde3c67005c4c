/*
 * The plan of a conversion as a JSON text: `fsdp-convert --plan-out` writes it, `--apply` reads it. Equal
 * sources and options give equal bytes.
 *
 *   head      decides everything else: the writer, from, to, options, the source's files with size and time
 *   "hash"    of the head: the hash of the plan, which identifies staging directories (resume.h)
 *   contents  values, outputs with their parts, bytes: all of it follows from the head
 *   "xxh3"    of everything before it
 *
 * fsdp_conversion_apply takes from, to and options, opens their conversion and compares the bytes. The rest
 * is not read, but for the list of the source's files, to name one that changed.
 */
#ifndef FSDP_PLAN_FILE_H
#define FSDP_PLAN_FILE_H

#include "base/data/json.h"
#include "base/core/mem.h"
#include "kernels/kernels.h"
#include <fsdp/convert.h>
#include "base/text.h"

struct convert_job;

enum { FSDP_PLAN_VERSION = 1, FSDP_PLAN_HASH = 2 * sizeof(fsdp_hash) + 1 };

/* The hash of the plan as hexadecimal digits. */
fsdp_status fsdp_plan_identify(const struct convert_job *job, char hash_out[FSDP_PLAN_HASH], fsdp_error *err);
/* Closes the text with its own hash. FSDP_ERR_LIMIT beyond the size that readers accept. */
fsdp_status fsdp_plan_close(fsdp_text *text, fsdp_error *err);

/* Writes the plan of a prepared job, whole or not at all. FSDP_ERR_USAGE for paths and expressions that JSON
 * cannot spell, and when the file would lie in the result, or replace a file of the source; FSDP_ERR_EXISTS
 * when it would replace a file that is not a plan. */
fsdp_status fsdp_plan_write(struct convert_job *job, const fsdp_convert_plan *plan, const char *path,
                            fsdp_error *err);

/* --- options --- */

/* A head that is being written, and its first string that JSON cannot represent. */
typedef struct plan_head {
    fsdp_text *text;
    const char *unspelled;
} plan_head;

/* Adds the members of the object "options". */
void fsdp_plan_add_options(plan_head *head, const fsdp_convert_opts *opts);

/* Reads the object "options"; strings and lists go into the arena. The caller frees the mesh, also after a
 * failure. */
fsdp_status fsdp_plan_read_options(fsdp_json *json, fsdp_arena *arena, fsdp_convert_opts *opts,
                                   fsdp_mesh **mesh_out, fsdp_error *err);

/* --- reading back --- */

/* A plan that was read from a file: paths, and the options that made it. All of it is borrowed until the
 * close. */
typedef struct fsdp_convert_order {
    const char *from, *to;
    fsdp_convert_opts opts;
} fsdp_convert_order;

/* Reads a plan, which the caller closes. FSDP_ERR_NOT_FOUND: no plan is there. FSDP_ERR_DAMAGED: it is
 * damaged, or of a newer version. */
fsdp_status fsdp_convert_order_open(const char *path, const fsdp_access *access,
                                    fsdp_convert_order **order_out, fsdp_error *err);
/* FSDP_ERR_DAMAGED names the first of the source's files that is not as the plan has it. */
fsdp_status fsdp_convert_order_check_files(fsdp_convert_order *order, fsdp_error *err);
/* FSDP_ERR_DAMAGED when the text of the plan that was made again is another one. */
fsdp_status fsdp_convert_order_compare(const fsdp_convert_order *order, struct convert_job *job,
                                       const fsdp_convert_plan *now, fsdp_error *err);
void fsdp_convert_order_close(fsdp_convert_order *order);    /* accepts NULL */

#endif
