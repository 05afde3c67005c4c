/* The trace of a rank, as JSON lines. See trace.h. */
#include "runtime/launch/trace.h"

#include "base/text.h"
#include <inttypes.h>
#include <string.h>

#include "base/io/io.h"
#include "base/core/mem.h"

struct fsdp_trace {
    fsdp_file *file; /* NULL: none */
    char *path;
    int64_t offset, number, step;
    int rank;
    fsdp_text line;
    fsdp_error failure;
    void (*listener)(void *context, const fsdp_trace_event *event);
    void *listener_context;
};

/* --- the file --------------------------------------------------------------------------------- */

static char *path_of(const char *pattern, int rank)
{
    fsdp_text path = {0};
    for (; *pattern; pattern++)
        if (strncmp(pattern, "%r", 2) == 0) {
            fsdp_text_addf(&path, "%d", rank);
            pattern++;
        } else {
            fsdp_text_add(&path, pattern, 1);
        }
    char *copy = path.failed ? NULL : fsdp_strndup(path.data ? path.data : "", path.size);
    fsdp_text_release(&path);
    return copy;
}

/* Replaces an older trace. Anything but a regular file (a device, a pipe) stays, and the open
 * fails. */
static fsdp_status open_file(fsdp_trace *trace, const char *pattern, fsdp_error *err)
{
    fsdp_io *io = fsdp_io_posix();
    fsdp_file_info info;
    trace->path = path_of(pattern, trace->rank);
    if (!trace->path)
        return fsdp_fail_memory(err, "the path of a trace");
    if (io->ops->info(io, trace->path, &info) == 0 && info.kind == FSDP_FILE_REGULAR)
        (void)io->ops->unlink(io, trace->path); /* the open reports the error */
    return fsdp_io_open(io, trace->path, FSDP_IO_CREATE, &trace->file, err);
}

fsdp_status fsdp_trace_open(const char *path, int rank, fsdp_trace **trace_out, fsdp_error *err)
{
    fsdp_trace *trace = fsdp_alloc(1, sizeof *trace);
    if (!trace)
        return fsdp_fail_memory(err, "a trace");
    trace->rank = rank;
    fsdp_status status = path ? open_file(trace, path, err) : FSDP_OK;
    if (status == FSDP_OK)
        *trace_out = trace;
    else
        (void)!fsdp_trace_close(trace, NULL);
    return status;
}

fsdp_status fsdp_trace_close(fsdp_trace *trace, fsdp_error *err)
{
    if (!trace)
        return FSDP_OK;
    if (trace->file && trace->failure.status == FSDP_OK)
        (void)!fsdp_io_close(&trace->file, trace->path, &trace->failure);
    else
        (void)!fsdp_io_close(&trace->file, trace->path, NULL);
    fsdp_status status = trace->failure.status;
    if (status != FSDP_OK && err)
        *err = trace->failure;
    fsdp_text_release(&trace->line);
    fsdp_free(trace->path);
    fsdp_free(trace);
    return status;
}

void fsdp_trace_set_listener(fsdp_trace *trace,
                             void (*listener)(void *context, const fsdp_trace_event *event),
                             void *context)
{
    trace->listener = listener;
    trace->listener_context = context;
}

/* --- events ----------------------------------------------------------------------------------- */

static void add_collective(fsdp_text *line, const fsdp_trace_event *event)
{
    const fsdp_collective *call = event->call;
    bool reduces = fsdp_comm_reduces((uint32_t)call->kind);
    fsdp_text_addf(line, ",\"group\":[");
    for (int i = 0; i < fsdp_comm_size(event->comm); i++)
        fsdp_text_addf(line, "%s%d", i > 0 ? "," : "", fsdp_comm_ranks(event->comm)[i]);
    fsdp_text_addf(line, "],\"op\":\"%s\",\"dtype\":\"%s\",\"count\":%" PRId64,
                   reduces ? fsdp_comm_op_name((uint32_t)call->op) : "",
                   fsdp_dtype_name(call->dtype), call->count);
}

static void spell(fsdp_trace *trace, const fsdp_trace_event *event)
{
    fsdp_text *line = &trace->line;
    line->size = 0;
    fsdp_text_addf(line,
                   "{\"n\":%" PRId64 ",\"rank\":%d,\"step\":%" PRId64 ",\"event\":\"%s\",\"unit\":",
                   trace->number++, trace->rank, trace->step, event->event);
    fsdp_text_add_json_string(line, event->unit, strlen(event->unit));
    if (event->state && !event->call && event->bytes < 0)
        fsdp_text_addf(line, ",\"state\":\"%s\"", event->state);
    if (event->call)
        add_collective(line, event);
    if (event->bytes >= 0)
        fsdp_text_addf(line, ",\"bytes\":%" PRId64, event->bytes);
    if (event->stream)
        fsdp_text_addf(line, ",\"stream\":\"%s\"", event->stream);
    fsdp_text_addf(line, "}\n");
}

static void write_line(fsdp_trace *trace)
{
    if (!trace->file || trace->failure.status != FSDP_OK)
        return;
    if (trace->line.failed) {
        (void)!fsdp_fail_memory(&trace->failure, "a line of the trace");
        return;
    }
    (void)!fsdp_io_write(trace->file, trace->path, trace->line.data, trace->line.size,
                         trace->offset, &trace->failure);
    trace->offset += (int64_t)trace->line.size;
}

void fsdp_trace_step(fsdp_trace *trace, int64_t step)
{
    if (trace)
        trace->step = step;
}

void fsdp_trace_add(fsdp_trace *trace, const fsdp_trace_event *event)
{
    if (!trace)
        return;
    if (trace->listener)
        trace->listener(trace->listener_context, event);
    if (!trace->file)
        return;
    spell(trace, event);
    write_line(trace);
}
