/*
 * See comm_rounds.h. Every rank can compute every other rank's input, and so the expected result.
 */
#include "tests/support/rounds/comm_rounds.h"

#include <stdlib.h>
#include <string.h>

#include "kernels/train/tensor.h"
#include "runtime/device/device.h"

enum { GUARD = 64, GUARD_BYTE = 0xa5 };

typedef struct buffer {
    unsigned char *data, *memory;
    size_t size;
    bool is_pool;
} buffer;

typedef struct one_case {
    fsdp_comm *comm;
    const comm_case *test;
    int rank, n;
    size_t element;
    int64_t *counts, *out_counts;
} one_case;

static uint64_t mix(uint64_t x)
{
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

static uint64_t draw(uint64_t *state)
{
    return mix(*state += 0x9e3779b97f4a7c15u);
}

/* --- inputs ----------------------------------------------------------------------------------- */

static void fill_floats(const one_case *now, int rank, unsigned char *data, int64_t count)
{
    for (int64_t i = 0; i < count; i++) {
        uint64_t bits =
            mix(now->test->seed * 1000003 + (uint64_t)rank * 7919 + (uint64_t)i * 31 + 1);
        /* many exponents, so that the order of a sum changes its bits */
        float value = ((float)(bits >> 40) / 8388608.0f - 1) * (float)(1 << (bits & 7));
        fsdp_rect rect = {.to = data + (size_t)i * now->element,
                          .from = &value,
                          .to_type = now->test->dtype,
                          .from_type = FSDP_F32,
                          .rows = 1,
                          .width = 1};
        fsdp_rects_copy(&rect, 1);
    }
}

static void fill_bytes(const one_case *now, int rank, unsigned char *data, int64_t count)
{
    for (size_t i = 0; i < (size_t)count * now->element; i++)
        data[i] =
            (unsigned char)(mix(now->test->seed * 31 + (uint64_t)rank * 131 + i / 8) >> (i % 8));
}

static bool reduces(const one_case *now)
{
    return now->test->kind == FSDP_REDUCE_SCATTER || now->test->kind == FSDP_ALL_REDUCE;
}

static void fill_input(const one_case *now, int rank, unsigned char *data, int64_t count)
{
    if (reduces(now) && fsdp_dtype_describe(now->test->dtype)->is_float)
        fill_floats(now, rank, data, count);
    else
        fill_bytes(now, rank, data, count);
}

static int64_t pair_count(const one_case *now, int from, int to)
{
    return (int64_t)(mix(now->test->seed + (uint64_t)(from * 1009 + to)) %
                     (uint64_t)(now->test->count + 1));
}

static void set_counts(one_case *now)
{
    for (int i = 0; i < now->n; i++) {
        bool is_pair = now->test->kind == FSDP_ALL_TO_ALL;
        now->counts[i] =
            is_pair
                ? pair_count(now, now->rank, i)
                : (int64_t)(mix(now->test->seed + (uint64_t)i) % (uint64_t)(now->test->count + 1));
        now->out_counts[i] = pair_count(now, i, now->rank);
    }
}

static int64_t sum(const int64_t *counts, int n)
{
    int64_t all = 0;
    for (int i = 0; i < n; i++)
        all += counts[i];
    return all;
}

static int64_t part(const one_case *now, int rank)
{
    return now->test->is_uneven ? now->counts[rank] : now->test->count;
}

static int64_t parts(const one_case *now, int n)
{
    return now->test->is_uneven ? sum(now->counts, n) : now->test->count * n;
}

static int64_t input_count(const one_case *now, int rank)
{
    switch (now->test->kind) {
    case FSDP_ALL_GATHER: return part(now, rank);
    case FSDP_REDUCE_SCATTER: return parts(now, now->n);
    case FSDP_ALL_TO_ALL: {
        int64_t all = 0;
        for (int to = 0; to < now->n; to++)
            all += pair_count(now, rank, to);
        return all;
    }
    default: return now->test->count;
    }
}

static int64_t output_count(const one_case *now)
{
    switch (now->test->kind) {
    case FSDP_ALL_GATHER: return parts(now, now->n);
    case FSDP_REDUCE_SCATTER: return part(now, now->rank);
    case FSDP_ALL_TO_ALL: return sum(now->out_counts, now->n);
    default: return now->test->count;
    }
}

/* --- expected results ------------------------------------------------------------------------- */

static unsigned char *input_of(const one_case *now, int rank)
{
    int64_t count = input_count(now, rank);
    unsigned char *data = malloc((size_t)count * now->element + 1);
    if (data)
        fill_input(now, rank, data, count);
    return data;
}

static void expect_reduced(const one_case *now, unsigned char **inputs, unsigned char *out)
{
    const comm_case *test = now->test;
    int64_t first = test->kind == FSDP_REDUCE_SCATTER ? parts(now, now->rank) : 0;
    const void *from[256];
    for (int i = 0; i < now->n; i++)
        from[i] = inputs[i] + (size_t)first * now->element;
    fsdp_reduction how = {test->op == FSDP_REDUCE_MAX ? FSDP_FOLD_MAX : FSDP_FOLD_SUM,
                          test->op == FSDP_REDUCE_PREMUL_SUM ? test->factor : 1,
                          test->op == FSDP_REDUCE_AVG ? now->n : 1};
    fsdp_tensor_fold(out, from, now->n, test->dtype, (size_t)output_count(now), how);
}

static void expect_moved(const one_case *now, unsigned char **inputs, unsigned char *out)
{
    if (now->test->kind == FSDP_BROADCAST) {
        memcpy(out, inputs[now->test->root], (size_t)now->test->count * now->element);
        return;
    }
    for (int from = 0; from < now->n; from++) {
        int64_t skip = 0, count = part(now, from);
        if (now->test->kind == FSDP_ALL_TO_ALL) {
            count = now->out_counts[from];
            for (int to = 0; to < now->rank; to++)
                skip += pair_count(now, from, to);
        }
        memcpy(out, inputs[from] + (size_t)skip * now->element, (size_t)count * now->element);
        out += (size_t)count * now->element;
    }
}

static fsdp_status check_output(const one_case *now, const unsigned char *out, fsdp_error *err)
{
    size_t size = (size_t)output_count(now) * now->element;
    unsigned char *expected = malloc(size + 1), *inputs[256] = {NULL};
    fsdp_status status = FSDP_OK;
    for (int i = 0; i < now->n; i++)
        inputs[i] = input_of(now, i);
    if (reduces(now))
        expect_reduced(now, inputs, expected);
    else
        expect_moved(now, inputs, expected);
    size_t at = 0;
    while (at < size && out[at] == expected[at])
        at++;
    if (at < size)
        status = fsdp_fail(err, FSDP_ERR_INTERNAL,
                           "kind %d, %s, op %d, count %lld: byte %zu of %zu is wrong",
                           (int)now->test->kind, fsdp_dtype_name(now->test->dtype),
                           (int)now->test->op, (long long)now->test->count, at, size);
    for (int i = 0; i < now->n; i++)
        free(inputs[i]);
    free(expected);
    return status;
}

/* --- views ------------------------------------------------------------------------------------ */

/* True when all ranks add up their views, which must lie in pools. */
static bool adds_up(const one_case *now)
{
    return now->test->kind == FSDP_REDUCE_SCATTER && now->test->buffers != COMM_PRIVATE &&
           (fsdp_comm_abilities(now->comm) & FSDP_COMM_POOL) && now->test->seed % 3 == 0;
}

/* True when some ranks view the parts of a gather, while others get a copy. */
static bool looks(const one_case *now)
{
    return adds_up(now) || (now->test->kind == FSDP_ALL_GATHER &&
                            mix(now->test->seed + (uint64_t)now->rank * 29) % 2 == 0);
}

/* The result of a rank's view: all parts one after the other, or their sum. */
typedef struct seen {
    const one_case *now;
    unsigned char *data;
    int times;
} seen;

static void see(void *user, const void *const *inputs)
{
    seen *mine = user;
    const one_case *now = mine->now;
    mine->times++;
    if (reduces(now)) {
        expect_reduced(now, (unsigned char **)(uintptr_t)inputs, mine->data);
        return;
    }
    for (int i = 0; i < now->n; i++)
        memcpy(mine->data + (size_t)parts(now, i) * now->element, inputs[i],
               (size_t)part(now, i) * now->element);
}

/* --- buffers ---------------------------------------------------------------------------------- */

/* A private buffer begins at an odd element; the guards around it must stay. */
static bool make_buffer(const one_case *now, buffer *made, int64_t count, uint64_t which)
{
    comm_buffers kind = now->test->buffers;
    uint64_t choice = mix(now->test->seed + which * 77 + (uint64_t)now->rank * 13);
    made->size = (size_t)count * now->element;
    made->is_pool = (fsdp_comm_abilities(now->comm) & FSDP_COMM_POOL) &&
                    (kind == COMM_POOL || adds_up(now) || (kind == COMM_MIXED && choice % 2 == 0));
    size_t room = made->size + 3 * GUARD;
    made->memory = made->is_pool ? fsdp_comm_alloc(now->comm, room) : malloc(room);
    if (!made->memory)
        return false;
    memset(made->memory, GUARD_BYTE, room);
    made->data = made->memory + GUARD + now->element;
    return true;
}

static bool is_guarded(const buffer *made)
{
    bool holds = true;
    for (int i = 0; made->memory && i < GUARD; i++)
        holds &= made->memory[i] == GUARD_BYTE && made->data[made->size + (size_t)i] == GUARD_BYTE;
    return holds;
}

static void free_buffer(const one_case *now, buffer *made)
{
    if (made->is_pool)
        fsdp_comm_dealloc(now->comm, made->memory);
    else
        free(made->memory);
}

/* In place, one buffer holds both, the smaller inside the larger. */
static bool make_buffers(const one_case *now, buffer *in, buffer *out)
{
    int64_t in_count = input_count(now, now->rank), out_count = output_count(now);
    size_t place = (size_t)parts(now, now->rank) * now->element;
    if (!now->test->is_in_place)
        return make_buffer(now, in, in_count, 1) && make_buffer(now, out, out_count, 2);
    if (now->test->kind == FSDP_REDUCE_SCATTER) {
        if (!make_buffer(now, in, in_count, 1))
            return false;
        out->data = in->data + place;
        return true;
    }
    if (!make_buffer(now, out, out_count, 2))
        return false;
    in->data = out->data + (now->test->kind == FSDP_ALL_GATHER ? place : 0);
    return true;
}

/* Ranks may start a call or run it at once; both take part in one collective. */
static fsdp_status run_or_start(const one_case *now, const fsdp_collective *call, fsdp_error *err)
{
    fsdp_comm_handle *handle;
    if (call->stream) {
        const fsdp_device_ops *ops = call->stream->device->ops;
        FSDP_TRY(fsdp_comm_run(now->comm, call, err));
        return ops->sync(ops->record(call->stream), err);
    }
    if (mix(now->test->seed + (uint64_t)now->rank * 41) % 3 != 0)
        return fsdp_comm_run(now->comm, call, err);
    FSDP_TRY(fsdp_comm_start(now->comm, call, &handle, err));
    return fsdp_comm_wait(&handle, err);
}

static fsdp_status run_and_look(const one_case *now, fsdp_collective *call, unsigned char *out,
                                fsdp_error *err)
{
    size_t size = (size_t)output_count(now) * now->element;
    seen mine = {.now = now, .data = malloc(size + 1)};
    const fsdp_comm_view view = {.see = see, .context = &mine};
    call->view = &view;
    fsdp_status status = mine.data ? run_or_start(now, call, err)
                                   : fsdp_fail(err, FSDP_ERR_LIMIT, "no memory for the test");
    if (status == FSDP_OK && mine.times != 1)
        status = fsdp_fail(err, FSDP_ERR_INTERNAL, "a call was seen %d times", mine.times);
    if (status == FSDP_OK)
        memcpy(out, mine.data, size);
    free(mine.data);
    return status;
}

static fsdp_status run_call(const one_case *now, buffer *in, buffer *out, fsdp_error *err)
{
    const comm_case *test = now->test;
    bool is_root = test->kind == FSDP_BROADCAST && test->root == now->rank;
    fsdp_collective call = {.kind = test->kind,
                            .dtype = test->dtype,
                            .in = in->data,
                            .out = out->data,
                            .count = test->count,
                            .op = test->op,
                            .factor = test->factor,
                            .root = test->root,
                            .unit = "layers.1",
                            .stream = test->stream};
    if (test->is_uneven || test->kind == FSDP_ALL_TO_ALL)
        call.counts = now->counts;
    if (test->kind == FSDP_ALL_TO_ALL)
        call.out_counts = now->out_counts;
    if (test->kind != FSDP_BROADCAST || is_root)
        fill_input(now, now->rank, in->data, input_count(now, now->rank));
    if (looks(now) && !test->stream)
        FSDP_TRY(run_and_look(now, &call, out->data, err));
    else
        FSDP_TRY(run_or_start(now, &call, err));
    if (!is_guarded(in) || !is_guarded(out))
        return fsdp_fail(err, FSDP_ERR_INTERNAL, "kind %d wrote past its buffer", (int)test->kind);
    return check_output(now, is_root ? in->data : out->data, err);
}

fsdp_status run_comm_case(fsdp_comm *comm, const comm_case *test, fsdp_error *err)
{
    one_case now = {.comm = comm, .test = test};
    buffer in = {0}, out = {0};
    now.rank = fsdp_comm_rank(comm);
    now.n = fsdp_comm_size(comm);
    now.element = fsdp_dtype_size(test->dtype);
    now.counts = calloc((size_t)now.n, sizeof *now.counts);
    now.out_counts = calloc((size_t)now.n, sizeof *now.out_counts);
    fsdp_status status = FSDP_OK;
    set_counts(&now);
    if (make_buffers(&now, &in, &out))
        status = run_call(&now, &in, &out, err);
    else
        status = fsdp_fail(err, FSDP_ERR_LIMIT, "no memory for the test");
    free_buffer(&now, &in);
    free_buffer(&now, &out);
    free(now.counts);
    free(now.out_counts);
    return status;
}

/* --- random ones ------------------------------------------------------------------------------ */

static const fsdp_dtype dtypes[] = {FSDP_F32, FSDP_BF16, FSDP_F16, FSDP_F64, FSDP_I32,
                                    FSDP_I64, FSDP_U8,   FSDP_I16, FSDP_I8};

fsdp_status run_comm_rounds(fsdp_comm *comm, const comm_rounds *rounds, fsdp_error *err)
{
    uint64_t state = rounds->seed, n = (uint64_t)fsdp_comm_size(comm);
    for (int i = 0; i < rounds->rounds; i++) {
        comm_case test = {.buffers = rounds->buffers};
        test.kind = (fsdp_collective_kind)(1 + draw(&state) % 5);
        test.dtype = dtypes[draw(&state) % (sizeof dtypes / sizeof *dtypes)];
        bool is_float = fsdp_dtype_describe(test.dtype)->is_float;
        test.op = is_float ? (fsdp_reduce_op)(draw(&state) % 4)
                           : (draw(&state) % 2 ? FSDP_REDUCE_SUM : FSDP_REDUCE_MAX);
        test.factor = 0.3;
        int64_t limit = draw(&state) % 4 == 0 ? rounds->max_count : 200;
        test.count = (int64_t)(draw(&state) % (uint64_t)(limit + 1));
        test.root = (int)(draw(&state) % n);
        test.is_uneven = draw(&state) % 2 && test.kind <= FSDP_REDUCE_SCATTER;
        test.is_in_place = draw(&state) % 2 && test.kind != FSDP_ALL_TO_ALL;
        test.seed = draw(&state);
        FSDP_TRY(run_comm_case(comm, &test, err));
    }
    return FSDP_OK;
}
