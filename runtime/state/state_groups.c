/*
 * Hyper-parameters in state dicts, put there and taken from them: per parameter ("param_groups.<name>.lr") or
 * as one list of a dict per group ("param_groups", as Optimizer.state_dict() has it).
 */
#include "runtime/state/state_internal.h"
#include "base/data/param_groups.h"
#include "base/text.h"
#include "statedict/sd/layout_internal.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

/* === numbers ================================================================================== */

/* Numbers in state dicts: programs store them as values or as 0-d tensors of any type. */

static bool state_value_number(const fsdp_value *value, double *number_out)
{
    switch (value->kind) {
    case FSDP_VALUE_BOOL: *number_out = value->as.boolean; return true;
    case FSDP_VALUE_I64: *number_out = (double)value->as.i64; return true;
    case FSDP_VALUE_U64: *number_out = (double)value->as.u64; return true;
    case FSDP_VALUE_F64: *number_out = value->as.f64; return true;
    default: return false;
    }
}

static bool is_integer(fsdp_dtype dtype)
{
    return dtype >= FSDP_I64 && dtype <= FSDP_BOOL;
}

/* Reads an integer of any size; little-endian, as memory is. */
static double read_integer(const void *data, fsdp_dtype dtype)
{
    uint64_t bits = 0;
    size_t size = fsdp_dtype_size(dtype);
    unsigned unused = (unsigned)(64 - 8 * size);
    memcpy(&bits, data, size);
    return dtype <= FSDP_I8 ? (double)((int64_t)(bits << unused) >> unused) : (double)bits;
}

bool fsdp_state_number(const fsdp_entry *entry, double *number_out)
{
    if (entry->kind == FSDP_ENTRY_VALUE)
        return state_value_number(&entry->value, number_out);
    if (entry->kind != FSDP_ENTRY_TENSOR || entry->ndim != 0 || !entry->data)
        return false;
    bool is_float = fsdp_dtype_describe(entry->dtype)->is_float;
    if (is_float)
        fsdp_cast(number_out, FSDP_F64, entry->data, entry->dtype, 1);
    else if (is_integer(entry->dtype))
        *number_out = read_integer(entry->data, entry->dtype);
    return is_float || is_integer(entry->dtype);
}

/* A double holds integers up to 2^53 only. */
static int64_t integer_of(const fsdp_entry *from, double number)
{
    if (from->kind == FSDP_ENTRY_VALUE && from->value.kind == FSDP_VALUE_I64)
        return from->value.as.i64;
    return fabs(number) < 0x1p63 ? (int64_t)number : 0;
}

bool fsdp_state_set_number(const fsdp_entry *to, const fsdp_entry *from)
{
    size_t size = fsdp_dtype_size(to->dtype);
    double number;
    if (from->kind == FSDP_ENTRY_TENSOR && from->ndim == 0 && from->dtype == to->dtype &&
        from->data) {
        memmove(to->data, from->data, size);
        return true;
    }
    if (!fsdp_state_number(from, &number))
        return false;
    int64_t integer = integer_of(from, number);
    if (fsdp_dtype_describe(to->dtype)->is_float)
        fsdp_cast(to->data, to->dtype, &number, FSDP_F64, 1);
    else if (is_integer(to->dtype))
        memcpy(to->data, &integer, size);
    else
        return false;
    return true;
}

typedef struct fsdp_state_hyper {
    const char *name;
    double *numbers[2]; /* live; betas have two */
    bool *flag;         /* or this */
    bool is_shared;     /* by all groups of the optimizer */
} fsdp_state_hyper;

/* === groups =================================================================================== */

/*
 * Matches numbers in a state dict with parameters, and its groups with those of the root's optimizers, whose
 * hyper-parameters it finds by name. Groups are found by their parameters, in any order.
 */

/* A hyper-parameter of a dict. */
typedef struct fsdp_state_taken {
    const fsdp_entry *entry; /* its source; NULL: not taken yet */
    double numbers[2];
} fsdp_state_taken;

struct fsdp_state_groups {
    const fsdp_state_scope *scope;
    const fsdp_sd *sd;
    fsdp_param_groups stored; /* the groups of the dict */
    fsdp_state_taken *taken;  /* per group and hyper-parameter; shared ones in the first group */
    fsdp_state_param **order; /* parameters by their number, if there is one optimizer */
    size_t order_count;
    int64_t *numbers; /* their numbers in the dict; NULL: 0, 1, 2, ... */
    size_t number_count, number_room;
    const fsdp_entry **coupled; /* per group: says that its decay is Adam's; or NULL */
    fsdp_error refused;         /* the first member that cannot be continued here */
    fsdp_name_list *missing, *unexpected;
};

/* A group of the root's optimizers; optimizer NULL: not found. */
typedef struct fsdp_state_group {
    fsdp_optim *optim;
    size_t group;
    const char *member; /* the first member that was found */
} fsdp_state_group;

enum { FSDP_STATE_HYPERS = 6 };

/* --- numbers ---------------------------------------------------------------------------------- */

/* Fills `order`: an optimizer numbers the parameters of its first group, then those of the next. */
static fsdp_status state_order_params(fsdp_state_groups *groups, fsdp_error *err)
{
    const fsdp_state_scope *scope = groups->scope;
    groups->order = fsdp_alloc(scope->count, sizeof(fsdp_state_param *));
    if (!groups->order)
        return fsdp_fail_memory(err, "the groups of an optimizer");
    for (size_t g = 0; scope->optim_count == 1 && g < scope->optims[0]->group_count; g++)
        for (size_t i = 0; i < scope->count; i++)
            if (scope->params[i].state && scope->params[i].group == g)
                groups->order[groups->order_count++] = &scope->params[i];
    return FSDP_OK;
}

/* The parameter that has this number in the dict; NULL: none. */
static fsdp_state_param *find_numbered(const fsdp_state_groups *groups, int64_t number)
{
    size_t at = 0;
    if (!groups->numbers)
        at = (size_t)number;
    else
        while (at < groups->number_count && groups->numbers[at] != number)
            at++;
    return at < groups->order_count ? groups->order[at] : NULL;
}

/* Sets `numbers`: those of all listed groups, in the order of their places. */
static fsdp_status note_numbers(fsdp_state_groups *groups, fsdp_error *err)
{
    for (size_t i = 0; i < groups->stored.count; i++) {
        const fsdp_group_item *member = groups->stored.items[i].params.first;
        for (; member; member = member->next) {
            if (member->name || member->value->kind != FSDP_VALUE_I64)
                continue;
            if (!fsdp_grow(&groups->numbers, &groups->number_room, groups->number_count + 1,
                           sizeof *groups->numbers))
                return fsdp_fail_memory(err, "the groups of an optimizer");
            groups->numbers[groups->number_count++] = member->value->as.i64;
        }
    }
    return FSDP_OK;
}

/* --- keys ------------------------------------------------------------------------------------- */

/* "<name>.<what>". Names contain dots, so <name> is the longest known one. */
typedef struct state_key {
    fsdp_state_param *param; /* NULL: number */
    int64_t number;
    const char *what;
    size_t what_size;
} state_key;

/* "12.<what>" */
static bool split_number(const char *text, size_t size, state_key *key_out)
{
    enum { DIGITS = 9 };
    int64_t number = 0;
    size_t at = 0;
    for (; at < size && at < DIGITS && text[at] >= '0' && text[at] <= '9'; at++)
        number = number * 10 + (text[at] - '0');
    if (at == 0 || at + 1 >= size || text[at] != '.')
        return false;
    *key_out = (state_key){NULL, number, text + at + 1, size - at - 1};
    return true;
}

static bool split_key(const fsdp_state_scope *scope, const char *text, size_t size,
                      state_key *key_out)
{
    for (size_t at = size; at-- > 0;) {
        fsdp_state_param *param = text[at] == '.' ? fsdp_state_find(scope, text, at) : NULL;
        if (!param)
            continue;
        *key_out = (state_key){param, -1, text + at + 1, size - at - 1};
        return true;
    }
    return split_number(text, size, key_out);
}

fsdp_status fsdp_state_find_state(const fsdp_state_match *match, const fsdp_entry *entry,
                                  const fsdp_state_param **param_out, int64_t *at_out,
                                  fsdp_error *err)
{
    const fsdp_state_scope *scope = match->scope;
    const char *prefix = scope->opts.optim_prefix;
    state_key key;
    size_t size;
    const char *rest = fsdp_state_behind(entry->name, entry->name_size, prefix, "state.", &size);
    *param_out = NULL;
    if (!rest || !match->groups || !split_key(scope, rest, size, &key))
        return FSDP_OK;
    const fsdp_state_param *param =
        key.param ? key.param : find_numbered(match->groups, key.number);
    if (!param || param->count == 0)
        return FSDP_OK;
    *param_out = param;
    fsdp_text name = {0};
    fsdp_text_addf(&name, "%sstate.%s.", prefix, param->names[0]);
    fsdp_text_add(&name, key.what, key.what_size);
    fsdp_status status = name.failed ? fsdp_fail_memory(err, entry->name) : FSDP_OK;
    if (status == FSDP_OK)
        *at_out = fsdp_sd_find(match->live, name.data, name.size);
    fsdp_text_release(&name);
    return status;
}

/* --- groups ----------------------------------------------------------------------------------- */

static size_t state_list_hypers(fsdp_optim *optim, size_t group,
                                fsdp_state_hyper hypers_out[FSDP_STATE_HYPERS])
{
    fsdp_optim_params *params = &optim->groups[group];
    fsdp_adamw_opts *adamw = &optim->adamw;
    fsdp_sgd_opts *sgd = &optim->sgd;
    size_t n = 0;
    hypers_out[n++] = (fsdp_state_hyper){"lr", {&params->lr}, NULL, false};
    if (optim->kind == FSDP_OPTIM_ADAMW) {
        hypers_out[n++] = (fsdp_state_hyper){"betas", {&adamw->beta1, &adamw->beta2}, NULL, true};
        hypers_out[n++] = (fsdp_state_hyper){"eps", {&adamw->eps}, NULL, true};
    } else {
        hypers_out[n++] = (fsdp_state_hyper){"momentum", {&sgd->momentum}, NULL, true};
        hypers_out[n++] = (fsdp_state_hyper){"dampening", {&sgd->dampening}, NULL, true};
    }
    hypers_out[n++] = (fsdp_state_hyper){"weight_decay", {&params->weight_decay}, NULL, false};
    if (optim->kind == FSDP_OPTIM_ADAMW) {
        hypers_out[n++] = (fsdp_state_hyper){"maximize", {NULL}, &adamw->maximize, true};
    } else {
        hypers_out[n++] = (fsdp_state_hyper){"nesterov", {NULL}, &sgd->nesterov, true};
        hypers_out[n++] = (fsdp_state_hyper){"maximize", {NULL}, &sgd->maximize, true};
    }
    return n;
}

/* The number of groups of all optimizers before `until`. */
static size_t state_count_groups(const fsdp_state_scope *scope, const fsdp_optim *until)
{
    size_t count = 0;
    for (size_t i = 0; i < scope->optim_count && scope->optims[i] != until; i++)
        count += scope->optims[i]->group_count;
    return count;
}

static fsdp_state_param *find_member(const fsdp_state_groups *groups, const fsdp_group_item *member)
{
    fsdp_state_param *param = NULL;
    if (member->name)
        param = fsdp_state_find(groups->scope, member->name, member->size);
    else if (member->value->kind == FSDP_VALUE_I64)
        param = find_numbered(groups, member->value->as.i64);
    return param && param->state ? param : NULL;
}

/* Finds the group by its members. */
static fsdp_status find_by_members(const fsdp_state_groups *groups, const fsdp_param_group *stored,
                                   fsdp_state_group *found_out, fsdp_error *err)
{
    for (const fsdp_group_item *item = stored->params.first; item; item = item->next) {
        const fsdp_state_param *param = find_member(groups, item);
        if (!param)
            continue;
        const fsdp_state_group live = {param->optim, param->group, param->param->name};
        if (found_out->optim && (live.optim != found_out->optim || live.group != found_out->group))
            return fsdp_fail(err, FSDP_ERR_USAGE,
                             "a group of '%s' has '%s' and '%s', which are in two groups here",
                             fsdp_sd_at(groups->sd, stored->listed)->name, found_out->member,
                             live.member);
        if (!found_out->optim)
            *found_out = live;
    }
    return FSDP_OK;
}

static bool has_members(const fsdp_state_scope *scope, size_t group)
{
    for (size_t i = 0; i < scope->count; i++)
        if (scope->params[i].state && scope->params[i].group == group)
            return true;
    return false;
}

/* Finds the only group without members, for a list that has exactly one such group, too.
 * A group without parameters matches one without, if each side has exactly one. */
static fsdp_status find_empty(const fsdp_state_groups *groups, const fsdp_param_group *stored,
                              fsdp_state_group *found_out, fsdp_error *err)
{
    const fsdp_state_scope *scope = groups->scope;
    size_t there = 0, here = 0;
    for (size_t i = 0; i < groups->stored.count; i++)
        there += groups->stored.items[i].entry == stored->entry &&
                 groups->stored.items[i].params.count == 0;
    for (size_t g = 0; scope->optim_count == 1 && g < scope->optims[0]->group_count; g++)
        if (!has_members(scope, g)) {
            *found_out = (fsdp_state_group){.optim = scope->optims[0], .group = g};
            here++;
        }
    if (there == 1 && here == 1)
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_USAGE,
                     "'%s' has %zu groups without parameters, of which one is possible, with one "
                     "optimizer that has one such group: here are %zu",
                     fsdp_sd_at(groups->sd, stored->entry)->name, there, here);
}

/* The group at a place in the list of the groups of all optimizers. */
static void find_place(const fsdp_state_scope *scope, size_t place, fsdp_state_group *found_out)
{
    for (size_t i = 0; i < scope->optim_count; i++) {
        fsdp_optim *optim = scope->optims[i];
        if (place < optim->group_count) {
            *found_out = (fsdp_state_group){.optim = optim, .group = place};
            return;
        }
        place -= optim->group_count;
    }
}

/* Finds the group here for one of the dict: by its members; without them in PLACES the one at its place, and
 * in a list the one that has none, too. */
static fsdp_status find_live(const fsdp_state_groups *groups, const fsdp_param_group *stored,
                             fsdp_state_group *found_out, fsdp_error *err)
{
    *found_out = (fsdp_state_group){0};
    FSDP_TRY(find_by_members(groups, stored, found_out, err));
    if (stored->params.count == 0 && stored->spelling == FSDP_GROUPS_PLACES)
        find_place(groups->scope, stored->place, found_out);
    return stored->params.count == 0 && stored->spelling == FSDP_GROUPS_LIST
               ? find_empty(groups, stored, found_out, err)
               : FSDP_OK;
}

/* --- hyper-parameters -------------------------------------------------------------------------- */

/* The place of hyper-parameter number `which` of a group, as state_list_hypers counts. */
static fsdp_state_taken *state_place_taken(const fsdp_state_groups *groups, const fsdp_optim *optim,
                                           size_t group, size_t which, bool is_shared)
{
    size_t before = state_count_groups(groups->scope, optim);
    return &groups->taken[(before + (is_shared ? 0 : group)) * FSDP_STATE_HYPERS + which];
}

/* The place of a group's hyper-parameter of that name; NULL: the optimizer has none. */
static fsdp_state_taken *state_find_hyper(const fsdp_state_groups *groups,
                                          const fsdp_state_group *live, const char *what,
                                          size_t size, fsdp_state_hyper *hyper_out)
{
    fsdp_state_hyper hypers[FSDP_STATE_HYPERS];
    size_t n = state_list_hypers(live->optim, live->group, hypers);
    for (size_t i = 0; i < n; i++)
        if (strlen(hypers[i].name) == size && memcmp(hypers[i].name, what, size) == 0) {
            *hyper_out = hypers[i];
            return state_place_taken(groups, live->optim, live->group, i, hypers[i].is_shared);
        }
    return NULL;
}

/* Number of a group among those of all optimizers. */
static size_t state_group_number(const fsdp_state_groups *groups, const fsdp_state_group *live)
{
    return state_count_groups(groups->scope, live->optim) + live->group;
}

/* The number that a group's hyper-parameter will have; false: the optimizer has no such. */
static bool state_coming(const fsdp_state_groups *groups, const fsdp_state_group *live,
                         const char *name, double *number_out)
{
    fsdp_state_hyper hyper;
    const fsdp_state_taken *taken = state_find_hyper(groups, live, name, strlen(name), &hyper);
    if (!taken)
        return false;
    *number_out = taken->entry ? taken->numbers[0] : hyper.flag ? *hyper.flag : *hyper.numbers[0];
    return true;
}

/* === members that no optimizer here can continue ============================================== */

/*
 * Refuses state and hyper-parameters that no optimizer here can continue: with them left out, the steps would
 * be others than those of the program that saved them, and nobody would see why. state_groups.c calls
 * state_judge for members that an optimizer lacks; fsdp_state_check_continues comes after all names.
 */

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

static void refuse(fsdp_state_groups *groups, const fsdp_entry *entry, const fsdp_optim *optim,
                   const neutral_member *member, double number)
{
    if (groups->refused.status == FSDP_OK)
        (void)fsdp_fail(&groups->refused, FSDP_ERR_USAGE,
                        "'%s' is %g in '%s', and %s here cannot continue that: to resume without "
                        "it, drop it with fsdp-convert --drop '%s', or set partial",
                        member->name, number, entry->name, kind_of(optim), member->drop);
}

/* Notes in groups->refused a member that the optimizer here lacks and that changes its steps; others are
 * ignored. */
static void state_judge(fsdp_state_groups *groups, const fsdp_group_item *member,
                        const fsdp_value *value, const fsdp_state_group *live)
{
    const fsdp_entry *entry = fsdp_sd_at(groups->sd, member->entry);
    double number;
    if (!state_value_number(value, &number))
        return;
    if (fsdp_bytes_are(member->name, member->size, "decoupled_weight_decay") && number == 0 &&
        live->optim->kind == FSDP_OPTIM_ADAMW)
        groups->coupled[state_group_number(groups, live)] = entry;
    for (size_t i = 0; i < sizeof neutral_members / sizeof *neutral_members; i++)
        if (fsdp_bytes_are(member->name, member->size, neutral_members[i].name) &&
            number != neutral_members[i].number)
            refuse(groups, entry, live->optim, &neutral_members[i], number);
}

/* --- members that depend on each other -------------------------------------------------------- */

/* Adam adds its decay to the gradient. Without a decay it is AdamW. */
static void judge_decay(fsdp_state_groups *groups, const fsdp_state_group *live)
{
    const fsdp_entry *entry = groups->coupled[state_group_number(groups, live)];
    double decay;
    if (!entry || !state_coming(groups, live, "weight_decay", &decay) || decay == 0 ||
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
    if (!state_coming(groups, live, "nesterov", &nesterov))
        return FSDP_OK;
    (void)state_coming(groups, live, "momentum", &momentum);
    (void)state_coming(groups, live, "dampening", &dampening);
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

/* Checks what depends on several members, after all were taken. */
static fsdp_status state_judge_groups(fsdp_state_groups *groups, fsdp_error *err)
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

/* FSDP_ERR_USAGE for state and hyper-parameters with which the optimizers here would not step as those that
 * saved them (state_set.c). */
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

/* === taking hyper-parameters ================================================================== */

/*
 * Takes hyper-parameters from state dicts, in every form: per parameter, as a list of groups, or that list in
 * pieces. All are checked before any is applied; two values for one group are an error. The inverse is
 * state_groups.c.
 */

/* --- one hyper-parameter ---------------------------------------------------------------------- */

static bool read_numbers(const fsdp_state_hyper *hyper, const fsdp_value *value,
                         double numbers_out[2])
{
    numbers_out[1] = 0;
    if (!hyper->numbers[1])
        return state_value_number(value, &numbers_out[0]);
    return value->kind == FSDP_VALUE_LIST && value->as.list.count == 2 &&
           state_value_number(&value->as.list.items[0], &numbers_out[0]) &&
           state_value_number(&value->as.list.items[1], &numbers_out[1]);
}

/* The numbers that optim.h accepts. */
static fsdp_status check_range(const fsdp_state_hyper *hyper, const double numbers[2],
                               const fsdp_entry *entry, fsdp_error *err)
{
    bool may_be_negative = strcmp(hyper->name, "dampening") == 0;
    for (int i = 0; i < 2; i++)
        if (!isfinite(numbers[i]) || (numbers[i] < 0 && !may_be_negative) ||
            (hyper->numbers[1] && numbers[i] >= 1))
            return fsdp_fail(err, FSDP_ERR_USAGE, "'%s' in '%s' cannot be %g", hyper->name,
                             entry->name, numbers[i]);
    return FSDP_OK;
}

/* Keeps a value of a hyper-parameter; another value before it is an error. */
static fsdp_status keep(fsdp_state_taken *taken, const fsdp_state_hyper *hyper,
                        const fsdp_entry *entry, const fsdp_value *value, fsdp_error *err)
{
    double numbers[2];
    if (!read_numbers(hyper, value, numbers))
        return fsdp_fail(err, FSDP_ERR_USAGE, "'%s' in '%s' is %s", hyper->name, entry->name,
                         hyper->numbers[1] ? "no list of two numbers" : "no number");
    FSDP_TRY(check_range(hyper, numbers, entry, err));
    if (taken->entry && memcmp(taken->numbers, numbers, sizeof numbers) != 0)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "'%s' differs between '%s' and '%s', and both belong to one %s here",
                         hyper->name, taken->entry->name, entry->name,
                         hyper->is_shared ? "optimizer" : "group");
    taken->entry = entry;
    memcpy(taken->numbers, numbers, sizeof numbers);
    return FSDP_OK;
}

/* --- taking: what the dict has ---------------------------------------------------------------- */

static fsdp_status note_unexpected(fsdp_state_groups *groups, const char *name, size_t size,
                                   fsdp_error *err)
{
    return fsdp_names_add(groups->unexpected, name, size)
               ? FSDP_OK
               : fsdp_fail_memory(err, "a list of names");
}

/* Reads a list of groups, of which each has a list of parameters. */
static fsdp_status read_list(fsdp_state_groups *groups, fsdp_group_source *from, fsdp_error *err)
{
    size_t first = groups->stored.count;
    bool fits = from->value && from->value->kind == FSDP_VALUE_LIST;
    if (fits)
        FSDP_TRY(fsdp_groups_read(&groups->stored, from, err));
    for (size_t i = first; i < groups->stored.count; i++)
        fits = fits && groups->stored.items[i].is_listed;
    if (fits)
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_USAGE, "'%s' is no list of groups, each with a list 'params'",
                     from->name);
}

/* Reads an option: its key is the longest known name of a parameter, or a place. Older checkpoints of PyTorch
 * have the list "params" of a place in pieces, which are not needed. */
static fsdp_status read_option(fsdp_state_groups *groups, fsdp_group_source *from, size_t size,
                               fsdp_error *err)
{
    state_key key;
    if (!split_key(groups->scope, from->name + from->parts.key, size - from->parts.key, &key))
        return note_unexpected(groups, from->name, size, err);
    if (!key.param && key.what_size > 6 && memcmp(key.what, "params.", 7) == 0)
        return FSDP_OK;
    from->spelling = key.param ? FSDP_GROUPS_NAMES : FSDP_GROUPS_PLACES;
    from->parts.option = (size_t)(key.what - from->name);
    from->parts.option_size = key.what_size;
    from->parts.key_size = from->parts.option - 1 - from->parts.key;
    return fsdp_groups_read(&groups->stored, from, err);
}

static fsdp_status read_stored(fsdp_state_groups *groups, fsdp_error *err)
{
    for (size_t i = 0; i < fsdp_sd_count(groups->sd); i++) {
        const fsdp_entry *entry = fsdp_sd_at(groups->sd, i);
        size_t rest, prefix = strlen(groups->scope->opts.optim_prefix);
        const char *name = fsdp_state_behind(
            entry->name, entry->name_size, groups->scope->opts.optim_prefix, "param_groups", &rest);
        fsdp_group_source from = {.name = entry->name,
                                  .parts = {.prefix_size = prefix},
                                  .value = entry->kind == FSDP_ENTRY_VALUE ? &entry->value : NULL,
                                  .entry = i};
        if (name && rest == 0)
            FSDP_TRY(read_list(groups, &from, err));
        if (!name || rest < 2 || name[0] != '.')
            continue;
        from.parts.key = (size_t)(name - entry->name) + 1;
        FSDP_TRY(read_option(groups, &from, entry->name_size, err));
    }
    fsdp_groups_sort(&groups->stored);
    return note_numbers(groups, err);
}

/* --- taking: groups --------------------------------------------------------------------------- */

/* Notes a group, or a member of it, that no optimizer here has: by its entry, or by its place in a list. */
static fsdp_status note_unexpected_member(fsdp_state_groups *groups, const fsdp_param_group *stored,
                                          const fsdp_group_item *member, fsdp_error *err)
{
    const fsdp_entry *entry = fsdp_sd_at(groups->sd, member ? member->entry : stored->entry);
    if (stored->spelling != FSDP_GROUPS_LIST)
        return note_unexpected(groups, entry->name, entry->name_size, err);
    fsdp_text text = {0};
    fsdp_text_addf(&text, "%s.%zu", entry->name, stored->place);
    if (member && member->name)
        fsdp_text_addf(&text, ".%s", member->name);
    fsdp_status status = text.failed ? fsdp_fail_memory(err, "a list of names")
                                     : note_unexpected(groups, text.data, text.size, err);
    fsdp_text_release(&text);
    return status;
}

/* Takes a member of a group; one that the optimizer here lacks is passed over. */
static fsdp_status take_member(fsdp_state_groups *groups, const fsdp_param_group *stored,
                               const fsdp_group_item *member, const fsdp_state_group *live,
                               fsdp_error *err)
{
    const fsdp_entry *entry = fsdp_sd_at(groups->sd, member->entry);
    fsdp_value value = {0};
    fsdp_state_hyper hyper;
    double number;
    if (!live->optim || !member->name)
        return note_unexpected_member(groups, stored, member, err);
    if (member->value)
        value = *member->value;
    else if (fsdp_state_number(entry, &number))
        value = fsdp_value_f64(number);
    fsdp_state_taken *taken = state_find_hyper(groups, live, member->name, member->size, &hyper);
    if (taken)
        return keep(taken, &hyper, entry, &value, err);
    state_judge(groups, member, &value, live);
    return note_unexpected_member(groups, stored, member, err);
}

static fsdp_status take_group(fsdp_state_groups *groups, const fsdp_param_group *stored,
                              fsdp_error *err)
{
    fsdp_state_group live;
    FSDP_TRY(find_live(groups, stored, &live, err));
    if (!live.optim && stored->spelling == FSDP_GROUPS_LIST)
        return note_unexpected_member(groups, stored, NULL, err);
    for (const fsdp_group_item *member = stored->options.first; member; member = member->next)
        FSDP_TRY(take_member(groups, stored, member, &live, err));
    return FSDP_OK;
}

/* The first selected parameter of a group; NULL: none is selected. */
static const fsdp_state_param *first_member(const fsdp_state_scope *scope, const fsdp_optim *optim,
                                            size_t group, bool any_group)
{
    for (size_t i = 0; i < scope->count; i++) {
        const fsdp_state_param *param = &scope->params[i];
        if (param->optim == optim && (any_group || param->group == group) &&
            fsdp_state_has(scope, param))
            return param;
    }
    return NULL;
}

static fsdp_status note_missing(fsdp_state_groups *groups, fsdp_optim *optim, size_t group,
                                fsdp_error *err)
{
    fsdp_state_hyper hypers[FSDP_STATE_HYPERS];
    size_t n = state_list_hypers(optim, group, hypers);
    for (size_t i = 0; i < n; i++) {
        const fsdp_state_param *param =
            first_member(groups->scope, optim, group, hypers[i].is_shared);
        if (!param || (hypers[i].is_shared && group > 0) ||
            state_place_taken(groups, optim, group, i, hypers[i].is_shared)->entry)
            continue;
        fsdp_text name = {0};
        fsdp_text_addf(&name, "%sparam_groups.%s.%s", groups->scope->opts.optim_prefix,
                       param->names[0], hypers[i].name);
        bool added = !name.failed && fsdp_names_add(groups->missing, name.data, name.size);
        fsdp_text_release(&name);
        if (!added)
            return fsdp_fail_memory(err, "a list of names");
    }
    return FSDP_OK;
}

static fsdp_status fill(fsdp_state_groups *groups, fsdp_error *err)
{
    const fsdp_state_scope *scope = groups->scope;
    size_t count = state_count_groups(scope, NULL);
    groups->taken = fsdp_alloc(count * FSDP_STATE_HYPERS, sizeof *groups->taken);
    groups->coupled = fsdp_alloc(count, sizeof(fsdp_entry *));
    if (!groups->taken || !groups->coupled)
        return fsdp_fail_memory(err, "the groups of an optimizer");
    FSDP_TRY(state_order_params(groups, err));
    FSDP_TRY(read_stored(groups, err));
    for (size_t i = 0; i < groups->stored.count; i++)
        FSDP_TRY(take_group(groups, &groups->stored.items[i], err));
    for (size_t i = 0; i < scope->optim_count; i++)
        for (size_t g = 0; g < scope->optims[i]->group_count; g++)
            FSDP_TRY(note_missing(groups, scope->optims[i], g, err));
    return state_judge_groups(groups, err);
}

fsdp_status fsdp_state_take_groups(const fsdp_state_scope *scope, const fsdp_sd *sd,
                                   fsdp_name_list *missing, fsdp_name_list *unexpected,
                                   fsdp_state_groups **groups_out, fsdp_error *err)
{
    fsdp_state_groups *groups = fsdp_alloc(1, sizeof *groups);
    *groups_out = groups;
    if (!groups)
        return fsdp_fail_memory(err, "the groups of an optimizer");
    groups->scope = scope;
    groups->sd = sd;
    groups->missing = missing;
    groups->unexpected = unexpected;
    return fill(groups, err);
}

void fsdp_state_groups_free(fsdp_state_groups *groups)
{
    if (!groups)
        return;
    fsdp_groups_release(&groups->stored);
    fsdp_free(groups->taken);
    fsdp_free(groups->coupled);
    fsdp_free(groups->order);
    fsdp_free(groups->numbers);
    fsdp_free(groups);
}

/* --- applying --------------------------------------------------------------------------------- */

static void apply(const fsdp_state_hyper *hyper, const fsdp_state_taken *taken)
{
    if (!taken->entry)
        return;
    if (hyper->flag)
        *hyper->flag = taken->numbers[0] != 0;
    for (int i = 0; i < 2 && hyper->numbers[i]; i++)
        *hyper->numbers[i] = taken->numbers[i];
}

void fsdp_state_apply_groups(const fsdp_state_groups *groups)
{
    const fsdp_state_scope *scope = groups->scope;
    for (size_t i = 0; i < scope->optim_count; i++)
        for (size_t g = 0; g < scope->optims[i]->group_count; g++) {
            fsdp_state_hyper hypers[FSDP_STATE_HYPERS];
            size_t n = state_list_hypers(scope->optims[i], g, hypers);
            for (size_t h = 0; h < n; h++)
                apply(&hypers[h],
                      state_place_taken(groups, scope->optims[i], g, h, hypers[h].is_shared));
        }
}

/* === putting hyper-parameters ================================================================= */

static fsdp_status hyper_value(const fsdp_state_hyper *from, fsdp_value *value_out, fsdp_error *err)
{
    *value_out = (fsdp_value){0};
    if (from->flag)
        *value_out = fsdp_value_bool(*from->flag);
    else if (!from->numbers[1])
        *value_out = fsdp_value_f64(*from->numbers[0]);
    else
        FSDP_TRY(fsdp_value_set_items(value_out, FSDP_VALUE_LIST, 2, err));
    value_out->is_tuple = value_out->kind == FSDP_VALUE_LIST; /* as PyTorch has betas */
    for (size_t i = 0; value_out->kind == FSDP_VALUE_LIST && i < 2; i++)
        value_out->as.list.items[i] = fsdp_value_f64(*from->numbers[i]);
    return FSDP_OK;
}

/* Holds the groups of all optimizers, one after the other, and the values of their options. */
typedef struct live_groups {
    const fsdp_state_scope *scope;
    fsdp_param_groups model;
    fsdp_value *values;
    size_t value_count;
    fsdp_sd *sd;
} live_groups;

static fsdp_status describe_group(live_groups *live, fsdp_optim *optim, size_t number,
                                  fsdp_error *err)
{
    fsdp_state_hyper hypers[FSDP_STATE_HYPERS];
    size_t n = state_list_hypers(optim, number, hypers);
    const char *prefix = live->scope->opts.optim_prefix;
    fsdp_param_group *group;
    FSDP_TRY(fsdp_groups_add(&live->model,
                             &(fsdp_param_group){.prefix = prefix,
                                                 .prefix_size = strlen(prefix),
                                                 .place = live->model.count,
                                                 .is_listed = true},
                             &group, err));
    for (size_t i = 0; i < n; i++) {
        fsdp_value *value = &live->values[live->value_count++];
        FSDP_TRY(hyper_value(&hypers[i], value, err));
        FSDP_TRY(fsdp_group_add(&live->model, &group->options,
                                (fsdp_group_item){.name = hypers[i].name,
                                                  .size = strlen(hypers[i].name),
                                                  .value = value},
                                err));
    }
    return FSDP_OK;
}

static fsdp_status describe_groups(live_groups *live, fsdp_error *err)
{
    const fsdp_state_scope *scope = live->scope;
    live->values =
        fsdp_alloc(state_count_groups(scope, NULL) * FSDP_STATE_HYPERS, sizeof(fsdp_value));
    if (!live->values)
        return fsdp_fail_memory(err, "the groups of an optimizer");
    for (size_t i = 0; i < scope->optim_count; i++)
        for (size_t g = 0; g < scope->optims[i]->group_count; g++)
            FSDP_TRY(describe_group(live, scope->optims[i], g, err));
    return FSDP_OK;
}

/* Returns the description of a parameter's group. */
static fsdp_param_group *group_of(const live_groups *live, const fsdp_state_param *param)
{
    return &live->model.items[state_count_groups(live->scope, param->optim) + param->group];
}

static fsdp_status put_entry(void *context, const fsdp_group_entry *entry, fsdp_error *err)
{
    const live_groups *live = context;
    return fsdp_sd_add_value(live->sd, entry->name, entry->name_size, entry->value, err);
}

/* Once per parameter, in the order of the parameters. */
static fsdp_status put_flattened(live_groups *live, fsdp_error *err)
{
    const fsdp_state_scope *scope = live->scope;
    for (size_t i = 0; i < scope->count; i++) {
        const fsdp_state_param *param = &scope->params[i];
        if (!param->state || !fsdp_state_has(scope, param))
            continue;
        fsdp_group_item name = {.name = param->names[0], .size = strlen(param->names[0])};
        fsdp_param_group group = *group_of(live, param);
        group.params = (fsdp_group_items){&name, &name, 1};
        FSDP_TRY(fsdp_group_put(&group, FSDP_GROUPS_NAMES, put_entry, live, err));
    }
    return FSDP_OK;
}

static fsdp_status list_groups(live_groups *live, fsdp_value *list, fsdp_error *err)
{
    const fsdp_state_scope *scope = live->scope;
    for (size_t i = 0; i < scope->count; i++) {
        const fsdp_state_param *param = &scope->params[i];
        if (!param->optim || !fsdp_state_has(scope, param))
            continue;
        const fsdp_group_item name = {.name = param->names[0], .size = strlen(param->names[0])};
        FSDP_TRY(fsdp_group_add(&live->model, &group_of(live, param)->params, name, err));
    }
    FSDP_TRY(fsdp_value_set_items(list, FSDP_VALUE_LIST, live->model.count, err));
    for (size_t i = 0; i < live->model.count; i++)
        FSDP_TRY(fsdp_group_dict(&live->model.items[i], &list->as.list.items[i], err));
    return FSDP_OK;
}

/* As one list with a dict per group. */
static fsdp_status put_nested(live_groups *live, fsdp_error *err)
{
    static const char last[] = "param_groups";
    const char *prefix = live->scope->opts.optim_prefix;
    size_t size = strlen(prefix);
    const int32_t path[] = {(int32_t)size - 1, sizeof last - 1};
    fsdp_text name = {0};
    fsdp_value list = {0};
    fsdp_text_addf(&name, "%s%s", prefix, last);
    fsdp_status status = name.failed ? fsdp_fail_memory(err, last) : list_groups(live, &list, err);
    if (status == FSDP_OK)
        status = fsdp_sd_add_value(live->sd, name.data, name.size, &list, err);
    if (status == FSDP_OK && size > 1 && prefix[size - 1] == '.')
        status = fsdp_sd_set_path(live->sd, fsdp_sd_count(live->sd) - 1, path, 2, err);
    fsdp_value_release(&list);
    fsdp_text_release(&name);
    return status;
}

fsdp_status fsdp_state_put_groups(const fsdp_state_scope *scope, fsdp_sd *sd, fsdp_error *err)
{
    live_groups live = {.scope = scope, .sd = sd};
    fsdp_status status = describe_groups(&live, err);
    if (status == FSDP_OK)
        status = scope->opts.nested_optim ? put_nested(&live, err) : put_flattened(&live, err);
    for (size_t i = 0; i < live.value_count; i++)
        fsdp_value_release(&live.values[i]);
    fsdp_free(live.values);
    fsdp_groups_release(&live.model);
    return status;
}
