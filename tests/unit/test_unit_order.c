/*
 * In which order units gather, give back and reduce: the scenarios that PyTorch's own tests fix, C6 to C8 and
 * C11 to C15, on two ranks that are threads, or four where groups of two are to be a part of them. "U" is
 * unshard, "R" reshard, "post" a post_backward that has returned.
 */
#include "tests/support/worlds.h"
#include <fsdp/optim.h>

#include <criterion/criterion.h>
#include <stdio.h>
#include <string.h>

enum { MOST_LAYERS = 4 };

/* Layers of one weight each, maybe a unit inside each, and a weight of the root's own. */
typedef struct layers_net {
    int count;
    fsdp_mesh *mesh;
    fsdp_model *model;
    fsdp_root *root;
    fsdp_param *weight[MOST_LAYERS], *inner_weight[MOST_LAYERS], *own;
    fsdp_unit *unit[MOST_LAYERS], *inner[MOST_LAYERS];
} layers_net;

typedef struct scenario {
    int layers, reshard;
    bool root_has_weight;
    fsdp_status (*body)(world_rank *rank, layers_net *net, fsdp_error *err);
    int ranks; /* 0: two */
    bool has_inner;
} scenario;

static fsdp_status add_unit(layers_net *net, const char *name, const fsdp_unit_opts *opts,
                            fsdp_param **weight_out, fsdp_unit **unit_out, fsdp_error *err)
{
    char weight[24];
    snprintf(weight, sizeof weight, "%s.w", name);
    FSDP_TRY(
        fsdp_model_add_param(net->model, weight, FSDP_F32, 2, (int64_t[]){3, 2}, weight_out, err));
    return fsdp_unit_create(net->model, name, opts, unit_out, err);
}

static fsdp_status build(layers_net *net, world_rank *rank, const scenario *what, fsdp_error *err)
{
    int64_t size = fsdp_world_size(rank->world);
    FSDP_TRY(fsdp_world_mesh(rank->world, 1, &size, (const char *[]){"dp"}, &net->mesh, err));
    FSDP_TRY(fsdp_model_create(rank->world, &net->model, err));
    fsdp_unit_opts opts = fsdp_unit_opts_default(net->mesh);
    opts.reshard_after_forward = what->reshard;
    if (what->root_has_weight)
        FSDP_TRY(
            fsdp_model_add_param(net->model, "own", FSDP_F32, 1, (int64_t[]){3}, &net->own, err));
    for (net->count = 0; net->count < what->layers; net->count++) {
        int i = net->count;
        char name[16];
        snprintf(name, sizeof name, "L%d.w1", i);
        if (what->has_inner)
            FSDP_TRY(add_unit(net, name, &opts, &net->inner_weight[i], &net->inner[i], err));
        name[2] = '\0';
        FSDP_TRY(add_unit(net, name, &opts, &net->weight[i], &net->unit[i], err));
    }
    return fsdp_root_create(net->model, &opts, &net->root, err);
}

static fsdp_status run_scenario(world_rank *rank, fsdp_error *err)
{
    const scenario *what = rank->user;
    layers_net net = {0};
    fsdp_status status = build(&net, rank, what, err);
    if (status == FSDP_OK)
        status = what->body(rank, &net, err);
    fsdp_root_free(net.root);
    fsdp_model_free(net.model);
    fsdp_mesh_free(net.mesh);
    return status;
}

static void expect_scenario(scenario what)
{
    static const char *const devices[] = {"cpu", "cpu-async"};
    for (size_t i = 0; i < 2; i++) {
        fsdp_error err = {0};
        cr_assert_eq(
            run_worlds(what.ranks > 0 ? what.ranks : 2, devices[i], run_scenario, &what, &err),
            FSDP_OK, "%s: %s", devices[i], err.text);
    }
}

/* Events since the last time. A failed cr_assert in a thread would end it without the others. */
static fsdp_status expect(world_rank *rank, const char *events, fsdp_error *err)
{
    const char *seen = rank->events.data ? rank->events.data : "";
    fsdp_status status = FSDP_OK;
    if (strcmp(seen, events) != 0)
        status = fsdp_fail(err, FSDP_ERR_INTERNAL, "'%s' were expected, '%s' came", events, seen);
    forget_events(rank);
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

static fsdp_status forward_layer(layers_net *net, int i, fsdp_error *err)
{
    FSDP_TRY(fsdp_unit_pre_forward(net->unit[i], err));
    if (net->inner[i]) {
        FSDP_TRY(fsdp_unit_pre_forward(net->inner[i], err));
        FSDP_TRY(fsdp_unit_post_forward(net->inner[i], err));
    }
    return fsdp_unit_post_forward(net->unit[i], err);
}

static fsdp_status forward(layers_net *net, fsdp_error *err)
{
    FSDP_TRY(fsdp_root_begin_forward(net->root, err));
    FSDP_TRY(fsdp_unit_pre_forward(fsdp_root_unit(net->root), err));
    for (int i = 0; i < net->count; i++)
        FSDP_TRY(forward_layer(net, i, err));
    FSDP_TRY(fsdp_unit_post_forward(fsdp_root_unit(net->root), err));
    return fsdp_root_end_forward(net->root, err);
}

static fsdp_status touch(fsdp_param *param, fsdp_error *err)
{
    return fsdp_param_grad(param)
               ? FSDP_OK
               : fsdp_fail(err, FSDP_ERR_INTERNAL, "'%s' has no gradient", fsdp_param_name(param));
}

static fsdp_status backward_layer(layers_net *net, int i, fsdp_error *err)
{
    FSDP_TRY(fsdp_unit_pre_backward(net->unit[i], err));
    FSDP_TRY(touch(net->weight[i], err));
    return fsdp_unit_post_backward(net->unit[i], err);
}

static fsdp_status backward(layers_net *net, fsdp_error *err)
{
    FSDP_TRY(fsdp_unit_pre_backward(fsdp_root_unit(net->root), err));
    if (net->own)
        FSDP_TRY(touch(net->own, err));
    for (int i = net->count - 1; i >= 0; i--)
        FSDP_TRY(backward_layer(net, i, err));
    return fsdp_root_end_backward(net->root, err);
}

/* --- C6, C7, C8: how many collectives ---------------------------------------------------------- */

/* One of that kind in every unit, of groups of that size, and no other. */
static fsdp_status expect_one_each(world_rank *rank, const layers_net *net, const char *kind,
                                   int size, fsdp_error *err)
{
    char event[32];
    FSDP_TRY(expect_count(rank, kind, (int)fsdp_root_unit_count(net->root), err));
    for (size_t i = 0; i < fsdp_root_unit_count(net->root); i++) {
        snprintf(event, sizeof event, "%s %s/%d", kind,
                 fsdp_unit_name(fsdp_root_unit_at(net->root, i)), size);
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
        FSDP_TRY(expect_count(rank, "AG L", net->count, err));
    else
        FSDP_TRY(expect_one_each(rank, net, "AG", neighbours, err));
    if (what->reshard == FSDP_RESHARD_AUTO)
        FSDP_TRY(expect_count(rank, "AG root", 0, err));
    FSDP_TRY(expect_one_each(rank, net, "RS", ranks, err));
    return expect_count(rank, "AR", 0, err);
}

Test(unit_order, every_mode_has_its_number_of_collectives)
{
    static const int modes[] = {FSDP_RESHARD_ALWAYS, FSDP_RESHARD_NEVER, FSDP_RESHARD_AUTO, 2};
    for (size_t i = 0; i < sizeof modes / sizeof *modes; i++)
        for (int ranks = 2; ranks <= 4; ranks += 2)
            expect_scenario((scenario){3, modes[i], true, count_collectives, ranks, false});
}

static fsdp_status reshard_by_hand(world_rank *rank, layers_net *net, fsdp_error *err)
{
    rank->notes_collectives = true;
    FSDP_TRY(forward(net, err));
    for (size_t i = 0; i < fsdp_root_unit_count(net->root); i++)
        FSDP_TRY(fsdp_unit_reshard(fsdp_root_unit_at(net->root, i), err));
    forget_events(rank);
    FSDP_TRY(backward(net, err));
    FSDP_TRY(expect_count(rank, "AG", net->count + 1, err));
    return expect_count(rank, "RS", net->count + 1, err);
}

Test(unit_order, what_was_resharded_by_hand_is_gathered_in_backward)
{
    expect_scenario((scenario){2, FSDP_RESHARD_NEVER, true, reshard_by_hand, 0, false});
}

static fsdp_status flip(world_rank *rank, layers_net *net, bool to, bool recurse, int gathers,
                        fsdp_error *err)
{
    fsdp_unit_set_reshard_after_forward(fsdp_root_unit(net->root), to, recurse);
    rank->notes_collectives = true;
    FSDP_TRY(forward(net, err));
    forget_events(rank);
    FSDP_TRY(backward(net, err));
    FSDP_TRY(expect_count(rank, "AG", gathers, err));
    return expect_count(rank, "RS", net->count + 1, err);
}

static fsdp_status flip_all_on(world_rank *rank, layers_net *net, fsdp_error *err)
{
    return flip(rank, net, true, true, net->count + 1, err);
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
    return flip(rank, net, false, false, net->count, err);
}

Test(unit_order, the_setter_flips_one_unit_or_all_below)
{
    expect_scenario((scenario){3, FSDP_RESHARD_NEVER, true, flip_all_on, 0, false});
    expect_scenario((scenario){3, FSDP_RESHARD_NEVER, true, flip_root_on, 0, false});
    expect_scenario((scenario){3, FSDP_RESHARD_ALWAYS, true, flip_all_off, 0, false});
    expect_scenario((scenario){3, FSDP_RESHARD_ALWAYS, true, flip_root_off, 0, false});
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
        FSDP_TRY(expect(rank, forward_always, err));
        FSDP_TRY(backward(net, err));
        FSDP_TRY(expect(rank, backward_always, err));
    }
    return FSDP_OK;
}

static fsdp_status prefetch_auto(world_rank *rank, layers_net *net, fsdp_error *err)
{
    for (int i = 0; i < 3; i++) {
        FSDP_TRY(forward(net, err));
        FSDP_TRY(expect(rank, "U root|U L0|R L0|U L1|R L1|U L2|R L2", err));
        FSDP_TRY(backward(net, err));
        FSDP_TRY(expect(rank, backward_auto, err));
    }
    return FSDP_OK;
}

static fsdp_status prefetch_never(world_rank *rank, layers_net *net, fsdp_error *err)
{
    for (int i = 0; i < 3; i++) {
        FSDP_TRY(forward(net, err));
        FSDP_TRY(expect(rank, "U root|U L0|U L1|U L2", err));
        FSDP_TRY(backward(net, err));
        FSDP_TRY(expect(rank, backward_never, err));
    }
    return FSDP_OK;
}

Test(unit_order, backward_gathers_the_unit_before)
{
    expect_scenario((scenario){3, FSDP_RESHARD_ALWAYS, true, prefetch_always, 0, false});
    expect_scenario((scenario){3, FSDP_RESHARD_AUTO, true, prefetch_auto, 0, false});
    expect_scenario((scenario){3, FSDP_RESHARD_NEVER, true, prefetch_never, 0, false});
}

static fsdp_status recompute_layer(layers_net *net, int i, fsdp_error *err)
{
    FSDP_TRY(fsdp_unit_pre_backward(net->unit[i], err));
    FSDP_TRY(forward_layer(net, i, err)); /* activations are computed again */
    if (net->inner[i]) {
        FSDP_TRY(fsdp_unit_pre_backward(net->inner[i], err));
        FSDP_TRY(touch(net->inner_weight[i], err));
        FSDP_TRY(fsdp_unit_post_backward(net->inner[i], err));
    }
    FSDP_TRY(touch(net->weight[i], err));
    return fsdp_unit_post_backward(net->unit[i], err);
}

static fsdp_status recompute(layers_net *net, fsdp_error *err)
{
    FSDP_TRY(fsdp_unit_pre_backward(fsdp_root_unit(net->root), err));
    for (int i = net->count - 1; i >= 0; i--)
        FSDP_TRY(recompute_layer(net, i, err));
    return fsdp_root_end_backward(net->root, err);
}

static fsdp_status recompute_each(world_rank *rank, layers_net *net, fsdp_error *err)
{
    const scenario *what = rank->user;
    for (int i = 0; i < 3; i++) {
        FSDP_TRY(forward(net, err));
        forget_events(rank);
        FSDP_TRY(recompute(net, err));
        FSDP_TRY(expect(rank,
                        what->reshard == FSDP_RESHARD_ALWAYS ? backward_always
                        : what->reshard == FSDP_RESHARD_AUTO ? backward_auto
                                                             : backward_never,
                        err));
    }
    return FSDP_OK;
}

Test(unit_order, computing_again_changes_no_order)
{
    for (int reshard = FSDP_RESHARD_AUTO; reshard <= FSDP_RESHARD_ALWAYS; reshard++)
        expect_scenario((scenario){3, reshard, true, recompute_each, 0, false});
}

/* Events of two forwards and one backward over both. */
static fsdp_status play_twice(world_rank *rank, layers_net *net, const char *forward_again,
                              const char *backwards, fsdp_error *err)
{
    FSDP_TRY(forward(net, err));
    forget_events(rank);
    FSDP_TRY(forward(net, err));
    FSDP_TRY(expect(rank, forward_again, err));
    for (int pass = 0; pass < 2; pass++) {
        FSDP_TRY(fsdp_unit_pre_backward(fsdp_root_unit(net->root), err));
        for (int i = net->count - 1; i >= 0; i--)
            FSDP_TRY(backward_layer(net, i, err));
    }
    FSDP_TRY(fsdp_root_end_backward(net->root, err));
    return expect(rank, backwards, err);
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

/* What was given back in the first half is gathered in the second. */
static fsdp_status twice_never(world_rank *rank, layers_net *net, fsdp_error *err)
{
    return play_twice(rank, net, "",
                      "R L2|post L2|R L1|post L1|R L0|post L0|" LAYERS_BACKWARD "R root|post root",
                      err);
}

Test(unit_order, two_forwards_and_one_backward_play_the_layers_twice)
{
    expect_scenario((scenario){3, FSDP_RESHARD_ALWAYS, true, twice_always, 0, false});
    expect_scenario((scenario){3, FSDP_RESHARD_AUTO, true, twice_auto, 0, false});
    expect_scenario((scenario){3, FSDP_RESHARD_NEVER, true, twice_never, 0, false});
}

/* --- C13: heads that are not used in one backward ------------------------------------------------ */

static fsdp_status split_heads(world_rank *rank, layers_net *net, fsdp_error *err)
{
    FSDP_TRY(forward(net, err)); /* L0 is shared, L1 and L2 are heads */
    forget_events(rank);
    fsdp_root_set_is_last_backward(net->root, false);
    FSDP_TRY(backward_layer(net, 2, err));
    FSDP_TRY(backward_layer(net, 0, err));
    FSDP_TRY(fsdp_root_end_backward(net->root, err));
    FSDP_TRY(expect(rank, "U L2|U L1|R L2|post L2|U L0|R L0|post L0|post L1", err));
    fsdp_root_set_is_last_backward(net->root, true);
    FSDP_TRY(backward_layer(net, 1, err));
    FSDP_TRY(backward_layer(net, 0, err));
    FSDP_TRY(fsdp_root_end_backward(net->root, err));
    return expect(rank, "U L0|R L1|post L1|R L0|post L0|post L2", err);
}

Test(unit_order, a_head_that_was_gathered_by_mistake_is_used_later)
{
    expect_scenario((scenario){3, FSDP_RESHARD_ALWAYS, false, split_heads, 0, false});
}

/* --- C14, C15: explicit prefetch ----------------------------------------------------------------- */

static fsdp_status prefetch_forward(layers_net *net, int depth, fsdp_error *err)
{
    for (int i = 0; i < net->count; i++) {
        size_t n = 0;
        fsdp_unit *next[MOST_LAYERS];
        for (int d = 1; d <= depth && i + d < net->count; d++)
            next[n++] = net->unit[i + d];
        FSDP_TRY(fsdp_unit_set_modules_to_forward_prefetch(net->unit[i], next, n, err));
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
    FSDP_TRY(expect(rank, "U root|U L0|U L1|R L0|U L2|R L1|U L3|R L2|R L3|R root", err));
    FSDP_TRY(backward(net, err));
    FSDP_TRY(expect(rank, backward_four, err));
    FSDP_TRY(prefetch_forward(net, 2, err));
    FSDP_TRY(forward(net, err));
    FSDP_TRY(expect(rank, "U root|U L0|U L1|U L2|R L0|U L3|R L1|R L2|R L3|R root", err));
    FSDP_TRY(backward(net, err));
    return expect(rank, backward_four, err);
}

Test(unit_order, forward_gathers_what_it_was_told_to)
{
    expect_scenario((scenario){4, FSDP_RESHARD_ALWAYS, true, explicit_forward, 0, false});
}

static fsdp_status prefetch_backward(layers_net *net, int depth, fsdp_error *err)
{
    for (int i = 0; i < net->count; i++) {
        size_t n = 0;
        fsdp_unit *before[MOST_LAYERS];
        for (int d = 1; d <= depth && i - d >= 0; d++)
            before[n++] = net->unit[i - d];
        FSDP_TRY(fsdp_unit_set_modules_to_backward_prefetch(net->unit[i], before, n, err));
    }
    return FSDP_OK;
}

static fsdp_status explicit_backward(world_rank *rank, layers_net *net, fsdp_error *err)
{
    FSDP_TRY(prefetch_backward(net, 1, err));
    FSDP_TRY(forward(net, err));
    FSDP_TRY(expect(rank, "U root|U L0|R L0|U L1|R L1|U L2|R L2|U L3|R L3|R root", err));
    FSDP_TRY(backward(net, err));
    FSDP_TRY(expect(rank, backward_four, err));
    FSDP_TRY(prefetch_backward(net, 2, err));
    FSDP_TRY(forward(net, err));
    forget_events(rank);
    FSDP_TRY(backward(net, err));
    return expect(rank,
                  "U root|U L3|U L2|U L1|R L3|post L3|U L0|R L2|post L2|R L1|post L1|R L0|post "
                  "L0|R root|post root",
                  err);
}

Test(unit_order, backward_gathers_what_it_was_told_to)
{
    expect_scenario((scenario){4, FSDP_RESHARD_ALWAYS, true, explicit_backward, 0, false});
}

static fsdp_status expect_nothing_gathered(const layers_net *net, fsdp_error *err)
{
    const fsdp_memory memory = fsdp_root_memory(net->root);
    int64_t left = memory.now[FSDP_MEMORY_UNSHARDED] + memory.now[FSDP_MEMORY_ALL_GATHER];
    return left == 0 ? FSDP_OK
                     : fsdp_fail(err, FSDP_ERR_INTERNAL, "%lld bytes are left", (long long)left);
}

/* A unit inside each layer, and activations that are computed again: what was named is gathered before that,
 * what was not, by that. */
static fsdp_status prefetch_nested(world_rank *rank, layers_net *net, fsdp_error *err)
{
    for (int i = 1; i < net->count; i++)
        FSDP_TRY(fsdp_unit_set_modules_to_backward_prefetch(
            net->unit[i], (fsdp_unit *[]){net->unit[i - 1], net->inner[i - 1]}, 2, err));
    for (int step = 0; step < 2; step++) {
        FSDP_TRY(forward(net, err));
        FSDP_TRY(expect(rank,
                        "U root|U L0|U L0.w1|R L0.w1|R L0|U L1|U L1.w1|R L1.w1|R L1|"
                        "U L2|U L2.w1|R L2.w1|R L2|R root",
                        err));
        rank->notes_states = true;
        FSDP_TRY(recompute(net, err));
        rank->notes_states = false;
        FSDP_TRY(expect(rank,
                        "U root pre_backward|U L2 pre_backward|U L1 pre_backward|"
                        "U L1.w1 pre_backward|U L2.w1 forward|R L2.w1|post L2.w1|R L2|post L2|"
                        "U L0 pre_backward|U L0.w1 pre_backward|R L1.w1|post L1.w1|R L1|post L1|"
                        "R L0.w1|post L0.w1|R L0|post L0|R root|post root",
                        err));
        FSDP_TRY(expect_nothing_gathered(net, err));
    }
    return FSDP_OK;
}

Test(unit_order, units_inside_of_what_is_computed_again_are_gathered_ahead_or_by_it)
{
    expect_scenario((scenario){3, FSDP_RESHARD_ALWAYS, true, prefetch_nested, 0, true});
    expect_scenario((scenario){3, 2, true, prefetch_nested, 4, true});
}

static fsdp_status expect_refused(fsdp_status status, fsdp_error *told, const char *words,
                                  fsdp_error *err)
{
    bool is_told = status == FSDP_ERR_USAGE && strstr(told->text, words);
    fsdp_status result = FSDP_OK;
    if (!is_told)
        result = fsdp_fail(err, FSDP_ERR_INTERNAL, "'%s', not '%s', was told", told->text, words);
    *told = (fsdp_error){0};
    return result;
}

static fsdp_status out_of_order(world_rank *rank, layers_net *net, fsdp_error *err)
{
    fsdp_error told = {0};
    (void)rank;
    FSDP_TRY(expect_refused(fsdp_unit_pre_forward(NULL, &told), &told, "without a unit", err));
    FSDP_TRY(expect_refused(fsdp_unit_pre_forward(net->unit[0], &told), &told,
                            "pre_forward of unit L0 came before fsdp_root_begin_forward", err));
    FSDP_TRY(fsdp_root_begin_forward(net->root, err));
    FSDP_TRY(expect_refused(fsdp_unit_pre_backward(net->unit[0], &told), &told,
                            "pre_backward of unit L0 came before fsdp_root_end_forward", err));
    FSDP_TRY(expect_refused(fsdp_root_end_backward(net->root, &told), &told,
                            "end_backward came before fsdp_root_end_forward", err));
    FSDP_TRY(fsdp_root_end_forward(net->root, err));
    FSDP_TRY(forward(net, err));
    return backward(net, err);
}

Test(unit_order, hooks_out_of_order_are_refused_and_break_nothing)
{
    expect_scenario((scenario){2, FSDP_RESHARD_ALWAYS, true, out_of_order, 0, false});
}
