/* Shards and trains a small MLP.  ./example | ./example --np 4 | ./example --threads 4 | mpirun -n 4 ./example */
#include <fsdp/fsdp.h>
#include <stdio.h>

enum { LAYERS = 3, ROWS = 4, D = 8, STEPS = 20 };
#define TRY(call) do { if ((call) != FSDP_OK) goto done; } while (0)

static int train(void *context, fsdp_world *world, int argc, char **argv)
{
    fsdp_error err = {0};
    fsdp_mesh *mesh = NULL; fsdp_model *model = NULL; fsdp_root *root = NULL; fsdp_optim *optim = NULL;
    fsdp_param *w[LAYERS]; fsdp_unit *unit[LAYERS];
    float x[LAYERS + 1][ROWS][D], dy[ROWS][D], dx[ROWS][D];
    (void)argc; (void)argv; (void)context;

    TRY(fsdp_world_mesh(world, 1, (int64_t[]){fsdp_world_size(world)}, (const char *[]){"dp"}, &mesh, &err));
    TRY(fsdp_model_create(world, &model, &err));
    fsdp_unit_opts opts = {.mesh = mesh};
    for (int i = 0; i < LAYERS; i++) {                     /* one unit per layer, named as in PyTorch */
        char name[32];
        snprintf(name, sizeof name, "layers.%d.weight", i);
        fsdp_param_spec weight = {.name = name, .dtype = FSDP_F32, .ndim = 2, .shape = (int64_t[]){D, D}};
        TRY(fsdp_model_add(model, &weight, &w[i], &err));
        snprintf(name, sizeof name, "layers.%d", i);
        TRY(fsdp_unit_create(model, name, &opts, &unit[i], &err));
    }
    TRY(fsdp_root_create(model, &opts, &root, &err));      /* takes what no unit took; freezes the structure */
    TRY(fsdp_root_init_uniform(root, 1, &err));            /* same values at any world size */
    fsdp_adamw_opts adam = {.weight_decay = 0.01};
    TRY(fsdp_adamw_create(root, &adam, &optim, &err));

    for (int step = 0; step < STEPS; step++) {
        double loss = 0;
        for (int r = 0; r < ROWS; r++)
            for (int j = 0; j < D; j++)
                x[0][r][j] = (float)fsdp_uniform(2, "x", (uint64_t)((fsdp_world_rank(world) * ROWS + r) * D + j));
        TRY(fsdp_root_begin_forward(root, &err));
        for (int i = 0; i < LAYERS; i++) {
            TRY(fsdp_unit_pre_forward(unit[i], &err));     /* gathered from here ... */
            const float (*W)[D] = fsdp_param_data(w[i]);
            for (int r = 0; r < ROWS; r++)
                for (int o = 0; o < D; o++) {
                    x[i + 1][r][o] = 0;
                    for (int k = 0; k < D; k++) x[i + 1][r][o] += x[i][r][k] * W[o][k];
                }
            TRY(fsdp_unit_post_forward(unit[i], &err));    /* ... to here */
        }
        TRY(fsdp_root_end_forward(root, &err));
        for (int r = 0; r < ROWS; r++)
            for (int o = 0; o < D; o++) {                  /* loss = mean((y - 1)^2) */
                float e = x[LAYERS][r][o] - 1;
                loss += (double)(e * e) / (ROWS * D);
                dy[r][o] = 2 * e / (ROWS * D);
            }
        for (int i = LAYERS - 1; i >= 0; i--) {
            TRY(fsdp_unit_pre_backward(unit[i], &err));
            const float (*W)[D] = fsdp_param_data(w[i]);
            float (*dW)[D] = fsdp_param_grad(w[i]);        /* zeroed when new; add to it */
            for (int r = 0; r < ROWS; r++)
                for (int k = 0; k < D; k++) {
                    dx[r][k] = 0;
                    for (int o = 0; o < D; o++) dx[r][k] += dy[r][o] * W[o][k], dW[o][k] += dy[r][o] * x[i][r][k];
                }
            for (int r = 0; r < ROWS; r++) for (int k = 0; k < D; k++) dy[r][k] = dx[r][k];
            TRY(fsdp_unit_post_backward(unit[i], &err));   /* reshards, reduces */
        }
        TRY(fsdp_root_end_backward(root, &err));
        TRY(fsdp_optim_step(optim, &err));                 /* on the shards; drops their gradients */
        TRY(fsdp_world_mean(world, &loss, &err));
        if (fsdp_world_rank(world) == 0) printf("step %d loss %.9g\n", step, loss);
    }
    TRY(fsdp_root_save(root, "example-ckpt", NULL, &err));
done:
    fsdp_optim_free(optim); fsdp_root_free(root); fsdp_model_free(model); fsdp_mesh_free(mesh);
    return fsdp_error_report(&err);                        /* prints it, returns the exit code */
}

int main(int argc, char **argv) { return fsdp_launch(argc, argv, train, NULL); }
