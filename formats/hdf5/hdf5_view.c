/*
 * The view: an HDF5 file in which every tensor is one virtual dataset over the shard files, for
 * h5py, h5ls and other programs; the library never reads it. See hdf5_file.h. The
 * bytes of each structure come first, with the reason for writing without libhdf5.
 *
 * The file: superblock, batches of datasets, root group. A batch is a global heap with the
 * mappings of some datasets, followed by their object headers. Only the names and addresses of
 * datasets are kept until the end, so that memory stays small however many mappings there are.
 */
#include "base/core/mem.h"
#include "base/text.h"
#include "formats/hdf5/hdf5_file.h"
#include "formats/hdf5/hdf5_types.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* === structures of the format ================================================================= */

/*
 * Encodes structures of the HDF5 file format (File Format Specification 3.0, sections as named below) for
 * the view. libhdf5 needs 90 us for each dataset of a view, this code 1 us, and the other ranks wait while
 * the view of 40,000 tensors is written. The bytes are those of libhdf5 1.10 with the oldest format that
 * it can write; only virtual layouts need a reader of 1.10 or newer.
 *
 * All numbers are little-endian, addresses and lengths have 8 bytes. Bytes are added to an fsdp_text,
 * which remembers a failed allocation.
 */

enum { FSDP_H5_REFERENCES_AT = 4 }; /* offset of the number of links in an object header */

enum { FSDP_H5_HEAP_HEADER = 16, FSDP_H5_HEAP_OBJECTS = 65535 }; /* a heap's objects: 1, 2, ... */
enum { FSDP_H5_SUPERBLOCK = 96 };

typedef struct fsdp_h5_symbol {
    const char *link;
    int64_t address;  /* of the object header */
    uint64_t name_at; /* out: offset of the link name in the group's heap */
} fsdp_h5_symbol;

static const uint64_t undefined_address = UINT64_MAX;

/* --- numbers --- */

static void put_number(fsdp_text *out, uint64_t value, size_t size)
{
    char bytes[8];
    for (size_t i = 0; i < size; i++)
        bytes[i] = (char)(value >> (8 * i) & 0xFF);
    fsdp_text_add(out, bytes, size);
}

static void put_u8(fsdp_text *out, unsigned value)
{
    put_number(out, value, 1);
}

static void put_u16(fsdp_text *out, unsigned value)
{
    put_number(out, value, 2);
}

static void h5_put_u32(fsdp_text *out, uint32_t value)
{
    put_number(out, value, 4);
}

static void put_u64(fsdp_text *out, uint64_t value)
{
    put_number(out, value, 8);
}

static void put_zeros(fsdp_text *out, size_t count)
{
    static const char zeros[256];
    for (; count > sizeof zeros; count -= sizeof zeros)
        fsdp_text_add(out, zeros, sizeof zeros);
    fsdp_text_add(out, zeros, count);
}

/* Zeros up to a multiple of 8 bytes after `start`. */
static void pad(fsdp_text *out, size_t start)
{
    put_zeros(out, (8 - (out->size - start) % 8) % 8);
}

/* Fills in a number whose value was unknown when its place was written. */
static void set_number(fsdp_text *out, size_t at, uint64_t value, size_t size)
{
    if (out->failed || at + size > out->size)
        return;
    for (size_t i = 0; i < size; i++)
        out->data[at + i] = (char)(value >> (8 * i) & 0xFF);
}

/* --- checksum: lookup3.c by Bob Jenkins, public domain, one byte at a time --- */

static uint32_t rotate(uint32_t x, int bits)
{
    return x << bits | x >> (32 - bits);
}

static void mix(uint32_t s[3])
{
    static const int bits[6] = {4, 6, 8, 16, 19, 4};
    for (int i = 0; i < 6; i++) {
        uint32_t *a = &s[i % 3], *b = &s[(i + 1) % 3], *c = &s[(i + 2) % 3];
        *a -= *c;
        *a ^= rotate(*c, bits[i]);
        *c += *b;
    }
}

static void mix_last(uint32_t s[3])
{
    static const int bits[7] = {14, 11, 25, 16, 4, 14, 24};
    for (int i = 0; i < 7; i++) {
        uint32_t *c = &s[(i + 2) % 3], *b = &s[(i + 1) % 3];
        *c ^= *b;
        *c -= rotate(*b, bits[i]);
    }
}

uint32_t fsdp_h5_checksum(const void *data, size_t size)
{
    enum { BLOCK = 12 };
    const unsigned char *at = data;
    uint32_t start = 0xDEADBEEF + (uint32_t)size, s[3] = {start, start, start};
    for (;; size -= BLOCK, at += BLOCK) {
        size_t n = size > BLOCK ? BLOCK : size;
        for (size_t i = 0; i < n; i++)
            s[i / 4] += (uint32_t)at[i] << (8 * (i % 4));
        if (size <= BLOCK)
            break;
        mix(s);
    }
    if (size > 0)
        mix_last(s);
    return s[2];
}

/* --- object headers --- */

enum { HEADER_PREFIX = 16, MESSAGE_PREFIX = 8 };
enum message_type {
    DATASPACE = 1,
    DATATYPE = 3,
    FILL = 5,
    LAYOUT = 8,
    ATTRIBUTE = 12,
    SYMBOL_TABLE = 17
};
enum { CONSTANT = 1 }; /* message flag: never changes */

/* Begins a header of `messages` messages and returns its offset. h5_end_header fills in its size. */
static size_t h5_begin_header(fsdp_text *out, unsigned messages)
{
    size_t header = out->size;
    put_u16(out, 1);
    put_u16(out, messages);
    h5_put_u32(out, 1);
    h5_put_u32(out, 0);
    h5_put_u32(out, 0);
    return header;
}

static void h5_end_header(fsdp_text *out, size_t header)
{
    set_number(out, header + 8, out->size - header - HEADER_PREFIX, 4);
}

static size_t begin_message(fsdp_text *out, enum message_type type, unsigned flags)
{
    put_u16(out, type);
    put_u16(out, 0);
    h5_put_u32(out, flags);
    return out->size;
}

static void end_message(fsdp_text *out, size_t body)
{
    pad(out, body);
    set_number(out, body - MESSAGE_PREFIX + 2, out->size - body, 2);
}

static void put_extent(fsdp_text *out, int ndim, const int64_t *shape)
{
    put_u8(out, 1);
    put_u8(out, (unsigned)ndim);
    put_zeros(out, 6);
    for (int d = 0; d < ndim; d++)
        put_u64(out, (uint64_t)shape[d]);
}

/* Each adds one message, padded. */
static void h5_put_dataspace(fsdp_text *out, int ndim, const int64_t *shape)
{
    size_t body = begin_message(out, DATASPACE, 0);
    put_extent(out, ndim, shape);
    end_message(out, body);
}

/* type: an encoded datatype (the body of the message). */
static void h5_put_datatype(fsdp_text *out, const void *type, size_t size)
{
    size_t body = begin_message(out, DATATYPE, CONSTANT);
    fsdp_text_add(out, type, size);
    end_message(out, body);
}

/* All bytes 0xFF. */
static void h5_put_fill(fsdp_text *out, size_t element_size)
{
    enum { VERSION = 2, ALLOCATE_LATE = 2, FILL_IF_SET = 2, DEFINED = 1 };
    size_t body = begin_message(out, FILL, CONSTANT);
    put_u8(out, VERSION);
    put_u8(out, ALLOCATE_LATE);
    put_u8(out, FILL_IF_SET);
    put_u8(out, DEFINED);
    h5_put_u32(out, (uint32_t)element_size);
    for (size_t i = 0; i < element_size; i++)
        put_u8(out, 0xFF);
    end_message(out, body);
}

/* The layout of a dataset without elements. */
static void h5_put_empty_layout(fsdp_text *out)
{
    enum { VERSION = 3, CONTIGUOUS = 1 };
    size_t body = begin_message(out, LAYOUT, 0);
    put_u8(out, VERSION);
    put_u8(out, CONTIGUOUS);
    put_u64(out, undefined_address);
    put_u64(out, 0);
    end_message(out, body);
}

/* Returns the offset of the heap address, which the caller fills in later. */
static size_t h5_put_virtual_layout(fsdp_text *out, uint32_t heap_object)
{
    enum { VERSION = 4, VIRTUAL = 3 };
    size_t body = begin_message(out, LAYOUT, 0);
    put_u8(out, VERSION);
    put_u8(out, VIRTUAL);
    size_t address_at = out->size;
    put_u64(out, undefined_address);
    h5_put_u32(out, heap_object);
    end_message(out, body);
    return address_at;
}

/* A scalar string. */
static void h5_put_string_attribute(fsdp_text *out, const char *name, const char *value)
{
    enum { VERSION = 1, DATATYPE_SIZE = 8, DATASPACE_SIZE = 8, STRING = 0x13, NULL_PADDED = 1 };
    size_t name_size = strlen(name) + 1, value_size = strlen(value);
    size_t body = begin_message(out, ATTRIBUTE, 0);
    put_u16(out, VERSION);
    put_u16(out, (unsigned)name_size);
    put_u16(out, DATATYPE_SIZE);
    put_u16(out, DATASPACE_SIZE);
    fsdp_text_add(out, name, name_size);
    pad(out, body);
    h5_put_u32(out, STRING | NULL_PADDED << 8);
    h5_put_u32(out, (uint32_t)value_size);
    put_extent(out, 0, NULL);
    fsdp_text_add(out, value, value_size);
    end_message(out, body);
}

/* --- virtual mappings --- */

static void put_all(fsdp_text *out)
{
    enum { ALL = 3 };
    h5_put_u32(out, ALL);
    h5_put_u32(out, 1);
    put_u64(out, 0);
}

/* Version 1: first and last corner of one block, in 4 bytes each. */
static void put_small_box(fsdp_text *out, int ndim, const int64_t *lo, const int64_t *len)
{
    h5_put_u32(out, 1);
    h5_put_u32(out, 0);
    h5_put_u32(out, (uint32_t)(8 + 8 * ndim));
    h5_put_u32(out, (uint32_t)ndim);
    h5_put_u32(out, 1);
    for (int d = 0; d < ndim; d++)
        h5_put_u32(out, (uint32_t)lo[d]);
    for (int d = 0; d < ndim; d++)
        h5_put_u32(out, (uint32_t)(lo[d] + len[d] - 1));
}

/* Version 2: start, stride, count and block of each dim in 8 bytes. */
static void put_large_box(fsdp_text *out, int ndim, const int64_t *lo, const int64_t *len)
{
    enum { REGULAR = 1 };
    h5_put_u32(out, 2);
    put_u8(out, REGULAR);
    h5_put_u32(out, (uint32_t)(4 + 32 * ndim));
    h5_put_u32(out, (uint32_t)ndim);
    for (int d = 0; d < ndim; d++) {
        put_u64(out, (uint64_t)lo[d]);
        put_u64(out, 1);
        put_u64(out, 1);
        put_u64(out, (uint64_t)len[d]);
    }
}

/* A box of a dataspace; a box of the whole dataspace is encoded as "all". */
static void h5_put_selection(fsdp_text *out, int ndim, const int64_t *shape, const int64_t *lo,
                             const int64_t *len)
{
    enum { HYPERSLAB = 2 };
    bool whole = true, small = true;
    for (int d = 0; d < ndim; d++) {
        whole = whole && lo[d] == 0 && len[d] == shape[d];
        small = small && lo[d] + len[d] <= UINT32_MAX;
    }
    if (whole) {
        put_all(out);
        return;
    }
    h5_put_u32(out, HYPERSLAB);
    if (small)
        put_small_box(out, ndim, lo, len);
    else
        put_large_box(out, ndim, lo, len);
}

/* Begins the block that a virtual layout points to. The caller adds, `count` times: file name, dataset
 * name (both with a zero byte), selection in the source, selection in the dataset. */
static size_t h5_begin_mappings(fsdp_text *out, size_t count)
{
    size_t block = out->size;
    put_u8(out, 0);
    put_u64(out, count);
    return block;
}

static void h5_end_mappings(fsdp_text *out, size_t block)
{
    if (!out->failed)
        h5_put_u32(out, fsdp_h5_checksum(out->data + block, out->size - block));
}

/* --- the global heap --- */

static void h5_begin_heap(fsdp_text *out)
{
    out->size = 0;
    fsdp_text_add(out, "GCOL\1\0\0\0", 8);
    put_u64(out, 0);
}

static size_t h5_begin_heap_object(fsdp_text *out, unsigned number)
{
    size_t object = out->size;
    put_u16(out, number);
    put_zeros(out, 6);
    put_u64(out, 0);
    return object;
}

static void h5_end_heap_object(fsdp_text *out, size_t object)
{
    set_number(out, object + 8, out->size - object - FSDP_H5_HEAP_HEADER, 8);
    pad(out, object);
}

/* Fills in the size and pads the heap to the minimum size. The free space of a heap is its object 0,
 * whose size includes its header. */
static void h5_end_heap(fsdp_text *out)
{
    const size_t least = 4096;
    size_t room = out->size >= least ? 0 : least - out->size;
    if (room > 0 && room < FSDP_H5_HEAP_HEADER)
        room = FSDP_H5_HEAP_HEADER;
    if (room > 0) {
        put_u64(out, 0);
        put_u64(out, room);
        put_zeros(out, room - FSDP_H5_HEAP_HEADER);
    }
    set_number(out, 8, out->size, 8);
}

/* --- the root group: names in a local heap, symbols in nodes, a B-tree over the nodes --- */

enum { SYMBOLS_PER_NODE = 64, CHILDREN_PER_NODE = 32, SYMBOL_SIZE = 40 };

/* Returns the offset of the heap's header. The data begins with the empty name, in 8 bytes. */
static int64_t put_names(fsdp_text *out, int64_t at, fsdp_h5_symbol *symbols, size_t count)
{
    enum { LOCAL_HEAP_HEADER = 32, NO_FREE_BLOCK = 1 };
    int64_t address = at + (int64_t)out->size;
    fsdp_text_add(out, "HEAP\0\0\0\0", 8);
    size_t size_at = out->size;
    put_u64(out, 0);
    put_u64(out, NO_FREE_BLOCK);
    put_u64(out, (uint64_t)address + LOCAL_HEAP_HEADER);
    size_t data = out->size;
    put_u64(out, 0);
    for (size_t i = 0; i < count; i++) {
        symbols[i].name_at = out->size - data;
        fsdp_text_add(out, symbols[i].link, strlen(symbols[i].link) + 1);
        pad(out, data);
    }
    set_number(out, size_at, out->size - data, 8);
    return address;
}

/* One level of the tree: node i lies at first + i * size, its symbols begin at i * span. */
typedef struct tree_level {
    int64_t first;
    size_t size, count, span;
} tree_level;

static size_t least(size_t a, size_t b)
{
    return a < b ? a : b;
}

static tree_level put_symbol_nodes(fsdp_text *out, int64_t at, const fsdp_h5_symbol *symbols,
                                   size_t count)
{
    tree_level nodes = {.first = at + (int64_t)out->size,
                        .size = 8 + SYMBOLS_PER_NODE * SYMBOL_SIZE,
                        .span = SYMBOLS_PER_NODE};
    for (size_t i = 0; i < count; nodes.count++) {
        size_t start = out->size, end = least(i + SYMBOLS_PER_NODE, count);
        fsdp_text_add(out, "SNOD\1\0", 6);
        put_u16(out, (unsigned)(end - i));
        for (; i < end; i++) {
            put_u64(out, symbols[i].name_at);
            put_u64(out, (uint64_t)symbols[i].address);
            put_zeros(out, SYMBOL_SIZE - 16);
        }
        put_zeros(out, nodes.size - (out->size - start));
    }
    return nodes;
}

/* The key before child i: the largest name under the child to its left. */
static uint64_t key_before(const tree_level *children, size_t i, const fsdp_h5_symbol *symbols,
                           size_t count)
{
    return i == 0 || count == 0 ? 0 : symbols[least(i * children->span, count) - 1].name_at;
}

static void put_tree_children(fsdp_text *out, const tree_level *children, size_t from,
                              const fsdp_h5_symbol *symbols, size_t count)
{
    size_t n = least(CHILDREN_PER_NODE, children->count - from);
    for (size_t i = from; i < from + n; i++) {
        put_u64(out, key_before(children, i, symbols, count));
        put_u64(out, (uint64_t)children->first + i * children->size);
    }
    put_u64(out, key_before(children, from + n, symbols, count));
    put_zeros(out, (CHILDREN_PER_NODE - n) * 16);
}

static tree_level put_tree_level(fsdp_text *out, int64_t at, unsigned height,
                                 const tree_level *children, const fsdp_h5_symbol *symbols,
                                 size_t count)
{
    tree_level nodes = {.first = at + (int64_t)out->size,
                        .size = 24 + 16 * CHILDREN_PER_NODE + 8,
                        .span = children->span * CHILDREN_PER_NODE};
    nodes.count = (children->count + CHILDREN_PER_NODE - 1) / CHILDREN_PER_NODE;
    nodes.count += nodes.count == 0; /* an empty group has one empty node */
    for (size_t i = 0; i < nodes.count; i++) {
        uint64_t here = (uint64_t)nodes.first + i * nodes.size;
        size_t from = i * CHILDREN_PER_NODE;
        fsdp_text_add(out, "TREE\0", 5);
        put_u8(out, height);
        put_u16(out, (unsigned)least(CHILDREN_PER_NODE, children->count - from));
        put_u64(out, i == 0 ? undefined_address : here - nodes.size);
        put_u64(out, i + 1 == nodes.count ? undefined_address : here + nodes.size);
        put_tree_children(out, children, from, symbols, count);
    }
    return nodes;
}

/* Returns the offset of the tree's root. */
static int64_t put_tree(fsdp_text *out, int64_t at, const fsdp_h5_symbol *symbols, size_t count)
{
    tree_level nodes = put_symbol_nodes(out, at, symbols, count);
    unsigned height = 0;
    do
        nodes = put_tree_level(out, at, height++, &nodes, symbols, count);
    while (nodes.count > 1);
    return nodes.first;
}

static void put_superblock(fsdp_text *out, int64_t end, int64_t root, int64_t tree, int64_t names)
{
    enum { TREE_CACHED = 1 };
    fsdp_text_add(out, "\x89HDF\r\n\x1A\n", 8);
    fsdp_text_add(out, "\0\0\0\0\0\x08\x08\0", 8);
    put_u16(out, SYMBOLS_PER_NODE / 2);
    put_u16(out, CHILDREN_PER_NODE / 2);
    h5_put_u32(out, 0);
    put_u64(out, 0);
    put_u64(out, undefined_address);
    put_u64(out, (uint64_t)end);
    put_u64(out, undefined_address);
    put_u64(out, 0);
    put_u64(out, (uint64_t)root);
    put_u64(out, TREE_CACHED);
    put_u64(out, (uint64_t)tree);
    put_u64(out, (uint64_t)names);
}

/*
 * Adds the root group of symbols sorted by link (strcmp), which lies at file position `at`, and makes the
 * superblock for it and for the end of the file after it.
 */
static void h5_put_root_group(fsdp_text *out, int64_t at, fsdp_h5_symbol *symbols, size_t count,
                              fsdp_text *superblock_out)
{
    int64_t names = put_names(out, at, symbols, count);
    int64_t tree = put_tree(out, at, symbols, count);
    int64_t root = at + (int64_t)out->size;
    size_t header = h5_begin_header(out, 1);
    size_t body = begin_message(out, SYMBOL_TABLE, 0);
    put_u64(out, (uint64_t)tree);
    put_u64(out, (uint64_t)names);
    end_message(out, body);
    h5_end_header(out, header);
    put_superblock(superblock_out, at + (int64_t)out->size, root, tree, names);
}

/* === the view ================================================================================= */

typedef struct view_entry {
    const char *link;
    const char *target; /* of an alias: a link, resolved at the end */
    int64_t address;    /* of the object header; relative to the batch until the batch is written */
    size_t heap_at;     /* offset of the heap address in its header; 0: none */
    uint32_t references;
} view_entry;

struct fsdp_h5_view {
    fsdp_file *file;
    char *path;
    int64_t end;             /* bytes in the file */
    fsdp_text heap, headers; /* the batch */
    unsigned heap_objects;
    size_t batch_first; /* first entry of the batch */
    view_entry *entries;
    size_t count, capacity;
    fsdp_arena names;
    fsdp_h5_type_bytes types[FSDP_DTYPE_COUNT];
};

/* --- batches --- */

static fsdp_status append(fsdp_h5_view *view, const fsdp_text *text, fsdp_error *err)
{
    if (text->failed)
        return fsdp_fail_memory(err, "a part of the view");
    FSDP_TRY(fsdp_io_write(view->file, view->path, text->data, text->size, view->end, err));
    view->end += (int64_t)text->size;
    return FSDP_OK;
}

static void start_batch(fsdp_h5_view *view)
{
    h5_begin_heap(&view->heap);
    view->headers.size = 0;
    view->heap_objects = 0;
    view->batch_first = view->count;
}

/* Fills in addresses: the heap's position is known now, and with its size the position of the
 * headers. */
static void place_batch(fsdp_h5_view *view, int64_t headers)
{
    for (size_t i = view->batch_first; i < view->count; i++) {
        view_entry *entry = &view->entries[i];
        if (entry->target)
            continue;
        entry->address += headers;
        if (entry->heap_at > 0)
            set_number(&view->headers, entry->heap_at, (uint64_t)view->end, 8);
    }
}

static fsdp_status write_batch(fsdp_h5_view *view, fsdp_error *err)
{
    bool has_heap = view->heap_objects > 0;
    if (has_heap)
        h5_end_heap(&view->heap);
    place_batch(view, view->end + (has_heap ? (int64_t)view->heap.size : 0));
    if (has_heap)
        FSDP_TRY(append(view, &view->heap, err));
    if (view->headers.size > 0)
        FSDP_TRY(append(view, &view->headers, err));
    start_batch(view);
    return FSDP_OK;
}

/* --- datasets --- */

static view_entry *add_entry(fsdp_h5_view *view, const char *link)
{
    if (!fsdp_grow(&view->entries, &view->capacity, view->count + 1, sizeof *view->entries))
        return NULL;
    const char *copy = fsdp_arena_strndup(&view->names, link, strlen(link));
    if (!copy)
        return NULL;
    view_entry *entry = &view->entries[view->count++];
    *entry = (view_entry){.link = copy, .references = 1};
    return entry;
}

/* Readers use a name as a printf format: "%b" is a block number, "%%" a percent sign. */
static void put_source_name(fsdp_text *heap, const char *name)
{
    for (const char *at = name; *at; at++) {
        if (*at == '%')
            fsdp_text_add(heap, "%", 1);
        fsdp_text_add(heap, at, 1);
    }
    fsdp_text_add(heap, "", 1);
}

static void put_mappings(fsdp_h5_view *view, int ndim, const int64_t *shape,
                         const fsdp_h5_source *sources, size_t count)
{
    fsdp_text *heap = &view->heap;
    size_t object = h5_begin_heap_object(heap, ++view->heap_objects);
    size_t block = h5_begin_mappings(heap, count);
    for (size_t i = 0; i < count; i++) {
        const fsdp_h5_source *source = &sources[i];
        put_source_name(heap, source->file);
        put_source_name(heap, source->link);
        h5_put_selection(heap, source->source_ndim, source->source_shape, source->source_lo,
                         source->source_len);
        h5_put_selection(heap, ndim, shape, source->lo, source->len);
    }
    h5_end_mappings(heap, block);
    h5_end_heap_object(heap, object);
}

static void put_header(fsdp_h5_view *view, view_entry *entry, fsdp_dtype dtype, int ndim,
                       const int64_t *shape, bool has_sources)
{
    fsdp_text *out = &view->headers;
    const fsdp_h5_type_bytes *type = &view->types[dtype];
    const unsigned messages = 4;
    entry->address = (int64_t)out->size;
    size_t header = h5_begin_header(out, messages + type->marked);
    h5_put_dataspace(out, ndim, shape);
    h5_put_datatype(out, type->bytes, type->size);
    h5_put_fill(out, fsdp_dtype_size(dtype));
    if (has_sources)
        entry->heap_at = h5_put_virtual_layout(out, view->heap_objects);
    else
        h5_put_empty_layout(out);
    if (type->marked)
        h5_put_string_attribute(out, FSDP_H5_MARK, fsdp_dtype_name(dtype));
    h5_end_header(out, header);
}

/* A reader loads a whole heap to open one of its datasets, so a heap stays small. */
static bool batch_is_full(const fsdp_h5_view *view)
{
    enum { ENOUGH = 16 << 10 };
    return view->heap.size >= ENOUGH || view->headers.size >= 4 * ENOUGH;
}

fsdp_status fsdp_h5_view_add(fsdp_h5_view *view, const fsdp_h5_dataset *tensor,
                             const fsdp_h5_source *sources, size_t count, fsdp_error *err)
{
    const char *link = tensor->link;
    fsdp_dtype dtype = tensor->dtype;
    if (dtype <= FSDP_DTYPE_NONE || dtype >= FSDP_DTYPE_COUNT)
        return fsdp_fail(err, FSDP_ERR_INTERNAL, "'%s' of '%s' has no dtype", link, view->path);
    if (view->types[dtype].size == 0)
        FSDP_TRY(fsdp_h5_type_encode(dtype, &view->types[dtype], err));
    view_entry *entry = add_entry(view, link);
    if (!entry)
        return fsdp_fail_memory(err, "the names of a view");
    if (count > 0)
        put_mappings(view, tensor->ndim, tensor->shape, sources, count);
    put_header(view, entry, dtype, tensor->ndim, tensor->shape, count > 0);
    if (view->heap.failed || view->headers.failed)
        return fsdp_fail_memory(err, "a part of the view");
    return batch_is_full(view) ? write_batch(view, err) : FSDP_OK;
}

fsdp_status fsdp_h5_view_link(fsdp_h5_view *view, const char *link, const char *target,
                              fsdp_error *err)
{
    const char *copy = fsdp_arena_strndup(&view->names, target, strlen(target));
    view_entry *entry = copy ? add_entry(view, link) : NULL;
    if (!entry)
        return fsdp_fail_memory(err, "the names of a view");
    entry->target = copy;
    return FSDP_OK;
}

/* --- the root group --- */

static int compare_links(const void *a, const void *b)
{
    return strcmp(((const view_entry *)a)->link, ((const view_entry *)b)->link);
}

static fsdp_status sort_entries(fsdp_h5_view *view, fsdp_error *err)
{
    if (view->count > 0)
        qsort(view->entries, view->count, sizeof *view->entries, compare_links);
    for (size_t i = 1; i < view->count; i++)
        if (compare_links(&view->entries[i - 1], &view->entries[i]) == 0)
            return fsdp_fail(err, FSDP_ERR_INTERNAL, "'%s' appears twice in '%s'",
                             view->entries[i].link, view->path);
    return FSDP_OK;
}

static view_entry *find_entry(fsdp_h5_view *view, const char *link)
{
    const view_entry key = {.link = link};
    return bsearch(&key, view->entries, view->count, sizeof key, compare_links);
}

static fsdp_status resolve_aliases(fsdp_h5_view *view, fsdp_error *err)
{
    for (size_t i = 0; i < view->count; i++) {
        view_entry *alias = &view->entries[i];
        if (!alias->target)
            continue;
        view_entry *target = find_entry(view, alias->target);
        if (!target || target->target)
            return fsdp_fail(err, FSDP_ERR_INTERNAL, "'%s' of '%s' is an alias of '%s', %s",
                             alias->link, view->path, alias->target,
                             target ? "which is an alias itself" : "which does not exist");
        alias->address = target->address;
        target->references++;
    }
    return FSDP_OK;
}

static fsdp_status write_references(fsdp_h5_view *view, fsdp_error *err)
{
    for (size_t i = 0; i < view->count; i++) {
        const view_entry *entry = &view->entries[i];
        if (entry->target || entry->references == 1)
            continue;
        fsdp_text number = {0};
        h5_put_u32(&number, entry->references);
        fsdp_status status = FSDP_OK;
        if (number.failed)
            status = fsdp_fail_memory(err, "a part of the view");
        else
            status = fsdp_io_write(view->file, view->path, number.data, number.size,
                                   entry->address + FSDP_H5_REFERENCES_AT, err);
        fsdp_text_release(&number);
        FSDP_TRY(status);
    }
    return FSDP_OK;
}

static fsdp_status write_root_group(fsdp_h5_view *view, fsdp_error *err)
{
    fsdp_h5_symbol *symbols = fsdp_alloc(view->count, sizeof *symbols);
    if (!symbols)
        return fsdp_fail_memory(err, "the names of a view");
    for (size_t i = 0; i < view->count; i++)
        symbols[i] =
            (fsdp_h5_symbol){.link = view->entries[i].link, .address = view->entries[i].address};
    fsdp_text group = {0}, superblock = {0};
    h5_put_root_group(&group, view->end, symbols, view->count, &superblock);
    fsdp_status status = append(view, &group, err);
    if (status == FSDP_OK && superblock.failed)
        status = fsdp_fail_memory(err, "a part of the view");
    if (status == FSDP_OK)
        status = fsdp_io_write(view->file, view->path, superblock.data, superblock.size, 0, err);
    fsdp_text_release(&group);
    fsdp_text_release(&superblock);
    fsdp_free(symbols);
    return status;
}

/* --- the file --- */

fsdp_status fsdp_h5_view_create(fsdp_io *io, const char *path, fsdp_h5_view **view_out,
                                fsdp_error *err)
{
    *view_out = NULL;
    fsdp_h5_view *view = fsdp_alloc(1, sizeof *view);
    char *copy = fsdp_strndup(path, strlen(path));
    fsdp_status status = FSDP_OK;
    if (!view || !copy)
        status = fsdp_fail_memory(err, "a view");
    else
        status = fsdp_io_open(io, path, FSDP_IO_CREATE, &view->file, err);
    if (status != FSDP_OK) {
        fsdp_free(copy);
        fsdp_free(view);
        return status;
    }
    view->path = copy;
    view->end = FSDP_H5_SUPERBLOCK;
    start_batch(view);
    *view_out = view;
    return FSDP_OK;
}

static fsdp_status finish(fsdp_h5_view *view, fsdp_error *err)
{
    FSDP_TRY(write_batch(view, err));
    FSDP_TRY(sort_entries(view, err));
    FSDP_TRY(resolve_aliases(view, err));
    FSDP_TRY(write_references(view, err));
    return write_root_group(view, err);
}

static void release(fsdp_h5_view *view)
{
    fsdp_text_release(&view->heap);
    fsdp_text_release(&view->headers);
    fsdp_arena_release(&view->names);
    fsdp_free(view->entries);
    fsdp_free(view->path);
    fsdp_free(view);
}

fsdp_status fsdp_h5_view_close(fsdp_h5_view *view, int64_t *size_out, fsdp_error *err)
{
    fsdp_status status = finish(view, err);
    fsdp_error ignored = {0};
    fsdp_status closed = fsdp_io_close(&view->file, view->path, status == FSDP_OK ? err : &ignored);
    if (status == FSDP_OK)
        status = closed;
    *size_out = status == FSDP_OK ? view->end : 0;
    release(view);
    return status;
}

void fsdp_h5_view_discard(fsdp_h5_view *view)
{
    if (!view)
        return;
    fsdp_error ignored = {0};
    (void)fsdp_io_close(&view->file, view->path, &ignored);
    release(view);
}
