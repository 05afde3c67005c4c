/* Writers and readers of the parts of the manifest, called by manifest.c. See manifest.h. */
#ifndef FSDP_MANIFEST_INTERNAL_H
#define FSDP_MANIFEST_INTERNAL_H

#include "base/data/json.h"
#include "statedict/manifest/manifest.h"

/* Bytes of the strings and bytes of one value together; larger values go into a shard file. */
enum { FSDP_MANIFEST_VALUE_MAX = 16 << 20 };

/* --- values --- */
fsdp_status fsdp_manifest_put_value(fsdp_text *text, const fsdp_value *value, fsdp_error *err);
/* *value_out is null before and after a failure. */
fsdp_status fsdp_manifest_take_value(fsdp_json *json, fsdp_value *value_out, fsdp_error *err);

/* {"bytes": 100000}: the kind and size of a value that lies in a shard file (large_value.h). */
void fsdp_manifest_put_stored(fsdp_text *text, fsdp_value_kind kind, size_t size);
fsdp_status fsdp_manifest_take_stored(fsdp_json *json, fsdp_value_kind *kind_out, int64_t *size_out,
                                      fsdp_error *err);

/* --- the state dict: members "meshes", "flats", "entries", in this order --- */
fsdp_status fsdp_manifest_put_state(fsdp_text *text, const fsdp_sd *sd, int world, fsdp_error *err);

typedef struct fsdp_state_reader fsdp_state_reader;
typedef enum fsdp_state_part { FSDP_STATE_MESHES, FSDP_STATE_FLATS, FSDP_STATE_ENTRIES } fsdp_state_part;
/* Takes a member of the JSON. That of the meshes, which is the first, creates the reader. */
fsdp_status fsdp_state_reader_take(fsdp_state_reader **reader, fsdp_json *json, int world,
                                   fsdp_state_part part, fsdp_error *err);
/* Frees the reader, which may be NULL, and moves the state dict and the list of stored values to the
 * manifest; NULL after a failure: they are freed. */
void fsdp_state_reader_end(fsdp_state_reader *reader, fsdp_manifest *manifest_out);

#endif
