/*
 * Shared by the files of fsdp-convert: convert_options.c (the command line), convert_report.c (plan and
 * results), convert_casts.c (casts), convert_carried.c (tied names, copied files, missing entries, code),
 * convert_next.c (suggested commands). In come options and the library's plan, out comes text. Only
 * fsdp_convert.c calls this room; the conversion is fsdp_checkpoint_convert's.
 */
#ifndef FSDP_CONVERT_TOOL_H
#define FSDP_CONVERT_TOOL_H

#include "tools/cli/cli.h"

typedef struct convert_options {
    cli_common common;
    fsdp_convert_opts convert;
    const char *mesh_text;
    fsdp_mesh *mesh;
    bool kind_given, dim_given, plan, verbose;
    bool digest;               /* prints those of the files that were written */
    bool write_digests;        /* into TO.xxh3 */
    const char **drops, **renames, **dtype_rules, **sizes; /* as many as there are arguments at most */
    fsdp_cast_report cast;     /* what casting did to values */
    const char *from, *to;
    int argc;
    char **argv;               /* as typed */
    const char *plan_out, *apply;
    char planning[32];         /* an option that plans and was given, for the message */
    fsdp_convert_order *order; /* what --apply read */
    fsdp_checkpoint *source;   /* once it was opened */
} convert_options;

/* --- convert_options.c ------------------------------------------------------------------------ */

/* Ends the program with a message when they make no sense. */
void convert_options_read(int argc, char **argv, convert_options *opts_out);
void convert_options_release(convert_options *opts);

/* --- convert_report.c ------------------------------------------------------------------------- */

void convert_add_plan(fsdp_text *text, const convert_options *opts, const fsdp_checkpoint_info *info,
                      const fsdp_convert_plan *plan);
typedef struct convert_outcome {
    double seconds;            /* of the conversion */
    fsdp_text digests;         /* from convert_add_digest */
    const fsdp_error *failure; /* NULL: none */
} convert_outcome;
void convert_add_json(fsdp_text *text, const convert_options *opts, const fsdp_checkpoint_info *info,
                      const fsdp_convert_plan *plan, const convert_outcome *outcome);
/* A line as of sha256sum, or a member of the object "sha256". */
void convert_add_digest(fsdp_text *text, bool json, const char *name, const uint8_t digest[32]);
/* "3 of 148 tensors have no dim 7 and are cut along dim 0" */
void convert_add_short(fsdp_text *text, const convert_options *opts, const fsdp_convert_plan *plan);
void convert_add_done(fsdp_text *text, const convert_options *opts, const fsdp_checkpoint_info *info,
                      const fsdp_convert_plan *plan, const convert_outcome *outcome);

/* --- convert_casts.c --------------------------------------------------------------------------- */

/* "  cast 122 tensors: 120 f32 -> bf16, 2 f16 -> bf16" */
void convert_add_casts(fsdp_text *text, const fsdp_convert_plan *plan);
/* A member with a comma behind it; of a plan only what will be cast. */
void convert_add_casts_json(fsdp_text *text, const convert_options *opts, const fsdp_convert_plan *plan);
/* "0 overflow, 0 NaN, max rel rounding 3.9e-03, " */
void convert_add_cast_result(fsdp_text *text, const fsdp_cast_report *cast);
/* " --rtol 4e-3": with that fsdp-diff finds source and result equal, unless something did not fit. */
void convert_add_tolerance(fsdp_text *text, const fsdp_cast_report *cast);

/* --- convert_next.c ----------------------------------------------------------------------------- */

/* "next  fsdp-diff SRC DST ...": what finds both equal after a correct conversion; nothing where none of
 * CLI_NEXT_MOST bytes can be spelled. */
void convert_add_next(fsdp_text *text, const convert_options *opts, const fsdp_checkpoint_info *info,
                      const fsdp_convert_plan *plan);
/* A refusal that ends with what to drop gets the whole command line that does. */
void convert_name_drops(const convert_options *opts, fsdp_error *err);
/* A refusal that names several sources gets the command line for one of them. */
void convert_name_source(const convert_options *opts, fsdp_error *err);

/* --- convert_carried.c ------------------------------------------------------------------------ */

/* Lines of the plan, members of the JSON, a note: tied names, files beside the weights, what is missing;
 * the form of hyper-parameters. */
void convert_add_carried(fsdp_text *text, const convert_options *opts, const fsdp_convert_plan *plan);
void convert_add_carried_json(fsdp_text *text, const convert_options *opts, const fsdp_convert_plan *plan);
/* "hyper-parameters nested, as PyTorch's get_optimizer_state_dict has them"; nothing when they stay. */
void convert_add_form(fsdp_text *text, const fsdp_convert_plan *plan);
void convert_report_form(const convert_options *opts, const fsdp_convert_plan *plan);
/* "no tokenizer.json ...: --copy-from DIR names its directory" */
void convert_add_tokenizer(fsdp_text *text, const fsdp_convert_plan *plan);
void convert_report_tokenizer(const convert_options *opts, const fsdp_convert_plan *plan);
/* "names of megatron stay: --map megatron-gpt2 makes those of hf" */
void convert_add_names(fsdp_text *text, const fsdp_convert_plan *plan);
void convert_report_names(const convert_options *opts, const fsdp_convert_plan *plan);
/* "2 tensors are in tuples: dcp stores them in lists, as PyTorch does" */
void convert_add_tuples(fsdp_text *text, const fsdp_convert_plan *plan);
void convert_report_tuples(const convert_options *opts, const fsdp_convert_plan *plan);
/* "  strip 'model.' from 29 names (--names keep leaves them)" */
void convert_add_stripped(fsdp_text *text, const fsdp_convert_plan *plan);
void convert_report_stripped(const convert_options *opts, const fsdp_convert_plan *plan);
void convert_report_unread(const convert_options *opts, const fsdp_convert_plan *plan);
void convert_report_extra(const convert_options *opts, const fsdp_convert_plan *plan);
void convert_report_missing(const convert_options *opts);
void convert_report_tied(const convert_options *opts, const fsdp_convert_plan *plan);
void convert_report_code(const convert_options *opts, const fsdp_convert_plan *plan);

#endif
