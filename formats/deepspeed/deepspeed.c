/* Shared by the files of this room: kinds of moments, tensors of the model. See deepspeed.h. */
#include "formats/deepspeed/deepspeed.h"

#include <string.h>

/* --- moments -------------------------------------------------------------------------------------- */

fsdp_status ds_kind(ds_set *set, const char *name, size_t size, int *kind_out, fsdp_error *err)
{
    char shown[80];
    if (set->kind_count == 0)
        set->kinds[set->kind_count++] = "";
    for (size_t i = 1; i < set->kind_count; i++)
        if (strlen(set->kinds[i]) == size && memcmp(set->kinds[i], name, size) == 0) {
            *kind_out = (int)i;
            return FSDP_OK;
        }
    if (set->kind_count == DS_KINDS || memchr(name, '\0', size))
        return fsdp_fail(
            err, FSDP_ERR_LIMIT, "'%s': its optimizer has over %d moments, of which one is '%s'",
            set->directory, DS_KINDS - 1, fsdp_printable(name, size, shown, sizeof shown));
    set->kinds[set->kind_count] = fsdp_arena_strndup(&set->arena, name, size);
    if (!set->kinds[set->kind_count])
        return fsdp_fail_memory(err, "moments");
    *kind_out = (int)set->kind_count++;
    return FSDP_OK;
}

/* --- tensors of the model ------------------------------------------------------------------------- */

static fsdp_status widen(ds_set *set, const char *name, size_t size, const torch_tensor *tensor,
                         size_t *number_out, fsdp_error *err)
{
    static const int64_t origin[FSDP_MAX_DIMS];
    const fsdp_source_shape shape = {FSDP_F32, tensor->ndim, tensor->shape};
    const fsdp_source_chunk whole = {.lo = origin,
                                     .len = tensor->shape,
                                     .file = -1,
                                     .origin = tensor->storage.file,
                                     .stream = FSDP_NO_STREAM};
    fsdp_source_chunk chunk;
    size_t stored;
    torch_tensor_chunk(tensor, origin, &chunk);
    FSDP_TRY(fsdp_source_add_inner(set->source, tensor->dtype, tensor->ndim, tensor->shape, &stored,
                                   err));
    FSDP_TRY(fsdp_source_add_chunk(set->source, stored, &chunk, err));
    FSDP_TRY(fsdp_source_add_tensor(set->source, name, size, &shape, number_out, err));
    FSDP_TRY(fsdp_source_add_chunk(set->source, *number_out, &whole, err));
    if (!fsdp_grow(&set->widened, &set->widened_room, set->widened_count + 1, sizeof *set->widened))
        return fsdp_fail_memory(err, "buffers");
    set->widened[set->widened_count++] = (ds_widened){*number_out, stored};
    return FSDP_OK;
}

static fsdp_status keep_name(ds_set *set, const char *name, size_t size, size_t number,
                             fsdp_error *err)
{
    const char *kept = fsdp_arena_strndup(&set->arena, name, size);
    return kept && fsdp_name_table_enter(&set->tensors, kept, size, number)
               ? FSDP_OK
               : fsdp_fail_memory(err, "the names of a checkpoint");
}

fsdp_status ds_add_model_tensor(ds_set *set, torch_archive *archive, const char *name, size_t size,
                                torch_tensor *tensor, fsdp_error *err)
{
    size_t number;
    const int32_t whole = (int32_t)size; /* dots in names of a model are not nesting */
    fsdp_source_nest(set->source, &whole, 1);
    fsdp_status st = torch_tensor_add(archive, name, size, tensor, &number, err);
    fsdp_source_nest(set->source, NULL, 0);
    return st == FSDP_OK ? keep_name(set, name, size, number, err) : st;
}

fsdp_status ds_add_buffer(ds_set *set, torch_archive *archive, const char *name, size_t size,
                          torch_tensor *tensor, fsdp_error *err)
{
    size_t number;
    const int32_t whole = (int32_t)size;
    if (!fsdp_dtype_describe(tensor->dtype)->is_float || tensor->dtype == FSDP_F32)
        return ds_add_model_tensor(set, archive, name, size, tensor, err);
    fsdp_source_nest(set->source, &whole, 1);
    fsdp_status st = widen(set, name, size, tensor, &number, err);
    fsdp_source_nest(set->source, NULL, 0);
    return st == FSDP_OK ? keep_name(set, name, size, number, err) : st;
}

/* --- tied weights --------------------------------------------------------------------------------- */

fsdp_status ds_tensor_place_of(ds_set *set, const torch_tensor *tensor,
                               const ds_tensor_place **place_out, fsdp_error *err)
{
    ds_tensor_place *place = fsdp_arena_alloc(&set->arena, 1, sizeof *place);
    if (!place)
        return fsdp_fail_memory(err, "the weights of a model");
    *place = (ds_tensor_place){tensor->storage.file,
                               tensor->storage.stream,
                               tensor->offset,
                               tensor->ndim,
                               tensor->dtype,
                               {0},
                               {0}};
    if (tensor->ndim > 0) {
        memcpy(place->shape, tensor->shape, (size_t)tensor->ndim * sizeof *place->shape);
        memcpy(place->strides, tensor->strides, (size_t)tensor->ndim * sizeof *place->strides);
    }
    *place_out = place;
    return FSDP_OK;
}

fsdp_status ds_note_tied(ds_set *set, const ds_tied *tied, fsdp_error *err)
{
    ds_tied copy = {.name = fsdp_arena_strndup(&set->arena, tied->name, tied->name_size),
                    .name_size = tied->name_size,
                    .stored = fsdp_arena_strndup(&set->arena, tied->stored, tied->stored_size),
                    .stored_size = tied->stored_size};
    if (!copy.name || !copy.stored ||
        !fsdp_grow(&set->tied, &set->tied_room, set->tied_count + 1, sizeof *set->tied))
        return fsdp_fail_memory(err, "tied weights");
    set->tied[set->tied_count++] = copy;
    return FSDP_OK;
}
