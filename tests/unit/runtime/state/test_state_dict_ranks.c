/*
 * State dicts that need all ranks: whole ones on every rank, dicts of rank 0, and checkpoints that another
 * number of ranks loads; errors for ranks that differ, and failed allocations.
 */
#include "base/io/io.h"
#include "base/core/mem.h"
#include "tests/unit/runtime/expect_toy.h"
#include <fsdp/convert.h>
#include <fsdp/root_init.h>

#include <math.h>
#include <stdlib.h>
#include <unistd.h>

static int rank_of(const toy *net)
{
    return fsdp_world_rank(net->rank->world);
}

static fsdp_status empty_dict(fsdp_sd **sd_out, fsdp_error *err)
{
    return fsdp_sd_create(sd_out, err);
}

/* --- whole on every rank --------------------------------------------------------------------------- */

/* The whole dict that every rank gets equals the one that rank 0 gets alone. */
static fsdp_status compare_ways(toy *net, fsdp_error *err)
{
    const fsdp_state_opts everywhere = {.full_state_dict = true};
    const fsdp_state_opts rank0 = {.full_state_dict = true, .cpu_offload = true};
    fsdp_sd *all = NULL, *first = NULL;
    FSDP_TRY(net_train(net, 2, err));
    FSDP_TRY(net_get(net, &everywhere, &all, err));
    FSDP_TRY(net_get(net, &rank0, &first, err));
    EXPECT(rank_of(net) == 0 || fsdp_sd_count(first) == 0);
    if (rank_of(net) == 0)
        FSDP_TRY(net_expect_equal(first, all, 0, err));
    for (size_t i = 0; i < fsdp_sd_count(all); i++) {
        const fsdp_entry *entry = fsdp_sd_at(all, i);
        EXPECT(entry->kind != FSDP_ENTRY_TENSOR ||
               fsdp_entry_local_bytes(entry, rank_of(net)) == fsdp_entry_bytes(entry));
    }
    const float *moment = net_entry(all, "optim.state.embed.weight.exp_avg")->data;
    for (int i = 0; i < 36; i++)
        EXPECT(fabsf(moment[i] - 0.19f * (float)(i + 1) * 0.5f) < 1e-4f);
    fsdp_sd_free(first);
    fsdp_sd_free(all);
    return FSDP_OK;
}

static const toy_case meshes[] = {{1, {1}, {"dp"}, NULL, NULL, NULL, {0}},
                                  {1, {2}, {"dp"}, NULL, NULL, NULL, {0}},
                                  {1, {3}, {"dp"}, NULL, NULL, NULL, {0}},
                                  {1, {4}, {"dp"}, NULL, NULL, NULL, {0}},
                                  {2, {2, 2}, {"rep", "dp"}, NULL, NULL, NULL, {0}}};

static void expect_on_meshes(fsdp_status (*body)(toy *net, fsdp_error *err))
{
    for (size_t i = 0; i < sizeof meshes / sizeof *meshes; i++) {
        toy_case what = meshes[i];
        what.declare = declare_net;
        what.body = body;
        expect_net_on(i % 2 ? "cpu-async" : "cpu", what);
    }
}

Test(state_dict_ranks, every_rank_gets_what_rank_0_gets_alone)
{
    expect_on_meshes(compare_ways);
}

/* A tensor larger than the buffer, which is moved in pieces that end inside rows. */
static fsdp_status declare_large(toy *net, fsdp_error *err)
{
    return net_add(net, "w", 2, (int64_t[]){7, 1 << 20}, NULL, err);
}

static fsdp_status move_large(toy *net, fsdp_error *err)
{
    const fsdp_state_opts whole = {.full_state_dict = true, .part = FSDP_STATE_MODEL};
    const fsdp_state_opts sent = {
        .full_state_dict = true, .part = FSDP_STATE_MODEL, .broadcast_from_rank0 = true};
    fsdp_sd *full = NULL;
    fsdp_box box;
    FSDP_TRY(net_get(net, &whole, &full, err));
    const float *data = net_entry(full, "model.w")->data;
    for (int64_t i = 0; i < 7 << 20; i += 1021)
        EXPECT(data[i] == (float)(i + 1));
    float *shard = fsdp_param_shard(fsdp_model_at(net->model, 0), &box);
    memset(shard, 0, (size_t)fsdp_box_count(&box) * sizeof *shard);
    FSDP_TRY(net_set(net, &sent, full, err));
    for (int64_t i = 0; i < fsdp_box_count(&box); i += 1021)
        EXPECT(shard[i] == (float)((box.lo[0] << 20) + i + 1));
    fsdp_sd_free(full);
    return FSDP_OK;
}

Test(state_dict_ranks, large_tensors_go_in_pieces)
{
    expect_net_on("cpu", (toy_case){1, {2}, {"dp"}, declare_large, move_large, NULL, {0}});
}

/* --- set from whole dicts ---------------------------------------------------------------------------- */

static fsdp_status expect_back(toy *net, const fsdp_sd *before, fsdp_error *err)
{
    fsdp_sd *after = NULL;
    FSDP_TRY(net_get(net, NULL, &after, err));
    fsdp_status status = net_expect_equal(before, after, rank_of(net), err);
    fsdp_sd_free(after);
    return status;
}

/* Sets from every rank's whole dict, then from rank 0's, in both forms of hyper-parameters. */
static fsdp_status set_whole(toy *net, fsdp_error *err)
{
    const fsdp_state_opts copied = {.cpu_offload = true};
    fsdp_sd *before = NULL;
    FSDP_TRY(net_train(net, 2, err));
    FSDP_TRY(net_get(net, &copied, &before, err));
    for (int i = 0; i < 4; i++) {
        fsdp_state_opts opts = {
            .full_state_dict = true, .nested_optim = i % 2, .cpu_offload = i / 2};
        fsdp_sd *full = NULL;
        FSDP_TRY(net_get(net, &opts, &full, err));
        FSDP_TRY(net_spoil(net, err));
        opts.broadcast_from_rank0 = opts.cpu_offload;
        FSDP_TRY(net_set(net, &opts, full, err));
        FSDP_TRY(expect_back(net, before, err));
        fsdp_sd_free(full);
    }
    fsdp_sd_free(before);
    return FSDP_OK;
}

Test(state_dict_ranks, whole_dicts_are_set_on_every_rank_or_from_rank_0)
{
    expect_on_meshes(set_whole);
}

/* Sends a value that is too large for a manifest's text: a list of very many names. */
static fsdp_status send_large_value(toy *net, fsdp_error *err)
{
    const fsdp_state_opts sent = {.full_state_dict = true,
                                  .broadcast_from_rank0 = true,
                                  .part = FSDP_STATE_OPTIM,
                                  .partial = true};
    fsdp_sd *sd = NULL, *nested = NULL;
    fsdp_value list = {0};
    FSDP_TRY(net_get(net, &(fsdp_state_opts){.part = FSDP_STATE_OPTIM, .nested_optim = true},
                     &nested, err));
    FSDP_TRY(fsdp_value_copy(&net_entry(nested, "optim.param_groups")->value, &list, err));
    fsdp_value *members = &list.as.list.items[0].as.list.items[11], many = {0};
    FSDP_TRY(fsdp_value_set_items(&many, FSDP_VALUE_LIST, 9000, err));
    for (size_t i = 0; i < 9000; i++)
        FSDP_TRY(fsdp_value_copy(&members->as.list.items[0], &many.as.list.items[i], err));
    fsdp_value_release(members);
    *members = many;
    list.as.list.items[0].as.list.items[1] = fsdp_value_f64(11);
    FSDP_TRY(empty_dict(&sd, err));
    if (rank_of(net) == 0)
        FSDP_TRY(fsdp_sd_add_value(sd, FSDP_NAME("optim.param_groups"), &list, err));
    fsdp_value_release(&list);
    FSDP_TRY(net_set(net, &sent, sd, err));
    EXPECT(fsdp_optim_lr(net->optim, 0) == 11 && fsdp_optim_lr(net->optim, 1) == 0.125);
    fsdp_sd_free(nested);
    fsdp_sd_free(sd);
    return FSDP_OK;
}

Test(state_dict_ranks, large_values_travel_from_rank_0)
{
    expect_net(send_large_value, NULL);
}

/* Entries that rank 0 lacks are missing on all ranks; its extra entries are not sent. */
static fsdp_status send_unfitting(toy *net, fsdp_error *err)
{
    const fsdp_layout alone = {.kind = FSDP_LAYOUT_MESH, .mesh = net->mesh};
    fsdp_state_opts sent = {
        .full_state_dict = true, .broadcast_from_rank0 = true, .part = FSDP_STATE_MODEL};
    float values[5] = {9, 8, 7, 6, 5};
    fsdp_load_report report;
    fsdp_sd *sd = NULL;
    fsdp_box box;
    FSDP_TRY(empty_dict(&sd, err));
    if (rank_of(net) == 0) {
        FSDP_TRY(fsdp_sd_add_tensor(sd, FSDP_NAME("model.layers.0.bias"),
                                    &(fsdp_tensor){FSDP_F32, 1, (int64_t[]){5}, alone, values},
                                    err));
        FSDP_TRY(fsdp_sd_add_tensor(sd, FSDP_NAME("model.layers.9.bias"),
                                    &(fsdp_tensor){FSDP_F32, 1, (int64_t[]){5}, alone, values},
                                    err));
    }
    EXPECT_REFUSAL(fsdp_root_set_state(net->root, sd, &sent, NULL, why),
                   "1 unexpected: 'model.layers.9.bias'");
    sent.partial = true;
    FSDP_TRY(fsdp_root_set_state(net->root, rank_of(net) == 0 ? sd : NULL, &sent, &report, err));
    EXPECT(report.missing_count == 7 && report.unexpected_count == 1);
    EXPECT(strcmp(report.missing[0], "model.embed.weight") == 0);
    fsdp_load_report_release(&report);
    const float *data = fsdp_param_shard(fsdp_model_find(net->model, "layers.0.bias"), &box);
    for (int64_t i = 0; i < fsdp_box_count(&box); i++)
        EXPECT(data[i] == values[box.lo[0] + i]);
    fsdp_sd_free(sd);
    return FSDP_OK;
}

Test(state_dict_ranks, names_are_compared_with_those_of_rank_0)
{
    expect_net(send_unfitting, NULL);
}

static fsdp_status send_sharded(toy *net, fsdp_error *err)
{
    const fsdp_state_opts sent = {.full_state_dict = true, .broadcast_from_rank0 = true};
    const fsdp_state_opts whole = {.full_state_dict = true};
    fsdp_sd *sd = NULL, *full = NULL;
    FSDP_TRY(net_get(net, NULL, &sd, err));
    if (fsdp_world_size(net->rank->world) > 1)
        EXPECT_REFUSAL(net_set(net, &sent, sd, why),
                       "'model.embed.weight' is not whole in rank 0's memory");
    FSDP_TRY(net_set(net, &whole, sd, err)); /* laid out as the parameters */
    EXPECT_REFUSAL(net_set(net, &sent, NULL, why), "there is no state dict");
    FSDP_TRY(net_get(net, &whole, &full, err));
    fsdp_sd_free(full);
    fsdp_sd_free(sd);
    return FSDP_OK;
}

Test(state_dict_ranks, what_rank_0_sends_is_whole)
{
    expect_net(send_sharded, NULL);
}

/* --- ranks that differ -------------------------------------------------------------------------------- */

static fsdp_status differ(toy *net, fsdp_error *err)
{
    fsdp_state_opts opts = {.full_state_dict = true, .ignore_frozen = rank_of(net) == 1};
    fsdp_state_opts sent = {.full_state_dict = true, .broadcast_from_rank0 = true};
    fsdp_sd *sd = NULL;
    if (fsdp_world_size(net->rank->world) == 1)
        return FSDP_OK;
    EXPECT_REFUSAL(net_get(net, &opts, &sd, why),
                   "entry 6 is 'model.norm.scale' on rank 0 and 'model.norm.mean' on rank 1");
    opts.ignore_frozen = false;
    opts.cpu_offload = rank_of(net) == 1;
    EXPECT_REFUSAL(net_get(net, &opts, &sd, why),
                   "rank 0 gets whole state and rank 1 gets whole state on rank 0");
    opts.cpu_offload = false;
    if (rank_of(net) == 1) {
        FSDP_TRY(empty_dict(&sd, err));
        EXPECT_REFUSAL(net_set(net, &sent, sd, why), "rank 1 is in fsdp_root_set_state");
        fsdp_sd_free(sd);
    } else {
        EXPECT_REFUSAL(net_get(net, &opts, &sd, why), "rank 1 is in fsdp_root_set_state");
    }
    FSDP_TRY(net_get(net, &opts, &sd, err)); /* none of that has harmed anything */
    fsdp_sd_free(sd);
    return FSDP_OK;
}

Test(state_dict_ranks, ranks_that_ask_for_different_dicts_are_told)
{
    expect_net(differ, NULL);
}

static fsdp_status fail_alone(toy *net, fsdp_error *err)
{
    const char *none[] = {"nothing"};
    const fsdp_state_opts whole = {.full_state_dict = true};
    const fsdp_state_opts wrong = {
        .full_state_dict = true, .submodules = none, .submodule_count = 1};
    fsdp_sd *sd = NULL;
    bool is_last = rank_of(net) == fsdp_world_size(net->rank->world) - 1;
    EXPECT_REFUSAL(net_get(net, is_last ? &wrong : &whole, &sd, why),
                   "no parameter is below 'nothing'");
    EXPECT(!sd);
    return FSDP_OK;
}

Test(state_dict_ranks, a_rank_that_fails_alone_fails_all)
{
    expect_net(fail_alone, NULL);
}

/* --- checkpoints ---------------------------------------------------------------------------------------- */

typedef struct checkpoint_case {
    char path[64];
    bool nested;
} checkpoint_case;

static fsdp_status save(toy *net, fsdp_error *err)
{
    const checkpoint_case *what = net->user;
    const fsdp_state_opts opts = {.nested_optim = what->nested};
    fsdp_sd *sd = NULL;
    FSDP_TRY(net_train(net, 2, err));
    FSDP_TRY(fsdp_root_init(net->root, tensor_number, NULL, err));
    if (!what->nested)
        return fsdp_root_save(net->root, what->path, NULL, err);
    FSDP_TRY(net_get(net, &opts, &sd, err));
    fsdp_status status = fsdp_sd_save(sd, fsdp_world_ctl(net->rank->world), what->path, NULL, err);
    fsdp_sd_free(sd);
    return status;
}

/* Loads on another mesh: weights, moments, steps and hyper-parameters equal the saved ones. */
static fsdp_status load(toy *net, fsdp_error *err)
{
    const checkpoint_case *what = net->user;
    fsdp_sd *full = NULL;
    FSDP_TRY(net_spoil(net, err));
    FSDP_TRY(fsdp_root_load(net->root, what->path, NULL, err));
    EXPECT(fsdp_optim_lr(net->optim, 0) == 0.25 && fsdp_optim_lr(net->optim, 1) == 0.125);
    FSDP_TRY(net_get(net, &(fsdp_state_opts){.full_state_dict = true}, &full, err));
    const float *weight = net_entry(full, "model.embed.weight")->data;
    const float *moment = net_entry(full, "optim.state.embed.weight.exp_avg")->data;
    for (int i = 0; i < 36; i++)
        EXPECT(weight[i] == (float)(i + 1) && fabsf(moment[i] - 0.095f * (float)(i + 1)) < 1e-4f);
    EXPECT(*(float *)net_entry(full, "optim.state.layers.1.bias.step")->data == 2);
    fsdp_sd_free(full);
    FSDP_TRY(net_spoil(net, err));
    const fsdp_root_load_opts model_only = {.state.part = FSDP_STATE_MODEL};
    FSDP_TRY(fsdp_root_load(net->root, what->path, &model_only, err));
    fsdp_param *bias = fsdp_model_find(net->model, "layers.1.bias");
    EXPECT(fsdp_optim_lr(net->optim, 0) == 77);
    if (rank_of(net) == 0)
        EXPECT(*(float *)fsdp_param_shard(bias, NULL) == 1);
    return FSDP_OK;
}

static void run_on(const toy_case *mesh, fsdp_status (*body)(toy *net, fsdp_error *err),
                   const checkpoint_case *user)
{
    toy_case what = *mesh;
    what.declare = declare_net;
    what.body = body;
    what.user = user;
    expect_net_on("cpu", what);
}

Test(state_dict_ranks, a_checkpoint_loads_on_any_other_mesh)
{
    enum { MESHES = sizeof meshes / sizeof *meshes };
    char dir[] = "/tmp/fsdp-state-XXXXXX";
    cr_assert(mkdtemp(dir));
    for (size_t from = 0; from < MESHES; from++) {
        checkpoint_case what = {.nested = from % 2};
        snprintf(what.path, sizeof what.path, "%s/%zu", dir, from);
        run_on(&meshes[from], save, &what);
        for (size_t to = from % 2; to < MESHES; to += 2)
            run_on(&meshes[to], load, &what);
    }
    cr_assert_eq(fsdp_io_remove_tree(NULL, dir, NULL), FSDP_OK);
}

/* A checkpoint in PyTorch's format loads without a conversion. */
Test(state_dict_ranks, a_checkpoint_of_another_program_loads_on_any_mesh)
{
    char dir[] = "/tmp/fsdp-state-XXXXXX";
    const fsdp_convert_opts opts = {.format = "dcp"};
    checkpoint_case ours = {.nested = false}, theirs = {.nested = false};
    fsdp_error err = {0};
    cr_assert(mkdtemp(dir));
    snprintf(ours.path, sizeof ours.path, "%s/ours", dir);
    snprintf(theirs.path, sizeof theirs.path, "%s/theirs", dir);
    run_on(&meshes[2], save, &ours);
    cr_assert_eq(fsdp_checkpoint_convert(ours.path, theirs.path, &opts, &err), FSDP_OK, "%s",
                 err.text);
    for (size_t to = 0; to < sizeof meshes / sizeof *meshes; to++)
        run_on(&meshes[to], load, &theirs);
    cr_assert_eq(fsdp_io_remove_tree(NULL, dir, NULL), FSDP_OK);
}

/* --- masters ---------------------------------------------------------------------------------------- */

static fsdp_status declare_half(toy *net, fsdp_error *err)
{
    return fsdp_model_add(
        net->model,
        &(fsdp_param_spec){.name = "w", .dtype = FSDP_BF16, .ndim = 1, .shape = (int64_t[]){5}},
        NULL, err);
}

static fsdp_status one_half(void *user, const fsdp_param *param, const fsdp_box *box, void *data,
                            fsdp_error *err)
{
    (void)param;
    (void)err;
    for (int64_t i = 0; i < fsdp_box_count(box); i++)
        ((uint16_t *)data)[i] = *(const uint16_t *)user; /* the bits of a bf16 */
    return FSDP_OK;
}

static const float *master_of(toy *net, fsdp_sd **sd, fsdp_error *err)
{
    fsdp_sd_free(*sd);
    *sd = NULL;
    if (net_get(net, NULL, sd, err) != FSDP_OK)
        return NULL;
    return net_entry(*sd, "optim.state.w.master")->data;
}

/* Setting a parameter without its master sets the master from it; setting only optimizer state does not. */
static fsdp_status follow_master(toy *net, fsdp_error *err)
{
    const fsdp_state_opts model = {.part = FSDP_STATE_MODEL}, optim = {.part = FSDP_STATE_OPTIM};
    const fsdp_state_opts copied = {.cpu_offload = true, .part = FSDP_STATE_MODEL};
    uint16_t one = 0x3F80, two = 0x4000;
    fsdp_sd *ones = NULL, *sd = NULL, *part = NULL;
    FSDP_TRY(fsdp_root_init(net->root, one_half, &one, err));
    FSDP_TRY(net_get(net, &copied, &ones, err));
    FSDP_TRY(fsdp_root_init(net->root, one_half, &two, err));
    FSDP_TRY(net_set(net, &model, ones, err));
    const float *master = master_of(net, &sd, err);
    EXPECT(!master || master[0] == 1);
    if (master)
        memcpy((void *)(uintptr_t)master, &(float){1.001f}, sizeof(float));
    FSDP_TRY(empty_dict(&part, err));
    for (size_t i = 0; i < fsdp_sd_count(sd); i++) {
        const fsdp_entry *entry = fsdp_sd_at(sd, i);
        if (entry->kind == FSDP_ENTRY_VALUE)
            FSDP_TRY(fsdp_sd_add_value(part, entry->name, entry->name_size, &entry->value, err));
        else if (!strstr(entry->name, "master") && strncmp(entry->name, "optim", 5) == 0)
            FSDP_TRY(fsdp_sd_add_tensor(
                part, entry->name, entry->name_size,
                &(fsdp_tensor){entry->dtype, entry->ndim, entry->shape, entry->layout, entry->data},
                err));
    }
    FSDP_TRY(net_set(net, &optim, part, err));
    master = master_of(net, &sd, err);
    EXPECT(!master || master[0] == 1.001f);
    fsdp_sd_free(part);
    fsdp_sd_free(sd);
    fsdp_sd_free(ones);
    return FSDP_OK;
}

Test(state_dict_ranks, a_master_that_does_not_come_follows_its_parameter)
{
    for (int64_t ranks = 1; ranks <= 4; ranks++)
        expect_net_on("cpu",
                      (toy_case){1, {ranks}, {"dp"}, declare_half, follow_master, NULL, {0}});
}

/* --- memory ----------------------------------------------------------------------------------------- */

static fsdp_status move_all(toy *net, bool nested, fsdp_error *err)
{
    fsdp_state_opts opts = {.full_state_dict = true, .nested_optim = nested};
    fsdp_sd *full = NULL;
    fsdp_load_report report;
    FSDP_TRY(net_get(net, &opts, &full, err));
    opts.broadcast_from_rank0 = !nested;
    fsdp_status status = fsdp_root_set_state(net->root, full, &opts, &report, err);
    fsdp_load_report_release(&report);
    fsdp_sd_free(full);
    return status;
}

static fsdp_status fail_every_allocation(toy *net, fsdp_error *err)
{
    for (int nested = 0; nested < 2; nested++) {
        fsdp_status status = FSDP_ERR_LIMIT;
        for (int64_t n = 0; status != FSDP_OK; n++) {
            fsdp_error refused = {0};
            fsdp_mem_fail_after(n, false);
            status = move_all(net, nested, &refused);
            fsdp_mem_fail_after(-1, false);
            EXPECT(status == FSDP_OK ||
                   (status == FSDP_ERR_LIMIT && strstr(refused.text, "memory")));
            EXPECT(n < 5000);
        }
    }
    return FSDP_OK;
}

Test(state_dict_ranks, without_memory_nothing_breaks)
{
    expect_net_on("cpu", (toy_case){1, {1}, {"dp"}, declare_net, fail_every_allocation, NULL, {0}});
}
