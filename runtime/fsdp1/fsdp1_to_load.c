/*
 * The FSDP1 face: what the optimizer of one rank loads. From a dict with names and shapes of declared
 * parameters, whole or in runs, to this rank's elements by position, and from there into the optimizer.
 *
 * The way is by flat tensors: for each flat parameter and each tensor of its state, this rank's chunk is
 * taken from the dict (or sent by rank 0, which alone has it), then dealt to the parameters that lie in it.
 */
#include "runtime/fsdp1/fsdp1_to_load.h"

#include <string.h>

#include "base/core/mem.h"

/* --- the result ------------------------------------------------------------------------------- */

static fsdp_status declare_target(fsdp_v1_loading *load, size_t number, fsdp_error *err)
{
    const fsdp_v1_target *target = &load->targets[number];
    const fsdp_optim_state *state = fsdp_v1_state_of(load->optim, target->flat->param);
    const fsdp_layout layout = {.kind = FSDP_LAYOUT_MESH, .mesh = load->alone};
    fsdp_v1_slot slots[FSDP_V1_SLOTS];
    size_t n = fsdp_v1_slots(load->optim, state, slots);
    FSDP_TRY(fsdp_v1_spell_key(load, number, "step", err));
    FSDP_TRY(fsdp_sd_add_tensor(load->out, load->name.data, load->name.size, FSDP_F32, 0, NULL,
                                &layout, NULL, err));
    if (target->param && target->count == 0 && !load->opts.is_named)
        return FSDP_OK;
    for (size_t s = 0; s < n; s++) {
        FSDP_TRY(fsdp_v1_spell_key(load, number, slots[s].name, err));
        FSDP_TRY(fsdp_sd_add_tensor(load->out, load->name.data, load->name.size, slots[s].dtype, 1,
                                    &target->count, &layout, NULL, err));
    }
    return FSDP_OK;
}

static fsdp_status list_keys(const fsdp_v1_loading *load, size_t group, fsdp_value *keys,
                             fsdp_error *err)
{
    size_t count = 0, at = 0;
    for (size_t i = 0; i < load->count; i++)
        count += load->targets[i].group == group;
    FSDP_TRY(fsdp_value_set_items(keys, FSDP_VALUE_LIST, count, err));
    for (size_t i = 0; i < load->count; i++) {
        const char *name = load->targets[i].name;
        if (load->targets[i].group != group)
            continue;
        if (!load->opts.is_named)
            keys->as.list.items[at++] = fsdp_value_i64((int64_t)i);
        else
            FSDP_TRY(fsdp_state_put_text(name, &keys->as.list.items[at++], err));
    }
    return FSDP_OK;
}

static fsdp_status fill_groups(const fsdp_v1_loading *load, fsdp_value *groups, fsdp_error *err)
{
    size_t n = load->optim->group_count;
    FSDP_TRY(fsdp_value_set_items(groups, FSDP_VALUE_LIST, n, err));
    for (size_t g = 0; g < n; g++) {
        fsdp_value keys = {0};
        fsdp_status status = list_keys(load, g, &keys, err);
        if (status == FSDP_OK)
            status = fsdp_v1_hypers_to_value(load->optim, &load->hypers[g], &keys,
                                             &groups->as.list.items[g], err);
        fsdp_value_release(&keys);
        FSDP_TRY(status);
    }
    return FSDP_OK;
}

static fsdp_status add_groups(const fsdp_v1_loading *load, fsdp_error *err)
{
    fsdp_value groups = {0};
    fsdp_status status = fill_groups(load, &groups, err);
    if (status == FSDP_OK)
        status = fsdp_sd_add_value(load->out, "param_groups", strlen("param_groups"), &groups, err);
    fsdp_value_release(&groups);
    return status;
}

static fsdp_status declare(fsdp_v1_loading *load, fsdp_error *err)
{
    const int64_t one = 1;
    int rank = load->v1->root->world->rank;
    FSDP_TRY(fsdp_mesh_create(1, &one, (const char *[]){"rank"}, &rank, &load->alone, err));
    FSDP_TRY(fsdp_sd_create(&load->out, err));
    for (size_t i = 0; i < load->count; i++)
        FSDP_TRY(declare_target(load, i, err));
    return fsdp_sd_allocate(load->out, rank, err);
}

/* --- from the source to this rank's chunk ----------------------------------------------------- */

static fsdp_status take_chunk(fsdp_v1_loading *load, const fsdp_v1_flat *flat,
                              const fsdp_v1_slot *slot, unsigned char *chunk, fsdp_error *err)
{
    size_t size = fsdp_dtype_size(slot->dtype);
    for (size_t v = 0; v < flat->view_count; v++) {
        const fsdp_param *param = flat->views[v];
        const fsdp_flat_run run = fsdp_param_flat_run(param);
        const fsdp_entry *entry =
            fsdp_v1_is_stepped(load, param) ? fsdp_v1_find_source(load, param, slot->name) : NULL;
        if (entry)
            FSDP_TRY(
                fsdp_v1_take_run(param, entry, slot->dtype, chunk + (size_t)run.at * size, err));
    }
    return FSDP_OK;
}

/* --- from the chunk to the result ------------------------------------------------------------- */

static fsdp_status deal(fsdp_v1_loading *load, const fsdp_v1_flat *flat, const fsdp_v1_slot *slot,
                        const unsigned char *chunk, fsdp_error *err)
{
    size_t size = fsdp_dtype_size(slot->dtype);
    for (size_t i = 0; i < load->count; i++) {
        const fsdp_v1_target *target = &load->targets[i];
        if (target->flat != flat || target->count == 0)
            continue;
        FSDP_TRY(fsdp_v1_spell_key(load, i, slot->name, err));
        memcpy(fsdp_v1_find(load->out, &load->name)->data, chunk + (size_t)target->at * size,
               (size_t)target->count * size);
    }
    return FSDP_OK;
}

/* PyTorch has no masters. A zero in their place would become the weight. */
static bool keeps_live(const fsdp_v1_loading *load, const fsdp_v1_flat *flat,
                       const fsdp_v1_slot *slot)
{
    const fsdp_optim_state *state = fsdp_v1_state_of(load->optim, flat->param);
    return state->master && state->master == slot->own &&
           fsdp_v1_source_of(load, flat)->lacks_master;
}

static fsdp_status fill_chunk(fsdp_v1_loading *load, const fsdp_v1_flat *flat,
                              const fsdp_v1_slot *slot, unsigned char *chunk, fsdp_error *err)
{
    if (load->scatters)
        return fsdp_v1_scatter_chunk(load, flat, slot, chunk, err);
    return take_chunk(load, flat, slot, chunk, err);
}

static fsdp_status fill_slot(fsdp_v1_loading *load, const fsdp_v1_flat *flat,
                             const fsdp_v1_slot *slot, fsdp_error *err)
{
    if (keeps_live(load, flat, slot))
        return deal(load, flat, slot, slot->own, err);
    unsigned char *chunk = fsdp_alloc((size_t)flat->param->padded, fsdp_dtype_size(slot->dtype));
    if (!chunk)
        return fsdp_fail_memory(err, flat->param->name);
    fsdp_status status = fill_chunk(load, flat, slot, chunk, err);
    if (status == FSDP_OK)
        status = deal(load, flat, slot, chunk, err);
    fsdp_free(chunk);
    return status;
}

static fsdp_status fill_steps(fsdp_v1_loading *load, fsdp_error *err)
{
    for (size_t i = 0; i < load->count; i++) {
        float step = (float)fsdp_v1_source_of(load, load->targets[i].flat)->step;
        FSDP_TRY(fsdp_v1_spell_key(load, i, "step", err));
        memcpy(fsdp_v1_find(load->out, &load->name)->data, &step, sizeof step);
    }
    return FSDP_OK;
}

fsdp_status fsdp_v1_loading_fill(fsdp_v1_loading *load, fsdp_error *err)
{
    for (size_t i = 0; i < load->v1->flat_count; i++) {
        const fsdp_v1_flat *flat = &load->v1->flats[i];
        fsdp_v1_slot slots[FSDP_V1_SLOTS];
        if (!fsdp_v1_has_state(load, flat))
            continue;
        size_t n = fsdp_v1_slots(load->optim, fsdp_v1_state_of(load->optim, flat->param), slots);
        for (size_t s = 0; s < n; s++)
            FSDP_TRY(fill_slot(load, flat, &slots[s], err));
    }
    FSDP_TRY(fill_steps(load, err));
    return add_groups(load, err);
}

/* --- the calls -------------------------------------------------------------------------------- */

fsdp_status fsdp_v1_loading_prepare(fsdp_v1_loading *load, fsdp_error *err)
{
    size_t groups = load->optim->group_count;
    load->sources = fsdp_alloc(load->v1->flat_count, sizeof *load->sources);
    load->hypers = fsdp_alloc(groups, sizeof *load->hypers);
    if (!load->sources || !load->hypers)
        return fsdp_fail_memory(err, "a state dict");
    for (size_t g = 0; g < groups; g++)
        load->hypers[g] = fsdp_v1_hypers_get(load->optim, g);
    FSDP_TRY(fsdp_v1_list_targets(load, err));
    FSDP_TRY(declare(load, err));
    return load->sd ? fsdp_v1_read_source(load, err) : FSDP_OK;
}

void fsdp_v1_loading_release(fsdp_v1_loading *load)
{
    fsdp_free(load->targets);
    fsdp_free(load->sources);
    fsdp_free(load->hypers);
    fsdp_mesh_free(load->alone);
    fsdp_text_release(&load->name);
}

fsdp_status fsdp_v1_loading_finish(fsdp_v1_loading *load, fsdp_status status, fsdp_sd **sd_out)
{
    fsdp_v1_loading_release(load);
    if (status == FSDP_OK)
        *sd_out = load->out;
    else
        fsdp_sd_free(load->out);
    return status;
}

fsdp_v1_loading fsdp_v1_loading_begin(fsdp_v1 *v1, fsdp_optim *optim, const fsdp_sd *sd,
                                      const fsdp_v1_to_load_opts *opts)
{
    fsdp_v1_loading load = {.v1 = v1, .optim = optim, .sd = sd};
    if (opts)
        load.opts = *opts;
    return load;
}

/* A run is taken where a whole tensor is: the same way for both. */
static fsdp_status take_own(fsdp_v1 *v1, fsdp_optim *optim, const char *call, const fsdp_sd *sd,
                            const fsdp_v1_to_load_opts *opts, fsdp_sd **sd_out, fsdp_error *err)
{
    FSDP_TRY(fsdp_v1_check_idle(v1, call, err));
    FSDP_TRY(fsdp_v1_check_given(sd, call, err));
    fsdp_v1_loading load = fsdp_v1_loading_begin(v1, optim, sd, opts);
    fsdp_status status = fsdp_v1_loading_prepare(&load, err);
    if (status == FSDP_OK)
        status = fsdp_v1_loading_fill(&load, err);
    return fsdp_v1_loading_finish(&load, status, sd_out);
}

fsdp_status fsdp_v1_shard_full_optim_state_dict(fsdp_v1 *v1, fsdp_optim *optim, const fsdp_sd *sd,
                                                const fsdp_v1_to_load_opts *opts, fsdp_sd **sd_out,
                                                fsdp_error *err)
{
    return take_own(v1, optim, "fsdp_v1_shard_full_optim_state_dict", sd, opts, sd_out, err);
}

fsdp_status fsdp_v1_flatten_sharded_optim_state_dict(fsdp_v1 *v1, fsdp_optim *optim,
                                                     const fsdp_sd *sd,
                                                     const fsdp_v1_to_load_opts *opts,
                                                     fsdp_sd **sd_out, fsdp_error *err)
{
    return take_own(v1, optim, "fsdp_v1_flatten_sharded_optim_state_dict", sd, opts, sd_out, err);
}
