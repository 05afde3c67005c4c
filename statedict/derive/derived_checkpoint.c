/* The checkpoint of derived tensors: see derived_checkpoint.h. */
#include "statedict/derive/derived_checkpoint.h"
#include "base/core/fnv.h"
#include "base/core/mem.h"
#include "base/data/name_path.h"
#include "base/data/name_table.h"
#include "statedict/checkpoint/checkpoint_internal.h"
#include "statedict/checkpoint/same_tensors.h"
#include "statedict/derive/derived.h"
#include "statedict/sd/layout_internal.h"

#include <string.h>

/* === ties ===================================================================================== */

/*
 * Tied names in a derivation: two names that lead through equal operations to one tensor of the base stay two
 * names of one tensor. Only tensors with several names in the base are compared.
 */

typedef struct fsdp_derived_ties {
    const fsdp_checkpoint *base;
    size_t *one;           /* per entry of the base: the first one of the same tensor */
    bool *is_tied;         /* ... true for a first one that is not the only one */
    fsdp_name_table table; /* from hashes of derived tensors to the first of each */
    int64_t left;          /* comparisons */
} fsdp_derived_ties;

/* The derived tensors so far, per entry, and the number of the next one. */
typedef struct fsdp_derived_made {
    const fsdp_derived *const *tensors;
    size_t count;
} fsdp_derived_made;

/* Comparisons of nodes in a derivation: hostile maps could ask for any number. */
enum { COMPARED_MOST = 1 << 24 };

/* --- which tensors have several names ---------------------------------------------------------- */

/* Release it also after a failure. */
static fsdp_status derived_ties_init(fsdp_derived_ties *ties, const fsdp_checkpoint *base,
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

static void derived_ties_release(fsdp_derived_ties *ties)
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

/* An earlier tensor that is the same one, by its operations on a tensor with several names; -1: none. */
static fsdp_status derived_ties_find(fsdp_derived_ties *ties, fsdp_arena *arena,
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

/* === the checkpoint =========================================================================== */

enum { BASES = 2, NOTED = 4 };

struct fsdp_derivation {
    fsdp_checkpoint *bases[BASES]; /* the base, and a second one */
    fsdp_arena arena;
    fsdp_sd *sd;
    fsdp_mesh *mesh;
    const fsdp_derived **tensors; /* per entry; NULL: not a tensor */
    size_t room;
    fsdp_derived_ties ties;
    const char *noted[NOTED]; /* files besides those of the bases */
    int noted_count;
};

typedef struct derived_checkpoint {
    fsdp_checkpoint base;
    fsdp_derivation *derivation;
} derived_checkpoint;

/* --- making it -------------------------------------------------------------------------------------- */

void fsdp_derivation_cancel(fsdp_derivation *derivation)
{
    if (!derivation)
        return;
    for (int i = BASES - 1; i >= 0; i--)
        fsdp_checkpoint_close(derivation->bases[i]);
    fsdp_mesh_free(derivation->mesh);
    fsdp_sd_free(derivation->sd);
    derived_ties_release(&derivation->ties);
    fsdp_free(derivation->tensors);
    fsdp_arena_release(&derivation->arena);
    fsdp_free(derivation);
}

fsdp_status fsdp_derivation_begin(fsdp_checkpoint *base, fsdp_derivation **derivation_out,
                                  fsdp_error *err)
{
    fsdp_derivation *derivation = fsdp_alloc(1, sizeof *derivation);
    if (!derivation) {
        fsdp_checkpoint_close(base);
        return fsdp_fail_memory(err, "derived tensors");
    }
    derivation->bases[0] = base;
    fsdp_status st = fsdp_sd_create(&derivation->sd, err);
    if (st == FSDP_OK)
        st = fsdp_mesh_create(1, (int64_t[]){1}, (const char *[]){"dp"}, NULL, &derivation->mesh,
                              err);
    if (st == FSDP_OK)
        st = derived_ties_init(&derivation->ties, base, err);
    if (st != FSDP_OK) {
        fsdp_derivation_cancel(derivation);
        return st;
    }
    *derivation_out = derivation;
    return FSDP_OK;
}

fsdp_checkpoint *fsdp_derivation_base(const fsdp_derivation *derivation)
{
    return derivation->bases[0];
}

const fsdp_sd *fsdp_derivation_sd(const fsdp_derivation *derivation)
{
    return derivation->sd;
}

fsdp_arena *fsdp_derivation_arena(fsdp_derivation *derivation)
{
    return &derivation->arena;
}

void fsdp_derivation_close_too(fsdp_derivation *derivation, fsdp_checkpoint *second)
{
    derivation->bases[1] = second;
}

fsdp_status fsdp_derivation_note_file(fsdp_derivation *derivation, const char *path,
                                      fsdp_error *err)
{
    if (!path)
        return FSDP_OK;
    const char *copy = derivation->noted_count < NOTED
                           ? fsdp_arena_strndup(&derivation->arena, path, strlen(path))
                           : NULL;
    if (!copy)
        return fsdp_fail_memory(err, "a list of files");
    derivation->noted[derivation->noted_count++] = copy;
    return FSDP_OK;
}

/* Keeps `tensors` as long as the state dict. A new name is not nested. */
static fsdp_status note(fsdp_derivation *derivation, const fsdp_derived *tensor, fsdp_error *err)
{
    size_t count = fsdp_sd_count(derivation->sd);
    const fsdp_entry *entry = fsdp_sd_at(derivation->sd, count - 1);
    const int32_t flat = (int32_t)entry->name_size;
    if (!fsdp_path_is_default(entry->name, entry->name_size, &flat, 1))
        FSDP_TRY(fsdp_sd_set_path(derivation->sd, count - 1, &flat, 1, err));
    if (!fsdp_grow(&derivation->tensors, &derivation->room, count, sizeof *derivation->tensors))
        return fsdp_fail_memory(err, "derived tensors");
    derivation->tensors[count - 1] = tensor;
    return FSDP_OK;
}

fsdp_status fsdp_derivation_add(fsdp_derivation *derivation, fsdp_derived_name name,
                                const fsdp_derived *tensor, fsdp_error *err)
{
    const fsdp_placement whole = {.kind = FSDP_REPLICATE};
    fsdp_tensor added = {.dtype = tensor->dtype,
                         .ndim = tensor->ndim,
                         .shape = tensor->shape,
                         .layout = {.mesh = derivation->mesh, .placement = {whole}}};
    FSDP_TRY(fsdp_sd_add_tensor(derivation->sd, name.text, name.size, &added, err));
    return note(derivation, tensor, err);
}

fsdp_status fsdp_derivation_add_value(fsdp_derivation *derivation, fsdp_derived_name name,
                                      const fsdp_value *value, fsdp_error *err)
{
    FSDP_TRY(fsdp_sd_add_value(derivation->sd, name.text, name.size, value, err));
    return note(derivation, NULL, err);
}

fsdp_status fsdp_derivation_add_alias(fsdp_derivation *derivation, fsdp_derived_name name,
                                      fsdp_derived_name target, fsdp_error *err)
{
    FSDP_TRY(
        fsdp_sd_add_alias(derivation->sd, name.text, name.size, target.text, target.size, err));
    return note(derivation, NULL, err);
}

fsdp_status fsdp_derivation_add_tied(fsdp_derivation *derivation, fsdp_derived_name name,
                                     const fsdp_derived *tensor, bool keeps_alias, fsdp_error *err)
{
    const fsdp_derived_made made = {derivation->tensors, fsdp_sd_count(derivation->sd)};
    int64_t found;
    FSDP_TRY(derived_ties_find(&derivation->ties, &derivation->arena, tensor, made, &found, err));
    if (found < 0)
        return fsdp_derivation_add(derivation, name, tensor, err);
    if (!keeps_alias)
        return FSDP_OK;
    const fsdp_entry *first = fsdp_sd_at(derivation->sd, (size_t)found);
    return fsdp_derivation_add_alias(derivation, name,
                                     (fsdp_derived_name){first->name, first->name_size}, err);
}

/* Nests the last entry as one of the base is nested, where their names are alike. */
static fsdp_status nest_like(fsdp_derivation *derivation, const fsdp_entry *like, fsdp_error *err)
{
    size_t last = fsdp_sd_count(derivation->sd) - 1;
    const fsdp_entry *entry = fsdp_sd_at(derivation->sd, last);
    int32_t defaults[FSDP_PATH_DEFAULT_MOST];
    fsdp_path old = {like->name, like->name_size, like->path, like->path_count};
    if (!old.elements) {
        old.count = fsdp_path_default(like->name, like->name_size, defaults);
        old.elements = defaults;
    }
    int32_t *path = fsdp_alloc(old.count + 1, sizeof *path);
    if (!path)
        return fsdp_fail_memory(err, "derived tensors");
    size_t count = fsdp_path_rename(&old, entry->name, entry->name_size, path);
    fsdp_status st = fsdp_sd_set_path(derivation->sd, last, path, count, err);
    fsdp_free(path);
    return st;
}

fsdp_status fsdp_derivation_replace(fsdp_derivation *derivation, size_t number,
                                    fsdp_derived_name name, const fsdp_derived *tensor,
                                    fsdp_error *err)
{
    FSDP_TRY(fsdp_derivation_add(derivation, name, tensor, err));
    return nest_like(derivation, fsdp_sd_at(derivation->bases[0]->manifest.sd, number), err);
}

fsdp_status fsdp_derivation_rename(fsdp_derivation *derivation, size_t number,
                                   fsdp_derived_name name, bool keeps_alias, fsdp_error *err)
{
    fsdp_checkpoint *base = derivation->bases[0];
    const fsdp_derived *stored = NULL;
    size_t before = fsdp_sd_count(derivation->sd);
    FSDP_TRY(fsdp_derive_stored(&derivation->arena, base, number, &stored, err));
    FSDP_TRY(fsdp_derivation_add_tied(derivation, name, stored, keeps_alias, err));
    return fsdp_sd_count(derivation->sd) == before
               ? FSDP_OK
               : nest_like(derivation, fsdp_sd_at(base->manifest.sd, number), err);
}

/* The name of a tensor that is not kept becomes its only one. */
static fsdp_status keep_alias(fsdp_derivation *derivation, size_t number, fsdp_error *err)
{
    fsdp_checkpoint *base = derivation->bases[0];
    const fsdp_entry *entry = fsdp_sd_at(base->manifest.sd, number);
    const fsdp_entry *target = fsdp_sd_at(base->manifest.sd, entry->target);
    const fsdp_derived_name name = {entry->name, entry->name_size};
    const fsdp_derived *stored = NULL;
    if (fsdp_sd_find(derivation->sd, target->name, target->name_size) >= 0)
        return fsdp_derivation_add_alias(derivation, name,
                                         (fsdp_derived_name){target->name, target->name_size}, err);
    FSDP_TRY(fsdp_derive_stored(&derivation->arena, base, number, &stored, err));
    return fsdp_derivation_add(derivation, name, stored, err);
}

fsdp_status fsdp_derivation_keep(fsdp_derivation *derivation, size_t number, fsdp_error *err)
{
    fsdp_checkpoint *base = derivation->bases[0];
    const fsdp_entry *entry = fsdp_sd_at(base->manifest.sd, number);
    const fsdp_derived_name name = {entry->name, entry->name_size};
    const fsdp_derived *stored = NULL;
    if (entry->kind == FSDP_ENTRY_TENSOR) {
        FSDP_TRY(fsdp_derive_stored(&derivation->arena, base, number, &stored, err));
        FSDP_TRY(fsdp_derivation_add(derivation, name, stored, err));
    } else if (entry->kind == FSDP_ENTRY_VALUE) {
        FSDP_TRY(fsdp_derivation_add_value(derivation, name, &entry->value, err));
    } else {
        FSDP_TRY(keep_alias(derivation, number, err));
    }
    return nest_like(derivation, entry, err);
}

fsdp_status fsdp_derivation_keep_as(fsdp_derivation *derivation, size_t number,
                                    fsdp_derived_name name, fsdp_error *err)
{
    const fsdp_entry *entry = fsdp_sd_at(derivation->bases[0]->manifest.sd, number);
    FSDP_TRY(fsdp_derivation_add_value(derivation, name, &entry->value, err));
    return nest_like(derivation, entry, err);
}

/* --- reading it ------------------------------------------------------------------------------------- */

static fsdp_derivation *derivation_of(const fsdp_checkpoint *checkpoint)
{
    return ((const derived_checkpoint *)checkpoint)->derivation;
}

static const fsdp_derived *derived_at(const fsdp_checkpoint *checkpoint, size_t entry)
{
    return derivation_of(checkpoint)->tensors[entry];
}

static fsdp_checkpoint *base_of(const fsdp_checkpoint *checkpoint)
{
    return derivation_of(checkpoint)->bases[0];
}

static fsdp_status get(fsdp_checkpoint *checkpoint, const fsdp_read_request *request,
                       fsdp_error *err)
{
    const fsdp_derived *tensor = derived_at(checkpoint, request->entry);
    fsdp_arena arena = {0};
    fsdp_status st = FSDP_OK;
    for (size_t i = 0; i < request->count && st == FSDP_OK; i++) {
        const fsdp_read_target *target = &request->targets[i];
        const fsdp_derived *cast = tensor;
        if (!fsdp_work_counter_take(request->counter))
            continue;
        st = fsdp_derive_cast(&arena, tensor, target->dtype, &cast, err);
        if (st == FSDP_OK)
            st = fsdp_derived_read(cast, request->reader, &target->box, target->data, err);
    }
    if (st != FSDP_OK) {
        const fsdp_entry *entry = fsdp_sd_at(checkpoint->manifest.sd, request->entry);
        char name[200];
        fsdp_error_prefix(err, "'%s'",
                          fsdp_printable(entry->name, entry->name_size, name, sizeof name));
    }
    fsdp_arena_release(&arena);
    return st;
}

static void close_derived(fsdp_checkpoint *checkpoint)
{
    derivation_of(checkpoint)->sd = NULL; /* the manifest's */
    fsdp_derivation_cancel(derivation_of(checkpoint));
}

static void file_at(const fsdp_checkpoint *checkpoint, int number, fsdp_checkpoint_file *file_out)
{
    fsdp_checkpoint_file_at(base_of(checkpoint), number, file_out);
}

/* Files of a second checkpoint have no number. */
typedef struct second_files {
    fsdp_file_visit visit;
    void *context;
} second_files;

static fsdp_status visit_second(void *context, int number, const char *path,
                                const fsdp_file_info *info, fsdp_error *err)
{
    const second_files *files = context;
    (void)number;
    return files->visit(files->context, -1, path, info, err);
}

static fsdp_status visit_noted(const fsdp_checkpoint *checkpoint, const char *path,
                               fsdp_file_visit visit, void *context, fsdp_error *err)
{
    fsdp_file_info info;
    int result = checkpoint->io->ops->info(checkpoint->io, path, &info);
    return result == 0 ? visit(context, -1, path, &info, err)
                       : fsdp_fail_errno(err, -result, "cannot stat '%s'", path);
}

static fsdp_status each_file(const fsdp_checkpoint *checkpoint, fsdp_file_visit visit,
                             void *context, fsdp_error *err)
{
    const fsdp_checkpoint *second = derivation_of(checkpoint)->bases[1];
    second_files files = {visit, context};
    FSDP_TRY(fsdp_checkpoint_each_file(base_of(checkpoint), visit, context, err));
    for (int i = 0; i < derivation_of(checkpoint)->noted_count; i++)
        FSDP_TRY(visit_noted(checkpoint, derivation_of(checkpoint)->noted[i], visit, context, err));
    return second ? fsdp_checkpoint_each_file(second, visit_second, &files, err) : FSDP_OK;
}

/* Calls visit for each stored tensor that the node reads. */
typedef fsdp_status (*stored_visit)(void *context, const fsdp_derived *stored, fsdp_error *err);

static fsdp_status each_stored(const fsdp_derived *tensor, stored_visit visit, void *context,
                               fsdp_error *err)
{
    if (tensor->checkpoint)
        return visit(context, tensor, err);
    for (size_t i = 0; i < tensor->part_count;
         i++) /* the depth is bounded by the levels and maps */
        FSDP_TRY(each_stored(tensor->parts[i], visit, context, err));
    return FSDP_OK;
}

typedef struct locate_call {
    const fsdp_checkpoint *base;
    fsdp_number_visit visit;
    void *context;
} locate_call;

static fsdp_status locate_stored(void *context, const fsdp_derived *stored, fsdp_error *err)
{
    const locate_call *call = context;
    fsdp_box whole = fsdp_box_whole(stored->ndim, stored->shape);
    return stored->checkpoint == call->base
               ? fsdp_checkpoint_locate(stored->checkpoint, stored->entry, &whole, call->visit,
                                        call->context, err)
               : FSDP_OK;
}

static fsdp_status locate(fsdp_checkpoint *checkpoint, size_t entry, const fsdp_box *box,
                          fsdp_number_visit visit, void *context, fsdp_error *err)
{
    locate_call call = {base_of(checkpoint), visit, context};
    (void)box; /* its elements may come from anywhere in the stored tensors */
    return each_stored(derived_at(checkpoint, entry), locate_stored, &call, err);
}

static fsdp_status require_stored(void *context, const fsdp_derived *stored, fsdp_error *err)
{
    (void)context;
    return fsdp_checkpoint_require(stored->checkpoint, stored->entry, err);
}

static fsdp_status require(fsdp_checkpoint *checkpoint, size_t entry, fsdp_error *err)
{
    return each_stored(derived_at(checkpoint, entry), require_stored, NULL, err);
}

static fsdp_status announce_stored(void *context, const fsdp_derived *stored, fsdp_error *err)
{
    return fsdp_checkpoint_announce(stored->checkpoint, stored->entry, *(bool *)context, err);
}

/* Only a stored tensor is sure to be read forwards. */
static fsdp_status announce(fsdp_checkpoint *checkpoint, size_t entry, bool repeated,
                            fsdp_error *err)
{
    const fsdp_derived *tensor = derived_at(checkpoint, entry);
    bool jumps = repeated || !tensor->checkpoint;
    return each_stored(tensor, announce_stored, &jumps, err);
}

static const char *missing_at(const fsdp_checkpoint *checkpoint, size_t number, size_t *size_out)
{
    return fsdp_checkpoint_missing_at(base_of(checkpoint), number, size_out);
}

static fsdp_status set_memory(fsdp_checkpoint *checkpoint, int64_t memory, const char *to,
                              fsdp_error *err)
{
    fsdp_checkpoint *second = derivation_of(checkpoint)->bases[1];
    FSDP_TRY(fsdp_checkpoint_set_memory(base_of(checkpoint), memory, to, err));
    return second ? fsdp_checkpoint_set_memory(second, memory, to, err) : FSDP_OK;
}

static fsdp_reading reading(const fsdp_checkpoint *checkpoint)
{
    fsdp_reading reading = fsdp_checkpoint_reading(base_of(checkpoint));
    int levels = 0;
    for (size_t i = 0; i < fsdp_sd_count(checkpoint->manifest.sd); i++)
        if (derived_at(checkpoint, i) && derived_at(checkpoint, i)->levels > levels)
            levels = derived_at(checkpoint, i)->levels;
    reading.per_thread += (int64_t)levels * FSDP_DERIVED_PIECE;
    return reading;
}

/* Only stored tensors have a place to compare. */
static bool compare_places(const fsdp_checkpoint *checkpoint, size_t first, size_t second,
                           int *order_out)
{
    const fsdp_derived *a = derived_at(checkpoint, first), *b = derived_at(checkpoint, second);
    const fsdp_checkpoint *from = a ? a->checkpoint : NULL, *other = b ? b->checkpoint : NULL;
    if (!from || !other || !fsdp_checkpoint_compare_places(from, a->entry, a->entry, order_out) ||
        !fsdp_checkpoint_compare_places(other, b->entry, b->entry, order_out))
        return false;
    if (from == other)
        return fsdp_checkpoint_compare_places(from, a->entry, b->entry, order_out);
    *order_out = from == base_of(checkpoint) ? -1 : 1;
    return true;
}

static const fsdp_checkpoint_ops derived_ops = {.close = close_derived,
                                                .get = get,
                                                .file_at = file_at,
                                                .each_file = each_file,
                                                .locate = locate,
                                                .missing_at = missing_at,
                                                .require = require,
                                                .announce = announce,
                                                .set_memory = set_memory,
                                                .reading = reading,
                                                .compare_places = compare_places};

/* --- finishing -------------------------------------------------------------------------------------- */

static fsdp_status mark_stored(void *context, const fsdp_derived *stored, fsdp_error *err)
{
    const fsdp_checkpoint *from = stored->checkpoint;
    (void)err;
    *(bool *)context = *(bool *)context || (from->is_missing && from->is_missing[stored->entry]);
    return FSDP_OK;
}

/* A tensor is missing when one that it is made of is. */
static fsdp_status mark_missing(fsdp_checkpoint *checkpoint, fsdp_error *err)
{
    const fsdp_checkpoint *base = base_of(checkpoint);
    size_t count = base->missing_count;
    for (size_t i = 0; count > 0 && i < fsdp_sd_count(checkpoint->manifest.sd); i++) {
        bool is_missing = false;
        if (derived_at(checkpoint, i))
            FSDP_TRY(each_stored(derived_at(checkpoint, i), mark_stored, &is_missing, err));
        if (is_missing)
            FSDP_TRY(fsdp_incomplete_mark(checkpoint, i, err));
    }
    checkpoint->missing_count = count;
    return FSDP_OK;
}

/* The checkpoint is the base in all but its tensors. */
static fsdp_status take_after(fsdp_checkpoint *checkpoint, const fsdp_checkpoint *base,
                              fsdp_error *err)
{
    const char *metadata = base->manifest.metadata;
    checkpoint->io = base->io;
    checkpoint->is_one_file = base->is_one_file;
    checkpoint->source = base->source;
    checkpoint->manifest.step = base->manifest.step;
    checkpoint->manifest.kind = FSDP_FULL;
    memcpy(checkpoint->manifest.run, base->manifest.run, sizeof base->manifest.run);
    checkpoint->manifest.world = base->manifest.world;
    checkpoint->info = base->info;
    checkpoint->info.path = checkpoint->path;
    checkpoint->info.tensor_bytes = fsdp_sd_tensor_bytes(checkpoint->manifest.sd);
    checkpoint->manifest.metadata = metadata ? fsdp_strndup(metadata, strlen(metadata)) : NULL;
    return metadata && !checkpoint->manifest.metadata ? fsdp_fail_memory(err, "metadata") : FSDP_OK;
}

fsdp_status fsdp_derivation_finish(fsdp_derivation *derivation, fsdp_checkpoint **checkpoint_out,
                                   fsdp_error *err)
{
    const fsdp_checkpoint *base = derivation->bases[0];
    derived_checkpoint *derived = fsdp_alloc(1, sizeof *derived);
    char *path = fsdp_strndup(base->path, strlen(base->path));
    if (!derived || !path) {
        fsdp_free(derived);
        fsdp_free(path);
        fsdp_derivation_cancel(derivation);
        return fsdp_fail_memory(err, "a checkpoint");
    }
    derived->derivation = derivation;
    fsdp_checkpoint *checkpoint = &derived->base;
    checkpoint->ops = &derived_ops;
    checkpoint->is_derived = true;
    checkpoint->manifest.sd = derivation->sd;
    checkpoint->path = path;
    fsdp_status st = take_after(checkpoint, base, err);
    if (st == FSDP_OK)
        st = mark_missing(checkpoint, err);
    if (st != FSDP_OK) {
        fsdp_checkpoint_close(checkpoint);
        return st;
    }
    *checkpoint_out = checkpoint;
    return FSDP_OK;
}
