/* The records of finished pieces of a conversion: see resume.h. */
#include "statedict/commit/resume.h"

#include "statedict/commit/commit_internal.h"
#include "statedict/sd/meter.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

enum { HEAD_BYTES = 96, HASH_DIGITS = 32 };
#define HEAD "fsdp-resume 1 "

/* Writes the hash, then the unit, and pads the head with spaces. */
static void spell_head(const char *hash, int64_t unit, char head_out[HEAD_BYTES + 1])
{
    int n = snprintf(head_out, HEAD_BYTES + 1, HEAD "%s %" PRId64, hash, unit);
    memset(head_out + n, ' ', (size_t)(HEAD_BYTES - n));
    head_out[HEAD_BYTES - 1] = '\n';
    head_out[HEAD_BYTES] = '\0';
}

static bool read_head(fsdp_file *file, const char *hash, int64_t *unit_out)
{
    char head[HEAD_BYTES + 1] = "", same[HEAD_BYTES + 1];
    size_t before = sizeof HEAD - 1 + HASH_DIGITS;
    if (file->ops->pread(file, head, HEAD_BYTES, 0) != HEAD_BYTES ||
        sscanf(head + before, "%" SCNd64, unit_out) != 1)
        return false;
    spell_head(hash, *unit_out, same);
    return memcmp(head, same, HEAD_BYTES) == 0;
}

/* A directory of another user may hold links that redirect writes. */
static bool is_of_user(fsdp_io *io, const char *staging)
{
    fsdp_file_info info;
    return io->ops->info(io, staging, &info) == 0 && info.kind == FSDP_FILE_DIRECTORY &&
           info.is_own;
}

bool fsdp_resume_matches(fsdp_io *io, const char *staging, const char *hash)
{
    int64_t unit;
    fsdp_file *file = NULL;
    char *path = fsdp_path_join(staging, FSDP_RESUME_NAME);
    bool same = path && strlen(hash) == HASH_DIGITS && is_of_user(io, staging) &&
                io->ops->open(io, path, FSDP_IO_READ | FSDP_IO_BENEATH, &file) == 0 &&
                read_head(file, hash, &unit);
    (void)fsdp_io_close(&file, FSDP_RESUME_NAME, NULL); /* only read */
    fsdp_free(path);
    return same;
}

void fsdp_resume_begin(fsdp_resume *resume, fsdp_io *io, const char *staging, const char *hash,
                       int64_t unit, bool is_there)
{
    char head[HEAD_BYTES + 1];
    unsigned flags = is_there ? FSDP_IO_WRITE | FSDP_IO_BENEATH : FSDP_IO_CREATE;
    *resume = (fsdp_resume){.path = fsdp_path_join(staging, FSDP_RESUME_NAME), .unit = unit};
    if (!resume->path || io->ops->open(io, resume->path, flags, &resume->file) < 0)
        return;
    spell_head(hash, unit, head);
    bool fine = is_there ? read_head(resume->file, hash, &resume->unit)
                         : resume->file->ops->pwrite(resume->file, head, HEAD_BYTES, 0) > 0;
    if (!fine)
        fsdp_resume_end(resume);
}

bool fsdp_resume_get(const fsdp_resume *resume, int64_t number, void *record, size_t size)
{
    static const char nothing[128];
    if (!resume->file || size > sizeof nothing)
        return false;
    ssize_t n =
        resume->file->ops->pread(resume->file, record, size, HEAD_BYTES + number * (int64_t)size);
    return n == (ssize_t)size && memcmp(record, nothing, size) != 0;
}

void fsdp_resume_put(const fsdp_resume *resume, int64_t number, const void *record, size_t size)
{
    if (resume->file)
        (void)!resume->file->ops->pwrite(resume->file, record, size,
                                         HEAD_BYTES + number * (int64_t)size);
}

void fsdp_resume_end(fsdp_resume *resume)
{
    (void)fsdp_io_close(&resume->file, FSDP_RESUME_NAME, NULL); /* best effort */
    fsdp_free(resume->path);
    *resume = (fsdp_resume){0};
}

/* --- notices ---------------------------------------------------------------------------------- */

void fsdp_resume_notify(const fsdp_watch *watch, const char *staging)
{
    if (staging)
        fsdp_notice(watch, "resuming '%s'", staging);
    else
        fsdp_notice(
            watch, "no interrupted conversion of this plan was found; starting from the beginning");
}

void fsdp_resume_notify_kept(const fsdp_watch *watch, int64_t bytes)
{
    fsdp_notice(watch, "%" PRId64 " bytes existed already and were not written again", bytes);
}

/* --- space of the resumed files --------------------------------------------------------------- */

typedef struct size_sum {
    fsdp_io *io;
    const char *hash, *dir;
    int64_t bytes;
    int depth;
} size_sum;

static int add_size(void *context, const char *name)
{
    size_sum *sum = context;
    fsdp_file_info info;
    if (strcmp(name, FSDP_RESUME_NAME) == 0)
        return 0; /* of .resume, not of converted data */
    char *path = fsdp_path_join(sum->dir, name);
    if (path && sum->io->ops->info(sum->io, path, &info) == 0) {
        if (info.kind == FSDP_FILE_REGULAR)
            sum->bytes += info.size;
        if (info.kind == FSDP_FILE_DIRECTORY && sum->depth == 0) {
            size_sum inner = {.io = sum->io, .dir = path, .depth = 1};
            (void)sum->io->ops->list(sum->io, path, add_size, &inner);
            sum->bytes += inner.bytes;
        }
    }
    fsdp_free(path);
    return 0;
}

/* Counts a staging directory, unless a living conversion of the same plan has it locked. */
static bool add_staging(void *context, const char *path)
{
    size_sum *sum = context;
    fsdp_file *marker;
    sum->dir = path;
    if (fsdp_resume_matches(sum->io, path, sum->hash) &&
        fsdp_marker_take_over(sum->io, path, FSDP_MARKER_SAVING, &marker)) {
        (void)sum->io->ops->list(sum->io, path, add_size, sum);
        (void)fsdp_io_close(&marker, path, NULL); /* nothing was written */
    }
    return true;
}

int64_t fsdp_resume_bytes(fsdp_io *io, const char *to, const char *hash)
{
    size_sum sum = {.io = io, .hash = hash};
    (void)fsdp_beside_each(io, to, FSDP_SUFFIX_STAGING, add_staging, &sum);
    return sum.bytes;
}
