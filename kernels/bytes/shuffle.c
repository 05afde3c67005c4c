/*
 * HDF5's byte shuffle in plain C: byte 0 of every element, then byte 1 of every element, and so
 * on. On floats it puts the exponents side by side, which is what makes them compress.
 */
#include "kernels/variants.h"

#include <string.h>

/* Elements per pass: source and target lines of one pass stay in the first-level cache. */
enum { PASS = 512 };

void fsdp_shuffle_rest(uint8_t *to, const uint8_t *from, size_t first, size_t count,
                       size_t element_size)
{
    for (size_t start = first; start < count; start += PASS) {
        size_t end = count - start < PASS ? count : start + PASS;
        for (size_t byte = 0; byte < element_size; byte++) {
            for (size_t i = start; i < end; i++)
                to[byte * count + i] = from[i * element_size + byte];
        }
    }
}

void fsdp_unshuffle_rest(uint8_t *to, const uint8_t *from, size_t first, size_t count,
                         size_t element_size)
{
    for (size_t start = first; start < count; start += PASS) {
        size_t end = count - start < PASS ? count : start + PASS;
        for (size_t byte = 0; byte < element_size; byte++) {
            for (size_t i = start; i < end; i++)
                to[i * element_size + byte] = from[byte * count + i];
        }
    }
}

void fsdp_shuffle_c(void *to, const void *from, size_t size, size_t element_size)
{
    if (element_size > 1)
        fsdp_shuffle_rest(to, from, 0, size / element_size, element_size);
    else if (size > 0)
        memcpy(to, from, size);
}

void fsdp_unshuffle_c(void *to, const void *from, size_t size, size_t element_size)
{
    if (element_size > 1)
        fsdp_unshuffle_rest(to, from, 0, size / element_size, element_size);
    else if (size > 0)
        memcpy(to, from, size);
}
