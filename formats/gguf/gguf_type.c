/* The tables of GGUF's types: see gguf.h. */
#include "formats/gguf/gguf.h"

size_t gguf_kind_size(uint32_t kind)
{
    static const size_t sizes[GGUF_KINDS] = {
        [GGUF_U8] = 1,  [GGUF_I8] = 1,     [GGUF_U16] = 2,    [GGUF_I16] = 2, [GGUF_U32] = 4,
        [GGUF_I32] = 4, [GGUF_F32] = 4,    [GGUF_BOOL] = 1,   [GGUF_U64] = 8, [GGUF_I64] = 8,
        [GGUF_F64] = 8, [GGUF_STRING] = 8, [GGUF_ARRAY] = 12,
    };
    return kind < GGUF_KINDS ? sizes[kind] : 0;
}

const gguf_type gguf_types[GGUF_TYPES] = {
    [0] = {"F32", FSDP_F32},    [1] = {"F16", FSDP_F16},    [2] = {"Q4_0", FSDP_Q4_0},
    [3] = {"Q4_1", FSDP_Q4_1},  [6] = {"Q5_0", FSDP_Q5_0},  [7] = {"Q5_1", FSDP_Q5_1},
    [8] = {"Q8_0", FSDP_Q8_0},  [9] = {"Q8_1", 0},          [10] = {"Q2_K", FSDP_Q2_K},
    [11] = {"Q3_K", FSDP_Q3_K}, [12] = {"Q4_K", FSDP_Q4_K}, [13] = {"Q5_K", FSDP_Q5_K},
    [14] = {"Q6_K", FSDP_Q6_K}, [15] = {"Q8_K", 0},         [16] = {"IQ2_XXS", 0},
    [17] = {"IQ2_XS", 0},       [18] = {"IQ3_XXS", 0},      [19] = {"IQ1_S", 0},
    [20] = {"IQ4_NL", 0},       [21] = {"IQ3_S", 0},        [22] = {"IQ2_S", 0},
    [23] = {"IQ4_XS", 0},       [24] = {"I8", FSDP_I8},     [25] = {"I16", FSDP_I16},
    [26] = {"I32", FSDP_I32},   [27] = {"I64", FSDP_I64},   [28] = {"F64", FSDP_F64},
    [29] = {"IQ1_M", 0},        [30] = {"BF16", FSDP_BF16}, [34] = {"TQ1_0", 0},
    [35] = {"TQ2_0", 0},        [39] = {"MXFP4", 0},        [40] = {"NVFP4", 0},
};
