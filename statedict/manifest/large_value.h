/*
 * Large values: a value over 64 KiB is not written into the manifest. The shard file of rank 0 holds it as a
 * u8 tensor with the name of the value, and the manifest holds its kind and size.
 */
#ifndef FSDP_LARGE_VALUE_H
#define FSDP_LARGE_VALUE_H

#include "base/text.h"
#include <fsdp/value.h>

enum { FSDP_VALUE_INLINE = 64 << 10 };

/* About the length of its text. */
size_t fsdp_value_bytes(const fsdp_value *value);
bool fsdp_value_is_large(const fsdp_value *value);

/* The bytes in the file: of a string, bytes or opaque value its content, of others the text of the
 * manifest. */
fsdp_status fsdp_value_pack(const fsdp_value *value, fsdp_text *bytes, fsdp_error *err);
/* name is for messages. */
fsdp_status fsdp_value_unpack(fsdp_value_kind kind, const char *bytes, size_t size, const char *name,
                              fsdp_value *value_out, fsdp_error *err);

#endif
