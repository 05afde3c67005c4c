/*
 * Copies of a state dict in waves (runtime/staging/snapshot.c), from a device whose memory the host may not
 * read: which tensors a wave has, what lies in them, and the hashes. step/test_device_memory.c saves whole
 * roots so.
 */
#include "runtime/staging/snapshot.h"

#include "kernels/kernels.h"
#include <fsdp/fsdp.h>

#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

enum { TENSORS = 7, BYTES = 256, GUARD = 64 };

/* --- a device that counts staging memory and guards its end ------------------------------------------- */

static fsdp_device_ops ops;
static fsdp_device *device;
static fsdp_stream *compute;
static const fsdp_device_ops *host;
static int blocks;

static void *alloc_guarded(fsdp_device *of, size_t size)
{
    unsigned char *made = host->alloc_staging(of, size + GUARD);
    if (made)
        memset(made + size, 0x5a, GUARD);
    blocks++;
    return made;
}

static void dealloc_guarded(fsdp_device *of, void *data, size_t size)
{
    const unsigned char *guard = (unsigned char *)data + size;
    for (int i = 0; i < GUARD; i++)
        cr_expect_eq(guard[i], 0x5a, "written behind %zu bytes", size);
    blocks--;
    host->dealloc_staging(of, data, size + GUARD);
}

static void begin(void)
{
    cr_assert_eq(fsdp_device_cpu_async(&device, NULL), FSDP_OK);
    host = device->ops;
    ops = *host;
    ops.is_host = false;
    ops.alloc_staging = alloc_guarded;
    ops.dealloc_staging = dealloc_guarded;
    device->ops = &ops;
    cr_assert_eq(ops.stream_create(device, "compute", &compute, NULL), FSDP_OK);
}

static void end(void)
{
    cr_expect_eq(blocks, 0);
    ops.stream_free(compute);
    device->ops = host;
    fsdp_device_close(device);
}

TestSuite(snapshot, .init = begin, .fini = end);

/* --- a state ------------------------------------------------------------------------------------------ */

/* TENSORS of the device, and one of the host's in their midst. */
typedef struct state {
    unsigned char memory[TENSORS][BYTES], other[100];
    fsdp_host_view view;
    fsdp_mesh *mesh;
} state;

enum { OTHER = 3, ENTRIES = TENSORS + 1 };

static unsigned char *memory_of(state *s, int entry)
{
    return entry == OTHER ? s->other : s->memory[entry - (entry > OTHER)];
}

static int64_t size_of(int entry)
{
    return entry == OTHER ? 100 : BYTES;
}

static void fill(state *s, int seed)
{
    for (int i = 0; i < ENTRIES; i++)
        for (int64_t b = 0; b < size_of(i); b++)
            memory_of(s, i)[b] = (unsigned char)(seed + 31 * i + 7 * b + b / 50);
}

static void make_state(state *s)
{
    const int64_t one = 1;
    const char *name = "dp";
    *s = (state){.view.device = device};
    cr_assert_eq(fsdp_mesh_create(1, &one, &name, NULL, &s->mesh, NULL), FSDP_OK);
    fill(s, 0);
    const fsdp_viewed_block block = {.data = s->memory[0], .size = sizeof s->memory};
    cr_assert_eq(fsdp_host_view_add(&s->view, block, NULL), FSDP_OK);
}

static void release_state(state *s)
{
    fsdp_host_view_release(&s->view);
    fsdp_mesh_free(s->mesh);
}

static fsdp_sd *describe(state *s)
{
    fsdp_sd *sd;
    cr_assert_eq(fsdp_sd_create(&sd, NULL), FSDP_OK);
    for (int i = 0; i < ENTRIES; i++) {
        const char name[] = {(char)('a' + i), '\0'};
        const int64_t count = size_of(i);
        const fsdp_tensor tensor = {FSDP_U8,
                                    1,
                                    &count,
                                    {.mesh = s->mesh, .placement = {{FSDP_REPLICATE, 0, 0}}},
                                    memory_of(s, i)};
        cr_assert_eq(fsdp_sd_add_tensor(sd, name, 1, &tensor, NULL), FSDP_OK);
    }
    return sd;
}

static void expect_copied(const fsdp_sd *sd, state *s, int entry)
{
    const unsigned char *copy = fsdp_sd_at(sd, (size_t)entry)->data;
    cr_expect_neq(copy, memory_of(s, entry));
    cr_expect_eq(memcmp(copy, memory_of(s, entry), (size_t)size_of(entry)), 0, "entry %d", entry);
}

/* Takes a copy in a pool of that many bytes, and enters its waves one by one. */
static void expect_waves(state *s, int64_t most, const size_t *first, size_t count)
{
    fsdp_sd *sd = describe(s);
    const fsdp_snapshot_opts opts = {.view = &s->view, .most = most};
    fsdp_snapshot snapshot = {0};
    cr_assert_eq(fsdp_snapshot_open(&snapshot, &opts, sd, 0, NULL), FSDP_OK);
    for (int again = 0; again < 2; again++) {
        fsdp_sd_free(sd);
        sd = describe(s);
        const fsdp_snapshot_take take = {.sd = sd, .rank = 0, .changes = compute};
        cr_assert_eq(fsdp_snapshot_begin(&snapshot, &take, NULL), FSDP_OK);
        fsdp_waves *waves = fsdp_snapshot_waves(&snapshot);
        cr_assert_eq(waves->count, count, "%zu waves in %lld bytes", waves->count, (long long)most);
        cr_assert_arr_eq(waves->first, first, count * sizeof *first);
        expect_copied(sd, s, OTHER);
        for (int i = 0; i < ENTRIES; i++) {
            cr_assert_eq(fsdp_waves_reach(waves, (size_t)i, NULL), FSDP_OK);
            expect_copied(sd, s, i);
        }
        fsdp_snapshot_end(&snapshot);
    }
    cr_expect_leq(snapshot.room, most > 0 ? most : INT64_MAX);
    fsdp_sd_free(sd);
    fsdp_snapshot_release(&snapshot);
}

/* --- tests ---------------------------------------------------------------------------------------------- */

Test(snapshot, waves_take_as_many_tensors_as_fit)
{
    static const size_t one[] = {0}, twos[] = {0, 2, 5, 7}, threes[] = {0, 4, 7},
                        singles[] = {0, 1, 2, 4, 5, 6, 7};
    enum { HOST = 128 }; /* 100 bytes, aligned */
    state s;
    make_state(&s);
    expect_waves(&s, 0, one, 1);
    expect_waves(&s, HOST + TENSORS * BYTES, one, 1);
    expect_waves(&s, HOST + 2 * 3 * BYTES, threes, 3);
    expect_waves(&s, HOST + 2 * 2 * BYTES, twos, 4);
    expect_waves(&s, HOST + 2 * 2 * BYTES + 2 * 192, twos, 4);
    expect_waves(&s, HOST + 2 * BYTES, singles, 7);
    release_state(&s);
}

/* Hashes of few tensors, of all of them, and of few again: of what lies in them at the call. */
Test(snapshot, as_many_hashes_as_a_copy_asks_for)
{
    static const int asked[] = {2, ENTRIES, 1, ENTRIES};
    state s;
    make_state(&s);
    fsdp_snapshot snapshot = {0};
    fsdp_sd *sd = describe(&s);
    const fsdp_snapshot_opts opts = {.view = &s.view, .most = 128 + 2 * 2 * BYTES};
    cr_assert_eq(fsdp_snapshot_open(&snapshot, &opts, sd, 0, NULL), FSDP_OK);
    for (size_t n = 0; n < sizeof asked / sizeof *asked; n++) {
        bool is_hashed[ENTRIES];
        for (int i = 0; i < ENTRIES; i++)
            is_hashed[i] = i < asked[n];
        fsdp_sd_free(sd);
        sd = describe(&s);
        const fsdp_snapshot_take take = {
            .sd = sd, .rank = 0, .is_hashed = is_hashed, .changes = compute};
        fill(&s, (int)n);
        cr_assert_eq(fsdp_snapshot_begin(&snapshot, &take, NULL), FSDP_OK);
        cr_assert_eq(fsdp_waves_reach(fsdp_snapshot_waves(&snapshot), 0, NULL), FSDP_OK);
        cr_expect_eq(snapshot.hashed_count, (size_t)(asked[n] - (asked[n] > OTHER)));
        for (int i = 0; i < asked[n]; i++) {
            const fsdp_hash got = fsdp_snapshot_hash(&snapshot, (size_t)i),
                            want = fsdp_kernels_get()->hash(memory_of(&s, i), (size_t)size_of(i));
            cr_expect_eq(memcmp(&got, &want, sizeof got), 0, "copy %zu, entry %d", n, i);
        }
        fsdp_snapshot_end(&snapshot);
    }
    fsdp_sd_free(sd);
    fsdp_snapshot_release(&snapshot);
    release_state(&s);
}
