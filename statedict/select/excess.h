/* Entries that a format cannot hold, grouped by the --drop that removes them, and the message about them. */
#ifndef FSDP_EXCESS_H
#define FSDP_EXCESS_H

#include "statedict/sd/names.h"

/* Arguments of --drop begin with these. FSDP_CAST_TO takes the place of a --drop: the cast to that dtype was
 * requested, and the format cannot hold its result. */
#define FSDP_DROP_DTYPE "dtype:"
#define FSDP_DROP_TENSORS "tensors:"
#define FSDP_CAST_TO "cast to "

typedef struct fsdp_excess_group { char drop[40]; fsdp_name_list names; } fsdp_excess_group;

/* Zero-initialise. */
typedef struct fsdp_excess {
    fsdp_excess_group *groups;
    size_t count, room;
    bool holds_values;         /* the format holds others than these */
    bool has_pieces;           /* ranks' pieces of parameters without shapes are among them */
    bool has_units;            /* tensors of subclasses are among them (tensor_units.h) */
    bool has_weights;          /* weights remain without them */
} fsdp_excess;

fsdp_status fsdp_excess_add(fsdp_excess *excess, const char *drop, const char *name, size_t size,
                            fsdp_error *err);
void fsdp_excess_release(fsdp_excess *excess);

/* FSDP_ERR_USAGE: counts and names the entries of each group and ends with what to type, unless a model would
 * lose its weights by it. */
fsdp_status fsdp_excess_fail(const fsdp_excess *excess, const char *format, fsdp_error *err);

#endif
