/*
 * The fabric of ranks that only a network connects, and how its groups are made and left. All ranks of the
 * world take part in the making of each group, so that all know of it before anyone uses it. See
 * comm_message.h.
 */
#include "runtime/comm_message/comm_message.h"

#include "base/mem.h"

enum { PLACES = 4 }; /* per member: two halves each way */

/* --- a member's end --------------------------------------------------------------------------- */

static void release_group(message_group *group)
{
    fsdp_wire *wire = group->fabric->wire;
    if (group->batch)
        wire->ops->batch_close(wire, group->batch);
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

/* On failure nothing is left. The staging is touched as it is needed. */
static fsdp_status init_group(message_group *group, message_fabric *fabric, const int *ranks,
                              int size, int position, fsdp_error *err)
{
    fsdp_wire *wire = fabric->wire;
    *group = (message_group){.fabric = fabric,
                             .rank = position,
                             .size = size,
                             .ranks = ranks,
                             .piece = fsdp_message_piece(size)};
    fsdp_status status = make_lists(group) ? FSDP_OK : fsdp_fail_memory(err, "a group of ranks");
    size_t places = PLACES * (size_t)size;
    if (status == FSDP_OK)
        status =
            wire->ops->batch_create(wire, (int)places, places * group->piece, &group->batch, err);
    if (status == FSDP_OK)
        group->pieces = group->batch->memory;
    else
        release_group(group);
    return status;
}

/* --- a new group ------------------------------------------------------------------------------ */

typedef struct new_group {
    const int *ranks;
    int size, position; /* -1: this rank is not a member */
    message_group *group;
    fsdp_comm *comm;
} new_group;

static fsdp_status prepare(message_fabric *fabric, new_group *made, fsdp_error *err)
{
    FSDP_TRY(fsdp_comm_check_ranks(&fabric->fabric, made->ranks, made->size, &made->position, err));
    if (fabric->channels == fabric->wire->ops->channels)
        return fsdp_fail(err, FSDP_ERR_LIMIT, "more than %d groups over %s", fabric->channels,
                         fabric->wire->ops->name);
    if (made->position < 0)
        return FSDP_OK;
    FSDP_TRY(fsdp_comm_create(&fabric->fabric, made->ranks, made->size, NULL, &made->comm, err));
    if (made->size == 1)
        return FSDP_OK;
    message_group *group = fsdp_alloc(1, sizeof *group);
    if (!group)
        return fsdp_fail_memory(err, "a group of ranks");
    fsdp_status status =
        init_group(group, fabric, made->comm->ranks, made->size, made->position, err);
    if (status == FSDP_OK)
        made->comm->backend = made->group = group;
    else
        fsdp_free(group);
    return status;
}

/* Before the others can use it: news of it must find it. */
static void enlist(message_fabric *fabric, message_group *group)
{
    pthread_mutex_lock(&fabric->lock);
    fabric->channels++;
    if (group) {
        group->channel = fabric->channels;
        group->next = fabric->groups;
        fabric->groups = group;
    }
    pthread_mutex_unlock(&fabric->lock);
}

static void delist(message_fabric *fabric, const message_group *group)
{
    pthread_mutex_lock(&fabric->lock);
    message_group **at = &fabric->groups;
    while (*at && *at != group)
        at = &(*at)->next;
    if (*at)
        *at = group->next;
    pthread_mutex_unlock(&fabric->lock);
}

static fsdp_status make_group(message_fabric *fabric, new_group *made, fsdp_error *err)
{
    message_group *world = &fabric->world;
    uint64_t number = atomic_load(&world->calls) + 1;
    FSDP_TRY(fabric->wire->ops->may_call(fabric->wire, err));
    FSDP_TRY(prepare(fabric, made, err));
    fsdp_comm_header header = fsdp_comm_head_group(made->ranks, made->size, number);
    enlist(fabric, made->group);
    return fsdp_message_meet(world, &header, err);
}

static fsdp_status create_comm(fsdp_fabric *base, const int *ranks, int size, fsdp_comm **comm_out,
                               fsdp_error *err)
{
    message_fabric *fabric = (message_fabric *)base;
    message_group *world = &fabric->world;
    new_group made = {.ranks = ranks, .size = size};
    fsdp_error why = {.rank = base->rank};
    if (!fsdp_message_has_failed(world, &why)) {
        why.status = make_group(fabric, &made, &why);
        if (why.status == FSDP_OK) {
            *comm_out = made.comm;
            return FSDP_OK;
        }
        fsdp_message_fail(world, &why, true, false);
        if (made.group && made.group->channel > 0) /* others may have it already */
            fsdp_message_fail(made.group, &why, world->is_own, false);
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
        fsdp_message_depart(group);
    delist(group->fabric, group);
    release_group(group);
    fsdp_free(group);
    comm->backend = NULL;
}

/* --- the fabric ------------------------------------------------------------------------------- */

static void abort_comm(fsdp_comm *comm, const fsdp_error *why)
{
    fsdp_message_fail(comm->backend, why, true, false);
}

static bool has_comm_failed(fsdp_comm *comm, fsdp_error *err_out)
{
    return fsdp_message_has_failed(comm->backend, err_out);
}

static void free_fabric(message_fabric *fabric)
{
    for (int i = 0; fabric->lifelines && i < fabric->fabric.size; i++)
        fsdp_lifeline_close(&fabric->lifelines[i]);
    fsdp_free(fabric->lifelines);
    fsdp_free(fabric->world_ranks);
    pthread_mutex_destroy(&fabric->lock);
    fsdp_free(fabric);
}

static void close_fabric(fsdp_fabric *base)
{
    message_fabric *fabric = (message_fabric *)base;
    fsdp_wire *wire = fabric->wire;
    fsdp_message_depart(&fabric->world);
    release_group(&fabric->world);
    wire->ops->close(wire);
    free_fabric(fabric);
}

static const fsdp_fabric_ops message_ops = {
    .abilities = FSDP_COMM_AVG | FSDP_COMM_PREMUL_SUM,
    .comm_create = create_comm,
    .run = fsdp_message_run,
    .abort = abort_comm,
    .has_failed = has_comm_failed,
    .comm_close = close_comm,
    .close = close_fabric,
};

static fsdp_status make_fabric(int rank, int size, message_fabric **fabric_out, fsdp_error *err)
{
    message_fabric *fabric = fsdp_alloc(1, sizeof *fabric);
    if (!fabric || pthread_mutex_init(&fabric->lock, NULL) != 0) {
        fsdp_free(fabric);
        return fsdp_fail_memory(err, "a fabric");
    }
    fabric->fabric.rank = rank;
    fabric->fabric.size = size;
    fabric->world_ranks = fsdp_alloc((size_t)size, sizeof *fabric->world_ranks);
    fabric->lifelines = fsdp_alloc((size_t)size, sizeof *fabric->lifelines);
    for (int i = 0; fabric->lifelines && i < size; i++)
        fabric->lifelines[i].fd = -1;
    for (int i = 0; fabric->world_ranks && i < size; i++)
        fabric->world_ranks[i] = i;
    if (fabric->world_ranks && fabric->lifelines) {
        *fabric_out = fabric;
        return FSDP_OK;
    }
    free_fabric(fabric);
    return fsdp_fail_memory(err, "a fabric");
}

static fsdp_status connect_fabric(message_fabric *fabric, fsdp_wire *wire, int deadline_ms,
                                  fsdp_error *err)
{
    fabric->wire = wire;
    fabric->ops = message_ops;
    fabric->ops.name = wire->ops->name;
    fabric->fabric.ops = &fabric->ops;
    fabric->fabric.deadline_ms = deadline_ms;
    FSDP_TRY(init_group(&fabric->world, fabric, fabric->world_ranks, fabric->fabric.size,
                        fabric->fabric.rank, err));
    fabric->world.channel = fabric->channels = 1;
    return FSDP_OK;
}

fsdp_status fsdp_fabric_message(fsdp_ctl *ctl, fsdp_wire *wire, int deadline_ms,
                                fsdp_fabric **fabric_out, fsdp_error *err)
{
    message_fabric *fabric = NULL;
    fsdp_error why = {0};
    fsdp_status status = make_fabric(fsdp_ctl_rank(ctl), fsdp_ctl_size(ctl), &fabric, &why);
    if (status == FSDP_OK)
        status = connect_fabric(fabric, wire, deadline_ms, &why);
    bool is_connected = status == FSDP_OK;
    status = fsdp_ctl_agree(ctl, status, &why);
    if (status == FSDP_OK)
        status = fsdp_ctl_agree(ctl, fsdp_lifelines_open(ctl, fabric->lifelines, &why), &why);
    if (status == FSDP_OK) {
        *fabric_out = &fabric->fabric;
        return FSDP_OK;
    }
    if (is_connected)
        release_group(&fabric->world);
    if (fabric)
        free_fabric(fabric);
    wire->ops->close(wire);
    if (err)
        *err = why;
    return status;
}
