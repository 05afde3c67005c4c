/*
 * CRC-32 of zip, gzip and PNG: the plain variant, eight bytes a step, and the arithmetic of polynomials
 * that joins the checksums of two pieces. Bits are reversed, as in those formats: the highest bit of a
 * word is x to the 0.
 */
#include "kernels/variants.h"

#include <pthread.h>

enum { STRIDE = 8 };

static const uint32_t polynomial = 0xedb88320;

/* tables[k][byte]: the byte with k zero bytes after it. */
static uint32_t tables[STRIDE][256];
static pthread_once_t tables_made = PTHREAD_ONCE_INIT;

static uint32_t times_x(uint32_t word)
{
    return word & 1 ? word >> 1 ^ polynomial : word >> 1;
}

static void make_tables(void)
{
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t word = byte;
        for (int bit = 0; bit < 8; bit++)
            word = times_x(word);
        tables[0][byte] = word;
    }
    for (int k = 1; k < STRIDE; k++)
        for (int byte = 0; byte < 256; byte++) {
            uint32_t before = tables[k - 1][byte];
            tables[k][byte] = before >> 8 ^ tables[0][before & 0xff];
        }
}

uint32_t fsdp_crc32_add_c(uint32_t state, const uint8_t *data, size_t size)
{
    pthread_once(&tables_made, make_tables);
    for (; size >= STRIDE; size -= STRIDE, data += STRIDE) {
        uint32_t next = 0;
        for (int i = 0; i < 4; i++)
            next ^= tables[7 - i][data[i] ^ (state >> 8 * i & 0xff)];
        for (int i = 4; i < STRIDE; i++)
            next ^= tables[7 - i][data[i]];
        state = next;
    }
    for (; size > 0; size--, data++)
        state = state >> 8 ^ tables[0][(state ^ *data) & 0xff];
    return state;
}

/* --- joining ---------------------------------------------------------------------------------- */

static uint32_t multiply(uint32_t a, uint32_t b)
{
    uint32_t product = 0;
    for (uint32_t bit = (uint32_t)1 << 31; bit != 0; bit >>= 1, b = times_x(b))
        if (a & bit)
            product ^= b;
    return product;
}

/* x to the 8 * bytes, by which that many further bytes multiply a checksum. */
static uint32_t shift_of(uint64_t bytes)
{
    uint32_t shift = (uint32_t)1 << 31, power = (uint32_t)1 << (31 - 8);
    for (; bytes > 0; bytes >>= 1, power = multiply(power, power))
        if (bytes & 1)
            shift = multiply(shift, power);
    return shift;
}

uint32_t fsdp_crc32_join(uint32_t first, uint32_t second, uint64_t second_size)
{
    return multiply(first, shift_of(second_size)) ^ second;
}
