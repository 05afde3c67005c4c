/*
 * Comparing two checkpoints: names are paired, the paired tensors cut into row-major slabs, and
 * workers read each slab from both sides (checked by hash, as every read is) and compare it.
 */
#include <fsdp/diff.h>

#include "base/core/pool.h"
#include "base/data/name_path.h"
#include "statedict/checkpoint/checkpoint_internal.h"
#include "statedict/diff/diff_internal.h"
#include "statedict/select/expression.h"
#include "statedict/select/rename.h"
#include <fsdp/filter.h>

#include <string.h>

#include "base/core/given.h"

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

/* Compares the containers of an entry: a tuple beside a list, an object beside a dict that holds it. */
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

/* Texts beside the tensors, each as a value. */
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
    return fsdp_fail(err, FSDP_DIFFERS, "no name matches, neither in '%s' nor in '%s'",
                     state->a->path, state->b->path);
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
    FSDP_TRY(fsdp_diff_metadata(state->a, err));
    FSDP_TRY(fsdp_diff_metadata(state->b, err));
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
