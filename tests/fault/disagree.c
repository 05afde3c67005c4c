/*
 * Ranks that declare different state: the save fails on every rank before a file exists, and the
 * error names the first entry that differs and the ranks that have it differently.
 */
#include "tests/fault/scenario.h"
#include "tests/support/matrix_row.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { WORLD = 4 };

typedef enum difference {
    NO_DIFFERENCE,
    OTHER_NAME,
    OTHER_SHAPE,
    OTHER_DTYPE,
    OTHER_LAYOUT,
    OTHER_VALUE,
    OTHER_ALIAS,
    ONE_LESS,
    ONE_MORE,
    OTHER_ORDER
} difference;

typedef struct disagreement {
    const char *name;
    difference what;
    bool ranks[WORLD];         /* that differ from the others */
    const char *entry, *named; /* words that the error must have */
} disagreement;

typedef struct job {
    const disagreement *how;
    const char *path;
    fsdp_status status[WORLD];
    fsdp_error err[WORLD];
} job;

typedef struct build {
    fsdp_sd *sd;
    fsdp_mesh *mesh;
    difference what;
} build;

static fsdp_status add(build *b, const char *name, fsdp_dtype dtype, int64_t rows, bool whole,
                       fsdp_error *err)
{
    fsdp_placement placement = {.kind = whole ? FSDP_REPLICATE : FSDP_SHARD};
    return fsdp_sd_add_tensor(
        b->sd, name, strlen(name),
        &(fsdp_tensor){dtype, 1, &rows, {.mesh = b->mesh, .placement = {placement}}, NULL}, err);
}

static fsdp_status add_all(build *b, fsdp_error *err)
{
    difference what = b->what;
    fsdp_value value = fsdp_value_i64(what == OTHER_VALUE ? 6 : 5);
    FSDP_TRY(add(b, what == OTHER_ORDER ? "second" : "first", FSDP_F32, 12, false, err));
    FSDP_TRY(add(b, what == OTHER_ORDER ? "first" : "second", FSDP_F32, 12, false, err));
    FSDP_TRY(add(b, what == OTHER_NAME ? "threshold" : "third",
                 what == OTHER_DTYPE ? FSDP_I32 : FSDP_F32, what == OTHER_SHAPE ? 13 : 12,
                 what == OTHER_LAYOUT, err));
    FSDP_TRY(fsdp_sd_add_value(b->sd, FSDP_NAME("fourth"), &value, err));
    FSDP_TRY(fsdp_sd_add_alias(b->sd, FSDP_NAME("fifth"), what == OTHER_ALIAS ? "second" : "first",
                               what == OTHER_ALIAS ? 6 : 5, err));
    if (what != ONE_LESS)
        FSDP_TRY(add(b, "sixth", FSDP_F32, 12, false, err));
    return what == ONE_MORE ? add(b, "seventh", FSDP_F32, 12, false, err) : FSDP_OK;
}

static fsdp_status build_state(build *b, int rank, fsdp_error *err)
{
    FSDP_TRY(fsdp_mesh_create(1, (int64_t[]){WORLD}, (const char *[]){"dp"}, NULL, &b->mesh, err));
    FSDP_TRY(fsdp_sd_create(&b->sd, err));
    FSDP_TRY(add_all(b, err));
    return fsdp_sd_allocate(b->sd, rank, err);
}

static fsdp_status save_rank(void *user, fsdp_ctl *ctl, fsdp_error *err)
{
    job *j = user;
    int rank = fsdp_ctl_rank(ctl);
    build b = {.what = j->how->ranks[rank] ? j->how->what : NO_DIFFERENCE};
    (void)err;
    j->status[rank] = fsdp_ctl_agree(ctl, build_state(&b, rank, &j->err[rank]), &j->err[rank]);
    if (j->status[rank] == FSDP_OK)
        j->status[rank] = fsdp_sd_save(b.sd, ctl, j->path, NULL, &j->err[rank]);
    fsdp_sd_free(b.sd);
    fsdp_mesh_free(b.mesh);
    return FSDP_OK;
}

static bool is_refused(const disagreement *how, const char *path, const char *root)
{
    job j = {.how = how, .path = path};
    bool ok = fsdp_ctl_run_threads(WORLD, save_rank, &j, NULL) == FSDP_OK;
    for (int rank = 0; rank < WORLD; rank++) {
        const char *text = j.err[rank].text;
        bool good = j.status[rank] == FSDP_ERR_USAGE && strstr(text, how->entry) &&
                    strstr(text, how->named);
        if (!good)
            fprintf(stderr, "%s: rank %d: %d, %s\n", how->name, rank, (int)j.status[rank], text);
        ok = ok && good;
    }
    scenario any = {.work = WORK_FRESH};
    return ok && !fsdp_io_exists(NULL, path) &&
           scenario_leftovers(&any, fsdp_io_posix(), root) == 0;
}

int main(void)
{
    static const disagreement all[] = {
        {"a name", OTHER_NAME, {0, 1, 0, 0}, "'third'", "rank 1"},
        {"a name on rank 0",
         OTHER_NAME,
         {1, 0, 0, 0},
         "'threshold' on rank 0",
         "'third' on rank 1, 2, 3"},
        {"a shape", OTHER_SHAPE, {0, 0, 1, 0}, "'third'", "rank 2"},
        {"a dtype", OTHER_DTYPE, {0, 0, 0, 1}, "'third'", "rank 3"},
        {"a layout", OTHER_LAYOUT, {0, 1, 0, 1}, "'third'", "rank 1, 3"},
        {"a value", OTHER_VALUE, {0, 0, 1, 1}, "'fourth'", "rank 2, 3"},
        {"an alias", OTHER_ALIAS, {0, 1, 0, 0}, "'fifth'", "rank 1"},
        {"one entry less", ONE_LESS, {0, 1, 0, 0}, "'sixth'", "rank 1"},
        {"one entry more", ONE_MORE, {0, 0, 0, 1}, "'seventh'", "rank 3"},
        {"the order", OTHER_ORDER, {0, 0, 1, 0}, "'first' on rank 0", "'second' on rank 2"},
    };
    enum { COUNT = sizeof all / sizeof all[0] };
    char folder[100], path[SCENARIO_PATH];
    int wrong = 0;
    if (!scenario_folder(folder, sizeof folder))
        return 1;
    scenario_path(path, "%s/ck", folder);
    for (int i = 0; i < COUNT; i++) {
        if (!is_refused(&all[i], path, folder)) {
            fprintf(stderr, "ranks that differ in %s: not refused as they must be\n", all[i].name);
            wrong++;
        }
    }
    scenario_remove(folder);
    matrix_row row = {"ranks that declare different state", "differences", COUNT, COUNT, 0};
    bool is_true = matrix_row_print(&row, " | not refused with entry and ranks %d", wrong);
    return is_true && wrong == 0 ? 0 : 1;
}
