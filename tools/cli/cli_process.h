/*
 * The running program, as the files of this folder share it: cli_begin and cli_rules_read fill it in, and
 * cli_end.c reads it. The tools see cli.h only.
 */
#ifndef FSDP_CLI_PROCESS_H
#define FSDP_CLI_PROCESS_H

#include "tools/cli/cli.h"

struct cli_process {
    const cli_tool *tool;
    int argc;                  /* as typed, without the options of --rules */
    char **argv;
    bool wants_json;
    const char *log_path;      /* of --log, or NULL */
    char **arguments;          /* for argp: with the options of --rules, and aliases spelled out */
    const struct argp_state *parsing; /* at an option of the command line, or of a file */
    struct {
        const char *path;
        int *lines;            /* of the file's options, which are the first arguments */
        int count;
    } rules;
};

extern struct cli_process cli_process;

/* Opens the log of --log once; OK without one. */
fsdp_status cli_begin_log(fsdp_error *err);

#endif
