/* Tied weights: see ties.h. */
#include "statedict/convert/ties.h"

#include "base/text.h"

#include "statedict/checkpoint/same_tensors.h"
#include "statedict/convert/convert_job.h"
#include "statedict/derive/tied_names.h"

#include <string.h>

enum { PAIRS_MOST = 16, COMPARED_BYTES = 1 << 20 };

/* --- names ------------------------------------------------------------------------------------ */

/* True when `end` is the name or its last elements. */
static bool ends_in(const char *name, size_t size, const char *end)
{
    size_t n = strlen(end);
    return fsdp_bytes_end(name, size, end) && (size == n || name[size - n - 1] == '.');
}

static bool ends_in_one(const char *name, size_t size, const char *const *ends)
{
    for (; *ends; ends++)
        if (ends_in(name, size, *ends))
            return true;
    return false;
}

bool fsdp_name_is_vocabulary(const char *name, size_t size)
{
    static const char *const ends[] = {"embed_tokens.weight",
                                       "wte.weight",
                                       "word_embeddings.weight",
                                       "tok_embeddings.weight",
                                       "embed_in.weight",
                                       "shared.weight",
                                       NULL};
    return ends_in_one(name, size, ends);
}

bool fsdp_name_is_embedding(const char *name, size_t size)
{
    static const char *const ends[] = {"embedding.weight", "embeddings.weight", "embed.weight",
                                       NULL};
    return fsdp_name_is_vocabulary(name, size) || ends_in_one(name, size, ends);
}

/* Only names at the top or in one module: deeper ones are outputs of layers. */
bool fsdp_name_is_head(const char *name, size_t size)
{
    static const char *const ends[] = {"lm_head.weight", "predictions.decoder.weight", NULL};
    static const char *const tops[] = {"output.weight", "embed_out.weight", NULL};
    size_t dots = 0;
    for (size_t i = 0; i < size; i++)
        dots += name[i] == '.';
    return ends_in_one(name, size, ends) || (dots <= 2 && ends_in_one(name, size, tops));
}

/* Smaller is better: embeddings, others, heads; then in the order of bytes. */
static int preference(const fsdp_selected *selected)
{
    return fsdp_name_is_embedding(selected->name, selected->name_size) ? 0
           : fsdp_name_is_head(selected->name, selected->name_size)    ? 2
                                                                       : 1;
}

static bool is_better(const fsdp_selected *a, const fsdp_selected *b)
{
    int x = preference(a), y = preference(b);
    if (x != y)
        return x < y;
    size_t size = a->name_size < b->name_size ? a->name_size : b->name_size;
    int order = size > 0 ? memcmp(a->name, b->name, size) : 0;
    return order != 0 ? order < 0 : a->name_size < b->name_size;
}

/* --- finding ties ----------------------------------------------------------------------------- */

typedef struct tie_search {
    fsdp_checkpoint *from;
    const fsdp_tie_rules *rules;
    fsdp_selection *selection;
    size_t count;     /* of entries */
    size_t *one;      /* per entry: the entry that represents its tensor */
    bool *is_further; /* per entry: transformers saves the tensor under another name */
} tie_search;

/* --- equal bytes ------------------------------------------------------------------------------ */

typedef struct comparison {
    fsdp_checkpoint *checkpoint;
    size_t a, b; /* tensors */
    char *data;  /* room for a slab of each */
    fsdp_reader reader;
} comparison;

static fsdp_status compare_bytes(comparison *work, bool *equal_out, fsdp_error *err)
{
    const fsdp_entry *entry = fsdp_sd_at(work->checkpoint->manifest.sd, work->a);
    int64_t size = (int64_t)fsdp_dtype_size(entry->dtype);
    char *other = work->data + COMPARED_BYTES;
    fsdp_slabs slabs = {0};
    fsdp_box slab;
    *equal_out = true;
    while (*equal_out &&
           fsdp_slabs_next(&slabs, entry->ndim, entry->shape, COMPARED_BYTES / size, &slab)) {
        fsdp_read_target first = {.box = slab, .dtype = entry->dtype, .data = work->data},
                         second = {.box = slab, .dtype = entry->dtype, .data = other};
        fsdp_read_request requests[] = {{work->a, &first, 1, &work->reader, NULL},
                                        {work->b, &second, 1, &work->reader, NULL}};
        FSDP_TRY(fsdp_checkpoint_get(work->checkpoint, &requests[0], err));
        FSDP_TRY(fsdp_checkpoint_get(work->checkpoint, &requests[1], err));
        *equal_out = memcmp(work->data, other, (size_t)(fsdp_box_count(&slab) * size)) == 0;
    }
    return FSDP_OK;
}

/* Opens the source a second time, because reading packed bytes here would change how the conversion reads.
 * Derived tensors are only in the checkpoint that is open. */
static fsdp_status are_equal(const tie_search *search, size_t a, size_t b, bool *equal_out,
                             fsdp_error *err)
{
    const fsdp_convert_opts *opts = search->rules->opts;
    bool is_derived = search->from->is_derived;
    comparison work = {.checkpoint = search->from, .a = a, .b = b};
    if (!is_derived)
        FSDP_TRY(fsdp_convert_open(search->from->path, opts, &work.checkpoint, err));
    work.data = fsdp_alloc_pages(2 * COMPARED_BYTES);
    fsdp_status st = work.data ? FSDP_OK : fsdp_fail_memory(err, "tied weights");
    if (st == FSDP_OK)
        st = fsdp_checkpoint_set_memory(work.checkpoint, opts->memory, search->rules->to, err);
    if (st == FSDP_OK)
        st = compare_bytes(&work, equal_out, err);
    fsdp_reader_release(&work.reader);
    fsdp_free(work.data);
    if (!is_derived)
        fsdp_checkpoint_close(work.checkpoint);
    return st;
}

static bool is_kept(const tie_search *search, size_t i, bool (*is_named)(const char *, size_t))
{
    const fsdp_selected *selected = fsdp_selection_at(search->selection, i);
    return selected->is_kept && is_named(selected->name, selected->name_size) &&
           fsdp_sd_at(search->from->manifest.sd, i)->kind != FSDP_ENTRY_VALUE;
}

static bool may_be_equal(const tie_search *search, size_t a, size_t b)
{
    const fsdp_entry *x = fsdp_sd_at(search->from->manifest.sd, search->one[a]);
    const fsdp_entry *y = fsdp_sd_at(search->from->manifest.sd, search->one[b]);
    return search->one[a] != search->one[b] && x->dtype == y->dtype && x->ndim == y->ndim &&
           fsdp_entry_bytes(x) > 0 &&
           memcmp(x->shape, y->shape, (size_t)x->ndim * sizeof *x->shape) == 0;
}

static void unite(tie_search *search, size_t a, size_t b)
{
    size_t from = search->one[b];
    for (size_t i = 0; i < search->count; i++)
        if (search->one[i] == from)
            search->one[i] = search->one[a];
}

static fsdp_status find_equal(tie_search *search, fsdp_error *err)
{
    int pairs = 0;
    for (size_t a = 0; a < search->count; a++) {
        if (!is_kept(search, a, fsdp_name_is_head))
            continue;
        for (size_t b = 0; b < search->count; b++) {
            bool equal = false;
            if (!is_kept(search, b, fsdp_name_is_embedding) || !may_be_equal(search, a, b) ||
                pairs++ >= PAIRS_MOST)
                continue;
            FSDP_TRY(are_equal(search, search->one[a], search->one[b], &equal, err));
            if (equal)
                unite(search, a, b);
        }
    }
    return FSDP_OK;
}

static int64_t find_kept(const tie_search *search, const char *name, size_t size)
{
    for (size_t i = 0; i < search->count; i++) {
        const fsdp_selected *selected = fsdp_selection_at(search->selection, i);
        if (selected->is_kept && selected->name_size == size &&
            memcmp(selected->name, name, size) == 0)
            return fsdp_sd_at(search->from->manifest.sd, i)->kind == FSDP_ENTRY_VALUE ? -1
                                                                                      : (int64_t)i;
    }
    return -1;
}

/* Names that the class of the model ties. */
static fsdp_status find_pairs(tie_search *search, fsdp_error *err)
{
    const fsdp_tied_model model = {.class_name = search->rules->class_name, .says = 1};
    fsdp_tied_pair pair;
    for (size_t i = 0; fsdp_tied_pair_at(&model, i, &pair); i++) {
        int64_t a = find_kept(search, pair.other, pair.other_size);
        int64_t b = find_kept(search, pair.name, pair.name_size);
        if (a < 0 || b < 0)
            continue;
        bool equal = search->one[a] == search->one[b];
        if (may_be_equal(search, (size_t)a, (size_t)b))
            FSDP_TRY(are_equal(search, search->one[a], search->one[b], &equal, err));
        if (equal)
            unite(search, (size_t)a, (size_t)b);
        search->is_further[b] = equal;
    }
    return FSDP_OK;
}

/* --- leaving out ------------------------------------------------------------------------------ */

static fsdp_status add_tie(fsdp_ties *ties, const fsdp_selected *dropped, const fsdp_selected *kept,
                           fsdp_error *err)
{
    fsdp_convert_tie tie = {.dropped =
                                fsdp_arena_strndup(&ties->arena, dropped->name, dropped->name_size),
                            .dropped_size = dropped->name_size,
                            .kept = fsdp_arena_strndup(&ties->arena, kept->name, kept->name_size),
                            .kept_size = kept->name_size};
    if (!tie.dropped || !tie.kept ||
        !fsdp_grow(&ties->items, &ties->room, ties->count + 1, sizeof *ties->items))
        return fsdp_fail_memory(err, "tied weights");
    ties->items[ties->count++] = tie;
    return FSDP_OK;
}

static bool can_be_noted(const fsdp_format *target, const fsdp_selected *dropped,
                         const fsdp_selected *kept)
{
    return !target->caps.notes_ties || target->writer->notes_tie(dropped->name, dropped->name_size,
                                                                 kept->name, kept->name_size);
}

/* True when entry a is the name to keep of the two. */
static bool is_better_entry(const tie_search *search, size_t a, size_t b)
{
    return search->is_further[a] != search->is_further[b]
               ? search->is_further[b]
               : is_better(fsdp_selection_at(search->selection, a),
                           fsdp_selection_at(search->selection, b));
}

static fsdp_status leave_out(tie_search *search, fsdp_ties *ties, fsdp_error *err)
{
    size_t *best = fsdp_alloc(search->count, sizeof *best); /* per representative, counted from 1 */
    fsdp_status st = best ? FSDP_OK : fsdp_fail_memory(err, "tied weights");
    for (size_t i = 0; i < search->count && st == FSDP_OK; i++) {
        const fsdp_selected *selected = fsdp_selection_at(search->selection, i);
        size_t *known = &best[search->one[i]];
        if (selected->is_kept && (*known == 0 || is_better_entry(search, i, *known - 1)))
            *known = i + 1;
    }
    for (size_t i = 0; i < search->count && st == FSDP_OK; i++) {
        const fsdp_selected *selected = fsdp_selection_at(search->selection, i);
        if (!selected->is_kept || best[search->one[i]] == i + 1)
            continue;
        const fsdp_selected *kept = fsdp_selection_at(search->selection, best[search->one[i]] - 1);
        if (selected->dtype != kept->dtype || !can_be_noted(search->rules->target, selected, kept))
            continue;
        st = add_tie(ties, selected, kept, err);
        fsdp_selection_leave_out(search->selection, i);
    }
    fsdp_free(best);
    return st;
}

fsdp_status fsdp_ties_drop(fsdp_checkpoint *from, const fsdp_tie_rules *rules,
                           fsdp_selection *selection, fsdp_ties *ties, fsdp_error *err)
{
    fsdp_tied mode = rules->opts->tied;
    bool notes = rules->target->caps.notes_ties;
    bool is_left = mode == FSDP_TIED_AUTO && (!notes || rules->config == 0);
    if (mode == FSDP_TIED_KEEP || is_left)
        return FSDP_OK;
    tie_search search = {.from = from,
                         .rules = rules,
                         .selection = selection,
                         .count = fsdp_sd_count(from->manifest.sd)};
    search.one = fsdp_alloc(search.count, sizeof *search.one);
    search.is_further = fsdp_alloc(search.count, sizeof *search.is_further);
    bool looks = mode == FSDP_TIED_DROP || rules->config == 1;
    fsdp_status st = search.one && search.is_further
                         ? fsdp_same_tensors(from, looks, search.one, err)
                         : fsdp_fail_memory(err, "tied weights");
    if (st == FSDP_OK && looks)
        st = find_equal(&search, err);
    if (st == FSDP_OK && looks)
        st = find_pairs(&search, err);
    if (st == FSDP_OK)
        st = leave_out(&search, ties, err);
    fsdp_free(search.one);
    fsdp_free(search.is_further);
    return st;
}

void fsdp_ties_release(fsdp_ties *ties)
{
    fsdp_arena_release(&ties->arena);
    fsdp_free(ties->items);
    *ties = (fsdp_ties){0};
}
