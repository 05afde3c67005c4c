/* block_values TYPE encode|decode: blocks from standard input as f32 on standard output, or f32 as blocks. */
#include "kernels/quants.h"

#include <stdio.h>
#include <string.h>

int main(int argc, char **argv)
{
    static char block[FSDP_QUANT_BYTES];
    static float values[FSDP_QUANT_VALUES];
    const fsdp_dtype dtype =
        argc == 3 ? fsdp_dtype_from_name(argv[1], strlen(argv[1])) : FSDP_DTYPE_NONE;
    const fsdp_dtype_info *info = fsdp_dtype_describe(dtype);
    if (!info || info->values == 1)
        return 2;
    size_t bytes = info->values * sizeof *values;
    if (strcmp(argv[2], "encode") == 0) {
        while (fread(values, bytes, 1, stdin) == 1) {
            fsdp_blocks_from_f32(dtype, values, 1, block);
            fwrite(block, info->size, 1, stdout);
        }
        return 0;
    }
    while (fread(block, info->size, 1, stdin) == 1) {
        fsdp_blocks_to_f32(dtype, block, 1, values);
        fwrite(values, bytes, 1, stdout);
    }
    return 0;
}
