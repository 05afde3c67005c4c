/*
 * Unknown names, pointers that are requested at the wrong time, and roots that cannot be made: each is
 * reported at once, and leaves the model unchanged.
 */
#include "tests/unit/runtime/expect_toy.h"

/* A model of two layers; norm has only a buffer, head only a shared parameter. */
static fsdp_status declare(toy *net, fsdp_error *err)
{
    static const char *const names[] = {"layers.0.weight", "layers.1.weight"};
    for (int i = 0; i < 2; i++)
        FSDP_TRY(fsdp_model_add(
            net->model,
            &(fsdp_param_spec){
                .name = names[i], .dtype = FSDP_F32, .ndim = 1, .shape = (int64_t[]){4}},
            &net->weight[i], err));
    FSDP_TRY(fsdp_model_add_alias(net->model, "head.weight", net->weight[1], err));
    return fsdp_model_add(net->model,
                          &(fsdp_param_spec){.name = "norm.mean",
                                             .dtype = FSDP_F32,
                                             .ndim = 1,
                                             .shape = (int64_t[]){4},
                                             .is_buffer = true},
                          NULL, err);
}

static void expect_ok(int ranks, toy_body body)
{
    expect_toy_on("cpu", (toy_case){1, {ranks}, {"dp"}, NULL, body, NULL, {0}});
}

static fsdp_status make_root(toy *net, fsdp_error *err)
{
    return fsdp_root_create(net->model, &net->opts, &net->root, err);
}

/* --- prefixes --------------------------------------------------------------------------------- */

static fsdp_status misspell(toy *net, fsdp_error *err)
{
    fsdp_unit *unit;
    const char *const members[] = {"layers.0", "layers.2"}, *const with_all[] = {"layers.0", ""};
    EXPECT_REFUSAL(fsdp_unit_create(net->model, "layers.0", &net->opts, &unit, why),
                   "unit 'layers.0' has no parameters; declare them before the unit");
    FSDP_TRY(declare(net, err));
    EXPECT_REFUSAL(fsdp_unit_create(net->model, "layer.0", &net->opts, &unit, why),
                   "unit 'layer.0' has no parameters: no name is equal or below it, the nearest "
                   "one is 'layers.0'");
    EXPECT_REFUSAL(fsdp_unit_create(net->model, "layers.0.weights", &net->opts, &unit, why),
                   "the nearest one is 'layers.0.weight'");
    EXPECT_REFUSAL(fsdp_unit_create(net->model, "layers.0.", &net->opts, &unit, why),
                   "the nearest one is 'layers.0'");
    EXPECT_REFUSAL(fsdp_unit_create_list(net->model, members, 2, &net->opts, &unit, why),
                   "unit 'layers.2' has no parameters");
    EXPECT_REFUSAL(
        fsdp_unit_create(net->model, "", &net->opts, &unit, why),
        "the prefix is empty: fsdp_root_create makes the unit of the remaining parameters");
    EXPECT_REFUSAL(fsdp_unit_create_list(net->model, with_all, 2, &net->opts, &unit, why),
                   "the prefix is empty");
    FSDP_TRY(make_root(net, err));
    EXPECT(fsdp_root_unit_count(net->root) == 1);
    EXPECT(fsdp_unit_param_count(fsdp_root_unit(net->root)) == 2);
    return FSDP_OK;
}

Test(unit_names, a_prefix_of_nothing_is_refused_with_the_nearest_name)
{
    expect_ok(2, misspell);
}

static fsdp_status make_empty_units(toy *net, fsdp_error *err)
{
    static const char *const prefixes[] = {"layers.0", "layers.1", "layers", "norm", "head"};
    FSDP_TRY(declare(net, err));
    for (size_t i = 0; i < sizeof prefixes / sizeof *prefixes; i++) {
        fsdp_unit *unit;
        FSDP_TRY(fsdp_unit_create(net->model, prefixes[i], &net->opts, &unit, err));
        EXPECT(fsdp_unit_param_count(unit) == (i < 2));
        EXPECT_REFUSAL(fsdp_unit_create(net->model, prefixes[i], &net->opts, &unit, why),
                       "is already in unit '");
    }
    FSDP_TRY(make_root(net, err));
    EXPECT(fsdp_unit_param_count(fsdp_root_unit(net->root)) == 0);
    return FSDP_OK;
}

Test(unit_names, modules_whose_parameters_others_have_are_units)
{
    expect_ok(2, make_empty_units);
}

static fsdp_status make_root_of_nothing(toy *net, fsdp_error *err)
{
    return make_root(net, err);
}

Test(unit_names, a_root_may_be_empty)
{
    expect_ok(1, make_root_of_nothing);
}

/* --- pointers --------------------------------------------------------------------------------- */

static fsdp_status ask_too_early(toy *net, fsdp_error *err)
{
    FSDP_TRY(declare(net, err));
    EXPECT(!fsdp_param_data(net->weight[0]));
    EXPECT_REFUSAL(fsdp_param_error(net->weight[0], why),
                   "'layers.0.weight' has no memory: fsdp_root_create");
    FSDP_TRY(make_root(net, err));
    FSDP_TRY(fsdp_param_error(net->weight[0], err));
    EXPECT(!fsdp_param_data(net->weight[0]) && !fsdp_param_data(net->weight[1]));
    EXPECT_REFUSAL(fsdp_param_error(net->weight[0], why),
                   "the data of 'layers.0.weight' was requested while unit root is sharded");
    /* the error was reported, so the next call does not return it */
    FSDP_TRY(fsdp_root_begin_forward(net->root, err));
    EXPECT(!fsdp_param_grad(net->weight[1]));
    EXPECT_REFUSAL(fsdp_root_end_forward(net->root, why), "the gradient of 'layers.1.weight'");
    FSDP_TRY(fsdp_param_error(net->weight[1], err));
    EXPECT(!fsdp_param_shard_grad(net->weight[1])); /* no gradient yet, and no error */
    FSDP_TRY(fsdp_param_error(net->weight[1], err));
    return fsdp_root_end_forward(net->root, err);
}

Test(unit_names, a_pointer_that_is_not_there_has_its_reason_at_once)
{
    expect_ok(2, ask_too_early);
}

static fsdp_status ask_wrapped(toy *net, fsdp_error *err)
{
    const fsdp_wrap_opts opts = {0};
    fsdp_wrap *wrap = NULL;
    FSDP_TRY(declare(net, err));
    FSDP_TRY(fsdp_wrap_create(net->model, &opts, &wrap, err));
    bool is_null = !fsdp_param_data(net->weight[0]);
    fsdp_error why = {0};
    fsdp_status status = fsdp_param_error(net->weight[0], &why);
    fsdp_wrap_free(wrap);
    EXPECT(is_null && status == FSDP_ERR_USAGE && strstr(why.text, "is sharded"));
    return FSDP_OK;
}

Test(unit_names, a_pointer_into_a_flat_parameter_has_its_reason_at_once)
{
    expect_ok(1, ask_wrapped);
}

/* --- roots that could not be made ----------------------------------------------------------------- */

static bool ignores_first(void *user, const fsdp_param *param)
{
    (void)user;
    return strcmp(fsdp_param_name(param), "layers.0.weight") == 0;
}

static fsdp_status ignore_in_vain(toy *net, fsdp_error *err)
{
    fsdp_unit_opts opts = net->opts;
    FSDP_TRY(declare(net, err));
    opts.ignore = ignores_first;
    opts.shard_dims = "nowhere";
    EXPECT_REFUSAL(fsdp_root_create(net->model, &opts, &net->root, why), "no dim 'nowhere'");
    FSDP_TRY(make_root(net, err));
    EXPECT(fsdp_unit_param_count(fsdp_root_unit(net->root)) == 2);
    return FSDP_OK;
}

Test(unit_names, what_a_root_that_failed_ignored_is_taken_by_the_next)
{
    expect_ok(2, ignore_in_vain);
}

static fsdp_status cast_in_vain(toy *net, fsdp_error *err)
{
    fsdp_unit_opts opts = net->opts;
    FSDP_TRY(declare(net, err));
    opts.param_dtype = FSDP_BF16;
    opts.shard_dims = "nowhere";
    EXPECT_REFUSAL(fsdp_root_create(net->model, &opts, &net->root, why), "no dim 'nowhere'");
    net->opts.ignore = ignores_first;
    FSDP_TRY(make_root(net, err));
    EXPECT(fsdp_unit_param_count(fsdp_root_unit(net->root)) == 1);
    EXPECT(fsdp_param_describe(net->weight[0]).data_dtype == FSDP_F32);
    return FSDP_OK;
}

Test(unit_names, what_a_root_that_failed_cast_is_stored_as_before)
{
    expect_ok(2, cast_in_vain);
}
