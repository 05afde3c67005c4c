/* See ctl_rounds.h. All ranks draw the same numbers, so they make the same calls. */
#include "tests/support/rounds/ctl_rounds.h"

#include "base/core/clock.h"
#include "statedict/ctl/ctl_backend.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* PATIENCE_MS: a rank that comes back in time may still get the processor late. */
enum { BUSY_MS = 300, SHORT_MS = 60, PATIENCE_MS = 60000 };

typedef struct round {
    fsdp_ctl *ctl;
    uint64_t number;
    size_t size;
    int one, other; /* two ranks, perhaps equal */
    unsigned char *mine, *all;
} round;

static uint64_t draw(uint64_t *state)
{
    uint64_t x = *state += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

static unsigned char byte_of(const round *now, int rank, size_t at)
{
    return (unsigned char)(now->number * 31 + (uint64_t)rank * 131 + at * 7 + (at >> 9));
}

static fsdp_status check_part(const round *now, const unsigned char *data, int rank,
                              fsdp_error *err)
{
    for (size_t i = 0; i < now->size; i++) {
        if (data[i] != byte_of(now, rank, i))
            return fsdp_fail(err, FSDP_ERR_INTERNAL,
                             "round %llu: byte %zu of %zu from rank %d is wrong",
                             (unsigned long long)now->number, i, now->size, rank);
    }
    return FSDP_OK;
}

static fsdp_status gather(round *now, fsdp_error *err)
{
    FSDP_TRY(fsdp_ctl_allgather(now->ctl, now->mine, now->size, now->all, err));
    for (int i = 0; i < fsdp_ctl_size(now->ctl); i++)
        FSDP_TRY(check_part(now, now->all + (size_t)i * now->size, i, err));
    return FSDP_OK;
}

static fsdp_status broadcast(round *now, fsdp_error *err)
{
    FSDP_TRY(fsdp_ctl_broadcast(now->ctl, now->one, now->mine, now->size, err));
    return check_part(now, now->mine, now->one, err);
}

static fsdp_status send_between(round *now, fsdp_error *err)
{
    int rank = fsdp_ctl_rank(now->ctl);
    if (now->one == now->other)
        return FSDP_OK;
    if (rank == now->one)
        return fsdp_ctl_send(now->ctl, now->other, now->mine, now->size, err);
    if (rank != now->other)
        return FSDP_OK;
    FSDP_TRY(fsdp_ctl_recv(now->ctl, now->one, now->all, now->size, err));
    return check_part(now, now->all, now->one, err);
}

/* As in a full save with one writer. */
static fsdp_status collect_at_zero(round *now, fsdp_error *err)
{
    if (fsdp_ctl_rank(now->ctl) != 0)
        return fsdp_ctl_send(now->ctl, 0, now->mine, now->size, err);
    for (int i = 1; i < fsdp_ctl_size(now->ctl); i++) {
        FSDP_TRY(fsdp_ctl_recv(now->ctl, i, now->all, now->size, err));
        FSDP_TRY(check_part(now, now->all, i, err));
    }
    return FSDP_OK;
}

/* Ranks one and other fail; all ranks must return the error of the lower one. */
static fsdp_status agree(round *now, fsdp_error *err)
{
    int rank = fsdp_ctl_rank(now->ctl), first = now->one < now->other ? now->one : now->other;
    bool fails = rank == now->one || rank == now->other;
    fsdp_error theirs = {0};
    char text[32];
    if (fails)
        (void)fsdp_fail(&theirs, FSDP_ERR_IO, "I am %d", rank);
    fsdp_status status = fsdp_ctl_agree(now->ctl, fails ? FSDP_ERR_IO : FSDP_OK, &theirs);
    /* With a broken control plane a failing rank returns its own error; the next call reports the break. */
    if (status == FSDP_ERR_PEER || (fails && rank != first && theirs.rank == rank)) {
        FSDP_TRY(fsdp_ctl_barrier(now->ctl, err));
        return fsdp_fail(err, FSDP_ERR_INTERNAL, "'%s', but the next call worked", theirs.text);
    }
    snprintf(text, sizeof text, "I am %d", first);
    if (status != FSDP_ERR_IO || theirs.rank != first || !strstr(theirs.text, text))
        return fsdp_fail(err, FSDP_ERR_INTERNAL, "round %llu: agreed on status %d, '%s'",
                         (unsigned long long)now->number, (int)status, theirs.text);
    return FSDP_OK;
}

static fsdp_status agree_on_success(round *now, fsdp_error *err)
{
    FSDP_TRY(fsdp_ctl_barrier(now->ctl, err));
    return fsdp_ctl_agree(now->ctl, FSDP_OK, err);
}

static fsdp_status run_round(round *now, uint64_t kind, fsdp_error *err)
{
    static fsdp_status (*const kinds[])(round *, fsdp_error *) = {
        gather, broadcast, send_between, collect_at_zero, agree, agree_on_success};
    int rank = fsdp_ctl_rank(now->ctl);
    for (size_t i = 0; i < now->size; i++)
        now->mine[i] = byte_of(now, rank, i);
    return kinds[kind % (sizeof kinds / sizeof *kinds)](now, err);
}

fsdp_status run_ctl_rounds(void *user, fsdp_ctl *ctl, fsdp_error *err)
{
    const ctl_rounds *rounds = user;
    uint64_t state = rounds->seed, n = (uint64_t)fsdp_ctl_size(ctl);
    round now = {.ctl = ctl};
    fsdp_status status = FSDP_OK;
    now.mine = malloc(rounds->max_size + 1);
    now.all = malloc((rounds->max_size + 1) * (size_t)n);
    if (!now.mine || !now.all)
        status = fsdp_fail(err, FSDP_ERR_LIMIT, "no memory for the test");
    for (int i = 0; i < rounds->rounds && status == FSDP_OK; i++) {
        uint64_t kind = draw(&state), large = draw(&state) % 8 == 0 ? rounds->max_size : 300;
        now.number = (uint64_t)i;
        now.size = (size_t)(draw(&state) % (large + 1));
        now.one = (int)(draw(&state) % n);
        now.other = (int)(draw(&state) % n);
        status = run_round(&now, kind, err);
    }
    free(now.mine);
    free(now.all);
    return status;
}

/* context: when the only busy rank ends being busy. */
static int64_t busy_until(void *context, int rank)
{
    return rank == 0 ? *(const int64_t *)context : 0;
}

fsdp_status send_to_busy_rank(void *user, fsdp_ctl *ctl, fsdp_error *err)
{
    const size_t size = 2 * (size_t)FSDP_CTL_WINDOW;
    int64_t until_ms = fsdp_now_ms() + PATIENCE_MS;
    fsdp_status status = FSDP_OK;
    (void)user;
    FSDP_TRY(fsdp_ctl_barrier(ctl, err));
    unsigned char *data = calloc(1, size);
    if (!data)
        return fsdp_fail(err, FSDP_ERR_LIMIT, "no memory for the test");
    if (fsdp_ctl_rank(ctl) == 0) {
        usleep(BUSY_MS * 1000);
        status = fsdp_ctl_recv(ctl, 1, data, size, err);
    } else if (fsdp_ctl_rank(ctl) == 1) {
        fsdp_ctl_set_deadline(ctl, SHORT_MS);
        ctl->observer = (fsdp_ctl_observer){.busy_until = busy_until, .context = &until_ms};
        status = fsdp_ctl_send(ctl, 0, data, size, err);
        ctl->observer = (fsdp_ctl_observer){0};
    }
    free(data);
    return status;
}
