/*
 * The thread of a save waits for a stream of a watched device while the program's thread gives it
 * an error: a plain program, so that ThreadSanitizer can watch both.
 */
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "runtime/device/device.h"

enum { ROUNDS = 50, WAITS = 1000 };

/* As a saver waits for the copies of a wave, until it hears of the error. */
static void *wait_for_copies(void *context)
{
    static fsdp_error err;
    const fsdp_event *copied = context;
    const fsdp_device_ops *ops = copied->stream->device->ops;
    err = (fsdp_error){0};
    for (int i = 0; i < WAITS && err.status == FSDP_OK; i++)
        err.status = ops->sync(*copied, &err);
    return &err;
}

/* The stream `reduce` uses a block of `compute` that it has not waited for. */
static void use_early(fsdp_device *device, fsdp_stream *compute, fsdp_stream *reduce)
{
    static unsigned char block[64];
    const fsdp_device_ops *ops = device->ops;
    ops->kernels->fill(compute, block, 1, sizeof block);
    ops->own(compute, block, sizeof block);
    ops->use(reduce, block);
    ops->disown(compute, block);
}

static int run_round(void)
{
    static const char *const names[] = {"compute", "reduce", "staging"};
    fsdp_device *device = NULL;
    fsdp_stream *streams[3];
    pthread_t saver;
    void *seen;
    if (fsdp_device_open("cpu-async", NULL, &device, NULL) != FSDP_OK ||
        fsdp_device_watch(&device, NULL) != FSDP_OK)
        return 1;
    for (int i = 0; i < 3; i++)
        if (device->ops->stream_create(device, names[i], &streams[i], NULL) != FSDP_OK)
            return 1;
    fsdp_event copied = device->ops->record(streams[2]);
    if (pthread_create(&saver, NULL, wait_for_copies, &copied) != 0)
        return 1;
    use_early(device, streams[0], streams[1]);
    pthread_join(saver, &seen);
    const fsdp_error *err = seen;
    bool is_right = err->status == FSDP_OK || strstr(err->text, "without waiting");
    is_right = is_right && device->ops->check(streams[0], NULL) == FSDP_ERR_INTERNAL;
    for (int i = 0; i < 3; i++)
        device->ops->stream_free(streams[i]);
    fsdp_device_close(device);
    if (!is_right)
        fprintf(stderr, "the saver got status %d, '%s'\n", (int)err->status, err->text);
    return !is_right;
}

int main(void)
{
    int failed = 0;
    for (int i = 0; i < ROUNDS; i++)
        failed += run_round();
    return failed > 0;
}
