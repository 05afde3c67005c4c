/*
 * State between the device and the host: copies to staging memory, saves in the background beside
 * training, and loads from files. See gpu_check.h.
 */
#include "tests/gpu_check/gpu_steps.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/core/mem.h"
#include "base/core/pool.h"
#include "base/io/io.h"
#include "statedict/transfer/pipeline.h"
#include "statedict/transfer/read_target.h"
#include <fsdp/async_save.h>

enum { BLOCKS = 64, SAVES = 3, LOADS = 5, READ = 8 << 20, MOST_FILES = 64 };

static const double call_seconds = 5e-3; /* of a save whose copies run under the next steps */

/* 10 GB, as the goals say; 1 GB when it should be quick; or as much as the data of a kernel, when that is
 * small. At most a quarter of the device's memory, since gathers and gradients come on top. */
double gpu_state_bytes(const gpu_results *results)
{
    const gpu_options *options = &results->options;
    const double usual = options->quick ? 1e9 : 10e9, most = results->facts.memory / 4;
    const double wanted = options->judges_rates ? usual : (double)options->bytes;
    return wanted < most ? wanted : most;
}

/* A machine without room for checkpoints cannot tell anything about them. */
static void end_row(gpu_row *row, fsdp_status status, const fsdp_error *err)
{
    if (status == FSDP_ERR_NO_SPACE)
        gpu_skip_row(row, "%s; TMPDIR names another folder for checkpoints", err->text);
    else
        gpu_end_row(row, status, err);
}

/* --- device to staging memory ----------------------------------------------------------------- */

typedef struct staging_job {
    unsigned char *blocks[BLOCKS], *staging;
    size_t size; /* of a block */
} staging_job;

/* All blocks, as the copy of a save takes them. */
static void stage(void *context, const fsdp_device_kernels *kernels, fsdp_stream *stream)
{
    const staging_job *job = context;
    for (size_t i = 0; i < BLOCKS; i++)
        kernels->copy(stream, job->staging + i * job->size, job->blocks[i], job->size);
}

static fsdp_status fill_blocks(gpu_session *session, const staging_job *job, fsdp_error *err)
{
    const uint64_t seed = session->results->options.seed;
    unsigned char *block = fsdp_alloc_pages(job->size);
    fsdp_status status = block ? FSDP_OK : fsdp_fail_memory(err, "random data");
    for (size_t i = 0; i < BLOCKS && status == FSDP_OK; i++) {
        gpu_fill_bytes(block, block ? job->size : 0, seed + i);
        session->kernels->copy(session->stream, job->blocks[i], block, job->size);
        status = gpu_session_sync(session, err);
    }
    fsdp_free(block);
    return status;
}

static fsdp_status see_blocks(const staging_job *job, uint64_t seed, fsdp_error *err)
{
    unsigned char *block = fsdp_alloc_pages(job->size);
    fsdp_status status = block ? FSDP_OK : fsdp_fail_memory(err, "random data");
    for (size_t i = 0; i < BLOCKS && status == FSDP_OK; i++) {
        gpu_fill_bytes(block, job->size, seed + i);
        if (memcmp(block, job->staging + i * job->size, job->size) != 0)
            status = fsdp_fail(err, FSDP_ERR_INTERNAL, "block %zu is not what the device has", i);
    }
    fsdp_free(block);
    return status;
}

static fsdp_status run_staging(gpu_session *session, staging_job *job, gpu_row *row,
                               fsdp_error *err)
{
    const gpu_results *results = session->results;
    for (size_t i = 0; i < BLOCKS; i++) {
        void *block;
        FSDP_TRY(gpu_session_alloc(session, job->size, &block, err));
        job->blocks[i] = block;
    }
    job->staging = session->ops->alloc_staging(session->device, BLOCKS * job->size);
    if (!job->staging)
        return fsdp_fail(err, FSDP_ERR_LIMIT, "the host has no %zu pinned bytes",
                         BLOCKS * job->size);
    FSDP_TRY(fill_blocks(session, job, err));
    FSDP_TRY(gpu_session_time(session, stage, job, &row->seconds, err));
    FSDP_TRY(see_blocks(job, results->options.seed, err));
    gpu_rate_row(results, row, row->size, results->ceilings.to_host);
    return FSDP_OK;
}

fsdp_status gpu_check_staging(gpu_results *results, int argument, fsdp_error *err)
{
    staging_job job = {.size = (size_t)gpu_state_bytes(results) / BLOCKS};
    gpu_row *row = gpu_add_row(results, "staging/device-to-staging");
    gpu_session session;
    (void)argument;
    row->size = (double)(BLOCKS * job.size);
    fsdp_status status = gpu_session_open(&session, results, err);
    if (status == FSDP_OK)
        status = run_staging(&session, &job, row, err);
    if (status == FSDP_ERR_LIMIT)
        gpu_skip_row(row, "%s", err->text);
    else
        gpu_end_row(row, status, err);
    for (size_t i = 0; i < BLOCKS; i++)
        gpu_session_dealloc(&session, job.blocks[i], job.size);
    if (job.staging)
        session.ops->dealloc_staging(session.device, job.staging, BLOCKS * job.size);
    gpu_session_close(&session);
    return FSDP_OK;
}

/* --- saves in the background ------------------------------------------------------------------ */

enum { STALL, CALL, STEP, WORST_STEP, SAVE_ROWS };

static const char *const save_rows[SAVE_ROWS] = {"stall", "call", "step", "worst-step"};

typedef struct state_job {
    gpu_results *results;
    gpu_row *rows[4];
} state_job;

typedef struct save_times {
    double alone; /* the median of steps without saves */
    gpu_step_times beside;
    double stalls[SAVES];
    int save_count;
    int64_t bytes;
} save_times;

static fsdp_status save_once(toy *net, fsdp_async_saver *saver, const gpu_options *options,
                             save_times *times, fsdp_error *err)
{
    char path[4096];
    fsdp_async_report report;
    const int64_t number = times->save_count;
    fsdp_root_save_opts opts = {.save.step = &number, .save.overwrite = true};
    snprintf(path, sizeof path, "%s/async", options->work);
    FSDP_TRY(fsdp_async_save(saver, path, &opts, err));
    while (!fsdp_async_save_is_done(saver) && gpu_wants_step(&times->beside))
        FSDP_TRY(gpu_give_step(&times->beside, net, err));
    FSDP_TRY(gpu_end_steps(&times->beside, err));
    FSDP_TRY(fsdp_async_save_wait(saver, &report, err));
    times->stalls[times->save_count++] = report.stall_ms * 1e-3;
    times->bytes = report.bytes;
    return FSDP_OK;
}

static fsdp_status save_all(toy *net, const gpu_options *options, save_times *times,
                            fsdp_error *err)
{
    const fsdp_async_opts opts = {.allow_equal = true};
    fsdp_async_saver *saver = NULL;
    FSDP_TRY(gpu_time_steps(net, &times->alone, err));
    FSDP_TRY(gpu_open_times(&times->beside, net, err));
    FSDP_TRY(fsdp_async_saver_create(net->root, &opts, &saver, err));
    fsdp_status status = FSDP_OK;
    for (int i = 0; i < SAVES && status == FSDP_OK; i++)
        status = save_once(net, saver, options, times, err);
    fsdp_async_saver_free(saver);
    return status;
}

static void judge_saves(const state_job *job, save_times *times)
{
    const gpu_results *results = job->results;
    gpu_row *stall = job->rows[STALL], *call = job->rows[CALL];
    for (int i = 0; i < SAVE_ROWS; i++)
        job->rows[i]->size = (double)times->bytes;
    stall->seconds = call->seconds = gpu_median(times->stalls, times->save_count);
    gpu_rate_row(results, stall, stall->size, results->ceilings.to_host);
    gpu_rate_row(results, call, 1, 1 / call_seconds);
}

/* One step waits for the copies of a save, which the median hides. */
static void judge_steps(const state_job *job, save_times *times)
{
    const gpu_results *results = job->results;
    gpu_row *step = job->rows[STEP], *worst = job->rows[WORST_STEP];
    gpu_step_times *beside = &times->beside;
    if (beside->count == 0) {
        gpu_skip_row(step, "the saves were over before a step had ended");
        gpu_skip_row(worst, "the saves were over before a step had ended");
        return;
    }
    const double copies = (double)times->bytes / results->ceilings.to_host;
    step->seconds = gpu_median(beside->seconds, beside->count); /* sorts */
    worst->seconds = beside->seconds[beside->count - 1];
    gpu_rate_row(results, step, 1, 1 / times->alone);
    gpu_rate_row(results, worst, 1, 1 / (times->alone + copies));
}

static fsdp_status save_beside_steps(void *context, fsdp_world *world, fsdp_error *err)
{
    const state_job *job = context;
    save_times times = {0};
    toy net = {0};
    fsdp_status status = gpu_build_state(&net, world, job->results, err);
    if (status == FSDP_OK)
        status = save_all(&net, &job->results->options, &times, err);
    gpu_close_times(&times.beside);
    toy_free(&net);
    FSDP_TRY(status);
    judge_saves(job, &times);
    judge_steps(job, &times);
    return FSDP_OK;
}

fsdp_status gpu_check_async_save(gpu_results *results, int argument, fsdp_error *err)
{
    state_job job = {.results = results};
    gpu_ranks run = {
        .count = 1, .device = results->options.device, .body = save_beside_steps, .context = &job};
    (void)argument;
    for (int i = 0; i < SAVE_ROWS; i++)
        job.rows[i] = gpu_add_row(results, "async-save/%s", save_rows[i]);
    fsdp_status status = gpu_ranks_run(&run, err);
    for (int i = 0; i < SAVE_ROWS; i++)
        end_row(job.rows[i], status, err);
    return FSDP_OK;
}

/* --- loads ------------------------------------------------------------------------------------ */

/* Files that as many readers read as a load has, each every n-th piece. */
typedef struct read_job {
    int files[MOST_FILES];
    int64_t sizes[MOST_FILES];
    int count;
    size_t readers;
} read_job;

static fsdp_status read_file(const read_job *job, int file, size_t reader, unsigned char *buffer,
                             fsdp_error *err)
{
    const int64_t size = job->sizes[file];
    for (int64_t at = (int64_t)reader * READ; at < size; at += (int64_t)job->readers * READ) {
        const size_t wanted = (size_t)(size - at < READ ? size - at : READ);
        ssize_t n = pread(job->files[file], buffer, wanted, at);
        if (n != (ssize_t)wanted)
            return fsdp_fail_errno(err, n < 0 ? errno : EIO, "cannot read a file of a checkpoint");
    }
    return FSDP_OK;
}

static fsdp_status read_share(void *context, size_t reader, fsdp_error *err)
{
    const read_job *job = context;
    unsigned char *buffer = fsdp_alloc_pages(READ);
    fsdp_status status = buffer ? FSDP_OK : fsdp_fail_memory(err, "a buffer to read into");
    for (int i = 0; i < job->count && status == FSDP_OK; i++)
        status = read_file(job, i, reader, buffer, err);
    fsdp_free(buffer);
    return status;
}

static fsdp_status open_file(read_job *job, const char *path, fsdp_error *err)
{
    struct stat found;
    if (job->count == MOST_FILES)
        return fsdp_fail(err, FSDP_ERR_LIMIT, "more than %d files in a checkpoint", MOST_FILES);
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0 || fstat(file, &found) != 0)
        return fsdp_fail_errno(err, errno, "cannot read '%s'", path);
    job->files[job->count] = file;
    job->sizes[job->count++] = found.st_size;
    return FSDP_OK;
}

static fsdp_status open_shards(read_job *job, const char *folder, fsdp_error *err)
{
    char path[8192];
    DIR *entries = opendir(folder);
    fsdp_status status =
        entries ? FSDP_OK : fsdp_fail_errno(err, errno, "cannot read '%s'", folder);
    for (struct dirent *entry; status == FSDP_OK && (entry = readdir(entries));) {
        snprintf(path, sizeof path, "%s/%s", folder, entry->d_name);
        if (strncmp(entry->d_name, "shard-", 6) == 0)
            status = open_file(job, path, err);
    }
    if (entries)
        closedir(entries);
    return status;
}

/* As many as a load into a device's memory has. */
static int count_readers(void)
{
    const int64_t each = fsdp_block_reader_bytes(false) + FSDP_READ_SLOTS_BYTES;
    const int64_t most = FSDP_MEMORY_DEFAULT / each, cores = fsdp_pool_cores();
    return (int)(cores < most ? cores : most);
}

/* Returns bytes per second, of all shards of a checkpoint. */
static fsdp_status measure_reading(const char *folder, double *rate_out, fsdp_error *err)
{
    read_job job = {.readers = (size_t)count_readers()};
    double bytes = 0;
    fsdp_status status = open_shards(&job, folder, err);
    const double began = gpu_now();
    if (status == FSDP_OK)
        status = fsdp_parallel((int)job.readers, job.readers, read_share, &job, err);
    const double seconds = gpu_now() - began;
    for (int i = 0; i < job.count; i++) {
        bytes += (double)job.sizes[i];
        close(job.files[i]);
    }
    *rate_out = bytes / seconds;
    return status;
}

static fsdp_status measure_loads(toy *net, const state_job *job, const char *path, fsdp_error *err)
{
    const gpu_results *results = job->results;
    gpu_row *row = job->rows[0];
    double seconds[LOADS], rate = 0;
    FSDP_TRY(fsdp_root_save(net->root, path, NULL, err));
    FSDP_TRY(measure_reading(path, &rate, err)); /* now it is in the page cache */
    FSDP_TRY(measure_reading(path, &rate, err));
    for (int i = 0; i < LOADS; i++) {
        const double began = gpu_now();
        FSDP_TRY(fsdp_root_load(net->root, path, NULL, err));
        seconds[i] = gpu_now() - began;
    }
    const fsdp_memory memory = fsdp_root_memory(net->root);
    row->size = (double)(memory.now[FSDP_MEMORY_SHARD] + memory.now[FSDP_MEMORY_OPTIM]);
    row->seconds = gpu_median(seconds, LOADS);
    const double pinned = results->ceilings.to_device;
    gpu_rate_row(results, row, row->size, pinned > 0 && pinned < rate ? pinned : rate);
    return FSDP_OK;
}

static fsdp_status load_state(void *context, fsdp_world *world, fsdp_error *err)
{
    const state_job *job = context;
    char path[4096];
    toy net = {0};
    snprintf(path, sizeof path, "%s/loads", job->results->options.work);
    fsdp_status status = gpu_build_state(&net, world, job->results, err);
    if (status == FSDP_OK)
        status = gpu_step(&net, err);
    if (status == FSDP_OK)
        status = measure_loads(&net, job, path, err);
    toy_free(&net);
    (void)fsdp_io_remove_tree(NULL, path, NULL); /* memory for the next check */
    return status;
}

fsdp_status gpu_check_load(gpu_results *results, int argument, fsdp_error *err)
{
    state_job job = {.results = results};
    gpu_ranks run = {
        .count = 1, .device = results->options.device, .body = load_state, .context = &job};
    (void)argument;
    job.rows[0] = gpu_add_row(results, "load/page-cache");
    end_row(job.rows[0], gpu_ranks_run(&run, err), err);
    return FSDP_OK;
}
