/* Ranks that another program started connect by the address of rank 0's listener. */
#include <criterion/criterion.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "runtime/bootstrap/socket.h"
#include <fsdp/connect.h>

enum { RANKS = 3, DEADLINE_MS = 20000, SHORT_MS = 1500 };

typedef struct rank {
    fsdp_connect_opts opts;
    fsdp_status status;
    fsdp_error err;
    int all[RANKS];
} rank;

static int listen_anywhere(int *port_out)
{
    int fd = -1;
    fsdp_error err = {0};
    cr_assert_eq(fsdp_socket_listen("127.0.0.1", 0, &fd, &err), FSDP_OK, "%s", err.text);
    *port_out = fsdp_socket_port(fd);
    return fd;
}

/* Connects, and gathers ten times the rank. */
static void *run_rank(void *context)
{
    rank *mine = context;
    fsdp_ctl *ctl = NULL;
    int number = 10 * mine->opts.rank;
    mine->status = fsdp_ctl_connect(&mine->opts, &ctl, &mine->err);
    if (mine->status == FSDP_OK)
        mine->status = fsdp_ctl_allgather(ctl, &number, sizeof number, mine->all, &mine->err);
    fsdp_ctl_free(ctl);
    return NULL;
}

static void run_ranks(rank *ranks, int count)
{
    pthread_t threads[RANKS];
    for (int i = 0; i < count; i++)
        cr_assert_eq(pthread_create(&threads[i], NULL, run_rank, &ranks[i]), 0);
    for (int i = 0; i < count; i++)
        pthread_join(threads[i], NULL);
}

static void init_ranks(rank *ranks, int deadline_ms)
{
    int port, fd = listen_anywhere(&port);
    for (int i = 0; i < RANKS; i++)
        ranks[i].opts = (fsdp_connect_opts){.rank = i,
                                            .size = RANKS,
                                            .job = "job-1",
                                            .listener = fd,
                                            .host = "127.0.0.1",
                                            .port = port,
                                            .deadline_ms = deadline_ms};
}

Test(ctl_connect, ranks_connect_and_gather, .timeout = 60)
{
    rank ranks[RANKS] = {0};
    init_ranks(ranks, DEADLINE_MS);
    run_ranks(ranks, RANKS);
    for (int i = 0; i < RANKS; i++) {
        cr_expect_eq(ranks[i].status, FSDP_OK, "%s", ranks[i].err.text);
        for (int j = 0; j < RANKS; j++)
            cr_expect_eq(ranks[i].all[j], 10 * j);
    }
}

Test(ctl_connect, a_rank_that_does_not_come_is_named, .timeout = 60)
{
    rank ranks[RANKS] = {0};
    init_ranks(ranks, SHORT_MS);
    run_ranks(ranks, RANKS - 1);
    for (int i = 0; i < RANKS - 1; i++) {
        cr_expect_eq(ranks[i].status, FSDP_ERR_PEER);
        cr_expect(strstr(ranks[i].err.text, "2"), "%s", ranks[i].err.text);
    }
}

Test(ctl_connect, a_rank_of_another_job_is_refused, .timeout = 60)
{
    rank ranks[RANKS] = {0};
    init_ranks(ranks, SHORT_MS);
    ranks[2].opts.job = "job-2";
    run_ranks(ranks, RANKS);
    cr_expect_eq(ranks[0].status, FSDP_ERR_PEER, "%s", ranks[0].err.text);
    cr_expect_eq(ranks[1].status, FSDP_ERR_PEER, "%s", ranks[1].err.text);
    cr_expect(strstr(ranks[2].err.text, "another job"), "%s", ranks[2].err.text);
}

Test(ctl_connect, one_rank_needs_no_address, .timeout = 60)
{
    fsdp_ctl *ctl = NULL;
    fsdp_error err = {0};
    fsdp_connect_opts opts = {.size = 1, .job = "alone", .listener = -1};
    cr_assert_eq(fsdp_ctl_connect(&opts, &ctl, &err), FSDP_OK, "%s", err.text);
    cr_expect_eq(fsdp_ctl_size(ctl), 1);
    fsdp_ctl_free(ctl);
}

Test(ctl_connect, wrong_options_are_named_and_the_listener_is_closed)
{
    static const struct {
        fsdp_connect_opts opts;
        const char *word;
    } cases[] = {{{.size = 2, .job = ""}, "job"},
                 {{.size = 0, .job = "j"}, "size"},
                 {{.rank = 2, .size = 2, .job = "j"}, "rank"},
                 {{.rank = 1, .size = 2, .job = "j", .port = 5}, "host"},
                 {{.rank = 1, .size = 2, .job = "j", .host = "a"}, "port"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        fsdp_ctl *ctl = NULL;
        fsdp_error err = {0};
        int port;
        fsdp_connect_opts opts = cases[i].opts;
        opts.listener = listen_anywhere(&port);
        cr_expect_eq(fsdp_ctl_connect(&opts, &ctl, &err), FSDP_ERR_USAGE);
        cr_expect(strstr(err.text, cases[i].word), "%s", err.text);
        cr_expect_null(ctl);
        cr_expect_eq(close(opts.listener), opts.rank == 0 ? -1 : 0);
    }
}
