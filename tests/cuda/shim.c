/*
 * Blocks of threads on the host: each thread is a fiber, which runs until it has to wait for others. Which
 * of those that can continue is next depends on the seed. When none can, although some have not ended, the
 * kernel would hang: that is a failure. See shim.h.
 */
#include "tests/cuda/shim.h"

#include "tests/cuda/fiber.h"

#include <math.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_THREADS = 1024, WARP = 32, MOST_SHARED = 8, GARBAGE = 0xa5 };

__thread fsdp_shim_dim fsdp_shim_thread, fsdp_shim_block, fsdp_shim_block_size, fsdp_shim_blocks;
void (*fsdp_shim_enqueue)(void *stream, void (*run)(void *), void *closure, void (*drop)(void *));

typedef struct closure {
    void (*thread)(const void *launch);
    unsigned blocks, threads;
    uint64_t seed;
    int result;
    _Alignas(16) char launch[];
} closure;

typedef enum wait { READY, AT_BARRIER, IN_WARP, ENDED } wait;

/* A fiber outlives its thread: it runs the thread of that number of every block. */
typedef struct lane {
    fsdp_fiber *fiber;
    unsigned index;
    wait wait;
    int line; /* of the barrier, shuffle or vote */
    unsigned mask, from;
    uint64_t value; /* brought, then received */
} lane;

typedef struct shared_memory {
    int line;
    char *memory;
} shared_memory;

/* The block that this thread of the host runs. */
typedef struct block {
    const closure *launch;
    lane lanes[MOST_THREADS];
    lane *running;
    unsigned ready[MOST_THREADS], ready_count, at_barrier, ended;
    shared_memory shared[MOST_SHARED];
    uint64_t random;
    bool has_failed;
} block;

static _Thread_local block *current;
static pthread_key_t block_key;
static pthread_once_t block_once = PTHREAD_ONCE_INIT;

/* --- seeds ------------------------------------------------------------------------------------ */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static uint64_t seed, launches;
static size_t parameters;
static char failure[256], shown[256];

void fsdp_shim_seed(uint64_t value)
{
    pthread_mutex_lock(&lock);
    seed = value;
    launches = 0;
    pthread_mutex_unlock(&lock);
}

static uint64_t next_random(uint64_t *state)
{
    uint64_t x = *state += UINT64_C(0x9e3779b97f4a7c15);
    x = (x ^ x >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ x >> 27) * UINT64_C(0x94d049bb133111eb);
    return x ^ x >> 31;
}

static uint64_t begin_launch(size_t size)
{
    pthread_mutex_lock(&lock);
    parameters = size;
    uint64_t state = seed + launches++ * UINT64_C(0x9e3779b97f4a7c15);
    pthread_mutex_unlock(&lock);
    return next_random(&state);
}

size_t fsdp_shim_launches(void)
{
    pthread_mutex_lock(&lock);
    size_t count = (size_t)launches;
    pthread_mutex_unlock(&lock);
    return count;
}

size_t fsdp_shim_parameters(void)
{
    pthread_mutex_lock(&lock);
    size_t size = parameters;
    pthread_mutex_unlock(&lock);
    return size;
}

/* --- failures --------------------------------------------------------------------------------- */

/* The failed block is given up: its other threads do not continue. */
__attribute__((format(printf, 2, 3))) static void fail(block *self, const char *format, ...)
{
    va_list arguments;
    self->has_failed = true;
    pthread_mutex_lock(&lock);
    if (!failure[0]) {
        va_start(arguments, format);
        vsnprintf(failure, sizeof failure, format, arguments);
        va_end(arguments);
    }
    pthread_mutex_unlock(&lock);
}

const char *fsdp_shim_failure(void)
{
    pthread_mutex_lock(&lock);
    memcpy(shown, failure, sizeof shown);
    failure[0] = 0;
    pthread_mutex_unlock(&lock);
    return shown[0] ? shown : NULL;
}

/* Describes the first thread that waits, and how many others have ended. */
static void fail_by_hanging(block *self)
{
    unsigned i = 0;
    while (self->lanes[i].wait == ENDED)
        i++;
    const lane *one = &self->lanes[i];
    if (one->wait == AT_BARRIER)
        fail(self,
             "line %d: thread %u waits at a barrier that not all threads reach: of %u, %u wait at "
             "barriers and %u have ended",
             one->line, i, self->launch->threads, self->at_barrier, self->ended);
    else
        fail(self,
             "line %d: thread %u waits for lanes of the mask %x that are absent; of %u threads, %u "
             "have ended",
             one->line, i, one->mask, self->launch->threads, self->ended);
}

/* --- threads that wait ------------------------------------------------------------------------ */

static void make_ready(block *self, lane *one)
{
    one->wait = READY;
    self->ready[self->ready_count++] = one->index;
}

static void wait_for_others(lane *one)
{
    fsdp_fiber_leave(one->fiber);
    fsdp_shim_thread = (fsdp_shim_dim){one->index, 0, 0};
}

static bool take_votes(block *self)
{
    bool any = false;
    for (unsigned i = 0; i < self->launch->threads; i++)
        any |= self->lanes[i].value != 0;
    return any;
}

bool fsdp_shim_barrier_or(bool value, int line)
{
    block *self = current;
    lane *one = self->running;
    unsigned threads = self->launch->threads;
    one->wait = AT_BARRIER;
    one->line = line;
    one->value = value;
    if (++self->at_barrier == threads) {
        bool any = take_votes(self);
        self->at_barrier = 0;
        for (unsigned i = 0; i < threads; i++) {
            if (self->lanes[i].line != line)
                fail(self, "threads wait at the barriers of lines %d and %d", line,
                     self->lanes[i].line);
            self->lanes[i].value = any;
            make_ready(self, &self->lanes[i]);
        }
    }
    wait_for_others(one);
    return one->value != 0;
}

void fsdp_shim_barrier(int line)
{
    (void)fsdp_shim_barrier_or(false, line);
}

static lane *warp_of(block *self, const lane *one)
{
    return &self->lanes[one->index / WARP * WARP];
}

static bool has_arrived(const block *self, const lane *warp, unsigned i, const lane *one)
{
    const lane *other = &warp[i];
    return other->index < self->launch->threads && other->wait == IN_WARP &&
           other->line == one->line && other->mask == one->mask;
}

/* Brings a value; true for the last lane of the mask, when all others wait. */
static bool join_warp(block *self, unsigned mask, uint64_t value, unsigned from, int line)
{
    lane *one = self->running, *warp = warp_of(self, one);
    one->wait = IN_WARP;
    one->line = line;
    one->mask = mask;
    one->value = value;
    one->from = from;
    if (!(mask >> one->index % WARP & 1) || !(mask >> from % WARP & 1))
        fail(self, "line %d: lane %u reads lane %u, and the mask is %x", line, one->index % WARP,
             from % WARP, mask);
    for (unsigned i = 0; i < WARP; i++) {
        if ((mask >> i & 1) && !has_arrived(self, warp, i, one))
            return false;
    }
    return true;
}

/* Gives each lane its value. */
static void end_warp(block *self, unsigned mask, const uint64_t values[WARP])
{
    lane *warp = warp_of(self, self->running);
    for (unsigned i = 0; i < WARP; i++) {
        if (mask >> i & 1) {
            warp[i].value = values[i];
            make_ready(self, &warp[i]);
        }
    }
}

uint64_t fsdp_shim_shuffle(unsigned mask, uint64_t value, unsigned from, int line)
{
    block *self = current;
    lane *one = self->running, *warp = warp_of(self, one);
    if (join_warp(self, mask, value, from, line)) {
        uint64_t values[WARP];
        for (unsigned i = 0; i < WARP; i++)
            values[i] = (mask >> i & 1) ? warp[warp[i].from % WARP].value : 0;
        end_warp(self, mask, values);
    }
    wait_for_others(one);
    return one->value;
}

unsigned fsdp_shim_vote(unsigned mask, bool value, int line)
{
    block *self = current;
    lane *one = self->running, *warp = warp_of(self, one);
    if (join_warp(self, mask, value, one->index, line)) {
        uint64_t votes = 0, values[WARP];
        for (unsigned i = 0; i < WARP; i++)
            votes |= (mask >> i & 1) && warp[i].value ? UINT64_C(1) << i : 0;
        for (unsigned i = 0; i < WARP; i++)
            values[i] = votes;
        end_warp(self, mask, values);
    }
    wait_for_others(one);
    return (unsigned)one->value;
}

/* --- conversions ------------------------------------------------------------------------------ */

/* Numbers are multiples of 2^(exponent - mantissa), where 2^exponent is the power of two below, or
 * that of the subnormal ones. All steps but the rounding are exact. */
unsigned fsdp_shim_encode(fsdp_shim_format format, float number)
{
    int exponent, least = 2 - (1 << (format.exponent - 1));
    double size = fabs((double)number);
    if (isinf(number))
        return format.largest + 1;
    (void)frexp(size, &exponent);
    exponent = exponent - 1 > least && size > 0 ? exponent - 1 : least;
    double steps = nearbyint(ldexp(size, format.mantissa - exponent));
    double code = ldexp(exponent - least, format.mantissa) + steps;
    return code <= format.largest ? (unsigned)code : format.largest + 1;
}

float fsdp_shim_decode(fsdp_shim_format format, unsigned code)
{
    int least = 2 - (1 << (format.exponent - 1)), exponent = (int)(code >> format.mantissa);
    unsigned hidden = 1u << format.mantissa, fraction = code & (hidden - 1);
    int power = (exponent > 0 ? exponent - 1 : 0) + least - format.mantissa;
    return (float)ldexp(exponent > 0 ? hidden + fraction : fraction, power);
}

/* --- memory of a block ------------------------------------------------------------------------ */

void *fsdp_shim_shared(int line, size_t size)
{
    shared_memory *one = current->shared, *end = one + MOST_SHARED;
    while (one < end && one->memory && one->line != line)
        one++;
    if (one == end)
        abort();
    if (!one->memory) {
        one->memory = aligned_alloc(16, (size + 15) / 16 * 16);
        one->line = line;
        if (!one->memory)
            abort();
        memset(one->memory, GARBAGE, size);
    }
    return one->memory;
}

static void free_shared(block *self)
{
    for (int i = 0; i < MOST_SHARED; i++)
        free(self->shared[i].memory);
    memset(self->shared, 0, sizeof self->shared);
}

/* --- a block ---------------------------------------------------------------------------------- */

static void run_threads(void *context)
{
    lane *one = context;
    for (;;) {
        const closure *launch = current->launch;
        fsdp_shim_thread = (fsdp_shim_dim){one->index, 0, 0};
        launch->thread(launch->launch);
        one->wait = ENDED;
        current->ended++;
        fsdp_fiber_leave(one->fiber);
    }
}

static void run_next(block *self)
{
    unsigned pick = (unsigned)(next_random(&self->random) % self->ready_count);
    lane *one = &self->lanes[self->ready[pick]];
    self->ready[pick] = self->ready[--self->ready_count];
    if (!one->fiber)
        one->fiber = fsdp_fiber_create(run_threads, one);
    self->running = one;
    fsdp_fiber_enter(one->fiber);
}

static void free_fibers(block *self)
{
    for (unsigned i = 0; i < MOST_THREADS; i++) {
        fsdp_fiber_free(self->lanes[i].fiber);
        self->lanes[i].fiber = NULL;
    }
}

static void run_block(block *self, unsigned index)
{
    unsigned threads = self->launch->threads;
    fsdp_shim_block = (fsdp_shim_dim){index, 0, 0};
    self->ready_count = self->at_barrier = self->ended = 0;
    for (unsigned i = 0; i < threads; i++)
        make_ready(self, &self->lanes[i]);
    while (self->ready_count > 0 && !self->has_failed)
        run_next(self);
    if (self->ended < threads && !self->has_failed)
        fail_by_hanging(self);
    free_shared(self);
    if (self->has_failed)
        free_fibers(self); /* some are in the middle of the thread */
}

static void free_block(void *context)
{
    free_fibers(context);
    free(context);
}

static void create_key(void)
{
    pthread_key_create(&block_key, free_block);
}

static block *block_of_thread(void)
{
    pthread_once(&block_once, create_key);
    if (!current) {
        current = calloc(1, sizeof *current);
        if (!current)
            abort();
        for (unsigned i = 0; i < MOST_THREADS; i++)
            current->lanes[i].index = i;
        pthread_setspecific(block_key, current);
    }
    return current;
}

/* --- a launch --------------------------------------------------------------------------------- */

static void shuffle_blocks(unsigned *order, unsigned count, uint64_t *random)
{
    for (unsigned i = 0; i < count; i++) {
        unsigned other = (unsigned)(next_random(random) % (i + 1));
        order[i] = order[other];
        order[other] = i;
    }
}

static void run_launch(void *context)
{
    closure *launch = context;
    block *self = block_of_thread();
    unsigned *order = malloc(launch->blocks * sizeof *order);
    if (!order)
        abort();
    self->launch = launch;
    self->random = launch->seed;
    self->has_failed = false;
    fsdp_shim_block_size = (fsdp_shim_dim){launch->threads, 1, 1};
    fsdp_shim_blocks = (fsdp_shim_dim){launch->blocks, 1, 1};
    shuffle_blocks(order, launch->blocks, &self->random);
    for (unsigned i = 0; i < launch->blocks && !self->has_failed; i++)
        run_block(self, order[i]);
    launch->result = self->has_failed ? FSDP_SHIM_LAUNCH_FAILED : 0;
    free(order);
}

int fsdp_shim_launch(void (*thread)(const void *launch), const void *launch, size_t size,
                     unsigned blocks, unsigned threads, void *stream)
{
    closure *one = aligned_alloc(16, (sizeof *one + size + 15) / 16 * 16);
    if (!one || threads > MOST_THREADS)
        abort();
    *one = (closure){
        .thread = thread, .blocks = blocks, .threads = threads, .seed = begin_launch(size)};
    memcpy(one->launch, launch, size);
    if (fsdp_shim_enqueue) {
        fsdp_shim_enqueue(stream, run_launch, one, free);
        return 0;
    }
    run_launch(one);
    int result = one->result;
    free(one);
    return result;
}
