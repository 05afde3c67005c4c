/* The device of a check: memory, of which it takes at most half, random data and medians. See gpu_check.h. */
#include "tests/gpu_check/gpu_check.h"

#include <stdlib.h>
#include <time.h>

/* --- the device ------------------------------------------------------------------------------- */

fsdp_status gpu_session_open(gpu_session *session, const gpu_results *results, fsdp_error *err)
{
    *session = (gpu_session){.results = results};
    FSDP_TRY(fsdp_device_open(results->options.device, NULL, &session->device, err));
    session->ops = session->device->ops;
    session->kernels = session->ops->kernels;
    FSDP_TRY(session->ops->stream_create(session->device, "compute", &session->stream, err));
    session->timer = gpu_timer_create();
    return session->timer ? FSDP_OK : fsdp_fail(err, FSDP_ERR_LIMIT, "no events to time with");
}

void gpu_session_close(gpu_session *session)
{
    gpu_timer_free(session->timer);
    gpu_session_dealloc(session, session->lead, session->lead_size);
    if (session->stream)
        session->ops->stream_free(session->stream);
    fsdp_device_close(session->device);
}

fsdp_status gpu_session_alloc(gpu_session *session, size_t size, void **data_out, fsdp_error *err)
{
    const double most = session->results->facts.memory / 2;
    *data_out = NULL;
    if (session->taken + (double)size > most)
        return fsdp_fail(err, FSDP_ERR_LIMIT,
                         "half of the device's memory, %.1f GiB, is too little for this check",
                         most / (1 << 30));
    *data_out = session->ops->alloc(session->device, size);
    if (!*data_out)
        return fsdp_fail(err, FSDP_ERR_LIMIT, "the device has no %zu bytes", size);
    session->taken += (double)size;
    return FSDP_OK;
}

void gpu_session_dealloc(gpu_session *session, void *data, size_t size)
{
    if (!data)
        return;
    session->ops->dealloc(session->device, data, size);
    session->taken -= (double)size;
}

fsdp_status gpu_session_sync(gpu_session *session, fsdp_error *err)
{
    return session->ops->sync(session->ops->record(session->stream), err);
}

/* --- time ------------------------------------------------------------------------------------- */

static int compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

double gpu_now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
}

fsdp_status gpu_session_lead(gpu_session *session, fsdp_error *err)
{
    const size_t most = (size_t)64 << 20, bytes = session->results->options.bytes;
    session->lead_size = bytes < most ? bytes : most;
    return gpu_session_alloc(session, session->lead_size, &session->lead, err);
}

/* It takes some 0.3 ms at 4 TB/s. */
static void give_lead(const gpu_session *session)
{
    for (int i = 0; i < 16 && session->lead; i++)
        session->kernels->fill(session->stream, session->lead, i, session->lead_size);
}

double gpu_median(double *values, int count)
{
    qsort(values, (size_t)count, sizeof *values, compare);
    return count % 2 ? values[count / 2] : (values[count / 2 - 1] + values[count / 2]) / 2;
}

fsdp_status gpu_session_time(gpu_session *session, gpu_work work, void *context,
                             double *seconds_out, fsdp_error *err)
{
    double seconds[GPU_RUNS];
    void *native = session->ops->native(session->stream);
    work(context, session->kernels, session->stream);
    for (int i = 0; i < GPU_RUNS; i++) {
        give_lead(session);
        bool is_timed = gpu_timer_begin(session->timer, native);
        work(context, session->kernels, session->stream);
        is_timed = gpu_timer_end(session->timer, native) && is_timed;
        FSDP_TRY(gpu_session_sync(session, err));
        seconds[i] = is_timed ? gpu_timer_seconds(session->timer) : -1;
        if (seconds[i] < 0)
            return fsdp_fail(err, FSDP_ERR_INTERNAL, "the device's events do not tell the time");
    }
    *seconds_out = gpu_median(seconds, GPU_RUNS);
    return FSDP_OK;
}

int gpu_session_launches(gpu_session *session, gpu_work work, void *context)
{
    void *native = session->ops->native(session->stream);
    if (!gpu_count_begin(native))
        return -1;
    work(context, session->kernels, session->stream);
    return gpu_count_end(native);
}

/* --- random data ------------------------------------------------------------------------------ */

/* splitmix64 */
static uint64_t next(uint64_t *state)
{
    uint64_t x = *state += 0x9e3779b97f4a7c15;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
    x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
    return x ^ (x >> 31);
}

void gpu_fill_bytes(void *data, size_t size, uint64_t seed)
{
    unsigned char *to = data;
    for (size_t i = 0; i < size; i += sizeof seed) {
        uint64_t value = next(&seed);
        for (size_t j = 0; j < sizeof value && i + j < size; j++)
            to[i + j] = (unsigned char)(value >> (8 * j));
    }
}

void gpu_fill_f32(float *data, size_t count, uint64_t seed, bool is_positive)
{
    for (size_t i = 0; i < count; i++) {
        float unit = (float)(next(&seed) >> 40) * 0x1p-24F;
        data[i] = is_positive ? unit : 2 * unit - 1;
    }
}

/* Numbers in [-1, 1): the upper halves of f32. */
void gpu_fill_bf16(uint16_t *data, size_t count, uint64_t seed)
{
    for (size_t i = 0; i < count; i++) {
        float value;
        gpu_fill_f32(&value, 1, next(&seed), false);
        union {
            float value;
            uint32_t bits;
        } both = {.value = value};
        data[i] = (uint16_t)(both.bits >> 16);
    }
}
