/* The io behind an fsdp_access. Inside, an io becomes an access again as its disk. */
#ifndef FSDP_ACCESS_H
#define FSDP_ACCESS_H

#include "base/io/io.h"
#include <fsdp/checkpoint.h>

/* access may be NULL. A disk of a test has its own trust bits. */
static inline fsdp_io *fsdp_access_io(const fsdp_access *access)
{
    if (!access)
        return fsdp_io_posix();
    unsigned trust = (access->follow_links ? FSDP_TRUST_LINKS : 0U) |
                     (access->limits_only ? FSDP_TRUST_LIMITS : 0U);
    return access->disk ? access->disk : fsdp_io_posix_trusting(trust);
}

#endif
