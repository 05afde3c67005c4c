/*
 * What the files of fsdp-convert share: convert_options.c (the command line), convert_report.c (what is
 * printed), fsdp_convert.c (the work, which is fsdp_checkpoint_convert's).
 */
#ifndef FSDP_TOOLS_CONVERT_H
#define FSDP_TOOLS_CONVERT_H

#include "tools/cli.h"

typedef struct convert_options {
    cli_common common;
    fsdp_convert_opts convert;
    const char *mesh_text;
    fsdp_mesh *mesh;
    bool kind_given, dim_given, plan, verbose;
    bool digest;               /* of the files that were written */
    const char **drops, **renames; /* as many as there are arguments at most */
    const char *from, *to;
    const char *plan_out, *apply;
    char planning[32];         /* an option that plans and was given, for the message */
    fsdp_convert_order *order; /* what --apply read */
} convert_options;

/* --- convert_options.c ------------------------------------------------------------------------ */

/* Ends the program with a message when they make no sense. */
void convert_options_read(int argc, char **argv, convert_options *opts_out);
void convert_options_release(convert_options *opts);

/* --- convert_report.c ------------------------------------------------------------------------- */

void convert_add_plan(fsdp_text *text, const convert_options *opts, const fsdp_checkpoint_info *info,
                      const fsdp_convert_plan *plan);
/* failure: what stops it, or NULL; digests: from convert_add_digest, or NULL. */
void convert_add_json(fsdp_text *text, const convert_options *opts, const fsdp_checkpoint_info *info,
                      const fsdp_convert_plan *plan, double seconds, const fsdp_text *digests,
                      const fsdp_error *failure);
/* A line as of sha256sum, or a member of the object "sha256". */
void convert_add_digest(fsdp_text *text, bool json, const char *name, const uint8_t digest[32]);
/* "3 of 148 tensors have no dim 7 and are cut along dim 0" */
void convert_add_short(fsdp_text *text, const convert_options *opts, const fsdp_convert_plan *plan);
void convert_add_done(fsdp_text *text, const convert_options *opts, const fsdp_checkpoint_info *info,
                      const fsdp_convert_plan *plan, double seconds);

#endif
