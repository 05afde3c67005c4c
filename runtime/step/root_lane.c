/* The lane of all ranks of a root, for collectives of the host. */
#include "runtime/step/step_internal.h"

/* The largest mesh of the root: it holds the others. */
static const fsdp_mesh *widest_mesh(const fsdp_root *root)
{
    const fsdp_group *widest = NULL;
    for (size_t i = 0; i < root->unit_count; i++)
        for (size_t g = 0; g < root->units[i]->group_count; g++) {
            const fsdp_group *group = &root->units[i]->groups[g];
            if (!widest || fsdp_mesh_size(group->roles.mesh) > fsdp_mesh_size(widest->roles.mesh))
                widest = group;
        }
    return widest ? widest->params[0]->cut.mesh : root->unit->opts.mesh;
}

fsdp_status fsdp_root_widest_lane(fsdp_root *root, fsdp_lane **lane_out, fsdp_error *err)
{
    const fsdp_mesh *mesh = widest_mesh(root);
    *lane_out = fsdp_world_lane(root->world, mesh, 0, fsdp_mesh_ndim(mesh) - 1);
    return *lane_out ? root->context->device->ops->sync((*lane_out)->last, err) : FSDP_OK;
}

fsdp_status fsdp_root_world_lane(fsdp_root *root, const char *call, fsdp_lane **lane_out,
                                 fsdp_error *err)
{
    *lane_out = NULL;
    if (root->world->size == 1)
        return FSDP_OK;
    FSDP_TRY(fsdp_root_widest_lane(root, lane_out, err));
    if (*lane_out && (*lane_out)->size == root->world->size)
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_USAGE, "%s needs a mesh of all ranks (fsdp_world_connect)",
                     call);
}

int fsdp_lane_position(const fsdp_lane *lane, int rank)
{
    int i = 0;
    while (i < lane->size && lane->ranks[i] != rank)
        i++;
    return i;
}
