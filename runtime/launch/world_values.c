/*
 * Values that all ranks combine, the time that a rank needs, and its reason to fail, which go to the other
 * ranks. See world.h.
 */
#include "runtime/launch/world_internal.h"

#include <limits.h>
#include <math.h>
#include <string.h>

#include "base/core/clock.h"
#include "base/core/given.h"
#include "base/core/mem.h"
#include "runtime/launch/mpi_library.h"
#include "statedict/ctl/ctl_backend.h"

/* --- sums ------------------------------------------------------------------------------------- */

typedef double (*combine_values)(double a, double b);

static double add(double a, double b)
{
    return a + b;
}

static double larger(double a, double b)
{
    return isnan(a) || a > b ? a : b; /* NaN wins */
}

static fsdp_status make_room(const fsdp_world *world, const char *call, const double *values,
                             size_t count, double **all_out, fsdp_error *err)
{
    const size_t ranks = (size_t)world->size;
    if (!values && count > 0)
        return fsdp_fail(err, FSDP_ERR_USAGE, "%s: 'values' is NULL", call);
    if (count <= SIZE_MAX / sizeof(double) / ranks)
        *all_out = fsdp_alloc(count > 0 ? count * ranks : 1, sizeof **all_out);
    return *all_out ? FSDP_OK : fsdp_fail_memory(err, "the values of all ranks");
}

/* In rank order, so that the bits depend on no timing. */
static fsdp_status combine(fsdp_world *world, const char *call, double *values, size_t count,
                           combine_values how, fsdp_error *err)
{
    double *all = NULL;
    fsdp_ctl *ctl = world->parts.ctl;
    const char *outer = fsdp_ctl_begin_public(ctl, call);
    fsdp_status status = make_room(world, call, values, count, &all, err);
    status = fsdp_ctl_agree_allgather(ctl, status, values, count * sizeof *values, all, err);
    fsdp_ctl_end_public(ctl, outer);
    for (size_t i = 0; status == FSDP_OK && i < count; i++) {
        double result = all[i];
        for (int rank = 1; rank < world->size; rank++)
            result = how(result, all[(size_t)rank * count + i]);
        values[i] = result;
    }
    fsdp_free(all);
    return status;
}

fsdp_status fsdp_world_sum(fsdp_world *world, double *values, size_t count, fsdp_error *err)
{
    FSDP_NEED(err, world);
    return combine(world, "fsdp_world_sum", values, count, add, err);
}

fsdp_status fsdp_world_max(fsdp_world *world, double *values, size_t count, fsdp_error *err)
{
    FSDP_NEED(err, world);
    return combine(world, "fsdp_world_max", values, count, larger, err);
}

fsdp_status fsdp_world_mean(fsdp_world *world, double *value, fsdp_error *err)
{
    FSDP_NEED(err, world, value);
    FSDP_TRY(combine(world, "fsdp_world_mean", value, 1, add, err));
    *value /= world->size;
    return FSDP_OK;
}

/* --- time ------------------------------------------------------------------------------------- */

fsdp_status fsdp_world_set_deadline(fsdp_world *world, int milliseconds, fsdp_error *err)
{
    const fsdp_mpi_functions *mpi = NULL;
    FSDP_NEED(err, world);
    if (milliseconds < 1)
        return fsdp_fail(err, FSDP_ERR_USAGE, "cannot set a deadline of %d ms: the minimum is 1 ms",
                         milliseconds);
    if (strcmp(world->parts.ctl->ops->name, "mpi") == 0) {
        FSDP_TRY(fsdp_mpi_library_open(&mpi, err));
        mpi->set_deadline(milliseconds);
    }
    world->parts.deadline_ms = milliseconds;
    world->parts.transport->deadline_ms = milliseconds;
    fsdp_ctl_set_deadline(world->parts.ctl, milliseconds);
    return FSDP_OK;
}

static void set_busy(fsdp_world *world, int milliseconds)
{
    fsdp_transport *transport = world ? world->parts.transport : NULL;
    if (transport && transport->ops->set_busy)
        transport->ops->set_busy(transport, fsdp_now_ms() + milliseconds);
}

void fsdp_world_begin_busy(fsdp_world *world, int milliseconds)
{
    if (milliseconds > 0)
        set_busy(world, milliseconds);
}

void fsdp_world_end_busy(fsdp_world *world)
{
    set_busy(world, 0);
}

/* --- failures --------------------------------------------------------------------------------- */

void fsdp_world_note_failure(fsdp_world *world, const fsdp_error *why)
{
    bool is_own = why->status != FSDP_OK && why->status != FSDP_ERR_PEER;
    if (is_own && world->reason.status == FSDP_OK)
        world->reason = *why;
}

int fsdp_world_fail(fsdp_world *world, const fsdp_error *err)
{
    if (!err)
        return FSDP_OK;
    if (world && err->status != FSDP_OK) {
        world->reason = *err;
        world->is_reason_given = true;
    }
    return (int)err->status;
}
