/* A file of Keras 3: a zip around "model.weights.h5", metadata.json and config.json. */
#ifndef FSDP_HDF5_KERAS_H
#define FSDP_HDF5_KERAS_H

#include "formats/hdf5_child/hdf5_listing.h"

/* True for a zip whose first member is the one that Keras writes first. */
bool fsdp_keras_begins(const uint8_t *head, size_t size);

/* Finds the HDF5 file in the zip; place holds its file and becomes the place of the member, whose checksum
 * the source gets. */
fsdp_status fsdp_keras_find(fsdp_source *source, fsdp_h5_place *place, fsdp_error *err);

#endif
