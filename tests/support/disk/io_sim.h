/*
 * A simulated disk, for tests: a tree of files in memory after fsdp_io that can lose power. Part of
 * fsdp_testing, not of the library.
 *
 * A power cut leaves only:
 *  - a file's bytes and size as they were when it was last synced; of later writes any subset, torn
 *    at 512 bytes, later ones without earlier ones; the size at any moment since;
 *  - a directory's entries as they were when sync_dir was last called on it; of later creations,
 *    renames and removals any subset that keeps the order of those with a name or file in common.
 *    A rename between two directories is durable once both are synced, and always as a whole: one
 *    name, never both or none.
 * Syncing a new file therefore does not save its name, nor does syncing a directory save its files.
 *
 * Paths start at the root, with or without a slash; ".." and symbolic links do not exist. Any number
 * of threads may use one disk.
 */
#ifndef FSDP_IO_SIM_H
#define FSDP_IO_SIM_H

#include "base/io/io.h"

#include "base/text.h"

/* An empty disk of that many bytes, 0 for no limit. A full disk writes short, then fails with ENOSPC. */
fsdp_status fsdp_sim_create(int64_t capacity, fsdp_io **io_out, fsdp_error *err);

/* Call after all its files are closed. Accepts NULL. */
void fsdp_sim_free(fsdp_io *sim);

/*
 * Makes a new disk with the state after a power cut at this moment, chosen by the seed; all of it is
 * durable. The old disk does not change and may be in use by other threads. NULL without memory.
 */
fsdp_io *fsdp_sim_crash(fsdp_io *sim, uint64_t seed);

/* Changes to files and directories that a power cut could lose now. */
size_t fsdp_sim_unsynced(fsdp_io *sim);

/* Prints the tree with sizes and unsynced changes, a line per entry. */
void fsdp_sim_dump(fsdp_io *sim, fsdp_text *text);

#endif
