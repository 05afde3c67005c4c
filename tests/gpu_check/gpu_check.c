/* The program gpu-check: options, and the checks in their order. See gpu_check.h. */
#include "tests/gpu_check/gpu_check.h"

#include <errno.h>
#include <getopt.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "base/core/clock.h"
#include "base/io/io.h"

enum { ALL_SECONDS = 530, QUICK_SECONDS = 172, LEAST_SECONDS = 2, LEAST_BYTES = 1 << 16 };

static const char *const usage =
    "usage: gpu-check [OPTION]...\n"
    "Measures and checks on an NVIDIA GPU all that fsdp does there (docs/gpu.md).\n"
    "\n"
    "  --quick       smaller data: within 3 minutes, otherwise within 9\n"
    "  --only NAME   rows whose names begin with NAME, and the copies that they are compared with\n"
    "  --json FILE   writes the rows into FILE, too\n"
    "  --build       compiles the kernels again by this machine's nvcc, and checks those\n"
    "  --device NAME cuda:0 (default), cuda:1, ...\n"
    "  --seed N      of random data, to repeat a run\n"
    "  --bytes SIZE  of a kernel's data; below 256 MiB rates are not judged\n"
    "  --slow N      N times as many seconds for each check, on a machine that is busy\n"
    "  --list        prints the names of the checks\n"
    "  --version     prints the versions of this program and of its CUDA runtime, and the driver "
    "that it needs\n"
    "  --help        this text\n"
    "\n"
    "Exit code 0: nothing has failed; 1: some row has; 2: there is no GPU, or a wrong option.\n"
    "Nothing changes clocks, power or modes of the GPU, or resets it; at most half of its memory "
    "is used.\n";

/* --- the table -------------------------------------------------------------------------------- */

/* Seconds that a check may take: of all, and with --quick. Kernels come after the ceilings. */
static const gpu_check ceilings[] = {
    {"ceiling/", gpu_check_copies, 0, 30, 15},
    {"ceiling/product", gpu_check_product, 0, 40, 20},
};
static const gpu_check kernel_check = {"kernel/", gpu_check_kernel, 0, 30, 15};
static const gpu_check others[] = {
    {"staging/", gpu_check_staging, 0, 60, 20},
    {"load/", gpu_check_load, 0, 90, 30},
    {"async-save/", gpu_check_async_save, 0, 180, 40},
    {"collective/1-ranks/", gpu_check_collectives, 1, 20, 10},
    {"collective/2-ranks/", gpu_check_collectives, 2, 20, 10},
    {"collective/4-ranks/", gpu_check_collectives, 4, 20, 10},
    {"training/1-ranks/", gpu_check_training, 1, 30, 15},
    {"training/2-ranks/", gpu_check_training, 2, 30, 15},
    {"training/4-ranks/", gpu_check_training, 4, 30, 15},
    {"reload/1-to-", gpu_check_reload, 1, 30, 15},
    {"reload/2-to-", gpu_check_reload, 2, 30, 15},
    {"reload/4-to-", gpu_check_reload, 4, 30, 15},
    {"failure/abort", gpu_check_failure, GPU_RANK_ABORTS, 20, 20},
    {"failure/deadline", gpu_check_failure, GPU_RANK_IS_LATE, 20, 20},
    {"scenarios/1-ranks/", gpu_check_scenarios, 1, 60, 40},
    {"scenarios/2-ranks/", gpu_check_scenarios, 2, 60, 40},
    {"scenarios/4-ranks/", gpu_check_scenarios, 4, 60, 40},
    {"nccl/", gpu_check_nccl, 0, 40, 20},
    {"scaling/2-gpus/", gpu_check_scaling, 2, 60, 30},
    {"scaling/8-gpus/", gpu_check_scaling, 8, 90, 40},
};

/* The i-th check; false after the last. */
static bool check_at(int i, gpu_check *out)
{
    const int first = (int)(sizeof ceilings / sizeof *ceilings), kernels = gpu_kernel_count();
    if (i < first) {
        *out = ceilings[i];
    } else if (i < first + kernels) {
        *out = kernel_check;
        out->argument = i - first;
        out->name = gpu_kernel_name(i - first);
    } else if (i - first - kernels < (int)(sizeof others / sizeof *others)) {
        *out = others[i - first - kernels];
    } else {
        return false;
    }
    return true;
}

/* The name of a check is the beginning of those of its rows, and either may be the longer one. */
static bool is_named(const char *only, const char *name)
{
    size_t a = strlen(only), b = strlen(name);
    return strncmp(only, name, a < b ? a : b) == 0;
}

static bool is_wanted(const gpu_options *options, const gpu_check *check)
{
    return !options->only || check->body == gpu_check_copies ||
           is_named(options->only, check->name);
}

static void run_checks(gpu_results *results, int64_t began_ms)
{
    const gpu_options *options = &results->options;
    const double whole = (options->quick ? QUICK_SECONDS : ALL_SECONDS) * options->slow;
    gpu_check check;
    for (int i = 0; check_at(i, &check) && !gpu_stopped(); i++) {
        double left = whole - (double)(fsdp_now_ms() - began_ms) * 1e-3;
        double seconds = (options->quick ? check.quick_seconds : check.seconds) * options->slow;
        if (!is_wanted(options, &check))
            continue;
        if (left >= LEAST_SECONDS) {
            gpu_run_check(results, &check, seconds < left ? seconds : left);
            continue;
        }
        gpu_row *row = gpu_add_row(results, "%s", check.name);
        gpu_fail_row(row, "not begun: the %.0f s of all checks are over", whole);
        gpu_print_row(row);
    }
}

/* --- options ---------------------------------------------------------------------------------- */

_Noreturn static void refuse(const char *option, const char *value)
{
    fprintf(stderr, "error: %s '%s' is not known; gpu-check --help lists what is\n", option, value);
    exit(FSDP_ERR_USAGE);
}

static uint64_t read_number(const char *option, const char *text, bool is_size)
{
    static const char units[] = "kmg";
    char *end = NULL;
    uint64_t value = strtoull(text, &end, 10);
    const char *unit = is_size && *end ? strchr(units, *end | 0x20) : NULL;
    if (unit) {
        value <<= 10 * (unit - units + 1);
        end++;
    }
    if (end == text || *end || text[0] == '-')
        refuse(option, text);
    return value;
}

static void list_checks(FILE *to)
{
    gpu_check check;
    for (int i = 0; check_at(i, &check); i++)
        fprintf(to, "%s\n", check.name);
}

static void print_version(void)
{
    char runtime[160];
    gpu_spell_runtime(runtime, sizeof runtime);
    printf("gpu-check %s\n%s\n", fsdp_version(), runtime);
}

static void refuse_unnamed(const char *only)
{
    gpu_check check;
    for (int i = 0; check_at(i, &check); i++)
        if (is_named(only, check.name))
            return;
    fprintf(stderr, "error: no row's name begins with '%s' (--only); the checks are:\n", only);
    list_checks(stderr);
    exit(FSDP_ERR_USAGE);
}

enum {
    KEY_QUICK = 256,
    KEY_ONLY,
    KEY_JSON,
    KEY_BUILD,
    KEY_DEVICE,
    KEY_SEED,
    KEY_BYTES,
    KEY_SLOW,
    KEY_LIST,
    KEY_VERSION,
    KEY_HELP
};

static void take_option(gpu_options *options, int key)
{
    switch (key) {
    case KEY_QUICK: options->quick = true; return;
    case KEY_ONLY: options->only = optarg; return;
    case KEY_JSON: options->json = optarg; return;
    case KEY_BUILD: options->build = true; return;
    case KEY_DEVICE: options->device = optarg; return;
    case KEY_SEED: options->seed = read_number("--seed", optarg, false); return;
    case KEY_BYTES: options->bytes = (size_t)read_number("--bytes", optarg, true); return;
    case KEY_SLOW: options->slow = (double)read_number("--slow", optarg, false); return;
    case KEY_LIST: list_checks(stdout); exit(0);
    case KEY_VERSION: print_version(); exit(0);
    case KEY_HELP: fputs(usage, stdout); exit(0);
    default: fprintf(stderr, "gpu-check --help lists the options\n"); exit(FSDP_ERR_USAGE);
    }
}

static void read_options(gpu_options *options, int argc, char **argv)
{
    static const struct option known[] = {{"quick", no_argument, NULL, KEY_QUICK},
                                          {"only", required_argument, NULL, KEY_ONLY},
                                          {"json", required_argument, NULL, KEY_JSON},
                                          {"build", no_argument, NULL, KEY_BUILD},
                                          {"device", required_argument, NULL, KEY_DEVICE},
                                          {"seed", required_argument, NULL, KEY_SEED},
                                          {"bytes", required_argument, NULL, KEY_BYTES},
                                          {"slow", required_argument, NULL, KEY_SLOW},
                                          {"list", no_argument, NULL, KEY_LIST},
                                          {"version", no_argument, NULL, KEY_VERSION},
                                          {"help", no_argument, NULL, KEY_HELP},
                                          {0}};
    *options = (gpu_options){.device = "cuda:0", .slow = 1};
    if (getrandom(&options->seed, sizeof options->seed, 0) != sizeof options->seed)
        options->seed = (uint64_t)fsdp_now_ms();
    for (int key; (key = getopt_long(argc, argv, "", known, NULL)) != -1;)
        take_option(options, key);
    if (optind < argc)
        refuse("argument", argv[optind]);
    if (options->slow < 1 || options->slow > 100) {
        fprintf(stderr, "error: --slow: 1 to 100 are allowed\n");
        exit(FSDP_ERR_USAGE);
    }
    if (options->only)
        refuse_unnamed(options->only);
    if (options->bytes == 0)
        options->bytes = options->quick ? (size_t)1 << 28 : (size_t)1 << 30;
    if (options->bytes < LEAST_BYTES)
        options->bytes = LEAST_BYTES;
    options->judges_rates = options->bytes >= (size_t)1 << 28;
}

/* --- places ----------------------------------------------------------------------------------- */

/* The folder of this program. */
static void find_folder(char *out, size_t out_size)
{
    ssize_t size = readlink("/proc/self/exe", out, out_size - 1);
    out[size > 0 ? size : 0] = '\0';
    char *slash = strrchr(out, '/');
    if (slash)
        *slash = '\0';
}

/* Memory for the state's checkpoint, a new one next to it, and one that is loaded. */
static bool has_room(const char *folder, double state_bytes)
{
    struct statvfs found;
    return access(folder, W_OK) == 0 && statvfs(folder, &found) == 0 &&
           (double)found.f_bavail * (double)found.f_frsize > 3 * state_bytes;
}

/* Checkpoints lie in memory where they can: disks are not what is measured. */
static fsdp_status make_work_folder(const gpu_results *results, char *out, size_t out_size,
                                    fsdp_error *err)
{
    const char *folder = getenv("TMPDIR");
    if (!folder || !*folder)
        folder = has_room("/dev/shm", gpu_state_bytes(results)) ? "/dev/shm" : "/tmp";
    snprintf(out, out_size, "%s/gpu-check-XXXXXX", folder);
    return mkdtemp(out)
               ? FSDP_OK
               : fsdp_fail_errno(err, errno, "cannot make a folder in '%s' (TMPDIR)", folder);
}

/* --- the whole -------------------------------------------------------------------------------- */

static int end_with(const fsdp_error *err)
{
    fflush(stdout);
    return fsdp_error_report(err);
}

/* A check that runs for --only may have no row of that name. One that failed as a whole has its own name. */
static fsdp_status expect_wanted_row(const gpu_results *results, fsdp_error *err)
{
    const char *only = results->options.only;
    for (int i = 0; i < results->count; i++)
        if (!only || strncmp(results->rows[i].name, only, strlen(only)) == 0 ||
            results->rows[i].verdict == GPU_FAILED)
            return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_USAGE,
                     "no row's name begins with '%s' (--only); a shorter name shows the rows",
                     only ? only : "");
}

static fsdp_status find_gpu(gpu_results *results, fsdp_error *err)
{
    static const gpu_check device = {"device", gpu_check_device, 0, 60, 60};
    gpu_run_check(results, &device, device.seconds);
    if (results->facts.memory > 0)
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_USAGE, "%s",
                     results->facts.missing[0]
                         ? results->facts.missing
                         : "the GPU does not answer: nvidia-smi shows its state");
}

static fsdp_status check_all(gpu_results *results, int64_t began_ms, bool *is_good_out,
                             fsdp_error *err)
{
    static char work[PATH_MAX];
    FSDP_TRY(find_gpu(results, err));
    if (results->options.json)
        FSDP_TRY(gpu_try_json(results->options.json, err));
    FSDP_TRY(make_work_folder(results, work, sizeof work, err));
    results->options.work = work;
    gpu_print_heading(results);
    run_checks(results, began_ms);
    (void)fsdp_io_remove_tree(NULL, work, NULL);
    *is_good_out = gpu_print_sum(results);
    if (!gpu_stopped())
        FSDP_TRY(expect_wanted_row(results, err));
    if (results->options.json)
        FSDP_TRY(gpu_write_json(results, results->options.json, err));
    return gpu_stopped() ? fsdp_fail(err, FSDP_ERR_CANCELLED, "stopped by a signal") : FSDP_OK;
}

int main(int argc, char **argv)
{
    static char folder[PATH_MAX];
    const int64_t began_ms = fsdp_now_ms();
    bool is_good = false;
    fsdp_error err = {0};
    gpu_results *results = gpu_results_create();
    if (!results) {
        fsdp_fail(&err, FSDP_ERR_LIMIT, "no memory for results");
        return end_with(&err);
    }
    read_options(&results->options, argc, argv);
    find_folder(folder, sizeof folder);
    results->options.folder = folder;
    gpu_catch_signals();
    fsdp_status status = results->options.build
                             ? gpu_build_and_become(&results->options, argc, argv, &err)
                             : check_all(results, began_ms, &is_good, &err);
    return status != FSDP_OK ? end_with(&err) : is_good ? 0 : 1;
}
