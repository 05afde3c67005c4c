/*
 * Room like: whether a checkpoint is the model that its config.json, or another checkpoint, asks for
 * (fsdp_checkpoint_verify_like).
 *
 * In: a checkpoint, and what it must be like. Out: findings: tensors that are missing, extra or of another
 * shape (the room expect knows those), elements that no trained model has, a model that is that of the step
 * before.
 *
 *   like.c                 the call
 *   like_finding.c         what is reported
 *   like_values.c          faults of the elements: zeros, NaN, equal experts
 *   like_step.c            the step before, whose model must be another one
 *
 * Callers: tools.
 */
#ifndef FSDP_LIKE_H
#define FSDP_LIKE_H

#include "statedict/expect/expect.h"
#include "statedict/expect/hf_model.h"

/* --- like_finding.c ----------------------------------------------------------------------------- */

typedef struct fsdp_like_job {
    const fsdp_verify_opts *opts;
    const char *model_type;    /* NULL: not known */
    fsdp_hf_model model;
    fsdp_hf_model *wanted;   /* the other checkpoint; NULL: a config.json is asked for */
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
