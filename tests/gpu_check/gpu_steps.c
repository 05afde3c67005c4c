/* Steps of a model that is nothing but state, by the device's time. See gpu_steps.h. */
#include "tests/gpu_check/gpu_steps.h"

/* --- a model with its optimizer --------------------------------------------------------------- */

enum { LAYERS = 8, STATE_COPIES = 3 }; /* a parameter and two moments */

fsdp_status gpu_build_state(toy *net, fsdp_world *world, const gpu_results *results,
                            fsdp_error *err)
{
    const int64_t ranks = fsdp_world_size(world);
    const size_t each = (size_t)gpu_state_bytes(results) / STATE_COPIES / LAYERS / sizeof(float);
    const int64_t shape[] = {(int64_t)(each / 256 > 0 ? each / 256 : 1), 256};
    const fsdp_adamw_opts adamw = {.lr = 1e-3, .weight_decay = 0.01};
    FSDP_TRY(toy_begin_in(net, world, 1, &ranks, (const char *[]){"dp"}, err));
    FSDP_TRY(toy_add_weights(net, LAYERS, 2, shape, err));
    FSDP_TRY(toy_wrap(net, err));
    return toy_add_adamw(net, &adamw, err);
}

fsdp_status gpu_step(toy *net, fsdp_error *err)
{
    FSDP_TRY(toy_forward(net, NULL, err));
    FSDP_TRY(toy_backward(net, toy_touch_grad, err));
    return fsdp_optim_step(net->optim, err);
}

/* --- steps by the device's time --------------------------------------------------------------- */

fsdp_status gpu_open_times(gpu_step_times *times, toy *net, fsdp_error *err)
{
    fsdp_stream *stream = net->root->context->streams[FSDP_STREAM_COMPUTE];
    *times = (gpu_step_times){.native = stream->device->ops->native(stream)};
    for (int i = 0; i < 2; i++)
        times->timers[i] = gpu_timer_create();
    return times->timers[0] && times->timers[1]
               ? FSDP_OK
               : fsdp_fail(err, FSDP_ERR_LIMIT, "no events to time with");
}

void gpu_close_times(gpu_step_times *times)
{
    gpu_timer_free(times->timers[0]);
    gpu_timer_free(times->timers[1]);
}

bool gpu_wants_step(const gpu_step_times *times)
{
    return times->count < GPU_RUNS - 1; /* the last one comes with gpu_end_steps */
}

static fsdp_status read_time(gpu_step_times *times, int step, fsdp_error *err)
{
    const double seconds = gpu_timer_seconds(times->timers[step % 2]);
    if (seconds < 0)
        return fsdp_fail(err, FSDP_ERR_INTERNAL, "the device's events do not tell the time");
    times->seconds[times->count++] = seconds;
    return FSDP_OK;
}

fsdp_status gpu_give_step(gpu_step_times *times, toy *net, fsdp_error *err)
{
    const int number = times->given++;
    bool is_timed = gpu_timer_begin(times->timers[number % 2], times->native);
    FSDP_TRY(gpu_step(net, err));
    if (!gpu_timer_end(times->timers[number % 2], times->native) || !is_timed)
        return fsdp_fail(err, FSDP_ERR_INTERNAL, "the device records no events");
    return number > 0 ? read_time(times, number - 1, err) : FSDP_OK;
}

fsdp_status gpu_end_steps(gpu_step_times *times, fsdp_error *err)
{
    const int given = times->given;
    times->given = 0;
    return given > 0 ? read_time(times, given - 1, err) : FSDP_OK;
}

static fsdp_status give_steps(gpu_step_times *times, toy *net, fsdp_error *err)
{
    FSDP_TRY(gpu_step(net, err));
    while (gpu_wants_step(times))
        FSDP_TRY(gpu_give_step(times, net, err));
    return gpu_end_steps(times, err);
}

fsdp_status gpu_time_steps(toy *net, double *seconds_out, fsdp_error *err)
{
    gpu_step_times times;
    fsdp_status status = gpu_open_times(&times, net, err);
    if (status == FSDP_OK)
        status = give_steps(&times, net, err);
    if (status == FSDP_OK)
        *seconds_out = gpu_median(times.seconds, times.count);
    gpu_close_times(&times);
    return status;
}
