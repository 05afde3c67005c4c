/*
 * In which order units gather, give back and reduce: the scenarios that PyTorch's own tests fix, C6 to C8 and
 * C11 to C16, on two ranks that are threads. "U" is unshard, "R" reshard, "post" a post_backward that has
 * returned.
 */
#include "tests/support/worlds.h"
#include <fsdp/optim.h>

#include <criterion/criterion.h>
#include <stdio.h>
#include <string.h>

enum { MOST_LAYERS = 4 };

/* Layers of one weight each, and a weight of the root's own. */
typedef struct layers_net {
    int count;
    bool root_has_weight;
    fsdp_mesh *mesh;
    fsdp_model *model;
    fsdp_root *root;
    fsdp_param *weight[MOST_LAYERS], *own;
    fsdp_unit *unit[MOST_LAYERS];
} layers_net;

typedef struct scenario {
    int layers, reshard;
    bool root_has_weight;
    fsdp_status (*body)(world_rank *rank, layers_net *net, fsdp_error *err);
} scenario;

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
        snprintf(name, sizeof name, "L%d.w", i);
        FSDP_TRY(fsdp_model_add_param(net->model, name, FSDP_F32, 2, (int64_t[]){3, 2},
                                      &net->weight[i], err));
        name[2] = '\0';
        FSDP_TRY(fsdp_unit_create(net->model, name, &opts, &net->unit[i], err));
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
        cr_assert_eq(run_worlds(2, devices[i], run_scenario, &what, &err), FSDP_OK, "%s: %s",
                     devices[i], err.text);
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

static fsdp_status forward(layers_net *net, fsdp_error *err)
{
    FSDP_TRY(fsdp_root_begin_forward(net->root, err));
    FSDP_TRY(fsdp_unit_pre_forward(fsdp_root_unit(net->root), err));
    for (int i = 0; i < net->count; i++) {
        FSDP_TRY(fsdp_unit_pre_forward(net->unit[i], err));
        FSDP_TRY(fsdp_unit_post_forward(net->unit[i], err));
    }
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

static fsdp_status count_collectives(world_rank *rank, layers_net *net, fsdp_error *err)
{
    const scenario *what = rank->user;
    bool keeps = what->reshard == FSDP_RESHARD_NEVER;
    int units = net->count + 1, backward_gathers = keeps ? 0 : units;
    if (what->reshard == FSDP_RESHARD_AUTO)
        backward_gathers = units - 1;
    rank->notes_collectives = true;
    FSDP_TRY(forward(net, err));
    FSDP_TRY(expect_count(rank, "AG", units, err));
    FSDP_TRY(expect_count(rank, "RS", 0, err));
    forget_events(rank);
    FSDP_TRY(backward(net, err));
    FSDP_TRY(expect_count(rank, "AG", backward_gathers, err));
    FSDP_TRY(expect_count(rank, "RS", units, err));
    return expect_count(rank, "AR", 0, err);
}

Test(unit_order, every_mode_has_its_number_of_collectives)
{
    static const int modes[] = {FSDP_RESHARD_ALWAYS, FSDP_RESHARD_NEVER, FSDP_RESHARD_AUTO, 2};
    for (size_t i = 0; i < sizeof modes / sizeof *modes; i++)
        expect_scenario((scenario){3, modes[i], true, count_collectives});
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
    expect_scenario((scenario){2, FSDP_RESHARD_NEVER, true, reshard_by_hand});
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
    expect_scenario((scenario){3, FSDP_RESHARD_NEVER, true, flip_all_on});
    expect_scenario((scenario){3, FSDP_RESHARD_NEVER, true, flip_root_on});
    expect_scenario((scenario){3, FSDP_RESHARD_ALWAYS, true, flip_all_off});
    expect_scenario((scenario){3, FSDP_RESHARD_ALWAYS, true, flip_root_off});
}

/* --- C11, C12: implicit prefetch ---------------------------------------------------------------- */

static const char forward_always[] = "U root|U L0|R L0|U L1|R L1|U L2|R L2|R root";
static const char backward_always[] =
    "U root|U L2|U L1|R L2|post L2|U L0|R L1|post L1|R L0|post L0|R root|post root";

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
        FSDP_TRY(expect(rank, backward_always + strlen("U root|"), err));
    }
    return FSDP_OK;
}

static fsdp_status prefetch_never(world_rank *rank, layers_net *net, fsdp_error *err)
{
    for (int i = 0; i < 3; i++) {
        FSDP_TRY(forward(net, err));
        FSDP_TRY(expect(rank, "U root|U L0|U L1|U L2", err));
        FSDP_TRY(backward(net, err));
        FSDP_TRY(expect(rank, "R L2|post L2|R L1|post L1|R L0|post L0|R root|post root", err));
    }
    return FSDP_OK;
}

Test(unit_order, backward_gathers_the_unit_before)
{
    expect_scenario((scenario){3, FSDP_RESHARD_ALWAYS, true, prefetch_always});
    expect_scenario((scenario){3, FSDP_RESHARD_AUTO, true, prefetch_auto});
    expect_scenario((scenario){3, FSDP_RESHARD_NEVER, true, prefetch_never});
}

static fsdp_status recompute(world_rank *rank, layers_net *net, fsdp_error *err)
{
    FSDP_TRY(forward(net, err));
    forget_events(rank);
    FSDP_TRY(fsdp_unit_pre_backward(fsdp_root_unit(net->root), err));
    for (int i = net->count - 1; i >= 0; i--) {
        FSDP_TRY(fsdp_unit_pre_backward(net->unit[i], err));
        FSDP_TRY(fsdp_unit_pre_forward(net->unit[i], err)); /* activations are computed again */
        FSDP_TRY(fsdp_unit_post_forward(net->unit[i], err));
        FSDP_TRY(touch(net->weight[i], err));
        FSDP_TRY(fsdp_unit_post_backward(net->unit[i], err));
    }
    FSDP_TRY(fsdp_root_end_backward(net->root, err));
    return expect(rank, backward_always, err);
}

Test(unit_order, computing_again_changes_no_order)
{
    expect_scenario((scenario){3, FSDP_RESHARD_ALWAYS, true, recompute});
}

static fsdp_status two_forwards(world_rank *rank, layers_net *net, fsdp_error *err)
{
    FSDP_TRY(forward(net, err));
    forget_events(rank);
    FSDP_TRY(forward(net, err));
    FSDP_TRY(expect(rank, "U L0|R L0|U L1|R L1|U L2|R L2", err));
    for (int pass = 0; pass < 2; pass++) {
        FSDP_TRY(fsdp_unit_pre_backward(fsdp_root_unit(net->root), err));
        for (int i = net->count - 1; i >= 0; i--)
            FSDP_TRY(backward_layer(net, i, err));
    }
    FSDP_TRY(fsdp_root_end_backward(net->root, err));
    return expect(rank,
                  "U L2|U L1|R L2|post L2|U L0|R L1|post L1|R L0|post L0|"
                  "U L2|U L1|R L2|post L2|U L0|R L1|post L1|R L0|post L0|R root|post root",
                  err);
}

Test(unit_order, two_forwards_and_one_backward_play_the_layers_twice)
{
    expect_scenario((scenario){3, FSDP_RESHARD_AUTO, true, two_forwards});
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
    expect_scenario((scenario){3, FSDP_RESHARD_ALWAYS, false, split_heads});
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
    expect_scenario((scenario){4, FSDP_RESHARD_ALWAYS, true, explicit_forward});
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
    expect_scenario((scenario){4, FSDP_RESHARD_ALWAYS, true, explicit_backward});
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
    expect_scenario((scenario){2, FSDP_RESHARD_ALWAYS, true, out_of_order});
}
