/*
 * Fuzz target: the manifest. The hash at the end would stop nearly every changed input at once, so
 * the input is read once as it is and once with the right ending; what is accepted must be written
 * again, and that text must mean the same and be written the same. Both are also read from a directory
 * of which every other file has FILE_SIZE bytes.
 */
#include "statedict/manifest/manifest.h"

#include "base/core/mem.h"
#include "tests/fuzz/closing.h"
#include "tests/fuzz/memory_file.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { FILE_SIZE = 100 };

static void require(bool truth)
{
    if (!truth)
        abort();
}

static void check_state(const fsdp_manifest *manifest)
{
    require(manifest->sd && manifest->file_count >= 1 && manifest->world >= 1);
    for (size_t i = 0; i < fsdp_sd_count(manifest->sd); i++) {
        const fsdp_entry *entry = fsdp_sd_at(manifest->sd, i);
        require(fsdp_sd_find(manifest->sd, entry->name, entry->name_size) == (int64_t)i);
        if (entry->kind != FSDP_ENTRY_TENSOR)
            continue;
        require(fsdp_entry_bytes(entry) >= 0);
        require(fsdp_entry_local_bytes(entry, manifest->world - 1) <= fsdp_entry_bytes(entry));
    }
}

/* The files are what the manifest says, or they are not. */
static bool files_are_there(const fsdp_manifest *manifest)
{
    for (int i = 0; i < manifest->file_count; i++)
        if (manifest->files[i].size != FILE_SIZE)
            return false;
    return true;
}

/* expected NULL: the text is not a manifest. */
static void check_directory(const char *text, size_t size, const fsdp_manifest *expected)
{
    static const uint8_t bytes[FILE_SIZE];
    const memory_entry files[] = {{FSDP_MANIFEST_NAME, (const uint8_t *)text, size},
                                  {NULL, bytes, sizeof bytes}};
    fsdp_io *io = memory_folder(files, sizeof files / sizeof *files);
    fsdp_manifest manifest;
    fsdp_error err = {0};
    fsdp_status status = fsdp_manifest_read(io, "fuzz", &manifest, &err);
    require((status == FSDP_OK) == (expected && files_are_there(expected)));
    require(status == FSDP_OK ? manifest.world == expected->world
                              : err.status == status && err.text[0] && !manifest.sd);
    bool is_ours;
    if (fsdp_manifest_is_ours(io, "fuzz", &is_ours, &err) == FSDP_OK && expected)
        require(is_ours && fsdp_manifest_begins(text, size) && fsdp_manifest_ends(text, size));
    if (status == FSDP_OK)
        fsdp_manifest_release(&manifest);
}

static void check_text(const char *text, size_t size)
{
    fsdp_manifest manifest, again;
    fsdp_error err = {0};
    if (fsdp_manifest_decode(text, size, "fuzz", &manifest, &err) != FSDP_OK) {
        require(err.status != FSDP_OK && err.text[0] && !manifest.sd && !manifest.files);
        check_directory(text, size, NULL);
        return;
    }
    check_state(&manifest);
    check_directory(text, size, &manifest);
    fsdp_text first = {0}, second = {0};
    fsdp_status status = fsdp_manifest_encode(&manifest, &first, &err);
    require(status == FSDP_OK || status == FSDP_ERR_LIMIT);
    if (status == FSDP_OK) {
        require(fsdp_manifest_decode(first.data, first.size, "again", &again, &err) == FSDP_OK);
        require(fsdp_manifest_encode(&again, &second, &err) == FSDP_OK);
        require(first.size == second.size && memcmp(first.data, second.data, first.size) == 0);
        fsdp_manifest_release(&again);
    }
    fsdp_text_release(&first);
    fsdp_text_release(&second);
    fsdp_manifest_release(&manifest);
}

static void check_closed(const char *text, size_t size)
{
    fsdp_text closed = {0};
    fsdp_text_add(&closed, text, size_without_closing(text, size));
    if (closed.failed)
        return;
    fsdp_hash hash = fsdp_kernels_get()->hash(closed.data, closed.size);
    fsdp_text_add(&closed, CLOSING_START, sizeof CLOSING_START - 1);
    fsdp_text_add_hex(&closed, hash.bytes, sizeof hash.bytes);
    fsdp_text_add(&closed, "\"\n}\n", 4);
    if (!closed.failed)
        check_text(closed.data, closed.size);
    fsdp_text_release(&closed);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    const char *text = size > 0 ? (const char *)data : "";
    check_text(text, size);
    check_closed(text, size);
    return 0;
}
