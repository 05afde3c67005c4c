/* Boxes of the entries of a target: see target.h. */
#include "formats/target.h"

fsdp_box fsdp_target_box_at(const fsdp_target_entry *entry, size_t number)
{
    fsdp_box box = fsdp_box_whole(entry->ndim, entry->boxes[number].len);
    for (int d = 0; d < entry->ndim; d++)
        box.lo[d] = entry->boxes[number].lo[d];
    return box;
}
