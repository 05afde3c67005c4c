/* The formats that can be written: see target.h. */
#include "formats/targets.h"

#include <stddef.h>
#include <string.h>

static const fsdp_target_format *const formats[] = {
    &fsdp_dcp_target,
    &fsdp_torch_target,
};

const fsdp_target_format *fsdp_target_at(size_t i)
{
    return i < sizeof formats / sizeof *formats ? formats[i] : NULL;
}

const fsdp_target_format *fsdp_target_find(const char *name)
{
    const fsdp_target_format *format;
    for (size_t i = 0; (format = fsdp_target_at(i)); i++)
        if (strcmp(format->limits.format, name) == 0)
            return format;
    return NULL;
}
