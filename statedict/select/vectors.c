/* Tensors of GGUF that are always f32: see vectors.h. */
#include "statedict/select/vectors.h"

#include "base/text.h"

bool fsdp_is_vector(const fsdp_entry *entry)
{
    static const char *const ends[] = {".bias",  "token_types.weight", "_norm.weight", ".ssm_a",
                                       ".ssm_d", ".ssm_conv1d.weight"};
    for (size_t i = 0; i < sizeof ends / sizeof *ends; i++)
        if (fsdp_bytes_end(entry->name, entry->name_size, ends[i]))
            return true;
    return entry->ndim <= 1;
}
