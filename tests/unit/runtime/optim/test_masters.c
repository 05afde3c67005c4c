/* f32 masters of narrow parameters follow whatever sets these, and keep what they know beyond them. */
#include "base/io/io.h"
#include "runtime/optim/optim_internal.h"
#include "tests/unit/runtime/expect_toy.h"

#include <stdlib.h>

enum { ROWS = 300, COLUMNS = 3, MOST = ROWS * COLUMNS };

static fsdp_status declare(toy *net, fsdp_error *err)
{
    const fsdp_adamw_opts adamw = {.weight_decay = 0.01};
    FSDP_TRY(fsdp_model_add(
        net->model,
        &(fsdp_param_spec){
            .name = "w", .dtype = FSDP_BF16, .ndim = 2, .shape = (int64_t[]){ROWS, COLUMNS}},
        &net->own, err));
    FSDP_TRY(fsdp_root_create(net->model, &net->opts, &net->root, err));
    return toy_add_adamw(net, &adamw, err);
}

static fsdp_status fill_with(void *user, const fsdp_param *param, const fsdp_box *box, void *data,
                             fsdp_error *err)
{
    const float *value = user;
    (void)err;
    for (int64_t i = 0; i < fsdp_box_count(box); i++)
        fsdp_cast((char *)data + 2 * i, fsdp_param_describe(param).dtype, value, FSDP_F32, 1);
    return FSDP_OK;
}

static fsdp_status expect_all(const toy *net, float value, fsdp_error *err)
{
    for (int64_t i = 0; i < fsdp_param_local_count(net->own); i++)
        EXPECT(net->optim->states[0].master[i] == value);
    return FSDP_OK;
}

static fsdp_status set_every_way(toy *net, fsdp_error *err)
{
    const char *dir = net->user;
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

Test(masters, follow_what_is_set_without_the_optimizer)
{
    char dir[] = "/tmp/fsdp-masters-XXXXXX", path[64];
    cr_assert_not_null(mkdtemp(dir));
    snprintf(path, sizeof path, "%s/saved", dir);
    expect_toy_on("cpu-async", (toy_case){1, {2}, {"dp"}, declare, set_every_way, path, {0}});
    cr_assert_eq(fsdp_io_remove_tree(NULL, dir, NULL), FSDP_OK);
}

/* A third of an ulp is more than a parameter can say. */
static fsdp_status change_by_hand(toy *net, fsdp_error *err)
{
    static float one = 1, two = 2;
    const float known = 1 + 1.0f / 512;
    float *master = net->optim->states[0].master;
    int64_t count = fsdp_param_local_count(net->own);
    FSDP_TRY(fsdp_root_init(net->root, fill_with, &one, err));
    for (int64_t i = 0; i < count; i++)
        master[i] = known;
    fsdp_cast((char *)net->own->shard + 2 * (count - 1), FSDP_BF16, &two, FSDP_F32, 1);
    fsdp_optim_refresh_masters(net->optim);
    for (int64_t i = 0; i + 1 < count; i++)
        EXPECT(master[i] == known);
    EXPECT(master[count - 1] == 2);
    return FSDP_OK;
}

Test(masters, keep_what_they_know_of_parameters_that_did_not_change)
{
    expect_toy_on("cpu", (toy_case){1, {2}, {"dp"}, declare, change_by_hand, NULL, {0}});
}
