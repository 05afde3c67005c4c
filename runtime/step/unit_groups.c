/* The groups of a unit: one for each mesh that its parameters lie on. See group.h. */
#include "runtime/step/step_internal.h"

#include "base/core/mem.h"

static fsdp_dim_names names_of(const fsdp_unit *unit)
{
    return (fsdp_dim_names){
        .unit = unit->name, .shard = unit->opts.shard_dims, .replicate = unit->opts.replicate_dims};
}

fsdp_status fsdp_unit_check_meshes(const fsdp_unit *unit, fsdp_error *err)
{
    const fsdp_dim_names names = names_of(unit);
    int reshard = unit->settings.reshard_after_forward;
    for (size_t i = 0; i < unit->param_count; i++)
        FSDP_TRY(fsdp_mesh_check_dims(unit->params[i]->cut.mesh, &names, reshard, err));
    return unit->param_count == 0 ? fsdp_mesh_check_dims(unit->opts.mesh, &names, reshard, err)
                                  : FSDP_OK;
}

/* Before the root is made there are no groups: then this is checked again. */
fsdp_status fsdp_unit_check_custom(const fsdp_unit *unit, fsdp_error *err)
{
    if (unit->group_count <= 1)
        return FSDP_OK;
    return fsdp_fail(
        err, FSDP_ERR_USAGE,
        "unit %s has %zu groups of parameters, but a custom collective serves only one", unit->name,
        unit->group_count);
}

static size_t count_meshes(const fsdp_unit *unit)
{
    size_t count = 0;
    for (size_t i = 0; i < unit->param_count; i++) {
        bool is_new = true;
        for (size_t j = 0; j < i && is_new; j++)
            is_new = !fsdp_mesh_equal(unit->params[i]->cut.mesh, unit->params[j]->cut.mesh);
        count += is_new;
    }
    return count;
}

static fsdp_status plan_group(fsdp_unit *unit, const fsdp_mesh *mesh, fsdp_error *err)
{
    const fsdp_dim_names names = names_of(unit);
    fsdp_group *group = &unit->groups[unit->group_count++];
    group->unit = unit;
    group->name = unit->name;
    group->settings = &unit->settings;
    group->context = unit->root->context;
    group->events = unit->root->world->parts.check ? &unit->root->events : NULL;
    FSDP_TRY(fsdp_group_take_params(group, unit->params, unit->param_count, mesh, err));
    return fsdp_group_choose_mesh(group, mesh, &names, err);
}

fsdp_status fsdp_unit_plan_groups(fsdp_unit *unit, fsdp_error *err)
{
    const fsdp_group_settings *settings = &unit->settings;
    unit->groups = fsdp_alloc(count_meshes(unit), sizeof *unit->groups);
    if (!unit->groups)
        return fsdp_fail_memory(err, unit->name);
    for (size_t i = 0; i < unit->param_count; i++)
        if (!unit->params[i]->group)
            FSDP_TRY(plan_group(unit, unit->params[i]->cut.mesh, err));
    bool has_custom =
        settings->custom_gather || settings->custom_reduce || settings->custom_all_reduce;
    return has_custom ? fsdp_unit_check_custom(unit, err) : FSDP_OK;
}

void fsdp_unit_release_groups(fsdp_unit *unit)
{
    for (size_t i = 0; i < unit->group_count; i++)
        fsdp_group_release(&unit->groups[i]);
    fsdp_free(unit->groups);
    unit->groups = NULL;
    unit->group_count = 0;
}
