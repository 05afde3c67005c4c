/*
 * The trace of a rank: one JSON object per event and line, in the order in which the host issues them.
 * Formats are in docs/runtime.md.
 */
#ifndef FSDP_TRACE_H
#define FSDP_TRACE_H

#include "runtime/comm/comm_backend.h"

typedef struct fsdp_trace fsdp_trace;

/* path: "%r" in it is the rank. NULL path: events are only given to fsdp_trace_set_listener. The file is
 * truncated, and written line by line. */
fsdp_status fsdp_trace_open(const char *path, int rank, fsdp_trace **trace_out, fsdp_error *err);
/* The first failed write, if there was one. Accepts NULL. */
fsdp_status fsdp_trace_close(fsdp_trace *trace, fsdp_error *err);

typedef struct fsdp_trace_event {
    const char *event;         /* "unshard", "all_gather", ... */
    const char *unit;          /* "" for none */
    const char *state;         /* "idle", "forward", ...; NULL: left out */
    const fsdp_comm *comm;     /* NULL: not a collective */
    const fsdp_collective *call;
    const char *stream;        /* NULL: left out */
    int64_t bytes;             /* of the full buffer; -1: left out */
} fsdp_trace_event;

void fsdp_trace_step(fsdp_trace *trace, int64_t step); /* of the events that follow; accepts NULL */
void fsdp_trace_add(fsdp_trace *trace, const fsdp_trace_event *event);         /* accepts NULL */
/* For tests: called with every event, also. */
void fsdp_trace_set_listener(fsdp_trace *trace,
                             void (*listener)(void *context, const fsdp_trace_event *event), void *context);

#endif
