/*
 * fsdp_launch: one program, every way to run it: its options, the launcher that started this process, and the
 * decision how the ranks run. See launch.h; the map is in launch_internal.h.
 */
#include "runtime/launch/launch_internal.h"
#include "base/core/clock.h"
#include "base/core/given.h"
#include "base/core/mem.h"
#include "runtime/bootstrap/rendezvous.h"
#include "runtime/bootstrap/torchrun_store.h"
#include "runtime/launch/mpi_library.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* === options ================================================================================== */

/* Reads the launcher's options from argv and the environment. */

enum { DEADLINE_MS = 30000, LONGEST_DEADLINE_S = 1000000 };

/* --- values ----------------------------------------------------------------------------------- */

/* A whole number and nothing else. */
static bool parse_int(const char *text, int64_t least, int64_t most, int *value_out)
{
    char *end;
    if (text[0] != '-' && (text[0] < '0' || text[0] > '9'))
        return false;
    errno = 0;
    long long value = strtoll(text, &end, 10);
    if (errno != 0 || end == text || *end != '\0' || value < least || value > most)
        return false;
    *value_out = (int)value;
    return true;
}

static fsdp_status set_count(int *count, const char *name, const char *text, fsdp_error *err)
{
    if (parse_int(text, 1, FSDP_MAX_LOCAL_RANKS, count))
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_USAGE, "%s '%s' is not a number of ranks from 1 to %d", name,
                     text, FSDP_MAX_LOCAL_RANKS);
}

static fsdp_status set_np(fsdp_launch_options *options, const char *name, const char *text,
                          fsdp_error *err)
{
    options->np_name = name;
    return set_count(&options->np, name, text, err);
}

static fsdp_status set_threads(fsdp_launch_options *options, const char *name, const char *text,
                               fsdp_error *err)
{
    options->threads_name = name;
    return set_count(&options->threads, name, text, err);
}

static fsdp_status set_comm(fsdp_launch_options *options, const char *name, const char *text,
                            fsdp_error *err)
{
    options->comm_name = name;
    for (int i = FSDP_COMM_AUTO; i <= FSDP_COMM_NCCL; i++)
        if (strcmp(text, fsdp_comm_choice_name((fsdp_comm_choice)i)) == 0) {
            options->comm = (fsdp_comm_choice)i;
            return FSDP_OK;
        }
    return fsdp_fail(err, FSDP_ERR_USAGE,
                     "%s '%s' is unknown; use auto, self, threads, shm, mpi, tcp or nccl", name,
                     text);
}

static fsdp_status set_device(fsdp_launch_options *options, const char *name, const char *text,
                              fsdp_error *err)
{
    (void)name;
    (void)err;
    options->device = text;
    return FSDP_OK;
}

static fsdp_status set_deadline(fsdp_launch_options *options, const char *name, const char *text,
                                fsdp_error *err)
{
    char *end;
    double seconds = strtod(text, &end);
    if (end == text || *end != '\0' || !(seconds >= 0.001 && seconds <= LONGEST_DEADLINE_S))
        return fsdp_fail(err, FSDP_ERR_USAGE, "%s '%s' is not a number of seconds from 0.001 to %d",
                         name, text, LONGEST_DEADLINE_S);
    options->deadline_ms = (int)lround(seconds * 1000);
    return FSDP_OK;
}

static fsdp_status set_trace(fsdp_launch_options *options, const char *name, const char *text,
                             fsdp_error *err)
{
    if (text[0] == '\0')
        return fsdp_fail(err, FSDP_ERR_USAGE, "%s needs the name of a file", name);
    options->trace = text;
    return FSDP_OK;
}

static fsdp_status set_flag(bool *flag, const char *name, const char *text, fsdp_error *err)
{
    if (strcmp(text, "1") != 0 && strcmp(text, "0") != 0)
        return fsdp_fail(err, FSDP_ERR_USAGE, "%s '%s' is not 1 or 0", name, text);
    *flag = text[0] == '1';
    return FSDP_OK;
}

static fsdp_status set_check(fsdp_launch_options *options, const char *name, const char *text,
                             fsdp_error *err)
{
    return set_flag(&options->check, name, text, err);
}

/* --- sources of options ----------------------------------------------------------------------- */

typedef struct launch_option {
    const char *name, *variable;
    bool is_flag;
    fsdp_status (*set)(fsdp_launch_options *options, const char *name, const char *text,
                       fsdp_error *err);
} launch_option;

static const launch_option table[] = {
    {"--np", "FSDP_NP", false, set_np},
    {"--threads", "FSDP_THREADS", false, set_threads},
    {"--comm", "FSDP_COMM", false, set_comm},
    {"--device", "FSDP_DEVICE", false, set_device},
    {"--deadline", "FSDP_DEADLINE", false, set_deadline},
    {"--trace", "FSDP_TRACE", false, set_trace},
    {"--check", "FSDP_CHECK", true, set_check},
};
enum { OPTIONS = sizeof table / sizeof *table };

/* *value_out: what stands after '=', or NULL. */
static const launch_option *find_option(const char *argument, const char **value_out)
{
    for (int i = 0; i < OPTIONS; i++) {
        size_t length = strlen(table[i].name);
        if (strncmp(argument, table[i].name, length) != 0)
            continue;
        *value_out = argument[length] == '=' ? argument + length + 1 : NULL;
        if (*value_out || argument[length] == '\0')
            return &table[i];
    }
    return NULL;
}

/* The one at *at, and its value, which may be the next argument. */
static fsdp_status take_option(const launch_option *option, const char *value, char **argv, int *at,
                               fsdp_launch_options *options, fsdp_error *err)
{
    if (option->is_flag && value)
        return fsdp_fail(err, FSDP_ERR_USAGE, "%s takes no value", option->name);
    if (option->is_flag)
        return option->set(options, option->name, "1", err);
    if (!value)
        value = argv[++*at];
    if (!value)
        return fsdp_fail(err, FSDP_ERR_USAGE, "%s needs a value", option->name);
    return option->set(options, option->name, value, err);
}

static fsdp_status read_arguments(int argc, char **argv, fsdp_launch_options *options,
                                  fsdp_error *err)
{
    bool is_over = false;
    for (int i = 0; i < argc; i++) {
        const char *value;
        is_over = is_over || (i > 0 && strcmp(argv[i], "--") == 0);
        const launch_option *option = is_over || i == 0 ? NULL : find_option(argv[i], &value);
        if (option)
            FSDP_TRY(take_option(option, value, argv, &i, options, err));
        else
            options->argv[options->argc++] = argv[i];
    }
    return FSDP_OK;
}

static fsdp_status read_variables(fsdp_getenv get, void *context, fsdp_launch_options *options,
                                  fsdp_error *err)
{
    for (int i = 0; i < OPTIONS; i++) {
        const char *text = get(context, table[i].variable);
        if (text && text[0] != '\0')
            FSDP_TRY(table[i].set(options, table[i].variable, text, err));
    }
    const char *verbose = get(context, "FSDP_VERBOSE"), *host = get(context, "FSDP_HOST_ID");
    options->host = host && host[0] != '\0' ? host : NULL;
    options->is_quiet = verbose && strcmp(verbose, "0") == 0;
    options->is_verbose = verbose && verbose[0] != '\0' && !options->is_quiet;
    return FSDP_OK;
}

/* --np and --threads exclude each other; said on the command line, one of them beats the environment's
 * other. */
static fsdp_status choose_kind(fsdp_launch_options *options, const fsdp_launch_options *variables,
                               fsdp_error *err)
{
    bool np_is_said = options->np_name && options->np_name != variables->np_name;
    bool threads_is_said =
        options->threads_name && options->threads_name != variables->threads_name;
    if (options->np == 0 || options->threads == 0)
        return FSDP_OK;
    if (np_is_said == threads_is_said)
        return fsdp_fail(err, FSDP_ERR_USAGE, "%s and %s: ranks are either processes or threads",
                         options->np_name, options->threads_name);
    if (np_is_said)
        options->threads = 0;
    else
        options->np = 0;
    return FSDP_OK;
}

fsdp_status fsdp_launch_options_read(int argc, char **argv, fsdp_getenv get, void *context,
                                     fsdp_launch_options *options_out, fsdp_error *err)
{
    fsdp_launch_options options = {.device = "cpu", .deadline_ms = DEADLINE_MS};
    fsdp_launch_options variables;
    options.argv = fsdp_alloc((size_t)argc + 1, sizeof *options.argv);
    if (!options.argv)
        return fsdp_fail_memory(err, "the program's arguments");
    fsdp_status status = read_variables(get, context, &options, err);
    variables = options;
    if (status == FSDP_OK)
        status = read_arguments(argc, argv, &options, err);
    if (status == FSDP_OK)
        status = choose_kind(&options, &variables, err);
    if (status == FSDP_OK)
        *options_out = options;
    else
        fsdp_launch_options_release(&options);
    return status;
}

void fsdp_launch_options_release(fsdp_launch_options *options)
{
    fsdp_free(options->argv);
    options->argv = NULL;
}

/* === the launcher ============================================================================= */

/*
 * Detects from the environment which launcher started this process. See launch_internal.h.
 *
 * A launcher is detected by any of its variables, and then all of them must be set: a stray
 * WORLD_SIZE would otherwise make N worlds of one rank each.
 */

enum { FIRST_PORT = 10000, PORTS = 20000 }; /* below the ephemeral ports */

typedef struct launcher launcher;

typedef struct environment {
    fsdp_getenv get;
    void *context;
    const launcher *row;
} environment;

struct launcher {
    fsdp_launcher kind;
    const char *name;                     /* "mpirun (OMPI_COMM_WORLD_RANK)" */
    const char *set;                      /* the set of variables, for messages */
    const char *begins[5];                /* any of them begins the set */
    const char *rank, *size, *local_size; /* NULL: no variable says it */
    fsdp_status (*detect)(const environment *from, fsdp_place *place, fsdp_error *err);
};

/* An empty variable counts as not set. */
static const char *variable(const environment *from, const char *name)
{
    const char *text = from->get(from->context, name);
    return text && text[0] != '\0' ? text : NULL;
}

static bool has_any(const environment *from, const char *const *names)
{
    for (; *names; names++)
        if (variable(from, *names))
            return true;
    return false;
}

static fsdp_status need(const environment *from, const char *name, const char **text_out,
                        fsdp_error *err)
{
    *text_out = variable(from, name);
    if (*text_out)
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_USAGE,
                     "%s is not set, but other variables of %s are; set all of them, or none", name,
                     from->row->set);
}

static fsdp_status need_int(const environment *from, const char *name, int least, int most,
                            int *value_out, fsdp_error *err)
{
    const char *text;
    FSDP_TRY(need(from, name, &text, err));
    if (parse_int(text, least, most, value_out))
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_USAGE, "%s is '%s', not a whole number from %d to %d", name,
                     text, least, most);
}

/* -1 when it is not there. */
static fsdp_status maybe_int(const environment *from, const char *name, int least, int most,
                             int *value_out, fsdp_error *err)
{
    *value_out = -1;
    return variable(from, name) ? need_int(from, name, least, most, value_out, err) : FSDP_OK;
}

static fsdp_status need_ranks(const environment *from, fsdp_place *place, fsdp_error *err)
{
    FSDP_TRY(need_int(from, from->row->size, 1, FSDP_MAX_RANKS, &place->size, err));
    return need_int(from, from->row->rank, 0, place->size - 1, &place->rank, err);
}

static fsdp_status copy_text(const char *name, const char *text, char *out, size_t out_size,
                             fsdp_error *err)
{
    if (strlen(text) < out_size) {
        memcpy(out, text, strlen(text) + 1);
        return FSDP_OK;
    }
    return fsdp_fail(err, FSDP_ERR_USAGE, "%s is longer than %zu bytes", name, out_size - 1);
}

/* "host:port", "[::1]:port" */
static fsdp_status take_master(const char *text, fsdp_place *place, fsdp_error *err)
{
    const char *colon = strrchr(text, ':');
    size_t length = colon ? (size_t)(colon - text) : 0;
    bool is_bracketed = length >= 2 && text[0] == '[' && colon[-1] == ']';
    const char *host = text + is_bracketed;
    length -= is_bracketed ? 2 : 0;
    if (length == 0 || length >= sizeof place->host ||
        !parse_int(colon + 1, 1, 65535, &place->port))
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "FSDP_MASTER is '%s', not HOST:PORT, the address where rank 0 listens",
                         text);
    memcpy(place->host, host, length);
    place->host[length] = '\0';
    return FSDP_OK;
}

/* --- the launchers ---------------------------------------------------------------------------- */

static fsdp_status detect_variables(const environment *from, fsdp_place *place, fsdp_error *err)
{
    const char *master, *job = variable(from, "FSDP_JOB_ID");
    FSDP_TRY(need_ranks(from, place, err));
    FSDP_TRY(maybe_int(from, from->row->local_size, 1, place->size, &place->local_size, err));
    if (place->size == 1)
        return FSDP_OK;
    FSDP_TRY(need(from, "FSDP_MASTER", &master, err));
    FSDP_TRY(take_master(master, place, err));
    return copy_text("FSDP_JOB_ID", job ? job : "", place->job, sizeof place->job, err);
}

static fsdp_status detect_torchrun(const environment *from, fsdp_place *place, fsdp_error *err)
{
    const char *host, *run = variable(from, "TORCHELASTIC_RUN_ID");
    const char *restart = variable(from, "TORCHELASTIC_RESTART_COUNT");
    const char *store = variable(from, "TORCHELASTIC_USE_AGENT_STORE");
    int local_rank; /* only checked: worlds compute their own */
    FSDP_TRY(need_ranks(from, place, err));
    FSDP_TRY(need_int(from, from->row->local_size, 1, place->size, &place->local_size, err));
    FSDP_TRY(need_int(from, "LOCAL_RANK", 0, place->local_size - 1, &local_rank, err));
    FSDP_TRY(need(from, "MASTER_ADDR", &host, err));
    FSDP_TRY(need_int(from, "MASTER_PORT", 1, 65535, &place->port, err));
    FSDP_TRY(copy_text("MASTER_ADDR", host, place->host, sizeof place->host, err));
    place->has_store = store ? strcmp(store, "True") == 0 : run != NULL;
    int n =
        snprintf(place->job, sizeof place->job, "%s/%s", run ? run : "", restart ? restart : "");
    if (n < 0 || (size_t)n >= sizeof place->job)
        return fsdp_fail(err, FSDP_ERR_USAGE, "TORCHELASTIC_RUN_ID is too long");
    return FSDP_OK;
}

/* MPI connects the ranks; with FSDP_MASTER the rendezvous does, whichever MPI started them. */
static fsdp_status detect_mpi(const environment *from, fsdp_place *place, fsdp_error *err)
{
    const char *master = variable(from, "FSDP_MASTER"), *job = variable(from, "FSDP_JOB_ID");
    const char *local_size = from->row->local_size;
    FSDP_TRY(need_ranks(from, place, err));
    if (local_size)
        FSDP_TRY(maybe_int(from, local_size, 1, place->size, &place->local_size, err));
    place->is_mpi = !master || place->size == 1;
    if (place->is_mpi)
        return FSDP_OK;
    FSDP_TRY(take_master(master, place, err));
    return copy_text("FSDP_JOB_ID", job ? job : "", place->job, sizeof place->job, err);
}

static fsdp_status detect_pmix(const environment *from, fsdp_place *place, fsdp_error *err)
{
    place->size = 0; /* MPI knows */
    place->is_mpi = true;
    return need_int(from, from->row->rank, 0, FSDP_MAX_RANKS - 1, &place->rank, err);
}

/* Returns the first host of a list: "gpu01" of "gpu[01-03,07],cpu2". Names that continue
 * after their numbers are not guessed at. */
static fsdp_status first_host(const char *list, fsdp_place *place, fsdp_error *err)
{
    size_t length = strcspn(list, "[,");
    const char *number = list[length] == '[' ? list + length + 1 : "";
    size_t digits = strspn(number, "0123456789");
    const char *end = list[length] == '[' ? strchr(list + length, ']') : NULL;
    bool is_plain = list[length] != '[' || (digits > 0 && end && (end[1] == ',' || end[1] == '\0'));
    int n = snprintf(place->host, sizeof place->host, "%.*s%.*s", (int)length, list, (int)digits,
                     number);
    if (is_plain && n > 0 && (size_t)n < sizeof place->host)
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_USAGE,
                     "cannot find the first host of '%s'; set FSDP_MASTER=HOST:PORT", list);
}

/* Ranks that know nothing but the job's id listen at the same port. */
static int port_of(const char *job)
{
    uint32_t hash = 2166136261u;
    for (; *job; job++)
        hash = (hash ^ (unsigned char)*job) * 16777619u;
    return FIRST_PORT + (int)(hash % PORTS);
}

static fsdp_status detect_slurm(const environment *from, fsdp_place *place, fsdp_error *err)
{
    const char *master = variable(from, "FSDP_MASTER"), *job = variable(from, "SLURM_JOB_ID");
    const char *step = variable(from, "SLURM_STEP_ID");
    const char *hosts = variable(from, "SLURM_STEP_NODELIST");
    int local_rank;
    FSDP_TRY(need_ranks(from, place, err));
    FSDP_TRY(need_int(from, "SLURM_LOCALID", 0, place->size - 1, &local_rank, err));
    if (!hosts)
        hosts = variable(from, "SLURM_NODELIST");
    snprintf(place->job, sizeof place->job, "slurm %s.%s", job ? job : "", step ? step : "");
    place->port = port_of(place->job);
    if (master)
        return take_master(master, place, err);
    return first_host(hosts ? hosts : FSDP_LOOPBACK, place, err);
}

/* In this order: the launcher that is nearest to the process first. mpiexec may start its helpers by
 * srun, one per host, and their SLURM_PROCID is not the rank. */
static const launcher launchers[] = {
    {FSDP_LAUNCHED_VARIABLES,
     "FSDP_RANK and FSDP_WORLD_SIZE",
     "FSDP_RANK, FSDP_WORLD_SIZE and FSDP_MASTER",
     {"FSDP_RANK", "FSDP_WORLD_SIZE"},
     "FSDP_RANK",
     "FSDP_WORLD_SIZE",
     "FSDP_LOCAL_WORLD_SIZE",
     detect_variables},
    {FSDP_LAUNCHED_TORCHRUN,
     "torchrun (RANK)",
     "torchrun's variables (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, "
     "MASTER_PORT)",
     {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"},
     "RANK",
     "WORLD_SIZE",
     "LOCAL_WORLD_SIZE",
     detect_torchrun},
    {FSDP_LAUNCHED_OPEN_MPI,
     "mpirun (OMPI_COMM_WORLD_RANK)",
     "mpirun's variables (OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE, PMIX_RANK)",
     {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"},
     "OMPI_COMM_WORLD_RANK",
     "OMPI_COMM_WORLD_SIZE",
     "OMPI_COMM_WORLD_LOCAL_SIZE",
     detect_mpi},
    {FSDP_LAUNCHED_MVAPICH,
     "mpirun_rsh (MV2_COMM_WORLD_RANK)",
     "MVAPICH's variables (MV2_COMM_WORLD_RANK, MV2_COMM_WORLD_SIZE)",
     {"MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"},
     "MV2_COMM_WORLD_RANK",
     "MV2_COMM_WORLD_SIZE",
     "MV2_COMM_WORLD_LOCAL_SIZE",
     detect_mpi},
    {FSDP_LAUNCHED_JSRUN,
     "jsrun (JSM_NAMESPACE_RANK)",
     "jsrun's variables (JSM_NAMESPACE_RANK, JSM_NAMESPACE_SIZE, PMIX_RANK)",
     {"JSM_NAMESPACE_RANK"},
     "JSM_NAMESPACE_RANK",
     "JSM_NAMESPACE_SIZE",
     NULL,
     detect_mpi},
    {FSDP_LAUNCHED_PMIX,
     "PMIx (PMIX_RANK)",
     "PMIx's variables (PMIX_RANK)",
     {"PMIX_RANK"},
     "PMIX_RANK",
     NULL,
     NULL,
     detect_pmix},
    {FSDP_LAUNCHED_PMI,
     "mpiexec (PMI_RANK)",
     "mpiexec's variables (PMI_RANK, PMI_SIZE, MPI_LOCALRANKID, MPI_LOCALNRANKS, PALS_RANKID)",
     {"PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "PALS_RANKID"},
     "PMI_RANK",
     "PMI_SIZE",
     "MPI_LOCALNRANKS",
     detect_mpi},
    {FSDP_LAUNCHED_FLUX,
     "flux (FLUX_TASK_RANK)",
     "flux's variables (FLUX_TASK_RANK, FLUX_JOB_SIZE)",
     {"FLUX_TASK_RANK"},
     "FLUX_TASK_RANK",
     "FLUX_JOB_SIZE",
     NULL,
     detect_mpi},
    {FSDP_LAUNCHED_SLURM,
     "srun (SLURM_PROCID)",
     "srun's variables (SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID)",
     {"SLURM_PROCID"},
     "SLURM_PROCID",
     "SLURM_NTASKS",
     NULL,
     detect_slurm},
};
enum { LAUNCHERS = sizeof launchers / sizeof *launchers };

/* A batch script has the variables of rank 0, and is not a rank: only steps (srun) are. */
static bool is_slurm_step(const environment *from)
{
    return variable(from, "SLURM_PROCID") &&
           (variable(from, "SLURM_STEP_ID") || !variable(from, "SLURM_JOB_ID"));
}

static bool is_same(const environment *from, const char *name, const char *other)
{
    const char *text = variable(from, name), *other_text = variable(from, other);
    return text && other_text && strcmp(text, other_text) == 0;
}

/* srun --mpi=pmi2 sets both sets of variables, to the same numbers, and srun's need no MPI. */
static bool is_pmi_of_srun(const environment *from)
{
    return is_slurm_step(from) && is_same(from, "PMI_RANK", "SLURM_PROCID") &&
           is_same(from, "PMI_SIZE", "SLURM_NTASKS");
}

static bool has_started(const environment *from)
{
    if (!has_any(from, from->row->begins))
        return false;
    switch (from->row->kind) {
    case FSDP_LAUNCHED_SLURM: return is_slurm_step(from);
    case FSDP_LAUNCHED_PMI: return !is_pmi_of_srun(from);
    default: return true;
    }
}

static const launcher *row_of(fsdp_launcher kind)
{
    for (int i = 0; i < LAUNCHERS; i++)
        if (launchers[i].kind == kind)
            return &launchers[i];
    return NULL;
}

/* "mpirun (OMPI_COMM_WORLD_RANK)" */
static const char *launcher_name(fsdp_launcher kind)
{
    const launcher *row = row_of(kind);
    return row ? row->name : "no launcher";
}

fsdp_status fsdp_launch_check_mpi(const fsdp_place *place, int rank, int size, fsdp_error *err)
{
    const launcher *row = row_of(place->launcher);
    if (!row || (rank == place->rank && (place->size == 0 || size == place->size)))
        return FSDP_OK;
    bool is_rank = place->size == 0 || size == place->size;
    return fsdp_fail(
        err, FSDP_ERR_USAGE,
        "%s is %d, but in MPI itself this is rank %d of %d: libfsdp_mpi belongs to another MPI "
        "than the launcher, or a rank started this program; use mpirun of the same MPI, or set "
        "FSDP_MASTER=HOST:PORT to connect over TCP; in a program that a rank starts, unset %s",
        is_rank ? row->rank : row->size, is_rank ? place->rank : place->size, rank, size, row->set);
}

fsdp_status fsdp_launch_detect(fsdp_getenv get, void *context, fsdp_place *place_out,
                               fsdp_error *err)
{
    fsdp_place place = {.size = 1, .local_size = -1};
    for (int i = 0; i < LAUNCHERS; i++) {
        const environment from = {get, context, &launchers[i]};
        if (!has_started(&from))
            continue;
        place.launcher = launchers[i].kind;
        FSDP_TRY(launchers[i].detect(&from, &place, err));
        break;
    }
    *place_out = place;
    return FSDP_OK;
}

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
    if (parse_int(value, 1, 65535, port_out))
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
                         name, launcher_name(place->launcher), place->rank);
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
    return fail_conflict(options, launcher_name(place->launcher), err);
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
                          launcher_name(place->launcher));
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
                launcher_name(place->launcher));
    else
        fprintf(stderr, "fsdp: rank %d, started by %s\n", place->rank,
                launcher_name(place->launcher));
}

void fsdp_launch_note(int rank, const char *finding, const char *names)
{
    fprintf(stderr, "fsdp: rank %d, --check: %s: %s\n", rank, finding, names);
}

static void warn(const char *text)
{
    fprintf(stderr, "fsdp: %s\n", text);
}

/* What NCCL and CUDA read when they start, before there are threads that read the environment. NCCL from
 * 2.30 on serves two ranks on one GPU when it is told to; with CUDA's usual 8 queues a collective of one
 * of them may wait after one of the other that waits for it. Threads share a context, for which CUDA waits
 * before it loads a kernel at its first launch: a collective that waits for a thread that loads would never
 * end, so all are loaded at the start. */
static void set_gpu_environment(const fsdp_launch_options *options)
{
    if (strncmp(options->device, "cuda", strlen("cuda")) != 0)
        return;
    (void)setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1", 0);
    (void)setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
    if (options->threads > 1)
        (void)setenv("CUDA_MODULE_LOADING", "EAGER", 0);
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
        options.warn = options.is_quiet ? NULL : warn;
        report_choice(&options, &place);
        set_gpu_environment(&options);
        code = run(&job, &place, mode);
    } else {
        code = fsdp_error_report(&err);
    }
    fsdp_launch_options_release(&options);
    return code;
}
