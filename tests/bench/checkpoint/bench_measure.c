/* The commands that measure rows without training, with the functions that measure them. */
#include "tests/bench/rows.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

static const struct {
    const char *command;
    fsdp_status (*measure)(const row_options *opts, const char *dir, fsdp_error *err);
} groups[] = {{"save", bench_save_rows},         {"load", bench_load_rows},
              {"reshard", bench_reshard_rows},   {"many", bench_many_rows},
              {"manifest", bench_manifest_rows}, {"compress", bench_compress_rows},
              {"convert", bench_convert_rows}};

static fsdp_status measure_in(const row_options *opts, const char *dir, fsdp_error *err)
{
    for (size_t i = 0; i < sizeof groups / sizeof *groups; i++)
        if (strcmp(groups[i].command, opts->command) == 0)
            return groups[i].measure(opts, dir, err);
    return fsdp_fail(err, FSDP_ERR_USAGE, "'%s' measures nothing", opts->command);
}

/* A directory that is gone afterwards, whatever happens. Under mpirun rank 0 names it; see bench_save.c. */
fsdp_status bench_measure(const row_options *opts, fsdp_error *err)
{
    char dir[BENCH_PATH];
    if (bench_mpi_world() > 0) {
        if (strcmp(opts->command, "save") == 0)
            return bench_save_rows(opts, NULL, err);
        return fsdp_fail(err, FSDP_ERR_USAGE, "ranks are threads for '%s': start it without mpirun",
                         opts->command);
    }
    bench_path(dir, opts->dir, "fsdp-bench-XXXXXX");
    if (!mkdtemp(dir))
        return fsdp_fail_errno(err, errno, "cannot create a directory in '%s'", opts->dir);
    fsdp_status st = measure_in(opts, dir, err);
    fsdp_status removed = bench_remove(dir, st == FSDP_OK ? err : NULL);
    return st != FSDP_OK ? st : removed;
}
