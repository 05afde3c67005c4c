/* The names of calls, for messages. See ctl_frame.h. */
#include "statedict/ctl/ctl_frame.h"

#include <stdio.h>

const char *fsdp_ctl_call_name(uint32_t kind)
{
    static const char *const names[] = {"?",       "allgather", "broadcast", "agree",
                                        "barrier", "send",      "recv"};
    return kind < sizeof names / sizeof names[0] ? names[kind] : names[0];
}

void fsdp_ctl_call_public(const frame *head, char out[FSDP_CTL_CALL])
{
    if (head->public_call[0])
        snprintf(out, FSDP_CTL_CALL, "%.*s", FSDP_CTL_CALL - 1, head->public_call);
    else
        snprintf(out, FSDP_CTL_CALL, "fsdp_ctl_%s", fsdp_ctl_call_name(head->call));
}

/* The sizes of a call: "of 8 bytes from rank 0". */
static void describe_sizes(const frame *head, char *out, size_t out_size)
{
    const unsigned long long size = head->size;
    if (head->call == CALL_BROADCAST)
        snprintf(out, out_size, " of %llu bytes from rank %d", size, (int)head->root);
    else if (head->call == CALL_AGREE || head->call == CALL_BARRIER)
        out[0] = '\0';
    else
        snprintf(out, out_size, " of %llu bytes", size);
}

void fsdp_ctl_call_describe(const frame *head, char *out, size_t out_size)
{
    char call[FSDP_CTL_CALL], sizes[64];
    const bool is_message = head->call == CALL_SEND || head->call == CALL_RECV;
    const char *when = is_message ? "after call" : "call";
    const unsigned long long calls = head->calls;
    fsdp_ctl_call_public(head, call);
    describe_sizes(head, sizes, sizeof sizes);
    if (head->public_call[0])
        snprintf(out, out_size, "%s (%s%s, %s %llu)", call, fsdp_ctl_call_name(head->call), sizes,
                 when, calls);
    else
        snprintf(out, out_size, "%s%s (%s %llu)", call, sizes, when, calls);
}
