/* Free blocks of a pool: until its stream is done with one, no other stream gets it. */
#include "runtime/context/memory_pool.h"

#include <criterion/criterion.h>
#include <stdatomic.h>
#include <time.h>

static fsdp_memory_pool pool;

static fsdp_block *take(fsdp_stream *stream, size_t size)
{
    const fsdp_memory_request request = {.size = size, .stream = stream, .owner = "test"};
    fsdp_block *block = NULL;
    cr_assert_eq(fsdp_memory_take(&pool, &request, &block, NULL), FSDP_OK);
    return block;
}

static void give(fsdp_block *block)
{
    fsdp_memory_give(&pool, block, pool.device->ops->record(block->stream));
}

static atomic_bool may_end;

static fsdp_status wait_until(void *args, fsdp_error *err)
{
    atomic_bool *const *is_true = args;
    (void)err;
    while (!atomic_load(*is_true))
        nanosleep(&(struct timespec){.tv_nsec = 100000}, NULL);
    return FSDP_OK;
}

Test(memory_pool, a_block_stays_with_its_stream_until_that_is_done)
{
    enum { SIZE = 8000 };
    fsdp_device *device = NULL;
    fsdp_stream *one = NULL, *other = NULL;
    cr_assert_eq(fsdp_device_open("cpu-async", NULL, &device, NULL), FSDP_OK);
    cr_assert_eq(device->ops->stream_create(device, "one", &one, NULL), FSDP_OK);
    cr_assert_eq(device->ops->stream_create(device, "other", &other, NULL), FSDP_OK);
    fsdp_memory_init(&pool, device);
    fsdp_block *first = take(one, SIZE);
    const void *data = first->data;
    atomic_bool *end = &may_end;
    device->ops->submit(one, wait_until, &end, sizeof end);
    give(first);
    fsdp_block *second = take(other, SIZE);
    cr_expect_neq(second->data, data, "still in use");
    first = take(one, SIZE - SIZE / 16);
    cr_expect_eq(first->data, data, "by the same stream, a little larger than needed");
    give(first);
    first = take(one, SIZE / 2);
    cr_expect_neq(first->data, data, "much larger than needed");
    give(first);
    atomic_store(&may_end, true);
    cr_assert_eq(device->ops->sync(device->ops->record(one), NULL), FSDP_OK);
    first = take(other, SIZE);
    cr_expect_eq(first->data, data, "its stream is done");
    give(first);
    give(second);
    fsdp_memory_release(&pool);
    device->ops->stream_free(one);
    device->ops->stream_free(other);
    fsdp_device_close(device);
}
