/* Findings of fsdp_checkpoint_verify_like: see like.h. */
#include "statedict/like/like.h"

#include "statedict/sd/names.h"

#include <stdarg.h>
#include <stdio.h>

void fsdp_like_emit(fsdp_like_job *job, fsdp_finding_kind kind, const char *name, size_t name_size,
                    const char *format, ...)
{
    char tensor[160], what[FSDP_ERROR_TEXT - 200], text[FSDP_ERROR_TEXT];
    va_list args;
    fsdp_printable(name, name_size, tensor, sizeof tensor);
    va_start(args, format);
    vsnprintf(what, sizeof what, format, args);
    va_end(args);
    if (tensor[0])
        snprintf(text, sizeof text, "%s %s", tensor, what);
    else
        snprintf(text, sizeof text, "%s", what);
    job->summary->findings++;
    if (job->opts->finding)
        job->opts->finding(
            job->opts->finding_context,
            &(fsdp_finding){.file = "", .tensor = tensor, .block = -1, .text = text, .kind = kind});
}

/* True when another name of the tensor is on the other side. A layer too many is none, even of copies. */
static fsdp_status is_tied(fsdp_like_job *job, fsdp_expect_fault fault,
                           const fsdp_expected *expected, const fsdp_entry *entry, bool *is_out,
                           fsdp_error *err)
{
    bool is_missing = fault == FSDP_EXPECT_MISSING;
    *is_out = false;
    if (!job->wanted || fault == FSDP_EXPECT_SHAPE || fault == FSDP_EXPECT_BEYOND)
        return FSDP_OK;
    fsdp_hf_model *model = is_missing ? job->wanted : &job->model;
    int64_t memory = job->opts->memory > 0 ? job->opts->memory : FSDP_MEMORY_DEFAULT;
    int64_t at = is_missing ? fsdp_sd_find(model->sd, expected->name, expected->name_size)
                            : fsdp_sd_find(model->sd, entry->name, entry->name_size);
    if (at >= 0)
        FSDP_TRY(fsdp_hf_model_find_other_name(
            model, (size_t)at, is_missing ? job->model.sd : job->wanted->sd, memory, is_out, err));
    job->tied += is_missing && *is_out;
    return FSDP_OK;
}

fsdp_status fsdp_like_take_fault(void *context, fsdp_expect_fault fault,
                                 const fsdp_expected *expected, const fsdp_entry *entry,
                                 fsdp_error *err)
{
    const fsdp_like_context *job = context;
    const char *wanted = fsdp_expect_name(job->expect);
    char own[128], other[128];
    bool is_fine = false;
    FSDP_TRY(is_tied(job->like, fault, expected, entry, &is_fine, err));
    if (is_fine)
        return FSDP_OK;
    if (fault == FSDP_EXPECT_EXTRA || fault == FSDP_EXPECT_BEYOND) {
        fsdp_like_emit(job->like, FSDP_FINDING_EXTRA, entry->name, entry->name_size,
                       "is extra: '%s' has no such tensor", wanted);
        return FSDP_OK;
    }
    bool has_shape = expected->ndim >= 0;
    if (has_shape)
        fsdp_shape_text(expected->ndim, expected->shape, other, sizeof other);
    if (fault == FSDP_EXPECT_MISSING)
        fsdp_like_emit(job->like, FSDP_FINDING_MISSING, expected->name, expected->name_size,
                       has_shape ? "is missing: '%s' has it with the shape %s"
                                 : "is missing: '%s' has it",
                       wanted, other);
    else
        fsdp_like_emit(job->like, FSDP_FINDING_SHAPE, expected->name, expected->name_size,
                       "is %s %s, and '%s' has %s %s", fsdp_dtype_name(entry->dtype),
                       fsdp_tensor_shape_text(entry, own, sizeof own), wanted,
                       expected->dtype == FSDP_DTYPE_NONE ? "the shape"
                                                          : fsdp_dtype_name(expected->dtype),
                       other);
    return FSDP_OK;
}
