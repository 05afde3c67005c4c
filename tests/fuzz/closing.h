/* The last line of manifests and plans, which holds the hash of what stands before it. */
#ifndef FSDP_CLOSING_H
#define FSDP_CLOSING_H

#include <stdbool.h>
#include <stddef.h>
#include <string.h>

#define CLOSING_START "\"xxh3\": \""
enum { CLOSING_SIZE = 45 };

/* Bytes of the text without such a line at its end. */
static inline size_t size_without_closing(const char *text, size_t size)
{
    bool is_closed = size >= CLOSING_SIZE && memcmp(text + size - CLOSING_SIZE, CLOSING_START,
                                                    sizeof CLOSING_START - 1) == 0;
    return is_closed ? size - CLOSING_SIZE : size;
}

#endif
