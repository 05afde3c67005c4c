/* Raises the limit of open files for the connections of a rank: the soft limit is often low.
 * See launch_internal.h. */
#include "runtime/launch/launch_internal.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/resource.h>

enum {
    /* In addition to the descriptors for each other rank: pipe, listeners, memory, trace, the current
     * connection, and pending connections of ranks of this host (listener.h). */
    FILES_AT_LEAST = 32,
    FILES_TO_SPARE = 128 /* for what the program opens */
};

/* The lowest limit that leaves space for n files next to those that are open now. */
static rlim_t limit_for(int n)
{
    int limit = 0;
    for (; n > 0; limit++)
        n -= fcntl(limit, F_GETFD) < 0;
    return (rlim_t)limit;
}

/* A rank has a connection with each other one, watches its process, and over TCP has a second
 * connection. */
fsdp_status fsdp_launch_have_files(const char *who, int ranks, fsdp_comm_choice comm,
                                   fsdp_error *err)
{
    const int of_each = comm == FSDP_COMM_TCP ? 3 : 2;
    const rlim_t needed = limit_for((ranks - 1) * of_each + FILES_AT_LEAST);
    const rlim_t wanted = needed + (rlim_t)ranks + FILES_TO_SPARE; /* a saver's control plane */
    struct rlimit files;
    if (getrlimit(RLIMIT_NOFILE, &files) != 0 || files.rlim_cur >= wanted)
        return FSDP_OK;
    files.rlim_cur = wanted < files.rlim_max ? wanted : files.rlim_max;
    if (setrlimit(RLIMIT_NOFILE, &files) != 0)
        return fsdp_fail_errno(err, errno, "cannot raise the limit of open files to %llu",
                               (unsigned long long)files.rlim_cur);
    if (files.rlim_cur >= needed)
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_LIMIT,
                     "%s %d needs at least %llu open files in a process, which may have %llu; "
                     "raise the hard limit (`ulimit -Hn`), or start fewer ranks",
                     who, ranks, (unsigned long long)needed, (unsigned long long)files.rlim_max);
}
