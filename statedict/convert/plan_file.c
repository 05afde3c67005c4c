/* The head and the end of a plan's text: see plan_file.h. The contents are plan_outputs.c's. */
#include "statedict/convert/plan_file.h"

#include "base/core/mem.h"
#include "formats/source.h"

#include <inttypes.h>
#include <string.h>
#include <unistd.h>

static const char CLOSING_START[] = "\"xxh3\": \"";
static const char CLOSING_END[] = "\"\n}\n";
enum { CLOSING_SIZE = sizeof CLOSING_START - 1 + FSDP_PLAN_HASH - 1 + sizeof CLOSING_END - 1 };

/* A text that becomes a head, and the first string in it that JSON cannot spell. */
typedef struct head_text {
    fsdp_text *text;
    const char *unspelled;
} head_text;

static void add_string(head_text *head, const char *string)
{
    if (!fsdp_utf8_valid(string, strlen(string)) && !head->unspelled)
        head->unspelled = string;
    fsdp_text_add_json_string(head->text, string, strlen(string));
}

static void add_optional(head_text *head, const char *key, const char *string)
{
    fsdp_text_addf(head->text, ",\n  \"%s\": ", key);
    if (string)
        add_string(head, string);
    else
        fsdp_text_addf(head->text, "null");
}

static void add_list(head_text *head, const char *key, const char *const *strings, size_t count)
{
    fsdp_text_addf(head->text, ",\n  \"%s\": [", key);
    for (size_t i = 0; i < count; i++) {
        fsdp_text_addf(head->text, i > 0 ? ", " : "");
        add_string(head, strings[i]);
    }
    fsdp_text_addf(head->text, "]");
}

/* A plan means the same wherever it is applied from. */
static void add_path(head_text *head, const char *path)
{
    char here[4096];
    if (path[0] == '/' || !getcwd(here, sizeof here)) {
        add_string(head, path);
        return;
    }
    char *whole = fsdp_path_join(here, path);
    if (whole)
        add_string(head, whole);
    else
        head->text->failed = true;
    if (head->unspelled == whole)
        head->unspelled = path;
    fsdp_free(whole);
}

/* --- options ---------------------------------------------------------------------------------- */

static void add_mesh(head_text *head, const fsdp_mesh *mesh)
{
    fsdp_text_addf(head->text, ",\n  \"mesh\": [");
    for (int d = 0; mesh && d < fsdp_mesh_ndim(mesh); d++) {
        fsdp_text_addf(head->text, d > 0 ? ", [" : "[");
        add_string(head, fsdp_mesh_dim_name(mesh, d));
        fsdp_text_addf(head->text, ", %" PRId64 "]", fsdp_mesh_dim_size(mesh, d));
    }
    fsdp_text_addf(head->text, "]");
}

/* Only what was given: a plan without casts has no word of them. */
static void add_casts(head_text *head, const fsdp_select_opts *select)
{
    static const char *const policies[] = {"fail", "clamp", "inf"};
    if (select->dtype)
        add_optional(head, "dtype", select->dtype);
    if (select->dtype_rule_count > 0)
        add_list(head, "dtype_for", select->dtype_rules, select->dtype_rule_count);
    if (select->on_overflow != FSDP_OVERFLOW_FAIL)
        add_optional(head, "on_overflow", policies[select->on_overflow]);
}

static void add_selection(head_text *head, const fsdp_select_opts *select)
{
    static const char *const parts[] = {"default", "all", "model", "optim"};
    add_optional(head, "only", parts[select->only]);
    add_optional(head, "include", select->include);
    add_optional(head, "exclude", select->exclude);
    add_list(head, "drop", select->drops, select->drop_count);
    add_list(head, "rename", select->renames, select->rename_count);
    add_casts(head, select);
}

static const char *spell_bool(bool value)
{
    return value ? "true" : "false";
}

/* Only when they were given, so that plans without them stay what they were. */
static void add_given(head_text *head, const fsdp_convert_opts *opts)
{
    if (opts->from_format)
        add_optional(head, "from_format", opts->from_format);
    if (opts->allow_missing)
        add_optional(head, "allow_missing", opts->allow_missing);
    if (opts->tied != FSDP_TIED_AUTO)
        add_optional(head, "tied", opts->tied == FSDP_TIED_KEEP ? "keep" : "drop");
    if (opts->copy_from) {
        fsdp_text_addf(head->text, ",\n  \"copy_from\": ");
        add_path(head, opts->copy_from);
    }
    if (opts->copy_code)
        fsdp_text_addf(head->text, ",\n  \"copy_code\": true");
}

static void add_options(head_text *head, const fsdp_planned *planned)
{
    static const char *const kinds[] = {"sharded", "full", "local"};
    const fsdp_convert_opts *opts = planned->opts;
    fsdp_text *text = head->text;
    fsdp_text_addf(text, ",\n\"options\": {\n  \"format\": ");
    add_string(head, opts->format ? opts->format : "fsdp");
    add_optional(head, "kind", kinds[opts->kind]);
    fsdp_text_addf(text, ",\n  \"world_size\": %d", opts->world);
    add_mesh(head, opts->mesh);
    fsdp_text_addf(text, ",\n  \"shard_dim\": %d,\n  \"max_shard_size\": %" PRId64, opts->shard_dim,
                   opts->max_shard_bytes);
    fsdp_text_addf(text, ",\n  \"compress\": %s,\n  \"level\": %d,\n  \"chunk\": %" PRId64,
                   spell_bool(opts->compress), opts->level,
                   opts->compress ? planned->chunk_bytes : 0);
    fsdp_text_addf(text, ",\n  \"view\": %s,\n  \"overwrite\": %s", spell_bool(!opts->no_view),
                   spell_bool(opts->overwrite));
    add_selection(head, &opts->select);
    add_given(head, opts);
    fsdp_text_addf(text, "\n}");
}

/* --- the source ------------------------------------------------------------------------------- */

static void add_file(head_text *head, const char *path, const fsdp_file_info *info, bool is_first)
{
    fsdp_text_addf(head->text, is_first ? "\n  {\"path\": " : ",\n  {\"path\": ");
    add_path(head, path);
    fsdp_text_addf(head->text, ", \"size\": %" PRId64 ", \"mtime_ns\": %" PRId64 "}", info->size,
                   info->mtime_ns);
}

static fsdp_status add_own_file(head_text *head, const fsdp_checkpoint *from, const char *name,
                                bool is_first, fsdp_error *err)
{
    fsdp_file_info info;
    char *path = fsdp_path_join(from->path, name);
    if (!path)
        return fsdp_fail_memory(err, "a path");
    int result = from->io->ops->info(from->io, path, &info);
    if (result == 0)
        add_file(head, path, &info, is_first);
    fsdp_status st =
        result == 0 ? FSDP_OK : fsdp_fail_errno(err, -result, "cannot look at '%s'", path);
    fsdp_free(path);
    return st;
}

static fsdp_status add_own_files(head_text *head, const fsdp_checkpoint *from, fsdp_error *err)
{
    fsdp_file_info info;
    if (from->is_one_file) {
        int result = from->io->ops->info(from->io, from->path, &info);
        if (result < 0)
            return fsdp_fail_errno(err, -result, "cannot look at '%s'", from->path);
        add_file(head, from->path, &info, true);
        return FSDP_OK;
    }
    FSDP_TRY(add_own_file(head, from, FSDP_MANIFEST_NAME, true, err));
    for (int i = 0; i < from->manifest.file_count; i++) {
        char name[FSDP_SHARD_NAME_SIZE];
        if (!from->readers[i])
            continue; /* it is not there (incomplete.h) */
        fsdp_shard_name(i, from->manifest.file_count, name);
        FSDP_TRY(add_own_file(head, from, name, false, err));
    }
    return FSDP_OK;
}

static fsdp_status add_sources(head_text *head, const fsdp_planned *planned, fsdp_error *err)
{
    const fsdp_checkpoint *from = planned->from;
    fsdp_text_addf(head->text, ",\n\"sources\": [");
    fsdp_status st = from->source ? FSDP_OK : add_own_files(head, from, err);
    size_t count = from->source ? fsdp_source_file_count(from->source) : 0;
    for (size_t i = 0; i < count; i++)
        add_file(head, fsdp_source_file_path(from->source, i),
                 fsdp_source_file_info(from->source, i), i == 0);
    for (size_t i = 0; planned->copies && i < planned->copies->count; i++) {
        fsdp_file_info info;
        const char *path = fsdp_copies_path(planned->copies, i, &info);
        add_file(head, path, &info, count == 0 && i == 0 && from->source);
    }
    fsdp_text_addf(head->text, "\n]");
    return st;
}

/* --- the head, the end ------------------------------------------------------------------------ */

static void add_hash(fsdp_text *text, const char *data, size_t size)
{
    fsdp_hash hash = fsdp_kernels_get()->hash(data, size);
    fsdp_text_add_hex(text, hash.bytes, sizeof hash.bytes);
}

static fsdp_status add_head(head_text *head, const fsdp_planned *planned, fsdp_error *err)
{
    fsdp_text *text = head->text;
    fsdp_text_addf(text,
                   FSDP_PLAN_START "%d,\n\"writer\": \"fsdp %s\",\n\"from\": ", FSDP_PLAN_VERSION,
                   FSDP_VERSION);
    add_path(head, planned->from->path);
    fsdp_text_addf(text, ",\n\"to\": ");
    add_path(head, planned->to);
    add_options(head, planned);
    FSDP_TRY(add_sources(head, planned, err));
    return text->failed ? fsdp_fail_memory(err, "a plan") : FSDP_OK;
}

static fsdp_status add_hashed_head(head_text *head, const fsdp_planned *planned,
                                   char hash_out[FSDP_PLAN_HASH], fsdp_error *err)
{
    fsdp_text digits = {0};
    FSDP_TRY(add_head(head, planned, err));
    add_hash(&digits, head->text->data, head->text->size);
    fsdp_status st = digits.failed ? fsdp_fail_memory(err, "a plan") : FSDP_OK;
    if (st == FSDP_OK)
        memcpy(hash_out, digits.data, FSDP_PLAN_HASH);
    fsdp_text_release(&digits);
    return st;
}

fsdp_status fsdp_plan_head(const fsdp_planned *planned, fsdp_text *text,
                           char hash_out[FSDP_PLAN_HASH], fsdp_error *err)
{
    head_text head = {.text = text};
    FSDP_TRY(add_hashed_head(&head, planned, hash_out, err));
    if (head.unspelled)
        return fsdp_fail(err, FSDP_ERR_USAGE, "'%s' is not UTF-8, and a plan cannot tell it",
                         head.unspelled);
    fsdp_text_addf(text, ",\n\"hash\": \"%s\"", hash_out);
    return FSDP_OK;
}

fsdp_status fsdp_plan_identify(const fsdp_planned *planned, char hash_out[FSDP_PLAN_HASH],
                               fsdp_error *err)
{
    fsdp_text text = {0};
    head_text head = {.text = &text};
    const char *wanted = planned->opts->plan_hash;
    fsdp_status st = add_hashed_head(&head, planned, hash_out, err);
    fsdp_text_release(&text);
    if (st == FSDP_OK && wanted && strcmp(wanted, hash_out) != 0)
        st = fsdp_fail(err, FSDP_ERR_DAMAGED,
                       "'%s' has changed since the plan was made: make it anew with --plan-out",
                       planned->from->path);
    return st;
}

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
        return fsdp_fail(err, FSDP_ERR_LIMIT,
                         "the plan has %zu bytes, at most %zu are allowed: convert without a file "
                         "of it",
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
