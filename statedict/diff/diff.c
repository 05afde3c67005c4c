/*
 * Comparing two checkpoints: names are paired, the paired tensors cut into row-major slabs, and
 * workers read each slab from both sides (checked by hash, as every read is) and compare it.
 */
#include "base/core/pool.h"
#include "base/core/given.h"
#include "base/data/name_path.h"
#include "base/data/text_pairs.h"
#include "kernels/kernels.h"
#include "kernels/quants.h"
#include "statedict/checkpoint/checkpoint_internal.h"
#include "statedict/diff/diff_internal.h"
#include "statedict/select/expression.h"
#include "statedict/select/rename.h"
#include <fsdp/diff.h>
#include <fsdp/filter.h>

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* === elements of two buffers ================================================================== */

/*
 * Comparing the elements of two buffers: by bits, by value, within tolerances. A complex element is
 * two components of a real type, and a quantized block is its numbers as f32; everything below is
 * said of components.
 */

enum { BLOCK = 1024 };

static fsdp_dtype component_of(fsdp_dtype dtype, int *per_element_out)
{
    const fsdp_dtype_info *info = fsdp_dtype_describe(dtype);
    *per_element_out = info && info->values > 1 ? (int)info->values : 2;
    if (info && info->values > 1)
        return FSDP_F32;
    switch (dtype) {
    case FSDP_C128: return FSDP_F64;
    case FSDP_C64: return FSDP_F32;
    case FSDP_COMPLEX32: return FSDP_F16;
    case FSDP_BCOMPLEX32: return FSDP_BF16;
    default: *per_element_out = 1; return dtype;
    }
}

static bool is_signed_integer(fsdp_dtype dtype)
{
    return dtype == FSDP_I64 || dtype == FSDP_I32 || dtype == FSDP_I16 || dtype == FSDP_I8;
}

static uint64_t read_bits(const uint8_t *from, size_t size)
{
    uint64_t bits = 0;
    memcpy(&bits, from, size);
    return bits;
}

static int64_t read_integer(const uint8_t *from, size_t size)
{
    int unused = 64 - 8 * (int)size;
    return (int64_t)(read_bits(from, size) << unused) >> unused;
}

/* Floating types go through the kernel; integers and packed types are converted here. */
static void widen(fsdp_dtype dtype, const uint8_t *from, size_t count, double *to)
{
    if (fsdp_dtype_describe(dtype)->is_float) {
        fsdp_kernels_get()->cast(to, FSDP_F64, from, dtype, count, FSDP_OVERFLOW_INF);
        return;
    }
    size_t size = fsdp_dtype_size(dtype);
    bool is_signed = is_signed_integer(dtype);
    for (size_t i = 0; i < count; i++, from += size)
        to[i] = is_signed ? (double)read_integer(from, size) : (double)read_bits(from, size);
}

/* |a - b|; 64-bit integers may be too large for a double, their difference need not be. */
static double distance(fsdp_dtype dtype, const uint8_t *from, const uint8_t *to, double a, double b)
{
    if (dtype == FSDP_I64 || dtype == FSDP_U64) {
        uint64_t x = read_bits(from, 8), y = read_bits(to, 8);
        bool less = dtype == FSDP_I64 ? (int64_t)x < (int64_t)y : x < y;
        return (double)(less ? y - x : x - y);
    }
    if (a == b)
        return 0;
    return isnan(a) || isnan(b) ? INFINITY : fabs(a - b);
}

/* Steps of the type between two codes of a float: codes in order of value are sign and
 * magnitude. */
static uint64_t steps_between(fsdp_dtype dtype, const uint8_t *from, const uint8_t *to)
{
    size_t size = fsdp_dtype_size(dtype);
    uint64_t sign = dtype == FSDP_F8_E8M0FNU ? 0 : UINT64_C(1) << (8 * size - 1);
    uint64_t x = read_bits(from, size), y = read_bits(to, size);
    uint64_t far_x = x & ~sign, far_y = y & ~sign;
    if ((x & sign) != (y & sign))
        return far_x + far_y;
    return far_x > far_y ? far_x - far_y : far_y - far_x;
}

static bool is_close(const fsdp_diff_rule *rule, const uint8_t *from, const uint8_t *to, double a,
                     double b, double apart)
{
    bool same_type = rule->a == rule->b;
    if (isnan(a) || isnan(b))
        return !same_type && isnan(a) && isnan(b);
    if (!same_type && a == b)
        return true;
    if ((rule->atol > 0 || rule->rtol > 0) && apart <= rule->atol + rule->rtol * fabs(b))
        return true;
    return rule->ulp > 0 && same_type && fsdp_dtype_describe(rule->a)->is_float &&
           steps_between(rule->a, from, to) <= (uint64_t)rule->ulp;
}

static double relative(double apart, double a, double b)
{
    double larger = fmax(fabs(a), fabs(b));
    return apart == 0 ? 0 : isfinite(apart) && larger > 0 ? apart / larger : INFINITY;
}

void fsdp_diff_merge(fsdp_diff_found *into, const fsdp_diff_found *found)
{
    if (found->differing == 0)
        return;
    bool worse = into->differing == 0 || found->max_abs > into->max_abs ||
                 (found->max_abs == into->max_abs && found->at < into->at);
    int64_t differing = into->differing + found->differing;
    double max_rel = fmax(into->max_rel, found->max_rel);
    if (worse)
        *into = *found;
    into->differing = differing;
    into->max_rel = max_rel;
}

/* The rule of comparison: `rule` is of the components; complex elements have two. */
typedef struct component_rule {
    fsdp_diff_rule rule;
    fsdp_dtype dtype; /* of the elements of a */
    int per_element;
} component_rule;

/* A block in which something differs by its bits. first is a component's number. */
static void compare_block(const component_rule *parts, const uint8_t *a, const uint8_t *b,
                          int64_t first, size_t count, fsdp_diff_found *found)
{
    double wide_a[BLOCK], wide_b[BLOCK];
    const fsdp_diff_rule *rule = &parts->rule;
    size_t size_a = fsdp_dtype_size(rule->a), size_b = fsdp_dtype_size(rule->b);
    int64_t last = -1; /* a complex element counts once */
    widen(rule->a, a, count, wide_a);
    widen(rule->b, b, count, wide_b);
    for (size_t i = 0; i < count; i++, a += size_a, b += size_b) {
        if (rule->a == rule->b && memcmp(a, b, size_a) == 0)
            continue;
        double apart = distance(rule->a, a, b, wide_a[i], wide_b[i]);
        if (is_close(rule, a, b, wide_a[i], wide_b[i], apart))
            continue;
        fsdp_diff_found one = {.differing = 1,
                               .at = (first + (int64_t)i) / parts->per_element,
                               .max_abs = apart,
                               .max_rel = relative(apart, wide_a[i], wide_b[i])};
        memcpy(one.from, a, size_a);
        memcpy(one.to, b, size_b);
        fsdp_diff_merge(found, &one);
        found->differing -= one.at == last;
        last = one.at;
    }
}

/* Blocks of one type. Without tolerances a block differs if its bits do, whatever its numbers. */
static void compare_blocks(const component_rule *parts, const uint8_t *a, const uint8_t *b,
                           int64_t first, int64_t count, fsdp_diff_found *found)
{
    float from[FSDP_QUANT_VALUES], to[FSDP_QUANT_VALUES];
    size_t size = fsdp_dtype_size(parts->dtype), values = (size_t)parts->per_element;
    const fsdp_diff_rule *rule = &parts->rule;
    bool is_exact = rule->atol <= 0 && rule->rtol <= 0 && rule->ulp <= 0;
    for (int64_t i = 0; i < count; i++, a += size, b += size) {
        if (memcmp(a, b, size) == 0)
            continue;
        fsdp_diff_found one = {.differing = 0};
        fsdp_blocks_to_f32(parts->dtype, a, 1, from);
        fsdp_blocks_to_f32(parts->dtype, b, 1, to);
        compare_block(parts, (const uint8_t *)from, (const uint8_t *)to,
                      (first + i) * (int64_t)values, values, &one);
        if (one.differing == 0 && is_exact)
            one = (fsdp_diff_found){.differing = 1, .at = first + i};
        fsdp_diff_merge(found, &one);
    }
}

void fsdp_diff_data(const fsdp_diff_rule *rule, const void *a, const void *b, int64_t first,
                    int64_t count, fsdp_diff_found *found)
{
    const uint8_t *from = a, *to = b;
    component_rule parts = {.rule = *rule, .dtype = rule->a};
    parts.rule.a = component_of(rule->a, &parts.per_element);
    parts.rule.b = component_of(rule->b, &parts.per_element);
    if (rule->a == rule->b && parts.per_element > 2) {
        compare_blocks(&parts, a, b, first, count, found);
        return;
    }
    bool same_type = parts.rule.a == parts.rule.b;
    size_t size_a = fsdp_dtype_size(parts.rule.a), size_b = fsdp_dtype_size(parts.rule.b);
    int64_t total = count * parts.per_element;
    if (same_type && memcmp(a, b, (size_t)total * size_a) == 0)
        return;
    for (int64_t done = 0; done < total; done += BLOCK) {
        size_t n = total - done < BLOCK ? (size_t)(total - done) : BLOCK;
        if (!same_type || memcmp(from, to, n * size_a) != 0)
            compare_block(&parts, from, to, first * parts.per_element + done, n, found);
        from += n * size_a;
        to += n * size_b;
    }
}

/* Digits that tell any two numbers of a type apart. */
static int digits_of(fsdp_dtype dtype)
{
    switch (dtype) {
    case FSDP_F64: return 17;
    case FSDP_F32: return 9;
    case FSDP_F16: return 5;
    case FSDP_BF16: return 4;
    default: return 3;
    }
}

/* The fewest digits that come back as the same number. */
static void spell_float(fsdp_dtype dtype, const uint8_t bytes[8], char out[FSDP_DIFF_ELEMENT])
{
    double value, back;
    uint8_t code[8];
    widen(dtype, bytes, 1, &value);
    for (int digits = 1; digits <= digits_of(dtype); digits++) {
        snprintf(out, FSDP_DIFF_ELEMENT, "%.*g", digits, value);
        back = strtod(out, NULL);
        fsdp_kernels_get()->cast(code, dtype, &back, FSDP_F64, 1, FSDP_OVERFLOW_INF);
        if (memcmp(code, bytes, fsdp_dtype_size(dtype)) == 0)
            break;
    }
    if (strspn(out, "-0123456789") == strlen(out))
        strcat(out, ".0");
}

void fsdp_diff_spell(fsdp_dtype dtype, const uint8_t bytes[8], char out[FSDP_DIFF_ELEMENT])
{
    int per_element;
    fsdp_dtype part = component_of(dtype, &per_element);
    size_t size = fsdp_dtype_size(part);
    if (fsdp_dtype_describe(part)->is_float)
        spell_float(part, bytes, out);
    else if (is_signed_integer(part))
        snprintf(out, FSDP_DIFF_ELEMENT, "%" PRId64, read_integer(bytes, size));
    else
        snprintf(out, FSDP_DIFF_ELEMENT, "%" PRIu64, read_bits(bytes, size));
}

int fsdp_diff_bits(const fsdp_diff_rule *rule, const fsdp_diff_found *found)
{
    const fsdp_dtype_info *info = fsdp_dtype_describe(rule->a);
    if (rule->a != rule->b || (info && info->values > 1))
        return 0;
    return __builtin_popcountll(read_bits(found->from, 8) ^ read_bits(found->to, 8));
}

/* === texts next to the tensors ================================================================= */

/*
 * Comparing the metadata of two checkpoints: the texts that safetensors have next to their tensors. Each is
 * an entry of its own, a value whose name is that of its key below "__metadata__".
 */

/* Files without a format are those of PyTorch: each writer of that names it, or not. */
static bool is_usual(const fsdp_text_pair *pair)
{
    return fsdp_bytes_are(pair->key, pair->key_size, "format") &&
           fsdp_bytes_are(pair->text, pair->text_size, "pt");
}

static fsdp_status add_entry(fsdp_sd *sd, const fsdp_text_pair *pair, fsdp_error *err)
{
    fsdp_text name = {0};
    fsdp_value value = {0};
    fsdp_text_addf(&name, "__metadata__.");
    fsdp_text_add(&name, pair->key, pair->key_size);
    fsdp_status st = name.failed ? fsdp_fail_memory(err, "metadata")
                                 : fsdp_value_set_bytes(&value, FSDP_VALUE_STRING, pair->text,
                                                        pair->text_size, err);
    if (st == FSDP_OK)
        st = fsdp_sd_add_value(sd, name.data, name.size, &value, err);
    fsdp_value_release(&value);
    fsdp_text_release(&name);
    return st;
}

/* Lists the metadata of the checkpoint as values, in checkpoint->metadata. */
static fsdp_status diff_metadata(fsdp_checkpoint *checkpoint, fsdp_error *err)
{
    fsdp_text_pairs pairs = {0};
    const char *text = checkpoint->manifest.metadata;
    if (checkpoint->metadata)
        return FSDP_OK;
    FSDP_TRY(fsdp_sd_create(&checkpoint->metadata, err));
    fsdp_status st = text ? fsdp_text_pairs_parse(&pairs, text, checkpoint->path, err) : FSDP_OK;
    for (size_t i = 0; i < pairs.count && st == FSDP_OK; i++)
        if (!is_usual(&pairs.items[i]))
            st = add_entry(checkpoint->metadata, &pairs.items[i], err);
    fsdp_text_pairs_release(&pairs);
    if (st != FSDP_OK) { /* the next call does not take a part for all */
        fsdp_sd_free(checkpoint->metadata);
        checkpoint->metadata = NULL;
    }
    return st;
}

/* === checkpoints ============================================================================== */

#define SLAB_LEAST ((int64_t)1 << 20)
#define SLAB_MOST ((int64_t)64 << 20)

typedef struct diff_pair {
    const fsdp_entry *a, *b;
    const char *why, *nesting[2];
    size_t tensor_a, tensor_b; /* entry numbers of the tensors to read */
    fsdp_diff_found found;
} diff_pair;

typedef struct diff_task {
    size_t pair;
    int64_t first; /* element of the slab */
} diff_task;

typedef struct diff_state {
    fsdp_checkpoint *a, *b;
    const fsdp_sd *sd_a, *sd_b;
    fsdp_diff_opts opts;
    fsdp_filter *filter;
    fsdp_rename **renames;
    bool *paired; /* per entry of b */
    diff_pair *pairs;
    size_t pair_count;
    diff_task *tasks;
    size_t task_count, task_room;
    int threads;
    int64_t slab_bytes;
    atomic_llong next_task;
    atomic_flag merging;
    fsdp_meter meter;
    fsdp_diff_summary summary;
} diff_state;

/* --- matching names --------------------------------------------------------------------------- */

static size_t tensor_number(const fsdp_sd *sd, size_t number)
{
    const fsdp_entry *entry = fsdp_sd_at(sd, number);
    return entry->kind == FSDP_ENTRY_ALIAS ? entry->target : number;
}

static int64_t slab_elements(const diff_state *state, const diff_pair *pair)
{
    size_t a = fsdp_dtype_size(fsdp_sd_at(state->sd_a, pair->tensor_a)->dtype);
    size_t b = fsdp_dtype_size(fsdp_sd_at(state->sd_b, pair->tensor_b)->dtype);
    return state->slab_bytes / (int64_t)(a > b ? a : b);
}

/* Why two entries differ before any data is looked at; NULL when they do not. */
static const char *compare_heads(const diff_state *state, const diff_pair *pair)
{
    bool value_a = pair->a->kind == FSDP_ENTRY_VALUE, value_b = pair->b->kind == FSDP_ENTRY_VALUE;
    if (value_a != value_b)
        return "kind";
    if (value_a) {
        bool equal = state->opts.keys_only || fsdp_value_equal(&pair->a->value, &pair->b->value);
        return equal ? NULL : "value";
    }
    const fsdp_entry *a = fsdp_sd_at(state->sd_a, pair->tensor_a);
    const fsdp_entry *b = fsdp_sd_at(state->sd_b, pair->tensor_b);
    bool both_float =
        fsdp_dtype_describe(a->dtype)->is_float && fsdp_dtype_describe(b->dtype)->is_float;
    if (a->dtype != b->dtype && (state->opts.keys_only || !both_float))
        return "dtype";
    if (a->ndim != b->ndim || memcmp(a->shape, b->shape, (size_t)a->ndim * sizeof *a->shape) != 0)
        return "shape";
    return NULL;
}

/* True for formats whose paths tell tuples from lists. */
static bool keeps_tuples(const fsdp_checkpoint *checkpoint)
{
    return fsdp_format_from(checkpoint->info.format)->caps.tuples;
}

/* Compares the containers of an entry: a tuple next to a list, an object next to a dict that holds it. */
static bool is_nested_alike(const diff_state *state, const diff_pair *pair,
                            const char *nesting_out[2])
{
    const fsdp_entry *a = pair->a, *b = pair->b;
    bool a_whole = fsdp_path_is_whole(a->path, a->path_count);
    bool b_whole = fsdp_path_is_whole(b->path, b->path_count);
    if (!keeps_tuples(state->a) || !keeps_tuples(state->b) || a->name_size != b->name_size)
        return true;
    if (a_whole != b_whole) {
        nesting_out[0] = a_whole ? "whole" : "in a dict";
        nesting_out[1] = b_whole ? "whole" : "in a dict";
        return false;
    }
    for (size_t i = 0; a->path && b->path && i < a->path_count && a->path_count == b->path_count;
         i++) {
        bool a_tuple = fsdp_path_in_tuple(a->path[i]), b_tuple = fsdp_path_in_tuple(b->path[i]);
        if (a->path[i] >= 0 || b->path[i] >= 0 || a_tuple == b_tuple)
            continue;
        nesting_out[0] = a_tuple ? "in a tuple" : "in a list";
        nesting_out[1] = b_tuple ? "in a tuple" : "in a list";
        return false;
    }
    return true;
}

/* True for aliases of the same name on both sides: their targets are compared instead. */
static bool is_shared_alias(const diff_state *state, const diff_pair *pair)
{
    if (pair->a->kind != FSDP_ENTRY_ALIAS || pair->b->kind != FSDP_ENTRY_ALIAS)
        return false;
    const fsdp_entry *a = fsdp_sd_at(state->sd_a, pair->tensor_a);
    const fsdp_entry *b = fsdp_sd_at(state->sd_b, pair->tensor_b);
    return a->name_size == b->name_size && memcmp(a->name, b->name, a->name_size) == 0 &&
           fsdp_filter_selects(state->filter, a->name, a->name_size);
}

static fsdp_status add_tasks(diff_state *state, size_t number, fsdp_error *err)
{
    const diff_pair *pair = &state->pairs[number];
    const fsdp_entry *tensor = fsdp_sd_at(state->sd_a, pair->tensor_a);
    int64_t most = slab_elements(state, pair);
    fsdp_slabs slabs = {0};
    fsdp_box slab;
    for (int64_t first = 0; fsdp_slabs_next(&slabs, tensor->ndim, tensor->shape, most, &slab);
         first = slabs.next) {
        if (!fsdp_grow(&state->tasks, &state->task_room, state->task_count + 1,
                       sizeof *state->tasks))
            return fsdp_fail_memory(err, "a list of slabs");
        state->tasks[state->task_count++] = (diff_task){number, first};
    }
    state->meter.total += fsdp_entry_bytes(tensor);
    return FSDP_OK;
}

/* The entry of b that an entry of a is compared with, -1 for none. */
static fsdp_status find_partner(diff_state *state, const fsdp_entry *a, int64_t *found_out,
                                fsdp_error *err)
{
    fsdp_text name = {0};
    fsdp_status st = FSDP_OK;
    fsdp_text_add(&name, a->name, a->name_size);
    for (size_t i = 0; i < state->opts.rename_count && st == FSDP_OK; i++)
        st = fsdp_rename_apply(state->renames[i], &name, err);
    if (st == FSDP_OK && name.failed)
        st = fsdp_fail_memory(err, "a name");
    if (st == FSDP_OK)
        *found_out = fsdp_sd_find(state->sd_b, name.size ? name.data : "", name.size);
    fsdp_text_release(&name);
    if (st != FSDP_OK || *found_out < 0)
        return st;
    if (state->paired[*found_out]) {
        char shown[160];
        return fsdp_fail(err, FSDP_ERR_USAGE, "two names of '%s' are mapped to '%s'",
                         state->a->path,
                         fsdp_printable(fsdp_sd_at(state->sd_b, (size_t)*found_out)->name,
                                        fsdp_sd_at(state->sd_b, (size_t)*found_out)->name_size,
                                        shown, sizeof shown));
    }
    state->paired[*found_out] = true;
    return FSDP_OK;
}

static fsdp_status pair_entry(diff_state *state, size_t index, fsdp_error *err)
{
    const fsdp_entry *a = fsdp_sd_at(state->sd_a, index);
    if (!fsdp_filter_selects(state->filter, a->name, a->name_size))
        return FSDP_OK;
    size_t number = state->pair_count++;
    diff_pair *pair = &state->pairs[number];
    int64_t found = -1;
    *pair = (diff_pair){.a = a};
    FSDP_TRY(find_partner(state, a, &found, err));
    if (found < 0)
        return FSDP_OK;
    pair->b = fsdp_sd_at(state->sd_b, (size_t)found);
    pair->tensor_a = tensor_number(state->sd_a, index);
    pair->tensor_b = tensor_number(state->sd_b, (size_t)found);
    pair->why = compare_heads(state, pair);
    if (!pair->why && !is_nested_alike(state, pair, pair->nesting))
        pair->why = "nesting";
    bool has_data = a->kind != FSDP_ENTRY_VALUE && !pair->why && !state->opts.keys_only;
    return has_data && !is_shared_alias(state, pair) ? add_tasks(state, number, err) : FSDP_OK;
}

static fsdp_status pair_all(diff_state *state, fsdp_error *err)
{
    size_t count = fsdp_sd_count(state->sd_a);
    FSDP_TRY(fsdp_expressions_check(state->opts.renames, state->opts.rename_count,
                                    "--map and --rename", err));
    state->pairs = fsdp_alloc(count, sizeof *state->pairs);
    state->paired = fsdp_alloc(fsdp_sd_count(state->sd_b), sizeof *state->paired);
    state->renames = fsdp_alloc(state->opts.rename_count, sizeof(fsdp_rename *));
    if (state->renames)
        for (size_t i = 0; i < state->opts.rename_count; i++)
            FSDP_TRY(fsdp_rename_create(state->opts.renames[i], &state->renames[i], err));
    if (!state->pairs || !state->paired || !state->renames)
        return fsdp_fail_memory(err, "a list of names");
    for (size_t i = 0; i < count; i++)
        FSDP_TRY(pair_entry(state, i, err));
    return FSDP_OK;
}

/* --- comparing data --------------------------------------------------------------------------- */

typedef struct diff_worker {
    diff_state *state;
    char *data_a, *data_b;
    fsdp_reader reader_a, reader_b;
} diff_worker;

static fsdp_status run_task(diff_worker *worker, const diff_task *task, fsdp_error *err)
{
    diff_state *state = worker->state;
    diff_pair *pair = &state->pairs[task->pair];
    const fsdp_entry *a = fsdp_sd_at(state->sd_a, pair->tensor_a);
    const fsdp_entry *b = fsdp_sd_at(state->sd_b, pair->tensor_b);
    fsdp_slabs slabs = {.next = task->first};
    fsdp_diff_rule rule = {a->dtype, b->dtype, state->opts.atol, state->opts.rtol, state->opts.ulp};
    fsdp_diff_found found = {0};
    fsdp_read_target target_a = {.dtype = a->dtype, .data = worker->data_a};
    fsdp_slabs_next(&slabs, a->ndim, a->shape, slab_elements(state, pair), &target_a.box);
    fsdp_read_target target_b = {.box = target_a.box, .dtype = b->dtype, .data = worker->data_b};
    fsdp_read_request request_a = {pair->tensor_a, &target_a, 1, &worker->reader_a, NULL};
    fsdp_read_request request_b = {pair->tensor_b, &target_b, 1, &worker->reader_b, NULL};
    FSDP_TRY(fsdp_checkpoint_get(state->a, &request_a, err));
    FSDP_TRY(fsdp_checkpoint_get(state->b, &request_b, err));
    int64_t count = slabs.next - task->first;
    fsdp_diff_data(&rule, target_a.data, target_b.data, task->first, count, &found);
    while (atomic_flag_test_and_set(&state->merging))
        continue;
    fsdp_diff_merge(&pair->found, &found);
    atomic_flag_clear(&state->merging);
    return fsdp_meter_add(&state->meter, count * (int64_t)fsdp_dtype_size(a->dtype), a->name,
                          a->name_size, err);
}

static fsdp_status run_tasks(diff_worker *worker, fsdp_error *err)
{
    diff_state *state = worker->state;
    worker->data_a = fsdp_alloc_pages((size_t)state->slab_bytes);
    worker->data_b = fsdp_alloc_pages((size_t)state->slab_bytes);
    if (!worker->data_a || !worker->data_b)
        return fsdp_fail_memory(err, "two slabs of a tensor");
    for (;;) {
        long long number = atomic_fetch_add(&state->next_task, 1);
        if (number >= (long long)state->task_count)
            return FSDP_OK;
        FSDP_TRY(run_task(worker, &state->tasks[number], err));
    }
}

static fsdp_status work(void *context, size_t index, fsdp_error *err)
{
    diff_state *state = context;
    diff_worker worker = {.state = state};
    (void)index;
    fsdp_status st = run_tasks(&worker, err);
    if (st != FSDP_OK)
        atomic_store(&state->next_task, (long long)state->task_count);
    fsdp_reader_release(&worker.reader_a);
    fsdp_reader_release(&worker.reader_b);
    fsdp_free(worker.data_a);
    fsdp_free(worker.data_b);
    return st;
}

/* --- reporting -------------------------------------------------------------------------------- */

static void fill_data(const diff_state *state, const diff_pair *pair, fsdp_diff_item *item)
{
    const fsdp_entry *a = fsdp_sd_at(state->sd_a, pair->tensor_a);
    const fsdp_entry *b = fsdp_sd_at(state->sd_b, pair->tensor_b);
    const fsdp_diff_found *found = &pair->found;
    fsdp_diff_rule rule = {.a = a->dtype, .b = b->dtype};
    int64_t left = found->at;
    for (int d = a->ndim - 1; d >= 0; d--) {
        item->at[d] = left % a->shape[d];
        left /= a->shape[d];
    }
    fsdp_box whole = fsdp_box_whole(a->ndim, a->shape);
    item->elements = fsdp_box_count(&whole);
    item->differing = found->differing;
    item->max_abs = found->max_abs;
    item->max_rel = found->max_rel;
    item->bits = fsdp_diff_bits(&rule, found);
    fsdp_diff_spell(a->dtype, found->from, item->from);
    fsdp_diff_spell(b->dtype, found->to, item->to);
}

static void visit(diff_state *state, const fsdp_diff_item *item)
{
    int64_t *counts[] = {&state->summary.equal, &state->summary.differ, &state->summary.only_a,
                         &state->summary.only_b};
    ++*counts[item->state];
    if (state->opts.visit)
        state->opts.visit(state->opts.visit_context, item);
}

static void visit_pair(diff_state *state, const diff_pair *pair)
{
    fsdp_diff_item item = {.state = FSDP_DIFF_ONLY_A,
                           .a = pair->a,
                           .b = pair->b,
                           .why = pair->why,
                           .nesting = {pair->nesting[0], pair->nesting[1]}};
    if (pair->b && !pair->why && pair->found.differing == 0) {
        item.state = FSDP_DIFF_EQUAL;
    } else if (pair->b) {
        item.state = FSDP_DIFF_DIFFERS;
        if (!pair->why)
            fill_data(state, pair, &item);
    }
    visit(state, &item);
}

/* Texts next to the tensors, each as a value. */
static void visit_metadata(diff_state *state)
{
    const fsdp_sd *in_a = state->a->metadata, *in_b = state->b->metadata;
    for (size_t i = 0; i < fsdp_sd_count(in_a); i++) {
        const fsdp_entry *a = fsdp_sd_at(in_a, i);
        int64_t found = fsdp_sd_find(in_b, a->name, a->name_size);
        fsdp_diff_item item = {.state = FSDP_DIFF_ONLY_A, .a = a};
        if (!fsdp_filter_selects(state->filter, a->name, a->name_size))
            continue;
        item.b = found < 0 ? NULL : fsdp_sd_at(in_b, (size_t)found);
        if (item.b)
            item.why = state->opts.keys_only || fsdp_value_equal(&a->value, &item.b->value)
                           ? NULL
                           : "value";
        if (item.b)
            item.state = item.why ? FSDP_DIFF_DIFFERS : FSDP_DIFF_EQUAL;
        visit(state, &item);
    }
    for (size_t i = 0; i < fsdp_sd_count(in_b); i++) {
        const fsdp_entry *b = fsdp_sd_at(in_b, i);
        if (fsdp_filter_selects(state->filter, b->name, b->name_size) &&
            fsdp_sd_find(in_a, b->name, b->name_size) < 0)
            visit(state, &(fsdp_diff_item){.state = FSDP_DIFF_ONLY_B, .b = b});
    }
}

static void visit_all(diff_state *state)
{
    for (size_t i = 0; i < state->pair_count; i++)
        visit_pair(state, &state->pairs[i]);
    for (size_t i = 0; i < fsdp_sd_count(state->sd_b); i++) {
        const fsdp_entry *b = fsdp_sd_at(state->sd_b, i);
        if (fsdp_filter_selects(state->filter, b->name, b->name_size) && !state->paired[i])
            visit(state, &(fsdp_diff_item){.state = FSDP_DIFF_ONLY_B, .b = b});
    }
    visit_metadata(state);
    state->summary.bytes = state->meter.total;
}

/* --- the whole -------------------------------------------------------------------------------- */

/* Derived tensors have buffers in each worker, for at most half of the memory. A quarter of the rest is
 * left to readers and decoders; each worker has two slabs. */
static void share_memory(diff_state *state)
{
    int64_t memory = state->opts.memory > 0 ? state->opts.memory : FSDP_MEMORY_DEFAULT;
    int64_t derived =
        fsdp_checkpoint_reading(state->a).per_thread + fsdp_checkpoint_reading(state->b).per_thread;
    int threads = state->opts.threads > 0 ? state->opts.threads : fsdp_pool_cores();
    if (derived > 0 && threads > memory / 2 / derived)
        threads = memory / 2 / derived > 1 ? (int)(memory / 2 / derived) : 1;
    memory -= derived * threads;
    int64_t slabs = memory > 0 ? memory / 4 * 3 : 0;
    if (threads > slabs / (2 * SLAB_LEAST))
        threads = (int)(slabs / (2 * SLAB_LEAST));
    state->threads = threads > 0 ? threads : 1;
    state->slab_bytes = slabs / (2 * state->threads);
    if (state->slab_bytes > SLAB_MOST)
        state->slab_bytes = SLAB_MOST;
    if (state->slab_bytes < SLAB_LEAST)
        state->slab_bytes = SLAB_LEAST;
}

/* A comparison of nothing must not report that the checkpoints are equal. */
static fsdp_status require_selection(const diff_state *state, fsdp_error *err)
{
    const fsdp_diff_summary *summary = &state->summary;
    bool any_name = fsdp_sd_count(state->sd_a) + fsdp_sd_count(state->sd_b) > 0;
    if (summary->equal + summary->differ + summary->only_a + summary->only_b > 0 || !any_name)
        return FSDP_OK;
    return fsdp_fail(err, FSDP_DIFFERS, "no name matches in '%s' or in '%s'", state->a->path,
                     state->b->path);
}

/* Objects of classes are compared as their writers store them, not by the names of their
 * classes. */
static fsdp_status carry_values(diff_state *state, fsdp_error *err)
{
    if (state->opts.keys_only)
        return FSDP_OK;
    FSDP_TRY(fsdp_checkpoint_carry_values(state->a, true, err));
    return fsdp_checkpoint_carry_values(state->b, true, err);
}

static fsdp_status compare(diff_state *state, fsdp_error *err)
{
    FSDP_TRY(fsdp_check_budget(state->opts.threads, state->opts.memory, err));
    FSDP_TRY(fsdp_filter_create(state->opts.include, state->opts.exclude, &state->filter, err));
    share_memory(state);
    FSDP_TRY(carry_values(state, err));
    FSDP_TRY(diff_metadata(state->a, err));
    FSDP_TRY(diff_metadata(state->b, err));
    FSDP_TRY(pair_all(state, err));
    size_t workers =
        (size_t)state->threads < state->task_count ? (size_t)state->threads : state->task_count;
    FSDP_TRY(fsdp_parallel(state->threads, workers, work, state, err));
    visit_all(state);
    FSDP_TRY(require_selection(state, err));
    const fsdp_diff_summary *summary = &state->summary;
    return summary->differ + summary->only_a + summary->only_b > 0 ? FSDP_DIFFERS : FSDP_OK;
}

fsdp_status fsdp_checkpoint_diff(fsdp_checkpoint *a, fsdp_checkpoint *b, const fsdp_diff_opts *opts,
                                 fsdp_diff_summary *summary_out, fsdp_error *err)
{
    FSDP_NEED(err, a, b);
    diff_state state = {
        .a = a, .b = b, .sd_a = fsdp_checkpoint_sd(a), .sd_b = fsdp_checkpoint_sd(b)};
    if (opts)
        state.opts = *opts;
    atomic_init(&state.next_task, 0);
    atomic_flag_clear(&state.merging);
    fsdp_meter_init(&state.meter, &state.opts.watch, 0);
    fsdp_status st = compare(&state, err);
    if (summary_out)
        *summary_out = state.summary;
    fsdp_filter_free(state.filter);
    for (size_t i = 0; state.renames && i < state.opts.rename_count; i++)
        fsdp_rename_free(state.renames[i]);
    fsdp_free(state.renames);
    fsdp_free(state.paired);
    fsdp_free(state.pairs);
    fsdp_free(state.tasks);
    return st;
}
