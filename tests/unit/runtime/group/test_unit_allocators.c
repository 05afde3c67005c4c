/*
 * Custom collectives with buffers of their own (unit.h, fsdp_custom_collective): the buffers that `run` gets,
 * the number of allocations, the error that names the unit when one fails, and that all buffers are freed. On
 * two ranks that are threads; every collective of every unit has its own allocator.
 */
#include "tests/unit/runtime/expect_toy.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

enum { SIZE = 6, LAYERS = 2, RANKS = 2, STEPS = 4, MOST_OUT = 16 };

/* --- an allocator that keeps a record ----------------------------------------------------------- */

typedef struct buffer {
    unsigned char *data;
    size_t size;
} buffer;

/* Shared by the threads of hooks and of streams. */
typedef struct alloc_record {
    pthread_mutex_t lock;
    buffer out[MOST_OUT];
    int out_count, asked, given, unknown, runs;
    bool refuses;
    int refuses_after; /* this number of buffers */
} alloc_record;

static void *allocate(void *user, size_t size)
{
    alloc_record *record = user;
    unsigned char *data = NULL;
    pthread_mutex_lock(&record->lock);
    bool refuses = record->refuses && record->given >= record->refuses_after;
    record->asked++;
    if (!refuses && record->out_count < MOST_OUT) {
        data = malloc(size);
        record->out[record->out_count++] = (buffer){data, size};
        record->given++;
    }
    pthread_mutex_unlock(&record->lock);
    return data;
}

/* Overwrites the buffer, so that a free that comes too early changes values. */
static void free_buffer(void *user, void *data)
{
    alloc_record *record = user;
    pthread_mutex_lock(&record->lock);
    int i = 0;
    while (i < record->out_count && record->out[i].data != data)
        i++;
    if (i == record->out_count) {
        record->unknown++;
    } else {
        memset(data, 0x7b, record->out[i].size);
        record->out[i] = record->out[--record->out_count];
        free(data);
    }
    pthread_mutex_unlock(&record->lock);
}

static bool holds(const alloc_record *record, const void *data, size_t size)
{
    const unsigned char *at = data;
    for (int i = 0; i < record->out_count; i++)
        if (at >= record->out[i].data && at + size <= record->out[i].data + record->out[i].size)
            return true;
    return false;
}

static fsdp_status run_in_buffers(void *user, fsdp_comm *comm, const fsdp_collective *call,
                                  fsdp_error *err)
{
    alloc_record *record = user;
    size_t part = (size_t)call->count * fsdp_dtype_size(call->dtype);
    bool gathers = call->kind == FSDP_ALL_GATHER;
    pthread_mutex_lock(&record->lock);
    record->runs++;
    record->unknown += !holds(record, call->in, gathers ? part : part * RANKS);
    record->unknown += !holds(record, call->out, gathers ? part * RANKS : part);
    pthread_mutex_unlock(&record->lock);
    return fsdp_comm_run(comm, call, err);
}

static fsdp_status expect(bool is_so, const char *what, fsdp_error *err)
{
    return is_so ? FSDP_OK : fsdp_fail(err, FSDP_ERR_INTERNAL, "not so: %s", what);
}

/* --- a model of two layers ------------------------------------------------------------------------ */

typedef struct layers {
    toy toy;
    alloc_record gathers[LAYERS], reductions[LAYERS];
} layers;

static fsdp_status make_model(toy *net, fsdp_error *err)
{
    FSDP_TRY(toy_add_weights(net, LAYERS, 1, (int64_t[]){SIZE}, err));
    return toy_wrap(net, err);
}

static fsdp_status set_allocators(layers *net, bool frees, fsdp_error *err)
{
    for (int i = 0; i < LAYERS; i++) {
        fsdp_custom_collective custom = {.context = &net->gathers[i],
                                         .alloc = allocate,
                                         .dealloc = frees ? free_buffer : NULL,
                                         .run = run_in_buffers};
        FSDP_TRY(fsdp_unit_set_custom_collective(net->toy.unit[i], FSDP_ALL_GATHER, &custom, err));
        custom.context = &net->reductions[i];
        FSDP_TRY(
            fsdp_unit_set_custom_collective(net->toy.unit[i], FSDP_REDUCE_SCATTER, &custom, err));
    }
    return FSDP_OK;
}

static fsdp_status forward(toy *net, fsdp_error *err)
{
    return toy_forward(net, NULL, err);
}

static fsdp_status backward(toy *net, fsdp_error *err)
{
    return toy_backward(net, toy_add_ones, err);
}

static int count_given(const layers *net)
{
    int given = 0;
    for (int i = 0; i < LAYERS; i++)
        given += net->gathers[i].given + net->reductions[i].given;
    return given;
}

static int count_out(const layers *net)
{
    int out = 0;
    for (int i = 0; i < LAYERS; i++)
        out += net->gathers[i].out_count + net->reductions[i].out_count;
    return out;
}

/* From the second step on, no buffer is allocated. */
static fsdp_status train(toy *net, const layers *counted, fsdp_error *err)
{
    int after_first = 0;
    for (int step = 1; step <= STEPS; step++) {
        FSDP_TRY(forward(net, err));
        FSDP_TRY(backward(net, err));
        FSDP_TRY(fsdp_optim_step(net->optim, err));
        FSDP_TRY(toy_expect_weights(net, (float)-step, err));
        fsdp_root_zero_grad(net->root);
        if (step == 1)
            after_first = count_given(counted);
    }
    return expect(count_given(counted) == after_first, "buffers are used again", err);
}

static fsdp_status train_with_sgd(toy *net, const layers *counted, fsdp_error *err)
{
    fsdp_sgd_opts opts = {0};
    opts.lr = 1;
    FSDP_TRY(toy_add_sgd(net, &opts, err));
    return train(net, counted, err);
}

/* --- running a test ----------------------------------------------------------------------------- */

typedef fsdp_status (*alloc_test)(layers *net, fsdp_error *err);

static void init_records(layers *net)
{
    for (int i = 0; i < LAYERS; i++) {
        pthread_mutex_init(&net->gathers[i].lock, NULL);
        pthread_mutex_init(&net->reductions[i].lock, NULL);
    }
}

/* Frees the buffers that the library did not free. */
static void release_record(alloc_record *record)
{
    while (record->out_count > 0)
        free(record->out[--record->out_count].data);
    pthread_mutex_destroy(&record->lock);
}

static const toy_case line = {.mesh_ndim = 1, .mesh_shape = {RANKS}, .mesh_names = {"dp"}},
                      single = {.mesh_ndim = 1, .mesh_shape = {1}, .mesh_names = {"dp"}};

static fsdp_status run_rank(world_rank *rank, fsdp_error *err)
{
    const alloc_test *body = rank->user;
    layers net = {0};
    init_records(&net);
    fsdp_status status =
        toy_begin(&net.toy, rank, fsdp_world_size(rank->world) == 1 ? &single : &line, err);
    if (status == FSDP_OK)
        status = make_model(&net.toy, err);
    if (status == FSDP_OK)
        status = (*body)(&net, err);
    toy_free(&net.toy);
    for (int i = 0; i < LAYERS; i++) {
        release_record(&net.gathers[i]);
        release_record(&net.reductions[i]);
    }
    return status;
}

static void expect_test(int ranks, alloc_test body)
{
    expect_body(ranks, run_rank, &body);
}

/* --- allocated memory --------------------------------------------------------------------------- */

static fsdp_status expect_record(const alloc_record *record, int runs, int given, fsdp_error *err)
{
    FSDP_TRY(expect(record->unknown == 0,
                    "run gets buffers of its allocator, and only these are freed", err));
    FSDP_TRY(expect(record->runs == runs, "it ran once per collective", err));
    return expect(record->given == given, "so many buffers were asked for", err);
}

static fsdp_status use_buffers(layers *net, fsdp_error *err)
{
    FSDP_TRY(set_allocators(net, true, err));
    FSDP_TRY(train_with_sgd(&net->toy, net, err));
    /* All gathers of a unit share one buffer on the stream of copies. */
    for (int i = 0; i < LAYERS; i++) {
        FSDP_TRY(expect_record(&net->gathers[i], 2 * STEPS, 1, err));
        FSDP_TRY(expect_record(&net->reductions[i], STEPS, 2, err));
    }
    toy_free(&net->toy);
    return expect(count_out(net) == 0, "every buffer is freed", err);
}

Test(unit_allocators, collectives_run_in_buffers_of_their_own_allocator_and_all_are_freed)
{
    expect_test(RANKS, use_buffers);
}

static fsdp_status keep_buffers(layers *net, fsdp_error *err)
{
    FSDP_TRY(set_allocators(net, false, err));
    FSDP_TRY(train_with_sgd(&net->toy, net, err));
    int given = count_given(net);
    fsdp_memory_return_external(&net->toy.root->context->memory);
    toy_free(&net->toy);
    return expect(given > 0 && count_out(net) == given, "every buffer stays the allocator's", err);
}

Test(unit_allocators, buffers_that_nobody_frees_are_used_again_all_the_same)
{
    expect_test(RANKS, keep_buffers);
}

/* --- changing the allocator --------------------------------------------------------------------- */

static fsdp_status unset_allocators(layers *net, fsdp_error *err)
{
    for (int i = 0; i < LAYERS; i++) {
        FSDP_TRY(fsdp_unit_set_custom_collective(net->toy.unit[i], FSDP_ALL_GATHER, NULL, err));
        FSDP_TRY(fsdp_unit_set_custom_collective(net->toy.unit[i], FSDP_REDUCE_SCATTER, NULL, err));
    }
    return FSDP_OK;
}

static fsdp_status replace_allocators(layers *net, fsdp_error *err)
{
    FSDP_TRY(set_allocators(net, true, err));
    FSDP_TRY(forward(&net->toy, err));
    FSDP_TRY(backward(&net->toy, err));
    FSDP_TRY(unset_allocators(net, err));
    FSDP_TRY(expect(count_out(net) == LAYERS, "only gradients stay", err));
    for (int i = 0; i < LAYERS; i++) {
        const float *grad = fsdp_param_shard_grad(net->toy.weight[i]);
        FSDP_TRY(expect(grad && grad[0] == 1, "they are what they were", err));
    }
    int given = count_given(net);
    fsdp_root_zero_grad(net->toy.root);
    FSDP_TRY(train_with_sgd(&net->toy, net, err));
    FSDP_TRY(expect(count_given(net) == given, "the old allocator is not called", err));
    toy_free(&net->toy);
    return expect(count_out(net) == 0, "every buffer is freed", err);
}

Test(unit_allocators, when_another_collective_is_set_empty_buffers_are_freed)
{
    expect_test(RANKS, replace_allocators);
}

/* The other root keeps the context and its free blocks. */
static fsdp_status leave_context(layers *net, fsdp_error *err)
{
    toy other;
    fsdp_status status = toy_begin(&other, net->toy.rank, &line, err);
    if (status == FSDP_OK)
        status = make_model(&other, err);
    if (status == FSDP_OK)
        status = fsdp_root_share_context(net->toy.root, other.root, err);
    if (status == FSDP_OK)
        status = set_allocators(net, true, err);
    if (status == FSDP_OK)
        status = train_with_sgd(&net->toy, net, err);
    toy_free(&net->toy);
    if (status == FSDP_OK)
        status = expect(count_given(net) > 0 && count_out(net) == 0, "every buffer is freed", err);
    if (status == FSDP_OK)
        status = train_with_sgd(&other, net, err);
    toy_free(&other);
    return status;
}

Test(unit_allocators, a_root_that_leaves_a_shared_context_frees_its_buffers)
{
    expect_test(RANKS, leave_context);
}

/* --- an allocator that fails -------------------------------------------------------------------- */

static fsdp_status expect_refusal(fsdp_status status, const fsdp_error *why, fsdp_error *err)
{
    if (status == FSDP_ERR_LIMIT && strstr(why->text, "unit L1: the alloc of its custom"))
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_INTERNAL, "a failure of L1's allocator, not %d: %s", (int)status,
                     why->text);
}

static fsdp_status fail_with(layers *net, alloc_record *refuser, int after, fsdp_error *err)
{
    fsdp_error why = {0};
    refuser->refuses_after = after;
    refuser->refuses = true;
    FSDP_TRY(set_allocators(net, true, err));
    fsdp_status status = forward(&net->toy, &why);
    if (status == FSDP_OK)
        status = backward(&net->toy, &why);
    FSDP_TRY(expect_refusal(status, &why, err));
    FSDP_TRY(
        expect(refuser->given == after && refuser->asked == after + 2, "it is asked twice", err));
    toy_free(&net->toy);
    return expect(count_out(net) == 0, "every buffer is freed", err);
}

static fsdp_status fail_gather(layers *net, fsdp_error *err)
{
    return fail_with(net, &net->gathers[1], 0, err);
}

static fsdp_status fail_input(layers *net, fsdp_error *err)
{
    return fail_with(net, &net->reductions[1], 0, err);
}

static fsdp_status fail_output(layers *net, fsdp_error *err)
{
    return fail_with(net, &net->reductions[1], 1, err);
}

/* One rank, because with several one may report another's failure first. */
Test(unit_allocators, a_collective_without_a_buffer_fails_and_names_its_unit)
{
    expect_test(1, fail_gather);
    expect_test(1, fail_input);
    expect_test(1, fail_output);
}
