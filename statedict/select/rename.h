/* Renaming: "s/REGEX/NEW/" as in sed, applied to names. */
#ifndef FSDP_RENAME_H
#define FSDP_RENAME_H

#include <fsdp/status.h>
#include "base/text.h"

typedef struct fsdp_rename fsdp_rename;

/*
 * "s/REGEX/NEW/" or "s/REGEX/NEW/g", with any character instead of the slash. REGEX is a POSIX extended
 * regular expression; in NEW, & is what matched and \1 to \9 are its groups. FSDP_ERR_USAGE says what
 * is wrong.
 */
fsdp_status fsdp_rename_create(const char *rule, fsdp_rename **rename_out, fsdp_error *err);
void fsdp_rename_free(fsdp_rename *rename);          /* accepts NULL */

/* Replaces *name by its new form in place. */
fsdp_status fsdp_rename_apply(const fsdp_rename *rename, fsdp_text *name, fsdp_error *err);

#endif
