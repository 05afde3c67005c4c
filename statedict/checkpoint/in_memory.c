/*
 * A state dict in memory as an opened checkpoint, so that a conversion writes it in any format. It has no
 * files; elements are copied out of the memory that the state dict borrows.
 */
#include "statedict/checkpoint/checkpoint_internal.h"
#include "base/core/mem.h"
#include "kernels/kernels.h"
#include "statedict/sd/layout_internal.h"

#include <string.h>

typedef struct memory_checkpoint {
    fsdp_checkpoint base;
    const fsdp_sd *state; /* its entries have the numbers of those of base */
} memory_checkpoint;

static const memory_checkpoint *memory_of(const fsdp_checkpoint *checkpoint)
{
    return (const memory_checkpoint *)checkpoint;
}

static fsdp_status get(fsdp_checkpoint *checkpoint, const fsdp_read_request *request,
                       fsdp_error *err)
{
    const fsdp_entry *entry = fsdp_sd_at(memory_of(checkpoint)->state, request->entry);
    fsdp_box whole = fsdp_box_whole(entry->ndim, entry->shape);
    for (size_t i = 0; i < request->count; i++) {
        const fsdp_read_target *target = &request->targets[i];
        if (!fsdp_work_counter_take(request->counter))
            continue;
        if (target->device || target->dtype != entry->dtype)
            return fsdp_fail(err, FSDP_ERR_INTERNAL,
                             "a state dict in memory is read as it is, and into the host's memory");
        fsdp_copy_shared(&target->box, target->data, &whole, entry->data,
                         fsdp_dtype_size(entry->dtype));
    }
    return FSDP_OK;
}

static const fsdp_checkpoint_ops memory_ops = {.get = get};

/* --- opening ---------------------------------------------------------------------------------- */

static fsdp_status check_tensor(const fsdp_entry *entry, fsdp_error *err)
{
    enum { NAME_TEXT = 200 };
    char shown[NAME_TEXT];
    fsdp_box box, whole = fsdp_box_whole(entry->ndim, entry->shape);
    if (fsdp_box_count(&whole) == 0)
        return FSDP_OK;
    bool is_whole = fsdp_layout_box_count(&entry->layout, entry->ndim, entry->shape, 0) == 1;
    if (is_whole)
        fsdp_layout_box_at(&entry->layout, entry->ndim, entry->shape, 0, 0, &box);
    if (is_whole && fsdp_box_equal(&box, &whole) && entry->data)
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_USAGE,
                     "tensor '%s' is not whole in this process; gather the state first "
                     "(fsdp_sd_gather_full)",
                     fsdp_printable(entry->name, entry->name_size, shown, sizeof shown));
}

static fsdp_status add_entry(fsdp_sd *sd, const fsdp_mesh *mesh, const fsdp_sd *state,
                             const fsdp_entry *entry, fsdp_error *err)
{
    if (entry->kind == FSDP_ENTRY_VALUE)
        return fsdp_sd_add_value(sd, entry->name, entry->name_size, &entry->value, err);
    if (entry->kind == FSDP_ENTRY_ALIAS) {
        const fsdp_entry *target = fsdp_sd_at(state, entry->target);
        return fsdp_sd_add_alias(sd, entry->name, entry->name_size, target->name, target->name_size,
                                 err);
    }
    FSDP_TRY(check_tensor(entry, err));
    const fsdp_tensor whole = {.dtype = entry->dtype,
                               .ndim = entry->ndim,
                               .shape = entry->shape,
                               .layout = {.mesh = mesh}};
    return fsdp_sd_add_tensor(sd, entry->name, entry->name_size, &whole, err);
}

static fsdp_status describe(fsdp_checkpoint *checkpoint, const fsdp_sd *state, fsdp_error *err)
{
    fsdp_mesh *mesh = NULL;
    fsdp_status st = fsdp_mesh_create(1, (int64_t[]){1}, (const char *[]){"dp"}, NULL, &mesh, err);
    if (st == FSDP_OK)
        st = fsdp_sd_create(&checkpoint->manifest.sd, err);
    fsdp_sd *sd = checkpoint->manifest.sd;
    for (size_t i = 0; st == FSDP_OK && i < fsdp_sd_count(state); i++) {
        const fsdp_entry *entry = fsdp_sd_at(state, i);
        st = add_entry(sd, mesh, state, entry, err);
        if (st == FSDP_OK && entry->path)
            st = fsdp_sd_set_path(sd, i, entry->path, entry->path_count, err);
    }
    fsdp_mesh_free(mesh);
    FSDP_TRY(st);
    checkpoint->info = (fsdp_checkpoint_info){.path = checkpoint->path,
                                              .format = "fsdp",
                                              .kind = FSDP_FULL,
                                              .step = FSDP_NO_STEP,
                                              .world = 1,
                                              .tensor_bytes = fsdp_sd_tensor_bytes(sd)};
    return FSDP_OK;
}

fsdp_status fsdp_checkpoint_of_state(fsdp_io *io, const fsdp_sd *state,
                                     fsdp_checkpoint **checkpoint_out, fsdp_error *err)
{
    memory_checkpoint *memory = fsdp_alloc(1, sizeof *memory);
    if (!memory)
        return fsdp_fail_memory(err, "a checkpoint");
    fsdp_checkpoint *checkpoint = &memory->base;
    checkpoint->ops = &memory_ops;
    checkpoint->io = io;
    checkpoint->manifest.step = FSDP_NO_STEP;
    checkpoint->manifest.kind = FSDP_FULL;
    checkpoint->manifest.world = 1;
    checkpoint->path = fsdp_strndup(FSDP_STATE_PATH, strlen(FSDP_STATE_PATH));
    memory->state = state;
    fsdp_status st =
        checkpoint->path ? describe(checkpoint, state, err) : fsdp_fail_memory(err, "a path");
    if (st == FSDP_OK)
        *checkpoint_out = checkpoint;
    else
        fsdp_checkpoint_close(checkpoint);
    return st;
}
