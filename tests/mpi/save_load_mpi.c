/*
 * Saving and loading on real ranks (mpirun starts it; save_load.py drives it).
 *
 * usage: save_load_mpi round DIR             loads every checkpoint in DIR, whoever saved it, and
 *                                                saves one of each kind there
 *        save_load_mpi prepare DIR           DIR/run with steps 10 and 20
 *        save_load_mpi lose DIR HOW RANK N   saves step 30; RANK kills or stops itself at its
 *                                                N-th storage call (HOW: kill, stop; N 0: none).
 *                                                Every rank writes its error to DIR/rank-R, and
 *                                                how many storage calls it made
 *        save_load_mpi check DIR             loads DIR/run, then saves the next step, loads that
 */
#include <dirent.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <fsdp/ctl_mpi.h>

#include "tests/support/disk/io_fault.h"
#include "tests/support/sample_state.h"

enum { LOSS_DEADLINE_MS = 2000, FORMS = 6, PATH_ROOM = 600 };
enum { STEP_FIRST = 10, STEP_OLD = 20, STEP_NEW = 30, STEP_GAP = 10 };

static const char *const kind_names[] = {"sharded", "full", "local"};

static const char *path_of(char *path, const char *format, const char *dir, const char *name)
{
    if (snprintf(path, PATH_ROOM, format, dir, name) >= PATH_ROOM)
        abort();
    return path;
}

static int report(const fsdp_ctl *ctl, const char *what, fsdp_status status, const fsdp_error *err)
{
    if (status != FSDP_OK)
        fprintf(stderr, "rank %d: %s: status %d, %s\n", ctl ? fsdp_ctl_rank(ctl) : -1, what,
                (int)status, err->text);
    return status != FSDP_OK;
}

/* --- one save, one load ------------------------------------------------------------------------- */

static fsdp_status make(fsdp_ctl *ctl, state_model model, bool filled, uint64_t seed,
                        test_state *state, fsdp_error *err)
{
    int world = fsdp_ctl_size(ctl);
    fsdp_status st = test_state_create(
        &(state_part){.model = model, .world = world, .rank = fsdp_ctl_rank(ctl), .variant = world},
        filled, seed, state, err);
    return fsdp_ctl_agree(ctl, st, err);
}

static int load(fsdp_ctl *ctl, state_model model, const char *path, uint64_t seed)
{
    test_state state;
    fsdp_error err = {0};
    if (report(ctl, path, make(ctl, model, false, 0, &state, &err), &err))
        return 1;
    fsdp_status st = fsdp_sd_load(state.sd, ctl, path, NULL, &err);
    if (st == FSDP_OK && test_state_differing(&state, seed) > 0)
        st = fsdp_fail(&err, FSDP_DIFFERS, "bytes differ");
    test_state_release(&state);
    return report(ctl, path, fsdp_ctl_agree(ctl, st, &err), &err);
}

static fsdp_status save_step(fsdp_ctl *ctl, const char *run, int64_t step, fsdp_io *io,
                             fsdp_error *err)
{
    static const fsdp_retention newest_two = {.keep_last = 2};
    test_state state;
    fsdp_save_opts opts = {0};
    opts.retain = &newest_two;
    opts.access.disk = io;
    FSDP_TRY(make(ctl, STATE_SMALL, true, (uint64_t)step, &state, err));
    fsdp_status st = fsdp_run_save(state.sd, ctl, run, step, &opts, err);
    test_state_release(&state);
    return st;
}

/* --- round -------------------------------------------------------------------------------------- */

static int save_form(fsdp_ctl *ctl, const char *dir, int form)
{
    char name[60], path[PATH_ROOM];
    test_state state;
    fsdp_error err = {0};
    fsdp_save_opts opts = {0};
    int world = fsdp_ctl_size(ctl);
    opts.kind = (fsdp_kind)(form % 3);
    opts.compress = form / 3;
    opts.rank0_writes = world % 2 == 0;
    opts.overwrite = true;
    snprintf(name, sizeof name, "%d-ranks-%s%s", world, kind_names[opts.kind],
             opts.compress ? "-z" : "");
    if (report(ctl, name, make(ctl, STATE_EVERYTHING, true, 7, &state, &err), &err))
        return 1;
    fsdp_status st = fsdp_sd_save(state.sd, ctl, path_of(path, "%s/%s", dir, name), &opts, &err);
    test_state_release(&state);
    return report(ctl, name, st, &err);
}

/* Every rank sees the same names, but perhaps in another order: rank 0's counts. */
static int load_all(fsdp_ctl *ctl, const char *dir, int *count_out)
{
    enum { MOST = 64, NAME_ROOM = 64 };
    char names[MOST][NAME_ROOM] = {{0}};
    int count = 0, failed = 0;
    DIR *list = fsdp_ctl_rank(ctl) == 0 ? opendir(dir) : NULL;
    for (struct dirent *entry; list && (entry = readdir(list)) && count < MOST;) {
        if (strstr(entry->d_name, "-ranks-"))
            snprintf(names[count++], NAME_ROOM, "%.60s", entry->d_name);
    }
    if (list)
        closedir(list);
    fsdp_error err = {0};
    if (report(ctl, "names", fsdp_ctl_broadcast(ctl, 0, names, sizeof names, &err), &err) ||
        report(ctl, "count", fsdp_ctl_broadcast(ctl, 0, &count, sizeof count, &err), &err))
        return 1;
    for (int i = 0; i < count; i++) {
        char path[PATH_ROOM];
        failed += load(ctl, STATE_EVERYTHING, path_of(path, "%s/%s", dir, names[i]), 7);
    }
    *count_out = count;
    return failed;
}

static int run_round(fsdp_ctl *ctl, const char *dir)
{
    int loads = 0, failed = load_all(ctl, dir, &loads);
    for (int form = 0; form < FORMS; form++)
        failed += save_form(ctl, dir, form);
    if (fsdp_ctl_rank(ctl) == 0)
        printf("round %d ranks: %d loads, %d saves, %d failed\n", fsdp_ctl_size(ctl), loads, FORMS,
               failed);
    return failed > 0;
}

/* --- runs --------------------------------------------------------------------------------------- */

static int prepare(fsdp_ctl *ctl, const char *run)
{
    fsdp_error err = {0};
    return report(ctl, run, save_step(ctl, run, STEP_FIRST, NULL, &err), &err) ||
           report(ctl, run, save_step(ctl, run, STEP_OLD, NULL, &err), &err);
}

/* The step is the seed; -1 when there is nothing to load. */
static int64_t newest_step(fsdp_ctl *ctl, const char *run)
{
    int64_t step = -1;
    fsdp_error err = {0};
    if (fsdp_ctl_rank(ctl) == 0) {
        fsdp_checkpoint *checkpoint = NULL;
        if (!report(ctl, run, fsdp_checkpoint_open(run, NULL, &checkpoint, &err), &err))
            step = fsdp_checkpoint_describe(checkpoint)->step;
        fsdp_checkpoint_close(checkpoint);
    }
    if (report(ctl, run, fsdp_ctl_broadcast(ctl, 0, &step, sizeof step, &err), &err))
        return -1;
    return step;
}

static int check(fsdp_ctl *ctl, const char *run)
{
    fsdp_error err = {0};
    int64_t step = newest_step(ctl, run);
    if (step < STEP_OLD || load(ctl, STATE_SMALL, run, (uint64_t)step))
        return 1;
    if (fsdp_ctl_rank(ctl) == 0)
        printf("found step %lld\n", (long long)step);
    return report(ctl, "next save", save_step(ctl, run, step + STEP_GAP, NULL, &err), &err) ||
           newest_step(ctl, run) != step + STEP_GAP ||
           load(ctl, STATE_SMALL, run, (uint64_t)(step + STEP_GAP));
}

/* --- a rank is lost ----------------------------------------------------------------------------- */

static double seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

static FILE *open_note(const char *dir, const char *what, int rank)
{
    char name[40], path[PATH_ROOM];
    snprintf(name, sizeof name, "%s-%d", what, rank);
    FILE *file = fopen(path_of(path, "%s/%s", dir, name), "w");
    if (!file)
        _exit(99);
    return file;
}

static int stop_here(void *user, fsdp_io_call call, const char *path)
{
    (void)user;
    (void)call;
    (void)path;
    (void)raise(SIGSTOP);
    return 0;
}

static fsdp_io *make_faulty(const char *how, int64_t at)
{
    fsdp_io *io = NULL;
    fsdp_fault_plan plan = {.at = at, .action = FSDP_FAULT_KILL, .call = stop_here};
    if (strcmp(how, "stop") == 0)
        plan.action = FSDP_FAULT_CALL;
    if (fsdp_io_fault_create(NULL, &plan, &io, NULL) != FSDP_OK)
        _exit(99);
    return io;
}

static void lose_a_rank(fsdp_ctl *ctl, const char *dir, const char *how, int special, int64_t at)
{
    int rank = fsdp_ctl_rank(ctl);
    char run[PATH_ROOM];
    fsdp_error err = {0};
    FILE *file = open_note(dir, "pid", rank);
    fprintf(file, "%d\n", (int)getpid());
    fclose(file);
    fsdp_io *io = make_faulty(how, rank == special ? at : 0);
    if (report(ctl, "barrier", fsdp_ctl_barrier(ctl, &err), &err))
        _exit(98);
    fsdp_ctl_set_deadline(ctl, LOSS_DEADLINE_MS);
    double start = seconds();
    fsdp_status status = save_step(ctl, path_of(run, "%s/%s", dir, "run"), STEP_NEW, io, &err);
    file = open_note(dir, "rank", rank);
    fprintf(file, "%d %.3f %lld %s\n", (int)status, seconds() - start,
            (long long)fsdp_io_fault_calls(io), err.text);
    fclose(file);
    if (at == 0 &&
        fsdp_ctl_barrier(ctl, &err) != FSDP_OK) /* mpirun ends the others when one has gone */
        _exit(98);
    /* MPI cannot be ended when a rank is lost; nothing of ours is left to do. */
    _exit((int)status);
}

int main(int argc, char **argv)
{
    fsdp_ctl *ctl = NULL;
    fsdp_error err = {0};
    char run[PATH_ROOM];
    int failed = 2;
    if (argc < 3 || report(ctl, "mpi", fsdp_ctl_mpi_world(&ctl, &err), &err))
        return 2;
    path_of(run, "%s/%s", argv[2], "run");
    if (argc == 6 && strcmp(argv[1], "lose") == 0)
        lose_a_rank(ctl, argv[2], argv[3], atoi(argv[4]), atoll(argv[5]));
    else if (strcmp(argv[1], "round") == 0)
        failed = run_round(ctl, argv[2]);
    else if (strcmp(argv[1], "prepare") == 0)
        failed = prepare(ctl, run);
    else if (strcmp(argv[1], "check") == 0)
        failed = check(ctl, run);
    fsdp_ctl_free(ctl);
    return !fsdp_mpi_finalize() || failed;
}
