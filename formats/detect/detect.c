/*
 * Room detect: the list of all formats, and the format of a path.
 *
 * In: a path, and options that may name the format. Out: an open source (source.h), or a format by its name
 * (<fsdp/format.h>).
 *
 *   format_list.inc  the formats: a new one is one more line
 *   formats.c        the list as an array
 *   format_find.c    formats by their names
 *   detect.c         fsdp_source_open: the path is examined once, every format bids on the facts found, and
 *                    the highest bid opens it; archives are refused, with the command that unpacks them
 *
 * The functions of the room are declared in <fsdp/format.h>, source.h and target.h. Callers: statedict, and
 * the tools of the list. It is the top of formats and may refer to all rooms.
 */
#include "base/io/io_note.h"
#include "formats/source/source_internal.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

enum { NAMES_SHOWN = 5, BYTES_SHOWN = 8 };

/* --- examining a path ------------------------------------------------------------------------- */

typedef struct seen_path {
    fsdp_probe probe;
    fsdp_arena arena;
    const char **names;
    size_t name_count, name_room;
    bool is_full; /* out of memory for a name */
    uint8_t head[FSDP_PROBE_BYTES];
} seen_path;

static int keep_name(void *context, const char *name)
{
    seen_path *seen = context;
    const char *copy = fsdp_arena_strndup(&seen->arena, name, strlen(name));
    if (!copy ||
        !fsdp_grow(&seen->names, &seen->name_room, seen->name_count + 1, sizeof *seen->names)) {
        seen->is_full = true;
        return 1;
    }
    seen->names[seen->name_count++] = copy;
    return 0;
}

static int compare_names(const void *a, const void *b)
{
    const char *const *x = a, *const *y = b;
    return strcmp(*x, *y);
}

static fsdp_status look_into(seen_path *seen, const char *directory, fsdp_error *err)
{
    fsdp_io *io = seen->probe.io;
    int result = io->ops->list(io, directory, keep_name, seen);
    if (seen->is_full)
        return fsdp_fail_memory(err, seen->probe.path);
    if (result < 0)
        return fsdp_fail_errno(err, -result, "cannot list '%s'", directory);
    if (seen->name_count > 0)
        qsort(seen->names, seen->name_count, sizeof *seen->names, compare_names);
    seen->probe.names = seen->names;
    seen->probe.name_count = seen->name_count;
    return FSDP_OK;
}

static fsdp_status look_at_head(seen_path *seen, fsdp_error *err)
{
    fsdp_probe *probe = &seen->probe;
    fsdp_file *file = NULL;
    FSDP_TRY(fsdp_io_open(probe->io, probe->path, FSDP_IO_READ, &file, err));
    int result = file->ops->size(file, &probe->size);
    fsdp_status status = FSDP_OK;
    if (result < 0)
        status = fsdp_fail_errno(err, -result, "cannot get the size of '%s'", probe->path);
    probe->head = seen->head;
    probe->head_size = probe->size < FSDP_PROBE_BYTES ? (size_t)probe->size : FSDP_PROBE_BYTES;
    if (status == FSDP_OK)
        status = fsdp_io_read(file, probe->path, seen->head, probe->head_size, 0, err);
    (void)fsdp_io_close(&file, probe->path, NULL); /* only read: nothing can be lost */
    return status;
}

static fsdp_status look_beside(seen_path *seen, fsdp_error *err)
{
    const char *path = seen->probe.path, *slash = strrchr(path, '/');
    char *directory = slash ? fsdp_strndup(path, (size_t)(slash - path) + 1) : fsdp_strndup(".", 1);
    if (!directory)
        return fsdp_fail_memory(err, path);
    fsdp_status status = look_into(seen, directory, err);
    fsdp_free(directory);
    return status;
}

static fsdp_status look(seen_path *seen, fsdp_error *err)
{
    fsdp_file_info info;
    int result = seen->probe.io->ops->info(seen->probe.io, seen->probe.path, &info);
    seen->probe.is_pattern = result == -ENOENT && fsdp_source_is_pattern(seen->probe.path);
    if (seen->probe.is_pattern)
        return look_beside(seen, err);
    if (result < 0)
        return fsdp_fail_errno(err, -result, "cannot open '%s'", seen->probe.path);
    seen->probe.is_directory = info.kind == FSDP_FILE_DIRECTORY;
    return seen->probe.is_directory ? look_into(seen, seen->probe.path, err)
                                    : look_at_head(seen, err);
}

/* --- archives ----------------------------------------------------------------------------------- */

/* A way of packing, and the program that unpacks one file. */
static const struct packing {
    const char *name, *head, *command;
    size_t offset, size;
} packings[] = {
    {"tar", "ustar", "tar -xf", 257, 5},
    {"gzip", "\x1f\x8b\x08", "gzip -dk", 0, 3},
    {"zstd", "\x28\xb5\x2f\xfd", "zstd -d", 0, 4},
    {"xz",
     "\xfd"
     "7zXZ\0",
     "xz -dk", 0, 6},
    {"bzip2", "BZh", "bzip2 -dk", 0, 3},
};

static bool is_it(const struct packing *packing, const fsdp_probe *probe)
{
    return probe->head_size >= packing->offset + packing->size &&
           memcmp(probe->head + packing->offset, packing->head, packing->size) == 0;
}

/* "x.tar.gz", "x.tgz" */
static bool holds_tar(const char *path)
{
    static const char *const short_names[] = {".tgz", ".tzst", ".txz", ".tbz", ".tbz2"};
    const char *slash = strrchr(path, '/');
    for (size_t i = 0; i < sizeof short_names / sizeof *short_names; i++)
        if (fsdp_has_suffix(path, short_names[i]))
            return true;
    return strstr(slash ? slash + 1 : path, ".tar.") != NULL;
}

/* FSDP_ERR_NOT_FOUND names the kind of archive that the file is, and the command that unpacks it. FSDP_OK: it
 * is none that is known. */
static fsdp_status check_archive(const fsdp_probe *probe, fsdp_error *err)
{
    for (size_t i = 0; i < sizeof packings / sizeof *packings && !probe->is_directory; i++) {
        const struct packing *packing = &packings[i];
        fsdp_text path = {0};
        if (!is_it(packing, probe))
            continue;
        bool is_tar = i == 0 || holds_tar(probe->path);
        fsdp_text_add_quoted(&path, probe->path);
        fsdp_status st =
            path.failed ? fsdp_fail_memory(err, probe->path)
                        : fsdp_fail(err, FSDP_ERR_NOT_FOUND,
                                    "'%s' is packed (%s); unpack it first with %s %s, and name the "
                                    "unpacked files",
                                    probe->path, i > 0 && is_tar ? "tar" : packing->name,
                                    is_tar ? packings[0].command : packing->command, path.data);
        fsdp_text_release(&path);
        return st;
    }
    return FSDP_OK;
}

/* --- errors ----------------------------------------------------------------------------------- */

static void describe_directory(const fsdp_probe *probe, fsdp_text *text)
{
    if (probe->name_count == 0) {
        fsdp_text_addf(text, "it is an empty directory");
        return;
    }
    fsdp_text_addf(text, "the directory holds");
    for (size_t i = 0; i < probe->name_count && i < NAMES_SHOWN; i++) {
        char shown[80];
        fsdp_text_addf(
            text, "%s '%s'", i > 0 ? "," : "",
            fsdp_printable(probe->names[i], strlen(probe->names[i]), shown, sizeof shown));
    }
    if (probe->name_count > NAMES_SHOWN)
        fsdp_text_addf(text, " and %zu more", probe->name_count - NAMES_SHOWN);
}

static void describe_head(const fsdp_probe *probe, fsdp_text *text)
{
    if (probe->size == 0) {
        fsdp_text_addf(text, "the file is empty");
        return;
    }
    fsdp_text_addf(text, "the file of %" PRId64 " bytes begins with", probe->size);
    for (size_t i = 0; i < probe->head_size && i < BYTES_SHOWN; i++)
        fsdp_text_addf(text, " %02x", probe->head[i]);
}

static bool bids(const fsdp_format *format)
{
    return format->reader && format->reader->bid;
}

static fsdp_status fail_unknown(const fsdp_probe *probe, fsdp_error *err)
{
    fsdp_text text = {0};
    FSDP_TRY(check_archive(probe, err));
    if (probe->is_directory)
        describe_directory(probe, &text);
    else
        describe_head(probe, &text);
    fsdp_text_addf(&text, "; looked for fsdp (a directory with manifest.json)");
    const fsdp_format *format;
    for (size_t i = 0; (format = fsdp_format_at(i)) != NULL; i++)
        if (bids(format))
            fsdp_text_addf(&text, ", %s", format->name);
    fsdp_status status =
        text.failed ? fsdp_fail_memory(err, probe->path)
                    : fsdp_fail(err, FSDP_ERR_NOT_FOUND, "'%s' is not in a known format: %s",
                                probe->path, text.data);
    fsdp_text_release(&text);
    return status;
}

/* --- bids ------------------------------------------------------------------------------------- */

/* The format of a pattern of names that is not a path. */
static const fsdp_format *of_patterns(void)
{
    size_t i = 0;
    while (!fsdp_format_at(i)->caps.patterns)
        i++;
    return fsdp_format_at(i);
}

static const fsdp_format *choose(const fsdp_probe *probe)
{
    const fsdp_format *best = NULL, *format;
    int best_bid = 0;
    if (probe->is_pattern)
        return of_patterns();
    for (size_t i = 0; (format = fsdp_format_at(i)) != NULL; i++) {
        int bid = bids(format) ? format->reader->bid(probe) : 0;
        if (bid > best_bid) {
            best = format;
            best_bid = bid;
        }
    }
    return best;
}

/* The format that the user names, if it takes paths of this kind. */
static fsdp_status find_named(const fsdp_probe *probe, const char *name,
                              const fsdp_format **format_out, fsdp_error *err)
{
    const fsdp_format *format = fsdp_format_from(name);
    if (!format || !format->reader)
        return fsdp_fail(err, FSDP_ERR_USAGE, "'%.40s' is not a format that can be read", name);
    *format_out = format;
    if (probe->is_pattern && !format->caps.patterns)
        return fsdp_fail(err, FSDP_ERR_NOT_FOUND,
                         "'%s' does not exist; as a pattern it would be of format %s, not %s",
                         probe->path, of_patterns()->name, name);
    if (probe->is_directory ? format->reads_directory : probe->is_pattern || format->reads_file)
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_NOT_FOUND, "'%s' is a %s, but format %s is a %s", probe->path,
                     probe->is_directory ? "directory" : "file", name,
                     probe->is_directory ? "file" : "directory");
}

/* Opens a source and records every file that the format reads by itself (an index, metadata), so
 * that it becomes a file of the source. */
static fsdp_status open_noted(const fsdp_probe *probe, const fsdp_format *format,
                              fsdp_source **source_out, fsdp_error *err)
{
    fsdp_io_note note;
    fsdp_probe noted = *probe;
    fsdp_io_note_begin(&note, probe->io);
    noted.io = &note.io;
    fsdp_status status = format->reader->open(&noted, source_out, err);
    fsdp_source *source = status == FSDP_OK ? *source_out : NULL;
    if (source)
        status = fsdp_source_take_notes(source, &note, err);
    if (status != FSDP_OK) {
        fsdp_source_close(source);
        *source_out = NULL;
    }
    fsdp_io_note_release(&note);
    return status;
}

/* The caller frees it, also after a failure. NULL: no memory. */
static seen_path *begin_look(fsdp_io *io, const char *path, const fsdp_source_opts *opts)
{
    seen_path *seen = fsdp_alloc(1, sizeof *seen);
    if (!seen)
        return NULL;
    seen->probe.io = io ? io : fsdp_io_posix();
    seen->probe.path = path;
    seen->probe.opts = opts;
    return seen;
}

static void end_look(seen_path *seen)
{
    fsdp_free(seen->names);
    fsdp_arena_release(&seen->arena);
    fsdp_free(seen);
}

fsdp_status fsdp_source_open(fsdp_io *io, const char *path, const fsdp_source_opts *opts,
                             fsdp_source **source_out, fsdp_error *err)
{
    *source_out = NULL;
    seen_path *seen = begin_look(io, path, opts);
    if (!seen)
        return fsdp_fail_memory(err, path);
    const fsdp_format *format = NULL;
    fsdp_status status = look(seen, err);
    if (status == FSDP_OK && opts && opts->format)
        status = find_named(&seen->probe, opts->format, &format, err);
    else if (status == FSDP_OK)
        format = choose(&seen->probe);
    if (status == FSDP_OK && format)
        status = open_noted(&seen->probe, format, source_out, err);
    else if (status == FSDP_OK)
        status = fail_unknown(&seen->probe, err);
    end_look(seen);
    return status;
}

fsdp_status fsdp_source_recognise(fsdp_io *io, const char *path, bool *is_known_out,
                                  fsdp_error *err)
{
    seen_path *seen = begin_look(io, path, NULL);
    if (!seen)
        return fsdp_fail_memory(err, path);
    fsdp_status status = look(seen, err);
    *is_known_out = status == FSDP_OK && choose(&seen->probe);
    end_look(seen);
    return status;
}
