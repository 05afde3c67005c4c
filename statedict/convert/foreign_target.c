/*
 * A conversion into a format of another program: declares the entries to formats/target.h and manages the
 * staging place. An interrupted conversion is resumed slab by slab. See convert_job.h.
 */
#include "statedict/checkpoint/same_tensors.h"
#include "statedict/convert/convert_job.h"

#include "base/io/io_dry.h"
#include "base/io/io_reuse.h"
#include "formats/source.h"
#include "statedict/select/relayout.h"
#include "statedict/select/selection.h"
#include "statedict/sd/layout_internal.h"

#include <stdlib.h>
#include <string.h>

typedef struct foreign_files {
    fsdp_target_entry *entries;
    fsdp_target_box *boxes; /* of all entries */
    fsdp_arena dims;        /* of boxes */
    size_t box_count;
    fsdp_target_tie *ties; /* names that are left out, for formats that record them */
    fsdp_target_mesh mesh;
    fsdp_target *target;
} foreign_files;

/* --- declaring -------------------------------------------------------------------------------- */

typedef struct box_list {
    foreign_files *files;
    size_t room; /* of boxes */
} box_list;

static fsdp_status add_box(void *context, int rank, size_t part, const fsdp_box *box,
                           fsdp_error *err)
{
    box_list *list = context;
    foreign_files *files = list->files;
    size_t ndim = (size_t)box->ndim;
    int64_t *dims = fsdp_arena_alloc(&files->dims, 2 * ndim, sizeof *dims);
    (void)part;
    if (!dims || !fsdp_grow(&files->boxes, &list->room, files->box_count + 1, sizeof *files->boxes))
        return fsdp_fail_memory(err, "a conversion");
    memcpy(dims, box->lo, ndim * sizeof *dims);
    memcpy(dims + ndim, box->len, ndim * sizeof *dims);
    files->boxes[files->box_count++] = (fsdp_target_box){rank, dims, dims + ndim};
    return FSDP_OK;
}

static fsdp_status declare_entry(const convert_job *job, const fsdp_selected *selected, size_t i,
                                 box_list *list, fsdp_error *err)
{
    const fsdp_entry *entry = fsdp_sd_at(job->sd, i);
    size_t number = fsdp_sd_tensor_of(job->sd, i), first = list->files->box_count;
    const fsdp_entry *tensor = fsdp_sd_at(job->sd, number);
    fsdp_target_entry *declared = &list->files->entries[i];
    *declared = (fsdp_target_entry){.name = entry->name,
                                    .name_size = entry->name_size,
                                    .path = entry->path,
                                    .path_count = entry->path_count,
                                    .is_model = selected->is_model,
                                    .is_optim = selected->is_optim};
    if (entry->kind == FSDP_ENTRY_VALUE) {
        declared->value = &entry->value;
        return FSDP_OK;
    }
    declared->dtype = tensor->dtype;
    declared->ndim = tensor->ndim;
    declared->shape = tensor->shape;
    fsdp_box whole = fsdp_box_whole(tensor->ndim, tensor->shape);
    FSDP_TRY(fsdp_box_plan_stored(tensor, job->owners[number], &whole, add_box, list, err));
    declared->box_count = list->files->box_count - first;
    return FSDP_OK;
}

static fsdp_status declare_entries(const convert_job *job, const fsdp_selection *selection,
                                   fsdp_error *err)
{
    foreign_files *files = job->files;
    box_list list = {.files = files};
    size_t count = fsdp_sd_count(job->sd), next = 0;
    files->entries = fsdp_alloc(count, sizeof *files->entries);
    if (!files->entries)
        return fsdp_fail_memory(err, "a conversion");
    for (size_t i = 0; i < count; i++)
        FSDP_TRY(declare_entry(job, fsdp_selection_at(selection, job->source[i]), i, &list, err));
    for (size_t i = 0; i < count; i++) { /* the array of boxes does not move any more */
        if (files->entries[i].box_count > 0)
            files->entries[i].boxes = files->boxes + next;
        next += files->entries[i].box_count;
    }
    return FSDP_OK;
}

static bool may_share(const fsdp_target_entry *a, const fsdp_target_entry *b)
{
    return a->dtype == b->dtype && a->ndim == b->ndim &&
           memcmp(a->shape, b->shape, (size_t)a->ndim * sizeof *a->shape) == 0;
}

/* Declares the names of one tensor as one, for targets that store it once. */
static fsdp_status declare_shared(const convert_job *job, fsdp_error *err)
{
    foreign_files *files = job->files;
    size_t count = fsdp_sd_count(job->from->manifest.sd);
    size_t *one = fsdp_alloc(count, sizeof *one);
    size_t *first = fsdp_alloc(count, sizeof *first); /* entry of the target, counted from 1 */
    fsdp_status st = one && first ? fsdp_same_tensors(job->from, true, one, err)
                                  : fsdp_fail_memory(err, "tied weights");
    for (size_t i = 0; i < fsdp_sd_count(job->sd) && st == FSDP_OK; i++) {
        fsdp_target_entry *entry = &files->entries[i];
        size_t *known = &first[one[job->source[i]]];
        if (entry->value)
            continue;
        if (*known == 0)
            *known = i + 1;
        else if (may_share(entry, &files->entries[*known - 1]))
            entry->same_as = *known;
    }
    fsdp_free(one);
    fsdp_free(first);
    return st;
}

/* Declares tied names, by the target's numbers of entries. */
static fsdp_status declare_ties(const convert_job *job, fsdp_error *err)
{
    foreign_files *files = job->files;
    files->ties = fsdp_alloc(job->ties.count, sizeof *files->ties);
    if (!files->ties)
        return fsdp_fail_memory(err, "tied weights");
    for (size_t i = 0; i < job->ties.count; i++) {
        const fsdp_convert_tie *tie = &job->ties.items[i];
        int64_t kept = fsdp_sd_find(job->sd, tie->kept, tie->kept_size);
        if (kept < 0)
            return fsdp_fail(err, FSDP_ERR_INTERNAL, "a tied name has no tensor");
        files->ties[i] = (fsdp_target_tie){tie->dropped, tie->dropped_size, (size_t)kept};
    }
    return FSDP_OK;
}

static fsdp_status fit_copies(convert_job *job, const fsdp_selection *selection, fsdp_error *err)
{
    const foreign_files *files = job->files;
    size_t count = fsdp_sd_count(job->sd);
    bool *is_model = fsdp_alloc(count, sizeof *is_model);
    if (!is_model)
        return fsdp_fail_memory(err, "a conversion");
    for (size_t i = 0; i < count; i++)
        is_model[i] = !fsdp_selection_at(selection, job->source[i])->is_optim;
    fsdp_copies_beside beside = {files->entries, is_model, count, job->ties.items, job->ties.count};
    fsdp_status st = fsdp_copies_fit(&job->copies, &job->opts, &beside, err);
    fsdp_free(is_model);
    return st;
}

/* The mesh by which fsdp_relayout cut the tensors. */
static void declare_mesh(const convert_job *job)
{
    const fsdp_mesh *mesh = job->mesh ? job->mesh : job->opts.mesh;
    fsdp_target_mesh *out = &((foreign_files *)job->files)->mesh;
    out->ndim = fsdp_mesh_ndim(mesh);
    out->shard_dim = job->opts.shard_dim;
    for (int i = 0; i < out->ndim; i++) {
        const char *name = fsdp_mesh_dim_name(mesh, i);
        out->shape[i] = fsdp_mesh_dim_size(mesh, i);
        out->names[i] = job->mesh ? NULL : name;
        out->copies[i] = fsdp_relayout_copies(name);
    }
}

static fsdp_status declare(convert_job *job, const fsdp_selection *selection, fsdp_error *err)
{
    job->files = fsdp_alloc(1, sizeof(foreign_files));
    if (!job->files)
        return fsdp_fail_memory(err, "a conversion");
    declare_mesh(job);
    FSDP_TRY(declare_entries(job, selection, err));
    if (job->format->caps.notes_ties)
        FSDP_TRY(declare_ties(job, err));
    if (job->format->caps.shares)
        FSDP_TRY(declare_shared(job, err));
    return fit_copies(job, selection, err);
}

/* --- memory and files ------------------------------------------------------------------------- */

static convert_room room(const convert_job *job)
{
    (void)job;
    return (convert_room){.slab_least = 1 << 20, .slab_most = 16 << 20};
}

/* An adapter stays an adapter for its loader, and so on: the stem of the source's files. */
static const char *stem_of(const convert_job *job)
{
    const fsdp_source *source = job->from->source;
    if (!source || fsdp_source_file_count(source) == 0)
        return NULL;
    const char *path = fsdp_source_file_path(source, 0), *slash = strrchr(path, '/');
    const char *name = slash ? slash + 1 : path;
    for (size_t i = 1; fsdp_hf_stems[i]; i++) {
        size_t size = strlen(fsdp_hf_stems[i]);
        if (strncmp(name, fsdp_hf_stems[i], size) == 0 && strchr(".-_", name[size]))
            return fsdp_hf_stems[i];
    }
    return NULL;
}

static fsdp_target_opts target_opts(const convert_job *job)
{
    const foreign_files *files = job->files;
    return (fsdp_target_opts){.format = job->format,
                              .io = job->reuse ? job->reuse : job->io,
                              .path = job->place.path,
                              .entries = files->entries,
                              .entry_count = fsdp_sd_count(job->sd),
                              .world = job->world,
                              .mesh = &files->mesh,
                              .max_file_bytes = job->opts.max_shard_bytes,
                              .ties = files->ties,
                              .tie_count = files->ties ? job->ties.count : 0,
                              .stem = stem_of(job),
                              .copied = job->copies.record.data,
                              .metadata = job->metadata.kept,
                              .sync = !job->opts.skip_fsync};
}

static fsdp_status measure(convert_job *job, fsdp_convert_plan *plan, fsdp_error *err)
{
    fsdp_target_opts opts = target_opts(job);
    int64_t files = 0;
    FSDP_TRY(job->format->writer->ops->measure(&opts, &files, &plan->bytes_written, err));
    plan->files = (int)files + (int)job->copies.count;
    plan->bytes_written += job->copies.bytes;
    return FSDP_OK;
}

/* --- the parts of its files ------------------------------------------------------------------- */

typedef struct placed_part {
    fsdp_target_place place;
    size_t entry, box;
} placed_part;

static int compare_parts(const void *a, const void *b)
{
    const placed_part *x = a, *y = b;
    int order = strcmp(x->place.file, y->place.file);
    if (order != 0)
        return order;
    if (x->entry != y->entry)
        return x->entry < y->entry ? -1 : 1;
    return (x->box > y->box) - (x->box < y->box);
}

static fsdp_status place_parts(const convert_job *job, const fsdp_target *target,
                               placed_part *parts, fsdp_error *err)
{
    const foreign_files *files = job->files;
    size_t n = 0;
    for (size_t i = 0; i < fsdp_sd_count(job->sd); i++) {
        for (size_t b = 0; b < files->entries[i].box_count; b++, n++) {
            parts[n] = (placed_part){.place.file = "", .entry = i, .box = b};
            if (target)
                FSDP_TRY(job->format->writer->ops->place(target, i, b, &parts[n].place, err));
        }
    }
    if (n > 0)
        qsort(parts, n, sizeof *parts, compare_parts);
    return FSDP_OK;
}

static fsdp_status visit_parts(const convert_job *job, const placed_part *parts,
                               convert_part_visit visit, void *context, fsdp_error *err)
{
    const foreign_files *files = job->files;
    for (size_t i = 0; i < files->box_count; i++) {
        const char *file = parts[i].place.file;
        if (i == 0 || strcmp(file, parts[i - 1].place.file) != 0)
            FSDP_TRY(visit(context, file, CONVERT_NO_PART, NULL, err));
        fsdp_box box = fsdp_target_box_at(&files->entries[parts[i].entry], parts[i].box);
        FSDP_TRY(visit(context, file, parts[i].entry, &box, err));
    }
    return FSDP_OK;
}

/* Places are known only after create, so this creates a target on an io that stores nothing. */
static fsdp_status list(convert_job *job, convert_part_visit visit, void *context, fsdp_error *err)
{
    const foreign_files *files = job->files;
    fsdp_target_opts dry = target_opts(job);
    fsdp_target *target = NULL;
    dry.io = fsdp_io_dry();
    dry.path = job->to;
    dry.sync = false;
    placed_part *parts = fsdp_alloc(files->box_count, sizeof *parts);
    fsdp_status st = parts ? FSDP_OK : fsdp_fail_memory(err, "a plan");
    if (st == FSDP_OK && job->format->writer->ops->place)
        st = job->format->writer->ops->create(&dry, &target, err);
    if (st == FSDP_OK)
        st = place_parts(job, target, parts, err);
    if (st == FSDP_OK)
        st = visit_parts(job, parts, visit, context, err);
    if (target)
        job->format->writer->ops->discard(target);
    fsdp_free(parts);
    return st;
}

/* --- writing ---------------------------------------------------------------------------------- */

static fsdp_status check_place(const convert_job *job, fsdp_error *err)
{
    return fsdp_output_check(&job->place, job->from, job->to, err);
}

static fsdp_status begin(convert_job *job, fsdp_error *err)
{
    const fsdp_convert_opts *opts = &job->opts;
    job->place.hash = job->hash;
    job->place.resume = opts->resume;
    job->place.unit = job->slab_bytes;
    job->place.unit_least = room(job).slab_least;
    FSDP_TRY(fsdp_output_begin(&job->place, job->to, err));
    if (opts->resume) {
        fsdp_resume_notify(&opts->watch, job->place.is_taken_up ? job->place.staging : NULL);
        job->slab_bytes = job->place.unit;
    }
    return job->place.is_taken_up ? fsdp_io_reuse_create(job->io, &job->reuse, err) : FSDP_OK;
}

static fsdp_status create(convert_job *job, fsdp_error *err)
{
    foreign_files *files = job->files;
    FSDP_TRY(fsdp_copies_write(&job->copies, job->io, job->place.path, !job->opts.skip_fsync, err));
    fsdp_target_opts opts = target_opts(job);
    return job->format->writer->ops->create(&opts, &files->target, err);
}

static size_t box_of(const convert_job *job, const convert_piece *piece)
{
    const foreign_files *files = job->files;
    const fsdp_target_entry *entry = &files->entries[piece->entry];
    size_t box = (size_t)piece->rank;
    if (box < entry->box_count && entry->boxes[box].rank == piece->rank)
        return box;
    for (box = 0; entry->boxes[box].rank != piece->rank;)
        box++;
    return box;
}

static fsdp_status write(convert_job *job, const convert_piece *piece, fsdp_error *err)
{
    const foreign_files *files = job->files;
    fsdp_target_piece elements = {piece->entry, box_of(job, piece), piece->first, piece->count,
                                  piece->data};
    return job->format->writer->ops->write(files->target, &elements, err);
}

static fsdp_status locate(const convert_job *job, const convert_piece *piece,
                          fsdp_target_place *place_out, fsdp_error *err)
{
    const foreign_files *files = job->files;
    if (!job->format->writer->ops->place)
        return fsdp_fail(err, FSDP_ERR_NOT_FOUND, "format %s has no places", job->format->name);
    return job->format->writer->ops->place(files->target, piece->entry, box_of(job, piece),
                                           place_out, err);
}

static fsdp_status finish(convert_job *job, fsdp_error *err)
{
    foreign_files *files = job->files;
    fsdp_target *target = files->target;
    files->target = NULL;
    return job->format->writer->ops->finish(target, err);
}

static fsdp_status publish(convert_job *job, fsdp_error *err)
{
    return fsdp_output_publish(&job->place, err);
}

static fsdp_status end(convert_job *job, fsdp_status status, fsdp_error *err)
{
    foreign_files *files = job->files;
    if (files && files->target)
        job->format->writer->ops->discard(files->target);
    fsdp_output_end(&job->place, status == FSDP_OK ? NULL : err);
    if (!files)
        return status;
    fsdp_free(files->entries);
    fsdp_free(files->boxes);
    fsdp_arena_release(&files->dims);
    fsdp_free(files->ties);
    fsdp_free(files);
    return status;
}

const convert_target_ops fsdp_foreign_target = {.declare = declare,
                                                .room = room,
                                                .measure = measure,
                                                .list = list,
                                                .check_place = check_place,
                                                .begin = begin,
                                                .create = create,
                                                .write = write,
                                                .finish = finish,
                                                .locate = locate,
                                                .publish = publish,
                                                .end = end};
