/* XXH3-128, compiled for AVX2. */
#include "kernels/bytes/xxh3.h"

fsdp_hash fsdp_hash_avx2(const void *data, size_t size)
{
    return fsdp_xxh3(data, size);
}

const fsdp_hash_stream fsdp_hash_stream_avx2 = FSDP_XXH3_STREAM;
