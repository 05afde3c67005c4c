/* The options of a plan: one table for writing and reading them. See plan_text.h. */
#include "statedict/convert/plan_text.h"

#include "base/io/io.h"

#include <inttypes.h>
#include <stddef.h>
#include <string.h>
#include <unistd.h>

typedef enum option_kind {
    OPTION_STRING,
    OPTION_TEXT, /* a string or null */
    OPTION_PATH, /* written as an absolute path */
    OPTION_WORD, /* one of a list of words */
    OPTION_INT,
    OPTION_BYTES,
    OPTION_FLAG,
    OPTION_NOT,  /* a flag that is written negated */
    OPTION_LIST, /* a list of strings */
    OPTION_MESH
} option_kind;

typedef struct plan_option {
    const char *name;
    option_kind kind;
    size_t at;                /* offset in fsdp_convert_opts */
    const char *const *words; /* of a word, up to NULL */
    size_t count_at;          /* of a list: its number of strings */
    int64_t most;             /* of a number */
    bool is_optional;         /* written only if given, so that other plans keep their hash */
} plan_option;

static const char *const kinds[] = {"sharded", "full", "local", NULL};
static const char *const parts[] = {"default", "all", "model", "optim", NULL};
static const char *const policies[] = {"fail", "clamp", "inf", NULL};
static const char *const ties[] = {"auto", "keep", "drop", NULL};
static const char *const forms[] = {"default", "nested", "flat", NULL};
static const char *const opaques[] = {"refuse", "copy", NULL};
enum { WORLD_MOST = 1 << 20, LEVEL_MOST = 22, CHUNK_MOST = 4 << 20 };

#define OPTION(spelled, what, member) \
    .name = spelled, .kind = OPTION_##what, .at = offsetof(fsdp_convert_opts, member)
#define COUNT(member) .count_at = offsetof(fsdp_convert_opts, member)
static const plan_option options[] = {
    {OPTION("format", STRING, format)},
    {OPTION("kind", WORD, kind), .words = kinds},
    {OPTION("world_size", INT, world), .most = WORLD_MOST},
    {OPTION("mesh", MESH, mesh)},
    {OPTION("shard_dim", INT, shard_dim), .most = FSDP_MAX_DIMS - 1},
    {OPTION("max_shard_size", BYTES, max_shard_bytes), .most = INT64_MAX},
    {OPTION("compress", FLAG, compress)},
    {OPTION("level", INT, level), .most = LEVEL_MOST},
    {OPTION("chunk", BYTES, chunk_bytes), .most = CHUNK_MOST},
    {OPTION("view", NOT, skip_view)},
    {OPTION("overwrite", FLAG, overwrite)},
    {OPTION("only", WORD, select.only), .words = parts},
    {OPTION("part", STRING, select.part), .is_optional = true},
    {OPTION("keep_names", FLAG, select.keep_names), .is_optional = true},
    {OPTION("include", TEXT, select.include)},
    {OPTION("exclude", TEXT, select.exclude)},
    {OPTION("drop", LIST, select.drops), COUNT(select.drop_count)},
    {OPTION("rename", LIST, select.renames), COUNT(select.rename_count)},
    {OPTION("under", STRING, select.under), .is_optional = true},
    {OPTION("dtype", STRING, select.dtype), .is_optional = true},
    {OPTION("dtype_for", LIST, select.dtype_rules), COUNT(select.dtype_rule_count),
     .is_optional = true},
    {OPTION("on_overflow", WORD, select.on_overflow), .words = policies, .is_optional = true},
    {OPTION("adapter", PATH, adapter), .is_optional = true},
    {OPTION("dequant", STRING, dequant), .is_optional = true},
    {OPTION("map", STRING, map), .is_optional = true},
    {OPTION("sizes", LIST, sizes), COUNT(size_count), .is_optional = true},
    {OPTION("from_format", STRING, open.format), .is_optional = true},
    {OPTION("allow_missing", STRING, open.allow_missing), .is_optional = true},
    {OPTION("variant", STRING, open.variant), .is_optional = true},
    {OPTION("void_as", STRING, open.void_as), .is_optional = true},
    {OPTION("like", PATH, open.like), .is_optional = true},
    {OPTION("tied", WORD, tied), .words = ties, .is_optional = true},
    {OPTION("copy_from", PATH, copy_from), .is_optional = true},
    {OPTION("copy_code", FLAG, copy_code), .is_optional = true},
    {OPTION("no_copy", FLAG, skip_copies), .is_optional = true},
    {OPTION("opaque", WORD, opaque), .words = opaques, .is_optional = true},
    {OPTION("optim", WORD, optim_form), .words = forms, .is_optional = true},
};
enum { OPTION_COUNT = sizeof options / sizeof *options };

/* A pointer to a member of the options, by its kind. */
typedef union member {
    char *bytes;
    const char **text;
    const char *const **list;
    int *number; /* enumerators, too */
    int64_t *size;
    bool *flag;
    size_t *count;
} member;

static member member_at(const fsdp_convert_opts *opts, size_t at)
{
    return (member){.bytes = (char *)(uintptr_t)opts + at};
}

/* --- spelling --------------------------------------------------------------------------------- */

static void add_string(plan_head *head, const char *string)
{
    if (!fsdp_utf8_valid(string, strlen(string)) && !head->unspelled)
        head->unspelled = string;
    fsdp_text_add_json_string(head->text, string, strlen(string));
}

void fsdp_plan_add_path(plan_head *head, const char *path)
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

static void add_list(plan_head *head, const char *const *strings, size_t count)
{
    fsdp_text_addf(head->text, "[");
    for (size_t i = 0; i < count; i++) {
        fsdp_text_addf(head->text, i > 0 ? ", " : "");
        add_string(head, strings[i]);
    }
    fsdp_text_addf(head->text, "]");
}

/* [["dp", 4], ["tp", 2]] */
static void add_mesh(plan_head *head, const fsdp_mesh *mesh)
{
    fsdp_text_addf(head->text, "[");
    for (int d = 0; mesh && d < fsdp_mesh_ndim(mesh); d++) {
        fsdp_text_addf(head->text, d > 0 ? ", [" : "[");
        add_string(head, fsdp_mesh_dim_name(mesh, d));
        fsdp_text_addf(head->text, ", %" PRId64 "]", fsdp_mesh_dim_size(mesh, d));
    }
    fsdp_text_addf(head->text, "]");
}

static void add_value(plan_head *head, const plan_option *option, const fsdp_convert_opts *opts)
{
    member at = member_at(opts, option->at);
    fsdp_text *text = head->text;
    switch (option->kind) {
    case OPTION_STRING:
    case OPTION_TEXT:
        if (*at.text)
            add_string(head, *at.text);
        else
            fsdp_text_addf(text, "null");
        break;
    case OPTION_PATH: fsdp_plan_add_path(head, *at.text); break;
    case OPTION_WORD: add_string(head, option->words[*at.number]); break;
    case OPTION_INT: fsdp_text_addf(text, "%d", *at.number); break;
    case OPTION_BYTES: fsdp_text_addf(text, "%" PRId64, *at.size); break;
    case OPTION_FLAG: fsdp_text_addf(text, *at.flag ? "true" : "false"); break;
    case OPTION_NOT: fsdp_text_addf(text, *at.flag ? "false" : "true"); break;
    case OPTION_LIST: add_list(head, *at.list, *member_at(opts, option->count_at).count); break;
    case OPTION_MESH: add_mesh(head, opts->mesh); break;
    }
}

static bool is_given(const plan_option *option, const fsdp_convert_opts *opts)
{
    member at = member_at(opts, option->at);
    switch (option->kind) {
    case OPTION_LIST: return *member_at(opts, option->count_at).count > 0;
    case OPTION_WORD: return *at.number != 0;
    case OPTION_FLAG: return *at.flag;
    default: return *at.text != NULL;
    }
}

void fsdp_plan_add_options(plan_head *head, const fsdp_convert_opts *opts)
{
    const char *before = "\n  \"";
    for (int i = 0; i < OPTION_COUNT; i++) {
        if (options[i].is_optional && !is_given(&options[i], opts))
            continue;
        fsdp_text_addf(head->text, "%s%s\": ", before, options[i].name);
        add_value(head, &options[i], opts);
        before = ",\n  \"";
    }
}

/* --- reading ---------------------------------------------------------------------------------- */

fsdp_status fsdp_plan_read_string(fsdp_json *json, fsdp_arena *arena, const char **out,
                                  fsdp_error *err)
{
    const char *data;
    size_t size;
    FSDP_TRY(fsdp_json_string(json, &data, &size, err));
    if (strlen(data) != size)
        return fsdp_json_fail(json, err, "a string with a NUL in it");
    *out = fsdp_arena_strndup(arena, data, size);
    return *out ? FSDP_OK : fsdp_fail_memory(err, json->name);
}

static fsdp_status read_number(fsdp_json *json, int64_t most, int64_t *out, fsdp_error *err)
{
    FSDP_TRY(fsdp_json_i64(json, out, err));
    return *out >= 0 && *out <= most
               ? FSDP_OK
               : fsdp_json_fail(json, err, "%" PRId64 " is out of range", *out);
}

/* The position of a string among words. */
static fsdp_status read_word(fsdp_json *json, const char *const *words, int *out, fsdp_error *err)
{
    const char *data;
    size_t size;
    FSDP_TRY(fsdp_json_string(json, &data, &size, err));
    for (*out = 0; words[*out]; ++*out)
        if (strcmp(words[*out], data) == 0)
            return FSDP_OK;
    *out = 0;
    return fsdp_json_fail(json, err, "none of the words that are known");
}

static fsdp_status read_items(fsdp_json *json, fsdp_arena *arena, const char ***items,
                              size_t *count, fsdp_error *err)
{
    size_t room = 0;
    FSDP_TRY(fsdp_json_enter_array(json, err));
    for (bool more;; ++*count) {
        FSDP_TRY(fsdp_json_next_item(json, &more, err));
        if (!more)
            return FSDP_OK;
        if (!fsdp_grow(items, &room, *count + 1, sizeof **items))
            return fsdp_fail_memory(err, json->name);
        FSDP_TRY(fsdp_plan_read_string(json, arena, &(*items)[*count], err));
    }
}

static fsdp_status read_list(fsdp_json *json, fsdp_arena *arena, const char *const **out,
                             size_t *count_out, fsdp_error *err)
{
    const char **items = NULL;
    size_t count = 0;
    fsdp_status st = read_items(json, arena, &items, &count, err);
    const char **kept = fsdp_arena_alloc(arena, count, sizeof *kept);
    if (st == FSDP_OK && !kept)
        st = fsdp_fail_memory(err, json->name);
    if (st == FSDP_OK && count > 0)
        memcpy(kept, items, count * sizeof *kept);
    fsdp_free(items);
    *out = st == FSDP_OK ? kept : NULL;
    *count_out = st == FSDP_OK ? count : 0;
    return st;
}

static fsdp_status read_mesh(fsdp_json *json, fsdp_arena *arena, fsdp_mesh **out, fsdp_error *err)
{
    const char *names[FSDP_MAX_MESH_DIMS];
    int64_t shape[FSDP_MAX_MESH_DIMS];
    int ndim = 0;
    bool more;
    FSDP_TRY(fsdp_json_enter_array(json, err));
    for (;; ndim++) {
        FSDP_TRY(fsdp_json_next_item(json, &more, err));
        if (!more)
            break;
        if (ndim == FSDP_MAX_MESH_DIMS)
            return fsdp_json_fail(json, err, "a mesh of too many dims");
        FSDP_TRY(fsdp_json_enter_array(json, err));
        FSDP_TRY(fsdp_json_next_item(json, &more, err));
        FSDP_TRY(fsdp_plan_read_string(json, arena, &names[ndim], err));
        FSDP_TRY(fsdp_json_next_item(json, &more, err));
        FSDP_TRY(read_number(json, WORLD_MOST, &shape[ndim], err));
        FSDP_TRY(fsdp_json_next_item(json, &more, err));
        if (more)
            return fsdp_json_fail(json, err, "a mesh dim is a name and a number");
    }
    return ndim > 0 ? fsdp_mesh_create(ndim, shape, names, NULL, out, err) : FSDP_OK;
}

static fsdp_status read_flag(fsdp_json *json, bool is_turned, bool *out, fsdp_error *err)
{
    FSDP_TRY(fsdp_json_bool(json, out, err));
    *out = *out != is_turned;
    return FSDP_OK;
}

static fsdp_status read_value(fsdp_json *json, const plan_option *option, fsdp_arena *arena,
                              fsdp_convert_opts *opts, fsdp_mesh **mesh, fsdp_error *err)
{
    member at = member_at(opts, option->at);
    int64_t number;
    switch (option->kind) {
    case OPTION_STRING:
    case OPTION_TEXT:
    case OPTION_PATH:
        return option->kind == OPTION_TEXT && fsdp_json_peek(json) == FSDP_JSON_NULL
                   ? fsdp_json_null(json, err)
                   : fsdp_plan_read_string(json, arena, at.text, err);
    case OPTION_WORD: return read_word(json, option->words, at.number, err);
    case OPTION_INT:
        FSDP_TRY(read_number(json, option->most, &number, err));
        *at.number = (int)number;
        return FSDP_OK;
    case OPTION_BYTES: return read_number(json, option->most, at.size, err);
    case OPTION_FLAG:
    case OPTION_NOT: return read_flag(json, option->kind == OPTION_NOT, at.flag, err);
    case OPTION_LIST:
        return read_list(json, arena, at.list, member_at(opts, option->count_at).count, err);
    case OPTION_MESH: break;
    }
    FSDP_TRY(read_mesh(json, arena, mesh, err));
    opts->mesh = *mesh;
    return FSDP_OK;
}

fsdp_status fsdp_plan_read_options(fsdp_json *json, fsdp_arena *arena, fsdp_convert_opts *opts,
                                   fsdp_mesh **mesh_out, fsdp_error *err)
{
    const char *names[OPTION_COUNT];
    fsdp_json_members members = {.names = names, .count = OPTION_COUNT};
    int which;
    for (int i = 0; i < OPTION_COUNT; i++)
        names[i] = options[i].name;
    FSDP_TRY(fsdp_json_enter_object(json, err));
    for (;;) {
        FSDP_TRY(fsdp_json_next_member(json, &members, &which, err));
        if (which < 0)
            break;
        FSDP_TRY(read_value(json, &options[which], arena, opts, mesh_out, err));
    }
    for (int i = 0; i < OPTION_COUNT; i++)
        if (!options[i].is_optional && !(members.seen >> i & 1))
            return fsdp_json_fail(json, err, "an option is missing");
    return FSDP_OK;
}
