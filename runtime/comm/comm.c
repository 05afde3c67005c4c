/*
 * The common part of all back ends: describes calls, checks arguments, runs calls that are started and waited
 * for later, scales sums, serves groups of one rank, and poisons communicators: after the first failure of
 * any rank every call returns that failure. See comm.h.
 */
#include "runtime/comm/comm_backend.h"
#include "base/core/fnv.h"
#include "base/core/given.h"
#include "base/core/mem.h"
#include "kernels/train/tensor.h"
#include "runtime/device/device.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

/* === headers of calls ========================================================================== */

/* Builds, compares and describes the headers of collective calls, so that ranks which make different calls
 * find out before any data moves. See comm_backend.h. */

enum { DESCRIPTION = 200 };

const char *fsdp_comm_backend(const fsdp_comm *comm)
{
    if (!comm)
        return NULL;
    return comm->transport->ops->name;
}

unsigned fsdp_comm_abilities(const fsdp_comm *comm)
{
    if (!comm)
        return 0;
    return comm->transport->ops->abilities;
}

const char *fsdp_comm_kind_name(uint32_t kind)
{
    static const char *const names[] = {"?",          "all_gather", "reduce_scatter",
                                        "all_reduce", "broadcast",  "all_to_all"};
    return kind < sizeof names / sizeof *names ? names[kind] : names[0];
}

const char *fsdp_comm_op_name(uint32_t op)
{
    static const char *const names[] = {"sum", "avg", "max", "premul_sum"};
    return op < sizeof names / sizeof *names ? names[op] : "?";
}

bool fsdp_comm_reduces(uint32_t kind)
{
    return kind == FSDP_REDUCE_SCATTER || kind == FSDP_ALL_REDUCE;
}

/* 0 is for even parts. */
static uint64_t hash_counts(const int64_t *counts, int n)
{
    uint64_t hash = fsdp_fnv(FSDP_FNV_BEGIN, counts, (size_t)n * sizeof *counts);
    return hash ? hash : 1;
}

int64_t fsdp_comm_part(const fsdp_collective *call, int rank)
{
    return call->counts ? call->counts[rank] : call->count;
}

fsdp_reduction fsdp_comm_reduction(const fsdp_collective *call, int size)
{
    return (fsdp_reduction){
        .fold = call->op == FSDP_REDUCE_MAX ? FSDP_FOLD_MAX : FSDP_FOLD_SUM,
        .multiply = call->op == FSDP_REDUCE_PREMUL_SUM ? call->factor : 1,
        .divide = call->op == FSDP_REDUCE_AVG ? size : 1,
    };
}

int64_t fsdp_comm_place(const fsdp_collective *call, int rank)
{
    int64_t sum = 0;
    if (!call->counts)
        return call->count * rank;
    for (int i = 0; i < rank; i++)
        sum += call->counts[i];
    return sum;
}

/* Units of one kind begin alike, and differ towards the end of their names. */
static void name_unit(const char *unit, char out[FSDP_HEADER_UNIT])
{
    static const char gap[] = "...";
    const size_t most = FSDP_HEADER_UNIT - 1, end = (most - (sizeof gap - 1)) / 2;
    const size_t length = strlen(unit);
    memcpy(out, unit, length < most ? length : most);
    if (length <= most)
        return;
    memcpy(out + most - end - (sizeof gap - 1), gap, sizeof gap - 1);
    memcpy(out + most - end, unit + length - end, end);
}

fsdp_comm_header fsdp_comm_head(const fsdp_comm *comm, const fsdp_collective *call)
{
    fsdp_comm_header header;
    memset(&header, 0, sizeof header);
    header.sequence = comm->sequence;
    header.kind = (uint32_t)call->kind;
    header.dtype = (uint32_t)call->dtype;
    if (fsdp_comm_reduces(header.kind)) {
        header.op = (uint32_t)call->op | (call->view ? FSDP_HEADER_SEEN : 0);
        header.factor = call->op == FSDP_REDUCE_PREMUL_SUM ? call->factor : 0;
    }
    header.root = call->kind == FSDP_BROADCAST ? call->root : 0;
    if (call->kind != FSDP_ALL_TO_ALL) {
        header.count = (uint64_t)(call->counts ? fsdp_comm_place(call, comm->size) : call->count);
        header.counts = call->counts ? hash_counts(call->counts, comm->size) : 0;
    }
    if (call->unit)
        name_unit(call->unit, header.unit);
    return header;
}

fsdp_comm_header fsdp_comm_head_groups(const int *ranks, int size, int count, uint64_t sequence)
{
    fsdp_comm_header header;
    memset(&header, 0, sizeof header);
    header.sequence = sequence;
    header.op = (uint32_t)count;
    header.root = ranks[0];
    header.count = (uint64_t)size;
    header.counts = fsdp_fnv(FSDP_FNV_BEGIN, ranks, (size_t)size * (size_t)count * sizeof *ranks);
    return header;
}

/* --- descriptions ----------------------------------------------------------------------------- */

static void describe_op(const fsdp_comm_header *header, char *out, size_t out_size)
{
    const char *seen = header->op & FSDP_HEADER_SEEN ? ", in place" : "";
    uint32_t op = header->op & ~(uint32_t)FSDP_HEADER_SEEN;
    out[0] = '\0';
    if (!fsdp_comm_reduces(header->kind) || header->op == FSDP_REDUCE_SUM)
        return;
    if (op == FSDP_REDUCE_PREMUL_SUM)
        snprintf(out, out_size, " (premul_sum, %g%s)", header->factor, seen);
    else
        snprintf(out, out_size, " (%s%s)", fsdp_comm_op_name(op), seen);
}

static void describe_amount(const fsdp_comm_header *header, char *out, size_t out_size)
{
    const char *dtype = fsdp_dtype_name((fsdp_dtype)header->dtype);
    if (header->kind == FSDP_ALL_TO_ALL)
        snprintf(out, out_size, "%s", dtype);
    else
        snprintf(out, out_size, "%" PRIu64 " %s%s", header->count, dtype,
                 header->counts ? " in uneven parts" : "");
}

void fsdp_comm_describe(const fsdp_comm_header *header, char *out, size_t out_size)
{
    char op[48], amount[64], root[32] = "", groups[32] = "a group";
    if (header->kind == 0) {
        if (header->op > 1)
            snprintf(groups, sizeof groups, "%d groups", (int)header->op);
        snprintf(out, out_size, "the making of %s of %d ranks from rank %d on (call %" PRIu64 ")",
                 groups, (int)header->count, (int)header->root, header->sequence);
        return;
    }
    describe_op(header, op, sizeof op);
    describe_amount(header, amount, sizeof amount);
    if (header->kind == FSDP_BROADCAST)
        snprintf(root, sizeof root, " from member %d", (int)header->root);
    snprintf(out, out_size, "%s%s of %s%s%s%.*s (call %" PRIu64 ")",
             fsdp_comm_kind_name(header->kind), op, amount, root, header->unit[0] ? " for " : "",
             FSDP_HEADER_UNIT, header->unit, header->sequence);
}

static bool is_error_status(int code)
{
    return (code >= FSDP_ERR_USAGE && code <= FSDP_ERR_PEER) || code == FSDP_ERR_INTERNAL ||
           code == FSDP_ERR_CANCELLED;
}

void fsdp_comm_describe_exit(int exit_code, char out[FSDP_EXIT_TEXT])
{
    if (is_error_status(exit_code))
        snprintf(out, FSDP_EXIT_TEXT, "exit code %d (%s)", exit_code,
                 fsdp_status_name((fsdp_status)exit_code));
    else
        snprintf(out, FSDP_EXIT_TEXT, "exit code %d", exit_code);
}

void fsdp_comm_describe_left(int exit_code, char out[FSDP_LEFT_TEXT])
{
    char code[FSDP_EXIT_TEXT];
    fsdp_comm_describe_exit(exit_code, code);
    if (exit_code == 0)
        snprintf(out, FSDP_LEFT_TEXT, "has left the group: it takes no part in");
    else
        snprintf(out, FSDP_LEFT_TEXT, "has left the group with %s: it takes no part in", code);
}

fsdp_error fsdp_comm_describe_loss(const fsdp_comm_loss *loss, const fsdp_comm_header *header)
{
    char call[DESCRIPTION];
    fsdp_error why = {.rank = loss->rank};
    fsdp_comm_describe(header, call, sizeof call);
    (void)fsdp_fail(&why, FSDP_ERR_PEER, "rank %d%s %s %s%s%s%s%s", loss->rank,
                    loss->which ? loss->which : "", loss->what, call,
                    loss->reason ? "; its error: " : "", loss->reason ? loss->reason : "",
                    loss->hint ? "; " : "", loss->hint ? loss->hint : "");
    return why;
}

fsdp_status fsdp_comm_differ(int first_rank, const fsdp_comm_header *first, int other_rank,
                             const fsdp_comm_header *other, fsdp_error *err)
{
    char first_call[DESCRIPTION], other_call[DESCRIPTION];
    const bool is_group = first->kind == 0;
    fsdp_comm_describe(first, first_call, sizeof first_call);
    fsdp_comm_describe(other, other_call, sizeof other_call);
    bool looks_same = strcmp(first_call, other_call) == 0;
    if (err)
        err->rank = other_rank;
    return fsdp_fail(err, FSDP_ERR_USAGE, "rank %d %s %s, rank %d %s%s%s", other_rank,
                     is_group ? "is at" : "makes", other_call, first_rank, first_call,
                     !looks_same ? ""
                     : is_group  ? " of other ranks"
                                 : " of other sizes",
                     is_group ? "; all ranks must make the same groups in the same order" : "");
}

fsdp_status fsdp_comm_compare(const int *ranks, int size, const fsdp_comm_header *headers,
                              fsdp_error *err)
{
    for (int i = 1; i < size; i++) {
        if (memcmp(&headers[i], &headers[0], sizeof *headers) != 0)
            return fsdp_comm_differ(ranks[0], &headers[0], ranks[i], &headers[i], err);
    }
    return FSDP_OK;
}

fsdp_status fsdp_comm_miscount(int from, int to, int64_t sent, int64_t expected,
                               const fsdp_comm_header *header, fsdp_error *err)
{
    char call[DESCRIPTION];
    fsdp_comm_describe(header, call, sizeof call);
    if (err)
        err->rank = from;
    return fsdp_fail(err, FSDP_ERR_USAGE,
                     "rank %d sends %" PRId64 " elements to rank %d, which expects %" PRId64
                     " from it, in %s",
                     from, sent, to, expected, call);
}

/* === started calls ============================================================================ */

/*
 * Collectives that are started and waited for later. The first start creates a stream with its own
 * thread, which runs the calls of the communicator in the order of their starts.
 */

/* The thread writes `result` before it reaches `done`. */
struct fsdp_comm_handle {
    fsdp_comm *comm;
    fsdp_collective call;
    fsdp_event done;
    fsdp_error result;
    fsdp_comm_handle *next; /* in the list of handles not waited for */
};

struct fsdp_comm_queue {
    fsdp_device *device;
    fsdp_stream *stream;
    fsdp_comm_handle *first;
};

static fsdp_status create_queue(fsdp_comm_queue **queue_out, fsdp_error *err)
{
    fsdp_comm_queue *made = fsdp_alloc(1, sizeof *made);
    if (!made)
        return fsdp_fail_memory(err, "collectives that are started");
    fsdp_status status = fsdp_device_cpu_async(&made->device, err);
    if (status == FSDP_OK)
        status = made->device->ops->stream_create(made->device, "started", &made->stream, err);
    if (status == FSDP_OK) {
        *queue_out = made;
        return FSDP_OK;
    }
    fsdp_device_close(made->device);
    fsdp_free(made);
    return status;
}

static fsdp_status prepare(fsdp_comm *comm, fsdp_comm_handle **handle_out, fsdp_error *err)
{
    if (!comm->queue)
        FSDP_TRY(create_queue(&comm->queue, err));
    *handle_out = fsdp_alloc(1, sizeof **handle_out);
    return *handle_out ? FSDP_OK : fsdp_fail_memory(err, "a collective that is started");
}

/* A failure is the handle's: the stream continues, and later calls find the communicator poisoned. */
static fsdp_status run_started(void *args, fsdp_error *err)
{
    fsdp_comm_handle *handle = *(fsdp_comm_handle **)args;
    (void)err;
    handle->result.status = fsdp_comm_run_now(handle->comm, &handle->call, &handle->result);
    return FSDP_OK;
}

fsdp_status fsdp_comm_start(fsdp_comm *comm, const fsdp_collective *call,
                            fsdp_comm_handle **handle_out, fsdp_error *err)
{
    FSDP_NEED(err, handle_out);
    *handle_out = NULL;
    FSDP_NEED(err, comm, call);
    fsdp_error failure = {0};
    fsdp_comm_handle *handle = NULL;
    if (prepare(comm, &handle, &failure) != FSDP_OK) {
        fsdp_comm_abort(comm, &failure); /* so that the others do not wait for this call */
        if (err)
            *err = failure;
        return failure.status;
    }
    const fsdp_device_ops *ops = comm->queue->device->ops;
    *handle = (fsdp_comm_handle){.comm = comm, .call = *call, .next = comm->queue->first};
    comm->queue->first = handle;
    ops->submit(comm->queue->stream, run_started, &handle, sizeof(fsdp_comm_handle *));
    handle->done = ops->record(comm->queue->stream);
    *handle_out = handle;
    return FSDP_OK;
}

bool fsdp_comm_is_done(const fsdp_comm_handle *handle)
{
    return !handle || handle->comm->queue->device->ops->is_reached(handle->done);
}

static void forget(fsdp_comm_handle *handle)
{
    fsdp_comm_handle **at = &handle->comm->queue->first;
    while (*at != handle)
        at = &(*at)->next;
    *at = handle->next;
    fsdp_free(handle);
}

fsdp_status fsdp_comm_wait(fsdp_comm_handle **handle, fsdp_error *err)
{
    FSDP_NEED(err, handle);
    fsdp_comm_handle *waited = *handle;
    if (!waited)
        return FSDP_OK;
    (void)!waited->comm->queue->device->ops->sync(waited->done, NULL);
    fsdp_status status = waited->result.status;
    if (status != FSDP_OK && err)
        *err = waited->result;
    forget(waited);
    *handle = NULL;
    return status;
}

/* Waits until all started calls have ended. */
static void comm_settle(const fsdp_comm *comm)
{
    if (comm->queue)
        (void)!comm->queue->device->ops->sync(comm->queue->device->ops->record(comm->queue->stream),
                                              NULL);
}

/* A rank that closes its communicator with calls in flight aborts them, so that no rank waits for
 * them. */
static void abort_unfinished(fsdp_comm *comm)
{
    bool is_done = true;
    for (const fsdp_comm_handle *at = comm->queue->first; at; at = at->next)
        is_done &= fsdp_comm_is_done(at);
    if (is_done)
        return;
    fsdp_error why = {0};
    char exit_code[FSDP_EXIT_TEXT];
    fsdp_comm_describe_exit(comm->transport->exit_code, exit_code);
    (void)fsdp_fail(&why, FSDP_ERR_PEER, "left with %s, without waiting for a call it had started",
                    exit_code);
    fsdp_comm_abort(comm, &why);
}

/* Aborts started calls that have not ended, and frees all handles. */
static void comm_close_queue(fsdp_comm *comm)
{
    fsdp_comm_queue *queue = comm->queue;
    if (!queue)
        return;
    abort_unfinished(comm);
    queue->device->ops->stream_free(queue->stream);
    while (queue->first)
        forget(queue->first);
    fsdp_device_close(queue->device);
    fsdp_free(queue);
    comm->queue = NULL;
}

/* === arguments ================================================================================ */

/* The extent of one buffer of a call. */
typedef struct extent {
    const char *name;
    const unsigned char *data;
    int64_t bytes;
} extent;

static fsdp_status fail_large(fsdp_error *err)
{
    return fsdp_fail(err, FSDP_ERR_USAGE, "its size overflows");
}

static fsdp_status check_count(int64_t count, fsdp_error *err)
{
    if (count < 0)
        return fsdp_fail(err, FSDP_ERR_USAGE, "a count is %" PRId64, count);
    return FSDP_OK;
}

static fsdp_status add_counts(const int64_t *counts, int n, int64_t *sum_out, fsdp_error *err)
{
    *sum_out = 0;
    for (int i = 0; i < n; i++) {
        FSDP_TRY(check_count(counts[i], err));
        if (fsdp_add_overflow(*sum_out, counts[i], sum_out))
            return fail_large(err);
    }
    return FSDP_OK;
}

static fsdp_status check_op(const fsdp_collective *call, fsdp_error *err)
{
    const char *dtype = fsdp_dtype_name(call->dtype);
    if (!fsdp_comm_reduces((uint32_t)call->kind))
        return FSDP_OK;
    if (!fsdp_tensor_can_fold(call->dtype))
        return fsdp_fail(err, FSDP_ERR_USAGE, "%s cannot be reduced", dtype);
    if (call->op == FSDP_REDUCE_SUM || call->op == FSDP_REDUCE_MAX)
        return FSDP_OK;
    if (call->op != FSDP_REDUCE_AVG && call->op != FSDP_REDUCE_PREMUL_SUM)
        return fsdp_fail(err, FSDP_ERR_USAGE, "no operation has the number %d", (int)call->op);
    if (!fsdp_dtype_describe(call->dtype)->is_float)
        return fsdp_fail(err, FSDP_ERR_USAGE, "%s has no averages and no factors", dtype);
    return FSDP_OK;
}

/* Elements of this rank's buffers. */
static fsdp_status count_elements(const fsdp_comm *comm, const fsdp_collective *call,
                                  int64_t *in_count_out, int64_t *out_count_out, fsdp_error *err)
{
    int64_t all;
    if (call->kind == FSDP_ALL_TO_ALL) {
        if (!call->counts || !call->out_counts)
            return fsdp_fail(err, FSDP_ERR_USAGE, "counts and out_counts are needed");
        FSDP_TRY(add_counts(call->counts, comm->size, in_count_out, err));
        return add_counts(call->out_counts, comm->size, out_count_out, err);
    }
    FSDP_TRY(check_count(call->count, err));
    *in_count_out = *out_count_out = call->count;
    if (call->kind != FSDP_ALL_GATHER && call->kind != FSDP_REDUCE_SCATTER)
        return call->counts ? fsdp_fail(err, FSDP_ERR_USAGE, "it has no uneven counts") : FSDP_OK;
    if (call->counts)
        FSDP_TRY(add_counts(call->counts, comm->size, &all, err));
    else if (fsdp_mul_overflow(call->count, comm->size, &all))
        return fail_large(err);
    *in_count_out = *out_count_out = fsdp_comm_part(call, comm->rank);
    *(call->kind == FSDP_ALL_GATHER ? out_count_out : in_count_out) = all;
    return FSDP_OK;
}

static bool is_in_place(const fsdp_comm *comm, const fsdp_collective *call, const extent *in,
                        const extent *out)
{
    int64_t element = (int64_t)fsdp_dtype_size(call->dtype);
    switch (call->kind) {
    case FSDP_ALL_GATHER:
        return in->data == out->data + fsdp_comm_place(call, comm->rank) * element;
    case FSDP_REDUCE_SCATTER:
        return out->data == in->data + fsdp_comm_place(call, comm->rank) * element;
    case FSDP_ALL_REDUCE: return in->data == out->data;
    default: return false;
    }
}

static fsdp_status check_buffers(const fsdp_comm *comm, const fsdp_collective *call,
                                 const extent *in, const extent *out, fsdp_error *err)
{
    bool uses_in = call->kind != FSDP_BROADCAST || call->root == comm->rank;
    bool uses_out = call->kind != FSDP_BROADCAST || call->root != comm->rank;
    bool has_in = uses_in && in->bytes > 0, has_out = uses_out && out->bytes > 0;
    if ((has_in && !in->data) || (has_out && !out->data))
        return fsdp_fail(err, FSDP_ERR_USAGE, "'%s' is missing",
                         has_in && !in->data ? in->name : out->name);
    if (!has_in || !has_out)
        return FSDP_OK;
    uintptr_t in_at = (uintptr_t)in->data, out_at = (uintptr_t)out->data;
    bool overlap = in_at < out_at + (uintptr_t)out->bytes && out_at < in_at + (uintptr_t)in->bytes;
    if (overlap && !is_in_place(comm, call, in, out))
        return fsdp_fail(err, FSDP_ERR_USAGE, "'in' and 'out' overlap");
    return FSDP_OK;
}

static fsdp_status check_view(const fsdp_comm *comm, const fsdp_collective *call, fsdp_error *err)
{
    if (!call->view || call->kind == FSDP_ALL_GATHER)
        return FSDP_OK;
    if (call->kind != FSDP_REDUCE_SCATTER)
        return fsdp_fail(err, FSDP_ERR_USAGE, "only all_gather and reduce_scatter have a view");
    if (!(fsdp_comm_abilities(comm) & FSDP_COMM_POOL))
        return fsdp_fail(err, FSDP_ERR_USAGE, "ranks over %s do not see each other's memory",
                         fsdp_comm_backend(comm));
    return FSDP_OK;
}

/* Checks arguments. The error text does not name the call. */
static fsdp_status comm_check(const fsdp_comm *comm, const fsdp_collective *call, fsdp_error *err)
{
    extent in = {.name = "in", .data = call->in}, out = {.name = "out", .data = call->out};
    int64_t element = (int64_t)fsdp_dtype_size(call->dtype);
    if (call->kind < FSDP_ALL_GATHER || call->kind > FSDP_ALL_TO_ALL)
        return fsdp_fail(err, FSDP_ERR_USAGE, "no collective has the number %d", (int)call->kind);
    if (element == 0)
        return fsdp_fail(err, FSDP_ERR_USAGE, "no dtype has the number %d", (int)call->dtype);
    if (call->kind == FSDP_BROADCAST && (call->root < 0 || call->root >= comm->size))
        return fsdp_fail(err, FSDP_ERR_USAGE, "root %d is not one of %d ranks", call->root,
                         comm->size);
    FSDP_TRY(check_view(comm, call, err));
    FSDP_TRY(check_op(call, err));
    FSDP_TRY(count_elements(comm, call, &in.bytes, &out.bytes, err));
    if (fsdp_mul_overflow(in.bytes, element, &in.bytes) ||
        fsdp_mul_overflow(out.bytes, element, &out.bytes))
        return fail_large(err);
    return check_buffers(comm, call, &in, &out, err);
}

/* === averages and premultiplied sums ========================================================== */

/*
 * Averages and premultiplied sums over a back end that only sums, bit-identical to one that does
 * all: the sum is made in the type of the accumulator, which rounds nothing, and scaled there.
 */

/* The call as the caller made it, and the one that the back end gets. */
typedef struct scaled_call {
    const fsdp_collective *call;
    fsdp_collective sum;
    fsdp_dtype wide;
    int64_t in_count, out_count;
    void *wide_in, *wide_out;
} scaled_call;

static void convert(void *to, fsdp_dtype to_type, const void *from, fsdp_dtype from_type,
                    int64_t count)
{
    const fsdp_rect rect = fsdp_rect_line(to, to_type, from, from_type, count);
    if (count > 0)
        fsdp_rects_copy(&rect, 1);
}

static fsdp_status make_room(scaled_call *scaled, fsdp_error *err)
{
    size_t element = fsdp_dtype_size(scaled->wide);
    bool needs_out = scaled->wide != scaled->call->dtype;
    bool needs_in = needs_out || scaled->call->op == FSDP_REDUCE_PREMUL_SUM;
    if (needs_in)
        scaled->wide_in = fsdp_realloc(NULL, (size_t)scaled->in_count, element);
    if (needs_out)
        scaled->wide_out = fsdp_realloc(NULL, (size_t)scaled->out_count, element);
    if ((needs_in && !scaled->wide_in) || (needs_out && !scaled->wide_out))
        return fsdp_fail_memory(err, "a reduction that is scaled");
    return FSDP_OK;
}

static fsdp_status run_sum(fsdp_comm *comm, scaled_call *scaled, fsdp_error *err)
{
    const fsdp_collective *call = scaled->call;
    if (scaled->wide_in) {
        convert(scaled->wide_in, scaled->wide, call->in, call->dtype, scaled->in_count);
        scaled->sum.in = scaled->wide_in;
    }
    if (scaled->wide_out)
        scaled->sum.out = scaled->wide_out;
    if (call->op == FSDP_REDUCE_PREMUL_SUM)
        fsdp_tensor_multiply(scaled->wide_in, scaled->wide, (size_t)scaled->in_count, call->factor);

    fsdp_comm_header header = fsdp_comm_head(comm, &scaled->sum);
    FSDP_TRY(comm->transport->ops->run(comm, &scaled->sum, &header, err));

    if (call->op == FSDP_REDUCE_AVG)
        fsdp_tensor_divide(scaled->sum.out, scaled->wide, (size_t)scaled->out_count, comm->size);
    if (scaled->wide_out)
        convert(call->out, call->dtype, scaled->wide_out, scaled->wide, scaled->out_count);
    return FSDP_OK;
}

/* An average or premultiplied sum over a back end that only sums; bit-identical. */
static fsdp_status comm_run_scaled(fsdp_comm *comm, const fsdp_collective *call, fsdp_error *err)
{
    scaled_call scaled = {.call = call, .sum = *call};
    bool is_scatter = call->kind == FSDP_REDUCE_SCATTER;
    scaled.wide = call->dtype == FSDP_F64 ? FSDP_F64 : FSDP_F32;
    scaled.sum.dtype = scaled.wide;
    scaled.sum.op = FSDP_REDUCE_SUM;
    scaled.in_count = is_scatter ? fsdp_comm_place(call, comm->size) : call->count;
    scaled.out_count = is_scatter ? fsdp_comm_part(call, comm->rank) : call->count;
    fsdp_status status = make_room(&scaled, err);
    if (status == FSDP_OK)
        status = run_sum(comm, &scaled, err);
    fsdp_free(scaled.wide_in);
    fsdp_free(scaled.wide_out);
    return status;
}

/* === calls ==================================================================================== */

enum { POISON_NONE, POISON_COMES, POISON_IS_SET };

/* --- a communicator --------------------------------------------------------------------------- */

/* *position_out: this rank's among all; -1: none. */
static fsdp_status check_ranks(const fsdp_transport *transport, const int *ranks, int size,
                               int count, int *position_out, fsdp_error *err)
{
    *position_out = -1;
    if (size < 1 || count < 1 || size > transport->size / count)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "%d groups cannot have %d ranks each: the world has %d", count, size,
                         transport->size);
    for (int i = 0; i < size * count; i++) {
        int rank = ranks[i];
        bool is_twice = false;
        for (int j = 0; j < i; j++)
            is_twice |= ranks[j] == rank;
        if (rank < 0 || rank >= transport->size || is_twice)
            return fsdp_fail(err, FSDP_ERR_USAGE, "rank %d of a group %s", rank,
                             is_twice ? "is in it twice" : "is not in the world");
        if (rank == transport->rank)
            *position_out = i;
    }
    return FSDP_OK;
}

fsdp_status fsdp_comm_create(fsdp_transport *transport, const int *ranks, int size, int count,
                             fsdp_comm **comm_out, fsdp_error *err)
{
    int position;
    *comm_out = NULL;
    FSDP_TRY(check_ranks(transport, ranks, size, count, &position, err));
    if (position < 0)
        return FSDP_OK;
    fsdp_comm *comm = fsdp_alloc(1, sizeof *comm);
    int *copy = fsdp_alloc((size_t)size, sizeof *copy);
    if (!comm || !copy) {
        fsdp_free(comm);
        fsdp_free(copy);
        return fsdp_fail_memory(err, "a communicator");
    }
    memcpy(copy, ranks + position / size * size, (size_t)size * sizeof *ranks);
    *comm =
        (fsdp_comm){.transport = transport, .rank = position % size, .size = size, .ranks = copy};
    *comm_out = comm;
    return FSDP_OK;
}

void fsdp_comm_free(fsdp_comm *comm)
{
    if (!comm)
        return;
    comm_close_queue(comm);
    if (comm->backend)
        comm->transport->ops->comm_close(comm);
    fsdp_free(comm->ranks);
    fsdp_free(comm);
}

int fsdp_comm_rank(const fsdp_comm *comm)
{
    if (!comm)
        return 0;
    return comm->rank;
}

int fsdp_comm_size(const fsdp_comm *comm)
{
    if (!comm)
        return 0;
    return comm->size;
}

const int *fsdp_comm_ranks(const fsdp_comm *comm)
{
    if (!comm)
        return NULL;
    return comm->ranks;
}

void *fsdp_comm_alloc(fsdp_comm *comm, size_t size)
{
    if (!comm)
        return NULL;
    fsdp_transport *transport = comm->transport;
    return transport->ops->alloc ? transport->ops->alloc(transport, size) : NULL;
}

void fsdp_comm_dealloc(fsdp_comm *comm, void *data)
{
    if (!comm)
        return;
    if (data)
        comm->transport->ops->dealloc(comm->transport, data);
}

void *fsdp_transport_alloc_pages(fsdp_transport *transport, size_t size)
{
    (void)transport;
    return fsdp_alloc_pages(size);
}

void fsdp_transport_free_pages(fsdp_transport *transport, void *data)
{
    (void)transport;
    fsdp_free(data);
}

/* --- poison ----------------------------------------------------------------------------------- */

/* Another thread of this rank may abort at any time: the state is set after the text. */
static void keep_poison(fsdp_comm *comm, const fsdp_error *why)
{
    int none = POISON_NONE;
    if (!atomic_compare_exchange_strong(&comm->poison_state, &none, POISON_COMES))
        return;
    comm->poison = *why;
    atomic_store(&comm->poison_state, POISON_IS_SET);
}

/* The group's failure goes before the local one, so that all ranks report the same first
 * failure. */
static bool is_poisoned(fsdp_comm *comm, fsdp_error *err_out)
{
    const fsdp_transport_ops *ops = comm->transport->ops;
    if (comm->size > 1 && ops->has_failed && ops->has_failed(comm, err_out))
        return true;
    if (atomic_load(&comm->poison_state) != POISON_IS_SET)
        return false;
    *err_out = comm->poison;
    return true;
}

fsdp_status fsdp_comm_failure(fsdp_comm *comm, fsdp_error *err)
{
    fsdp_error failure = {0};
    if (!is_poisoned(comm, &failure))
        return FSDP_OK;
    if (err)
        *err = failure;
    return failure.status;
}

static void poison(fsdp_comm *comm, const fsdp_error *why)
{
    const fsdp_transport_ops *ops = comm->transport->ops;
    keep_poison(comm, why);
    if (comm->size > 1 && ops->abort)
        ops->abort(comm, why);
}

void fsdp_comm_abort(fsdp_comm *comm, const fsdp_error *why)
{
    if (!comm)
        return;
    fsdp_error said = {0};
    if (why)
        said = *why;
    if (said.status == FSDP_OK)
        (void)fsdp_fail(&said, FSDP_ERR_CANCELLED, "gave up");
    said.rank = comm->transport->rank;
    poison(comm, &said);
}

/* --- a call ----------------------------------------------------------------------------------- */

static fsdp_status check(const fsdp_comm *comm, const fsdp_collective *call, fsdp_error *err)
{
    fsdp_status status = comm_check(comm, call, err);
    if (status == FSDP_OK)
        return FSDP_OK;
    err->rank = comm->transport->rank;
    if (call->kind < FSDP_ALL_GATHER || call->kind > FSDP_ALL_TO_ALL)
        return status; /* it has no name */
    char name[200];
    fsdp_collective named = *call;
    named.counts = NULL; /* they may be what is wrong */
    fsdp_comm_header header = fsdp_comm_head(comm, &named);
    fsdp_comm_describe(&header, name, sizeof name);
    fsdp_error_prefix(err, "%s", name);
    return status;
}

/* Gives a stream the copy, or the sum of one, that a group of one rank makes. */
static void copy_in_stream(const fsdp_collective *call, size_t count)
{
    const fsdp_device_kernels *kernels = call->stream->device->ops->kernels;
    const fsdp_fold_call sum = {.to = call->out,
                                .from = &call->in,
                                .n = 1,
                                .dtype = call->dtype,
                                .count = count,
                                .how = fsdp_comm_reduction(call, 1)};
    if (fsdp_comm_reduces((uint32_t)call->kind) && call->op == FSDP_REDUCE_PREMUL_SUM)
        kernels->fold(call->stream, &sum);
    else if (call->in != call->out)
        kernels->copy(call->stream, call->out, call->in, count * fsdp_dtype_size(call->dtype));
}

/* A group of one rank: the result is its own input. */
static fsdp_status run_alone(const fsdp_collective *call, fsdp_error *err)
{
    int64_t count = fsdp_comm_part(call, 0);
    if (call->view) {
        call->view->see(call->view->context, &call->in);
        return FSDP_OK;
    }
    if (call->kind == FSDP_ALL_TO_ALL && count != call->out_counts[0])
        return fsdp_fail(err, FSDP_ERR_USAGE, "counts and out_counts of the only rank differ");
    if (call->kind == FSDP_BROADCAST || count == 0)
        return FSDP_OK;
    if (call->stream)
        copy_in_stream(call, (size_t)count);
    else if (fsdp_comm_reduces((uint32_t)call->kind) && call->op == FSDP_REDUCE_PREMUL_SUM)
        fsdp_tensor_fold(call->out, &call->in, 1, call->dtype, (size_t)count,
                         fsdp_comm_reduction(call, 1));
    else if (call->in != call->out)
        memcpy(call->out, call->in, (size_t)count * fsdp_dtype_size(call->dtype));
    return FSDP_OK;
}

static bool lacks_op(const fsdp_comm *comm, const fsdp_collective *call)
{
    unsigned abilities = comm->transport->ops->abilities;
    if (!fsdp_comm_reduces((uint32_t)call->kind))
        return false;
    return (call->op == FSDP_REDUCE_AVG && !(abilities & FSDP_COMM_AVG)) ||
           (call->op == FSDP_REDUCE_PREMUL_SUM && !(abilities & FSDP_COMM_PREMUL_SUM));
}

bool fsdp_comm_sees(const fsdp_comm *comm, int member, const void *data, size_t size)
{
    return comm->transport->ops->sees && comm->transport->ops->sees(comm, member, data, size);
}

void fsdp_comm_view_out(const fsdp_collective *call, int size, const void **parts)
{
    size_t element = fsdp_dtype_size(call->dtype);
    for (int i = 0; i < size; i++)
        parts[i] = (const unsigned char *)call->out + (size_t)fsdp_comm_place(call, i) * element;
    call->view->see(call->view->context, parts);
}

static fsdp_status run_with_view(fsdp_comm *comm, const fsdp_collective *call,
                                 const fsdp_comm_header *header, fsdp_error *err)
{
    const void **parts = fsdp_alloc((size_t)comm->size, sizeof *parts);
    if (!parts)
        return fsdp_fail_memory(err, "a view");
    fsdp_status status = comm->transport->ops->run(comm, call, header, err);
    if (status == FSDP_OK)
        fsdp_comm_view_out(call, comm->size, parts);
    fsdp_free(parts);
    return status;
}

static fsdp_status run(fsdp_comm *comm, const fsdp_collective *call, fsdp_error *err)
{
    FSDP_TRY(check(comm, call, err));
    if (call->stream && !(comm->transport->ops->abilities & FSDP_COMM_STREAMS))
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "%s moves the host's memory only; a GPU's memory needs --comm nccl, or "
                         "ranks that are threads (--threads N)",
                         comm->transport->ops->name);
    if (comm->size == 1)
        return run_alone(call, err);
    if (lacks_op(comm, call))
        return comm_run_scaled(comm, call, err);
    fsdp_comm_header header = fsdp_comm_head(comm, call);
    if (call->view && !(comm->transport->ops->abilities & FSDP_COMM_POOL))
        return run_with_view(comm, call, &header, err);
    return comm->transport->ops->run(comm, call, &header, err);
}

fsdp_status fsdp_comm_run_now(fsdp_comm *comm, const fsdp_collective *call, fsdp_error *err)
{
    fsdp_error failure = {0};
    if (!is_poisoned(comm, &failure)) {
        comm->sequence++;
        failure.status = run(comm, call, &failure);
        if (failure.status == FSDP_OK)
            return FSDP_OK;
        poison(comm, &failure);
        (void)is_poisoned(comm, &failure);
    }
    if (err)
        *err = failure;
    return failure.status;
}

fsdp_status fsdp_comm_run(fsdp_comm *comm, const fsdp_collective *call, fsdp_error *err)
{
    FSDP_NEED(err, comm, call);
    comm_settle(comm);
    return fsdp_comm_run_now(comm, call, err);
}
