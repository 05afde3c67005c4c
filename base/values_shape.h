/* Shapes as people count them. Formats and tools print them; all else counts elements (dtype.h). */
#ifndef FSDP_VALUES_SHAPE_H
#define FSDP_VALUES_SHAPE_H

#include <fsdp/dtype.h>

/* A shape, or an offset, with the last dim of a block type in values, 32 or 256 per element; other types keep
 * theirs. Lengths that exceed 64 bits become the largest number. */
void fsdp_dtype_to_values(fsdp_dtype dtype, int ndim, const int64_t *elements, int64_t *values_out);

#endif
