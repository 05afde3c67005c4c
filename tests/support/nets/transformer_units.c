/* See transformer_units.h. */
#include "tests/support/nets/transformer_units.h"

#include <stdio.h>
#include <string.h>

#include "runtime/transformer/linear_layer.h"
#include "tests/support/nets/tensors.h"
#include "tests/support/nets/toy.h"
#include "tests/support/nets/unit_tuning.h"

#include <fsdp/root_init.h>

/* Layers of the toy: the embedding and the head, which belong to the root, around the blocks. */
enum { BLOCKS = TRANSFORMER_BLOCKS, STEPS = TRANSFORMER_STEPS };
enum { EMBEDDING, FIRST_BLOCK, HEAD = FIRST_BLOCK + BLOCKS, LAYERS };

typedef struct transformer_net {
    toy toy;
    const transformer_mode *mode;
    fsdp_param *own[ROOT_PARAMS], *params[BLOCKS][BLOCK_PARAMS];
    struct microbatch_state *state;
} transformer_net;

/* --- making the units ------------------------------------------------------------------------- */

static fsdp_status declare(transformer_net *net, const char *prefix, const transformer_param *list,
                           int count, fsdp_param **params, fsdp_error *err)
{
    fsdp_dtype dtype = net->mode->dtype != FSDP_DTYPE_NONE ? net->mode->dtype : FSDP_F32;
    for (int i = 0; i < count; i++) {
        char name[64];
        snprintf(name, sizeof name, "%s%s", prefix, list[i].name);
        FSDP_TRY(fsdp_model_add(
            net->toy.model,
            &(fsdp_param_spec){
                .name = name, .dtype = dtype, .ndim = list[i].ndim, .shape = list[i].shape},
            &params[i], err));
    }
    return FSDP_OK;
}

static fsdp_status begin(transformer_net *net, fsdp_world *world, fsdp_error *err)
{
    const transformer_mode *mode = net->mode;
    int64_t size = fsdp_world_size(world), replicas = mode->replicas;
    bool two = replicas > 1;
    FSDP_TRY(toy_begin_in(
        &net->toy, world, 1 + two, (int64_t[]){two ? replicas : size, two ? size / replicas : 1},
        two ? (const char *const[]){"rep", "dp"} : (const char *const[]){"dp"}, err));
    net->toy.runs_root = true;
    net->toy.opts.reshard_after_forward = mode->reshard;
    net->toy.opts.param_dtype = mode->param_dtype;
    net->toy.opts.reduce_dtype = mode->reduce_dtype;
    return FSDP_OK;
}

static fsdp_status make_block(transformer_net *net, int i, fsdp_error *err)
{
    toy *base = &net->toy;
    char prefix[32];
    snprintf(prefix, sizeof prefix, "blocks.%d.", i);
    FSDP_TRY(declare(net, prefix, transformer_block_params, BLOCK_PARAMS, net->params[i], err));
    prefix[strlen(prefix) - 1] = '\0';
    return fsdp_unit_create(base->model, prefix, &base->opts, &base->unit[FIRST_BLOCK + i], err);
}

static fsdp_status make_units(transformer_net *net, fsdp_error *err)
{
    toy *base = &net->toy;
    for (int i = 0; i < BLOCKS; i++)
        FSDP_TRY(make_block(net, i, err));
    fsdp_unit_opts opts = base->opts;
    opts.reshard_after_forward = net->mode->root_reshard;
    FSDP_TRY(fsdp_root_create(base->model, &opts, &base->root, err));
    base->unit[EMBEDDING] = base->unit[HEAD] = fsdp_root_unit(base->root);
    base->layers = LAYERS;
    return FSDP_OK;
}

static fsdp_status set_modes(transformer_net *net, fsdp_error *err)
{
    const transformer_mode *mode = net->mode;
    const unit_tuning tuning = {.prefetch = mode->prefetch,
                                .inputs = mode->inputs,
                                .separate = mode->separate,
                                .from_comm = mode->from_comm};
    FSDP_TRY(tune_unit(fsdp_root_unit(net->toy.root), &tuning, err));
    return tune_row(&net->toy.unit[FIRST_BLOCK], BLOCKS, &tuning, err);
}

static fsdp_status add_optimizer(transformer_net *net, fsdp_error *err)
{
    fsdp_adamw_opts adamw = {.weight_decay = 0.01};
    fsdp_sgd_opts sgd = {0};
    adamw.lr = 0.01;
    sgd.lr = 0.05;
    sgd.momentum = 0.9;
    return net->mode->sgd ? toy_add_sgd(&net->toy, &sgd, err)
                          : toy_add_adamw(&net->toy, &adamw, err);
}

static fsdp_status build(transformer_net *net, fsdp_world *world, fsdp_error *err)
{
    FSDP_TRY(begin(net, world, err));
    FSDP_TRY(declare(net, "", transformer_root_params, ROOT_PARAMS, net->own, err));
    FSDP_TRY(fsdp_model_add_alias(net->toy.model, "head.weight", net->own[ROOT_EMBED], err));
    FSDP_TRY(make_units(net, err));
    FSDP_TRY(set_modes(net, err));
    FSDP_TRY(fsdp_root_init_uniform(net->toy.root, 1, err));
    return add_optimizer(net, err);
}

/* --- a microbatch ----------------------------------------------------------------------------- */

/* Parameters of one unit as f32, and their gradients. */
typedef struct unit_values {
    float room[BLOCK_PARAMS][LARGEST_PARAM], grad_room[BLOCK_PARAMS][LARGEST_PARAM];
    const float *values[BLOCK_PARAMS];
    float *grads[BLOCK_PARAMS];
} unit_values;

static fsdp_status read_values(unit_values *unit, fsdp_param **params, int count, fsdp_error *err)
{
    memset(unit->grad_room, 0, sizeof unit->grad_room);
    for (int i = 0; i < count; i++) {
        unit->values[i] = fsdp_param_f32(params[i], unit->room[i]);
        unit->grads[i] = unit->grad_room[i];
        if (!unit->values[i])
            return fsdp_fail(err, FSDP_ERR_INTERNAL, "'%s' is not gathered",
                             fsdp_param_name(params[i]));
    }
    return FSDP_OK;
}

static fsdp_status give_grads(unit_values *unit, fsdp_param **params, int count, fsdp_error *err)
{
    for (int i = 0; i < count; i++)
        FSDP_TRY(tensor_give_grad(params[i], unit->grads[i], err));
    return FSDP_OK;
}

typedef struct microbatch_state {
    int tokens[TRANSFORMER_TOKENS + 1];
    float x[TRANSFORMER_STREAM], dx[TRANSFORMER_STREAM];
    double loss;
    block_state blocks[BLOCKS];
    head_state head;
    unit_values own, block;
} microbatch_state;

static void draw_tokens(int *tokens, int step, int number)
{
    uint64_t first = (uint64_t)(step * TRANSFORMER_MOST_RANKS + number) * (TRANSFORMER_TOKENS + 1);
    for (int t = 0; t <= TRANSFORMER_TOKENS; t++) {
        double u = (fsdp_uniform(3, "tokens", first + (uint64_t)t) + 1) / 2;
        tokens[t] = (int)(u * u * TRANSFORMER_VOCAB); /* some are more frequent */
    }
}

/* The toy is the first member of its net. */
static fsdp_status compute_layer(toy *base, int layer, fsdp_error *err)
{
    transformer_net *net = (transformer_net *)base;
    microbatch_state *state = net->state;
    int i = layer - FIRST_BLOCK;
    if (layer == EMBEDDING) {
        FSDP_TRY(read_values(&state->own, net->own, ROOT_PARAMS, err));
        transformer_embed(state->own.values, state->tokens, state->x);
    } else if (layer == HEAD) {
        state->loss =
            transformer_head_forward(state->own.values, state->x, state->tokens, &state->head);
    } else {
        FSDP_TRY(read_values(&state->block, net->params[i], BLOCK_PARAMS, err));
        transformer_block_forward(state->block.values, state->x, &state->blocks[i]);
    }
    return FSDP_OK;
}

static fsdp_status give_layer_grads(toy *base, int layer, fsdp_error *err)
{
    transformer_net *net = (transformer_net *)base;
    microbatch_state *state = net->state;
    int i = layer - FIRST_BLOCK;
    if (layer == EMBEDDING) {
        transformer_embed_backward(state->tokens, state->dx, state->own.grads);
        return give_grads(&state->own, net->own, ROOT_PARAMS, err);
    }
    if (layer == HEAD) {
        FSDP_TRY(read_values(&state->own, net->own, ROOT_PARAMS, err));
        transformer_head_backward(state->own.values, &state->head, state->tokens, state->own.grads,
                                  state->dx);
        return FSDP_OK;
    }
    FSDP_TRY(read_values(&state->block, net->params[i], BLOCK_PARAMS, err));
    transformer_block_backward(state->block.values, &state->blocks[i], state->block.grads,
                               state->dx);
    return give_grads(&state->block, net->params[i], BLOCK_PARAMS, err);
}

static fsdp_status run_microbatch(transformer_net *net, int step, int number, double *loss_out,
                                  fsdp_error *err)
{
    microbatch_state state;
    net->state = &state;
    draw_tokens(state.tokens, step, number);
    FSDP_TRY(toy_forward(&net->toy, compute_layer, err));
    *loss_out = state.loss;
    return toy_backward(&net->toy, give_layer_grads, err);
}

/* --- parameters next to a record --------------------------------------------------------------- */

typedef fsdp_status (*look_at_param)(fsdp_param *param, float *whole, double tolerance,
                                     fsdp_error *err);

/* Calls look for every parameter with its place in a record. */
static fsdp_status for_all(const transformer_net *net, look_at_param look, float *elements,
                           double tolerance, fsdp_error *err)
{
    for (size_t i = 0; i < fsdp_model_count(net->toy.model); i++) {
        fsdp_param *param = fsdp_model_at(net->toy.model, i);
        FSDP_TRY(look(param, elements, tolerance, err));
        elements +=
            fsdp_shape_count(fsdp_param_describe(param).ndim, fsdp_param_describe(param).shape);
    }
    return FSDP_OK;
}

static fsdp_status compare_value(fsdp_param *param, float *whole, double tolerance, fsdp_error *err)
{
    return expect_shard(param, whole, tolerance, err);
}

static fsdp_status compare_grad(fsdp_param *param, float *whole, double tolerance, fsdp_error *err)
{
    return expect_shard_grad(param, whole, tolerance, err);
}

static fsdp_status note_value(fsdp_param *param, float *whole, double tolerance, fsdp_error *err)
{
    (void)tolerance;
    (void)err;
    keep_shard(param, whole);
    return FSDP_OK;
}

static fsdp_status note_grad(fsdp_param *param, float *whole, double tolerance, fsdp_error *err)
{
    (void)tolerance;
    (void)err;
    keep_shard_grad(param, whole);
    return FSDP_OK;
}

/* --- one rank --------------------------------------------------------------------------------- */

typedef struct alone_run {
    const transformer_mode *mode;
    int microbatches;
    transformer_record *record;
} alone_run;

static fsdp_status train_step_alone(transformer_net *net, const alone_run *run, int step,
                                    fsdp_error *err)
{
    for (int m = 0; m < run->microbatches; m++) {
        FSDP_TRY(fsdp_root_begin_microbatch(net->toy.root, m, run->microbatches, err));
        FSDP_TRY(run_microbatch(net, step, m, &run->record->losses[step][m], err));
    }
    FSDP_TRY(for_all(net, note_grad, run->record->grads[step], 0, err));
    return fsdp_optim_step(net->toy.optim, err);
}

static fsdp_status train_alone(transformer_net *net, fsdp_world *world, const alone_run *run,
                               fsdp_error *err)
{
    FSDP_TRY(build(net, world, err));
    for (size_t i = 0; i < fsdp_root_unit_count(net->toy.root) && run->microbatches > 1; i++)
        FSDP_TRY(fsdp_unit_set_gradient_divide_factor(fsdp_root_unit_at(net->toy.root, i),
                                                      run->microbatches, err));
    for (int step = 0; step < STEPS; step++)
        FSDP_TRY(train_step_alone(net, run, step, err));
    return for_all(net, note_value, run->record->weights, 0, err);
}

static fsdp_status run_alone(world_rank *rank, fsdp_error *err)
{
    const alone_run *run = rank->user;
    transformer_mode plain = {.reshard = FSDP_RESHARD_ALWAYS,
                              .root_reshard = FSDP_RESHARD_AUTO,
                              .inputs = 1,
                              .dtype = run->mode->dtype,
                              .param_dtype = run->mode->param_dtype,
                              .reduce_dtype = run->mode->reduce_dtype,
                              .sgd = run->mode->sgd};
    transformer_net net = {.mode = &plain};
    fsdp_status status = train_alone(&net, rank->world, run, err);
    toy_free(&net.toy);
    return status;
}

fsdp_status transformer_train_alone(const transformer_mode *mode, int microbatches,
                                    transformer_record *record, fsdp_error *err)
{
    alone_run run = {.mode = mode, .microbatches = microbatches, .record = record};
    fsdp_world_parts parts = {.local_size = 1, .check = true, .deadline_ms = 30000};
    world_rank rank = {.user = &run};
    FSDP_TRY(fsdp_ctl_self(&parts.ctl, err));
    FSDP_TRY(fsdp_transport_self(&parts.transport, err));
    return run_world(&parts, "cpu", run_alone, &rank, err);
}

/* --- many ------------------------------------------------------------------------------------- */

static fsdp_status compare_step(transformer_net *net, const transformer_record *expected, int step,
                                fsdp_error *err)
{
    int me = fsdp_world_rank(net->toy.world);
    double loss, tolerance = net->mode->tolerance, wanted = expected->losses[step][me];
    FSDP_TRY(run_microbatch(net, step, me, &loss, err));
    if (tolerance > 0 ? !are_close(loss, wanted, tolerance)
                      : memcmp(&loss, &wanted, sizeof loss) != 0)
        return fsdp_fail(err, FSDP_ERR_INTERNAL, "step %d, rank %d: loss %.17g, not %.17g", step,
                         me, loss, wanted);
    FSDP_TRY(for_all(net, compare_grad, (float *)expected->grads[step], tolerance, err));
    return fsdp_optim_step(net->toy.optim, err);
}

static fsdp_status compare_all(transformer_net *net, fsdp_world *world,
                               const transformer_record *expected, fsdp_error *err)
{
    FSDP_TRY(build(net, world, err));
    for (int step = 0; step < STEPS; step++)
        FSDP_TRY(compare_step(net, expected, step, err));
    FSDP_TRY(for_all(net, compare_value, (float *)expected->weights, net->mode->tolerance, err));
    const fsdp_memory memory = fsdp_root_memory(net->toy.root);
    int64_t left = memory.total_now - memory.now[FSDP_MEMORY_SHARD] - memory.now[FSDP_MEMORY_OPTIM];
    return left == 0 ? FSDP_OK
                     : fsdp_fail(err, FSDP_ERR_INTERNAL, "%lld bytes are left", (long long)left);
}

fsdp_status transformer_train_and_compare(fsdp_world *world, const transformer_mode *mode,
                                          const transformer_record *expected, fsdp_error *err)
{
    transformer_net net = {.mode = mode};
    fsdp_status status = compare_all(&net, world, expected, err);
    toy_free(&net.toy);
    return status;
}

void transformer_mode_describe(const transformer_mode *mode, char *out, size_t out_size)
{
    snprintf(out, out_size,
             "reshard %d, of the root %d, prefetch %d, inputs %d, replicas %lld, stored %s, "
             "gathered %s, reduced %s%s%s%s",
             mode->reshard, mode->root_reshard, mode->prefetch, mode->inputs,
             (long long)mode->replicas, fsdp_dtype_name(mode->dtype),
             fsdp_dtype_name(mode->param_dtype), fsdp_dtype_name(mode->reduce_dtype),
             mode->from_comm ? ", pool" : "", mode->separate ? ", separate" : "",
             mode->sgd ? ", SGD" : "");
}
