/*
 * A team of threads that stay. A call costs about a microsecond while they spin; after a short time without
 * work they sleep, since ranks share cores. The caller takes parts as well and waits only for parts that
 * others have begun: a worker that gets no core costs nothing.
 *
 * `ticket` holds the number of the run and the parts that nobody has taken. A worker takes one by a
 * compare-and-swap; after that the run cannot end before it, so that its body and context stay valid.
 */
#include "kernels/nn/nn_cpu.h"
#include "base/core/mem.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>

enum { PAUSES = 300, YIELDS = 40 }; /* some microseconds, then some tens of them */

typedef struct team_member {
    fsdp_nn_team *team;
    int worker;
    pthread_t thread;
} team_member;

struct fsdp_nn_team {
    void (*body)(void *context, int index, int worker);
    void *context;
    _Atomic uint64_t ticket; /* run << 32 | parts left to take */
    atomic_int unfinished;   /* parts */
    atomic_int sleepers;
    atomic_bool caller_sleeps, ending;
    pthread_mutex_t lock;
    pthread_cond_t work, done;
    int threads; /* with the caller */
    team_member member[];
};

static void pause_briefly(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#else
    atomic_signal_fence(memory_order_seq_cst);
#endif
}

static bool has_parts(fsdp_nn_team *team)
{
    return (uint32_t)atomic_load(&team->ticket) > 0;
}

/* Takes parts until none is left. */
static void take_parts(fsdp_nn_team *team, int worker)
{
    uint64_t ticket = atomic_load(&team->ticket);
    while ((uint32_t)ticket > 0) {
        if (!atomic_compare_exchange_weak(&team->ticket, &ticket, ticket - 1))
            continue;
        team->body(team->context, (int)(uint32_t)ticket - 1, worker);
        if (atomic_fetch_sub(&team->unfinished, 1) == 1 && atomic_load(&team->caller_sleeps)) {
            pthread_mutex_lock(&team->lock);
            pthread_cond_signal(&team->done);
            pthread_mutex_unlock(&team->lock);
        }
        ticket = atomic_load(&team->ticket);
    }
}

static void sleep_until_work(fsdp_nn_team *team)
{
    pthread_mutex_lock(&team->lock);
    atomic_fetch_add(&team->sleepers, 1);
    while (!has_parts(team) && !atomic_load(&team->ending))
        pthread_cond_wait(&team->work, &team->lock);
    atomic_fetch_sub(&team->sleepers, 1);
    pthread_mutex_unlock(&team->lock);
}

static void *serve(void *context)
{
    team_member *member = context;
    fsdp_nn_team *team = member->team;
    while (!atomic_load(&team->ending)) {
        for (int i = 0; i < PAUSES + YIELDS && !has_parts(team); i++) {
            if (i < PAUSES)
                pause_briefly();
            else
                sched_yield();
        }
        if (has_parts(team))
            take_parts(team, member->worker);
        else
            sleep_until_work(team);
    }
    return NULL;
}

static void wait_for_parts(fsdp_nn_team *team)
{
    for (int i = 0; i < PAUSES + YIELDS && atomic_load(&team->unfinished) > 0; i++) {
        if (i < PAUSES)
            pause_briefly();
        else
            sched_yield();
    }
    if (atomic_load(&team->unfinished) == 0)
        return;
    pthread_mutex_lock(&team->lock);
    atomic_store(&team->caller_sleeps, true);
    while (atomic_load(&team->unfinished) > 0)
        pthread_cond_wait(&team->done, &team->lock);
    atomic_store(&team->caller_sleeps, false);
    pthread_mutex_unlock(&team->lock);
}

/* body(context, index, worker) for every index in [0, count), each once, on any worker. */
static void run_team(fsdp_nn_team *team, int count,
                     void (*body)(void *context, int index, int worker), void *context)
{
    if (count <= 1 || team->threads <= 1) {
        for (int i = 0; i < count; i++)
            body(context, i, 0);
        return;
    }
    team->body = body;
    team->context = context;
    atomic_store(&team->unfinished, count);
    uint64_t run = (atomic_load(&team->ticket) >> 32) + 1;
    atomic_store(&team->ticket, run << 32 | (uint32_t)count);
    if (atomic_load(&team->sleepers) > 0) {
        pthread_mutex_lock(&team->lock);
        pthread_cond_broadcast(&team->work);
        pthread_mutex_unlock(&team->lock);
    }
    take_parts(team, 0);
    wait_for_parts(team);
}

fsdp_nn_team *fsdp_nn_team_create(int *threads)
{
    size_t others = *threads > 1 ? (size_t)*threads - 1 : 0;
    fsdp_nn_team *team = fsdp_alloc(1, sizeof *team + others * sizeof team->member[0]);
    if (!team)
        return NULL;
    pthread_mutex_init(&team->lock, NULL);
    pthread_cond_init(&team->work, NULL);
    pthread_cond_init(&team->done, NULL);
    team->threads = 1;
    sigset_t all, before; /* only the program's own threads handle signals */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (size_t i = 0; i < others; i++) {
        team->member[i].team = team;
        team->member[i].worker = (int)i + 1;
        if (pthread_create(&team->member[i].thread, NULL, serve, &team->member[i]) != 0)
            break; /* fewer threads are slower, not wrong */
        team->threads++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    *threads = team->threads;
    return team;
}

void fsdp_nn_team_free(fsdp_nn_team *team)
{
    if (!team)
        return;
    pthread_mutex_lock(&team->lock);
    atomic_store(&team->ending, true);
    pthread_cond_broadcast(&team->work);
    pthread_mutex_unlock(&team->lock);
    for (int i = 0; i < team->threads - 1; i++)
        pthread_join(team->member[i].thread, NULL);
    pthread_cond_destroy(&team->work);
    pthread_cond_destroy(&team->done);
    pthread_mutex_destroy(&team->lock);
    fsdp_free(team);
}

/* === parts of a call ========================================================================== */

enum {
    WORTH_A_PART = 8192, /* elements: some microseconds */
    UNEVEN_PARTS = 8     /* per thread */
};

typedef struct cut_job {
    fsdp_nn_cpu *cpu;
    fsdp_nn_job job;
    const void *call;
    int64_t count, grain;
    int parts;
} cut_job;

/* Returns the beginning of a part, in elements. */
static int64_t first_of(const cut_job *cut, int part)
{
    int64_t grains = (cut->count + cut->grain - 1) / cut->grain;
    int64_t first = (grains * part / cut->parts) * cut->grain;
    return first < cut->count ? first : cut->count;
}

static void run_part(void *context, int index, int worker)
{
    const cut_job *cut = context;
    fsdp_nn_part part = {first_of(cut, index), first_of(cut, index + 1), worker};
    if (part.first < part.last)
        cut->job(cut->cpu, cut->call, part);
}

void fsdp_nn_cpu_run(fsdp_nn_cpu *cpu, fsdp_nn_cut cut, fsdp_nn_job job, const void *call)
{
    if (cut.count <= 0 || cut.work <= 0)
        return;
    int64_t least = (WORTH_A_PART - 1) / cut.work + 1; /* items of a part */
    int64_t parts = (cut.count - 1) / least + 1;
    int64_t most = cut.uneven && cpu->threads > 1 ? cpu->threads * UNEVEN_PARTS : cpu->threads;
    cut_job work = {.cpu = cpu,
                    .job = job,
                    .call = call,
                    .count = cut.count,
                    .grain = cut.grain,
                    .parts = (int)(parts < most ? parts : most)};
    run_team(cpu->team, work.parts, run_part, &work);
}
