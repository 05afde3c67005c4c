/* Streams of cpu-async: work beyond the room of a stream waits, and runs in its order. */
#include <criterion/criterion.h>
#include <unistd.h>

#include "runtime/device/device.h"

enum { WORK = 1000 };

static int done, wrong;

/* The first one is late, so that the stream is full before it ends. */
static fsdp_status count(void *args, fsdp_error *err)
{
    const int *number = args;
    (void)err;
    if (*number == 0)
        usleep(50000);
    wrong += *number != done++;
    return FSDP_OK;
}

Test(device_async, work_beyond_the_room_of_a_stream_waits_for_its_turn)
{
    fsdp_device *device;
    fsdp_stream *stream;
    cr_assert_eq(fsdp_device_open("cpu-async", NULL, &device, NULL), FSDP_OK);
    const fsdp_device_ops *ops = device->ops;
    cr_assert_eq(ops->stream_create(device, "compute", &stream, NULL), FSDP_OK);
    for (int i = 0; i < WORK; i++)
        ops->submit(stream, count, &i, sizeof i);
    cr_assert_eq(ops->sync(ops->record(stream), NULL), FSDP_OK);
    cr_expect_eq(done, WORK);
    cr_expect_eq(wrong, 0);
    ops->stream_free(stream);
    fsdp_device_close(device);
}
