/* The control plane over TCP at its edges: broken peers, full sockets, lost memory, ranks that
 * left. */
#include <criterion/criterion.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/core/mem.h"
#include "runtime/bootstrap/ctl_tcp.h"
#include "runtime/bootstrap/rendezvous.h"
#include "statedict/ctl/ctl_backend.h"
#include "statedict/ctl/ctl_frame.h"
#include "tests/support/ranks/rank_sockets.h"

enum { SHORT_MS = 200 };

/* Rank 0 of 2 whose only peer is the other end of a socket pair. */
static fsdp_ctl *connect_fake(int *peer_out)
{
    int ends[2];
    fsdp_ctl *ctl = NULL;
    fsdp_error err = {0};
    cr_assert_eq(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends), 0);
    fsdp_tcp_parts parts = {.size = 2, .listener = -1, .fds = fsdp_alloc(2, sizeof(int))};
    parts.fds[0] = -1;
    parts.fds[1] = ends[0];
    cr_assert_eq(fsdp_ctl_tcp(&parts, &ctl, &err), FSDP_OK, "%s", err.text);
    fsdp_ctl_set_deadline(ctl, SHORT_MS);
    *peer_out = ends[1];
    return ctl;
}

static fsdp_status receive(fsdp_ctl *ctl, void *data, size_t size, fsdp_error *err)
{
    return ctl->ops->recv(ctl, 1, data, size, fsdp_now_ms() + SHORT_MS, err);
}

static void say(int peer, const void *data, size_t size)
{
    cr_assert_eq(write(peer, data, size), (ssize_t)size);
}

static void say_message(int peer, uint32_t size, const char *text)
{
    say(peer, &size, sizeof size);
    say(peer, text, strlen(text));
}

Test(ctl_tcp, messages_keep_their_bounds_however_they_arrive)
{
    int peer;
    fsdp_ctl *ctl = connect_fake(&peer);
    fsdp_error err = {0};
    char data[16] = "";
    say_message(peer, 3, "ab");
    cr_assert_eq(receive(ctl, data, 3, &err), FSDP_ERR_PEER);
    cr_assert_str_eq(err.text, "");
    say(peer, "c", 1);
    say_message(peer, 2, "de");
    cr_assert_eq(receive(ctl, data, 3, &err), FSDP_OK, "%s", err.text);
    cr_assert_str_eq(data, "abc");
    cr_assert_eq(receive(ctl, data, 1, &err), FSDP_ERR_PEER);
    cr_assert_str_eq(err.text, "rank 1 sent 2 bytes where 1 were expected");
    fsdp_ctl_free(ctl);
    close(peer);
}

Test(ctl_tcp, sizes_that_no_rank_sends_are_refused)
{
    static const uint32_t sizes[] = {0, FSDP_CTL_PIECE + 1, UINT32_MAX};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        int peer;
        fsdp_ctl *ctl = connect_fake(&peer);
        fsdp_error err = {0};
        char data[16];
        say_message(peer, sizes[i], "x");
        cr_assert_eq(receive(ctl, data, 1, &err), FSDP_ERR_PEER);
        cr_assert(strstr(err.text, "rank 1 sent a message of"), "%s", err.text);
        fsdp_ctl_free(ctl);
        close(peer);
    }
}

Test(ctl_tcp, what_a_rank_said_before_it_left_still_arrives)
{
    int peer;
    fsdp_ctl *ctl = connect_fake(&peer);
    fsdp_error err = {0};
    char data[16] = "";
    say_message(peer, 3, "bye");
    close(peer);
    cr_assert_eq(ctl->ops->send(ctl, 1, "x", 1, fsdp_now_ms(), &err), FSDP_ERR_PEER);
    cr_assert_str_eq(err.text, "rank 1 has left");
    cr_assert_eq(receive(ctl, data, 3, &err), FSDP_OK, "%s", err.text);
    cr_assert_str_eq(data, "bye");
    cr_assert_eq(receive(ctl, data, 3, &err), FSDP_ERR_PEER);
    cr_assert_eq(receive(ctl, data, 3, &err), FSDP_ERR_PEER);
    cr_assert_str_eq(err.text, "rank 1 has left");
    fsdp_ctl_free(ctl);
}

/* A message that the deadline interrupted is completed before the next one. */
Test(ctl_tcp, a_stream_stays_whole_when_a_send_runs_out_of_time)
{
    int peer;
    fsdp_ctl *ctl = connect_fake(&peer);
    fsdp_error err = {0};
    size_t size = FSDP_CTL_PIECE, got = 0;
    unsigned char *data = fsdp_alloc(size, 1), *came = fsdp_alloc(2, size);
    memset(data, 7, size);
    cr_assert_eq(ctl->ops->send(ctl, 1, data, size, fsdp_now_ms() + 20, &err), FSDP_ERR_PEER);
    cr_assert_str_eq(err.text, "");
    memset(data, 8, size); /* the caller may overwrite it now */
    while (ctl->ops->send(ctl, 1, "xy", 2, fsdp_now_ms(), &err) != FSDP_OK) {
        ssize_t n = read(peer, came + got, 2 * size - got);
        cr_assert_gt(n, 0);
        got += (size_t)n;
    }
    for (ssize_t n; (n = read(peer, came + got, 2 * size - got)) > 0;)
        got += (size_t)n;
    cr_assert_eq(got, size + 4 + 6);
    for (size_t i = 0; i < size; i++)
        cr_assert_eq(came[4 + i], 7);
    cr_assert_arr_eq(came + got - 6, "\2\0\0\0xy", 6);
    fsdp_free(data);
    fsdp_free(came);
    fsdp_ctl_free(ctl);
    close(peer);
}

/* Rank 1 of 2 begins an allgather, and gives up before its data. why NULL: it ends without reporting
 * that. */
static void give_up_before_data(int peer, size_t size, const char *why)
{
    const frame call = {
        .magic = FRAME_MAGIC, .kind = FRAME_CALL, .call = CALL_ALLGATHER, .size = size, .calls = 1};
    frame data = call, leave = call;
    const uint32_t head_size = sizeof(frame), text_size = FSDP_ERROR_TEXT;
    char text[FSDP_ERROR_TEXT] = "";
    data.kind = FRAME_DATA;
    leave.kind = FRAME_LEAVE;
    leave.status = FSDP_ERR_PEER;
    leave.rank = 1;
    const frame *frames[] = {&call, &data, &leave};
    for (int i = 0; i < 3; i++) {
        say(peer, &head_size, sizeof head_size);
        say(peer, frames[i], sizeof(frame));
    }
    if (!why)
        return;
    snprintf(text, sizeof text, "%s", why);
    say(peer, &text_size, sizeof text_size);
    say(peer, text, sizeof text);
}

Test(ctl_tcp, a_leave_message_where_data_was_expected_is_the_error)
{
    static const size_t sizes[] = {96, 1, sizeof(frame), FSDP_ERROR_TEXT, FSDP_CTL_PIECE};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        int peer;
        fsdp_ctl *ctl = connect_fake(&peer);
        fsdp_error err = {0};
        char *mine = fsdp_alloc(sizes[i], 1), *all = fsdp_alloc(sizes[i], 2);
        give_up_before_data(peer, sizes[i], "rank 1: no memory for its part");
        cr_expect_eq(fsdp_ctl_allgather(ctl, mine, sizes[i], all, &err), FSDP_ERR_PEER);
        cr_expect_str_eq(err.text, "rank 1: no memory for its part", "%zu bytes: %s", sizes[i],
                         err.text);
        cr_expect_eq(err.rank, 1);
        fsdp_free(mine);
        fsdp_free(all);
        fsdp_ctl_free(ctl);
        close(peer);
    }
}

Test(ctl_tcp, a_leave_message_without_its_reason_names_the_rank)
{
    int peer;
    char mine[96] = "", all[2 * 96];
    fsdp_ctl *ctl = connect_fake(&peer);
    fsdp_error err = {0};
    give_up_before_data(peer, sizeof mine, NULL);
    cr_assert_eq(shutdown(peer, SHUT_WR), 0);
    cr_expect_eq(fsdp_ctl_allgather(ctl, mine, sizeof mine, all, &err), FSDP_ERR_PEER);
    cr_expect_str_eq(err.text, "rank 1 gave up without a reason");
    cr_expect_eq(err.rank, 1);
    fsdp_ctl_free(ctl);
    close(peer);
}

Test(ctl_tcp, what_only_looks_like_a_leave_message_is_none)
{
    int peer;
    const frame odd = {.magic = FRAME_MAGIC + 1, .kind = FRAME_LEAVE, .status = FSDP_ERR_PEER};
    const uint32_t size = sizeof odd, text_size = FSDP_ERROR_TEXT;
    const char text[FSDP_ERROR_TEXT] = "no reason of a rank";
    fsdp_ctl *ctl = connect_fake(&peer);
    fsdp_error err = {0};
    say(peer, &size, sizeof size);
    say(peer, &odd, sizeof odd);
    say(peer, &text_size, sizeof text_size);
    say(peer, text, sizeof text);
    close(peer);
    cr_expect_eq(fsdp_ctl_send(ctl, 1, "data", 4, &err), FSDP_ERR_PEER);
    cr_expect_str_eq(err.text, "rank 1 has left during fsdp_ctl_send (localhost:0)");
    fsdp_ctl_free(ctl);
}

/* The first frames had 56 bytes, and later ones 96. */
Test(ctl_tcp, a_rank_of_another_version_is_refused)
{
    static const uint32_t sizes[] = {56, sizeof(frame)};
    const frame old = {.magic = 0x66734332, .kind = FRAME_CALL, .call = CALL_BARRIER, .calls = 1};
    for (int i = 0; i < 4; i++) {
        int peer;
        char byte;
        fsdp_ctl *ctl = connect_fake(&peer);
        fsdp_error err = {0};
        say(peer, &sizes[i % 2], sizeof *sizes);
        say(peer, &old, sizes[i % 2]);
        cr_expect_eq(i < 2 ? fsdp_ctl_barrier(ctl, &err) : fsdp_ctl_recv(ctl, 1, &byte, 1, &err),
                     FSDP_ERR_PEER);
        cr_expect_str_eq(err.text, i < 2 ? "rank 1 runs another version of fsdp (seen in "
                                           "fsdp_ctl_barrier); use one version on all ranks"
                                         : "rank 1 runs another version of fsdp (seen in "
                                           "fsdp_ctl_recv); use one version on all ranks");
        cr_expect_eq(err.rank, 1);
        fsdp_ctl_free(ctl);
        close(peer);
    }
}

/* Messages also go between ranks other than 0, which connect on demand. */
static fsdp_status pass_around(void *user, fsdp_ctl *ctl, fsdp_error *err)
{
    int rank = fsdp_ctl_rank(ctl), n = fsdp_ctl_size(ctl), got = -1;
    (void)user;
    for (int step = 1; step < n; step++) {
        int to = (rank + step) % n, from = (rank + n - step) % n;
        FSDP_TRY(fsdp_ctl_send(ctl, to, &rank, sizeof rank, err));
        FSDP_TRY(fsdp_ctl_recv(ctl, from, &got, sizeof got, err));
        if (got != from)
            return fsdp_fail(err, FSDP_ERR_INTERNAL, "got %d from rank %d", got, from);
    }
    return fsdp_ctl_barrier(ctl, err);
}

Test(ctl_tcp, all_ranks_reach_all_ranks)
{
    fsdp_error err = {0};
    cr_assert_eq(run_rank_sockets(6, 20000, pass_around, NULL, &err), FSDP_OK, "%s", err.text);
}

static fsdp_status send_to_one_who_left(void *user, fsdp_ctl *ctl, fsdp_error *err)
{
    int rank = fsdp_ctl_rank(ctl), value = 0;
    (void)user;
    FSDP_TRY(fsdp_ctl_barrier(ctl, err));
    if (rank == 1)
        return FSDP_OK;
    if (rank == 0)
        return fsdp_ctl_recv(ctl, 2, &value, sizeof value, err);
    usleep(50000);
    fsdp_error why = {0};
    fsdp_status status = fsdp_ctl_send(ctl, 1, &value, sizeof value, &why);
    if (status != FSDP_ERR_PEER || !strstr(why.text, "rank 1 has left"))
        return fsdp_fail(err, FSDP_ERR_INTERNAL, "%d, %s", (int)status, why.text);
    return fsdp_fail(err, FSDP_ERR_CANCELLED, "as expected");
}

Test(ctl_tcp, a_rank_that_left_is_named_by_one_who_connects_late)
{
    fsdp_error err = {0};
    cr_assert_eq(run_rank_sockets(3, 2000, send_to_one_who_left, NULL, &err), FSDP_ERR_CANCELLED,
                 "%s", err.text);
}

/* --- no file is left -------------------------------------------------------------------------- */

/* A listener with a connection in its backlog. */
static int listen_with_backlog(int *waiting_out)
{
    int listener = -1;
    fsdp_error err = {0};
    cr_assert_eq(fsdp_socket_listen(FSDP_LOOPBACK, 0, &listener, &err), FSDP_OK, "%s", err.text);
    cr_assert_eq(fsdp_socket_connect(FSDP_LOOPBACK, fsdp_socket_port(listener),
                                     fsdp_now_ms() + 10000, waiting_out, &err),
                 FSDP_OK, "%s", err.text);
    return listener;
}

static void allow_no_more_files(void)
{
    struct rlimit files;
    int next = dup(STDERR_FILENO);
    close(next);
    cr_assert_eq(getrlimit(RLIMIT_NOFILE, &files), 0);
    files.rlim_cur = (rlim_t)next;
    cr_assert_eq(setrlimit(RLIMIT_NOFILE, &files), 0);
}

/* Rank 1 of 3 waits for the call of rank 2. */
Test(ctl_tcp, a_rank_that_can_accept_no_connection_waits_no_longer_than_its_deadline, .timeout = 60)
{
    int ends[2], waiting = -1;
    char byte;
    fsdp_ctl *ctl = NULL;
    fsdp_error err = {0};
    cr_assert_eq(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends), 0);
    fsdp_tcp_parts parts = {.rank = 1,
                            .size = 3,
                            .listener = listen_with_backlog(&waiting),
                            .fds = fsdp_alloc(1, sizeof(int)),
                            .addresses = fsdp_alloc(3, sizeof(fsdp_rank_address))};
    parts.fds[0] = ends[0];
    cr_assert_eq(fsdp_ctl_tcp(&parts, &ctl, &err), FSDP_OK, "%s", err.text);
    allow_no_more_files();
    cr_expect_eq(ctl->ops->recv(ctl, 2, &byte, 1, fsdp_now_ms() + SHORT_MS, &err), FSDP_ERR_LIMIT);
    cr_expect(strstr(err.text, "the limit of open files is reached"), "%s", err.text);
    fsdp_ctl_free(ctl);
    close(waiting);
    close(ends[1]);
}

Test(ctl_tcp, a_rendezvous_that_lacks_files_fails_at_once, .timeout = 30)
{
    int waiting = -1;
    fsdp_ctl *ctl = NULL;
    fsdp_error err = {0};
    const fsdp_rendezvous_spec spec = {.size = 2,
                                       .job = "test",
                                       .is_one_host = true,
                                       .deadline_ms = 60000,
                                       .listener = listen_with_backlog(&waiting)};
    allow_no_more_files();
    cr_expect_eq(fsdp_rendezvous(&spec, &ctl, &err), FSDP_ERR_LIMIT);
    cr_expect(strstr(err.text, "ulimit -n"), "%s", err.text);
    close(waiting);
}

static fsdp_status barrier_only(void *user, fsdp_ctl *ctl, fsdp_error *err)
{
    (void)user;
    return fsdp_ctl_barrier(ctl, err);
}

Test(ctl_tcp, lost_memory_at_any_point_is_an_error_and_no_hang)
{
    bool has_failed = true;
    for (int64_t n = 0; has_failed; n++) {
        fsdp_error err = {0};
        (void)fsdp_mem_fail_after(n, false);
        fsdp_status status = run_rank_sockets(2, 300, barrier_only, NULL, &err);
        has_failed = fsdp_mem_fail_after(-1, false) > n;
        cr_assert_eq(status == FSDP_OK, !has_failed, "allocation %d: %s", (int)n, err.text);
        cr_assert(status == FSDP_OK || status == FSDP_ERR_LIMIT, "%s", err.text);
    }
}
