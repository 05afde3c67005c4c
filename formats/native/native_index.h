/*
 * The shard index: the bytes of one segment, shared by the writer and the reader.
 *
 * A segment lists the boxes that one rank wrote into a file. A sharded or local file has one segment, a full
 * file one per rank. All numbers are little-endian; the parts follow each other and are 8-byte aligned.
 *
 *   head     96 bytes       struct index_head
 *   records  80 x boxes     struct index_record, sorted by (tensor, part)
 *   dims      8 x n         per box: lo[ndim], len[ndim], then file strides in bytes (raw) or the
 *                           chunk shape (encoded)
 *   hashes   16 x blocks    XXH3-128 of each block's packed bytes
 *   frames   16 x m         offset and size of each frame, for the encoded boxes in order
 *   names     n bytes       the true names, padded with zeros to a multiple of 8
 */
#ifndef FSDP_NATIVE_INDEX_H
#define FSDP_NATIVE_INDEX_H

#include "formats/shard.h"

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "fsdp reads its indexes in place and needs a little-endian processor"
#endif

#define FSDP_INDEX_MAGIC "FSDPIDX1"
enum { FSDP_INDEX_ENCODED = 1, FSDP_INDEX_PACKED = 2 };

typedef struct index_head {
    char magic[8];
    uint32_t version, rank, world, zero;
    uint8_t run[16];
    int64_t step;
    uint64_t size;             /* of the whole segment */
    uint64_t boxes, dims, blocks, frames, name_bytes;
} index_head;

typedef struct index_record {
    uint32_t tensor, part;
    uint16_t dtype, ndim;
    uint32_t flags;
    int64_t offset;            /* raw: offset of the first element in the file */
    uint64_t dims;             /* index of its first number, in this array and the ones below */
    uint64_t hashes;
    uint64_t frames;
    uint64_t block_count;
    uint64_t name;
    uint64_t name_size;
    uint64_t zero;
} index_record;

_Static_assert(sizeof(index_head) == FSDP_SHARD_INDEX_LEAST && sizeof(index_record) == 80,
               "the index is read in place");

/* The shape of a box, and the chunks that it is cut into. */
typedef struct fsdp_blocking {
    int ndim;
    const int64_t *len;
    const int64_t *chunk;      /* NULL: a raw box, cut every FSDP_BLOCK_BYTES */
    size_t element_size;
} fsdp_blocking;

int64_t fsdp_native_blocks(const fsdp_blocking *box);        /* the number of them */

/* The range of a block in the packed order, and the block of an element. */
void fsdp_native_block_range(const fsdp_blocking *box, int64_t block, int64_t *first, int64_t *count);
int64_t fsdp_native_block_of(const fsdp_blocking *box, int64_t element);

/* --- runs: elements [first, first + count) of a box's packed order as runs of bytes in the file  */

typedef struct fsdp_file_runs {
    int outer;                 /* dims before the contiguous tail */
    const int64_t *len;
    const int64_t *stride;
    int64_t base, run, at, end;
    int64_t element_size;
} fsdp_file_runs;

/* The place of a box's elements in a file. */
typedef struct fsdp_file_place {
    int ndim;
    const int64_t *len, *strides;     /* strides in bytes */
    int64_t offset;                   /* of the first element */
    size_t element_size;
} fsdp_file_place;

/* Borrows len and strides. */
void fsdp_file_runs_begin(fsdp_file_runs *runs, const fsdp_file_place *place, int64_t first, int64_t count);
bool fsdp_file_runs_next(fsdp_file_runs *runs, int64_t *offset_out, int64_t *size_out);

#endif
