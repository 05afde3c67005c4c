/*
 * The transport over point-to-point messages, and the creation and closing of its groups. All ranks
 * of the world take part in the creation of a group, so that every rank knows the group before a
 * member uses it. See comm_message.h.
 */
#include "runtime/comm_message/comm_message.h"

#include "base/core/mem.h"
#include "statedict/ctl/ctl_backend.h"

enum { PLACES = 4 }; /* per member: two halves each way */

/* --- a member's end --------------------------------------------------------------------------- */

static void release_group(message_group *group)
{
    fsdp_p2p *p2p = group->transport->p2p;
    if (group->batch)
        p2p->ops->batch_close(p2p, group->batch);
    for (int i = 0; group->members && i < group->size; i++)
        fsdp_free(group->members[i].reason);
    fsdp_free(group->members);
    fsdp_free(group->routes);
    fsdp_free(group->sources);
    fsdp_free(group->finished);
    fsdp_free(group->is_arriving);
    fsdp_free(group->counts);
}

static bool make_lists(message_group *group)
{
    size_t n = (size_t)group->size;
    group->members = fsdp_alloc(n, sizeof *group->members);
    group->routes = fsdp_alloc(n, sizeof *group->routes);
    group->sources = fsdp_alloc(n, sizeof *group->sources);
    group->finished = fsdp_alloc(n, PLACES * sizeof *group->finished);
    group->is_arriving = fsdp_alloc(n, 2 * sizeof *group->is_arriving);
    group->counts = fsdp_alloc(n, sizeof *group->counts);
    return group->members && group->routes && group->sources && group->finished &&
           group->is_arriving && group->counts;
}

/* On failure nothing is left. Staging memory is not touched before it is used. */
static fsdp_status init_group(message_group *group, message_transport *transport, const int *ranks,
                              int size, int position, fsdp_error *err)
{
    fsdp_p2p *p2p = transport->p2p;
    *group = (message_group){.transport = transport,
                             .rank = position,
                             .size = size,
                             .ranks = ranks,
                             .piece = fsdp_message_piece(size)};
    fsdp_status status = make_lists(group) ? FSDP_OK : fsdp_fail_memory(err, "a group of ranks");
    size_t places = PLACES * (size_t)size;
    if (status == FSDP_OK)
        status =
            p2p->ops->batch_create(p2p, (int)places, places * group->piece, &group->batch, err);
    if (status == FSDP_OK)
        group->pieces = group->batch->memory;
    else
        release_group(group);
    return status;
}

/* --- a new group ------------------------------------------------------------------------------ */

typedef struct new_group {
    const int *ranks;
    int size;
    fsdp_comm *comm;      /* NULL: this rank is not a member */
    message_group *group; /* NULL: as before, or it is the only one */
} new_group;

static fsdp_status prepare(message_transport *transport, new_group *made, fsdp_error *err)
{
    FSDP_TRY(fsdp_comm_create(&transport->base, made->ranks, made->size, &made->comm, err));
    if (transport->channels == transport->p2p->ops->channels)
        return fsdp_fail(err, FSDP_ERR_LIMIT, "more than %d groups over %s", transport->channels,
                         transport->p2p->ops->name);
    if (!made->comm || made->size == 1)
        return FSDP_OK;
    message_group *group = fsdp_alloc(1, sizeof *group);
    if (!group)
        return fsdp_fail_memory(err, "a group of ranks");
    fsdp_status status =
        init_group(group, transport, made->comm->ranks, made->size, made->comm->rank, err);
    if (status == FSDP_OK)
        made->comm->backend = made->group = group;
    else
        fsdp_free(group);
    return status;
}

/* Called before other members can use the group, so that their status messages find it. */
static void register_group(message_transport *transport, message_group *group)
{
    pthread_mutex_lock(&transport->lock);
    transport->channels++;
    if (group) {
        group->channel = transport->channels;
        group->next = transport->groups;
        transport->groups = group;
    }
    pthread_mutex_unlock(&transport->lock);
}

static void unregister(message_transport *transport, const message_group *group)
{
    pthread_mutex_lock(&transport->lock);
    message_group **at = &transport->groups;
    while (*at && *at != group)
        at = &(*at)->next;
    if (*at)
        *at = group->next;
    pthread_mutex_unlock(&transport->lock);
}

static fsdp_status make_group(message_transport *transport, new_group *made, fsdp_error *err)
{
    message_group *world = &transport->world;
    uint64_t number = atomic_load(&world->calls) + 1;
    FSDP_TRY(transport->p2p->ops->may_call(transport->p2p, err));
    FSDP_TRY(prepare(transport, made, err));
    fsdp_comm_header header = fsdp_comm_head_group(made->ranks, made->size, number);
    register_group(transport, made->group);
    return fsdp_message_begin(world, &header, err);
}

static fsdp_status create_comm(fsdp_transport *base, const int *ranks, int size,
                               fsdp_comm **comm_out, fsdp_error *err)
{
    message_transport *transport = (message_transport *)base;
    message_group *world = &transport->world;
    new_group made = {.ranks = ranks, .size = size};
    fsdp_error why = {.rank = base->rank};
    if (!fsdp_message_has_failed(world, &why)) {
        why.status = make_group(transport, &made, &why);
        if (why.status == FSDP_OK) {
            *comm_out = made.comm;
            return FSDP_OK;
        }
        fsdp_message_fail(world, &why, true, false);
        if (made.group && made.group->channel > 0) /* other members may use it already */
            fsdp_message_fail(made.group, &why, world->is_local, false);
        (void)fsdp_message_has_failed(world, &why);
    }
    fsdp_comm_free(made.comm);
    if (err)
        *err = why;
    return why.status;
}

static void close_comm(fsdp_comm *comm)
{
    message_group *group = comm->backend;
    if (group->channel > 0)
        fsdp_message_leave(group);
    unregister(group->transport, group);
    release_group(group);
    fsdp_free(group);
    comm->backend = NULL;
}

/* --- the transport ---------------------------------------------------------------------------- */

static void abort_comm(fsdp_comm *comm, const fsdp_error *why)
{
    fsdp_message_fail(comm->backend, why, true, false);
}

static bool has_comm_failed(fsdp_comm *comm, fsdp_error *err_out)
{
    return fsdp_message_has_failed(comm->backend, err_out);
}

static void free_transport(message_transport *transport)
{
    for (int i = 0; transport->watches && i < transport->base.size; i++)
        fsdp_process_watch_close(&transport->watches[i]);
    if (transport->observed)
        transport->observed->observer = (fsdp_ctl_observer){0};
    fsdp_free(transport->watches);
    fsdp_free(transport->busy_until_ms);
    fsdp_free(transport->world_ranks);
    pthread_mutex_destroy(&transport->lock);
    fsdp_free(transport);
}

static void close_transport(fsdp_transport *base)
{
    message_transport *transport = (message_transport *)base;
    fsdp_p2p *p2p = transport->p2p;
    fsdp_message_leave(&transport->world);
    release_group(&transport->world);
    p2p->ops->close(p2p);
    free_transport(transport);
}

static const fsdp_transport_ops message_ops = {
    .abilities = FSDP_COMM_AVG | FSDP_COMM_PREMUL_SUM,
    .comm_create = create_comm,
    .run = fsdp_message_run,
    .abort = abort_comm,
    .has_failed = has_comm_failed,
    .comm_close = close_comm,
    .set_busy = fsdp_message_set_busy,
    .close = close_transport,
};

static fsdp_status make_transport(int rank, int size, message_transport **transport_out,
                                  fsdp_error *err)
{
    message_transport *transport = fsdp_alloc(1, sizeof *transport);
    if (!transport || pthread_mutex_init(&transport->lock, NULL) != 0) {
        fsdp_free(transport);
        return fsdp_fail_memory(err, "a transport");
    }
    transport->base.rank = rank;
    transport->base.size = size;
    transport->world_ranks = fsdp_alloc((size_t)size, sizeof *transport->world_ranks);
    transport->watches = fsdp_alloc((size_t)size, sizeof *transport->watches);
    transport->busy_until_ms = fsdp_alloc((size_t)size, sizeof *transport->busy_until_ms);
    for (int i = 0; transport->watches && i < size; i++)
        transport->watches[i].fd = -1;
    for (int i = 0; transport->world_ranks && i < size; i++)
        transport->world_ranks[i] = i;
    if (transport->world_ranks && transport->watches && transport->busy_until_ms) {
        *transport_out = transport;
        return FSDP_OK;
    }
    free_transport(transport);
    return fsdp_fail_memory(err, "a transport");
}

static fsdp_status connect_transport(message_transport *transport, fsdp_p2p *p2p, int deadline_ms,
                                     fsdp_error *err)
{
    transport->p2p = p2p;
    transport->ops = message_ops;
    transport->ops.name = p2p->ops->name;
    transport->base.ops = &transport->ops;
    transport->base.deadline_ms = deadline_ms;
    FSDP_TRY(init_group(&transport->world, transport, transport->world_ranks, transport->base.size,
                        transport->base.rank, err));
    transport->world.channel = transport->channels = 1;
    return FSDP_OK;
}

fsdp_status fsdp_transport_message(fsdp_ctl *ctl, fsdp_p2p *p2p, int deadline_ms,
                                   fsdp_transport **transport_out, fsdp_error *err)
{
    message_transport *transport = NULL;
    fsdp_error why = {0};
    fsdp_status status = make_transport(fsdp_ctl_rank(ctl), fsdp_ctl_size(ctl), &transport, &why);
    if (status == FSDP_OK)
        status = connect_transport(transport, p2p, deadline_ms, &why);
    bool is_connected = status == FSDP_OK;
    status = fsdp_ctl_agree(ctl, status, &why);
    if (status == FSDP_OK)
        status = fsdp_ctl_agree(ctl, fsdp_process_watch_all(ctl, transport->watches, &why), &why);
    if (status == FSDP_OK) {
        transport->observed = ctl;
        ctl->observer =
            (fsdp_ctl_observer){.busy_until = fsdp_message_busy_until, .context = transport};
        *transport_out = &transport->base;
        return FSDP_OK;
    }
    if (is_connected)
        release_group(&transport->world);
    if (transport)
        free_transport(transport);
    p2p->ops->close(p2p);
    if (err)
        *err = why;
    return status;
}
