/* The names of calls, for messages. See ctl_frame.h. */
#include "statedict/ctl/ctl_frame.h"

#include <stdio.h>

const char *fsdp_ctl_call_name(uint32_t kind)
{
    static const char *const names[] = {"?",       "allgather", "broadcast", "agree",
                                        "barrier", "send",      "recv"};
    return kind < sizeof names / sizeof names[0] ? names[kind] : names[0];
}

const char *fsdp_ctl_call_purpose(uint32_t kind)
{
    static const char *const purposes[] = {"answer",
                                           "exchange what each rank knows",
                                           "learn what one rank decided",
                                           "agree on the outcome",
                                           "pass a barrier",
                                           "send a message",
                                           "receive a message"};
    return kind < sizeof purposes / sizeof purposes[0] ? purposes[kind] : purposes[0];
}

void fsdp_ctl_call_describe(const frame *head, char *out, size_t out_size)
{
    const char *name = fsdp_ctl_call_name(head->call);
    unsigned long long size = head->size, calls = head->calls;
    if (head->call == CALL_ALLGATHER)
        snprintf(out, out_size, "%s of %llu bytes (call %llu)", name, size, calls);
    else if (head->call == CALL_BROADCAST)
        snprintf(out, out_size, "%s of %llu bytes from rank %d (call %llu)", name, size,
                 (int)head->root, calls);
    else if (head->call == CALL_SEND || head->call == CALL_RECV)
        snprintf(out, out_size, "%s of %llu bytes (after call %llu)", name, size, calls);
    else
        snprintf(out, out_size, "%s (call %llu)", name, calls);
}
