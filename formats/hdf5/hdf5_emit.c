/* Encodes HDF5 structures: see hdf5_emit.h. */
#include "formats/hdf5/hdf5_emit.h"

#include <string.h>

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

void fsdp_h5_put_u32(fsdp_text *out, uint32_t value)
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

void fsdp_h5_set_u64(fsdp_text *out, size_t at, uint64_t value)
{
    set_number(out, at, value, 8);
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

size_t fsdp_h5_begin_header(fsdp_text *out, unsigned messages)
{
    size_t header = out->size;
    put_u16(out, 1);
    put_u16(out, messages);
    fsdp_h5_put_u32(out, 1);
    fsdp_h5_put_u32(out, 0);
    fsdp_h5_put_u32(out, 0);
    return header;
}

void fsdp_h5_end_header(fsdp_text *out, size_t header)
{
    set_number(out, header + 8, out->size - header - HEADER_PREFIX, 4);
}

static size_t begin_message(fsdp_text *out, enum message_type type, unsigned flags)
{
    put_u16(out, type);
    put_u16(out, 0);
    fsdp_h5_put_u32(out, flags);
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

void fsdp_h5_put_dataspace(fsdp_text *out, int ndim, const int64_t *shape)
{
    size_t body = begin_message(out, DATASPACE, 0);
    put_extent(out, ndim, shape);
    end_message(out, body);
}

void fsdp_h5_put_datatype(fsdp_text *out, const void *type, size_t size)
{
    size_t body = begin_message(out, DATATYPE, CONSTANT);
    fsdp_text_add(out, type, size);
    end_message(out, body);
}

void fsdp_h5_put_fill(fsdp_text *out, size_t element_size)
{
    enum { VERSION = 2, ALLOCATE_LATE = 2, FILL_IF_SET = 2, DEFINED = 1 };
    size_t body = begin_message(out, FILL, CONSTANT);
    put_u8(out, VERSION);
    put_u8(out, ALLOCATE_LATE);
    put_u8(out, FILL_IF_SET);
    put_u8(out, DEFINED);
    fsdp_h5_put_u32(out, (uint32_t)element_size);
    for (size_t i = 0; i < element_size; i++)
        put_u8(out, 0xFF);
    end_message(out, body);
}

void fsdp_h5_put_empty_layout(fsdp_text *out)
{
    enum { VERSION = 3, CONTIGUOUS = 1 };
    size_t body = begin_message(out, LAYOUT, 0);
    put_u8(out, VERSION);
    put_u8(out, CONTIGUOUS);
    put_u64(out, undefined_address);
    put_u64(out, 0);
    end_message(out, body);
}

size_t fsdp_h5_put_virtual_layout(fsdp_text *out, uint32_t heap_object)
{
    enum { VERSION = 4, VIRTUAL = 3 };
    size_t body = begin_message(out, LAYOUT, 0);
    put_u8(out, VERSION);
    put_u8(out, VIRTUAL);
    size_t address_at = out->size;
    put_u64(out, undefined_address);
    fsdp_h5_put_u32(out, heap_object);
    end_message(out, body);
    return address_at;
}

void fsdp_h5_put_string_attribute(fsdp_text *out, const char *name, const char *value)
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
    fsdp_h5_put_u32(out, STRING | NULL_PADDED << 8);
    fsdp_h5_put_u32(out, (uint32_t)value_size);
    put_extent(out, 0, NULL);
    fsdp_text_add(out, value, value_size);
    end_message(out, body);
}

/* --- virtual mappings --- */

static void put_all(fsdp_text *out)
{
    enum { ALL = 3 };
    fsdp_h5_put_u32(out, ALL);
    fsdp_h5_put_u32(out, 1);
    put_u64(out, 0);
}

/* Version 1: first and last corner of one block, in 4 bytes each. */
static void put_small_box(fsdp_text *out, int ndim, const int64_t *lo, const int64_t *len)
{
    fsdp_h5_put_u32(out, 1);
    fsdp_h5_put_u32(out, 0);
    fsdp_h5_put_u32(out, (uint32_t)(8 + 8 * ndim));
    fsdp_h5_put_u32(out, (uint32_t)ndim);
    fsdp_h5_put_u32(out, 1);
    for (int d = 0; d < ndim; d++)
        fsdp_h5_put_u32(out, (uint32_t)lo[d]);
    for (int d = 0; d < ndim; d++)
        fsdp_h5_put_u32(out, (uint32_t)(lo[d] + len[d] - 1));
}

/* Version 2: start, stride, count and block of each dim in 8 bytes. */
static void put_large_box(fsdp_text *out, int ndim, const int64_t *lo, const int64_t *len)
{
    enum { REGULAR = 1 };
    fsdp_h5_put_u32(out, 2);
    put_u8(out, REGULAR);
    fsdp_h5_put_u32(out, (uint32_t)(4 + 32 * ndim));
    fsdp_h5_put_u32(out, (uint32_t)ndim);
    for (int d = 0; d < ndim; d++) {
        put_u64(out, (uint64_t)lo[d]);
        put_u64(out, 1);
        put_u64(out, 1);
        put_u64(out, (uint64_t)len[d]);
    }
}

void fsdp_h5_put_selection(fsdp_text *out, int ndim, const int64_t *shape, const int64_t *lo,
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
    fsdp_h5_put_u32(out, HYPERSLAB);
    if (small)
        put_small_box(out, ndim, lo, len);
    else
        put_large_box(out, ndim, lo, len);
}

size_t fsdp_h5_begin_mappings(fsdp_text *out, size_t count)
{
    size_t block = out->size;
    put_u8(out, 0);
    put_u64(out, count);
    return block;
}

void fsdp_h5_end_mappings(fsdp_text *out, size_t block)
{
    if (!out->failed)
        fsdp_h5_put_u32(out, fsdp_h5_checksum(out->data + block, out->size - block));
}

/* --- the global heap --- */

void fsdp_h5_begin_heap(fsdp_text *out)
{
    out->size = 0;
    fsdp_text_add(out, "GCOL\1\0\0\0", 8);
    put_u64(out, 0);
}

size_t fsdp_h5_begin_heap_object(fsdp_text *out, unsigned number)
{
    size_t object = out->size;
    put_u16(out, number);
    put_zeros(out, 6);
    put_u64(out, 0);
    return object;
}

void fsdp_h5_end_heap_object(fsdp_text *out, size_t object)
{
    set_number(out, object + 8, out->size - object - FSDP_H5_HEAP_HEADER, 8);
    pad(out, object);
}

/* The free space of a heap is its object 0, whose size includes its header. */
void fsdp_h5_end_heap(fsdp_text *out)
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
    fsdp_h5_put_u32(out, 0);
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

void fsdp_h5_put_root_group(fsdp_text *out, int64_t at, fsdp_h5_symbol *symbols, size_t count,
                            fsdp_text *superblock_out)
{
    int64_t names = put_names(out, at, symbols, count);
    int64_t tree = put_tree(out, at, symbols, count);
    int64_t root = at + (int64_t)out->size;
    size_t header = fsdp_h5_begin_header(out, 1);
    size_t body = begin_message(out, SYMBOL_TABLE, 0);
    put_u64(out, (uint64_t)tree);
    put_u64(out, (uint64_t)names);
    end_message(out, body);
    fsdp_h5_end_header(out, header);
    put_superblock(superblock_out, at + (int64_t)out->size, root, tree, names);
}
