/*
 * A torch.save zip: ROOT/data.pkl, ROOT/data/KEY for each storage, and small records that tell how they
 * were written. See torch_internal.h.
 */
#include "formats/torch_internal.h"
#include "formats/zip.h"

#include <stdio.h>
#include <string.h>

enum { PICKLE_LIMIT = 1 << 30, SMALL_RECORD = 64 };

typedef struct zip_reader {
    fsdp_source *source;
    int file, stream;
    bool is_sealed;
} zip_reader;

typedef struct packed_record {
    const fsdp_zip_entry *entry;
    int stream;
} packed_record;

typedef struct torch_zip {
    zip_reader reader;
    fsdp_zip *zip;
    const char *root; /* of the names, with its '/' */
    size_t root_size;
    fsdp_text name; /* scratch */
    torch_archive *archive;
    packed_record *packed; /* records that are streams already */
    size_t packed_count, packed_room;
} torch_zip;

static fsdp_status read_bytes(void *user, void *data, size_t size, int64_t offset, fsdp_error *err)
{
    const zip_reader *reader = user;
    if (reader->stream >= 0)
        return fsdp_source_stream_pread(reader->source, reader->stream, data, size, offset, err);
    return fsdp_source_pread(reader->source, reader->file, data, size, offset, err);
}

static const fsdp_zip_entry *find(torch_zip *zip, const char *name, size_t size)
{
    zip->name.size = 0;
    fsdp_text_add(&zip->name, zip->root, zip->root_size);
    fsdp_text_add(&zip->name, name, size);
    return zip->name.failed ? NULL : fsdp_zip_find(zip->zip, zip->name.data, zip->name.size);
}

static const fsdp_zip_entry *find_record(torch_zip *zip, const char *name)
{
    return find(zip, name, strlen(name));
}

/* All records lie below one folder, whose name is the file's or "archive". */
static fsdp_status find_root(torch_zip *zip, fsdp_error *err)
{
    size_t count = fsdp_zip_count(zip->zip);
    const fsdp_zip_entry *first = count > 0 ? fsdp_zip_at(zip->zip, 0) : NULL;
    const char *slash = first ? memchr(first->name, '/', first->name_size) : NULL;
    if (!slash)
        return fsdp_fail(err, FSDP_ERR_NOT_FOUND,
                         "%s: this zip archive was not written by torch.save", zip->archive->where);
    zip->root = first->name;
    zip->root_size = (size_t)(slash - first->name) + 1;
    for (size_t i = 1; i < count; i++) {
        const fsdp_zip_entry *entry = fsdp_zip_at(zip->zip, i);
        if (entry->name_size < zip->root_size ||
            memcmp(entry->name, zip->root, zip->root_size) != 0)
            return fsdp_fail(err, FSDP_ERR_REFUSED,
                             "%s: the zip archive has records below two roots",
                             zip->archive->where);
    }
    if (find_record(zip, "constants.pkl"))
        return fsdp_fail(
            err, FSDP_ERR_REFUSED,
            "%s is a TorchScript archive, which is a program: save its state_dict() with "
            "torch.save instead",
            zip->archive->where);
    return FSDP_OK;
}

static fsdp_status read_byteorder(torch_zip *zip, fsdp_error *err)
{
    const fsdp_zip_entry *entry = find_record(zip, "byteorder");
    if (!entry)
        return FSDP_OK;
    char *text;
    FSDP_TRY(fsdp_zip_read(zip->zip, entry, SMALL_RECORD, &text, err));
    bool is_little = strcmp(text, "little") == 0, is_big = strcmp(text, "big") == 0;
    fsdp_free(text);
    zip->archive->is_swapped = is_big;
    if (!is_little && !is_big)
        return fsdp_fail(err, FSDP_ERR_REFUSED, "%s: the byte order is neither 'little' nor 'big'",
                         zip->archive->where);
    return FSDP_OK;
}

static fsdp_status read_pickle(torch_zip *zip, fsdp_error *err)
{
    torch_archive *archive = zip->archive;
    const fsdp_zip_entry *entry = find_record(zip, "data.pkl");
    if (!entry)
        return fsdp_fail(err, FSDP_ERR_NOT_FOUND, "%s: the zip archive has no data.pkl",
                         archive->where);
    FSDP_TRY(fsdp_zip_read(zip->zip, entry, PICKLE_LIMIT, &archive->data, err));
    archive->data_offset = entry->is_deflated || zip->reader.stream >= 0 ? -1 : entry->offset;
    fsdp_pickle_options options = {.where = archive->where,
                                   .offset = entry->is_deflated ? 0 : entry->offset};
    return fsdp_pickle_parse(&options, archive->data, (size_t)entry->size, &archive->pickle, NULL,
                             err);
}

/* A packed record is one stream, however many tensors look into it. */
static fsdp_status find_stream(torch_zip *zip, const fsdp_zip_entry *entry, int *stream_out,
                               fsdp_error *err)
{
    for (size_t i = 0; i < zip->packed_count; i++)
        if (zip->packed[i].entry == entry) {
            *stream_out = zip->packed[i].stream;
            return FSDP_OK;
        }
    fsdp_source_stream stream = {.file = zip->reader.file,
                                 .packing = FSDP_PACKING_DEFLATE,
                                 .offset = entry->offset,
                                 .stored = entry->stored,
                                 .size = entry->size,
                                 .has_crc = entry->crc != 0,
                                 .crc = entry->crc};
    FSDP_TRY(fsdp_source_add_stream(zip->reader.source, &stream, stream_out, err));
    if (!fsdp_grow(&zip->packed, &zip->packed_room, zip->packed_count + 1, sizeof *zip->packed))
        return fsdp_fail_memory(err, "packed records");
    zip->packed[zip->packed_count++] = (packed_record){entry, *stream_out};
    return FSDP_OK;
}

static fsdp_status place_storage(void *user, const torch_storage_id *id, torch_storage *storage,
                                 fsdp_error *err)
{
    torch_zip *zip = user;
    char shown[100];
    zip->name.size = 0;
    fsdp_text_add(&zip->name, zip->root, zip->root_size);
    fsdp_text_add(&zip->name, "data/", 5);
    fsdp_text_add(&zip->name, id->key, id->key_size);
    if (zip->name.failed)
        return fsdp_fail_memory(err, "a storage's name");
    const fsdp_zip_entry *entry = fsdp_zip_find(zip->zip, zip->name.data, zip->name.size);
    fsdp_printable(id->key, id->key_size, shown, sizeof shown);
    if (!entry)
        return fsdp_fail(err, FSDP_ERR_DAMAGED, "%s: there is no record 'data/%s'",
                         zip->archive->where, shown);
    if (id->element_size > 0 && entry->size != storage->size)
        return fsdp_fail(
            err, FSDP_ERR_DAMAGED, "%s: record 'data/%s' has %lld bytes, the pickle speaks of %lld",
            zip->archive->where, shown, (long long)entry->size, (long long)storage->size);
    storage->file = zip->reader.file;
    storage->stream = zip->reader.stream;
    storage->size = entry->size;
    if (!entry->is_deflated) {
        storage->offset = entry->offset;
        storage->crc = entry->crc;
        return FSDP_OK;
    }
    if (zip->reader.is_sealed || zip->reader.stream >= 0)
        return fsdp_fail(err, FSDP_ERR_REFUSED, "%s: record 'data/%s' is packed inside an item",
                         zip->archive->where, shown);
    storage->offset = 0;
    return find_stream(zip, entry, &storage->stream, err);
}

/* The pickle was checked when it was read, and a stream checks itself. */
static fsdp_status add_checksums(torch_zip *zip, fsdp_error *err)
{
    for (size_t i = 0; i < fsdp_zip_count(zip->zip); i++) {
        const fsdp_zip_entry *entry = fsdp_zip_at(zip->zip, i);
        if (entry->crc == 0 || entry->is_deflated)
            continue;
        char shown[100], what[120];
        fsdp_printable(entry->name, entry->name_size, shown, sizeof shown);
        snprintf(what, sizeof what, "record '%s'", shown);
        FSDP_TRY(fsdp_source_add_crc(zip->reader.source, what, zip->reader.file, entry->offset,
                                     entry->size, entry->crc, err));
    }
    return FSDP_OK;
}

static fsdp_status load(torch_zip *zip, int64_t offset, int64_t size, bool checks, fsdp_error *err)
{
    const char *path = fsdp_source_file_path(zip->reader.source, (size_t)zip->reader.file);
    fsdp_zip_input input = {read_bytes, &zip->reader, path, offset, size};
    FSDP_TRY(fsdp_zip_open(&input, 0, &zip->zip, err));
    FSDP_TRY(find_root(zip, err));
    FSDP_TRY(read_byteorder(zip, err));
    FSDP_TRY(read_pickle(zip, err));
    FSDP_TRY(torch_resolve_links(zip->archive, place_storage, zip, err));
    return checks && zip->reader.stream < 0 ? add_checksums(zip, err) : FSDP_OK;
}

fsdp_status torch_zip_open(const torch_opening *opening, int64_t offset, int64_t size, bool checks,
                           torch_archive *archive_out, fsdp_error *err)
{
    *archive_out = (torch_archive){.source = opening->source,
                                   .where = opening->where,
                                   .file = opening->file,
                                   .memory = opening->memory};
    torch_zip zip = {
        .reader = {opening->source, opening->file, opening->stream, opening->is_sealed},
        .archive = archive_out};
    fsdp_status st = load(&zip, offset, size, checks, err);
    fsdp_zip_close(zip.zip);
    fsdp_text_release(&zip.name);
    fsdp_free(zip.packed);
    if (st != FSDP_OK)
        torch_archive_release(archive_out);
    return st;
}
