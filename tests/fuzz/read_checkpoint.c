/* Every tensor of a checkpoint: see read_checkpoint.h. */
#include "tests/fuzz/read_checkpoint.h"

#include <stdlib.h>

enum { BYTES_MOST = 1 << 20 };

static void require(bool truth)
{
    if (!truth)
        abort();
}

void require_opened(fsdp_status status, const fsdp_checkpoint *checkpoint, const fsdp_error *err)
{
    require(status == FSDP_OK ? checkpoint != NULL
                              : !checkpoint && err->status == status && err->text[0]);
}

static void read_tensor(fsdp_checkpoint *checkpoint, size_t number, const fsdp_entry *entry)
{
    const fsdp_box whole = fsdp_box_whole(entry->ndim, entry->shape);
    int64_t bytes = fsdp_box_count(&whole) * (int64_t)fsdp_dtype_size(entry->dtype);
    fsdp_error err = {0};
    char *out = bytes <= BYTES_MOST ? malloc((size_t)bytes + 1) : NULL;
    if (out) {
        fsdp_status st =
            fsdp_checkpoint_read(checkpoint, number, &whole, out, FSDP_CHECK_BLOCKS, &err);
        require(st == FSDP_OK || err.text[0]);
    }
    free(out);
}

void read_and_close(fsdp_checkpoint *checkpoint)
{
    const fsdp_sd *sd = fsdp_checkpoint_sd(checkpoint);
    for (size_t i = 0; i < fsdp_sd_count(sd); i++) {
        const fsdp_entry *entry = fsdp_sd_at(sd, i);
        if (entry->kind == FSDP_ENTRY_TENSOR)
            read_tensor(checkpoint, i, entry);
    }
    fsdp_checkpoint_close(checkpoint);
}
