/*
 * Shared by the files of fsdp-convert: convert_options.c (the command line), convert_target.c (the format of
 * the result), convert_report.c (plan and results), convert_casts.c (casts), convert_carried.c (tied names,
 * copied files, missing entries, code), convert_next.c (suggested commands). In come options and the
 * library's plan, out comes text. Only fsdp_convert.c calls this room; the conversion is the library's.
 */
#ifndef FSDP_CONVERT_TOOL_H
#define FSDP_CONVERT_TOOL_H

#include "tools/cli/cli.h"

enum { UNDER_MOST = 100, CONVERT_ROWS = 60 /* of fsdp_convert_option_at, at most */ };

typedef struct convert_options {
    cli_common common;
    fsdp_convert_opts convert;
    const char *mesh_text;
    fsdp_mesh *mesh;
    bool plan, verbose;
    bool given[CONVERT_ROWS];  /* per row of the table of options */
    const char **lists[CONVERT_ROWS];  /* of a row with a list */
    int argument_count;
    bool hub_names;            /* --names hub */
    bool write_digests;        /* into TO.xxh3 */
    bool digest;               /* prints those of the files that were written */
    char under_rule[UNDER_MOST + 8];   /* a rename */
    fsdp_cast_report cast;     /* what casting did to values */
    const char *from, *to;
    int argc;
    char **argv;               /* as typed */
    const char *plan_out, *apply;
    char planning[32];         /* an option that plans and was given, for the message */
    fsdp_conversion *conversion;
} convert_options;

/* --- convert_options.c ------------------------------------------------------------------------ */

/* Ends the program with a message when they make no sense. */
void convert_options_read(int argc, char **argv, convert_options *opts_out);
void convert_options_release(convert_options *opts);
/* Returns true when an option of the library's table was typed, or stands in the rules. */
bool convert_is_given(const convert_options *opts, const char *name);

/* --- convert_target.c ------------------------------------------------------------------------- */

/* The format that is written; ends the program where there is none of that name. */
const char *convert_parse_format(const char *text);
/* Returns the format of the result, once it is chosen. */
const fsdp_format *convert_target(const convert_options *opts);
/* Without --to: by the suffix of DST, else fsdp when an option needs it, else hf. */
void convert_choose_format(convert_options *opts, bool needs_native);

/* --- convert_report.c ------------------------------------------------------------------------- */

void convert_add_plan(fsdp_text *text, const convert_options *opts, const fsdp_convert_plan *plan);
typedef struct convert_outcome {
    double seconds;            /* of the conversion */
    fsdp_text digests;         /* from convert_add_digest */
    const fsdp_error *failure; /* NULL: none */
} convert_outcome;
void convert_add_json(fsdp_text *text, const convert_options *opts, const fsdp_convert_plan *plan,
                      const convert_outcome *outcome);
/* A line as of sha256sum, or a member of the object "sha256". */
void convert_add_digest(fsdp_text *text, bool json, const char *name, const uint8_t digest[32]);
void convert_add_done(fsdp_text *text, const convert_options *opts, const fsdp_convert_plan *plan,
                      const convert_outcome *outcome);

/* --- convert_casts.c --------------------------------------------------------------------------- */

/* "  cast 122 tensors: 120 f32 -> bf16, 2 f16 -> bf16" */
void convert_add_casts(fsdp_text *text, const fsdp_convert_plan *plan);
/* A member with a comma after it; of a plan only what will be cast. */
void convert_add_casts_json(fsdp_text *text, const convert_options *opts, const fsdp_convert_plan *plan);
/* "0 overflow, 0 NaN, max rel rounding 3.9e-03, " */
void convert_add_cast_result(fsdp_text *text, const fsdp_cast_report *cast);
/* " --rtol 4e-3": with that fsdp-diff finds source and result equal, unless something did not fit. */
void convert_add_tolerance(fsdp_text *text, const fsdp_cast_report *cast);

/* --- convert_next.c ----------------------------------------------------------------------------- */

/* "next  fsdp-diff SRC DST ...": what finds both equal after a correct conversion; nothing where none of
 * CLI_NEXT_MOST bytes can be spelled. */
void convert_add_next(fsdp_text *text, const convert_options *opts, const fsdp_convert_plan *plan);
/* A refusal that ends with what to drop gets the whole command line that does, if a plan with it succeeds;
 * else the reason against that. */
void convert_name_drops(const convert_options *opts, fsdp_error *err);
/* A refusal that names several sources gets the command line for one of them. */
void convert_name_source(const convert_options *opts, fsdp_error *err);

/* --- convert_carried.c ------------------------------------------------------------------------ */

/* Lines of the plan, members of the JSON: tied names, files next to the weights, what is missing. */
void convert_add_carried(fsdp_text *text, const convert_options *opts, const fsdp_convert_plan *plan);
void convert_add_carried_json(fsdp_text *text, const fsdp_convert_plan *plan);

/* --- convert_notes.c -------------------------------------------------------------------------- */

/* Sentences about what a person would not expect of the result, in their order. */
typedef enum convert_note {
    CONVERT_NOTE_SHORT,        /* "3 of 148 tensors have no dim 7 and are cut along dim 0" */
    CONVERT_NOTE_UNREAD,       /* "1 weight file of 'run' is not read: optim.pt" */
    CONVERT_NOTE_EXTRA,        /* "1 tensor is not a part of the llama that config.json describes: ..." */
    CONVERT_NOTE_MISSING,      /* "2 incomplete entries are left out: ..." */
    CONVERT_NOTE_STRIPPED,     /* "strip 'model.' from 29 names (--names keep leaves them)" */
    CONVERT_NOTE_TIED,         /* "1 tied name is left out: lm_head.weight (the same as ...)" */
    CONVERT_NOTE_CODE,         /* "1 object runs code when it is loaded: ..." */
    CONVERT_NOTE_FORM,         /* "hyper-parameters nested, as PyTorch's get_optimizer_state_dict has them" */
    CONVERT_NOTE_TOKENIZER,    /* "no tokenizer.json ...: --copy-from DIR names its directory" */
    CONVERT_NOTE_NAMES,        /* "names of megatron stay: --map megatron-gpt2 makes those of hf" */
    CONVERT_NOTE_ROUNDED,      /* "2 weights left out: DeepSpeed's stage 1 ..." */
    CONVERT_NOTE_TUPLES,       /* "2 tensors are in tuples: dcp stores them in lists, as PyTorch does" */
    CONVERT_NOTE_CONFIG,       /* "no config.json is here, which ...: --copy-from DIR takes it ..." */
    CONVERT_NOTE_METADATA,     /* "2 texts of the metadata are left out, since dcp has none: ..." */
    CONVERT_NOTE_DIRECTORY,    /* "'x.ckpt' becomes a directory of Hugging Face: ..." */
    CONVERT_NOTE_ADDED,        /* "lm_head.weight is added, a further name of a tied tensor: ..." */
    CONVERT_NOTE_QUANTIZED,    /* "2 weights stay quantized: --dtype bf16 does not apply the scales ..." */
    CONVERT_NOTES
} convert_note;

void convert_add_name(fsdp_text *text, const char *name, size_t size);
/* Adds a line of the plan; nothing where the note does not apply. */
void convert_add_note(fsdp_text *text, convert_note note, const convert_options *opts,
                      const fsdp_convert_plan *plan);
/* Says all that apply, unless the user wants no words or JSON. */
void convert_report_notes(const convert_options *opts, const fsdp_convert_plan *plan);

#endif
