/*
 * A client of PyTorch's TCPStore. See torchrun_store.h.
 *
 * A connection begins with request 0 and a magic number. A request is one
 * byte, then strings: eight bytes of length, then the bytes, all in the host's byte order. Names of
 * a store begin with '/'. Both of its servers (the old one and that over libuv) speak this.
 */
#include "runtime/bootstrap/torchrun_store.h"

#include <string.h>

#include "runtime/bootstrap/socket.h"

enum { REQUEST_HELLO = 0, REQUEST_SET = 1, REQUEST_GET = 3, REQUEST_WAIT = 6, REQUEST_DELETE = 8 };
enum { STORE_MAGIC = 0x3C85F7CE, REQUEST_SIZE = 2048 };

/* A request being built. */
typedef struct request {
    size_t size;
    bool overflows;
    unsigned char data[REQUEST_SIZE];
} request;

static void add_bytes(request *what, const void *data, size_t size)
{
    if (size > sizeof what->data - what->size) {
        what->overflows = true;
        return;
    }
    memcpy(what->data + what->size, data, size);
    what->size += size;
}

static void add_kind(request *what, unsigned char kind)
{
    add_bytes(what, &kind, 1);
}

static void add_number(request *what, uint64_t number)
{
    add_bytes(what, &number, sizeof number);
}

static void add_name(request *what, const char *name)
{
    add_number(what, strlen(name) + 1);
    add_bytes(what, "/", 1);
    add_bytes(what, name, strlen(name));
}

static request begin_request(void)
{
    const uint32_t magic = STORE_MAGIC;
    request what = {0};
    add_kind(&what, REQUEST_HELLO);
    add_bytes(&what, &magic, sizeof magic);
    return what;
}

/* *fd_out is the caller's also after a failure. */
static fsdp_status ask(const char *host, int port, const request *what, int64_t until_ms,
                       int *fd_out, fsdp_error *err)
{
    if (what->overflows)
        return fsdp_fail(err, FSDP_ERR_USAGE, "the job's id is too long for torchrun's store");
    FSDP_TRY(fsdp_socket_connect(host, port, until_ms, fd_out, err));
    return fsdp_socket_send_all(*fd_out, what->data, what->size, until_ms, err);
}

static fsdp_status finish(const char *host, int port, int fd, fsdp_status status, fsdp_error *err)
{
    fsdp_socket_close(&fd);
    if (status == FSDP_OK)
        return FSDP_OK;
    if (err->text[0] == '\0')
        (void)fsdp_fail(err, status, "it did not answer in time");
    fsdp_error_prefix(err, "torchrun's store at %s port %d", host, port);
    return status;
}

/* The store does not answer a set: the wait that follows confirms it. */
fsdp_status fsdp_store_set(const char *host, int port, const char *name, const char *value,
                           int64_t until_ms, fsdp_error *err)
{
    int fd = -1;
    unsigned char answer;
    request what = begin_request();
    add_kind(&what, REQUEST_SET);
    add_name(&what, name);
    add_number(&what, strlen(value));
    add_bytes(&what, value, strlen(value));
    add_kind(&what, REQUEST_WAIT);
    add_number(&what, 1);
    add_name(&what, name);
    fsdp_status status = ask(host, port, &what, until_ms, &fd, err);
    if (status == FSDP_OK)
        status = fsdp_socket_recv_all(fd, &answer, 1, until_ms, err);
    return finish(host, port, fd, status, err);
}

/* It is asked for only when it is there: a store does not wait with its answer. */
static fsdp_status take_value(int fd, const char *name, char value_out[FSDP_STORE_VALUE],
                              int64_t until_ms, fsdp_error *err)
{
    unsigned char is_there;
    uint64_t size;
    request what = {0};
    add_kind(&what, REQUEST_GET);
    add_name(&what, name);
    FSDP_TRY(fsdp_socket_recv_all(fd, &is_there, 1, until_ms, err));
    FSDP_TRY(fsdp_socket_send_all(fd, what.data, what.size, until_ms, err));
    FSDP_TRY(fsdp_socket_recv_all(fd, &size, sizeof size, until_ms, err));
    if (is_there != 0 || size >= FSDP_STORE_VALUE)
        return fsdp_fail(err, FSDP_ERR_DAMAGED, "it sent a malformed answer");
    FSDP_TRY(fsdp_socket_recv_all(fd, value_out, (size_t)size, until_ms, err));
    value_out[size] = '\0';
    return FSDP_OK;
}

fsdp_status fsdp_store_get(const char *host, int port, const char *name,
                           char value_out[FSDP_STORE_VALUE], int64_t until_ms, fsdp_error *err)
{
    int fd = -1;
    request what = begin_request();
    add_kind(&what, REQUEST_WAIT);
    add_number(&what, 1);
    add_name(&what, name);
    fsdp_status status = ask(host, port, &what, until_ms, &fd, err);
    if (status == FSDP_OK)
        status = take_value(fd, name, value_out, until_ms, err);
    return finish(host, port, fd, status, err);
}

fsdp_status fsdp_store_delete(const char *host, int port, const char *name, int64_t until_ms,
                              fsdp_error *err)
{
    int fd = -1;
    uint64_t deleted;
    request what = begin_request();
    add_kind(&what, REQUEST_DELETE);
    add_name(&what, name);
    fsdp_status status = ask(host, port, &what, until_ms, &fd, err);
    if (status == FSDP_OK)
        status = fsdp_socket_recv_all(fd, &deleted, sizeof deleted, until_ms, err);
    return finish(host, port, fd, status, err);
}
