/*
 * The options of a conversion as a table, and a plan as a file: the text (its head, its contents, its end),
 * writing it whole or not at all, and reading it back. See plan_file.h.
 */
#include "statedict/convert/plan_file.h"
#include "base/core/mem.h"
#include "base/io/io.h"
#include "statedict/checkpoint/checkpoint_internal.h"
#include "statedict/commit/commit_internal.h"
#include "statedict/convert/convert_job.h"
#include "statedict/sd/access.h"
#include "statedict/sd/layout_internal.h"

#include <errno.h>
#include <inttypes.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

/* === options ================================================================================== */

/*
 * The options of a conversion as one table: of it are made the command line of fsdp-convert, its help and its
 * completion (tools/convert/convert_options.c), and here the options of a plan. fsdp-convert(1) and
 * docs/formats.md are compared with it (tests/unit/statedict/convert/test_plan_options.c).
 */

static const char *const kinds[] = {"sharded", "full", "local", NULL};
static const char *const part_words[] = {"default", "all", "model", "optim", NULL};
static const char *const policies[] = {"fail", "clamp", "inf", NULL};
static const char *const tie_words[] = {"auto", "keep", "drop", NULL};
static const char *const forms[] = {"default", "nested", "flat", NULL};
static const char *const opaques[] = {"refuse", "copy", NULL};
static const char *const plain_types[] = {"bf16", "f32", "f16", NULL};
enum { WORLD_MOST = 1 << 20, LEVEL_MOST = 22, CHUNK_MOST = 4 << 20 };

const char *fsdp_convert_format_at(size_t i)
{
    const fsdp_format *format;
    for (size_t at = 0; (format = fsdp_format_at(at)) != NULL; at++)
        if (format->writer && i-- == 0)
            return format->name;
    return NULL;
}

const char *fsdp_convert_format_of(const char *path)
{
    const fsdp_format *format;
    if (!path)
        return NULL;
    size_t size = strlen(path);
    while (size > 0 && path[size - 1] == '/')
        size--;
    for (size_t i = 0; (format = fsdp_format_at(i)) != NULL; i++)
        for (const char *const *suffix = format->suffixes; *suffix; suffix++) {
            size_t length = strlen(*suffix);
            if (size > length && memcmp(path + size - length, *suffix, length) == 0)
                return format->name;
        }
    return "hf";
}

/* The formats that are read. */
static const char *source_at(size_t i)
{
    const fsdp_format *format;
    for (size_t at = 0; (format = fsdp_format_at(at)) != NULL; at++)
        if ((format->reads_file || format->reads_directory) && i-- == 0)
            return format->name;
    return NULL;
}

static const char *dtype_at(size_t i)
{
    return i == 0 ? "keep" : fsdp_castable_at(i - 1);
}

#define TYPED(spelled, what, place, needs, says)                                               \
    .name = spelled, .kind = FSDP_OPTION_##what, .offset = offsetof(fsdp_convert_opts, place), \
    .value = needs, .help = says
#define UNTYPED(what, place) \
    .kind = FSDP_OPTION_##what, .offset = offsetof(fsdp_convert_opts, place)
#define COUNT(place) .count_offset = offsetof(fsdp_convert_opts, place)
#define GROUP(name) .group = FSDP_OPTIONS_##name
#define NEEDS(cap) .capability = offsetof(fsdp_caps, cap)
static const fsdp_convert_option options[] = {
    {TYPED(
         "to", TEXT, format, "FORMAT",
         "fsdp, hf, safetensors, dcp, megatron, torch, fsdp-file, npz, npy, gguf, llmc, universal"),
     .member = "format", GROUP(TARGET), .word_at = fsdp_convert_format_at, .is_usual = true},
    {TYPED("kind", WORD, kind, "KIND", "fsdp: sharded (default), full or local"), .member = "kind",
     GROUP(TARGET), .words = kinds, NEEDS(has_kinds)},
    {TYPED("world-size", INT, world, "N", "ranks of the result (default: as SRC)"),
     .member = "world_size", GROUP(TARGET), .least = 1, .most = WORLD_MOST, .is_usual = true},
    {TYPED("mesh", MESH, mesh, "NAME=N,...", "mesh of the result, such as dp=4,tp=2"),
     .member = "mesh", GROUP(TARGET)},
    {TYPED("shard-dim", INT, shard_dim, "D", "tensor dim that is cut (default 0)"),
     .member = "shard_dim", GROUP(TARGET), .most = FSDP_MAX_DIMS - 1},
    {TYPED("max-shard-size", BYTES, max_shard_bytes, "SIZE", "hf: bytes in a file (default: 50G)"),
     .member = "max_shard_size", GROUP(TARGET), .most = INT64_MAX, NEEDS(splits_files)},
    {TYPED("compress", FLAG, compress, "zstd[:L]",
           "byte shuffle + zstd; level 0 (default) is fastest"),
     .member = "compress", GROUP(TARGET), NEEDS(compresses)},
    {UNTYPED(INT, level), .member = "level", .most = LEVEL_MOST},
    {UNTYPED(BYTES, chunk_bytes), .member = "chunk", .most = CHUNK_MOST},
    {TYPED("no-view", FLAG, skip_view, NULL, "no index.h5 for other programs"), .member = "view",
     GROUP(TARGET), .is_negated = true, NEEDS(has_kinds)},
    {TYPED("overwrite", FLAG, overwrite, NULL, "replace DST when it exists"), .member = "overwrite",
     GROUP(SAFETY), .is_usual = true},
    {TYPED("only", WORD, select.only, "PART", "all, model or optim (default: all; model for hf)"),
     .member = "only", GROUP(TAKEN), .words = part_words, .first_word = 1, .is_usual = true},
    {TYPED("part", TEXT, select.part, "NAME", "only what is below NAME, such as ema"),
     .member = "part", GROUP(TAKEN), .is_optional = true},
    {UNTYPED(FLAG, select.keep_names), .member = "keep_names", .is_optional = true},
    {UNTYPED(TEXT, select.include), .member = "include"},
    {UNTYPED(TEXT, select.exclude), .member = "exclude"},
    {TYPED("drop", LIST, select.drops, "WHAT",
           "values, opaque, optim, dtype:T, tensors:KIND or a regex"),
     .member = "drop", GROUP(TAKEN), COUNT(select.drop_count), .is_usual = true},
    {TYPED("rename", LIST, select.renames, "s/RE/NEW/", "rename entries; repeatable, in order"),
     .member = "rename", GROUP(NAMES), COUNT(select.rename_count), .is_usual = true},
    {TYPED("under", TEXT, select.under, "KEY",
           "dcp, torch, fsdp: every entry below KEY, such as model"),
     .member = "under", GROUP(NAMES), .is_optional = true, NEEDS(takes_under)},
    {TYPED("dtype", TEXT, select.dtype, "T",
           "cast the model: keep, f32, bf16, f16, f64, f8e4m3, ..."),
     .member = "dtype", GROUP(NUMBERS), .word_at = dtype_at, .takes_others = true,
     .is_optional = true, .is_usual = true},
    {TYPED("dtype-for", LIST, select.dtype_rules, "RE=T",
           "cast names that match; the first rule wins"),
     .member = "dtype_for", GROUP(NUMBERS), COUNT(select.dtype_rule_count), .is_optional = true},
    {TYPED("on-overflow", WORD, select.on_overflow, "HOW",
           "overflow of a cast: fail (default), clamp or inf"),
     .member = "on_overflow", GROUP(NUMBERS), .words = policies, .is_optional = true},
    {TYPED("adapter", PATH, adapter, "DIR", "merge the adapter of PEFT (LoRA, DoRA) in DIR"),
     .member = "adapter", GROUP(NUMBERS), .is_optional = true},
    {TYPED("dequant", TEXT, dequant, "T", "quantized weights as plain ones: bf16, f32 or f16"),
     .member = "dequant", GROUP(NUMBERS), .words = plain_types, .is_optional = true},
    {TYPED("map", TEXT, map, "MAP", "names of another framework: a built-in map, a file, or none"),
     .member = "map", GROUP(NAMES), .is_optional = true, .is_usual = true},
    {TYPED("size", LIST, sizes, "NAME=N", "a size that the map needs, such as heads=32"),
     .member = "sizes", GROUP(NAMES), COUNT(size_count), .is_optional = true},
    {TYPED("from", TEXT, open.format, "FORMAT", "format of SRC (default: by its bytes)"),
     .member = "from_format", GROUP(SOURCE), .word_at = source_at, .is_optional = true},
    {TYPED("allow-missing", TEXT, open.allow_missing, "RE", "leave out names that files lack"),
     .member = "allow_missing", GROUP(SOURCE), .is_optional = true},
    {TYPED("variant", TEXT, open.variant, "NAME", "of SRC the files model.NAME.safetensors"),
     .member = "variant", GROUP(SOURCE), .is_optional = true},
    {TYPED("void-as", TEXT, open.void_as, "T", "npz: dtype of arrays of raw bytes, |V2: bf16"),
     .member = "void_as", GROUP(SOURCE), .is_optional = true},
    {TYPED("like", PATH, open.like, "MODEL", "ranks of FSDP1: a model with the parameters' shapes"),
     .member = "like", GROUP(SOURCE), .is_optional = true},
    {TYPED("tied", WORD, tied, "MODE", "names of one tensor: auto, keep or drop"), .member = "tied",
     GROUP(NAMES), .words = tie_words, .is_optional = true},
    {TYPED("copy-from", PATH, copy_from, "DIR", "hf: config.json, tokenizer, ... from DIR"),
     .member = "copy_from", GROUP(TARGET), .is_optional = true, .is_usual = true,
     NEEDS(takes_config), .or_map = true},
    {TYPED("copy-code", FLAG, copy_code, NULL, "also copy *.py, and keep auto_map"),
     .member = "copy_code", GROUP(TARGET), .is_optional = true},
    {TYPED("no-copy", FLAG, skip_copies, NULL, "hf: not what lies beside the weights of SRC"),
     .member = "no_copy", GROUP(TARGET), .is_optional = true},
    {TYPED("opaque", WORD, opaque, "HOW", "objects of unknown classes: refuse or copy"),
     .member = "opaque", GROUP(TAKEN), .words = opaques, .is_optional = true},
    {TYPED("optim", WORD, optim_form, "FORM", "dcp: hyper-parameters nested or flat"),
     .member = "optim", GROUP(TARGET), .words = forms, .first_word = 1, .is_optional = true,
     NEEDS(forms_groups)},
    {TYPED("resume", FLAG, resume, NULL, "resume the same conversion after a stop"), GROUP(SAFETY)},
    {TYPED("no-verify", FLAG, skip_verify, NULL, "do not read the result back"), GROUP(SAFETY)},
    {TYPED("no-sync", FLAG, skip_fsync, NULL, "leave durability to the operating system"),
     GROUP(SAFETY)},
    {TYPED("bwlimit", BYTES, bytes_per_second, "RATE", "bytes per second, read and written: 100M"),
     GROUP(RUNNING)},
};
enum { OPTION_COUNT = sizeof options / sizeof *options };

const fsdp_convert_option *fsdp_convert_option_at(size_t i)
{
    return i < OPTION_COUNT ? &options[i] : NULL;
}

/* Counts the rows of a plan, which come first. */
static int planned_count(void)
{
    int count = 0;
    while (count < OPTION_COUNT && options[count].member)
        count++;
    return count;
}

/* A pointer to a member of the options, by its kind. */
typedef union option_member {
    char *bytes;
    const char **text;
    const char *const **list;
    int *number; /* enumerators, too */
    int64_t *size;
    bool *flag;
    size_t *count;
} option_member;

static option_member member_at(const fsdp_convert_opts *opts, size_t at)
{
    return (option_member){.bytes = (char *)(uintptr_t)opts + at};
}

/* --- spelling --------------------------------------------------------------------------------- */

static void add_string(plan_head *head, const char *string)
{
    if (!fsdp_utf8_valid(string, strlen(string)) && !head->unspelled)
        head->unspelled = string;
    fsdp_text_add_json_string(head->text, string, strlen(string));
}

/* Adds an absolute path, so that the plan does not depend on the current directory. */
static void add_path(plan_head *head, const char *path)
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

static void add_value(plan_head *head, const fsdp_convert_option *option,
                      const fsdp_convert_opts *opts)
{
    option_member at = member_at(opts, option->offset);
    fsdp_text *text = head->text;
    switch (option->kind) {
    case FSDP_OPTION_TEXT:
        if (*at.text)
            add_string(head, *at.text);
        else
            fsdp_text_addf(text, "null");
        break;
    case FSDP_OPTION_PATH: add_path(head, *at.text); break;
    case FSDP_OPTION_WORD: add_string(head, option->words[*at.number]); break;
    case FSDP_OPTION_INT: fsdp_text_addf(text, "%d", *at.number); break;
    case FSDP_OPTION_BYTES: fsdp_text_addf(text, "%" PRId64, *at.size); break;
    case FSDP_OPTION_FLAG:
        fsdp_text_addf(text, *at.flag != option->is_negated ? "true" : "false");
        break;
    case FSDP_OPTION_LIST:
        add_list(head, *at.list, *member_at(opts, option->count_offset).count);
        break;
    case FSDP_OPTION_MESH: add_mesh(head, opts->mesh); break;
    }
}

static bool is_given(const fsdp_convert_option *option, const fsdp_convert_opts *opts)
{
    option_member at = member_at(opts, option->offset);
    switch (option->kind) {
    case FSDP_OPTION_LIST: return *member_at(opts, option->count_offset).count > 0;
    case FSDP_OPTION_WORD: return *at.number != 0;
    case FSDP_OPTION_FLAG: return *at.flag;
    default: return *at.text != NULL;
    }
}

void fsdp_plan_add_options(plan_head *head, const fsdp_convert_opts *opts)
{
    const char *before = "\n  \"";
    for (int i = 0; i < planned_count(); i++) {
        if (options[i].is_optional && !is_given(&options[i], opts))
            continue;
        fsdp_text_addf(head->text, "%s%s\": ", before, options[i].member);
        add_value(head, &options[i], opts);
        before = ",\n  \"";
    }
}

/* --- reading ---------------------------------------------------------------------------------- */

static fsdp_status read_string(fsdp_json *json, fsdp_arena *arena, const char **out,
                               fsdp_error *err)
{
    const char *data;
    size_t size;
    FSDP_TRY(fsdp_json_string(json, &data, &size, err));
    if (strlen(data) != size)
        return fsdp_json_fail(json, err, "a string holds a NUL");
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
    return fsdp_json_fail(json, err, "the word is unknown");
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
        FSDP_TRY(read_string(json, arena, &(*items)[*count], err));
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
            return fsdp_json_fail(json, err, "the mesh has too many dims");
        FSDP_TRY(fsdp_json_enter_array(json, err));
        FSDP_TRY(fsdp_json_next_item(json, &more, err));
        FSDP_TRY(read_string(json, arena, &names[ndim], err));
        FSDP_TRY(fsdp_json_next_item(json, &more, err));
        FSDP_TRY(read_number(json, WORLD_MOST, &shape[ndim], err));
        FSDP_TRY(fsdp_json_next_item(json, &more, err));
        if (more)
            return fsdp_json_fail(json, err, "a mesh dim is a name and a number");
    }
    return ndim > 0 ? fsdp_mesh_create(ndim, shape, names, NULL, out, err) : FSDP_OK;
}

static fsdp_status read_flag(fsdp_json *json, bool is_negated, bool *out, fsdp_error *err)
{
    FSDP_TRY(fsdp_json_bool(json, out, err));
    *out = *out != is_negated;
    return FSDP_OK;
}

static fsdp_status read_value(fsdp_json *json, const fsdp_convert_option *option, fsdp_arena *arena,
                              fsdp_convert_opts *opts, fsdp_mesh **mesh, fsdp_error *err)
{
    option_member at = member_at(opts, option->offset);
    int64_t number;
    switch (option->kind) {
    case FSDP_OPTION_TEXT:
    case FSDP_OPTION_PATH:
        return option->kind == FSDP_OPTION_TEXT && fsdp_json_peek(json) == FSDP_JSON_NULL
                   ? fsdp_json_null(json, err)
                   : read_string(json, arena, at.text, err);
    case FSDP_OPTION_WORD: return read_word(json, option->words, at.number, err);
    case FSDP_OPTION_INT:
        FSDP_TRY(read_number(json, option->most, &number, err));
        *at.number = (int)number;
        return FSDP_OK;
    case FSDP_OPTION_BYTES: return read_number(json, option->most, at.size, err);
    case FSDP_OPTION_FLAG: return read_flag(json, option->is_negated, at.flag, err);
    case FSDP_OPTION_LIST:
        return read_list(json, arena, at.list, member_at(opts, option->count_offset).count, err);
    case FSDP_OPTION_MESH: break;
    }
    FSDP_TRY(read_mesh(json, arena, mesh, err));
    opts->mesh = *mesh;
    return FSDP_OK;
}

fsdp_status fsdp_plan_read_options(fsdp_json *json, fsdp_arena *arena, fsdp_convert_opts *opts,
                                   fsdp_mesh **mesh_out, fsdp_error *err)
{
    const char *names[OPTION_COUNT];
    const int count = planned_count();
    fsdp_json_members members = {.names = names, .count = count};
    int which;
    for (int i = 0; i < count; i++)
        names[i] = options[i].member;
    FSDP_TRY(fsdp_json_enter_object(json, err));
    for (;;) {
        FSDP_TRY(fsdp_json_next_member(json, &members, &which, err));
        if (which < 0)
            break;
        FSDP_TRY(read_value(json, &options[which], arena, opts, mesh_out, err));
    }
    for (int i = 0; i < count; i++)
        if (!options[i].is_optional && !(members.seen >> i & 1))
            return fsdp_json_fail(json, err, "an option is missing");
    return FSDP_OK;
}

/* === the text ================================================================================= */

#define FSDP_PLAN_START "{\"fsdp_plan\": "

#define FSDP_PLAN_MOST ((size_t)1 << 30) /* bytes of a plan */

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

static void add_source(spelling *out, const char *path, int64_t size, int64_t mtime_ns)
{
    fsdp_text_addf(out->text, out->listed++ == 0 ? "\n  {\"path\": " : ",\n  {\"path\": ");
    add_path(&out->head, path);
    fsdp_text_addf(out->text, ", \"size\": %" PRId64 ", \"mtime_ns\": %" PRId64 "}", size,
                   mtime_ns);
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
    add_source(out, path, info->size, info->mtime_ns);
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
    add_path(&out->head, job->from->path);
    fsdp_text_addf(out->text, ",\n\"to\": ");
    add_path(&out->head, job->to);
    fsdp_text_addf(out->text, ",\n\"options\": {");
    fsdp_plan_add_options(&out->head, &opts);
    fsdp_text_addf(out->text, "\n},\n\"sources\": [");
    FSDP_TRY(fsdp_checkpoint_each_file(job->from, add_numbered, out, err));
    for (size_t i = 0; i < job->copies.count; i++) {
        const fsdp_copied_file *file = &job->copies.files[i];
        if (file->path)
            add_source(out, file->path, file->size, file->mtime_ns);
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
        const char *name = copies->files[i].name;
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

/* Adds the whole text of a prepared job. FSDP_ERR_USAGE for paths and expressions that JSON cannot spell. */
static fsdp_status spell_plan(convert_job *job, const fsdp_convert_plan *plan, fsdp_text *text,
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

/* True when that last hash matches. */
static bool is_whole(const char *text, size_t size)
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

/* === writing ================================================================================== */

/* Only an earlier plan may be replaced; another file at the path is most likely a mistake. */
static fsdp_status check_place(fsdp_io *io, const char *path, fsdp_error *err)
{
    char start[sizeof FSDP_PLAN_START] = "";
    fsdp_error why = {0};
    fsdp_file *file = NULL;
    fsdp_status st = fsdp_io_open(io, path, FSDP_IO_READ | FSDP_IO_BENEATH, &file, &why);
    if (why.errnum == ENOENT)
        return FSDP_OK;
    bool is_other = why.errnum == EISDIR || why.errnum == EINVAL || why.errnum == ELOOP;
    if (st != FSDP_OK && !is_other) {
        if (err)
            *err = why;
        return st;
    }
    ssize_t n = file ? file->ops->pread(file, start, sizeof start - 1, 0) : 0;
    (void)fsdp_io_close(&file, path, NULL); /* only read */
    if (n < 0)
        return fsdp_fail_errno(err, (int)-n, "cannot read '%s'", path);
    if (n == sizeof start - 1 && memcmp(start, FSDP_PLAN_START, sizeof start - 1) == 0)
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_EXISTS, "'%s' exists and is not a plan; it is not replaced",
                     path);
}

/* --- checking the path ------------------------------------------------------------------------ */

/* True when both paths name one file, which need not exist. */
static bool are_one_name(fsdp_io *io, const char *a, const char *b)
{
    char *left = NULL, *right = NULL, *left_parent = NULL, *right_parent = NULL;
    bool same = fsdp_path_split(a, &left, &left_parent, NULL) == FSDP_OK &&
                fsdp_path_split(b, &right, &right_parent, NULL) == FSDP_OK &&
                fsdp_paths_are_same(io, left_parent, right_parent) &&
                strcmp(strrchr(left, '/') ? strrchr(left, '/') + 1 : left,
                       strrchr(right, '/') ? strrchr(right, '/') + 1 : right) == 0;
    fsdp_free(left);
    fsdp_free(right);
    fsdp_free(left_parent);
    fsdp_free(right_parent);
    return same || fsdp_paths_are_same(io, a, b);
}

/* True when `dir` is the path itself or one of its parent directories. */
static bool lies_in(fsdp_io *io, const char *path, const char *dir)
{
    char *at = fsdp_strndup(path, strlen(path));
    bool is_in = at && are_one_name(io, at, dir);
    while (at && !is_in) {
        char *slash = strrchr(at, '/');
        if (!slash || slash == at)
            break;
        *slash = '\0';
        is_in = are_one_name(io, at, dir);
    }
    fsdp_free(at);
    return is_in;
}

static fsdp_status check_apart(const fsdp_checkpoint *from, const char *to, const char *path,
                               fsdp_error *err)
{
    if (lies_in(from->io, path, to))
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "the plan '%s' would be at the path of the result '%s'; use another name",
                         path, to);
    bool is_source =
        fsdp_paths_are_same(from->io, path, from->path) || fsdp_checkpoint_reads(from, path);
    return is_source ? fsdp_fail(err, FSDP_ERR_USAGE,
                                 "the plan '%s' would replace the source; use another name", path)
                     : FSDP_OK;
}

/* Two processes may write a plan to one path: each has a temporary name of its own, the last one counts. */
static fsdp_status replace_beside_others(fsdp_io *io, const char *path, const fsdp_text *text,
                                         fsdp_error *err)
{
    char *own;
    FSDP_TRY(fsdp_beside_name(path, FSDP_SUFFIX_STAGING, &own, err));
    fsdp_status st = fsdp_io_replace_file(io, own, text->data, text->size, err);
    if (st == FSDP_OK)
        st = fsdp_io_rename(io, own, path, true, err);
    if (st != FSDP_OK)
        io->ops->unlink(io, own);
    fsdp_free(own);
    return st;
}

fsdp_status fsdp_plan_write(convert_job *job, const fsdp_convert_plan *plan, const char *path,
                            fsdp_error *err)
{
    fsdp_text text = {0};
    fsdp_status st = spell_plan(job, plan, &text, err);
    if (st == FSDP_OK)
        st = check_apart(job->from, plan->to, path, err);
    if (st == FSDP_OK)
        st = check_place(job->from->io, path, err);
    if (st == FSDP_OK)
        st = replace_beside_others(job->io, path, &text, err);
    fsdp_text_release(&text);
    return st;
}

/* === reading back ============================================================================= */

/*
 * A plan that is read back: its paths and options, which make it again, and its text, which must be equal
 * then. The source's files are compared first, so that an error names the one that changed.
 */

typedef struct order_text {
    fsdp_convert_order order; /* first: its address is that of the whole */
    fsdp_io *io;
    char *path, *data;
    size_t size;
    fsdp_arena arena;
    fsdp_mesh *mesh;
    bool checks; /* compare the source's files as they are listed */
} order_text;

/* --- a file of the source --------------------------------------------------------------------- */

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

static fsdp_status check_file(const order_text *plan, const char *path, int64_t size, int64_t mtime,
                              fsdp_error *err)
{
    fsdp_file_info info;
    int result = plan->io->ops->info(plan->io, path, &info);
    if (result == -ENOENT)
        return fsdp_fail(err, FSDP_ERR_DAMAGED, "'%s' was removed after '%s' was made", path,
                         plan->path);
    if (result < 0)
        return fsdp_fail_errno(err, -result, "cannot stat '%s'", path);
    if (info.size != size)
        return fsdp_fail(err, FSDP_ERR_DAMAGED,
                         "'%s' changed after '%s' was made: it has %" PRId64
                         " bytes and had %" PRId64,
                         path, plan->path, info.size, size);
    char now[80], then[80];
    if (info.mtime_ns == mtime)
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_DAMAGED,
                     "'%s' changed after '%s' was made: it was written %s, the plan says %s", path,
                     plan->path, spell_time(info.mtime_ns, now, sizeof now),
                     spell_time(mtime, then, sizeof then));
}

static fsdp_status take_file(order_text *plan, fsdp_json *json, fsdp_error *err)
{
    static const char *const names[] = {"path", "size", "mtime_ns"};
    fsdp_json_members members = {.names = names, .count = 3};
    const char *path = NULL;
    int64_t numbers[2];
    int member;
    FSDP_TRY(fsdp_json_enter_object(json, err));
    for (;;) {
        FSDP_TRY(fsdp_json_next_member(json, &members, &member, err));
        if (member < 0)
            break;
        FSDP_TRY(member == 0 ? read_string(json, &plan->arena, &path, err)
                             : fsdp_json_i64(json, &numbers[member - 1], err));
    }
    if (members.seen != 7)
        return fsdp_json_fail(json, err, "a source needs path, size and mtime_ns");
    return plan->checks ? check_file(plan, path, numbers[0], numbers[1], err) : FSDP_OK;
}

static fsdp_status take_files(order_text *plan, fsdp_json *json, fsdp_error *err)
{
    bool more;
    FSDP_TRY(fsdp_json_enter_array(json, err));
    for (;;) {
        FSDP_TRY(fsdp_json_next_item(json, &more, err));
        if (!more)
            return FSDP_OK;
        FSDP_TRY(take_file(plan, json, err));
    }
}

/* --- the text --------------------------------------------------------------------------------- */

static fsdp_status take_member(order_text *plan, fsdp_json *json, int member, fsdp_error *err)
{
    fsdp_convert_order *order = &plan->order;
    switch (member) {
    case 0: return take_files(plan, json, err);
    case 1: return read_string(json, &plan->arena, &order->from, err);
    case 2: return read_string(json, &plan->arena, &order->to, err);
    case 3: return fsdp_json_skip(json, err); /* of what the text has */
    default: return fsdp_plan_read_options(json, &plan->arena, &order->opts, &plan->mesh, err);
    }
}

/* Reads the head's members; everything else in the plan follows from them. */
static fsdp_status walk(order_text *plan, fsdp_error *err)
{
    static const char *const names[] = {"sources", "from", "to", "hash", "options"};
    fsdp_json_members members = {.names = names, .count = plan->checks ? 1 : 5};
    fsdp_json json;
    int member = 0;
    fsdp_json_init(&json, plan->data, plan->size, plan->path);
    fsdp_status st = fsdp_json_enter_object(&json, err);
    while (st == FSDP_OK) {
        st = fsdp_json_next_member(&json, &members, &member, err);
        if (st != FSDP_OK || member < 0)
            break;
        st = take_member(plan, &json, member, err);
    }
    if (st == FSDP_OK && !plan->checks && members.seen != 31)
        st = fsdp_json_fail(&json, err, "a plan needs from, to, options, sources and hash");
    if (st == FSDP_OK)
        st = fsdp_json_finish(&json, err);
    fsdp_json_release(&json);
    return st;
}

static fsdp_status check_version(const order_text *plan, fsdp_error *err)
{
    size_t start = sizeof FSDP_PLAN_START - 1;
    if (plan->size <= start || memcmp(plan->data, FSDP_PLAN_START, start) != 0)
        return fsdp_fail(err, FSDP_ERR_NOT_FOUND, "'%s' is not a plan of fsdp-convert", plan->path);
    long version = strtol(plan->data + start, NULL, 10);
    if (version > FSDP_PLAN_VERSION)
        return fsdp_fail(
            err, FSDP_ERR_DAMAGED,
            "'%s' is a plan of version %ld, but this fsdp reads version %d; use a newer fsdp",
            plan->path, version, FSDP_PLAN_VERSION);
    if (version == FSDP_PLAN_VERSION && is_whole(plan->data, plan->size))
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_DAMAGED,
                     "'%s' is damaged or was edited; make a new plan with --plan-out", plan->path);
}

static fsdp_status read_plan(order_text *plan, const char *path, fsdp_error *err)
{
    plan->path = fsdp_strndup(path, strlen(path));
    if (!plan->path)
        return fsdp_fail_memory(err, path);
    FSDP_TRY(fsdp_io_read_file(plan->io, path, FSDP_PLAN_MOST, &plan->data, &plan->size, err));
    FSDP_TRY(check_version(plan, err));
    return walk(plan, err);
}

fsdp_status fsdp_convert_order_open(const char *path, const fsdp_access *access,
                                    fsdp_convert_order **order_out, fsdp_error *err)
{
    *order_out = NULL;
    order_text *plan = fsdp_alloc(1, sizeof *plan);
    if (!plan)
        return fsdp_fail_memory(err, path);
    plan->io = fsdp_access_io(access);
    if (access)
        plan->order.opts.open.access = *access;
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
    order_text *plan = (order_text *)order;
    fsdp_arena_release(&plan->arena);
    fsdp_mesh_free(plan->mesh);
    fsdp_free(plan->data);
    fsdp_free(plan->path);
    fsdp_free(plan);
}

fsdp_status fsdp_convert_order_check_files(fsdp_convert_order *order, fsdp_error *err)
{
    order_text *plan = (order_text *)order;
    plan->checks = true;
    return walk(plan, err);
}

fsdp_status fsdp_convert_order_compare(const fsdp_convert_order *order, convert_job *job,
                                       const fsdp_convert_plan *now, fsdp_error *err)
{
    const order_text *plan = (const order_text *)order;
    fsdp_text text = {0};
    fsdp_status st = spell_plan(job, now, &text, err);
    if (st == FSDP_OK && (text.size != plan->size || memcmp(text.data, plan->data, text.size) != 0))
        st = fsdp_fail(err, FSDP_ERR_DAMAGED,
                       "'%s' differs from the plan that this version makes for '%s'; make a new "
                       "one with --plan-out",
                       plan->path, order->from);
    fsdp_text_release(&text);
    return st;
}
