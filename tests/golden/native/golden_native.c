/*
 * The golden checkpoints of the native format: makes them, and proves that what an earlier fsdp wrote
 * still reads as it was, and that the same states saved today give the same bytes. The states below
 * are part of the format's proof: they are never changed, a new format version gets new ones.
 *
 * usage: golden_native make DIR | golden_native check DIR SCRATCH
 */
#include "base/io/io.h"
#include "base/core/mem.h"

#include <fsdp/fsdp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The versions that wrote the committed files; other versions may write other bytes. */
static const char made_with_hdf5[] = "1.10.8", made_with_zstd[] = "1.5.4";

enum { STEP = 1200, STORED_VALUE = 70000 };

typedef struct golden {
    const char *name;
    fsdp_kind kind;
    bool compress, view;
    int world;
    void (*describe)(fsdp_sd *sd, int world, int rank);
} golden;

static void must(fsdp_status status, const fsdp_error *err)
{
    if (status != FSDP_OK)
        exit(fsdp_error_report(err));
}

/* --- the states ------------------------------------------------------------------------------- */

static unsigned char value_byte(size_t entry, int64_t position, size_t byte, fsdp_dtype dtype)
{
    uint64_t n = (uint64_t)position * 16 + byte + entry * 1000003;
    n = (n ^ n >> 7) * 0x9E3779B97F4A7C15u;
    unsigned char value = (unsigned char)(n >> 40);
    return dtype == FSDP_BOOL ? value & 1 : value;
}

/* Fills what the rank holds of a tensor, or compares it. */
static bool visit(const fsdp_sd *sd, size_t i, int rank, bool fill)
{
    const fsdp_entry *entry = fsdp_sd_at(sd, i);
    size_t size = fsdp_dtype_size(entry->dtype);
    size_t parts = fsdp_layout_box_count(&entry->layout, entry->ndim, entry->shape, rank);
    unsigned char *at = entry->data;
    for (size_t part = 0; part < parts; part++) {
        fsdp_box box;
        fsdp_layout_box_at(&entry->layout, entry->ndim, entry->shape, rank, part, &box);
        for (int64_t k = 0; k < fsdp_box_count(&box); k++) {
            int64_t left = k, lo[FSDP_MAX_DIMS] = {0};
            for (int d = box.ndim - 1; d >= 0; d--) {
                lo[d] = box.lo[d] + left % box.len[d];
                left /= box.len[d];
            }
            int64_t position = fsdp_box_position(entry->ndim, entry->shape, lo);
            for (size_t b = 0; b < size; b++, at++) {
                if (fill)
                    *at = value_byte(i, position, b, entry->dtype);
                else if (*at != value_byte(i, position, b, entry->dtype))
                    return false;
            }
        }
    }
    return true;
}

static void add(fsdp_sd *sd, const char *name, size_t name_size, fsdp_dtype dtype, int ndim,
                const int64_t *shape, const fsdp_mesh *mesh, const fsdp_placement *placements)
{
    fsdp_error err = {0};
    fsdp_layout layout = {.mesh = mesh};
    for (int i = 0; i < fsdp_mesh_ndim(mesh); i++)
        layout.placement[i] = placements[i];
    must(fsdp_sd_add_tensor(sd, name, name_size, &(fsdp_tensor){dtype, ndim, shape, layout, NULL},
                            &err),
         &err);
}

static void add_value(fsdp_sd *sd, const char *name, fsdp_value *value)
{
    fsdp_error err = {0};
    must(fsdp_sd_add_value(sd, name, strlen(name), value, &err), &err);
    fsdp_value_release(value);
}

static void add_bytes(fsdp_sd *sd, const char *name, fsdp_value_kind kind, const char *data,
                      size_t size)
{
    fsdp_error err = {0};
    fsdp_value value = {0};
    must(fsdp_value_set_bytes(&value, kind, data, size, &err), &err);
    add_value(sd, name, &value);
}

static void add_values(fsdp_sd *sd)
{
    fsdp_error err = {0};
    fsdp_value list = {0}, scalars[] = {{0},
                                        fsdp_value_bool(true),
                                        fsdp_value_i64(INT64_MIN),
                                        fsdp_value_u64(UINT64_MAX),
                                        fsdp_value_f64(0.1),
                                        fsdp_value_f64(-1.0 / 3e300),
                                        fsdp_value_f64(strtod("nan", NULL)),
                                        fsdp_value_f64(strtod("-inf", NULL))};
    static const char *const names[] = {"value.null",  "value.bool", "value.i64", "value.u64",
                                        "value.tenth", "value.tiny", "value.nan", "value.inf"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
        add_value(sd, names[i], &scalars[i]);
    add_bytes(sd, "value.string", FSDP_VALUE_STRING, "\xc3\xa4\0\x1b\"\\", 6);
    add_bytes(sd, "value.bytes", FSDP_VALUE_BYTES, "\xff\0\x80z", 4);
    add_bytes(sd, "value.opaque", FSDP_VALUE_OPAQUE, "\x80\x02N.", 4);
    must(fsdp_value_set_items(&list, FSDP_VALUE_DICT, 4, &err), &err);
    list.as.list.items[0] = fsdp_value_i64(7);
    must(fsdp_value_set_items(&list.as.list.items[1], FSDP_VALUE_LIST, 2, &err), &err);
    list.as.list.items[1].as.list.items[0] = fsdp_value_f64(1e-4);
    must(fsdp_value_set_bytes(&list.as.list.items[2], FSDP_VALUE_STRING, "lr", 2, &err), &err);
    add_value(sd, "value.dict", &list);
}

static void add_odd_names(fsdp_sd *sd, const fsdp_mesh *mesh)
{
    static char long_name[2000];
    const struct {
        const char *data;
        size_t size;
    } names[] = {{FSDP_NAME("")},
                 {FSDP_NAME(".")},
                 {FSDP_NAME("..")},
                 {FSDP_NAME("a/b")},
                 {FSDP_NAME("a")},
                 {FSDP_NAME("/")},
                 {FSDP_NAME("a\0b")},
                 {FSDP_NAME("\0")},
                 {FSDP_NAME("\x1b[31m\n\x7f")},
                 {FSDP_NAME("100%")},
                 {FSDP_NAME("%index")},
                 {FSDP_NAME("a%#1")},
                 {FSDP_NAME("\xc3\xa4 \"")},
                 {long_name, sizeof long_name}};
    const fsdp_placement rows = {.kind = FSDP_SHARD};
    memset(long_name, 'n', sizeof long_name);
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
        add(sd, names[i].data, names[i].size, FSDP_I16, 1, (int64_t[]){3}, mesh, &rows);
}

/* Every dtype of the first version, odd names, shapes without elements, values, an alias. */
static void describe_everything(fsdp_sd *sd, int world, int rank)
{
    fsdp_error err = {0};
    fsdp_mesh *mesh;
    const fsdp_placement rows = {.kind = FSDP_SHARD}, columns = {.kind = FSDP_SHARD, .dim = 1},
                         copies = {.kind = FSDP_REPLICATE};
    (void)rank;
    must(fsdp_mesh_create(1, (int64_t[]){world}, (const char *[]){"dp"}, NULL, &mesh, &err), &err);
    for (int dtype = 1; dtype <= FSDP_BCOMPLEX32; dtype++) {
        const char *name = fsdp_dtype_name((fsdp_dtype)dtype);
        add(sd, name, strlen(name), (fsdp_dtype)dtype, 2, (int64_t[]){3, 2}, mesh, &rows);
    }
    add_odd_names(sd, mesh);
    add(sd, FSDP_NAME("scalar"), FSDP_F64, 0, NULL, mesh, &copies);
    add(sd, FSDP_NAME("copies"), FSDP_F32, 1, (int64_t[]){5}, mesh, &copies);
    add(sd, FSDP_NAME("columns"), FSDP_F32, 2, (int64_t[]){4, 7}, mesh, &columns);
    add(sd, FSDP_NAME("no rows"), FSDP_F32, 2, (int64_t[]){0, 7}, mesh, &rows);
    add(sd, FSDP_NAME("one row"), FSDP_F32, 2, (int64_t[]){1, 7}, mesh, &rows);
    must(fsdp_sd_add_alias(sd, FSDP_NAME("tied/\0"), FSDP_NAME("columns"), &err), &err);
    add_values(sd);
    fsdp_mesh_free(mesh);
}

static void add_flat(fsdp_sd *sd, const fsdp_mesh *mesh, int rank)
{
    fsdp_error err = {0};
    static const int64_t rows[] = {7, 3}, line[] = {29};
    static const fsdp_flat_part parts[] = {{FSDP_NAME("flat.weight"), 2, rows, 2},
                                           {FSDP_NAME("flat.bias"), 1, line, 23},
                                           {FSDP_NAME("flat.scale"), 0, NULL, 55}};
    static float chunks[4][15];
    must(fsdp_sd_add_flat(sd, FSDP_NAME("flat"),
                          &(fsdp_flat_buffer){.dtype = FSDP_F32,
                                              .mesh = mesh,
                                              .rank = rank,
                                              .count = 60,
                                              .parts = parts,
                                              .part_count = 3,
                                              .data = chunks[rank]},
                          &err),
         &err);
}

static void add_irregular(fsdp_sd *sd)
{
    fsdp_error err = {0};
    static const fsdp_rank_box boxes[] = {{0, {2, {0, 0}, {3, 2}}},
                                          {1, {2, {0, 2}, {3, 4}}},
                                          {1, {2, {3, 0}, {1, 6}}},
                                          {3, {2, {4, 0}, {2, 6}}}};
    const fsdp_layout layout = {.kind = FSDP_LAYOUT_BOXES, .boxes = boxes, .box_count = 4};
    must(fsdp_sd_add_tensor(sd, FSDP_NAME("irregular"),
                            &(fsdp_tensor){FSDP_U8, 2, (int64_t[]){6, 6}, layout, NULL}, &err),
         &err);
}

/* Four ranks: meshes of one and two dims, a part of the ranks, boxes, a flat buffer, blocks. */
static void describe_layouts(fsdp_sd *sd, int world, int rank)
{
    fsdp_error err = {0};
    fsdp_mesh *line, *grid, *some;
    const fsdp_placement rows = {.kind = FSDP_SHARD}, columns = {.kind = FSDP_SHARD, .dim = 1},
                         copies = {.kind = FSDP_REPLICATE},
                         strided = {.kind = FSDP_STRIDED_SHARD, .split = 2};
    must(fsdp_mesh_create(1, (int64_t[]){world}, (const char *[]){"fsdp"}, NULL, &line, &err),
         &err);
    must(fsdp_mesh_create(2, (int64_t[]){2, 2}, (const char *[]){"dp", "tp"}, NULL, &grid, &err),
         &err);
    must(fsdp_mesh_create(1, (int64_t[]){2}, (const char *[]){"pp"}, (int[]){3, 1}, &some, &err),
         &err);
    add(sd, FSDP_NAME("rows"), FSDP_F32, 2, (int64_t[]){90, 50}, line, &rows);
    add(sd, FSDP_NAME("grid"), FSDP_BF16, 2, (int64_t[]){7, 9}, grid,
        (fsdp_placement[]){rows, columns});
    add(sd, FSDP_NAME("hsdp"), FSDP_BF16, 2, (int64_t[]){6, 5}, grid,
        (fsdp_placement[]){copies, rows});
    add(sd, FSDP_NAME("strided"), FSDP_F16, 2, (int64_t[]){13, 2}, grid,
        (fsdp_placement[]){strided, rows});
    add(sd, FSDP_NAME("stage"), FSDP_I64, 1, (int64_t[]){5}, some, &rows);
    add_irregular(sd);
    add_flat(sd, line, rank);
    fsdp_mesh_free(line);
    fsdp_mesh_free(grid);
    fsdp_mesh_free(some);
}

/* And a value that does not go into the manifest. */
static void describe_large(fsdp_sd *sd, int world, int rank)
{
    static char zeros[STORED_VALUE];
    describe_layouts(sd, world, rank);
    add_bytes(sd, "stored", FSDP_VALUE_BYTES, zeros, sizeof zeros);
}

static const golden goldens[] = {
    {"sharded", FSDP_SHARDED, false, true, 2, describe_everything},
    {"full", FSDP_FULL, false, false, 2, describe_everything},
    {"local", FSDP_LOCAL, false, false, 4, describe_layouts},
    {"zstd", FSDP_SHARDED, true, false, 4, describe_large},
};
enum { GOLDENS = sizeof goldens / sizeof goldens[0] };

/* --- making ----------------------------------------------------------------------------------- */

static fsdp_sd *make_state(const golden *g, int rank)
{
    fsdp_sd *sd;
    fsdp_error err = {0};
    must(fsdp_sd_create(&sd, &err), &err);
    g->describe(sd, g->world, rank);
    must(fsdp_sd_allocate(sd, rank, &err), &err);
    for (size_t i = 0; i < fsdp_sd_count(sd); i++)
        if (fsdp_sd_at(sd, i)->kind == FSDP_ENTRY_TENSOR)
            visit(sd, i, rank, true);
    return sd;
}

typedef struct save_job {
    const golden *golden;
    const char *path;
} save_job;

static fsdp_status save_rank(void *user, fsdp_ctl *ctl, fsdp_error *err)
{
    const save_job *job = user;
    static const int64_t step = STEP;
    fsdp_save_opts opts = {0};
    opts.kind = job->golden->kind;
    opts.compress = job->golden->compress;
    opts.skip_view = !job->golden->view;
    opts.step = &step;
    for (int i = 0; i < 16; i++)
        opts.run[i] = (uint8_t)(i * 17);
    fsdp_sd *sd = make_state(job->golden, fsdp_ctl_rank(ctl));
    fsdp_status st = fsdp_sd_save(sd, ctl, job->path, &opts, err);
    fsdp_sd_free(sd);
    return st;
}

static char *path_of(const char *dir, const char *name)
{
    char *path = fsdp_path_join(dir, name);
    if (!path)
        exit(FSDP_ERR_LIMIT);
    return path;
}

static void make(const golden *g, const char *dir)
{
    fsdp_error err = {0};
    char *path = path_of(dir, g->name);
    save_job job = {g, path};
    must(fsdp_ctl_run_threads(g->world, save_rank, &job, &err), &err);
    fsdp_free(path);
}

/* --- checking --------------------------------------------------------------------------------- */

static int failures;

static void fail(const char *name, const char *what)
{
    fprintf(stderr, "%s: %s\n", name, what);
    failures++;
}

static bool same_entry(const fsdp_entry *a, const fsdp_entry *b)
{
    if (a->kind != b->kind || a->name_size != b->name_size ||
        memcmp(a->name, b->name, a->name_size) != 0)
        return false;
    if (a->kind == FSDP_ENTRY_VALUE)
        return fsdp_value_equal(&a->value, &b->value);
    if (a->kind == FSDP_ENTRY_ALIAS)
        return a->target == b->target;
    return a->dtype == b->dtype && a->ndim == b->ndim &&
           memcmp(a->shape, b->shape, (size_t)a->ndim * sizeof *a->shape) == 0;
}

static void check_contents(const golden *g, const char *path)
{
    fsdp_error err = {0};
    fsdp_sd *full, *expected = make_state(g, 0);
    must(fsdp_load_full(path, NULL, &full, &err), &err);
    if (fsdp_sd_count(full) != fsdp_sd_count(expected))
        fail(g->name, "another number of entries");
    for (size_t i = 0; i < fsdp_sd_count(full) && i < fsdp_sd_count(expected); i++) {
        const fsdp_entry *entry = fsdp_sd_at(full, i);
        if (!same_entry(entry, fsdp_sd_at(expected, i)))
            fail(entry->name, "another entry than the one that was saved");
        else if (entry->kind == FSDP_ENTRY_TENSOR && !visit(full, i, 0, false))
            fail(entry->name, "other elements than were saved");
    }
    fsdp_sd_free(full);
    fsdp_sd_free(expected);
}

static void check_whole(const golden *g, const char *path)
{
    fsdp_error err = {0};
    const fsdp_verify_opts deep = {.level = FSDP_VERIFY_DEEP, .threads = 1};
    fsdp_verify_summary summary;
    must(fsdp_checkpoint_verify(path, &deep, &summary, &err), &err);
    printf("%-8s %2lld tensors, %2lld blocks\n", g->name, (long long)summary.tensors,
           (long long)summary.blocks);
}

/* --- the same bytes again --------------------------------------------------------------------- */

typedef struct file_list {
    char names[16][64];
    int count;
} file_list;

static int keep_name(void *user, const char *name)
{
    file_list *list = user;
    if (list->count < 16)
        snprintf(list->names[list->count++], sizeof list->names[0], "%s", name);
    return 0;
}

/* A manifest begins with the version of its writer and ends in its hash: these may differ. */
static void cut_writer(char **data, size_t *size)
{
    enum { CLOSING = 45 };
    char *kind = strstr(*data, "\"kind\"");
    size_t before = kind ? (size_t)(kind - *data) : 0;
    *data += before;
    *size -= before + CLOSING;
}

static bool same_bytes(const char *a, const char *b, bool is_manifest)
{
    fsdp_error err = {0};
    char *left, *right;
    size_t left_size, right_size;
    must(fsdp_io_read_file(NULL, a, 1 << 24, &left, &left_size, &err), &err);
    must(fsdp_io_read_file(NULL, b, 1 << 24, &right, &right_size, &err), &err);
    char *from = left, *to = right;
    if (is_manifest) {
        cut_writer(&from, &left_size);
        cut_writer(&to, &right_size);
    }
    bool same = left_size == right_size && memcmp(from, to, left_size) == 0;
    fsdp_free(left);
    fsdp_free(right);
    return same;
}

static void check_bytes(const golden *g, const char *path, const char *again)
{
    fsdp_io *io = fsdp_io_posix();
    file_list list = {.count = 0}, other = {.count = 0};
    io->ops->list(io, path, keep_name, &list);
    io->ops->list(io, again, keep_name, &other);
    if (list.count == 0 || list.count != other.count)
        fail(g->name, "another number of files");
    for (int i = 0; i < list.count; i++) {
        char *old = path_of(path, list.names[i]), *new = path_of(again, list.names[i]);
        if (!same_bytes(old, new, strcmp(list.names[i], "manifest.json") == 0))
            fail(new, "its bytes are not those of the golden file");
        fsdp_free(old);
        fsdp_free(new);
    }
}

static bool is_left_out; /* some comparison */

static bool has_other_libraries(const golden *g)
{
    bool other = strcmp(HDF5_RELEASE, made_with_hdf5) != 0 ||
                 (g->compress && strcmp(ZSTD_RELEASE, made_with_zstd) != 0);
    is_left_out = is_left_out || other;
    if (other)
        printf("%-8s bytes are not compared: made with HDF5 %s and zstd %s, here are %s and %s\n",
               g->name, made_with_hdf5, made_with_zstd, HDF5_RELEASE, ZSTD_RELEASE);
    return other;
}

static void check(const golden *g, const char *dir, const char *scratch)
{
    char *path = path_of(dir, g->name), *again = path_of(scratch, g->name);
    check_whole(g, path);
    check_contents(g, path);
    if (!has_other_libraries(g)) {
        make(g, scratch);
        check_bytes(g, path, again);
    }
    fsdp_free(path);
    fsdp_free(again);
}

int main(int argc, char **argv)
{
    fsdp_error err = {0};
    bool makes = argc == 3 && strcmp(argv[1], "make") == 0;
    if (!makes && (argc != 4 || strcmp(argv[1], "check") != 0)) {
        fprintf(stderr, "usage: golden_native make DIR | golden_native check DIR SCRATCH\n");
        return FSDP_ERR_USAGE;
    }
    if (!makes) {
        must(fsdp_io_remove_tree(NULL, argv[3], &err), &err);
        must(fsdp_io_mkdir(NULL, argv[3], &err), &err);
    }
    for (int i = 0; i < GOLDENS; i++) {
        if (makes)
            make(&goldens[i], argv[2]);
        else
            check(&goldens[i], argv[2], argv[3]);
    }
    if (failures > 0)
        return 1;
    return is_left_out ? 77 : 0; /* 77: skipped */
}
