/*
 * TCP sockets with deadlines. All are non-blocking and close-on-exec: a call that cannot proceed waits in
 * poll until a time on CLOCK_MONOTONIC (fsdp_now_ms). Only the resolution of a host name may take longer.
 */
#ifndef FSDP_SOCKET_H
#define FSDP_SOCKET_H

#include <fsdp/status.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

enum { FSDP_HOST_SIZE = 256, FSDP_PLACE_SIZE = 64 };
#define FSDP_LOOPBACK "127.0.0.1"

/* host NULL: every interface. port 0: any free one. */
fsdp_status fsdp_socket_listen(const char *host, int port, int *fd_out, fsdp_error *err);
int fsdp_socket_port(int fd);                  /* local port; -1: none */
/* The other end's numeric address; "" when it has none. */
void fsdp_socket_peer(int fd, char host_out[FSDP_HOST_SIZE]);
/* "127.0.0.1:4711", "[::1]:4711"; a long host loses its end. */
void fsdp_host_port(const char *host, int port, char *out, size_t out_size);
/* The other end's address and port; "" when it has none. */
void fsdp_socket_place(int fd, char place_out[FSDP_PLACE_SIZE]);
bool fsdp_host_is_loopback(const char *host);  /* "127...", "::1", "localhost" */

/* One attempt. The errno of the error tells whether another may succeed later: ECONNREFUSED while no process
 * listens, 0 while the name is unknown. */
fsdp_status fsdp_socket_connect(const char *host, int port, int64_t until_ms, int *fd_out, fsdp_error *err);
/* -1: no connection is waiting; or an error, in errno. */
int fsdp_socket_accept(int listener);
void fsdp_socket_close(int *fd);               /* sets it to -1; accepts that */

/* Transfer without waiting. Return the number of bytes, 0 when the call would block, or a negative errno;
 * -ECONNRESET when the peer has closed. */
ssize_t fsdp_socket_read(int fd, void *data, size_t size);
ssize_t fsdp_socket_write(int fd, const void *data, size_t size);

/* Transfer all bytes. Past the time they fail with FSDP_ERR_PEER and an empty text, otherwise with an
 * errno. */
fsdp_status fsdp_socket_recv_all(int fd, void *data, size_t size, int64_t until_ms, fsdp_error *err);
fsdp_status fsdp_socket_send_all(int fd, const void *data, size_t size, int64_t until_ms, fsdp_error *err);

/* Waits for one of poll's events; false when the time is over. */
bool fsdp_socket_wait(int fd, short events, int64_t until_ms);
/* The timeout for poll. */
int fsdp_poll_ms(int64_t until_ms);

#endif
