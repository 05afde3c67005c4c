/* Gradients of linear layers of bf16 parameters: in f32, in bf16, and those that cannot be added to. */
#include "runtime/transformer/linear_layer.h"
#include "tests/unit/runtime/expect_toy.h"

enum { IN = 3, OUT = 2, ROWS = 2 };

typedef struct layer_case {
    fsdp_dtype asked; /* of gradients; FSDP_DTYPE_NONE: those of the parameters */
    bool has_room;    /* to compute gradients in f32 */
    bool adds;
    const char *refusal; /* NULL: the gradients are right */
} layer_case;

typedef struct layer_rank {
    fsdp_mesh *mesh;
    fsdp_model *model;
    fsdp_root *root;
    fsdp_unit *unit;
    fsdp_nn *nn;
    fsdp_f32_params params;
    fsdp_linear layer;
} layer_rank;

static fsdp_status declare(layer_rank *at, const layer_case *what, fsdp_error *err)
{
    const int64_t shape[] = {OUT, IN};
    const fsdp_param_spec weight = {
        .name = "a.weight", .dtype = FSDP_BF16, .ndim = 2, .shape = shape};
    const fsdp_param_spec bias = {.name = "a.bias", .dtype = FSDP_BF16, .ndim = 1, .shape = shape};
    at->layer = (fsdp_linear){.in = IN, .out = OUT};
    FSDP_TRY(fsdp_model_add(at->model, &weight, &at->layer.weight, err));
    FSDP_TRY(fsdp_model_add(at->model, &bias, &at->layer.bias, err));
    if (what->asked == FSDP_DTYPE_NONE)
        return FSDP_OK;
    FSDP_TRY(fsdp_param_set_grad_dtype(at->layer.weight, what->asked, err));
    return fsdp_param_set_grad_dtype(at->layer.bias, what->asked, err);
}

static fsdp_status create(layer_rank *at, fsdp_world *world, const layer_case *what,
                          fsdp_error *err)
{
    const int64_t size = 1;
    FSDP_TRY(fsdp_world_mesh(world, 1, &size, (const char *[]){"dp"}, &at->mesh, err));
    FSDP_TRY(fsdp_model_create(world, &at->model, err));
    FSDP_TRY(declare(at, what, err));
    const fsdp_unit_opts opts = {.mesh = at->mesh};
    FSDP_TRY(fsdp_unit_create(at->model, "a", &opts, &at->unit, err));
    FSDP_TRY(fsdp_root_create(at->model, &opts, &at->root, err));
    FSDP_TRY(fsdp_nn_open_cpu(1, &at->nn, err));
    return fsdp_f32_params_init(&at->params, at->nn, at->model, what->has_room, err);
}

static fsdp_status expect_grad(fsdp_param *param, float wanted, fsdp_error *err)
{
    const fsdp_dtype dtype = fsdp_param_describe(param).grad_dtype;
    const char *grad = fsdp_param_grad(param);
    for (int64_t i = 0; i < fsdp_param_describe(param).shape[0]; i++) {
        float value;
        fsdp_cast(&value, FSDP_F32, grad + (size_t)i * fsdp_dtype_size(dtype), dtype, 1);
        EXPECT(value == wanted);
    }
    return FSDP_OK;
}

static fsdp_status step(const layer_rank *at, const layer_case *what, fsdp_error *err)
{
    const float ones[ROWS * IN] = {1, 1, 1, 1, 1, 1};
    const fsdp_linear_grad call = {.x = ones, .dy = ones, .adds = what->adds, .rows = ROWS};
    FSDP_TRY(fsdp_root_begin_forward(at->root, err));
    FSDP_TRY(fsdp_unit_pre_forward(at->unit, err));
    FSDP_TRY(fsdp_unit_post_forward(at->unit, err));
    FSDP_TRY(fsdp_root_end_forward(at->root, err));
    FSDP_TRY(fsdp_unit_pre_backward(at->unit, err));
    for (int i = 0; i < 2; i++) {
        if (what->refusal)
            EXPECT_REFUSAL(fsdp_linear_backward(&at->params, &at->layer, &call, why),
                           what->refusal);
        else
            FSDP_TRY(fsdp_linear_backward(&at->params, &at->layer, &call, err));
    }
    if (what->refusal)
        return FSDP_OK;
    FSDP_TRY(expect_grad(at->layer.weight, what->adds ? 2 * ROWS : ROWS, err));
    return expect_grad(at->layer.bias, what->adds ? 2 * ROWS : ROWS, err);
}

static fsdp_status use_layer(world_rank *rank, fsdp_error *err)
{
    layer_rank at = {0};
    fsdp_status status = create(&at, rank->world, rank->user, err);
    if (status == FSDP_OK)
        status = step(&at, rank->user, err);
    fsdp_f32_params_release(&at.params);
    if (at.nn)
        at.nn->ops->close(at.nn);
    fsdp_root_free(at.root);
    fsdp_model_free(at.model);
    fsdp_mesh_free(at.mesh);
    return status;
}

Test(linear_layer, gradients_add_up_in_f32_only)
{
    static const layer_case cases[] = {
        {.asked = FSDP_F32},
        {.asked = FSDP_F32, .adds = true},
        {.asked = FSDP_F32, .has_room = true, .adds = true},
        {.has_room = true},
        {.has_room = true,
         .adds = true,
         .refusal = "'a.weight' has a gradient of bf16: a layer adds to gradients of f32 only"},
        {.refusal =
             "'a.weight' has a gradient of bf16: no memory was set aside to compute it in f32"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        expect_body_on(1, "cpu", use_layer, (void *)&cases[i]);
}
