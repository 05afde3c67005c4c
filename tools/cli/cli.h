/*
 * Shared by all tools: options, help, signals, progress, exit codes, numbers and names as text. Data goes to
 * standard output, messages to standard error.
 *
 *   cli_begin (options; ends the program on a usage error) -> the tool's work -> cli_end (exit code)
 *
 * In come argv and the results of library calls; out come parsed options, text and the exit code. Every tool
 * may call it, once per process: signals, log and progress are the process's.
 */
#ifndef FSDP_CLI_H
#define FSDP_CLI_H

#include <argp.h>
#include <fsdp/checkpoint.h>
#include <fsdp/convert.h>
#include <fsdp/run.h>
#include "base/text.h"

/* --- options ---------------------------------------------------------------------------------- */

typedef enum cli_progress_mode { CLI_PROGRESS_AUTO, CLI_PROGRESS_JSON, CLI_PROGRESS_OFF } cli_progress_mode;

/* Options that mean the same in every tool. */
typedef struct cli_common {
    bool json, quiet;
    cli_progress_mode progress;
    int64_t memory;            /* 0: the library's default */
    int jobs;                  /* 0: all cores */
    const char *include, *exclude;
} cli_common;

/* Argument parsers for cli_common, to be listed as children: every tool; tools that read data (threads,
 * memory, progress); tools that read data of any program, which includes the former. A tool's ARGP_KEY_INIT
 * points state->child_inputs[i] at its cli_common. */
extern const struct argp cli_general_argp, cli_buffers_argp, cli_work_argp;
/* General, work and names, for tools that have them all; and for ARGP_KEY_INIT. */
enum { CLI_CHILDREN = 3 };
extern const struct argp_child cli_children[CLI_CHILDREN + 1];

/* The words that may stand for an option's value, up to a NULL; option is NULL for the first argument.
 * Lists of them end with {0}. */
typedef struct cli_words {
    const char *option;        /* "sort" */
    const char *const *words;
} cli_words;

typedef struct cli_tool {
    const char *name;          /* "fsdp-ls" */
    const char *args;          /* "PATH" */
    const char *summary;       /* one sentence */
    const char *examples;      /* lines that begin with two spaces */
    const struct argp *argp;
    const cli_words *words;    /* for completion */
    bool runs_alone;           /* it writes: several at once, as mpirun starts them, would race */
    const char *const *groups; /* titles by the group of an option, from 1 up to NULL; NULL: one list */
} cli_tool;

/* A flag of options that delete: they are never offered for a mistyped one, and never abbreviated.
 * (argp uses the bit to hide an option from its usage message, which ARGP_NO_HELP turns off.) */
enum { CLI_NEVER_GUESSED = OPTION_NO_USAGE };
/* A flag of options that -h lists. argp does not know the bit. */
enum { CLI_USUAL = 0x100 };

/* Sets up signals and parses. tool and input must live as long as the program. */
void cli_begin(const cli_tool *tool, int argc, char **argv, void *input);

/* An MPI's launcher, as its variables tell; all 0 and NULL without one. */
typedef struct cli_mpi {
    const char *size_name;     /* "PMI_SIZE" */
    int rank, size, local_size;
} cli_mpi;
cli_mpi cli_mpi_find(void);

/* "error: TEXT" (and as JSON), where to look, exit code 2. Only argument parsers may call it. */
_Noreturn void cli_usage_error(const char *format, ...) FSDP_PRINTF(1, 2);

/* Values of options; option is its name for the message. Sizes: "4G", "256M", "64K", "1000". */
int64_t cli_parse_size(const char *option, const char *text);
int64_t cli_parse_integer(const char *option, const char *text, int64_t least, int64_t most);
double cli_parse_real(const char *option, const char *text);
int cli_parse_word(const char *option, const char *text, const char *const *words); /* its number */
fsdp_kind cli_parse_kind(const char *text);
int cli_parse_compress(const char *text);                            /* "zstd[:LEVEL]": the level */

/* --- words and tables of options ---------------------------------------------------------------- */

/* Letters to insert, remove, change or swap with their neighbour to get from a to b; 32 for longer names. */
int cli_edit_distance(const char *a, size_t size_a, const char *b, size_t size_b);
/* The option or the value that an alias stands for ("--dry-run", "huggingface"), or the text itself. */
const char *cli_meant(const char *text);

/* --- the end ---------------------------------------------------------------------------------- */

/* Reports an error, flushes standard output, and returns the exit code. With --json the error is an
 * object on standard output, too, unless the tool has printed one. */
int cli_end(fsdp_status status, const fsdp_error *err);

/* Reports an error that does not end the program, to standard error and the log. */
void cli_report(const fsdp_error *err);

/* SIGINT, SIGTERM or SIGHUP once one came, else 0. */
int cli_stopped(void);

/* Done by cli_begin. */
void cli_catch_signals(void);

/* FSDP_ERR_CANCELLED once a signal came; for loops that call no library function with a watch. */
fsdp_status cli_check_stop(fsdp_error *err);

/* --- watching long work ----------------------------------------------------------------------- */

/* Progress and notices on standard error; progress stops the call when a signal came. */
fsdp_watch cli_watch(const cli_common *common);

/* --- messages and the log (cli_end.c) --------------------------------------------------------- */

enum { CLI_NEXT_MOST = 200 };  /* bytes of a line "next", the word included */
/* "WORD  text" on standard error, with the word in colour on a terminal. */
void cli_say(const char *word, const char *format, ...) FSDP_PRINTF(2, 3);
void cli_progress_clear(void);

/* A path that is worked on: no log may lie there. Borrowed. */
void cli_log_keep_out(const char *path);
void cli_log_end(int code);

/* --- standard output -------------------------------------------------------------------------- */

/* Hands the text over to standard output once it is large, and empties it; JSON is kept until it is
 * whole. Failures are remembered for cli_end; then, and when a signal came, this returns
 * FSDP_ERR_CANCELLED: stop printing. */
fsdp_status cli_put(fsdp_text *text);
/* Like cli_put, but hands over all of the text and releases it. */
fsdp_status cli_put_all(fsdp_text *text);
/* Like cli_put_all, for the end of an object that was begun: it is printed after a signal, too. */
fsdp_status cli_put_end(fsdp_text *text);
/* A whole object of many, one a line, which readers get at once; that of cli_end is one more. */
void cli_put_line(const char *data, size_t size);
/* After a failure: empties JSON that will not become whole. */
void cli_drop(fsdp_text *text);
/* The members "error" and "exit" of an object. */
void cli_add_json_error(fsdp_text *text, fsdp_status status, const fsdp_error *err);

/* Standard output is a terminal that shows colours. */
bool cli_colors_out(void);

/* --- files that are written whole (cli_output.c) ----------------------------------------------- */

enum { CLI_OUTPUT_BEGIN = 64 };

/* A kind of file, known by its first bytes: at most CLI_OUTPUT_BEGIN. */
typedef struct cli_output_kind {
    const char *name;          /* with its article: "a picture" */
    bool (*fits)(const char *begin, size_t size);
} cli_output_kind;

typedef struct cli_part { const void *data; size_t size; } cli_part;

/* FSDP_ERR_EXISTS for a directory, for a link to nothing, and for a file of another kind, unless --overwrite
 * was given; another error for a file that cannot be read; overwrite NULL: the tool has no such option. */
fsdp_status cli_check_output(const char *path, const cli_output_kind *kind, const bool *overwrite,
                             fsdp_error *err);
/* True for /dev/stdout and its other names: what else the tool prints would be mixed with the file. */
bool cli_is_stdout(const char *path);
/* One write, if all fits; after a part, the next write says why the rest does not. Returns an errno, or 0. */
int cli_write_all(int fd, const void *data, size_t size);
/* Writes the parts one after the other. The file appears whole, or an older one stays; a link's target is
 * replaced. A pipe, a device or an open descriptor (/dev/stdout) is written as it is. */
fsdp_status cli_write_output(const char *path, const cli_part *parts, size_t count, fsdp_error *err);

/* Pictures (SVG) of these tools, and the bytes with which they begin. */
#define CLI_PICTURE "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<!-- fsdp-"
extern const cli_output_kind cli_picture;
fsdp_status cli_write_picture(const char *path, const fsdp_text *text, fsdp_error *err);

/* --- numbers and names for people ------------------------------------------------------------- */

enum { CLI_NUMBER = 32 };
const char *cli_bytes(int64_t bytes, char out[CLI_NUMBER]);          /* "474.7 MiB" */
const char *cli_count(int64_t count, char out[CLI_NUMBER]);          /* "124.4 M" */
const char *cli_rate(int64_t bytes, double seconds, char out[CLI_NUMBER]);     /* "1.12 GB/s" */
const char *cli_plural(int64_t count, const char *noun, char out[CLI_NUMBER]); /* "3 tensors" */
const char *cli_kind(fsdp_kind kind);
double cli_now(void);                                                /* seconds, monotonic */

void cli_add_shape(fsdp_text *text, int ndim, const int64_t *shape);           /* "[2304, 768]" */
/* A name that is safe on a terminal, cut in the middle when it is very long. */
void cli_add_name(fsdp_text *text, const char *name, size_t size);
/* A path, or a message with paths in it, whole and safe on a terminal. */
void cli_add_message(fsdp_text *text, const char *message);
void cli_add_padded(fsdp_text *text, const char *data, int width);   /* left-aligned */
/* " ARGUMENT", quoted for a shell when it must be. */
void cli_add_argument(fsdp_text *text, const char *argument);
/* Like cli_add_argument, for a path: a leading '-' is spelled so that it is not an option. */
void cli_add_path_argument(fsdp_text *text, const char *path);
/* A line feed, and no blanks before it. */
void cli_end_line(fsdp_text *text);
/* Whole, for lists that other programs read line by line. */
void cli_add_full_name(fsdp_text *text, const char *name, size_t size);

/* --- paths ------------------------------------------------------------------------------------ */

/* --follow-links and --sandbox: filled in as options are parsed, for every call that opens a path. */
fsdp_access *cli_access(void);

/* Checks a path before it is opened, and notes the run that it is. */
fsdp_status cli_begin_source(const char *path, fsdp_error *err);
/* Opens PATH, or the newest good checkpoint when it is a run directory, with cli_access() and the rest of
 * opts, which may be NULL. Skipped ones are named, and so is one that an interrupted overwrite set aside. */
fsdp_status cli_open_checkpoint(const char *path, const fsdp_open_opts *opts, const fsdp_watch *watch,
                                fsdp_checkpoint **checkpoint_out, fsdp_error *err);
/* Like cli_open_checkpoint, but a run's newest checkpoint whose data was read and is right, as in a load. */
fsdp_status cli_open_verified(const char *path, const fsdp_watch *watch, fsdp_checkpoint **checkpoint_out,
                              fsdp_error *err);
/* The run that was opened in this way, or NULL. */
const char *cli_opened_run(void);
/* For an error that another checkpoint of the run does not mend: cli_end does not advise to look for one. */
void cli_forget_run(void);
/* A path below the working directory as seen from there, any other as it is: a part of `path`, or ".". */
const char *cli_from_here(const char *path);
/* FSDP_ERR_NOT_FOUND for a file of a checkpoint; the error names the directory to use instead. */
fsdp_status cli_check_not_inside(const char *path, fsdp_error *err);
/* FSDP_ERR_NOT_FOUND for a checkpoint where a run is wanted; the error names the run. */
fsdp_status cli_check_not_checkpoint(const char *path, fsdp_error *err);
/* True when PATH is a directory without a manifest in which steps of a run lie. */
bool cli_is_run(const char *path);

#endif
