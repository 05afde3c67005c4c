/* A toy with everything that a state dict can hold, for tests of state dicts over thread ranks. Its AdamW has
 * two groups: 0 decays, 1 (biases) does not. */
#ifndef FSDP_STATE_NET_H
#define FSDP_STATE_NET_H

#include "tests/support/nets/tensors.h"
#include "tests/support/nets/toy.h"
#include <fsdp/root_init.h>
#include <fsdp/state.h>

#include <stdio.h>
#include <string.h>

/* --- nets --------------------------------------------------------------------------------------- */

static inline fsdp_status net_add(toy *net, const char *name, int ndim, const int64_t *shape,
                                  fsdp_param **param_out, fsdp_error *err)
{
    const fsdp_param_spec spec = {.name = name, .dtype = FSDP_F32, .ndim = ndim, .shape = shape};
    return fsdp_model_add(net->model, &spec, param_out, err);
}

static inline fsdp_status net_unit(toy *net, const char *prefix, fsdp_error *err)
{
    return fsdp_unit_create(net->model, prefix, &net->opts, &net->unit[net->layers++], err);
}

/* Tied weights, uneven and empty shards, a frozen parameter, buffers of all kinds. */
static inline fsdp_status declare_net(toy *net, fsdp_error *err)
{
    fsdp_param *embed, *scale;
    FSDP_TRY(net_add(net, "embed.weight", 2, (int64_t[]){9, 4}, &embed, err));
    FSDP_TRY(net_add(net, "layers.0.weight", 2, (int64_t[]){5, 4}, NULL, err));
    FSDP_TRY(net_add(net, "layers.0.bias", 1, (int64_t[]){5}, NULL, err));
    FSDP_TRY(net_add(net, "layers.1.weight", 2, (int64_t[]){3, 5}, NULL, err));
    FSDP_TRY(net_add(net, "layers.1.bias", 1, (int64_t[]){1}, NULL, err));
    FSDP_TRY(net_add(net, "norm.scale", 1, (int64_t[]){7}, &scale, err));
    FSDP_TRY(fsdp_model_add_alias(net->model, "head.weight", embed, err));
    FSDP_TRY(fsdp_param_set_requires_grad(scale, false, err));
    const int64_t two[] = {2};
    const fsdp_param_spec buffers[] = {
        {.name = "norm.mean", .dtype = FSDP_F32, .ndim = 1, .shape = two, .is_buffer = true},
        {.name = "norm.count", .dtype = FSDP_I64, .is_buffer = true},
        {.name = "norm.scratch", .dtype = FSDP_F32, .ndim = 1, .shape = two, .is_buffer = true,
         .is_transient = true}};
    for (int i = 0; i < 3; i++)
        FSDP_TRY(fsdp_model_add(net->model, &buffers[i], NULL, err));
    FSDP_TRY(net_unit(net, "layers.0", err));
    return net_unit(net, "layers.1", err);
}

static inline bool net_is_bias(void *user, const fsdp_param *param)
{
    (void)user;
    return strstr(fsdp_param_name(param), "bias") != NULL;
}

static inline bool net_is_no_bias(void *user, const fsdp_param *param)
{
    return !net_is_bias(user, param);
}

static inline fsdp_status net_adamw(toy *net, fsdp_optim **optim_out, fsdp_error *err)
{
    const fsdp_optim_group groups[] = {{net_is_no_bias, NULL, 0.25, 0.5}, {net_is_bias, NULL, 0.125, 0}};
    fsdp_adamw_opts opts = {.weight_decay = 0.01};
    opts.groups = groups;
    opts.group_count = 2;
    return fsdp_adamw_create(net->root, &opts, optim_out, err);
}

/* Declares, makes the root, and trains nothing yet. */
static inline fsdp_status net_build(toy *net, world_rank *rank, const toy_case *what, fsdp_error *err)
{
    FSDP_TRY(toy_begin(net, rank, what, err));
    net->runs_root = true;
    FSDP_TRY(what->declare(net, err));
    FSDP_TRY(fsdp_root_create(net->model, &net->opts, &net->root, err));
    FSDP_TRY(fsdp_root_init(net->root, tensor_number, NULL, err));
    return net_adamw(net, &net->optim, err);
}

static inline fsdp_status net_run(world_rank *rank, fsdp_error *err)
{
    const toy_case *what = rank->user;
    toy net;
    fsdp_status status = net_build(&net, rank, what, err);
    if (status == FSDP_OK)
        status = what->body(&net, err);
    toy_free(&net);
    return status;
}

static inline fsdp_status net_run_on(const char *device, toy_case what, fsdp_error *err)
{
    return toy_run_with(device, net_run, &what, err);
}

/* --- a step ------------------------------------------------------------------------------------- */

static inline fsdp_status net_forward(toy *net, fsdp_error *err)
{
    return toy_forward(net, NULL, err);
}

static inline fsdp_status net_give_grads(fsdp_unit *unit, fsdp_error *err)
{
    FSDP_TRY(fsdp_unit_pre_backward(unit, err));
    for (size_t i = 0; i < fsdp_unit_param_count(unit); i++) {
        fsdp_param *param = fsdp_unit_param_at(unit, i);
        float *grad = fsdp_param_describe(param).requires_grad ? fsdp_param_grad_raw(param) : NULL;
        for (int64_t e = 0; grad && e < fsdp_param_count(param); e++)
            grad[e] = (float)(e + 1) * 0.5f;
    }
    return fsdp_unit_post_backward(unit, err);
}

static inline fsdp_status net_backward(toy *net, fsdp_error *err)
{
    for (int i = net->layers - 1; i >= 0; i--)
        FSDP_TRY(net_give_grads(net->unit[i], err));
    FSDP_TRY(net_give_grads(fsdp_root_unit(net->root), err));
    return fsdp_root_end_backward(net->root, err);
}

static inline fsdp_status net_train(toy *net, int steps, fsdp_error *err)
{
    for (int i = 0; i < steps; i++) {
        FSDP_TRY(net_forward(net, err));
        FSDP_TRY(net_backward(net, err));
        FSDP_TRY(fsdp_optim_step(net->optim, err));
    }
    return FSDP_OK;
}

/* --- state dicts -------------------------------------------------------------------------------- */

static inline const fsdp_entry *net_entry(const fsdp_sd *sd, const char *name)
{
    int64_t at = fsdp_sd_find(sd, name, strlen(name));
    return at < 0 ? NULL : fsdp_sd_at(sd, (size_t)at);
}

/* Restricts opts to the net's optimizer, since tests may make others. */
static inline fsdp_state_opts net_own(toy *net, const fsdp_state_opts *opts)
{
    fsdp_state_opts own = opts ? *opts : (fsdp_state_opts){0};
    own.optims = &net->optim;
    own.optim_count = 1;
    return own;
}

static inline fsdp_status net_get(toy *net, const fsdp_state_opts *opts, fsdp_sd **sd_out,
                                  fsdp_error *err)
{
    const fsdp_state_opts own = net_own(net, opts);
    return fsdp_root_get_state(net->root, &own, sd_out, err);
}

static inline fsdp_status net_set(toy *net, const fsdp_state_opts *opts, const fsdp_sd *sd,
                                  fsdp_error *err)
{
    const fsdp_state_opts own = net_own(net, opts);
    return fsdp_root_set_state(net->root, sd, &own, NULL, err);
}

/* The names, joined by spaces. */
static inline void net_names(const fsdp_sd *sd, char *text, size_t room)
{
    size_t used = 0;
    text[0] = '\0';
    for (size_t i = 0; i < fsdp_sd_count(sd) && used < room; i++)
        used += (size_t)snprintf(text + used, room - used, "%s%s", i ? " " : "", fsdp_sd_at(sd, i)->name);
}

static inline fsdp_status net_expect_names(const fsdp_sd *sd, const char *names, fsdp_error *err)
{
    char text[8000];
    net_names(sd, text, sizeof text);
    return strcmp(text, names) == 0 ? FSDP_OK
                                    : fsdp_fail(err, FSDP_ERR_INTERNAL, "names are '%s'", text);
}

/* Fails unless both dicts have equal entries and contents on this rank. */
static inline fsdp_status net_expect_equal(const fsdp_sd *a, const fsdp_sd *b, int rank, fsdp_error *err)
{
    EXPECT(fsdp_sd_count(a) == fsdp_sd_count(b));
    for (size_t i = 0; i < fsdp_sd_count(a); i++) {
        const fsdp_entry *x = fsdp_sd_at(a, i), *y = fsdp_sd_at(b, i);
        size_t bytes = (size_t)fsdp_entry_local_bytes(x, rank);
        bool equal = strcmp(x->name, y->name) == 0 && x->kind == y->kind &&
                     bytes == (size_t)fsdp_entry_local_bytes(y, rank) &&
                     (bytes == 0 || memcmp(x->data, y->data, bytes) == 0) &&
                     (x->kind != FSDP_ENTRY_VALUE || fsdp_value_equal(&x->value, &y->value));
        if (!equal)
            return fsdp_fail(err, FSDP_ERR_INTERNAL, "'%s' and '%s' differ", x->name, y->name);
    }
    return FSDP_OK;
}

/* Changes every value, so that setting must restore all of them. */
static inline fsdp_status net_spoil(toy *net, fsdp_error *err)
{
    fsdp_sd *sd = NULL;
    FSDP_TRY(net_get(net, NULL, &sd, err));
    for (size_t i = 0; i < fsdp_sd_count(sd); i++) {
        const fsdp_entry *entry = fsdp_sd_at(sd, i);
        size_t bytes = (size_t)fsdp_entry_local_bytes(entry, fsdp_world_rank(net->rank->world));
        if (bytes > 0)
            memset(entry->data, 0x3e, bytes);
    }
    fsdp_sd_free(sd);
    for (size_t g = 0; g < fsdp_optim_group_count(net->optim); g++)
        FSDP_TRY(fsdp_optim_set_lr(net->optim, g, 77, err));
    return FSDP_OK;
}

#endif
