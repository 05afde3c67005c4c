/* Errors: text, class and errno in the caller's struct. See status.h. */
#include <fsdp/status.h>

#include "base/core/given.h"
#include "base/core/mem.h"
#include "base/core/reported.h"
#include "base/text.h"

#include <errno.h>
#include <locale.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static fsdp_status status_of_errno(int errnum)
{
    switch (errnum) {
    case ENOENT:
    case ENOTDIR: return FSDP_ERR_NOT_FOUND;
    case EEXIST:
    case ENOTEMPTY: return FSDP_ERR_EXISTS;
    case ENOSPC:
    case EDQUOT:
    case EFBIG: return FSDP_ERR_NO_SPACE;
    case ENOMEM:
    case EAGAIN: /* of a thread or a process that cannot be started */
    case EMFILE:
    case ENFILE: return FSDP_ERR_LIMIT;
    case ELOOP: return FSDP_ERR_REFUSED;
    case ECANCELED: return FSDP_ERR_CANCELLED;
    default: return FSDP_ERR_IO;
    }
}

/* Room to write a message out before it is cut: two paths of the longest kind, and the words. */
enum { DRAFT_BYTES = 10 << 10 };

static bool continues_character(char c)
{
    return ((unsigned char)c & 0xC0) == 0x80;
}

/* Copies text, without its middle when there is too little space: the beginning of a message names the
 * operation and the path, its end the reason. */
static void cut_middle(const char *text, char *out, size_t room)
{
    static const char dots[] = "...";
    size_t size = strlen(text);
    if (size < room) {
        memcpy(out, text, size + 1);
        return;
    }
    size_t kept = room - sizeof dots, head = kept / 2, tail = size - (kept - head);
    while (head > 0 && continues_character(text[head]))
        head--;
    while (continues_character(text[tail]))
        tail++;
    memcpy(out, text, head);
    memcpy(out + head, dots, sizeof dots - 1);
    memcpy(out + head + sizeof dots - 1, text + tail, size - tail + 1);
}

/* In English, whatever the program's locale is. */
static const char *describe_errno(int errnum)
{
    locale_t plain = newlocale(LC_ALL_MASK, "C", (locale_t)0);
    return plain ? strerror_l(errnum, plain) : "unknown error";
}

static void set_text(fsdp_error *err, fsdp_status status, int errnum, const char *format,
                     va_list args)
{
    if (!err)
        return;
    char draft[DRAFT_BYTES], reason[128] = "";
    vsnprintf(draft, sizeof draft, format ? format : "", args);
    if (errnum != 0) {
        const char *hint = errnum == EFBIG ? " ('ulimit -f' shows a limit that may be raised)" : "";
        snprintf(reason, sizeof reason, ": %s%s", describe_errno(errnum), hint);
    }
    err->status = status;
    err->errnum = errnum;
    cut_middle(draft, err->text, sizeof err->text - strlen(reason));
    strcat(err->text, reason);
}

fsdp_status fsdp_fail(fsdp_error *err, fsdp_status status, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    set_text(err, status, 0, format, args);
    va_end(args);
    return status;
}

fsdp_status fsdp_check_given(fsdp_error *err, const char *function, const char *names,
                             const void *const *pointers, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        size_t size = strcspn(names, ",");
        if (!pointers[i])
            return fsdp_fail(err, FSDP_ERR_USAGE, "%s: '%.*s' is NULL", function, (int)size, names);
        names += size + strspn(names + size, ", ");
    }
    return FSDP_OK;
}

fsdp_status fsdp_fail_memory(fsdp_error *err, const char *what)
{
    return fsdp_fail(err, FSDP_ERR_LIMIT, "cannot allocate memory for %s", what);
}

fsdp_status fsdp_fail_errno(fsdp_error *err, int errnum, const char *format, ...)
{
    fsdp_status status = status_of_errno(errnum);
    va_list args;
    va_start(args, format);
    set_text(err, status, errnum, format, args);
    va_end(args);
    return status;
}

void fsdp_error_prefix(fsdp_error *err, const char *format, ...)
{
    if (!err || err->status == FSDP_OK || !format)
        return;
    char draft[DRAFT_BYTES], before[FSDP_ERROR_TEXT];
    memcpy(before, err->text, sizeof before);
    va_list args;
    va_start(args, format);
    int used = vsnprintf(draft, sizeof draft - sizeof before, format, args);
    va_end(args);
    if (used < 0)
        return;
    size_t length = strlen(draft);
    snprintf(draft + length, sizeof draft - length, ": %s", before);
    cut_middle(draft, err->text, sizeof err->text);
}

const char *fsdp_version(void)
{
    return FSDP_VERSION;
}

static _Thread_local fsdp_error reported;

fsdp_error fsdp_error_take_reported(void)
{
    fsdp_error taken = reported;
    reported = (fsdp_error){0};
    return taken;
}

int fsdp_error_report(const fsdp_error *err)
{
    if (!err || err->status == FSDP_OK)
        return 0;
    reported = *err;
    char text[4 * FSDP_ERROR_TEXT], line[sizeof text + 16]; /* a byte becomes at most \xHH */
    const char *told = err->text[0] ? err->text : fsdp_status_name(err->status);
    int length = snprintf(line, sizeof line, "error: %s\n",
                          fsdp_printable_message(told, strlen(told), text, sizeof text));
    for (int done = 0; done < length;) {
        ssize_t n = write(STDERR_FILENO, line + done, (size_t)(length - done));
        if (n <= 0 && errno != EINTR)
            break;
        done += n > 0 ? (int)n : 0;
    }
    return (int)err->status;
}

const char *fsdp_status_name(fsdp_status status)
{
    switch (status) {
    case FSDP_OK: return "ok";
    case FSDP_DIFFERS: return "differs";
    case FSDP_ERR_USAGE: return "usage error";
    case FSDP_ERR_NOT_FOUND: return "not found";
    case FSDP_ERR_DAMAGED: return "damaged";
    case FSDP_ERR_REFUSED: return "refused";
    case FSDP_ERR_EXISTS: return "exists or in use";
    case FSDP_ERR_NO_SPACE: return "no space";
    case FSDP_ERR_IO: return "input/output error";
    case FSDP_ERR_LIMIT: return "out of memory or resources";
    case FSDP_ERR_PEER: return "another rank failed";
    case FSDP_ERR_INTERNAL: return "internal error";
    case FSDP_ERR_CANCELLED: return "cancelled";
    }
    return "unknown status";
}
