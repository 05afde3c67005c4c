/*
 * Who comes to a listener, and says what: ranks of this job, ranks of another, port scanners. A pending has
 * to say a hello first; until then it is one of a bounded number who wait at the listener.
 */
#ifndef FSDP_LISTENER_H
#define FSDP_LISTENER_H

#include <fsdp/digest.h>
#include <fsdp/status.h>
#include <poll.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    FSDP_HELLO_MAGIC = 0x31647366, /* "fsd1": another number when these messages change */
    FSDP_LISTENER_PENDING = 64
};

typedef enum fsdp_hello_purpose {
    FSDP_HELLO_RENDEZVOUS = 1,       /* to rank 0: I am here */
    FSDP_HELLO_LINK,           /* to another rank: what I send you comes this way */
    FSDP_HELLO_DATA            /* the same for tensors, in both directions */
} fsdp_hello_purpose;

/* The first bytes of every connection. */
typedef struct fsdp_hello {
    uint32_t magic, purpose;
    int32_t rank, size, to;
    int32_t port;              /* MEET: where this rank listens */
    uint8_t job[FSDP_SHA256_SIZE];     /* digest of the job's id */
} fsdp_hello;

_Static_assert(sizeof(fsdp_hello) == 56, "hellos have no padding");

fsdp_hello fsdp_hello_make(fsdp_hello_purpose purpose, int rank, int size, int to,
                           const uint8_t job[FSDP_SHA256_SIZE]);
/* Is it of another rank of this job, to this rank, for that purpose? */
bool fsdp_hello_is_for(const fsdp_hello *hello, fsdp_hello_purpose purpose, int rank, int size,
                       const uint8_t job[FSDP_SHA256_SIZE]);

typedef struct fsdp_pending {
    int fd;
    size_t got;
    fsdp_hello hello;
} fsdp_pending;

/* Zero-initialise, then listener. */
typedef struct fsdp_listener {
    int fd;              /* owned */
    int count;
    bool lacks_fd;           /* somebody is at the listener for whom this process may open none */
    fsdp_pending pending[FSDP_LISTENER_PENDING];    /* the oldest first */
} fsdp_listener;

void fsdp_listener_release(fsdp_listener *listener);

/* What to poll to learn that somebody came or spoke: at most 1 + FSDP_LISTENER_PENDING. Returns how many. */
int fsdp_listener_poll(const fsdp_listener *listener, struct pollfd *polled);
/* The next pending whose hello is complete, if there is one; its fd is the caller's. Lets in and listens to
 * whoever is there, without waiting. Who says something else than a hello is turned away; when too many say
 * nothing, the oldest is. */
bool fsdp_listener_accept(fsdp_listener *listener, fsdp_pending *pending_out);
/* Fails when nobody can be let in any more: no file is left, and no pending has one that would come back. */
fsdp_status fsdp_listener_check(const fsdp_listener *listener, fsdp_error *err);

#endif
