/* The text of a digest file: see digests.h. */
#include "statedict/checkpoint/digests.h"

#include "base/data/json.h"
#include "kernels/kernels.h"
#include "statedict/manifest/disk_names.h"

#include <inttypes.h>
#include <string.h>

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
                             "'%s' has a name that is not UTF-8, which a digest file cannot hold",
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

bool fsdp_digests_name_is_clean(const char *name, size_t size)
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
    if (st != FSDP_OK || !fsdp_digests_name_is_clean(name, size))
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
        return fail_line(reader, "does not begin with a digest", err);
    at++;
    const char *first = at;
    for (; at < end && *at >= '0' && *at <= '9'; at++)
        if (fsdp_mul_overflow(file.size, 10, &file.size) ||
            __builtin_add_overflow(file.size, (int64_t)(*at - '0'), &file.size))
            return fail_line(reader, "has a size that is too large", err);
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
        return fsdp_fail(err, FSDP_ERR_USAGE, "'%s' is no digest file of fsdp", reader->path);
    if (!is_there)
        return fsdp_fail(err, FSDP_ERR_DAMAGED,
                         "'%s' is damaged: its last line is no digest of the others", reader->path);
    fsdp_hash hash = fsdp_kernels_get()->hash(data, (size_t)(reader->end - data));
    if (memcmp(hash.bytes, said.bytes, HASH) == 0)
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_DAMAGED,
                     "'%s' is damaged: its lines differ from the digest in its last line",
                     reader->path);
}

fsdp_status fsdp_digests_decode(const char *data, size_t size, const char *path,
                                fsdp_file_list *list, fsdp_error *err)
{
    const size_t first = sizeof FIRST_LINE - 1;
    digest_reader reader = {.path = path, .list = list, .line = 1};
    FSDP_TRY(check_end(&reader, data, size, err));
    if (size < first || memcmp(data, FIRST_LINE, first) != 0)
        return fsdp_fail(err, FSDP_ERR_REFUSED, "'%s' is of a newer version of fsdp", path);
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
