/* Collectives between threads: values, groups, wrong calls; ranks that abort, leave or stall. */
#include <criterion/criterion.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include "base/core/mem.h"
#include "runtime/comm_shared/transport_shm.h"
#include "runtime/comm_shared/shared_transports.h"
#include "statedict/ctl/ctl_backend.h"
#include "tests/support/rounds/comm_rounds.h"
#include "tests/support/ranks/rank_threads.h"
#include "tests/support/sample_state.h"

enum { MANY = 128, LONG_MS = 60000, SHORT_MS = 300 };

static void expect_well(int n, rank_thread_body body, void *user)
{
    fsdp_error err = {0};
    fsdp_status status = run_rank_threads_well(n, body, user, &err);
    cr_assert_eq(status, FSDP_OK, "%d ranks: %s", n, err.text);
}

/* --- values ----------------------------------------------------------------------------------- */

static const fsdp_dtype reducible[] = {FSDP_F32, FSDP_BF16, FSDP_F16, FSDP_F64, FSDP_I64, FSDP_I32,
                                       FSDP_I16, FSDP_I8,   FSDP_U64, FSDP_U32, FSDP_U16, FSDP_U8};
enum { REDUCIBLE = sizeof reducible / sizeof *reducible };

typedef struct case_list {
    comm_case cases[256];
    int count;
} case_list;

static void add_case(case_list *list, comm_case one)
{
    cr_assert_lt(list->count, 256);
    one.seed = (uint64_t)list->count + 1;
    list->cases[list->count++] = one;
}

static fsdp_status run_list(rank_thread *rank, fsdp_error *err)
{
    const case_list *list = rank->user;
    for (int i = 0; i < list->count; i++)
        FSDP_TRY(run_comm_case(rank->comm, &list->cases[i], err));
    return FSDP_OK;
}

static void run_list_everywhere(const case_list *list)
{
    static const int sizes[] = {1, 2, 3, 5, 8};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        expect_well(sizes[i], run_list, (void *)list);
}

Test(comm, every_reduction_of_every_dtype_is_the_sum_in_rank_order)
{
    case_list list = {.count = 0};
    for (int i = 0; i < REDUCIBLE; i++) {
        bool is_float = fsdp_dtype_describe(reducible[i])->is_float;
        for (int op = FSDP_REDUCE_SUM; op <= FSDP_REDUCE_PREMUL_SUM; op++) {
            bool scales = op == FSDP_REDUCE_AVG || op == FSDP_REDUCE_PREMUL_SUM;
            comm_case one = {.dtype = reducible[i], .op = (fsdp_reduce_op)op, .factor = 0.7};
            if (scales && !is_float)
                continue;
            one.count = 37;
            one.kind = FSDP_ALL_REDUCE;
            add_case(&list, one);
            one.is_in_place = true;
            add_case(&list, one);
            one.kind = FSDP_REDUCE_SCATTER;
            add_case(&list, one);
            one.is_uneven = true;
            add_case(&list, one);
        }
    }
    run_list_everywhere(&list);
}

Test(comm, elements_of_every_dtype_arrive_where_they_belong)
{
    static const int64_t counts[] = {0, 1, 37, 5000};
    case_list list = {.count = 0};
    for (int dtype = FSDP_F64; dtype < FSDP_Q4_0; dtype++) { /* training has no blocks */
        for (int kind = FSDP_ALL_GATHER; kind <= FSDP_ALL_TO_ALL; kind++) {
            if (kind == FSDP_REDUCE_SCATTER || kind == FSDP_ALL_REDUCE)
                continue;
            comm_case one = {.kind = (fsdp_collective_kind)kind, .dtype = (fsdp_dtype)dtype};
            one.count = counts[dtype % 4];
            one.is_in_place = dtype % 2 && kind != FSDP_ALL_TO_ALL;
            one.is_uneven = dtype % 3 == 0 && kind == FSDP_ALL_GATHER;
            add_case(&list, one);
        }
    }
    run_list_everywhere(&list);
}

static fsdp_status run_rounds(rank_thread *rank, fsdp_error *err)
{
    return run_comm_rounds(rank->comm, rank->user, err);
}

Test(comm, random_calls_on_every_number_of_ranks)
{
    for (int n = 1; n <= 8; n++) {
        comm_rounds rounds = {
            .seed = (uint64_t)n, .rounds = test_sample_of(30, 3), .max_count = 10000};
        expect_well(n, run_rounds, &rounds);
    }
}

Test(comm, hundred_and_twenty_eight_ranks)
{
    comm_rounds rounds = {.seed = 128, .rounds = test_sample_of(4, 2), .max_count = 100};
    expect_well(MANY, run_rounds, &rounds);
}

/* Large all-reduces are folded in slices; the sums of these values depend on their order. */
static fsdp_status compare_with_scatter_and_gather(rank_thread *rank, fsdp_error *err)
{
    enum { PART = 400000 };
    int64_t all = (int64_t)PART * rank->size;
    size_t size = (size_t)all * sizeof(float);
    float *in = malloc(size), *once = malloc(size), *twice = malloc(size);
    for (int64_t i = 0; i < all; i++)
        in[i] = (float)((i * 7919 + rank->rank * 104729) % 100003) * (i % 3 ? 1e-3f : 1e3f);
    fsdp_collective reduce = {.kind = FSDP_ALL_REDUCE,
                              .dtype = FSDP_F32,
                              .in = in,
                              .out = once,
                              .count = all,
                              .op = FSDP_REDUCE_AVG};
    fsdp_collective scatter = reduce, gather = reduce;
    scatter.kind = FSDP_REDUCE_SCATTER;
    scatter.count = gather.count = PART;
    scatter.out = twice + (size_t)rank->rank * PART;
    gather.kind = FSDP_ALL_GATHER;
    gather.in = scatter.out;
    gather.out = twice;
    fsdp_status status = fsdp_comm_run(rank->comm, &reduce, err);
    if (status == FSDP_OK)
        status = fsdp_comm_run(rank->comm, &scatter, err);
    if (status == FSDP_OK)
        status = fsdp_comm_run(rank->comm, &gather, err);
    if (status == FSDP_OK && memcmp(once, twice, size) != 0)
        status = fsdp_fail(err, FSDP_ERR_INTERNAL, "they differ");
    free(in);
    free(once);
    free(twice);
    return status;
}

Test(comm, all_reduce_equals_reduce_scatter_and_all_gather)
{
    for (int n = 2; n <= 4; n++)
        expect_well(n, compare_with_scatter_and_gather, NULL);
}

/* 1e8 + 1 - 1e8 is 0 in f32, and 1e8 - 1e8 + 1 is 1: the order is that of ranks. */
static fsdp_status sum_in_order(rank_thread *rank, fsdp_error *err)
{
    static const float values[] = {1e8f, 1, -1e8f};
    float out = 5;
    fsdp_collective call = {.kind = FSDP_ALL_REDUCE,
                            .dtype = FSDP_F32,
                            .in = &values[rank->rank],
                            .out = &out,
                            .count = 1};
    FSDP_TRY(fsdp_comm_run(rank->comm, &call, err));
    return out == 0 ? FSDP_OK : fsdp_fail(err, FSDP_ERR_INTERNAL, "the sum is %g", out);
}

Test(comm, sums_are_in_rank_order)
{
    expect_well(3, sum_in_order, NULL);
}

/* Maps the same pages repeatedly, so that 2^31 elements need little memory. */
static unsigned char *map_repeated(size_t size)
{
    const size_t once = 8 << 20;
    int fd = memfd_create("test", 0);
    cr_assert_eq(ftruncate(fd, (off_t)once), 0);
    size_t room = (size + once - 1) / once * once;
    unsigned char *all = mmap(NULL, room, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    for (size_t at = 0; at < room; at += once) {
        bool is_last = at + once >= room;
        int flags = MAP_FIXED | (is_last ? MAP_PRIVATE : MAP_SHARED);
        cr_assert_neq(mmap(all + at, once, PROT_READ | PROT_WRITE, flags, fd, 0), MAP_FAILED);
    }
    close(fd);
    return all;
}

static fsdp_status broadcast_much(rank_thread *rank, fsdp_error *err)
{
    int64_t count = ((int64_t)1 << 31) + 16;
    unsigned char *data = map_repeated((size_t)count);
    fsdp_collective call = {.kind = FSDP_BROADCAST,
                            .dtype = FSDP_U8,
                            .in = data,
                            .out = data,
                            .count = count,
                            .root = 1};
    for (int i = 0; i < 16; i++)
        data[count - 16 + i] = (unsigned char)(rank->rank * 100 + i);
    fsdp_status status = fsdp_comm_run(rank->comm, &call, err);
    for (int i = 0; status == FSDP_OK && i < 16; i++) {
        if (data[count - 16 + i] != 100 + i)
            status = fsdp_fail(err, FSDP_ERR_INTERNAL, "byte %d of the last is wrong", i);
    }
    munmap(data, (size_t)count);
    return status;
}

Test(comm, counts_over_two_to_the_31)
{
    expect_well(2, broadcast_much, NULL);
}

Test(comm, one_rank_alone)
{
    fsdp_transport *transport;
    fsdp_comm *comm;
    fsdp_error err = {0};
    const int ranks[] = {0};
    cr_assert_eq(fsdp_transport_self(&transport, &err), FSDP_OK);
    cr_assert_eq(transport->ops->comm_create(transport, ranks, 1, 1, &comm, &err), FSDP_OK);
    cr_assert_str_eq(fsdp_comm_backend(comm), "self");
    comm_rounds rounds = {.seed = 3, .rounds = 100, .max_count = 3000};
    cr_assert_eq(run_comm_rounds(comm, &rounds, &err), FSDP_OK, "%s", err.text);

    fsdp_collective wrong = {.kind = FSDP_BROADCAST, .dtype = FSDP_F32, .count = -1};
    fsdp_error why = {.status = FSDP_ERR_IO, .text = "why not"};
    cr_assert_eq(fsdp_comm_run(comm, &wrong, &err), FSDP_ERR_USAGE);
    fsdp_comm_abort(comm, &why);
    wrong.count = 0;
    cr_assert_eq(fsdp_comm_run(comm, &wrong, &err), FSDP_ERR_USAGE);
    cr_assert(strstr(err.text, "broadcast of"), "%s", err.text);
    fsdp_comm_free(comm);
    transport->ops->close(transport);
}

/* --- back ends without some collectives ------------------------------------------------------- */

static fsdp_status run_without_abilities(rank_thread *rank, fsdp_error *err)
{
    const fsdp_transport_ops *ops = rank->transport->ops;
    fsdp_transport_ops plain = *ops;
    plain.abilities = 0;
    rank->transport->ops = &plain;
    fsdp_status status = run_list(rank, err);
    rank->transport->ops = ops;
    return status;
}

Test(comm, a_back_end_that_only_adds_gives_the_same_bits)
{
    case_list list = {.count = 0};
    for (int i = 0; i < 4; i++) {
        for (int op = FSDP_REDUCE_SUM; op <= FSDP_REDUCE_PREMUL_SUM; op++) {
            comm_case one = {.dtype = reducible[i],
                             .op = (fsdp_reduce_op)op,
                             .factor = 0.1,
                             .count = 333,
                             .kind = FSDP_ALL_REDUCE};
            add_case(&list, one);
            one.is_in_place = true;
            add_case(&list, one);
            one.kind = FSDP_REDUCE_SCATTER;
            one.is_uneven = op % 2;
            add_case(&list, one);
        }
    }
    for (int n = 2; n <= 7; n += 5)
        expect_well(n, run_without_abilities, &list);
}

/* --- wrong calls ------------------------------------------------------------------------------ */

enum { ROOM = 64 };

typedef struct wrong_call {
    fsdp_collective call; /* of rank 1; the test fills in the buffers */
    const char *text;
} wrong_call;

static fsdp_status run_with_buffers(fsdp_comm *comm, fsdp_collective call, fsdp_error *err)
{
    double in[ROOM] = {0}, out[ROOM] = {0};
    call.in = in;
    call.out = out;
    return fsdp_comm_run(comm, &call, err);
}

static fsdp_status differ(rank_thread *rank, fsdp_error *err)
{
    const wrong_call *wrong = rank->user;
    fsdp_collective call = {
        .kind = FSDP_REDUCE_SCATTER, .dtype = FSDP_F32, .count = 4, .unit = "layers.0"};
    return run_with_buffers(rank->comm, rank->rank == 1 ? wrong->call : call, err);
}

static void expect_same_error(const rank_thread *ranks, int n, fsdp_status status, const char *text)
{
    for (int i = 0; i < n; i++) {
        cr_assert_eq(ranks[i].status, status, "rank %d: %d %s", i, (int)ranks[i].status,
                     ranks[i].err.text);
        cr_assert(strstr(ranks[i].err.text, text), "rank %d: '%s' has no '%s'", i,
                  ranks[i].err.text, text);
        cr_assert_str_eq(ranks[i].err.text, ranks[0].err.text);
    }
}

Test(comm, different_calls_are_an_error_on_all_ranks_that_names_both)
{
    static const int64_t counts[] = {4, 4, 4};
#define SCATTER .kind = FSDP_REDUCE_SCATTER, .dtype = FSDP_F32, .count = 4, .unit = "layers.0"
    const wrong_call all[] = {
        {{.kind = FSDP_ALL_GATHER, .dtype = FSDP_F32, .count = 4, .unit = "layers.0"},
         "rank 1 makes all_gather of 4 f32 for layers.0 (call 1), "
         "rank 0 reduce_scatter of 4 f32 for layers.0 (call 1)"},
        {{.kind = FSDP_REDUCE_SCATTER, .dtype = FSDP_BF16, .count = 4, .unit = "layers.0"},
         "reduce_scatter of 4 bf16"},
        {{.kind = FSDP_REDUCE_SCATTER, .dtype = FSDP_F32, .count = 5, .unit = "layers.0"},
         "reduce_scatter of 5 f32"},
        {{.kind = FSDP_REDUCE_SCATTER, .dtype = FSDP_F32, .count = 4, .unit = "layers.1"},
         "for layers.1"},
        {{.kind = FSDP_REDUCE_SCATTER, .dtype = FSDP_F32, .count = 4}, "4 f32 (call 1), rank 0"},
        {{.kind = FSDP_REDUCE_SCATTER,
          .dtype = FSDP_F32,
          .count = 4,
          .unit = "language_model.model.decoder.layers.11.mixture.experts.11.projection"},
         "for language_model.model.decoder.l....mixture.experts.11.projection (call 1), rank 0"},
        {{SCATTER, .op = FSDP_REDUCE_MAX}, "reduce_scatter (max) of"},
        {{SCATTER, .op = FSDP_REDUCE_PREMUL_SUM, .factor = 2}, "(premul_sum, 2)"},
        {{SCATTER, .counts = counts}, "reduce_scatter of 12 f32 in uneven parts"},
        {{.kind = FSDP_BROADCAST, .dtype = FSDP_F32, .count = 4, .root = 2}, "from member 2"},
    };
#undef SCATTER
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        rank_thread ranks[3];
        fsdp_error err = {0};
        cr_assert(run_rank_threads(3, LONG_MS, differ, (void *)&all[i], ranks, &err));
        expect_same_error(ranks, 3, FSDP_ERR_USAGE, all[i].text);
        cr_assert_eq(ranks[0].err.rank, 1);
    }
}

static fsdp_status send_other_counts(rank_thread *rank, fsdp_error *err)
{
    int64_t counts[] = {1, 2, 3}, expected[] = {rank->rank + 1, rank->rank + 1, rank->rank + 1};
    if (rank->rank == 2)
        expected[1] = 4;
    fsdp_collective call = {
        .kind = FSDP_ALL_TO_ALL, .dtype = FSDP_U8, .counts = counts, .out_counts = expected};
    return run_with_buffers(rank->comm, call, err);
}

Test(comm, all_to_all_with_counts_that_do_not_fit_names_sender_and_receiver)
{
    rank_thread ranks[3];
    fsdp_error err = {0};
    cr_assert(run_rank_threads(3, LONG_MS, send_other_counts, NULL, ranks, &err));
    expect_same_error(ranks, 3, FSDP_ERR_USAGE,
                      "rank 1 sends 3 elements to rank 2, which expects 4 from it");
}

/* Makes the call with the test's wrong buffers. */
static fsdp_status call_wrongly(rank_thread *rank, fsdp_error *err)
{
    const wrong_call *wrong = rank->user;
    float room[8] = {0};
    fsdp_collective call = {.kind = FSDP_BROADCAST, .dtype = FSDP_F32, .in = room, .out = room};
    return fsdp_comm_run(rank->comm, rank->rank == 1 ? &wrong->call : &call, err);
}

Test(comm, wrong_arguments_are_told_to_all_ranks)
{
    static float data[32];
    static const int64_t negative[] = {1, -2}, huge[] = {INT64_MAX, 2};
    static const fsdp_comm_view view = {0};
    const wrong_call all[] = {
        {{.kind = 0, .dtype = FSDP_F32}, "no collective has the number 0"},
        {{.kind = 9, .dtype = FSDP_F32}, "no collective has the number 9"},
        {{.kind = FSDP_BROADCAST, .dtype = 77}, "no dtype has the number 77"},
        {{.kind = FSDP_BROADCAST, .dtype = FSDP_F32, .root = 2}, "root 2 is not one of 2 ranks"},
        {{.kind = FSDP_ALL_REDUCE, .dtype = FSDP_C64}, "c64 cannot be reduced"},
        {{.kind = FSDP_ALL_REDUCE, .dtype = FSDP_I32, .op = FSDP_REDUCE_AVG},
         "i32 has no averages"},
        {{.kind = FSDP_ALL_REDUCE, .dtype = FSDP_F32, .op = 8}, "no operation has the number 8"},
        {{.kind = FSDP_ALL_REDUCE, .dtype = FSDP_F32, .count = -1}, "a count is -1"},
        {{.kind = FSDP_ALL_GATHER, .dtype = FSDP_F32, .counts = negative}, "a count is -2"},
        {{.kind = FSDP_ALL_GATHER, .dtype = FSDP_F32, .counts = huge}, "its size overflows"},
        {{.kind = FSDP_ALL_GATHER, .dtype = FSDP_F32, .count = INT64_MAX / 4},
         "its size overflows"},
        {{.kind = FSDP_BROADCAST, .dtype = FSDP_F32, .view = &view},
         "only all_gather and reduce_scatter have a view"},
        {{.kind = FSDP_ALL_REDUCE, .dtype = FSDP_F32, .counts = huge}, "no uneven counts"},
        {{.kind = FSDP_ALL_TO_ALL, .dtype = FSDP_F32, .counts = huge}, "out_counts are needed"},
        {{.kind = FSDP_ALL_REDUCE, .dtype = FSDP_F32, .count = 1}, "'in' is missing"},
        {{.kind = FSDP_ALL_REDUCE, .dtype = FSDP_F32, .count = 1, .in = data}, "'out' is missing"},
        {{.kind = FSDP_ALL_REDUCE, .dtype = FSDP_F32, .count = 9, .in = data, .out = data + 8},
         "overlap"},
        {{.kind = FSDP_ALL_GATHER, .dtype = FSDP_F32, .count = 9, .in = data, .out = data},
         "overlap"},
        {{.kind = FSDP_REDUCE_SCATTER, .dtype = FSDP_F32, .count = 9, .in = data, .out = data + 8},
         "overlap"},
    };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        rank_thread ranks[2];
        fsdp_error err = {0};
        cr_assert(run_rank_threads(2, LONG_MS, call_wrongly, (void *)&all[i], ranks, &err));
        for (int r = 0; r < 2; r++) {
            cr_assert_eq(ranks[r].status, FSDP_ERR_USAGE);
            cr_assert(strstr(ranks[r].err.text, all[i].text), "%s", ranks[r].err.text);
            cr_assert_eq(ranks[r].err.rank, 1);
        }
        cr_assert_eq(strncmp(ranks[0].err.text, "rank 1: ", 8), 0, "%s", ranks[0].err.text);
        if (all[i].call.kind == 0) /* not reported as another call */
            cr_assert_str_eq(ranks[1].err.text, all[i].text);
    }
}

/* --- groups ----------------------------------------------------------------------------------- */

static fsdp_status make_rows_and_columns(rank_thread *rank, fsdp_error *err)
{
    fsdp_status status = FSDP_OK;
    fsdp_comm *own[2] = {NULL, NULL};
    const int rows[] = {0, 1, 2, 3, 4, 5};
    FSDP_TRY(rank->transport->ops->comm_create(rank->transport, rows, 2, 3, &own[0], err));
    for (int i = 0; i < 2; i++) {
        int column[] = {i, i + 2, i + 4};
        fsdp_comm *made = NULL;
        FSDP_TRY(rank->transport->ops->comm_create(rank->transport, column, 3, 1, &made, err));
        own[1] = made ? made : own[1];
    }
    for (int i = 0; i < 2 && status == FSDP_OK; i++) {
        comm_case test = {.kind = FSDP_ALL_REDUCE, .dtype = FSDP_F32, .count = 100, .seed = 4};
        status = run_comm_case(own[i], &test, err);
    }
    if (fsdp_comm_size(own[1]) != 3 || fsdp_comm_ranks(own[1])[2] != rank->rank % 2 + 4 ||
        fsdp_comm_rank(own[1]) != rank->rank / 2)
        status = fsdp_fail(err, FSDP_ERR_INTERNAL, "the column is wrong");
    fsdp_comm_free(own[0]);
    fsdp_comm_free(own[1]);
    return status;
}

Test(comm, groups_of_rows_and_columns)
{
    expect_well(6, make_rows_and_columns, NULL);
}

static fsdp_status make_other_group(rank_thread *rank, fsdp_error *err)
{
    const int pair[] = {0, 1}, other[] = {0, 2};
    fsdp_comm *made = NULL;
    fsdp_status status = rank->transport->ops->comm_create(
        rank->transport, rank->rank == 2 ? other : pair, 2, 1, &made, err);
    fsdp_comm_free(made);
    return status;
}

static fsdp_status make_bad_group(rank_thread *rank, fsdp_error *err)
{
    const int twice[] = {0, 0};
    fsdp_comm *made = NULL;
    return rank->transport->ops->comm_create(rank->transport, twice, 2, 1, &made, err);
}

Test(comm, different_groups_are_an_error_on_all_ranks)
{
    rank_thread ranks[3];
    fsdp_error err = {0};
    cr_assert(run_rank_threads(3, LONG_MS, make_other_group, NULL, ranks, &err));
    expect_same_error(ranks, 3, FSDP_ERR_USAGE,
                      "all ranks must make the same groups in the same order");
    cr_assert(run_rank_threads(3, LONG_MS, make_bad_group, NULL, ranks, &err));
    for (int i = 0; i < 3; i++)
        cr_assert(strstr(ranks[i].err.text, "rank 0 of a group is in it twice"), "%s",
                  ranks[i].err.text);
}

/* --- failures --------------------------------------------------------------------------------- */

static fsdp_status expect_poison(rank_thread *rank, fsdp_status status, fsdp_error *err)
{
    comm_case small = {.kind = FSDP_ALL_GATHER, .dtype = FSDP_U8, .count = 1};
    fsdp_error again = {0};
    for (int i = 0; i < 2; i++) {
        if (run_comm_case(rank->comm, &small, &again) != status || strcmp(again.text, err->text))
            return fsdp_fail(err, FSDP_ERR_INTERNAL, "then it is '%.300s'", again.text);
    }
    return status;
}

static fsdp_status abort_one(rank_thread *rank, fsdp_error *err)
{
    comm_case test = {.kind = FSDP_ALL_REDUCE, .dtype = FSDP_F32, .count = 5000};
    const fsdp_error why = {.status = FSDP_ERR_NO_SPACE, .text = "the disk is full"};
    FSDP_TRY(run_comm_case(rank->comm, &test, err));
    if (rank->rank == 1)
        fsdp_comm_abort(rank->comm, &why);
    return expect_poison(rank, run_comm_case(rank->comm, &test, err), err);
}

Test(comm, an_abort_ends_all_calls_of_all_ranks)
{
    rank_thread ranks[4];
    fsdp_error err = {0};
    cr_assert(run_rank_threads(4, LONG_MS, abort_one, NULL, ranks, &err));
    for (int i = 0; i < 4; i++) {
        cr_assert_eq(ranks[i].status, FSDP_ERR_NO_SPACE);
        cr_assert_eq(ranks[i].err.rank, 1);
        cr_assert_str_eq(ranks[i].err.text,
                         i == 1 ? "the disk is full" : "rank 1: the disk is full");
    }
}

static fsdp_status leave_early(rank_thread *rank, fsdp_error *err)
{
    comm_case test = {.kind = FSDP_ALL_REDUCE, .dtype = FSDP_F32, .count = 5000};
    FSDP_TRY(run_comm_case(rank->comm, &test, err));
    if (rank->rank == 2)
        return FSDP_OK;
    return expect_poison(rank, run_comm_case(rank->comm, &test, err), err);
}

Test(comm, a_rank_that_leaves_is_named)
{
    rank_thread ranks[4];
    fsdp_error err = {0};
    cr_assert(run_rank_threads(4, LONG_MS, leave_early, NULL, ranks, &err));
    for (int i = 0; i < 4; i++) {
        cr_assert_eq(ranks[i].status, i == 2 ? FSDP_OK : FSDP_ERR_PEER, "%s", ranks[i].err.text);
        cr_assert(i == 2 || (strstr(ranks[i].err.text, "rank 2 has left the group") &&
                             strstr(ranks[i].err.text, "all_reduce of 5000 f32 for layers.1")),
                  "%s", ranks[i].err.text);
    }
}

static fsdp_status come_late(rank_thread *rank, fsdp_error *err)
{
    comm_case test = {.kind = FSDP_BROADCAST, .dtype = FSDP_F32, .count = 50};
    if (rank->rank == 1)
        usleep(5 * SHORT_MS * 1000);
    return expect_poison(rank, run_comm_case(rank->comm, &test, err), err);
}

Test(comm, a_rank_that_does_not_come_is_named_at_the_deadline)
{
    rank_thread ranks[3];
    fsdp_error err = {0};
    cr_assert(run_rank_threads(3, SHORT_MS, come_late, NULL, ranks, &err));
    expect_same_error(ranks, 3, FSDP_ERR_PEER,
                      "rank 1 is stuck, or stopped: it did not come within 0.3 s to broadcast of");
}

/* --- naming the awaited rank ------------------------------------------------------------------ */

/* Long enough for threads that wait for a processor. */
enum { PATIENT_MS = 1000 };

static void sleep_ms(int ms)
{
    usleep((unsigned)ms * 1000);
}

/* Rank 0 waits in a column for rank 2, which waits in a row for rank 3, which makes no call. */
static fsdp_status wait_across_groups(rank_thread *rank, fsdp_error *err)
{
    static const int row[] = {2, 3}, column[] = {0, 2};
    const comm_case test = {.kind = FSDP_ALL_REDUCE, .dtype = FSDP_F32, .count = 50};
    fsdp_comm *in_row = NULL, *in_column = NULL;
    const fsdp_transport_ops *ops = rank->transport->ops;
    fsdp_status status = ops->comm_create(rank->transport, row, 2, 1, &in_row, err);
    if (status == FSDP_OK)
        status = ops->comm_create(rank->transport, column, 2, 1, &in_column, err);
    if (status == FSDP_OK && rank->rank >= 2)
        sleep_ms(rank->rank == 2 ? PATIENT_MS / 2 : 2 * PATIENT_MS);
    if (status == FSDP_OK && rank->rank != 1)
        status = run_comm_case(rank->rank == 0 ? in_column : in_row, &test, err);
    fsdp_comm_free(in_row);
    fsdp_comm_free(in_column);
    return status;
}

Test(comm, the_rank_for_whom_all_wait_is_named, .timeout = 60)
{
    rank_thread ranks[4];
    fsdp_error err = {0};
    cr_assert(run_rank_threads(4, PATIENT_MS, wait_across_groups, NULL, ranks, &err));
    cr_expect_eq(ranks[0].err.rank, 3);
    cr_expect(strstr(ranks[0].err.text, "rank 3 is stuck, or stopped: rank 2 waits for it, and "
                                        "did not come within 1 s to all_reduce of 50 f32"),
              "%s", ranks[0].err.text);
    cr_expect(strstr(ranks[2].err.text, "rank 3 is stuck, or stopped: it did not come"), "%s",
              ranks[2].err.text);
}

/* Two ranks, each in another group. */
static fsdp_status wait_in_a_ring(rank_thread *rank, fsdp_error *err)
{
    static const int both[] = {1, 0};
    const comm_case test = {.kind = FSDP_ALL_REDUCE, .dtype = FSDP_F32, .count = 50};
    fsdp_comm *other = NULL;
    fsdp_status status =
        rank->transport->ops->comm_create(rank->transport, both, 2, 1, &other, err);
    if (status == FSDP_OK && rank->rank == 1)
        sleep_ms(PATIENT_MS / 2);
    if (status == FSDP_OK)
        status = run_comm_case(rank->rank == 0 ? rank->comm : other, &test, err);
    fsdp_comm_free(other);
    return status;
}

Test(comm, a_rank_in_another_group_is_not_called_stuck, .timeout = 60)
{
    rank_thread ranks[2];
    fsdp_error err = {0};
    cr_assert(run_rank_threads(2, PATIENT_MS, wait_in_a_ring, NULL, ranks, &err));
    cr_expect(strstr(ranks[0].err.text,
                     "rank 1 waits for rank 0 in all_reduce, in another group: it did not "
                     "come within 1 s to all_reduce of 50 f32"),
              "%s", ranks[0].err.text);
}

/* Rank 0 agrees over the control plane, rank 1 is in a collective; the shorter deadline reports it. */
typedef struct two_planes {
    fsdp_ctl *ctls[2];
    int ctl_ms;
    fsdp_error ctl_error;
} two_planes;

static fsdp_status wait_in_two_planes(rank_thread *rank, fsdp_error *err)
{
    two_planes *planes = rank->user;
    fsdp_ctl *ctl = planes->ctls[rank->rank];
    const comm_case test = {.kind = FSDP_ALL_REDUCE, .dtype = FSDP_F32, .count = 50};
    fsdp_shared_observe(rank->transport, ctl);
    fsdp_ctl_set_deadline(ctl, planes->ctl_ms);
    if (rank->rank == 0)
        (void)!fsdp_ctl_agree(ctl, FSDP_OK, &planes->ctl_error);
    fsdp_status status = rank->rank == 1 ? run_comm_case(rank->comm, &test, err) : FSDP_OK;
    if (rank->rank == 1)
        fsdp_ctl_leave(ctl, err); /* so that rank 0 does not wait for long */
    return status;
}

static void run_two_planes(int ctl_ms, int comm_ms, rank_thread *ranks, fsdp_error *ctl_error)
{
    two_planes planes = {.ctl_ms = ctl_ms};
    fsdp_error err = {0};
    cr_assert_eq(fsdp_ctl_threads(2, planes.ctls, &err), FSDP_OK);
    cr_assert(run_rank_threads(2, comm_ms, wait_in_two_planes, &planes, ranks, &err));
    *ctl_error = planes.ctl_error;
    for (int i = 0; i < 2; i++)
        fsdp_ctl_free(planes.ctls[i]);
}

Test(comm, a_rank_in_a_call_of_the_other_plane_is_not_called_stuck, .timeout = 60)
{
    rank_thread ranks[2];
    fsdp_error ctl_error;
    run_two_planes(20 * PATIENT_MS, PATIENT_MS, ranks, &ctl_error);
    cr_expect(strstr(ranks[1].err.text, "rank 0 is in fsdp_ctl_agree: it did not come within 1 s "
                                        "to all_reduce of 50 f32"),
              "%s", ranks[1].err.text);
    run_two_planes(PATIENT_MS / 2, 20 * PATIENT_MS, ranks, &ctl_error);
    cr_expect_str_eq(ctl_error.text,
                     "rank 1 did not answer within 0.5 s in fsdp_ctl_agree: it is in all_reduce, "
                     "where it waits for rank 0; " FSDP_DEADLINE_HINT);
}

/* --- no memory -------------------------------------------------------------------------------- */

static fsdp_status make_groups_without_memory(rank_thread *rank, fsdp_error *err)
{
    static const int all[] = {1, 0};
    if (rank->rank == 0)
        (void)fsdp_mem_fail_after(*(const int *)rank->user, false);
    fsdp_comm *made = NULL;
    fsdp_status status = rank->transport->ops->comm_create(rank->transport, all, 2, 1, &made, err);
    fsdp_comm_free(made);
    return status;
}

Test(comm, every_allocation_may_fail)
{
    int n = 0;
    for (bool has_failed = true; has_failed && n < 100; n++) {
        fsdp_transport *transports[3];
        (void)fsdp_mem_fail_after(n, false);
        has_failed = fsdp_transport_threads(3, LONG_MS, transports, NULL) != FSDP_OK;
        (void)fsdp_mem_fail_after(-1, false);
        for (int i = 0; i < 3 && !has_failed; i++)
            transports[i]->ops->close(transports[i]);
    }
    cr_assert(n > 10 && n < 100, "%d", n);
    for (n = 0; n < 12; n++) {
        rank_thread ranks[2];
        fsdp_error err = {0};
        cr_assert(run_rank_threads(2, LONG_MS, make_groups_without_memory, &n, ranks, &err));
        (void)fsdp_mem_fail_after(-1, false);
        cr_assert_eq(ranks[0].status, ranks[1].status, "%s | %s", ranks[0].err.text,
                     ranks[1].err.text);
    }
}

/* --- the pool of a segment -------------------------------------------------------------------- */

Test(comm, pool_of_a_segment_joins_what_comes_back)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    unsigned char *memory = fsdp_alloc_pages(1024 * page);
    const shm_segment segment = {.data = memory, .size = 1024 * page};
    shm_pool *pool;
    fsdp_error err = {0};
    cr_assert_eq(fsdp_shm_pool_create(&segment, &pool, &err), FSDP_OK);
    unsigned char *one = fsdp_shm_pool_take(pool, 1), *two = fsdp_shm_pool_take(pool, 600 * page);
    unsigned char *three = fsdp_shm_pool_take(pool, 0);
    cr_assert_eq(one, memory);
    cr_assert_eq(two, memory + page);
    cr_assert_eq(three, memory + 601 * page);
    cr_assert_null(fsdp_shm_pool_take(pool, 423 * page));
    cr_assert_null(fsdp_shm_pool_take(pool, SIZE_MAX));
    fsdp_shm_pool_give(pool, two);
    fsdp_shm_pool_give(pool, memory + 5); /* no block of the pool */
    cr_assert_eq(fsdp_shm_pool_take(pool, 600 * page - 1), two);
    fsdp_shm_pool_give(pool, one);
    fsdp_shm_pool_give(pool, three);
    fsdp_shm_pool_give(pool, two);
    cr_assert_eq(fsdp_shm_pool_take(pool, 1024 * page), memory);
    cr_assert_null(fsdp_shm_pool_take(pool, 1));
    fsdp_shm_pool_free(pool);
    fsdp_free(memory);
}

/* --- segments --------------------------------------------------------------------------------- */

static int next_file(void)
{
    int fd = dup(STDERR_FILENO);
    close(fd);
    return fd;
}

static fsdp_status segment_with_limit(__rlimit_resource_t resource, fsdp_error *err)
{
    shm_segment segment = {0};
    struct rlimit old, none;
    cr_assert_eq(getrlimit(resource, &old), 0);
    none = (struct rlimit){.rlim_cur = 0, .rlim_max = old.rlim_max};
    int before = next_file();
    cr_assert_eq(setrlimit(resource, &none), 0);
    fsdp_status status = fsdp_shm_segment_init(2, &segment, err);
    cr_assert_eq(setrlimit(resource, &old), 0);
    cr_assert_eq(next_file(), before);
    return status;
}

Test(comm, a_segment_for_which_no_byte_is_allowed_leaves_no_file_open)
{
    fsdp_error err = {0};
    cr_assert_eq(segment_with_limit(RLIMIT_FSIZE, &err), FSDP_ERR_NO_SPACE);
    cr_assert_not_null(strstr(err.text, "ulimit -f"));
    cr_assert_eq(segment_with_limit(RLIMIT_AS, &err), FSDP_ERR_LIMIT);
}
