/*
 * Tied names in a derivation: two names that lead through equal operations to one tensor of the base stay two
 * names of one tensor. Only tensors with several names in the base are compared. See derived_checkpoint.h.
 */
#include "statedict/derive/derived_ties.h"

#include "base/core/fnv.h"
#include "base/core/mem.h"
#include "statedict/checkpoint/same_tensors.h"

#include <string.h>

/* Comparisons of nodes in a derivation: hostile maps could ask for any number. */
enum { COMPARED_MOST = 1 << 24 };

/* --- which tensors have several names ---------------------------------------------------------- */

fsdp_status fsdp_derived_ties_init(fsdp_derived_ties *ties, const fsdp_checkpoint *base,
                                   fsdp_error *err)
{
    const fsdp_sd *sd = base->manifest.sd;
    size_t count = fsdp_sd_count(sd);
    *ties = (fsdp_derived_ties){.base = base, .left = COMPARED_MOST};
    ties->one = fsdp_alloc(count, sizeof *ties->one);
    ties->is_tied = fsdp_alloc(count, sizeof *ties->is_tied);
    if (!ties->one || !ties->is_tied)
        return fsdp_fail_memory(err, "tied weights");
    FSDP_TRY(fsdp_same_tensors(base, true, ties->one, err));
    for (size_t i = 0; i < count; i++)
        if (ties->one[i] != i)
            ties->is_tied[ties->one[i]] = true;
    return FSDP_OK;
}

void fsdp_derived_ties_release(fsdp_derived_ties *ties)
{
    fsdp_name_table_release(&ties->table);
    fsdp_free(ties->is_tied);
    fsdp_free(ties->one);
}

/* --- equal operations --------------------------------------------------------------------------- */

static bool same_numbers(const int64_t *a, const int64_t *b, int count)
{
    return a == b || (a && b && memcmp(a, b, (size_t)count * sizeof *a) == 0);
}

static bool same_order(const int *a, const int *b, int count)
{
    return a == b || (a && b && memcmp(a, b, (size_t)count * sizeof *a) == 0);
}

/* The entry that stands for the stored tensor of a node. */
static size_t entry_of(const fsdp_derived_ties *ties, const fsdp_derived *node)
{
    return node->checkpoint == ties->base ? ties->one[node->entry] : node->entry;
}

static bool same_node(const fsdp_derived_ties *ties, const fsdp_derived *a, const fsdp_derived *b)
{
    return a->ops == b->ops && a->dtype == b->dtype && a->ndim == b->ndim &&
           a->part_count == b->part_count && a->checkpoint == b->checkpoint &&
           entry_of(ties, a) == entry_of(ties, b) && a->dim == b->dim && a->more == b->more &&
           memcmp(&a->factor, &b->factor, sizeof a->factor) == 0 &&
           same_numbers(a->shape, b->shape, a->ndim) && same_numbers(a->lo, b->lo, a->ndim) &&
           same_order(a->order, b->order, a->ndim);
}

/* The depth is bounded by the steps of a rule. */
static bool is_equal(fsdp_derived_ties *ties, const fsdp_derived *a, const fsdp_derived *b)
{
    if (a == b)
        return true;
    if (ties->left-- <= 0 || !same_node(ties, a, b))
        return false;
    for (size_t i = 0; i < a->part_count; i++)
        if (!is_equal(ties, a->parts[i], b->parts[i]))
            return false;
    return true;
}

/* A hash of the operations on the way to the first stored tensor, which is of the base and has several names;
 * false: it has not. */
static bool hash_tied(const fsdp_derived_ties *ties, const fsdp_derived *tensor, uint64_t *out)
{
    uint64_t hash = FSDP_FNV_BEGIN;
    for (;; tensor = tensor->parts[0]) {
        hash = fsdp_fnv(hash, tensor->shape, (size_t)tensor->ndim * sizeof *tensor->shape);
        if (tensor->lo)
            hash = fsdp_fnv(hash, tensor->lo, (size_t)tensor->ndim * sizeof *tensor->lo);
        if (tensor->part_count == 0)
            break;
    }
    size_t entry = entry_of(ties, tensor);
    *out = fsdp_fnv(hash, &entry, sizeof entry);
    return tensor->checkpoint == ties->base && ties->is_tied[entry];
}

fsdp_status fsdp_derived_ties_find(fsdp_derived_ties *ties, fsdp_arena *arena,
                                   const fsdp_derived *tensor, fsdp_derived_made made,
                                   int64_t *found_out, fsdp_error *err)
{
    uint64_t hash;
    *found_out = -1;
    if (!hash_tied(ties, tensor, &hash))
        return FSDP_OK;
    const uint64_t *known = fsdp_name_table_find(&ties->table, (const char *)&hash, sizeof hash);
    if (known) {
        bool is_same = is_equal(ties, made.tensors[*known], tensor);
        *found_out = is_same ? (int64_t)*known : -1;
        return FSDP_OK;
    }
    char *key = fsdp_arena_strndup(arena, (const char *)&hash, sizeof hash);
    if (!key || !fsdp_name_table_put(&ties->table, key, sizeof hash, made.count))
        return fsdp_fail_memory(err, "tied weights");
    return FSDP_OK;
}
