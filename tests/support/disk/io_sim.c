/* The simulated disk's io table: each entry locks the disk, finds the node and changes it. */
#include "tests/support/disk/io_sim.h"

#include "tests/support/disk/io_sim_disk.h"
#include "base/core/mem.h"

#include <errno.h>
#include <inttypes.h>
#include <string.h>

/* A larger file is a mistake of the test, and would exhaust memory. */
static const int64_t LARGEST_FILE = (int64_t)1 << 32;

typedef struct sim_file {
    fsdp_file base;
    sim_disk *disk;
    sim_node *node;
    bool writable;
} sim_file;

static sim_disk *lock_disk(fsdp_io *io)
{
    sim_disk *disk = (sim_disk *)io;
    pthread_mutex_lock(&disk->lock);
    return disk;
}

static int unlock_disk(sim_disk *disk, int result)
{
    pthread_mutex_unlock(&disk->lock);
    return result;
}

/* True when ".." is the next element. */
static bool leads_back(const char *path)
{
    return strncmp(path, "/..", 3) == 0 && (path[3] == '/' || path[3] == '\0');
}

/* Takes the next path element into name; 0 at the end of the path. There are no links, so a name with ".."
 * after it is nothing. */
static int next_name(const char **path, char *name)
{
    const char *start = *path + strspn(*path, "/");
    size_t length = strcspn(start, "/");
    *path = start + length;
    if (length >= SIM_NAME_BYTES)
        return -ENAMETOOLONG;
    if (leads_back(*path)) {
        *path += 3;
        return next_name(path, name);
    }
    memcpy(name, start, length);
    name[length] = '\0';
    if (strcmp(name, ".") == 0)
        return next_name(path, name);
    return strcmp(name, "..") == 0 ? -EINVAL : length > 0;
}

/*
 * Walks to the directory that holds the path's last element, whose name goes to name; for the root
 * that name is empty.
 */
static int find_parent(sim_disk *disk, const char *path, sim_node **dir_out, char *name)
{
    if (path[0] == '\0')
        return -ENOENT;
    sim_node *dir = disk->root;
    int more = next_name(&path, name);
    while (more > 0) {
        char below[SIM_NAME_BYTES];
        more = next_name(&path, below);
        if (more <= 0)
            break;
        dir = fsdp_sim_lookup(&dir->live_entries, name);
        if (!dir)
            return -ENOENT;
        if (!dir->is_directory)
            return -ENOTDIR;
        strcpy(name, below);
    }
    *dir_out = dir;
    return more;
}

static int find_node(sim_disk *disk, const char *path, sim_node **node_out)
{
    char name[SIM_NAME_BYTES];
    sim_node *dir = NULL;
    int result = find_parent(disk, path, &dir, name);
    if (result < 0)
        return result;
    *node_out = name[0] ? fsdp_sim_lookup(&dir->live_entries, name) : dir;
    return *node_out ? 0 : -ENOENT;
}

static int find_directory(sim_disk *disk, const char *path, sim_node **node_out)
{
    int result = find_node(disk, path, node_out);
    if (result < 0)
        return result;
    return (*node_out)->is_directory ? 0 : -ENOTDIR;
}

static int make_step(sim_disk *disk, const sim_step *step)
{
    if (!fsdp_sim_reserve_step(disk) || !fsdp_sim_make_step(disk, step))
        return -ENOMEM;
    return 0;
}

static int create_node(sim_disk *disk, const char *path, bool is_directory, sim_node **node_out)
{
    sim_step step = {0};
    int result = find_parent(disk, path, &step.to_dir, step.to_name);
    if (result < 0)
        return result;
    if (step.to_name[0] == '\0' || fsdp_sim_lookup(&step.to_dir->live_entries, step.to_name))
        return -EEXIST;
    step.node = fsdp_sim_add_node(disk, is_directory);
    if (!step.node)
        return -ENOMEM;
    *node_out = step.node;
    return make_step(disk, &step);
}

static const fsdp_io_ops sim_ops;

static int open_locked(sim_disk *disk, const char *path, unsigned flags, sim_file *file)
{
    unsigned mode = flags & FSDP_IO_MODE;
    int result = mode == FSDP_IO_CREATE ? create_node(disk, path, false, &file->node)
                                        : find_node(disk, path, &file->node);
    if (result < 0)
        return result;
    if (file->node->is_directory)
        return -EISDIR;
    file->base.ops = &sim_ops;
    file->disk = disk;
    file->writable = mode != FSDP_IO_READ;
    file->node->open_files++;
    return 0;
}

static int sim_open(fsdp_io *io, const char *path, unsigned flags, fsdp_file **file_out)
{
    unsigned mode = flags & FSDP_IO_MODE;
    if (mode != FSDP_IO_READ && mode != FSDP_IO_WRITE && mode != FSDP_IO_CREATE)
        return -EINVAL;
    sim_file *file = fsdp_alloc(1, sizeof *file);
    if (!file)
        return -ENOMEM;
    sim_disk *disk = lock_disk(io);
    int result = unlock_disk(disk, open_locked(disk, path, flags, file));
    if (result < 0)
        fsdp_free(file);
    else
        *file_out = &file->base;
    return result;
}

static ssize_t sim_pread(fsdp_file *base, void *data, size_t size, int64_t offset)
{
    sim_file *file = (sim_file *)base;
    if (offset < 0)
        return -EINVAL;
    pthread_mutex_lock(&file->disk->lock);
    const sim_bytes *live = &file->node->live;
    size_t at = (size_t)offset;
    size_t n = at < live->size ? live->size - at : 0;
    if (n > size)
        n = size;
    if (n > 0)
        memcpy(data, live->data + at, n);
    pthread_mutex_unlock(&file->disk->lock);
    return (ssize_t)n;
}

/* Notes a write (data not NULL) or a resize that has just been made. */
static bool note_change(sim_node *node, const void *data, size_t size, size_t offset,
                        size_t file_size)
{
    if (!fsdp_grow(&node->changes, &node->change_capacity, node->n_changes + 1,
                   sizeof *node->changes))
        return false;
    sim_change change = {.offset = offset, .size = size, .file_size = file_size};
    if (data) {
        change.data = fsdp_strndup(data, size);
        if (!change.data)
            return false;
    }
    node->changes[node->n_changes++] = change;
    return true;
}

/* The largest size up to `end` that the disk has space for. */
static size_t room_until(const sim_disk *disk, const sim_node *node, size_t end)
{
    if (disk->capacity == 0 || end <= node->occupied)
        return end;
    size_t others = fsdp_sim_used(disk) - node->occupied;
    size_t most = disk->capacity > others ? disk->capacity - others : 0;
    if (most < node->occupied)
        most = node->occupied;
    return end < most ? end : most;
}

static ssize_t write_locked(sim_disk *disk, sim_node *node, const void *data, size_t size,
                            size_t offset)
{
    size_t end = room_until(disk, node, offset + size);
    if (end <= offset && size > 0)
        return -ENOSPC;
    size = end - offset;
    size_t file_size = end > node->live.size ? end : node->live.size;
    if (size == 0)
        return 0;
    if (!note_change(node, data, size, offset, file_size) ||
        !fsdp_sim_resize(&node->live, file_size))
        return -ENOMEM;
    memcpy(node->live.data + offset, data, size);
    if (end > node->occupied)
        node->occupied = end;
    node->mtime_ns = ++disk->clock;
    return (ssize_t)size;
}

static ssize_t sim_pwrite(fsdp_file *base, const void *data, size_t size, int64_t offset)
{
    sim_file *file = (sim_file *)base;
    if (!file->writable)
        return -EBADF;
    if (offset < 0)
        return -EINVAL;
    if (offset > LARGEST_FILE || size > (size_t)(LARGEST_FILE - offset))
        return -EFBIG;
    pthread_mutex_lock(&file->disk->lock);
    ssize_t n = write_locked(file->disk, file->node, data, size, (size_t)offset);
    pthread_mutex_unlock(&file->disk->lock);
    return n;
}

static int sim_size(fsdp_file *base, int64_t *size_out)
{
    sim_file *file = (sim_file *)base;
    pthread_mutex_lock(&file->disk->lock);
    *size_out = (int64_t)file->node->live.size;
    return unlock_disk(file->disk, 0);
}

static int resize_locked(sim_disk *disk, sim_node *node, size_t size)
{
    if (size == node->live.size)
        return 0;
    if (!note_change(node, NULL, 0, 0, size) || !fsdp_sim_resize(&node->live, size))
        return -ENOMEM;
    if (node->occupied > size)
        node->occupied = size;
    node->mtime_ns = ++disk->clock;
    return 0;
}

static int check_size(const sim_file *file, int64_t size)
{
    if (!file->writable)
        return -EBADF;
    if (size < 0)
        return -EINVAL;
    return size > LARGEST_FILE ? -EFBIG : 0;
}

static int sim_resize(fsdp_file *base, int64_t size)
{
    sim_file *file = (sim_file *)base;
    int result = check_size(file, size);
    if (result < 0)
        return result;
    pthread_mutex_lock(&file->disk->lock);
    return unlock_disk(file->disk, resize_locked(file->disk, file->node, (size_t)size));
}

static int allocate_locked(sim_disk *disk, sim_node *node, size_t size)
{
    if (room_until(disk, node, size) < size)
        return -ENOSPC;
    int result = size > node->live.size ? resize_locked(disk, node, size) : 0;
    if (result == 0 && node->occupied < size)
        node->occupied = size;
    return result;
}

static int sim_allocate(fsdp_file *base, int64_t size)
{
    sim_file *file = (sim_file *)base;
    int result = check_size(file, size);
    if (result < 0)
        return result;
    pthread_mutex_lock(&file->disk->lock);
    return unlock_disk(file->disk, allocate_locked(file->disk, file->node, (size_t)size));
}

static int sync_locked(sim_node *node)
{
    if (!fsdp_sim_resize(&node->durable, node->live.size))
        return -ENOMEM;
    if (node->live.size > 0)
        memcpy(node->durable.data, node->live.data, node->live.size);
    for (size_t i = 0; i < node->n_changes; i++)
        fsdp_free(node->changes[i].data);
    node->n_changes = 0;
    return 0;
}

static int sim_sync(fsdp_file *base)
{
    sim_file *file = (sim_file *)base;
    pthread_mutex_lock(&file->disk->lock);
    return unlock_disk(file->disk, sync_locked(file->node));
}

static int sim_close(fsdp_file *base)
{
    sim_file *file = (sim_file *)base;
    pthread_mutex_lock(&file->disk->lock);
    file->node->open_files--;
    if (file->node->lock_owner == base)
        file->node->lock_owner = NULL;
    pthread_mutex_unlock(&file->disk->lock);
    fsdp_free(file);
    return 0;
}

static int sim_lock(fsdp_file *base)
{
    sim_file *file = (sim_file *)base;
    pthread_mutex_lock(&file->disk->lock);
    fsdp_file *owner = file->node->lock_owner;
    if (!owner)
        file->node->lock_owner = base;
    return unlock_disk(file->disk, owner && owner != base ? -EWOULDBLOCK : 0);
}

static bool lies_within(const sim_node *node, const sim_node *tree)
{
    if (node == tree)
        return true;
    for (size_t i = 0; i < tree->live_entries.n; i++) {
        if (lies_within(node, tree->live_entries.items[i].node))
            return true;
    }
    return false;
}

/* The rules of rename for a target that exists. */
static int check_replaced(const sim_node *node, const sim_node *replaced, bool replace)
{
    if (!replaced)
        return 0;
    if (!replace)
        return -EEXIST;
    if (replaced->is_directory && !node->is_directory)
        return -EISDIR;
    if (!replaced->is_directory && node->is_directory)
        return -ENOTDIR;
    return replaced->live_entries.n > 0 ? -ENOTEMPTY : 0;
}

static int rename_locked(sim_disk *disk, const char *from, const char *to, bool replace)
{
    sim_step step = {0};
    int result = find_parent(disk, from, &step.from_dir, step.from_name);
    if (result == 0)
        result = find_parent(disk, to, &step.to_dir, step.to_name);
    if (result < 0)
        return result;
    if (step.from_name[0] == '\0' || step.to_name[0] == '\0')
        return -EBUSY;
    step.node = fsdp_sim_lookup(&step.from_dir->live_entries, step.from_name);
    if (!step.node)
        return -ENOENT;
    step.gone = fsdp_sim_lookup(&step.to_dir->live_entries, step.to_name);
    if (step.gone == step.node)
        return replace ? 0 : -EEXIST;
    if (lies_within(step.to_dir, step.node))
        return -EINVAL;
    result = check_replaced(step.node, step.gone, replace);
    return result < 0 ? result : make_step(disk, &step);
}

static int sim_rename(fsdp_io *io, const char *from, const char *to, bool replace)
{
    sim_disk *disk = lock_disk(io);
    return unlock_disk(disk, rename_locked(disk, from, to, replace));
}

static int exchange_locked(sim_disk *disk, const char *a, const char *b)
{
    sim_step step = {0};
    int result = find_parent(disk, a, &step.from_dir, step.from_name);
    if (result == 0)
        result = find_parent(disk, b, &step.to_dir, step.to_name);
    if (result < 0)
        return result;
    if (step.from_name[0] == '\0' || step.to_name[0] == '\0')
        return -EBUSY;
    step.node = fsdp_sim_lookup(&step.from_dir->live_entries, step.from_name);
    step.back = fsdp_sim_lookup(&step.to_dir->live_entries, step.to_name);
    if (!step.node || !step.back)
        return -ENOENT;
    if (lies_within(step.to_dir, step.node) || lies_within(step.from_dir, step.back))
        return -EINVAL;
    return step.node == step.back ? 0 : make_step(disk, &step);
}

static int sim_exchange(fsdp_io *io, const char *a, const char *b)
{
    sim_disk *disk = lock_disk(io);
    return unlock_disk(disk, exchange_locked(disk, a, b));
}

static int remove_locked(sim_disk *disk, const char *path, bool directory)
{
    sim_step step = {0};
    int result = find_parent(disk, path, &step.from_dir, step.from_name);
    if (result < 0)
        return result;
    if (step.from_name[0] == '\0')
        return directory ? -EBUSY : -EISDIR;
    step.node = fsdp_sim_lookup(&step.from_dir->live_entries, step.from_name);
    if (!step.node)
        return -ENOENT;
    if (step.node->is_directory != directory)
        return directory ? -ENOTDIR : -EISDIR;
    if (step.node->live_entries.n > 0)
        return -ENOTEMPTY;
    step.gone = step.node;
    return make_step(disk, &step);
}

static int sim_unlink(fsdp_io *io, const char *path)
{
    sim_disk *disk = lock_disk(io);
    return unlock_disk(disk, remove_locked(disk, path, false));
}

static int sim_mkdir(fsdp_io *io, const char *path)
{
    sim_disk *disk = lock_disk(io);
    sim_node *node = NULL;
    return unlock_disk(disk, create_node(disk, path, true, &node));
}

static int sim_rmdir(fsdp_io *io, const char *path)
{
    sim_disk *disk = lock_disk(io);
    return unlock_disk(disk, remove_locked(disk, path, true));
}

static bool apply_to_durable(const sim_step *step)
{
    return fsdp_sim_apply(step, step->from_dir ? &step->from_dir->durable_entries : NULL,
                          step->to_dir ? &step->to_dir->durable_entries : NULL, step->node,
                          step->back);
}

static int sync_dir_locked(sim_disk *disk, const char *path)
{
    sim_node *dir = NULL;
    int result = find_directory(disk, path, &dir);
    if (result < 0)
        return result;
    for (size_t i = 0; i < disk->n_steps; i++) {
        sim_step *step = &disk->steps[i];
        step->from_synced = step->from_synced || step->from_dir == dir;
        step->to_synced = step->to_synced || step->to_dir == dir;
        step->chosen = (!step->from_dir || step->from_synced) && (!step->to_dir || step->to_synced);
        step->needs_path = false;
    }
    fsdp_sim_complete_choice(disk);
    size_t left = 0;
    for (size_t i = 0; i < disk->n_steps; i++) {
        if (!disk->steps[i].chosen)
            disk->steps[left++] = disk->steps[i];
        else if (!apply_to_durable(&disk->steps[i]))
            result = -ENOMEM;
    }
    disk->n_steps = left;
    fsdp_sim_collect(disk);
    return result;
}

static int sim_sync_dir(fsdp_io *io, const char *path)
{
    sim_disk *disk = lock_disk(io);
    return unlock_disk(disk, sync_dir_locked(disk, path));
}

/* A copy of the entries, so that visit may use the disk. */
static int copy_entries(sim_disk *disk, const char *path, sim_entries *copy_out)
{
    sim_node *dir = NULL;
    int result = find_directory(disk, path, &dir);
    if (result < 0 || dir->live_entries.n == 0)
        return result;
    copy_out->n = dir->live_entries.n;
    copy_out->items = fsdp_alloc(copy_out->n, sizeof *copy_out->items);
    if (!copy_out->items)
        return -ENOMEM;
    memcpy(copy_out->items, dir->live_entries.items, copy_out->n * sizeof *copy_out->items);
    return 0;
}

static int sim_list(fsdp_io *io, const char *path, int (*visit)(void *user, const char *name),
                    void *user)
{
    sim_entries copy = {0};
    sim_disk *disk = lock_disk(io);
    int result = unlock_disk(disk, copy_entries(disk, path, &copy));
    for (size_t i = 0; result == 0 && i < copy.n; i++) {
        if (visit(user, copy.items[i].name) != 0)
            break;
    }
    fsdp_free(copy.items);
    return result;
}

static int sim_info(fsdp_io *io, const char *path, fsdp_file_info *info_out)
{
    sim_disk *disk = lock_disk(io);
    sim_node *node = NULL;
    int result = find_node(disk, path, &node);
    if (result == 0) {
        info_out->kind = node->is_directory ? FSDP_FILE_DIRECTORY : FSDP_FILE_REGULAR;
        info_out->size = (int64_t)node->live.size;
        info_out->mtime_ns = node->mtime_ns;
        info_out->device = (uintptr_t)disk;
        info_out->node = (uintptr_t)node;
        info_out->is_own = true;
    }
    return unlock_disk(disk, result);
}

static int sim_space(fsdp_io *io, const char *path, fsdp_space *space_out)
{
    sim_disk *disk = lock_disk(io);
    sim_node *node = NULL;
    int result = find_node(disk, path, &node);
    size_t used = fsdp_sim_used(disk);
    space_out->free_files = INT64_MAX;
    space_out->free_bytes = INT64_MAX;
    space_out->write_errno = 0;
    space_out->in_memory = false;
    if (disk->capacity > 0)
        space_out->free_bytes = disk->capacity > used ? (int64_t)(disk->capacity - used) : 0;
    return unlock_disk(disk, result);
}

static const fsdp_io_ops sim_ops = {
    .name = "sim",
    .open = sim_open,
    .pread = sim_pread,
    .pwrite = sim_pwrite,
    .size = sim_size,
    .resize = sim_resize,
    .allocate = sim_allocate,
    .sync = sim_sync,
    .close = sim_close,
    .lock = sim_lock,
    .rename = sim_rename,
    .exchange = sim_exchange,
    .unlink = sim_unlink,
    .mkdir = sim_mkdir,
    .rmdir = sim_rmdir,
    .sync_dir = sim_sync_dir,
    .list = sim_list,
    .info = sim_info,
    .space = sim_space,
};

fsdp_status fsdp_sim_create(int64_t capacity, fsdp_io **io_out, fsdp_error *err)
{
    *io_out = NULL;
    sim_disk *disk = fsdp_sim_disk_create(&sim_ops, capacity > 0 ? (size_t)capacity : 0);
    if (!disk)
        return fsdp_fail_memory(err, "a simulated disk");
    *io_out = &disk->base;
    return FSDP_OK;
}

void fsdp_sim_free(fsdp_io *sim)
{
    fsdp_sim_disk_free((sim_disk *)sim);
}

size_t fsdp_sim_unsynced(fsdp_io *sim)
{
    sim_disk *disk = lock_disk(sim);
    size_t n = disk->n_steps;
    for (const sim_node *node = disk->nodes; node; node = node->next) {
        if (node->named)
            n += node->n_changes;
    }
    pthread_mutex_unlock(&disk->lock);
    return n;
}

static void dump_directory(const sim_node *dir, int depth, fsdp_text *text)
{
    for (size_t i = 0; i < dir->live_entries.n; i++) {
        const sim_entry *entry = &dir->live_entries.items[i];
        const sim_node *node = entry->node;
        const char *durable =
            fsdp_sim_lookup(&dir->durable_entries, entry->name) == node ? "" : " (name not synced)";
        if (node->is_directory) {
            fsdp_text_addf(text, "%*s%s/%s\n", depth * 2, "", entry->name, durable);
            dump_directory(node, depth + 1, text);
        } else {
            fsdp_text_addf(text, "%*s%s %zu bytes, %zu synced, %zu changes since%s\n", depth * 2,
                           "", entry->name, node->live.size, node->durable.size, node->n_changes,
                           durable);
        }
    }
}

void fsdp_sim_dump(fsdp_io *sim, fsdp_text *text)
{
    sim_disk *disk = lock_disk(sim);
    dump_directory(disk->root, 0, text);
    for (size_t i = 0; i < disk->n_steps; i++) {
        const sim_step *step = &disk->steps[i];
        fsdp_text_addf(text, "not synced: '%s' -> '%s'\n", step->from_name, step->to_name);
    }
    pthread_mutex_unlock(&disk->lock);
}
