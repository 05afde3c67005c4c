/*
 * Loads into a device's memory, which the host faults on when it touches it: they read while copies are
 * made, in bounded memory, copy nothing to the host, and give the bits of device cpu, however the checkpoint
 * is cut, cast and stored. The weight has at least three blocks on each rank, the last one partial.
 */
#include "base/io/io.h"
#include "tests/cuda/fake_cudart.h"
#include "tests/support/disk/io_fault.h"
#include "tests/unit/runtime/expect_toy.h"
#include <fsdp/convert.h>

#include <malloc.h>
#include <sys/stat.h>
#include <unistd.h>

enum { ROWS = 2500, COLUMNS = 1700, BLOCK = 4 << 20, SLOTS = 2, MOST_RANKS = 4, SEEDS = 2 };
enum { SLACK = 1 << 20 }; /* bytes of buffers and lists */

static char dir[] = "/tmp/fsdp-load-copies-XXXXXX";

static void make_dir(void)
{
    cr_assert(mkdtemp(dir));
    cr_assert_eq(chdir(dir), 0);
}

static void remove_dir(void)
{
    cr_assert_eq(fsdp_io_remove_tree(NULL, dir, NULL), FSDP_OK);
}

TestSuite(load_copies, .init = make_dir, .fini = remove_dir);

/* --- a net ------------------------------------------------------------------------------------- */

/* How the weights are stored and wanted. */
typedef struct load_way {
    int saving, loading; /* ranks */
    fsdp_dtype saved_type, type;
    bool cuts_columns; /* of the loading ranks; the saving ones have rows */
    bool compresses, is_foreign, offloads;
    fsdp_check_mode check;
    fsdp_state_part part;
    fsdp_dtype buffer_type; /* as the loading ranks keep it; NONE: as declared */
} load_way;

typedef struct load_run {
    const load_way *way;
    fsdp_hash hashes[MOST_RANKS];
} load_run;

static void cut_columns(void *user, const fsdp_param *param, fsdp_param_place *place)
{
    (void)user;
    place->dim = fsdp_param_describe(param).ndim > 1 ? 1 : 0;
}

static fsdp_status declare(toy *net, fsdp_dtype type, fsdp_error *err)
{
    const fsdp_param_spec weight = {
        .name = "L0.w", .dtype = type, .ndim = 2, .shape = (int64_t[]){ROWS, COLUMNS}};
    const fsdp_param_spec small = {
        .name = "L1.w", .dtype = type, .ndim = 2, .shape = (int64_t[]){6, 4}};
    const fsdp_param_spec count = {.name = "count", .dtype = FSDP_I64, .is_buffer = true};
    const fsdp_param_spec mean = {
        .name = "mean", .dtype = FSDP_F32, .ndim = 1, .shape = (int64_t[]){5}, .is_buffer = true};
    net->layers = 2;
    FSDP_TRY(fsdp_model_add(net->model, &weight, &net->weight[0], err));
    FSDP_TRY(fsdp_model_add(net->model, &small, &net->weight[1], err));
    FSDP_TRY(fsdp_model_add(net->model, &count, NULL, err));
    return fsdp_model_add(net->model, &mean, NULL, err);
}

static fsdp_status wrap(toy *net, fsdp_dtype buffer_type, fsdp_error *err)
{
    const fsdp_wrap_opts opts = {.mesh = net->mesh,
                                 .policy.kind = FSDP_POLICY_ALWAYS,
                                 .buffer_dtype = buffer_type,
                                 .use_orig_params = true};
    FSDP_TRY(fsdp_wrap_create(net->model, &opts, &net->wrap, err));
    net->root = fsdp_wrap_root(net->wrap);
    for (int i = 0; i < net->layers; i++)
        net->unit[i] = fsdp_wrap_unit(net->wrap, i == 0 ? "L0" : "L1");
    return FSDP_OK;
}

static fsdp_status make(toy *net, fsdp_dtype type, const load_way *way, fsdp_error *err)
{
    FSDP_TRY(declare(net, type, err));
    net->opts.placement = way && way->cuts_columns ? cut_columns : NULL;
    net->opts.offload = way && way->offloads;
    FSDP_TRY(way && way->buffer_type ? wrap(net, way->buffer_type, err) : toy_wrap(net, err));
    return toy_add_adamw(net, &(fsdp_adamw_opts){.lr = 0.1}, err);
}

static fsdp_status fill_gradient(toy *net, int layer, fsdp_error *err)
{
    fsdp_param *param = net->weight[layer];
    void *grad = fsdp_param_grad(param);
    if (!grad)
        return fsdp_param_error(param, err);
    memset(grad, 0x3c,
           (size_t)fsdp_param_count(param) *
               fsdp_dtype_size(fsdp_param_describe(param).grad_dtype));
    return FSDP_OK;
}

/* A state with moments; on device cpu. */
static fsdp_status save(toy *net, uint64_t seed, const char *path, const load_way *way,
                        fsdp_error *err)
{
    const fsdp_root_save_opts opts = {.state.part = way->part,
                                      .save = {.compress = way->compresses, .skip_fsync = true}};
    FSDP_TRY(make(net, way->saved_type, NULL, err));
    FSDP_TRY(fsdp_root_init_uniform(net->root, seed, err));
    FSDP_TRY(toy_forward(net, NULL, err));
    FSDP_TRY(toy_backward(net, fill_gradient, err));
    FSDP_TRY(fsdp_optim_step(net->optim, err));
    for (int i = 0; i < 2; i++) {
        fsdp_param *buffer = fsdp_model_find(net->model, i == 0 ? "count" : "mean");
        memset(fsdp_param_shard(buffer, NULL), 0x41, i == 0 ? 8 : 20);
    }
    return fsdp_root_save(net->root, path, &opts, err);
}

static fsdp_status hash_state(toy *net, fsdp_hash *hash_out, fsdp_error *err)
{
    const fsdp_state_opts full = {.full_state_dict = true};
    fsdp_hasher *hasher = fsdp_hasher_create();
    fsdp_sd *sd = NULL;
    fsdp_status status = hasher ? fsdp_root_get_state(net->root, &full, &sd, err)
                                : fsdp_fail_memory(err, "a hasher");
    for (size_t i = 0; status == FSDP_OK && i < fsdp_sd_count(sd); i++) {
        const fsdp_entry *entry = fsdp_sd_at(sd, i);
        fsdp_hasher_add(hasher, entry->name, entry->name_size);
        if (entry->kind == FSDP_ENTRY_TENSOR)
            fsdp_hasher_add(hasher, entry->data, (size_t)fsdp_entry_bytes(entry));
    }
    if (status == FSDP_OK)
        *hash_out = fsdp_hasher_value(hasher);
    fsdp_hasher_free(hasher);
    fsdp_sd_free(sd);
    return status;
}

static void run(int ranks, const char *device, world_body body, void *user)
{
    fsdp_error err = {0};
    cr_assert_eq(run_worlds(ranks, device, body, user, &err), FSDP_OK, "%d ranks on %s: %s", ranks,
                 device, err.text);
}

static fsdp_status begin(toy *net, world_rank *rank, fsdp_error *err)
{
    const toy_case what = {
        .mesh_ndim = 1, .mesh_shape = {fsdp_world_size(rank->world)}, .mesh_names = {"dp"}};
    return toy_begin(net, rank, &what, err);
}

/* --- every way ---------------------------------------------------------------------------------- */

static fsdp_status save_rank(world_rank *rank, fsdp_error *err)
{
    const load_way *way = ((const load_run *)rank->user)->way;
    toy net = {0};
    fsdp_status status = begin(&net, rank, err);
    if (status == FSDP_OK)
        status = save(&net, 5, "saved", way, err);
    toy_free(&net);
    return status;
}

/* A state of all, and over it what the way loads: the rest keeps its values. */
static fsdp_status load_both(toy *net, const load_way *way, fsdp_error *err)
{
    const fsdp_root_load_opts first = {.load = {.cast = true, .partial = true}};
    const fsdp_root_load_opts second = {
        .state = {.part = way->part, .partial = way->is_foreign},
        .load = {.cast = way->type != way->saved_type, .check = way->check}};
    FSDP_TRY(make(net, way->type, way, err));
    FSDP_TRY(fsdp_root_load(net->root, "first", &first, err));
    return fsdp_root_load(net->root, way->is_foreign ? "foreign" : "saved", &second, err);
}

static fsdp_status load_rank(world_rank *rank, fsdp_error *err)
{
    load_run *job = rank->user;
    toy net = {0};
    fsdp_status status = begin(&net, rank, err);
    if (status == FSDP_OK)
        status = load_both(&net, job->way, err);
    if (status == FSDP_OK)
        status = hash_state(&net, &job->hashes[fsdp_world_rank(rank->world)], err);
    toy_free(&net);
    return status;
}

static fsdp_status save_first(world_rank *rank, fsdp_error *err)
{
    toy net = {0};
    fsdp_status status = begin(&net, rank, err);
    if (status == FSDP_OK)
        status = save(&net, 77, "first", &(load_way){.saved_type = FSDP_F32}, err);
    toy_free(&net);
    return status;
}

static void expect_equal(const load_way *way)
{
    load_run usual = {.way = way};
    const fsdp_convert_opts foreign = {.format = "safetensors", .skip_fsync = true};
    fsdp_error err = {0};
    run(1, "cpu", save_first, NULL);
    run(way->saving, "cpu", save_rank, &usual);
    if (way->is_foreign)
        cr_assert_eq(fsdp_checkpoint_convert("saved", "foreign", &foreign, &err), FSDP_OK, "%s",
                     err.text);
    run(way->loading, "cpu", load_rank, &usual);
    for (int seed = 0; seed < SEEDS; seed++) {
        const fake_cudart_plan plan = {.seed = (uint64_t)seed};
        load_run late = {.way = way};
        fake_cudart_begin(&plan);
        run(way->loading, "cuda", load_rank, &late);
        const char *misuse = fake_cudart_end();
        cr_assert_null(misuse, "seed %d: %s", seed, misuse);
        cr_assert_eq(memcmp(usual.hashes, late.hashes, sizeof usual.hashes), 0, "seed %d", seed);
    }
}

Test(load_copies, blocks_come_as_they_are)
{
    expect_equal(&(load_way){.saving = 2, .loading = 2, .saved_type = FSDP_F32, .type = FSDP_F32});
}

Test(load_copies, one_rank_reads_what_two_saved)
{
    expect_equal(&(load_way){.saving = 2, .loading = 1, .saved_type = FSDP_F32, .type = FSDP_F32});
}

Test(load_copies, three_ranks_share_the_blocks_of_one)
{
    expect_equal(&(load_way){.saving = 1, .loading = 3, .saved_type = FSDP_F32, .type = FSDP_F32});
}

Test(load_copies, columns_are_copied_by_the_device)
{
    expect_equal(&(load_way){
        .saving = 1, .loading = 2, .saved_type = FSDP_F32, .type = FSDP_F32, .cuts_columns = true});
}

Test(load_copies, narrow_values_are_widened)
{
    expect_equal(&(load_way){.saving = 1,
                             .loading = 2,
                             .saved_type = FSDP_BF16,
                             .type = FSDP_F32,
                             .cuts_columns = true});
}

/* Masters follow, and keep what they know. */
Test(load_copies, wide_values_are_narrowed)
{
    expect_equal(&(load_way){.saving = 2,
                             .loading = 2,
                             .saved_type = FSDP_F32,
                             .type = FSDP_BF16,
                             .part = FSDP_STATE_MODEL});
}

Test(load_copies, masters_are_loaded)
{
    expect_equal(
        &(load_way){.saving = 2, .loading = 1, .saved_type = FSDP_BF16, .type = FSDP_BF16});
}

Test(load_copies, compressed_blocks_are_decoded)
{
    expect_equal(&(load_way){
        .saving = 1, .loading = 2, .saved_type = FSDP_F32, .type = FSDP_F32, .compresses = true});
}

Test(load_copies, compressed_blocks_are_cast)
{
    expect_equal(&(load_way){
        .saving = 1, .loading = 2, .saved_type = FSDP_BF16, .type = FSDP_F32, .compresses = true});
}

Test(load_copies, wanted_rows_are_read_without_checks)
{
    expect_equal(&(load_way){.saving = 1,
                             .loading = 3,
                             .saved_type = FSDP_F32,
                             .type = FSDP_F32,
                             .check = FSDP_CHECK_OFF});
}

Test(load_copies, wanted_columns_are_read_without_checks)
{
    expect_equal(&(load_way){.saving = 1,
                             .loading = 2,
                             .saved_type = FSDP_BF16,
                             .type = FSDP_F32,
                             .cuts_columns = true,
                             .check = FSDP_CHECK_OFF});
}

Test(load_copies, other_formats_come_in_slabs)
{
    expect_equal(&(load_way){
        .saving = 1, .loading = 2, .saved_type = FSDP_F32, .type = FSDP_F32, .is_foreign = true});
}

Test(load_copies, other_formats_are_cast)
{
    expect_equal(&(load_way){.saving = 1,
                             .loading = 2,
                             .saved_type = FSDP_BF16,
                             .type = FSDP_F32,
                             .is_foreign = true,
                             .cuts_columns = true});
}

Test(load_copies, what_is_not_loaded_stays)
{
    expect_equal(&(load_way){.saving = 1,
                             .loading = 2,
                             .saved_type = FSDP_F32,
                             .type = FSDP_F32,
                             .part = FSDP_STATE_MODEL});
}

Test(load_copies, offloaded_shards_are_the_hosts)
{
    expect_equal(&(load_way){
        .saving = 2, .loading = 2, .saved_type = FSDP_F32, .type = FSDP_F32, .offloads = true});
}

Test(load_copies, flat_parameters_and_narrow_buffers_are_loaded)
{
    expect_equal(&(load_way){.saving = 1,
                             .loading = 2,
                             .saved_type = FSDP_F32,
                             .type = FSDP_F32,
                             .buffer_type = FSDP_BF16});
}

/* --- one load, step by step --------------------------------------------------------------------- */

/* Calls of CUDA and bytes at a read of the shard file. */
typedef struct read_look {
    int copies, waits;
    size_t pinned, heap;
} read_look;

typedef struct load_log {
    bool has_begun;
    read_look first, most;
    int reads_before_waits; /* reads after a copy, before any wait */
    int copies_at_wait;     /* copies when the first wait was seen */
} load_log;

static size_t heap_bytes(void)
{
    struct mallinfo2 info = mallinfo2();
    return info.uordblks + info.hblkhd;
}

static read_look look(void)
{
    return (read_look){.copies = fake_cudart_calls("cudaMemcpyAsync"),
                       .waits = fake_cudart_calls("cudaEventQuery"),
                       .pinned = fake_cudart_pinned(),
                       .heap = heap_bytes()};
}

static size_t larger(size_t a, size_t b)
{
    return a > b ? a : b;
}

static int note_read(void *user, fsdp_io_call call, const char *path)
{
    load_log *log = user;
    const read_look now = look();
    (void)call;
    if (!strstr(path, "shard-"))
        return 0;
    if (!log->has_begun)
        log->first = now;
    log->has_begun = true;
    log->most.pinned = larger(log->most.pinned, now.pinned);
    log->most.heap = larger(log->most.heap, now.heap);
    if (now.copies > log->first.copies && now.waits == log->first.waits)
        log->reads_before_waits++;
    if (now.waits > log->first.waits && log->copies_at_wait == 0)
        log->copies_at_wait = now.copies - log->first.copies;
    return 0;
}

static fsdp_status load_logged(toy *net, load_log *log, fsdp_error *err)
{
    const fsdp_fault_plan plan = {.calls = 1 << FSDP_CALL_PREAD,
                                  .at = 1,
                                  .forever = true,
                                  .action = FSDP_FAULT_CALL,
                                  .call = note_read,
                                  .user = log};
    fsdp_io *disk = NULL;
    FSDP_TRY(fsdp_io_fault_create(NULL, &plan, &disk, err));
    const fsdp_root_load_opts opts = {.load = {.threads = 1, .access.disk = disk}};
    fsdp_status status = fsdp_root_load(net->root, "first", &opts, err);
    fsdp_io_fault_free(disk);
    return status;
}

/* The second block is read after the copy of the first was given and before anything waits for it. */
static fsdp_status log_load(toy *net, fsdp_error *err)
{
    const fsdp_root_load_opts alone = {.load.threads = 1};
    load_log log = {0};
    const read_look before = look();
    FSDP_TRY(make(net, FSDP_F32, NULL, err));
    FSDP_TRY(load_logged(net, &log, err));
    const int state_copies = fake_cudart_calls("cudaMemcpyAsync") - log.first.copies;
    EXPECT(log.reads_before_waits >= BLOCK / (256 << 10));
    EXPECT(log.copies_at_wait == SLOTS);
    EXPECT(state_copies > 3 * 5);
    EXPECT(log.most.pinned <= before.pinned + SLOTS * BLOCK + SLACK);
    EXPECT(log.most.heap <= log.first.heap + SLACK);
    EXPECT(fake_cudart_to_host() == 0);
    /* what the first load has taken is kept */
    const int blocks = fake_cudart_calls("cudaHostAlloc");
    FSDP_TRY(fsdp_root_load(net->root, "first", &alone, err));
    EXPECT(fake_cudart_calls("cudaHostAlloc") == blocks);
    return FSDP_OK;
}

static void run_one_rank(fsdp_status (*body)(toy *net, fsdp_error *err), uint64_t seed)
{
    const toy_case what = {.mesh_ndim = 1, .mesh_shape = {1}, .mesh_names = {"dp"}, .body = body};
    fsdp_error err = {0};
    fake_cudart_begin(&(fake_cudart_plan){.seed = seed});
    cr_assert_eq(toy_run_on("cuda", &what, &err), FSDP_OK, "%s", err.text);
    const char *misuse = fake_cudart_end();
    cr_assert_null(misuse, "%s", misuse);
}

Test(load_copies, blocks_are_read_while_copies_are_made)
{
    run(1, "cpu", save_first, NULL);
    for (uint64_t seed = 0; seed < SEEDS; seed++)
        run_one_rank(log_load, seed);
}

/* --- loads that fail ---------------------------------------------------------------------------- */

static fsdp_status get_weight(toy *net, char *data, fsdp_error *err)
{
    const fsdp_state_opts full = {.full_state_dict = true};
    fsdp_sd *sd = NULL;
    FSDP_TRY(fsdp_root_get_state(net->root, &full, &sd, err));
    const int64_t at = fsdp_sd_find(sd, FSDP_NAME("model.L0.w"));
    memcpy(data, fsdp_sd_at(sd, (size_t)at)->data, (size_t)ROWS * COLUMNS * sizeof(float));
    fsdp_sd_free(sd);
    return FSDP_OK;
}

/* Inverts a byte of the second block of the weight, which is at `data`. */
static fsdp_status damage(const char *path, const char *data, fsdp_error *err)
{
    enum { KNOWN = 64 };
    FILE *file = fopen(path, "r+");
    struct stat info;
    EXPECT(file && fstat(fileno(file), &info) == 0);
    char *bytes = malloc((size_t)info.st_size);
    EXPECT(bytes && fread(bytes, 1, (size_t)info.st_size, file) == (size_t)info.st_size);
    const char *found = memmem(bytes, (size_t)info.st_size, data + BLOCK + KNOWN, KNOWN);
    EXPECT(found && fseek(file, found - bytes, SEEK_SET) == 0 && fputc(~*found, file) != EOF);
    EXPECT(fclose(file) == 0);
    free(bytes);
    return FSDP_OK;
}

/* The blocks before the damaged one are new, it and those after it are as they were. */
static fsdp_status load_damaged(toy *net, char *was, char *stored, char *now, fsdp_error *err)
{
    const fsdp_root_load_opts alone = {.load.threads = 1};
    const size_t size = (size_t)ROWS * COLUMNS * sizeof(float);
    FSDP_TRY(make(net, FSDP_F32, NULL, err));
    FSDP_TRY(fsdp_root_load(net->root, "first", &alone, err));
    FSDP_TRY(get_weight(net, stored, err));
    FSDP_TRY(damage("first/shard-00000-of-00001.h5", stored, err));
    FSDP_TRY(fsdp_root_load(net->root, "saved", &alone, err));
    FSDP_TRY(get_weight(net, was, err));
    fsdp_error why = {0};
    EXPECT(fsdp_root_load(net->root, "first", &alone, &why) == FSDP_ERR_DAMAGED);
    EXPECT(strstr(why.text, "first/shard-00000-of-00001.h5") && strstr(why.text, "model.L0.w"));
    FSDP_TRY(get_weight(net, now, err));
    EXPECT(memcmp(now, stored, BLOCK) == 0);
    EXPECT(memcmp(now + BLOCK, was + BLOCK, size - BLOCK) == 0);
    FSDP_TRY(fsdp_root_load(net->root, "saved", NULL, err));
    FSDP_TRY(get_weight(net, now, err));
    EXPECT(memcmp(now, was, size) == 0);
    return FSDP_OK;
}

static fsdp_status refuse_damaged(toy *net, fsdp_error *err)
{
    const size_t size = (size_t)ROWS * COLUMNS * sizeof(float);
    char *weights = malloc(3 * size);
    EXPECT(weights);
    fsdp_status status = load_damaged(net, weights, weights + size, weights + 2 * size, err);
    free(weights);
    return status;
}

Test(load_copies, a_damaged_block_does_not_reach_the_device)
{
    load_run whole = {.way = &(load_way){.saved_type = FSDP_F32}};
    run(1, "cpu", save_first, NULL);
    run(1, "cpu", save_rank, &whole);
    for (uint64_t seed = 0; seed < SEEDS; seed++) {
        run_one_rank(refuse_damaged, seed);
        cr_assert_eq(fsdp_io_remove_tree(NULL, "first", NULL), FSDP_OK);
        run(1, "cpu", save_first, NULL);
    }
}

/* The failed copy is the cause, not the memory that CUDA refuses later. */
static fsdp_status fail_copy(toy *net, fsdp_error *err)
{
    FSDP_TRY(make(net, FSDP_F32, NULL, err));
    const fsdp_root_load_opts alone = {.load.threads = 1};
    EXPECT_REFUSAL(fsdp_root_load(net->root, "first", &alone, why), "cudaMemcpyAsync");
    return FSDP_OK;
}

static void run_to_the_failure(const char *call, int at)
{
    const toy_case what = {
        .mesh_ndim = 1, .mesh_shape = {1}, .mesh_names = {"dp"}, .body = fail_copy};
    fsdp_error err = {0};
    fake_cudart_begin(
        &(fake_cudart_plan){.fail_call = call, .fail_at = at, .fail_code = 719, .seed = 1});
    cr_assert_eq(toy_run_on("cuda", &what, &err), FSDP_OK, "%s", err.text);
    const char *misuse = fake_cudart_end();
    cr_assert_null(misuse, "%s", misuse);
}

Test(load_copies, a_load_whose_copies_fail_fails)
{
    run(1, "cpu", save_first, NULL);
    run_to_the_failure("cudaMemcpyAsync", 1);
    run_to_the_failure("cudaMemcpyAsync", 16);
}

static fsdp_status lack_memory(toy *net, fsdp_error *err)
{
    FSDP_TRY(make(net, FSDP_F32, NULL, err));
    fsdp_error why = {0};
    EXPECT(fsdp_root_load(net->root, "first", NULL, &why) == FSDP_ERR_LIMIT);
    EXPECT(strstr(why.text, "reading into a device's memory"));
    return FSDP_OK;
}

Test(load_copies, a_load_without_pinned_memory_says_so)
{
    const toy_case what = {
        .mesh_ndim = 1, .mesh_shape = {1}, .mesh_names = {"dp"}, .body = lack_memory};
    fsdp_error err = {0};
    run(1, "cpu", save_first, NULL);
    fake_cudart_begin(
        &(fake_cudart_plan){.fail_call = "cudaHostAlloc", .fail_at = 1, .fail_code = 2});
    cr_assert_eq(toy_run_on("cuda", &what, &err), FSDP_OK, "%s", err.text);
    const char *misuse = fake_cudart_end();
    cr_assert_null(misuse, "%s", misuse);
}

/* --- a dict in memory --------------------------------------------------------------------------- */

/* The dict's memory is the host's view, which a call loads that sets the dict. */
static fsdp_status set_what_was_loaded(toy *net, fsdp_error *err)
{
    fsdp_hash expected, set;
    fsdp_sd *sd = NULL;
    FSDP_TRY(make(net, FSDP_F32, NULL, err));
    FSDP_TRY(fsdp_root_load(net->root, "first", NULL, err));
    FSDP_TRY(hash_state(net, &expected, err));
    FSDP_TRY(fsdp_root_init_uniform(net->root, 99, err));
    FSDP_TRY(fsdp_root_get_state(net->root, NULL, &sd, err));
    fsdp_status status = fsdp_sd_load(sd, fsdp_world_ctl(net->world), "first", NULL, err);
    if (status == FSDP_OK)
        status = fsdp_root_set_state(net->root, sd, NULL, NULL, err);
    fsdp_sd_free(sd);
    FSDP_TRY(status);
    FSDP_TRY(hash_state(net, &set, err));
    EXPECT(memcmp(&expected, &set, sizeof set) == 0);
    return FSDP_OK;
}

Test(load_copies, values_that_come_into_a_dict_of_the_view_are_set)
{
    run(1, "cpu", save_first, NULL);
    run_one_rank(set_what_was_loaded, 1);
}
