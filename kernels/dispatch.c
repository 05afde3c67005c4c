/*
 * Chooses the variant of every kernel, once per process: what the processor can run, or plain C
 * when FSDP_KERNELS=c. Threads that race for the first choice all choose the same, so an atomic
 * pointer is enough.
 */
#include "kernels/matrix.h"
#include "kernels/nn_loops.h"
#include "kernels/processor.h"
#include "kernels/variants.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

typedef struct variant {
    fsdp_kernels kernels;
    const fsdp_hash_stream *hash_stream;
} variant;

static const variant plain = {
    .kernels =
        {
            .name = "c",
            .cast = fsdp_cast_c,
            .add_scaled = fsdp_add_scaled_c,
            .encode_q8_0 = fsdp_encode_q8_0_c,
            .measure = fsdp_measure_c,
            .copy_large = fsdp_copy_large_c,
            .shuffle = fsdp_shuffle_c,
            .unshuffle = fsdp_unshuffle_c,
            .hash = fsdp_hash_c,
            .f32 = &fsdp_loops_f32_c,
            .f64 = &fsdp_loops_f64_c,
        },
    .hash_stream = &fsdp_hash_stream_c,
};

#if defined(__x86_64__)
static const variant avx2 = {
    .kernels =
        {
            .name = "avx2",
            .cast = fsdp_cast_avx2,
            .add_scaled = fsdp_add_scaled_avx2,
            .encode_q8_0 = fsdp_encode_q8_0_avx2,
            .measure = fsdp_measure_avx2,
            .copy_large = fsdp_copy_large_avx2,
            .shuffle = fsdp_shuffle_avx2,
            .unshuffle = fsdp_unshuffle_avx2,
            .hash = fsdp_hash_avx2,
            .f32 = &fsdp_loops_f32_avx2,
            .f64 = &fsdp_loops_f64_avx2,
        },
    .hash_stream = &fsdp_hash_stream_avx2,
};
#endif

static bool is_plain_forced(void)
{
    const char *wanted = getenv("FSDP_KERNELS");
    return wanted && strcmp(wanted, "c") == 0;
}

static const variant *choose(void)
{
#if defined(__x86_64__)
    if (!is_plain_forced() && fsdp_processor_find().has_avx2)
        return &avx2;
#endif
    return &plain;
}

static const variant *chosen_variant(void)
{
    static _Atomic(const variant *) chosen;
    const variant *found = atomic_load_explicit(&chosen, memory_order_relaxed);
    if (!found) {
        found = choose();
        atomic_store_explicit(&chosen, found, memory_order_relaxed);
    }
    return found;
}

const fsdp_kernels *fsdp_kernels_get(void)
{
    return &chosen_variant()->kernels;
}

const fsdp_hash_stream *fsdp_hash_stream_get(void)
{
    return chosen_variant()->hash_stream;
}

fsdp_sha256_blocks *fsdp_sha256_blocks_get(void)
{
    static _Atomic(fsdp_sha256_blocks *) chosen;
    fsdp_sha256_blocks *found = atomic_load_explicit(&chosen, memory_order_relaxed);
    if (found)
        return found;
    found = fsdp_sha256_blocks_c;
#if defined(__x86_64__)
    if (!is_plain_forced() && fsdp_processor_find().has_sha)
        found = fsdp_sha256_blocks_ni;
#endif
    atomic_store_explicit(&chosen, found, memory_order_relaxed);
    return found;
}

fsdp_crc32_add *fsdp_crc32_add_get(void)
{
    static _Atomic(fsdp_crc32_add *) chosen;
    fsdp_crc32_add *found = atomic_load_explicit(&chosen, memory_order_relaxed);
    if (found)
        return found;
    found = fsdp_crc32_add_c;
#if defined(__x86_64__)
    if (!is_plain_forced() && fsdp_processor_find().has_pclmul)
        found = fsdp_crc32_add_clmul;
#endif
    atomic_store_explicit(&chosen, found, memory_order_relaxed);
    return found;
}

const fsdp_matrix_variant *fsdp_matrix_variant_get(void)
{
    static _Atomic(const fsdp_matrix_variant *) chosen;
    const fsdp_matrix_variant *found = atomic_load_explicit(&chosen, memory_order_relaxed);
    if (found)
        return found;
    found = &fsdp_matrix_c;
#if defined(__x86_64__)
    const fsdp_processor processor = fsdp_processor_find();
    if (!is_plain_forced() && processor.has_avx2 && processor.has_fma)
        found = &fsdp_matrix_avx2;
#endif
    atomic_store_explicit(&chosen, found, memory_order_relaxed);
    return found;
}

const fsdp_nn_loops *fsdp_nn_loops_get(void)
{
#if defined(__x86_64__)
    if (fsdp_matrix_variant_get() == &fsdp_matrix_avx2)
        return &fsdp_nn_loops_avx2;
#endif
    return &fsdp_nn_loops_c;
}

size_t fsdp_kernels_all(const fsdp_kernels **tables_out, size_t room)
{
    size_t count = 0;
    if (count < room)
        tables_out[count++] = &plain.kernels;
#if defined(__x86_64__)
    if (count < room && fsdp_processor_find().has_avx2)
        tables_out[count++] = &avx2.kernels;
#endif
    return count;
}
