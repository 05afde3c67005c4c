/* Gives a state another layout: see relayout.h. */
#include "statedict/select/relayout.h"

#include "base/data/name_path.h"

#include "base/text.h"
#include "statedict/sd/layout_internal.h"
#include <string.h>

typedef struct relayout_job {
    const fsdp_sd *from;
    fsdp_relayout_opts opts;
    const fsdp_selection *selection;
    fsdp_sd *sd;
    size_t *source;
} relayout_job;

static bool is_selected(const relayout_job *job, size_t i)
{
    return !job->selection || fsdp_selection_at(job->selection, i)->is_kept;
}

/* The name of an entry in the new state dict. */
static const char *new_name(const relayout_job *job, size_t i, size_t *size_out)
{
    const fsdp_entry *entry = fsdp_sd_at(job->from, i);
    const fsdp_selected *selected = job->selection ? fsdp_selection_at(job->selection, i) : NULL;
    *size_out = selected ? selected->name_size : entry->name_size;
    return selected ? selected->name : entry->name;
}

/* The dtype of an entry in the new state dict. */
static fsdp_dtype new_dtype(const relayout_job *job, size_t i, const fsdp_entry *tensor)
{
    return job->selection ? fsdp_selection_at(job->selection, i)->dtype : tensor->dtype;
}

bool fsdp_relayout_copies(const char *name)
{
    return strncmp(name, "rep", 3) == 0;
}

static fsdp_layout layout_for(const relayout_job *job, const fsdp_entry *entry)
{
    fsdp_layout layout = {.kind = FSDP_LAYOUT_MESH, .mesh = job->opts.mesh};
    for (int i = 0; i < fsdp_mesh_ndim(job->opts.mesh); i++) {
        bool copies =
            entry->ndim == 0 || fsdp_relayout_copies(fsdp_mesh_dim_name(job->opts.mesh, i));
        layout.placement[i].kind = copies ? FSDP_REPLICATE : FSDP_SHARD;
        layout.placement[i].dim =
            copies || job->opts.shard_dim >= entry->ndim ? 0 : job->opts.shard_dim;
    }
    return layout;
}

/* Notes the source entry of the entries that were just added. */
static void note_source(relayout_job *job, size_t old)
{
    job->source[fsdp_sd_count(job->sd) - 1] = old;
}

/* Adds a tensor under its name: the entry itself, or an alias whose target is not selected. */
static fsdp_status add_tensor(relayout_job *job, size_t i, size_t tensor, fsdp_error *err)
{
    const fsdp_entry *shape = fsdp_sd_at(job->from, tensor);
    fsdp_layout layout = layout_for(job, shape);
    size_t size;
    const char *name = new_name(job, i, &size);
    FSDP_TRY(fsdp_sd_add_tensor(
        job->sd, name, size,
        &(fsdp_tensor){new_dtype(job, i, shape), shape->ndim, shape->shape, layout, NULL}, err));
    note_source(job, tensor);
    return FSDP_OK;
}

static fsdp_status add_other(relayout_job *job, size_t i, fsdp_error *err)
{
    const fsdp_entry *entry = fsdp_sd_at(job->from, i);
    size_t size, target_size;
    const char *name = new_name(job, i, &size);
    if (entry->kind == FSDP_ENTRY_VALUE)
        FSDP_TRY(fsdp_sd_add_value(job->sd, name, size, &entry->value, err));
    if (entry->kind == FSDP_ENTRY_ALIAS) {
        if (!is_selected(job, entry->target))
            return add_tensor(job, i, entry->target, err);
        const char *target = new_name(job, entry->target, &target_size);
        FSDP_TRY(fsdp_sd_add_alias(job->sd, name, size, target, target_size, err));
    }
    note_source(job, i);
    return FSDP_OK;
}

static fsdp_status add_entries(relayout_job *job, bool with_tensors, fsdp_error *err)
{
    for (size_t i = 0; i < fsdp_sd_count(job->from); i++) {
        const fsdp_entry *entry = fsdp_sd_at(job->from, i);
        if (!is_selected(job, i))
            continue;
        if (entry->kind != FSDP_ENTRY_TENSOR)
            FSDP_TRY(add_other(job, i, err));
        else if (with_tensors)
            FSDP_TRY(add_tensor(job, i, i, err));
    }
    return FSDP_OK;
}

/* --- local: a flat buffer per dtype --- */

typedef struct flat_buffer {
    fsdp_flat_part *parts; /* memory for all tensors */
    size_t *numbers;       /* per part: its entry */
    size_t count;
    int64_t elements;
} flat_buffer;

static fsdp_status add_flat(relayout_job *job, fsdp_dtype dtype, const flat_buffer *flat,
                            fsdp_error *err)
{
    fsdp_text name = {0};
    int64_t ranks = fsdp_mesh_size(job->opts.mesh);
    size_t first = fsdp_sd_count(job->sd);
    fsdp_text_addf(&name, "flat.%s", fsdp_dtype_name(dtype));
    while (!name.failed && fsdp_sd_find(job->from, name.data, name.size) >= 0)
        fsdp_text_add(&name, "_", 1);
    if (name.failed)
        return fsdp_fail_memory(err, "a name");
    int64_t padded = (flat->elements + ranks - 1) / ranks * ranks;
    fsdp_status st = fsdp_sd_add_flat(job->sd, name.data, name.size,
                                      &(fsdp_flat_buffer){.dtype = dtype,
                                                          .mesh = job->opts.mesh,
                                                          .count = padded,
                                                          .parts = flat->parts,
                                                          .part_count = flat->count},
                                      err);
    fsdp_text_release(&name);
    FSDP_TRY(st);
    for (size_t k = 0; k < flat->count; k++)
        job->source[first + k] = flat->numbers[k];
    return FSDP_OK;
}

static fsdp_status collect_flat(relayout_job *job, fsdp_dtype dtype, flat_buffer *flat,
                                fsdp_error *err)
{
    flat->count = 0;
    flat->elements = 0;
    for (size_t i = 0; i < fsdp_sd_count(job->from); i++) {
        const fsdp_entry *entry = fsdp_sd_at(job->from, i);
        if (entry->kind != FSDP_ENTRY_TENSOR || !is_selected(job, i) ||
            new_dtype(job, i, entry) != dtype)
            continue;
        fsdp_box whole = fsdp_box_whole(entry->ndim, entry->shape);
        flat->numbers[flat->count] = i;
        fsdp_flat_part *part = &flat->parts[flat->count++];
        part->name = new_name(job, i, &part->name_size);
        part->ndim = entry->ndim;
        part->shape = entry->shape;
        part->offset = flat->elements;
        if (fsdp_add_overflow(flat->elements, fsdp_box_count(&whole), &flat->elements))
            return fsdp_fail(err, FSDP_ERR_LIMIT, "the tensors are too many for one flat buffer");
    }
    return flat->count > 0 ? add_flat(job, dtype, flat, err) : FSDP_OK;
}

static fsdp_status add_flats(relayout_job *job, fsdp_error *err)
{
    size_t n = fsdp_sd_count(job->from);
    flat_buffer flat = {.parts = fsdp_alloc(n, sizeof *flat.parts),
                        .numbers = fsdp_alloc(n, sizeof *flat.numbers)};
    fsdp_status st = flat.parts && flat.numbers ? FSDP_OK : fsdp_fail_memory(err, "flat buffers");
    for (int dtype = 1; dtype < FSDP_DTYPE_COUNT && st == FSDP_OK; dtype++)
        st = collect_flat(job, (fsdp_dtype)dtype, &flat, err);
    fsdp_free(flat.parts);
    fsdp_free(flat.numbers);
    return st;
}

/* --- paths: entries keep theirs, as far as their names stay --- */

/* The keys of opts.under as elements, and their bytes with the dot after them; 0: the name does not begin
 * with them, or has no space for more elements. */
static size_t begin_path(const relayout_job *job, const char *name, size_t size, size_t count,
                         int32_t *room, size_t *keys_out)
{
    const char *under = job->opts.under;
    size_t bytes = under ? strlen(under) : 0, at = 0;
    size_t keys = 0;
    *keys_out = 0;
    if (bytes == 0 || size < bytes + 2 || memcmp(name, under, bytes) != 0 || name[bytes] != '.')
        return 0;
    while (at < bytes && keys + count < FSDP_PATH_MOST) {
        size_t key = strcspn(under + at, ".");
        room[keys++] = (int32_t)key;
        at += key + 1;
    }
    if (at <= bytes)
        return 0;
    *keys_out = keys;
    return bytes + 1;
}

static fsdp_status keep_path(relayout_job *job, size_t i, int32_t *room, fsdp_error *err)
{
    const fsdp_entry *entry = fsdp_sd_at(job->from, i);
    int32_t usual[FSDP_PATH_DEFAULT_MOST];
    size_t size;
    fsdp_path old = {entry->name, entry->name_size, entry->path, entry->path_count};
    const char *name = new_name(job, i, &size);
    bool is_renamed = size != entry->name_size || memcmp(name, entry->name, size) != 0;
    if (!entry->path && !is_renamed)
        return FSDP_OK;
    if (!entry->path) {
        old.elements = usual;
        old.count = fsdp_path_default(entry->name, entry->name_size, usual);
    }
    int64_t found = fsdp_sd_find(job->sd, name, size);
    size_t keys, begin = begin_path(job, name, size, old.count, room, &keys);
    size_t count = keys + fsdp_path_rename(&old, name + begin, size - begin, room + keys);
    return found < 0 ? FSDP_OK : fsdp_sd_set_path(job->sd, (size_t)found, room, count, err);
}

static fsdp_status keep_paths(relayout_job *job, fsdp_error *err)
{
    int32_t *room = fsdp_alloc(FSDP_PATH_MOST + 1, sizeof *room);
    fsdp_status st = room ? FSDP_OK : fsdp_fail_memory(err, "a layout");
    for (size_t i = 0; i < fsdp_sd_count(job->from) && st == FSDP_OK; i++)
        if (is_selected(job, i))
            st = keep_path(job, i, room, err);
    fsdp_free(room);
    return st;
}

/* --- the calls --- */

static fsdp_status relayout(relayout_job *job, fsdp_error *err)
{
    job->source = fsdp_alloc(fsdp_sd_count(job->from), sizeof *job->source);
    if (!job->source)
        return fsdp_fail_memory(err, "a layout");
    FSDP_TRY(fsdp_sd_create(&job->sd, err));
    if (job->opts.kind == FSDP_LOCAL)
        FSDP_TRY(add_flats(job, err));
    FSDP_TRY(add_entries(job, job->opts.kind != FSDP_LOCAL, err));
    return keep_paths(job, err);
}

fsdp_status fsdp_relayout(const fsdp_sd *from, const fsdp_relayout_opts *opts,
                          const fsdp_selection *selection, fsdp_sd **sd_out, size_t **source_out,
                          fsdp_error *err)
{
    relayout_job job = {.from = from, .opts = *opts, .selection = selection};
    fsdp_status st = relayout(&job, err);
    if (st != FSDP_OK) {
        fsdp_sd_free(job.sd);
        fsdp_free(job.source);
        return st;
    }
    *sd_out = job.sd;
    *source_out = job.source;
    return FSDP_OK;
}

int64_t fsdp_relayout_count_short(const fsdp_sd *sd, int shard_dim)
{
    int64_t count = 0;
    for (size_t i = 0; i < fsdp_sd_count(sd); i++) {
        const fsdp_entry *entry = fsdp_sd_at(sd, i);
        count += entry->kind == FSDP_ENTRY_TENSOR && entry->ndim > 0 && entry->ndim <= shard_dim;
    }
    return count;
}

fsdp_status fsdp_relayout_whole(const fsdp_sd *from, const fsdp_selection *selection,
                                fsdp_sd **sd_out, fsdp_error *err)
{
    fsdp_mesh *one = NULL;
    size_t *source = NULL;
    FSDP_TRY(fsdp_mesh_create(1, (int64_t[]){1}, (const char *[]){"rank"}, NULL, &one, err));
    fsdp_relayout_opts opts = {.kind = FSDP_FULL, .mesh = one};
    fsdp_status st = fsdp_relayout(from, &opts, selection, sd_out, &source, err);
    fsdp_mesh_free(one);
    fsdp_free(source);
    return st;
}
