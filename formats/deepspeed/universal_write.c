/*
 * Writes a universal checkpoint: see universal.h. Every file is a target of the writer of torch.save files,
 * created when its first piece comes and finished with its last, so that few are open at a time.
 */
#include "formats/deepspeed/universal.h"
#include "formats/torch/torch_emit.h"

#include "base/io/io_dry.h"

#include <pthread.h>
#include <string.h>

struct fsdp_target {
    fsdp_target_opts opts;
    char *path;
    universal_plan plan;
    fsdp_target *layout;  /* of the model file, which alone has many tensors: written to nowhere */
    pthread_mutex_t lock; /* of the files' targets */
};

static const fsdp_target_ops *torch_ops(void)
{
    return fsdp_torch_writer.ops;
}

static fsdp_target_opts file_opts(const fsdp_target_opts *opts, const universal_file *file,
                                  const char *path)
{
    return (fsdp_target_opts){.io = opts->io,
                              .path = path,
                              .entries = file->entries,
                              .entry_count = file->count,
                              .sync = opts->sync};
}

/* --- measure ---------------------------------------------------------------------------------- */

static fsdp_status measure_files(const universal_plan *plan, const fsdp_target_opts *opts,
                                 int64_t *bytes_out, fsdp_error *err)
{
    *bytes_out = sizeof UNIVERSAL_FOLDER - 1;
    for (size_t f = 0; f < plan->file_count; f++) {
        fsdp_target_opts file = file_opts(opts, &plan->files[f], plan->files[f].name);
        int64_t one, bytes;
        FSDP_TRY(torch_ops()->measure(&file, &one, &bytes, err));
        if (fsdp_add_overflow(*bytes_out, bytes, bytes_out))
            return fsdp_fail(err, FSDP_ERR_LIMIT, "the checkpoint is too large");
    }
    return FSDP_OK;
}

static fsdp_status measure(const fsdp_target_opts *opts, int64_t *files_out, int64_t *bytes_out,
                           fsdp_error *err)
{
    universal_plan plan;
    fsdp_status st = universal_plan_make(opts, &plan, err);
    if (st == FSDP_OK)
        st = measure_files(&plan, opts, bytes_out, err);
    *files_out = (int64_t)plan.file_count + 1;
    universal_plan_release(&plan);
    return st;
}

/* --- files ------------------------------------------------------------------------------------ */

static fsdp_status path_of(const fsdp_target *target, const char *name, char **path_out,
                           fsdp_error *err)
{
    *path_out = fsdp_path_join(target->path, name);
    return *path_out ? FSDP_OK : fsdp_fail_memory(err, "a path");
}

static fsdp_status create_file(const fsdp_target *target, universal_file *file, fsdp_error *err)
{
    char *path;
    FSDP_TRY(path_of(target, file->name, &path, err));
    fsdp_target_opts opts = file_opts(&target->opts, file, path);
    fsdp_status st = torch_ops()->create(&opts, &file->target, err);
    fsdp_free(path);
    return st;
}

static fsdp_status finish_file(universal_file *file, fsdp_error *err)
{
    fsdp_target *finished = file->target;
    file->target = NULL;
    return torch_ops()->finish(finished, err);
}

/* Files without an element have no piece that would create them. */
static fsdp_status write_valued_files(fsdp_target *target, fsdp_error *err)
{
    for (size_t f = 0; f < target->plan.file_count; f++) {
        universal_file *file = &target->plan.files[f];
        if (atomic_load(&file->left) > 0)
            continue;
        FSDP_TRY(create_file(target, file, err));
        FSDP_TRY(finish_file(file, err));
    }
    return FSDP_OK;
}

/* A file that stores nothing has the same places. */
static fsdp_status create_layout(const fsdp_target *target, size_t number, fsdp_target **layout_out,
                                 fsdp_error *err)
{
    const universal_file *file = &target->plan.files[number];
    fsdp_target_opts opts = file_opts(&target->opts, file, file->name);
    opts.io = fsdp_io_dry();
    return torch_ops()->create(&opts, layout_out, err);
}

/* A resumed conversion has the folder. */
static fsdp_status make_folder(const fsdp_target *target, const char *name, fsdp_error *err)
{
    char *path;
    FSDP_TRY(path_of(target, name, &path, err));
    fsdp_status st =
        fsdp_io_exists(target->opts.io, path) ? FSDP_OK : fsdp_io_mkdir(target->opts.io, path, err);
    fsdp_free(path);
    return st;
}

static fsdp_status make_folders(const fsdp_target *target, fsdp_error *err)
{
    FSDP_TRY(make_folder(target, UNIVERSAL_FOLDER, err));
    FSDP_TRY(make_folder(target, UNIVERSAL_ZERO, err));
    for (size_t i = 0; i < target->plan.folder_count; i++)
        FSDP_TRY(make_folder(target, target->plan.folders[i], err));
    return FSDP_OK;
}

static void discard(fsdp_target *target)
{
    for (size_t f = 0; f < target->plan.file_count; f++)
        if (target->plan.files[f].target)
            torch_ops()->discard(target->plan.files[f].target);
    if (target->layout)
        torch_ops()->discard(target->layout);
    universal_plan_release(&target->plan);
    pthread_mutex_destroy(&target->lock);
    fsdp_free(target->path);
    fsdp_free(target);
}

static fsdp_status begin(fsdp_target *target, fsdp_error *err)
{
    target->path = fsdp_strndup(target->opts.path, strlen(target->opts.path));
    if (!target->path)
        return fsdp_fail_memory(err, "a path");
    FSDP_TRY(universal_plan_make(&target->opts, &target->plan, err));
    FSDP_TRY(create_layout(target, UNIVERSAL_MODEL, &target->layout, err));
    FSDP_TRY(make_folders(target, err));
    return write_valued_files(target, err);
}

static fsdp_status create(const fsdp_target_opts *opts, fsdp_target **target_out, fsdp_error *err)
{
    fsdp_target *target = fsdp_alloc(1, sizeof *target);
    if (!target)
        return fsdp_fail_memory(err, "a checkpoint");
    target->opts = *opts;
    pthread_mutex_init(&target->lock, NULL);
    fsdp_status st = begin(target, err);
    if (st == FSDP_OK)
        *target_out = target;
    else
        discard(target);
    return st;
}

/* --- write ------------------------------------------------------------------------------------ */

static fsdp_status open_file(fsdp_target *target, universal_file *file, fsdp_error *err)
{
    pthread_mutex_lock(&target->lock);
    fsdp_status st = file->target ? FSDP_OK : create_file(target, file, err);
    pthread_mutex_unlock(&target->lock);
    return st;
}

/* The thread that writes the last bytes finishes the file: no other one writes to it then. */
static fsdp_status write_at(fsdp_target *target, universal_slot slot,
                            const fsdp_target_piece *piece, fsdp_error *err)
{
    universal_file *file = &target->plan.files[slot.file];
    size_t element = fsdp_dtype_size(file->entries[slot.entry].dtype);
    int64_t bytes = piece->count * (int64_t)element;
    const fsdp_target_piece inner = {
        .entry = slot.entry, .first = piece->first, .count = piece->count, .data = piece->data};
    FSDP_TRY(open_file(target, file, err));
    FSDP_TRY(torch_ops()->write(file->target, &inner, err));
    bool is_last = atomic_fetch_sub(&file->left, bytes) == bytes;
    return is_last ? finish_file(file, err) : FSDP_OK;
}

static fsdp_status write(fsdp_target *target, const fsdp_target_piece *piece, fsdp_error *err)
{
    const universal_plan *plan = &target->plan;
    if (piece->count == 0 || plan->first[piece->entry] != piece->entry)
        return FSDP_OK;
    FSDP_TRY(write_at(target, plan->slots[piece->entry], piece, err));
    return plan->step == piece->entry + 1 ? write_at(target, plan->step_again, piece, err)
                                          : FSDP_OK;
}

/* --- finish ----------------------------------------------------------------------------------- */

static fsdp_status check_complete(const fsdp_target *target, fsdp_error *err)
{
    for (size_t f = 0; f < target->plan.file_count; f++)
        if (atomic_load(&target->plan.files[f].left) != 0)
            return fsdp_fail(err, FSDP_ERR_INTERNAL, "'%s' is not complete",
                             target->plan.files[f].name);
    return FSDP_OK;
}

static fsdp_status write_pointer(const fsdp_target *target, fsdp_error *err)
{
    static const char folder[] = UNIVERSAL_FOLDER;
    char *path;
    fsdp_file *file = NULL;
    FSDP_TRY(path_of(target, UNIVERSAL_POINTER, &path, err));
    fsdp_status st = fsdp_io_open(target->opts.io, path, FSDP_IO_CREATE, &file, err);
    if (st == FSDP_OK)
        st = fsdp_io_write(file, path, folder, sizeof folder - 1, 0, err);
    if (st == FSDP_OK && target->opts.sync)
        st = fsdp_io_sync(file, path, err);
    fsdp_status closed = fsdp_io_close(&file, path, st == FSDP_OK ? err : NULL);
    fsdp_free(path);
    return st == FSDP_OK ? closed : st;
}

static fsdp_status sync_folder(const fsdp_target *target, const char *name, fsdp_error *err)
{
    char *path;
    FSDP_TRY(path_of(target, name, &path, err));
    fsdp_status st = fsdp_io_sync_dir(target->opts.io, path, err);
    fsdp_free(path);
    return st;
}

static fsdp_status sync_folders(const fsdp_target *target, fsdp_error *err)
{
    for (size_t i = 0; i < target->plan.folder_count; i++)
        FSDP_TRY(sync_folder(target, target->plan.folders[i], err));
    FSDP_TRY(sync_folder(target, UNIVERSAL_ZERO, err));
    return sync_folder(target, UNIVERSAL_FOLDER, err);
}

static fsdp_status finish(fsdp_target *target, fsdp_error *err)
{
    fsdp_status st = check_complete(target, err);
    if (st == FSDP_OK)
        st = write_pointer(target, err);
    if (st == FSDP_OK && target->opts.sync)
        st = sync_folders(target, err);
    discard(target);
    return st;
}

/* --- places ----------------------------------------------------------------------------------- */

static fsdp_status place(const fsdp_target *target, size_t entry, size_t box,
                         fsdp_target_place *place_out, fsdp_error *err)
{
    universal_slot slot = target->plan.slots[target->plan.first[entry]];
    bool is_model = slot.file == UNIVERSAL_MODEL;
    fsdp_target *layout = target->layout;
    if (!is_model)
        FSDP_TRY(create_layout(target, slot.file, &layout, err));
    fsdp_status st = torch_ops()->place(layout, slot.entry, box, place_out, err);
    if (!is_model)
        torch_ops()->discard(layout);
    place_out->file = target->plan.files[slot.file].name;
    return st;
}

/* --- the format ------------------------------------------------------------------------------- */

static bool owns(const char *name)
{
    return strcmp(name, UNIVERSAL_POINTER) == 0 || strcmp(name, UNIVERSAL_FOLDER) == 0;
}

static const fsdp_target_ops ops = {measure, create, write, finish, discard, place};

const fsdp_format fsdp_format_universal = {
    .name = "universal",
    .makes = "^(optimizer_state\\.(step|param_groups)|mp_world_size)$",
    .writes_directory = true,
    .caps = {.values = true,
             .shares = true,
             .plain_names = true,
             .maps_names = true,
             .names_groups = true,
             .nests_groups = true,
             .f32_weights = true},
    .writer =
        &(const fsdp_format_writer){.ops = &ops, .owns = owns, .holds_dtype = torch_holds_dtype}};
