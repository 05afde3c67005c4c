/* Makes an fsdp_io of an fsdp_access. Files of statedict pass an io to public calls as the `disk` of one. */
#ifndef FSDP_ACCESS_H
#define FSDP_ACCESS_H

#include "base/io/io.h"
#include <fsdp/checkpoint.h>

/* access may be NULL. A given disk has its own trust bits. */
static inline fsdp_io *fsdp_access_io(const fsdp_access *access)
{
    if (!access)
        return fsdp_io_posix();
    unsigned trust = (access->follow_links ? FSDP_TRUST_LINKS : 0U) |
                     (access->limits_only ? FSDP_TRUST_LIMITS : 0U);
    return access->disk ? access->disk : fsdp_io_posix_trusting(trust);
}

#endif
