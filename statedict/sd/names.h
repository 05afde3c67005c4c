/* Lists of names, and shapes, for messages */
#ifndef FSDP_NAMES_H
#define FSDP_NAMES_H

#include "base/core/mem.h"
#include <fsdp/status.h>
#include "base/text.h"

/* Printable names. Zero-initialise. */
typedef struct fsdp_name_list {
    char **items;
    size_t count, capacity;
} fsdp_name_list;
bool fsdp_names_add(fsdp_name_list *names, const char *name, size_t size);
void fsdp_names_release(fsdp_name_list *names);
/* Hands the items over and leaves an empty list. */
void fsdp_names_move(fsdp_name_list *names, char ***items_out, size_t *count_out);
/* "; 2 missing: 'a', 'b'", nothing for an empty list; false when it got long and was cut. */
bool fsdp_names_append(const fsdp_name_list *names, const char *what, fsdp_text *text);

/* "[3, 4]" */
const char *fsdp_shape_text(int ndim, const int64_t *shape, char *out, size_t room);

#endif
