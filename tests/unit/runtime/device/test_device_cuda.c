/* Device "cuda" over the fake CUDA runtime: memory, streams, events, and every failure. */
#include <criterion/criterion.h>

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "runtime/device/device_cuda.h"
#include "tests/cuda/fake_cudart.h"

enum {
    SIZE = 4096,
    EVENTS = 1024,
    SEEDS = 24,
    ILLEGAL_ADDRESS = 700,
    OUT_OF_MEMORY = 2,
    ECC = 214
};

/* Two streams of rank 3, with memory of the device and of staging. */
typedef struct pair {
    fsdp_device *device;
    const fsdp_device_ops *ops;
    fsdp_stream *one, *two;
    unsigned char *memory[2], *staging;
} pair;

static const fsdp_device_rank third = {.rank = 3, .local_rank = 3};

static fsdp_status open_pair(pair *self, const fake_cudart_plan *plan, fsdp_error *err)
{
    *self = (pair){0};
    fake_cudart_begin(plan);
    FSDP_TRY(fsdp_device_open("cuda", &third, &self->device, err));
    self->ops = self->device->ops;
    for (int i = 0; i < 2; i++)
        self->memory[i] = self->ops->alloc(self->device, SIZE);
    self->staging = self->ops->alloc_staging(self->device, SIZE);
    FSDP_TRY(self->ops->stream_create(self->device, "all_gather", &self->one, err));
    return self->ops->stream_create(self->device, "compute", &self->two, err);
}

static void close_pair(pair *self)
{
    if (self->one)
        self->ops->stream_free(self->one);
    if (self->two)
        self->ops->stream_free(self->two);
    for (int i = 0; i < 2; i++)
        if (self->memory[i])
            self->ops->dealloc(self->device, self->memory[i], SIZE);
    if (self->staging)
        self->ops->dealloc_staging(self->device, self->staging, SIZE);
    fsdp_device_close(self->device);
    const char *misuse = fake_cudart_end();
    cr_assert_null(misuse, "%s", misuse);
}

static void begin(pair *self, uint64_t seed)
{
    const fake_cudart_plan plan = {.seed = seed};
    fsdp_error err = {0};
    cr_assert_eq(open_pair(self, &plan, &err), FSDP_OK, "%s", err.text);
}

static bool are(const unsigned char *data, int byte)
{
    for (size_t i = 0; i < SIZE; i++)
        if (data[i] != (unsigned char)byte)
            return false;
    return true;
}

static fsdp_status wait_for_host(pair *self, fsdp_stream *stream)
{
    fsdp_error err = {0};
    return self->ops->sync(self->ops->record(stream), &err);
}

/* --- memory ----------------------------------------------------------------------------------- */

Test(device_cuda, copies_reach_memory_of_the_device_of_staging_and_of_the_host)
{
    for (uint64_t seed = 0; seed < SEEDS; seed++) {
        pair self;
        begin(&self, seed);
        const fsdp_device_kernels *kernels = self.ops->kernels;
        unsigned char host[SIZE], back[SIZE];
        memset(host, 7, SIZE);
        kernels->copy(self.one, self.memory[0], host, SIZE);
        kernels->copy(self.one, self.memory[1], self.memory[0], SIZE);
        kernels->copy(self.one, self.staging, self.memory[1], SIZE);
        kernels->fill(self.one, self.memory[1], 8, SIZE);
        kernels->copy(self.one, back, self.memory[1], SIZE);
        kernels->copy(self.one, NULL, NULL, 0);
        cr_assert_eq(wait_for_host(&self, self.one), FSDP_OK);
        cr_expect(are(self.staging, 7));
        cr_expect(are(back, 8));
        close_pair(&self);
    }
}

Test(device_cuda, the_host_does_not_reach_memory_of_the_device)
{
    pair self;
    int ends[2];
    begin(&self, 0);
    cr_assert_eq(pipe(ends), 0);
    if (fake_cudart_is_guarded()) {
        cr_expect_eq(write(ends[1], self.memory[0], 1), -1);
        cr_expect_eq(errno, EFAULT);
    }
    cr_expect_eq(write(ends[1], self.staging, 1), 1);
    close_pair(&self);
}

Test(device_cuda, staging_memory_is_kept_for_later_requests)
{
    pair self;
    begin(&self, 0);
    int before = fake_cudart_calls("cudaHostAlloc");
    for (int i = 0; i < 10; i++) {
        size_t size = (size_t)(1 << 20) - (size_t)i;
        void *data = self.ops->alloc_staging(self.device, size);
        cr_assert_not_null(data);
        memset(data, i, size);
        self.ops->dealloc_staging(self.device, data, size);
    }
    cr_expect_eq(fake_cudart_calls("cudaHostAlloc"), before + 1);
    close_pair(&self);
}

/* To free one would stop the device: steps that need blocks of several sizes find them all again. */
Test(device_cuda, staging_memory_of_all_sizes_is_kept)
{
    pair self;
    begin(&self, 0);
    int before = fake_cudart_calls("cudaHostAlloc"), freed = fake_cudart_calls("cudaFreeHost");
    for (size_t i = 0; i < 24; i++) {
        size_t size = (1 + i % 8) << 24;
        void *data = self.ops->alloc_staging(self.device, size);
        cr_assert_not_null(data);
        self.ops->dealloc_staging(self.device, data, size);
    }
    cr_expect_eq(fake_cudart_calls("cudaHostAlloc"), before + 8);
    cr_expect_eq(fake_cudart_calls("cudaFreeHost"), freed);
    close_pair(&self);
}

/* --- order ------------------------------------------------------------------------------------ */

/* One stream makes what the other one copies out; then it makes something else. */
static bool hand_over(uint64_t seed, const char *ignored)
{
    pair self;
    const fake_cudart_plan plan = {.seed = seed, .ignore_call = ignored};
    bool is_right = open_pair(&self, &plan, NULL) == FSDP_OK;
    for (int byte = 1; byte <= 3; byte++) {
        self.ops->kernels->fill(self.one, self.memory[0], byte, SIZE);
        self.ops->wait(self.two, self.ops->record(self.one));
        self.ops->kernels->copy(self.two, self.staging, self.memory[0], SIZE);
        self.ops->wait(self.one, self.ops->record(self.two));
        self.ops->kernels->fill(self.one, self.memory[0], 99, SIZE);
        is_right &= wait_for_host(&self, self.two) == FSDP_OK && are(self.staging, byte);
    }
    close_pair(&self);
    return is_right;
}

Test(device_cuda, a_stream_waits_for_another_one)
{
    for (uint64_t seed = 0; seed < SEEDS; seed++)
        cr_expect(hand_over(seed, NULL), "seed %d", (int)seed);
}

/* The fake finds what each of these calls is for. */
Test(device_cuda, without_a_wait_a_record_or_a_sync_results_are_wrong)
{
    static const char *const calls[] = {"cudaStreamWaitEvent", "cudaEventRecord",
                                        "cudaEventSynchronize"};
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
        int wrong = 0;
        for (uint64_t seed = 1; seed < SEEDS; seed++)
            wrong += !hand_over(seed, calls[i]);
        cr_expect_gt(wrong, 0, "%s is not missed", calls[i]);
    }
}

Test(device_cuda, events_are_bounded_and_old_ones_are_reached)
{
    for (uint64_t seed = 0; seed < 6; seed++) {
        pair self;
        begin(&self, seed);
        fsdp_event old = self.ops->record(self.one);
        for (int i = 0; i < 3 * EVENTS; i++) {
            self.ops->kernels->fill(self.one, self.memory[0], i, 1);
            (void)self.ops->record(self.one);
        }
        cr_expect_eq(fake_cudart_calls("cudaEventCreateWithFlags"), EVENTS);
        cr_expect(self.ops->is_reached(old));
        int waits = fake_cudart_calls("cudaStreamWaitEvent");
        self.ops->wait(self.two, old);
        cr_expect_eq(fake_cudart_calls("cudaStreamWaitEvent"), waits);
        cr_expect(self.ops->is_reached((fsdp_event){0}));
        close_pair(&self);
    }
}

/* The place of an event is recorded again once the host has waited for it. */
Test(device_cuda, an_event_without_a_place_is_reached)
{
    for (uint64_t seed = 0; seed < SEEDS; seed++) {
        pair self;
        begin(&self, seed);
        self.ops->kernels->fill(self.one, self.staging, 5, SIZE);
        fsdp_event old = self.ops->record(self.one);
        for (int i = 0; i < EVENTS; i++)
            (void)self.ops->record(self.one);
        cr_expect(self.ops->is_reached(old));
        cr_expect(are(self.staging, 5), "seed %d", (int)seed);
        close_pair(&self);
    }
}

/* Memory of a stream that has failed is given back after this. */
Test(device_cuda, a_failed_sync_waits_for_the_work_before_it)
{
    for (uint64_t seed = 0; seed < SEEDS; seed++) {
        pair self;
        const fake_cudart_plan plan = {
            .seed = seed, .fail_call = "cudaEventRecord", .fail_at = 1, .fail_code = OUT_OF_MEMORY};
        cr_assert_eq(open_pair(&self, &plan, NULL), FSDP_OK);
        self.ops->kernels->fill(self.one, self.staging, 5, SIZE);
        cr_expect_eq(wait_for_host(&self, self.one), FSDP_ERR_LIMIT);
        cr_expect(are(self.staging, 5), "seed %d", (int)seed);
        close_pair(&self);
    }
}

Test(device_cuda, who_asks_often_enough_sees_an_event_reached)
{
    for (uint64_t seed = 0; seed < SEEDS; seed++) {
        pair self;
        begin(&self, seed);
        self.ops->kernels->fill(self.one, self.staging, 5, SIZE);
        fsdp_event event = self.ops->record(self.one);
        while (!self.ops->is_reached(event))
            usleep(10);
        cr_expect(are(self.staging, 5));
        close_pair(&self);
    }
}

/* --- host work -------------------------------------------------------------------------------- */

typedef struct host_work {
    pair *self;
    int *count;
    fsdp_status status;
} host_work;

static fsdp_status fill_by_host(void *args, fsdp_error *err)
{
    const host_work *work = args;
    ++*work->count;
    work->self->ops->kernels->fill(work->self->one, work->self->memory[0], 3, SIZE);
    if (work->status != FSDP_OK)
        return fsdp_fail(err, work->status, "rank 1 has left");
    return FSDP_OK;
}

Test(device_cuda, host_work_runs_at_once_and_gives_the_stream_its_work)
{
    pair self;
    int count = 0;
    fsdp_error err = {0};
    begin(&self, 1);
    host_work work = {.self = &self, .count = &count};
    self.ops->submit(self.one, fill_by_host, &work, sizeof work);
    cr_expect_eq(count, 1);
    self.ops->kernels->copy(self.one, self.staging, self.memory[0], SIZE);
    cr_expect_eq(wait_for_host(&self, self.one), FSDP_OK);
    cr_expect(are(self.staging, 3));
    work.status = FSDP_ERR_PEER;
    self.ops->submit(self.one, fill_by_host, &work, sizeof work);
    self.ops->submit(self.one, fill_by_host, &work, sizeof work);
    cr_expect_eq(count, 2, "work after a failure is skipped");
    self.ops->wait(self.two, self.ops->record(self.one));
    cr_expect_eq(self.ops->check(self.two, &err), FSDP_ERR_PEER);
    cr_expect_str_eq(err.text, "rank 1 has left");
    close_pair(&self);
}

/* --- failures --------------------------------------------------------------------------------- */

/* The text of the first failure of a few pieces of work. */
static fsdp_status work_with(const fake_cudart_plan *plan, fsdp_error *err)
{
    pair self;
    fsdp_status status = open_pair(&self, plan, err);
    if (status == FSDP_OK) {
        self.ops->kernels->fill(self.one, self.memory[0], 1, 64);
        self.ops->kernels->copy(self.one, self.memory[1], self.memory[0], SIZE);
        self.ops->wait(self.two, self.ops->record(self.one));
        self.ops->kernels->copy(self.two, self.staging, self.memory[1], SIZE);
        status = self.ops->sync(self.ops->record(self.two), err);
    }
    if (status == FSDP_OK)
        status = self.ops->check(self.one, err);
    close_pair(&self);
    return status;
}

typedef struct failure {
    fake_cudart_plan plan;
    fsdp_status status;
    const char *text;
} failure;

Test(device_cuda, an_error_names_the_rank_the_call_its_size_and_the_stream)
{
    static const failure failures[] = {
        {{.fail_call = "cudaMemcpyAsync", .fail_at = 1, .fail_code = ILLEGAL_ADDRESS},
         FSDP_ERR_INTERNAL,
         "rank 3: cudaMemcpyAsync of 4096 bytes (stream all_gather) after cudaMemsetAsync of 64 "
         "bytes: an illegal memory access was encountered"},
        {{.fail_call = "cudaMemsetAsync", .fail_at = 1, .fail_code = OUT_OF_MEMORY},
         FSDP_ERR_LIMIT,
         "rank 3: cudaMemsetAsync of 64 bytes (stream all_gather): out of memory"},
        {{.fail_call = "cudaEventRecord", .fail_at = 1, .fail_code = ECC},
         FSDP_ERR_IO,
         "rank 3: cudaEventRecord (stream all_gather) after cudaMemcpyAsync of 4096 bytes: "
         "uncorrectable ECC error encountered"},
        {{.fail_call = "cudaStreamWaitEvent", .fail_at = 1, .fail_code = ILLEGAL_ADDRESS},
         FSDP_ERR_INTERNAL,
         "rank 3: cudaStreamWaitEvent (stream compute): an illegal memory access was "
         "encountered"},
        {{.fail_call = "cudaStreamCreateWithPriority", .fail_at = 2, .fail_code = OUT_OF_MEMORY},
         FSDP_ERR_LIMIT,
         "rank 3: cudaStreamCreateWithPriority (stream compute): out of memory"},
        {{.fail_call = "cudaStreamQuery", .fail_at = 1, .fail_code = ILLEGAL_ADDRESS},
         FSDP_ERR_INTERNAL,
         "rank 3: cudaStreamQuery (stream all_gather) after cudaMemcpyAsync of 4096 bytes: an "
         "illegal memory access was encountered"},
    };
    for (size_t i = 0; i < sizeof failures / sizeof *failures; i++) {
        fsdp_error err = {0};
        cr_expect_eq(work_with(&failures[i].plan, &err), failures[i].status);
        cr_expect_str_eq(err.text, failures[i].text);
        cr_expect_eq(err.rank, 3);
    }
}

/* A fault of a kernel shows at a later call, whatever the order. */
Test(device_cuda, a_fault_of_earlier_work_is_found)
{
    for (uint64_t seed = 0; seed < SEEDS; seed++) {
        for (int at = 1; at <= 3; at++) {
            fsdp_error err = {0};
            const fake_cudart_plan plan = {
                .seed = seed, .fail_work_at = at, .fail_code = ILLEGAL_ADDRESS};
            cr_expect_eq(work_with(&plan, &err), FSDP_ERR_INTERNAL);
            cr_expect_not_null(strstr(err.text, "illegal memory access"), "%s", err.text);
        }
    }
}

/* All is given back, and the error is found unless no call comes after it. */
Test(device_cuda, every_call_may_fail)
{
    static const char *const calls[] = {"cudaMemcpyAsync",
                                        "cudaMemsetAsync",
                                        "cudaEventRecord",
                                        "cudaEventCreateWithFlags",
                                        "cudaStreamWaitEvent",
                                        "cudaEventSynchronize",
                                        "cudaStreamQuery",
                                        "cudaStreamCreateWithPriority",
                                        "cudaFree",
                                        "cudaFreeHost",
                                        "cudaEventDestroy",
                                        "cudaStreamDestroy",
                                        "cudaGetDeviceCount",
                                        "cudaGetDeviceProperties",
                                        "cudaStreamSynchronize"};
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
        bool is_of_end = strstr(calls[i], "Free") || strstr(calls[i], "Destroy") ||
                         strstr(calls[i], "StreamSynchronize");
        fsdp_error err = {0};
        const fake_cudart_plan plan = {
            .fail_call = calls[i], .fail_at = 1, .fail_code = ILLEGAL_ADDRESS};
        fsdp_status status = work_with(&plan, &err);
        cr_expect_eq(status == FSDP_OK, is_of_end, "%s: %s", calls[i], err.text);
        cr_expect_gt(fake_cudart_calls(calls[i]), 0);
    }
}

Test(device_cuda, memory_that_is_missing_is_null_and_breaks_nothing)
{
    pair self;
    begin(&self, 0);
    cr_expect_null(self.ops->alloc(self.device, (size_t)1 << 40));
    cr_expect_null(self.ops->alloc_staging(self.device, (size_t)1 << 40));
    cr_expect_null(self.ops->alloc_staging(self.device, SIZE_MAX));
    self.ops->kernels->fill(self.one, self.staging, 1, SIZE);
    cr_expect_eq(wait_for_host(&self, self.one), FSDP_OK);
    close_pair(&self);
}

/* Blocks that are kept make way for one that finds no memory. */
Test(device_cuda, kept_staging_memory_makes_way)
{
    pair self;
    const fake_cudart_plan plan = {
        .fail_call = "cudaHostAlloc", .fail_at = 3, .fail_code = OUT_OF_MEMORY};
    cr_assert_eq(open_pair(&self, &plan, NULL), FSDP_OK);
    void *kept = self.ops->alloc_staging(self.device, 1 << 20);
    self.ops->dealloc_staging(self.device, kept, 1 << 20);
    void *other = self.ops->alloc_staging(self.device, 1 << 16);
    cr_expect_not_null(other);
    self.ops->dealloc_staging(self.device, other, 1 << 16);
    close_pair(&self);
}

/* --- what is missing -------------------------------------------------------------------------- */

typedef struct missing {
    const char *name;
    fake_cudart_plan plan;
    const char *words[3];
} missing;

Test(device_cuda, what_is_missing_is_named_with_what_to_do)
{
    static const missing cases[] = {
        {"cuda",
         {.driver = -1},
         {"there is no NVIDIA driver", "libcuda.so.1", "install the driver"}},
        {"cuda",
         {.driver = 11080},
         {"supports CUDA 11.8", "is built with", "install NVIDIA driver "}},
        {"cuda",
         {.devices = -1},
         {"finds no GPU", "/dev/nvidia*", "CUDA_VISIBLE_DEVICES is not set"}},
        {"cuda", {.major = 7, .minor = 5}, {"GPU 1 (a GPU of tests)", "7.5", "8.0 or later"}},
        {"cuda:2", {.devices = 2}, {"device 'cuda:2'", "the last GPU of this host is cuda:1", ""}},
        {"cuda:x", {0}, {"device 'cuda:x'", "a number must follow cuda:", ""}},
        {"cuda:", {0}, {"device 'cuda:'", "a number must follow cuda:", ""}},
        {"cuda",
         {.fail_call = "cudaGetDeviceCount", .fail_at = 1, .fail_code = 802},
         {"cudaGetDeviceCount: system not yet initialized", "nvidia-smi", "--device cpu"}},
        {"cuda",
         {.fail_call = "cudaDeviceGetStreamPriorityRange", .fail_at = 1, .fail_code = 46},
         {"does not answer", "busy or unavailable", "nvidia-smi"}},
        {"gpu", {0}, {"unknown device 'gpu'", "cuda:N", "cpu-async"}},
    };
    unsetenv("CUDA_VISIBLE_DEVICES");
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        fsdp_error err = {0};
        fsdp_device *device = NULL;
        fake_cudart_plan plan = cases[i].plan;
        plan.devices = plan.devices ? plan.devices : 2;
        fake_cudart_begin(&plan);
        cr_expect_eq(fsdp_device_open(cases[i].name, &third, &device, &err), FSDP_ERR_USAGE);
        for (int w = 0; w < 3; w++)
            cr_expect_not_null(strstr(err.text, cases[i].words[w]), "'%s' has not '%s'", err.text,
                               cases[i].words[w]);
        const char *misuse = fake_cudart_end();
        cr_expect_null(misuse, "%s", misuse);
    }
}

/* By the release notes of CUDA; 12.0's driver does not pass 32,764 bytes of parameters. */
Test(device_cuda, the_driver_that_a_runtime_needs_is_named)
{
    static const struct {
        int runtime, driver;
        const char *spelled;
    } cases[] = {{12010, 12010, "NVIDIA driver 530.30.02 or later"},
                 {12090, 12010, "NVIDIA driver 530.30.02 or later"},
                 {13000, 13000, "NVIDIA driver 580.65.06 or later"},
                 {13020, 13000, "NVIDIA driver 580.65.06 or later"},
                 {14030, 14000, "an NVIDIA driver for CUDA 14.0 or later"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char spelled[FSDP_CUDA_DRIVER];
        cr_expect_eq(fsdp_cuda_needed_driver(cases[i].runtime, spelled), cases[i].driver);
        cr_expect_str_eq(spelled, cases[i].spelled);
    }
}

/* Also where the runtime of CUDA takes a driver that is too old for the kernels. */
Test(device_cuda, a_driver_is_judged_by_the_table)
{
    char spelled[FSDP_CUDA_DRIVER];
    const int least = fsdp_cuda_needed_driver(fake_cudart_version(), spelled);
    const struct {
        int driver;
        fsdp_status status;
    } cases[] = {{least - 10, FSDP_ERR_USAGE}, {least, FSDP_OK}, {least + 2000, FSDP_OK}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        fsdp_error err = {0};
        fake_cudart_begin(
            &(fake_cudart_plan){.devices = 1, .driver = cases[i].driver, .takes_any_driver = true});
        cr_expect_eq(fsdp_device_find("cuda", &err), cases[i].status, "%s", err.text);
        cr_expect(cases[i].status == FSDP_OK || strstr(err.text, spelled), "%s", err.text);
    }
}

Test(device_cuda, looking_for_the_device_opens_nothing)
{
    fsdp_error err = {0};
    fake_cudart_begin(&(fake_cudart_plan){.devices = 1});
    cr_expect_eq(fsdp_device_find("cuda", &err), FSDP_OK);
    cr_expect_eq(fsdp_device_find("cpu", &err), FSDP_OK);
    cr_expect_eq(fsdp_device_find("cuda:1", &err), FSDP_ERR_USAGE);
    cr_expect_eq(fsdp_device_find("tpu", &err), FSDP_ERR_USAGE);
    cr_expect_eq(fake_cudart_calls("cudaDeviceGetStreamPriorityRange"), 0);
}

/* --- under watch ------------------------------------------------------------------------------ */

Test(device_cuda, a_watched_device_names_the_stream_that_does_not_wait)
{
    for (int waits = 0; waits < 2; waits++) {
        pair self;
        fsdp_error err = {0};
        begin(&self, 1);
        self.ops->stream_free(self.one);
        self.ops->stream_free(self.two);
        cr_assert_eq(fsdp_device_watch(&self.device, NULL), FSDP_OK);
        self.ops = self.device->ops;
        cr_assert_eq(self.ops->stream_create(self.device, "compute", &self.one, NULL), FSDP_OK);
        cr_assert_eq(self.ops->stream_create(self.device, "reduce", &self.two, NULL), FSDP_OK);
        cr_expect_not_null(self.ops->native(self.one));
        self.ops->kernels->fill(self.one, self.memory[0], 1, SIZE);
        self.ops->own(self.one, self.memory[0], SIZE);
        if (waits)
            self.ops->wait(self.two, self.ops->record(self.one));
        self.ops->use(self.two, self.memory[0]);
        self.ops->kernels->copy(self.two, self.staging, self.memory[0], SIZE);
        cr_expect_eq(self.ops->sync(self.ops->record(self.two), &err),
                     waits ? FSDP_OK : FSDP_ERR_INTERNAL);
        cr_expect_eq(strstr(err.text, "stream reduce uses 4096 bytes of stream compute") != NULL,
                     !waits);
        self.ops->wait(self.one, self.ops->record(self.two));
        self.ops->disown(self.one, self.memory[0]);
        cr_expect_eq(wait_for_host(&self, self.one), waits ? FSDP_OK : FSDP_ERR_INTERNAL);
        close_pair(&self);
    }
}
