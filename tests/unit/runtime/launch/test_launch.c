/* The inputs of fsdp_launch: options, the variables of launchers, and contradictions between them;
 * and its supervisor. */
#include <criterion/criterion.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/core/mem.h"
#include "runtime/launch/launch_internal.h"
#include "runtime/bootstrap/process_watch.h"

enum { MOST = 16 };

/* An environment: names and values, one after the other, ends with NULL. */
static const char *look_up(void *user, const char *name)
{
    for (const char *const *at = user; *at; at += 2)
        if (strcmp(at[0], name) == 0)
            return at[1];
    return NULL;
}

#define ENVIRONMENT(...) ((void *)(const char *[]){__VA_ARGS__, NULL})
#define EMPTY ((void *)(const char *[]){NULL})

/* --- options ---------------------------------------------------------------------------------- */

static fsdp_status read_options(const char *const *words, void *variables,
                                fsdp_launch_options *options_out, fsdp_error *err)
{
    static char *argv[MOST];
    int argc = 0;
    for (; words[argc]; argc++)
        argv[argc] = (char *)words[argc];
    argv[argc] = NULL;
    return fsdp_launch_options_read(argc, argv, look_up, variables, options_out, err);
}

#define READ(variables, ...) \
    read_options((const char *[]){"program", __VA_ARGS__, NULL}, variables, &options, &err)

static void expect_left(const fsdp_launch_options *options, const char *text)
{
    char left[256] = "";
    for (int i = 1; i < options->argc; i++) {
        strcat(left, i > 1 ? " " : "");
        strcat(left, options->argv[i]);
    }
    cr_assert_str_eq(left, text);
    cr_assert_str_eq(options->argv[0], "program");
    cr_assert_null(options->argv[options->argc]);
}

Test(options, are_taken_out_of_argv_in_both_spellings)
{
    fsdp_launch_options options;
    fsdp_error err = {0};
    cr_assert_eq(READ(EMPTY, "a", "--np=4", "--comm", "shm", "b", "--deadline", "2.5", "--check",
                      "--trace", "t-%r", "--device=cpu-async", "c"),
                 FSDP_OK, "%s", err.text);
    expect_left(&options, "a b c");
    cr_assert_eq(options.np, 4);
    cr_assert_eq(options.threads, 0);
    cr_assert_eq(options.comm, FSDP_COMM_SHM);
    cr_assert_eq(options.deadline_ms, 2500);
    cr_assert(options.check);
    cr_assert_str_eq(options.trace, "t-%r");
    cr_assert_str_eq(options.device, "cpu-async");
    fsdp_launch_options_release(&options);
}

Test(options, have_the_stated_defaults)
{
    fsdp_launch_options options;
    fsdp_error err = {0};
    cr_assert_eq(READ(EMPTY, "--npx", "-np", "--number"), FSDP_OK);
    expect_left(&options, "--npx -np --number");
    cr_assert_eq(options.np, 0);
    cr_assert_eq(options.comm, FSDP_COMM_AUTO);
    cr_assert_eq(options.deadline_ms, 30000);
    cr_assert_str_eq(options.device, "cpu");
    cr_assert_null(options.trace);
    cr_assert(!options.check && !options.is_verbose && !options.is_quiet);
    fsdp_launch_options_release(&options);
}

Test(options, end_at_two_dashes_and_work_without_arguments)
{
    fsdp_launch_options options;
    fsdp_error err = {0};
    char *none[] = {NULL};
    cr_assert_eq(READ(EMPTY, "--threads", "2", "--", "--np", "3"), FSDP_OK);
    expect_left(&options, "-- --np 3");
    cr_assert_eq(options.threads, 2);
    fsdp_launch_options_release(&options);
    cr_assert_eq(fsdp_launch_options_read(0, none, look_up, EMPTY, &options, &err), FSDP_OK);
    cr_assert_eq(options.argc, 0);
    fsdp_launch_options_release(&options);
}

Test(options, come_from_the_environment_and_the_command_line_wins)
{
    fsdp_launch_options options;
    fsdp_error err = {0};
    void *variables = ENVIRONMENT("FSDP_NP", "3", "FSDP_COMM", "shm", "FSDP_CHECK", "1",
                                  "FSDP_DEADLINE", "7", "FSDP_TRACE", "", "FSDP_VERBOSE", "1");
    cr_assert_eq(READ(variables, "--deadline=1"), FSDP_OK);
    cr_assert_eq(options.np, 3);
    cr_assert_eq(options.comm, FSDP_COMM_SHM);
    cr_assert_str_eq(options.np_name, "FSDP_NP");
    cr_assert(options.check && options.is_verbose && !options.is_quiet);
    cr_assert_null(options.trace);
    cr_assert_eq(options.deadline_ms, 1000);
    fsdp_launch_options_release(&options);
    cr_assert_eq(READ(variables, "--threads", "2", "--comm", "auto"), FSDP_OK);
    cr_assert_eq(options.comm, FSDP_COMM_AUTO);
    cr_assert_eq(options.np, 0);
    cr_assert_eq(options.threads, 2);
    fsdp_launch_options_release(&options);
}

Test(options, that_make_no_sense_are_named)
{
    static const struct {
        const char *first, *second, *text;
    } cases[] = {
        {"--np", NULL, "--np needs a value"},
        {"--np=", NULL, "--np '' is not a number of ranks from 1 to 1024"},
        {"--np", "0", "--np '0'"},
        {"--np", "1025", "--np '1025'"},
        {"--np", "4x", "--np '4x'"},
        {"--threads", "99999999999999999999", "--threads '9999"},
        {"--comm=gloo", NULL,
         "--comm 'gloo' is unknown; use auto, self, threads, shm, mpi, tcp or nccl"},
        {"--deadline", "0", "--deadline '0'"},
        {"--deadline", "nan", "--deadline 'nan'"},
        {"--deadline", "inf", "--deadline 'inf'"},
        {"--check=1", NULL, "--check takes no value"},
        {"--trace=", NULL, "--trace needs the name of a file"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        fsdp_launch_options options;
        fsdp_error err = {0};
        cr_assert_eq(READ(EMPTY, cases[i].first, cases[i].second), FSDP_ERR_USAGE);
        cr_assert(strstr(err.text, cases[i].text), "%s", err.text);
    }
}

Test(options, fail_without_memory)
{
    fsdp_launch_options options;
    fsdp_error err = {0};
    (void)fsdp_mem_fail_after(0, false);
    cr_assert_eq(READ(EMPTY, "--np", "2"), FSDP_ERR_LIMIT);
}

/* --- launchers -------------------------------------------------------------------------------- */

#define TORCHRUN                                                                               \
    "RANK", "3", "WORLD_SIZE", "4", "LOCAL_RANK", "1", "LOCAL_WORLD_SIZE", "2", "MASTER_ADDR", \
        "head", "MASTER_PORT", "29500"
#define OPEN_MPI "OMPI_COMM_WORLD_RANK", "1", "OMPI_COMM_WORLD_SIZE", "4"
#define SLURM "SLURM_PROCID", "2", "SLURM_NTASKS", "8", "SLURM_LOCALID", "0"

static fsdp_place detect(void *variables)
{
    fsdp_place place;
    fsdp_error err = {0};
    cr_assert_eq(fsdp_launch_detect(look_up, variables, &place, &err), FSDP_OK, "%s", err.text);
    return place;
}

static void expect_place(const fsdp_place *place, fsdp_launcher launcher, int rank, int size)
{
    cr_assert_eq(place->launcher, launcher);
    cr_assert_eq(place->rank, rank);
    cr_assert_eq(place->size, size);
}

Test(detection, of_nobody)
{
    fsdp_place place = detect(ENVIRONMENT("MASTER_ADDR", "x", "PATH", "/", "RANK", ""));
    expect_place(&place, FSDP_LAUNCHED_BARE, 0, 1);
}

Test(detection, of_our_own_variables_first)
{
    fsdp_place place =
        detect(ENVIRONMENT("FSDP_RANK", "1", "FSDP_WORLD_SIZE", "2", "FSDP_MASTER", "[::1]:7000",
                           "FSDP_JOB_ID", "j", TORCHRUN, OPEN_MPI, SLURM));
    expect_place(&place, FSDP_LAUNCHED_VARIABLES, 1, 2);
    cr_assert_str_eq(place.host, "::1");
    cr_assert_eq(place.port, 7000);
    cr_assert_str_eq(place.job, "j");
    cr_assert(!place.has_store);
}

Test(detection, of_torchrun_and_its_store)
{
    fsdp_place place = detect(ENVIRONMENT(TORCHRUN, OPEN_MPI, SLURM, "TORCHELASTIC_RUN_ID", "r",
                                          "TORCHELASTIC_RESTART_COUNT", "2"));
    expect_place(&place, FSDP_LAUNCHED_TORCHRUN, 3, 4);
    cr_assert_eq(place.local_size, 2);
    cr_assert_str_eq(place.host, "head");
    cr_assert_eq(place.port, 29500);
    cr_assert(place.has_store);
    cr_assert_str_eq(place.job, "r/2");
    place = detect(
        ENVIRONMENT(TORCHRUN, "TORCHELASTIC_RUN_ID", "r", "TORCHELASTIC_USE_AGENT_STORE", "False"));
    cr_assert(!place.has_store);
    place = detect(ENVIRONMENT(TORCHRUN)); /* in the way that some clusters start PyTorch */
    cr_assert(!place.has_store);
}

Test(detection, of_mpi_before_slurm)
{
    fsdp_place place = detect(ENVIRONMENT(OPEN_MPI, "PMIX_RANK", "1", SLURM));
    expect_place(&place, FSDP_LAUNCHED_OPEN_MPI, 1, 4);
    place = detect(ENVIRONMENT("PMIX_RANK", "5", SLURM));
    expect_place(&place, FSDP_LAUNCHED_PMIX, 5, 0);
}

static void expect_mpi(void *variables, fsdp_launcher launcher, int rank, int size, int local_size)
{
    fsdp_place place = detect(variables);
    expect_place(&place, launcher, rank, size);
    cr_assert(place.is_mpi);
    cr_assert_eq(place.local_size, local_size);
    cr_assert_str_eq(place.host, "");
}

#define HYDRA "PMI_RANK", "3", "PMI_SIZE", "4", "MPI_LOCALRANKID", "1", "MPI_LOCALNRANKS", "2"

Test(detection, of_every_mpi)
{
    expect_mpi(ENVIRONMENT(HYDRA, "PMI_FD", "9"), FSDP_LAUNCHED_PMI, 3, 4, 2);
    expect_mpi(ENVIRONMENT("PMI_RANK", "0", "PMI_SIZE", "1"), FSDP_LAUNCHED_PMI, 0, 1, -1);
    expect_mpi(ENVIRONMENT("PALS_RANKID", "1", "PMI_RANK", "1", "PMI_SIZE", "2"), FSDP_LAUNCHED_PMI,
               1, 2, -1);
    expect_mpi(ENVIRONMENT("MV2_COMM_WORLD_RANK", "1", "MV2_COMM_WORLD_SIZE", "2",
                           "MV2_COMM_WORLD_LOCAL_SIZE", "2", HYDRA),
               FSDP_LAUNCHED_MVAPICH, 1, 2, 2);
    expect_mpi(ENVIRONMENT("JSM_NAMESPACE_RANK", "5", "JSM_NAMESPACE_SIZE", "6", "PMIX_RANK", "5"),
               FSDP_LAUNCHED_JSRUN, 5, 6, -1);
    expect_mpi(ENVIRONMENT("FLUX_TASK_RANK", "1", "FLUX_JOB_SIZE", "3"), FSDP_LAUNCHED_FLUX, 1, 3,
               -1);
    fsdp_place place = detect(ENVIRONMENT(HYDRA, "FSDP_MASTER", "h:12", "FSDP_JOB_ID", "j"));
    expect_place(&place, FSDP_LAUNCHED_PMI, 3, 4);
    cr_assert(!place.is_mpi);
    cr_assert_str_eq(place.host, "h");
    cr_assert_str_eq(place.job, "j");
    cr_assert_eq(place.port, 12);
    expect_mpi(ENVIRONMENT("PMI_RANK", "0", "PMI_SIZE", "1", "FSDP_MASTER", "h:12"),
               FSDP_LAUNCHED_PMI, 0, 1, -1);
}

/* mpiexec starts a helper on each host with srun; its ranks inherit the helper's SLURM_PROCID. */
Test(detection, of_mpiexec_inside_of_slurm)
{
    fsdp_place place =
        detect(ENVIRONMENT(HYDRA, "SLURM_PROCID", "1", "SLURM_NTASKS", "2", "SLURM_LOCALID", "0"));
    expect_place(&place, FSDP_LAUNCHED_PMI, 3, 4);
    place = detect(ENVIRONMENT(SLURM, "PMI_RANK", "2", "PMI_SIZE", "8")); /* srun --mpi=pmi2 */
    expect_place(&place, FSDP_LAUNCHED_SLURM, 2, 8);
    place = detect(ENVIRONMENT(SLURM, "PMI_RANK", "2", "PMI_SIZE", "9"));
    expect_place(&place, FSDP_LAUNCHED_PMI, 2, 9);
    place = detect(ENVIRONMENT(SLURM, "SLURM_JOB_ID", "9", "PMI_RANK", "2", "PMI_SIZE", "8"));
    expect_place(&place, FSDP_LAUNCHED_PMI, 2, 8);
}

Test(detection, is_compared_with_what_mpi_says)
{
    static const struct {
        fsdp_place place;
        int rank, size;
        const char *text; /* NULL: they agree */
    } cases[] = {
        {{.launcher = FSDP_LAUNCHED_PMI, .rank = 1, .size = 2}, 1, 2, NULL},
        {{.launcher = FSDP_LAUNCHED_PMI, .rank = 0, .size = 2}, 0, 1, "PMI_SIZE is 2, but in MPI"},
        {{.launcher = FSDP_LAUNCHED_PMI, .rank = 1, .size = 2}, 0, 2, "PMI_RANK is 1, but in MPI"},
        {{.launcher = FSDP_LAUNCHED_PMIX, .rank = 1, .size = 0}, 1, 2, NULL},
        {{.launcher = FSDP_LAUNCHED_PMIX, .rank = 1, .size = 0}, 0, 1, "PMIX_RANK is 1"},
        {{.launcher = FSDP_LAUNCHED_BARE, .rank = 0, .size = 1}, 2, 4, NULL}, /* --comm mpi */
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        fsdp_error err = {0};
        fsdp_status status =
            fsdp_launch_check_mpi(&cases[i].place, cases[i].rank, cases[i].size, &err);
        cr_assert_eq(status, cases[i].text ? FSDP_ERR_USAGE : FSDP_OK, "%zu: %s", i, err.text);
        cr_assert(!cases[i].text || strstr(err.text, cases[i].text), "%s", err.text);
    }
}

Test(detection, of_slurm_steps)
{
    static const struct {
        const char *list, *first;
    } lists[] = {{"gpu[01-03,07],cpu2", "gpu01"}, {"n7,n8", "n7"}, {"one", "one"}, {"a[5]", "a5"}};
    for (size_t i = 0; i < sizeof lists / sizeof *lists; i++) {
        fsdp_place place = detect(ENVIRONMENT(SLURM, "SLURM_JOB_ID", "9", "SLURM_STEP_ID", "1",
                                              "SLURM_STEP_NODELIST", lists[i].list));
        expect_place(&place, FSDP_LAUNCHED_SLURM, 2, 8);
        cr_assert_str_eq(place.host, lists[i].first);
        cr_assert(place.port >= 10000 && place.port < 30000);
        cr_assert_str_eq(place.job, "slurm 9.1");
    }
    fsdp_place place = detect(ENVIRONMENT(SLURM, "FSDP_MASTER", "h:12"));
    cr_assert_str_eq(place.host, "h");
    cr_assert_eq(place.port, 12);
    cr_assert_neq(detect(ENVIRONMENT(SLURM, "SLURM_JOB_ID", "9", "SLURM_STEP_ID", "1")).port,
                  detect(ENVIRONMENT(SLURM, "SLURM_JOB_ID", "9", "SLURM_STEP_ID", "2")).port);
}

Test(detection, takes_a_batch_script_for_no_rank)
{
    fsdp_place place = detect(ENVIRONMENT(SLURM, "SLURM_JOB_ID", "9"));
    expect_place(&place, FSDP_LAUNCHED_BARE, 0, 1);
}

Test(detection, names_what_is_missing_or_wrong)
{
    static const struct {
        const char *variables[MOST], *text;
    } cases[] = {
        {{"WORLD_SIZE", "4", NULL}, "RANK is not set"},
        {{"RANK", "0", NULL}, "WORLD_SIZE is not set, but other variables of torchrun's variables"},
        {{"RANK", "0", "WORLD_SIZE", "4", NULL}, "LOCAL_WORLD_SIZE is not set"},
        {{"RANK", "0", "WORLD_SIZE", "4", "LOCAL_WORLD_SIZE", "2", NULL}, "LOCAL_RANK is not set"},
        {{"RANK", "0", "WORLD_SIZE", "4", "LOCAL_WORLD_SIZE", "2", "LOCAL_RANK", "0", NULL},
         "MASTER_ADDR is not set"},
        {{"LOCAL_RANK", "0", NULL}, "WORLD_SIZE is not set"},
        {{"RANK", "4", "WORLD_SIZE", "4", NULL}, "RANK is '4', not a whole number from 0 to 3"},
        {{"RANK", "x", "WORLD_SIZE", "4", NULL}, "RANK is 'x'"},
        {{"FSDP_RANK", "0", NULL}, "FSDP_WORLD_SIZE is not set"},
        {{"FSDP_RANK", "0", "FSDP_WORLD_SIZE", "2", NULL}, "FSDP_MASTER is not set"},
        {{"FSDP_RANK", "0", "FSDP_WORLD_SIZE", "2", "FSDP_MASTER", "here", NULL},
         "FSDP_MASTER is 'here', not HOST:PORT"},
        {{"FSDP_RANK", "0", "FSDP_WORLD_SIZE", "2", "FSDP_MASTER", ":1", NULL}, "HOST:PORT"},
        {{"FSDP_RANK", "0", "FSDP_WORLD_SIZE", "2", "FSDP_MASTER", "[::1]:0", NULL},
         "FSDP_MASTER is '[::1]:0', not HOST:PORT"},
        {{"FSDP_RANK", "0", "FSDP_WORLD_SIZE", "2", "FSDP_MASTER", "h:0", NULL}, "HOST:PORT"},
        {{"OMPI_COMM_WORLD_RANK", "0", NULL}, "OMPI_COMM_WORLD_SIZE is not set"},
        {{"SLURM_PROCID", "0", NULL}, "SLURM_NTASKS is not set"},
        {{"SLURM_PROCID", "0", "SLURM_NTASKS", "2", NULL}, "SLURM_LOCALID is not set"},
        {{"PMIX_RANK", "-1", NULL}, "PMIX_RANK is '-1'"},
        {{"PMI_RANK", "0", NULL},
         "PMI_SIZE is not set, but other variables of mpiexec's variables"},
        {{"PMI_SIZE", "2", NULL}, "PMI_RANK is not set"},
        {{"MPI_LOCALRANKID", "0", NULL}, "PMI_SIZE is not set"},
        {{"PALS_RANKID", "0", NULL}, "PMI_SIZE is not set"},
        {{"MV2_COMM_WORLD_RANK", "0", NULL}, "MV2_COMM_WORLD_SIZE is not set"},
        {{"FLUX_TASK_RANK", "0", NULL}, "FLUX_JOB_SIZE is not set"},
        {{SLURM, "SLURM_NODELIST", "rack[1-2]x[3-4]", NULL}, "first host of 'rack[1-2]x[3-4]'"},
        {{SLURM, "SLURM_NODELIST", "node[1-2]-ib", NULL}, "set FSDP_MASTER=HOST:PORT"},
        {{SLURM, "SLURM_NODELIST", "node[1-2", NULL}, "first host of 'node[1-2'"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        fsdp_place place;
        fsdp_error err = {0};
        cr_assert_eq(fsdp_launch_detect(look_up, (void *)cases[i].variables, &place, &err),
                     FSDP_ERR_USAGE, "%s", cases[i].text);
        cr_assert(strstr(err.text, cases[i].text), "%s", err.text);
    }
}

/* --- running ranks ---------------------------------------------------------------------------- */

typedef struct decision {
    fsdp_launch_options options;
    fsdp_launcher launcher;
    int size;
    fsdp_launch_mode mode;
    const char *text; /* NULL: no contradiction */
} decision;

static void expect_decision(const decision *want)
{
    fsdp_launch_options options = want->options;
    const fsdp_place place = {.launcher = want->launcher,
                              .size = want->size,
                              .is_mpi = want->launcher >= FSDP_LAUNCHED_OPEN_MPI &&
                                        want->launcher <= FSDP_LAUNCHED_FLUX};
    fsdp_launch_mode mode;
    fsdp_error err = {0};
    options.np_name = "--np";
    options.threads_name = "--threads";
    options.comm_name = "--comm";
    fsdp_status status = fsdp_launch_decide(&options, &place, &mode, &err);
    if (want->text) {
        cr_assert_eq(status, FSDP_ERR_USAGE, "%s", want->text);
        cr_assert(strstr(err.text, want->text), "%s", err.text);
    } else {
        cr_assert_eq(status, FSDP_OK, "%s", err.text);
        cr_assert_eq(mode, want->mode);
    }
}

Test(decision, follows_options_then_the_launcher)
{
    static const decision cases[] = {
        {{0}, FSDP_LAUNCHED_BARE, 1, FSDP_MODE_SELF, NULL},
        {{.comm = FSDP_COMM_SHM}, FSDP_LAUNCHED_BARE, 1, FSDP_MODE_SELF, NULL},
        {{.comm = FSDP_COMM_MPI}, FSDP_LAUNCHED_BARE, 1, FSDP_MODE_MPI, NULL},
        {{.np = 1}, FSDP_LAUNCHED_BARE, 1, FSDP_MODE_PROCESSES, NULL},
        {{.np = 3, .comm = FSDP_COMM_SHM}, FSDP_LAUNCHED_BARE, 1, FSDP_MODE_PROCESSES, NULL},
        {{.np = 1, .comm = FSDP_COMM_SELF}, FSDP_LAUNCHED_BARE, 1, FSDP_MODE_PROCESSES, NULL},
        {{.threads = 3}, FSDP_LAUNCHED_BARE, 1, FSDP_MODE_THREADS, NULL},
        {{.np = 3}, FSDP_LAUNCHED_SLURM, 1, FSDP_MODE_PROCESSES, NULL},
        {{0}, FSDP_LAUNCHED_TORCHRUN, 4, FSDP_MODE_TCP, NULL},
        {{0}, FSDP_LAUNCHED_TORCHRUN, 1, FSDP_MODE_SELF, NULL},
        {{.comm = FSDP_COMM_SHM}, FSDP_LAUNCHED_SLURM, 4, FSDP_MODE_TCP, NULL},
        {{0}, FSDP_LAUNCHED_OPEN_MPI, 4, FSDP_MODE_MPI, NULL},
        {{0}, FSDP_LAUNCHED_OPEN_MPI, 1, FSDP_MODE_MPI, NULL},
        {{.comm = FSDP_COMM_SHM}, FSDP_LAUNCHED_OPEN_MPI, 4, FSDP_MODE_MPI, NULL},
        {{.np = 2, .comm = FSDP_COMM_NCCL}, FSDP_LAUNCHED_BARE, 1, FSDP_MODE_PROCESSES, NULL},
        {{.threads = 2, .comm = FSDP_COMM_NCCL}, FSDP_LAUNCHED_BARE, 1, FSDP_MODE_THREADS, NULL},
        {{.comm = FSDP_COMM_NCCL}, FSDP_LAUNCHED_TORCHRUN, 4, FSDP_MODE_TCP, NULL},
        {{.comm = FSDP_COMM_NCCL}, FSDP_LAUNCHED_OPEN_MPI, 4, FSDP_MODE_MPI, NULL},
        {{.comm = FSDP_COMM_MPI}, FSDP_LAUNCHED_PMIX, 0, FSDP_MODE_MPI, NULL},
        {{0}, FSDP_LAUNCHED_PMI, 4, FSDP_MODE_MPI, NULL},
        {{.trace = "t"}, FSDP_LAUNCHED_BARE, 1, FSDP_MODE_SELF, NULL},
        {{.trace = "t-%r", .np = 2}, FSDP_LAUNCHED_BARE, 1, FSDP_MODE_PROCESSES, NULL},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        expect_decision(&cases[i]);
}

Test(decision, names_contradictions)
{
    static const decision cases[] = {
        {{.np = 2}, FSDP_LAUNCHED_OPEN_MPI, 4, 0, "--np contradicts mpirun"},
        {{.threads = 2}, FSDP_LAUNCHED_TORCHRUN, 4, 0, "--threads contradicts torchrun"},
        {{.np = 2}, FSDP_LAUNCHED_PMIX, 0, 0, "--np contradicts PMIx"},
        {{.np = 2}, FSDP_LAUNCHED_PMI, 4, 0, "--np contradicts mpiexec (PMI_RANK)"},
        {{.np = 2, .comm = FSDP_COMM_THREADS}, 0, 1, 0, "--comm threads contradicts --np"},
        {{.np = 2, .comm = FSDP_COMM_SELF}, 0, 1, 0, "--comm self contradicts --np"},
        {{.np = 2, .comm = FSDP_COMM_MPI}, 0, 1, 0, "--comm mpi contradicts --np"},
        {{.threads = 2, .comm = FSDP_COMM_SHM}, 0, 1, 0, "--comm shm contradicts --threads"},
        {{.comm = FSDP_COMM_THREADS}, FSDP_LAUNCHED_SLURM, 4, 0, "--comm threads contradicts srun"},
        {{.comm = FSDP_COMM_MPI}, FSDP_LAUNCHED_TORCHRUN, 4, 0, "--comm mpi contradicts torchrun"},
        {{.comm = FSDP_COMM_SELF}, FSDP_LAUNCHED_OPEN_MPI, 4, 0, "--comm self contradicts mpirun"},
        {{.trace = "t", .np = 2}, 0, 1, 0, "each rank needs a separate file"},
        {{.trace = "t"}, FSDP_LAUNCHED_SLURM, 2, 0, "each rank needs a separate file"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        expect_decision(&cases[i]);
}

/* --- many ranks ------------------------------------------------------------------------------- */

Test(lifeline, without_a_file_for_it_names_the_limit)
{
    struct rlimit few = {.rlim_cur = 3, .rlim_max = 3};
    fsdp_process_watch line;
    fsdp_error err = {0};
    cr_assert_eq(setrlimit(RLIMIT_NOFILE, &few), 0);
    cr_assert_neq(fsdp_process_watch_open((int)getpid(), 5, &line, &err), FSDP_OK);
    cr_assert(strstr(err.text, "of rank 5") && strstr(err.text, "ulimit -n"), "%s", err.text);
}

/* --- supervision ------------------------------------------------------------------------------ */

Test(supervision, ends_when_something_else_has_waited_for_a_rank)
{
    fsdp_supervisor *supervisor = NULL;
    fsdp_error err = {0};
    cr_assert_eq(fsdp_supervisor_create(1, 1000, &supervisor, &err), FSDP_OK, "%s", err.text);
    pid_t pid = fork();
    if (pid == 0)
        _exit(0);
    cr_assert_eq(waitpid(pid, NULL, 0), pid);
    fsdp_supervisor_add(supervisor, 0, pid);
    cr_assert_eq(fsdp_supervise(supervisor, false), FSDP_ERR_INTERNAL);
    fsdp_supervisor_free(supervisor);
}
