/* See worlds.h. */
#include "tests/support/worlds.h"

#include <pthread.h>
#include <string.h>

enum { MOST_RANKS = 128, DEADLINE_MS = 30000 };

typedef struct world_thread {
    pthread_t thread;
    fsdp_world_parts parts;
    world_body body;
    world_rank rank;
    const char *device;
    fsdp_status status;
    fsdp_error err;
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
            fsdp_text_addf(&rank->events, "%s%s %s", rank->events.size > 0 ? "|" : "", wanted[i][1],
                           event->unit);
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

int count_events(const world_rank *rank, const char *begin)
{
    int count = 0;
    const char *at = rank->events.data;
    for (; at && *at; at = strchr(at, '|') ? strchr(at, '|') + 1 : "")
        count += strncmp(at, begin, strlen(begin)) == 0;
    return count;
}

static void *run_rank(void *user)
{
    world_thread *self = user;
    fsdp_world *world = NULL;
    self->status = fsdp_device_open(self->device, &self->parts.device, &self->err);
    if (self->status == FSDP_OK)
        self->status = fsdp_device_watch(&self->parts.device, &self->err);
    if (self->status == FSDP_OK)
        self->status =
            fsdp_trace_open(NULL, fsdp_ctl_rank(self->parts.ctl), &self->parts.trace, &self->err);
    if (self->status == FSDP_OK)
        self->status = fsdp_world_create(&self->parts, &world, &self->err);
    if (self->status != FSDP_OK)
        return NULL;
    self->rank.world = world;
    fsdp_trace_set_listener(self->parts.trace, note, &self->rank);
    self->status = self->body(&self->rank, &self->err);
    fsdp_world_free(world);
    fsdp_text_release(&self->rank.events);
    return NULL;
}

fsdp_status run_worlds(int n, const char *device, world_body body, void *user, fsdp_error *err)
{
    static world_thread ranks[MOST_RANKS];
    fsdp_ctl *ctls[MOST_RANKS];
    fsdp_fabric *fabrics[MOST_RANKS];
    FSDP_TRY(fsdp_ctl_threads(n, ctls, err));
    FSDP_TRY(fsdp_fabric_threads(n, DEADLINE_MS, fabrics, err));
    for (int i = 0; i < n; i++) {
        ranks[i] = (world_thread){.body = body, .device = device, .rank.user = user};
        ranks[i].parts = (fsdp_world_parts){.local_rank = i,
                                            .local_size = n,
                                            .ctl = ctls[i],
                                            .fabric = fabrics[i],
                                            .check = true,
                                            .deadline_ms = DEADLINE_MS};
        if (pthread_create(&ranks[i].thread, NULL, run_rank, &ranks[i]))
            return fsdp_fail(err, FSDP_ERR_LIMIT, "no thread for rank %d", i);
    }
    fsdp_status status = FSDP_OK;
    for (int i = 0; i < n; i++)
        pthread_join(ranks[i].thread, NULL);
    for (int i = n - 1; i >= 0; i--)
        if (ranks[i].status != FSDP_OK) {
            status = ranks[i].status;
            *err = ranks[i].err;
        }
    return status;
}
