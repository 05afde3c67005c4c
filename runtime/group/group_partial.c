/*
 * HSDP without all-reduce: gradients that were reduced in the shard group wait here to be added up over the
 * replicas. The next reduction adds them to its own, which may be those of other parameters. In
 * docs/flow_step.md: step 11.
 */
#include "runtime/group/group_internal.h"

#include "base/core/mem.h"

static bool covers(const fsdp_reduced *reduced, const fsdp_reduced *other)
{
    for (size_t i = 0; i < other->count; i++)
        if (!fsdp_reduced_find(reduced, other->parts[i].param))
            return false;
    return reduced->dtype == fsdp_dtype_promote(reduced->dtype, other->dtype);
}

/* The parts of both, without a block. */
static fsdp_status unite(const fsdp_group *group, const fsdp_reduced *a, const fsdp_reduced *b,
                         fsdp_reduced *both_out, fsdp_error *err)
{
    *both_out = (fsdp_reduced){.dtype = fsdp_dtype_promote(a->dtype, b->dtype)};
    both_out->parts = fsdp_alloc(a->count + b->count, sizeof *both_out->parts);
    if (!both_out->parts)
        return fsdp_fail_memory(err, group->name);
    int64_t at = 0;
    for (size_t i = 0; i < a->count + b->count; i++) {
        const fsdp_reduced_part *part = i < a->count ? &a->parts[i] : &b->parts[i - a->count];
        if (fsdp_reduced_find(both_out, part->param))
            continue;
        both_out->parts[both_out->count++] =
            (fsdp_reduced_part){.param = part->param, .at = at, .count = part->count};
        at += part->count;
    }
    return FSDP_OK;
}

/* The two have different parameters or dtypes: both are packed anew. */
static fsdp_status repack(fsdp_group *group, fsdp_reduced *reduced, fsdp_error *err)
{
    fsdp_stream *stream = fsdp_group_stream(group, FSDP_STREAM_REDUCE);
    fsdp_reduced both;
    FSDP_TRY(unite(group, reduced, &group->partial, &both, err));
    const fsdp_memory_request request = {.class = FSDP_MEMORY_REDUCE,
                                         .stream = stream,
                                         .size = fsdp_reduced_bytes(&both),
                                         .owner = group->name};
    fsdp_status status = fsdp_memory_take(&group->context->memory, &request, &both.block, err);
    if (status != FSDP_OK) {
        fsdp_free(both.parts);
        return status;
    }
    for (size_t i = 0; i < both.count; i++) {
        const fsdp_reduced_part *part = &both.parts[i];
        const fsdp_reduced_part *from = fsdp_reduced_find(reduced, part->param);
        const fsdp_reduced *source = from ? reduced : &group->partial;
        if (!from)
            from = fsdp_reduced_find(&group->partial, part->param);
        fsdp_work_cast(stream, fsdp_reduced_at(&both, part), both.dtype,
                       fsdp_reduced_at(source, from), source->dtype, part->count);
    }
    /* parts that only the partial one has were copied: the others are added */
    for (size_t i = 0; i < both.count; i++) {
        const fsdp_reduced_part *old = fsdp_reduced_find(&group->partial, both.parts[i].param);
        if (old && fsdp_reduced_find(reduced, both.parts[i].param))
            fsdp_work_add(stream, fsdp_reduced_at(&both, &both.parts[i]), both.dtype,
                          fsdp_reduced_at(&group->partial, old), group->partial.dtype, old->count);
    }
    fsdp_group_give(group, reduced->block, fsdp_stream_now(stream));
    fsdp_free(reduced->parts);
    *reduced = both;
    return FSDP_OK;
}

fsdp_status fsdp_group_add_partial(fsdp_group *group, fsdp_reduced *reduced, fsdp_error *err)
{
    fsdp_stream *stream = fsdp_group_stream(group, FSDP_STREAM_REDUCE);
    fsdp_reduced *partial = &group->partial;
    if (!partial->block)
        return FSDP_OK;
    if (!covers(reduced, partial))
        FSDP_TRY(repack(group, reduced, err));
    else
        for (size_t i = 0; i < partial->count; i++) {
            const fsdp_reduced_part *part = fsdp_reduced_find(reduced, partial->parts[i].param);
            fsdp_work_add(stream, fsdp_reduced_at(reduced, part), reduced->dtype,
                          fsdp_reduced_at(partial, &partial->parts[i]), partial->dtype,
                          part->count);
        }
    fsdp_group_give(group, partial->block, fsdp_stream_now(stream));
    fsdp_free(partial->parts);
    *partial = (fsdp_reduced){0};
    return FSDP_OK;
}
