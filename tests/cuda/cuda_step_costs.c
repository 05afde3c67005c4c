/*
 * What a step costs the host on device "cuda", counted by the fake CUDA runtime: allocations, waits,
 * launches. The units are unlike: an embedding of 20 times a block, as models have them, and the whole is
 * larger than what pools keep without need. After three steps nothing is allocated or freed any more; the
 * host waits where the table below says.
 *
 * usage: cuda_step_costs [--nccl] [--show]: each rank has a GPU of its own, and collectives go over the fake
 * NCCL that FSDP_NCCL_LIB names; --show prints all counts
 */
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/io/io.h"
#include "tests/cuda/fake_cudart.h"
#include "tests/cuda/nccl_streams.h"
#include "tests/support/nets/toy.h"

#include <fsdp/async_save.h>
#include <fsdp/optim.h>
#include <fsdp/root_init.h>

enum { LAYERS = 6, WIDTH = 640, EMBEDDING = 20, WARM = 3, MEASURED = 3, DEADLINE_MS = 60000 };
enum { MOST_RANKS = 4 };

typedef struct cost_case {
    const char *name;
    int ranks;
    bool offloads, has_replicas, accumulates, adds_up, clips, saves, is_narrow;
    bool reads_norm; /* the host waits for it */
    bool skips;      /* steps without a finite norm change nothing */
    int waits;       /* of the host, per rank and step, at most */
    int saver_waits; /* of a thread that writes what was copied, the same */
} cost_case;

static const cost_case cases[] = {
    {.name = "1 rank", .ranks = 1},
    {.name = "2 ranks", .ranks = 2},
    {.name = "4 ranks", .ranks = 4},
    {.name = "1 rank, clipping", .ranks = 1, .clips = true},
    {.name = "2 ranks, clipping", .ranks = 2, .clips = true},
    {.name = "4 ranks, clipping", .ranks = 4, .clips = true},
    {.name = "2 ranks, clipping, skips", .ranks = 2, .clips = true, .skips = true, .waits = 1},
    {.name = "2 ranks, norm at once", .ranks = 2, .clips = true, .reads_norm = true, .waits = 1},
    {.name = "4 ranks, bf16", .ranks = 4, .is_narrow = true},
    {.name = "4 ranks, 2 replicas", .ranks = 4, .has_replicas = true},
    {.name = "1 rank, kept gradients", .ranks = 1, .accumulates = true},
    {.name = "2 ranks, kept gradients", .ranks = 2, .accumulates = true},
    {.name = "4 ranks, kept gradients", .ranks = 4, .accumulates = true},
    {.name = "1 rank, added gradients", .ranks = 1, .accumulates = true, .adds_up = true},
    {.name = "2 ranks, added gradients", .ranks = 2, .accumulates = true, .adds_up = true},
    {.name = "4 ranks, added gradients", .ranks = 4, .accumulates = true, .adds_up = true},
    {.name = "4 ranks, clipping, 2 replicas", .ranks = 4, .clips = true, .has_replicas = true},
    {.name = "1 rank, clipping, kept", .ranks = 1, .clips = true, .accumulates = true},
    {.name = "2 ranks, clipping, kept", .ranks = 2, .clips = true, .accumulates = true},
    {.name = "4 ranks, clipping, kept", .ranks = 4, .clips = true, .accumulates = true},
    {.name = "2 ranks, offload", .ranks = 2, .offloads = true, .waits = 2},
    {.name = "2 ranks, saves", .ranks = 2, .saves = true, .saver_waits = 1},
};

/* --- counts ----------------------------------------------------------------------------------- */

typedef enum cost { ALLOCATIONS, FREES, WAITS, LAUNCHES, COSTS } cost;

static const char *const functions[COSTS][4] = {
    [ALLOCATIONS] = {"cudaMalloc", "cudaHostAlloc"},
    [FREES] = {"cudaFree", "cudaFreeHost"},
    [WAITS] = {"cudaEventSynchronize", "cudaStreamSynchronize"},
    [LAUNCHES] = {"cudaLaunchKernel", "cudaMemcpyAsync", "cudaMemsetAsync"},
};

typedef struct step_costs {
    const cost_case *what;
    char folder[64];
    int counts[COSTS];
    _Atomic int waits; /* of the ranks' own threads, which counts[WAITS] has, too */
} step_costs;

static void count(int counts[COSTS])
{
    for (int i = 0; i < COSTS; i++) {
        counts[i] = 0;
        for (int j = 0; j < 4 && functions[i][j]; j++)
            counts[i] += fake_cudart_calls(functions[i][j]);
    }
}

static int count_own_waits(void)
{
    return fake_cudart_calls_here(functions[WAITS][0]) +
           fake_cudart_calls_here(functions[WAITS][1]);
}

/* --- a step ----------------------------------------------------------------------------------- */

static fsdp_status forward_layer(toy *net, int layer, fsdp_error *err)
{
    return fsdp_param_data(net->weight[layer]) ? FSDP_OK
                                               : fsdp_param_error(net->weight[layer], err);
}

/* In the compute stream, which a backward of a model would use, too. */
static fsdp_status backward_layer(toy *net, int layer, fsdp_error *err)
{
    const fsdp_param *param = net->weight[layer];
    fsdp_stream *compute = net->root->context->streams[FSDP_STREAM_COMPUTE];
    void *grad = fsdp_param_grad(net->weight[layer]);
    if (!grad)
        return fsdp_param_error(net->weight[layer], err);
    compute->device->ops->kernels->fill(compute, grad, 0,
                                        (size_t)fsdp_param_count(param) *
                                            fsdp_dtype_size(fsdp_param_describe(param).data_dtype));
    return FSDP_OK;
}

static fsdp_status run_microbatch(toy *net, bool reduces, fsdp_error *err)
{
    FSDP_TRY(fsdp_unit_set(fsdp_root_unit(net->root), FSDP_UNIT_REQUIRES_GRADIENT_SYNC, reduces,
                           true, err));
    fsdp_root_set_is_last_backward(net->root, reduces);
    FSDP_TRY(toy_forward(net, forward_layer, err));
    return toy_backward(net, backward_layer, err);
}

static fsdp_status run_step(toy *net, const cost_case *what, fsdp_error *err)
{
    const fsdp_clip_opts clip = {.max_norm = 0.5, .error_if_nonfinite = what->skips};
    double norm;
    if (what->accumulates)
        FSDP_TRY(run_microbatch(net, what->adds_up, err));
    FSDP_TRY(run_microbatch(net, true, err));
    if (what->clips)
        FSDP_TRY(fsdp_root_clip_grad_norm(net->root, &clip, what->reads_norm ? &norm : NULL, err));
    return fsdp_optim_step(net->optim, err);
}

/* As a trainer that reads the loss and the norm of a step after the next one. The wait for the end of a step
 * is not counted, and the norm needs no other. */
static fsdp_status run_steps(toy *net, step_costs *out, fsdp_async_saver *saver, fsdp_error *err)
{
    int before[COSTS], own_before = 0;
    double norm;
    fsdp_async_report report;
    fsdp_stream *compute = net->root->context->streams[FSDP_STREAM_COMPUTE];
    const fsdp_device_ops *ops = compute->device->ops;
    fsdp_event end = {0};
    for (int step = 0; step < WARM + MEASURED; step++) {
        char checkpoint[96];
        if (step == WARM) {
            FSDP_TRY(fsdp_ctl_barrier(fsdp_world_ctl(net->world), err));
            count(before);
            own_before = count_own_waits();
            FSDP_TRY(fsdp_ctl_barrier(fsdp_world_ctl(net->world), err));
        }
        FSDP_TRY(run_step(net, out->what, err));
        while (end.stream && !ops->is_reached(end))
            sched_yield();
        if (out->what->clips && step > 0)
            FSDP_TRY(fsdp_root_grad_norm(net->root, 1, &norm, err));
        end = ops->record(compute);
        if (!saver)
            continue;
        snprintf(checkpoint, sizeof checkpoint, "%s/step-%d", out->folder, step);
        FSDP_TRY(fsdp_async_save(saver, checkpoint, &(fsdp_root_save_opts){.save.skip_fsync = true},
                                 err));
        FSDP_TRY(fsdp_async_save_wait(saver, &report, err));
    }
    out->waits += count_own_waits() - own_before;
    FSDP_TRY(fsdp_ctl_barrier(fsdp_world_ctl(net->world), err));
    if (fsdp_world_rank(net->world) == 0) {
        count(out->counts);
        for (int i = 0; i < COSTS; i++)
            out->counts[i] -= before[i];
    }
    return fsdp_ctl_barrier(fsdp_world_ctl(net->world), err);
}

/* --- a case ----------------------------------------------------------------------------------- */

static fsdp_status add_weights(toy *net, fsdp_error *err)
{
    for (net->layers = 0; net->layers < LAYERS; net->layers++) {
        const int64_t shape[] = {net->layers == 0 ? EMBEDDING * WIDTH : WIDTH, WIDTH};
        char name[16];
        snprintf(name, sizeof name, "L%d.w", net->layers);
        const fsdp_param_spec spec = {.name = name, .dtype = FSDP_F32, .ndim = 2, .shape = shape};
        FSDP_TRY(fsdp_model_add(net->model, &spec, &net->weight[net->layers], err));
    }
    return FSDP_OK;
}

static fsdp_status fill(void *context, const fsdp_param *param, const fsdp_box *box, void *data,
                        fsdp_error *err)
{
    (void)context;
    (void)param;
    (void)err;
    memset(data, 0, (size_t)fsdp_box_count(box) * sizeof(float));
    return FSDP_OK;
}

static fsdp_status run_net(toy *net, step_costs *out, fsdp_error *err)
{
    const cost_case *what = out->what;
    fsdp_async_saver *saver = NULL;
    net->opts.offload = what->offloads;
    if (what->is_narrow) {
        net->opts.param_dtype = FSDP_BF16;
        net->opts.reduce_dtype = FSDP_F32;
    }
    FSDP_TRY(add_weights(net, err));
    FSDP_TRY(toy_wrap(net, err));
    FSDP_TRY(fsdp_root_init(net->root, fill, NULL, err));
    FSDP_TRY(toy_add_adamw(net, &(fsdp_adamw_opts){.lr = 0.01}, err));
    if (what->saves)
        FSDP_TRY(fsdp_async_saver_create(net->root, NULL, &saver, err));
    fsdp_status status = run_steps(net, out, saver, err);
    fsdp_async_saver_free(saver);
    return status;
}

static fsdp_status run_rank(world_rank *rank, fsdp_error *err)
{
    step_costs *out = rank->user;
    toy net = {0};
    toy_case where = {.mesh_ndim = 1, .mesh_shape = {out->what->ranks}, .mesh_names = {"dp"}};
    if (out->what->has_replicas)
        where = (toy_case){
            .mesh_ndim = 2, .mesh_shape = {2, out->what->ranks / 2}, .mesh_names = {"rep", "dp"}};
    fsdp_status status = toy_begin(&net, rank, &where, err);
    if (status == FSDP_OK)
        status = run_net(&net, out, err);
    toy_free(&net);
    return status;
}

/* Clipping costs as many launches as a few numbers need, however many parameters there are. `plain` has the
 * launches of the last case without it, by its ranks. */
static bool check_clip_launches(const cost_case *what, double launches,
                                double plain[MOST_RANKS + 1])
{
    const double more = launches - plain[what->ranks];
    if (!what->clips)
        plain[what->ranks] = launches;
    if (!what->clips || what->has_replicas || what->accumulates || more <= 4 + what->ranks)
        return true;
    printf("%s: %.1f launches per step more than without clipping, %d are expected\n", what->name,
           more, 4 + what->ranks);
    return false;
}

static void show(const step_costs *out)
{
    const double steps = (double)MEASURED * out->what->ranks;
    printf("%-30s %5d allocations, %5d frees; per rank and step %6.1f waits, %6.1f of the saver, "
           "%6.1f launches\n",
           out->what->name, out->counts[ALLOCATIONS], out->counts[FREES], out->waits / steps,
           (out->counts[WAITS] - out->waits) / steps, out->counts[LAUNCHES] / steps);
}

static bool check_waits(const cost_case *what, const char *who, int waits, int expected)
{
    const int steps = MEASURED * what->ranks;
    if (waits <= expected * steps)
        return true;
    printf("%s: %s waits %.1f times per step, %d are expected\n", what->name, who,
           (double)waits / steps, expected);
    return false;
}

static bool check_costs(const step_costs *out, double plain[MOST_RANKS + 1])
{
    const cost_case *what = out->what;
    const int all_waits = out->counts[WAITS];
    bool is_right = check_waits(what, "the host", out->waits, what->waits);
    is_right &= check_waits(what, "a saver", all_waits - out->waits, what->saver_waits);
    is_right &=
        check_clip_launches(what, (double)out->counts[LAUNCHES] / (MEASURED * what->ranks), plain);
    if (out->counts[ALLOCATIONS] == 0 && out->counts[FREES] == 0)
        return is_right;
    printf("%s: steps after the third have %d allocations and %d frees\n", what->name,
           out->counts[ALLOCATIONS], out->counts[FREES]);
    return false;
}

static bool run_case(const cost_case *what, const fake_nccl_control *nccl, bool shows,
                     double plain[MOST_RANKS + 1])
{
    step_costs out = {.what = what};
    fsdp_error err = {0};
    const worlds_setup setup = {.ranks = what->ranks,
                                .deadline_ms = DEADLINE_MS,
                                .device = "cuda",
                                .is_unchecked = true,
                                .uses_nccl = nccl != NULL};
    snprintf(out.folder, sizeof out.folder, "%s/fsdp-costs-XXXXXX",
             access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp");
    if (!mkdtemp(out.folder))
        return false;
    fake_cudart_begin(&(fake_cudart_plan){.devices = nccl ? what->ranks : 1});
    fsdp_status status = run_worlds_within(&setup, run_rank, &out, NULL, &err);
    const char *misuse = fake_cudart_end();
    (void)!fsdp_io_remove_tree(NULL, out.folder, NULL);
    if (shows)
        show(&out);
    if (status != FSDP_OK || misuse)
        printf("%s: %s\n", what->name, status != FSDP_OK ? err.text : misuse);
    return check_costs(&out, plain) && status == FSDP_OK && !misuse;
}

int main(int argc, char **argv)
{
    const fake_nccl_control *nccl = NULL;
    bool shows = false, is_right = true;
    double plain[MOST_RANKS + 1] = {0};
    for (int i = 1; i < argc; i++) {
        shows |= strcmp(argv[i], "--show") == 0;
        if (strcmp(argv[i], "--nccl") == 0)
            nccl = fake_nccl_over_cudart();
    }
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        is_right &= run_case(&cases[i], nccl, shows, plain);
    return !is_right;
}
