/*
 * The options of a conversion as one table: of it are made the command line of fsdp-convert, its help and its
 * completion (tools/convert/convert_options.c), and here the options of a plan (plan_text.h). fsdp-convert(1)
 * and docs/formats.md are compared with it (tests/unit/statedict/convert/test_plan_options.c).
 */
#include "statedict/convert/plan_text.h"

#include "base/io/io.h"

#include <inttypes.h>
#include <stddef.h>
#include <string.h>
#include <unistd.h>

static const char *const kinds[] = {"sharded", "full", "local", NULL};
static const char *const parts[] = {"default", "all", "model", "optim", NULL};
static const char *const policies[] = {"fail", "clamp", "inf", NULL};
static const char *const ties[] = {"auto", "keep", "drop", NULL};
static const char *const forms[] = {"default", "nested", "flat", NULL};
static const char *const opaques[] = {"refuse", "copy", NULL};
static const char *const plain_types[] = {"bf16", "f32", "f16", NULL};
enum { WORLD_MOST = 1 << 20, LEVEL_MOST = 22, CHUNK_MOST = 4 << 20 };

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
     .member = "only", GROUP(TAKEN), .words = parts, .first_word = 1, .is_usual = true},
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
     GROUP(NAMES), .words = ties, .is_optional = true},
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

static void add_value(plan_head *head, const fsdp_convert_option *option,
                      const fsdp_convert_opts *opts)
{
    member at = member_at(opts, option->offset);
    fsdp_text *text = head->text;
    switch (option->kind) {
    case FSDP_OPTION_TEXT:
        if (*at.text)
            add_string(head, *at.text);
        else
            fsdp_text_addf(text, "null");
        break;
    case FSDP_OPTION_PATH: fsdp_plan_add_path(head, *at.text); break;
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
    member at = member_at(opts, option->offset);
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
    return fsdp_json_fail(json, err, "not a known word");
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

static fsdp_status read_flag(fsdp_json *json, bool is_negated, bool *out, fsdp_error *err)
{
    FSDP_TRY(fsdp_json_bool(json, out, err));
    *out = *out != is_negated;
    return FSDP_OK;
}

static fsdp_status read_value(fsdp_json *json, const fsdp_convert_option *option, fsdp_arena *arena,
                              fsdp_convert_opts *opts, fsdp_mesh **mesh, fsdp_error *err)
{
    member at = member_at(opts, option->offset);
    int64_t number;
    switch (option->kind) {
    case FSDP_OPTION_TEXT:
    case FSDP_OPTION_PATH:
        return option->kind == FSDP_OPTION_TEXT && fsdp_json_peek(json) == FSDP_JSON_NULL
                   ? fsdp_json_null(json, err)
                   : fsdp_plan_read_string(json, arena, at.text, err);
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
