/*
 * Stage 0: the model file has the whole model, and under `optimizer` the whole optimizer in one of these
 * forms:
 *
 *   {state, param_groups}   f32 training: the weights of the model are the masters
 *   fp32_groups             a list of masters per group, states in optimizer_state_dict
 *   fp32_groups_flat        a flat master per group, and flat moments in optimizer_state_dict
 *
 * None of them names the parameters. They are recognised: a group keeps the order of the model, shapes agree,
 * and a master rounds to the model's weight. See deepspeed.h.
 */
#include "formats/deepspeed/deepspeed.h"

#include "base/data/box_internal.h"
#include "kernels/kernels.h"

#include <stdio.h>
#include <string.h>

typedef enum plain_form { FORM_TORCH, FORM_EACH, FORM_FLAT } plain_form;

/* A weight of the model, and where the optimizer has it. */
typedef struct plain_weight {
    ds_param param;
    torch_tensor tensor;
    size_t group, slot; /* of the group; NONE: the optimizer does not have it */
} plain_weight;
#define NONE ((size_t)-1)

/* A parameter of the optimizer. */
typedef struct plain_slot {
    fsdp_node state;
    size_t number;      /* of the state */
    torch_tensor shape; /* its master, or its first moment; ndim -1: it has none */
} plain_slot;

typedef struct plain_group {
    plain_slot *slots; /* FORM_FLAT: one */
    size_t count, taken;
    int64_t used; /* FORM_FLAT: elements */
} plain_group;

typedef struct plain {
    ds_set *set;
    torch_archive *archive;
    plain_form form;
    fsdp_node optim, base;
    plain_weight *weights;
    size_t weight_count;
    plain_group *groups;
    size_t group_count;
    fsdp_node *states; /* in the order of slots */
    size_t state_count;
} plain;

/* --- the model -------------------------------------------------------------------------------------- */

/* Notes a tensor that another name has already. */
static fsdp_status find_tie(plain *at, fsdp_name_table *places, const plain_weight *weight,
                            bool *is_tied_out, fsdp_error *err)
{
    const torch_tensor *tensor = &weight->tensor;
    const ds_tensor_place *place;
    FSDP_TRY(ds_tensor_place_of(at->set, tensor, &place, err));
    const uint64_t *number =
        fsdp_name_table_enter(places, (const char *)place, sizeof *place, at->weight_count);
    if (!number)
        return fsdp_fail_memory(err, "the weights of a model");
    *is_tied_out = *number != at->weight_count && weight->param.count > 0;
    if (!*is_tied_out)
        return FSDP_OK;
    const ds_param *first = &at->weights[*number].param;
    return ds_note_tied(at->set,
                        &(ds_tied){.name = weight->param.name,
                                   .name_size = weight->param.name_size,
                                   .stored = first->name,
                                   .stored_size = first->name_size},
                        err);
}

static fsdp_status read_weight(plain *at, fsdp_name_table *places, fsdp_node name, fsdp_node node,
                               fsdp_error *err)
{
    plain_weight *weight = &at->weights[at->weight_count];
    size_t size;
    const char *text = ds_text(at->archive, name, &size);
    bool is_tied = false;
    if (!text || torch_tensor_kind(at->archive, node) != TORCH_KIND_TENSOR ||
        fsdp_name_table_find(&at->set->buffers, text, size))
        return FSDP_OK;
    *weight = (plain_weight){.slot = NONE};
    FSDP_TRY(ds_read_tensor(at->archive, node, "a weight", &weight->tensor, err));
    fsdp_box whole = fsdp_box_whole(weight->tensor.ndim, weight->tensor.shape);
    weight->param = (ds_param){.name = fsdp_arena_strndup(&at->set->arena, text, size),
                               .name_size = size,
                               .ndim = weight->tensor.ndim,
                               .shape = weight->tensor.shape,
                               .count = fsdp_box_count(&whole)};
    if (!weight->param.name)
        return fsdp_fail_memory(err, "the weights of a model");
    FSDP_TRY(find_tie(at, places, weight, &is_tied, err));
    at->weight_count += !is_tied;
    return FSDP_OK;
}

static fsdp_status read_weights(plain *at, fsdp_error *err)
{
    fsdp_name_table places = {0};
    fsdp_status st = FSDP_OK;
    ds_members members =
        ds_members_of(at->archive, ds_member(at->archive, at->archive->pickle.root, "module"));
    at->weights = fsdp_alloc(members.count / 2, sizeof *at->weights);
    if (!at->weights)
        return fsdp_fail_memory(err, "the weights of a model");
    for (size_t i = 0; i < members.count && st == FSDP_OK; i += 2)
        st = read_weight(at, &places, members.items[i], members.items[i + 1], err);
    fsdp_name_table_release(&places);
    return st;
}

/* --- the optimizer ----------------------------------------------------------------------------------- */

/* The first tensor of a state that has dims: a moment has the shape of its parameter. */
static fsdp_status read_shape(const plain *at, plain_slot *slot, fsdp_error *err)
{
    ds_members members = ds_members_of(at->archive, slot->state);
    slot->shape.ndim = -1;
    for (size_t i = 0; i < members.count; i += 2) {
        bool is_step = fsdp_pickle_is_text(&at->archive->pickle, members.items[i], "step");
        if (is_step || torch_tensor_kind(at->archive, members.items[i + 1]) != TORCH_KIND_TENSOR)
            continue;
        return ds_read_tensor(at->archive, members.items[i + 1], "a moment", &slot->shape, err);
    }
    return FSDP_OK;
}

static fsdp_status read_slot(const plain *at, fsdp_node master, plain_slot *slot, fsdp_error *err)
{
    return master != 0 ? ds_read_tensor(at->archive, master, "a master", &slot->shape, err)
                       : read_shape(at, slot, err);
}

/* States are numbered through all groups: their numbers are in `params` of param_groups. */
static fsdp_status find_states(plain *at, size_t slots, fsdp_error *err)
{
    ds_members dict = ds_members_of(at->archive, ds_member(at->archive, at->base, "state"));
    at->state_count = slots;
    at->states = fsdp_alloc(slots, sizeof *at->states);
    if (!at->states)
        return fsdp_fail_memory(err, "the states of an optimizer");
    for (size_t i = 0; i < dict.count; i += 2) {
        int64_t number;
        if (!fsdp_pickle_int(&at->archive->pickle, dict.items[i], &number) || number < 0 ||
            (uint64_t)number >= slots)
            return ds_bad(at->archive, "its optimizer has a state that belongs to no parameter",
                          err);
        at->states[number] = dict.items[i + 1];
    }
    return FSDP_OK;
}

/* The parameters of a group: masters, or numbers. */
static ds_members params_of(const plain *at, fsdp_node group)
{
    return ds_items_of(at->archive,
                       at->form == FORM_EACH ? group : ds_member(at->archive, group, "params"));
}

static fsdp_status read_group(plain *at, fsdp_node node, plain_group *group, size_t *slots,
                              fsdp_error *err)
{
    ds_members params = params_of(at, node);
    group->count = at->form == FORM_FLAT ? 1 : params.count;
    group->slots = fsdp_arena_alloc(&at->set->arena, group->count, sizeof *group->slots);
    if (!group->slots)
        return fsdp_fail_memory(err, "the groups of an optimizer");
    for (size_t i = 0; i < group->count; i++) {
        plain_slot *slot = &group->slots[i];
        fsdp_node master = at->form == FORM_FLAT   ? node
                           : at->form == FORM_EACH ? params.items[i]
                                                   : 0;
        slot->number = *slots;
        slot->state = at->states[(*slots)++];
        FSDP_TRY(read_slot(at, master, slot, err));
    }
    if (at->form == FORM_FLAT && group->slots->shape.ndim != 1)
        return ds_bad(at->archive, "its master weights are not flat", err);
    return FSDP_OK;
}

static fsdp_status read_groups(plain *at, fsdp_error *err)
{
    static const char *const keys[] = {[FORM_TORCH] = "param_groups",
                                       [FORM_EACH] = "fp32_groups",
                                       [FORM_FLAT] = "fp32_groups_flat"};
    const torch_archive *archive = at->archive;
    at->form = ds_member(archive, at->optim, keys[FORM_FLAT]) != 0   ? FORM_FLAT
               : ds_member(archive, at->optim, keys[FORM_EACH]) != 0 ? FORM_EACH
                                                                     : FORM_TORCH;
    at->base = at->form == FORM_TORCH ? at->optim : ds_base_state(archive, at->optim);
    ds_members groups = ds_items_of(archive, ds_member(archive, at->optim, keys[at->form]));
    size_t slots = 0, read = 0;
    for (size_t g = 0; g < groups.count; g++)
        slots += at->form == FORM_FLAT ? 1 : params_of(at, groups.items[g]).count;
    FSDP_TRY(find_states(at, slots, err));
    at->group_count = groups.count;
    at->groups = fsdp_alloc(groups.count, sizeof *at->groups);
    if (!at->groups)
        return fsdp_fail_memory(err, "the groups of an optimizer");
    for (size_t g = 0; g < groups.count; g++)
        FSDP_TRY(read_group(at, groups.items[g], &at->groups[g], &read, err));
    return FSDP_OK;
}

/* --- recognising parameters --------------------------------------------------------------------------- */

static bool same_shape(const torch_tensor *a, const torch_tensor *b)
{
    return a->ndim == b->ndim &&
           (a->ndim <= 0 || memcmp(a->shape, b->shape, (size_t)a->ndim * sizeof *a->shape) == 0);
}

/* Compares the first elements of a weight with its master, which the engine rounded. */
static fsdp_status rounds_to(const plain *at, const torch_tensor *master, int64_t first,
                             const plain_weight *weight, bool *does_out, fsdp_error *err)
{
    const ds_run run = {0, first, weight->param.count};
    return ds_rounds_to(at->set, master, &run, &weight->tensor, does_out, err);
}

/* True when the next parameter of the group may be the weight. */
static fsdp_status fits(const plain *at, const plain_group *group, const plain_weight *weight,
                        bool *fits_out, fsdp_error *err)
{
    const plain_slot *slot = &group->slots[at->form == FORM_FLAT ? 0 : group->taken];
    *fits_out = false;
    if (at->form == FORM_FLAT)
        return weight->param.count > slot->shape.shape[0] - group->used
                   ? FSDP_OK
                   : rounds_to(at, &slot->shape, group->used, weight, fits_out, err);
    if (group->taken == group->count || !same_shape(&slot->shape, &weight->tensor))
        return FSDP_OK;
    *fits_out = true;
    return at->form == FORM_EACH ? rounds_to(at, &slot->shape, 0, weight, fits_out, err) : FSDP_OK;
}

/* Gives each weight its place in the optimizer. *is_sure_out false: there are several ways. */
static fsdp_status match(plain *at, bool *is_sure_out, fsdp_error *err)
{
    *is_sure_out = true;
    for (size_t i = 0; i < at->weight_count; i++) {
        plain_weight *weight = &at->weights[i];
        for (size_t g = 0; g < at->group_count; g++) {
            bool is_next;
            FSDP_TRY(fits(at, &at->groups[g], weight, &is_next, err));
            if (is_next && weight->slot != NONE)
                *is_sure_out &= at->form != FORM_TORCH;
            if (!is_next || weight->slot != NONE)
                continue;
            weight->group = g;
            weight->slot = at->groups[g].taken++;
            at->groups[g].used += weight->param.count;
        }
    }
    for (size_t g = 0; g < at->group_count; g++)
        *is_sure_out &= at->form == FORM_FLAT
                            ? at->groups[g].used == at->groups[g].slots->shape.shape[0]
                            : at->groups[g].taken == at->groups[g].count;
    return FSDP_OK;
}

/* A frozen weight of the shape of a trained one could be the trained one. */
static fsdp_status check_frozen(const plain *at, bool *is_sure, fsdp_error *err)
{
    fsdp_name_table trained = {0};
    for (size_t i = 0; i < at->weight_count; i++) {
        const torch_tensor *tensor = &at->weights[i].tensor;
        if (at->weights[i].slot != NONE &&
            !fsdp_name_table_enter(&trained, (const char *)tensor->shape,
                                   (size_t)tensor->ndim * sizeof *tensor->shape, i)) {
            fsdp_name_table_release(&trained);
            return fsdp_fail_memory(err, "the weights of a model");
        }
    }
    for (size_t i = 0; i < at->weight_count; i++) {
        const torch_tensor *tensor = &at->weights[i].tensor;
        if (at->weights[i].slot == NONE &&
            fsdp_name_table_find(&trained, (const char *)tensor->shape,
                                 (size_t)tensor->ndim * sizeof *tensor->shape))
            *is_sure = false;
    }
    fsdp_name_table_release(&trained);
    return FSDP_OK;
}

/* --- entries ------------------------------------------------------------------------------------------ */

/* The flat tensors of each group hold its weights in the order of the model. */
static fsdp_status add_flat(plain *at, fsdp_error *err)
{
    ds_set *set = at->set;
    set->world = 1;
    set->group_count = at->group_count;
    set->groups = fsdp_arena_alloc(&set->arena, at->group_count, sizeof *set->groups);
    ds_param *params = fsdp_arena_alloc(&set->arena, at->weight_count, sizeof *params);
    if (!set->groups || !params)
        return fsdp_fail_memory(err, "the groups of an optimizer");
    for (size_t g = 0; g < at->group_count; g++) {
        size_t count = 0;
        for (size_t i = 0; i < at->weight_count; i++)
            if (at->weights[i].slot != NONE && at->weights[i].group == g)
                params[count++] = at->weights[i].param;
        FSDP_TRY(ds_group_begin(set, &set->groups[g], params, count, err));
        FSDP_TRY(ds_split(set, set->groups[g].lanes, DS_MASTER, &at->groups[g].slots->shape, err));
        FSDP_TRY(ds_read_moments(set, at->archive, at->groups[g].slots->state, set->groups[g].lanes,
                                 &at->groups[g].slots->shape, err));
        params += count;
    }
    FSDP_TRY(ds_split_end(set, err));
    return ds_note_owners(set, err);
}

/* Adds the moments of a parameter, which have its shape. */
static fsdp_status add_moments(plain *at, ds_param *param, fsdp_node state, fsdp_error *err)
{
    static const int64_t origin[FSDP_MAX_DIMS];
    ds_members members = ds_members_of(at->archive, state);
    for (size_t i = 0; i < members.count; i += 2) {
        torch_tensor tensor;
        fsdp_source_chunk chunk;
        size_t size, number;
        int kind;
        const char *name = ds_text(at->archive, members.items[i], &size);
        if (!name || fsdp_pickle_is_text(&at->archive->pickle, members.items[i], "step") ||
            torch_tensor_kind(at->archive, members.items[i + 1]) != TORCH_KIND_TENSOR)
            continue;
        FSDP_TRY(ds_read_tensor(at->archive, members.items[i + 1], "a moment", &tensor, err));
        FSDP_TRY(ds_kind(at->set, name, size, &kind, err));
        param->ndim = tensor.ndim;
        param->shape = tensor.shape;
        FSDP_TRY(ds_param_tensor(at->set, param, kind, tensor.dtype, &number, err));
        torch_tensor_chunk(&tensor, origin, &chunk);
        FSDP_TRY(fsdp_source_add_chunk(at->set->source, number, &chunk, err));
    }
    return FSDP_OK;
}

/* Moments of which it is not certain whose they are keep the number of their parameter. */
static fsdp_status add_numbered(plain *at, fsdp_error *err)
{
    for (size_t i = 0; i < at->state_count; i++) {
        char number[24];
        snprintf(number, sizeof number, "%zu", i);
        ds_param param = {.name = number, .name_size = strlen(number)};
        FSDP_TRY(add_moments(at, &param, at->states[i], err));
    }
    return FSDP_OK;
}

static fsdp_status add_weights(plain *at, bool is_sure, fsdp_error *err)
{
    for (size_t i = 0; i < at->weight_count; i++) {
        plain_weight *weight = &at->weights[i];
        bool has_slot = weight->slot != NONE && is_sure;
        ds_param param = weight->param;
        if (has_slot && at->form == FORM_FLAT)
            continue;
        const plain_slot *slot = has_slot ? &at->groups[weight->group].slots[weight->slot] : NULL;
        torch_tensor tensor = slot && at->form == FORM_EACH ? slot->shape : weight->tensor;
        FSDP_TRY(
            ds_add_model_tensor(at->set, at->archive, param.name, param.name_size, &tensor, err));
        if (slot)
            FSDP_TRY(add_moments(at, &param, slot->state, err));
        if (slot)
            FSDP_TRY(ds_note_owner(at->set, slot->number, &param, err));
    }
    return FSDP_OK;
}

static fsdp_status read_plain(plain *at, fsdp_error *err)
{
    bool is_sure;
    FSDP_TRY(read_weights(at, err));
    FSDP_TRY(read_groups(at, err));
    FSDP_TRY(match(at, &is_sure, err));
    if (at->form == FORM_TORCH && is_sure)
        FSDP_TRY(check_frozen(at, &is_sure, err));
    if (!is_sure && at->form != FORM_TORCH)
        return ds_bad(at->archive,
                      "the master weights of its optimizer, when rounded, differ from the weights "
                      "of its model",
                      err);
    if (at->form == FORM_FLAT)
        FSDP_TRY(add_flat(at, err));
    FSDP_TRY(add_weights(at, is_sure, err));
    if (!is_sure)
        FSDP_TRY(add_numbered(at, err));
    FSDP_TRY(ds_add_optim_values(at->set, at->archive, at->optim, err));
    return ds_add_steps(at->set, at->archive, at->states, at->state_count, err);
}

fsdp_status ds_read_plain(ds_set *set, torch_archive *archive, fsdp_error *err)
{
    plain at = {.set = set,
                .archive = archive,
                .optim = ds_member(archive, archive->pickle.root, "optimizer")};
    set->is_plain = true;
    fsdp_status st = read_plain(&at, err);
    fsdp_free(at.weights);
    fsdp_free(at.groups);
    fsdp_free(at.states);
    return st;
}
