/* Fuzz target: the directory of a zip archive, and the bytes of its records. */
#include "base/core/mem.h"
#include "formats/zip/zip.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { LARGEST = 1 << 20, BEFORE = 3 };

typedef struct memory {
    const uint8_t *data;
    size_t size;
} memory;

static void require(bool truth)
{
    if (!truth)
        abort();
}

/* The archive begins at byte BEFORE of the file. */
static fsdp_status read_memory(void *user, void *data, size_t size, int64_t offset, fsdp_error *err)
{
    const memory *file = user;
    (void)err;
    require(offset >= BEFORE && (size_t)(offset - BEFORE) <= file->size &&
            size <= file->size - (size_t)(offset - BEFORE));
    if (size > 0)
        memcpy(data, file->data + offset - BEFORE, size);
    return FSDP_OK;
}

static bool is_refusal(fsdp_status st, const fsdp_error *err)
{
    return err->text[0] &&
           (st == FSDP_ERR_DAMAGED || st == FSDP_ERR_REFUSED || st == FSDP_ERR_LIMIT);
}

static void check_entry(const fsdp_zip *zip, const fsdp_zip_entry *entry)
{
    fsdp_error err = {0};
    char *bytes = NULL;
    require(fsdp_zip_find(zip, entry->name, entry->name_size) == entry);
    require(entry->is_deflated || entry->stored == entry->size);
    fsdp_status st = fsdp_zip_read(zip, entry, LARGEST, &bytes, &err);
    require(st == FSDP_OK ? bytes != NULL : !bytes && is_refusal(st, &err));
    fsdp_free(bytes);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size == 0)
        return 0;
    memory file = {data + 1, size - 1};
    fsdp_zip_input input = {read_memory, &file, "fuzz", BEFORE, (int64_t)file.size};
    fsdp_zip *zip = NULL;
    fsdp_error err = {0};
    fsdp_status st = fsdp_zip_open(&input, data[0] & 1 ? FSDP_ZIP_NAMES_ARE_DATA : 0, &zip, &err);
    require(st == FSDP_OK ? zip != NULL : !zip && is_refusal(st, &err));
    for (size_t i = 0; st == FSDP_OK && i < fsdp_zip_count(zip) && i < 16; i++)
        check_entry(zip, fsdp_zip_at(zip, i));
    fsdp_zip_close(zip);
    return 0;
}
