/* The formats that can be written: see target.h. */
#include "formats/target/target_formats.h"

#include <string.h>

static bool holds_every_dtype(fsdp_dtype dtype)
{
    (void)dtype;
    return true;
}

/* A native full checkpoint in one file, which statedict/convert/one_file_target.c writes. */
static const fsdp_target_format hdf5_target = {
    .limits = {.format = "hdf5", .values = true, .opaque = true, .holds_dtype = holds_every_dtype}};

static const fsdp_target_format *const formats[] = {
    &fsdp_hf_target,       &fsdp_safetensors_target, &fsdp_dcp_target,
    &fsdp_megatron_target, &fsdp_torch_target,       &hdf5_target,
    &fsdp_npz_target,      &fsdp_npy_target,         &fsdp_gguf_target,
    &fsdp_llmc_target,     &fsdp_universal_target,
};

const fsdp_target_format *fsdp_target_at(size_t i)
{
    return i < sizeof formats / sizeof *formats ? formats[i] : NULL;
}

const fsdp_target_format *fsdp_target_find(const char *name)
{
    for (size_t i = 0; fsdp_target_at(i); i++)
        if (strcmp(formats[i]->limits.format, name) == 0)
            return formats[i];
    return NULL;
}

const fsdp_target_format *fsdp_target_for(const fsdp_target_format *format, const char *layout)
{
    const fsdp_target_format *other = fsdp_target_find(layout);
    bool is_base =
        other && other->limits.base && strcmp(other->limits.base, format->limits.format) == 0;
    return is_base ? other : format;
}
