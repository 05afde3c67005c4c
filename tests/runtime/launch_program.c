/*
 * A program for every way to launch it; launch.py runs it. Its first argument chooses the work of its ranks:
 *
 *   talk                 random calls of the control plane, a mesh and a mean; prints "rank R of N: ..."
 *   arguments ...        rank 0 prints the remaining arguments
 *   exit RANK CODE       RANK returns CODE, the others wait for it in a mean
 *   leave RANK CODE      RANK returns CODE, the others wait for it in an all-reduce
 *   signal RANK NUMBER   RANK raises that signal, the others wait
 *   quit RANK CODE       RANK calls exit
 *   linger RANK CODE     as quit, after the others have returned
 *   work RANK CODE       RANK prints and returns CODE, the others make no call
 *   hold RANK CODE       as work, and the others hold the standard output
 *   defy RANK CODE       as work, and the others ignore SIGTERM
 *   wait FOLDER          each rank writes its pid to FOLDER/rank-N, then all compute means until a signal:
 *                        SIGUSR1 is recorded in FOLDER/usr1-N, SIGTERM ends with 75
 *   read                 rank 0 repeats its standard input
 *   collect              all-reduces and checks
 *   fail RANK CODE       RANK prints an error and returns it, the others wait in a mean; CODE 100 more: it
 *                        gives it to fsdp_world_fail, and the others wait in an all-reduce
 *   late RANK MS         RANK comes MS late to an all-reduce, after it was busy, with a deadline of a third
 *   longer RANK MS       as late, with a deadline of ten times that
 *   busy RANK MS         as late, and to a mean, within fsdp_world_begin_busy
 *   overdue RANK MS      as late, and said to be busy for a quarter of that
 *   stuck RANK MS        RANK makes no call, while the next rank is busy for MS
 *   differ RANK          RANK takes a maximum, the others a sum of as many values
 *   paths RANK FOLDER    RANK saves to another path than the others, then loads from another one
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

/* The group of all ranks, which lives as long as the world. */
static fsdp_status connect_all(fsdp_world *world, fsdp_comm **comm_out, fsdp_error *err)
{
    const int64_t size = fsdp_world_size(world);
    fsdp_mesh *mesh = NULL;
    FSDP_TRY(fsdp_world_mesh(world, 1, &size, (const char *[]){"dp"}, &mesh, err));
    *comm_out = fsdp_world_comm(world, mesh, 0, 0);
    fsdp_mesh_free(mesh);
    return FSDP_OK;
}

static fsdp_status reduce(fsdp_world *world, fsdp_comm *comm, fsdp_error *err)
{
    int size = fsdp_world_size(world);
    float x[100];
    for (int i = 0; i < 100; i++)
        x[i] = (float)(i + fsdp_world_rank(world));
    fsdp_collective call = {
        .kind = FSDP_ALL_REDUCE, .dtype = FSDP_F32, .in = x, .out = x, .count = 100};
    fsdp_status status = fsdp_comm_run(comm, &call, err);
    for (int i = 0; i < 100 && status == FSDP_OK; i++)
        if (x[i] != (float)(i * size + size * (size - 1) / 2))
            status = fsdp_fail(err, FSDP_ERR_INTERNAL, "element %d is %g", i, (double)x[i]);
    return status;
}

static fsdp_status collect(fsdp_world *world, fsdp_error *err)
{
    fsdp_comm *comm = NULL;
    FSDP_TRY(connect_all(world, &comm, err));
    FSDP_TRY(reduce(world, comm, err));
    printf("%s over %d\n", fsdp_comm_backend(comm), fsdp_world_size(world));
    return FSDP_OK;
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

/* All but the special rank continue, until they hear that it has left. */
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

/* --- time --- */

static void sleep_ms(int ms)
{
    nanosleep(&(struct timespec){.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000L}, NULL);
}

/* ms 0: not the special rank. */
static fsdp_status come_late(fsdp_world *world, fsdp_comm *comm, const char *how, int ms,
                             fsdp_error *err)
{
    double value = 0;
    const bool is_busy = strcmp(how, "busy") == 0;
    for (int i = 0; i < (is_busy ? 2 : 1); i++) {
        if (strcmp(how, "late") == 0 || strcmp(how, "overdue") == 0)
            fsdp_world_begin_busy(world, *how == 'l' ? 10 * ms : ms / 4);
        if (strcmp(how, "late") == 0)
            fsdp_world_end_busy(world);
        if (is_busy)
            fsdp_world_begin_busy(world, 2 * ms);
        sleep_ms(ms);
        if (is_busy)
            fsdp_world_end_busy(world);
        FSDP_TRY(i == 0 ? reduce(world, comm, err) : fsdp_world_mean(world, &value, err));
    }
    return FSDP_OK;
}

static int use_time(fsdp_world *world, const char *how, int special, int ms)
{
    const int size = fsdp_world_size(world), rank = fsdp_world_rank(world);
    fsdp_error err = {0};
    fsdp_comm *comm = NULL;
    fsdp_status status = connect_all(world, &comm, &err); /* also those that are stuck later */
    if (status == FSDP_OK)
        status =
            fsdp_world_set_deadline(world, strcmp(how, "longer") == 0 ? 10 * ms : ms / 3, &err);
    if (status == FSDP_OK && strcmp(how, "stuck") == 0 && rank == special)
        sleep_ms(2 * ms);
    if (strcmp(how, "stuck") == 0)
        how = "busy", special = (special + 1) % size;
    if (status == FSDP_OK)
        status = come_late(world, comm, how, rank == special ? ms : 0, &err);
    if (status == FSDP_OK)
        printf("%s over %d\n", fsdp_comm_backend(comm), size);
    return status == FSDP_OK ? 0 : fsdp_error_report(&err);
}

/* --- failures with a text --- */

static int fail_with_text(fsdp_world *world, int special, int number)
{
    fsdp_error err = {0};
    double value = 0;
    fsdp_comm *comm = NULL;
    fsdp_status status = connect_all(world, &comm, &err);
    if (status == FSDP_OK && fsdp_world_rank(world) == special) {
        (void)fsdp_fail(&err, (fsdp_status)(number % 100), "cannot read 'corpus'");
        return number < 100 ? fsdp_error_report(&err) : fsdp_world_fail(world, &err);
    }
    while (status == FSDP_OK)
        status = number < 100 ? fsdp_world_mean(world, &value, &err) : reduce(world, comm, &err);
    return fsdp_error_report(&err);
}

static fsdp_status save_and_load(fsdp_world *world, const char *folder, const char *other,
                                 fsdp_error *err)
{
    fsdp_sd *sd = NULL;
    const fsdp_value value = fsdp_value_i64(7);
    fsdp_ctl *ctl = fsdp_world_ctl(world);
    fsdp_error why = {0};
    FSDP_TRY(fsdp_sd_create(&sd, err));
    fsdp_status status = fsdp_sd_add_value(sd, "step", 4, &value, err);
    if (status == FSDP_OK && fsdp_sd_save(sd, ctl, other, NULL, &why) == FSDP_OK)
        status = fsdp_fail(err, FSDP_ERR_INTERNAL, "it is saved");
    if (status == FSDP_OK)
        status = fsdp_sd_save(sd, ctl, folder, NULL, err);
    if (status == FSDP_OK && fsdp_world_rank(world) == 0)
        (void)fsdp_error_report(&why);
    if (status == FSDP_OK)
        status = fsdp_sd_load(sd, ctl, other, NULL, err);
    fsdp_sd_free(sd);
    return status;
}

static int use_paths(fsdp_world *world, int special, const char *folder)
{
    char other[4096], same[4096];
    fsdp_error err = {0};
    const bool is_special = fsdp_world_rank(world) == special;
    snprintf(same, sizeof same, "%s%scheckpoint", folder, is_special ? "/.//" : "/");
    snprintf(other, sizeof other, "%s/%s", folder, is_special ? "elsewhere" : "checkpoint");
    fsdp_status status = save_and_load(world, same, other, &err);
    return status == FSDP_OK ? 0 : fsdp_error_report(&err);
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
    if (strcmp(how, "linger") == 0) {
        if (fsdp_world_rank(world) != special)
            return 0;
        sleep_ms(300);
        exit(number);
    }
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

static bool is_of_time(const char *what)
{
    static const char *const names[] = {"late", "longer", "busy", "overdue", "stuck"};
    bool is_there = false;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        is_there |= strcmp(what, names[i]) == 0;
    return is_there;
}

static fsdp_status combine_differently(fsdp_world *world, int special, fsdp_error *err)
{
    double value = 1;
    return fsdp_world_rank(world) == special ? fsdp_world_max(world, &value, 1, err)
                                             : fsdp_world_sum(world, &value, 1, err);
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
    else if (strcmp(what, "paths") == 0 && argc == 4)
        return use_paths(world, atoi(argv[2]), argv[3]);
    else if (strcmp(what, "differ") == 0 && argc == 3)
        status = combine_differently(world, atoi(argv[2]), &err);
    else if (strcmp(what, "fail") == 0 && argc == 4)
        return fail_with_text(world, atoi(argv[2]), atoi(argv[3]));
    else if (is_of_time(what) && argc == 4)
        return use_time(world, what, atoi(argv[2]), atoi(argv[3]));
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
