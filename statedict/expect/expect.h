/*
 * Room expect: the tensors that a model has, and whether a checkpoint holds them.
 *
 * In: config.json, or another checkpoint of the same model. Out: the list of tensors (name, shape, whether it
 * may be absent), and the faults of a state dict next to that list: tensors that are missing, extra, or of
 * another shape. Families are described in statedict/models.
 *
 *   expect.c               the list of tensors, and its comparison with a state dict
 *   export_check.c         that comparison before a conversion to hf
 *   hf_model.c             the model of a checkpoint, under the names that a conversion to hf gives it
 *   hf_model_ties.c        further names of a tensor, which are neither missing nor extra
 *
 * Callers: the rooms like (verify --like) and convert (export_check.h). config.json may be hostile: numbers
 * are computed with overflow checks, and the list is bounded (FSDP_EXPECT_MOST).
 */
#ifndef FSDP_EXPECT_H
#define FSDP_EXPECT_H

#include "statedict/models/config.h"
#include <fsdp/sd.h>

typedef struct fsdp_expect fsdp_expect;

enum { FSDP_EXPECT_MOST = 1 << 18 };

/* Expects the tensors of a config.json, which is borrowed. FSDP_ERR_USAGE: no description has this
 * architecture, or a member makes no sense; FSDP_ERR_DAMAGED: it is not JSON. */
fsdp_status fsdp_expect_config(const fsdp_config_file *file, fsdp_expect **expect_out, fsdp_error *err);

/* Expects the tensors of another checkpoint, which is borrowed. */
typedef struct fsdp_expect_sd {
    const fsdp_sd *sd;
    const char *path;
    bool may_lack_head;        /* an output embedding may be absent, since it is tied */
    int64_t layers;            /* of the model: tensors of layers after them, which predict further tokens
                                * and which transformers' model lacks, may be absent. 0: not known */
    int64_t further_layers;    /* of these; the compared state dict may have them where `sd` has not */
    const struct fsdp_checkpoint *named;   /* further names, whose tensors are not there: its missing entries
                                            * (fsdp_checkpoint_missing_at); NULL: none */
} fsdp_expect_sd;
fsdp_status fsdp_expect_from(const fsdp_expect_sd *from, fsdp_expect **expect_out, fsdp_error *err);
void fsdp_expect_free(fsdp_expect *expect);    /* accepts NULL */

/* The name of the list in messages: "llama" or the path of the other checkpoint. */
const char *fsdp_expect_name(const fsdp_expect *expect);
const char *fsdp_expect_model_type(const fsdp_expect *expect); /* NULL: of another checkpoint */

/* A tensor of the list. */
typedef struct fsdp_expected {
    const char *name;
    size_t name_size;
    int ndim;                  /* -1: any shape */
    int64_t shape[FSDP_MAX_DIMS];
    fsdp_dtype dtype;          /* FSDP_DTYPE_NONE: any */
    bool is_optional;
} fsdp_expected;

typedef enum fsdp_expect_fault {
    FSDP_EXPECT_MISSING, FSDP_EXPECT_EXTRA, FSDP_EXPECT_SHAPE,
    FSDP_EXPECT_BEYOND         /* extra: of a layer or an expert after the last one */
} fsdp_expect_fault;

/* Reports one fault. expected: NULL for EXTRA and BEYOND; entry: NULL for MISSING. */
typedef fsdp_status (*fsdp_expect_report)(void *context, fsdp_expect_fault fault,
                                          const fsdp_expected *expected, const fsdp_entry *entry,
                                          fsdp_error *err);

typedef struct fsdp_expect_counts {
    int64_t expected, found;   /* required tensors; those of them that are there, of whatever shape */
    int64_t missing, extra, shapes;    /* extra: with those beyond */
} fsdp_expect_counts;

/* Compares the tensors of sd with the list. Names may have several spellings (with and without
 * "model.", experts one by one or together); the one that sd has most of counts. */
fsdp_status fsdp_expect_compare(const fsdp_expect *expect, const fsdp_sd *sd, fsdp_expect_report report,
                                void *context, fsdp_expect_counts *counts_out, fsdp_error *err);

#endif
