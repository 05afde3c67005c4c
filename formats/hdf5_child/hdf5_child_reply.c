/*
 * The child's side of the channel: messages, the parts of a listing, libhdf5's reasons. Everything else in
 * the child answers through these functions.
 */
#include "formats/hdf5_child/hdf5_child.h"

#include "formats/hdf5_child/hdf5_sandbox.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>

/* --- the channel ------------------------------------------------------------------------------ */

static void send_message(const fsdp_h5_child *child, const fsdp_h5_message *message)
{
    ssize_t n;
    do {
        n = send(child->channel, message, sizeof *message, MSG_NOSIGNAL);
    } while (n < 0 && errno == EINTR);
    if (n != (ssize_t)sizeof *message)
        fsdp_hdf5_sandbox_end();
}

void fsdp_h5_send(const fsdp_h5_child *child, fsdp_h5_message_kind kind, int64_t number,
                  int64_t size)
{
    fsdp_h5_message message = {.kind = kind, .number = number, .size = size};
    send_message(child, &message);
}

void fsdp_h5_receive(const fsdp_h5_child *child, fsdp_h5_message *message_out)
{
    ssize_t n;
    do {
        n = recv(child->channel, message_out, sizeof *message_out, 0);
    } while (n < 0 && errno == EINTR);
    if (n != (ssize_t)sizeof *message_out)
        fsdp_hdf5_sandbox_end();
}

void fsdp_h5_send_failure(const fsdp_h5_child *child, fsdp_status status, const fsdp_error *err)
{
    size_t size = strnlen(err->text, sizeof err->text);
    memcpy(child->reply, err->text, size);
    fsdp_h5_message message = {
        .kind = FSDP_H5_FAILED, .status = (uint32_t)status, .size = (int64_t)size};
    send_message(child, &message);
}

/* --- the listing ------------------------------------------------------------------------------ */

void fsdp_h5_child_put(fsdp_h5_child *child, const void *data, size_t size)
{
    const char *from = data;
    while (size > 0) {
        size_t n = FSDP_H5_REPLY_ROOM - child->reply_size;
        if (n > size)
            n = size;
        memcpy(child->reply + child->reply_size, from, n);
        child->reply_size += n;
        from += n;
        size -= n;
        if (child->reply_size < FSDP_H5_REPLY_ROOM)
            continue;
        fsdp_h5_message answer;
        fsdp_h5_send(child, FSDP_H5_PART, 0, FSDP_H5_REPLY_ROOM);
        fsdp_h5_receive(child, &answer);
        child->reply_size = 0;
    }
}

void fsdp_h5_child_put_u8(fsdp_h5_child *child, unsigned value)
{
    unsigned char byte = (unsigned char)value;
    fsdp_h5_child_put(child, &byte, 1);
}

void fsdp_h5_child_put_i64(fsdp_h5_child *child, int64_t value)
{
    fsdp_h5_child_put(child, &value, sizeof value);
}

void fsdp_h5_child_put_string(fsdp_h5_child *child, const char *data, size_t size)
{
    uint32_t shown = size > UINT32_MAX ? UINT32_MAX : (uint32_t)size;
    fsdp_h5_child_put(child, &shown, sizeof shown);
    fsdp_h5_child_put(child, data, shown);
}

/* --- errors ----------------------------------------------------------------------------------- */

typedef struct reason {
    char text[200];
    bool is_memory;
} reason;

static herr_t take_reason(unsigned depth, const H5E_error2_t *entry, void *context)
{
    reason *why = context;
    if (depth == 0 && entry->desc)
        snprintf(why->text, sizeof why->text, "%s", entry->desc);
    if (entry->maj_num == H5E_RESOURCE)
        why->is_memory = true;
    return 0;
}

/* The version of the running library, which may differ from that of the build. */
static const char *library_version(void)
{
    static char text[32];
    unsigned major = 0, minor = 0, release = 0;
    H5get_libversion(&major, &minor, &release);
    snprintf(text, sizeof text, "%u.%u.%u", major, minor, release);
    return text;
}

fsdp_status fsdp_h5_child_fail(fsdp_error *err, const char *what, ...)
{
    reason why = {.text = "no reason given"};
    H5Ewalk2(H5E_DEFAULT, H5E_WALK_UPWARD, take_reason, &why);
    char text[400];
    va_list args;
    va_start(args, what);
    vsnprintf(text, sizeof text, what, args);
    va_end(args);
    if (why.is_memory)
        return fsdp_fail(err, FSDP_ERR_LIMIT, "%s: libhdf5 does not have enough memory (%s)", text,
                         why.text);
    if (strstr(why.text, "version"))
        return fsdp_fail(err, FSDP_ERR_REFUSED,
                         "%s: it is damaged or needs a newer HDF5 than this fsdp's libhdf5 %s (%s)",
                         text, library_version(), why.text);
    return fsdp_fail(err, FSDP_ERR_DAMAGED, "%s: libhdf5: %s", text, why.text);
}
