/*
 * Programs of bench convert: fsdp-convert, fsdp-ls, cp and the peer, each in a process of its own, whose
 * time and peak memory are taken. See bench_convert.h.
 */
#include "tests/bench/checkpoint/bench_convert.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MOST_ARGUMENTS = 24 };

typedef struct command {
    const char *words[MOST_ARGUMENTS];
    int count;
} command;

static void add_word(command *line, const char *word)
{
    line->words[line->count++] = word; /* the last one stays NULL: cases are short */
}

static fsdp_status run_command(void *context, bench_child_result *result, fsdp_error *err)
{
    const command *line = context;
    char *argv[MOST_ARGUMENTS], none[2];
    memcpy(argv, line->words, sizeof argv);
    bench_clock began = bench_now();
    FSDP_TRY(bench_run_program(argv, none, sizeof none, err));
    bench_add_time(&result->times, &began);
    return FSDP_OK;
}

static fsdp_status run(convert_job *job, command *line, bench_times *times, int64_t *peak_kib,
                       fsdp_error *err)
{
    bench_child_result result;
    FSDP_TRY(cli_check_stop(err));
    if (times)
        FSDP_TRY(bench_settle(job->dir, err));
    FSDP_TRY(bench_in_child(run_command, line, &result, err));
    if (times) {
        times->cpu[times->count] = result.times.cpu[0];
        times->seconds[times->count++] = result.times.seconds[0];
    }
    if (peak_kib && result.peak_kib > *peak_kib)
        *peak_kib = result.peak_kib;
    return FSDP_OK;
}

fsdp_status bench_convert_run(convert_job *job, const convert_call *call, bench_times *times,
                              fsdp_error *err)
{
    char tool[BENCH_PATH], memory[32], threads[16];
    command line = {0};
    int64_t bytes = job->opts->common.memory;
    bench_path(tool, job->tools, "fsdp-convert");
    snprintf(memory, sizeof memory, "--mem=%" PRId64, bytes > 0 ? bytes : FSDP_MEMORY_DEFAULT);
    snprintf(threads, sizeof threads, "--jobs=%d",
             job->opts->common.jobs > 0 ? job->opts->common.jobs : bench_cores());
    add_word(&line, tool);
    add_word(&line, call->from);
    add_word(&line, call->to);
    for (const char *const *option = call->options; *option; option++)
        add_word(&line, *option);
    if (call->last) {
        add_word(&line, call->last);
        add_word(&line, call->path);
    }
    if (call->skip_verify)
        add_word(&line, "--no-verify");
    add_word(&line, memory);
    add_word(&line, threads);
    add_word(&line, "--no-sync");
    add_word(&line, "--quiet");
    return run(job, &line, times, &job->peak_kib, err);
}

fsdp_status bench_convert_list(convert_job *job, const char *from, bench_times *times,
                               fsdp_error *err)
{
    char tool[BENCH_PATH];
    bench_path(tool, job->tools, "fsdp-ls");
    command line = {.words = {tool, from}, .count = 2};
    return run(job, &line, times, &job->peak_kib, err);
}

fsdp_status bench_convert_copy(convert_job *job, const char *from, const char *to,
                               bench_times *times, fsdp_error *err)
{
    command line = {.words = {"cp", "-r", "--reflink=never", from, to}, .count = 5};
    return run(job, &line, times, NULL, err);
}

fsdp_status bench_convert_ask_peer(convert_job *job, const char *const words[3], bench_times *times,
                                   fsdp_error *err)
{
    command line = {.words = {job->opts->peer, words[0], words[1], words[2]}, .count = 4};
    char *argv[MOST_ARGUMENTS], output[80];
    double seconds = 0, cpu = 0;
    if (!times)
        return run(job, &line, NULL, NULL, err);
    memcpy(argv, line.words, sizeof argv);
    FSDP_TRY(bench_settle(job->dir, err));
    FSDP_TRY(bench_run_program(argv, output, sizeof output, err));
    if (sscanf(output, "%lf %lf", &seconds, &cpu) != 2)
        return fsdp_fail(err, FSDP_ERR_INTERNAL, "'%s' printed '%s'", argv[0], output);
    times->cpu[times->count] = cpu;
    times->seconds[times->count++] = seconds;
    return FSDP_OK;
}
