/* The metrics of a run, line by line: see plot.h. */
#include "base/data/json.h"
#include "tools/plot/plot.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { LINE_MOST = 64 << 10 };

/* --- series --------------------------------------------------------------------------------------- */

static void put(plot_bin *bin, plot_point point)
{
    if (!bin->used) {
        bin->first = bin->low = bin->high = bin->last = point;
        bin->used = true;
        return;
    }
    if (point.step < bin->first.step)
        bin->first = point;
    if (point.step >= bin->last.step)
        bin->last = point;
    if (point.value < bin->low.value)
        bin->low = point;
    if (point.value > bin->high.value)
        bin->high = point;
}

static plot_bin *bin_of(plot_series *series, int64_t step)
{
    return &series->bins[(step - series->base) >> series->shift];
}

static void put_all(plot_series *series, const plot_bin *from)
{
    const plot_point points[] = {from->first, from->low, from->high, from->last};
    for (int i = 0; i < PLOT_BIN_POINTS; i++)
        put(bin_of(series, points[i].step), points[i]);
}

/* Reserves memory for a step outside of the bins. Below them is then as much room again, so that steps in
 * falling order do not move all bins each time. */
static void make_room(plot_series *series, int64_t step)
{
    const plot_series old = *series;
    int64_t range = step < old.base ? old.end - step : 0;
    if (step < old.base)
        series->base = step > range ? step - range : 0;
    else
        series->end = step;
    while ((series->end - series->base) >> series->shift >= PLOT_BINS)
        series->shift++;
    memset(series->bins, 0, sizeof series->bins);
    for (int i = 0; i < PLOT_BINS; i++) {
        if (old.bins[i].used)
            put_all(series, &old.bins[i]);
        if (old.bins[i].broken)
            bin_of(series, old.base + ((int64_t)i << old.shift))->broken = true;
    }
}

void plot_series_add(plot_series *series, int64_t step, double value)
{
    if (!series->started) {
        series->started = true;
        series->base = series->end = step;
    }
    if (step < series->base || (step - series->base) >> series->shift >= PLOT_BINS)
        make_room(series, step);
    series->end = step > series->end ? step : series->end;
    if (!isfinite(value)) {
        bin_of(series, step)->broken = true;
        return;
    }
    put(bin_of(series, step), (plot_point){step, value});
    if (series->count == 0 || step >= series->last.step)
        series->last = (plot_point){step, value};
    if (series->count == 0 || step < series->first)
        series->first = step;
    series->low = series->count == 0 ? value : fmin(series->low, value);
    series->high = series->count == 0 ? value : fmax(series->high, value);
    series->count++;
}

/* --- a line -------------------------------------------------------------------------------------- */

enum {
    MEMBER_STEP,
    MEMBER_EVENT,
    MEMBER_LOSS,
    MEMBER_LR,
    MEMBER_NORM,
    MEMBER_TOK_S,
    MEMBER_FAILED, /* of a save that is not there */
    MEMBERS
};

typedef struct metrics_line {
    int64_t step;
    double numbers[MEMBERS]; /* nan: null */
    uint64_t seen;
    plot_kind event; /* PLOT_KINDS: another one, or none */
    bool is_start;
} metrics_line;

static bool has(const metrics_line *line, int member)
{
    return line->seen >> member & 1;
}

static fsdp_status take_event(fsdp_json *json, metrics_line *line, fsdp_error *err)
{
    const char *name;
    size_t size;
    FSDP_TRY(fsdp_json_string(json, &name, &size, err));
    line->is_start = strcmp(name, "start") == 0;
    if (strcmp(name, "save") == 0)
        line->event = PLOT_SAVE;
    else if (strcmp(name, "eval") == 0)
        line->event = PLOT_EVAL;
    return FSDP_OK;
}

static fsdp_status take_member(fsdp_json *json, int which, metrics_line *line, fsdp_error *err)
{
    if (which == MEMBER_EVENT)
        return take_event(json, line, err);
    if (which == MEMBER_STEP) {
        FSDP_TRY(fsdp_json_i64(json, &line->step, err));
        return line->step >= 0 ? FSDP_OK : fsdp_json_fail(json, err, "the step is below 0");
    }
    line->numbers[which] = NAN;
    if (fsdp_json_peek(json) == FSDP_JSON_NULL)
        return fsdp_json_null(json, err);
    return fsdp_json_f64(json, &line->numbers[which], err);
}

static fsdp_status parse(fsdp_json *json, metrics_line *line, fsdp_error *err)
{
    static const char *const names[MEMBERS] = {"step",      "event", "loss",  "lr",
                                               "grad_norm", "tok_s", "failed"};
    fsdp_json_members members = {.names = names, .count = MEMBERS};
    int which;
    *line = (metrics_line){.event = PLOT_KINDS};
    FSDP_TRY(fsdp_json_enter_object(json, err));
    for (;;) {
        FSDP_TRY(fsdp_json_next_member(json, &members, &which, err));
        if (which < 0)
            break;
        FSDP_TRY(take_member(json, which, line, err));
    }
    line->seen = members.seen;
    FSDP_TRY(fsdp_json_finish(json, err));
    if (!has(line, MEMBER_STEP))
        return fsdp_json_fail(json, err, "the object has no step");
    if (!has(line, MEMBER_LOSS) && (!has(line, MEMBER_EVENT) || line->event == PLOT_EVAL))
        return fsdp_json_fail(json, err, "the object has no loss");
    return FSDP_OK;
}

static void add(plot_run *run, const metrics_line *line)
{
    static const struct {
        int member;
        plot_kind kind;
    } of_steps[] = {{MEMBER_LOSS, PLOT_LOSS},
                    {MEMBER_LR, PLOT_LR},
                    {MEMBER_NORM, PLOT_GRAD_NORM},
                    {MEMBER_TOK_S, PLOT_TOK_S}};
    if (!has(line, MEMBER_EVENT)) {
        for (size_t i = 0; i < sizeof of_steps / sizeof *of_steps; i++)
            if (has(line, of_steps[i].member))
                plot_series_add(&run->series[of_steps[i].kind], line->step,
                                line->numbers[of_steps[i].member]);
    } else if (line->is_start && run->lines > 1) {
        plot_series_add(&run->series[PLOT_RESTART], line->step, 0);
    } else if (line->event != PLOT_KINDS && !has(line, MEMBER_FAILED)) {
        double value = line->event == PLOT_EVAL ? line->numbers[MEMBER_LOSS] : 0;
        plot_series_add(&run->series[line->event], line->step, value);
    }
}

/* The reader knows one line only, so its "'' line 1 column 7: ..." gets the file and the line's number. */
static fsdp_status fail_in_line(const char *path, int64_t number, fsdp_error *err)
{
    static const char begin[] = "'' line 1";
    fsdp_error inner = *err;
    const char *rest = inner.text;
    rest += strncmp(rest, begin, strlen(begin)) == 0 ? strlen(begin) : 0;
    return fsdp_fail(err, inner.status, "'%s' line %lld%s%s", path, (long long)number,
                     rest == inner.text ? ": " : "", rest);
}

static fsdp_status take_line(plot_run *run, const char *path, const char *data, size_t size,
                             fsdp_error *err)
{
    metrics_line line;
    fsdp_json json;
    run->lines++;
    fsdp_json_init(&json, data, size, "");
    fsdp_status st = parse(&json, &line, err);
    fsdp_json_release(&json);
    if (st != FSDP_OK)
        return fail_in_line(path, run->lines, err);
    add(run, &line);
    return FSDP_OK;
}

/* --- the file ------------------------------------------------------------------------------------ */

/* All lines of the first `left` bytes: a training may continue writing meanwhile. */
static fsdp_status read_lines(plot_run *run, FILE *file, const char *path, int64_t left,
                              fsdp_error *err)
{
    char *line = malloc(LINE_MOST);
    fsdp_status st =
        line ? FSDP_OK : fsdp_fail(err, FSDP_ERR_LIMIT, "cannot allocate memory for a line");
    size_t size = 0;
    int c;
    for (; st == FSDP_OK && left > 0 && (c = getc_unlocked(file)) != EOF; left--) {
        if (c == '\n') {
            st = take_line(run, path, line, size, err);
            size = 0;
        } else if (size == LINE_MOST) {
            st = fsdp_fail(err, FSDP_ERR_DAMAGED, "'%s' line %lld: it has more than %d bytes", path,
                           (long long)run->lines + 1, LINE_MOST);
        } else {
            line[size++] = (char)c;
        }
    }
    if (st == FSDP_OK && ferror(file))
        st = fsdp_fail_errno(err, errno, "cannot read '%s'", path);
    run->is_cut = size > 0;
    free(line);
    return st;
}

static fsdp_status open_metrics(const char *run, const char *path, FILE **file_out,
                                int64_t *size_out, fsdp_error *err)
{
    struct stat info;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* a pipe would wait for its writer */
    if (fd < 0 && errno == ENOENT && path != run)
        return fsdp_fail(err, FSDP_ERR_NOT_FOUND,
                         "'%s' is not a run of fsdp-train: it has no metrics.jsonl", run);
    if (fd < 0)
        return fsdp_fail_errno(err, errno, "cannot open '%s'", path);
    *file_out = fstat(fd, &info) == 0 && S_ISREG(info.st_mode) ? fdopen(fd, "r") : NULL;
    if (!*file_out) {
        close(fd);
        return fsdp_fail(err, FSDP_ERR_DAMAGED, "'%s' is not a file", path);
    }
    *size_out = info.st_size;
    return FSDP_OK;
}

fsdp_status plot_run_read(plot_run *run, fsdp_error *err)
{
    char inside[PATH_MAX];
    const char *path = run->path;
    struct stat info;
    FILE *file;
    int64_t size = 0;
    if (stat(path, &info) != 0)
        return fsdp_fail_errno(err, errno, "cannot open '%s'", path);
    if (S_ISDIR(info.st_mode)) {
        if (snprintf(inside, sizeof inside, "%s/metrics.jsonl", path) >= (int)sizeof inside)
            return fsdp_fail(err, FSDP_ERR_USAGE, "the path '%s' is too long", path);
        path = inside;
    }
    FSDP_TRY(open_metrics(run->path, path, &file, &size, err));
    fsdp_status st = read_lines(run, file, path, size, err);
    fclose(file);
    return st;
}
