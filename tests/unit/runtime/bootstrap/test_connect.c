/* Connections for data: a rank that cannot connect reports the reason, and connections of other
 * programs delay no rank. */
#include <criterion/criterion.h>
#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "base/core/mem.h"
#include "runtime/comm_shared/transport_shm.h"
#include "runtime/comm_message/p2p_tcp_internal.h"
#include "runtime/bootstrap/socket.h"
#include "statedict/ctl/ctl_backend.h"
#include "tests/support/ranks/rank_sockets.h"

enum { RANKS = 3, FILES = 100, DEADLINE_MS = 10000, SILENT_CONNECTIONS = 2 };

/* The result of each rank. */
typedef struct findings {
    fsdp_error errors[RANKS];
    int64_t waited_ms[RANKS];
    int silent;            /* other programs' connections to rank 0 before rank 1's */
    int files_left[RANKS]; /* that a rank may open; 0: no limit */
} findings;

/* --- TCP -------------------------------------------------------------------------------------- */

/* Fills this thread's table of files up to `left` free entries. */
static void use_up_files(int left)
{
    int last = -1, fd;
    (void)!unshare(CLONE_FILES);
    while ((fd = open("/dev/null", O_RDONLY)) >= 0)
        last = fd;
    while (left-- > 0)
        close(last--);
}

/* Rank 2 can open its listener, but cannot connect to any rank. */
static fsdp_status connect_without_files(void *user, fsdp_ctl *ctl, fsdp_error *err)
{
    findings *found = user;
    int fds[RANKS], rank = fsdp_ctl_rank(ctl);
    for (int i = 0; i < RANKS; i++)
        fds[i] = -1;
    if (rank == 2)
        use_up_files(1);
    int64_t before_ms = fsdp_now_ms();
    fsdp_status status = fsdp_tcp_connect_all(ctl, DEADLINE_MS, fds, err);
    found->waited_ms[rank] = fsdp_now_ms() - before_ms;
    found->errors[rank] = *err;
    for (int i = 0; i < RANKS; i++)
        fsdp_socket_close(&fds[i]);
    return status;
}

Test(connect, a_rank_that_cannot_connect_says_why_to_all_before_the_deadline, .timeout = 60)
{
    findings found = {0};
    fsdp_error err = {0};
    (void)setrlimit(RLIMIT_NOFILE, &(struct rlimit){FILES, FILES});
    cr_expect_neq(run_rank_sockets(RANKS, DEADLINE_MS, connect_without_files, &found, &err),
                  FSDP_OK);
    for (int i = 0; i < RANKS; i++) {
        const char *text = found.errors[i].text;
        cr_expect(
            strstr(text, "rank 0 cannot be reached for data: cannot connect to 127.0.0.1 port"),
            "rank %d: %s", i, text);
        cr_expect(strstr(text, "Too many open files"), "rank %d: %s", i, text);
        cr_expect_eq(found.errors[i].rank, 2);
        cr_expect_lt(found.waited_ms[i], DEADLINE_MS);
    }
}

/* --- memory of other processes ---------------------------------------------------------------- */

/* The name of the socket on which rank 0 listens. It differs from that of rank 1, whose thread calls
 * this, in the number of the rank. 0: it does not exist yet. */
static socklen_t find_rank_0(struct sockaddr_un *name)
{
    for (int fd = 0; fd < 256; fd++) {
        socklen_t length = sizeof *name;
        if (getsockname(fd, (struct sockaddr *)name, &length) == 0 && name->sun_family == AF_UNIX &&
            strncmp(name->sun_path + 1, "fsdp-1-", 7) == 0) {
            name->sun_path[6] = '0';
            return length;
        }
    }
    return 0;
}

static int silent[SILENT_CONNECTIONS];
static int expected, came, sends;
static const fsdp_ctl_ops *real_ops;

/* Two other programs connect to rank 0 before rank 1 reports that it listens, that is, before it can
 * send. */
static fsdp_status send_after_silent(fsdp_ctl *ctl, int to, const void *data, size_t size,
                                     int64_t until_ms, fsdp_error *err)
{
    struct sockaddr_un name;
    sends++;
    for (int i = 0; sends >= 3 && came < expected && i < 2000; i++) {
        socklen_t length = find_rank_0(&name);
        int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
        if (length > 0 && connect(fd, (struct sockaddr *)&name, length) == 0)
            silent[came++] = fd;
        else
            close(fd);
        usleep(1000);
    }
    return real_ops->send(ctl, to, data, size, until_ms, err);
}

static fsdp_status exchange_memory(void *user, fsdp_ctl *ctl, fsdp_error *err)
{
    static fsdp_ctl_ops late_ops;
    findings *found = user;
    int rank = fsdp_ctl_rank(ctl);
    shm_segment own;
    shm_peer peers[2] = {{.process = {-1, 0}}, {.process = {-1, 0}}};
    if (rank == 1 && found->silent > 0) {
        expected = found->silent;
        real_ops = ctl->ops;
        late_ops = *ctl->ops;
        late_ops.send = send_after_silent;
        ctl->ops = &late_ops;
    }
    FSDP_TRY(fsdp_shm_segment_init(2, &own, err));
    int64_t before_ms = fsdp_now_ms();
    if (found->files_left[rank] > 0)
        use_up_files(found->files_left[rank]);
    fsdp_status status = fsdp_shm_connect(ctl, DEADLINE_MS, &own, peers, err);
    found->waited_ms[rank] = fsdp_now_ms() - before_ms;
    for (int i = 0; i < 2; i++) {
        fsdp_shm_segment_release(&peers[i].segment);
        fsdp_process_watch_close(&peers[i].process);
    }
    fsdp_shm_segment_close_fd(&own);
    fsdp_shm_segment_release(&own);
    return status;
}

Test(connect, a_silent_connection_delays_no_rank, .timeout = 60)
{
    findings found = {.silent = 1};
    fsdp_error err = {0};
    cr_assert_eq(fsdp_ctl_run_threads(2, exchange_memory, &found, &err), FSDP_OK, "%s", err.text);
    cr_assert_eq(came, 1);
    for (int i = 0; i < 2; i++)
        cr_expect_lt(found.waited_ms[i], DEADLINE_MS / 2);
    close(silent[0]);
}

/* Rank 0 has files for its listener, the other rank's process, and two connections. */
Test(connect, silent_connections_are_closed_when_no_file_is_left_for_a_rank, .timeout = 60)
{
    findings found = {.silent = SILENT_CONNECTIONS, .files_left = {4}};
    fsdp_error err = {0};
    (void)setrlimit(RLIMIT_NOFILE, &(struct rlimit){FILES, FILES});
    cr_assert_eq(fsdp_ctl_run_threads(2, exchange_memory, &found, &err), FSDP_OK, "%s", err.text);
    cr_assert_eq(came, SILENT_CONNECTIONS);
    for (int i = 0; i < SILENT_CONNECTIONS; i++)
        close(silent[i]);
}

Test(connect, a_rank_without_room_for_the_memory_of_others_says_so_before_the_deadline,
     .timeout = 60)
{
    /* for its listener, the other rank's process, and its connection */
    findings found = {.files_left = {0, 3}};
    fsdp_error err = {0};
    (void)setrlimit(RLIMIT_NOFILE, &(struct rlimit){FILES, FILES});
    cr_expect_eq(fsdp_ctl_run_threads(2, exchange_memory, &found, &err), FSDP_ERR_LIMIT);
    cr_expect_str_eq(err.text, "rank 1: cannot open the memory of rank 0: the limit of open files "
                               "is reached; raise `ulimit -n`");
    for (int i = 0; i < 2; i++)
        cr_expect_lt(found.waited_ms[i], DEADLINE_MS);
}
