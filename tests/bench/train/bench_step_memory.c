/*
 * The expected memory of a step, as PyTorch 2.15 accounts for it: a simulation allocates and frees the
 * buffers of a step in the order of its events. bench step prints it next to the measured bytes.
 *
 * A unit has A elements of padded shards, N = W A gathered, and n elements of gradients, without padding.
 */
#include "tests/bench/train/bench_step.h"

#include <stdlib.h>

typedef struct unit_bytes {
    int64_t shard;             /* A, as stored */
    int64_t gathered, slice;   /* N, and what int reshard keeps of it */
    int64_t grads[2], kept[2]; /* n of weight and bias, as computed and as accumulated */
    int64_t input, output;     /* N and A of a reduction */
    bool is_gathered, is_pending, has_slice, has_kept;
} unit_bytes;

typedef struct ledger {
    const step_model *model;
    unit_bytes *units;
    int64_t now[FSDP_MEMORY_CLASSES], *peak;
    int64_t deferred;    /* the flat buffer of the last gather in forward */
    int64_t in_flight;   /* the input of the last reduction */
    int64_t all_reduced; /* what it was reduced in, when gradients are cast after an all-reduce */
    bool casts;          /* gradients, after their reduction */
} ledger;

static void take(ledger *book, fsdp_memory_class class, int64_t bytes)
{
    book->now[class] += bytes;
    if (book->now[class] > book->peak[class])
        book->peak[class] = book->now[class];
}

static void give(ledger *book, fsdp_memory_class class, int64_t bytes)
{
    book->now[class] -= bytes;
}

static void give_once(ledger *book, fsdp_memory_class class, int64_t *bytes)
{
    give(book, class, *bytes);
    *bytes = 0;
}

/* --- sizes ------------------------------------------------------------------------------------ */

static int shards_of(const step_model *model)
{
    return model->data_ranks / model->opts->replicas;
}

static void add_param(ledger *book, unit_bytes *unit, int which, fsdp_param *param)
{
    const step_options *opts = book->model->opts;
    int64_t shards = shards_of(book->model),
            data = (int64_t)fsdp_dtype_size(fsdp_param_describe(param).data_dtype);
    fsdp_dtype reduce = opts->reduce_dtype != FSDP_DTYPE_NONE ? opts->reduce_dtype : FSDP_F32;
    int64_t reduced = (int64_t)fsdp_dtype_size(reduce);
    fsdp_box box;
    fsdp_param_data_box(param, &box);
    int64_t count = fsdp_box_count(&box), rest = box.ndim > 1 ? box.len[1] : 1;
    int64_t padded = (box.len[0] + shards - 1) / shards * rest;
    unit->shard += padded * (int64_t)sizeof(float);
    unit->gathered += padded * shards * data;
    unit->grads[which] = count * data;
    unit->kept[which] = count * reduced;
    unit->input += padded * shards * reduced;
    unit->output += padded * reduced;
    book->casts = reduce != FSDP_F32;
}

/* k > 1: sharded again over k ranks after forward; 1: sharded; 0: kept gathered. */
static int reshard_of(const step_model *model)
{
    int reshard = model->opts->reshard;
    if (reshard == FSDP_RESHARD_AUTO || reshard >= shards_of(model))
        return 1;
    return reshard;
}

static void list_units(ledger *book)
{
    for (int i = 0; i < book->model->opts->layers; i++) {
        unit_bytes *unit = &book->units[i];
        add_param(book, unit, 0, book->model->mlp->layers[i].linear.weight);
        add_param(book, unit, 1, book->model->mlp->layers[i].linear.bias);
        if (reshard_of(book->model) > 1)
            unit->slice = unit->gathered / reshard_of(book->model);
        take(book, FSDP_MEMORY_SHARD, unit->shard);
    }
}

/* --- gathers ---------------------------------------------------------------------------------- */

static void issue_gather(ledger *book, int number)
{
    if (number < 0 || number >= book->model->opts->layers)
        return;
    unit_bytes *unit = &book->units[number];
    if (unit->is_pending || unit->is_gathered)
        return;
    unit->is_pending = true;
    take(book, FSDP_MEMORY_ALL_GATHER, unit->gathered);
}

/* In forward the flat buffer is freed at the next gather. */
static void copy_out(ledger *book, unit_bytes *unit, bool in_forward)
{
    if (!unit->is_pending)
        return;
    if (in_forward)
        give_once(book, FSDP_MEMORY_ALL_GATHER, &book->deferred);
    take(book, FSDP_MEMORY_UNSHARDED, unit->gathered);
    if (unit->has_slice)
        give(book, FSDP_MEMORY_ALL_GATHER, unit->slice);
    if (in_forward)
        book->deferred = unit->gathered;
    else
        give(book, FSDP_MEMORY_ALL_GATHER, unit->gathered);
    unit->has_slice = unit->is_pending = false;
    unit->is_gathered = true;
}

static void reshard(ledger *book, unit_bytes *unit)
{
    if (unit->is_gathered)
        give(book, FSDP_MEMORY_UNSHARDED, unit->gathered);
    unit->is_gathered = false;
}

static void run_forward(ledger *book)
{
    const step_options *opts = book->model->opts;
    int kept_by = reshard_of(book->model);
    for (int i = 0; i < opts->layers; i++) {
        unit_bytes *unit = &book->units[i];
        issue_gather(book, i);
        copy_out(book, unit, true);
        for (int ahead = 1; ahead <= opts->prefetch_forward; ahead++)
            issue_gather(book, i + ahead);
        if (kept_by > 1) {
            take(book, FSDP_MEMORY_ALL_GATHER, unit->slice);
            unit->has_slice = true;
        }
        if (kept_by > 0)
            reshard(book, unit);
    }
    give_once(book, FSDP_MEMORY_ALL_GATHER, &book->deferred);
}

/* --- reductions ------------------------------------------------------------------------------- */

static void take_grads(ledger *book, const unit_bytes *unit)
{
    take(book, FSDP_MEMORY_GRAD, unit->grads[0] + unit->grads[1]);
}

static void give_grads(ledger *book, const unit_bytes *unit)
{
    give(book, FSDP_MEMORY_GRAD, unit->grads[0] + unit->grads[1]);
}

/* The sharded gradient is the reduction's output itself, or a cast one. */
static void reduce(ledger *book, unit_bytes *unit)
{
    give_once(book, FSDP_MEMORY_REDUCE, &book->in_flight);
    take(book, FSDP_MEMORY_REDUCE, unit->input);
    book->in_flight = unit->input;
    if (unit->has_kept)
        give(book, FSDP_MEMORY_GRAD, unit->kept[0] + unit->kept[1]);
    else
        give_grads(book, unit);
    unit->has_kept = false;
    take(book, FSDP_MEMORY_REDUCE, unit->output);
    take(book, FSDP_MEMORY_GRAD, unit->shard);
    if (book->casts && book->model->opts->replicas > 1) {
        give_once(book, FSDP_MEMORY_REDUCE, &book->all_reduced);
        book->all_reduced = unit->output;
    } else {
        give(book, FSDP_MEMORY_REDUCE, unit->output);
    }
}

/* The first gradients are kept as they are, or cast, one after the other; further ones are added. */
static void keep(ledger *book, unit_bytes *unit)
{
    for (int i = 0; i < 2 && !unit->has_kept; i++)
        if (unit->kept[i] != unit->grads[i]) {
            take(book, FSDP_MEMORY_GRAD, unit->kept[i]);
            give(book, FSDP_MEMORY_GRAD, unit->grads[i]);
        }
    if (unit->has_kept)
        give_grads(book, unit);
    unit->has_kept = true;
}

static void run_backward(ledger *book, bool is_last)
{
    const step_options *opts = book->model->opts;
    int depth = opts->prefetch_backward > 0 ? opts->prefetch_backward : 1;
    for (int i = opts->layers - 1; i >= 0; i--) {
        unit_bytes *unit = &book->units[i];
        issue_gather(book, i);
        copy_out(book, unit, false);
        for (int ahead = 1; ahead <= depth; ahead++)
            issue_gather(book, i - ahead);
        take_grads(book, unit);
        if (is_last && unit->has_kept)
            give_grads(book, unit);
        reshard(book, unit);
        if (is_last)
            reduce(book, unit);
        else
            keep(book, unit);
    }
    if (is_last) {
        give_once(book, FSDP_MEMORY_REDUCE, &book->in_flight);
        give_once(book, FSDP_MEMORY_REDUCE, &book->all_reduced);
    }
}

fsdp_status step_memory_expect(const step_model *model, bool trains,
                               int64_t peak_out[FSDP_MEMORY_CLASSES], fsdp_error *err)
{
    const step_options *opts = model->opts;
    ledger book = {.model = model, .peak = peak_out};
    for (int i = 0; i < FSDP_MEMORY_CLASSES; i++)
        peak_out[i] = 0;
    book.units = calloc((size_t)opts->layers, sizeof *book.units);
    if (!book.units)
        return fsdp_fail(err, FSDP_ERR_LIMIT, "out of memory");
    list_units(&book);
    int microbatches = opts->accumulate < 3 ? opts->accumulate : 3; /* more are like the second */
    for (int i = 0; i < microbatches && trains; i++) {
        run_forward(&book);
        run_backward(&book, i == microbatches - 1);
    }
    free(book.units);
    return FSDP_OK;
}
