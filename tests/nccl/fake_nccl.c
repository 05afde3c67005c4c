/* See fake_nccl.h. One lock guards all; a meeting is a collective of a clique, in which each rank has a
 * batch. */
#include "tests/nccl/fake_nccl.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "kernels/train/tensor.h"
#include "runtime/comm_nccl/nccl_api.h"

#define EXPORT __attribute__((visibility("default")))

enum { USUAL_VERSION = 22809, FIRST_WITH_THREADS = 22304, FIRST_TO_END_IN_GROUPS = 22203 };
enum { SYSTEM_ERROR = 2, INTERNAL_ERROR = 3, STUCK_S = 20 };
enum { MOST_OPS = 64, FIRST_OP = 5, MOST_FACTORS = 64 };
enum { MOST_RANKS = 64, MOST_SHARED_CTAS = 16, GARBAGE = 0xb7 };

typedef enum call_kind {
    ALL_GATHER,
    REDUCE_SCATTER,
    ALL_REDUCE,
    BROADCAST,
    REDUCE,
    SEND,
    RECV
} call_kind;

typedef struct call {
    call_kind kind;
    const void *send;
    void *recv;
    size_t count;
    fsdp_nccl_dtype dtype;
    fsdp_nccl_op op;
    int peer; /* or root */
} call;

/* The calls of one group, which run as one. */
typedef struct batch {
    struct ncclComm *comm;
    uint64_t number;
    int n;
    bool has_failed;
    call calls[MOST_OPS];
} batch;

typedef struct meeting {
    struct meeting *next;
    uint64_t number;
    int arrived, left;
    bool is_done;
    batch **batches;
    batch *kept; /* of a root that runs ahead */
} meeting;

typedef struct split_meeting {
    struct split_meeting *next;
    int number, arrived;
    struct ncclComm **comms;   /* by rank of the parent; NULL: no member */
    struct ncclComm ***places; /* where they are written when all have come */
    int *keys, *colors;
} split_meeting;

typedef struct clique {
    struct clique *next;
    fsdp_nccl_id id;
    int size, arrived, references;
    int gpus[MOST_RANKS]; /* of those that have arrived */
    bool is_shared;       /* two are of one GPU */
    meeting *meetings;
    split_meeting *splits;
} clique;

/* What this process has given to a GPU and what is not done: NCCL frees its memory when there is none. */
typedef struct gpu_work {
    struct gpu_work *next;
    int gpu, running;
} gpu_work;

typedef struct factor {
    bool is_alive;
    fsdp_nccl_dtype dtype;
    double value;
} factor;

struct ncclComm {
    clique *clique; /* NULL: its split is not complete */
    int rank, gpu, polls, splits, calls, references;
    struct ncclComm *next_to_end; /* in a group of calls */
    uint64_t batches;
    bool is_blocking, is_aborted, is_finalized;
    fsdp_nccl_result error;
    factor factors[MOST_FACTORS];
    atomic_int callers;
};

/* A block of memory that a communicator knows. */
typedef struct registered {
    struct registered *next;
    const struct ncclComm *comm;
    void *data;
} registered;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static registered *known;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static clique *cliques;
static gpu_work *gpus;
static uint64_t ids_made;
static atomic_int alive, misuses, splits, registrations, launch_threads;
static const char *last_error = "";
static _Thread_local int depth;
static _Thread_local batch *grouped;
static _Thread_local fsdp_nccl_stream grouped_stream;
static _Thread_local struct ncclComm *to_end;

static int get_alive(void)
{
    return alive;
}
static int get_misuses(void)
{
    return misuses;
}
static int get_splits(void)
{
    return splits;
}
static int get_registrations(void)
{
    return registrations;
}
static int get_launch_threads(void)
{
    return launch_threads;
}

EXPORT fake_nccl_control fake_nccl = {.plan = {.rank = -1},
                                      .alive = get_alive,
                                      .misuses = get_misuses,
                                      .splits = get_splits,
                                      .registrations = get_registrations,
                                      .launch_threads = get_launch_threads};

static const fake_nccl_plan *plan(void)
{
    return &fake_nccl.plan;
}

static void *make(size_t n, size_t size)
{
    void *made = calloc(n ? n : 1, size ? size : 1);
    if (!made)
        abort();
    return made;
}

static bool is_planned(int rank)
{
    return plan()->rank < 0 || plan()->rank == rank;
}

static int version(void)
{
    return plan()->version ? plan()->version : USUAL_VERSION;
}

/* With the lock: false when nothing changed for that long. */
static bool await_change(int64_t ms)
{
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += ms / 1000;
    until.tv_nsec += ms % 1000 * 1000000;
    if (until.tv_nsec >= 1000000000)
        until.tv_sec++, until.tv_nsec -= 1000000000;
    return pthread_cond_timedwait(&changed, &lock, &until) == 0;
}

/* --- lifetimes ---------------------------------------------------------------------------------- */

static void free_meeting(meeting *met)
{
    free(met->batches);
    free(met->kept);
    free(met);
}

/* With the lock, as all until the calls of NCCL. */
static void release_clique(clique *mine)
{
    if (!mine || --mine->references > 0)
        return;
    clique **at = &cliques;
    while (*at && *at != mine)
        at = &(*at)->next;
    if (*at)
        *at = mine->next;
    while (mine->meetings) {
        meeting *next = mine->meetings->next;
        free_meeting(mine->meetings);
        mine->meetings = next;
    }
    while (mine->splits) {
        split_meeting *next = mine->splits->next;
        free(mine->splits->comms);
        free(mine->splits->places);
        free(mine->splits->keys);
        free(mine->splits->colors);
        free(mine->splits);
        mine->splits = next;
    }
    free(mine);
}

static void release_comm(struct ncclComm *comm)
{
    if (--comm->references > 0)
        return;
    release_clique(comm->clique);
    free(comm);
}

static struct ncclComm *create_comm(clique *mine, int rank, int gpu, bool is_blocking)
{
    struct ncclComm *comm = make(1, sizeof *comm);
    *comm = (struct ncclComm){.clique = mine,
                              .rank = rank,
                              .gpu = gpu,
                              .references = 1,
                              .is_blocking = is_blocking,
                              .polls = is_blocking ? 0 : plan()->polls};
    if (mine)
        mine->references++;
    alive++;
    return comm;
}

/* --- GPUs --------------------------------------------------------------------------------------- */

static gpu_work *work_of(int gpu)
{
    gpu_work *work = gpus;
    while (work && work->gpu != gpu)
        work = work->next;
    if (work)
        return work;
    work = make(1, sizeof *work);
    work->gpu = gpu;
    work->next = gpus;
    gpus = work;
    return work;
}

/* As cudaFree does, with which NCCL gives memory back, whoever has given the GPU its work. */
static void await_idle(int gpu)
{
    const gpu_work *work = work_of(gpu);
    while (work->running > 0)
        if (!await_change(STUCK_S * 1000)) {
            misuses++; /* it would wait for ever */
            return;
        }
}

/* --- a meeting ---------------------------------------------------------------------------------- */

static fsdp_dtype dtype_of(fsdp_nccl_dtype dtype)
{
    static const fsdp_dtype dtypes[] = {FSDP_I8,  FSDP_U8,  FSDP_I32, FSDP_U32, FSDP_I64,
                                        FSDP_U64, FSDP_F16, FSDP_F32, FSDP_F64, FSDP_BF16};
    return dtypes[dtype];
}

static bool is_match(const meeting *met, int size)
{
    const batch *first = met->batches[0];
    for (int i = 1; i < size; i++) {
        const batch *other = met->batches[i];
        bool is_messages = first->n > 0 && first->calls[0].kind >= SEND;
        for (int j = 0; !is_messages && j < first->n; j++) {
            const call *a = &first->calls[j], *b = &other->calls[j];
            if (other->n != first->n || a->kind != b->kind || a->count != b->count ||
                a->dtype != b->dtype || a->peer != b->peer || (a->op < FIRST_OP && a->op != b->op))
                return false;
        }
    }
    return true;
}

/* The input of each rank, as it is now: outputs may lie in it. */
static void **copy_inputs(const meeting *met, int size, int at, size_t bytes)
{
    void **inputs = make((size_t)size, sizeof *inputs);
    for (int i = 0; i < size; i++) {
        inputs[i] = make(1, bytes);
        if (met->batches[i]->calls[at].send)
            memcpy(inputs[i], met->batches[i]->calls[at].send, bytes);
    }
    return inputs;
}

static void reduce(const meeting *met, int size, const call *how, void **inputs, size_t from,
                   void *out)
{
    const void *parts[MOST_RANKS];
    const fsdp_dtype dtype = dtype_of(how->dtype);
    fsdp_reduction fold = {.fold = how->op == FSDP_NCCL_MAX ? FSDP_FOLD_MAX : FSDP_FOLD_SUM,
                           .multiply = 1,
                           .divide = how->op == FSDP_NCCL_AVG ? size : 1};
    for (int i = 0; i < size; i++)
        parts[i] = (unsigned char *)inputs[i] + from * fsdp_dtype_size(dtype);
    if (how->op >= FIRST_OP) {
        const factor *by = &met->batches[0]->comm->factors[how->op - FIRST_OP];
        misuses += !by->is_alive || by->dtype != how->dtype;
        fold.multiply = by->value;
    }
    fsdp_tensor_fold(out, parts, size, dtype, how->count, fold);
}

static void run_call(const meeting *met, int size, int at)
{
    const call *first = &met->batches[0]->calls[at];
    size_t bytes = first->count * fsdp_dtype_size(dtype_of(first->dtype));
    size_t in_bytes = first->kind == REDUCE_SCATTER ? bytes * (size_t)size : bytes;
    void **inputs = copy_inputs(met, size, at, in_bytes);
    for (int i = 0; i < size; i++) {
        const call *mine = &met->batches[i]->calls[at];
        unsigned char *out = mine->recv;
        switch (first->kind) {
        case ALL_GATHER:
            for (int j = 0; j < size; j++)
                memcpy(out + (size_t)j * bytes, inputs[j], bytes);
            break;
        case REDUCE_SCATTER: reduce(met, size, mine, inputs, (size_t)i * mine->count, out); break;
        case ALL_REDUCE: reduce(met, size, mine, inputs, 0, out); break;
        case BROADCAST: memcpy(out, inputs[mine->peer], bytes); break;
        case REDUCE:
            if (i == mine->peer)
                reduce(met, size, mine, inputs, 0, out);
            break;
        default: break;
        }
    }
    for (int i = 0; i < size; i++)
        free(inputs[i]);
    free(inputs);
}

/* The next receive of `to` from a rank; NULL: none. */
static const call *find_receive(const batch *to, int from)
{
    for (int i = 0; i < to->n; i++)
        if (to->calls[i].kind == RECV && to->calls[i].peer == from)
            return &to->calls[i];
    return NULL;
}

/* False when a send has no receive of its size. */
static bool run_messages(const meeting *met, int size)
{
    for (int i = 0; i < size; i++)
        for (int j = 0; j < met->batches[i]->n; j++) {
            const call *sent = &met->batches[i]->calls[j];
            const call *got = sent->kind == SEND ? find_receive(met->batches[sent->peer], i) : NULL;
            if (sent->kind == SEND && (!got || got->count != sent->count))
                return false;
            if (got)
                memcpy(got->recv, sent->send, sent->count * fsdp_dtype_size(dtype_of(sent->dtype)));
        }
    return true;
}

static void run_meeting(meeting *met, int size)
{
    const batch *first = met->batches[0];
    if (!is_match(met, size))
        return;
    if (first->n > 0 && first->calls[0].kind >= SEND) {
        met->is_done = run_messages(met, size);
        return;
    }
    for (int i = 0; i < first->n; i++)
        run_call(met, size, i);
    met->is_done = true;
}

static meeting *find_meeting(clique *mine, uint64_t number)
{
    meeting *met = mine->meetings;
    while (met && met->number != number)
        met = met->next;
    if (met)
        return met;
    met = make(1, sizeof *met);
    met->number = number;
    met->batches = make((size_t)mine->size, sizeof *met->batches);
    met->next = mine->meetings;
    mine->meetings = met;
    return met;
}

static void leave_meeting(clique *mine, meeting *met, int rank)
{
    meeting **at = &mine->meetings;
    if (met->batches[rank] != met->kept)
        met->batches[rank] = NULL;
    if (++met->left < mine->size)
        return;
    while (*at != met)
        at = &(*at)->next;
    *at = met->next;
    free_meeting(met);
}

static void spoil(unsigned char *data, size_t size)
{
    if (size > 0)
        memset(data, GARBAGE, size);
}

/* Until a call is done its output is undefined, but for what is input, too. */
static void spoil_output(const call *mine, const struct ncclComm *comm)
{
    const size_t ranks = (size_t)comm->clique->size, rank = (size_t)comm->rank;
    const size_t part = mine->count * fsdp_dtype_size(dtype_of(mine->dtype));
    const unsigned char *in = mine->send;
    unsigned char *out = mine->recv;
    const bool is_root = mine->peer == comm->rank;
    switch (mine->kind) {
    case ALL_GATHER:
        spoil(out, rank * part);
        spoil(out + rank * part, in == out + rank * part ? 0 : part);
        spoil(out + (rank + 1) * part, (ranks - rank - 1) * part);
        break;
    case REDUCE_SCATTER: spoil(out, out + part > in && out < in + ranks * part ? 0 : part); break;
    case ALL_REDUCE: spoil(out, in == out ? 0 : part); break;
    case BROADCAST: spoil(out, is_root && in == out ? 0 : part); break;
    case REDUCE: spoil(out, is_root && in != out ? part : 0); break;
    case RECV: spoil(out, part); break;
    case SEND: break;
    }
}

static bool runs_ahead(const batch *mine)
{
    return plan()->root_runs_ahead && mine->n == 1 && mine->calls[0].kind == BROADCAST &&
           mine->calls[0].peer == mine->comm->rank;
}

/* On the stream. */
static void run_batch(void *argument)
{
    batch *mine = argument;
    struct ncclComm *comm = mine->comm;
    bool is_kept = false;
    for (int i = 0; i < mine->n; i++)
        spoil_output(&mine->calls[i], comm);
    pthread_mutex_lock(&lock);
    if (!comm->is_aborted) {
        meeting *met = find_meeting(comm->clique, mine->number);
        met->batches[comm->rank] = mine;
        if (++met->arrived == comm->clique->size)
            run_meeting(met, comm->clique->size);
        pthread_cond_broadcast(&changed);
        if (runs_ahead(mine))
            met->kept = mine;
        while (!met->is_done && !comm->is_aborted && met->kept != mine)
            pthread_cond_wait(&changed, &lock);
        is_kept = met->kept == mine;
        if (!met->is_done && !is_kept)
            met->arrived = -comm->clique->size; /* it will never be complete */
        leave_meeting(comm->clique, met, comm->rank);
    }
    work_of(comm->gpu)->running--;
    pthread_cond_broadcast(&changed);
    release_comm(comm);
    pthread_mutex_unlock(&lock);
    if (!is_kept)
        free(mine);
}

/* --- calls -------------------------------------------------------------------------------------- */

static void reclaim(struct ncclComm *comm);

/* Two threads must not use a communicator at once, but for its abort. */
static void enter(struct ncclComm *comm)
{
    misuses += atomic_fetch_add(&comm->callers, 1) > 0;
}

/* With the lock, as the next: all ranks have come to its creation and to its splits. */
static bool is_joined(const struct ncclComm *comm)
{
    const clique *mine = comm->clique;
    bool is_joined = mine && mine->arrived == mine->size;
    for (const split_meeting *split = mine ? mine->splits : NULL; split; split = split->next)
        is_joined = is_joined && (split->number >= comm->splits || split->arrived == mine->size);
    return is_joined;
}

static bool is_in_progress(const struct ncclComm *comm)
{
    return !comm->error && (!is_joined(comm) || comm->polls > 0);
}

/* NCCL refuses any other call with a communicator that is in progress. */
static bool is_ready(struct ncclComm *comm)
{
    pthread_mutex_lock(&lock);
    bool is_ready = !is_in_progress(comm);
    pthread_mutex_unlock(&lock);
    return is_ready;
}

static fsdp_nccl_result leave(struct ncclComm *comm, fsdp_nccl_result result)
{
    atomic_fetch_sub(&comm->callers, 1);
    return result;
}

/* From 2.23.4 on each call of a communicator that does not block is launched by a thread of its own, and
 * is in progress at least until that has begun. */
static int polls_of_call(void)
{
    if (version() < FIRST_WITH_THREADS)
        return plan()->polls;
    launch_threads++;
    return plan()->polls > 0 ? plan()->polls : 1;
}

/* A call that blocks until its communicator is aborted, as one does that connects to a rank which is lost. */
static fsdp_nccl_result hang(struct ncclComm *comm)
{
    const struct timespec leaving = {.tv_nsec = 100000000};
    pthread_mutex_lock(&lock);
    comm->references++;
    while (!comm->is_aborted)
        pthread_cond_wait(&changed, &lock);
    pthread_mutex_unlock(&lock);
    nanosleep(&leaving, NULL);
    pthread_mutex_lock(&lock);
    atomic_fetch_sub(&comm->callers, 1);
    release_comm(comm);
    pthread_mutex_unlock(&lock);
    return INTERNAL_ERROR;
}

/* A call that connects first, as the first one of an algorithm does. False: it was aborted meanwhile. */
static bool connect(struct ncclComm *comm)
{
    const struct timespec moment = {.tv_nsec = 10000000};
    bool is_aborted = false;
    for (int ms = 0; ms < plan()->connect_ms && !is_aborted; ms += 10) {
        nanosleep(&moment, NULL);
        pthread_mutex_lock(&lock);
        is_aborted = comm->is_aborted;
        pthread_mutex_unlock(&lock);
    }
    return !is_aborted;
}

static fsdp_nccl_result start_batch(batch *mine, fsdp_nccl_stream stream)
{
    struct ncclComm *comm = mine->comm;
    pthread_mutex_lock(&lock);
    int number = ++comm->calls;
    mine->number = comm->batches++;
    if (!comm->is_blocking)
        comm->polls = polls_of_call();
    comm->references++;
    bool is_lost = is_planned(comm->rank) && plan()->async_at == number;
    if (is_lost) {
        comm->error = plan()->async_code;
        comm->references--;
    }
    bool is_pending = comm->polls > 0;
    work_of(comm->gpu)->running += !is_lost;
    pthread_mutex_unlock(&lock);
    if (is_lost)
        free(mine);
    else
        fake_nccl.launch(stream, run_batch, mine);
    return is_pending ? FSDP_NCCL_IN_PROGRESS : FSDP_NCCL_SUCCESS;
}

static fsdp_nccl_result add(struct ncclComm *comm, const call *made, fsdp_nccl_stream stream)
{
    enter(comm);
    const bool is_first = !grouped || depth == 0;
    if (is_first && !is_ready(comm))
        return leave(comm, FSDP_NCCL_INVALID_ARGUMENT);
    if (is_planned(comm->rank) && plan()->hang_at == comm->calls + 1)
        return hang(comm);
    if (is_planned(comm->rank) && plan()->connect_at == comm->calls + 1 && !connect(comm))
        return leave(comm, INTERNAL_ERROR);
    bool fails = is_planned(comm->rank) && plan()->fail_at == comm->calls + 1 &&
                 (is_first ? 0 : grouped->n) >= plan()->fail_part;
    if (fails && is_first)
        return leave(comm, plan()->fail_code);
    batch *mine = is_first ? make(1, sizeof *mine) : grouped;
    mine->comm = comm;
    mine->has_failed |= fails;
    if (mine->n == MOST_OPS)
        abort();
    mine->calls[mine->n++] = *made;
    if (depth == 0)
        return leave(comm, start_batch(mine, stream));
    grouped = mine;
    grouped_stream = stream;
    if (fails)
        return leave(comm, plan()->fail_code);
    return leave(comm, !comm->is_blocking && plan()->polls > 0 ? FSDP_NCCL_IN_PROGRESS
                                                               : FSDP_NCCL_SUCCESS);
}

EXPORT fsdp_nccl_result ncclGroupStart(void)
{
    depth++;
    return FSDP_NCCL_SUCCESS;
}

/* By a thread each, and the caller waits for all: here they are told to end already. It takes a while. */
static void end_grouped(void)
{
    const struct timespec moment = {.tv_nsec = 100000000};
    if (to_end)
        nanosleep(&moment, NULL);
    while (to_end) {
        struct ncclComm *comm = to_end;
        to_end = comm->next_to_end;
        reclaim(comm);
    }
}

EXPORT fsdp_nccl_result ncclGroupEnd(void)
{
    batch *mine = grouped;
    if (--depth == 0)
        end_grouped();
    if (depth > 0 || !mine)
        return FSDP_NCCL_SUCCESS;
    grouped = NULL;
    if (!mine->has_failed)
        return start_batch(mine, grouped_stream);
    free(mine); /* its caller knows */
    return FSDP_NCCL_SUCCESS;
}

EXPORT fsdp_nccl_result ncclAllGather(const void *send, void *recv, size_t count,
                                      fsdp_nccl_dtype dtype, fsdp_nccl_comm comm,
                                      fsdp_nccl_stream stream)
{
    return add(comm, &(call){ALL_GATHER, send, recv, count, dtype, 0, 0}, stream);
}

EXPORT fsdp_nccl_result ncclReduceScatter(const void *send, void *recv, size_t count,
                                          fsdp_nccl_dtype dtype, fsdp_nccl_op op,
                                          fsdp_nccl_comm comm, fsdp_nccl_stream stream)
{
    return add(comm, &(call){REDUCE_SCATTER, send, recv, count, dtype, op, 0}, stream);
}

EXPORT fsdp_nccl_result ncclAllReduce(const void *send, void *recv, size_t count,
                                      fsdp_nccl_dtype dtype, fsdp_nccl_op op, fsdp_nccl_comm comm,
                                      fsdp_nccl_stream stream)
{
    return add(comm, &(call){ALL_REDUCE, send, recv, count, dtype, op, 0}, stream);
}

EXPORT fsdp_nccl_result ncclBroadcast(const void *send, void *recv, size_t count,
                                      fsdp_nccl_dtype dtype, int root, fsdp_nccl_comm comm,
                                      fsdp_nccl_stream stream)
{
    return add(comm, &(call){BROADCAST, send, recv, count, dtype, 0, root}, stream);
}

EXPORT fsdp_nccl_result ncclReduce(const void *send, void *recv, size_t count,
                                   fsdp_nccl_dtype dtype, fsdp_nccl_op op, int root,
                                   fsdp_nccl_comm comm, fsdp_nccl_stream stream)
{
    return add(comm, &(call){REDUCE, send, recv, count, dtype, op, root}, stream);
}

EXPORT fsdp_nccl_result ncclSend(const void *send, size_t count, fsdp_nccl_dtype dtype, int peer,
                                 fsdp_nccl_comm comm, fsdp_nccl_stream stream)
{
    misuses += depth == 0; /* it could wait for the receiver */
    return add(comm, &(call){SEND, send, NULL, count, dtype, 0, peer}, stream);
}

EXPORT fsdp_nccl_result ncclRecv(void *recv, size_t count, fsdp_nccl_dtype dtype, int peer,
                                 fsdp_nccl_comm comm, fsdp_nccl_stream stream)
{
    misuses += depth == 0;
    return add(comm, &(call){RECV, NULL, recv, count, dtype, 0, peer}, stream);
}

EXPORT fsdp_nccl_result ncclRedOpCreatePreMulSum(fsdp_nccl_op *op, void *scalar,
                                                 fsdp_nccl_dtype dtype,
                                                 fsdp_nccl_residence residence, fsdp_nccl_comm comm)
{
    int at = 0;
    double value = 0;
    const fsdp_rect cast = fsdp_rect_line(&value, FSDP_F64, scalar, dtype_of(dtype), 1);
    if (residence != FSDP_NCCL_HOST_IMMEDIATE)
        return FSDP_NCCL_INVALID_ARGUMENT;
    fsdp_rects_copy(&cast, 1);
    while (at < MOST_FACTORS && comm->factors[at].is_alive)
        at++;
    if (at == MOST_FACTORS)
        return SYSTEM_ERROR;
    comm->factors[at] = (factor){true, dtype, value};
    alive++;
    *op = FIRST_OP + at;
    return FSDP_NCCL_SUCCESS;
}

EXPORT fsdp_nccl_result ncclRedOpDestroy(fsdp_nccl_op op, fsdp_nccl_comm comm)
{
    misuses += !comm->factors[op - FIRST_OP].is_alive;
    comm->factors[op - FIRST_OP].is_alive = false;
    alive--;
    return FSDP_NCCL_SUCCESS;
}

/* --- communicators ------------------------------------------------------------------------------ */

EXPORT fsdp_nccl_result ncclGetVersion(int *out)
{
    *out = version();
    return FSDP_NCCL_SUCCESS;
}

EXPORT const char *ncclGetErrorString(fsdp_nccl_result result)
{
    static const char *const names[] = {"no error",
                                        "unhandled cuda error",
                                        "unhandled system error",
                                        "internal error",
                                        "invalid argument",
                                        "invalid usage",
                                        "remote process exited or there was a network error",
                                        "NCCL operation in progress"};
    return names[result];
}

EXPORT const char *ncclGetLastError(fsdp_nccl_comm comm)
{
    (void)comm;
    return plan()->last_error ? plan()->last_error : last_error;
}

EXPORT fsdp_nccl_result ncclGetUniqueId(fsdp_nccl_id *id)
{
    pthread_mutex_lock(&lock);
    uint64_t number = ++ids_made;
    pthread_mutex_unlock(&lock);
    memset(id, 0x5a, sizeof *id);
    memcpy(id, &number, sizeof number);
    return FSDP_NCCL_SUCCESS;
}

static clique *find_clique(const fsdp_nccl_id *id, int size)
{
    clique *found = cliques;
    while (found && memcmp(&found->id, id, sizeof *id) != 0)
        found = found->next;
    if (found)
        return found;
    found = make(1, sizeof *found);
    found->id = *id;
    found->size = size;
    found->arrived = plan()->is_alone ? size - 1 : 0;
    found->next = cliques;
    cliques = found;
    return found;
}

/* With the lock: the others' GPUs are known. */
static bool shares_gpu(const clique *mine, int gpu)
{
    bool shares = false;
    for (int i = 0; i < mine->arrived; i++)
        shares = shares || mine->gpus[i] == gpu;
    return shares;
}

/* Later ones when they are told to, and hang unless their collectives are kept small: these refuse
 * instead. */
static bool may_share(const fsdp_nccl_config *config)
{
    const char *enabled = getenv("NCCL_MULTI_RANK_GPU_ENABLE");
    return plan()->version >= FSDP_NCCL_SHARES_GPU && enabled && strcmp(enabled, "1") == 0 &&
           config->maxCTAs > 0 && config->maxCTAs <= MOST_SHARED_CTAS;
}

EXPORT fsdp_nccl_result ncclCommInitRankConfig(fsdp_nccl_comm *comm_out, int size, fsdp_nccl_id id,
                                               int rank, fsdp_nccl_config *config)
{
    if (is_planned(rank) && plan()->init_code)
        return plan()->init_code;
    if (config->blocking != 0 || config->magic != (unsigned)FSDP_NCCL_MAGIC)
        return FSDP_NCCL_INVALID_ARGUMENT;
    pthread_mutex_lock(&lock);
    clique *mine = find_clique(&id, size);
    struct ncclComm *comm = create_comm(mine, rank, fake_nccl.gpu ? fake_nccl.gpu() : rank, false);
    if (is_planned(rank))
        comm->error = plan()->init_async_code;
    const bool shares = fake_nccl.gpu && shares_gpu(mine, comm->gpu);
    mine->is_shared |= shares;
    if (shares && !may_share(config)) {
        comm->error = FSDP_NCCL_INVALID_USAGE;
        last_error = "Duplicate GPU detected";
    } else if (!comm->error && !(is_planned(rank) && plan()->init_hangs)) {
        mine->gpus[mine->arrived++] = comm->gpu;
    }
    pthread_mutex_unlock(&lock);
    *comm_out = comm;
    return FSDP_NCCL_IN_PROGRESS;
}

EXPORT fsdp_nccl_result ncclCommGetAsyncError(fsdp_nccl_comm comm, fsdp_nccl_result *state)
{
    enter(comm);
    pthread_mutex_lock(&lock);
    *state = comm->error;
    if (is_in_progress(comm)) {
        *state = FSDP_NCCL_IN_PROGRESS;
        comm->polls -= is_joined(comm);
    }
    pthread_mutex_unlock(&lock);
    return leave(comm, FSDP_NCCL_SUCCESS);
}

EXPORT fsdp_nccl_result ncclCommFinalize(fsdp_nccl_comm comm)
{
    misuses += comm->is_blocking; /* it may block, and ncclCommDestroy does it */
    enter(comm);
    comm->is_finalized = true;
    comm->polls = comm->is_blocking ? 0 : plan()->polls;
    return leave(comm, comm->polls > 0 ? FSDP_NCCL_IN_PROGRESS : FSDP_NCCL_SUCCESS);
}

/* A split that cannot be completed any more fails. Its caller gets a communicator, which it has to abort. */
static void end_splits(struct ncclComm *comm)
{
    split_meeting *split = comm->clique ? comm->clique->splits : NULL;
    for (; split; split = split->next) {
        if (split->arrived == comm->clique->size || !split->places[comm->rank])
            continue;
        split->arrived = -comm->clique->size; /* it will never be complete */
        *split->places[comm->rank] = split->comms[comm->rank];
        split->places[comm->rank] = NULL;
        split->comms[comm->rank] = NULL;
    }
}

/* With the lock: forgets the registrations of a communicator, or that of one block. */
static void forget(const struct ncclComm *comm, const void *data)
{
    for (registered **at = &known; *at;) {
        registered *one = *at;
        if (one->comm != comm || (data && one->data != data)) {
            at = &one->next;
            continue;
        }
        *at = one->next;
        free(one);
        alive--;
    }
}

/* NCCL frees the operations and registrations of a communicator with it, and the memory that a call of
 * another thread uses. Afterwards it chooses the thread's GPU again, which then gets a context. */
static void reclaim(struct ncclComm *comm)
{
    pthread_mutex_lock(&lock);
    misuses += comm->callers > 0 || (fake_nccl.gpu && fake_nccl.gpu() != comm->gpu);
    await_idle(comm->gpu);
    alive--;
    forget(comm, NULL);
    for (int i = 0; i < MOST_FACTORS; i++)
        alive -= comm->factors[i].is_alive;
    release_comm(comm);
    pthread_mutex_unlock(&lock);
}

/* A communicator that blocks is finalized by it. Of those that wait for each other in one process, the last
 * one ends: `destroy_hangs` is one whose others never come. */
EXPORT fsdp_nccl_result ncclCommDestroy(fsdp_nccl_comm comm)
{
    misuses += comm->polls > 0 || (!comm->is_blocking && !comm->is_finalized);
    pthread_mutex_lock(&lock);
    while (is_planned(comm->rank) && comm->is_blocking && plan()->destroy_hangs)
        (void)await_change(10);
    pthread_mutex_unlock(&lock);
    reclaim(comm);
    return FSDP_NCCL_SUCCESS;
}

/* Work of the GPU and calls of the host are told to end at once, also in a group of calls, where the rest
 * comes with its end. */
EXPORT fsdp_nccl_result ncclCommAbort(fsdp_nccl_comm comm)
{
    pthread_mutex_lock(&lock);
    comm->is_aborted = true;
    end_splits(comm);
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
    if (depth == 0 || version() < FIRST_TO_END_IN_GROUPS) {
        reclaim(comm);
        return FSDP_NCCL_SUCCESS;
    }
    comm->next_to_end = to_end;
    to_end = comm;
    return FSDP_NCCL_SUCCESS;
}

/* --- what an old NCCL lacks --------------------------------------------------------------------- */

#ifndef FAKE_NCCL_IS_OLD

static split_meeting *find_split(clique *mine, int number)
{
    split_meeting *split = mine->splits;
    while (split && split->number != number)
        split = split->next;
    if (split)
        return split;
    split = make(1, sizeof *split);
    split->number = number;
    split->arrived = plan()->is_alone ? mine->size - 1 : 0;
    split->comms = make((size_t)mine->size, sizeof *split->comms);
    split->places = make((size_t)mine->size, sizeof *split->places);
    split->keys = make((size_t)mine->size, sizeof *split->keys);
    split->colors = make((size_t)mine->size, sizeof *split->colors);
    split->next = mine->splits;
    mine->splits = split;
    return split;
}

static bool is_of_color(const split_meeting *split, int rank, int color)
{
    return split->comms[rank] && split->colors[rank] == color;
}

/* All have come: the members of a color become a clique, in the order of their keys. A rank that is alone
 * counts all. */
static void complete_split(const clique *parent, split_meeting *split)
{
    for (int i = 0; i < parent->size; i++) {
        struct ncclComm *comm = split->comms[i];
        fsdp_nccl_id id;
        int members = 0;
        if (split->places[i])
            *split->places[i] = comm;
        if (!comm)
            continue;
        for (int j = 0; j < parent->size; j++) {
            const bool is_member = is_of_color(split, j, split->colors[i]);
            members += is_member;
            comm->rank += is_member && split->keys[j] < split->keys[i];
        }
        memset(&id, 0xa5, sizeof id); /* no unique id */
        memcpy(&id, &split, sizeof split);
        memcpy(id.bytes + sizeof split, &split->colors[i], sizeof split->colors[i]);
        comm->clique = find_clique(&id, plan()->is_alone ? parent->size : members);
        comm->clique->references++;
        comm->clique->arrived++;
    }
}

EXPORT fsdp_nccl_result ncclCommSplit(fsdp_nccl_comm comm, int color, int key,
                                      fsdp_nccl_comm *comm_out, fsdp_nccl_config *config)
{
    const bool is_planned_split = is_planned(comm->rank) && comm->splits + 1 == plan()->split_at;
    if (is_planned_split && plan()->split_code)
        return plan()->split_code;
    enter(comm);
    *comm_out = NULL;
    if (!is_ready(comm) || (comm->clique->is_shared && !may_share(config)))
        return leave(comm, FSDP_NCCL_INVALID_ARGUMENT);
    pthread_mutex_lock(&lock);
    split_meeting *split = find_split(comm->clique, comm->splits++);
    split->places[comm->rank] = comm_out;
    if (color != FSDP_NCCL_NO_COLOR) {
        split->comms[comm->rank] = create_comm(NULL, 0, comm->gpu, config->blocking != 0);
        split->keys[comm->rank] = key;
        split->colors[comm->rank] = color;
        splits++;
    }
    comm->polls = plan()->polls;
    split->arrived += !(is_planned_split && plan()->split_hangs);
    if (split->arrived == comm->clique->size)
        complete_split(comm->clique, split);
    pthread_mutex_unlock(&lock);
    return leave(comm, FSDP_NCCL_SUCCESS); /* as NCCL does, also while the split is under way */
}

EXPORT fsdp_nccl_result ncclMemAlloc(void **data, size_t size)
{
    *data = fake_nccl.alloc ? fake_nccl.alloc(size) : malloc(size);
    alive++;
    return *data ? FSDP_NCCL_SUCCESS : SYSTEM_ERROR;
}

EXPORT fsdp_nccl_result ncclMemFree(void *data)
{
    pthread_mutex_lock(&lock);
    for (const registered *one = known; one; one = one->next)
        misuses += one->data == data;
    pthread_mutex_unlock(&lock);
    if (fake_nccl.dealloc)
        fake_nccl.dealloc(data);
    else
        free(data);
    alive--;
    return FSDP_NCCL_SUCCESS;
}

EXPORT fsdp_nccl_result ncclCommRegister(fsdp_nccl_comm comm, void *data, size_t size,
                                         void **handle)
{
    (void)size;
    enter(comm);
    alive++;
    registrations++;
    registered *one = malloc(sizeof *one);
    if (!one)
        abort();
    pthread_mutex_lock(&lock);
    *one = (registered){known, comm, data};
    known = one;
    pthread_mutex_unlock(&lock);
    *handle = data;
    return leave(comm, FSDP_NCCL_SUCCESS);
}

EXPORT fsdp_nccl_result ncclCommDeregister(fsdp_nccl_comm comm, void *handle)
{
    enter(comm);
    pthread_mutex_lock(&lock);
    forget(comm, handle);
    pthread_mutex_unlock(&lock);
    return leave(comm, FSDP_NCCL_SUCCESS);
}

#endif
