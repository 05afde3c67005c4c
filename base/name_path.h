/*
 * How programs with nested dicts and lists nest a name: its path. The name is the path's elements joined
 * by dots, so a path only says where the elements end: per element its bytes in the name, negative for a
 * position in a list. "optim.0.lr" as ["optim", 0, "lr"] is 5, -1, 2.
 */
#ifndef FSDP_NAME_PATH_H
#define FSDP_NAME_PATH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { FSDP_PATH_MOST = 1000, FSDP_PATH_DEFAULT_MOST = 4 };

/* Do the elements make up the name, and are positions numbers as they are spelled? */
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
