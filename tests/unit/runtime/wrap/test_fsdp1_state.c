/*
 * The FSDP1 face: state dicts of the model, of every type and strategy; checkpoints, from one world size to
 * another and to units.
 */
#include "base/io/io.h"
#include "tests/unit/runtime/wrap/wrap_state_cases.h"
#include "statedict/sd/layout_internal.h"

#include <stdio.h>
#include <stdlib.h>

/* --- types of state dicts --------------------------------------------------------------------- */

static fsdp_status look_at_full(toy *net, state_case *what, fsdp_error *err)
{
    static const char *const names[] = {"layers.0.weight",
                                        "layers.0.bias",
                                        "layers.1.weight",
                                        "layers.1.bias",
                                        "layers.2.weight",
                                        "layers.2.bias",
                                        "bias",
                                        "count"};
    (void)what;
    fsdp_sd *sd;
    FSDP_TRY(fsdp_root_get_state(net->root, &whole_model, &sd, err));
    bool fits = fsdp_sd_count(sd) == 8;
    for (size_t i = 0; i < 8 && fits; i++)
        fits = strcmp(fsdp_sd_at(sd, i)->name, names[i]) == 0;
    const float *weight = fits ? fsdp_sd_at(sd, 2)->data : NULL;
    for (int i = 0; i < NET_HIDDEN * NET_HIDDEN && fits; i++)
        fits = weight[i] ==
               (float)(fsdp_uniform(1, "layers.1.weight", (uint64_t)i) / sqrt(NET_HIDDEN));
    fsdp_sd_free(sd);
    EXPECT(fits);
    return FSDP_OK;
}

Test(fsdp1_state, full_dicts_are_whole_and_named_as_declared)
{
    for (int strategy = 0; strategy <= FSDP_WRAP_HYBRID_SHARD_ZERO2; strategy++)
        for (int ranks = 2; ranks <= 4; ranks *= 2) {
            state_case what = case_of((fsdp_wrap_strategy)strategy, strategy % 2, look_at_full);
            expect_ranks(ranks, run_case, &what);
        }
}

static bool is_in_shard(fsdp_param *param, const fsdp_entry *entry)
{
    return entry->data == fsdp_param_shard(param, NULL);
}

static fsdp_status look_at_sharded(toy *net, state_case *what, fsdp_error *err)
{
    fsdp_state_opts opts = {.part = FSDP_STATE_MODEL, .model_prefix = ""};
    fsdp_sd *live, *copy;
    int rank = fsdp_world_rank(net->world);
    FSDP_TRY(fsdp_root_get_state(net->root, &opts, &live, err));
    const fsdp_entry *entry = find(live, "layers.1.weight");
    const fsdp_wrap_place place = fsdp_wrap_place_of(net->weight[1]);
    bool is_live = is_in_shard(net->weight[1], entry) && entry->ndim == 2 &&
                   fsdp_entry_local_bytes(entry, rank) == place.local * 4;
    bool has_flat = find(live, "layers.1.weight")->flat >= 0 && fsdp_sd_flat_count(live) > 0;
    opts.cpu_offload = true;
    fsdp_status status = fsdp_root_get_state(net->root, &opts, &copy, err);
    if (status == FSDP_OK) {
        const fsdp_entry *own = find(copy, "layers.1.weight");
        is_live = is_live && (place.local == 0 ||
                              (own->data != entry->data &&
                               memcmp(own->data, entry->data, (size_t)place.local * 4) == 0));
    }
    fsdp_sd_free(live);
    if (status == FSDP_OK)
        fsdp_sd_free(copy);
    FSDP_TRY(status);
    EXPECT(is_live);
    EXPECT(has_flat == what->flag);
    return FSDP_OK;
}

Test(fsdp1_state, sharded_dicts_are_live_memory)
{
    for (int strategy = 0; strategy <= FSDP_WRAP_HYBRID_SHARD_ZERO2; strategy++) {
        state_case what = case_of((fsdp_wrap_strategy)strategy, strategy % 2, look_at_sharded);
        what.flag = strategy < FSDP_WRAP_NO_SHARD;
        expect_ranks(4, run_case, &what);
    }
}

static fsdp_status refuse_dicts(toy *net, state_case *what, fsdp_error *err)
{
    const fsdp_root_save_opts local = {.save.kind = FSDP_LOCAL};
    fsdp_error why = {0}, other = {0};
    fsdp_sd *sd;
    (void)what;
    EXPECT(fsdp_root_save(net->root, "/tmp/never", &local, &other) == FSDP_ERR_USAGE);
    EXPECT(strstr(other.text, "hybrid"));
    FSDP_TRY(fsdp_root_begin_forward(net->root, err));
    EXPECT(fsdp_root_get_state(net->root, NULL, &sd, &why) == FSDP_ERR_USAGE);
    EXPECT(strstr(why.text, "between steps"));
    return FSDP_OK;
}

Test(fsdp1_state, types_that_do_not_fit_are_refused)
{
    state_case what = case_of(FSDP_WRAP_HYBRID_SHARD, false, refuse_dicts);
    expect_ranks(2, run_case, &what);
}

/* --- checkpoints ------------------------------------------------------------------------------ */

static char *make_dir(void)
{
    static char path[64];
    snprintf(path, sizeof path, "/tmp/fsdp1-state-XXXXXX");
    cr_assert(mkdtemp(path));
    return path;
}

static void remove_dir(const char *path)
{
    cr_assert_eq(fsdp_io_remove_tree(NULL, path, NULL), FSDP_OK);
}

static fsdp_status save(toy *net, state_case *what, fsdp_error *err)
{
    const fsdp_root_save_opts opts = {.save.kind = what->kind};
    FSDP_TRY(fsdp_root_save(net->root, what->dir, &opts, err));
    return leave_all(net, what, err);
}

static fsdp_status load_v1(toy *net, state_case *what, fsdp_error *err)
{
    const move_case *move = (const move_case *)what;
    FSDP_TRY(fsdp_root_load(net->root, move->from->dir, NULL, err));
    return compare_with(net, move->from, err);
}

/* Units load it, save it, and FSDP1 loads that. */
static fsdp_status load_plain(toy *net, state_case *what, fsdp_error *err)
{
    const move_case *move = (const move_case *)what;
    FSDP_TRY(fsdp_root_load(net->root, move->from->dir, NULL, err));
    return fsdp_root_save(net->root, what->dir, NULL, err);
}

static void load_everywhere(const state_case *from)
{
    for (int ranks = 1; ranks <= 4; ranks++) {
        move_case move = {.from = from};
        fsdp_wrap_strategy strategy = (fsdp_wrap_strategy)((ranks * 3) % 5);
        if (strategy >= FSDP_WRAP_HYBRID_SHARD && ranks % 2)
            strategy = FSDP_WRAP_FULL_SHARD;
        move.state = case_of(strategy, ranks % 2, load_v1);
        expect_ranks(ranks, run_case, &move);
    }
}

static void load_by_units(const state_case *from, const char *dir)
{
    char path[96];
    snprintf(path, sizeof path, "%s/units", dir);
    move_case move = {.from = from};
    move.state = case_of(FSDP_WRAP_FULL_SHARD, false, load_plain);
    move.state.setup.is_plain = true;
    move.state.dir = path;
    expect_ranks(3, run_case, &move);
    state_case again = *from;
    again.dir = path;
    load_everywhere(&again);
}

Test(fsdp1_state, checkpoints_of_every_type_load_everywhere, .timeout = 60)
{
    const char *dir = make_dir();
    for (int i = 0; i < 4; i++) {
        char path[96];
        state_case from =
            case_of(i == 3 ? FSDP_WRAP_HYBRID_SHARD : FSDP_WRAP_FULL_SHARD, i % 2, save);
        snprintf(path, sizeof path, "%s/%d", dir, i);
        from.kind = i == 3 ? FSDP_SHARDED : (fsdp_kind)i;
        from.dir = path;
        from.trained = 2;
        expect_ranks(4, run_case, &from);
        load_everywhere(&from);
        if (i == 1)
            load_by_units(&from, dir);
        free_state(&from);
    }
    remove_dir(dir);
}

/* --- refused dicts ---------------------------------------------------------------------------- */

static fsdp_status set_model(toy *net, const fsdp_sd *sd, bool partial, fsdp_error *err)
{
    fsdp_state_opts opts = whole_model;
    opts.partial = partial;
    return fsdp_root_set_state(net->root, sd, &opts, NULL, err);
}

static fsdp_status refuse_model(toy *net, const fsdp_layout *layout, int rows, fsdp_dtype dtype,
                                const char *reason, fsdp_error *err)
{
    static const float values[NET_HIDDEN * NET_HIDDEN];
    fsdp_error why = {0};
    fsdp_sd *sd;
    FSDP_TRY(fsdp_sd_create(&sd, err));
    fsdp_status status = fsdp_sd_add_tensor(
        sd, "layers.1.weight", 15,
        &(fsdp_tensor){dtype, 2, (int64_t[]){rows, NET_HIDDEN}, *layout, (void *)values}, err);
    if (status == FSDP_OK)
        status = expect_refused(set_model(net, sd, true, &why), &why, reason, err);
    if (status == FSDP_OK)
        status = expect_refused(set_model(net, sd, false, &why), &why, "missing: 'layers.0.weight'",
                                err);
    fsdp_sd_free(sd);
    return status;
}

static fsdp_status refuse_models(toy *net, state_case *what, fsdp_error *err)
{
    const fsdp_layout whole = {.kind = FSDP_LAYOUT_MESH, .mesh = net->mesh};
    fsdp_layout rows = whole;
    (void)what;
    rows.placement[0] = (fsdp_placement){.kind = FSDP_SHARD};
    FSDP_TRY(refuse_model(net, &whole, NET_HIDDEN - 1, FSDP_F32, "has shape", err));
    FSDP_TRY(refuse_model(net, &whole, NET_HIDDEN, FSDP_BF16, "is f32 here and bf16", err));
    return refuse_model(net, &rows, NET_HIDDEN, FSDP_F32, "is neither whole on rank", err);
}

Test(fsdp1_state, tensors_that_do_not_fit_are_named)
{
    state_case what = case_of(FSDP_WRAP_FULL_SHARD, false, refuse_models);
    expect_ranks(3, run_case, &what);
}

/* The first tensor would fit, the next one is missing. */
static fsdp_status refuse_half(toy *net, state_case *what, fsdp_error *err)
{
    static const float zeros[NET_HIDDEN * NET_HIDDEN];
    const fsdp_layout whole = {.kind = FSDP_LAYOUT_MESH, .mesh = net->mesh};
    const float *own = fsdp_param_shard(net->weight[0], NULL), before = own ? *own : 1;
    fsdp_error why = {0};
    fsdp_sd *sd;
    (void)what;
    FSDP_TRY(fsdp_sd_create(&sd, err));
    fsdp_status status =
        fsdp_sd_add_tensor(sd, "layers.0.weight", 15,
                           &(fsdp_tensor){FSDP_F32, 2, fsdp_param_describe(net->weight[0]).shape,
                                          whole, (void *)zeros},
                           err);
    if (status == FSDP_OK)
        status =
            expect_refused(set_model(net, sd, false, &why), &why, "missing: 'layers.0.bias'", err);
    fsdp_sd_free(sd);
    FSDP_TRY(status);
    EXPECT(before != 0 && (!own || *own == before));
    return FSDP_OK;
}

Test(fsdp1_state, nothing_is_set_of_a_dict_that_does_not_fit)
{
    state_case what = case_of(FSDP_WRAP_FULL_SHARD, false, refuse_half);
    expect_ranks(2, run_case, &what);
}

/* --- buffers ----------------------------------------------------------------------------------- */

static fsdp_status look_at_buffer(toy *net, state_case *what, fsdp_error *err)
{
    const fsdp_state_opts opts = {.part = FSDP_STATE_MODEL, .full_state_dict = what->flag};
    const fsdp_root_save_opts save = {.state.part = FSDP_STATE_MODEL, .save.kind = what->kind};
    const fsdp_root_load_opts load = {.state.part = FSDP_STATE_MODEL};
    uint16_t *kept = fsdp_param_data(fsdp_model_find(net->model, "count"));
    fsdp_sd *sd;
    EXPECT(fsdp_param_describe(fsdp_model_find(net->model, "count")).data_dtype == FSDP_BF16);
    *kept = 0x4040; /* 3 */
    FSDP_TRY(fsdp_root_get_state(net->root, &opts, &sd, err));
    const fsdp_entry *entry = find(sd, "model.count");
    bool fits = entry->dtype == FSDP_F32 && *(const float *)entry->data == 3;
    *kept = 0;
    fsdp_status status = fsdp_root_set_state(net->root, sd, &opts, NULL, err);
    fsdp_sd_free(sd);
    FSDP_TRY(status);
    EXPECT(fits && *kept == 0x4040);
    FSDP_TRY(fsdp_root_save(net->root, what->dir, &save, err));
    *kept = 0;
    FSDP_TRY(fsdp_root_load(net->root, what->dir, &load, err));
    EXPECT(*kept == 0x4040);
    return FSDP_OK;
}

Test(fsdp1_state, buffers_are_saved_in_their_own_dtype)
{
    const char *dir = make_dir();
    for (int kind = 0; kind <= FSDP_LOCAL; kind++) {
        char path[96];
        snprintf(path, sizeof path, "%s/buffers-%d", dir, kind);
        state_case what = case_of(FSDP_WRAP_FULL_SHARD, false, look_at_buffer);
        what.setup.wrap.buffer_dtype = FSDP_BF16;
        what.kind = (fsdp_kind)kind;
        what.flag = kind == FSDP_FULL;
        what.dir = path;
        expect_ranks(2, run_case, &what);
    }
    remove_dir(dir);
}

/* --- values that are set after a forward ------------------------------------------------------ */

/* Leaves the unit gathered, as SHARD_GRAD_OP does. */
static fsdp_status evaluate(toy *net, fsdp_error *err)
{
    FSDP_TRY(fsdp_root_set_evaluating(net->root, true, err));
    FSDP_TRY(fsdp_root_begin_forward(net->root, err));
    FSDP_TRY(fsdp_unit_pre_forward(net->unit[1], err));
    FSDP_TRY(fsdp_unit_post_forward(net->unit[1], err));
    FSDP_TRY(fsdp_root_end_forward(net->root, err));
    return fsdp_root_set_evaluating(net->root, false, err);
}

static fsdp_status expect_gathered(toy *net, float value, fsdp_error *err)
{
    FSDP_TRY(fsdp_root_begin_forward(net->root, err));
    FSDP_TRY(fsdp_unit_pre_forward(net->unit[1], err));
    const float *weight = fsdp_param_data(net->weight[1]);
    EXPECT(weight && weight[0] == value);
    return fsdp_root_reset(net->root, err);
}

static fsdp_status set_by_dict(toy *net, float value, fsdp_error *err)
{
    fsdp_sd *sd;
    FSDP_TRY(fsdp_root_get_state(net->root, &whole_model, &sd, err));
    *(float *)find(sd, "layers.1.weight")->data = value;
    fsdp_status status = set_model(net, sd, false, err);
    fsdp_sd_free(sd);
    return status;
}

static fsdp_status set_by_summoning(toy *net, float value, fsdp_error *err)
{
    FSDP_TRY(fsdp_wrap_summon_full_params(net->wrap, NULL, NULL, err));
    *(float *)fsdp_param_data(net->weight[1]) = value;
    return fsdp_wrap_summon_end(net->wrap, err);
}

static fsdp_status set_behind_forwards(toy *net, state_case *what, fsdp_error *err)
{
    FSDP_TRY(evaluate(net, err));
    FSDP_TRY(set_by_dict(net, 5, err));
    FSDP_TRY(expect_gathered(net, 5, err));
    FSDP_TRY(evaluate(net, err));
    FSDP_TRY(set_by_summoning(net, 7, err));
    FSDP_TRY(expect_gathered(net, 7, err));
    FSDP_TRY(fsdp_root_save(net->root, what->dir, NULL, err));
    FSDP_TRY(set_by_dict(net, 5, err));
    FSDP_TRY(evaluate(net, err));
    FSDP_TRY(fsdp_root_load(net->root, what->dir, NULL, err));
    return expect_gathered(net, 7, err);
}

Test(fsdp1_state, what_is_gathered_is_what_was_set_last)
{
    char *dir = make_dir(), path[64];
    snprintf(path, sizeof path, "%s/it", dir);
    state_case what = case_of(FSDP_WRAP_SHARD_GRAD_OP, true, set_behind_forwards);
    what.dir = path;
    expect_ranks(2, run_case, &what);
    remove_dir(dir);
}
