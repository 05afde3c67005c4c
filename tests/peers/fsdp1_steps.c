/*
 * Steps of the FSDP1 face (the net of tests/support/nets/training.h) and every state dict after them, then
 * further steps with optimizer state that went out and in again. fsdp1_steps.py runs it against PyTorch's
 * FSDP1.
 *
 * usage: fsdp1_steps FOLDER [NAME=NUMBER...]     numbers as in `options` below
 *
 * Each rank writes FOLDER/RANK, lines of four fields with tabs between them: what, name, shape, numbers.
 */
#include "runtime/optim/optim_internal.h"
#include "statedict/sd/layout_internal.h"
#include "tests/support/nets/training.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <fsdp/launch.h>
#include <fsdp/state.h>

enum { STEPS_BEFORE = 5, STEPS_AFTER = 3 };

/* --- options ---------------------------------------------------------------------------------- */

typedef struct options {
    double strategy, backward_prefetch, forward_prefetch, orig, no_limit, replicas, microbatches,
        reduce_each, clip, is_sgd, groups;
} options;

static double *option_of(options *given, const char *name, size_t size)
{
    const struct {
        const char *name;
        double *number;
    } all[] = {{"strategy", &given->strategy},
               {"backward_prefetch", &given->backward_prefetch},
               {"forward_prefetch", &given->forward_prefetch},
               {"orig", &given->orig},
               {"no_limit", &given->no_limit},
               {"replicas", &given->replicas},
               {"microbatches", &given->microbatches},
               {"reduce_each", &given->reduce_each},
               {"clip", &given->clip},
               {"is_sgd", &given->is_sgd},
               {"groups", &given->groups}};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (strlen(all[i].name) == size && strncmp(all[i].name, name, size) == 0)
            return all[i].number;
    return NULL;
}

static fsdp_status parse(options *given, int argc, char **argv, fsdp_error *err)
{
    *given = (options){.microbatches = 1};
    for (int i = 2; i < argc; i++) {
        const size_t size = strcspn(argv[i], "=");
        double *number = option_of(given, argv[i], size);
        if (!number || argv[i][size] != '=')
            return fsdp_fail(err, FSDP_ERR_USAGE, "there is no option '%s'", argv[i]);
        *number = strtod(argv[i] + size + 1, NULL);
    }
    return FSDP_OK;
}

static bool is_weight(void *user, const fsdp_param *param)
{
    (void)user;
    return strstr(fsdp_param_name(param), "weight") != NULL;
}

static net_setup setup_of(const options *given)
{
    static const fsdp_optim_group groups[] = {
        {.match = is_weight, .lr = 0.002, .weight_decay = 0.1}, {.lr = 0.01, .weight_decay = 0}};
    net_setup setup = net_setup_default();
    setup.wrap.unit.strategy = (fsdp_wrap_strategy)given->strategy;
    setup.wrap.unit.backward_prefetch = (fsdp_wrap_prefetch)given->backward_prefetch;
    setup.wrap.unit.forward_prefetch = given->forward_prefetch != 0;
    setup.wrap.use_orig_params = given->orig != 0;
    setup.wrap.unlimited_gathers = given->no_limit != 0;
    setup.replicas = (int)given->replicas;
    setup.microbatches = (int)given->microbatches;
    setup.all_reduce_each = given->reduce_each != 0;
    setup.clip = given->clip;
    setup.is_sgd = given->is_sgd != 0;
    if (given->groups != 0) {
        setup.groups = groups;
        setup.group_count = 2;
    }
    return setup;
}

/* --- printing --------------------------------------------------------------------------------- */

static void print_value(FILE *out, const fsdp_value *value)
{
    bool is_dict = value->kind == FSDP_VALUE_DICT;
    if (value->kind == FSDP_VALUE_BOOL)
        fputs(value->as.boolean ? "true" : "false", out);
    else if (value->kind == FSDP_VALUE_I64)
        fprintf(out, "%lld", (long long)value->as.i64);
    else if (value->kind == FSDP_VALUE_F64)
        fprintf(out, "%.17g", value->as.f64);
    else if (value->kind == FSDP_VALUE_STRING)
        fprintf(out, "\"%.*s\"", (int)value->as.bytes.size, value->as.bytes.data);
    else if (is_dict || value->kind == FSDP_VALUE_LIST) {
        fputc(is_dict ? '{' : '[', out);
        for (size_t i = 0; i < value->as.list.count; i++) {
            fputs(i == 0 ? "" : is_dict && i % 2 == 1 ? ": " : ", ", out);
            print_value(out, &value->as.list.items[i]);
        }
        fputc(is_dict ? '}' : ']', out);
    } else
        fputs("null", out);
}

static void print_tensor(FILE *out, const fsdp_entry *entry, int rank)
{
    const int64_t count = fsdp_entry_local_bytes(entry, rank) / (int64_t)sizeof(float);
    for (int i = 0; i < entry->ndim; i++)
        fprintf(out, "%s%lld", i == 0 ? "" : " ", (long long)entry->shape[i]);
    fputc('\t', out);
    for (int64_t i = 0; i < count; i++)
        fprintf(out, "%s%.9g", i == 0 ? "" : " ", (double)((const float *)entry->data)[i]);
}

/* Prints the entries of a state dict with this rank's part of each. */
static void print_dict(FILE *out, const char *what, const fsdp_sd *sd, int rank)
{
    for (size_t i = 0; i < fsdp_sd_count(sd); i++) {
        const fsdp_entry *entry = fsdp_sd_at(sd, i);
        fprintf(out, "%s\t%s\t", what, entry->name);
        if (entry->kind == FSDP_ENTRY_VALUE) {
            fputc('\t', out);
            print_value(out, &entry->value);
        } else
            print_tensor(out, entry, rank);
        fputc('\n', out);
    }
}

static void print_flats(FILE *out, const fsdp_sd *sd)
{
    for (size_t i = 0; i < fsdp_sd_flat_count(sd); i++) {
        const fsdp_flat *flat = fsdp_sd_flat_at(sd, i);
        const int64_t count = flat->count / fsdp_mesh_size(flat->mesh);
        fprintf(out, "model local\t%s\t%lld\t", flat->name, (long long)count);
        for (int64_t k = 0; k < count; k++)
            fprintf(out, "%s%.9g", k == 0 ? "" : " ", (double)((const float *)flat->data)[k]);
        fputc('\n', out);
    }
}

static void print_places(FILE *out, toy *net)
{
    for (int i = 0; i <= NET_LAYERS; i++) {
        fsdp_unit *unit = i < NET_LAYERS ? net->unit[i] : fsdp_root_unit(net->root);
        const fsdp_param *flat = fsdp_wrap_flat_param(net->wrap, unit);
        fsdp_param *both[] = {i < NET_LAYERS ? net->weight[i] : net->own,
                              i < NET_LAYERS ? net->bias[i] : NULL};
        fprintf(out, "flat\t%s\t\t%lld\n", fsdp_param_name(flat), (long long)flat->padded);
        for (int k = 0; k < 2 && both[k]; k++) {
            const fsdp_wrap_place place = fsdp_wrap_place_of(both[k]);
            fprintf(out, "place\t%s\t\t%lld %lld %lld %lld %lld\n", fsdp_param_name(both[k]),
                    (long long)place.offset, (long long)place.count, (long long)place.first,
                    (long long)place.local, (long long)place.at);
        }
    }
}

static void print_training(FILE *out, const net_setup *setup, const net_result *result, int rank)
{
    for (int step = 0; step < STEPS_BEFORE + STEPS_AFTER; step++) {
        fprintf(out, "loss\t%d\t\t", step);
        for (int m = 0; m < setup->microbatches; m++)
            fprintf(out, "%s%.9g", m == 0 ? "" : " ",
                    result->losses[step][rank * setup->microbatches + m]);
        if (rank == 0 && setup->clip > 0)
            fprintf(out, "\nnorm\t%d\t\t%.9g", step, result->norms[step]);
        fputc('\n', out);
    }
}

/* --- state dicts ------------------------------------------------------------------------------ */

static fsdp_status print_model(FILE *out, toy *net, fsdp_error *err)
{
    static const struct {
        const char *what;
        fsdp_state_opts opts;
    } dicts[] = {
        {"model full", {.part = FSDP_STATE_MODEL, .model_prefix = "", .full_state_dict = true}},
        {"model rank0",
         {.part = FSDP_STATE_MODEL,
          .model_prefix = "",
          .full_state_dict = true,
          .cpu_offload = true}},
        {"model sharded", {.part = FSDP_STATE_MODEL, .model_prefix = ""}},
    };
    for (size_t i = 0; i < sizeof dicts / sizeof *dicts; i++) {
        fsdp_sd *sd;
        FSDP_TRY(fsdp_root_get_state(net->root, &dicts[i].opts, &sd, err));
        print_dict(out, dicts[i].what, sd, fsdp_world_rank(net->world));
        fsdp_sd_free(sd);
    }
    return FSDP_OK;
}

static fsdp_status print_local(FILE *out, toy *net, fsdp_error *err)
{
    const fsdp_state_opts opts = {.part = FSDP_STATE_MODEL, .model_prefix = ""};
    fsdp_sd *sd;
    FSDP_TRY(fsdp_root_get_state(net->root, &opts, &sd, err));
    print_flats(out, sd);
    fsdp_sd_free(sd);
    return FSDP_OK;
}

/* By name, by position, and by name again. */
static fsdp_status print_rekeyed(FILE *out, toy *net, const fsdp_sd *full, fsdp_error *err)
{
    static const char *const names[] = {"bias",           "layers.2.bias",   "layers.2.weight",
                                        "layers.1.bias",  "layers.1.weight", "layers.0.bias",
                                        "layers.0.weight"};
    const fsdp_wrap_optim_input input = {.names = names, .count = sizeof names / sizeof *names};
    int rank = fsdp_world_rank(net->world);
    fsdp_sd *ids, *again;
    FSDP_TRY(fsdp_wrap_rekey_optim_state(full, FSDP_WRAP_PARAM_ID, &input, &ids, err));
    print_dict(out, "optim ids", ids, rank);
    fsdp_status status =
        fsdp_wrap_rekey_optim_state(ids, FSDP_WRAP_PARAM_NAME, &input, &again, err);
    fsdp_sd_free(ids);
    if (status != FSDP_OK)
        return status;
    print_dict(out, "optim names", again, rank);
    fsdp_sd_free(again);
    return FSDP_OK;
}

/* The parameter at a position of the optimizer: a declared one, or without use_orig_params a flat one. */
typedef struct position {
    const fsdp_optim_state *state;
    size_t group;
    int64_t at, count;
    bool is_flat;
} position;

enum { POSITIONS = 16 };

static size_t list_group(const toy *net, size_t group, position *out)
{
    const fsdp_model *model = net->root->steps_runs ? net->root->declared : net->root->model;
    size_t n = 0;
    for (size_t i = 0; i < model->count; i++) {
        const fsdp_param *param = model->params[i], *holder = param->flat ? param->flat : param;
        for (size_t s = 0; s < net->optim->count; s++) {
            const fsdp_optim_state *state = &net->optim->states[s];
            position *found = &out[n];
            if (state->param != holder || !fsdp_optim_group_of(state, param, &found->group) ||
                found->group != group)
                continue;
            const fsdp_flat_run run =
                param->flat ? fsdp_param_flat_run(param) : (fsdp_flat_run){.count = param->rows};
            found->state = state;
            found->is_flat = !param->flat;
            found->at = run.at;
            found->count = run.count;
            n++;
        }
    }
    return n;
}

static void print_moment(FILE *out, const position *at, const char *name, const float *data)
{
    if (!name)
        return;
    fprintf(out, "%s\t%lld\t", name, (long long)at->count);
    for (int64_t i = 0; i < at->count; i++)
        fprintf(out, "%s%.9g", i == 0 ? "" : " ", (double)data[at->at + i]);
    fputc('\n', out);
}

static fsdp_status print_groups(FILE *out, const char *what, toy *net, const position *all,
                                size_t n, fsdp_error *err)
{
    const fsdp_state_opts opts = {
        .part = FSDP_STATE_OPTIM, .optim_prefix = "", .nested_optim = true};
    fsdp_sd *sd;
    FSDP_TRY(fsdp_root_get_state(net->root, &opts, &sd, err));
    const fsdp_entry *entry = fsdp_sd_at(sd, (size_t)fsdp_sd_find(sd, FSDP_NAME("param_groups")));
    fsdp_status status = FSDP_OK;
    for (size_t g = 0; g < net->optim->group_count && status == FSDP_OK; g++) {
        const fsdp_value *dict = &entry->value.as.list.items[g];
        fsdp_value *list = &dict->as.list.items[dict->as.list.count - 1];
        size_t count = 0, at = 0;
        for (size_t i = 0; i < n; i++)
            count += all[i].group == g;
        fsdp_value_release(list);
        status = fsdp_value_set_items(list, FSDP_VALUE_LIST, count, err);
        for (size_t i = 0; i < n && status == FSDP_OK; i++)
            if (all[i].group == g)
                list->as.list.items[at++] = fsdp_value_i64((int64_t)i);
    }
    fprintf(out, "%s\tparam_groups\t\t", what);
    print_value(out, &entry->value);
    fputc('\n', out);
    fsdp_sd_free(sd);
    return status;
}

/* The live state of this rank, as PyTorch's dicts to load have it. */
static fsdp_status print_own_state(FILE *out, const char *what, toy *net, fsdp_error *err)
{
    position all[POSITIONS];
    size_t n = 0;
    for (size_t g = 0; g < net->optim->group_count; g++)
        n += list_group(net, g, &all[n]);
    for (size_t i = 0; i < n; i++) {
        fprintf(out, "%s\tstate.%zu.step\t\t%.9g\n", what, i, (double)all[i].state->step);
        for (int m = 0; m < FSDP_MOMENTS; m++) {
            const char *moment = fsdp_optim_moment_name(net->optim, m);
            char name[64];
            snprintf(name, sizeof name, "%s\tstate.%zu.%s", what, i, moment ? moment : "");
            /* PyTorch has the empty chunk of a flat parameter, and nothing of an empty original one. */
            bool is_there = moment && (all[i].count > 0 || all[i].is_flat);
            print_moment(out, &all[i], is_there ? name : NULL, all[i].state->moments[m]);
        }
    }
    return print_groups(out, what, net, all, n, err);
}

static fsdp_status load_one(FILE *out, const char *what, toy *net, const fsdp_state_opts *opts,
                            const fsdp_sd *from, fsdp_error *err)
{
    for (size_t i = 0; i < net->optim->count; i++) {
        fsdp_optim_state *state = &net->optim->states[i];
        state->step = -1;
        for (int m = 0; m < FSDP_MOMENTS; m++)
            if (state->moments[m])
                memset(state->moments[m], 0xff, (size_t)state->param->rows * sizeof(float));
    }
    FSDP_TRY(fsdp_root_set_state(net->root, from, opts, NULL, err));
    return print_own_state(out, what, net, err);
}

static const fsdp_state_opts sharded_optim = {
    .part = FSDP_STATE_OPTIM, .optim_prefix = "", .nested_optim = true, .cpu_offload = true};
static const fsdp_state_opts full_optim = {
    .part = FSDP_STATE_OPTIM, .optim_prefix = "", .nested_optim = true, .full_state_dict = true};

static fsdp_status load_all(FILE *out, toy *net, const fsdp_sd *full, const fsdp_sd *sharded,
                            fsdp_error *err)
{
    bool is_first = fsdp_world_rank(net->world) == 0;
    fsdp_state_opts sent = full_optim;
    sent.broadcast_from_rank0 = true;
    FSDP_TRY(load_one(out, "optim shard", net, &full_optim, full, err));
    FSDP_TRY(load_one(out, "optim flatten", net, &sharded_optim, sharded, err));
    return load_one(out, "optim scatter", net, &sent, is_first ? full : NULL, err);
}

static fsdp_status print_optim(FILE *out, toy *net, fsdp_error *err)
{
    int rank = fsdp_world_rank(net->world);
    fsdp_sd *full = NULL, *sharded = NULL;
    fsdp_status status = fsdp_root_get_state(net->root, &full_optim, &full, err);
    if (status == FSDP_OK)
        status = fsdp_root_get_state(net->root, &sharded_optim, &sharded, err);
    if (status == FSDP_OK) {
        print_dict(out, "optim full", full, rank);
        print_dict(out, "optim sharded", sharded, rank);
        status = print_rekeyed(out, net, full, err);
    }
    if (status == FSDP_OK)
        status = load_all(out, net, full, sharded, err);
    fsdp_sd_free(full);
    fsdp_sd_free(sharded);
    return status;
}

/* --- the whole -------------------------------------------------------------------------------- */

static fsdp_status train(FILE *out, toy *net, const net_setup *setup, fsdp_error *err)
{
    net_result result = {0};
    print_places(out, net);
    FSDP_TRY(net_train(net, setup, 0, STEPS_BEFORE, &result, err));
    FSDP_TRY(print_model(out, net, err));
    if (setup->wrap.unit.strategy < FSDP_WRAP_NO_SHARD)
        FSDP_TRY(print_local(out, net, err));
    FSDP_TRY(print_optim(out, net, err));
    FSDP_TRY(net_train(net, setup, STEPS_BEFORE, STEPS_AFTER, &result, err));
    print_training(out, setup, &result, fsdp_world_rank(net->world));
    return FSDP_OK;
}

static fsdp_status run(fsdp_world *world, const net_setup *setup, const char *folder,
                       fsdp_error *err)
{
    char path[4096];
    toy net = {0};
    snprintf(path, sizeof path, "%s/%d", folder, fsdp_world_rank(world));
    FILE *out = fopen(path, "w");
    if (!out)
        return fsdp_fail(err, FSDP_ERR_IO, "cannot create '%s'", path);
    fsdp_status status = net_build(&net, world, setup, err);
    if (status == FSDP_OK)
        status = train(out, &net, setup, err);
    toy_free(&net);
    if (fclose(out) != 0 && status == FSDP_OK)
        status = fsdp_fail(err, FSDP_ERR_IO, "cannot write '%s'", path);
    return status;
}

static int rank_main(void *user, fsdp_world *world, int argc, char **argv)
{
    fsdp_error err = {0};
    options given;
    (void)user;
    if (argc < 2)
        return 2;
    fsdp_status status = parse(&given, argc, argv, &err);
    const net_setup setup = setup_of(&given);
    if (status == FSDP_OK)
        status = run(world, &setup, argv[1], &err);
    return status == FSDP_OK ? 0 : fsdp_error_report(&err);
}

int main(int argc, char **argv)
{
    return fsdp_launch(argc, argv, rank_main, NULL);
}
