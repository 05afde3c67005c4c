/*
 * The store of a torchrun agent (PyTorch's TCPStore): names and values that all processes of a job share. Its
 * port is MASTER_PORT, which rank 0 therefore cannot listen at. A client of three requests; each call is a
 * connection of its own.
 */
#ifndef FSDP_TORCHRUN_STORE_H
#define FSDP_TORCHRUN_STORE_H

#include <fsdp/status.h>
#include <stddef.h>
#include <stdint.h>

enum { FSDP_STORE_VALUE = 512 };

fsdp_status fsdp_store_set(const char *host, int port, const char *name, const char *value, int64_t until_ms,
                           fsdp_error *err);
/* Waits until the name is set. */
fsdp_status fsdp_store_get(const char *host, int port, const char *name, char value_out[FSDP_STORE_VALUE],
                           int64_t until_ms, fsdp_error *err);
fsdp_status fsdp_store_delete(const char *host, int port, const char *name, int64_t until_ms,
                              fsdp_error *err);

#endif
