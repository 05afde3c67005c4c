/*
 * fsdp-ls without options: what the checkpoint is, its groups with totals, and one line per kind of
 * tensor, with numbered layers folded into `#`.
 */
#include "tools/ls/ls.h"
#include "base/text.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

/* === layouts in words ========================================================================= */

/* Layouts in words: how a tensor is cut over the ranks. */

/* Another program's files: the boxes that a tensor lies in there. */
static size_t stored_boxes(const ls_listing *listing, size_t number)
{
    size_t count = 0;
    while (fsdp_checkpoint_stored_box_at(listing->checkpoint, number, count, NULL, NULL))
        count++;
    return count;
}

static bool has_same_layout(const ls_listing *listing, size_t a, size_t b)
{
    const fsdp_layout *one = &fsdp_sd_at(listing->sd, a)->layout;
    const fsdp_layout *other = &fsdp_sd_at(listing->sd, b)->layout;
    if (one->kind != other->kind || stored_boxes(listing, a) != stored_boxes(listing, b))
        return false;
    if (one->kind != FSDP_LAYOUT_MESH)
        return true; /* told by kind and number only */
    return fsdp_mesh_equal(one->mesh, other->mesh) &&
           memcmp(one->placement, other->placement, sizeof one->placement) == 0;
}

/* "288 per rank", or the sizes that occur, in rank order: "uneven: 6283 x7 + 6276". */
static void add_chunks(fsdp_text *text, int64_t rows, int64_t parts)
{
    int64_t low, length, run_length = 0, run = 0;
    fsdp_chunk(rows, parts, parts - 1, &low, &length);
    if (rows % parts == 0) {
        fsdp_text_addf(text, " (%" PRId64 " per rank)", rows / parts);
        return;
    }
    fsdp_text_addf(text, ", uneven (");
    for (int64_t i = 0; i <= parts; i++) {
        if (i < parts)
            fsdp_chunk(rows, parts, i, &low, &length);
        if (i < parts && (i == 0 || length == run_length)) {
            run_length = length;
            run++;
            continue;
        }
        fsdp_text_addf(text, "%" PRId64, run_length);
        if (run > 1)
            fsdp_text_addf(text, " x%" PRId64, run);
        fsdp_text_addf(text, i < parts ? " + " : ")");
        run_length = length;
        run = 1;
    }
}

static void add_one_shard(fsdp_text *text, const fsdp_entry *tensor, int mesh_dim, int64_t copies)
{
    const fsdp_placement *placement = &tensor->layout.placement[mesh_dim];
    int64_t parts = fsdp_mesh_dim_size(tensor->layout.mesh, mesh_dim);
    fsdp_text_addf(text, "shard dim %d", placement->dim);
    if (placement->kind == FSDP_SHARD)
        add_chunks(text, tensor->shape[placement->dim], parts);
    else
        fsdp_text_addf(text, " strided by %" PRId64, placement->split);
    if (copies > 1)
        fsdp_text_addf(text, ", %" PRId64 " copies", copies);
}

static void add_many_shards(fsdp_text *text, const fsdp_entry *tensor, int64_t copies)
{
    const fsdp_mesh *mesh = tensor->layout.mesh;
    const char *between = "shard ";
    for (int d = 0; d < fsdp_mesh_ndim(mesh); d++) {
        const fsdp_placement *placement = &tensor->layout.placement[d];
        if (placement->kind != FSDP_SHARD && placement->kind != FSDP_STRIDED_SHARD)
            continue;
        fsdp_text_addf(text, "%sdim %d by %s=%" PRId64, between, placement->dim,
                       fsdp_mesh_dim_name(mesh, d), fsdp_mesh_dim_size(mesh, d));
        if (placement->kind == FSDP_STRIDED_SHARD)
            fsdp_text_addf(text, " strided");
        between = ", ";
    }
    if (copies > 1)
        fsdp_text_addf(text, ", %" PRId64 " copies", copies);
}

static void add_mesh_layout(fsdp_text *text, const fsdp_entry *tensor)
{
    const fsdp_mesh *mesh = tensor->layout.mesh;
    int sharding = 0, last = 0;
    int64_t copies = 1;
    for (int d = 0; d < fsdp_mesh_ndim(mesh); d++) {
        fsdp_placement_kind kind = tensor->layout.placement[d].kind;
        if (kind == FSDP_SHARD || kind == FSDP_STRIDED_SHARD) {
            sharding++;
            last = d;
        } else {
            copies *= fsdp_mesh_dim_size(mesh, d);
        }
    }
    if (fsdp_mesh_size(mesh) == 1)
        fsdp_text_addf(text, "whole");
    else if (sharding == 0)
        fsdp_text_addf(text, "replicated");
    else if (sharding == 1)
        add_one_shard(text, tensor, last, copies);
    else
        add_many_shards(text, tensor, copies);
}

static void add_boxes(fsdp_text *text, size_t count)
{
    fsdp_text_addf(text, "%zu box%s", count, count == 1 ? "" : "es");
}

void ls_add_layout(fsdp_text *text, const ls_listing *listing, size_t number)
{
    const fsdp_entry *tensor = fsdp_sd_at(listing->sd, number);
    const fsdp_layout *layout = &tensor->layout;
    size_t stored = stored_boxes(listing, number);
    if (stored > 1) {
        add_boxes(text, stored);
        return;
    }
    switch (layout->kind) {
    case FSDP_LAYOUT_MESH: add_mesh_layout(text, tensor); break;
    case FSDP_LAYOUT_BOXES: add_boxes(text, layout->box_count); break;
    case FSDP_LAYOUT_FLAT:
        fsdp_text_addf(text, "flat, %" PRId64 " chunks", fsdp_mesh_size(layout->mesh));
        break;
    }
}

/* === texts next to the tensors ================================================================ */

enum { TEXTS_SHOWN = 20, TEXT_MOST = 100 };

/* The next string of a JSON object of strings, with its quotes; NULL after the last. */
static const char *next_string(const char **at, size_t *size_out)
{
    const char *start = strchr(*at, '"');
    if (!start)
        return NULL;
    const char *end = start + 1;
    while (*end != '"')
        end += *end == '\\' ? 2 : 1;
    *at = end + 1;
    *size_out = (size_t)(end + 1 - start);
    return start;
}

static size_t count_texts(const char *json)
{
    size_t count = 0, size;
    while (next_string(&json, &size))
        count++;
    return count / 2;
}

/* Texts of other programs next to the tensors, unless all files have them; nothing where there are none. */
static void add_metadata(fsdp_text *text, const ls_listing *listing)
{
    const char *json = fsdp_checkpoint_extra(listing->checkpoint, "carried"), *string;
    char number[CLI_NUMBER], shown[TEXT_MOST];
    size_t size = 0, count = json ? count_texts(json) : 0;
    if (count == 0)
        return;
    fsdp_text_addf(text, "  %-9s  %s next to the tensors\n", "metadata",
                   cli_plural((int64_t)count, "text", number));
    for (size_t i = 0; i < 2 * count; i++) {
        if (i == 2 * (size_t)TEXTS_SHOWN) {
            fsdp_text_addf(text, "    and %zu more (--json has all)\n", count - TEXTS_SHOWN);
            return;
        }
        string = next_string(&json, &size);
        fsdp_printable_message(string, size, shown, sizeof shown);
        fsdp_text_addf(text, i % 2 == 0 ? "    %s: " : "%s\n", shown);
    }
}

/* === groups and kinds ========================================================================= */

enum { GROUP_MODEL, GROUP_OPTIM, GROUP_EXTRA, GROUPS };
enum { NAME_MOST = 56, KINDS_SHOWN = 4 };

/* --- the first line --------------------------------------------------------------------------- */

static void add_age(fsdp_text *text, const char *path)
{
    static const struct {
        int64_t seconds;
        const char *unit;
    } units[] = {{86400, "d"}, {3600, "h"}, {60, "min"}, {1, "s"}};
    char manifest[4096];
    struct stat info;
    int n = snprintf(manifest, sizeof manifest, "%s/manifest.json", path);
    if (n < 0 || (size_t)n >= sizeof manifest || !fsdp_path_has_manifest(path, cli_access()) ||
        stat(manifest, &info) != 0)
        return;
    int64_t age = (int64_t)time(NULL) - (int64_t)info.st_mtime;
    for (size_t i = 0; i < sizeof units / sizeof units[0]; i++) {
        if (age >= units[i].seconds) {
            fsdp_text_addf(text, ", %" PRId64 " %s ago", age / units[i].seconds, units[i].unit);
            return;
        }
    }
    fsdp_text_addf(text, ", just now");
}

/* The mesh of the first tensor that has one: "(dp=4, tp=2)". */
static void add_mesh(fsdp_text *text, const fsdp_sd *sd)
{
    for (size_t i = 0; i < fsdp_sd_count(sd); i++) {
        const fsdp_entry *entry = fsdp_sd_at(sd, i);
        if (entry->kind != FSDP_ENTRY_TENSOR || entry->layout.kind == FSDP_LAYOUT_BOXES)
            continue;
        const fsdp_mesh *mesh = entry->layout.mesh;
        if (fsdp_mesh_size(mesh) == 1)
            return;
        for (int d = 0; d < fsdp_mesh_ndim(mesh); d++)
            fsdp_text_addf(text, "%s%s=%" PRId64, d > 0 ? ", " : " (", fsdp_mesh_dim_name(mesh, d),
                           fsdp_mesh_dim_size(mesh, d));
        fsdp_text_addf(text, ")");
        return;
    }
}

static void add_head(const ls_listing *listing, fsdp_text *text)
{
    const fsdp_checkpoint_info *info = listing->info;
    char number[CLI_NUMBER];
    fsdp_text_addf(text, "%s checkpoint", info->format);
    if (info->format_major > 0)
        fsdp_text_addf(text, ", format %d.%d, %s", info->format_major, info->format_minor,
                       cli_kind(info->kind));
    if (info->step != FSDP_NO_STEP)
        fsdp_text_addf(text, ", step %" PRId64, info->step);
    if (info->format_major > 0) {
        fsdp_text_addf(text, ", saved by %s", cli_plural(info->world, "rank", number));
        add_mesh(text, listing->sd);
    }
    add_age(text, info->path);
    fsdp_text_addf(text, info->format_major > 0 ? ", VERIFIED quick\n" : "\n");
    fsdp_text_addf(text, "  %-9s  %s, ", "files", cli_plural(info->file_count, "file", number));
    fsdp_text_addf(text, "%s%s\n", cli_bytes(info->file_bytes, number),
                   info->compressed ? ", compressed (zstd)" : "");
}

/* --- rows: entries that differ only in layer numbers ------------------------------------------ */

typedef struct row_name {
    uint64_t hash;
    size_t start, size; /* in the text of all names */
} row_name;

typedef struct summary {
    ls_listing *listing;
    fsdp_text names;    /* with digits folded */
    row_name *folded;   /* per selected entry */
    size_t *row_next;   /* per selected entry: another one of its row, SIZE_MAX at the end */
    size_t *row_last;   /* at the first of each row: the last one of it */
    int64_t *row_sizes; /* at the first of each row: how many; else 0 */
    size_t *next_alias; /* per entry: the next alias of the same tensor, SIZE_MAX at the end */
    size_t *first_alias;
    int name_width;
    bool state_is_optim;
    bool is_model; /* fsdp_caps.only_model */
} summary;

static const fsdp_entry *selected(const summary *sum, size_t index)
{
    return fsdp_sd_at(sum->listing->sd, sum->listing->order[index]);
}

static bool is_number(const char *data, size_t size)
{
    for (size_t i = 0; i < size; i++)
        if (data[i] < '0' || data[i] > '9')
            return false;
    return size > 0;
}

/* FNV-1a: so that few names are compared. */
static uint64_t hash_name(const char *name, size_t size)
{
    uint64_t hash = UINT64_C(0xCBF29CE484222325);
    for (size_t i = 0; i < size; i++)
        hash = (hash ^ (uint8_t)name[i]) * UINT64_C(0x100000001B3);
    return hash;
}

/* Folding makes a name shorter or leaves it. */
static void fold_name(summary *sum, const fsdp_entry *entry, row_name *folded)
{
    size_t size = 0, end;
    folded->start = sum->names.size;
    fsdp_text_add(&sum->names, entry->name, entry->name_size);
    if (sum->names.failed)
        return;
    char *text = sum->names.data + folded->start;
    for (size_t at = 0; at <= entry->name_size; at = end + 1) {
        for (end = at; end < entry->name_size && entry->name[end] != '.';)
            end++;
        if (is_number(entry->name + at, end - at)) {
            text[size++] = '#';
        } else {
            memcpy(text + size, entry->name + at, end - at);
            size += end - at;
        }
        if (end < entry->name_size)
            text[size++] = '.';
    }
    folded->hash = hash_name(text, size);
    folded->size = size;
    sum->names.size = folded->start + size;
}

static int compare_numbers(int64_t a, int64_t b)
{
    return (a > b) - (a < b);
}

/* 0: the same row. */
static int compare_rows(const summary *sum, size_t a, size_t b)
{
    const row_name *name_a = &sum->folded[a], *name_b = &sum->folded[b];
    if (name_a->hash != name_b->hash)
        return name_a->hash < name_b->hash ? -1 : 1;
    const fsdp_entry *entry_a = selected(sum, a), *entry_b = selected(sum, b);
    if (entry_a->kind != entry_b->kind)
        return compare_numbers(entry_a->kind, entry_b->kind);
    size_t size = name_a->size < name_b->size ? name_a->size : name_b->size;
    int order =
        size ? memcmp(sum->names.data + name_a->start, sum->names.data + name_b->start, size) : 0;
    if (order == 0)
        order = compare_numbers((int64_t)name_a->size, (int64_t)name_b->size);
    if (order != 0 || entry_a->kind != FSDP_ENTRY_TENSOR)
        return order;
    if (entry_a->dtype != entry_b->dtype)
        return compare_numbers(entry_a->dtype, entry_b->dtype);
    if (entry_a->ndim != entry_b->ndim)
        return compare_numbers(entry_a->ndim, entry_b->ndim);
    for (int d = 0; d < entry_a->ndim; d++)
        if (entry_a->shape[d] != entry_b->shape[d])
            return compare_numbers(entry_a->shape[d], entry_b->shape[d]);
    return 0;
}

static int by_row(const void *left, const void *right, void *context)
{
    size_t a = *(const size_t *)left, b = *(const size_t *)right;
    int order = compare_rows(context, a, b);
    return order != 0 ? order : compare_numbers((int64_t)a, (int64_t)b);
}

/* Appends the row that begins with entry `other` to the one that begins with `first`. */
static void join_rows(summary *sum, size_t first, size_t other)
{
    sum->row_next[sum->row_last[first]] = other;
    sum->row_last[first] = sum->row_last[other];
    sum->row_sizes[first] += sum->row_sizes[other];
    sum->row_sizes[other] = 0;
}

/* Appends each entry to one of the last rows, or begins a new one. Returns the number of rows. */
static size_t begin_rows(summary *sum, size_t *rows)
{
    enum { RECENT = 1024 };
    size_t recent[RECENT] = {0}, row_count = 0;
    for (size_t i = 0; i < sum->listing->count; i++) {
        size_t *slot = &recent[sum->folded[i].hash % RECENT];
        sum->row_next[i] = SIZE_MAX;
        sum->row_last[i] = i;
        sum->row_sizes[i] = 1;
        if (*slot != i && compare_rows(sum, *slot, i) == 0) {
            join_rows(sum, *slot, i);
        } else {
            *slot = i;
            rows[row_count++] = i;
        }
    }
    return row_count;
}

/* The row's place in the listing is its first entry's. */
static void make_rows(summary *sum, size_t *rows)
{
    for (size_t i = 0; i < sum->listing->count; i++)
        fold_name(sum, selected(sum, i), &sum->folded[i]);
    if (sum->names.failed)
        return;
    size_t count = begin_rows(sum, rows);
    qsort_r(rows, count, sizeof *rows, by_row, sum);
    for (size_t first = 0, i = 1; i < count; i++)
        if (compare_rows(sum, rows[first], rows[i]) == 0)
            join_rows(sum, rows[first], rows[i]);
        else
            first = i;
}

/* The name of the row that begins with entry `index`; digits are folded only in rows of several entries. */
static const char *row_name_of(const summary *sum, size_t index, size_t *size_out)
{
    bool is_alone = sum->row_sizes[index] == 1;
    *size_out = is_alone ? selected(sum, index)->name_size : sum->folded[index].size;
    return is_alone ? selected(sum, index)->name : sum->names.data + sum->folded[index].start;
}

static void link_aliases(summary *sum)
{
    const fsdp_sd *sd = sum->listing->sd;
    size_t count = fsdp_sd_count(sd);
    memset(sum->first_alias, 0xFF, count * sizeof *sum->first_alias);
    for (size_t i = count; i-- > 0;) {
        const fsdp_entry *entry = fsdp_sd_at(sd, i);
        if (entry->kind != FSDP_ENTRY_ALIAS)
            continue;
        sum->next_alias[i] = sum->first_alias[entry->target];
        sum->first_alias[entry->target] = i;
    }
}

/* --- groups ----------------------------------------------------------------------------------- */

static bool begins_with(const char *data, size_t size, const char *prefix)
{
    return size >= strlen(prefix) && memcmp(data, prefix, strlen(prefix)) == 0;
}

static int group_of(const summary *sum, const fsdp_entry *entry)
{
    if (fsdp_entry_is_optim(entry, sum->state_is_optim))
        return GROUP_OPTIM;
    bool is_model = begins_with(entry->name, entry->name_size, "model.") ||
                    (sum->is_model && entry->kind != FSDP_ENTRY_VALUE);
    return is_model ? GROUP_MODEL : GROUP_EXTRA;
}

typedef struct group {
    int64_t tensors, values, aliases, elements, bytes;
    fsdp_dtype dtypes[KINDS_SHOWN];
    int dtype_count;
} group;

static void count_tensor(group *into, const fsdp_entry *tensor)
{
    into->tensors++;
    into->elements += fsdp_shape_count(tensor->ndim, tensor->shape) *
                      (int64_t)fsdp_dtype_describe(tensor->dtype)->values;
    into->bytes += fsdp_entry_bytes(tensor);
    for (int i = 0; i < into->dtype_count; i++)
        if (into->dtypes[i] == tensor->dtype)
            return;
    if (into->dtype_count < KINDS_SHOWN)
        into->dtypes[into->dtype_count++] = tensor->dtype;
}

static void count_groups(const summary *sum, group groups[GROUPS])
{
    for (size_t i = 0; i < sum->listing->count; i++) {
        const fsdp_entry *entry = selected(sum, i);
        group *into = &groups[group_of(sum, entry)];
        if (entry->kind == FSDP_ENTRY_TENSOR)
            count_tensor(into, entry);
        else if (entry->kind == FSDP_ENTRY_VALUE)
            into->values++;
        else
            into->aliases++;
    }
}

static void add_counts(fsdp_text *text, const group *of)
{
    const struct {
        int64_t count;
        const char *noun;
        const char *plural;
    } kinds[] = {{of->tensors, "tensor", "tensors"},
                 {of->values, "value", "values"},
                 {of->aliases, "alias", "aliases"}};
    const char *between = "";
    for (int i = 0; i < 3; i++) {
        if (kinds[i].count == 0)
            continue;
        fsdp_text_addf(text, "%s%" PRId64 " %s", between, kinds[i].count,
                       kinds[i].count == 1 ? kinds[i].noun : kinds[i].plural);
        between = ", ";
    }
}

static void add_group(fsdp_text *text, const char *name, const group *of)
{
    char number[CLI_NUMBER];
    fsdp_text_addf(text, "  %-9s  ", name);
    if (of->tensors > 0) {
        fsdp_text_addf(text, "%s %s  ", cli_count(of->elements, number),
                       strcmp(name, "model") == 0 ? "params" : "elements");
        for (int i = 0; i < of->dtype_count; i++)
            fsdp_text_addf(text, "%s%s", i > 0 ? "+" : "", fsdp_dtype_name(of->dtypes[i]));
        fsdp_text_addf(text, "  %s  ", cli_bytes(of->bytes, number));
    }
    add_counts(text, of);
}

/* ": rng.#.state x8, scheduler, ...": the values of the group by folded name. */
static void add_value_names(fsdp_text *text, const summary *sum, int group_number)
{
    int shown = 0;
    for (size_t i = 0; i < sum->listing->count; i++) {
        const fsdp_entry *entry = selected(sum, i);
        if (sum->row_sizes[i] == 0 || entry->kind != FSDP_ENTRY_VALUE ||
            group_of(sum, entry) != group_number)
            continue;
        if (shown++ == KINDS_SHOWN) {
            fsdp_text_addf(text, ", ...");
            return;
        }
        fsdp_text_addf(text, shown == 1 ? ": " : ", ");
        size_t size;
        const char *name = row_name_of(sum, i, &size);
        cli_add_name(text, name, size);
        if (sum->row_sizes[i] > 1)
            fsdp_text_addf(text, " x%" PRId64, sum->row_sizes[i]);
    }
}

static void add_groups(fsdp_text *text, const summary *sum)
{
    static const char *const names[GROUPS] = {"model", "optim", "extra"};
    group groups[GROUPS] = {0};
    count_groups(sum, groups);
    for (int i = 0; i < GROUPS; i++) {
        if (groups[i].tensors + groups[i].values + groups[i].aliases == 0)
            continue;
        add_group(text, names[i], &groups[i]);
        if (i == GROUP_EXTRA)
            add_value_names(text, sum, i);
        fsdp_text_add(text, "\n", 1);
    }
}

/* --- tensors ---------------------------------------------------------------------------------- */

static void add_aliases(fsdp_text *text, const summary *sum, size_t number)
{
    const char *before = ", tied: ";
    for (size_t alias = sum->first_alias[number]; alias != SIZE_MAX;
         alias = sum->next_alias[alias]) {
        const fsdp_entry *entry = fsdp_sd_at(sum->listing->sd, alias);
        fsdp_text_addf(text, "%s", before);
        cli_add_name(text, entry->name, entry->name_size);
        before = ", ";
    }
}

static bool same_layouts(const summary *sum, size_t first)
{
    const ls_listing *listing = sum->listing;
    for (size_t i = sum->row_next[first]; i != SIZE_MAX; i = sum->row_next[i])
        if (!has_same_layout(listing, listing->order[first], listing->order[i]))
            return false;
    return true;
}

static void add_row_name(fsdp_text *text, const summary *sum, size_t index)
{
    char name[NAME_MOST + 1];
    size_t size;
    const char *shown = row_name_of(sum, index, &size);
    fsdp_printable(shown, size, name, sizeof name);
    cli_add_padded(text, name, sum->name_width);
}

static void add_row(fsdp_text *text, const summary *sum, size_t index)
{
    const fsdp_entry *tensor = selected(sum, index);
    int64_t count = sum->row_sizes[index], shape[FSDP_MAX_DIMS];
    char number[CLI_NUMBER];
    fsdp_text words = {0};
    ls_shape(tensor, shape);
    cli_add_shape(&words, tensor->ndim, shape);
    fsdp_text_add(text, "  ", 2);
    add_row_name(text, sum, index);
    fsdp_text_addf(text, "  %4" PRId64 " x %-16s  %-7s  %10s  ", count,
                   words.data ? words.data : "", fsdp_dtype_name(tensor->dtype),
                   cli_bytes(count * fsdp_entry_bytes(tensor), number));
    if (same_layouts(sum, index))
        ls_add_layout(text, sum->listing, sum->listing->order[index]);
    else
        fsdp_text_addf(text, "several layouts");
    if (count == 1)
        add_aliases(text, sum, sum->listing->order[index]);
    fsdp_text_add(text, "\n", 1);
    fsdp_text_release(&words);
}

/* The optimizer's tensors repeat the model's: shown only when they are all there is. */
static bool is_shown(const summary *sum, size_t index, bool with_optim)
{
    const fsdp_entry *entry = selected(sum, index);
    return sum->row_sizes[index] > 0 && entry->kind == FSDP_ENTRY_TENSOR &&
           (with_optim || group_of(sum, entry) != GROUP_OPTIM);
}

static bool only_optim(const summary *sum)
{
    for (size_t i = 0; i < sum->listing->count; i++)
        if (is_shown(sum, i, false))
            return false;
    return true;
}

static fsdp_status add_rows(fsdp_text *text, summary *sum)
{
    size_t count = sum->listing->count;
    bool with_optim = only_optim(sum);
    for (size_t i = 0; i < count; i++) {
        size_t size;
        if (!is_shown(sum, i, with_optim))
            continue;
        (void)row_name_of(sum, i, &size);
        int width = (int)(size < NAME_MOST ? size : NAME_MOST);
        if (width > sum->name_width)
            sum->name_width = width;
    }
    for (size_t i = 0; i < count; i++) {
        if (!is_shown(sum, i, with_optim))
            continue;
        add_row(text, sum, i);
        FSDP_TRY(cli_put(text));
    }
    return FSDP_OK;
}

static bool holds_plugin(const char *directory)
{
    char file[2500];
    snprintf(file, sizeof file, "%s/%s", directory, FSDP_PLUGIN_FILE);
    return access(file, R_OK) == 0;
}

/* In addition to the program: in the build tree, and where `cmake --install` puts both. */
void ls_plugin_path(char *out, size_t size)
{
    static const char *const places[] = {FSDP_PLUGIN_DIRS};
    char program[2048], path[2400];
    ssize_t length = readlink("/proc/self/exe", program, sizeof program - 1);
    out[0] = '\0';
    if (length <= 0)
        return;
    program[length] = '\0';
    *strrchr(program, '/') = '\0';
    for (size_t i = 0; i < sizeof places / sizeof places[0]; i++) {
        snprintf(path, sizeof path, "%s/%s", program, places[i]);
        char *clean = holds_plugin(path) ? realpath(path, NULL) : NULL;
        if (clean && strlen(clean) < size)
            memcpy(out, clean, strlen(clean) + 1);
        free(clean);
        if (out[0])
            return;
    }
}

static void add_plugin_line(fsdp_text *text, const ls_listing *listing)
{
    char plugin[4096];
    if (!listing->info->compressed)
        return;
    ls_plugin_path(plugin, sizeof plugin);
    fsdp_text_addf(text, "other programs (h5py, h5dump) read this with\n  HDF5_PLUGIN_PATH=%s\n",
                   plugin[0] ? plugin : "DIRECTORY-OF-FSDP'S-HDF5-PLUGIN");
}

static fsdp_status print_summary(summary *sum, fsdp_text *text, size_t *rows)
{
    link_aliases(sum);
    make_rows(sum, rows);
    sum->state_is_optim = fsdp_sd_state_is_optim(sum->listing->sd);
    sum->is_model = fsdp_format_from(sum->listing->info->format)->caps.only_model;
    if (sum->names.failed) {
        text->failed = true;
        return FSDP_ERR_LIMIT;
    }
    add_head(sum->listing, text);
    add_groups(text, sum);
    add_metadata(text, sum->listing);
    FSDP_TRY(add_rows(text, sum));
    add_plugin_line(text, sum->listing);
    return FSDP_OK;
}

fsdp_status ls_print_summary(ls_listing *listing, fsdp_text *text)
{
    size_t count = listing->count + 1, all = fsdp_sd_count(listing->sd) + 1;
    summary sum = {.listing = listing};
    sum.folded = calloc(count, sizeof *sum.folded);
    sum.row_next = calloc(count, sizeof *sum.row_next);
    sum.row_last = calloc(count, sizeof *sum.row_last);
    sum.row_sizes = calloc(count, sizeof *sum.row_sizes);
    sum.next_alias = calloc(all, sizeof *sum.next_alias);
    sum.first_alias = calloc(all, sizeof *sum.first_alias);
    size_t *rows = calloc(count, sizeof *rows);
    fsdp_status st = FSDP_ERR_LIMIT;
    if (sum.folded && sum.row_next && sum.row_last && sum.row_sizes && sum.next_alias &&
        sum.first_alias && rows)
        st = print_summary(&sum, text, rows);
    else
        text->failed = true;
    free(rows);
    free(sum.first_alias);
    free(sum.next_alias);
    free(sum.row_sizes);
    free(sum.row_last);
    free(sum.row_next);
    free(sum.folded);
    fsdp_text_release(&sum.names);
    return st;
}
