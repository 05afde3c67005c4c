/*
 * Units of several groups (parameters of several meshes), and of several members of which only some run. "U"
 * is unshard, "AG x/4" a gather of unit x over 4 ranks, "R" reshard, "RS" a reduce-scatter, "post" a
 * post_backward that has returned.
 */
#include "tests/unit/runtime/expect_toy.h"

enum { UNITS = 3, RANKS = 4 };

static void expect_ok(toy_body body)
{
    expect_toy_on_line(RANKS, NULL, body);
}

static fsdp_status expect(toy *net, const char *events, fsdp_error *err)
{
    return expect_events(net->rank, events, err);
}

/* --- groups ----------------------------------------------------------------------------------- */

static void place_expert(void *user, const fsdp_param *param, fsdp_param_place *place)
{
    const toy *net = user;
    if (strstr(fsdp_param_name(param), "expert"))
        place->mesh = net->other_mesh;
}

/* Units "0", "1", "2" of a dense weight over all ranks, and an expert over pairs of them. */
static fsdp_status build_experts(toy *net, int reshard, fsdp_error *err)
{
    FSDP_TRY(fsdp_world_mesh(net->world, 2, (int64_t[]){2, 2}, (const char *[]){"rep", "shard"},
                             &net->other_mesh, err));
    net->opts.placement = place_expert;
    net->opts.context = net;
    net->opts.reshard_after_forward = reshard;
    for (net->layers = 0; net->layers < UNITS; net->layers++) {
        char prefix[] = {(char)('0' + net->layers), '\0'}, name[16];
        snprintf(name, sizeof name, "%s.dense", prefix);
        FSDP_TRY(fsdp_model_add(
            net->model,
            &(fsdp_param_spec){.name = name, .dtype = FSDP_F32, .ndim = 1, .shape = (int64_t[]){5}},
            NULL, err));
        snprintf(name, sizeof name, "%s.expert", prefix);
        FSDP_TRY(fsdp_model_add(
            net->model,
            &(fsdp_param_spec){.name = name, .dtype = FSDP_F32, .ndim = 1, .shape = (int64_t[]){3}},
            NULL, err));
        FSDP_TRY(fsdp_unit_create(net->model, prefix, &net->opts, &net->unit[net->layers], err));
    }
    FSDP_TRY(fsdp_root_create(net->model, &net->opts, &net->root, err));
    return fsdp_root_init_uniform(net->root, 1, err);
}

/* As in PyTorch 2.15: a unit's groups are gathered in order; those of the previous unit are prefetched in the
 * order in which backward reduces them, the last one first. */
static fsdp_status order_groups(toy *net, fsdp_error *err)
{
    FSDP_TRY(build_experts(net, FSDP_RESHARD_ALWAYS, err));
    net->rank->notes_collectives = true;
    for (int step = 0; step < 2; step++) {
        FSDP_TRY(toy_forward(net, NULL, err));
        FSDP_TRY(expect(net,
                        "U 0|AG 0/4|U 0|AG 0/2|R 0|R 0|U 1|AG 1/4|U 1|AG 1/2|R 1|R 1|"
                        "U 2|AG 2/4|U 2|AG 2/2|R 2|R 2",
                        err));
        FSDP_TRY(toy_backward(net, NULL, err));
        FSDP_TRY(expect(net,
                        "U 2|AG 2/4|U 2|AG 2/2|U 1|AG 1/2|U 1|AG 1/4|R 2|post 2|R 2|post 2|"
                        "U 0|AG 0/2|U 0|AG 0/4|R 1|post 1|R 1|post 1|R 0|post 0|R 0|post 0",
                        err));
    }
    return FSDP_OK;
}

Test(unit_groups, all_groups_of_the_unit_before_are_gathered_ahead)
{
    expect_ok(order_groups);
}

/* 2 of the 4 ranks of a dense weight gather again; an expert has only 2 ranks. */
static fsdp_status reshard_groups(toy *net, fsdp_error *err)
{
    FSDP_TRY(build_experts(net, 2, err));
    net->rank->notes_collectives = true;
    FSDP_TRY(toy_forward(net, NULL, err));
    forget_events(net->rank);
    FSDP_TRY(toy_backward(net, NULL, err));
    EXPECT(count_events(net->rank, "AG 2/2") == 2 && count_events(net->rank, "AG 2/4") == 0);
    EXPECT(count_events(net->rank, "AG 0/2") == 2 && count_events(net->rank, "AG 0/4") == 0);
    return FSDP_OK;
}

Test(unit_groups, a_number_of_ranks_is_that_of_each_group)
{
    expect_ok(reshard_groups);
}

/* --- members ---------------------------------------------------------------------------------- */

static const char *const members[] = {"norm", "head", "unused"};

static fsdp_status build_members(toy *net, fsdp_error *err)
{
    for (int i = 0; i < 3; i++)
        FSDP_TRY(fsdp_model_add(
            net->model,
            &(fsdp_param_spec){
                .name = members[i], .dtype = FSDP_F32, .ndim = 1, .shape = (int64_t[]){RANKS}},
            &net->weight[i], err));
    FSDP_TRY(fsdp_model_add(
        net->model,
        &(fsdp_param_spec){.name = "own", .dtype = FSDP_F32, .ndim = 1, .shape = (int64_t[]){3}},
        NULL, err));
    FSDP_TRY(fsdp_unit_create_list(net->model, members, 3, &net->opts, &net->unit[0], err));
    return fsdp_root_create(net->model, &net->opts, &net->root, err);
}

static fsdp_status run_members(toy *net, const size_t *which, size_t n, fsdp_error *err)
{
    FSDP_TRY(fsdp_root_begin_forward(net->root, err));
    for (size_t i = 0; i < n; i++) {
        FSDP_TRY(fsdp_unit_member_hook(net->unit[0], which[i], FSDP_HOOK_PRE_FORWARD, err));
        FSDP_TRY(fsdp_unit_member_hook(net->unit[0], which[i], FSDP_HOOK_POST_FORWARD, err));
    }
    return fsdp_root_end_forward(net->root, err);
}

static fsdp_status return_member(toy *net, int member, fsdp_error *err)
{
    FSDP_TRY(fsdp_unit_member_hook(net->unit[0], (size_t)member, FSDP_HOOK_PRE_BACKWARD, err));
    FSDP_TRY(toy_add_ones(net, member, err));
    return fsdp_unit_member_hook(net->unit[0], (size_t)member, FSDP_HOOK_POST_BACKWARD, err);
}

/* A loss in three pieces: each is a call of the head, and reduces by itself. */
static fsdp_status call_one_member_often(toy *net, fsdp_error *err)
{
    FSDP_TRY(build_members(net, err));
    net->rank->notes_collectives = true;
    FSDP_TRY(run_members(net, (size_t[]){1, 1, 1}, 3, err));
    FSDP_TRY(expect(net,
                    "U norm, head, unused|AG norm, head, unused/4|"
                    "R norm, head, unused",
                    err));
    for (int i = 0; i < 3; i++)
        FSDP_TRY(return_member(net, 1, err));
    EXPECT(count_events(net->rank, "RS norm, head, unused/4") == 3);
    FSDP_TRY(fsdp_root_end_backward(net->root, err));
    EXPECT(count_events(net->rank, "RS norm, head, unused/4") == 3);
    const float *grad = fsdp_param_shard_grad(net->weight[1]);
    EXPECT(grad && grad[0] == 3 && !fsdp_param_shard_grad(net->weight[0]));
    return FSDP_OK;
}

Test(unit_groups, several_calls_of_one_member_reduce_as_often)
{
    expect_ok(call_one_member_often);
}

static fsdp_status call_two_of_three(toy *net, fsdp_error *err)
{
    FSDP_TRY(build_members(net, err));
    net->rank->notes_collectives = true;
    FSDP_TRY(run_members(net, (size_t[]){0, 1}, 2, err));
    FSDP_TRY(return_member(net, 1, err));
    EXPECT(count_events(net->rank, "RS") == 0);
    FSDP_TRY(return_member(net, 0, err));
    EXPECT(count_events(net->rank, "RS") == 1);
    FSDP_TRY(fsdp_root_end_backward(net->root, err));
    FSDP_TRY(run_members(net, (size_t[]){0, 1, 2}, 3, err));
    forget_events(net->rank);
    for (int i = 2; i >= 0; i--) {
        EXPECT(count_events(net->rank, "RS") == 0);
        FSDP_TRY(return_member(net, i, err));
    }
    EXPECT(count_events(net->rank, "RS") == 1);
    return fsdp_root_end_backward(net->root, err);
}

Test(unit_groups, the_last_of_those_that_ran_reduces)
{
    expect_ok(call_two_of_three);
}

/* Autograd's order where the inputs need no gradient: root first. */
static fsdp_status leave_it_to_the_end(toy *net, fsdp_error *err)
{
    FSDP_TRY(build_members(net, err));
    FSDP_TRY(run_members(net, (size_t[]){0, 2}, 2, err));
    FSDP_TRY(fsdp_unit_member_hook(net->unit[0], 0, FSDP_HOOK_PRE_BACKWARD, err));
    EXPECT(fsdp_param_grad(net->weight[0]));
    forget_events(net->rank);
    FSDP_TRY(fsdp_root_end_backward(net->root, err));
    return expect(net, "post root|R norm, head, unused|post norm, head, unused", err);
}

Test(unit_groups, what_did_not_return_is_completed_behind_the_root)
{
    expect_ok(leave_it_to_the_end);
}
