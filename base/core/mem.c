/* Checked memory, the arena, and the switch that makes the n-th allocation fail. See mem.h. */
#include "base/core/mem.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum {
    PAGE_BYTES = 4096,
    LARGE_BYTES = 4 << 20, /* smallest block that gets huge pages */
    ARENA_FIRST_BLOCK = 4096,
    ARENA_LARGEST_BLOCK = 16 << 20
};

static _Atomic int64_t allocations_made;
static _Atomic int64_t first_failure = -1; /* counted like allocations_made; -1: none */
static _Atomic bool fails_forever;

static bool injected_failure(void)
{
    int64_t index = atomic_fetch_add_explicit(&allocations_made, 1, memory_order_relaxed);
    int64_t first = atomic_load_explicit(&first_failure, memory_order_relaxed);
    if (first < 0)
        return false;
    return atomic_load(&fails_forever) ? index >= first : index == first;
}

int64_t fsdp_mem_fail_after(int64_t n, bool forever)
{
    atomic_store(&first_failure, -1);
    int64_t made = atomic_exchange(&allocations_made, 0);
    atomic_store(&fails_forever, forever);
    atomic_store(&first_failure, n < 0 ? -1 : n);
    return made;
}

/*
 * Asks for huge pages, since a large block without them takes a page fault for every 4 KiB. The advice covers
 * whole pages around the block: mremap cannot move a mapping of which only a part is advised. A refusal
 * changes nothing.
 */
static void *in_huge_pages(void *data, size_t bytes)
{
    if (data && bytes >= LARGE_BYTES) {
        uintptr_t first = (uintptr_t)data / PAGE_BYTES * PAGE_BYTES;
        uintptr_t end = ((uintptr_t)data + bytes + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES;
        (void)madvise((void *)first, end - first, MADV_HUGEPAGE);
    }
    return data;
}

void *fsdp_alloc(size_t count, size_t size)
{
    size_t bytes;
    if (__builtin_mul_overflow(count, size, &bytes) || injected_failure())
        return NULL;
    return in_huge_pages(calloc(1, bytes > 0 ? bytes : 1), bytes);
}

void *fsdp_realloc(void *old, size_t count, size_t size)
{
    size_t bytes;
    if (__builtin_mul_overflow(count, size, &bytes) || injected_failure())
        return NULL;
    return in_huge_pages(realloc(old, bytes > 0 ? bytes : 1), bytes);
}

void *fsdp_alloc_pages(size_t size)
{
    if (size > SIZE_MAX - PAGE_BYTES || injected_failure())
        return NULL;
    size_t pages = size > 0 ? (size + PAGE_BYTES - 1) / PAGE_BYTES : 1;
    return in_huge_pages(aligned_alloc(PAGE_BYTES, pages * PAGE_BYTES), pages * PAGE_BYTES);
}

bool fsdp_mem_available(size_t size)
{
    /* volatile: a compiler may leave out an allocation that nothing looks at */
    void *volatile data = injected_failure() ? NULL : malloc(size);
    free(data);
    return data != NULL;
}

void fsdp_free(void *data)
{
    free(data);
}

char *fsdp_strndup(const char *data, size_t size)
{
    if (size == SIZE_MAX)
        return NULL;
    char *copy = fsdp_realloc(NULL, size + 1, 1);
    if (!copy)
        return NULL;
    if (size > 0)
        memcpy(copy, data, size);
    copy[size] = '\0';
    return copy;
}

bool fsdp_add_overflow(int64_t a, int64_t b, int64_t *sum_out)
{
    return __builtin_add_overflow(a, b, sum_out);
}

bool fsdp_mul_overflow(int64_t a, int64_t b, int64_t *product_out)
{
    return __builtin_mul_overflow(a, b, product_out);
}

bool fsdp_grow_block(void *items, size_t *capacity, size_t need, size_t size)
{
    size_t wanted = *capacity > SIZE_MAX / 2 ? need : *capacity * 2;
    if (wanted < need)
        wanted = need;
    if (wanted < 16)
        wanted = 16;
    /* items points to a pointer of some type: memcpy reads and writes it without breaking aliasing */
    void *block;
    memcpy(&block, items, sizeof block);
    block = fsdp_realloc(block, wanted, size);
    if (!block)
        return false;
    memcpy(items, &block, sizeof block);
    *capacity = wanted;
    return true;
}

struct fsdp_arena_block {
    struct fsdp_arena_block *next;
    size_t used, capacity;
    max_align_t data[];
};

static struct fsdp_arena_block *add_block(fsdp_arena *arena, size_t bytes)
{
    struct fsdp_arena_block *last = arena->blocks;
    size_t capacity = last ? last->capacity * 2 : ARENA_FIRST_BLOCK;
    if (capacity > ARENA_LARGEST_BLOCK)
        capacity = ARENA_LARGEST_BLOCK;
    if (capacity < bytes)
        capacity = bytes;
    if (capacity > SIZE_MAX - sizeof *last)
        return NULL;
    struct fsdp_arena_block *block = fsdp_alloc(1, sizeof *block + capacity);
    if (!block)
        return NULL;
    block->capacity = capacity;
    block->next = last;
    arena->blocks = block;
    return block;
}

void *fsdp_arena_alloc(fsdp_arena *arena, size_t count, size_t size)
{
    size_t bytes;
    size_t align = _Alignof(max_align_t);
    if (__builtin_mul_overflow(count, size, &bytes) || bytes > SIZE_MAX - align)
        return NULL;
    bytes = bytes > 0 ? (bytes + align - 1) / align * align : align;
    struct fsdp_arena_block *block = arena->blocks;
    if (!block || block->capacity - block->used < bytes)
        block = add_block(arena, bytes);
    if (!block)
        return NULL;
    void *data = (char *)block->data + block->used;
    block->used += bytes;
    return data;
}

char *fsdp_arena_strndup(fsdp_arena *arena, const char *data, size_t size)
{
    if (size == SIZE_MAX)
        return NULL;
    char *copy = fsdp_arena_alloc(arena, size + 1, 1);
    if (copy && size > 0)
        memcpy(copy, data, size);
    return copy;
}

void fsdp_arena_release(fsdp_arena *arena)
{
    while (arena->blocks) {
        struct fsdp_arena_block *next = arena->blocks->next;
        fsdp_free(arena->blocks);
        arena->blocks = next;
    }
}
