/*
 * Runs one program in every way: alone, as forked processes, as threads, under mpirun, srun or
 * torchrun. fsdp_launch finds out which, connects the ranks and calls body once per rank.
 *
 * It removes its own options from argv. Each option also has an environment variable (--np has FSDP_NP, ...),
 * which the command line overrides:
 *
 *   --np N               fork N ranks of this host
 *   --threads N          ranks are threads of this process
 *   --comm NAME          auto, self, threads, shm, mpi, tcp or nccl: what moves the tensors. The default,
 *                        auto, is nccl on device cuda, except between threads that share a GPU; else shm on
 *                        one host, and on several hosts what connected the ranks: MPI under mpirun, else TCP.
 *                        One rank without a launcher uses `self`, also with threads, shm or tcp
 *   --device NAME        cpu; cpu-async: a worker thread per stream; cuda: for each rank the GPU with the
 *                        rank's number on this host; or cuda:N (docs/gpu.md)
 *   --deadline SECONDS   how long any call may wait for another rank (default 30)
 *   --trace FILE         write a line with one JSON object per event; %r in FILE stands for the rank
 *   --check              check who owns which buffer, that all ranks do the same, and that parameters and
 *                        gradients are used correctly (slower; docs/runtime.md, "Checks")
 *
 * The ranks are found in this order: by options, by FSDP_*, by the variables of torchrun, of the launcher of
 * an MPI (Open MPI, MVAPICH, jsrun, PMIx; MPICH, Intel MPI and Cray; flux), or of Slurm. docs/launch.md lists
 * them all. Rank 0 reports on standard error how they were found, unless by the command line or not at all;
 * FSDP_VERBOSE=1: always, FSDP_VERBOSE=0: never. A contradiction is exit code 2.
 *
 * Any other launcher sets FSDP_RANK, FSDP_WORLD_SIZE and FSDP_MASTER (HOST:PORT, where rank 0 listens), and
 * optionally FSDP_LOCAL_WORLD_SIZE and FSDP_JOB_ID (ranks of different jobs never connect). FSDP_MASTER also
 * sets the rendezvous of srun's ranks, and connects the ranks of an MPI's launcher over TCP. FSDP_HOST_ID is
 * a name that is equal on ranks that can share memory (default: the boot, the name and the network of their
 * host), for containers on one host, and for tests that simulate several hosts on one.
 *
 * Each rank of --np has about two files open for each other rank, and over TCP three. If the soft limit of
 * open files is too low for that, it is raised, at most to the hard limit.
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

/* Runs as one rank and returns its exit code, 0 to 255. If it is not 0, the ranks that wait for this one get
 * an error with that code and the text of fsdp_world_fail, or else of the last fsdp_error_report. Of a larger
 * or negative int the lower eight bits are used, or FSDP_ERR_INTERNAL if these are 0. argv ends with NULL and
 * has no options of fsdp_launch. */
typedef int (*fsdp_rank_main)(void *context, fsdp_world *world, int argc, char **argv);

/*
 * Starts or connects the ranks, and calls body in each. Returns the program's exit code: that of the rank
 * that failed first, by time, or 0. After a failure the ranks that still run are ended within the deadline.
 * With --np the caller is only the supervisor: it forwards signals, reports which rank died and how, and
 * leaves no orphan. Call it from main, before threads are made. body gets context unchanged: under --threads
 * all ranks share it.
 *
 * A rank ends by returning from body. If it calls exit(), the others fail with FSDP_ERR_PEER: --np names a
 * rank that called exit(0); --threads names the rank and ends all of them with FSDP_ERR_PEER, whatever its
 * code. When --threads ends ranks that still run, it flushes the program's output, unless one of them holds
 * that file.
 *
 * The call does not return in the ranks of --np, which end with exit(), nor in a rank of mpirun that failed,
 * which ends without MPI_Finalize, because that would wait for the others.
 */
FSDP_API int fsdp_launch(int argc, char **argv, fsdp_rank_main body, void *context);

/* Checks whether --device NAME works here. FSDP_ERR_USAGE says what is missing, where it was sought and what
 * to do. Opens no device, but CUDA does not work in processes that are forked later. Local. */
FSDP_API fsdp_status fsdp_launch_find_device(const char *name, fsdp_error *err);

#ifdef __cplusplus
}
#endif
#endif
