/*
 * The flow trace: each step of a save, load or training step reports a line to a watcher, so that tests/flow
 * can compare the pages docs/flow_*.md with the calls that were made.
 *
 * Without a watcher a call is one load and one branch; nothing is formatted. Lines are about files,
 * boxes and blocks, never about elements. Only tests set a watcher.
 */
#ifndef FSDP_FLOW_H
#define FSDP_FLOW_H

#include <fsdp/box.h>

typedef struct fsdp_flow_watcher {
    /* step is the source file, as in "statedict/save/save.c". Called on the thread that does the step. */
    void (*report)(void *context, const char *step, const char *text);
    void *context;
} fsdp_flow_watcher;

/* One watcher for the process, borrowed; NULL ends it. Not while an operation is under way. */
void fsdp_flow_watch(const fsdp_flow_watcher *watcher);

void fsdp_flow(const char *step, const char *format, ...) FSDP_PRINTF(2, 3);

/* "verb 'name' [lo:end,...]" */
void fsdp_flow_box(const char *step, const char *verb, const char *name, size_t name_size,
                   const fsdp_box *box);

#endif
