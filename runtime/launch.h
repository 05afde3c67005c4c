/*
 * Runs one program in every way: alone, as forked processes, as threads, under mpirun, srun or
 * torchrun. fsdp_launch finds out which, connects the ranks and calls body once per rank.
 *
 * It takes its own options out of argv, each also as an environment variable (--np as FSDP_NP, ...); the
 * command line wins:
 *
 *   --np N               fork N ranks of this host
 *   --threads N          ranks are threads of this process
 *   --comm NAME          auto, self, threads, shm, mpi, tcp or nccl: what moves the tensors (default auto:
 *                        on device cuda nccl, but between threads that share a GPU; else shm on one host, on
 *                        several what connected the ranks: MPI under mpirun, else TCP). One rank
 *                        without a launcher is `self` also where threads, shm or tcp is asked for
 *   --device NAME        cpu; cpu-async: a worker thread per stream; cuda: for each rank the GPU with the
 *                        rank's number on this host; or cuda:N (docs/gpu.md)
 *   --deadline SECONDS   how long any call may wait for another rank (default 30)
 *   --trace FILE         one JSON object per event and line; %r is the rank
 *   --check              check who owns which buffer, that all ranks do the same, and that parameters and
 *                        gradients are used correctly (slower; docs/runtime.md, "Checks")
 *
 * They are found in this order: options, FSDP_*, torchrun's variables, those of an MPI's launcher (Open MPI,
 * MVAPICH, jsrun, PMIx; MPICH, Intel MPI and Cray; flux), Slurm's: docs/launch.md has them all. Rank 0
 * reports on standard error which one applied, unless that was the command line or none; FSDP_VERBOSE=1:
 * always, FSDP_VERBOSE=0: never. A contradiction is exit code 2.
 *
 * Any other launcher sets FSDP_RANK, FSDP_WORLD_SIZE and FSDP_MASTER (HOST:PORT, where rank 0 listens), and
 * optionally FSDP_LOCAL_WORLD_SIZE and FSDP_JOB_ID (ranks of different jobs never connect). FSDP_MASTER also
 * sets the rendezvous of srun's ranks, and connects those of an MPI's launcher over TCP. FSDP_HOST_ID is a
 * name that is equal on ranks that can share memory (default: the boot, the name and the network of their
 * host): for containers of one host, and for tests, which play several hosts on one.
 *
 * Every rank of --np has about two files open for each other one, over TCP three: where the soft limit of
 * open files is too low for that it is raised, up to the hard one.
 *
 * Under --np rank 0 has the standard input, unless that is a terminal; the others have none.
 */
#ifndef FSDP_LAUNCH_H
#define FSDP_LAUNCH_H

#include <fsdp/status.h>
#include <fsdp/world.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Returns the exit code of this rank: 0, or 1 to 255. After another one than 0, ranks that wait for this one
 * get an error with that code and its text: that of fsdp_world_fail, else of the last fsdp_error_report.
 * An int outside that range counts by its lower eight bits, and where these are 0 it is FSDP_ERR_INTERNAL.
 * argv ends with NULL and has no option of fsdp_launch left. */
typedef int (*fsdp_rank_main)(void *context, fsdp_world *world, int argc, char **argv);

/* Finds out whether --device NAME works here; FSDP_ERR_USAGE says what is missing, where it was sought and
 * what to do. Opens nothing, but processes that are forked later have no CUDA. Local. */
FSDP_API fsdp_status fsdp_launch_find_device(const char *name, fsdp_error *err);

/*
 * Starts or connects the ranks, and calls body in each. Returns the program's exit code: the first failing
 * rank's, by time, or 0. Ranks that are still at work then are ended within the deadline. With --np the
 * caller is only the supervisor: it forwards signals, says which rank died and how, and leaves no orphan.
 * Call it from main, before threads are made. body gets context as it is: under --threads all ranks see the
 * same.
 *
 * Ranks end by returning. exit() in mid-run loses the others a peer (FSDP_ERR_PEER): --np names a rank that
 * did so with 0, --threads names it and ends all of them with FSDP_ERR_PEER, whatever its code. The
 * program's output is written out when --threads ends ranks that are still at work, unless one of them holds
 * that file.
 *
 * The call does not return in the ranks of --np, which end with exit(), nor in a rank of mpirun that failed,
 * which ends without MPI_Finalize (that would wait for the others).
 */
FSDP_API int fsdp_launch(int argc, char **argv, fsdp_rank_main body, void *context);

#ifdef __cplusplus
}
#endif
#endif
