/*
 * Text for files and people: a growing string, JSON spelling, and names made safe for a terminal.
 * A failure to grow is remembered, so that a writer checks once at the end (text.failed).
 */
#ifndef FSDP_TEXT_H
#define FSDP_TEXT_H

#include <fsdp/status.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Zero-initialise; release when done. */
typedef struct fsdp_text {
    char *data;                /* zero-terminated once something was added */
    size_t size, capacity;
    bool failed;
} fsdp_text;

void fsdp_text_release(fsdp_text *text);
void fsdp_text_add(fsdp_text *text, const char *data, size_t size);
void fsdp_text_addf(fsdp_text *text, const char *format, ...) FSDP_PRINTF(2, 3);

/* Adds a JSON string with quotes. Bytes that are not UTF-8 become U+FFFD. */
void fsdp_text_add_json_string(fsdp_text *text, const char *data, size_t size);
/* Adds the string for standard output: characters that mislead a terminal are also escaped. */
void fsdp_text_add_json_shown(fsdp_text *text, const char *data, size_t size);

/* Adds the shortest decimal text that reads back as the same double, always with a point or an exponent.
 * JSON has no spelling for nan and infinities: the caller does not pass them. */
void fsdp_text_add_f64(fsdp_text *text, double value);

void fsdp_text_add_base64(fsdp_text *text, const void *data, size_t size);

/* Returns true when the bytes are the word, such as a key of JSON or the name of an entry. */
bool fsdp_bytes_are(const char *data, size_t size, const char *word);
/* Returns true when the bytes end in `end`, which may be all of them. */
bool fsdp_bytes_end(const char *data, size_t size, const char *end);
/* Returns true when a name ends in the suffix, after at least one character. */
bool fsdp_has_suffix(const char *name, const char *suffix);

/* Adds two lower-case digits a byte. */
void fsdp_text_add_hex(fsdp_text *text, const void *data, size_t size);

/* Returns true for well-formed UTF-8 (no surrogates, nothing overlong). NUL is a character. */
bool fsdp_utf8_valid(const char *data, size_t size);

/* Makes a name safe for a terminal: escapes control characters and bytes that are not UTF-8, and
 * cuts long names with "..." in the middle. Returns out. */
const char *fsdp_printable(const char *data, size_t size, char *out, size_t out_size);

/* Does the same for a message, which may hold raw paths: backslashes are kept, since names in it are
 * escaped already. */
const char *fsdp_printable_message(const char *data, size_t size, char *out, size_t out_size);

/* Adds a word for a shell, in quotes: '...', or $'...' where a terminal must not see some of its bytes. */
void fsdp_text_add_quoted(fsdp_text *text, const char *word);

/* A word for a shell, in quotes where it needs them, after a blank. */
void fsdp_text_add_argument(fsdp_text *text, const char *word);
/* A path as such a word: a leading '-' is spelled so that it is not an option. */
void fsdp_text_add_path_argument(fsdp_text *text, const char *path);
/* A path, or a message with paths in it, whole and safe on a terminal. */
void fsdp_text_add_message(fsdp_text *text, const char *message);

/* "474.7 MiB". Returns out. */
const char *fsdp_spell_bytes(int64_t bytes, char *out, size_t out_size);

#ifdef __cplusplus
}
#endif
#endif
