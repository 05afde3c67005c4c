/*
 * Products, on kernels/train/matrix.c, cut along the longer side of the result.
 *
 * A product with b transposed, as x W^T of a linear layer is, can be made in two ways of the same bits. With
 * few rows the result is made transposed, W x^T, a chunk at a time, and transposed: W, the large one, is read
 * in place. With many rows W is transposed block by block on its way into the packed panels.
 */
#include "kernels/nn/nn_cpu.h"

#include <limits.h>
#include <string.h>

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

void fsdp_nn_cpu_product(fsdp_nn *nn, const fsdp_nn_product *call)
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
        if (!fsdp_nn_cpu_reserve(cpu, call->rows, job.chunk))
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
