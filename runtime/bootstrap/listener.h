/*
 * The one accept loop: every socket on which a rank accepts connections of other ranks is a listener, over
 * TCP (rendezvous.c, p2p_tcp.c) or over Unix sockets (transport_shm.c).
 *
 * In: a listening socket. Out: accepted connections with their hello, the first bytes of every connection,
 * which names the sender, the receiver, the job and the purpose. Until its hello is complete a connection is
 * pending. At most FSDP_LISTENER_PENDING connections are pending; when there are more, or when the process
 * has no file descriptor left, the oldest are closed: a rank sends its hello at once, a port scanner never
 * does. Connections that begin with anything but a hello are closed. No call blocks for longer than 20 ms.
 */
#ifndef FSDP_LISTENER_H
#define FSDP_LISTENER_H

#include "kernels/digest.h"
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
    FSDP_HELLO_RENDEZVOUS = 1, /* to rank 0: the sender joins the rendezvous */
    FSDP_HELLO_LINK,           /* to another rank: messages of the control plane follow, in this direction */
    FSDP_HELLO_DATA,           /* tensors follow, in both directions */
    FSDP_HELLO_MEMORY          /* over a Unix socket: the descriptor of a memory segment follows */
} fsdp_hello_purpose;

typedef struct fsdp_hello {
    uint32_t magic, purpose;
    int32_t rank, size, to;
    int32_t port;              /* RENDEZVOUS: where the sender listens; MEMORY: 0 when it has no segment */
    uint8_t job[FSDP_SHA256_SIZE];     /* digest of the job's id; MEMORY: a random token of the job */
} fsdp_hello;

_Static_assert(sizeof(fsdp_hello) == 56, "hellos have no padding");

fsdp_hello fsdp_hello_make(fsdp_hello_purpose purpose, int rank, int size, int to,
                           const uint8_t job[FSDP_SHA256_SIZE]);
/* True when another rank of this job sent it to this rank for that purpose. */
bool fsdp_hello_is_for(const fsdp_hello *hello, fsdp_hello_purpose purpose, int rank, int size,
                       const uint8_t job[FSDP_SHA256_SIZE]);

typedef struct fsdp_pending {
    int fd;
    size_t got;                /* bytes of the hello */
    fsdp_hello hello;
} fsdp_pending;

/* Zero-initialise, then set fd. */
typedef struct fsdp_listener {
    int fd;                    /* owned; -1: none */
    bool (*allows)(int fd);    /* false: the new connection is closed at once; NULL: all are allowed */
    int lacks;                 /* errno of the last accept when it can only fail again; else 0 */
    int count;
    fsdp_pending pending[FSDP_LISTENER_PENDING];       /* the oldest first */
} fsdp_listener;

void fsdp_listener_release(fsdp_listener *listener);

/* Fills in at most 1 + FSDP_LISTENER_PENDING entries of a poll set: the listener and what is pending. Returns
 * how many. */
int fsdp_listener_poll(const fsdp_listener *listener, struct pollfd *polled);
/* Polls them until one is readable or the time is over. */
void fsdp_listener_wait(const fsdp_listener *listener, int64_t until_ms);
/* Accepts connections and reads their hellos without waiting. True: *pending_out is the next connection whose
 * hello is complete; its fd is the caller's. */
bool fsdp_listener_accept(fsdp_listener *listener, fsdp_pending *pending_out);
/* Fails when the last accept lacked a descriptor or memory and there was no pending connection to close. */
fsdp_status fsdp_listener_check(const fsdp_listener *listener, fsdp_error *err);

#endif
