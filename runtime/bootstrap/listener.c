/* Guests at a listener. See reception.h. */
#include "runtime/bootstrap/listener.h"

#include <errno.h>
#include <string.h>

#include "runtime/bootstrap/socket.h"

fsdp_hello fsdp_hello_make(fsdp_hello_purpose purpose, int rank, int size, int to,
                           const uint8_t job[FSDP_SHA256_SIZE])
{
    fsdp_hello hello = {
        .magic = FSDP_HELLO_MAGIC, .purpose = purpose, .rank = rank, .size = size, .to = to};
    memcpy(hello.job, job, sizeof hello.job);
    return hello;
}

bool fsdp_hello_is_for(const fsdp_hello *hello, fsdp_hello_purpose purpose, int rank, int size,
                       const uint8_t job[FSDP_SHA256_SIZE])
{
    return hello->purpose == purpose && hello->size == size && hello->to == rank &&
           hello->rank >= 0 && hello->rank < size && hello->rank != rank &&
           memcmp(hello->job, job, sizeof hello->job) == 0;
}

/* --- guests ----------------------------------------------------------------------------------- */

/* The first whose hello is complete; count: there is none. */
static int find_complete(const fsdp_reception *reception)
{
    int idx = 0;
    while (idx < reception->count && reception->guests[idx].got < sizeof(fsdp_hello))
        idx++;
    return idx;
}

static void drop(fsdp_reception *reception, int idx)
{
    fsdp_guest *guests = reception->guests;
    reception->count--;
    memmove(&guests[idx], &guests[idx + 1], (size_t)(reception->count - idx) * sizeof *guests);
}

static void turn_away(fsdp_reception *reception, int idx)
{
    fsdp_socket_close(&reception->guests[idx].fd);
    drop(reception, idx);
}

void fsdp_reception_release(fsdp_reception *reception)
{
    while (reception->count > 0)
        turn_away(reception, 0);
    fsdp_socket_close(&reception->listener);
}

int fsdp_reception_watch(const fsdp_reception *reception, struct pollfd *polled)
{
    int n = 0;
    if (reception->listener < 0)
        return 0;
    polled[n++] = (struct pollfd){.fd = reception->listener, .events = POLLIN};
    for (int i = 0; i < reception->count; i++)
        polled[n++] = (struct pollfd){.fd = reception->guests[i].fd, .events = POLLIN};
    return n;
}

/* False when this one is none of us. A stranger is known by its first bytes: an HTTP client waits for an
 * answer and would never send a whole hello. */
static bool listen_to(fsdp_guest *guest)
{
    static const uint32_t magic = FSDP_HELLO_MAGIC;
    size_t left = sizeof guest->hello - guest->got;
    ssize_t n =
        left > 0 ? fsdp_socket_read(guest->fd, (char *)&guest->hello + guest->got, left) : 0;
    if (n < 0)
        return false;
    guest->got += (size_t)n;
    return memcmp(&guest->hello, &magic, guest->got < sizeof magic ? guest->got : sizeof magic) ==
           0;
}

/* No more at once than there is room for: strangers may come for ever. */
static void let_in(fsdp_reception *reception)
{
    for (int came = 0; came < FSDP_RECEPTION_ROOM; came++) {
        int fd = fsdp_socket_accept(reception->listener);
        reception->lacks_file = fd < 0 && errno == EMFILE;
        if (fd < 0)
            return;
        if (reception->count == FSDP_RECEPTION_ROOM)
            turn_away(reception, 0);
        fsdp_guest *guest = &reception->guests[reception->count++];
        *guest = (fsdp_guest){.fd = fd};
        if (!listen_to(guest))
            turn_away(reception, reception->count - 1);
        else if (guest->got == sizeof guest->hello)
            return; /* to be taken before others push it out */
    }
}

static void serve(fsdp_reception *reception)
{
    for (int i = reception->count - 1; i >= 0; i--)
        if (!listen_to(&reception->guests[i]))
            turn_away(reception, i);
    if (find_complete(reception) == reception->count)
        let_in(reception);
}

bool fsdp_reception_take(fsdp_reception *reception, fsdp_guest *guest_out)
{
    if (reception->listener < 0)
        return false;
    serve(reception);
    int idx = find_complete(reception);
    if (idx == reception->count)
        return false;
    *guest_out = reception->guests[idx];
    drop(reception, idx);
    return true;
}

fsdp_status fsdp_reception_check(const fsdp_reception *reception, fsdp_error *err)
{
    if (!reception->lacks_file || reception->count > 0)
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_LIMIT,
                     "no file is left for the connections with all other ranks; raise `ulimit -n`");
}
