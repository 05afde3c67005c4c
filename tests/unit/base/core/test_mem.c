/* Checked memory: overflow is refused, the arena keeps its blocks, the n-th allocation can fail. */
#include "base/core/mem.h"

#include <criterion/criterion.h>
#include <string.h>

Test(mem, alloc_gives_zeroed_bytes)
{
    char *data = fsdp_alloc(100, 7);
    cr_assert_not_null(data);
    for (int i = 0; i < 700; i++)
        cr_assert_eq(data[i], 0);
    fsdp_free(data);
}

Test(mem, nothing_is_a_valid_pointer)
{
    void *none = fsdp_alloc(0, 8);
    void *empty = fsdp_alloc(8, 0);
    void *shrunk = fsdp_realloc(fsdp_alloc(1, 8), 0, 8);
    void *pages = fsdp_alloc_pages(0);
    cr_assert(none && empty && shrunk && pages);
    fsdp_free(none);
    fsdp_free(empty);
    fsdp_free(shrunk);
    fsdp_free(pages);
}

Test(mem, a_size_that_overflows_is_refused)
{
    const size_t wraps = SIZE_MAX / 4 + 2; /* four times that is 4 */
    cr_assert_null(fsdp_alloc(wraps, 4));
    cr_assert_null(fsdp_realloc(NULL, wraps, 4));
    cr_assert_null(fsdp_alloc(SIZE_MAX / 2, 3));
    cr_assert_null(fsdp_realloc(NULL, SIZE_MAX / 2, 3));
    cr_assert_null(fsdp_alloc_pages(SIZE_MAX));
    cr_assert_null(fsdp_strndup("", SIZE_MAX));
    fsdp_arena arena = {0};
    cr_assert_null(fsdp_arena_alloc(&arena, wraps, 4));
    cr_assert_null(fsdp_arena_alloc(&arena, SIZE_MAX / 2, 3));
    cr_assert_null(fsdp_arena_alloc(&arena, SIZE_MAX - 4, 1));
    fsdp_arena_release(&arena);
}

Test(mem, pages_are_aligned)
{
    for (size_t size = 1; size < 20000; size += 3999) {
        char *data = fsdp_alloc_pages(size);
        cr_assert_eq((uintptr_t)data % 4096, 0);
        memset(data, 1, size);
        fsdp_free(data);
    }
}

Test(mem, signed_sums_and_products_say_when_they_overflow)
{
    int64_t result = 0;
    cr_assert_not(fsdp_add_overflow(INT64_MAX - 1, 1, &result));
    cr_assert_eq(result, INT64_MAX);
    cr_assert(fsdp_add_overflow(INT64_MAX, 1, &result));
    cr_assert_not(fsdp_mul_overflow(-3, 5, &result));
    cr_assert_eq(result, -15);
    cr_assert(fsdp_mul_overflow(INT64_MAX / 2, 3, &result));
}

Test(mem, grow_keeps_what_was_there)
{
    int64_t *items = NULL;
    size_t capacity = 0;
    for (size_t n = 0; n < 1000; n++) {
        cr_assert(fsdp_grow(&items, &capacity, n + 1, sizeof *items));
        cr_assert_geq(capacity, n + 1);
        items[n] = (int64_t)n;
    }
    for (size_t n = 0; n < 1000; n++)
        cr_assert_eq(items[n], (int64_t)n);
    size_t before = capacity;
    cr_assert_not(fsdp_grow(&items, &capacity, SIZE_MAX / 2, sizeof *items));
    cr_assert_eq(capacity, before);
    cr_assert_eq(items[999], 999);
    fsdp_free(items);
}

Test(mem, arena_blocks_are_aligned_zeroed_and_apart)
{
    fsdp_arena arena = {0};
    enum { N = 3000 };
    char *blocks[N];
    for (size_t i = 0; i < N; i++) {
        blocks[i] = fsdp_arena_alloc(&arena, 1, i);
        cr_assert_not_null(blocks[i]);
        cr_assert_eq((uintptr_t)blocks[i] % 16, 0);
        for (size_t k = 0; k < i; k++)
            cr_assert_eq(blocks[i][k], 0);
        memset(blocks[i], (int)(i % 251), i);
    }
    for (size_t i = 0; i < N; i++) {
        for (size_t k = 0; k < i; k++)
            cr_assert_eq((unsigned char)blocks[i][k], i % 251);
    }
    void *large = fsdp_arena_alloc(&arena, 5, 1 << 20);
    cr_assert_not_null(large);
    memset(large, 1, 5 << 20);
    cr_assert_str_eq(fsdp_arena_strndup(&arena, "name and more", 4), "name");
    fsdp_arena_release(&arena);
    cr_assert_null(arena.blocks);
}

Test(mem, the_chosen_allocation_fails_once_or_from_then_on)
{
    fsdp_mem_fail_after(2, false);
    void *a = fsdp_alloc(1, 1), *b = fsdp_realloc(NULL, 1, 1), *c = fsdp_alloc_pages(1);
    void *d = fsdp_strndup("", 0);
    int64_t made = fsdp_mem_fail_after(1, true);
    void *e = fsdp_alloc(1, 1), *f = fsdp_alloc(1, 1), *g = fsdp_alloc(1, 1);
    fsdp_mem_fail_after(-1, false);
    void *h = fsdp_alloc(1, 1);
    cr_assert(a && b && !c && d);
    cr_assert_eq(made, 4);
    cr_assert(e && !f && !g && h);
    fsdp_free(a);
    fsdp_free(b);
    fsdp_free(d);
    fsdp_free(e);
    fsdp_free(h);
}

Test(mem, failure_names_what_it_was_for)
{
    fsdp_error err = {0};
    cr_assert_eq(fsdp_fail_memory(&err, "a plan"), FSDP_ERR_LIMIT);
    cr_assert_str_eq(err.text, "cannot allocate memory for a plan");
}
