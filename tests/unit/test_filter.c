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
