/*
 * GPT-2 models of llm.c as a target: see llmc.h. It takes exactly the names of the tensors and of the
 * header's numbers, in any order. The mirror of llmc_read.c.
 */
#include "formats/llmc/llmc.h"
#include "formats/target/packed_internal.h"

#include <inttypes.h>
#include <string.h>

enum { SHOWN = 100 };

static bool holds_dtype(fsdp_dtype dtype)
{
    return llmc_version_of(dtype) > 0;
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
    return fsdp_fail(err, FSDP_ERR_USAGE,
                     "llm.c's files have no %s '%s': they hold GPT-2, with the names of llm.c",
                     what, fsdp_printable(name, size, shown, sizeof shown));
}

static fsdp_status take_numbers(const fsdp_packed *target, int64_t numbers[LLMC_NUMBERS],
                                fsdp_error *err)
{
    unsigned seen = 0;
    for (size_t i = 0; i < target->value_count; i++) {
        const target_value *value = &target->values[i];
        int at = find(llmc_number_names, LLMC_NUMBERS, value->name, value->name_size);
        if (at < 0 || value->value.kind != FSDP_VALUE_I64)
            return fail_name("number", value->name, value->name_size, err);
        numbers[at] = value->value.as.i64;
        seen |= 1U << at;
    }
    for (int i = 0; i < LLMC_NUMBERS; i++)
        if (!(seen & 1U << i))
            return fsdp_fail(err, FSDP_ERR_USAGE, "llm.c's files need the value '%s'",
                             llmc_number_names[i]);
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
                             "are bf16 (--dtype casts them)",
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
    put_u32(head + 4, (uint32_t)llmc_version_of(ordered[0]->what.dtype));
    for (size_t i = 0; i < LLMC_NUMBERS; i++)
        put_u32(head + 8 + 4 * i, (uint32_t)numbers[i]);
    return fsdp_packed_put(target, file, head, sizeof head, 0, err);
}

const fsdp_format_writer fsdp_llmc_writer = {.ops = &fsdp_packed_ops,
                                             .packed =
                                                 &(const fsdp_packed_format){.lay_out = lay_out},
                                             .holds_dtype = holds_dtype};
