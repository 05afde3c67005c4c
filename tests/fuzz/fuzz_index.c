/*
 * Fuzz target: the shard index and what it leads to. An input is eight bytes that say where the index
 * begins and the bytes of a shard file, whose index reaches to their end. The record and the identity
 * that the manifest would hold are taken from the input, so that what lies after them is reached. All
 * boxes are walked, and some blocks of each are read, decoded and checked.
 */
#include "formats/native/native_index.h"
#include "statedict/transfer/pipeline.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { BLOCKS_PER_BOX = 3, BLOCKS_PER_INPUT = 24 };

static void require(bool truth)
{
    if (!truth)
        abort();
}

/* --- a file in memory ------------------------------------------------------------------------- */

typedef struct memory_file {
    fsdp_file base;
    const uint8_t *data;
    size_t size;
} memory_file;

static memory_file the_file;

static int open_memory(fsdp_io *io, const char *path, unsigned flags, fsdp_file **file_out)
{
    (void)io;
    (void)path;
    (void)flags;
    *file_out = &the_file.base;
    return 0;
}

static ssize_t read_memory(fsdp_file *file, void *data, size_t size, int64_t offset)
{
    const memory_file *memory = (const memory_file *)file;
    require(offset >= 0 && (size_t)offset <= memory->size && size <= memory->size - (size_t)offset);
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

static const fsdp_io_ops memory_ops = {.name = "memory",
                                       .open = open_memory,
                                       .pread = read_memory,
                                       .size = size_of_memory,
                                       .close = close_memory};

/* --- accepted indexes ------------------------------------------------------------------------- */

static void check_cut(const fsdp_stored_box *box, int64_t block)
{
    int64_t first, count;
    fsdp_block_range(box, block, &first, &count);
    require(first >= 0 && count > 0 && count <= box->count - first);
    require((block == 0) == (first == 0));
    require((block == box->block_count - 1) == (first + count == box->count));
}

static void check_block(fsdp_block_reader *block_reader, fsdp_shard_reader *reader,
                        const fsdp_stored_box *box, int64_t block)
{
    fsdp_error err = {0};
    check_cut(box, block);
    fsdp_status st = fsdp_check_block(block_reader, reader, box, block, &err);
    require(st == FSDP_OK || (st == FSDP_ERR_DAMAGED && err.text[0]));
}

/* The ranks of an index, which has a head for each, and the one whose boxes are read. */
typedef struct ranks {
    uint32_t rank, end;
} ranks;

static uint32_t heads_of(const fsdp_file_record *record)
{
    return (uint32_t)(record->index_size / (int64_t)sizeof(index_head));
}

static int64_t check_box(fsdp_block_reader *block_reader, fsdp_shard_reader *reader, ranks *of,
                         size_t i, int64_t blocks)
{
    const fsdp_stored_box *box = fsdp_shard_box_at(reader, i);
    fsdp_box whole = fsdp_stored_box_box(box);
    require(box->element_size > 0 && box->count == fsdp_box_count(&whole) && box->block_count > 0);
    while (fsdp_shard_find(reader, of->rank, box->tensor, box->part) != box) /* sorted by rank */
        require(++of->rank != of->end);
    int64_t taken = 0;
    for (int64_t block = 0; block < box->block_count && taken < BLOCKS_PER_BOX && taken < blocks;
         block++, taken++)
        check_block(block_reader, reader, box, block);
    check_cut(box, box->block_count - 1);
    return taken;
}

static void check_file(fsdp_shard_reader *reader, ranks of)
{
    uint32_t first = of.rank;
    fsdp_block_reader block_reader = {0};
    int64_t blocks = BLOCKS_PER_INPUT;
    for (size_t i = 0; i < fsdp_shard_box_count(reader); i++)
        blocks -= check_box(&block_reader, reader, &of, i, blocks);
    require(fsdp_shard_find(reader, first - 1, 0, 0) == NULL);
    fsdp_block_reader_release(&block_reader);
}

/* The identity in the first head; zero when there is none. */
static fsdp_shard_id identity(const fsdp_file_record *record, const uint8_t *file)
{
    fsdp_shard_id id = {.step = 0};
    index_head head;
    if (record->index_size < (int64_t)sizeof head)
        return id;
    memcpy(&head, file + record->index_offset, sizeof head);
    id.step = head.step;
    id.rank = head.rank;
    id.world = head.world;
    memcpy(id.run, head.run, sizeof id.run);
    return id;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    uint64_t place;
    if (size < sizeof place)
        return 0;
    memcpy(&place, data, sizeof place);
    const uint8_t *file = data + sizeof place;
    size -= sizeof place;
    fsdp_file_record record = {.size = (int64_t)size,
                               .index_offset = (int64_t)(place % (size + 1))};
    record.index_size = record.size - record.index_offset;
    record.index_hash =
        fsdp_kernels_get()->hash(file + record.index_offset, (size_t)record.index_size);
    fsdp_shard_id id = identity(&record, file);
    the_file = (memory_file){{&memory_ops}, file, size};
    fsdp_io io = {.ops = &memory_ops};
    fsdp_shard_reader *reader = NULL;
    fsdp_error err = {0};
    fsdp_status st = fsdp_shard_open(&io, "fuzz", &record, &id, &reader, &err);
    if (st == FSDP_OK)
        check_file(reader, (ranks){id.rank, id.rank + heads_of(&record)});
    else
        require((st == FSDP_ERR_DAMAGED || st == FSDP_ERR_NOT_FOUND) && err.text[0] && !reader);
    fsdp_shard_close(reader);
    return 0;
}
