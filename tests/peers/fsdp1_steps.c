/*
 * Steps of the FSDP1 face (the net of tests/support/nets/training.h) and every state dict after them, then
 * further steps with optimizer state that went out and in again. fsdp1_steps.py runs it beside PyTorch's
 * FSDP1.
 *
 * usage: fsdp1_steps FOLDER [NAME=NUMBER...]     numbers as in `options` below
 *
 * Each rank writes FOLDER/RANK, lines of four fields with tabs between them: what, name, shape, numbers.
 */
#include "tests/support/nets/training.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <fsdp/launch.h>

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
    setup.v1.unit.strategy = (fsdp_v1_strategy)given->strategy;
    setup.v1.unit.backward_prefetch = (fsdp_v1_prefetch)given->backward_prefetch;
    setup.v1.unit.forward_prefetch = given->forward_prefetch != 0;
    setup.v1.use_orig_params = given->orig != 0;
    setup.v1.no_limit_all_gathers = given->no_limit != 0;
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

/* What this rank has of a state dict. */
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
        const fsdp_param *flat = fsdp_v1_flat_param(net->v1, unit);
        fsdp_param *both[] = {i < NET_LAYERS ? net->weight[i] : net->own,
                              i < NET_LAYERS ? net->bias[i] : NULL};
        fprintf(out, "flat\t%s\t\t%lld\n", fsdp_param_name(flat), (long long)flat->padded);
        for (int k = 0; k < 2 && both[k]; k++) {
            const fsdp_v1_place place = fsdp_v1_place_of(both[k]);
            fprintf(out, "place\t%s\t\t%lld %lld %lld %lld %lld\n", fsdp_param_name(both[k]),
                    (long long)place.offset, (long long)place.count, (long long)place.first,
                    (long long)place.own, (long long)place.at);
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
        fsdp_v1_state_opts opts;
    } dicts[] = {
        {"model full", {.type = FSDP_V1_FULL_STATE_DICT}},
        {"model rank0", {.type = FSDP_V1_FULL_STATE_DICT, .rank0_only = true}},
        {"model sharded", {.type = FSDP_V1_SHARDED_STATE_DICT}},
    };
    for (size_t i = 0; i < sizeof dicts / sizeof *dicts; i++) {
        fsdp_sd *sd;
        FSDP_TRY(fsdp_v1_state_dict(net->v1, &dicts[i].opts, &sd, err));
        print_dict(out, dicts[i].what, sd, fsdp_world_rank(net->world));
        fsdp_sd_free(sd);
    }
    return FSDP_OK;
}

static fsdp_status print_local(FILE *out, toy *net, fsdp_error *err)
{
    const fsdp_v1_state_opts opts = {.type = FSDP_V1_LOCAL_STATE_DICT};
    fsdp_sd *sd;
    FSDP_TRY(fsdp_v1_state_dict(net->v1, &opts, &sd, err));
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
    const fsdp_v1_optim_input input = {.names = names, .count = sizeof names / sizeof *names};
    int rank = fsdp_world_rank(net->world);
    fsdp_sd *ids, *again;
    FSDP_TRY(fsdp_v1_rekey_optim_state_dict(full, FSDP_V1_PARAM_ID, &input, &ids, err));
    print_dict(out, "optim ids", ids, rank);
    fsdp_status status =
        fsdp_v1_rekey_optim_state_dict(ids, FSDP_V1_PARAM_NAME, &input, &again, err);
    fsdp_sd_free(ids);
    if (status != FSDP_OK)
        return status;
    print_dict(out, "optim names", again, rank);
    fsdp_sd_free(again);
    return FSDP_OK;
}

typedef fsdp_status (*to_load)(fsdp_v1 *, fsdp_optim *, const fsdp_sd *,
                               const fsdp_v1_to_load_opts *, fsdp_sd **, fsdp_error *);

static fsdp_status load_one(FILE *out, const char *what, to_load make, toy *net,
                            const fsdp_sd *from, fsdp_error *err)
{
    fsdp_sd *sd;
    FSDP_TRY(make(net->v1, net->optim, from, NULL, &sd, err));
    print_dict(out, what, sd, fsdp_world_rank(net->world));
    fsdp_status status = fsdp_v1_optim_load(net->v1, net->optim, sd, NULL, err);
    fsdp_sd_free(sd);
    return status;
}

static fsdp_status load_all(FILE *out, toy *net, const fsdp_sd *full, const fsdp_sd *sharded,
                            fsdp_error *err)
{
    bool is_first = fsdp_world_rank(net->world) == 0;
    FSDP_TRY(load_one(out, "optim shard", fsdp_v1_shard_full_optim_state_dict, net, full, err));
    FSDP_TRY(load_one(out, "optim flatten", fsdp_v1_flatten_sharded_optim_state_dict, net, sharded,
                      err));
    return load_one(out, "optim scatter", fsdp_v1_scatter_full_optim_state_dict, net,
                    is_first ? full : NULL, err);
}

static fsdp_status print_optim(FILE *out, toy *net, fsdp_error *err)
{
    const fsdp_v1_state_opts opts = {.type = FSDP_V1_SHARDED_STATE_DICT, .offload_to_cpu = true};
    int rank = fsdp_world_rank(net->world);
    fsdp_sd *full = NULL, *sharded = NULL;
    fsdp_status status = fsdp_v1_optim_state_dict(net->v1, net->optim, NULL, &full, err);
    if (status == FSDP_OK)
        status = fsdp_v1_optim_state_dict(net->v1, net->optim, &opts, &sharded, err);
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
    if (setup->v1.unit.strategy < FSDP_V1_NO_SHARD)
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

static int rank_main(fsdp_world *world, int argc, char **argv, void *user)
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
