/*
 * The description of a state dict as hashes: hash n covers the first n entries. When the ranks
 * differ they find the first entry that does by bisection, with one small message per step.
 */
#include "statedict/sd/describe.h"

#include "base/core/mem.h"
#include "statedict/ctl/ctl_backend.h"
#include "statedict/sd/layout_internal.h"

#include <stdio.h>
#include <string.h>

/* --- hashing ---------------------------------------------------------------------------------- */

static void add_i64(fsdp_hasher *hasher, int64_t value)
{
    fsdp_hasher_add(hasher, &value, sizeof value);
}

static void add_sized(fsdp_hasher *hasher, const void *data, size_t size)
{
    add_i64(hasher, (int64_t)size);
    fsdp_hasher_add(hasher, data, size);
}

static void add_mesh(fsdp_hasher *hasher, const fsdp_mesh *mesh)
{
    int ndim = fsdp_mesh_ndim(mesh);
    add_i64(hasher, ndim);
    for (int i = 0; i < ndim; i++) {
        add_i64(hasher, fsdp_mesh_dim_size(mesh, i));
        add_sized(hasher, fsdp_mesh_dim_name(mesh, i), strlen(fsdp_mesh_dim_name(mesh, i)));
    }
    bool dense = fsdp_mesh_is_dense(mesh);
    add_i64(hasher, dense);
    for (int64_t i = 0; !dense && i < fsdp_mesh_size(mesh); i++)
        add_i64(hasher, fsdp_mesh_rank_at(mesh, i));
}

static void add_layout(fsdp_hasher *hasher, const fsdp_layout *layout)
{
    add_i64(hasher, layout->kind);
    if (layout->kind != FSDP_LAYOUT_BOXES)
        add_mesh(hasher, layout->mesh);
    for (int i = 0; layout->kind == FSDP_LAYOUT_MESH && i < fsdp_mesh_ndim(layout->mesh); i++) {
        add_i64(hasher, layout->placement[i].kind);
        if (layout->placement[i].kind != FSDP_REPLICATE)
            add_i64(hasher, layout->placement[i].dim);
        if (layout->placement[i].kind == FSDP_STRIDED_SHARD)
            add_i64(hasher, layout->placement[i].split);
    }
    for (size_t i = 0; layout->kind == FSDP_LAYOUT_BOXES && i < layout->box_count; i++) {
        const fsdp_rank_box *held = &layout->boxes[i];
        add_i64(hasher, held->rank);
        fsdp_hasher_add(hasher, held->box.lo, (size_t)held->box.ndim * sizeof(int64_t));
        fsdp_hasher_add(hasher, held->box.len, (size_t)held->box.ndim * sizeof(int64_t));
    }
    if (layout->kind == FSDP_LAYOUT_FLAT) {
        add_i64(hasher, layout->flat_count);
        add_i64(hasher, layout->flat_offset);
    }
}

static void add_value(fsdp_hasher *hasher, const fsdp_value *value)
{
    add_i64(hasher, value->kind);
    switch (value->kind) {
    case FSDP_VALUE_NULL: break;
    case FSDP_VALUE_BOOL: add_i64(hasher, value->as.boolean); break;
    case FSDP_VALUE_I64:
    case FSDP_VALUE_U64:
    case FSDP_VALUE_F64: fsdp_hasher_add(hasher, &value->as, sizeof(int64_t)); break;
    case FSDP_VALUE_STRING:
    case FSDP_VALUE_BYTES:
    case FSDP_VALUE_OPAQUE:
    case FSDP_VALUE_INTEGER:
    case FSDP_VALUE_CLASS: add_sized(hasher, value->as.bytes.data, value->as.bytes.size); break;
    case FSDP_VALUE_COMPLEX:
        fsdp_hasher_add(hasher, value->as.complex_parts, sizeof value->as.complex_parts);
        break;
    case FSDP_VALUE_TENSOR: add_i64(hasher, (int64_t)value->as.tensor); break;
    case FSDP_VALUE_LIST:
    case FSDP_VALUE_DICT:
        add_i64(hasher, value->is_tuple);
        add_i64(hasher, (int64_t)value->as.list.count);
        for (size_t i = 0; i < value->as.list.count; i++)
            add_value(hasher, &value->as.list.items[i]);
        break;
    }
}

static void add_entry(fsdp_hasher *hasher, const fsdp_entry *entry, bool with_values)
{
    add_i64(hasher, entry->kind);
    add_sized(hasher, entry->name, entry->name_size);
    if (entry->kind == FSDP_ENTRY_ALIAS)
        add_i64(hasher, (int64_t)entry->target);
    if (entry->kind == FSDP_ENTRY_VALUE && with_values)
        add_value(hasher, &entry->value);
    if (entry->kind != FSDP_ENTRY_TENSOR)
        return;
    add_i64(hasher, entry->dtype);
    add_i64(hasher, entry->flat);
    add_sized(hasher, entry->shape, (size_t)entry->ndim * sizeof(int64_t));
    add_layout(hasher, &entry->layout);
}

/* hashes_out[n] covers the flat buffers' names and the first n entries; NULL: only the last is
 * made. */
static fsdp_status hash_entries(const fsdp_sd *sd, bool with_values, fsdp_hash *hashes_out,
                                fsdp_hash *last_out, fsdp_error *err)
{
    fsdp_hasher *hasher = fsdp_hasher_create();
    if (!hasher)
        return fsdp_fail_memory(err, "a hash state");
    for (size_t i = 0; i < fsdp_sd_flat_count(sd); i++) {
        const fsdp_flat *flat = fsdp_sd_flat_at(sd, i);
        add_sized(hasher, flat->name, flat->name_size);
        add_i64(hasher, flat->count);
    }
    for (size_t i = 0; i < fsdp_sd_count(sd); i++) {
        if (hashes_out)
            hashes_out[i] = fsdp_hasher_value(hasher);
        add_entry(hasher, fsdp_sd_at(sd, i), with_values);
    }
    *last_out = fsdp_hasher_value(hasher);
    if (hashes_out)
        hashes_out[fsdp_sd_count(sd)] = *last_out;
    fsdp_hasher_free(hasher);
    return FSDP_OK;
}

fsdp_status fsdp_describe_hash(const fsdp_sd *sd, bool with_values, fsdp_hash *hash_out,
                               fsdp_error *err)
{
    return hash_entries(sd, with_values, NULL, hash_out, err);
}

/* --- agreeing --------------------------------------------------------------------------------- */

enum { SHOWN_NAME = 120, SHOWN_RANKS = 16 };

typedef struct summary {
    fsdp_hash hash;
    int64_t count;
} summary;

static bool all_equal(const char *all, size_t size, int n)
{
    for (int i = 1; i < n; i++)
        if (memcmp(all, all + (size_t)i * size, size) != 0)
            return false;
    return true;
}

/* The number of leading entries that all ranks share. */
static fsdp_status count_shared(const fsdp_hash *hashes, int64_t least, fsdp_ctl *ctl,
                                fsdp_hash *all, int64_t *shared_out, fsdp_error *err)
{
    int64_t low = 0, high = least;
    while (low < high) {
        int64_t middle = low + (high - low + 1) / 2;
        FSDP_TRY(fsdp_ctl_allgather(ctl, &hashes[middle], sizeof *hashes, all, err));
        if (all_equal((const char *)all, sizeof *hashes, fsdp_ctl_size(ctl)))
            low = middle;
        else
            high = middle - 1;
    }
    *shared_out = low;
    return FSDP_OK;
}

typedef struct shown_entry {
    fsdp_hash hash;
    char name[SHOWN_NAME];
} shown_entry;

static void list_ranks(const shown_entry *shown, int n, char *text, size_t room)
{
    size_t used = 0;
    int listed = 0;
    for (int i = 1; i < n && used < room; i++) {
        if (memcmp(&shown[i].hash, &shown[0].hash, sizeof shown[i].hash) == 0)
            continue;
        if (listed++ == SHOWN_RANKS) {
            snprintf(text + used, room - used, ", ...");
            return;
        }
        used += (size_t)snprintf(text + used, room - used, "%s%d", listed > 1 ? ", " : "", i);
    }
}

static fsdp_status report_difference(const fsdp_sd *sd, const fsdp_hash *hashes, int64_t at,
                                     fsdp_ctl *ctl, shown_entry *all, fsdp_error *err)
{
    shown_entry mine = {{{0}}, "no further entry"};
    int n = fsdp_ctl_size(ctl), other = 1;
    if ((size_t)at < fsdp_sd_count(sd)) {
        const fsdp_entry *entry = fsdp_sd_at(sd, (size_t)at);
        mine.hash = hashes[at + 1];
        fsdp_printable(entry->name, entry->name_size, mine.name, sizeof mine.name);
    }
    FSDP_TRY(fsdp_ctl_allgather(ctl, &mine, sizeof mine, all, err));
    while (other < n - 1 && memcmp(&all[other].hash, &all[0].hash, sizeof all[0].hash) == 0)
        other++;
    char ranks[128] = "";
    list_ranks(all, n, ranks, sizeof ranks);
    if (memcmp(all[0].name, all[other].name, SHOWN_NAME) == 0)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "ranks declare different state: '%s' differs in dtype, shape, layout or "
                         "value between rank %s and rank 0",
                         all[0].name, ranks);
    return fsdp_fail(
        err, FSDP_ERR_USAGE,
        "ranks declare different state: entry %lld is '%s' on rank 0 and '%s' on rank %s",
        (long long)at, all[0].name, all[other].name, ranks);
}

static fsdp_status find_difference(const fsdp_sd *sd, bool with_values, int64_t least,
                                   fsdp_ctl *ctl, fsdp_error *err)
{
    size_t n = (size_t)fsdp_ctl_size(ctl);
    fsdp_hash last, *hashes = fsdp_alloc(fsdp_sd_count(sd) + 1, sizeof *hashes);
    void *all = fsdp_alloc(n, sizeof(shown_entry));
    fsdp_status st = hashes && all ? hash_entries(sd, with_values, hashes, &last, err)
                                   : fsdp_fail_memory(err, "a comparison of ranks");
    st = fsdp_ctl_agree(ctl, st, err);
    int64_t shared = 0;
    if (st == FSDP_OK)
        st = count_shared(hashes, least, ctl, all, &shared, err);
    if (st == FSDP_OK)
        st = report_difference(sd, hashes, shared, ctl, all, err);
    fsdp_free(all);
    fsdp_free(hashes);
    return st;
}

fsdp_status fsdp_describe_agree(const fsdp_sd *sd, bool with_values, fsdp_ctl *ctl,
                                fsdp_status mine, fsdp_error *err)
{
    summary local = {.count = mine == FSDP_OK ? (int64_t)fsdp_sd_count(sd) : 0};
    int n = fsdp_ctl_size(ctl);
    summary *all = fsdp_alloc((size_t)n, sizeof *all);
    if (mine == FSDP_OK)
        mine = all ? fsdp_describe_hash(sd, with_values, &local.hash, err)
                   : fsdp_fail_memory(err, "a comparison of ranks");
    fsdp_status st = fsdp_ctl_agree_allgather(ctl, mine, &local, sizeof local, all, err);
    if (st == FSDP_OK && !all_equal((const char *)all, sizeof *all, n)) {
        int64_t least = local.count;
        for (int i = 0; i < n; i++)
            least = all[i].count < least ? all[i].count : least;
        st = find_difference(sd, with_values, least, ctl, err);
    }
    fsdp_free(all);
    return st;
}

fsdp_status fsdp_check_memory(const fsdp_sd *sd, const fsdp_ctl *ctl, fsdp_error *err)
{
    char name[160];
    int rank = fsdp_ctl_rank(ctl), size = fsdp_ctl_size(ctl);
    for (size_t i = 0; i < fsdp_sd_count(sd); i++) {
        const fsdp_entry *entry = fsdp_sd_at(sd, i);
        if (entry->kind != FSDP_ENTRY_TENSOR)
            continue;
        fsdp_printable(entry->name, entry->name_size, name, sizeof name);
        if (fsdp_layout_world(&entry->layout) > size)
            return fsdp_fail(err, FSDP_ERR_USAGE,
                             "the layout of '%s' names rank %d, but there are %d ranks", name,
                             fsdp_layout_world(&entry->layout) - 1, size);
        if (!entry->data && fsdp_entry_local_bytes(entry, rank) > 0)
            return fsdp_fail(err, FSDP_ERR_USAGE,
                             "'%s' has no memory on rank %d, which owns a box of it", name, rank);
    }
    return FSDP_OK;
}
