/*
 * Makes the tensors of a live dict whole: on every rank, one tensor after the other through one bounded
 * buffer; or on rank 0 only, streamed over the control plane. All ranks first compare their requests, so
 * that a rank with another dict causes an error that names it, not a timeout. The inverse is
 * state_set.c.
 */
#include "runtime/state/state_internal.h"

#include <stdio.h>
#include <string.h>

#include "statedict/sd/describe.h"
#include "statedict/sd/layout_internal.h"

/* --- entries ---------------------------------------------------------------------------------- */

fsdp_status fsdp_state_add_entry(const fsdp_sd *from, const fsdp_entry *entry,
                                 const fsdp_layout *layout, void *data, fsdp_sd *sd,
                                 fsdp_error *err)
{
    const fsdp_entry *target = fsdp_sd_at(from, entry->target);
    switch (entry->kind) {
    case FSDP_ENTRY_TENSOR:
        return fsdp_sd_add_tensor(
            sd, entry->name, entry->name_size,
            &(fsdp_tensor){entry->dtype, entry->ndim, entry->shape, *layout, data}, err);
    case FSDP_ENTRY_VALUE:
        return fsdp_sd_add_value(sd, entry->name, entry->name_size, &entry->value, err);
    case FSDP_ENTRY_ALIAS: break;
    }
    return fsdp_sd_add_alias(sd, entry->name, entry->name_size, target->name, target->name_size,
                             err);
}

/* --- comparing requests ----------------------------------------------------------------------- */

/* A rank's request, as the ranks compare it. */
typedef struct asked {
    char text[64];
} asked;

static fsdp_status compare_asked(const asked *all, int n, fsdp_error *err)
{
    for (int i = 1; i < n; i++)
        if (strcmp(all[i].text, all[0].text) != 0)
            return fsdp_fail(err, FSDP_ERR_USAGE,
                             "rank 0 %s and rank %d %s: all ranks must make the same call",
                             all[0].text, i, all[i].text);
    return FSDP_OK;
}

fsdp_status fsdp_state_agree(const fsdp_state_scope *scope, const fsdp_sd *live, const char *call,
                             bool with_values, fsdp_status mine, fsdp_error *err)
{
    fsdp_ctl *ctl = fsdp_world_ctl(scope->root->world);
    int n = fsdp_ctl_size(ctl);
    asked local = {""}, *all = fsdp_alloc((size_t)n, sizeof *all);
    snprintf(local.text, sizeof local.text, "%s", call);
    if (mine == FSDP_OK && !all)
        mine = fsdp_fail_memory(err, "a comparison of ranks");
    fsdp_status status = fsdp_ctl_agree(ctl, mine, err);
    if (status == FSDP_OK)
        status = fsdp_ctl_allgather(ctl, &local, sizeof local, all, err);
    if (status == FSDP_OK)
        status = compare_asked(all, n, err);
    fsdp_free(all);
    return status == FSDP_OK ? fsdp_describe_agree(live, with_values, ctl, FSDP_OK, err) : status;
}

/* --- every rank ------------------------------------------------------------------------------- */

/* Makes a dict with the live one's names and memory for whole tensors. */
static fsdp_status make_whole(const fsdp_root *root, const fsdp_sd *live, fsdp_sd *full,
                              fsdp_error *err)
{
    const fsdp_mesh *mesh = root->unit->opts.mesh;
    for (size_t i = 0; i < fsdp_sd_count(live); i++) {
        const fsdp_entry *entry = fsdp_sd_at(live, i);
        const fsdp_layout whole = {.kind = FSDP_LAYOUT_MESH,
                                   .mesh = entry->layout.mesh ? entry->layout.mesh : mesh};
        FSDP_TRY(fsdp_state_add_entry(live, entry, &whole, NULL, full, err));
        if (entry->path)
            FSDP_TRY(fsdp_sd_set_path(full, i, entry->path, entry->path_count, err));
    }
    return fsdp_sd_allocate(full, root->world->rank, err);
}

static bool is_whole_everywhere(const fsdp_entry *entry, int rank)
{
    return entry->layout.kind == FSDP_LAYOUT_MESH &&
           fsdp_layout_copies(&entry->layout, rank, 0) == fsdp_mesh_size(entry->layout.mesh);
}

/* Moves the boxes of a tensor of which `owner` holds the first copy. */
static fsdp_status gather_part(fsdp_state_mover *mover, const fsdp_entry *live,
                               const fsdp_entry *full, int owner, fsdp_error *err)
{
    size_t n = fsdp_layout_box_count(&live->layout, live->ndim, live->shape, owner);
    const char *data = live->data;
    for (size_t i = 0; i < n; i++) {
        fsdp_box box;
        fsdp_layout_box_at(&live->layout, live->ndim, live->shape, owner, i, &box);
        if (fsdp_layout_copy(&live->layout, owner, i) == 0)
            FSDP_TRY(fsdp_state_move(mover, owner, &box, data, full, err));
        if (owner == mover->root->world->rank)
            data += (size_t)fsdp_box_count(&box) * fsdp_dtype_size(live->dtype);
    }
    return FSDP_OK;
}

/* Moves all tensors of one owner before the next owner's, so that small tensors share a broadcast. */
static fsdp_status gather_from(fsdp_state_mover *mover, const fsdp_sd *live, const fsdp_sd *full,
                               int owner, fsdp_error *err)
{
    int rank = mover->root->world->rank;
    for (size_t i = 0; i < fsdp_sd_count(live); i++) {
        const fsdp_entry *entry = fsdp_sd_at(live, i);
        if (entry->kind == FSDP_ENTRY_TENSOR && !is_whole_everywhere(entry, rank))
            FSDP_TRY(gather_part(mover, entry, fsdp_sd_at(full, i), owner, err));
    }
    return FSDP_OK;
}

static fsdp_status gather_tensors(fsdp_state_mover *mover, const fsdp_sd *live, const fsdp_sd *full,
                                  fsdp_error *err)
{
    const fsdp_world *world = mover->root->world;
    for (size_t i = 0; i < fsdp_sd_count(live); i++) {
        const fsdp_entry *entry = fsdp_sd_at(live, i);
        if (entry->kind == FSDP_ENTRY_TENSOR && entry->data &&
            is_whole_everywhere(entry, world->rank))
            memcpy(fsdp_sd_at(full, i)->data, entry->data, (size_t)fsdp_entry_bytes(entry));
    }
    for (int owner = 0; owner < world->size; owner++)
        FSDP_TRY(gather_from(mover, live, full, owner, err));
    return fsdp_state_move_end(mover, err);
}

static fsdp_status gather_everywhere(const fsdp_state_scope *scope, const fsdp_sd *live,
                                     fsdp_sd *full, fsdp_error *err)
{
    fsdp_root *root = scope->root;
    fsdp_state_mover mover = {0};
    fsdp_status status = make_whole(root, live, full, err);
    status = fsdp_state_mover_init(&mover, root, fsdp_sd_tensor_bytes(live), status, err);
    if (status == FSDP_OK)
        status = fsdp_root_done(root, "fsdp_root_get_state",
                                gather_tensors(&mover, live, full, err), err);
    fsdp_state_mover_release(&mover);
    return status;
}

/* --- both ways -------------------------------------------------------------------------------- */

fsdp_status fsdp_state_gather(const fsdp_state_scope *scope, const fsdp_sd *live, fsdp_status mine,
                              fsdp_sd **full_out, fsdp_error *err)
{
    bool on_rank0 = scope->opts.cpu_offload;
    fsdp_sd *full = NULL;
    const char *call = on_rank0 ? "gets whole state on rank 0" : "gets whole state";
    FSDP_TRY(fsdp_state_agree(scope, live, call, true, mine, err));
    if (on_rank0) {
        /* rank 0 gets the whole dict; the other ranks send their parts and get an empty one */
        fsdp_ctl *ctl = fsdp_world_ctl(scope->root->world);
        FSDP_TRY(fsdp_sd_gather_full(live, ctl, full_out, err));
        return *full_out ? FSDP_OK : fsdp_sd_create(full_out, err);
    }
    fsdp_status status = fsdp_sd_create(&full, err);
    status = fsdp_ctl_agree(fsdp_world_ctl(scope->root->world), status, err);
    if (status == FSDP_OK)
        status = gather_everywhere(scope, live, full, err);
    if (status == FSDP_OK)
        *full_out = full;
    else
        fsdp_sd_free(full);
    return status;
}
