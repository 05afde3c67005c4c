/*
 * Progress and notices of a call (fsdp_watch): workers count bytes, one of them reports the sum. Progress
 * also sends the other ranks a sign of life.
 */
#ifndef FSDP_METER_H
#define FSDP_METER_H

#include <fsdp/checkpoint.h>
#include <stdatomic.h>

typedef struct fsdp_meter {
    const fsdp_watch *watch;
    const char *phase;         /* stands before names, as in "check: model.weight"; NULL: none */
    int64_t total;
    atomic_llong done;
    atomic_llong next_ms;      /* time of the next report */
    atomic_bool cancelled;
    atomic_flag reporting;
    fsdp_ctl *ctl;             /* gets signs of life for the other ranks; may be NULL */
    uintptr_t ctl_thread;      /* the one thread that may use ctl */
} fsdp_meter;

void fsdp_meter_init(fsdp_meter *meter, const fsdp_watch *watch, int64_t total);
/* Counts bytes; FSDP_ERR_CANCELLED once the user said stop. what: a name, printable or not. */
fsdp_status fsdp_meter_add(fsdp_meter *meter, int64_t bytes, const char *what, size_t what_size,
                           fsdp_error *err);
fsdp_status fsdp_meter_check(fsdp_meter *meter, fsdp_error *err);
/* A call inside another one, whose bytes count as a part of it. Zero-initialise but meter; it is the context
 * of the watch for the call, and ended with the bytes that were expected of it. */
typedef struct fsdp_meter_part { fsdp_meter *meter; int64_t done; } fsdp_meter_part;
fsdp_watch fsdp_meter_part_watch(fsdp_meter_part *part);
fsdp_status fsdp_meter_part_end(fsdp_meter_part *part, int64_t bytes, fsdp_error *err);
/* From now on the calling thread also sends signs of life to the other ranks of ctl. */
void fsdp_meter_join(fsdp_meter *meter, fsdp_ctl *ctl);
/*
 * A sign of life: the other ranks wait for this one half a deadline from now on, or a whole one before a
 * wait without signs (an fsync). Does nothing on threads that did not join, and when the sign would not
 * extend the wait. Has the type of the callback in fsdp_shard_opts.
 */
void fsdp_meter_alive(void *meter, bool long_wait);
void fsdp_notice(const fsdp_watch *watch, const char *format, ...) FSDP_PRINTF(2, 3);

#endif
