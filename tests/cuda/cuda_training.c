/*
 * Training on device "cuda" over the fake CUDA runtime, with the layers' computation as kernels of
 * the compute stream: the host never reads memory of the device, and waits only where a step needs
 * a number. Shards after a few steps have the bits that device "cpu" gives, for every order of the
 * streams that a seed makes.
 *
 * Cases are the settings of the scenarios C1 to C23 that change order or memory
 * (docs/scenarios.md). The device is watched (--check) for every other round of them, so that
 * either the watch or the bits find a wait that is missing.
 *
 * usage: cuda_training [--unchecked] [--nccl]: never watched; each rank has a GPU of its own, and
 * collectives go over the fake NCCL that FSDP_NCCL_LIB names
 */
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/core/mem.h"
#include "base/io/io.h"
#include "tests/cuda/fake_cudart.h"
#include "tests/cuda/nccl_streams.h"
#include "tests/support/nets/toy.h"
#include "tests/support/matrix_row.h"
#include "tests/support/nets/unit_tuning.h"
#include "tests/support/sample_state.h"

#include <fsdp/async_save.h>
#include <fsdp/optim.h>
#include <fsdp/root_init.h>

enum { LAYERS = 4, WIDTH = 7, ROWS = 3, STEPS = 3, MOST_RANKS = 4, CASES = 48 };
enum { SEEDS = 1000, USUAL_SAMPLE = 19, USUAL_NCCL_SAMPLE = 53, DEADLINE_MS = 30000 };
enum { WEIGHT = WIDTH * WIDTH, BATCH = ROWS * WIDTH };

/* A step of two microbatches: the gradient of the first one stays whole, or with replicas reduced and
 * not added up; or both are reduced, one after the other. */
typedef enum accumulation { ONE_MICROBATCH, KEPT_GRADIENTS, ADDED_GRADIENTS } accumulation;

typedef struct training_case {
    int ranks, reshard;
    bool has_replicas, is_narrow, clips, uses_sgd, saves;
    bool
        clips_late; /* on the GPU no host waits for the norm, whose bits are those of a CPU that waits */
    bool overflows;         /* the second step has no finite norm, and is skipped */
    bool evaluates, halves; /* a forward before each step; the host halves offloaded gradients */
    unsigned offloaded;     /* layers, as bits */
    accumulation accumulates;
    int64_t pool_bytes; /* of the save */
    unit_tuning tuning;
} training_case;

/* Shards of all ranks after the last step, and the result of the forward before it. */
typedef struct outcome {
    const training_case *what;
    char folder[64];
    unsigned char shards[MOST_RANKS][LAYERS][WEIGHT * sizeof(float)];
    unsigned char saved[MOST_RANKS][LAYERS]
                       [WEIGHT * sizeof(float)]; /* by a save under later steps */
    float seen[MOST_RANKS][BATCH];
    double norms[MOST_RANKS][STEPS]; /* of clippings */
} outcome;

/* --- computation ------------------------------------------------------------------------------ */

/* Memory of the device, but for dtype. */
typedef struct layer_math {
    fsdp_dtype dtype; /* of w and dw */
    const void *w;
    void *dw;          /* NULL: forward */
    float *x, *y, *dx; /* y: the result, or its gradient */
} layer_math;

static void run_forward(const layer_math *math)
{
    float w[WEIGHT];
    fsdp_cast(w, FSDP_F32, math->w, math->dtype, WEIGHT);
    for (int r = 0; r < ROWS; r++)
        for (int o = 0; o < WIDTH; o++) {
            float sum = 0;
            for (int k = 0; k < WIDTH; k++)
                sum += math->x[r * WIDTH + k] * w[o * WIDTH + k];
            math->y[r * WIDTH + o] = sum * 0.5f;
        }
}

static void run_backward(const layer_math *math)
{
    float w[WEIGHT], dw[WEIGHT];
    fsdp_cast(w, FSDP_F32, math->w, math->dtype, WEIGHT);
    fsdp_cast(dw, FSDP_F32, math->dw, math->dtype, WEIGHT);
    memset(math->dx, 0, BATCH * sizeof *math->dx);
    for (int r = 0; r < ROWS; r++)
        for (int o = 0; o < WIDTH; o++)
            for (int k = 0; k < WIDTH; k++) {
                float dy = math->y[r * WIDTH + o] * 0.5f;
                dw[o * WIDTH + k] += dy * math->x[r * WIDTH + k];
                math->dx[r * WIDTH + k] += dy * w[o * WIDTH + k];
            }
    fsdp_cast(math->dw, math->dtype, dw, FSDP_F32, WEIGHT);
}

static void run_math(void *closure)
{
    const layer_math *math = closure;
    if (math->dw)
        run_backward(math);
    else
        run_forward(math);
}

/* In the compute stream; on a device of the host the hooks have waited for it. */
static fsdp_status give(fsdp_stream *compute, const layer_math *math, fsdp_error *err)
{
    const fsdp_device_ops *ops = compute->device->ops;
    layer_math *closure = malloc(sizeof *closure);
    if (!closure)
        return fsdp_fail_memory(err, "a layer");
    *closure = *math;
    if (ops->native) {
        if (fake_cudart_enqueue(ops->native(compute), run_math, closure, free) != 0)
            return fsdp_fail(err, FSDP_ERR_INTERNAL, "the mathematics were not taken");
        return FSDP_OK;
    }
    run_math(closure);
    free(closure);
    return FSDP_OK;
}

/* --- a net ------------------------------------------------------------------------------------ */

typedef struct net {
    toy toy;
    fsdp_stream *compute;
    float *x[LAYERS + 1], *dx[2], *seen;
} net;

static float *alloc_batch(const net *self)
{
    fsdp_device *device = self->compute->device;
    return device->ops->alloc(device, BATCH * sizeof(float));
}

static void free_batch(const net *self, float *batch)
{
    fsdp_device *device = self->compute->device;
    if (batch)
        device->ops->dealloc(device, batch, BATCH * sizeof(float));
}

static fsdp_status forward_layer(toy *at, int layer, fsdp_error *err)
{
    net *self = (net *)at;
    const layer_math math = {.dtype = fsdp_param_describe(at->weight[layer]).data_dtype,
                             .w = fsdp_param_data(at->weight[layer]),
                             .x = self->x[layer],
                             .y = self->x[layer + 1]};
    return math.w ? give(self->compute, &math, err) : fsdp_param_error(at->weight[layer], err);
}

static fsdp_status backward_layer(toy *at, int layer, fsdp_error *err)
{
    net *self = (net *)at;
    const layer_math math = {.dtype = fsdp_param_describe(at->weight[layer]).data_dtype,
                             .w = fsdp_param_data(at->weight[layer]),
                             .dw = fsdp_param_grad(at->weight[layer]),
                             .x = self->x[layer],
                             .y = layer + 1 == LAYERS ? self->x[LAYERS] : self->dx[(layer + 1) % 2],
                             .dx = self->dx[layer % 2]};
    return math.w && math.dw ? give(self->compute, &math, err)
                             : fsdp_param_error(at->weight[layer], err);
}

/* The host's memory changes as soon as the copy has returned. */
static void give_rows(net *self, int number, bool is_huge)
{
    float rows[BATCH];
    for (int i = 0; i < BATCH; i++)
        rows[i] = (float)((i * 7 + number * 5 + fsdp_world_rank(self->toy.world) * 3) % 11 - 5) / 8;
    if (is_huge)
        rows[0] = INFINITY;
    self->compute->device->ops->kernels->copy(self->compute, self->x[0], rows, sizeof rows);
    memset(rows, 0xff, sizeof rows);
}

static bool is_skipped(const training_case *what, int step)
{
    return what->overflows && step == 1;
}

static fsdp_status run_microbatch(net *self, const training_case *what, int number, bool reduces,
                                  fsdp_error *err)
{
    const fsdp_unit_setting setting =
        what->has_replicas ? FSDP_UNIT_REQUIRES_ALL_REDUCE : FSDP_UNIT_REQUIRES_GRADIENT_SYNC;
    FSDP_TRY(fsdp_unit_set(fsdp_root_unit(self->toy.root), setting, reduces, true, err));
    fsdp_root_set_is_last_backward(self->toy.root, reduces);
    give_rows(self, number, is_skipped(what, number / 2));
    FSDP_TRY(toy_forward(&self->toy, forward_layer, err));
    return toy_backward(&self->toy, backward_layer, err);
}

/* The optimizer's step follows while the streams may not have begun with this. */
static fsdp_status evaluate(net *self, fsdp_error *err)
{
    FSDP_TRY(fsdp_root_set_evaluating(self->toy.root, true, err));
    FSDP_TRY(toy_forward(&self->toy, forward_layer, err));
    FSDP_TRY(fsdp_root_set_evaluating(self->toy.root, false, err));
    self->compute->device->ops->kernels->copy(self->compute, self->seen, self->x[LAYERS],
                                              BATCH * sizeof(float));
    return FSDP_OK;
}

/* *steps_out: the optimizer is to step, because the gradients are finite or the device sees whether. */
static fsdp_status clip(net *self, const training_case *what, int step, double *norms,
                        bool *steps_out, fsdp_error *err)
{
    fsdp_root *root = self->toy.root;
    const fsdp_clip_opts opts = {.max_norm = 1e-5, .error_if_nonfinite = what->overflows};
    if (what->clips_late && !self->compute->device->ops->is_host) {
        FSDP_TRY(fsdp_root_clip_grad_norm(root, &opts, NULL, err));
        if (step > 0)
            FSDP_TRY(fsdp_root_grad_norm(root, 1, &norms[step - 1], err));
        return step == STEPS - 1 ? fsdp_root_grad_norm(root, 0, &norms[step], err) : FSDP_OK;
    }
    fsdp_error found = {0};
    (void)!fsdp_root_clip_grad_norm(root, &opts, &norms[step], &found);
    *steps_out = !is_skipped(what, step);
    if (found.status == (*steps_out ? FSDP_OK : FSDP_ERR_DAMAGED))
        return FSDP_OK;
    *err = found;
    return FSDP_ERR_INTERNAL;
}

static fsdp_status run_step(net *self, const training_case *what, int step, double *norms,
                            fsdp_error *err)
{
    bool steps = true;
    if (what->accumulates)
        FSDP_TRY(run_microbatch(self, what, 2 * step, what->accumulates == ADDED_GRADIENTS, err));
    FSDP_TRY(run_microbatch(self, what, 2 * step + 1, true, err));
    if (what->clips)
        FSDP_TRY(clip(self, what, step, norms, &steps, err));
    if (what->evaluates)
        FSDP_TRY(evaluate(self, err));
    if (steps)
        return fsdp_optim_step(self->toy.optim, err);
    fsdp_root_zero_grad(self->toy.root);
    return FSDP_OK;
}

/* First values: a number of the element, a power of two, so that bf16 has them exactly. */
static fsdp_status number(void *context, const fsdp_param *param, const fsdp_box *box, void *data,
                          fsdp_error *err)
{
    float *to = data;
    (void)context;
    (void)param;
    (void)err;
    for (int64_t i = 0; i < fsdp_box_count(box); i++)
        to[i] = (float)((i * 5 + box->lo[0] * 3) % 9 - 4) / 16;
    return FSDP_OK;
}

/* A hook of an offloaded parameter, whose gradient the host may change. */
static fsdp_status halve(void *context, fsdp_param *param, fsdp_error *err)
{
    fsdp_box box;
    (void)context;
    (void)err;
    fsdp_param_shard(param, &box);
    fsdp_tensor_multiply(fsdp_param_shard_grad(param), FSDP_F32, (size_t)fsdp_box_count(&box), 0.5);
    return FSDP_OK;
}

static fsdp_status wrap(toy *at, const training_case *what, fsdp_error *err)
{
    for (int i = 0; i < LAYERS; i++) {
        char name[16];
        fsdp_unit_opts opts = at->opts;
        snprintf(name, sizeof name, "L%d", i);
        opts.offload = what->offloaded >> i & 1;
        FSDP_TRY(fsdp_unit_create(at->model, name, &opts, &at->unit[i], err));
        if (opts.offload && what->halves)
            fsdp_param_set_post_accumulate_hook(at->weight[i], halve, NULL);
    }
    return fsdp_root_create(at->model, &at->opts, &at->root, err);
}

static fsdp_status make(net *self, const training_case *what, fsdp_error *err)
{
    const int64_t shape[] = {WIDTH, WIDTH};
    toy *at = &self->toy;
    at->opts.reshard_after_forward = what->reshard;
    if (what->is_narrow) {
        at->opts.param_dtype = FSDP_BF16;
        at->opts.reduce_dtype = FSDP_F32;
    }
    FSDP_TRY(toy_add_weights(at, LAYERS, 2, shape, err));
    FSDP_TRY(wrap(at, what, err));
    FSDP_TRY(tune_row(at->unit, LAYERS, &what->tuning, err));
    FSDP_TRY(fsdp_root_init(at->root, number, NULL, err));
    self->compute = at->root->context->streams[FSDP_STREAM_COMPUTE];
    for (int i = 0; i <= LAYERS; i++)
        self->x[i] = alloc_batch(self);
    for (int i = 0; i < 2; i++)
        self->dx[i] = alloc_batch(self);
    self->seen = alloc_batch(self);
    if (what->uses_sgd)
        return toy_add_sgd(at, &(fsdp_sgd_opts){.lr = 0.1, .momentum = 0.9}, err);
    return toy_add_adamw(at, &(fsdp_adamw_opts){.lr = 0.01, .weight_decay = 0.01}, err);
}

/* --- results ---------------------------------------------------------------------------------- */

static fsdp_status read_memory(net *self, const void *data, size_t size, void *to, fsdp_error *err)
{
    fsdp_device *device = self->compute->device;
    void *staging = device->ops->alloc_staging(device, WEIGHT * sizeof(float));
    if (!staging)
        return fsdp_fail_memory(err, "a shard");
    device->ops->kernels->copy(self->compute, staging, data, size);
    fsdp_status status = device->ops->sync(device->ops->record(self->compute), err);
    memcpy(to, staging, size);
    device->ops->dealloc_staging(device, staging, WEIGHT * sizeof(float));
    return status;
}

static fsdp_status read_shard(net *self, int layer, unsigned char *to, fsdp_error *err)
{
    fsdp_box box;
    const void *shard = fsdp_param_shard(self->toy.weight[layer], &box);
    return read_memory(self, shard, (size_t)fsdp_box_count(&box) * sizeof(float), to, err);
}

static fsdp_status read_shards(net *self, unsigned char to[LAYERS][WEIGHT * sizeof(float)],
                               fsdp_error *err)
{
    for (int i = 0; i < LAYERS; i++)
        FSDP_TRY(read_shard(self, i, to[i], err));
    return FSDP_OK;
}

static fsdp_status begin_save(fsdp_async_saver *saver, const char *folder, fsdp_error *err)
{
    const fsdp_root_save_opts opts = {.save.skip_fsync = true};
    char checkpoint[96];
    snprintf(checkpoint, sizeof checkpoint, "%s/checkpoint", folder);
    return fsdp_async_save(saver, checkpoint, &opts, err);
}

/* The state after the first step is saved while the others run. */
static fsdp_status run_steps(net *self, fsdp_async_saver *saver, outcome *out, fsdp_error *err)
{
    fsdp_async_report report;
    int rank = fsdp_world_rank(self->toy.world);
    for (int step = 0; step < STEPS; step++) {
        FSDP_TRY(run_step(self, out->what, step, out->norms[rank], err));
        if (saver && step == 0)
            FSDP_TRY(begin_save(saver, out->folder, err));
    }
    if (out->what->evaluates)
        FSDP_TRY(read_memory(self, self->seen, BATCH * sizeof(float), out->seen[rank], err));
    FSDP_TRY(read_shards(self, out->shards[rank], err));
    if (!saver)
        return FSDP_OK;
    FSDP_TRY(fsdp_async_save_wait(saver, &report, err));
    FSDP_TRY(fsdp_root_load(self->toy.root, report.path, NULL, err));
    return read_shards(self, out->saved[rank], err);
}

static fsdp_status run_net(net *self, outcome *out, fsdp_error *err)
{
    fsdp_async_saver *saver = NULL;
    FSDP_TRY(make(self, out->what, err));
    if (out->what->saves)
        FSDP_TRY(fsdp_async_saver_create(
            self->toy.root, &(fsdp_async_opts){.pool_bytes = out->what->pool_bytes}, &saver, err));
    fsdp_status status = run_steps(self, saver, out, err);
    fsdp_async_saver_free(saver);
    return status;
}

static fsdp_status run_rank(world_rank *rank, fsdp_error *err)
{
    outcome *out = rank->user;
    const training_case *what = out->what;
    net self = {0};
    toy_case where = {.mesh_ndim = 1, .mesh_shape = {what->ranks}, .mesh_names = {"dp"}};
    if (what->has_replicas)
        where = (toy_case){
            .mesh_ndim = 2, .mesh_shape = {2, what->ranks / 2}, .mesh_names = {"rep", "dp"}};
    fsdp_status status = toy_begin(&self.toy, rank, &where, err);
    if (status == FSDP_OK)
        status = run_net(&self, out, err);
    if (self.compute) {
        const fsdp_device_ops *ops = self.compute->device->ops;
        (void)!ops->sync(ops->record(self.compute), NULL);
        for (int i = 0; i <= LAYERS; i++)
            free_batch(&self, self.x[i]);
        for (int i = 0; i < 2; i++)
            free_batch(&self, self.dx[i]);
        free_batch(&self, self.seen);
    }
    toy_free(&self.toy);
    return status;
}

/* --- cases ------------------------------------------------------------------------------------ */

static training_case case_of(int i)
{
    static const int reshards[] = {FSDP_RESHARD_AUTO, FSDP_RESHARD_NEVER, 2};
    static const unsigned offloaded[] = {0, 15, 5}; /* none, all, every other layer */
    training_case what = {.ranks = 1 + i % MOST_RANKS,
                          .reshard = reshards[i / 2 % 3],
                          .is_narrow = i % 5 == 1,
                          .clips = i % 3 == 1 || i % 12 == 3 || i % 24 == 2 || i % 24 == 12,
                          .uses_sgd = i % 7 == 2,
                          .saves = i % 4 != 1,
                          .pool_bytes = i % 8 < 4 ? 0 : 1 + 64 * i,
                          .evaluates = i % 5 == 3 || i % 16 == 4,
                          .halves = i % 3 == 0,
                          .offloaded = offloaded[i / 4 % 3],
                          .accumulates = (accumulation)(i / 16 % 3),
                          .tuning = {.prefetch = i / 3 % 3,
                                     .inputs = 1 + i / 5 % 2,
                                     .separate = i % 6 == 3,
                                     .from_comm = i / 2 % 2 == 1}};
    what.has_replicas = what.ranks == 4 && i % 8 == 7;
    what.clips_late = what.clips && (i % 3 != 1 || (i / 3 + i / 12) % 2 == 1);
    what.overflows = what.clips_late && i % 5 > 2;
    if (i % 12 == 11)
        what.reshard = 2;
    if (what.reshard == 2 && (what.ranks % 2 != 0 || what.has_replicas))
        what.reshard = FSDP_RESHARD_AUTO;
    return what;
}

typedef struct training_mode {
    bool is_unchecked;
    const fake_nccl_control *nccl; /* NULL: ranks share memory and one GPU */
} training_mode;

static fsdp_status run_on(const char *device, training_mode mode, outcome *out, fsdp_error *err)
{
    const worlds_setup setup = {.ranks = out->what->ranks,
                                .deadline_ms = DEADLINE_MS,
                                .device = device,
                                .is_unchecked = mode.is_unchecked,
                                .uses_nccl = mode.nccl != NULL};
    snprintf(out->folder, sizeof out->folder, "%s/fsdp-cuda-XXXXXX",
             access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp");
    if (!mkdtemp(out->folder))
        return fsdp_fail_errno(err, errno, "'%s'", out->folder);
    fsdp_status status = run_worlds_within(&setup, run_rank, out, NULL, err);
    (void)!fsdp_io_remove_tree(NULL, out->folder, NULL);
    return status;
}

/* A norm that is not finite may be any NaN. */
static bool are_norms_equal(const outcome *a, const outcome *b)
{
    const double *x = &a->norms[0][0], *y = &b->norms[0][0];
    for (int i = 0; i < MOST_RANKS * STEPS; i++)
        if (x[i] != y[i] && !(isnan(x[i]) && isnan(y[i])))
            return false;
    return true;
}

/* Every other round of the cases is checked. */
static bool run_seed(uint64_t seed, training_mode mode, const outcome *expected)
{
    static outcome found;
    fsdp_error err = {0};
    memset(&found, 0, sizeof found);
    found.what = expected->what;
    mode.is_unchecked |= seed / CASES % 2 == 1;
    fake_cudart_begin(&(fake_cudart_plan){.seed = seed, .devices = mode.nccl ? MOST_RANKS : 1});
    fsdp_status status = run_on("cuda", mode, &found, &err);
    const char *misuse = fake_cudart_end();
    if (mode.nccl && (mode.nccl->alive() > 0 || mode.nccl->misuses() > 0))
        misuse = "something is left in NCCL, or it was misused";
    bool is_right = status == FSDP_OK && !misuse &&
                    memcmp(found.shards, expected->shards, sizeof found.shards) == 0 &&
                    are_norms_equal(&found, expected) &&
                    memcmp(found.saved, expected->saved, sizeof found.saved) == 0 &&
                    memcmp(found.seen, expected->seen, sizeof found.seen) == 0;
    if (!is_right)
        printf("seed %d: %s%s%s\n", (int)seed, status ? err.text : "other bits", misuse ? "; " : "",
               misuse ? misuse : "");
    return is_right;
}

static bool run_on_cpu(int i, training_mode mode, outcome *expected)
{
    static training_case cases[CASES];
    fsdp_error err = {0};
    cases[i] = case_of(i);
    expected->what = &cases[i];
    mode.nccl = NULL;
    if (run_on("cpu", mode, expected, &err) == FSDP_OK)
        return true;
    printf("case %d on cpu: %s\n", i, err.text);
    return false;
}

static bool read_mode(int argc, char **argv, training_mode *mode_out)
{
    bool wants_nccl = false;
    for (int i = 1; i < argc; i++) {
        mode_out->is_unchecked |= strcmp(argv[i], "--unchecked") == 0;
        wants_nccl |= strcmp(argv[i], "--nccl") == 0;
    }
    mode_out->nccl = wants_nccl ? fake_nccl_over_cudart() : NULL;
    if (wants_nccl && !mode_out->nccl)
        fprintf(stderr, "--nccl: FSDP_NCCL_LIB names no fake NCCL\n");
    return !wants_nccl || mode_out->nccl;
}

int main(int argc, char **argv)
{
    static outcome expected[CASES];
    training_mode mode = {0};
    int64_t failed = 0;
    if (!read_mode(argc, argv, &mode))
        return 1;
    test_sampler sampler = {.every = test_sample(mode.nccl ? USUAL_NCCL_SAMPLE : USUAL_SAMPLE)};
    for (int i = 0; i < CASES; i++)
        if (!run_on_cpu(i, mode, &expected[i]))
            return 1;
    for (int seed = 0; seed < SEEDS; seed++)
        if (test_sampler_takes(&sampler))
            failed += !run_seed((uint64_t)seed, mode, &expected[seed % CASES]);
    const matrix_row row = {mode.nccl
                                ? "training over a fake NCCL on a fake CUDA runtime, by the order "
                                  "of its streams"
                                : "training on a fake CUDA runtime, by the order of its streams",
                            "seeds", sampler.taken, SEEDS, sampler.every};
    return !matrix_row_print(&row, " | other bits than on cpu %" PRId64, failed) || failed > 0;
}
