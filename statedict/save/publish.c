/* Publishing a staged checkpoint: see publish.h. The manifest is the last thing written. */
#include "statedict/save/publish.h"

#include "base/core/mem.h"
#include "statedict/checkpoint/view.h"

static fsdp_status write_all(const fsdp_publication *publication, const fsdp_manifest *manifest,
                             fsdp_error *err)
{
    fsdp_staging *staging = publication->staging;
    fsdp_text text = {0};
    fsdp_status st = FSDP_OK;
    fsdp_view_opts view = {staging->io, manifest, publication->owners, staging->durable,
                           publication->watch};
    if (manifest->kind != FSDP_FULL && publication->with_view)
        st = fsdp_view_write(&view, staging->path, err);
    if (st == FSDP_OK)
        st = fsdp_manifest_encode(manifest, &text, err);
    if (st == FSDP_OK)
        st = fsdp_staging_publish(staging, text.data, text.size, err);
    fsdp_text_release(&text);
    return st;
}

fsdp_status fsdp_publish(const fsdp_publication *publication, fsdp_error *err)
{
    fsdp_manifest manifest = publication->manifest;
    manifest.files = fsdp_alloc((size_t)manifest.file_count, sizeof *manifest.files);
    if (!manifest.files)
        return fsdp_fail_memory(err, "a manifest");
    for (int i = 0; i < manifest.file_count; i++) {
        const fsdp_file_record *record = &publication->records[i];
        manifest.files[i] = (fsdp_manifest_file){record->size, record->index_offset,
                                                 record->index_size, record->index_hash};
    }
    fsdp_status st = write_all(publication, &manifest, err);
    fsdp_free(manifest.files);
    return st;
}
