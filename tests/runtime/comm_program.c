/*
 * Collectives of a program that is launched in any way; comm_network.py runs it. Its ranks do one of these:
 *
 *   values SEED            random calls over all ranks, over some of them, and over all in another order,
 *                          each checked against a model of one rank
 *   hash                   the bits of one call of each kind and type, as one number
 *   large KIND             counts over 2^31, of two ranks; 0: in calls of all kinds
 *   HOW RANK FOLDER        RANK gets into trouble, the others reduce until they learn of it: kill, work (it
 *                          is killed in a call), stop, leave, abort, differ, counts, late (it is elsewhere)
 */
#include "kernels/digest.h"
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <fsdp/fsdp.h>

#include "base/core/clock.h"
#include "runtime/launch/world_internal.h"
#include "tests/support/rounds/comm_rounds.h"

enum { COUNT = 400000, BITS = 600000, LONG_ROUNDS = 30, SHORT_ROUNDS = 10, MOST = 240000 };
enum { REPEATED = 64 << 20, LARGE_END = 16 };

static fsdp_status make_group(fsdp_world *world, const int *ranks, int size, fsdp_comm **comm_out,
                              fsdp_error *err)
{
    fsdp_transport *transport = world->parts.transport;
    return transport->ops->comm_create(transport, ranks, size, 1, comm_out, err);
}

/* All ranks, the last one first. */
static fsdp_status make_reversed(fsdp_world *world, fsdp_comm **comm_out, fsdp_error *err)
{
    int ranks[64], size = fsdp_world_size(world);
    for (int i = 0; i < size; i++)
        ranks[i] = size - 1 - i;
    return make_group(world, ranks, size, comm_out, err);
}

static fsdp_status make_all(fsdp_world *world, fsdp_comm **comm_out, fsdp_error *err)
{
    int ranks[64], size = fsdp_world_size(world);
    for (int i = 0; i < size; i++)
        ranks[i] = i;
    return make_group(world, ranks, size, comm_out, err);
}

/* Two groups at once: even ranks and odd ones. */
static fsdp_status make_half(fsdp_world *world, fsdp_comm **comm_out, fsdp_error *err)
{
    fsdp_comm *half[2] = {NULL, NULL};
    for (int odd = 0; odd < 2; odd++) {
        int ranks[64], size = 0;
        for (int rank = odd; rank < fsdp_world_size(world); rank += 2)
            ranks[size++] = rank;
        if (size > 0)
            FSDP_TRY(make_group(world, ranks, size, &half[odd], err));
    }
    *comm_out = half[fsdp_world_rank(world) % 2];
    return FSDP_OK;
}

/* --- values ----------------------------------------------------------------------------------- */

static fsdp_status run_values(fsdp_world *world, uint64_t seed, fsdp_error *err)
{
    fsdp_status (*const make[])(fsdp_world *, fsdp_comm **, fsdp_error *) = {make_all, make_half,
                                                                             make_reversed};
    fsdp_status status = FSDP_OK;
    for (int i = 0; i < 3 && status == FSDP_OK; i++) {
        fsdp_comm *comm = NULL;
        const comm_rounds rounds = {.seed = seed + (uint64_t)i,
                                    .rounds = i == 0 ? LONG_ROUNDS : SHORT_ROUNDS,
                                    .max_count = MOST / fsdp_world_size(world),
                                    .buffers = COMM_PRIVATE};
        FSDP_TRY(make[i](world, &comm, err));
        status = run_comm_rounds(comm, &rounds, err);
        if (i == 0 && status == FSDP_OK)
            printf("values over %s, local %d of %d\n", fsdp_comm_backend(comm),
                   fsdp_world_local_rank(world), fsdp_world_local_size(world));
        fsdp_comm_free(comm);
    }
    return status;
}

/* --- bits ------------------------------------------------------------------------------------- */

static void fill(void *data, fsdp_dtype dtype, int64_t count, uint64_t seed)
{
    for (int64_t i = 0; i < count; i++) {
        seed = seed * 6364136223846793005u + 1442695040888963407u;
        float value = ((float)(seed >> 40) / 8388608.0f - 1) * (float)(1 << (seed >> 33 & 7));
        size_t size = fsdp_dtype_size(dtype); /* bf16 is the upper half of f32 */
        memcpy((char *)data + (size_t)i * size, (const char *)&value + sizeof value - size, size);
    }
}

/* All-gather, reduce-scatter and all-reduce, of a size that takes several pieces. */
static fsdp_status hash_call(fsdp_comm *comm, int number, float *in, float *out, fsdp_sha256 *hash,
                             fsdp_error *err)
{
    int64_t size = fsdp_comm_size(comm), count = BITS / size * size;
    fsdp_collective call = {.kind = (fsdp_collective_kind)(FSDP_ALL_GATHER + number % 3),
                            .dtype = number / 12 ? FSDP_BF16 : FSDP_F32,
                            .in = in,
                            .out = out,
                            .count = number % 3 == 2 ? count : count / size,
                            .op = (fsdp_reduce_op)(number / 3 % 4),
                            .factor = 0.3};
    fill(in, call.dtype, count, (uint64_t)(100 * number + fsdp_comm_rank(comm)));
    FSDP_TRY(fsdp_comm_run(comm, &call, err));
    fsdp_sha256_add(hash, out, (size_t)count * sizeof *out);
    return FSDP_OK;
}

static fsdp_status run_hash(fsdp_world *world, fsdp_error *err)
{
    fsdp_comm *comm = NULL;
    fsdp_sha256 hash;
    uint8_t digest[FSDP_SHA256_SIZE];
    float *in = calloc(BITS, sizeof *in), *out = calloc(BITS, sizeof *out);
    fsdp_sha256_init(&hash);
    fsdp_status status = make_all(world, &comm, err);
    for (int i = 0; i < 24 && status == FSDP_OK; i++)
        status = hash_call(comm, i, in, out, &hash, err);
    fsdp_sha256_value(&hash, digest);
    if (status == FSDP_OK)
        printf("rank %d: bits %02x%02x%02x%02x over %s\n", fsdp_world_rank(world), digest[0],
               digest[1], digest[2], digest[3], fsdp_comm_backend(comm));
    fsdp_comm_free(comm);
    free(in);
    free(out);
    return status;
}

/* --- large amounts ---------------------------------------------------------------------------- */

static size_t repeated_room(size_t size)
{
    return (size / REPEATED + 1) * REPEATED;
}

/* Maps one piece of memory again and again, so that a large buffer needs little memory;
 * the last piece is private. */
static unsigned char *map_repeated(size_t size)
{
    const size_t once = REPEATED, room = repeated_room(size);
    int fd = memfd_create("much", 0);
    unsigned char *all = mmap(NULL, room, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (fd < 0 || all == MAP_FAILED || ftruncate(fd, (off_t)once) != 0)
        return NULL;
    for (size_t at = 0; at < room; at += once) {
        int flags = MAP_FIXED | (at + once >= room ? MAP_PRIVATE : MAP_SHARED);
        if (mmap(all + at, once, PROT_READ | PROT_WRITE, flags, fd, 0) == MAP_FAILED)
            return NULL;
    }
    close(fd);
    return all;
}

static void unmap_repeated(unsigned char *all, size_t size)
{
    (void)munmap(all, repeated_room(size));
}

/* One of two ranks; sizes in elements of one byte. */
typedef struct large_call {
    fsdp_collective_kind kind;
    int in_parts, out_parts; /* of 2^31 + LARGE_END each */
} large_call;

/* Expects in the last bytes of `out` those of the other rank, or the sum of both. */
static fsdp_status check_large(const unsigned char *end, const fsdp_collective *call, int rank,
                               fsdp_error *err)
{
    bool reduces = call->kind == FSDP_REDUCE_SCATTER || call->kind == FSDP_ALL_REDUCE;
    int from = call->kind == FSDP_ALL_TO_ALL ? 1 - rank : 1;
    for (int i = 0; i < LARGE_END; i++)
        if (end[i - LARGE_END] != (reduces ? 100 + 2 * i : from * 100 + i))
            return fsdp_fail(err, FSDP_ERR_INTERNAL, "kind %d: byte %d of the last is wrong",
                             (int)call->kind, i);
    return FSDP_OK;
}

/* Marks the end of each part of `in` with its rank. */
static void mark_large(unsigned char *in, int parts, int64_t count, int rank)
{
    for (int part = 1; part <= parts; part++)
        for (int i = 0; i < LARGE_END; i++)
            in[part * count - LARGE_END + i] = (unsigned char)(rank * 100 + i);
}

static fsdp_status run_large_call(fsdp_comm *comm, const large_call *large, fsdp_error *err)
{
    const int64_t count = ((int64_t)1 << 31) + LARGE_END;
    const size_t in_size = (size_t)(large->in_parts * count);
    const size_t out_size = (size_t)(large->out_parts * count);
    int rank = fsdp_comm_rank(comm);
    int64_t counts[2] = {rank == 0 ? 0 : count, rank == 0 ? count : 0};
    unsigned char *in = map_repeated(in_size), *out = map_repeated(out_size);
    if (!in || !out)
        return fsdp_fail(err, FSDP_ERR_LIMIT, "no memory for the test");
    mark_large(in, large->in_parts, count, rank);
    fsdp_collective call = {
        .kind = large->kind, .dtype = FSDP_U8, .in = in, .out = out, .count = count, .root = 1};
    if (large->kind == FSDP_ALL_TO_ALL)
        call.counts = call.out_counts = counts;
    fsdp_status status = fsdp_comm_run(comm, &call, err);
    bool is_root = large->kind == FSDP_BROADCAST && rank == 1;
    if (status == FSDP_OK)
        status = check_large((is_root ? in : out) + out_size, &call, rank, err);
    unmap_repeated(in, in_size);
    unmap_repeated(out, out_size);
    return status;
}

/* kind: its number; 0: all of them. */
static fsdp_status run_large(fsdp_world *world, int kind, fsdp_error *err)
{
    static const large_call calls[] = {{FSDP_BROADCAST, 1, 1},
                                       {FSDP_ALL_GATHER, 1, 2},
                                       {FSDP_REDUCE_SCATTER, 2, 1},
                                       {FSDP_ALL_REDUCE, 1, 1},
                                       {FSDP_ALL_TO_ALL, 1, 1}};
    fsdp_comm *comm = NULL;
    fsdp_status status = make_all(world, &comm, err);
    for (size_t i = 0; i < sizeof calls / sizeof *calls && status == FSDP_OK; i++)
        if (kind == 0 || calls[i].kind == (fsdp_collective_kind)kind)
            status = run_large_call(comm, &calls[i], err);
    if (status == FSDP_OK)
        printf("large over %s\n", fsdp_comm_backend(comm));
    fsdp_comm_free(comm);
    return status;
}

/* --- failures --------------------------------------------------------------------------------- */

static fsdp_status reduce(fsdp_comm *comm, int64_t count, fsdp_error *err)
{
    float *data = calloc(COUNT, sizeof *data);
    fsdp_collective call = {.kind = FSDP_ALL_REDUCE,
                            .dtype = FSDP_F32,
                            .in = data,
                            .out = data,
                            .count = count,
                            .unit = "layers.0"};
    fsdp_status status = fsdp_comm_run(comm, &call, err);
    free(data);
    return status;
}

static fsdp_status exchange(fsdp_comm *comm, int64_t wrong, fsdp_error *err)
{
    float data[128] = {0}, got[128];
    int64_t counts[64] = {0}, out_counts[64] = {0};
    counts[0] = 3;
    for (int i = 0; i < fsdp_comm_size(comm) && fsdp_comm_rank(comm) == 0; i++)
        out_counts[i] = 3;
    counts[0] += wrong;
    fsdp_collective call = {.kind = FSDP_ALL_TO_ALL,
                            .dtype = FSDP_F32,
                            .in = data,
                            .out = got,
                            .counts = counts,
                            .out_counts = out_counts};
    return fsdp_comm_run(comm, &call, err);
}

static void *kill_soon(void *user)
{
    (void)user;
    usleep(5000);
    raise(SIGKILL);
    return NULL;
}

static fsdp_status make_trouble(fsdp_comm *comm, const char *how, fsdp_error *err)
{
    const fsdp_error full = {.status = FSDP_ERR_NO_SPACE, .text = "the disk is full"};
    pthread_t thread;
    if (strcmp(how, "kill") == 0)
        raise(SIGKILL);
    if (strcmp(how, "work") == 0)
        (void)pthread_create(&thread, NULL, kill_soon, NULL);
    if (strcmp(how, "stop") == 0)
        raise(SIGSTOP);
    if (strcmp(how, "late") == 0)
        sleep(4);
    if (strcmp(how, "leave") == 0)
        return fsdp_fail(err, FSDP_ERR_CANCELLED, "has left");
    if (strcmp(how, "abort") == 0)
        fsdp_comm_abort(comm, &full);
    return reduce(comm, strcmp(how, "differ") == 0 ? 7 : COUNT, err);
}

static void note(const char *folder, const char *what, int rank, const char *text)
{
    char path[4096], done[4200];
    snprintf(path, sizeof path, "%s/.%s-%d", folder, what, rank);
    snprintf(done, sizeof done, "%s/%s-%d", folder, what, rank);
    FILE *file = fopen(path, "w");
    if (!file)
        exit(99);
    fputs(text, file);
    fclose(file);
    rename(path, done);
}

static fsdp_status run_until_failure(fsdp_comm *comm, const char *how, bool is_special,
                                     fsdp_error *err)
{
    if (strcmp(how, "counts") == 0)
        return exchange(comm, is_special ? 5 : 0, err);
    if (is_special)
        FSDP_TRY(make_trouble(comm, how, err));
    fsdp_status status;
    do
        status = reduce(comm, COUNT, err);
    while (status == FSDP_OK);
    return status;
}

static fsdp_status run_into_trouble(fsdp_world *world, char **argv, fsdp_error *err)
{
    const char *how = argv[1], *folder = argv[3];
    int rank = fsdp_world_rank(world);
    char text[1200];
    fsdp_comm *comm = NULL;
    FSDP_TRY(make_all(world, &comm, err));
    FSDP_TRY(reduce(comm, COUNT, err));
    FSDP_TRY(reduce(comm, COUNT, err));
    snprintf(text, sizeof text, "%d\n", (int)getpid());
    note(folder, "pid", rank, text);
    FSDP_TRY(fsdp_ctl_barrier(fsdp_world_ctl(world), err));
    int64_t before_ms = fsdp_now_ms();
    fsdp_status status = run_until_failure(comm, how, rank == atoi(argv[2]), err);
    int64_t waited_ms = fsdp_now_ms() - before_ms;
    fsdp_error again = {0};
    bool is_left = strcmp(err->text, "has left") == 0;
    bool is_kept = is_left || (reduce(comm, 1, &again) == status && !strcmp(again.text, err->text));
    snprintf(text, sizeof text, "%d %d %lld %.1000s\n", (int)status, is_kept, (long long)waited_ms,
             err->text);
    note(folder, "rank", rank, text);
    fsdp_comm_free(comm);
    return status;
}

static int run_rank(void *user, fsdp_world *world, int argc, char **argv)
{
    fsdp_error err = {0};
    fsdp_status status = FSDP_ERR_USAGE;
    (void)user;
    if (argc == 3 && strcmp(argv[1], "values") == 0)
        status = run_values(world, strtoull(argv[2], NULL, 10), &err);
    else if (argc == 2 && strcmp(argv[1], "hash") == 0)
        status = run_hash(world, &err);
    else if (argc == 3 && strcmp(argv[1], "large") == 0)
        status = run_large(world, atoi(argv[2]), &err);
    else if (argc == 4)
        status = run_into_trouble(world, argv, &err);
    if (err.text[0] != '\0')
        (void)fsdp_error_report(&err);
    return (int)status;
}

int main(int argc, char **argv)
{
    return fsdp_launch(argc, argv, run_rank, NULL);
}
