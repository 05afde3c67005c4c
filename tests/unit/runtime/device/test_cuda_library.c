/* A library of NVIDIA is found in each of its places, and one that is broken is not a missing one. */
#include "base/io/io.h"
#include "runtime/device/cuda_library.h"

#include <criterion/criterion.h>
#include <dlfcn.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define FILE_NAME "libfsdp-of-a-test.so.1"
#define PACKAGE "nvidia/test/lib"

static char directory[] = "/tmp/fsdp-library-XXXXXX";
static fsdp_error err;
static void *library;
static char opened[300]; /* below `directory` */

/* The linker puts it in place of dlopen: folders of the system are folders of the test here. */
void *__real_dlopen(const char *path, int flags);
void *__wrap_dlopen(const char *path, int flags);
void *__wrap_dlopen(const char *path, int flags)
{
    char moved[300];
    const size_t length = strlen(directory);
    bool is_of_system = strncmp(path, "/usr/", 5) == 0;
    snprintf(moved, sizeof moved, "%s%s", is_of_system ? directory : "", path);
    void *found = __real_dlopen(moved, flags);
    if (found)
        snprintf(opened, sizeof opened, "%s",
                 strncmp(moved, directory, length) == 0 ? moved + length + 1 : moved);
    return found;
}

static fsdp_status open_it(void)
{
    static const char *const files[] = {"libfsdp-of-a-test.so.2", FILE_NAME, NULL};
    static const char *const packages[] = {"nvidia/other/lib", PACKAGE, NULL};
    static const fsdp_cuda_library which = {"FSDP_TEST_LIB", files, packages, "install it"};
    library = NULL;
    return fsdp_cuda_library_open(&which, &library, &err);
}

static void set(const char *variable, const char *below)
{
    char value[200];
    snprintf(value, sizeof value, "%s%s", directory, below);
    cr_assert_eq(setenv(variable, value, 1), 0);
}

static void begin(void)
{
    cr_assert(mkdtemp(directory) && chdir(directory) == 0);
    set("VIRTUAL_ENV", "/venv");
    set("HOME", "/home");
    set("CUDA_HOME", "/cuda");
    set("CUDA_PATH", "/path");
    setenv("PYTHONPATH", "/missing::python:", 1);
    unsetenv("FSDP_TEST_LIB");
}

static void end(void)
{
    cr_assert_eq(fsdp_io_remove_tree(NULL, directory, NULL), FSDP_OK);
}

TestSuite(cuda_library, .init = begin, .fini = end);

static void make_folders(const char *path)
{
    char part[200];
    for (const char *slash = strchr(path, '/'); slash; slash = strchr(slash + 1, '/')) {
        snprintf(part, sizeof part, "%.*s", (int)(slash - path), path);
        if (access(part, F_OK) != 0)
            cr_assert_eq(fsdp_io_mkdir(NULL, part, &err), FSDP_OK, "%s", err.text);
    }
}

/* A link to a library that every program can load. */
static void make_library(const char *path)
{
    Dl_info libc;
    make_folders(path);
    /* by its name: a program's own address of a function may lie in the program */
    cr_assert(dladdr(dlsym(RTLD_DEFAULT, "gnu_get_libc_version"), &libc));
    cr_assert_eq(symlink(libc.dli_fname, path), 0);
}

static void make_broken(const char *path)
{
    make_folders(path);
    FILE *file = fopen(path, "w");
    cr_assert(file && fputs("no library", file) >= 0 && fclose(file) == 0);
}

/* In a process of its own, as the loader remembers the paths that it has opened. */
static void expect_found(const char *place)
{
    cr_expect_eq(open_it(), FSDP_ERR_NOT_FOUND, "%s", err.text);
    cr_expect(strstr(err.text, "CUDA_HOME") && strstr(err.text, "install it"), "%s", err.text);
    make_library(place);
    cr_expect_eq(open_it(), FSDP_OK, "%s", err.text);
    cr_expect(library);
}

Test(cuda_library, is_found_in_a_folder_of_cuda)
{
    expect_found("cuda/lib64/" FILE_NAME);
}

Test(cuda_library, is_found_in_the_other_folder_of_cuda)
{
    expect_found("path/lib/" FILE_NAME);
}

Test(cuda_library, is_found_in_a_virtual_environment)
{
    expect_found("venv/lib/python3.8/site-packages/" PACKAGE "/" FILE_NAME);
}

Test(cuda_library, is_found_in_a_virtual_environment_of_a_new_python)
{
    expect_found("venv/lib/python3.19/site-packages/" PACKAGE "/" FILE_NAME);
}

Test(cuda_library, is_found_in_packages_of_the_system)
{
    expect_found("usr/lib/python3/dist-packages/" PACKAGE "/" FILE_NAME);
}

/* From the last to the first: each comes before those that are there already. */
Test(cuda_library, places_have_an_order)
{
    static const char *const places[] = {
        "cuda/lib64/" FILE_NAME,
        "path/lib64/" FILE_NAME,
        "usr/local/cuda/lib64/" FILE_NAME,
        "usr/local/cuda/lib/" FILE_NAME,
        "venv/lib/python3.12/site-packages/" PACKAGE "/" FILE_NAME,
        "venv/lib/python3.9/site-packages/" PACKAGE "/" FILE_NAME,
        "python/" PACKAGE "/" FILE_NAME,
        "home/.local/lib/python3.11/site-packages/" PACKAGE "/" FILE_NAME,
        "usr/local/lib/python3.11/dist-packages/" PACKAGE "/" FILE_NAME,
        "usr/local/lib/python3.11/site-packages/" PACKAGE "/" FILE_NAME,
        "usr/lib/python3/dist-packages/" PACKAGE "/" FILE_NAME,
        "usr/lib/python3.10/dist-packages/" PACKAGE "/" FILE_NAME,
    };
    const size_t n = sizeof places / sizeof *places;
    for (size_t i = n; i-- > 0;) {
        make_library(places[i]);
        cr_assert_eq(open_it(), FSDP_OK, "%s", err.text);
        cr_expect_str_eq(opened, places[i]);
    }
}

/* There are two names and two packages. */
Test(cuda_library, the_best_name_and_the_first_package_count)
{
    const char *first = "python/nvidia/other/lib/" FILE_NAME;
    make_library("python/" PACKAGE "/libfsdp-of-a-test.so.2");
    make_library(first);
    cr_assert_eq(open_it(), FSDP_OK, "%s", err.text);
    cr_expect_str_eq(opened, first);
    make_library("python/nvidia/other/lib/libfsdp-of-a-test.so.2");
    cr_assert_eq(open_it(), FSDP_OK, "%s", err.text);
    cr_expect_str_eq(opened, "python/nvidia/other/lib/libfsdp-of-a-test.so.2");
}

Test(cuda_library, is_found_on_pythonpath)
{
    expect_found("python/" PACKAGE "/" FILE_NAME);
}

Test(cuda_library, is_found_in_packages_of_the_user)
{
    expect_found("home/.local/lib/python3.11/site-packages/" PACKAGE "/" FILE_NAME);
}

Test(cuda_library, a_broken_one_is_not_missing)
{
    const char *broken = "cuda/lib/" FILE_NAME, *good = "python/" PACKAGE "/" FILE_NAME;
    make_broken(broken);
    cr_expect_eq(open_it(), FSDP_ERR_USAGE, "%s", err.text);
    cr_expect(strstr(err.text, broken), "%s", err.text);
    make_library(good);
    cr_expect_eq(open_it(), FSDP_OK, "%s", err.text);
}

/* Root may read every file, so the test is somebody else meanwhile. */
Test(cuda_library, one_that_may_not_be_read_is_not_missing)
{
    const char *place = "cuda/lib/" FILE_NAME;
    const bool is_root = geteuid() == 0;
    make_broken(place);
    cr_assert_eq(chmod(place, 0), 0);
    cr_assert_eq(chmod(directory, 0755), 0);
    cr_assert(!is_root || seteuid(65534) == 0);
    cr_expect_eq(open_it(), FSDP_ERR_USAGE, "%s", err.text);
    cr_assert(!is_root || seteuid(0) == 0);
    cr_expect(strstr(err.text, place) && strstr(err.text, "Permission denied"), "%s", err.text);
    cr_expect(strstr(err.text, "cannot load"), "%s", err.text);
}

Test(cuda_library, the_variable_is_the_only_place)
{
    make_library("cuda/lib64/" FILE_NAME);
    setenv("FSDP_TEST_LIB", "/missing/file", 1);
    cr_expect_eq(open_it(), FSDP_ERR_USAGE);
    cr_expect(strstr(err.text, "FSDP_TEST_LIB is '/missing/file': "), "%s", err.text);
    cr_expect(strstr(err.text, "; correct it, or unset it"), "%s", err.text);
    setenv("FSDP_TEST_LIB", "cuda/lib64/" FILE_NAME, 1);
    cr_expect_eq(open_it(), FSDP_OK, "%s", err.text);
}
