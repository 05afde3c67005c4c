/*
 * Damage by accident: flipped bits, truncated, swapped, missing and wrong files. Our reader finds
 * damage in all that it uses, names file, tensor and block, and never returns it as data; damage in
 * what only other programs use (HDF5's own structures, gaps) changes nothing.
 */
#include "tests/unit/statedict/checkpoint/spoil.h"

#include "tests/support/disk/io_fault.h"
#include "tests/support/sample_state.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>

TestSuite(damage, .init = spoil_make_folder, .fini = spoil_remove_folder, .timeout = 240);

/* --- findings --------------------------------------------------------------------------------- */

typedef struct last_finding {
    int count, unreadable;
    char file[80], tensor[80], text[FSDP_ERROR_TEXT];
    int64_t block;
} last_finding;

static void keep_finding(void *user, const fsdp_finding *finding)
{
    last_finding *last = user;
    last->count++;
    last->unreadable += finding->unreadable;
    last->block = finding->block;
    snprintf(last->file, sizeof last->file, "%s", finding->file);
    snprintf(last->tensor, sizeof last->tensor, "%s", finding->tensor);
    snprintf(last->text, sizeof last->text, "%s", finding->text);
}

static fsdp_status verify(const char *dir, last_finding *last, fsdp_verify_summary *summary)
{
    fsdp_error err = {0};
    *last = (last_finding){.block = -1};
    fsdp_verify_opts opts = {
        .level = FSDP_VERIFY_DATA, .threads = 1, .finding = keep_finding, .finding_context = last};
    return fsdp_checkpoint_verify(spoil_path(dir), &opts, summary, &err);
}

/* --- owners of bytes -------------------------------------------------------------------------- */

enum { NOBODYS = -1, INDEX = -2 };

typedef struct byte_owner {
    int tensor; /* or NOBODYS, INDEX */
    int64_t block;
    bool encoded;
} byte_owner;

static void own_range(byte_owner *owners, int64_t offset, int64_t size, byte_owner owner)
{
    for (int64_t i = offset; i < offset + size; i++)
        owners[i] = owner;
}

static void own_box(byte_owner *owners, const fsdp_stored_box *box)
{
    for (int64_t block = 0; block < box->block_count; block++) {
        int64_t first, count, offset, size;
        byte_owner owner = {(int)box->tensor, block, box->encoded};
        if (box->encoded) {
            own_range(owners, box->frames[block].offset, box->frames[block].size, owner);
            continue;
        }
        fsdp_file_runs runs;
        fsdp_block_range(box, block, &first, &count);
        fsdp_file_runs_begin(
            &runs,
            &(fsdp_file_place){box->ndim, box->len, box->stride, box->offset, box->element_size},
            first, count);
        while (fsdp_file_runs_next(&runs, &offset, &size))
            own_range(owners, offset, size, owner);
    }
}

static byte_owner *find_owners(const char *dir, int number)
{
    fsdp_checkpoint *checkpoint;
    fsdp_error err = {0};
    cr_assert_eq(fsdp_checkpoint_open(spoil_path(dir), NULL, &checkpoint, &err), FSDP_OK, "%s",
                 err.text);
    const fsdp_manifest_file *file = &checkpoint->manifest.files[number];
    byte_owner *owners = malloc((size_t)file->size * sizeof *owners);
    own_range(owners, 0, file->size, (byte_owner){NOBODYS, -1, false});
    own_range(owners, file->index_offset, file->index_size, (byte_owner){INDEX, -1, false});
    const fsdp_shard_reader *reader = fsdp_native_of(checkpoint)->readers[number];
    for (size_t i = 0; i < fsdp_shard_box_count(reader); i++)
        own_box(owners, fsdp_shard_box_at(reader, i));
    fsdp_checkpoint_close(checkpoint);
    return owners;
}

/* --- flips ------------------------------------------------------------------------------------ */

typedef struct flip_counts {
    int64_t data, index, nobodys, loads;
    int64_t same; /* in a frame, which decodes to the same bytes in any case */
} flip_counts;

static void write_byte(int fd, int64_t at, char byte)
{
    cr_assert_eq(pwrite(fd, &byte, 1, at), 1);
}

/* A load reads one copy of what every rank of a local checkpoint stores. */
static bool load_reads(const byte_owner *owner, int number)
{
    return number == 0 || spoil_tensors[owner->tensor].placement.kind != FSDP_REPLICATE;
}

static void look_at_data_flip(const char *dir, const char *file, const byte_owner *owner,
                              int64_t at, bool load, flip_counts *counts)
{
    last_finding last;
    fsdp_error err;
    fsdp_status found = verify(dir, &last, NULL);
    if (found == FSDP_OK && owner->encoded) {
        counts->same++;
        cr_assert_eq(spoil_load(dir, 1, &err), FSDP_OK, "%s", err.text);
        return;
    }
    counts->data++;
    cr_assert_eq(found, FSDP_DIFFERS, "%s byte %lld", file, (long long)at);
    cr_assert_eq(last.count, 1);
    cr_assert_str_eq(last.file, file);
    cr_assert_str_eq(last.tensor, spoil_printed[owner->tensor]);
    cr_assert_eq(last.block, owner->block);
    if (!load)
        return;
    counts->loads++;
    cr_assert_eq(spoil_load(dir, 1, &err), FSDP_ERR_DAMAGED, "%s", err.text);
    cr_assert_not_null(strstr(err.text, file), "%s", err.text);
    cr_assert_not_null(strstr(err.text, spoil_printed[owner->tensor]), "%s", err.text);
    cr_assert_not_null(strstr(err.text, "block "), "%s", err.text);
}

static void look_at_index_flip(const char *dir, const char *file, int64_t at, flip_counts *counts)
{
    last_finding last;
    fsdp_error err;
    counts->index++;
    cr_assert_eq(verify(dir, &last, NULL), FSDP_DIFFERS, "%s byte %lld", file, (long long)at);
    cr_assert_eq(last.count, 1);
    cr_assert_str_eq(last.file, file);
    cr_assert_not_null(strstr(last.text, "index is damaged"), "%s", last.text);
    if (at % 7 == 0) {
        cr_assert_eq(spoil_load(dir, 1, &err), FSDP_ERR_DAMAGED);
        cr_assert_not_null(strstr(err.text, file), "%s", err.text);
    }
}

static void look_at_unused_flip(const char *dir, const char *file, int64_t at, flip_counts *counts)
{
    last_finding last;
    fsdp_error err;
    counts->nobodys++;
    cr_assert_eq(verify(dir, &last, NULL), FSDP_OK, "%s byte %lld: %s", file, (long long)at,
                 last.text);
    if (at % 7 == 0)
        cr_assert_eq(spoil_load(dir, 1, &err), FSDP_OK, "%s", err.text);
}

static void flip_file(const char *dir, int number, int count, int64_t every, flip_counts *counts)
{
    char file[FSDP_SHARD_NAME_SIZE];
    fsdp_shard_name(number, count, file);
    const char *path = spoil_shard(dir, number, count);
    spoil_bytes bytes = spoil_read(path);
    byte_owner *owners = find_owners(dir, number);
    int fd = open(path, O_WRONLY);
    for (int64_t at = number; at < (int64_t)bytes.size; at += every) {
        write_byte(fd, at, (char)(bytes.data[at] ^ 1 << at % 8));
        if (owners[at].tensor == INDEX)
            look_at_index_flip(dir, file, at, counts);
        else if (owners[at].tensor == NOBODYS)
            look_at_unused_flip(dir, file, at, counts);
        else
            look_at_data_flip(dir, file, &owners[at], at,
                              at % 5 == 0 && load_reads(&owners[at], number), counts);
        write_byte(fd, at, bytes.data[at]);
    }
    close(fd);
    free(owners);
    free(bytes.data);
}

static void flip_all(fsdp_kind kind, bool compress, int64_t every)
{
    flip_counts counts = {0};
    fsdp_error err;
    int files = kind == FSDP_FULL ? 1 : SPOIL_WORLD;
    spoil_save("c", kind, compress, 4, 1);
    cr_assert_eq(spoil_load("c", 1, &err), FSDP_OK, "%s", err.text);
    for (int f = 0; f < files; f++)
        flip_file("c", f, files, every * test_sample(1), &counts);
    cr_assert(counts.data > 0 && counts.index > 0 && counts.loads > 0);
    cr_assert_lt(counts.same * 50, counts.data);
    cr_log_info("kind %d, compressed %d: found %lld flips in data and %lld in indexes; %lld frames "
                "mean the same, "
                "%lld bytes are not ours\n",
                (int)kind, compress, (long long)counts.data, (long long)counts.index,
                (long long)counts.same, (long long)counts.nobodys);
}

Test(damage, every_flipped_byte_of_a_sharded_checkpoint_is_found)
{
    flip_all(FSDP_SHARDED, false, 1);
}

Test(damage, every_flipped_byte_of_a_compressed_checkpoint_is_found)
{
    flip_all(FSDP_SHARDED, true, 1);
}

Test(damage, flipped_bytes_of_a_full_checkpoint_are_found)
{
    flip_all(FSDP_FULL, false, 3);
}

Test(damage, flipped_bytes_of_a_local_checkpoint_are_found)
{
    flip_all(FSDP_LOCAL, false, 3);
}

Test(damage, every_flipped_bit_of_the_manifest_is_found)
{
    static const char version[] = "{\n\"fsdp\": {\"major\": ";
    fsdp_error err = {0};
    spoil_save("c", FSDP_SHARDED, false, 4, 1);
    const char *path = spoil_manifest("c");
    spoil_bytes bytes = spoil_read(path);
    int newer = 0;
    for (size_t bit = 0; bit < 8 * bytes.size; bit++) {
        bytes.data[bit / 8] = (char)(bytes.data[bit / 8] ^ 1 << bit % 8);
        fsdp_manifest manifest;
        fsdp_status st = fsdp_manifest_decode(bytes.data, bytes.size, path, &manifest, &err);
        /* the major version may have become a later one, which is told in its own way */
        newer += st == FSDP_ERR_NOT_FOUND && bit / 8 == sizeof version - 1;
        cr_assert(st == FSDP_ERR_DAMAGED || bit / 8 == sizeof version - 1, "bit %zu: %d", bit, st);
        cr_assert_neq(st, FSDP_OK);
        cr_assert_not_null(strstr(err.text, path), "%s", err.text);
        bytes.data[bit / 8] = (char)(bytes.data[bit / 8] ^ 1 << bit % 8);
    }
    cr_assert_gt(newer, 0);
    bytes.data[100] ^= 4;
    spoil_write(path, bytes.data, bytes.size);
    free(bytes.data);
    last_finding last;
    cr_assert_eq(verify("c", &last, NULL), FSDP_DIFFERS);
    cr_assert_str_eq(last.file, "manifest.json");
    cr_assert_eq(spoil_load("c", 1, &err), FSDP_ERR_DAMAGED);
    cr_assert_not_null(strstr(err.text, path), "%s", err.text);
}

/* --- several blocks --------------------------------------------------------------------------- */

enum { BLOCK_ROWS = 1024, CHUNK_ROWS = 256, ROWS = 2560 };

/* 10 MiB in three blocks or ten chunks; rank 0 alone. */
static void save_blocks(bool compress)
{
    fsdp_error err = {0};
    fsdp_sd *sd;
    fsdp_ctl *ctl;
    fsdp_mesh *mesh;
    const fsdp_placement whole = {FSDP_REPLICATE, 0, 0};
    const int64_t shape[] = {ROWS, 1024};
    fsdp_save_opts opts = {0};
    opts.compress = compress;
    opts.skip_fsync = true;
    cr_assert_eq(fsdp_ctl_self(&ctl, &err), FSDP_OK);
    cr_assert_eq(fsdp_mesh_create(1, (int64_t[]){1}, (const char *[]){"dp"}, NULL, &mesh, &err),
                 FSDP_OK);
    cr_assert_eq(fsdp_sd_create(&sd, &err), FSDP_OK);
    cr_assert_eq(fsdp_sd_add_tensor(
                     sd, FSDP_NAME("w"),
                     &(fsdp_tensor){FSDP_F32, 2, shape, {.mesh = mesh, .placement = {whole}}, NULL},
                     &err),
                 FSDP_OK);
    cr_assert_eq(fsdp_sd_allocate(sd, 0, &err), FSDP_OK);
    float *data = fsdp_sd_at(sd, 0)->data;
    for (int64_t i = 0; i < shape[0] * shape[1]; i++)
        data[i] = (float)(i % 1000) / 7;
    cr_assert_eq(fsdp_sd_save(sd, ctl, spoil_path("c"), &opts, &err), FSDP_OK, "%s", err.text);
    fsdp_sd_free(sd);
    fsdp_mesh_free(mesh);
    fsdp_ctl_free(ctl);
}

/* Reading rows of a block that is whole works; rows of the damaged one do not, and are named. */
static void look_at_blocks(int64_t damaged, int64_t block_rows)
{
    fsdp_checkpoint *checkpoint;
    fsdp_error err = {0};
    float rows[2 * 1024];
    cr_assert_eq(fsdp_checkpoint_open(spoil_path("c"), NULL, &checkpoint, &err), FSDP_OK, "%s",
                 err.text);
    for (int64_t block = 0; block * block_rows < ROWS; block++) {
        fsdp_box box = {.ndim = 2, .lo = {block * block_rows + 7}, .len = {2, 1024}};
        fsdp_status st = fsdp_checkpoint_read(checkpoint, 0, &box, rows, FSDP_CHECK_BLOCKS, &err);
        cr_assert_eq(st, block == damaged ? FSDP_ERR_DAMAGED : FSDP_OK, "%s", err.text);
        if (block != damaged)
            continue;
        char words[160];
        snprintf(words, sizeof words, "block %lld is damaged: tensor 'w' rows %lld..%lld",
                 (long long)block, (long long)(block * block_rows),
                 (long long)(block == (ROWS - 1) / block_rows ? ROWS : (block + 1) * block_rows) -
                     1);
        cr_assert_not_null(strstr(err.text, words), "%s", err.text);
    }
    fsdp_checkpoint_close(checkpoint);
}

Test(damage, random_bit_flips_of_large_tensors_name_the_block_and_its_rows)
{
    unsigned random = 12345;
    for (int compress = 0; compress < 2; compress++) {
        save_blocks(compress);
        const char *path = spoil_shard("c", 0, 1);
        byte_owner *owners = find_owners("c", 0);
        spoil_bytes bytes = spoil_read(path);
        int fd = open(path, O_WRONLY);
        for (int i = 0; i < 30;) {
            random = random * 1664525 + 1013904223;
            int64_t at = (int64_t)(random >> 4) % (int64_t)bytes.size;
            if (owners[at].tensor != 0)
                continue;
            write_byte(fd, at, (char)(bytes.data[at] ^ 1 << random % 8));
            look_at_blocks(owners[at].block, compress ? CHUNK_ROWS : BLOCK_ROWS);
            write_byte(fd, at, bytes.data[at]);
            i++;
        }
        close(fd);
        free(bytes.data);
        free(owners);
        cr_assert_eq(fsdp_io_remove_tree(NULL, spoil_path("c"), NULL), FSDP_OK);
    }
}

/* --- lengths ---------------------------------------------------------------------------------- */

Test(damage, a_manifest_cut_at_any_length_is_damaged)
{
    fsdp_error err;
    spoil_save("c", FSDP_SHARDED, false, 4, 1);
    const char *path = spoil_manifest("c");
    spoil_bytes bytes = spoil_read(path);
    for (size_t size = 0; size < bytes.size; size += (size_t)test_sample(1)) {
        cr_assert_eq(truncate(path, 0), 0);
        spoil_write(path, bytes.data, size);
        cr_assert_eq(spoil_load("c", 1, &err), FSDP_ERR_DAMAGED, "%zu: %s", size, err.text);
        cr_assert_not_null(strstr(err.text, path), "%s", err.text);
    }
    spoil_write(path, bytes.data, bytes.size + 1); /* a zero byte more */
    cr_assert_eq(spoil_load("c", 1, &err), FSDP_ERR_DAMAGED);
    spoil_write(path, bytes.data, bytes.size);
    cr_assert_eq(spoil_load("c", 1, &err), FSDP_OK);
    free(bytes.data);
}

static void cut_everywhere(fsdp_kind kind, bool compress)
{
    fsdp_error err;
    int files = kind == FSDP_FULL ? 1 : SPOIL_WORLD;
    spoil_save("c", kind, compress, 4, 1);
    for (int f = 0; f < files; f++) {
        const char *path = spoil_shard("c", f, files);
        spoil_bytes bytes = spoil_read(path);
        for (size_t size = bytes.size; size-- > 0;) {
            if (size % (size_t)test_sample(1) != 0)
                continue;
            cr_assert_eq(truncate(path, (off_t)size), 0);
            cr_assert_eq(spoil_load("c", 1, &err), FSDP_ERR_DAMAGED, "%zu: %s", size, err.text);
            cr_assert_not_null(strstr(err.text, strrchr(path, '/') + 1), "%s", err.text);
        }
        spoil_write(path, bytes.data, bytes.size);
        cr_assert_eq(truncate(path, (off_t)bytes.size + 1), 0);
        cr_assert_eq(spoil_load("c", 1, &err), FSDP_ERR_DAMAGED);
        spoil_write(path, bytes.data, bytes.size);
        cr_assert_eq(spoil_load("c", 1, &err), FSDP_OK, "%s", err.text);
        free(bytes.data);
    }
}

Test(damage, a_shard_file_cut_at_any_length_is_damaged)
{
    cut_everywhere(FSDP_SHARDED, false);
}

Test(damage, a_full_compressed_file_cut_at_any_length_is_damaged)
{
    cut_everywhere(FSDP_FULL, true);
}

/* The file shrinks after it was opened: its end is missed without a signal. */
Test(damage, a_shard_file_that_shrinks_while_it_is_open_is_damaged)
{
    fsdp_checkpoint *checkpoint;
    fsdp_error err = {0};
    char data[46 * 60 * 4];
    spoil_save("c", FSDP_SHARDED, false, 4, 1);
    cr_assert_eq(fsdp_checkpoint_open(spoil_path("c"), NULL, &checkpoint, &err), FSDP_OK, "%s",
                 err.text);
    cr_assert_eq(truncate(spoil_shard("c", 1, 2), 100), 0);
    fsdp_box whole = {.ndim = 2, .len = {46, 60}};
    for (int verify_mode = 0; verify_mode < 2; verify_mode++) {
        cr_assert_eq(
            fsdp_checkpoint_read(checkpoint, 0, &whole, data, (fsdp_check_mode)verify_mode, &err),
            FSDP_ERR_DAMAGED);
        cr_assert_not_null(strstr(err.text, "shard-00001-of-00002.h5' ends at byte"), "%s",
                           err.text);
    }
    fsdp_checkpoint_close(checkpoint);
}

/* --- files in the wrong place ----------------------------------------------------------------- */

static void expect_damaged(const char *dir, const char *words)
{
    fsdp_error err;
    last_finding last;
    cr_assert_eq(spoil_load(dir, 1, &err), FSDP_ERR_DAMAGED, "%s", err.text);
    cr_assert_not_null(strstr(err.text, words), "'%s' is not in: %s", words, err.text);
    cr_assert_eq(verify(dir, &last, NULL), FSDP_DIFFERS);
}

/* Not only hashes differ: with a manifest that fits, the file still says whose it is. */
static void expect_stranger(const char *dir, int number, const char *words)
{
    spoil_bytes bytes = spoil_read(spoil_shard(dir, number, SPOIL_WORLD));
    spoil_reseal(dir, number, bytes.data);
    free(bytes.data);
    expect_damaged(dir, words);
}

Test(damage, a_shard_file_of_another_save_is_refused_though_its_size_is_right)
{
    spoil_save("c", FSDP_SHARDED, false, 4, 1);
    spoil_save("other", FSDP_SHARDED, false, 4, 2);
    spoil_copy(spoil_shard("other", 1, 2), spoil_shard("c", 1, 2));
    expect_damaged("c", "shard-00001-of-00002.h5': the shard index is damaged: its hash is not the "
                        "one in the manifest");
}

Test(damage, a_shard_file_of_another_step_is_refused)
{
    spoil_save("c", FSDP_SHARDED, false, 4, 1);
    spoil_save("other", FSDP_SHARDED, false, 5, 1);
    spoil_copy(spoil_shard("other", 1, 2), spoil_shard("c", 1, 2));
    expect_damaged("c", "shard-00001-of-00002.h5");
    expect_stranger("c", 1, "shard-00001-of-00002.h5' belongs to a different run or step (step 5)");
}

Test(damage, a_shard_file_of_another_run_is_refused)
{
    spoil_save("c", FSDP_SHARDED, false, 4, 1);
    fsdp_error err = {0};
    const int64_t step = 4;
    spoil_job job = {.path = spoil_path("other"), .seed = 1};
    job.opts.step = &step;
    job.opts.run[0] = 2;
    cr_assert_eq(fsdp_ctl_run_threads(SPOIL_WORLD, spoil_save_rank, &job, &err), FSDP_OK, "%s",
                 err.text);
    spoil_copy(spoil_shard("other", 0, 2), spoil_shard("c", 0, 2));
    expect_damaged("c", "shard-00000-of-00002.h5");
    expect_stranger("c", 0, "shard-00000-of-00002.h5' belongs to a different run or step");
}

Test(damage, shard_files_of_other_ranks_and_world_sizes_are_refused)
{
    fsdp_error err = {0};
    /* 46 rows: both ranks have files of one size */
    spoil_save("c", FSDP_LOCAL, false, 4, 1);
    fsdp_manifest_file zero = spoil_file("c", 0), one = spoil_file("c", 1);
    const char *paths[] = {spoil_shard("c", 0, 2), spoil_shard("c", 1, 2)};
    spoil_bytes files[] = {spoil_read(paths[0]), spoil_read(paths[1])};
    spoil_write(paths[0], files[1].data, files[1].size);
    spoil_write(paths[1], files[0].data, files[0].size);
    expect_damaged("c", "shard-00000-of-00002.h5");
    cr_assert(zero.size == one.size && zero.index_offset == one.index_offset &&
              zero.index_size == one.index_size);
    expect_stranger("c", 0,
                    "shard-00000-of-00002.h5' is the file of rank 1 of 2, not of rank 0 of 2");
    free(files[0].data);
    free(files[1].data);
    const int64_t step = 4;
    spoil_job job = {.path = spoil_path("three"), .seed = 1};
    job.opts.step = &step;
    cr_assert_eq(fsdp_ctl_run_threads(3, spoil_save_rank, &job, &err), FSDP_OK, "%s", err.text);
    spoil_copy(spoil_shard("three", 0, 3), paths[0]);
    expect_damaged("c", "shard-00000-of-00002.h5");
}

/* --- paths that are not files ------------------------------------------------------------------ */

static void expect(const char *dir, fsdp_status status, const char *words)
{
    fsdp_error err;
    cr_assert_eq(spoil_load(dir, 1, &err), status, "%d %s", err.status, err.text);
    cr_assert_not_null(strstr(err.text, words), "'%s' is not in: %s", words, err.text);
    cr_assert_eq(err.status, status);
}

/* Verify names the bad file, and still looks at the others. */
static void expect_finding(const char *dir, const char *file)
{
    last_finding last;
    fsdp_verify_summary summary;
    cr_assert_eq(verify(dir, &last, &summary), FSDP_DIFFERS);
    cr_assert_eq(last.count, 1);
    cr_assert_str_eq(last.file, file);
    cr_assert_gt(summary.blocks, 0);
}

Test(damage, a_missing_file_is_named)
{
    spoil_save("c", FSDP_SHARDED, false, 4, 1);
    cr_assert_eq(unlink(spoil_shard("c", 1, 2)), 0);
    expect("c", FSDP_ERR_DAMAGED, "shard-00001-of-00002.h5' is missing");
    expect_finding("c", "shard-00001-of-00002.h5");
    cr_assert_eq(unlink(spoil_manifest("c")), 0);
    expect("c", FSDP_ERR_NOT_FOUND, "/c' is not a complete checkpoint: it has no manifest");
    expect("nowhere", FSDP_ERR_NOT_FOUND, "/nowhere'");
}

Test(damage, every_bad_file_is_reported_and_not_only_the_first)
{
    last_finding last;
    spoil_save("c", FSDP_SHARDED, false, 4, 1);
    cr_assert_eq(unlink(spoil_shard("c", 0, 2)), 0);
    cr_assert_eq(truncate(spoil_shard("c", 1, 2), 50), 0);
    cr_assert_eq(verify("c", &last, NULL), FSDP_DIFFERS);
    cr_assert_eq(last.count, 2);
}

Test(damage, directories_and_files_in_each_others_place_are_told_apart)
{
    spoil_save("c", FSDP_SHARDED, false, 4, 1);
    cr_assert_eq(unlink(spoil_shard("c", 0, 2)), 0);
    cr_assert_eq(mkdir(spoil_shard("c", 0, 2), 0700), 0);
    expect("c", FSDP_ERR_DAMAGED, "shard-00000-of-00002.h5' is not a regular file");
    expect_finding("c", "shard-00000-of-00002.h5");
    cr_assert_eq(unlink(spoil_manifest("c")), 0);
    cr_assert_eq(mkdir(spoil_manifest("c"), 0700), 0);
    expect("c", FSDP_ERR_NOT_FOUND, "manifest.json': it is a directory");
    spoil_write(spoil_path("file"), "text", 4);
    expect("file", FSDP_ERR_NOT_FOUND, "/file' is not in a known format: the file of 4 bytes");
    last_finding last;
    cr_assert_eq(verify("file", &last, NULL), FSDP_ERR_NOT_FOUND);
}

Test(damage, links_in_a_checkpoint_are_refused_and_links_to_one_are_followed)
{
    spoil_save("c", FSDP_SHARDED, false, 4, 1);
    fsdp_error err;
    cr_assert_eq(symlink(spoil_path("c"), spoil_path("link")), 0);
    cr_assert_eq(spoil_load("link", 1, &err), FSDP_OK, "%s", err.text);
    cr_assert_eq(rename(spoil_shard("c", 1, 2), spoil_path("elsewhere.h5")), 0);
    cr_assert_eq(symlink(spoil_path("elsewhere.h5"), spoil_shard("c", 1, 2)), 0);
    expect("c", FSDP_ERR_REFUSED, "shard-00001-of-00002.h5");
    expect_finding("c", "shard-00001-of-00002.h5");
    cr_assert_eq(unlink(spoil_shard("c", 1, 2)), 0);
    cr_assert_eq(symlink(spoil_path("nothing"), spoil_shard("c", 1, 2)), 0);
    expect("c", FSDP_ERR_DAMAGED, "shard-00001-of-00002.h5' is missing");
    cr_assert_eq(unlink(spoil_shard("c", 1, 2)), 0);
    cr_assert_eq(rename(spoil_path("elsewhere.h5"), spoil_shard("c", 1, 2)), 0);
    cr_assert_eq(rename(spoil_manifest("c"), spoil_path("m")), 0);
    cr_assert_eq(symlink(spoil_path("m"), spoil_manifest("c")), 0);
    expect("c", FSDP_ERR_REFUSED, "manifest.json");
}

/* Opening a pipe would wait for ever, reading a device would never end. */
Test(damage, pipes_and_devices_do_not_hang, .timeout = 30)
{
    spoil_save("c", FSDP_SHARDED, false, 4, 1);
    const char *shard = spoil_shard("c", 1, 2), *manifest = spoil_manifest("c");
    cr_assert_eq(unlink(shard), 0);
    cr_assert_eq(mkfifo(shard, 0600), 0);
    expect("c", FSDP_ERR_DAMAGED, "shard-00001-of-00002.h5' is not a regular file");
    expect_finding("c", "shard-00001-of-00002.h5");
    cr_assert_eq(unlink(shard), 0);
    if (mknod(shard, S_IFCHR | 0600, (dev_t)(1 << 8 | 5)) == 0) { /* /dev/zero, for root only */
        expect("c", FSDP_ERR_DAMAGED, "shard-00001-of-00002.h5' is not a regular file");
        expect_finding("c", "shard-00001-of-00002.h5");
    }
    cr_assert_eq(unlink(manifest), 0);
    cr_assert_eq(mkfifo(manifest, 0600), 0);
    expect("c", FSDP_ERR_REFUSED, "manifest.json': it is not a regular file");
}

static int forbid(void *user, fsdp_io_call call, const char *path)
{
    (void)call;
    return strstr(path, user) ? -EACCES : 0;
}

static void expect_unreadable(const char *part)
{
    fsdp_io *io;
    fsdp_error err = {0};
    last_finding last = {0};
    char name[80];
    snprintf(name, sizeof name, "%s", part);
    fsdp_fault_plan plan = {.calls = 1 << FSDP_CALL_OPEN,
                            .at = 1,
                            .forever = true,
                            .action = FSDP_FAULT_CALL,
                            .call = forbid,
                            .user = name};
    cr_assert_eq(fsdp_io_fault_create(NULL, &plan, &io, &err), FSDP_OK);
    fsdp_sd *sd = NULL;
    fsdp_load_opts opts = {.access.disk = io};
    cr_assert_eq(fsdp_load_full(spoil_path("c"), &opts, &sd, &err), FSDP_ERR_IO, "%s", err.text);
    cr_assert_eq(err.errnum, EACCES);
    cr_assert_not_null(strstr(err.text, part), "%s", err.text);
    fsdp_verify_opts look = {.finding = keep_finding, .finding_context = &last, .access.disk = io};
    fsdp_status st = fsdp_checkpoint_verify(spoil_path("c"), &look, NULL, &err);
    cr_assert_eq(st, FSDP_ERR_IO, "%s", err.text);
    cr_assert_eq(last.unreadable, strcmp(part, "manifest.json") == 0 ? 0 : 1);
    fsdp_io_fault_free(io);
}

Test(damage, an_unreadable_file_is_named_and_not_called_damaged)
{
    spoil_save("c", FSDP_SHARDED, false, 4, 1);
    expect_unreadable("shard-00001-of-00002.h5");
    expect_unreadable("manifest.json");
}

/* --- older checkpoints ------------------------------------------------------------------------ */

static void flip_first_data_byte(const char *dir, int number)
{
    const char *path = spoil_shard(dir, number, SPOIL_WORLD);
    byte_owner *owners = find_owners(dir, number);
    int64_t at = 0;
    while (owners[at].tensor < 0)
        at++;
    free(owners);
    spoil_bytes bytes = spoil_read(path);
    bytes.data[at] ^= 1;
    spoil_write(path, bytes.data, bytes.size);
    free(bytes.data);
}

Test(damage, the_full_state_of_a_run_falls_back_past_damaged_data)
{
    fsdp_error err = {0};
    cr_assert_eq(mkdir(spoil_path("run"), 0777), 0);
    spoil_save("run/step-00000001", FSDP_SHARDED, false, 1, 1);
    spoil_save("run/step-00000002", FSDP_SHARDED, false, 2, 2);
    cr_assert_eq(spoil_load("run", 2, &err), FSDP_OK, "%s", err.text);
    flip_first_data_byte("run/step-00000002", 1);
    cr_assert_eq(spoil_load("run", 1, &err), FSDP_OK, "%s", err.text);
    flip_first_data_byte("run/step-00000001", 0);
    cr_assert_eq(spoil_load("run", 1, &err), FSDP_ERR_DAMAGED, "%s", err.text);
}

/* --- the view --------------------------------------------------------------------------------- */

static void expect_view_fault(const char *words)
{
    fsdp_error err = {0};
    last_finding last = {0};
    fsdp_verify_opts deep = {
        .level = FSDP_VERIFY_DEEP, .finding = keep_finding, .finding_context = &last};
    fsdp_status st = fsdp_checkpoint_verify(spoil_path("v"), &deep, NULL, &err);
    cr_assert_eq(st, words ? FSDP_DIFFERS : FSDP_OK, "%s", err.text);
    cr_assert(!words || (strcmp(last.file, "index.h5") == 0 && strstr(last.text, words)), "%s",
              last.text);
}

Test(damage, a_view_that_is_not_the_checkpoints_own_is_found_by_deep_verification)
{
    fsdp_error err = {0};
    spoil_save("c", FSDP_SHARDED, false, 4, 1);
    cr_assert_eq(fsdp_checkpoint_convert(spoil_path("c"), spoil_path("v"), NULL, &err), FSDP_OK,
                 "%s", err.text);
    expect_view_fault(NULL);
    spoil_bytes view = spoil_read(spoil_path("v/index.h5"));
    for (size_t at = 0; at < view.size; at += view.size / 7 + 1) {
        view.data[at] ^= 4;
        spoil_write(spoil_path("v/index.h5"), view.data, view.size);
        expect_view_fault("does not belong to this checkpoint");
        view.data[at] ^= 4;
    }
    spoil_write(spoil_path("v/index.h5"), view.data, view.size - 1);
    expect_view_fault("does not belong to this checkpoint");
    spoil_write(spoil_path("v/index.h5"), view.data, 0);
    expect_view_fault("does not belong to this checkpoint");
    free(view.data);
    cr_assert_eq(unlink(spoil_path("v/index.h5")), 0);
    expect_view_fault(NULL); /* a checkpoint may do without */
}
