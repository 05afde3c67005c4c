/* XXH3-128 as the compiler's base instructions give it. */
#include "kernels/bytes/xxh3.h"

fsdp_hash fsdp_hash_c(const void *data, size_t size)
{
    return fsdp_xxh3(data, size);
}

const fsdp_hash_stream fsdp_hash_stream_c = FSDP_XXH3_STREAM;
