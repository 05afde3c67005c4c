/* Which devices there are. See device.h. */
#include "runtime/device/device.h"

#include <string.h>

#include "base/core/mem.h"

typedef struct named_device {
    const char *name;
    fsdp_status (*open)(fsdp_device **device_out, fsdp_error *err);
} named_device;

static const named_device devices[] = {{"cpu", fsdp_device_cpu},
                                       {"cpu-async", fsdp_device_cpu_async}};

fsdp_status fsdp_device_open(const char *name, fsdp_device **device_out, fsdp_error *err)
{
    for (size_t i = 0; i < sizeof devices / sizeof *devices; i++)
        if (strcmp(devices[i].name, name) == 0)
            return devices[i].open(device_out, err);
    return fsdp_fail(err, FSDP_ERR_USAGE, "there is no device '%s'; there are cpu and cpu-async",
                     name);
}

void fsdp_device_close(fsdp_device *device)
{
    if (device)
        device->ops->close(device);
}

/* --- devices whose memory is the host's ------------------------------------------------------- */

fsdp_status fsdp_device_create_host(const fsdp_device_ops *ops, fsdp_device **device_out,
                                    fsdp_error *err)
{
    fsdp_device *device = fsdp_alloc(1, sizeof *device);
    if (!device)
        return fsdp_fail_memory(err, "a device");
    device->ops = ops;
    *device_out = device;
    return FSDP_OK;
}

void *fsdp_device_host_alloc(fsdp_device *device, size_t size)
{
    (void)device;
    return fsdp_alloc_pages(size);
}

void fsdp_device_host_dealloc(fsdp_device *device, void *data, size_t size)
{
    (void)device;
    (void)size;
    fsdp_free(data);
}

void fsdp_device_host_close(fsdp_device *device)
{
    fsdp_free(device);
}
