/*
 * Dissemination: in each round a member sends its combined value to the member at twice the
 * distance of the round before, so that after log2(members) rounds every member has the values of
 * all. See comm_message.h.
 */
#include "runtime/comm_message/comm_message.h"

#include <string.h>

/* --- rounds ----------------------------------------------------------------------------------- */

/* Waits for both transfers of a round. */
static fsdp_status await_round(message_group *group, int from, int in_place, fsdp_error *err)
{
    fsdp_p2p *p2p = group->transport->p2p;
    message_watch watch = {0};
    bool is_here = false;
    for (int left = 2; left > 0;) {
        int count = 0;
        FSDP_TRY(p2p->ops->test(p2p, group->batch, group->finished, &count, err));
        for (int i = 0; i < count; i++)
            is_here |= group->finished[i] == in_place;
        left -= count;
        if (left > 0)
            FSDP_TRY(
                fsdp_message_pause(group, &watch, count > 0, is_here ? group->rank : from, err));
    }
    return FSDP_OK;
}

static fsdp_status run_round(message_group *group, int distance, void *mine, size_t size,
                             void (*merge)(void *mine, const void *theirs), fsdp_error *err)
{
    fsdp_p2p *p2p = group->transport->p2p;
    int n = group->size, to = (group->rank + distance) % n;
    int from = (group->rank - distance + n) % n, in_place = 2 * n;
    unsigned char *incoming = group->pieces + (size_t)in_place * group->piece;
    const fsdp_p2p_transfer recv = {in_place, group->ranks[from], group->channel, incoming, size};
    const fsdp_p2p_transfer send = {0, group->ranks[to], group->channel, group->pieces, size};
    memcpy(send.data, mine, size);
    FSDP_TRY(p2p->ops->recv(p2p, group->batch, &recv, err));
    FSDP_TRY(p2p->ops->send(p2p, group->batch, &send, err));
    FSDP_TRY(await_round(group, from, in_place, err));
    merge(mine, incoming);
    return FSDP_OK;
}

fsdp_status fsdp_message_disseminate(message_group *group, void *mine, size_t size,
                                     void (*merge)(void *mine, const void *theirs), fsdp_error *err)
{
    for (int distance = 1; distance < group->size; distance *= 2)
        FSDP_TRY(run_round(group, distance, mine, size, merge, err));
    return FSDP_OK;
}

/* --- headers ---------------------------------------------------------------------------------- */

/* The header of the first member that is known so far, and that of the first known member whose header
 * differs. */
typedef struct known_headers {
    int32_t first, other; /* members; other -1: all headers are equal */
    fsdp_comm_header headers[2];
} known_headers;

_Static_assert(sizeof(known_headers) <= FSDP_DISSEMINATION_SIZE, "fits into a round");

/* Records the header when it differs and belongs to an earlier member than the recorded one. */
static void consider(known_headers *known, int position, const fsdp_comm_header *header)
{
    bool is_same = memcmp(header, &known->headers[0], sizeof *header) == 0;
    if (position < 0 || is_same || (known->other >= 0 && known->other <= position))
        return;
    known->other = position;
    known->headers[1] = *header;
}

static void merge_headers(void *mine, const void *theirs)
{
    known_headers *known = mine, more, before = *known;
    memcpy(&more, theirs, sizeof more);
    if (more.first < known->first) {
        *known = more;
        more = before;
    }
    consider(known, more.first, &more.headers[0]);
    consider(known, more.other, &more.headers[1]);
}

fsdp_status fsdp_message_begin(message_group *group, const fsdp_comm_header *header,
                               fsdp_error *err)
{
    known_headers known;
    memset(&known, 0, sizeof known);
    known.first = group->rank;
    known.other = -1;
    known.headers[0] = *header;
    group->header = *header;
    group->are_all_here = false;
    atomic_fetch_add(&group->calls, 1);
    FSDP_TRY(fsdp_message_disseminate(group, &known, sizeof known, merge_headers, err));
    group->are_all_here = true;
    if (known.other < 0)
        return FSDP_OK;
    err->status = fsdp_comm_differ(group->ranks[known.first], &known.headers[0],
                                   group->ranks[known.other], &known.headers[1], err);
    fsdp_message_fail(group, err, false, true);
    return err->status;
}
