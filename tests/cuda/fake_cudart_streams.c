/*
 * Streams and events of the fake CUDA runtime. A stream is a thread with a list of work; `issued`
 * counts the work, `done` that which has ended. By the seed a stream works at once, after delays,
 * or is lazy: it does nothing until somebody waits for a piece of its work, so that a wait that is
 * missing shows. A lazy stream that nobody waits for continues after a while, for its work may be
 * what another rank waits for. See fake_cudart.h.
 */
#include "tests/cuda/fake_cudart_parts.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

enum { MOST_WORK = 1024, IDLE_MS = 20, LONGEST_US = 200, QUERIES = 64 };

typedef enum habit { AT_ONCE, DELAYED, LAZY, HABITS } habit;

typedef struct work {
    struct work *next;
    void (*run)(void *closure);
    void *closure;
    void (*drop)(void *closure);
    struct CUevent_st *recorded, *awaited; /* the piece is one of these, or run */
    uint64_t generation;
} work;

struct CUstream_st {
    struct CUstream_st *next; /* in the list of all */
    bool is_live, is_ending;
    int gpu;
    habit habit;
    uint64_t random, issued, done, needed;
    int queries;
    work *first, *last;
    pthread_t thread;
    pthread_cond_t wanted; /* there is work, somebody waits for it, or the stream ends */
    pthread_cond_t worked; /* `done` is more */
};

struct CUevent_st {
    struct CUevent_st *next;
    bool is_live;
    uint64_t recorded, reached; /* how often */
    cudaStream_t stream;        /* of the last record, which is piece `ticket` of it */
    uint64_t ticket;
    pthread_cond_t fired; /* `reached` is more */
};

/* A change wakes only those who wait for it: there are dozens of streams. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static cudaStream_t streams;
static cudaEvent_t events;
static uint64_t created, works;

/* --- handles ---------------------------------------------------------------------------------- */

cudaStream_t fake_stream_check(cudaStream_t stream, const char *function)
{
    pthread_mutex_lock(&lock);
    cudaStream_t one = streams;
    while (one && one != stream)
        one = one->next;
    bool is_live = one && one->is_live;
    pthread_mutex_unlock(&lock);
    if (!is_live)
        fake_misuse("%s of a stream that is not there", function);
    return is_live ? one : NULL;
}

cudaEvent_t fake_event_check(cudaEvent_t event, const char *function)
{
    pthread_mutex_lock(&lock);
    cudaEvent_t one = events;
    while (one && one != event)
        one = one->next;
    bool is_live = one && one->is_live;
    pthread_mutex_unlock(&lock);
    if (!is_live)
        fake_misuse("%s of an event that is not there", function);
    return is_live ? one : NULL;
}

/* --- waiting: the lock is held ---------------------------------------------------------------- */

/* Somebody waits for this piece of the stream's work. */
static void need(cudaStream_t stream, uint64_t ticket)
{
    if (!stream || ticket <= stream->needed)
        return;
    stream->needed = ticket;
    pthread_cond_signal(&stream->wanted);
}

static void await_ticket(cudaStream_t stream, uint64_t ticket)
{
    need(stream, ticket);
    while (stream->done < ticket)
        pthread_cond_wait(&stream->worked, &lock);
}

static void await_event(cudaEvent_t event, uint64_t generation)
{
    while (event->reached < generation) {
        need(event->stream, event->ticket);
        pthread_cond_wait(&event->fired, &lock);
    }
}

/* --- the thread of a stream ------------------------------------------------------------------- */

/* Without the lock. */
static void delay(cudaStream_t stream)
{
    uint64_t random = fake_random(&stream->random);
    if (stream->habit == DELAYED && random % 4 == 0)
        usleep((useconds_t)(random / 4 % LONGEST_US));
}

static void be_lazy(cudaStream_t stream)
{
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_nsec += IDLE_MS * 1000000L;
    until.tv_sec += until.tv_nsec / 1000000000L;
    until.tv_nsec %= 1000000000L;
    while (stream->habit == LAZY && stream->needed <= stream->done && !stream->is_ending)
        if (pthread_cond_timedwait(&stream->wanted, &lock, &until) == ETIMEDOUT)
            return;
}

static void run(const work *piece)
{
    const fake_cudart_plan *plan = fake_plan();
    if (fake_broken() != cudaSuccess)
        return;
    pthread_mutex_lock(&lock);
    bool fails = ++works == (uint64_t)plan->fail_work_at;
    pthread_mutex_unlock(&lock);
    if (fails)
        fake_break((cudaError_t)plan->fail_code);
    else
        piece->run(piece->closure);
}

static work *unlink_first(cudaStream_t stream)
{
    work *piece = stream->first;
    stream->first = piece->next;
    if (!stream->first)
        stream->last = NULL;
    return piece;
}

/* The lock is held; other pieces run without it. */
static void do_piece(cudaStream_t stream, work *piece)
{
    if (piece->awaited)
        await_event(piece->awaited, piece->generation);
    pthread_mutex_unlock(&lock);
    delay(stream);
    if (piece->run)
        run(piece);
    if (piece->drop)
        piece->drop(piece->closure);
    pthread_mutex_lock(&lock);
    if (piece->recorded && piece->generation > piece->recorded->reached) {
        piece->recorded->reached = piece->generation;
        pthread_cond_broadcast(&piece->recorded->fired);
    }
}

static void *work_of(void *context)
{
    cudaStream_t stream = context;
    fake_memory_enter();
    pthread_mutex_lock(&lock);
    for (;;) {
        while (!stream->first && !stream->is_ending)
            pthread_cond_wait(&stream->wanted, &lock);
        if (!stream->first)
            break;
        be_lazy(stream);
        work *piece = unlink_first(stream);
        do_piece(stream, piece);
        free(piece);
        stream->done++;
        pthread_cond_broadcast(&stream->worked);
    }
    pthread_mutex_unlock(&lock);
    return NULL;
}

/* --- streams ---------------------------------------------------------------------------------- */

cudaError_t fake_stream_create(cudaStream_t *stream_out, int priority)
{
    cudaStream_t stream = calloc(1, sizeof *stream);
    if (!stream)
        abort();
    pthread_cond_init(&stream->wanted, NULL);
    pthread_cond_init(&stream->worked, NULL);
    pthread_mutex_lock(&lock);
    uint64_t state = fake_plan()->seed * 1000003 + created++ * 16 + (uint64_t)-priority;
    stream->random = fake_random(&state);
    if (fake_plan()->seed)
        stream->habit = (habit)(fake_random(&stream->random) % HABITS);
    stream->is_live = true;
    stream->gpu = fake_cudart_gpu();
    stream->next = streams;
    streams = stream;
    pthread_mutex_unlock(&lock);
    if (pthread_create(&stream->thread, NULL, work_of, stream) != 0)
        abort();
    *stream_out = stream;
    return cudaSuccess;
}

void fake_stream_destroy(cudaStream_t stream)
{
    pthread_mutex_lock(&lock);
    stream->is_live = false;
    stream->is_ending = true;
    pthread_cond_signal(&stream->wanted);
    pthread_mutex_unlock(&lock);
    pthread_join(stream->thread, NULL);
}

static uint64_t put(cudaStream_t stream, const work *piece)
{
    work *copy = malloc(sizeof *copy);
    if (!copy)
        abort();
    *copy = *piece;
    if (stream->issued - stream->done >= MOST_WORK)
        await_ticket(stream, stream->issued - MOST_WORK + 1);
    if (stream->last)
        stream->last->next = copy;
    else
        stream->first = copy;
    stream->last = copy;
    pthread_cond_signal(&stream->wanted);
    return ++stream->issued;
}

void fake_stream_put(cudaStream_t stream, void (*function)(void *), void *closure,
                     void (*drop)(void *))
{
    const work piece = {.run = function, .closure = closure, .drop = drop};
    pthread_mutex_lock(&lock);
    (void)put(stream, &piece);
    pthread_mutex_unlock(&lock);
}

void fake_stream_drain(cudaStream_t stream)
{
    pthread_mutex_lock(&lock);
    await_ticket(stream, stream->issued);
    pthread_mutex_unlock(&lock);
}

void fake_streams_drain(void)
{
    pthread_mutex_lock(&lock);
    for (cudaStream_t one = streams; one; one = one->next)
        if (one->gpu == fake_cudart_gpu())
            await_ticket(one, one->issued);
    pthread_mutex_unlock(&lock);
}

/* A host that asks again and again waits, too. */
bool fake_stream_is_idle(cudaStream_t stream)
{
    pthread_mutex_lock(&lock);
    if (++stream->queries % QUERIES == 0)
        need(stream, stream->issued);
    bool is_idle = stream->done == stream->issued;
    pthread_mutex_unlock(&lock);
    return is_idle;
}

/* --- events ----------------------------------------------------------------------------------- */

cudaError_t fake_event_create(cudaEvent_t *event_out)
{
    cudaEvent_t event = calloc(1, sizeof *event);
    if (!event)
        abort();
    pthread_cond_init(&event->fired, NULL);
    pthread_mutex_lock(&lock);
    event->is_live = true;
    event->next = events;
    events = event;
    pthread_mutex_unlock(&lock);
    *event_out = event;
    return cudaSuccess;
}

/* Work that waits for it continues as before. */
void fake_event_destroy(cudaEvent_t event)
{
    pthread_mutex_lock(&lock);
    event->is_live = false;
    pthread_mutex_unlock(&lock);
}

void fake_event_record(cudaEvent_t event, cudaStream_t stream)
{
    pthread_mutex_lock(&lock);
    const work piece = {.recorded = event, .generation = event->recorded + 1};
    event->ticket = put(stream, &piece);
    event->stream = stream;
    event->recorded++;
    pthread_mutex_unlock(&lock);
}

void fake_event_wait(cudaEvent_t event, cudaStream_t stream)
{
    pthread_mutex_lock(&lock);
    const work piece = {.awaited = event, .generation = event->recorded};
    (void)put(stream, &piece);
    pthread_mutex_unlock(&lock);
}

void fake_event_sync(cudaEvent_t event)
{
    pthread_mutex_lock(&lock);
    await_event(event, event->recorded);
    pthread_mutex_unlock(&lock);
}

bool fake_event_is_reached(cudaEvent_t event)
{
    pthread_mutex_lock(&lock);
    bool is_reached = event->reached >= event->recorded;
    if (!is_reached && ++event->stream->queries % QUERIES == 0)
        need(event->stream, event->ticket);
    pthread_mutex_unlock(&lock);
    return is_reached;
}

/* --- the end ---------------------------------------------------------------------------------- */

size_t fake_streams_count(void)
{
    size_t count = 0;
    pthread_mutex_lock(&lock);
    for (cudaStream_t one = streams; one; one = one->next)
        count += one->is_live;
    for (cudaEvent_t one = events; one; one = one->next)
        count += one->is_live;
    pthread_mutex_unlock(&lock);
    return count;
}

void fake_streams_forget(void)
{
    for (cudaStream_t one = streams, *at = &streams; one; one = *at) {
        *at = one->next;
        pthread_cond_destroy(&one->wanted);
        pthread_cond_destroy(&one->worked);
        free(one);
    }
    for (cudaEvent_t one = events, *at = &events; one; one = *at) {
        *at = one->next;
        pthread_cond_destroy(&one->fired);
        free(one);
    }
    created = works = 0;
}
