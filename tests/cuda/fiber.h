/*
 * Fibers: stacks on which a function runs until it switches back. AddressSanitizer is told of each switch.
 * A fiber belongs to the thread that creates it.
 */
#ifndef FSDP_FIBER_H
#define FSDP_FIBER_H

typedef struct fsdp_fiber fsdp_fiber;

/* Runs body(context), which must not return, at the first fsdp_fiber_enter. Ends the program without
 * memory. */
fsdp_fiber *fsdp_fiber_create(void (*body)(void *context), void *context);
void fsdp_fiber_free(fsdp_fiber *fiber);          /* accepts NULL; not from within the fiber */
/* Continues in the fiber until it leaves. */
void fsdp_fiber_enter(fsdp_fiber *fiber);
/* In the fiber: goes back to the caller of fsdp_fiber_enter. */
void fsdp_fiber_leave(fsdp_fiber *fiber);

#endif
