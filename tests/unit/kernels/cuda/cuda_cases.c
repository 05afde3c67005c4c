/* Cases for kernels. See cuda_cases.h. */
#include "tests/unit/kernels/cuda/cuda_cases.h"

#include "tests/cuda/shim.h"

#include <criterion/criterion.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { GUARD = 64, GARBAGE = 0xa5 };

const fsdp_dtype case_floats[CASE_FLOATS] = {FSDP_F64,         FSDP_F32,         FSDP_F16,
                                             FSDP_BF16,        FSDP_F8_E4M3FN,   FSDP_F8_E5M2,
                                             FSDP_F8_E4M3FNUZ, FSDP_F8_E5M2FNUZ, FSDP_F8_E8M0FNU};
const fsdp_dtype case_folded[CASE_FOLDED] = {FSDP_F64, FSDP_F32, FSDP_F16, FSDP_BF16,
                                             FSDP_I64, FSDP_I32, FSDP_I16, FSDP_I8,
                                             FSDP_U64, FSDP_U32, FSDP_U16, FSDP_U8};

static uint64_t state;

void case_seed(uint64_t seed)
{
    state = seed;
    fsdp_shim_seed(seed);
}

uint64_t case_random(void)
{
    uint64_t x = state += UINT64_C(0x9e3779b97f4a7c15);
    x = (x ^ x >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ x >> 27) * UINT64_C(0x94d049bb133111eb);
    return x ^ x >> 31;
}

size_t case_below(size_t limit)
{
    return (size_t)(case_random() % limit);
}

fsdp_dtype case_float(void)
{
    return case_floats[case_below(CASE_FLOATS)];
}

size_t case_count(size_t most)
{
    static const size_t edges[] = {1, 8, 16, 64, 1024, 2048, 8192, 16384};
    size_t count =
        case_below(3) == 0 ? edges[case_below(8)] + case_below(3) - 1 : case_below(most + 1);
    return count <= most ? count : case_below(most + 1);
}

case_buffer case_buffer_create(size_t size, size_t align)
{
    case_buffer buffer = {.size = size + 2 * GUARD};
    buffer.memory = aligned_alloc(GUARD, (buffer.size + GUARD - 1) / GUARD * GUARD);
    cr_assert(buffer.memory);
    memset(buffer.memory, GARBAGE, buffer.size);
    buffer.data = buffer.memory + GUARD;
    if (case_below(2) == 0)
        buffer.data += case_below(16 / align + 1) * align;
    return buffer;
}

void case_buffer_free(case_buffer *buffer)
{
    free(buffer->memory);
    *buffer = (case_buffer){0};
}

case_buffer case_buffer_copy(const case_buffer *from)
{
    case_buffer copy = *from;
    copy.memory = aligned_alloc(GUARD, (from->size + GUARD - 1) / GUARD * GUARD);
    cr_assert(copy.memory);
    memcpy(copy.memory, from->memory, from->size);
    copy.data = copy.memory + (from->data - from->memory);
    return copy;
}

static void put_number(void *to, fsdp_dtype dtype, double number)
{
    fsdp_kernels_get()->cast(to, dtype, &number, FSDP_F64, 1, FSDP_OVERFLOW_INF);
}

void case_fill(void *data, fsdp_dtype dtype, size_t count)
{
    size_t size = fsdp_dtype_size(dtype);
    bool is_float = fsdp_dtype_describe(dtype)->is_float;
    for (size_t i = 0; i < count; i++) {
        uint64_t code[2] = {case_random(), case_random()};
        if (!is_float || case_below(4) == 0)
            memcpy((char *)data + i * size, code, size);
        else
            put_number((char *)data + i * size, dtype, ldexp((double)(int64_t)code[0], -60));
    }
}

void case_fill_usual(void *data, fsdp_dtype dtype, size_t count, double scale)
{
    for (size_t i = 0; i < count; i++)
        put_number((char *)data + i * fsdp_dtype_size(dtype), dtype,
                   scale * ldexp((double)(int64_t)case_random(), -63));
}

case_buffer case_tensor(fsdp_dtype dtype, size_t count, bool anywhere)
{
    size_t size = fsdp_dtype_size(dtype);
    case_buffer buffer =
        case_buffer_create(size * count, anywhere && case_below(4) == 0 ? 1 : size);
    case_fill(buffer.data, dtype, count);
    return buffer;
}

case_buffer case_tensor_at(fsdp_dtype dtype, size_t count, size_t skew)
{
    size_t size = fsdp_dtype_size(dtype);
    case_buffer buffer = case_buffer_create(size * (count + skew), size);
    buffer.data = buffer.memory + GUARD + skew * size;
    case_fill(buffer.data, dtype, count);
    return buffer;
}

void case_expect_equal(const case_buffer *found, const case_buffer *expected, const char *what)
{
    for (size_t i = 0; i < found->size; i++)
        cr_assert(found->memory[i] == expected->memory[i], "%s: byte %td of %zu is %02x, not %02x",
                  what, found->memory + i - found->data, found->size - 2 * (size_t)GUARD,
                  found->memory[i] & 0xff, expected->memory[i] & 0xff);
}

size_t case_launches(void)
{
    return fsdp_shim_launches();
}

void case_expect_success(int error)
{
    const char *failure = fsdp_shim_failure();
    cr_assert(!failure, "%s", failure);
    cr_assert_eq(error, 0, "error %d", error);
}
