/*
 * Builds, compares and describes the headers of collective calls, so that ranks which make
 * different calls find out before any data moves. See comm_backend.h.
 */
#include "runtime/comm/comm_backend.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/core/fnv.h"

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
