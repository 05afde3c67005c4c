/* See order_scenarios.h. */
#include "tests/support/nets/order_scenarios.h"

#include <stdio.h>
#include <string.h>

#include "tests/support/nets/toy.h"

enum { MOST_LAYERS = 4 };

/* Layers of one weight each, maybe a unit inside each, and a weight of the root's own. */
typedef struct layers_net {
    toy toy;
    fsdp_param *inner_weight[MOST_LAYERS];
    fsdp_unit *inner[MOST_LAYERS];
} layers_net;

typedef struct scenario {
    const char *name;
    int least_ranks, layers, reshard;
    fsdp_status (*body)(world_rank *rank, layers_net *net, fsdp_error *err);
    bool root_has_no_weight, has_inner;
} scenario;

static fsdp_status add_inner(layers_net *net, int i, fsdp_error *err)
{
    char name[24];
    snprintf(name, sizeof name, "L%d.w1.w", i);
    FSDP_TRY(fsdp_model_add(
        net->toy.model,
        &(fsdp_param_spec){.name = name, .dtype = FSDP_F32, .ndim = 2, .shape = (int64_t[]){3, 2}},
        &net->inner_weight[i], err));
    name[5] = '\0';
    return fsdp_unit_create(net->toy.model, name, &net->toy.opts, &net->inner[i], err);
}

static fsdp_status build(layers_net *net, world_rank *rank, const scenario *what, fsdp_error *err)
{
    toy *base = &net->toy;
    const toy_case line = {
        .mesh_ndim = 1, .mesh_shape = {fsdp_world_size(rank->world)}, .mesh_names = {"dp"}};
    FSDP_TRY(toy_begin(base, rank, &line, err));
    base->runs_root = true;
    base->opts.reshard_after_forward = what->reshard;
    if (!what->root_has_no_weight)
        FSDP_TRY(fsdp_model_add(
            base->model,
            &(fsdp_param_spec){
                .name = "own", .dtype = FSDP_F32, .ndim = 1, .shape = (int64_t[]){3}},
            &base->own, err));
    for (int i = 0; i < what->layers && what->has_inner; i++)
        FSDP_TRY(add_inner(net, i, err));
    FSDP_TRY(toy_add_weights(base, what->layers, 2, (int64_t[]){3, 2}, err));
    return toy_wrap(base, err);
}

static fsdp_status run_scenario(world_rank *rank, fsdp_error *err)
{
    const scenario *what = rank->user;
    layers_net net = {0};
    fsdp_status status = build(&net, rank, what, err);
    if (status == FSDP_OK)
        status = what->body(rank, &net, err);
    toy_free(&net.toy);
    return status;
}

static fsdp_status expect_count(world_rank *rank, const char *event, int count, fsdp_error *err)
{
    int seen = count_events(rank, event);
    if (seen == count)
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_INTERNAL, "%d of '%s' were expected, %d came: %s", count, event,
                     seen, rank->events.data ? rank->events.data : "");
}

/* The toy is the first member of its net. */
static fsdp_status run_inner(toy *base, int i, fsdp_error *err)
{
    const layers_net *net = (const layers_net *)base;
    if (!net->inner[i])
        return FSDP_OK;
    FSDP_TRY(fsdp_unit_pre_forward(net->inner[i], err));
    return fsdp_unit_post_forward(net->inner[i], err);
}

static fsdp_status forward(layers_net *net, fsdp_error *err)
{
    return toy_forward(&net->toy, run_inner, err);
}

static fsdp_status touch(fsdp_param *param, fsdp_error *err)
{
    return fsdp_param_grad(param)
               ? FSDP_OK
               : fsdp_fail(err, FSDP_ERR_INTERNAL, "'%s' has no gradient", fsdp_param_name(param));
}

/* The root's own gradient is given with that of the last layer. */
static fsdp_status touch_grads(toy *base, int i, fsdp_error *err)
{
    if (base->own && i == base->layers - 1)
        FSDP_TRY(touch(base->own, err));
    return touch(base->weight[i], err);
}

static fsdp_status backward_layer(layers_net *net, int i, fsdp_error *err)
{
    return toy_backward_layer(&net->toy, i, touch_grads, err);
}

static fsdp_status backward(layers_net *net, fsdp_error *err)
{
    return toy_backward(&net->toy, touch_grads, err);
}

/* --- C6, C7, C8: how many collectives ---------------------------------------------------------- */

/* Expects one collective of that kind in every unit, of that group size, and no other. */
static fsdp_status expect_one_each(world_rank *rank, const layers_net *net, const char *kind,
                                   int size, fsdp_error *err)
{
    char event[32];
    FSDP_TRY(expect_count(rank, kind, (int)fsdp_root_unit_count(net->toy.root), err));
    for (size_t i = 0; i < fsdp_root_unit_count(net->toy.root); i++) {
        snprintf(event, sizeof event, "%s %s/%d", kind,
                 fsdp_unit_name(fsdp_root_unit_at(net->toy.root, i)), size);
        FSDP_TRY(expect_count(rank, event, 1, err));
    }
    return FSDP_OK;
}

static fsdp_status count_collectives(world_rank *rank, layers_net *net, fsdp_error *err)
{
    const scenario *what = rank->user;
    int ranks = fsdp_world_size(rank->world),
        neighbours = what->reshard > 1 ? what->reshard : ranks;
    rank->notes_collectives = true;
    FSDP_TRY(forward(net, err));
    FSDP_TRY(expect_one_each(rank, net, "AG", ranks, err));
    FSDP_TRY(expect_count(rank, "RS", 0, err));
    FSDP_TRY(expect_count(rank, "AR", 0, err));
    forget_events(rank);
    FSDP_TRY(backward(net, err));
    if (what->reshard == FSDP_RESHARD_NEVER)
        FSDP_TRY(expect_count(rank, "AG", 0, err));
    else if (what->reshard == FSDP_RESHARD_AUTO)
        FSDP_TRY(expect_count(rank, "AG L", net->toy.layers, err));
    else
        FSDP_TRY(expect_one_each(rank, net, "AG", neighbours, err));
    if (what->reshard == FSDP_RESHARD_AUTO)
        FSDP_TRY(expect_count(rank, "AG root", 0, err));
    FSDP_TRY(expect_one_each(rank, net, "RS", ranks, err));
    return expect_count(rank, "AR", 0, err);
}

static fsdp_status reshard_by_hand(world_rank *rank, layers_net *net, fsdp_error *err)
{
    rank->notes_collectives = true;
    FSDP_TRY(forward(net, err));
    for (size_t i = 0; i < fsdp_root_unit_count(net->toy.root); i++)
        FSDP_TRY(fsdp_unit_reshard(fsdp_root_unit_at(net->toy.root, i), err));
    forget_events(rank);
    FSDP_TRY(backward(net, err));
    FSDP_TRY(expect_count(rank, "AG", net->toy.layers + 1, err));
    return expect_count(rank, "RS", net->toy.layers + 1, err);
}

static fsdp_status flip(world_rank *rank, layers_net *net, bool to, bool recurse, int gathers,
                        fsdp_error *err)
{
    FSDP_TRY(fsdp_unit_set(fsdp_root_unit(net->toy.root), FSDP_UNIT_RESHARD_AFTER_FORWARD, to,
                           recurse, err));
    rank->notes_collectives = true;
    FSDP_TRY(forward(net, err));
    forget_events(rank);
    FSDP_TRY(backward(net, err));
    FSDP_TRY(expect_count(rank, "AG", gathers, err));
    return expect_count(rank, "RS", net->toy.layers + 1, err);
}

static fsdp_status flip_all_on(world_rank *rank, layers_net *net, fsdp_error *err)
{
    return flip(rank, net, true, true, net->toy.layers + 1, err);
}

static fsdp_status flip_root_on(world_rank *rank, layers_net *net, fsdp_error *err)
{
    return flip(rank, net, true, false, 1, err);
}

static fsdp_status flip_all_off(world_rank *rank, layers_net *net, fsdp_error *err)
{
    return flip(rank, net, false, true, 0, err);
}

static fsdp_status flip_root_off(world_rank *rank, layers_net *net, fsdp_error *err)
{
    return flip(rank, net, false, false, net->toy.layers, err);
}

/* --- C11, C12: implicit prefetch ---------------------------------------------------------------- */

static const char forward_always[] = "U root|U L0|R L0|U L1|R L1|U L2|R L2|R root";
static const char backward_always[] =
    "U root|U L2|U L1|R L2|post L2|U L0|R L1|post L1|R L0|post L0|R root|post root";
static const char *const backward_auto = backward_always + sizeof "U root|" - 1;
static const char backward_never[] = "R L2|post L2|R L1|post L1|R L0|post L0|R root|post root";

static fsdp_status prefetch_always(world_rank *rank, layers_net *net, fsdp_error *err)
{
    for (int i = 0; i < 3; i++) {
        FSDP_TRY(forward(net, err));
        FSDP_TRY(expect_events(rank, forward_always, err));
        FSDP_TRY(backward(net, err));
        FSDP_TRY(expect_events(rank, backward_always, err));
    }
    return FSDP_OK;
}

static fsdp_status prefetch_auto(world_rank *rank, layers_net *net, fsdp_error *err)
{
    for (int i = 0; i < 3; i++) {
        FSDP_TRY(forward(net, err));
        FSDP_TRY(expect_events(rank, "U root|U L0|R L0|U L1|R L1|U L2|R L2", err));
        FSDP_TRY(backward(net, err));
        FSDP_TRY(expect_events(rank, backward_auto, err));
    }
    return FSDP_OK;
}

static fsdp_status prefetch_never(world_rank *rank, layers_net *net, fsdp_error *err)
{
    for (int i = 0; i < 3; i++) {
        FSDP_TRY(forward(net, err));
        FSDP_TRY(expect_events(rank, "U root|U L0|U L1|U L2", err));
        FSDP_TRY(backward(net, err));
        FSDP_TRY(expect_events(rank, backward_never, err));
    }
    return FSDP_OK;
}

/* Activations are computed again. */
static fsdp_status recompute_layer(toy *base, int i, fsdp_error *err)
{
    const layers_net *net = (const layers_net *)base;
    FSDP_TRY(toy_forward_layer(base, i, run_inner, err));
    if (net->inner[i]) {
        FSDP_TRY(fsdp_unit_pre_backward(net->inner[i], err));
        FSDP_TRY(touch(net->inner_weight[i], err));
        FSDP_TRY(fsdp_unit_post_backward(net->inner[i], err));
    }
    return touch(base->weight[i], err);
}

static fsdp_status recompute(layers_net *net, fsdp_error *err)
{
    return toy_backward(&net->toy, recompute_layer, err);
}

static fsdp_status recompute_each(world_rank *rank, layers_net *net, fsdp_error *err)
{
    const scenario *what = rank->user;
    for (int i = 0; i < 3; i++) {
        FSDP_TRY(forward(net, err));
        forget_events(rank);
        FSDP_TRY(recompute(net, err));
        FSDP_TRY(expect_events(rank,
                               what->reshard == FSDP_RESHARD_ALWAYS ? backward_always
                               : what->reshard == FSDP_RESHARD_AUTO ? backward_auto
                                                                    : backward_never,
                               err));
    }
    return FSDP_OK;
}

/* Events of two forwards and one backward over both. */
static fsdp_status play_twice(world_rank *rank, layers_net *net, const char *forward_again,
                              const char *backwards, fsdp_error *err)
{
    FSDP_TRY(forward(net, err));
    forget_events(rank);
    FSDP_TRY(forward(net, err));
    FSDP_TRY(expect_events(rank, forward_again, err));
    for (int pass = 0; pass < 2; pass++)
        FSDP_TRY(toy_backward_layers(&net->toy, touch_grads, err));
    FSDP_TRY(fsdp_root_end_backward(net->toy.root, err));
    return expect_events(rank, backwards, err);
}

#define LAYERS_BACKWARD "U L2|U L1|R L2|post L2|U L0|R L1|post L1|R L0|post L0|"

static fsdp_status twice_always(world_rank *rank, layers_net *net, fsdp_error *err)
{
    return play_twice(rank, net, forward_always,
                      "U root|" LAYERS_BACKWARD LAYERS_BACKWARD "R root|post root", err);
}

static fsdp_status twice_auto(world_rank *rank, layers_net *net, fsdp_error *err)
{
    return play_twice(rank, net, "U L0|R L0|U L1|R L1|U L2|R L2",
                      LAYERS_BACKWARD LAYERS_BACKWARD "R root|post root", err);
}

/* Units resharded in the first half are gathered in the second. */
static fsdp_status twice_never(world_rank *rank, layers_net *net, fsdp_error *err)
{
    return play_twice(rank, net, "",
                      "R L2|post L2|R L1|post L1|R L0|post L0|" LAYERS_BACKWARD "R root|post root",
                      err);
}

/* --- C13: heads that are not used in one backward ------------------------------------------------ */

static fsdp_status split_heads(world_rank *rank, layers_net *net, fsdp_error *err)
{
    FSDP_TRY(forward(net, err)); /* L0 is shared, L1 and L2 are heads */
    forget_events(rank);
    fsdp_root_set_is_last_backward(net->toy.root, false);
    FSDP_TRY(backward_layer(net, 2, err));
    FSDP_TRY(backward_layer(net, 0, err));
    FSDP_TRY(fsdp_root_end_backward(net->toy.root, err));
    FSDP_TRY(expect_events(rank, "U L2|U L1|R L2|post L2|U L0|R L0|post L0|post L1", err));
    fsdp_root_set_is_last_backward(net->toy.root, true);
    FSDP_TRY(backward_layer(net, 1, err));
    FSDP_TRY(backward_layer(net, 0, err));
    FSDP_TRY(fsdp_root_end_backward(net->toy.root, err));
    return expect_events(rank, "U L0|R L1|post L1|R L0|post L0|post L2", err);
}

/* --- C14, C15: explicit prefetch ----------------------------------------------------------------- */

static fsdp_status prefetch_forward(layers_net *net, int depth, fsdp_error *err)
{
    for (int i = 0; i < net->toy.layers; i++) {
        size_t n = 0;
        fsdp_unit *next[MOST_LAYERS];
        for (int d = 1; d <= depth && i + d < net->toy.layers; d++)
            next[n++] = net->toy.unit[i + d];
        FSDP_TRY(fsdp_unit_set_prefetch(net->toy.unit[i], FSDP_HOOK_PRE_FORWARD, next, n, err));
    }
    return FSDP_OK;
}

static const char backward_four[] =
    "U root|U L3|U L2|R L3|post L3|U L1|R L2|post L2|U L0|R L1|post L1|R L0|post L0|"
    "R root|post root";

static fsdp_status explicit_forward(world_rank *rank, layers_net *net, fsdp_error *err)
{
    FSDP_TRY(prefetch_forward(net, 1, err));
    FSDP_TRY(forward(net, err));
    FSDP_TRY(expect_events(rank, "U root|U L0|U L1|R L0|U L2|R L1|U L3|R L2|R L3|R root", err));
    FSDP_TRY(backward(net, err));
    FSDP_TRY(expect_events(rank, backward_four, err));
    FSDP_TRY(prefetch_forward(net, 2, err));
    FSDP_TRY(forward(net, err));
    FSDP_TRY(expect_events(rank, "U root|U L0|U L1|U L2|R L0|U L3|R L1|R L2|R L3|R root", err));
    FSDP_TRY(backward(net, err));
    return expect_events(rank, backward_four, err);
}

static fsdp_status prefetch_backward(layers_net *net, int depth, fsdp_error *err)
{
    for (int i = 0; i < net->toy.layers; i++) {
        size_t n = 0;
        fsdp_unit *before[MOST_LAYERS];
        for (int d = 1; d <= depth && i - d >= 0; d++)
            before[n++] = net->toy.unit[i - d];
        FSDP_TRY(fsdp_unit_set_prefetch(net->toy.unit[i], FSDP_HOOK_PRE_BACKWARD, before, n, err));
    }
    return FSDP_OK;
}

static fsdp_status explicit_backward(world_rank *rank, layers_net *net, fsdp_error *err)
{
    FSDP_TRY(prefetch_backward(net, 1, err));
    FSDP_TRY(forward(net, err));
    FSDP_TRY(expect_events(rank, "U root|U L0|R L0|U L1|R L1|U L2|R L2|U L3|R L3|R root", err));
    FSDP_TRY(backward(net, err));
    FSDP_TRY(expect_events(rank, backward_four, err));
    FSDP_TRY(prefetch_backward(net, 2, err));
    FSDP_TRY(forward(net, err));
    forget_events(rank);
    FSDP_TRY(backward(net, err));
    return expect_events(
        rank,
        "U root|U L3|U L2|U L1|R L3|post L3|U L0|R L2|post L2|R L1|post L1|R L0|post "
        "L0|R root|post root",
        err);
}

static fsdp_status expect_nothing_gathered(const layers_net *net, fsdp_error *err)
{
    const fsdp_memory memory = fsdp_root_memory(net->toy.root);
    int64_t left = memory.now[FSDP_MEMORY_UNSHARDED] + memory.now[FSDP_MEMORY_ALL_GATHER];
    EXPECT(memory.total_peak > memory.total_now);
    return left == 0 ? FSDP_OK
                     : fsdp_fail(err, FSDP_ERR_INTERNAL, "%lld bytes are left", (long long)left);
}

/* A unit inside each layer, and recomputed activations: units named for prefetch are gathered before the
 * recomputation, others by it. */
static fsdp_status prefetch_nested(world_rank *rank, layers_net *net, fsdp_error *err)
{
    for (int i = 1; i < net->toy.layers; i++)
        FSDP_TRY(fsdp_unit_set_prefetch(net->toy.unit[i], FSDP_HOOK_PRE_BACKWARD,
                                        (fsdp_unit *[]){net->toy.unit[i - 1], net->inner[i - 1]}, 2,
                                        err));
    for (int step = 0; step < 2; step++) {
        FSDP_TRY(forward(net, err));
        FSDP_TRY(expect_events(rank,
                               "U root|U L0|U L0.w1|R L0.w1|R L0|U L1|U L1.w1|R L1.w1|R L1|"
                               "U L2|U L2.w1|R L2.w1|R L2|R root",
                               err));
        rank->notes_states = true;
        FSDP_TRY(recompute(net, err));
        rank->notes_states = false;
        FSDP_TRY(
            expect_events(rank,
                          "U root pre_backward|U L2 pre_backward|U L1 pre_backward|"
                          "U L1.w1 pre_backward|U L2.w1 forward|R L2.w1|post L2.w1|R L2|post L2|"
                          "U L0 pre_backward|U L0.w1 pre_backward|R L1.w1|post L1.w1|R L1|post L1|"
                          "R L0.w1|post L0.w1|R L0|post L0|R root|post root",
                          err));
        FSDP_TRY(expect_nothing_gathered(net, err));
    }
    return FSDP_OK;
}

/* --- all ---------------------------------------------------------------------------------------- */

static const scenario scenarios[] = {
    {"C6", 2, 3, FSDP_RESHARD_ALWAYS, count_collectives, false, false},
    {"C6", 2, 3, FSDP_RESHARD_NEVER, count_collectives, false, false},
    {"C6", 2, 3, FSDP_RESHARD_AUTO, count_collectives, false, false},
    {"C6", 2, 3, 2, count_collectives, false, false},
    {"C7", 2, 2, FSDP_RESHARD_NEVER, reshard_by_hand, false, false},
    {"C8", 2, 3, FSDP_RESHARD_NEVER, flip_all_on, false, false},
    {"C8", 2, 3, FSDP_RESHARD_NEVER, flip_root_on, false, false},
    {"C8", 2, 3, FSDP_RESHARD_ALWAYS, flip_all_off, false, false},
    {"C8", 2, 3, FSDP_RESHARD_ALWAYS, flip_root_off, false, false},
    {"C11", 1, 3, FSDP_RESHARD_ALWAYS, prefetch_always, false, false},
    {"C11", 1, 3, FSDP_RESHARD_AUTO, prefetch_auto, false, false},
    {"C11", 1, 3, FSDP_RESHARD_NEVER, prefetch_never, false, false},
    {"C11-recompute", 1, 3, FSDP_RESHARD_ALWAYS, recompute_each, false, false},
    {"C11-recompute", 1, 3, FSDP_RESHARD_AUTO, recompute_each, false, false},
    {"C11-recompute", 1, 3, FSDP_RESHARD_NEVER, recompute_each, false, false},
    {"C12", 1, 3, FSDP_RESHARD_ALWAYS, twice_always, false, false},
    {"C12", 1, 3, FSDP_RESHARD_AUTO, twice_auto, false, false},
    {"C12", 1, 3, FSDP_RESHARD_NEVER, twice_never, false, false},
    {"C13", 1, 3, FSDP_RESHARD_ALWAYS, split_heads, true, false},
    {"C14", 1, 4, FSDP_RESHARD_ALWAYS, explicit_forward, false, false},
    {"C15", 1, 4, FSDP_RESHARD_ALWAYS, explicit_backward, false, false},
    {"C15-nested", 1, 3, FSDP_RESHARD_ALWAYS, prefetch_nested, false, true},
    {"C15-nested", 4, 3, 2, prefetch_nested, false, true},
};

enum { SCENARIOS = sizeof scenarios / sizeof *scenarios };

const char *order_scenario_at(int i)
{
    int n = 0;
    for (int k = 0; k < SCENARIOS; k++)
        if ((k == 0 || strcmp(scenarios[k].name, scenarios[k - 1].name) != 0) && n++ == i)
            return scenarios[k].name;
    return NULL;
}

static bool fits(const scenario *what, const char *name, int ranks)
{
    return strcmp(what->name, name) == 0 && ranks >= what->least_ranks;
}

bool order_scenario_fits(const char *name, int ranks)
{
    bool has_any = false;
    for (int i = 0; i < SCENARIOS; i++)
        has_any = has_any || fits(&scenarios[i], name, ranks);
    return has_any;
}

fsdp_status order_scenario_run(const char *name, const worlds_setup *setup, fsdp_error *err)
{
    for (int i = 0; i < SCENARIOS; i++)
        if (fits(&scenarios[i], name, setup->ranks))
            FSDP_TRY(run_worlds_within(setup, run_scenario, (void *)&scenarios[i], NULL, err));
    return FSDP_OK;
}
