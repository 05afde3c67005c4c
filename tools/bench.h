/*
 * The parts of fsdp-bench. A synthetic state is described by a model (names and shapes), becomes a
 * state dict of one rank, and has values that are a function of name, position, seed and step:
 *
 *   bench_model.c -> bench_state.c -> bench_values.c
 *   bench_make.c writes such states, bench_check.c proves them; bench_rows.c measures with the rest
 */
#ifndef FSDP_BENCH_H
#define FSDP_BENCH_H

#include "tools/cli.h"

#include <fsdp/fsdp.h>

/* --- options ---------------------------------------------------------------------------------- */

typedef struct bench_options {
    cli_common common;
    const char *command, *path;    /* path: DIR of make and check */
    unsigned given;                /* bits of the options that were given; see fsdp_bench.c */
    const char *model;
    double scale;
    int world;                     /* 0: not given */
    int saves;                     /* 0: one checkpoint */
    uint64_t seed;
    fsdp_kind kind;
    bool compress, no_sync;
    int level;
    int deadline_ms;
    int64_t size;                  /* bytes of the state that is measured with */
    int rounds;
    const char *dir, *peer;
} bench_options;

/* --- values ----------------------------------------------------------------------------------- */

/* The values of one tensor: element i is a function of these and i. */
typedef struct bench_stream {
    uint64_t key;
    fsdp_dtype dtype;
    int shape;                 /* of the distribution; see bench_values.c */
    float mean, scale;
} bench_stream;

/* The name says what the values look like: weights, first or second moments, Adam's step. */
bench_stream bench_stream_of(const fsdp_entry *entry, uint64_t seed, int64_t step);
/* False for the few dtypes that no state of ours has. */
bool bench_stream_knows(fsdp_dtype dtype);
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
fsdp_status bench_model_init(bench_model *model, const char *name, double scale, fsdp_error *err);
/* `count` equal f32 matrices with `bytes` in all. */
fsdp_status bench_model_init_plain(bench_model *model, int count, int64_t bytes, fsdp_error *err);
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
fsdp_status bench_measure(const bench_options *opts, fsdp_error *err);

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

/* --- ranks ------------------------------------------------------------------------------------ */

/* Ranks of mpirun and which of them this process is; 0 and 0 when it did not start us. */
int bench_mpi_world(void);
int bench_mpi_local_world(void);   /* those on this machine */
int bench_mpi_rank(void);
/* Runs body as the ranks of mpirun, or else as `world` threads. */
fsdp_status bench_run_ranks(const bench_options *opts, int world, fsdp_rank_body body, void *user,
                            fsdp_error *err);
/* Ends the program: every rank fails alike, so one tells, unless ranks were lost. */
_Noreturn void bench_exit(fsdp_status status, const fsdp_error *err);

/* The ranks of mpirun (bench_mpi.c), where this build has MPI. bench_mpi_end is fsdp_mpi_finalize. */
fsdp_status bench_mpi_begin(fsdp_ctl **ctl_out, fsdp_error *err);
bool bench_mpi_end(void);

/* What a save or load of one rank watches: rank 0 shows progress, every rank can be stopped. */
fsdp_watch bench_watch(const bench_options *opts, int rank);

/* Cores that this process may use. */
int bench_cores(void);

#endif
