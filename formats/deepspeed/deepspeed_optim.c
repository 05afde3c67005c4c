/*
 * Optimizer files: the flat masters and moments of one rank.
 *
 *   stages 1, 2   single_partition_of_fp32_groups [group], base_optimizer_state {state: {group: {...}}};
 *                 with elastic_checkpoint base_optimizer_state [group]
 *   stage 3       fp32_flat_groups [sub-group], optimizer_state_dict {state: {sub-group: {...}}}
 *
 * Masters may lack the padding at the end of their group, which moments have. Expert groups, whose experts
 * every rank numbers from 0, get their global names first. See deepspeed.h.
 */
#include "formats/deepspeed/deepspeed.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

/* --- numbers -------------------------------------------------------------------------------------- */

static const char *const optim_facts[] = {"partition_count", "ds_version", "zero_stage", NULL};

/* The steps of the optimizer are those of the engine, of which it does not take the skipped ones; a group
 * that was added later has fewer. */
static fsdp_status compare_steps(const ds_set *set, const torch_archive *archive, double most,
                                 fsdp_error *err)
{
    double steps = (double)set->global_steps, taken = steps - (double)set->skipped_steps;
    if (most < 0 || set->global_steps < 0 || set->is_chosen || (most >= taken && most <= steps))
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_DAMAGED,
                     "'%s' says that global_steps is %" PRId64
                     ", and '%s' that its optimizer took %.0f steps" FSDP_TWO_SAVES
                     ". If the optimizer was restarted on purpose, use --from deepspeed",
                     set->model_file, set->global_steps, ds_path(set, archive), most);
}

/* Compares the numbers of an optimizer with those of the files before. */
static fsdp_status agree_numbers(ds_set *set, torch_archive *archive, fsdp_node optim,
                                 const fsdp_node *states, size_t count, fsdp_error *err)
{
    double most = -1;
    FSDP_TRY(ds_note_facts(set, archive, optim, optim_facts, err));
    for (size_t i = 0; i < count; i++) {
        fsdp_value step = {0};
        fsdp_node node = ds_member(archive, states[i], "step");
        char what[64];
        float number;
        snprintf(what, sizeof what, "the step of group %zu", i);
        if (node == 0)
            continue;
        fsdp_status st = ds_read_step(archive, node, &step, err);
        if (st == FSDP_OK)
            st =
                fsdp_facts_note(&set->facts, what, strlen(what), ds_path(set, archive), &step, err);
        if (st == FSDP_OK && ds_is_number(&step, &number) && (double)number > most)
            most = (double)number;
        fsdp_value_release(&step);
        FSDP_TRY(st);
    }
    return compare_steps(set, archive, most, err);
}

/* === experts ================================================================================== */

/*
 * Expert groups: every expert-parallel rank has experts of its own, which it numbers from 0, so that one list
 * of shapes stands for the parameters of all of them. The checkpoint's names count experts over all ranks.
 */

/* "moe.deepspeed_moe.experts.deepspeed_experts." "3" ".0.weight" */
static const char experts_prefix[] = "deepspeed_experts.";
enum { MOST_BYTES = 1 << 30 };

typedef struct expert_name {
    size_t stem, digits; /* bytes before the number, and of it */
    uint64_t number;
} expert_name;

static bool split_name(const ds_param *param, expert_name *out)
{
    enum { MOST_DIGITS = 9 };
    const char *found =
        memmem(param->name, param->name_size, experts_prefix, sizeof experts_prefix - 1);
    if (!found)
        return false;
    const char *digit = found + sizeof experts_prefix - 1;
    *out = (expert_name){.stem = (size_t)(digit - param->name)};
    for (; *digit >= '0' && *digit <= '9' && out->digits < MOST_DIGITS; digit++, out->digits++)
        out->number = out->number * 10 + (uint64_t)(*digit - '0');
    return out->digits > 0 && *digit == '.';
}

/* Counts the experts of one rank below each stem. */
static fsdp_status count_experts(const ds_set *set, const ds_lane *lane, fsdp_name_table *counts,
                                 fsdp_error *err)
{
    for (size_t i = 0; i < lane->count; i++) {
        const ds_param *param = &lane->params[i];
        expert_name name;
        char shown[200];
        if (!split_name(param, &name))
            return fsdp_fail(err, FSDP_ERR_REFUSED,
                             "'%s': '%s' is split over some of the ranks, but is not an expert",
                             set->directory,
                             fsdp_printable(param->name, param->name_size, shown, sizeof shown));
        uint64_t *count = fsdp_name_table_enter(counts, param->name, name.stem, 0);
        if (!count)
            return fsdp_fail_memory(err, "experts");
        *count = name.number >= *count ? name.number + 1 : *count;
    }
    return FSDP_OK;
}

/* Copies a parameter for an expert-parallel rank. */
static fsdp_status copy_param(ds_set *set, const ds_param *from, size_t rank,
                              const fsdp_name_table *counts, ds_param *to, fsdp_error *err)
{
    expert_name name;
    fsdp_text text = {0};
    if (!split_name(from, &name))
        return fsdp_fail(err, FSDP_ERR_INTERNAL, "the name of an expert has no number");
    uint64_t count = *fsdp_name_table_find(counts, from->name, name.stem);
    size_t rest = name.stem + name.digits;
    fsdp_text_add(&text, from->name, name.stem);
    fsdp_text_addf(&text, "%llu", (unsigned long long)(rank * count + name.number));
    fsdp_text_add(&text, from->name + rest, from->name_size - rest);
    *to = *from;
    to->name = text.failed ? NULL : fsdp_arena_strndup(&set->arena, text.data, text.size);
    to->name_size = text.size;
    to->weight = NULL; /* the module has the experts of one rank */
    fsdp_text_release(&text);
    return to->name ? FSDP_OK : fsdp_fail_memory(err, "experts");
}

static fsdp_status make_lanes(ds_set *set, ds_group *group, size_t lanes,
                              const fsdp_name_table *counts, fsdp_error *err)
{
    const ds_lane *local = group->lanes;
    ds_lane *made = fsdp_arena_alloc(&set->arena, lanes, sizeof *made);
    if (!made)
        return fsdp_fail_memory(err, "experts");
    for (size_t i = 0; i < lanes; i++) {
        made[i].count = local->count;
        made[i].params = fsdp_arena_alloc(&set->arena, local->count, sizeof *made[i].params);
        if (!made[i].params)
            return fsdp_fail_memory(err, "experts");
        for (size_t p = 0; p < local->count; p++)
            FSDP_TRY(copy_param(set, &local->params[p], i, counts, &made[i].params[p], err));
    }
    group->lanes = made;
    group->lane_count = lanes;
    return FSDP_OK;
}

/* Every rank multiplies the parameters that the pickle lists once. */
static fsdp_status check_size(const ds_set *set, const ds_lane *lane, size_t lanes, fsdp_error *err)
{
    size_t bytes = 0;
    for (size_t i = 0; i < lane->count; i++)
        bytes += lane->params[i].name_size + sizeof *lane->params;
    return lanes <= MOST_BYTES / (bytes > 0 ? bytes : 1)
               ? FSDP_OK
               : fsdp_fail(err, FSDP_ERR_LIMIT,
                           "'%s': its experts are too many: %zu ranks have %zu parameters each",
                           set->directory, lanes, lane->count);
}

/* Gives the group a lane for each of `lanes` expert-parallel ranks, with the global names of their experts.
 * FSDP_ERR_REFUSED: its parameters are not experts. */
static fsdp_status ds_experts_begin(ds_set *set, ds_group *group, size_t lanes, fsdp_error *err)
{
    fsdp_name_table counts = {0};
    FSDP_TRY(check_size(set, group->lanes, lanes, err));
    fsdp_status st = count_experts(set, group->lanes, &counts, err);
    if (st == FSDP_OK)
        st = make_lanes(set, group, lanes, &counts, err);
    fsdp_name_table_release(&counts);
    return st;
}

/* === optimizer files ========================================================================== */

/* The parts of an optimizer's dict. */
typedef struct optim_parts {
    fsdp_node optim;
    ds_members masters; /* one per group */
    fsdp_node *states;  /* one per group; 0: none */
} optim_parts;

/* --- the parts of a file --------------------------------------------------------------------------- */

/* States by the number of their group. */
static fsdp_status find_states(const torch_archive *archive, optim_parts *parts, fsdp_error *err)
{
    fsdp_node base = ds_base_state(archive, parts->optim);
    ds_members list = ds_items_of(archive, base);
    for (size_t i = 0; i < list.count && i < parts->masters.count; i++)
        parts->states[i] = list.items[i];
    ds_members dict = ds_members_of(archive, ds_member(archive, base, "state"));
    for (size_t i = 0; i < dict.count; i += 2) {
        int64_t number;
        if (!fsdp_pickle_int(&archive->pickle, dict.items[i], &number) || number < 0 ||
            (uint64_t)number >= parts->masters.count)
            return ds_bad(archive, "its optimizer has a state that belongs to no group", err);
        parts->states[number] = dict.items[i + 1];
    }
    return FSDP_OK;
}

static fsdp_status find_parts(const torch_archive *archive, bool is_split, optim_parts *parts,
                              fsdp_error *err)
{
    const char *key = is_split ? "fp32_flat_groups" : "single_partition_of_fp32_groups";
    parts->optim = ds_member(archive, archive->pickle.root, "optimizer_state_dict");
    fsdp_node masters = ds_member(archive, parts->optim, key);
    if (masters == 0)
        return fsdp_fail(err, FSDP_ERR_DAMAGED, "%s: its optimizer has no %s", archive->where, key);
    parts->masters = ds_items_of(archive, masters);
    parts->states = fsdp_alloc(parts->masters.count, sizeof *parts->states);
    return parts->states ? find_states(archive, parts, err)
                         : fsdp_fail_memory(err, "the states of an optimizer");
}

/* --- ranks and lanes -------------------------------------------------------------------------------- */

/* The ranks over which a group is split; 0: it is not stated. */
static fsdp_status read_count(const torch_archive *archive, fsdp_node node, int64_t *count_out,
                              fsdp_error *err)
{
    *count_out = 0;
    if (torch_node(archive, node)->kind == FSDP_NODE_ABSENT)
        return FSDP_OK;
    return fsdp_pickle_int(&archive->pickle, node, count_out) && *count_out > 0
               ? FSDP_OK
               : ds_bad(archive, "partition_count is not a number of ranks", err);
}

static fsdp_status check_count(const ds_set *set, const torch_archive *archive, int64_t highest,
                               fsdp_error *err)
{
    if (highest == 0 || highest == set->world)
        return FSDP_OK;
    if (highest > set->world)
        return fsdp_fail(err, FSDP_ERR_DAMAGED,
                         "%s: partition_count says %" PRId64 " ranks, but the file of rank %" PRId64
                         " is missing (..._rank_%" PRId64 "_mp_rank_%02d_optim_states.pt)",
                         archive->where, highest, set->world, set->world, set->part);
    return fsdp_fail(err, FSDP_ERR_REFUSED,
                     "%s: partition_count says %" PRId64 " ranks, but there are files of %" PRId64
                     "; some may be from a different run",
                     archive->where, highest, set->world);
}

/* A group that is split over a part of the ranks is one of experts: the others have other experts. */
static fsdp_status begin_group(ds_set *set, const torch_archive *archive, ds_group *group,
                               int64_t count, fsdp_error *err)
{
    if (count == 0 || count == set->world)
        return FSDP_OK;
    if (set->world % count != 0)
        return ds_bad(archive, "partition_count does not divide the number of ranks", err);
    return ds_experts_begin(set, group, (size_t)(set->world / count), err);
}

/* partition_count is a number, or a list with one per group. */
static fsdp_status read_counts(ds_set *set, const torch_archive *archive, fsdp_node optim,
                               fsdp_error *err)
{
    fsdp_node node = ds_member(archive, optim, "partition_count");
    ds_members list = ds_items_of(archive, node);
    int64_t highest = 0, count;
    if (list.items == NULL) {
        FSDP_TRY(read_count(archive, node, &highest, err));
        return check_count(set, archive, highest, err);
    }
    for (size_t i = 0; i < list.count; i++) {
        FSDP_TRY(read_count(archive, list.items[i], &count, err));
        highest = count > highest ? count : highest;
    }
    FSDP_TRY(check_count(set, archive, highest, err));
    for (size_t i = 0; i < list.count && i < set->group_count && set->rank == 0; i++) {
        FSDP_TRY(read_count(archive, list.items[i], &count, err));
        FSDP_TRY(begin_group(set, archive, &set->groups[i], count, err));
    }
    return FSDP_OK;
}

/* --- padding between parameters --------------------------------------------------------------------- */

static fsdp_status read_group_gaps(const torch_archive *archive, fsdp_node node, ds_group *group,
                                   fsdp_error *err)
{
    ds_members gaps = ds_items_of(archive, node);
    if (gaps.count != group->lanes->count)
        return ds_bad(archive, "param_alignment_paddings and param_shapes differ", err);
    for (size_t i = 0; i < gaps.count; i++) {
        ds_param *param = &group->lanes->params[i];
        int64_t gap, all;
        if (!fsdp_pickle_int(&archive->pickle, gaps.items[i], &gap) || gap < 0 ||
            fsdp_add_overflow(param->count, gap, &all))
            return ds_bad(archive, "param_alignment_paddings are not counts", err);
        param->gap = gap;
    }
    return FSDP_OK;
}

static fsdp_status read_gaps(ds_set *set, const torch_archive *archive, fsdp_node optim,
                             fsdp_error *err)
{
    ds_members groups = ds_items_of(archive, ds_member(archive, optim, "param_alignment_paddings"));
    if (groups.count > 0 && groups.count != set->group_count)
        return ds_bad(archive, "param_alignment_paddings and param_shapes differ", err);
    for (size_t g = 0; g < groups.count; g++)
        FSDP_TRY(read_group_gaps(archive, groups.items[g], &set->groups[g], err));
    return FSDP_OK;
}

/* --- flat tensors ----------------------------------------------------------------------------------- */

static ds_lane *lane_of(const ds_set *set, size_t group)
{
    ds_group *of = &set->groups[set->is_split ? 0 : group];
    return &of->lanes[(size_t)set->rank % of->lane_count];
}

/* True for a moment: as long as the master, with or without the padding that it lost. Other tensors are of
 * the rank, not of its parameters. */
static bool is_moment(const ds_set *set, const torch_tensor *tensor, const torch_tensor *master)
{
    int64_t most = set->is_split ? 0 : 2 * set->world;
    return tensor->ndim == 1 && tensor->shape[0] >= master->shape[0] &&
           tensor->shape[0] - master->shape[0] <= most;
}

fsdp_status ds_read_moments(ds_set *set, const torch_archive *archive, fsdp_node state,
                            ds_lane *lane, const torch_tensor *master, fsdp_error *err)
{
    ds_members members = ds_members_of(archive, state);
    for (size_t i = 0; i < members.count; i += 2) {
        torch_tensor tensor;
        size_t size;
        int kind;
        const char *name = ds_text(archive, members.items[i], &size);
        if (!name || torch_tensor_kind(archive, members.items[i + 1]) != TORCH_KIND_TENSOR)
            continue;
        FSDP_TRY(ds_read_tensor(archive, members.items[i + 1], "a moment", &tensor, err));
        if (!is_moment(set, &tensor, master))
            continue;
        FSDP_TRY(ds_kind(set, name, size, &kind, err));
        FSDP_TRY(ds_print_add(set, &tensor, true, err));
        FSDP_TRY(ds_split(set, lane, kind, &tensor, err));
    }
    return FSDP_OK;
}

static fsdp_status read_group(ds_set *set, const torch_archive *archive, const optim_parts *parts,
                              size_t group, fsdp_error *err)
{
    torch_tensor master;
    ds_lane *lane = lane_of(set, group);
    FSDP_TRY(ds_read_tensor(archive, parts->masters.items[group], "a master", &master, err));
    if (master.ndim != 1)
        return ds_bad(archive, "its master weights are not flat", err);
    FSDP_TRY(ds_print_add(set, &master, false, err));
    FSDP_TRY(ds_split(set, lane, DS_MASTER, &master, err));
    return ds_read_moments(set, archive, parts->states[group], lane, &master, err);
}

static fsdp_status read_parts(ds_set *set, torch_archive *archive, const optim_parts *parts,
                              fsdp_error *err)
{
    if (!set->is_split && parts->masters.count != set->group_count)
        return ds_bad(archive, "it has a different number of groups than param_shapes", err);
    FSDP_TRY(read_counts(set, archive, parts->optim, err));
    FSDP_TRY(agree_numbers(set, archive, parts->optim, parts->states, parts->masters.count, err));
    if (set->rank == 0 && !set->is_split)
        FSDP_TRY(read_gaps(set, archive, parts->optim, err));
    for (size_t g = 0; g < parts->masters.count; g++)
        FSDP_TRY(read_group(set, archive, parts, g, err));
    FSDP_TRY(ds_print_end(set, "master weights and moments", archive, err));
    if (set->is_split)
        FSDP_TRY(ds_split_end(set, err));
    if (set->rank != 0 || set->part != 0)
        return FSDP_OK;
    FSDP_TRY(ds_add_optim_values(set, archive, parts->optim, err));
    return ds_add_steps(set, archive, parts->states, parts->masters.count, err);
}

fsdp_status ds_read_optim(ds_set *set, torch_archive *archive, fsdp_error *err)
{
    optim_parts parts = {0};
    fsdp_status st = find_parts(archive, set->is_split, &parts, err);
    if (st == FSDP_OK)
        st = read_parts(set, archive, &parts, err);
    fsdp_free(parts.states);
    return st;
}
