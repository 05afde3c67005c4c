/*
 * Several roots on one context, and the end of a root: contexts of pipeline stages, a root that is
 * freed while another stays, steps that begin too early, roots that cannot be made, forwards
 * without backwards, and blocks.
 */
#include "runtime/comm/comm_backend.h"
#include "tests/unit/runtime/expect_toy.h"

#include <string.h>
#include <time.h>

enum { SIZE = 4, LAYERS = 2, RANKS = 2 };

/* Two models of two layers, each with a root of its own. */
typedef struct pair {
    toy first, second;
} pair;

typedef fsdp_status (*pair_body)(pair *two, fsdp_error *err);

static fsdp_status build_stage(toy *of, world_rank *rank, fsdp_error *err)
{
    const toy_case copies = {
        .mesh_ndim = 2, .mesh_shape = {RANKS, 1}, .mesh_names = {"copies", "parts"}};
    FSDP_TRY(toy_begin(of, rank, &copies, err));
    FSDP_TRY(toy_add_weights(of, LAYERS, 1, (int64_t[]){SIZE}, err));
    return toy_wrap(of, err);
}

static fsdp_status run_pair(world_rank *rank, fsdp_error *err)
{
    const pair_body *body = rank->user;
    pair two = {0};
    fsdp_status status = build_stage(&two.first, rank, err);
    if (status == FSDP_OK)
        status = build_stage(&two.second, rank, err);
    if (status == FSDP_OK)
        status = (*body)(&two, err);
    toy_free(&two.first);
    toy_free(&two.second);
    return status;
}

static void expect_pair(pair_body body)
{
    expect_body(RANKS, run_pair, &body);
}

/* A failed cr_assert in a thread would end it without the others. */
static fsdp_status expect(bool is_so, const char *what, fsdp_error *err)
{
    return is_so ? FSDP_OK : fsdp_fail(err, FSDP_ERR_INTERNAL, "not so: %s", what);
}

static fsdp_status expect_refused(fsdp_status status, const fsdp_error *why, const char *word,
                                  fsdp_error *err)
{
    if (status == FSDP_ERR_USAGE && strstr(why->text, word))
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_INTERNAL, "'%s' was to be refused: %d, %s", word, (int)status,
                     why->text);
}

static fsdp_status forward(toy *of, fsdp_error *err)
{
    return toy_forward(of, NULL, err);
}

static fsdp_status run_backward(toy *of, fsdp_error *err)
{
    return toy_backward_layers(of, toy_add_ones, err);
}

static fsdp_status backward(toy *of, fsdp_error *err)
{
    return toy_backward(of, toy_add_ones, err);
}

static fsdp_status add_sgd(toy *of, fsdp_error *err)
{
    fsdp_sgd_opts opts = {0};
    opts.lr = 1;
    return toy_add_sgd(of, &opts, err);
}

/* --- contexts that are shared ----------------------------------------------------------------- */

static fsdp_status train_stages(pair *two, fsdp_error *err)
{
    FSDP_TRY(fsdp_root_share_context(two->second.root, two->first.root, err));
    FSDP_TRY(add_sgd(&two->first, err));
    FSDP_TRY(add_sgd(&two->second, err));
    for (int step = 1; step <= 3; step++) {
        FSDP_TRY(forward(&two->first, err));
        FSDP_TRY(forward(&two->second, err));
        FSDP_TRY(backward(&two->second, err));
        FSDP_TRY(backward(&two->first, err));
        FSDP_TRY(fsdp_optim_step(two->first.optim, err));
        FSDP_TRY(fsdp_optim_step(two->second.optim, err));
        FSDP_TRY(toy_expect_weights(&two->first, (float)-step, err));
        FSDP_TRY(toy_expect_weights(&two->second, (float)-step, err));
    }
    return FSDP_OK;
}

Test(unit_roots, stages_that_share_a_context_train_as_ones_that_do_not)
{
    expect_pair(train_stages);
}

/* One of them is always inside a step. */
static fsdp_status take_turns(pair *two, fsdp_error *err)
{
    const fsdp_context *context = two->first.root->context;
    FSDP_TRY(fsdp_root_share_context(two->second.root, two->first.root, err));
    FSDP_TRY(forward(&two->first, err));
    for (int turn = 0; turn < 20; turn++) {
        FSDP_TRY(forward(&two->second, err));
        FSDP_TRY(backward(&two->first, err));
        FSDP_TRY(expect(context->order_count == LAYERS, "the second's forward is noted", err));
        FSDP_TRY(forward(&two->first, err));
        FSDP_TRY(backward(&two->second, err));
        FSDP_TRY(expect(context->order_count == LAYERS, "the first's forward is noted", err));
        for (size_t i = 0; i < LAYERS; i++)
            FSDP_TRY(expect(context->order[i]->order[0] == i, "a group knows its place", err));
    }
    return backward(&two->first, err);
}

Test(unit_roots, roots_that_take_turns_note_only_what_is_under_way)
{
    expect_pair(take_turns);
}

static fsdp_status count_shared(pair *two, fsdp_error *err)
{
    fsdp_memory_pool *own = &two->second.root->context->memory;
    fsdp_memory_pool *shared = &two->first.root->context->memory;
    int64_t counted = own->counts.now[FSDP_MEMORY_SHARD] + shared->counts.now[FSDP_MEMORY_SHARD];
    size_t used = own->used + shared->used, before = shared->used;
    FSDP_TRY(fsdp_root_share_context(two->second.root, two->first.root, err));
    FSDP_TRY(expect(shared->used == used && shared->most_used >= used, "both are in use", err));
    FSDP_TRY(expect(fsdp_root_memory(two->first.root).now[FSDP_MEMORY_SHARD] == counted,
                    "both are counted", err));
    toy_free(&two->second);
    return expect(shared->used == before, "the first root's alone are in use", err);
}

Test(unit_roots, the_memory_of_a_root_goes_with_it_into_the_shared_context)
{
    expect_pair(count_shared);
}

static bool is_of(const fsdp_context *context, fsdp_event event)
{
    bool is = !event.stream;
    for (int i = 0; i < FSDP_STREAMS; i++)
        is = is || context->streams[i] == event.stream;
    return is;
}

static fsdp_status share_after_gather(pair *two, fsdp_error *err)
{
    fsdp_root *root = two->second.root, *with = two->first.root;
    fsdp_unit *unit = two->second.unit[0];
    fsdp_error why = {0};
    FSDP_TRY(fsdp_unit_unshard(unit, false, NULL, err));
    FSDP_TRY(expect_refused(fsdp_root_share_context(root, with, &why), &why, "sharded", err));
    FSDP_TRY(fsdp_unit_reshard(unit, err));
    fsdp_root_set_post_optim_event(root);
    FSDP_TRY(fsdp_root_share_context(root, with, err));
    const fsdp_group *group = &unit->groups[0];
    FSDP_TRY(expect(is_of(with->context, group->resharded) &&
                        is_of(with->context, group->rects_in.last) &&
                        is_of(with->context, group->rects_out.last),
                    "events are of streams that are there", err));
    FSDP_TRY(expect(!root->has_post_optim_event, "the optimizer's event is forgotten", err));
    FSDP_TRY(forward(&two->second, err));
    return backward(&two->second, err);
}

Test(unit_roots, a_root_shares_after_it_was_gathered_and_given_back)
{
    expect_pair(share_after_gather);
}

static fsdp_status share_late(pair *two, fsdp_error *err)
{
    fsdp_error why = {0};
    FSDP_TRY(fsdp_root_begin_forward(two->second.root, err));
    FSDP_TRY(expect_refused(fsdp_root_share_context(two->second.root, two->first.root, &why), &why,
                            "before the first step", err));
    return fsdp_root_end_forward(two->second.root, err);
}

Test(unit_roots, a_root_in_a_step_does_not_share)
{
    expect_pair(share_late);
}

static fsdp_status free_one(pair *two, fsdp_error *err)
{
    FSDP_TRY(fsdp_root_share_context(two->second.root, two->first.root, err));
    FSDP_TRY(forward(&two->first, err));
    FSDP_TRY(forward(&two->second, err));
    const fsdp_context *context = two->second.root->context;
    toy_free(&two->first);
    for (size_t i = 0; i < context->order_count; i++)
        FSDP_TRY(expect(!context->order[i] || context->order[i]->unit->root == two->second.root,
                        "the order is of roots that are there", err));
    FSDP_TRY(backward(&two->second, err));
    return forward(&two->second, err);
}

Test(unit_roots, a_root_goes_between_the_forward_and_the_backward_of_another)
{
    expect_pair(free_one);
}

static fsdp_status free_finalizing(pair *two, fsdp_error *err)
{
    FSDP_TRY(fsdp_root_share_context(two->second.root, two->first.root, err));
    FSDP_TRY(fsdp_root_set_manual_backward_finalization(two->first.root, true, err));
    FSDP_TRY(forward(&two->first, err));
    FSDP_TRY(run_backward(&two->first, err));
    FSDP_TRY(fsdp_root_finalize_backward(two->first.root, true, NULL, err));
    toy_free(&two->first);
    return forward(&two->second, err);
}

Test(unit_roots, a_root_goes_before_its_end_of_backward_was_waited_for)
{
    expect_pair(free_finalizing);
}

/* --- steps that come too early ---------------------------------------------------------------- */

static fsdp_status refuse_early(toy *of, fsdp_scaler *scaler, fsdp_error *err)
{
    double norm;
    const fsdp_clip_opts clip = {.max_norm = 1};
    fsdp_error why = {0};
    FSDP_TRY(expect_refused(fsdp_optim_step(of->optim, &why), &why, "fsdp_finalize_wait", err));
    FSDP_TRY(expect_refused(fsdp_root_clip_grad_norm(of->root, &clip, &norm, &why), &why,
                            "fsdp_finalize_wait", err));
    return expect_refused(fsdp_scaler_unscale(scaler, of->root, &why), &why, "fsdp_finalize_wait",
                          err);
}

static fsdp_status step_early(toy *of, fsdp_scaler *scaler, fsdp_error *err)
{
    fsdp_finalize_handle *handle;
    FSDP_TRY(fsdp_root_set_manual_backward_finalization(of->root, true, err));
    FSDP_TRY(forward(of, err));
    FSDP_TRY(run_backward(of, err));
    FSDP_TRY(fsdp_root_finalize_backward(of->root, true, &handle, err));
    FSDP_TRY(refuse_early(of, scaler, err));
    FSDP_TRY(toy_expect_weights(of, 0, err));
    FSDP_TRY(fsdp_finalize_wait(handle, err));
    FSDP_TRY(fsdp_optim_step(of->optim, err));
    FSDP_TRY(toy_expect_weights(of, -1, err));
    FSDP_TRY(fsdp_root_set_manual_backward_finalization(of->root, false, err));
    fsdp_root_set_is_last_backward(of->root, false);
    FSDP_TRY(forward(of, err));
    FSDP_TRY(backward(of, err));
    return refuse_early(of, scaler, err);
}

static fsdp_status run_early(pair *two, fsdp_error *err)
{
    fsdp_scaler *scaler = NULL;
    const fsdp_scaler_opts opts = {0};
    FSDP_TRY(add_sgd(&two->first, err));
    fsdp_status status = fsdp_scaler_create(&opts, &scaler, err);
    if (status == FSDP_OK)
        status = step_early(&two->first, scaler, err);
    fsdp_scaler_free(scaler);
    return status;
}

Test(unit_roots, nothing_steps_while_reductions_are_under_way)
{
    expect_pair(run_early);
}

/* --- replicas: an all-reduce that takes long -------------------------------------------------- */

static fsdp_status slow_hook(void *user, void *data, fsdp_dtype dtype, int64_t count,
                             fsdp_error *err)
{
    const struct timespec while_host_goes_on = {.tv_nsec = 100 * 1000 * 1000};
    float *grads = data;
    (void)user, (void)dtype, (void)err;
    nanosleep(&while_host_goes_on, NULL);
    for (int64_t i = 0; i < count; i++)
        grads[i] = 14;
    return FSDP_OK;
}

/* The last backward leaves its sum for a later all-reduce; the gradients of the first one must exist
 * nevertheless. */
static fsdp_status leave_all_reduce(pair *two, fsdp_error *err)
{
    toy *of = &two->first;
    for (int i = 0; i < LAYERS; i++)
        fsdp_unit_set_all_reduce_hook(of->unit[i], slow_hook, NULL);
    fsdp_root_set_is_last_backward(of->root, false);
    FSDP_TRY(forward(of, err));
    FSDP_TRY(backward(of, err));
    fsdp_root_set_is_last_backward(of->root, true);
    FSDP_TRY(
        fsdp_unit_set(fsdp_root_unit(of->root), FSDP_UNIT_REQUIRES_ALL_REDUCE, false, true, err));
    FSDP_TRY(forward(of, err));
    FSDP_TRY(backward(of, err));
    for (int i = 0; i < LAYERS; i++) {
        const float *grad = fsdp_param_shard_grad(of->weight[i]);
        FSDP_TRY(expect(grad && grad[0] == 14, "the all-reduce was waited for", err));
    }
    return FSDP_OK;
}

Test(unit_roots, an_all_reduce_is_waited_for_when_the_last_backward_has_none)
{
    expect_pair(leave_all_reduce);
}

/* --- roots that could not be made ------------------------------------------------------------- */

static void along_an_uneven_dim(void *user, const fsdp_param *param, fsdp_param_place *place)
{
    (void)user;
    (void)param;
    place->dim = 1;
}

static fsdp_status create_twice(toy *net, fsdp_error *err)
{
    fsdp_param *weight;
    fsdp_box box;
    fsdp_error why = {0};
    fsdp_unit_opts uneven = net->opts;
    FSDP_TRY(fsdp_model_add(
        net->model,
        &(fsdp_param_spec){.name = "w", .dtype = FSDP_F32, .ndim = 2, .shape = (int64_t[]){4, 3}},
        &weight, err));
    uneven.placement = along_an_uneven_dim;
    uneven.param_dtype = FSDP_BF16;
    FSDP_TRY(expect(fsdp_root_create(net->model, &uneven, &net->root, &why) != FSDP_OK,
                    "3 columns are not for 2 ranks", err));
    FSDP_TRY(fsdp_root_create(net->model, &net->opts, &net->root, err));
    FSDP_TRY(expect(fsdp_root_unit_count(net->root) == 1, "there is one unit", err));
    FSDP_TRY(expect(fsdp_param_shard(weight, &box) && box.len[0] == 2 && box.len[1] == 3,
                    "rows are cut", err));
    return expect(weight->data_dtype == FSDP_F32 && weight->grad_dtype == FSDP_F32,
                  "dtypes are those of the second options", err);
}

Test(unit_roots, a_root_that_could_not_be_made_leaves_the_model_as_it_was)
{
    expect_toy_on("cpu", (toy_case){1, {RANKS}, {"dp"}, NULL, create_twice, NULL, {0}});
}

/* --- forwards without backwards --------------------------------------------------------------- */

static fsdp_status evaluate(pair *two, fsdp_error *err)
{
    toy *of = &two->first;
    fsdp_root *root = of->root;
    fsdp_error why = {0};
    FSDP_TRY(fsdp_root_set_evaluating(root, true, err));
    for (int i = 0; i < 5; i++)
        FSDP_TRY(forward(of, err));
    FSDP_TRY(expect(root->context->order_count == 0 && of->unit[0]->groups[0].order_count == 0,
                    "no order is noted", err));
    FSDP_TRY(expect(root->events.size == 0, "no event is kept for --check", err));
    FSDP_TRY(expect_refused(fsdp_unit_pre_backward(of->unit[0], &why), &why, "evaluating", err));
    FSDP_TRY(fsdp_root_begin_forward(root, err));
    FSDP_TRY(
        expect_refused(fsdp_root_set_evaluating(root, false, &why), &why, "between steps", err));
    FSDP_TRY(fsdp_root_end_forward(root, err));
    FSDP_TRY(fsdp_root_set_evaluating(root, false, err));
    FSDP_TRY(forward(of, err));
    return backward(of, err);
}

Test(unit_roots, evaluating_keeps_nothing_of_its_forwards)
{
    expect_pair(evaluate);
}

/* --- reductions in flight --------------------------------------------------------------------- */

static fsdp_status expect_inputs(const pair *two, int most, fsdp_error *err)
{
    int has = two->first.root->context->max_inputs;
    return has == most ? FSDP_OK
                       : fsdp_fail(err, FSDP_ERR_INTERNAL, "%d in flight, not %d", has, most);
}

static fsdp_status step_first(pair *two, fsdp_error *err)
{
    FSDP_TRY(forward(&two->first, err));
    return backward(&two->first, err);
}

/* The second root needs more memory than the third, then less; then it is freed. */
static fsdp_status follow_wishes(pair *two, toy *third, fsdp_error *err)
{
    fsdp_unit *greedy = two->second.unit[0];
    FSDP_TRY(
        fsdp_unit_set(third->unit[1], FSDP_UNIT_REDUCE_SCATTER_MAX_INPUT_BUFFERS, 2, false, err));
    FSDP_TRY(fsdp_root_share_context(third->root, two->first.root, err));
    FSDP_TRY(fsdp_unit_set(greedy, FSDP_UNIT_REDUCE_SCATTER_MAX_INPUT_BUFFERS, 5, false, err));
    FSDP_TRY(fsdp_root_share_context(two->second.root, two->first.root, err));
    FSDP_TRY(step_first(two, err));
    FSDP_TRY(expect_inputs(two, 5, err));
    FSDP_TRY(fsdp_unit_set(greedy, FSDP_UNIT_REDUCE_SCATTER_MAX_INPUT_BUFFERS, 3, false, err));
    FSDP_TRY(step_first(two, err));
    FSDP_TRY(expect_inputs(two, 3, err));
    toy_free(&two->second);
    FSDP_TRY(step_first(two, err));
    return expect_inputs(two, 2, err);
}

static fsdp_status share_among_three(pair *two, fsdp_error *err)
{
    toy third = {0};
    fsdp_status status = build_stage(&third, two->first.rank, err);
    if (status == FSDP_OK)
        status = follow_wishes(two, &third, err);
    toy_free(&third);
    return status;
}

Test(unit_roots, a_shared_context_has_as_many_inputs_in_flight_as_those_who_share_it_want_now)
{
    expect_pair(share_among_three);
}

/* --- blocks that are taken again -------------------------------------------------------------- */

static size_t count_free(const fsdp_memory_pool *pool)
{
    size_t n = 0;
    for (const fsdp_block *block = pool->free; block; block = block->next)
        n++;
    return n;
}

static void *no_room(fsdp_transport *transport, size_t size)
{
    (void)transport;
    (void)size;
    return NULL;
}

static fsdp_status take_often(fsdp_context *context, fsdp_comm *comm, size_t size, fsdp_error *err)
{
    fsdp_stream *compute = context->streams[FSDP_STREAM_COMPUTE];
    const fsdp_memory_request request = {.class = FSDP_MEMORY_REDUCE,
                                         .stream = compute,
                                         .allocator = fsdp_allocator_of_comm(comm),
                                         .size = size,
                                         .owner = "a test"};
    for (int i = 0; i < 3; i++) {
        fsdp_block *block;
        FSDP_TRY(fsdp_memory_take(&context->memory, &request, &block, err));
        fsdp_memory_give(&context->memory, block, compute->device->ops->record(compute));
    }
    return expect(count_free(&context->memory) == 1, "one block was enough", err);
}

static fsdp_status take_again(pair *two, fsdp_error *err)
{
    fsdp_transport_ops without;
    fsdp_transport full = {0};
    fsdp_comm *comm = two->first.unit[0]->groups[0].replicate->comm;
    fsdp_transport *transport = comm->transport;
    without = *transport->ops;
    without.alloc = no_room;
    full = *transport;
    full.ops = &without;
    comm->transport = &full;
    fsdp_status status = take_often(two->first.root->context, comm, 1000, err);
    comm->transport = transport;
    return status == FSDP_OK ? take_often(two->second.root->context, NULL, 0, err) : status;
}

Test(unit_roots, blocks_that_fell_back_and_empty_ones_are_taken_again)
{
    expect_pair(take_again);
}
