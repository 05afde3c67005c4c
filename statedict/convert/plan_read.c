/*
 * Reading a plan that --plan-out wrote: plan_file.h. Nobody vouches for such a file, so it is parsed like any
 * other input, and before it is applied the plan is made anew and must be the same text.
 */
#include "statedict/convert/plan_file.h"

#include "base/data/json.h"
#include "base/core/mem.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* A file of the source, as it was. */
typedef struct planned_file {
    const char *path;
    int64_t size, mtime_ns;
} planned_file;

struct fsdp_order_text {
    fsdp_convert_order order;
    fsdp_io *io;
    char *path, *data;
    size_t size;
    fsdp_arena arena;
    fsdp_mesh *mesh;
    planned_file *files;
    size_t file_count, file_room;
};

typedef struct fsdp_order_text order_text;

typedef fsdp_status member_reader(order_text *plan, fsdp_json *json, int member, fsdp_error *err);

/* What is missing, members->seen tells. */
static fsdp_status read_object(order_text *plan, fsdp_json *json, fsdp_json_members *members,
                               member_reader *read, fsdp_error *err)
{
    int member;
    FSDP_TRY(fsdp_json_enter_object(json, err));
    for (;;) {
        FSDP_TRY(fsdp_json_next_member(json, members, &member, err));
        if (member < 0)
            return FSDP_OK;
        FSDP_TRY(read(plan, json, member, err));
    }
}

/* --- strings and lists ------------------------------------------------------------------------ */

static fsdp_status read_string(order_text *plan, fsdp_json *json, const char **out, fsdp_error *err)
{
    const char *data;
    size_t size;
    FSDP_TRY(fsdp_json_string(json, &data, &size, err));
    if (strlen(data) != size)
        return fsdp_json_fail(json, err, "a string with a NUL in it");
    *out = fsdp_arena_strndup(&plan->arena, data, size);
    return *out ? FSDP_OK : fsdp_fail_memory(err, plan->path);
}

static fsdp_status read_optional(order_text *plan, fsdp_json *json, const char **out,
                                 fsdp_error *err)
{
    if (fsdp_json_peek(json) == FSDP_JSON_NULL)
        return fsdp_json_null(json, err);
    return read_string(plan, json, out, err);
}

static fsdp_status read_count(fsdp_json *json, int64_t most, int64_t *out, fsdp_error *err)
{
    FSDP_TRY(fsdp_json_i64(json, out, err));
    return *out >= 0 && *out <= most
               ? FSDP_OK
               : fsdp_json_fail(json, err, "%" PRId64 " is out of range", *out);
}

static fsdp_status read_int(fsdp_json *json, int64_t most, int *out, fsdp_error *err)
{
    int64_t value;
    FSDP_TRY(read_count(json, most, &value, err));
    *out = (int)value;
    return FSDP_OK;
}

static fsdp_status read_not(fsdp_json *json, bool *out, fsdp_error *err)
{
    FSDP_TRY(fsdp_json_bool(json, out, err));
    *out = !*out;
    return FSDP_OK;
}

/* The position of a string among words. */
static fsdp_status read_word(fsdp_json *json, const char *const *words, int count, int *out,
                             fsdp_error *err)
{
    const char *data;
    size_t size;
    FSDP_TRY(fsdp_json_string(json, &data, &size, err));
    for (*out = 0; *out < count; ++*out)
        if (strcmp(words[*out], data) == 0)
            return FSDP_OK;
    return fsdp_json_fail(json, err, "none of the words that are known");
}

static fsdp_status read_list(order_text *plan, fsdp_json *json, const char *const **out,
                             size_t *count_out, fsdp_error *err)
{
    const char **items = NULL;
    size_t count = 0, room = 0;
    fsdp_status st = fsdp_json_enter_array(json, err);
    for (bool more = true; st == FSDP_OK;) {
        st = fsdp_json_next_item(json, &more, err);
        if (st != FSDP_OK || !more)
            break;
        if (!fsdp_grow(&items, &room, count + 1, sizeof *items))
            st = fsdp_fail_memory(err, plan->path);
        else
            st = read_string(plan, json, &items[count++], err);
    }
    const char **kept = fsdp_arena_alloc(&plan->arena, count, sizeof *kept);
    if (st == FSDP_OK && !kept)
        st = fsdp_fail_memory(err, plan->path);
    if (kept && count > 0)
        memcpy(kept, items, count * sizeof *kept);
    fsdp_free(items);
    *out = kept;
    *count_out = count;
    return st;
}

/* --- options ---------------------------------------------------------------------------------- */

/* [["dp", 4], ["tp", 2]] */
static fsdp_status read_mesh(order_text *plan, fsdp_json *json, fsdp_error *err)
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
        FSDP_TRY(read_string(plan, json, &names[ndim], err));
        FSDP_TRY(fsdp_json_next_item(json, &more, err));
        FSDP_TRY(read_count(json, 1 << 20, &shape[ndim], err));
        FSDP_TRY(fsdp_json_next_item(json, &more, err));
        if (more)
            return fsdp_json_fail(json, err, "a mesh dim is a name and a number");
    }
    return ndim > 0 ? fsdp_mesh_create(ndim, shape, names, NULL, &plan->mesh, err) : FSDP_OK;
}

static const char *const option_names[] = {
    "format",      "kind",        "world_size",    "mesh",   "shard_dim", "max_shard_size",
    "compress",    "level",       "chunk",         "view",   "overwrite", "only",
    "include",     "exclude",     "drop",          "rename", "dtype",     "dtype_for",
    "on_overflow", "from_format", "allow_missing", "tied",   "copy_from", "copy_code"};
enum {
    OPTION_FORMAT,
    OPTION_KIND,
    OPTION_WORLD,
    OPTION_MESH,
    OPTION_DIM,
    OPTION_SHARD_SIZE,
    OPTION_COMPRESS,
    OPTION_LEVEL,
    OPTION_CHUNK,
    OPTION_VIEW,
    OPTION_OVERWRITE,
    OPTION_ONLY,
    OPTION_INCLUDE,
    OPTION_EXCLUDE,
    OPTION_DROP,
    OPTION_RENAME,
    OPTION_REQUIRED, /* those before it stand in every plan */
    OPTION_DTYPE = OPTION_REQUIRED,
    OPTION_DTYPE_FOR,
    OPTION_ON_OVERFLOW,
    OPTION_FROM_FORMAT,
    OPTION_ALLOW_MISSING,
    OPTION_TIED,
    OPTION_COPY_FROM,
    OPTION_COPY_CODE,
    OPTION_COUNT
};

static fsdp_status read_selection(order_text *plan, fsdp_json *json, int option, fsdp_error *err)
{
    static const char *const parts[] = {"default", "all", "model", "optim"};
    static const char *const policies[] = {"fail", "clamp", "inf"};
    fsdp_select_opts *select = &plan->order.opts.select;
    int word = 0;
    switch (option) {
    case OPTION_ONLY:
        FSDP_TRY(read_word(json, parts, 4, &word, err));
        select->only = (fsdp_only)word;
        return FSDP_OK;
    case OPTION_INCLUDE: return read_optional(plan, json, &select->include, err);
    case OPTION_EXCLUDE: return read_optional(plan, json, &select->exclude, err);
    case OPTION_DROP: return read_list(plan, json, &select->drops, &select->drop_count, err);
    case OPTION_DTYPE: return read_string(plan, json, &select->dtype, err);
    case OPTION_DTYPE_FOR:
        return read_list(plan, json, &select->dtype_rules, &select->dtype_rule_count, err);
    case OPTION_ON_OVERFLOW:
        FSDP_TRY(read_word(json, policies, 3, &word, err));
        select->on_overflow = (fsdp_on_overflow)word;
        return FSDP_OK;
    default: return read_list(plan, json, &select->renames, &select->rename_count, err);
    }
}

/* Those that need not be there. */
static fsdp_status read_given(order_text *plan, fsdp_json *json, int option, fsdp_error *err)
{
    static const char *const ties[] = {"auto", "keep", "drop"};
    fsdp_convert_opts *opts = &plan->order.opts;
    int word = 0;
    switch (option) {
    case OPTION_FROM_FORMAT: return read_string(plan, json, &opts->from_format, err);
    case OPTION_ALLOW_MISSING: return read_string(plan, json, &opts->allow_missing, err);
    case OPTION_COPY_FROM: return read_string(plan, json, &opts->copy_from, err);
    case OPTION_COPY_CODE: return fsdp_json_bool(json, &opts->copy_code, err);
    default:
        FSDP_TRY(read_word(json, ties, 3, &word, err));
        opts->tied = (fsdp_tied)word;
        return FSDP_OK;
    }
}

static fsdp_status read_option(order_text *plan, fsdp_json *json, int option, fsdp_error *err)
{
    enum { WORLD_MOST = 1 << 20, LEVEL_MOST = 22 };
    static const char *const kinds[] = {"sharded", "full", "local"};
    fsdp_convert_opts *opts = &plan->order.opts;
    int word = 0;
    switch (option) {
    case OPTION_FORMAT: return read_string(plan, json, &opts->format, err);
    case OPTION_KIND:
        FSDP_TRY(read_word(json, kinds, 3, &word, err));
        opts->kind = (fsdp_kind)word;
        return FSDP_OK;
    case OPTION_WORLD: return read_int(json, WORLD_MOST, &opts->world, err);
    case OPTION_MESH: return read_mesh(plan, json, err);
    case OPTION_DIM: return read_int(json, FSDP_MAX_DIMS - 1, &opts->shard_dim, err);
    case OPTION_SHARD_SIZE: return read_count(json, INT64_MAX, &opts->max_shard_bytes, err);
    case OPTION_COMPRESS: return fsdp_json_bool(json, &opts->compress, err);
    case OPTION_LEVEL: return read_int(json, LEVEL_MOST, &opts->level, err);
    case OPTION_CHUNK: return read_count(json, FSDP_BLOCK_BYTES, &opts->chunk_bytes, err);
    case OPTION_VIEW: return read_not(json, &opts->no_view, err);
    case OPTION_OVERWRITE: return fsdp_json_bool(json, &opts->overwrite, err);
    default:
        return option >= OPTION_FROM_FORMAT ? read_given(plan, json, option, err)
                                            : read_selection(plan, json, option, err);
    }
}

static fsdp_status read_options(order_text *plan, fsdp_json *json, fsdp_error *err)
{
    fsdp_json_members members = {.names = option_names, .count = OPTION_COUNT};
    FSDP_TRY(read_object(plan, json, &members, read_option, err));
    const uint64_t required = ((uint64_t)1 << OPTION_REQUIRED) - 1;
    if ((members.seen & required) != required)
        return fsdp_json_fail(json, err, "an option is missing");
    plan->order.opts.mesh = plan->mesh;
    return FSDP_OK;
}

/* --- the source's files ----------------------------------------------------------------------- */

static fsdp_status read_file(order_text *plan, fsdp_json *json, fsdp_error *err)
{
    static const char *const names[] = {"path", "size", "mtime_ns"};
    fsdp_json_members members = {.names = names, .count = 3};
    planned_file file = {0};
    int member;
    FSDP_TRY(fsdp_json_enter_object(json, err));
    for (;;) {
        FSDP_TRY(fsdp_json_next_member(json, &members, &member, err));
        if (member < 0)
            break;
        if (member == 0)
            FSDP_TRY(read_string(plan, json, &file.path, err));
        else
            FSDP_TRY(fsdp_json_i64(json, member == 1 ? &file.size : &file.mtime_ns, err));
    }
    if (members.seen != 7)
        return fsdp_json_fail(json, err, "a source needs path, size and mtime_ns");
    if (!fsdp_grow(&plan->files, &plan->file_room, plan->file_count + 1, sizeof file))
        return fsdp_fail_memory(err, plan->path);
    plan->files[plan->file_count++] = file;
    return FSDP_OK;
}

static fsdp_status read_files(order_text *plan, fsdp_json *json, fsdp_error *err)
{
    bool more;
    FSDP_TRY(fsdp_json_enter_array(json, err));
    for (;;) {
        FSDP_TRY(fsdp_json_next_item(json, &more, err));
        if (!more)
            return FSDP_OK;
        FSDP_TRY(read_file(plan, json, err));
    }
}

/* --- the whole text --------------------------------------------------------------------------- */

/* Members that are not here follow from those that are. */
static fsdp_status read_member(order_text *plan, fsdp_json *json, int member, fsdp_error *err)
{
    switch (member) {
    case 0: return read_string(plan, json, &plan->order.from, err);
    case 1: return read_string(plan, json, &plan->order.to, err);
    case 2: return read_options(plan, json, err);
    case 3: return read_files(plan, json, err);
    default: return read_string(plan, json, &plan->order.opts.plan_hash, err);
    }
}

static fsdp_status read_members(order_text *plan, fsdp_json *json, fsdp_error *err)
{
    static const char *const names[] = {"from", "to", "options", "sources", "hash"};
    fsdp_json_members members = {.names = names, .count = 5};
    FSDP_TRY(read_object(plan, json, &members, read_member, err));
    if (members.seen != 31)
        return fsdp_json_fail(json, err, "a plan needs from, to, options, sources and hash");
    return fsdp_json_finish(json, err);
}

static fsdp_status check_version(const order_text *plan, fsdp_error *err)
{
    size_t start = sizeof FSDP_PLAN_START - 1;
    if (plan->size <= start || memcmp(plan->data, FSDP_PLAN_START, start) != 0)
        return fsdp_fail(err, FSDP_ERR_NOT_FOUND, "'%s' is not a plan of fsdp-convert", plan->path);
    long version = strtol(plan->data + start, NULL, 10);
    if (version > FSDP_PLAN_VERSION)
        return fsdp_fail(err, FSDP_ERR_DAMAGED,
                         "'%s' is a plan of version %ld, and %d is the last one that is known: it "
                         "needs a newer fsdp",
                         plan->path, version, FSDP_PLAN_VERSION);
    if (version == FSDP_PLAN_VERSION && fsdp_plan_is_whole(plan->data, plan->size))
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_DAMAGED,
                     "'%s' is damaged, or was edited: make the plan anew with --plan-out",
                     plan->path);
}

static fsdp_status read_plan(order_text *plan, const char *path, fsdp_error *err)
{
    plan->path = fsdp_strndup(path, strlen(path));
    if (!plan->path)
        return fsdp_fail_memory(err, path);
    FSDP_TRY(fsdp_io_read_file(plan->io, path, FSDP_PLAN_MOST, &plan->data, &plan->size, err));
    FSDP_TRY(check_version(plan, err));
    fsdp_json json;
    fsdp_json_init(&json, plan->data, plan->size, plan->path);
    fsdp_status st = read_members(plan, &json, err);
    fsdp_json_release(&json);
    return st;
}

fsdp_status fsdp_convert_order_open(const char *path, fsdp_io *io, fsdp_convert_order **order_out,
                                    fsdp_error *err)
{
    order_text *plan = fsdp_alloc(1, sizeof *plan);
    if (!plan)
        return fsdp_fail_memory(err, path);
    plan->order.text = plan;
    plan->io = io ? io : fsdp_io_posix();
    plan->order.opts.io = io;
    fsdp_status st = read_plan(plan, path, err);
    if (st == FSDP_OK)
        *order_out = &plan->order;
    else
        fsdp_convert_order_close(&plan->order);
    return st;
}

void fsdp_convert_order_close(fsdp_convert_order *order)
{
    if (!order)
        return;
    order_text *plan = order->text;
    fsdp_arena_release(&plan->arena);
    fsdp_mesh_free(plan->mesh);
    fsdp_free(plan->files);
    fsdp_free(plan->data);
    fsdp_free(plan->path);
    fsdp_free(plan);
}

/* --- is it still true? ------------------------------------------------------------------------ */

/* "2026-11-21 17:31:10.730428933 UTC" */
static const char *spell_time(int64_t ns, char *out, size_t room)
{
    const int64_t second = 1000000000;
    time_t seconds = (time_t)(ns / second);
    struct tm parts;
    char date[40];
    if (ns < 0 || !gmtime_r(&seconds, &parts) ||
        strftime(date, sizeof date, "%Y-%m-%d %H:%M:%S", &parts) == 0)
        snprintf(out, room, "%" PRId64 " ns after 1970", ns);
    else
        snprintf(out, room, "%s.%09d UTC", date, (int)(ns % second));
    return out;
}

static fsdp_status check_file(const order_text *plan, const planned_file *file, fsdp_error *err)
{
    fsdp_file_info info;
    int result = plan->io->ops->info(plan->io, file->path, &info);
    if (result == -ENOENT)
        return fsdp_fail(err, FSDP_ERR_DAMAGED, "'%s' is gone since '%s' was made", file->path,
                         plan->path);
    if (result < 0)
        return fsdp_fail_errno(err, -result, "cannot look at '%s'", file->path);
    if (info.size != file->size)
        return fsdp_fail(err, FSDP_ERR_DAMAGED,
                         "'%s' has changed since '%s' was made: it has %" PRId64
                         " bytes and had %" PRId64,
                         file->path, plan->path, info.size, file->size);
    char now[80], then[80];
    if (info.mtime_ns == file->mtime_ns)
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_DAMAGED,
                     "'%s' has changed since '%s' was made: it was written %s, the plan says %s",
                     file->path, plan->path, spell_time(info.mtime_ns, now, sizeof now),
                     spell_time(file->mtime_ns, then, sizeof then));
}

fsdp_status fsdp_convert_order_check(const fsdp_convert_order *order, fsdp_error *err)
{
    const order_text *plan = order->text;
    fsdp_text now = {0};
    for (size_t i = 0; i < plan->file_count; i++)
        FSDP_TRY(check_file(plan, &plan->files[i], err));
    fsdp_convert_opts opts = order->opts;
    opts.plan_hash = NULL;
    fsdp_status st = fsdp_convert_plan_text(order->from, order->to, &opts, NULL, &now, err);
    if (st == FSDP_OK && (now.size != plan->size || memcmp(now.data, plan->data, now.size) != 0))
        st = fsdp_fail(err, FSDP_ERR_DAMAGED,
                       "'%s' is not what this version would do with '%s' now: make the plan anew "
                       "with --plan-out",
                       plan->path, order->from);
    fsdp_text_release(&now);
    return st;
}
