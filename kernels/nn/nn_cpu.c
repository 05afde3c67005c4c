/* The table of the arithmetic of models on the host, its threads and its memory. See nn.h. */
#include "kernels/nn/nn_cpu.h"
#include "base/core/mem.h"

#include <math.h>
#include <string.h>

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
    .product = fsdp_nn_cpu_product,
    .column_sums = nn_cpu_column_sums,
    .add = nn_cpu_add,
    .norm = nn_cpu_norm,
    .norm_grad = nn_cpu_norm_grad,
    .activate = nn_cpu_activate,
    .activate_grad = nn_cpu_activate_grad,
    .rotate = nn_cpu_rotate,
    .attend = fsdp_nn_cpu_attend,
    .attend_grad = fsdp_nn_cpu_attend_grad,
    .embed = nn_cpu_embed,
    .embed_grad = nn_cpu_embed_grad,
    .cross_entropy = nn_cpu_cross_entropy,
    .finish = finish,
    .close = close_cpu,
};

static bool make_workers(fsdp_nn_cpu *cpu, int threads)
{
    cpu->team = fsdp_nn_team_create(threads);
    if (!cpu->team)
        return false;
    cpu->threads = fsdp_nn_team_threads(cpu->team);
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
