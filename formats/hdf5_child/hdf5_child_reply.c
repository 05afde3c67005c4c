/* The child's end of the channel, and libhdf5's reasons for errors: the other files of the child use both. */
#include "formats/hdf5_child/hdf5_child.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

/* --- the channel ------------------------------------------------------------------------------ */

static void __attribute__((noreturn)) end(void)
{
    for (;;)
        _exit(0);
}

void fsdp_h5_send(const fsdp_h5_child *child, const fsdp_h5_message *message)
{
    ssize_t n;
    do {
        n = send(child->channel, message, sizeof *message, MSG_NOSIGNAL);
    } while (n < 0 && errno == EINTR);
    if (n != (ssize_t)sizeof *message)
        end();
}

void fsdp_h5_receive(const fsdp_h5_child *child, fsdp_h5_message *message_out)
{
    ssize_t n;
    do {
        n = recv(child->channel, message_out, sizeof *message_out, 0);
    } while (n < 0 && errno == EINTR);
    if (n != (ssize_t)sizeof *message_out)
        end();
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
