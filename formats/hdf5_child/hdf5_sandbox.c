/*
 * The sandbox of the child that reads HDF5 files of other programs. libhdf5 has had dozens of
 * memory errors on crafted files. A child that a file takes over can compute and send to its
 * parent, which trusts nothing (hdf5_session.c, hdf5_listing.c); it has no file, and can open
 * none and start no process.
 */
#include "formats/hdf5_child/hdf5_sandbox.h"

#include <errno.h>
#if FSDP_HAVE_SECCOMP
#include <seccomp.h>
#endif
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* --- descriptors and signals ------------------------------------------------------------------ */

static fsdp_status keep_channel(int *channel, fsdp_error *err)
{
    if (dup2(*channel, STDIN_FILENO) < 0)
        return fsdp_fail_errno(err, errno, "cannot set up the process that reads HDF5");
    *channel = STDIN_FILENO;
    if (syscall(SYS_close_range, STDIN_FILENO + 1, ~0U, 0) == 0) /* glibc has it since 2.34 */
        return FSDP_OK;
    struct rlimit files;
    if (getrlimit(RLIMIT_NOFILE, &files) < 0)
        return fsdp_fail_errno(err, errno, "cannot set up the process that reads HDF5");
    const rlim_t most = 1 << 20;
    for (rlim_t fd = STDIN_FILENO + 1; fd < files.rlim_cur && fd < most; fd++)
        close((int)fd);
    return FSDP_OK;
}

/* The program's handlers must not run in the child, and the parent handles Ctrl-C. */
static void reset_signals(void)
{
    const int left_to_parent[] = {SIGINT, SIGQUIT, SIGTERM, SIGHUP, SIGUSR1, SIGUSR2, SIGTSTP};
    for (int number = 1; number < SIGRTMIN; number++)
        signal(number, SIG_DFL);
    for (size_t i = 0; i < sizeof left_to_parent / sizeof left_to_parent[0]; i++)
        signal(left_to_parent[i], SIG_IGN);
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
}

/* --- limits ----------------------------------------------------------------------------------- */

static bool can_map(size_t page)
{
    void *data = mmap(NULL, page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED)
        return false;
    munmap(data, page);
    return true;
}

/*
 * The address space in use: the smallest limit under which a page can still be mapped. (/proc
 * has the number, too, but no file is opened once the tool has started.)
 */
static rlim_t address_space_in_use(const struct rlimit *limit)
{
    const rlim_t page = 4096;
    rlim_t low = 0, high = (rlim_t)1 << 47;
    if (limit->rlim_max < high)
        high = limit->rlim_max;
    while (high - low > page) {
        rlim_t middle = low + (high - low) / 2;
        struct rlimit attempt = {.rlim_cur = middle, .rlim_max = limit->rlim_max};
        if (setrlimit(RLIMIT_AS, &attempt) == 0 && can_map((size_t)page))
            high = middle;
        else
            low = middle;
    }
    return high;
}

static bool limit_memory(void)
{
    struct rlimit limit;
    if (getrlimit(RLIMIT_AS, &limit) < 0)
        return false;
    rlim_t room = address_space_in_use(&limit) + (rlim_t)FSDP_HDF5_MEMORY;
    limit.rlim_cur = limit.rlim_max < room ? limit.rlim_max : room;
    return setrlimit(RLIMIT_AS, &limit) == 0;
}

/* Sets the soft limit only: the parent raises it with every request, the child cannot. */
static bool limit_time(void)
{
    struct rlimit limit;
    if (getrlimit(RLIMIT_CPU, &limit) < 0)
        return false;
    if (limit.rlim_max > FSDP_HDF5_CPU_SECONDS)
        limit.rlim_cur = FSDP_HDF5_CPU_SECONDS;
    return setrlimit(RLIMIT_CPU, &limit) == 0;
}

static bool set_limits(void)
{
    const struct rlimit none = {0, 0};
    return limit_memory() && limit_time() && setrlimit(RLIMIT_CORE, &none) == 0 &&
           setrlimit(RLIMIT_FSIZE, &none) == 0 && setrlimit(RLIMIT_NOFILE, &none) == 0 &&
           setrlimit(RLIMIT_MEMLOCK, &none) == 0;
}

/* --- system calls ----------------------------------------------------------------------------- */

#if FSDP_HAVE_SECCOMP
/* System calls for computing and messages. */
static const int allowed[] = {
    SCMP_SYS(read),         SCMP_SYS(write),        SCMP_SYS(sendto),
    SCMP_SYS(recvfrom),     SCMP_SYS(sendmsg),      SCMP_SYS(recvmsg),
    SCMP_SYS(munmap),       SCMP_SYS(mremap),       SCMP_SYS(brk),
    SCMP_SYS(madvise),      SCMP_SYS(futex),        SCMP_SYS(clock_gettime),
    SCMP_SYS(clock_getres), SCMP_SYS(gettimeofday), SCMP_SYS(exit),
    SCMP_SYS(exit_group),   SCMP_SYS(rt_sigreturn), SCMP_SYS(rt_sigprocmask),
    SCMP_SYS(rt_sigaction), SCMP_SYS(sigaltstack),  SCMP_SYS(restart_syscall),
    SCMP_SYS(sched_yield),  SCMP_SYS(getpid),       SCMP_SYS(gettid),
    SCMP_SYS(getrandom),    SCMP_SYS(sysinfo),      SCMP_SYS(close)};

/* Calls that libraries try and can do without: they open some files, and libhdf5 sleeps before
 * it reads a checksum again. */
static const int denied[] = {SCMP_SYS(open),      SCMP_SYS(stat),       SCMP_SYS(lstat),
                             SCMP_SYS(access),    SCMP_SYS(readlink),   SCMP_SYS(clock_nanosleep),
                             SCMP_SYS(nanosleep), SCMP_SYS(openat),     SCMP_SYS(getcwd),
                             SCMP_SYS(fcntl),     SCMP_SYS(fstat),      SCMP_SYS(newfstatat),
                             SCMP_SYS(statx),     SCMP_SYS(lseek),      SCMP_SYS(ioctl),
                             SCMP_SYS(faccessat), SCMP_SYS(readlinkat), SCMP_SYS(uname),
                             SCMP_SYS(getuid),    SCMP_SYS(geteuid),    SCMP_SYS(sched_getaffinity),
                             SCMP_SYS(prlimit64), SCMP_SYS(tgkill)};

/* The protection is their third argument: executable memory is refused. */
static const int without_exec[] = {SCMP_SYS(mmap), SCMP_SYS(mprotect)};

static int add_calls(scmp_filter_ctx filter, const int *calls, size_t count, uint32_t action)
{
    int result = 0;
    for (size_t i = 0; i < count && result == 0; i++)
        result = seccomp_rule_add(filter, action, calls[i], 0);
    return result;
}

/* Calls of another architecture end the process, as do all that no rule names. */
static int add_rules(scmp_filter_ctx filter)
{
    int result = seccomp_attr_set(filter, SCMP_FLTATR_ACT_BADARCH, SCMP_ACT_KILL_PROCESS);
    if (result == 0) /* errors are those of the kernel */
        result = seccomp_attr_set(filter, SCMP_FLTATR_API_SYSRAWRC, 1);
    if (result == 0)
        result = add_calls(filter, allowed, sizeof allowed / sizeof *allowed, SCMP_ACT_ALLOW);
    if (result == 0)
        result = add_calls(filter, denied, sizeof denied / sizeof *denied, SCMP_ACT_ERRNO(EACCES));
    for (size_t i = 0; i < sizeof without_exec / sizeof *without_exec && result == 0; i++)
        result = seccomp_rule_add(filter, SCMP_ACT_ALLOW, without_exec[i], 1,
                                  SCMP_A2(SCMP_CMP_MASKED_EQ, PROT_EXEC, 0));
    return result;
}

/* Returns 0, or the error as libseccomp has it: negative. */
static int load_filter(void)
{
    scmp_filter_ctx filter = seccomp_init(SCMP_ACT_KILL_PROCESS);
    if (!filter)
        return -ENOSYS;
    int result = add_rules(filter);
    if (result == 0)
        result = seccomp_load(filter);
    seccomp_release(filter);
    return result;
}
#else
static int load_filter(void)
{
    return -ENOSYS;
}
#endif

static fsdp_status forbid_calls(fsdp_error *err)
{
    int result = load_filter();
    if (result == 0)
        return FSDP_OK;
    (void)fsdp_fail_errno(err, -result,
                          FSDP_HDF5_NO_SANDBOX
                          "; HDF5 files of other programs need it; use --sandbox=rlimit to read "
                          "them with resource limits only");
    if (err)
        err->status = FSDP_ERR_REFUSED;
    return FSDP_ERR_REFUSED;
}

/* --- entering the sandbox --------------------------------------------------------------------- */

fsdp_status fsdp_hdf5_sandbox_enter(int *channel, bool limits_only, fsdp_error *err)
{
    FSDP_TRY(keep_channel(channel, err));
    reset_signals();
    if (!set_limits())
        return fsdp_fail_errno(err, errno, "cannot limit the process that reads HDF5");
    return limits_only ? FSDP_OK : forbid_calls(err);
}
