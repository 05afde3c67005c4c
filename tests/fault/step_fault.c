/* See step_fault.h. */
#include "tests/fault/step_fault.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/core/mem.h"
#include "tests/support/nets/toy_mlp.h"

enum { LAYERS = 2, SHORT_MS = 600, MOST_AWAY_MS = 30000 };

const char *const step_fault_names[STEP_FAULT_KINDS] = {"none",     "killed", "stopped", "late",
                                                        "gives up", "order",  "shape",   "swapped",
                                                        "gradient", "memory"};

/* --- a transport with a fault ----------------------------------------------------------------- */

/* In place of the transport's table, which it begins with. */
typedef struct faulty_transport {
    fsdp_transport_ops ops;
    const fsdp_transport_ops *usual;
    const step_fault *fault;
    _Atomic int calls, blocks; /* of the communicator's memory: not given back */
} faulty_transport;

static faulty_transport *faulty(const fsdp_transport *transport)
{
    return (faulty_transport *)transport->ops;
}

static void sleep_ms(int ms)
{
    nanosleep(&(struct timespec){.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000L}, NULL);
}

/* Until the others have given up, however slow they are. */
static void stay_away(fsdp_comm *comm)
{
    fsdp_error why;
    for (int ms = 0; ms < MOST_AWAY_MS && !faulty(comm->transport)->usual->has_failed(comm, &why);
         ms += 20)
        sleep_ms(20);
}

/* Stops this process; a child, which has the same shared memory, continues it. */
static void stop_for_a_while(fsdp_comm *comm)
{
    pid_t me = getpid();
    (void)signal(SIGCHLD, SIG_IGN);
    if (fork() == 0) {
        stay_away(comm);
        (void)kill(me, SIGCONT);
        _exit(0);
    }
    raise(SIGSTOP);
}

/* Another call in place of this one; what it would do never matters. */
static fsdp_status run_other(fsdp_comm *comm, const fsdp_collective *call, fsdp_error *err)
{
    const faulty_transport *transport = faulty(comm->transport);
    fsdp_collective other = *call;
    size_t bytes = (size_t)(call->count + 1) * (size_t)comm->size * sizeof(double);
    char *room = calloc(2, bytes);
    other.count++;
    if (transport->fault->kind == STEP_FAULT_ORDER) {
        other.unit = "other";
        other.kind = call->kind == FSDP_ALL_GATHER ? FSDP_REDUCE_SCATTER : FSDP_ALL_GATHER;
    }
    other.in = room;
    other.out = room + bytes;
    fsdp_comm_header header = fsdp_comm_head(comm, &other);
    fsdp_status status = transport->usual->run(comm, &other, &header, err);
    free(room);
    return status;
}

static void note_call(step_calls *calls, int number, const char *unit)
{
    if (number >= STEP_FAULT_CALLS) /* several streams call at once */
        return;
    snprintf(calls->units[number], sizeof calls->units[number], "%s", unit ? unit : "");
    atomic_fetch_add(&calls->count, 1);
}

static fsdp_status run_faulty(fsdp_comm *comm, const fsdp_collective *call,
                              const fsdp_comm_header *header, fsdp_error *err)
{
    faulty_transport *transport = faulty(comm->transport);
    const step_fault *fault = transport->fault;
    int number = atomic_fetch_add(&transport->calls, 1);
    bool is_now = number == fault->at;
    if (fault->kind == STEP_FAULT_NONE && (comm->transport->rank == 0 || fault->is_launched))
        note_call(fault->calls, number, call->unit);
    if (is_now && comm->transport->rank == fault->rank)
        switch (fault->kind) {
        case STEP_FAULT_KILLED: raise(SIGKILL); break;
        case STEP_FAULT_STOPPED: stop_for_a_while(comm); break;
        case STEP_FAULT_LATE: stay_away(comm); break;
        case STEP_FAULT_GIVES_UP:
            return fsdp_fail(err, FSDP_ERR_IO, "the disk of rank %d is full", fault->rank);
        case STEP_FAULT_ORDER:
        case STEP_FAULT_SHAPE: return run_other(comm, call, err);
        default: break;
        }
    return transport->usual->run(comm, call, header, err);
}

static void *take(fsdp_transport *transport, size_t size)
{
    void *data = faulty(transport)->usual->alloc(transport, size);
    atomic_fetch_add(&faulty(transport)->blocks, data != NULL);
    return data;
}

static void give(fsdp_transport *transport, void *data)
{
    atomic_fetch_sub(&faulty(transport)->blocks, 1);
    faulty(transport)->usual->dealloc(transport, data);
}

static bool is_slow(const step_fault *fault)
{
    return fault->kind == STEP_FAULT_STOPPED || fault->kind == STEP_FAULT_LATE;
}

/* Only collectives have a short deadline, and only where nothing else finds the fault. */
static void make_faulty(faulty_transport *own, fsdp_transport *transport, const step_fault *fault)
{
    *own = (faulty_transport){.ops = *transport->ops, .usual = transport->ops, .fault = fault};
    own->ops.run = run_faulty;
    if (own->ops.alloc) {
        own->ops.alloc = take;
        own->ops.dealloc = give;
    }
    transport->ops = &own->ops;
    if (is_slow(fault))
        transport->deadline_ms = SHORT_MS;
}

/* --- a device that counts --------------------------------------------------------------------- */

/* Memory is taken and given back by the rank's own thread. */
static _Thread_local int64_t bytes_left;
static _Thread_local const fsdp_device_ops *usual_device;

static void *take_of_device(fsdp_device *device, size_t size)
{
    void *data = usual_device->alloc(device, size);
    bytes_left += data ? (int64_t)size : 0;
    return data;
}

static void give_to_device(fsdp_device *device, void *data, size_t size)
{
    bytes_left -= (int64_t)size;
    usual_device->dealloc(device, data, size);
}

static void count_on(fsdp_device_ops *own, fsdp_device *device)
{
    bytes_left = 0;
    usual_device = device->ops;
    *own = *device->ops;
    own->alloc = take_of_device;
    own->dealloc = give_to_device;
    device->ops = own;
}

/* --- the step --------------------------------------------------------------------------------- */

static mlp_plan plan_of(const step_fault *fault, int64_t ranks)
{
    mlp_plan plan = mlp_plan_default(LAYERS, ranks);
    if (fault->has_replicas) {
        plan.mesh_ndim = 2;
        plan.mesh_shape[0] = 2;
        plan.mesh_shape[1] = ranks / 2;
        plan.mesh_names[0] = "rep";
        plan.mesh_names[1] = "dp";
    }
    return plan;
}

static bool has_fault(const step_fault *fault, const toy *net, step_fault_kind kind)
{
    return fault->kind == kind && fault->rank == fsdp_world_rank(net->model->world);
}

static int unit_at(const step_fault *fault, const toy *net, int i, int pass)
{
    bool is_swapped = has_fault(fault, net, STEP_FAULT_SWAPPED) && fault->at == pass;
    return is_swapped ? LAYERS - 1 - i : i;
}

static fsdp_status give_ones(fsdp_param *param, float factor, fsdp_error *err)
{
    float *grad = fsdp_param_grad(param);
    if (!grad) { /* the reason is the error of the next call */
        FSDP_TRY(fsdp_unit_post_backward(param->unit, err));
        return fsdp_fail(err, FSDP_ERR_INTERNAL, "no gradient, and no reason");
    }
    for (int64_t i = 0; i < fsdp_param_count(param); i++)
        grad[i] = factor;
    return FSDP_OK;
}

static fsdp_status forward(toy *net, const step_fault *fault, fsdp_error *err)
{
    FSDP_TRY(fsdp_root_begin_forward(net->root, err));
    for (int i = 0; i < LAYERS; i++) {
        fsdp_unit *unit = net->unit[unit_at(fault, net, i, 0)];
        FSDP_TRY(fsdp_unit_pre_forward(unit, err));
        FSDP_TRY(fsdp_unit_post_forward(unit, err));
    }
    return fsdp_root_end_forward(net->root, err);
}

static fsdp_status backward(toy *net, const step_fault *fault, fsdp_error *err)
{
    float factor = (float)(fsdp_world_rank(net->model->world) + 1);
    for (int i = LAYERS - 1; i >= 0; i--) {
        int which = unit_at(fault, net, i, 1);
        FSDP_TRY(fsdp_unit_pre_backward(net->unit[which], err));
        FSDP_TRY(give_ones(net->weight[which], factor, err));
        if (!has_fault(fault, net, STEP_FAULT_GRADIENT) || which != LAYERS - 1)
            FSDP_TRY(give_ones(net->bias[which], factor, err));
        FSDP_TRY(fsdp_unit_post_backward(net->unit[which], err));
    }
    return fsdp_root_end_backward(net->root, err);
}

/* A step that succeeds has the right numbers. */
static fsdp_status check_grads(toy *net, fsdp_error *err)
{
    mlp_values expected;
    float mean = (float)(fsdp_world_size(net->model->world) + 1) / 2;
    for (size_t i = 0; i < sizeof expected / sizeof(float); i++)
        ((float *)&expected)[i] = mean;
    return mlp_expect_grads(net, &expected, 0, err);
}

static fsdp_status run_step(toy *net, const step_fault *fault, fsdp_error *err)
{
    FSDP_TRY(mlp_add_adamw(net, err));
    for (int i = 0; i < LAYERS; i++)
        FSDP_TRY(fsdp_unit_set(net->unit[i], FSDP_UNIT_ALLOCATE_MEMORY_FROM_PROCESS_GROUP,
                               fault->from_comm, false, err));
    FSDP_TRY(forward(net, fault, err));
    FSDP_TRY(backward(net, fault, err));
    FSDP_TRY(check_grads(net, err));
    return fsdp_optim_step(net->optim, err);
}

/* The first failure is that of every later call. */
static fsdp_status expect_to_stay(toy *net, const fsdp_error *first, fsdp_error *err)
{
    fsdp_error again = {0};
    if (!net->root || net->root->failure.status == FSDP_OK)
        return FSDP_OK;
    if (fsdp_root_begin_forward(net->root, &again) == first->status &&
        strcmp(again.text, first->text) == 0)
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_INTERNAL, "after '%.200s' came '%.200s'", first->text,
                     again.text);
}

/* --- a rank ----------------------------------------------------------------------------------- */

static void begin_memory(const step_fault *fault, int rank)
{
    if (fault->kind == STEP_FAULT_MEMORY && rank == fault->rank)
        (void)fsdp_mem_fail_after(fault->at, false);
    else if (fault->kind == STEP_FAULT_NONE && rank == 0)
        (void)fsdp_mem_fail_after(-1, false);
}

static void end_memory(const step_fault *fault, int rank)
{
    if (fault->kind == STEP_FAULT_MEMORY && rank == fault->rank)
        (void)fsdp_mem_fail_after(-1, false);
    else if (fault->kind == STEP_FAULT_NONE && rank == 0)
        fault->calls->allocations = fsdp_mem_fail_after(-1, false);
}

static fsdp_status run_rank(world_rank *rank, const step_fault *fault, fsdp_error *err)
{
    const mlp_plan plan = plan_of(fault, fsdp_world_size(rank->world));
    toy net = {0};
    fsdp_error left = {0};
    int me = fsdp_world_rank(rank->world);
    begin_memory(fault, me);
    fsdp_status status = mlp_create(&net, rank->world, &plan, err);
    if (status == FSDP_OK)
        status = run_step(&net, fault, err);
    end_memory(fault, me);
    err->status = status;
    if (status != FSDP_OK && expect_to_stay(&net, err, &left) != FSDP_OK) {
        *err = left;
        status = left.status;
    }
    toy_free(&net);
    return status;
}

fsdp_status step_fault_body(world_rank *rank, fsdp_error *err)
{
    const step_fault *fault = rank->user;
    fsdp_transport *transport = rank->world->parts.transport;
    fsdp_device *device = rank->world->parts.device;
    faulty_transport own_transport;
    fsdp_device_ops own_device;
    make_faulty(&own_transport, transport, fault);
    count_on(&own_device, device);
    if (rank->world->parts.trace)
        fsdp_trace_set_listener(rank->world->parts.trace, NULL, NULL);
    fsdp_status status = run_rank(rank, fault, err);
    device->ops = usual_device;
    transport->ops = own_transport.usual;
    if (bytes_left != 0 || own_transport.blocks != 0)
        return fsdp_fail(err, FSDP_ERR_INTERNAL, "%lld bytes and %d blocks are left",
                         (long long)bytes_left, own_transport.blocks);
    return status;
}

/* --- expected results ------------------------------------------------------------------------- */

static bool fail_with(fsdp_text *why, const char *what, const fsdp_error *err)
{
    fsdp_text_addf(why, "%s: status %d, '%s'", what, (int)err->status, err->text);
    return false;
}

static bool names_rank(const fsdp_error *err, int rank)
{
    char name[16];
    snprintf(name, sizeof name, "rank %d", rank);
    return strstr(err->text, name) != NULL || err->rank == rank;
}

/* Groups of one dim: all wait in the same call. Else another call may find it first. */
static bool names_unit(const step_fault *fault, const fsdp_error *err)
{
    char name[32];
    if (fault->has_replicas)
        return strstr(err->text, " for ") != NULL;
    snprintf(name, sizeof name, " for %s", fault->calls->units[fault->at]);
    return strstr(err->text, name) != NULL;
}

static fsdp_status wanted_status(step_fault_kind kind)
{
    switch (kind) {
    case STEP_FAULT_NONE: return FSDP_OK;
    case STEP_FAULT_GIVES_UP: return FSDP_ERR_IO;
    case STEP_FAULT_MEMORY: return FSDP_ERR_LIMIT;
    case STEP_FAULT_ORDER:
    case STEP_FAULT_SHAPE:
    case STEP_FAULT_SWAPPED:
    case STEP_FAULT_GRADIENT: return FSDP_ERR_USAGE;
    default: return FSDP_ERR_PEER;
    }
}

/* Success, or the reason everywhere. A rank whose local call
 * fails leaves, and the others only see that. */
static bool judge_memory(const step_fault *fault, int rank, fsdp_status status,
                         const fsdp_error *err, fsdp_text *why)
{
    bool is_told = strstr(err->text, "cannot allocate") || strstr(err->text, "out of memory");
    bool is_seen = rank != fault->rank && status == FSDP_ERR_PEER && strstr(err->text, "has left");
    if (status == FSDP_OK)
        return true;
    if (!is_told && !is_seen)
        return fail_with(why, "no word of memory", err);
    return rank == fault->rank || names_rank(err, fault->rank) ||
           fail_with(why, "another rank", err);
}

/* With replicas a rank may wait for one that itself waits for the one that does not come, and
 * name that one, when both have waited as long as they may. */
static bool names_one_who_waits(const step_fault *fault, int rank, const fsdp_error *err)
{
    bool names_any = false;
    for (int other = 0; other < 4; other++) /* of 2 x 2 */
        names_any = names_any || (other != rank && names_rank(err, other));
    return is_slow(fault) && fault->has_replicas && names_any;
}

bool step_fault_judge(const step_fault *fault, int rank, fsdp_status status, const fsdp_error *err,
                      fsdp_text *why)
{
    bool is_callers = fault->kind == STEP_FAULT_SWAPPED || fault->kind == STEP_FAULT_GRADIENT;
    if (fault->kind == STEP_FAULT_MEMORY)
        return judge_memory(fault, rank, status, err, why);
    /* the last calls may be none of this rank's business */
    bool is_late = fault->has_replicas && fault->at >= fault->calls->count / 2;
    if (status == FSDP_OK && is_late && rank != fault->rank)
        return true;
    /* a rank that comes late to the last call may find all there, and has had its gradients checked */
    bool is_last = is_late || fault->at == fault->calls->count - 1;
    if (status == FSDP_OK && is_last && is_slow(fault))
        return true;
    if (status != wanted_status(fault->kind))
        return fail_with(why, "another status", err);
    if (status == FSDP_OK)
        return true;
    if (rank != fault->rank && !names_rank(err, fault->rank) &&
        !names_one_who_waits(fault, rank, err))
        return fail_with(why, "the rank is not named", err);
    if (status == FSDP_ERR_PEER && strncmp(err->text, "fsdp_", strlen("fsdp_")) != 0)
        return fail_with(why, "the public call is not named", err);
    if (fault->kind == STEP_FAULT_GIVES_UP)
        return strstr(err->text, "is full") || fail_with(why, "another reason", err);
    if (is_callers)
        return strstr(err->text, " L1") || fail_with(why, "the unit is not named", err);
    if (rank != fault->rank && !names_unit(fault, err))
        return fail_with(why, "the unit is not named", err);
    return true;
}

void step_fault_describe(const step_fault *fault, int ranks, const char *device, char *out,
                         size_t out_size)
{
    snprintf(out, out_size, "rank %d of %d %s at %d, on %s%s%s", fault->rank, ranks,
             step_fault_names[fault->kind], fault->at, device,
             fault->has_replicas ? ", replicas" : "", fault->from_comm ? ", pool" : "");
}
