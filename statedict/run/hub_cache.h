/* Which snapshot of a model in the cache of Hugging Face is meant. */
#ifndef FSDP_HUB_CACHE_H
#define FSDP_HUB_CACHE_H

#include "base/io/io.h"

/* *path_out is NULL when the path is no such model (a directory with snapshots and blobs), else
 * PATH/snapshots/ and what refs/main says, or the only one there is. FSDP_ERR_USAGE: there are several and
 * nothing tells. */
fsdp_status fsdp_hub_snapshot(const char *path, fsdp_io *io, char **path_out, fsdp_error *err);

#endif
