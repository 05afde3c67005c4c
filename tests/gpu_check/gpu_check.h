/*
 * gpu-check: measures and checks everything that runs on a GPU, on a machine that has nothing but a driver.
 *
 *   gpu_check.c       options; the order of the checks, and how long each may take
 *   check_process.c   a process per check: a fault of a kernel, or one that hangs, costs that check alone
 *   check_rows.c      goals; rows as lines and as JSON
 *   gpu_session.c     a device with memory, random data and medians; gpu_events.c: the calls of CUDA
 *   ceilings.c        the copies of the device and its bf16 product (cublaslt.c), to which rows are compared
 *   kernels.c         each kernel on random data equals the host's, and its rate, and its launches
 *   transfers.c       copies to staging memory, saves beside steps (gpu_steps.c), loads
 *   rank_checks.c     ranks that share the GPU (gpu_ranks.c): collectives, ranks that are lost
 *   nccl_checks.c     ranks over NCCL, on one GPU and on several
 *   gpu_training.c    a training that equals the host's; checkpoints on other numbers of ranks
 *   gpu_scenarios.c   the scenarios of docs/scenarios.md, with gpu_scene.c and gpu_wide.c
 *   build_kernels.c   --build
 *
 * In: a device of runtime/device, and the runtime above it. Out: rows, which lie in memory that the processes
 * share. The first process never calls CUDA, which does not survive a fork.
 */
#ifndef FSDP_GPU_CHECK_H
#define FSDP_GPU_CHECK_H

#include "runtime/device/device.h"
#include "base/text.h"

enum { GPU_ROWS = 160, GPU_NAME = 40, GPU_NOTE = 400, GPU_RUNS = 20 };

typedef enum gpu_verdict { GPU_PASSED, GPU_FAILED, GPU_SKIPPED } gpu_verdict;

typedef struct gpu_row {
    char name[GPU_NAME];
    double size;               /* bytes of the data, or floating-point operations */
    double seconds;            /* the median of one run; 0: not timed */
    double achieved, bound;    /* bytes or operations per second; 0: none */
    double goal;               /* the least achieved / bound; 0: none */
    gpu_verdict verdict;
    char note[GPU_NOTE];       /* the reason, or a version */
} gpu_row;

/* Rates that other rows are compared with; 0: not measured. */
typedef struct gpu_ceilings {
    double device_copy, to_device, to_host;
} gpu_ceilings;

/* The machine, as the first check finds it. */
typedef struct gpu_facts {
    char name[256], driver[32], runtime[32], cublaslt[64];
    double memory;             /* bytes; 0: there is no GPU, as `missing` says */
    int gpus;                  /* that CUDA shows */
    char missing[FSDP_ERROR_TEXT];
} gpu_facts;

typedef struct gpu_options {
    bool quick, build;
    double slow;               /* times the seconds of the table */
    const char *only, *json;
    const char *device;        /* "cuda:0" */
    const char *folder;        /* of this program, and of sources and other programs next to it */
    const char *work;          /* a new folder for checkpoints */
    uint64_t seed;
    size_t bytes;              /* of the data of a kernel */
    bool judges_rates;         /* data is large enough for goals to hold */
} gpu_options;

/* Shared by all processes; a check adds rows and ceilings. */
typedef struct gpu_results {
    gpu_options options;
    gpu_facts facts;
    gpu_ceilings ceilings;
    int count;
    gpu_row rows[GPU_ROWS];
} gpu_results;

/* A check runs in its own process. Failures of the check itself are rows; the status is for what kept it
 * from being made. `argument` is the table's. */
typedef fsdp_status (*gpu_check_body)(gpu_results *results, int argument, fsdp_error *err);
typedef struct gpu_check {
    const char *name;          /* rows begin with it */
    gpu_check_body body;
    int argument;
    int seconds, quick_seconds;        /* that it may take */
} gpu_check;

/* --- rows: check_rows.c ----------------------------------------------------------------------- */

/* The next row; named as printf does. It has passed until something fails. */
gpu_row *gpu_add_row(gpu_results *results, const char *format, ...) FSDP_PRINTF(2, 3);
/* NULL: --only leaves the row out, and its work need not be done. */
gpu_row *gpu_add_wanted_row(gpu_results *results, const char *format, ...) FSDP_PRINTF(2, 3);
void gpu_fail_row(gpu_row *row, const char *format, ...) FSDP_PRINTF(2, 3);
void gpu_skip_row(gpu_row *row, const char *format, ...) FSDP_PRINTF(2, 3);
/* `moved` bytes or operations in the time of the row, next to a bound; the goal is that of the table. */
void gpu_rate_row(const gpu_results *results, gpu_row *row, double moved, double bound);
/* The status of the calls that the row is about. */
void gpu_end_row(gpu_row *row, fsdp_status status, const fsdp_error *err);

void gpu_print_heading(const gpu_results *results);
void gpu_print_row(const gpu_row *row);
/* "N passed, N failed, N skipped"; true without failures. */
bool gpu_print_sum(const gpu_results *results);
/* Whether the file can be written at all, before minutes of checks. */
fsdp_status gpu_try_json(const char *path, fsdp_error *err);
fsdp_status gpu_write_json(const gpu_results *results, const char *path, fsdp_error *err);

/* --- processes: check_process.c --------------------------------------------------------------- */

/* NULL: there is no memory. */
gpu_results *gpu_results_create(void);
/* Runs the check in a process that is ended after so many seconds; prints its rows. */
void gpu_run_check(gpu_results *results, const gpu_check *check, double seconds);
/* SIGINT, SIGTERM and SIGHUP end the check at hand, and no other begins. */
void gpu_catch_signals(void);
bool gpu_stopped(void);
/* Runs a program with its output in a file, and ends it after so many seconds; FSDP_ERR_NOT_FOUND when it is
 * not there. */
fsdp_status gpu_run_program(char *const *argv, const char *output, double seconds, int *exit_out,
                            fsdp_error *err);

/* --- a device: gpu_session.c ------------------------------------------------------------------ */

typedef struct gpu_session {
    const gpu_results *results;
    fsdp_device *device;
    const fsdp_device_ops *ops;
    const fsdp_device_kernels *kernels;
    fsdp_stream *stream;
    void *timer;
    double taken;              /* bytes of device memory */
    void *lead;                /* NULL: runs begin on an idle device */
    size_t lead_size;
} gpu_session;

/* Call gpu_session_close in any case. */
fsdp_status gpu_session_open(gpu_session *session, const gpu_results *results, fsdp_error *err);
void gpu_session_close(gpu_session *session);
/* At most half of the device's memory, together. */
fsdp_status gpu_session_alloc(gpu_session *session, size_t size, void **data_out, fsdp_error *err);
void gpu_session_dealloc(gpu_session *session, void *data, size_t size);
/* Waits for the stream. */
fsdp_status gpu_session_sync(gpu_session *session, fsdp_error *err);

/* Work for the stream, once. */
typedef void (*gpu_work)(void *context, const fsdp_device_kernels *kernels, fsdp_stream *stream);
/* The median of at least GPU_RUNS runs by the device's events, after one that is not counted. */
fsdp_status gpu_session_time(gpu_session *session, gpu_work work, void *context, double *seconds_out,
                             fsdp_error *err);
/* From now on the device has other work while the host prepares a run, for work whose preparation takes about
 * as long as the work itself. */
fsdp_status gpu_session_lead(gpu_session *session, fsdp_error *err);
/* Launches of kernels in one run; -1: they cannot be counted. */
int gpu_session_launches(gpu_session *session, gpu_work work, void *context);

double gpu_now(void);                                  /* seconds of the host */
double gpu_median(double *values, int count);          /* sorts */
/* Random bytes; random numbers in [-1, 1) or, with is_positive, in [0, 1). */
void gpu_fill_bytes(void *data, size_t size, uint64_t seed);
void gpu_fill_f32(float *data, size_t count, uint64_t seed, bool is_positive);
void gpu_fill_bf16(uint16_t *data, size_t count, uint64_t seed);

/* --- CUDA: gpu_events.c ----------------------------------------------------------------------- */

/* "CUDA 13.0, which needs NVIDIA driver 580.65.06 or later": the runtime that this program is linked with. */
void gpu_spell_runtime(char *out, size_t out_size);
/* Facts of the GPU that was opened. */
void gpu_read_facts(gpu_facts *facts);
/* NULL: no memory. */
void *gpu_timer_create(void);
void gpu_timer_free(void *timer);      /* accepts NULL */
bool gpu_timer_begin(void *timer, void *native_stream);
bool gpu_timer_end(void *timer, void *native_stream);
double gpu_timer_seconds(void *timer); /* waits; negative: a failure */
/* Between the two calls the stream's work is recorded, and not done. */
bool gpu_count_begin(void *native_stream);
int gpu_count_end(void *native_stream);        /* kernels; -1: it failed */

/* --- bf16 product: cublaslt.c ----------------------------------------------------------------- */

typedef struct gpu_product gpu_product;
/* C = A^T B of n x n matrices in columns, f32 sums. FSDP_ERR_NOT_FOUND: no library. version_out has 64
 * bytes. */
fsdp_status gpu_product_open(int64_t n, void *workspace, size_t workspace_size, char *version_out,
                             gpu_product **product_out, fsdp_error *err);
void gpu_product_close(gpu_product *product);  /* accepts NULL */
/* A code of cuBLAS, 0 for success. */
int gpu_product_run(const gpu_product *product, const void *a, const void *b, void *c, void *native_stream);

/* --- checks ----------------------------------------------------------------------------------- */

fsdp_status gpu_check_device(gpu_results *results, int argument, fsdp_error *err);
fsdp_status gpu_check_copies(gpu_results *results, int argument, fsdp_error *err);
fsdp_status gpu_check_product(gpu_results *results, int argument, fsdp_error *err);
int gpu_kernel_count(void);
const char *gpu_kernel_name(int kernel);
fsdp_status gpu_check_kernel(gpu_results *results, int kernel, fsdp_error *err);
double gpu_state_bytes(const gpu_results *results);    /* of the state that the next three move */
fsdp_status gpu_check_staging(gpu_results *results, int argument, fsdp_error *err);
fsdp_status gpu_check_load(gpu_results *results, int argument, fsdp_error *err);
fsdp_status gpu_check_async_save(gpu_results *results, int argument, fsdp_error *err);
fsdp_status gpu_check_collectives(gpu_results *results, int ranks, fsdp_error *err);
fsdp_status gpu_check_training(gpu_results *results, int ranks, fsdp_error *err);
fsdp_status gpu_check_reload(gpu_results *results, int ranks, fsdp_error *err);
enum { GPU_RANK_ABORTS, GPU_RANK_IS_LATE };
fsdp_status gpu_check_failure(gpu_results *results, int how, fsdp_error *err);
fsdp_status gpu_check_scenarios(gpu_results *results, int ranks, fsdp_error *err);
fsdp_status gpu_check_nccl(gpu_results *results, int argument, fsdp_error *err);
fsdp_status gpu_check_scaling(gpu_results *results, int gpus, fsdp_error *err);

/* --build: compiles the kernels again and becomes the program that has them; returns only on failure. */
fsdp_status gpu_build_and_become(const gpu_options *options, int argc, char **argv, fsdp_error *err);

#endif
