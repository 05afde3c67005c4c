/*
 * Gossip: instead of the mean over all ranks, each gradient is averaged with one partner, another one in every
 * round. Ranks drift apart a little, and no step waits for all of them. A communication hook of the FSDP1 face.
 *
 *   ./gossip --threads 4 | ./gossip --np 4 | mpirun -n 4 ./gossip
 */
#include <fsdp/fsdp.h>
#include <stdio.h>
#include <stdlib.h>

enum { D = 8, ROWS = 4, STEPS = 50 };
#define TRY(call) do { if ((call) != FSDP_OK) goto done; } while (0)

typedef struct gossip { int64_t round; } gossip;

/* In round k rank r averages with rank (k - r) mod n, which computes the same partner. */
static fsdp_status average(void *context, fsdp_comm *comm, const fsdp_wrap_bucket *bucket, fsdp_error *err)
{
    int n = fsdp_comm_size(comm), rank = fsdp_comm_rank(comm);
    int partner = (int)((((gossip *)context)->round++ - rank) % n + n) % n;
    float *mine = bucket->grad;
    float *theirs = malloc((size_t)bucket->count * sizeof *theirs);
    int64_t *counts = calloc((size_t)n, sizeof *counts);
    fsdp_status status = FSDP_OK;
    if (!theirs || !counts)
        status = fsdp_fail(err, FSDP_ERR_LIMIT, "no memory for the partner's gradient");
    if (status == FSDP_OK && partner != rank)
        counts[partner] = bucket->count;
    if (status == FSDP_OK)
        status = fsdp_comm_run(comm, &(fsdp_collective){.kind = FSDP_ALL_TO_ALL, .dtype = bucket->dtype,
                                                        .in = mine, .out = theirs, .counts = counts,
                                                        .out_counts = counts, .unit = bucket->unit}, err);
    for (int64_t i = 0; status == FSDP_OK && partner != rank && i < bucket->count; i++)
        mine[i] = (mine[i] + theirs[i]) / 2;
    free(theirs);
    free(counts);
    return status;
}

/* Learns the weights 0.1, 0.2, ... from rows of its own. */
static double learn(const float *weight, float *grad, int step, int rank)
{
    double loss = 0;
    for (int row = 0; row < ROWS; row++) {
        float x[D], error = 0;
        for (int i = 0; i < D; i++) {
            x[i] = (float)fsdp_uniform(1, "x", (uint64_t)(((step * 64 + rank) * ROWS + row) * D + i));
            error += (weight[i] - 0.1f * (float)(i + 1)) * x[i];
        }
        loss += error * error / ROWS;
        for (int i = 0; i < D; i++)
            grad[i] += 2 * error * x[i] / ROWS;
    }
    return loss;
}

static int train(void *context, fsdp_world *world, int argc, char **argv)
{
    fsdp_error err = {0};
    fsdp_model *model = NULL;
    fsdp_wrap *wrap = NULL;
    fsdp_optim *optim = NULL;
    fsdp_param *weight;
    gossip state = {0};
    double loss = 0;
    (void)argc; (void)argv; (void)context;

    TRY(fsdp_model_create(world, &model, &err));
    fsdp_param_spec spec = {.name = "weight", .dtype = FSDP_F32, .ndim = 1, .shape = (int64_t[]){D}};
    TRY(fsdp_model_add(model, &spec, &weight, &err));
    const fsdp_wrap_opts opts = {.unit.strategy = FSDP_WRAP_NO_SHARD};
    TRY(fsdp_wrap_create(model, &opts, &wrap, &err));
    TRY(fsdp_wrap_register_comm_hook(wrap, average, &state, &err));
    fsdp_root *root = fsdp_wrap_root(wrap);
    fsdp_sgd_opts sgd = {.lr = 0.2};
    TRY(fsdp_sgd_create(root, &sgd, &optim, &err));

    fsdp_unit *unit = fsdp_wrap_unit(wrap, "");
    for (int step = 0; step < STEPS; step++) {
        TRY(fsdp_root_begin_forward(root, &err));
        TRY(fsdp_unit_pre_forward(unit, &err));
        TRY(fsdp_unit_post_forward(unit, &err));
        TRY(fsdp_root_end_forward(root, &err));
        TRY(fsdp_unit_pre_backward(unit, &err));
        loss = learn(fsdp_param_data(weight), fsdp_param_grad(weight), step, fsdp_world_rank(world));
        TRY(fsdp_root_end_backward(root, &err));
        TRY(fsdp_optim_step(optim, &err));
    }
    TRY(fsdp_world_mean(world, &loss, &err));
    if (fsdp_world_rank(world) == 0)
        printf("after %d steps of %d ranks: loss %.2g\n", STEPS, fsdp_world_size(world), loss);
    if (!(loss < 1e-2))
        (void)fsdp_fail(&err, FSDP_ERR_INTERNAL, "nothing was learned");
done:
    fsdp_optim_free(optim);
    fsdp_wrap_free(wrap);
    fsdp_model_free(model);
    return fsdp_error_report(&err);
}

int main(int argc, char **argv) { return fsdp_launch(argc, argv, train, NULL); }
