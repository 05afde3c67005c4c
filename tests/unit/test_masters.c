/* f32 masters of narrow parameters follow whatever sets these, and keep what they know beyond them. */
#include "runtime/optim/optim_internal.h"
#include "tests/support/state_net.h"

#include <criterion/criterion.h>
#include <stdlib.h>

#include <fsdp/root_init.h>

enum { ROWS = 300, COLUMNS = 3, MOST = ROWS * COLUMNS };

typedef struct narrow_net {
    fsdp_mesh *mesh;
    fsdp_model *model;
    fsdp_root *root;
    fsdp_optim *optim;
    fsdp_param *weight;
} narrow_net;

static fsdp_status build(narrow_net *net, fsdp_world *world, fsdp_error *err)
{
    int64_t size = fsdp_world_size(world);
    FSDP_TRY(fsdp_world_mesh(world, 1, &size, (const char *[]){"dp"}, &net->mesh, err));
    FSDP_TRY(fsdp_model_create(world, &net->model, err));
    const fsdp_unit_opts opts = fsdp_unit_opts_default(net->mesh);
    const fsdp_adamw_opts adamw = fsdp_adamw_opts_default();
    FSDP_TRY(fsdp_model_add_param(net->model, "w", FSDP_BF16, 2, (int64_t[]){ROWS, COLUMNS},
                                  &net->weight, err));
    FSDP_TRY(fsdp_root_create(net->model, &opts, &net->root, err));
    return fsdp_adamw_create(net->root, &adamw, &net->optim, err);
}

static void free_net(narrow_net *net)
{
    fsdp_optim_free(net->optim);
    fsdp_root_free(net->root);
    fsdp_model_free(net->model);
    fsdp_mesh_free(net->mesh);
}

static fsdp_status fill_with(void *user, const fsdp_param *param, const fsdp_box *box, void *data,
                             fsdp_error *err)
{
    const float *value = user;
    (void)err;
    for (int64_t i = 0; i < fsdp_box_count(box); i++)
        fsdp_cast((char *)data + 2 * i, fsdp_param_dtype(param), value, FSDP_F32, 1);
    return FSDP_OK;
}

static fsdp_status expect_all(const narrow_net *net, float value, fsdp_error *err)
{
    for (int64_t i = 0; i < fsdp_param_own_count(net->weight); i++)
        EXPECT(net->optim->states[0].master[i] == value);
    return FSDP_OK;
}

static fsdp_status set_every_way(narrow_net *net, const char *dir, fsdp_error *err)
{
    static float values[] = {2, 3, 4};
    const fsdp_state_opts copied = {.part = FSDP_STATE_MODEL, .cpu_offload = true};
    const fsdp_root_save_opts save = {.state.part = FSDP_STATE_MODEL};
    const fsdp_root_load_opts load = {.state.part = FSDP_STATE_MODEL};
    fsdp_sd *sd = NULL;
    FSDP_TRY(fsdp_root_init(net->root, fill_with, &values[0], err));
    FSDP_TRY(expect_all(net, 2, err));
    FSDP_TRY(fsdp_root_save(net->root, dir, &save, err));
    FSDP_TRY(fsdp_root_sync_from_rank0(net->root, fill_with, &values[1], err));
    FSDP_TRY(expect_all(net, 3, err));
    FSDP_TRY(fsdp_root_load(net->root, dir, &load, err));
    FSDP_TRY(expect_all(net, 2, err));
    FSDP_TRY(fsdp_root_get_state(net->root, &copied, &sd, err));
    fsdp_status status = fsdp_root_init(net->root, fill_with, &values[2], err);
    if (status == FSDP_OK)
        status = fsdp_root_set_state(net->root, sd, &copied, NULL, err);
    fsdp_sd_free(sd);
    FSDP_TRY(status);
    return expect_all(net, 2, err);
}

static fsdp_status run_every_way(world_rank *rank, fsdp_error *err)
{
    narrow_net net = {0};
    fsdp_status status = build(&net, rank->world, err);
    if (status == FSDP_OK)
        status = set_every_way(&net, rank->user, err);
    free_net(&net);
    return status;
}

Test(masters, follow_what_is_set_without_the_optimizer)
{
    fsdp_error err = {0};
    char dir[] = "/tmp/fsdp-masters-XXXXXX", path[64], command[80];
    cr_assert_not_null(mkdtemp(dir));
    snprintf(path, sizeof path, "%s/saved", dir);
    cr_assert_eq(run_worlds(2, "cpu-async", run_every_way, path, &err), FSDP_OK, "%s", err.text);
    snprintf(command, sizeof command, "rm -r %s", dir);
    cr_assert_eq(system(command), 0);
}

/* A third of an ulp is more than a parameter can say. */
static fsdp_status change_by_hand(narrow_net *net, fsdp_error *err)
{
    static float one = 1, two = 2;
    const float known = 1 + 1.0f / 512;
    float *master = net->optim->states[0].master;
    int64_t count = fsdp_param_own_count(net->weight);
    FSDP_TRY(fsdp_root_init(net->root, fill_with, &one, err));
    for (int64_t i = 0; i < count; i++)
        master[i] = known;
    fsdp_cast((char *)net->weight->shard + 2 * (count - 1), FSDP_BF16, &two, FSDP_F32, 1);
    fsdp_optim_refresh_masters(net->optim);
    for (int64_t i = 0; i + 1 < count; i++)
        EXPECT(master[i] == known);
    EXPECT(master[count - 1] == 2);
    return FSDP_OK;
}

static fsdp_status run_by_hand(world_rank *rank, fsdp_error *err)
{
    narrow_net net = {0};
    fsdp_status status = build(&net, rank->world, err);
    if (status == FSDP_OK)
        status = change_by_hand(&net, err);
    free_net(&net);
    return status;
}

Test(masters, keep_what_they_know_of_parameters_that_did_not_change)
{
    fsdp_error err = {0};
    cr_assert_eq(run_worlds(2, "cpu", run_by_hand, NULL, &err), FSDP_OK, "%s", err.text);
}
