/*
 * The FSDP1 face: what becomes a unit, where parameters lie in flat ones (numbers of PyTorch 2.15), what
 * cannot be wrapped, what is frozen.
 */
#include "tests/unit/runtime/wrap/wrap_expect.h"
#include <fsdp/state.h>

/* --- places of parameters --------------------------------------------------------------------- */

typedef struct abc_case {
    int ranks;
    bool orig;
    fsdp_wrap_strategy strategy;
    int64_t count;         /* with padding */
    int64_t runs[4][3][3]; /* per rank, of a, b, c: first, own, at */
} abc_case;

static fsdp_status declare_abc(fsdp_model *model, fsdp_param **abc, fsdp_error *err)
{
    FSDP_TRY(fsdp_model_add(
        model,
        &(fsdp_param_spec){.name = "a", .dtype = FSDP_F32, .ndim = 2, .shape = (int64_t[]){3, 2}},
        &abc[0], err));
    FSDP_TRY(fsdp_model_add(
        model,
        &(fsdp_param_spec){.name = "b", .dtype = FSDP_F32, .ndim = 1, .shape = (int64_t[]){3}},
        &abc[1], err));
    return fsdp_model_add(
        model,
        &(fsdp_param_spec){.name = "c", .dtype = FSDP_F32, .ndim = 1, .shape = (int64_t[]){5}},
        &abc[2], err);
}

static fsdp_status check_abc(world_rank *rank, fsdp_model *model, fsdp_wrap **wrap, fsdp_error *err)
{
    const abc_case *what = rank->user;
    fsdp_wrap_opts opts = {0};
    fsdp_param *abc[3];
    FSDP_TRY(declare_abc(model, abc, err));
    opts.use_orig_params = what->orig;
    opts.unit.strategy = what->strategy;
    FSDP_TRY(fsdp_wrap_create(model, &opts, wrap, err));
    fsdp_param *flat = fsdp_wrap_flat_param(*wrap, fsdp_wrap_unit(*wrap, ""));
    EXPECT(strcmp(fsdp_param_name(flat), "_flat_param") == 0);
    EXPECT(fsdp_param_describe(flat).shape[0] == what->count);
    for (int i = 0; i < 3; i++) {
        const int64_t *expected = what->runs[fsdp_world_rank(rank->world)][i];
        const fsdp_wrap_place place = fsdp_wrap_place_of(abc[i]);
        fsdp_box box;
        void *shard = fsdp_param_shard(abc[i], &box);
        EXPECT(place.flat == flat && place.local == expected[1]);
        EXPECT(box.ndim == 1 && box.len[0] == expected[1]);
        EXPECT((shard != NULL) == (expected[1] > 0));
        if (expected[1] == 0)
            continue;
        EXPECT(place.first == expected[0] && place.at == expected[2]);
        EXPECT(box.lo[0] == expected[0]);
        EXPECT((float *)shard == (float *)fsdp_param_shard(flat, NULL) + expected[2]);
    }
    return FSDP_OK;
}

static fsdp_status lay_out_abc(world_rank *rank, fsdp_error *err)
{
    fsdp_model *model = NULL;
    fsdp_wrap *wrap = NULL;
    fsdp_status status = fsdp_model_create(rank->world, &model, err);
    if (status == FSDP_OK)
        status = check_abc(rank, model, &wrap, err);
    fsdp_wrap_free(wrap);
    fsdp_model_free(model);
    return status;
}

Test(fsdp1_wrap, parameters_lie_where_pytorch_has_them)
{
    abc_case cases[] = {
        {2,
         false,
         FSDP_WRAP_FULL_SHARD,
         14,
         {{{0, 6, 0}, {0, 1, 6}, {0}}, {{0}, {1, 2, 0}, {0, 5, 2}}}},
        {2,
         true,
         FSDP_WRAP_FULL_SHARD,
         18,
         {{{0, 6, 0}, {0, 1, 8}, {0}}, {{0}, {1, 2, 0}, {0, 5, 3}}}},
        {4,
         false,
         FSDP_WRAP_SHARD_GRAD_OP,
         14,
         {{{0, 4, 0}, {0}, {0}},
          {{4, 2, 0}, {0, 2, 2}, {0}},
          {{0}, {2, 1, 0}, {0, 3, 1}},
          {{0}, {0}, {3, 2, 0}}}},
        /* without a mesh: these ranks are of one host */
        {2,
         true,
         FSDP_WRAP_HYBRID_SHARD,
         18,
         {{{0, 6, 0}, {0, 1, 8}, {0}}, {{0}, {1, 2, 0}, {0, 5, 3}}}},
        {4,
         true,
         FSDP_WRAP_FULL_SHARD,
         20,
         {{{0, 5, 0}, {0}, {0}},
          {{5, 1, 0}, {0, 2, 3}, {0}},
          {{0}, {2, 1, 0}, {0, 3, 2}},
          {{0}, {0}, {3, 2, 0}}}},
        {2,
         true,
         FSDP_WRAP_NO_SHARD,
         18,
         {{{0, 6, 0}, {0, 3, 8}, {0, 5, 12}}, {{0, 6, 0}, {0, 3, 8}, {0, 5, 12}}}},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        expect_ranks(cases[i].ranks, lay_out_abc, &cases[i]);
}

/* --- units ------------------------------------------------------------------------------------ */

static fsdp_status declare_tree(fsdp_model *model, fsdp_error *err)
{
    static const char *const names[] = {"embed.weight",           "layers.0.attn.q.weight",
                                        "layers.0.attn.k.weight", "layers.0.norm.weight",
                                        "layers.0.mlp.weight",    "layers.1.attn.q.weight",
                                        "layers.1.attn.k.weight", "layers.1.norm.weight",
                                        "layers.1.mlp.weight",    "head.weight"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        FSDP_TRY(fsdp_model_add(
            model,
            &(fsdp_param_spec){
                .name = names[i], .dtype = FSDP_F32, .ndim = 1, .shape = (int64_t[]){10}},
            NULL, err));
    return FSDP_OK;
}

typedef struct tree_case {
    fsdp_wrap_opts opts;
    const char *units; /* of modules, joined; what no policy wrapped is the root's */
    const char *ignored;
} tree_case;

static const char *const tree_modules[] = {
    "embed",           "layers",        "layers.0",     "layers.0.attn",
    "layers.0.attn.q", "layers.0.norm", "layers.0.mlp", "layers.1",
    "layers.1.attn",   "layers.1.norm", "layers.1.mlp", "head",
};

static fsdp_status check_tree(world_rank *rank, fsdp_model *model, fsdp_wrap **wrap,
                              fsdp_error *err)
{
    const tree_case *what = rank->user;
    fsdp_text units = {0}, ignored = {0};
    FSDP_TRY(declare_tree(model, err));
    FSDP_TRY(fsdp_wrap_create(model, &what->opts, wrap, err));
    for (size_t i = 0; i < sizeof tree_modules / sizeof *tree_modules; i++)
        if (fsdp_wrap_unit(*wrap, tree_modules[i]))
            fsdp_text_addf(&units, "%s ", tree_modules[i]);
    for (size_t i = 0; i < fsdp_model_count(model); i++)
        if (!fsdp_wrap_place_of(fsdp_model_at(model, i)).flat)
            fsdp_text_addf(&ignored, "%s ", fsdp_param_name(fsdp_model_at(model, i)));
    bool fits = strcmp(units.data ? units.data : "", what->units) == 0 &&
                strcmp(ignored.data ? ignored.data : "", what->ignored) == 0;
    fsdp_status status =
        fits ? FSDP_OK
             : fsdp_fail(err, FSDP_ERR_INTERNAL, "units '%s', ignored '%s'",
                         units.data ? units.data : "", ignored.data ? ignored.data : "");
    fsdp_text_release(&units);
    fsdp_text_release(&ignored);
    return status;
}

static fsdp_status wrap_tree(world_rank *rank, fsdp_error *err)
{
    fsdp_model *model = NULL;
    fsdp_wrap *wrap = NULL;
    fsdp_status status = fsdp_model_create(rank->world, &model, err);
    if (status == FSDP_OK)
        status = check_tree(rank, model, &wrap, err);
    fsdp_wrap_free(wrap);
    fsdp_model_free(model);
    return status;
}

static void expect_units(const fsdp_wrap_opts *opts, const char *units, const char *ignored)
{
    tree_case what = {.opts = *opts, .units = units, .ignored = ignored};
    expect_ranks(1, wrap_tree, &what);
}

static const char *type_of(void *user, const char *module)
{
    (void)user;
    const char *dot = strrchr(module, '.');
    const char *last = dot ? dot + 1 : module;
    if (strcmp(last, "attn") == 0)
        return "MultiheadAttention";
    if (strcmp(last, "norm") == 0)
        return "BatchNorm";
    return strspn(last, "01") == strlen(last) ? "Block" : NULL;
}

Test(fsdp1_wrap, policies_make_units_of_modules)
{
    fsdp_wrap_opts opts = {0};
    expect_units(&opts, "", "");
    opts.policy.kind = FSDP_POLICY_ALWAYS;
    expect_units(&opts,
                 "embed layers.0 layers.0.attn layers.0.attn.q layers.0.norm layers.0.mlp layers.1 "
                 "layers.1.attn layers.1.norm layers.1.mlp head ",
                 "");
    opts.policy = (fsdp_wrap_policy){.kind = FSDP_POLICY_NAMES,
                                     .names = (const char *const[]){"layers.*", "head"},
                                     .name_count = 2};
    expect_units(&opts, "layers.0 layers.1 head ", "");
    opts.policy = (fsdp_wrap_policy){.kind = FSDP_POLICY_TYPES,
                                     .names = (const char *const[]){"Block"},
                                     .name_count = 1,
                                     .type_of = type_of};
    expect_units(&opts, "layers.0 layers.1 ", "");
    opts.policy.full_precision_types = (const char *const[]){"BatchNorm"};
    opts.policy.full_precision_count = 1;
    expect_units(&opts, "layers.0 layers.0.norm layers.1 layers.1.norm ", "");
}

/* Blocks have 40 elements, 20 of them in attn; a list is only searched, a piece is not. */
Test(fsdp1_wrap, sizes_count_what_no_inner_unit_has)
{
    fsdp_wrap_opts opts = {0};
    opts.policy = (fsdp_wrap_policy){.kind = FSDP_POLICY_SIZE, .min_elements = 40};
    expect_units(&opts, "layers.0 layers.1 ", "");
    opts.policy.min_elements = 20;
    expect_units(&opts, "layers.0 layers.0.attn layers.1 layers.1.attn ", "");
    opts.policy.names = (const char *const[]){"MultiheadAttention"};
    opts.policy.name_count = 1;
    opts.policy.type_of = type_of;
    expect_units(&opts, "layers.0 layers.1 ", "");
    opts.policy.min_elements = 80;
    expect_units(&opts, "", "");
    opts.policy.min_elements = 0; /* 100 million */
    expect_units(&opts, "", "");
}

Test(fsdp1_wrap, ignored_parameters_are_in_no_unit)
{
    fsdp_wrap_opts opts = {0};
    opts.policy.kind = FSDP_POLICY_ALWAYS;
    opts.ignored_modules = (const char *const[]){"layers.0", "embed"};
    opts.ignored_module_count = 2;
    expect_units(&opts, "layers.1 layers.1.attn layers.1.norm layers.1.mlp head ",
                 "embed.weight layers.0.attn.q.weight layers.0.attn.k.weight layers.0.norm.weight "
                 "layers.0.mlp.weight ");
    opts.policy = (fsdp_wrap_policy){.kind = FSDP_POLICY_NAMES,
                                     .names = (const char *const[]){"layers.*.attn"},
                                     .name_count = 1};
    expect_units(&opts, "layers.0.attn layers.1.attn ",
                 "embed.weight layers.0.norm.weight layers.0.mlp.weight ");
    opts.ignored_module_count = 0;
    opts.ignored_states = (const char *const[]){"head.weight"};
    opts.ignored_state_count = 1;
    expect_units(&opts, "layers.0.attn layers.1.attn ", "head.weight ");
}

/* --- errors ----------------------------------------------------------------------------------- */

typedef struct refused_case {
    fsdp_wrap_opts opts;
    fsdp_dtype dtype; /* of b */
    bool freezes;
    int mesh_ndim;
    const char *reason;
    fsdp_dtype grad_dtype; /* of b; NONE: its own */
} refused_case;

static fsdp_status try_wrap(world_rank *rank, fsdp_model *model, fsdp_mesh **mesh, fsdp_error *err)
{
    const refused_case *what = rank->user;
    fsdp_param *b;
    fsdp_wrap *wrap;
    fsdp_error why = {0};
    fsdp_wrap_opts opts = what->opts;
    FSDP_TRY(fsdp_model_add(
        model,
        &(fsdp_param_spec){.name = "a", .dtype = FSDP_F32, .ndim = 1, .shape = (int64_t[]){4}},
        NULL, err));
    FSDP_TRY(fsdp_model_add(
        model,
        &(fsdp_param_spec){.name = "b", .dtype = what->dtype, .ndim = 1, .shape = (int64_t[]){4}},
        &b, err));
    if (what->freezes)
        FSDP_TRY(fsdp_param_set_requires_grad(b, false, err));
    if (what->grad_dtype != FSDP_DTYPE_NONE)
        FSDP_TRY(fsdp_param_set_grad_dtype(b, what->grad_dtype, err));
    FSDP_TRY(fsdp_world_mesh(rank->world, what->mesh_ndim, (int64_t[]){1, 1, 2},
                             (const char *[]){"x", "y", "z"}, mesh, err));
    opts.mesh = *mesh;
    EXPECT(fsdp_wrap_create(model, &opts, &wrap, &why) == FSDP_ERR_USAGE);
    EXPECT(strstr(why.text, what->reason) || fsdp_fail(err, FSDP_ERR_INTERNAL, "%s", why.text));
    return FSDP_OK;
}

static fsdp_status refuse(world_rank *rank, fsdp_error *err)
{
    fsdp_model *model = NULL;
    fsdp_mesh *mesh = NULL;
    fsdp_status status = fsdp_model_create(rank->world, &model, err);
    if (status == FSDP_OK)
        status = try_wrap(rank, model, &mesh, err);
    fsdp_model_free(model);
    fsdp_mesh_free(mesh);
    return status;
}

static void expect_refused(refused_case what, const char *reason)
{
    what.reason = reason;
    expect_ranks(what.mesh_ndim == 3 ? 2 : 1, refuse, &what);
}

Test(fsdp1_wrap, what_cannot_be_flat_is_named)
{
    const fsdp_wrap_opts plain = {0};
    fsdp_wrap_opts hybrid = plain, both = plain, unknown = plain;
    hybrid.unit.strategy = FSDP_WRAP_HYBRID_SHARD;
    both.ignored_modules = both.ignored_states = (const char *const[]){"a"};
    both.ignored_module_count = both.ignored_state_count = 1;
    unknown.ignored_states = (const char *const[]){"nobody"};
    unknown.ignored_state_count = 1;
    expect_refused((refused_case){plain, FSDP_BF16, false, 1, 0, FSDP_DTYPE_NONE},
                   "unit root: 'a' is f32 and 'b' is bf16");
    expect_refused((refused_case){plain, FSDP_F32, false, 1, 0, FSDP_BF16},
                   "'b' has a placement, an extension or a dtype of gradients of its own");
    expect_refused((refused_case){plain, FSDP_I64, false, 1, 0, FSDP_DTYPE_NONE}, "'b' is i64");
    expect_refused((refused_case){plain, FSDP_F32, true, 1, 0, FSDP_DTYPE_NONE}, "use_orig_params");
    expect_refused((refused_case){hybrid, FSDP_F32, false, 1, 0, FSDP_DTYPE_NONE},
                   "a mesh of two dims");
    expect_refused((refused_case){plain, FSDP_F32, false, 3, 0, FSDP_DTYPE_NONE},
                   "the mesh has 3 dims");
    expect_refused((refused_case){both, FSDP_F32, false, 1, 0, FSDP_DTYPE_NONE},
                   "cannot both be given");
    expect_refused((refused_case){unknown, FSDP_F32, false, 1, 0, FSDP_DTYPE_NONE}, "'nobody'");
}

/* --- unknown names ---------------------------------------------------------------------------- */

typedef struct stranger_case {
    fsdp_wrap_opts opts;
    const char *reason;
} stranger_case;

static fsdp_status wrap_strangers(world_rank *rank, fsdp_model *model, fsdp_wrap **wrap,
                                  fsdp_error *err)
{
    const stranger_case *what = rank->user;
    const fsdp_wrap_opts plain = {0};
    fsdp_error why = {0};
    FSDP_TRY(declare_tree(model, err));
    EXPECT(fsdp_wrap_create(model, &what->opts, wrap, &why) == FSDP_ERR_USAGE);
    EXPECT(strstr(why.text, what->reason) || fsdp_fail(err, FSDP_ERR_INTERNAL, "%s", why.text));
    return fsdp_wrap_create(model, &plain, wrap, err); /* the model is as it was */
}

static fsdp_status refuse_strangers(world_rank *rank, fsdp_error *err)
{
    fsdp_model *model = NULL;
    fsdp_wrap *wrap = NULL;
    fsdp_status status = fsdp_model_create(rank->world, &model, err);
    if (status == FSDP_OK)
        status = wrap_strangers(rank, model, &wrap, err);
    fsdp_wrap_free(wrap);
    fsdp_model_free(model);
    return status;
}

static void expect_stranger(const fsdp_wrap_opts *opts, const char *reason)
{
    stranger_case what = {.opts = *opts, .reason = reason};
    expect_ranks(2, refuse_strangers, &what);
}

Test(fsdp1_wrap, wrapped_names_and_types_that_no_module_has_are_refused)
{
    fsdp_wrap_opts opts = {0};
    opts.policy = (fsdp_wrap_policy){.kind = FSDP_POLICY_NAMES,
                                     .names = (const char *const[]){"layers.*", "lay*"},
                                     .name_count = 2};
    expect_stranger(&opts, "called 'lay*', the nearest one is 'layers'");
    opts.policy.names = (const char *const[]){"head", "layers.*.atn"};
    expect_stranger(&opts, "called 'layers.*.atn', the nearest one is 'layers.0.attn'");
    opts.policy.names = (const char *const[]){"head", "head.weight"};
    expect_stranger(&opts, "called 'head.weight'"); /* a parameter */
    opts.policy = (fsdp_wrap_policy){.kind = FSDP_POLICY_TYPES,
                                     .names = (const char *const[]){"Block", "Batchnorm"},
                                     .name_count = 2,
                                     .type_of = type_of};
    expect_stranger(&opts, "of type 'Batchnorm', the nearest one is 'BatchNorm'");
    opts.policy.type_of = NULL;
    expect_stranger(&opts, "of type 'Block'");
}

/* One list of exceptions serves many models. */
Test(fsdp1_wrap, types_that_are_exceptions_need_no_module)
{
    fsdp_wrap_opts opts = {0};
    opts.policy = (fsdp_wrap_policy){.kind = FSDP_POLICY_SIZE,
                                     .min_elements = 40,
                                     .names = (const char *const[]){"Absent"},
                                     .name_count = 1,
                                     .full_precision_types = (const char *const[]){"Absent"},
                                     .full_precision_count = 1};
    expect_units(&opts, "layers.0 layers.1 ", "");
}

Test(fsdp1_wrap, ignored_names_that_nothing_has_are_refused)
{
    fsdp_wrap_opts opts = {0};
    opts.ignored_modules = (const char *const[]){"embed", "layers.7"};
    opts.ignored_module_count = 2;
    expect_stranger(&opts, "no module to be ignored 'layers.7', the nearest one is 'layers.0'");
    opts.ignored_module_count = 0;
    opts.ignored_states = (const char *const[]){"embed.wait"};
    opts.ignored_state_count = 1;
    expect_stranger(&opts, "no parameter to be ignored 'embed.wait', the nearest one is "
                           "'embed.weight'");
}

/* --- frozen parameters ------------------------------------------------------------------------ */

static fsdp_status step_abc(fsdp_wrap *wrap, fsdp_param *const *abc, fsdp_error *err)
{
    fsdp_unit *unit = fsdp_wrap_unit(wrap, "");
    fsdp_root *root = fsdp_wrap_root(wrap);
    fsdp_error why = {0};
    FSDP_TRY(fsdp_root_begin_forward(root, err));
    FSDP_TRY(fsdp_unit_pre_forward(unit, err));
    FSDP_TRY(fsdp_unit_post_forward(unit, err));
    FSDP_TRY(fsdp_root_end_forward(root, err));
    FSDP_TRY(fsdp_unit_pre_backward(unit, err));
    for (int i = 0; i < 6; i++)
        ((float *)fsdp_param_grad(abc[0]))[i] = 1;
    EXPECT(!fsdp_param_grad(abc[1]));
    EXPECT(fsdp_root_end_backward(root, &why) == FSDP_ERR_USAGE && strstr(why.text, "'b'"));
    return fsdp_root_end_backward(root, err);
}

static fsdp_status compare_abc(fsdp_wrap *wrap, fsdp_param *const *abc, fsdp_error *err)
{
    FSDP_TRY(fsdp_wrap_summon_full_params(wrap, NULL, NULL, err));
    const float *a = fsdp_param_data(abc[0]), *b = fsdp_param_data(abc[1]),
                *c = fsdp_param_data(abc[2]);
    for (int i = 0; i < 3; i++)
        EXPECT(a[i] != uniform("a", i, 2) && b[i] == uniform("b", i, 3));
    EXPECT(c[4] != uniform("c", 4, 5)); /* decays: what has no gradient has zeros */
    return fsdp_wrap_summon_end(wrap, err);
}

static fsdp_status freeze_b(fsdp_model *model, fsdp_wrap **wrap, fsdp_optim **optim,
                            fsdp_error *err)
{
    const fsdp_adamw_opts adam = {.weight_decay = 0.01};
    const fsdp_state_opts state = {.part = FSDP_STATE_OPTIM, .optim_prefix = ""};
    fsdp_wrap_opts opts = {0};
    fsdp_param *abc[3];
    fsdp_sd *sd;
    opts.use_orig_params = true;
    FSDP_TRY(declare_abc(model, abc, err));
    FSDP_TRY(fsdp_param_set_requires_grad(abc[1], false, err));
    FSDP_TRY(fsdp_wrap_create(model, &opts, wrap, err));
    FSDP_TRY(fsdp_root_init_uniform(fsdp_wrap_root(*wrap), 1, err));
    FSDP_TRY(fsdp_adamw_create(fsdp_wrap_root(*wrap), &adam, optim, err));
    FSDP_TRY(step_abc(*wrap, abc, err));
    FSDP_TRY(fsdp_optim_step(*optim, err));
    FSDP_TRY(compare_abc(*wrap, abc, err));
    FSDP_TRY(fsdp_root_get_state(fsdp_wrap_root(*wrap), &state, &sd, err));
    bool has_a = fsdp_sd_find(sd, "state.a.exp_avg", 15) >= 0;
    bool has_b = fsdp_sd_find(sd, "state.b.exp_avg", 15) >= 0;
    fsdp_sd_free(sd);
    EXPECT(has_a && !has_b);
    return FSDP_OK;
}

typedef struct lost_case {
    bool wraps;
    const char *begin;
} lost_case;

/* The ranks compare what they declare, and the comparison fails as if one were lost. */
static fsdp_status create_without_rank_1(fsdp_model *model, const fsdp_mesh *mesh,
                                         const lost_case *what, fsdp_error *err)
{
    fsdp_param *abc[3];
    fsdp_wrap *wrap = NULL;
    fsdp_root *root = NULL;
    fsdp_error why = {0};
    FSDP_TRY(declare_abc(model, abc, err));
    fsdp_status status =
        what->wraps ? fsdp_wrap_create(model, &(fsdp_wrap_opts){.mesh = mesh}, &wrap, &why)
                    : fsdp_root_create(model, &(fsdp_unit_opts){.mesh = mesh}, &root, &why);
    if (status != FSDP_ERR_PEER || strncmp(why.text, what->begin, strlen(what->begin)) != 0)
        return fsdp_fail(err, FSDP_ERR_INTERNAL, "%d: %s", (int)status, why.text);
    return FSDP_OK;
}

static fsdp_status lose_rank_1(world_rank *rank, fsdp_error *err)
{
    const int64_t size = 2;
    fsdp_mesh *mesh = NULL;
    fsdp_model *model = NULL;
    const fsdp_error lost = {.status = FSDP_ERR_PEER, .rank = 1, .text = "it is lost"};
    FSDP_TRY(fsdp_world_mesh(rank->world, 1, &size, (const char *[]){"dp"}, &mesh, err));
    if (fsdp_world_rank(rank->world) == 1)
        fsdp_comm_abort(fsdp_world_comm(rank->world, mesh, 0, 0), &lost);
    fsdp_status status = fsdp_model_create(rank->world, &model, err);
    if (status == FSDP_OK)
        status = create_without_rank_1(model, mesh, rank->user, err);
    fsdp_model_free(model);
    fsdp_mesh_free(mesh);
    return status;
}

Test(fsdp1_wrap, a_failed_comparison_names_the_call_that_was_made)
{
    lost_case wrap = {true, "fsdp_wrap_create: "}, root = {false, "fsdp_root_create: "};
    expect_ranks(2, lose_rank_1, &wrap);
    expect_ranks(2, lose_rank_1, &root);
}

static fsdp_status freeze(world_rank *rank, fsdp_error *err)
{
    fsdp_model *model = NULL;
    fsdp_wrap *wrap = NULL;
    fsdp_optim *optim = NULL;
    fsdp_status status = fsdp_model_create(rank->world, &model, err);
    if (status == FSDP_OK)
        status = freeze_b(model, &wrap, &optim, err);
    fsdp_optim_free(optim);
    fsdp_wrap_free(wrap);
    fsdp_model_free(model);
    return status;
}

Test(fsdp1_wrap, frozen_parameters_lie_among_others_and_stay)
{
    for (int ranks = 1; ranks <= 4; ranks++)
        expect_ranks(ranks, freeze, NULL);
}
