/* Selecting names by regular expressions. */
#include <criterion/criterion.h>

#include <fsdp/filter.h>

#include <string.h>

static bool selects(const char *include, const char *exclude, const char *name, size_t size)
{
    fsdp_filter *filter = NULL;
    fsdp_error err = {0};
    cr_assert_eq(fsdp_filter_create(include, exclude, &filter, &err), FSDP_OK, "%s", err.text);
    bool answer = fsdp_filter_selects(filter, name, size);
    fsdp_filter_free(filter);
    return answer;
}

Test(filter, include_and_exclude_together_decide)
{
    const char *name = "model.layers.10.attn.weight";
    size_t size = strlen(name);
    cr_assert(selects(NULL, NULL, name, size));
    cr_assert(selects("attn", NULL, name, size));
    cr_assert(selects("^model\\.layers\\.[0-9]+\\.", "bias$", name, size));
    cr_assert_not(selects("^layers", NULL, name, size));
    cr_assert_not(selects(NULL, "attn|mlp", name, size));
    cr_assert_not(selects("model", "weight$", name, size));
}

Test(filter, names_end_where_their_size_says)
{
    cr_assert(selects("b$", NULL, "a\0b", 3), "NUL is a character");
    cr_assert_not(selects("b", NULL, "ab", 1));
    cr_assert(selects("^$", NULL, "", 0));
}

Test(filter, a_bad_expression_is_named)
{
    fsdp_filter *filter = NULL;
    fsdp_error err = {0};
    cr_assert_eq(fsdp_filter_create(NULL, "a(", &filter, &err), FSDP_ERR_USAGE);
    cr_assert_not_null(strstr(err.text, "a("));
    cr_assert_null(filter);
}

static fsdp_status try(const char *expression, fsdp_error *err)
{
    fsdp_filter *filter = NULL;
    fsdp_status status = fsdp_filter_create(expression, NULL, &filter, err);
    fsdp_filter_free(filter);
    return status;
}

Test(filter, costly_expressions_are_refused_before_they_cost)
{
    static const char *const costly[] = {"((((a{1,255}){1,255}){1,255}){1,255})",
                                         "a{10}{10}{10}{10}",
                                         "(((((((((((a+)+)+)+)+)+)+)+)+)+)+)",
                                         "a+++++++++++",
                                         "a{1001,}",
                                         "a{,32767}",
                                         "(abc){99999999999999999999}",
                                         "(abc){99999999999999999999,}",
                                         "(abc[]x]{100}){10}",
                                         "[^][:alpha:]{]{2000}",
                                         "(a{500}|b{600})",
                                         "(a*)\\1"};
    for (size_t i = 0; i < sizeof costly / sizeof costly[0]; i++) {
        fsdp_error err = {0};
        cr_assert_eq(try(costly[i], &err), FSDP_ERR_USAGE, "%s", costly[i]);
        cr_assert_not_null(strstr(err.text, "cannot use the regular expression"), "%s: %s",
                           costly[i], err.text);
    }
}

Test(filter, length_and_depth_have_limits)
{
    char text[5000] = "";
    fsdp_error err = {0};
    memset(text, 'a', 4096);
    cr_assert_eq(try(text, &err), FSDP_OK, "%s", err.text);
    text[4096] = 'a';
    cr_assert_eq(try(text, &err), FSDP_ERR_USAGE);
    for (int depth = 32; depth <= 33; depth++) {
        memset(text, 0, sizeof text);
        memset(text, '(', (size_t)depth);
        text[depth] = 'a';
        memset(text + depth + 1, ')', (size_t)depth);
        cr_assert_eq(try(text, &err), depth == 32 ? FSDP_OK : FSDP_ERR_USAGE, "depth %d", depth);
    }
}

Test(filter, everyday_expressions_are_not_refused)
{
    static const char *const everyday[] = {"^model\\.layers\\.(0|1[0-9]{1,2})\\.",
                                           "attn\\.(q|k|v|o)_proj\\.weight$",
                                           "(([a-z_]+\\.)+)?[0-9]{1,4}\\.(weight|bias)",
                                           "^.{0,255}$",
                                           "[{(+]{3}",
                                           "^(optim\\.state\\.([^.]+\\.){1,20}exp_avg)$",
                                           "a{1000}",
                                           "layers[.]([0-9]|[1-9][0-9])[.]"};
    for (size_t i = 0; i < sizeof everyday / sizeof everyday[0]; i++) {
        fsdp_error err = {0};
        cr_assert_eq(try(everyday[i], &err), FSDP_OK, "%s", err.text);
    }
}
