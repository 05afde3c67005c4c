/* See net.h: the whole state as a number, and checkpoints, of both faces. */
#include "tests/random/net.h"

#include <inttypes.h>
#include <stdio.h>

static uint64_t hash_value(uint64_t hash, const fsdp_value *value)
{
    hash = hash_bytes(hash, &value->kind, sizeof value->kind);
    switch (value->kind) {
    case FSDP_VALUE_BOOL: return hash_bytes(hash, &value->as.boolean, sizeof value->as.boolean);
    case FSDP_VALUE_I64:
    case FSDP_VALUE_U64:
    case FSDP_VALUE_F64: return hash_bytes(hash, &value->as.u64, sizeof value->as.u64);
    case FSDP_VALUE_STRING:
    case FSDP_VALUE_BYTES: return hash_bytes(hash, value->as.bytes.data, value->as.bytes.size);
    case FSDP_VALUE_LIST:
    case FSDP_VALUE_DICT:
        for (size_t i = 0; i < value->as.list.count; i++)
            hash = hash_value(hash, &value->as.list.items[i]);
        return hash;
    default: return hash; /* optimizers have none of the others */
    }
}

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
        else if (entry->kind == FSDP_ENTRY_VALUE)
            hash = hash_value(hash, &entry->value);
        sum += hash;
        if (prints)
            printf("entry %.*s: %016" PRIx64 "\n", (int)entry->name_size, entry->name, hash);
    }
    *count += fsdp_sd_count(sd);
    return sum;
}

fsdp_status net_hash_state(random_net *net, uint64_t *hash_out, size_t *count_out, fsdp_error *err)
{
    const fsdp_state_opts opts = {.full_state_dict = true, .nested_optim = net->c->is_nested};
    fsdp_sd *sd = NULL;
    *count_out = 0;
    FSDP_TRY(fsdp_root_get_state(net->toy.root, &opts, &sd, err));
    *hash_out = hash_dict(net, sd, count_out);
    fsdp_sd_free(sd);
    return FSDP_OK;
}

/* --- got and set -------------------------------------------------------------------------------- */

/* A full dict of rank 0 alone goes to all. */
fsdp_status net_set_own_state(random_net *net, random_dice *dice, fsdp_error *err)
{
    fsdp_state_opts opts = {.nested_optim = dice_hits(dice, 50),
                            .full_state_dict = dice_hits(dice, 60)};
    opts.cpu_offload = dice_hits(dice, 30);
    opts.broadcast_from_rank0 = opts.full_state_dict && opts.cpu_offload;
    fsdp_state_opts getting = opts;
    getting.broadcast_from_rank0 = false;
    fsdp_sd *sd = NULL;
    fsdp_status status = fsdp_root_get_state(net->toy.root, &getting, &sd, err);
    if (status == FSDP_OK)
        status = fsdp_root_set_state(net->toy.root, sd, &opts, NULL, err);
    fsdp_sd_free(sd);
    return status;
}

/* --- checkpoints -------------------------------------------------------------------------------- */

static fsdp_save_opts save_opts_of(random_dice *dice)
{
    static const int64_t step = NET_STEP;
    fsdp_save_opts opts = {.step = &step};
    opts.overwrite = true;
    opts.skip_fsync = true;
    opts.compress = dice_hits(dice, 50);
    opts.kind = dice_hits(dice, 50) ? FSDP_FULL : FSDP_SHARDED;
    return opts;
}

/* Flat buffers may be stored as they are, unless a strategy is hybrid. */
static fsdp_kind flat_kind(const random_net *net, random_dice *dice)
{
    bool has_hybrid = false;
    for (int i = 0; i < net->c->unit_count; i++)
        has_hybrid |= net->c->units[i].cut == CUT_AS_MESH;
    return (fsdp_kind)dice_below(dice, has_hybrid ? 2 : 3);
}

fsdp_status net_save(random_net *net, const char *dir, fsdp_error *err)
{
    random_dice dice = dice_for(net->c->seed, DICE_SAVE, 0);
    fsdp_root_save_opts opts = {.save = save_opts_of(&dice)};
    opts.state.nested_optim = net->c->is_nested;
    if (net->toy.wrap)
        opts.save.kind = flat_kind(net, &dice);
    return fsdp_root_save(net->toy.root, dir, &opts, err);
}

fsdp_status net_load(random_net *net, const char *dir, fsdp_error *err)
{
    int64_t step = FSDP_NO_STEP;
    const fsdp_root_load_opts opts = {.step = &step};
    FSDP_TRY(fsdp_root_load(net->toy.root, dir, &opts, err));
    if (step == NET_STEP)
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_INTERNAL, "the checkpoint is said to be of step %lld",
                     (long long)step);
}
