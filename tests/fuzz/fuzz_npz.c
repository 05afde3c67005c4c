/* Fuzz target: NumPy's files. An input that begins with "PK" is an archive, any other the header of an array
 * (its text) in front of some data. */
#include "tests/fuzz/memory_file.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { PREFIX = 10, TAIL = 64 };

/* Puts magic and length before the text, whose end is a newline, and TAIL bytes at least after it. */
static void read_array(const uint8_t *text, size_t size)
{
    const uint8_t *line = memchr(text, '\n', size);
    size_t length = line ? (size_t)(line - text) + 1 : size;
    uint8_t *file = calloc(1, PREFIX + size + TAIL);
    if (!file)
        return;
    memcpy(file, "\x93NUMPY\1\0", 8);
    file[8] = (uint8_t)(length & 0xFF);
    file[9] = (uint8_t)(length >> 8 & 0xFF);
    if (size > 0)
        memcpy(file + PREFIX, text, size);
    read_everything(memory_io(file, PREFIX + (line ? size : size + TAIL)));
    free(file);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size >= 2 && memcmp(data, "PK", 2) == 0)
        read_everything(memory_io(data, size));
    else if (size > 0)
        read_array(data, size);
    return 0;
}
