/* The HDF5 file in a .keras file, where hdf5_read.c reads it: see hdf5_keras.h. */
#include "formats/hdf5_child/hdf5_keras.h"

#include "base/core/bytes.h"
#include "formats/zip/zip.h"

#include <string.h>

enum { LOCAL_HEADER = 30, NAME_SIZE_AT = 26 };

static const char first_member[] = "metadata.json";
static const char weights_member[] = "model.weights.h5";
static const char several_member[] = "model.weights.json";

bool fsdp_keras_begins(const uint8_t *head, size_t size)
{
    size_t name_size = sizeof first_member - 1;
    return size >= LOCAL_HEADER + name_size && memcmp(head, "PK\3\4", 4) == 0 &&
           fsdp_load_u16(head + NAME_SIZE_AT) == name_size &&
           memcmp(head + LOCAL_HEADER, first_member, name_size) == 0;
}

typedef struct keras_file {
    fsdp_source *source;
    int file;
} keras_file;

static fsdp_status read_zip(void *context, void *data, size_t size, int64_t offset, fsdp_error *err)
{
    const keras_file *keras = context;
    return fsdp_source_pread(keras->source, keras->file, data, size, offset, err);
}

static fsdp_status place_member(const keras_file *keras, const fsdp_zip_entry *entry,
                                fsdp_h5_place *place, fsdp_error *err)
{
    place->size = entry->size;
    place->offset = entry->is_deflated ? 0 : entry->offset;
    if (entry->is_deflated) {
        const fsdp_source_stream stream = {.file = keras->file,
                                           .packing = FSDP_PACKING_DEFLATE,
                                           .offset = entry->offset,
                                           .stored = entry->stored,
                                           .size = entry->size,
                                           .has_crc = entry->has_crc,
                                           .crc = entry->crc};
        return fsdp_source_add_stream(keras->source, &stream, &place->stream, err);
    }
    const fsdp_source_crc check = {weights_member, keras->file, entry->offset, entry->size,
                                   entry->crc};
    return entry->has_crc ? fsdp_source_add_crc(keras->source, &check, err) : FSDP_OK;
}

static fsdp_status fail_without_weights(const fsdp_zip *zip, const char *path, fsdp_error *err)
{
    bool are_several = fsdp_zip_find(zip, several_member, sizeof several_member - 1) != NULL;
    return fsdp_fail(err, FSDP_ERR_NOT_FOUND, "'%s' is a zip as Keras writes it, without '%s'%s",
                     path, weights_member,
                     are_several ? ": its weights are in several files; save it without "
                                   "max_shard_size"
                                 : "");
}

fsdp_status fsdp_keras_find(fsdp_source *source, fsdp_h5_place *place, fsdp_error *err)
{
    keras_file keras = {source, place->file};
    const fsdp_zip_input input = {
        .read = read_zip, .context = &keras, .path = fsdp_source_path(source), .size = place->size};
    fsdp_zip *zip = NULL;
    FSDP_TRY(fsdp_zip_open(&input, 0, &zip, err));
    const fsdp_zip_entry *entry = fsdp_zip_find(zip, weights_member, sizeof weights_member - 1);
    fsdp_status st = entry ? place_member(&keras, entry, place, err)
                           : fail_without_weights(zip, input.path, err);
    fsdp_zip_close(zip);
    return st;
}
