/*
 * Without --comm NCCL moves the memory of GPUs where ranks have GPUs of their own, and threads do
 * it themselves where they share one; an error says what to type where neither works. The GPUs and
 * NCCL are fakes, of which each case has new ones, in a process of its own.
 *
 * usage: cuda_launch, with the fake NCCL in FSDP_NCCL_LIB
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fsdp/comm.h>
#include <fsdp/launch.h>

#include "base/core/mem.h"
#include "runtime/launch/world_internal.h"
#include "tests/cuda/fake_cudart.h"
#include "tests/cuda/nccl_streams.h"
#include "tests/support/nets/toy.h"

enum {
    FAILED = 99,
    NCCL_SHARES_GPU = 23000,
    MOST_WORDS = 12,
    OWN_GPUS = 0,
    COUNT = 1000,
    OUTPUT = 4096
};

typedef struct launch_case {
    const char *words; /* options of fsdp_launch */
    int gpus;          /* OWN_GPUS: a GPU that each process has, and the others do not see */
    int nccl;          /* its version; 0: 2.28.9; -1: there is none */
    int code;          /* expected, as is text */
    const char *text;  /* of the output */
    const char *once;  /* a line of the output; "": none that warns; NULL: any */
    bool is_quiet;     /* FSDP_VERBOSE=0 */
    int host, shard;   /* ranks of a host, and of a unit's shards; 0: no unit is made */
    int parts;         /* of a GPU that are devices (MIG); 0: one */
} launch_case;

#define HIDDEN "fsdp: ranks 0 and 1 are on one host, and each sees no GPU but its own"
#define SPAN(ranks, hosts) \
    "fsdp: the " ranks " ranks that shard unit L0 are on " hosts " hosts, so each gather"

static const launch_case cases[] = {
    {"--threads 2 --device cuda", 1, 0, 0, .text = "over threads\n"},
    {"--threads 2 --device cuda", 1, -1, 0, .text = "over threads\n"},
    {"--threads 3 --device cuda:1", 2, 0, 0, .text = "over threads\n"},
    {"--threads 2 --device cuda", 2, 0, 0, .text = "over nccl\n"},
    {"--threads 2 --device cuda --comm auto", 2, 0, 0, .text = "over nccl\n"},
    {"--threads 2 --device cuda --comm auto --check", 2, 0, 0, .text = "over nccl\n"},
    {"--threads 2 --device cuda --comm nccl", 2, 0, 0, .text = "over nccl\n"},
    {"--threads 3 --device cuda", 2, NCCL_SHARES_GPU, 0, .text = "over nccl\n"},
    {"--threads 2 --device cuda:0 --comm nccl", 1, NCCL_SHARES_GPU, 0, .text = "over nccl\n"},
    {"--threads 5 --device cuda", 2, NCCL_SHARES_GPU, 2,
     .text = "3 ranks share the GPU FA0E:00:00.0, but NCCL serves at most two on one"},
    {"--np 3 --device cuda:1", 2, NCCL_SHARES_GPU, 2, .text = "3 ranks share the GPU FA0E:01:00.0"},
    {"--threads 3 --device cuda", 3, NCCL_SHARES_GPU, 0, .text = "over nccl\n", .parts = 3},
    {"--threads 4 --device cuda:2", 3, NCCL_SHARES_GPU, 0, .text = "over threads\n", .parts = 3},
    {"--threads 6 --device cuda --comm nccl", 2, NCCL_SHARES_GPU, 2,
     .text = "3 ranks share the GPU FA0E:00:00.0", .parts = 2},
    {"--threads 2 --device cuda:0 --comm nccl", 1, NCCL_SHARES_GPU, 0,
     .text = "all kernels are loaded\n"},
    {"--threads 1 --device cuda", 1, NCCL_SHARES_GPU, 0,
     .text = "kernels are loaded when needed\n"},
    {"--threads 1 --device cuda", 2, -1, 0, .text = "over threads\n"},
    {"--threads 2 --device cpu", 2, 0, 0, .text = "over threads\n"},
    {"--threads 3 --device cuda", 2, 0, 2,
     .text = "start as many ranks as there are GPUs, or threads that share one"},
    {"--threads 2 --device cuda", 2, -1, 2, .text = "FSDP_NCCL_LIB is '/there/is/no/nccl': "},
    {"--threads 2 --device cuda", 2, 21300, 2,
     .text = "threads that share a GPU need none (--threads N --device cuda:0)"},
    {"--threads 3 --device cuda --comm threads", 2, 0, 2,
     .text =
         "--comm threads: the 3 ranks have 2 GPUs, but threads can exchange the memory of one GPU "
         "only; use --comm nccl, or --device cuda:0 for all ranks"},
    {"--np 2 --device cuda", 2, -1, 2, .text = "FSDP_NCCL_LIB is '/there/is/no/nccl': "},
    {"--np 2 --device cuda --comm shm", 2, -1, 2,
     .text = "--comm shm: it moves the host's memory only, but device 'cuda' needs --comm nccl"},
    {"--np 2 --device cuda:1 --comm tcp", 2, 0, 2,
     .text = "--comm tcp: it moves the host's memory only, but device 'cuda:1' needs --comm nccl"},
    {"--threads 2 --device cpu --comm nccl", 2, 0, 2, .text = "needs --device cuda, not cpu"},
    {"--threads 2 --device cuda:9", 2, 0, 2, .text = "the last GPU of this host is cuda:1"},
    {"--threads 2 --device cuda:", 2, 0, 2, .text = "a number must follow cuda:"},
    {"--np 2 --device cuda", OWN_GPUS, -1, 2, .text = "FSDP_NCCL_LIB", .once = HIDDEN},
    {"--np 3 --device cuda", OWN_GPUS, -1, 2, .text = "FSDP_NCCL_LIB", .once = HIDDEN},
    {"--np 2 --device cuda", OWN_GPUS, -1, 2, .text = "FSDP_NCCL_LIB", .once = "",
     .is_quiet = true},
    {"--np 2 --device cuda", 2, -1, 2, .text = "FSDP_NCCL_LIB", .once = ""},
    {"--threads 2 --device cuda", 2, 0, 0, .text = "", SPAN("2", "2"), .host = 1, .shard = 2},
    {"--threads 4 --device cuda", 4, 0, 0, .text = "", SPAN("4", "2"), .host = 2, .shard = 4},
    {"--threads 4 --device cuda", 4, 0, 0, .text = "", SPAN("2", "2"), .host = 1, .shard = 2},
    {"--threads 4 --device cuda", 4, 0, 0, .text = "", .once = "", .host = 2, .shard = 2},
    {"--threads 2 --device cuda", 2, 0, 0, .text = "", .once = "", .host = 2, .shard = 2},
    {"--threads 2 --device cuda", 2, 0, 0, .text = "", "", .is_quiet = true, .host = 1, .shard = 2},
};

/* --- a rank ----------------------------------------------------------------------------------- */

/* A sum in the compute stream, whose result shows that all ranks were there. */
static fsdp_status sum_up(fsdp_world *world, fsdp_comm *comm, fsdp_stream *stream, fsdp_error *err)
{
    fsdp_device *device = world->parts.device;
    const fsdp_device_ops *ops = device->ops;
    const size_t size = COUNT * sizeof(float);
    float *data = ops->alloc(device, size), *staging = ops->alloc_staging(device, size);
    const fsdp_collective call = {.kind = FSDP_ALL_REDUCE,
                                  .dtype = FSDP_F32,
                                  .in = data,
                                  .out = data,
                                  .count = COUNT,
                                  .stream = stream};
    if (!data || !staging)
        return fsdp_fail_memory(err, "a sum");
    for (int i = 0; i < COUNT; i++)
        staging[i] = 1;
    ops->kernels->copy(stream, data, staging, size);
    fsdp_status status = fsdp_comm_run(comm, &call, err);
    ops->kernels->copy(stream, staging, data, size);
    if (status == FSDP_OK)
        status = ops->sync(ops->record(stream), err);
    if (status == FSDP_OK && staging[COUNT - 1] != (float)fsdp_world_size(world))
        status = fsdp_fail(err, FSDP_ERR_INTERNAL, "the sum is %g", (double)staging[COUNT - 1]);
    ops->dealloc(device, data, size);
    ops->dealloc_staging(device, staging, size);
    return status;
}

static fsdp_status use_group(fsdp_world *world, const fsdp_mesh *mesh, fsdp_error *err)
{
    fsdp_comm *comm = fsdp_world_comm(world, mesh, 0, 0);
    fsdp_device *device = world->parts.device;
    fsdp_stream *stream = NULL;
    FSDP_TRY(device->ops->stream_create(device, "compute", &stream, err));
    fsdp_status status = device->ops->is_host ? FSDP_OK : sum_up(world, comm, stream, err);
    if (status == FSDP_OK && fsdp_world_rank(world) == 0)
        printf("%s\nover %s\n",
               getenv("CUDA_MODULE_LOADING") ? "all kernels are loaded"
                                             : "kernels are loaded when needed",
               fsdp_comm_backend(comm));
    device->ops->stream_free(stream);
    return status;
}

/* As if ranks were on several hosts: each unit's groups are made, and rank 0 notes what they span. */
static fsdp_status make_units(fsdp_world *world, const launch_case *one, fsdp_error *err)
{
    const int64_t shape[] = {fsdp_world_size(world) / one->shard, one->shard}, rows[] = {8, 4};
    toy net = {0};
    for (int i = 0; i < fsdp_world_size(world); i++)
        world->parts.hosts[i] = (uint64_t)(i / one->host);
    fsdp_status status = toy_begin_in(&net, world, 2, shape, (const char *[]){"rep", "dp"}, err);
    if (status == FSDP_OK)
        status = toy_add_weights(&net, 2, 2, rows, err);
    if (status == FSDP_OK)
        status = toy_wrap(&net, err);
    toy_free(&net);
    return status;
}

static int run_rank(void *context, fsdp_world *world, int argc, char **argv)
{
    const launch_case *one = context;
    const int64_t shape[] = {fsdp_world_size(world)};
    fsdp_error err = {0};
    fsdp_mesh *mesh = NULL;
    (void)argc, (void)argv;
    fsdp_status status = fsdp_world_mesh(world, 1, shape, (const char *[]){"dp"}, &mesh, &err);
    if (status == FSDP_OK)
        status = use_group(world, mesh, &err);
    if (status == FSDP_OK && one->shard > 0)
        status = make_units(world, one, &err);
    fsdp_mesh_free(mesh);
    return status == FSDP_OK ? 0 : fsdp_error_report(&err);
}

/* --- a case ----------------------------------------------------------------------------------- */

static void set_nccl(int version)
{
    if (version < 0)
        setenv("FSDP_NCCL_LIB", "/there/is/no/nccl", 1);
    fake_nccl_control *nccl = version < 0 ? NULL : fake_nccl_over_cudart();
    if (nccl)
        nccl->plan.version = version;
}

/* Without the end of the caller's process, whose handlers are not for this one. */
_Noreturn static void run_here(const launch_case *one)
{
    char words[200], *argv[MOST_WORDS + 1] = {"cuda_launch"}, *rest = words;
    int argc = 1;
    snprintf(words, sizeof words, "%s", one->words);
    for (char *word; (word = strsep(&rest, " ")) && argc < MOST_WORDS;)
        argv[argc++] = word;
    fake_cudart_begin(&(fake_cudart_plan){
        .devices = one->gpus, .is_hidden = one->gpus == OWN_GPUS, .parts = one->parts});
    if (one->is_quiet)
        setenv("FSDP_VERBOSE", "0", 1);
    set_nccl(one->nccl);
    int code = fsdp_launch(argc, argv, run_rank, (void *)one);
    const char *misuse = fake_cudart_end();
    if (misuse)
        printf("%s\n", misuse);
    fflush(stdout);
    _exit(misuse ? FAILED : code);
}

static void read_output(int from, char output[OUTPUT])
{
    size_t size = 0;
    ssize_t got;
    while (size + 1 < OUTPUT && (got = read(from, output + size, OUTPUT - 1 - size)) > 0)
        size += (size_t)got;
    output[size] = '\0';
}

static int count_in(const char *output, const char *text)
{
    int count = 0;
    for (const char *at = output; (at = strstr(at, text)); at += strlen(text))
        count++;
    return count;
}

/* One line that warns, or none. */
static bool warns_as_expected(const launch_case *one, const char *output)
{
    if (!one->once)
        return true;
    const int lines = count_in(output, "fsdp: ranks ") + count_in(output, "fsdp: the ");
    return one->once[0] ? lines == 1 && count_in(output, one->once) == 1 : lines == 0;
}

static bool run_case(const launch_case *one)
{
    int ends[2], how = 0;
    char output[OUTPUT];
    if (pipe(ends) != 0)
        return false;
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        dup2(ends[1], STDOUT_FILENO);
        dup2(ends[1], STDERR_FILENO);
        close(ends[0]);
        close(ends[1]);
        run_here(one);
    }
    close(ends[1]);
    read_output(ends[0], output);
    close(ends[0]);
    bool is_right = child > 0 && waitpid(child, &how, 0) == child && WIFEXITED(how) &&
                    WEXITSTATUS(how) == one->code && strstr(output, one->text) &&
                    warns_as_expected(one, output);
    if (!is_right)
        printf("%s, %d GPUs, NCCL %d: exit code %d, not %d, or no '%s', or not '%s' in:\n%s\n",
               one->words, one->gpus, one->nccl, WEXITSTATUS(how), one->code, one->text,
               one->once ? one->once : "", output);
    return is_right;
}

int main(void)
{
    int failed = 0;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        failed += !run_case(&cases[i]);
    return failed > 0;
}
