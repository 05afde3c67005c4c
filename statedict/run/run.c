/*
 * Runs: a directory of checkpoints named step-N. Lists them, finds the newest one that verifies, and removes
 * those that no rule keeps. The file `latest` is a hint for people and is never read.
 */
#include "statedict/run/run_internal.h"
#include "base/core/given.h"
#include "base/core/mem.h"
#include "base/io/process.h"
#include "kernels/kernels.h"
#include "statedict/commit/commit_internal.h"
#include "statedict/commit/lease_internal.h"
#include "statedict/commit/leftovers.h"
#include "statedict/manifest/manifest.h"

#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* === verified checkpoints ===================================================================== */

enum { VERIFIED_KEPT = 4096 }; /* the last ones */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static fsdp_fingerprint known[VERIFIED_KEPT];
static size_t known_count;

bool fsdp_verified_has(const fsdp_fingerprint *print)
{
    bool found = false;
    pthread_mutex_lock(&lock);
    size_t count = known_count < VERIFIED_KEPT ? known_count : VERIFIED_KEPT;
    for (size_t i = 0; i < count && !found; i++)
        found = memcmp(&known[i], print, sizeof *print) == 0;
    pthread_mutex_unlock(&lock);
    return found;
}

void fsdp_verified_add(const fsdp_fingerprint *print)
{
    if (fsdp_verified_has(print))
        return;
    pthread_mutex_lock(&lock);
    known[known_count++ % VERIFIED_KEPT] = *print;
    pthread_mutex_unlock(&lock);
}

/* Directory order is undefined, so the hashes of names are added up. */
static void add_hash(fsdp_fingerprint *print, const void *data, size_t size)
{
    fsdp_hash hash = fsdp_kernels_get()->hash(data, size);
    uint64_t parts[2];
    memcpy(parts, hash.bytes, sizeof parts);
    print->parts[0] += parts[0];
    print->parts[1] += parts[1];
}

static bool add_file(fsdp_io *io, const char *dir, const char *name, fsdp_fingerprint *print)
{
    fsdp_file_info info;
    char *path = fsdp_path_join(dir, name);
    bool seen = path && io->ops->info(io, path, &info) == 0;
    fsdp_free(path);
    if (!seen)
        return false;
    fsdp_hash hash = fsdp_kernels_get()->hash(name, strlen(name));
    uint64_t facts[6] = {0,           0,        (uint64_t)info.size, (uint64_t)info.mtime_ns,
                         info.device, info.node};
    memcpy(facts, hash.bytes, sizeof hash.bytes);
    add_hash(print, facts, sizeof facts);
    return true;
}

/* Markers and pins are not part of the fingerprint: they change while the data does not. */
static bool is_part(void *context, const char *name)
{
    (void)context;
    return name[0] != '.';
}

static bool fingerprint_take(fsdp_io *io, const char *dir, fsdp_fingerprint *print_out)
{
    fsdp_io_names names;
    *print_out = (fsdp_fingerprint){{0}};
    if (fsdp_io_list_names(io, dir, is_part, NULL, &names, NULL) != FSDP_OK)
        return false;
    bool seen = true;
    for (size_t i = 0; i < names.count && seen; i++)
        seen = add_file(io, dir, names.items[i], print_out);
    fsdp_io_names_release(&names);
    add_hash(print_out, dir, strlen(dir));
    add_hash(print_out, &io,
             sizeof io); /* tests simulate many disks, on which the same names recur */
    return seen;
}

/* === runs ===================================================================================== */

void fsdp_string_free(char *text)
{
    fsdp_free(text);
}

void fsdp_run_steps_release(fsdp_run_steps *steps)
{
    if (!steps)
        return;
    for (size_t i = 0; i < steps->count; i++) {
        fsdp_free(steps->items[i].name);
        fsdp_free(steps->items[i].reason);
    }
    fsdp_free(steps->items);
    *steps = (fsdp_run_steps){0};
}

/* --- names ------------------------------------------------------------------------------------ */

typedef struct scan {
    fsdp_run_steps *steps;
    size_t capacity;
    bool failed;
} scan;

static bool state_of_name(fsdp_step_name_kind kind, fsdp_step_state *state_out)
{
    switch (kind) {
    case FSDP_NAME_STEP: *state_out = FSDP_STEP_GOOD; return true;
    case FSDP_NAME_STAGING: *state_out = FSDP_STEP_STAGING; return true;
    case FSDP_NAME_DELETING: *state_out = FSDP_STEP_DELETING; return true;
    case FSDP_NAME_REPLACED: *state_out = FSDP_STEP_REPLACED; return true;
    case FSDP_NAME_OTHER: break;
    }
    return false;
}

static int collect_step(void *context, const char *name)
{
    scan *found = context;
    fsdp_run_steps *steps = found->steps;
    fsdp_run_step step = {.step = FSDP_NO_STEP};
    if (!state_of_name(fsdp_step_parse(name, &step.step), &step.state))
        return 0;
    step.name = fsdp_strndup(name, strlen(name));
    if (!step.name ||
        !fsdp_grow(&steps->items, &found->capacity, steps->count + 1, sizeof *steps->items)) {
        fsdp_free(step.name);
        found->failed = true;
        return 1;
    }
    steps->items[steps->count++] = step;
    return 0;
}

static int newest_first(const void *left, const void *right)
{
    const fsdp_run_step *a = left, *b = right;
    if (a->step != b->step)
        return a->step > b->step ? -1 : 1;
    if (a->state != b->state)
        return a->state < b->state ? -1 : 1;
    return strcmp(a->name, b->name);
}

fsdp_status fsdp_run_scan(const char *run, fsdp_io *io, fsdp_run_steps *steps_out, fsdp_error *err)
{
    io = io ? io : fsdp_io_posix();
    *steps_out = (fsdp_run_steps){0};
    scan found = {.steps = steps_out};
    int result = io->ops->list(io, run, collect_step, &found);
    if (result == 0 && !found.failed) {
        if (steps_out->count > 1)
            qsort(steps_out->items, steps_out->count, sizeof *steps_out->items, newest_first);
        return FSDP_OK;
    }
    fsdp_run_steps_release(steps_out);
    return found.failed ? fsdp_fail_memory(err, run)
                        : fsdp_fail_errno(err, -result, "cannot read directory '%s'", run);
}

/* --- one step --------------------------------------------------------------------------------- */

static fsdp_status check_manifest(const char *path, int64_t step, fsdp_io *io, fsdp_error *err)
{
    fsdp_manifest manifest;
    FSDP_TRY(fsdp_manifest_read(io, path, &manifest, err));
    int64_t stated = manifest.step;
    fsdp_manifest_release(&manifest);
    if (stated != FSDP_NO_STEP && stated != step)
        return fsdp_fail(err, FSDP_ERR_DAMAGED, "'%s' holds step %" PRId64 ": it was renamed", path,
                         stated);
    return FSDP_OK;
}

static fsdp_status check_data(const char *path, const fsdp_verify_opts *opts, fsdp_error *err)
{
    fsdp_verify_summary summary = {0};
    fsdp_status status = fsdp_checkpoint_verify(path, opts, &summary, err);
    if (status == FSDP_DIFFERS)
        fsdp_fail(err, FSDP_DIFFERS, "'%s' is damaged in %" PRId64 " place%s", path,
                  summary.findings, summary.findings == 1 ? "" : "s");
    return status;
}

/* True for a status that is a fault of the checkpoint, and false for one that prevented the check (no memory,
 * cancelled). */
static bool is_fault(fsdp_status status)
{
    switch (status) {
    case FSDP_DIFFERS:
    case FSDP_ERR_NOT_FOUND:
    case FSDP_ERR_DAMAGED:
    case FSDP_ERR_REFUSED:
    case FSDP_ERR_IO: return true;
    default: return false;
    }
}

/* Verifies the step directory with opts. */
static fsdp_status check_step(const char *run, const fsdp_run_step *step,
                              const fsdp_verify_opts *opts, fsdp_error *err)
{
    char *path = fsdp_path_join(run, step->name);
    if (!path)
        return fsdp_fail_memory(err, run);
    fsdp_status status = check_manifest(path, step->step, fsdp_access_io(&opts->access), err);
    if (status == FSDP_OK)
        status = check_data(path, opts, err);
    fsdp_free(path);
    return status;
}

/* A checkpoint that changes during the read does not enter the cache. */
static fsdp_status check_once(const char *run, const fsdp_run_step *step,
                              const fsdp_verify_opts *opts, fsdp_error *err)
{
    fsdp_fingerprint before, after;
    fsdp_verify_opts whole = *opts;
    whole.level = FSDP_VERIFY_DATA;
    char *path = fsdp_path_join(run, step->name);
    if (!path)
        return fsdp_fail_memory(err, run);
    bool seen = fingerprint_take(fsdp_access_io(&opts->access), path, &before);
    fsdp_status status = FSDP_OK;
    if (!seen || !fsdp_verified_has(&before)) {
        status = check_step(run, step, &whole, err);
        if (status == FSDP_OK && seen &&
            fingerprint_take(fsdp_access_io(&opts->access), path, &after) &&
            memcmp(&before, &after, sizeof before) == 0)
            fsdp_verified_add(&before);
    }
    fsdp_free(path);
    return status;
}

/* True when the disk or a permission prevented the check. The checkpoint may be good, so an older one does
 * not replace it; the same holds for one of a newer format version. */
static bool is_out_of_reach(fsdp_status status, const fsdp_error *err)
{
    if (status != FSDP_ERR_IO)
        return false;
    switch (err->errnum) {
    case EACCES:
    case EPERM:
    case ESTALE:
    case ETIMEDOUT:
    case ENOTCONN: return true;
    default: return false;
    }
}

bool fsdp_run_may_skip(fsdp_status status, const fsdp_error *err)
{
    return is_fault(status) && !is_out_of_reach(status, err);
}

fsdp_status fsdp_run_refuse_newer(const char *path, fsdp_io *io, fsdp_error *err)
{
    int major;
    fsdp_error reason = {0};
    fsdp_status status = fsdp_manifest_major(io, path, &major, &reason);
    if (status == FSDP_OK && major > FSDP_FORMAT_MAJOR)
        return fsdp_fail(
            err, FSDP_ERR_REFUSED,
            "'%s' has format version %d, but this fsdp reads version %d; use an fsdp that reads "
            "that version, or name an older checkpoint of the run by its own path",
            path, major, FSDP_FORMAT_MAJOR);
    if (status == FSDP_OK || fsdp_run_may_skip(status, &reason))
        return FSDP_OK;
    if (err)
        *err = reason;
    return status;
}

static fsdp_status refuse_newer_step(const char *run, const fsdp_run_step *step, fsdp_io *io,
                                     fsdp_error *err)
{
    char *path = fsdp_path_join(run, step->name);
    if (!path)
        return fsdp_fail_memory(err, run);
    fsdp_status status = fsdp_run_refuse_newer(path, io, err);
    fsdp_free(path);
    return status;
}

/* --- all steps -------------------------------------------------------------------------------- */

static bool has_pin(const char *run, const char *name, fsdp_io *io)
{
    char *dir = fsdp_path_join(run, name);
    char *path = dir ? fsdp_path_join(dir, FSDP_PIN_NAME) : NULL;
    bool has = path && fsdp_io_exists(io, path);
    fsdp_free(path);
    fsdp_free(dir);
    return has;
}

/* A marker that cannot be read counts as held: leaving a directory alone is the safe mistake. */
static bool has_maker(const char *run, const char *name, fsdp_io *io)
{
    bool held = true;
    char *dir = fsdp_path_join(run, name);
    if (dir) {
        fsdp_marker_state saving = fsdp_marker_look(io, dir, FSDP_MARKER_SAVING);
        fsdp_marker_state publishing = fsdp_marker_look(io, dir, FSDP_MARKER_PUBLISHING);
        held = saving == FSDP_MARKER_HELD || saving == FSDP_MARKER_UNKNOWN ||
               publishing == FSDP_MARKER_HELD || publishing == FSDP_MARKER_UNKNOWN;
    }
    fsdp_free(dir);
    return held;
}

static bool is_at_work(const char *run, const fsdp_run_step *step, fsdp_io *io)
{
    if (step->state == FSDP_STEP_STAGING && has_maker(run, step->name, io))
        return true;
    return fsdp_lease_is_held(io, run);
}

static fsdp_status examine(const char *run, fsdp_io *io, fsdp_run_step *step, fsdp_error *err)
{
    if (step->state == FSDP_STEP_STAGING || step->state == FSDP_STEP_DELETING)
        step->at_work = is_at_work(run, step, io);
    if (step->state != FSDP_STEP_GOOD)
        return FSDP_OK;
    step->pinned = has_pin(run, step->name, io);
    fsdp_error reason = {0};
    fsdp_status status = check_step(run, step, &(fsdp_verify_opts){.access.disk = io}, &reason);
    if (status == FSDP_OK)
        return FSDP_OK;
    if (!is_fault(status)) {
        if (err)
            *err = reason;
        return status;
    }
    fsdp_error newer = {0};
    status = refuse_newer_step(run, step, io, &newer);
    if (status != FSDP_OK && status != FSDP_ERR_REFUSED && !is_out_of_reach(status, &newer)) {
        if (err)
            *err = newer;
        return status;
    }
    step->state = status == FSDP_ERR_REFUSED ? FSDP_STEP_NEWER : FSDP_STEP_BROKEN;
    step->reason = fsdp_strndup(reason.text, strlen(reason.text));
    return step->reason ? FSDP_OK : fsdp_fail_memory(err, run);
}

/* True when retention or a save removed the step after it was listed. */
static bool is_gone(const char *run, const fsdp_run_step *step, fsdp_io *io)
{
    fsdp_file_info info;
    char *path = fsdp_path_join(run, step->name);
    bool gone = path && io->ops->info(io, path, &info) == -ENOENT;
    fsdp_free(path);
    return gone;
}

static void drop(fsdp_run_steps *steps, size_t at)
{
    fsdp_free(steps->items[at].name);
    fsdp_free(steps->items[at].reason);
    memmove(&steps->items[at], &steps->items[at + 1],
            (steps->count - at - 1) * sizeof *steps->items);
    steps->count--;
}

fsdp_status fsdp_run_list(const char *run, const fsdp_access *access, fsdp_run_steps *steps_out,
                          fsdp_error *err)
{
    FSDP_NEED(err, run, steps_out);
    fsdp_io *io = fsdp_access_io(access);
    FSDP_TRY(fsdp_run_scan(run, io, steps_out, err));
    fsdp_status status = FSDP_OK;
    for (size_t i = 0; i < steps_out->count && status == FSDP_OK;) {
        fsdp_run_step *step = &steps_out->items[i];
        status = examine(run, io, step, err);
        if (status == FSDP_OK && step->state != FSDP_STEP_GOOD && is_gone(run, step, io))
            drop(steps_out, i);
        else
            i++;
    }
    if (status != FSDP_OK)
        fsdp_run_steps_release(steps_out);
    return status;
}

/* --- the newest good one ---------------------------------------------------------------------- */

static void notify_skipped(const fsdp_watch *watch, const char *run, const char *name,
                           const char *reason)
{
    char text[FSDP_ERROR_TEXT + 300];
    if (!watch->notice)
        return;
    snprintf(text, sizeof text, "skipping '%s' of '%s': %s", name, run, reason);
    watch->notice(watch->context, text);
}

/* Sends a notice about a step that an interrupted overwrite set aside. */
static void notify_set_aside(const fsdp_watch *watch, const char *run, const fsdp_run_step *step,
                             fsdp_io *io)
{
    char name[FSDP_STEP_NAME_SIZE];
    fsdp_step_name(step->step, name);
    char *path = step->state == FSDP_STEP_REPLACED ? fsdp_path_join(run, name) : NULL;
    if (path && !fsdp_io_exists(io, path))
        notify_skipped(watch, run, step->name,
                       "set aside by an interrupted overwrite; restore it with fsdp-gc --yes");
    fsdp_free(path);
}

/* The step was not named by the user: a link to another place is followed on request only, and an older step
 * does not stand for it. */
static fsdp_status check_link(const char *run, const fsdp_run_step *step, fsdp_io *io,
                              fsdp_error *err)
{
    char *path = fsdp_path_join(run, step->name);
    fsdp_status st = path ? fsdp_io_check_link(io, path, err) : fsdp_fail_memory(err, run);
    fsdp_free(path);
    return st;
}

static fsdp_status newest_of(const char *run, const fsdp_run_steps *steps,
                             const fsdp_verify_opts *opts, char **path_out, fsdp_error *err)
{
    size_t skipped = 0;
    fsdp_io *io = fsdp_access_io(&opts->access);
    for (size_t i = 0; i < steps->count; i++) {
        const fsdp_run_step *step = &steps->items[i];
        notify_set_aside(&opts->watch, run, step, io);
        if (step->state != FSDP_STEP_GOOD)
            continue;
        fsdp_error reason = {0};
        FSDP_TRY(check_link(run, step, io, err));
        fsdp_status status = check_step(run, step, opts, &reason);
        if (status == FSDP_OK) {
            *path_out = fsdp_path_join(run, step->name);
            return *path_out ? FSDP_OK : fsdp_fail_memory(err, run);
        }
        if (!fsdp_run_may_skip(status, &reason)) {
            if (err)
                *err = reason;
            return status;
        }
        FSDP_TRY(refuse_newer_step(run, step, io, err));
        notify_skipped(&opts->watch, run, step->name, reason.text);
        skipped++;
    }
    if (skipped == 0)
        return fsdp_fail(err, FSDP_ERR_NOT_FOUND, "run '%s' holds no checkpoint", run);
    return fsdp_fail(err, FSDP_ERR_NOT_FOUND,
                     "run '%s' holds no good checkpoint: %zu do not verify", run, skipped);
}

fsdp_status fsdp_run_latest(const char *run, fsdp_verify_level level, const fsdp_watch *watch,
                            const fsdp_access *access, char **path_out, fsdp_error *err)
{
    FSDP_NEED(err, path_out);
    *path_out = NULL;
    FSDP_NEED(err, run);
    fsdp_run_steps steps;
    fsdp_io *io = fsdp_access_io(access);
    fsdp_verify_opts opts = {.level = level, .access.disk = io};
    if (watch)
        opts.watch = *watch;
    FSDP_TRY(fsdp_run_scan(run, io, &steps, err));
    fsdp_status status = newest_of(run, &steps, &opts, path_out, err);
    fsdp_run_steps_release(&steps);
    return status;
}

/* === retention ================================================================================ */

/* Removes the steps of a run that no rule keeps. Rules count only steps that verify; a step that does not
 * verify is neither counted nor removed. Also removes what killed saves and deletes left, and the copies of
 * steps in other formats. The last part of a save, under the lease of the run. */

/* --- copies in other formats ------------------------------------------------------------------ */

/* Copies of a run's steps in other formats, RUN/hf/N and RUN/dcp/N: fsdp-train makes them (save.also). They
 * go with their steps, in front of them, so that a kill leaves no copy of a step that is gone; and what a
 * killed conversion left goes like that of a killed save. */

enum { FSDP_COPY_FORMATS = 2 };

typedef struct fsdp_run_copies {
    fsdp_io *io;
    const char *run;
    bool applies; /* otherwise nothing is removed */
    /* Called once for each that goes, or would; name: "hf/00000100". May be NULL. */
    void (*report)(void *context, const char *name, bool is_removed, const char *reason);
    void *context;
    bool has_folder[FSDP_COPY_FORMATS];
} fsdp_run_copies;

enum { DIGITS = 8, NAME_SIZE = 32 };

/* The files that a format is known by: a directory without them is not ours. */
static const struct {
    const char *folder, *files[2];
} formats[FSDP_COPY_FORMATS] = {{"dcp", {".metadata"}},
                                {"hf", {"model.safetensors", "model.safetensors.index.json"}}};

static bool has_file(fsdp_io *io, const char *dir, const char *name)
{
    char *path = name ? fsdp_path_join(dir, name) : NULL;
    bool is_there = path && fsdp_io_exists(io, path);
    fsdp_free(path);
    return is_there;
}

/* A copy is a directory, not a link to one. */
static bool is_copy(fsdp_io *io, const char *path, int format)
{
    fsdp_file_info info;
    return io->ops->info(io, path, &info) == 0 && info.kind == FSDP_FILE_DIRECTORY &&
           fsdp_place_refuse_link(io, path, NULL) == FSDP_OK &&
           (has_file(io, path, formats[format].files[0]) ||
            has_file(io, path, formats[format].files[1]));
}

static int note_folder(void *context, const char *name)
{
    fsdp_run_copies *copies = context;
    for (int i = 0; i < FSDP_COPY_FORMATS; i++)
        copies->has_folder[i] = copies->has_folder[i] || strcmp(name, formats[i].folder) == 0;
    return 0;
}

static char *folder_path(const fsdp_run_copies *copies, int format)
{
    return copies->has_folder[format] ? fsdp_path_join(copies->run, formats[format].folder) : NULL;
}

static void emit(const fsdp_run_copies *copies, int format, const char *name, bool is_removed,
                 const char *reason)
{
    char *path = fsdp_path_join(formats[format].folder, name);
    if (path && copies->report)
        copies->report(copies->context, path, is_removed, reason);
    fsdp_free(path);
}

/* Removes the copies of a step, which goes next. One that cannot be removed is not a failure. */
static void run_copies_remove(const fsdp_run_copies *copies, int64_t step)
{
    char name[NAME_SIZE], reason[2 * NAME_SIZE];
    snprintf(name, sizeof name, "%0*" PRId64, DIGITS, step);
    snprintf(reason, sizeof reason, "copy of step-%s", name);
    for (int i = 0; i < FSDP_COPY_FORMATS; i++) {
        char *folder = folder_path(copies, i);
        char *path = folder ? fsdp_path_join(folder, name) : NULL;
        if (path && is_copy(copies->io, path, i)) {
            bool is_gone =
                !copies->applies || fsdp_delete_as(copies->io, path, folder, path, NULL) == FSDP_OK;
            emit(copies, i, name, is_gone, is_gone ? reason : "cannot be removed");
        }
        fsdp_free(path);
        fsdp_free(folder);
    }
}

/* --- leftovers -------------------------------------------------------------------------------- */

/* The name of the copy that a conversion was making, or a removal was emptying. */
static bool is_leftover(const char *name, char copy_out[NAME_SIZE])
{
    const size_t digits = strspn(name, "0123456789");
    const char *suffix = name + digits;
    if (digits < DIGITS || digits >= NAME_SIZE)
        return false;
    memcpy(copy_out, name, digits);
    copy_out[digits] = '\0';
    return strncmp(suffix, FSDP_SUFFIX_STAGING, strlen(FSDP_SUFFIX_STAGING)) == 0 ||
           strncmp(suffix, FSDP_SUFFIX_DELETING, strlen(FSDP_SUFFIX_DELETING)) == 0;
}

static bool copy_is_at_work(fsdp_io *io, const char *path)
{
    fsdp_marker_state state = fsdp_marker_look(io, path, FSDP_MARKER_SAVING);
    return state == FSDP_MARKER_HELD || state == FSDP_MARKER_UNKNOWN;
}

/* A marker that its process was killed before it signed. The lease of the run is held here, so that no
 * other training is about to sign it. */
static void remove_unsigned(fsdp_io *io, const char *path)
{
    fsdp_file_info info = {0};
    char *marker = fsdp_path_join(path, FSDP_MARKER_SAVING);
    if (marker && fsdp_marker_look(io, path, FSDP_MARKER_SAVING) == FSDP_MARKER_FREE &&
        io->ops->info(io, marker, &info) == 0 && info.size == 0)
        fsdp_marker_remove(io, path, FSDP_MARKER_SAVING);
    fsdp_free(marker);
}

/* A process that made the directory and has no marker in it yet makes another one. */
static void clear(fsdp_io *io, const char *path, const char *copy, const char *folder)
{
    char *kept = NULL;
    fsdp_file *marker = NULL;
    fsdp_leftovers_clear(io, copy, folder, NULL, &kept, &marker);
    remove_unsigned(io, path);
    (void)io->ops->rmdir(io, path);
}

static void clear_one(const fsdp_run_copies *copies, int format, const char *folder,
                      const char *name)
{
    char copy_name[NAME_SIZE];
    if (!is_leftover(name, copy_name))
        return;
    char *path = fsdp_path_join(folder, name), *copy = fsdp_path_join(folder, copy_name);
    if (path && copy && fsdp_io_exists(copies->io, path)) {
        if (copies->applies)
            clear(copies->io, path, copy, folder);
        bool is_gone = copies->applies ? !fsdp_io_exists(copies->io, path)
                                       : !copy_is_at_work(copies->io, path);
        emit(copies, format, name, is_gone,
             is_gone ? "interrupted conversion" : "a conversion in progress");
    }
    fsdp_free(path);
    fsdp_free(copy);
}

/* Removes what killed conversions and removals left. */
static void run_copies_clear(const fsdp_run_copies *copies)
{
    for (int i = 0; i < FSDP_COPY_FORMATS; i++) {
        fsdp_io_names names = {0};
        char *folder = folder_path(copies, i);
        if (folder && fsdp_place_refuse_link(copies->io, folder, NULL) == FSDP_OK &&
            fsdp_io_list_names(copies->io, folder, NULL, NULL, &names, NULL) == FSDP_OK)
            for (size_t k = 0; k < names.count; k++)
                clear_one(copies, i, folder, names.items[k]);
        fsdp_io_names_release(&names);
        fsdp_free(folder);
    }
}

/* --- steps ------------------------------------------------------------------------------------ */

#define LEASE_TEMPORARY ".lock" FSDP_SUFFIX_STAGING

enum { LEAST_KEPT = 2, REASON_SIZE = FSDP_ERROR_TEXT + 32 };

/* The decision about one plain step directory. */
typedef struct verdict {
    bool remove;
    bool counts;   /* counts for a rule, so that older steps may be removed */
    bool was_read; /* all data was read and is good */
    char *reason;  /* NULL: no memory for it */
} verdict;

typedef struct retention {
    fsdp_lease *lease; /* NULL: nothing is removed */
    const char *run;
    const fsdp_retention *policy;
    const fsdp_retain_opts *opts;
    bool save_in_progress; /* another job holds the lease; only if the caller holds none */
    fsdp_io *io;
    fsdp_lease_keeper keeper; /* refreshes the lease and calls the caller's watch */
    fsdp_run_steps steps;
    verdict *verdicts; /* one per step */
    int good;          /* counted so far */
    fsdp_run_copies copies;
} retention;

fsdp_status fsdp_retention_check(const fsdp_retention *policy, fsdp_error *err)
{
    if (policy && policy->keep_last < LEAST_KEPT)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "keep_last is %d, but at least %d are kept: one while the next is "
                         "written, one in case it is damaged",
                         policy->keep_last, LEAST_KEPT);
    if (policy && policy->keep_every < 0)
        return fsdp_fail(err, FSDP_ERR_USAGE, "keep_every cannot be %" PRId64, policy->keep_every);
    return FSDP_OK;
}

/* --- deciding --------------------------------------------------------------------------------- */

static bool is_pinned(const retention *retain, const fsdp_run_step *step, bool *by_file_out)
{
    *by_file_out = false;
    for (size_t i = 0; i < retain->policy->pin_count; i++) {
        if (retain->policy->pins[i] == step->step)
            return true;
    }
    char *dir = fsdp_path_join(retain->run, step->name);
    char *path = dir ? fsdp_path_join(dir, FSDP_PIN_NAME) : NULL;
    fsdp_file_info info;
    /* a pin that cannot be read counts: keeping too much is the safe mistake */
    *by_file_out = !path || retain->io->ops->info(retain->io, path, &info) != -ENOENT;
    fsdp_free(path);
    fsdp_free(dir);
    return *by_file_out;
}

/* Writes the rule that keeps a step even if it does not verify; false when none does. */
static bool kept_by_rule(const retention *retain, const fsdp_run_step *step, char *reason)
{
    const fsdp_retention *policy = retain->policy;
    bool by_file;
    if (!policy)
        snprintf(reason, REASON_SIZE, "no policy");
    else if (is_pinned(retain, step, &by_file))
        snprintf(reason, REASON_SIZE, by_file ? "pin file" : "pinned");
    else if (policy->keep_every > 0 && step->step % policy->keep_every == 0)
        snprintf(reason, REASON_SIZE, "every %" PRId64, policy->keep_every);
    else
        return false;
    return true;
}

/* Finds a checkpoint of a later format version, which may be the best one: not counted, not
 * removed. */
static fsdp_status find_newer(const retention *retain, const fsdp_run_step *step, bool *newer_out,
                              fsdp_error *err)
{
    fsdp_error reason = {0};
    char *path = fsdp_path_join(retain->run, step->name);
    if (!path)
        return fsdp_fail_memory(err, retain->run);
    fsdp_status status = fsdp_run_refuse_newer(path, retain->io, &reason);
    fsdp_free(path);
    *newer_out = status == FSDP_ERR_REFUSED;
    if (status == FSDP_OK || *newer_out || is_out_of_reach(status, &reason))
        return FSDP_OK;
    if (err)
        *err = reason;
    return status;
}

/* Stops at any file that has a value of its own without a manifest and shard files. */
static int stop_at_value(void *context, const char *name)
{
    bool *has_value = context;
    *has_value = strcmp(name, FSDP_MARKER_SAVING) != 0 && strcmp(name, FSDP_VIEW_NAME) != 0 &&
                 strcmp(name, FSDP_MANIFEST_TEMPORARY) != 0;
    return *has_value;
}

/* True when the directory holds nothing of value. */
static bool is_hollow(const retention *retain, const fsdp_run_step *step)
{
    bool has_value = false;
    char *path = fsdp_path_join(retain->run, step->name);
    bool listed = path && retain->io->ops->list(retain->io, path, stop_at_value, &has_value) == 0;
    fsdp_free(path);
    return listed && !has_value;
}

static fsdp_status report_fault(const retention *retain, const fsdp_run_step *step,
                                const fsdp_error *fault, bool *remove_out, char *reason)
{
    *remove_out = retain->policy && is_hollow(retain, step);
    if (*remove_out)
        snprintf(reason, REASON_SIZE, "holds neither a manifest nor a shard file");
    else
        snprintf(reason, REASON_SIZE, "does not verify: %s", fault->text);
    return FSDP_OK;
}

static fsdp_status set_reason(verdict *mine, const char *reason, fsdp_error *err)
{
    fsdp_free(mine->reason);
    mine->reason = fsdp_strndup(reason, strlen(reason));
    return mine->reason ? FSDP_OK : fsdp_fail_memory(err, "the reason of a removal");
}

/* Reads all data of a step, unless this process has. */
static fsdp_status read_whole(retention *retain, const fsdp_run_step *step, fsdp_error *err)
{
    fsdp_verify_opts opts = {.threads = retain->opts->threads,
                             .memory = retain->opts->memory,
                             .watch = fsdp_lease_keeper_watch(&retain->keeper),
                             .access.disk = retain->io};
    return check_once(retain->run, step, &opts, err);
}

/* Reads a step that counts as a whole; one that is damaged does not count any more. */
static fsdp_status read_counted(retention *retain, size_t i, fsdp_error *err)
{
    verdict *mine = &retain->verdicts[i];
    char reason[REASON_SIZE];
    fsdp_error fault = {0};
    fsdp_status status = read_whole(retain, &retain->steps.items[i], &fault);
    mine->was_read = status == FSDP_OK;
    if (status == FSDP_OK)
        return FSDP_OK;
    if (!is_fault(status)) {
        if (err)
            *err = fault;
        return status;
    }
    mine->counts = false;
    retain->good--;
    snprintf(reason, sizeof reason, "does not verify: %s", fault.text);
    return set_reason(mine, reason, err);
}

/*
 * Before a good step is removed, the steps that replace it are read whole, each once per process.
 * Checks of sizes and indexes alone could keep nothing but damaged steps.
 */
static fsdp_status read_all_counted(retention *retain, size_t end, fsdp_error *err)
{
    for (size_t i = 0; i < end; i++) {
        if (retain->verdicts[i].counts && !retain->verdicts[i].was_read)
            FSDP_TRY(read_counted(retain, i, err));
    }
    return FSDP_OK;
}

static bool wants_newest(const retention *retain)
{
    return retain->policy && retain->good < retain->policy->keep_last;
}

/* Counts a good step and decides whether it is among the newest that stay. */
static fsdp_status count_good(retention *retain, size_t i, char *reason, fsdp_error *err)
{
    verdict *mine = &retain->verdicts[i];
    if (!wants_newest(retain))
        FSDP_TRY(read_all_counted(retain, i, err));
    mine->counts = wants_newest(retain);
    mine->remove = !mine->counts;
    if (mine->counts) {
        retain->good++;
        snprintf(reason, REASON_SIZE, "newest %d", retain->policy->keep_last);
    } else {
        snprintf(reason, REASON_SIZE, "no rule keeps it");
    }
    return FSDP_OK;
}

/* Decides about a plain step directory. Old steps that a rule keeps are not verified. */
static fsdp_status decide(retention *retain, size_t i, char *reason, fsdp_error *err)
{
    bool newer = false;
    const fsdp_run_step *step = &retain->steps.items[i];
    if (!wants_newest(retain) && kept_by_rule(retain, step, reason))
        return FSDP_OK;
    fsdp_error fault = {0};
    FSDP_TRY(find_newer(retain, step, &newer, err));
    if (newer) {
        snprintf(reason, REASON_SIZE, "of a newer format version");
        return FSDP_OK;
    }
    fsdp_status status =
        check_step(retain->run, step, &(fsdp_verify_opts){.access.disk = retain->io}, &fault);
    if (status == FSDP_OK)
        return count_good(retain, i, reason, err);
    if (is_fault(status))
        return report_fault(retain, step, &fault, &retain->verdicts[i].remove, reason);
    if (err)
        *err = fault;
    return status;
}

/* Keeps the first failure, unless the later one is a cancellation. */
static fsdp_status choose_failure(fsdp_status first, fsdp_status status, const fsdp_error *fault,
                                  fsdp_error *err)
{
    if (status == FSDP_OK || (first != FSDP_OK && status != FSDP_ERR_CANCELLED))
        return first;
    if (err)
        *err = *fault;
    return status;
}

/* A step that cannot be checked does not prevent decisions about the others. */
static fsdp_status decide_all(retention *retain, fsdp_error *err)
{
    fsdp_status first = FSDP_OK;
    for (size_t i = 0; i < retain->steps.count; i++) {
        char reason[REASON_SIZE];
        fsdp_error fault = {0};
        if (retain->steps.items[i].state != FSDP_STEP_GOOD)
            continue;
        fsdp_status status = decide(retain, i, reason, &fault);
        if (status == FSDP_OK)
            status = set_reason(&retain->verdicts[i], reason, &fault);
        first = choose_failure(first, status, &fault, err);
        if (status == FSDP_ERR_CANCELLED)
            break;
    }
    return first;
}

/* --- doing ------------------------------------------------------------------------------------ */

static void report_verdict(const retention *retain, const char *name, bool remove,
                           const char *reason)
{
    fsdp_retain_action action = {.name = name, .remove = remove, .reason = reason};
    if (retain->opts->report)
        retain->opts->report(retain->opts->report_context, &action);
}

/* The path step-N of the step, also when its directory has a suffix. */
static char *whole_path(const retention *retain, const fsdp_run_step *step)
{
    char name[FSDP_STEP_NAME_SIZE];
    fsdp_step_name(step->step, name);
    return fsdp_path_join(retain->run, name);
}

/* Renames first: then no publisher can rename the directory into place while it is emptied. */
static fsdp_status remove_as_deleting(const retention *retain, const char *path, const char *whole,
                                      fsdp_error *err)
{
    fsdp_status status = fsdp_delete_as(retain->io, path, retain->run, whole, err);
    bool gone = status == FSDP_ERR_NOT_FOUND && !fsdp_io_exists(retain->io, path);
    return gone ? FSDP_OK : status;
}

/* Removes what an interrupted save, overwrite or delete left, and a half directory at step-N. */
static fsdp_status remove_leftover(const retention *retain, const fsdp_run_step *step,
                                   const char *path, fsdp_error *err)
{
    char *whole = whole_path(retain, step);
    if (!whole)
        return fsdp_fail_memory(err, retain->run);
    fsdp_status status = fsdp_moves_clear(retain->io, whole, err);
    if (status == FSDP_OK && step->state != FSDP_STEP_DELETING)
        status = remove_as_deleting(retain, path, whole, err);
    else if (status == FSDP_OK &&
             (status = fsdp_io_sync_dir(retain->io, retain->run, err)) == FSDP_OK)
        status = fsdp_io_remove_tree(retain->io, path, err); /* its new name is durable */
    fsdp_free(whole);
    return status;
}

/* Calls progress before a removal: when nothing was read, it was not called yet. */
static fsdp_status check_stop(retention *retain, const fsdp_run_step *step, fsdp_error *err)
{
    fsdp_watch watch = fsdp_lease_keeper_watch(&retain->keeper);
    if (watch.progress && watch.progress(watch.context, 0, 1, step->name) != 0)
        return fsdp_fail(err, FSDP_ERR_CANCELLED, "stopped on request, before '%s' was removed",
                         step->name);
    return FSDP_OK;
}

static fsdp_status remove_step(retention *retain, const fsdp_run_step *step, fsdp_error *err)
{
    if (retain->lease) {
        FSDP_TRY(check_stop(retain, step, err));
        FSDP_TRY(fsdp_lease_refresh(retain->lease, err));
    }
    if (step->state == FSDP_STEP_GOOD)
        run_copies_remove(&retain->copies, step->step);
    if (!retain->lease)
        return FSDP_OK;
    char *path = fsdp_path_join(retain->run, step->name);
    if (!path)
        return fsdp_fail_memory(err, retain->run);
    fsdp_status status = fsdp_place_forget_digests(retain->io, path, retain->run, true, err);
    if (status == FSDP_OK)
        status = step->state == FSDP_STEP_GOOD ? fsdp_checkpoint_delete(retain->io, path, err)
                                               : remove_leftover(retain, step, path, err);
    fsdp_free(path);
    return status;
}

/* --- leftovers -------------------------------------------------------------------------------- */

static bool may_be_at_work(const retention *retain, const fsdp_run_step *step, const char *marker)
{
    char *path = fsdp_path_join(retain->run, step->name);
    fsdp_marker_state state =
        path ? fsdp_marker_look(retain->io, path, marker) : FSDP_MARKER_UNKNOWN;
    fsdp_free(path);
    return state == FSDP_MARKER_HELD || state == FSDP_MARKER_UNKNOWN;
}

/*
 * Every staging of a step is made under the lease of the run, which this process holds now. A
 * process whose marker is unlocked, or on another machine, has lost the lease: it is dead or will
 * not publish.
 */
static void decide_staging(const retention *retain, const fsdp_run_step *step, bool *remove_out,
                           char *reason)
{
    *remove_out = !retain->save_in_progress && !may_be_at_work(retain, step, FSDP_MARKER_SAVING) &&
                  !may_be_at_work(retain, step, FSDP_MARKER_PUBLISHING);
    snprintf(reason, REASON_SIZE, *remove_out ? "interrupted save" : "a save in progress");
}

static fsdp_status bring_back(const retention *retain, const fsdp_run_step *step, const char *whole,
                              fsdp_error *err)
{
    char *path = fsdp_path_join(retain->run, step->name);
    if (!path)
        return fsdp_fail_memory(err, retain->run);
    fsdp_status status = fsdp_io_rename(retain->io, path, whole, false, err);
    fsdp_free(path);
    return status == FSDP_OK ? fsdp_io_sync_dir(retain->io, retain->run, err) : status;
}

/* Removes a replaced checkpoint only if the one in its place is good. */
static fsdp_status decide_replaced(retention *retain, const fsdp_run_step *step, bool *remove_out,
                                   char *reason, fsdp_error *err)
{
    fsdp_error fault = {0};
    char name[FSDP_STEP_NAME_SIZE];
    fsdp_step_name(step->step, name);
    fsdp_run_step whole = {.step = step->step, .name = name};
    char *path = whole_path(retain, step);
    if (!path)
        return fsdp_fail_memory(err, retain->run);
    fsdp_status status = FSDP_OK;
    *remove_out = false;
    if (fsdp_io_exists(retain->io, path)) {
        status = read_whole(retain, &whole, &fault);
        *remove_out = status == FSDP_OK;
        status = is_fault(status) ? FSDP_OK : choose_failure(FSDP_OK, status, &fault, err);
        snprintf(reason, REASON_SIZE,
                 *remove_out ? "overwritten by '%s'" : "set aside, but '%s' does not verify", name);
    } else {
        snprintf(reason, REASON_SIZE, "restored: an overwrite was interrupted");
        status = !retain->lease ? FSDP_OK : bring_back(retain, step, path, err);
    }
    fsdp_free(path);
    return status;
}

/* Removes the marker of a step that stays: under the lease no process writes into it. */
static void forget_marker(const retention *retain, const fsdp_run_step *step)
{
    char *path = fsdp_path_join(retain->run, step->name);
    if (path)
        (void)fsdp_marker_forget(retain->io, path);
    fsdp_free(path);
}

static fsdp_status retain_step(retention *retain, size_t i, fsdp_error *err)
{
    const fsdp_run_step *step = &retain->steps.items[i];
    const verdict *mine = &retain->verdicts[i];
    bool remove = true;
    char reason[REASON_SIZE] = "interrupted delete";
    if (step->state == FSDP_STEP_GOOD) {
        if (!mine->reason)
            return FSDP_OK;
        remove = mine->remove;
        snprintf(reason, sizeof reason, "%s", mine->reason);
    } else if (step->state == FSDP_STEP_STAGING) {
        decide_staging(retain, step, &remove, reason);
    } else if (step->state == FSDP_STEP_REPLACED) {
        FSDP_TRY(decide_replaced(retain, step, &remove, reason, err));
    }
    if (remove)
        FSDP_TRY(remove_step(retain, step, err));
    else if (step->state == FSDP_STEP_GOOD && retain->lease)
        forget_marker(retain, step);
    report_verdict(retain, step->name, remove, reason);
    return FSDP_OK;
}

/* A step that cannot be removed does not prevent removing the others. */
static fsdp_status do_all(retention *retain, fsdp_error *err)
{
    fsdp_status first = decide_all(retain, err);
    if (first == FSDP_ERR_CANCELLED)
        return first;
    for (size_t i = 0; i < retain->steps.count; i++) {
        fsdp_error fault = {0};
        fsdp_status status = retain_step(retain, i, &fault);
        first = choose_failure(first, status, &fault, err);
        if (status == FSDP_ERR_CANCELLED)
            break;
    }
    return first;
}

static void report_copy(void *context, const char *name, bool is_removed, const char *reason)
{
    report_verdict(context, name, is_removed, reason);
}

static fsdp_status retain_all(retention *retain, fsdp_error *err)
{
    FSDP_TRY(fsdp_run_scan(retain->run, retain->io, &retain->steps, err));
    retain->copies = (fsdp_run_copies){.io = retain->io,
                                       .run = retain->run,
                                       .applies = retain->lease != NULL,
                                       .report = report_copy,
                                       .context = retain};
    /* finds the folders that the run has */
    (void)retain->copies.io->ops->list(retain->copies.io, retain->copies.run, note_folder,
                                       &retain->copies);
    retain->verdicts = fsdp_alloc(retain->steps.count + 1, sizeof *retain->verdicts);
    fsdp_status status =
        retain->verdicts ? do_all(retain, err) : fsdp_fail_memory(err, retain->run);
    for (size_t i = 0; retain->verdicts && i < retain->steps.count; i++)
        fsdp_free(retain->verdicts[i].reason);
    fsdp_free(retain->verdicts);
    fsdp_run_steps_release(&retain->steps);
    if (status == FSDP_OK)
        run_copies_clear(&retain->copies);
    if (status == FSDP_ERR_CANCELLED && retain->keeper.lost.status != FSDP_OK)
        return fsdp_fail(err, FSDP_ERR_EXISTS, "%s", retain->keeper.lost.text);
    return status;
}

/* Removes temporary lease files of killed processes. A young one may belong to a living process. */
static int sweep_lease(void *context, const char *name)
{
    const retention *retain = context;
    if (strncmp(name, LEASE_TEMPORARY, strlen(LEASE_TEMPORARY)) != 0)
        return 0;
    char *path = fsdp_path_join(retain->run, name);
    fsdp_file_info info;
    if (path && retain->io->ops->info(retain->io, path, &info) == 0 &&
        fsdp_host_now(retain->io->host) - info.mtime_ns / 1000000000 > FSDP_LEASE_SECONDS)
        retain->io->ops->unlink(retain->io, path);
    fsdp_free(path);
    return 0;
}

fsdp_status fsdp_run_retain_held(fsdp_lease *lease, const char *run, const fsdp_retention *policy,
                                 const fsdp_retain_opts *opts, fsdp_error *err)
{
    FSDP_TRY(fsdp_retention_check(policy, err));
    retention retain = {.lease = lease,
                        .run = run,
                        .policy = policy,
                        .opts = opts,
                        .io = fsdp_access_io(&opts->access)};
    fsdp_lease_keep(&retain.keeper, lease, &opts->watch);
    FSDP_TRY(retain_all(&retain, err));
    (void)retain.io->ops->list(retain.io, run, sweep_lease, &retain);
    return FSDP_OK;
}

static fsdp_status run_dry(const char *run, const fsdp_retention *policy,
                           const fsdp_retain_opts *opts, fsdp_error *err)
{
    retention retain = {
        .run = run, .policy = policy, .opts = opts, .io = fsdp_access_io(&opts->access)};
    retain.save_in_progress = fsdp_lease_is_held(retain.io, run);
    fsdp_lease_keep(&retain.keeper, NULL, &opts->watch);
    return retain_all(&retain, err);
}

/* Verifies the steps before the lease is taken, so that a job that saves does not wait for reads. A
 * failure is ignored here: the pass under the lease repeats and reports it. */
static fsdp_status read_ahead(const char *run, const fsdp_retention *policy,
                              const fsdp_retain_opts *opts, fsdp_error *err)
{
    fsdp_error found = {0};
    fsdp_retain_opts silent = *opts;
    silent.report = NULL;
    if (fsdp_lease_is_held(fsdp_access_io(&opts->access), run) ||
        run_dry(run, policy, &silent, &found) != FSDP_ERR_CANCELLED)
        return FSDP_OK;
    if (err)
        *err = found;
    return FSDP_ERR_CANCELLED;
}

fsdp_status fsdp_run_retain(const char *run, const fsdp_retention *policy,
                            const fsdp_retain_opts *opts, fsdp_error *err)
{
    FSDP_NEED(err, run);
    fsdp_lease *lease;
    static const fsdp_retain_opts none;
    opts = opts ? opts : &none;
    FSDP_TRY(fsdp_retention_check(policy, err));
    if (!opts->apply)
        return run_dry(run, policy, opts, err);
    FSDP_TRY(read_ahead(run, policy, opts, err));
    FSDP_TRY(fsdp_lease_take(fsdp_access_io(&opts->access), run, &lease, err));
    fsdp_status status = fsdp_run_retain_held(lease, run, policy, opts, err);
    fsdp_lease_release(lease);
    return status;
}
