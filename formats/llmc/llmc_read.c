/* GPT-2 models of llm.c as a source: see llmc.h. The mirror of llmc_write.c. */
#include "base/core/bytes.h"
#include "formats/llmc/llmc.h"
#include "formats/source.h"

#include <inttypes.h>
#include <string.h>

static int bid(const fsdp_probe *probe)
{
    if (probe->is_directory || probe->head_size < 8)
        return 0;
    return fsdp_load_u32(probe->head) == LLMC_MAGIC ? 40 : 0;
}

/* The numbers of the header and the version. */
static fsdp_status read_header(const fsdp_source *source, int file, int64_t numbers[LLMC_NUMBERS],
                               int64_t *version_out, fsdp_error *err)
{
    uint8_t head[LLMC_BYTES];
    const char *path = fsdp_source_file_path(source, (size_t)file);
    if (fsdp_source_file_size(source, (size_t)file) < (int64_t)sizeof head)
        return fsdp_fail(err, FSDP_ERR_DAMAGED, "'%s' ends in the header of %zu bytes", path,
                         sizeof head);
    FSDP_TRY(fsdp_source_pread(source, file, head, sizeof head, 0, err));
    if (fsdp_load_u32(head) != LLMC_MAGIC)
        return fsdp_fail(err, FSDP_ERR_NOT_FOUND, "'%s' is not a GPT-2 model of llm.c", path);
    *version_out = (int32_t)fsdp_load_u32(head + 4);
    for (size_t i = 0; i < LLMC_NUMBERS; i++)
        numbers[i] = (int32_t)fsdp_load_u32(head + 8 + 4 * i);
    return FSDP_OK;
}

static fsdp_status add_values(fsdp_source *source, const int64_t *numbers, fsdp_error *err)
{
    for (int i = 0; i < LLMC_NUMBERS; i++) {
        fsdp_value value = fsdp_value_i64(numbers[i]);
        FSDP_TRY(fsdp_source_add_value(source, llmc_number_names[i], strlen(llmc_number_names[i]),
                                       &value, NULL, err));
    }
    return FSDP_OK;
}

/* *at: the end of the tensor before; the end of this one. False when a size is too large. */
static bool advance(const llmc_tensor *tensor, fsdp_dtype dtype, int64_t *at)
{
    int64_t size = (int64_t)fsdp_dtype_size(dtype);
    for (int dim = 0; dim < tensor->ndim; dim++)
        if (fsdp_mul_overflow(size, tensor->shape[dim], &size))
            return false;
    return !fsdp_add_overflow(*at, size, at);
}

/* The tensors must fill the file exactly. */
static fsdp_status check_size(const fsdp_source *source, int file, const llmc_tensor *tensors,
                              fsdp_dtype dtype, fsdp_error *err)
{
    int64_t size = LLMC_BYTES, actual = fsdp_source_file_size(source, (size_t)file);
    bool fits = true;
    for (int i = 0; i < LLMC_TENSORS && fits; i++)
        fits = advance(&tensors[i], dtype, &size);
    if (fits && size == actual)
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_DAMAGED,
                     "'%s' has %" PRId64
                     " bytes, and a model of the sizes in its header %s%" PRId64,
                     fsdp_source_file_path(source, (size_t)file), actual, fits ? "" : "over ",
                     fits ? size : INT64_MAX);
}

static fsdp_status add_tensors(fsdp_source *source, int file, const llmc_tensor *tensors,
                               fsdp_dtype dtype, fsdp_error *err)
{
    static const int64_t origin[LLMC_DIMS];
    int64_t at = LLMC_BYTES;
    FSDP_TRY(check_size(source, file, tensors, dtype, err));
    for (int i = 0; i < LLMC_TENSORS; i++) {
        const llmc_tensor *tensor = &tensors[i];
        size_t number;
        FSDP_TRY(fsdp_source_add_tensor(source, tensor->name, strlen(tensor->name),
                                        &(fsdp_source_shape){dtype, tensor->ndim, tensor->shape},
                                        &number, err));
        fsdp_source_chunk chunk = {.lo = origin,
                                   .len = tensor->shape,
                                   .offset = at,
                                   .file = file,
                                   .stream = FSDP_NO_STREAM};
        FSDP_TRY(fsdp_source_add_chunk(source, number, &chunk, err));
        advance(tensor, dtype, &at);
    }
    return FSDP_OK;
}

static fsdp_status fill(fsdp_source *source, const char *path, fsdp_error *err)
{
    int64_t numbers[LLMC_NUMBERS], version = 0;
    llmc_tensor tensors[LLMC_TENSORS];
    int file;
    FSDP_TRY(fsdp_source_add_file(source, path, false, &file, err));
    FSDP_TRY(read_header(source, file, numbers, &version, err));
    fsdp_dtype dtype = llmc_dtype_of(version);
    if (dtype == FSDP_DTYPE_NONE)
        return fsdp_fail(err, FSDP_ERR_DAMAGED,
                         "'%s' is an llm.c model of version %" PRId64 "; 3 (f32) and 5 (bf16) are "
                         "known",
                         path, version);
    FSDP_TRY(llmc_lay_out(path, numbers, FSDP_ERR_DAMAGED, tensors, err));
    FSDP_TRY(add_values(source, numbers, err));
    FSDP_TRY(add_tensors(source, file, tensors, dtype, err));
    return fsdp_source_complete(source, err);
}

static fsdp_status open_llmc(const fsdp_probe *probe, fsdp_source **source_out, fsdp_error *err)
{
    fsdp_source *source = NULL;
    FSDP_TRY(fsdp_source_create(probe->io, probe->path, "llmc", &source, err));
    fsdp_status st = fill(source, probe->path, err);
    if (st != FSDP_OK) {
        fsdp_source_close(source);
        source = NULL;
    }
    *source_out = source;
    return st;
}

const fsdp_format fsdp_format_llmc = {
    .name = "llmc",
    .reads_file = true,
    .writes_file = true,
    .caps = {.values = true, .model_only = true, .maps_names = true, .takes_config = true},
    .reader = &(const fsdp_format_reader){.bid = bid, .open = open_llmc},
    .writer = &fsdp_llmc_writer};
