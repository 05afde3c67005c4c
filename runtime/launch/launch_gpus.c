/* Decides whether NCCL moves the memory of ranks' GPUs, or ranks that are threads do it themselves. See
 * launch_internal.h. */
#include "runtime/launch/launch_internal.h"

#include "base/core/mem.h"
#include "statedict/ctl/ctl_backend.h"

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

fsdp_status fsdp_launch_decide_nccl(const fsdp_launch_options *options,
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
