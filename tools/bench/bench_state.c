/* State dicts of one rank: a model's weights, their Adam moments, and the values next to them. */
#include "tools/bench/bench.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

typedef struct builder {
    const bench_model *model;
    const bench_state_opts *opts;
    fsdp_sd *sd;
    fsdp_mesh *mesh;
    fsdp_text name; /* of the entry that is being added */
} builder;

FSDP_PRINTF(2, 3)
static void set_name(builder *b, const char *format, ...)
{
    va_list args;
    char name[256];
    va_start(args, format);
    int size = vsnprintf(name, sizeof name, format, args);
    va_end(args);
    b->name.size = 0;
    fsdp_text_add(&b->name, name, (size_t)size);
}

/* --- tensors ---------------------------------------------------------------------------------- */

static fsdp_status add_tensor(builder *b, fsdp_dtype dtype, int ndim, const int64_t *shape,
                              fsdp_error *err)
{
    int dim = ndim > b->opts->shard_dim ? b->opts->shard_dim : 0;
    fsdp_placement placement = {.kind = ndim > 0 ? FSDP_SHARD : FSDP_REPLICATE, .dim = dim};
    if (b->name.failed)
        return fsdp_fail(err, FSDP_ERR_LIMIT, "cannot allocate memory for a name");
    return fsdp_sd_add_tensor(
        b->sd, b->name.data, b->name.size,
        &(fsdp_tensor){dtype, ndim, shape, {.mesh = b->mesh, .placement = {placement}}, NULL}, err);
}

static fsdp_status add_weights(builder *b, fsdp_error *err)
{
    for (size_t i = 0; i < b->model->count; i++) {
        const bench_param *param = &b->model->params[i];
        set_name(b, "model.%s", param->name);
        FSDP_TRY(add_tensor(b, param->dtype, param->ndim, param->shape, err));
    }
    if (!b->model->alias)
        return FSDP_OK;
    char target[256];
    int size = snprintf(target, sizeof target, "model.%s", b->model->alias_target);
    set_name(b, "model.%s", b->model->alias);
    return fsdp_sd_add_alias(b->sd, b->name.data, b->name.size, target, (size_t)size, err);
}

static fsdp_status add_moments(builder *b, fsdp_error *err)
{
    for (size_t i = 0; i < b->model->count; i++) {
        const bench_param *param = &b->model->params[i];
        if (param->is_buffer)
            continue;
        set_name(b, "optim.state.%s.exp_avg", param->name);
        FSDP_TRY(add_tensor(b, FSDP_F32, param->ndim, param->shape, err));
        set_name(b, "optim.state.%s.exp_avg_sq", param->name);
        FSDP_TRY(add_tensor(b, FSDP_F32, param->ndim, param->shape, err));
        set_name(b, "optim.state.%s.step", param->name);
        FSDP_TRY(add_tensor(b, FSDP_F32, 0, NULL, err));
    }
    return FSDP_OK;
}

/* --- values ----------------------------------------------------------------------------------- */

/* Takes ownership of the value. */
static fsdp_status add_value(builder *b, fsdp_value value, fsdp_error *err)
{
    fsdp_status st = fsdp_sd_add_value(b->sd, b->name.data, b->name.size, &value, err);
    fsdp_value_release(&value);
    return st;
}

static double learning_rate(int64_t step)
{
    enum { WARM_UP = 2000 };
    return step < WARM_UP ? 3e-4 * (double)step / WARM_UP : 3e-4;
}

static fsdp_status add_group(builder *b, const char *name, fsdp_error *err)
{
    fsdp_value betas = {0};
    set_name(b, "optim.param_groups.%s.lr", name);
    FSDP_TRY(add_value(b, fsdp_value_f64(learning_rate(b->opts->step)), err));
    FSDP_TRY(fsdp_value_set_items(&betas, FSDP_VALUE_LIST, 2, err));
    betas.as.list.items[0] = fsdp_value_f64(0.9);
    betas.as.list.items[1] = fsdp_value_f64(0.95);
    set_name(b, "optim.param_groups.%s.betas", name);
    FSDP_TRY(add_value(b, betas, err));
    set_name(b, "optim.param_groups.%s.eps", name);
    FSDP_TRY(add_value(b, fsdp_value_f64(1e-8), err));
    set_name(b, "optim.param_groups.%s.weight_decay", name);
    return add_value(b, fsdp_value_f64(0.1), err);
}

static fsdp_status add_groups(builder *b, fsdp_error *err)
{
    for (size_t i = 0; i < b->model->count; i++)
        if (!b->model->params[i].is_buffer)
            FSDP_TRY(add_group(b, b->model->params[i].name, err));
    return FSDP_OK;
}

/* A random generator's state, as large as torch's. */
static fsdp_status add_generator(builder *b, fsdp_error *err)
{
    enum { WORDS = 632 };
    uint64_t words[WORDS];
    fsdp_value value = {0};
    for (int i = 0; i < WORDS; i++)
        words[i] = bench_hash(b->opts->seed + (uint64_t)i, FSDP_NAME("rng.cpu"), b->opts->step);
    FSDP_TRY(fsdp_value_set_bytes(&value, FSDP_VALUE_BYTES, words, sizeof words, err));
    set_name(b, "rng.cpu");
    return add_value(b, value, err);
}

/* The value "config", from which bench_check.c makes the expected state. */
static fsdp_status fill_config(const bench_model *model, fsdp_value *config, fsdp_error *err)
{
    FSDP_TRY(fsdp_value_set_items(config, FSDP_VALUE_DICT, 4, err));
    fsdp_value *items = config->as.list.items;
    FSDP_TRY(fsdp_value_set_bytes(&items[0], FSDP_VALUE_STRING, "model", 5, err));
    FSDP_TRY(
        fsdp_value_set_bytes(&items[1], FSDP_VALUE_STRING, model->name, strlen(model->name), err));
    FSDP_TRY(fsdp_value_set_bytes(&items[2], FSDP_VALUE_STRING, "scale", 5, err));
    items[3] = fsdp_value_f64(model->scale);
    return FSDP_OK;
}

static fsdp_status add_config(builder *b, fsdp_error *err)
{
    fsdp_value config = {0};
    fsdp_status st = fill_config(b->model, &config, err);
    set_name(b, "config");
    if (st == FSDP_OK)
        return add_value(b, config, err);
    fsdp_value_release(&config);
    return st;
}

static fsdp_status add_values(builder *b, fsdp_error *err)
{
    set_name(b, "step");
    FSDP_TRY(add_value(b, fsdp_value_i64(b->opts->step), err));
    FSDP_TRY(add_generator(b, err));
    if (b->opts->no_groups)
        return FSDP_OK;
    FSDP_TRY(add_config(b, err));
    return add_groups(b, err);
}

/* --- the state -------------------------------------------------------------------------------- */

static fsdp_status build(builder *b, fsdp_error *err)
{
    const char *const dims[] = {"dp"};
    FSDP_TRY(fsdp_sd_create(&b->sd, err));
    FSDP_TRY(fsdp_mesh_create(1, (int64_t[]){b->opts->world}, dims, NULL, &b->mesh, err));
    FSDP_TRY(add_weights(b, err));
    if (b->opts->weights_only)
        return FSDP_OK;
    FSDP_TRY(add_moments(b, err));
    return add_values(b, err);
}

fsdp_status bench_state_create(const bench_model *model, const bench_state_opts *opts,
                               fsdp_sd **sd_out, fsdp_error *err)
{
    builder b = {.model = model, .opts = opts};
    fsdp_status st = build(&b, err);
    fsdp_mesh_free(b.mesh);
    fsdp_text_release(&b.name);
    if (st != FSDP_OK)
        fsdp_sd_free(b.sd);
    else
        *sd_out = b.sd;
    return st;
}

/* --- the elements of one rank ----------------------------------------------------------------- */

/* Elements that lie one after the other in the box and in the tensor. */
static int64_t run_length(const fsdp_box *box, const int64_t *shape)
{
    int64_t count = 1;
    for (int d = box->ndim - 1; d >= 0; d--) {
        count *= box->len[d];
        if (box->len[d] != shape[d])
            break;
    }
    return count;
}

typedef struct box_walk {
    const fsdp_entry *entry;
    bench_stream stream;
    bool compare;
    char *data;
} box_walk;

static fsdp_status visit_run(box_walk *walk, int64_t first, int64_t count, fsdp_error *err)
{
    char name[200];
    int64_t bad = -1;
    if (walk->compare)
        bad = bench_stream_compare(&walk->stream, first, count, walk->data);
    else
        bench_stream_fill(&walk->stream, first, count, walk->data);
    walk->data += (size_t)count * fsdp_dtype_size(walk->entry->dtype);
    if (bad < 0)
        return FSDP_OK;
    fsdp_printable(walk->entry->name, walk->entry->name_size, name, sizeof name);
    return fsdp_fail(err, FSDP_DIFFERS, "'%s': element %" PRId64 " is wrong", name, bad);
}

static fsdp_status visit_box(box_walk *walk, const fsdp_box *box, fsdp_error *err)
{
    const fsdp_entry *entry = walk->entry;
    int64_t run = run_length(box, entry->shape), total = fsdp_box_count(box);
    for (int64_t done = 0; done < total; done += run) {
        int64_t left = done, lo[FSDP_MAX_DIMS];
        for (int d = box->ndim - 1; d >= 0; d--) {
            lo[d] = box->lo[d] + left % box->len[d];
            left /= box->len[d];
        }
        FSDP_TRY(visit_run(walk, fsdp_box_position(entry->ndim, entry->shape, lo), run, err));
    }
    return FSDP_OK;
}

static fsdp_status visit_state(const fsdp_sd *sd, int rank, const bench_state_opts *opts,
                               bool compare, fsdp_error *err)
{
    for (size_t i = 0; i < fsdp_sd_count(sd); i++) {
        const fsdp_entry *entry = fsdp_sd_at(sd, i);
        if (entry->kind != FSDP_ENTRY_TENSOR)
            continue;
        FSDP_TRY(cli_check_stop(err));
        box_walk walk = {.entry = entry,
                         .stream = bench_stream_of(entry, opts->seed, opts->step),
                         .compare = compare,
                         .data = entry->data};
        size_t boxes = fsdp_layout_box_count(&entry->layout, entry->ndim, entry->shape, rank);
        for (size_t part = 0; part < boxes; part++) {
            fsdp_box box;
            fsdp_layout_box_at(&entry->layout, entry->ndim, entry->shape, rank, part, &box);
            FSDP_TRY(visit_box(&walk, &box, err));
        }
    }
    return FSDP_OK;
}

fsdp_status bench_state_fill(const fsdp_sd *sd, int rank, uint64_t seed, int64_t step,
                             fsdp_error *err)
{
    bench_state_opts opts = {.seed = seed, .step = step};
    return visit_state(sd, rank, &opts, false, err);
}

fsdp_status bench_state_compare(const fsdp_sd *sd, int rank, uint64_t seed, int64_t step,
                                fsdp_error *err)
{
    bench_state_opts opts = {.seed = seed, .step = step};
    return visit_state(sd, rank, &opts, true, err);
}
