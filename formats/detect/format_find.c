/* Formats by their names: see <fsdp/format.h> and target.h. */
#include "formats/target.h"

#include <string.h>

const fsdp_format *fsdp_format_from(const char *name)
{
    const fsdp_format *format;
    for (size_t i = 0; name && (format = fsdp_format_at(i)) != NULL; i++)
        if ((format->reads_file || format->reads_directory) && strcmp(format->name, name) == 0)
            return format;
    return NULL;
}

const fsdp_format *fsdp_format_to(const char *name)
{
    const fsdp_format *format;
    for (size_t i = 0; name && (format = fsdp_format_at(i)) != NULL; i++)
        if (format->writer && (strcmp(format->name, name) == 0 ||
                               (format->alias && strcmp(format->alias, name) == 0)))
            return format;
    return NULL;
}

const fsdp_format *fsdp_format_for(const fsdp_format *format, const char *other)
{
    const fsdp_format *becomes = fsdp_format_to(other);
    return becomes && becomes->base && strcmp(becomes->base, format->name) == 0 ? becomes : format;
}
