/*
 * The FSDP1 face: values of parameters are set, and what was gathered before does not stay: by the caller's
 * function, as rank 0 has them, by summoning, and by state dicts.
 */
#include "tests/support/nets/training.h"
#include <fsdp/root_init.h>
#include <fsdp/state.h>

#include <criterion/criterion.h>
#include <string.h>

typedef struct values_case {
    net_setup setup;
    fsdp_status (*body)(toy *net, fsdp_error *err);
} values_case;

static fsdp_status run_case(world_rank *rank, fsdp_error *err)
{
    const values_case *what = rank->user;
    toy net;
    fsdp_status status = net_build(&net, rank->world, &what->setup, err);
    if (status == FSDP_OK)
        status = what->body(&net, err);
    toy_free(&net);
    return status;
}

/* Over whole ranks, and replicas of shards; runs that are not boxes (3 ranks), with originals and without. */
static void expect_everywhere(fsdp_status (*body)(toy *net, fsdp_error *err))
{
    for (int ranks = 1; ranks <= 4; ranks++)
        for (int strategy = 0; strategy <= FSDP_WRAP_HYBRID_SHARD_ZERO2; strategy += 2) {
            values_case what = {.setup = net_setup_default(), .body = body};
            fsdp_error err = {0};
            bool is_hybrid = strategy >= FSDP_WRAP_HYBRID_SHARD;
            what.setup.wrap.unit.strategy = (fsdp_wrap_strategy)strategy;
            what.setup.wrap.use_orig_params = ranks % 2;
            what.setup.replicas = is_hybrid ? 1 + (ranks % 2 == 0) : 0;
            cr_assert_eq(run_worlds(ranks, "cpu-async", run_case, &what, &err), FSDP_OK,
                         "%d ranks, strategy %d: %s", ranks, strategy, err.text);
        }
}

static fsdp_status expect(bool condition, const char *what, fsdp_error *err)
{
    return condition ? FSDP_OK : fsdp_fail(err, FSDP_ERR_INTERNAL, "not so: %s", what);
}

/* Fills each element with its number in the tensor times a factor. */
static fsdp_status number(void *user, const fsdp_param *param, const fsdp_box *box, void *data,
                          fsdp_error *err)
{
    float *values = data;
    int64_t at[FSDP_MAX_DIMS];
    (void)err;
    memcpy(at, box->lo, sizeof at);
    for (int64_t n = fsdp_box_count(box); n > 0; n--) {
        int64_t place = fsdp_box_position(fsdp_param_describe(param).ndim,
                                          fsdp_param_describe(param).shape, at);
        *values++ = (float)(place + 1) * *(const float *)user;
        for (int i = box->ndim - 1; i >= 0 && ++at[i] == box->lo[i] + box->len[i]; i--)
            at[i] = box->lo[i];
    }
    return FSDP_OK;
}

static int64_t elements(const fsdp_param *param)
{
    const fsdp_box whole =
        fsdp_box_whole(fsdp_param_describe(param).ndim, fsdp_param_describe(param).shape);
    return fsdp_box_count(&whole);
}

/* Expects these values in the gathered parameters of the next step. */
static fsdp_status expect_numbers(toy *net, float factor, fsdp_error *err)
{
    FSDP_TRY(fsdp_root_begin_forward(net->root, err));
    for (int i = 0; i < NET_LAYERS; i++) {
        FSDP_TRY(fsdp_unit_pre_forward(net->unit[i], err));
        const float *weight = fsdp_param_data(net->weight[i]);
        for (int64_t e = 0; e < elements(net->weight[i]); e++)
            FSDP_TRY(expect(weight[e] == (float)(e + 1) * factor, "values are the new ones", err));
        FSDP_TRY(fsdp_unit_post_forward(net->unit[i], err));
    }
    return fsdp_root_end_forward(net->root, err);
}

/* Gathered by hand, and left so; the last one is still on its way. */
static fsdp_status gather_all(toy *net, fsdp_error *err)
{
    for (int i = 0; i < NET_LAYERS; i++)
        FSDP_TRY(fsdp_unit_unshard(net->unit[i], i == NET_LAYERS - 1, NULL, err));
    return FSDP_OK;
}

/* --- first values ----------------------------------------------------------------------------- */

static fsdp_status set_values(toy *net, fsdp_error *err)
{
    float factor = 2;
    FSDP_TRY(gather_all(net, err));
    FSDP_TRY(fsdp_root_init(net->root, number, &factor, err));
    FSDP_TRY(expect_numbers(net, 2, err));
    FSDP_TRY(fsdp_root_begin_forward(net->root, err));
    fsdp_error why = {0};
    bool is_refused = fsdp_root_init(net->root, number, &factor, &why) == FSDP_ERR_USAGE;
    FSDP_TRY(expect(is_refused && strstr(why.text, "cannot run fsdp_root_init inside a step"),
                    "not inside a forward", err));
    return fsdp_root_end_forward(net->root, err);
}

Test(fsdp1_values, the_callers_function_is_asked_by_declared_names)
{
    expect_everywhere(set_values);
}

static fsdp_status number_or_fail(void *user, const fsdp_param *param, const fsdp_box *box,
                                  void *data, fsdp_error *err)
{
    if (!user)
        return fsdp_fail(err, FSDP_ERR_INTERNAL, "asked on another rank than 0");
    if (fsdp_param_describe(param).is_buffer) {
        memset(data, 0,
               (size_t)fsdp_box_count(box) * fsdp_dtype_size(fsdp_param_describe(param).dtype));
        return FSDP_OK;
    }
    return number(user, param, box, data, err);
}

static fsdp_status take_from_rank0(toy *net, fsdp_error *err)
{
    float factor = 3;
    void *user = fsdp_world_rank(net->world) == 0 ? &factor : NULL;
    FSDP_TRY(gather_all(net, err));
    FSDP_TRY(fsdp_root_sync_from_rank0(net->root, number_or_fail, user, err));
    return expect_numbers(net, 3, err);
}

Test(fsdp1_values, all_ranks_have_what_rank_0_has)
{
    expect_everywhere(take_from_rank0);
}

/* --- values after the first step -------------------------------------------------------------- */

static fsdp_status summon_over_gathered(toy *net, fsdp_error *err)
{
    float factor = 2;
    FSDP_TRY(fsdp_root_init(net->root, number, &factor, err));
    FSDP_TRY(gather_all(net, err));
    FSDP_TRY(fsdp_wrap_summon_full_params(net->wrap, NULL, NULL, err));
    for (int i = 0; i < NET_LAYERS; i++) {
        float *weight = fsdp_param_data(net->weight[i]);
        for (int64_t e = 0; e < elements(net->weight[i]); e++)
            weight[e] *= 2;
    }
    FSDP_TRY(fsdp_wrap_summon_end(net->wrap, err));
    return expect_numbers(net, 4, err);
}

Test(fsdp1_values, changes_of_summoned_parameters_are_gathered_next)
{
    expect_everywhere(summon_over_gathered);
}

static fsdp_status load_over_gathered(toy *net, fsdp_error *err)
{
    float factor = 5;
    fsdp_sd *sd = NULL;
    const fsdp_state_opts copies = {.part = FSDP_STATE_MODEL, .full_state_dict = true};
    FSDP_TRY(fsdp_root_init(net->root, number, &factor, err));
    FSDP_TRY(fsdp_root_get_state(net->root, &copies, &sd, err));
    factor = 7;
    fsdp_status status = fsdp_root_init(net->root, number, &factor, err);
    if (status == FSDP_OK)
        status = gather_all(net, err);
    if (status == FSDP_OK)
        status = fsdp_root_set_state(net->root, sd, &copies, NULL, err);
    fsdp_sd_free(sd);
    FSDP_TRY(status);
    return expect_numbers(net, 5, err);
}

Test(fsdp1_values, a_state_dict_that_was_loaded_is_gathered_next)
{
    expect_everywhere(load_over_gathered);
}

/* Sets the values of plain units, which have no flat parameters. */
static fsdp_status set_plain_values(toy *net, fsdp_error *err)
{
    float factor = 2;
    FSDP_TRY(gather_all(net, err));
    FSDP_TRY(fsdp_root_init(net->root, number, &factor, err));
    FSDP_TRY(expect_numbers(net, 2, err));
    factor = 3;
    FSDP_TRY(gather_all(net, err));
    FSDP_TRY(fsdp_root_sync_from_rank0(net->root, number_or_fail,
                                       fsdp_world_rank(net->world) == 0 ? &factor : NULL, err));
    return expect_numbers(net, 3, err);
}

Test(fsdp1_values, so_it_is_with_plain_units)
{
    values_case what = {.setup = net_setup_default(), .body = set_plain_values};
    fsdp_error err = {0};
    what.setup.is_plain = true;
    cr_assert_eq(run_worlds(3, "cpu-async", run_case, &what, &err), FSDP_OK, "%s", err.text);
}
