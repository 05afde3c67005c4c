/* The variables with which an MPI's launcher numbers the processes that it starts. */
#include "tools/cli/cli.h"

#include <stdlib.h>

static int number(const char *name)
{
    const char *text = getenv(name);
    return text ? atoi(text) : 0;
}

cli_mpi cli_mpi_find(void)
{
    /* Open MPI; MVAPICH; MPICH and Intel MPI. Programs that train know more (launch.c). */
    static const struct {
        const char *rank, *size, *local_size;
    } variables[] = {
        {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"},
        {"MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE"},
        {"PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"},
    };
    for (size_t i = 0; i < sizeof variables / sizeof *variables; i++)
        if (number(variables[i].size) > 0)
            return (cli_mpi){variables[i].size, number(variables[i].rank),
                             number(variables[i].size), number(variables[i].local_size)};
    return (cli_mpi){0};
}
