/*
 * The FSDP1 face: state dicts of the model. What a dict has is declared first, then memory is made for what
 * is copied, then it is filled, one flat parameter after the other.
 */
#include "runtime/fsdp1/fsdp1_internal.h"

#include <string.h>

static const char *prefix_of(const fsdp_v1_state_opts *opts)
{
    return opts->prefix ? opts->prefix : "";
}

fsdp_status fsdp_v1_check_state_opts(fsdp_v1 *v1, const fsdp_v1_state_opts *opts, fsdp_error *err)
{
    if (opts->rank0_only && opts->type != FSDP_V1_FULL_STATE_DICT)
        return fsdp_fail(err, FSDP_ERR_USAGE, "rank0_only is for full state dicts");
    if (opts->type == FSDP_V1_LOCAL_STATE_DICT)
        for (size_t i = 0; i < v1->flat_count; i++)
            if (fsdp_v1_is_hybrid(v1->flats[i].opts.strategy))
                return fsdp_fail(err, FSDP_ERR_USAGE,
                                 "unit %s: local state dicts do not go with hybrid strategies, "
                                 "sharded ones do",
                                 fsdp_unit_name(v1->flats[i].unit));
    return FSDP_OK;
}

/* --- declaring -------------------------------------------------------------------------------- */

static fsdp_v1_piece piece_of(const fsdp_v1_flat *flat)
{
    return (fsdp_v1_piece){.flat = flat, .own = flat->param->shard, .dtype = flat->param->dtype};
}

static fsdp_status add_flats(fsdp_v1 *v1, fsdp_sd *sd, const fsdp_v1_state_opts *opts,
                             fsdp_error *err)
{
    const fsdp_v1_naming naming = {.prefix = prefix_of(opts), .suffix = ""};
    for (size_t i = 0; i < v1->flat_count; i++) {
        if (!v1->flats[i].param)
            continue;
        const fsdp_v1_piece piece = piece_of(&v1->flats[i]);
        FSDP_TRY(fsdp_v1_add_runs(v1, sd, &piece, &naming, opts, err));
    }
    return FSDP_OK;
}

/* What lies in no flat parameter. */
static bool is_plain(const fsdp_param *param)
{
    bool is_wanted = !param->is_buffer || param->is_persistent;
    return is_wanted && !param->flat->group;
}

static bool is_cast(const fsdp_param *param)
{
    return param->dtype != param->flat->dtype;
}

static fsdp_status add_plain(fsdp_v1 *v1, fsdp_sd *sd, const fsdp_v1_state_opts *opts,
                             fsdp_error *err)
{
    const fsdp_v1_naming naming = {.prefix = prefix_of(opts), .suffix = ""};
    for (size_t i = 0; i < v1->model->count; i++) {
        fsdp_param *param = v1->model->params[i];
        bool is_live = is_plain(param) && fsdp_v1_is_live(opts) && !is_cast(param);
        if (is_plain(param))
            FSDP_TRY(fsdp_v1_add_whole(v1, sd, param, param->dtype, &naming,
                                       is_live ? param->flat->shard : NULL, err));
    }
    return FSDP_OK;
}

static fsdp_status add_aliases(const fsdp_param *param, fsdp_sd *sd, const fsdp_v1_naming *naming,
                               fsdp_text *name, fsdp_text *target, fsdp_error *err)
{
    FSDP_TRY(fsdp_v1_spell(target, naming, param->name, err));
    for (size_t i = 0; i < param->alias_count; i++) {
        FSDP_TRY(fsdp_v1_spell(name, naming, param->aliases[i], err));
        FSDP_TRY(fsdp_sd_add_alias(sd, name->data, name->size, target->data, target->size, err));
    }
    return FSDP_OK;
}

static fsdp_status add_all_aliases(fsdp_v1 *v1, fsdp_sd *sd, const fsdp_v1_state_opts *opts,
                                   fsdp_error *err)
{
    const fsdp_v1_naming naming = {.prefix = prefix_of(opts), .suffix = ""};
    fsdp_text name = {0}, target = {0};
    fsdp_status status = FSDP_OK;
    for (size_t i = 0; i < v1->model->count && status == FSDP_OK; i++)
        if (v1->model->params[i]->alias_count > 0)
            status = add_aliases(v1->model->params[i], sd, &naming, &name, &target, err);
    fsdp_text_release(&name);
    fsdp_text_release(&target);
    return status;
}

fsdp_status fsdp_v1_add_model(fsdp_v1 *v1, fsdp_sd *sd, const fsdp_v1_state_opts *opts,
                              fsdp_error *err)
{
    FSDP_TRY(add_flats(v1, sd, opts, err));
    FSDP_TRY(add_plain(v1, sd, opts, err));
    return add_all_aliases(v1, sd, opts, err);
}

/* --- filling ---------------------------------------------------------------------------------- */

static fsdp_status fill_plain(fsdp_v1 *v1, fsdp_sd *sd, const fsdp_v1_state_opts *opts,
                              fsdp_error *err)
{
    const fsdp_v1_naming naming = {.prefix = prefix_of(opts), .suffix = ""};
    fsdp_text name = {0};
    fsdp_status status = FSDP_OK;
    for (size_t i = 0; i < v1->model->count && status == FSDP_OK; i++) {
        const fsdp_param *param = v1->model->params[i];
        if (!is_plain(param) || (fsdp_v1_is_live(opts) && !is_cast(param)))
            continue;
        status = fsdp_v1_spell(&name, &naming, param->name, err);
        if (status == FSDP_OK)
            fsdp_cast(fsdp_v1_find(sd, &name)->data, param->dtype, param->flat->shard,
                      param->flat->dtype, (size_t)fsdp_v1_count(param));
    }
    fsdp_text_release(&name);
    return status;
}

fsdp_status fsdp_v1_fill_model(fsdp_v1 *v1, fsdp_sd *sd, const fsdp_v1_state_opts *opts, bool keeps,
                               fsdp_error *err)
{
    const fsdp_v1_naming naming = {.prefix = prefix_of(opts), .suffix = ""};
    for (size_t i = 0; i < v1->flat_count; i++) {
        if (!v1->flats[i].param)
            continue;
        const fsdp_v1_piece piece = piece_of(&v1->flats[i]);
        FSDP_TRY(fsdp_v1_fill_runs(sd, &piece, &naming, opts, keeps, err));
    }
    return keeps ? fill_plain(v1, sd, opts, err) : FSDP_OK;
}

/* --- the dict --------------------------------------------------------------------------------- */

fsdp_status fsdp_v1_make_dict(fsdp_v1 *v1, fsdp_optim *optim, const char *call,
                              fsdp_v1_dict_maker make, const fsdp_v1_state_opts *opts,
                              fsdp_sd **sd_out, fsdp_error *err)
{
    const fsdp_v1_state_opts none = {.type = FSDP_V1_FULL_STATE_DICT};
    const fsdp_v1_state_opts *given = opts ? opts : &none;
    bool keeps = !given->rank0_only || v1->root->world->rank == 0;
    fsdp_sd *sd = NULL;
    FSDP_TRY(fsdp_v1_check_idle(v1, call, err));
    FSDP_TRY(fsdp_v1_check_state_opts(v1, given, err));
    fsdp_status status = fsdp_sd_create(&sd, err);
    if (status == FSDP_OK)
        status = make(v1, optim, given, keeps, sd, err);
    if (given->type == FSDP_V1_FULL_STATE_DICT)
        status = fsdp_root_done(v1->root, status, err);
    if (status == FSDP_OK)
        *sd_out = sd;
    else
        fsdp_sd_free(sd);
    return status;
}

fsdp_status fsdp_v1_check_given(const fsdp_sd *sd, const char *what, fsdp_error *err)
{
    return sd ? FSDP_OK : fsdp_fail(err, FSDP_ERR_USAGE, "%s came without a state dict", what);
}

static fsdp_status make(fsdp_v1 *v1, fsdp_optim *optim, const fsdp_v1_state_opts *opts, bool keeps,
                        fsdp_sd *sd, fsdp_error *err)
{
    (void)optim;
    if (keeps)
        FSDP_TRY(fsdp_v1_add_model(v1, sd, opts, err));
    FSDP_TRY(fsdp_sd_allocate(sd, v1->root->world->rank, err));
    return fsdp_v1_fill_model(v1, sd, opts, keeps, err);
}

fsdp_status fsdp_v1_state_dict(fsdp_v1 *v1, const fsdp_v1_state_opts *opts, fsdp_sd **sd_out,
                               fsdp_error *err)
{
    return fsdp_v1_make_dict(v1, NULL, "fsdp_v1_state_dict", make, opts, sd_out, err);
}

/* --- loading ---------------------------------------------------------------------------------- */

static fsdp_status check_plain(const fsdp_param *param, const fsdp_entry *entry, fsdp_error *err)
{
    bool fits = entry->kind == FSDP_ENTRY_TENSOR && entry->dtype == param->dtype &&
                entry->ndim == param->ndim &&
                memcmp(entry->shape, param->shape, (size_t)param->ndim * sizeof *param->shape) == 0;
    if (!fits)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "'%s' has another dtype or shape in the state dict than here",
                         entry->name);
    if (!entry->data)
        return fsdp_fail(err, FSDP_ERR_USAGE, "'%s' has no memory in the state dict", entry->name);
    return FSDP_OK;
}

/* The entry is looked at and, unless it does not fit, `set`. */
static fsdp_status take_param(const fsdp_param *param, const fsdp_entry *entry, bool sets,
                              fsdp_error *err)
{
    fsdp_param *flat = param->flat;
    if (flat->group) {
        const fsdp_flat_run run = fsdp_param_flat_run(param);
        unsigned char *to = flat->shard;
        to += (size_t)run.at * fsdp_dtype_size(param->dtype);
        return fsdp_v1_take_run(param, entry, param->dtype, sets ? to : NULL, err);
    }
    FSDP_TRY(check_plain(param, entry, err));
    if (sets)
        fsdp_cast(flat->shard, flat->dtype, entry->data, param->dtype,
                  (size_t)fsdp_v1_count(param));
    return FSDP_OK;
}

fsdp_status fsdp_v1_take_buffers(fsdp_v1 *v1, const fsdp_sd *sd, const char *prefix,
                                 fsdp_error *err)
{
    const fsdp_v1_naming naming = {.prefix = prefix, .suffix = ""};
    fsdp_text name = {0};
    fsdp_status status = FSDP_OK;
    for (size_t i = 0; i < v1->model->count && status == FSDP_OK; i++) {
        const fsdp_param *param = v1->model->params[i];
        if (!is_plain(param) || !is_cast(param))
            continue;
        status = fsdp_v1_spell(&name, &naming, param->name, err);
        const fsdp_entry *entry = status == FSDP_OK ? fsdp_v1_find(sd, &name) : NULL;
        if (entry)
            status = take_param(param, entry, true, err);
    }
    fsdp_text_release(&name);
    return status;
}

static fsdp_status load(fsdp_v1 *v1, const fsdp_sd *sd, const fsdp_v1_naming *naming,
                        bool not_strict, bool sets, fsdp_text *name, fsdp_error *err)
{
    for (size_t i = 0; i < v1->model->count; i++) {
        const fsdp_param *param = v1->model->params[i];
        if (param->is_buffer && !param->is_persistent)
            continue;
        FSDP_TRY(fsdp_v1_spell(name, naming, param->name, err));
        const fsdp_entry *entry = fsdp_v1_find(sd, name);
        if (entry)
            FSDP_TRY(take_param(param, entry, sets, err));
        else if (!not_strict)
            return fsdp_fail(err, FSDP_ERR_USAGE, "the state dict has no '%s'", name->data);
    }
    return FSDP_OK;
}

fsdp_status fsdp_v1_load_state_dict(fsdp_v1 *v1, const fsdp_sd *sd, const char *prefix,
                                    bool not_strict, fsdp_error *err)
{
    const fsdp_v1_naming naming = {.prefix = prefix ? prefix : "", .suffix = ""};
    fsdp_text name = {0};
    FSDP_TRY(fsdp_v1_check_given(sd, "fsdp_v1_load_state_dict", err));
    FSDP_TRY(fsdp_v1_settle(v1, "fsdp_v1_load_state_dict", err));
    fsdp_status status = load(v1, sd, &naming, not_strict, false, &name, err);
    if (status == FSDP_OK)
        status = load(v1, sd, &naming, not_strict, true, &name, err);
    fsdp_text_release(&name);
    fsdp_root_refresh_masters(v1->root, NULL);
    return status;
}
