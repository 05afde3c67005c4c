/* Frames: the heads of all messages of the control plane, and the names of the calls in them. */
#ifndef FSDP_CTL_FRAME_H
#define FSDP_CTL_FRAME_H

#include "statedict/ctl/ctl_backend.h"

/* "fsC3": another last digit when frames change, so that two versions refuse each other. */
enum { FRAME_MAGIC = 0x66734333, FRAME_VERSION = 0xff };

typedef enum frame_kind {
    FRAME_CALL = 1, /* to rank 0: my call, and the outcome of my own work */
    FRAME_WAITING,  /* from rank 0: my call too, but others are late */
    FRAME_VERDICT,  /* from rank 0: all made this call, and this is the one outcome */
    FRAME_DATA,     /* one piece of the call's data follows */
    FRAME_LEAVE, /* the sender's control plane is broken, and this is why */
    FRAME_WORKING   /* the sender is not in a call, and will be later: left_ms from now on */
} frame_kind;

typedef enum call_kind {
    CALL_ALLGATHER = 1,
    CALL_BROADCAST,
    CALL_AGREE,
    CALL_BARRIER,
    CALL_SEND,
    CALL_RECV
} call_kind;

/* In front of everything that is sent. A status that is not FSDP_OK is followed by its text. */
typedef struct frame {
    uint32_t magic, kind, call;
    int32_t root;
    uint64_t size, at, calls;
    int32_t status, rank, errnum;
    int32_t left_ms; /* VERDICT and WAITING: how long rank 0 will wait from now on; WORKING */
    char public_call[FSDP_CTL_CALL]; /* "fsdp_root_save"; "": the caller makes this call itself */
} frame;

_Static_assert(sizeof(frame) == FSDP_CTL_FRAME, "frames have no padding");

#endif
