/*
 * Progress on standard error: one line that is redrawn on a terminal, a line every ten
 * seconds elsewhere, JSON lines with --progress json. Workers report one at a time; a process shows the
 * progress of one call at a time.
 */
#include "tools/cli/cli.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

enum { BAR_MOST = 32, BAR_LEAST = 12, LINE = 512 };
static const double DRAW_EVERY = 0.1, JSON_EVERY = 1, LINE_EVERY = 10;

static struct {
    cli_progress_mode mode;
    bool quiet;
    double began, told, logged; /* began 0: nothing has been reported yet */
    int64_t done;
} shown;

static int terminal_width(void)
{
    struct winsize size;
    if (ioctl(STDERR_FILENO, TIOCGWINSZ, &size) != 0 || size.ws_col < 20)
        return 80;
    return size.ws_col < LINE ? size.ws_col : LINE - 1;
}

/* " 81%  192.0 MiB/237.3 MiB  1.12 GB/s  ETA 0:00:01  layers.9.mlp.fc.weight" */
static void write_line(char line[LINE], int64_t done, int64_t total, const char *what)
{
    char of[CLI_NUMBER], all[CLI_NUMBER], rate[CLI_NUMBER] = "", eta[CLI_NUMBER] = "?";
    double seconds = cli_now() - shown.began;
    int percent = total > 0 ? (int)((double)done * 100 / (double)total) : 100;
    if (done > 0 && seconds > DRAW_EVERY / 2) { /* before that, any figure would be a guess */
        cli_rate(done, seconds, rate);
        double left = (double)(total - done) * seconds / (double)done;
        int64_t rest = (int64_t)(left > 0 ? left + 0.5 : 0);
        snprintf(eta, sizeof eta, "%" PRId64 ":%02d:%02d", rest / 3600, (int)(rest / 60 % 60),
                 (int)(rest % 60));
    }
    snprintf(line, LINE, "%3d%%  %s/%s  %s  ETA %s  %s", percent, cli_bytes(done, of),
             cli_bytes(total, all), rate, eta, what);
}

static void draw(int64_t done, int64_t total, const char *what)
{
    char bar[BAR_MOST + 3], line[LINE];
    int width = terminal_width(), size = width < 110 ? BAR_LEAST : BAR_MOST;
    int filled = total > 0 ? (int)((double)done * size / (double)total) : size;
    bar[0] = '[';
    for (int i = 0; i < size; i++)
        bar[i + 1] = i < filled ? '#' : '-';
    memcpy(bar + size + 1, "]", 2);
    write_line(line, done, total, what);
    fprintf(stderr, "\r\033[K%.*s", width - 1, bar);
    if (width > size + 4)
        fprintf(stderr, " %.*s", width - size - 4, line);
    fflush(stderr);
    cli_progress_drawn();
}

static void write_json(int64_t done, int64_t total, const char *what)
{
    fsdp_text text = {0};
    fsdp_text_addf(
        &text, "{\"schema\": 1, \"done\": %" PRId64 ", \"total\": %" PRId64 ", \"seconds\": ", done,
        total);
    fsdp_text_addf(&text, "%.3f, \"what\": ", cli_now() - shown.began);
    fsdp_text_add_json_shown(&text, what, strlen(what));
    if (!text.failed)
        fprintf(stderr, "%s}\n", text.data);
    fsdp_text_release(&text);
}

static void report_line(int64_t done, int64_t total, const char *what)
{
    char line[LINE];
    bool is_terminal = isatty(STDERR_FILENO), is_json = shown.mode == CLI_PROGRESS_JSON;
    double now = cli_now(), every = is_json ? JSON_EVERY : is_terminal ? DRAW_EVERY : LINE_EVERY;
    bool is_last = is_json && done >= total;
    if (now - shown.told < every && !is_last)
        return;
    shown.told = now;
    if (is_json) {
        write_json(done, total, what);
    } else if (is_terminal) {
        draw(done, total, what);
    } else {
        write_line(line, done, total, what);
        fprintf(stderr, "progress %s\n", line);
    }
}

/* A count far below the last one begins the next part of the work. */
static void note_part(int64_t done)
{
    bool at_once = shown.mode == CLI_PROGRESS_JSON || isatty(STDERR_FILENO);
    if (shown.began == 0 || done < shown.done / 2) {
        shown.began = shown.logged = cli_now();
        shown.told = at_once ? 0 : shown.began;
    }
    shown.done = done;
}

static void log_progress(int64_t done, int64_t total, const char *what)
{
    char line[LINE];
    if (!cli_log_is_open() || cli_now() - shown.logged < LINE_EVERY)
        return;
    shown.logged = cli_now();
    write_line(line, done, total, what);
    cli_log("progress", line);
}

static int on_progress(void *context, int64_t done, int64_t total, const char *what)
{
    (void)context;
    note_part(done);
    log_progress(done, total, what ? what : "");
    if (shown.mode == CLI_PROGRESS_JSON || (shown.mode == CLI_PROGRESS_AUTO && !shown.quiet))
        report_line(done, total, what ? what : "");
    return cli_stopped();
}

/* A conversion finds again what its plan has found. */
static bool was_said(const char *text)
{
    enum { MOST = 16 };
    static char *said[MOST];
    size_t i = 0;
    for (; i < MOST && said[i]; i++)
        if (strcmp(said[i], text) == 0)
            return true;
    if (i < MOST)
        said[i] = strdup(text);
    return false;
}

static void on_notice(void *context, const char *text)
{
    (void)context;
    if (was_said(text))
        return;
    if (!shown.quiet)
        cli_say("warn", "%s", text);
    else
        cli_log("warn", text);
}

static bool on_wait(void *context)
{
    (void)context;
    return cli_stopped() != 0;
}

fsdp_watch cli_watch(const cli_common *common)
{
    shown.mode = common->progress;
    shown.quiet = common->quiet;
    return (fsdp_watch){.progress = on_progress, .notice = on_notice, .stopped = on_wait};
}
