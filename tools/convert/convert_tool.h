/*
 * Shared by the files of fsdp-convert: convert_options.c (the command line, the format of the result),
 * convert_report.c (plan, results, and the command that compares), convert_advice.c (suggested commands).
 * In come options and the library's plan, out comes text. Only fsdp_convert.c calls this room; the conversion
 * and the sentences of its notes are the library's.
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

/* Returns the format of the result, once it is chosen. */
const fsdp_format *convert_target(const convert_options *opts);

/* --- convert_report.c ------------------------------------------------------------------------- */

/* Adds the plan for people, with the lines of its notes. */
void convert_add_plan(fsdp_text *text, const convert_options *opts, const fsdp_convert_plan *plan);
/* Says the notes that a person does not expect, before a run. */
void convert_say_notes(const fsdp_convert_plan *plan);
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

/* Adds "next  fsdp-diff SRC DST ...", which finds both equal after a correct conversion; nothing where no
 * line of CLI_NEXT_MOST bytes does. Call after the run. */
void convert_add_next(fsdp_text *text, const fsdp_convert_plan *plan);

/* --- convert_advice.c --------------------------------------------------------------------------- */

/* A refusal that ends with what to drop gets the whole command line that does, if a plan with it succeeds;
 * else the reason against that. */
void convert_name_drops(const convert_options *opts, fsdp_error *err);
/* A refusal that names several sources gets the command line for one of them. */
void convert_name_source(const convert_options *opts, fsdp_error *err);

#endif
