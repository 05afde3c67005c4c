/*
 * For tests of the commit: checkpoints of one small file, saved with the real steps, and checks of the
 * disk after a crash at every storage call.
 */
#ifndef FSDP_TINY_CHECKPOINT_H
#define FSDP_TINY_CHECKPOINT_H

#include "tests/support/disk/io_fault.h"
#include "tests/support/disk/io_sim.h"
#include "formats/native/native_index.h"
#include "statedict/commit/commit_internal.h"
#include "statedict/manifest/manifest.h"

#include <criterion/criterion.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>

enum { TINY_SIZE = 3000 };

/* An empty shard index, then bytes that encode the step. */
static inline void tiny_fill(char *bytes, int64_t step)
{
    index_head head = {.version = 1, .world = 1, .step = step, .size = sizeof head};
    memcpy(head.magic, FSDP_INDEX_MAGIC, sizeof head.magic);
    for (int i = 0; i < TINY_SIZE; i++)
        bytes[i] = (char)(i * 7 + step * 31 + 1);
    memcpy(bytes, &head, sizeof head);
}

static inline fsdp_status tiny_write_shard(fsdp_io *io, const char *dir, int64_t step,
                                           fsdp_error *err)
{
    char path[200], bytes[TINY_SIZE];
    snprintf(path, sizeof path, "%s/shard-00000-of-00001.h5", dir);
    tiny_fill(bytes, step);
    fsdp_file *file;
    FSDP_TRY(fsdp_io_open(io, path, FSDP_IO_CREATE, &file, err));
    fsdp_status status = fsdp_io_write(file, path, bytes, sizeof bytes, 0, err);
    if (status == FSDP_OK)
        status = fsdp_io_sync(file, path, err);
    fsdp_status closed = fsdp_io_close(&file, path, err);
    return status == FSDP_OK ? closed : status;
}

static inline fsdp_status tiny_manifest(int64_t step, fsdp_text *text, fsdp_error *err)
{
    char bytes[TINY_SIZE];
    tiny_fill(bytes, step);
    fsdp_manifest_file file = {.size = TINY_SIZE,
                               .index_size = sizeof(index_head),
                               .index_hash = fsdp_kernels_get()->hash(bytes, sizeof(index_head))};
    fsdp_manifest manifest = {
        .kind = FSDP_FULL, .step = step, .world = 1, .files = &file, .file_count = 1};
    FSDP_TRY(fsdp_sd_create(&manifest.sd, err));
    fsdp_status status = fsdp_manifest_encode(&manifest, text, err);
    fsdp_sd_free(manifest.sd);
    return status;
}

static inline fsdp_status tiny_save_staged(fsdp_staging *staging, int64_t step, fsdp_error *err)
{
    fsdp_text text = {0};
    fsdp_status status = tiny_write_shard(staging->io, staging->path, step, err);
    if (status == FSDP_OK)
        status = tiny_manifest(step, &text, err);
    if (status == FSDP_OK)
        status = fsdp_staging_publish(staging, text.data, text.size, err);
    if (status != FSDP_OK)
        fsdp_staging_abandon(staging, NULL);
    fsdp_staging_release(staging);
    fsdp_text_release(&text);
    return status;
}

/* Saves with the steps of save.c, on one rank. */
static inline fsdp_status tiny_save(fsdp_io *io, const char *dir, int64_t step, bool overwrite,
                                    fsdp_error *err)
{
    fsdp_staging staging;
    fsdp_staging_opts opts = {.durable = true, .overwrite = overwrite};
    FSDP_TRY(fsdp_staging_begin(io, dir, &opts, &staging, err));
    return tiny_save_staged(&staging, step, err);
}

/* Saves with the steps of save.c, which holds the lease. */
static inline fsdp_status tiny_save_held(fsdp_io *io, const char *dir, int64_t step, fsdp_error *err)
{
    fsdp_staging staging;
    fsdp_staging_opts opts = {.durable = true, .has_lease = true};
    FSDP_TRY(fsdp_staging_begin(io, dir, &opts, &staging, err));
    return tiny_save_staged(&staging, step, err);
}

/* The step of a checkpoint that a reader accepts, else -1. Fails on bytes of another step, which would be a
 * forbidden mixture. */
static inline int64_t tiny_read(fsdp_io *io, const char *dir)
{
    fsdp_manifest manifest;
    char path[200], expected[TINY_SIZE], *bytes;
    size_t size;
    if (fsdp_manifest_read(io, dir, &manifest, NULL) != FSDP_OK)
        return -1;
    int64_t step = manifest.step;
    fsdp_manifest_release(&manifest);
    snprintf(path, sizeof path, "%s/shard-00000-of-00001.h5", dir);
    cr_assert_eq(fsdp_io_read_file(io, path, TINY_SIZE, &bytes, &size, NULL), FSDP_OK);
    tiny_fill(expected, step);
    cr_assert_eq(size, (size_t)TINY_SIZE);
    cr_assert_eq(memcmp(bytes, expected, TINY_SIZE), 0, "'%s' is accepted with wrong bytes", dir);
    free(bytes);
    return step;
}

static inline fsdp_io *tiny_disk(void)
{
    fsdp_io *sim;
    fsdp_error err = {0};
    cr_assert_eq(fsdp_sim_create(0, &sim, &err), FSDP_OK, "%s", err.text);
    cr_assert_eq(fsdp_io_mkdir(sim, "/run", &err), FSDP_OK, "%s", err.text);
    cr_assert_eq(fsdp_io_sync_dir(sim, "/", &err), FSDP_OK, "%s", err.text);
    return sim;
}

static inline void tiny_must_save(fsdp_io *io, const char *dir, int64_t step, bool overwrite)
{
    fsdp_error err = {0};
    cr_assert_eq(tiny_save(io, dir, step, overwrite, &err), FSDP_OK, "%s", err.text);
    cr_assert_eq(tiny_read(io, dir), step);
}

/* --- a disk on which directories cannot be renamed --- */

typedef struct tiny_stiff {
    fsdp_io *sim, *io;
    int errnum;
} tiny_stiff;

static inline int tiny_refuse_directories(void *user, fsdp_io_call call, const char *path)
{
    (void)call;
    tiny_stiff *stiff = user;
    fsdp_file_info info;
    bool is_directory =
        stiff->sim->ops->info(stiff->sim, path, &info) == 0 && info.kind == FSDP_FILE_DIRECTORY;
    return is_directory ? -stiff->errnum : 0;
}

static inline fsdp_io *tiny_stiff_io(tiny_stiff *stiff, fsdp_io *sim, int errnum)
{
    *stiff = (tiny_stiff){.sim = sim, .errnum = errnum};
    fsdp_fault_plan plan = {.calls = 1 << FSDP_CALL_RENAME | 1 << FSDP_CALL_EXCHANGE,
                            .at = 1,
                            .forever = true,
                            .action = FSDP_FAULT_CALL,
                            .call = tiny_refuse_directories,
                            .user = stiff};
    cr_assert_eq(fsdp_io_fault_create(sim, &plan, &stiff->io, NULL), FSDP_OK);
    return stiff->io;
}

/* A disk where two directories cannot change places. */
static inline fsdp_io *tiny_no_exchange(fsdp_io *sim)
{
    fsdp_io *io;
    fsdp_fault_plan plan = {.calls = 1 << FSDP_CALL_EXCHANGE,
                            .at = 1,
                            .forever = true,
                            .action = FSDP_FAULT_ERRNO,
                            .errnum = EINVAL};
    cr_assert_eq(fsdp_io_fault_create(sim, &plan, &io, NULL), FSDP_OK);
    return io;
}

/* --- a crash before every call --- */

typedef struct tiny_crashes {
    fsdp_io *sim; /* the disk below */
    fsdp_io *io;  /* what the work under test uses */
    int seeds;
    /* Looks at what is left; must leave the work's own disk alone (copies are its to change). */
    void (*check)(fsdp_io *disk, void *user);
    void *user;
    int64_t points, states;
} tiny_crashes;

static inline void tiny_look(tiny_crashes *crashes)
{
    crashes->points++;
    for (int seed = 0; seed < crashes->seeds; seed++) {
        fsdp_io *left = fsdp_sim_crash(crashes->sim, (uint64_t)(crashes->points * 1000 + seed));
        cr_assert_not_null(left);
        crashes->check(left, crashes->user);
        fsdp_sim_free(left);
        crashes->states++;
    }
}

static inline int tiny_crash_here(void *user, fsdp_io_call call, const char *path)
{
    (void)call;
    (void)path;
    tiny_look(user);
    return 0;
}

/* inner: the disk, or a wrapper around it. */
static inline fsdp_io *tiny_crash_io(tiny_crashes *crashes, fsdp_io *sim, fsdp_io *inner)
{
    crashes->sim = sim;
    fsdp_fault_plan plan = {.calls = FSDP_CALLS_WRITES,
                            .at = 1,
                            .forever = true,
                            .action = FSDP_FAULT_CALL,
                            .call = tiny_crash_here,
                            .user = crashes};
    cr_assert_eq(fsdp_io_fault_create(inner, &plan, &crashes->io, NULL), FSDP_OK);
    return crashes->io;
}

#endif
