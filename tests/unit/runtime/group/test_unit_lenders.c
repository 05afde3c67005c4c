/*
 * Custom collectives that bring their own buffers (unit.h, fsdp_custom_collective): which buffers `run` is
 * given, how often memory is asked for, that a refusal names the unit, and that all goes back. On two ranks
 * that are threads; every collective of every unit has a lender of its own.
 */
#include "tests/unit/runtime/expect_toy.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

enum { SIZE = 6, LAYERS = 2, RANKS = 2, STEPS = 4, MOST_OUT = 16 };

/* --- a lender that keeps a record --------------------------------------------------------------- */

typedef struct loan {
    unsigned char *data;
    size_t size;
} loan;

/* Hooks' threads and streams' threads meet here. */
typedef struct lender_record {
    pthread_mutex_t lock;
    loan out[MOST_OUT];
    int out_count, asked, given, strangers, runs;
    bool refuses;
    int refuses_after; /* so many loans */
} lender_record;

static void *lend(void *user, size_t size)
{
    lender_record *record = user;
    unsigned char *data = NULL;
    pthread_mutex_lock(&record->lock);
    bool refuses = record->refuses && record->given >= record->refuses_after;
    record->asked++;
    if (!refuses && record->out_count < MOST_OUT) {
        data = malloc(size);
        record->out[record->out_count++] = (loan){data, size};
        record->given++;
    }
    pthread_mutex_unlock(&record->lock);
    return data;
}

/* What comes too early spoils the values of those that still read it. */
static void take_back(void *user, void *data)
{
    lender_record *record = user;
    pthread_mutex_lock(&record->lock);
    int i = 0;
    while (i < record->out_count && record->out[i].data != data)
        i++;
    if (i == record->out_count) {
        record->strangers++;
    } else {
        memset(data, 0x7b, record->out[i].size);
        record->out[i] = record->out[--record->out_count];
        free(data);
    }
    pthread_mutex_unlock(&record->lock);
}

static bool holds(const lender_record *record, const void *data, size_t size)
{
    const unsigned char *at = data;
    for (int i = 0; i < record->out_count; i++)
        if (at >= record->out[i].data && at + size <= record->out[i].data + record->out[i].size)
            return true;
    return false;
}

static fsdp_status run_with_loans(void *user, fsdp_comm *comm, const fsdp_collective *call,
                                  fsdp_error *err)
{
    lender_record *record = user;
    size_t part = (size_t)call->count * fsdp_dtype_size(call->dtype);
    bool gathers = call->kind == FSDP_ALL_GATHER;
    pthread_mutex_lock(&record->lock);
    record->runs++;
    record->strangers += !holds(record, call->in, gathers ? part : part * RANKS);
    record->strangers += !holds(record, call->out, gathers ? part * RANKS : part);
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
    lender_record gathers[LAYERS], reductions[LAYERS];
} layers;

static fsdp_status make_model(toy *net, fsdp_error *err)
{
    FSDP_TRY(toy_add_weights(net, LAYERS, 1, (int64_t[]){SIZE}, err));
    return toy_wrap(net, err);
}

static fsdp_status set_lenders(layers *net, bool takes_back, fsdp_error *err)
{
    for (int i = 0; i < LAYERS; i++) {
        fsdp_custom_collective custom = {.user = &net->gathers[i],
                                         .alloc = lend,
                                         .dealloc = takes_back ? take_back : NULL,
                                         .run = run_with_loans};
        FSDP_TRY(fsdp_unit_set_custom_collective(net->toy.unit[i], FSDP_ALL_GATHER, &custom, err));
        custom.user = &net->reductions[i];
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

/* From the second step on no memory is asked for. */
static fsdp_status train(toy *net, const layers *lenders, fsdp_error *err)
{
    int after_first = 0;
    for (int step = 1; step <= STEPS; step++) {
        FSDP_TRY(forward(net, err));
        FSDP_TRY(backward(net, err));
        FSDP_TRY(fsdp_optim_step(net->optim, err));
        FSDP_TRY(toy_expect_weights(net, (float)-step, err));
        fsdp_root_zero_grad(net->root);
        if (step == 1)
            after_first = count_given(lenders);
    }
    return expect(count_given(lenders) == after_first, "buffers are used again", err);
}

static fsdp_status train_with_sgd(toy *net, const layers *lenders, fsdp_error *err)
{
    fsdp_sgd_opts opts = {0};
    opts.lr = 1;
    FSDP_TRY(toy_add_sgd(net, &opts, err));
    return train(net, lenders, err);
}

/* --- running a test ----------------------------------------------------------------------------- */

typedef fsdp_status (*lender_test)(layers *net, fsdp_error *err);

static void init_records(layers *net)
{
    for (int i = 0; i < LAYERS; i++) {
        pthread_mutex_init(&net->gathers[i].lock, NULL);
        pthread_mutex_init(&net->reductions[i].lock, NULL);
    }
}

/* What was not taken back was the lender's to free. */
static void release_record(lender_record *record)
{
    while (record->out_count > 0)
        free(record->out[--record->out_count].data);
    pthread_mutex_destroy(&record->lock);
}

static const toy_case line = {.mesh_ndim = 1, .mesh_shape = {RANKS}, .mesh_names = {"dp"}},
                      single = {.mesh_ndim = 1, .mesh_shape = {1}, .mesh_names = {"dp"}};

static fsdp_status run_rank(world_rank *rank, fsdp_error *err)
{
    const lender_test *body = rank->user;
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

static void expect_test(int ranks, lender_test body)
{
    expect_body(ranks, run_rank, &body);
}

/* --- what is lent ------------------------------------------------------------------------------- */

static fsdp_status expect_record(const lender_record *record, int runs, int given, fsdp_error *err)
{
    FSDP_TRY(
        expect(record->strangers == 0, "run has its lender's buffers, which alone come back", err));
    FSDP_TRY(expect(record->runs == runs, "it ran once per collective", err));
    return expect(record->given == given, "so many buffers were asked for", err);
}

static fsdp_status use_buffers(layers *net, fsdp_error *err)
{
    FSDP_TRY(set_lenders(net, true, err));
    FSDP_TRY(train_with_sgd(&net->toy, net, err));
    /* On the stream of copies all gathers of a unit share one buffer. */
    for (int i = 0; i < LAYERS; i++) {
        FSDP_TRY(expect_record(&net->gathers[i], 2 * STEPS, 1, err));
        FSDP_TRY(expect_record(&net->reductions[i], STEPS, 2, err));
    }
    toy_free(&net->toy);
    return expect(count_out(net) == 0, "every buffer went back", err);
}

Test(unit_lenders, collectives_run_in_buffers_of_their_own_lender_and_all_go_back)
{
    expect_test(RANKS, use_buffers);
}

static fsdp_status keep_buffers(layers *net, fsdp_error *err)
{
    FSDP_TRY(set_lenders(net, false, err));
    FSDP_TRY(train_with_sgd(&net->toy, net, err));
    int given = count_given(net);
    fsdp_memory_return_external(&net->toy.root->context->memory);
    toy_free(&net->toy);
    return expect(given > 0 && count_out(net) == given, "every buffer stays the lender's", err);
}

Test(unit_lenders, buffers_that_nobody_takes_back_are_used_again_all_the_same)
{
    expect_test(RANKS, keep_buffers);
}

/* --- another lender ----------------------------------------------------------------------------- */

static fsdp_status unset_lenders(layers *net, fsdp_error *err)
{
    for (int i = 0; i < LAYERS; i++) {
        FSDP_TRY(fsdp_unit_set_custom_collective(net->toy.unit[i], FSDP_ALL_GATHER, NULL, err));
        FSDP_TRY(fsdp_unit_set_custom_collective(net->toy.unit[i], FSDP_REDUCE_SCATTER, NULL, err));
    }
    return FSDP_OK;
}

static fsdp_status replace_lenders(layers *net, fsdp_error *err)
{
    FSDP_TRY(set_lenders(net, true, err));
    FSDP_TRY(forward(&net->toy, err));
    FSDP_TRY(backward(&net->toy, err));
    FSDP_TRY(unset_lenders(net, err));
    FSDP_TRY(expect(count_out(net) == LAYERS, "only gradients stay", err));
    for (int i = 0; i < LAYERS; i++) {
        const float *grad = fsdp_param_shard_grad(net->toy.weight[i]);
        FSDP_TRY(expect(grad && grad[0] == 1, "they are what they were", err));
    }
    int given = count_given(net);
    fsdp_root_zero_grad(net->toy.root);
    FSDP_TRY(train_with_sgd(&net->toy, net, err));
    FSDP_TRY(expect(count_given(net) == given, "nobody asks the old lender", err));
    toy_free(&net->toy);
    return expect(count_out(net) == 0, "every buffer went back", err);
}

Test(unit_lenders, when_another_collective_is_set_buffers_that_hold_nothing_go_back)
{
    expect_test(RANKS, replace_lenders);
}

/* The context, and what is free in it, stays with the other root. */
static fsdp_status leave_context(layers *net, fsdp_error *err)
{
    toy other;
    fsdp_status status = toy_begin(&other, net->toy.rank, &line, err);
    if (status == FSDP_OK)
        status = make_model(&other, err);
    if (status == FSDP_OK)
        status = fsdp_root_share_context(net->toy.root, other.root, err);
    if (status == FSDP_OK)
        status = set_lenders(net, true, err);
    if (status == FSDP_OK)
        status = train_with_sgd(&net->toy, net, err);
    toy_free(&net->toy);
    if (status == FSDP_OK)
        status = expect(count_given(net) > 0 && count_out(net) == 0, "every buffer went back", err);
    if (status == FSDP_OK)
        status = train_with_sgd(&other, net, err);
    toy_free(&other);
    return status;
}

Test(unit_lenders, a_root_that_leaves_a_shared_context_gives_back_what_it_was_lent)
{
    expect_test(RANKS, leave_context);
}

/* --- a lender that has nothing ------------------------------------------------------------------ */

static fsdp_status expect_refusal(fsdp_status status, const fsdp_error *why, fsdp_error *err)
{
    if (status == FSDP_ERR_LIMIT && strstr(why->text, "unit L1: the alloc of its custom"))
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_INTERNAL, "a refusal of L1's lender, not %d: %s", (int)status,
                     why->text);
}

static fsdp_status fail_with(layers *net, lender_record *refuser, int loans, fsdp_error *err)
{
    fsdp_error why = {0};
    refuser->refuses_after = loans;
    refuser->refuses = true;
    FSDP_TRY(set_lenders(net, true, err));
    fsdp_status status = forward(&net->toy, &why);
    if (status == FSDP_OK)
        status = backward(&net->toy, &why);
    FSDP_TRY(expect_refusal(status, &why, err));
    FSDP_TRY(
        expect(refuser->given == loans && refuser->asked == loans + 2, "it is asked twice", err));
    toy_free(&net->toy);
    return expect(count_out(net) == 0, "every buffer went back", err);
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

/* One rank: of several, one may hear of another's failure first. */
Test(unit_lenders, a_collective_without_a_buffer_fails_and_names_its_unit)
{
    expect_test(1, fail_gather);
    expect_test(1, fail_input);
    expect_test(1, fail_output);
}
