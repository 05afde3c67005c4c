/*
 * Rows many-save and many-plan, 40,000 tensors on four ranks, and row manifest: what planning costs
 * without any data, and how large manifests are.
 */
#include "tests/bench/rows.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { WORLD = 4 };

/* --- many tensors ----------------------------------------------------------------------------- */

/* Every box that every rank would ask for; the sum keeps the work from being left out. */
static int64_t plan_ranks(const fsdp_checkpoint *checkpoint)
{
    const fsdp_sd *sd = fsdp_checkpoint_sd(checkpoint);
    int64_t elements = 0;
    for (int rank = 0; rank < WORLD; rank++)
        for (size_t i = 0; i < fsdp_sd_count(sd); i++) {
            const fsdp_entry *entry = fsdp_sd_at(sd, i);
            if (entry->kind != FSDP_ENTRY_TENSOR)
                continue;
            fsdp_box box;
            size_t boxes = fsdp_layout_box_count(&entry->layout, entry->ndim, entry->shape, rank);
            for (size_t part = 0; part < boxes; part++) {
                fsdp_layout_box_at(&entry->layout, entry->ndim, entry->shape, rank, part, &box);
                elements += fsdp_box_count(&box);
            }
        }
    return elements;
}

static fsdp_status time_plan(const char *path, bench_times *times, fsdp_error *err)
{
    fsdp_checkpoint *checkpoint = NULL;
    bench_clock began = bench_now();
    FSDP_TRY(
        fsdp_checkpoint_open(path, &(fsdp_open_opts){.access = *cli_access()}, &checkpoint, err));
    int64_t elements = plan_ranks(checkpoint);
    bench_add_time(times, &began);
    fsdp_checkpoint_close(checkpoint);
    return elements > 0 ? FSDP_OK : fsdp_fail(err, FSDP_ERR_INTERNAL, "an empty plan");
}

static fsdp_status measure_plan(const row_options *opts, const bench_model *model, const char *dir,
                                fsdp_error *err)
{
    char path[BENCH_PATH];
    bench_times ours = {0};
    bench_state_opts state = {
        .world = WORLD, .no_groups = true, .seed = opts->seed, .step = BENCH_STEP};
    bench_path(path, dir, "planned");
    FSDP_TRY(bench_save_model(opts, model, &state, path, err));
    int64_t read_before = bench_bytes_read();
    FSDP_TRY(time_plan(path, &ours, err));
    bench_row row = {.ours = &ours, .bytes_read = bench_bytes_read() - read_before};
    for (int round = ours.count = 0; round < opts->rounds; round++)
        FSDP_TRY(time_plan(path, &ours, err));
    row.bytes_needed = row.bytes_read;
    row.peak_kib = bench_peak_kib();
    row.met = bench_median(&ours) <= 0.1;
    snprintf(row.work, sizeof row.work, "many-plan");
    snprintf(row.goal, sizeof row.goal, "<= 0.1 s");
    snprintf(row.against, sizeof row.against, "manifest and shard indexes read, boxes of 4 ranks");
    return bench_print_row(opts, &row);
}

/* The scale at which the whole state has about opts->size bytes. */
static double scale_for(const row_options *opts, fsdp_error *err)
{
    bench_model whole;
    double scale = 0;
    if (bench_model_init(&whole, "moe", 1, err) == FSDP_OK) {
        scale = (double)opts->size / (double)bench_model_bytes(&whole);
        bench_model_release(&whole);
    }
    return scale;
}

fsdp_status bench_many_rows(const row_options *opts, const char *dir, fsdp_error *err)
{
    bench_model model;
    FSDP_TRY(bench_model_init(&model, "moe", scale_for(opts, err), err));
    fsdp_status st = bench_measure_many_save(opts, &model, dir, WORLD, err);
    if (st == FSDP_OK)
        st = measure_plan(opts, &model, dir, err);
    bench_model_release(&model);
    return st;
}

/* --- planning and manifests ------------------------------------------------------------------- */

enum { PLANNED_WORLD = 1024, PARAMS = 250, TENSORS_PER_PARAM = 4, SAVED_WORLD = 64 };

/* The plans of all ranks; together they write every byte once. */
static fsdp_status time_planning(const fsdp_sd *sd, int64_t total, bench_times *times,
                                 fsdp_error *err)
{
    int64_t sum = 0;
    bench_clock began = bench_now();
    for (int rank = 0; rank < PLANNED_WORLD; rank++) {
        int64_t bytes;
        FSDP_TRY(fsdp_save_plan_bytes(sd, FSDP_SHARDED, FSDP_OWNERS_BALANCED, rank, &bytes, err));
        sum += bytes;
    }
    bench_add_time(times, &began);
    if (sum != total)
        return fsdp_fail(err, FSDP_DIFFERS, "the plans write %" PRId64 " bytes of %" PRId64, sum,
                         total);
    return FSDP_OK;
}

static fsdp_status plan_often(const row_options *opts, const bench_model *model, bench_times *times,
                              fsdp_error *err)
{
    fsdp_sd *sd = NULL;
    bench_state_opts state = {.world = PLANNED_WORLD, .no_groups = true};
    fsdp_status st = bench_state_create(model, &state, &sd, err);
    for (int round = 0; round < opts->rounds && st == FSDP_OK; round++)
        st = time_planning(sd, bench_model_bytes(model), times, err);
    fsdp_sd_free(sd);
    return st;
}

/* Bytes of the manifest of so many tensors on so many ranks. */
static fsdp_status weigh_manifest(const row_options *opts, const char *dir, int params, int world,
                                  int64_t *bytes_out, fsdp_error *err)
{
    bench_model model;
    char path[BENCH_PATH], manifest[BENCH_PATH];
    bench_state_opts state = {.world = world, .no_groups = true, .step = BENCH_STEP};
    bench_path(path, dir, "weighed");
    bench_path(manifest, path, "manifest.json");
    FSDP_TRY(bench_model_init_plain(&model, params, (int64_t)params * SAVED_WORLD * 4096, err));
    fsdp_status st = bench_save_model(opts, &model, &state, path, err);
    bench_model_release(&model);
    if (st != FSDP_OK)
        return st;
    *bytes_out = bench_file_size(manifest);
    return bench_remove(path, err);
}

static fsdp_status print_planning(const row_options *opts, const bench_times *times,
                                  const int64_t bytes[3])
{
    double per_tensor = (double)(bytes[1] - bytes[0]) / (PARAMS * TENSORS_PER_PARAM);
    double per_file = (double)(bytes[2] - bytes[0]) / (SAVED_WORLD - 1);
    bench_row row = {.work = "manifest",
                     .goal = "<= 1 s, <= 160 bytes a file",
                     .ours = times,
                     .peak_kib = bench_peak_kib()};
    row.met = bench_median(times) <= 1 && per_file <= 160;
    snprintf(row.against, sizeof row.against, "plans of %d ranks; %.1f bytes a tensor, %.1f a file",
             PLANNED_WORLD, per_tensor, per_file);
    fsdp_text_addf(&row.more,
                   ", \"manifest_bytes\": %" PRId64 ", \"bytes_per_tensor\": %.1f, "
                   "\"bytes_per_file\": %.1f",
                   bytes[0], per_tensor, per_file);
    return bench_print_row(opts, &row);
}

fsdp_status bench_manifest_rows(const row_options *opts, const char *dir, fsdp_error *err)
{
    bench_model model;
    bench_times times = {0};
    int64_t bytes[3];
    FSDP_TRY(bench_model_init_plain(&model, PARAMS, opts->size, err));
    fsdp_status st = plan_often(opts, &model, &times, err);
    bench_model_release(&model);
    FSDP_TRY(st);
    FSDP_TRY(weigh_manifest(opts, dir, PARAMS, 1, &bytes[0], err));
    FSDP_TRY(weigh_manifest(opts, dir, 2 * PARAMS, 1, &bytes[1], err));
    FSDP_TRY(weigh_manifest(opts, dir, PARAMS, SAVED_WORLD, &bytes[2], err));
    return print_planning(opts, &times, bytes);
}
