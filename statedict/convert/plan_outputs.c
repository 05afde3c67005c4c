/*
 * The contents of a plan's text: every file that will be written, which boxes of which tensors go into it,
 * and which files of the source hold them. See plan_file.h.
 */
#include "statedict/convert/plan_file.h"

#include "base/io/io_dry.h"
#include "base/core/mem.h"
#include "formats/source.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

typedef struct outputs {
    const fsdp_planned *planned;
    fsdp_text *text;
    size_t *seen; /* per file of the source: the last part that it was told of */
    size_t part;  /* number of the part at hand, from 1 */
    bool is_first_file, is_first_part, is_first_origin;
} outputs;

/* --- where a box comes from ------------------------------------------------------------------- */

static void add_origin(outputs *out, size_t file)
{
    if (out->seen[file] == out->part)
        return;
    out->seen[file] = out->part;
    fsdp_text_addf(out->text, out->is_first_origin ? "%zu" : ", %zu", file);
    out->is_first_origin = false;
}

/* The manifest is the first of the source's files. */
static fsdp_status add_stored(void *user, int rank, size_t part, const fsdp_box *box,
                              fsdp_error *err)
{
    outputs *out = user;
    (void)part;
    (void)box;
    (void)err;
    const fsdp_checkpoint *from = out->planned->from;
    size_t number = from->is_one_file ? 0 : 1;
    for (int i = 0; !from->is_one_file && i < fsdp_checkpoint_file_of(from, rank); i++)
        number += from->readers[i] != NULL;
    add_origin(out, number);
    return FSDP_OK;
}

static void add_chunks(outputs *out, size_t entry, const fsdp_box *box)
{
    const fsdp_checkpoint *from = out->planned->from;
    const fsdp_source_tensor *tensor =
        fsdp_source_tensor_at(from->source, from->source_tensor[entry]);
    size_t bytes = (size_t)tensor->ndim * sizeof(int64_t);
    for (size_t i = 0; i < tensor->chunk_count; i++) {
        const fsdp_source_chunk *chunk = &tensor->chunks[i];
        fsdp_box stored = {.ndim = tensor->ndim}, shared;
        if (bytes > 0) {
            memcpy(stored.lo, chunk->lo, bytes);
            memcpy(stored.len, chunk->len, bytes);
        }
        if (fsdp_box_intersect(&stored, box, &shared))
            add_origin(out, (size_t)(chunk->file >= 0 ? chunk->file : chunk->origin));
    }
}

static fsdp_status add_origins(outputs *out, size_t entry, const fsdp_box *box, fsdp_error *err)
{
    const fsdp_checkpoint *from = out->planned->from;
    const fsdp_entry *tensor = fsdp_sd_at(from->manifest.sd, entry);
    fsdp_status st = FSDP_OK;
    if (tensor->kind == FSDP_ENTRY_ALIAS)
        entry = tensor->target;
    out->part++;
    out->is_first_origin = true;
    fsdp_text_addf(out->text, ", \"files\": [");
    if (from->source)
        add_chunks(out, entry, box);
    else
        st = fsdp_plan_stored(fsdp_sd_at(from->manifest.sd, entry), from->owners[entry], box,
                              add_stored, out, err);
    fsdp_text_addf(out->text, "]}");
    return st;
}

/* --- files and parts -------------------------------------------------------------------------- */

static void add_numbers(fsdp_text *text, const char *key, int count, const int64_t *numbers)
{
    fsdp_text_addf(text, ", \"%s\": [", key);
    for (int i = 0; i < count; i++)
        fsdp_text_addf(text, i > 0 ? ", %" PRId64 : "%" PRId64, numbers[i]);
    fsdp_text_addf(text, "]");
}

/* "name": new, "from": old */
static void add_names(const outputs *out, size_t entry)
{
    const fsdp_entry *new = fsdp_sd_at(out->planned->sd, entry);
    const fsdp_entry *old =
        fsdp_sd_at(out->planned->from->manifest.sd, out->planned->source[entry]);
    fsdp_text_addf(out->text, "{\"name\": ");
    fsdp_text_add_json_string(out->text, new->name, new->name_size);
    fsdp_text_addf(out->text, ", \"from\": ");
    fsdp_text_add_json_string(out->text, old->name, old->name_size);
}

static fsdp_status add_part(outputs *out, size_t entry, const fsdp_box *box, fsdp_error *err)
{
    const fsdp_entry *tensor = fsdp_sd_at(out->planned->sd, entry);
    if (tensor->kind == FSDP_ENTRY_ALIAS)
        tensor = fsdp_sd_at(out->planned->sd, tensor->target);
    fsdp_text_addf(out->text, out->is_first_part ? "\n    " : ",\n    ");
    out->is_first_part = false;
    add_names(out, entry);
    fsdp_text_addf(out->text, ", \"dtype\": \"%s\"", fsdp_dtype_name(tensor->dtype));
    add_numbers(out->text, "lo", box->ndim, box->lo);
    add_numbers(out->text, "len", box->ndim, box->len);
    return add_origins(out, out->planned->source[entry], box, err);
}

static void begin_file(outputs *out, const char *name)
{
    fsdp_text_addf(out->text, out->is_first_file ? "\n  {\"file\": " : "\n  ]},\n  {\"file\": ");
    fsdp_text_add_json_string(out->text, name, strlen(name));
    fsdp_text_addf(out->text, ", \"parts\": [");
    out->is_first_file = false;
    out->is_first_part = true;
}

static void end_files(outputs *out)
{
    fsdp_text_addf(out->text, out->is_first_file ? "\n]" : "\n  ]}\n]");
}

static bool is_value(const fsdp_entry *entry)
{
    return entry->kind == FSDP_ENTRY_VALUE;
}

static bool is_alias(const fsdp_entry *entry)
{
    return entry->kind == FSDP_ENTRY_ALIAS;
}

/* Without elements there is no part. */
static bool is_empty(const fsdp_entry *entry)
{
    return entry->kind == FSDP_ENTRY_TENSOR && fsdp_entry_bytes(entry) == 0;
}

static void add_entries(const outputs *out, bool (*is_meant)(const fsdp_entry *entry),
                        const char *key)
{
    const fsdp_sd *sd = out->planned->sd;
    bool is_first = true;
    fsdp_text_addf(out->text, ",\n\"%s\": [", key);
    for (size_t i = 0; i < fsdp_sd_count(sd); i++) {
        if (!is_meant(fsdp_sd_at(sd, i)))
            continue;
        fsdp_text_addf(out->text, is_first ? "\n  " : ",\n  ");
        is_first = false;
        add_names(out, i);
        fsdp_text_addf(out->text, "}");
    }
    fsdp_text_addf(out->text, "\n]");
}

/* Both lists only when there is something in them: plans without were made before there were such. */
static void add_tied(const outputs *out)
{
    const fsdp_ties *ties = out->planned->ties;
    for (size_t i = 0; ties && i < ties->count; i++) {
        fsdp_text_addf(out->text, i == 0 ? ",\n\"tied\": [\n  {\"name\": " : ",\n  {\"name\": ");
        fsdp_text_add_json_string(out->text, ties->items[i].dropped, ties->items[i].dropped_size);
        fsdp_text_addf(out->text, ", \"kept\": ");
        fsdp_text_add_json_string(out->text, ties->items[i].kept, ties->items[i].kept_size);
        fsdp_text_addf(out->text, i + 1 == ties->count ? "}\n]" : "}");
    }
}

static void add_copied(const outputs *out)
{
    const fsdp_copies *copies = out->planned->copies;
    for (size_t i = 0; copies && i < copies->count; i++) {
        const char *name = fsdp_copies_name(copies, i);
        fsdp_text_addf(out->text, i == 0 ? ",\n\"copied\": [" : ", ");
        fsdp_text_add_json_string(out->text, name, strlen(name));
        fsdp_text_addf(out->text, i + 1 == copies->count ? "]" : "");
    }
}

static fsdp_status begin(outputs *out, const fsdp_planned *planned, const fsdp_convert_plan *plan,
                         fsdp_text *text, fsdp_error *err)
{
    size_t files = planned->from->source ? fsdp_source_file_count(planned->from->source)
                                         : 1 + (size_t)planned->from->manifest.file_count;
    *out = (outputs){.planned = planned, .text = text, .is_first_file = true};
    out->seen = fsdp_alloc(files > 0 ? files : 1, sizeof *out->seen);
    if (!out->seen)
        return fsdp_fail_memory(err, "a plan");
    fsdp_text_addf(text,
                   ",\n\"bytes_read\": %" PRId64 ",\n\"bytes_written\": %" PRId64
                   ",\n\"bytes_spooled\": %" PRId64,
                   plan->bytes_read, plan->bytes_written, plan->bytes_spooled);
    add_entries(out, is_value, "values");
    add_entries(out, is_empty, "empty");
    add_tied(out);
    add_copied(out);
    return FSDP_OK;
}

/* --- a checkpoint of ours --------------------------------------------------------------------- */

static fsdp_status add_shard(outputs *out, int file, int count, const int *owners, fsdp_error *err)
{
    const fsdp_convert_opts *opts = out->planned->opts;
    fsdp_save_plan plan = {0};
    char name[FSDP_SHARD_NAME_SIZE];
    FSDP_TRY(
        fsdp_plan_save(out->planned->sd, opts->kind, opts->compress, owners, file, &plan, err));
    fsdp_shard_name(file, count, name);
    bool is_named = !opts->format || strcmp(opts->format, "fsdp") == 0;
    begin_file(out, is_named ? name : "");
    fsdp_status st = FSDP_OK;
    for (size_t i = 0; i < plan.box_count && st == FSDP_OK; i++) {
        fsdp_box box = fsdp_shard_box_box(&plan.boxes[i]);
        size_t entry = plan.boxes[i].tensor;
        if (fsdp_sd_at(out->planned->sd, entry)->kind == FSDP_ENTRY_TENSOR)
            st = add_part(out, entry, &box, err);
    }
    fsdp_save_plan_release(&plan);
    return st;
}

fsdp_status fsdp_plan_add_files(const fsdp_planned *planned, const fsdp_convert_plan *plan,
                                const int *owners, fsdp_text *text, fsdp_error *err)
{
    outputs out;
    FSDP_TRY(begin(&out, planned, plan, text, err));
    add_entries(&out, is_alias, "aliases");
    fsdp_text_addf(text, ",\n\"outputs\": [");
    fsdp_status st = FSDP_OK;
    for (int file = 0; file < plan->files && st == FSDP_OK; file++)
        st = add_shard(&out, file, plan->files, owners, err);
    end_files(&out);
    fsdp_free(out.seen);
    return st;
}

/* --- a target of another program -------------------------------------------------------------- */

typedef struct placed_part {
    fsdp_target_place place;
    size_t entry, box;
} placed_part;

static int compare_parts(const void *a, const void *b)
{
    const placed_part *x = a, *y = b;
    int order = strcmp(x->place.file, y->place.file);
    if (order != 0)
        return order;
    if (x->entry != y->entry)
        return x->entry < y->entry ? -1 : 1;
    return (x->box > y->box) - (x->box < y->box);
}

static fsdp_status place_parts(const fsdp_target_format *format, const fsdp_target_opts *opts,
                               placed_part *parts, fsdp_error *err)
{
    fsdp_target *target = NULL;
    size_t n = 0;
    if (format->ops->place)
        FSDP_TRY(format->ops->create(opts, &target, err));
    fsdp_status st = FSDP_OK;
    for (size_t i = 0; i < opts->entry_count; i++) {
        for (size_t b = 0; b < opts->entries[i].box_count && st == FSDP_OK; b++) {
            parts[n] = (placed_part){.entry = i, .box = b};
            if (target)
                st = format->ops->place(target, i, b, &parts[n].place, err);
            n++;
        }
    }
    if (target)
        format->ops->discard(target);
    if (st == FSDP_OK && n > 0)
        qsort(parts, n, sizeof *parts, compare_parts);
    return st;
}

static fsdp_status add_parts(outputs *out, const fsdp_target_opts *opts, const placed_part *parts,
                             size_t count, fsdp_error *err)
{
    for (size_t i = 0; i < count; i++) {
        const fsdp_target_entry *entry = &opts->entries[parts[i].entry];
        if (i == 0 || strcmp(parts[i].place.file, parts[i - 1].place.file) != 0)
            begin_file(out, parts[i].place.file);
        fsdp_box box = fsdp_target_box_at(entry, parts[i].box);
        FSDP_TRY(add_part(out, parts[i].entry, &box, err));
    }
    end_files(out);
    return FSDP_OK;
}

fsdp_status fsdp_plan_add_target(const fsdp_planned *planned, const fsdp_convert_plan *plan,
                                 const fsdp_target_format *format, const fsdp_target_opts *opts,
                                 fsdp_text *text, fsdp_error *err)
{
    outputs out;
    fsdp_target_opts dry = *opts;
    size_t count = 0;
    for (size_t i = 0; i < opts->entry_count; i++)
        count += opts->entries[i].box_count;
    dry.io = fsdp_io_dry();
    dry.path = planned->to;
    dry.sync = false;
    FSDP_TRY(begin(&out, planned, plan, text, err));
    placed_part *parts = fsdp_alloc(count, sizeof *parts);
    fsdp_status st = parts ? FSDP_OK : fsdp_fail_memory(err, "a plan");
    fsdp_text_addf(text, ",\n\"outputs\": [");
    if (st == FSDP_OK)
        st = place_parts(format, &dry, parts, err);
    if (st == FSDP_OK)
        st = add_parts(&out, opts, parts, count, err);
    fsdp_free(parts);
    fsdp_free(out.seen);
    return st;
}
