/* Errors: text, class and errno in the caller's struct. See status.h. */
#include <fsdp/status.h>

#include <errno.h>
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
    case EMFILE:
    case ENFILE: return FSDP_ERR_LIMIT;
    case ELOOP: return FSDP_ERR_REFUSED;
    default: return FSDP_ERR_IO;
    }
}

static void set_text(fsdp_error *err, fsdp_status status, int errnum, const char *format,
                     va_list args)
{
    if (!err)
        return;
    err->status = status;
    err->errnum = errnum;
    int used = vsnprintf(err->text, sizeof err->text, format, args);
    if (errnum == 0 || used < 0 || (size_t)used >= sizeof err->text)
        return;
    const char *reason = strerrordesc_np(errnum);
    snprintf(err->text + used, sizeof err->text - (size_t)used, ": %s",
             reason ? reason : "unknown error");
}

fsdp_status fsdp_fail(fsdp_error *err, fsdp_status status, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    set_text(err, status, 0, format, args);
    va_end(args);
    return status;
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
    if (!err || err->status == FSDP_OK)
        return;
    char before[FSDP_ERROR_TEXT];
    memcpy(before, err->text, sizeof before);
    va_list args;
    va_start(args, format);
    int used = vsnprintf(err->text, sizeof err->text, format, args);
    va_end(args);
    if (used < 0 || (size_t)used + 2 >= sizeof err->text)
        return;
    size_t room = sizeof err->text - (size_t)used;
    size_t length = strnlen(before, sizeof before);
    if (length > room - 3)
        length = room - 3;
    memcpy(err->text + used, ": ", 2);
    memcpy(err->text + used + 2, before, length);
    err->text[(size_t)used + 2 + length] = '\0';
}

int fsdp_error_report(const fsdp_error *err)
{
    if (!err || err->status == FSDP_OK)
        return 0;
    char line[FSDP_ERROR_TEXT + 64];
    const char *text = err->text[0] ? err->text : fsdp_status_name(err->status);
    int length = snprintf(line, sizeof line, "error: %s\n", text);
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
