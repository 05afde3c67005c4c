/*
 * The FSDP1 face: rank 0 alone has the full state of an optimizer, and sends every rank its chunk,
 * one flat tensor after the other. It has looked at all of the dict before, so that no rank waits
 * in vain.
 */
#include "runtime/fsdp1/fsdp1_to_load.h"

#include <string.h>

#include "base/core/mem.h"

/* --- sending ---------------------------------------------------------------------------------- */

/* The whole flat tensor, on rank 0. */
static fsdp_status put_together(fsdp_v1_loading *load, const fsdp_v1_flat *flat,
                                const fsdp_v1_slot *slot, unsigned char *whole, fsdp_error *err)
{
    size_t size = fsdp_dtype_size(slot->dtype);
    for (size_t v = 0; v < flat->view_count; v++) {
        const fsdp_param *param = flat->views[v];
        const fsdp_entry *entry =
            fsdp_v1_is_stepped(load, param) ? fsdp_v1_find_source(load, param, slot->name) : NULL;
        if (entry)
            FSDP_TRY(fsdp_v1_take_whole(param, entry, slot->dtype,
                                        whole + (size_t)param->flat_at * size, err));
    }
    return FSDP_OK;
}

static size_t chunk_bytes(const fsdp_v1_flat *flat, const fsdp_v1_slot *slot)
{
    return (size_t)flat->param->padded * fsdp_dtype_size(slot->dtype);
}

/* What is replicated goes to all. world: NULL in a world of one. */
static fsdp_status broadcast(const fsdp_ordered_comm *world, const fsdp_v1_flat *flat,
                             const fsdp_v1_slot *slot, const void *whole, void *chunk,
                             fsdp_error *err)
{
    const fsdp_collective call = {.kind = FSDP_BROADCAST,
                                  .dtype = slot->dtype,
                                  .in = chunk,
                                  .out = chunk,
                                  .count = flat->param->padded,
                                  .root = world ? fsdp_ordered_comm_position(world, 0) : 0,
                                  .unit = flat->param->name};
    if (whole)
        memcpy(chunk, whole, chunk_bytes(flat, slot));
    return world ? fsdp_comm_run(world->comm, &call, err) : FSDP_OK;
}

/* Chunks in the order of the ranks, as often as there are replicas. */
static void order_chunks(const fsdp_ordered_comm *world, const fsdp_v1_flat *flat,
                         const fsdp_v1_slot *slot, const unsigned char *whole,
                         unsigned char *ordered, int64_t *counts)
{
    const fsdp_group *group = flat->param->group;
    size_t bytes = chunk_bytes(flat, slot);
    for (int i = 0; i < world->size; i++) {
        int64_t coord[FSDP_MAX_MESH_DIMS];
        fsdp_mesh_coord(group->roles.mesh, world->ranks[i], coord);
        memcpy(ordered + (size_t)i * bytes, whole + (size_t)coord[group->roles.shard_dim] * bytes,
               bytes);
        counts[i] = flat->param->padded;
    }
}

/* counts: what this rank sends to each, which only rank 0 does, then what it gets from each. */
static fsdp_status exchange(const fsdp_ordered_comm *world, const fsdp_v1_flat *flat,
                            const fsdp_v1_slot *slot, const void *ordered, int64_t *counts,
                            void *chunk, fsdp_error *err)
{
    int64_t *out_counts = counts + world->size;
    const fsdp_collective call = {.kind = FSDP_ALL_TO_ALL,
                                  .dtype = slot->dtype,
                                  .in = ordered,
                                  .out = chunk,
                                  .counts = counts,
                                  .out_counts = out_counts,
                                  .unit = flat->param->name};
    out_counts[fsdp_ordered_comm_position(world, 0)] = flat->param->padded;
    return fsdp_comm_run(world->comm, &call, err);
}

static fsdp_status deal_chunks(const fsdp_ordered_comm *world, const fsdp_v1_flat *flat,
                               const fsdp_v1_slot *slot, const unsigned char *whole, void *chunk,
                               fsdp_error *err)
{
    size_t n = (size_t)world->size;
    int64_t *counts = fsdp_alloc(n * 2, sizeof *counts);
    unsigned char *ordered = fsdp_alloc(whole ? n : 0, chunk_bytes(flat, slot));
    fsdp_status status = FSDP_OK;
    if (!counts || !ordered)
        status = fsdp_fail_memory(err, flat->param->name);
    if (status == FSDP_OK && whole)
        order_chunks(world, flat, slot, whole, ordered, counts);
    if (status == FSDP_OK)
        status = exchange(world, flat, slot, ordered, counts, chunk, err);
    fsdp_free(counts);
    fsdp_free(ordered);
    return status;
}

fsdp_status fsdp_v1_scatter_chunk(fsdp_v1_loading *load, const fsdp_v1_flat *flat,
                                  const fsdp_v1_slot *slot, unsigned char *chunk, fsdp_error *err)
{
    unsigned char *whole = NULL;
    fsdp_status status = FSDP_OK;
    if (load->sd) {
        whole = fsdp_alloc((size_t)fsdp_v1_gathered_count(flat), fsdp_dtype_size(slot->dtype));
        status = whole ? put_together(load, flat, slot, whole, err)
                       : fsdp_fail_memory(err, flat->param->name);
    }
    if (status == FSDP_OK)
        status = fsdp_v1_is_whole(flat) ? broadcast(load->ordered, flat, slot, whole, chunk, err)
                                        : deal_chunks(load->ordered, flat, slot, whole, chunk, err);
    fsdp_free(whole);
    return status;
}

/* --- the call --------------------------------------------------------------------------------- */

/* Sources and hyper-parameters, as rank 0 has read them. */
static fsdp_status share_numbers(fsdp_v1_loading *load, fsdp_error *err)
{
    fsdp_ctl *ctl = fsdp_world_ctl(load->v1->root->world);
    FSDP_TRY(fsdp_ctl_broadcast(ctl, 0, load->sources, load->v1->flat_count * sizeof *load->sources,
                                err));
    return fsdp_ctl_broadcast(ctl, 0, load->hypers, load->optim->group_count * sizeof *load->hypers,
                              err);
}

static fsdp_status prepare(fsdp_v1_loading *load, fsdp_error *err)
{
    fsdp_root *root = load->v1->root;
    if (root->world->rank == 0 && !load->sd)
        return fsdp_fail(err, FSDP_ERR_USAGE, "rank 0 has no state dict to be scattered");
    FSDP_TRY(fsdp_root_world_comm(root, "scattering", &load->ordered, err));
    return fsdp_v1_loading_prepare(load, err);
}

fsdp_status fsdp_v1_scatter_full_optim_state_dict(fsdp_v1 *v1, fsdp_optim *optim, const fsdp_sd *sd,
                                                  const fsdp_v1_to_load_opts *opts,
                                                  fsdp_sd **sd_out, fsdp_error *err)
{
    fsdp_ctl *ctl = fsdp_world_ctl(v1->root->world);
    fsdp_v1_loading load =
        fsdp_v1_loading_begin(v1, optim, v1->root->world->rank == 0 ? sd : NULL, opts);
    FSDP_TRY(fsdp_v1_check_idle(v1, "fsdp_v1_scatter_full_optim_state_dict", err));
    load.scatters = true;
    fsdp_status status = fsdp_ctl_agree(ctl, prepare(&load, err), err);
    if (status == FSDP_OK)
        status = share_numbers(&load, err);
    if (status == FSDP_OK)
        status = fsdp_root_done(v1->root, fsdp_v1_loading_fill(&load, err), err);
    return fsdp_v1_loading_finish(&load, status, sd_out);
}
