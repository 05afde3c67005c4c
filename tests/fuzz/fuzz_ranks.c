/* Fuzz target: rank sets. The input is the size of the first rank's pickle (two bytes, little-endian), that
 * pickle and the second rank's; around each a zip archive with three storages is put. */
#include "formats/bytes.h"
#include "formats/source.h"
#include "tests/fuzz/tiny_zip.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { RANKS = 2 };

typedef struct memory_file {
    fsdp_file base;
    uint8_t *data;
    size_t size;
} memory_file;

static const char *const names[RANKS] = {"fuzz/rank_0.pt", "fuzz/rank_1.pt"};
static memory_file files[RANKS];

static memory_file *find_file(const char *path)
{
    for (int rank = 0; rank < RANKS; rank++)
        if (strcmp(path, names[rank]) == 0)
            return &files[rank];
    return NULL;
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
    int result = visit(user, "rank_0.pt");
    return result == 0 ? visit(user, "rank_1.pt") : result;
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

/* Small tensors whole, of the others one element. */
static void read_tensors(fsdp_source *source)
{
    fsdp_source_reader reader = {0};
    for (size_t i = 0; i < fsdp_source_tensor_count(source) && i < 16; i++) {
        const fsdp_source_tensor *tensor = fsdp_source_tensor_at(source, i);
        fsdp_box box = fsdp_box_whole(tensor->ndim, tensor->shape);
        uint8_t data[1024];
        bool is_small = fsdp_box_count(&box) <= 64;
        for (int dim = 0; dim < box.ndim && !is_small; dim++)
            box.len[dim] = 1;
        fsdp_error err = {0};
        fsdp_status st = fsdp_source_read(source, i, &box, data, &reader, &err);
        require(st == FSDP_OK || is_refusal(st, &err));
    }
    fsdp_source_reader_release(&reader);
}

static bool make_file(int rank, const uint8_t *pickle, size_t size)
{
    static const uint8_t storage[24] = {0, 0, 0, 0, 1};
    const tiny_record records[] = {{"archive/data.pkl", pickle, size},
                                   {"archive/data/0", storage, sizeof storage},
                                   {"archive/data/1", storage, 8},
                                   {"archive/data/2", storage, 12}};
    files[rank] = (memory_file){.base = {&memory_ops}};
    files[rank].data = tiny_zip(records, sizeof records / sizeof *records, &files[rank].size);
    return files[rank].data != NULL;
}

static void read_set(void)
{
    fsdp_io io = {&memory_ops};
    fsdp_source *source = NULL;
    fsdp_error err = {0};
    fsdp_status st = fsdp_source_open(&io, "fuzz", &source, &err);
    require(st == FSDP_OK ? source != NULL : !source && is_refusal(st, &err));
    if (st == FSDP_OK)
        read_tensors(source);
    fsdp_source_close(source);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size < 2)
        return 0;
    size_t first = fsdp_load_u16(data), rest = size - 2;
    first = first < rest ? first : rest;
    if (make_file(0, data + 2, first) && make_file(1, data + 2 + first, rest - first))
        read_set();
    for (int rank = 0; rank < RANKS; rank++) {
        free(files[rank].data);
        files[rank].data = NULL;
    }
    return 0;
}
