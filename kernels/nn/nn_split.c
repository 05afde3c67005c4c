/* Cuts calls into parts; the memory of workers. See nn_cpu.h. */
#include "kernels/nn/nn_cpu.h"

#include "base/core/mem.h"

enum {
    WORTH_A_PART = 8192, /* elements: some microseconds */
    UNEVEN_PARTS = 8     /* per thread */
};

typedef struct cut_job {
    fsdp_nn_cpu *cpu;
    fsdp_nn_job job;
    const void *call;
    int64_t count, grain;
    int parts;
} cut_job;

/* Returns the beginning of a part, in elements. */
static int64_t first_of(const cut_job *cut, int part)
{
    int64_t grains = (cut->count + cut->grain - 1) / cut->grain;
    int64_t first = (grains * part / cut->parts) * cut->grain;
    return first < cut->count ? first : cut->count;
}

static void run_part(void *context, int index, int worker)
{
    const cut_job *cut = context;
    fsdp_nn_part part = {first_of(cut, index), first_of(cut, index + 1), worker};
    if (part.first < part.last)
        cut->job(cut->cpu, cut->call, part);
}

void fsdp_nn_cpu_run(fsdp_nn_cpu *cpu, fsdp_nn_cut cut, fsdp_nn_job job, const void *call)
{
    if (cut.count <= 0 || cut.work <= 0)
        return;
    int64_t least = (WORTH_A_PART - 1) / cut.work + 1; /* items of a part */
    int64_t parts = (cut.count - 1) / least + 1;
    int64_t most = cut.uneven && cpu->threads > 1 ? cpu->threads * UNEVEN_PARTS : cpu->threads;
    cut_job work = {.cpu = cpu,
                    .job = job,
                    .call = call,
                    .count = cut.count,
                    .grain = cut.grain,
                    .parts = (int)(parts < most ? parts : most)};
    fsdp_nn_team_run(cpu->team, work.parts, run_part, &work);
}

static void note_lack_of_memory(fsdp_nn_cpu *cpu)
{
    if (cpu->failure.status == FSDP_OK)
        (void)fsdp_fail_memory(&cpu->failure, "working memory of a model");
}

static bool grow(fsdp_nn_worker *worker, int64_t count)
{
    if (count <= worker->capacity)
        return true;
    fsdp_free(worker->room);
    worker->capacity = 0;
    worker->room = fsdp_alloc_pages((size_t)count * sizeof *worker->room);
    if (worker->room)
        worker->capacity = count;
    return worker->room;
}

bool fsdp_nn_cpu_reserve(fsdp_nn_cpu *cpu, int64_t rows, int64_t columns)
{
    int64_t count, bytes;
    bool fits = !fsdp_mul_overflow(rows, columns, &count) &&
                !fsdp_mul_overflow(count, (int64_t)sizeof(float), &bytes);
    for (int i = 0; fits && i < cpu->threads; i++)
        fits = grow(&cpu->workers[i], count);
    if (!fits)
        note_lack_of_memory(cpu);
    return fits;
}
