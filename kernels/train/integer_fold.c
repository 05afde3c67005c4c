/* Integers over ranks: every size is one loop over unsigned codes. See integer_fold.h. */
#include "kernels/train/integer_fold.h"

#include <string.h>

enum { BLOCK = 4096 }; /* bytes */

bool fsdp_integer_can_fold(fsdp_dtype dtype)
{
    switch (dtype) {
    case FSDP_I64:
    case FSDP_I32:
    case FSDP_I16:
    case FSDP_I8:
    case FSDP_U64:
    case FSDP_U32:
    case FSDP_U16:
    case FSDP_U8: return true;
    default: return false;
    }
}

static bool is_signed(fsdp_dtype dtype)
{
    return dtype == FSDP_I64 || dtype == FSDP_I32 || dtype == FSDP_I16 || dtype == FSDP_I8;
}

static inline uint64_t load(const uint8_t *from, size_t size)
{
    uint64_t code = 0;
    memcpy(&code, from, size);
    return code;
}

/* Flipping the sign bit makes the order of signed codes that of unsigned ones. */
static inline uint64_t larger(uint64_t a, uint64_t b, uint64_t sign)
{
    return (b ^ sign) > (a ^ sign) ? b : a;
}

/* Inlined with a constant size, a load is one instruction. */
static inline void fold_codes(uint8_t *restrict to, const uint8_t *restrict from, size_t size,
                              size_t bytes, fsdp_fold fold, uint64_t sign)
{
    if (fold == FSDP_FOLD_MAX) {
        for (size_t at = 0; at < bytes; at += size) {
            uint64_t code = larger(load(to + at, size), load(from + at, size), sign);
            memcpy(to + at, &code, size);
        }
        return;
    }
    for (size_t at = 0; at < bytes; at += size) {
        uint64_t code = load(to + at, size) + load(from + at, size);
        memcpy(to + at, &code, size);
    }
}

static void fold_block(uint8_t *to, const uint8_t *from, fsdp_dtype dtype, size_t bytes,
                       fsdp_fold fold)
{
    size_t size = fsdp_dtype_size(dtype);
    uint64_t sign = is_signed(dtype) ? UINT64_C(1) << (8 * size - 1) : 0;
    switch (size) {
    case 8: fold_codes(to, from, 8, bytes, fold, sign); break;
    case 4: fold_codes(to, from, 4, bytes, fold, sign); break;
    case 2: fold_codes(to, from, 2, bytes, fold, sign); break;
    default: fold_codes(to, from, 1, bytes, fold, sign); break;
    }
}

void fsdp_integer_fold(void *to, const void *const *from, int n, fsdp_dtype dtype, size_t count,
                       fsdp_fold fold)
{
    size_t size = count * fsdp_dtype_size(dtype);
    for (size_t first = 0; first < size; first += BLOCK) {
        uint8_t block[BLOCK];
        size_t bytes = size - first < BLOCK ? size - first : BLOCK;
        memcpy(block, (const uint8_t *)from[0] + first, bytes);
        for (int source = 1; source < n; source++)
            fold_block(block, (const uint8_t *)from[source] + first, dtype, bytes, fold);
        memcpy((uint8_t *)to + first, block, bytes);
    }
}
