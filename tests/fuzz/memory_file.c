/* One file in memory, and what every source must stand: being read through. */
#include "tests/fuzz/memory_file.h"

#include "formats/source.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

enum { PIECE = 4096, TENSORS_READ = 64 };

static struct {
    fsdp_file base;
    const uint8_t *data;
    size_t size;
} the_file;

static int open_memory(fsdp_io *io, const char *path, unsigned flags, fsdp_file **file_out)
{
    (void)io;
    (void)flags;
    if (strcmp(path, "fuzz") != 0)
        return -ENOENT;
    *file_out = &the_file.base;
    return 0;
}

static ssize_t read_memory(fsdp_file *file, void *data, size_t size, int64_t offset)
{
    (void)file;
    if (offset < 0)
        abort();
    if ((size_t)offset >= the_file.size)
        return 0;
    size_t left = the_file.size - (size_t)offset;
    size = size < left ? size : left;
    memcpy(data, the_file.data + offset, size);
    return (ssize_t)size;
}

static int size_of_memory(fsdp_file *file, int64_t *size_out)
{
    (void)file;
    *size_out = (int64_t)the_file.size;
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
    if (strcmp(path, "fuzz") != 0)
        return -ENOENT;
    *info_out = (fsdp_file_info){.kind = FSDP_FILE_REGULAR, .size = (int64_t)the_file.size};
    return 0;
}

static const fsdp_io_ops memory_ops = {.name = "memory",
                                       .open = open_memory,
                                       .pread = read_memory,
                                       .size = size_of_memory,
                                       .info = info_of_memory,
                                       .close = close_memory};

fsdp_io *memory_io(const uint8_t *data, size_t size)
{
    static fsdp_io io = {&memory_ops};
    the_file.base.ops = &memory_ops;
    the_file.data = data;
    the_file.size = size;
    return &io;
}

static void require(bool truth)
{
    if (!truth)
        abort();
}

static bool is_refusal(fsdp_status status, const fsdp_error *err)
{
    return err->text[0] && (status == FSDP_ERR_NOT_FOUND || status == FSDP_ERR_DAMAGED ||
                            status == FSDP_ERR_REFUSED || status == FSDP_ERR_LIMIT);
}

/* The first pieces and the last one. */
static void read_tensor(fsdp_source *source, size_t number, fsdp_source_reader *reader)
{
    static uint8_t data[PIECE];
    const fsdp_source_tensor *tensor = fsdp_source_tensor_at(source, number);
    fsdp_box whole = fsdp_box_whole(tensor->ndim, tensor->shape), pieces[FSDP_BOX_PIECES];
    int64_t count = fsdp_box_count(&whole);
    int64_t step = PIECE / (int64_t)fsdp_dtype_size(tensor->dtype);
    for (int64_t first = 0; first<count; first = first> 8 * step ? count : first + step) {
        int n = fsdp_box_cut(&whole, first, count - first < step ? count - first : step, pieces);
        for (int i = 0; i < n; i++) {
            fsdp_error err = {0};
            fsdp_status status = fsdp_source_read(source, number, &pieces[i], data, reader, &err);
            require(status == FSDP_OK || is_refusal(status, &err));
            if (status != FSDP_OK)
                return;
        }
    }
}

void read_everything(fsdp_io *io)
{
    fsdp_source *source = NULL;
    fsdp_error err = {0};
    fsdp_status status = fsdp_source_open(io, "fuzz", &source, &err);
    require(status == FSDP_OK ? source != NULL : !source && is_refusal(status, &err));
    if (status != FSDP_OK)
        return;
    fsdp_source_reader reader = {0};
    fsdp_source_set_memory(source, 1 << 20, NULL);
    for (size_t i = 0; i < fsdp_source_tensor_count(source) && i < TENSORS_READ; i++)
        read_tensor(source, i, &reader);
    for (size_t i = 0; i < fsdp_source_check_count(source) && i < TENSORS_READ; i++) {
        err = (fsdp_error){0};
        status = fsdp_source_check(source, i, &reader, &err);
        require(status == FSDP_OK || is_refusal(status, &err));
    }
    fsdp_source_reader_release(&reader);
    fsdp_source_close(source);
}
