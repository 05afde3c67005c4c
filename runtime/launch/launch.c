/* fsdp_launch: one program, every way to run it. See launch.h; the map is in launch_internal.h. */
#include "runtime/launch/launch_internal.h"
#include "base/core/clock.h"
#include "base/core/given.h"
#include "runtime/bootstrap/rendezvous.h"
#include "runtime/bootstrap/torchrun_store.h"
#include "runtime/launch/mpi_library.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* === ranks of another launcher ================================================================ */

/* Connects ranks that another launcher started: finds the host and port of the rendezvous. */

enum { NAME_SIZE = FSDP_JOB_SIZE + 32 };

/* The context of the rendezvous' callbacks. */
typedef struct address {
    const fsdp_place *place;
    bool is_one_host;
    char name[NAME_SIZE]; /* in torchrun's store */
} address;

static const char *host_of(const address *to)
{
    return to->is_one_host ? FSDP_LOOPBACK : to->place->host;
}

static fsdp_status find_known(void *context, char host_out[FSDP_HOST_SIZE], int *port_out,
                              int64_t until_ms, fsdp_error *err)
{
    const address *to = context;
    (void)until_ms;
    (void)err;
    snprintf(host_out, FSDP_HOST_SIZE, "%s", host_of(to));
    *port_out = to->place->port;
    return FSDP_OK;
}

static fsdp_status publish_in_store(void *context, int port, int64_t until_ms, fsdp_error *err)
{
    const address *to = context;
    char value[16];
    snprintf(value, sizeof value, "%d", port);
    return fsdp_store_set(to->place->host, to->place->port, to->name, value, until_ms, err);
}

static fsdp_status find_in_store(void *context, char host_out[FSDP_HOST_SIZE], int *port_out,
                                 int64_t until_ms, fsdp_error *err)
{
    const address *to = context;
    char value[FSDP_STORE_VALUE];
    snprintf(host_out, FSDP_HOST_SIZE, "%s", host_of(to));
    FSDP_TRY(fsdp_store_get(to->place->host, to->place->port, to->name, value, until_ms, err));
    if (fsdp_parse_int(value, 1, 65535, port_out))
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_DAMAGED, "torchrun's store does not name a port: '%.32s'",
                     value);
}

static fsdp_rendezvous_spec spec_of(const address *to, int deadline_ms)
{
    const fsdp_place *place = to->place;
    return (fsdp_rendezvous_spec){.rank = place->rank,
                                  .size = place->size,
                                  .job = place->job,
                                  .is_one_host = to->is_one_host,
                                  .deadline_ms = deadline_ms,
                                  .listener = -1,
                                  .port = place->has_store ? 0 : place->port,
                                  .publish = place->has_store ? publish_in_store : NULL,
                                  .find = place->has_store ? find_in_store : find_known,
                                  .context = (void *)to};
}

/* Connects ranks that torchrun, srun or FSDP_* started. */
static fsdp_status launch_connect(const fsdp_place *place, int deadline_ms, fsdp_ctl **ctl_out,
                                  fsdp_error *err)
{
    address to = {.place = place};
    to.is_one_host = place->local_size == place->size || fsdp_host_is_loopback(place->host);
    snprintf(to.name, sizeof to.name, "fsdp/%s", place->job);
    fsdp_rendezvous_spec spec = spec_of(&to, deadline_ms);
    fsdp_status status = fsdp_rendezvous(&spec, ctl_out, err);
    /* a restarted job must not find the old port; if it does, it tries again */
    if (status == FSDP_OK && place->has_store && place->rank == 0) {
        fsdp_error ignored = {0};
        (void)!fsdp_store_delete(place->host, place->port, to.name, fsdp_now_ms() + deadline_ms,
                                 &ignored);
    }
    return status;
}

/* === deciding and running ===================================================================== */

/* --- deciding --------------------------------------------------------------------------------- */

static bool starts_ranks(const fsdp_launch_options *options)
{
    return options->np > 0 || options->threads > 0;
}

/* The option or variable that set the count: "--np", "FSDP_THREADS". */
static const char *count_name(const fsdp_launch_options *options)
{
    return options->np > 0 ? options->np_name : options->threads_name;
}

static fsdp_status fail_conflict(const fsdp_launch_options *options, const char *what,
                                 fsdp_error *err)
{
    return fsdp_fail(err, FSDP_ERR_USAGE, "%s %s contradicts %s", options->comm_name,
                     fsdp_comm_choice_name(options->comm), what);
}

/* Ranks of one host that this process starts. */
static fsdp_status decide_here(const fsdp_launch_options *options, const fsdp_place *place,
                               fsdp_launch_mode *mode_out, fsdp_error *err)
{
    const bool is_np = options->np > 0;
    const char *name = count_name(options);
    int n = is_np ? options->np : options->threads;
    fsdp_comm_choice fitting = is_np ? FSDP_COMM_SHM : FSDP_COMM_THREADS;
    if (place->launcher != FSDP_LAUNCHED_BARE && place->size != 1)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "%s contradicts %s: it has started all ranks, and this process is rank %d",
                         name, fsdp_launcher_name(place->launcher), place->rank);
    if (options->comm != FSDP_COMM_AUTO && options->comm != FSDP_COMM_NCCL &&
        options->comm != fitting && !(options->comm == FSDP_COMM_SELF && n == 1) &&
        !(options->comm == FSDP_COMM_TCP && is_np))
        return fail_conflict(options, name, err);
    *mode_out = is_np ? FSDP_MODE_PROCESSES : FSDP_MODE_THREADS;
    return FSDP_OK;
}

static fsdp_status decide_started(const fsdp_launch_options *options, const fsdp_place *place,
                                  fsdp_launch_mode *mode_out, fsdp_error *err)
{
    const bool is_mpi = place->is_mpi, is_bare = place->launcher == FSDP_LAUNCHED_BARE;
    if (is_mpi || (is_bare && options->comm == FSDP_COMM_MPI))
        *mode_out = FSDP_MODE_MPI;
    else
        *mode_out = place->size > 1 ? FSDP_MODE_TCP : FSDP_MODE_SELF;
    bool fits = options->comm == FSDP_COMM_AUTO || place->size == 1 ||
                options->comm == (is_mpi ? FSDP_COMM_MPI : FSDP_COMM_TCP) ||
                options->comm == FSDP_COMM_SHM || options->comm == FSDP_COMM_NCCL;
    if (fits && !(options->comm == FSDP_COMM_MPI && *mode_out != FSDP_MODE_MPI))
        return FSDP_OK;
    return fail_conflict(options, fsdp_launcher_name(place->launcher), err);
}

static fsdp_status check_trace(const fsdp_launch_options *options, const fsdp_place *place,
                               fsdp_error *err)
{
    bool is_one = options->np <= 1 && options->threads <= 1 && place->size == 1;
    if (!options->trace || is_one || strstr(options->trace, "%r"))
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_USAGE,
                     "--trace '%s': each rank needs a separate file; put %%r into the name for "
                     "the number of the rank",
                     options->trace);
}

fsdp_status fsdp_launch_decide(const fsdp_launch_options *options, const fsdp_place *place,
                               fsdp_launch_mode *mode_out, fsdp_error *err)
{
    FSDP_TRY(check_trace(options, place, err));
    if (starts_ranks(options))
        return decide_here(options, place, mode_out, err);
    return decide_started(options, place, mode_out, err);
}

/* --- running ---------------------------------------------------------------------------------- */

static int run_self(const fsdp_launch_job *job)
{
    fsdp_error err = {0};
    fsdp_ctl *ctl = NULL;
    if (fsdp_ctl_self(&ctl, &err) != FSDP_OK)
        return fsdp_error_report(&err);
    return fsdp_launch_rank(job, ctl, NULL);
}

static int run_started(const fsdp_launch_job *job, const fsdp_place *place)
{
    fsdp_error err = {0}, ignored = {0};
    fsdp_ctl *ctl = NULL;
    /* best effort: the descriptors needed are not known before the rendezvous; a lack is an error
     * later */
    (void)!fsdp_launch_have_files("", place->size, FSDP_COMM_TCP, &ignored);
    if (launch_connect(place, job->options->deadline_ms, &ctl, &err) != FSDP_OK) {
        fsdp_error_prefix(&err, "rank %d of %d, started by %s", place->rank, place->size,
                          fsdp_launcher_name(place->launcher));
        return fsdp_error_report(&err);
    }
    return fsdp_launch_rank(job, ctl, NULL);
}

static int run_mpi_rank(const fsdp_launch_job *job, const fsdp_place *place, fsdp_ctl *ctl)
{
    fsdp_error err = {0};
    if (fsdp_launch_check_mpi(place, fsdp_ctl_rank(ctl), fsdp_ctl_size(ctl), &err) == FSDP_OK)
        return fsdp_launch_rank(job, ctl, NULL);
    fsdp_ctl_free(ctl);
    return fsdp_error_report(&err);
}

/*
 * A rank that failed exits without MPI_Finalize, which would wait for the others while they wait
 * for this rank; mpirun then ends them and returns this rank's exit code.
 */
static int run_mpi(const fsdp_launch_job *job, const fsdp_place *place)
{
    fsdp_error err = {0};
    fsdp_ctl *ctl = NULL;
    const fsdp_mpi_functions *mpi = NULL;
    if (fsdp_mpi_library_open(&mpi, &err) != FSDP_OK)
        return fsdp_error_report(&err);
    mpi->set_deadline(job->options->deadline_ms);
    int code = mpi->ctl_world(&ctl, &err) == FSDP_OK ? run_mpi_rank(job, place, ctl)
                                                     : fsdp_error_report(&err);
    if (code == 0 && mpi->finalize())
        return 0;
    fflush(NULL);
    _exit(code != 0 ? code : FSDP_ERR_PEER);
}

static int run(const fsdp_launch_job *job, const fsdp_place *place, fsdp_launch_mode mode)
{
    switch (mode) {
    case FSDP_MODE_SELF: return run_self(job);
    case FSDP_MODE_PROCESSES: return fsdp_launch_processes(job);
    case FSDP_MODE_THREADS: return fsdp_launch_threads(job);
    case FSDP_MODE_TCP: return run_started(job, place);
    case FSDP_MODE_MPI: return run_mpi(job, place);
    }
    return FSDP_ERR_INTERNAL;
}

static const char *get_variable(void *context, const char *name)
{
    (void)context;
    return getenv(name);
}

/* When the options start the ranks, an incomplete set of variables is ignored, a complete one is
 * not. */
static fsdp_status find_place(const fsdp_launch_options *options, fsdp_place *place_out,
                              fsdp_error *err)
{
    fsdp_status status = fsdp_launch_detect(get_variable, NULL, place_out, err);
    if (status == FSDP_OK || !starts_ranks(options))
        return status;
    *place_out = (fsdp_place){.size = 1, .local_size = -1};
    return FSDP_OK;
}

/* True when something else than the command line chose how the ranks run. */
static bool is_found(const fsdp_launch_options *options, const fsdp_place *place)
{
    return starts_ranks(options) ? count_name(options)[0] != '-'
                                 : place->launcher != FSDP_LAUNCHED_BARE;
}

static void report_choice(const fsdp_launch_options *options, const fsdp_place *place)
{
    bool reports = options->is_verbose || (is_found(options, place) && !options->is_quiet);
    if (!reports || place->rank != 0)
        return;
    if (options->np > 0)
        fprintf(stderr, "fsdp: %d ranks as processes, by %s\n", options->np, options->np_name);
    else if (options->threads > 0)
        fprintf(stderr, "fsdp: %d ranks as threads, by %s\n", options->threads,
                options->threads_name);
    else if (place->size > 0)
        fprintf(stderr, "fsdp: rank %d of %d, started by %s\n", place->rank, place->size,
                fsdp_launcher_name(place->launcher));
    else
        fprintf(stderr, "fsdp: rank %d, started by %s\n", place->rank,
                fsdp_launcher_name(place->launcher));
}

void fsdp_launch_note(int rank, const char *finding, const char *names)
{
    fprintf(stderr, "fsdp: rank %d, --check: %s: %s\n", rank, finding, names);
}

int fsdp_launch(int argc, char **argv, fsdp_rank_main body, void *context)
{
    fsdp_error err = {0};
    fsdp_launch_options options;
    fsdp_launch_mode mode = FSDP_MODE_SELF;
    fsdp_place place = {.size = 1};
    if (FSDP_GIVEN(&err, argv) != FSDP_OK || FSDP_GIVEN_CALL(&err, body) != FSDP_OK)
        return fsdp_error_report(&err);
    if (fsdp_launch_options_read(argc, argv, get_variable, NULL, &options, &err) != FSDP_OK)
        return fsdp_error_report(&err);
    fsdp_status status = find_place(&options, &place, &err);
    if (status == FSDP_OK)
        status = fsdp_launch_decide(&options, &place, &mode, &err);
    int code;
    if (status == FSDP_OK) {
        const fsdp_launch_job job = {.options = &options, .body = body, .context = context};
        report_choice(&options, &place);
        code = run(&job, &place, mode);
    } else {
        code = fsdp_error_report(&err);
    }
    fsdp_launch_options_release(&options);
    return code;
}
