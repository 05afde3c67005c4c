/* See worlds.h. */
#include "tests/support/ranks/worlds.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/comm_nccl/transport_nccl.h"
#include "runtime/comm_shared/shared_transports.h"
#include "statedict/ctl/ctl_backend.h"
#include "tests/support/ranks/world_processes.h"

enum { MOST_RANKS = 128, DEADLINE_MS = 30000 };

typedef struct world_thread {
    pthread_t thread;
    fsdp_world_parts parts;
    world_body body;
    world_rank rank;
    const char *device;
    rank_outcome *outcome;
} world_thread;

static void note(void *user, const fsdp_trace_event *event)
{
    world_rank *rank = user;
    static const char *const wanted[][2] = {
        {"unshard", "U"}, {"reshard", "R"}, {"post_backward", "post"}};
    static const char *const collectives[][2] = {
        {"all_gather", "AG"}, {"reduce_scatter", "RS"}, {"all_reduce", "AR"}};
    for (size_t i = 0; i < 3; i++) {
        if (strcmp(event->event, wanted[i][0]) == 0)
            fsdp_text_addf(&rank->events, "%s%s %s%s%s", rank->events.size > 0 ? "|" : "",
                           wanted[i][1], event->unit, i == 0 && rank->notes_states ? " " : "",
                           i == 0 && rank->notes_states ? event->state : "");
        if (rank->notes_collectives && strcmp(event->event, collectives[i][0]) == 0)
            fsdp_text_addf(&rank->events, "%s%s %s/%d", rank->events.size > 0 ? "|" : "",
                           collectives[i][1], event->unit, fsdp_comm_size(event->comm));
    }
}

void forget_events(world_rank *rank)
{
    rank->events.size = 0;
    fsdp_text_add(&rank->events, "", 0);
    if (rank->events.data)
        rank->events.data[0] = '\0';
}

fsdp_status expect_events(world_rank *rank, const char *events, fsdp_error *err)
{
    const char *seen = rank->events.data ? rank->events.data : "";
    fsdp_status status = FSDP_OK;
    if (strcmp(seen, events) != 0)
        status = fsdp_fail(err, FSDP_ERR_INTERNAL, "'%s' were expected, '%s' came", events, seen);
    forget_events(rank);
    return status;
}

int count_events(const world_rank *rank, const char *begin)
{
    int count = 0;
    const char *at = rank->events.data;
    for (; at && *at; at = strchr(at, '|') ? strchr(at, '|') + 1 : "")
        count += strncmp(at, begin, strlen(begin)) == 0;
    return count;
}

fsdp_status (*worlds_open_async)(const fsdp_device_rank *rank, fsdp_device **device_out,
                                 fsdp_error *err);

static bool are_unwatched, use_nccl; /* the worlds that run now */

static fsdp_status open_parts(fsdp_world_parts *parts, const char *device, fsdp_error *err)
{
    const fsdp_device_rank rank = {.rank = fsdp_ctl_rank(parts->ctl),
                                   .local_rank = parts->local_rank};
    if (worlds_open_async && strcmp(device, "cpu-async") == 0)
        FSDP_TRY(worlds_open_async(&rank, &parts->device, err));
    else
        FSDP_TRY(fsdp_device_open(device, &rank, &parts->device, err));
    if (!are_unwatched)
        FSDP_TRY(fsdp_device_watch(&parts->device, err));
    const fsdp_nccl_spec nccl = {.ctl = parts->ctl,
                                 .inner = parts->transport,
                                 .device = parts->device,
                                 .check = parts->check};
    if (use_nccl)
        FSDP_TRY(fsdp_transport_nccl(&nccl, &parts->transport, err));
    return fsdp_trace_open(NULL, fsdp_ctl_rank(parts->ctl), &parts->trace, err);
}

fsdp_status run_world(fsdp_world_parts *parts, const char *device, world_body body,
                      world_rank *rank, fsdp_error *err)
{
    fsdp_status status = open_parts(parts, device, err);
    if (status != FSDP_OK) {
        fsdp_world_parts_release(parts); /* tells the other ranks that this one has left */
        return status;
    }
    FSDP_TRY(fsdp_world_create(parts, &rank->world, err));
    fsdp_trace_set_listener(parts->trace, note, rank);
    status = body(rank, err);
    fsdp_world_free(rank->world);
    fsdp_text_release(&rank->events);
    return status;
}

static void *run_rank(void *user)
{
    world_thread *self = user;
    self->outcome->status =
        run_world(&self->parts, self->device, self->body, &self->rank, &self->outcome->err);
    return NULL;
}

fsdp_status run_worlds_within(const worlds_setup *setup, world_body body, void *user,
                              rank_outcome *outcomes_out, fsdp_error *err)
{
    int n = setup->ranks;
    are_unwatched = setup->is_unchecked;
    use_nccl = setup->uses_nccl;
    static world_thread ranks[MOST_RANKS];
    static rank_outcome outcomes[MOST_RANKS];
    fsdp_ctl *ctls[MOST_RANKS];
    fsdp_transport *transports[MOST_RANKS];
    FSDP_TRY(fsdp_ctl_threads(n, ctls, err));
    FSDP_TRY(fsdp_transport_threads(n, setup->deadline_ms, transports, err));
    for (int i = 0; i < n; i++) {
        outcomes[i] = (rank_outcome){0};
        ranks[i] = (world_thread){
            .body = body, .device = setup->device, .rank.user = user, .outcome = &outcomes[i]};
        ranks[i].parts = (fsdp_world_parts){.local_rank = i,
                                            .local_size = n,
                                            .ctl = ctls[i],
                                            .transport = transports[i],
                                            .check = !setup->is_unchecked,
                                            .deadline_ms = setup->deadline_ms};
        if (pthread_create(&ranks[i].thread, NULL, run_rank, &ranks[i]))
            return fsdp_fail(err, FSDP_ERR_LIMIT, "no thread for rank %d", i);
    }
    for (int i = 0; i < n; i++)
        pthread_join(ranks[i].thread, NULL);
    if (outcomes_out)
        memcpy(outcomes_out, outcomes, (size_t)n * sizeof *outcomes);
    return first_failure(outcomes, n, err);
}

static bool wants_processes(void)
{
    const char *ranks = getenv("FSDP_TEST_RANKS");
    return ranks && strcmp(ranks, "processes") == 0;
}

fsdp_status run_worlds(int n, const char *device, world_body body, void *user, fsdp_error *err)
{
    world_processes worlds = {.size = n,
                              .deadline_ms = DEADLINE_MS,
                              .device = device,
                              .ends_at_once = true,
                              .body = body,
                              .user = user};
    if (wants_processes() && n > WORLD_PROCESSES_MOST)
        return fsdp_fail(err, FSDP_ERR_USAGE, "at most %d ranks of a test are processes",
                         WORLD_PROCESSES_MOST);
    if (wants_processes())
        return run_world_processes(&worlds, err);
    const worlds_setup setup = {.ranks = n, .deadline_ms = DEADLINE_MS, .device = device};
    return run_worlds_within(&setup, body, user, NULL, err);
}
