/* Renaming: the behaviour of sed, and refused rules. */
#include "statedict/select/rename.h"

#include <criterion/criterion.h>
#include <string.h>

static void expect(const char *rule, const char *name, const char *renamed)
{
    fsdp_rename *rename = NULL;
    fsdp_error err = {0};
    fsdp_text text = {0};
    fsdp_text_add(&text, name, strlen(name));
    cr_assert_eq(fsdp_rename_create(rule, &rename, &err), FSDP_OK, "%s", err.text);
    cr_assert_eq(fsdp_rename_apply(rename, &text, &err), FSDP_OK, "%s", err.text);
    cr_assert(text.size == strlen(renamed) &&
                  memcmp(text.data ? text.data : "", renamed, text.size) == 0,
              "'%s' made '%.*s' of '%s'", rule, (int)text.size, text.data ? text.data : "", name);
    fsdp_text_release(&text);
    fsdp_rename_free(rename);
}

Test(rename, a_rule_replaces_its_first_match_or_all)
{
    expect("s/^model\\.//", "model.a.model.b", "a.model.b");
    expect("s/model/m/", "model.model", "m.model");
    expect("s/model/m/g", "model.model", "m.m");
    expect("s/x/y/", "model", "model");
    expect("s/^/p./", "a", "p.a");
    expect("s/$/.s/", "a", "a.s");
    expect("s/^a//g", "aaa", "aa");
    expect("s/b*/-/g", "abc", "-a-c-");
    expect("s/.*//", "a", "");
}

Test(rename, groups_and_delimiters)
{
    expect("s/layers\\.([0-9]+)\\.(w)/h.\\1.\\2&/", "layers.12.w.x", "h.12.wlayers.12.w.x");
    expect("s|a/b|c|", "a/b", "c");
    expect("s/a\\/b/c\\/d/", "a/b", "c/d");
    expect("s/a/\\&\\\\/", "a", "&\\");
    expect("s/(a)|(b)/[\\2]/g", "ab", "[][b]");
}

Test(rename, rules_that_are_none_are_refused)
{
    static const char *const rules[] = {"",
                                        "s",
                                        "x/a/b/",
                                        "s/a",
                                        "s/a/b",
                                        "s/a/b/x",
                                        "s/(a/b/",
                                        "s/a/\\1/",
                                        "s/a/b\\/",
                                        "s\\a\\b\\",
                                        "s/((((a{1,255}){1,255}){1,255}){1,255})//"};
    for (size_t i = 0; i < sizeof rules / sizeof *rules; i++) {
        fsdp_rename *rename = NULL;
        fsdp_error err = {0};
        cr_assert_eq(fsdp_rename_create(rules[i], &rename, &err), FSDP_ERR_USAGE, "'%s'", rules[i]);
    }
}
