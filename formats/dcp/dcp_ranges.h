/*
 * The ranges of files that a DCP directory says are boxes and values of its names: dcp_metadata.c puts them
 * in by name, and asks for them by name and offsets.
 */
#ifndef FSDP_DCP_RANGES_H
#define FSDP_DCP_RANGES_H

#include "base/core/mem.h"
#include "base/data/name_table.h"
#include <fsdp/box.h>
#include "base/text.h"

enum { DCP_NO_RANGE = UINT32_MAX, DCP_NO_BOX = -1, DCP_RECENT_BOXES = 64 };

/* What is stored of a name: a box, or (ndim DCP_NO_BOX) a value. There may be hundreds of thousands. */
typedef struct dcp_range {
    int64_t offset, length;
    const int64_t *lo;         /* several may share it */
    uint32_t file;             /* the caller's number of it */
    uint32_t next;             /* of the same name; DCP_NO_RANGE: none */
    int8_t ndim;
    bool is_packed, was_used;
} dcp_range;
_Static_assert(FSDP_MAX_DIMS <= INT8_MAX, "the dims of a box are counted in a range");

/* Those of one name, in the order in which they were put. */
typedef struct dcp_range_list {
    uint32_t first, last;
    uint32_t count, cursor;    /* cursor: behind it the next box is looked for */
    bool is_indexed;           /* its boxes are in the table of places */
} dcp_range_list;

#define DCP_NO_RANGES ((dcp_range_list){.first = DCP_NO_RANGE, .last = DCP_NO_RANGE, .cursor = DCP_NO_RANGE})

/* Zero-initialise; release when done. */
typedef struct dcp_ranges {
    dcp_range *all;
    size_t count, room;
    struct { const int64_t *lo; int ndim; } recent[DCP_RECENT_BOXES];   /* by a hash */
    fsdp_name_table places;    /* number of a name, offsets -> number in all: of long lists */
    fsdp_arena arena;
    fsdp_text key;             /* scratch */
} dcp_ranges;

void dcp_ranges_release(dcp_ranges *ranges);

/* Makes room for so many more, as far as there is memory. */
void dcp_ranges_expect(dcp_ranges *ranges, size_t count);

/* Adds a range, of which lo is copied, to the list of the name with this number. */
fsdp_status dcp_ranges_put(dcp_ranges *ranges, dcp_range_list *list, size_t name, const dcp_range *range,
                           const int64_t *lo, fsdp_error *err);

/* The range of a box (ndim DCP_NO_BOX: of a value), DCP_NO_RANGE when there is none. Boxes are mostly asked
 * for in the order in which they are stored. */
fsdp_status dcp_ranges_find(dcp_ranges *ranges, dcp_range_list *list, size_t name, int ndim,
                            const int64_t *lo, uint32_t *at_out, fsdp_error *err);

#endif
