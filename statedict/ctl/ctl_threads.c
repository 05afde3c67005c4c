/*
 * The control plane between threads of one process: a mailbox for every pair of ranks.
 *
 * All ranks share one hub with one lock; each rank sleeps on a condition of its own, because it
 * waits for one thing at a time. Data is copied outside the lock. The hub goes when the last rank
 * has left it. Owner of pthread.h in this folder.
 */
#include "statedict/ctl/ctl_backend.h"

#include <errno.h>
#include <pthread.h>
#include <string.h>
#include <time.h>

#include "base/core/given.h"
#include "base/core/mem.h"

enum { MAX_RANKS = 1024, STACK_SIZE = 8 << 20 };

typedef struct message {
    struct message *next;
    size_t size;
    unsigned char data[];
} message;

/* Messages from one rank to another that have not been received yet. */
typedef struct mailbox {
    message *first, *last;
    size_t size;
} mailbox;

typedef struct endpoint {
    pthread_cond_t changed; /* a message for this rank, memory for one of its own, or a rank gone */
    bool has_left;
    int further; /* groups that it has asked for */
} endpoint;

/* A further group of the ranks, made by the first that asks for it. Each rank takes its end; the
 * ends of ranks that never ask go with the hub. */
typedef struct further_group {
    struct further_group *next;
    int number;
    fsdp_ctl *ctls[];
} further_group;

typedef struct thread_hub {
    pthread_mutex_t lock;
    int size, endpoints_made, references;
    fsdp_ctl_access access;
    endpoint *endpoints;
    mailbox *boxes; /* [from * size + to] */
    further_group *further;
} thread_hub;

/* --- the hub ---------------------------------------------------------------------------------- */

static void free_mailbox(mailbox *box)
{
    while (box->first) {
        message *next = box->first->next;
        fsdp_free(box->first);
        box->first = next;
    }
}

static void free_further(thread_hub *hub)
{
    while (hub->further) {
        further_group *next = hub->further->next;
        for (int i = 0; i < hub->size; i++)
            fsdp_ctl_free(hub->further->ctls[i]);
        fsdp_free(hub->further);
        hub->further = next;
    }
}

static void free_hub(thread_hub *hub)
{
    free_further(hub);
    size_t boxes = hub->boxes ? (size_t)hub->size * (size_t)hub->size : 0;
    for (size_t i = 0; i < boxes; i++)
        free_mailbox(&hub->boxes[i]);
    for (int i = 0; i < hub->endpoints_made; i++)
        pthread_cond_destroy(&hub->endpoints[i].changed);
    pthread_mutex_destroy(&hub->lock);
    fsdp_free(hub->boxes);
    fsdp_free(hub->endpoints);
    fsdp_free(hub);
}

static int make_condition(pthread_cond_t *condition)
{
    pthread_condattr_t attributes;
    int failed = pthread_condattr_init(&attributes);
    if (failed)
        return failed;
    failed = pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    if (!failed)
        failed = pthread_cond_init(condition, &attributes);
    pthread_condattr_destroy(&attributes);
    return failed;
}

static fsdp_status fill_hub(thread_hub *hub, fsdp_error *err)
{
    hub->endpoints = fsdp_alloc((size_t)hub->size, sizeof *hub->endpoints);
    hub->boxes = fsdp_alloc((size_t)hub->size * (size_t)hub->size, sizeof *hub->boxes);
    if (!hub->endpoints || !hub->boxes)
        return fsdp_fail_memory(err, "the mailboxes of the control plane");
    for (; hub->endpoints_made < hub->size; hub->endpoints_made++) {
        int failed = make_condition(&hub->endpoints[hub->endpoints_made].changed);
        if (failed)
            return fsdp_fail_errno(err, failed, "cannot create a condition for rank %d",
                                   hub->endpoints_made);
    }
    return FSDP_OK;
}

static fsdp_status create_hub(int size, thread_hub **hub_out, fsdp_error *err)
{
    thread_hub *hub = fsdp_alloc(1, sizeof *hub);
    if (!hub)
        return fsdp_fail_memory(err, "the control plane");
    hub->size = size;
    int failed = pthread_mutex_init(&hub->lock, NULL);
    if (failed) {
        fsdp_free(hub);
        return fsdp_fail_errno(err, failed, "cannot create the lock of the control plane");
    }
    fsdp_status status = fill_hub(hub, err);
    if (status == FSDP_OK)
        *hub_out = hub;
    else
        free_hub(hub);
    return status;
}

/* --- message ---------------------------------------------------------------------------------- */

static fsdp_status fail_left(int rank, fsdp_error *err)
{
    return fsdp_fail(err, FSDP_ERR_PEER, "rank %d has left", rank);
}

/* False when the time is over. */
static bool wait_for_change(thread_hub *hub, int rank, int64_t until_ms)
{
    struct timespec until = fsdp_timespec(until_ms);
    return pthread_cond_timedwait(&hub->endpoints[rank].changed, &hub->lock, &until) != ETIMEDOUT;
}

static bool has_room(const mailbox *box, size_t size)
{
    return !box->first || box->size + size <= FSDP_CTL_WINDOW;
}

/* With the lock held. */
static fsdp_status wait_for_room(const fsdp_ctl *ctl, int to, size_t size, int64_t until_ms,
                                 fsdp_error *err)
{
    thread_hub *hub = ctl->backend;
    const mailbox *box = &hub->boxes[ctl->rank * hub->size + to];
    bool in_time = true;
    while (!hub->endpoints[to].has_left && !has_room(box, size)) {
        if (!in_time && !fsdp_ctl_keep_sending(ctl, to, &until_ms))
            return fsdp_ctl_fail_late(err);
        in_time = wait_for_change(hub, ctl->rank, until_ms);
    }
    return hub->endpoints[to].has_left ? fail_left(to, err) : FSDP_OK;
}

static fsdp_status send_message(fsdp_ctl *ctl, int to, const void *data, size_t size,
                                int64_t until_ms, fsdp_error *err)
{
    thread_hub *hub = ctl->backend;
    mailbox *box = &hub->boxes[ctl->rank * hub->size + to];
    message *mine = fsdp_realloc(NULL, 1, sizeof *mine + size);
    if (!mine)
        return fsdp_fail_memory(err, "a message to another rank");
    mine->next = NULL;
    mine->size = size;
    memcpy(mine->data, data, size);

    pthread_mutex_lock(&hub->lock);
    fsdp_status status = wait_for_room(ctl, to, size, until_ms, err);
    if (status == FSDP_OK) {
        *(box->first ? &box->last->next : &box->first) = mine;
        box->last = mine;
        box->size += size;
        pthread_cond_signal(&hub->endpoints[to].changed);
    }
    pthread_mutex_unlock(&hub->lock);
    if (status != FSDP_OK)
        fsdp_free(mine);
    return status;
}

/* With the lock held. A message that a rank sent before it left still arrives. */
static fsdp_status wait_for_message(thread_hub *hub, int from, int to, int64_t until_ms,
                                    fsdp_error *err)
{
    const mailbox *box = &hub->boxes[from * hub->size + to];
    bool in_time = true;
    while (!box->first && !hub->endpoints[from].has_left) {
        if (!in_time)
            return fsdp_ctl_fail_late(err);
        in_time = wait_for_change(hub, to, until_ms);
    }
    return box->first ? FSDP_OK : fail_left(from, err);
}

static message *take_first(mailbox *box)
{
    message *first = box->first;
    box->first = first->next;
    box->size -= first->size;
    return first;
}

static fsdp_status recv_message(fsdp_ctl *ctl, int from, void *data, size_t size, int64_t until_ms,
                                fsdp_error *err)
{
    thread_hub *hub = ctl->backend;
    message *theirs = NULL;
    pthread_mutex_lock(&hub->lock);
    fsdp_status status = wait_for_message(hub, from, ctl->rank, until_ms, err);
    if (status == FSDP_OK) {
        theirs = take_first(&hub->boxes[from * hub->size + ctl->rank]);
        pthread_cond_signal(&hub->endpoints[from].changed);
    }
    pthread_mutex_unlock(&hub->lock);
    if (status != FSDP_OK)
        return status;

    status = fsdp_ctl_hand_over(ctl, from, (fsdp_ctl_bytes){theirs->data, theirs->size}, data, size,
                                err);
    fsdp_free(theirs);
    return status;
}

static void release_hub(fsdp_ctl *ctl)
{
    thread_hub *hub = ctl->backend;
    pthread_mutex_lock(&hub->lock);
    hub->endpoints[ctl->rank].has_left = true;
    for (int i = 0; i < hub->size; i++)
        pthread_cond_signal(&hub->endpoints[i].changed);
    bool last = --hub->references == 0;
    pthread_mutex_unlock(&hub->lock);
    if (last)
        free_hub(hub);
}

static const fsdp_ctl_ops thread_ops = {
    .name = "threads",
    .shares_memory = true,
    .send = send_message,
    .recv = recv_message,
    .close = release_hub,
};

static void free_ctls(fsdp_ctl **ctls, int n)
{
    for (int i = 0; i < n; i++) {
        fsdp_ctl_free(ctls[i]);
        ctls[i] = NULL;
    }
}

fsdp_status fsdp_ctl_threads(int n, fsdp_ctl **ctls_out, fsdp_error *err)
{
    thread_hub *hub = NULL;
    if (n < 1 || n > MAX_RANKS)
        return fsdp_fail(err, FSDP_ERR_USAGE, "cannot connect %d threads: 1 to %d are allowed", n,
                         MAX_RANKS);
    FSDP_TRY(create_hub(n, &hub, err));
    for (int i = 0; i < n; i++) {
        hub->references = i + 1; /* also when create fails: it leaves the hub, too */
        fsdp_status status = fsdp_ctl_create(&thread_ops, i, n, hub, &ctls_out[i], err);
        if (status == FSDP_OK) {
            ctls_out[i]->access = &hub->access;
            continue;
        }
        ctls_out[i] = NULL;
        free_ctls(ctls_out, i);
        return status;
    }
    return FSDP_OK;
}

/* With the lock held. */
static fsdp_status have_further(thread_hub *hub, int number, further_group **group_out,
                                fsdp_error *err)
{
    for (further_group *at = hub->further; at; at = at->next)
        if (at->number == number) {
            *group_out = at;
            return FSDP_OK;
        }
    further_group *made =
        fsdp_alloc(1, sizeof *made + (size_t)hub->size * sizeof(fsdp_ctl *)); /* at most 1024 */
    if (!made)
        return fsdp_fail_memory(err, "a further control plane");
    fsdp_status status = fsdp_ctl_threads(hub->size, made->ctls, err);
    if (status != FSDP_OK) {
        fsdp_free(made);
        return status;
    }
    made->number = number;
    made->next = hub->further;
    *group_out = hub->further = made;
    return FSDP_OK;
}

fsdp_status fsdp_ctl_threads_again(fsdp_ctl *ctl, fsdp_ctl **ctl_out, fsdp_error *err)
{
    thread_hub *hub = ctl->backend;
    further_group *group = NULL;
    pthread_mutex_lock(&hub->lock);
    fsdp_status status = have_further(hub, hub->endpoints[ctl->rank].further++, &group, err);
    if (status == FSDP_OK) {
        *ctl_out = group->ctls[ctl->rank];
        group->ctls[ctl->rank] = NULL;
    }
    pthread_mutex_unlock(&hub->lock);
    return status;
}

/* --- threads as ranks ------------------------------------------------------------------------- */

typedef struct rank_run {
    fsdp_ctl *ctl;
    fsdp_rank_body body;
    void *context;
    pthread_t thread;
    bool has_thread;
    int rank;
    fsdp_status status;
    fsdp_error error;
} rank_run;

static void report_leave(const rank_run *run)
{
    fsdp_error why = run->error;
    if (why.text[0] == '\0')
        (void)fsdp_fail(&why, run->status, "%s", fsdp_status_name(run->status));
    fsdp_error_prefix(&why, "rank %d has left", run->rank);
    why.status = FSDP_ERR_PEER;
    why.rank = run->rank;
    fsdp_ctl_leave(run->ctl, &why);
}

/* Leaves at the end, so that a rank that gives up early is not waited for. */
static void *run_rank(void *context)
{
    rank_run *run = context;
    run->status = run->body(run->context, run->ctl, &run->error);
    if (run->status != FSDP_OK)
        report_leave(run);
    fsdp_ctl_free(run->ctl);
    return NULL;
}

static void start_rank(rank_run *run, const pthread_attr_t *attributes)
{
    int failed = pthread_create(&run->thread, attributes, run_rank, run);
    run->has_thread = failed == 0;
    if (run->has_thread)
        return;
    run->status =
        fsdp_fail_errno(&run->error, failed, "cannot start a thread for rank %d", run->rank);
    fsdp_ctl_free(run->ctl);
}

static fsdp_status run_ranks(rank_run *runs, int n, fsdp_error *err)
{
    pthread_attr_t attributes;
    int failed = pthread_attr_init(&attributes);
    if (!failed)
        failed = pthread_attr_setstacksize(&attributes, STACK_SIZE);
    for (int i = 0; i < n; i++) {
        if (failed)
            fsdp_ctl_free(runs[i].ctl);
        else
            start_rank(&runs[i], &attributes);
    }
    for (int i = 0; i < n; i++) {
        if (runs[i].has_thread)
            pthread_join(runs[i].thread, NULL);
    }
    if (failed)
        return fsdp_fail_errno(err, failed, "cannot set up threads for %d ranks", n);
    pthread_attr_destroy(&attributes);
    return FSDP_OK;
}

/* The cause, not its echo: FSDP_ERR_PEER counts only when no rank has another failure. */
static const rank_run *first_failure(const rank_run *runs, int n)
{
    const rank_run *echo = NULL;
    for (int i = 0; i < n; i++) {
        if (runs[i].status == FSDP_OK)
            continue;
        if (runs[i].status != FSDP_ERR_PEER)
            return &runs[i];
        if (!echo)
            echo = &runs[i];
    }
    return echo;
}

static fsdp_status report_failure(const rank_run *failed, fsdp_error *err)
{
    if (err) {
        *err = failed->error;
        err->status = failed->status;
        if (err->rank == 0)
            err->rank = failed->rank;
        if (err->text[0] == '\0')
            (void)fsdp_fail(err, failed->status, "%s", fsdp_status_name(failed->status));
    }
    return failed->status;
}

fsdp_status fsdp_ctl_run_threads(int n, fsdp_rank_body body, void *context, fsdp_error *err)
{
    FSDP_NEED_CALL(err, body);
    fsdp_ctl **ctls = fsdp_alloc(n > 0 ? (size_t)n : 0, sizeof *ctls);
    rank_run *runs = fsdp_alloc(n > 0 ? (size_t)n : 0, sizeof *runs);
    fsdp_status status = FSDP_OK;
    if (!ctls || !runs)
        status = fsdp_fail_memory(err, "threads as ranks");
    else
        status = fsdp_ctl_threads(n, ctls, err);
    if (status == FSDP_OK) {
        for (int i = 0; i < n; i++)
            runs[i] = (rank_run){.ctl = ctls[i], .body = body, .context = context, .rank = i};
        status = run_ranks(runs, n, err);
    }
    const rank_run *failed = status == FSDP_OK ? first_failure(runs, n) : NULL;
    if (failed)
        status = report_failure(failed, err);
    fsdp_free(runs);
    fsdp_free(ctls);
    return status;
}
