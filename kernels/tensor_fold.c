/*
 * Sums over ranks. Every element is folded in rank order; blocks are short, so that each source is read once
 * and the sum stays in the cache. How a tensor is cut into calls never shows in the result. See tensor.h.
 */
#include "kernels/tensor.h"

#include "kernels/blocks.h"
#include "kernels/integer_fold.h"

typedef struct fold_job {
    fsdp_dtype dtype;
    fsdp_real real;
    const void *const *from;
    int n;
    fsdp_fold fold;
    double multiply, divide;
} fold_job;

static const void *read_source(const fold_job *job, int source, size_t first, size_t count,
                               fsdp_room *room)
{
    const void *data = fsdp_element_const(job->from[source], job->dtype, first);
    if (job->multiply == 1)
        return fsdp_real_read(job->real, data, job->dtype, count, room);
    fsdp_real_load(job->real, data, job->dtype, count, room);
    job->real.loops->multiply(room, count, job->multiply);
    return room;
}

static void sum_block(const fold_job *job, size_t first, size_t count, void *sum)
{
    for (int source = 0; source < job->n; source += FSDP_LOOP_SOURCES) {
        fsdp_room rooms[FSDP_LOOP_SOURCES];
        const void *numbers[FSDP_LOOP_SOURCES];
        int n = job->n - source < FSDP_LOOP_SOURCES ? job->n - source : FSDP_LOOP_SOURCES;
        for (int i = 0; i < n; i++)
            numbers[i] = read_source(job, source + i, first, count, &rooms[i]);
        (source == 0 ? job->real.loops->begin_sum : job->real.loops->add_sum)(sum, numbers, n,
                                                                              count);
    }
}

static void raise_block(const fold_job *job, size_t first, size_t count, void *largest)
{
    for (int source = 0; source < job->n; source++) {
        fsdp_room room;
        const void *numbers = read_source(job, source, first, count, &room);
        if (source == 0)
            job->real.loops->begin_sum(largest, &numbers, 1, count);
        else
            job->real.loops->raise(largest, numbers, count);
    }
}

/* The sum is made aside: what it overwrites may be a source that is still to be read. */
static void fold_block(const fold_job *job, size_t first, size_t count, void *to)
{
    fsdp_room room;
    if (job->fold == FSDP_FOLD_MAX)
        raise_block(job, first, count, &room);
    else
        sum_block(job, first, count, &room);
    if (job->divide == 1)
        job->real.loops->settle(&room, count);
    else
        job->real.loops->divide(&room, count, job->divide);
    fsdp_real_store(job->real, &room, fsdp_element(to, job->dtype, first), job->dtype, count);
}

void fsdp_tensor_fold(void *to, const void *const *from, int n, fsdp_dtype dtype, size_t count,
                      fsdp_fold fold, double multiply, double divide)
{
    const fold_job job = {
        .dtype = dtype,
        .real = fsdp_real_of(dtype),
        .from = from,
        .n = n,
        .fold = fold,
        .multiply = multiply,
        .divide = divide,
    };
    if (fsdp_integer_can_fold(dtype)) {
        fsdp_integer_fold(to, from, n, dtype, count, fold);
        return;
    }
    for (size_t first = 0; first < count; first += FSDP_LOOP_BLOCK)
        fold_block(&job, first, fsdp_block_size(first, count), to);
}

bool fsdp_tensor_can_fold(fsdp_dtype dtype)
{
    switch (dtype) {
    case FSDP_F64:
    case FSDP_F32:
    case FSDP_F16:
    case FSDP_BF16: return true;
    default: return fsdp_integer_can_fold(dtype);
    }
}
