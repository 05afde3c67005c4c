/* The communicator of all ranks of a root, for collectives of the host. */
#include "runtime/step/step_internal.h"

/* The largest mesh of the root contains the others. */
static const fsdp_mesh *widest_mesh(const fsdp_root *root)
{
    const fsdp_group *widest = NULL;
    for (size_t i = 0; i < root->group_count; i++) {
        const fsdp_group *group = root->groups[i];
        if (!widest || fsdp_mesh_size(group->roles.mesh) > fsdp_mesh_size(widest->roles.mesh))
            widest = group;
    }
    return widest ? widest->params[0]->cut.mesh : root->unit->opts.mesh;
}

fsdp_status fsdp_root_widest_comm(fsdp_root *root, fsdp_ordered_comm **ordered_out, fsdp_error *err)
{
    const fsdp_mesh *mesh = widest_mesh(root);
    *ordered_out = fsdp_world_find_comm(root->world, mesh, 0, fsdp_mesh_ndim(mesh) - 1);
    return *ordered_out ? root->context->device->ops->sync((*ordered_out)->last, err) : FSDP_OK;
}

fsdp_status fsdp_root_world_comm(fsdp_root *root, const char *call, fsdp_ordered_comm **ordered_out,
                                 fsdp_error *err)
{
    *ordered_out = NULL;
    if (root->world->size == 1)
        return FSDP_OK;
    FSDP_TRY(fsdp_root_widest_comm(root, ordered_out, err));
    if (*ordered_out && (*ordered_out)->size == root->world->size)
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_USAGE, "%s needs a mesh of all ranks (fsdp_world_connect)",
                     call);
}

int fsdp_ordered_comm_position(const fsdp_ordered_comm *ordered, int rank)
{
    int i = 0;
    while (i < ordered->size && ordered->ranks[i] != rank)
        i++;
    return i;
}
