/*
 * Further names of a tensor: see hf_model.h. Programs store tied weights once, as aliases, or with every name
 * as a copy; a model is the same in each of the three forms.
 */
#include "statedict/expect/hf_model.h"

#include "kernels/kernels.h"
#include "statedict/checkpoint/same_tensors.h"

#include <string.h>

enum { SEARCHES_MOST = 4096 }; /* each goes through all names: tied weights are few */

/* The elements of a tensor. */
typedef struct fsdp_hf_model_digest {
    bool is_read, is_constant;
    fsdp_hash hash;
} model_digest;

/* --- names -------------------------------------------------------------------------------------- */

/* "weight" of "model.norm.weight" */
static const char *last_element(const fsdp_entry *entry, size_t *size_out)
{
    const char *dot = memrchr(entry->name, '.', entry->name_size);
    const char *last = dot ? dot + 1 : entry->name;
    *size_out = entry->name_size - (size_t)(last - entry->name);
    return last;
}

static bool ends_alike(const fsdp_entry *a, const fsdp_entry *b)
{
    size_t a_size, b_size;
    const char *one = last_element(a, &a_size), *other = last_element(b, &b_size);
    return a_size == b_size && memcmp(one, other, a_size) == 0;
}

/* True for a tensor of a layer: an element of its name is a number. */
static bool is_of_layer(const fsdp_entry *entry)
{
    bool is_number = true;
    size_t digits = 0;
    for (size_t i = 0; i <= entry->name_size; i++) {
        char c = i < entry->name_size ? entry->name[i] : '.';
        if (c == '.') {
            if (is_number && digits > 0)
                return true;
            is_number = true;
            digits = 0;
        } else {
            is_number = is_number && c >= '0' && c <= '9';
            digits++;
        }
    }
    return false;
}

static bool is_alike(const fsdp_entry *a, const fsdp_entry *b)
{
    return a->kind == FSDP_ENTRY_TENSOR && b->kind == FSDP_ENTRY_TENSOR && a->dtype == b->dtype &&
           a->ndim == b->ndim &&
           (a->ndim == 0 || memcmp(a->shape, b->shape, (size_t)a->ndim * sizeof *a->shape) == 0) &&
           ends_alike(a, b);
}

static bool holds(const fsdp_sd *sd, const fsdp_entry *entry)
{
    int64_t at = fsdp_sd_find(sd, entry->name, entry->name_size);
    return at >= 0 && fsdp_sd_at(sd, (size_t)at)->kind != FSDP_ENTRY_VALUE;
}

/* --- elements ----------------------------------------------------------------------------------- */

typedef struct digest_job {
    model_digest *digest;
    fsdp_hasher *hasher;
    char first[16];
} digest_job;

static fsdp_status add_slab(void *context, const fsdp_entry *entry, int64_t first, int64_t count,
                            const void *data, fsdp_error *err)
{
    digest_job *job = context;
    size_t size = fsdp_dtype_size(entry->dtype), bytes = (size_t)count * size;
    const char *at = data;
    (void)err;
    if (bytes == 0)
        return FSDP_OK;
    if (first == 0)
        memcpy(job->first, at, size);
    job->digest->is_constant = (first == 0 || job->digest->is_constant) &&
                               memcmp(job->first, at, size) == 0 &&
                               memcmp(at, at + size, bytes - size) == 0;
    fsdp_hasher_add(job->hasher, data, bytes);
    return FSDP_OK;
}

/* Each tensor is read once. */
static fsdp_status digest_of(fsdp_hf_model *model, size_t i, int64_t memory,
                             const model_digest **out, fsdp_error *err)
{
    if (!model->digests)
        model->digests = fsdp_alloc(fsdp_sd_count(model->sd) + 1, sizeof *model->digests);
    if (!model->digests)
        return fsdp_fail_memory(err, "the model's tensors");
    digest_job job = {.digest = &model->digests[i]};
    *out = job.digest;
    if (job.digest->is_read)
        return FSDP_OK;
    job.hasher = fsdp_hasher_create();
    if (!job.hasher)
        return fsdp_fail_memory(err, "a hash");
    fsdp_hasher_reset(job.hasher);
    fsdp_status st =
        fsdp_checkpoint_stream(model->checkpoint, model->source[i], memory, add_slab, &job, err);
    job.digest->hash = fsdp_hasher_value(job.hasher);
    job.digest->is_read = st == FSDP_OK;
    fsdp_hasher_free(job.hasher);
    return st;
}

/* Equal elements are the same tensor, unless all are equal to one another, as those of a fresh norm or bias
 * are in every layer. */
static fsdp_status is_copy(fsdp_hf_model *model, size_t i, size_t k, int64_t memory, bool *is_out,
                           fsdp_error *err)
{
    const fsdp_entry *one = fsdp_sd_at(model->sd, i), *other = fsdp_sd_at(model->sd, k);
    const model_digest *a, *b;
    *is_out = false;
    if (!is_alike(one, other))
        return FSDP_OK;
    FSDP_TRY(digest_of(model, i, memory, &a, err));
    if (a->is_constant && (is_of_layer(one) || is_of_layer(other)))
        return FSDP_OK;
    FSDP_TRY(digest_of(model, k, memory, &b, err));
    *is_out = memcmp(&a->hash, &b->hash, sizeof a->hash) == 0;
    return FSDP_OK;
}

/* --- the call ----------------------------------------------------------------------------------- */

static fsdp_status find_groups(fsdp_hf_model *model, fsdp_error *err)
{
    if (model->one)
        return FSDP_OK;
    model->one = fsdp_alloc(fsdp_sd_count(model->checkpoint->manifest.sd) + 1, sizeof *model->one);
    return model->one ? fsdp_same_tensors(model->checkpoint, true, model->one, err)
                      : fsdp_fail_memory(err, "tied weights");
}

fsdp_status fsdp_hf_model_find_other_name(fsdp_hf_model *model, size_t i, const fsdp_sd *in,
                                          int64_t memory, bool *found_out, fsdp_error *err)
{
    size_t count = fsdp_sd_count(model->sd);
    *found_out = false;
    if (model->searches++ >= SEARCHES_MOST)
        return FSDP_OK;
    FSDP_TRY(find_groups(model, err));
    const size_t *one = model->one, *source = model->source;
    for (size_t k = 0; k < count && !*found_out; k++)
        *found_out = k != i && one[source[k]] == one[source[i]] &&
                     fsdp_sd_at(model->sd, k)->kind != FSDP_ENTRY_VALUE &&
                     holds(in, fsdp_sd_at(model->sd, k));
    for (size_t k = 0; k < count && !*found_out; k++)
        if (k != i && holds(in, fsdp_sd_at(model->sd, k)))
            FSDP_TRY(is_copy(model, i, k, memory, found_out, err));
    return FSDP_OK;
}
