/*
 * Runs a fuzz target over files, for compilers without libFuzzer and for the tests: every file of
 * every folder given is handed to LLVMFuzzerTestOneInput, as it is and cut short.
 *
 * usage: fuzz_TARGET PATH...
 */
#include "base/io/io.h"
#include "base/core/mem.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static long inputs;

/* In memory of exactly its size, so that a sanitizer sees every byte read beyond the end. */
static void run_exact(const char *data, size_t size)
{
    uint8_t *copy = fsdp_realloc(NULL, size, 1);
    if (!copy)
        return;
    if (size > 0)
        memcpy(copy, data, size);
    LLVMFuzzerTestOneInput(copy, size);
    fsdp_free(copy);
    inputs++;
}

static int run_file(const char *path)
{
    char *data;
    size_t size;
    fsdp_error err = {0};
    if (fsdp_io_read_file(NULL, path, 64 << 20, &data, &size, &err) != FSDP_OK)
        return fsdp_error_report(&err);
    run_exact(data, size);
    for (size_t cut = size; cut > 0; cut = cut * 3 / 4)
        run_exact(data, cut);
    fsdp_free(data);
    return 0;
}

typedef struct folder_walk {
    const char *path;
    int result;
} folder_walk;

static int run_entry(void *user, const char *name)
{
    folder_walk *walk = user;
    char *path = fsdp_path_join(walk->path, name);
    walk->result = path ? run_file(path) : FSDP_ERR_LIMIT;
    fsdp_free(path);
    return walk->result;
}

static int run_path(const char *path)
{
    folder_walk walk = {.path = path};
    fsdp_io *io = fsdp_io_posix();
    int result = io->ops->list(io, path, run_entry, &walk);
    return result == -ENOTDIR ? run_file(path) : result < 0 ? FSDP_ERR_IO : walk.result;
}

int main(int argc, char **argv)
{
    int result = 0;
    for (int i = 1; i < argc && result == 0; i++)
        result = run_path(argv[i]);
    if (result == 0 && inputs == 0) {
        fprintf(stderr, "error: no inputs\n");
        result = FSDP_ERR_USAGE;
    }
    printf("%ld inputs\n", inputs);
    return result;
}
