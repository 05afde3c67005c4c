/* State dicts: what is taken, what is refused by name, and that everything but tensor memory is a copy. */
#include "base/core/mem.h"
#include "statedict/sd/describe.h"
#include "statedict/sd/layout_internal.h"
#include <fsdp/sd.h>

#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static fsdp_mesh *make_mesh(int64_t size)
{
    const char *names[] = {"dp"};
    fsdp_mesh *mesh = NULL;
    cr_assert_eq(fsdp_mesh_create(1, &size, names, NULL, &mesh, NULL), FSDP_OK);
    return mesh;
}

static fsdp_sd *make_sd(void)
{
    fsdp_sd *sd = NULL;
    cr_assert_eq(fsdp_sd_create(&sd, NULL), FSDP_OK);
    return sd;
}

static const fsdp_placement shard_rows = {.kind = FSDP_SHARD};

static fsdp_status add_rows(fsdp_sd *sd, const char *name, size_t name_size, int64_t rows,
                            const fsdp_mesh *mesh, void *data, fsdp_error *err)
{
    return fsdp_sd_add_tensor(
        sd, name, name_size,
        &(fsdp_tensor){FSDP_F32, 1, &rows, {.mesh = mesh, .placement = {shard_rows}}, data}, err);
}

static void expect_refusal(fsdp_status status, const fsdp_error *err, const char *words)
{
    cr_assert_eq(status, FSDP_ERR_USAGE);
    cr_assert_eq(err->status, FSDP_ERR_USAGE);
    cr_assert(strstr(err->text, words), "'%s' lacks '%s'", err->text, words);
}

/* --- tensors ------------------------------------------------------------------------------------ */

Test(sd, an_entry_is_what_was_added)
{
    fsdp_sd *sd = make_sd();
    fsdp_mesh *mesh = make_mesh(4);
    float data[4] = {0};
    int64_t shape[] = {7, 2};
    cr_assert_eq(
        fsdp_sd_add_tensor(
            sd, FSDP_NAME("w"),
            &(fsdp_tensor){FSDP_BF16, 2, shape, {.mesh = mesh, .placement = {shard_rows}}, data},
            NULL),
        FSDP_OK);
    shape[0] = 0;
    fsdp_mesh_free(mesh);
    cr_assert_eq(fsdp_sd_count(sd), 1);
    const fsdp_entry *entry = fsdp_sd_at(sd, 0);
    cr_assert_eq(entry->kind, FSDP_ENTRY_TENSOR);
    cr_assert_str_eq(entry->name, "w");
    cr_assert_eq(entry->name_size, 1);
    cr_assert_eq(entry->dtype, FSDP_BF16);
    cr_assert_eq(entry->ndim, 2);
    cr_assert_eq(entry->shape[0], 7);
    cr_assert_eq(entry->flat, -1);
    cr_assert_eq(entry->data, data);
    cr_assert_eq(fsdp_mesh_size(entry->layout.mesh), 4);
    cr_assert_eq(fsdp_entry_bytes(entry), 28);
    cr_assert_eq(fsdp_entry_local_bytes(entry, 0), 8);
    cr_assert_eq(fsdp_entry_local_bytes(entry, 3), 4);
    cr_assert_eq(fsdp_entry_local_bytes(entry, 4), 0);
    cr_assert_null(fsdp_sd_at(sd, 1));
    fsdp_sd_free(sd);
    fsdp_sd_free(NULL);
}

Test(sd, packed_six_bit_elements_count_as_bytes)
{
    fsdp_sd *sd = make_sd();
    fsdp_mesh *mesh = make_mesh(1);
    int64_t bytes = 12;
    cr_assert_eq(fsdp_sd_add_tensor(
                     sd, FSDP_NAME("f6"),
                     &(fsdp_tensor){
                         FSDP_F6_E2M3, 1, &bytes, {.mesh = mesh, .placement = {shard_rows}}, NULL},
                     NULL),
                 FSDP_OK);
    cr_assert_eq(fsdp_entry_bytes(fsdp_sd_at(sd, 0)), 12);
    fsdp_mesh_free(mesh);
    fsdp_sd_free(sd);
}

Test(sd, equal_meshes_are_kept_once)
{
    fsdp_sd *sd = make_sd();
    fsdp_mesh *first = make_mesh(3), *twin = make_mesh(3), *other = make_mesh(2);
    cr_assert_eq(add_rows(sd, FSDP_NAME("a"), 5, first, NULL, NULL), FSDP_OK);
    cr_assert_eq(add_rows(sd, FSDP_NAME("b"), 5, other, NULL, NULL), FSDP_OK);
    cr_assert_eq(add_rows(sd, FSDP_NAME("c"), 5, twin, NULL, NULL), FSDP_OK);
    cr_assert_eq(fsdp_sd_at(sd, 0)->layout.mesh, fsdp_sd_at(sd, 2)->layout.mesh);
    cr_assert_neq(fsdp_sd_at(sd, 0)->layout.mesh, first);
    cr_assert_neq(fsdp_sd_at(sd, 0)->layout.mesh, fsdp_sd_at(sd, 1)->layout.mesh);
    fsdp_mesh_free(first);
    fsdp_mesh_free(twin);
    fsdp_mesh_free(other);
    fsdp_sd_free(sd);
}

Test(sd, boxes_are_copied_and_their_copies_counted)
{
    fsdp_sd *sd = make_sd();
    fsdp_rank_box boxes[] = {{0, {.ndim = 1, .len = {4}}},
                             {1, {.ndim = 1, .lo = {4}, .len = {2}}},
                             {1, {.ndim = 1, .len = {4}}},
                             {5, {.ndim = 1, .lo = {4}, .len = {2}}},
                             {9, {.ndim = 1, .lo = {4}, .len = {2}}}};
    fsdp_layout layout = {.kind = FSDP_LAYOUT_BOXES, .boxes = boxes, .box_count = 5};
    int64_t rows = 6;
    cr_assert_eq(fsdp_sd_add_tensor(sd, FSDP_NAME("t"),
                                    &(fsdp_tensor){FSDP_I64, 1, &rows, layout, NULL}, NULL),
                 FSDP_OK);
    const fsdp_layout *own = &fsdp_sd_at(sd, 0)->layout;
    cr_assert(own->copies);
    for (size_t i = 0; i < 5; i++) {
        size_t index = i == 2;
        int rank = boxes[i].rank;
        cr_assert_eq(fsdp_layout_copies(own, rank, index),
                     fsdp_layout_copies(&layout, rank, index));
        cr_assert_eq(fsdp_layout_copy(own, rank, index), fsdp_layout_copy(&layout, rank, index));
    }
    cr_assert_eq(fsdp_layout_copies(own, 9, 0), 3);
    cr_assert_eq(fsdp_layout_copy(own, 9, 0), 2);
    cr_assert_eq(fsdp_layout_copy(own, 1, 1), 1);
    memset(boxes, 0, sizeof boxes);
    cr_assert_eq(fsdp_entry_local_bytes(fsdp_sd_at(sd, 0), 1), 48);
    cr_assert_eq(fsdp_entry_local_bytes(fsdp_sd_at(sd, 0), 5), 16);
    fsdp_sd_free(sd);
}

Test(sd, only_what_a_layout_means_is_kept)
{
    fsdp_sd *sd = make_sd();
    fsdp_mesh *mesh = make_mesh(2);
    fsdp_layout layout = {.kind = FSDP_LAYOUT_MESH,
                          .mesh = mesh,
                          .flat_count = 7,
                          .placement = {{.dim = 3, .split = 4}, {.dim = 9}}};
    int64_t rows = 6;
    cr_assert_eq(fsdp_sd_add_tensor(sd, FSDP_NAME("t"),
                                    &(fsdp_tensor){FSDP_I64, 1, &rows, layout, NULL}, NULL),
                 FSDP_OK);
    const fsdp_layout *own = &fsdp_sd_at(sd, 0)->layout;
    cr_assert_eq(own->placement[0].dim, 0);
    cr_assert_eq(own->placement[0].split, 0);
    cr_assert_eq(own->placement[1].dim, 0);
    cr_assert_eq(own->flat_count, 0);
    fsdp_mesh_free(mesh);
    fsdp_sd_free(sd);
}

Test(sd, bad_tensors_are_refused_by_name)
{
    fsdp_sd *sd = make_sd();
    fsdp_mesh *mesh = make_mesh(2);
    fsdp_layout layout = {.kind = FSDP_LAYOUT_MESH, .mesh = mesh};
    int64_t rows = 6, negative = -1, huge = INT64_MAX / 2;
    fsdp_error err = {0};
    fsdp_status status = fsdp_sd_add_tensor(
        sd, FSDP_NAME("w"), &(fsdp_tensor){(fsdp_dtype)99, 1, &rows, layout, NULL}, &err);
    expect_refusal(status, &err, "tensor 'w': the dtype 99 is unknown");
    status = fsdp_sd_add_tensor(sd, FSDP_NAME("w"),
                                &(fsdp_tensor){FSDP_F32, 1, &negative, layout, NULL}, &err);
    expect_refusal(status, &err, "tensor 'w': dim 0 of the shape cannot have length -1");
    status = fsdp_sd_add_tensor(sd, FSDP_NAME("w"),
                                &(fsdp_tensor){FSDP_F32, 1, &huge, layout, NULL}, &err);
    expect_refusal(status, &err, "too large");
    status =
        fsdp_sd_add_tensor(sd, FSDP_NAME("w"), &(fsdp_tensor){FSDP_F32, 1, &rows, {0}, NULL}, &err);
    expect_refusal(status, &err, "no mesh");
    status = add_rows(sd, FSDP_NAME("w"), 3, NULL, NULL, &err);
    expect_refusal(status, &err, "no mesh");
    layout.placement[0].kind = FSDP_PARTIAL;
    status = fsdp_sd_add_tensor(sd, FSDP_NAME("w"),
                                &(fsdp_tensor){FSDP_F32, 1, &rows, layout, NULL}, &err);
    expect_refusal(status, &err, "tensor 'w': it is Partial on mesh dim 'dp'");
    cr_assert_eq(fsdp_sd_count(sd), 0);
    cr_assert_eq(fsdp_sd_find(sd, FSDP_NAME("w")), -1);
    cr_assert_eq(add_rows(sd, FSDP_NAME("w"), 3, mesh, NULL, &err), FSDP_OK);
    fsdp_mesh_free(mesh);
    fsdp_sd_free(sd);
}

/* --- names -------------------------------------------------------------------------------------- */

Test(sd, names_may_be_empty_and_hold_anything_that_is_utf8)
{
    static char longest[FSDP_MAX_NAME];
    memset(longest, 'n', sizeof longest);
    const struct {
        const char *name;
        size_t size;
    } names[] = {{NULL, 0},       {"a/b", 3}, {"a\0b", 3},
                 {"a\0c", 3},     {"a", 1},   {"\n\x1b", 2},
                 {"\xc3\xa9", 2}, {"..", 2},  {longest, sizeof longest}};
    fsdp_sd *sd = make_sd();
    fsdp_mesh *mesh = make_mesh(2);
    for (size_t i = 0; i < 9; i++)
        cr_assert_eq(add_rows(sd, names[i].name, names[i].size, 3, mesh, NULL, NULL), FSDP_OK);
    for (size_t i = 0; i < 9; i++) {
        const fsdp_entry *entry = fsdp_sd_at(sd, i);
        cr_assert_eq(fsdp_sd_find(sd, names[i].name, names[i].size), (int64_t)i);
        cr_assert_eq(entry->name_size, names[i].size);
        cr_assert(names[i].size == 0 || memcmp(entry->name, names[i].name, names[i].size) == 0);
        cr_assert_eq(entry->name[entry->name_size], '\0');
    }
    cr_assert_eq(fsdp_sd_find(sd, "a\0d", 3), -1);
    fsdp_mesh_free(mesh);
    fsdp_sd_free(sd);
}

Test(sd, bad_names_are_refused)
{
    static char long_name[FSDP_MAX_NAME + 1];
    fsdp_sd *sd = make_sd();
    fsdp_mesh *mesh = make_mesh(2);
    fsdp_error err = {0};
    memset(long_name, 'n', sizeof long_name);
    expect_refusal(add_rows(sd, long_name, sizeof long_name, 3, mesh, NULL, &err), &err,
                   "name is 65536 bytes long, at most 65,535 are allowed");
    expect_refusal(add_rows(sd, "a\xff", 2, 3, mesh, NULL, &err), &err,
                   "name is not UTF-8: 'a\\xff'");
    expect_refusal(add_rows(sd, NULL, 2, 3, mesh, NULL, &err), &err, "'name' is NULL");
    cr_assert_eq(fsdp_sd_count(sd), 0);
    fsdp_mesh_free(mesh);
    fsdp_sd_free(sd);
}

Test(sd, the_same_name_twice_is_refused_whatever_the_kind)
{
    fsdp_sd *sd = make_sd();
    fsdp_mesh *mesh = make_mesh(2);
    fsdp_value value = fsdp_value_i64(1);
    fsdp_error err = {0};
    cr_assert_eq(add_rows(sd, FSDP_NAME("w\n"), 3, mesh, NULL, NULL), FSDP_OK);
    cr_assert_eq(fsdp_sd_add_value(sd, FSDP_NAME("step"), &value, NULL), FSDP_OK);
    expect_refusal(add_rows(sd, FSDP_NAME("w\n"), 3, mesh, NULL, &err), &err,
                   "name 'w\\x0a' is used twice");
    expect_refusal(fsdp_sd_add_value(sd, FSDP_NAME("w\n"), &value, &err), &err, "twice");
    expect_refusal(fsdp_sd_add_alias(sd, FSDP_NAME("step"), FSDP_NAME("w\n"), &err), &err, "twice");
    cr_assert_eq(fsdp_sd_count(sd), 2);
    fsdp_mesh_free(mesh);
    fsdp_sd_free(sd);
}

Test(sd, a_hundred_thousand_names_are_found)
{
    enum { NAMES = 100000 };
    fsdp_sd *sd = make_sd();
    fsdp_mesh *mesh = make_mesh(2);
    char name[64];
    for (int i = 0; i < NAMES; i++) {
        int size = snprintf(name, sizeof name, "model.layers.%d.experts.%d.w", i / 64, i % 64);
        cr_assert_eq(add_rows(sd, name, (size_t)size, i, mesh, NULL, NULL), FSDP_OK);
    }
    for (int i = 0; i < NAMES + 10; i++) {
        int size = snprintf(name, sizeof name, "model.layers.%d.experts.%d.w", i / 64, i % 64);
        cr_assert_eq(fsdp_sd_find(sd, name, (size_t)size), i < NAMES ? i : -1);
    }
    fsdp_mesh_free(mesh);
    fsdp_sd_free(sd);
}

Test(sd, names_are_found_where_room_was_made_for_them)
{
    fsdp_sd *sd = make_sd();
    fsdp_mesh *mesh = make_mesh(2);
    char name[32];
    for (int i = 0; i < 3000; i++) {
        if (i == 1) /* one stands in the table already */
            fsdp_sd_expect(sd, 1000);
        if (i == 2000) /* more came than were expected */
            fsdp_sd_expect(sd, 0);
        int size = snprintf(name, sizeof name, "w.%d", i);
        cr_assert_eq(add_rows(sd, name, (size_t)size, i, mesh, NULL, NULL), FSDP_OK);
    }
    fsdp_error err = {0};
    cr_expect_eq(add_rows(sd, "w.0", 3, 1, mesh, NULL, &err), FSDP_ERR_USAGE);
    for (int i = 0; i < 3001; i++) {
        int size = snprintf(name, sizeof name, "w.%d", i);
        cr_assert_eq(fsdp_sd_find(sd, name, (size_t)size), i < 3000 ? i : -1);
        cr_assert(i == 3000 || fsdp_sd_at(sd, (size_t)i)->shape[0] == i);
    }
    fsdp_mesh_free(mesh);
    fsdp_sd_free(sd);
}

/* --- model or optimizer? ------------------------------------------------------------------------ */

static bool is_optim(const char *name, bool state_is_optim)
{
    const fsdp_entry entry = {.name = name, .name_size = strlen(name)};
    return fsdp_entry_is_optim(&entry, state_is_optim);
}

Test(sd, the_first_element_of_a_name_says_what_is_of_an_optimizer)
{
    static const char *const optim[] = {
        "optim",           "optim.lr", "optimizer.state.0.step",
        "optimizers.0.lr", "opt.m",    "optimizer_state_dict.state"};
    static const char *const model[] = {"",       "model.optim.w", "optimum.w",
                                        "optim_", "state.0",       "param_groups"};
    for (size_t i = 0; i < sizeof optim / sizeof *optim; i++)
        cr_expect(is_optim(optim[i], false), "%s", optim[i]);
    for (size_t i = 0; i < sizeof model / sizeof *model; i++)
        cr_expect(!is_optim(model[i], false), "%s", model[i]);
    cr_expect(is_optim("state.0", true) && is_optim("param_groups", true));
    cr_expect(!is_optim("states.0", true));
}

Test(sd, state_is_of_an_optimizer_beside_its_groups)
{
    fsdp_sd *sd = make_sd();
    fsdp_value value = fsdp_value_i64(1);
    cr_assert_eq(fsdp_sd_add_value(sd, "state.0.step", 12, &value, NULL), FSDP_OK);
    cr_expect(!fsdp_sd_state_is_optim(sd));
    cr_assert_eq(fsdp_sd_add_value(sd, "param_groups.0.lr", 17, &value, NULL), FSDP_OK);
    cr_expect(fsdp_sd_state_is_optim(sd));
    fsdp_sd_free(sd);
}

/* --- values and aliases ------------------------------------------------------------------------- */

Test(sd, values_are_copied_and_replaced)
{
    fsdp_sd *sd = make_sd();
    fsdp_value value = {0}, longer = {0};
    cr_assert_eq(fsdp_value_set_bytes(&value, FSDP_VALUE_STRING, "adam", 4, NULL), FSDP_OK);
    cr_assert_eq(fsdp_value_set_bytes(&longer, FSDP_VALUE_STRING, "adamw", 5, NULL), FSDP_OK);
    cr_assert_eq(fsdp_sd_add_value(sd, FSDP_NAME("name"), &value, NULL), FSDP_OK);
    fsdp_value_release(&value);
    cr_assert_str_eq(fsdp_sd_at(sd, 0)->value.as.bytes.data, "adam");
    fsdp_sd_set_value(sd, 0, &longer);
    cr_assert_eq(longer.kind, FSDP_VALUE_NULL);
    cr_assert_str_eq(fsdp_sd_at(sd, 0)->value.as.bytes.data, "adamw");
    cr_assert_eq(fsdp_entry_bytes(fsdp_sd_at(sd, 0)), 0);
    cr_assert_eq(fsdp_entry_local_bytes(fsdp_sd_at(sd, 0), 0), 0);
    fsdp_sd_free(sd);
}

Test(sd, a_value_that_cannot_be_copied_is_refused_by_name)
{
    fsdp_sd *sd = make_sd();
    fsdp_value odd = {.kind = (fsdp_value_kind)50};
    fsdp_error err = {0};
    expect_refusal(fsdp_sd_add_value(sd, FSDP_NAME("lr"), &odd, &err), &err,
                   "value 'lr': the value has the unknown kind");
    cr_assert_eq(fsdp_sd_find(sd, FSDP_NAME("lr")), -1);
    fsdp_sd_free(sd);
}

Test(sd, setters_leave_entries_of_other_kinds_alone)
{
    fsdp_sd *sd = make_sd();
    fsdp_mesh *mesh = make_mesh(2);
    fsdp_value value = fsdp_value_i64(1), text = {0};
    float data[2];
    cr_assert_eq(add_rows(sd, FSDP_NAME("w"), 3, mesh, NULL, NULL), FSDP_OK);
    cr_assert_eq(fsdp_sd_add_value(sd, FSDP_NAME("v"), &value, NULL), FSDP_OK);
    fsdp_sd_set_data(sd, 0, data);
    fsdp_sd_set_data(sd, 1, data);
    fsdp_sd_set_data(sd, 2, data);
    cr_assert_eq(fsdp_sd_at(sd, 0)->data, data);
    cr_assert_null(fsdp_sd_at(sd, 1)->data);
    for (size_t i = 0; i < 3; i += 2) {
        cr_assert_eq(fsdp_value_set_bytes(&text, FSDP_VALUE_BYTES, "x", 1, NULL), FSDP_OK);
        fsdp_sd_set_value(sd, i, &text);
        cr_assert_eq(text.kind, FSDP_VALUE_NULL);
    }
    cr_assert_eq(fsdp_sd_at(sd, 0)->value.kind, FSDP_VALUE_NULL);
    fsdp_mesh_free(mesh);
    fsdp_sd_free(sd);
}

Test(sd, an_alias_leads_to_its_tensor)
{
    fsdp_sd *sd = make_sd();
    fsdp_mesh *mesh = make_mesh(2);
    fsdp_value value = fsdp_value_i64(1);
    fsdp_error err = {0};
    cr_assert_eq(fsdp_sd_add_value(sd, FSDP_NAME("step"), &value, NULL), FSDP_OK);
    cr_assert_eq(add_rows(sd, FSDP_NAME("embed"), 3, mesh, NULL, NULL), FSDP_OK);
    cr_assert_eq(fsdp_sd_add_alias(sd, FSDP_NAME("head"), FSDP_NAME("embed"), NULL), FSDP_OK);
    cr_assert_eq(fsdp_sd_add_alias(sd, FSDP_NAME("tail"), FSDP_NAME("head"), NULL), FSDP_OK);
    cr_assert_eq(fsdp_sd_at(sd, 2)->kind, FSDP_ENTRY_ALIAS);
    cr_assert_eq(fsdp_sd_at(sd, 2)->target, 1);
    cr_assert_eq(fsdp_sd_at(sd, 3)->target, 1);
    cr_assert_eq(fsdp_entry_bytes(fsdp_sd_at(sd, 3)), 0);
    expect_refusal(fsdp_sd_add_alias(sd, FSDP_NAME("x"), FSDP_NAME("later"), &err), &err,
                   "alias 'x' names 'later', which is not in the state dict");
    expect_refusal(fsdp_sd_add_alias(sd, FSDP_NAME("x"), FSDP_NAME("x"), &err), &err, "not in");
    expect_refusal(fsdp_sd_add_alias(sd, FSDP_NAME("x"), FSDP_NAME("step"), &err), &err,
                   "which is not a tensor");
    cr_assert_eq(fsdp_sd_count(sd), 4);
    fsdp_mesh_free(mesh);
    fsdp_sd_free(sd);
}

/* --- flat buffers ------------------------------------------------------------------------------- */

static const int64_t two_by_three[] = {2, 3}, five[] = {5}, none[] = {0};

static fsdp_flat_part part(const char *name, int ndim, const int64_t *shape, int64_t offset)
{
    return (fsdp_flat_part){name, strlen(name), ndim, shape, offset};
}

Test(sd, tensors_of_a_flat_buffer_point_into_the_chunk)
{
    /* 3 ranks hold 6 elements each: a a a a a a | . . b b b b | b . s . . . ; z has none. */
    const fsdp_flat_part parts[] = {part("a", 2, two_by_three, 0), part("b", 1, five, 8),
                                    part("z", 1, none, 9), part("s", 0, NULL, 14)};
    const int starts[3][4] = {{0, -1, -1, -1}, {-1, 2, -1, -1}, {-1, 0, -1, 2}};
    const int64_t bytes[3][4] = {{12, 0, 0, 0}, {0, 8, 0, 0}, {0, 2, 0, 2}};
    fsdp_mesh *mesh = make_mesh(3);
    uint16_t chunk[6];
    for (int rank = 0; rank < 3; rank++) {
        fsdp_sd *sd = make_sd();
        cr_assert_eq(fsdp_sd_add_flat(sd, FSDP_NAME("flat"),
                                      &(fsdp_flat_buffer){.dtype = FSDP_BF16,
                                                          .mesh = mesh,
                                                          .rank = rank,
                                                          .count = 18,
                                                          .parts = parts,
                                                          .part_count = 4,
                                                          .data = chunk},
                                      NULL),
                     FSDP_OK);
        cr_assert_eq(fsdp_sd_count(sd), 4);
        for (int i = 0; i < 4; i++) {
            const fsdp_entry *entry = fsdp_sd_at(sd, (size_t)i);
            int start = starts[rank][i];
            cr_assert_eq(entry->flat, 0);
            cr_assert_eq(entry->data, start < 0 ? NULL : &chunk[start]);
            cr_assert_eq(fsdp_entry_local_bytes(entry, rank), bytes[rank][i]);
        }
        cr_assert_eq(fsdp_sd_flat_count(sd), 1);
        const fsdp_flat *flat = fsdp_sd_flat_at(sd, 0);
        cr_assert_str_eq(flat->name, "flat");
        cr_assert_eq(flat->count, 18);
        cr_assert_eq(flat->data, chunk);
        cr_assert_eq(flat->mesh, fsdp_sd_at(sd, 0)->layout.mesh);
        cr_assert_null(fsdp_sd_flat_at(sd, 1));
        cr_assert_eq(fsdp_sd_find(sd, FSDP_NAME("flat")), -1);
        fsdp_sd_free(sd);
    }
    fsdp_mesh_free(mesh);
}

/* The hash by which ranks compare their values. */
static fsdp_hash hash_of_list(bool is_tuple, fsdp_value item)
{
    fsdp_sd *sd = make_sd();
    fsdp_value list = {0};
    fsdp_hash hash;
    cr_assert_eq(fsdp_value_set_items(&list, FSDP_VALUE_LIST, 1, NULL), FSDP_OK);
    list.is_tuple = is_tuple;
    list.as.list.items[0] = item;
    cr_assert_eq(fsdp_sd_add_value(sd, FSDP_NAME("v"), &list, NULL), FSDP_OK);
    cr_assert_eq(fsdp_describe_hash(sd, true, &hash, NULL), FSDP_OK);
    fsdp_value_release(&list);
    fsdp_sd_free(sd);
    return hash;
}

Test(sd, lists_and_tuples_have_different_hashes)
{
    fsdp_hash list = hash_of_list(false, fsdp_value_bool(false));
    const fsdp_hash others[] = {hash_of_list(true, fsdp_value_bool(false)),
                                hash_of_list(true, (fsdp_value){.kind = FSDP_VALUE_NULL})};
    for (int i = 0; i < 2; i++)
        cr_expect(memcmp(&list, &others[i], sizeof list) != 0, "%d", i);
}

Test(sd, a_flat_buffer_may_only_be_described)
{
    const fsdp_flat_part parts[] = {part("b", 1, five, 1)};
    fsdp_mesh *mesh = make_mesh(2);
    fsdp_sd *sd = make_sd();
    cr_assert_eq(
        fsdp_sd_add_flat(
            sd, FSDP_NAME("f"),
            &(fsdp_flat_buffer){
                .dtype = FSDP_F32, .mesh = mesh, .count = 6, .parts = parts, .part_count = 1},
            NULL),
        FSDP_OK);
    cr_assert_null(fsdp_sd_at(sd, 0)->data);
    fsdp_sd_free(sd);
    sd = make_sd();
    float chunk[3];
    cr_assert_eq(fsdp_sd_add_flat(sd, FSDP_NAME("f"),
                                  &(fsdp_flat_buffer){.dtype = FSDP_F32,
                                                      .mesh = mesh,
                                                      .rank = 7,
                                                      .count = 6,
                                                      .parts = parts,
                                                      .part_count = 1,
                                                      .data = chunk},
                                  NULL),
                 FSDP_OK);
    cr_assert_null(fsdp_sd_at(sd, 0)->data, "rank 7 holds nothing");
    fsdp_sd_free(sd);
    fsdp_mesh_free(mesh);
}

typedef struct bad_flat {
    const char *name;
    fsdp_flat_part parts[2];
    int64_t count;
    const char *words;
} bad_flat;

Test(sd, a_refused_flat_buffer_leaves_nothing)
{
    const bad_flat cases[] = {
        {"f", {part("a", 1, five, 0), part("b", 1, five, 4)}, 16, "'a' and 'b' overlap"},
        {"f", {part("b", 1, five, 4), part("a", 1, five, 0)}, 16, "'a' and 'b' overlap"},
        {"f", {part("a", 1, five, 0), part("a", 1, five, 8)}, 16, "name 'a' is used twice"},
        {"f", {part("a", 1, five, 0), part("f", 1, five, 8)}, 16, "name 'f' is used twice"},
        {"f", {part("a", 1, five, 0), part("w", 1, five, 8)}, 16, "name 'w' is used twice"},
        {"w", {part("a", 1, five, 0), part("b", 1, five, 8)}, 16, "name 'w' is used twice"},
        {"f", {part("a", 1, five, 0), part("b", 1, five, 12)}, 16, "tensor 'b': 5 elements at"},
        {"f",
         {part("a", 1, five, 0), part("b", 1, five, 8)},
         15,
         "flat buffer 'f': a flat buffer of 15"},
        {"f", {part("a", 1, five, 0), part("b", 1, five, 8)}, -2, "flat buffer 'f': dim 0"},
        {"f", {part("a", 1, five, 0), part("\xff", 1, five, 8)}, 16, "not UTF-8"}};
    fsdp_mesh *mesh = make_mesh(2);
    fsdp_sd *sd = make_sd();
    cr_assert_eq(add_rows(sd, FSDP_NAME("w"), 3, mesh, NULL, NULL), FSDP_OK);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        fsdp_error err = {0};
        fsdp_status status = fsdp_sd_add_flat(sd, cases[i].name, 1,
                                              &(fsdp_flat_buffer){.dtype = FSDP_F32,
                                                                  .mesh = mesh,
                                                                  .count = cases[i].count,
                                                                  .parts = cases[i].parts,
                                                                  .part_count = 2},
                                              &err);
        expect_refusal(status, &err, cases[i].words);
        cr_assert_eq(fsdp_sd_count(sd), 1);
        cr_assert_eq(fsdp_sd_flat_count(sd), 0);
        cr_assert_eq(fsdp_sd_find(sd, FSDP_NAME("a")), -1);
        cr_assert_eq(fsdp_sd_find(sd, FSDP_NAME("w")), 0);
    }
    fsdp_error err = {0};
    expect_refusal(fsdp_sd_add_flat(sd, FSDP_NAME("f"),
                                    &(fsdp_flat_buffer){.dtype = FSDP_F32, .count = 4}, &err),
                   &err, "flat buffer 'f': the layout has no mesh");
    fsdp_mesh_free(mesh);
    fsdp_sd_free(sd);
}

/* --- memory ------------------------------------------------------------------------------------- */

static fsdp_status build(fsdp_sd *sd, const fsdp_mesh *mesh, fsdp_error *err)
{
    const fsdp_flat_part parts[] = {part("a", 2, two_by_three, 0), part("b", 1, five, 8)};
    const fsdp_rank_box boxes[] = {{0, {.ndim = 1, .len = {4}}},
                                   {1, {.ndim = 1, .lo = {4}, .len = {1}}}};
    fsdp_layout layout = {.kind = FSDP_LAYOUT_BOXES, .boxes = boxes, .box_count = 2};
    fsdp_value value = {0};
    FSDP_TRY(add_rows(sd, FSDP_NAME("w"), 9, mesh, NULL, err));
    FSDP_TRY(fsdp_sd_add_tensor(sd, FSDP_NAME("t"), &(fsdp_tensor){FSDP_F32, 1, five, layout, NULL},
                                err));
    FSDP_TRY(fsdp_sd_add_alias(sd, FSDP_NAME("tied"), FSDP_NAME("w"), err));
    FSDP_TRY(fsdp_sd_add_flat(
        sd, FSDP_NAME("f"),
        &(fsdp_flat_buffer){
            .dtype = FSDP_F32, .mesh = mesh, .count = 14, .parts = parts, .part_count = 2},
        err));
    return fsdp_sd_add_value(sd, FSDP_NAME("v"), &value, err);
}

Test(sd, memory_of_its_own_is_zeroed_and_aligned)
{
    fsdp_sd *sd = make_sd();
    fsdp_mesh *mesh = make_mesh(2);
    char name[2] = "a";
    for (int64_t rows = 3; rows < 1000000; rows *= 17, name[0]++)
        cr_assert_eq(add_rows(sd, name, 1, rows, mesh, NULL, NULL), FSDP_OK);
    cr_assert_eq(fsdp_sd_allocate(sd, 0, NULL), FSDP_OK);
    for (size_t i = 0; i < fsdp_sd_count(sd); i++) {
        const fsdp_entry *entry = fsdp_sd_at(sd, i);
        const char *data = entry->data;
        int64_t size = fsdp_entry_local_bytes(entry, 0);
        cr_assert_eq((uintptr_t)data % (size >= 65536 ? 4096 : 64), 0);
        for (int64_t k = 0; k < size; k++)
            cr_assert_eq(data[k], 0);
    }
    cr_assert_geq(fsdp_entry_local_bytes(fsdp_sd_at(sd, fsdp_sd_count(sd) - 1), 0), 65536);
    fsdp_sd_free(sd);
    fsdp_mesh_free(mesh);
}

/* --- many tensors ------------------------------------------------------------------------------ */

static const fsdp_dtype many_dtypes[] = {FSDP_F32, FSDP_BF16, FSDP_I64};
static const int32_t many_name_sizes[] = {5, 5, 1}, many_path_counts[] = {2, 0, 1};
static const int32_t many_paths[] = {1, 3, 1}, many_ndims[] = {1, 2, 0};
static const int64_t many_shapes[] = {8, 3, 4};
static float many_data[8];

static fsdp_tensors many_tensors(const fsdp_layout *layouts, const int32_t *numbers)
{
    static void *const data[] = {many_data, NULL, many_data + 1};
    return (fsdp_tensors){.count = 3,
                          .names = "m.abcm.abdz",
                          .name_sizes = many_name_sizes,
                          .paths = many_paths,
                          .path_counts = many_path_counts,
                          .dtypes = many_dtypes,
                          .ndims = many_ndims,
                          .shapes = many_shapes,
                          .layouts = layouts,
                          .layout_count = 2,
                          .layout_numbers = numbers,
                          .data = data};
}

Test(sd, many_tensors_are_added_as_one_by_one)
{
    fsdp_mesh *mesh = make_mesh(2);
    fsdp_layout layouts[] = {{.mesh = mesh}, {.mesh = mesh, .placement = {shard_rows}}};
    fsdp_tensors many = many_tensors(layouts, (const int32_t[]){1, 0, 0});
    fsdp_sd *sd = make_sd();
    cr_assert_eq(fsdp_sd_add_tensors(sd, &many, NULL), FSDP_OK);
    cr_assert_eq(fsdp_sd_count(sd), 3);
    const fsdp_entry *first = fsdp_sd_at(sd, 0), *second = fsdp_sd_at(sd, 1);
    cr_assert_str_eq(first->name, "m.abc");
    cr_assert_eq(first->path_count, 2);
    cr_assert_eq(first->path[1], 3);
    cr_assert_eq(first->data, many_data);
    cr_assert_eq(fsdp_entry_local_bytes(first, 0), 16);
    cr_assert_str_eq(second->name, "m.abd");
    cr_assert_eq(second->path_count, 0);
    cr_assert_eq(second->dtype, FSDP_BF16);
    cr_assert_eq(second->shape[0], 3);
    cr_assert_eq(second->shape[1], 4);
    cr_assert_eq(fsdp_entry_local_bytes(second, 1), 24);
    cr_assert_eq(fsdp_sd_at(sd, 2)->ndim, 0);
    cr_assert_eq(fsdp_sd_at(sd, 2)->data, many_data + 1);
    fsdp_sd_free(sd);
    fsdp_mesh_free(mesh);
}

Test(sd, many_tensors_stop_at_the_first_that_is_refused)
{
    fsdp_mesh *mesh = make_mesh(2);
    fsdp_layout layouts[] = {{.mesh = mesh}, {.mesh = mesh, .placement = {shard_rows}}};
    fsdp_error err = {0};
    fsdp_sd *sd = make_sd();
    fsdp_tensors many = many_tensors(layouts, (const int32_t[]){1, 0, 2});
    expect_refusal(fsdp_sd_add_tensors(sd, &many, &err), &err, "tensor 2 has a negative size");
    cr_assert_eq(fsdp_sd_count(sd), 2);
    expect_refusal(fsdp_sd_add_tensors(sd, &many, &err), &err, "'m.abc' is used twice");
    cr_assert_eq(fsdp_sd_count(sd), 2);
    many.names = NULL;
    expect_refusal(fsdp_sd_add_tensors(sd, &many, &err), &err, "names");
    many = (fsdp_tensors){0};
    cr_assert_eq(fsdp_sd_add_tensors(sd, &many, &err), FSDP_OK);
    fsdp_sd_free(sd);
    fsdp_mesh_free(mesh);
}

/* Memory that fails once: what was added before stays, and the sd can be freed. */
static bool survives_failure(int64_t n, bool forever)
{
    fsdp_mesh *mesh = make_mesh(2);
    fsdp_sd *sd = make_sd();
    fsdp_error err = {0};
    fsdp_mem_fail_after(n, forever);
    fsdp_status status = build(sd, mesh, &err);
    fsdp_mem_fail_after(-1, false);
    cr_assert(status == FSDP_OK || (status == FSDP_ERR_LIMIT && err.status == FSDP_ERR_LIMIT));
    size_t count = fsdp_sd_count(sd);
    for (size_t i = 0; i < count; i++) {
        const fsdp_entry *entry = fsdp_sd_at(sd, i);
        cr_assert_eq(fsdp_sd_find(sd, entry->name, entry->name_size), (int64_t)i);
    }
    cr_assert(count <= 3 || count == 5 || count == 6, "%zu entries", count);
    cr_assert_eq(status == FSDP_OK, count == 6);
    fsdp_sd_free(sd);
    fsdp_mesh_free(mesh);
    return status != FSDP_OK;
}

Test(sd, running_out_of_memory_is_an_error_at_every_allocation)
{
    int64_t once = 0, forever = 0;
    while (survives_failure(once, false))
        once++;
    while (survives_failure(forever, true))
        forever++;
    cr_assert_gt(once, 10);
    cr_assert_eq(once, forever);
}
