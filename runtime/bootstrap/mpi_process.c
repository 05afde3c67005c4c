/* MPI as a resource of the process. See mpi_process.h. */
#include "runtime/bootstrap/mpi_process.h"

#include <fsdp/ctl_mpi.h>
#include <pthread.h>
#include <sched.h>
#include <time.h>

#include "base/core/clock.h"
#include "base/core/mem.h"

enum { SPINS = 200, YIELDS = 2000, NAP_US = 50, LONGEST_NAP_US = 1000 };

static struct {
    pthread_mutex_t lock;
    bool begun_here, is_broken;
    int thread_level; /* granted by MPI */
    int deadline_ms;  /* of the creation of a control plane; 0: the default */
    fsdp_mpi_deferred *deferred;
} process = {.lock = PTHREAD_MUTEX_INITIALIZER};

void fsdp_mpi_lock(void)
{
    pthread_mutex_lock(&process.lock);
}

void fsdp_mpi_unlock(void)
{
    pthread_mutex_unlock(&process.lock);
}

bool fsdp_mpi_may_call(void)
{
    int is_main = 0;
    if (process.thread_level >= MPI_THREAD_SERIALIZED)
        return true;
    return MPI_Is_thread_main(&is_main) == MPI_SUCCESS && is_main;
}

bool fsdp_mpi_allows_threads(void)
{
    return process.thread_level >= MPI_THREAD_SERIALIZED;
}

void fsdp_mpi_mark_broken(void)
{
    process.is_broken = true;
}

fsdp_status fsdp_mpi_fail(fsdp_error *err, int code, const char *what)
{
    char text[MPI_MAX_ERROR_STRING] = "unknown error";
    int length = 0;
    (void)MPI_Error_string(code, text, &length);
    return fsdp_fail(err, FSDP_ERR_PEER, "%s: %s", what, text);
}

/* --- waiting ---------------------------------------------------------------------------------- */

bool fsdp_mpi_keep_waiting(int tests, int64_t until_ms)
{
    if (tests < SPINS)
        return true;
    if (fsdp_now_ms() >= until_ms)
        return false;
    if (tests < YIELDS) {
        sched_yield();
        return true;
    }
    int nap_us =
        tests - YIELDS < LONGEST_NAP_US - NAP_US ? NAP_US + tests - YIELDS : LONGEST_NAP_US;
    nanosleep(&(struct timespec){.tv_nsec = nap_us * 1000L}, NULL);
    return true;
}

/* --- deferred memory -------------------------------------------------------------------------- */

void fsdp_mpi_defer(fsdp_mpi_deferred *deferred)
{
    deferred->next = process.deferred;
    process.deferred = deferred;
}

static bool is_done(const fsdp_mpi_deferred *deferred)
{
    bool all = true;
    for (int i = 0; i < deferred->count; i++) {
        int done = 0;
        all &= MPI_Test(&deferred->requests[i], &done, MPI_STATUS_IGNORE) == MPI_SUCCESS && done;
    }
    return all;
}

void fsdp_mpi_reclaim(void)
{
    for (fsdp_mpi_deferred **at = &process.deferred; *at;) {
        fsdp_mpi_deferred *old = *at;
        if (!is_done(old)) {
            at = &old->next;
            continue;
        }
        void *memory[] = {old->memory[0], old->memory[1], old->memory[2]};
        *at = old->next;
        for (int i = 0; i < 3; i++)
            fsdp_free(memory[i]);
    }
}

/* --- the beginning ---------------------------------------------------------------------------- */

/* A program that called MPI_Init itself is responsible for its thread level; here more was
 * requested. */
static fsdp_status check_threads(fsdp_error *err)
{
    if (!process.begun_here || process.thread_level >= MPI_THREAD_FUNNELED)
        return FSDP_OK;
    return fsdp_fail(
        err, FSDP_ERR_USAGE,
        "cannot use this MPI: it allows no threads other than the one that calls it (level %d), "
        "but saving and loading use threads; use an MPI that gives MPI_THREAD_FUNNELED",
        process.thread_level);
}

fsdp_status fsdp_mpi_begin(fsdp_error *err)
{
    int begun = 0, ended = 0;
    int code = MPI_Initialized(&begun);
    if (code == MPI_SUCCESS)
        code = MPI_Finalized(&ended);
    if (code != MPI_SUCCESS)
        return fsdp_mpi_fail(err, code, "MPI_Initialized");
    if (ended)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "cannot initialise MPI again: it has ended in this process");
    if (begun && !process.begun_here)
        (void)MPI_Query_thread(&process.thread_level);
    if (begun)
        return check_threads(err);
    code = MPI_Init_thread(NULL, NULL, MPI_THREAD_SERIALIZED, &process.thread_level);
    if (code != MPI_SUCCESS)
        return fsdp_mpi_fail(err, code, "MPI_Init_thread");
    process.begun_here = true;
    return check_threads(err);
}

void fsdp_ctl_mpi_set_deadline(int milliseconds)
{
    process.deadline_ms = milliseconds;
}

bool fsdp_mpi_finalize(void)
{
    int begun = 0, ended = 0;
    if (MPI_Initialized(&begun) != MPI_SUCCESS || MPI_Finalized(&ended) != MPI_SUCCESS)
        return false;
    if (!process.begun_here || !begun || ended)
        return !process.is_broken;
    return !process.is_broken && MPI_Finalize() == MPI_SUCCESS;
}

/* --- duplicates ------------------------------------------------------------------------------- */

static fsdp_status await_duplicate(MPI_Request *request, bool *pending_out, fsdp_error *err)
{
    int deadline_ms = process.deadline_ms > 0 ? process.deadline_ms : FSDP_CTL_DEADLINE_MS;
    int64_t until_ms = fsdp_now_ms() + deadline_ms;
    int done = 0;
    for (int tests = 0; !done; tests++) {
        fsdp_mpi_lock();
        int code = MPI_Test(request, &done, MPI_STATUS_IGNORE);
        fsdp_mpi_unlock();
        if (code != MPI_SUCCESS)
            return fsdp_mpi_fail(err, code, "MPI_Test");
        if (!done && !fsdp_mpi_keep_waiting(tests, until_ms)) {
            *pending_out = true;
            return fsdp_fail(err, FSDP_ERR_PEER,
                             "not all ranks connected over MPI within %g s: a rank is gone or "
                             "stuck; no connection was begun",
                             deadline_ms / 1000.0);
        }
    }
    return FSDP_OK;
}

/* The caller's error handler usually ends the process. Until the duplicate has its own handler,
 * errors are returned. */
static fsdp_status duplicate_gently(MPI_Comm comm, MPI_Comm *comm_out, bool *pending_out,
                                    fsdp_error *err)
{
    MPI_Request request = MPI_REQUEST_NULL;
    MPI_Errhandler handler;
    int code = MPI_Comm_get_errhandler(comm, &handler);
    if (code != MPI_SUCCESS)
        return fsdp_mpi_fail(err, code, "MPI_Comm_get_errhandler");
    const char *what = "MPI_Comm_set_errhandler";
    code = MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN);
    if (code == MPI_SUCCESS) {
        what = "MPI_Comm_idup";
        fsdp_mpi_lock();
        code = MPI_Comm_idup(comm, comm_out, &request);
        fsdp_mpi_unlock();
    }
    fsdp_status status = code == MPI_SUCCESS ? await_duplicate(&request, pending_out, err)
                                             : fsdp_mpi_fail(err, code, what);
    (void)MPI_Comm_set_errhandler(comm, handler);
    (void)MPI_Errhandler_free(&handler);
    return status;
}

fsdp_status fsdp_mpi_duplicate(MPI_Comm comm, MPI_Comm *comm_out, bool *pending_out,
                               fsdp_error *err)
{
    *pending_out = false;
    FSDP_TRY(duplicate_gently(comm, comm_out, pending_out, err));
    int code = MPI_Comm_set_errhandler(*comm_out, MPI_ERRORS_RETURN);
    return code == MPI_SUCCESS ? FSDP_OK : fsdp_mpi_fail(err, code, "MPI_Comm_set_errhandler");
}
