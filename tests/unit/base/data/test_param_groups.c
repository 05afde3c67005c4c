/* Hyper-parameter groups: every spelling is read into one model and written again; damage is kept. */
#include "base/data/param_groups.h"
#include "base/text.h"

#include <criterion/criterion.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

static fsdp_error err;
static fsdp_param_groups groups;
static fsdp_text text;
static fsdp_value values[64]; /* that entries borrow */
static size_t value_count;

static void begin(void)
{
    err = (fsdp_error){0};
    value_count = 0;
}

static void end(void)
{
    fsdp_groups_release(&groups);
    fsdp_text_release(&text);
    for (size_t i = 0; i < value_count; i++)
        fsdp_value_release(&values[i]);
}

TestSuite(param_groups, .init = begin, .fini = end);

/* --- values ----------------------------------------------------------------------------------- */

static fsdp_value text_of(const char *of)
{
    fsdp_value value = {0};
    cr_assert_eq(fsdp_value_set_bytes(&value, FSDP_VALUE_STRING, of, strlen(of), &err), FSDP_OK);
    return value;
}

static fsdp_value items_of(fsdp_value_kind kind, size_t count, const fsdp_value *items)
{
    fsdp_value value = {0};
    cr_assert_eq(fsdp_value_set_items(&value, kind, count, &err), FSDP_OK);
    if (count > 0)
        memcpy(value.as.list.items, items, count * sizeof *items);
    return value;
}

#define LIST(...)                                                                       \
    items_of(FSDP_VALUE_LIST, sizeof((fsdp_value[]){__VA_ARGS__}) / sizeof(fsdp_value), \
             (const fsdp_value[]){__VA_ARGS__})
#define DICT(...)                                                                       \
    items_of(FSDP_VALUE_DICT, sizeof((fsdp_value[]){__VA_ARGS__}) / sizeof(fsdp_value), \
             (const fsdp_value[]){__VA_ARGS__})

/* Three groups: one whose options have all types, one without parameters, one with numbers of parameters. */
static fsdp_value list_of_three(void)
{
    fsdp_value betas = LIST(fsdp_value_f64(0.9), fsdp_value_f64(0.5));
    betas.is_tuple = true;
    return LIST(DICT(text_of("lr"), fsdp_value_f64(0.25), text_of("betas"), betas, text_of("step"),
                     fsdp_value_i64(-7), text_of("fused"), (fsdp_value){0}, text_of("maximize"),
                     fsdp_value_bool(true), text_of("name"), text_of("decay"), text_of("params"),
                     LIST(text_of("a.weight"), text_of("b"))),
                DICT(text_of("lr"), fsdp_value_f64(2), text_of("params"),
                     items_of(FSDP_VALUE_LIST, 0, NULL)),
                DICT(text_of("params"), LIST(fsdp_value_i64(0), fsdp_value_i64(1)), text_of("lr"),
                     fsdp_value_f64(3)));
}

/* --- reading and writing ---------------------------------------------------------------------- */

/* Reads an entry as a reader that knows places by their numbers. The values borrow `value` until the end. */
static void take(const char *name, fsdp_value value)
{
    fsdp_group_source from = {.name = name, .entry = value_count};
    cr_assert_lt(value_count, sizeof values / sizeof *values);
    values[value_count] = value;
    from.value = &values[value_count++];
    cr_assert(fsdp_group_name_split(name, strlen(name), &from.parts), "%s", name);
    bool is_place = name[from.parts.key] >= '0' && name[from.parts.key] <= '9';
    from.spelling = from.parts.option_size == 0 ? FSDP_GROUPS_LIST
                    : is_place                  ? FSDP_GROUPS_PLACES
                                                : FSDP_GROUPS_NAMES;
    cr_assert_eq(fsdp_groups_read(&groups, &from, &err), FSDP_OK, "%s", err.text);
}

static void add_value(const fsdp_value *value)
{
    switch (value->kind) {
    case FSDP_VALUE_NULL: fsdp_text_addf(&text, "None"); break;
    case FSDP_VALUE_BOOL: fsdp_text_addf(&text, value->as.boolean ? "True" : "False"); break;
    case FSDP_VALUE_I64: fsdp_text_addf(&text, "%" PRId64, value->as.i64); break;
    case FSDP_VALUE_F64: fsdp_text_addf(&text, "%.3f", value->as.f64); break;
    case FSDP_VALUE_STRING: fsdp_text_addf(&text, "'%s'", value->as.bytes.data); break;
    default:
        fsdp_text_addf(&text, "%c", "[("[value->is_tuple]);
        for (size_t i = 0; i < value->as.list.count; i++) {
            fsdp_text_addf(&text, i > 0 ? ", " : "");
            add_value(&value->as.list.items[i]);
        }
        fsdp_text_addf(&text, "%c", "])"[value->is_tuple]);
    }
}

/* "optim/param_groups/#0/lr=1": elements of the path, positions with "#". */
static fsdp_status put(void *context, const fsdp_group_entry *entry, fsdp_error *error)
{
    size_t at = 0;
    (void)error;
    for (size_t i = 0; i < entry->path_count; i++) {
        size_t size = (size_t)abs(entry->path[i]);
        fsdp_text_addf(&text, "%s%s%.*s", i > 0 ? "/" : "", entry->path[i] < 0 ? "#" : "",
                       (int)size, entry->name + at);
        at += size + 1;
    }
    cr_expect_eq(at, entry->name_size + 1, "the path of '%s'", entry->name);
    fsdp_text_addf(&text, "=");
    add_value(entry->value);
    if (context)
        fsdp_text_addf(&text, " %zu", entry->entry);
    fsdp_text_addf(&text, "\n");
    return FSDP_OK;
}

static void expect(fsdp_group_spelling spelling, const char *wanted)
{
    text.size = 0;
    for (size_t i = 0; i < groups.count; i++)
        cr_assert_eq(fsdp_group_put(&groups.items[i], spelling, put, NULL, &err), FSDP_OK);
    fsdp_text_add(&text, "", 1);
    cr_expect_str_eq(text.data, wanted);
}

#define THREE                                                                      \
    "optim/param_groups/#0/lr=0.250\noptim/param_groups/#0/betas=(0.900, 0.500)\n" \
    "optim/param_groups/#0/step=-7\noptim/param_groups/#0/fused=None\n"            \
    "optim/param_groups/#0/maximize=True\noptim/param_groups/#0/name='decay'\n"    \
    "optim/param_groups/#0/params=['a.weight', 'b']\n"                             \
    "optim/param_groups/#1/lr=2.000\noptim/param_groups/#1/params=[]\n"            \
    "optim/param_groups/#2/lr=3.000\noptim/param_groups/#2/params=[0, 1]\n"

Test(param_groups, a_list_of_three_groups_is_read_and_written)
{
    take("optim.param_groups", list_of_three());
    fsdp_groups_sort(&groups);
    expect(FSDP_GROUPS_PLACES, THREE);
    cr_expect_eq(groups.items[1].params.count, 0);
    cr_expect(groups.items[1].is_listed);
    cr_expect_null(groups.items[2].params.first->name, "a number is not a name");
    fsdp_value dicts = {0};
    cr_assert_eq(fsdp_value_set_items(&dicts, FSDP_VALUE_LIST, 3, &err), FSDP_OK);
    for (size_t i = 0; i < 3; i++)
        cr_assert_eq(fsdp_group_dict(&groups.items[i], &dicts.as.list.items[i], &err), FSDP_OK);
    fsdp_groups_release(&groups);
    take("optim.param_groups", dicts);
    expect(FSDP_GROUPS_PLACES, THREE);
    const fsdp_value *last = &dicts.as.list.items[2];
    cr_expect_eq(fsdp_group_list_params(last), &last->as.list.items[3], "params are the last item");
}

Test(param_groups, a_group_without_parameters_has_no_entry_by_name)
{
    take("optim.param_groups", list_of_three());
    groups.count = 2;
    expect(FSDP_GROUPS_NAMES, "optim/param_groups.a.weight.lr=0.250\n"
                              "optim/param_groups.a.weight.betas=(0.900, 0.500)\n"
                              "optim/param_groups.a.weight.step=-7\n"
                              "optim/param_groups.a.weight.fused=None\n"
                              "optim/param_groups.a.weight.maximize=True\n"
                              "optim/param_groups.a.weight.name='decay'\n"
                              "optim/param_groups.b.lr=0.250\n"
                              "optim/param_groups.b.betas=(0.900, 0.500)\n"
                              "optim/param_groups.b.step=-7\n"
                              "optim/param_groups.b.fused=None\n"
                              "optim/param_groups.b.maximize=True\n"
                              "optim/param_groups.b.name='decay'\n");
}

/* "00" would be the place of "0", and so would a number without end. */
Test(param_groups, one_place_has_one_spelling)
{
    static const char *const names[] = {"param_groups.00.lr", "param_groups.01.lr",
                                        "param_groups.18446744073709551617.lr"};
    take("param_groups.0.lr", fsdp_value_i64(0));
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        fsdp_group_source from = {
            .name = names[i], .value = &values[0], .spelling = FSDP_GROUPS_PLACES};
        cr_assert(fsdp_group_name_split(names[i], strlen(names[i]), &from.parts));
        cr_expect_eq(fsdp_groups_read(&groups, &from, &err), FSDP_ERR_DAMAGED);
        cr_expect(strstr(err.text, "is not the number of a group"), "%s", err.text);
    }
}

/* Entries may come in the order of names, where "10" is before "2", and those of two groups mixed. */
Test(param_groups, places_are_in_their_order_whatever_that_of_the_entries)
{
    take("optim.param_groups.10.lr", fsdp_value_i64(10));
    take("optim.param_groups.2.params", LIST(text_of("c")));
    take("param_groups.1.lr", fsdp_value_i64(1));
    take("optim.param_groups.10.params", LIST(text_of("d"), text_of("e")));
    take("optim.param_groups.2.lr", fsdp_value_f64(2));
    take("param_groups.0.lr", fsdp_value_i64(0));
    fsdp_groups_sort(&groups);
    cr_assert_eq(groups.count, 4);
    expect(FSDP_GROUPS_PLACES,
           "param_groups/#0/lr=0\nparam_groups/#1/lr=1\n"
           "optim/param_groups/#2/lr=2.000\noptim/param_groups/#2/params=['c']\n"
           "optim/param_groups/#10/lr=10\n"
           "optim/param_groups/#10/params=['d', 'e']\n");
    cr_expect(groups.items[2].entry == 1 && groups.items[2].listed == 1);
    cr_expect(groups.items[3].entry == 0 && groups.items[3].listed == 3);
    cr_expect_not(groups.items[0].is_listed);
    const fsdp_group_item *option = fsdp_group_option(&groups.items[2], "lr", 2);
    cr_assert_not_null(option);
    cr_expect(option->entry == 4 && option->value == &values[4], "values are borrowed");
    cr_expect_null(fsdp_group_option(&groups.items[2], "l", 1));
}

/* Takes five parameters of two optimizers, which have three rates. */
static void take_five_by_name(void)
{
    take("optim.param_groups.a.weight.lr", fsdp_value_f64(1));
    take("optim.param_groups.a.weight.fused", (fsdp_value){0});
    take("optim.param_groups.b.lr", fsdp_value_f64(2));
    take("optim.param_groups.b.fused", (fsdp_value){0});
    take("optim.param_groups.c.lr", fsdp_value_i64(1));
    take("optim.param_groups.c.fused", (fsdp_value){0});
    take("optim.param_groups.d.fused", (fsdp_value){0});
    take("optim.param_groups.d.lr", fsdp_value_f64(1));
    take("other.param_groups.e.lr", fsdp_value_f64(1));
    take("other.param_groups.e.fused", (fsdp_value){0});
    fsdp_groups_sort(&groups);
}

/* The integer 1 is not the number 1.0, and another optimizer's group is another one. */
Test(param_groups, parameters_with_equal_options_are_one_group)
{
    take_five_by_name();
    cr_assert_eq(groups.count, 5);
    cr_expect(fsdp_groups_join(&groups, 100));
    cr_assert_eq(groups.count, 4);
    expect(FSDP_GROUPS_PLACES, "optim/param_groups/#0/lr=1.000\noptim/param_groups/#0/fused=None\n"
                               "optim/param_groups/#0/params=['a.weight', 'd']\n"
                               "optim/param_groups/#1/lr=2.000\noptim/param_groups/#1/fused=None\n"
                               "optim/param_groups/#1/params=['b']\n"
                               "optim/param_groups/#2/lr=1\noptim/param_groups/#2/fused=None\n"
                               "optim/param_groups/#2/params=['c']\n"
                               "other/param_groups/#0/lr=1.000\nother/param_groups/#0/fused=None\n"
                               "other/param_groups/#0/params=['e']\n");
}

Test(param_groups, groups_that_are_listed_are_not_joined)
{
    take("optim.param_groups.w.lr", fsdp_value_f64(1));
    take("optim.param_groups.0.lr", fsdp_value_f64(1));
    take("optim.param_groups.1.lr", fsdp_value_f64(1));
    fsdp_groups_sort(&groups);
    cr_expect(fsdp_groups_join(&groups, 100));
    cr_expect_eq(groups.count, 3);
    cr_expect_eq(groups.items[2].spelling, FSDP_GROUPS_NAMES, "those by name come last");
}

Test(param_groups, too_many_groups_are_not_searched)
{
    take_five_by_name();
    cr_expect_not(fsdp_groups_join(&groups, 3));
    cr_expect_eq(groups.count, 3);
}

Test(param_groups, an_entry_is_known_by_its_number)
{
    take("param_groups.0.lr", fsdp_value_f64(1));
    take("param_groups.0.eps", fsdp_value_f64(2));
    take("param_groups.0.params", LIST(text_of("w")));
    text.size = 0;
    cr_assert_eq(fsdp_group_put(&groups.items[0], FSDP_GROUPS_PLACES, put, &groups, &err), FSDP_OK);
    fsdp_text_add(&text, "", 1);
    cr_expect_str_eq(text.data, "param_groups/#0/lr=1.000 0\nparam_groups/#0/eps=2.000 1\n"
                                "param_groups/#0/params=['w'] 0\n");
}

/* --- names ------------------------------------------------------------------------------------ */

Test(param_groups, names_are_split_at_the_first_word_and_the_last_dot)
{
    static const char *const others[] = {"optim.state.w.exp_avg",
                                         "param_groupsy",
                                         "optim.param_groupsy.0.lr",
                                         "",
                                         "optim.param_group",
                                         "param_groups.lr",
                                         "param_groups.",
                                         "param_groups.0.",
                                         "my_param_groups.0.lr"};
    fsdp_group_name parts;
    const char *name = "a.optim.param_groups.layers.0.weight.lr";
    cr_assert(fsdp_group_name_split(name, strlen(name), &parts));
    cr_expect(parts.prefix_size == 8 && parts.key == 21 && parts.key_size == 15);
    cr_expect(parts.option == 37 && parts.option_size == 2);
    cr_assert(fsdp_group_name_split("param_groups", 12, &parts));
    cr_expect(parts.prefix_size == 0 && parts.option_size == 0 && parts.key_size == 0);
    name = "param_groups.param_groups.lr";
    cr_assert(fsdp_group_name_split(name, strlen(name), &parts));
    cr_expect(parts.prefix_size == 0 && parts.key == 13 && parts.key_size == 12);
    for (size_t i = 0; i < sizeof others / sizeof *others; i++)
        cr_expect_not(fsdp_group_name_split(others[i], strlen(others[i]), &parts), "%s", others[i]);
}

/* --- damage ----------------------------------------------------------------------------------- */

Test(param_groups, damage_in_a_list_is_kept_for_the_reader_to_judge)
{
    take("param_groups",
         LIST(fsdp_value_i64(3),
              DICT(fsdp_value_i64(1), fsdp_value_f64(1), text_of("params"), text_of("w")),
              DICT(text_of("lr"), fsdp_value_f64(1), text_of("params"),
                   LIST((fsdp_value){0}, text_of("w"), fsdp_value_f64(2)))));
    cr_assert_eq(groups.count, 3);
    cr_expect_not(fsdp_group_list_fits(&values[0]));
    cr_expect(groups.items[0].options.count == 0 && !groups.items[0].is_listed);
    cr_expect_null(fsdp_group_list_params(&values[0].as.list.items[0]));
    cr_expect(groups.items[1].options.count == 2 && !groups.items[1].is_listed);
    cr_expect_null(groups.items[1].options.first->name, "its key is not text");
    cr_expect_null(fsdp_group_list_params(&values[0].as.list.items[1]), "it is not a list");
    cr_expect_eq(groups.items[2].params.count, 3);
    expect(FSDP_GROUPS_PLACES, "param_groups/#1/params='w'\nparam_groups/#2/lr=1.000\n"
                               "param_groups/#2/params=[None, 'w', 2.000]\n");
}

Test(param_groups, a_value_that_is_not_a_list_has_no_groups)
{
    take("param_groups", fsdp_value_i64(1));
    cr_expect_eq(groups.count, 0);
    fsdp_groups_sort(&groups);
    cr_expect(fsdp_groups_join(&groups, 1));
    cr_expect_not(fsdp_group_list_fits(&values[0]));
    fsdp_value empty = items_of(FSDP_VALUE_LIST, 0, NULL);
    cr_expect(fsdp_group_list_fits(&empty));
    fsdp_value_release(&empty);
}

/* An entry that is a tensor has no value. */
Test(param_groups, an_option_without_a_value_is_equal_to_none)
{
    static const char *const names[] = {"param_groups.a.lr", "param_groups.b.lr"};
    for (size_t i = 0; i < 2; i++) {
        fsdp_group_source from = {.name = names[i], .spelling = FSDP_GROUPS_NAMES, .entry = i};
        cr_assert(fsdp_group_name_split(names[i], strlen(names[i]), &from.parts));
        cr_assert_eq(fsdp_groups_read(&groups, &from, &err), FSDP_OK);
    }
    fsdp_groups_sort(&groups);
    cr_expect(fsdp_groups_join(&groups, 100));
    cr_expect_eq(groups.count, 2);
}

/* "params" of a parameter is an option like any other. */
Test(param_groups, a_list_of_one_parameter_is_an_option)
{
    take("param_groups.w.params", LIST(text_of("x")));
    cr_assert_eq(groups.count, 1);
    cr_expect(groups.items[0].params.count == 1 && groups.items[0].options.count == 1);
    cr_expect_not(groups.items[0].is_listed);
}

/* --- memory ----------------------------------------------------------------------------------- */

static fsdp_status read_and_write(const fsdp_value *list, fsdp_error *error)
{
    static const char *const names[] = {"optim.param_groups", "optim.param_groups.x.lr",
                                        "optim.param_groups.y.lr"};
    fsdp_value dict = {0}, rate = fsdp_value_f64(1);
    fsdp_status status = FSDP_OK;
    text.size = 0;
    for (size_t i = 0; i < 3 && status == FSDP_OK; i++) {
        fsdp_group_source from = {.name = names[i],
                                  .spelling = i > 0 ? FSDP_GROUPS_NAMES : FSDP_GROUPS_LIST,
                                  .value = i > 0 ? &rate : list};
        cr_assert(fsdp_group_name_split(names[i], strlen(names[i]), &from.parts));
        status = fsdp_groups_read(&groups, &from, error);
    }
    for (size_t i = 0; i < groups.count && status == FSDP_OK; i++)
        status = fsdp_group_put(&groups.items[i], FSDP_GROUPS_PLACES, put, NULL, error);
    if (status == FSDP_OK)
        status = fsdp_group_dict(&groups.items[0], &dict, error);
    fsdp_value_release(&dict);
    fsdp_groups_release(&groups);
    return status;
}

Test(param_groups, every_lack_of_memory_is_reported)
{
    values[value_count++] = list_of_three();
    bool has_failed = true;
    for (int64_t n = 0; has_failed; n++) {
        fsdp_text_release(&text); /* its own lack of memory is not the subject */
        fsdp_text_addf(&text, "%5000s", "");
        fsdp_error error = {0};
        fsdp_mem_fail_after(n, false);
        fsdp_status status = read_and_write(&values[0], &error);
        has_failed = fsdp_mem_fail_after(-1, false) > n;
        cr_assert_eq(status != FSDP_OK, has_failed, "allocation %d", (int)n);
        cr_assert(!has_failed || strstr(error.text, "cannot allocate memory"), "allocation %d: %s",
                  (int)n, error.text);
        cr_assert(!has_failed || n < 1000);
    }
}
