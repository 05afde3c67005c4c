/* Trains an MLP and saves it, from the beginning or from a checkpoint: one of ours, or one of PyTorch (continue.py).
 *   ./continue --np 2 OUT STEPS [FROM] */
#include <fsdp/fsdp.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LAYERS = 3, ROWS = 4, D = 8 };
#define TRY(call) do { if ((call) != FSDP_OK) goto done; } while (0)

static bool is_last(void *context, const fsdp_param *param)
{
    (void)context;
    return strcmp(fsdp_param_name(param), "layers.2.weight") == 0;
}

/* One step: loss = mean((y - 1)^2) over the rows of this rank. */
static fsdp_status step(fsdp_world *world, fsdp_root *root, fsdp_unit **unit, fsdp_param **w, double *loss, fsdp_error *err)
{
    int rank = fsdp_world_rank(world);
    float x[LAYERS + 1][ROWS][D], dy[ROWS][D], dx[ROWS][D];
    for (int r = 0; r < ROWS; r++)
        for (int j = 0; j < D; j++) x[0][r][j] = (float)(((rank * ROWS + r) * D + j) * 5 % 7 - 3) / 4;
    FSDP_TRY(fsdp_root_begin_forward(root, err));
    for (int i = 0; i < LAYERS; i++) {
        FSDP_TRY(fsdp_unit_pre_forward(unit[i], err));
        const float (*W)[D] = fsdp_param_data(w[i]);
        for (int r = 0; r < ROWS; r++)
            for (int o = 0; o < D; o++) {
                x[i + 1][r][o] = 0;
                for (int k = 0; k < D; k++) x[i + 1][r][o] += x[i][r][k] * W[o][k];
            }
        FSDP_TRY(fsdp_unit_post_forward(unit[i], err));
    }
    FSDP_TRY(fsdp_root_end_forward(root, err));
    *loss = 0;
    for (int r = 0; r < ROWS; r++)
        for (int o = 0; o < D; o++) {
            float e = x[LAYERS][r][o] - 1;
            *loss += (double)(e * e) / (ROWS * D);
            dy[r][o] = 2 * e / (ROWS * D);
        }
    double largest = *loss;
    FSDP_TRY(fsdp_world_max(world, &largest, 1, err));     /* NaN, if it is that on any rank */
    if (!isfinite(largest)) return fsdp_root_reset(root, err);     /* no gradients: the optimizer changes nothing */
    for (int i = LAYERS - 1; i >= 0; i--) {
        FSDP_TRY(fsdp_unit_pre_backward(unit[i], err));
        const float (*W)[D] = fsdp_param_data(w[i]);
        float (*dW)[D] = fsdp_param_grad(w[i]);
        for (int r = 0; r < ROWS; r++)
            for (int k = 0; k < D; k++) {
                dx[r][k] = 0;
                for (int o = 0; o < D; o++) dx[r][k] += dy[r][o] * W[o][k], dW[o][k] += dy[r][o] * x[i][r][k];
            }
        memcpy(dy, dx, sizeof dy);
        FSDP_TRY(fsdp_unit_post_backward(unit[i], err));
    }
    return fsdp_root_end_backward(root, err);
}

static int train(void *context, fsdp_world *world, int argc, char **argv)
{
    fsdp_error err = {0};
    fsdp_mesh *mesh = NULL; fsdp_model *model = NULL; fsdp_root *root = NULL; fsdp_optim *optim = NULL;
    fsdp_param *w[LAYERS]; fsdp_unit *unit[LAYERS];
    (void)context;
    if (argc < 3) return 2;
    const char *out = argv[1], *from = argc > 3 ? argv[3] : NULL;

    TRY(fsdp_world_mesh(world, 1, (int64_t[]){fsdp_world_size(world)}, (const char *[]){"dp"}, &mesh, &err));
    TRY(fsdp_model_create(world, &model, &err));
    fsdp_unit_opts opts = {.mesh = mesh};
    for (int i = 0; i < LAYERS; i++) {
        char name[32];
        snprintf(name, sizeof name, "layers.%d.weight", i);
        fsdp_param_spec weight = {.name = name, .dtype = FSDP_F32, .ndim = 2, .shape = (int64_t[]){D, D}};
        TRY(fsdp_model_add(model, &weight, &w[i], &err));
        snprintf(name, sizeof name, "layers.%d", i);
        TRY(fsdp_unit_create(model, name, &opts, &unit[i], &err));
    }
    TRY(fsdp_root_create(model, &opts, &root, &err));

    /* AdamW with the groups of continue.py: the last layer has its own learning rate and no decay. */
    fsdp_optim_group groups[] = {{is_last, NULL, 0.002, 0}, {NULL, NULL, 0.01, 0.1}};
    fsdp_adamw_opts adamw = {.groups = groups, .group_count = 2};
    TRY(fsdp_adamw_create(root, &adamw, &optim, &err));
    if (from)
        TRY(fsdp_root_load(root, from, NULL, &err));       /* ours, or PyTorch's: model, moments, lr, ... */
    else
        TRY(fsdp_root_init_uniform(root, 1, &err));

    for (int i = 0; i < atoi(argv[2]); i++) {
        double loss;
        TRY(step(world, root, unit, w, &loss, &err));
        TRY(fsdp_optim_step(optim, &err));
        TRY(fsdp_world_mean(world, &loss, &err));
        if (fsdp_world_rank(world) == 0) printf("loss %.9g\n", loss);
    }
    TRY(fsdp_root_save(root, out, NULL, &err));            /* model and optimizer */
done:
    fsdp_optim_free(optim); fsdp_root_free(root); fsdp_model_free(model); fsdp_mesh_free(mesh);
    return fsdp_error_report(&err);
}

int main(int argc, char **argv) { return fsdp_launch(argc, argv, train, NULL); }
