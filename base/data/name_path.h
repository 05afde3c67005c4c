/*
 * How programs with nested dicts and lists nest a name: its path. The name is the path's elements joined
 * by dots, so a path only says where the elements end: per element its bytes in the name, negative for a
 * position in a list. "optim.0.lr" as ["optim", 0, "lr"] is 5, -1, 2. A key of a dict that is a number there,
 * as in optimizer states of PyTorch, has FSDP_PATH_NUMBER beside its bytes.
 */
#ifndef FSDP_NAME_PATH_H
#define FSDP_NAME_PATH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { FSDP_PATH_MOST = 1000, FSDP_PATH_DEFAULT_MOST = 4 };

enum { FSDP_PATH_NUMBER = 1 << 30 };

/* Bytes of an element in the name. */
size_t fsdp_path_bytes(int32_t element);

/* Is the text a number as it is spelled in such a key? */
bool fsdp_path_is_number(const char *text, size_t size);

/* Do the elements make up the name, and are positions and numbers spelled as such? */
bool fsdp_path_fits(const char *name, size_t size, const int32_t *path, size_t count);

/*
 * The path of a name of which nothing is known: names of our own training runs (model.NAME,
 * optim.state.NAME.KIND, optim.param_groups.NAME.KIND) are nested as PyTorch nests them, others are one
 * element. Returns the count.
 */
size_t fsdp_path_default(const char *name, size_t size, int32_t path_out[FSDP_PATH_DEFAULT_MOST]);
bool fsdp_path_is_default(const char *name, size_t size, const int32_t *path, size_t count);

/* The path of a name that was another one: elements at its beginning and end that stayed the same stay
 * elements, what is between them is one. path_out has room for count + 1; returns its count. */
size_t fsdp_path_rename(const char *old, size_t old_size, const int32_t *path, size_t count,
                        const char *name, size_t size, int32_t *path_out);

#endif
