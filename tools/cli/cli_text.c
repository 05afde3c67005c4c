/* Numbers, names and paths as the tools print and take them. */
#include "tools/cli/cli.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static const char *scaled(double value, double step, const char *const *units, char out[CLI_NUMBER])
{
    int unit = 0;
    for (; value >= step && units[unit + 1]; unit++)
        value /= step;
    snprintf(out, CLI_NUMBER, "%.*f%s", unit > 0, value, units[unit]);
    return out;
}

const char *cli_bytes(int64_t bytes, char out[CLI_NUMBER])
{
    return fsdp_spell_bytes(bytes, out, CLI_NUMBER);
}

const char *cli_count(int64_t count, char out[CLI_NUMBER])
{
    static const char *const units[] = {"", " K", " M", " G", " T", NULL};
    return scaled((double)count, 1000, units, out);
}

const char *cli_rate(int64_t bytes, double seconds, char out[CLI_NUMBER])
{
    double rate = seconds > 0 ? (double)bytes / seconds : 0;
    if (rate >= 1e9)
        snprintf(out, CLI_NUMBER, "%.2f GB/s", rate / 1e9);
    else
        snprintf(out, CLI_NUMBER, "%.1f MB/s", rate / 1e6);
    return out;
}

const char *cli_plural(int64_t count, const char *noun, char out[CLI_NUMBER])
{
    snprintf(out, CLI_NUMBER, "%" PRId64 " %s%s", count, noun, count == 1 ? "" : "s");
    return out;
}

double cli_now(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

void cli_add_shape(fsdp_text *text, int ndim, const int64_t *shape)
{
    fsdp_text_add(text, "[", 1);
    for (int d = 0; d < ndim; d++)
        fsdp_text_addf(text, "%s%" PRId64, d > 0 ? ", " : "", shape[d]);
    fsdp_text_add(text, "]", 1);
}

void cli_add_name(fsdp_text *text, const char *name, size_t size)
{
    char printable[240];
    fsdp_printable(name, size, printable, sizeof printable);
    fsdp_text_add(text, printable, strlen(printable));
}

void cli_add_full_name(fsdp_text *text, const char *name, size_t size)
{
    size_t room = 4 * size + 8; /* a byte becomes at most \xHH */
    char *printable = malloc(room);
    if (!printable) {
        text->failed = true;
        return;
    }
    fsdp_printable(name, size, printable, room);
    fsdp_text_add(text, printable, strlen(printable));
    free(printable);
}

void cli_add_message(fsdp_text *text, const char *message)
{
    fsdp_text_add_message(text, message);
}

void cli_add_argument(fsdp_text *text, const char *argument)
{
    fsdp_text_add_argument(text, argument);
}

void cli_add_path_argument(fsdp_text *text, const char *path)
{
    fsdp_text_add_path_argument(text, path);
}

void cli_add_padded(fsdp_text *text, const char *data, int width)
{
    fsdp_text_addf(text, "%-*s", width, data);
}

void cli_end_line(fsdp_text *text)
{
    while (text->size > 0 && text->data[text->size - 1] == ' ')
        text->size--;
    fsdp_text_add(text, "\n", 1);
}

/* --- paths ------------------------------------------------------------------------------------ */

fsdp_status cli_check_not_checkpoint(const char *path, fsdp_error *err)
{
    if (cli_is_run(path))
        return FSDP_OK;
    if (!fsdp_path_has_manifest(path, cli_access()))
        return cli_check_not_inside(path, err);
    return fsdp_fail(err, FSDP_ERR_NOT_FOUND,
                     "'%s' is a checkpoint, not a run; a run is a directory with checkpoints in it",
                     path);
}

static const char *opened_run;

const char *cli_opened_run(void)
{
    return opened_run;
}

void cli_forget_run(void)
{
    opened_run = NULL;
}

fsdp_status cli_begin_source(const char *path, fsdp_error *err)
{
    FSDP_TRY(cli_check_not_inside(path, err));
    opened_run = cli_is_run(path) ? path : opened_run;
    return FSDP_OK;
}

fsdp_status cli_open_checkpoint(const char *path, const fsdp_open_opts *opts,
                                const fsdp_watch *watch, fsdp_checkpoint **checkpoint_out,
                                fsdp_error *err)
{
    fsdp_open_opts open = opts ? *opts : (fsdp_open_opts){0};
    open.access = *cli_access();
    open.watch = watch;
    FSDP_TRY(cli_begin_source(path, err));
    return fsdp_checkpoint_open(path, &open, checkpoint_out, err);
}

fsdp_status cli_open_verified(const char *path, const fsdp_watch *watch,
                              fsdp_checkpoint **checkpoint_out, fsdp_error *err)
{
    char *latest = NULL;
    if (!cli_is_run(path))
        return cli_open_checkpoint(path, NULL, watch, checkpoint_out, err);
    FSDP_TRY(cli_begin_source(path, err));
    FSDP_TRY(fsdp_run_latest(path, FSDP_VERIFY_DATA, watch, cli_access(), &latest, err));
    fsdp_status st = fsdp_checkpoint_open(latest, &(fsdp_open_opts){.access = *cli_access()},
                                          checkpoint_out, err);
    fsdp_string_free(latest);
    return st;
}
