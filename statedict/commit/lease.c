/*
 * The lease of a run: RUN/.lock, so that two jobs never save into one run. A small JSON text with
 * the holder and the time of expiry; it appears whole, by a rename that does not replace.
 *
 * Every change of an existing lease (take over, refresh, release) first locks the file that was
 * read and then compares the text at the path again. Two processes that take over the same lease
 * lock the same file one after the other, and the second one finds another text.
 */
#include "statedict/commit/lease_internal.h"

#include "base/core/clock.h"
#include "base/io/process.h"
#include "base/data/json.h"
#include "base/core/mem.h"
#include "statedict/commit/commit_internal.h"
#include "statedict/sd/meter.h"

#include "base/text.h"
#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#define LEASE_NAME ".lock"

enum {
    TEXT_MAX = 1 << 16,
    TRIES = 200,         /* for a file that changes during the read, 10 ms apart */
    NOTICE_TRIES = 50,   /* after these a notice names the holder */
    PROGRESS_TRIES = 25, /* and progress is called */
    TORN_SECONDS = 3,    /* a writer in place needs microseconds from the name to the text */
    ABSURD_PERIODS = 10  /* a lease that ends so far ahead was written by a clock that jumped */
};

typedef struct lease_text {
    fsdp_process process;
    char job[64];
    int64_t since, expires, serial;
} lease_text;

struct fsdp_lease {
    fsdp_io *io;
    char *run, *path;
    lease_text mine;
    char *text; /* the content of the file */
    size_t size;
    bool may_end;     /* taking it failed for a reason that may pass */
    fsdp_lease *next; /* of this process */
};

/*
 * The leases that this process holds. A file that a failing disk kept from being removed still
 * names this living process; the list shows that the lease was released.
 */
static pthread_mutex_t held_lock = PTHREAD_MUTEX_INITIALIZER;
static fsdp_lease *held_leases;

static void enrol(fsdp_lease *lease)
{
    pthread_mutex_lock(&held_lock);
    lease->next = held_leases;
    held_leases = lease;
    pthread_mutex_unlock(&held_lock);
}

static void strike_off(const fsdp_lease *lease)
{
    pthread_mutex_lock(&held_lock);
    fsdp_lease **at = &held_leases;
    while (*at && *at != lease)
        at = &(*at)->next;
    if (*at)
        *at = lease->next;
    pthread_mutex_unlock(&held_lock);
}

/* True when this process took that lease and released it since. */
static bool was_ours(const fsdp_io *io, const lease_text *holder)
{
    fsdp_process self;
    fsdp_process_self(io->host, &self);
    if (holder->process.pid != self.pid || holder->process.start != self.start || self.start == 0 ||
        strcmp(holder->process.host, self.host) != 0 ||
        strcmp(holder->process.boot, self.boot) != 0 ||
        strcmp(holder->process.pid_space, self.pid_space) != 0)
        return false;
    bool held = false;
    pthread_mutex_lock(&held_lock);
    for (const fsdp_lease *lease = held_leases; lease && !held; lease = lease->next)
        held = strcmp(lease->mine.job, holder->job) == 0;
    pthread_mutex_unlock(&held_lock);
    return !held;
}

/* --- the text --------------------------------------------------------------------------------- */

static void put_string(fsdp_text *text, const char *key, const char *value)
{
    fsdp_text_addf(text, "\"%s\": ", key);
    fsdp_text_add_json_string(text, value, strlen(value));
    fsdp_text_addf(text, ",\n");
}

static fsdp_status encode(const lease_text *lease, fsdp_text *text, fsdp_error *err)
{
    fsdp_text_addf(text, "{\n");
    put_string(text, "host", lease->process.host);
    put_string(text, "boot", lease->process.boot);
    put_string(text, "pid_space", lease->process.pid_space);
    put_string(text, "job", lease->job);
    fsdp_text_addf(text,
                   "\"pid\": %" PRId64 ",\n\"start\": %" PRIu64 ",\n\"since\": %" PRId64
                   ",\n\"expires\": %" PRId64 ",\n\"serial\": %" PRId64 "\n}\n",
                   lease->process.pid, lease->process.start, lease->since, lease->expires,
                   lease->serial);
    return text->failed ? fsdp_fail_memory(err, "a lease") : FSDP_OK;
}

static fsdp_status take_string(fsdp_json *json, char *out, size_t room)
{
    const char *data;
    size_t size;
    FSDP_TRY(fsdp_json_string(json, &data, &size, NULL));
    if (size >= room || memchr(data, '\0', size))
        return FSDP_ERR_DAMAGED;
    memcpy(out, data, size + 1);
    return FSDP_OK;
}

static fsdp_status take_member(fsdp_json *json, int which, lease_text *lease)
{
    fsdp_process *process = &lease->process;
    switch (which) {
    case 0: return take_string(json, process->host, sizeof process->host);
    case 1: return take_string(json, process->boot, sizeof process->boot);
    case 2: return take_string(json, process->pid_space, sizeof process->pid_space);
    case 3: return take_string(json, lease->job, sizeof lease->job);
    case 4: return fsdp_json_i64(json, &process->pid, NULL);
    case 5: return fsdp_json_u64(json, &process->start, NULL);
    case 6: return fsdp_json_i64(json, &lease->since, NULL);
    case 7: return fsdp_json_i64(json, &lease->expires, NULL);
    default: return fsdp_json_i64(json, &lease->serial, NULL);
    }
}

static fsdp_status decode_members(fsdp_json *json, lease_text *lease)
{
    static const char *const keys[] = {"host",  "boot",  "pid_space", "job",   "pid",
                                       "start", "since", "expires",   "serial"};
    enum { KEY_COUNT = sizeof keys / sizeof *keys };
    fsdp_json_members members = {.names = keys, .count = KEY_COUNT};
    int which;
    FSDP_TRY(fsdp_json_enter_object(json, NULL));
    for (;;) {
        FSDP_TRY(fsdp_json_next_member(json, &members, &which, NULL));
        if (which < 0)
            break;
        FSDP_TRY(take_member(json, which, lease));
    }
    return members.seen == (1 << KEY_COUNT) - 1 ? fsdp_json_finish(json, NULL) : FSDP_ERR_DAMAGED;
}

/* False for a text that is not a lease. */
static bool decode(const char *text, size_t size, lease_text *lease_out)
{
    fsdp_json json;
    *lease_out = (lease_text){.since = 0};
    fsdp_json_init(&json, text, size, LEASE_NAME);
    bool ok = decode_members(&json, lease_out) == FSDP_OK;
    fsdp_json_release(&json);
    return ok;
}

/* --- taking over ------------------------------------------------------------------------------ */

static int64_t age_of_file(fsdp_io *io, const char *path)
{
    fsdp_file_info info;
    if (io->ops->info(io, path, &info) < 0)
        return 0;
    return fsdp_host_now(io->host) - info.mtime_ns / 1000000000;
}

/*
 * True for a lease text that a crash during a write in place or a power cut truncated: empty,
 * zeros, or a beginning. Any other text that is not a lease belongs to another program or a later
 * version of fsdp, and stays.
 */
static bool is_torn(const char *text, size_t size)
{
    static const char start[] = "{\n\"host\": \"", end[] = "}\n";
    while (size > 0 && text[size - 1] == '\0')
        size--;
    size_t compared = size < sizeof start - 1 ? size : sizeof start - 1;
    if (memcmp(text, start, compared) != 0)
        return false;
    return size < sizeof start - 1 || memcmp(text + size - 2, end, 2) != 0;
}

static bool is_over(fsdp_io *io, const char *path, const char *text, size_t size,
                    lease_text *holder_out)
{
    if (!decode(text, size, holder_out)) {
        *holder_out = (lease_text){.since = 0};
        int64_t age = age_of_file(io, path);
        return is_torn(text, size) && (age >= TORN_SECONDS || age < -FSDP_LEASE_SECONDS);
    }
    if (!fsdp_process_may_live(io->host, &holder_out->process) || was_ours(io, holder_out))
        return true;
    int64_t now = fsdp_host_now(io->host);
    if (holder_out->expires <= now)
        return true;
    return holder_out->expires - now > ABSURD_PERIODS * (int64_t)FSDP_LEASE_SECONDS &&
           age_of_file(io, path) > FSDP_LEASE_SECONDS;
}

/* "process 7 on host 'node3' since 2026-01-01 00:00:00 UTC" */
static void describe_holder(const lease_text *holder, char *out, size_t room)
{
    char host[100], since[40] = "an unknown time";
    struct tm parts;
    time_t seconds = (time_t)holder->since;
    if (gmtime_r(&seconds, &parts))
        strftime(since, sizeof since, "%Y-%m-%d %H:%M:%S UTC", &parts);
    snprintf(out, room, "process %" PRId64 " on host '%s' since %s", holder->process.pid,
             fsdp_printable(holder->process.host, strlen(holder->process.host), host, sizeof host),
             since);
}

static fsdp_status fail_foreign(const fsdp_lease *lease, fsdp_error *err)
{
    return fsdp_fail(err, FSDP_ERR_EXISTS,
                     "'%s' may be in use: '%s' is not a lease that this fsdp can read, and is not "
                     "taken over; if no job uses the run, remove that file",
                     lease->run, lease->path);
}

static fsdp_status fail_unreadable(fsdp_lease *lease, const char *text, size_t size,
                                   fsdp_error *err)
{
    lease->may_end = is_torn(text, size);
    if (lease->may_end)
        return fsdp_fail(err, FSDP_ERR_EXISTS,
                         "'%s' may be in use: its lease '%s' is being written, or is truncated; it "
                         "is taken over %d s after the last write",
                         lease->run, lease->path, TORN_SECONDS);
    return fail_foreign(lease, err);
}

static fsdp_status fail_held(fsdp_lease *lease, const lease_text *holder, fsdp_error *err)
{
    char who[200];
    lease->may_end = true;
    describe_holder(holder, who, sizeof who);
    if (fsdp_process_is_here(lease->io->host, &holder->process))
        return fsdp_fail(
            err, FSDP_ERR_EXISTS,
            "'%s' is in use by %s, which is still running; the run is free when it ends",
            lease->run, who);
    return fsdp_fail(err, FSDP_ERR_EXISTS,
                     "'%s' is in use by %s; if that process is gone, its lease ends in %" PRId64
                     " s",
                     lease->run, who, holder->expires - fsdp_host_now(lease->io->host));
}

/* --- changing the file ------------------------------------------------------------------------ */

static void wait_a_little(void)
{
    struct timespec pause = {.tv_nsec = 10 * 1000 * 1000};
    nanosleep(&pause, NULL);
}

static bool cannot_refuse(int result)
{
    return result == -EINVAL || result == -ENOSYS || result == -EOPNOTSUPP;
}

static fsdp_status write_text(const fsdp_lease *lease, fsdp_file *file, const char *path,
                              const fsdp_text *text, fsdp_error *err)
{
    fsdp_status status = fsdp_io_write(file, path, text->data, text->size, 0, err);
    fsdp_status closed = fsdp_io_close(&file, path, status == FSDP_OK ? err : NULL);
    if (status == FSDP_OK)
        status = closed;
    if (status != FSDP_OK)
        lease->io->ops->unlink(lease->io, path);
    return status;
}

static bool path_holds(const fsdp_lease *lease, const char *text, size_t size)
{
    char *now;
    size_t now_size;
    if (fsdp_io_read_file(lease->io, lease->path, TEXT_MAX, &now, &now_size, NULL) != FSDP_OK)
        return false;
    bool same = now_size == size && memcmp(now, text, size) == 0;
    fsdp_free(now);
    return same;
}

/* For file systems without a rename that refuses to replace: creates the file empty, locks it as
 * those do who take over, then writes it. A reader in between finds no lease and waits. */
static fsdp_status create_in_place(const fsdp_lease *lease, const fsdp_text *text, bool *done_out,
                                   fsdp_error *err)
{
    fsdp_file *file;
    int result = lease->io->ops->open(lease->io, lease->path, FSDP_IO_CREATE, &file);
    *done_out = result == 0;
    if (result == -EEXIST)
        return FSDP_OK;
    if (result < 0)
        return fsdp_fail_errno(err, -result, "cannot create '%s'", lease->path);
    if (file->ops->lock(file) == -EWOULDBLOCK) { /* another process takes it over */
        *done_out = false;
        (void)fsdp_io_close(&file, lease->path, NULL);
        return FSDP_OK;
    }
    FSDP_TRY(write_text(lease, file, lease->path, text, err));
    *done_out = path_holds(lease, text->data, text->size);
    return FSDP_OK;
}

static fsdp_status rename_temporary(const fsdp_lease *lease, const char *temporary,
                                    const fsdp_text *text, bool replace, bool *done_out,
                                    fsdp_error *err)
{
    fsdp_io *io = lease->io;
    int result = io->ops->rename(io, temporary, lease->path, replace);
    *done_out = result == 0;
    if (result == 0)
        return FSDP_OK;
    io->ops->unlink(io, temporary);
    if (result == -EEXIST || (result == -ENOENT && fsdp_io_exists(io, lease->run)))
        return FSDP_OK;
    if (!replace && cannot_refuse(result))
        return create_in_place(lease, text, done_out, err);
    return fsdp_fail_errno(err, -result, "cannot create '%s'", lease->path);
}

/* Writes this lease at the path. *done_out is false when another lease exists (never with
 * replace). */
static fsdp_status place(fsdp_lease *lease, bool replace, bool *done_out, fsdp_error *err)
{
    fsdp_text text = {0};
    char *temporary = NULL;
    fsdp_file *file;
    *done_out = false;
    lease->mine.expires = fsdp_host_now(lease->io->host) + FSDP_LEASE_SECONDS;
    lease->mine.serial++;
    fsdp_status status = encode(&lease->mine, &text, err);
    if (status == FSDP_OK)
        status = fsdp_beside_name(lease->path, FSDP_SUFFIX_STAGING, &temporary, err);
    if (status == FSDP_OK)
        status = fsdp_io_open(lease->io, temporary, FSDP_IO_CREATE, &file, err);
    if (status == FSDP_OK)
        status = write_text(lease, file, temporary, &text, err);
    if (status == FSDP_OK)
        status = rename_temporary(lease, temporary, &text, replace, done_out, err);
    fsdp_free(temporary);
    if (*done_out && status == FSDP_OK) {
        fsdp_free(lease->text);
        lease->text = text.data;
        lease->size = text.size;
    } else {
        fsdp_text_release(&text);
    }
    return status;
}

/*
 * Locks the file at the path if it holds `text`, until file is closed. *same_out is false when it
 * holds another text, or none. Succeeds without a lock where the file system has none.
 */
static fsdp_status lock_text(const fsdp_lease *lease, const char *text, size_t size,
                             fsdp_file **file_out, bool *same_out, fsdp_error *err)
{
    fsdp_io *io = lease->io;
    *same_out = false;
    *file_out = NULL;
    for (int i = 0; i < TRIES; i++) {
        fsdp_file *file;
        int result = io->ops->open(io, lease->path, FSDP_IO_WRITE, &file);
        if (result == -ENOENT)
            return FSDP_OK;
        if (result < 0)
            return fsdp_fail_errno(err, -result, "cannot open '%s'", lease->path);
        if (file->ops->lock(file) != -EWOULDBLOCK) {
            *same_out = path_holds(lease, text, size);
            *file_out = file;
            return FSDP_OK;
        }
        (void)fsdp_io_close(&file, lease->path, NULL);
        wait_a_little();
    }
    return fsdp_fail(err, FSDP_ERR_EXISTS, "'%s' is in use: another process holds the lock '%s'",
                     lease->run, lease->path);
}

/* --- take ------------------------------------------------------------------------------------- */

static fsdp_status take_over(fsdp_lease *lease, const char *text, size_t size, bool *done_out,
                             fsdp_error *err)
{
    fsdp_file *file;
    bool same;
    *done_out = false;
    FSDP_TRY(lock_text(lease, text, size, &file, &same, err));
    fsdp_status status = same ? place(lease, true, done_out, err) : FSDP_OK;
    (void)fsdp_io_close(&file, lease->path, NULL);
    /* without locks another process may do the same: the last writer wins */
    if (status == FSDP_OK && *done_out)
        *done_out = path_holds(lease, lease->text, lease->size);
    return status;
}

/* A directory, link, pipe or larger file at the path belongs to another program, and stays. */
static bool is_no_small_file(const fsdp_error *reason)
{
    return reason->errnum == EISDIR || reason->errnum == EINVAL || reason->errnum == ELOOP ||
           reason->errnum == ENXIO || reason->status == FSDP_ERR_REFUSED ||
           (reason->status == FSDP_ERR_LIMIT && reason->errnum == 0);
}

static fsdp_status fail_unread(const fsdp_lease *lease, const fsdp_error *reason, fsdp_error *err)
{
    if (reason->status == FSDP_ERR_NOT_FOUND && reason->errnum == ENOENT)
        return FSDP_OK;
    if (is_no_small_file(reason))
        return fail_foreign(lease, err);
    if (err)
        *err = *reason;
    return reason->status;
}

/* *done_out is false without an error when the file changed meanwhile: the caller tries again. */
static fsdp_status try_to_take(fsdp_lease *lease, bool *done_out, fsdp_error *err)
{
    FSDP_TRY(place(lease, false, done_out, err));
    if (*done_out)
        return FSDP_OK;
    char *text;
    size_t size;
    fsdp_error reason = {0};
    fsdp_status status = fsdp_io_read_file(lease->io, lease->path, TEXT_MAX, &text, &size, &reason);
    if (status != FSDP_OK)
        return fail_unread(lease, &reason, err);
    lease_text holder;
    if (is_over(lease->io, lease->path, text, size, &holder))
        status = take_over(lease, text, size, done_out, err);
    else if (holder.job[0])
        status = fail_held(lease, &holder, err);
    else
        status = fail_unreadable(lease, text, size, err);
    fsdp_free(text);
    return status;
}

void fsdp_lease_forget(fsdp_lease *lease)
{
    strike_off(lease);
    fsdp_free(lease->run);
    fsdp_free(lease->path);
    fsdp_free(lease->text);
    fsdp_free(lease);
}

static fsdp_status create_lease(fsdp_io *io, const char *run, fsdp_lease **lease_out,
                                fsdp_error *err)
{
    fsdp_lease *lease = fsdp_alloc(1, sizeof *lease);
    *lease_out = lease;
    if (!lease)
        return fsdp_fail_memory(err, "a lease");
    lease->io = io ? io : fsdp_io_posix();
    lease->run = fsdp_strndup(run, strlen(run));
    lease->path = fsdp_path_join(run, LEASE_NAME);
    if (!lease->run || !lease->path) {
        fsdp_lease_forget(lease);
        *lease_out = NULL;
        return fsdp_fail_memory(err, "a lease");
    }
    fsdp_process_self(lease->io->host, &lease->mine.process);
    char job[33];
    fsdp_random_hex(job);
    memcpy(lease->mine.job, job, sizeof job);
    lease->mine.since = fsdp_host_now(lease->io->host);
    enrol(lease);
    return FSDP_OK;
}

static fsdp_status take(fsdp_lease *lease, fsdp_error *err)
{
    for (int i = 0; i < TRIES; i++) {
        bool done;
        lease->may_end = false;
        FSDP_TRY(try_to_take(lease, &done, err));
        if (done)
            return FSDP_OK;
        wait_a_little();
    }
    lease->may_end = true;
    return fsdp_fail(err, FSDP_ERR_EXISTS, "'%s' is in use: '%s' keeps changing", lease->run,
                     lease->path);
}

/* Calls progress at intervals, which may stop the wait, and sends a notice once the wait gets
 * long. */
static fsdp_status report_waiting(const fsdp_lease *lease, int wait_ms, const fsdp_watch *watch,
                                  int tries, const fsdp_error *held, fsdp_error *err)
{
    if (watch && tries == NOTICE_TRIES)
        fsdp_notice(watch, "waiting up to %d s for the run: %s", wait_ms / 1000, held->text);
    if (watch && watch->progress && tries % PROGRESS_TRIES == 0 &&
        watch->progress(watch->context, 0, 1, "waiting for the run") != 0)
        return fsdp_fail(err, FSDP_ERR_CANCELLED,
                         "stopped on request, while '%s' was in use; nothing was changed",
                         lease->run);
    return FSDP_OK;
}

static fsdp_status take_patiently(fsdp_lease *lease, int wait_ms, const fsdp_watch *watch,
                                  fsdp_error *err)
{
    fsdp_file_info info;
    int result = lease->io->ops->info(lease->io, lease->run, &info);
    if (result < 0 || info.kind != FSDP_FILE_DIRECTORY)
        return fsdp_fail_errno(err, result < 0 ? -result : ENOTDIR, "cannot use run '%s'",
                               lease->run);
    int64_t until_ms = fsdp_now_ms() + wait_ms;
    fsdp_error held = {0};
    fsdp_status status = take(lease, &held);
    for (int tries = 1; status != FSDP_OK; tries++) {
        if (!lease->may_end || fsdp_now_ms() >= until_ms) {
            if (err)
                *err = held;
            return status;
        }
        FSDP_TRY(report_waiting(lease, wait_ms, watch, tries, &held, err));
        wait_a_little();
        if (!fsdp_lease_is_held(lease->io,
                                lease->run)) /* reading the file costs less than an attempt */
            status = take(lease, &held);
    }
    return FSDP_OK;
}

static fsdp_status take_lease(fsdp_io *io, const char *run, int wait_ms, const fsdp_watch *watch,
                              fsdp_lease **lease_out, fsdp_error *err)
{
    FSDP_TRY(create_lease(io, run, lease_out, err));
    fsdp_status status = take_patiently(*lease_out, wait_ms, watch, err);
    if (status != FSDP_OK) {
        fsdp_lease_forget(*lease_out);
        *lease_out = NULL;
    }
    return status;
}

fsdp_status fsdp_lease_take(fsdp_io *io, const char *run, fsdp_lease **lease_out, fsdp_error *err)
{
    return take_lease(io, run, 0, NULL, lease_out, err);
}

fsdp_status fsdp_lease_await(fsdp_io *io, const char *run, const fsdp_watch *watch,
                             fsdp_lease **lease_out, fsdp_error *err)
{
    int wait_ms =
        io && io->host && io->host->lease_wait_ms ? io->host->lease_wait_ms : FSDP_LEASE_WAIT_MS;
    return take_lease(io, run, wait_ms, watch, lease_out, err);
}

bool fsdp_lease_is_held(fsdp_io *io, const char *run)
{
    io = io ? io : fsdp_io_posix();
    char *path = fsdp_path_join(run, LEASE_NAME);
    char *text;
    size_t size;
    bool held = false;
    fsdp_error reason = {0};
    if (path && fsdp_io_read_file(io, path, TEXT_MAX, &text, &size, &reason) == FSDP_OK) {
        lease_text holder;
        held = !is_over(io, path, text, size, &holder);
        fsdp_free(text);
    } else {
        held = is_no_small_file(&reason);
    }
    fsdp_free(path);
    return held;
}

/* --- keep, give back -------------------------------------------------------------------------- */

static fsdp_status fail_lost(const fsdp_lease *lease, fsdp_error *err)
{
    char *text, who[200] = "another job";
    size_t size;
    lease_text holder;
    if (!fsdp_io_exists(lease->io, lease->path))
        return fsdp_fail(err, FSDP_ERR_EXISTS, "the lease of '%s' is lost: '%s' was removed",
                         lease->run, lease->path);
    if (fsdp_io_read_file(lease->io, lease->path, TEXT_MAX, &text, &size, NULL) == FSDP_OK) {
        if (decode(text, size, &holder))
            describe_holder(&holder, who, sizeof who);
        fsdp_free(text);
    }
    return fsdp_fail(err, FSDP_ERR_EXISTS,
                     "the lease of '%s' is lost to %s: it was not refreshed in time", lease->run,
                     who);
}

fsdp_status fsdp_lease_refresh(fsdp_lease *lease, fsdp_error *err)
{
    fsdp_file *file;
    bool same, done = false;
    FSDP_TRY(lock_text(lease, lease->text, lease->size, &file, &same, err));
    fsdp_status status = same ? place(lease, true, &done, err) : FSDP_OK;
    (void)fsdp_io_close(&file, lease->path, NULL);
    return status == FSDP_OK && !done ? fail_lost(lease, err) : status;
}

void fsdp_lease_release(fsdp_lease *lease)
{
    if (!lease)
        return;
    fsdp_file *file;
    bool same;
    if (lock_text(lease, lease->text, lease->size, &file, &same, NULL) == FSDP_OK) {
        if (same)
            lease->io->ops->unlink(lease->io, lease->path);
        (void)fsdp_io_close(&file, lease->path, NULL);
    }
    fsdp_lease_forget(lease);
}
