/* Names of the formats that can be written, and the format of a path's suffix. See convert.h. */
#include "statedict/convert/convert_job.h"

#include <string.h>

const char *fsdp_convert_format_at(size_t i)
{
    if (i == 0)
        return "fsdp";
    const fsdp_target_format *format = fsdp_target_at(i - 1);
    return format ? format->limits.format : NULL;
}

bool fsdp_convert_takes_whole(const fsdp_convert_opts *opts)
{
    const fsdp_target_format *target = opts->format ? fsdp_target_find(opts->format) : NULL;
    bool is_model = target && target->limits.model_only;
    return opts->select.only == FSDP_ONLY_DEFAULT ? !is_model && !opts->select.part
                                                  : opts->select.only != FSDP_ONLY_MODEL;
}

static const struct {
    const char *suffix, *format;
} suffixes[] = {{".safetensors", "safetensors"},
                {".pt", "torch"},
                {".pth", "torch"},
                {".bin", "torch"},
                {".h5", "hdf5"},
                {".hdf5", "hdf5"},
                {".npz", "npz"},
                {".npy", "npy"},
                {".gguf", "gguf"},
                {".fsdp", "fsdp"},
                {".dcp", "dcp"}};

const char *fsdp_convert_suffix_at(size_t i)
{
    return i < sizeof suffixes / sizeof *suffixes ? suffixes[i].suffix : NULL;
}

const char *fsdp_convert_format_of(const char *path)
{
    if (!path)
        return NULL;
    size_t size = strlen(path);
    while (size > 0 && path[size - 1] == '/')
        size--;
    for (size_t i = 0; i < sizeof suffixes / sizeof *suffixes; i++) {
        size_t suffix = strlen(suffixes[i].suffix);
        if (size > suffix && memcmp(path + size - suffix, suffixes[i].suffix, suffix) == 0)
            return suffixes[i].format;
    }
    return "hf";
}
