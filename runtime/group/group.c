/* Groups are made, laid out and freed. See group.h. */
#include "runtime/group/group_internal.h"
#include "base/core/mem.h"

fsdp_status fsdp_group_take_params(fsdp_group *group, fsdp_param *const *params, size_t count,
                                   const fsdp_mesh *mesh, fsdp_error *err)
{
    group->params = fsdp_alloc(count, sizeof *group->params);
    group->ranks = fsdp_alloc((size_t)fsdp_mesh_size(mesh), sizeof *group->ranks);
    if (!group->params || !group->ranks)
        return fsdp_fail_memory(err, group->name);
    for (size_t i = 0; i < count; i++) {
        if (params[i]->group || !fsdp_mesh_equal(params[i]->cut.mesh, mesh))
            continue;
        params[i]->group = group;
        group->params[group->count++] = params[i];
    }
    return fsdp_group_begin_check(group, err);
}

/* --- sizes ------------------------------------------------------------------------------------ */

enum { WIDEST = 16 }; /* bytes of an element */

/* The most bytes that a gather or a reduction moves for a parameter; false: beyond all memory. */
static bool add_most_bytes(const fsdp_param *param, int ranks, int64_t *sum)
{
    const fsdp_extension *extension = param->extension;
    int64_t bytes;
    if (fsdp_mul_overflow(param->padded, ranks, &bytes) ||
        fsdp_mul_overflow(bytes, WIDEST, &bytes) || fsdp_add_overflow(*sum, bytes, sum) ||
        fsdp_add_overflow(*sum, FSDP_MEMORY_ALIGNMENT, sum))
        return false;
    for (size_t i = 0; extension && i < extension->count; i++)
        if (extension->sizes[i] > INT64_MAX ||
            fsdp_mul_overflow((int64_t)extension->sizes[i], ranks, &bytes) ||
            fsdp_add_overflow(*sum, bytes, sum))
            return false;
    return true;
}

/* Sizes of the group's buffers are sums of these, so that no later sum overflows. */
static fsdp_status check_sizes(const fsdp_group *group, fsdp_error *err)
{
    int64_t sum = 0;
    for (size_t i = 0; i < group->count; i++)
        if (!add_most_bytes(group->params[i], group->shard_size, &sum))
            return fsdp_fail(err, FSDP_ERR_LIMIT,
                             "unit %s is too large: its parameters up to '%s' have more bytes than "
                             "can be counted",
                             group->name, group->params[i]->name);
    return FSDP_OK;
}

static fsdp_status lay_out(fsdp_group *group, fsdp_error *err)
{
    for (size_t i = 0; i < group->count; i++) {
        const fsdp_param *param = group->params[i];
        FSDP_TRY(fsdp_param_lay_out(group->params[i], &group->roles, group->name, err));
        bool is_alike = i == 0 || group->gather_dtype == param->data_dtype;
        group->gather_dtype = is_alike && !param->extension ? param->data_dtype : FSDP_U8;
    }
    return check_sizes(group, err);
}

static size_t shard_bytes(const fsdp_param *param)
{
    return (size_t)param->padded * fsdp_dtype_size(param->dtype);
}

fsdp_status fsdp_group_allocate(fsdp_group *group, fsdp_error *err)
{
    fsdp_memory_request request = {.class = FSDP_MEMORY_SHARD,
                                   .stream = fsdp_group_stream(group, FSDP_STREAM_COMPUTE),
                                   .is_staging = group->settings->offloads,
                                   .slack = group->count * FSDP_MEMORY_ALIGNMENT,
                                   .owner = group->name};
    FSDP_TRY(lay_out(group, err));
    for (size_t i = 0; i < group->count; i++)
        request.size += shard_bytes(group->params[i]);
    FSDP_TRY(fsdp_memory_take_zeroed(&group->context->memory, &request, &group->shards, err));
    unsigned char *at = group->shards->data;
    for (size_t i = 0; i < group->count; i++) {
        group->params[i]->shard = at;
        at += fsdp_memory_align(shard_bytes(group->params[i]));
    }
    return FSDP_OK;
}

/* --- between steps ---------------------------------------------------------------------------- */

void fsdp_group_drop(fsdp_group *group)
{
    fsdp_stream *compute = fsdp_group_stream(group, FSDP_STREAM_COMPUTE);
    fsdp_group_drop_gather(group);
    fsdp_group_drop_kept(group);
    fsdp_group_drop_grads(group);
    fsdp_group_give(group, group->again_shard, fsdp_stream_now(compute));
    fsdp_group_give(group, group->unsharded, fsdp_stream_now(compute));
    group->again_shard = group->unsharded = NULL;
    group->state = FSDP_IS_SHARDED;
    group->phase = FSDP_IDLE;
    group->order_count = 0;
    group->next_gather = NULL;
}

bool fsdp_group_is_at_rest(const fsdp_group *group)
{
    bool has_blocks = group->gather.block || group->unsharded || group->again_shard ||
                      group->partial.block || group->grad_count > 0;
    for (size_t i = 0; i < group->count; i++)
        has_blocks = has_blocks || group->params[i]->grad || group->params[i]->kept;
    return group->state == FSDP_IS_SHARDED && !has_blocks;
}

void fsdp_group_enter(fsdp_group *group, fsdp_context *context)
{
    const fsdp_event none = {0}; /* the old events were reached, and their streams may be freed */
    fsdp_memory_pass(&group->context->memory, &context->memory, group->shards,
                     context->streams[FSDP_STREAM_COMPUTE]);
    group->context = context;
    group->resharded = group->reduced = none;
    group->rects_in.last = group->rects_out.last = group->rects_reduce.last = none;
}

void fsdp_group_release(fsdp_group *group)
{
    for (size_t p = 0; p < group->count; p++) {
        group->params[p]->group = NULL;
        group->params[p]->mesh = NULL;
        group->params[p]->shard = NULL;
    }
    fsdp_rects_release(&group->rects_in);
    fsdp_rects_release(&group->rects_out);
    fsdp_rects_release(&group->rects_reduce);
    fsdp_free(group->params);
    fsdp_free(group->ranks);
    fsdp_free(group->order);
    fsdp_free(group->grads);
    fsdp_group_end_check(group);
    fsdp_mesh_free(group->made_mesh);
}
