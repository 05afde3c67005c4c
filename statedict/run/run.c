/*
 * Runs: a directory of checkpoints named step-N. Lists them and finds the newest one that verifies.
 * The file `latest` is a hint for people and is never read.
 */
#include "statedict/run/run_internal.h"
#include "base/core/given.h"
#include "base/core/mem.h"
#include "kernels/kernels.h"
#include "statedict/commit/commit.h"
#include "statedict/commit/commit_internal.h"
#include "statedict/commit/lease_internal.h"
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

fsdp_status fsdp_run_check(const char *run, const fsdp_run_step *step, const fsdp_verify_opts *opts,
                           fsdp_error *err)
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
fsdp_status fsdp_run_check_once(const char *run, const fsdp_run_step *step,
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
        status = fsdp_run_check(run, step, &whole, err);
        if (status == FSDP_OK && seen &&
            fingerprint_take(fsdp_access_io(&opts->access), path, &after) &&
            memcmp(&before, &after, sizeof before) == 0)
            fsdp_verified_add(&before);
    }
    fsdp_free(path);
    return status;
}

bool fsdp_run_is_out_of_reach(fsdp_status status, const fsdp_error *err)
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
    return fsdp_run_is_fault(status) && !fsdp_run_is_out_of_reach(status, err);
}

bool fsdp_run_is_fault(fsdp_status status)
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
    fsdp_status status = fsdp_run_check(run, step, &(fsdp_verify_opts){.access.disk = io}, &reason);
    if (status == FSDP_OK)
        return FSDP_OK;
    if (!fsdp_run_is_fault(status)) {
        if (err)
            *err = reason;
        return status;
    }
    fsdp_error newer = {0};
    status = refuse_newer_step(run, step, io, &newer);
    if (status != FSDP_OK && status != FSDP_ERR_REFUSED &&
        !fsdp_run_is_out_of_reach(status, &newer)) {
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
        fsdp_status status = fsdp_run_check(run, step, opts, &reason);
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
