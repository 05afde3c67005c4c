/* The lease: one holder at a time, when processes die and when clocks jump. */
#include "statedict/commit/lease_internal.h"

#include "base/io/process.h"
#include "tests/support/disk/io_fault.h"
#include "tests/support/disk/io_sim.h"
#include "base/core/mem.h"

#include <criterion/criterion.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static char run[64];

/* The process and the clock of every disk here; `disk` is the file system with that host. */
static fsdp_host host;
static fsdp_io disk;

/* self NULL: the calling process. */
static void play(const fsdp_process *self, int64_t clock_offset)
{
    static fsdp_process played;
    if (self)
        played = *self;
    host = (fsdp_host){.self = self ? &played : NULL, .clock_offset = clock_offset};
}

static fsdp_io *make_sim(void)
{
    fsdp_io *sim;
    cr_assert_eq(fsdp_sim_create(0, &sim, NULL), FSDP_OK);
    cr_assert_eq(fsdp_io_mkdir(sim, "/run", NULL), FSDP_OK);
    sim->host = &host;
    return sim;
}

static void make_run(void)
{
    strcpy(run, "/tmp/fsdp-lease-XXXXXX");
    cr_assert_not_null(mkdtemp(run));
    play(NULL, 0);
    disk = *fsdp_io_posix();
    disk.host = &host;
}

static void remove_run(void)
{
    (void)!fsdp_io_remove_tree(NULL, run, NULL);
}

TestSuite(lease, .init = make_run, .fini = remove_run);

static fsdp_lease *must_take(void)
{
    fsdp_lease *lease;
    fsdp_error err = {0};
    cr_assert_eq(fsdp_lease_take(&disk, run, &lease, &err), FSDP_OK, "%s", err.text);
    return lease;
}

static void must_be_held(const char *words)
{
    fsdp_lease *lease;
    fsdp_error err = {0};
    cr_assert_eq(fsdp_lease_take(&disk, run, &lease, &err), FSDP_ERR_EXISTS);
    cr_assert_null(lease);
    cr_assert(strstr(err.text, words), "%s", err.text);
    cr_assert(fsdp_lease_is_held(&disk, run));
}

static int count_names(void *user, const char *name)
{
    (void)name;
    ++*(int *)user;
    return 0;
}

static int names_in_run(void)
{
    int n = 0;
    cr_assert_eq(fsdp_io_posix()->ops->list(fsdp_io_posix(), run, count_names, &n), 0);
    return n;
}

static void write_lock(const char *text)
{
    char path[100];
    snprintf(path, sizeof path, "%s/.lock", run);
    FILE *file = fopen(path, "w");
    cr_assert_not_null(file);
    fputs(text, file);
    fclose(file);
}

Test(lease, is_taken_refreshed_and_given_back)
{
    cr_assert_not(fsdp_lease_is_held(&disk, run));
    fsdp_lease *lease = must_take();
    char pid[40];
    snprintf(pid, sizeof pid, "process %d ", (int)getpid());
    must_be_held(pid);
    cr_assert_eq(names_in_run(), 1);
    cr_assert_eq(fsdp_lease_refresh(lease, NULL), FSDP_OK);
    cr_assert_eq(fsdp_lease_refresh(lease, NULL), FSDP_OK);
    must_be_held(pid);
    fsdp_lease_release(lease);
    cr_assert_eq(names_in_run(), 0);
    fsdp_lease_release(must_take());
    fsdp_lease_release(NULL);
}

Test(lease, a_run_that_is_no_directory_is_said_so)
{
    fsdp_lease *lease;
    fsdp_error err = {0};
    cr_assert_eq(fsdp_lease_take(&disk, "/tmp/no-such-run/x", &lease, &err), FSDP_ERR_NOT_FOUND);
    cr_assert(strstr(err.text, "/tmp/no-such-run/x"), "%s", err.text);
    cr_assert_eq(fsdp_lease_take(&disk, "/etc/hostname", &lease, &err), FSDP_ERR_NOT_FOUND);
}

/* --- live processes --- */

static fsdp_process self(void)
{
    fsdp_process process;
    fsdp_process_self(NULL, &process);
    cr_assert_gt(process.start, 0);
    return process;
}

/* Leaves a lease of another process that is never released. */
static void leave_lease_of(fsdp_process process)
{
    play(&process, 0);
    fsdp_lease_forget(must_take());
    play(NULL, 0);
}

Test(lease, of_an_ended_process_is_taken_over_at_once)
{
    pid_t child = fork();
    if (child == 0) {
        fsdp_lease *lease;
        _exit(fsdp_lease_take(&disk, run, &lease, NULL) == FSDP_OK ? 0 : 1);
    }
    /* not waited for yet: a zombie does not hold the lease */
    siginfo_t info;
    cr_assert_eq(waitid(P_PID, (id_t)child, &info, WEXITED | WNOWAIT), 0);
    cr_assert_eq(info.si_status, 0);
    fsdp_lease_release(must_take());
    waitpid(child, NULL, 0);
}

Test(lease, of_a_reused_pid_is_taken_over_at_once)
{
    fsdp_process process = self();
    process.start -= 1;
    leave_lease_of(process);
    fsdp_lease_release(must_take());
    process.pid = 1;
    leave_lease_of(process);
    fsdp_lease_release(must_take());
}

Test(lease, of_a_living_process_is_kept_even_with_an_old_clock)
{
    int ready[2];
    cr_assert_eq(pipe(ready), 0);
    pid_t child = fork();
    if (child == 0) {
        fsdp_lease *lease;
        char c = fsdp_lease_take(&disk, run, &lease, NULL) == FSDP_OK ? 'y' : 'n';
        if (write(ready[1], &c, 1) == 1)
            pause();
        _exit(0);
    }
    char c = 0;
    cr_assert_eq(read(ready[0], &c, 1), 1);
    cr_assert_eq(c, 'y');
    char words[40];
    snprintf(words, sizeof words, "process %d ", (int)child);
    must_be_held(words);
    must_be_held("the run is free when it ends");
    kill(child, SIGKILL);
    waitpid(child, NULL, 0);
    fsdp_lease_release(must_take());
}

Test(lease, of_another_host_boot_or_pid_space_ends_when_it_expires)
{
    for (int i = 0; i < 3; i++) {
        fsdp_process process = self();
        process.pid = 999999999;
        strcpy(i == 0 ? process.host : i == 1 ? process.boot : process.pid_space, "elsewhere");
        leave_lease_of(process);
        must_be_held("process 999999999 on host");
        play(NULL, FSDP_LEASE_SECONDS - 20);
        must_be_held("process 999999999 on host");
        play(NULL, FSDP_LEASE_SECONDS + 20);
        cr_assert_not(fsdp_lease_is_held(&disk, run));
        fsdp_lease_release(must_take());
        play(NULL, 0);
    }
}

Test(lease, a_refresh_keeps_it_longer)
{
    fsdp_process process = self();
    strcpy(process.host, "elsewhere");
    play(&process, 0);
    fsdp_lease *lease = must_take();
    play(&process, FSDP_LEASE_SECONDS - 20);
    cr_assert_eq(fsdp_lease_refresh(lease, NULL), FSDP_OK);
    play(NULL, FSDP_LEASE_SECONDS + 20);
    must_be_held("elsewhere");
    fsdp_lease_release(lease);
    cr_assert_eq(names_in_run(), 0);
}

Test(lease, a_holder_that_slept_too_long_learns_that_it_lost)
{
    fsdp_process process = self();
    strcpy(process.host, "elsewhere");
    play(&process, 0);
    fsdp_lease *sleeper = must_take();
    play(NULL, FSDP_LEASE_SECONDS + 20);
    fsdp_lease *other = must_take();
    fsdp_error err = {0};
    cr_assert_eq(fsdp_lease_refresh(sleeper, &err), FSDP_ERR_EXISTS);
    char words[100];
    snprintf(words, sizeof words, "is lost to process %d on host", (int)getpid());
    cr_assert(strstr(err.text, words), "%s", err.text);
    fsdp_lease_release(sleeper);
    must_be_held("process");
    cr_assert_eq(fsdp_lease_refresh(other, NULL), FSDP_OK);
    fsdp_lease_release(other);
}

Test(lease, written_by_a_clock_that_jumped_ends_after_its_file_aged)
{
    fsdp_process process = self();
    strcpy(process.host, "elsewhere");
    play(&process, 1000000000);
    fsdp_lease_forget(must_take());
    play(NULL, 0);
    must_be_held("elsewhere");
    play(NULL, FSDP_LEASE_SECONDS + 20);
    fsdp_lease_release(must_take());
}

/* After a power cut the next save comes at once: it waits no longer than for a writer. */
Test(lease, a_text_of_ours_that_was_cut_short_is_soon_taken_over)
{
    const char *const texts[] = {"", "{", "{\n\"host\": \"node3\",\n\"boot"};
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        write_lock(texts[i]);
        must_be_held("is truncated; it is taken over 3 s after the last write");
        play(NULL, 3);
        fsdp_lease_release(must_take());
        play(NULL, 0);
    }
}

/* A power cut leaves zeros of a file that was not synced. */
Test(lease, zeros_are_a_text_that_was_cut_short)
{
    char path[100];
    write_lock("");
    snprintf(path, sizeof path, "%s/.lock", run);
    cr_assert_eq(truncate(path, 300), 0);
    must_be_held("is truncated");
    play(NULL, 3);
    fsdp_lease_release(must_take());
}

Test(lease, what_another_program_or_version_wrote_is_never_taken_over)
{
    const char *const texts[] = {"garbage", "4711\n", "{\"host\": 5}", "{}",
                                 "{\n\"host\": \"node3\",\n\"epoch\": 7\n}\n"};
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        write_lock(texts[i]);
        must_be_held("remove that file");
        play(NULL, 1000 * FSDP_LEASE_SECONDS);
        must_be_held("is not a lease that this fsdp can read");
        play(NULL, 0);
    }
}

static void check_foreign(const char *what)
{
    fsdp_lease *lease;
    fsdp_error err = {0};
    cr_assert_eq(fsdp_lease_await(&disk, run, NULL, &lease, &err), FSDP_ERR_EXISTS, "%s", what);
    cr_assert(strstr(err.text, "may be in use") && strstr(err.text, "remove that file"), "%s: %s",
              what, err.text);
    cr_assert(fsdp_lease_is_held(&disk, run), "%s", what);
}

/* Such a file is not waited for, because it would stay. */
Test(lease, whatever_else_stands_in_its_place_is_told_alike_and_left_alone, .timeout = 4)
{
    char path[100], other[100];
    snprintf(path, sizeof path, "%s/.lock", run);
    snprintf(other, sizeof other, "%s/other", run);
    write_lock("x");
    cr_assert_eq(truncate(path, 100000), 0);
    check_foreign("100,000 bytes");
    cr_assert_eq(truncate(path, 0), 0);
    FILE *file = fopen(path, "w");
    for (int i = 255; i >= 0; i--)
        fputc(i, file);
    fclose(file);
    check_foreign("binary");
    cr_assert_eq(unlink(path), 0);
    cr_assert_eq(mkdir(path, 0777), 0);
    check_foreign("a directory");
    cr_assert_eq(rmdir(path), 0);
    cr_assert_eq(symlink("other", path), 0);
    check_foreign("a link to nothing");
    cr_assert_eq(mkdir(other, 0777), 0);
    check_foreign("a link to a directory");
    cr_assert_eq(rmdir(other), 0);
    cr_assert_eq(unlink(path), 0);
    cr_assert_eq(mkfifo(path, 0666), 0);
    check_foreign("a pipe");
}

/* --- waiting --- */

typedef struct talk {
    int notices, progress, stop_after;
    char text[1000];
} talk;

static void take_notice(void *user, const char *text)
{
    talk *all = user;
    all->notices++;
    snprintf(all->text, sizeof all->text, "%s", text);
}

static int take_progress(void *user, int64_t done, int64_t total, const char *what)
{
    talk *all = user;
    (void)done, (void)total, (void)what;
    return ++all->progress >= all->stop_after;
}

/* Holds the lease, reports that, and releases it after a while. */
static pid_t start_holder(useconds_t hold_us)
{
    int ready[2];
    cr_assert_eq(pipe(ready), 0);
    pid_t child = fork();
    if (child == 0) {
        fsdp_lease *lease;
        char c = fsdp_lease_take(&disk, run, &lease, NULL) == FSDP_OK ? 'y' : 'n';
        if (write(ready[1], &c, 1) != 1)
            _exit(1);
        usleep(hold_us);
        fsdp_lease_release(lease);
        _exit(0);
    }
    char c = 0;
    cr_assert_eq(read(ready[0], &c, 1), 1);
    cr_assert_eq(c, 'y');
    close(ready[0]);
    close(ready[1]);
    return child;
}

Test(lease, a_holder_that_is_soon_done_is_waited_for, .timeout = 60)
{
    fsdp_lease *lease;
    fsdp_error err = {0};
    talk all = {.stop_after = 1 << 30};
    fsdp_watch watch = {.context = &all, .progress = take_progress, .notice = take_notice};
    host.lease_wait_ms = 30000;
    pid_t child = start_holder(900000);
    cr_assert_eq(fsdp_lease_take(&disk, run, &lease, NULL), FSDP_ERR_EXISTS);
    cr_assert_eq(fsdp_lease_await(&disk, run, &watch, &lease, &err), FSDP_OK, "%s", err.text);
    fsdp_lease_release(lease);
    cr_assert_gt(all.progress, 0);
    cr_assert_leq(all.notices, 1);
    waitpid(child, NULL, 0);
}

Test(lease, who_holds_it_is_told_while_it_is_waited_for_and_the_wait_can_be_stopped)
{
    fsdp_error err = {0};
    talk all = {.stop_after = 6};
    fsdp_watch watch = {.context = &all, .progress = take_progress, .notice = take_notice};
    fsdp_lease *mine = must_take(), *lease;
    host.lease_wait_ms = 60000;
    cr_assert_eq(fsdp_lease_await(&disk, run, &watch, &lease, &err), FSDP_ERR_CANCELLED);
    cr_assert_null(lease);
    cr_assert_eq(all.notices, 1);
    cr_assert(strstr(all.text, "waiting up to 60 s for the run") && strstr(all.text, "process"),
              "%s", all.text);
    fsdp_lease_release(mine);
}

Test(lease, a_wait_for_a_holder_that_stays_ends)
{
    fsdp_error err = {0};
    fsdp_lease *mine = must_take(), *lease;
    host.lease_wait_ms = 100;
    cr_assert_eq(fsdp_lease_await(&disk, run, NULL, &lease, &err), FSDP_ERR_EXISTS);
    cr_assert(strstr(err.text, "is in use by process"), "%s", err.text);
    fsdp_lease_release(mine);
}

/* Every attempt makes and renames a file, which loads a shared file system. */
Test(lease, a_holder_that_stays_is_looked_at_and_not_tried_again)
{
    fsdp_io *io;
    fsdp_fault_plan plan = {.calls = 1 << FSDP_CALL_CREATE};
    cr_assert_eq(fsdp_io_fault_create(&disk, &plan, &io, NULL), FSDP_OK);
    fsdp_lease *mine = must_take(), *lease;
    host.lease_wait_ms = 200;
    cr_assert_eq(fsdp_lease_await(io, run, NULL, &lease, NULL), FSDP_ERR_EXISTS);
    cr_assert_eq(fsdp_io_fault_calls(io), 1);
    fsdp_lease_release(mine);
    fsdp_io_fault_free(io);
}

/* --- races --- */

static void pause_ms(long ms)
{
    struct timespec pause = {.tv_nsec = ms * 1000 * 1000};
    nanosleep(&pause, NULL);
}

/* Several times: takes the lease, checks that it is alone, releases it; every third process dies as
 * holder. 0: no error, 1: another process held it, too, 2: an unexpected error. */
static int compete(int number, const char *witness)
{
    unsigned seed = (unsigned)number * 77u + 1u;
    for (int done = 0, tries = 0; done < 8; tries++) {
        if (tries > 4000)
            return 2;
        fsdp_lease *lease;
        fsdp_status status = fsdp_lease_take(&disk, run, &lease, NULL);
        if (status == FSDP_ERR_EXISTS) {
            pause_ms(rand_r(&seed) % 5);
            continue;
        }
        if (status != FSDP_OK)
            return 2;
        int fd = open(witness, O_RDWR);
        if (fd < 0 || flock(fd, LOCK_EX | LOCK_NB) < 0)
            return 1;
        pause_ms(rand_r(&seed) % 3);
        if (number % 3 == 2 && done == 4)
            kill(getpid(), SIGKILL);
        if (done % 2 == 0 && fsdp_lease_refresh(lease, NULL) != FSDP_OK)
            return 3;
        close(fd);
        fsdp_lease_release(lease);
        done++;
    }
    return 0;
}

static void race(int n)
{
    char witness[100];
    snprintf(witness, sizeof witness, "%s/witness", run);
    int fd = open(witness, O_CREAT | O_RDWR, 0600);
    cr_assert_geq(fd, 0);
    close(fd);
    pid_t children[8];
    for (int i = 0; i < n; i++) {
        children[i] = fork();
        if (children[i] == 0)
            _exit(compete(i, witness));
    }
    for (int i = 0; i < n; i++) {
        int status;
        cr_assert_eq(waitpid(children[i], &status, 0), children[i]);
        if (i % 3 == 2)
            cr_assert(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL, "process %d: %x", i,
                      status);
        else
            cr_assert(WIFEXITED(status) && WEXITSTATUS(status) == 0, "process %d of %d: %d", i, n,
                      WEXITSTATUS(status));
    }
    fsdp_lease_release(must_take());
    cr_assert_eq(names_in_run(), 1);
    unlink(witness);
}

Test(lease, is_exclusive_among_2_to_8_processes, .timeout = 120)
{
    for (int n = 2; n <= 8; n += 2)
        race(n);
    race(3);
}

enum { TAKERS = 6 };

/* All processes try at once to take over the lease of a dead holder: one gets it, and keeps it until all
 * have tried. */
static int winners_of_one_round(void)
{
    int start[2], done[2];
    pid_t children[TAKERS];
    cr_assert_eq(pipe(start), 0);
    cr_assert_eq(pipe(done), 0);
    for (int i = 0; i < TAKERS; i++) {
        children[i] = fork();
        if (children[i] == 0) {
            char c;
            close(start[1]);
            if (read(start[0], &c, 1) != 0)
                _exit(9);
            fsdp_lease *lease;
            fsdp_status status = fsdp_lease_take(&disk, run, &lease, NULL);
            c = status == FSDP_OK ? 'w' : status == FSDP_ERR_EXISTS ? 'l' : 'e';
            if (write(done[1], &c, 1) == 1 && c == 'w')
                pause();
            _exit(0);
        }
    }
    close(start[0]);
    close(start[1]);
    int winners = 0;
    for (int i = 0; i < TAKERS; i++) {
        char c;
        cr_assert_eq(read(done[0], &c, 1), 1);
        cr_assert_neq(c, 'e');
        winners += c == 'w';
    }
    for (int i = 0; i < TAKERS; i++) {
        kill(children[i], SIGKILL);
        waitpid(children[i], NULL, 0);
    }
    close(done[0]);
    close(done[1]);
    return winners;
}

Test(lease, a_dead_holders_lease_goes_to_exactly_one, .timeout = 120)
{
    fsdp_process process = self();
    process.pid = 999999999;
    leave_lease_of(process);
    /* each round leaves the lease of a winner that was killed */
    for (int round = 0; round < 25; round++)
        cr_assert_eq(winners_of_one_round(), 1, "round %d", round);
    fsdp_lease_release(must_take());
    cr_assert_eq(names_in_run(), 0);
}

/* --- faults --- */

static fsdp_process other_process(int64_t pid)
{
    fsdp_process process;
    fsdp_process_self(NULL, &process);
    process.pid = pid;
    return process;
}

Test(lease, works_where_a_rename_cannot_refuse_to_replace)
{
    fsdp_io *io;
    fsdp_fault_plan plan = {
        .calls = 1 << FSDP_CALL_RENAME, .at = 1, .action = FSDP_FAULT_ERRNO, .errnum = EINVAL};
    cr_assert_eq(fsdp_io_fault_create(&disk, &plan, &io, NULL), FSDP_OK);
    fsdp_lease *lease;
    cr_assert_eq(fsdp_lease_take(io, run, &lease, NULL), FSDP_OK);
    cr_assert_eq(names_in_run(), 1);
    must_be_held("process");
    fsdp_lease_release(lease);
    fsdp_io_fault_free(io);
    cr_assert_eq(names_in_run(), 0);
}

Test(lease, works_where_files_cannot_be_locked)
{
    fsdp_process process = self();
    process.pid = 999999999;
    leave_lease_of(process);
    fsdp_io *io;
    fsdp_fault_plan plan = {.calls = 1 << FSDP_CALL_LOCK,
                            .at = 1,
                            .forever = true,
                            .action = FSDP_FAULT_ERRNO,
                            .errnum = ENOLCK};
    cr_assert_eq(fsdp_io_fault_create(&disk, &plan, &io, NULL), FSDP_OK);
    fsdp_lease *lease;
    cr_assert_eq(fsdp_lease_take(io, run, &lease, NULL), FSDP_OK);
    cr_assert_eq(fsdp_lease_refresh(lease, NULL), FSDP_OK);
    fsdp_lease_release(lease);
    cr_assert_eq(names_in_run(), 0);
    fsdp_io_fault_free(io);
}

/* Takes over, refreshes and releases with one failing call: never reports a wrong success, and never
 * leaves a lease that cannot be taken over. */
static bool fails_at(int64_t n, int errnum)
{
    fsdp_io *sim = make_sim(), *io;
    fsdp_process first = other_process(999999991), second = other_process(999999992);
    fsdp_lease *lease;
    play(&first, 0);
    cr_assert_eq(fsdp_lease_take(sim, "/run", &lease, NULL), FSDP_OK);
    fsdp_lease_forget(lease);
    play(&second, 0);
    fsdp_fault_plan plan = {.at = n, .action = FSDP_FAULT_ERRNO, .errnum = errnum};
    cr_assert_eq(fsdp_io_fault_create(sim, &plan, &io, NULL), FSDP_OK);
    fsdp_error err = {0};
    if (fsdp_lease_take(io, "/run", &lease, &err) == FSDP_OK) {
        cr_assert(fsdp_lease_is_held(sim, "/run"));
        (void)!fsdp_lease_refresh(lease, NULL);
        fsdp_lease_release(lease);
    } else {
        cr_assert(err.text[0]);
    }
    bool reached = fsdp_io_fault_calls(io) >= n;
    play(NULL, 0);
    cr_assert_eq(fsdp_lease_take(sim, "/run", &lease, &err), FSDP_OK, "call %lld: %s", (long long)n,
                 err.text);
    fsdp_lease_release(lease);
    fsdp_io_fault_free(io);
    fsdp_sim_free(sim);
    return reached;
}

Test(lease, an_error_at_every_call_is_reported_or_harmless)
{
    const int errnums[] = {EIO, ENOSPC, EACCES, EINVAL, ENOENT};
    int64_t cases = 0;
    for (size_t i = 0; i < sizeof errnums / sizeof *errnums; i++) {
        for (int64_t n = 1; fails_at(n, errnums[i]); n++)
            cases++;
    }
    cr_assert_gt(cases, 100);
    printf("%lld failed calls\n", (long long)cases);
}

static int crash_here(void *user, fsdp_io_call call, const char *path)
{
    (void)call;
    (void)path;
    for (uint64_t seed = 0; seed < 20; seed++) {
        fsdp_io *left = fsdp_sim_crash(*(fsdp_io **)user, seed);
        fsdp_process before = other_process(0), next = other_process(999999995);
        fsdp_lease *lease;
        play(&next, 60);
        cr_assert_eq(left->ops->mkdir(left, "/run"), -EEXIST);
        cr_assert_eq(fsdp_lease_take(left, "/run", &lease, NULL), FSDP_OK);
        fsdp_lease_release(lease);
        before.pid = 999999992;
        play(&before, 0);
        fsdp_sim_free(left);
    }
    return 0;
}

Test(lease, a_power_cut_leaves_nothing_that_stops_the_next_job)
{
    fsdp_io *sim = make_sim(), *io;
    cr_assert_eq(fsdp_io_sync_dir(sim, "/", NULL), FSDP_OK);
    fsdp_fault_plan plan = {.calls = FSDP_CALLS_WRITES,
                            .at = 1,
                            .forever = true,
                            .action = FSDP_FAULT_CALL,
                            .call = crash_here,
                            .user = &sim};
    cr_assert_eq(fsdp_io_fault_create(sim, &plan, &io, NULL), FSDP_OK);
    fsdp_process holder = other_process(999999992);
    play(&holder, 0);
    fsdp_lease *lease;
    cr_assert_eq(fsdp_lease_take(io, "/run", &lease, NULL), FSDP_OK);
    cr_assert_eq(fsdp_lease_refresh(lease, NULL), FSDP_OK);
    fsdp_lease_release(lease);
    cr_assert_gt(fsdp_io_fault_calls(io), 8);
    fsdp_io_fault_free(io);
    fsdp_sim_free(sim);
}

Test(lease, every_failing_allocation_is_an_error)
{
    fsdp_mem_fail_after(-1, false);
    fsdp_lease_release(must_take());
    int64_t n = fsdp_mem_fail_after(-1, false);
    cr_assert_gt(n, 5);
    for (int64_t i = 0; i < n; i++) {
        fsdp_lease *lease;
        fsdp_mem_fail_after(i, false);
        fsdp_status status = fsdp_lease_take(&disk, run, &lease, NULL);
        fsdp_mem_fail_after(-1, false);
        if (status == FSDP_OK)
            fsdp_lease_release(lease);
        cr_assert_eq(names_in_run(), 0, "allocation %lld", (long long)i);
    }
}
