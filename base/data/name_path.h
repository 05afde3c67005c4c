/*
 * The path of a name in nested dicts and lists. The name is the path's elements joined by dots, so a path
 * only says where elements end: one number per element, its bytes in the name, negative for a list position.
 * "optim.0.lr" as ["optim", 0, "lr"] is 5, -1, 2. A dict key that is a number, as in optimizer states of
 * PyTorch, has the flag FSDP_PATH_NUMBER with its bytes; a position in a tuple has FSDP_PATH_TUPLE with its
 * bytes, before the sign. The one element FSDP_PATH_WHOLE: the entry is the whole object, in no dict or list;
 * its name is empty.
 */
#ifndef FSDP_NAME_PATH_H
#define FSDP_NAME_PATH_H

#include <fsdp/value.h>

enum { FSDP_PATH_MOST = 1000 };

bool fsdp_path_is_whole(const int32_t *path, size_t count);
/* True for a position in a tuple. */
bool fsdp_path_in_tuple(int32_t element);

/* Bytes of an element in the name. */
size_t fsdp_path_bytes(int32_t element);

/* True for letters, digits, '-' and '_', one at least: a key that is also a name of a file. */
bool fsdp_name_is_key(const char *text, size_t size);

/* True for text that spells a number as such a key does. */
bool fsdp_path_is_number(const char *text, size_t size);

/* True when the elements make up the name and its positions and numbers are spelled as such. */
bool fsdp_path_fits(const char *name, size_t size, const int32_t *path, size_t count);

/* True for the path of fsdp_path_default. */
bool fsdp_path_is_default(const char *name, size_t size, const int32_t *path, size_t count);

typedef struct fsdp_path {
    const char *name;
    size_t name_size;
    const int32_t *elements;
    size_t count;
} fsdp_path;

/* The path of a renamed entry: elements at the beginning and end that both names share stay elements, the
 * text between them is one element. path_out has capacity for count + 1; returns its count. */
size_t fsdp_path_rename(const fsdp_path *old, const char *name, size_t size, int32_t *path_out);

#endif
