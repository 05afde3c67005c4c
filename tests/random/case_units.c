/* See case.h: units, and how they work. */
#include "tests/random/case.h"

#include <stdio.h>
#include <string.h>

/* Dtypes that most units of a case have in common. */
typedef struct usual_dtypes {
    bool is_mixed;
    fsdp_dtype param, reduce;
} usual_dtypes;

static fsdp_dtype any_float(random_dice *dice, int none_percent)
{
    static const fsdp_dtype floats[] = {FSDP_BF16, FSDP_F16, FSDP_F32, FSDP_F32};
    return dice_hits(dice, none_percent) ? FSDP_DTYPE_NONE : floats[dice_below(dice, 4)];
}

static int shards_of(const training_case *c, case_cut cut)
{
    if (cut == CUT_NONE)
        return 1;
    return cut == CUT_AS_MESH && c->replicas ? c->ranks / c->replicas : c->ranks;
}

/* --- FSDP2 ------------------------------------------------------------------------------------ */

/* To groups of k ranks, where k divides. */
static int draw_group_size(random_dice *dice, int shards)
{
    int size = FSDP_RESHARD_ALWAYS;
    for (int k = 2; k < shards; k++)
        if (shards % k == 0 && (size == FSDP_RESHARD_ALWAYS || dice_hits(dice, 50)))
            size = k;
    return size;
}

static int draw_reshard(random_dice *dice, const case_unit *unit, bool is_root)
{
    static const int plain[] = {FSDP_RESHARD_NEVER, FSDP_RESHARD_ALWAYS, FSDP_RESHARD_AUTO};
    int which = dice_below(dice, 5);
    if (which < 3)
        return plain[which];
    return is_root || unit->cut == CUT_ALL ? FSDP_RESHARD_ALWAYS
                                           : draw_group_size(dice, unit->shards);
}

static void draw_gradients(case_unit *unit, random_dice *dice, bool is_plain)
{
    static const double factors[] = {1, 2, 8, 0.5, 3};
    if (dice_hits(dice, 25))
        unit->divide = factors[dice_below(dice, is_plain ? 4 : 5)];
    unit->forces_sum = dice_hits(dice, 15);
    unit->takes_unused = dice_hits(dice, 20);
    unit->has_separate_comm = dice_hits(dice, 20);
    unit->input_buffers = dice_hits(dice, 15) ? 1 + dice_below(dice, 3) : 0;
}

static void draw_gathers(case_unit *unit, random_dice *dice)
{
    unit->keeps_storage = dice_hits(dice, 10);
    unit->reshards_last = dice_hits(dice, 10);
    unit->reshards_never = dice_hits(dice, 10);
    unit->stays_sharded_in_backward = dice_hits(dice, 10);
    unit->gathers_async = dice_hits(dice, 15);
    unit->offloads = dice_hits(dice, 12);
}

static void draw_prefetch(training_case *c, case_unit *unit, random_dice *dice)
{
    for (int d = 0; d < 2; d++) {
        unit->ahead_count[d] = dice_hits(dice, 25) ? 1 + dice_below(dice, CASE_AHEAD) : 0;
        for (int i = 0; i < unit->ahead_count[d]; i++)
            unit->ahead[d][i] = dice_below(dice, c->unit_count);
    }
}

static void draw_unit(training_case *c, case_unit *unit, random_dice *dice,
                      const usual_dtypes *usual)
{
    int cut = dice_below(dice, 10);
    unit->cut = cut == 0 && c->replicas ? CUT_ALL : cut == 1 ? CUT_NONE : CUT_AS_MESH;
    unit->shards = shards_of(c, unit->cut);
    unit->param_dtype = usual->param;
    unit->reduce_dtype = usual->reduce;
    if (usual->is_mixed && dice_hits(dice, 30)) {
        unit->param_dtype = any_float(dice, 30);
        unit->reduce_dtype = c->is_plain ? FSDP_F32 : any_float(dice, 40);
    }
    unit->reshard = draw_reshard(dice, unit, unit->layer == CASE_ROOT);
    draw_gradients(unit, dice, c->is_plain);
    draw_gathers(unit, dice);
}

/* --- FSDP1 ------------------------------------------------------------------------------------ */

static case_cut cut_of_strategy(fsdp_wrap_strategy strategy)
{
    if (strategy == FSDP_WRAP_NO_SHARD)
        return CUT_NONE;
    return strategy == FSDP_WRAP_FULL_SHARD || strategy == FSDP_WRAP_SHARD_GRAD_OP ? CUT_ALL
                                                                                   : CUT_AS_MESH;
}

static fsdp_wrap_strategy draw_strategy(const training_case *c, random_dice *dice)
{
    static const fsdp_wrap_strategy over_all[] = {FSDP_WRAP_FULL_SHARD, FSDP_WRAP_SHARD_GRAD_OP,
                                                  FSDP_WRAP_FULL_SHARD, FSDP_WRAP_NO_SHARD};
    if (c->replicas && dice_hits(dice, 70))
        return dice_hits(dice, 50) ? FSDP_WRAP_HYBRID_SHARD : FSDP_WRAP_HYBRID_SHARD_ZERO2;
    return over_all[dice_below(dice, 4)];
}

static void draw_flat_unit(training_case *c, case_unit *unit, random_dice *dice,
                           const usual_dtypes *usual)
{
    unit->wrap = (fsdp_wrap_unit_opts){.strategy = draw_strategy(c, dice),
                                       .backward_prefetch = (fsdp_wrap_prefetch)dice_below(dice, 3),
                                       .forward_prefetch = dice_hits(dice, 30),
                                       .param_dtype = usual->param,
                                       .reduce_dtype = usual->reduce,
                                       .offload_params = dice_hits(dice, 15)};
    if (c->wraps_by_name && unit != c->units)
        unit->wrap = c->units[CASE_ROOT_UNIT].wrap;
    unit->cut = cut_of_strategy(unit->wrap.strategy);
    unit->shards = shards_of(c, unit->cut);
    unit->param_dtype = unit->wrap.param_dtype;
    unit->reduce_dtype = unit->wrap.reduce_dtype;
}

/* Draws a communication hook, which compresses gradients in place of the units. */
static void draw_hook(training_case *c, random_dice *dice)
{
    static const fsdp_wrap_comm_hook hooks[] = {fsdp_wrap_fp16_compress_hook,
                                                fsdp_wrap_bf16_compress_hook};
    if (!c->replicas && !c->is_plain && dice_hits(dice, 25))
        c->hook = hooks[dice_below(dice, 2)];
}

/* --- choosing units --------------------------------------------------------------------------- */

static case_unit *add_unit(training_case *c, int layer, const char *suffix)
{
    case_unit *unit = &c->units[c->unit_count++];
    unit->layer = layer;
    if (layer == CASE_ROOT)
        snprintf(unit->name, sizeof unit->name, "root");
    else
        snprintf(unit->name, sizeof unit->name, "layers.%d%s", layer, suffix);
    return unit;
}

static bool has_inner(const training_case *c, int layer)
{
    for (int i = 0; i < c->param_count; i++)
        if (c->params[i].layer == layer && c->params[i].is_inner)
            return true;
    return false;
}

/* A layer may be the root's, and two may be one unit. */
static void place_units(training_case *c, random_dice *dice)
{
    bool may_skip = !c->is_flat || c->uses_orig;
    bool has_list = !c->is_flat && c->layers >= 3 && dice_hits(dice, 25);
    int skipped = may_skip && !has_list && dice_hits(dice, 20) ? dice_below(dice, c->layers) : -1;
    add_unit(c, CASE_ROOT, "");
    for (int layer = 0; layer < c->layers; layer++) {
        c->layer_unit[layer] = c->inner_unit[layer] = -1;
        if (layer == skipped)
            continue;
        if (has_list && layer == 1) {
            c->layer_unit[layer] = c->layer_unit[0];
            continue;
        }
        c->layer_unit[layer] = c->unit_count;
        add_unit(c, layer, "")->is_list = has_list && layer == 0;
        if (!(has_list && layer == 0) && has_inner(c, layer) && dice_hits(dice, 70)) {
            c->inner_unit[layer] = c->unit_count;
            add_unit(c, layer, ".in");
        }
    }
}

static void place_params(training_case *c)
{
    for (int i = 0; i < c->param_count; i++) {
        case_param *param = &c->params[i];
        int layer = param->layer, unit = CASE_ROOT_UNIT;
        if (layer != CASE_ROOT && c->layer_unit[layer] >= 0)
            unit = c->layer_unit[layer];
        if (layer != CASE_ROOT && param->is_inner && c->inner_unit[layer] >= 0)
            unit = c->inner_unit[layer];
        param->unit = unit;
    }
}

/* Dims other than the first divide evenly; only whole groups reshard to smaller ones. */
static void draw_placement(training_case *c, case_param *param, random_dice *dice)
{
    const case_unit *unit = &c->units[param->unit];
    if (param->ndim > 1 && param->shape[1] % unit->shards == 0 && dice_hits(dice, 30))
        param->dim = dice_hits(dice, 50) ? 1 : 1 - param->ndim;
    else if (param->ndim > 2 && param->shape[2] % unit->shards == 0 && dice_hits(dice, 50))
        param->dim = 2;
    else if (c->replicas && unit->cut == CUT_AS_MESH && unit->reshard <= FSDP_RESHARD_ALWAYS)
        param->on_flat_mesh = dice_hits(dice, 10);
    if (dice_hits(dice, 5))
        param->grad_dtype = FSDP_F32;
}

void case_draw_units(training_case *c)
{
    random_dice dice = dice_for(c->seed, DICE_UNITS, 1000 + (uint64_t)c->ranks);
    usual_dtypes usual = {.is_mixed = dice_hits(&dice, 45) && !(c->is_flat && c->is_plain)};
    if (usual.is_mixed) {
        usual.param = any_float(&dice, 25);
        usual.reduce = c->is_plain ? FSDP_F32 : any_float(&dice, 30);
    }
    c->wraps_by_name = dice_hits(&dice, 30);
    c->is_unlimited = dice_hits(&dice, 25);
    place_units(c, &dice);
    place_params(c);
    if (c->is_flat)
        draw_hook(c, &dice);
    for (int i = 0; i < c->unit_count; i++)
        if (c->is_flat)
            draw_flat_unit(c, &c->units[i], &dice, &usual);
        else
            draw_unit(c, &c->units[i], &dice, &usual);
    if (c->is_flat)
        return;
    for (int i = 0; i < c->unit_count; i++)
        draw_prefetch(c, &c->units[i], &dice);
    for (int i = 0; i < c->param_count; i++)
        draw_placement(c, &c->params[i], &dice);
}
