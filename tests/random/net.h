/* A case as the runtime has it: meshes, model, units or flat parameters, optimizer; and its checkpoints. */
#ifndef FSDP_NET_H
#define FSDP_NET_H

#include "tests/random/case.h"
#include "tests/support/nets/toy.h"

enum { NET_STEP = 77 };        /* that checkpoints are said to be of */

typedef enum net_pools { POOLS_OFF, POOLS_ON, POOLS_MIXED } net_pools;

typedef struct random_net {
    const training_case *c;
    bool is_described;                 /* entries of state dicts are printed */
    bool is_to_load;                   /* begins with hyper-parameters that differ from the case's */
    toy toy;                           /* its mesh: all ranks; its other mesh: replicas x shards, or NULL */
    fsdp_param *params[CASE_PARAMS];
    fsdp_unit *units[CASE_UNITS];
} random_net;

/* Everything with its first values, in a zeroed net. toy_free follows in any case. */
fsdp_status net_create(random_net *net, fsdp_world *world, const training_case *c, fsdp_error *err);

/* Sets how units work, which changes no value; before the first step. */
fsdp_status net_tune(random_net *net, fsdp_error *err);
/* Buffers of collectives in memory of the communicator, or not; of some units, between steps. */
fsdp_status net_choose_pools(random_net *net, net_pools pools, random_dice *dice, fsdp_error *err);

/* Collective. One number of all there is in a full state dict: tensors, and values such as the
 * hyper-parameters of the groups; and how many entries. */
fsdp_status net_hash_state(random_net *net, uint64_t *hash_out, size_t *count_out, fsdp_error *err);
/* Gets the state, in some way, and sets it again. */
fsdp_status net_set_own_state(random_net *net, random_dice *dice, fsdp_error *err);
fsdp_status net_save(random_net *net, const char *dir, fsdp_error *err);
fsdp_status net_load(random_net *net, const char *dir, fsdp_error *err);

#endif
