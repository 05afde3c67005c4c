/* The device that the launcher gives a rank: a build for debugging watches it without --check, so
 * that a block which is used or given back too early fails the streams. */
#include <criterion/criterion.h>
#include <string.h>

#include "runtime/context/memory_pool.h"
#include "runtime/context/work.h"

#include <fsdp/launch.h>

#ifdef NDEBUG
enum { IS_WATCHED_ALWAYS = 0 };
#else
enum { IS_WATCHED_ALWAYS = 1 };
#endif

typedef enum pool_use { WAITS, USES_EARLY, GIVES_EARLY } pool_use;

/* The stream `other` uses a block of `owner`, and it is given back. */
static fsdp_status use_block(fsdp_device *device, fsdp_stream *owner, fsdp_stream *other,
                             pool_use how, fsdp_error *err)
{
    const fsdp_memory_request request = {
        .class = FSDP_MEMORY_GRAD, .stream = owner, .size = 64, .owner = "a test"};
    fsdp_memory_pool pool;
    fsdp_block *block;
    fsdp_memory_init(&pool, device);
    FSDP_TRY(fsdp_memory_take_zeroed(&pool, &request, &block, err));
    if (how != USES_EARLY)
        fsdp_stream_follow(other, owner);
    fsdp_work_cast(other, block->data, FSDP_U8, block->data, FSDP_U8, 64);
    const fsdp_event read = fsdp_stream_now(other);
    fsdp_memory_give(&pool, block, how == GIVES_EARLY ? (fsdp_event){0} : read);
    fsdp_status status = device->ops->sync(read, err);
    fsdp_memory_release(&pool);
    return status;
}

static int run(void *context, fsdp_world *world, int argc, char **argv)
{
    fsdp_device *device = world->parts.device;
    fsdp_error *errors = context;
    (void)argc, (void)argv;
    for (pool_use how = WAITS; how <= GIVES_EARLY; how++) {
        fsdp_stream *owner, *other;
        if (device->ops->stream_create(device, "compute", &owner, NULL) != FSDP_OK ||
            device->ops->stream_create(device, "reduce", &other, NULL) != FSDP_OK)
            return 1;
        errors[how].status = use_block(device, owner, other, how, &errors[how]);
        device->ops->stream_free(other);
        device->ops->stream_free(owner);
    }
    return 0;
}

static void expect(const char *check, bool is_watched)
{
    char *argv[] = {"test", "--threads", "1", "--device", "cpu-async", (char *)check, NULL};
    fsdp_error errors[GIVES_EARLY + 1] = {0};
    cr_assert_eq(fsdp_launch(check ? 6 : 5, argv, run, errors), 0);
    cr_assert_eq(errors[WAITS].status, FSDP_OK, "%s", errors[WAITS].text);
    cr_assert_eq(errors[USES_EARLY].status, is_watched ? FSDP_ERR_INTERNAL : FSDP_OK);
    cr_assert_eq(errors[GIVES_EARLY].status, is_watched ? FSDP_ERR_INTERNAL : FSDP_OK);
    if (is_watched)
        cr_assert(strstr(errors[USES_EARLY].text, "stream reduce uses 64 bytes of stream compute"),
                  "%s", errors[USES_EARLY].text);
}

Test(launched_device, a_build_for_debugging_watches_it)
{
    expect(NULL, IS_WATCHED_ALWAYS);
}

Test(launched_device, check_watches_it)
{
    expect("--check", true);
}
