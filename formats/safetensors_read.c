/* Safetensors: one file, or a directory of them. */
#include "formats/foreign.h"

static int bid(const fsdp_probe *probe)
{
    (void)probe;
    return 0;
}

static fsdp_status open_safetensors(const fsdp_probe *probe, fsdp_source **source_out,
                                    fsdp_error *err)
{
    *source_out = NULL;
    return fsdp_fail(err, FSDP_ERR_NOT_FOUND, "'%s'", probe->path);
}

const fsdp_foreign_format fsdp_format_safetensors = {
    .name = "safetensors", .bid = bid, .open = open_safetensors};
