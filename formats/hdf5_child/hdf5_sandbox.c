/*
 * The sandbox of the child that reads HDF5 files of other programs. libhdf5 has had dozens of
 * memory errors on crafted files. A child that a file takes over can compute and send to its
 * parent, which trusts nothing (hdf5_session.c, hdf5_listing.c); it has no file, and can open
 * none and start no process.
 */
#include "formats/hdf5_child/hdf5_sandbox.h"

#include <errno.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/prctl.h>
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
    if (close_range(STDIN_FILENO + 1, ~0U, 0) == 0)
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

void fsdp_hdf5_sandbox_extend(pid_t child, int64_t memory)
{
    clockid_t clock;
    struct timespec used;
    struct rlimit limit;
    if (clock_getcpuclockid(child, &clock) == 0 && clock_gettime(clock, &used) == 0 &&
        prlimit(child, RLIMIT_CPU, NULL, &limit) == 0) {
        rlim_t seconds = (rlim_t)used.tv_sec + FSDP_HDF5_CPU_SECONDS + 1;
        limit.rlim_cur = limit.rlim_max < seconds ? limit.rlim_max : seconds;
        (void)prlimit(child, RLIMIT_CPU, &limit, NULL);
    }
    if (memory > 0 && prlimit(child, RLIMIT_AS, NULL, &limit) == 0) {
        rlim_t more = limit.rlim_max - limit.rlim_cur;
        limit.rlim_cur += more < (rlim_t)memory ? more : (rlim_t)memory;
        (void)prlimit(child, RLIMIT_AS, &limit, NULL);
    }
}

/* --- system calls ----------------------------------------------------------------------------- */

#if defined(__x86_64__)
enum { KNOWN_ARCH = 1 };
static const uint32_t arch = AUDIT_ARCH_X86_64;
#elif defined(__aarch64__)
enum { KNOWN_ARCH = 1 };
static const uint32_t arch = AUDIT_ARCH_AARCH64;
#else
enum { KNOWN_ARCH = 0 };
static const uint32_t arch = 0;
#endif

/* System calls for computing and messages. */
static const int allowed[] = {SYS_read,         SYS_write,        SYS_sendto,
                              SYS_recvfrom,     SYS_sendmsg,      SYS_recvmsg,
                              SYS_munmap,       SYS_mremap,       SYS_brk,
                              SYS_madvise,      SYS_futex,        SYS_clock_gettime,
                              SYS_clock_getres, SYS_gettimeofday, SYS_exit,
                              SYS_exit_group,   SYS_rt_sigreturn, SYS_rt_sigprocmask,
                              SYS_rt_sigaction, SYS_sigaltstack,  SYS_restart_syscall,
                              SYS_sched_yield,  SYS_getpid,       SYS_gettid,
                              SYS_getrandom,    SYS_sysinfo,      SYS_close};

/* Calls that libraries try and can do without: they open some files, and libhdf5 sleeps before
 * it reads a checksum again. */
static const int denied[] = {
#ifdef SYS_open
    SYS_open,
    SYS_stat,
    SYS_lstat,
    SYS_access,
    SYS_readlink,
#endif
    SYS_clock_nanosleep,
    SYS_nanosleep,
    SYS_openat,
    SYS_getcwd,
    SYS_fcntl,
    SYS_fstat,
    SYS_newfstatat,
    SYS_statx,
    SYS_lseek,
    SYS_ioctl,
    SYS_faccessat,
    SYS_readlinkat,
    SYS_uname,
    SYS_getuid,
    SYS_geteuid,
    SYS_sched_getaffinity,
    SYS_prlimit64,
    SYS_tgkill};

/* Executable memory is refused. */
static const int without_exec[] = {SYS_mmap, SYS_mprotect};

enum { MOST_STATEMENTS = 160 };

typedef struct filter_program {
    struct sock_filter code[MOST_STATEMENTS];
    unsigned short size;
} filter_program;

static void put_statement(filter_program *program, unsigned short code, uint32_t value)
{
    program->code[program->size++] = (struct sock_filter)BPF_STMT(code, value);
}

/* Skips the next `skip` statements unless the loaded word is `value`. */
static void put_unless_equal(filter_program *program, uint32_t value, uint8_t skip)
{
    program->code[program->size++] =
        (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, value, 0, skip);
}

static void put_calls(filter_program *program, const int *calls, size_t count, uint32_t answer)
{
    for (size_t i = 0; i < count; i++) {
        put_unless_equal(program, (uint32_t)calls[i], 1);
        put_statement(program, BPF_RET | BPF_K, answer);
    }
}

/* Both calls have the protection as third argument. */
static void put_without_exec(filter_program *program)
{
    for (size_t i = 0; i < sizeof without_exec / sizeof without_exec[0]; i++) {
        put_unless_equal(program, (uint32_t)without_exec[i], 4);
        put_statement(program, BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args[2]));
        program->code[program->size++] =
            (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JSET | BPF_K, PROT_EXEC, 0, 1);
        put_statement(program, BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS);
        put_statement(program, BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
    }
}

static void put_program(filter_program *program)
{
    put_statement(program, BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, arch));
    program->code[program->size++] =
        (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, arch, 1, 0);
    put_statement(program, BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS);
    put_statement(program, BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr));
    put_calls(program, allowed, sizeof allowed / sizeof allowed[0], SECCOMP_RET_ALLOW);
    put_calls(program, denied, sizeof denied / sizeof denied[0], SECCOMP_RET_ERRNO | EACCES);
    put_without_exec(program);
    put_statement(program, BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS);
}

_Static_assert(2 * (sizeof allowed + sizeof denied) / sizeof(int) + 15 <= MOST_STATEMENTS,
               "the filter has room for all calls");

static fsdp_status forbid_calls(fsdp_error *err)
{
    static filter_program program;
    int reason = ENOSYS;
    if (KNOWN_ARCH) {
        put_program(&program);
        struct sock_fprog filter = {.len = program.size, .filter = program.code};
        if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
            prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) == 0)
            return FSDP_OK;
        reason = errno;
    }
    (void)fsdp_fail_errno(err, reason,
                          FSDP_HDF5_NO_SANDBOX
                          ", behind which HDF5 files of other programs are "
                          "read; --sandbox=rlimit reads them behind resource limits only");
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

void fsdp_hdf5_sandbox_end(void)
{
    for (;;)
        _exit(0);
}
