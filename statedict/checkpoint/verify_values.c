/*
 * Deep verification of values: see verify_values.h. Several threads read the tensors; findings are
 * reported afterwards in the order of the state dict.
 */
#include "statedict/checkpoint/verify_values.h"

#include "statedict/sd/names.h"

#include "base/core/pool.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

/* A moment has the name of its parameter, with the prefix "model." or without. */
enum { NAME_ROOM = 4096 };

static void warn(const fsdp_verify_opts *opts, const fsdp_entry *entry, const char *what,
                 int64_t *warnings)
{
    char tensor[160], text[FSDP_ERROR_TEXT];
    fsdp_printable(entry->name, entry->name_size, tensor, sizeof tensor);
    snprintf(text, sizeof text, "%s: %s", tensor, what);
    ++*warnings;
    if (opts->finding)
        opts->finding(opts->finding_context, &(fsdp_finding){.file = "",
                                                             .tensor = tensor,
                                                             .block = -1,
                                                             .text = text,
                                                             .kind = FSDP_FINDING_VALUE});
}

/* --- NaN and Inf ------------------------------------------------------------------------------ */

typedef struct value_scan {
    fsdp_checkpoint *checkpoint;
    fsdp_meter *meter;
    fsdp_stats *stats; /* per entry */
    int64_t memory;    /* of one worker's slab */
    atomic_llong next; /* entry to take */
} value_scan;

typedef struct tensor_scan {
    fsdp_stats *stats;
    fsdp_meter *meter;
} tensor_scan;

static bool has_floats(const fsdp_entry *entry)
{
    return entry->kind == FSDP_ENTRY_TENSOR && fsdp_dtype_describe(entry->dtype)->is_float;
}

int64_t fsdp_values_bytes(const fsdp_sd *sd)
{
    int64_t bytes = 0;
    for (size_t i = 0; i < fsdp_sd_count(sd); i++)
        if (has_floats(fsdp_sd_at(sd, i)))
            bytes += fsdp_entry_bytes(fsdp_sd_at(sd, i));
    return bytes;
}

static fsdp_status add_slab(void *context, const fsdp_entry *entry, int64_t first, int64_t count,
                            const void *data, fsdp_error *err)
{
    tensor_scan *scan = context;
    (void)first;
    fsdp_stats_add(scan->stats, entry->dtype, data, count);
    return fsdp_meter_add(scan->meter, count * (int64_t)fsdp_dtype_size(entry->dtype), entry->name,
                          entry->name_size, err);
}

static fsdp_status scan_worker(void *context, size_t worker, fsdp_error *err)
{
    value_scan *job = context;
    const fsdp_sd *sd = job->checkpoint->manifest.sd;
    int64_t count = (int64_t)fsdp_sd_count(sd);
    fsdp_status st = FSDP_OK;
    (void)worker;
    for (int64_t i; st == FSDP_OK && (i = atomic_fetch_add(&job->next, 1)) < count;) {
        tensor_scan scan = {&job->stats[i], job->meter};
        if (has_floats(fsdp_sd_at(sd, (size_t)i)))
            st = fsdp_checkpoint_stream(job->checkpoint, (size_t)i, job->memory, add_slab, &scan,
                                        err);
    }
    if (st != FSDP_OK)
        atomic_store(&job->next, count);
    return st;
}

void fsdp_values_report(const fsdp_verify_opts *opts, const fsdp_entry *entry,
                        const fsdp_stats *stats, int64_t *warnings)
{
    char what[80];
    if (stats->nans > 0 && stats->infinities > 0)
        snprintf(what, sizeof what, "holds %" PRId64 " NaN and %" PRId64 " Inf", stats->nans,
                 stats->infinities);
    else if (stats->nans > 0)
        snprintf(what, sizeof what, "holds %" PRId64 " NaN", stats->nans);
    else if (stats->infinities > 0)
        snprintf(what, sizeof what, "holds %" PRId64 " Inf", stats->infinities);
    else
        return;
    warn(opts, entry, what, warnings);
}

fsdp_status fsdp_values_scan(fsdp_checkpoint *checkpoint, const fsdp_verify_opts *opts,
                             fsdp_meter *meter, int64_t *warnings, fsdp_error *err)
{
    const fsdp_sd *sd = checkpoint->manifest.sd;
    int64_t memory = opts->memory > 0 ? opts->memory : FSDP_MEMORY_DEFAULT;
    /* half for the slabs, half for the buffers that fill them */
    int threads =
        fsdp_block_readers_within(opts->threads, memory / 2 + 1, checkpoint->manifest.compressed);
    value_scan job = {.checkpoint = checkpoint, .meter = meter, .memory = memory / 2 / threads + 1};
    job.stats = fsdp_alloc(fsdp_sd_count(sd) + 1, sizeof *job.stats);
    if (!job.stats)
        return fsdp_fail_memory(err, "statistics");
    fsdp_status st = fsdp_parallel(threads, (size_t)threads, scan_worker, &job, err);
    for (size_t i = 0; i < fsdp_sd_count(sd) && st == FSDP_OK; i++)
        fsdp_values_report(opts, fsdp_sd_at(sd, i), &job.stats[i], warnings);
    fsdp_free(job.stats);
    return st;
}

/* --- the optimizer's states belong to the model ----------------------------------------------- */

/* FQN.KEY of an optimizer's tensor. */
static bool cut_prefix(const fsdp_entry *entry, const char **rest_out, size_t *size_out)
{
    static const char *const prefixes[] = {"optim.state.", "optimizer.state."};
    for (size_t i = 0; i < sizeof prefixes / sizeof prefixes[0]; i++) {
        size_t size = strlen(prefixes[i]);
        if (entry->name_size <= size || memcmp(entry->name, prefixes[i], size) != 0)
            continue;
        *rest_out = entry->name + size;
        *size_out = entry->name_size - size;
        return true;
    }
    return false;
}

/* The tensor of that name, or the one that an alias names; NULL when there is none. */
static const fsdp_entry *find_tensor(const fsdp_sd *sd, const char *name, size_t size)
{
    int64_t at = fsdp_sd_find(sd, name, size);
    const fsdp_entry *entry = at < 0 ? NULL : fsdp_sd_at(sd, (size_t)at);
    if (entry && entry->kind == FSDP_ENTRY_ALIAS)
        entry = fsdp_sd_at(sd, entry->target);
    return entry && entry->kind == FSDP_ENTRY_TENSOR ? entry : NULL;
}

static const fsdp_entry *find_parameter(const fsdp_sd *sd, const char *fqn, size_t size)
{
    char name[NAME_ROOM] = "model.";
    size_t prefix = strlen(name);
    memcpy(name + prefix, fqn, size);
    const fsdp_entry *found = find_tensor(sd, name, prefix + size);
    return found ? found : find_tensor(sd, fqn, size);
}

/* FQN and KEY may contain dots: takes the longest FQN that is a tensor. */
static const fsdp_entry *find_owner(const fsdp_sd *sd, const char *rest, size_t size,
                                    size_t *key_out)
{
    for (size_t at = size; at-- > 1;) {
        const fsdp_entry *found = rest[at] == '.' ? find_parameter(sd, rest, at) : NULL;
        *key_out = at + 1;
        if (found)
            return found;
    }
    return NULL;
}

/* States of PyTorch's optimizers with one element per element of the parameter. Others, factored or
 * quantised, may have any shape. */
static bool is_moment(const char *key, size_t size)
{
    static const char *const moments[] = {
        "exp_avg",    "exp_avg_sq", "max_exp_avg_sq", "exp_inf",   "momentum_buffer",
        "square_avg", "sum",        "grad_avg",       "acc_delta", "step_size",
        "prev",       "ax"};
    for (size_t i = 0; i < sizeof moments / sizeof moments[0]; i++)
        if (strlen(moments[i]) == size && memcmp(moments[i], key, size) == 0)
            return true;
    return false;
}

static bool has_same_shape(const fsdp_entry *a, const fsdp_entry *b)
{
    return a->ndim == b->ndim &&
           (a->ndim == 0 || memcmp(a->shape, b->shape, (size_t)a->ndim * sizeof *a->shape) == 0);
}

/* Plain optimizers of PyTorch number their parameters, and a number does not identify a name. */
static bool is_numbered(const char *rest, size_t size)
{
    size_t digits = 0;
    while (digits < size && rest[digits] >= '0' && rest[digits] <= '9')
        digits++;
    return digits > 0 && digits < size && rest[digits] == '.';
}

/* A checkpoint may hold optimizer states without a model. */
static bool has_model(const fsdp_sd *sd)
{
    const char *rest;
    size_t size;
    for (size_t i = 0; i < fsdp_sd_count(sd); i++)
        if (fsdp_sd_at(sd, i)->kind == FSDP_ENTRY_TENSOR &&
            !cut_prefix(fsdp_sd_at(sd, i), &rest, &size))
            return true;
    return false;
}

static void match_state(const fsdp_sd *sd, const fsdp_entry *state, const fsdp_verify_opts *opts,
                        int64_t *warnings)
{
    const char *rest = NULL;
    size_t size = 0, key = 0;
    char own[128], of[128], name[160], what[512];
    if (!cut_prefix(state, &rest, &size) || size > NAME_ROOM - 16)
        return;
    const fsdp_entry *parameter = find_owner(sd, rest, size, &key);
    if (!parameter) {
        if (!is_numbered(rest, size))
            warn(opts, state, "belongs to no tensor of the model", warnings);
        return;
    }
    if (state->ndim == 0 || !is_moment(rest + key, size - key) || has_same_shape(state, parameter))
        return;
    fsdp_printable(parameter->name, parameter->name_size, name, sizeof name);
    snprintf(what, sizeof what, "has the shape %s, %s has %s",
             fsdp_shape_text(state->ndim, state->shape, own, sizeof own), name,
             fsdp_shape_text(parameter->ndim, parameter->shape, of, sizeof of));
    warn(opts, state, what, warnings);
}

void fsdp_values_match(const fsdp_sd *sd, const fsdp_verify_opts *opts, int64_t *warnings)
{
    bool whole = has_model(sd);
    for (size_t i = 0; i < fsdp_sd_count(sd) && whole; i++)
        if (fsdp_sd_at(sd, i)->kind == FSDP_ENTRY_TENSOR)
            match_state(sd, fsdp_sd_at(sd, i), opts, warnings);
}
