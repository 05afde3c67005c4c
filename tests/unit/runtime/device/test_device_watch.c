/* A watched device reports the stream that uses a block too early or frees it too early, on
 * either device. */
#include <criterion/criterion.h>

#include <string.h>

#include "runtime/device/device.h"

typedef struct watched_pair {
    fsdp_device *device;
    fsdp_stream *owner, *other;
    unsigned char block[64];
} watched_pair;

static fsdp_status nothing(void *args, fsdp_error *err)
{
    (void)args;
    (void)err;
    return FSDP_OK;
}

static void open_pair(watched_pair *pair, const char *device)
{
    memset(pair, 0, sizeof *pair);
    cr_assert_eq(fsdp_device_open(device, NULL, &pair->device, NULL), FSDP_OK);
    cr_assert_eq(fsdp_device_watch(&pair->device, NULL), FSDP_OK);
    const fsdp_device_ops *ops = pair->device->ops;
    cr_assert_str_eq(ops->name, device);
    cr_assert_eq(ops->stream_create(pair->device, "compute", &pair->owner, NULL), FSDP_OK);
    cr_assert_eq(ops->stream_create(pair->device, "reduce", &pair->other, NULL), FSDP_OK);
    ops->submit(pair->owner, nothing, "", 1);
    ops->own(pair->owner, pair->block, sizeof pair->block);
}

static void use(watched_pair *pair, fsdp_stream *stream)
{
    pair->device->ops->use(stream, pair->block + 10);
    pair->device->ops->submit(stream, nothing, "", 1);
}

static void follow(watched_pair *pair, fsdp_stream *stream, fsdp_stream *after)
{
    pair->device->ops->wait(stream, pair->device->ops->record(after));
}

/* Closes the pair and expects an error with these words. */
static fsdp_status close_pair(watched_pair *pair, const char *words)
{
    fsdp_error err = {0};
    const fsdp_device_ops *ops = pair->device->ops;
    cr_assert_eq(ops->sync(ops->record(pair->owner), &err), ops->check(pair->other, &err));
    fsdp_status status = ops->check(pair->owner, &err);
    ops->stream_free(pair->other);
    ops->stream_free(pair->owner);
    fsdp_device_close(pair->device);
    cr_assert_neq(strstr(err.text, words), NULL, "'%s' has not '%s'", err.text, words);
    return status;
}

static const char *const devices[] = {"cpu", "cpu-async"};

Test(device_watch, a_stream_that_waits_may_use_and_give_back)
{
    for (size_t i = 0; i < 2; i++) {
        watched_pair pair;
        open_pair(&pair, devices[i]);
        follow(&pair, pair.other, pair.owner);
        use(&pair, pair.other);
        follow(&pair, pair.owner, pair.other);
        pair.device->ops->disown(pair.owner, pair.block);
        cr_assert_eq(close_pair(&pair, ""), FSDP_OK);
    }
}

Test(device_watch, use_without_waiting_is_told)
{
    for (size_t i = 0; i < 2; i++) {
        watched_pair pair;
        open_pair(&pair, devices[i]);
        use(&pair, pair.other);
        cr_assert_eq(close_pair(&pair, "stream reduce uses 64 bytes of stream compute"),
                     FSDP_ERR_INTERNAL);
    }
}

Test(device_watch, giving_back_too_early_is_told)
{
    for (size_t i = 0; i < 2; i++) {
        watched_pair pair;
        open_pair(&pair, devices[i]);
        follow(&pair, pair.other, pair.owner);
        fsdp_event early = pair.device->ops->record(pair.other);
        use(&pair, pair.other);
        pair.device->ops->wait(pair.owner, early);
        pair.device->ops->disown(pair.owner, pair.block);
        cr_assert_eq(close_pair(&pair, "freed while stream reduce may use them"),
                     FSDP_ERR_INTERNAL);
    }
}

Test(device_watch, what_a_third_stream_has_waited_for_is_known)
{
    watched_pair pair;
    fsdp_stream *third;
    open_pair(&pair, "cpu-async");
    cr_assert_eq(pair.device->ops->stream_create(pair.device, "third", &third, NULL), FSDP_OK);
    follow(&pair, third, pair.owner);
    follow(&pair, pair.other, third);
    use(&pair, pair.other);
    follow(&pair, third, pair.other);
    follow(&pair, pair.owner, third);
    pair.device->ops->disown(pair.owner, pair.block);
    cr_assert_eq(pair.device->ops->sync(pair.device->ops->record(pair.owner), NULL), FSDP_OK);
    pair.device->ops->stream_free(third);
    cr_assert_eq(close_pair(&pair, ""), FSDP_OK);
}

/* A new stream has the number of the freed one. */
Test(device_watch, what_was_known_of_a_freed_stream_says_nothing_of_a_new_one)
{
    watched_pair pair;
    fsdp_stream *third;
    open_pair(&pair, "cpu");
    for (int i = 0; i < 2; i++) {
        cr_assert_eq(pair.device->ops->stream_create(pair.device, "third", &third, NULL), FSDP_OK);
        follow(&pair, third, pair.owner);
        use(&pair, third);
        if (i == 0) {
            use(&pair, third);
            follow(&pair, pair.owner, third);
            pair.device->ops->stream_free(third);
        }
    }
    pair.device->ops->disown(pair.owner, pair.block);
    pair.device->ops->stream_free(third);
    cr_assert_eq(close_pair(&pair, "freed while stream third may use them"), FSDP_ERR_INTERNAL);
}

Test(device_watch, a_block_that_was_owned_anew_forgets_what_was)
{
    watched_pair pair;
    open_pair(&pair, "cpu");
    follow(&pair, pair.other, pair.owner);
    use(&pair, pair.other);
    follow(&pair, pair.owner, pair.other);
    pair.device->ops->disown(pair.owner, pair.block);
    pair.device->ops->own(pair.other, pair.block, sizeof pair.block);
    use(&pair, pair.other);
    cr_assert_eq(close_pair(&pair, ""), FSDP_OK);
}

/* More events than are kept: a very old event counts as reached. */
Test(device_watch, an_old_event_holds_nobody_up)
{
    watched_pair pair;
    open_pair(&pair, "cpu-async");
    fsdp_event old = pair.device->ops->record(pair.owner);
    for (int i = 0; i < 5000; i++) {
        pair.device->ops->submit(pair.owner, nothing, "", 1);
        (void)pair.device->ops->record(pair.owner);
    }
    cr_assert(pair.device->ops->is_reached(old));
    pair.device->ops->wait(pair.other, old);
    use(&pair, pair.other);
    follow(&pair, pair.owner, pair.other);
    pair.device->ops->disown(pair.owner, pair.block);
    cr_assert_eq(close_pair(&pair, ""), FSDP_OK);
}

/* --- what it passes on ------------------------------------------------------------------------ */

static int filled;

static void count_fill(fsdp_stream *stream, void *to, int byte, size_t size)
{
    filled++;
    fsdp_device_host_kernels.fill(stream, to, byte, size);
}

/* Replaces the kernels of a device. */
static void count_fills(fsdp_device *device, fsdp_device_ops *ops, fsdp_device_kernels *kernels)
{
    *kernels = fsdp_device_host_kernels;
    kernels->fill = count_fill;
    *ops = *device->ops;
    ops->kernels = kernels;
    device->ops = ops;
}

Test(device_watch, kernels_are_those_of_the_watched_device)
{
    watched_pair pair;
    fsdp_device_ops ops;
    fsdp_device_kernels kernels;
    memset(&pair, 0, sizeof pair);
    cr_assert_eq(fsdp_device_open("cpu", NULL, &pair.device, NULL), FSDP_OK);
    count_fills(pair.device, &ops, &kernels);
    cr_assert_eq(fsdp_device_watch(&pair.device, NULL), FSDP_OK);
    cr_assert_eq(pair.device->ops->stream_create(pair.device, "compute", &pair.owner, NULL),
                 FSDP_OK);
    pair.device->ops->kernels->fill(pair.owner, pair.block, 7, sizeof pair.block);
    cr_expect_eq(pair.block[63], 7);
    cr_expect_eq(filled, 1);
    pair.device->ops->stream_free(pair.owner);
    fsdp_device_close(pair.device);
}

/* A rank waits for another one's stream, whose tickets say nothing of its own streams. */
Test(device_watch, waiting_for_another_ranks_stream_orders_none_of_ones_own)
{
    watched_pair pair, other;
    open_pair(&pair, "cpu-async");
    open_pair(&other, "cpu-async");
    for (int i = 0; i < 10; i++) {
        use(&other, other.owner);
        follow(&other, other.other, other.owner);
    }
    pair.device->ops->wait(pair.other, other.device->ops->record(other.other));
    use(&pair, pair.other);
    cr_assert_eq(close_pair(&pair, "stream reduce uses 64 bytes of stream compute"),
                 FSDP_ERR_INTERNAL);
    cr_assert_eq(close_pair(&other, ""), FSDP_OK);
}
