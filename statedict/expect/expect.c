/* The tensors that a model has, compared with a state dict: see expect.h. */
#include "statedict/expect/expect.h"

#include "base/text.h"
#include "base/values_shape.h"
#include "statedict/models/config.h"
#include "statedict/sd/layout_internal.h"
#include <fsdp/checkpoint.h>

#include <stdio.h>
#include <string.h>

enum { NAME_ROOM = 256 };

struct fsdp_expect {
    char *path;
    fsdp_config config; /* of config.json, if it has an architecture */
    int64_t layers, experts;
    int64_t further;     /* layers after those, which predict further tokens and may be there */
    fsdp_expect_sd from; /* else the other state dict */
};

typedef fsdp_status (*expect_visit)(void *context, const fsdp_expected *expected, fsdp_error *err);

/* One spelling of the names. */
typedef struct expect_form {
    const char *base;
    int spelling;
} expect_form;

/* --- the list of an architecture ---------------------------------------------------------------- */

static bool is_head(const fsdp_tensor_row *row)
{
    return strncmp(row->name, "{base}", 6) != 0;
}

static bool has_mark(const fsdp_tensor_row *row, const char *mark)
{
    return strstr(row->name, mark) != NULL;
}

/* Writes the name with {base}, {layer} and {expert} replaced. */
static void spell_name(const fsdp_tensor_row *row, const char *base, int64_t layer, int64_t expert,
                       char out[NAME_ROOM])
{
    size_t size = 0;
    for (const char *at = row->name; *at;) {
        char text[32];
        const char *end = *at == '{' ? strchr(at, '}') : NULL;
        if (end && at[1] != 'b')
            snprintf(text, sizeof text, "%lld", (long long)(at[1] == 'l' ? layer : expert));
        else
            snprintf(text, sizeof text, "%.*s", 1, at);
        const char *part = end && at[1] == 'b' ? base : text;
        size += (size_t)snprintf(out + size, NAME_ROOM - size, "%s", part);
        at = end ? end + 1 : at + 1;
    }
}

typedef struct row_visit {
    const fsdp_expect *expect;
    const expect_form *form;
    expect_visit visit;
    void *context;
    bool names_only; /* without shapes */
} row_visit;

static fsdp_status describe_shape(const fsdp_config *config, const fsdp_tensor_row *row,
                                  int64_t layer, fsdp_expected *expected, fsdp_error *err)
{
    const char *at = row->shape;
    expected->ndim = -1;
    if (*at == '?' || (is_head(row) && !config->is_class_known))
        return FSDP_OK;
    for (expected->ndim = 0; at && expected->ndim < FSDP_MAX_DIMS; expected->ndim++)
        FSDP_TRY(fsdp_formula_next_dim(config, &at, layer, &expected->shape[expected->ndim], err));
    return FSDP_OK;
}

static fsdp_status visit_layer(const row_visit *job, const fsdp_tensor_row *row, int64_t layer,
                               fsdp_error *err)
{
    const fsdp_config *config = &job->expect->config;
    int64_t exists = 1, may_lack = 0;
    char name[NAME_ROOM];
    fsdp_expected expected = {.name = name};
    if (row->when)
        FSDP_TRY(fsdp_formula_compute(config, row->when, layer, &exists, err));
    if (!exists)
        return FSDP_OK;
    if (row->may_lack)
        FSDP_TRY(fsdp_formula_compute(config, row->may_lack, layer, &may_lack, err));
    expected.is_optional = may_lack || (is_head(row) && !config->is_class_known);
    if (!job->names_only)
        FSDP_TRY(describe_shape(config, row, layer, &expected, err));
    int64_t experts = has_mark(row, "{expert}") ? job->expect->experts : 1;
    for (int64_t expert = 0; expert < experts; expert++) {
        spell_name(row, job->form->base, layer, expert, name);
        expected.name_size = strlen(name);
        FSDP_TRY(job->visit(job->context, &expected, err));
    }
    return FSDP_OK;
}

static fsdp_status visit_row(const row_visit *job, const fsdp_tensor_row *row, fsdp_error *err)
{
    int64_t layers = has_mark(row, "{layer}") ? job->expect->layers : 1;
    if (row->spelling != 0 && row->spelling != job->form->spelling)
        return FSDP_OK;
    for (int64_t layer = 0; layer < layers; layer++)
        FSDP_TRY(visit_layer(job, row, layer, err));
    return FSDP_OK;
}

/* --- the list of another state dict ------------------------------------------------------------- */

static bool is_head_name(const char *name, size_t size)
{
    static const char *const heads[] = {"lm_head.weight", "embed_out.weight",
                                        "cls.predictions.decoder.weight",
                                        "cls.predictions.decoder.bias"};
    for (size_t i = 0; i < sizeof heads / sizeof *heads; i++) {
        size_t n = strlen(heads[i]);
        if (size >= n && memcmp(name + size - n, heads[i], n) == 0)
            return true;
    }
    return false;
}

/* The number of a layer of the text's model: 61 of "model.layers.61.eh_proj.weight"; -1: of none. */
static int64_t layer_of(const char *name, size_t size)
{
    static const char *const begins[] = {"model.layers.", "model.language_model.layers.",
                                         "language_model.model.layers."};
    int64_t layer = 0;
    size_t at = 0;
    for (size_t i = 0; i < sizeof begins / sizeof *begins && at == 0; i++)
        if (size > strlen(begins[i]) && memcmp(name, begins[i], strlen(begins[i])) == 0)
            at = strlen(begins[i]);
    size_t digits = at;
    while (at > 0 && at < size && name[at] >= '0' && name[at] <= '9' && layer < INT32_MAX)
        layer = layer * 10 + (name[at++] - '0');
    return at > digits && at < size && name[at] == '.' ? layer : -1;
}

/* An output that is tied, a layer that predicts further tokens. */
static bool may_lack(const fsdp_expect_sd *from, const char *name, size_t size)
{
    return (from->may_lack_head && is_head_name(name, size)) ||
           (from->layers > 0 && layer_of(name, size) >= from->layers);
}

/* An index without its files gives names, and no shapes. */
static fsdp_status visit_names(const fsdp_expect_sd *from, expect_visit visit, void *context,
                               fsdp_error *err)
{
    for (size_t i = 0; from->named; i++) {
        fsdp_expected expected = {.ndim = -1};
        expected.name = fsdp_checkpoint_missing_at(from->named, i, &expected.name_size);
        if (!expected.name)
            break;
        expected.is_optional = may_lack(from, expected.name, expected.name_size);
        FSDP_TRY(visit(context, &expected, err));
    }
    return FSDP_OK;
}

static fsdp_status visit_sd(const fsdp_expect_sd *from, expect_visit visit, void *context,
                            fsdp_error *err)
{
    for (size_t i = 0; i < fsdp_sd_count(from->sd); i++) {
        const fsdp_entry *entry = fsdp_sd_at(from->sd, i);
        if (entry->kind == FSDP_ENTRY_VALUE)
            continue;
        const fsdp_entry *tensor = fsdp_sd_at(from->sd, fsdp_sd_tensor_of(from->sd, i));
        fsdp_expected expected = {.name = entry->name,
                                  .name_size = entry->name_size,
                                  .ndim = tensor->ndim,
                                  .dtype = tensor->dtype,
                                  .is_optional = may_lack(from, entry->name, entry->name_size)};
        fsdp_dtype_to_values(tensor->dtype, tensor->ndim, tensor->shape, expected.shape);
        FSDP_TRY(visit(context, &expected, err));
    }
    return visit_names(from, visit, context, err);
}

static fsdp_status visit_all(const row_visit *job, fsdp_error *err)
{
    const fsdp_architecture *architecture = job->expect->config.architecture;
    if (!architecture)
        return visit_sd(&job->expect->from, job->visit, job->context, err);
    for (size_t i = 0; i < architecture->row_count; i++)
        FSDP_TRY(visit_row(job, &architecture->rows[i], err));
    return FSDP_OK;
}

/* --- creating ----------------------------------------------------------------------------------- */

/* Layers times experts times rows must be bounded before anything walks over them. */
static fsdp_status bound(fsdp_expect *expect, fsdp_error *err)
{
    const fsdp_config *config = &expect->config;
    int64_t each = 0, all;
    FSDP_TRY(fsdp_formula_compute(config, "$layers", 0, &expect->layers, err));
    FSDP_TRY(fsdp_formula_compute(config, "$experts", 0, &expect->experts, err));
    FSDP_TRY(fsdp_formula_compute(config, "$further", 0, &expect->further, err));
    if (expect->layers < 0 || expect->experts < 0)
        return fsdp_fail(err, FSDP_ERR_USAGE, "'%s' has a negative number of layers or experts",
                         config->path);
    for (size_t i = 0; i < config->architecture->row_count; i++) {
        bool is_expert = has_mark(&config->architecture->rows[i], "{expert}");
        if (fsdp_add_overflow(each, is_expert ? expect->experts : 1, &each))
            each = INT64_MAX;
    }
    if (fsdp_mul_overflow(each, expect->layers, &all) || all > FSDP_EXPECT_MOST)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "'%s' has %lld layers and %lld experts: more than %d tensors are not "
                         "checked",
                         config->path, (long long)expect->layers, (long long)expect->experts,
                         FSDP_EXPECT_MOST);
    return FSDP_OK;
}

static fsdp_status create(const char *path, fsdp_expect **expect_out, fsdp_error *err)
{
    fsdp_expect *expect = fsdp_alloc(1, sizeof *expect);
    *expect_out = NULL;
    if (expect)
        expect->path = fsdp_strndup(path, strlen(path));
    if (expect && expect->path) {
        *expect_out = expect;
        return FSDP_OK;
    }
    fsdp_free(expect);
    return fsdp_fail_memory(err, path);
}

fsdp_status fsdp_expect_config(const fsdp_config_file *file, fsdp_expect **expect_out,
                               fsdp_error *err)
{
    fsdp_expect *expect;
    FSDP_TRY(create(fsdp_config_name(file), &expect, err));
    fsdp_status st = fsdp_config_read(file, &expect->config, err);
    if (st == FSDP_OK)
        st = bound(expect, err);
    if (st != FSDP_OK) {
        fsdp_expect_free(expect);
        return st;
    }
    *expect_out = expect;
    return FSDP_OK;
}

fsdp_status fsdp_expect_from(const fsdp_expect_sd *from, fsdp_expect **expect_out, fsdp_error *err)
{
    FSDP_TRY(create(from->path, expect_out, err));
    (*expect_out)->from = *from;
    return FSDP_OK;
}

void fsdp_expect_free(fsdp_expect *expect)
{
    if (!expect)
        return;
    fsdp_arena_release(&expect->config.arena);
    fsdp_free(expect->path);
    fsdp_free(expect);
}

const char *fsdp_expect_model_type(const fsdp_expect *expect)
{
    return expect->config.architecture ? expect->config.architecture->model_type : NULL;
}

const char *fsdp_expect_name(const fsdp_expect *expect)
{
    return expect->config.architecture ? expect->config.architecture->model_type : expect->path;
}

/* --- comparing ---------------------------------------------------------------------------------- */

typedef struct comparison {
    const fsdp_expect *expect;
    const fsdp_sd *sd;
    fsdp_expect_report report;
    void *context;
    bool *is_expected; /* per entry of sd */
    int64_t found;     /* names of a spelling */
    fsdp_expect_counts counts;
} comparison;

/* The entry of the name, if it is a tensor; -1: none. */
static int64_t find_tensor(const fsdp_sd *sd, const fsdp_expected *expected)
{
    int64_t at = fsdp_sd_find(sd, expected->name, expected->name_size);
    return at >= 0 && fsdp_sd_at(sd, (size_t)at)->kind != FSDP_ENTRY_VALUE ? at : -1;
}

static fsdp_status count_found(void *context, const fsdp_expected *expected, fsdp_error *err)
{
    comparison *job = context;
    (void)err;
    job->found += find_tensor(job->sd, expected) >= 0;
    return FSDP_OK;
}

static bool counts_as_float(const fsdp_dtype_info *info)
{
    return info->is_float || info->values > 1;
}

/* Floating dtypes, also quantized, are one kind and all others a second one; a cast within a kind is
 * no fault. */
static bool is_other_kind(fsdp_dtype a, fsdp_dtype b)
{
    const fsdp_dtype_info *one = fsdp_dtype_describe(a), *other = fsdp_dtype_describe(b);
    return one && other && counts_as_float(one) != counts_as_float(other);
}

static bool has_shape(const fsdp_entry *tensor, const fsdp_expected *expected)
{
    if (expected->ndim < 0)
        return true;
    int64_t shape[FSDP_MAX_DIMS];
    fsdp_dtype_to_values(tensor->dtype, tensor->ndim, tensor->shape, shape);
    return tensor->ndim == expected->ndim &&
           (tensor->ndim == 0 ||
            memcmp(shape, expected->shape, (size_t)tensor->ndim * sizeof *tensor->shape) == 0);
}

static fsdp_status compare_one(void *context, const fsdp_expected *expected, fsdp_error *err)
{
    comparison *job = context;
    int64_t at = find_tensor(job->sd, expected);
    job->counts.expected += !expected->is_optional;
    if (at < 0 && expected->is_optional)
        return FSDP_OK;
    if (at < 0) {
        job->counts.missing++;
        return job->report(job->context, FSDP_EXPECT_MISSING, expected, NULL, err);
    }
    const fsdp_entry *tensor = fsdp_sd_at(job->sd, fsdp_sd_tensor_of(job->sd, (size_t)at));
    job->is_expected[at] = true;
    job->counts.found += !expected->is_optional;
    if (has_shape(tensor, expected) && !is_other_kind(tensor->dtype, expected->dtype))
        return FSDP_OK;
    job->counts.shapes++;
    return job->report(job->context, FSDP_EXPECT_SHAPE, expected, tensor, err);
}

/* The other state dict may have left out a head that is tied, or layers that predict further tokens. */
static bool may_be_extra(const comparison *job, const fsdp_entry *entry)
{
    const fsdp_expect *expect = job->expect;
    const fsdp_expect_sd *from = &expect->from;
    int64_t layer = layer_of(entry->name, entry->name_size), behind = layer - from->layers;
    if (expect->config.architecture)
        return layer >= expect->layers && layer - expect->layers < expect->further;
    return may_lack(from, entry->name, entry->name_size) &&
           (behind < 0 || behind < from->further_layers ||
            is_head_name(entry->name, entry->name_size));
}

static bool is_digit(char c)
{
    return c >= '0' && c <= '9';
}

/* The name with the number that begins at `at` replaced by 0, if it is an element of its own. */
static bool name_first(const fsdp_entry *entry, size_t at, fsdp_text *out)
{
    const char *name = entry->name;
    size_t end = at;
    while (end < entry->name_size && is_digit(name[end]))
        end++;
    if (end == at || end == entry->name_size || name[end] != '.' || at == 0 || name[at - 1] != '.')
        return false;
    out->size = 0;
    fsdp_text_add(out, name, at);
    fsdp_text_add(out, "0", 1);
    fsdp_text_add(out, name + end, entry->name_size - end);
    return !out->failed;
}

/* True when layer 0, or expert 0, has a tensor of this name that is expected. */
static bool is_beyond(const comparison *job, const fsdp_entry *entry, fsdp_text *first)
{
    for (size_t i = 0; i < entry->name_size; i++) {
        int64_t at =
            name_first(entry, i, first) ? fsdp_sd_find(job->sd, first->data, first->size) : -1;
        if (at >= 0 && job->is_expected[at])
            return true;
    }
    return false;
}

static fsdp_status report_extra(comparison *job, fsdp_error *err)
{
    fsdp_text first = {0};
    fsdp_status st = FSDP_OK;
    for (size_t i = 0; i < fsdp_sd_count(job->sd) && st == FSDP_OK; i++) {
        const fsdp_entry *entry = fsdp_sd_at(job->sd, i);
        if (entry->kind == FSDP_ENTRY_VALUE || job->is_expected[i] || may_be_extra(job, entry))
            continue;
        job->counts.extra++;
        fsdp_expect_fault fault =
            is_beyond(job, entry, &first) ? FSDP_EXPECT_BEYOND : FSDP_EXPECT_EXTRA;
        st = job->report(job->context, fault, NULL, entry, err);
    }
    if (st == FSDP_OK && first.failed)
        st = fsdp_fail_memory(err, "a name");
    fsdp_text_release(&first);
    return st;
}

static fsdp_status choose_form(comparison *job, expect_form *form, fsdp_error *err)
{
    const fsdp_architecture *architecture = job->expect->config.architecture;
    int64_t best = -1;
    for (size_t b = 0; architecture && b < architecture->base_count; b++)
        for (int spelling = 1; spelling <= architecture->spellings; spelling++) {
            const expect_form tried = {architecture->bases[b], spelling};
            const row_visit names = {job->expect, &tried, count_found, job, true};
            job->found = 0;
            FSDP_TRY(visit_all(&names, err));
            if (job->found <= best)
                continue;
            best = job->found;
            *form = tried;
        }
    return FSDP_OK;
}

fsdp_status fsdp_expect_compare(const fsdp_expect *expect, const fsdp_sd *sd,
                                fsdp_expect_report report, void *context,
                                fsdp_expect_counts *counts_out, fsdp_error *err)
{
    comparison job = {.expect = expect, .sd = sd, .report = report, .context = context};
    expect_form form = {"", 1};
    job.is_expected = fsdp_alloc(fsdp_sd_count(sd) + 1, sizeof *job.is_expected);
    if (!job.is_expected)
        return fsdp_fail_memory(err, expect->path);
    const row_visit whole = {expect, &form, compare_one, &job, false};
    fsdp_status st = choose_form(&job, &form, err);
    if (st == FSDP_OK)
        st = visit_all(&whole, err);
    if (st == FSDP_OK)
        st = report_extra(&job, err);
    fsdp_free(job.is_expected);
    *counts_out = job.counts;
    return st;
}
