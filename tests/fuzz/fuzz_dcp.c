/* Fuzz target: the metadata of a DCP directory. The input is `.metadata`; every file that it names holds the
 * same small item, a tensor of six f32, and begins with it. */
#include "formats/source.h"
#include "tests/fuzz/tiny_zip.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

typedef struct memory_file {
    fsdp_file base;
    const uint8_t *data;
    size_t size;
} memory_file;

static memory_file metadata_file, item_file;

static const char item_pickle[] = "\x80\x02"
                                  "ctorch._utils\n_rebuild_tensor_v2\n"
                                  "((X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\0"
                                  "0X\x03\0\0\0cpuK\x06tQK\0K\x03K\x02\x86K\x02K\x01\x86\x89"
                                  "ccollections\nOrderedDict\n)RtR.";

static memory_file *find_file(const char *path)
{
    if (strcmp(path, "fuzz/.metadata") == 0)
        return &metadata_file;
    return strncmp(path, "fuzz/", 5) == 0 ? &item_file : NULL;
}

static int open_memory(fsdp_io *io, const char *path, unsigned flags, fsdp_file **file_out)
{
    (void)io;
    (void)flags;
    memory_file *file = find_file(path);
    *file_out = file ? &file->base : NULL;
    return file ? 0 : -ENOENT;
}

static ssize_t read_memory(fsdp_file *file, void *data, size_t size, int64_t offset)
{
    const memory_file *memory = (const memory_file *)file;
    if (offset < 0)
        abort();
    if ((size_t)offset >= memory->size)
        return 0;
    size = size < memory->size - (size_t)offset ? size : memory->size - (size_t)offset;
    memcpy(data, memory->data + offset, size);
    return (ssize_t)size;
}

static int size_of_memory(fsdp_file *file, int64_t *size_out)
{
    *size_out = (int64_t)((const memory_file *)file)->size;
    return 0;
}

static int close_memory(fsdp_file *file)
{
    (void)file;
    return 0;
}

static int info_of_memory(fsdp_io *io, const char *path, fsdp_file_info *info_out)
{
    (void)io;
    const memory_file *file = find_file(path);
    *info_out = (fsdp_file_info){.kind = file ? FSDP_FILE_REGULAR : FSDP_FILE_DIRECTORY};
    info_out->size = file ? (int64_t)file->size : 0;
    return 0;
}

static int list_memory(fsdp_io *io, const char *path, int (*visit)(void *user, const char *name),
                       void *user)
{
    (void)io;
    (void)path;
    return visit(user, ".metadata");
}

static const fsdp_io_ops memory_ops = {.name = "memory",
                                       .open = open_memory,
                                       .pread = read_memory,
                                       .size = size_of_memory,
                                       .info = info_of_memory,
                                       .list = list_memory,
                                       .close = close_memory};

static void require(bool truth)
{
    if (!truth)
        abort();
}

static bool is_refusal(fsdp_status st, const fsdp_error *err)
{
    return err->text[0] && (st == FSDP_ERR_NOT_FOUND || st == FSDP_ERR_DAMAGED ||
                            st == FSDP_ERR_REFUSED || st == FSDP_ERR_LIMIT);
}

/* One element of each tensor. */
static void read_tensors(fsdp_source *source)
{
    fsdp_source_reader reader = {0};
    for (size_t i = 0; i < fsdp_source_tensor_count(source) && i < 16; i++) {
        const fsdp_source_tensor *tensor = fsdp_source_tensor_at(source, i);
        fsdp_box box = fsdp_box_whole(tensor->ndim, tensor->shape);
        for (int dim = 0; dim < box.ndim; dim++)
            box.len[dim] = box.len[dim] > 1 ? 1 : box.len[dim];
        uint8_t element[16];
        fsdp_error err = {0};
        fsdp_status st = fsdp_source_read(source, i, &box, element, &reader, &err);
        require(st == FSDP_OK || is_refusal(st, &err));
    }
    fsdp_source_reader_release(&reader);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const uint8_t storage[24] = {1, 2, 3};
    const tiny_record records[] = {{"archive/data.pkl", item_pickle, sizeof item_pickle - 1},
                                   {"archive/data/0", storage, sizeof storage}};
    size_t item_size;
    uint8_t *item = tiny_zip(records, 2, &item_size);
    if (!item)
        return 0;
    metadata_file = (memory_file){{&memory_ops}, data, size};
    item_file = (memory_file){{&memory_ops}, item, item_size};
    fsdp_io io = {&memory_ops};
    fsdp_source *source = NULL;
    fsdp_error err = {0};
    fsdp_status st = fsdp_source_open(&io, "fuzz", &source, &err);
    require(st == FSDP_OK ? source != NULL : !source && is_refusal(st, &err));
    if (st == FSDP_OK)
        read_tensors(source);
    fsdp_source_close(source);
    free(item);
    return 0;
}
