/* Numbers of a model without a config.json, for map_choice.c; see map.h. */
#ifndef FSDP_MAP_CONFIG_H
#define FSDP_MAP_CONFIG_H

#include "statedict/map/map.h"

/* Reads Meta's params.json next to the checkpoint, or where the user names a map the config.json that it
 * gives. */
void map_find_params(const fsdp_map_request *request, const fsdp_checkpoint *checkpoint,
                     fsdp_config_file *config_out);

#endif
