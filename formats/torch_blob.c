/*
 * A value in the form that torch.save gave it, kept as bytes by another format: opened once more as a
 * value and the tensors in it. See fsdp_source_open_blob.
 */
#include "base/io_memory.h"
#include "formats/torch_internal.h"

typedef struct blob_state {
    fsdp_memory_io io;
    fsdp_source *source;
    torch_memory *memory;
} blob_state;

static fsdp_status blob_read(void *state, size_t tensor, const fsdp_box *box, void *data,
                             fsdp_error *err)
{
    const blob_state *blob = state;
    return torch_memory_read(blob->memory, blob->source, tensor, box, data, err);
}

static void blob_close(void *state)
{
    blob_state *blob = state;
    torch_memory_close(blob->memory);
    fsdp_free(blob);
}

static fsdp_status add_value(blob_state *blob, size_t size, fsdp_error *err)
{
    torch_archive archive;
    torch_opening opening = {.source = blob->source,
                             .memory = blob->memory,
                             .stream = FSDP_NO_STREAM,
                             .where = "a stored value"};
    FSDP_TRY(fsdp_source_add_file(blob->source, "value", false, &opening.file, err));
    FSDP_TRY(torch_zip_open(&opening, 0, (int64_t)size, true, &archive, err));
    fsdp_value value = {0};
    fsdp_status st = torch_value_read(&archive, archive.pickle.root, &value, err);
    if (st == FSDP_OK)
        st = fsdp_source_add_value(blob->source, "", 0, &value, NULL, err);
    fsdp_value_release(&value);
    torch_archive_release(&archive);
    return st == FSDP_OK ? fsdp_source_seal(blob->source, err) : st;
}

fsdp_status fsdp_source_open_blob(const void *data, size_t size, fsdp_source **source_out,
                                  fsdp_error *err)
{
    static const fsdp_source_ops ops = {.read = blob_read, .close = blob_close};
    blob_state *blob = fsdp_alloc(1, sizeof *blob);
    if (!blob)
        return fsdp_fail_memory(err, "a value");
    fsdp_memory_io_borrow(&blob->io, data, size);
    fsdp_status st = torch_memory_create(&blob->memory, err);
    if (st == FSDP_OK)
        st = fsdp_source_create(&blob->io.io, "value", "torch", &blob->source, err);
    if (st != FSDP_OK) {
        blob_close(blob);
        return st;
    }
    fsdp_source *source = blob->source;
    fsdp_source_set_ops(source, &ops, blob);
    st = add_value(blob, size, err);
    if (st != FSDP_OK) {
        fsdp_source_close(source);
        return st;
    }
    *source_out = source;
    return FSDP_OK;
}
