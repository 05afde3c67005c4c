/* Free blocks of a pool: only the stream that gave one back may get it again without waiting. */
#include "runtime/context/memory_pool.h"

#include <criterion/criterion.h>

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

Test(memory_pool, a_block_stays_with_its_stream)
{
    enum { SIZE = 8000 };
    fsdp_device *device = NULL;
    fsdp_stream *one = NULL, *other = NULL;
    cr_assert_eq(fsdp_device_open("cpu", &device, NULL), FSDP_OK);
    cr_assert_eq(device->ops->stream_create(device, "one", &one, NULL), FSDP_OK);
    cr_assert_eq(device->ops->stream_create(device, "other", &other, NULL), FSDP_OK);
    fsdp_memory_init(&pool, device);
    fsdp_block *first = take(one, SIZE);
    const void *data = first->data;
    give(first);
    fsdp_block *second = take(other, SIZE);
    cr_expect_neq(second->data, data, "of another stream");
    give(second);
    first = take(one, SIZE - SIZE / 16);
    cr_expect_eq(first->data, data, "a little larger than needed");
    give(first);
    first = take(one, SIZE / 2);
    cr_expect_neq(first->data, data, "much larger than needed");
    give(first);
    fsdp_memory_release(&pool);
    device->ops->stream_free(one);
    device->ops->stream_free(other);
    fsdp_device_close(device);
}
