/* The files that a training appends to. See train_log.h. */
#include "tools/train/train_log.h"
#include "tools/cli/cli.h"
#include <fsdp/run.h>

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

/* === files of TensorBoard ===================================================================== */

/*
 * TensorBoard's files are records of protocol buffers: length, its checksum, the message, its checksum. A
 * message Event has wall_time (1, double), step (2, varint), and file_version (3, string) or summary (5),
 * which holds values (1) of tag (1, string) and simple_value (2, float).
 */

struct train_events {
    FILE *stream;
    char path[PATH_MAX];
};

/* --- checksums ----------------------------------------------------------------------------------- */

/* CRC-32C, bit by bit: records are small and few. */
static uint32_t crc32c(const uint8_t *data, size_t size)
{
    uint32_t crc = 0xffffffff;
    for (size_t i = 0; i < size; i++) {
        crc ^= data[i];
        for (int bit = 0; bit < 8; bit++)
            crc = crc >> 1 ^ (crc & 1 ? 0x82f63b78u : 0);
    }
    return ~crc;
}

static uint32_t masked(uint32_t crc)
{
    return (crc >> 15 | crc << 17) + 0xa282ead8u;
}

/* --- messages ------------------------------------------------------------------------------------ */

typedef struct message {
    uint8_t data[512];
    size_t size;
} message;

static void add_bytes(message *to, const void *data, size_t size)
{
    if (size > sizeof to->data - to->size)
        return; /* tags are short: see events_add */
    memcpy(to->data + to->size, data, size);
    to->size += size;
}

static void add_little(message *to, uint64_t value, int bytes)
{
    uint8_t data[8];
    for (int i = 0; i < bytes; i++)
        data[i] = (uint8_t)(value >> 8 * i);
    add_bytes(to, data, (size_t)bytes);
}

static void add_varint(message *to, uint64_t value)
{
    for (; value >= 0x80; value >>= 7)
        add_little(to, value | 0x80, 1);
    add_little(to, value, 1);
}

static void add_field(message *to, int number, const void *data, size_t size)
{
    add_varint(to, (uint64_t)number << 3 | 2);
    add_varint(to, size);
    add_bytes(to, data, size);
}

static void begin_event(message *event)
{
    struct timespec now;
    uint64_t bits;
    clock_gettime(CLOCK_REALTIME, &now);
    double seconds = (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
    memcpy(&bits, &seconds, sizeof bits);
    add_varint(event, 1 << 3 | 1);
    add_little(event, bits, 8);
}

static fsdp_status write_record(train_events *events, const message *event, fsdp_error *err)
{
    message head = {.size = 0}, tail = {.size = 0};
    add_little(&head, event->size, 8);
    add_little(&head, masked(crc32c(head.data, 8)), 4);
    add_little(&tail, masked(crc32c(event->data, event->size)), 4);
    if (fwrite(head.data, 1, head.size, events->stream) != head.size ||
        fwrite(event->data, 1, event->size, events->stream) != event->size ||
        fwrite(tail.data, 1, tail.size, events->stream) != tail.size)
        return fsdp_fail_errno(err, errno, "cannot write '%s'", events->path);
    return FSDP_OK;
}

/* --- the file ------------------------------------------------------------------------------------ */

/* accepts NULL */
static void events_close(train_events *events)
{
    if (!events)
        return;
    fclose(events->stream);
    free(events);
}

/* Begins a file of its own in `directory`; TensorBoard joins those of one run. The caller closes it. */
static fsdp_status events_open(const char *directory, train_events **events_out, fsdp_error *err)
{
    static const char version[] = "brain.Event:2";
    char host[64] = "host";
    message event = {.size = 0};
    train_events *events = calloc(1, sizeof *events);
    if (!events)
        return fsdp_fail(err, FSDP_ERR_LIMIT, "out of memory");
    gethostname(host, sizeof host - 1);
    snprintf(events->path, sizeof events->path, "%s/events.out.tfevents.%lld.%s.%ld", directory,
             (long long)time(NULL), host, (long)getpid());
    events->stream = fopen(events->path, "we");
    if (!events->stream) {
        fsdp_status st = fsdp_fail_errno(err, errno, "cannot create '%s'", events->path);
        free(events);
        return st;
    }
    begin_event(&event);
    add_field(&event, 3, version, sizeof version - 1);
    fsdp_status st = write_record(events, &event, err);
    if (st == FSDP_OK)
        *events_out = events;
    else
        events_close(events);
    return st;
}

/* Local. Values that are not finite are written as they are. */
static fsdp_status events_add(train_events *events, int64_t step, const char *tag, double value,
                              fsdp_error *err)
{
    message event = {.size = 0}, summary = {.size = 0}, scalar = {.size = 0};
    float single = (float)value;
    uint32_t bits;
    memcpy(&bits, &single, sizeof bits);
    add_field(&scalar, 1, tag, strnlen(tag, 200));
    add_varint(&scalar, 2 << 3 | 5);
    add_little(&scalar, bits, 4);
    add_field(&summary, 1, scalar.data, scalar.size);
    begin_event(&event);
    add_varint(&event, 2 << 3 | 0);
    add_varint(&event, (uint64_t)step);
    add_field(&event, 5, summary.data, summary.size);
    return write_record(events, &event, err);
}

/* Hands what was added over to the file. */
static fsdp_status events_flush(train_events *events, fsdp_error *err)
{
    if (fflush(events->stream) != 0)
        return fsdp_fail_errno(err, errno, "cannot write '%s'", events->path);
    return FSDP_OK;
}

/* === the logs of a training =================================================================== */

/* --- opening ------------------------------------------------------------------------------------- */

static fsdp_status make_run(const char *path, fsdp_error *err)
{
    struct stat info;
    if (fsdp_path_has_manifest(path, NULL))
        return fsdp_fail(err, FSDP_ERR_EXISTS,
                         "'%s' is a checkpoint, not a run; name a run (--run)", path);
    if (stat(path, &info) == 0 && !S_ISDIR(info.st_mode))
        return fsdp_fail(err, FSDP_ERR_EXISTS, "'%s' is not a directory; name another run (--run)",
                         path);
    if (mkdir(path, 0777) == 0 || errno == EEXIST)
        return FSDP_OK;
    return fsdp_fail_errno(err, errno, "cannot create the run '%s'", path);
}

/* The step of a line; -1: the line is not ours, or was cut. */
static long long step_of(const char *line)
{
    const char *member = strstr(line, "\"step\": ");
    size_t size = strlen(line);
    if (!member || size < 2 || line[size - 1] != '\n' || line[size - 2] != '}')
        return -1;
    return atoll(member + strlen("\"step\": "));
}

static bool begins_with(const char *line, const char *begin)
{
    return strncmp(line, begin, strlen(begin)) == 0;
}

/* A whole line that this program does not write. */
static bool is_foreign(const char *line)
{
    size_t size = strlen(line);
    return size >= 2 && strcmp(line + size - 2, "}\n") == 0 && !begins_with(line, "{\"step\": ") &&
           !begins_with(line, "{\"event\": ");
}

/* The lines up to `step`: the size of those in front of all others, and the ones after, which are few. A
 * save in the background is told after the steps that were done meanwhile. */
static fsdp_status find_kept(FILE *stream, const char *path, int64_t step, off_t *end_out,
                             fsdp_text *behind, fsdp_error *err)
{
    char *line = NULL;
    size_t room = 0;
    ssize_t size;
    bool is_cut = false, is_ours = true;
    *end_out = 0;
    while (is_ours && (size = getline(&line, &room, stream)) >= 0) {
        const long long at = step_of(line);
        const bool is_kept = at >= 0 && at <= step;
        is_ours = !is_foreign(line);
        is_cut = is_cut || !is_kept;
        if (!is_cut)
            *end_out += size;
        else if (is_kept)
            fsdp_text_add(behind, line, (size_t)size);
    }
    free(line);
    if (!is_ours)
        return fsdp_fail(err, FSDP_ERR_EXISTS,
                         "'%s' has lines of another program; name another run (--run)", path);
    return ferror(stream) ? fsdp_fail_errno(err, errno, "cannot read '%s'", path) : FSDP_OK;
}

/* A link is followed inside of the run only: what it leads to outside is not a log of this run. */
static fsdp_status check_link(const char *run, const char *path, fsdp_error *err)
{
    struct stat info;
    char place[PATH_MAX], target[PATH_MAX];
    if (lstat(path, &info) != 0 || !S_ISLNK(info.st_mode))
        return FSDP_OK;
    size_t size = realpath(run, place) && realpath(path, target) ? strlen(place) : 0;
    if (size > 0 && strncmp(target, place, size) == 0 && target[size] == '/')
        return FSDP_OK;
    return fsdp_fail(
        err, FSDP_ERR_EXISTS,
        "'%s' is a link to a place outside of the run, which is not written to: remove "
        "the link, or name another run (--run)",
        path);
}

/* Not a pipe, which would wait for a reader. */
static fsdp_status open_file(const char *path, FILE **stream_out, fsdp_error *err)
{
    struct stat info;
    int fd = open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC | O_NONBLOCK, 0666);
    if (fd < 0 && errno != ENXIO)
        return fsdp_fail_errno(err, errno, "cannot open '%s'", path);
    if (fd >= 0 && fstat(fd, &info) == 0 && S_ISREG(info.st_mode) &&
        (*stream_out = fdopen(fd, "a")))
        return FSDP_OK;
    if (fd >= 0)
        close(fd);
    return fsdp_fail(err, FSDP_ERR_EXISTS, "'%s' is not a file; name another run (--run)", path);
}

static fsdp_status open_append(const char *run, const char *name, FILE **stream_out,
                               fsdp_error *err)
{
    char path[PATH_MAX];
    if (snprintf(path, sizeof path, "%s/%s", run, name) >= (int)sizeof path)
        return fsdp_fail(err, FSDP_ERR_USAGE, "the path '%s' is too long", run);
    FSDP_TRY(check_link(run, path, err));
    return open_file(path, stream_out, err);
}

fsdp_status train_log_lock(train_log *log, const char *run, fsdp_error *err)
{
    log->run = run;
    FSDP_TRY(make_run(run, err));
    FSDP_TRY(open_append(run, "metrics.jsonl", &log->metrics, err));
    /* file systems without locks give other errors: trainings are not told apart there */
    if (flock(fileno(log->metrics), LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK)
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_EXISTS, "another training is writing to the run '%s'", run);
}

/* A line is one write, so that readers, and the file after a kill, have whole lines. A part of a line for
 * which there was no space is cut off again. */
static fsdp_status append(train_log *log, const fsdp_text *text, fsdp_error *err)
{
    const int fd = fileno(log->metrics);
    const off_t before = lseek(fd, 0, SEEK_END);
    const int errnum = before < 0 ? errno : cli_write_all(fd, text->data, text->size);
    if (errnum == 0)
        return FSDP_OK;
    if (before >= 0)
        (void)!ftruncate(fd, before);
    if (log->drops_lines) {
        if (log->dropped++ == 0)
            train_log_warn(log, "cannot write '%s/metrics.jsonl': %s; its lines are left out",
                           log->run, strerror(errnum));
        return FSDP_OK;
    }
    return fsdp_fail_errno(err, errnum, "cannot write '%s/metrics.jsonl'", log->run);
}

static fsdp_status cut_metrics(train_log *log, int64_t step, fsdp_error *err)
{
    off_t end;
    char path[PATH_MAX];
    fsdp_text behind = {0};
    snprintf(path, sizeof path, "%s/metrics.jsonl", log->run); /* fits, as it is open */
    FILE *stream = fopen(path, "re");
    if (!stream)
        return fsdp_fail_errno(err, errno, "cannot open '%s'", path);
    fsdp_status st = find_kept(stream, path, step, &end, &behind, err);
    fclose(stream);
    if (st == FSDP_OK && behind.failed)
        st = fsdp_fail(err, FSDP_ERR_LIMIT, "out of memory");
    if (st == FSDP_OK && truncate(path, end) != 0)
        st = fsdp_fail_errno(err, errno, "cannot truncate '%s'", path);
    if (st == FSDP_OK && behind.size > 0)
        st = append(log, &behind, err);
    fsdp_text_release(&behind);
    return st;
}

fsdp_status train_log_open(train_log *log, int64_t step, bool tensorboard, fsdp_error *err)
{
    FSDP_TRY(cut_metrics(log, step, err));
    FSDP_TRY(open_append(log->run, "main.log", &log->lines, err));
    return tensorboard ? events_open(log->run, &log->events, err) : FSDP_OK;
}

void train_log_close(train_log *log)
{
    if (log->dropped > 0)
        train_log_warn(log, "'%s/metrics.jsonl' lacks %lld lines that could not be written",
                       log->run, (long long)log->dropped);
    if (log->metrics)
        fclose(log->metrics);
    if (log->lines)
        fclose(log->lines);
    events_close(log->events);
    *log = (train_log){0};
}

/* --- objects ------------------------------------------------------------------------------------- */

void train_add_number(fsdp_text *text, double value)
{
    if (isfinite(value))
        fsdp_text_add_f64(text, value);
    else
        fsdp_text_addf(text, "null");
}

static void put_line(train_log *log, fsdp_text *text)
{
    fsdp_error *err = &log->failure;
    if (log->prints_json && !text->failed)
        cli_put_line(text->data, text->size);
    if (text->failed && err->status == FSDP_OK)
        (void)fsdp_fail(err, FSDP_ERR_LIMIT, "out of memory");
    else if (log->metrics && err->status == FSDP_OK)
        (void)!append(log, text, err);
    fsdp_text_release(text);
}

/* TensorBoard's file ends where one record could not be written: readers stop there anyway. */
static void end_events(train_log *log, fsdp_status st)
{
    if (st == FSDP_OK)
        return;
    events_close(log->events);
    log->events = NULL;
    if (log->drops_lines) {
        train_log_warn(log, "%s; nothing more is written for TensorBoard", log->failure.text);
        log->failure = (fsdp_error){0};
    }
}

void train_log_step(train_log *log, const train_step_line *line)
{
    fsdp_text text = {0};
    fsdp_text_addf(&text, "{\"step\": %lld, \"loss\": ", (long long)line->step);
    train_add_number(&text, line->loss);
    fsdp_text_addf(&text, ", \"grad_norm\": ");
    train_add_number(&text, line->grad_norm);
    fsdp_text_addf(&text, ", \"lr\": ");
    train_add_number(&text, line->lr);
    fsdp_text_addf(&text,
                   ", \"tokens\": %lld, \"batch\": \"%s\", \"ms\": ", (long long)line->tokens,
                   line->batch);
    fsdp_text_addf(&text, "%.3f, \"tok_s\": %.1f}\n", line->ms, line->tok_s);
    put_line(log, &text);
    train_log_scalar(log, line->step, "train/loss", line->loss);
    train_log_scalar(log, line->step, "train/grad_norm", line->grad_norm);
    train_log_scalar(log, line->step, "train/lr", line->lr);
    train_log_scalar(log, line->step, "train/tok_s", line->tok_s);
    if (log->events && log->failure.status == FSDP_OK)
        end_events(log, events_flush(log->events, &log->failure));
}

void train_log_event(train_log *log, const char *name, int64_t step, const char *members)
{
    fsdp_text text = {0};
    fsdp_text_addf(&text, "{\"event\": \"%s\", \"step\": %lld%s%s}\n", name, (long long)step,
                   *members ? ", " : "", members);
    put_line(log, &text);
}

void train_log_scalar(train_log *log, int64_t step, const char *tag, double value)
{
    if (log->events && log->failure.status == FSDP_OK)
        end_events(log, events_add(log->events, step, tag, value, &log->failure));
}

/* --- lines --------------------------------------------------------------------------------------- */

static void say(const train_log *log, bool is_quiet, const char *format, va_list args)
{
    char line[1024], when[32];
    time_t now = time(NULL);
    struct tm parts;
    vsnprintf(line, sizeof line, format, args);
    if (!is_quiet)
        fprintf(stderr, "%s\n", line);
    if (!log->lines)
        return;
    strftime(when, sizeof when, "%Y-%m-%d %H:%M:%S", localtime_r(&now, &parts));
    fprintf(log->lines, "%s  %s\n", when, line);
    fflush(log->lines);
}

void train_log_say(train_log *log, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    say(log, log->is_quiet, format, args);
    va_end(args);
}

void train_log_warn(train_log *log, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    say(log, false, format, args);
    va_end(args);
}
