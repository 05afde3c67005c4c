/* The list of formats as an array. Nothing else is here, so that a program that links the static library may
 * have another list. */
#include <fsdp/format.h>

#define FORMAT(x) extern const fsdp_format fsdp_format_##x;
#include "formats/detect/format_list.inc"
#undef FORMAT

#define FORMAT(x) &fsdp_format_##x,
static const fsdp_format *const formats[] = {
#include "formats/detect/format_list.inc"
};

const fsdp_format *fsdp_format_at(size_t i)
{
    return i < sizeof formats / sizeof *formats ? formats[i] : NULL;
}
