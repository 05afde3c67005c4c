/*
 * Blocks of the fake CUDA runtime. Each has pages of its own, of which it lies at the end, before a
 * page that faults; addresses are taken once, so that freed memory faults, too. See fake_cudart.h.
 */
#include "tests/cuda/fake_cudart_parts.h"

#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { PAGE = 4096, ALIGNMENT = 256, FRESH = 0xc9, BEHIND = 0x9e };

static const size_t ROOM = (size_t)64 << 30;

typedef struct block {
    struct block *next;
    unsigned char *pages, *data;
    size_t mapped, size;
    fake_kind kind;
    int gpu;
} block;

static block *blocks;
static unsigned char *arena;
static size_t taken;
static int key = -1;

/* --- protection ------------------------------------------------------------------------------- */

static void reserve(void)
{
    if (arena)
        return;
    arena = mmap(NULL, ROOM, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (arena == MAP_FAILED)
        abort();
#ifdef PKEY_DISABLE_ACCESS
    key = pkey_alloc(0, PKEY_DISABLE_ACCESS);
#endif
}

/* Threads that are there already, or come, have no access unless they enter. */
static void guard(block *one)
{
#ifdef PKEY_DISABLE_ACCESS
    if (key >= 0 && one->kind == FAKE_DEVICE && !fake_plan()->is_open &&
        pkey_mprotect(one->pages, one->mapped, PROT_READ | PROT_WRITE, key) != 0)
        abort();
#else
    (void)one;
#endif
}

void fake_memory_enter(void)
{
    fake_lock();
    reserve(); /* streams may be there before memory */
    fake_unlock();
#ifdef PKEY_DISABLE_ACCESS
    if (key >= 0)
        pkey_set(key, 0);
#endif
}

bool fake_cudart_is_guarded(void)
{
    fake_lock();
    reserve();
    fake_unlock();
    return key >= 0;
}

/* --- blocks ----------------------------------------------------------------------------------- */

static unsigned char *take_pages(size_t mapped)
{
    reserve();
    if (mapped + PAGE > ROOM)
        return NULL;
    if (taken + mapped + PAGE > ROOM)
        taken = 0; /* the oldest addresses come back; those in use stay */
    unsigned char *pages = arena + taken;
    for (const block *one = blocks; one; one = one->next)
        if (pages < one->pages + one->mapped && one->pages < pages + mapped + PAGE)
            return NULL;
    if (mprotect(pages, mapped, PROT_READ | PROT_WRITE) != 0)
        return NULL;
    taken += mapped + PAGE;
    return pages;
}

void *fake_memory_alloc(size_t size, fake_kind kind)
{
    size_t alignment = kind == FAKE_PINNED ? PAGE : ALIGNMENT;
    size_t aligned = (size + alignment - 1) / alignment * alignment;
    size_t mapped = (aligned + PAGE - 1) / PAGE * PAGE;
    block *one = calloc(1, sizeof *one);
    if (!one)
        abort();
    fake_lock();
    unsigned char *pages = take_pages(mapped);
    if (pages) {
        *one =
            (block){blocks, pages, pages + mapped - aligned, mapped, size, kind, fake_cudart_gpu()};
        memset(pages, BEHIND, mapped);
        memset(one->data, FRESH, size);
        guard(one);
        blocks = one;
    }
    fake_unlock();
    if (pages)
        return one->data;
    free(one);
    return NULL;
}

/* Bytes next to the block, on its pages. */
static bool is_intact(const block *one)
{
    for (const unsigned char *at = one->pages; at < one->pages + one->mapped; at++)
        if ((at < one->data || at >= one->data + one->size) && *at != BEHIND)
            return false;
    return true;
}

static void drop(block *one)
{
#ifdef PKEY_DISABLE_ACCESS
    if (key >= 0 && pkey_mprotect(one->pages, one->mapped, PROT_READ | PROT_WRITE, 0) != 0)
        abort();
#endif
    if (!is_intact(one))
        fake_misuse("bytes beside a block of %zu bytes were written", one->size);
    if (mmap(one->pages, one->mapped, PROT_NONE,
             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) == MAP_FAILED)
        abort();
    free(one);
}

bool fake_memory_free(void *data, fake_kind kind)
{
    block *found = NULL;
    fake_lock();
    for (block **at = &blocks; *at && !found; at = found ? at : &(*at)->next) {
        if ((*at)->data == data && (*at)->kind == kind) {
            found = *at;
            *at = found->next;
            break;
        }
    }
    if (found)
        drop(found);
    fake_unlock();
    return found != NULL;
}

/* The lock is held. */
static const block *find(const unsigned char *data)
{
    for (const block *one = blocks; one; one = one->next)
        if (data >= one->pages && data < one->pages + one->mapped)
            return one;
    return NULL;
}

size_t fake_cudart_pinned(void)
{
    size_t size = 0;
    fake_lock();
    for (const block *one = blocks; one; one = one->next)
        size += one->kind == FAKE_PINNED ? one->size : 0;
    fake_unlock();
    return size;
}

fake_kind fake_memory_kind(const void *data)
{
    fake_lock();
    const block *one = find(data);
    fake_kind kind = one ? one->kind : FAKE_PAGEABLE;
    fake_unlock();
    return kind;
}

bool fake_memory_is_near(const void *data)
{
    fake_lock();
    const block *one = find(data);
    bool is_near = !one || one->kind != FAKE_DEVICE || one->gpu == fake_cudart_gpu();
    fake_unlock();
    return is_near;
}

bool fake_memory_is_whole(const void *data, size_t size)
{
    const unsigned char *at = data;
    fake_lock();
    const block *one = find(at);
    bool is_dead = !one && at >= arena && at < arena + ROOM;
    bool is_whole = one ? at >= one->data && at + size <= one->data + one->size : !is_dead;
    fake_unlock();
    return is_whole;
}

size_t fake_memory_count(void)
{
    size_t count = 0;
    fake_lock();
    for (const block *one = blocks; one; one = one->next)
        count++;
    fake_unlock();
    return count;
}
