/* Conversions that are killed and resumed, for every target: the bytes equal those of an uninterrupted one,
 * written bytes are not written again, and leftovers of dead processes are removed. */
#include "base/text.h"
#include "tests/support/disk/io_fault.h"
#include "base/core/mem.h"
#include "statedict/commit/commit_internal.h"
#include "statedict/commit/resume.h"
#include "tests/support/sample_state.h"

#include <criterion/criterion.h>
#include <errno.h>
#include <fsdp/fsdp.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

enum { ROWS = 400, COLUMNS = 1024, LARGE = 3, SMALL = 20, MOMENTS = 6 };

static char directory[64];
static char kept_notice[200], first_notice[200];

static const char *path_of(const char *name)
{
    static char paths[4][200];
    static int next;
    char *path = paths[next++ % 4];
    snprintf(path, sizeof paths[0], "%s/%s", directory, name);
    return path;
}

/* The second one is the moment of the first. */
static void add_name(fsdp_text *header, int i)
{
    if (i == 1)
        fsdp_text_addf(header, "\"optim.state.t00.exp_avg\"");
    else
        fsdp_text_addf(header, "\"t%02d\"", i);
}

/* A safetensors file of 5 MiB: large tensors and small ones. */
static void put_source(void)
{
    fsdp_text header = {0};
    int64_t at = 0;
    fsdp_text_addf(&header, "{");
    for (int i = 0; i < LARGE + SMALL; i++) {
        int rows = i < LARGE ? ROWS : 3;
        int64_t size = (int64_t)rows * COLUMNS * 4;
        fsdp_text_addf(&header, "%s", i > 0 ? "," : "");
        add_name(&header, i);
        fsdp_text_addf(&header,
                       ":{\"dtype\":\"F32\",\"shape\":[%d,%d],\"data_offsets\":[%" PRId64
                       ",%" PRId64 "]}",
                       rows, COLUMNS, at, at + size);
        at += size;
    }
    fsdp_text_addf(&header, "}");
    uint64_t length = header.size;
    FILE *file = fopen(path_of("source.safetensors"), "wb");
    cr_assert(file && fwrite(&length, 8, 1, file) == 1);
    cr_assert_eq(fwrite(header.data, 1, header.size, file), header.size);
    for (int64_t i = 0; i < at / 4; i++) {
        uint32_t element = (uint32_t)(i * 2654435761u) >> 9 | 0x3f000000u;
        cr_assert_eq(fwrite(&element, 4, 1, file), 1);
    }
    cr_assert_eq(fclose(file), 0);
    fsdp_text_release(&header);
}

static void begin(void)
{
    fsdp_error err = {0};
    strcpy(directory, access("/dev/shm", W_OK) == 0 ? "/dev/shm/fsdp-resume-XXXXXX"
                                                    : "/tmp/fsdp-resume-XXXXXX");
    cr_assert(mkdtemp(directory));
    put_source();
    cr_assert_eq(fsdp_io_mkdir(NULL, path_of("whole"), &err), FSDP_OK);
    cr_assert_eq(fsdp_io_mkdir(NULL, path_of("cut"), &err), FSDP_OK);
}

static void end(void)
{
    cr_assert_eq(fsdp_io_remove_tree(NULL, directory, NULL), FSDP_OK);
}

TestSuite(resume, .init = begin, .fini = end);

/* --- conversions ------------------------------------------------------------------------------ */

static void keep_notice(void *user, const char *text)
{
    (void)user;
    if (first_notice[0] == '\0')
        snprintf(first_notice, sizeof first_notice, "%s", text);
    snprintf(kept_notice, sizeof kept_notice, "%s", text);
}

static fsdp_convert_opts opts_for(const char *format)
{
    return (fsdp_convert_opts){
        .format = format, .threads = 1, .skip_fsync = true, .watch = {.notice = keep_notice}};
}

static fsdp_status convert(const char *to, fsdp_convert_opts opts, fsdp_error *err)
{
    first_notice[0] = kept_notice[0] = '\0';
    return fsdp_checkpoint_convert(path_of("source.safetensors"), path_of(to), &opts, err);
}

/* Converts in a process that is killed before its n-th call that writes. */
static void convert_and_die(fsdp_convert_opts opts, int64_t n)
{
    int status;
    pid_t child = fork();
    if (child == 0) {
        fsdp_fault_plan plan = {.calls = FSDP_CALLS_WRITES, .at = n, .action = FSDP_FAULT_KILL};
        fsdp_io *io = NULL;
        if (fsdp_io_fault_create(NULL, &plan, &io, NULL) != FSDP_OK)
            _exit(1);
        opts.open.access.disk = io;
        _exit(convert("cut/out", opts, NULL) == FSDP_OK ? 2 : 3);
    }
    cr_assert(child > 0 && waitpid(child, &status, 0) == child);
    cr_assert(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL, "call %" PRId64 ": %x", n,
              (unsigned)status);
}

static int64_t count_writes(fsdp_convert_opts opts)
{
    fsdp_error err = {0};
    fsdp_fault_plan plan = {.calls = FSDP_CALLS_WRITES};
    fsdp_io *io = NULL;
    cr_assert_eq(fsdp_io_fault_create(NULL, &plan, &io, &err), FSDP_OK);
    opts.open.access.disk = io;
    cr_assert_eq(convert("whole/out", opts, &err), FSDP_OK, "%s", err.text);
    int64_t calls = fsdp_io_fault_calls(io);
    fsdp_io_fault_free(io);
    return calls;
}

/* The bytes that this process has passed to write calls so far. */
static int64_t bytes_written(void)
{
    char line[100];
    int64_t bytes = -1;
    FILE *file = fopen("/proc/self/io", "r");
    while (file && fgets(line, sizeof line, file))
        sscanf(line, "wchar: %" SCNd64, &bytes);
    if (file)
        fclose(file);
    return bytes;
}

/* --- state on the disk ------------------------------------------------------------------------ */

static bool run_diff(const char *a, const char *b)
{
    char command[500];
    snprintf(command, sizeof command, "diff -r -x .saving %s %s >/dev/null", a, b);
    return system(command) == 0;
}

static int count_name(void *user, const char *name)
{
    (void)name;
    ++*(int *)user;
    return 0;
}

static int names_in(const char *name)
{
    int count = 0;
    fsdp_io *io = fsdp_io_posix();
    cr_assert_eq(io->ops->list(io, path_of(name), count_name, &count), 0);
    return count;
}

/* A staging directory with an empty marker is never removed: docs/commit.md. */
enum { SIGNED = 9 };

static void expect_same(const char *what, int64_t n)
{
    cr_assert(run_diff(path_of("whole/out"), path_of("cut/out")), "%s, killed at %" PRId64, what,
              n);
    cr_assert(n < SIGNED || names_in("cut") == 1, "%s, killed at %" PRId64 ": leftovers", what, n);
}

static void remove_output(const char *name)
{
    cr_assert_eq(fsdp_io_remove_tree(NULL, path_of(name), NULL), FSDP_OK);
    cr_assert_eq(fsdp_io_mkdir(NULL, path_of(name), NULL), FSDP_OK);
}

/* --- killed and resumed ----------------------------------------------------------------------- */

static void resume_at(const char *what, fsdp_convert_opts opts, int64_t n)
{
    fsdp_error err = {0};
    remove_output("cut");
    convert_and_die(opts, n);
    opts.resume = true;
    fsdp_status st = convert("cut/out", opts, &err);
    if (st == FSDP_ERR_EXISTS) { /* it was published; the next conversion removes the leftovers */
        cr_assert(run_diff(path_of("whole/out"), path_of("cut/out")), "%s, %" PRId64, what, n);
        opts.overwrite = true;
        st = convert("cut/out", opts, &err);
    }
    cr_assert_eq(st, FSDP_OK, "%s, killed at %" PRId64 ": %s", what, n, err.text);
    expect_same(what, n);
}

/* Near the end of a conversion almost no bytes are left to write. */
static void expect_saved(const char *what, fsdp_convert_opts opts, int64_t n, int64_t whole)
{
    fsdp_error err = {0};
    remove_output("cut");
    convert_and_die(opts, n);
    opts.resume = true;
    int64_t before = bytes_written();
    cr_assert_eq(convert("cut/out", opts, &err), FSDP_OK, "%s: %s", what, err.text);
    int64_t written = bytes_written() - before;
    cr_expect_lt(written, whole / 4, "%s: %" PRId64 " of %" PRId64, what, written, whole);
    cr_expect(strstr(first_notice, "resuming"), "%s: %s", what, first_notice);
    cr_expect(strstr(kept_notice, "were not written again"), "%s: %s", what, kept_notice);
    expect_same(what, n);
}

/* The publishing calls are the last ones; before them everything is written. */
static void kill_and_resume(const char *what, fsdp_convert_opts opts)
{
    enum { PUBLISHING = 12 };
    int64_t before = bytes_written();
    int64_t calls = count_writes(opts), whole = bytes_written() - before;
    const int64_t every = test_sample_at_most(5);
    for (int64_t i = 1; i <= MOMENTS; i += every)
        resume_at(what, opts, calls * i / (MOMENTS + 1) + 1);
    for (int64_t n = calls - PUBLISHING; n <= calls; n += every)
        resume_at(what, opts, n);
    for (int64_t n = 1; n < PUBLISHING; n += 2 * every)
        resume_at(what, opts, n);
    expect_saved(what, opts, calls - PUBLISHING, whole);
}

Test(resume, of_ours)
{
    kill_and_resume("fsdp", opts_for("fsdp"));
}

Test(resume, of_ours_for_ranks)
{
    fsdp_convert_opts opts = opts_for("fsdp");
    opts.world = 3;
    opts.shard_dim = 1;
    kill_and_resume("fsdp for 3", opts);
}

Test(resume, of_hf)
{
    fsdp_convert_opts opts = opts_for("hf");
    opts.max_shard_bytes = 2 << 20;
    kill_and_resume("hf", opts);
}

Test(resume, of_safetensors)
{
    kill_and_resume("safetensors", opts_for("safetensors"));
}

Test(resume, of_torch)
{
    kill_and_resume("torch", opts_for("torch"));
}

Test(resume, of_npz)
{
    kill_and_resume("npz", opts_for("npz"));
}

Test(resume, of_dcp)
{
    fsdp_convert_opts opts = opts_for("dcp");
    opts.world = 2;
    opts.shard_dim = 1;
    kill_and_resume("dcp", opts);
}

Test(resume, of_universal)
{
    fsdp_convert_opts opts = opts_for("universal");
    opts.skip_verify = true; /* files that are read back are closed after the result has its name */
    kill_and_resume("universal", opts);
}

Test(resume, of_megatron)
{
    fsdp_convert_opts opts = opts_for("megatron");
    opts.world = 2;
    opts.shard_dim = 1;
    kill_and_resume("megatron", opts);
}

Test(resume, of_dcp_unverified)
{
    fsdp_convert_opts opts = opts_for("dcp");
    opts.skip_verify = true;
    kill_and_resume("dcp, not verified", opts);
}

/* Encoded files are kept only if they are finished; the result is equal for a kill at any moment. */
Test(resume, of_ours_encoded)
{
    fsdp_convert_opts opts = opts_for("fsdp");
    opts.world = 2;
    opts.compress = true;
    int64_t calls = count_writes(opts);
    for (int64_t i = 1; i <= MOMENTS; i++)
        resume_at("encoded", opts, calls * i / (MOMENTS + 1) + 1);
}

static int64_t bytes_needed(fsdp_convert_opts opts)
{
    fsdp_error err = {0};
    fsdp_conversion *conversion;
    cr_assert_eq(fsdp_conversion_open(path_of("source.safetensors"), path_of("cut/out"), &opts,
                                      &conversion, &err),
                 FSDP_OK, "%s", err.text);
    int64_t bytes = fsdp_conversion_plan(conversion)->bytes_needed;
    fsdp_conversion_close(conversion);
    return bytes;
}

/* The size of encoded data is unknown and counts as zero, before and after a resume. */
Test(resume, needs_no_more_room_than_before_and_never_less_than_none)
{
    for (int compress = 0; compress < 2; compress++) {
        fsdp_convert_opts opts = opts_for("fsdp");
        opts.world = 2;
        opts.compress = compress;
        remove_output("whole");
        remove_output("cut");
        int64_t calls = count_writes(opts);
        int64_t anew = bytes_needed(opts);
        convert_and_die(opts, calls * MOMENTS / (MOMENTS + 1) + 1);
        opts.resume = true;
        int64_t rest = bytes_needed(opts);
        cr_expect_geq(rest, 0);
        cr_expect(compress ? rest == anew : rest < anew / 2, "%" PRId64 " of %" PRId64, rest, anew);
    }
}

/* --- stagings that are not resumed ------------------------------------------------------------ */

Test(resume, of_another_plan_begins_anew)
{
    fsdp_error err = {0};
    fsdp_convert_opts opts = opts_for("torch");
    int64_t calls = count_writes(opts);
    convert_and_die(opts, calls / 2);
    opts.select.exclude = "t00";
    opts.resume = true;
    cr_assert_eq(convert("cut/out", opts, &err), FSDP_OK, "%s", err.text);
    cr_expect(strstr(first_notice, "starting from the beginning"), "%s", first_notice);
    cr_expect_eq(names_in("cut"), 1);
}

Test(resume, of_a_source_that_changed_begins_anew)
{
    fsdp_error err = {0};
    fsdp_convert_opts opts = opts_for("torch");
    int64_t calls = count_writes(opts);
    convert_and_die(opts, calls / 2);
    put_source();
    opts.resume = true;
    cr_assert_eq(convert("cut/out", opts, &err), FSDP_OK, "%s", err.text);
    cr_expect(strstr(first_notice, "starting from the beginning"), "%s", first_notice);
    expect_same("changed", calls / 2);
}

static int open_to_all(void *user, const char *name)
{
    char path[300];
    snprintf(path, sizeof path, "%s/%s", path_of("cut"), name);
    *(int *)user += chmod(path, 0777) == 0;
    return 0;
}

/* Others may have put links into a directory that they can write to. */
Test(resume, of_a_directory_that_others_write_to_begins_anew)
{
    fsdp_error err = {0};
    int opened = 0;
    fsdp_io *io = fsdp_io_posix();
    fsdp_convert_opts opts = opts_for("torch");
    int64_t calls = count_writes(opts);
    convert_and_die(opts, calls / 2);
    cr_assert_eq(io->ops->list(io, path_of("cut"), open_to_all, &opened), 0);
    cr_assert_eq(opened, 1);
    opts.resume = true;
    cr_assert_eq(convert("cut/out", opts, &err), FSDP_OK, "%s", err.text);
    cr_expect(strstr(first_notice, "starting from the beginning"), "%s", first_notice);
    expect_same("open to all", calls / 2);
}

/* --- free space ------------------------------------------------------------------------------- */

static int take_staging(void *user, const char *name)
{
    char *path = fsdp_path_join(path_of("cut"), name);
    snprintf(user, 300, "%s", path);
    fsdp_free(path);
    return 0;
}

/* Bytes of the dead conversion reduce the needed space; its journal and bytes of a live one do not. */
static void expect_room(const char *format)
{
    fsdp_error err = {0};
    fsdp_convert_opts opts = opts_for(format);
    char staging[300] = "", *notes;
    fsdp_file *marker;
    fsdp_io *io = fsdp_io_posix();
    int64_t calls = count_writes(opts);
    convert_and_die(opts, calls / 2);
    cr_assert_eq(io->ops->list(io, path_of("cut"), take_staging, staging), 0);
    int64_t whole = bytes_needed(opts);
    opts.resume = true;
    int64_t rest = bytes_needed(opts);
    cr_expect_lt(rest, whole - (1 << 20), "%s: %" PRId64 " of %" PRId64, format, rest, whole);

    notes = fsdp_path_join(staging, FSDP_RESUME_NAME);
    cr_assert_eq(truncate(notes, 3 << 20), 0);
    cr_expect_eq(bytes_needed(opts), rest, "%s: notes", format);
    fsdp_free(notes);

    cr_assert(fsdp_marker_take_over(io, staging, FSDP_MARKER_SAVING, &marker));
    cr_expect_eq(bytes_needed(opts), whole, "%s: a living one", format);
    cr_assert_eq(fsdp_io_close(&marker, staging, &err), FSDP_OK);
    cr_expect_eq(bytes_needed(opts), rest, "%s: dead again", format);
    remove_output("cut");
    remove_output("whole");
}

Test(resume, room_that_a_dead_one_took_is_not_asked_for)
{
    expect_room("torch");
    expect_room("fsdp");
}

/* --- nothing to resume ------------------------------------------------------------------------ */

static int64_t count_reads(fsdp_convert_opts opts)
{
    fsdp_error err = {0};
    fsdp_fault_plan plan = {.calls = 1 << FSDP_CALL_PREAD};
    fsdp_io *io = NULL;
    cr_assert_eq(fsdp_io_fault_create(NULL, &plan, &io, &err), FSDP_OK);
    opts.open.access.disk = io;
    cr_assert_eq(convert("whole/out", opts, &err), FSDP_OK, "%s", err.text);
    int64_t calls = fsdp_io_fault_calls(io);
    fsdp_io_fault_free(io);
    remove_output("whole");
    return calls;
}

/* --resume without leftovers costs no extra reads. */
Test(resume, of_nothing_reads_nothing_back)
{
    static const char *const formats[] = {"fsdp", "torch", "dcp"};
    for (size_t i = 0; i < sizeof formats / sizeof *formats; i++) {
        fsdp_convert_opts opts = opts_for(formats[i]);
        int64_t plain = count_reads(opts);
        opts.resume = true;
        cr_expect_eq(count_reads(opts), plain, "%s", formats[i]);
    }
}

static void spoil_result(const char *staging, int64_t offset)
{
    char path[300];
    snprintf(path, sizeof path, "%s/cut/%s/result", directory, staging);
    FILE *file = fopen(path, "r+b");
    cr_assert(file && fseek(file, (long)offset, SEEK_SET) == 0 && fputc(0x5a, file) == 0x5a);
    cr_assert_eq(fclose(file), 0);
}

static int take_name(void *user, const char *name)
{
    snprintf(user, 200, "%s", name);
    return 0;
}

/* A record of the journal is checked against the file. */
Test(resume, writes_what_was_spoiled_meanwhile)
{
    fsdp_error err = {0};
    char staging[200] = "";
    fsdp_convert_opts opts = opts_for("safetensors");
    int64_t calls = count_writes(opts);
    convert_and_die(opts, calls - 12);
    fsdp_io_posix()->ops->list(fsdp_io_posix(), path_of("cut"), take_name, staging);
    spoil_result(staging, 900000);
    opts.resume = true;
    cr_assert_eq(convert("cut/out", opts, &err), FSDP_OK, "%s", err.text);
    cr_expect(strstr(first_notice, "resuming"), "%s", first_notice);
    expect_same("spoiled", calls);
}

/* With --resume a failure keeps the staging directory; without, it is removed. */
Test(resume, of_a_failure)
{
    fsdp_error err = {0};
    const char *const formats[] = {"fsdp", "hf", "torch"};
    for (size_t i = 0; i < 3; i++) {
        fsdp_convert_opts opts = opts_for(formats[i]);
        int64_t calls = count_writes(opts);
        fsdp_fault_plan plan = {.calls = 1 << FSDP_CALL_PWRITE,
                                .at = calls / 3,
                                .forever = true,
                                .action = FSDP_FAULT_ERRNO,
                                .errnum = ENOSPC};
        for (int round = 0; round < 2; round++) {
            opts.resume = round == 1;
            fsdp_io *io = NULL;
            cr_assert_eq(fsdp_io_fault_create(NULL, &plan, &io, &err), FSDP_OK);
            opts.open.access.disk = io;
            cr_assert_eq(convert("cut/out", opts, &err), FSDP_ERR_NO_SPACE, "%s", err.text);
            fsdp_io_fault_free(io);
            cr_expect_eq(names_in("cut"), round, "%s", formats[i]);
        }
        opts.open.access.disk = NULL;
        cr_assert_eq(convert("cut/out", opts, &err), FSDP_OK, "%s", err.text);
        cr_expect(strstr(first_notice, "resuming"), "%s", first_notice);
        expect_same(formats[i], calls);
        remove_output("cut");
        remove_output("whole");
    }
}

static int wait_for_the_end(void *user, fsdp_io_call call, const char *path)
{
    (void)call;
    (void)path;
    (void)!write(*(int *)user, "x", 1);
    pause(); /* until it is killed */
    return -EIO;
}

Test(resume, never_takes_a_job_that_lives)
{
    int status, pipes[2];
    char byte;
    fsdp_error err = {0};
    fsdp_convert_opts opts = opts_for("torch");
    int64_t calls = count_writes(opts);
    cr_assert_eq(pipe(pipes), 0);
    pid_t child = fork();
    if (child == 0) {
        fsdp_fault_plan plan = {.calls = FSDP_CALLS_WRITES,
                                .at = calls / 2,
                                .action = FSDP_FAULT_CALL,
                                .call = wait_for_the_end,
                                .user = &pipes[1]};
        fsdp_io *io = NULL;
        if (fsdp_io_fault_create(NULL, &plan, &io, NULL) == FSDP_OK) {
            opts.open.access.disk = io;
            (void)!convert("cut/out", opts, NULL);
        }
        _exit(1);
    }
    cr_assert(child > 0 && read(pipes[0], &byte, 1) == 1);
    opts.resume = true;
    cr_assert_eq(convert("cut/out", opts, &err), FSDP_OK, "%s", err.text);
    cr_expect(strstr(first_notice, "starting from the beginning"), "%s", first_notice);
    cr_expect_eq(names_in("cut"), 2, "its staging directory stays");
    cr_assert(kill(child, SIGKILL) == 0 && waitpid(child, &status, 0) == child);
    opts.overwrite = true;
    cr_assert_eq(convert("cut/out", opts, &err), FSDP_OK, "%s", err.text);
    expect_same("lives", calls);
}
