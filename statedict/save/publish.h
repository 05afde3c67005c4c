/* The last step of a save and of a conversion: view, manifest, and the rename that makes it all true. */
#ifndef FSDP_PUBLISH_H
#define FSDP_PUBLISH_H

#include "formats/shard.h"
#include "statedict/commit/commit.h"
#include "statedict/manifest/manifest.h"

typedef struct fsdp_publication {
    fsdp_staging *staging;
    fsdp_manifest manifest;          /* all but the files */
    const fsdp_file_record *records;    /* one per file */
    const int *owners;
    bool with_view;
    const fsdp_watch *watch;
} fsdp_publication;

/* On failure the staging is left for fsdp_staging_abandon. */
fsdp_status fsdp_publish(const fsdp_publication *publication, fsdp_error *err);

#endif
