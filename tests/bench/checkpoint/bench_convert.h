/*
 * The parts of bench convert, private to this room:
 *
 *   bench_convert.c -> bench_convert_sources.c -> bench_convert_models.c, bench_convert_megatron.c
 *                   -> bench_convert_programs.c
 *
 * In come row_options, out come rows. Files lie in one directory, which the caller removes.
 */
#ifndef FSDP_BENCH_CONVERT_H
#define FSDP_BENCH_CONVERT_H

#include "tests/bench/rows.h"

typedef struct convert_job {
    const row_options *opts;
    char dir[BENCH_PATH], tools[BENCH_PATH];   /* tools: where fsdp-convert lies */
    int64_t peak_kib;                          /* of fsdp-convert or fsdp-ls in this case */
} convert_job;

/* --- programs (bench_convert_programs.c) --- */

/* fsdp-convert and fsdp-ls are next to this program. */

typedef struct convert_call {
    const char *from, *to;
    const char *const *options;                /* ended by NULL */
    const char *last, *path;                   /* one more option and its value; NULL: none */
    bool skip_verify;
} convert_call;

/* times NULL: the run is not a part of a contest. */
fsdp_status bench_convert_run(convert_job *job, const convert_call *call, bench_times *times,
                              fsdp_error *err);
fsdp_status bench_convert_list(convert_job *job, const char *from, bench_times *times, fsdp_error *err);
fsdp_status bench_convert_copy(convert_job *job, const char *from, const char *to, bench_times *times,
                               fsdp_error *err);
/* Asks the program of --peer. It prints the seconds and processor seconds of its work, without what it takes
 * to start. */
fsdp_status bench_convert_ask_peer(convert_job *job, const char *const words[3], bench_times *times,
                                   fsdp_error *err);

/* --- sources (bench_convert_sources.c) --- */

/* Makes what a case reads, by its name, unless a case before it has. */
fsdp_status bench_convert_make_source(convert_job *job, const char *name, fsdp_error *err);
/* A native checkpoint of plain matrices. */
fsdp_status bench_convert_make_plain(convert_job *job, const char *path, int world, int64_t bytes,
                                     fsdp_error *err);
/* Only the peer can write it. */
bool bench_convert_needs_peer(const char *source);

/* --- models that sources hold (bench_convert_models.c) --- */

/* A Llama with so many bytes of bf16 weights, 13 MB at least. Its sizes fit two tensor parallel ranks, two
 * stages, and blocks of 128 x 128. */
bench_llama bench_llama_of(int64_t bytes);
fsdp_status bench_convert_llama(const bench_llama *shape, bench_model *model_out, fsdp_error *err);
/* With f32 scales for blocks of its matrices. */
fsdp_status bench_convert_scaled_llama(const bench_llama *shape, bench_model *model_out, fsdp_error *err);
/* The pairs of an adapter for all matrices of the layers. */
fsdp_status bench_convert_adapter(const bench_llama *shape, bench_model *model_out, fsdp_error *err);
fsdp_status bench_write_llama_config(const bench_llama *shape, const char *path, fsdp_error *err);
fsdp_status bench_write_adapter_config(const char *path, fsdp_error *err);

/* --- Megatron (bench_convert_megatron.c) --- */

enum { BENCH_TENSOR_RANKS = 2, BENCH_STAGES = 2 };
/* The part of the Llama that a tensor parallel rank of a pipeline stage holds; names of parts begin with
 * "rankN.". */
fsdp_status bench_convert_megatron(const bench_llama *shape, int rank, int stage, bench_model *model_out,
                                   fsdp_error *err);

#endif
