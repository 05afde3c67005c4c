/* Plans: see box_plan.h. This file does no I/O and no communication. */
#include "statedict/transfer/box_plan.h"

#include "statedict/manifest/large_value.h"
#include "statedict/sd/layout_internal.h"

#include "base/data/box_internal.h"
#include "base/data/flow.h"

#include <stdlib.h>
#include <string.h>

#include "base/core/given.h"

/* --- owners ----------------------------------------------------------------------------------- */

typedef struct copy_load {
    int64_t bytes;
    int64_t copy;
} copy_load;

/* Tensors with the same mesh and replicate dims, whose bytes are balanced together. */
typedef struct replica_group {
    const fsdp_mesh *mesh;
    unsigned dims; /* bit i: replicated over mesh dim i */
    int64_t copies;
    copy_load *heap; /* on top: the copy with the fewest bytes, among equals the lowest */
} replica_group;

typedef struct owner_item {
    size_t entry;
    int64_t bytes;
} owner_item;

static unsigned replicate_dims(const fsdp_layout *layout)
{
    unsigned dims = 0;
    for (int i = 0; i < fsdp_mesh_ndim(layout->mesh); i++)
        if (layout->placement[i].kind == FSDP_REPLICATE)
            dims |= 1u << i;
    return dims;
}

static int64_t copies_of(const fsdp_mesh *mesh, unsigned dims)
{
    int64_t copies = 1;
    for (int i = 0; i < fsdp_mesh_ndim(mesh); i++)
        copies *= dims >> i & 1 ? fsdp_mesh_dim_size(mesh, i) : 1;
    return copies;
}

static replica_group *find_group(fsdp_arena *arena, replica_group **groups, size_t *count,
                                 size_t *capacity, const fsdp_layout *layout)
{
    unsigned dims = replicate_dims(layout);
    for (size_t i = 0; i < *count; i++)
        if ((*groups)[i].mesh == layout->mesh && (*groups)[i].dims == dims)
            return &(*groups)[i];
    if (!fsdp_grow(groups, capacity, *count + 1, sizeof **groups))
        return NULL;
    int64_t copies = copies_of(layout->mesh, dims);
    copy_load *heap = fsdp_arena_alloc(arena, (size_t)copies, sizeof *heap);
    if (!heap)
        return NULL;
    for (int64_t i = 0; i < copies; i++)
        heap[i].copy = i;
    (*groups)[*count] = (replica_group){layout->mesh, dims, copies, heap};
    return &(*groups)[(*count)++];
}

static int compare_items(const void *a, const void *b)
{
    const owner_item *x = a, *y = b;
    if (x->bytes != y->bytes)
        return x->bytes > y->bytes ? -1 : 1;
    return x->entry < y->entry ? -1 : x->entry > y->entry;
}

static size_t list_replicated(const fsdp_sd *sd, owner_item *items)
{
    size_t count = 0;
    for (size_t i = 0; i < fsdp_sd_count(sd); i++) {
        const fsdp_entry *entry = fsdp_sd_at(sd, i);
        if (entry->kind == FSDP_ENTRY_TENSOR && entry->layout.kind == FSDP_LAYOUT_MESH &&
            replicate_dims(&entry->layout) != 0)
            items[count++] = (owner_item){i, fsdp_entry_bytes(entry)};
    }
    qsort(items, count, sizeof *items, compare_items);
    return count;
}

static bool is_less(const copy_load *a, const copy_load *b)
{
    return a->bytes != b->bytes ? a->bytes < b->bytes : a->copy < b->copy;
}

/* Adds bytes to the copy with the fewest so far, and returns its number. */
static int charge_least(replica_group *group, int64_t bytes)
{
    copy_load *heap = group->heap, charged = heap[0];
    int64_t at = 0;
    charged.bytes += bytes;
    for (int64_t child; (child = 2 * at + 1) < group->copies; at = child) {
        if (child + 1 < group->copies && is_less(&heap[child + 1], &heap[child]))
            child++;
        if (!is_less(&heap[child], &charged))
            break;
        heap[at] = heap[child];
    }
    heap[at] = charged;
    return (int)charged.copy;
}

static fsdp_status balance_owners(const fsdp_sd *sd, owner_item *items, int *owners,
                                  fsdp_error *err)
{
    fsdp_arena arena = {0};
    replica_group *groups = NULL;
    size_t group_count = 0, capacity = 0;
    fsdp_status st = FSDP_OK;
    size_t count = list_replicated(sd, items);
    for (size_t i = 0; i < count; i++) {
        const fsdp_entry *entry = fsdp_sd_at(sd, items[i].entry);
        replica_group *group = find_group(&arena, &groups, &group_count, &capacity, &entry->layout);
        if (!group) {
            st = fsdp_fail_memory(err, "a save plan");
            break;
        }
        owners[items[i].entry] = charge_least(group, items[i].bytes);
    }
    fsdp_free(groups);
    fsdp_arena_release(&arena);
    return st;
}

fsdp_status fsdp_box_plan_owners(const fsdp_sd *sd, fsdp_owner_policy policy, int *owners_out,
                                 fsdp_error *err)
{
    memset(owners_out, 0, fsdp_sd_count(sd) * sizeof *owners_out);
    if (policy == FSDP_OWNERS_LOWEST)
        return FSDP_OK;
    owner_item *items = fsdp_alloc(fsdp_sd_count(sd), sizeof *items);
    if (!items)
        return fsdp_fail_memory(err, "a save plan");
    fsdp_status st = balance_owners(sd, items, owners_out, err);
    fsdp_free(items);
    return st;
}

/* True when the rank stores its box `part` of a tensor. In a local checkpoint every rank does. */
static bool stores(const fsdp_box_plan_input *input, size_t tensor, size_t part)
{
    if (input->kind == FSDP_LOCAL)
        return true;
    const fsdp_layout *layout = &fsdp_sd_at(input->sd, tensor)->layout;
    return fsdp_layout_copy(layout, input->rank, part) == input->owners[tensor];
}

/* --- saving ----------------------------------------------------------------------------------- */

/* The plan has room: make_room allocated for all entries. */
static void add_dataset(fsdp_save_plan *plan, const fsdp_entry *entry, size_t part, int ndim,
                        const int64_t *shape)
{
    plan->datasets[plan->dataset_count++] = (fsdp_shard_dataset){.name = entry->name,
                                                                 .name_size = entry->name_size,
                                                                 .part = (unsigned)part,
                                                                 .dtype = entry->dtype,
                                                                 .ndim = ndim,
                                                                 .shape = shape,
                                                                 .offset = -1};
}

static const int64_t *keep_dims(fsdp_save_plan *plan, int ndim, const int64_t *numbers)
{
    int64_t *kept = plan->dims + plan->dim_count;
    memcpy(kept, numbers, (size_t)ndim * sizeof *kept);
    plan->dim_count += (size_t)ndim;
    return kept;
}

static fsdp_shard_box *add_box(fsdp_save_plan *plan, const fsdp_entry *entry, size_t tensor,
                               size_t part, const fsdp_box *box, const char *data)
{
    plan->data[plan->box_count] = data;
    plan->bytes += fsdp_box_count(box) * (int64_t)fsdp_dtype_size(entry->dtype);
    fsdp_shard_box *stored = &plan->boxes[plan->box_count++];
    stored->name = entry->name;
    stored->name_size = entry->name_size;
    stored->tensor = (uint32_t)tensor;
    stored->part = (uint32_t)part;
    stored->ndim = box->ndim;
    stored->lo = keep_dims(plan, box->ndim, box->lo);
    stored->len = keep_dims(plan, box->ndim, box->len);
    return stored;
}

/* True when a box is one run of its row-major tensor: whole trailing dims, single leading indexes. */
static bool is_one_run(const fsdp_box *box, const int64_t *shape)
{
    int d = box->ndim - 1;
    while (d > 0 && box->len[d] == shape[d])
        d--;
    for (d--; d >= 0; d--)
        if (box->len[d] != 1)
            return false;
    return true;
}

/* Flat buffers are stored as such: their chunk is one dataset. */
static bool keeps_flats(const fsdp_box_plan_input *input)
{
    return input->kind == FSDP_LOCAL && !input->encode;
}

/*
 * A box lies in the dataset of the flat chunk that holds it, in that of the whole tensor (full), or
 * alone in one.
 */
static void plan_tensor(const fsdp_box_plan_input *input, size_t tensor, const size_t *dataset_of,
                        fsdp_save_plan *plan)
{
    const fsdp_entry *entry = fsdp_sd_at(input->sd, tensor);
    size_t element_size = fsdp_dtype_size(entry->dtype);
    size_t parts = fsdp_layout_box_count(&entry->layout, entry->ndim, entry->shape, input->rank);
    const char *data = entry->data;
    bool in_flat = keeps_flats(input) && entry->flat >= 0;
    fsdp_box box = fsdp_box_whole(entry->ndim, entry->shape);
    int64_t flat_first =
        in_flat ? fsdp_layout_flat_start(&entry->layout, fsdp_box_count(&box), input->rank) : 0;
    for (size_t part = 0; part < parts; part++) {
        fsdp_layout_box_at(&entry->layout, entry->ndim, entry->shape, input->rank, part, &box);
        int64_t count = fsdp_box_count(&box);
        if (stores(input, tensor, part)) {
            fsdp_flow_box("statedict/transfer/box_plan.c", "store", entry->name, entry->name_size,
                          &box);
            fsdp_shard_box *stored = add_box(plan, entry, tensor, part, &box, data);
            stored->packed = true;
            if (in_flat) {
                stored->dataset = (uint32_t)entry->flat;
                stored->first = flat_first;
            } else if (dataset_of) {
                stored->dataset = (uint32_t)dataset_of[tensor];
                stored->packed = is_one_run(&box, entry->shape);
                stored->first = fsdp_box_position(entry->ndim, entry->shape, box.lo);
            } else {
                stored->dataset = (uint32_t)plan->dataset_count;
                add_dataset(plan, entry, part, stored->ndim, stored->len);
            }
        }
        flat_first += count;
        data = data ? data + (size_t)count * element_size : NULL;
    }
}

/* A value too large for the manifest is a u8 dataset that rank 0 stores. */
static fsdp_status plan_value(const fsdp_box_plan_input *input, size_t number, fsdp_save_plan *plan,
                              fsdp_error *err)
{
    const fsdp_entry *entry = fsdp_sd_at(input->sd, number);
    int rank = input->rank;
    if (!fsdp_value_is_large(&entry->value) || (rank != 0 && input->kind != FSDP_FULL))
        return FSDP_OK;
    fsdp_text bytes = {0};
    fsdp_status st = fsdp_value_pack(&entry->value, &bytes, err);
    int64_t *shape = fsdp_arena_alloc(&plan->arena, 1, sizeof *shape);
    char *data = st == FSDP_OK && rank == 0
                     ? fsdp_arena_strndup(&plan->arena, bytes.data, bytes.size)
                     : NULL;
    if (st == FSDP_OK && (!shape || (rank == 0 && !data)))
        st = fsdp_fail_memory(err, "a value");
    if (st == FSDP_OK) {
        fsdp_entry stored = *entry; /* the value as a tensor */
        *shape = (int64_t)bytes.size;
        stored.dtype = FSDP_U8;
        fsdp_box box = fsdp_box_whole(1, shape);
        add_dataset(plan, &stored, 0, 1, shape);
        if (rank == 0) {
            fsdp_shard_box *held = add_box(plan, &stored, number, 0, &box, data);
            held->dataset = (uint32_t)plan->dataset_count - 1;
            held->packed = true;
        }
    }
    fsdp_text_release(&bytes);
    return st;
}

typedef struct plan_size {
    size_t boxes, dims, datasets, links;
} plan_size;

/* An upper bound: counts also the boxes that another copy stores. */
static plan_size measure_plan(const fsdp_sd *sd, fsdp_kind kind, int rank)
{
    plan_size size = {.datasets = fsdp_sd_flat_count(sd)};
    for (size_t i = 0; i < fsdp_sd_count(sd); i++) {
        const fsdp_entry *entry = fsdp_sd_at(sd, i);
        size_t boxes = entry->kind == FSDP_ENTRY_VALUE && fsdp_value_is_large(&entry->value);
        size_t ndim = 1;
        if (entry->kind == FSDP_ENTRY_TENSOR) {
            boxes = fsdp_layout_box_count(&entry->layout, entry->ndim, entry->shape, rank);
            ndim = (size_t)entry->ndim;
        }
        size.boxes += boxes;
        size.dims += 2 * boxes * ndim;
        size.datasets += kind == FSDP_FULL ? entry->kind != FSDP_ENTRY_ALIAS : boxes;
        size.links += kind == FSDP_FULL && entry->kind == FSDP_ENTRY_ALIAS;
    }
    return size;
}

int64_t fsdp_save_plan_room(const fsdp_sd *sd, fsdp_kind kind, int rank)
{
    plan_size size = measure_plan(sd, kind, rank);
    return (int64_t)(size.boxes * (sizeof(fsdp_shard_box) + sizeof(void *)) +
                     size.dims * sizeof(int64_t) + size.datasets * sizeof(fsdp_shard_dataset) +
                     size.links * sizeof(fsdp_shard_link)) +
           fsdp_shard_writer_room(size.boxes);
}

static fsdp_status make_room(const fsdp_box_plan_input *input, fsdp_save_plan *plan,
                             fsdp_error *err)
{
    plan_size size = measure_plan(input->sd, input->kind, input->rank);
    plan->boxes = fsdp_alloc(size.boxes, sizeof *plan->boxes);
    plan->dims = fsdp_alloc(size.dims, sizeof *plan->dims);
    plan->data = fsdp_alloc(size.boxes, sizeof *plan->data);
    plan->datasets = fsdp_alloc(size.datasets, sizeof *plan->datasets);
    plan->links = fsdp_alloc(size.links, sizeof *plan->links);
    if (!plan->boxes || !plan->dims || !plan->data || !plan->datasets || !plan->links)
        return fsdp_fail_memory(err, "a save plan");
    return FSDP_OK;
}

/* Local: this rank's chunk of every flat buffer is one 1-d dataset; flat k is dataset k. */
static fsdp_status plan_flats(const fsdp_sd *sd, int rank, fsdp_save_plan *plan, fsdp_error *err)
{
    for (size_t i = 0; i < fsdp_sd_flat_count(sd); i++) {
        const fsdp_flat *flat = fsdp_sd_flat_at(sd, i);
        int64_t *count = fsdp_arena_alloc(&plan->arena, 1, sizeof *count);
        if (!count)
            return fsdp_fail_memory(err, "a save plan");
        bool member = fsdp_mesh_position(flat->mesh, rank) >= 0;
        *count = member ? flat->count / fsdp_mesh_size(flat->mesh) : 0;
        plan->datasets[plan->dataset_count++] = (fsdp_shard_dataset){.name = flat->name,
                                                                     .name_size = flat->name_size,
                                                                     .dtype = flat->dtype,
                                                                     .ndim = 1,
                                                                     .shape = count,
                                                                     .offset = -1};
    }
    return FSDP_OK;
}

/* Full: alias entries become second links of their target's dataset. */
static void plan_links(const fsdp_sd *sd, const size_t *dataset_of, fsdp_save_plan *plan)
{
    for (size_t i = 0; i < fsdp_sd_count(sd); i++) {
        const fsdp_entry *entry = fsdp_sd_at(sd, i);
        if (entry->kind == FSDP_ENTRY_ALIAS)
            plan->links[plan->link_count++] =
                (fsdp_shard_link){entry->name, entry->name_size, dataset_of[entry->target]};
    }
}

static fsdp_status plan_full_datasets(const fsdp_sd *sd, fsdp_save_plan *plan,
                                      size_t **dataset_of_out, fsdp_error *err)
{
    size_t *dataset_of = fsdp_arena_alloc(&plan->arena, fsdp_sd_count(sd), sizeof *dataset_of);
    if (!dataset_of)
        return fsdp_fail_memory(err, "a save plan");
    for (size_t i = 0; i < fsdp_sd_count(sd); i++) {
        const fsdp_entry *entry = fsdp_sd_at(sd, i);
        if (entry->kind != FSDP_ENTRY_TENSOR)
            continue;
        dataset_of[i] = plan->dataset_count;
        add_dataset(plan, entry, 0, entry->ndim, entry->shape);
    }
    plan_links(sd, dataset_of, plan);
    *dataset_of_out = dataset_of;
    return FSDP_OK;
}

static fsdp_status plan_save(const fsdp_box_plan_input *input, fsdp_save_plan *plan,
                             fsdp_error *err)
{
    const fsdp_sd *sd = input->sd;
    size_t *dataset_of = NULL;
    FSDP_TRY(make_room(input, plan, err));
    if (keeps_flats(input))
        FSDP_TRY(plan_flats(sd, input->rank, plan, err));
    if (input->kind == FSDP_FULL)
        FSDP_TRY(plan_full_datasets(sd, plan, &dataset_of, err));
    for (size_t i = 0; i < fsdp_sd_count(sd); i++) {
        fsdp_entry_kind kind = fsdp_sd_at(sd, i)->kind;
        if (kind == FSDP_ENTRY_TENSOR)
            plan_tensor(input, i, dataset_of, plan);
        else if (kind == FSDP_ENTRY_VALUE)
            FSDP_TRY(plan_value(input, i, plan, err));
    }
    return FSDP_OK;
}

fsdp_status fsdp_box_plan_save(const fsdp_box_plan_input *input, fsdp_save_plan *plan_out,
                               fsdp_error *err)
{
    fsdp_save_plan plan = {0};
    fsdp_status st = plan_save(input, &plan, err);
    if (st != FSDP_OK)
        fsdp_save_plan_release(&plan);
    *plan_out = plan;
    return st;
}

fsdp_status fsdp_save_plan_bytes(const fsdp_sd *sd, fsdp_kind kind, fsdp_owner_policy owners,
                                 int rank, int64_t *bytes_out, fsdp_error *err)
{
    FSDP_NEED(err, sd, bytes_out);
    fsdp_save_plan plan = {0};
    int *chosen = fsdp_alloc(fsdp_sd_count(sd), sizeof *chosen);
    fsdp_box_plan_input input = {.sd = sd, .kind = kind, .owners = chosen, .rank = rank};
    if (!chosen)
        return fsdp_fail_memory(err, "a save plan");
    fsdp_status st = fsdp_box_plan_owners(sd, owners, chosen, err);
    if (st == FSDP_OK)
        st = fsdp_box_plan_save(&input, &plan, err);
    *bytes_out = plan.bytes;
    fsdp_save_plan_release(&plan);
    fsdp_free(chosen);
    return st;
}

size_t fsdp_save_plan_find(const fsdp_save_plan *plan, size_t tensor, size_t part)
{
    size_t low = 0, high = plan->box_count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        const fsdp_shard_box *box = &plan->boxes[middle];
        if (box->tensor < tensor || (box->tensor == tensor && box->part < part))
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

void fsdp_save_plan_release(fsdp_save_plan *plan)
{
    fsdp_free(plan->datasets);
    fsdp_free(plan->links);
    fsdp_free(plan->boxes);
    fsdp_free(plan->dims);
    fsdp_free(plan->data);
    fsdp_arena_release(&plan->arena);
    *plan = (fsdp_save_plan){0};
}

/* --- loading ---------------------------------------------------------------------------------- */

typedef struct stored_search {
    const fsdp_entry *entry;
    int owner;
    const fsdp_box *wanted;
    fsdp_stored_visit visit;
    void *context;
    int cuts[FSDP_MAX_MESH_DIMS], cut_count; /* mesh dims in the order in which they cut */
    int64_t coord[FSDP_MAX_MESH_DIMS];
} stored_search;

/* The owner's coordinates on the replicate dims, which are the same for all its boxes. */
static void place_owner(stored_search *search)
{
    const fsdp_layout *layout = &search->entry->layout;
    int64_t copy = search->owner;
    for (int i = fsdp_mesh_ndim(layout->mesh) - 1; i >= 0; i--) {
        if (layout->placement[i].kind != FSDP_REPLICATE)
            continue;
        search->coord[i] = copy % fsdp_mesh_dim_size(layout->mesh, i);
        copy /= fsdp_mesh_dim_size(layout->mesh, i);
    }
}

static void order_cuts(stored_search *search)
{
    const fsdp_layout *layout = &search->entry->layout;
    int ndim = fsdp_mesh_ndim(layout->mesh);
    for (int i = 0; i < ndim; i++)
        if (layout->placement[i].kind == FSDP_SHARD)
            search->cuts[search->cut_count++] = i;
    for (int i = ndim - 1; i >= 0; i--)
        if (layout->placement[i].kind == FSDP_STRIDED_SHARD)
            search->cuts[search->cut_count++] = i;
}

static int rank_at(const fsdp_mesh *mesh, const int64_t *coord)
{
    int64_t position = 0;
    for (int i = 0; i < fsdp_mesh_ndim(mesh); i++)
        position = position * fsdp_mesh_dim_size(mesh, i) + coord[i];
    return fsdp_mesh_rank_at(mesh, position);
}

static fsdp_status visit_hit(const stored_search *search, int rank, size_t part,
                             const fsdp_box *box, fsdp_error *err)
{
    const fsdp_entry *entry = search->entry;
    fsdp_flow_box("statedict/transfer/box_plan.c", "find", entry->name, entry->name_size, box);
    return search->visit(search->context, rank, part, box, err);
}

/* Follows only the chunks that overlap the wanted box, so the cost is the number of hits. */
static fsdp_status search_mesh(stored_search *search, int depth, const fsdp_box *box,
                               fsdp_error *err)
{
    const fsdp_layout *layout = &search->entry->layout;
    if (depth == search->cut_count)
        return visit_hit(search, rank_at(layout->mesh, search->coord), 0, box, err);
    int mesh_dim = search->cuts[depth], dim = layout->placement[mesh_dim].dim;
    int64_t parts = fsdp_mesh_dim_size(layout->mesh, mesh_dim);
    int64_t rows = (box->len[dim] + parts - 1) / parts;
    int64_t lo = search->wanted->lo[dim] - box->lo[dim];
    int64_t end = lo + search->wanted->len[dim];
    if (lo < 0)
        lo = 0;
    if (end > box->len[dim])
        end = box->len[dim];
    if (lo >= end)
        return FSDP_OK;
    for (int64_t part = lo / rows; part <= (end - 1) / rows; part++) {
        fsdp_box inner = *box;
        int64_t first, count;
        fsdp_chunk(box->len[dim], parts, part, &first, &count);
        inner.lo[dim] += first;
        inner.len[dim] = count;
        search->coord[mesh_dim] = part;
        FSDP_TRY(search_mesh(search, depth + 1, &inner, err));
    }
    return FSDP_OK;
}

static fsdp_status search_boxes(stored_search *search, fsdp_error *err)
{
    const fsdp_layout *layout = &search->entry->layout;
    size_t part = 0;
    fsdp_box shared;
    for (size_t i = 0; i < layout->box_count; i++) {
        const fsdp_rank_box *held = &layout->boxes[i];
        part = i > 0 && layout->boxes[i - 1].rank == held->rank ? part + 1 : 0;
        if (fsdp_box_intersect(&held->box, search->wanted, &shared) &&
            fsdp_layout_copy(layout, held->rank, part) == search->owner)
            FSDP_TRY(visit_hit(search, held->rank, part, &held->box, err));
    }
    return FSDP_OK;
}

static fsdp_status search_flat(stored_search *search, fsdp_error *err)
{
    const fsdp_entry *entry = search->entry;
    const fsdp_layout *layout = &entry->layout;
    int64_t chunk = layout->flat_count / fsdp_mesh_size(layout->mesh);
    int64_t last[FSDP_MAX_DIMS];
    for (int d = 0; d < entry->ndim; d++)
        last[d] = search->wanted->lo[d] + search->wanted->len[d] - 1;
    int64_t from =
        layout->flat_offset + fsdp_box_position(entry->ndim, entry->shape, search->wanted->lo);
    int64_t to = layout->flat_offset + fsdp_box_position(entry->ndim, entry->shape, last);
    for (int64_t position = from / chunk; position <= to / chunk; position++) {
        int rank = fsdp_mesh_rank_at(layout->mesh, position);
        size_t parts = fsdp_layout_box_count(layout, entry->ndim, entry->shape, rank);
        for (size_t part = 0; part < parts; part++) {
            fsdp_box box, shared;
            fsdp_layout_box_at(layout, entry->ndim, entry->shape, rank, part, &box);
            if (fsdp_box_intersect(&box, search->wanted, &shared))
                FSDP_TRY(visit_hit(search, rank, part, &box, err));
        }
    }
    return FSDP_OK;
}

fsdp_status fsdp_box_plan_stored(const fsdp_entry *entry, int owner, const fsdp_box *wanted,
                                 fsdp_stored_visit visit, void *context, fsdp_error *err)
{
    if (fsdp_box_count(wanted) == 0)
        return FSDP_OK;
    stored_search search = {
        .entry = entry, .owner = owner, .wanted = wanted, .visit = visit, .context = context};
    if (entry->layout.kind == FSDP_LAYOUT_BOXES)
        return search_boxes(&search, err);
    if (entry->layout.kind == FSDP_LAYOUT_FLAT)
        return search_flat(&search, err);
    place_owner(&search);
    order_cuts(&search);
    fsdp_box whole = fsdp_box_whole(entry->ndim, entry->shape);
    return search_mesh(&search, 0, &whole, err);
}

/* --- slabs ------------------------------------------------------------------------------------ */

bool fsdp_slabs_next(fsdp_slabs *slabs, int ndim, const int64_t *shape, int64_t max_elements,
                     fsdp_box *slab_out)
{
    fsdp_box whole = fsdp_box_whole(ndim, shape);
    if (slabs->next >= fsdp_box_count(&whole))
        return false;
    int64_t inner = 1, left = slabs->next;
    int dim = ndim - 1;
    /* Whole trailing dims while they fit; then rows of one dim; single indexes before it. */
    while (dim > 0 && inner <= max_elements / shape[dim]) {
        inner *= shape[dim];
        dim--;
    }
    *slab_out = whole;
    if (ndim == 0) {
        slabs->next = 1;
        return true;
    }
    int64_t rows = max_elements / inner > 0 ? max_elements / inner : 1;
    left /= inner;
    slab_out->lo[dim] = left % shape[dim];
    slab_out->len[dim] =
        shape[dim] - slab_out->lo[dim] < rows ? shape[dim] - slab_out->lo[dim] : rows;
    left /= shape[dim];
    for (int d = dim - 1; d >= 0; d--) {
        slab_out->lo[d] = left % shape[d];
        slab_out->len[d] = 1;
        left /= shape[d];
    }
    slabs->next += slab_out->len[dim] * inner;
    return true;
}
