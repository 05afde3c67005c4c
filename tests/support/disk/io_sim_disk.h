/*
 * The data model of the simulated disk, shared by its three files: io_sim_disk.c (tree and pending
 * steps), io_sim.c (the io table) and io_sim_crash.c (the power cut). Everything is guarded by
 * sim_disk.lock.
 */
#ifndef FSDP_IO_SIM_DISK_H
#define FSDP_IO_SIM_DISK_H

#include "base/io/io.h"

#include <pthread.h>

enum { SIM_NAME_BYTES = 256 };

typedef struct sim_node sim_node;

typedef struct sim_entry {
    char name[SIM_NAME_BYTES];
    sim_node *node;
} sim_entry;

typedef struct sim_entries {
    sim_entry *items;
    size_t n, capacity;
} sim_entries;

typedef struct sim_bytes {
    char *data;
    size_t size, capacity;     /* bytes from size up to capacity are zero */
} sim_bytes;

/* A change of a file since it was synced: a write, or a resize when data is NULL. */
typedef struct sim_change {
    char *data;
    size_t offset, size;
    size_t file_size;          /* of the file, after this change */
} sim_change;

struct sim_node {
    sim_node *next;            /* all nodes of the disk, the newest first */
    bool is_directory;
    bool named;                /* has a live entry */
    bool reached;              /* by the collector */
    int open_files;
    int64_t mtime_ns;
    sim_node *copy;            /* on the new disk, while a power cut is computed */

    sim_entries live_entries, durable_entries;

    sim_bytes live, durable;
    sim_change *changes;
    size_t n_changes, change_capacity;
    size_t occupied;           /* bytes that count against the capacity */
    fsdp_file *lock_owner;
};

/* A creation (no from), a removal (no to), a rename or an exchange that is not durable yet. */
typedef struct sim_step {
    sim_node *from_dir, *to_dir;
    char from_name[SIM_NAME_BYTES], to_name[SIM_NAME_BYTES];
    sim_node *node;
    sim_node *gone;            /* the node without a name afterwards: removed or replaced by the rename */
    sim_node *back;            /* the node that an exchange puts in the place of `node` */
    bool from_synced, to_synced;
    bool chosen;               /* to be applied to the durable tree, or to survive */
    bool needs_path;           /* the directories above must be chosen as well */
} sim_step;

typedef struct sim_disk {
    fsdp_io base;
    pthread_mutex_t lock;
    size_t capacity;           /* 0: no limit */
    int64_t clock;
    sim_node *root, *nodes;
    sim_step *steps;           /* in the order they were made */
    size_t n_steps, step_capacity;
} sim_disk;

sim_disk *fsdp_sim_disk_create(const fsdp_io_ops *ops, size_t capacity);
void fsdp_sim_disk_free(sim_disk *disk);

sim_node *fsdp_sim_add_node(sim_disk *disk, bool is_directory);

/* Frees unreachable nodes. */
void fsdp_sim_collect(sim_disk *disk);

/* NULL when there is none of that name. */
sim_node *fsdp_sim_lookup(const sim_entries *entries, const char *name);
/* Puts node under name and replaces an existing entry; false without memory. */
bool fsdp_sim_set_entry(sim_entries *entries, const char *name, sim_node *node);
void fsdp_sim_remove_entry(sim_entries *entries, const char *name);

/* Sets the size; new bytes are zero. False when there is no memory. */
bool fsdp_sim_resize(sim_bytes *bytes, size_t size);

/* Names node as the step says in entries of its directories: live, durable, or those of copies, whose
 * nodes then are copies, too. NULL where the step has no such directory. */
bool fsdp_sim_apply(const sim_step *step, sim_entries *from, sim_entries *to, sim_node *node,
                    sim_node *back);

/* Memory for one more step; false when there is no memory. */
bool fsdp_sim_reserve_step(sim_disk *disk);
/* Makes the step in the live tree and records it as not durable. Room was reserved. */
bool fsdp_sim_make_step(sim_disk *disk, const sim_step *step);

/* Also chooses the steps that chosen ones depend on, so that applying all in order gives a tree. */
void fsdp_sim_complete_choice(sim_disk *disk);

/* Bytes that files occupy, removed but open ones included. */
size_t fsdp_sim_used(const sim_disk *disk);

#endif
