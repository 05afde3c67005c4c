/*
 * Fuzz target: adapters and quantized weights. The input is a folder (bundle.h): model.safetensors,
 * config.json, adapter/adapter_config.json and adapter/adapter_model.safetensors. The model is dequantized,
 * and the adapter merged into it; all that comes out is read. A folder without a model gets a small one.
 */
#include "statedict/derive/adapter.h"
#include "statedict/derive/element_types.h"
#include "tests/fuzz/bundle.h"
#include "tests/fuzz/read_checkpoint.h"

#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static const char model_name[] = "model.safetensors";
static const char model[] =
    "\x80\0\0\0\0\0\0\0"
    "{\"m.weight\":{\"dtype\":\"F32\",\"shape\":[2,3],\"data_offsets\":[0,24]},"
    "\"n.weight\":{\"dtype\":\"F32\",\"shape\":[1,2],\"data_offsets\":[24,32]}}"
    "................................";

static fsdp_checkpoint *open_model(fsdp_io *io)
{
    fsdp_checkpoint *checkpoint = NULL;
    fsdp_error err = {0};
    fsdp_status st = fsdp_checkpoint_open_as(io, "fuzz/model.safetensors", NULL, &checkpoint, &err);
    require_opened(st, checkpoint, &err);
    return checkpoint;
}

static void dequantize(fsdp_io *io, const bundle *files)
{
    fsdp_dequant_opts opts = {.dtype = FSDP_F32};
    fsdp_config_file config = {0};
    fsdp_dequant_report report;
    fsdp_checkpoint *checkpoint = open_model(io);
    fsdp_error err = {0};
    if (!checkpoint)
        return;
    for (size_t i = 0; i < files->count; i++)
        if (strcmp(files->files[i].name, "config.json") == 0) {
            fsdp_config_release(&config);
            (void)fsdp_config_parse((const char *)files->files[i].data, files->files[i].size,
                                    "fuzz/config.json", &config, NULL);
            opts.config = &config;
        }
    fsdp_status st = fsdp_dequantize(&opts, &checkpoint, &report, &err);
    fsdp_config_release(&config);
    require_opened(st, checkpoint, &err);
    if (checkpoint)
        read_and_close(checkpoint);
}

static void merge(fsdp_io *io)
{
    const fsdp_access access = {.disk = io};
    const fsdp_adapter_opts opts = {.path = "fuzz/adapter", .access = &access};
    fsdp_adapter_report report;
    fsdp_checkpoint *checkpoint = open_model(io);
    fsdp_error err = {0};
    if (!checkpoint)
        return;
    fsdp_status st = fsdp_adapter_merge(&opts, &checkpoint, &report, &err);
    require_opened(st, checkpoint, &err);
    if (checkpoint)
        read_and_close(checkpoint);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    bundle files;
    if (!bundle_begins(data, size))
        return 0;
    bundle_split(data, size, &files);
    files.files[files.count] = (memory_entry){model_name, (const uint8_t *)model, sizeof model - 1};
    fsdp_io *io = memory_folder(files.files, files.count + 1);
    dequantize(io, &files);
    merge(io);
    bundle_release(&files);
    return 0;
}
