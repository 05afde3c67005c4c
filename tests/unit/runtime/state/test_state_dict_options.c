/*
 * Names in state dicts: those that getting gives, in both forms of hyper-parameters, and all forms that
 * setting accepts; missing, unexpected and refused entries.
 */
#include "tests/unit/runtime/expect_toy.h"
#include "base/text.h"

/* --- helpers ------------------------------------------------------------------------------------ */

/* Adds an entry of another dict under another name. */
static fsdp_status copy_as(fsdp_sd *to, const fsdp_entry *entry, const char *name, fsdp_error *err)
{
    if (entry->kind == FSDP_ENTRY_VALUE)
        return fsdp_sd_add_value(to, name, strlen(name), &entry->value, err);
    return fsdp_sd_add_tensor(
        to, name, strlen(name),
        &(fsdp_tensor){entry->dtype, entry->ndim, entry->shape, entry->layout, entry->data}, err);
}

typedef const char *(*rename_entry)(const char *name, char *out, size_t room);

/* A copy of the dict with names changed by `rename` (NULL leaves an entry out), without aliases. */
static fsdp_status rename_all(const fsdp_sd *sd, rename_entry rename, fsdp_sd **sd_out,
                              fsdp_error *err)
{
    char room[200];
    FSDP_TRY(fsdp_sd_create(sd_out, err));
    for (size_t i = 0; i < fsdp_sd_count(sd); i++) {
        const fsdp_entry *entry = fsdp_sd_at(sd, i);
        const char *name = rename(entry->name, room, sizeof room);
        if (name && entry->kind != FSDP_ENTRY_ALIAS)
            FSDP_TRY(copy_as(*sd_out, entry, name, err));
    }
    return FSDP_OK;
}

static const char *as_it_is(const char *name, char *out, size_t room)
{
    (void)out;
    (void)room;
    return name;
}

static fsdp_status expect_names(toy *net, const fsdp_state_opts *opts, const char *names,
                                fsdp_error *err)
{
    fsdp_sd *sd = NULL;
    FSDP_TRY(net_get(net, opts, &sd, err));
    fsdp_status status = net_expect_names(sd, names, err);
    fsdp_sd_free(sd);
    return status;
}

/* Trains, keeps a copy, overwrites everything, sets the copy after `change`, and compares. */
static fsdp_status expect_round_trip(toy *net, const fsdp_state_opts *opts, rename_entry change,
                                     fsdp_error *err)
{
    fsdp_state_opts copied = *opts;
    fsdp_sd *before = NULL, *changed = NULL, *after = NULL;
    copied.cpu_offload = true;
    FSDP_TRY(net_train(net, 2, err));
    FSDP_TRY(net_get(net, &copied, &before, err));
    FSDP_TRY(rename_all(before, change, &changed, err));
    FSDP_TRY(net_spoil(net, err));
    FSDP_TRY(net_set(net, opts, changed, err));
    FSDP_TRY(net_get(net, opts, &after, err));
    FSDP_TRY(net_expect_equal(before, after, fsdp_world_rank(net->rank->world), err));
    EXPECT(fsdp_optim_lr(net->optim, 0) == 0.25 && fsdp_optim_lr(net->optim, 1) == 0.125);
    fsdp_sd_free(after);
    fsdp_sd_free(changed);
    fsdp_sd_free(before);
    return FSDP_OK;
}

/* --- names --------------------------------------------------------------------------------------- */

#define MODEL                                                                         \
    "model.embed.weight model.head.weight model.layers.0.weight model.layers.0.bias " \
    "model.layers.1.weight model.layers.1.bias "
#define BUFFERS "model.norm.mean model.norm.count"
#define STATE(name) \
    "optim.state." name ".step optim.state." name ".exp_avg optim.state." name ".exp_avg_sq"
#define STATES                                                         \
    STATE("embed.weight")                                              \
    " " STATE("layers.0.weight") " " STATE("layers.0.bias") " " STATE( \
        "layers.1.weight") " " STATE("layers.1.bias")
#define HYPERS(name)                                                                             \
    " optim.param_groups." name ".lr optim.param_groups." name ".betas optim.param_groups." name \
    ".eps optim.param_groups." name ".weight_decay optim.param_groups." name ".maximize"

static fsdp_status list_names(toy *net, fsdp_error *err)
{
    const fsdp_state_opts model = {.part = FSDP_STATE_MODEL}, optim = {.part = FSDP_STATE_OPTIM};
    const fsdp_state_opts trained = {.part = FSDP_STATE_MODEL, .ignore_frozen = true};
    const fsdp_state_opts nested = {.part = FSDP_STATE_OPTIM, .nested_optim = true};
    FSDP_TRY(expect_names(net, &model, MODEL "model.norm.scale " BUFFERS, err));
    FSDP_TRY(expect_names(net, &trained, MODEL BUFFERS, err));
    FSDP_TRY(expect_names(net, &nested, STATES " optim.param_groups", err));
    return expect_names(net, &optim,
                        STATES HYPERS("embed.weight") HYPERS("layers.0.weight")
                            HYPERS("layers.0.bias") HYPERS("layers.1.weight")
                                HYPERS("layers.1.bias"),
                        err);
}

Test(state_dict_options, names_are_those_of_the_model)
{
    expect_net(list_names, NULL);
}

static const char *drop_last(void *user, const char *name)
{
    snprintf(user, 100, "%.*s_", (int)strlen(name) - 1, name);
    return strncmp(name, "layers.", 7) == 0 ? user : NULL;
}

static fsdp_status rename_names(toy *net, fsdp_error *err)
{
    char room[100];
    const fsdp_state_opts opts = {
        .part = FSDP_STATE_MODEL, .model_prefix = "m/", .rename = drop_last, .context = room};
    const fsdp_state_opts both = {
        .model_prefix = "", .optim_prefix = "", .rename = drop_last, .context = room};
    FSDP_TRY(expect_names(net, &opts,
                          "m/embed.weight m/head.weight m/layers.0.weigh_ m/layers.0.bia_ "
                          "m/layers.1.weigh_ m/layers.1.bia_ m/norm.scale m/norm.mean m/norm.count",
                          err));
    return expect_round_trip(net, &both, as_it_is, err);
}

Test(state_dict_options, the_caller_renames_and_prefixes_names)
{
    expect_net(rename_names, NULL);
}

static const char *call_all_same(void *user, const char *name)
{
    (void)user;
    (void)name;
    return "w";
}

static fsdp_status choose_submodules(toy *net, fsdp_error *err)
{
    const char *layers[] = {"layers.1"}, *head[] = {"head", "norm"},
               *two[] = {"layers.0", "layers.1"};
    const char *none[] = {"layers.2"}, *part[] = {"layer"};
    fsdp_state_opts opts = {.submodules = layers, .submodule_count = 1, .part = FSDP_STATE_MODEL};
    fsdp_sd *sd = NULL;
    FSDP_TRY(expect_names(net, &opts, "model.layers.1.weight model.layers.1.bias", err));
    opts.drop_submodule_prefixes = true;
    FSDP_TRY(expect_names(net, &opts, "model.weight model.bias", err));
    opts.part = FSDP_STATE_ALL;
    opts.nested_optim = true;
    FSDP_TRY(expect_names(
        net, &opts,
        "model.weight model.bias " STATE("weight") " " STATE("bias") " optim.param_groups", err));
    FSDP_TRY(expect_round_trip(net, &opts, as_it_is, err));
    opts = (fsdp_state_opts){.submodules = head, .submodule_count = 2, .part = FSDP_STATE_MODEL};
    FSDP_TRY(expect_names(net, &opts, "model.head.weight model.norm.scale " BUFFERS, err));
    opts =
        (fsdp_state_opts){.submodules = two, .submodule_count = 2, .drop_submodule_prefixes = true};
    EXPECT_REFUSAL(net_get(net, &opts, &sd, why),
                   "'layers.0.weight' and 'layers.1.weight' would both be 'weight'");
    opts = (fsdp_state_opts){.rename = call_all_same};
    EXPECT_REFUSAL(net_get(net, &opts, &sd, why), "would both be 'w'");
    opts = (fsdp_state_opts){.submodules = none, .submodule_count = 1};
    EXPECT_REFUSAL(net_get(net, &opts, &sd, why), "no parameter is below 'layers.2'");
    opts.submodules = part;
    EXPECT_REFUSAL(net_get(net, &opts, &sd, why), "no parameter is below 'layer'");
    return FSDP_OK;
}

Test(state_dict_options, only_the_wanted_submodules_are_in_a_dict)
{
    expect_net(choose_submodules, NULL);
}

/* --- both forms ----------------------------------------------------------------------------------- */

static fsdp_status set_both_forms(toy *net, fsdp_error *err)
{
    const fsdp_state_opts flat = {0}, nested = {.nested_optim = true};
    const fsdp_state_opts frozen = {.ignore_frozen = true, .nested_optim = true};
    FSDP_TRY(expect_round_trip(net, &flat, as_it_is, err));
    FSDP_TRY(expect_round_trip(net, &frozen, as_it_is, err));
    return expect_round_trip(net, &nested, as_it_is, err);
}

Test(state_dict_options, hyper_parameters_are_set_in_either_form)
{
    expect_net(set_both_forms, NULL);
}

static fsdp_status look_at_groups(toy *net, fsdp_error *err)
{
    const fsdp_state_opts nested = {.part = FSDP_STATE_OPTIM, .nested_optim = true};
    fsdp_sd *sd = NULL;
    FSDP_TRY(net_get(net, &nested, &sd, err));
    const fsdp_entry *entry = net_entry(sd, "optim.param_groups");
    const fsdp_value *groups = entry->value.as.list.items;
    EXPECT(entry->path_count == 2 && entry->path[0] == 5 && entry->path[1] == 12);
    EXPECT(entry->value.as.list.count == 2);
    const fsdp_value *items = groups[1].as.list.items;
    EXPECT(groups[1].kind == FSDP_VALUE_DICT && groups[1].as.list.count == 12);
    EXPECT(strcmp(items[0].as.bytes.data, "lr") == 0 && items[1].as.f64 == 0.125);
    EXPECT(strcmp(items[2].as.bytes.data, "betas") == 0 && items[3].is_tuple &&
           items[3].as.list.items[1].as.f64 == 0.999);
    EXPECT(strcmp(items[10].as.bytes.data, "params") == 0 && items[11].as.list.count == 2);
    EXPECT(strcmp(items[11].as.list.items[1].as.bytes.data, "layers.1.bias") == 0);
    fsdp_sd_free(sd);
    return FSDP_OK;
}

Test(state_dict_options, the_list_of_groups_is_that_of_an_optimizer)
{
    expect_net(look_at_groups, NULL);
}

/* --- other names of the same ----------------------------------------------------------------------- */

/* Another name of a tied parameter. */
static const char *by_alias(const char *name, char *out, size_t room)
{
    const char *at = strstr(name, "embed.weight");
    if (!at)
        return name;
    snprintf(out, room, "%.*shead.weight%s", (int)(at - name), name, at + strlen("embed.weight"));
    return out;
}

/* The numbers of Optimizer.state_dict(): the group of weights, then that of biases. */
static const char *by_number(const char *name, char *out, size_t room)
{
    static const char *const names[] = {"embed.weight", "layers.0.weight", "layers.1.weight",
                                        "layers.0.bias", "layers.1.bias"};
    static const char state[] = "optim.state.";
    size_t size = sizeof state - 1;
    if (strncmp(name, state, size) != 0)
        return name;
    for (int i = 0; i < 5; i++)
        if (strncmp(name + size, names[i], strlen(names[i])) == 0)
            snprintf(out, room, "%s%d%s", state, i, name + size + strlen(names[i]));
    return out;
}

static fsdp_status set_other_names(toy *net, fsdp_error *err)
{
    const fsdp_state_opts flat = {0}, nested = {.nested_optim = true};
    FSDP_TRY(expect_round_trip(net, &flat, by_alias, err));
    FSDP_TRY(expect_round_trip(net, &flat, by_number, err));
    return expect_round_trip(net, &nested, by_number, err);
}

Test(state_dict_options, state_is_found_by_aliases_and_numbers)
{
    expect_net(set_other_names, NULL);
}

/* Numbers in the list of groups, in another order; each belongs to the name at its place. */
static fsdp_status number_list(const fsdp_value *names, fsdp_value *numbers_out, fsdp_error *err)
{
    static const int64_t numbers[] = {7, 3, 5, 1, 0};
    int64_t at = 0;
    FSDP_TRY(fsdp_value_copy(names, numbers_out, err));
    for (size_t g = 0; g < numbers_out->as.list.count; g++) {
        fsdp_value *group = &numbers_out->as.list.items[g];
        fsdp_value *members = &group->as.list.items[group->as.list.count - 1];
        for (size_t i = 0; i < members->as.list.count; i++) {
            fsdp_value_release(&members->as.list.items[i]);
            members->as.list.items[i] = fsdp_value_i64(numbers[at++]);
        }
    }
    return FSDP_OK;
}

static const char *by_own_number(const char *name, char *out, size_t room)
{
    static const int numbers[] = {7, 3, 5, 1, 0};
    static const char state[] = "optim.state.";
    char plain[200];
    const char *numbered = by_number(name, plain, sizeof plain);
    if (numbered == name)
        return name;
    int position = numbered[sizeof state - 1] - '0';
    snprintf(out, room, "%s%d%s", state, numbers[position], numbered + sizeof state);
    return out;
}

static fsdp_status set_numbered_groups(toy *net, fsdp_error *err)
{
    const fsdp_state_opts nested = {.nested_optim = true, .cpu_offload = true};
    fsdp_sd *before = NULL, *numbered = NULL, *after = NULL;
    fsdp_value list = {0};
    FSDP_TRY(net_train(net, 1, err));
    FSDP_TRY(net_get(net, &nested, &before, err));
    FSDP_TRY(rename_all(before, by_own_number, &numbered, err));
    int64_t at = fsdp_sd_find(numbered, FSDP_NAME("optim.param_groups"));
    FSDP_TRY(number_list(&fsdp_sd_at(numbered, (size_t)at)->value, &list, err));
    fsdp_sd_set_value(numbered, (size_t)at, &list);
    FSDP_TRY(net_spoil(net, err));
    FSDP_TRY(net_set(net, &nested, numbered, err));
    FSDP_TRY(net_get(net, &nested, &after, err));
    FSDP_TRY(net_expect_equal(before, after, fsdp_world_rank(net->rank->world), err));
    fsdp_sd_free(after);
    fsdp_sd_free(numbered);
    fsdp_sd_free(before);
    return FSDP_OK;
}

Test(state_dict_options, numbers_mean_what_the_list_of_groups_says)
{
    expect_net(set_numbered_groups, NULL);
}

/* "optim.param_groups.1.lr" and "optim.param_groups.1.params.0": the list as flattening programs write it. */
static fsdp_status set_spelled_groups(toy *net, fsdp_error *err)
{
    const fsdp_state_opts opts = {.part = FSDP_STATE_OPTIM, .partial = true};
    const fsdp_value lr = fsdp_value_f64(3), number = fsdp_value_i64(0);
    fsdp_load_report report;
    fsdp_sd *sd = NULL;
    FSDP_TRY(fsdp_sd_create(&sd, err));
    FSDP_TRY(fsdp_sd_add_value(sd, FSDP_NAME("optim.param_groups.1.lr"), &lr, err));
    FSDP_TRY(fsdp_sd_add_value(sd, FSDP_NAME("optim.param_groups.1.params.0"), &number, err));
    FSDP_TRY(fsdp_sd_add_value(sd, FSDP_NAME("optim.param_groups.1.fused"), &number, err));
    FSDP_TRY(fsdp_sd_add_value(sd, FSDP_NAME("optim.param_groups.2.lr"), &lr, err));
    FSDP_TRY(fsdp_root_set_state(net->root, sd, &opts, &report, err));
    EXPECT(fsdp_optim_lr(net->optim, 0) == 0.25 && fsdp_optim_lr(net->optim, 1) == 3);
    EXPECT(report.unexpected_count == 2);
    EXPECT(strcmp(report.unexpected[0], "optim.param_groups.1.fused") == 0);
    EXPECT(strcmp(report.unexpected[1], "optim.param_groups.2.lr") == 0);
    fsdp_load_report_release(&report);
    fsdp_sd_free(sd);
    return FSDP_OK;
}

/* The list as PyTorch saves it: members identify each group, in any order. */
static fsdp_status set_groups_in_pieces(toy *net, fsdp_error *err)
{
    const fsdp_state_opts opts = {.part = FSDP_STATE_OPTIM, .partial = true};
    const char *const members[] = {"layers.1.bias", "embed.weight"};
    const int64_t numbers[] = {4, 9};
    for (int is_number = 0; is_number < 2; is_number++) {
        fsdp_sd *sd = NULL;
        FSDP_TRY(fsdp_sd_create(&sd, err));
        for (int g = 0; g < 2; g++) {
            char name[64];
            fsdp_value list = {0}, lr = fsdp_value_f64(g + 5 + is_number);
            FSDP_TRY(fsdp_value_set_items(&list, FSDP_VALUE_LIST,
                                          is_number ? 5 - 3 * (size_t)(g == 0) : 1, err));
            for (size_t i = 0; i < list.as.list.count; i++) {
                fsdp_value *item = &list.as.list.items[i];
                if (is_number)
                    *item = fsdp_value_i64(numbers[g] + (int64_t)i);
                else
                    FSDP_TRY(fsdp_value_set_bytes(item, FSDP_VALUE_STRING, members[g],
                                                  strlen(members[g]), err));
            }
            snprintf(name, sizeof name, "optim.param_groups.%d.lr", g);
            FSDP_TRY(fsdp_sd_add_value(sd, name, strlen(name), &lr, err));
            snprintf(name, sizeof name, "optim.param_groups.%d.params", g);
            FSDP_TRY(fsdp_sd_add_value(sd, name, strlen(name), &list, err));
            fsdp_value_release(&list);
        }
        if (is_number) /* two numbers, then five: a weight and the biases would be one group */
            EXPECT_REFUSAL(net_set(net, &opts, sd, why), "which are in two groups here");
        else
            FSDP_TRY(net_set(net, &opts, sd, err));
        EXPECT(fsdp_optim_lr(net->optim, 0) == 6 && fsdp_optim_lr(net->optim, 1) == 5);
        fsdp_sd_free(sd);
    }
    return FSDP_OK;
}

Test(state_dict_options, groups_in_pieces_are_found_by_their_members)
{
    expect_net(set_groups_in_pieces, NULL);
}

/* Entries in the order of names, which is not that of places: numbers count by the places. */
static fsdp_status set_numbers_in_pieces(toy *net, fsdp_error *err)
{
    const fsdp_state_opts opts = {.part = FSDP_STATE_OPTIM, .partial = true};
    fsdp_sd *sd = NULL;
    FSDP_TRY(fsdp_sd_create(&sd, err));
    for (int g = 2; g-- > 0;) {
        char name[64];
        fsdp_value list = {0}, lr = fsdp_value_f64(g + 5);
        FSDP_TRY(fsdp_value_set_items(&list, FSDP_VALUE_LIST, g == 0 ? 3 : 2, err));
        for (size_t i = 0; i < list.as.list.count; i++)
            list.as.list.items[i] = fsdp_value_i64(3 * g + (int64_t)i);
        snprintf(name, sizeof name, "optim.param_groups.%d.lr", g);
        FSDP_TRY(fsdp_sd_add_value(sd, name, strlen(name), &lr, err));
        snprintf(name, sizeof name, "optim.param_groups.%d.params", g);
        FSDP_TRY(fsdp_sd_add_value(sd, name, strlen(name), &list, err));
        fsdp_value_release(&list);
    }
    FSDP_TRY(net_set(net, &opts, sd, err));
    EXPECT(fsdp_optim_lr(net->optim, 0) == 5 && fsdp_optim_lr(net->optim, 1) == 6);
    fsdp_sd_free(sd);
    return FSDP_OK;
}

Test(state_dict_options, numbers_in_pieces_count_by_the_places_of_their_groups)
{
    expect_net(set_numbers_in_pieces, NULL);
}

Test(state_dict_options, groups_may_be_spelled_by_their_place)
{
    expect_net(set_spelled_groups, NULL);
}

/* A name that is the beginning of another one: the longer one is used. */
static fsdp_status declare_nested_names(toy *net, fsdp_error *err)
{
    fsdp_param *longer;
    FSDP_TRY(net_add(net, "x", 1, (int64_t[]){5}, NULL, err));
    FSDP_TRY(net_add(net, "x.bias", 1, (int64_t[]){5}, &longer, err));
    return fsdp_model_add_alias(net->model, "x.bias.y", longer, err);
}

static const char *by_longest(const char *name, char *out, size_t room)
{
    const char *at = strstr(name, "x.bias.");
    if (!at || strncmp(name, "optim.", 6) != 0)
        return name;
    snprintf(out, room, "%.*sx.bias.y.%s", (int)(at - name), name, at + strlen("x.bias."));
    return out;
}

static fsdp_status set_nested_names(toy *net, fsdp_error *err)
{
    return expect_round_trip(net, &(fsdp_state_opts){0}, by_longest, err);
}

Test(state_dict_options, names_are_cut_behind_the_longest_that_is_known)
{
    expect_net_on("cpu",
                  (toy_case){1, {2}, {"dp"}, declare_nested_names, set_nested_names, NULL, {0}});
}

/* Tied tensors that differ: the one under the parameter's first name is used, in any order. */
static fsdp_status set_diverged(toy *net, fsdp_error *err)
{
    const fsdp_state_opts opts = {.part = FSDP_STATE_MODEL, .partial = true};
    const char *names[] = {"model.head.weight", "model.embed.weight", "model.head.weight"};
    const fsdp_param *embed = fsdp_model_find(net->model, "embed.weight");
    float heads[36], embeds[36];
    fsdp_box box;
    for (int i = 0; i < 36; i++) {
        heads[i] = 1;
        embeds[i] = 2;
    }
    for (int first = 0; first < 2; first++) {
        fsdp_sd *sd = NULL;
        FSDP_TRY(fsdp_sd_create(&sd, err));
        for (int i = first; i < first + 2; i++)
            FSDP_TRY(fsdp_sd_add_tensor(
                sd, names[i], strlen(names[i]),
                &(fsdp_tensor){FSDP_F32, 2, fsdp_param_describe(embed).shape,
                               *fsdp_param_describe(embed).layout, i == 1 ? embeds : heads},
                err));
        FSDP_TRY(net_spoil(net, err));
        FSDP_TRY(net_set(net, &opts, sd, err));
        const float *data = fsdp_param_shard(fsdp_model_find(net->model, "embed.weight"), &box);
        for (int64_t i = 0; i < fsdp_box_count(&box); i++)
            EXPECT(data[i] == 2);
        fsdp_sd_free(sd);
    }
    return FSDP_OK;
}

Test(state_dict_options, of_tied_tensors_the_parameters_own_name_counts)
{
    expect_net(set_diverged, NULL);
}

/* --- numbers as tensors, tensors as numbers -------------------------------------------------------- */

static fsdp_status set_scalars(toy *net, fsdp_error *err)
{
    const fsdp_state_opts opts = {.partial = true};
    const fsdp_layout copies = {.kind = FSDP_LAYOUT_MESH, .mesh = net->mesh};
    const fsdp_value step = fsdp_value_i64(12), count = fsdp_value_i64(((int64_t)1 << 60) + 1);
    uint8_t small = 200;
    int16_t negative = -3;
    double lr = 0.75;
    fsdp_sd *sd = NULL, *live = NULL;
    FSDP_TRY(fsdp_sd_create(&sd, err));
    FSDP_TRY(fsdp_sd_add_value(sd, FSDP_NAME("optim.state.layers.0.bias.step"), &step, err));
    FSDP_TRY(fsdp_sd_add_tensor(sd, FSDP_NAME("optim.state.layers.1.bias.step"),
                                &(fsdp_tensor){FSDP_U8, 0, NULL, copies, &small}, err));
    FSDP_TRY(fsdp_sd_add_tensor(sd, FSDP_NAME("optim.state.embed.weight.step"),
                                &(fsdp_tensor){FSDP_I16, 0, NULL, copies, &negative}, err));
    FSDP_TRY(fsdp_sd_add_tensor(sd, FSDP_NAME("optim.param_groups.embed.weight.lr"),
                                &(fsdp_tensor){FSDP_F64, 0, NULL, copies, &lr}, err));
    FSDP_TRY(fsdp_sd_add_value(sd, FSDP_NAME("model.norm.count"), &count, err));
    FSDP_TRY(net_set(net, &opts, sd, err));
    FSDP_TRY(net_get(net, NULL, &live, err));
    EXPECT(*(float *)net_entry(live, "optim.state.layers.0.bias.step")->data == 12);
    EXPECT(*(float *)net_entry(live, "optim.state.layers.1.bias.step")->data == 200);
    EXPECT(*(float *)net_entry(live, "optim.state.embed.weight.step")->data == -3);
    EXPECT(*(int64_t *)net_entry(live, "model.norm.count")->data == ((int64_t)1 << 60) + 1);
    EXPECT(fsdp_optim_lr(net->optim, 0) == 0.75);
    fsdp_sd_free(live);
    fsdp_sd_free(sd);
    return FSDP_OK;
}

Test(state_dict_options, a_step_is_a_number_or_a_tensor_without_dims)
{
    expect_net(set_scalars, NULL);
}

/* --- state of PyTorch's SGD ------------------------------------------------------------------------- */

static const char *without_steps(const char *name, char *out, size_t room)
{
    (void)out;
    (void)room;
    size_t size = strlen(name);
    return size > 5 && strcmp(name + size - 5, ".step") == 0 ? NULL : name;
}

static fsdp_status set_momentum_without_steps(toy *net, fsdp_error *err)
{
    fsdp_sgd_opts sgd = {0};
    fsdp_optim *optim;
    const fsdp_state_opts opts = {.part = FSDP_STATE_OPTIM, .optims = &optim, .optim_count = 1};
    fsdp_state_opts copied = opts;
    fsdp_sd *all = NULL, *less = NULL, *live = NULL;
    copied.cpu_offload = true;
    sgd.momentum = 0.9;
    FSDP_TRY(fsdp_sgd_create(net->root, &sgd, &optim, err));
    FSDP_TRY(fsdp_root_get_state(net->root, &copied, &all, err));
    FSDP_TRY(rename_all(all, without_steps, &less, err));
    FSDP_TRY(fsdp_root_set_state(net->root, less, &opts, NULL, err));
    FSDP_TRY(fsdp_root_get_state(net->root, &opts, &live, err));
    EXPECT(*(float *)net_entry(live, "optim.state.layers.0.bias.step")->data == 1);
    fsdp_sd_free(live);
    fsdp_sd_free(less);
    fsdp_sd_free(all);
    fsdp_optim_free(optim);
    return FSDP_OK;
}

Test(state_dict_options, a_momentum_without_steps_is_gone_on_with)
{
    expect_net(set_momentum_without_steps, NULL);
}

/* --- missing, unexpected ---------------------------------------------------------------------------- */

static const char *without_moments_of_bias(const char *name, char *out, size_t room)
{
    (void)out;
    (void)room;
    return strncmp(name, "optim.state.layers.1.bias", 25) == 0 ? NULL : name;
}

static const char *with_unknown_names(const char *name, char *out, size_t room)
{
    (void)out;
    (void)room;
    if (strcmp(name, "model.layers.0.bias") == 0)
        return "model.layers.0.scale";
    if (strcmp(name, "optim.state.layers.0.bias.exp_avg") == 0)
        return "optim.state.layers.0.bias.exp_max";
    return strcmp(name, "model.norm.mean") == 0 ? "epoch" : name;
}

static fsdp_status set_unfitting(toy *net, fsdp_error *err)
{
    const fsdp_state_opts strict = {0}, loose = {.partial = true}, copied = {.cpu_offload = true};
    fsdp_load_report report;
    fsdp_sd *all = NULL, *less = NULL, *unfit = NULL, *now = NULL;
    FSDP_TRY(net_train(net, 1, err));
    FSDP_TRY(net_get(net, &copied, &all, err));
    FSDP_TRY(rename_all(all, without_moments_of_bias, &less, err));
    EXPECT_REFUSAL(net_set(net, &strict, less, why),
                   "the state dict does not fit; 3 missing: 'optim.state.layers.1.bias.step', "
                   "'optim.state.layers.1.bias.exp_avg'");
    FSDP_TRY(net_set(net, &loose, less, err));
    FSDP_TRY(rename_all(all, with_unknown_names, &unfit, err));
    FSDP_TRY(net_spoil(net, err));
    EXPECT_REFUSAL(net_set(net, &strict, unfit, why), "2 unexpected: 'model.layers.0.scale'");
    fsdp_status status = fsdp_root_set_state(net->root, unfit, &strict, &report, NULL);
    EXPECT(status == FSDP_ERR_USAGE && report.missing_count == 3 && report.unexpected_count == 2);
    EXPECT(strcmp(report.missing[0], "model.layers.0.bias") == 0);
    EXPECT(strcmp(report.missing[1], "model.norm.mean") == 0);
    EXPECT(strcmp(report.missing[2], "optim.state.layers.0.bias.exp_avg") == 0);
    EXPECT(strcmp(report.unexpected[1], "optim.state.layers.0.bias.exp_max") == 0);
    fsdp_load_report_release(&report);
    EXPECT(fsdp_optim_lr(net->optim, 0) == 77); /* a refused dict changes nothing */
    FSDP_TRY(net_set(net, &loose, unfit, err));
    EXPECT(fsdp_optim_lr(net->optim, 0) == 0.25);
    fsdp_sd_free(now);
    fsdp_sd_free(unfit);
    fsdp_sd_free(less);
    fsdp_sd_free(all);
    return FSDP_OK;
}

Test(state_dict_options, missing_and_unexpected_names_are_returned)
{
    expect_net(set_unfitting, NULL);
}

/* A frozen parameter that is ignored is neither missing nor touched. */
static fsdp_status ignore_frozen(toy *net, fsdp_error *err)
{
    const fsdp_state_opts trained = {.ignore_frozen = true}, all_copied = {.cpu_offload = true};
    const fsdp_state_opts trained_copied = {.ignore_frozen = true, .cpu_offload = true};
    fsdp_sd *all = NULL, *part = NULL;
    fsdp_param *scale = fsdp_model_find(net->model, "norm.scale");
    fsdp_box box;
    FSDP_TRY(net_get(net, &all_copied, &all, err));
    FSDP_TRY(net_get(net, &trained_copied, &part, err));
    FSDP_TRY(net_spoil(net, err));
    FSDP_TRY(net_set(net, &trained, part, err));
    FSDP_TRY(net_set(net, &trained, all, err));
    const float *data = fsdp_param_shard(scale, &box);
    for (int64_t i = 0; i < fsdp_box_count(&box); i++)
        EXPECT(data[i] != (float)(box.lo[0] + i + 1));
    EXPECT_REFUSAL(net_set(net, NULL, part, why), "1 missing: 'model.norm.scale'");
    fsdp_sd_free(part);
    fsdp_sd_free(all);
    return FSDP_OK;
}

Test(state_dict_options, frozen_parameters_can_be_ignored)
{
    expect_net(ignore_frozen, NULL);
}

/* --- refusals ---------------------------------------------------------------------------------------- */

static fsdp_status refuse_options(toy *net, fsdp_error *err)
{
    const fsdp_state_opts parts = {.broadcast_from_rank0 = true};
    const fsdp_state_opts sent = {.broadcast_from_rank0 = true, .full_state_dict = true};
    fsdp_optim *twice[] = {net->optim, net->optim};
    const fsdp_state_opts none = {.part = FSDP_STATE_OPTIM, .optims = twice};
    const fsdp_state_opts both = {.optims = twice, .optim_count = 2};
    const fsdp_state_opts unknown = {.part = (fsdp_state_part)3};
    fsdp_sd *sd = NULL;
    EXPECT_REFUSAL(fsdp_root_get_state(net->root, &none, &sd, why), "there is no optimizer");
    EXPECT_REFUSAL(net_get(net, &unknown, &sd, why), "there is no part 3");
    EXPECT_REFUSAL(net_get(net, &sent, &sd, why), "broadcast_from_rank0 is for setting state");
    EXPECT_REFUSAL(fsdp_root_get_state(net->root, &both, &sd, why),
                   "'embed.weight' is in two optimizers");
    FSDP_TRY(fsdp_sd_create(&sd, err));
    EXPECT_REFUSAL(net_set(net, &parts, sd, why), "broadcast_from_rank0 needs full_state_dict");
    EXPECT_REFUSAL(net_set(net, NULL, sd, why), "no name begins with 'model.'");
    EXPECT_REFUSAL(net_set(net, NULL, NULL, why), "there is no state dict");
    FSDP_TRY(net_set(net, &(fsdp_state_opts){.partial = true}, sd, err));
    const fsdp_value value = {0};
    FSDP_TRY(fsdp_sd_add_value(sd, FSDP_NAME("model.layers.0._flat_param"), &value, err));
    EXPECT_REFUSAL(net_set(net, NULL, sd, why), "'model.layers.0._flat_param' is a flat parameter");
    fsdp_sd_free(sd);
    return FSDP_OK;
}

Test(state_dict_options, options_that_contradict_each_other_are_refused)
{
    expect_net(refuse_options, NULL);
}

static fsdp_status refuse_inside_step(toy *net, fsdp_error *err)
{
    fsdp_sd *sd = NULL, *other = NULL;
    FSDP_TRY(net_get(net, NULL, &sd, err));
    FSDP_TRY(fsdp_root_begin_forward(net->root, err));
    EXPECT_REFUSAL(net_get(net, NULL, &other, why), "between steps");
    EXPECT_REFUSAL(net_set(net, NULL, sd, why), "between steps");
    FSDP_TRY(fsdp_root_end_forward(net->root, err));
    FSDP_TRY(net_set(net, NULL, sd, err)); /* before backward */
    FSDP_TRY(net_forward(net, err));
    FSDP_TRY(fsdp_unit_pre_backward(net->unit[1], err));
    EXPECT_REFUSAL(net_get(net, NULL, &other, why), "between steps");
    FSDP_TRY(net_backward(net, err));
    FSDP_TRY(net_get(net, NULL, &other, err)); /* a refused dict changes nothing */
    EXPECT_REFUSAL(net_set(net, NULL, sd, why), "make the step, or drop them");
    FSDP_TRY(fsdp_unit_set(fsdp_root_unit(net->root), FSDP_UNIT_REQUIRES_GRADIENT_SYNC, false, true,
                           err));
    FSDP_TRY(fsdp_optim_step(net->optim, err));
    FSDP_TRY(net_set(net, NULL, sd, err));
    FSDP_TRY(net_forward(net, err));
    FSDP_TRY(net_backward(net, err));
    EXPECT_REFUSAL(net_set(net, NULL, sd, why), "there are gradients");
    FSDP_TRY(fsdp_root_reset(net->root, err));
    FSDP_TRY(net_set(net, NULL, sd, err));
    fsdp_sd_free(other);
    fsdp_sd_free(sd);
    return FSDP_OK;
}

Test(state_dict_options, state_is_set_only_outside_a_step)
{
    expect_net(refuse_inside_step, NULL);
}

/* Without an all-reduce over the replicas there are sums and no gradients yet. */
static fsdp_status refuse_beside_partial_sums(toy *net, fsdp_error *err)
{
    fsdp_sd *sd = NULL;
    FSDP_TRY(net_get(net, &(fsdp_state_opts){.cpu_offload = true}, &sd, err));
    FSDP_TRY(
        fsdp_unit_set(fsdp_root_unit(net->root), FSDP_UNIT_REQUIRES_ALL_REDUCE, false, true, err));
    FSDP_TRY(net_forward(net, err));
    FSDP_TRY(net_backward(net, err));
    EXPECT(!fsdp_param_shard_grad(fsdp_unit_param_at(net->unit[0], 0)));
    EXPECT_REFUSAL(net_set(net, NULL, sd, why), "there are gradients");
    FSDP_TRY(fsdp_root_reset(net->root, err));
    FSDP_TRY(net_set(net, NULL, sd, err));
    fsdp_sd_free(sd);
    return FSDP_OK;
}

Test(state_dict_options, state_is_not_set_while_partial_sums_wait)
{
    expect_net_on(
        "cpu",
        (toy_case){2, {2, 2}, {"rep", "dp"}, declare_net, refuse_beside_partial_sums, NULL, {0}});
}

/* Expects an error for the dict with one entry replaced. */
static fsdp_status refuse_entry(toy *net, const char *name, fsdp_dtype dtype, int64_t rows,
                                const char *words, fsdp_error *err)
{
    const fsdp_state_opts opts = {.partial = true};
    const fsdp_placement cut = {FSDP_SHARD, 0, 0};
    static char memory[4096];
    const fsdp_value text = {0};
    fsdp_sd *sd = NULL;
    FSDP_TRY(fsdp_sd_create(&sd, err));
    if (dtype == FSDP_DTYPE_NONE)
        FSDP_TRY(fsdp_sd_add_value(sd, name, strlen(name), &text, err));
    else
        FSDP_TRY(fsdp_sd_add_tensor(sd, name, strlen(name),
                                    &(fsdp_tensor){dtype,
                                                   1,
                                                   &rows,
                                                   {.mesh = net->mesh, .placement = {cut}},
                                                   rows == 7 ? NULL : memory},
                                    err));
    EXPECT_REFUSAL(net_set(net, &opts, sd, why), words);
    fsdp_sd_free(sd);
    return FSDP_OK;
}

static fsdp_status refuse_entries(toy *net, fsdp_error *err)
{
    FSDP_TRY(refuse_entry(net, "model.layers.0.bias", FSDP_BF16, 5,
                          "'model.layers.0.bias' is f32 here and bf16 in the state dict", err));
    FSDP_TRY(
        refuse_entry(net, "model.layers.0.bias", FSDP_F32, 6, "has shape [5] here and [6]", err));
    FSDP_TRY(refuse_entry(net, "model.layers.0.bias", FSDP_DTYPE_NONE, 0,
                          "is a tensor here and a value in the state dict", err));
    FSDP_TRY(refuse_entry(net, "optim.state.layers.0.bias.step", FSDP_DTYPE_NONE, 0,
                          "is a tensor here and a value", err));
    FSDP_TRY(refuse_entry(net, "optim.param_groups.layers.0.bias.lr", FSDP_DTYPE_NONE, 0,
                          "'lr' in 'optim.param_groups.layers.0.bias.lr' is no number", err));
    FSDP_TRY(refuse_entry(net, "optim.param_groups.layers.0.bias.betas", FSDP_F32, 5,
                          "is no list of two numbers", err));
    FSDP_TRY(
        refuse_entry(net, "optim.param_groups", FSDP_DTYPE_NONE, 0, "is no list of groups", err));
    if (fsdp_world_rank(net->rank->world) <
        2) /* of 7 rows, rank 3 of 4 has one, too; others, none */
        FSDP_TRY(refuse_entry(net, "model.norm.scale", FSDP_F32, 7, "has no memory on rank", err));
    return FSDP_OK;
}

Test(state_dict_options, entries_that_do_not_fit_are_refused_by_name)
{
    expect_net(refuse_entries, NULL);
}

static fsdp_status refuse_groups(toy *net, fsdp_error *err)
{
    const fsdp_state_opts opts = {.partial = true, .part = FSDP_STATE_OPTIM},
                          flat = {.part = FSDP_STATE_OPTIM};
    const fsdp_value other = fsdp_value_f64(9);
    fsdp_sd *sd = NULL;
    FSDP_TRY(net_get(net, &flat, &sd, err));
    fsdp_value lr = other;
    fsdp_sd_set_value(
        sd, (size_t)fsdp_sd_find(sd, FSDP_NAME("optim.param_groups.layers.1.bias.lr")), &lr);
    EXPECT_REFUSAL(net_set(net, &opts, sd, why),
                   "'lr' differs between 'optim.param_groups.layers.0.bias.lr' and "
                   "'optim.param_groups.layers.1.bias.lr', and both belong to one group here");
    fsdp_sd_free(sd);
    FSDP_TRY(
        net_get(net, &(fsdp_state_opts){.part = FSDP_STATE_OPTIM, .nested_optim = true}, &sd, err));
    fsdp_value list;
    size_t at = fsdp_sd_count(sd) - 1;
    FSDP_TRY(fsdp_value_copy(&fsdp_sd_at(sd, at)->value, &list, err));
    fsdp_value *groups = list.as.list.items;
    fsdp_value *first = &groups[0].as.list.items[11], *second = &groups[1].as.list.items[11];
    fsdp_value moved = first->as.list.items[0];
    first->as.list.items[0] = second->as.list.items[0];
    second->as.list.items[0] = moved;
    fsdp_sd_set_value(sd, at, &list);
    EXPECT_REFUSAL(net_set(net, &opts, sd, why), "which are in two groups here");
    fsdp_sd_free(sd);
    return FSDP_OK;
}

Test(state_dict_options, groups_that_do_not_match_are_refused)
{
    expect_net(refuse_groups, NULL);
}

/* --- several optimizers, empty groups ---------------------------------------------------------------- */

static fsdp_status merge_optims(toy *net, fsdp_error *err)
{
    const fsdp_optim_group biases = {net_is_bias, NULL, 0.125, 0},
                           others = {net_is_no_bias, NULL, 0.5, 0};
    fsdp_sgd_opts sgd = {0};
    fsdp_adamw_opts adamw = {.weight_decay = 0.01};
    fsdp_optim *optims[2];
    fsdp_sd *nested = NULL, *flat = NULL;
    sgd.groups = &biases;
    sgd.group_count = adamw.group_count = 1;
    sgd.momentum = 0.9;
    adamw.groups = &others;
    FSDP_TRY(fsdp_sgd_create(net->root, &sgd, &optims[0], err));
    FSDP_TRY(fsdp_adamw_create(net->root, &adamw, &optims[1], err));
    fsdp_state_opts opts = {.part = FSDP_STATE_OPTIM,
                            .optims = optims,
                            .optim_count = 2,
                            .nested_optim = true,
                            .cpu_offload = true};
    FSDP_TRY(fsdp_root_get_state(net->root, &opts, &nested, err));
    opts.nested_optim = false;
    FSDP_TRY(fsdp_root_get_state(net->root, &opts, &flat, err));
    EXPECT(net_entry(nested, "optim.param_groups")->value.as.list.count == 2);
    EXPECT(net_entry(nested, "optim.state.layers.0.bias.momentum_buffer"));
    EXPECT(net_entry(flat, "optim.param_groups.layers.0.bias.nesterov"));
    const fsdp_sd *dicts[] = {nested, flat};
    for (int i = 0; i < 2; i++) {
        FSDP_TRY(fsdp_optim_set_lr(optims[0], 0, 3, err));
        FSDP_TRY(fsdp_optim_set_lr(optims[1], 0, 3, err));
        FSDP_TRY(fsdp_root_set_state(net->root, dicts[i], &opts, NULL, err));
        EXPECT(fsdp_optim_lr(optims[0], 0) == 0.125 && fsdp_optim_lr(optims[1], 0) == 0.5);
    }
    fsdp_sd_free(flat);
    fsdp_sd_free(nested);
    fsdp_optim_free(optims[0]);
    fsdp_optim_free(optims[1]);
    return FSDP_OK;
}

Test(state_dict_options, several_optimizers_are_one_dict)
{
    expect_net(merge_optims, NULL);
}

static bool is_nothing(void *user, const fsdp_param *param)
{
    (void)user;
    (void)param;
    return false;
}

static fsdp_status match_empty_groups(toy *net, fsdp_error *err)
{
    const fsdp_optim_group groups[] = {
        {is_nothing, NULL, 0.5, 0}, {NULL, NULL, 0.25, 0}, {is_nothing, NULL, 0.125, 0}};
    fsdp_adamw_opts opts = {.weight_decay = 0.01};
    fsdp_optim *one, *two;
    const fsdp_state_opts of_one = {
        .part = FSDP_STATE_OPTIM, .optims = &one, .optim_count = 1, .nested_optim = true};
    const fsdp_state_opts of_two = {
        .part = FSDP_STATE_OPTIM, .optims = &two, .optim_count = 1, .nested_optim = true};
    fsdp_sd *sd = NULL;
    opts.groups = groups;
    opts.group_count = 2;
    FSDP_TRY(fsdp_adamw_create(net->root, &opts, &one, err));
    opts.group_count = 3;
    FSDP_TRY(fsdp_adamw_create(net->root, &opts, &two, err));
    FSDP_TRY(fsdp_root_get_state(net->root, &of_one, &sd, err));
    FSDP_TRY(fsdp_optim_set_lr(one, 0, 3, err));
    FSDP_TRY(fsdp_root_set_state(net->root, sd, &of_one, NULL, err));
    EXPECT(fsdp_optim_lr(one, 0) == 0.5 && fsdp_optim_lr(one, 1) == 0.25);
    EXPECT_REFUSAL(fsdp_root_set_state(net->root, sd, &of_two, NULL, why), "here are 2");
    fsdp_sd_free(sd);
    FSDP_TRY(fsdp_root_get_state(net->root, &of_two, &sd, err));
    EXPECT_REFUSAL(fsdp_root_set_state(net->root, sd, &of_one, NULL, why),
                   "has 2 groups without parameters");
    fsdp_sd_free(sd);
    fsdp_optim_free(one);
    fsdp_optim_free(two);
    return FSDP_OK;
}

Test(state_dict_options, a_group_without_parameters_matches_the_only_one_here)
{
    expect_net(match_empty_groups, NULL);
}

/* --- describing ---------------------------------------------------------------------------------------- */

static fsdp_status describe(toy *net, fsdp_error *err)
{
    fsdp_optim_tensor tensors[FSDP_OPTIM_TENSORS];
    const fsdp_param *weight = fsdp_model_find(net->model, "layers.0.weight");
    EXPECT(fsdp_optim_describe_state(net->optim, weight, tensors) == 3);
    EXPECT(strcmp(tensors[0].name, "step") == 0 && tensors[0].ndim == 0);
    EXPECT(strcmp(tensors[2].name, "exp_avg_sq") == 0 && tensors[2].dtype == FSDP_F32);
    EXPECT(tensors[2].ndim == 2 && tensors[2].shape[0] == 5);
    EXPECT(memcmp(&tensors[2].layout, fsdp_param_describe(weight).layout,
                  sizeof tensors[2].layout) == 0);
    const fsdp_param *frozen = fsdp_model_find(net->model, "norm.scale");
    EXPECT(fsdp_optim_describe_state(net->optim, frozen, tensors) == 0);
    return FSDP_OK;
}

Test(state_dict_options, state_is_described_before_the_first_step)
{
    expect_net(describe, NULL);
}
