/* Finds the snapshot of a model in the cache of Hugging Face. */
#ifndef FSDP_HUB_CACHE_H
#define FSDP_HUB_CACHE_H

#include "base/io/io.h"

/* *path_out is PATH/snapshots/REVISION with the revision of refs/main, or else the only snapshot; NULL
 * when the path is no such model (a directory with snapshots and blobs). FSDP_ERR_USAGE: several snapshots
 * and no refs/main. FSDP_ERR_REFUSED: links are not trusted, and one leads out of PATH. */
fsdp_status fsdp_hub_snapshot(const char *path, fsdp_io *io, char **path_out, fsdp_error *err);

#endif
