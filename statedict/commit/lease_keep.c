/* Refreshes the lease of a run during long work: see fsdp_lease_keeper in commit.h. */
#include "base/core/clock.h"
#include "statedict/commit/commit.h"

enum { REFRESH_MS = FSDP_LEASE_SECONDS * 1000 / 3 };

void fsdp_lease_keep(fsdp_lease_keeper *keeper, fsdp_lease *lease, const fsdp_watch *watch)
{
    *keeper = (fsdp_lease_keeper){.lease = lease, .refresh_ms = fsdp_now_ms() + REFRESH_MS};
    if (watch)
        keeper->watch = *watch;
}

static int keep(void *context, int64_t done, int64_t total, const char *what)
{
    fsdp_lease_keeper *keeper = context;
    const fsdp_watch *watch = &keeper->watch;
    int64_t now = fsdp_now_ms();
    if (now >= keeper->refresh_ms) {
        keeper->refresh_ms = now + REFRESH_MS;
        if (fsdp_lease_refresh(keeper->lease, &keeper->lost) != FSDP_OK)
            return 1;
    }
    return watch->progress ? watch->progress(watch->context, done, total, what) : 0;
}

static void pass_notice(void *context, const char *text)
{
    const fsdp_lease_keeper *keeper = context;
    if (keeper->watch.notice)
        keeper->watch.notice(keeper->watch.context, text);
}

static bool pass_stopped(void *context)
{
    const fsdp_lease_keeper *keeper = context;
    return keeper->watch.stopped(keeper->watch.context);
}

fsdp_watch fsdp_lease_keeper_watch(fsdp_lease_keeper *keeper)
{
    if (!keeper->lease)
        return keeper->watch;
    bool is_asked = keeper->watch.stopped != NULL;
    return (fsdp_watch){.context = keeper,
                        .progress = keep,
                        .notice = pass_notice,
                        .stopped = is_asked ? pass_stopped : NULL};
}
