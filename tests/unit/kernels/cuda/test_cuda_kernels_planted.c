/*
 * Wrong kernels are noticed on the host: hash.cu without barriers, rects.cu with an index that is shifted by
 * one, both compiled so for this test, and kernels of tests/cuda/broken.cu that would hang on a GPU.
 */
#include "tests/cuda/broken.h"
#include "tests/cuda/shim.h"
#include "tests/unit/kernels/cuda/cuda_cases.h"

#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

enum { SEEDS = 10 };

Test(cuda_kernels_planted, a_removed_barrier_gives_another_hash)
{
    enum { SIZE = 100000 };
    int wrong = 0;
    for (uint64_t seed = 0; seed < SEEDS; seed++) {
        fsdp_hash found;
        case_seed(seed);
        case_buffer buffer = case_tensor(FSDP_U8, SIZE, true);
        const fsdp_cuda_span span = {buffer.data, FSDP_U8, SIZE};
        case_expect_success(fsdp_cuda_hash(&span, 1, &found, NULL));
        fsdp_hash expected = fsdp_kernels_get()->hash(buffer.data, SIZE);
        wrong += memcmp(&found, &expected, sizeof found) != 0;
        case_buffer_free(&buffer);
    }
    cr_assert_eq(wrong, SEEDS);
}

Test(cuda_kernels_planted, a_shifted_index_leaves_elements_out)
{
    enum { COUNT = 100 };
    float from[COUNT], to[COUNT];
    case_seed(1);
    case_fill_usual(from, FSDP_F32, COUNT, 1);
    memset(to, 0xa5, sizeof to);
    const fsdp_rect rect = fsdp_rect_line(to, FSDP_F32, from, FSDP_F32, COUNT);
    case_expect_success(fsdp_cuda_rects(&rect, 1, NULL));
    cr_assert(memcmp(from, to, sizeof to) != 0);
}

static void expect_failure(int kind, const char *words)
{
    int sums[64];
    cr_assert_eq(fsdp_broken_launch(kind, sums), FSDP_SHIM_LAUNCH_FAILED);
    const char *failure = fsdp_shim_failure();
    cr_assert(failure && strstr(failure, words), "%s, and not: %s", failure ? failure : "nothing",
              words);
}

/* After each failure another launch succeeds. */
Test(cuda_kernels_planted, kernels_that_would_hang_are_failures)
{
    for (uint64_t seed = 0; seed < SEEDS; seed++) {
        int sums[64];
        fsdp_shim_seed(seed);
        expect_failure(BROKEN_BARRIER, "a barrier that not all threads reach");
        expect_failure(BROKEN_TWO_BARRIERS, "threads wait at the barriers of lines");
        expect_failure(BROKEN_ABSENT_LANES, "lanes of the mask ffffffff that are absent");
        expect_failure(BROKEN_MASK, "and the mask is ffff");
        cr_assert_eq(fsdp_broken_launch(BROKEN_NOTHING, sums), 0);
        for (int i = 0; i < 64; i++)
            cr_assert_eq(sums[i], 1);
        cr_assert_null(fsdp_shim_failure());
    }
}
