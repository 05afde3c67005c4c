/* Hyper-parameters as PyTorch asks for them: names, values and nesting of the nested and the flat form. */
#include "statedict/select/optim_form.h"

#include "base/core/mem.h"
#include "base/text.h"

#include <criterion/criterion.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static fsdp_error err;

/* --- dicts ------------------------------------------------------------------------------------ */

typedef struct dict {
    fsdp_sd *sd;
    size_t *source;
    fsdp_mesh *mesh;
    fsdp_optim_form written;
} dict;

static dict begin(void)
{
    dict of = {0};
    cr_assert_eq(fsdp_sd_create(&of.sd, &err), FSDP_OK);
    cr_assert_eq(fsdp_mesh_create(1, (int64_t[]){1}, (const char *[]){"dp"}, NULL, &of.mesh, &err),
                 FSDP_OK);
    return of;
}

static void end(dict *of)
{
    fsdp_sd_free(of->sd);
    fsdp_free(of->source);
    fsdp_mesh_free(of->mesh);
}

static void put(dict *of, const char *name, fsdp_value value)
{
    cr_assert_eq(fsdp_sd_add_value(of->sd, name, strlen(name), &value, &err), FSDP_OK);
    fsdp_value_release(&value);
}

static void put_tensor(dict *of, const char *name)
{
    const fsdp_tensor tensor = {FSDP_F32, 1, (int64_t[]){2}, {.mesh = of->mesh}, NULL};
    cr_assert_eq(fsdp_sd_add_tensor(of->sd, name, strlen(name), &tensor, &err), FSDP_OK);
}

static fsdp_value text_of(const char *text)
{
    fsdp_value value = {0};
    cr_assert_eq(fsdp_value_set_bytes(&value, FSDP_VALUE_STRING, text, strlen(text), &err),
                 FSDP_OK);
    return value;
}

static fsdp_value list_of(size_t count, const fsdp_value *items)
{
    fsdp_value value = {0};
    cr_assert_eq(fsdp_value_set_items(&value, FSDP_VALUE_LIST, count, &err), FSDP_OK);
    memcpy(value.as.list.items, items, count * sizeof *items);
    return value;
}

/* Members as fsdp_root_save stores those of an AdamW. */
static void put_adamw(dict *of, const char *param, double lr)
{
    const fsdp_value betas[] = {fsdp_value_f64(0.9), fsdp_value_f64(0.5)};
    const char *const names[] = {"lr", "betas", "eps", "weight_decay", "maximize"};
    const fsdp_value values[] = {fsdp_value_f64(lr), list_of(2, betas), fsdp_value_f64(8),
                                 fsdp_value_f64(0), fsdp_value_bool(false)};
    char name[100];
    for (int i = 0; i < 5; i++) {
        snprintf(name, sizeof name, "%s.%s", param, names[i]);
        put(of, name, values[i]);
    }
}

/* Three parameters in two groups. */
static dict make_ours(void)
{
    dict of = begin();
    put_tensor(&of, "model.a.weight");
    put_tensor(&of, "optim.state.a.weight.exp_avg");
    put_adamw(&of, "optim.param_groups.a.weight", 1);
    put_adamw(&of, "optim.param_groups.a.bias", 2);
    put_adamw(&of, "optim.param_groups.b.weight", 1);
    put(&of, "step", fsdp_value_i64(7));
    return of;
}

static fsdp_status form(dict *of, fsdp_optim_form wanted)
{
    size_t count = fsdp_sd_count(of->sd);
    fsdp_free(of->source);
    of->source = fsdp_alloc(count, sizeof *of->source);
    cr_assert(of->source);
    for (size_t i = 0; i < count; i++)
        of->source[i] = i;
    err = (fsdp_error){0};
    return fsdp_optim_form_apply(wanted, &of->sd, &of->source, &of->written, &err);
}

/* --- texts ------------------------------------------------------------------------------------ */

static void add_value(fsdp_text *text, const fsdp_value *value)
{
    switch (value->kind) {
    case FSDP_VALUE_NULL: fsdp_text_addf(text, "None"); break;
    case FSDP_VALUE_BOOL: fsdp_text_addf(text, value->as.boolean ? "True" : "False"); break;
    case FSDP_VALUE_I64: fsdp_text_addf(text, "%" PRId64, value->as.i64); break;
    case FSDP_VALUE_F64: fsdp_text_addf(text, "%g", value->as.f64); break;
    case FSDP_VALUE_STRING: fsdp_text_addf(text, "'%s'", value->as.bytes.data); break;
    default:
        fsdp_text_addf(text, "[");
        for (size_t i = 0; i < value->as.list.count; i++) {
            fsdp_text_addf(text, i > 0 ? ", " : "");
            add_value(text, &value->as.list.items[i]);
        }
        fsdp_text_addf(text, "]");
    }
}

/* "optim/param_groups/#0/lr=1": elements of the path, positions with "#". */
static void add_entry(fsdp_text *text, const fsdp_entry *entry)
{
    size_t at = 0;
    for (size_t i = 0; i < entry->path_count; i++) {
        size_t size = (size_t)abs(entry->path[i]);
        fsdp_text_addf(text, "%s%s%.*s", i > 0 ? "/" : "", entry->path[i] < 0 ? "#" : "", (int)size,
                       entry->name + at);
        at += size + 1;
    }
    if (entry->path_count == 0)
        fsdp_text_addf(text, "%s", entry->name);
    if (entry->kind == FSDP_ENTRY_VALUE) {
        fsdp_text_addf(text, "=");
        add_value(text, &entry->value);
    }
    fsdp_text_addf(text, "\n");
}

static void expect(dict *of, const char *wanted)
{
    fsdp_text text = {0};
    for (size_t i = 0; i < fsdp_sd_count(of->sd); i++)
        add_entry(&text, fsdp_sd_at(of->sd, i));
    fsdp_text_add(&text, "", 1);
    cr_assert_str_eq(text.data, wanted);
    fsdp_text_release(&text);
}

#define MEMBERS(key, lr)                                                                           \
    key "lr=" lr "\n" key "betas=[0.9, 0.5]\n" key "eps=8\n" key "weight_decay=0\n" key            \
        "maximize=False\n" key "amsgrad=False\n" key "foreach=None\n" key "capturable=False\n" key \
        "differentiable=False\n" key "fused=None\n" key "decoupled_weight_decay=True\n"

#define GROUP(place, lr, params)                  \
    MEMBERS("optim/param_groups/#" place "/", lr) \
    "optim/param_groups/#" place "/params=[" params "]\n"

#define NESTED                       \
    "model.a.weight\n"               \
    "optim/state/a.weight/exp_avg\n" \
    "step=7\n" GROUP("0", "1", "'a.weight', 'b.weight'") GROUP("1", "2", "'a.bias'")
#define FLAT                                                \
    "model.a.weight\n"                                      \
    "optim/state.a.weight.exp_avg\n"                        \
    "step=7\n" MEMBERS("optim/param_groups.a.weight.", "1") \
        MEMBERS("optim/param_groups.b.weight.", "1") MEMBERS("optim/param_groups.a.bias.", "2")

/* --- forms ------------------------------------------------------------------------------------ */

Test(optim_form, ours_becomes_nested_with_pytorchs_members)
{
    dict of = make_ours();
    cr_assert_eq(form(&of, FSDP_OPTIM_FORM_DEFAULT), FSDP_OK, "%s", err.text);
    cr_assert_eq(of.written, FSDP_OPTIM_FORM_NESTED);
    expect(&of, NESTED);
    /* what the plan says: the model's tensor, the step, betas of the first group, of the second */
    cr_assert(of.source[0] == 0 && of.source[2] == 17 && of.source[4] == 3 && of.source[16] == 8);
    end(&of);
}

Test(optim_form, forms_become_each_other)
{
    dict of = make_ours();
    cr_assert_eq(form(&of, FSDP_OPTIM_FORM_FLAT), FSDP_OK, "%s", err.text);
    expect(&of, FLAT);
    cr_assert_eq(form(&of, FSDP_OPTIM_FORM_NESTED), FSDP_OK, "%s", err.text);
    expect(&of, NESTED);
    cr_assert_eq(form(&of, FSDP_OPTIM_FORM_FLAT), FSDP_OK, "%s", err.text);
    cr_assert_eq(of.written, FSDP_OPTIM_FORM_FLAT);
    expect(&of, FLAT);
    end(&of);
}

Test(optim_form, sgd_gets_its_own_members)
{
    const char *const names[] = {"lr",           "momentum", "dampening",
                                 "weight_decay", "nesterov", "maximize"};
    dict of = begin();
    char name[100];
    for (int i = 0; i < 6; i++) {
        snprintf(name, sizeof name, "param_groups.w.%s", names[i]);
        put(&of, name, i < 4 ? fsdp_value_f64(i) : fsdp_value_bool(false));
    }
    cr_assert_eq(form(&of, FSDP_OPTIM_FORM_DEFAULT), FSDP_OK, "%s", err.text);
    expect(&of, "param_groups/#0/lr=0\nparam_groups/#0/momentum=1\nparam_groups/#0/dampening=2\n"
                "param_groups/#0/weight_decay=3\nparam_groups/#0/nesterov=False\n"
                "param_groups/#0/maximize=False\nparam_groups/#0/foreach=None\n"
                "param_groups/#0/differentiable=False\nparam_groups/#0/fused=None\n"
                "param_groups/#0/params=['w']\n");
    end(&of);
}

/* fsdp_root_save stores one value with nested_optim. */
Test(optim_form, a_list_in_one_value_is_taken_apart)
{
    dict of = begin();
    const char *const keys[] = {"lr", "betas", "eps", "weight_decay", "maximize", "params"};
    const fsdp_value name = text_of("w"), members = list_of(1, &name);
    fsdp_value group = {0};
    cr_assert_eq(fsdp_value_set_items(&group, FSDP_VALUE_DICT, 12, &err), FSDP_OK);
    for (size_t i = 0; i < 6; i++) {
        group.as.list.items[2 * i] = text_of(keys[i]);
        group.as.list.items[2 * i + 1] = i < 5 ? fsdp_value_i64((int64_t)i) : members;
    }
    put(&of, "optim.param_groups", list_of(1, &group));
    cr_assert_eq(form(&of, FSDP_OPTIM_FORM_DEFAULT), FSDP_OK, "%s", err.text);
    cr_assert_eq(fsdp_sd_count(of.sd), 12);
    cr_assert_str_eq(fsdp_sd_at(of.sd, 0)->name, "optim.param_groups.0.lr");
    cr_assert_str_eq(fsdp_sd_at(of.sd, 11)->name, "optim.param_groups.0.params");
    end(&of);
}

/* --- groups that stay ------------------------------------------------------------------------- */

static void expect_unchanged(dict *of, const char *refusal)
{
    const fsdp_sd *before = of->sd;
    cr_assert_eq(form(of, FSDP_OPTIM_FORM_DEFAULT), FSDP_OK, "%s", err.text);
    cr_assert(of->sd == before && of->written == FSDP_OPTIM_FORM_DEFAULT);
    if (!refusal)
        return;
    cr_assert_eq(form(of, FSDP_OPTIM_FORM_FLAT), FSDP_ERR_USAGE);
    cr_assert(strstr(err.text, refusal), "%s", err.text);
    cr_assert(of->sd == before);
}

Test(optim_form, other_programs_groups_stay)
{
    dict of = make_ours();
    put(&of, "optim.param_groups.b.weight.foreach", fsdp_value_bool(true));
    expect_unchanged(&of, NULL);
    end(&of);
    of = begin();
    put_tensor(&of, "param_groupsy");
    put(&of, "param_groups", fsdp_value_i64(1));
    expect_unchanged(&of, "'param_groups' cannot take the other form: it is not a plain value");
    end(&of);
    of = begin();
    put_tensor(&of, "optim.param_groups.0.lr");
    expect_unchanged(&of, "it is not a plain value");
    end(&of);
}

/* In the order of names, group 10 comes before group 2. */
Test(optim_form, groups_keep_their_places)
{
    static const int places[] = {0, 1, 10, 11, 2, 3, 4, 5, 6, 7, 8, 9};
    enum { GROUPS = sizeof places / sizeof *places };
    dict of = begin();
    char name[60];
    for (int i = 0; i < GROUPS; i++) {
        const fsdp_value params[] = {text_of("w")};
        snprintf(name, sizeof name, "optim.param_groups.%d.lr", places[i]);
        put(&of, name, fsdp_value_i64(places[i]));
        snprintf(name, sizeof name, "optim.param_groups.%d.params", places[i]);
        put(&of, name, list_of(1, params));
    }
    cr_assert_eq(form(&of, FSDP_OPTIM_FORM_NESTED), FSDP_OK, "%s", err.text);
    for (int i = 0; i < GROUPS; i++) {
        snprintf(name, sizeof name, "optim.param_groups.%d.lr", i);
        int64_t found = fsdp_sd_find(of.sd, name, strlen(name));
        cr_assert_geq(found, 0, "%s", name);
        cr_expect_eq(fsdp_sd_at(of.sd, (size_t)found)->value.as.i64, i, "%s", name);
    }
    end(&of);
}

Test(optim_form, numbered_parameters_have_no_flat_form)
{
    dict of = begin();
    const fsdp_value number = fsdp_value_i64(0);
    put_adamw(&of, "optim.param_groups.0", 1);
    put(&of, "optim.param_groups.0.params", list_of(1, &number));
    expect_unchanged(&of, "it numbers its parameters, and get_optimizer_state_dict names them");
    end(&of);
    of = begin();
    put_adamw(&of, "optim.param_groups.0", 1);
    put(&of, "optim.param_groups.0.params", list_of(0, &number));
    cr_assert_eq(form(&of, FSDP_OPTIM_FORM_FLAT), FSDP_ERR_USAGE);
    cr_assert(strstr(err.text, "has no parameters"), "%s", err.text);
    end(&of);
}

/* The search for equal groups must stay short. */
Test(optim_form, too_many_groups_stay)
{
    dict of = begin();
    char name[100];
    for (int i = 0; i < 5000; i++) {
        snprintf(name, sizeof name, "optim.param_groups.w%d", i);
        put_adamw(&of, name, i);
    }
    expect_unchanged(&of, "there are too many groups");
    end(&of);
}
