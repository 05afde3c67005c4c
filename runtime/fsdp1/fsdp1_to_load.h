/*
 * Between the files that bring state into an optimizer: fsdp1_targets.c, fsdp1_to_load.c, fsdp1_scatter.c,
 * fsdp1_load.c.
 */
#ifndef FSDP_FSDP1_TO_LOAD_H
#define FSDP_FSDP1_TO_LOAD_H

#include "runtime/fsdp1/fsdp1_internal.h"

/* One parameter of the optimizer: a declared one, or with param NULL the flat one. */
typedef struct fsdp_v1_target {
    const fsdp_param *param;
    const fsdp_v1_flat *flat;
    const char *name;
    size_t group;
    int64_t at, count;         /* in this rank's chunk */
} fsdp_v1_target;

/* What the source says of one flat parameter, besides tensors. */
typedef struct fsdp_v1_source {
    double step;
    bool lacks_master;         /* of one that is stepped: the live ones stay */
} fsdp_v1_source;

typedef struct fsdp_v1_loading {
    fsdp_v1 *v1;
    fsdp_optim *optim;
    const fsdp_sd *sd;         /* the source; NULL: another rank has it */
    fsdp_v1_to_load_opts opts;
    bool scatters;
    fsdp_ordered_comm *ordered;           /* then: of all ranks; NULL: there is one */
    fsdp_v1_target *targets;   /* by position */
    size_t count;
    fsdp_v1_source *sources;   /* per flat parameter */
    fsdp_v1_hypers *hypers;    /* per group */
    fsdp_mesh *alone;          /* this rank */
    fsdp_sd *out;
    fsdp_text name;            /* of the entry that is being looked for */
} fsdp_v1_loading;

/* --- fsdp1_targets.c -------------------------------------------------------------------------- */

fsdp_status fsdp_v1_list_targets(fsdp_v1_loading *load, fsdp_error *err);
/* state.KEY.WHAT, as load->name. */
fsdp_status fsdp_v1_spell_key(fsdp_v1_loading *load, size_t target, const char *what, fsdp_error *err);
/* The entry state.NAME.WHAT of the source, or NULL. */
const fsdp_entry *fsdp_v1_find_source(fsdp_v1_loading *load, const fsdp_param *param, const char *what);
bool fsdp_v1_is_stepped(const fsdp_v1_loading *load, const fsdp_param *param);
fsdp_v1_source *fsdp_v1_source_of(const fsdp_v1_loading *load, const fsdp_v1_flat *flat);
bool fsdp_v1_has_state(const fsdp_v1_loading *load, const fsdp_v1_flat *flat);
const fsdp_value *fsdp_v1_find_groups(const fsdp_sd *sd);      /* the list param_groups, or NULL */
/* Sources and hyper-parameters; and is everything whole that is to be scattered? */
fsdp_status fsdp_v1_read_source(fsdp_v1_loading *load, fsdp_error *err);

/* --- fsdp1_to_load.c -------------------------------------------------------------------------- */

fsdp_v1_loading fsdp_v1_loading_begin(fsdp_v1 *v1, fsdp_optim *optim, const fsdp_sd *sd,
                                      const fsdp_v1_to_load_opts *opts);
/* Targets, the result without values, the numbers of the source. */
fsdp_status fsdp_v1_loading_prepare(fsdp_v1_loading *load, fsdp_error *err);
fsdp_status fsdp_v1_loading_fill(fsdp_v1_loading *load, fsdp_error *err);
void fsdp_v1_loading_release(fsdp_v1_loading *load);
/* Hands the result over, or frees it. */
fsdp_status fsdp_v1_loading_finish(fsdp_v1_loading *load, fsdp_status status, fsdp_sd **sd_out);

/* --- fsdp1_scatter.c -------------------------------------------------------------------------- */

/* Collective: this rank's chunk of a flat tensor, from rank 0. */
fsdp_status fsdp_v1_scatter_chunk(fsdp_v1_loading *load, const fsdp_v1_flat *flat, const fsdp_v1_slot *slot,
                                  unsigned char *chunk, fsdp_error *err);

#endif
