/* The table of the arithmetic of models on the host, its threads and its memory. See nn.h. */
#include "kernels/nn/nn_cpu.h"

#include "base/core/mem.h"

#include <string.h>

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
    .column_sums = fsdp_nn_cpu_column_sums,
    .add = fsdp_nn_cpu_add,
    .norm = fsdp_nn_cpu_norm,
    .norm_grad = fsdp_nn_cpu_norm_grad,
    .activate = fsdp_nn_cpu_activate,
    .activate_grad = fsdp_nn_cpu_activate_grad,
    .rotate = fsdp_nn_cpu_rotate,
    .attend = fsdp_nn_cpu_attend,
    .attend_grad = fsdp_nn_cpu_attend_grad,
    .embed = fsdp_nn_cpu_embed,
    .embed_grad = fsdp_nn_cpu_embed_grad,
    .cross_entropy = fsdp_nn_cpu_cross_entropy,
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
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "cannot compute with cannot compute with %d threads: 1 to %d are allowed",
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
