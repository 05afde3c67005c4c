/* Code in checkpoints: objects of unknown classes, which a program runs when it loads them. */
#ifndef FSDP_VERIFY_CODE_H
#define FSDP_VERIFY_CODE_H

#include "base/text.h"
#include <fsdp/checkpoint.h>

/* Adds the names of the classes and functions that a value runs when it is loaded, with ", " between them.
 * FSDP_ERR_REFUSED: a call that no checkpoint may have. */
fsdp_status fsdp_value_code(const fsdp_value *value, fsdp_text *names, fsdp_error *err);

#endif
