/* Devices whose memory is the host's: entries of their tables. See device.h. */
#include "runtime/device/device.h"

#include "base/core/mem.h"

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
