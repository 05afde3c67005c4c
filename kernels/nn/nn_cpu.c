/*
 * The arithmetic of models on the host: activations, norms, rows of tables, products, attention; the table of
 * them, and its memory. See nn.h; nn_team.c has the threads.
 */
#include "kernels/nn/nn_cpu.h"
#include "base/core/mem.h"

#include <limits.h>
#include <math.h>
#include <string.h>

/* === memory of workers ======================================================================== */

static void note_lack_of_memory(fsdp_nn_cpu *cpu)
{
    if (cpu->failure.status == FSDP_OK)
        (void)fsdp_fail_memory(&cpu->failure, "working memory of a model");
}

static bool grow(fsdp_nn_worker *worker, int64_t count)
{
    if (count <= worker->capacity)
        return true;
    fsdp_free(worker->room);
    worker->capacity = 0;
    worker->room = fsdp_alloc_pages((size_t)count * sizeof *worker->room);
    if (worker->room)
        worker->capacity = count;
    return worker->room;
}

/* Memory for so many elements for every worker; false: no memory, which is noted for finish. */
static bool reserve(fsdp_nn_cpu *cpu, int64_t rows, int64_t columns)
{
    int64_t count, bytes;
    bool fits = !fsdp_mul_overflow(rows, columns, &count) &&
                !fsdp_mul_overflow(count, (int64_t)sizeof(float), &bytes);
    for (int i = 0; fits && i < cpu->threads; i++)
        fits = grow(&cpu->workers[i], count);
    if (!fits)
        note_lack_of_memory(cpu);
    return fits;
}

/* === activations and sums ===================================================================== */

/* Activations, with or without a gate, and plain sums of arrays. */

enum { GRAIN = 64 };

static void activate(fsdp_nn_cpu *cpu, const void *call, fsdp_nn_part part)
{
    cpu->loops->activate(call, part.first, part.last);
}

static void nn_cpu_activate(fsdp_nn *nn, const fsdp_nn_activation *call)
{
    fsdp_nn_cpu_run((fsdp_nn_cpu *)nn,
                    (fsdp_nn_cut){.count = call->count, .grain = GRAIN, .work = 1}, activate, call);
}

static void activate_grad(fsdp_nn_cpu *cpu, const void *call, fsdp_nn_part part)
{
    cpu->loops->activate_grad(call, part.first, part.last);
}

static void nn_cpu_activate_grad(fsdp_nn *nn, const fsdp_nn_activation_grad *call)
{
    fsdp_nn_cpu_run((fsdp_nn_cpu *)nn,
                    (fsdp_nn_cut){.count = call->count, .grain = GRAIN, .work = 1}, activate_grad,
                    call);
}

typedef struct add_job {
    float *to;
    const float *from;
} add_job;

static void add(fsdp_nn_cpu *cpu, const void *context, fsdp_nn_part part)
{
    const add_job *job = context;
    cpu->loops->add(job->to + part.first, job->from + part.first, part.last - part.first);
}

static void nn_cpu_add(fsdp_nn *nn, float *to, const float *from, int64_t count)
{
    add_job job = {to, from};
    fsdp_nn_cpu_run((fsdp_nn_cpu *)nn, (fsdp_nn_cut){.count = count, .grain = GRAIN, .work = 1},
                    add, &job);
}

/* === norms ==================================================================================== */

/* Norms of rows, and sums of columns, which are cut along columns so that each is summed in row order. */

enum { COLUMN_GRAIN = 16 };

static void norm_rows(fsdp_nn_cpu *cpu, const void *call, fsdp_nn_part part)
{
    for (int64_t row = part.first; row < part.last; row++)
        cpu->loops->norm(call, row);
}

static void nn_cpu_norm(fsdp_nn *nn, const fsdp_nn_norm *call)
{
    fsdp_nn_cpu_run((fsdp_nn_cpu *)nn,
                    (fsdp_nn_cut){.count = call->rows, .grain = 1, .work = call->columns},
                    norm_rows, call);
}

static void norm_grad_rows(fsdp_nn_cpu *cpu, const void *call, fsdp_nn_part part)
{
    for (int64_t row = part.first; row < part.last; row++)
        cpu->loops->norm_grad(call, row);
}

static void norm_grad_columns(fsdp_nn_cpu *cpu, const void *call, fsdp_nn_part part)
{
    cpu->loops->norm_grad_columns(call, part.first, part.last);
}

static void nn_cpu_norm_grad(fsdp_nn *nn, const fsdp_nn_norm_grad *call)
{
    fsdp_nn_cpu *cpu = (fsdp_nn_cpu *)nn;
    fsdp_nn_cpu_run(cpu, (fsdp_nn_cut){.count = call->rows, .grain = 1, .work = call->columns},
                    norm_grad_rows, call);
    if (call->dweight || call->dbias)
        fsdp_nn_cpu_run(
            cpu, (fsdp_nn_cut){.count = call->columns, .grain = COLUMN_GRAIN, .work = call->rows},
            norm_grad_columns, call);
}

typedef struct column_sums_job {
    float *sums;
    const float *x;
    int64_t rows, columns;
} column_sums_job;

static void sum_columns(fsdp_nn_cpu *cpu, const void *context, fsdp_nn_part part)
{
    const column_sums_job *job = context;
    for (int64_t row = 0; row < job->rows; row++)
        cpu->loops->add(job->sums + part.first, job->x + row * job->columns + part.first,
                        part.last - part.first);
}

static void nn_cpu_column_sums(fsdp_nn *nn, float *sums, const float *x, int64_t rows,
                               int64_t columns)
{
    column_sums_job job = {sums, x, rows, columns};
    fsdp_nn_cpu_run((fsdp_nn_cpu *)nn,
                    (fsdp_nn_cut){.count = columns, .grain = COLUMN_GRAIN, .work = rows},
                    sum_columns, &job);
}

/* === rotations ================================================================================ */

/* Rotary positions: pairs of elements of a head, head_dim / 2 apart, rotated by an angle of their
 * position. */

static void rotate_rows(fsdp_nn_cpu *cpu, const void *context, fsdp_nn_part part)
{
    const fsdp_nn_rotation *call = context;
    const int64_t half = call->head_dim / 2;
    for (int64_t row = part.first; row < part.last; row++) {
        int64_t table = (call->first + row % call->length) * half;
        float *x = call->x + row * call->row;
        for (int64_t head = 0; head < call->heads; head++)
            cpu->loops->rotate(x + head * call->head_dim, call->cos + table, call->sin + table,
                               half, call->backward);
    }
}

static void nn_cpu_rotate(fsdp_nn *nn, const fsdp_nn_rotation *call)
{
    fsdp_nn_cut cut = {
        .count = call->sequences * call->length, .grain = 1, .work = call->heads * call->head_dim};
    fsdp_nn_cpu_run((fsdp_nn_cpu *)nn, cut, rotate_rows, call);
}

/* === embeddings =============================================================================== */

/* Rows of a table are copied by their ids. Gradients are cut along columns: rows are added in their order. */

enum { EMBED_COLUMN_GRAIN = 16 };

static void embed_rows(fsdp_nn_cpu *cpu, const void *context, fsdp_nn_part part)
{
    const fsdp_nn_embedding *call = context;
    const int64_t columns = call->columns;
    for (int64_t row = part.first; row < part.last; row++) {
        const float *from = call->table + call->ids[row] * columns;
        float *out = call->out + row * columns;
        int64_t position = call->first + row % call->length;
        if (call->positions)
            cpu->loops->sum(out, from, call->positions + position * columns, columns);
        else
            memcpy(out, from, (size_t)columns * sizeof *out);
    }
}

static void nn_cpu_embed(fsdp_nn *nn, const fsdp_nn_embedding *call)
{
    fsdp_nn_cut cut = {.count = call->sequences * call->length, .grain = 1, .work = call->columns};
    fsdp_nn_cpu_run((fsdp_nn_cpu *)nn, cut, embed_rows, call);
}

static void embed_grad_columns(fsdp_nn_cpu *cpu, const void *context, fsdp_nn_part part)
{
    const fsdp_nn_embedding_grad *call = context;
    const int64_t columns = call->columns, width = part.last - part.first;
    for (int64_t row = 0; row < call->sequences * call->length; row++) {
        const float *dout = call->dout + row * columns + part.first;
        cpu->loops->add(call->dtable + call->ids[row] * columns + part.first, dout, width);
        if (call->dpositions)
            cpu->loops->add(call->dpositions + row % call->length * columns + part.first, dout,
                            width);
    }
}

static void nn_cpu_embed_grad(fsdp_nn *nn, const fsdp_nn_embedding_grad *call)
{
    fsdp_nn_cut cut = {.count = call->columns,
                       .grain = EMBED_COLUMN_GRAIN,
                       .work = call->sequences * call->length};
    fsdp_nn_cpu_run((fsdp_nn_cpu *)nn, cut, embed_grad_columns, call);
}

/* === cross entropy ============================================================================ */

/* Softmax and cross entropy of rows of logits; the gradient takes their place. */

static void cross_entropy_rows(fsdp_nn_cpu *cpu, const void *context, fsdp_nn_part part)
{
    const fsdp_nn_cross_entropy *call = context;
    const fsdp_nn_loops *loops = cpu->loops;
    for (int64_t row = part.first; row < part.last; row++) {
        float *logits = call->logits + row * call->columns;
        const int64_t target = call->targets[row];
        float largest = loops->largest(logits, call->columns);
        double right = (double)logits[target];
        double sum = loops->exponentials(call->keeps_logits ? NULL : logits, logits, call->columns,
                                         1.0f, largest);
        if (call->losses)
            call->losses[row] = log(sum) + ((double)largest - right);
        if (call->keeps_logits)
            continue;
        float right_exp = logits[target];
        loops->multiply(logits, call->columns, (float)(call->scale / sum));
        logits[target] = (float)(call->scale * ((double)right_exp / sum - 1));
    }
}

static void nn_cpu_cross_entropy(fsdp_nn *nn, const fsdp_nn_cross_entropy *call)
{
    fsdp_nn_cut cut = {.count = call->rows, .grain = 1, .work = call->columns};
    fsdp_nn_cpu_run((fsdp_nn_cpu *)nn, cut, cross_entropy_rows, call);
}

/* === products ================================================================================= */

/*
 * Products, on kernels/train/matrix.c, cut along the longer side of the result.
 *
 * A product with b transposed, as x W^T of a linear layer is, can be made in two ways of the same bits. With
 * few rows the result is made transposed, W x^T, a chunk at a time, and transposed: W, the large one, is read
 * in place. With many rows W is transposed block by block on its way into the packed panels.
 */

enum {
    CHUNK = 1 << 18, /* elements of a transposed result: they stay in the last cache */
};

typedef struct product_job {
    const fsdp_nn_product *call;
    fsdp_matrix a, b;
    bool by_columns, is_turned;
    int64_t chunk; /* columns of a transposed result */
} product_job;

static fsdp_matrix matrix_of(const float *data, int64_t rows, int64_t columns, bool is_turned)
{
    return is_turned ? (fsdp_matrix){data, 1, rows} : (fsdp_matrix){data, columns, 1};
}

static fsdp_matrix part_of(fsdp_matrix whole, int64_t row, int64_t column)
{
    whole.data += row * whole.row + column * whole.column;
    return whole;
}

static fsdp_matrix turned(fsdp_matrix matrix)
{
    return (fsdp_matrix){matrix.data, matrix.column, matrix.row};
}

/* The rows [row, row + rows) of the columns [first, last). */
static void make_turned(fsdp_nn_cpu *cpu, const product_job *job, fsdp_nn_part part, int64_t row,
                        int64_t rows)
{
    const fsdp_nn_product *call = job->call;
    fsdp_nn_worker *worker = &cpu->workers[part.worker];
    for (int64_t j = part.first; j < part.last; j += job->chunk) {
        int64_t columns = part.last - j < job->chunk ? part.last - j : job->chunk;
        fsdp_matrix_product product = {.c = worker->room,
                                       .c_row = rows,
                                       .a = turned(part_of(job->b, 0, j)),
                                       .b = turned(part_of(job->a, row, 0)),
                                       .m = columns,
                                       .n = rows,
                                       .k = call->inner};
        float *out = call->out + row * call->columns + j;
        fsdp_matrix_multiply(&product, &worker->blocks);
        fsdp_matrix_transpose(out, call->columns, worker->room, rows, columns, rows);
        for (int64_t r = 0; call->bias && r < rows; r++)
            cpu->loops->add(out + r * call->columns, call->bias + j, columns);
    }
}

static void make_part(fsdp_nn_cpu *cpu, const void *context, fsdp_nn_part part)
{
    const product_job *job = context;
    const fsdp_nn_product *call = job->call;
    int64_t row = job->by_columns ? 0 : part.first;
    int64_t column = job->by_columns ? part.first : 0;
    int64_t rows = job->by_columns ? call->rows : part.last - part.first;
    int64_t columns = job->by_columns ? part.last - part.first : call->columns;
    if (job->is_turned) {
        make_turned(cpu, job, (fsdp_nn_part){column, column + columns, part.worker}, row, rows);
        return;
    }
    fsdp_matrix_product product = {.c = call->out + row * call->columns + column,
                                   .c_row = call->columns,
                                   .a = part_of(job->a, row, 0),
                                   .b = part_of(job->b, 0, column),
                                   .m = rows,
                                   .n = columns,
                                   .k = call->inner,
                                   .adds = call->adds,
                                   .bias = call->bias && !call->adds ? call->bias + column : NULL};
    fsdp_matrix_multiply(&product, &cpu->workers[part.worker].blocks);
}

/* --- by OpenBLAS ------------------------------------------------------------------------------ */

enum { PIECE = 256 }; /* columns or rows of a call, so that its bits do not depend on the threads */

static bool fits_openblas(const fsdp_nn_product *call)
{
    return call->inner > 0 && call->rows <= INT_MAX && call->columns <= INT_MAX &&
           call->inner <= INT_MAX;
}

/* Columns of a matrix as it is stored: a turned one is stored columns x rows. */
static int stored_columns(int64_t rows, int64_t columns, bool is_turned)
{
    return (int)(is_turned ? rows : columns);
}

/* Computes these rows and columns of the result. */
static void make_piece(const fsdp_nn_cpu *cpu, const product_job *job, int64_t row, int64_t rows,
                       int64_t column, int64_t columns)
{
    enum { ROW_MAJOR = 101, AS_STORED = 111, TURNED = 112 };
    const fsdp_nn_product *call = job->call;
    float *out = call->out + row * call->columns + column;
    const bool has_bias = call->bias && !call->adds;
    for (int64_t r = 0; has_bias && r < rows; r++)
        memcpy(out + r * call->columns, call->bias + column, (size_t)columns * sizeof *out);
    cpu->blas->sgemm(
        ROW_MAJOR, call->a_is_turned ? TURNED : AS_STORED, call->b_is_turned ? TURNED : AS_STORED,
        (int)rows, (int)columns, (int)call->inner, 1, part_of(job->a, row, 0).data,
        stored_columns(call->rows, call->inner, call->a_is_turned), part_of(job->b, 0, column).data,
        stored_columns(call->inner, call->columns, call->b_is_turned),
        call->adds || has_bias ? 1 : 0, out, (int)call->columns);
}

static void make_pieces(fsdp_nn_cpu *cpu, const void *context, fsdp_nn_part part)
{
    const product_job *job = context;
    for (int64_t at = part.first; at < part.last; at += PIECE) {
        int64_t some = part.last - at < PIECE ? part.last - at : PIECE;
        if (job->by_columns)
            make_piece(cpu, job, 0, job->call->rows, at, some);
        else
            make_piece(cpu, job, at, some, 0, job->call->columns);
    }
}

/* --- the call --------------------------------------------------------------------------------- */

static void nn_cpu_product(fsdp_nn *nn, const fsdp_nn_product *call)
{
    fsdp_nn_cpu *cpu = (fsdp_nn_cpu *)nn;
    if (call->rows <= 0 || call->columns <= 0)
        return;
    product_job job = {.call = call,
                       .a = matrix_of(call->a, call->rows, call->inner, call->a_is_turned),
                       .b = matrix_of(call->b, call->inner, call->columns, call->b_is_turned),
                       .by_columns = call->columns >= call->rows};
    const bool by_openblas = cpu->blas && fits_openblas(call);
    job.is_turned = !by_openblas && call->b_is_turned && !call->a_is_turned && !call->adds &&
                    call->rows < call->inner;
    if (job.is_turned) {
        int64_t chunk = CHUNK / call->rows / FSDP_MATRIX_ROWS * FSDP_MATRIX_ROWS;
        job.chunk = chunk > 0 ? chunk : FSDP_MATRIX_ROWS;
        job.chunk = job.chunk < call->columns ? job.chunk : call->columns;
        if (!reserve(cpu, call->rows, job.chunk))
            return;
    }
    int64_t across = job.by_columns ? call->rows : call->columns;
    fsdp_nn_cut cut = {.count = job.by_columns ? call->columns : call->rows,
                       .grain = job.by_columns ? FSDP_TILE_COLUMNS : FSDP_TILE_ROWS,
                       .work = (across * call->inner) / 16 + 1};
    if (by_openblas)
        cut.grain = PIECE;
    fsdp_nn_cpu_run(cpu, cut, by_openblas ? make_pieces : make_part, &job);
}

/* === attention ================================================================================ */

/*
 * Causal attention, a block of query rows of one head at a time: scores = Q K^T, softmax of each row over the
 * keys that it sees, out = P V. Only the scores of a block are in memory. Backward makes P again from the
 * scores and log_sum. Masked elements of P are zero, so that they do not change the chain of a product.
 *
 * Forward is cut over sequences, heads and blocks; backward over sequences and kv heads, whose dk and dv are
 * sums over the query heads of the group and over blocks, in their order.
 */

enum { QUERIES = FSDP_MATRIX_ROWS };

static int64_t smaller(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static int64_t larger(int64_t a, int64_t b)
{
    return a > b ? a : b;
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
    int64_t rows = smaller(call->queries - first, QUERIES);
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
    return call->window > 0 && call->window < call->keys - QUERIES ? call->window + QUERIES
                                                                   : call->keys;
}

/* --- forward ---------------------------------------------------------------------------------- */

static void attend_block(fsdp_nn_cpu *cpu, query_block block, const fsdp_nn_worker *worker)
{
    const fsdp_nn_attention *call = block.call;
    const fsdp_nn_loops *loops = cpu->loops;
    float inverse[QUERIES], *out = call->out + out_offset(&block);
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
    return (call->queries + QUERIES - 1) / QUERIES;
}

static void attend_blocks(fsdp_nn_cpu *cpu, const void *context, fsdp_nn_part part)
{
    const fsdp_nn_attention *call = context;
    int64_t blocks = block_count(call);
    for (int64_t i = part.first; i < part.last; i++) {
        int64_t head = i / blocks;
        attend_block(cpu,
                     make_block(call, head / call->heads, head % call->heads, i % blocks * QUERIES),
                     &cpu->workers[part.worker]);
    }
}

static void nn_cpu_attend(fsdp_nn *nn, const fsdp_nn_attention *call)
{
    fsdp_nn_cpu *cpu = (fsdp_nn_cpu *)nn;
    if (call->queries <= 0 || call->head_dim <= 0 ||
        !reserve(cpu, smaller(QUERIES, call->queries), most_keys(call)))
        return;
    fsdp_nn_cut cut = {.count = call->sequences * call->heads * block_count(call),
                       .grain = 1,
                       .work = smaller(QUERIES, call->queries) * most_keys(call),
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
            for (int64_t first = 0; first < call->queries; first += QUERIES)
                attend_grad_block(cpu, grad, make_block(call, sequence, head, first),
                                  &cpu->workers[part.worker]);
    }
}

static void nn_cpu_attend_grad(fsdp_nn *nn, const fsdp_nn_attention_grad *call)
{
    fsdp_nn_cpu *cpu = (fsdp_nn_cpu *)nn;
    const fsdp_nn_attention *forward = &call->forward;
    if (forward->queries <= 0 || forward->head_dim <= 0 ||
        !reserve(cpu, 2 * smaller(QUERIES, forward->queries), most_keys(forward)))
        return;
    fsdp_nn_cut cut = {.count = forward->sequences * forward->kv_heads,
                       .grain = 1,
                       .work = forward->queries * forward->keys,
                       .uneven = true};
    fsdp_nn_cpu_run(cpu, cut, attend_grad_heads, call);
}

/* === the table ================================================================================ */

/* --- arrays ----------------------------------------------------------------------------------- */

static float *alloc_array(fsdp_nn *nn, int64_t count)
{
    (void)nn;
    int64_t bytes;
    if (count < 0 || fsdp_mul_overflow(count, (int64_t)sizeof(float), &bytes))
        return NULL;
    return fsdp_alloc_pages((size_t)bytes);
}

static void free_array(fsdp_nn *nn, float *data)
{
    (void)nn;
    fsdp_free(data);
}

typedef struct copy_job {
    float *to;
    const float *from; /* NULL: zeros */
} copy_job;

static void copy_part(fsdp_nn_cpu *cpu, const void *context, fsdp_nn_part part)
{
    (void)cpu;
    const copy_job *job = context;
    size_t size = (size_t)(part.last - part.first) * sizeof *job->to;
    if (job->from)
        memcpy(job->to + part.first, job->from + part.first, size);
    else
        memset(job->to + part.first, 0, size);
}

static void copy_array(fsdp_nn *nn, float *to, const float *from, int64_t count)
{
    enum { PAGE = 1024 };
    copy_job job = {to, from};
    fsdp_nn_cpu_run((fsdp_nn_cpu *)nn, (fsdp_nn_cut){.count = count, .grain = PAGE, .work = 1},
                    copy_part, &job);
}

static void zero_array(fsdp_nn *nn, float *data, int64_t count)
{
    copy_array(nn, data, NULL, count);
}

/* --- the table -------------------------------------------------------------------------------- */

static fsdp_status finish(fsdp_nn *nn, fsdp_error *err)
{
    fsdp_nn_cpu *cpu = (fsdp_nn_cpu *)nn;
    fsdp_status status = cpu->failure.status;
    if (err && status != FSDP_OK)
        *err = cpu->failure;
    cpu->failure = (fsdp_error){0};
    return status;
}

static void close_cpu(fsdp_nn *nn)
{
    fsdp_nn_cpu *cpu = (fsdp_nn_cpu *)nn;
    if (!cpu)
        return;
    fsdp_nn_openblas_give_back(cpu->blas, cpu->threads);
    fsdp_nn_team_free(cpu->team);
    for (int i = 0; cpu->workers && i < cpu->threads; i++) {
        fsdp_free(cpu->workers[i].blocks.a);
        fsdp_free(cpu->workers[i].blocks.b);
        fsdp_free(cpu->workers[i].room);
    }
    fsdp_free(cpu->workers);
    fsdp_free(cpu);
}

static const fsdp_nn_ops cpu_ops = {
    .name = "cpu",
    .alloc = alloc_array,
    .free = free_array,
    .zero = zero_array,
    .copy = copy_array,
    .upload = copy_array,
    .download = copy_array,
    .product = nn_cpu_product,
    .column_sums = nn_cpu_column_sums,
    .add = nn_cpu_add,
    .norm = nn_cpu_norm,
    .norm_grad = nn_cpu_norm_grad,
    .activate = nn_cpu_activate,
    .activate_grad = nn_cpu_activate_grad,
    .rotate = nn_cpu_rotate,
    .attend = nn_cpu_attend,
    .attend_grad = nn_cpu_attend_grad,
    .embed = nn_cpu_embed,
    .embed_grad = nn_cpu_embed_grad,
    .cross_entropy = nn_cpu_cross_entropy,
    .finish = finish,
    .close = close_cpu,
};

static bool make_workers(fsdp_nn_cpu *cpu, int threads)
{
    cpu->threads = threads;
    cpu->team = fsdp_nn_team_create(&cpu->threads);
    if (!cpu->team)
        return false;
    cpu->workers = fsdp_alloc((size_t)cpu->threads, sizeof *cpu->workers);
    for (int i = 0; cpu->workers && i < cpu->threads; i++) {
        fsdp_matrix_scratch *blocks = &cpu->workers[i].blocks;
        blocks->a = fsdp_alloc_pages(FSDP_MATRIX_A_BYTES);
        blocks->b = fsdp_alloc_pages(FSDP_MATRIX_B_BYTES);
        if (!blocks->a || !blocks->b)
            return false;
    }
    return cpu->workers;
}

fsdp_status fsdp_nn_open_cpu(int threads, fsdp_nn **nn_out, fsdp_error *err)
{
    enum { MOST_THREADS = 1024 };
    *nn_out = NULL;
    if (threads < 1 || threads > MOST_THREADS)
        return fsdp_fail(err, FSDP_ERR_USAGE, "cannot compute with %d threads; use 1 to %d",
                         threads, MOST_THREADS);
    const fsdp_nn_openblas *blas = fsdp_nn_openblas_get();
    if (blas->failure.status != FSDP_OK) {
        if (err)
            *err = blas->failure;
        return blas->failure.status;
    }
    fsdp_nn_cpu *cpu = fsdp_alloc(1, sizeof *cpu);
    if (!cpu)
        return fsdp_fail_memory(err, "the arithmetic of models");
    cpu->nn.ops = &cpu_ops;
    cpu->loops = fsdp_nn_loops_get();
    fsdp_status status = make_workers(cpu, threads)
                             ? fsdp_nn_openblas_take(cpu->threads, &cpu->blas, err)
                             : fsdp_fail_memory(err, "the arithmetic of models");
    if (status == FSDP_OK)
        *nn_out = &cpu->nn;
    else
        close_cpu(&cpu->nn);
    return status;
}

const char *fsdp_nn_cpu_variant(void)
{
    return fsdp_nn_loops_get()->name;
}

const char *fsdp_nn_cpu_products(void)
{
    const fsdp_nn_openblas *blas = fsdp_nn_openblas_get();
    return blas->is_used ? blas->name : fsdp_matrix_variant_get()->name;
}
