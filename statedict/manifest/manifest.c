/*
 * The manifest as a whole: its head, the list of files, the hash at its end, and reading it from a
 * directory. Last file written by a save (step 3), first one read by a load. See manifest.h.
 */
#include "statedict/manifest/manifest_internal.h"

#include "base/core/mem.h"
#include "base/data/text_pairs.h"
#include "statedict/manifest/disk_names.h"

#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>

/* The text ends in CLOSING_START, 32 hexadecimal digits, CLOSING_END. */
static const char CLOSING_START[] = "\"xxh3\": \"";
static const char CLOSING_END[] = "\"\n}\n";
enum { CLOSING_SIZE = sizeof CLOSING_START - 1 + 2 * sizeof(fsdp_hash) + sizeof CLOSING_END - 1 };

static const char *const kinds[] = {"sharded", "full", "local"};
static const char *const owner_policies[] = {"balanced", "lowest"};
enum { KIND_COUNT = 3, OWNERS_COUNT = 2 };
enum { WORLD_MAX = 1 << 24 };

void fsdp_shard_name(int number, int count, char name_out[FSDP_SHARD_NAME_SIZE])
{
    snprintf(name_out, FSDP_SHARD_NAME_SIZE, "shard-%05d-of-%05d.h5", number, count);
}

static bool is_shard_name(const char *name)
{
    int number, count;
    char same[FSDP_SHARD_NAME_SIZE];
    if (sscanf(name, "shard-%9d-of-%9d", &number, &count) != 2)
        return false;
    fsdp_shard_name(number, count, same);
    return strcmp(name, same) == 0;
}

bool fsdp_is_checkpoint_file(const char *name)
{
    return strcmp(name, FSDP_MANIFEST_NAME) == 0 || strcmp(name, FSDP_VIEW_NAME) == 0 ||
           strcmp(name, FSDP_MANIFEST_TEMPORARY) == 0 || strcmp(name, FSDP_MARKER_SAVING) == 0 ||
           strcmp(name, FSDP_VIEW_TEMPORARY) == 0 || strcmp(name, FSDP_RESUME_NAME) == 0 ||
           is_shard_name(name);
}

void fsdp_manifest_release(fsdp_manifest *manifest)
{
    fsdp_sd_free(manifest->sd);
    fsdp_free(manifest->files);
    fsdp_free(manifest->stored);
    fsdp_free(manifest->metadata);
    *manifest = (fsdp_manifest){.step = FSDP_NO_STEP};
}

/* The contradiction between the numbers of a file, or NULL. */
static const char *file_fault(const fsdp_manifest_file *file)
{
    if (file->size < 0 || file->index_offset < 0 || file->index_size < 0)
        return "a negative size or offset";
    if (file->index_offset > file->size || file->index_size > file->size - file->index_offset)
        return "an index that reaches beyond the end";
    return NULL;
}

static int files_of(fsdp_kind kind, int world)
{
    return kind == FSDP_FULL ? 1 : world;
}

/* Writes the last bytes of a text with that hash. */
static void spell_closing(fsdp_hash hash, char closing_out[CLOSING_SIZE])
{
    static const char digits[] = "0123456789abcdef";
    char *to = closing_out;
    memcpy(to, CLOSING_START, sizeof CLOSING_START - 1);
    to += sizeof CLOSING_START - 1;
    for (size_t i = 0; i < sizeof hash.bytes; i++) {
        *to++ = digits[hash.bytes[i] >> 4];
        *to++ = digits[hash.bytes[i] & 15];
    }
    memcpy(to, CLOSING_END, sizeof CLOSING_END - 1);
}

/* --- writing ---------------------------------------------------------------------------------- */

static fsdp_status check_head(const fsdp_manifest *manifest, fsdp_error *err)
{
    if ((unsigned)manifest->kind >= KIND_COUNT || (unsigned)manifest->owners >= OWNERS_COUNT)
        return fsdp_fail(err, FSDP_ERR_USAGE, "kind %d or owner policy %d is unknown",
                         (int)manifest->kind, (int)manifest->owners);
    if (manifest->step < FSDP_NO_STEP)
        return fsdp_fail(err, FSDP_ERR_USAGE, "the step cannot be %" PRId64, manifest->step);
    if (manifest->world < 1 || manifest->world > WORLD_MAX ||
        manifest->file_count != files_of(manifest->kind, manifest->world))
        return fsdp_fail(err, FSDP_ERR_USAGE, "%d files of %d ranks cannot make a %s checkpoint",
                         manifest->file_count, manifest->world, kinds[manifest->kind]);
    return FSDP_OK;
}

static void put_head(fsdp_text *text, const fsdp_manifest *manifest)
{
    fsdp_text_addf(text,
                   "{\n\"fsdp\": {\"major\": %d, \"minor\": %d, \"writer\": \"fsdp %s\"},\n"
                   "\"kind\": \"%s\",\n",
                   FSDP_FORMAT_MAJOR, FSDP_FORMAT_MINOR, fsdp_version(), kinds[manifest->kind]);
    if (manifest->step == FSDP_NO_STEP)
        fsdp_text_addf(text, "\"step\": null,\n");
    else
        fsdp_text_addf(text, "\"step\": %" PRId64 ",\n", manifest->step);
    fsdp_text_addf(text, "\"run\": \"");
    fsdp_text_add_hex(text, manifest->run, sizeof manifest->run);
    fsdp_text_addf(text, "\",\n\"world_size\": %d,\n\"owners\": \"%s\",\n\"compressed\": %s,\n",
                   manifest->world, owner_policies[manifest->owners],
                   manifest->compressed ? "true" : "false");
    if (manifest->metadata)
        fsdp_text_addf(text, "\"metadata\": %s,\n", manifest->metadata);
}

static fsdp_status put_files(fsdp_text *text, const fsdp_manifest *manifest, fsdp_error *err)
{
    fsdp_text_addf(text, "\"files\": [");
    for (int i = 0; i < manifest->file_count; i++) {
        const fsdp_manifest_file *file = &manifest->files[i];
        const char *fault = file_fault(file);
        if (fault)
            return fsdp_fail(err, FSDP_ERR_USAGE, "file %d has %s", i, fault);
        fsdp_text_addf(
            text, "%s\n{\"size\": %" PRId64 ", \"index\": [%" PRId64 ", %" PRId64 "], \"xxh3\": \"",
            i > 0 ? "," : "", file->size, file->index_offset, file->index_size);
        fsdp_text_add_hex(text, file->index_hash.bytes, sizeof file->index_hash.bytes);
        fsdp_text_add(text, "\"}", 2);
    }
    fsdp_text_addf(text, "\n],\n");
    return FSDP_OK;
}

fsdp_status fsdp_manifest_encode(const fsdp_manifest *manifest, fsdp_text *text, fsdp_error *err)
{
    size_t start = text->size;
    FSDP_TRY(check_head(manifest, err));
    put_head(text, manifest);
    FSDP_TRY(put_files(text, manifest, err));
    FSDP_TRY(fsdp_manifest_put_state(text, manifest->sd, manifest->world, err));
    if (!text->failed) {
        char closing[CLOSING_SIZE];
        spell_closing(fsdp_kernels_get()->hash(text->data + start, text->size - start), closing);
        fsdp_text_add(text, closing, sizeof closing);
    }
    if (text->failed)
        return fsdp_fail_memory(err, "the manifest");
    if (text->size - start > FSDP_MANIFEST_MAX)
        return fsdp_fail(err, FSDP_ERR_LIMIT,
                         "the manifest takes %zu bytes, at most %d are allowed", text->size - start,
                         FSDP_MANIFEST_MAX);
    return FSDP_OK;
}

/* --- reading: the hash ------------------------------------------------------------------------ */

static bool is_whole(const char *text, size_t size)
{
    if (size < CLOSING_SIZE)
        return false;
    char closing[CLOSING_SIZE];
    spell_closing(fsdp_kernels_get()->hash(text, size - CLOSING_SIZE), closing);
    return memcmp(closing, text + size - CLOSING_SIZE, CLOSING_SIZE) == 0;
}

/* The major version in the first line; 0 without such a line. Read before the hash: a later
 * version may end its text in another way and must not count as damaged. */
static int stated_major(const char *text, size_t size)
{
    static const char start[] = "{\n\"fsdp\": {\"major\": ";
    char line[sizeof start + 12] = {0};
    memcpy(line, text, size < sizeof line - 1 ? size : sizeof line - 1);
    int major = 0;
    return strncmp(line, start, sizeof start - 1) == 0 &&
                   sscanf(line + sizeof start - 1, "%9d", &major) == 1
               ? major
               : 0;
}

bool fsdp_manifest_begins(const char *start, size_t size)
{
    return stated_major(start, size) > 0;
}

bool fsdp_manifest_ends(const char *end, size_t size)
{
    if (size < CLOSING_SIZE)
        return false;
    const char *closing = end + size - CLOSING_SIZE;
    return memcmp(closing, CLOSING_START, sizeof CLOSING_START - 1) == 0 &&
           memcmp(end + size - (sizeof CLOSING_END - 1), CLOSING_END, sizeof CLOSING_END - 1) == 0;
}

static fsdp_status look_at_start(fsdp_io *io, const char *path, int *major_out, fsdp_error *err)
{
    char start[64];
    fsdp_file *file = NULL;
    FSDP_TRY(fsdp_io_open(io, path, FSDP_IO_READ, &file, err));
    fsdp_status status = fsdp_io_read(file, path, start, sizeof start, 0, err);
    (void)fsdp_io_close(&file, path, NULL); /* only read */
    *major_out = status == FSDP_OK ? stated_major(start, sizeof start) : 0;
    return status;
}

fsdp_status fsdp_manifest_major(fsdp_io *io, const char *dir, int *major_out, fsdp_error *err)
{
    char *path = fsdp_path_join(dir, FSDP_MANIFEST_NAME);
    fsdp_error reason = {0};
    *major_out = 0;
    if (!path)
        return fsdp_fail_memory(err, dir);
    fsdp_status status = look_at_start(io, path, major_out, &reason);
    fsdp_free(path);
    if (status == FSDP_ERR_NOT_FOUND || status == FSDP_ERR_DAMAGED)
        return FSDP_OK;
    if (status != FSDP_OK && err)
        *err = reason;
    return status;
}

fsdp_status fsdp_manifest_is_ours(fsdp_io *io, const char *dir, bool *ours_out, fsdp_error *err)
{
    int major;
    fsdp_status status = fsdp_manifest_major(io, dir, &major, err);
    *ours_out = major > 0;
    return status;
}

static fsdp_status fail_newer(int64_t major, const char *path, fsdp_error *err)
{
    return fsdp_fail(err, FSDP_ERR_NOT_FOUND,
                     "'%s' has format version %" PRId64
                     ", but this fsdp reads version %d; use an fsdp that reads version %" PRId64,
                     path, major, FSDP_FORMAT_MAJOR, major);
}

static fsdp_status check_whole(const char *text, size_t size, const char *path, fsdp_error *err)
{
    int major = stated_major(text, size);
    if (is_whole(text, size) && major > 0)
        return FSDP_OK;
    if (is_whole(text, size))
        return fsdp_fail(err, FSDP_ERR_DAMAGED,
                         "'%s' is damaged: its first lines do not give the format version", path);
    if (major > FSDP_FORMAT_MAJOR)
        return fail_newer(major, path, err);
    return fsdp_fail(err, FSDP_ERR_DAMAGED,
                     "'%s' is damaged: its %zu bytes do not match the hash at their end", path,
                     size);
}

/* --- reading: the members --------------------------------------------------------------------- */

enum {
    KEY_FSDP,
    KEY_KIND,
    KEY_STEP,
    KEY_RUN,
    KEY_WORLD,
    KEY_OWNERS,
    KEY_COMPRESSED,
    KEY_FILES,
    KEY_MESHES,
    KEY_FLATS,
    KEY_ENTRIES,
    KEY_HASH,
    KEY_REQUIRED,
    KEY_METADATA = KEY_REQUIRED, /* optional */
    KEY_COUNT
};
static const char *const keys[KEY_COUNT] = {
    "fsdp",  "kind",   "step",  "run",     "world_size", "owners",  "compressed",
    "files", "meshes", "flats", "entries", "xxh3",       "metadata"};

typedef struct manifest_reader {
    fsdp_json json;
    fsdp_manifest *manifest;
    fsdp_state_reader *state;
    size_t file_capacity;
    fsdp_json_members members;
} manifest_reader;

static fsdp_status take_version(fsdp_json *json, int *minor_out, fsdp_error *err)
{
    static const char *const names[] = {"major", "minor"};
    fsdp_json_members members = {.names = names, .count = 2};
    int64_t major = 0, minor = 0;
    int which;
    FSDP_TRY(fsdp_json_enter_object(json, err));
    for (;;) {
        FSDP_TRY(fsdp_json_next_member(json, &members, &which, err));
        if (which < 0)
            break;
        FSDP_TRY(fsdp_json_i64(json, which == 0 ? &major : &minor, err));
    }
    if (major > FSDP_FORMAT_MAJOR)
        return fail_newer(major, json->name, err);
    if (major < 1)
        return fsdp_json_fail(json, err, "the format version is missing");
    if (minor < 0 || minor > INT_MAX)
        return fsdp_json_fail(json, err, "the minor format version cannot be %" PRId64, minor);
    *minor_out = (int)minor;
    return FSDP_OK;
}

static fsdp_status take_choice(fsdp_json *json, const char *const *names, int n, int *choice_out,
                               fsdp_error *err)
{
    const char *text;
    size_t size;
    FSDP_TRY(fsdp_json_string(json, &text, &size, err));
    for (int i = 0; i < n; i++) {
        if (strlen(names[i]) == size && memcmp(names[i], text, size) == 0) {
            *choice_out = i;
            return FSDP_OK;
        }
    }
    char word[40];
    return fsdp_json_fail(json, err, "the word '%s' is unknown",
                          fsdp_printable(text, size, word, sizeof word));
}

static fsdp_status take_hex(fsdp_json *json, uint8_t bytes_out[16], fsdp_error *err)
{
    static const char digits[] = "0123456789abcdef";
    const char *text;
    size_t size;
    FSDP_TRY(fsdp_json_string(json, &text, &size, err));
    if (size != 32 || strspn(text, digits) != 32)
        return fsdp_json_fail(json, err, "32 hexadecimal digits were expected");
    for (size_t i = 0; i < 16; i++) {
        int high = (int)(strchr(digits, text[2 * i]) - digits);
        int low = (int)(strchr(digits, text[2 * i + 1]) - digits);
        bytes_out[i] = (uint8_t)(high << 4 | low);
    }
    return FSDP_OK;
}

static fsdp_status take_step(fsdp_json *json, int64_t *step_out, fsdp_error *err)
{
    *step_out = FSDP_NO_STEP;
    if (fsdp_json_peek(json) == FSDP_JSON_NULL)
        return fsdp_json_null(json, err);
    FSDP_TRY(fsdp_json_i64(json, step_out, err));
    return *step_out < 0 ? fsdp_json_fail(json, err, "the step cannot be %" PRId64, *step_out)
                         : FSDP_OK;
}

static fsdp_status take_world(fsdp_json *json, int *world_out, fsdp_error *err)
{
    int64_t world;
    FSDP_TRY(fsdp_json_i64(json, &world, err));
    if (world < 1 || world > WORLD_MAX)
        return fsdp_json_fail(json, err, "the world size cannot be %" PRId64, world);
    *world_out = (int)world;
    return FSDP_OK;
}

static fsdp_status take_index_place(fsdp_json *json, fsdp_manifest_file *file, fsdp_error *err)
{
    int64_t *const place[] = {&file->index_offset, &file->index_size};
    FSDP_TRY(fsdp_json_enter_array(json, err));
    for (int i = 0;; i++) {
        bool more;
        FSDP_TRY(fsdp_json_next_item(json, &more, err));
        if (more != (i < 2))
            return fsdp_json_fail(json, err, "an offset and a size were expected");
        if (!more)
            return FSDP_OK;
        FSDP_TRY(fsdp_json_i64(json, place[i], err));
    }
}

static fsdp_status take_file(fsdp_json *json, fsdp_manifest_file *file, fsdp_error *err)
{
    static const char *const names[] = {"size", "index", "xxh3"};
    fsdp_json_members members = {.names = names, .count = 3};
    int which;
    FSDP_TRY(fsdp_json_enter_object(json, err));
    for (;;) {
        FSDP_TRY(fsdp_json_next_member(json, &members, &which, err));
        if (which < 0)
            break;
        if (which == 0)
            FSDP_TRY(fsdp_json_i64(json, &file->size, err));
        else if (which == 1)
            FSDP_TRY(take_index_place(json, file, err));
        else
            FSDP_TRY(take_hex(json, file->index_hash.bytes, err));
    }
    if (members.seen != 7)
        return fsdp_json_fail(json, err, "a file has no size, index or hash");
    const char *fault = file_fault(file);
    return fault ? fsdp_json_fail(json, err, "a file has %s", fault) : FSDP_OK;
}

static fsdp_status take_files(manifest_reader *reader, fsdp_error *err)
{
    fsdp_manifest *manifest = reader->manifest;
    int expected = files_of(manifest->kind, manifest->world);
    FSDP_TRY(fsdp_json_enter_array(&reader->json, err));
    for (;;) {
        bool more;
        FSDP_TRY(fsdp_json_next_item(&reader->json, &more, err));
        if (more != (manifest->file_count < expected))
            return fsdp_json_fail(&reader->json, err, "a %s checkpoint of %d ranks has %d files",
                                  kinds[manifest->kind], manifest->world, expected);
        if (!more)
            return FSDP_OK;
        if (!fsdp_grow(&manifest->files, &reader->file_capacity, (size_t)manifest->file_count + 1,
                       sizeof *manifest->files))
            return fsdp_fail_memory(err, "the manifest");
        fsdp_manifest_file *file = &manifest->files[manifest->file_count];
        *file = (fsdp_manifest_file){0};
        FSDP_TRY(take_file(&reader->json, file, err));
        manifest->file_count++;
    }
}

/* Members come in the order of the writer, since later ones depend on earlier ones; unknown keys
 * may come anywhere. */
static fsdp_status check_order(manifest_reader *reader, int which, fsdp_error *err)
{
    uint64_t before = which < KEY_REQUIRED ? ((uint64_t)1 << which) - 1 : 0;
    if ((reader->members.seen & before) != before)
        return fsdp_json_fail(&reader->json, err, "'%s' precedes the members that it depends on",
                              keys[which]);
    return FSDP_OK;
}

static fsdp_status take_metadata(manifest_reader *reader, fsdp_error *err)
{
    fsdp_text_pairs pairs = {0};
    fsdp_text text = {0};
    fsdp_status st = fsdp_text_pairs_take(&pairs, &reader->json, err);
    if (st == FSDP_OK)
        fsdp_text_pairs_spell(&pairs, &text);
    if (st == FSDP_OK && text.failed)
        st = fsdp_fail_memory(err, "the manifest");
    if (st == FSDP_OK && pairs.count > 0) {
        reader->manifest->metadata = text.data;
        text = (fsdp_text){0};
    }
    fsdp_text_release(&text);
    fsdp_text_pairs_release(&pairs);
    return st;
}

static fsdp_status take_member(manifest_reader *reader, int which, fsdp_error *err)
{
    fsdp_manifest *manifest = reader->manifest;
    fsdp_json *json = &reader->json;
    int choice = 0;
    switch (which) {
    case KEY_FSDP: return take_version(json, &manifest->minor, err);
    case KEY_KIND:
        FSDP_TRY(take_choice(json, kinds, KIND_COUNT, &choice, err));
        manifest->kind = (fsdp_kind)choice;
        return FSDP_OK;
    case KEY_STEP: return take_step(json, &manifest->step, err);
    case KEY_RUN: return take_hex(json, manifest->run, err);
    case KEY_WORLD: return take_world(json, &manifest->world, err);
    case KEY_OWNERS:
        FSDP_TRY(take_choice(json, owner_policies, OWNERS_COUNT, &choice, err));
        manifest->owners = (fsdp_owner_policy)choice;
        return FSDP_OK;
    case KEY_COMPRESSED: return fsdp_json_bool(json, &manifest->compressed, err);
    case KEY_FILES: return take_files(reader, err);
    case KEY_MESHES:
    case KEY_FLATS:
    case KEY_ENTRIES:
        return fsdp_state_reader_take(&reader->state, json, manifest->world,
                                      (fsdp_state_part)(which - KEY_MESHES), err);
    case KEY_METADATA: return take_metadata(reader, err);
    default: return fsdp_json_skip(json, err); /* the hash was compared before */
    }
}

static fsdp_status take_manifest(manifest_reader *reader, fsdp_error *err)
{
    fsdp_json *json = &reader->json;
    int which;
    FSDP_TRY(fsdp_json_enter_object(json, err));
    for (;;) {
        FSDP_TRY(fsdp_json_next_member(json, &reader->members, &which, err));
        if (which < 0)
            break;
        FSDP_TRY(check_order(reader, which, err));
        FSDP_TRY(take_member(reader, which, err));
    }
    FSDP_TRY(fsdp_json_finish(json, err));
    const uint64_t required = ((uint64_t)1 << KEY_REQUIRED) - 1;
    if ((reader->members.seen & required) != required)
        return fsdp_json_fail(json, err, "members are missing");
    return FSDP_OK;
}

fsdp_status fsdp_manifest_decode(const char *text, size_t size, const char *path,
                                 fsdp_manifest *manifest_out, fsdp_error *err)
{
    *manifest_out = (fsdp_manifest){.step = FSDP_NO_STEP};
    FSDP_TRY(check_whole(text, size, path, err));
    manifest_reader reader = {.manifest = manifest_out,
                              .members = {.names = keys, .count = KEY_COUNT}};
    fsdp_json_init(&reader.json, text, size, path);
    fsdp_status status = take_manifest(&reader, err);
    fsdp_state_reader_end(reader.state, status == FSDP_OK ? manifest_out : NULL);
    fsdp_json_release(&reader.json);
    if (status != FSDP_OK)
        fsdp_manifest_release(manifest_out);
    return status;
}

/* --- reading from a directory ----------------------------------------------------------------- */

/* Explains a missing manifest: an incomplete directory, a file, or a checkpoint that was set aside. */
static fsdp_status fail_without_manifest(fsdp_io *io, const char *dir, fsdp_error *err)
{
    fsdp_file_info info;
    int result = io->ops->info(io, dir, &info);
    if (result == 0 && info.kind == FSDP_FILE_DIRECTORY)
        return fsdp_fail(err, FSDP_ERR_NOT_FOUND,
                         "'%s' is not a complete checkpoint: it has no manifest", dir);
    if (result == 0)
        return fsdp_fail(err, FSDP_ERR_NOT_FOUND, "'%s' is a file, not a checkpoint directory",
                         dir);
    char *old = NULL;
    if (result == -ENOENT && fsdp_replaced_find(io, dir, &old)) {
        fsdp_fail(err, FSDP_ERR_NOT_FOUND,
                  "'%s' does not exist, but the old checkpoint of an interrupted overwrite is "
                  "complete; rename '%s' to restore it",
                  dir, old);
        fsdp_free(old);
        return FSDP_ERR_NOT_FOUND;
    }
    return fsdp_fail_errno(err, -result, "cannot open checkpoint '%s'", dir);
}

static fsdp_status read_manifest(fsdp_io *io, const char *dir, const char *path,
                                 fsdp_manifest *manifest_out, fsdp_error *err)
{
    char *text;
    size_t size;
    fsdp_error reason = {0};
    fsdp_status status = fsdp_io_read_file(io, path, FSDP_MANIFEST_MAX, &text, &size, &reason);
    if (status == FSDP_ERR_NOT_FOUND && reason.errnum != EISDIR)
        return fail_without_manifest(io, dir, err);
    if (status != FSDP_OK) {
        if (err)
            *err = reason;
        return status;
    }
    status = fsdp_manifest_decode(text, size, path, manifest_out, err);
    fsdp_free(text);
    return status;
}

static fsdp_status check_file(fsdp_io *io, const char *dir, const fsdp_manifest *manifest,
                              int number, fsdp_error *err)
{
    char name[FSDP_SHARD_NAME_SIZE];
    fsdp_shard_name(number, manifest->file_count, name);
    char *path = fsdp_path_join(dir, name);
    if (!path)
        return fsdp_fail_memory(err, dir);
    fsdp_file_info info;
    int64_t size = manifest->files[number].size;
    fsdp_status status = FSDP_OK;
    int result = io->ops->info(io, path, &info);
    if (result == -ENOENT)
        status = fsdp_fail(err, FSDP_ERR_DAMAGED, "'%s' is missing", path);
    else if (result < 0)
        status = fsdp_fail_errno(err, -result, "cannot stat '%s'", path);
    else if (info.kind != FSDP_FILE_REGULAR)
        status = fsdp_fail(err, FSDP_ERR_DAMAGED, "'%s' is not a regular file", path);
    else if (info.size != size)
        status = fsdp_fail(err, FSDP_ERR_DAMAGED,
                           "'%s' has %" PRId64 " bytes, but the manifest says %" PRId64, path,
                           info.size, size);
    fsdp_free(path);
    return status;
}

fsdp_status fsdp_manifest_read_alone(fsdp_io *io, const char *dir, fsdp_manifest *manifest_out,
                                     fsdp_error *err)
{
    io = io ? io : fsdp_io_posix();
    *manifest_out = (fsdp_manifest){.step = FSDP_NO_STEP};
    char *path = fsdp_path_join(dir, FSDP_MANIFEST_NAME);
    if (!path)
        return fsdp_fail_memory(err, dir);
    fsdp_status status = read_manifest(io, dir, path, manifest_out, err);
    fsdp_free(path);
    return status;
}

fsdp_status fsdp_manifest_read(fsdp_io *io, const char *dir, fsdp_manifest *manifest_out,
                               fsdp_error *err)
{
    io = io ? io : fsdp_io_posix();
    fsdp_status status = fsdp_manifest_read_alone(io, dir, manifest_out, err);
    for (int i = 0; i < manifest_out->file_count && status == FSDP_OK; i++)
        status = check_file(io, dir, manifest_out, i, err);
    if (status != FSDP_OK)
        fsdp_manifest_release(manifest_out);
    return status;
}
