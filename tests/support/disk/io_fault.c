/* The io back end that fails on purpose. See io_fault.h. */
#include "tests/support/disk/io_fault.h"

#include "base/core/mem.h"

#include <errno.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct fault_io {
    fsdp_io base;
    fsdp_io *inner;
    fsdp_fault_plan plan;
    _Atomic int64_t calls;
    fsdp_fault_trace trace;
    void *trace_user;
} fault_io;

typedef struct fault_file {
    fsdp_file base;
    fsdp_file *inner;
    fault_io *owner;
    char path[];
} fault_file;

static const char *const call_names[FSDP_CALL_COUNT] = {
    [FSDP_CALL_OPEN] = "open",         [FSDP_CALL_CREATE] = "create",
    [FSDP_CALL_PREAD] = "pread",       [FSDP_CALL_PWRITE] = "pwrite",
    [FSDP_CALL_SIZE] = "size",         [FSDP_CALL_RESIZE] = "resize",
    [FSDP_CALL_ALLOCATE] = "allocate", [FSDP_CALL_SYNC] = "sync",
    [FSDP_CALL_CLOSE] = "close",       [FSDP_CALL_LOCK] = "lock",
    [FSDP_CALL_RENAME] = "rename",     [FSDP_CALL_UNLINK] = "unlink",
    [FSDP_CALL_MKDIR] = "mkdir",       [FSDP_CALL_RMDIR] = "rmdir",
    [FSDP_CALL_SYNC_DIR] = "sync_dir", [FSDP_CALL_LIST] = "list",
    [FSDP_CALL_INFO] = "info",         [FSDP_CALL_SPACE] = "space",
    [FSDP_CALL_EXCHANGE] = "exchange",
};

const char *fsdp_io_call_name(fsdp_io_call call)
{
    return (unsigned)call < FSDP_CALL_COUNT ? call_names[call] : "?";
}

static void kill_this_process(void)
{
    kill(getpid(), SIGKILL);
    for (;;)
        pause();
}

/* The plan's action for this call. */
static fsdp_fault_action count_call(fault_io *fault, fsdp_io_call call, const char *path)
{
    const fsdp_fault_plan *plan = &fault->plan;
    if (!(plan->calls >> call & 1))
        return FSDP_FAULT_NONE;
    int64_t n = atomic_fetch_add(&fault->calls, 1) + 1;
    if (fault->trace)
        fault->trace(fault->trace_user, n, call, path);
    bool hit = plan->at > 0 && (plan->forever ? n >= plan->at : n == plan->at);
    return hit ? plan->action : FSDP_FAULT_NONE;
}

/* For calls that transfer no bytes: 0 to make the call, or a negative errno. */
static int before_call(fault_io *fault, fsdp_io_call call, const char *path)
{
    switch (count_call(fault, call, path)) {
    case FSDP_FAULT_KILL:
    case FSDP_FAULT_TEAR: kill_this_process(); return 0;
    case FSDP_FAULT_ERRNO: return -fault->plan.errnum;
    case FSDP_FAULT_CALL: return fault->plan.call(fault->plan.user, call, path);
    case FSDP_FAULT_NONE:
    case FSDP_FAULT_SHORT: break;
    }
    return 0;
}

/* For pread and pwrite: may lower *size_io; *killed_out: the process ends afterwards. */
static int before_transfer(fault_file *file, fsdp_io_call call, size_t *size_io, bool *killed_out)
{
    const fsdp_fault_plan *plan = &file->owner->plan;
    fsdp_fault_action action = count_call(file->owner, call, file->path);
    *killed_out = action == FSDP_FAULT_TEAR;
    switch (action) {
    case FSDP_FAULT_TEAR:
    case FSDP_FAULT_SHORT: {
        size_t half = *size_io > 1 ? *size_io / 2 : *size_io;
        size_t part = plan->part > 0 ? plan->part : half;
        *size_io = part < *size_io ? part : *size_io;
        return 0;
    }
    case FSDP_FAULT_KILL: kill_this_process(); return 0;
    case FSDP_FAULT_ERRNO: return -plan->errnum;
    case FSDP_FAULT_CALL: return plan->call(plan->user, call, file->path);
    case FSDP_FAULT_NONE: break;
    }
    return 0;
}

static fault_io *fault_of(fsdp_io *io)
{
    return (fault_io *)io;
}

static const fsdp_io_ops fault_ops;

static int fault_open(fsdp_io *io, const char *path, unsigned flags, fsdp_file **file_out)
{
    fault_io *fault = fault_of(io);
    bool creates = (flags & FSDP_IO_MODE) == FSDP_IO_CREATE;
    int result = before_call(fault, creates ? FSDP_CALL_CREATE : FSDP_CALL_OPEN, path);
    if (result < 0)
        return result;
    size_t length = strlen(path) + 1;
    fault_file *file = fsdp_alloc(1, sizeof *file + length);
    if (!file)
        return -ENOMEM;
    result = fault->inner->ops->open(fault->inner, path, flags, &file->inner);
    if (result < 0) {
        fsdp_free(file);
        return result;
    }
    file->base.ops = &fault_ops;
    file->owner = fault;
    memcpy(file->path, path, length);
    *file_out = &file->base;
    return 0;
}

static ssize_t fault_pread(fsdp_file *base, void *data, size_t size, int64_t offset)
{
    fault_file *file = (fault_file *)base;
    bool killed;
    int result = before_transfer(file, FSDP_CALL_PREAD, &size, &killed);
    if (result < 0)
        return result;
    ssize_t n = file->inner->ops->pread(file->inner, data, size, offset);
    if (killed)
        kill_this_process();
    return n;
}

static ssize_t fault_pwrite(fsdp_file *base, const void *data, size_t size, int64_t offset)
{
    fault_file *file = (fault_file *)base;
    bool killed;
    int result = before_transfer(file, FSDP_CALL_PWRITE, &size, &killed);
    if (result < 0)
        return result;
    ssize_t n = file->inner->ops->pwrite(file->inner, data, size, offset);
    if (killed)
        kill_this_process();
    return n;
}

static int fault_size(fsdp_file *base, int64_t *size_out)
{
    fault_file *file = (fault_file *)base;
    int result = before_call(file->owner, FSDP_CALL_SIZE, file->path);
    return result < 0 ? result : file->inner->ops->size(file->inner, size_out);
}

static int fault_resize(fsdp_file *base, int64_t size)
{
    fault_file *file = (fault_file *)base;
    int result = before_call(file->owner, FSDP_CALL_RESIZE, file->path);
    return result < 0 ? result : file->inner->ops->resize(file->inner, size);
}

static int fault_allocate(fsdp_file *base, int64_t size)
{
    fault_file *file = (fault_file *)base;
    int result = before_call(file->owner, FSDP_CALL_ALLOCATE, file->path);
    return result < 0 ? result : file->inner->ops->allocate(file->inner, size);
}

static int fault_sync(fsdp_file *base)
{
    fault_file *file = (fault_file *)base;
    int result = before_call(file->owner, FSDP_CALL_SYNC, file->path);
    return result < 0 ? result : file->inner->ops->sync(file->inner);
}

static int fault_close(fsdp_file *base)
{
    fault_file *file = (fault_file *)base;
    int result = before_call(file->owner, FSDP_CALL_CLOSE, file->path);
    int closed = file->inner->ops->close(file->inner);
    fsdp_free(file);
    return result < 0 ? result : closed;
}

static int fault_lock(fsdp_file *base)
{
    fault_file *file = (fault_file *)base;
    int result = before_call(file->owner, FSDP_CALL_LOCK, file->path);
    return result < 0 ? result : file->inner->ops->lock(file->inner);
}

static int fault_rename(fsdp_io *io, const char *from, const char *to, bool replace)
{
    fsdp_io *inner = fault_of(io)->inner;
    int result = before_call(fault_of(io), FSDP_CALL_RENAME, from);
    return result < 0 ? result : inner->ops->rename(inner, from, to, replace);
}

static int fault_exchange(fsdp_io *io, const char *a, const char *b)
{
    fsdp_io *inner = fault_of(io)->inner;
    int result = before_call(fault_of(io), FSDP_CALL_EXCHANGE, a);
    return result < 0 ? result : inner->ops->exchange(inner, a, b);
}

static int fault_unlink(fsdp_io *io, const char *path)
{
    fsdp_io *inner = fault_of(io)->inner;
    int result = before_call(fault_of(io), FSDP_CALL_UNLINK, path);
    return result < 0 ? result : inner->ops->unlink(inner, path);
}

static int fault_mkdir(fsdp_io *io, const char *path)
{
    fsdp_io *inner = fault_of(io)->inner;
    int result = before_call(fault_of(io), FSDP_CALL_MKDIR, path);
    return result < 0 ? result : inner->ops->mkdir(inner, path);
}

static int fault_rmdir(fsdp_io *io, const char *path)
{
    fsdp_io *inner = fault_of(io)->inner;
    int result = before_call(fault_of(io), FSDP_CALL_RMDIR, path);
    return result < 0 ? result : inner->ops->rmdir(inner, path);
}

static int fault_sync_dir(fsdp_io *io, const char *path)
{
    fsdp_io *inner = fault_of(io)->inner;
    int result = before_call(fault_of(io), FSDP_CALL_SYNC_DIR, path);
    return result < 0 ? result : inner->ops->sync_dir(inner, path);
}

static int fault_list(fsdp_io *io, const char *path, int (*visit)(void *user, const char *name),
                      void *user)
{
    fsdp_io *inner = fault_of(io)->inner;
    int result = before_call(fault_of(io), FSDP_CALL_LIST, path);
    return result < 0 ? result : inner->ops->list(inner, path, visit, user);
}

static int fault_info(fsdp_io *io, const char *path, fsdp_file_info *info_out)
{
    fsdp_io *inner = fault_of(io)->inner;
    int result = before_call(fault_of(io), FSDP_CALL_INFO, path);
    return result < 0 ? result : inner->ops->info(inner, path, info_out);
}

static int fault_space(fsdp_io *io, const char *path, fsdp_space *space_out)
{
    fsdp_io *inner = fault_of(io)->inner;
    int result = before_call(fault_of(io), FSDP_CALL_SPACE, path);
    return result < 0 ? result : inner->ops->space(inner, path, space_out);
}

static const fsdp_io_ops fault_ops = {
    .name = "fault",
    .open = fault_open,
    .pread = fault_pread,
    .pwrite = fault_pwrite,
    .size = fault_size,
    .resize = fault_resize,
    .allocate = fault_allocate,
    .sync = fault_sync,
    .close = fault_close,
    .lock = fault_lock,
    .rename = fault_rename,
    .exchange = fault_exchange,
    .unlink = fault_unlink,
    .mkdir = fault_mkdir,
    .rmdir = fault_rmdir,
    .sync_dir = fault_sync_dir,
    .list = fault_list,
    .info = fault_info,
    .space = fault_space,
};

fsdp_status fsdp_io_fault_create(fsdp_io *inner, const fsdp_fault_plan *plan, fsdp_io **io_out,
                                 fsdp_error *err)
{
    *io_out = NULL;
    fault_io *fault = fsdp_alloc(1, sizeof *fault);
    if (!fault)
        return fsdp_fail_memory(err, "a fault-injecting io");
    fault->inner = inner ? inner : fsdp_io_posix();
    fault->base = (fsdp_io){.ops = &fault_ops, .host = fault->inner->host};
    if (plan)
        fault->plan = *plan;
    if (fault->plan.calls == 0)
        fault->plan.calls = FSDP_CALLS_ANY;
    *io_out = &fault->base;
    return FSDP_OK;
}

void fsdp_io_fault_free(fsdp_io *io)
{
    fsdp_free(io);
}

int64_t fsdp_io_fault_calls(fsdp_io *io)
{
    return atomic_load(&fault_of(io)->calls);
}

void fsdp_io_fault_set_trace(fsdp_io *io, fsdp_fault_trace trace, void *user)
{
    fault_of(io)->trace = trace;
    fault_of(io)->trace_user = user;
}

static unsigned calls_by_name(const char *name)
{
    if (strcmp(name, "any") == 0)
        return FSDP_CALLS_ANY;
    if (strcmp(name, "writes") == 0)
        return FSDP_CALLS_WRITES;
    for (unsigned i = 0; i < FSDP_CALL_COUNT; i++) {
        if (strcmp(name, call_names[i]) == 0)
            return 1u << i;
    }
    return 0;
}

static int errno_by_name(const char *name)
{
    enum { LARGEST_ERRNO = 200 };
    for (int i = 1; i < LARGEST_ERRNO; i++) {
        const char *known = strerrorname_np(i);
        if (known && strcmp(known, name) == 0)
            return i;
    }
    return 0;
}

static bool set_action(const char *name, fsdp_fault_plan *plan)
{
    static const struct {
        const char *name;
        fsdp_fault_action action;
    } actions[] = {
        {"kill", FSDP_FAULT_KILL},
        {"tear", FSDP_FAULT_TEAR},
        {"short", FSDP_FAULT_SHORT},
    };
    for (size_t i = 0; i < sizeof actions / sizeof actions[0]; i++) {
        if (strcmp(name, actions[i].name) == 0) {
            plan->action = actions[i].action;
            return true;
        }
    }
    plan->action = FSDP_FAULT_ERRNO;
    plan->errnum = errno_by_name(name);
    return plan->errnum != 0;
}

fsdp_status fsdp_fault_plan_parse(const char *text, fsdp_fault_plan *plan_out, fsdp_error *err)
{
    fsdp_fault_plan plan = {0};
    *plan_out = plan;
    if (text[0] == '\0')
        return FSDP_OK;
    char call[32] = "", action[32] = "", rest[16] = "";
    long long at = 0;
    int used = 0;
    int fields = sscanf(text, "%31[^:]:%lld:%31[^:]%n:%15s", call, &at, action, &used, rest);
    bool forever = fields == 4 && strcmp(rest, "forever") == 0;
    bool complete = (fields == 3 && text[used] == '\0') || forever;
    plan.calls = calls_by_name(call);
    plan.at = at;
    plan.forever = forever;
    if (!complete || plan.calls == 0 || at < 1 || !set_action(action, &plan))
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "'%s' is not a fault plan; one reads like 'pwrite:17:kill', "
                         "'any:40:ENOSPC' or 'sync:1:EIO:forever'",
                         text);
    *plan_out = plan;
    return FSDP_OK;
}
