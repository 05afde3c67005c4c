/* Weight files that lie in the directory of another program's checkpoint and were not read. */
#ifndef FSDP_UNREAD_H
#define FSDP_UNREAD_H

#include "statedict/checkpoint/checkpoint_internal.h"
#include "statedict/sd/names.h"

/* Lists them with their path in the directory, those of its subdirectories too; nothing for a checkpoint that
 * is not a directory. The caller releases the names. */
fsdp_status fsdp_unread_list(const fsdp_checkpoint *checkpoint, fsdp_name_list *names_out, fsdp_error *err);

#endif
