/* Fuzz target: a safetensors file, opened and read through. The length of the header is filled in, so that
 * most inputs get to the JSON: the first byte says whether it is. */
#include "tests/fuzz/memory_file.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* Where the header that begins at byte 8 ends, by its braces. */
static size_t header_size(const uint8_t *text, size_t size)
{
    int depth = 0;
    bool is_string = false;
    for (size_t i = 0; i < size; i++) {
        if (text[i] == '"' && (i == 0 || text[i - 1] != '\\'))
            is_string = !is_string;
        depth += is_string ? 0 : (text[i] == '{') - (text[i] == '}');
        if (depth == 0)
            return i + 1;
    }
    return size;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size < 10)
        return 0;
    bool is_true = data[0] & 1;
    data++;
    size--;
    uint8_t *copy = malloc(size);
    if (!copy)
        return 0;
    memcpy(copy, data, size);
    size_t length = header_size(copy + 8, size - 8);
    for (int i = 0; i < 8 && is_true; i++, length >>= 8)
        copy[i] = (uint8_t)(length & 0xFF);
    read_everything(memory_io(copy, size));
    free(copy);
    return 0;
}
