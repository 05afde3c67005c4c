/* config.json as the values of formulas. */
#ifndef FSDP_CONFIG_MEMBERS_H
#define FSDP_CONFIG_MEMBERS_H

#include "statedict/expect/formula.h"

/* Fills in config, which borrows path; release its arena also after a failure. FSDP_ERR_USAGE when the table
 * does not have the model's type. */
fsdp_status fsdp_config_members_read(const char *text, size_t size, const char *path,
                                     fsdp_config *config, fsdp_error *err);

/* True when tie_word_embeddings is true; config.json may be of any model. */
bool fsdp_config_says_tied(const char *text, size_t size, const char *path);

#endif
