/*
 * Writes small checkpoints with every kind of entry, odd names included, for the tests of the tools.
 *
 * usage: make_sample KIND RANKS PATH [OPTION]...
 *   KIND: sharded, full, local, or run (a run directory with steps 100, 200, 300)
 *   OPTION: compress; changed (one element and one value differ); bf16 (the layers as bf16);
 *           odd (only names that are hard to print); empty (no entries); nan (NaN and Inf in
 *           model.wte.weight, and optimizer states that do not fit the model)
 */
#include <fsdp/checkpoint.h>
#include <fsdp/run.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct sample {
    fsdp_kind kind;
    bool is_run, compress, changed, bf16, odd, empty, nan;
    const char *path;
} sample;

/* One rank's state dict and the memory its tensors borrow. */
typedef struct state {
    fsdp_sd *sd;
    fsdp_mesh *mesh;
    int rank;
    const sample *sample;
    void *memory[64];
    int memory_count;
} state;

static const fsdp_placement shard_0 = {FSDP_SHARD, 0, 0}, replicate = {FSDP_REPLICATE, 0, 0};

/* Element number i of a tensor. Small whole numbers, so that every float type holds them. */
static void write_element(fsdp_dtype dtype, void *to, int64_t i)
{
    double number = (double)(i % 61) - 30;
    float f32 = (float)number;
    uint32_t bits;
    memcpy(&bits, &f32, sizeof bits);
    switch (dtype) {
    case FSDP_F64: memcpy(to, &number, 8); break;
    case FSDP_F32: memcpy(to, &f32, 4); break;
    case FSDP_BF16:
        bits >>= 16;
        memcpy(to, &bits, 2);
        break;
    case FSDP_BOOL: *(uint8_t *)to = i % 3 == 0; break;
    default: memset(to, (int)(i % 100), fsdp_dtype_size(dtype)); break;
    }
}

static fsdp_status add_tensor(state *st, const char *name, size_t name_size, fsdp_dtype dtype,
                              int ndim, const int64_t *shape, fsdp_placement placement,
                              fsdp_error *err)
{
    size_t size = fsdp_dtype_size(dtype);
    fsdp_layout layout = {.mesh = st->mesh, .placement = {placement}};
    fsdp_box box, whole = fsdp_box_whole(ndim, shape);
    fsdp_layout_mesh_box(&layout, ndim, shape, st->rank, &box);
    char *data = calloc((size_t)fsdp_box_count(&box) + 1, size);
    int64_t first = ndim > 0 && shape[0] > 0 ? box.lo[0] * (fsdp_box_count(&whole) / shape[0]) : 0;
    for (int64_t i = 0; i < fsdp_box_count(&box); i++)
        write_element(dtype, data + (size_t)i * size, first + i);
    st->memory[st->memory_count++] = data;
    return fsdp_sd_add_tensor(
        st->sd, name, name_size,
        &(fsdp_tensor){dtype, ndim, shape, {.mesh = st->mesh, .placement = {placement}}, data},
        err);
}

static fsdp_status add_layers(state *st, fsdp_error *err)
{
    fsdp_dtype dtype = st->sample->bf16 ? FSDP_BF16 : FSDP_F32;
    for (int layer = 0; layer < 3; layer++) {
        char name[64];
        int n = snprintf(name, sizeof name, "model.layers.%d.mlp.weight", layer);
        FSDP_TRY(add_tensor(st, name, (size_t)n, dtype, 2, (int64_t[]){12, 8}, shard_0, err));
        n = snprintf(name, sizeof name, "optim.state.layers.%d.mlp.weight.exp_avg", layer);
        FSDP_TRY(add_tensor(st, name, (size_t)n, FSDP_F32, 2, (int64_t[]){12, 8}, shard_0, err));
    }
    return FSDP_OK;
}

/* Adds entries that deep verification warns of, and a factored state, a step and a numbered parameter, which
 * it accepts. */
static fsdp_status add_doubtful(state *st, fsdp_error *err)
{
    float *wte = st->memory[0];
    if (st->rank == 0) {
        wte[1] = wte[2] = wte[7] = NAN;
        wte[3] = -INFINITY;
    }
    FSDP_TRY(add_tensor(st, FSDP_NAME("optim.state.wte.weight.exp_avg"), FSDP_F32, 2,
                        (int64_t[]){12, 4}, shard_0, err));
    FSDP_TRY(add_tensor(st, FSDP_NAME("optim.state.wte.weight.exp_avg_row"), FSDP_F32, 1,
                        (int64_t[]){13}, shard_0, err));
    FSDP_TRY(add_tensor(st, FSDP_NAME("optim.state.wte.weight.step"), FSDP_F32, 0, NULL, replicate,
                        err));
    FSDP_TRY(add_tensor(st, FSDP_NAME("optimizer.state.0.exp_avg"), FSDP_F32, 1, (int64_t[]){8},
                        shard_0, err));
    return add_tensor(st, FSDP_NAME("optimizer.state.gone.weight.exp_avg"), FSDP_F32, 1,
                      (int64_t[]){8}, shard_0, err);
}

static fsdp_status add_tensors(state *st, fsdp_error *err)
{
    FSDP_TRY(add_tensor(st, FSDP_NAME("model.wte.weight"), FSDP_F32, 2, (int64_t[]){13, 4}, shard_0,
                        err));
    if (st->sample->changed) {
        if (st->rank == 0)
            ((float *)st->memory[0])[5] += 0.5F;
    }
    FSDP_TRY(add_layers(st, err));
    if (st->sample->nan)
        FSDP_TRY(add_doubtful(st, err));
    FSDP_TRY(add_tensor(st, FSDP_NAME("model.norm.weight"), FSDP_F32, 1, (int64_t[]){8}, replicate,
                        err));
    FSDP_TRY(add_tensor(st, FSDP_NAME("model.scale"), FSDP_F64, 0, NULL, replicate, err));
    FSDP_TRY(
        add_tensor(st, FSDP_NAME("model.empty"), FSDP_F32, 2, (int64_t[]){0, 4}, shard_0, err));
    FSDP_TRY(add_tensor(st, FSDP_NAME("mask"), FSDP_BOOL, 1, (int64_t[]){9}, shard_0, err));
    FSDP_TRY(add_tensor(st, FSDP_NAME("packed"), FSDP_F6_E2M3, 2, (int64_t[]){4, 6}, shard_0, err));
    return fsdp_sd_add_alias(st->sd, FSDP_NAME("model.lm_head.weight"),
                             FSDP_NAME("model.wte.weight"), err);
}

static fsdp_status add_value(state *st, const char *name, size_t size, fsdp_value value,
                             fsdp_error *err)
{
    fsdp_status status = fsdp_sd_add_value(st->sd, name, size, &value, err);
    fsdp_value_release(&value);
    return status;
}

static fsdp_value text_value(fsdp_value_kind kind, const char *text, size_t size)
{
    fsdp_value value = {0};
    if (fsdp_value_set_bytes(&value, kind, text, size, NULL) != FSDP_OK)
        exit(FSDP_ERR_LIMIT);
    return value;
}

static fsdp_value items_value(fsdp_value_kind kind, size_t count)
{
    fsdp_value value = {0};
    if (fsdp_value_set_items(&value, kind, count, NULL) != FSDP_OK)
        exit(FSDP_ERR_LIMIT);
    return value;
}

static fsdp_status add_values(state *st, fsdp_error *err)
{
    fsdp_value list = items_value(FSDP_VALUE_LIST, 3), dict = items_value(FSDP_VALUE_DICT, 2);
    list.as.list.items[0] = fsdp_value_f64(0.9);
    list.as.list.items[1] = items_value(FSDP_VALUE_DICT, 0);
    list.as.list.items[2] = fsdp_value_bool(true);
    dict.as.list.items[0] = text_value(FSDP_VALUE_STRING, FSDP_NAME("a\0\n"));
    dict.as.list.items[1] = fsdp_value_i64(-7);
    FSDP_TRY(
        add_value(st, FSDP_NAME("lr"), fsdp_value_f64(st->sample->changed ? 1e-4 : 3e-4), err));
    FSDP_TRY(add_value(st, FSDP_NAME("epoch"), fsdp_value_i64(3), err));
    FSDP_TRY(add_value(st, FSDP_NAME("one"), fsdp_value_f64(1), err));
    FSDP_TRY(add_value(st, FSDP_NAME("big"), fsdp_value_u64(UINT64_MAX), err));
    FSDP_TRY(add_value(st, FSDP_NAME("nan"), fsdp_value_f64(NAN), err));
    FSDP_TRY(add_value(st, FSDP_NAME("low"), fsdp_value_f64(-INFINITY), err));
    FSDP_TRY(add_value(st, FSDP_NAME("none"), (fsdp_value){0}, err));
    FSDP_TRY(add_value(st, FSDP_NAME("note"),
                       text_value(FSDP_VALUE_STRING, FSDP_NAME("tab\t\"q\"")), err));
    FSDP_TRY(
        add_value(st, FSDP_NAME("rng"), text_value(FSDP_VALUE_BYTES, FSDP_NAME("\1\2\xff")), err));
    FSDP_TRY(add_value(st, FSDP_NAME("odd"), text_value(FSDP_VALUE_OPAQUE, FSDP_NAME("x.Y")), err));
    FSDP_TRY(add_value(st, FSDP_NAME("betas"), list, err));
    FSDP_TRY(add_value(st, FSDP_NAME("empty"), items_value(FSDP_VALUE_DICT, 0), err));
    return add_value(st, FSDP_NAME("config"), dict, err);
}

/* Names that terminals, file systems and JSON do not like. */
static fsdp_status add_odd_names(state *st, fsdp_error *err)
{
    static char long_name[10000];
    memset(long_name, 'n', sizeof long_name);
    const struct {
        const char *name;
        size_t size;
    } names[] = {{FSDP_NAME("")},
                 {FSDP_NAME(".")},
                 {FSDP_NAME("a/b")},
                 {FSDP_NAME("a")},
                 {FSDP_NAME("nul\0here")},
                 {FSDP_NAME("bell\a\33[31mred\33[0m")},
                 {FSDP_NAME("line\nbreak")},
                 {FSDP_NAME("back\\slash")},
                 {FSDP_NAME("quote\"s")},
                 {FSDP_NAME("\xe2\x80\xaeright-to-left")},
                 {FSDP_NAME("gr\xc3\xbc\xc3\x9f")},
                 {long_name, sizeof long_name}};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
        FSDP_TRY(add_tensor(st, names[i].name, names[i].size, FSDP_F32, 1,
                            (int64_t[]){(int64_t)i + 1}, shard_0, err));
    return add_value(st, FSDP_NAME("value\33]0;title\a"), fsdp_value_i64(1), err);
}

static fsdp_status fill(state *st, int ranks, fsdp_error *err)
{
    FSDP_TRY(fsdp_sd_create(&st->sd, err));
    FSDP_TRY(fsdp_mesh_create(1, (int64_t[]){ranks}, (const char *[]){"dp"}, NULL, &st->mesh, err));
    if (st->sample->empty)
        return FSDP_OK;
    if (st->sample->odd)
        return add_odd_names(st, err);
    FSDP_TRY(add_tensors(st, err));
    return add_values(st, err);
}

static fsdp_status save(state *st, fsdp_ctl *ctl, fsdp_error *err)
{
    static const int64_t sample_step = 1200;
    fsdp_save_opts opts = {0};
    opts.kind = st->sample->kind;
    opts.compress = st->sample->compress;
    if (!st->sample->is_run) {
        opts.step = &sample_step;
        return fsdp_sd_save(st->sd, ctl, st->sample->path, &opts, err);
    }
    for (int64_t step = 100; step <= 300; step += 100)
        FSDP_TRY(fsdp_run_save(st->sd, ctl, st->sample->path, step, &opts, err));
    return FSDP_OK;
}

static fsdp_status save_as_rank(void *user, fsdp_ctl *ctl, fsdp_error *err)
{
    state st = {.sample = user, .rank = fsdp_ctl_rank(ctl)};
    fsdp_status status = fsdp_ctl_agree(ctl, fill(&st, fsdp_ctl_size(ctl), err), err);
    if (status == FSDP_OK)
        status = save(&st, ctl, err);
    fsdp_sd_free(st.sd);
    fsdp_mesh_free(st.mesh);
    for (int i = 0; i < st.memory_count; i++)
        free(st.memory[i]);
    return status;
}

static bool read_kind(sample *what, const char *text)
{
    static const char *const kinds[] = {"sharded", "full", "local"};
    what->is_run = strcmp(text, "run") == 0;
    for (int i = 0; i < 3; i++) {
        if (strcmp(text, kinds[i]) != 0)
            continue;
        what->kind = (fsdp_kind)i;
        return true;
    }
    return what->is_run;
}

int main(int argc, char **argv)
{
    sample what = {0};
    fsdp_error err = {0};
    const struct {
        const char *name;
        bool *flag;
    } flags[] = {{"compress", &what.compress}, {"changed", &what.changed}, {"bf16", &what.bf16},
                 {"odd", &what.odd},           {"empty", &what.empty},     {"nan", &what.nan}};
    if (argc < 4 || !read_kind(&what, argv[1]))
        return FSDP_ERR_USAGE;
    what.path = argv[3];
    for (int i = 4; i < argc; i++)
        for (size_t k = 0; k < sizeof flags / sizeof flags[0]; k++)
            if (strcmp(argv[i], flags[k].name) == 0)
                *flags[k].flag = true;
    fsdp_status status = fsdp_ctl_run_threads(atoi(argv[2]), save_as_rank, &what, &err);
    fsdp_error_report(&err);
    return (int)status;
}
