/* --build: the bundle's script compiles the kernels again and links the program with them. See
 * gpu_check.h. */
#include "tests/gpu_check/gpu_check.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/core/mem.h"

enum { BUILD_SECONDS = 900 };

static void print_file(const char *path)
{
    char line[1000];
    FILE *file = fopen(path, "r");
    while (file && fgets(line, sizeof line, file))
        fputs(line, stderr);
    if (file)
        fclose(file);
}

fsdp_status gpu_build_and_become(const gpu_options *options, int argc, char **argv, fsdp_error *err)
{
    char script[4096], program[4096], log[4096];
    char **others = fsdp_alloc((size_t)argc + 1, sizeof *others);
    int code = 0, n = 0;
    if (!others)
        return fsdp_fail_memory(err, "arguments");
    snprintf(script, sizeof script, "%s/sources/build.sh", options->folder);
    snprintf(program, sizeof program, "%s/gpu-check-built", options->folder);
    snprintf(log, sizeof log, "%s/build.log", options->folder);
    char *build[] = {"/bin/sh", script, program, NULL};
    fsdp_status status =
        access(script, R_OK) == 0
            ? gpu_run_program(build, log, BUILD_SECONDS, &code, err)
            : fsdp_fail(err, FSDP_ERR_NOT_FOUND,
                        "--build: '%s' is not there; it is part of ./dev gpu-bundle", script);
    if (status == FSDP_OK && code != 0) {
        print_file(log);
        status =
            fsdp_fail(err, FSDP_ERR_INTERNAL, "--build: '%s' ends with exit code %d", script, code);
    }
    if (status == FSDP_OK) {
        for (int i = 0; i < argc; i++)
            if (strcmp(argv[i], "--build") != 0)
                others[n++] = argv[i];
        others[0] = program;
        execv(program, others);
        status = fsdp_fail_errno(err, errno, "cannot start '%s'", program);
    }
    fsdp_free(others);
    return status;
}
