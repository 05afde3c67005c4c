/* Lists of names, and shapes, for messages */
#ifndef FSDP_NAMES_H
#define FSDP_NAMES_H

#include "base/core/mem.h"
#include <fsdp/status.h>
#include "base/text.h"
#include <fsdp/sd.h>

/* Printable names. Zero-initialise. */
typedef struct fsdp_name_list {
    char **items;
    size_t count, capacity;
} fsdp_name_list;
bool fsdp_names_add(fsdp_name_list *names, const char *name, size_t size);
void fsdp_names_release(fsdp_name_list *names);
/* Moves the items to the caller and leaves an empty list. */
void fsdp_names_move(fsdp_name_list *names, char ***items_out, size_t *count_out);
/* Appends "; 2 missing: 'a', 'b'", for an empty list nothing. False when the list was too long and was
 * cut. */
bool fsdp_names_append(const fsdp_name_list *names, const char *what, fsdp_text *text);

/* "[3, 4]" */
const char *fsdp_shape_text(int ndim, const int64_t *shape, char *out, size_t room);
/* A tensor's shape: blocks count as the values that they hold. */
const char *fsdp_tensor_shape_text(const fsdp_entry *tensor, char *out, size_t room);

#endif
