/* Fuzz target: models of llm.c. An input is the numbers of a header from its first byte on, and the rest of
 * the file; the header is filled up with zeros. */
#include "tests/fuzz/memory_file.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { NUMBERS = 32, HEADER = 1024 };

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size < NUMBERS) {
        read_everything(memory_io(data, size));
        return 0;
    }
    size_t whole = HEADER + size - NUMBERS;
    uint8_t *file = calloc(1, whole);
    if (!file)
        return 0;
    memcpy(file, data, NUMBERS);
    memcpy(file + HEADER, data + NUMBERS, size - NUMBERS);
    read_everything(memory_io(file, whole));
    free(file);
    return 0;
}
