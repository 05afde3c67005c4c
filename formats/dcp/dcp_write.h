/*
 * The plan of a DCP directory, shared by dcp_write.c (items in the files of ranks) and
 * dcp_metadata_write.c (.metadata). The mirrors are dcp_read.c and dcp_metadata.c.
 */
#ifndef FSDP_DCP_WRITE_H
#define FSDP_DCP_WRITE_H

#include "formats/dcp/dcp_fold.h"
#include "formats/torch/torch_emit.h"

/* A box or value in the file of its rank. */
typedef struct dcp_written {
    int rank;
    int64_t offset, size;      /* size 0: a box without elements, which is not stored */
    torch_part part;
} dcp_written;

typedef struct dcp_plan {
    dcp_fold fold;
    const fsdp_target_entry *entries;  /* owned by the plan */
    size_t entry_count;
    int world;
    size_t *first;             /* per entry: its first item; one more at the end */
    dcp_written *items;        /* one per value; one per box of a tensor, at least one */
    int64_t *rank_sizes;
    char (*rank_names)[24];    /* of the files */
    fsdp_pickler metadata;
} dcp_plan;

bool dcp_has_elements(const fsdp_target_entry *entry);
/* The box of an entry's n-th item. A tensor without elements, which may have no boxes, is stored as a
 * whole. */
fsdp_box dcp_item_box(const fsdp_target_entry *entry, size_t number);

/* Fills in plan->metadata, after all items have their places. */
FSDP_CHECKED fsdp_status dcp_emit_metadata(dcp_plan *plan, fsdp_error *err);

extern const fsdp_format_writer fsdp_dcp_writer;     /* dcp_write.c */

#endif
