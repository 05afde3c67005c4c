/*
 * Progress and notices of a call (fsdp_watch): workers count bytes, one of them reports the sum. Progress
 * also tells the other ranks that this one is alive.
 */
#ifndef FSDP_METER_H
#define FSDP_METER_H

#include <fsdp/checkpoint.h>
#include <stdatomic.h>

typedef struct fsdp_meter {
    const fsdp_watch *watch;
    int64_t total;
    atomic_llong done;
    atomic_llong next_ms;      /* when to tell again */
    atomic_bool cancelled;
    atomic_flag reporting;
    fsdp_ctl *ctl;             /* the other ranks are told that this one is at work; may be NULL */
    uintptr_t ctl_thread;      /* the one thread that may use ctl */
} fsdp_meter;

void fsdp_meter_init(fsdp_meter *meter, const fsdp_watch *watch, int64_t total);
/* Counts bytes; FSDP_ERR_CANCELLED once the user said stop. what: a name, printable or not. */
fsdp_status fsdp_meter_add(fsdp_meter *meter, int64_t bytes, const char *what, size_t what_size,
                           fsdp_error *err);
fsdp_status fsdp_meter_check(fsdp_meter *meter, fsdp_error *err);
/* From now on what is done is told to the other ranks as well, by the calling thread. */
void fsdp_meter_join(fsdp_meter *meter, fsdp_ctl *ctl);
/*
 * Something is done, so this rank is alive: the others wait for it half a deadline from now on, or a
 * whole one when a wait begins in which nothing can be said (an fsync). Says so only on the thread
 * that joined, and only when it is news. In the form of fsdp_shard_opts.
 */
void fsdp_meter_alive(void *meter, bool long_wait);
void fsdp_notice(const fsdp_watch *watch, const char *format, ...) FSDP_PRINTF(2, 3);

#endif
