/*
 * A fault-injecting io back end, for tests: wraps another one, counts its calls and lets the n-th
 * one kill the process, fail, transfer less, or call back. Part of fsdp_testing, not of the library.
 *
 * The usual loop: run once without a plan and get the number of calls n from fsdp_io_fault_calls;
 * then run n times more, with plan.at = 1..n, and check the files each time.
 */
#ifndef FSDP_IO_FAULT_H
#define FSDP_IO_FAULT_H

#include "base/io/io.h"

typedef enum fsdp_io_call {
    FSDP_CALL_OPEN,            /* of an existing file */
    FSDP_CALL_CREATE,
    FSDP_CALL_PREAD,
    FSDP_CALL_PWRITE,
    FSDP_CALL_SIZE,
    FSDP_CALL_RESIZE,
    FSDP_CALL_ALLOCATE,
    FSDP_CALL_SYNC,
    FSDP_CALL_CLOSE,
    FSDP_CALL_LOCK,
    FSDP_CALL_RENAME,
    FSDP_CALL_UNLINK,
    FSDP_CALL_MKDIR,
    FSDP_CALL_RMDIR,
    FSDP_CALL_SYNC_DIR,
    FSDP_CALL_LIST,
    FSDP_CALL_INFO,
    FSDP_CALL_SPACE,
    FSDP_CALL_EXCHANGE,
    FSDP_CALL_COUNT
} fsdp_io_call;

/* Sets of calls: bit 1 << call. */
enum {
    FSDP_CALLS_ANY = (1 << FSDP_CALL_COUNT) - 1,
    FSDP_CALLS_WRITES = 1 << FSDP_CALL_CREATE | 1 << FSDP_CALL_PWRITE | 1 << FSDP_CALL_RESIZE |
                        1 << FSDP_CALL_ALLOCATE | 1 << FSDP_CALL_SYNC | 1 << FSDP_CALL_CLOSE |
                        1 << FSDP_CALL_RENAME | 1 << FSDP_CALL_UNLINK | 1 << FSDP_CALL_MKDIR |
                        1 << FSDP_CALL_RMDIR | 1 << FSDP_CALL_SYNC_DIR | 1 << FSDP_CALL_EXCHANGE
};

typedef enum fsdp_fault_action {
    FSDP_FAULT_NONE,           /* only count */
    FSDP_FAULT_KILL,           /* SIGKILL before the call takes effect */
    FSDP_FAULT_TEAR,           /* pread, pwrite: transfer a part, then SIGKILL; others: like KILL */
    FSDP_FAULT_ERRNO,          /* fail without effect (close does close, and then fails) */
    FSDP_FAULT_SHORT,          /* pread, pwrite: transfer a part; others: go through */
    FSDP_FAULT_CALL            /* call back first */
} fsdp_fault_action;

/* With part 0, a partial transfer has half of the requested bytes. */
typedef struct fsdp_fault_plan {
    unsigned calls;            /* which calls count; 0: any */
    int64_t at;                /* the call with the action, from 1; 0: none */
    bool forever;              /* and all counted calls after it */
    fsdp_fault_action action;
    int errnum;                /* for ERRNO */
    size_t part;               /* for TEAR and SHORT: bytes transferred at most */
    /* For CALL: 0 lets the call go through, a negative errno fails it. */
    int (*call)(void *user, fsdp_io_call call, const char *path);
    void *user;
} fsdp_fault_plan;

/* Borrows inner (NULL: fsdp_io_posix()) until fsdp_io_fault_free. plan NULL: only count. */
fsdp_status fsdp_io_fault_create(fsdp_io *inner, const fsdp_fault_plan *plan, fsdp_io **io_out,
                                 fsdp_error *err);
/* Call after all its files are closed. Accepts NULL. */
void fsdp_io_fault_free(fsdp_io *io);

/* Calls counted so far: those that plan.calls selects. */
int64_t fsdp_io_fault_calls(fsdp_io *io);

/* Reports every counted call before it is made. Set before other threads use io. */
typedef void (*fsdp_fault_trace)(void *user, int64_t n, fsdp_io_call call, const char *path);
void fsdp_io_fault_set_trace(fsdp_io *io, fsdp_fault_trace trace, void *user);

/* "pwrite", "sync_dir", ... */
const char *fsdp_io_call_name(fsdp_io_call call);

/*
 * A plan as text, CALL:N:ACTION[:forever]. CALL is a name as above, "any" or "writes"; ACTION is
 * "kill", "tear", "short" or the name of an errno: "pwrite:17:kill", "any:40:ENOSPC",
 * "sync:1:EIO:forever". Empty text is a plan that only counts.
 */
fsdp_status fsdp_fault_plan_parse(const char *text, fsdp_fault_plan *plan_out, fsdp_error *err);

#endif
