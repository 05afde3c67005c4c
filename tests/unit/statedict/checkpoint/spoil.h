/*
 * For tests of damage: a small checkpoint on disk, whose files are changed as bytes and restored; an
 * attacker's change also corrects the hashes over it.
 */
#ifndef FSDP_SPOIL_H
#define FSDP_SPOIL_H

#include "base/text.h"
#include "formats/native/native_index.h"
#include "statedict/checkpoint/checkpoint_internal.h"

#include <criterion/criterion.h>
#include <fsdp/fsdp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SPOIL_WORLD = 2 };

static char spoil_folder[64];

static inline void spoil_make_folder(void)
{
    strcpy(spoil_folder, "/tmp/fsdp-test-XXXXXX");
    cr_assert_not_null(mkdtemp(spoil_folder));
}

static inline void spoil_remove_folder(void)
{
    fsdp_error err = {0};
    cr_assert_eq(fsdp_io_remove_tree(NULL, spoil_folder, &err), FSDP_OK, "%s", err.text);
}

/* In the test's folder. Every path is kept once. */
static inline const char *spoil_path(const char *name)
{
    enum { PATHS = 64 };
    static char paths[PATHS][200];
    char path[200];
    int i = 0;
    snprintf(path, sizeof path, "%s/%s", spoil_folder, name);
    while (paths[i][0] && strcmp(paths[i], path) != 0)
        i++;
    cr_assert_lt(i, PATHS - 1);
    return strcpy(paths[i], path);
}

static inline const char *spoil_shard(const char *dir, int number, int count)
{
    char file[FSDP_SHARD_NAME_SIZE], name[120];
    fsdp_shard_name(number, count, file);
    snprintf(name, sizeof name, "%s/%s", dir, file);
    return spoil_path(name);
}

static inline const char *spoil_manifest(const char *dir)
{
    char name[120];
    snprintf(name, sizeof name, "%s/manifest.json", dir);
    return spoil_path(name);
}

/* --- the state -------------------------------------------------------------------------------- */

typedef struct spoil_tensor {
    const char *name;
    fsdp_dtype dtype;
    int ndim;
    int64_t shape[2];
    fsdp_placement placement;
} spoil_tensor;

/* The first one is large enough to be encoded, the second is named in another way on a terminal. */
static const spoil_tensor spoil_tensors[] = {
    {"layer/weight", FSDP_F32, 2, {46, 60}, {FSDP_SHARD, 0, 0}},
    {"\x1b[31m", FSDP_F64, 1, {10, 0}, {FSDP_SHARD, 0, 0}},
    {"columns", FSDP_I32, 2, {4, 6}, {FSDP_SHARD, 1, 0}},
    {"copy", FSDP_U16, 1, {5, 0}, {FSDP_REPLICATE, 0, 0}},
};
enum { SPOIL_TENSORS = sizeof spoil_tensors / sizeof spoil_tensors[0] };
static const char *const spoil_printed[SPOIL_TENSORS] = {"layer/weight", "\\x1b[31m", "columns", "copy"};

static inline unsigned char spoil_byte(int tensor, int64_t position, size_t byte, int seed)
{
    return (unsigned char)(position * (7 + 2 * (int64_t)byte) + tensor * 41 + seed * 101 + 3);
}

/* Fills what the rank holds, or compares it. */
static inline bool spoil_visit(const fsdp_entry *entry, int tensor, int rank, int seed, bool fill)
{
    unsigned char *at = entry->data;
    size_t size = fsdp_dtype_size(entry->dtype);
    size_t parts = fsdp_layout_box_count(&entry->layout, entry->ndim, entry->shape, rank);
    for (size_t part = 0; part < parts; part++) {
        fsdp_box box;
        fsdp_layout_box_at(&entry->layout, entry->ndim, entry->shape, rank, part, &box);
        for (int64_t i = 0; i < fsdp_box_count(&box); i++) {
            int64_t left = i, lo[FSDP_MAX_DIMS] = {0};
            for (int d = box.ndim - 1; d >= 0; d--) {
                lo[d] = box.lo[d] + left % box.len[d];
                left /= box.len[d];
            }
            int64_t position = fsdp_box_position(entry->ndim, entry->shape, lo);
            for (size_t b = 0; b < size; b++, at++) {
                if (fill)
                    *at = spoil_byte(tensor, position, b, seed);
                else if (*at != spoil_byte(tensor, position, b, seed))
                    return false;
            }
        }
    }
    return true;
}

static inline fsdp_sd *spoil_state(int world, int rank, int seed)
{
    fsdp_sd *sd;
    fsdp_mesh *mesh;
    fsdp_error err = {0};
    cr_assert_eq(fsdp_mesh_create(1, (int64_t[]){world}, (const char *[]){"dp"}, NULL, &mesh, &err), FSDP_OK);
    cr_assert_eq(fsdp_sd_create(&sd, &err), FSDP_OK);
    for (int i = 0; i < SPOIL_TENSORS; i++) {
        const spoil_tensor *t = &spoil_tensors[i];
        fsdp_tensor tensor = {.dtype = t->dtype, .ndim = t->ndim, .shape = t->shape,
                              .layout = {.mesh = mesh, .placement = {t->placement}}};
        cr_assert_eq(fsdp_sd_add_tensor(sd, t->name, strlen(t->name), &tensor, &err), FSDP_OK,
                     "%s", err.text);
    }
    fsdp_value value = fsdp_value_i64(seed);
    cr_assert_eq(fsdp_sd_add_value(sd, FSDP_NAME("seed"), &value, &err), FSDP_OK);
    cr_assert_eq(fsdp_sd_allocate(sd, rank, &err), FSDP_OK, "%s", err.text);
    for (int i = 0; i < SPOIL_TENSORS; i++)
        spoil_visit(fsdp_sd_at(sd, (size_t)i), i, rank, seed, true);
    fsdp_mesh_free(mesh);
    return sd;
}

typedef struct spoil_job {
    const char *path;
    fsdp_save_opts opts;
    int seed;
} spoil_job;

static inline fsdp_status spoil_save_rank(void *user, fsdp_ctl *ctl, fsdp_error *err)
{
    spoil_job *job = user;
    fsdp_sd *sd = spoil_state(fsdp_ctl_size(ctl), fsdp_ctl_rank(ctl), job->seed);
    fsdp_status st = fsdp_sd_save(sd, ctl, job->path, &job->opts, err);
    fsdp_sd_free(sd);
    return st;
}

static inline void spoil_save(const char *dir, fsdp_kind kind, bool compress, int64_t step, int seed)
{
    fsdp_error err = {0};
    spoil_job job = {.path = spoil_path(dir), .seed = seed};
    job.opts.kind = kind;
    job.opts.compress = compress;
    job.opts.skip_fsync = true;
    job.opts.skip_view = true;
    job.opts.threads = 1;
    job.opts.step = &step;
    job.opts.run[0] = 1;
    cr_assert_eq(fsdp_ctl_run_threads(SPOIL_WORLD, spoil_save_rank, &job, &err), FSDP_OK, "%s", err.text);
}

/* The whole state, compared element by element: wrong bytes that come back as data are INTERNAL. */
static inline fsdp_status spoil_load(const char *dir, int seed, fsdp_error *err)
{
    fsdp_sd *sd = NULL;
    fsdp_load_opts opts = {.threads = 1};
    *err = (fsdp_error){0};
    FSDP_TRY(fsdp_load_full(spoil_path(dir), &opts, &sd, err));
    fsdp_status st = FSDP_OK;
    for (int i = 0; i < SPOIL_TENSORS && st == FSDP_OK; i++)
        if (!spoil_visit(fsdp_sd_at(sd, (size_t)i), i, 0, seed, false))
            st = fsdp_fail(err, FSDP_ERR_INTERNAL, "wrong bytes came back as '%s'", spoil_printed[i]);
    fsdp_sd_free(sd);
    return st;
}

/* --- files as bytes --------------------------------------------------------------------------- */

typedef struct spoil_bytes {
    char *data;
    size_t size;
} spoil_bytes;

static inline spoil_bytes spoil_read(const char *path)
{
    spoil_bytes bytes;
    fsdp_error err = {0};
    cr_assert_eq(fsdp_io_read_file(NULL, path, 64 << 20, &bytes.data, &bytes.size, &err), FSDP_OK, "%s",
                 err.text);
    return bytes;
}

static inline void spoil_write(const char *path, const char *data, size_t size)
{
    FILE *file = fopen(path, "wb");
    cr_assert_not_null(file, "%s", path);
    cr_assert_eq(fwrite(data, 1, size, file), size);
    cr_assert_eq(fclose(file), 0);
}

static inline void spoil_copy(const char *from, const char *to)
{
    spoil_bytes bytes = spoil_read(from);
    spoil_write(to, bytes.data, bytes.size);
    free(bytes.data);
}

/* --- recomputing hashes ----------------------------------------------------------------------- */

static inline void spoil_close_manifest(fsdp_text *text)
{
    static const char closing[] = "\"xxh3\": \"";
    fsdp_hash hash = fsdp_kernels_get()->hash(text->data, text->size);
    fsdp_text_add(text, closing, sizeof closing - 1);
    fsdp_text_add_hex(text, hash.bytes, sizeof hash.bytes);
    fsdp_text_add(text, "\"\n}\n", 4);
}

/* Replaces the first `from` of the manifest, and makes its hash right. Bytes may be NUL. */
static inline void spoil_edit(const char *dir, const char *from, const char *to, size_t to_size)
{
    enum { CLOSING_SIZE = 45 };
    const char *path = spoil_manifest(dir);
    spoil_bytes old = spoil_read(path);
    const char *at = strstr(old.data, from);
    cr_assert_not_null(at, "'%s' is not in the manifest:\n%s", from, old.data);
    size_t before = (size_t)(at - old.data), behind = before + strlen(from);
    fsdp_text text = {0};
    fsdp_text_add(&text, old.data, before);
    fsdp_text_add(&text, to, to_size);
    if (behind < old.size - CLOSING_SIZE)
        fsdp_text_add(&text, old.data + behind, old.size - CLOSING_SIZE - behind);
    spoil_close_manifest(&text);
    cr_assert_not(text.failed);
    spoil_write(path, text.data, text.size);
    fsdp_text_release(&text);
    free(old.data);
}

/* The entry of a shard file in the manifest. */
static inline fsdp_manifest_file spoil_file(const char *dir, int number)
{
    fsdp_manifest manifest;
    fsdp_error err = {0};
    cr_assert_eq(fsdp_manifest_read_alone(NULL, spoil_path(dir), &manifest, &err), FSDP_OK, "%s", err.text);
    fsdp_manifest_file file = manifest.files[number];
    fsdp_manifest_release(&manifest);
    return file;
}

/* The manifest's hash of an index becomes that of the bytes given. */
static inline void spoil_reseal(const char *dir, int number, const char *shard)
{
    fsdp_manifest_file file = spoil_file(dir, number);
    fsdp_hash now = fsdp_kernels_get()->hash(shard + file.index_offset, (size_t)file.index_size);
    fsdp_text before = {0}, after = {0};
    fsdp_text_add_hex(&before, file.index_hash.bytes, sizeof file.index_hash.bytes);
    fsdp_text_add_hex(&after, now.bytes, sizeof now.bytes);
    spoil_edit(dir, before.data, after.data, after.size);
    fsdp_text_release(&before);
    fsdp_text_release(&after);
}

#endif
