/*
 * Rows collectives: all-gather, reduce-scatter and all-reduce between ranks, next to the same of Open
 * MPI or gloo (bench_peer.c). A row's work is OP-BUFFERS-RANKS-SIZE, where the size is that of the
 * whole tensor. A run repeats short calls. All-gather and all-reduce are in place on both sides, as
 * units use them.
 */
#include "tests/bench/rows.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_SIZES = 16, BYTES_OF_A_RUN = 64 << 20, MOST_CALLS = 400, PAGE = 4096 };

static const struct {
    const char *name;
    fsdp_collective_kind kind;
} ops[] = {{"ag", FSDP_ALL_GATHER}, {"rs", FSDP_REDUCE_SCATTER}, {"ar", FSDP_ALL_REDUCE}};
enum { OPS = sizeof ops / sizeof *ops };

typedef struct collectives_plan {
    unsigned ops; /* bits */
    int sizes;
    int64_t size[MOST_SIZES];
    fsdp_dtype dtype;
    bool is_private;
} collectives_plan;

typedef struct collectives_job {
    const row_options *opts;
    collectives_plan plan;
    fsdp_ctl *ctl;
    fsdp_comm *comm;
    bench_peer *peer; /* of rank 0 */
    unsigned char *in, *out;
    int64_t peak_kib;
} collectives_job;

/* --- options ---------------------------------------------------------------------------------- */

typedef void (*take_word)(collectives_plan *plan, const char *word);

static void take_op(collectives_plan *plan, const char *word)
{
    for (int i = 0; i < OPS; i++) {
        if (strcmp(ops[i].name, word) != 0)
            continue;
        plan->ops |= 1U << i;
        return;
    }
    cli_usage_error("--ops '%s' is not one of ag, rs, ar", word);
}

static void take_size(collectives_plan *plan, const char *word)
{
    if (plan->sizes == MOST_SIZES)
        cli_usage_error("--sizes: at most %d", MOST_SIZES);
    plan->size[plan->sizes++] = cli_parse_size("--sizes", word);
}

static void take_words(collectives_plan *plan, const char *text, take_word take)
{
    char word[40];
    for (const char *at = text; at;) {
        size_t size = strcspn(at, ",");
        snprintf(word, sizeof word, "%.*s", (int)(size < sizeof word ? size : sizeof word - 1), at);
        take(plan, word);
        at = at[size] ? at + size + 1 : NULL;
    }
}

static collectives_plan make_plan(const row_options *opts)
{
    static const char *const kinds[] = {"pool", "private", NULL};
    static const char *const peers[] = {"openmpi", "gloo", NULL};
    collectives_plan plan = {.is_private = cli_parse_word("--buffers", opts->buffers, kinds) == 1};
    take_words(&plan, opts->ops, take_op);
    take_words(&plan, opts->sizes, take_size);
    plan.dtype = fsdp_dtype_from_typed(opts->dtype, strlen(opts->dtype));
    if (plan.dtype == FSDP_DTYPE_NONE)
        cli_usage_error("--dtype '%s' is not known", opts->dtype);
    if (opts->against)
        (void)cli_parse_word("--against", opts->against, peers);
    if (opts->peer && !opts->against)
        cli_usage_error("--peer means nothing without --against");
    return plan;
}

void bench_check_collectives(const row_options *opts)
{
    (void)make_plan(opts);
}

/* --- goals ------------------------------------------------------------------------------------ */

/* The ratio to reach, from docs/performance.md; 0: none. */
static double goal_beside_open_mpi(const collectives_job *job, int op, int64_t size)
{
    bool is_large = size >= (int64_t)256 << 20, is_small = size <= 64 << 10;
    int ranks = fsdp_comm_size(job->comm);
    if (ranks == 4 && !job->plan.is_private && size >= 1 << 20)
        return ops[op].kind == FSDP_REDUCE_SCATTER ? 5 : 1;
    if (ranks != 2)
        return 0;
    switch (ops[op].kind) {
    case FSDP_ALL_GATHER: return job->plan.is_private ? 0.4 : is_large ? 1.4 : 1;
    case FSDP_REDUCE_SCATTER: return !job->plan.is_private ? 5 : is_small ? 1.3 : 3;
    default: return job->plan.is_private ? (is_large ? 1.8 : 0.9) : is_large ? 3 : 1.4;
    }
}

static double goal_of(const collectives_job *job, int op, int64_t size)
{
    if (job->opts->against && strcmp(job->opts->against, "openmpi") == 0)
        return goal_beside_open_mpi(job, op, size);
    return fsdp_comm_size(job->comm) == 2 && !job->plan.is_private ? 4 : 0;
}

/* --- one run ---------------------------------------------------------------------------------- */

static int calls_of_a_run(int64_t size)
{
    int64_t calls = BYTES_OF_A_RUN / (size > 0 ? size : 1);
    return calls < 1 ? 1 : calls > MOST_CALLS ? MOST_CALLS : (int)calls;
}

static int64_t elements(const collectives_job *job, int64_t size)
{
    int64_t part = (int64_t)fsdp_dtype_size(job->plan.dtype) * fsdp_comm_size(job->comm);
    return (size + part - 1) / part * fsdp_comm_size(job->comm);
}

static fsdp_collective call_of(const collectives_job *job, int op, int64_t size)
{
    int64_t all = elements(job, size), part = all / fsdp_comm_size(job->comm);
    fsdp_collective call = {.kind = ops[op].kind,
                            .dtype = job->plan.dtype,
                            .in = job->in,
                            .out = job->in,
                            .count = ops[op].kind == FSDP_ALL_REDUCE ? all : part,
                            .unit = "bench"};
    if (ops[op].kind == FSDP_ALL_GATHER)
        call.in =
            job->in + (size_t)(fsdp_comm_rank(job->comm) * part) * fsdp_dtype_size(job->plan.dtype);
    if (ops[op].kind == FSDP_REDUCE_SCATTER)
        call.out = job->out;
    return call;
}

static fsdp_status run_ours(const collectives_job *job, int op, int64_t size, bench_times *times,
                            fsdp_error *err)
{
    const fsdp_collective call = call_of(job, op, size);
    int calls = calls_of_a_run(size);
    FSDP_TRY(fsdp_ctl_agree(job->ctl, cli_check_stop(err), err));
    FSDP_TRY(bench_barrier(job->comm, err));
    bench_clock began = bench_now();
    for (int i = 0; i < calls; i++)
        FSDP_TRY(fsdp_comm_run(job->comm, &call, err));
    FSDP_TRY(bench_barrier(job->comm, err));
    bench_add_time(times, &began);
    times->seconds[times->count - 1] /= calls;
    times->cpu[times->count - 1] /= calls;
    return FSDP_OK;
}

static fsdp_status run_peer(const collectives_job *job, int op, int64_t size, bench_times *times,
                            fsdp_error *err)
{
    char line[100];
    fsdp_status st = FSDP_OK;
    if (!job->opts->against)
        return FSDP_OK;
    snprintf(line, sizeof line, "%s %s %" PRId64 " %d\n", ops[op].name,
             fsdp_dtype_name(job->plan.dtype), elements(job, size), calls_of_a_run(size));
    if (job->peer)
        st = bench_peer_ask(job->peer, line, times, err);
    return fsdp_ctl_agree(job->ctl, st, err);
}

/* --- rows ------------------------------------------------------------------------------------- */

static void name_row(const collectives_job *job, int op, int64_t size, bench_row *row)
{
    static const char units[] = "\0KMG";
    int unit = 0;
    while (unit < 3 && size > 0 && size % 1024 == 0) {
        size /= 1024;
        unit++;
    }
    snprintf(row->work, sizeof row->work, "%s-%s-%d-%" PRId64 "%.1s", ops[op].name,
             job->opts->buffers, fsdp_comm_size(job->comm), size, &units[unit]);
}

static fsdp_status print_row(const collectives_job *job, int op, int64_t size,
                             const bench_times *ours, const bench_times *theirs)
{
    bool has_peer = theirs->count > 0;
    bench_row row = {.ours = ours,
                     .plain = has_peer ? theirs : NULL,
                     .met = true,
                     .bytes_needed = size,
                     .peak_kib = job->peak_kib};
    if (fsdp_comm_rank(job->comm) != 0)
        return FSDP_OK;
    name_row(job, op, size, &row);
    double goal = has_peer ? goal_of(job, op, size) : 0;
    if (goal > 0)
        bench_want_ratio(&row, goal);
    if (has_peer)
        snprintf(row.against, sizeof row.against, "%s", job->opts->against);
    fsdp_text_addf(&row.more, ", \"backend\": \"%s\", \"dtype\": \"%s\"",
                   fsdp_comm_backend(job->comm), fsdp_dtype_name(job->plan.dtype));
    return bench_print_row(job->opts, &row);
}

static fsdp_status take_buffers(collectives_job *job, size_t size, fsdp_error *err)
{
    unsigned char **buffers[] = {&job->in, &job->out};
    fsdp_status st = FSDP_OK;
    size = (size + PAGE) / PAGE * PAGE;
    for (int i = 0; i < 2; i++) {
        *buffers[i] =
            job->plan.is_private ? aligned_alloc(PAGE, size) : fsdp_comm_alloc(job->comm, size);
        if (*buffers[i])
            memset(*buffers[i], 0, size);
        else
            st = fsdp_fail(err, FSDP_ERR_LIMIT, "no memory for %zu bytes (%s)", size,
                           fsdp_comm_backend(job->comm));
    }
    return fsdp_ctl_agree(job->ctl, st, err);
}

static void give_buffers(collectives_job *job)
{
    unsigned char **buffers[] = {&job->in, &job->out};
    for (int i = 0; i < 2; i++) {
        if (job->plan.is_private)
            free(*buffers[i]);
        else
            fsdp_comm_dealloc(job->comm, *buffers[i]);
        *buffers[i] = NULL;
    }
}

static fsdp_status measure(collectives_job *job, int op, int64_t size, fsdp_error *err)
{
    bench_times ours = {0}, theirs = {0};
    for (int round = -1; round < job->opts->rounds; round++) {
        FSDP_TRY(run_ours(job, op, size, &ours, err));
        FSDP_TRY(run_peer(job, op, size, &theirs, err));
        if (round < 0) /* the round that does not count */
            ours.count = theirs.count = 0;
    }
    FSDP_TRY(bench_peak_of_ranks(job->ctl, &job->peak_kib, err));
    return fsdp_ctl_agree(job->ctl, print_row(job, op, size, &ours, &theirs), err);
}

static fsdp_status measure_all(collectives_job *job, fsdp_error *err)
{
    for (int i = 0; i < job->plan.sizes; i++) {
        int64_t size = job->plan.size[i];
        size_t bytes = (size_t)elements(job, size) * fsdp_dtype_size(job->plan.dtype);
        fsdp_status st = take_buffers(job, bytes, err);
        for (int op = 0; op < OPS && st == FSDP_OK; op++)
            if (job->plan.ops & 1U << op)
                st = measure(job, op, size, err);
        give_buffers(job);
        FSDP_TRY(st);
    }
    return FSDP_OK;
}

/* --- the ranks -------------------------------------------------------------------------------- */

static fsdp_status start_peer(collectives_job *job, fsdp_error *err)
{
    char program[BENCH_PATH], ranks[16];
    bool is_mpi = job->opts->against && strcmp(job->opts->against, "openmpi") == 0;
    char *mpi[] = {(char[]){"mpirun"},          (char[]){"-n"}, ranks,
                   (char[]){"--oversubscribe"}, program,        NULL};
    fsdp_status st = FSDP_OK;
    if (job->opts->against && fsdp_ctl_rank(job->ctl) == 0) {
        bench_find_peer(is_mpi ? "mpi_collectives_peer" : "gloo_collectives_peer", program);
        if (job->opts->peer)
            snprintf(program, sizeof program, "%s", job->opts->peer);
        snprintf(ranks, sizeof ranks, "%d", fsdp_ctl_size(job->ctl));
        if (bench_mpi_world() > 0)
            st = fsdp_fail(err, FSDP_ERR_USAGE, "--against under mpirun: use --np instead");
        else
            st = bench_peer_start(is_mpi ? mpi : mpi + 4, fsdp_ctl_size(job->ctl), &job->peer, err);
    }
    return fsdp_ctl_agree(job->ctl, st, err);
}

static fsdp_status run_job(collectives_job *job, fsdp_error *err)
{
    if (fsdp_comm_size(job->comm) < 2)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "collectives are between ranks: --np N or --threads N");
    FSDP_TRY(start_peer(job, err));
    return measure_all(job, err);
}

static fsdp_status run_rank(fsdp_world *world, const row_options *opts, fsdp_error *err)
{
    collectives_job job = {.opts = opts, .plan = make_plan(opts), .ctl = fsdp_world_ctl(world)};
    fsdp_mesh *mesh = NULL;
    FSDP_TRY(fsdp_world_mesh(world, 1, (int64_t[]){fsdp_world_size(world)},
                             (const char *[]){"ranks"}, &mesh, err));
    job.comm = fsdp_world_comm(world, mesh, 0, 0);
    fsdp_status st = run_job(&job, err);
    bench_peer_stop(job.peer);
    fsdp_mesh_free(mesh);
    return st;
}

fsdp_status bench_collectives(const row_options *opts, fsdp_error *err)
{
    (void)err;
    bench_launch(opts, run_rank);
}
