/* The files of fsdp_checkpoint_verify_like: see expect.h. */
#ifndef FSDP_LIKE_H
#define FSDP_LIKE_H

#include "statedict/checkpoint/checkpoint_internal.h"
#include "statedict/expect/expect.h"

/* --- like_model.c ------------------------------------------------------------------------------- */

/* The model of a checkpoint, as a conversion to hf would write it. */
typedef struct fsdp_like_model {
    fsdp_checkpoint *checkpoint;
    char *path;                /* of the checkpoint that was opened */
    fsdp_sd *sd;
    size_t *source;            /* per entry of sd: its number in the checkpoint */
    size_t *one;               /* of like_ties.c: fsdp_same_tensors of the checkpoint; NULL: not asked yet */
    struct fsdp_like_digest *digests;  /* likewise, per entry of sd */
    int searches;
} fsdp_like_model;

typedef struct fsdp_like_open {
    const char *path;
    const char *model_type;    /* of its config.json; NULL or "": not known */
    const char *allow_missing; /* as in fsdp_open_opts */
} fsdp_like_open;
/* Release the model also after a failure. */
fsdp_status fsdp_like_model_open(const fsdp_like_open *from, const fsdp_verify_opts *opts,
                                 fsdp_like_model *model, fsdp_error *err);
/* Fills in sd and source of a checkpoint that is open. below: "model." is stripped, too; NULL: nothing. */
fsdp_status fsdp_like_model_select(fsdp_like_model *model, const char *model_type, const char *below,
                                   fsdp_error *err);
void fsdp_like_model_release(fsdp_like_model *model);

/* --- like_ties.c -------------------------------------------------------------------------------- */

/* True when tensor i of the model has a further name that `in` holds: an alias, one that lies in the same
 * bytes, or a copy of it, whose elements are read. */
fsdp_status fsdp_like_find_other_name(fsdp_like_model *model, size_t i, const fsdp_sd *in, int64_t memory,
                                      bool *found_out, fsdp_error *err);

/* --- like_finding.c ----------------------------------------------------------------------------- */

typedef struct fsdp_like_job {
    const fsdp_verify_opts *opts;
    const char *model_type;    /* NULL: not known */
    fsdp_like_model model;
    fsdp_like_model *wanted;   /* the other checkpoint; NULL: a config.json is asked for */
    fsdp_like_summary *summary;
    int64_t tied;              /* names that are missing, and have another one that is there */
} fsdp_like_job;

/* Emits a finding about a tensor, or with an empty name about the model. */
void fsdp_like_emit(fsdp_like_job *job, fsdp_finding_kind kind, const char *name, size_t name_size,
                    const char *format, ...) FSDP_PRINTF(5, 6);

typedef struct fsdp_like_context {
    fsdp_like_job *like;
    const fsdp_expect *expect;
} fsdp_like_context;

/* An fsdp_expect_report, whose context is an fsdp_like_context: emits the fault as a finding. */
fsdp_status fsdp_like_take_fault(void *context, fsdp_expect_fault fault, const fsdp_expected *expected,
                                 const fsdp_entry *entry, fsdp_error *err);

/* --- the elements ------------------------------------------------------------------------------- */

/* like_values.c: reads all elements of the model. */
fsdp_status fsdp_like_check_values(fsdp_like_job *job, fsdp_error *err);
/* like_step.c: compares the model with that of the step before it in the same run, if there is one. */
fsdp_status fsdp_like_check_step(fsdp_like_job *job, fsdp_error *err);

#endif
