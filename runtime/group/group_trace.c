/* Events of a group, for the trace and for --check. docs/runtime.md has their format. */
#include "runtime/group/group_internal.h"

static const char *const phase_names[] = {"idle", "forward", "pre_backward", "post_backward"};

static void trace(const fsdp_group *group, fsdp_trace_event *event)
{
    event->unit = group->name;
    event->state = phase_names[group->phase];
    fsdp_context_trace(group->context, group->events, event);
}

void fsdp_trace_group(const fsdp_group *group, const char *event)
{
    trace(group, &(fsdp_trace_event){.event = event, .bytes = -1});
}

void fsdp_trace_work(const fsdp_group *group, const char *event, const char *stream, int64_t bytes)
{
    trace(group, &(fsdp_trace_event){.event = event, .stream = stream, .bytes = bytes});
}

void fsdp_trace_collective(const fsdp_group *group, const fsdp_ordered_comm *ordered,
                           const fsdp_collective *call, const char *stream)
{
    static const char *const names[] = {"",           "all_gather", "reduce_scatter",
                                        "all_reduce", "broadcast",  "all_to_all"};
    bool is_per_rank = call->kind == FSDP_ALL_GATHER || call->kind == FSDP_REDUCE_SCATTER;
    int64_t ranks = is_per_rank ? fsdp_comm_size(ordered->comm) : 1;
    trace(group, &(fsdp_trace_event){.event = names[call->kind],
                                     .comm = ordered->comm,
                                     .call = call,
                                     .stream = stream,
                                     .bytes = call->count * ranks *
                                              (int64_t)fsdp_dtype_size(call->dtype)});
}
