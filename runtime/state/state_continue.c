/*
 * Refuses state and hyper-parameters that no optimizer here can continue: with them left out, the steps would
 * be others than those of the program that saved them, and nobody would see why. state_groups_take.c calls
 * fsdp_state_judge for members that an optimizer lacks; fsdp_state_check_continues comes after all names.
 */
#include "runtime/state/state_groups.h"

#include <string.h>

#include "base/text.h"

static const char *kind_of(const fsdp_optim *optim)
{
    return optim->kind == FSDP_OPTIM_ADAMW ? "AdamW" : "SGD";
}

/* --- members of groups ------------------------------------------------------------------------ */

/* A member of other programs' optimizers, and the number with which it changes nothing. */
typedef struct neutral_member {
    const char *name;
    double number;
    const char *drop; /* what --drop leaves out to go on without it */
} neutral_member;

static const neutral_member neutral_members[] = {
    {"amsgrad", 0, "\\.(amsgrad|max_exp_avg_sq)$"},
    {"nesterov", 0, "\\.nesterov$"},
    {"momentum", 0, "\\.momentum(_buffer)?$"},
    {"correct_bias", 1, "\\.correct_bias$"},      /* transformers' AdamW */
    {"bias_correction", 1, "\\.bias_correction$"} /* apex's FusedAdam */
};

static bool is_called(const fsdp_state_unmatched *unmatched, const char *name)
{
    return unmatched->name_size == strlen(name) &&
           memcmp(unmatched->name, name, unmatched->name_size) == 0;
}

static void refuse(fsdp_state_groups *groups, const fsdp_entry *entry, const fsdp_optim *optim,
                   const neutral_member *member, double number)
{
    if (groups->refused.status == FSDP_OK)
        (void)fsdp_fail(&groups->refused, FSDP_ERR_USAGE,
                        "'%s' is %g in '%s', and %s here cannot continue that: to resume without "
                        "it, drop it with fsdp-convert --drop '%s', or set partial",
                        member->name, number, entry->name, kind_of(optim), member->drop);
}

void fsdp_state_judge(fsdp_state_groups *groups, const fsdp_state_unmatched *unmatched)
{
    const fsdp_optim *optim = unmatched->live.optim;
    double number;
    if (!fsdp_state_value_number(unmatched->value, &number))
        return;
    if (is_called(unmatched, "decoupled_weight_decay") && number == 0 &&
        optim->kind == FSDP_OPTIM_ADAMW)
        groups->coupled[fsdp_state_group_number(groups, &unmatched->live)] = unmatched->entry;
    for (size_t i = 0; i < sizeof neutral_members / sizeof *neutral_members; i++)
        if (is_called(unmatched, neutral_members[i].name) && number != neutral_members[i].number)
            refuse(groups, unmatched->entry, optim, &neutral_members[i], number);
}

/* --- members that depend on each other -------------------------------------------------------- */

/* Adam adds its decay to the gradient. Without a decay it is AdamW. */
static void judge_decay(fsdp_state_groups *groups, const fsdp_state_group *live)
{
    const fsdp_entry *entry = groups->coupled[fsdp_state_group_number(groups, live)];
    double decay;
    if (!entry || !fsdp_state_coming(groups, live, "weight_decay", &decay) || decay == 0 ||
        groups->refused.status != FSDP_OK)
        return;
    (void)fsdp_fail(
        &groups->refused, FSDP_ERR_USAGE,
        "'decoupled_weight_decay' is false in '%s', with a weight_decay of %g: that is Adam, whose "
        "decay is a part of the gradient, and AdamW here cannot continue it; to resume as AdamW, "
        "drop it with fsdp-convert --drop '\\.decoupled_weight_decay$', or set partial",
        entry->name, decay);
}

/* As fsdp_sgd_create: a momentum needs a buffer, and Nesterov's a momentum. */
static fsdp_status judge_momentum(const fsdp_state_groups *groups, const fsdp_state_group *live,
                                  fsdp_error *err)
{
    const fsdp_optim *optim = live->optim;
    double momentum = 0, dampening = 0, nesterov = 0;
    if (!fsdp_state_coming(groups, live, "nesterov", &nesterov))
        return FSDP_OK;
    (void)fsdp_state_coming(groups, live, "momentum", &momentum);
    (void)fsdp_state_coming(groups, live, "dampening", &dampening);
    if (momentum != 0 && optim->count > 0 && !optim->states[0].moments[0])
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "'momentum' is %g in the state dict, and SGD here was made without: make "
                         "it with that momentum",
                         momentum);
    if (nesterov != 0 && (momentum == 0 || dampening != 0))
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "'nesterov' is set with momentum %g and dampening %g in the state dict: "
                         "it needs a momentum and no dampening",
                         momentum, dampening);
    return FSDP_OK;
}

fsdp_status fsdp_state_judge_groups(fsdp_state_groups *groups, fsdp_error *err)
{
    const fsdp_state_scope *scope = groups->scope;
    for (size_t i = 0; i < scope->optim_count; i++)
        for (size_t g = 0; g < scope->optims[i]->group_count; g++) {
            const fsdp_state_group live = {.optim = scope->optims[i], .group = g};
            judge_decay(groups, &live);
            if (g == 0)
                FSDP_TRY(judge_momentum(groups, &live, err));
        }
    return FSDP_OK;
}

/* --- state ------------------------------------------------------------------------------------ */

/* True for "master" and "step", which follow from the parameter or count steps, and for None. */
static bool is_spare(const fsdp_entry *entry, const char *what, size_t size)
{
    bool is_null = entry->kind == FSDP_ENTRY_VALUE && entry->value.kind == FSDP_VALUE_NULL;
    return is_null || (size == 6 && memcmp(what, "master", 6) == 0) ||
           (size == 4 && memcmp(what, "step", 4) == 0);
}

static fsdp_status check_state(const fsdp_state_match *match, const fsdp_entry *entry,
                               fsdp_error *err)
{
    const fsdp_state_param *param;
    int64_t at = -1;
    FSDP_TRY(fsdp_state_find_state(match, entry, &param, &at, err));
    if (at >= 0 || !param || !param->state || !fsdp_state_has(match->scope, param))
        return FSDP_OK;
    const char *what = entry->name + entry->name_size;
    while (what[-1] != '.')
        what--;
    size_t size = (size_t)(entry->name + entry->name_size - what);
    if (is_spare(entry, what, size))
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_USAGE,
                     "cannot resume exactly from '%s': %s here does not keep this state; to resume "
                     "without it, drop it with fsdp-convert --drop '\\.%s$', or set partial",
                     entry->name, kind_of(param->optim), what);
}

fsdp_status fsdp_state_check_continues(const fsdp_state_match *match, fsdp_error *err)
{
    if (!match->groups || match->scope->opts.partial)
        return FSDP_OK;
    if (match->groups->refused.status != FSDP_OK) {
        if (err)
            *err = match->groups->refused;
        return FSDP_ERR_USAGE;
    }
    for (size_t i = 0; i < fsdp_sd_count(match->sd); i++)
        FSDP_TRY(check_state(match, fsdp_sd_at(match->sd, i), err));
    return FSDP_OK;
}
