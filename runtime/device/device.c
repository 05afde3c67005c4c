/* The devices by name. See device.h. */
#include "runtime/device/device.h"

#include <string.h>

#include "runtime/device/device_cuda.h"

typedef struct named_device {
    const char *name;
    fsdp_status (*open)(fsdp_device **device_out, fsdp_error *err);
} named_device;

static const named_device devices[] = {{"cpu", fsdp_device_cpu},
                                       {"cpu-async", fsdp_device_cpu_async}};

/* NULL: not one of the host. */
static const named_device *find_host_device(const char *name)
{
    for (size_t i = 0; i < sizeof devices / sizeof *devices; i++)
        if (strcmp(devices[i].name, name) == 0)
            return &devices[i];
    return NULL;
}

static bool is_cuda(const char *name)
{
    return strcmp(name, "cuda") == 0 || strncmp(name, "cuda:", 5) == 0;
}

static fsdp_status fail_unknown(const char *name, fsdp_error *err)
{
    return fsdp_fail(err, FSDP_ERR_USAGE, "unknown device '%s': use cpu, cpu-async, cuda or cuda:N",
                     name);
}

#ifndef FSDP_HAVE_CUDA
static fsdp_status fail_without_cuda(const char *name, fsdp_error *err)
{
    return fsdp_fail(err, FSDP_ERR_USAGE,
                     "device '%s': this program was built without CUDA; build it where nvcc is, "
                     "with -DFSDP_WITH_CUDA=ON, or use --device cpu",
                     name);
}
#endif

static fsdp_status open_cuda(const char *name, const fsdp_device_rank *rank,
                             fsdp_device **device_out, fsdp_error *err)
{
#ifdef FSDP_HAVE_CUDA
    return fsdp_device_cuda(name, rank, &fsdp_device_cuda_kernels, device_out, err);
#else
    (void)rank;
    (void)device_out;
    return fail_without_cuda(name, err);
#endif
}

fsdp_status fsdp_device_open(const char *name, const fsdp_device_rank *rank,
                             fsdp_device **device_out, fsdp_error *err)
{
    static const fsdp_device_rank first = {0};
    const named_device *device = find_host_device(name);
    if (device)
        return device->open(device_out, err);
    if (is_cuda(name))
        return open_cuda(name, rank ? rank : &first, device_out, err);
    return fail_unknown(name, err);
}

fsdp_status fsdp_device_find(const char *name, fsdp_error *err)
{
    if (find_host_device(name))
        return FSDP_OK;
    if (!is_cuda(name))
        return fail_unknown(name, err);
#ifdef FSDP_HAVE_CUDA
    return fsdp_device_cuda_find(name, err);
#else
    return fail_without_cuda(name, err);
#endif
}

void fsdp_device_close(fsdp_device *device)
{
    if (device)
        device->ops->close(device);
}
