/* See host.h. */
#include "runtime/host.h"

#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/io.h"
#include "base/mem.h"

void fsdp_host_boot(char id_out[FSDP_BOOT_ID])
{
    char *boot = NULL;
    size_t size = 0;
    memset(id_out, 0, FSDP_BOOT_ID);
    (void)!fsdp_io_read_file(NULL, "/proc/sys/kernel/random/boot_id", 64, &boot, &size, NULL);
    snprintf(id_out, FSDP_BOOT_ID, "%.40s", boot ? boot : "");
    fsdp_free(boot);
}

uint64_t fsdp_host_namespace(const char *kind)
{
    char path[64];
    struct stat about = {0};
    snprintf(path, sizeof path, "/proc/self/ns/%s", kind);
    return stat(path, &about) == 0 ? (uint64_t)about.st_ino : 0;
}

void fsdp_host_name(char id_out[FSDP_HOST_ID])
{
    char name[128] = "", boot[FSDP_BOOT_ID];
    (void)gethostname(name, sizeof name - 1);
    fsdp_host_boot(boot);
    memset(id_out, 0, FSDP_HOST_ID);
    snprintf(id_out, FSDP_HOST_ID, "%s %s %llu", boot, name,
             (unsigned long long)fsdp_host_namespace("net"));
}
