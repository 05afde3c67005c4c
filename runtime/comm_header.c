/*
 * What goes with every collective call, so that ranks which make different calls find out before
 * any data moves. See comm_backend.h.
 */
#include "runtime/comm_backend.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

enum { DESCRIPTION = 200 };

static const char *kind_name(uint32_t kind)
{
    static const char *const names[] = {"?",          "all_gather", "reduce_scatter",
                                        "all_reduce", "broadcast",  "all_to_all"};
    return kind < sizeof names / sizeof *names ? names[kind] : names[0];
}

static bool has_op(uint32_t kind)
{
    return kind == FSDP_REDUCE_SCATTER || kind == FSDP_ALL_REDUCE;
}

/* FNV-1a; 0 is for even parts. */
static uint64_t hash_counts(const int64_t *counts, int n)
{
    uint64_t hash = 0xcbf29ce484222325u;
    for (int i = 0; i < n; i++) {
        for (int byte = 0; byte < 64; byte += 8)
            hash = (hash ^ ((uint64_t)counts[i] >> byte & 0xff)) * 0x100000001b3u;
    }
    return hash ? hash : 1;
}

int64_t fsdp_comm_part(const fsdp_collective *call, int rank)
{
    return call->counts ? call->counts[rank] : call->count;
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

fsdp_comm_header fsdp_comm_head(const fsdp_comm *comm, const fsdp_collective *call)
{
    fsdp_comm_header header;
    memset(&header, 0, sizeof header);
    header.sequence = comm->sequence;
    header.kind = (uint32_t)call->kind;
    header.dtype = (uint32_t)call->dtype;
    if (has_op(header.kind)) {
        header.op = (uint32_t)call->op;
        header.factor = call->op == FSDP_REDUCE_PREMUL_SUM ? call->factor : 0;
    }
    header.root = call->kind == FSDP_BROADCAST ? call->root : 0;
    if (call->kind != FSDP_ALL_TO_ALL) {
        header.count = (uint64_t)(call->counts ? fsdp_comm_place(call, comm->size) : call->count);
        header.counts = call->counts ? hash_counts(call->counts, comm->size) : 0;
    }
    if (call->unit)
        strncpy(header.unit, call->unit, sizeof header.unit - 1);
    return header;
}

/* --- for people ------------------------------------------------------------------------------- */

static void describe_op(const fsdp_comm_header *header, char *out, size_t out_size)
{
    static const char *const names[] = {"sum", "avg", "max", "premul_sum"};
    out[0] = '\0';
    if (!has_op(header->kind) || header->op == FSDP_REDUCE_SUM)
        return;
    if (header->op == FSDP_REDUCE_PREMUL_SUM)
        snprintf(out, out_size, " (premul_sum, %g)", header->factor);
    else
        snprintf(out, out_size, " (%s)", header->op < 4 ? names[header->op] : "?");
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
    char op[48], amount[64], root[32] = "";
    if (header->kind == 0) {
        snprintf(out, out_size, "the making of a group (call %" PRIu64 ")", header->sequence);
        return;
    }
    describe_op(header, op, sizeof op);
    describe_amount(header, amount, sizeof amount);
    if (header->kind == FSDP_BROADCAST)
        snprintf(root, sizeof root, " from member %d", (int)header->root);
    snprintf(out, out_size, "%s%s of %s%s%s%.*s (call %" PRIu64 ")", kind_name(header->kind), op,
             amount, root, header->unit[0] ? " for " : "", FSDP_HEADER_UNIT, header->unit,
             header->sequence);
}

static fsdp_status fail_different(const fsdp_comm *comm, const fsdp_comm_header *headers, int other,
                                  fsdp_error *err)
{
    char first[DESCRIPTION], second[DESCRIPTION];
    fsdp_comm_describe(&headers[0], first, sizeof first);
    fsdp_comm_describe(&headers[other], second, sizeof second);
    if (err)
        err->rank = comm->ranks[other];
    return fsdp_fail(err, FSDP_ERR_USAGE, "rank %d makes %s, rank %d %s%s", comm->ranks[other],
                     second, comm->ranks[0], first,
                     strcmp(first, second) == 0 ? " of other sizes" : "");
}

fsdp_status fsdp_comm_compare(const fsdp_comm *comm, const fsdp_comm_header *headers,
                              fsdp_error *err)
{
    for (int i = 1; i < comm->size; i++) {
        if (memcmp(&headers[i], &headers[0], sizeof *headers) != 0)
            return fail_different(comm, headers, i, err);
    }
    return FSDP_OK;
}
