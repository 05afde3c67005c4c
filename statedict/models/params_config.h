/* config.json of transformers out of Meta's params.json. */
#ifndef FSDP_PARAMS_CONFIG_H
#define FSDP_PARAMS_CONFIG_H

#include "base/text.h"
#include "statedict/models/config.h"
#include <fsdp/sd.h>

/* True when the tensors have the names of Meta's Llama. */
bool fsdp_is_meta_llama(const fsdp_sd *sd);

/*
 * Appends the text of the config.json that transformers asks for a Llama with these numbers; the vocabulary
 * and the width of the MLP are those of the tensors of sd. FSDP_ERR_USAGE: a number is not there, or the
 * rotary frequencies are scaled, whose numbers params.json does not have.
 */
fsdp_status fsdp_params_config_text(const fsdp_config_file *params, const fsdp_sd *sd, fsdp_text *out,
                                    fsdp_error *err);

#endif
