/*
 * An NCCL whose ranks are threads of one process, a library of its own that FSDP_NCCL_LIB names. It is as
 * late as NCCL may be: every result of a communicator that does not block may be pending, and a collective
 * runs on its stream when all ranks have come there; ranks that make different calls wait until they abort.
 * Tests get the plan by dlsym(library, "fake_nccl").
 */
#ifndef FSDP_FAKE_NCCL_H
#define FSDP_FAKE_NCCL_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>

typedef struct fake_nccl_plan {
    int version;               /* 0: 2.28.9 */
    int polls;                 /* a result is pending for so many questions */
    int rank;                  /* what follows is of this rank of any communicator; -1: of all */
    int fail_at, fail_code;    /* its n-th collective (1: the first) returns this ncclResult_t */
    int hang_at;               /* its n-th collective returns only when the communicator is aborted */
    int connect_at, connect_ms;        /* its n-th collective takes so long to return */
    int fail_part;             /* of a collective that is a group of calls, the first that does; 0: all */
    int async_at, async_code;  /* its n-th collective never runs, and this is found later */
    int init_code;             /* of ncclCommInitRankConfig, at once */
    int init_async_code;       /* the same, found later */
    int split_at, split_code;  /* its n-th ncclCommSplit returns this; rank is that in the parent */
    bool init_hangs, split_hangs;      /* the latter: the n-th split */
    bool root_runs_ahead;      /* a broadcast is done for its root as soon as that has come */
    atomic_bool destroy_hangs; /* ncclCommDestroy of one that blocks, as long as this is set */
    bool is_alone;             /* ranks are processes: communicators are made, and no call ends */
    const char *last_error;    /* of ncclGetLastError */
} fake_nccl_plan;

typedef struct fake_nccl_control {
    /* The test sets these. */
    fake_nccl_plan plan;
    /* Gives a stream host work. */
    void (*launch)(void *stream, void (*work)(void *), void *argument);
    /* NULL: of malloc. */
    void *(*alloc)(size_t size);
    void (*dealloc)(void *data);
    /* The GPU that the calling thread has chosen, of which an NCCL before 2.30 serves one rank only; NULL:
     * each rank has its own. */
    int (*gpu)(void);
    /* Communicators, operations, blocks and registrations that were not given back, and calls that NCCL does
     * not allow; 0 at the end of a test. */
    int (*alive)(void);
    int (*misuses)(void);
    int (*splits)(void);       /* communicators that were split from others, so far */
    int (*registrations)(void);        /* so far */
    int (*launch_threads)(void);       /* that NCCL would have started for calls, so far */
} fake_nccl_control;

#endif
