/*
 * Runs that leave their whole state, and others that find it: for tests of state dicts of the FSDP1 face.
 */
#ifndef FSDP_WRAP_STATE_CASES_H
#define FSDP_WRAP_STATE_CASES_H

#include "tests/unit/runtime/wrap/wrap_expect.h"
#include <fsdp/state.h>

/* Whole state under the names that PyTorch gives it. */
static const fsdp_state_opts whole_model = {
    .part = FSDP_STATE_MODEL, .full_state_dict = true, .model_prefix = ""};
static const fsdp_state_opts whole_optim = {
    .part = FSDP_STATE_OPTIM, .full_state_dict = true, .nested_optim = true, .optim_prefix = ""};

static inline const fsdp_entry *find(const fsdp_sd *sd, const char *name)
{
    int64_t at = fsdp_sd_find(sd, name, strlen(name));
    return at < 0 ? NULL : fsdp_sd_at(sd, (size_t)at);
}

/* Two dicts of whole tensors: the same names, bits and values. */
static inline bool are_equal(const fsdp_sd *a, const fsdp_sd *b)
{
    if (fsdp_sd_count(a) != fsdp_sd_count(b))
        return false;
    for (size_t i = 0; i < fsdp_sd_count(a); i++) {
        const fsdp_entry *x = fsdp_sd_at(a, i), *y = find(b, x->name);
        if (!y || x->kind != y->kind)
            return false;
        if (x->kind == FSDP_ENTRY_VALUE && !fsdp_value_equal(&x->value, &y->value))
            return false;
        if (x->kind == FSDP_ENTRY_TENSOR &&
            (fsdp_entry_bytes(x) != fsdp_entry_bytes(y) ||
             memcmp(x->data, y->data, (size_t)fsdp_entry_bytes(x)) != 0))
            return false;
    }
    return true;
}

typedef struct state_case {
    net_setup setup;
    fsdp_status (*body)(toy *net, struct state_case *what, fsdp_error *err);
    int trained;            /* steps before the body */
    fsdp_sd *model, *optim; /* rank 0 leaves them, or finds them */
    const char *dir;
    fsdp_kind kind;
    bool flag;
    int allocations;
} state_case;

static inline fsdp_status run_case(world_rank *rank, fsdp_error *err)
{
    static net_result results[NET_MOST];
    state_case *what = rank->user;
    toy net;
    fsdp_status status = net_build(&net, rank->world, &what->setup, err);
    net_result *result = &results[fsdp_world_rank(rank->world)];
    if (status == FSDP_OK)
        status = net_train(&net, &what->setup, 0, what->trained, result, err);
    if (status == FSDP_OK)
        status = what->body(&net, what, err);
    toy_free(&net);
    return status;
}

static inline state_case case_of(fsdp_wrap_strategy strategy, bool orig,
                          fsdp_status (*body)(toy *, state_case *, fsdp_error *))
{
    state_case what = {.setup = net_setup_default(), .body = body};
    what.setup.wrap.unit.strategy = strategy;
    what.setup.wrap.use_orig_params = orig;
    what.setup.replicas = strategy >= FSDP_WRAP_HYBRID_SHARD ? 2 : 0;
    return what;
}

static inline fsdp_status leave_all(toy *net, state_case *what, fsdp_error *err)
{
    fsdp_state_opts on_rank0 = whole_model;
    fsdp_sd *model = NULL, *optim = NULL;
    on_rank0.cpu_offload = true;
    FSDP_TRY(fsdp_root_get_state(net->root, &on_rank0, &model, err));
    on_rank0 = whole_optim;
    on_rank0.cpu_offload = true;
    fsdp_status status = fsdp_root_get_state(net->root, &on_rank0, &optim, err);
    if (fsdp_world_rank(net->world) == 0 && status == FSDP_OK) {
        what->model = model;
        what->optim = optim;
        return FSDP_OK;
    }
    bool is_empty = status == FSDP_OK && fsdp_sd_count(model) == 0 && fsdp_sd_count(optim) == 0;
    fsdp_sd_free(model);
    fsdp_sd_free(optim);
    FSDP_TRY(status);
    EXPECT(is_empty);
    return FSDP_OK;
}

/* The state after two steps of four ranks. */
static inline state_case trained_by_four(bool orig)
{
    state_case what = case_of(FSDP_WRAP_FULL_SHARD, orig, leave_all);
    what.trained = 2;
    expect_ranks(4, run_case, &what);
    return what;
}

static inline void free_state(state_case *what)
{
    fsdp_sd_free(what->model);
    fsdp_sd_free(what->optim);
}

/* Is that the whole state of this one, too? */
static inline fsdp_status compare_with(toy *net, const state_case *expected, fsdp_error *err)
{
    fsdp_sd *model = NULL, *optim = NULL;
    FSDP_TRY(fsdp_root_get_state(net->root, &whole_model, &model, err));
    fsdp_status status = fsdp_root_get_state(net->root, &whole_optim, &optim, err);
    bool model_fits = are_equal(model, expected->model);
    bool optim_fits = status == FSDP_OK && are_equal(optim, expected->optim);
    fsdp_sd_free(model);
    fsdp_sd_free(optim);
    FSDP_TRY(status);
    EXPECT(model_fits);
    EXPECT(optim_fits);
    return FSDP_OK;
}

typedef struct move_case {
    state_case state; /* first: the ranks' user */
    const state_case *from;
    bool scatters, is_named; /* only rank 0 has the state; it is named, not numbered */
} move_case;

static inline fsdp_status expect_refused(fsdp_status status, const fsdp_error *why, const char *reason,
                                  fsdp_error *err)
{
    EXPECT(status == FSDP_ERR_USAGE);
    if (!strstr(why->text, reason))
        return fsdp_fail(err, FSDP_ERR_INTERNAL, "not '%s' but '%s'", reason, why->text);
    return FSDP_OK;
}

#endif
