/*
 * Room llmc: GPT-2 models of llm.c (.bin): 256 numbers of 32 bits, then 16 tensors in a fixed order, those of
 * all layers stacked in one. Version 3 holds f32, version 5 bf16.
 *
 *   the tensors: their names and shapes, from the header's numbers
 *   the source:  the numbers are values
 *   the target:  a packed target (target/packed.h) of exactly these names and numbers, in any order
 *
 * In: bytes of a file, which may be hostile. Out: a catalog (source.h). Only detect calls this room.
 */
#include "base/core/bytes.h"
#include "formats/source.h"
#include "formats/target.h"
#include "formats/target/packed_internal.h"
#include <fsdp/dtype.h>
#include <fsdp/status.h>

#include <inttypes.h>
#include <string.h>

/* === the tensors ============================================================================== */

enum { LLMC_MAGIC = 20240326, LLMC_HEADER = 256, LLMC_BYTES = 4 * LLMC_HEADER };
enum { LLMC_TENSORS = 16, LLMC_DIMS = 3 };
enum { LLMC_F32 = 3, LLMC_BF16 = 5 }; /* versions */

/* The header's numbers from number 2 on. */
typedef enum llmc_number {
    LLMC_LENGTH,
    LLMC_VOCAB,
    LLMC_LAYERS,
    LLMC_HEADS,
    LLMC_CHANNELS,
    LLMC_PADDED_VOCAB,
    LLMC_NUMBERS
} llmc_number;

typedef struct llmc_tensor {
    const char *name; /* "qkvw" */
    int ndim;
    int64_t shape[LLMC_DIMS];
} llmc_tensor;

static const char *const number_names[LLMC_NUMBERS] = {
    [LLMC_LENGTH] = "max_seq_len", [LLMC_VOCAB] = "vocab_size",
    [LLMC_LAYERS] = "num_layers",  [LLMC_HEADS] = "num_heads",
    [LLMC_CHANNELS] = "channels",  [LLMC_PADDED_VOCAB] = "padded_vocab_size",
};

/* A dim is `times` as large as a number of the header; a row ends with times 0. */
typedef struct llmc_dim {
    int times;
    llmc_number of;
} llmc_dim;

static const struct {
    const char *name;
    llmc_dim dims[LLMC_DIMS];
} table[LLMC_TENSORS] = {
    {"wte", {{1, LLMC_PADDED_VOCAB}, {1, LLMC_CHANNELS}}},
    {"wpe", {{1, LLMC_LENGTH}, {1, LLMC_CHANNELS}}},
    {"ln1w", {{1, LLMC_LAYERS}, {1, LLMC_CHANNELS}}},
    {"ln1b", {{1, LLMC_LAYERS}, {1, LLMC_CHANNELS}}},
    {"qkvw", {{1, LLMC_LAYERS}, {3, LLMC_CHANNELS}, {1, LLMC_CHANNELS}}},
    {"qkvb", {{1, LLMC_LAYERS}, {3, LLMC_CHANNELS}}},
    {"attprojw", {{1, LLMC_LAYERS}, {1, LLMC_CHANNELS}, {1, LLMC_CHANNELS}}},
    {"attprojb", {{1, LLMC_LAYERS}, {1, LLMC_CHANNELS}}},
    {"ln2w", {{1, LLMC_LAYERS}, {1, LLMC_CHANNELS}}},
    {"ln2b", {{1, LLMC_LAYERS}, {1, LLMC_CHANNELS}}},
    {"fcw", {{1, LLMC_LAYERS}, {4, LLMC_CHANNELS}, {1, LLMC_CHANNELS}}},
    {"fcb", {{1, LLMC_LAYERS}, {4, LLMC_CHANNELS}}},
    {"fcprojw", {{1, LLMC_LAYERS}, {1, LLMC_CHANNELS}, {4, LLMC_CHANNELS}}},
    {"fcprojb", {{1, LLMC_LAYERS}, {1, LLMC_CHANNELS}}},
    {"lnfw", {{1, LLMC_CHANNELS}}},
    {"lnfb", {{1, LLMC_CHANNELS}}},
};

/* NONE for a version that is not known, and 0 for a dtype that has none. */
static fsdp_dtype dtype_of(int64_t version)
{
    return version == LLMC_F32 ? FSDP_F32 : version == LLMC_BF16 ? FSDP_BF16 : FSDP_DTYPE_NONE;
}

static int version_of(fsdp_dtype dtype)
{
    return dtype == FSDP_F32 ? LLMC_F32 : dtype == FSDP_BF16 ? LLMC_BF16 : 0;
}

static fsdp_status check_numbers(const char *path, const int64_t *numbers, fsdp_status status,
                                 fsdp_error *err)
{
    for (int i = 0; i < LLMC_NUMBERS; i++)
        if (numbers[i] <= 0 || numbers[i] > INT32_MAX)
            return fsdp_fail(err, status, "'%s': %s of an llm.c model cannot be %" PRId64, path,
                             number_names[i], numbers[i]);
    if (numbers[LLMC_CHANNELS] % numbers[LLMC_HEADS] != 0)
        return fsdp_fail(err, status,
                         "'%s': channels (%" PRId64 ") of an llm.c model are not a multiple of "
                         "num_heads (%" PRId64 ")",
                         path, numbers[LLMC_CHANNELS], numbers[LLMC_HEADS]);
    if (numbers[LLMC_PADDED_VOCAB] < numbers[LLMC_VOCAB])
        return fsdp_fail(err, status,
                         "'%s': padded_vocab_size (%" PRId64 ") of an llm.c model is smaller than "
                         "vocab_size (%" PRId64 ")",
                         path, numbers[LLMC_PADDED_VOCAB], numbers[LLMC_VOCAB]);
    return FSDP_OK;
}

/* The tensors of a model, in their order. Fails with `status` when the numbers make no model. */
static fsdp_status llmc_lay_out(const char *path, const int64_t numbers[LLMC_NUMBERS],
                                fsdp_status status, llmc_tensor tensors_out[LLMC_TENSORS],
                                fsdp_error *err)
{
    FSDP_TRY(check_numbers(path, numbers, status, err));
    for (int i = 0; i < LLMC_TENSORS; i++) {
        llmc_tensor *tensor = &tensors_out[i];
        *tensor = (llmc_tensor){.name = table[i].name};
        for (; tensor->ndim < LLMC_DIMS && table[i].dims[tensor->ndim].times > 0; tensor->ndim++) {
            const llmc_dim *dim = &table[i].dims[tensor->ndim];
            tensor->shape[tensor->ndim] = dim->times * numbers[dim->of];
        }
    }
    return FSDP_OK;
}

/* === the source =============================================================================== */

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
        return fsdp_fail(err, FSDP_ERR_DAMAGED, "'%s' ends inside its header of %zu bytes", path,
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
        FSDP_TRY(fsdp_source_add_value(source, number_names[i], strlen(number_names[i]), &value,
                                       NULL, err));
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
                     "'%s' has %" PRId64 " bytes, but the sizes in its header need %s%" PRId64,
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
    fsdp_dtype dtype = dtype_of(version);
    if (dtype == FSDP_DTYPE_NONE)
        return fsdp_fail(err, FSDP_ERR_DAMAGED,
                         "'%s' is an llm.c model of version %" PRId64
                         "; this fsdp reads versions 3 (f32) and 5 (bf16)",
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

/* === the target =============================================================================== */

enum { SHOWN = 100 };

static bool holds_dtype(fsdp_dtype dtype)
{
    return version_of(dtype) > 0;
}

/* The position of the name in a list of `count`, or -1. */
static int find(const char *const *names, int count, const char *name, size_t size)
{
    for (int i = 0; i < count; i++)
        if (strlen(names[i]) == size && memcmp(names[i], name, size) == 0)
            return i;
    return -1;
}

static fsdp_status fail_name(const char *what, const char *name, size_t size, fsdp_error *err)
{
    char shown[SHOWN];
    return fsdp_fail(
        err, FSDP_ERR_USAGE,
        "llm.c's files cannot hold the %s '%s': they hold GPT-2, with the names of llm.c", what,
        fsdp_printable(name, size, shown, sizeof shown));
}

static fsdp_status take_numbers(const fsdp_packed *target, int64_t numbers[LLMC_NUMBERS],
                                fsdp_error *err)
{
    unsigned seen = 0;
    for (size_t i = 0; i < target->value_count; i++) {
        const target_value *value = &target->values[i];
        int at = find(number_names, LLMC_NUMBERS, value->name, value->name_size);
        if (at < 0 || value->value.kind != FSDP_VALUE_I64)
            return fail_name("number", value->name, value->name_size, err);
        numbers[at] = value->value.as.i64;
        seen |= 1U << at;
    }
    for (int i = 0; i < LLMC_NUMBERS; i++)
        if (!(seen & 1U << i))
            return fsdp_fail(err, FSDP_ERR_USAGE, "llm.c's files need the value '%s'",
                             number_names[i]);
    return FSDP_OK;
}

/* Gives each entry its place in the order of the file. */
static fsdp_status take_tensors(fsdp_packed *target, const llmc_tensor *tensors,
                                target_tensor *ordered[LLMC_TENSORS], fsdp_error *err)
{
    const char *names[LLMC_TENSORS];
    for (int i = 0; i < LLMC_TENSORS; i++)
        names[i] = tensors[i].name;
    for (size_t i = 0; i < target->tensor_count; i++) {
        target_tensor *tensor = &target->tensors[i];
        int at = find(names, LLMC_TENSORS, tensor->what.name, tensor->what.name_size);
        if (at < 0)
            return fail_name("tensor", tensor->what.name, tensor->what.name_size, err);
        ordered[at] = tensor;
    }
    for (int i = 0; i < LLMC_TENSORS; i++)
        if (!ordered[i])
            return fsdp_fail(err, FSDP_ERR_USAGE, "llm.c's files need the tensor '%s'", names[i]);
    return FSDP_OK;
}

static bool has_shape(const fsdp_packed_tensor *what, const llmc_tensor *tensor)
{
    return what->ndim == tensor->ndim &&
           memcmp(what->shape, tensor->shape, (size_t)tensor->ndim * sizeof *what->shape) == 0;
}

/* Sets the offsets; *size_out is that of the file. */
static fsdp_status place(const fsdp_packed *target, const llmc_tensor *tensors,
                         target_tensor *const *ordered, int64_t *size_out, fsdp_error *err)
{
    int64_t at = LLMC_BYTES;
    for (int i = 0; i < LLMC_TENSORS; i++) {
        if (ordered[i]->what.dtype != ordered[0]->what.dtype)
            return fsdp_fail(err, FSDP_ERR_USAGE,
                             "'%s' is %s and '%s' %s: all tensors of an llm.c file are f32 or all "
                             "are bf16; cast them with --dtype",
                             tensors[i].name, fsdp_dtype_name(ordered[i]->what.dtype),
                             tensors[0].name, fsdp_dtype_name(ordered[0]->what.dtype));
        if (!has_shape(&ordered[i]->what, &tensors[i]))
            return fsdp_fail(
                err, FSDP_ERR_USAGE,
                "'%s' does not have the shape that the numbers of an llm.c file require",
                tensors[i].name);
        ordered[i]->offset = at;
        if (fsdp_add_overflow(at, ordered[i]->size, &at))
            return fsdp_fail(err, FSDP_ERR_LIMIT, "'%s' would be too large", target->path);
    }
    *size_out = at;
    return FSDP_OK;
}

static void put_u32(uint8_t *to, uint32_t number)
{
    for (int i = 0; i < 4; i++, number >>= 8)
        to[i] = (uint8_t)number;
}

static fsdp_status lay_out(fsdp_packed *target, fsdp_error *err)
{
    int64_t numbers[LLMC_NUMBERS] = {0}, size = 0;
    llmc_tensor tensors[LLMC_TENSORS];
    target_tensor *ordered[LLMC_TENSORS] = {0};
    uint8_t head[LLMC_BYTES] = {0};
    int file;
    FSDP_TRY(take_numbers(target, numbers, err));
    FSDP_TRY(llmc_lay_out(target->path, numbers, FSDP_ERR_USAGE, tensors, err));
    FSDP_TRY(take_tensors(target, tensors, ordered, err));
    FSDP_TRY(place(target, tensors, ordered, &size, err));
    FSDP_TRY(fsdp_packed_add_file(target, NULL, size, &file, err));
    for (int i = 0; i < LLMC_TENSORS; i++)
        ordered[i]->file = file;
    put_u32(head, LLMC_MAGIC);
    put_u32(head + 4, (uint32_t)version_of(ordered[0]->what.dtype));
    for (size_t i = 0; i < LLMC_NUMBERS; i++)
        put_u32(head + 8 + 4 * i, (uint32_t)numbers[i]);
    return fsdp_packed_put(target, file, head, sizeof head, 0, err);
}

static const fsdp_format_writer writer = {.ops = &fsdp_packed_ops,
                                          .packed = &(const fsdp_packed_format){.lay_out = lay_out},
                                          .holds_dtype = holds_dtype};

const fsdp_format fsdp_format_llmc = {
    .name = "llmc",
    .reads_file = true,
    .writes_file = true,
    .caps = {.values = true, .model_only = true, .maps_names = true, .takes_config = true},
    .reader = &(const fsdp_format_reader){.bid = bid, .open = open_llmc},
    .writer = &writer};
