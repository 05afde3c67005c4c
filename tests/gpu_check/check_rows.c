/* Rows of gpu-check: their goals, and how they are printed. See gpu_check.h. */
#include "tests/gpu_check/gpu_check.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/core/mem.h"

/* The least achieved / bound of rows whose names begin so; the first that fits counts. A stall or a worst
 * step of at most 1.1 times the bound's is 1 / 1.1, a step of at most 1.02 times is 1 / 1.02. */
static const struct {
    const char *begin;
    double goal;
} goals[] = {{"kernel/hash", 0.4},
             {"kernel/", 0.8},
             {"small/", 0.5},
             {"staging/", 0.9},
             {"async-save/stall", 1 / 1.1},
             {"async-save/call", 1},
             {"async-save/step", 1 / 1.02},
             {"async-save/worst-step", 1 / 1.1},
             {"load/", 0.8},
             {"collective/2-ranks/", 0.6},
             {"nccl/2-ranks/host-time", 1}};

static double goal_of(const char *name)
{
    for (size_t i = 0; i < sizeof goals / sizeof *goals; i++)
        if (strncmp(name, goals[i].begin, strlen(goals[i].begin)) == 0)
            return goals[i].goal;
    return 0;
}

static gpu_row named_row(const char *format, va_list arguments)
{
    gpu_row row = {.verdict = GPU_PASSED};
    vsnprintf(row.name, sizeof row.name, format, arguments);
    return row;
}

static gpu_row *add_row_to(gpu_results *results, const gpu_row *row)
{
    /* the last place is written again rather than that a row after it is lost unseen */
    gpu_row *place = &results->rows[results->count < GPU_ROWS ? results->count++ : GPU_ROWS - 1];
    *place = *row;
    return place;
}

gpu_row *gpu_add_row(gpu_results *results, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    const gpu_row row = named_row(format, arguments);
    va_end(arguments);
    return add_row_to(results, &row);
}

gpu_row *gpu_add_wanted_row(gpu_results *results, const char *format, ...)
{
    const char *only = results->options.only;
    va_list arguments;
    va_start(arguments, format);
    const gpu_row row = named_row(format, arguments);
    va_end(arguments);
    bool is_wanted = !only || strncmp(row.name, only, strlen(only)) == 0;
    return is_wanted ? add_row_to(results, &row) : NULL;
}

static void note(gpu_row *row, gpu_verdict verdict, const char *format, va_list arguments)
{
    if (row->verdict == GPU_FAILED)
        return; /* the first reason counts */
    row->verdict = verdict;
    vsnprintf(row->note, sizeof row->note, format, arguments);
}

void gpu_fail_row(gpu_row *row, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    note(row, GPU_FAILED, format, arguments);
    va_end(arguments);
}

void gpu_skip_row(gpu_row *row, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    note(row, GPU_SKIPPED, format, arguments);
    va_end(arguments);
}

void gpu_rate_row(const gpu_results *results, gpu_row *row, double moved, double bound)
{
    row->achieved = row->seconds > 0 ? moved / row->seconds : 0;
    row->bound = bound;
    if (!results->options.judges_rates)
        return;
    row->goal = goal_of(row->name);
    if (row->goal > 0 && bound <= 0)
        gpu_fail_row(row, "the ceiling that it is compared with was not measured");
    else if (row->goal > 0 && row->achieved < row->goal * bound)
        gpu_fail_row(row, "slower than the goal, %.2f of the bound", row->goal);
}

void gpu_end_row(gpu_row *row, fsdp_status status, const fsdp_error *err)
{
    if (status != FSDP_OK)
        gpu_fail_row(row, "%s", err->text);
}

/* --- lines ------------------------------------------------------------------------------------ */

/* 1.50 G */
static const char *spell(double value, char out[24])
{
    static const char units[] = " kMGTP";
    int unit = 0;
    while (value >= 1000 && unit < 5) {
        value /= 1000;
        unit++;
    }
    snprintf(out, 24, value > 0 ? "%.4g%.1s" : "-", value, unit > 0 ? &units[unit] : "");
    return out;
}

void gpu_print_heading(const gpu_results *results)
{
    const gpu_facts *facts = &results->facts;
    printf("gpu: %s, %.1f GiB, driver for CUDA %s, runtime %s\n", facts->name,
           facts->memory / (1 << 30), facts->driver, facts->runtime);
    printf("seed: %llu\n", (unsigned long long)results->options.seed);
    if (!results->options.judges_rates)
        printf("data is smaller than usual: rates are shown and not judged\n");
    printf("%-32s %8s %10s %9s %9s %6s %s\n", "name", "size", "time", "achieved", "bound", "ratio",
           "passed");
    fflush(stdout);
}

void gpu_print_row(const gpu_row *row)
{
    static const char *const words[] = {"yes", "NO", "skipped"};
    char size[24], achieved[24], bound[24], time[24] = "-", ratio[24] = "-";
    if (row->seconds > 0)
        snprintf(time, sizeof time, "%.4g ms", row->seconds * 1e3);
    if (row->bound > 0 && row->achieved > 0)
        snprintf(ratio, sizeof ratio, "%.3f", row->achieved / row->bound);
    printf("%-32s %8s %10s %9s %9s %6s %s%s%s\n", row->name, spell(row->size, size), time,
           spell(row->achieved, achieved), spell(row->bound, bound), ratio, words[row->verdict],
           row->note[0] ? "  " : "", row->note);
    fflush(stdout);
}

static int count(const gpu_results *results, gpu_verdict verdict)
{
    int n = 0;
    for (int i = 0; i < results->count; i++)
        n += results->rows[i].verdict == verdict;
    return n;
}

bool gpu_print_sum(const gpu_results *results)
{
    int failed = count(results, GPU_FAILED);
    printf("%d passed, %d failed, %d skipped\n", count(results, GPU_PASSED), failed,
           count(results, GPU_SKIPPED));
    fflush(stdout);
    return failed == 0;
}

/* --- JSON ------------------------------------------------------------------------------------- */

static void add_string(fsdp_text *text, const char *name, const char *value)
{
    fsdp_text_addf(text, "\"%s\": ", name);
    fsdp_text_add_json_string(text, value, strlen(value));
}

static void add_row(fsdp_text *text, const gpu_row *row)
{
    static const char *const words[] = {"passed", "failed", "skipped"};
    fsdp_text_addf(text, "  {");
    add_string(text, "name", row->name);
    fsdp_text_addf(text,
                   ", \"size\": %.17g, \"seconds\": %.9g, \"achieved\": %.9g, \"bound\": %.9g, "
                   "\"goal\": %.9g, ",
                   row->size, row->seconds, row->achieved, row->bound, row->goal);
    add_string(text, "result", words[row->verdict]);
    fsdp_text_addf(text, ", ");
    add_string(text, "note", row->note);
    fsdp_text_addf(text, "}");
}

static fsdp_status write_file(const char *path, const fsdp_text *text, fsdp_error *err)
{
    FILE *file = fopen(path, "w");
    bool is_written = file && fwrite(text->data, 1, text->size, file) == text->size;
    int code = errno;
    if (file && fclose(file) != 0 && is_written)
        is_written = false, code = errno;
    return is_written ? FSDP_OK : fsdp_fail_errno(err, code, "cannot write '%s' (--json)", path);
}

fsdp_status gpu_try_json(const char *path, fsdp_error *err)
{
    FILE *file = fopen(path, "a");
    if (!file)
        return fsdp_fail_errno(err, errno, "cannot write '%s' (--json)", path);
    return fclose(file) == 0 ? FSDP_OK
                             : fsdp_fail_errno(err, errno, "cannot write '%s' (--json)", path);
}

fsdp_status gpu_write_json(const gpu_results *results, const char *path, fsdp_error *err)
{
    const gpu_facts *facts = &results->facts;
    fsdp_text text = {0};
    fsdp_text_addf(&text, "{\"schema\": 1, ");
    add_string(&text, "gpu", facts->name);
    fsdp_text_addf(&text, ", \"gpus\": %d, \"memory\": %.17g, ", facts->gpus, facts->memory);
    add_string(&text, "driver", facts->driver);
    fsdp_text_addf(&text, ", ");
    add_string(&text, "runtime", facts->runtime);
    fsdp_text_addf(&text, ", ");
    add_string(&text, "cublaslt", facts->cublaslt);
    fsdp_text_addf(&text, ", \"seed\": %llu, \"rows\": [\n",
                   (unsigned long long)results->options.seed);
    for (int i = 0; i < results->count; i++) {
        add_row(&text, &results->rows[i]);
        fsdp_text_addf(&text, i + 1 < results->count ? ",\n" : "\n");
    }
    fsdp_text_addf(&text, " ], \"passed\": %d, \"failed\": %d, \"skipped\": %d}\n",
                   count(results, GPU_PASSED), count(results, GPU_FAILED),
                   count(results, GPU_SKIPPED));
    fsdp_status status =
        text.failed ? fsdp_fail_memory(err, "the results as JSON") : write_file(path, &text, err);
    fsdp_text_release(&text);
    return status;
}
