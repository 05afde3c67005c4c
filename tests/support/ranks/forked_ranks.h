/* Ranks that are forked processes, connected to each other by sockets; the common part of worlds and
 * transports of processes. */
#ifndef FSDP_FORKED_RANKS_H
#define FSDP_FORKED_RANKS_H

#include <stddef.h>
#include <sys/types.h>

enum { FORKED_RANKS_MOST = 8 };

/* Runs in the process of a rank, which then ends with 0; ends: for take_ctl_pairs. */
typedef void (*forked_rank)(int rank, const int *ends, const void *user);

/* Both end the test program on failure. A rank dies with its parent. */
void fork_ranks(int n, forked_rank run, const void *user, pid_t *pids_out);
int wait_for_rank(pid_t pid);      /* its status, as of waitpid */

/* Memory that forked ranks and their parent share. Zeroed; for as long as the program runs. */
void *share_memory(size_t size);

/* The number of files that a process has open, and that a rank of n has open when it begins, without the
 * ends, which it closes. */
int count_open_files(void);
int count_files_without_ends(int n);

#endif
