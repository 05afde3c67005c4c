/*
 * Fuzz inputs that are a folder of files: "folder\n", then for each file a byte with the size of its name,
 * the name, two bytes (little-endian) with the size of what it holds, and that. A file that is cut off
 * counts as far as it is there.
 */
#ifndef FSDP_BUNDLE_H
#define FSDP_BUNDLE_H

#include "tests/fuzz/memory_file.h"

enum { BUNDLE_FILES = 8, BUNDLE_NAME = 64 };

typedef struct bundle {
    memory_entry files[BUNDLE_FILES + 1];   /* memory for one of the target's own */
    char names[BUNDLE_FILES][BUNDLE_NAME];
    uint8_t *made[BUNDLE_FILES];
    size_t count;
} bundle;

bool bundle_begins(const uint8_t *data, size_t size);
/* The files borrow their contents from data. */
void bundle_split(const uint8_t *data, size_t size, bundle *files_out);
/* Replaces the contents of a file by data, which the bundle frees. NULL leaves the file as it is. */
void bundle_replace(bundle *files, size_t number, uint8_t *data, size_t size);
bool bundle_name_ends(const bundle *files, size_t number, const char *suffix);
void bundle_release(bundle *files);

#endif
