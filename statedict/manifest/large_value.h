/*
 * Large values: what is over 64 KiB does not go into the manifest's text. Rank 0's shard file holds
 * it as a u8 tensor under the value's name, and the manifest its kind and size.
 */
#ifndef FSDP_LARGE_VALUE_H
#define FSDP_LARGE_VALUE_H

#include "base/text.h"
#include <fsdp/value.h>

enum { FSDP_VALUE_INLINE = 64 << 10 };

/* About how long its text gets. */
size_t fsdp_value_bytes(const fsdp_value *value);
bool fsdp_value_is_large(const fsdp_value *value);

/* The bytes in the file: those of a string, bytes or opaque value; the manifest's text of others. */
fsdp_status fsdp_value_pack(const fsdp_value *value, fsdp_text *bytes, fsdp_error *err);
/* name is for messages. */
fsdp_status fsdp_value_unpack(fsdp_value_kind kind, const char *bytes, size_t size, const char *name,
                              fsdp_value *value_out, fsdp_error *err);

#endif
