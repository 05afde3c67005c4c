/* Creates the world of one rank around its control plane, runs the program's body and ends the
 * world. See launch_internal.h. */
#include "runtime/launch/launch_internal.h"
#include "base/core/given.h"
#include "base/core/mem.h"
#include "base/core/reported.h"
#include "base/io/process.h"
#include "runtime/comm_message/message_transport.h"
#include "runtime/comm_message/p2p_tcp.h"
#include "runtime/comm_nccl/transport_nccl.h"
#include "runtime/comm_shared/shared_transports.h"
#include "runtime/launch/mpi_library.h"
#include "statedict/ctl/ctl_backend.h"

#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

/* === the memory of GPUs ======================================================================= */

/* Decides whether NCCL moves the memory of ranks' GPUs, or ranks that are threads do it themselves. */

/* Collective among the ranks that are threads of this process: how many GPUs they have together. */
static fsdp_status count_gpus(const fsdp_world_parts *parts, int *gpus_out, fsdp_error *err)
{
    const int ranks = fsdp_ctl_size(parts->ctl);
    const int mine = parts->device->ops->choose_gpu(parts->device);
    int *all = fsdp_alloc((size_t)ranks, sizeof *all);
    fsdp_status status = all ? FSDP_OK : fsdp_fail_memory(err, "the GPUs of all ranks");
    status = fsdp_ctl_agree_allgather(parts->ctl, status, &mine, sizeof mine, all, err);
    *gpus_out = 0;
    for (int i = 0; i < ranks && status == FSDP_OK; i++) {
        int before = 0;
        while (all[before] != all[i])
            before++;
        *gpus_out += before == i;
    }
    fsdp_free(all);
    return status;
}

/* Kernels of a GPU do not reach the memory of another one. */
static fsdp_status decide_threads(const fsdp_launch_options *options, const fsdp_world_parts *parts,
                                  bool *uses_nccl_out, fsdp_error *err)
{
    int gpus;
    FSDP_TRY(count_gpus(parts, &gpus, err));
    *uses_nccl_out = options->comm == FSDP_COMM_NCCL || gpus > 1;
    if (options->comm != FSDP_COMM_THREADS || gpus == 1)
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_USAGE,
                     "%s threads: the %d ranks have %d GPUs, but threads can exchange the memory "
                     "of one GPU only; use --comm nccl, or --device cuda:0 for all ranks",
                     options->comm_name, fsdp_ctl_size(parts->ctl), gpus);
}

/* Found out before a rank begins to work, and not by its first collective. */
static fsdp_status refuse_host_transport(const fsdp_launch_options *options, fsdp_error *err)
{
    const char *comm = fsdp_comm_choice_name(options->comm);
    return fsdp_fail(err, FSDP_ERR_USAGE,
                     "%s %s: it moves the host's memory only, but device '%s' needs --comm nccl, "
                     "or ranks that are threads and share a GPU (--threads N --device cuda:0)",
                     options->comm_name, comm, options->device);
}

/* Collective: whether collectives of the ranks' device go over NCCL, which processes need, and threads that
 * have several GPUs. FSDP_ERR_USAGE: the --comm that was asked for does not move memory of GPUs. */
static fsdp_status launch_decide_nccl(const fsdp_launch_options *options,
                                      const fsdp_world_parts *parts, bool *uses_nccl_out,
                                      fsdp_error *err)
{
    const bool is_gpu = parts->device->ops->native, is_asked = options->comm == FSDP_COMM_NCCL;
    *uses_nccl_out = false;
    if (fsdp_ctl_size(parts->ctl) == 1)
        return FSDP_OK;
    if (is_gpu && options->threads > 0)
        return decide_threads(options, parts, uses_nccl_out, err);
    if (is_gpu && !is_asked && options->comm != FSDP_COMM_AUTO)
        return refuse_host_transport(options, err);
    *uses_nccl_out = is_asked || is_gpu;
    return FSDP_OK;
}

/* === the world ================================================================================ */

enum { HOST_ID = 384 };

/* --- hosts ------------------------------------------------------------------------------------ */

/* Equal for ranks that can share memory: the same boot of the same machine, the same name
 * (containers have their own) and the same network (sockets by which memory is passed).
 * FSDP_HOST_ID stands for all that. */
static void name_this_host(const char *given, char id_out[HOST_ID])
{
    fsdp_process self;
    struct stat network = {0};
    memset(id_out, 0, HOST_ID);
    if (given) {
        snprintf(id_out, HOST_ID, "%s", given);
        return;
    }
    fsdp_process_self(NULL, &self);
    (void)stat("/proc/self/ns/net", &network);
    snprintf(id_out, HOST_ID, "%s %s %llu", self.boot, self.host,
             (unsigned long long)network.st_ino);
}

/* Collective. */
static fsdp_status count_hosts(fsdp_ctl *ctl, const char *host, fsdp_world_parts *parts,
                               fsdp_error *err)
{
    char mine[HOST_ID];
    int rank = fsdp_ctl_rank(ctl), size = fsdp_ctl_size(ctl);
    char *all = fsdp_alloc((size_t)size, HOST_ID);
    name_this_host(host, mine);
    fsdp_status status = all ? FSDP_OK : fsdp_fail_memory(err, "the names of all hosts");
    status = fsdp_ctl_agree(ctl, status, err);
    if (status == FSDP_OK)
        status = fsdp_ctl_allgather(ctl, mine, HOST_ID, all, err);
    for (int i = 0; i < size && status == FSDP_OK; i++) {
        bool is_here = memcmp(all + (size_t)i * HOST_ID, mine, HOST_ID) == 0;
        parts->local_size += is_here;
        parts->local_rank += is_here && i < rank;
    }
    fsdp_free(all);
    return status;
}

fsdp_status fsdp_launch_find_device(const char *name, fsdp_error *err)
{
    FSDP_NEED(err, name);
    return fsdp_device_find(name, err);
}

/* --- the world -------------------------------------------------------------------------------- */

/* Over TCP or MPI, whichever the control plane uses. */
static fsdp_status open_p2p(fsdp_ctl *ctl, int deadline_ms, fsdp_p2p **p2p_out, fsdp_error *err)
{
    const fsdp_mpi_functions *mpi = NULL;
    if (strcmp(ctl->ops->name, "tcp") == 0)
        return fsdp_p2p_tcp(ctl, deadline_ms, p2p_out, err);
    fsdp_status status = fsdp_mpi_library_open(&mpi, err);
    FSDP_TRY(fsdp_ctl_agree(ctl, status, err));
    return mpi->p2p(ctl, p2p_out, err);
}

static fsdp_status open_network(const fsdp_launch_options *options, fsdp_world_parts *parts,
                                fsdp_error *err)
{
    fsdp_p2p *p2p = NULL;
    fsdp_status status = open_p2p(parts->ctl, options->deadline_ms, &p2p, err);
    status = fsdp_ctl_agree(parts->ctl, status, err);
    if (status == FSDP_OK)
        return fsdp_transport_message(parts->ctl, p2p, options->deadline_ms, &parts->transport,
                                      err);
    if (p2p)
        p2p->ops->close(p2p);
    return status;
}

/* Collective where there is more than one rank. Shared memory, unless it does not reach all, or
 * another way was asked for. */
static fsdp_status open_transport(const fsdp_launch_options *options, fsdp_world_parts *parts,
                                  fsdp_error *err)
{
    int size = fsdp_ctl_size(parts->ctl);
    bool is_one_host = parts->local_size == size;
    if (size == 1)
        return fsdp_transport_self(&parts->transport, err);
    if (options->comm == FSDP_COMM_SHM && !is_one_host)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "%s shm: only %d of %d ranks are on the host of rank %d, but shared "
                         "memory works on one host only",
                         options->comm_name, parts->local_size, size, fsdp_ctl_rank(parts->ctl));
    if (options->comm == FSDP_COMM_MPI || options->comm == FSDP_COMM_TCP || !is_one_host)
        return open_network(options, parts, err);
    return fsdp_transport_shm(parts->ctl, options->deadline_ms, &parts->transport, err);
}

/* Collective: around the transport of host memory. */
static fsdp_status open_nccl(const fsdp_launch_options *options, fsdp_world_parts *parts,
                             fsdp_error *err)
{
    const fsdp_nccl_spec spec = {.ctl = parts->ctl,
                                 .inner = parts->transport,
                                 .device = parts->device,
                                 .check = options->check};
    bool uses_nccl;
    FSDP_TRY(launch_decide_nccl(options, parts, &uses_nccl, err));
    return uses_nccl ? fsdp_transport_nccl(&spec, &parts->transport, err) : FSDP_OK;
}

/* A build for debugging asserts always what --check looks for in streams. */
static bool is_watched(const fsdp_launch_options *options)
{
#ifdef NDEBUG
    return options->check;
#else
    (void)options;
    return true;
#endif
}

static fsdp_status open_local(const fsdp_launch_options *options, fsdp_world_parts *parts,
                              fsdp_error *err)
{
    const fsdp_device_rank rank = {.rank = fsdp_ctl_rank(parts->ctl),
                                   .local_rank = parts->local_rank};
    FSDP_TRY(fsdp_device_open(options->device, &rank, &parts->device, err));
    if (is_watched(options))
        FSDP_TRY(fsdp_device_watch(&parts->device, err));
    if (!options->trace)
        return FSDP_OK;
    return fsdp_trace_open(options->trace, fsdp_ctl_rank(parts->ctl), &parts->trace, err);
}

static fsdp_status fill_parts(const fsdp_launch_options *options, fsdp_world_parts *parts,
                              fsdp_error *err)
{
    fsdp_ctl_set_deadline(parts->ctl, options->deadline_ms);
    FSDP_TRY(count_hosts(parts->ctl, options->host, parts, err));
    FSDP_TRY(fsdp_ctl_agree(parts->ctl, open_local(options, parts, err), err));
    fsdp_status status = parts->transport ? FSDP_OK : open_transport(options, parts, err);
    FSDP_TRY(fsdp_ctl_agree(parts->ctl, status, err));
    return fsdp_ctl_agree(parts->ctl, open_nccl(options, parts, err), err);
}

/* All ranks have the same error: only the rank that failed reports it. */
static int report_failure(fsdp_status status, const fsdp_error *err, int rank)
{
    if (err->rank == rank || status == FSDP_ERR_PEER)
        (void)fsdp_error_report(err);
    return (int)status;
}

/* Sends the reason to the other ranks before they see closed connections. */
static void report_leave(fsdp_world *world, int code)
{
    char exit_code[FSDP_EXIT_TEXT];
    const char *reason = world->reason.text;
    fsdp_error why = {.status = FSDP_ERR_PEER, .rank = world->rank};
    fsdp_comm_describe_exit(code & 0xff, exit_code);
    (void)fsdp_fail(&why, FSDP_ERR_PEER, "rank %d has left with %s%s%s", world->rank, exit_code,
                    reason[0] ? ": " : "", reason);
    world->parts.transport->exit_code = code & 0xff;
    world->parts.transport->exit_reason = reason[0] ? reason : NULL;
    fsdp_ctl_leave(world->parts.ctl, &why);
}

/* A failed write of the trace is this rank's failure, unless it has another one. */
static int end_world(fsdp_world *world, int code)
{
    fsdp_error err = {0};
    fsdp_trace *trace = world->parts.trace;
    world->parts.trace = NULL;
    if (code != 0)
        report_leave(world, code);
    fsdp_world_free(world);
    fsdp_status status = fsdp_trace_close(trace, &err);
    if (status == FSDP_OK)
        return code;
    (void)fsdp_error_report(&err);
    return code != 0 ? code : (int)status;
}

/* An exit code has eight bits: a failure whose lower eight bits are 0 must not look like
 * success. */
static int to_exit_code(int code, int rank)
{
    fsdp_error err = {0};
    if (code == 0 || (code & 0xff) != 0)
        return code;
    (void)fsdp_fail(&err, FSDP_ERR_INTERNAL,
                    "rank %d returned %d, which as an exit code would be 0", rank, code);
    return fsdp_error_report(&err);
}

static int run_body(const fsdp_launch_job *job, fsdp_world *world)
{
    const fsdp_launch_options *options = job->options;
    char **argv = fsdp_alloc((size_t)options->argc + 1, sizeof *argv);
    fsdp_error err = {0};
    if (!argv) {
        (void)fsdp_fail_memory(&err, "the program's arguments");
        return fsdp_error_report(&err);
    }
    memcpy(argv, options->argv, (size_t)options->argc * sizeof *argv);
    (void)fsdp_error_take_reported(); /* of a world before */
    int code = to_exit_code(job->body(job->context, world, options->argc, argv), world->rank);
    const fsdp_error printed = fsdp_error_take_reported();
    if ((int)printed.status == code && !world->is_reason_given)
        world->reason = printed;
    fsdp_free(argv);
    return code;
}

int fsdp_launch_rank(const fsdp_launch_job *job, fsdp_ctl *ctl, fsdp_transport *transport)
{
    fsdp_error err = {0};
    fsdp_world *world = NULL;
    int rank = fsdp_ctl_rank(ctl);
    fsdp_world_parts parts = {.ctl = ctl,
                              .transport = transport,
                              .check = job->options->check,
                              .deadline_ms = job->options->deadline_ms};
    const char *outer = fsdp_ctl_begin_public(ctl, "fsdp_launch");
    fsdp_status status = fill_parts(job->options, &parts, &err);
    fsdp_ctl_end_public(ctl, outer);
    bool is_complete = status == FSDP_OK;
    if (is_complete) {
        status = fsdp_world_create(&parts, &world, &err);
        err.rank = rank;
    }
    int code = world ? run_body(job, world) : report_failure(status, &err, rank);
    if (code != 0 && job->failed)
        job->failed(job->listener, rank, code);
    if (!is_complete)
        fsdp_world_parts_release(&parts);
    return world ? end_world(world, code) : code;
}
