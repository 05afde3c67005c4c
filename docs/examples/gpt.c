/* A language model whose root holds parameters itself, as in every GPT: an embedding that is also the head.
 * In the end only rank 0 gets the whole model and writes it for inference.  ./gpt | ./gpt --np 2 | ./gpt --threads 2 */
#include <fsdp/fsdp.h>
#include <fsdp/convert.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

enum { LAYERS = 2, VOCAB = 27, D = 16, INNER = 32, ROWS = 8, MICRO = 2, STEPS = 40 };
#define TRY(call) do { if ((call) != FSDP_OK) goto done; } while (0)
static const char text[] = "the state of a training is what it goes on from when a rank is lost ";

typedef struct gpt {
    fsdp_root *root;
    fsdp_param *tokens, *up[LAYERS], *down[LAYERS];
    fsdp_unit *layer[LAYERS];
    float x[LAYERS + 1][ROWS * D], h[LAYERS][ROWS * INNER];
} gpt;

/* y += x w^T, and backwards: dx += dy w, dw += dy^T x. */
static void product(float *y, const float *x, const float *w, int in, int out)
{
    for (int r = 0; r < ROWS; r++)
        for (int o = 0; o < out; o++)
            for (int i = 0; i < in; i++) y[r * out + o] += x[r * in + i] * w[o * in + i];
}

static void product_grad(float *dx, float *dw, const float *dy, const float *x, const float *w, int in, int out)
{
    for (int r = 0; r < ROWS; r++)
        for (int o = 0; o < out; o++)
            for (int i = 0; i < in; i++)
                dx[r * in + i] += dy[r * out + o] * w[o * in + i], dw[o * in + i] += dy[r * out + o] * x[r * in + i];
}

/* A layer is a unit: x[i + 1] = x[i] + down relu(up x[i]). */
static fsdp_status forward_layer(gpt *m, int i, fsdp_error *err)
{
    FSDP_TRY(fsdp_unit_pre_forward(m->layer[i], err));
    memset(m->h[i], 0, sizeof m->h[i]);
    product(m->h[i], m->x[i], fsdp_param_data(m->up[i]), D, INNER);
    for (int k = 0; k < ROWS * INNER; k++) m->h[i][k] = fmaxf(m->h[i][k], 0);
    memcpy(m->x[i + 1], m->x[i], sizeof m->x[i]);
    product(m->x[i + 1], m->h[i], fsdp_param_data(m->down[i]), INNER, D);
    return fsdp_unit_post_forward(m->layer[i], err);
}

static fsdp_status backward_layer(gpt *m, int i, float *dx, fsdp_error *err)
{
    float dh[ROWS * INNER] = {0}, dy[ROWS * D];
    FSDP_TRY(fsdp_unit_pre_backward(m->layer[i], err));
    memcpy(dy, dx, sizeof dy);
    product_grad(dh, fsdp_param_grad(m->down[i]), dy, m->h[i], fsdp_param_data(m->down[i]), INNER, D);
    for (int k = 0; k < ROWS * INNER; k++) dh[k] = m->h[i][k] > 0 ? dh[k] : 0;
    product_grad(dx, fsdp_param_grad(m->up[i]), dh, m->x[i], fsdp_param_data(m->up[i]), D, INNER);
    return fsdp_unit_post_backward(m->layer[i], err);
}

/* Logits become their gradient; returns the mean loss. */
static double softmax(float *logits, const int *target)
{
    double loss = 0;
    for (int r = 0; r < ROWS; r++) {
        float *row = logits + r * VOCAB, sum = 0;
        for (int v = 0; v < VOCAB; v++) sum += row[v] = expf(row[v]);
        loss -= log((double)row[target[r]] / (double)sum) / ROWS;
        for (int v = 0; v < VOCAB; v++) row[v] = (row[v] / sum - (float)(v == target[r])) / (ROWS * MICRO);
    }
    return loss;
}

/* The root's unit is gathered around everything, since its parameters are used first and last. */
static fsdp_status microbatch(gpt *m, const int *id, double *loss, fsdp_error *err)
{
    fsdp_unit *root = fsdp_root_unit(m->root);
    float logits[ROWS * VOCAB] = {0}, dx[ROWS * D] = {0};
    FSDP_TRY(fsdp_root_begin_forward(m->root, err));
    FSDP_TRY(fsdp_unit_pre_forward(root, err));
    const float *E = fsdp_param_data(m->tokens);
    for (int r = 0; r < ROWS; r++) memcpy(m->x[0] + r * D, E + id[r] * D, D * sizeof *E);
    for (int i = 0; i < LAYERS; i++) FSDP_TRY(forward_layer(m, i, err));
    product(logits, m->x[LAYERS], E, D, VOCAB);            /* the root is not resharded after forward */
    FSDP_TRY(fsdp_unit_post_forward(root, err));
    FSDP_TRY(fsdp_root_end_forward(m->root, err));
    *loss += softmax(logits, id + 1) / MICRO;

    FSDP_TRY(fsdp_unit_pre_backward(root, err));           /* first of all: the head's part of the gradient ... */
    float *dE = fsdp_param_grad(m->tokens);
    product_grad(dx, dE, logits, m->x[LAYERS], fsdp_param_data(m->tokens), D, VOCAB);
    for (int i = LAYERS - 1; i >= 0; i--) FSDP_TRY(backward_layer(m, i, dx, err));
    for (int r = 0; r < ROWS; r++)                         /* ... and the embedding's, added to it */
        for (int k = 0; k < D; k++) dE[id[r] * D + k] += dx[r * D + k];
    FSDP_TRY(fsdp_unit_post_backward(root, err));          /* last of all: both are reduced as one */
    return fsdp_root_end_backward(m->root, err);
}

static fsdp_status add(fsdp_model *model, const char *name, int64_t rows, int64_t columns, fsdp_param **param, fsdp_error *err)
{
    fsdp_param_spec spec = {.name = name, .dtype = FSDP_F32, .ndim = 2, .shape = (int64_t[]){rows, columns}};
    return fsdp_model_add(model, &spec, param, err);
}

static fsdp_status declare(gpt *m, fsdp_model *model, const fsdp_unit_opts *opts, fsdp_error *err)
{
    char name[32];
    FSDP_TRY(add(model, "tokens.weight", VOCAB, D, &m->tokens, err));
    FSDP_TRY(fsdp_model_add_alias(model, "head.weight", m->tokens, err));      /* tied: one parameter, two names */
    for (int i = 0; i < LAYERS; i++) {
        snprintf(name, sizeof name, "layers.%d.up.weight", i);
        FSDP_TRY(add(model, name, INNER, D, &m->up[i], err));
        snprintf(name, sizeof name, "layers.%d.down.weight", i);
        FSDP_TRY(add(model, name, D, INNER, &m->down[i], err));
        snprintf(name, sizeof name, "layers.%d", i);
        FSDP_TRY(fsdp_unit_create(model, name, opts, &m->layer[i], err));
    }
    return fsdp_root_create(model, opts, &m->root, err);   /* its unit takes the rest: tokens.weight */
}

/* Rank 0 alone gets the whole model, in one call; the others get an empty dict. */
static fsdp_status write_whole(fsdp_root *root, fsdp_error *err)
{
    fsdp_state_opts opts = {.part = FSDP_STATE_MODEL, .full_state_dict = true, .cpu_offload = true, .model_prefix = ""};
    fsdp_save_opts save = {.kind = FSDP_FULL, .overwrite = true};
    fsdp_convert_opts convert = {.format = "safetensors", .overwrite = true};
    fsdp_sd *whole = NULL;
    fsdp_ctl *alone = NULL;
    FSDP_TRY(fsdp_root_get_state(root, &opts, &whole, err));
    fsdp_status status = FSDP_OK;
    if (fsdp_sd_count(whole) > 0) {
        status = fsdp_ctl_self(&alone, err);
        if (status == FSDP_OK) status = fsdp_sd_save(whole, alone, "gpt-whole", &save, err);
        if (status == FSDP_OK) status = fsdp_checkpoint_convert("gpt-whole", "gpt.safetensors", &convert, err);
    }
    fsdp_ctl_free(alone);
    fsdp_sd_free(whole);
    return status;
}

static int train(void *context, fsdp_world *world, int argc, char **argv)
{
    fsdp_error err = {0};
    fsdp_mesh *mesh = NULL; fsdp_model *model = NULL; fsdp_optim *optim = NULL;
    static _Thread_local gpt m;
    int rank = fsdp_world_rank(world), id[ROWS + 1];
    (void)argc; (void)argv; (void)context;

    TRY(fsdp_world_mesh(world, 1, (int64_t[]){fsdp_world_size(world)}, (const char *[]){"dp"}, &mesh, &err));
    TRY(fsdp_model_create(world, &model, &err));
    fsdp_unit_opts opts = {.mesh = mesh};
    TRY(declare(&m, model, &opts, &err));
    TRY(fsdp_root_init_uniform(m.root, 1, &err));
    fsdp_adamw_opts adam = {.lr = 0.01};
    TRY(fsdp_adamw_create(m.root, &adam, &optim, &err));

    for (int step = 0; step < STEPS; step++) {
        double loss = 0;
        for (int i = 0; i < MICRO; i++) {
            for (int r = 0; r <= ROWS; r++) {
                char c = text[(size_t)(((rank * STEPS + step) * MICRO + i) * ROWS + r) % (sizeof text - 1)];
                id[r] = c == ' ' ? 26 : c - 'a';
            }
            TRY(fsdp_root_begin_microbatch(m.root, i, MICRO, &err));
            TRY(microbatch(&m, id, &loss, &err));
        }
        TRY(fsdp_optim_step(optim, &err));
        TRY(fsdp_world_mean(world, &loss, &err));
        if (rank == 0) printf("step %d loss %.9g\n", step, loss);
    }
    TRY(write_whole(m.root, &err));
done:
    fsdp_mesh_free(mesh); fsdp_model_free(model); fsdp_root_free(m.root); fsdp_optim_free(optim);      /* in any order */
    return fsdp_error_report(&err);
}

int main(int argc, char **argv) { return fsdp_launch(argc, argv, train, NULL); }
