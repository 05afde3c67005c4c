/* The tensors of an llm.c file: see llmc.h. */
#include "formats/llmc/llmc.h"

#include <inttypes.h>

const char *const llmc_number_names[LLMC_NUMBERS] = {
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

fsdp_dtype llmc_dtype_of(int64_t version)
{
    return version == LLMC_F32 ? FSDP_F32 : version == LLMC_BF16 ? FSDP_BF16 : FSDP_DTYPE_NONE;
}

int llmc_version_of(fsdp_dtype dtype)
{
    return dtype == FSDP_F32 ? LLMC_F32 : dtype == FSDP_BF16 ? LLMC_BF16 : 0;
}

static fsdp_status check_numbers(const char *path, const int64_t *numbers, fsdp_status status,
                                 fsdp_error *err)
{
    for (int i = 0; i < LLMC_NUMBERS; i++)
        if (numbers[i] <= 0 || numbers[i] > INT32_MAX)
            return fsdp_fail(err, status, "'%s': %s of an llm.c model is %" PRId64, path,
                             llmc_number_names[i], numbers[i]);
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

fsdp_status llmc_lay_out(const char *path, const int64_t numbers[LLMC_NUMBERS], fsdp_status status,
                         llmc_tensor tensors_out[LLMC_TENSORS], fsdp_error *err)
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
