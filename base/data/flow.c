/* The flow trace: see flow.h. The watcher is the one global that tests may set. */
#include "base/data/flow.h"

#include "base/text.h"
#include <inttypes.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>

enum { LINE_ROOM = 1024, NAME_ROOM = 256 };

static _Atomic(const fsdp_flow_watcher *) current;

void fsdp_flow_watch(const fsdp_flow_watcher *watcher)
{
    atomic_store(&current, watcher);
}

void fsdp_flow(const char *step, const char *format, ...)
{
    const fsdp_flow_watcher *watcher = atomic_load_explicit(&current, memory_order_relaxed);
    if (!watcher)
        return;
    char line[LINE_ROOM];
    va_list args;
    va_start(args, format);
    vsnprintf(line, sizeof line, format, args);
    va_end(args);
    watcher->report(watcher->context, step, line);
}

void fsdp_flow_box(const char *step, const char *verb, const char *name, size_t name_size,
                   const fsdp_box *box)
{
    const fsdp_flow_watcher *watcher = atomic_load_explicit(&current, memory_order_relaxed);
    if (!watcher)
        return;
    char printable[NAME_ROOM];
    fsdp_text line = {0};
    fsdp_text_addf(&line, "%s '%s' [", verb, fsdp_printable(name, name_size, printable, NAME_ROOM));
    for (int d = 0; d < box->ndim; d++)
        fsdp_text_addf(&line, "%s%" PRId64 ":%" PRId64, d > 0 ? "," : "", box->lo[d],
                       box->lo[d] + box->len[d]);
    fsdp_text_addf(&line, "]");
    watcher->report(watcher->context, step, line.failed ? verb : line.data);
    fsdp_text_release(&line);
}
