/* fsdp-ls entry by entry: --long, --shards, --tree, --config. */
#include "tools/ls/ls.h"
#include "base/text.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

enum { NAME_WIDTH = 48, VALUE_WIDTH = 100 };

/* A value on one line of a terminal, cut when it is long. */
static void add_short_value(ls_listing *listing, fsdp_text *text, const fsdp_value *value)
{
    char shown[VALUE_WIDTH];
    fsdp_text json = {0};
    ls_add_value(listing, &json, value);
    if (json.failed)
        text->failed = true;
    else
        cli_add_padded(text, fsdp_printable(json.data, json.size, shown, sizeof shown), 0);
    fsdp_text_release(&json);
}

static void add_padded_name(fsdp_text *text, const fsdp_entry *entry)
{
    size_t before = text->size;
    cli_add_name(text, entry->name, entry->name_size);
    for (size_t used = text->size - before; used < NAME_WIDTH; used++)
        fsdp_text_add(text, " ", 1);
    fsdp_text_add(text, "  ", 2);
}

static void add_tensor_columns(fsdp_text *text, const fsdp_entry *tensor)
{
    char number[CLI_NUMBER];
    fsdp_text words = {0};
    int64_t shape[FSDP_MAX_DIMS];
    ls_shape(tensor, shape);
    cli_add_shape(&words, tensor->ndim, shape);
    fsdp_text_addf(text, "%-8s  %-18s  %10s  ", fsdp_dtype_name(tensor->dtype),
                   words.data ? words.data : "", cli_bytes(fsdp_entry_bytes(tensor), number));
    fsdp_text_release(&words);
}

static void add_long_entry(fsdp_text *text, ls_listing *listing, size_t number)
{
    const fsdp_entry *entry = fsdp_sd_at(listing->sd, number);
    add_padded_name(text, entry);
    switch (entry->kind) {
    case FSDP_ENTRY_TENSOR:
        add_tensor_columns(text, entry);
        ls_add_layout(text, listing, number);
        break;
    case FSDP_ENTRY_VALUE:
        fsdp_text_addf(text, "value     ");
        add_short_value(listing, text, &entry->value);
        break;
    case FSDP_ENTRY_ALIAS: {
        const fsdp_entry *target = ls_tensor(listing, entry);
        fsdp_text_addf(text, "alias     ");
        cli_add_name(text, target->name, target->name_size);
        break;
    }
    }
    fsdp_text_add(text, "\n", 1);
}

fsdp_status ls_print_long(ls_listing *listing, fsdp_text *text)
{
    for (size_t i = 0; i < listing->count; i++) {
        add_long_entry(text, listing, listing->order[i]);
        FSDP_TRY(cli_put(text));
    }
    return FSDP_OK;
}

/* --- shards ----------------------------------------------------------------------------------- */

/* "[0:288, 0:768]" */
static void add_box(fsdp_text *text, const fsdp_entry *tensor, const fsdp_box *stored)
{
    const fsdp_box shown = ls_box(tensor, stored), *box = &shown;
    fsdp_text_add(text, "[", 1);
    for (int d = 0; d < box->ndim; d++)
        fsdp_text_addf(text, "%s%" PRId64 ":%" PRId64, d > 0 ? ", " : "", box->lo[d],
                       box->lo[d] + box->len[d]);
    fsdp_text_add(text, "]", 1);
}

static bool same_boxes(const fsdp_entry *tensor, int a, int b)
{
    size_t count = fsdp_layout_box_count(&tensor->layout, tensor->ndim, tensor->shape, a);
    if (fsdp_layout_box_count(&tensor->layout, tensor->ndim, tensor->shape, b) != count)
        return false;
    for (size_t i = 0; i < count; i++) {
        fsdp_box box_a, box_b;
        fsdp_layout_box_at(&tensor->layout, tensor->ndim, tensor->shape, a, i, &box_a);
        fsdp_layout_box_at(&tensor->layout, tensor->ndim, tensor->shape, b, i, &box_b);
        if (!fsdp_box_equal(&box_a, &box_b))
            return false;
    }
    return true;
}

/* A line for ranks first..last, which hold the same box. */
static void add_ranks(fsdp_text *text, const fsdp_entry *tensor, int first, int last)
{
    char number[CLI_NUMBER], ranks[CLI_NUMBER];
    size_t count = fsdp_layout_box_count(&tensor->layout, tensor->ndim, tensor->shape, first);
    if (count == 0)
        return;
    if (first == last)
        snprintf(ranks, sizeof ranks, "rank %d", first);
    else
        snprintf(ranks, sizeof ranks, "ranks %d-%d", first, last);
    fsdp_text_addf(text, "  %-12s  %10s ", ranks,
                   cli_bytes(fsdp_entry_local_bytes(tensor, first), number));
    for (size_t i = 0; i < count; i++) {
        fsdp_box box;
        fsdp_layout_box_at(&tensor->layout, tensor->ndim, tensor->shape, first, i, &box);
        fsdp_text_add(text, " ", 1);
        add_box(text, tensor, &box);
    }
    fsdp_text_add(text, "\n", 1);
}

/* Places in other programs' files, which do not name the rank that saved a box. */
static void add_places(fsdp_text *text, const ls_listing *listing, size_t number)
{
    const fsdp_entry *tensor = fsdp_sd_at(listing->sd, number);
    fsdp_box box;
    char bytes[CLI_NUMBER];
    int in;
    for (size_t i = 0; fsdp_checkpoint_stored_box_at(listing->checkpoint, number, i, &box, &in);
         i++) {
        fsdp_checkpoint_file file;
        int64_t size = fsdp_box_count(&box) * (int64_t)fsdp_dtype_size(tensor->dtype);
        fsdp_checkpoint_file_at(listing->checkpoint, in, &file);
        fsdp_text_addf(text, "  ");
        cli_add_message(text, file.name);
        fsdp_text_addf(text, "  %10s  ", cli_bytes(size, bytes));
        add_box(text, tensor, &box);
        fsdp_text_add(text, "\n", 1);
    }
}

static void add_holders(fsdp_text *text, const ls_listing *listing, size_t number)
{
    const fsdp_entry *tensor = fsdp_sd_at(listing->sd, number);
    int first = 0;
    add_padded_name(text, tensor);
    add_tensor_columns(text, tensor);
    cli_end_line(text);
    if (listing->info->format_major == 0) {
        add_places(text, listing, number);
        return;
    }
    for (int rank = 1; rank <= listing->info->world; rank++) {
        if (rank < listing->info->world && same_boxes(tensor, first, rank))
            continue;
        add_ranks(text, tensor, first, rank - 1);
        first = rank;
    }
}

static void add_file(fsdp_text *text, const ls_listing *listing, int number)
{
    fsdp_checkpoint_file file;
    char words[CLI_NUMBER];
    fsdp_checkpoint_file_at(listing->checkpoint, number, &file);
    cli_add_message(text, file.name);
    fsdp_text_addf(text, "  %10s  ", cli_bytes(file.size, words));
    if (listing->info->format_major == 0)
        fsdp_text_addf(text, "%" PRId64 " %s\n", file.box_count,
                       file.box_count == 1 ? "box" : "boxes");
    else
        fsdp_text_addf(text, "%" PRId64 " boxes, %" PRId64 " blocks\n", file.box_count,
                       file.block_count);
}

fsdp_status ls_print_shards(ls_listing *listing, fsdp_text *text)
{
    for (int i = 0; i < listing->info->file_count; i++) {
        add_file(text, listing, i);
        FSDP_TRY(cli_put(text));
    }
    for (size_t i = 0; i < listing->count; i++) {
        const fsdp_entry *entry = fsdp_sd_at(listing->sd, listing->order[i]);
        if (entry->kind == FSDP_ENTRY_TENSOR)
            add_holders(text, listing, listing->order[i]);
        FSDP_TRY(cli_put(text));
    }
    return FSDP_OK;
}

/* --- tree ------------------------------------------------------------------------------------- */

/* Bytes at the beginning of name that make up whole components shared with before. */
static size_t shared_components(const fsdp_entry *name, const fsdp_entry *before)
{
    size_t shared = 0;
    for (size_t i = 0; before && i < name->name_size && i < before->name_size; i++) {
        if (name->name[i] != before->name[i])
            break;
        if (name->name[i] == '.')
            shared = i + 1;
    }
    return shared;
}

static void add_indent(fsdp_text *text, int depth)
{
    fsdp_text_addf(text, "%*s", 2 * depth, "");
}

static void add_leaf(fsdp_text *text, ls_listing *listing, const fsdp_entry *entry)
{
    char number[CLI_NUMBER];
    const fsdp_entry *tensor = ls_tensor(listing, entry);
    fsdp_text_add(text, "  ", 2);
    if (entry->kind == FSDP_ENTRY_VALUE) {
        fsdp_text_add(text, "= ", 2);
        add_short_value(listing, text, &entry->value);
    } else if (entry->kind == FSDP_ENTRY_ALIAS) {
        fsdp_text_add(text, "-> ", 3);
        cli_add_name(text, tensor->name, tensor->name_size);
    } else {
        int64_t shape[FSDP_MAX_DIMS];
        ls_shape(tensor, shape);
        fsdp_text_addf(text, "%s ", fsdp_dtype_name(tensor->dtype));
        cli_add_shape(text, tensor->ndim, shape);
        fsdp_text_addf(text, " %s", cli_bytes(fsdp_entry_bytes(tensor), number));
    }
    fsdp_text_add(text, "\n", 1);
}

static void add_branch(fsdp_text *text, ls_listing *listing, const fsdp_entry *entry,
                       const fsdp_entry *before)
{
    size_t start = 0, shared = shared_components(entry, before);
    int depth = 0;
    for (size_t i = 0; i < entry->name_size; i++) {
        if (entry->name[i] != '.')
            continue;
        if (i >= shared) {
            add_indent(text, depth);
            cli_add_name(text, entry->name + start, i - start);
            fsdp_text_add(text, "\n", 1);
        }
        depth++;
        start = i + 1;
    }
    add_indent(text, depth);
    cli_add_name(text, entry->name + start, entry->name_size - start);
    add_leaf(text, listing, entry);
}

fsdp_status ls_print_tree(ls_listing *listing, fsdp_text *text)
{
    const fsdp_entry *before = NULL;
    for (size_t i = 0; i < listing->count; i++) {
        const fsdp_entry *entry = fsdp_sd_at(listing->sd, listing->order[i]);
        add_branch(text, listing, entry, before);
        before = entry;
        FSDP_TRY(cli_put(text));
    }
    return FSDP_OK;
}

/* --- values ----------------------------------------------------------------------------------- */

fsdp_status ls_print_config(ls_listing *listing, fsdp_text *text)
{
    for (size_t i = 0; i < listing->count; i++) {
        const fsdp_entry *entry = fsdp_sd_at(listing->sd, listing->order[i]);
        if (entry->kind != FSDP_ENTRY_VALUE)
            continue;
        cli_add_full_name(text, entry->name, entry->name_size);
        fsdp_text_addf(text, " = ");
        ls_add_value(listing, text, &entry->value);
        fsdp_text_add(text, "\n", 1);
        FSDP_TRY(cli_put(text));
    }
    return FSDP_OK;
}
