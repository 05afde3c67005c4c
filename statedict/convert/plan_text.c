/* The text of a plan: its head, its contents, its end. See plan_text.h. */
#include "statedict/convert/convert_job.h"
#include "statedict/sd/layout_internal.h"

#include <inttypes.h>
#include <string.h>

static const char CLOSING_START[] = "\"xxh3\": \"";
static const char CLOSING_END[] = "\"\n}\n";
enum { CLOSING_SIZE = sizeof CLOSING_START - 1 + FSDP_PLAN_HASH - 1 + sizeof CLOSING_END - 1 };

/* A file of the source, by its number there. */
typedef struct source_file {
    size_t position;  /* in the list of sources */
    size_t last_part; /* the last part that names it */
} source_file;

typedef struct spelling {
    const convert_job *job;
    fsdp_text *text;
    plan_head head;
    source_file *files;
    size_t file_count, file_room;
    size_t listed; /* sources */
    size_t part;   /* number of the current part, from 1 */
    bool is_first_file, is_first_part, is_first_origin;
} spelling;

/* --- the head --------------------------------------------------------------------------------- */

static void add_source(spelling *out, const char *path, const fsdp_file_info *info)
{
    fsdp_text_addf(out->text, out->listed++ == 0 ? "\n  {\"path\": " : ",\n  {\"path\": ");
    fsdp_plan_add_path(&out->head, path);
    fsdp_text_addf(out->text, ", \"size\": %" PRId64 ", \"mtime_ns\": %" PRId64 "}", info->size,
                   info->mtime_ns);
}

static fsdp_status add_numbered(void *context, int number, const char *path,
                                const fsdp_file_info *info, fsdp_error *err)
{
    spelling *out = context;
    size_t count = number < 0 ? 0 : (size_t)number + 1;
    if (!fsdp_grow(&out->files, &out->file_room, count, sizeof *out->files))
        return fsdp_fail_memory(err, "a plan");
    while (out->file_count < count)
        out->files[out->file_count++] = (source_file){0};
    if (count > 0)
        out->files[count - 1].position = out->listed;
    add_source(out, path, info);
    return FSDP_OK;
}

static fsdp_status add_head(spelling *out, fsdp_error *err)
{
    const convert_job *job = out->job;
    fsdp_convert_opts opts = job->opts;
    opts.format = opts.format ? opts.format : "fsdp";
    opts.chunk_bytes = opts.compress && job->format->caps.compresses ? job->chunk_bytes : 0;
    fsdp_text_addf(out->text,
                   FSDP_PLAN_START "%d,\n\"writer\": \"fsdp %s\",\n\"from\": ", FSDP_PLAN_VERSION,
                   fsdp_version());
    fsdp_plan_add_path(&out->head, job->from->path);
    fsdp_text_addf(out->text, ",\n\"to\": ");
    fsdp_plan_add_path(&out->head, job->to);
    fsdp_text_addf(out->text, ",\n\"options\": {");
    fsdp_plan_add_options(&out->head, &opts);
    fsdp_text_addf(out->text, "\n},\n\"sources\": [");
    FSDP_TRY(fsdp_checkpoint_each_file(job->from, add_numbered, out, err));
    for (size_t i = 0; i < job->copies.count; i++) {
        fsdp_file_info info;
        const char *path = fsdp_copies_path(&job->copies, i, &info);
        if (path)
            add_source(out, path, &info);
    }
    fsdp_text_addf(out->text, "\n]");
    return out->text->failed ? fsdp_fail_memory(err, "a plan") : FSDP_OK;
}

static void add_hash(fsdp_text *text, const char *data, size_t size)
{
    fsdp_hash hash = fsdp_kernels_get()->hash(data, size);
    fsdp_text_add_hex(text, hash.bytes, sizeof hash.bytes);
}

fsdp_status fsdp_plan_identify(const convert_job *job, char hash_out[FSDP_PLAN_HASH],
                               fsdp_error *err)
{
    fsdp_text text = {0}, digits = {0};
    spelling out = {.job = job, .text = &text, .head = {.text = &text}};
    fsdp_status st = add_head(&out, err);
    if (st == FSDP_OK)
        add_hash(&digits, text.data, text.size);
    if (st == FSDP_OK && digits.failed)
        st = fsdp_fail_memory(err, "a plan");
    if (st == FSDP_OK)
        memcpy(hash_out, digits.data, FSDP_PLAN_HASH);
    fsdp_text_release(&digits);
    fsdp_text_release(&text);
    fsdp_free(out.files);
    return st;
}

/* --- files and parts -------------------------------------------------------------------------- */

static fsdp_status add_origin(void *context, int number, fsdp_error *err)
{
    spelling *out = context;
    source_file *file = &out->files[number];
    (void)err;
    if (file->last_part == out->part)
        return FSDP_OK;
    file->last_part = out->part;
    fsdp_text_addf(out->text, out->is_first_origin ? "%zu" : ", %zu", file->position);
    out->is_first_origin = false;
    return FSDP_OK;
}

static void add_numbers(fsdp_text *text, const char *key, int count, const int64_t *numbers)
{
    fsdp_text_addf(text, ", \"%s\": [", key);
    for (int i = 0; i < count; i++)
        fsdp_text_addf(text, i > 0 ? ", %" PRId64 : "%" PRId64, numbers[i]);
    fsdp_text_addf(text, "]");
}

/* {"name": new, "from": old */
static void add_names(const spelling *out, size_t entry)
{
    const fsdp_entry *new = fsdp_sd_at(out->job->sd, entry);
    const fsdp_entry *old = fsdp_sd_at(out->job->from->manifest.sd, out->job->source[entry]);
    fsdp_text_addf(out->text, "{\"name\": ");
    fsdp_text_add_json_string(out->text, new->name, new->name_size);
    fsdp_text_addf(out->text, ", \"from\": ");
    fsdp_text_add_json_string(out->text, old->name, old->name_size);
}

static void begin_file(spelling *out, const char *name)
{
    fsdp_text_addf(out->text, out->is_first_file ? "\n  {\"file\": " : "\n  ]},\n  {\"file\": ");
    fsdp_text_add_json_string(out->text, name, strlen(name));
    fsdp_text_addf(out->text, ", \"parts\": [");
    out->is_first_file = false;
    out->is_first_part = true;
}

static fsdp_status add_part(void *context, const char *file, size_t entry, const fsdp_box *box,
                            fsdp_error *err)
{
    spelling *out = context;
    fsdp_checkpoint *from = out->job->from;
    if (entry == CONVERT_NO_PART) {
        begin_file(out, file);
        return FSDP_OK;
    }
    const fsdp_sd *sd = out->job->sd;
    fsdp_text_addf(out->text, out->is_first_part ? "\n    " : ",\n    ");
    out->is_first_part = false;
    add_names(out, entry);
    fsdp_text_addf(out->text, ", \"dtype\": \"%s\"",
                   fsdp_dtype_name(fsdp_sd_at(sd, fsdp_sd_tensor_of(sd, entry))->dtype));
    add_numbers(out->text, "lo", box->ndim, box->lo);
    add_numbers(out->text, "len", box->ndim, box->len);
    out->part++;
    out->is_first_origin = true;
    fsdp_text_addf(out->text, ", \"files\": [");
    size_t source = fsdp_sd_tensor_of(from->manifest.sd, out->job->source[entry]);
    FSDP_TRY(fsdp_checkpoint_locate(from, source, box, add_origin, out, err));
    fsdp_text_addf(out->text, "]}");
    return FSDP_OK;
}

/* --- the contents ----------------------------------------------------------------------------- */

static bool is_value(const fsdp_entry *entry)
{
    return entry->kind == FSDP_ENTRY_VALUE;
}

static bool is_alias(const fsdp_entry *entry)
{
    return entry->kind == FSDP_ENTRY_ALIAS;
}

/* Tensors without elements have no part. */
static bool is_empty(const fsdp_entry *entry)
{
    return entry->kind == FSDP_ENTRY_TENSOR && fsdp_entry_bytes(entry) == 0;
}

static void add_entries(const spelling *out, bool (*is_meant)(const fsdp_entry *entry),
                        const char *key)
{
    const fsdp_sd *sd = out->job->sd;
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

/* Adds the list only if it has items, so that plans without keep their hash. */
static void add_tied(const spelling *out)
{
    const fsdp_ties *ties = &out->job->ties;
    for (size_t i = 0; i < ties->count; i++) {
        fsdp_text_addf(out->text, i == 0 ? ",\n\"tied\": [\n  {\"name\": " : ",\n  {\"name\": ");
        fsdp_text_add_json_string(out->text, ties->items[i].dropped, ties->items[i].dropped_size);
        fsdp_text_addf(out->text, ", \"kept\": ");
        fsdp_text_add_json_string(out->text, ties->items[i].kept, ties->items[i].kept_size);
        fsdp_text_addf(out->text, i + 1 == ties->count ? "}\n]" : "}");
    }
}

static void add_copied(const spelling *out)
{
    const fsdp_copies *copies = &out->job->copies;
    for (size_t i = 0; i < copies->count; i++) {
        const char *name = fsdp_copies_name(copies, i);
        fsdp_text_addf(out->text, i == 0 ? ",\n\"copied\": [" : ", ");
        fsdp_text_add_json_string(out->text, name, strlen(name));
        fsdp_text_addf(out->text, i + 1 == copies->count ? "]" : "");
    }
}

/* [{"name": ..., "class": ..., "bytes": ...}], only if there are some. */
static void add_code(const spelling *out)
{
    const fsdp_note_list *list = &out->job->facts.lists[FSDP_NOTE_CODE];
    for (size_t i = 0; i < list->count; i++) {
        const fsdp_note_item *code = &list->items[i];
        fsdp_text_addf(out->text, i == 0 ? ",\n\"code\": [\n  {\"name\": " : ",\n  {\"name\": ");
        fsdp_text_add_json_string(out->text, code->name, code->name_size);
        fsdp_text_addf(out->text, ", \"class\": ");
        fsdp_text_add_json_string(out->text, code->other, code->other_size);
        fsdp_text_addf(out->text, ", \"bytes\": %" PRId64 "}%s", code->number,
                       i + 1 == list->count ? "\n]" : "");
    }
}

static fsdp_status add_contents(spelling *out, convert_job *job, const fsdp_convert_plan *plan,
                                fsdp_error *err)
{
    fsdp_text_addf(out->text,
                   ",\n\"hash\": \"%s\",\n\"bytes_read\": %" PRId64 ",\n\"bytes_written\": %" PRId64
                   ",\n\"bytes_spooled\": %" PRId64,
                   job->hash, plan->bytes_read, plan->bytes_written, plan->bytes_spooled);
    add_entries(out, is_value, "values");
    add_entries(out, is_empty, "empty");
    add_tied(out);
    add_copied(out);
    add_code(out);
    if (job->format->caps.aliases)
        add_entries(out, is_alias, "aliases");
    fsdp_text_addf(out->text, ",\n\"outputs\": [");
    FSDP_TRY(job->target->list(job, add_part, out, err));
    fsdp_text_addf(out->text, out->is_first_file ? "\n]" : "\n  ]}\n]");
    return fsdp_plan_close(out->text, err);
}

fsdp_status fsdp_plan_spell(convert_job *job, const fsdp_convert_plan *plan, fsdp_text *text,
                            fsdp_error *err)
{
    spelling out = {.job = job, .text = text, .head = {.text = text}, .is_first_file = true};
    fsdp_status st = add_head(&out, err);
    if (st == FSDP_OK && out.head.unspelled)
        st = fsdp_fail(err, FSDP_ERR_USAGE, "'%s' is not UTF-8; a plan cannot contain it",
                       out.head.unspelled);
    if (st == FSDP_OK)
        st = add_contents(&out, job, plan, err);
    fsdp_free(out.files);
    return st;
}

/* --- the end ---------------------------------------------------------------------------------- */

fsdp_status fsdp_plan_close(fsdp_text *text, fsdp_error *err)
{
    fsdp_text_addf(text, ",\n");
    if (text->failed)
        return fsdp_fail_memory(err, "a plan");
    size_t size = text->size;
    fsdp_text_addf(text, "%s", CLOSING_START);
    add_hash(text, text->data, size);
    fsdp_text_addf(text, "%s", CLOSING_END);
    if (text->failed)
        return fsdp_fail_memory(err, "a plan");
    if (text->size > FSDP_PLAN_MOST)
        return fsdp_fail(
            err, FSDP_ERR_LIMIT,
            "the plan has %zu bytes, at most %zu are allowed; convert without a plan file",
            text->size, FSDP_PLAN_MOST);
    return FSDP_OK;
}

bool fsdp_plan_is_whole(const char *text, size_t size)
{
    fsdp_text closing = {0};
    if (size < CLOSING_SIZE)
        return false;
    fsdp_text_addf(&closing, "%s", CLOSING_START);
    add_hash(&closing, text, size - CLOSING_SIZE);
    fsdp_text_addf(&closing, "%s", CLOSING_END);
    bool same = !closing.failed && closing.size == CLOSING_SIZE &&
                memcmp(text + size - CLOSING_SIZE, closing.data, CLOSING_SIZE) == 0;
    fsdp_text_release(&closing);
    return same;
}
