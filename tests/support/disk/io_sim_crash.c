/*
 * The simulated power cut: chooses by a seed the unsynced changes that survive, and builds the disk
 * after the cut. See io_sim.h for the rules.
 */
#include "tests/support/disk/io_sim.h"

#include "tests/support/disk/io_sim_disk.h"
#include "base/core/mem.h"

#include <string.h>

enum { SECTOR_BYTES = 512 };

/* The part of a group of changes that survives. */
typedef enum survival { SURVIVES_NONE, SURVIVES_ALL, SURVIVES_PREFIX, SURVIVES_SOME } survival;

typedef struct power_cut {
    uint64_t random;
    /* in some cuts all file contents, or all names, are kept or lost together */
    bool files_forced, names_forced;
    survival files, names;
} power_cut;

static uint64_t next_random(power_cut *cut)
{
    /* splitmix64 */
    uint64_t z = (cut->random += 0x9E3779B97F4A7C15u);
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return z ^ z >> 31;
}

static size_t random_below(power_cut *cut, size_t limit)
{
    return (size_t)(next_random(cut) % limit);
}

static bool happens(power_cut *cut, unsigned percent)
{
    return random_below(cut, 100) < percent;
}

static survival random_survival(power_cut *cut)
{
    static const survival choices[] = {SURVIVES_NONE, SURVIVES_ALL,  SURVIVES_PREFIX,
                                       SURVIVES_SOME, SURVIVES_SOME, SURVIVES_SOME};
    return choices[random_below(cut, sizeof choices / sizeof choices[0])];
}

static power_cut plan_cut(uint64_t seed)
{
    power_cut cut = {.random = seed};
    cut.files_forced = happens(&cut, 25);
    cut.names_forced = happens(&cut, 25);
    cut.files = happens(&cut, 50) ? SURVIVES_ALL : SURVIVES_NONE;
    cut.names = happens(&cut, 50) ? SURVIVES_ALL : SURVIVES_NONE;
    return cut;
}

/* Copies those 512-byte sectors of a write that reached the disk. */
static void tear_write(power_cut *cut, const sim_change *change, char *content)
{
    for (size_t done = 0; done < change->size;) {
        size_t at = change->offset + done;
        size_t n = SECTOR_BYTES - at % SECTOR_BYTES;
        if (n > change->size - done)
            n = change->size - done;
        if (happens(cut, 50))
            memcpy(content + at, change->data + done, n);
        done += n;
    }
}

static void keep_change(power_cut *cut, const sim_change *change, bool whole, sim_bytes *content)
{
    if (!change->data) /* a resize: what it cut off reads as zeros if the file grows again */
        memset(content->data + change->file_size, 0, content->size - change->file_size);
    else if (whole)
        memcpy(content->data + change->offset, change->data, change->size);
    else
        tear_write(cut, change, content->data);
}

/* The file's size is that after the first `sized` changes, for any surviving bytes. */
static void keep_changes(power_cut *cut, const sim_node *node, survival kept, size_t sized,
                         sim_bytes *content)
{
    unsigned percent = (unsigned)random_below(cut, 101);
    for (size_t i = 0; i < node->n_changes; i++) {
        const sim_change *change = &node->changes[i];
        bool chosen = kept == SURVIVES_ALL || (kept == SURVIVES_PREFIX && i < sized) ||
                      (kept == SURVIVES_SOME && happens(cut, percent));
        if (!change->data)
            chosen = i < sized;
        bool torn = kept == SURVIVES_SOME || (kept == SURVIVES_PREFIX && i + 1 == sized);
        if (chosen)
            keep_change(cut, change, !torn || happens(cut, 50), content);
    }
}

static size_t size_after(const sim_node *node, size_t n)
{
    return n > 0 ? node->changes[n - 1].file_size : node->durable.size;
}

/* Fills content with the bytes of the file after the cut. */
static bool surviving_bytes(power_cut *cut, const sim_node *node, sim_bytes *content)
{
    survival kept = cut->files_forced ? cut->files : random_survival(cut);
    size_t largest = node->durable.size;
    for (size_t i = 0; i < node->n_changes; i++) {
        if (largest < node->changes[i].file_size)
            largest = node->changes[i].file_size;
    }
    if (!fsdp_sim_resize(content, largest))
        return false;
    if (node->durable.size > 0)
        memcpy(content->data, node->durable.data, node->durable.size);
    size_t sized = kept == SURVIVES_ALL    ? node->n_changes
                   : kept == SURVIVES_NONE ? 0
                                           : random_below(cut, node->n_changes + 1);
    if (kept != SURVIVES_NONE)
        keep_changes(cut, node, kept, sized, content);
    return fsdp_sim_resize(content, size_after(node, sized));
}

/* A rename between two directories is chosen with the one it goes to. */
static const sim_node *home_of(const sim_step *step)
{
    return step->to_dir ? step->to_dir : step->from_dir;
}

static void choose_in_directory(power_cut *cut, sim_disk *disk, const sim_node *dir)
{
    size_t n = 0;
    for (size_t i = 0; i < disk->n_steps; i++)
        n += home_of(&disk->steps[i]) == dir;
    if (n == 0)
        return;
    survival kept = cut->names_forced ? cut->names : random_survival(cut);
    size_t prefix = random_below(cut, n + 1);
    size_t position = 0;
    for (size_t i = 0; i < disk->n_steps; i++) {
        sim_step *step = &disk->steps[i];
        if (home_of(step) != dir)
            continue;
        step->chosen = kept == SURVIVES_ALL || (kept == SURVIVES_PREFIX && position < prefix) ||
                       (kept == SURVIVES_SOME && happens(cut, 50));
        step->needs_path = false;
        position++;
    }
}

/* Gives each node of the old disk a copy on the new one, with the bytes that survive. */
static bool copy_nodes(power_cut *cut, sim_disk *from, sim_disk *to)
{
    for (sim_node *node = from->nodes; node; node = node->next) {
        node->copy = node == from->root ? to->root : fsdp_sim_add_node(to, node->is_directory);
        if (!node->copy)
            return false;
        node->copy->mtime_ns = node->mtime_ns;
        if (node->is_directory)
            continue;
        if (!surviving_bytes(cut, node, &node->copy->durable))
            return false;
        node->copy->occupied = node->copy->durable.size;
    }
    return true;
}

static bool copy_durable_names(const sim_disk *from)
{
    for (const sim_node *node = from->nodes; node; node = node->next) {
        for (size_t i = 0; i < node->durable_entries.n; i++) {
            const sim_entry *entry = &node->durable_entries.items[i];
            if (!fsdp_sim_set_entry(&node->copy->durable_entries, entry->name, entry->node->copy))
                return false;
        }
    }
    return true;
}

static bool apply_chosen_steps(const sim_disk *from)
{
    for (size_t i = 0; i < from->n_steps; i++) {
        const sim_step *step = &from->steps[i];
        if (!step->chosen)
            continue;
        if (!fsdp_sim_apply(step, step->from_dir ? &step->from_dir->copy->durable_entries : NULL,
                            step->to_dir ? &step->to_dir->copy->durable_entries : NULL,
                            step->node->copy, step->back ? step->back->copy : NULL))
            return false;
    }
    return true;
}

/* Makes the durable tree the live one. */
static bool show_durable(sim_disk *disk)
{
    for (sim_node *node = disk->nodes; node; node = node->next) {
        if (!fsdp_sim_resize(&node->live, node->durable.size))
            return false;
        if (node->durable.size > 0)
            memcpy(node->live.data, node->durable.data, node->durable.size);
        for (size_t i = 0; i < node->durable_entries.n; i++) {
            const sim_entry *entry = &node->durable_entries.items[i];
            entry->node->named = true;
            if (!fsdp_sim_set_entry(&node->live_entries, entry->name, entry->node))
                return false;
        }
    }
    return true;
}

static bool crash_locked(power_cut *cut, sim_disk *from, sim_disk *to)
{
    for (sim_node *node = from->nodes; node; node = node->next)
        choose_in_directory(cut, from, node);
    fsdp_sim_complete_choice(from);
    if (!copy_nodes(cut, from, to) || !copy_durable_names(from) || !apply_chosen_steps(from))
        return false;
    fsdp_sim_collect(to);
    to->clock = from->clock;
    return show_durable(to);
}

fsdp_io *fsdp_sim_crash(fsdp_io *sim, uint64_t seed)
{
    sim_disk *from = (sim_disk *)sim;
    power_cut cut = plan_cut(seed);
    pthread_mutex_lock(&from->lock);
    sim_disk *to = fsdp_sim_disk_create(sim->ops, from->capacity);
    bool whole = to && crash_locked(&cut, from, to);
    pthread_mutex_unlock(&from->lock);
    if (to)
        to->base.host = sim->host;
    if (!whole) {
        fsdp_sim_disk_free(to);
        return NULL;
    }
    return &to->base;
}
