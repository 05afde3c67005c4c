/* Names of the formats that can be written, and the format of a path's suffix. See convert.h. */
#include "statedict/convert/convert_job.h"

#include <string.h>

const char *fsdp_convert_format_at(size_t i)
{
    const fsdp_format *format;
    for (size_t at = 0; (format = fsdp_format_at(at)) != NULL; at++)
        if (format->writer && i-- == 0)
            return format->name;
    return NULL;
}

bool fsdp_convert_takes_whole(const fsdp_convert_opts *opts)
{
    const fsdp_format *target = opts->format ? fsdp_format_to(opts->format) : NULL;
    bool is_model = target && target->caps.model_only;
    return opts->select.only == FSDP_ONLY_DEFAULT ? !is_model && !opts->select.part
                                                  : opts->select.only != FSDP_ONLY_MODEL;
}

const char *fsdp_convert_format_of(const char *path)
{
    const fsdp_format *format;
    if (!path)
        return NULL;
    size_t size = strlen(path);
    while (size > 0 && path[size - 1] == '/')
        size--;
    for (size_t i = 0; (format = fsdp_format_at(i)) != NULL; i++)
        for (const char *const *suffix = format->suffixes; *suffix; suffix++) {
            size_t length = strlen(*suffix);
            if (size > length && memcmp(path + size - length, *suffix, length) == 0)
                return format->name;
        }
    return "hf";
}
