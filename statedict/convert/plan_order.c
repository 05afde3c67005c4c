/*
 * A plan that is read back: its paths and options, which make it again, and its text, which must be equal
 * then. The source's files are compared first, so that an error names the one that changed. See plan_text.h.
 */
#include "statedict/convert/plan_text.h"

#include "statedict/sd/access.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef struct order_text {
    fsdp_convert_order order; /* first: its address is that of the whole */
    fsdp_io *io;
    char *path, *data;
    size_t size;
    fsdp_arena arena;
    fsdp_mesh *mesh;
    bool checks; /* compare the source's files as they are listed */
} order_text;

/* --- a file of the source --------------------------------------------------------------------- */

/* "2026-11-21 17:31:10.730428933 UTC" */
static const char *spell_time(int64_t ns, char *out, size_t room)
{
    const int64_t second = 1000000000;
    time_t seconds = (time_t)(ns / second);
    struct tm parts;
    char date[40];
    if (ns < 0 || !gmtime_r(&seconds, &parts) ||
        strftime(date, sizeof date, "%Y-%m-%d %H:%M:%S", &parts) == 0)
        snprintf(out, room, "%" PRId64 " ns after 1970", ns);
    else
        snprintf(out, room, "%s.%09d UTC", date, (int)(ns % second));
    return out;
}

static fsdp_status check_file(const order_text *plan, const char *path, int64_t size, int64_t mtime,
                              fsdp_error *err)
{
    fsdp_file_info info;
    int result = plan->io->ops->info(plan->io, path, &info);
    if (result == -ENOENT)
        return fsdp_fail(err, FSDP_ERR_DAMAGED, "'%s' was removed after '%s' was made", path,
                         plan->path);
    if (result < 0)
        return fsdp_fail_errno(err, -result, "cannot stat '%s'", path);
    if (info.size != size)
        return fsdp_fail(err, FSDP_ERR_DAMAGED,
                         "'%s' changed after '%s' was made: it has %" PRId64
                         " bytes and had %" PRId64,
                         path, plan->path, info.size, size);
    char now[80], then[80];
    if (info.mtime_ns == mtime)
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_DAMAGED,
                     "'%s' changed after '%s' was made: it was written %s, the plan says %s", path,
                     plan->path, spell_time(info.mtime_ns, now, sizeof now),
                     spell_time(mtime, then, sizeof then));
}

static fsdp_status take_file(order_text *plan, fsdp_json *json, fsdp_error *err)
{
    static const char *const names[] = {"path", "size", "mtime_ns"};
    fsdp_json_members members = {.names = names, .count = 3};
    const char *path = NULL;
    int64_t numbers[2];
    int member;
    FSDP_TRY(fsdp_json_enter_object(json, err));
    for (;;) {
        FSDP_TRY(fsdp_json_next_member(json, &members, &member, err));
        if (member < 0)
            break;
        FSDP_TRY(member == 0 ? fsdp_plan_read_string(json, &plan->arena, &path, err)
                             : fsdp_json_i64(json, &numbers[member - 1], err));
    }
    if (members.seen != 7)
        return fsdp_json_fail(json, err, "a source needs path, size and mtime_ns");
    return plan->checks ? check_file(plan, path, numbers[0], numbers[1], err) : FSDP_OK;
}

static fsdp_status take_files(order_text *plan, fsdp_json *json, fsdp_error *err)
{
    bool more;
    FSDP_TRY(fsdp_json_enter_array(json, err));
    for (;;) {
        FSDP_TRY(fsdp_json_next_item(json, &more, err));
        if (!more)
            return FSDP_OK;
        FSDP_TRY(take_file(plan, json, err));
    }
}

/* --- the text --------------------------------------------------------------------------------- */

static fsdp_status take_member(order_text *plan, fsdp_json *json, int member, fsdp_error *err)
{
    fsdp_convert_order *order = &plan->order;
    switch (member) {
    case 0: return take_files(plan, json, err);
    case 1: return fsdp_plan_read_string(json, &plan->arena, &order->from, err);
    case 2: return fsdp_plan_read_string(json, &plan->arena, &order->to, err);
    case 3: return fsdp_json_skip(json, err); /* of what the text has */
    default: return fsdp_plan_read_options(json, &plan->arena, &order->opts, &plan->mesh, err);
    }
}

/* Reads the head's members; everything else in the plan follows from them. */
static fsdp_status walk(order_text *plan, fsdp_error *err)
{
    static const char *const names[] = {"sources", "from", "to", "hash", "options"};
    fsdp_json_members members = {.names = names, .count = plan->checks ? 1 : 5};
    fsdp_json json;
    int member = 0;
    fsdp_json_init(&json, plan->data, plan->size, plan->path);
    fsdp_status st = fsdp_json_enter_object(&json, err);
    while (st == FSDP_OK) {
        st = fsdp_json_next_member(&json, &members, &member, err);
        if (st != FSDP_OK || member < 0)
            break;
        st = take_member(plan, &json, member, err);
    }
    if (st == FSDP_OK && !plan->checks && members.seen != 31)
        st = fsdp_json_fail(&json, err, "a plan needs from, to, options, sources and hash");
    if (st == FSDP_OK)
        st = fsdp_json_finish(&json, err);
    fsdp_json_release(&json);
    return st;
}

static fsdp_status check_version(const order_text *plan, fsdp_error *err)
{
    size_t start = sizeof FSDP_PLAN_START - 1;
    if (plan->size <= start || memcmp(plan->data, FSDP_PLAN_START, start) != 0)
        return fsdp_fail(err, FSDP_ERR_NOT_FOUND, "'%s' is not a plan of fsdp-convert", plan->path);
    long version = strtol(plan->data + start, NULL, 10);
    if (version > FSDP_PLAN_VERSION)
        return fsdp_fail(err, FSDP_ERR_DAMAGED,
                         "'%s' is a plan of version %ld, but this fsdp reads version %d; a newer "
                         "fsdp is needed",
                         plan->path, version, FSDP_PLAN_VERSION);
    if (version == FSDP_PLAN_VERSION && fsdp_plan_is_whole(plan->data, plan->size))
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_DAMAGED,
                     "'%s' is damaged or was edited; make a new plan with --plan-out", plan->path);
}

static fsdp_status read_plan(order_text *plan, const char *path, fsdp_error *err)
{
    plan->path = fsdp_strndup(path, strlen(path));
    if (!plan->path)
        return fsdp_fail_memory(err, path);
    FSDP_TRY(fsdp_io_read_file(plan->io, path, FSDP_PLAN_MOST, &plan->data, &plan->size, err));
    FSDP_TRY(check_version(plan, err));
    return walk(plan, err);
}

fsdp_status fsdp_convert_order_open(const char *path, const fsdp_access *access,
                                    fsdp_convert_order **order_out, fsdp_error *err)
{
    *order_out = NULL;
    order_text *plan = fsdp_alloc(1, sizeof *plan);
    if (!plan)
        return fsdp_fail_memory(err, path);
    plan->io = fsdp_access_io(access);
    if (access)
        plan->order.opts.open.access = *access;
    fsdp_status st = read_plan(plan, path, err);
    if (st == FSDP_OK)
        *order_out = &plan->order;
    else
        fsdp_convert_order_close(&plan->order);
    return st;
}

void fsdp_convert_order_close(fsdp_convert_order *order)
{
    if (!order)
        return;
    order_text *plan = (order_text *)order;
    fsdp_arena_release(&plan->arena);
    fsdp_mesh_free(plan->mesh);
    fsdp_free(plan->data);
    fsdp_free(plan->path);
    fsdp_free(plan);
}

fsdp_status fsdp_convert_order_check_files(fsdp_convert_order *order, fsdp_error *err)
{
    order_text *plan = (order_text *)order;
    plan->checks = true;
    return walk(plan, err);
}

fsdp_status fsdp_convert_order_compare(const fsdp_convert_order *order, const fsdp_text *now,
                                       fsdp_error *err)
{
    const order_text *plan = (const order_text *)order;
    if (now->size == plan->size && memcmp(now->data, plan->data, now->size) == 0)
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_DAMAGED,
                     "'%s' differs from the plan that this version makes for '%s'; make a new one "
                     "with --plan-out",
                     plan->path, order->from);
}
