/*
 * The inside of fsdp_launch: options -> where this process stands -> how the ranks run -> their worlds.
 *
 * In: argv, the environment, and the body of a program (launch.h). Out: ranks that run the body, each with an
 * fsdp_world (world.h), and one exit code. Programs call fsdp_launch; the rooms above use worlds and traces.
 *
 *   launch.c             takes the options out of argv, and from FSDP_*; detects the launcher (none,
 *                        torchrun, mpirun, srun, ...), decides, runs the one rank of this process, connects
 *                        ranks that another launcher started
 *   launch_processes.c   --np: ranks as forked processes, and their supervisor
 *   launch_threads.c     --threads
 *   world.c              creates a rank's world around its control plane, decides what moves the memory of
 *                        ranks' GPUs, and runs the program's body
 */
#ifndef FSDP_LAUNCH_INTERNAL_H
#define FSDP_LAUNCH_INTERNAL_H

#include "runtime/bootstrap/socket.h"
#include "runtime/launch/world_internal.h"
#include <fsdp/launch.h>

enum { FSDP_MAX_LOCAL_RANKS = 1024, FSDP_MAX_RANKS = 65536, FSDP_JOB_SIZE = 256 };

/* --- options ---------------------------------------------------------------------------------- */

typedef enum fsdp_comm_choice {
    FSDP_COMM_AUTO = 0, FSDP_COMM_SELF, FSDP_COMM_THREADS, FSDP_COMM_SHM, FSDP_COMM_MPI,
    FSDP_COMM_TCP, FSDP_COMM_NCCL
} fsdp_comm_choice;

typedef struct fsdp_launch_options {
    int np, threads;           /* 0: not given */
    fsdp_comm_choice comm;
    const char *device;
    int deadline_ms;
    const char *trace;         /* NULL: none */
    bool check;
    bool is_verbose, is_quiet; /* by FSDP_VERBOSE; neither when it is not set */
    void (*warn)(const char *text);    /* a line on standard error; NULL: FSDP_VERBOSE is 0 */
    const char *host;          /* FSDP_HOST_ID: equal on ranks of one host; NULL: detected */
    const char *np_name, *threads_name, *comm_name;    /* how they were given: "--np", "FSDP_NP" */
    int argc;                  /* the program's remaining arguments */
    char **argv;               /* ends with NULL; from base/core/mem.h, the strings are the caller's */
} fsdp_launch_options;

/* getenv, replaced in tests. NULL: not set. */
typedef const char *(*fsdp_getenv)(void *context, const char *name);

fsdp_status fsdp_launch_options_read(int argc, char **argv, fsdp_getenv get, void *context,
                                     fsdp_launch_options *options_out, fsdp_error *err);
void fsdp_launch_options_release(fsdp_launch_options *options);
const char *fsdp_comm_choice_name(fsdp_comm_choice comm);

/* --- the launcher ----------------------------------------------------------------------------- */

typedef enum fsdp_launcher {
    FSDP_LAUNCHED_BARE = 0, FSDP_LAUNCHED_VARIABLES, FSDP_LAUNCHED_TORCHRUN, FSDP_LAUNCHED_OPEN_MPI,
    FSDP_LAUNCHED_MVAPICH, FSDP_LAUNCHED_JSRUN, FSDP_LAUNCHED_PMIX, FSDP_LAUNCHED_PMI, FSDP_LAUNCHED_FLUX,
    FSDP_LAUNCHED_SLURM
} fsdp_launcher;

typedef struct fsdp_place {
    fsdp_launcher launcher;
    int rank, size;            /* PMIX: size 0, which MPI knows */
    int local_size;            /* -1: not set */
    bool is_mpi;               /* MPI connects the ranks, not a rendezvous */
    char host[FSDP_HOST_SIZE]; /* of the rendezvous; "" under MPI */
    int port;
    bool has_store;            /* a torchrun store listens there, not rank 0 */
    char job[FSDP_JOB_SIZE];
} fsdp_place;

/* FSDP_ERR_USAGE names a variable that is missing in a launcher's set. */
fsdp_status fsdp_launch_detect(fsdp_getenv get, void *context, fsdp_place *place_out, fsdp_error *err);
/* FSDP_ERR_USAGE: MPI has another rank or another number of ranks than the launcher. Each rank would then be
 * a world of its own, and all would write the same files. */
fsdp_status fsdp_launch_check_mpi(const fsdp_place *place, int rank, int size, fsdp_error *err);

/* --- running ranks ---------------------------------------------------------------------------- */

typedef enum fsdp_launch_mode {
    FSDP_MODE_SELF = 0, FSDP_MODE_PROCESSES, FSDP_MODE_THREADS, FSDP_MODE_TCP, FSDP_MODE_MPI
} fsdp_launch_mode;

/* Pure. FSDP_ERR_USAGE names two settings that contradict each other. */
fsdp_status fsdp_launch_decide(const fsdp_launch_options *options, const fsdp_place *place,
                               fsdp_launch_mode *mode_out, fsdp_error *err);

/* --- ranks ------------------------------------------------------------------------------------ */

/* All ranks of this process share the program and its options. */
typedef struct fsdp_launch_job {
    const fsdp_launch_options *options;
    fsdp_rank_main body;
    void *context;
    /* Called with a rank's failure before its world ends, that is before other ranks can see it; or NULL. */
    void (*failed)(void *listener, int rank, int code);
    void *listener;
} fsdp_launch_job;

/* Creates the world of one rank, runs body and ends the world. Takes ctl and transport (NULL: chosen here,
 * collective). Returns the exit code; reports errors on standard error. */
int fsdp_launch_rank(const fsdp_launch_job *job, fsdp_ctl *ctl, fsdp_transport *transport);

/* Raises the limit of open files for the connections between that many ranks; who: the option that asks for
 * them, such as "--np". FSDP_ERR_LIMIT: the hard limit is too low; the soft limit is raised up to it. */
fsdp_status fsdp_launch_have_files(const char *who, int ranks, fsdp_comm_choice comm, fsdp_error *err);

int fsdp_launch_processes(const fsdp_launch_job *job);
int fsdp_launch_threads(const fsdp_launch_job *job);

/* The supervisor of --np: the parent forwards signals, waits for the ranks, reports how they died and ends
 * the remaining ones. */

typedef struct fsdp_supervisor fsdp_supervisor;

/* Called before the first fork; signals are blocked until fsdp_supervise. */
fsdp_status fsdp_supervisor_create(int size, int deadline_ms, fsdp_supervisor **supervisor_out,
                                   fsdp_error *err);
/* Restores the signals. Accepts NULL. */
void fsdp_supervisor_free(fsdp_supervisor *supervisor);

/* In the parent: registers the process of a rank. */
void fsdp_supervisor_add(fsdp_supervisor *supervisor, int rank, pid_t pid);

/*
 * Returns when all ranks have ended: 0, or the exit code of the first that failed (128 + N: killed by signal
 * N). After a failure the others get some time to detect it themselves, then SIGTERM, and at the deadline
 * SIGKILL. is_failed: begins with that at once.
 */
int fsdp_supervise(fsdp_supervisor *supervisor, bool is_failed);

#endif
