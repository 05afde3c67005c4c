/* Writers and readers of the parts of the manifest, called by manifest.c. See manifest.h. */
#ifndef FSDP_MANIFEST_INTERNAL_H
#define FSDP_MANIFEST_INTERNAL_H

#include "base/data/json.h"
#include "statedict/manifest/manifest.h"

/* Bytes of the strings and bytes of one value together; larger values go into a shard file. */
enum { FSDP_MANIFEST_VALUE_MAX = 16 << 20 };
/* Explicit boxes of one tensor. */
enum { FSDP_MANIFEST_BOXES_MAX = 65536 };

/* --- values --- */
fsdp_status fsdp_manifest_put_value(fsdp_text *text, const fsdp_value *value, fsdp_error *err);
/* *value_out is null before and after a failure. */
fsdp_status fsdp_manifest_take_value(fsdp_json *json, fsdp_value *value_out, fsdp_error *err);

/* {"bytes": 100000}: the kind and size of a value that lies in a shard file (large_value.h). */
void fsdp_manifest_put_stored(fsdp_text *text, fsdp_value_kind kind, size_t size);
fsdp_status fsdp_manifest_take_stored(fsdp_json *json, fsdp_value_kind *kind_out, int64_t *size_out,
                                      fsdp_error *err);

/* --- paths (base/data/name_path.h) --- */

/* Writes ", "path": [...]"; nothing when the reader derives the same path from the name. */
void fsdp_manifest_put_path(fsdp_text *text, const fsdp_entry *entry);

/* Paths are applied after all entries exist: tensors of flat buffers are added late. Zero-initialise. */
typedef struct fsdp_path_list {
    int32_t *path;             /* the last one read */
    size_t path_count, path_capacity;
    struct fsdp_listed_path *items;
    size_t count, capacity;
    fsdp_arena arena;
} fsdp_path_list;
void fsdp_path_list_release(fsdp_path_list *list);
fsdp_status fsdp_manifest_take_path(fsdp_json *json, fsdp_path_list *list, fsdp_error *err);
/* Marks elements of the last path read. */
fsdp_status fsdp_manifest_take_tuples(fsdp_json *json, fsdp_path_list *list, fsdp_error *err);
fsdp_status fsdp_manifest_take_whole(fsdp_json *json, fsdp_path_list *list, fsdp_error *err);
/* Adds the last path read for this name. */
fsdp_status fsdp_path_list_add(fsdp_path_list *list, const fsdp_json *json, const char *name, size_t size,
                               fsdp_error *err);
fsdp_status fsdp_path_list_apply(const fsdp_path_list *list, fsdp_sd *sd, fsdp_error *err);

/* --- the state dict: members "meshes", "flats", "entries", in this order --- */
fsdp_status fsdp_manifest_put_state(fsdp_text *text, const fsdp_sd *sd, int world, fsdp_error *err);

typedef struct fsdp_state_reader fsdp_state_reader;
fsdp_status fsdp_state_reader_create(fsdp_json *json, int world, fsdp_state_reader **reader_out,
                                     fsdp_error *err);
void fsdp_state_reader_free(fsdp_state_reader *reader);        /* accepts NULL */
fsdp_status fsdp_state_reader_take_meshes(fsdp_state_reader *reader, fsdp_error *err);
fsdp_status fsdp_state_reader_take_flats(fsdp_state_reader *reader, fsdp_error *err);
fsdp_status fsdp_state_reader_take_entries(fsdp_state_reader *reader, fsdp_error *err);
/* Moves the state dict and the list of stored values to the manifest. */
void fsdp_state_reader_move(fsdp_state_reader *reader, fsdp_manifest *manifest_out);

#endif
