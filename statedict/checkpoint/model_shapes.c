/* The shapes of a model that the user named: see model_shapes.h. */
#include "statedict/checkpoint/model_shapes.h"

#include "base/core/mem.h"

static const fsdp_sd *sd_of(const fsdp_model_shapes *shapes)
{
    return shapes->checkpoint->manifest.sd;
}

static bool find(void *context, const char *name, size_t size, fsdp_source_shape *shape_out)
{
    fsdp_model_shapes *shapes = context;
    int64_t number = fsdp_sd_find(sd_of(shapes), name, size);
    if (number < 0)
        return false;
    const fsdp_entry *entry = fsdp_sd_at(sd_of(shapes), (size_t)number);
    shapes->is_found[number] = true;
    if (entry->kind == FSDP_ENTRY_ALIAS)
        entry = fsdp_sd_at(sd_of(shapes), entry->target);
    if (entry->kind != FSDP_ENTRY_TENSOR)
        return false;
    *shape_out = (fsdp_source_shape){entry->dtype, entry->ndim, entry->shape};
    return true;
}

static fsdp_status check(void *context, fsdp_error *err)
{
    const fsdp_model_shapes *shapes = context;
    char shown[200];
    for (size_t i = 0; i < fsdp_sd_count(sd_of(shapes)); i++) {
        const fsdp_entry *entry = fsdp_sd_at(sd_of(shapes), i);
        if (shapes->is_found[i] || entry->kind != FSDP_ENTRY_TENSOR ||
            (shapes->may_lack &&
             fsdp_filter_selects(shapes->may_lack, entry->name, entry->name_size)))
            continue;
        return fsdp_fail(err, FSDP_ERR_DAMAGED,
                         "'%s' of --like has a tensor '%s' that the files of the ranks lack: name "
                         "the model that was saved, or accept it with --allow-missing",
                         shapes->model.path,
                         fsdp_printable(entry->name, entry->name_size, shown, sizeof shown));
    }
    return FSDP_OK;
}

fsdp_status fsdp_model_shapes_take(const fsdp_checkpoint *checkpoint, const fsdp_filter *may_lack,
                                   fsdp_model_shapes *shapes, fsdp_error *err)
{
    shapes->checkpoint = checkpoint;
    shapes->may_lack = may_lack;
    shapes->is_found = fsdp_alloc(fsdp_sd_count(sd_of(shapes)), sizeof *shapes->is_found);
    if (!shapes->is_found)
        return fsdp_fail_memory(err, "the shapes of a model");
    shapes->model = (fsdp_source_model){
        .path = checkpoint->path, .find = find, .check = check, .context = shapes};
    return FSDP_OK;
}

void fsdp_model_shapes_release(fsdp_model_shapes *shapes)
{
    fsdp_free(shapes->is_found);
}
