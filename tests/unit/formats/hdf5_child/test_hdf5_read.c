/*
 * HDF5 files as other programs write them, read through the child: what is listed and read, that nothing
 * else is opened, and that the child neither outlives its source nor harms it. tests/golden has files of
 * h5py and Keras.
 */
#include "base/core/mem.h"
#include "formats/hdf5/hdf5_file.h"
#include "formats/hdf5/hdf5_internal.h"
#include "formats/hdf5_child/hdf5_sandbox.h"
#include "formats/hdf5_child/hdf5_protocol.h"
#include "formats/source.h"

#include <criterion/criterion.h>
#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/inotify.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

static char dir[] = "/tmp/test_hdf5_read.XXXXXX";
static char path[300];

static void make_dir(void)
{
    cr_assert_not_null(mkdtemp(dir));
    snprintf(path, sizeof path, "%s/x.h5", dir);
}

static void remove_dir(void)
{
    fsdp_error err = {0};
    cr_assert_eq(fsdp_io_remove_tree(NULL, dir, &err), FSDP_OK, "%s", err.text);
}

TestSuite(hdf5_read, .init = make_dir, .fini = remove_dir);

#define ASSERT_OK(call) cr_assert_eq((call), FSDP_OK, "%s", err.text)
#define ASSERT_SAYS(words) cr_assert_not_null(strstr(err.text, (words)), "%s", err.text)

/* --- writing as others do --------------------------------------------------------------------- */

static hid_t create(void)
{
    hid_t file = H5Fcreate(path, H5F_ACC_TRUNC, H5P_DEFAULT, H5P_DEFAULT);
    cr_assert(file >= 0);
    return file;
}

/* Numbers 0, 1, 2, ... ; plist is consumed. */
static void add_numbers(hid_t where, const char *name, hid_t type, int ndim, const hsize_t *dims,
                        hid_t plist)
{
    hsize_t count = 1;
    for (int d = 0; d < ndim; d++)
        count *= dims[d];
    int *numbers = malloc(count * sizeof *numbers);
    for (hsize_t i = 0; i < count; i++)
        numbers[i] = (int)i;
    hid_t space = H5Screate_simple(ndim, dims, NULL);
    hid_t set = H5Dcreate2(where, name, type, space, H5P_DEFAULT, plist, H5P_DEFAULT);
    cr_assert(set >= 0 &&
              H5Dwrite(set, H5T_NATIVE_INT, H5S_ALL, H5S_ALL, H5P_DEFAULT, numbers) >= 0);
    free(numbers);
    H5Dclose(set);
    H5Sclose(space);
    if (plist != H5P_DEFAULT)
        H5Pclose(plist);
}

static void add_one(hid_t where, const char *name)
{
    const hsize_t dims[] = {3};
    add_numbers(where, name, H5T_STD_I32LE, 1, dims, H5P_DEFAULT);
}

static hid_t chunked(int ndim, const hsize_t *chunk)
{
    hid_t plist = H5Pcreate(H5P_DATASET_CREATE);
    cr_assert(H5Pset_chunk(plist, ndim, chunk) >= 0);
    return plist;
}

/* --- reading ---------------------------------------------------------------------------------- */

static fsdp_source *open_trusting(unsigned trust)
{
    fsdp_error err = {0};
    fsdp_source *source = NULL;
    ASSERT_OK(fsdp_source_open(fsdp_io_posix_trusting(trust), path, NULL, &source, &err));
    cr_assert_str_eq(fsdp_source_format(source), "hdf5");
    return source;
}

static fsdp_source *open_source(void)
{
    return open_trusting(0);
}

static void expect_refusal(fsdp_status status, const char *why)
{
    fsdp_error err = {0};
    fsdp_source *source = NULL;
    cr_assert_eq(fsdp_source_open(NULL, path, NULL, &source, &err), status, "%s", err.text);
    cr_assert_null(source);
    ASSERT_SAYS(why);
    ASSERT_SAYS(path);
}

/* All names, in their order, each followed by a space. */
static const char *names_of(fsdp_source *source)
{
    static char text[4096];
    text[0] = '\0';
    for (size_t i = 0; i < fsdp_source_entry_count(source); i++) {
        strcat(text, fsdp_source_entry_at(source, i)->name);
        strcat(text, " ");
    }
    return text;
}

static void expect_numbers(fsdp_source *source, size_t tensor, const fsdp_box *box)
{
    fsdp_error err = {0};
    fsdp_source_reader reader = {0};
    const fsdp_source_tensor *what = fsdp_source_tensor_at(source, tensor);
    int64_t count = fsdp_box_count(box);
    int32_t *data = malloc((size_t)count * sizeof *data);
    ASSERT_OK(fsdp_source_read(source, tensor, box, data, &reader, &err));
    int64_t lo[FSDP_MAX_DIMS];
    for (int64_t i = 0; i < count; i++) {
        int64_t rest = i;
        for (int d = box->ndim - 1; d >= 0; d--) {
            lo[d] = box->lo[d] + rest % box->len[d];
            rest /= box->len[d];
        }
        cr_assert_eq(data[i], fsdp_box_position(what->ndim, what->shape, lo), "element %lld of %s",
                     (long long)i, what->name);
    }
    fsdp_source_reader_release(&reader);
    free(data);
}

Test(hdf5_read, any_box_of_any_layout_and_byte_order)
{
    const hsize_t dims[] = {7, 11, 13}, chunk[] = {2, 5, 4};
    const fsdp_box boxes[] = {{3, {0, 0, 0}, {7, 11, 13}},
                              {3, {1, 3, 2}, {4, 7, 9}},
                              {3, {6, 10, 12}, {1, 1, 1}},
                              {3, {2, 5, 4}, {2, 5, 4}}};
    hid_t file = create();
    add_numbers(file, "a_plain", H5T_STD_I32LE, 3, dims, H5P_DEFAULT);
    add_numbers(file, "b_plain_big", H5T_STD_I32BE, 3, dims, H5P_DEFAULT);
    add_numbers(file, "c_chunked", H5T_STD_I32LE, 3, dims, chunked(3, chunk));
    add_numbers(file, "d_chunked_big", H5T_STD_I32BE, 3, dims, chunked(3, chunk));
    hid_t packed = chunked(3, chunk);
    H5Pset_shuffle(packed);
    H5Pset_deflate(packed, 4);
    add_numbers(file, "e_packed", H5T_STD_I32BE, 3, dims, packed);
    H5Fclose(file);
    fsdp_source *source = open_source();
    cr_assert_eq(fsdp_source_tensor_count(source), 5);
    for (size_t tensor = 0; tensor < 5; tensor++)
        for (size_t i = 0; i < sizeof boxes / sizeof boxes[0]; i++)
            expect_numbers(source, tensor, &boxes[i]);
    fsdp_source_close(source);
}

Test(hdf5_read, datasets_and_chunks_that_are_larger_than_one_answer)
{
    const hsize_t dims[] = {1500, 1100}, small[] = {100, 90}, large[] = {1500, 1000};
    const fsdp_box whole = {2, {0, 0}, {1500, 1100}}, part = {2, {3, 7}, {1400, 1090}};
    cr_assert_gt(1500 * 1000 * 4, FSDP_H5_REPLY_ROOM);
    hid_t file = create();
    add_numbers(file, "a", H5T_STD_I32LE, 2, dims, chunked(2, small));
    add_numbers(file, "b", H5T_STD_I32LE, 2, dims, chunked(2, large));
    H5Fclose(file);
    fsdp_source *source = open_source();
    for (size_t tensor = 0; tensor < 2; tensor++) {
        expect_numbers(source, tensor, &whole);
        expect_numbers(source, tensor, &part);
    }
    fsdp_source_close(source);
}

Test(hdf5_read, a_chunk_beyond_the_memory_names_what_it_needs)
{
    const hsize_t dims[] = {1024, 1024};
    const fsdp_box corner = {2, {0, 0}, {1, 1}};
    hid_t file = create();
    add_numbers(file, "w", H5T_STD_I32LE, 2, dims, chunked(2, dims));
    H5Fclose(file);
    fsdp_source *source = open_source();
    fsdp_error err = {0};
    fsdp_source_reader reader = {0};
    int32_t number;
    fsdp_source_set_memory(source, (4 << 20) - 1, NULL);
    cr_assert_eq(fsdp_source_read(source, 0, &corner, &number, &reader, &err), FSDP_ERR_LIMIT);
    ASSERT_SAYS("--mem 4M");
    err = (fsdp_error){0};
    cr_assert_eq(fsdp_source_announce(source, 0, false, &err), FSDP_ERR_LIMIT);
    ASSERT_SAYS("dataset 'w': one chunk has 4194304 bytes");
    ASSERT_SAYS("--mem 4M");
    fsdp_source_set_memory(source, 4 << 20, NULL);
    ASSERT_OK(fsdp_source_announce(source, 0, false, &err));
    ASSERT_OK(fsdp_source_read(source, 0, &corner, &number, &reader, &err));
    fsdp_source_close(source);
}

/* --- groups and links ------------------------------------------------------------------------- */

Test(hdf5_read, groups_that_hold_one_another_are_entered_once)
{
    hid_t file = create();
    hid_t a = H5Gcreate2(file, "a", H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT);
    hid_t b = H5Gcreate2(a, "b", H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT);
    add_one(b, "w");
    H5Lcreate_hard(file, "/a", b, "back", H5P_DEFAULT, H5P_DEFAULT);
    H5Lcreate_hard(file, "/", a, "root", H5P_DEFAULT, H5P_DEFAULT);
    H5Lcreate_hard(file, "/a/b", file, "c", H5P_DEFAULT, H5P_DEFAULT);
    H5Gclose(b);
    H5Gclose(a);
    H5Fclose(file);
    fsdp_source *source = open_source();
    cr_assert_str_eq(names_of(source), "a/b/w c/w ");
    fsdp_source_close(source);
}

Test(hdf5_read, soft_links_are_told_and_not_followed)
{
    hid_t file = create();
    add_one(file, "w");
    H5Lcreate_soft("/w", file, "soft", H5P_DEFAULT, H5P_DEFAULT);
    H5Lcreate_soft("/nowhere", file, "gone", H5P_DEFAULT, H5P_DEFAULT);
    H5Fclose(file);
    fsdp_source *source = open_source();
    cr_assert_str_eq(names_of(source), "w ");
    cr_assert_str_eq(fsdp_source_extra(source, "soft_links"),
                     "{\"gone\": \"/nowhere\", \"soft\": \"/w\"}");
    fsdp_source_close(source);
}

static void nest(int depth)
{
    hid_t file = create(), at = file;
    for (int i = 0; i < depth; i++) {
        hid_t group = H5Gcreate2(at, "g", H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT);
        if (at != file)
            H5Gclose(at);
        at = group;
    }
    add_one(at, "w");
    H5Gclose(at);
    H5Fclose(file);
}

Test(hdf5_read, groups_nest_up_to_a_depth)
{
    nest(999); /* and the root */
    fsdp_source *source = open_source();
    cr_assert_eq(fsdp_source_tensor_count(source), 1);
    fsdp_source_close(source);
    nest(1000);
    expect_refusal(FSDP_ERR_LIMIT, "nested more than 1000 deep");
}

/* --- links out of the file -------------------------------------------------------------------- */

/* A file that must not be opened, and whether it was. */
static char outside[300];
static int watch;

static void watch_outside(const char *name)
{
    snprintf(outside, sizeof outside, "%s/%s", dir, name);
    hid_t file = H5Fcreate(outside, H5F_ACC_TRUNC, H5P_DEFAULT, H5P_DEFAULT);
    add_one(file, "w");
    H5Fclose(file);
    watch = inotify_init1(IN_NONBLOCK);
    cr_assert(inotify_add_watch(watch, outside, IN_OPEN) >= 0);
}

static bool was_opened(void)
{
    char events[4096];
    return read(watch, events, sizeof events) > 0;
}

Test(hdf5_read, the_target_of_an_external_link_is_not_opened)
{
    watch_outside("outside.h5");
    hid_t file = create();
    add_one(file, "ok");
    H5Lcreate_external(outside, "/w", file, "w", H5P_DEFAULT, H5P_DEFAULT);
    H5Fclose(file);
    expect_refusal(FSDP_ERR_REFUSED, "link 'w' leads to another file");
    cr_assert(!was_opened());
    fclose(fopen(outside, "r"));
    cr_assert(was_opened(), "the watch works");
}

Test(hdf5_read, external_storage_is_not_opened)
{
    const hsize_t dims[] = {3};
    watch_outside("raw");
    hid_t plist = H5Pcreate(H5P_DATASET_CREATE), space = H5Screate_simple(1, dims, NULL),
          file = create();
    H5Pset_external(plist, outside, 0, 12);
    H5Dclose(H5Dcreate2(file, "w", H5T_STD_I32LE, space, H5P_DEFAULT, plist, H5P_DEFAULT));
    H5Fclose(file);
    expect_refusal(FSDP_ERR_REFUSED, "external storage");
    cr_assert(!was_opened());
}

Test(hdf5_read, virtual_sources_in_other_files_are_not_opened)
{
    const hsize_t dims[] = {3};
    watch_outside("source.h5");
    hid_t space = H5Screate_simple(1, dims, NULL);
    const char *const sources[] = {outside, "source.h5", "x.h5"};
    for (size_t i = 0; i < sizeof sources / sizeof sources[0]; i++) {
        hid_t plist = H5Pcreate(H5P_DATASET_CREATE), file = create();
        cr_assert(H5Pset_virtual(plist, space, sources[i], "/w", space) >= 0);
        H5Dclose(H5Dcreate2(file, "v", H5T_STD_I32LE, space, H5P_DEFAULT, plist, H5P_DEFAULT));
        H5Fclose(file);
        expect_refusal(FSDP_ERR_REFUSED, "its source is another file");
        cr_assert(!was_opened(), "%s", sources[i]);
    }
}

Test(hdf5_read, a_virtual_dataset_within_the_file_is_read)
{
    const hsize_t dims[] = {3};
    const fsdp_box whole = {1, {0}, {3}};
    hid_t space = H5Screate_simple(1, dims, NULL), plist = H5Pcreate(H5P_DATASET_CREATE),
          file = create();
    add_one(file, "w");
    H5Pset_virtual(plist, space, ".", "/w", space);
    H5Dclose(H5Dcreate2(file, "v", H5T_STD_I32LE, space, H5P_DEFAULT, plist, H5P_DEFAULT));
    H5Fclose(file);
    fsdp_source *source = open_source();
    expect_numbers(source, 0, &whole);
    fsdp_source_close(source);
}

/* --- filters ---------------------------------------------------------------------------------- */

enum { UNKNOWN_FILTER = 32099 };

static size_t do_nothing(unsigned flags, size_t count, const unsigned values[], size_t size,
                         size_t *room, void **buf)
{
    (void)flags;
    (void)count;
    (void)values;
    (void)room;
    (void)buf;
    return size;
}

static void write_unknown_filter(unsigned flags)
{
    const H5Z_class2_t filter = {H5Z_CLASS_T_VERS, UNKNOWN_FILTER, 1,    1,
                                 "unknown",        NULL,           NULL, do_nothing};
    const hsize_t dims[] = {3};
    cr_assert(H5Zregister(&filter) >= 0);
    hid_t file = create(), plist = chunked(1, dims);
    H5Pset_filter(plist, UNKNOWN_FILTER, flags, 0, NULL);
    add_numbers(file, "w", H5T_STD_I32LE, 1, dims, plist);
    H5Fclose(file);
    cr_assert(H5Zunregister(UNKNOWN_FILTER) >= 0);
}

Test(hdf5_read, a_filter_that_must_be_known_is_named)
{
    write_unknown_filter(H5Z_FLAG_MANDATORY);
    expect_refusal(FSDP_ERR_REFUSED, "dataset 'w': it needs filter 32099");
}

Test(hdf5_read, a_filter_that_may_be_unknown_is_named_when_its_data_is_read)
{
    write_unknown_filter(H5Z_FLAG_OPTIONAL);
    fsdp_source *source = open_source();
    fsdp_error err = {0};
    fsdp_source_reader reader = {0};
    const fsdp_box whole = {1, {0}, {3}};
    int32_t data[3];
    cr_assert_eq(fsdp_source_read(source, 0, &whole, data, &reader, &err), FSDP_ERR_REFUSED);
    ASSERT_SAYS("dataset 'w'");
    ASSERT_SAYS("filter 32099");
    fsdp_source_close(source);
}

/* --- detection -------------------------------------------------------------------------------- */

Test(hdf5_read, a_user_block_of_any_size)
{
    const fsdp_box whole = {1, {0}, {3}};
    for (hsize_t block = 512; block <= 1 << 20; block *= 8) {
        hid_t plist = H5Pcreate(H5P_FILE_CREATE);
        H5Pset_userblock(plist, block);
        hid_t file = H5Fcreate(path, H5F_ACC_TRUNC, plist, H5P_DEFAULT);
        add_one(file, "w");
        H5Fclose(file);
        H5Pclose(plist);
        fsdp_source *source = open_source();
        expect_numbers(source, 0, &whole);
        fsdp_source_close(source);
    }
}

Test(hdf5_read, a_lone_file_of_ours_lists_its_tensors)
{
    const int64_t shape[] = {3};
    fsdp_error err = {0};
    fsdp_h5_file *file = NULL;
    fsdp_h5_dataset sets[] = {
        {.link = "a%2Fb.weight", .dtype = FSDP_F32, .ndim = 1, .shape = shape},
        {.link = "low", .dtype = FSDP_F8_E8M0FNU, .ndim = 1, .shape = shape}};
    int64_t offset, size;
    ASSERT_OK(fsdp_h5_create(NULL, path, &(fsdp_h5_layout){sets, 2, 64, 0}, &file, &offset, &err));
    ASSERT_OK(fsdp_h5_close(file, &size, &err));
    fsdp_source *source = open_source();
    cr_assert_str_eq(names_of(source), "a/b.weight low ");
    cr_assert_eq(fsdp_source_tensor_at(source, 1)->dtype, FSDP_F8_E8M0FNU);
    fsdp_source_close(source);
}

/* --- the child -------------------------------------------------------------------------------- */

/* Numbers begin again after the largest one. */
static pid_t only_child(void)
{
    int most = 32768;
    FILE *file = fopen("/proc/sys/kernel/pid_max", "r");
    if (file && fscanf(file, "%d", &most) != 1)
        most = 32768;
    if (file)
        fclose(file);
    for (int i = 1; i < 8192; i++) {
        const pid_t pid = (getpid() + i) % most;
        siginfo_t info = {0};
        if (pid > 0 && waitid(P_PID, (id_t)pid, &info, WEXITED | WNOHANG | WNOWAIT) == 0)
            return pid;
    }
    return 0;
}

Test(hdf5_read, no_child_is_left_when_the_source_closes)
{
    hid_t file = create();
    add_one(file, "w");
    H5Fclose(file);
    fsdp_source *source = open_source();
    fsdp_source_close(source);
    cr_assert(waitpid(-1, NULL, WNOHANG) < 0 && errno == ECHILD);
}

Test(hdf5_read, a_child_that_dies_is_a_refusal_and_plain_bytes_are_still_read)
{
    const hsize_t dims[] = {3};
    const fsdp_box whole = {1, {0}, {3}};
    hid_t file = create();
    add_one(file, "a");
    add_numbers(file, "b", H5T_STD_I32LE, 1, dims, chunked(1, dims));
    H5Fclose(file);
    fsdp_source *source = open_source();
    pid_t child = only_child();
    cr_assert(child > 0);
    kill(child, SIGKILL);
    fsdp_error err = {0};
    fsdp_source_reader reader = {0};
    int32_t data[3];
    for (int i = 0; i < 2; i++) {
        cr_assert_eq(fsdp_source_read(source, 1, &whole, data, &reader, &err), FSDP_ERR_REFUSED);
        ASSERT_SAYS("the HDF5 library failed on this file");
    }
    expect_numbers(source, 0, &whole);
    fsdp_source_close(source);
}

static void *read_in_thread(void *user)
{
    const fsdp_box box = {2, {0, 0}, {300, 200}};
    for (int i = 0; i < 5; i++)
        expect_numbers(user, 0, &box);
    return NULL;
}

Test(hdf5_read, threads_may_share_a_source)
{
    enum { THREADS = 3 };
    const hsize_t dims[] = {300, 200}, chunk[] = {30, 30};
    hid_t file = create();
    add_numbers(file, "w", H5T_STD_I32LE, 2, dims, chunked(2, chunk));
    H5Fclose(file);
    fsdp_source *source = open_source();
    pthread_t threads[THREADS];
    for (int i = 0; i < THREADS; i++)
        cr_assert_eq(pthread_create(&threads[i], NULL, read_in_thread, source), 0);
    for (int i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    fsdp_source_close(source);
}

/* --- the sandbox ------------------------------------------------------------------------------ */

/* As in a container whose own filter forbids more of them. */
static void forbid_seccomp(void)
{
    struct sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_seccomp, 3, 0),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_prctl, 0, 3),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args[0])),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, PR_SET_SECCOMP, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EINVAL),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {sizeof code / sizeof code[0], code};
    cr_assert_eq(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
    cr_assert_eq(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program), 0);
}

Test(hdf5_read, a_kernel_without_seccomp_stops_it_unless_limits_are_enough)
{
    const fsdp_box whole = {1, {0}, {3}};
    hid_t file = create();
    add_one(file, "w");
    H5Fclose(file);
    forbid_seccomp();
    expect_refusal(FSDP_ERR_REFUSED, "--sandbox=rlimit");
    fsdp_source *source = open_trusting(FSDP_TRUST_LIMITS);
    expect_numbers(source, 0, &whole);
    fsdp_source_close(source);
}

/* System calls that an attacker in the child might make. */
static void try_open(void)
{
    /* an answer, and not death: libraries try to open this and that */
    _exit(syscall(SYS_openat, -100, path, 0) < 0 && errno == EACCES ? 0 : 1);
}

static void try_socket(void)
{
    syscall(SYS_socket, 1, 1, 0);
    _exit(1);
}

static void try_exec(void)
{
    syscall(SYS_execve, "/bin/true", NULL, NULL);
    _exit(1);
}

static void try_fork(void)
{
    syscall(SYS_fork);
    _exit(1);
}

static void try_runnable_memory(void)
{
    syscall(SYS_mmap, NULL, 4096, 7, 0x22, -1, 0);
    _exit(1);
}

static void try_kill(void)
{
    syscall(SYS_kill, getppid(), 0);
    _exit(1);
}

static int run_behind_walls(void (*attempt)(void))
{
    pid_t child = fork();
    if (child == 0) {
        fsdp_error err = {0};
        int channel = 0;
        if (fsdp_hdf5_sandbox_enter(&channel, false, &err) != FSDP_OK)
            _exit(2);
        attempt();
    }
    int status = 0;
    cr_assert_eq(waitpid(child, &status, 0), child);
    return status;
}

Test(hdf5_read, the_walls_hold)
{
    void (*const deadly[])(void) = {try_socket, try_exec, try_fork, try_runnable_memory, try_kill};
    int status = run_behind_walls(try_open);
    cr_assert(WIFEXITED(status) && WEXITSTATUS(status) == 0, "%d", status);
    for (size_t i = 0; i < sizeof deadly / sizeof deadly[0]; i++) {
        status = run_behind_walls(deadly[i]);
        cr_assert(WIFSIGNALED(status) && WTERMSIG(status) == SIGSYS, "%zu: %d", i, status);
    }
}

/* As much as the limit leaves, and no more. */
static void take_memory(void)
{
    size_t taken = 0;
    const size_t block = 64 << 20;
    while (taken < 2 * (size_t)FSDP_HDF5_MEMORY &&
           mmap(NULL, block, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) != MAP_FAILED)
        taken += block;
    _exit(taken >= (size_t)FSDP_HDF5_MEMORY / 2 && taken <= (size_t)FSDP_HDF5_MEMORY ? 0 : 1);
}

Test(hdf5_read, memory_is_limited)
{
    int status = run_behind_walls(take_memory);
    cr_assert(WIFEXITED(status) && WEXITSTATUS(status) == 0, "%d", status);
}
