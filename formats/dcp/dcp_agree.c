/* Steps of an optimizer as a sign that the files of a directory are of two saves: see dcp_agree.h. */
#include "formats/dcp/dcp_agree.h"

#include "base/text.h"
#include "kernels/kernels.h"

#include <stdlib.h>
#include <string.h>

void dcp_steps_release(dcp_steps *steps)
{
    for (size_t i = 0; i < steps->count; i++)
        fsdp_free(steps->groups[i].items);
    fsdp_free(steps->groups);
    fsdp_name_table_release(&steps->places);
    fsdp_text_release(&steps->key);
    fsdp_arena_release(&steps->arena);
}

/* "optim.state.w.step" -> "optim". False: not a step of a parameter. */
static bool find_optim(const char *name, size_t size, size_t *optim_size)
{
    static const char state[] = ".state.", step[] = ".step";
    if (!fsdp_bytes_end(name, size, step))
        return false;
    for (size_t at = 0; at + sizeof state - 1 + sizeof step - 1 < size; at++)
        if (memcmp(name + at, state, sizeof state - 1) == 0) {
            *optim_size = at;
            return true;
        }
    *optim_size = 0;
    return size > sizeof step + 6 && memcmp(name, state + 1, sizeof state - 2) == 0;
}

/* Steps of one file mostly follow one another. NULL: no memory. */
static dcp_step_group *find_group(dcp_steps *steps, const char *optim, size_t size, int file)
{
    dcp_step_group *last = steps->count > 0 ? &steps->groups[steps->last] : NULL;
    if (last && last->file == file && last->optim_size == size &&
        memcmp(last->optim, optim, size) == 0)
        return last;
    steps->key.size = 0;
    fsdp_text_add(&steps->key, (const char *)&file, sizeof file);
    fsdp_text_add(&steps->key, optim, size);
    if (steps->key.failed)
        return NULL;
    const uint64_t *known = fsdp_name_table_find(&steps->places, steps->key.data, steps->key.size);
    if (!known) {
        char *kept = fsdp_arena_strndup(&steps->arena, steps->key.data, steps->key.size);
        if (!kept || !fsdp_grow(&steps->groups, &steps->room, steps->count + 1, sizeof *last))
            return NULL;
        known = fsdp_name_table_enter(&steps->places, kept, steps->key.size, steps->count);
        if (!known)
            return NULL;
        steps->groups[steps->count++] =
            (dcp_step_group){.optim = kept + sizeof file, .optim_size = size, .file = file};
    }
    steps->last = (size_t)*known;
    return &steps->groups[steps->last];
}

fsdp_status dcp_steps_note(dcp_steps *steps, const char *name, size_t name_size,
                           const dcp_item *item, fsdp_error *err)
{
    size_t optim_size;
    if (item->is_packed || item->header || !find_optim(name, name_size, &optim_size))
        return FSDP_OK;
    dcp_step_group *group = find_group(steps, name, optim_size, item->file);
    if (!group || !fsdp_grow(&group->items, &group->room, group->count + 1, sizeof *group->items))
        return fsdp_fail_memory(err, "the steps of a checkpoint");
    group->items[group->count++] = *item;
    return FSDP_OK;
}

/* False: not one number. */
static fsdp_status read_number(const torch_archive *archive, double *number_out, bool *is_number,
                               fsdp_error *err)
{
    torch_tensor tensor;
    torch_wrapper wrapper;
    torch_kind kind;
    char stored[16];
    int64_t whole = 0;
    *is_number = false;
    FSDP_TRY(torch_tensor_read(archive, archive->pickle.root, &kind, &tensor, &wrapper, err));
    if (kind == TORCH_KIND_NONE &&
        fsdp_pickle_int(&archive->pickle, archive->pickle.root, &whole)) {
        *number_out = (double)whole;
        *is_number = true;
    }
    if (kind != TORCH_KIND_TENSOR)
        return FSDP_OK;
    const fsdp_dtype_info *info = fsdp_dtype_describe(tensor.dtype);
    bool is_whole = tensor.dtype == FSDP_I64 || tensor.dtype == FSDP_I32;
    *is_number = (info->is_float || is_whole) && tensor.fix == 0 && info->size <= sizeof stored &&
                 fsdp_shape_count(tensor.ndim, tensor.shape) == 1;
    fsdp_status st = *is_number
                         ? torch_tensor_pread(archive->source, &tensor, 0, stored, info->size, err)
                         : FSDP_OK;
    torch_tensor_release(&tensor);
    if (st != FSDP_OK || !*is_number)
        return st;
    memcpy(&whole, stored, is_whole ? info->size : 0);
    *number_out = tensor.dtype == FSDP_I32 ? (double)(int32_t)whole : (double)whole;
    if (info->is_float)
        fsdp_kernels_get()->cast(number_out, FSDP_F64, stored, tensor.dtype, 1, FSDP_OVERFLOW_INF);
    return FSDP_OK;
}

static fsdp_status read_step(fsdp_source *source, dcp_step_group *group, size_t i, fsdp_error *err)
{
    const dcp_item *item = &group->items[i];
    torch_opening opening = {.source = source,
                             .file = item->file,
                             .stream = FSDP_NO_STREAM,
                             .where = fsdp_source_file_path(source, (size_t)item->file)};
    torch_archive archive;
    double number;
    bool is_number;
    FSDP_TRY(torch_zip_open(&opening, item->offset, item->length, false, &archive, err));
    fsdp_status st = read_number(&archive, &number, &is_number, err);
    torch_archive_release(&archive);
    if (st != FSDP_OK)
        return st;
    if (!is_number || number != number)
        group->is_unknown = true;
    else if (i == 0)
        group->least = group->most = number;
    else {
        group->least = number < group->least ? number : group->least;
        group->most = number > group->most ? number : group->most;
    }
    return FSDP_OK;
}

/* The first and the last step of a file tell most files apart; the others are read in doubt. */
static fsdp_status read_ends(fsdp_source *source, dcp_step_group *group, fsdp_error *err)
{
    FSDP_TRY(read_step(source, group, 0, err));
    group->is_read = group->count == 2;
    return read_step(source, group, group->count - 1, err);
}

static fsdp_status read_rest(fsdp_source *source, dcp_step_group *group, fsdp_error *err)
{
    for (size_t i = 1; i + 1 < group->count && !group->is_read; i++)
        FSDP_TRY(read_step(source, group, i, err));
    group->is_read = true;
    return FSDP_OK;
}

/* Reads until two files of an optimizer are known to differ in all steps (*low_out, or NULL), or none do. */
static fsdp_status find_apart(fsdp_source *source, dcp_step_group *const *groups, size_t count,
                              const dcp_step_group **low_out, const dcp_step_group **high_out,
                              fsdp_error *err)
{
    for (;;) {
        dcp_step_group *low = NULL, *high = NULL;
        for (size_t i = 0; i < count; i++) {
            dcp_step_group *group = groups[i];
            if (group->is_unknown)
                continue;
            low = !low || group->most < low->most ? group : low;
            high = !high || group->least > high->least ? group : high;
        }
        *low_out = *high_out = NULL;
        if (!low || low->most >= high->least)
            return FSDP_OK;
        if (low->is_read && high->is_read) {
            *low_out = low;
            *high_out = high;
            return FSDP_OK;
        }
        FSDP_TRY(read_rest(source, low, err));
        FSDP_TRY(read_rest(source, high, err));
    }
}

static int by_optim(const void *a, const void *b)
{
    const dcp_step_group *x = *(dcp_step_group *const *)a, *y = *(dcp_step_group *const *)b;
    size_t size = x->optim_size < y->optim_size ? x->optim_size : y->optim_size;
    int order = memcmp(x->optim, y->optim, size);
    if (order == 0)
        order = (x->optim_size > y->optim_size) - (x->optim_size < y->optim_size);
    return order != 0 ? order : (x->file > y->file) - (x->file < y->file);
}

static bool is_same_optim(const dcp_step_group *x, const dcp_step_group *y)
{
    return x->optim_size == y->optim_size && memcmp(x->optim, y->optim, x->optim_size) == 0;
}

/* groups: those of one optimizer. */
static fsdp_status compare_groups(fsdp_source *source, dcp_step_group *const *groups, size_t count,
                                  fsdp_error *err)
{
    const dcp_step_group *low, *high;
    for (size_t i = 0; i < count && count > 1; i++)
        FSDP_TRY(read_ends(source, groups[i], err));
    FSDP_TRY(find_apart(source, groups, count, &low, &high, err));
    if (!low)
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_DAMAGED,
                     "the parameters in '%s' took %.0f steps at most, and those in '%s' at least "
                     "%.0f" FSDP_TWO_SAVES ". If parameters were frozen for a time, use --from dcp",
                     fsdp_source_file_path(source, (size_t)low->file), low->most,
                     fsdp_source_file_path(source, (size_t)high->file), high->least);
}

fsdp_status dcp_agree_steps(fsdp_source *source, dcp_steps *steps, fsdp_error *err)
{
    dcp_step_group **sorted = fsdp_alloc(steps->count + 1, sizeof *sorted);
    size_t count = 0;
    fsdp_status st = sorted ? FSDP_OK : fsdp_fail_memory(err, "the steps of a checkpoint");
    for (size_t i = 0; i < steps->count && st == FSDP_OK; i++)
        if (steps->groups[i].count > 1) /* one alone may be of a parameter that was frozen */
            sorted[count++] = &steps->groups[i];
    if (count > 1)
        qsort(sorted, count, sizeof *sorted, by_optim);
    for (size_t i = 0, end; i < count && st == FSDP_OK; i = end) {
        for (end = i + 1; end < count && is_same_optim(sorted[i], sorted[end]);)
            end++;
        st = compare_groups(source, sorted + i, end - i, err);
    }
    fsdp_free(sorted);
    return st;
}
