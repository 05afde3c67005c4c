/*
 * The parts of fsdp-bench. A synthetic state is described by a model (names and shapes), becomes a
 * state dict of one rank, and has values that are a function of name, position, seed and step:
 *
 *   bench_model.c -> bench_state.c -> bench_values.c
 *
 * Rooms: bench (models, states, ranks, timing, plain files, peers), bench_checkpoint (make, check and rows
 * about files) and bench_train (rows about collectives and steps). In come bench_options, out come files and
 * rows on standard output. Only fsdp_bench.c and these rooms call it.
 */
#ifndef FSDP_BENCH_H
#define FSDP_BENCH_H

#include "tools/cli/cli.h"

#include <fsdp/fsdp.h>

/* --- options ---------------------------------------------------------------------------------- */

typedef struct step_options step_options;      /* bench_step.h */
typedef struct trainer_options trainer_options;        /* bench_trainer.h */

typedef struct bench_options {
    cli_common common;
    step_options *step;        /* options of step; train has some of them */
    trainer_options *trainer;  /* options of train alone */
    const char *command, *path;    /* path: DIR of make and check */
    int argc;                      /* as the program was started: fsdp_launch takes its part */
    char **argv;
    uint64_t given;                /* bits of the options that were given; see fsdp_bench.c */
    const char *model;
    double scale;
    int world;                     /* 0: not given */
    int saves;                     /* 0: one checkpoint */
    uint64_t seed;
    fsdp_kind kind;
    bool compress, skip_fsync;
    int level;
    bool counts_ranks;             /* --np or --threads was given */
    const char *deadline;          /* as given; ranks of fsdp_launch know better what is good */
    int deadline_ms;
    int64_t size;                  /* bytes of the state that is measured with */
    int rounds;
    const char *dir, *peer;
    const char *ops, *sizes, *dtype, *buffers, *against;   /* of collectives */
    const char *cases;             /* of convert; NULL: all */
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
fsdp_status bench_measure(const bench_options *opts, fsdp_error *err);
/* Work of ranks that fsdp_launch starts: these end the program. */
fsdp_status bench_collectives(const bench_options *opts, fsdp_error *err);
fsdp_status bench_unshard(const bench_options *opts, fsdp_error *err);
fsdp_status bench_copies(const bench_options *opts, fsdp_error *err);
fsdp_status bench_step(const bench_options *opts, fsdp_error *err);
fsdp_status bench_trainer(const bench_options *opts, fsdp_error *err);
/* Ends the program with a usage error where options make no sense. */
void bench_check_collectives(const bench_options *opts);
void bench_check_convert(const bench_options *opts);

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

/* Is the checkpoint one that `make` with these options would go on behind? Else FSDP_ERR_EXISTS. */
fsdp_status bench_check_goes_on(const bench_options *opts, const char *path, fsdp_error *err);

/* --- ranks ------------------------------------------------------------------------------------ */

/* The number of ranks of mpirun; 0 when it did not start this process. */
int bench_mpi_world(void);
int bench_mpi_local_world(void);   /* those on this machine */
/* Runs body as the ranks of mpirun, or else as `world` threads. */
fsdp_status bench_run_ranks(const bench_options *opts, int world, fsdp_rank_body body, void *context,
                            fsdp_error *err);
/*
 * Runs body as the ranks of fsdp_launch, which takes its options out of the command line, and ends the
 * program. Rank 0 prints; ctl's deadline is long, since ranks wait for what another one measures alone.
 */
typedef fsdp_status (*bench_world_body)(fsdp_world *world, const bench_options *opts, fsdp_error *err);
_Noreturn void bench_launch(const bench_options *opts, bench_world_body body);
/* Nobody has said how many ranks there are: first one in this process, then `ranks` processes. Otherwise as
 * above. */
_Noreturn void bench_launch_twice(const bench_options *opts, bench_world_body body, int ranks);
/* Collective. A barrier of the communicator, which is faster than one of the control plane. */
fsdp_status bench_barrier(fsdp_comm *comm, fsdp_error *err);
/* Collective. The largest resident size of a rank. */
fsdp_status bench_peak_of_ranks(fsdp_ctl *ctl, int64_t *kib_out, fsdp_error *err);
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

/* The watch of a save or load on one rank: rank 0 shows progress, a signal stops every rank. */
fsdp_watch bench_watch(const bench_options *opts, int rank);

/* Cores that this process may use. */
int bench_cores(void);

/* --- measuring ------------------------------------------------------------------------------------ */

enum { BENCH_MAX_ROUNDS = 99, BENCH_PIECES = 3, BENCH_PATH = 4096 };
extern const int64_t bench_pieces[BENCH_PIECES];       /* 256 KiB, 1 MiB, 4 MiB */

/* Per run: its duration, and the processor time of all its threads and processes. */
typedef struct bench_times {
    int count;
    double seconds[BENCH_MAX_ROUNDS], cpu[BENCH_MAX_ROUNDS];
    int64_t peak_kib;          /* the largest resident size of a rank that a peer has named */
} bench_times;
typedef struct bench_clock { double wall, cpu; } bench_clock;
bench_clock bench_now(void);
void bench_add_time(bench_times *times, const bench_clock *began);
double bench_median(const bench_times *times);
double bench_shortest(const bench_times *times);
double bench_longest(const bench_times *times);
double bench_median_cpu(const bench_times *times);

/*
 * Two ways to move the same bytes, as one rank sees them. Every entry is called by every rank, and
 * each may leave its work to rank 0. prepare and clean come before and after every timed run of
 * either side, outside the time; prove comes after ours, before clean. Entries may be NULL.
 */
typedef struct bench_contest {
    fsdp_ctl *ctl;
    int rounds;
    void *context;
    fsdp_status (*prepare)(void *context, fsdp_error *err);
    fsdp_status (*ours)(void *context, fsdp_error *err);
    fsdp_status (*prove)(void *context, fsdp_error *err);
    fsdp_status (*plain)(void *context, int64_t piece, fsdp_error *err);
    fsdp_status (*clean)(void *context, fsdp_error *err);
} bench_contest;

typedef struct bench_outcome {
    bench_times ours, plain[BENCH_PIECES];
    int64_t bytes_read;        /* by one run of ours, as the kernel counts reads of this process */
} bench_outcome;

/* Collective. One round that does not count, then as many as wanted, the sides in turns. */
fsdp_status bench_contest_run(const bench_contest *contest, bench_outcome *outcome, fsdp_error *err);
/* The piece size with the shortest median. */
int bench_best_piece(const bench_outcome *outcome);

/* Runs work in a process of its own. */
typedef struct bench_child_result {
    bench_times times;         /* work sets these two */
    int64_t bytes_read;
    int64_t peak_kib;          /* the process's largest resident size */
} bench_child_result;
typedef fsdp_status (*bench_child_work)(void *context, bench_child_result *result, fsdp_error *err);
fsdp_status bench_in_child(bench_child_work work, void *context, bench_child_result *result_out,
                           fsdp_error *err);

int64_t bench_bytes_read(void);    /* by this process so far, as /proc/self/io says */
int64_t bench_peak_kib(void);      /* of this process */

/*
 * Another program that does the same work with as many ranks (bench_peer.c). It is started as PROGRAM DIR
 * RANKS; each of its ranks reads lines of the pipe DIR/go-RANK and does what they say, and the first one
 * answers each with a line in the pipe DIR/done: "SECONDS PROCESSOR_SECONDS [PEAK_KIB]" or "cannot". It sends
 * a first line when it is ready; the line "end" ends it. Ranks that wait use no processor time.
 */
typedef struct bench_peer bench_peer;
fsdp_status bench_peer_start(char *const *argv, int ranks, bench_peer **peer_out, fsdp_error *err);
/* FSDP_ERR_UNSUPPORTED: it cannot do that. */
fsdp_status bench_peer_ask(bench_peer *peer, const char *line, bench_times *times, fsdp_error *err);
void bench_peer_stop(bench_peer *peer);    /* accepts NULL */
/* The path of a test program, ../tests/NAME from this program's directory. BENCH_PATH bytes of room. */
void bench_find_peer(const char *name, char *path_out);

/* --- rows ----------------------------------------------------------------------------------------- */

typedef struct bench_row {
    char work[32], against[80], goal[60];
    const bench_times *ours, *plain;   /* plain NULL: nothing to compare with */
    bool met;
    int64_t bytes_read, bytes_needed, peak_kib;
    bool stands_alone;         /* one line of JSON, and no member of a list */
    fsdp_text more;            /* further members, each with a comma before it; released by the call */
} bench_row;
fsdp_status bench_print_row(const bench_options *opts, bench_row *row);
/* ratio of the medians: plain / ours */
double bench_ratio(const bench_times *ours, const bench_times *plain);
/* "ratio >= 0.85" */
void bench_want_ratio(bench_row *row, double least);

fsdp_status bench_save_rows(const bench_options *opts, const char *dir, fsdp_error *err);
fsdp_status bench_load_rows(const bench_options *opts, const char *dir, fsdp_error *err);
fsdp_status bench_reshard_rows(const bench_options *opts, const char *dir, fsdp_error *err);
fsdp_status bench_many_rows(const bench_options *opts, const char *dir, fsdp_error *err);
fsdp_status bench_manifest_rows(const bench_options *opts, const char *dir, fsdp_error *err);
fsdp_status bench_compress_rows(const bench_options *opts, const char *dir, fsdp_error *err);
fsdp_status bench_convert_rows(const bench_options *opts, const char *dir, fsdp_error *err);

/* Row many-save, for bench_many_rows. */
fsdp_status bench_measure_many_save(const bench_options *opts, const bench_model *model, const char *dir,
                                    int world, fsdp_error *err);

/* The state that most rows work with: so many f32 matrices. */
enum { BENCH_TENSORS = 64 };

/* This rank's shards of a model's state, filled in. */
fsdp_status bench_make_shards(const bench_model *model, const bench_state_opts *state, int rank,
                              fsdp_sd **sd_out, fsdp_error *err);
/* Saves a model's state by `world` threads, without fsync. */
fsdp_status bench_save_model(const bench_options *opts, const bench_model *model,
                             const bench_state_opts *state, const char *path, fsdp_error *err);
fsdp_status bench_prove_path(const char *path, uint64_t seed, fsdp_error *err);

/* --- the plain file system ------------------------------------------------------------------------ */

void bench_path(char *out, const char *dir, const char *name);     /* BENCH_PATH bytes of room */
fsdp_status bench_remove(const char *path, fsdp_error *err);       /* a tree, or nothing */
/* Collective. A new directory in `place`, whose name all ranks get: BENCH_PATH bytes of room. */
fsdp_status bench_make_directory(fsdp_ctl *ctl, const char *place, char *dir_out, fsdp_error *err);
/* Syncs the directory's file system, so that earlier writes do not disturb a measurement. */
fsdp_status bench_settle(const char *dir, fsdp_error *err);
/* The memory of a state dict's tensors, one after the other, into a new file. */
fsdp_status bench_write_plain(const fsdp_sd *sd, int rank, const char *path, int64_t piece, bool sync,
                              fsdp_error *err);
/* Files that are thought of as one, from byte `first` on. */
typedef struct bench_file_row { char *const *paths; int count; int64_t first; } bench_file_row;
/* Into that memory, until it is full. */
fsdp_status bench_read_plain(const fsdp_sd *sd, int rank, const bench_file_row *from, int64_t piece,
                             fsdp_error *err);
/* cp -r, then fsync of every file and directory of the copy. */
fsdp_status bench_copy_plain(const char *from, const char *to, fsdp_error *err);
/* Runs a program and takes what it prints (at most room - 1 bytes); argv ends with NULL. */
fsdp_status bench_run_program(char *const *argv, char *output, size_t room, fsdp_error *err);
int64_t bench_file_size(const char *path);

#endif
