/*
 * Sockets with deadlines, for ranks that meet and talk over TCP. None of them blocks: what cannot go on
 * waits in poll until a time on CLOCK_MONOTONIC (fsdp_now_ms). Only looking up a host's name takes as long as
 * the system takes. All are closed by exec.
 */
#ifndef FSDP_SOCKET_H
#define FSDP_SOCKET_H

#include <fsdp/status.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

enum { FSDP_HOST_SIZE = 256 };
#define FSDP_LOOPBACK "127.0.0.1"

/* host NULL: every interface. port 0: any free one. */
fsdp_status fsdp_socket_listen(const char *host, int port, int *fd_out, fsdp_error *err);
int fsdp_socket_port(int fd);                  /* its own; -1 when it has none */
/* The other end's numeric address; "" when it has none. */
void fsdp_socket_peer(int fd, char host_out[FSDP_HOST_SIZE]);
bool fsdp_host_is_loopback(const char *host);  /* "127...", "::1", "localhost" */

/* One try. The error's errno tells whether another may help: nobody listens there yet, no such name yet. */
fsdp_status fsdp_socket_connect(const char *host, int port, int64_t until_ms, int *fd_out, fsdp_error *err);
/* -1: nobody is there now. */
int fsdp_socket_accept(int listener);
void fsdp_socket_close(int *fd);               /* sets it to -1; accepts that */

/* As much as goes without waiting: 0 when nothing does now, else a count or a negative errno; the other end
 * has closed: -ECONNRESET. */
ssize_t fsdp_socket_read(int fd, void *data, size_t size);
ssize_t fsdp_socket_write(int fd, const void *data, size_t size);

/* All of it. Past the time FSDP_ERR_PEER with an empty text; the error's errno says why otherwise. */
fsdp_status fsdp_socket_recv_all(int fd, void *data, size_t size, int64_t until_ms, fsdp_error *err);
fsdp_status fsdp_socket_send_all(int fd, const void *data, size_t size, int64_t until_ms, fsdp_error *err);

/* Until one of the events of poll.h holds, or the time has come: then false. */
bool fsdp_socket_wait(int fd, short events, int64_t until_ms);
/* What poll takes as its timeout. */
int fsdp_poll_ms(int64_t until_ms);

#endif
