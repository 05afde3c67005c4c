/*
 * The file ranges of a DCP directory, by name and box. dcp_metadata.c adds them by name and looks them up
 * by name and offsets.
 */
#ifndef FSDP_DCP_RANGES_H
#define FSDP_DCP_RANGES_H

#include "base/core/mem.h"
#include "base/data/name_table.h"
#include <fsdp/box.h>
#include "base/text.h"

enum { DCP_NO_RANGE = UINT32_MAX, DCP_NO_BOX = -1, DCP_RECENT_BOXES = 64 };

/* The range of a box, or (ndim DCP_NO_BOX) of a value. There may be hundreds of thousands. */
typedef struct dcp_range {
    int64_t offset, length;
    const int64_t *lo;         /* shared between ranges */
    uint32_t file;             /* number of the file, which the caller assigns */
    uint32_t next;             /* next range of the name; DCP_NO_RANGE: none */
    int8_t ndim;
    bool is_packed, was_used;
} dcp_range;
_Static_assert(FSDP_MAX_DIMS <= INT8_MAX, "the dims of a box are counted in a range");

/* The ranges of one name, in the order of their addition. */
typedef struct dcp_range_list {
    uint32_t first, last;
    uint32_t count, cursor;    /* cursor: the next lookup begins behind it */
    bool is_indexed;           /* the table `places` has its boxes */
} dcp_range_list;

#define DCP_NO_RANGES ((dcp_range_list){.first = DCP_NO_RANGE, .last = DCP_NO_RANGE, .cursor = DCP_NO_RANGE})

/* The key of a range: the number of its name, and the offsets of its box. */
typedef struct dcp_range_key {
    size_t name;
    int ndim;                  /* DCP_NO_BOX: a value */
    const int64_t *lo;
} dcp_range_key;

/* Zero-initialise; release after use. */
typedef struct dcp_ranges {
    dcp_range *all;
    size_t count, room;
    struct { const int64_t *lo; int ndim; } recent[DCP_RECENT_BOXES];   /* by a hash */
    fsdp_name_table places;    /* (number of a name, offsets) -> range, for long lists */
    fsdp_arena arena;
    fsdp_text key;             /* scratch */
} dcp_ranges;

void dcp_ranges_release(dcp_ranges *ranges);

/* Reserves room for so many more, as far as there is memory. */
void dcp_ranges_expect(dcp_ranges *ranges, size_t count);

/* Adds a range to the list of a name, and copies lo. */
fsdp_status dcp_ranges_put(dcp_ranges *ranges, dcp_range_list *list, size_t name, const dcp_range *range,
                           const int64_t *lo, fsdp_error *err);

/* Finds the range of a box (ndim DCP_NO_BOX: of a value); DCP_NO_RANGE when there is none. Boxes are
 * mostly looked up in the order in which they are stored. */
fsdp_status dcp_ranges_find(dcp_ranges *ranges, dcp_range_list *list, const dcp_range_key *key,
                            uint32_t *at_out, fsdp_error *err);

#endif
