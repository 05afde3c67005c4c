/* Opens the source of a conversion; the formats that can be written, and the format of a path's suffix. See
 * convert_job.h and convert.h. */
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

/* True when the format or the selection takes more than the model: then a directory of parts is read as
 * fsdp_open_opts.whole has it. */
static bool takes_whole(const fsdp_convert_opts *opts)
{
    const fsdp_format *target = opts->format ? fsdp_format_to(opts->format) : NULL;
    bool is_model = target && target->caps.model_only;
    return opts->select.only == FSDP_ONLY_DEFAULT ? !is_model && !opts->select.part
                                                  : opts->select.only != FSDP_ONLY_MODEL;
}

fsdp_status fsdp_convert_open(const char *from, const fsdp_convert_opts *opts,
                              fsdp_checkpoint **checkpoint_out, fsdp_error *err)
{
    fsdp_open_opts open = opts->open;
    open.whole = takes_whole(opts);
    open.memory = opts->memory;
    open.watch = &opts->watch;
    FSDP_TRY(fsdp_checkpoint_open(from, &open, checkpoint_out, err));
    bool is_empty = fsdp_sd_count((*checkpoint_out)->manifest.sd) == 0;
    if (!is_empty || fsdp_checkpoint_missing_count(*checkpoint_out) == 0)
        return FSDP_OK;
    fsdp_checkpoint_close(*checkpoint_out);
    *checkpoint_out = NULL;
    return fsdp_fail(err, FSDP_ERR_DAMAGED, "all files of '%s' that hold data are missing", from);
}
