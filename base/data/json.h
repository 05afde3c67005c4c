/*
 * JSON: a pull reader over memory. The writer is text.h.
 *
 * Why not a DOM library: a manifest of 40,000 tensors must be read in milliseconds, names may hold
 * NUL, integers must come back exactly, and memory must stay bounded on hostile input.
 * The reader is strict RFC 8259 plus: valid UTF-8 only, depth at most 64, escapes incl. surrogate
 * pairs (a lone surrogate is an error). fsdp_json_next_member refuses duplicate keys; callers of
 * fsdp_json_next_key check for them.
 *
 * The room base/data has data types without files: boxes, dtypes, values, names and their table, JSON, and
 * the flow trace. In come memory and text, out come structs that the caller owns. base/io and every layer
 * above may call it.
 */
#ifndef FSDP_JSON_H
#define FSDP_JSON_H

#include <fsdp/status.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef enum fsdp_json_kind {
    FSDP_JSON_NULL, FSDP_JSON_BOOL, FSDP_JSON_NUMBER, FSDP_JSON_STRING, FSDP_JSON_ARRAY,
    FSDP_JSON_OBJECT,
    FSDP_JSON_END              /* nothing left in this text */
} fsdp_json_kind;

typedef struct fsdp_json {
    const char *text, *at, *end;
    const char *name;          /* for messages: the file's path */
    int depth;
    bool first;                /* right after an opening bracket: no comma there */
    char *scratch;             /* last unescaped string */
    size_t scratch_capacity;
} fsdp_json;

/* Borrows text and name until fsdp_json_release. */
void fsdp_json_init(fsdp_json *json, const char *text, size_t size, const char *name);
void fsdp_json_release(fsdp_json *json);

/* The kind of the next token, judged by its first character; the token is not taken. Text that starts no
 * value counts as a number; taking it gives the error. */
fsdp_json_kind fsdp_json_peek(fsdp_json *json);

/*
 * Objects and arrays are walked like this; both loops end with the closing bracket taken:
 *     FSDP_TRY(fsdp_json_enter_object(json, err));
 *     for (;;) {
 *         FSDP_TRY(fsdp_json_next_key(json, &key, &size, &more, err));   // key valid until the next call
 *         if (!more) break;
 *         ... take or skip exactly one value ...
 *     }
 */
fsdp_status fsdp_json_enter_object(fsdp_json *json, fsdp_error *err);
fsdp_status fsdp_json_next_key(fsdp_json *json, const char **key_out, size_t *size_out, bool *more_out,
                               fsdp_error *err);

/* The members that an object may have, at most 64, and those found so far (bit i: names[i]). */
typedef struct fsdp_json_members {
    const char *const *names;
    int count;
    uint64_t seen;
} fsdp_json_members;

/*
 * Walks an entered object whose members are known. *which_out is the index of the next member's name, and
 * its value is the next to take; -1 after the last member. Unknown members are skipped; a name that comes
 * twice is FSDP_ERR_DAMAGED.
 */
fsdp_status fsdp_json_next_member(fsdp_json *json, fsdp_json_members *members, int *which_out,
                                  fsdp_error *err);

fsdp_status fsdp_json_enter_array(fsdp_json *json, fsdp_error *err);
fsdp_status fsdp_json_next_item(fsdp_json *json, bool *more_out, fsdp_error *err);

/* The string is valid until the next call; it may hold NUL and has a zero byte after its end. */
fsdp_status fsdp_json_string(fsdp_json *json, const char **data_out, size_t *size_out, fsdp_error *err);
fsdp_status fsdp_json_i64(fsdp_json *json, int64_t *value_out, fsdp_error *err);
fsdp_status fsdp_json_u64(fsdp_json *json, uint64_t *value_out, fsdp_error *err);
fsdp_status fsdp_json_f64(fsdp_json *json, double *value_out, fsdp_error *err);
fsdp_status fsdp_json_bool(fsdp_json *json, bool *value_out, fsdp_error *err);
fsdp_status fsdp_json_null(fsdp_json *json, fsdp_error *err);
fsdp_status fsdp_json_skip(fsdp_json *json, fsdp_error *err);
/* Nothing but white space may follow. */
fsdp_status fsdp_json_finish(fsdp_json *json, fsdp_error *err);

/* FSDP_ERR_DAMAGED with the file's name, line and column of the reader's position. */
fsdp_status fsdp_json_fail(const fsdp_json *json, fsdp_error *err, const char *format, ...)
    FSDP_PRINTF(3, 4);

/* Decodes strict base64 (padding required) into fresh memory. */
fsdp_status fsdp_base64_decode(const char *text, size_t size, void **data_out, size_t *size_out,
                               fsdp_error *err);

#endif
