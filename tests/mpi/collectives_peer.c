/*
 * Open MPI's own collectives for ./dev bench collectives, which starts this under mpirun and says what
 * to do through pipes: tests/bench/rows.h, bench_peer. All-gather and all-reduce are in place.
 *
 * usage: mpirun -n N mpi_collectives_peer DIR N
 */
#include <mpi.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

enum { LINE = 120 };

typedef struct peer {
    int rank, size;
    FILE *go, *done;
    char *in, *out;
    size_t room;
} peer;

typedef struct job {
    char op[8], dtype[16];
    long long count;
    int calls;
    MPI_Datatype type;
    size_t element;
} job;

static int find_type(job *now)
{
    const struct {
        const char *name;
        MPI_Datatype type;
        size_t size;
    } types[] = {{"f32", MPI_FLOAT, 4},  {"f64", MPI_DOUBLE, 8},  {"i8", MPI_INT8_T, 1},
                 {"u8", MPI_UINT8_T, 1}, {"i16", MPI_INT16_T, 2}, {"i32", MPI_INT32_T, 4},
                 {"i64", MPI_INT64_T, 8}};
    for (size_t i = 0; i < sizeof types / sizeof *types; i++) {
        if (strcmp(types[i].name, now->dtype) == 0) {
            now->type = types[i].type;
            now->element = types[i].size;
            return 1;
        }
    }
    return 0;
}

static int make_room(peer *self, size_t size)
{
    if (size <= self->room)
        return 1;
    free(self->in);
    free(self->out);
    self->in = aligned_alloc(4096, (size + 4095) / 4096 * 4096);
    self->out = aligned_alloc(4096, (size + 4095) / 4096 * 4096);
    self->room = self->in && self->out ? size : 0;
    if (self->room) {
        memset(self->in, 0, size);
        memset(self->out, 0, size);
    }
    return self->room > 0;
}

static void call_once(const peer *self, const job *now)
{
    int count = (int)now->count, part = count / self->size;
    if (strcmp(now->op, "ag") == 0)
        MPI_Allgather(MPI_IN_PLACE, 0, now->type, self->in, part, now->type, MPI_COMM_WORLD);
    else if (strcmp(now->op, "rs") == 0)
        MPI_Reduce_scatter_block(self->in, self->out, part, now->type, MPI_SUM, MPI_COMM_WORLD);
    else
        MPI_Allreduce(MPI_IN_PLACE, self->in, count, now->type, MPI_SUM, MPI_COMM_WORLD);
}

static double cpu_seconds(void)
{
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    return (double)(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) +
           1e-6 * (double)(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec);
}

static void do_line(peer *self, const char *line)
{
    job now = {.calls = 0};
    int known = sscanf(line, "%7s %15s %lld %d", now.op, now.dtype, &now.count, &now.calls) == 4 &&
                find_type(&now) && now.count >= 0 && now.count <= 0x7fffffff &&
                make_room(self, (size_t)now.count * now.element);
    if (!known) {
        if (self->rank == 0)
            fprintf(self->done, "cannot\n");
        return;
    }
    MPI_Barrier(MPI_COMM_WORLD);
    double cpu = cpu_seconds(), began = MPI_Wtime();
    for (int i = 0; i < now.calls; i++)
        call_once(self, &now);
    MPI_Barrier(MPI_COMM_WORLD);
    if (self->rank == 0)
        fprintf(self->done, "%.9f %.9f\n", (MPI_Wtime() - began) / now.calls,
                (cpu_seconds() - cpu) / now.calls);
}

static int open_pipes(peer *self, const char *dir)
{
    char path[4200];
    snprintf(path, sizeof path, "%s/go-%d", dir, self->rank);
    self->go = fopen(path, "r");
    snprintf(path, sizeof path, "%s/done", dir);
    self->done = fopen(path, "w");
    return self->go && self->done;
}

int main(int argc, char **argv)
{
    peer self = {0};
    char line[LINE];
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &self.rank);
    MPI_Comm_size(MPI_COMM_WORLD, &self.size);
    if (argc != 3 || atoi(argv[2]) != self.size || !open_pipes(&self, argv[1]))
        MPI_Abort(MPI_COMM_WORLD, 2);
    MPI_Barrier(MPI_COMM_WORLD);
    if (self.rank == 0)
        fprintf(self.done, "ready\n");
    fflush(self.done);
    while (fgets(line, sizeof line, self.go) && strcmp(line, "end\n") != 0) {
        do_line(&self, line);
        fflush(self.done);
    }
    free(self.in);
    free(self.out);
    fclose(self.go);
    fclose(self.done);
    MPI_Finalize();
    return 0;
}
