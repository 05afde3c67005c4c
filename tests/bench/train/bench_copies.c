/*
 * Rows chunk-cat, copy-out and cast: the copies of a step with the parameters of a block of GPT-2 over
 * four ranks, against a memcpy that reads and writes as many bytes. All ranks do it at once.
 */
#include "tests/bench/rows.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { RANKS = 4, PARAMS = 12, CALLS = 4, PAGE = 4096 };

/* First dim and elements per row, as PyTorch's Conv1D has them. */
static const int64_t block[PARAMS][2] = {
    {768, 1}, {768, 1}, {768, 2304}, {2304, 1}, {768, 768},  {768, 1},
    {768, 1}, {768, 1}, {768, 3072}, {3072, 1}, {3072, 768}, {768, 1},
};

typedef struct copy_job {
    const row_options *opts;
    fsdp_world *world;
    fsdp_comm *comm;
    unsigned char *from, *to;
    fsdp_rect rects[RANKS * PARAMS];
    size_t rect_count, moved; /* bytes read and written */
} copy_job;

static int64_t block_elements(void)
{
    int64_t count = 0;
    for (int i = 0; i < PARAMS; i++)
        count += block[i][0] * block[i][1];
    return count;
}

/* --- the rectangles --------------------------------------------------------------------------- */

static void add_rect(copy_job *job, const fsdp_rect *rect)
{
    size_t both = fsdp_dtype_size(rect->to_type) + fsdp_dtype_size(rect->from_type);
    job->rects[job->rect_count++] = *rect;
    job->moved += both * (size_t)(rect->rows * rect->width);
}

/*
 * Packed, rank r's chunks of all parameters lie together, at r times the length of a rank's row:
 * chunk-cat packs gradients so, copy-out takes parameters out of what was gathered.
 */
static void list_block(copy_job *job, fsdp_dtype from_type, fsdp_dtype to_type, bool packs)
{
    int64_t row = block_elements() / RANKS, at = 0, whole = 0;
    for (int i = 0; i < PARAMS; i++) {
        int64_t chunk = block[i][0] / RANKS * block[i][1];
        int64_t from = packs ? whole : at, to = packs ? at : whole;
        add_rect(job, &(fsdp_rect){.to = job->to + (size_t)to * fsdp_dtype_size(to_type),
                                   .from = job->from + (size_t)from * fsdp_dtype_size(from_type),
                                   .to_type = to_type,
                                   .from_type = from_type,
                                   .rows = RANKS,
                                   .width = chunk,
                                   .to_pitch = packs ? row : chunk,
                                   .from_pitch = packs ? chunk : row});
        at += chunk;
        whole += RANKS * chunk;
    }
}

/* The shards one after the other, as copy-in casts them. */
static void list_shards(copy_job *job, fsdp_dtype from_type, fsdp_dtype to_type)
{
    int64_t at = 0;
    for (int i = 0; i < PARAMS; i++) {
        int64_t count = block[i][0] * block[i][1];
        add_rect(job, &(fsdp_rect){.to = job->to + (size_t)at * fsdp_dtype_size(to_type),
                                   .from = job->from + (size_t)at * fsdp_dtype_size(from_type),
                                   .to_type = to_type,
                                   .from_type = from_type,
                                   .rows = 1,
                                   .width = count,
                                   .to_pitch = count,
                                   .from_pitch = count});
        at += count;
    }
}

/* The matrices, cut along their last dim: each rank gets a piece of every row. */
static void list_columns(copy_job *job, fsdp_dtype from_type, fsdp_dtype to_type)
{
    int64_t row = block_elements() / RANKS, at = 0, whole = 0;
    for (int i = 0; i < PARAMS; i++) {
        int64_t width = block[i][1] / RANKS;
        for (int rank = 0; rank < RANKS && width > 0; rank++)
            add_rect(job, &(fsdp_rect){.to = job->to +
                                             (size_t)(rank * row + at) * fsdp_dtype_size(to_type),
                                       .from = job->from + (size_t)(whole + rank * width) *
                                                               fsdp_dtype_size(from_type),
                                       .to_type = to_type,
                                       .from_type = from_type,
                                       .rows = block[i][0],
                                       .width = width,
                                       .to_pitch = width,
                                       .from_pitch = block[i][1]});
        at += block[i][0] * width;
        whole += block[i][0] * block[i][1];
    }
}

/* --- runs ------------------------------------------------------------------------------------- */

static void copy_rects(const copy_job *job)
{
    fsdp_rects_copy(job->rects, job->rect_count);
}

static void copy_plainly(const copy_job *job)
{
    memcpy(job->to, job->from, job->moved / 2);
}

static fsdp_status run(const copy_job *job, void (*once)(const copy_job *job), bench_times *times,
                       fsdp_error *err)
{
    FSDP_TRY(fsdp_ctl_agree(fsdp_world_ctl(job->world), cli_check_stop(err), err));
    FSDP_TRY(bench_barrier(job->comm, err));
    bench_clock began = bench_now();
    for (int i = 0; i < CALLS; i++)
        once(job);
    bench_add_time(times, &began);
    times->seconds[times->count - 1] /= CALLS;
    times->cpu[times->count - 1] /= CALLS;
    return FSDP_OK;
}

/* Measures the job's rectangles, prints the row `work`, and empties the list of rectangles. */
static fsdp_status measure(copy_job *job, const char *work, fsdp_error *err)
{
    bench_times ours = {0}, plain = {0};
    bench_row row = {.ours = &ours, .plain = &plain, .bytes_needed = (int64_t)job->moved};
    for (int round = -1; round < job->opts->rounds; round++) {
        FSDP_TRY(run(job, copy_rects, &ours, err));
        FSDP_TRY(run(job, copy_plainly, &plain, err));
        if (round < 0) /* the round that does not count */
            ours.count = plain.count = 0;
    }
    job->rect_count = job->moved = 0;
    FSDP_TRY(bench_peak_of_ranks(fsdp_world_ctl(job->world), &row.peak_kib, err));
    if (fsdp_world_rank(job->world) != 0)
        return FSDP_OK;
    snprintf(row.work, sizeof row.work, "%s", work);
    snprintf(row.against, sizeof row.against, "memcpy of as many bytes");
    bench_want_ratio(&row, 0.7);
    return bench_print_row(job->opts, &row);
}

static const fsdp_dtype pairs[][2] = {
    {FSDP_F32, FSDP_F32}, {FSDP_BF16, FSDP_BF16}, {FSDP_F32, FSDP_BF16}, {FSDP_BF16, FSDP_F32}};

typedef enum copy_shape { SHARDS, PACKS, UNPACKS, COLUMNS } copy_shape;

static fsdp_status measure_shape(copy_job *job, copy_shape shape, int pair, fsdp_error *err)
{
    fsdp_dtype from = pairs[pair][0], to = pairs[pair][1];
    char work[32];
    if (shape == SHARDS)
        list_shards(job, from, to);
    else if (shape == COLUMNS)
        list_columns(job, from, to);
    else
        list_block(job, from, to, shape == PACKS);
    snprintf(work, sizeof work, "%s-%s-%s%s", job->opts->command, fsdp_dtype_name(from),
             fsdp_dtype_name(to), shape == COLUMNS ? "-columns" : "");
    return measure(job, work, err);
}

static fsdp_status measure_command(copy_job *job, fsdp_error *err)
{
    /* copy-out casts nothing: what is gathered has the parameter's type */
    static const struct {
        const char *command;
        copy_shape shape;
        int first, last;
    } rows[] = {{"chunk-cat", PACKS, 0, 3},
                {"chunk-cat", COLUMNS, 0, 1},
                {"copy-out", UNPACKS, 0, 1},
                {"cast", SHARDS, 2, 3},
                {"cast", COLUMNS, 2, 3}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        for (int pair = rows[i].first; pair <= rows[i].last; pair++)
            if (strcmp(rows[i].command, job->opts->command) == 0)
                FSDP_TRY(measure_shape(job, rows[i].shape, pair, err));
    return FSDP_OK;
}

/* --- ranks ------------------------------------------------------------------------------------ */

static fsdp_status prepare(copy_job *job, fsdp_mesh **mesh_out, fsdp_error *err)
{
    size_t bytes = ((size_t)block_elements() * sizeof(float) + PAGE) / PAGE * PAGE;
    FSDP_TRY(fsdp_world_mesh(job->world, 1, (int64_t[]){fsdp_world_size(job->world)},
                             (const char *[]){"ranks"}, mesh_out, err));
    job->comm = fsdp_world_comm(job->world, *mesh_out, 0, 0);
    job->from = aligned_alloc(PAGE, bytes);
    job->to = aligned_alloc(PAGE, bytes);
    if (!job->from || !job->to)
        return fsdp_fail(err, FSDP_ERR_LIMIT, "out of memory");
    memset(job->from, 0x3c, bytes); /* ordinary numbers in both types */
    memset(job->to, 0, bytes);
    return FSDP_OK;
}

static fsdp_status run_rank(fsdp_world *world, const row_options *opts, fsdp_error *err)
{
    copy_job job = {.opts = opts, .world = world};
    fsdp_mesh *mesh = NULL;
    fsdp_status st = fsdp_ctl_agree(fsdp_world_ctl(world), prepare(&job, &mesh, err), err);
    if (st == FSDP_OK)
        st = fsdp_ctl_agree(fsdp_world_ctl(world), measure_command(&job, err), err);
    free(job.from);
    free(job.to);
    fsdp_mesh_free(mesh);
    return st;
}

fsdp_status bench_copies(const row_options *opts, fsdp_error *err)
{
    (void)err;
    bench_launch(opts, run_rank);
}
