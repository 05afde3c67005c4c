/*
 * Causal attention, a block of query rows of one head at a time: scores = Q K^T, softmax of each row over the
 * keys that it sees, out = P V. Only the scores of a block are in memory. Backward makes P again from the
 * scores and log_sum. Masked elements of P are zero, so that they do not change the chain of a product.
 *
 * Forward is cut over sequences, heads and blocks; backward over sequences and kv heads, whose dk and dv are
 * sums over the query heads of the group and over blocks, in their order.
 */
#include "kernels/nn/nn_cpu.h"

#include <math.h>
#include <string.h>

enum { BLOCK = FSDP_MATRIX_ROWS };

static int64_t smaller(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static int64_t larger(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

static fsdp_matrix turned(fsdp_matrix matrix)
{
    return (fsdp_matrix){matrix.data, matrix.column, matrix.row};
}

/* --- a block ---------------------------------------------------------------------------------- */

/* Query rows [first, first + rows) of a head, and the keys [key, key + keys) that any of them sees. */
typedef struct query_block {
    const fsdp_nn_attention *call;
    int64_t sequence, head, first, rows;
    int64_t key, keys;
    float *scores; /* rows x keys */
} query_block;

static query_block make_block(const fsdp_nn_attention *call, int64_t sequence, int64_t head,
                              int64_t first)
{
    int64_t rows = smaller(call->queries - first, BLOCK);
    int64_t position = call->keys - call->queries + first, key = 0;
    if (call->window > 0)
        key = larger(0, position - call->window + 1);
    return (query_block){.call = call,
                         .sequence = sequence,
                         .head = head,
                         .first = first,
                         .rows = rows,
                         .key = key,
                         .keys = position + rows - key};
}

/* The columns of scores that row i sees are [first, end). */
typedef struct seen_keys {
    int64_t first, end;
} seen_keys;

static seen_keys keys_of_row(const query_block *block, int64_t i)
{
    const fsdp_nn_attention *call = block->call;
    int64_t position = call->keys - call->queries + block->first + i, first = 0;
    if (call->window > 0)
        first = larger(0, position - call->window + 1 - block->key);
    return (seen_keys){first, position + 1 - block->key};
}

static void clear_unseen(float *row, seen_keys seen, int64_t keys)
{
    memset(row, 0, (size_t)seen.first * sizeof *row);
    memset(row + seen.end, 0, (size_t)(keys - seen.end) * sizeof *row);
}

/* These return offsets of the block's first row: in q (or dq), in k (or v, dk, dv), in out (or dout). */
static int64_t query_offset(const query_block *block)
{
    const fsdp_nn_attention *call = block->call;
    int64_t row = block->sequence * call->queries + block->first;
    return row * call->q_row + block->head * call->head_dim;
}

static int64_t key_offset(const query_block *block, int64_t stride)
{
    const fsdp_nn_attention *call = block->call;
    int64_t kv_head = block->head / (call->heads / call->kv_heads);
    return (block->sequence * call->key_room + block->key) * stride + kv_head * call->head_dim;
}

static int64_t out_row(const fsdp_nn_attention *call)
{
    return call->heads * call->head_dim;
}

static int64_t out_offset(const query_block *block)
{
    const fsdp_nn_attention *call = block->call;
    int64_t row = block->sequence * call->queries + block->first;
    return row * out_row(call) + block->head * call->head_dim;
}

static int64_t log_sum_offset(const query_block *block)
{
    const fsdp_nn_attention *call = block->call;
    return (block->sequence * call->heads + block->head) * call->queries + block->first;
}

/* to, rows x keys, = rows times the transposed keys (or values). */
static void multiply_by_keys(const query_block *block, float *to, fsdp_matrix rows,
                             fsdp_matrix keys, const fsdp_matrix_scratch *blocks)
{
    fsdp_matrix_product product = {.c = to,
                                   .c_row = block->keys,
                                   .a = rows,
                                   .b = turned(keys),
                                   .m = block->rows,
                                   .n = block->keys,
                                   .k = block->call->head_dim};
    fsdp_matrix_multiply(&product, blocks);
}

/* Counts the scores of the largest block. */
static int64_t most_keys(const fsdp_nn_attention *call)
{
    return call->window > 0 && call->window < call->keys - BLOCK ? call->window + BLOCK
                                                                 : call->keys;
}

/* --- forward ---------------------------------------------------------------------------------- */

static void attend_block(fsdp_nn_cpu *cpu, query_block block, const fsdp_nn_worker *worker)
{
    const fsdp_nn_attention *call = block.call;
    const fsdp_nn_loops *loops = cpu->loops;
    float inverse[BLOCK], *out = call->out + out_offset(&block);
    block.scores = worker->room;
    multiply_by_keys(
        &block, block.scores, (fsdp_matrix){call->q + query_offset(&block), call->q_row, 1},
        (fsdp_matrix){call->k + key_offset(&block, call->k_row), call->k_row, 1}, &worker->blocks);
    for (int64_t i = 0; i < block.rows; i++) {
        seen_keys seen = keys_of_row(&block, i);
        int64_t count = seen.end - seen.first;
        float *row = block.scores + i * block.keys, *scores = row + seen.first;
        float largest = loops->largest(scores, count) * call->scale;
        double sum = loops->exponentials(scores, scores, count, call->scale, largest);
        clear_unseen(row, seen, block.keys);
        inverse[i] = (float)(1 / sum);
        if (call->log_sum)
            call->log_sum[log_sum_offset(&block) + i] = (float)((double)largest + log(sum));
    }
    fsdp_matrix_product product = {.c = out,
                                   .c_row = out_row(call),
                                   .a = {block.scores, block.keys, 1},
                                   .b = {call->v + key_offset(&block, call->v_row), call->v_row, 1},
                                   .m = block.rows,
                                   .n = call->head_dim,
                                   .k = block.keys};
    fsdp_matrix_multiply(&product, &worker->blocks);
    for (int64_t i = 0; i < block.rows; i++)
        loops->multiply(out + i * out_row(call), call->head_dim, inverse[i]);
}

static int64_t block_count(const fsdp_nn_attention *call)
{
    return (call->queries + BLOCK - 1) / BLOCK;
}

static void attend_blocks(fsdp_nn_cpu *cpu, const void *context, fsdp_nn_part part)
{
    const fsdp_nn_attention *call = context;
    int64_t blocks = block_count(call);
    for (int64_t i = part.first; i < part.last; i++) {
        int64_t head = i / blocks;
        attend_block(cpu,
                     make_block(call, head / call->heads, head % call->heads, i % blocks * BLOCK),
                     &cpu->workers[part.worker]);
    }
}

void fsdp_nn_cpu_attend(fsdp_nn *nn, const fsdp_nn_attention *call)
{
    fsdp_nn_cpu *cpu = (fsdp_nn_cpu *)nn;
    if (call->queries <= 0 || call->head_dim <= 0 ||
        !fsdp_nn_cpu_reserve(cpu, smaller(BLOCK, call->queries), most_keys(call)))
        return;
    fsdp_nn_cut cut = {.count = call->sequences * call->heads * block_count(call),
                       .grain = 1,
                       .work = smaller(BLOCK, call->queries) * most_keys(call),
                       .uneven = true};
    fsdp_nn_cpu_run(cpu, cut, attend_blocks, call);
}

/* --- backward --------------------------------------------------------------------------------- */

/* dk or dv += the transposed P (or its gradient, rows x keys) times Q (or dout). */
static void add_to_keys(const query_block *block, float *to, int64_t to_row, const float *scores,
                        fsdp_matrix rows, const fsdp_matrix_scratch *blocks)
{
    fsdp_matrix_product product = {.c = to,
                                   .c_row = to_row,
                                   .a = {scores, 1, block->keys},
                                   .b = rows,
                                   .m = block->keys,
                                   .n = block->call->head_dim,
                                   .k = block->rows,
                                   .adds = true};
    fsdp_matrix_multiply(&product, blocks);
}

static void attend_grad_block(fsdp_nn_cpu *cpu, const fsdp_nn_attention_grad *grad,
                              query_block block, const fsdp_nn_worker *worker)
{
    const fsdp_nn_attention *call = &grad->forward;
    const fsdp_nn_loops *loops = cpu->loops;
    const int64_t across = out_row(call);
    const float *out = call->out + out_offset(&block), *dout = grad->dout + out_offset(&block);
    const float *log_sum = call->log_sum + log_sum_offset(&block);
    const fsdp_matrix q = {call->q + query_offset(&block), call->q_row, 1};
    const fsdp_matrix k = {call->k + key_offset(&block, call->k_row), call->k_row, 1};
    const fsdp_matrix v = {call->v + key_offset(&block, call->v_row), call->v_row, 1};
    const fsdp_matrix d = {dout, across, 1};
    float *dscores = worker->room + block.rows * block.keys;
    block.scores = worker->room;
    multiply_by_keys(&block, block.scores, q, k, &worker->blocks);
    multiply_by_keys(&block, dscores, d, v, &worker->blocks);
    for (int64_t i = 0; i < block.rows; i++) {
        seen_keys seen = keys_of_row(&block, i);
        float *row = block.scores + i * block.keys, *drow = dscores + i * block.keys;
        float delta = (float)loops->dot(dout + i * across, out + i * across, call->head_dim);
        loops->attention_grad(row + seen.first, drow + seen.first, seen.end - seen.first,
                              call->scale, log_sum[i], delta);
        clear_unseen(row, seen, block.keys);
        clear_unseen(drow, seen, block.keys);
    }
    fsdp_matrix_product product = {.c = grad->dq + query_offset(&block),
                                   .c_row = call->q_row,
                                   .a = {dscores, block.keys, 1},
                                   .b = k,
                                   .m = block.rows,
                                   .n = call->head_dim,
                                   .k = block.keys};
    fsdp_matrix_multiply(&product, &worker->blocks);
    add_to_keys(&block, grad->dk + key_offset(&block, call->k_row), call->k_row, dscores, q,
                &worker->blocks);
    add_to_keys(&block, grad->dv + key_offset(&block, call->v_row), call->v_row, block.scores, d,
                &worker->blocks);
}

static void attend_grad_heads(fsdp_nn_cpu *cpu, const void *context, fsdp_nn_part part)
{
    const fsdp_nn_attention_grad *grad = context;
    const fsdp_nn_attention *call = &grad->forward;
    const int64_t group = call->heads / call->kv_heads, dim = call->head_dim;
    for (int64_t i = part.first; i < part.last; i++) {
        int64_t sequence = i / call->kv_heads, kv_head = i % call->kv_heads;
        for (int64_t key = 0; key < call->keys; key++) {
            int64_t row = sequence * call->key_room + key;
            memset(grad->dk + row * call->k_row + kv_head * dim, 0, (size_t)dim * sizeof(float));
            memset(grad->dv + row * call->v_row + kv_head * dim, 0, (size_t)dim * sizeof(float));
        }
        for (int64_t head = kv_head * group; head < (kv_head + 1) * group; head++)
            for (int64_t first = 0; first < call->queries; first += BLOCK)
                attend_grad_block(cpu, grad, make_block(call, sequence, head, first),
                                  &cpu->workers[part.worker]);
    }
}

void fsdp_nn_cpu_attend_grad(fsdp_nn *nn, const fsdp_nn_attention_grad *call)
{
    fsdp_nn_cpu *cpu = (fsdp_nn_cpu *)nn;
    const fsdp_nn_attention *forward = &call->forward;
    if (forward->queries <= 0 || forward->head_dim <= 0 ||
        !fsdp_nn_cpu_reserve(cpu, 2 * smaller(BLOCK, forward->queries), most_keys(forward)))
        return;
    fsdp_nn_cut cut = {.count = forward->sequences * forward->kv_heads,
                       .grain = 1,
                       .work = forward->queries * forward->keys,
                       .uneven = true};
    fsdp_nn_cpu_run(cpu, cut, attend_grad_heads, call);
}
