/*
 * All collectives over the fake NCCL give what a model of one rank gives, bit for bit; results may be
 * pending, calls compared, and the library old.
 */
#include "tests/nccl/nccl_ranks.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "runtime/comm_nccl/comm_nccl.h"

#include "tests/support/rounds/comm_rounds.h"

enum { DEADLINE_MS = 60000, FACTORS = 160 };

static const fsdp_dtype dtypes[] = {FSDP_F32, FSDP_BF16, FSDP_F16, FSDP_F64, FSDP_I64,
                                    FSDP_I32, FSDP_I8,   FSDP_U64, FSDP_U32, FSDP_U8};

/* In place and not, even and uneven, one of them empty. */
static fsdp_status run_shapes(fsdp_comm *comm, comm_case one, fsdp_error *err)
{
    const bool can_be_uneven = one.kind == FSDP_ALL_GATHER || one.kind == FSDP_REDUCE_SCATTER;
    for (int shape = 0; shape < 6; shape++) {
        one.is_in_place = shape % 2;
        one.is_uneven = shape / 2 == 1;
        one.count = shape / 2 == 2 ? 0 : 37;
        one.seed++;
        if ((one.is_uneven && !can_be_uneven) || (one.is_in_place && one.kind == FSDP_ALL_TO_ALL))
            continue;
        FSDP_TRY(run_comm_case(comm, &one, err));
    }
    return FSDP_OK;
}

static fsdp_status run_dtype(fsdp_comm *comm, fsdp_dtype dtype, fsdp_stream *stream,
                             fsdp_error *err)
{
    const bool is_float = fsdp_dtype_describe(dtype)->is_float;
    for (int kind = FSDP_ALL_GATHER; kind <= FSDP_ALL_TO_ALL; kind++)
        for (int op = FSDP_REDUCE_SUM; op <= FSDP_REDUCE_PREMUL_SUM; op++) {
            bool reduces = kind == FSDP_REDUCE_SCATTER || kind == FSDP_ALL_REDUCE;
            bool is_there =
                is_float ? op != FSDP_REDUCE_MAX : op == FSDP_REDUCE_SUM || op == FSDP_REDUCE_MAX;
            comm_case one = {.kind = (fsdp_collective_kind)kind,
                             .dtype = dtype,
                             .op = (fsdp_reduce_op)op,
                             .factor = 0.5,
                             .root = fsdp_comm_size(comm) - 1,
                             .buffers = COMM_PRIVATE,
                             .stream = stream,
                             .seed = (uint64_t)(kind * 100 + op * 10)};
            if (reduces ? is_there : op == FSDP_REDUCE_SUM)
                FSDP_TRY(run_shapes(comm, one, err));
        }
    return FSDP_OK;
}

/* More factors than are kept. */
static fsdp_status run_factors(nccl_rank *rank, fsdp_error *err)
{
    comm_case one = {.kind = FSDP_ALL_REDUCE,
                     .dtype = FSDP_F32,
                     .op = FSDP_REDUCE_PREMUL_SUM,
                     .count = 9,
                     .buffers = COMM_PRIVATE,
                     .stream = rank->stream};
    for (int i = 0; i < FACTORS; i++) {
        one.factor = 1.0 / (1 + i % (FACTORS / 2));
        for (int wide = 0; wide < 2; wide++) {
            one.dtype = wide ? FSDP_F64 : FSDP_F32;
            FSDP_TRY(run_comm_case(rank->comm, &one, err));
        }
    }
    return FSDP_OK;
}

/* Host memory goes another way, and so do its errors and its NaN. */
static fsdp_status meet(const nccl_rank *rank, fsdp_error *err)
{
    double one = 1, all = 0;
    const fsdp_collective call = {
        .kind = FSDP_ALL_REDUCE, .dtype = FSDP_F64, .in = &one, .out = &all, .count = 1};
    return fsdp_comm_run(rank->comm, &call, err);
}

/* A block is registered with every group that there is: so many are they, with their members. */
static fsdp_status register_with_all(const nccl_rank *rank, int wanted, fsdp_error *err)
{
    FSDP_TRY(meet(rank, err));
    int before = fake_nccl_of()->registrations();
    FSDP_TRY(meet(rank, err));
    float *data = fsdp_comm_alloc(rank->comm, 8 * sizeof *data);
    FSDP_TRY(meet(rank, err));
    expect(!data || fake_nccl_of()->registrations() - before == wanted, "all groups know a block",
           "another number of them");
    FSDP_TRY(meet(rank, err));
    fsdp_comm_dealloc(rank->comm, data);
    return FSDP_OK;
}

/* Ranks 0, 2, ... of the world in another order, and all of them once more. Both groups know the blocks that
 * every rank has. */
static fsdp_status run_groups(nccl_rank *rank, int blocks, fsdp_error *err)
{
    int some[NCCL_MOST_RANKS], n = 0, all[NCCL_MOST_RANKS] = {0, 1, 2, 3, 4, 5, 6, 7};
    for (int i = rank->size - 1; i >= 0; i--)
        if (i % 2 == 0)
            some[n++] = i;
    fsdp_comm *groups[2] = {NULL, NULL};
    const fsdp_transport_ops *ops = rank->transport->ops;
    const int members = rank->size + (n > 1 ? n : 0);
    FSDP_TRY(meet(rank, err)); /* all have their blocks ... */
    int before = fake_nccl_of()->registrations();
    FSDP_TRY(meet(rank, err)); /* ... and know how many registrations there are */
    fsdp_status status = ops->comm_create(rank->transport, some, n, 1, &groups[0], err);
    if (status == FSDP_OK)
        status = ops->comm_create(rank->transport, all, rank->size, 1, &groups[1], err);
    if (status == FSDP_OK)
        status = meet(rank, err);
    expect(fake_nccl_of()->registrations() - before == blocks * members,
           "new groups know the blocks that are there", "another number of them");
    if (status == FSDP_OK)
        status = register_with_all(rank, rank->size + members, err);
    for (int i = 0; i < 2 && status == FSDP_OK; i++)
        if (groups[i] && fsdp_comm_size(groups[i]) > 1)
            status = run_dtype(groups[i], FSDP_BF16, rank->stream, err);
    fsdp_comm_free(groups[0]);
    fsdp_comm_free(groups[1]);
    return status;
}

/* Pairs that are made at once: the first and the last rank, and so on. One in the middle is in none. */
static fsdp_status run_pairs(nccl_rank *rank, fsdp_error *err)
{
    const int count = rank->size / 2, first = rank->rank < count ? rank->rank : -1;
    int pairs[NCCL_MOST_RANKS];
    fsdp_comm *own = NULL;
    for (int i = 0; i < count; i++) {
        pairs[2 * i] = rank->size - 1 - i;
        pairs[2 * i + 1] = i;
    }
    FSDP_TRY(meet(rank, err)); /* all have come ... */
    int before = fake_nccl_of()->splits();
    FSDP_TRY(meet(rank, err)); /* ... and know how many splits there are */
    FSDP_TRY(rank->transport->ops->comm_create(rank->transport, pairs, 2, count, &own, err));
    FSDP_TRY(meet(rank, err));
    if (fake_nccl_of()->plan.version == 0)
        expect(fake_nccl_of()->splits() - before == 2 * count, "a split per member", "others");
    expect((own == NULL) == (rank->rank == count && rank->size % 2 == 1), "the middle is in none",
           "it is in one");
    if (first >= 0)
        expect(fsdp_comm_ranks(own)[0] == rank->size - 1 - first && fsdp_comm_rank(own) == 1,
               "the pair of a rank", "another one");
    fsdp_status status = own ? run_dtype(own, FSDP_F32, rank->stream, err) : FSDP_OK;
    fsdp_comm_free(own);
    return status;
}

/* Groups that are made after a block, and closed before it. */
static fsdp_status run_groups_with_memory(nccl_rank *rank, fsdp_error *err)
{
    float *data = fsdp_comm_alloc(rank->comm, 8 * sizeof *data);
    FSDP_TRY(meet(rank, err)); /* all have theirs ... */
    int alive = fake_nccl_of()->alive();
    FSDP_TRY(meet(rank, err)); /* ... and know how many registrations there are */
    FSDP_TRY(run_groups(rank, data ? 1 : 0, err));
    FSDP_TRY(meet(rank, err)); /* no rank has a group of these any more */
    expect(!data || fake_nccl_of()->alive() == alive,
           "groups that were closed leave the others alone", "another number of registrations");
    FSDP_TRY(meet(rank, err));
    fsdp_comm_dealloc(rank->comm, data);
    return FSDP_OK;
}

/* --- calls that are not done ---------------------------------------------------------------------- */

typedef struct next_call {
    nccl_group *group;
    uint64_t number;
    atomic_bool is_given;
} next_call;

static void *give_next(void *context)
{
    next_call *call = context;
    fsdp_error err = {0};
    const fsdp_comm_header header = {0};
    expect(fsdp_nccl_begin(call->group, &header, &call->number, &err) == FSDP_OK, "a call",
           err.text);
    atomic_store(&call->is_given, true);
    return NULL;
}

/* The places of all calls are taken: the next one waits for the oldest. */
static fsdp_status run_ahead(nccl_rank *rank, fsdp_error *err)
{
    next_call call = {.group = rank->comm->backend};
    const struct timespec moment = {.tv_nsec = 50000000};
    pthread_t thread;
    FSDP_TRY(rank->device->ops->sync(rank->device->ops->record(rank->stream), err));
    for (int i = 0; i < FSDP_NCCL_PENDING; i++)
        give_next(&call);
    const uint64_t last = call.number;
    atomic_store(&call.is_given, false);
    expect(pthread_create(&thread, NULL, give_next, &call) == 0, "a thread", "none");
    nanosleep(&moment, NULL);
    expect(!atomic_load(&call.is_given), "a call waits for the oldest", "it is given");
    for (uint64_t i = 1; i <= FSDP_NCCL_PENDING; i++)
        atomic_store(&call.group->flags[(last + i) % FSDP_NCCL_PENDING], 1);
    pthread_join(thread, NULL);
    atomic_store(&call.group->flags[call.number % FSDP_NCCL_PENDING], 1);
    return FSDP_OK;
}

static fsdp_status run_host_calls(nccl_rank *rank, fsdp_error *err)
{
    double norm = rank->rank, largest = -1;
    const fsdp_collective call = {.kind = FSDP_ALL_REDUCE,
                                  .dtype = FSDP_F64,
                                  .in = &norm,
                                  .out = &largest,
                                  .count = 1,
                                  .op = FSDP_REDUCE_MAX};
    FSDP_TRY(fsdp_comm_run(rank->comm, &call, err));
    expect(largest == rank->size - 1, "the largest number", "another one");
    return run_dtype(rank->comm, FSDP_F32, NULL, err);
}

static fsdp_status run_memory(nccl_rank *rank, fsdp_error *err)
{
    const bool can = fake_nccl_of()->plan.version == 0;
    float *data = fsdp_comm_alloc(rank->comm, 8 * sizeof *data);
    const fsdp_collective call = {.kind = FSDP_ALL_REDUCE,
                                  .dtype = FSDP_F32,
                                  .in = data,
                                  .out = data,
                                  .count = 8,
                                  .stream = rank->stream};
    expect(can == (data != NULL), "memory of NCCL, if it has such", data ? "some" : "none");
    if (!data)
        return FSDP_OK;
    for (int i = 0; i < 8; i++)
        data[i] = 1;
    FSDP_TRY(fsdp_comm_run(rank->comm, &call, err));
    FSDP_TRY(rank->device->ops->sync(rank->device->ops->record(rank->stream), err));
    expect(data[7] == (float)rank->size, "a sum in memory of NCCL", "another one");
    fsdp_comm_dealloc(rank->comm, data);
    return FSDP_OK;
}

static fsdp_status run_all(nccl_rank *rank, fsdp_error *err)
{
    for (size_t i = 0; i < sizeof dtypes / sizeof *dtypes; i++)
        FSDP_TRY(run_dtype(rank->comm, dtypes[i], rank->stream, err));
    FSDP_TRY(run_factors(rank, err));
    FSDP_TRY(run_memory(rank, err));
    FSDP_TRY(run_groups_with_memory(rank, err));
    FSDP_TRY(run_pairs(rank, err));
    FSDP_TRY(run_ahead(rank, err));
    return run_host_calls(rank, err);
}

static void expect_well(const nccl_world *world)
{
    nccl_rank ranks[NCCL_MOST_RANKS];
    run_nccl_world(world, ranks);
    for (int i = 0; i < world->size; i++)
        expect(ranks[i].status == FSDP_OK, "every rank ends well", ranks[i].err.text);
}

/* NCCL does not get a call that it cannot do. */
static fsdp_status refuse(nccl_rank *rank, fsdp_error *err)
{
    const fsdp_dtype *dtype = rank->context;
    unsigned char data[64] = {0};
    const fsdp_collective call = {.kind = FSDP_ALL_REDUCE,
                                  .dtype = *dtype,
                                  .in = data,
                                  .out = data,
                                  .count = 4,
                                  .op = *dtype == FSDP_F32 ? FSDP_REDUCE_MAX : FSDP_REDUCE_SUM,
                                  .stream = rank->stream};
    return fsdp_comm_run(rank->comm, &call, err);
}

static void expect_refused(fsdp_dtype dtype, const char *text)
{
    nccl_rank ranks[NCCL_MOST_RANKS];
    const nccl_world world = {
        .size = 2, .deadline_ms = DEADLINE_MS, .body = refuse, .context = &dtype};
    run_nccl_world(&world, ranks);
    for (int i = 0; i < 2; i++)
        expect(ranks[i].status == FSDP_ERR_USAGE && strstr(ranks[i].err.text, text), text,
               ranks[i].err.text);
}

int main(int argc, char **argv)
{
    static const int sizes[] = {2, 3, 5};
    fake_nccl_control *fake = fake_nccl_of();
    const bool is_old = argc > 1 && strcmp(argv[1], "old") == 0;
    fake->plan.version = is_old ? 21800 : 0;
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        for (int polls = 0; polls <= 3; polls += 3) {
            fake->plan.polls = polls;
            expect_well(&(nccl_world){
                .size = sizes[i], .deadline_ms = DEADLINE_MS, .check = polls > 0, .body = run_all});
        }
    expect((fake->splits() > 0) == !is_old, "groups are split from that of all ranks",
           "the opposite");
    expect(fake->launch_threads() == 0, "no call makes NCCL start a thread", "threads");
    expect((fake->registrations() > 0) == !is_old, "memory is registered", "the opposite");
    expect_refused(FSDP_F32, "NCCL's maximum of f32 may lose a NaN");
    expect_refused(FSDP_I16, "NCCL does not reduce i16");
    return 0;
}
