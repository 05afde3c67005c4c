/* Signals, messages and their log, standard output, errors and exit codes, progress: how every tool reports
 * and ends. See cli.h. */
#include "tools/cli/cli_process.h"
#include "tools/cli/cli.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

/* === signals ================================================================================== */

static volatile sig_atomic_t stop_signal;

static void note_signal(int number)
{
    stop_signal = number;
}

/* The first signal requests a stop, a second one ends the program at once. A signal that is
 * ignored from the start (nohup, a job in the background) stays ignored. */
void cli_catch_signals(void)
{
    static const int asking[] = {SIGINT, SIGTERM, SIGHUP};
    struct sigaction action = {.sa_handler = note_signal, .sa_flags = (int)SA_RESETHAND}, before;
    sigemptyset(&action.sa_mask);
    for (size_t i = 0; i < sizeof asking / sizeof *asking; i++)
        if (sigaction(asking[i], NULL, &before) == 0 && before.sa_handler != SIG_IGN)
            sigaction(asking[i], &action, NULL);
    signal(SIGXFSZ, SIG_IGN); /* a write beyond the limit is an error like any other */
    signal(SIGPIPE, SIG_IGN);
}

int cli_stopped(void)
{
    return stop_signal;
}

fsdp_status cli_check_stop(fsdp_error *err)
{
    return stop_signal ? fsdp_fail(err, FSDP_ERR_CANCELLED, "stopped") : FSDP_OK;
}

/* === messages and the log ===================================================================== */

/*
 * Messages on standard error, and the log of a tool (--log FILE), which is a copy of them. A line of the log
 * begins with the time and is one write, so that several programs may share a file.
 */

static struct {
    int fd;
    bool open, failed;
    double began;
} file;

static bool log_is_open(void)
{
    return file.open;
}

static void add_time(fsdp_text *line)
{
    char text[32];
    time_t now = time(NULL);
    struct tm utc;
    if (!gmtime_r(&now, &utc) || strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", &utc) == 0)
        return;
    fsdp_text_addf(line, "%s ", text);
}

/* Closes the log and warns; the tool continues without it. */
static void report_failure(int errnum)
{
    file.open = false; /* first, since cli_say writes to an open log */
    cli_say("warn", "cannot write to the log: %s; nothing more is written to it", strerror(errnum));
}

static void write_line(const fsdp_text *line)
{
    const int errnum = line->failed ? 0 : cli_write_all(file.fd, line->data, line->size);
    if (errnum != 0)
        report_failure(errnum);
}

/* A line, if there is a log. */
static void write_log(const char *word, const char *text)
{
    fsdp_text line = {0};
    if (!file.open)
        return;
    add_time(&line);
    fsdp_text_addf(&line, "%-5s ", word);
    cli_add_message(&line, text);
    fsdp_text_add(&line, "\n", 1);
    write_line(&line);
    fsdp_text_release(&line);
}

void cli_log_end(int code)
{
    char text[64];
    snprintf(text, sizeof text, "exit %d after %.1f s", code, cli_now() - file.began);
    write_log("end", text);
}

/* --- checking the path ------------------------------------------------------------------------- */

static struct {
    const char *paths[8];
    int count;
} worked_on;

void cli_log_keep_out(const char *path)
{
    if (worked_on.count < (int)(sizeof worked_on.paths / sizeof *worked_on.paths))
        worked_on.paths[worked_on.count++] = path;
}

/* The resolved path of a file that exists or could be created; of its directory with parent_only. */
static bool find_place(const char *path, bool parent_only, char place_out[PATH_MAX])
{
    char parent[PATH_MAX];
    size_t size = strlen(path);
    if (!parent_only && realpath(path, place_out))
        return true;
    while (size > 1 && path[size - 1] == '/')
        size--;
    size_t start = size;
    while (start > 0 && path[start - 1] != '/')
        start--;
    snprintf(parent, sizeof parent, "%.*s", start > 0 ? (int)start : 1, start > 0 ? path : ".");
    if (!realpath(parent, place_out))
        return false;
    size_t used = strcmp(place_out, "/") == 0 ? 0 : strlen(place_out);
    if (parent_only || used + 1 + (size - start) >= PATH_MAX)
        return parent_only;
    snprintf(place_out + used, PATH_MAX - used, "/%.*s", (int)(size - start), path + start);
    return true;
}

/* A log may lie in a run directory, but not in a checkpoint. */
static bool lies_in(const char *path, const char *worked)
{
    char at[PATH_MAX], place[PATH_MAX];
    if (!find_place(path, false, at) || !find_place(worked, false, place))
        return false;
    size_t size = strlen(place);
    return strcmp(at, place) == 0 ||
           (strncmp(at, place, size) == 0 && at[size] == '/' && !cli_is_run(worked));
}

static fsdp_status check_place(const char *path, fsdp_error *err)
{
    char parent[PATH_MAX];
    for (int i = 0; i < worked_on.count; i++)
        if (lies_in(path, worked_on.paths[i]))
            return fsdp_fail(err, FSDP_ERR_USAGE,
                             "cannot write the log '%s': it would be at or in '%s', which is read "
                             "or written; name another path",
                             path, worked_on.paths[i]);
    if (find_place(path, true, parent) && fsdp_path_has_manifest(parent, cli_access()))
        return fsdp_fail(
            err, FSDP_ERR_USAGE,
            "cannot write the log '%s': it would be in a checkpoint; name another path", path);
    return FSDP_OK;
}

/* Refuses to append to a file that is not a log. */
static fsdp_status check_log(const char *path, int64_t size, fsdp_error *err)
{
    static const char form[] = "dddd-dd-ddTdd:dd:ddZ ";
    char start[sizeof form] = "";
    bool is_log = size == 0 || pread(file.fd, start, sizeof form - 1, 0) == sizeof form - 1;
    for (size_t i = 0; is_log && size > 0 && form[i]; i++)
        is_log = form[i] == 'd' ? start[i] >= '0' && start[i] <= '9' : start[i] == form[i];
    if (is_log)
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_USAGE,
                     "'%s' is not a log of these tools and is not changed; name another file",
                     path);
}

/* --- opening ----------------------------------------------------------------------------------- */

static fsdp_status open_file(const char *path, fsdp_error *err)
{
    struct stat info;
    int flags = O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC | O_NOFOLLOW | O_NOCTTY | O_NONBLOCK;
    file.fd = open(path, flags, 0644);
    if (file.fd < 0 && errno == ELOOP)
        return fsdp_fail(err, FSDP_ERR_REFUSED,
                         "cannot open the log '%s': it is a symbolic link, which is not followed; "
                         "name its target",
                         path);
    if (file.fd < 0 && errno == EISDIR)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "cannot open the log '%s': it is a directory; name a file", path);
    if (file.fd < 0 && errno != ENXIO)
        return fsdp_fail_errno(err, errno, "cannot open the log '%s'", path);
    if (file.fd >= 0 && fstat(file.fd, &info) == 0 && S_ISREG(info.st_mode))
        return check_log(path, info.st_size, err);
    return fsdp_fail(err, FSDP_ERR_USAGE, "cannot open the log '%s': it is not a regular file",
                     path);
}

/* Appends to a file what is said from now on; first the command line. */
static fsdp_status cli_log_open(const char *path, const char *version, int argc, char **argv,
                                fsdp_error *err)
{
    fsdp_text command = {0};
    file.began = cli_now();
    FSDP_TRY(check_place(path, err));
    FSDP_TRY(open_file(path, err));
    file.open = true;
    fsdp_text_addf(&command, "(fsdp %s)", version);
    for (int i = 0; i < argc; i++)
        cli_add_argument(&command, argv[i]);
    if (!command.failed)
        write_log("begin", command.data);
    fsdp_text_release(&command);
    return FSDP_OK;
}

/* --- messages --------------------------------------------------------------------------------- */

enum { MESSAGE_BYTES = 5000 };

static bool has_colors(int fd)
{
    const char *terminal = getenv("TERM");
    const char *no_color = getenv("NO_COLOR");
    return isatty(fd) && !(no_color && no_color[0]) && !(terminal && strcmp(terminal, "dumb") == 0);
}

bool cli_colors_out(void)
{
    return has_colors(STDOUT_FILENO);
}

static bool is_progress_drawn;

/* A progress line stands on the terminal: the next output removes it first. */
static void progress_drawn(void)
{
    is_progress_drawn = true;
}

void cli_progress_clear(void)
{
    if (is_progress_drawn)
        fputs("\r\033[K", stderr);
    is_progress_drawn = false;
}

void cli_say(const char *word, const char *format, ...)
{
    va_list args;
    cli_progress_clear();
    bool colors = has_colors(STDERR_FILENO);
    const char *color = strcmp(word, "bad") == 0 ? "\033[31m" : "\033[33m";
    fprintf(stderr, "%s%-5s%s ", colors ? color : "", word, colors ? "\033[0m" : "");
    char text[MESSAGE_BYTES], printable[4 * MESSAGE_BYTES]; /* a byte becomes at most \xHH */
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    fprintf(stderr, "%s\n",
            fsdp_printable_message(text, strlen(text), printable, sizeof printable));
    write_log(word, text);
}

/* === the end ================================================================================== */

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
    write_log("error", err->text[0] ? err->text : fsdp_status_name(err->status));
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
    if (!cli_process.log_path || log_is_open())
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
    (void)cli_begin_log(NULL); /* an option after --log may be the wrong one */
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

/* === progress ================================================================================= */

/*
 * Progress on standard error: one line that is redrawn on a terminal, a line every ten
 * seconds elsewhere, JSON lines with --progress json. Workers report one at a time; a process shows the
 * progress of one call at a time.
 */

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
static void write_progress(char line[LINE], int64_t done, int64_t total, const char *what)
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
    write_progress(line, done, total, what);
    fprintf(stderr, "\r\033[K%.*s", width - 1, bar);
    if (width > size + 4)
        fprintf(stderr, " %.*s", width - size - 4, line);
    fflush(stderr);
    progress_drawn();
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
        write_progress(line, done, total, what);
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
    if (!log_is_open() || cli_now() - shown.logged < LINE_EVERY)
        return;
    shown.logged = cli_now();
    write_progress(line, done, total, what);
    write_log("progress", line);
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
        write_log("warn", text);
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
