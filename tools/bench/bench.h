/*
 * fsdp-bench: a synthetic state is described by a model (names and shapes), becomes a state dict of one rank,
 * and has values that are a function of name, position, seed and step:
 *
 *   bench_model.c -> bench_state.c -> bench_values.c
 *
 * bench_make.c saves it by ranks, and bench_check.c proves what was saved. In come
 * bench_options, out come checkpoints and lines on standard output. fsdp_bench.c calls this room, and so do
 * the benches of tests/bench, which measure with the same states.
 */
#ifndef FSDP_BENCH_H
#define FSDP_BENCH_H

#include "tools/cli/cli.h"

#include <fsdp/fsdp.h>

/* --- options ---------------------------------------------------------------------------------- */

typedef struct bench_options {
    cli_common common;
    const char *command, *path;
    const char *of_make;           /* the first option of make alone that was given; NULL: none */
    const char *model;
    double scale;
    int world;                     /* 0: not given */
    int saves;                     /* 0: one checkpoint */
    uint64_t seed;
    fsdp_kind kind;
    bool compress, skip_fsync;
    int level;
    int deadline_ms;               /* 0: the default */
} bench_options;

/* --- values ----------------------------------------------------------------------------------- */

/* The values of one tensor: element i is a function of these and i. */
typedef struct bench_stream {
    uint64_t key;
    fsdp_dtype dtype;
    int shape;                 /* of the distribution; see bench_values.c */
    float mean, scale;
} bench_stream;

/* The entry's name selects the distribution: weights, first or second moments, Adam's step. */
bench_stream bench_stream_of(const fsdp_entry *entry, uint64_t seed, int64_t step);
void bench_stream_fill(const bench_stream *stream, int64_t first, int64_t count, void *data_out);
/* Elements [first, first + count) are in data; returns the first that is another, or -1. */
int64_t bench_stream_compare(const bench_stream *stream, int64_t first, int64_t count, const void *data);
uint64_t bench_hash(uint64_t seed, const char *name, size_t name_size, int64_t step);

/* --- models and states ------------------------------------------------------------------------ */

typedef struct bench_param {
    char *name;                /* Hugging Face's */
    fsdp_dtype dtype;
    int ndim;
    int64_t shape[2];
    bool is_buffer;            /* not trained: no moments */
} bench_param;

typedef struct bench_model {
    const char *name;
    double scale;
    bench_param *params;
    size_t count, capacity;
    const char *alias, *alias_target;  /* tied weights; NULL: none */
    bool failed;
} bench_model;

/* FSDP_ERR_USAGE for a model that is not known. */
extern const char *const bench_models[]; /* the names, up to a NULL */
fsdp_status bench_model_init(bench_model *model, const char *name, double scale, fsdp_error *err);
/* `count` equal f32 matrices with `bytes` in all. */
fsdp_status bench_model_init_plain(bench_model *model, int count, int64_t bytes, fsdp_error *err);
/* Sizes that the Llama family and its mixtures of experts share. */
typedef struct bench_llama {
    int64_t vocabulary, hidden, key_value, intermediate;
    int layers, experts;
    bool tied;
} bench_llama;
/* bf16 weights with the names of transformers. */
fsdp_status bench_model_init_llama(bench_model *model, const bench_llama *shape, fsdp_error *err);
/* An f32 matrix, or a vector when columns is 0. A failure stays in the model, which finish releases then. */
void bench_model_add(bench_model *model, int64_t rows, int64_t columns, const char *name);
fsdp_status bench_model_finish(bench_model *model, fsdp_error *err);
void bench_model_release(bench_model *model);
/* Bytes of the whole state with moments. */
int64_t bench_model_bytes(const bench_model *model);

typedef struct bench_state_opts {
    int world;                 /* the mesh is dp=world */
    int shard_dim;             /* tensors with fewer dims are cut along dim 0 */
    bool weights_only;         /* no moments and no values: nothing but tensors */
    bool no_groups;            /* no values of single parameters, and no config */
    uint64_t seed;
    int64_t step;
} bench_state_opts;

/* Describes the state; no memory for tensors yet. */
fsdp_status bench_state_create(const bench_model *model, const bench_state_opts *opts, fsdp_sd **sd_out,
                               fsdp_error *err);
/* The boxes that rank holds of every tensor: filled in, or proved. bench_state_compare returns
 * FSDP_DIFFERS and names the first element that is wrong. */
fsdp_status bench_state_fill(const fsdp_sd *sd, int rank, uint64_t seed, int64_t step, fsdp_error *err);
fsdp_status bench_state_compare(const fsdp_sd *sd, int rank, uint64_t seed, int64_t step, fsdp_error *err);

/* --- commands --------------------------------------------------------------------------------- */

enum { BENCH_STEP = 100 };     /* between the saves of a run; also the first one's step */

fsdp_status bench_make(const bench_options *opts, fsdp_error *err);
fsdp_status bench_check(const bench_options *opts, fsdp_error *err);

/* Every element and value of an open checkpoint; FSDP_DIFFERS names the first that is wrong. */
typedef struct bench_proof {
    uint64_t seed;
    int64_t step;              /* out: the checkpoint's */
    int threads;
    int64_t memory;
    int64_t tensors, values, bytes;    /* out */
    bool knows_model;          /* out: the checkpoint says what it should hold, and holds that */
    const fsdp_watch *watch;   /* may be NULL */
} bench_proof;
fsdp_status bench_prove(fsdp_checkpoint *checkpoint, bench_proof *proof, fsdp_error *err);

/* Is the checkpoint one that `make` with these options would continue after? Else FSDP_ERR_EXISTS. */
fsdp_status bench_check_goes_on(const bench_options *opts, const char *path, fsdp_error *err);

/* --- ranks ------------------------------------------------------------------------------------ */

/* The number of ranks of mpirun; 0 when it did not start this process. */
int bench_mpi_world(void);
/* Runs body as the ranks of mpirun, or else as `world` threads. deadline_ms 0: the default. */
fsdp_status bench_run_ranks(int deadline_ms, int world, fsdp_rank_body body, void *context, fsdp_error *err);
/* Returns the exit code of a rank; rank 0 also ends the output and reports the failure. */
int bench_end_rank(int rank, fsdp_status status, const fsdp_error *err);
/* Ends the program. Rank 0 reports a failure for all, since every rank has it, unless ranks were lost. */
_Noreturn void bench_exit(fsdp_status status, const fsdp_error *err);

/* The ranks of mpirun (bench_mpi.c), where this build has MPI. bench_mpi_end is fsdp_mpi_finalize.
 * deadline_ms 0: the default. */
fsdp_status bench_mpi_begin(int deadline_ms, fsdp_ctl **ctl_out, fsdp_error *err);
bool bench_mpi_end(void);

/* Adds the text before an item of --json output: one object whose member `list` holds the items, printed one
 * by one. bench_exit adds its end. Rank 0 only. */
void bench_begin_item(fsdp_text *text, const char *list);

/* Cores that this process may use. */
int bench_cores(void);

#endif
