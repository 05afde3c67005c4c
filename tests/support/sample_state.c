/* States for tests: see sample_state.h. */
#include "tests/support/sample_state.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_DIMS = 4, MOST_RANKS = 64, LARGE_VALUE = 70000 };

typedef struct builder {
    test_state *state;
    int world, rank, variant;
    bool filled;
    uint64_t seed;
    int number; /* of the current tensor */
} builder;

/* --- contents ----------------------------------------------------------------------------------- */

static uint64_t mix(uint64_t z)
{
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return z ^ z >> 31;
}

static uint64_t key_of(const char *name, size_t size, uint64_t seed)
{
    uint64_t key = mix(seed + 0x9E3779B97F4A7C15u);
    for (size_t i = 0; i < size; i++)
        key = mix(key ^ (unsigned char)name[i]);
    return key;
}

enum { LARGEST_ELEMENT = 256 };

static void element_bytes(uint64_t key, int64_t position, fsdp_dtype dtype, unsigned char *bytes)
{
    uint64_t random[2] = {mix(key + 2 * (uint64_t)position), mix(key + 2 * (uint64_t)position + 1)};
    if (dtype == FSDP_BOOL)
        random[0] &= 1;
    size_t size = fsdp_dtype_size(dtype);
    for (size_t at = 0; at < size; at += sizeof random) {
        size_t n = size - at < sizeof random ? size - at : sizeof random;
        memcpy(bytes + at, random, n);
        random[0] = mix(random[0] + at);
    }
}

/* Writes the elements of a box, or counts the bytes that differ from them. */
static int64_t visit_box(const fsdp_entry *entry, const fsdp_box *box, uint64_t key,
                         unsigned char *data, bool fill)
{
    size_t size = fsdp_dtype_size(entry->dtype);
    int64_t differing = 0, count = fsdp_box_count(box), at[FSDP_MAX_DIMS];
    memcpy(at, box->lo, sizeof at);
    for (int64_t i = 0; i < count; i++, data += size) {
        unsigned char bytes[LARGEST_ELEMENT];
        element_bytes(key, fsdp_box_position(entry->ndim, entry->shape, at), entry->dtype, bytes);
        if (fill)
            memcpy(data, bytes, size);
        for (size_t b = 0; b < size; b++)
            differing += data[b] != bytes[b];
        for (int d = box->ndim - 1; d >= 0 && ++at[d] == box->lo[d] + box->len[d]; d--)
            at[d] = box->lo[d];
    }
    return differing;
}

static int64_t visit_tensor(const fsdp_entry *entry, int rank, uint64_t seed, bool fill)
{
    int64_t differing = 0;
    unsigned char *data = entry->data;
    uint64_t key = key_of(entry->name, entry->name_size, seed);
    size_t parts = fsdp_layout_box_count(&entry->layout, entry->ndim, entry->shape, rank);
    for (size_t part = 0; part < parts; part++) {
        fsdp_box box;
        fsdp_layout_box_at(&entry->layout, entry->ndim, entry->shape, rank, part, &box);
        differing += visit_box(entry, &box, key, data, fill);
        data += fsdp_box_count(&box) * (int64_t)fsdp_dtype_size(entry->dtype);
    }
    return differing;
}

/* --- memory ------------------------------------------------------------------------------------- */

static void *give_memory(test_state *state, int64_t bytes)
{
    if (state->count == state->capacity) {
        size_t capacity = state->capacity > 0 ? 2 * state->capacity : 64;
        void **memory = realloc(state->memory, capacity * sizeof *memory);
        if (!memory)
            return NULL;
        state->memory = memory;
        state->capacity = capacity;
    }
    void *data = malloc((size_t)bytes + 1);
    if (!data)
        return NULL;
    memset(data, 0xA5, (size_t)bytes + 1);
    return state->memory[state->count++] = data;
}

/* Allocates memory for the last entry. */
static fsdp_status supply(builder *b, fsdp_error *err)
{
    test_state *state = b->state;
    size_t index = fsdp_sd_count(state->sd) - 1;
    const fsdp_entry *entry = fsdp_sd_at(state->sd, index);
    void *data = give_memory(state, fsdp_entry_local_bytes(entry, b->rank));
    if (!data)
        return fsdp_fail(err, FSDP_ERR_LIMIT, "no memory for a test state");
    fsdp_sd_set_data(state->sd, index, data);
    if (b->filled)
        visit_tensor(fsdp_sd_at(state->sd, index), b->rank, b->seed, true);
    return FSDP_OK;
}

/* --- layouts ------------------------------------------------------------------------------------ */

typedef enum style {
    STYLE_ROWS,
    STYLE_COLUMNS,
    STYLE_COPIES,
    STYLE_HSDP,
    STYLE_STRIDED,
    STYLE_GRID,
    STYLE_CUBE,
    STYLE_SUBSET,
    STYLE_BOXES,
    STYLE_COUNT
} style;

static fsdp_placement cut(int dim, int ndim)
{
    return (fsdp_placement){.kind = FSDP_SHARD, .dim = dim < ndim ? dim : 0};
}

/* The largest divisor of n that is at most its square root. */
static int64_t inner_size(int64_t n)
{
    int64_t best = 1;
    for (int64_t i = 2; i * i <= n; i++)
        if (n % i == 0)
            best = i;
    return best;
}

static int mesh_shape(style how, int world, int64_t *shape)
{
    int64_t inner = inner_size(world);
    switch (how) {
    case STYLE_HSDP:
    case STYLE_STRIDED:
    case STYLE_GRID:
        shape[0] = world / inner;
        shape[1] = inner;
        return 2;
    case STYLE_CUBE:
        shape[1] = world % 2 == 0 ? 2 : 1;
        shape[2] = world % 4 == 0 ? 2 : 1;
        shape[0] = world / shape[1] / shape[2];
        return 3;
    case STYLE_SUBSET: shape[0] = (world + 1) / 2; return 1;
    default: shape[0] = world; return 1;
    }
}

static void choose_placements(style how, const int64_t *shape, int ndim, fsdp_placement *placement)
{
    if (ndim == 0)
        return; /* copies everywhere */
    switch (how) {
    case STYLE_ROWS:
    case STYLE_SUBSET: placement[0] = cut(0, ndim); break;
    case STYLE_COLUMNS: placement[0] = cut(1, ndim); break;
    case STYLE_HSDP: placement[1] = cut(0, ndim); break;
    case STYLE_STRIDED:
        placement[0] = (fsdp_placement){.kind = FSDP_STRIDED_SHARD, .dim = 0, .split = shape[1]};
        placement[1] = cut(0, ndim);
        break;
    case STYLE_GRID:
        placement[0] = cut(0, ndim);
        placement[1] = ndim > 1 ? cut(1, ndim) : (fsdp_placement){.kind = FSDP_REPLICATE};
        break;
    case STYLE_CUBE:
        placement[1] = cut(0, ndim);
        placement[2] = ndim > 1 ? cut(1, ndim) : (fsdp_placement){.kind = FSDP_REPLICATE};
        break;
    default: break;
    }
}

/* The mesh is copied by the state dict and freed by the caller. */
static fsdp_status mesh_layout(const builder *b, style how, int ndim, fsdp_layout *layout_out,
                               fsdp_mesh **mesh_out, fsdp_error *err)
{
    static const char *const names[] = {"dp", "tp", "cp"};
    int64_t shape[FSDP_MAX_MESH_DIMS];
    int ranks[MOST_RANKS];
    int dims = mesh_shape(how, b->world, shape);
    for (int i = 0; i < MOST_RANKS; i++)
        ranks[i] = b->world - 1 - 2 * i;
    FSDP_TRY(
        fsdp_mesh_create(dims, shape, names, how == STYLE_SUBSET ? ranks : NULL, mesh_out, err));
    *layout_out = (fsdp_layout){.kind = FSDP_LAYOUT_MESH, .mesh = *mesh_out};
    choose_placements(how, shape, ndim, layout_out->placement);
    return FSDP_OK;
}

/* --- irregular boxes --- */

enum { MOST_BOXES = 24 };

typedef struct box_cutter {
    fsdp_rank_box boxes[2 * MOST_BOXES];
    int count;
    uint64_t random;
} box_cutter;

static int64_t below(box_cutter *cutter, int64_t limit)
{
    cutter->random = mix(cutter->random + 0x9E3779B97F4A7C15u);
    return (int64_t)(cutter->random % (uint64_t)limit);
}

static void cut_boxes(box_cutter *cutter, const fsdp_box *box, int depth)
{
    int dim = box->ndim > 0 ? (int)below(cutter, box->ndim) : 0;
    if (depth == 0 || box->ndim == 0 || box->len[dim] < 2 || below(cutter, 6) == 0) {
        cutter->boxes[cutter->count++] = (fsdp_rank_box){0, *box};
        return;
    }
    fsdp_box low = *box, high = *box;
    low.len[dim] = 1 + below(cutter, box->len[dim] - 1);
    high.lo[dim] += low.len[dim];
    high.len[dim] -= low.len[dim];
    cut_boxes(cutter, &low, depth - 1);
    cut_boxes(cutter, &high, depth - 1);
}

static int compare_ranks(const void *a, const void *b)
{
    return ((const fsdp_rank_box *)a)->rank - ((const fsdp_rank_box *)b)->rank;
}

/* Random boxes on random ranks, some of them twice. All ranks draw the same boxes. */
static void box_layout(const builder *b, int ndim, const int64_t *shape, box_cutter *cutter,
                       fsdp_layout *layout_out)
{
    fsdp_box whole = fsdp_box_whole(ndim, shape);
    *cutter = (box_cutter){.random = (uint64_t)(b->variant * 1000 + b->number * 70 + b->world)};
    if (fsdp_box_count(&whole) > 0)
        cut_boxes(cutter, &whole, 4);
    for (int i = cutter->count - 1; i >= 0; i--) {
        fsdp_rank_box *box = &cutter->boxes[i];
        box->rank = (int)below(cutter, b->world);
        int other = (int)below(cutter, 4 * b->world);
        if (other < b->world && other != box->rank)
            cutter->boxes[cutter->count++] = (fsdp_rank_box){other, box->box};
    }
    qsort(cutter->boxes, (size_t)cutter->count, sizeof cutter->boxes[0], compare_ranks);
    *layout_out = (fsdp_layout){
        .kind = FSDP_LAYOUT_BOXES, .boxes = cutter->boxes, .box_count = (size_t)cutter->count};
}

/* --- entries ------------------------------------------------------------------------------------ */

static fsdp_status add_tensor(builder *b, const char *name, size_t name_size, fsdp_dtype dtype,
                              int ndim, const int64_t *shape, fsdp_error *err)
{
    style how = (style)((b->variant + b->number) % STYLE_COUNT);
    fsdp_layout layout;
    fsdp_mesh *mesh = NULL;
    box_cutter cutter;
    fsdp_status st = FSDP_OK;
    if (how == STYLE_BOXES)
        box_layout(b, ndim, shape, &cutter, &layout);
    else
        st = mesh_layout(b, how, ndim, &layout, &mesh, err);
    b->number++;
    if (st == FSDP_OK)
        st = fsdp_sd_add_tensor(b->state->sd, name, name_size,
                                &(fsdp_tensor){dtype, ndim, shape, layout, NULL}, err);
    if (st == FSDP_OK)
        st = supply(b, err);
    fsdp_mesh_free(mesh);
    return st;
}

/* Three tensors that every other variant holds in one flat buffer with gaps. */
static fsdp_status add_flat_tensors(builder *b, fsdp_dtype dtype, fsdp_error *err)
{
    static const int64_t rows[] = {7, 3}, line[] = {29};
    static const fsdp_flat_part parts[] = {{FSDP_NAME("flat.a"), 2, rows, 2},
                                           {FSDP_NAME("flat.b"), 1, line, 23},
                                           {FSDP_NAME("flat.s"), 0, NULL, 55}};
    enum { PART_COUNT = 3, LEAST = 57 };
    if (b->variant % 2 == 0) {
        for (int i = 0; i < PART_COUNT; i++)
            FSDP_TRY(add_tensor(b, parts[i].name, parts[i].name_size, dtype, parts[i].ndim,
                                parts[i].shape, err));
        return FSDP_OK;
    }
    fsdp_mesh *mesh = NULL;
    int64_t chunk = (LEAST + b->world - 1) / b->world;
    void *data = give_memory(b->state, chunk * (int64_t)fsdp_dtype_size(dtype));
    if (!data)
        return fsdp_fail(err, FSDP_ERR_LIMIT, "no memory for a test state");
    FSDP_TRY(
        fsdp_mesh_create(1, (int64_t[]){b->world}, (const char *[]){"fsdp"}, NULL, &mesh, err));
    size_t first = fsdp_sd_count(b->state->sd);
    fsdp_status st = fsdp_sd_add_flat(b->state->sd, FSDP_NAME("flat"),
                                      &(fsdp_flat_buffer){.dtype = dtype,
                                                          .mesh = mesh,
                                                          .rank = b->rank,
                                                          .count = chunk * b->world,
                                                          .parts = parts,
                                                          .part_count = PART_COUNT,
                                                          .data = data},
                                      err);
    for (size_t i = 0; st == FSDP_OK && b->filled && i < PART_COUNT; i++)
        visit_tensor(fsdp_sd_at(b->state->sd, first + i), b->rank, b->seed, true);
    fsdp_mesh_free(mesh);
    return st;
}

static fsdp_status add_value(builder *b, const char *name, fsdp_value *value, fsdp_error *err)
{
    static const fsdp_value none;
    fsdp_status st =
        fsdp_sd_add_value(b->state->sd, name, strlen(name), b->filled ? value : &none, err);
    fsdp_value_release(value);
    return st;
}

static fsdp_status add_bytes(builder *b, const char *name, fsdp_value_kind kind, size_t size,
                             fsdp_error *err)
{
    static const char letters[] = "abcdefghijklmnop";
    fsdp_value value = {0};
    char *bytes = malloc(size + 1);
    if (!bytes)
        return fsdp_fail(err, FSDP_ERR_LIMIT, "no memory for a test state");
    for (size_t i = 0; i < size; i++)
        bytes[i] = letters[mix(b->seed + i) % 16];
    fsdp_status st = fsdp_value_set_bytes(&value, kind, bytes, size, err);
    free(bytes);
    return st == FSDP_OK ? add_value(b, name, &value, err) : st;
}

static fsdp_status add_list(builder *b, const char *name, fsdp_error *err)
{
    fsdp_value value = {0};
    FSDP_TRY(fsdp_value_set_items(&value, FSDP_VALUE_LIST, 3, err));
    value.as.list.items[0] = fsdp_value_bool(b->seed % 2 == 0);
    value.as.list.items[1] = fsdp_value_f64((double)b->seed / 3);
    value.as.list.items[2] = fsdp_value_u64(b->seed | (uint64_t)1 << 63);
    return add_value(b, name, &value, err);
}

/* Adds the values of a seed; the value `step` identifies the seed of a loaded state. */
static fsdp_status add_values(builder *b, bool all, fsdp_error *err)
{
    fsdp_value step = fsdp_value_i64((int64_t)b->seed);
    FSDP_TRY(add_value(b, "step", &step, err));
    if (!all)
        return FSDP_OK;
    FSDP_TRY(add_list(b, "list", err));
    FSDP_TRY(add_bytes(b, "text", FSDP_VALUE_STRING, 40, err));
    return add_bytes(b, "large", FSDP_VALUE_BYTES, LARGE_VALUE, err);
}

/* --- models ------------------------------------------------------------------------------------- */

typedef struct tensor_spec {
    const char *name;
    fsdp_dtype dtype;
    int ndim;
    int64_t shape[MOST_DIMS];
} tensor_spec;

static fsdp_status add_specs(builder *b, const tensor_spec *specs, size_t count, fsdp_error *err)
{
    for (size_t i = 0; i < count; i++)
        FSDP_TRY(add_tensor(b, specs[i].name, strlen(specs[i].name), specs[i].dtype, specs[i].ndim,
                            specs[i].shape, err));
    return FSDP_OK;
}

static fsdp_status add_small(builder *b, fsdp_error *err)
{
    static const tensor_spec specs[] = {{"w", FSDP_F32, 2, {17, 9}},
                                        {"bias", FSDP_BF16, 1, {3}},
                                        {"ids", FSDP_I64, 2, {11, 4}},
                                        {"scale", FSDP_F64, 0, {0}},
                                        {"none", FSDP_F32, 2, {0, 5}}};
    FSDP_TRY(add_specs(b, specs, sizeof specs / sizeof specs[0], err));
    FSDP_TRY(add_flat_tensors(b, FSDP_F16, err));
    FSDP_TRY(fsdp_sd_add_alias(b->state->sd, FSDP_NAME("tied"), FSDP_NAME("w"), err));
    return add_values(b, false, err);
}

static fsdp_status add_dtypes(builder *b, fsdp_error *err)
{
    static const int64_t shapes[][MOST_DIMS] = {{37, 3}, {5}, {2, 3, 4}, {1, 17}, {9, 2}, {70}};
    static const int dims[] = {2, 1, 3, 2, 2, 1};
    for (int dtype = 1; dtype < FSDP_DTYPE_COUNT; dtype++) {
        char name[40];
        if (dtype >= FSDP_Q4_0 && dtype != FSDP_Q6_K) /* the largest block stands for all */
            continue;
        snprintf(name, sizeof name, "dtype.%s", fsdp_dtype_name((fsdp_dtype)dtype));
        FSDP_TRY(add_tensor(b, name, strlen(name), (fsdp_dtype)dtype, dims[dtype % 6],
                            shapes[dtype % 6], err));
    }
    return FSDP_OK;
}

static fsdp_status add_everything(builder *b, fsdp_error *err)
{
    static const tensor_spec specs[] = {
        {"even", FSDP_F32, 2, {64, 48}},      {"few", FSDP_F32, 1, {3}},
        {"no.rows", FSDP_F32, 2, {0, 7}},     {"no.depth", FSDP_BF16, 3, {7, 0, 2}},
        {"scalar", FSDP_F32, 0, {0}},         {"scalar.i64", FSDP_I64, 0, {0}},
        {"one", FSDP_F32, 4, {1, 1, 1, 1}},   {"odd", FSDP_F32, 2, {13, 11}},
        {"wide", FSDP_F16, 2, {2, 131}},      {"deep", FSDP_F32, 4, {3, 5, 4, 2}},
        {"a/b", FSDP_F32, 1, {33}},           {"a//b%.", FSDP_F32, 1, {65}},
        {"..", FSDP_F32, 2, {4, 4}},          {"", FSDP_U8, 2, {16, 3}},
        {"\xc3\xa4\x1b[1m", FSDP_I8, 1, {8}},
    };
    FSDP_TRY(add_dtypes(b, err));
    FSDP_TRY(add_specs(b, specs, sizeof specs / sizeof specs[0], err));
    FSDP_TRY(add_tensor(b, FSDP_NAME("nul\0name"), FSDP_F32, 2, (int64_t[]){6, 6}, err));
    FSDP_TRY(add_flat_tensors(b, FSDP_F32, err));
    FSDP_TRY(fsdp_sd_add_alias(b->state->sd, FSDP_NAME("tied"), FSDP_NAME("even"), err));
    return add_values(b, true, err);
}

static fsdp_status add_blocks(builder *b, fsdp_error *err)
{
    static const tensor_spec specs[] = {{"rows", FSDP_F32, 2, {1500, 2100}},
                                        {"depth", FSDP_BF16, 3, {3, 1000, 700}},
                                        {"few", FSDP_I8, 1, {9}}};
    FSDP_TRY(add_specs(b, specs, sizeof specs / sizeof specs[0], err));
    return add_values(b, false, err);
}

static fsdp_status add_megabyte(builder *b, fsdp_error *err)
{
    static const tensor_spec specs[] = {
        {"w", FSDP_F32, 2, {300, 700}}, {"m", FSDP_BF16, 2, {100, 1000}}, {"few", FSDP_I8, 1, {9}}};
    FSDP_TRY(add_specs(b, specs, sizeof specs / sizeof specs[0], err));
    return add_values(b, false, err);
}

static fsdp_status add_model(builder *b, state_model model, fsdp_error *err)
{
    switch (model) {
    case STATE_SMALL: return add_small(b, err);
    case STATE_EVERYTHING: return add_everything(b, err);
    case STATE_BLOCKS: return add_blocks(b, err);
    case STATE_MEGABYTE: return add_megabyte(b, err);
    }
    return fsdp_fail(err, FSDP_ERR_USAGE, "no such model");
}

fsdp_status test_state_create(const state_part *part, bool filled, uint64_t seed,
                              test_state *state_out, fsdp_error *err)
{
    builder b = {state_out, part->world, part->rank, part->variant % STATE_VARIANTS,
                 filled,    seed,        0};
    *state_out = (test_state){.rank = part->rank};
    fsdp_status st = fsdp_sd_create(&state_out->sd, err);
    if (st == FSDP_OK)
        st = add_model(&b, part->model, err);
    if (st != FSDP_OK)
        test_state_release(state_out);
    return st;
}

void test_state_release(test_state *state)
{
    fsdp_sd_free(state->sd);
    for (size_t i = 0; i < state->count; i++)
        free(state->memory[i]);
    free(state->memory);
    *state = (test_state){.rank = 0};
}

/* --- checking ----------------------------------------------------------------------------------- */

static int64_t compare_values(const fsdp_sd *sd, const fsdp_sd *expected)
{
    int64_t differing = 0;
    for (size_t i = 0; i < fsdp_sd_count(expected); i++) {
        const fsdp_entry *entry = fsdp_sd_at(expected, i);
        int64_t at = fsdp_sd_find(sd, entry->name, entry->name_size);
        if (at < 0 || fsdp_sd_at(sd, (size_t)at)->kind != FSDP_ENTRY_VALUE ||
            !fsdp_value_equal(&entry->value, &fsdp_sd_at(sd, (size_t)at)->value))
            differing += 8;
    }
    return differing;
}

static int64_t differing_values(const fsdp_sd *sd, uint64_t seed)
{
    test_state expected = {.rank = 0};
    builder b = {.state = &expected, .filled = true, .seed = seed};
    bool all = fsdp_sd_find(sd, FSDP_NAME("large")) >= 0;
    int64_t differing = 8;
    if (fsdp_sd_create(&expected.sd, NULL) == FSDP_OK && add_values(&b, all, NULL) == FSDP_OK)
        differing = compare_values(sd, expected.sd);
    test_state_release(&expected);
    return differing;
}

int64_t test_tensors_differing(const fsdp_sd *sd, int rank, uint64_t seed)
{
    int64_t differing = 0;
    for (size_t i = 0; i < fsdp_sd_count(sd); i++) {
        const fsdp_entry *entry = fsdp_sd_at(sd, i);
        if (entry->kind == FSDP_ENTRY_TENSOR)
            differing += visit_tensor(entry, rank, seed, false);
    }
    return differing;
}

int64_t test_sd_differing(const fsdp_sd *sd, int rank, uint64_t seed)
{
    return differing_values(sd, seed) + test_tensors_differing(sd, rank, seed);
}

int64_t test_state_differing(const test_state *state, uint64_t seed)
{
    return test_sd_differing(state->sd, state->rank, seed);
}

/* --- sampling ----------------------------------------------------------------------------------- */

static int64_t number_in_environment(const char *name)
{
    const char *text = getenv(name);
    return text ? atoll(text) : 0;
}

int64_t test_sample(int64_t usual)
{
    int64_t every = number_in_environment("FSDP_TEST_SAMPLE");
    int64_t fewer = number_in_environment("FSDP_TEST_FEWER");
    int64_t least = number_in_environment("FSDP_TEST_LEAST");
    if (every > 0)
        return every;
    every = fewer > 1 ? usual * fewer : usual;
    return every > least ? every : least;
}

int64_t test_sample_at_most(int64_t most)
{
    int64_t every = test_sample(1);
    return every < most || number_in_environment("FSDP_TEST_SAMPLE") > 0 ? every : most;
}

int test_sample_of(int cases, int64_t most)
{
    int64_t some = cases / test_sample_at_most(most);
    return some > 0 ? (int)some : 1;
}

bool test_sampler_takes(test_sampler *sampler)
{
    int64_t number = sampler->seen++;
    bool takes = sampler->every <= 1 || mix((uint64_t)number) % (uint64_t)sampler->every == 0;
    sampler->taken += takes;
    return takes;
}
