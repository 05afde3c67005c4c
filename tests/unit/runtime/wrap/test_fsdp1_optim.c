/*
 * The FSDP1 face: state of optimizers, from one world size and strategy to another, in memory; names and
 * positions; groups; and what happens without memory.
 */
#include "base/core/mem.h"
#include "runtime/optim/optim_internal.h"
#include "tests/unit/runtime/wrap/wrap_state_cases.h"

/* --- from one world size to another, in memory ------------------------------------------------- */

static const char *const stepped[] = {
    "layers.0.weight", "layers.0.bias", "layers.1.weight", "layers.1.bias", "layers.2.weight",
    "layers.2.bias",   "bias"};
static const fsdp_wrap_optim_input all_stepped = {.names = stepped, .count = 7};

static fsdp_status set_optim(toy *net, const fsdp_sd *sd, bool scatters, fsdp_error *err)
{
    fsdp_state_opts opts = whole_optim;
    opts.broadcast_from_rank0 = scatters;
    bool has_none = scatters && fsdp_world_rank(net->world) > 0;
    return fsdp_root_set_state(net->root, has_none ? NULL : sd, &opts, NULL, err);
}

static fsdp_status load_optim(toy *net, const move_case *move, fsdp_error *err)
{
    fsdp_sd *ids = NULL;
    if (move->is_named)
        return set_optim(net, move->from->optim, move->scatters, err);
    FSDP_TRY(fsdp_wrap_rekey_optim_state(move->from->optim, FSDP_WRAP_PARAM_ID, &all_stepped, &ids,
                                         err));
    fsdp_status status = set_optim(net, ids, move->scatters, err);
    fsdp_sd_free(ids);
    return status;
}

static fsdp_status move_in(toy *net, state_case *what, fsdp_error *err)
{
    const move_case *move = (const move_case *)what;
    FSDP_TRY(fsdp_root_set_state(net->root, move->from->model, &whole_model, NULL, err));
    FSDP_TRY(load_optim(net, move, err));
    return compare_with(net, move->from, err);
}

Test(fsdp1_optim, whole_state_loads_into_any_strategy_and_world_size)
{
    for (int orig = 0; orig < 2; orig++) {
        state_case from = trained_by_four(orig);
        for (int strategy = 0; strategy <= FSDP_WRAP_HYBRID_SHARD_ZERO2; strategy++)
            for (int ranks = 1; ranks <= 4; ranks++) {
                if (strategy >= FSDP_WRAP_HYBRID_SHARD && ranks % 2)
                    continue;
                move_case move = {
                    .from = &from, .scatters = (ranks + strategy) % 2, .is_named = ranks > 2};
                move.state = case_of((fsdp_wrap_strategy)strategy, ranks % 2, move_in);
                expect_ranks(ranks, run_case, &move);
            }
        free_state(&from);
    }
}

Test(fsdp1_optim, rank_0_scatters_from_any_place_in_the_mesh)
{
    state_case from = trained_by_four(true);
    for (int strategy = 0; strategy <= FSDP_WRAP_HYBRID_SHARD; strategy++) {
        move_case move = {.from = &from, .scatters = true};
        move.state = case_of((fsdp_wrap_strategy)strategy, true, move_in);
        move.state.setup.is_backwards = true;
        expect_ranks(4, run_case, &move);
    }
    free_state(&from);
}

/* A sharded dict of the same layout is taken run by run. */
static fsdp_status copy_by_runs(toy *net, state_case *what, fsdp_error *err)
{
    const fsdp_state_opts opts = {.cpu_offload = true};
    net_result ignored = {0};
    fsdp_sd *sd = NULL;
    state_case before = {0};
    fsdp_status status = fsdp_root_get_state(net->root, &whole_model, &before.model, err);
    if (status == FSDP_OK)
        status = fsdp_root_get_state(net->root, &whole_optim, &before.optim, err);
    if (status == FSDP_OK)
        status = fsdp_root_get_state(net->root, &opts, &sd, err);
    if (status == FSDP_OK)
        status = net_train(net, &what->setup, 2, 2, &ignored, err);
    if (status == FSDP_OK)
        status = fsdp_root_set_state(net->root, sd, NULL, NULL, err);
    if (status == FSDP_OK)
        status = compare_with(net, &before, err);
    fsdp_sd_free(sd);
    free_state(&before);
    return status;
}

Test(fsdp1_optim, sharded_state_goes_back_where_it_came_from)
{
    for (int strategy = 0; strategy <= FSDP_WRAP_HYBRID_SHARD_ZERO2; strategy++) {
        state_case what = case_of((fsdp_wrap_strategy)strategy, strategy % 2, copy_by_runs);
        what.trained = 2;
        expect_ranks(strategy == 1 ? 3 : 4, run_case, &what);
    }
}

/* --- refused dicts ---------------------------------------------------------------------------- */

static fsdp_status load_nothing(toy *net, state_case *what, fsdp_error *err)
{
    fsdp_error why = {0};
    (void)what;
    FSDP_TRY(expect_refused(fsdp_root_set_state(net->root, NULL, &whole_model, NULL, &why), &why,
                            "there is no state dict", err));
    FSDP_TRY(expect_refused(fsdp_root_set_state(net->root, NULL, &whole_optim, NULL, &why), &why,
                            "there is no state dict", err));
    return expect_refused(fsdp_root_set_state(net->root, NULL, NULL, NULL, &why), &why,
                          "there is no state dict", err);
}

Test(fsdp1_optim, no_dict_is_no_state)
{
    state_case what = case_of(FSDP_WRAP_FULL_SHARD, true, load_nothing);
    expect_ranks(2, run_case, &what);
}

static fsdp_status refuse_steps(toy *net, state_case *what, fsdp_error *err)
{
    fsdp_error why = {0};
    fsdp_sd *full;
    (void)what;
    FSDP_TRY(fsdp_root_get_state(net->root, &whole_optim, &full, err));
    float *step = find(full, "state.layers.1.bias.step")->data;
    *step = 9;
    fsdp_status status = set_optim(net, full, false, &why);
    fsdp_status scattered = set_optim(net, full, true, err);
    fsdp_sd_free(full);
    FSDP_TRY(expect_refused(status, &why, "layers.1.bias' 9 times", err));
    EXPECT(scattered == FSDP_ERR_USAGE);
    *err = (fsdp_error){0};
    return FSDP_OK;
}

Test(fsdp1_optim, one_flat_parameter_has_one_step)
{
    state_case what = case_of(FSDP_WRAP_FULL_SHARD, true, refuse_steps);
    what.trained = 1;
    expect_ranks(2, run_case, &what);
}

/* The last parameter's state does not fit: that of the others stays as it is, too. */
static fsdp_status load_half(toy *net, state_case *what, fsdp_error *err)
{
    fsdp_optim_state *state = &net->optim->states[0];
    fsdp_error why = {0};
    fsdp_sd *sd;
    (void)what;
    FSDP_TRY(fsdp_root_get_state(net->root, &whole_optim, &sd, err));
    fsdp_entry *last = NULL;
    for (size_t i = 0; i < fsdp_sd_count(sd); i++)
        if (strstr(fsdp_sd_at(sd, i)->name, ".exp_avg_sq"))
            last = (fsdp_entry *)fsdp_sd_at(sd, i);
    last->dtype = FSDP_I32;
    state->step = 77;
    fsdp_status status = set_optim(net, sd, false, &why);
    fsdp_sd_free(sd);
    FSDP_TRY(expect_refused(status, &why, "is f32 here and i32 in the state dict", err));
    EXPECT(state->step == 77);
    return FSDP_OK;
}

Test(fsdp1_optim, what_fits_in_part_is_not_loaded_at_all)
{
    state_case what = case_of(FSDP_WRAP_FULL_SHARD, true, load_half);
    what.trained = 1;
    expect_ranks(1, run_case, &what);
}

/* --- names and positions ---------------------------------------------------------------------- */

Test(fsdp1_optim, keys_go_from_names_to_positions_and_back)
{
    const fsdp_wrap_optim_input input = all_stepped;
    fsdp_error err = {0};
    fsdp_sd *ids, *names, *same;
    state_case from = trained_by_four(true);
    cr_assert_eq(fsdp_wrap_rekey_optim_state(from.optim, FSDP_WRAP_PARAM_ID, &input, &ids, &err),
                 FSDP_OK, "%s", err.text);
    const fsdp_entry *entry = find(ids, "state.3.exp_avg"); /* layers.1.bias */
    cr_assert(entry && entry->data == find(from.optim, "state.layers.1.bias.exp_avg")->data);
    const fsdp_value *group = &find(ids, "param_groups")->value.as.list.items[0];
    cr_assert_eq(group->kind, FSDP_VALUE_DICT);
    cr_assert_eq(fsdp_wrap_rekey_optim_state(ids, FSDP_WRAP_PARAM_ID, &input, &same, &err),
                 FSDP_OK);
    cr_assert(are_equal(ids, same));
    cr_assert_eq(fsdp_wrap_rekey_optim_state(ids, FSDP_WRAP_PARAM_NAME, &input, &names, &err),
                 FSDP_OK, "%s", err.text);
    cr_assert_eq(fsdp_sd_count(names), fsdp_sd_count(from.optim));
    for (size_t i = 0; i + 1 < fsdp_sd_count(names); i++)
        cr_assert_eq(find(from.optim, fsdp_sd_at(names, i)->name)->data,
                     fsdp_sd_at(names, i)->data);
    fsdp_sd_free(ids);
    fsdp_sd_free(names);
    fsdp_sd_free(same);
    free_state(&from);
}

static fsdp_sd *dict_of(const char *const *names, size_t n)
{
    fsdp_error err = {0};
    fsdp_sd *sd;
    cr_assert_eq(fsdp_sd_create(&sd, &err), FSDP_OK);
    for (size_t i = 0; i < n; i++) {
        const fsdp_value value = fsdp_value_i64((int64_t)i);
        cr_assert_eq(fsdp_sd_add_value(sd, names[i], strlen(names[i]), &value, &err), FSDP_OK);
    }
    return sd;
}

static void expect_rekeyed(fsdp_sd *sd, const fsdp_wrap_optim_input *input, fsdp_wrap_key_type type,
                           const char *names, const char *reason)
{
    fsdp_error err = {0};
    fsdp_sd *out = NULL;
    fsdp_text got = {0};
    fsdp_status status = fsdp_wrap_rekey_optim_state(sd, type, input, &out, &err);
    cr_assert_eq(status, reason ? FSDP_ERR_USAGE : FSDP_OK, "%s", err.text);
    if (reason)
        cr_assert(strstr(err.text, reason), "%s", err.text);
    for (size_t i = 0; !reason && i < fsdp_sd_count(out); i++)
        fsdp_text_addf(&got, "%s ", fsdp_sd_at(out, i)->name);
    if (!reason)
        cr_assert_str_eq(got.data, names);
    fsdp_text_release(&got);
    fsdp_sd_free(out);
    fsdp_sd_free(sd);
}

/* Modules of a sequence are numbers, and one name may begin another. */
Test(fsdp1_optim, the_longest_known_name_is_the_key)
{
    const fsdp_wrap_optim_input input = {
        .names = (const char *const[]){"0.weight", "0", "0.weight.x"}, .count = 3};
    expect_rekeyed(dict_of((const char *const[]){"state.0.weight.step", "state.0.weight.x.step",
                                                 "state.gone.step", "other"},
                           4),
                   &input, FSDP_WRAP_PARAM_ID, "state.0.step state.2.step other ", NULL);
    expect_rekeyed(dict_of((const char *const[]){"state.2.step", "state.1.deep.step"}, 2), &input,
                   FSDP_WRAP_PARAM_NAME, "state.0.weight.x.step state.0.deep.step ", NULL);
    expect_rekeyed(dict_of((const char *const[]){"state.2.step", "state.0.weight.step"}, 2), &input,
                   FSDP_WRAP_PARAM_NAME, NULL, "some keys are names");
    expect_rekeyed(dict_of((const char *const[]){"state.2x.step", "state.2", "state.0.step"}, 3),
                   &input, FSDP_WRAP_PARAM_ID, "state.1.step ", NULL);
    expect_rekeyed(dict_of((const char *const[]){"state.7.step"}, 1), &input, FSDP_WRAP_PARAM_NAME,
                   NULL, "parameter 7");
}

/* An optimizer elsewhere was given its parameters backwards: its numbers become names again. */
static fsdp_status load_by_position(toy *net, state_case *what, fsdp_error *err)
{
    const char *backwards[7];
    for (int i = 0; i < 7; i++)
        backwards[i] = stepped[6 - i];
    const fsdp_wrap_optim_input input = {.names = backwards, .count = 7};
    const fsdp_wrap_optim_input short_input = {.names = backwards, .count = 6};
    const move_case *move = (const move_case *)what;
    fsdp_error why = {0};
    fsdp_sd *ids, *names = NULL, *some = NULL;
    FSDP_TRY(fsdp_root_set_state(net->root, move->from->model, &whole_model, NULL, err));
    FSDP_TRY(fsdp_wrap_rekey_optim_state(move->from->optim, FSDP_WRAP_PARAM_ID, &input, &ids, err));
    bool fits = find(ids, "state.1.exp_avg")->data ==
                find(move->from->optim, "state.layers.2.bias.exp_avg")->data;
    fsdp_status status =
        fsdp_wrap_rekey_optim_state(ids, FSDP_WRAP_PARAM_NAME, &input, &names, err);
    if (status == FSDP_OK)
        status = set_optim(net, names, false, err);
    if (status == FSDP_OK)
        status = fsdp_wrap_rekey_optim_state(move->from->optim, FSDP_WRAP_PARAM_ID, &short_input,
                                             &some, err);
    fsdp_status lacks = status == FSDP_OK ? set_optim(net, some, false, &why) : status;
    fsdp_sd_free(ids);
    fsdp_sd_free(names);
    fsdp_sd_free(some);
    FSDP_TRY(status);
    EXPECT(fits);
    FSDP_TRY(expect_refused(lacks, &why, "does not fit", err));
    return compare_with(net, move->from, err);
}

Test(fsdp1_optim, parameters_by_position)
{
    state_case from = trained_by_four(true);
    for (int ranks = 1; ranks <= 3; ranks++) {
        move_case move = {.from = &from};
        move.state = case_of(FSDP_WRAP_FULL_SHARD, true, load_by_position);
        expect_ranks(ranks, run_case, &move);
    }
    free_state(&from);
}

/* Also of parameters that this rank holds nothing of. */
static fsdp_status look_at_keys(toy *net, state_case *what, fsdp_error *err)
{
    const fsdp_state_opts opts = {.part = FSDP_STATE_OPTIM};
    int rank = fsdp_world_rank(net->world);
    fsdp_sd *sd;
    (void)what;
    FSDP_TRY(fsdp_root_get_state(net->root, &opts, &sd, err));
    const fsdp_entry *bias = find(sd, "optim.state.bias.exp_avg");
    bool is_there = bias && find(sd, "optim.state.bias.step") &&
                    fsdp_entry_local_bytes(bias, rank) == 4 * fsdp_wrap_place_of(net->own).local;
    fsdp_sd_free(sd);
    EXPECT(is_there);
    return FSDP_OK;
}

Test(fsdp1_optim, every_rank_names_every_parameter)
{
    for (int orig = 0; orig < 2; orig++) {
        state_case what = case_of(FSDP_WRAP_FULL_SHARD, orig, look_at_keys);
        expect_ranks(4, run_case, &what); /* the bias has three elements */
    }
}

/* --- memory ----------------------------------------------------------------------------------- */

/* Every way through state, of one rank. */
static fsdp_status go_everywhere(toy *net, fsdp_error *err)
{
    static const fsdp_state_opts ways[] = {{.full_state_dict = true},
                                           {.full_state_dict = true, .cpu_offload = true},
                                           {0},
                                           {.cpu_offload = true}};
    fsdp_sd *optim = NULL, *rekeyed = NULL;
    fsdp_status status = FSDP_OK;
    for (size_t i = 0; i < 4 && status == FSDP_OK; i++) {
        fsdp_sd *sd = NULL;
        status = fsdp_root_get_state(net->root, &ways[i], &sd, err);
        if (status == FSDP_OK)
            status = fsdp_root_set_state(net->root, sd, &ways[i], NULL, err);
        fsdp_sd_free(sd);
    }
    if (status == FSDP_OK)
        status = fsdp_root_get_state(net->root, &whole_optim, &optim, err);
    if (status == FSDP_OK)
        status =
            fsdp_wrap_rekey_optim_state(optim, FSDP_WRAP_PARAM_ID, &all_stepped, &rekeyed, err);
    if (status == FSDP_OK)
        status = set_optim(net, rekeyed, true, err);
    fsdp_sd_free(optim);
    fsdp_sd_free(rekeyed);
    return status;
}

static fsdp_status run_short(world_rank *rank, fsdp_error *err)
{
    state_case *what = rank->user;
    net_result result;
    toy net;
    (void)fsdp_mem_fail_after(what->trained, false);
    fsdp_status status = net_build(&net, rank->world, &what->setup, err);
    if (status == FSDP_OK)
        status = net_train(&net, &what->setup, 0, 1, &result, err);
    if (status == FSDP_OK)
        status = go_everywhere(&net, err);
    if (status == FSDP_OK)
        status = fsdp_wrap_summon_full_params(net.wrap, NULL, NULL, err);
    if (status == FSDP_OK)
        status = fsdp_wrap_summon_end(net.wrap, err);
    int64_t made = fsdp_mem_fail_after(-1, false);
    if (what->trained < 0)
        what->allocations = (int)made;
    toy_free(&net);
    return status;
}

/* Under the address sanitizer: and nothing is lost. Some that fail are made again. */
Test(fsdp1_optim, any_allocation_may_fail, .timeout = 60)
{
    fsdp_error err = {0};
    state_case what = case_of(FSDP_WRAP_FULL_SHARD, true, NULL);
    int failed = 0;
    what.setup.hook = fsdp_wrap_bf16_compress_hook;
    what.trained = -1;
    cr_assert_eq(run_worlds(1, "cpu", run_short, &what, &err), FSDP_OK, "%s", err.text);
    for (what.trained = 0; what.trained < what.allocations; what.trained++) {
        err = (fsdp_error){0};
        fsdp_status status = run_worlds(1, "cpu", run_short, &what, &err);
        bool is_told = strstr(err.text, "cannot allocate memory") ||
                       strstr(err.text, "a mesh of all ranks"); /* a search that found no memory */
        cr_assert(status == FSDP_OK || is_told, "%d: %s", what.trained, err.text);
        failed += status != FSDP_OK;
    }
    cr_assert(what.allocations > 500 && failed * 2 > what.allocations, "%d of %d", failed,
              what.allocations);
}

/* --- groups, frozen parameters ---------------------------------------------------------------- */

static bool is_weight(void *user, const fsdp_param *param)
{
    (void)user;
    return strstr(fsdp_param_name(param), "weight") != NULL;
}

static fsdp_status look_at_groups(toy *net, state_case *what, fsdp_error *err)
{
    fsdp_sd *sd;
    (void)what;
    FSDP_TRY(fsdp_root_get_state(net->root, &whole_optim, &sd, err));
    const fsdp_value *groups = &find(sd, "param_groups")->value;
    bool has_weights = find(sd, "state.layers.0.weight.exp_avg") != NULL;
    bool has_biases = find(sd, "state.layers.0.bias.exp_avg") || find(sd, "state.bias.step");
    size_t count = groups->as.list.count;
    const fsdp_value *dict = &groups->as.list.items[0];
    const fsdp_value *names = &dict->as.list.items[dict->as.list.count - 1];
    bool fits = count == 1 && names->as.list.count == 3 &&
                strcmp(names->as.list.items[1].as.bytes.data, "layers.1.weight") == 0;
    fsdp_sd_free(sd);
    EXPECT(has_weights && !has_biases && fits);
    return FSDP_OK;
}

Test(fsdp1_optim, what_is_not_stepped_has_no_state)
{
    static const fsdp_optim_group weights = {.match = is_weight, .lr = 0.01};
    state_case what = case_of(FSDP_WRAP_FULL_SHARD, true, look_at_groups);
    what.setup.groups = &weights;
    what.setup.group_count = 1;
    what.trained = 1;
    expect_ranks(2, run_case, &what);
}

static bool is_in_first_layer(void *user, const fsdp_param *param)
{
    (void)user;
    return strncmp(fsdp_param_name(param), "layers.0.", 9) == 0;
}

static bool is_elsewhere(void *user, const fsdp_param *param)
{
    return !is_in_first_layer(user, param);
}

/* Each has a state for every flat parameter, and steps its own. */
static fsdp_status step_in_turn(toy *net, fsdp_optim *other, fsdp_error *err)
{
    fsdp_box box;
    double loss;
    FSDP_TRY(net_microbatch(net, 0, 0, &loss, err));
    const float *weight = fsdp_param_shard(net->weight[1], &box);
    bool is_held = fsdp_box_count(&box) > 0;
    const float before = is_held ? *weight : 0;
    FSDP_TRY(fsdp_optim_step(net->optim, err));
    EXPECT(!is_held || *weight == before);
    FSDP_TRY(fsdp_optim_step(other, err));
    EXPECT(!is_held || *weight != before);
    EXPECT(!fsdp_root_awaits_step(net->root, NULL));
    return FSDP_OK;
}

static fsdp_status step_with_two(toy *net, state_case *what, fsdp_error *err)
{
    static const fsdp_optim_group elsewhere = {.match = is_elsewhere, .lr = 0.01};
    fsdp_adamw_opts opts = {.weight_decay = 0.01};
    fsdp_optim *other = NULL;
    (void)what;
    opts.groups = &elsewhere;
    opts.group_count = 1;
    FSDP_TRY(fsdp_adamw_create(net->root, &opts, &other, err));
    fsdp_status status = step_in_turn(net, other, err);
    fsdp_optim_free(other);
    return status;
}

Test(fsdp1_optim, two_optimizers_step_flat_parameters_of_their_own)
{
    static const fsdp_optim_group first = {.match = is_in_first_layer, .lr = 0.01};
    state_case what = case_of(FSDP_WRAP_FULL_SHARD, true, step_with_two);
    what.setup.groups = &first;
    what.setup.group_count = 1;
    expect_ranks(2, run_case, &what);
}

static fsdp_status change_hypers(toy *net, state_case *what, fsdp_error *err)
{
    const move_case *move = (const move_case *)what;
    FSDP_TRY(fsdp_optim_set_lr(net->optim, 0, 123, err));
    FSDP_TRY(load_optim(net, move, err));
    EXPECT(fsdp_optim_lr(net->optim, 0) == 1e-3);
    return FSDP_OK;
}

Test(fsdp1_optim, hyper_parameters_follow_their_parameters)
{
    state_case from = trained_by_four(false);
    for (int scatters = 0; scatters < 2; scatters++) {
        move_case move = {.from = &from, .scatters = scatters};
        move.state = case_of(FSDP_WRAP_SHARD_GRAD_OP, scatters, change_hypers);
        expect_ranks(2, run_case, &move);
    }
    free_state(&from);
}
