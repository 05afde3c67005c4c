/* The manifest: it reads back bit for bit, and a changed text is refused. */
#include "statedict/manifest/manifest.h"

#include "base/data/name_path.h"
#include "statedict/sd/layout_internal.h"
#include "tests/support/disk/io_sim.h"
#include "base/core/mem.h"
#include "kernels/kernels.h"

#include <criterion/criterion.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

static fsdp_mesh *mesh_of(int ndim, const int64_t *shape, const int *ranks)
{
    static const char *const names[] = {"dp", "tp", "pp", "ep"};
    fsdp_mesh *mesh;
    fsdp_error err = {0};
    cr_assert_eq(fsdp_mesh_create(ndim, shape, names, ranks, &mesh, &err), FSDP_OK, "%s", err.text);
    return mesh;
}

static fsdp_sd *new_sd(void)
{
    fsdp_sd *sd;
    cr_assert_eq(fsdp_sd_create(&sd, NULL), FSDP_OK);
    return sd;
}

static void add_value(fsdp_sd *sd, const char *name, fsdp_value value)
{
    fsdp_error err = {0};
    cr_assert_eq(fsdp_sd_add_value(sd, name, strlen(name), &value, &err), FSDP_OK, "%s", err.text);
    fsdp_value_release(&value);
}

static void add_tensors(fsdp_sd *sd)
{
    fsdp_mesh *flat = mesh_of(1, (int64_t[]){4}, NULL);
    fsdp_mesh *grid = mesh_of(2, (int64_t[]){2, 2}, NULL);
    fsdp_mesh *some = mesh_of(1, (int64_t[]){2}, (int[]){3, 1});
    fsdp_placement rows = {.kind = FSDP_SHARD}, strided = {FSDP_STRIDED_SHARD, 0, 2};
    int64_t shape[] = {5, 7}, empty[] = {0, 3};
    cr_assert_eq(fsdp_sd_add_tensor(
                     sd, FSDP_NAME("a"),
                     &(fsdp_tensor){FSDP_F32, 2, shape, {.mesh = flat, .placement = {rows}}, NULL},
                     NULL),
                 0);
    cr_assert_eq(
        fsdp_sd_add_tensor(
            sd, FSDP_NAME("b"),
            &(fsdp_tensor){FSDP_BF16, 2, shape, {.mesh = grid, .placement = {strided, rows}}, NULL},
            NULL),
        0);
    cr_assert_eq(fsdp_sd_add_tensor(sd, FSDP_NAME("x\0/\n\"\xc3\xa9"),
                                    &(fsdp_tensor){FSDP_BOOL, 0, NULL, {.mesh = some}, NULL}, NULL),
                 0);
    cr_assert_eq(fsdp_sd_add_tensor(
                     sd, FSDP_NAME(""),
                     &(fsdp_tensor){FSDP_C64, 2, empty, {.mesh = flat, .placement = {rows}}, NULL},
                     NULL),
                 0);
    fsdp_rank_box boxes[2] = {{0, {2, {0, 0}, {5, 3}}}, {2, {2, {0, 3}, {5, 4}}}};
    fsdp_layout layout = {.kind = FSDP_LAYOUT_BOXES, .boxes = boxes, .box_count = 2};
    cr_assert_eq(fsdp_sd_add_tensor(sd, FSDP_NAME("boxes"),
                                    &(fsdp_tensor){FSDP_I64, 2, shape, layout, NULL}, NULL),
                 0);
    cr_assert_eq(fsdp_sd_add_alias(sd, FSDP_NAME("tied"), FSDP_NAME("a"), NULL), 0);
    int64_t six = 6, three = 3;
    fsdp_flat_part parts[] = {{"f.1", 3, 1, &six, 0}, {"f.2", 3, 1, &three, 8}};
    cr_assert_eq(fsdp_sd_add_flat(sd, FSDP_NAME("none"),
                                  &(fsdp_flat_buffer){.dtype = FSDP_F32, .mesh = flat, .count = 8},
                                  NULL),
                 0);
    cr_assert_eq(
        fsdp_sd_add_flat(
            sd, FSDP_NAME("flat"),
            &(fsdp_flat_buffer){
                .dtype = FSDP_F32, .mesh = flat, .count = 12, .parts = parts, .part_count = 2},
            NULL),
        0);
    fsdp_mesh_free(flat);
    fsdp_mesh_free(grid);
    fsdp_mesh_free(some);
}

static double nan_with(uint64_t bits)
{
    double value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static void add_values(fsdp_sd *sd)
{
    add_value(sd, "null", (fsdp_value){0});
    add_value(sd, "true", fsdp_value_bool(true));
    add_value(sd, "low", fsdp_value_i64(INT64_MIN));
    add_value(sd, "high", fsdp_value_u64(UINT64_MAX));
    double doubles[] = {0.1,
                        -0.0,
                        5e-324,
                        1.7976931348623157e308,
                        INFINITY,
                        -INFINITY,
                        nan_with(0x7ff8000000000001),
                        nan_with(0xfff4000000000abc)};
    for (size_t i = 0; i < sizeof doubles / sizeof *doubles; i++) {
        char name[20];
        snprintf(name, sizeof name, "f64.%zu", i);
        add_value(sd, name, fsdp_value_f64(doubles[i]));
    }
    fsdp_value value = {0};
    cr_assert_eq(fsdp_value_set_items(&value, FSDP_VALUE_DICT, 4, NULL), FSDP_OK);
    fsdp_value *items = value.as.list.items;
    cr_assert_eq(fsdp_value_set_bytes(&items[0], FSDP_VALUE_STRING, "k\0\xe2\x82\xac", 5, NULL), 0);
    cr_assert_eq(fsdp_value_set_bytes(&items[1], FSDP_VALUE_BYTES, "\0\xff\x80", 3, NULL), 0);
    items[2] = fsdp_value_i64(7);
    cr_assert_eq(fsdp_value_set_items(&items[3], FSDP_VALUE_LIST, 5, NULL), FSDP_OK);
    fsdp_value *rare = items[3].as.list.items;
    cr_assert_eq(fsdp_value_set_bytes(&rare[1], FSDP_VALUE_OPAQUE, "", 0, NULL), 0);
    cr_assert_eq(
        fsdp_value_set_bytes(&rare[2], FSDP_VALUE_INTEGER, "-9223372036854775809", 20, NULL), 0);
    cr_assert_eq(fsdp_value_set_bytes(&rare[3], FSDP_VALUE_CLASS, "a.B", 3, NULL), 0);
    rare[4] = (fsdp_value){.kind = FSDP_VALUE_COMPLEX, .as.complex_parts = {NAN, -0.0}};
    add_value(sd, "dict", value);
    fsdp_value none = {0};
    cr_assert_eq(fsdp_value_set_items(&none, FSDP_VALUE_LIST, 0, NULL), FSDP_OK);
    add_value(sd, "empty", none);
}

/* A list in a list in a list ... as deep as values may nest. */
static void add_deep_value(fsdp_sd *sd)
{
    fsdp_value deep = {0};
    for (int i = 0; i < FSDP_VALUE_DEPTH; i++) {
        fsdp_value outer = {0};
        cr_assert_eq(fsdp_value_set_items(&outer, FSDP_VALUE_DICT, 2, NULL), FSDP_OK);
        outer.as.list.items[1] = deep;
        deep = outer;
    }
    add_value(sd, "deep", deep);
}

/* Adds paths of two elements to values and to tensors in a flat buffer. */
static size_t add_paths(fsdp_sd *sd)
{
    size_t added = 0;
    for (size_t i = 0; i < fsdp_sd_count(sd); i++) {
        const fsdp_entry *entry = fsdp_sd_at(sd, i);
        const char *dot = memchr(entry->name, '.', entry->name_size);
        if (!dot)
            continue;
        int32_t first = (int32_t)(dot - entry->name);
        int32_t path[2] = {first, (int32_t)entry->name_size - first - 1};
        cr_assert_eq(fsdp_sd_set_path(sd, i, path, 2, NULL), FSDP_OK);
        added++;
    }
    return added;
}

/* A position in a tuple, an entry that is the whole object, a tuple in a list. */
static void add_tuples(fsdp_sd *sd)
{
    fsdp_value list = {0};
    size_t count = fsdp_sd_count(sd);
    const int32_t path[] = {5, -(1 | FSDP_PATH_TUPLE), -1}, whole[] = {FSDP_PATH_WHOLE};
    cr_assert_eq(fsdp_value_set_items(&list, FSDP_VALUE_LIST, 1, NULL), FSDP_OK);
    cr_assert_eq(fsdp_value_set_items(&list.as.list.items[0], FSDP_VALUE_LIST, 0, NULL), FSDP_OK);
    list.as.list.items[0].is_tuple = true;
    cr_assert_eq(fsdp_sd_add_value(sd, "tuple.0.1", 9, &list, NULL), FSDP_OK);
    cr_assert_eq(fsdp_sd_set_path(sd, count, path, 3, NULL), FSDP_OK);
    int64_t empty = fsdp_sd_find(sd, "", 0);
    if (empty < 0) {
        cr_assert_eq(fsdp_sd_add_value(sd, "", 0, &list, NULL), FSDP_OK);
        empty = (int64_t)count + 1;
    }
    cr_assert_eq(fsdp_sd_set_path(sd, (size_t)empty, whole, 1, NULL), FSDP_OK);
    fsdp_value_release(&list);
}

static fsdp_manifest example(fsdp_manifest_file files[4])
{
    for (int i = 0; i < 4; i++)
        files[i] = (fsdp_manifest_file){100 + i, 60, 40, {{(uint8_t)i, 1, 2, 0xfe}}};
    fsdp_manifest manifest = {.kind = FSDP_SHARDED,
                              .step = 1200,
                              .run = {0xab, 1},
                              .world = 4,
                              .files = files,
                              .file_count = 4};
    manifest.sd = new_sd();
    add_tensors(manifest.sd);
    add_values(manifest.sd);
    return manifest;
}

static void encode(const fsdp_manifest *manifest, fsdp_text *text)
{
    fsdp_error err = {0};
    cr_assert_eq(fsdp_manifest_encode(manifest, text, &err), FSDP_OK, "%s", err.text);
}

static fsdp_status decode(const char *text, size_t size, fsdp_manifest *manifest, fsdp_error *err)
{
    return fsdp_manifest_decode(text, size, "m.json", manifest, err);
}

static void check_entry(const fsdp_entry *a, const fsdp_entry *b)
{
    cr_assert_eq(a->kind, b->kind);
    cr_assert_eq(a->path_count, b->path_count, "'%s'", a->name);
    for (size_t i = 0; i < a->path_count; i++)
        cr_assert_eq(a->path[i], b->path[i], "'%s'", a->name);
    cr_assert_eq(a->name_size, b->name_size);
    cr_assert_arr_eq(a->name, b->name, a->name_size);
    if (a->kind == FSDP_ENTRY_VALUE)
        cr_assert(fsdp_value_equal(&a->value, &b->value), "'%s'", a->name);
    if (a->kind == FSDP_ENTRY_ALIAS)
        cr_assert_eq(a->target, b->target);
    if (a->kind != FSDP_ENTRY_TENSOR)
        return;
    cr_assert_eq(a->dtype, b->dtype);
    cr_assert_eq(a->ndim, b->ndim);
    cr_assert_eq(memcmp(a->shape, b->shape, (size_t)a->ndim * sizeof *a->shape), 0);
    cr_assert_eq(a->flat, b->flat);
    cr_assert_eq(a->layout.kind, b->layout.kind);
    for (int rank = 0; rank < 4; rank++) {
        size_t n = fsdp_layout_box_count(&a->layout, a->ndim, a->shape, rank);
        cr_assert_eq(n, fsdp_layout_box_count(&b->layout, b->ndim, b->shape, rank));
        for (size_t i = 0; i < n; i++) {
            fsdp_box box_a, box_b;
            fsdp_layout_box_at(&a->layout, a->ndim, a->shape, rank, i, &box_a);
            fsdp_layout_box_at(&b->layout, b->ndim, b->shape, rank, i, &box_b);
            cr_assert(fsdp_box_equal(&box_a, &box_b), "'%s' rank %d", a->name, rank);
        }
    }
}

Test(manifest, everything_comes_back)
{
    fsdp_manifest_file files[4];
    fsdp_manifest manifest = example(files), back;
    add_deep_value(manifest.sd);
    cr_assert(add_paths(manifest.sd) > 3);
    add_tuples(manifest.sd);
    fsdp_text text = {0}, again = {0};
    encode(&manifest, &text);
    fsdp_error err = {0};
    cr_assert_eq(decode(text.data, text.size, &back, &err), FSDP_OK, "%s", err.text);
    cr_assert_eq(back.kind, FSDP_SHARDED);
    cr_assert_eq(back.step, 1200);
    cr_assert_arr_eq(back.run, manifest.run, 16);
    cr_assert_eq(back.world, 4);
    cr_assert_eq(back.file_count, 4);
    for (int i = 0; i < 4; i++) {
        cr_assert_eq(back.files[i].size, files[i].size);
        cr_assert_eq(back.files[i].index_offset, 60);
        cr_assert_eq(back.files[i].index_size, 40);
        cr_assert_arr_eq(back.files[i].index_hash.bytes, files[i].index_hash.bytes, 16);
    }
    cr_assert_eq(fsdp_sd_count(back.sd), fsdp_sd_count(manifest.sd));
    for (size_t i = 0; i < fsdp_sd_count(back.sd); i++)
        check_entry(fsdp_sd_at(manifest.sd, i), fsdp_sd_at(back.sd, i));
    cr_assert_eq(fsdp_sd_flat_count(back.sd), 2);
    cr_assert_eq(fsdp_sd_flat_at(back.sd, 1)->count, 12);
    encode(&back, &again);
    cr_assert_eq(again.size, text.size);
    cr_assert_arr_eq(again.data, text.data, text.size);
    fsdp_text_release(&text);
    fsdp_text_release(&again);
    fsdp_manifest_release(&back);
    fsdp_sd_free(manifest.sd);
}

Test(manifest, full_checkpoint_without_step_or_entries)
{
    fsdp_manifest_file file = {.size = 10};
    fsdp_manifest manifest = {.kind = FSDP_FULL,
                              .step = FSDP_NO_STEP,
                              .world = 8,
                              .compressed = true,
                              .owners = FSDP_OWNERS_LOWEST,
                              .sd = new_sd(),
                              .files = &file,
                              .file_count = 1};
    fsdp_manifest back;
    fsdp_text text = {0};
    encode(&manifest, &text);
    cr_assert_eq(decode(text.data, text.size, &back, NULL), FSDP_OK);
    cr_assert_eq(back.kind, FSDP_FULL);
    cr_assert_eq(back.step, FSDP_NO_STEP);
    cr_assert_eq(back.world, 8);
    cr_assert_eq(back.owners, FSDP_OWNERS_LOWEST);
    cr_assert(back.compressed);
    cr_assert_eq(fsdp_sd_count(back.sd), 0);
    fsdp_text_release(&text);
    fsdp_manifest_release(&back);
    fsdp_sd_free(manifest.sd);
}

Test(manifest, every_flipped_byte_is_found)
{
    fsdp_manifest_file files[4];
    fsdp_manifest manifest = example(files), back;
    fsdp_text text = {0};
    encode(&manifest, &text);
    for (size_t i = 0; i < text.size; i++) {
        for (int bit = 0; bit < 8; bit++) {
            text.data[i] = (char)(text.data[i] ^ 1 << bit);
            cr_assert_neq(decode(text.data, text.size, &back, NULL), FSDP_OK, "byte %zu bit %d", i,
                          bit);
            text.data[i] = (char)(text.data[i] ^ 1 << bit);
        }
    }
    cr_assert_eq(decode(text.data, text.size, &back, NULL), FSDP_OK);
    fsdp_text_release(&text);
    fsdp_manifest_release(&back);
    fsdp_sd_free(manifest.sd);
}

Test(manifest, every_truncation_and_every_tail_is_found)
{
    fsdp_manifest_file files[4];
    fsdp_manifest manifest = example(files), back;
    fsdp_text text = {0};
    encode(&manifest, &text);
    for (size_t size = 0; size < text.size; size++) {
        char *exact = fsdp_strndup(text.data, size);
        cr_assert_eq(decode(exact, size, &back, NULL), FSDP_ERR_DAMAGED, "%zu bytes", size);
        fsdp_free(exact);
    }
    fsdp_text_add(&text, "\n", 1);
    cr_assert_eq(decode(text.data, text.size, &back, NULL), FSDP_ERR_DAMAGED);
    fsdp_text_release(&text);
    fsdp_sd_free(manifest.sd);
}

/* --- texts that have the right hash and are wrong in any case --- */

static void add_hash(fsdp_text *text)
{
    fsdp_hash hash = fsdp_kernels_get()->hash(text->data, text->size);
    fsdp_text_addf(text, "\"xxh3\": \"");
    fsdp_text_add_hex(text, hash.bytes, sizeof hash.bytes);
    fsdp_text_addf(text, "\"\n}\n");
}

static const char HEAD[] =
    "\"kind\": \"full\", \"step\": null, \"run\": \"000102030405060708090a0b0c0d0e0f\","
    "\"world_size\": 2, \"owners\": \"balanced\", \"compressed\": false,";
static const char FILE_LINE[] =
    "{\"size\": 9, \"index\": [4, 5], \"xxh3\": \"000102030405060708090a0b0c0d0e0f\"}";
static const char MESH[] = "{\"names\": [\"dp\"], \"shape\": [2]}";

static int decoded_minor;

static fsdp_status decode_hashed(const char *version, const char *head, const char *files,
                                 const char *meshes, const char *flats, const char *entries,
                                 fsdp_error *err)
{
    fsdp_text text = {0};
    fsdp_text_addf(
        &text,
        "{\n\"fsdp\": %s,%s\"files\": [%s],\"meshes\": [%s],\"flats\": [%s],\"entries\": [%s],",
        version, head, files, meshes, flats, entries);
    add_hash(&text);
    fsdp_manifest manifest;
    fsdp_status status = decode(text.data, text.size, &manifest, err);
    if (status == FSDP_OK) {
        decoded_minor = manifest.minor;
        fsdp_manifest_release(&manifest);
    }
    fsdp_text_release(&text);
    return status;
}

static fsdp_status decode_entries(const char *entries, fsdp_error *err)
{
    return decode_hashed("{\"major\": 1}", HEAD, FILE_LINE, MESH,
                         "{\"name\": \"f\", \"dtype\": \"f32\", \"mesh\": 0, \"count\": 8}",
                         entries, err);
}

static void expect_damage(const char *entries)
{
    fsdp_error err = {0};
    cr_assert_eq(decode_entries(entries, &err), FSDP_ERR_DAMAGED, "%s: %s", entries, err.text);
    cr_assert(strstr(err.text, "m.json"), "%s", err.text);
    cr_assert(strstr(err.text, "line"), "%s", err.text);
}

Test(manifest, entries_that_contradict_themselves_are_damage)
{
    cr_assert_eq(decode_entries("{\"name\": \"a\", \"value\": {\"i64\": 1}}", NULL), FSDP_OK);
#define TENSOR "{\"name\": \"a\", \"dtype\": \"f32\", \"shape\": [4], "
    cr_assert_eq(decode_entries(TENSOR "\"mesh\": 0, \"placements\": [\"S0\"]}", NULL), FSDP_OK);
    expect_damage(TENSOR "\"mesh\": 1, \"placements\": [\"S0\"]}");
    expect_damage(TENSOR "\"mesh\": -1, \"placements\": [\"S0\"]}");
    expect_damage(TENSOR "\"mesh\": 0, \"placements\": [\"S1\"]}");
    expect_damage(TENSOR "\"mesh\": 0, \"placements\": [\"S00\"]}");
    expect_damage(TENSOR "\"mesh\": 0, \"placements\": [\"S\"]}");
    expect_damage(TENSOR "\"mesh\": 0, \"placements\": [\"SS0\"]}");
    expect_damage(TENSOR "\"mesh\": 0, \"placements\": [\"P\"]}");
    expect_damage(TENSOR "\"mesh\": 0, \"placements\": []}");
    expect_damage(TENSOR "\"mesh\": 0, \"placements\": [\"R\", \"R\"]}");
    expect_damage(TENSOR "\"mesh\": 0}");
    expect_damage(TENSOR "\"boxes\": [[0, [0], [3]]]}");
    expect_damage(TENSOR "\"boxes\": [[2, [0], [4]]]}");
    expect_damage(TENSOR "\"boxes\": [[0, [0], [4, 1]]]}");
    expect_damage(TENSOR "\"boxes\": [[0, [0, 0], [4, 1]]]}");
    expect_damage(TENSOR "\"boxes\": [[0, [0], [4], 1]]}");
    expect_damage(TENSOR "\"mesh\": 0, \"placements\": [\"R\"]}, " TENSOR
                         "\"mesh\": 0, \"placements\": [\"R\"]}");
    expect_damage(TENSOR "\"shape\": [4], \"mesh\": 0, \"placements\": [\"R\"]}");
    expect_damage("{\"name\": \"a\", \"dtype\": \"f33\", \"shape\": [4], \"mesh\": 0, "
                  "\"placements\": [\"R\"]}");
    expect_damage("{\"name\": \"a\", \"dtype\": \"f32\", \"shape\": [-4], \"mesh\": 0, "
                  "\"placements\": [\"R\"]}");
    expect_damage(
        "{\"name\": \"a\", \"dtype\": \"f32\", \"shape\": [4611686018427387904, 4], \"mesh\": 0, "
        "\"placements\": [\"R\"]}");
#define VALUE "{\"name\": \"a.0\", \"value\": {\"i64\": 1}, "
    cr_assert_eq(decode_entries(VALUE "\"path\": [1, -1]}", NULL), FSDP_OK);
    expect_damage(VALUE "\"path\": [1]}");
    expect_damage(VALUE "\"path\": []}");
    expect_damage(VALUE "\"path\": [-1, 1]}");
    expect_damage(VALUE "\"path\": [1, -1, 0]}");
    expect_damage(VALUE "\"path\": [1, 4294967295]}");
    expect_damage("{\"path\": [0]}");
    cr_assert_eq(decode_entries(VALUE "\"path\": [1, -1], \"tuples\": [1]}", NULL), FSDP_OK);
    expect_damage(VALUE "\"path\": [1, -1], \"tuples\": [0]}");
    expect_damage(VALUE "\"path\": [1, -1], \"tuples\": [2]}");
    expect_damage(VALUE "\"path\": [1, -1], \"tuples\": [-1]}");
    expect_damage(VALUE "\"path\": [1, -1], \"tuples\": [1, 1]}");
    expect_damage(VALUE "\"path\": [1, -1], \"tuples\": true}");
    expect_damage(VALUE "\"tuples\": [1], \"path\": [1, -1]}");
    expect_damage("{\"name\": \"b.0\", \"value\": {\"i64\": 1}, \"path\": [1, -1]}, " VALUE
                  "\"tuples\": [1]}");
    expect_damage(VALUE "\"whole\": true}");
#define OBJECT "{\"name\": \"\", \"value\": {\"i64\": 1}, "
    cr_assert_eq(decode_entries(OBJECT "\"whole\": true}", NULL), FSDP_OK);
    expect_damage(OBJECT "\"whole\": false}");
    expect_damage(OBJECT "\"whole\": [0]}");
    expect_damage(OBJECT "\"whole\": true, \"tuples\": [0]}");
    expect_damage(OBJECT "\"path\": [0], \"whole\": true}");
    expect_damage(OBJECT "\"whole\": true, \"path\": [0]}");
    expect_damage("{\"name\": \"a\", \"alias\": \"b\"}");
    expect_damage("{\"name\": \"a\"}");
    expect_damage("{\"value\": {\"i64\": 1}}");
    expect_damage("{\"name\": \"a\", \"shape\": [3], \"flat\": [1, 0]}");
    expect_damage("{\"name\": \"a\", \"shape\": [9], \"flat\": [0, 0]}");
    expect_damage("{\"name\": \"a\", \"shape\": [3], \"flat\": [0, 0]}, {\"name\": \"v\", "
                  "\"value\": {\"i64\": 1}}, "
                  "{\"name\": \"b\", \"shape\": [3], \"flat\": [0, 3]}");
}

Test(manifest, values_that_are_none_are_damage)
{
    const char *const bad[] = {"5",
                               "{}",
                               "{\"i64\": 1, \"u64\": 1}",
                               "{\"i32\": 1}",
                               "{\"i64\": 9223372036854775808}",
                               "{\"u64\": -1}",
                               "{\"i64\": 1.0}",
                               "{\"f64\": \"NaN\"}",
                               "{\"f64\": \"nan 7ff0000000000000\"}",
                               "{\"f64\": \"nan 7FF8000000000001\"}",
                               "{\"f64\": \"nan 7ff800000000000\"}",
                               "{\"f64\": \"nan 07ff8000000000001\"}",
                               "{\"bytes\": \"A\"}",
                               "{\"bytes\": \"AB=D\"}",
                               "{\"dict\": [[{\"i64\": 1}]]}",
                               "{\"dict\": [[{\"i64\": 1}, {\"i64\": 1}, {\"i64\": 1}]]}",
                               "{\"list\": [1]}",
                               "{\"integer\": \"12u4\"}",
                               "{\"integer\": \"-\"}",
                               "{\"tuple\": true}",
                               "{\"tuple\": true, \"list\": []}",
                               "{\"list\": [], \"tuple\": 1}",
                               "{\"list\": [], \"tuple\": true, \"tuple\": true}",
                               "{\"dict\": [], \"tuple\": true}",
                               "{\"i64\": 1, \"tuple\": true}",
                               "{\"null\": 0}"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        char entry[200];
        snprintf(entry, sizeof entry, "{\"name\": \"v\", \"value\": %s}", bad[i]);
        expect_damage(entry);
    }
    fsdp_text deep = {0};
    fsdp_text_addf(&deep, "{\"name\": \"v\", \"value\": ");
    for (int i = 0; i < 5000; i++)
        fsdp_text_addf(&deep, "{\"list\": [");
    expect_damage(deep.data);
    fsdp_text_release(&deep);
}

Test(manifest, heads_that_contradict_themselves_are_damage)
{
    const char *version = "{\"major\": 1, \"minor\": 99, \"later\": [{}]}";
    fsdp_error err = {0};
    cr_assert_eq(decode_hashed(version, HEAD, FILE_LINE, MESH, "", "", &err), FSDP_OK, "%s",
                 err.text);
    cr_assert_eq(decoded_minor, 99);
    cr_assert_eq(
        decode_hashed("{\"major\": 1, \"minor\": -1}", HEAD, FILE_LINE, MESH, "", "", &err),
        FSDP_ERR_DAMAGED);
    cr_assert_eq(decode_hashed(version, HEAD, "", MESH, "", "", &err), FSDP_ERR_DAMAGED);
    cr_assert_eq(decode_hashed("{}", HEAD, FILE_LINE, MESH, "", "", &err), FSDP_ERR_DAMAGED);
    cr_assert_eq(decode_hashed(version, "\"world_size\": 2,", FILE_LINE, MESH, "", "", &err),
                 FSDP_ERR_DAMAGED);
    fsdp_text twice = {0};
    fsdp_text_addf(&twice, "%s%s", HEAD, HEAD);
    cr_assert_eq(decode_hashed(version, twice.data, FILE_LINE, MESH, "", "", &err),
                 FSDP_ERR_DAMAGED);
    fsdp_text_release(&twice);
    fsdp_text two = {0};
    fsdp_text_addf(&two, "%s,%s", FILE_LINE, FILE_LINE);
    cr_assert_eq(decode_hashed(version, HEAD, two.data, MESH, "", "", &err), FSDP_ERR_DAMAGED);
    fsdp_text_release(&two);
    cr_assert_eq(decode_hashed(version, HEAD,
                               "{\"size\": 9, \"index\": [5, 5], \"xxh3\": "
                               "\"000102030405060708090a0b0c0d0e0f\"}",
                               MESH, "", "", &err),
                 FSDP_ERR_DAMAGED);
    cr_assert_eq(decode_hashed(version, HEAD, FILE_LINE, "{\"names\": [\"dp\"], \"shape\": [3]}",
                               "", "", &err),
                 FSDP_ERR_DAMAGED);
    cr_assert_eq(decode_hashed(version, HEAD, FILE_LINE,
                               "{\"names\": [\"dp\"], \"shape\": [2], \"ranks\": [0]}", "", "",
                               &err),
                 FSDP_ERR_DAMAGED);
    cr_assert_eq(decode_hashed(version, HEAD, FILE_LINE,
                               "{\"names\": [\"dp\"], \"shape\": [2], \"ranks\": [0, 0]}", "", "",
                               &err),
                 FSDP_ERR_DAMAGED);
}

/* Programs that recognise a checkpoint read only these lines. */
Test(manifest, it_begins_with_its_version_or_is_damage)
{
    fsdp_error err = {0};
    cr_assert_eq(decode_hashed("{\"minor\": 0, \"major\": 1}", HEAD, FILE_LINE, MESH, "", "", &err),
                 FSDP_ERR_DAMAGED);
    cr_assert(strstr(err.text, "do not give the format version"), "%s", err.text);
}

Test(manifest, unknown_keys_are_ignored)
{
    fsdp_text head = {0};
    fsdp_text_addf(&head, "\"new\": {\"a\": [1, {\"b\": null}]}, %s", HEAD);
    fsdp_error err = {0};
    cr_assert_eq(decode_hashed("{\"major\": 1}", head.data, FILE_LINE,
                               "{\"names\": [\"dp\"], \"new\": 1, \"shape\": [2]}", "",
                               "{\"name\": \"a\", \"new\": \"x\", \"value\": {\"null\": null}}",
                               &err),
                 FSDP_OK, "%s", err.text);
    fsdp_text_release(&head);
}

Test(manifest, metadata_comes_back_and_is_written_only_if_there_is_some)
{
    fsdp_manifest_file file = {0};
    fsdp_manifest manifest = {
        .step = FSDP_NO_STEP, .world = 1, .sd = new_sd(), .files = &file, .file_count = 1};
    fsdp_text text = {0};
    fsdp_error err = {0};
    encode(&manifest, &text);
    cr_assert(!strstr(text.data, "metadata"));
    text.size = 0;
    manifest.metadata = (char[]){"{\"b\": \"2\", \"a\": \"\\u0000\\n\"}"};
    encode(&manifest, &text);
    fsdp_manifest back;
    cr_assert_eq(decode(text.data, text.size, &back, &err), FSDP_OK, "%s", err.text);
    cr_assert_str_eq(back.metadata, manifest.metadata);
    fsdp_manifest_release(&back);
    fsdp_sd_free(manifest.sd);
    fsdp_text_release(&text);
}

Test(manifest, metadata_that_is_no_object_of_texts_is_damage)
{
    static const char *const wrong[] = {"[]", "null", "{\"a\": 1}", "{\"a\": \"1\", \"a\": \"2\"}",
                                        "{}, \"metadata\": {}"};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        fsdp_text head = {0};
        fsdp_error err = {0};
        fsdp_text_addf(&head, "\"metadata\": %s, %s", wrong[i], HEAD);
        cr_assert_eq(decode_hashed("{\"major\": 1}", head.data, FILE_LINE, MESH, "", "", &err),
                     FSDP_ERR_DAMAGED, "%s", wrong[i]);
        fsdp_text_release(&head);
    }
}

Test(manifest, a_later_major_version_names_what_is_needed)
{
    fsdp_error err = {0};
    cr_assert_eq(decode_hashed("{\"major\": 2}", HEAD, FILE_LINE, MESH, "", "", &err),
                 FSDP_ERR_NOT_FOUND);
    cr_assert(strstr(err.text, "use an fsdp that reads version 2"), "%s", err.text);
    /* a version whose text ends differently */
    static const char later[] = "{\n\"fsdp\": {\"major\": 3, \"minor\": 0}, \"sha\": \"\"}";
    fsdp_manifest manifest;
    cr_assert_eq(decode(later, sizeof later - 1, &manifest, &err), FSDP_ERR_NOT_FOUND);
    cr_assert(strstr(err.text, "use an fsdp that reads version 3"), "%s", err.text);
}

Test(manifest, what_cannot_be_stored_is_refused_by_name)
{
    fsdp_manifest_file files[2] = {{0}, {0}};
    fsdp_manifest manifest = {
        .step = FSDP_NO_STEP, .world = 2, .sd = new_sd(), .files = files, .file_count = 2};
    fsdp_error err = {0};
    fsdp_text text = {0};
    fsdp_mesh *mesh = mesh_of(1, (int64_t[]){4}, NULL);
    cr_assert_eq(fsdp_sd_add_tensor(manifest.sd, FSDP_NAME("wide"),
                                    &(fsdp_tensor){FSDP_F32, 0, NULL, {.mesh = mesh}, NULL}, NULL),
                 FSDP_OK);
    cr_assert_eq(fsdp_manifest_encode(&manifest, &text, &err), FSDP_ERR_USAGE);
    cr_assert(strstr(err.text, "'wide'") && strstr(err.text, "rank 3"), "%s", err.text);
    manifest.file_count = 1;
    cr_assert_eq(fsdp_manifest_encode(&manifest, &text, &err), FSDP_ERR_USAGE);
    fsdp_mesh_free(mesh);
    fsdp_sd_free(manifest.sd);
    fsdp_text_release(&text);
}

Test(manifest, every_failing_allocation_is_an_error)
{
    fsdp_manifest_file files[4];
    fsdp_manifest manifest = example(files), back;
    fsdp_text text = {0};
    encode(&manifest, &text);
    fsdp_mem_fail_after(-1, false);
    cr_assert_eq(decode(text.data, text.size, &back, NULL), FSDP_OK);
    int64_t n = fsdp_mem_fail_after(-1, false);
    fsdp_manifest_release(&back);
    cr_assert_gt(n, 20);
    for (int64_t i = 0; i < n; i++) {
        fsdp_error err = {0};
        fsdp_mem_fail_after(i, false);
        fsdp_status status = decode(text.data, text.size, &back, &err);
        fsdp_mem_fail_after(-1, false);
        cr_assert_neq(status, FSDP_OK, "allocation %lld", (long long)i);
        cr_assert_null(back.sd);
    }
    fsdp_mem_fail_after(-1, false);
    fsdp_text out = {0};
    encode(&manifest, &out);
    n = fsdp_mem_fail_after(-1, false);
    fsdp_text_release(&out);
    for (int64_t i = 0; i < n; i++) {
        fsdp_mem_fail_after(i, false);
        fsdp_status status = fsdp_manifest_encode(&manifest, &out, NULL);
        fsdp_mem_fail_after(-1, false);
        fsdp_text_release(&out);
        cr_assert_eq(status, FSDP_ERR_LIMIT);
    }
    fsdp_text_release(&text);
    fsdp_sd_free(manifest.sd);
}

/* The format as docs/native_format.md shows it; only the writer's version may differ. */
Test(manifest, the_text_is_the_documented_one)
{
    static const char expected[] =
        "\"kind\": \"full\",\n\"step\": 1200,\n\"run\": \"000102030405060708090a0b0c0d0e0f\",\n"
        "\"world_size\": 2,\n\"owners\": \"balanced\",\n\"compressed\": false,\n\"files\": [\n"
        "{\"size\": 9, \"index\": [4, 5], \"xxh3\": \"00000000000000000000000000000000\"}\n],\n"
        "\"meshes\": [\n{\"names\": [\"dp\"], \"shape\": [2]}\n],\n\"flats\": [\n],\n\"entries\": "
        "[\n"
        "{\"name\": \"w\", \"dtype\": \"f32\", \"shape\": [4, 5], \"mesh\": 0, \"placements\": "
        "[\"S0\"]},\n"
        "{\"name\": \"lr\", \"value\": {\"f64\": 0.1}}\n],\n\"xxh3\": \"";
    fsdp_manifest_file file = {.size = 9, .index_offset = 4, .index_size = 5};
    fsdp_manifest manifest = {
        .kind = FSDP_FULL, .step = 1200, .world = 2, .files = &file, .file_count = 1};
    for (int i = 0; i < 16; i++)
        manifest.run[i] = (uint8_t)i;
    manifest.sd = new_sd();
    fsdp_mesh *mesh = mesh_of(1, (int64_t[]){2}, NULL);
    fsdp_placement rows = {.kind = FSDP_SHARD};
    int64_t shape[] = {4, 5};
    cr_assert_eq(fsdp_sd_add_tensor(
                     manifest.sd, FSDP_NAME("w"),
                     &(fsdp_tensor){FSDP_F32, 2, shape, {.mesh = mesh, .placement = {rows}}, NULL},
                     NULL),
                 FSDP_OK);
    add_value(manifest.sd, "lr", fsdp_value_f64(0.1));
    fsdp_text text = {0};
    encode(&manifest, &text);
    const char *kind = strstr(text.data, "\"kind\"");
    cr_assert_eq(
        strncmp(text.data, "{\n\"fsdp\": {\"major\": 1, \"minor\": 0, \"writer\": \"fsdp ", 46), 0);
    cr_assert_not_null(kind);
    cr_assert_eq(strncmp(kind, expected, sizeof expected - 1), 0, "%s", kind);
    cr_assert_eq(strlen(kind), sizeof expected - 1 + 32 + 4);
    fsdp_text_release(&text);
    fsdp_mesh_free(mesh);
    fsdp_sd_free(manifest.sd);
}

/* --- in a directory --- */

static void write_file(fsdp_io *io, const char *path, const char *data, size_t size)
{
    fsdp_error err = {0};
    fsdp_file *file;
    cr_assert_eq(fsdp_io_open(io, path, FSDP_IO_CREATE, &file, &err), FSDP_OK, "%s", err.text);
    cr_assert_eq(fsdp_io_write(file, path, data, size, 0, &err), FSDP_OK);
    cr_assert_eq(fsdp_io_close(&file, path, &err), FSDP_OK);
}

static void expect_read(fsdp_io *io, const char *dir, fsdp_status status, const char *words)
{
    fsdp_manifest manifest;
    fsdp_error err = {0};
    cr_assert_eq(fsdp_manifest_read(io, dir, &manifest, &err), status, "%s", err.text);
    if (status == FSDP_OK)
        fsdp_manifest_release(&manifest);
    else
        cr_assert(strstr(err.text, words), "%s", err.text);
}

Test(manifest, a_directory_is_complete_or_says_what_is_missing)
{
    fsdp_io *io;
    fsdp_manifest_file files[4];
    fsdp_manifest manifest = example(files);
    fsdp_text text = {0};
    encode(&manifest, &text);
    cr_assert_eq(fsdp_sim_create(0, &io, NULL), FSDP_OK);
    expect_read(io, "/c", FSDP_ERR_NOT_FOUND, "'/c'");
    cr_assert_eq(fsdp_io_mkdir(io, "/c", NULL), FSDP_OK);
    expect_read(io, "/c", FSDP_ERR_NOT_FOUND, "not a complete checkpoint: it has no manifest");
    write_file(io, "/c/manifest.json", text.data, text.size);
    for (int i = 0; i < 4; i++) {
        char name[FSDP_SHARD_NAME_SIZE], path[100], bytes[200] = {0};
        fsdp_shard_name(i, 4, name);
        snprintf(path, sizeof path, "/c/%s", name);
        expect_read(io, "/c", FSDP_ERR_DAMAGED, name);
        write_file(io, path, bytes, 99);
        expect_read(io, "/c", FSDP_ERR_DAMAGED, name);
        cr_assert_eq(io->ops->unlink(io, path), 0);
        write_file(io, path, bytes, (size_t)files[i].size);
    }
    expect_read(io, "/c", FSDP_OK, "");
    expect_read(io, "/c/manifest.json", FSDP_ERR_NOT_FOUND, "is a file");
    cr_assert_eq(fsdp_io_mkdir(io, "/c.old-00000000000000000000000000000000", NULL), FSDP_OK);
    cr_assert_eq(io->ops->rename(io, "/c/manifest.json",
                                 "/c.old-00000000000000000000000000000000/manifest.json", true),
                 0);
    cr_assert_eq(fsdp_io_remove_tree(io, "/c", NULL), FSDP_OK);
    expect_read(io, "/c", FSDP_ERR_NOT_FOUND, "rename '/c.old-");
    fsdp_sim_free(io);
    fsdp_text_release(&text);
    fsdp_sd_free(manifest.sd);
}

Test(manifest, a_file_takes_at_most_160_bytes)
{
    fsdp_manifest_file *files = fsdp_alloc(1001, sizeof *files);
    for (int i = 0; i < 1001; i++)
        files[i] = (fsdp_manifest_file){INT64_MAX, INT64_MAX - INT32_MAX, INT32_MAX, {{0}}};
    fsdp_manifest manifest = {
        .step = 1, .world = 1, .sd = new_sd(), .files = files, .file_count = 1};
    fsdp_text one = {0}, many = {0};
    encode(&manifest, &one);
    manifest.world = manifest.file_count = 1001;
    encode(&manifest, &many);
    cr_assert_leq(many.size - one.size, 1000 * 160 + 3);
    fsdp_text_release(&one);
    fsdp_text_release(&many);
    fsdp_free(files);
    fsdp_sd_free(manifest.sd);
}
