/* The devices by name. See device.h. */
#include "runtime/device/device.h"

#include <string.h>

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
