/*
 * Room like: whether a checkpoint is the model that its config.json, or another checkpoint, asks for
 * (fsdp_checkpoint_verify_like of fsdp/run.h).
 *
 * In: a checkpoint, and what it must be like. Out: findings: tensors that are missing, extra or of another
 * shape (the room expect knows those), elements that no trained model has, a model that is that of the step
 * before. Callers: tools.
 */
#include "base/core/given.h"
#include "base/core/pool.h"
#include "formats/frameworks.h"
#include "kernels/kernels.h"
#include "kernels/train/tensor.h"
#include "statedict/expect/expect.h"
#include "statedict/expect/hf_model.h"
#include "statedict/models/config.h"
#include "statedict/sd/access.h"
#include "statedict/sd/layout_internal.h"
#include "statedict/sd/meter.h"
#include "statedict/sd/names.h"
#include "statedict/transfer/pipeline.h"
#include <fsdp/run.h>
#include <fsdp/stats.h>

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* === findings ================================================================================= */

typedef struct fsdp_like_job {
    const fsdp_verify_opts *opts;
    const char *model_type; /* NULL: not known */
    fsdp_hf_model model;
    fsdp_hf_model *wanted; /* the other checkpoint; NULL: a config.json is asked for */
    fsdp_like_summary *summary;
    int64_t tied; /* names that are missing, and have another one that is there */
} fsdp_like_job;

typedef struct fsdp_like_context {
    fsdp_like_job *like;
    const fsdp_expect *expect;
} fsdp_like_context;

/* --- the elements ------------------------------------------------------------------------------- */

/* Emits a finding about a tensor, or with an empty name about the model. */
static void emit(fsdp_like_job *job, fsdp_finding_kind kind, const char *name, size_t name_size,
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

/* An fsdp_expect_report, whose context is an fsdp_like_context: emits the fault as a finding. */
static fsdp_status take_fault(void *context, fsdp_expect_fault fault, const fsdp_expected *expected,
                              const fsdp_entry *entry, fsdp_error *err)
{
    const fsdp_like_context *job = context;
    const char *wanted = fsdp_expect_name(job->expect);
    char own[128], other[128];
    bool is_fine = false;
    FSDP_TRY(is_tied(job->like, fault, expected, entry, &is_fine, err));
    if (is_fine)
        return FSDP_OK;
    if (fault == FSDP_EXPECT_EXTRA || fault == FSDP_EXPECT_BEYOND) {
        emit(job->like, FSDP_FINDING_EXTRA, entry->name, entry->name_size,
             "is extra: '%s' has no such tensor", wanted);
        return FSDP_OK;
    }
    bool has_shape = expected->ndim >= 0;
    if (has_shape)
        fsdp_shape_text(expected->ndim, expected->shape, other, sizeof other);
    if (fault == FSDP_EXPECT_MISSING)
        emit(job->like, FSDP_FINDING_MISSING, expected->name, expected->name_size,
             has_shape ? "is missing: '%s' has it with the shape %s" : "is missing: '%s' has it",
             wanted, other);
    else
        emit(job->like, FSDP_FINDING_SHAPE, expected->name, expected->name_size,
             "is %s %s, and '%s' has %s %s", fsdp_dtype_name(entry->dtype),
             fsdp_tensor_shape_text(entry, own, sizeof own), wanted,
             expected->dtype == FSDP_DTYPE_NONE ? "the shape" : fsdp_dtype_name(expected->dtype),
             other);
    return FSDP_OK;
}

/* === the step before ========================================================================== */

/*
 * A trainer whose save does not write what it trains leaves the same model in
 * every step. Tensors are compared one by one, up to the first that differs, which is mostly the first one.
 */

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

static fsdp_status add_step_slab(void *context, const fsdp_entry *entry, int64_t first,
                                 int64_t count, const void *data, fsdp_error *err)
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
    FSDP_TRY(fsdp_checkpoint_stream(model->checkpoint, model->source[i], memory, add_step_slab,
                                    hash, err));
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

/* Compares the model with that of the step before it in the same run, if there is one.
 * A step before that cannot be read says nothing about this one. */
static fsdp_status check_step(fsdp_like_job *job, fsdp_error *err)
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
        emit(job, FSDP_FINDING_UNCHANGED, "", 0,
             "the model is equal to that of the step before it, '%s'", path);
    fsdp_hf_model_release(&before);
    fsdp_hasher_free(hash.hasher);
    fsdp_free(path);
    return st;
}

/* === elements ================================================================================= */

/*
 * Faults of the elements of a model. Threads read the tensors; findings follow in the order of the
 * model.
 *
 * Not every zero is a fault: biases, norms that store their distance from 1, and an adapter's second factor
 * begin as zeros. Matrices of layers do not, and no training makes one, nor a matrix of which an eighth is
 * zero (a rank's part that was not written), nor equal matrices in two layers or experts.
 */

enum { STACKED_MOST = 1 << 16, PARTS = 8, ALL_PARTS = (1 << PARTS) - 1 };

/* An expert's part of a tensor. */
typedef struct expert_part {
    fsdp_hash hash;
    bool has_values; /* not all are zero */
} expert_part;

/* The elements of an entry of the model. */
typedef struct value_facts {
    int64_t nans, infinities;
    bool is_read, is_zero, is_constant;
    /* bit k: part k of the row-major order, or of each row, has a value that is not zero */
    unsigned runs, columns;
    fsdp_hash hash; /* of a tensor of a layer or an expert */
    expert_part
        *stacked; /* of a tensor that holds all experts of a layer: one per index of dim 0 */
    int64_t stacked_count;
} value_facts;

typedef struct value_job {
    fsdp_like_job *like;
    fsdp_meter meter;
    int64_t memory;     /* of one worker's slab */
    value_facts *facts; /* per entry of the model */
    atomic_llong next;  /* entry to take */
} value_job;

/* --- names -------------------------------------------------------------------------------------- */

static size_t count_digits(const char *at, size_t size)
{
    size_t digits = 0;
    while (digits < size && at[digits] >= '0' && at[digits] <= '9')
        digits++;
    return digits > 0 && digits < size && at[digits] == '.' ? digits : 0;
}

/* The number of an expert in a name: "experts.7."; NULL: there is none. */
static const char *expert_number(const char *name, size_t size, size_t *digits_out)
{
    static const char word[] = "experts.";
    const char *at = memmem(name, size, word, sizeof word - 1);
    if (!at || (at > name && at[-1] != '.'))
        return NULL;
    at += sizeof word - 1;
    *digits_out = count_digits(at, size - (size_t)(at - name));
    return *digits_out > 0 ? at : NULL;
}

/* The first element of a name that is a number: of a layer. */
static const char *layer_number(const char *name, size_t size, size_t *digits_out)
{
    for (size_t i = 0; i < size; i++) {
        *digits_out = i == 0 || name[i - 1] == '.' ? count_digits(name + i, size - i) : 0;
        if (*digits_out > 0)
            return name + i;
    }
    return NULL;
}

/* The number by which a tensor has its like: of the expert, or of the layer. */
static const char *unit_number(const fsdp_entry *entry, size_t *digits_out)
{
    const char *expert = expert_number(entry->name, entry->name_size, digits_out);
    return expert ? expert : layer_number(entry->name, entry->name_size, digits_out);
}

static bool holds_word(const fsdp_entry *entry, const char *word)
{
    return memmem(entry->name, entry->name_size, word, strlen(word)) != NULL;
}

/* All experts of a layer in one tensor: [experts, ...]. */
static bool is_stacked(const fsdp_entry *entry, const fsdp_entry *tensor)
{
    size_t digits;
    return tensor->ndim == 3 && holds_word(entry, "experts.") &&
           !expert_number(entry->name, entry->name_size, &digits) && tensor->shape[0] > 1 &&
           tensor->shape[0] <= STACKED_MOST;
}

static bool is_matrix(const fsdp_entry *tensor)
{
    int wide = 0;
    for (int d = 0; d < tensor->ndim; d++)
        wide += tensor->shape[d] > 1;
    return wide >= 2;
}

/* True for a tensor that is hashed: no two layers, and no two experts, have the same one. */
static bool is_hashed(const fsdp_entry *entry, const fsdp_entry *tensor)
{
    size_t digits;
    return !is_stacked(entry, tensor) &&
           (expert_number(entry->name, entry->name_size, &digits) ||
            (is_matrix(tensor) && layer_number(entry->name, entry->name_size, &digits)));
}

/* True for a tensor of which a zero in every element is a fault. */
static bool may_not_be_zero(const fsdp_entry *entry, const fsdp_entry *tensor)
{
    static const char *const fine[] = {"lora_", "bias",    "norm",    "Norm",
                                       "ln_",   "adapter", "inv_freq"};
    for (size_t i = 0; i < sizeof fine / sizeof *fine; i++)
        if (holds_word(entry, fine[i]))
            return false;
    return is_matrix(tensor);
}

/* Elements in a part, and in a part of a row, so many that zeros are not chance. */
static bool has_runs(const fsdp_entry *tensor, int64_t count)
{
    return is_matrix(tensor) && count >= 8 * PARTS;
}

static bool has_columns(const fsdp_entry *tensor)
{
    return is_matrix(tensor) && tensor->shape[tensor->ndim - 1] >= 2 * PARTS;
}

/* --- reading ------------------------------------------------------------------------------------ */

typedef struct tensor_scan {
    value_job *job;
    value_facts *facts;
    fsdp_hasher *hasher;
    char first[16]; /* element of the tensor */
    int64_t each;   /* bytes of an expert in a stacked tensor, or 0 */
    int64_t done;   /* bytes that were read */
} tensor_scan;

/* True when all elements have the bytes of the first one. */
static bool repeats(const char *data, size_t bytes, size_t size)
{
    return bytes <= size || memcmp(data, data + size, bytes - size) == 0;
}

static bool is_all_zero(const char *data, size_t size)
{
    return size == 0 || (data[0] == 0 && repeats(data, size, 1));
}

static void note_values(const char *data, size_t bytes, unsigned bit, unsigned *bits)
{
    if (!(*bits & bit) && !is_all_zero(data, bytes))
        *bits |= bit;
}

/* The parts of a tensor, or of a row, in which elements [first, first + count) of `whole` have values. */
static void note_parts(const char *data, size_t size, int64_t first, int64_t count, int64_t whole,
                       unsigned *bits)
{
    int64_t each = whole / PARTS;
    while (count > 0) {
        int64_t part = first / each < PARTS ? first / each : PARTS - 1;
        int64_t left = (part == PARTS - 1 ? whole : (part + 1) * each) - first;
        int64_t n = count < left ? count : left;
        note_values(data, (size_t)n * size, 1U << part, bits);
        data += (size_t)n * size;
        first += n;
        count -= n;
    }
}

/* Rows end anywhere in a slab. */
static void note_columns(const char *data, size_t size, int64_t first, int64_t count, int64_t row,
                         unsigned *bits)
{
    while (count > 0 && *bits != ALL_PARTS) {
        int64_t at = first % row, n = count < row - at ? count : row - at;
        note_parts(data, size, at, n, row, bits);
        data += (size_t)n * size;
        first += n;
        count -= n;
    }
}

/* Slabs come in row-major order, so one expert follows the other. */
static void add_stacked(tensor_scan *scan, const char *data, int64_t bytes)
{
    while (bytes > 0) {
        expert_part *part = &scan->facts->stacked[scan->done / scan->each];
        int64_t left = scan->each - scan->done % scan->each, n = bytes < left ? bytes : left;
        if (left == scan->each)
            fsdp_hasher_reset(scan->hasher);
        fsdp_hasher_add(scan->hasher, data, (size_t)n);
        part->has_values = part->has_values || !is_all_zero(data, (size_t)n);
        if (n == left)
            part->hash = fsdp_hasher_value(scan->hasher);
        data += n;
        bytes -= n;
        scan->done += n;
    }
}

/* Statistics take long, so only slabs that are not finite get them. */
static void add_facts(tensor_scan *scan, const fsdp_entry *tensor, int64_t first, int64_t count,
                      const char *data)
{
    value_facts *facts = scan->facts;
    fsdp_dtype dtype = tensor->dtype;
    size_t size = fsdp_dtype_size(dtype), bytes = (size_t)count * size;
    int64_t whole = fsdp_entry_bytes(tensor) / (int64_t)size;
    if (has_runs(tensor, whole))
        note_parts(data, size, first, count, whole, &facts->runs);
    if (has_columns(tensor))
        note_columns(data, size, first, count, tensor->shape[tensor->ndim - 1], &facts->columns);
    if (!facts->is_read)
        memcpy(scan->first, data, size);
    facts->is_constant = (!facts->is_read || facts->is_constant) &&
                         memcmp(scan->first, data, size) == 0 && repeats(data, bytes, size);
    facts->is_zero = facts->is_constant && is_all_zero(scan->first, size);
    facts->is_read = true;
    if (fsdp_tensor_is_finite(data, dtype, (size_t)count))
        return;
    fsdp_stats stats = {0};
    fsdp_stats_add(&stats, dtype, data, count);
    facts->nans += stats.nans;
    facts->infinities += stats.infinities;
}

static fsdp_status add_slab(void *context, const fsdp_entry *entry, int64_t first, int64_t count,
                            const void *data, fsdp_error *err)
{
    tensor_scan *scan = context;
    int64_t bytes = count * (int64_t)fsdp_dtype_size(entry->dtype);
    if (count > 0)
        add_facts(scan, entry, first, count, data);
    if (scan->each > 0)
        add_stacked(scan, data, bytes);
    else if (scan->hasher)
        fsdp_hasher_add(scan->hasher, data, (size_t)bytes);
    return fsdp_meter_add(&scan->job->meter, bytes, entry->name, entry->name_size, err);
}

static fsdp_status prepare(tensor_scan *scan, const fsdp_entry *entry, const fsdp_entry *tensor,
                           fsdp_error *err)
{
    bool stacks = is_stacked(entry, tensor);
    if (!stacks && !is_hashed(entry, tensor))
        return FSDP_OK;
    scan->hasher = fsdp_hasher_create();
    if (!scan->hasher)
        return fsdp_fail_memory(err, "a hash");
    fsdp_hasher_reset(scan->hasher);
    int64_t bytes = fsdp_entry_bytes(tensor);
    if (!stacks || bytes == 0)
        return FSDP_OK;
    scan->each = bytes / tensor->shape[0];
    scan->facts->stacked_count = tensor->shape[0];
    scan->facts->stacked = fsdp_alloc((size_t)tensor->shape[0], sizeof *scan->facts->stacked);
    return scan->facts->stacked ? FSDP_OK : fsdp_fail_memory(err, "experts");
}

static fsdp_status scan_entry(value_job *job, const fsdp_hf_model *model, size_t i,
                              value_facts *facts, fsdp_error *err)
{
    const fsdp_entry *entry = fsdp_sd_at(model->sd, i);
    const fsdp_entry *tensor = fsdp_sd_at(model->sd, fsdp_sd_tensor_of(model->sd, i));
    tensor_scan scan = {.job = job, .facts = facts};
    if (entry->kind != FSDP_ENTRY_TENSOR || !fsdp_dtype_describe(tensor->dtype)->is_float)
        return FSDP_OK;
    fsdp_status st = prepare(&scan, entry, tensor, err);
    if (st == FSDP_OK)
        st = fsdp_checkpoint_stream(model->checkpoint, model->source[i], job->memory, add_slab,
                                    &scan, err);
    if (scan.hasher && scan.each == 0)
        facts->hash = fsdp_hasher_value(scan.hasher);
    fsdp_hasher_free(scan.hasher);
    return st;
}

static fsdp_status scan_worker(void *context, size_t worker, fsdp_error *err)
{
    value_job *job = context;
    int64_t count = (int64_t)fsdp_sd_count(job->like->model.sd);
    fsdp_status st = FSDP_OK;
    (void)worker;
    for (int64_t i; st == FSDP_OK && (i = atomic_fetch_add(&job->next, 1)) < count;)
        st = scan_entry(job, &job->like->model, (size_t)i, &job->facts[i], err);
    if (st != FSDP_OK)
        atomic_store(&job->next, count);
    return st;
}

/* --- findings ----------------------------------------------------------------------------------- */

/* Reads the tensor of that name in the model that is asked for, whose oddities are right. facts_out stays
 * empty when there is none; the caller frees its experts. */
static fsdp_status read_wanted(value_job *job, const fsdp_entry *entry, value_facts *facts_out,
                               fsdp_error *err)
{
    const fsdp_hf_model *wanted = job->like->wanted;
    *facts_out = (value_facts){0};
    int64_t at = wanted ? fsdp_sd_find(wanted->sd, entry->name, entry->name_size) : -1;
    return at < 0 ? FSDP_OK : scan_entry(job, wanted, (size_t)at, facts_out, err);
}

/* The rows of a vocabulary are padded with zeros up to a round number: fewer than half of them at its end say
 * nothing. */
static unsigned without_padding(unsigned dead, const fsdp_entry *entry)
{
    size_t digits;
    unsigned padding = 0;
    if (layer_number(entry->name, entry->name_size, &digits))
        return dead;
    int parts = 0;
    for (unsigned bit = 1U << (PARTS - 1); dead & bit; bit >>= 1, parts++)
        padding |= bit;
    return parts < PARTS / 2 ? dead & ~padding : dead;
}

/* Bits of parts that hold zeros only. */
static unsigned dead_of(const value_facts *facts, const fsdp_entry *tensor, unsigned *columns_out)
{
    int64_t count = fsdp_entry_bytes(tensor) / (int64_t)fsdp_dtype_size(tensor->dtype);
    bool reads_runs = facts->is_read && !facts->stacked && has_runs(tensor, count);
    *columns_out = facts->is_read && has_columns(tensor) ? ALL_PARTS & ~facts->columns : 0;
    return reads_runs ? without_padding(ALL_PARTS & ~facts->runs, tensor) : 0;
}

/* The first of the parts, and those after it. */
static void emit_dead(value_job *job, const fsdp_entry *entry, unsigned dead, int64_t whole,
                      const char *what)
{
    int first = 0;
    while (!(dead & 1U << first))
        first++;
    int end = first + 1;
    while (end < PARTS && (dead & 1U << end))
        end++;
    emit(job->like, FSDP_FINDING_ZERO, entry->name, entry->name_size,
         "holds zeros only in %s %" PRId64 " to %" PRId64 " of %" PRId64, what,
         first * (whole / PARTS), (end == PARTS ? whole : end * (whole / PARTS)) - 1, whole);
}

/* Tells of one fault of the elements, unless the model that is asked for has the same. */
static void emit_first(value_job *job, const fsdp_entry *entry, const fsdp_entry *tensor,
                       const value_facts *facts, const value_facts *wanted)
{
    unsigned columns, right_columns, runs = dead_of(facts, tensor, &columns);
    unsigned right_runs = dead_of(wanted, tensor, &right_columns);
    int64_t count = fsdp_entry_bytes(tensor) / (int64_t)fsdp_dtype_size(tensor->dtype);
    if (facts->nans > 0 && wanted->nans == 0)
        emit(job->like, FSDP_FINDING_NOT_FINITE, entry->name, entry->name_size,
             "holds %" PRId64 " NaN", facts->nans);
    else if (facts->infinities > 0 && wanted->infinities == 0)
        emit(job->like, FSDP_FINDING_NOT_FINITE, entry->name, entry->name_size,
             "holds %" PRId64 " Inf", facts->infinities);
    else if (!may_not_be_zero(entry, tensor) || wanted->is_zero)
        return;
    else if (facts->is_zero)
        emit(job->like, FSDP_FINDING_ZERO, entry->name, entry->name_size, "holds zeros only");
    else if (runs & ~right_runs)
        emit_dead(job, entry, runs & ~right_runs, count, "elements");
    else if (columns & ~right_columns)
        emit_dead(job, entry, columns & ~right_columns, tensor->shape[tensor->ndim - 1], "columns");
}

static fsdp_status emit_elements(value_job *job, size_t i, fsdp_error *err)
{
    const fsdp_sd *sd = job->like->model.sd;
    const fsdp_entry *entry = fsdp_sd_at(sd, i);
    const fsdp_entry *tensor = fsdp_sd_at(sd, fsdp_sd_tensor_of(sd, i));
    const value_facts *facts = &job->facts[i];
    value_facts wanted;
    unsigned columns;
    bool is_finite = facts->nans == 0 && facts->infinities == 0;
    bool is_dead = facts->is_read && may_not_be_zero(entry, tensor) &&
                   (facts->is_zero || dead_of(facts, tensor, &columns) || columns);
    if (!facts->is_read || (is_finite && !is_dead))
        return FSDP_OK;
    fsdp_status st = read_wanted(job, entry, &wanted, err);
    if (st == FSDP_OK)
        emit_first(job, entry, tensor, facts, &wanted);
    fsdp_free(wanted.stacked);
    return st;
}

static int compare_parts(const void *a, const void *b)
{
    const expert_part *one = *(const expert_part *const *)a,
                      *other = *(const expert_part *const *)b;
    int order = memcmp(&one->hash, &other->hash, sizeof one->hash);
    return order != 0 ? order : (one > other) - (one < other);
}

static bool is_equal(const fsdp_hash *a, const fsdp_hash *b)
{
    return memcmp(a, b, sizeof *a) == 0;
}

/* Tells of an expert without values, or one that is equal to the expert before it in the order of hashes,
 * unless the model that is asked for has the same. */
static void emit_expert(value_job *job, size_t i, const expert_part *before,
                        const expert_part *part, const value_facts *wanted)
{
    const fsdp_entry *entry = fsdp_sd_at(job->like->model.sd, i);
    const value_facts *facts = &job->facts[i];
    int64_t number = part - facts->stacked;
    const expert_part *right =
        wanted->stacked_count == facts->stacked_count ? wanted->stacked : NULL;
    if (!part->has_values) {
        if (!facts->is_zero && (!right || right[number].has_values))
            emit(job->like, FSDP_FINDING_ZERO, entry->name, entry->name_size,
                 "holds zeros only for expert %" PRId64, number);
        return;
    }
    if (!before || !is_equal(&part->hash, &before->hash))
        return;
    int64_t other = before - facts->stacked;
    if (!right || !is_equal(&right[number].hash, &right[other].hash))
        emit(job->like, FSDP_FINDING_TWIN, entry->name, entry->name_size,
             "has equal experts %" PRId64 " and %" PRId64, other, number);
}

/* All experts of a layer in one tensor. */
static fsdp_status emit_stacked(value_job *job, size_t i, fsdp_error *err)
{
    const value_facts *facts = &job->facts[i];
    size_t count = (size_t)facts->stacked_count, odd = 0;
    value_facts wanted = {0};
    const expert_part **sorted = fsdp_alloc(count, sizeof *sorted);
    if (!sorted)
        return fsdp_fail_memory(err, "experts");
    for (size_t e = 0; e < count; e++)
        sorted[e] = &facts->stacked[e];
    qsort(sorted, count, sizeof *sorted, compare_parts);
    for (size_t e = 0; e < count; e++)
        odd +=
            !sorted[e]->has_values || (e > 0 && is_equal(&sorted[e]->hash, &sorted[e - 1]->hash));
    fsdp_status st = FSDP_OK;
    if (odd > 0)
        st = read_wanted(job, fsdp_sd_at(job->like->model.sd, i), &wanted, err);
    for (size_t e = 0; e < count && odd > 0 && st == FSDP_OK; e++)
        emit_expert(job, i, e > 0 ? sorted[e - 1] : NULL, sorted[e], &wanted);
    fsdp_free(wanted.stacked);
    fsdp_free(sorted);
    return st;
}

/* --- layers, and experts in tensors of their own ------------------------------------------------ */

typedef struct unit_entry {
    const fsdp_entry *entry;
    const value_facts *facts;
    size_t begin, digits; /* of the number in the name */
} unit_entry;

static int compare_text(const char *a, size_t a_size, const char *b, size_t b_size)
{
    int order = memcmp(a, b, a_size < b_size ? a_size : b_size);
    return order != 0 ? order : (a_size > b_size) - (a_size < b_size);
}

/* By matrix, which is the name without the number; then by bytes. */
static int compare_group(const unit_entry *a, const unit_entry *b)
{
    size_t a_end = a->begin + a->digits, b_end = b->begin + b->digits;
    int order = compare_text(a->entry->name, a->begin, b->entry->name, b->begin);
    if (order == 0)
        order = compare_text(a->entry->name + a_end, a->entry->name_size - a_end,
                             b->entry->name + b_end, b->entry->name_size - b_end);
    return order != 0 ? order : memcmp(&a->facts->hash, &b->facts->hash, sizeof a->facts->hash);
}

static int compare_units(const void *a, const void *b)
{
    const unit_entry *one = a, *other = b;
    int order = compare_group(one, other);
    return order != 0 ? order : (one->entry > other->entry) - (one->entry < other->entry);
}

static size_t list_units(const value_job *job, unit_entry *units)
{
    size_t count = 0;
    const fsdp_sd *sd = job->like->model.sd;
    for (size_t i = 0; i < fsdp_sd_count(sd); i++) {
        const fsdp_entry *entry = fsdp_sd_at(sd, i);
        size_t digits;
        if (!job->facts[i].is_read || job->facts[i].is_constant || !is_hashed(entry, entry))
            continue;
        const char *number = unit_number(entry, &digits);
        units[count++] =
            (unit_entry){entry, &job->facts[i], (size_t)(number - entry->name), digits};
    }
    return count;
}

/* True when the two are equal in the model that is asked for, too, or one of them is not there: it is extra
 * or tied. */
static fsdp_status are_equal_there(value_job *job, const unit_entry *a, const unit_entry *b,
                                   bool *are_out, fsdp_error *err)
{
    value_facts one, other;
    FSDP_TRY(read_wanted(job, a->entry, &one, err));
    FSDP_TRY(read_wanted(job, b->entry, &other, err));
    *are_out =
        one.is_read && other.is_read ? is_equal(&one.hash, &other.hash) : job->like->wanted != NULL;
    return FSDP_OK;
}

static fsdp_status emit_twins(value_job *job, fsdp_error *err)
{
    unit_entry *units = fsdp_alloc(fsdp_sd_count(job->like->model.sd) + 1, sizeof *units);
    fsdp_status st = FSDP_OK;
    if (!units)
        return fsdp_fail_memory(err, "layers");
    size_t count = list_units(job, units);
    qsort(units, count, sizeof *units, compare_units);
    for (size_t e = 1; e < count && st == FSDP_OK; e++) {
        const unit_entry *before = &units[e - 1], *unit = &units[e];
        bool is_right = true;
        if (compare_group(before, unit) == 0)
            st = are_equal_there(job, before, unit, &is_right, err);
        if (st == FSDP_OK && !is_right)
            emit(job->like, FSDP_FINDING_TWIN, unit->entry->name, unit->entry->name_size,
                 "is equal to that of %s %.*s",
                 holds_word(unit->entry, "experts.") ? "expert" : "layer", (int)before->digits,
                 before->entry->name + before->begin);
    }
    fsdp_free(units);
    return st;
}

/* --- the call ----------------------------------------------------------------------------------- */

static fsdp_status emit_all(value_job *job, fsdp_error *err)
{
    size_t count = fsdp_sd_count(job->like->model.sd);
    for (size_t i = 0; i < count; i++)
        FSDP_TRY(emit_elements(job, i, err));
    for (size_t i = 0; i < count; i++)
        if (job->facts[i].stacked && job->facts[i].is_read)
            FSDP_TRY(emit_stacked(job, i, err));
    return emit_twins(job, err);
}

/* Reads all elements of the model. */
static fsdp_status check_values(fsdp_like_job *like, fsdp_error *err)
{
    const fsdp_verify_opts *opts = like->opts;
    size_t count = fsdp_sd_count(like->model.sd);
    int64_t memory = opts->memory > 0 ? opts->memory : FSDP_MEMORY_DEFAULT;
    /* half for the slabs, half for the buffers that fill them */
    int threads = fsdp_block_readers_within(opts->threads, memory / 2 + 1,
                                            like->model.checkpoint->manifest.compressed);
    int readers = fsdp_checkpoint_reading(like->model.checkpoint).threads;
    threads = readers < threads ? readers : threads;
    value_job job = {.like = like, .memory = memory / 2 / threads + 1};
    job.facts = fsdp_alloc(count + 1, sizeof *job.facts);
    if (!job.facts)
        return fsdp_fail_memory(err, "the model's tensors");
    fsdp_meter_init(&job.meter, &opts->watch, fsdp_sd_tensor_bytes(like->model.sd));
    fsdp_status st = fsdp_parallel(threads, (size_t)threads, scan_worker, &job, err);
    if (st == FSDP_OK)
        st = emit_all(&job, err);
    for (size_t i = 0; i < count; i++)
        fsdp_free(job.facts[i].stacked);
    fsdp_free(job.facts);
    return st;
}

/* === the check ================================================================================ */

/* The model that is asked for: config.json, or the weights of another checkpoint. */
typedef struct like_wanted {
    fsdp_expect *expect;
    fsdp_config_file config; /* of a directory, or what is asked for */
    fsdp_error unread;       /* why the directory has none, if there is a file */
    fsdp_hf_model model;
} like_wanted;

/* --- the model that is asked for ---------------------------------------------------------------- */

static fsdp_status read_config(fsdp_io *io, const char *path, like_wanted *wanted, fsdp_error *err)
{
    char *text = NULL;
    size_t size;
    FSDP_TRY(fsdp_io_read_file(io, path, FSDP_CONFIG_BYTES, &text, &size, err));
    fsdp_status st = fsdp_config_parse(text, size, path, &wanted->config, err);
    fsdp_free(text);
    return st == FSDP_OK ? fsdp_expect_config(&wanted->config, &wanted->expect, err) : st;
}

static bool is_config_file(fsdp_io *io, const char *path)
{
    fsdp_file_info info;
    size_t size = strlen(path);
    return size > 5 && strcmp(path + size - 5, ".json") == 0 &&
           io->ops->info(io, path, &info) >= 0 && info.kind == FSDP_FILE_REGULAR;
}

static fsdp_status expect_weights(const char *like, like_wanted *wanted, fsdp_error *err)
{
    const fsdp_checkpoint *checkpoint = wanted->model.checkpoint;
    const fsdp_expect_sd from = {.sd = wanted->model.sd,
                                 .path = like,
                                 .may_lack_head = wanted->config.kind.is_tied,
                                 .layers = wanted->config.kind.layers,
                                 .further_layers = wanted->config.kind.further_layers,
                                 .named = checkpoint->missing_count > 0 ? checkpoint : NULL};
    return fsdp_expect_from(&from, &wanted->expect, err);
}

/* The config.json of a directory without weights, or an index without its files. */
static fsdp_status expect_without_weights(fsdp_io *io, const char *like,
                                          const fsdp_verify_opts *opts, like_wanted *wanted,
                                          fsdp_error *err)
{
    char *config = fsdp_path_join(like, "config.json");
    const bool is_there = config && is_config_file(io, config);
    const fsdp_hf_model_from any = {like, wanted->config.kind.type, "."};
    fsdp_error unknown = wanted->unread;
    fsdp_status st = FSDP_ERR_NOT_FOUND;
    if (is_there && wanted->config.text)
        st = fsdp_expect_config(&wanted->config, &wanted->expect, &unknown);
    else if (is_there && unknown.status != FSDP_OK)
        st = unknown.status;
    fsdp_free(config);
    if (st == FSDP_OK)
        return FSDP_OK;
    if (fsdp_hf_model_open(&any, opts, &wanted->model, NULL) == FSDP_OK)
        return expect_weights(like, wanted, err);
    if (err && st != FSDP_ERR_NOT_FOUND)
        *err = unknown;
    return st;
}

/* The weights of a directory say more than its config.json. */
static fsdp_status find_wanted(const char *like, const fsdp_verify_opts *opts, like_wanted *wanted,
                               fsdp_error *err)
{
    fsdp_io *io = fsdp_access_io(&opts->access);
    fsdp_error found = {0};
    if (is_config_file(io, like))
        return read_config(io, like, wanted, err);
    fsdp_config_find(io, NULL, like, &wanted->config, &wanted->unread);
    const fsdp_hf_model_from open = {like, wanted->config.kind.type, NULL};
    fsdp_status st = fsdp_hf_model_open(&open, opts, &wanted->model, &found);
    if (st == FSDP_OK && !wanted->config.kind.type[0]) { /* of the step that a run stands for */
        fsdp_config_release(&wanted->config);
        fsdp_config_find(io, NULL, wanted->model.path, &wanted->config, NULL);
    }
    if (st == FSDP_OK)
        return expect_weights(like, wanted, err);
    fsdp_hf_model_release(&wanted->model);
    fsdp_status without = expect_without_weights(io, like, opts, wanted, err);
    if (without == FSDP_OK || (without != FSDP_ERR_NOT_FOUND && st == FSDP_ERR_NOT_FOUND))
        return without;
    if (err)
        *err = found;
    return st;
}

/* --- the call ----------------------------------------------------------------------------------- */

static fsdp_status check_model(fsdp_like_job *job, const like_wanted *wanted, fsdp_error *err)
{
    fsdp_expect_counts counts = {0};
    fsdp_like_context context = {job, wanted->expect};
    FSDP_TRY(
        fsdp_expect_compare(wanted->expect, job->model.sd, take_fault, &context, &counts, err));
    job->summary->expected = counts.expected - job->tied;
    job->summary->found = counts.found;
    if (job->opts->level == FSDP_VERIFY_QUICK)
        return FSDP_OK;
    FSDP_TRY(check_values(job, err));
    return check_step(job, err);
}

fsdp_status fsdp_checkpoint_verify_like(const char *path, const char *like,
                                        const fsdp_verify_opts *opts,
                                        fsdp_like_summary *summary_out, fsdp_error *err)
{
    fsdp_like_summary unused;
    const fsdp_verify_opts defaults = {0};
    FSDP_NEED(err, path, like);
    fsdp_like_job job = {.opts = opts ? opts : &defaults,
                         .summary = summary_out ? summary_out : &unused};
    like_wanted wanted = {0};
    *job.summary = (fsdp_like_summary){0};
    fsdp_verify_opts quiet = *job.opts;
    quiet.watch.notice = NULL; /* the verification of the path has told the way to it */
    fsdp_status st = find_wanted(like, job.opts, &wanted, err);
    if (st == FSDP_OK) {
        snprintf(job.summary->model, sizeof job.summary->model, "%s",
                 fsdp_expect_name(wanted.expect));
        job.wanted = wanted.model.sd ? &wanted.model : NULL;
        job.model_type = wanted.config.kind.type[0] ? wanted.config.kind.type
                                                    : fsdp_expect_model_type(wanted.expect);
        const fsdp_hf_model_from open = {path, job.model_type, NULL};
        st = fsdp_hf_model_open(&open, &quiet, &job.model, err);
    }
    if (st == FSDP_OK)
        st = check_model(&job, &wanted, err);
    fsdp_hf_model_release(&job.model);
    fsdp_hf_model_release(&wanted.model);
    fsdp_expect_free(wanted.expect);
    fsdp_config_release(&wanted.config);
    if (st == FSDP_OK && job.summary->findings > 0)
        return fsdp_fail(err, FSDP_DIFFERS, "'%s' is not the model of '%s': %lld findings", path,
                         like, (long long)job.summary->findings);
    return st;
}
