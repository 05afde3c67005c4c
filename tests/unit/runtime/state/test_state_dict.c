/*
 * State dicts of sharded models, scenarios S1 to S10 of PyTorch's own tests: live values on every mesh,
 * round trips in place, values that stay live over steps, whole dicts on rank 0, and dicts that must not
 * be loaded silently.
 */
#include "tests/unit/runtime/expect_toy.h"

#include <fsdp/root_init.h>

/* --- MLPs --------------------------------------------------------------------------------------- */

/* Three layers dim -> 4 dim -> dim, without biases, each a unit. */
static fsdp_status declare_mlp(toy *net, fsdp_error *err)
{
    int64_t dim = *(const int64_t *)net->user;
    for (int i = 0; i < 3; i++) {
        char name[32];
        fsdp_param *in, *out;
        snprintf(name, sizeof name, "%d.in_proj.weight", i);
        FSDP_TRY(net_add(net, name, 2, (int64_t[]){4 * dim, dim}, &in, err));
        snprintf(name, sizeof name, "%d.out_proj.weight", i);
        FSDP_TRY(net_add(net, name, 2, (int64_t[]){dim, 4 * dim}, &out, err));
        if (fsdp_mesh_size(net->mesh) > 1 && net->opts.shard_dims) {
            FSDP_TRY(fsdp_param_set_placement(in, "tp", (fsdp_placement){FSDP_SHARD, 0, 0}, err));
            FSDP_TRY(fsdp_param_set_placement(out, "tp", (fsdp_placement){FSDP_SHARD, 1, 0}, err));
        }
        snprintf(name, sizeof name, "%d", i);
        FSDP_TRY(net_unit(net, name, err));
    }
    return FSDP_OK;
}

static void fill(const fsdp_sd *sd, int rank, float value)
{
    for (size_t i = 0; i < fsdp_sd_count(sd); i++) {
        const fsdp_entry *entry = fsdp_sd_at(sd, i);
        float *to = entry->data;
        for (int64_t n = fsdp_entry_local_bytes(entry, rank) / 4; n > 0; n--)
            *to++ = value;
    }
}

static fsdp_status expect_filled_shard(fsdp_param *param, const void *data, float value,
                                       fsdp_error *err)
{
    fsdp_box box;
    const float *shard = fsdp_param_shard(param, &box);
    EXPECT(shard == data);
    for (int64_t i = 0; i < fsdp_box_count(&box); i++)
        EXPECT(shard[i] == value);
    return FSDP_OK;
}

/* The dict is the model: its names, and the memory of its shards. */
static fsdp_status expect_live(toy *net, const fsdp_sd *sd, fsdp_error *err)
{
    int rank = fsdp_world_rank(net->rank->world);
    EXPECT(fsdp_sd_count(sd) == fsdp_model_count(net->model));
    for (size_t i = 0; i < fsdp_sd_count(sd); i++) {
        const fsdp_entry *entry = fsdp_sd_at(sd, i);
        fsdp_param *param = fsdp_model_at(net->model, i);
        fsdp_box box;
        void *shard = fsdp_param_shard(param, &box);
        EXPECT(strcmp(entry->name, fsdp_param_name(param)) == 0);
        EXPECT(entry->ndim == 2 && memcmp(entry->shape, fsdp_param_describe(param).shape, 16) == 0);
        EXPECT(fsdp_entry_local_bytes(entry, rank) == 4 * fsdp_box_count(&box));
        EXPECT(fsdp_box_count(&box) > 0 ? entry->data == shard : !entry->data && rank > 0);
    }
    return FSDP_OK;
}

/* S1 */
static fsdp_status save_and_load(toy *net, fsdp_error *err)
{
    const fsdp_state_opts bare = {.part = FSDP_STATE_MODEL, .model_prefix = ""};
    const fsdp_state_opts copied = {
        .part = FSDP_STATE_MODEL, .model_prefix = "", .cpu_offload = true};
    int rank = fsdp_world_rank(net->rank->world);
    void *shards[8];
    fsdp_sd *sd = NULL, *values = NULL;
    FSDP_TRY(net_get(net, &bare, &sd, err));
    FSDP_TRY(expect_live(net, sd, err));
    FSDP_TRY(net_get(net, &copied, &values, err));
    fill(values, rank, (float)(42 + rank));
    fill(sd, rank, 1);
    for (size_t i = 0; i < fsdp_model_count(net->model); i++) {
        shards[i] = fsdp_param_shard(fsdp_model_at(net->model, i), NULL);
        FSDP_TRY(expect_filled_shard(fsdp_model_at(net->model, i), shards[i], 1, err));
    }
    FSDP_TRY(net_set(net, &bare, values, err));
    for (size_t i = 0; i < fsdp_model_count(net->model); i++)
        FSDP_TRY(
            expect_filled_shard(fsdp_model_at(net->model, i), shards[i], (float)(42 + rank), err));
    fsdp_sd_free(values);
    fsdp_sd_free(sd);
    return FSDP_OK;
}

Test(state_dict, a_dict_is_the_live_shards_and_loads_in_place)
{
    for (int64_t dim = 2; dim <= 5; dim++) {
        for (int64_t ranks = 1; ranks <= 4; ranks++)
            expect_net_on("cpu",
                          (toy_case){1, {ranks}, {"dp"}, declare_mlp, save_and_load, &dim, {0}});
        expect_net_on("cpu-async",
                      (toy_case){2, {2, 2}, {"rep", "dp"}, declare_mlp, save_and_load, &dim, {0}});
    }
}

static void cut_largest_dim(void *user, const fsdp_param *param, fsdp_param_place *place)
{
    const int64_t *shape = fsdp_param_describe(param).shape;
    (void)user;
    place->dim = shape[1] > shape[0];
}

Test(state_dict, a_dict_cut_along_the_largest_dim_is_live_and_loads_in_place)
{
    const int64_t dim = 16;
    fsdp_unit_opts opts = (fsdp_unit_opts){0};
    opts.placement = cut_largest_dim;
    expect_net_on("cpu", (toy_case){1, {4}, {"dp"}, declare_mlp, save_and_load, &dim, opts});
    expect_net_on("cpu",
                  (toy_case){2, {2, 2}, {"rep", "dp"}, declare_mlp, save_and_load, &dim, opts});
}

/* --- S3: gathered parameters --------------------------------------------------------------------- */

static fsdp_status get_while_gathered(toy *net, fsdp_error *err)
{
    const fsdp_state_opts copied = {.cpu_offload = true};
    int rank = fsdp_world_rank(net->rank->world);
    fsdp_sd *before = NULL, *after = NULL;
    FSDP_TRY(net_get(net, &copied, &before, err));
    FSDP_TRY(net_forward(net, err));
    net->rank->notes_collectives = true;
    forget_events(net->rank);
    FSDP_TRY(net_get(net, NULL, &after, err));
    EXPECT(strcmp(net->rank->events.data, "R root|R layers.0|R layers.1") == 0);
    FSDP_TRY(net_expect_equal(before, after, rank, err));
    fsdp_sd_free(after);
    fsdp_sd_free(before);
    return net_train(net, 1, err);
}

Test(state_dict, getting_reshards_what_is_gathered_without_a_collective)
{
    fsdp_unit_opts opts = (fsdp_unit_opts){0};
    opts.reshard_after_forward = FSDP_RESHARD_NEVER;
    for (int64_t ranks = 1; ranks <= 4; ranks++)
        expect_net_on("cpu-async",
                      (toy_case){1, {ranks}, {"dp"}, declare_net, get_while_gathered, NULL, opts});
}

/* A running gather would restore the old values. */
static fsdp_status set_while_gathering(toy *net, fsdp_error *err)
{
    const fsdp_state_opts copied = {.cpu_offload = true};
    fsdp_sd *sd = NULL;
    fsdp_box box;
    FSDP_TRY(net_get(net, &copied, &sd, err));
    fill(sd, fsdp_world_rank(net->rank->world), 3);
    FSDP_TRY(fsdp_unit_unshard(net->unit[0], true, NULL, err));
    FSDP_TRY(net_set(net, NULL, sd, err));
    FSDP_TRY(fsdp_root_begin_forward(net->root, err));
    FSDP_TRY(fsdp_unit_pre_forward(net->unit[0], err));
    fsdp_param *bias = fsdp_model_find(net->model, "layers.0.bias");
    const float *data = fsdp_param_data(bias);
    fsdp_param_data_box(bias, &box);
    EXPECT(data && fsdp_box_count(&box) == 5);
    for (int i = 0; i < 5; i++)
        EXPECT(data[i] == 3);
    FSDP_TRY(fsdp_unit_post_forward(net->unit[0], err));
    fsdp_sd_free(sd);
    return fsdp_root_end_forward(net->root, err);
}

Test(state_dict, what_is_set_is_gathered_even_when_a_gather_was_under_way)
{
    expect_net(set_while_gathering, NULL);
}

/* --- S4: kept dicts ------------------------------------------------------------------------------- */

static fsdp_status keep_over_steps(toy *net, fsdp_error *err)
{
    const fsdp_state_opts bare = {.part = FSDP_STATE_MODEL, .model_prefix = ""};
    const fsdp_state_opts copied = {.cpu_offload = true};
    fsdp_sd *kept = NULL, *old = NULL, *now = NULL;
    FSDP_TRY(net_get(net, &bare, &kept, err));
    FSDP_TRY(net_get(net, &copied, &old, err));
    FSDP_TRY(net_train(net, 5, err));
    FSDP_TRY(expect_live(net, kept, err));
    FSDP_TRY(net_get(net, NULL, &now, err));
    EXPECT(*(const float *)net_entry(now, "optim.state.0.in_proj.weight.step")->data == 5);
    EXPECT(*(const float *)net_entry(old, "optim.state.0.in_proj.weight.step")->data == 0);
    const float *stepped = net_entry(kept, "0.in_proj.weight")->data;
    const float *copy = net_entry(old, "model.0.in_proj.weight")->data;
    EXPECT(!stepped || stepped[0] != copy[0]);
    fsdp_sd_free(now);
    fsdp_sd_free(old);
    fsdp_sd_free(kept);
    return FSDP_OK;
}

Test(state_dict, a_kept_dict_stays_the_live_shards_over_steps)
{
    for (int64_t dim = 2; dim <= 5; dim++)
        expect_net_on("cpu-async",
                      (toy_case){1, {4}, {"dp"}, declare_mlp, keep_over_steps, &dim, {0}});
}

/* --- S5: one tensor at a time --------------------------------------------------------------------- */

static fsdp_status load_one_by_one(toy *net, fsdp_error *err)
{
    const fsdp_state_opts parts = {.part = FSDP_STATE_MODEL, .partial = true};
    const fsdp_state_opts copied = {.part = FSDP_STATE_MODEL, .cpu_offload = true};
    int rank = fsdp_world_rank(net->rank->world);
    fsdp_sd *all = NULL;
    FSDP_TRY(net_get(net, &copied, &all, err));
    FSDP_TRY(net_spoil(net, err));
    for (size_t i = 0; i < fsdp_sd_count(all); i++) {
        const fsdp_entry *entry = fsdp_sd_at(all, i);
        fsdp_sd *one = NULL;
        fsdp_load_report report;
        if (entry->kind != FSDP_ENTRY_TENSOR)
            continue;
        FSDP_TRY(fsdp_sd_create(&one, err));
        FSDP_TRY(fsdp_sd_add_tensor(
            one, entry->name, entry->name_size,
            &(fsdp_tensor){entry->dtype, entry->ndim, entry->shape, entry->layout, entry->data},
            err));
        FSDP_TRY(fsdp_root_set_state(net->root, one, &parts, &report, err));
        EXPECT(report.missing_count == 7 && report.unexpected_count == 0);
        fsdp_load_report_release(&report);
        fsdp_sd_free(one);
    }
    fsdp_sd *loaded = NULL;
    FSDP_TRY(net_get(net, &(fsdp_state_opts){.part = FSDP_STATE_MODEL}, &loaded, err));
    FSDP_TRY(net_expect_equal(all, loaded, rank, err));
    fsdp_sd_free(loaded);
    fsdp_sd_free(all);
    return FSDP_OK;
}

Test(state_dict, tensors_load_one_by_one)
{
    expect_net(load_one_by_one, NULL);
}

/* Two linear layers of 4 x 4. */
static fsdp_status declare_linears(toy *net, fsdp_error *err)
{
    net->opts.offload = true;
    for (int i = 0; i < 2; i++) {
        char name[16];
        snprintf(name, sizeof name, "%d.weight", i);
        FSDP_TRY(net_add(net, name, 2, (int64_t[]){4, 4}, NULL, err));
        snprintf(name, sizeof name, "%d.bias", i);
        FSDP_TRY(net_add(net, name, 1, (int64_t[]){4}, NULL, err));
        name[1] = '\0';
        FSDP_TRY(net_unit(net, name, err));
    }
    return FSDP_OK;
}

static fsdp_status set_one(toy *net, const fsdp_entry *entry, fsdp_error *err)
{
    const fsdp_state_opts whole = {
        .part = FSDP_STATE_MODEL, .partial = true, .full_state_dict = true};
    fsdp_sd *one = NULL;
    FSDP_TRY(fsdp_sd_create(&one, err));
    FSDP_TRY(fsdp_sd_add_tensor(
        one, entry->name, entry->name_size,
        &(fsdp_tensor){entry->dtype, entry->ndim, entry->shape, entry->layout, entry->data}, err));
    FSDP_TRY(net_set(net, &whole, one, err));
    fsdp_sd_free(one);
    return FSDP_OK;
}

static fsdp_status refuse_without(toy *net, const char *missing, fsdp_error *err)
{
    const fsdp_state_opts whole = {.part = FSDP_STATE_MODEL, .full_state_dict = true};
    fsdp_sd *sd = NULL;
    EXPECT_REFUSAL(fsdp_root_begin_forward(net->root, why), missing);
    EXPECT_REFUSAL(fsdp_unit_unshard(net->unit[1], false, NULL, why), "'1.bias'");
    EXPECT_REFUSAL(fsdp_root_save(net->root, "never", NULL, why), missing);
    EXPECT_REFUSAL(net_get(net, &whole, &sd, why), missing);
    return FSDP_OK;
}

/* The dict's rows are in the parameter's own memory, which is the host's. */
static fsdp_status expect_all_live(toy *net, const fsdp_sd *full, fsdp_error *err)
{
    const fsdp_state_opts whole = {
        .part = FSDP_STATE_MODEL, .full_state_dict = true, .cpu_offload = true};
    fsdp_sd *live = NULL, *again = NULL;
    FSDP_TRY(net_get(net, &(fsdp_state_opts){.part = FSDP_STATE_MODEL}, &live, err));
    for (size_t i = 0; i < fsdp_sd_count(live); i++) {
        fsdp_box box;
        void *shard = fsdp_param_shard(fsdp_model_at(net->model, i), &box);
        EXPECT(fsdp_sd_at(live, i)->data == (fsdp_box_count(&box) > 0 ? shard : NULL));
    }
    FSDP_TRY(net_get(net, &whole, &again, err));
    if (fsdp_world_rank(net->rank->world) == 0)
        FSDP_TRY(net_expect_equal(full, again, 0, err));
    fsdp_sd_free(again);
    fsdp_sd_free(live);
    return FSDP_OK;
}

static fsdp_status load_while_others_lack(toy *net, fsdp_error *err)
{
    static const char *const missing[] = {"4 missing: '0.weight', '0.bias', '1.weight', '1.bias'",
                                          "3 missing: '0.bias', '1.weight', '1.bias'",
                                          "2 missing: '1.weight', '1.bias'", "1 missing: '1.bias'"};
    const fsdp_state_opts whole = {.part = FSDP_STATE_MODEL, .full_state_dict = true};
    fsdp_sd *full = NULL;
    FSDP_TRY(net_get(net, &whole, &full, err));
    FSDP_TRY(net_spoil(net, err));
    FSDP_TRY(fsdp_root_expect_values(net->root, err));
    EXPECT(fsdp_sd_count(full) == 4);
    for (size_t i = 0; i < 4; i++) {
        FSDP_TRY(refuse_without(net, missing[i], err));
        FSDP_TRY(set_one(net, fsdp_sd_at(full, i), err));
    }
    FSDP_TRY(net_forward(net, err));
    FSDP_TRY(expect_all_live(net, full, err));
    fsdp_sd_free(full);
    return FSDP_OK;
}

Test(state_dict, tensors_load_one_by_one_while_others_have_no_values)
{
    for (int64_t ranks = 1; ranks <= 4; ranks++)
        expect_net_on(
            ranks % 2 == 0 ? "cpu-async" : "cpu",
            (toy_case){1, {ranks}, {"dp"}, declare_linears, load_while_others_lack, NULL, {0}});
}

static fsdp_status expect_values_inside(toy *net, fsdp_error *err)
{
    FSDP_TRY(fsdp_root_begin_forward(net->root, err));
    return fsdp_root_expect_values(net->root, err);
}

/* Sets values in every way. */
static fsdp_status bring_values(toy *net, fsdp_error *err)
{
    const char *const call = "begin_forward came before all parameters had values";
    for (int way = 0; way < 4; way++) {
        FSDP_TRY(fsdp_root_expect_values(net->root, err));
        EXPECT_REFUSAL(fsdp_root_begin_forward(net->root, why), call);
        for (size_t i = 0; way == 0 && i < fsdp_model_count(net->model); i++)
            (void)fsdp_param_shard(fsdp_model_at(net->model, i), NULL); /* to write them */
        if (way == 1)
            FSDP_TRY(fsdp_root_init_uniform(net->root, 1, err));
        if (way == 2)
            FSDP_TRY(fsdp_root_sync_from_rank0(net->root, tensor_number, NULL, err));
        if (way == 3) {
            fsdp_sd *live = NULL; /* a checkpoint may be loaded into it */
            FSDP_TRY(net_get(net, NULL, &live, err));
            FSDP_TRY(fsdp_root_set_state(net->root, live, NULL, NULL, err));
            fsdp_sd_free(live);
        }
        FSDP_TRY(net_train(net, 1, err));
        EXPECT_REFUSAL(expect_values_inside(net, why), "between steps, not inside one");
        FSDP_TRY(fsdp_root_end_forward(net->root, err));
    }
    return FSDP_OK;
}

Test(state_dict, values_that_are_expected_come_in_every_way)
{
    expect_net(bring_values, NULL);
}

/* --- S6 to S8: tensor parallelism ------------------------------------------------------------------ */

static fsdp_status expect_numbers(const fsdp_entry *entry, fsdp_error *err)
{
    const float *data = entry->data;
    for (int64_t i = 0; i < fsdp_entry_bytes(entry) / 4; i++)
        if (data[i] != (float)(i + 1))
            return fsdp_fail(err, FSDP_ERR_INTERNAL, "'%s' has %g at %lld", entry->name,
                             (double)data[i], (long long)i);
    return FSDP_OK;
}

static fsdp_status compare_with_plain(toy *net, fsdp_error *err)
{
    const fsdp_state_opts whole = {.part = FSDP_STATE_MODEL, .full_state_dict = true};
    fsdp_sd *full = NULL;
    FSDP_TRY(net_get(net, &whole, &full, err));
    for (size_t i = 0; i < fsdp_sd_count(full); i++)
        FSDP_TRY(expect_numbers(fsdp_sd_at(full, i), err));
    FSDP_TRY(net_spoil(net, err));
    FSDP_TRY(net_set(net, &whole, full, err));
    fsdp_sd_free(full);
    FSDP_TRY(net_get(net, &whole, &full, err));
    for (size_t i = 0; i < fsdp_sd_count(full); i++)
        FSDP_TRY(expect_numbers(fsdp_sd_at(full, i), err));
    fsdp_sd_free(full);
    return save_and_load(net, err);
}

Test(state_dict, tensor_parallel_parameters_are_whole_tensors_in_a_full_dict)
{
    fsdp_unit_opts opts = (fsdp_unit_opts){0};
    opts.shard_dims = "dp";
    opts.replicate_dims = "";
    for (int64_t dim = 4; dim <= 10; dim += 2) {
        expect_net_on(
            "cpu",
            (toy_case){2, {2, 2}, {"dp", "tp"}, declare_mlp, compare_with_plain, &dim, opts});
        expect_net_on(
            "cpu",
            (toy_case){2, {3, 2}, {"dp", "tp"}, declare_mlp, compare_with_plain, &dim, opts});
    }
    opts.replicate_dims = "rep";
    for (int64_t dim = 4; dim <= 10; dim += 2)
        expect_net_on(
            "cpu-async",
            (toy_case){
                3, {2, 2, 2}, {"rep", "dp", "tp"}, declare_mlp, compare_with_plain, &dim, opts});
}

/* --- S9: rank 0 ------------------------------------------------------------------------------------ */

static fsdp_status get_on_rank0(toy *net, fsdp_error *err)
{
    const fsdp_state_opts opts = {.full_state_dict = true, .cpu_offload = true};
    char names[8000], live_names[8000];
    fsdp_sd *full = NULL, *live = NULL;
    FSDP_TRY(net_train(net, 2, err));
    FSDP_TRY(fsdp_root_init(net->root, tensor_number, NULL, err));
    FSDP_TRY(net_get(net, &opts, &full, err));
    FSDP_TRY(net_get(net, NULL, &live, err));
    if (fsdp_world_rank(net->rank->world) > 0) {
        EXPECT(fsdp_sd_count(full) == 0);
    } else {
        net_names(full, names, sizeof names);
        net_names(live, live_names, sizeof live_names);
        EXPECT(strcmp(names, live_names) == 0);
        for (size_t i = 0; i < 6; i++)
            FSDP_TRY(expect_numbers(fsdp_sd_at(full, i == 1 ? 0 : i), err));
        EXPECT(*(const float *)net_entry(full, "optim.state.layers.0.bias.step")->data == 2);
        EXPECT(net_entry(full, "model.embed.weight")->data !=
               net_entry(live, "model.embed.weight")->data);
    }
    fsdp_sd_free(live);
    fsdp_sd_free(full);
    return FSDP_OK;
}

Test(state_dict, with_cpu_offload_rank_0_alone_gets_the_full_dict_in_the_same_order)
{
    expect_net(get_on_rank0, NULL);
}

/* --- S10: what is whole ------------------------------------------------------------------------------ */

static fsdp_status set_whole_by_mistake(toy *net, fsdp_error *err)
{
    const fsdp_state_opts whole = {.full_state_dict = true}, none = {0};
    int rank = fsdp_world_rank(net->rank->world);
    const fsdp_state_opts copied = {.cpu_offload = true};
    fsdp_sd *full = NULL, *before = NULL, *after = NULL;
    FSDP_TRY(net_get(net, &whole, &full, err));
    FSDP_TRY(net_spoil(net, err));
    FSDP_TRY(net_get(net, &copied, &before, err));
    if (fsdp_world_size(net->rank->world) > 1)
        EXPECT_REFUSAL(net_set(net, &none, full, why),
                       "'model.embed.weight' is a whole tensor, and the parameter is sharded: set "
                       "full_state_dict");
    else
        FSDP_TRY(net_set(net, &none, full, err));
    FSDP_TRY(net_get(net, NULL, &after, err));
    if (fsdp_world_size(net->rank->world) > 1)
        FSDP_TRY(net_expect_equal(before, after, rank, err));
    fsdp_sd_free(after);
    fsdp_sd_free(before);
    fsdp_sd_free(full);
    return FSDP_OK;
}

Test(state_dict, a_whole_tensor_is_not_loaded_into_a_sharded_parameter_by_mistake)
{
    expect_net(set_whole_by_mistake, NULL);
}
