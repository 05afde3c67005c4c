/* See net.h: the whole state as a number, and checkpoints, of both faces. */
#include "tests/random/net.h"

#include <inttypes.h>
#include <stdio.h>

/* A sum: the order of entries does not count. */
static uint64_t hash_dict(const random_net *net, const fsdp_sd *sd, size_t *count)
{
    bool prints = net->is_described && fsdp_world_rank(net->toy.world) == 0;
    uint64_t sum = 0;
    for (size_t i = 0; i < fsdp_sd_count(sd); i++) {
        const fsdp_entry *entry = fsdp_sd_at(sd, i);
        uint64_t hash = hash_bytes(0, entry->name, entry->name_size);
        if (entry->kind == FSDP_ENTRY_TENSOR)
            hash = hash_bytes(hash, entry->data, (size_t)fsdp_entry_bytes(entry));
        sum += hash;
        if (prints)
            printf("entry %.*s: %016" PRIx64 "\n", (int)entry->name_size, entry->name, hash);
    }
    *count += fsdp_sd_count(sd);
    return sum;
}

static fsdp_status hash_flat_state(random_net *net, uint64_t *hash_out, size_t *count_out,
                                   fsdp_error *err)
{
    const fsdp_v1_state_opts opts = {.type = FSDP_V1_FULL_STATE_DICT};
    fsdp_sd *model = NULL, *optim = NULL;
    fsdp_status status = fsdp_v1_state_dict(net->toy.v1, &opts, &model, err);
    if (status == FSDP_OK)
        status = fsdp_v1_optim_state_dict(net->toy.v1, net->toy.optim, &opts, &optim, err);
    if (status == FSDP_OK)
        *hash_out = hash_dict(net, model, count_out) + hash_dict(net, optim, count_out);
    fsdp_sd_free(optim);
    fsdp_sd_free(model);
    return status;
}

fsdp_status net_hash_state(random_net *net, uint64_t *hash_out, size_t *count_out, fsdp_error *err)
{
    const fsdp_state_opts opts = {.full_state_dict = true, .nested_optim = net->c->is_nested};
    fsdp_sd *sd = NULL;
    *count_out = 0;
    if (net->toy.v1)
        return hash_flat_state(net, hash_out, count_out, err);
    FSDP_TRY(fsdp_root_state(net->toy.root, net->toy.optim, &opts, &sd, err));
    *hash_out = hash_dict(net, sd, count_out);
    fsdp_sd_free(sd);
    return FSDP_OK;
}

/* --- got and set -------------------------------------------------------------------------------- */

/* A full dict of rank 0 alone goes to all. */
static fsdp_status set_own_state_of_units(random_net *net, random_dice *dice, fsdp_error *err)
{
    fsdp_state_opts opts = {.nested_optim = dice_hits(dice, 50),
                            .full_state_dict = dice_hits(dice, 60)};
    opts.cpu_offload = dice_hits(dice, 30);
    opts.broadcast_from_rank0 = opts.full_state_dict && opts.cpu_offload;
    fsdp_state_opts getting = opts;
    getting.broadcast_from_rank0 = false;
    fsdp_sd *sd = NULL;
    fsdp_status status = fsdp_root_get_state(net->toy.root, &net->toy.optim, 1, &getting, &sd, err);
    if (status == FSDP_OK)
        status = fsdp_root_set_state(net->toy.root, &net->toy.optim, 1, &opts, sd, NULL, err);
    fsdp_sd_free(sd);
    return status;
}

/* What comes of a dict of optimizer state is what this rank would load. */
static fsdp_status make_optim_to_load(random_net *net, bool is_full, bool scatters,
                                      fsdp_sd **sd_out, fsdp_error *err)
{
    const fsdp_v1_state_opts opts = {.type = is_full ? FSDP_V1_FULL_STATE_DICT
                                                     : FSDP_V1_SHARDED_STATE_DICT,
                                     .rank0_only = is_full && scatters};
    fsdp_sd *sd = NULL;
    fsdp_status status = fsdp_v1_optim_state_dict(net->toy.v1, net->toy.optim, &opts, &sd, err);
    const fsdp_sd *own = fsdp_world_rank(net->toy.world) == 0 ? sd : NULL;
    if (status == FSDP_OK && !is_full)
        status = fsdp_v1_flatten_sharded_optim_state_dict(net->toy.v1, net->toy.optim, sd, NULL,
                                                          sd_out, err);
    else if (status == FSDP_OK && scatters)
        status = fsdp_v1_scatter_full_optim_state_dict(net->toy.v1, net->toy.optim, own, NULL,
                                                       sd_out, err);
    else if (status == FSDP_OK)
        status =
            fsdp_v1_shard_full_optim_state_dict(net->toy.v1, net->toy.optim, sd, NULL, sd_out, err);
    fsdp_sd_free(sd);
    return status;
}

static fsdp_status set_own_state_of_flat(random_net *net, random_dice *dice, fsdp_error *err)
{
    const fsdp_v1_state_opts opts = {.type = (fsdp_v1_state_type)dice_below(dice, 2),
                                     .offload_to_cpu = dice_hits(dice, 50),
                                     .prefix = dice_hits(dice, 50) ? "net." : NULL};
    fsdp_sd *model = NULL, *optim = NULL;
    bool is_full = dice_hits(dice, 60), scatters = dice_hits(dice, 50);
    fsdp_status status = fsdp_v1_state_dict(net->toy.v1, &opts, &model, err);
    if (status == FSDP_OK)
        status = fsdp_v1_load_state_dict(net->toy.v1, model, opts.prefix, false, err);
    if (status == FSDP_OK)
        status = make_optim_to_load(net, is_full, scatters, &optim, err);
    if (status == FSDP_OK)
        status = fsdp_v1_optim_load(net->toy.v1, net->toy.optim, optim, NULL, err);
    fsdp_sd_free(optim);
    fsdp_sd_free(model);
    return status;
}

fsdp_status net_set_own_state(random_net *net, random_dice *dice, fsdp_error *err)
{
    return net->toy.v1 ? set_own_state_of_flat(net, dice, err)
                       : set_own_state_of_units(net, dice, err);
}

/* --- checkpoints -------------------------------------------------------------------------------- */

static fsdp_save_opts save_opts_of(random_dice *dice)
{
    fsdp_save_opts opts = fsdp_save_opts_default();
    opts.step = NET_STEP;
    opts.overwrite = true;
    opts.no_sync = true;
    opts.compress = dice_hits(dice, 50);
    opts.kind = dice_hits(dice, 50) ? FSDP_FULL : FSDP_SHARDED;
    return opts;
}

static fsdp_status save_flat(random_net *net, const char *dir, random_dice *dice, fsdp_error *err)
{
    fsdp_v1_save_opts opts = fsdp_v1_save_opts_default();
    bool has_hybrid = false;
    for (int i = 0; i < net->c->unit_count; i++)
        has_hybrid |= net->c->units[i].cut == CUT_AS_MESH;
    opts.save = save_opts_of(dice);
    fsdp_v1_state_type type = (fsdp_v1_state_type)dice_below(dice, has_hybrid ? 2 : 3);
    return fsdp_v1_save_with(net->toy.v1, net->toy.optim, dir, type, &opts, err);
}

fsdp_status net_save(random_net *net, const char *dir, fsdp_error *err)
{
    random_dice dice = dice_for(net->c->seed, DICE_SAVE, 0);
    if (net->toy.v1)
        return save_flat(net, dir, &dice, err);
    fsdp_root_save_opts opts = fsdp_root_save_opts_default();
    opts.save = save_opts_of(&dice);
    opts.state.nested_optim = net->c->is_nested;
    return fsdp_root_save_with(net->toy.root, &net->toy.optim, 1, dir, &opts, err);
}

fsdp_status net_load(random_net *net, const char *dir, fsdp_error *err)
{
    int64_t step = FSDP_STEP_NONE;
    const fsdp_v1_load_opts flat = {.step = &step};
    const fsdp_root_load_opts opts = {.step = &step};
    if (net->toy.v1)
        FSDP_TRY(fsdp_v1_load_with(net->toy.v1, net->toy.optim, dir, &flat, err));
    else
        FSDP_TRY(fsdp_root_load_with(net->toy.root, &net->toy.optim, 1, dir, &opts, err));
    if (step == NET_STEP)
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_INTERNAL, "the checkpoint is said to be of step %lld",
                     (long long)step);
}
