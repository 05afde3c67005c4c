/* Writes and compares digest files: see digests.h. */
#include "statedict/checkpoint/digests.h"
#include "base/data/json.h"
#include "kernels/kernels.h"
#include "statedict/commit/commit_internal.h"
#include "statedict/manifest/disk_names.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

/* === the text of a file ======================================================================= */

#define FIRST_LINE FSDP_DIGESTS_MAGIC "1 xxh3-128\n"
#define LAST_LINE "end "

enum { HASH = sizeof(fsdp_hash), DIGITS = 2 * HASH };

/* --- writing ---------------------------------------------------------------------------------- */

fsdp_status fsdp_digests_encode(const fsdp_file_list *list, fsdp_text *text, fsdp_error *err)
{
    fsdp_text_addf(text, "%s", FIRST_LINE);
    for (size_t i = 0; i < list->count; i++) {
        const fsdp_listed_file *file = &list->items[i];
        if (!fsdp_utf8_valid(file->name, strlen(file->name)))
            return fsdp_fail(err, FSDP_ERR_USAGE,
                             "'%s' has a name that is not UTF-8; a digest file cannot hold it",
                             file->path);
        fsdp_text_add_hex(text, file->digest, HASH);
        fsdp_text_addf(text, " %" PRId64 " ", file->size);
        fsdp_text_add_json_string(text, file->name, strlen(file->name));
        fsdp_text_addf(text, "\n");
    }
    if (text->failed)
        return fsdp_fail_memory(err, "digests");
    fsdp_hash hash = fsdp_kernels_get()->hash(text->data, text->size);
    fsdp_text_addf(text, LAST_LINE);
    fsdp_text_add_hex(text, hash.bytes, HASH);
    fsdp_text_addf(text, "\n");
    return text->failed ? fsdp_fail_memory(err, "digests") : FSDP_OK;
}

/* --- reading ---------------------------------------------------------------------------------- */

typedef struct digest_reader {
    const char *path, *at, *end; /* end: of the lines that list files */
    int64_t line;
    fsdp_json json;
    fsdp_file_list *list;
} digest_reader;

static fsdp_status fail_line(const digest_reader *reader, const char *what, fsdp_error *err)
{
    return fsdp_fail(err, FSDP_ERR_DAMAGED, "'%s' is damaged: line %" PRId64 " %s", reader->path,
                     reader->line, what);
}

static int digit(char c)
{
    return c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

static bool take_hex(const char *text, uint8_t out[HASH])
{
    for (size_t i = 0; i < HASH; i++) {
        int high = digit(text[2 * i]), low = digit(text[2 * i + 1]);
        if (high < 0 || low < 0)
            return false;
        out[i] = (uint8_t)(high << 4 | low);
    }
    return true;
}

/* True for a name that is relative and never leads above the directory that it is relative to. */
static bool digests_name_is_clean(const char *name, size_t size)
{
    if (size == 1 && name[0] == '.')
        return true;
    for (size_t at = 0; at <= size;) {
        const char *slash = memchr(name + at, '/', size - at);
        size_t length = slash ? (size_t)(slash - name) - at : size - at;
        bool is_dots = length > 0 && length <= 2 && strncmp(name + at, "..", length) == 0;
        if (length == 0 || is_dots)
            return false;
        at += length + 1;
    }
    return memchr(name, '\0', size) == NULL;
}

static fsdp_status take_name(digest_reader *reader, const char *text, size_t text_size,
                             fsdp_listed_file *file, fsdp_error *err)
{
    const char *name;
    size_t size;
    fsdp_file_list *list = reader->list;
    fsdp_json_init(&reader->json, text, text_size, reader->path);
    fsdp_status st = fsdp_json_string(&reader->json, &name, &size, NULL);
    if (st == FSDP_OK)
        st = fsdp_json_finish(&reader->json, NULL);
    if (st != FSDP_OK || !digests_name_is_clean(name, size))
        st = fail_line(reader, "has no name below the checkpoint", err);
    else if (list->count > 0 && strcmp(list->items[list->count - 1].name, name) >= 0)
        st = fail_line(reader, "is not in the order of names", err);
    else
        st = fsdp_file_list_add(list, "", name, file->size, err);
    fsdp_json_release(&reader->json);
    if (st == FSDP_OK)
        memcpy(list->items[list->count - 1].digest, file->digest, HASH);
    return st;
}

/* HASH SIZE "NAME" */
static fsdp_status take_line(digest_reader *reader, const char *end, fsdp_error *err)
{
    fsdp_listed_file file = {0};
    const char *at = reader->at + DIGITS;
    if (end - reader->at <= DIGITS || !take_hex(reader->at, file.digest) || *at != ' ')
        return fail_line(reader, "does not start with a digest", err);
    at++;
    const char *first = at;
    for (; at < end && *at >= '0' && *at <= '9'; at++)
        if (fsdp_mul_overflow(file.size, 10, &file.size) ||
            __builtin_add_overflow(file.size, (int64_t)(*at - '0'), &file.size))
            return fail_line(reader, "has a size above the limit", err);
    if (at == first || at == end || *at != ' ')
        return fail_line(reader, "has no size", err);
    return take_name(reader, at + 1, (size_t)(end - at - 1), &file, err);
}

/* Finds and checks the last line, without which the lines above prove nothing. Either end is enough to
 * recognise a digest file, so that one with a damaged byte is not taken for another program's. */
static fsdp_status check_end(digest_reader *reader, const char *data, size_t size, fsdp_error *err)
{
    enum { LAST = sizeof LAST_LINE - 1 + DIGITS + 1 };
    const size_t magic = sizeof FSDP_DIGESTS_MAGIC - 1;
    fsdp_hash said;
    reader->end = data + size - (size < LAST ? 0 : LAST);
    bool begins = size >= magic && memcmp(data, FSDP_DIGESTS_MAGIC, magic) == 0;
    bool is_there = size >= LAST && data[size - 1] == '\n' &&
                    memcmp(reader->end, LAST_LINE, sizeof LAST_LINE - 1) == 0 &&
                    take_hex(reader->end + sizeof LAST_LINE - 1, said.bytes);
    if (!begins && !is_there)
        return fsdp_fail(err, FSDP_ERR_USAGE, "'%s' is not a digest file of fsdp", reader->path);
    if (!is_there)
        return fsdp_fail(err, FSDP_ERR_DAMAGED,
                         "'%s' is damaged: its last line is not the digest of the others",
                         reader->path);
    fsdp_hash hash = fsdp_kernels_get()->hash(data, (size_t)(reader->end - data));
    if (memcmp(hash.bytes, said.bytes, HASH) == 0)
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_DAMAGED,
                     "'%s' is damaged: its lines do not match the digest in its last line",
                     reader->path);
}

fsdp_status fsdp_digests_decode(const char *data, size_t size, const char *path,
                                fsdp_file_list *list, fsdp_error *err)
{
    const size_t first = sizeof FIRST_LINE - 1;
    digest_reader reader = {.path = path, .list = list, .line = 1};
    FSDP_TRY(check_end(&reader, data, size, err));
    if (size < first || memcmp(data, FIRST_LINE, first) != 0)
        return fsdp_fail(err, FSDP_ERR_REFUSED,
                         "'%s' was written by a newer version of fsdp; use that version", path);
    for (reader.at = data + first; reader.at < reader.end;) {
        const char *end = memchr(reader.at, '\n', (size_t)(reader.end - reader.at));
        reader.line++;
        if (!end)
            return fail_line(&reader, "has no end", err);
        FSDP_TRY(take_line(&reader, end, err));
        reader.at = end + 1;
    }
    return FSDP_OK;
}

/* === the files ================================================================================ */

enum { LARGEST_FILE = 64 << 20, XXH3_SIZE = 16 };

/* A checkpoint and its digest file. */
typedef struct digest_place {
    fsdp_io *io;
    char *path, *parent; /* without trailing slashes; the directory that holds it */
    char *file;          /* PATH.xxh3 */
    size_t root_size;    /* of the directory to which names are relative, with its slash */
    bool is_directory;
    const char *variant; /* borrowed: see fsdp_open_opts */
} digest_place;

static void place_release(digest_place *place)
{
    fsdp_free(place->path);
    fsdp_free(place->parent);
    fsdp_free(place->file);
}

/* A pattern of rank files may vary in a folder: names are relative to the one above. */
static size_t root_of_files(const char *path, bool is_pattern)
{
    size_t size = is_pattern ? strcspn(path, "{") : strlen(path);
    while (size > 0 && path[size - 1] != '/')
        size--;
    return size;
}

static fsdp_status place_init(digest_place *place, fsdp_io *io, const char *path, fsdp_error *err)
{
    fsdp_file_info info;
    *place = (digest_place){.io = io};
    FSDP_TRY(fsdp_path_split(path, &place->path, &place->parent, err));
    fsdp_text file = {0};
    fsdp_text_addf(&file, "%s" FSDP_DIGESTS_SUFFIX, place->path);
    place->file = file.failed ? NULL : fsdp_strndup(file.data, file.size);
    fsdp_text_release(&file);
    if (!place->file)
        return fsdp_fail_memory(err, path);
    int result = io->ops->info(io, place->path, &info);
    place->is_directory = result == 0 && info.kind == FSDP_FILE_DIRECTORY;
    place->root_size = place->is_directory ? strlen(place->path) + 1
                                           : root_of_files(place->path, result == -ENOENT);
    return FSDP_OK;
}

/* --- files of a checkpoint -------------------------------------------------------------------- */

/* Hidden files are pins, markers, and other programs' notes; DCP's .metadata is added as a part. */
static bool is_kept(void *context, const char *name)
{
    (void)context;
    return name[0] != '.' && !strstr(name, FSDP_DIGESTS_SUFFIX);
}

typedef struct part_walk {
    const digest_place *place;
    fsdp_file_list *list;
} part_walk;

static fsdp_status add_part(void *context, int number, const char *path, const fsdp_file_info *info,
                            fsdp_error *err)
{
    const part_walk *walk = context;
    const digest_place *place = walk->place;
    size_t root = place->root_size, slash = root > 0 ? root - 1 : 0;
    (void)number;
    if (!place->is_directory && strcmp(path, place->path) == 0)
        return fsdp_file_list_add(walk->list, path, ".", info->size, err);
    if (strncmp(path, place->path, slash) != 0 || (root > 0 && path[slash] != '/'))
        return fsdp_fail(err, FSDP_ERR_USAGE, "'%s' is not in the directory of '%s'", path,
                         place->path);
    const char *name = path + root;
    while (*name == '/' || strncmp(name, "./", 2) == 0)
        name++;
    if (!digests_name_is_clean(name, strlen(name)))
        return FSDP_OK; /* a blob of a Hugging Face cache; the link to it is listed */
    return fsdp_file_list_add(walk->list, path, name, info->size, err);
}

/* Every plain file of a directory, and the files that the checkpoint is read from, links included. */
static fsdp_status list_files(const digest_place *place, fsdp_file_list *list, fsdp_error *err)
{
    fsdp_checkpoint *checkpoint = NULL;
    part_walk walk = {place, list};
    if (place->is_directory)
        FSDP_TRY(fsdp_file_list_add_tree(list, place->path, place->root_size, is_kept, err));
    const fsdp_open_opts open = {.variant = place->variant};
    FSDP_TRY(fsdp_checkpoint_open_as(place->io, place->path, &open, &checkpoint, err));
    fsdp_status st = FSDP_OK;
    if (checkpoint->source || checkpoint->is_one_file) {
        st = fsdp_checkpoint_need_all(checkpoint, err);
        if (st == FSDP_OK)
            st = fsdp_checkpoint_each_file(checkpoint, add_part, &walk, err);
    }
    fsdp_checkpoint_close(checkpoint);
    fsdp_file_list_sort(list);
    return st;
}

/* --- writing ---------------------------------------------------------------------------------- */

static fsdp_status digest_all(fsdp_file_list *list, const fsdp_verify_opts *opts, fsdp_error *err)
{
    const fsdp_digest_opts digest = {.kind = FSDP_DIGEST_XXH3,
                                     .follow_links = true, /* opening the checkpoint judged them */
                                     .threads = opts->threads,
                                     .memory = opts->memory,
                                     .watch = &opts->watch};
    return fsdp_file_list_digest(list, &digest, err);
}

static fsdp_status put_file(const digest_place *place, const fsdp_text *text, fsdp_error *err)
{
    FSDP_TRY(fsdp_place_refuse_link(place->io, place->file, err));
    FSDP_TRY(fsdp_io_replace_file(place->io, place->file, text->data, text->size, err));
    return fsdp_io_sync_dir(place->io, place->parent, err);
}

static fsdp_status write_file(const digest_place *place, const fsdp_verify_opts *opts,
                              int64_t *count_out, fsdp_error *err)
{
    fsdp_file_list list = {.io = place->io};
    fsdp_text text = {0};
    fsdp_status st = list_files(place, &list, err);
    if (st == FSDP_OK)
        st = digest_all(&list, opts, err);
    if (st == FSDP_OK)
        st = fsdp_digests_encode(&list, &text, err);
    if (st == FSDP_OK)
        st = put_file(place, &text, err);
    *count_out = (int64_t)list.count;
    fsdp_text_release(&text);
    fsdp_file_list_release(&list);
    return st;
}

/* --- comparing -------------------------------------------------------------------------------- */

typedef struct digest_job {
    const digest_place *place;
    const fsdp_verify_opts *opts;
    fsdp_verify_summary *summary;
} digest_job;

static void report(digest_job *job, const char *name, fsdp_finding_kind kind, bool unreadable,
                   const char *text)
{
    fsdp_finding finding = {.file = name,
                            .tensor = "",
                            .block = -1,
                            .text = text,
                            .unreadable = unreadable,
                            .kind = kind};
    *(kind == FSDP_FINDING_VALUE ? &job->summary->warnings : &job->summary->findings) += 1;
    job->summary->unreadable += unreadable;
    if (job->opts->finding)
        job->opts->finding(job->opts->finding_context, &finding);
}

static void report_file(digest_job *job, const fsdp_listed_file *file, const char *path,
                        const char *what)
{
    char text[FSDP_ERROR_TEXT];
    snprintf(text, sizeof text, "'%s' %s '%s'", path, what, job->place->file);
    report(job, file->name, FSDP_FINDING_DAMAGE, false, text);
}

/* "." is the checkpoint itself. */
static char *path_of(const digest_place *place, const char *name)
{
    fsdp_text text = {0};
    if (strcmp(name, ".") == 0)
        return fsdp_strndup(place->path, strlen(place->path));
    fsdp_text_add(&text, place->path,
                  place->is_directory ? place->root_size - 1 : place->root_size);
    fsdp_text_addf(&text, "%s%s", place->is_directory ? "/" : "", name);
    char *path = text.failed ? NULL : fsdp_strndup(text.data, text.size);
    fsdp_text_release(&text);
    return path;
}

/* Adds the file to `now` when it is there with the listed size. */
static fsdp_status look_at(digest_job *job, const fsdp_listed_file *file, fsdp_file_list *now,
                           fsdp_error *err)
{
    fsdp_file_info info;
    char what[120], *path = path_of(job->place, file->name);
    if (!path)
        return fsdp_fail_memory(err, file->name);
    fsdp_status st = FSDP_OK;
    int result = job->place->io->ops->info(job->place->io, path, &info);
    if (result == -ENOENT || result == -ENOTDIR) {
        report_file(job, file, path, "is missing, and listed in");
    } else if (result < 0) {
        st = fsdp_fail_errno(err, -result, "cannot stat '%s'", path);
    } else if (info.kind != FSDP_FILE_REGULAR || info.size != file->size) {
        snprintf(what, sizeof what, "has %lld bytes, but not the %lld that are listed in",
                 (long long)info.size, (long long)file->size);
        report_file(job, file, path, what);
    } else {
        st = fsdp_file_list_add(now, path, file->name, file->size, err);
    }
    fsdp_free(path);
    return st;
}

/* Both lists are sorted, and `now` is a part of `listed`. */
static void compare_digests(digest_job *job, const fsdp_file_list *listed,
                            const fsdp_file_list *now)
{
    size_t at = 0;
    int64_t bytes = 0;
    for (size_t i = 0; i < now->count; i++) {
        while (strcmp(listed->items[at].name, now->items[i].name) != 0)
            at++;
        if (memcmp(listed->items[at].digest, now->items[i].digest, XXH3_SIZE) != 0)
            report_file(job, &now->items[i], now->items[i].path, "differs from its digest in");
        bytes += now->items[i].size;
    }
    if (bytes > job->summary->checked_bytes)
        job->summary->checked_bytes = bytes;
}

/* Files that came later are not damage. */
static void report_unlisted(digest_job *job, const fsdp_file_list *listed)
{
    fsdp_file_list now = {.io = job->place->io};
    char text[FSDP_ERROR_TEXT];
    size_t at = 0;
    if (list_files(job->place, &now, NULL) != FSDP_OK)
        now.count = 0; /* the verification has said why */
    for (size_t i = 0; i < now.count; i++) {
        while (at < listed->count && strcmp(listed->items[at].name, now.items[i].name) < 0)
            at++;
        if (at < listed->count && strcmp(listed->items[at].name, now.items[i].name) == 0)
            continue;
        snprintf(text, sizeof text, "'%s' is not listed in '%s': it was not compared",
                 now.items[i].path, job->place->file);
        report(job, now.items[i].name, FSDP_FINDING_VALUE, false, text);
    }
    fsdp_file_list_release(&now);
}

static fsdp_status compare_files(digest_job *job, const fsdp_file_list *listed, fsdp_error *err)
{
    fsdp_file_list now = {.io = job->place->io};
    fsdp_error found = {0};
    fsdp_status st = FSDP_OK;
    for (size_t i = 0; i < listed->count && st == FSDP_OK; i++)
        st = look_at(job, &listed->items[i], &now, &found);
    bool reads = job->opts->level >= FSDP_VERIFY_DATA;
    if (st == FSDP_OK && reads)
        st = digest_all(&now, job->opts, &found);
    if (st == FSDP_OK && reads)
        compare_digests(job, listed, &now);
    if (st == FSDP_OK)
        report_unlisted(job, listed);
    fsdp_file_list_release(&now);
    job->summary->digest_files = (int64_t)listed->count;
    if (st == FSDP_ERR_IO || st == FSDP_ERR_DAMAGED) {
        report(job, "", FSDP_FINDING_DAMAGE, st == FSDP_ERR_IO, found.text);
        return FSDP_OK;
    }
    if (st != FSDP_OK && err)
        *err = found;
    return st;
}

/* A digest file that cannot be used: another program's and a newer one are only named. */
static fsdp_status judge_file(digest_job *job, fsdp_status status, const fsdp_error *found,
                              fsdp_error *err)
{
    bool is_other =
        status == FSDP_ERR_USAGE || status == FSDP_ERR_REFUSED || found->errnum == EISDIR;
    fsdp_text text = {0};
    if (is_other && job->opts->digests == FSDP_DIGESTS_WRITE)
        return fsdp_fail(err, FSDP_ERR_EXISTS, "%s: it is not replaced; move it away first",
                         found->text);
    if (!is_other && status != FSDP_ERR_DAMAGED && status != FSDP_ERR_IO) {
        if (err)
            *err = *found;
        return status;
    }
    fsdp_text_addf(&text, "%s", found->text);
    if (is_other)
        fsdp_text_addf(&text, ": nothing is compared with it");
    else if (status == FSDP_ERR_DAMAGED)
        fsdp_text_addf(&text, "; the checkpoint may be good");
    report(job, job->place->file, is_other ? FSDP_FINDING_VALUE : FSDP_FINDING_DAMAGE,
           status == FSDP_ERR_IO, text.failed ? found->text : text.data);
    fsdp_text_release(&text);
    return FSDP_OK;
}

static fsdp_status read_list(const digest_place *place, fsdp_file_list *listed, char **data_out,
                             fsdp_error *err)
{
    size_t size = 0;
    FSDP_TRY(fsdp_io_read_file(place->io, place->file, LARGEST_FILE, data_out, &size, err));
    return fsdp_digests_decode(*data_out, size, place->file, listed, err);
}

static fsdp_status compare(digest_job *job, fsdp_error *err)
{
    fsdp_file_list listed = {.io = job->place->io};
    fsdp_error found = {0};
    char *data = NULL;
    fsdp_status st = read_list(job->place, &listed, &data, &found);
    st = st == FSDP_OK ? compare_files(job, &listed, err) : judge_file(job, st, &found, err);
    fsdp_file_list_release(&listed);
    fsdp_free(data);
    return st;
}

/* --- with a verification ---------------------------------------------------------------------- */

static bool has_file(const digest_place *place)
{
    fsdp_file *file = NULL;
    int result =
        place->io->ops->open(place->io, place->file, FSDP_IO_READ | FSDP_IO_BENEATH, &file);
    (void)fsdp_io_close(&file, place->file, NULL);
    return result != -ENOENT;
}

static fsdp_status verify_place(digest_job *job, fsdp_status status, fsdp_error *err)
{
    const char *path = job->place->path;
    fsdp_verify_summary *summary = job->summary;
    int64_t before = summary->findings;
    if (!has_file(job->place)) {
        if (job->opts->digests != FSDP_DIGESTS_WRITE || status != FSDP_OK)
            return status;
        FSDP_TRY(write_file(job->place, job->opts, &summary->digest_files, err));
        summary->digests_written = true;
        return FSDP_OK;
    }
    FSDP_TRY(compare(job, err));
    if (summary->findings == before || status == FSDP_ERR_IO)
        return status;
    if (summary->unreadable > 0)
        return fsdp_fail(err, FSDP_ERR_IO, "not all of '%s' could be read", path);
    return fsdp_fail(err, FSDP_DIFFERS, "'%s' is damaged: %lld faults", path,
                     (long long)summary->findings);
}

fsdp_status fsdp_digests_verify(fsdp_io *io, const char *path, const fsdp_verify_opts *opts,
                                fsdp_verify_summary *summary, fsdp_status status, fsdp_error *err)
{
    digest_place place = {0};
    digest_job job = {&place, opts, summary};
    bool is_judged = status == FSDP_OK || status == FSDP_DIFFERS || status == FSDP_ERR_IO;
    if (opts->digests == FSDP_DIGESTS_IGNORE || !is_judged)
        return status;
    bool must_write = opts->digests == FSDP_DIGESTS_WRITE && status == FSDP_OK;
    fsdp_error why = {0};
    fsdp_status st = place_init(&place, io, path, &why);
    place.variant = opts->variant;
    if (st == FSDP_OK) {
        status = verify_place(&job, status, err);
    } else if (must_write ||
               st != FSDP_ERR_USAGE) { /* "." has no name to put the digests next to */
        status = st;
        if (err)
            *err = why;
    }
    place_release(&place);
    return status;
}

int64_t fsdp_digests_bytes(fsdp_io *io, const char *path)
{
    const int64_t most = INT64_MAX / 4; /* sizes in a file may be any */
    digest_place place = {0};
    fsdp_file_list listed = {.io = io};
    char *data = NULL;
    int64_t bytes = 0;
    if (place_init(&place, io, path, NULL) == FSDP_OK && has_file(&place) &&
        read_list(&place, &listed, &data, NULL) == FSDP_OK)
        for (size_t i = 0; i < listed.count && bytes < most; i++)
            bytes += listed.items[i].size < most - bytes ? listed.items[i].size : most - bytes;
    fsdp_file_list_release(&listed);
    fsdp_free(data);
    place_release(&place);
    return bytes;
}

fsdp_status fsdp_digests_write(fsdp_io *io, const char *path, const fsdp_verify_opts *opts,
                               fsdp_error *err)
{
    fsdp_verify_opts writing = *opts;
    fsdp_verify_summary summary = {0};
    writing.digests = FSDP_DIGESTS_WRITE;
    writing.finding = NULL;
    return fsdp_digests_verify(io, path, &writing, &summary, FSDP_OK, err);
}
