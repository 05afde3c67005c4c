/*
 * Who comes to a listener, and says what: ranks of this job, ranks of another, port scanners. A guest has to
 * say a hello first; until then it is one of a bounded number who wait at the door.
 */
#ifndef FSDP_RECEPTION_H
#define FSDP_RECEPTION_H

#include <fsdp/digest.h>
#include <fsdp/status.h>
#include <poll.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    FSDP_HELLO_MAGIC = 0x31647366, /* "fsd1": another number when these messages change */
    FSDP_RECEPTION_ROOM = 64
};

typedef enum fsdp_hello_purpose {
    FSDP_HELLO_MEET = 1,       /* to rank 0: I am here */
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

typedef struct fsdp_guest {
    int fd;
    size_t got;
    fsdp_hello hello;
} fsdp_guest;

/* Zero-initialise, then listener. */
typedef struct fsdp_reception {
    int listener;              /* owned */
    int count;
    bool lacks_file;           /* somebody is at the door for whom this process may open none */
    fsdp_guest guests[FSDP_RECEPTION_ROOM];    /* the oldest first */
} fsdp_reception;

void fsdp_reception_release(fsdp_reception *reception);

/* What to poll to learn that somebody came or spoke: at most 1 + FSDP_RECEPTION_ROOM. Returns how many. */
int fsdp_reception_watch(const fsdp_reception *reception, struct pollfd *polled);
/* The next guest whose hello is complete, if there is one; its fd is the caller's. Lets in and listens to
 * whoever is there, without waiting. Who says something else than a hello is turned away; when too many say
 * nothing, the oldest is. */
bool fsdp_reception_take(fsdp_reception *reception, fsdp_guest *guest_out);
/* Fails when nobody can be let in any more: no file is left, and no guest has one that would come back. */
fsdp_status fsdp_reception_check(const fsdp_reception *reception, fsdp_error *err);

#endif
