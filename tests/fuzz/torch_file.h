/* The archive that torch.save would put around a pickle, for fuzz targets. */
#ifndef FSDP_TORCH_FILE_H
#define FSDP_TORCH_FILE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Is it a pickle on its own (and no archive or legacy file)? */
bool torch_file_wants(const uint8_t *data, size_t size);

/* Storages that the pickle speaks of are there, with the sizes it says, while they are few and small.
 * wanted: the size that the archive gets, unless it is larger; 0: any. NULL when there is no memory; freed
 * with free. */
uint8_t *torch_file(const uint8_t *pickle, size_t size, size_t wanted, size_t *size_out);

#endif
