/* The tour of docs/library.md, in one program: its parts are quoted there. Runs on threads. */
#include <fsdp/fsdp.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ROWS = 10, COLUMNS = 8 };

/* --- describing a state -------------------------------------------------------------------------- */

static fsdp_status add_weights(fsdp_sd *sd, const fsdp_mesh *mesh, float *weight, float *bias,
                               fsdp_error *err)
{
    int64_t shape[] = {ROWS, COLUMNS};
    fsdp_layout rows = {.mesh = mesh, .placement = {{.kind = FSDP_SHARD, .dim = 0}}};
    fsdp_layout whole = {.mesh = mesh}; /* on every rank */
    fsdp_tensor w = {.dtype = FSDP_F32, .ndim = 2, .shape = shape, .layout = rows, .data = weight};
    fsdp_tensor b = {.dtype = FSDP_F32, .ndim = 1, .shape = shape + 1, .layout = whole, .data = bias};
    FSDP_TRY(fsdp_sd_add_tensor(sd, FSDP_NAME("model.fc.weight"), &w, err));
    FSDP_TRY(fsdp_sd_add_tensor(sd, FSDP_NAME("model.fc.bias"), &b, err));
    return fsdp_sd_add_alias(sd, FSDP_NAME("model.head.weight"), FSDP_NAME("model.fc.weight"), err);
}

static fsdp_status add_settings(fsdp_sd *sd, double rate, fsdp_error *err)
{
    fsdp_value value = fsdp_value_f64(rate);
    return fsdp_sd_add_value(sd, FSDP_NAME("optim.param_groups.0.lr"), &value, err);
}

/* --- memory of the own boxes --------------------------------------------------------------------- */

static void fill_rows(const fsdp_entry *entry, int rank)
{
    fsdp_box box;
    float *element = entry->data;
    if (!fsdp_layout_mesh_box(&entry->layout, entry->ndim, entry->shape, rank, &box))
        return;
    for (int64_t row = box.lo[0]; row < box.lo[0] + box.len[0]; row++)
        for (int64_t column = 0; column < box.len[1]; column++)
            *element++ = (float)(row * COLUMNS + column);
}

/* --- one rank's state ---------------------------------------------------------------------------- */

typedef struct state {
    fsdp_mesh *mesh;
    fsdp_sd *sd;
} state;

static fsdp_status make_state(state *own, fsdp_ctl *ctl, fsdp_error *err)
{
    int64_t ranks = fsdp_ctl_size(ctl);
    FSDP_TRY(fsdp_mesh_create(1, &ranks, (const char *[]){"dp"}, NULL, &own->mesh, err));
    FSDP_TRY(fsdp_sd_create(&own->sd, err));
    FSDP_TRY(add_weights(own->sd, own->mesh, NULL, NULL, err));
    FSDP_TRY(add_settings(own->sd, 3e-4, err));
    return fsdp_sd_allocate(own->sd, fsdp_ctl_rank(ctl), err);
}

static void drop_state(state *own)
{
    fsdp_sd_free(own->sd);
    fsdp_mesh_free(own->mesh);
}

/* --- saving -------------------------------------------------------------------------------------- */

static void report_note(void *context, const char *text)
{
    (void)context;
    fprintf(stderr, "note: %s\n", text);
}

static fsdp_status save_step(const fsdp_sd *sd, fsdp_ctl *ctl, int64_t step, fsdp_error *err)
{
    fsdp_retention retention = {.keep_last = 3, .keep_every = 1000};
    fsdp_save_opts opts = {0};
    opts.compress = true;
    opts.retain = &retention;
    opts.watch.notice = report_note;
    return fsdp_run_save(sd, ctl, "run", step, &opts, err);
}

static fsdp_status save_rank(void *context, fsdp_ctl *ctl, fsdp_error *err)
{
    state own = {0};
    (void)context;
    fsdp_status st = make_state(&own, ctl, err);
    if (st == FSDP_OK)
        fill_rows(fsdp_sd_at(own.sd, 0), fsdp_ctl_rank(ctl));
    for (int64_t step = 100; step <= 500 && st == FSDP_OK; step += 100)
        st = save_step(own.sd, ctl, step, err);
    drop_state(&own);
    return st;
}

/* --- loading ------------------------------------------------------------------------------------- */

static fsdp_status load_newest(fsdp_sd *sd, fsdp_ctl *ctl, fsdp_error *err)
{
    fsdp_load_report report;
    fsdp_load_opts opts = {.include = "^model[.]", .report = &report};
    opts.watch.notice = report_note; /* damaged steps that were skipped */
    fsdp_status st = fsdp_sd_load(sd, ctl, "run", &opts, err);
    if (st == FSDP_OK && fsdp_ctl_rank(ctl) == 0)
        printf("loaded %s\n", report.path);
    fsdp_load_report_release(&report);
    return st;
}

static fsdp_status load_rank(void *context, fsdp_ctl *ctl, fsdp_error *err)
{
    state own = {0};
    (void)context;
    fsdp_status st = make_state(&own, ctl, err);
    if (st == FSDP_OK)
        st = load_newest(own.sd, ctl, err);
    drop_state(&own);
    return st;
}

/* --- the full state on rank 0 -------------------------------------------------------------------- */

static fsdp_status add_up(void *context, const fsdp_entry *entry, int64_t first, int64_t count,
                          const void *data, fsdp_error *err)
{
    double *sum = context;
    const float *element = data;
    (void)entry, (void)first, (void)err;
    for (int64_t i = 0; i < count; i++)
        *sum += element[i];
    return FSDP_OK;
}

static fsdp_status gather_rank(void *context, fsdp_ctl *ctl, fsdp_error *err)
{
    state own = {0};
    fsdp_sd *full = NULL;
    double sum = 0;
    (void)context;
    fsdp_status st = make_state(&own, ctl, err);
    if (st == FSDP_OK)
        st = fsdp_sd_gather_full(own.sd, ctl, &full, err); /* NULL on the other ranks */
    if (st == FSDP_OK)
        st = fsdp_sd_gather(own.sd, ctl, 1 << 20, add_up, &sum, err); /* calls add_up on rank 0 */
    if (full)
        printf("rank 0 holds %zu entries\n", fsdp_sd_count(full));
    fsdp_sd_free(full);
    drop_state(&own);
    return st;
}

static fsdp_status sum_of_a_checkpoint(double *sum, fsdp_error *err)
{
    fsdp_load_opts opts = {.include = "weight$", .memory = 64 << 20};
    *sum = 0;
    return fsdp_stream_full("run", &opts, add_up, sum, err);
}

static fsdp_status count_entries(size_t *count, fsdp_error *err)
{
    fsdp_sd *whole;
    FSDP_TRY(fsdp_load_full("run", NULL, &whole, err));
    *count = fsdp_sd_count(whole);
    fsdp_sd_free(whole);
    return FSDP_OK;
}

/* --- one row, without ranks ---------------------------------------------------------------------- */

static fsdp_status read_row(int64_t row, float *row_out, fsdp_error *err)
{
    fsdp_checkpoint *checkpoint = NULL;
    FSDP_TRY(fsdp_checkpoint_open("run", NULL, &checkpoint, err));
    const fsdp_sd *sd = fsdp_checkpoint_sd(checkpoint);
    int64_t at = fsdp_sd_find(sd, FSDP_NAME("model.fc.weight"));
    fsdp_box box = {.ndim = 2, .lo = {row, 0}, .len = {1, COLUMNS}};
    fsdp_status st = at < 0 ? fsdp_fail(err, FSDP_ERR_NOT_FOUND, "no such tensor")
                            : fsdp_checkpoint_read(checkpoint, (size_t)at, &box, row_out,
                                                   FSDP_CHECK_BLOCKS, err);
    fsdp_checkpoint_close(checkpoint);
    return st;
}

/* --- errors -------------------------------------------------------------------------------------- */

static fsdp_status reshard(fsdp_error *err)
{
    fsdp_convert_opts opts = {.world = 6, .memory = 1 << 20};
    return fsdp_checkpoint_convert("run", "on-6", &opts, err);
}

static int show_an_error(void)
{
    fsdp_error err = {0};
    fsdp_status st = reshard(&err); /* "on-6" exists already */
    if (st == FSDP_ERR_EXISTS)
        printf("as expected: %s\n", err.text);
    return st == FSDP_ERR_EXISTS ? 0 : 1;
}

static fsdp_status tour(fsdp_error *err)
{
    double sum;
    size_t entries;
    float row[COLUMNS];
    FSDP_TRY(fsdp_ctl_run_threads(4, save_rank, NULL, err));
    FSDP_TRY(fsdp_ctl_run_threads(3, load_rank, NULL, err));
    FSDP_TRY(fsdp_ctl_run_threads(2, gather_rank, NULL, err));
    FSDP_TRY(sum_of_a_checkpoint(&sum, err));
    FSDP_TRY(count_entries(&entries, err));
    FSDP_TRY(read_row(7, row, err));
    FSDP_TRY(reshard(err));
    printf("%zu entries, sum %g, row 7 begins with %g\n", entries, sum, (double)row[0]);
    return FSDP_OK;
}

int main(void)
{
    fsdp_error err = {0};
    if (tour(&err) != FSDP_OK)
        return fsdp_error_report(&err);
    return show_an_error();
}
