/*
 * A program for every way to launch it; launch.py runs it. Its first argument chooses the work of its ranks:
 *
 *   talk                 random calls of the control plane, a mesh and a mean; prints "rank R of N: ..."
 *   arguments ...        rank 0 prints the remaining arguments
 *   exit RANK CODE       RANK returns CODE, the others wait for it in a mean
 *   leave RANK CODE      RANK returns CODE, the others wait for it in an all-reduce
 *   signal RANK NUMBER   RANK raises that signal, the others wait
 *   quit RANK CODE       RANK calls exit
 *   work RANK CODE       RANK prints and returns CODE, the others make no call
 *   hold RANK CODE       as work, and the others hold the standard output
 *   defy RANK CODE       as work, and the others ignore SIGTERM
 *   wait FOLDER          each rank writes its pid to FOLDER/rank-N, then all compute means until a signal:
 *                        SIGUSR1 is recorded in FOLDER/usr1-N, SIGTERM ends with 75
 *   read                 rank 0 repeats its standard input
 *   collect              all-reduces and checks
 */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#include <fsdp/fsdp.h>

#include "tests/support/rounds/ctl_rounds.h"

static volatile sig_atomic_t usr1, term;

static void note_signal(int number)
{
    if (number == SIGUSR1)
        usr1++;
    else
        term++;
}

static fsdp_status collect(fsdp_world *world, fsdp_error *err)
{
    int size = fsdp_world_size(world);
    float x[100];
    fsdp_mesh *mesh = NULL;
    FSDP_TRY(fsdp_world_mesh(world, 1, (int64_t[]){size}, (const char *[]){"dp"}, &mesh, err));
    fsdp_comm *comm = fsdp_world_comm(world, mesh, 0, 0);
    for (int i = 0; i < 100; i++)
        x[i] = (float)(i + fsdp_world_rank(world));
    fsdp_collective call = {
        .kind = FSDP_ALL_REDUCE, .dtype = FSDP_F32, .in = x, .out = x, .count = 100};
    fsdp_status status = fsdp_comm_run(comm, &call, err);
    for (int i = 0; i < 100 && status == FSDP_OK; i++)
        if (x[i] != (float)(i * size + size * (size - 1) / 2))
            status = fsdp_fail(err, FSDP_ERR_INTERNAL, "element %d is %g", i, (double)x[i]);
    if (status == FSDP_OK)
        printf("%s over %d\n", fsdp_comm_backend(comm), size);
    fsdp_mesh_free(mesh);
    return status;
}

static fsdp_status talk(fsdp_world *world, fsdp_error *err)
{
    ctl_rounds rounds = {.seed = 5, .rounds = 60, .max_size = 60000};
    int rank = fsdp_world_rank(world), size = fsdp_world_size(world);
    int64_t shape[] = {size};
    const char *names[] = {"dp"};
    double mean = rank;
    fsdp_mesh *mesh = NULL;
    FSDP_TRY(run_ctl_rounds(&rounds, fsdp_world_ctl(world), err));
    FSDP_TRY(fsdp_world_mesh(world, 1, shape, names, &mesh, err));
    fsdp_status status = fsdp_world_mean(world, &mean, err);
    printf("rank %d of %d: local %d of %d, group of %d, mean %g\n", rank, size,
           fsdp_world_local_rank(world), fsdp_world_local_size(world),
           fsdp_comm_size(fsdp_world_comm(world, mesh, 0, 0)), mean);
    fsdp_mesh_free(mesh);
    return status == FSDP_OK ? collect(world, err) : status;
}

static fsdp_status wait_for_others(fsdp_world *world, fsdp_error *err)
{
    double value = 0;
    for (;;)
        FSDP_TRY(fsdp_world_mean(world, &value, err));
}

/* All but the special rank go on, until they hear that it has left. */
static int leave_group(fsdp_world *world, int special, int number)
{
    int64_t shape[] = {fsdp_world_size(world)};
    float x = 1;
    fsdp_error err = {0};
    fsdp_mesh *mesh = NULL;
    if (fsdp_world_mesh(world, 1, shape, (const char *[]){"dp"}, &mesh, &err) != FSDP_OK)
        return fsdp_error_report(&err);
    fsdp_comm *comm = fsdp_world_comm(world, mesh, 0, 0);
    fsdp_collective call = {
        .kind = FSDP_ALL_REDUCE, .dtype = FSDP_F32, .in = &x, .out = &x, .count = 1};
    while (fsdp_world_rank(world) != special && fsdp_comm_run(comm, &call, &err) == FSDP_OK)
        ;
    fsdp_mesh_free(mesh);
    return fsdp_world_rank(world) == special ? number : fsdp_error_report(&err);
}

static void write_note(const char *folder, const char *what, int rank, int number)
{
    char path[4096], done[4200];
    snprintf(path, sizeof path, "%s/.%s-%d", folder, what, rank);
    snprintf(done, sizeof done, "%s/%s-%d", folder, what, rank);
    FILE *file = fopen(path, "w");
    if (!file)
        exit(99);
    fprintf(file, "%d\n", number);
    fclose(file);
    rename(path, done);
}

/* All ranks check together whether one has got a signal, so that none waits for another. */
static fsdp_status wait_for_signals(fsdp_world *world, const char *folder, fsdp_error *err)
{
    int rank = fsdp_world_rank(world);
    struct sigaction action = {.sa_handler = note_signal};
    double is_over = 0;
    (void)sigaction(SIGUSR1, &action, NULL);
    (void)sigaction(SIGTERM, &action, NULL);
    write_note(folder, "rank", rank, (int)getpid());
    while (is_over == 0) {
        nanosleep(&(struct timespec){.tv_nsec = 5000000}, NULL);
        if (usr1)
            write_note(folder, "usr1", rank, (int)usr1);
        is_over = term;
        FSDP_TRY(fsdp_world_mean(world, &is_over, err));
    }
    return FSDP_ERR_CANCELLED;
}

static int fail_somehow(fsdp_world *world, const char *how, int special, int number)
{
    fsdp_error err = {0};
    double value = 0;
    if (fsdp_world_mean(world, &value, &err) != FSDP_OK)
        return fsdp_error_report(&err);
    bool is_late = strcmp(how, "work") == 0 || strcmp(how, "hold") == 0 || strcmp(how, "defy") == 0;
    if (fsdp_world_rank(world) != special && strcmp(how, "hold") == 0)
        flockfile(stdout);
    if (fsdp_world_rank(world) != special && strcmp(how, "defy") == 0)
        (void)signal(SIGTERM, SIG_IGN);
    if (fsdp_world_rank(world) != special && is_late)
        for (;;)
            pause();
    if (strcmp(how, "work") == 0)
        printf("rank %d gives up\n", special);
    if (strcmp(how, "leave") == 0)
        return leave_group(world, special, number);
    if (fsdp_world_rank(world) != special) {
        (void)wait_for_others(world, &err);
        return fsdp_error_report(&err);
    }
    if (strcmp(how, "signal") == 0) {
        (void)setrlimit(RLIMIT_CORE, &(struct rlimit){0});
        (void)signal(number, SIG_DFL); /* sanitizers have handlers */
        (void)raise(number);
    }
    if (strcmp(how, "quit") == 0)
        exit(number);
    return number;
}

static void print_arguments(int argc, char **argv)
{
    for (int i = 1; i < argc; i++)
        printf("%s%s", i > 1 ? " " : "", argv[i]);
    printf("%s\n", argv[argc] ? "!" : "");
}

static void repeat_input(void)
{
    char line[100];
    while (fgets(line, sizeof line, stdin))
        fputs(line, stdout);
}

static int run_rank(void *user, fsdp_world *world, int argc, char **argv)
{
    fsdp_error err = {0};
    const char *what = argc > 1 ? argv[1] : "talk";
    fsdp_status status = FSDP_OK;
    if (user != &usr1)
        return 98;
    if (strcmp(what, "talk") == 0)
        status = talk(world, &err);
    else if (strcmp(what, "collect") == 0)
        status = collect(world, &err);
    else if (strcmp(what, "wait") == 0 && argc == 3)
        status = wait_for_signals(world, argv[2], &err);
    else if (strcmp(what, "arguments") == 0 && fsdp_world_rank(world) == 0)
        print_arguments(argc, argv);
    else if (strcmp(what, "read") == 0 && fsdp_world_rank(world) == 0)
        repeat_input();
    else if (argc == 4)
        return fail_somehow(world, what, atoi(argv[2]), atoi(argv[3]));
    if (err.text[0] != '\0')
        (void)fsdp_error_report(&err);
    return (int)status;
}

int main(int argc, char **argv)
{
    return fsdp_launch(argc, argv, run_rank, (void *)&usr1);
}
