/* Renames entries by rules "s/REGEX/NEW/" as in sed. */
#ifndef FSDP_RENAME_H
#define FSDP_RENAME_H

#include <fsdp/status.h>
#include "base/text.h"
#include "formats/target.h"
#include <fsdp/sd.h>

typedef struct fsdp_rename fsdp_rename;

/*
 * "s/REGEX/NEW/" or "s/REGEX/NEW/g", with any character instead of the slash. REGEX is a POSIX extended
 * regular expression; in NEW, & is the match and \1 to \9 are its groups. FSDP_ERR_USAGE names the
 * mistake.
 */
fsdp_status fsdp_rename_create(const char *rule, fsdp_rename **rename_out, fsdp_error *err);
void fsdp_rename_free(fsdp_rename *rename);          /* accepts NULL */

/* Replaces *name by the new name. */
fsdp_status fsdp_rename_apply(const fsdp_rename *rename, fsdp_text *name, fsdp_error *err);

/* Puts the new name of an entry into an item, where the target has items. */
static inline fsdp_status fsdp_name_in_item(const fsdp_format *target, const fsdp_entry *entry, bool is_optim,
                                            fsdp_text *name, fsdp_error *err)
{
    const fsdp_path old = {entry->name, entry->name_size, entry->path, entry->path_count};
    const char *item = entry->kind == FSDP_ENTRY_VALUE ? NULL : is_optim ? "optim" : "model";
    return target->caps.in_items ? fsdp_target_put_into_item(&old, item, name, err) : FSDP_OK;
}

#endif
