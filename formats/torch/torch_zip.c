/*
 * A torch.save zip: ROOT/data.pkl, ROOT/data/KEY for each storage, and small records with
 * versions. See torch_internal.h.
 */
#include "formats/torch/torch_internal.h"
#include "formats/zip/zip.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { PICKLE_LIMIT = 1 << 30, SMALL_RECORD = 64 };

typedef struct zip_reader {
    fsdp_source *source;
    int file, stream;
} zip_reader;

typedef struct torch_zip {
    zip_reader reader;
    fsdp_zip *zip;
    const char *root; /* the folder of all names, with its '/' */
    size_t root_size;
    fsdp_text name; /* scratch */
    torch_archive *archive;
} torch_zip;

static fsdp_status read_bytes(void *context, void *data, size_t size, int64_t offset,
                              fsdp_error *err)
{
    const zip_reader *reader = context;
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

/* All records lie in one folder, which has the file's name or is "archive". */
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
                             "%s: the zip archive has records in two root folders",
                             zip->archive->where);
    }
    if (find_record(zip, "constants.pkl"))
        return fsdp_fail(err, FSDP_ERR_REFUSED,
                         "%s is a TorchScript archive, which is a program; load it with "
                         "torch.jit.load and save its state_dict() with torch.save instead",
                         zip->archive->where);
    return FSDP_OK;
}

/* torch compresses only the source code of programs. */
static fsdp_status check_packing(const torch_zip *zip, fsdp_error *err)
{
    char shown[100];
    for (size_t i = 0; i < fsdp_zip_count(zip->zip); i++) {
        const fsdp_zip_entry *entry = fsdp_zip_at(zip->zip, i);
        if (entry->is_deflated && strncmp(entry->name + zip->root_size, "code/", 5) != 0)
            return fsdp_fail(err, FSDP_ERR_REFUSED,
                             "%s: record '%s' is deflated, which torch.save never does; load the "
                             "file with torch.load and save it again",
                             zip->archive->where,
                             fsdp_printable(entry->name, entry->name_size, shown, sizeof shown));
    }
    return FSDP_OK;
}

/* Checks a version record: a number from 1 to 10 and a line end, which some old files lack. */
static fsdp_status check_version(torch_zip *zip, fsdp_error *err)
{
    enum { NEWEST = 10 };
    const fsdp_zip_entry *entry = find_record(zip, "version");
    if (!entry)
        entry = find_record(zip, ".data/version");
    if (!entry)
        return FSDP_OK;
    char *text, *end, shown[100];
    FSDP_TRY(fsdp_zip_read(zip->zip, entry, SMALL_RECORD, &text, err));
    fsdp_printable(text, strlen(text), shown, sizeof shown);
    long version = text[0] >= '0' && text[0] <= '9' ? strtol(text, &end, 10) : 0;
    bool is_number = version > 0 && end + strspn(end, "\r\n") == text + entry->size;
    fsdp_free(text);
    if (!is_number)
        return fsdp_fail(err, FSDP_ERR_DAMAGED, "%s: its version '%s' is not a number",
                         zip->archive->where, shown);
    if (version > NEWEST)
        return fsdp_fail(
            err, FSDP_ERR_NOT_FOUND,
            "%s: its version is %ld, but this fsdp reads versions up to %d; use a newer fsdp",
            zip->archive->where, version, NEWEST);
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
        return fsdp_fail(err, FSDP_ERR_NOT_FOUND,
                         "%s: the zip archive has no data.pkl; if it is a packed directory, unpack "
                         "it first with unzip %s, and name the unpacked files",
                         archive->where, archive->where);
    FSDP_TRY(fsdp_zip_read(zip->zip, entry, PICKLE_LIMIT, &archive->data, err));
    archive->data_offset = zip->reader.stream >= 0 ? -1 : entry->offset;
    fsdp_pickle_options options = {.where = archive->where, .offset = entry->offset};
    return fsdp_pickle_parse(&options, archive->data, (size_t)entry->size, &archive->pickle, NULL,
                             err);
}

static fsdp_status place_storage(void *context, const torch_storage_id *id, torch_storage *storage,
                                 fsdp_error *err)
{
    torch_zip *zip = context;
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
        return fsdp_fail(err, FSDP_ERR_DAMAGED, "%s: it has no record 'data/%s'",
                         zip->archive->where, shown);
    if (id->element_size > 0 && entry->size != storage->size)
        return fsdp_fail(err, FSDP_ERR_DAMAGED,
                         "%s: record 'data/%s' has %lld bytes, but the pickle declares %lld",
                         zip->archive->where, shown, (long long)entry->size,
                         (long long)storage->size);
    storage->file = zip->reader.file;
    storage->stream = zip->reader.stream;
    storage->size = entry->size;
    storage->offset = entry->offset;
    storage->has_crc = entry->has_crc;
    storage->crc = entry->crc;
    return FSDP_OK;
}

/* Adds the checksums of all records but the pickle, which was checked when it was read. */
static fsdp_status add_checksums(torch_zip *zip, fsdp_error *err)
{
    for (size_t i = 0; i < fsdp_zip_count(zip->zip); i++) {
        const fsdp_zip_entry *entry = fsdp_zip_at(zip->zip, i);
        if (!entry->has_crc || entry->is_deflated) /* code/ */
            continue;
        char shown[100], what[120];
        fsdp_printable(entry->name, entry->name_size, shown, sizeof shown);
        snprintf(what, sizeof what, "record '%s'", shown);
        FSDP_TRY(fsdp_source_add_crc(
            zip->reader.source,
            &(fsdp_source_crc){what, zip->reader.file, entry->offset, entry->size, entry->crc},
            err));
    }
    return FSDP_OK;
}

static fsdp_status load(torch_zip *zip, const torch_opening *opening, int64_t offset, int64_t size,
                        fsdp_error *err)
{
    const char *path = fsdp_source_file_path(zip->reader.source, (size_t)zip->reader.file);
    fsdp_zip_input input = {read_bytes, &zip->reader, path, offset, size};
    FSDP_TRY(fsdp_zip_open(&input, 0, &zip->zip, err));
    FSDP_TRY(find_root(zip, err));
    FSDP_TRY(check_packing(zip, err));
    FSDP_TRY(check_version(zip, err));
    FSDP_TRY(read_byteorder(zip, err));
    FSDP_TRY(read_pickle(zip, err));
    FSDP_TRY(torch_note_code(opening, &zip->archive->pickle, err));
    return torch_resolve_links(zip->archive, place_storage, zip, err);
}

fsdp_status torch_zip_open(const torch_opening *opening, int64_t offset, int64_t size, bool checks,
                           torch_archive *archive_out, fsdp_error *err)
{
    *archive_out = (torch_archive){.source = opening->source,
                                   .where = opening->where,
                                   .file = opening->file,
                                   .memory = opening->memory};
    torch_zip zip = {.reader = {opening->source, opening->file, opening->stream},
                     .archive = archive_out};
    fsdp_status st = load(&zip, opening, offset, size, err);
    if (st == FSDP_OK && checks && opening->stream < 0)
        st = add_checksums(&zip, err);
    fsdp_zip_close(zip.zip);
    fsdp_text_release(&zip.name);
    if (st != FSDP_OK)
        torch_archive_release(archive_out);
    return st;
}
