/*
 * Standard output, errors and exit codes: how every tool ends.
 */
#include "tools/cli/cli_process.h"

#include <errno.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct cli_process cli_process;

/* --- standard output ------------------------------------------------------------------------- */

enum { PUT_BYTES = 64 << 10 };

static int output_errnum;
static bool has_written;

static bool write_out(const char *data, size_t size)
{
    has_written = has_written || size > 0;
    if (output_errnum == 0 && size > 0 && fwrite(data, 1, size, stdout) != size)
        output_errnum = errno ? errno : EIO;
    return output_errnum == 0;
}

fsdp_status cli_put(fsdp_text *text)
{
    if (text->failed)
        output_errnum = ENOMEM;
    if (text->size >= PUT_BYTES && !cli_process.wants_json) { /* JSON that ends half-way is none */
        write_out(text->data, text->size);
        text->size = 0;
    }
    return output_errnum || cli_stopped() ? FSDP_ERR_CANCELLED : FSDP_OK;
}

fsdp_status cli_put_end(fsdp_text *text)
{
    if (text->failed)
        output_errnum = ENOMEM;
    bool written = write_out(text->data, text->size);
    fsdp_text_release(text);
    return written ? FSDP_OK : FSDP_ERR_CANCELLED;
}

fsdp_status cli_put_all(fsdp_text *text)
{
    fsdp_status st = cli_put(text);
    if (st == FSDP_OK && !write_out(text->data, text->size))
        st = FSDP_ERR_CANCELLED;
    fsdp_text_release(text);
    return st;
}

void cli_put_line(const char *data, size_t size)
{
    if (output_errnum == 0 && (fwrite(data, 1, size, stdout) != size || fflush(stdout) != 0))
        output_errnum = errno ? errno : EIO;
}

void cli_drop(fsdp_text *text)
{
    if (cli_process.wants_json)
        text->size = 0;
}

void cli_add_json_error(fsdp_text *text, fsdp_status status, const fsdp_error *err)
{
    const char *told = err && err->text[0] ? err->text : fsdp_status_name(status);
    bool stopped = cli_stopped() && status == FSDP_ERR_CANCELLED;
    fsdp_text_addf(text, "\"error\": ");
    fsdp_text_add_json_shown(text, told, strlen(told));
    fsdp_text_addf(text, ", \"exit\": %d", stopped ? 128 + cli_stopped() : (int)status);
}

/* Programs that asked for JSON get an object, whatever happens. */
static void print_json_error(fsdp_status status, const fsdp_error *err)
{
    fsdp_text text = {0};
    if (!cli_process.wants_json || has_written || output_errnum != 0)
        return;
    fsdp_text_addf(&text, "{\"schema\": 1, ");
    cli_add_json_error(&text, status, err);
    fsdp_text_addf(&text, "}\n");
    (void)cli_put_end(&text);
}

/* --- errors ----------------------------------------------------------------------------------- */

void cli_report(const fsdp_error *err)
{
    if (!err || err->status == FSDP_OK)
        return;
    fsdp_error_report(err);
    cli_log("error", err->text[0] ? err->text : fsdp_status_name(err->status));
}

/* "FILE:LINE: " of that argument when a file of options has it, else "". */
static void add_place(int argument, char *out, size_t out_size)
{
    out[0] = '\0';
    if (argument >= 1 && argument <= cli_process.rules.count)
        snprintf(out, out_size, "%s:%d: ", cli_process.rules.path,
                 cli_process.rules.lines[argument - 1]);
}

fsdp_status cli_begin_log(fsdp_error *err)
{
    if (!cli_process.log_path || cli_log_is_open())
        return FSDP_OK;
    return cli_log_open(cli_process.log_path, fsdp_version(), cli_process.argc, cli_process.argv,
                        err);
}

_Noreturn void cli_usage_error(const char *format, ...)
{
    char place[FSDP_ERROR_TEXT], text[FSDP_ERROR_TEXT];
    fsdp_error err = {0};
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    add_place(cli_process.parsing ? cli_process.parsing->next - 1 : 0, place, sizeof place);
    fsdp_fail(&err, FSDP_ERR_USAGE, "%s%s", place, text);
    if (cli_mpi_find().rank == 0)
        print_json_error(FSDP_ERR_USAGE, &err);
    (void)cli_begin_log(NULL); /* it may be an option behind --log that is wrong */
    cli_report(&err);
    fprintf(stderr, "       try '%s --help'\n", cli_process.tool->name);
    cli_log_end(FSDP_ERR_USAGE);
    exit(FSDP_ERR_USAGE);
}

/* --- the end ---------------------------------------------------------------------------------- */

/* Returns the exit code: 0 when all was written. A closed pipe gets no message, since its reader has what it
 * wants, and the code of a program that SIGPIPE ended; a failure of the work matters more. */
static int finish_output(fsdp_status status)
{
    fsdp_error err = {0};
    if (fflush(stdout) != 0 && output_errnum == 0)
        output_errnum = errno ? errno : EIO;
    if (output_errnum == 0)
        return 0;
    if (output_errnum == EPIPE)
        return status == FSDP_OK || status == FSDP_ERR_CANCELLED ? 128 + SIGPIPE : 0;
    fsdp_fail_errno(&err, output_errnum, "cannot write to standard output");
    cli_report(&err);
    return (int)err.status;
}

static void say_latest(const char *run)
{
    fsdp_text text = {0};
    fsdp_text_addf(&text, "fsdp-verify --latest");
    cli_add_path_argument(&text, cli_from_here(run));
    fsdp_text_addf(&text, "   names the newest checkpoint that is whole");
    if (!text.failed && text.size + strlen("next  ") <= CLI_NEXT_MOST)
        cli_say("next", "%s", text.data);
    fsdp_text_release(&text);
}

static int report_end(fsdp_status status, const fsdp_error *err)
{
    cli_progress_clear();
    if (status != FSDP_OK)
        print_json_error(status, err);
    int output = finish_output(status);
    if (cli_stopped() && status == FSDP_ERR_CANCELLED) {
        cli_say("stop", "by signal %d; nothing is left half-written", cli_stopped());
        return 128 + cli_stopped();
    }
    if (output != 0)
        return output;
    cli_report(err && status != FSDP_OK ? err : NULL);
    if (err && status == FSDP_ERR_DAMAGED && cli_opened_run())
        say_latest(cli_opened_run());
    return (int)status;
}

int cli_end(fsdp_status status, const fsdp_error *err)
{
    int code = report_end(status, err);
    cli_log_end(code);
    return code;
}
