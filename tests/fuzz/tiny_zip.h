/* A zip archive of stored records, built in memory. */
#ifndef FSDP_TINY_ZIP_H
#define FSDP_TINY_ZIP_H

#include <stddef.h>
#include <stdint.h>

typedef struct tiny_record {
    const char *name;
    const void *data;
    size_t size;
} tiny_record;

/* The size of the archive in bytes. */
size_t tiny_zip_size(const tiny_record *records, size_t count);
/* NULL when there is no memory; freed with free. Checksums are left out. */
uint8_t *tiny_zip(const tiny_record *records, size_t count, size_t *size_out);

#endif
