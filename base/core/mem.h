/*
 * Checked memory: sizes are multiplied with overflow checks, failure is an error and never an exit.
 * Tests make the n-th allocation fail (fsdp_mem_fail_after), so every caller's error path runs.
 * FSDP_API marks the functions that libfsdp_mpi uses.
 *
 * The room base/core has what every file needs: memory, errors (status.h), text, the clock, byte order and
 * worker threads. In come sizes, formats and jobs; out come memory, text and statuses. Any room may call it.
 */
#ifndef FSDP_MEM_H
#define FSDP_MEM_H

#include <fsdp/status.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* NULL when there is no memory. Zeroed. count or size 0 gives a valid pointer. */
FSDP_API void *fsdp_alloc(size_t count, size_t size);
/* Not zeroed; the old block stays when NULL comes back. */
void *fsdp_realloc(void *old, size_t count, size_t size);
/* Page-aligned and not zeroed, for buffers of files and messages. */
FSDP_API void *fsdp_alloc_pages(size_t size);
FSDP_API void fsdp_free(void *data);
/* A copy of size bytes with a zero byte after them. */
char *fsdp_strndup(const char *data, size_t size);

/* True when an allocation of that many bytes succeeds now. For libraries that crash when one fails. */
bool fsdp_mem_available(size_t size);

/* "cannot allocate memory for WHAT" */
FSDP_API fsdp_status fsdp_fail_memory(fsdp_error *err, const char *what);

bool fsdp_add_overflow(int64_t a, int64_t b, int64_t *sum_out);
bool fsdp_mul_overflow(int64_t a, int64_t b, int64_t *product_out);

/* Grows *items to hold at least `need` of `size` bytes each, doubling; false when there is no memory. */
bool fsdp_grow_block(void *items, size_t *capacity, size_t need, size_t size);
static inline bool fsdp_grow(void *items, size_t *capacity, size_t need, size_t size)
{
    return need <= *capacity || fsdp_grow_block(items, capacity, need, size);
}

/* An arena: many small zeroed blocks, freed at once. Zero-initialise. */
typedef struct fsdp_arena { struct fsdp_arena_block *blocks; } fsdp_arena;
void *fsdp_arena_alloc(fsdp_arena *arena, size_t count, size_t size);
char *fsdp_arena_strndup(fsdp_arena *arena, const char *data, size_t size);
void fsdp_arena_release(fsdp_arena *arena);

/*
 * Fault injection, for tests: n more allocations succeed and the next one fails, or all from there on with
 * forever (n < 0: off). Returns the number of allocations since the last call.
 */
int64_t fsdp_mem_fail_after(int64_t n, bool forever);

#endif
