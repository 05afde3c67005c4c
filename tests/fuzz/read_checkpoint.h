/* Reads every tensor of an opened checkpoint, for fuzz targets of derived tensors. */
#ifndef FSDP_READ_CHECKPOINT_H
#define FSDP_READ_CHECKPOINT_H

#include <fsdp/checkpoint.h>

/* Ends the process unless the call returned a checkpoint, or an error with a text and no checkpoint. */
void require_opened(fsdp_status status, const fsdp_checkpoint *checkpoint, const fsdp_error *err);
/* Reads and closes. A tensor that cannot be read must have an error; large ones are not read. */
void read_and_close(fsdp_checkpoint *checkpoint);

#endif
