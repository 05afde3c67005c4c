/*
 * The parts that benches share. A bench measures the library next to what the plain file system, memcpy or
 * another library does with the same bytes, and prints rows:
 *
 *   bench.c              options -> a command
 *   bench_times.c        durations, and two sides that take turns
 *   bench_disk.c         the plain file system
 *   bench_peer.c         another program
 *   bench_launch.c       the ranks of fsdp_launch
 *   checkpoint/, train/  rows about files; rows about collectives and steps
 *
 * States and their values are those of fsdp-bench (tools/bench). In come row_options, out come files and rows
 * on standard output.
 */
#ifndef FSDP_ROWS_H
#define FSDP_ROWS_H

#include "tools/bench/bench.h"

/* --- options ---------------------------------------------------------------------------------- */

typedef struct step_options step_options;      /* bench_step.h */
typedef struct trainer_options trainer_options;        /* bench_trainer.h */

typedef struct row_options {
    cli_common common;
    step_options *step;        /* options of step; train has some of them */
    trainer_options *trainer;  /* options of train alone */
    const char *command;
    int argc;                      /* as the program was started: fsdp_launch takes its part */
    char **argv;
    uint64_t given;                /* bits of the options that were given; see bench.c */
    uint64_t seed;
    bool counts_ranks;             /* --np or --threads was given */
    const char *deadline;          /* as given; ranks of fsdp_launch know better what is good */
    int deadline_ms;
    int64_t size;                  /* bytes of the state that is measured with */
    int rounds;
    const char *dir, *peer;
    const char *ops, *sizes, *dtype, *buffers, *against;   /* of collectives */
    const char *cases;             /* of convert; NULL: all */
} row_options;

/* --- commands --------------------------------------------------------------------------------- */

fsdp_status bench_measure(const row_options *opts, fsdp_error *err);
/* Work of ranks that fsdp_launch starts: these end the program. */
fsdp_status bench_collectives(const row_options *opts, fsdp_error *err);
fsdp_status bench_unshard(const row_options *opts, fsdp_error *err);
fsdp_status bench_copies(const row_options *opts, fsdp_error *err);
fsdp_status bench_step(const row_options *opts, fsdp_error *err);
fsdp_status bench_trainer(const row_options *opts, fsdp_error *err);
/* Ends the program with a usage error where options make no sense. */
void bench_check_collectives(const row_options *opts);
void bench_check_convert(const row_options *opts);

/* --- ranks ------------------------------------------------------------------------------------ */

/*
 * Runs body as the ranks of fsdp_launch, which takes its options out of the command line, and ends the
 * program. Rank 0 prints; ctl's deadline is long, since ranks wait for what another one measures alone.
 */
typedef fsdp_status (*bench_world_body)(fsdp_world *world, const row_options *opts, fsdp_error *err);
_Noreturn void bench_launch(const row_options *opts, bench_world_body body);
/* Nobody has said how many ranks there are: first one in this process, then `ranks` processes. Otherwise as
 * above. */
_Noreturn void bench_launch_twice(const row_options *opts, bench_world_body body, int ranks);
/* Collective. A barrier of the communicator, which is faster than one of the control plane. */
fsdp_status bench_barrier(fsdp_comm *comm, fsdp_error *err);
/* Collective. The largest resident size of a rank. */
fsdp_status bench_peak_of_ranks(fsdp_ctl *ctl, int64_t *kib_out, fsdp_error *err);

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
/* The path of a program next to this one. BENCH_PATH bytes of capacity. */
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
fsdp_status bench_print_row(const row_options *opts, bench_row *row);
/* ratio of the medians: plain / ours */
double bench_ratio(const bench_times *ours, const bench_times *plain);
/* "ratio >= 0.85" */
void bench_want_ratio(bench_row *row, double least);

fsdp_status bench_save_rows(const row_options *opts, const char *dir, fsdp_error *err);
fsdp_status bench_load_rows(const row_options *opts, const char *dir, fsdp_error *err);
fsdp_status bench_reshard_rows(const row_options *opts, const char *dir, fsdp_error *err);
fsdp_status bench_many_rows(const row_options *opts, const char *dir, fsdp_error *err);
fsdp_status bench_manifest_rows(const row_options *opts, const char *dir, fsdp_error *err);
fsdp_status bench_compress_rows(const row_options *opts, const char *dir, fsdp_error *err);
fsdp_status bench_convert_rows(const row_options *opts, const char *dir, fsdp_error *err);

/* Row many-save, for bench_many_rows. */
fsdp_status bench_measure_many_save(const row_options *opts, const bench_model *model, const char *dir,
                                    int world, fsdp_error *err);

/* The state that most rows work with: so many f32 matrices. */
enum { BENCH_TENSORS = 64 };

/* This rank's shards of a model's state, filled in. */
fsdp_status bench_make_shards(const bench_model *model, const bench_state_opts *state, int rank,
                              fsdp_sd **sd_out, fsdp_error *err);
/* Saves a model's state by `world` threads, without fsync. */
fsdp_status bench_save_model(const row_options *opts, const bench_model *model,
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
