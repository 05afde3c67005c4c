/*
 * The step before: see like.h. A trainer whose save does not write what it trains leaves the same model in
 * every step. Tensors are compared one by one, up to the first that differs, which is mostly the first one.
 */
#include "statedict/like/like.h"

#include "formats/frameworks.h"
#include "kernels/kernels.h"
#include "statedict/sd/access.h"
#include "statedict/sd/layout_internal.h"
#include "statedict/sd/meter.h"
#include <fsdp/run.h>

#include <string.h>

/* --- its path ----------------------------------------------------------------------------------- */

/* Splits "run/step-5" into its two parts; dir is "." for a bare name. False for "/" and "..". */
static bool split(const char *path, size_t size, fsdp_text *dir, fsdp_text *name)
{
    while (size > 1 && path[size - 1] == '/')
        size--;
    const char *slash = memrchr(path, '/', size);
    const char *begin = slash ? slash + 1 : path;
    dir->size = name->size = 0;
    fsdp_text_add(name, begin, size - (size_t)(begin - path));
    if (slash)
        fsdp_text_add(dir, path, slash == path ? 1 : (size_t)(slash - path));
    else
        fsdp_text_add(dir, ".", 1);
    return !dir->failed && !name->failed && name->size > 0 && name->data[0] != '.';
}

/* The pattern of steps that the name has. Names of versions number runs, not steps. */
static const char *step_pattern(const char *name, int64_t *number_out)
{
    for (size_t i = 0; fsdp_framework_steps[i]; i++)
        if (strncmp(fsdp_framework_steps[i], "version", 7) != 0 &&
            fsdp_framework_matches(fsdp_framework_steps[i], name, number_out))
            return fsdp_framework_steps[i];
    return NULL;
}

static bool any_name(void *context, const char *name)
{
    (void)context;
    (void)name;
    return true;
}

/* The path of the step with the next lower number; *path_out NULL: there is none. */
static fsdp_status find_before(fsdp_io *io, const char *dir, const char *pattern, int64_t number,
                               char **path_out, fsdp_error *err)
{
    fsdp_io_names names = {0};
    const char *found = NULL;
    int64_t best = -1, at;
    *path_out = NULL;
    FSDP_TRY(fsdp_io_list_names(io, dir, any_name, NULL, &names, err));
    for (size_t i = 0; i < names.count; i++)
        if (fsdp_framework_matches(pattern, names.items[i], &at) && at < number && at > best) {
            best = at;
            found = names.items[i];
        }
    if (found)
        *path_out = fsdp_path_join(dir, found);
    fsdp_io_names_release(&names);
    return !found || *path_out ? FSDP_OK : fsdp_fail_memory(err, dir);
}

/* The checkpoint may lie in a folder of the step: run/step-5/actor/model.pt. */
static fsdp_status find_step_before(const fsdp_like_job *job, char **path_out, fsdp_error *err)
{
    enum { UPWARDS = 4 };
    const char *path = job->model.path;
    size_t size = strlen(path);
    fsdp_text dir = {0}, name = {0};
    fsdp_status st = FSDP_OK;
    *path_out = NULL;
    for (int up = 0; up < UPWARDS && split(path, size, &dir, &name); up++) {
        int64_t number;
        const char *pattern = step_pattern(name.data, &number);
        if (pattern && number >= 0) {
            st = find_before(fsdp_access_io(&job->opts->access), dir.data, pattern, number,
                             path_out, err);
            break;
        }
        if (strcmp(dir.data, ".") == 0 || strcmp(dir.data, "/") == 0)
            break;
        size = dir.size;
    }
    fsdp_text_release(&dir);
    fsdp_text_release(&name);
    return st;
}

/* --- comparing ---------------------------------------------------------------------------------- */

typedef struct step_hash {
    fsdp_hasher *hasher;
    fsdp_meter *meter;
} step_hash;

static fsdp_status add_slab(void *context, const fsdp_entry *entry, int64_t first, int64_t count,
                            const void *data, fsdp_error *err)
{
    step_hash *hash = context;
    int64_t bytes = count * (int64_t)fsdp_dtype_size(entry->dtype);
    (void)first;
    fsdp_hasher_add(hash->hasher, data, (size_t)bytes);
    return fsdp_meter_add(hash->meter, bytes, entry->name, entry->name_size, err);
}

static fsdp_status hash_tensor(const fsdp_hf_model *model, size_t i, int64_t memory,
                               step_hash *hash, fsdp_hash *out, fsdp_error *err)
{
    fsdp_hasher_reset(hash->hasher);
    FSDP_TRY(
        fsdp_checkpoint_stream(model->checkpoint, model->source[i], memory, add_slab, hash, err));
    *out = fsdp_hasher_value(hash->hasher);
    return FSDP_OK;
}

static bool is_alike(const fsdp_entry *a, const fsdp_entry *b)
{
    return a->kind == b->kind && a->dtype == b->dtype && a->ndim == b->ndim &&
           (a->ndim == 0 || memcmp(a->shape, b->shape, (size_t)a->ndim * sizeof *a->shape) == 0);
}

static size_t count_tensors(const fsdp_sd *sd)
{
    size_t count = 0;
    for (size_t i = 0; i < fsdp_sd_count(sd); i++)
        count += fsdp_sd_at(sd, i)->kind == FSDP_ENTRY_TENSOR;
    return count;
}

static fsdp_status compare(const fsdp_like_job *job, const fsdp_hf_model *before, step_hash *hash,
                           bool *is_equal_out, fsdp_error *err)
{
    const fsdp_sd *sd = job->model.sd;
    *is_equal_out = count_tensors(sd) > 0 && count_tensors(sd) == count_tensors(before->sd);
    for (size_t i = 0; i < fsdp_sd_count(sd) && *is_equal_out; i++) {
        const fsdp_entry *entry = fsdp_sd_at(sd, i);
        fsdp_hash one, other;
        if (entry->kind != FSDP_ENTRY_TENSOR)
            continue;
        int64_t at = fsdp_sd_find(before->sd, entry->name, entry->name_size);
        *is_equal_out = at >= 0 && is_alike(entry, fsdp_sd_at(before->sd, (size_t)at));
        if (!*is_equal_out)
            break;
        FSDP_TRY(hash_tensor(&job->model, i, job->opts->memory, hash, &one, err));
        fsdp_error unread = {0};
        fsdp_status st = hash_tensor(before, (size_t)at, job->opts->memory, hash, &other, &unread);
        if (st == FSDP_ERR_CANCELLED || st == FSDP_ERR_LIMIT)
            return fsdp_fail(err, st, "%s", unread.text);
        *is_equal_out = st == FSDP_OK && memcmp(&one, &other, sizeof one) == 0;
    }
    return FSDP_OK;
}

/* A step before that cannot be read says nothing about this one. */
fsdp_status fsdp_like_check_step(fsdp_like_job *job, fsdp_error *err)
{
    fsdp_hf_model before = {0};
    fsdp_meter meter;
    fsdp_verify_opts quiet = *job->opts;
    char *path = NULL;
    bool is_equal = false;
    quiet.watch.notice = NULL;
    FSDP_TRY(find_step_before(job, &path, err));
    if (!path)
        return FSDP_OK;
    fsdp_status st = FSDP_OK;
    step_hash hash = {fsdp_hasher_create(), &meter};
    fsdp_meter_init(&meter, &job->opts->watch, 2 * fsdp_sd_tensor_bytes(job->model.sd));
    if (!hash.hasher)
        st = fsdp_fail_memory(err, "a hash");
    else if (fsdp_hf_model_open(&(fsdp_hf_model_from){path, job->model_type, NULL}, &quiet, &before,
                                NULL) == FSDP_OK)
        st = compare(job, &before, &hash, &is_equal, err);
    if (st == FSDP_OK && is_equal)
        fsdp_like_emit(job, FSDP_FINDING_UNCHANGED, "", 0,
                       "the model is that of the step before it, '%s'", path);
    fsdp_hf_model_release(&before);
    fsdp_hasher_free(hash.hasher);
    fsdp_free(path);
    return st;
}
