/*
 * Whether the files of a DCP directory are of the save that its metadata describes. PyTorch saves over an
 * older checkpoint file by file, and replaces `.metadata` last: a save that is cut short leaves files of two.
 * Items have no number of their save, so these are the signs that there are:
 *
 *   bytes      items follow one another in a file, from its first byte to its last (dcp_metadata.c)
 *   steps      the optimizer counts the steps of each parameter: two files of a save do not differ in all
 *
 * In: the items that dcp_metadata.c reads. It calls these functions, which refuse with FSDP_ERR_DAMAGED.
 */
#ifndef FSDP_DCP_AGREE_H
#define FSDP_DCP_AGREE_H

#include "formats/dcp/dcp.h"

/* The steps of parameters that one file holds for one optimizer; bounds are known of those that were read. */
typedef struct dcp_step_group {
    const char *optim;         /* "optim" of "optim.state.w.step" */
    size_t optim_size;
    int file;
    dcp_item *items;
    size_t count, room;
    bool is_read, is_unknown;  /* all items were read; one of them is not a number */
    double least, most;
} dcp_step_group;

/* Zero-initialise; release when done. */
typedef struct dcp_steps {
    dcp_step_group *groups;
    size_t count, room, last;
    fsdp_name_table places;    /* optimizer and file -> its group */
    fsdp_arena arena;
    fsdp_text key;             /* scratch */
} dcp_steps;

void dcp_steps_release(dcp_steps *steps);

/* Keeps the item when it is the step of a parameter. */
fsdp_status dcp_steps_note(dcp_steps *steps, const char *name, size_t name_size, const dcp_item *item,
                           fsdp_error *err);

/* Refuses two files of which one has fewer steps of every parameter than the other. */
fsdp_status dcp_agree_steps(fsdp_source *source, dcp_steps *steps, fsdp_error *err);

#endif
