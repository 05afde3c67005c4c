/* Saves of state dicts whose tensors share memory in turns (statedict/sd/waves.h). */
#include "base/io/io.h"
#include "statedict/save/save_call.h"

#include <criterion/criterion.h>
#include <fsdp/fsdp.h>

#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum { RANKS = 2, WAVES = 4, PER_WAVE = 3, TENSORS = WAVES * PER_WAVE, COUNT = 33 };

/* A rank's dict: each wave has the memory of the wave before. */
typedef struct waved {
    fsdp_sd *sd;
    fsdp_mesh *mesh;
    int64_t memory[PER_WAVE][COUNT];
    size_t first[WAVES];
    size_t fails_at; /* a wave; WAVES: none */
    fsdp_waves waves;
} waved;

/* Element i of a rank's part of a tensor has this value. */
static int64_t value_of(size_t tensor, int64_t i)
{
    return (int64_t)(tensor + 1) * 1000 + i;
}

static fsdp_status enter(void *context, size_t number, fsdp_error *err)
{
    waved *self = context;
    if (number != self->waves.entered)
        return fsdp_fail(err, FSDP_ERR_INTERNAL, "wave %zu is entered out of turn", number);
    if (number == self->fails_at)
        return fsdp_fail(err, FSDP_ERR_IO, "wave %zu does not come", number);
    for (size_t t = 0; t < PER_WAVE; t++)
        for (int64_t i = 0; i < COUNT; i++)
            self->memory[t][i] = value_of(number * PER_WAVE + t, i);
    return FSDP_OK;
}

static void build(waved *self, size_t fails_at)
{
    fsdp_error err = {0};
    memset(self, 0, sizeof *self);
    memset(self->memory, 0x55, sizeof self->memory);
    const int64_t shape[] = {RANKS * COUNT};
    cr_assert_eq(
        fsdp_mesh_create(1, (int64_t[]){RANKS}, (const char *[]){"dp"}, NULL, &self->mesh, &err),
        FSDP_OK);
    cr_assert_eq(fsdp_sd_create(&self->sd, &err), FSDP_OK);
    for (int t = 0; t < TENSORS; t++) {
        char name[16];
        int size = snprintf(name, sizeof name, "t%02d", t);
        /* every other one is stored by one rank alone */
        fsdp_layout layout = {.kind = FSDP_LAYOUT_MESH,
                              .mesh = self->mesh,
                              .placement = {{t % 2 ? FSDP_REPLICATE : FSDP_SHARD, 0, 0}}};
        const int64_t part[] = {COUNT};
        cr_assert_eq(fsdp_sd_add_tensor(self->sd, name, (size_t)size,
                                        &(fsdp_tensor){FSDP_I64, 1, t % 2 ? part : shape, layout,
                                                       self->memory[t % PER_WAVE]},
                                        &err),
                     FSDP_OK, "%s", err.text);
    }
    for (size_t w = 0; w < WAVES; w++)
        self->first[w] = w * PER_WAVE;
    self->fails_at = fails_at;
    self->waves =
        (fsdp_waves){.context = self, .enter = enter, .first = self->first, .count = WAVES};
}

static void drop(waved *self)
{
    fsdp_sd_free(self->sd);
    fsdp_mesh_free(self->mesh);
}

typedef struct job {
    char path[80];
    fsdp_save_opts save;
    size_t fails_at;
    int fails_on; /* a rank */
} job;

static fsdp_status save_rank(void *user, fsdp_ctl *ctl, fsdp_error *err)
{
    job *what = user;
    waved self;
    build(&self, fsdp_ctl_rank(ctl) == what->fails_on ? what->fails_at : WAVES);
    const fsdp_save_call call = {self.sd, ctl, what->path, &what->save, FSDP_OK, &self.waves};
    fsdp_status status = fsdp_save_begun(&call, err);
    if (status == FSDP_OK && self.waves.entered != WAVES)
        status = fsdp_fail(err, FSDP_ERR_INTERNAL, "%zu waves were entered", self.waves.entered);
    drop(&self);
    return status;
}

/* One rank reads all: each part has the values of its wave. */
static void expect_values(const char *path)
{
    fsdp_error err = {0};
    fsdp_sd *full = NULL;
    cr_assert_eq(fsdp_load_full(path, NULL, &full, &err), FSDP_OK, "%s", err.text);
    cr_assert_eq(fsdp_sd_count(full), TENSORS);
    for (size_t t = 0; t < TENSORS; t++) {
        const int64_t *data = fsdp_sd_at(full, t)->data;
        for (int64_t i = 0; i < (t % 2 ? COUNT : RANKS * COUNT); i++)
            cr_assert_eq(data[i], value_of(t, i % COUNT), "tensor %zu, element %d", t, (int)i);
    }
    fsdp_sd_free(full);
}

static char folder[] = "/tmp/fsdp-waves-XXXXXX";

static void make_folder(void)
{
    cr_assert(mkdtemp(folder));
}

static void remove_folder(void)
{
    cr_assert_eq(fsdp_io_remove_tree(NULL, folder, NULL), FSDP_OK);
}

TestSuite(waves, .init = make_folder, .fini = remove_folder);

static fsdp_status save(job *what, const char *name, fsdp_error *err)
{
    snprintf(what->path, sizeof what->path, "%s/%s", folder, name);
    return fsdp_ctl_run_threads(RANKS, save_rank, what, err);
}

Test(waves, every_kind_of_save_stores_each_tensor_in_its_wave)
{
    const fsdp_save_opts ways[] = {{.kind = FSDP_SHARDED},
                                   {.kind = FSDP_SHARDED, .compress = true},
                                   {.kind = FSDP_LOCAL},
                                   {.kind = FSDP_FULL},
                                   {.kind = FSDP_FULL, .rank0_writes = true},
                                   {.kind = FSDP_FULL, .compress = true}};
    for (size_t i = 0; i < sizeof ways / sizeof *ways; i++) {
        fsdp_error err = {0};
        job what = {.save = ways[i], .fails_at = WAVES};
        char name[16];
        snprintf(name, sizeof name, "way%zu", i);
        cr_assert_eq(save(&what, name, &err), FSDP_OK, "way %zu: %s", i, err.text);
        expect_values(what.path);
    }
}

Test(waves, a_wave_that_does_not_come_on_one_rank_fails_the_save_and_leaves_nothing)
{
    const fsdp_save_opts ways[] = {{.kind = FSDP_SHARDED},
                                   {.kind = FSDP_FULL},
                                   {.kind = FSDP_FULL, .rank0_writes = true},
                                   {.kind = FSDP_FULL, .compress = true}};
    for (size_t i = 0; i < WAVES * RANKS * sizeof ways / sizeof *ways; i++) {
        fsdp_error err = {0};
        job what = {.save = ways[i / RANKS / WAVES],
                    .fails_at = i / RANKS % WAVES,
                    .fails_on = (int)(i % RANKS)};
        cr_assert_eq(save(&what, "failed", &err), FSDP_ERR_IO, "failure %zu: %s", i, err.text);
        cr_assert(strstr(err.text, "does not come"), "%s", err.text);
        cr_assert_neq(access(what.path, F_OK), 0);
    }
}
