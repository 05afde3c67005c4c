/*
 * Peers: programs of other libraries that do the same work, in turns with ours. Each of a peer's ranks
 * reads its commands from a named pipe, since a rank that waited for a message of another rank would
 * spin and disturb our measurement. See bench.h.
 */
#include "tests/bench/rows.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

enum { LOOK_MS = 200, PATIENCE_MS = 300000, END_MS = 10000, LINE = 120 };

struct bench_peer {
    char dir[BENCH_PATH];
    char name[BENCH_PATH];
    pid_t process;
    int ranks, done;
    int *go;
};

/* --- its pipes -------------------------------------------------------------------------------- */

/* Opens for reading and writing, so that open does not block; when this process ends the peer reads EOF. */
static int make_pipe(const bench_peer *peer, const char *name)
{
    char path[BENCH_PATH];
    bench_path(path, peer->dir, name);
    return mkfifo(path, 0600) == 0 ? open(path, O_RDWR | O_CLOEXEC | O_NONBLOCK) : -1;
}

static fsdp_status make_pipes(bench_peer *peer, fsdp_error *err)
{
    const char *place = getenv("TMPDIR");
    char name[32];
    bench_path(peer->dir, place && place[0] ? place : "/tmp", "fsdp-bench-XXXXXX");
    if (!mkdtemp(peer->dir)) {
        peer->dir[0] = '\0';
        return fsdp_fail_errno(err, errno, "cannot make a directory for the pipes of a peer");
    }
    bool made = (peer->done = make_pipe(peer, "done")) >= 0;
    for (int i = 0; i < peer->ranks && made; i++) {
        snprintf(name, sizeof name, "go-%d", i);
        made = (peer->go[i] = make_pipe(peer, name)) >= 0;
    }
    return made ? FSDP_OK : fsdp_fail_errno(err, errno, "cannot make pipes in '%s'", peer->dir);
}

/* --- commands and answers --------------------------------------------------------------------- */

static fsdp_status read_answer(bench_peer *peer, char *line, fsdp_error *err)
{
    size_t size = 0;
    struct pollfd look = {.fd = peer->done, .events = POLLIN};
    for (int waited_ms = 0; waited_ms < PATIENCE_MS && size < LINE - 1;) {
        ssize_t n =
            poll(&look, 1, LOOK_MS) > 0 ? read(peer->done, line + size, LINE - 1 - size) : 0;
        if (n > 0)
            size += (size_t)n;
        line[size] = '\0';
        if (size > 0 && line[size - 1] == '\n')
            return FSDP_OK;
        FSDP_TRY(cli_check_stop(err));
        if (n <= 0 && waitpid(peer->process, NULL, WNOHANG) == peer->process) {
            peer->process = 0;
            return fsdp_fail(err, FSDP_ERR_IO, "'%s' ended early", peer->name);
        }
        waited_ms += n <= 0 ? LOOK_MS : 0;
    }
    return fsdp_fail(err, FSDP_ERR_IO, "'%s' does not answer", peer->name);
}

static bool send_line(const bench_peer *peer, const char *line)
{
    bool sent = true;
    for (int i = 0; i < peer->ranks; i++)
        sent &= peer->go[i] >= 0 && write(peer->go[i], line, strlen(line)) > 0;
    return sent;
}

fsdp_status bench_peer_ask(bench_peer *peer, const char *line, bench_times *times, fsdp_error *err)
{
    char answer[LINE];
    double seconds, cpu;
    long long peak_kib = 0;
    if (!send_line(peer, line))
        return fsdp_fail_errno(err, errno, "cannot write to '%s'", peer->name);
    FSDP_TRY(read_answer(peer, answer, err));
    if (sscanf(answer, "%lf %lf %lld", &seconds, &cpu, &peak_kib) < 2)
        return fsdp_fail(err, FSDP_ERR_USAGE, "'%s' cannot do %.*s", peer->name,
                         (int)strcspn(line, "\n"), line);
    times->peak_kib = peak_kib > times->peak_kib ? peak_kib : times->peak_kib;
    if (times->count < BENCH_MAX_ROUNDS) {
        times->cpu[times->count] = cpu;
        times->seconds[times->count++] = seconds;
    }
    return FSDP_OK;
}

/* --- its process -----------------------------------------------------------------------------  */

/* Its standard output goes to our standard error. */
_Noreturn static void become_peer(const bench_peer *peer, char *const *argv)
{
    char *words[16], ranks[16];
    int n = 0;
    while (argv[n] && n < 13) {
        words[n] = argv[n];
        n++;
    }
    snprintf(ranks, sizeof ranks, "%d", peer->ranks);
    words[n++] = (char *)peer->dir;
    words[n++] = ranks;
    words[n] = NULL;
    dup2(STDERR_FILENO, STDOUT_FILENO);
    setenv("OMPI_ALLOW_RUN_AS_ROOT", "1", 0);
    setenv("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1", 0);
    execvp(words[0], words);
    _exit(127);
}

fsdp_status bench_peer_start(char *const *argv, int ranks, bench_peer **peer_out, fsdp_error *err)
{
    char ready[LINE];
    bench_peer *peer = calloc(1, sizeof *peer);
    int *go = calloc((size_t)ranks, sizeof *go);
    if (!peer || !go) {
        free(peer);
        free(go);
        return fsdp_fail(err, FSDP_ERR_LIMIT, "out of memory");
    }
    peer->ranks = ranks;
    peer->go = go;
    peer->done = -1;
    memset(go, -1, (size_t)ranks * sizeof *go);
    for (int i = 0; argv[i]; i++)
        if (strchr(argv[i], '/')) /* the last one with a place is the program that matters */
            snprintf(peer->name, sizeof peer->name, "%s", argv[i]);
    fflush(NULL);
    fsdp_status st = make_pipes(peer, err);
    if (st == FSDP_OK && (peer->process = fork()) == 0)
        become_peer(peer, argv);
    if (st == FSDP_OK && peer->process < 0)
        st = fsdp_fail_errno(err, errno, "cannot start '%s'", peer->name);
    if (st == FSDP_OK)
        st = read_answer(peer, ready, err);
    if (st == FSDP_OK)
        *peer_out = peer;
    else
        bench_peer_stop(peer);
    return st;
}

/* Waits until the peer ends; kills it after END_MS, or at once after a signal. */
static void await_end(const bench_peer *peer)
{
    bool ended = false;
    int patience_ms = cli_stopped() ? 0 : END_MS;
    for (int waited_ms = 0; !ended && waited_ms < patience_ms; waited_ms += LOOK_MS) {
        ended = waitpid(peer->process, NULL, WNOHANG) == peer->process;
        if (!ended)
            poll(NULL, 0, LOOK_MS);
    }
    if (ended)
        return;
    kill(peer->process, SIGTERM);
    waitpid(peer->process, NULL, 0);
}

void bench_peer_stop(bench_peer *peer)
{
    if (!peer)
        return;
    if (peer->process > 0) {
        (void)send_line(peer, "end\n");
        await_end(peer);
    }
    for (int i = 0; i < peer->ranks; i++)
        if (peer->go[i] >= 0)
            close(peer->go[i]);
    if (peer->done >= 0)
        close(peer->done);
    if (peer->dir[0])
        (void)!bench_remove(peer->dir, NULL);
    free(peer->go);
    free(peer);
}

void bench_find_peer(const char *name, char *path_out)
{
    char program[BENCH_PATH - 40];
    ssize_t size = readlink("/proc/self/exe", program, sizeof program - 1);
    program[size > 0 ? size : 0] = '\0';
    char *slash = strrchr(program, '/');
    if (slash)
        *slash = '\0';
    snprintf(path_out, BENCH_PATH, "%s/%s", program, name);
}
