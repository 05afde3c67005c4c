/*
 * Expert groups: every expert-parallel rank has experts of its own, which it numbers from 0, so that one list
 * of shapes stands for the parameters of all of them. The checkpoint's names count experts over all ranks.
 * See deepspeed.h.
 */
#include "formats/deepspeed/deepspeed.h"

#include <stdlib.h>
#include <string.h>

/* "moe.deepspeed_moe.experts.deepspeed_experts." "3" ".0.weight" */
static const char word[] = "deepspeed_experts.";
enum { MOST_BYTES = 1 << 30 };

typedef struct expert_name {
    size_t stem, digits; /* bytes before the number, and of it */
    uint64_t number;
} expert_name;

static bool split_name(const ds_param *param, expert_name *out)
{
    enum { MOST_DIGITS = 9 };
    const char *found = memmem(param->name, param->name_size, word, sizeof word - 1);
    if (!found)
        return false;
    const char *digit = found + sizeof word - 1;
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
                             "'%s': '%s' is split over a part of the ranks and is no expert",
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
        return fsdp_fail(err, FSDP_ERR_INTERNAL, "an expert lost its number");
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
                           "'%s': %zu ranks of %zu parameters of experts each are too many",
                           set->directory, lanes, lane->count);
}

fsdp_status ds_experts_begin(ds_set *set, ds_group *group, size_t lanes, fsdp_error *err)
{
    fsdp_name_table counts = {0};
    FSDP_TRY(check_size(set, group->lanes, lanes, err));
    fsdp_status st = count_experts(set, group->lanes, &counts, err);
    if (st == FSDP_OK)
        st = make_lanes(set, group, lanes, &counts, err);
    fsdp_name_table_release(&counts);
    return st;
}
