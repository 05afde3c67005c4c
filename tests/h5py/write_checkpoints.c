/*
 * Writes checkpoints of every kind, raw and encoded, for read_checkpoints.py: three ranks, tensors
 * whose element i holds a simple function of i. Usage: write_checkpoints DIRECTORY
 */
#include <fsdp/fsdp.h>

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { RANKS = 3 };

typedef struct sample {
    const char *name;
    fsdp_dtype dtype;
    int ndim;
    int64_t shape[3];
    fsdp_placement placement;
} sample;

static const sample samples[] = {
    {"rows.f32", FSDP_F32, 2, {7, 5}, {FSDP_SHARD, 0, 0}},
    {"columns.f32", FSDP_F32, 2, {6, 11}, {FSDP_SHARD, 1, 0}},
    {"large.f32", FSDP_F32, 2, {300, 1000}, {FSDP_SHARD, 0, 0}},
    {"large.columns.f32", FSDP_F32, 2, {200, 1001}, {FSDP_SHARD, 1, 0}},
    {"half.f16", FSDP_F16, 1, {50}, {FSDP_SHARD, 0, 0}},
    {"brain.bf16", FSDP_BF16, 2, {9, 4}, {FSDP_SHARD, 1, 0}},
    {"flags.bool", FSDP_BOOL, 1, {10}, {FSDP_SHARD, 0, 0}},
    {"waves.c64", FSDP_C64, 2, {4, 3}, {FSDP_SHARD, 0, 0}},
    {"ids.i64", FSDP_I64, 3, {2, 3, 4}, {FSDP_SHARD, 2, 0}},
    {"a/b%c.f64", FSDP_F64, 1, {2}, {FSDP_SHARD, 0, 0}},
    {"copied.u8", FSDP_U8, 1, {20}, {FSDP_REPLICATE, 0, 0}},
    {"step.i64", FSDP_I64, 0, {0}, {FSDP_REPLICATE, 0, 0}},
    {"nothing.f32", FSDP_F32, 2, {0, 4}, {FSDP_SHARD, 0, 0}},
};
enum { SAMPLES = sizeof samples / sizeof *samples };

/* Writes element i of a tensor; read_checkpoints.py computes the same values. */
static void put_element(fsdp_dtype dtype, int64_t i, char *to)
{
    float f32 = (float)i * 0.5f;
    double f64 = (double)i + 0.25;
    int64_t i64 = i * 1000000007 + 3;
    uint16_t bits = (uint16_t)(0x3c00 + i); /* f16 and bf16: bit patterns of positive numbers */
    float pair[2] = {(float)i, -(float)i};
    uint8_t byte = (uint8_t)(dtype == FSDP_BOOL ? i % 3 == 0 : i * 7);
    switch (dtype) {
    case FSDP_F32: memcpy(to, &f32, 4); break;
    case FSDP_F64: memcpy(to, &f64, 8); break;
    case FSDP_I64: memcpy(to, &i64, 8); break;
    case FSDP_C64: memcpy(to, pair, 8); break;
    case FSDP_F16:
    case FSDP_BF16: memcpy(to, &bits, 2); break;
    default: memcpy(to, &byte, 1); break;
    }
}

static void fill_entry(const fsdp_entry *entry, int rank)
{
    char *to = entry->data;
    size_t size = fsdp_dtype_size(entry->dtype);
    size_t parts = fsdp_layout_box_count(&entry->layout, entry->ndim, entry->shape, rank);
    for (size_t part = 0; part < parts; part++) {
        fsdp_box box;
        fsdp_layout_box_at(&entry->layout, entry->ndim, entry->shape, rank, part, &box);
        for (int64_t i = 0; i < fsdp_box_count(&box); i++, to += size) {
            int64_t left = i, lo[FSDP_MAX_DIMS] = {0};
            for (int d = box.ndim - 1; d >= 0; d--) {
                lo[d] = box.lo[d] + left % box.len[d];
                left /= box.len[d];
            }
            put_element(entry->dtype, fsdp_box_position(entry->ndim, entry->shape, lo), to);
        }
    }
}

static fsdp_status add_samples(fsdp_sd *sd, int ranks, int rank, fsdp_error *err)
{
    fsdp_mesh *mesh = NULL;
    FSDP_TRY(fsdp_mesh_create(1, (int64_t[]){ranks}, (const char *[]){"dp"}, NULL, &mesh, err));
    fsdp_status st = FSDP_OK;
    for (int i = 0; i < SAMPLES && st == FSDP_OK; i++)
        st = fsdp_sd_add_tensor(sd, samples[i].name, strlen(samples[i].name),
                                &(fsdp_tensor){samples[i].dtype,
                                               samples[i].ndim,
                                               samples[i].shape,
                                               {.mesh = mesh, .placement = {samples[i].placement}},
                                               NULL},
                                err);
    fsdp_mesh_free(mesh);
    FSDP_TRY(st);
    FSDP_TRY(fsdp_sd_add_alias(sd, FSDP_NAME("tied"), FSDP_NAME("rows.f32"), err));
    fsdp_value lr = fsdp_value_f64(0.1);
    FSDP_TRY(fsdp_sd_add_value(sd, FSDP_NAME("lr"), &lr, err));
    FSDP_TRY(fsdp_sd_allocate(sd, rank, err));
    for (int i = 0; i < SAMPLES; i++)
        fill_entry(fsdp_sd_at(sd, (size_t)i), rank);
    return FSDP_OK;
}

typedef struct save_call {
    char path[4096];
    fsdp_save_opts opts;
} save_call;

static fsdp_status save_rank(void *user, fsdp_ctl *ctl, fsdp_error *err)
{
    const save_call *call = user;
    fsdp_sd *sd = NULL;
    FSDP_TRY(fsdp_sd_create(&sd, err));
    fsdp_status st = add_samples(sd, fsdp_ctl_size(ctl), fsdp_ctl_rank(ctl), err);
    if (st == FSDP_OK)
        st = fsdp_sd_save(sd, ctl, call->path, &call->opts, err);
    fsdp_sd_free(sd);
    return st;
}

static fsdp_status write_kind(const char *directory, const char *name, fsdp_kind kind,
                              bool compress, fsdp_error *err)
{
    save_call call = {0};
    snprintf(call.path, sizeof call.path, "%s/%s%s", directory, name, compress ? "-zstd" : "");
    call.opts.kind = kind;
    call.opts.compress = compress;
    FSDP_TRY(fsdp_ctl_run_threads(RANKS, save_rank, &call, err));
    /* and the same again through a conversion to two ranks, cut along the other dim */
    char to[4200];
    snprintf(to, sizeof to, "%s-converted", call.path);
    fsdp_convert_opts opts = {
        .kind = kind, .world = kind == FSDP_FULL ? 0 : 2, .shard_dim = 1, .compress = compress};
    return fsdp_checkpoint_convert(call.path, to, &opts, err);
}

int main(int argc, char **argv)
{
    static const char *const names[] = {"sharded", "full", "local"};
    fsdp_error err = {0};
    if (argc != 2)
        return FSDP_ERR_USAGE;
    for (int kind = 0; kind < 3; kind++)
        for (int compress = 0; compress < 2; compress++)
            if (write_kind(argv[1], names[kind], (fsdp_kind)kind, compress, &err) != FSDP_OK)
                return fsdp_error_report(&err);
    return 0;
}
