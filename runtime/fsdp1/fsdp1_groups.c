/*
 * The FSDP1 face: hyper-parameters of an optimizer's groups, as dicts of param_groups with PyTorch's names,
 * and as single values per parameter, as checkpoints have them.
 */
#include "runtime/fsdp1/fsdp1_internal.h"

#include <string.h>

/* --- get, set --------------------------------------------------------------------------------- */

fsdp_v1_hypers fsdp_v1_hypers_get(fsdp_optim *optim, size_t group)
{
    fsdp_state_hyper live[FSDP_STATE_HYPERS];
    fsdp_v1_hypers hypers = {0};
    size_t n = fsdp_state_list_hypers(optim, group, live);
    for (size_t i = 0; i < n; i++) {
        if (live[i].flag)
            hypers.numbers[i][0] = *live[i].flag;
        for (int k = 0; k < 2 && live[i].numbers[k]; k++)
            hypers.numbers[i][k] = *live[i].numbers[k];
    }
    return hypers;
}

void fsdp_v1_hypers_set(fsdp_optim *optim, size_t group, const fsdp_v1_hypers *hypers)
{
    fsdp_state_hyper live[FSDP_STATE_HYPERS];
    size_t n = fsdp_state_list_hypers(optim, group, live);
    for (size_t i = 0; i < n; i++) {
        if (live[i].flag)
            *live[i].flag = hypers->numbers[i][0] != 0;
        for (int k = 0; k < 2 && live[i].numbers[k]; k++)
            *live[i].numbers[k] = hypers->numbers[i][k];
    }
}

/* --- as a dict -------------------------------------------------------------------------------- */

/* One of hypers instead of the live one. */
static fsdp_status to_value(const fsdp_state_hyper *live, const double numbers[2],
                            fsdp_value *value_out, fsdp_error *err)
{
    double first = numbers[0], second = numbers[1];
    bool flag = first != 0;
    const fsdp_state_hyper own = {.name = live->name,
                                  .numbers = {&first, live->numbers[1] ? &second : NULL},
                                  .flag = live->flag ? &flag : NULL};
    return fsdp_state_hyper_value(&own, value_out, err);
}

fsdp_status fsdp_v1_hypers_to_value(fsdp_optim *optim, const fsdp_v1_hypers *hypers,
                                    fsdp_value *params, fsdp_value *dict_out, fsdp_error *err)
{
    fsdp_state_hyper live[FSDP_STATE_HYPERS];
    size_t n = fsdp_state_list_hypers(optim, 0, live);
    FSDP_TRY(fsdp_value_set_items(dict_out, FSDP_VALUE_DICT, 2 * (n + 1), err));
    fsdp_value *items = dict_out->as.list.items;
    for (size_t i = 0; i < n; i++) {
        FSDP_TRY(fsdp_state_put_text(live[i].name, &items[2 * i], err));
        FSDP_TRY(to_value(&live[i], hypers->numbers[i], &items[2 * i + 1], err));
    }
    FSDP_TRY(fsdp_state_put_text("params", &items[2 * n], err));
    items[2 * n + 1] = *params;
    *params = (fsdp_value){0};
    return FSDP_OK;
}

static void take_value(const fsdp_state_hyper *hyper, const fsdp_value *value, double numbers[2])
{
    double taken[2];
    if (value && fsdp_state_hyper_numbers(hyper, value, taken))
        memcpy(numbers, taken, sizeof taken);
}

void fsdp_v1_hypers_from_value(fsdp_optim *optim, const fsdp_value *dict, fsdp_v1_hypers *hypers)
{
    fsdp_state_hyper live[FSDP_STATE_HYPERS];
    size_t n = fsdp_state_list_hypers(optim, 0, live);
    for (size_t i = 0; i < n; i++)
        take_value(&live[i], fsdp_state_member(dict, live[i].name), hypers->numbers[i]);
}

/* --- per parameter ---------------------------------------------------------------------------- */

fsdp_status fsdp_v1_add_flat_hypers(const fsdp_v1 *v1, fsdp_optim *optim, const char *prefix,
                                    fsdp_sd *sd, fsdp_error *err)
{
    fsdp_text name = {0};
    fsdp_status status = FSDP_OK;
    for (size_t i = 0; i < v1->model->count && status == FSDP_OK; i++) {
        size_t group;
        if (fsdp_v1_group_of(optim, v1->model->params[i], &group))
            status = fsdp_state_put_hypers(optim, group, prefix, v1->model->params[i]->name, &name,
                                           sd, err);
    }
    fsdp_text_release(&name);
    return status;
}

static fsdp_status take_param(fsdp_optim *optim, const fsdp_param *param, size_t group,
                              const char *prefix, const fsdp_sd *sd, fsdp_text *name,
                              fsdp_error *err)
{
    fsdp_state_hyper live[FSDP_STATE_HYPERS];
    size_t n = fsdp_state_list_hypers(optim, group, live);
    fsdp_v1_hypers hypers = fsdp_v1_hypers_get(optim, group);
    for (size_t i = 0; i < n; i++) {
        FSDP_TRY(fsdp_state_hyper_spell(name, prefix, param->name, &live[i], err));
        int64_t at = fsdp_sd_find(sd, name->data, name->size);
        if (at >= 0)
            take_value(&live[i], &fsdp_sd_at(sd, (size_t)at)->value, hypers.numbers[i]);
    }
    fsdp_v1_hypers_set(optim, group, &hypers);
    return FSDP_OK;
}

/* Of a group's parameters the first one's count. */
fsdp_status fsdp_v1_take_flat_hypers(const fsdp_v1 *v1, fsdp_optim *optim, const char *prefix,
                                     const fsdp_sd *sd, fsdp_error *err)
{
    fsdp_text name = {0};
    fsdp_status status = FSDP_OK;
    for (size_t i = v1->model->count; i-- > 0 && status == FSDP_OK;) {
        size_t group;
        if (fsdp_v1_group_of(optim, v1->model->params[i], &group))
            status = take_param(optim, v1->model->params[i], group, prefix, sd, &name, err);
    }
    fsdp_text_release(&name);
    return status;
}
