/* All key-value pairs of a model: see gguf_values.h. */
#include "statedict/expect/gguf_values.h"

fsdp_status fsdp_gguf_values(fsdp_io *io, const fsdp_gguf_model *model, fsdp_named_values *out,
                             fsdp_gguf_found *found_out, fsdp_error *err)
{
    fsdp_gguf_tokens tokens = {.pre = "default"};
    *found_out = FSDP_GGUF_NO_TOKENIZER;
    FSDP_TRY(fsdp_gguf_config(model, out, &tokens, err));
    return fsdp_gguf_tokenizer(io, model->directory, &tokens, out, found_out, err);
}
