/* Fuzz inputs that are a folder of files. See bundle.h. */
#include "tests/fuzz/bundle.h"

#include "base/core/bytes.h"

#include <stdlib.h>
#include <string.h>

static const char magic[] = "folder\n";

enum { MAGIC = sizeof magic - 1 };

bool bundle_begins(const uint8_t *data, size_t size)
{
    return size >= MAGIC && memcmp(data, magic, MAGIC) == 0;
}

typedef struct rest {
    const uint8_t *data;
    size_t size;
} rest;

static const uint8_t *take(rest *from, size_t *size)
{
    const uint8_t *data = from->data;
    *size = *size < from->size ? *size : from->size;
    from->data += *size;
    from->size -= *size;
    return data;
}

static void take_file(rest *from, bundle *files)
{
    size_t number = files->count++, one = 1, two = 2;
    memory_entry *file = &files->files[number];
    size_t name_size = *take(from, &one);
    const uint8_t *name = take(from, &name_size);
    size_t kept = name_size < BUNDLE_NAME - 1 ? name_size : BUNDLE_NAME - 1;
    memcpy(files->names[number], name, kept);
    file->name = files->names[number];
    const uint8_t *head = take(from, &two);
    file->size = two == 2 ? fsdp_load_u16(head) : 0;
    file->data = take(from, &file->size);
}

void bundle_split(const uint8_t *data, size_t size, bundle *files_out)
{
    *files_out = (bundle){.count = 0};
    rest from = {data + MAGIC, size - MAGIC};
    while (from.size > 0 && files_out->count < BUNDLE_FILES)
        take_file(&from, files_out);
}

void bundle_replace(bundle *files, size_t number, uint8_t *data, size_t size)
{
    if (!data)
        return;
    free(files->made[number]);
    files->made[number] = data;
    files->files[number].data = data;
    files->files[number].size = size;
}

bool bundle_name_ends(const bundle *files, size_t number, const char *suffix)
{
    size_t size = strlen(files->names[number]), end = strlen(suffix);
    return size >= end && strcmp(files->names[number] + size - end, suffix) == 0;
}

void bundle_release(bundle *files)
{
    for (size_t i = 0; i < BUNDLE_FILES; i++)
        free(files->made[i]);
}
