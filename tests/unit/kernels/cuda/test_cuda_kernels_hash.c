/* kernels/cuda/hash.cu, run by the host, against the hash of C, over inputs of every short form. */
#include "tests/unit/kernels/cuda/cuda_cases.h"

#include <criterion/criterion.h>
#include <string.h>

enum { MOST_SPANS = 300, BLOCK = 1024, BATCH = 32 };

static void check(const fsdp_cuda_span *spans, size_t n)
{
    fsdp_hash hashes[MOST_SPANS + 1];
    memset(hashes, 0xa5, sizeof hashes);
    case_expect_success(fsdp_cuda_hash(spans, n, hashes, NULL));
    for (size_t i = 0; i < n; i++) {
        fsdp_hash expected = fsdp_kernels_get()->hash(
            spans[i].data, spans[i].count * fsdp_dtype_size(spans[i].dtype));
        cr_assert(memcmp(&hashes[i], &expected, sizeof expected) == 0, "%zu elements of %s",
                  spans[i].count, fsdp_dtype_name(spans[i].dtype));
    }
    cr_assert_eq(hashes[n].bytes[0], 0xa5);
}

Test(cuda_kernels_hash, every_short_size_is_hashed_as_by_c)
{
    static unsigned char data[MOST_SPANS + 1];
    fsdp_cuda_span spans[MOST_SPANS];
    for (uint64_t shift = 0; shift < 2; shift++) {
        case_seed(shift);
        case_fill(data, FSDP_U8, sizeof data);
        for (size_t size = 0; size < MOST_SPANS; size++)
            spans[size] = (fsdp_cuda_span){data + shift, FSDP_U8, size};
        check(spans, MOST_SPANS);
    }
}

/* Whole blocks, whole batches of blocks, a stripe more or less; at any address. */
Test(cuda_kernels_hash, long_inputs_are_hashed_as_by_c)
{
    static const size_t units[] = {64, BLOCK, BLOCK * BATCH};
    for (uint64_t seed = 0; seed < 60; seed++) {
        case_seed(seed);
        size_t size = units[seed % 3] * (1 + case_below(3)) + case_below(3) - 1;
        size = case_below(3) == 0 ? 241 + case_below(80000) : size;
        case_buffer buffer = case_tensor(FSDP_U8, size, true);
        check(&(fsdp_cuda_span){buffer.data, FSDP_U8, size}, 1);
        case_buffer_free(&buffer);
    }
}

Test(cuda_kernels_hash, spans_of_other_types_are_their_bytes)
{
    fsdp_cuda_span spans[CASE_FOLDED];
    case_buffer buffers[CASE_FOLDED];
    case_seed(7);
    for (size_t i = 0; i < CASE_FOLDED; i++) {
        size_t count = case_below(4000);
        buffers[i] = case_tensor(case_folded[i], count, true);
        spans[i] = (fsdp_cuda_span){buffers[i].data, case_folded[i], count};
    }
    check(spans, CASE_FOLDED);
    for (size_t i = 0; i < CASE_FOLDED; i++)
        case_buffer_free(&buffers[i]);
}
