/* Saving and loading end to end in one process: threads as ranks, real files. */
#include "base/io/io.h"
#include "base/data/flow.h"
#include "tests/support/sample_state.h"

#include <criterion/criterion.h>
#include <fsdp/fsdp.h>

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* A small state with every kind of entry; element i of a tensor has value seed + i. */
typedef struct state {
    fsdp_sd *sd;
    fsdp_mesh *mesh;
    void *memory[64];
    int count;
} state;

static int64_t numel(int ndim, const int64_t *shape)
{
    int64_t n = 1;
    for (int d = 0; d < ndim; d++)
        n *= shape[d];
    return n;
}

/* Fills this rank's boxes of the last entry by position, or checks them. */
static bool visit_elements(const fsdp_entry *entry, int rank, int64_t seed, bool fill)
{
    size_t parts = fsdp_layout_box_count(&entry->layout, entry->ndim, entry->shape, rank);
    int64_t *at = entry->data;
    for (size_t part = 0; part < parts; part++) {
        fsdp_box box;
        fsdp_layout_box_at(&entry->layout, entry->ndim, entry->shape, rank, part, &box);
        for (int64_t i = 0; i < fsdp_box_count(&box); i++) {
            int64_t left = i, lo[FSDP_MAX_DIMS] = {0};
            for (int d = box.ndim - 1; d >= 0; d--) {
                lo[d] = box.lo[d] + left % box.len[d];
                left /= box.len[d];
            }
            int64_t value = seed * 1000000 + fsdp_box_position(entry->ndim, entry->shape, lo);
            if (fill)
                *at = value;
            else if (*at != value)
                return false;
            at++;
        }
    }
    return true;
}

static void add(state *s, const char *name, int ndim, const int64_t *shape,
                const fsdp_placement *placements, int rank, int64_t seed, bool fill)
{
    fsdp_error err = {0};
    fsdp_layout layout = {.kind = FSDP_LAYOUT_MESH, .mesh = s->mesh};
    memcpy(layout.placement, placements, (size_t)fsdp_mesh_ndim(s->mesh) * sizeof *placements);
    void *data = malloc((size_t)numel(ndim, shape) * 8 + 8);
    memset(data, 0x55, (size_t)numel(ndim, shape) * 8 + 8);
    s->memory[s->count++] = data;
    cr_assert_eq(fsdp_sd_add_tensor(s->sd, name, strlen(name),
                                    &(fsdp_tensor){FSDP_I64, ndim, shape, layout, data}, &err),
                 FSDP_OK, "%s", err.text);
    if (fill)
        visit_elements(fsdp_sd_at(s->sd, fsdp_sd_count(s->sd) - 1), rank, seed, true);
}

static void build(state *s, int world, int dim, int rank, bool fill)
{
    fsdp_error err = {0};
    memset(s, 0, sizeof *s);
    cr_assert_eq(
        fsdp_mesh_create(1, (int64_t[]){world}, (const char *[]){"dp"}, NULL, &s->mesh, &err),
        FSDP_OK);
    cr_assert_eq(fsdp_sd_create(&s->sd, &err), FSDP_OK);
    fsdp_placement rows = {FSDP_SHARD, 0, 0}, shard = {FSDP_SHARD, dim, 0},
                   whole = {FSDP_REPLICATE, 0, 0};
    add(s, "even", 2, (int64_t[]){64, 48}, &shard, rank, 1, fill);
    add(s, "odd", 2, (int64_t[]){37, 1001}, &shard, rank, 2, fill);
    add(s, "small", 1, (int64_t[]){3}, &rows, rank, 3, fill);
    add(s, "copy", 2, (int64_t[]){5, 7}, &whole, rank, 4, fill);
    add(s, "scalar", 0, NULL, &whole, rank, 5, fill);
    add(s, "empty", 2, (int64_t[]){0, 7}, &rows, rank, 6, fill);
    add(s, "large", 3, (int64_t[]){40, 50, 400}, &shard, rank, 7, fill);
    fsdp_value value = fsdp_value_i64(fill ? 1200 : 0);
    cr_assert_eq(fsdp_sd_add_value(s->sd, FSDP_NAME("step"), &value, &err), FSDP_OK);
    cr_assert_eq(fsdp_sd_add_alias(s->sd, FSDP_NAME("tied"), FSDP_NAME("even"), &err), FSDP_OK);
}

static void drop(state *s)
{
    fsdp_sd_free(s->sd);
    fsdp_mesh_free(s->mesh);
    for (int i = 0; i < s->count; i++)
        free(s->memory[i]);
}

typedef struct job {
    const char *path;
    fsdp_save_opts save;
    fsdp_load_opts load;
    int dim;
    bool into_run;
} job;

static fsdp_status save_rank(void *user, fsdp_ctl *ctl, fsdp_error *err)
{
    job *j = user;
    state s;
    build(&s, fsdp_ctl_size(ctl), j->dim, fsdp_ctl_rank(ctl), true);
    fsdp_status st = j->into_run ? fsdp_run_save(s.sd, ctl, j->path, 7, &j->save, err)
                                 : fsdp_sd_save(s.sd, ctl, j->path, &j->save, err);
    drop(&s);
    return st;
}

static fsdp_status load_rank(void *user, fsdp_ctl *ctl, fsdp_error *err)
{
    job *j = user;
    state s;
    build(&s, fsdp_ctl_size(ctl), j->dim, fsdp_ctl_rank(ctl), false);
    fsdp_status st = fsdp_sd_load(s.sd, ctl, j->path, &j->load, err);
    for (size_t i = 0; st == FSDP_OK && i < fsdp_sd_count(s.sd); i++) {
        const fsdp_entry *entry = fsdp_sd_at(s.sd, i);
        if (entry->kind == FSDP_ENTRY_TENSOR &&
            !visit_elements(entry, fsdp_ctl_rank(ctl), (int64_t)i + 1, false))
            st = fsdp_fail(err, FSDP_ERR_INTERNAL, "'%s' differs", entry->name);
        if (entry->kind == FSDP_ENTRY_VALUE && entry->value.as.i64 != 1200)
            st = fsdp_fail(err, FSDP_ERR_INTERNAL, "value differs");
    }
    drop(&s);
    return st;
}

static char folder[64];

static void make_folder(void)
{
    strcpy(folder, "/tmp/fsdp-test-XXXXXX");
    cr_assert_not_null(mkdtemp(folder));
}

static void remove_folder(void)
{
    cr_assert_eq(fsdp_io_remove_tree(NULL, folder, NULL), FSDP_OK);
}

TestSuite(save_load, .init = make_folder, .fini = remove_folder);

static void round_trip(fsdp_kind kind, bool compress, bool rank0, int saved, int dim, int loaded,
                       int to_dim, fsdp_check_mode check)
{
    char path[128];
    fsdp_error err = {0};
    snprintf(path, sizeof path, "%s/%d%d%d-%d.%d-%d.%d-%d", folder, kind, compress, rank0, saved,
             dim, loaded, to_dim, check);
    job j = {.path = path, .dim = dim};
    j.save.kind = kind;
    j.save.compress = compress;
    j.save.rank0_writes = rank0;
    cr_assert_eq(fsdp_ctl_run_threads(saved, save_rank, &j, &err), FSDP_OK, "save %s: %s", path,
                 err.text);
    j.dim = to_dim;
    j.load.check = check;
    cr_assert_eq(fsdp_ctl_run_threads(loaded, load_rank, &j, &err), FSDP_OK, "load %s: %s", path,
                 err.text);
    fsdp_verify_summary summary;
    fsdp_verify_opts deep = {.level = FSDP_VERIFY_DEEP};
    cr_assert_eq(fsdp_checkpoint_verify(path, &deep, &summary, &err), FSDP_OK, "verify %s: %s",
                 path, err.text);
}

Test(save_load, every_kind_comes_back_on_other_world_sizes_and_dims)
{
    for (int kind = FSDP_SHARDED; kind <= FSDP_LOCAL; kind++)
        for (int compress = 0; compress < 2; compress++) {
            /* each kind and each world is tested with both modes, but not each pair */
            fsdp_check_mode check = (fsdp_check_mode)((kind + compress) % 2);
            round_trip((fsdp_kind)kind, compress, false, 4, 0, 3, 1, check);
            round_trip((fsdp_kind)kind, compress, false, 1, 0, 5, 0, (fsdp_check_mode)!check);
            round_trip((fsdp_kind)kind, compress, false, 3, 1, 1, 0, check);
        }
    round_trip(FSDP_FULL, false, true, 4, 1, 2, 0, FSDP_CHECK_BLOCKS);
}

Test(save_load, conversion_keeps_every_bit)
{
    char path[128], to[128];
    fsdp_error err = {0};
    snprintf(path, sizeof path, "%s/from", folder);
    job j = {.path = path};
    cr_assert_eq(fsdp_ctl_run_threads(4, save_rank, &j, &err), FSDP_OK, "%s", err.text);
    test_sampler sampler = {.every = test_sample_at_most(3)};
    for (int kind = FSDP_SHARDED; kind <= FSDP_LOCAL; kind++)
        for (int compress = 0; compress < 2; compress++)
            for (int dim = 0; dim < 2; dim++) {
                if (!test_sampler_takes(&sampler))
                    continue;
                snprintf(to, sizeof to, "%s/to-%d-%d-%d", folder, kind, compress, dim);
                fsdp_convert_opts opts = {.kind = (fsdp_kind)kind,
                                          .world = kind == FSDP_FULL ? 0 : 3,
                                          .compress = compress,
                                          .shard_dim = dim,
                                          .memory = 1 << 20};
                cr_assert_eq(fsdp_checkpoint_convert(path, to, &opts, &err), FSDP_OK, "%s: %s", to,
                             err.text);
                job back = {.path = to};
                cr_assert_eq(fsdp_ctl_run_threads(2, load_rank, &back, &err), FSDP_OK, "%s: %s", to,
                             err.text);
            }
}

/* --- the full state on rank 0 ------------------------------------------------------------------------ */

static fsdp_status gather_rank(void *user, fsdp_ctl *ctl, fsdp_error *err)
{
    job *j = user;
    state s;
    fsdp_sd *full = NULL;
    build(&s, fsdp_ctl_size(ctl), j->dim, fsdp_ctl_rank(ctl), true);
    fsdp_status st = fsdp_sd_gather_full(s.sd, ctl, &full, err);
    if (st == FSDP_OK && (full != NULL) != (fsdp_ctl_rank(ctl) == 0))
        st = fsdp_fail(err, FSDP_ERR_INTERNAL, "the full state is on the wrong rank");
    for (size_t i = 0; st == FSDP_OK && full && i < fsdp_sd_count(full); i++) {
        const fsdp_entry *entry = fsdp_sd_at(full, i);
        if (entry->kind == FSDP_ENTRY_TENSOR && !visit_elements(entry, 0, (int64_t)i + 1, false))
            st = fsdp_fail(err, FSDP_ERR_INTERNAL, "'%s' differs", entry->name);
    }
    fsdp_sd_free(full);
    drop(&s);
    return st;
}

Test(save_load, live_shards_are_gathered_whole_on_rank_0)
{
    fsdp_error err = {0};
    for (int world = 1; world <= 5; world += 2)
        for (int dim = 0; dim < 2; dim++) {
            job j = {.dim = dim};
            cr_assert_eq(fsdp_ctl_run_threads(world, gather_rank, &j, &err), FSDP_OK, "%s",
                         err.text);
        }
}

static fsdp_status count_slab(void *user, const fsdp_entry *entry, int64_t first, int64_t count,
                              const void *data, fsdp_error *err)
{
    int64_t *elements = user;
    int64_t value;
    if (count > 0 && entry->name[0] == 'l') {
        memcpy(&value, data, sizeof value);
        if (value != 7000000 + first)
            return fsdp_fail(err, FSDP_ERR_INTERNAL, "slab at %lld differs", (long long)first);
    }
    *elements += count;
    return FSDP_OK;
}

Test(save_load, the_full_state_of_a_checkpoint_is_one_call)
{
    char path[128];
    fsdp_error err = {0};
    snprintf(path, sizeof path, "%s/c", folder);
    job j = {.path = path, .dim = 1};
    cr_assert_eq(fsdp_ctl_run_threads(3, save_rank, &j, &err), FSDP_OK, "%s", err.text);
    fsdp_sd *full = NULL;
    cr_assert_eq(fsdp_load_full(path, NULL, &full, &err), FSDP_OK, "%s", err.text);
    for (size_t i = 0; i < 7; i++)
        cr_assert(visit_elements(fsdp_sd_at(full, i), 0, (int64_t)i + 1, false));
    fsdp_sd_free(full);
    fsdp_load_opts some = {.include = "^(large|step|tied)$", .memory = 100000};
    int64_t elements = 0;
    cr_assert_eq(fsdp_stream_full(path, &some, count_slab, &elements, &err), FSDP_OK, "%s",
                 err.text);
    cr_assert_eq(elements, 40 * 50 * 400 + 64 * 48);
}

static void count_notice(void *user, const char *text)
{
    int *counts = user;
    counts[0] += strncmp(text, "missing: 'not.there.", 20) == 0;
    counts[1] += strncmp(text, "unexpected: '", 13) == 0;
}

enum { NAMES = 200 };

static fsdp_sd *many_names(fsdp_error *err)
{
    fsdp_sd *sd = NULL;
    fsdp_value none = {0};
    fsdp_status st = fsdp_sd_create(&sd, err);
    for (int i = 0; i < NAMES && st == FSDP_OK; i++) {
        char name[40];
        int size = snprintf(name, sizeof name, "not.there.%d", i);
        st = fsdp_sd_add_value(sd, name, (size_t)size, &none, err);
    }
    if (st == FSDP_OK)
        return sd;
    fsdp_sd_free(sd);
    return NULL;
}

static fsdp_status load_names(void *user, fsdp_ctl *ctl, fsdp_error *err)
{
    const char *path = user;
    fsdp_load_report report;
    fsdp_error found = {0};
    int counts[2] = {0};
    fsdp_sd *sd = many_names(err);
    if (!sd)
        return err->status;
    fsdp_load_opts opts = {.report = &report, .watch = {.context = counts, .notice = count_notice}};
    fsdp_status st = fsdp_sd_load(sd, ctl, path, &opts, &found);
    bool told = strstr(found.text, "200 missing: 'not.there.0'") && strstr(found.text, " more") &&
                strstr(found.text, "9 unexpected: 'even'") && strstr(found.text, "report");
    bool first = fsdp_ctl_rank(ctl) == 0;
    bool listed = report.missing_count == NAMES && report.unexpected_count == 9 &&
                  strcmp(report.missing[NAMES - 1], "not.there.199") == 0 &&
                  counts[0] == (first ? NAMES : 0) && counts[1] == (first ? 9 : 0);
    fsdp_load_report_release(&report);
    fsdp_sd_free(sd);
    return st == FSDP_ERR_USAGE && told && listed
               ? FSDP_OK
               : fsdp_fail(err, FSDP_ERR_INTERNAL, "%d missing, %d unexpected; %s", counts[0],
                           counts[1], found.text);
}

Test(save_load, names_that_an_error_has_no_room_for_are_in_the_report_and_noticed)
{
    char path[128];
    fsdp_error err = {0};
    snprintf(path, sizeof path, "%s/c", folder);
    job j = {.path = path};
    cr_assert_eq(fsdp_ctl_run_threads(2, save_rank, &j, &err), FSDP_OK, "%s", err.text);
    cr_assert_eq(fsdp_ctl_run_threads(2, load_names, path, &err), FSDP_OK, "%s", err.text);
}

static void ignore_notice(void *user, const char *text)
{
    (void)user, (void)text;
}

/* All stored names are unexpected for a state dict with two hundred other names. */
Test(save_load, an_error_points_at_more_names_only_where_they_were_given)
{
    static const char *const ends[] = {
        "; a report or a notice function gets each name", "; each name is in the load's report",
        "; each name was a notice", "; each name is in the load's report and was a notice"};
    char path[128];
    fsdp_error err = {0};
    fsdp_ctl *self = NULL;
    snprintf(path, sizeof path, "%s/c", folder);
    job j = {.path = path};
    cr_assert_eq(fsdp_ctl_run_threads(1, save_rank, &j, &err), FSDP_OK, "%s", err.text);
    cr_assert_eq(fsdp_ctl_self(&self, &err), FSDP_OK);
    fsdp_sd *sd = many_names(&err);
    cr_assert_not_null(sd, "%s", err.text);
    for (int given = 0; given < 4; given++) {
        fsdp_load_report report;
        fsdp_load_opts opts = {.report = given & 1 ? &report : NULL,
                               .watch.notice = given & 2 ? ignore_notice : NULL};
        cr_assert_eq(fsdp_sd_load(sd, self, path, &opts, &err), FSDP_ERR_USAGE);
        cr_assert_str_eq(strrchr(err.text, ';'), ends[given]);
        if (opts.report)
            fsdp_load_report_release(&report);
    }
    fsdp_sd_free(sd);
    fsdp_ctl_free(self);
}

Test(save_load, strict_names_every_missing_and_unexpected_name)
{
    char path[128];
    fsdp_error err = {0};
    snprintf(path, sizeof path, "%s/c", folder);
    job j = {.path = path};
    cr_assert_eq(fsdp_ctl_run_threads(2, save_rank, &j, &err), FSDP_OK, "%s", err.text);
    fsdp_ctl *self = NULL;
    fsdp_sd *sd = NULL;
    fsdp_load_report report;
    cr_assert_eq(fsdp_ctl_self(&self, &err), FSDP_OK);
    cr_assert_eq(fsdp_sd_create(&sd, &err), FSDP_OK);
    fsdp_value none = {0};
    cr_assert_eq(fsdp_sd_add_value(sd, FSDP_NAME("step"), &none, &err), FSDP_OK);
    cr_assert_eq(fsdp_sd_add_value(sd, FSDP_NAME("nowhere"), &none, &err), FSDP_OK);
    fsdp_load_opts opts = {.report = &report};
    cr_assert_eq(fsdp_sd_load(sd, self, path, &opts, &err), FSDP_ERR_USAGE);
    cr_assert_not_null(strstr(err.text, "1 missing: 'nowhere'"), "%s", err.text);
    cr_assert_not_null(strstr(err.text, "8 unexpected: 'even', 'odd'"), "%s", err.text);
    cr_assert_eq(report.missing_count, 1);
    cr_assert_eq(report.unexpected_count, 8);
    fsdp_load_report_release(&report);
    opts.include = "^(step|nowhere)$"; /* a missing name alone */
    cr_assert_eq(fsdp_sd_load(sd, self, path, &opts, &err), FSDP_ERR_USAGE);
    cr_assert_not_null(strstr(err.text, "1 missing: 'nowhere'"), "%s", err.text);
    fsdp_load_report_release(&report);
    opts.include = NULL;
    opts.partial = true;
    cr_assert_eq(fsdp_sd_load(sd, self, path, &opts, &err), FSDP_OK, "%s", err.text);
    cr_assert_eq(fsdp_sd_at(sd, 0)->value.as.i64, 1200);
    fsdp_load_report_release(&report);
    fsdp_sd_free(sd);
    fsdp_ctl_free(self);
}

static fsdp_status load_empty(const char *path, const fsdp_load_opts *opts, fsdp_error *err)
{
    fsdp_ctl *self = NULL;
    fsdp_sd *none = NULL;
    cr_assert_eq(fsdp_ctl_self(&self, NULL), FSDP_OK);
    cr_assert_eq(fsdp_sd_create(&none, NULL), FSDP_OK);
    fsdp_status st = fsdp_sd_load(none, self, path, opts, err);
    fsdp_sd_free(none);
    fsdp_ctl_free(self);
    return st;
}

Test(save_load, patterns_that_select_nothing_are_told)
{
    char path[128];
    fsdp_error err = {0};
    snprintf(path, sizeof path, "%s/c", folder);
    job j = {.path = path};
    cr_assert_eq(fsdp_ctl_run_threads(2, save_rank, &j, &err), FSDP_OK, "%s", err.text);
    fsdp_load_opts wrong[] = {{.include = "^laregr$", .partial = true}, {.exclude = ""}};
    for (int i = 0; i < 2; i++) {
        fsdp_sd *full = NULL;
        j.load = wrong[i];
        cr_assert_eq(fsdp_ctl_run_threads(2, load_rank, &j, &err), FSDP_ERR_USAGE);
        cr_assert_not_null(strstr(err.text, "no name of the state dict matches"), "%s", err.text);
        cr_assert_eq(fsdp_load_full(path, &wrong[i], &full, &err), FSDP_ERR_USAGE);
        cr_assert_null(full);
        cr_assert_not_null(strstr(err.text, "none of 9 names is selected"), "%s", err.text);
        cr_assert_eq(fsdp_stream_full(path, &wrong[i], count_slab, &(int64_t){0}, &err),
                     FSDP_ERR_USAGE);
        /* an empty state dict is not an error */
        wrong[i].partial = true;
        cr_assert_eq(load_empty(path, &wrong[i], &err), FSDP_OK, "%s", err.text);
    }
}

/* --- casts ------------------------------------------------------------------------------------------- */

/* One tensor of two elements, whose bytes are at data. */
static fsdp_sd *pair_of(fsdp_dtype dtype, void *data)
{
    fsdp_error err = {0};
    fsdp_sd *sd = NULL;
    fsdp_mesh *mesh = NULL;
    fsdp_placement whole = {FSDP_REPLICATE, 0, 0};
    cr_assert_eq(fsdp_mesh_create(1, (int64_t[]){1}, (const char *[]){"dp"}, NULL, &mesh, &err),
                 FSDP_OK);
    cr_assert_eq(fsdp_sd_create(&sd, &err), FSDP_OK);
    const fsdp_tensor tensor = {
        dtype, 1, (int64_t[]){2}, {.mesh = mesh, .placement = {whole}}, data};
    cr_assert_eq(fsdp_sd_add_tensor(sd, FSDP_NAME("pair"), &tensor, &err), FSDP_OK, "%s", err.text);
    fsdp_mesh_free(mesh);
    return sd;
}

/* Saves the pair at data and loads it into one of another dtype. */
static fsdp_status load_cast(fsdp_dtype from, void *data, fsdp_dtype to, bool cast, double found[2],
                             fsdp_error *err)
{
    char path[128];
    fsdp_ctl *self = NULL;
    snprintf(path, sizeof path, "%s/cast", folder);
    fsdp_sd *saved = pair_of(from, data), *loaded = pair_of(to, found);
    cr_assert_eq(fsdp_ctl_self(&self, err), FSDP_OK);
    cr_assert_eq(fsdp_sd_save(saved, self, path, &(fsdp_save_opts){.overwrite = true}, err),
                 FSDP_OK, "%s", err->text);
    fsdp_status st = fsdp_sd_load(loaded, self, path, &(fsdp_load_opts){.cast = cast}, err);
    fsdp_sd_free(saved);
    fsdp_sd_free(loaded);
    fsdp_ctl_free(self);
    return st;
}

Test(save_load, floats_are_cast_on_request)
{
    float narrow[] = {1.5f, -2};
    double wide[] = {1e300, 2}, found[2];
    int64_t numbers[] = {1, 2};
    fsdp_error err = {0};
    cr_expect_eq(load_cast(FSDP_F32, narrow, FSDP_F64, false, found, &err), FSDP_ERR_USAGE);
    cr_expect(strstr(err.text, "enable casting"), "%s", err.text);
    cr_expect_eq(load_cast(FSDP_F32, narrow, FSDP_F64, true, found, &err), FSDP_OK, "%s", err.text);
    cr_expect(found[0] == 1.5 && found[1] == -2);
    cr_expect_eq(load_cast(FSDP_F64, wide, FSDP_F32, true, found, &err), FSDP_ERR_USAGE);
    cr_expect(strstr(err.text, "1 values do not fit in f32"), "%s", err.text);
    cr_expect_eq(load_cast(FSDP_I64, numbers, FSDP_F64, true, found, &err), FSDP_ERR_USAGE);
    cr_expect_eq(load_cast(FSDP_F64, wide, FSDP_I64, true, found, &err), FSDP_ERR_USAGE);
    cr_expect(strstr(err.text, "'pair' is i64 here and f64 in"), "%s", err.text);
}

/* --- values ------------------------------------------------------------------------------------------ */

static fsdp_sd *state_with_values(size_t size, bool filled)
{
    fsdp_error err = {0};
    fsdp_sd *sd = NULL;
    fsdp_value bytes = {0}, list = {0};
    char *data = malloc(size);
    for (size_t i = 0; i < size; i++)
        data[i] = (char)(i * 7);
    cr_assert_eq(fsdp_sd_create(&sd, &err), FSDP_OK);
    if (filled) {
        cr_assert_eq(fsdp_value_set_bytes(&bytes, FSDP_VALUE_BYTES, data, size, &err), FSDP_OK);
        cr_assert_eq(fsdp_value_set_items(&list, FSDP_VALUE_LIST, size / 16, &err), FSDP_OK);
        for (size_t i = 0; i < size / 16; i++)
            list.as.list.items[i] = fsdp_value_f64((double)i / 3);
    }
    fsdp_mesh *mesh = NULL;
    fsdp_placement whole = {FSDP_REPLICATE, 0, 0};
    cr_assert_eq(fsdp_mesh_create(1, (int64_t[]){1}, (const char *[]){"dp"}, NULL, &mesh, &err),
                 FSDP_OK);
    cr_assert_eq(fsdp_sd_add_value(sd, FSDP_NAME("bytes"), &bytes, &err), FSDP_OK);
    cr_assert_eq(
        fsdp_sd_add_tensor(
            sd, FSDP_NAME("tensor"),
            &(fsdp_tensor){
                FSDP_F32, 1, (int64_t[]){5000}, {.mesh = mesh, .placement = {whole}}, NULL},
            &err),
        FSDP_OK);
    cr_assert_eq(fsdp_sd_add_value(sd, FSDP_NAME("list"), &list, &err), FSDP_OK);
    cr_assert_eq(fsdp_sd_allocate(sd, 0, &err), FSDP_OK);
    fsdp_mesh_free(mesh);
    fsdp_value_release(&bytes);
    fsdp_value_release(&list);
    free(data);
    return sd;
}

Test(save_load, values_of_every_size_come_back_from_every_kind)
{
    fsdp_error err = {0};
    fsdp_ctl *self = NULL;
    cr_assert_eq(fsdp_ctl_self(&self, &err), FSDP_OK);
    test_sampler sampler = {.every = test_sample_at_most(3)};
    for (int kind = 0; kind < 3; kind++)
        for (int compress = 0; compress < 2; compress++)
            for (size_t size = 16; size < 10000000; size *= 300) {
                if (!test_sampler_takes(&sampler))
                    continue;
                char path[128], to[160];
                snprintf(path, sizeof path, "%s/v%d%d%zu", folder, kind, compress, size);
                snprintf(to, sizeof to, "%s-to", path);
                fsdp_sd *sd = state_with_values(size, true), *back = state_with_values(size, false);
                fsdp_save_opts opts = {0};
                opts.kind = (fsdp_kind)kind;
                opts.compress = compress;
                cr_assert_eq(fsdp_sd_save(sd, self, path, &opts, &err), FSDP_OK, "%s", err.text);
                fsdp_convert_opts convert = {.kind = (fsdp_kind)((kind + 1) % 3),
                                             .compress = compress};
                cr_assert_eq(fsdp_checkpoint_convert(path, to, &convert, &err), FSDP_OK, "%s",
                             err.text);
                for (int k = 0; k < 2; k++) {
                    cr_assert_eq(fsdp_sd_load(back, self, k ? to : path, NULL, &err), FSDP_OK, "%s",
                                 err.text);
                    cr_assert(fsdp_value_equal(
                        &fsdp_sd_at(sd, 0)->value,
                        &fsdp_sd_at(back, (size_t)fsdp_sd_find(back, "bytes", 5))->value));
                    cr_assert(fsdp_value_equal(
                        &fsdp_sd_at(sd, 2)->value,
                        &fsdp_sd_at(back, (size_t)fsdp_sd_find(back, "list", 4))->value));
                    fsdp_verify_opts deep = {.level = FSDP_VERIFY_DEEP};
                    cr_assert_eq(fsdp_checkpoint_verify(k ? to : path, &deep, NULL, &err), FSDP_OK,
                                 "%s", err.text);
                }
                fsdp_sd_free(sd);
                fsdp_sd_free(back);
            }
    fsdp_ctl_free(self);
}

/* --- errors ----------------------------------------------------------------------------------- */

static fsdp_status save_differently(void *user, fsdp_ctl *ctl, fsdp_error *err)
{
    job own = *(job *)user;
    bool odd = fsdp_ctl_rank(ctl) == 2;
    const int64_t step = odd && own.dim == 0 ? 8 : 7;
    own.save.step = &step;
    own.save.owners = odd && own.dim == 1 ? FSDP_OWNERS_LOWEST : FSDP_OWNERS_BALANCED;
    own.save.run[3] = odd && own.dim == 2 ? 1 : 2;
    own.dim = 0;
    return save_rank(&own, ctl, err);
}

Test(save_load, ranks_that_save_with_different_options_are_told)
{
    static const char *const names[] = {"step is 8 on rank 2 and 7 on rank 0",
                                        "owners is 1 on rank 2", "another run uuid"};
    char path[128];
    fsdp_error err = {0};
    snprintf(path, sizeof path, "%s/c", folder);
    for (int which = 0; which < 3; which++) {
        job j = {.path = path, .dim = which};
        cr_assert_eq(fsdp_ctl_run_threads(3, save_differently, &j, &err), FSDP_ERR_USAGE);
        cr_assert_not_null(strstr(err.text, names[which]), "%s", err.text);
        cr_assert_neq(access(path, F_OK), 0, "something was saved");
    }
}

Test(save_load, a_directory_that_only_looks_like_a_checkpoint_is_not_overwritten)
{
    char path[128], file[400];
    fsdp_error err = {0};
    snprintf(path, sizeof path, "%s/web", folder);
    snprintf(file, sizeof file, "mkdir %s && echo '{\"name\": \"app\"}' >%s/manifest.json", path,
             path);
    cr_assert_eq(system(file), 0);
    job j = {.path = path};
    j.save.overwrite = true;
    cr_assert_eq(fsdp_ctl_run_threads(2, save_rank, &j, &err), FSDP_ERR_EXISTS, "%s", err.text);
    snprintf(file, sizeof file, "%s/manifest.json", path);
    cr_assert_eq(access(file, F_OK), 0, "the foreign file is gone");
}

static fsdp_status load_slowly(void *user, fsdp_ctl *ctl, fsdp_error *err)
{
    fsdp_ctl_set_deadline(ctl, 300);
    return load_rank(user, ctl, err);
}

static int stall(void *user, int64_t done, int64_t total, const char *what)
{
    (void)user;
    (void)done;
    (void)total;
    (void)what;
    usleep(700000);
    return 0;
}

Test(save_load, a_thread_rank_that_is_late_never_finds_memory_gone)
{
    char path[128];
    fsdp_error err = {0};
    snprintf(path, sizeof path, "%s/c", folder);
    job j = {.path = path};
    cr_assert_eq(fsdp_ctl_run_threads(2, save_rank, &j, &err), FSDP_OK, "%s", err.text);
    j.load.watch.progress = stall;
    fsdp_status st = fsdp_ctl_run_threads(4, load_slowly, &j, &err);
    cr_assert(st == FSDP_OK || st == FSDP_ERR_PEER, "%s", err.text);
}

/* Rank 0 stops the load while rank 1 still reads, until longer than rank 0 waits for an answer. */
typedef struct stopped_load {
    job j;
    atomic_bool is_reading, has_left;
    atomic_int late_reads;
} stopped_load;

static int stop_once_the_other_reads(void *user, int64_t done, int64_t total, const char *what)
{
    stopped_load *stopped = user;
    (void)done;
    (void)total;
    (void)what;
    for (int i = 0; i < 500 && !atomic_load(&stopped->is_reading); i++)
        usleep(10000);
    return 1;
}

static int read_for_long(void *user, int64_t done, int64_t total, const char *what)
{
    stopped_load *stopped = user;
    (void)done;
    (void)total;
    (void)what;
    if (!atomic_exchange(&stopped->is_reading, true))
        usleep(700000);
    atomic_fetch_add(&stopped->late_reads, atomic_load(&stopped->has_left));
    return 0;
}

static fsdp_status load_or_stop(void *user, fsdp_ctl *ctl, fsdp_error *err)
{
    stopped_load *stopped = user;
    job mine = stopped->j;
    bool stops = fsdp_ctl_rank(ctl) == 0;
    mine.load.watch.context = stopped;
    mine.load.watch.progress = stops ? stop_once_the_other_reads : read_for_long;
    fsdp_ctl_set_deadline(ctl, 300);
    fsdp_status st = load_rank(&mine, ctl, err);
    if (stops)
        atomic_store(&stopped->has_left, true);
    return st;
}

Test(save_load, a_rank_that_fails_on_its_own_leaves_after_the_readers_of_its_memory)
{
    char path[128];
    fsdp_error err = {0};
    stopped_load stopped = {.j = {.path = path}};
    snprintf(path, sizeof path, "%s/c", folder);
    cr_assert_eq(fsdp_ctl_run_threads(2, save_rank, &stopped.j, &err), FSDP_OK, "%s", err.text);
    stopped.j.load.threads = 1;
    cr_assert_eq(fsdp_ctl_run_threads(2, load_or_stop, &stopped, &err), FSDP_ERR_CANCELLED, "%s",
                 err.text);
    cr_assert(stopped.is_reading && stopped.has_left);
    cr_assert_eq(stopped.late_reads, 0, "rank 1 read after rank 0 had left");
}

/* Rank 1 pauses before it uses the memory of rank 0, until rank 0 has given up and left. */
typedef struct late_load {
    job j;
    atomic_bool has_left;
    fsdp_error late;
} late_load;

static _Thread_local int this_rank;

static void pause_before_access(void *user, const char *step, const char *text)
{
    late_load *load = user;
    (void)step;
    if (this_rank == 1 && strcmp(text, "match names and find files") == 0)
        for (int i = 0; i < 1000 && !atomic_load(&load->has_left); i++)
            usleep(10000);
}

static fsdp_status load_or_leave(void *user, fsdp_ctl *ctl, fsdp_error *err)
{
    late_load *load = user;
    this_rank = fsdp_ctl_rank(ctl);
    fsdp_ctl_set_deadline(ctl, 300);
    fsdp_status st = load_rank(&load->j, ctl, err);
    if (this_rank == 0)
        atomic_store(&load->has_left, true);
    else
        load->late = *err;
    return st;
}

Test(save_load, a_late_rank_does_not_begin_to_use_memory_of_a_rank_that_left)
{
    char path[128];
    fsdp_error err = {0};
    late_load load = {.j = {.path = path}};
    fsdp_flow_watcher watcher = {pause_before_access, &load};
    snprintf(path, sizeof path, "%s/c", folder);
    cr_assert_eq(fsdp_ctl_run_threads(2, save_rank, &load.j, &err), FSDP_OK, "%s", err.text);
    fsdp_flow_watch(&watcher);
    cr_assert_eq(fsdp_ctl_run_threads(2, load_or_leave, &load, &err), FSDP_ERR_PEER, "%s",
                 err.text);
    fsdp_flow_watch(NULL);
    cr_assert(strstr(load.late.text, "another rank has left"), "%s", load.late.text);
}

/* --- rounds of the control plane --- */

static void count_round(void *user, const char *step, const char *text)
{
    (void)text;
    if (strcmp(step, "statedict/ctl/ctl.c") == 0)
        ++*(atomic_int *)user;
}

static int rounds_of_save(const char *name, const fsdp_save_opts *opts, bool into_run)
{
    enum { RANKS = 3 };
    char path[128];
    fsdp_error err = {0};
    atomic_int rounds = 0;
    fsdp_flow_watcher watcher = {count_round, &rounds};
    snprintf(path, sizeof path, "%s/%s", folder, name);
    job j = {.path = path, .save = *opts, .into_run = into_run};
    fsdp_flow_watch(&watcher);
    fsdp_status st = fsdp_ctl_run_threads(RANKS, save_rank, &j, &err);
    fsdp_flow_watch(NULL);
    cr_assert_eq(st, FSDP_OK, "%s", err.text);
    return rounds / RANKS;
}

Test(save_load, a_save_of_any_kind_takes_at_most_six_rounds)
{
    for (int into_run = 0; into_run <= 1; into_run++) {
        fsdp_save_opts opts = {0};
        cr_assert_leq(rounds_of_save(into_run ? "run1" : "sharded", &opts, into_run), 5);
        opts.kind = FSDP_LOCAL;
        cr_assert_leq(rounds_of_save(into_run ? "run2" : "local", &opts, into_run), 5);
        opts.kind = FSDP_FULL;
        cr_assert_leq(rounds_of_save(into_run ? "run3" : "full", &opts, into_run), 6);
        opts.rank0_writes = true;
        cr_assert_leq(rounds_of_save(into_run ? "run4" : "rank0", &opts, into_run), 6);
    }
}
