/* Names as users select and read them: patterns, and lists for messages. */
#ifndef FSDP_NAMES_H
#define FSDP_NAMES_H

#include "base/mem.h"
#include <fsdp/status.h>
#include <fsdp/text.h>

/* Names that match `include` (NULL: all) and not `exclude` (NULL: none); POSIX extended regexes. */
typedef struct fsdp_selection {
    void *include, *exclude;
} fsdp_selection;
fsdp_status fsdp_selection_init(fsdp_selection *selection, const char *include, const char *exclude,
                                fsdp_error *err);
void fsdp_selection_release(fsdp_selection *selection);
bool fsdp_selected(const fsdp_selection *selection, const char *name);

/* Printable names. Zero-initialise. */
typedef struct fsdp_name_list {
    char **items;
    size_t count, capacity;
} fsdp_name_list;
bool fsdp_names_add(fsdp_name_list *names, const char *name, size_t size);
void fsdp_names_release(fsdp_name_list *names);
/* Hands the items over and leaves an empty list. */
void fsdp_names_move(fsdp_name_list *names, char ***items_out, size_t *count_out);
/* "; 2 missing: 'a', 'b'", cut when it gets long; nothing for an empty list. */
void fsdp_names_tell(const fsdp_name_list *names, const char *what, fsdp_text *text);

/* "[3, 4]" */
const char *fsdp_shape_text(int ndim, const int64_t *shape, char *out, size_t room);

#endif
