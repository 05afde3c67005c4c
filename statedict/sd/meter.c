/* Progress and notices of a call: see meter.h. */
#include "statedict/sd/meter.h"

#include "base/core/clock.h"
#include "base/core/pool.h"
#include "statedict/ctl/ctl_backend.h"

#include "base/text.h"
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

enum { REPORT_EVERY_MS = 100 };

void fsdp_meter_init(fsdp_meter *meter, const fsdp_watch *watch, int64_t total)
{
    meter->watch = watch;
    meter->phase = NULL;
    meter->total = total;
    meter->ctl = NULL;
    atomic_init(&meter->done, 0);
    atomic_init(&meter->next_ms, 0);
    atomic_init(&meter->cancelled, false);
    atomic_flag_clear(&meter->reporting);
}

static void report_progress(fsdp_meter *meter, int64_t done, const char *what, size_t what_size)
{
    int64_t now = fsdp_now_ms();
    if (done < meter->total && now < atomic_load(&meter->next_ms))
        return;
    if (atomic_flag_test_and_set(&meter->reporting))
        return;
    char name[160], line[200];
    fsdp_printable(what, what_size, name, sizeof name);
    if (meter->phase)
        snprintf(line, sizeof line, "%s%s%s", meter->phase, what_size > 0 ? ": " : "", name);
    atomic_store(&meter->next_ms, now + REPORT_EVERY_MS);
    if (meter->watch->progress(meter->watch->context, done, meter->total,
                               meter->phase ? line : name) != 0)
        atomic_store(&meter->cancelled, true);
    atomic_flag_clear(&meter->reporting);
}

fsdp_status fsdp_meter_check(fsdp_meter *meter, fsdp_error *err)
{
    if (atomic_load(&meter->cancelled))
        return fsdp_fail(err, FSDP_ERR_CANCELLED, "stopped on request; nothing was changed");
    return FSDP_OK;
}

fsdp_status fsdp_meter_add(fsdp_meter *meter, int64_t bytes, const char *what, size_t what_size,
                           fsdp_error *err)
{
    if (!meter)
        return FSDP_OK;
    if (bytes > 0)
        fsdp_meter_alive(meter, false);
    if (!meter->watch || !meter->watch->progress)
        return FSDP_OK;
    report_progress(meter, atomic_fetch_add(&meter->done, bytes) + bytes, what, what_size);
    return fsdp_meter_check(meter, err);
}

/* The progress of the inner call, which reports one at a time. */
static int count_part(void *context, int64_t done, int64_t total, const char *what)
{
    fsdp_meter_part *part = context;
    int64_t bytes = done - part->done;
    (void)total;
    part->done = done;
    return fsdp_meter_add(part->meter, bytes, what, strlen(what), NULL) != FSDP_OK;
}

static bool part_stopped(void *context)
{
    const fsdp_watch *watch = ((const fsdp_meter_part *)context)->meter->watch;
    return watch && watch->stopped && watch->stopped(watch->context);
}

fsdp_watch fsdp_meter_part_watch(fsdp_meter_part *part)
{
    return (fsdp_watch){.context = part, .progress = count_part, .stopped = part_stopped};
}

fsdp_status fsdp_meter_part_end(fsdp_meter_part *part, int64_t bytes, fsdp_error *err)
{
    int64_t rest = bytes - part->done;
    part->done = bytes;
    return rest != 0 ? fsdp_meter_add(part->meter, rest, "", 0, err)
                     : fsdp_meter_check(part->meter, err);
}

void fsdp_meter_join(fsdp_meter *meter, fsdp_ctl *ctl)
{
    meter->ctl = ctl;
    meter->ctl_thread = fsdp_thread_number();
}

void fsdp_meter_alive(void *context, bool long_wait)
{
    const fsdp_meter *meter = context;
    if (meter->ctl && meter->ctl_thread == fsdp_thread_number())
        fsdp_ctl_report_working(meter->ctl, meter->ctl->deadline_ms / (long_wait ? 1 : 2));
}

void fsdp_notice(const fsdp_watch *watch, const char *format, ...)
{
    if (!watch || !watch->notice)
        return;
    char text[FSDP_ERROR_TEXT];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    watch->notice(watch->context, text);
}
