/*
 * Tensor names as link names in HDF5 files, and back.
 *
 * A link name is the tensor's name with '%', '/' and NUL written %25, %2F and %00; a name of only
 * dots has them as %2E; the empty name is "%"; a name over 1,024 bytes is "%h" and its XXH3-128 in
 * hex (the true name stands in the shard index). Box 1, 2, ... of a tensor in one file adds "%#1",
 * "%#2", ... A link of "%" and a lower-case letter other than a-f and h is an object of ours.
 */
#ifndef FSDP_HDF5_LINK_NAME_H
#define FSDP_HDF5_LINK_NAME_H

#include <fsdp/status.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    FSDP_NATIVE_NAME_PLAIN = 1024,   /* longer names get a hash as link */
    FSDP_NATIVE_LINK_ROOM = 3 * FSDP_NATIVE_NAME_PLAIN + 32
};

/* Writes the zero-terminated link of box `part` (0 is the first) and returns its length. */
size_t fsdp_native_link(const char *name, size_t size, uint32_t part, char out[FSDP_NATIVE_LINK_ROOM]);

/*
 * Decodes a link; name_out has a zero byte after its end. FSDP_ERR_DAMAGED when no name has this link;
 * FSDP_DIFFERS for "%h...", whose name only the index holds (part_out is set).
 */
fsdp_status fsdp_native_name(const char *link, char name_out[FSDP_NATIVE_NAME_PLAIN + 1],
                             size_t *size_out, uint32_t *part_out, fsdp_error *err);

#endif
