/*
 * Adds what Megatron-Core's loader asks for besides tensors: the version and the iteration of the common
 * state, and an object for each module that may keep scales of fp8, which is None where it keeps none. A
 * model whose objects are missing does not load. See map.h.
 */
#include "statedict/map/map.h"

#include <inttypes.h>
#include <string.h>

enum { OBJECTS_MOST = 1 << 20, AXES_MOST = 2 };

/* Modules that have an object, and a tensor of theirs, whose leading dims number them: layers, experts. */
static const struct {
    const char *tensor, *module;
    int axes;
} modules[] = {
    {"decoder.layers.self_attention.linear_qkv.weight", "decoder.layers.self_attention.linear_qkv",
     1},
    {"decoder.layers.self_attention.linear_qkv.weight",
     "decoder.layers.self_attention.core_attention", 1},
    {"decoder.layers.self_attention.q_layernorm.weight",
     "decoder.layers.self_attention.q_layernorm", 1},
    {"decoder.layers.self_attention.k_layernorm.weight",
     "decoder.layers.self_attention.k_layernorm", 1},
    {"decoder.layers.self_attention.linear_proj.weight",
     "decoder.layers.self_attention.linear_proj", 1},
    {"decoder.layers.pre_mlp_layernorm.weight", "decoder.layers.pre_mlp_layernorm", 1},
    {"decoder.layers.mlp.linear_fc1.weight", "decoder.layers.mlp.linear_fc1", 1},
    {"decoder.layers.mlp.linear_fc2.weight", "decoder.layers.mlp.linear_fc2", 1},
    {"decoder.layers.mlp.experts.experts.linear_fc1.weight",
     "decoder.layers.mlp.experts.experts.linear_fc1", 2},
    {"decoder.layers.mlp.experts.experts.linear_fc2.weight",
     "decoder.layers.mlp.experts.experts.linear_fc2", 2},
    {"decoder.final_layernorm.weight", "decoder.final_layernorm", 0},
};

static const char objects_mark[] = "._extra_state/shard_";

static bool has_objects(const fsdp_sd *sd)
{
    for (size_t i = 0; i < fsdp_sd_count(sd); i++) {
        const fsdp_entry *entry = fsdp_sd_at(sd, i);
        if (entry->kind == FSDP_ENTRY_VALUE &&
            memmem(entry->name, entry->name_size, objects_mark, sizeof objects_mark - 1))
            return true;
    }
    return false;
}

/* "MODULE._extra_state/shard_2.0_24.8": that of layer 2 of 24, expert 0 of 8. */
static fsdp_status add_object(fsdp_derivation *derivation, const char *module,
                              const int64_t at[AXES_MOST], const int64_t sizes[AXES_MOST], int axes,
                              fsdp_error *err)
{
    fsdp_value none = {.kind = FSDP_VALUE_NULL};
    const fsdp_value list = {.kind = FSDP_VALUE_LIST, .as.list = {.items = &none, .count = 1}};
    fsdp_text name = {0};
    fsdp_text_addf(&name, "%s%s%" PRId64, module, objects_mark, at[0]);
    if (axes == 2)
        fsdp_text_addf(&name, ".%" PRId64 "_%" PRId64 ".%" PRId64, at[1], sizes[0], sizes[1]);
    else
        fsdp_text_addf(&name, "_%" PRId64, sizes[0]);
    fsdp_status st = name.failed
                         ? fsdp_fail_memory(err, "a name")
                         : fsdp_derivation_add_value(
                               derivation, (fsdp_derived_name){name.data, name.size}, &list, err);
    fsdp_text_release(&name);
    return st;
}

static fsdp_status add_module(fsdp_derivation *derivation, size_t number, const fsdp_sd *sd,
                              fsdp_error *err)
{
    int axes = modules[number].axes;
    int64_t found = fsdp_sd_find(sd, modules[number].tensor, strlen(modules[number].tensor));
    int64_t sizes[AXES_MOST] = {1, 1}, at[AXES_MOST];
    const fsdp_entry *entry = found >= 0 ? fsdp_sd_at(sd, (size_t)found) : NULL;
    if (!entry || entry->kind != FSDP_ENTRY_TENSOR || entry->ndim <= axes)
        return FSDP_OK;
    for (int d = 0; d < axes; d++)
        sizes[d] = entry->shape[d];
    if (sizes[0] > OBJECTS_MOST || sizes[1] > OBJECTS_MOST / (sizes[0] > 0 ? sizes[0] : 1))
        return fsdp_fail(err, FSDP_ERR_LIMIT, "'%s' has more than %d rows of modules",
                         modules[number].tensor, OBJECTS_MOST);
    for (at[0] = 0; at[0] < sizes[0]; at[0]++)
        for (at[1] = 0; at[1] < sizes[1]; at[1]++)
            FSDP_TRY(add_object(derivation, modules[number].module, at, sizes, axes, err));
    return FSDP_OK;
}

/* A value of the common state, unless it is there. */
static fsdp_status add_common(fsdp_derivation *derivation, const char *name, fsdp_value value,
                              const fsdp_sd *sd, fsdp_error *err)
{
    const fsdp_derived_name added = {name, strlen(name)};
    return fsdp_sd_find(sd, name, added.size) >= 0
               ? FSDP_OK
               : fsdp_derivation_add_value(derivation, added, &value, err);
}

static fsdp_status add_all(fsdp_derivation *derivation, const fsdp_sd *sd, fsdp_error *err)
{
    const fsdp_value version = {.kind = FSDP_VALUE_F64, .as.f64 = 3};
    for (size_t i = 0; i < fsdp_sd_count(sd); i++)
        FSDP_TRY(fsdp_derivation_keep(derivation, i, err));
    FSDP_TRY(add_common(derivation, "common.checkpoint_version", version, sd, err));
    FSDP_TRY(add_common(derivation, "common.iteration", fsdp_value_i64(0), sd, err));
    for (size_t i = 0; i < sizeof modules / sizeof *modules && !has_objects(sd); i++)
        FSDP_TRY(add_module(derivation, i, sd, err));
    return FSDP_OK;
}

fsdp_status fsdp_map_add_megatron_objects(fsdp_checkpoint **checkpoint, fsdp_error *err)
{
    fsdp_derivation *derivation = NULL;
    const fsdp_sd *sd = (*checkpoint)->manifest.sd;
    fsdp_checkpoint *base = *checkpoint;
    *checkpoint = NULL;
    FSDP_TRY(fsdp_derivation_begin(base, &derivation, err));
    fsdp_status st = add_all(derivation, sd, err);
    if (st == FSDP_OK)
        return fsdp_derivation_finish(derivation, checkpoint, err);
    fsdp_derivation_cancel(derivation);
    return st;
}
