/* Fuzz target: safetensors, a file or a folder of them (bundle.h). The length of the header is filled in, so
 * that most inputs get to the JSON: of a file on its own the first byte says whether it is. */
#include "tests/fuzz/bundle.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* The size of the header, which begins at byte 8 and ends with the brace that closes the first one. */
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

/* The file with the true length of its header. */
static uint8_t *with_length(const uint8_t *file, size_t size)
{
    uint8_t *copy = malloc(size);
    if (!copy)
        return NULL;
    memcpy(copy, file, size);
    size_t length = header_size(copy + 8, size - 8);
    for (int i = 0; i < 8; i++, length >>= 8)
        copy[i] = (uint8_t)(length & 0xFF);
    return copy;
}

static void read_folder(const uint8_t *data, size_t size)
{
    bundle files;
    bundle_split(data, size, &files);
    for (size_t i = 0; i < files.count; i++) {
        const memory_entry *file = &files.files[i];
        if (bundle_name_ends(&files, i, ".safetensors") && file->size > 9)
            bundle_replace(&files, i, with_length(file->data, file->size), file->size);
    }
    read_everything(memory_folder(files.files, files.count));
    bundle_release(&files);
}

static void read_file(const uint8_t *data, size_t size)
{
    uint8_t *copy = data[0] & 1 ? with_length(data + 1, size - 1) : NULL;
    read_everything(memory_io(copy ? copy : data + 1, size - 1));
    free(copy);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (bundle_begins(data, size))
        read_folder(data, size);
    else if (size >= 10)
        read_file(data, size);
    return 0;
}
