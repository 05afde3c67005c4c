/*
 * Counts the messages of beats that rank 0 of a large job sends. The watches of all ranks run as threads,
 * over the collectives that TCP and MPI use; the network is memory of this process. Beats go among all ranks,
 * and through one rank per host. The counts are in docs/gpu.md.
 *
 * usage: nccl_beats RANKS HOSTS
 */
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "base/core/clock.h"
#include "runtime/bootstrap/process_watch.h"
#include "runtime/comm_message/message_transport.h"
#include "runtime/comm_message/p2p.h"
#include "runtime/comm_nccl/comm_nccl.h"
#include "statedict/ctl/ctl_backend.h"
#include "tests/nccl/nccl_ranks.h"

enum { DEADLINE_MS = 600000, RUN_MS = 5000, CHANNELS = 64, OF_CREATION = 1, NAP_MS = 5 };

/* --- processes ---------------------------------------------------------------------------------- */

/* Ranks have one process: no file per pair of ranks tells that one has ended. */
fsdp_status fsdp_process_watch_all(fsdp_ctl *ctl, fsdp_process_watch *watches, fsdp_error *err)
{
    (void)err;
    for (int i = 0; i < fsdp_ctl_size(ctl); i++)
        watches[i] = (fsdp_process_watch){-1, 0};
    return FSDP_OK;
}

bool fsdp_process_watch_has_ended(const fsdp_process_watch *watch)
{
    (void)watch;
    return false;
}

void fsdp_process_watch_close(fsdp_process_watch *watch)
{
    (void)watch;
}

/* --- the network -------------------------------------------------------------------------------- */

typedef struct message {
    struct message *next;
    int channel;
    size_t size;
    unsigned char data[];
} message;

typedef struct queue {
    message *first, *last;
} queue;

/* The messages to a rank that it has not taken. */
typedef struct inbox {
    pthread_mutex_t lock;
    pthread_cond_t arrived;
    bool has_news;
    queue *from; /* per rank */
    queue statuses;
} inbox;

typedef struct network {
    int ranks;
    inbox *inboxes;
    atomic_long sent, bytes; /* of beats, by rank 0 */
    atomic_bool is_over;     /* statuses, which say that ranks leave, are lost */
} network;

typedef struct memory_p2p {
    fsdp_p2p base;
    network *net;
    int rank;
} memory_p2p;

typedef struct place {
    bool is_posted;
    fsdp_p2p_transfer transfer;
} place;

typedef struct memory_batch {
    fsdp_p2p_batch base;
    size_t size;
    place *places;
    int *sent, n_sent; /* places whose sends are done */
    int *posted, n_posted;
} memory_batch;

static void *make(size_t n, size_t size)
{
    void *made = calloc(n, size);
    expect(made, "memory", "none");
    return made;
}

static void put(queue *to, message *one)
{
    if (to->last)
        to->last->next = one;
    else
        to->first = one;
    to->last = one;
}

static message *take(queue *from, int channel)
{
    message *before = NULL, *one = from->first;
    while (one && one->channel != channel) {
        before = one;
        one = one->next;
    }
    if (!one)
        return NULL;
    if (before)
        before->next = one->next;
    else
        from->first = one->next;
    if (from->last == one)
        from->last = before;
    return one;
}

static void deliver(const memory_p2p *mine, int to, bool is_status, int channel, const void *data,
                    size_t size)
{
    inbox *box = &mine->net->inboxes[to];
    message *one = malloc(sizeof *one + size);
    expect(one, "memory", "none");
    *one = (message){.channel = channel, .size = size};
    memcpy(one->data, data, size);
    pthread_mutex_lock(&box->lock);
    put(is_status ? &box->statuses : &box->from[mine->rank], one);
    box->has_news = true;
    pthread_cond_signal(&box->arrived);
    pthread_mutex_unlock(&box->lock);
}

static fsdp_status may_call(fsdp_p2p *p2p, fsdp_error *err)
{
    (void)p2p;
    (void)err;
    return FSDP_OK;
}

/* Pages that no message touches take no memory. */
static fsdp_status batch_create(fsdp_p2p *p2p, int places, size_t size, fsdp_p2p_batch **batch_out,
                                fsdp_error *err)
{
    memory_batch *batch = make(1, sizeof *batch);
    const int how = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    (void)p2p;
    (void)err;
    batch->base = (fsdp_p2p_batch){mmap(NULL, size, PROT_READ | PROT_WRITE, how, -1, 0), places};
    expect(batch->base.memory != MAP_FAILED, "memory for messages", "none");
    batch->size = size;
    batch->places = make((size_t)places, sizeof *batch->places);
    batch->sent = make((size_t)places, sizeof *batch->sent);
    batch->posted = make((size_t)places, sizeof *batch->posted);
    *batch_out = &batch->base;
    return FSDP_OK;
}

static void batch_close(fsdp_p2p *p2p, fsdp_p2p_batch *base)
{
    memory_batch *batch = (memory_batch *)base;
    (void)p2p;
    munmap(base->memory, batch->size);
    free(batch->places);
    free(batch->sent);
    free(batch->posted);
    free(batch);
}

static fsdp_status send(fsdp_p2p *p2p, fsdp_p2p_batch *base, const fsdp_p2p_transfer *transfer,
                        fsdp_error *err)
{
    memory_p2p *mine = (memory_p2p *)p2p;
    memory_batch *batch = (memory_batch *)base;
    (void)err;
    if (mine->rank == 0 && transfer->channel > OF_CREATION) {
        atomic_fetch_add(&mine->net->sent, 1);
        atomic_fetch_add(&mine->net->bytes, (long)transfer->size);
    }
    deliver(mine, transfer->peer, false, transfer->channel, transfer->data, transfer->size);
    batch->sent[batch->n_sent++] = transfer->place;
    return FSDP_OK;
}

static fsdp_status recv(fsdp_p2p *p2p, fsdp_p2p_batch *base, const fsdp_p2p_transfer *transfer,
                        fsdp_error *err)
{
    memory_batch *batch = (memory_batch *)base;
    (void)p2p;
    (void)err;
    batch->places[transfer->place] = (place){true, *transfer};
    batch->posted[batch->n_posted++] = transfer->place;
    return FSDP_OK;
}

static bool receive(const memory_p2p *mine, const fsdp_p2p_transfer *into)
{
    message *one = take(&mine->net->inboxes[mine->rank].from[into->peer], into->channel);
    if (!one)
        return false;
    expect(one->size == into->size, "a message of the size that is expected", "another");
    memcpy(into->data, one->data, one->size);
    free(one);
    return true;
}

static fsdp_status test(fsdp_p2p *p2p, fsdp_p2p_batch *base, int *finished, int *count_out,
                        fsdp_error *err)
{
    const memory_p2p *mine = (memory_p2p *)p2p;
    memory_batch *batch = (memory_batch *)base;
    inbox *box = &mine->net->inboxes[mine->rank];
    int count = 0, left = 0;
    (void)err;
    while (batch->n_sent > 0)
        finished[count++] = batch->sent[--batch->n_sent];
    pthread_mutex_lock(&box->lock);
    for (int i = 0; i < batch->n_posted; i++) {
        const int at = batch->posted[i];
        if (receive(mine, &batch->places[at].transfer))
            finished[count++] = at;
        else
            batch->posted[left++] = at;
    }
    batch->n_posted = left;
    pthread_mutex_unlock(&box->lock);
    *count_out = count;
    return FSDP_OK;
}

static void send_status(fsdp_p2p *p2p, int to, const void *status, size_t size)
{
    const memory_p2p *mine = (memory_p2p *)p2p;
    if (!atomic_load(&mine->net->is_over))
        deliver(mine, to, true, 0, status, size);
}

static bool recv_status(fsdp_p2p *p2p, void *status, size_t size)
{
    const memory_p2p *mine = (memory_p2p *)p2p;
    inbox *box = &mine->net->inboxes[mine->rank];
    pthread_mutex_lock(&box->lock);
    message *one = take(&box->statuses, 0);
    pthread_mutex_unlock(&box->lock);
    if (one)
        memcpy(status, one->data, size);
    free(one);
    return one != NULL;
}

static void back_off(fsdp_p2p *p2p, int idle)
{
    const memory_p2p *mine = (memory_p2p *)p2p;
    inbox *box = &mine->net->inboxes[mine->rank];
    struct timespec until;
    (void)idle;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_nsec += NAP_MS * 1000000;
    if (until.tv_nsec >= 1000000000)
        until.tv_sec++, until.tv_nsec -= 1000000000;
    pthread_mutex_lock(&box->lock);
    if (!box->has_news)
        (void)pthread_cond_timedwait(&box->arrived, &box->lock, &until);
    box->has_news = false;
    pthread_mutex_unlock(&box->lock);
}

static void close_p2p(fsdp_p2p *p2p)
{
    free(p2p);
}

static const fsdp_p2p_ops memory_ops = {.name = "memory",
                                        .channels = CHANNELS,
                                        .may_call = may_call,
                                        .batch_create = batch_create,
                                        .send = send,
                                        .recv = recv,
                                        .test = test,
                                        .batch_close = batch_close,
                                        .send_status = send_status,
                                        .recv_status = recv_status,
                                        .back_off = back_off,
                                        .close = close_p2p};

static void open_network(network *net, int ranks)
{
    *net = (network){.ranks = ranks, .inboxes = make((size_t)ranks, sizeof *net->inboxes)};
    for (int i = 0; i < ranks; i++) {
        pthread_mutex_init(&net->inboxes[i].lock, NULL);
        pthread_cond_init(&net->inboxes[i].arrived, NULL);
        net->inboxes[i].from = make((size_t)ranks, sizeof *net->inboxes[i].from);
    }
}

static void empty(queue *from)
{
    while (from->first) {
        message *next = from->first->next;
        free(from->first);
        from->first = next;
    }
}

static void close_network(network *net)
{
    for (int i = 0; i < net->ranks; i++) {
        for (int j = 0; j < net->ranks; j++)
            empty(&net->inboxes[i].from[j]);
        empty(&net->inboxes[i].statuses);
        free(net->inboxes[i].from);
        pthread_mutex_destroy(&net->inboxes[i].lock);
        pthread_cond_destroy(&net->inboxes[i].arrived);
    }
    free(net->inboxes);
}

/* --- ranks -------------------------------------------------------------------------------------- */

typedef struct large_job {
    int ranks, hosts;
    bool uses_hosts;
    network net;
    fsdp_device *device;
    pthread_barrier_t begin, end;
    int64_t ran_ms;
    uint64_t exchanges;
} large_job;

typedef struct job_rank {
    large_job *job;
    fsdp_ctl *ctl;
    pthread_t thread;
} job_rank;

static fsdp_status connect(const job_rank *rank, fsdp_transport **transport_out, fsdp_error *err)
{
    large_job *job = rank->job;
    const int number = fsdp_ctl_rank(rank->ctl);
    memory_p2p *p2p = make(1, sizeof *p2p);
    fsdp_transport *inner = NULL;
    *p2p = (memory_p2p){{&memory_ops}, &job->net, number};
    FSDP_TRY(fsdp_transport_message(rank->ctl, &p2p->base, DEADLINE_MS, &inner, err));
    const fsdp_nccl_spec spec = {.ctl = rank->ctl,
                                 .inner = inner,
                                 .device = job->device,
                                 .host = (uint64_t)(number / (job->ranks / job->hosts)),
                                 .direct_ranks = job->uses_hosts ? 0 : job->ranks};
    return fsdp_transport_nccl(&spec, transport_out, err);
}

/* Exchanges among all ranks are calls of the watches' group; those through hosts are one of leaders each. */
static uint64_t count_exchanges(const fsdp_transport *base)
{
    const nccl_transport *transport = (const nccl_transport *)base;
    return transport->uses_hosts ? transport->hosts.leaders->sequence
                                 : transport->watches->sequence;
}

static void *run_rank(void *context)
{
    const job_rank *rank = context;
    large_job *job = rank->job;
    fsdp_transport *transport = NULL;
    fsdp_error err = {0};
    expect(connect(rank, &transport, &err) == FSDP_OK, "a transport", err.text);
    pthread_barrier_wait(&job->begin);
    const int64_t begin_ms = fsdp_now_ms();
    nanosleep(&(struct timespec){.tv_sec = RUN_MS / 1000}, NULL);
    fsdp_nccl_watch_end((nccl_transport *)transport);
    if (fsdp_ctl_rank(rank->ctl) == 0) {
        job->ran_ms = fsdp_now_ms() - begin_ms;
        job->exchanges = count_exchanges(transport);
    }
    pthread_barrier_wait(&job->end);
    atomic_store(&job->net.is_over, true);
    transport->ops->close(transport);
    return NULL;
}

static void run_job(large_job *job)
{
    fsdp_ctl **ctls = make((size_t)job->ranks, sizeof *ctls);
    job_rank *ranks = make((size_t)job->ranks, sizeof *ranks);
    fsdp_error err = {0};
    pthread_attr_t small;
    open_network(&job->net, job->ranks);
    pthread_barrier_init(&job->begin, NULL, (unsigned)job->ranks);
    pthread_barrier_init(&job->end, NULL, (unsigned)job->ranks);
    pthread_attr_init(&small);
    pthread_attr_setstacksize(&small, 1 << 20);
    expect(fsdp_ctl_threads(job->ranks, ctls, &err) == FSDP_OK, "ranks", err.text);
    for (int i = 0; i < job->ranks; i++) {
        fsdp_ctl_set_deadline(ctls[i], DEADLINE_MS);
        ranks[i] = (job_rank){.job = job, .ctl = ctls[i]};
        expect(pthread_create(&ranks[i].thread, &small, run_rank, &ranks[i]) == 0, "a thread", "");
    }
    for (int i = 0; i < job->ranks; i++) {
        pthread_join(ranks[i].thread, NULL);
        fsdp_ctl_free(ctls[i]);
    }
    pthread_attr_destroy(&small);
    pthread_barrier_destroy(&job->begin);
    pthread_barrier_destroy(&job->end);
    close_network(&job->net);
    free(ranks);
    free(ctls);
}

/* --- counts ------------------------------------------------------------------------------------- */

/* Rounds in which all members of a group compare their calls. */
static int rounds(int members)
{
    int rounds = 0;
    while (1 << rounds < members)
        rounds++;
    return rounds;
}

/* Of rank 0: among all ranks; or to its host, twice, and among the leaders. */
static int expected(const large_job *job)
{
    const int here = job->ranks / job->hosts;
    return job->uses_hosts ? 2 * (rounds(here) + here - 1) + rounds(job->hosts) + job->hosts - 1
                           : rounds(job->ranks) + job->ranks - 1;
}

static void count_beats(large_job *job)
{
    char got[64];
    run_job(job);
    const long sent = job->net.sent;
    const double per_exchange = (double)sent / (double)job->exchanges;
    const double per_second = job->uses_hosts ? per_exchange : 10 * per_exchange;
    snprintf(got, sizeof got, "%g", per_exchange);
    printf(
        "%d ranks on %d hosts, %s: rank 0 sends %g messages of %ld bytes per beat, %g per second; "
        "%llu beats here in %.1f s\n",
        job->ranks, job->hosts, job->uses_hosts ? "through one rank per host" : "among all",
        per_exchange, job->net.bytes / (sent > 0 ? sent : 1), per_second,
        (unsigned long long)job->exchanges, (double)job->ran_ms / 1000);
    fflush(stdout);
    expect(job->exchanges > 1 && sent == (long)job->exchanges * expected(job),
           "messages of a beat as expected", got);
}

int main(int argc, char **argv)
{
    large_job among_all = {.ranks = argc > 1 ? atoi(argv[1]) : 0,
                           .hosts = argc > 2 ? atoi(argv[2]) : 0};
    fsdp_stream *stream = NULL;
    fsdp_error err = {0};
    expect(among_all.hosts > 1 && among_all.ranks % among_all.hosts == 0, "RANKS HOSTS", "others");
    fake_nccl_of()->plan = (fake_nccl_plan){.rank = -1};
    expect(open_nccl_device(&among_all.device, &stream, &err) == FSDP_OK, "a device", err.text);
    large_job by_hosts = among_all;
    by_hosts.uses_hosts = true;
    count_beats(&by_hosts);
    count_beats(&among_all);
    by_hosts.device->ops->stream_free(stream);
    fsdp_device_close(by_hosts.device);
    return 0;
}
