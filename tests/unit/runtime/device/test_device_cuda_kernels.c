/*
 * Kernels of device "cuda" through its table: the .cu files run as fibers on the streams of the fake
 * CUDA runtime, and give the bits of the host's table. tests/unit/kernels/cuda tries each kernel in
 * many ways; here are their arguments, their order and their failures.
 */
#include <criterion/criterion.h>

#include <string.h>

#include "runtime/device/device.h"
#include "tests/cuda/fake_cudart.h"
#include "tests/cuda/shim.h"

enum { COUNT = 1500, SIZE = COUNT * 4, BUFFERS = 6, SEEDS = 6 };

/* Equal buffers on the host and on the GPU, with a stream of each. */
typedef struct both {
    fsdp_device *device[2];
    fsdp_stream *stream[2];
    unsigned char *data[2][BUFFERS], *staging[2];
} both;

static void enqueue(void *stream, void (*run)(void *), void *closure, void (*drop)(void *))
{
    cr_assert_eq(fake_cudart_enqueue(stream, run, closure, drop), 0);
}

static const fsdp_device_ops *ops_of(const both *self, int side)
{
    return self->device[side]->ops;
}

/* Small numbers in all buffers, and those of squares not negative. */
static void fill_buffers(both *self, uint64_t seed)
{
    static float values[COUNT];
    for (int b = 0; b < BUFFERS; b++) {
        for (int i = 0; i < COUNT; i++) {
            float value = (float)((i * 37 + b * 11 + (int)seed * 5) % 101 - 50) / 64;
            values[i] = b == 3 ? value * value : value;
        }
        for (int side = 0; side < 2; side++)
            ops_of(self, side)
                ->kernels->copy(self->stream[side], self->data[side][b], values, SIZE);
    }
}

static void begin(both *self, uint64_t seed)
{
    static const char *const names[] = {"cpu", "cuda"};
    fake_cudart_begin(&(fake_cudart_plan){.seed = seed});
    fsdp_shim_seed(seed);
    fsdp_shim_enqueue = enqueue;
    for (int side = 0; side < 2; side++) {
        cr_assert_eq(fsdp_device_open(names[side], NULL, &self->device[side], NULL), FSDP_OK);
        const fsdp_device_ops *ops = ops_of(self, side);
        for (int b = 0; b < BUFFERS; b++)
            self->data[side][b] = ops->alloc(self->device[side], SIZE);
        self->staging[side] = ops->alloc_staging(self->device[side], SIZE);
        ops->stream_create(self->device[side], "compute", &self->stream[side], NULL);
    }
    fill_buffers(self, seed);
}

/* Compares all buffers, and so many bytes of staging memory. */
static void expect_equal(both *self, size_t staged)
{
    static unsigned char found[2][SIZE];
    fsdp_error err = {0};
    for (int side = 0; side < 2; side++)
        cr_assert_eq(ops_of(self, side)->sync(ops_of(self, side)->record(self->stream[side]), &err),
                     FSDP_OK, "%s", err.text);
    cr_expect_arr_eq(self->staging[0], self->staging[1], staged);
    for (int b = 0; b < BUFFERS; b++) {
        for (int side = 0; side < 2; side++) {
            const fsdp_device_ops *ops = ops_of(self, side);
            ops->kernels->copy(self->stream[side], found[side], self->data[side][b], SIZE);
            cr_assert_eq(ops->sync(ops->record(self->stream[side]), NULL), FSDP_OK);
        }
        cr_expect_arr_eq(found[0], found[1], SIZE, "buffer %d", b);
    }
}

static void end(both *self)
{
    for (int side = 0; side < 2; side++) {
        const fsdp_device_ops *ops = ops_of(self, side);
        ops->stream_free(self->stream[side]);
        for (int b = 0; b < BUFFERS; b++)
            ops->dealloc(self->device[side], self->data[side][b], SIZE);
        ops->dealloc_staging(self->device[side], self->staging[side], SIZE);
        fsdp_device_close(self->device[side]);
    }
    const char *misuse = fake_cudart_end(), *failure = fsdp_shim_failure();
    cr_expect_null(misuse, "%s", misuse);
    cr_expect_null(failure, "%s", failure);
}

/* --- kernels ---------------------------------------------------------------------------------- */

static void do_arithmetic(fsdp_stream *stream, unsigned char *const data[BUFFERS])
{
    const fsdp_device_kernels *kernels = stream->device->ops->kernels;
    const void *from[] = {data[1], data[2], data[3]};
    const fsdp_fold_call fold = {.to = data[0],
                                 .from = from,
                                 .n = 3,
                                 .dtype = FSDP_F32,
                                 .count = COUNT,
                                 .how = {.multiply = 0.5, .divide = 3}};
    const fsdp_rect rect = {data[5], data[1], FSDP_BF16, FSDP_F32, 20, 30, 33, 41};
    kernels->fold(stream, &fold);
    kernels->add(stream, data[0], FSDP_F32, data[4], FSDP_F32, COUNT);
    kernels->multiply(stream, &(fsdp_span){data[1], FSDP_F32, COUNT}, 1, 1.5);
    kernels->divide(stream, data[2], FSDP_F32, COUNT, 7);
    kernels->cast(stream, data[4], FSDP_F16, data[0], FSDP_F32, COUNT);
    kernels->fill(stream, data[5], 0, SIZE);
    kernels->rects(stream, &rect, 1);
}

static void do_steps(fsdp_stream *stream, unsigned char *const data[BUFFERS])
{
    const fsdp_device_kernels *kernels = stream->device->ops->kernels;
    const fsdp_optim_tensors tensors = {.param = data[0],
                                        .param_type = FSDP_F32,
                                        .grad = data[1],
                                        .grad_type = FSDP_F32,
                                        .moments = {data[2], data[3]},
                                        .moment_type = FSDP_F32,
                                        .count = COUNT};
    const fsdp_adamw_step adamw = {.lr = 0.01,
                                   .beta1 = 0.9,
                                   .beta2 = 0.999,
                                   .eps = 1e-8,
                                   .weight_decay = 0.1,
                                   .step = 3,
                                   .grad_scale = 0.5};
    const fsdp_sgd_step sgd = {.lr = 0.1, .momentum = 0.9, .grad_scale = 1};
    kernels->adamw(stream, &tensors, &adamw, 1);
    kernels->sgd(stream, &tensors, &sgd, 1);
}

static void do_results(fsdp_stream *stream, unsigned char *const data[BUFFERS],
                       unsigned char *staging)
{
    const fsdp_device_kernels *kernels = stream->device->ops->kernels;
    const fsdp_span spans[] = {{data[0], FSDP_F32, COUNT}, {data[1], FSDP_F32, 77}};
    double *sums = (double *)(void *)staging;
    kernels->power_sums(stream, spans, 1, 2, sums);
    kernels->power_sums(stream, spans, 2, 2, sums + 1);
    const fsdp_norm_call norm = {
        .sums = sums, .n = 3, .p = 2, .max_norm = 3, .total_out = sums + 4, .factor_out = sums + 5};
    kernels->norm(stream, &norm);
    kernels->are_finite(stream, spans, 2, (int *)(void *)(sums + 3));
    kernels->fill(stream, data[1], 0xff, 4);
    kernels->are_finite(stream, spans, 2, (int *)(void *)(sums + 3) + 1);
}

Test(device_cuda_kernels, each_gives_the_bits_of_the_hosts)
{
    for (uint64_t seed = 0; seed < SEEDS; seed++) {
        both self;
        begin(&self, seed);
        for (int side = 0; side < 2; side++)
            do_arithmetic(self.stream[side], self.data[side]);
        expect_equal(&self, 0);
        fill_buffers(&self, seed + 1);
        for (int side = 0; side < 2; side++) {
            do_steps(self.stream[side], self.data[side]);
            do_results(self.stream[side], self.data[side], self.staging[side]);
        }
        expect_equal(&self, 6 * sizeof(double));
        end(&self);
    }
}

/* A larger request replaces the stream's workspace; smaller ones share it. */
Test(device_cuda_kernels, a_workspace_is_kept_by_its_stream)
{
    both self;
    begin(&self, 1);
    fsdp_span spans[64];
    for (int i = 0; i < 64; i++)
        spans[i] = (fsdp_span){self.data[1][0], FSDP_F32, COUNT};
    int before = fake_cudart_calls("cudaMalloc");
    for (size_t n = 64; n > 0; n /= 2)
        ops_of(&self, 1)->kernels->power_sums(self.stream[1], spans, n, 2,
                                              (double *)(void *)self.staging[1]);
    cr_expect_eq(fake_cudart_calls("cudaMalloc"), before + 1);
    end(&self);
}

/* A kernel that is not taken is named, with its size. */
Test(device_cuda_kernels, an_error_of_a_launch_names_the_kernel)
{
    fsdp_device *device;
    fsdp_stream *stream;
    fsdp_error err = {0};
    fake_cudart_begin(&(fake_cudart_plan){.fail_call = "cudaMalloc", .fail_at = 2, .fail_code = 2});
    cr_assert_eq(fsdp_device_open("cuda", NULL, &device, NULL), FSDP_OK);
    cr_assert_eq(device->ops->stream_create(device, "reduce", &stream, NULL), FSDP_OK);
    void *data = device->ops->alloc(device, SIZE), *staging = device->ops->alloc_staging(device, 8);
    device->ops->kernels->power_sums(stream, &(fsdp_span){data, FSDP_F32, COUNT}, 1, 2, staging);
    cr_expect_eq(device->ops->check(stream, &err), FSDP_ERR_LIMIT);
    cr_expect_not_null(strstr(err.text, "rank 0: a workspace of "), "%s", err.text);
    cr_expect_not_null(strstr(err.text, "(stream reduce): out of memory"), "%s", err.text);
    device->ops->stream_free(stream);
    device->ops->dealloc(device, data, SIZE);
    device->ops->dealloc_staging(device, staging, 8);
    fsdp_device_close(device);
    cr_expect_null(fake_cudart_end());
}
