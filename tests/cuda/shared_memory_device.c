/*
 * Device "cuda" over the fake CUDA runtime, with memory that the host may touch, in place of cpu-async: tests
 * of the runtime that compute on the host run over streams that are late, over their events, and over
 * collectives that are work of streams. Host code that is submitted runs when the stream is done.
 *
 * FSDP_TEST_SEED chooses the order of the streams. A misuse of CUDA ends the program.
 */
#include "tests/cuda/fake_cudart.h"
#include "tests/support/ranks/worlds.h"

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

/* Those of the first device, which ends before the others begin. */
static fsdp_device_ops ops;
static fsdp_device_kernels kernels;

static void submit(fsdp_stream *stream, fsdp_work work, const void *args, size_t args_size)
{
    (void)args_size;
    if (ops.sync(ops.record(stream), NULL) == FSDP_OK)
        ops.issue(stream, work, (void *)args);
}

static fsdp_status open_shared(const fsdp_device_rank *rank, fsdp_device **device_out,
                               fsdp_error *err)
{
    FSDP_TRY(fsdp_device_open("cuda", rank, device_out, err));
    (*device_out)->ops = &ops;
    return FSDP_OK;
}

static void end(void)
{
    const char *misuse = fake_cudart_end();
    if (!misuse)
        return;
    fprintf(stderr, "misuse of CUDA: %s\n", misuse);
    _exit(1);
}

__attribute__((constructor)) static void begin(void)
{
    const char *seed = getenv("FSDP_TEST_SEED");
    const fake_cudart_plan plan = {.seed = seed ? strtoull(seed, NULL, 10) : 1, .is_open = true};
    const fsdp_device_rank first = {0};
    fsdp_device *device;
    fake_cudart_begin(&plan);
    if (fsdp_device_open("cuda", &first, &device, NULL) != FSDP_OK)
        abort();
    ops = *device->ops; /* the same for all devices */
    kernels = *device->ops->kernels;
    ops.kernels = &kernels;
    ops.is_host = true;
    ops.submit = submit;
    fsdp_device_close(device);
    worlds_open_async = open_shared;
    atexit(end);
}
