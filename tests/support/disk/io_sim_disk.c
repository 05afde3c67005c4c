/*
 * The simulated disk's tree: nodes, entries, and the steps that no sync_dir has made durable yet.
 * See io_sim_disk.h.
 */
#include "tests/support/disk/io_sim_disk.h"

#include "base/core/mem.h"

#include <string.h>

static void free_node(sim_node *node)
{
    for (size_t i = 0; i < node->n_changes; i++)
        fsdp_free(node->changes[i].data);
    fsdp_free(node->changes);
    fsdp_free(node->live.data);
    fsdp_free(node->durable.data);
    fsdp_free(node->live_entries.items);
    fsdp_free(node->durable_entries.items);
    fsdp_free(node);
}

sim_disk *fsdp_sim_disk_create(const fsdp_io_ops *ops, size_t capacity)
{
    sim_disk *disk = fsdp_alloc(1, sizeof *disk);
    if (!disk)
        return NULL;
    disk->base.ops = ops;
    disk->capacity = capacity;
    pthread_mutex_init(&disk->lock, NULL);
    disk->root = fsdp_sim_add_node(disk, true);
    if (!disk->root) {
        fsdp_sim_disk_free(disk);
        return NULL;
    }
    disk->root->named = true;
    return disk;
}

void fsdp_sim_disk_free(sim_disk *disk)
{
    if (!disk)
        return;
    while (disk->nodes) {
        sim_node *next = disk->nodes->next;
        free_node(disk->nodes);
        disk->nodes = next;
    }
    pthread_mutex_destroy(&disk->lock);
    fsdp_free(disk->steps);
    fsdp_free(disk);
}

sim_node *fsdp_sim_add_node(sim_disk *disk, bool is_directory)
{
    sim_node *node = fsdp_alloc(1, sizeof *node);
    if (!node)
        return NULL;
    node->is_directory = is_directory;
    node->mtime_ns = ++disk->clock;
    node->next = disk->nodes;
    disk->nodes = node;
    return node;
}

static void reach(sim_node *node)
{
    if (!node || node->reached)
        return;
    node->reached = true;
    for (size_t i = 0; i < node->live_entries.n; i++)
        reach(node->live_entries.items[i].node);
    for (size_t i = 0; i < node->durable_entries.n; i++)
        reach(node->durable_entries.items[i].node);
}

void fsdp_sim_collect(sim_disk *disk)
{
    for (sim_node *node = disk->nodes; node; node = node->next)
        node->reached = false;
    reach(disk->root);
    for (size_t i = 0; i < disk->n_steps; i++) {
        reach(disk->steps[i].node);
        reach(disk->steps[i].gone);
        reach(disk->steps[i].back);
        reach(disk->steps[i].from_dir);
        reach(disk->steps[i].to_dir);
    }
    for (sim_node **link = &disk->nodes; *link;) {
        sim_node *node = *link;
        if (node->reached || node->open_files > 0) {
            link = &node->next;
            continue;
        }
        *link = node->next;
        free_node(node);
    }
}

static sim_entry *find_entry(const sim_entries *entries, const char *name)
{
    for (size_t i = 0; i < entries->n; i++) {
        if (strcmp(entries->items[i].name, name) == 0)
            return &entries->items[i];
    }
    return NULL;
}

sim_node *fsdp_sim_lookup(const sim_entries *entries, const char *name)
{
    sim_entry *entry = find_entry(entries, name);
    return entry ? entry->node : NULL;
}

bool fsdp_sim_set_entry(sim_entries *entries, const char *name, sim_node *node)
{
    sim_entry *entry = find_entry(entries, name);
    if (!entry) {
        if (!fsdp_grow(&entries->items, &entries->capacity, entries->n + 1, sizeof *entry))
            return false;
        entry = &entries->items[entries->n++];
        strcpy(entry->name, name);
    }
    entry->node = node;
    return true;
}

void fsdp_sim_remove_entry(sim_entries *entries, const char *name)
{
    sim_entry *entry = find_entry(entries, name);
    if (!entry)
        return;
    sim_entry *last = &entries->items[--entries->n];
    if (entry != last)
        *entry = *last;
}

bool fsdp_sim_resize(sim_bytes *bytes, size_t size)
{
    size_t before = bytes->capacity;
    if (!fsdp_grow(&bytes->data, &bytes->capacity, size, 1))
        return false;
    if (bytes->capacity > before)
        memset(bytes->data + before, 0, bytes->capacity - before);
    if (size < bytes->size)
        memset(bytes->data + size, 0, bytes->size - size);
    bytes->size = size;
    return true;
}

bool fsdp_sim_reserve_step(sim_disk *disk)
{
    return fsdp_grow(&disk->steps, &disk->step_capacity, disk->n_steps + 1, sizeof *disk->steps);
}

bool fsdp_sim_apply(const sim_step *step, sim_entries *from, sim_entries *to, sim_node *node,
                    sim_node *back)
{
    if (to && !fsdp_sim_set_entry(to, step->to_name, node))
        return false;
    if (from && back)
        return fsdp_sim_set_entry(from, step->from_name, back);
    if (from)
        fsdp_sim_remove_entry(from, step->from_name);
    return true;
}

bool fsdp_sim_make_step(sim_disk *disk, const sim_step *step)
{
    if (!fsdp_sim_apply(step, step->from_dir ? &step->from_dir->live_entries : NULL,
                        step->to_dir ? &step->to_dir->live_entries : NULL, step->node, step->back))
        return false;
    if (step->gone)
        step->gone->named = false;
    if (step->to_dir)
        step->node->named = true;
    disk->steps[disk->n_steps++] = *step;
    disk->clock++;
    if (step->to_dir)
        step->to_dir->mtime_ns = disk->clock;
    if (step->from_dir)
        step->from_dir->mtime_ns = disk->clock;
    return true;
}

static bool uses_name(const sim_step *step, const sim_node *dir, const char *name)
{
    if (!dir)
        return false;
    return (step->from_dir == dir && strcmp(step->from_name, name) == 0) ||
           (step->to_dir == dir && strcmp(step->to_name, name) == 0);
}

/* True when the later step could not have happened without the earlier one. */
static bool stands_on(const sim_step *later, const sim_step *earlier)
{
    if (later->node == earlier->node || later->gone == earlier->node)
        return true;
    if ((later->back && later->back == earlier->node) ||
        (earlier->back && (earlier->back == later->node || earlier->back == later->gone)))
        return true;
    if (uses_name(earlier, later->from_dir, later->from_name) ||
        uses_name(earlier, later->to_dir, later->to_name))
        return true;
    /* a directory that goes had to be emptied */
    return later->gone && (earlier->from_dir == later->gone || earlier->to_dir == later->gone);
}

/* True when the step moves a file to another directory, with which it must not vanish. */
static bool moves_away(const sim_step *step)
{
    return step->from_dir && step->to_dir && step->from_dir != step->to_dir;
}

void fsdp_sim_complete_choice(sim_disk *disk)
{
    for (size_t i = disk->n_steps; i-- > 0;) {
        sim_step *later = &disk->steps[i];
        if (!later->chosen)
            continue;
        bool needs_path = later->needs_path || moves_away(later);
        for (size_t j = 0; j < i; j++) {
            sim_step *earlier = &disk->steps[j];
            bool on_path = needs_path && later->to_dir && earlier->node == later->to_dir;
            if (on_path)
                earlier->needs_path = true;
            if (on_path || stands_on(later, earlier))
                earlier->chosen = true;
        }
    }
}

size_t fsdp_sim_used(const sim_disk *disk)
{
    size_t used = 0;
    for (const sim_node *node = disk->nodes; node; node = node->next) {
        if (node->named || node->open_files > 0)
            used += node->occupied;
    }
    return used;
}
