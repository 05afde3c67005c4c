/*
 * Sets a dict that only rank 0 has. Rank 0 first broadcasts its description as one text: names, dtypes,
 * shapes, values, and the contents of 0-d tensors. Every rank matches it with its own live dict, and all
 * agree that it matches before anything changes. Then the tensors follow one after the other through one
 * bounded buffer, of which each rank keeps its part. The inverse is state_full.c.
 */
#include "runtime/state/state_internal.h"

#include <string.h>

#include "statedict/manifest/large_value.h"
#include "statedict/manifest/manifest.h"
#include "statedict/sd/layout_internal.h"

const fsdp_entry *fsdp_state_source(const fsdp_state_match *match, const fsdp_sd *sd, size_t live)
{
    const fsdp_entry *entry = fsdp_sd_at(sd, (size_t)match->source[live]);
    return entry->kind == FSDP_ENTRY_ALIAS ? fsdp_sd_at(sd, entry->target) : entry;
}

/* --- description: rank 0 ---------------------------------------------------------------------- */

static fsdp_status check_whole(const fsdp_entry *entry, fsdp_error *err)
{
    fsdp_box box, whole = fsdp_box_whole(entry->ndim, entry->shape);
    if (fsdp_entry_bytes(entry) == 0)
        return FSDP_OK;
    if (fsdp_layout_box_count(&entry->layout, entry->ndim, entry->shape, 0) == 1 && entry->data) {
        fsdp_layout_box_at(&entry->layout, entry->ndim, entry->shape, 0, 0, &box);
        if (fsdp_box_equal(&box, &whole))
            return FSDP_OK;
    }
    return fsdp_fail(err, FSDP_ERR_USAGE,
                     "'%s' is not whole in rank 0's memory, as broadcast_from_rank0 requires",
                     entry->name);
}

static fsdp_status describe_entry(const fsdp_sd *sd, const fsdp_entry *entry,
                                  const fsdp_mesh *alone, fsdp_sd *described, fsdp_text *bytes,
                                  fsdp_error *err)
{
    const fsdp_layout layout = {.kind = FSDP_LAYOUT_MESH, .mesh = alone};
    if (entry->kind == FSDP_ENTRY_VALUE && fsdp_value_is_large(&entry->value))
        FSDP_TRY(fsdp_value_pack(&entry->value, bytes, err));
    if (entry->kind == FSDP_ENTRY_TENSOR)
        FSDP_TRY(check_whole(entry, err));
    if (entry->kind == FSDP_ENTRY_TENSOR && entry->ndim == 0)
        fsdp_text_add(bytes, entry->data, fsdp_dtype_size(entry->dtype));
    return fsdp_state_add_entry(sd, entry, &layout, NULL, described, err);
}

static fsdp_status describe_all(const fsdp_sd *sd, fsdp_sd *described, fsdp_text *bytes,
                                fsdp_error *err)
{
    fsdp_mesh *alone = NULL;
    const int64_t one = 1;
    FSDP_TRY(fsdp_mesh_create(1, &one, (const char *[]){"rank"}, NULL, &alone, err));
    fsdp_status status = FSDP_OK;
    for (size_t i = 0; i < fsdp_sd_count(sd) && status == FSDP_OK; i++)
        status = describe_entry(sd, fsdp_sd_at(sd, i), alone, described, bytes, err);
    fsdp_mesh_free(alone);
    return status;
}

/* Encodes the description as a manifest, followed by the bytes of large values and 0-d tensors. */
static fsdp_status encode(const fsdp_sd *sd, fsdp_text *text, fsdp_text *bytes, fsdp_error *err)
{
    fsdp_manifest_file none = {0};
    fsdp_manifest manifest = {
        .kind = FSDP_FULL, .step = FSDP_NO_STEP, .world = 1, .files = &none, .file_count = 1};
    FSDP_TRY(fsdp_sd_create(&manifest.sd, err));
    fsdp_status status = describe_all(sd, manifest.sd, bytes, err);
    if (status == FSDP_OK && bytes->failed)
        status = fsdp_fail_memory(err, "the description of a state dict");
    if (status == FSDP_OK)
        status = fsdp_manifest_encode(&manifest, text, err);
    fsdp_sd_free(manifest.sd);
    return status;
}

/* --- description: all ranks ------------------------------------------------------------------- */

/* Points 0-d tensors and large values to their bytes, in the order of the entries. */
static fsdp_status place_bytes(const fsdp_manifest *manifest, char *bytes, fsdp_error *err)
{
    size_t next = 0;
    for (size_t i = 0; i < fsdp_sd_count(manifest->sd); i++) {
        const fsdp_entry *entry = fsdp_sd_at(manifest->sd, i);
        if (entry->kind == FSDP_ENTRY_TENSOR && entry->ndim == 0) {
            fsdp_sd_set_data(manifest->sd, i, bytes);
            bytes += fsdp_dtype_size(entry->dtype);
        } else if (next < manifest->stored_count && manifest->stored[next].entry == i) {
            const fsdp_stored_value *stored = &manifest->stored[next++];
            fsdp_value value;
            FSDP_TRY(fsdp_value_unpack(stored->kind, bytes, (size_t)stored->size, entry->name,
                                       &value, err));
            fsdp_sd_set_value(manifest->sd, i, &value);
            bytes += stored->size;
        }
    }
    return FSDP_OK;
}

static fsdp_status decode(const char *text, size_t size, fsdp_state_message *message,
                          fsdp_error *err)
{
    fsdp_manifest manifest;
    FSDP_TRY(fsdp_manifest_decode(text, size, "rank 0's state dict", &manifest, err));
    fsdp_status status = place_bytes(&manifest, message->bytes, err);
    message->sd = manifest.sd;
    manifest.sd = NULL;
    fsdp_manifest_release(&manifest);
    return status;
}

static fsdp_status share(fsdp_ctl *ctl, void *data, size_t size, fsdp_error *err)
{
    return size > 0 ? fsdp_ctl_broadcast(ctl, 0, data, size, err) : FSDP_OK;
}

static fsdp_status tell(fsdp_ctl *ctl, const fsdp_text *text, const fsdp_text *bytes,
                        fsdp_state_message *message, fsdp_error *err)
{
    size_t sizes[] = {text->size, bytes->size};
    FSDP_TRY(share(ctl, sizes, sizeof sizes, err));
    char *copy = fsdp_alloc(sizes[0], 1);
    message->bytes = fsdp_alloc(sizes[1], 1);
    fsdp_status status =
        copy && message->bytes ? FSDP_OK : fsdp_fail_memory(err, "rank 0's state dict");
    if (status == FSDP_OK && fsdp_ctl_rank(ctl) == 0) {
        memcpy(copy, text->data, sizes[0]);
        memcpy(message->bytes, bytes->size > 0 ? bytes->data : "", sizes[1]);
    }
    status = fsdp_ctl_agree(ctl, status, err);
    if (status == FSDP_OK)
        status = share(ctl, copy, sizes[0], err);
    if (status == FSDP_OK)
        status = share(ctl, message->bytes, sizes[1], err);
    if (status == FSDP_OK)
        status = fsdp_ctl_agree(ctl, decode(copy, sizes[0], message, err), err);
    fsdp_free(copy);
    return status;
}

fsdp_status fsdp_state_send_description(fsdp_root *root, const fsdp_sd *sd,
                                        fsdp_state_message *message_out, fsdp_error *err)
{
    fsdp_ctl *ctl = fsdp_world_ctl(root->world);
    fsdp_text text = {0}, bytes = {0};
    fsdp_status status = root->world->rank == 0 ? encode(sd, &text, &bytes, err) : FSDP_OK;
    status = fsdp_ctl_agree(ctl, status, err);
    if (status == FSDP_OK)
        status = tell(ctl, &text, &bytes, message_out, err);
    fsdp_text_release(&text);
    fsdp_text_release(&bytes);
    return status;
}

void fsdp_state_message_release(fsdp_state_message *message)
{
    fsdp_sd_free(message->sd);
    fsdp_free(message->bytes);
    *message = (fsdp_state_message){0};
}

/* --- tensors ---------------------------------------------------------------------------------- */

static fsdp_status bring(const fsdp_state_match *match, fsdp_state_mover *mover, size_t i,
                         const fsdp_sd *data, fsdp_error *err)
{
    const fsdp_entry *live = fsdp_sd_at(match->live, i);
    const fsdp_entry *told = fsdp_state_source(match, match->sd, i);
    const fsdp_box whole = fsdp_box_whole(live->ndim, live->shape);
    bool has_data = mover->root->world->rank == 0;
    if (live->ndim == 0) {
        (void)fsdp_state_set_number(live, told);
        return FSDP_OK;
    }
    return fsdp_state_move(mover, 0, &whole,
                           has_data ? fsdp_state_source(match, data, i)->data : NULL, live, err);
}

static fsdp_status bring_all(const fsdp_state_match *match, fsdp_state_mover *mover,
                             const fsdp_sd *data, fsdp_error *err)
{
    for (size_t i = 0; i < fsdp_sd_count(match->live); i++)
        if (match->source[i] >= 0)
            FSDP_TRY(bring(match, mover, i, data, err));
    return fsdp_state_move_end(mover, err);
}

fsdp_status fsdp_state_broadcast(const fsdp_state_match *match, const fsdp_sd *data,
                                 fsdp_error *err)
{
    fsdp_root *root = match->scope->root;
    fsdp_state_mover mover = {0};
    fsdp_status status =
        fsdp_state_mover_init(&mover, root, fsdp_sd_tensor_bytes(match->live), FSDP_OK, err);
    if (status == FSDP_OK)
        status =
            fsdp_root_done(root, "fsdp_root_set_state", bring_all(match, &mover, data, err), err);
    fsdp_state_mover_release(&mover);
    return status;
}
