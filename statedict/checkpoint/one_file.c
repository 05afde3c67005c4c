/*
 * Checkpoints in one file: see one_file.h. The superblock of HDF5 holds the end of HDF5's part. The
 * manifest begins there and ends with the file. Either end of its text is enough to recognise it, so
 * that a file with one damaged byte is not taken for another program's.
 */
#include "statedict/checkpoint/one_file.h"

#include "base/core/mem.h"

#include <inttypes.h>
#include <string.h>

/* The superblock, version 0, with numbers of 8 bytes and no base address. */
enum { SUPERBLOCK = 48, VERSION_AT = 8, OFFSET_SIZE_AT = 13, LENGTH_SIZE_AT = 14, END_AT = 40 };
enum { EDGE = 64 }; /* bytes compared at either end of the text */

static const char signature[8] = "\211HDF\r\n\032\n";

typedef struct one_file {
    const char *path;
    fsdp_file *file;
    int64_t size;
    int64_t text_at; /* the end of HDF5's part; -1: unknown */
    bool is_hdf5;
} one_file;

static int64_t end_of_hdf5(const unsigned char *superblock)
{
    int64_t end;
    memcpy(&end, superblock + END_AT, sizeof end);
    bool known = superblock[VERSION_AT] == 0 && superblock[OFFSET_SIZE_AT] == 8 &&
                 superblock[LENGTH_SIZE_AT] == 8;
    return known ? end : -1;
}

static fsdp_status look(one_file *one, fsdp_error *err)
{
    unsigned char head[SUPERBLOCK];
    int result = one->file->ops->size(one->file, &one->size);
    if (result < 0)
        return fsdp_fail_errno(err, -result, "cannot get the size of '%s'", one->path);
    one->text_at = -1;
    if (one->size < SUPERBLOCK)
        return FSDP_OK;
    FSDP_TRY(fsdp_io_read(one->file, one->path, head, sizeof head, 0, err));
    one->is_hdf5 = memcmp(head, signature, sizeof signature) == 0;
    int64_t end = end_of_hdf5(head);
    if (end >= SUPERBLOCK && end < one->size)
        one->text_at = end;
    return FSDP_OK;
}

static fsdp_status open_one(fsdp_io *io, const char *path, unsigned mode, one_file *one,
                            fsdp_error *err)
{
    *one = (one_file){.path = path};
    FSDP_TRY(fsdp_io_open(io, path, mode, &one->file, err));
    fsdp_status st = look(one, err);
    if (st != FSDP_OK)
        (void)fsdp_io_close(&one->file, path, NULL);
    return st;
}

/* --- recognition ------------------------------------------------------------------------------ */

static fsdp_status look_at_edges(const one_file *one, bool *found_out, fsdp_error *err)
{
    char edge[EDGE];
    int64_t last = one->size < EDGE ? 0 : one->size - EDGE;
    *found_out = false;
    if (!one->is_hdf5)
        return FSDP_OK;
    if (one->text_at >= 0) {
        int64_t left = one->size - one->text_at;
        size_t size = left < EDGE ? (size_t)left : EDGE;
        FSDP_TRY(fsdp_io_read(one->file, one->path, edge, size, one->text_at, err));
        *found_out = fsdp_manifest_begins(edge, size);
    }
    if (*found_out)
        return FSDP_OK;
    size_t size = (size_t)(one->size - last);
    FSDP_TRY(fsdp_io_read(one->file, one->path, edge, size, last, err));
    *found_out = fsdp_manifest_ends(edge, size);
    return FSDP_OK;
}

bool fsdp_is_one_file(fsdp_io *io, const char *path)
{
    one_file one;
    fsdp_file_info info;
    bool found = false;
    if (io->ops->info(io, path, &info) < 0 || info.kind != FSDP_FILE_REGULAR)
        return false;
    if (open_one(io, path, FSDP_IO_READ, &one, NULL) != FSDP_OK)
        return false;
    fsdp_status st = look_at_edges(&one, &found, NULL);
    (void)fsdp_io_close(&one.file, path, NULL); /* opened for reading */
    return st == FSDP_OK && found;
}

/* --- reading ---------------------------------------------------------------------------------- */

static fsdp_status check_file(const one_file *one, fsdp_manifest *manifest, fsdp_error *err)
{
    if (manifest->kind != FSDP_FULL)
        return fsdp_fail(err, FSDP_ERR_DAMAGED,
                         "'%s' is damaged: its manifest describes a directory", one->path);
    if (manifest->files[0].size != one->text_at)
        return fsdp_fail(err, FSDP_ERR_DAMAGED,
                         "'%s' is damaged: its manifest begins at byte %" PRId64
                         ", but says that %" PRId64 " bytes precede it",
                         one->path, one->text_at, manifest->files[0].size);
    manifest->files[0].size = one->size;
    return FSDP_OK;
}

static fsdp_status read_text(const one_file *one, fsdp_manifest *manifest_out, fsdp_error *err)
{
    if (one->text_at < 0)
        return fsdp_fail(err, FSDP_ERR_DAMAGED,
                         "'%s' is damaged: its superblock does not give the offset of the manifest",
                         one->path);
    int64_t size = one->size - one->text_at;
    if (size > FSDP_MANIFEST_MAX)
        return fsdp_fail(err, FSDP_ERR_LIMIT,
                         "'%s' has a manifest of %" PRId64 " bytes, at most %d are allowed",
                         one->path, size, FSDP_MANIFEST_MAX);
    char *text = fsdp_alloc_pages((size_t)size);
    if (!text)
        return fsdp_fail_memory(err, "a manifest");
    fsdp_status st = fsdp_io_read(one->file, one->path, text, (size_t)size, one->text_at, err);
    if (st == FSDP_OK)
        st = fsdp_manifest_decode(text, (size_t)size, one->path, manifest_out, err);
    fsdp_free(text);
    return st;
}

fsdp_status fsdp_one_file_read(fsdp_io *io, const char *path, fsdp_manifest *manifest_out,
                               fsdp_error *err)
{
    one_file one;
    *manifest_out = (fsdp_manifest){.step = FSDP_NO_STEP};
    FSDP_TRY(open_one(io, path, FSDP_IO_READ, &one, err));
    fsdp_status st = read_text(&one, manifest_out, err);
    if (st == FSDP_OK && (st = check_file(&one, manifest_out, err)) != FSDP_OK)
        fsdp_manifest_release(manifest_out);
    (void)fsdp_io_close(&one.file, path, NULL);
    return st;
}

/* --- writing ---------------------------------------------------------------------------------- */

static fsdp_status write_text(one_file *one, const fsdp_text *text, bool durable, fsdp_error *err)
{
    int64_t end = one->size;
    unsigned char head[SUPERBLOCK];
    FSDP_TRY(fsdp_io_read(one->file, one->path, head, sizeof head, 0, err));
    if (!one->is_hdf5 || end_of_hdf5(head) != end)
        return fsdp_fail(err, FSDP_ERR_INTERNAL, "'%s' does not end at the size that HDF5 records",
                         one->path);
    FSDP_TRY(fsdp_io_write(one->file, one->path, text->data, text->size, end, err));
    return durable ? fsdp_io_sync(one->file, one->path, err) : FSDP_OK;
}

fsdp_status fsdp_one_file_append(fsdp_io *io, const char *path, const fsdp_manifest *manifest,
                                 bool durable, fsdp_error *err)
{
    one_file one;
    fsdp_text text = {0};
    FSDP_TRY(open_one(io, path, FSDP_IO_WRITE, &one, err));
    fsdp_status st = fsdp_manifest_encode(manifest, &text, err);
    if (st == FSDP_OK)
        st = write_text(&one, &text, durable, err);
    if (st == FSDP_OK)
        st = fsdp_io_close(&one.file, path, err);
    else
        (void)fsdp_io_close(&one.file, path, NULL);
    fsdp_text_release(&text);
    return st;
}
