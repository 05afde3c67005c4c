/* See case.h: the model and the optimizer, and what follows from a configuration. Units: case_units.c. */
#include "tests/random/case.h"

#include <stdio.h>
#include <string.h>

static const fsdp_dtype floats[] = {FSDP_BF16, FSDP_F16, FSDP_F32};

/* --- model -------------------------------------------------------------------------------------- */

static void draw_shape(random_dice *dice, case_param *param)
{
    param->ndim = 1 + dice_below(dice, 3);
    if (param->ndim == 3 && dice_hits(dice, 60))
        param->ndim = 2;
    for (int i = 0; i < param->ndim; i++)
        param->shape[i] = 1 + dice_below(dice, param->ndim == 1 ? 23 : i == 0 ? 13 : 12);
    if (dice_hits(dice, 3)) { /* larger than what is copied at a time */
        param->ndim = 2;
        param->shape[0] = 301;
        param->shape[1] = 72;
    }
    param->count = 1;
    for (int i = 0; i < param->ndim; i++)
        param->count *= param->shape[i];
}

static void draw_param(training_case *c, random_dice *dice, int layer, int number, bool is_inner)
{
    case_param *param = &c->params[c->param_count++];
    param->layer = layer;
    param->is_inner = is_inner;
    if (layer == CASE_ROOT)
        snprintf(param->name, sizeof param->name, "head%d", number);
    else
        snprintf(param->name, sizeof param->name, "layers.%d.%sp%d", layer, is_inner ? "in." : "",
                 number);
    draw_shape(dice, param);
    param->is_frozen = dice_hits(dice, 12);
    param->has_alias = dice_hits(dice, 12);
}

static void draw_params(training_case *c, random_dice *dice)
{
    c->layers = 2 + dice_below(dice, CASE_LAYERS - 1);
    for (int layer = CASE_ROOT; layer < c->layers; layer++) {
        int own = layer == CASE_ROOT ? dice_below(dice, 3) : 1 + dice_below(dice, 4);
        int inner = layer != CASE_ROOT && dice_hits(dice, 25) ? 2 : 0;
        for (int i = 0; i < own; i++)
            draw_param(c, dice, layer, i, false);
        for (int i = 0; i < inner; i++)
            draw_param(c, dice, layer, i, true);
    }
}

static void draw_dtypes(training_case *c, random_dice *dice)
{
    static const fsdp_dtype rarer[] = {FSDP_BF16, FSDP_BF16, FSDP_F16, FSDP_F64};
    fsdp_dtype usual = dice_hits(dice, 75) ? FSDP_F32 : rarer[dice_below(dice, 4)];
    bool is_mixed = !c->is_flat && dice_hits(dice, 15);
    for (int i = 0; i < c->param_count; i++)
        c->params[i].dtype = is_mixed && dice_hits(dice, 40) ? floats[dice_below(dice, 3)] : usual;
}

/* Without original parameters, a flat one is frozen or not, and so is a layer here. */
static void freeze_layers(training_case *c, random_dice *dice)
{
    for (int layer = CASE_ROOT; layer < c->layers; layer++) {
        bool is_frozen = dice_hits(dice, 12);
        for (int i = 0; i < c->param_count; i++)
            if (c->params[i].layer == layer)
                c->params[i].is_frozen = is_frozen;
    }
}

static void draw_model(training_case *c)
{
    random_dice dice = dice_for(c->seed, DICE_MODEL, 0);
    c->is_flat = dice_hits(&dice, 30);
    c->uses_orig = dice_hits(&dice, 50);
    draw_params(c, &dice);
    draw_dtypes(c, &dice);
    if (c->is_flat && !c->uses_orig)
        freeze_layers(c, &dice);
    c->is_adamw = dice_hits(&dice, 60);
    c->has_master = dice_hits(&dice, 70);
    c->momentum = dice_hits(&dice, 50) ? 0.9 : 0;
    c->is_nested = dice_hits(&dice, 30);
    c->has_groups = dice_hits(&dice, 50);
    c->has_own_hypers = dice_hits(&dice, 50);
    c->maximizes = dice_hits(&dice, 20);
    c->is_nesterov = dice_hits(&dice, 50);
}

/* --- configurations ------------------------------------------------------------------------------ */

static void draw_mesh(training_case *c, random_dice *dice)
{
    bool is_grid = dice_hits(dice, c->ranks < 4 ? 15 : c->is_plain ? 20 : 65);
    if (!is_grid)
        return;
    if (c->ranks % 2 != 0 || c->ranks < 4 || c->is_plain)
        c->replicas = dice_hits(dice, 50) ? c->ranks : 1;
    else
        c->replicas = c->ranks == 6 && dice_hits(dice, 50) ? 3 : 2;
}

void case_draw(training_case *c, uint64_t seed, int ranks)
{
    memset(c, 0, sizeof *c);
    c->seed = seed;
    c->ranks = ranks;
    draw_model(c);
    random_dice dice = dice_for(seed, DICE_UNITS, (uint64_t)ranks);
    c->is_plain = dice_hits(&dice, 50);
    draw_mesh(c, &dice);
    c->accumulates = !c->is_plain && dice_hits(&dice, 70);
    c->repeats = !c->is_plain && dice_hits(&dice, 40);
    c->clip = dice_hits(&dice, 50) ? CLIP_NEVER : c->is_plain ? CLIP_MEASURES : CLIP_CUTS;
    c->is_finalized_by_hand = !c->is_flat && dice_hits(&dice, 15);
    c->steps = 3 + dice_below(&dice, 2);
    case_draw_units(c);
}

void case_make_alone(training_case *c)
{
    c->is_alone = true;
    c->replicas = 0;
    for (int i = 0; i < c->param_count; i++)
        c->params[i].on_flat_mesh = false;
    for (int i = 0; i < c->unit_count; i++) {
        case_unit *unit = &c->units[i];
        unit->cut = CUT_AS_MESH;
        unit->shards = 1;
        unit->divide = unit->divide > 0 ? unit->divide : c->ranks;
        if (unit->reshard > FSDP_RESHARD_ALWAYS)
            unit->reshard = FSDP_RESHARD_ALWAYS;
        if (unit->wrap.strategy == FSDP_WRAP_HYBRID_SHARD)
            unit->wrap.strategy = FSDP_WRAP_FULL_SHARD;
        if (unit->wrap.strategy == FSDP_WRAP_HYBRID_SHARD_ZERO2)
            unit->wrap.strategy = FSDP_WRAP_SHARD_GRAD_OP;
    }
}

bool case_is_hybrid(const training_case *c)
{
    return c->replicas > 1 && c->replicas < c->ranks;
}

fsdp_dtype case_reduce_dtype(const training_case *c, const case_param *param)
{
    const case_unit *unit = &c->units[param->unit];
    if (unit->reduce_dtype == FSDP_DTYPE_NONE && c->is_flat && unit->param_dtype)
        return unit->param_dtype;
    return unit->reduce_dtype ? unit->reduce_dtype : param->dtype;
}

int case_shards(const training_case *c, const case_param *param)
{
    return param->on_flat_mesh ? c->ranks : c->units[param->unit].shards;
}

/* Numbers that one rank adds up as all do: wide enough that a partial sum is not rounded, and divided
 * after the sum or by a power of two. */
static bool adds_alike(const training_case *c, const case_param *param)
{
    const case_unit *unit = &c->units[param->unit];
    fsdp_dtype reduce = case_reduce_dtype(c, param);
    if (reduce != FSDP_F32 && reduce != FSDP_F64)
        return false;
    if (c->is_flat && unit->param_dtype) /* no_sync keeps what is gathered's dtype */
        return false;
    return unit->divide != 3 || unit->forces_sum;
}

bool case_promises_bits(const training_case *c)
{
    if (case_is_hybrid(c) || c->accumulates || c->repeats || c->clip == CLIP_CUTS || c->hook)
        return false;
    for (int i = 0; i < c->param_count; i++)
        if (!c->params[i].is_frozen && !adds_alike(c, &c->params[i]))
            return false;
    return true;
}

void case_print(const training_case *c)
{
    printf("case: seed %llu, %d ranks, %d replicas, %s face, %d parameters in %d units, %s, "
           "accumulates %d, repeats %d, clip %d\n",
           (unsigned long long)c->seed, c->ranks, c->replicas, c->is_flat ? "FSDP1" : "FSDP2",
           c->param_count, c->unit_count, c->is_adamw ? "AdamW" : "SGD", c->accumulates, c->repeats,
           (int)c->clip);
    for (int i = 0; i < c->unit_count; i++) {
        const case_unit *unit = &c->units[i];
        printf("case: unit %s: %d shards, reshard %d, strategy %d, dtypes %s and %s, divide %g\n",
               unit->name, unit->shards, unit->reshard, (int)unit->wrap.strategy,
               fsdp_dtype_name(unit->param_dtype), fsdp_dtype_name(unit->reduce_dtype),
               unit->divide);
    }
}
