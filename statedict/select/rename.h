/* Renames entries by rules "s/REGEX/NEW/" as in sed. */
#ifndef FSDP_RENAME_H
#define FSDP_RENAME_H

#include <fsdp/status.h>
#include "base/text.h"

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

#endif
