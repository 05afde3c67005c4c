/* Archives and compressed files that hold checkpoints and are none. */
#ifndef FSDP_ARCHIVES_H
#define FSDP_ARCHIVES_H

#include "formats/source.h"

/* FSDP_ERR_NOT_FOUND names the kind of archive that the file is, and the command that unpacks it. FSDP_OK: it
 * is none that is known. */
fsdp_status fsdp_archives_check(const fsdp_probe *probe, fsdp_error *err);

#endif
