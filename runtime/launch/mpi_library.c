/* Finds and opens libfsdp_mpi. See mpi_library.h. */
#include "runtime/launch/mpi_library.h"

#include <dlfcn.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>

#define LIBRARY "libfsdp_mpi.so.0"

/* RTLD_GLOBAL: Open MPI's plugins resolve its symbols in the global scope. */
static void *open_at(const char *path)
{
    return dlopen(path, RTLD_NOW | RTLD_GLOBAL);
}

/* In addition to libfsdp or, when that is linked statically, next to the program. */
static void *open_beside(void)
{
    static const char *const places[] = {"", "../lib/"};
    Dl_info here;
    void *library = NULL;
    char path[PATH_MAX];
    const char *slash = dladdr(places, &here) ? strrchr(here.dli_fname, '/') : NULL;
    for (size_t i = 0; i < sizeof places / sizeof *places && slash && !library; i++) {
        int n = snprintf(path, sizeof path, "%.*s%s" LIBRARY, (int)(slash - here.dli_fname + 1),
                         here.dli_fname, places[i]);
        library = n > 0 && n < (int)sizeof path ? open_at(path) : NULL;
    }
    return library;
}

fsdp_status fsdp_mpi_library_open(const fsdp_mpi_functions **functions_out, fsdp_error *err)
{
    void *library = open_beside();
    if (!library)
        library = open_at(LIBRARY);
    if (!library) {
        const char *why = dlerror();
        return fsdp_fail(err, FSDP_ERR_NOT_FOUND,
                         "ranks under mpirun need " LIBRARY " (a build with MPI): %s",
                         why ? why : "not found");
    }
    const fsdp_mpi_functions *functions = dlsym(library, "fsdp_mpi_table");
    if (!functions || functions->version != FSDP_MPI_TABLE_VERSION)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         LIBRARY " is of another version of fsdp; install both from one build");
    *functions_out = functions;
    return FSDP_OK;
}
