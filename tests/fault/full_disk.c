/*
 * Full disks: a small real file system (tmpfs, where it may be mounted) or the simulated disk, with
 * every multiple of 64 KiB left free, and with every number of files left. Each kind, raw and
 * compressed; the space is also asked for in vain, so that the save runs into the end of the disk.
 * It works, or says what is missing, leaves nothing after and the old state untouched, and works
 * once there is room. Also: a read-only file system, and a limit on the size of files.
 *
 * usage: full_disk simulated|mounted [WORDS]    exit 77: no file system may be mounted here
 */
#include "tests/support/disk/io_fault.h"
#include "tests/support/disk/io_sim.h"
#include "tests/fault/scenario.h"
#include "tests/support/matrix_row.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <sys/wait.h>
#include <unistd.h>

enum {
    USUAL_SAMPLE = 270,
    STEP_BYTES = 64 << 10,
    DISK_BYTES = 8 << 20,
    DISK_FILES = 200,
    MOST_LEVELS = 64,
    SKIPPED = 77
};

typedef struct counts {
    int64_t levels, worked, refused, wrong, left, stuck;
} counts;

/* A file system that can be filled. */
typedef struct disk {
    fsdp_io *io;
    char root[SCENARIO_PATH];
    bool mounted;
} disk;

static void tell(const scenario *s, const char *what, int64_t level, const char *text)
{
    fprintf(stderr, "%s, %s, %" PRId64 " left: %s\n", s->name, what, level, text);
}

/* --- disks -------------------------------------------------------------------------------------- */

/* In a name space of our own, so that nothing stays mounted whatever happens. */
static bool may_mount(void)
{
    return unshare(CLONE_NEWNS) == 0 && mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL) == 0;
}

static bool open_real(disk *d, const char *folder)
{
    char options[100];
    snprintf(options, sizeof options, "size=%d,nr_inodes=%d", DISK_BYTES, DISK_FILES);
    *d = (disk){.io = fsdp_io_posix(), .mounted = true};
    scenario_path(d->root, "%s", folder);
    return mount("fsdp-test", folder, "tmpfs", 0, options) == 0;
}

static void close_disk(disk *d)
{
    if (!d->mounted)
        fsdp_sim_free(d->io);
    else if (umount2(d->root, MNT_DETACH) < 0)
        perror(d->root);
}

static bool open_simulated(disk *d)
{
    *d = (disk){.mounted = false};
    scenario_path(d->root, "/disk");
    return fsdp_sim_create(DISK_BYTES, &d->io, NULL) == FSDP_OK &&
           fsdp_io_mkdir(d->io, d->root, NULL) == FSDP_OK &&
           fsdp_io_sync_dir(d->io, "/", NULL) == FSDP_OK;
}

static int64_t free_bytes(const disk *d)
{
    fsdp_space space = {0};
    d->io->ops->space(d->io, d->root, &space);
    return space.free_bytes;
}

static int64_t free_files(const disk *d)
{
    fsdp_space space = {0};
    d->io->ops->space(d->io, d->root, &space);
    return space.free_files;
}

/* Leaves about so many bytes free. */
static void fill_bytes(const disk *d, int64_t bytes)
{
    char path[SCENARIO_PATH];
    fsdp_file *file = NULL;
    fsdp_error err = {0};
    scenario_path(path, "%s/filler", d->root);
    int64_t size = free_bytes(d) - bytes;
    if (size <= 0)
        return;
    char *zeros = calloc(1, (size_t)size);
    if (!zeros || fsdp_io_open(d->io, path, FSDP_IO_CREATE, &file, &err) != FSDP_OK ||
        fsdp_io_write(file, path, zeros, (size_t)size, 0, &err) != FSDP_OK ||
        fsdp_io_close(&file, path, &err) != FSDP_OK) {
        fprintf(stderr, "%s\n", err.text);
        abort();
    }
    free(zeros);
}

static void fill_files(const disk *d, int64_t files)
{
    for (int64_t n = free_files(d); n > files; n--) {
        char path[SCENARIO_PATH];
        fsdp_file *file = NULL;
        scenario_path(path, "%s/filler-%d", d->root, (int)n);
        if (fsdp_io_open(d->io, path, FSDP_IO_CREATE, &file, NULL) != FSDP_OK)
            return;
        (void)fsdp_io_close(&file, path, NULL);
    }
}

static int remove_filler(void *user, const char *name)
{
    const disk *d = user;
    char path[SCENARIO_PATH];
    if (strncmp(name, "filler", 6) == 0)
        d->io->ops->unlink(d->io, scenario_path(path, "%s/%s", d->root, name));
    return 0;
}

static void make_room(disk *d)
{
    for (int i = 0; i < 3; i++)
        d->io->ops->list(d->io, d->root, remove_filler, d);
}

/* --- one level ---------------------------------------------------------------------------------- */

static int no_answer(void *user, fsdp_io_call call, const char *path)
{
    (void)user;
    (void)call;
    (void)path;
    return -ENOSYS;
}

static fsdp_status act(const scenario *s, const disk *d, bool blind, fsdp_error *err)
{
    fsdp_fault_plan plan = {.calls = 1u << FSDP_CALL_SPACE,
                            .at = 1,
                            .forever = true,
                            .action = FSDP_FAULT_CALL,
                            .call = no_answer};
    fsdp_io *io = NULL;
    if (!blind)
        return scenario_act(s, d->io, d->root, err);
    FSDP_TRY(fsdp_io_fault_create(d->io, &plan, &io, err));
    fsdp_status st = scenario_act(s, io, d->root, err);
    fsdp_io_fault_free(io);
    return st;
}

static void judge_failure(const scenario *s, const disk *d, const char *what, int64_t level,
                          fsdp_status st, const fsdp_error *err, counts *c)
{
    fsdp_error why = {0};
    c->refused++;
    scenario_found found = scenario_look(s, d->io, d->root, &why);
    if (st != FSDP_ERR_NO_SPACE || !strstr(err->text, d->root) || found != FOUND_OLD) {
        c->wrong++;
        tell(s, what, level, err->text);
        tell(s, "and then", level, why.text);
    }
    if (scenario_leftovers(s, d->io, d->root) > 0) {
        c->left++;
        tell(s, what, level, "left something half-written");
    }
}

/* True when it worked. */
static bool run_level(const scenario *s, disk *d, const char *what, int64_t level, bool blind,
                      counts *c)
{
    fsdp_error err = {0};
    c->levels++;
    fsdp_status st = act(s, d, blind, &err);
    if (st != FSDP_OK)
        judge_failure(s, d, what, level, st, &err, c);
    else if (scenario_look(s, d->io, d->root, &err) == FOUND_NEW)
        c->worked++;
    else {
        c->wrong++;
        tell(s, what, level, err.text);
    }
    make_room(d);
    if (scenario_again(s, d->io, d->root, &err) != FSDP_OK) {
        c->stuck++;
        tell(s, "the next save", level, err.text);
    }
    return st == FSDP_OK;
}

/* --- all levels --------------------------------------------------------------------------------- */

static const char *only; /* of the works */

typedef bool (*opener)(disk *d, const char *folder);

static bool open_simulated_in(disk *d, const char *folder)
{
    (void)folder;
    return open_simulated(d);
}

static bool prepared(const scenario *s, disk *d, opener open, const char *folder)
{
    fsdp_error err = {0};
    if (open(d, folder) && scenario_prepare(s, d->io, d->root, &err) == FSDP_OK)
        return true;
    fprintf(stderr, "%s: cannot prepare: %s\n", s->name, err.text);
    return false;
}

/* When all levels were tried, one of them must have been enough. */
static bool never_worked(const scenario *s, const char *what, const test_sampler *sampler)
{
    if (sampler->every == 1)
        tell(s, what, MOST_LEVELS, "it never worked");
    return sampler->every > 1;
}

/* From no space at all until there is enough. */
static bool run_bytes(const scenario *s, opener open, const char *folder, bool blind,
                      test_sampler *sampler, counts *c)
{
    const char *what = blind ? "bytes, not known before" : "bytes";
    for (int64_t level = 0; level < MOST_LEVELS; level++) {
        disk d;
        if (!test_sampler_takes(sampler))
            continue;
        if (!prepared(s, &d, open, folder))
            return false;
        fill_bytes(&d, level * STEP_BYTES);
        bool worked = run_level(s, &d, what, level * STEP_BYTES, blind, c);
        close_disk(&d);
        if (worked)
            return true;
    }
    return never_worked(s, what, sampler);
}

static bool run_files(const scenario *s, opener open, const char *folder, bool blind,
                      test_sampler *sampler, counts *c)
{
    for (int64_t level = 0; level < MOST_LEVELS; level++) {
        disk d;
        if (!test_sampler_takes(sampler))
            continue;
        if (!prepared(s, &d, open, folder))
            return false;
        fill_files(&d, level);
        bool worked = run_level(s, &d, "files", level, blind, c);
        close_disk(&d);
        if (worked)
            return true;
    }
    return never_worked(s, "files", sampler);
}

static bool run_disk(const char *name, opener open, const char *folder, bool has_files)
{
    scenario s;
    counts bytes = {0}, files = {0};
    test_sampler sampler = {.every = test_sample(USUAL_SAMPLE)}, of_files = sampler;
    bool ok = true;
    for (int i = 0; scenario_next(&i, only, &s);) {
        s.model = STATE_MEGABYTE;
        if (scenario_is_fresh(&s) || s.world == 4)
            continue;
        for (int blind = 0; blind < 2; blind++) {
            ok = run_bytes(&s, open, folder, blind, &sampler, &bytes) && ok;
            if (has_files)
                ok = run_files(&s, open, folder, blind, &of_files, &files) && ok;
        }
    }
    const counts *all[] = {&bytes, &files};
    for (int i = 0; i < 1 + has_files; i++) {
        char what[100];
        snprintf(what, sizeof what, "%s, %s", name,
                 i == 0 ? "full at every 64 KiB" : "no files left");
        /* which level is enough is not known before */
        matrix_row row = {what, "levels", all[i]->levels, 0, sampler.every};
        ok = matrix_row_print(&row,
                              ": worked %" PRId64 ", refused %" PRId64 " | wrong %" PRId64
                              ", leftovers %" PRId64 ", next save fails %" PRId64,
                              all[i]->worked, all[i]->refused, all[i]->wrong, all[i]->left,
                              all[i]->stuck) &&
             ok;
        bool is_both = all[i]->worked > 0 && all[i]->refused > 0;
        ok = ok && all[i]->levels > 0 && (is_both || sampler.every > USUAL_SAMPLE) &&
             all[i]->wrong + all[i]->left + all[i]->stuck == 0;
    }
    return ok;
}

/* --- other limits ------------------------------------------------------------------------------- */

static bool is_refused(const scenario *s, disk *d, fsdp_status expected, const char *words)
{
    fsdp_error err = {0};
    fsdp_status st = scenario_act(s, d->io, d->root, &err);
    if (st == expected && strstr(err.text, words) && strstr(err.text, d->root) &&
        scenario_look(s, d->io, d->root, NULL) == FOUND_OLD)
        return true;
    tell(s, words, 0, err.text);
    return false;
}

static bool try_read_only(const char *folder)
{
    int works = 0, wrong = 0;
    for (int i = 0; i < SCENARIO_COUNT; i++) {
        scenario s = scenario_at(i);
        disk d;
        if (scenario_is_fresh(&s) || (i >= WORK_COUNT && !s.format))
            continue;
        if (!prepared(&s, &d, open_real, folder))
            return false;
        bool ok = mount("fsdp-test", folder, "tmpfs", MS_REMOUNT | MS_RDONLY, NULL) == 0;
        ok = is_refused(&s, &d, FSDP_ERR_IO, "Read-only file system") && ok;
        ok = mount("fsdp-test", folder, "tmpfs", MS_REMOUNT, NULL) == 0 && ok;
        ok = scenario_again(&s, d.io, d.root, NULL) == FSDP_OK && ok;
        close_disk(&d);
        works++;
        wrong += !ok;
    }
    matrix_row row = {"read-only file system", "works", works, only ? 0 : works, 0};
    return matrix_row_print(&row, " | not refused with the reason %d", wrong) && wrong == 0;
}

/* As `ulimit -f` does it, with SIGXFSZ ignored as a program must. In a child: limits stay. */
static bool try_file_size_limit(const char *folder)
{
    scenario s = scenario_at(WORK_RUN);
    disk d = {.io = fsdp_io_posix()};
    s.model = STATE_MEGABYTE;
    scenario_path(d.root, "%s/limited", folder);
    if (mkdir(d.root, 0777) < 0 || scenario_prepare(&s, d.io, d.root, NULL) != FSDP_OK)
        return false;
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        struct rlimit limit = {300000, 300000};
        signal(SIGXFSZ, SIG_IGN);
        setrlimit(RLIMIT_FSIZE, &limit);
        bool refused = is_refused(&s, &d, FSDP_ERR_NO_SPACE, "File too large") &&
                       scenario_leftovers(&s, d.io, d.root) == 0;
        _exit(refused ? 0 : 1);
    }
    int status = 1;
    waitpid(child, &status, 0);
    matrix_row row = {"limit on the size of files", "work", 1, 1, 0};
    return matrix_row_print(&row, " | not refused with the reason %d", status != 0) && status == 0;
}

static bool run_mounted(const char *folder)
{
    bool ok = run_disk("tmpfs", open_real, folder, true);
    return try_read_only(folder) && ok;
}

static bool run_simulated(const char *folder)
{
    bool ok = try_file_size_limit(folder);
    return run_disk("simulated disk", open_simulated_in, folder, false) && ok;
}

int main(int argc, char **argv)
{
    char folder[100];
    bool mounts = argc > 1 && strcmp(argv[1], "mounted") == 0;
    only = argc > 2 ? argv[2] : NULL;
    if (mounts && !may_mount()) {
        printf("no file system may be mounted here: none was filled\n");
        return SKIPPED;
    }
    if (!scenario_folder(folder, sizeof folder))
        return 1;
    bool ok = mounts ? run_mounted(folder) : run_simulated(folder);
    scenario_remove(folder);
    return ok ? 0 : 1;
}
