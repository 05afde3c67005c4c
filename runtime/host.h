/* Which host is this? What makes processes see the same memory, sockets and process numbers. */
#ifndef FSDP_HOST_H
#define FSDP_HOST_H

#include <stdint.h>

enum { FSDP_BOOT_ID = 48, FSDP_HOST_ID = 256 };

/* Of this boot of this machine; "" when it is not known. */
void fsdp_host_boot(char id_out[FSDP_BOOT_ID]);
/* The number of this process's namespace of a kind ("net", "pid"); 0: not known. */
uint64_t fsdp_host_namespace(const char *kind);
/* Equal for ranks that can share memory: the same boot of the same machine, the same name (containers have
 * their own) and the same network (sockets by which memory is passed). */
void fsdp_host_name(char id_out[FSDP_HOST_ID]);

#endif
