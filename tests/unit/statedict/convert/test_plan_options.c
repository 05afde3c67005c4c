/*
 * The table of a conversion's options (plan_file.c): plans have every row of it, and the pages say what it
 * says, so that a new option is not forgotten in one of them.
 */
#include "statedict/convert/plan_file.h"

#include <criterion/criterion.h>
#include <stdio.h>
#include <string.h>

static char *read_page(const char *name)
{
    char path[1000];
    snprintf(path, sizeof path, "%s/docs/%s", ROOT, name);
    FILE *file = fopen(path, "r");
    cr_assert(file, "%s", path);
    char *text = fsdp_alloc(1 << 20, 1);
    text[fread(text, 1, (1 << 20) - 1, file)] = '\0';
    fclose(file);
    return text;
}

/* --- plans -------------------------------------------------------------------------------------- */

/* Gives a row's member another value than its default. */
static void set(fsdp_convert_opts *opts, const fsdp_convert_option *row, const fsdp_mesh *mesh)
{
    static const char *const items[] = {"one", "\"two\""};
    void *member = (char *)opts + row->offset;
    int words = 0;
    switch (row->kind) {
    case FSDP_OPTION_TEXT: *(const char **)member = "a text"; break;
    case FSDP_OPTION_PATH: *(const char **)member = "/a path"; break;
    case FSDP_OPTION_WORD:
        while (row->words[words])
            words++;
        *(int *)member = words - 1;
        break;
    case FSDP_OPTION_INT: *(int *)member = (int)row->most; break;
    case FSDP_OPTION_BYTES: *(int64_t *)member = row->most; break;
    case FSDP_OPTION_FLAG: *(bool *)member = true; break;
    case FSDP_OPTION_LIST:
        *(const char *const **)member = items;
        *(size_t *)(void *)((char *)opts + row->count_offset) = 2;
        break;
    case FSDP_OPTION_MESH: *(const fsdp_mesh **)member = mesh; break;
    }
}

static fsdp_text spell(const fsdp_convert_opts *opts)
{
    fsdp_text text = {0};
    plan_head head = {.text = &text};
    fsdp_text_addf(&text, "{");
    fsdp_plan_add_options(&head, opts);
    fsdp_text_addf(&text, "}");
    return text;
}

Test(plan_options, a_plan_reads_what_it_writes)
{
    fsdp_error err = {0};
    fsdp_convert_opts opts = {0}, found = {0};
    fsdp_mesh *mesh, *found_mesh = NULL;
    fsdp_arena arena = {0};
    fsdp_json json;
    const fsdp_convert_option *row;
    cr_assert_eq(
        fsdp_mesh_create(2, (int64_t[]){3, 2}, (const char *[]){"dp", "tp"}, NULL, &mesh, &err),
        FSDP_OK);
    for (size_t i = 0; (row = fsdp_convert_option_at(i)) && row->member; i++)
        set(&opts, row, mesh);
    fsdp_text text = spell(&opts);
    fsdp_json_init(&json, text.data, text.size, "options");
    cr_assert_eq(fsdp_plan_read_options(&json, &arena, &found, &found_mesh, &err), FSDP_OK, "%s",
                 err.text);
    fsdp_json_release(&json);
    fsdp_text again = spell(&found);
    cr_expect_str_eq(text.data, again.data);
    for (size_t i = 0; (row = fsdp_convert_option_at(i)) && row->member; i++) {
        char member[60];
        snprintf(member, sizeof member, "\"%s\": ", row->member);
        cr_expect(strstr(text.data, member), "%s", member);
    }
    fsdp_text_release(&text);
    fsdp_text_release(&again);
    fsdp_arena_release(&arena);
    fsdp_mesh_free(mesh);
    fsdp_mesh_free(found_mesh);
}

/* --- the pages -------------------------------------------------------------------------------- */

/* An optional member has the option's name with '_' for '-', or the page names it. */
Test(plan_options, formats_md_has_the_members_of_a_plan)
{
    char *page = read_page("formats.md"), name[60], spelled[70];
    fsdp_text always = {0};
    const fsdp_convert_option *row;
    char *line = strstr(page, "| `options` |");
    cr_assert(line);
    line[strcspn(line, "\n")] = '\0';
    for (size_t i = 0; (row = fsdp_convert_option_at(i)) && row->member; i++) {
        if (!row->is_optional) {
            fsdp_text_addf(&always, "%s`%s`", i > 0 ? ", " : "", row->member);
            continue;
        }
        snprintf(name, sizeof name, "%s", row->name ? row->name : "");
        for (char *c = name; *c; c++)
            *c = *c == '-' ? '_' : *c;
        snprintf(spelled, sizeof spelled, "`%s`", row->member);
        cr_expect(strcmp(name, row->member) == 0 || strstr(line, spelled), "%s", row->member);
    }
    cr_expect(strstr(line, always.data), "docs/formats.md: `options` begins with %s", always.data);
    fsdp_text_release(&always);
    fsdp_free(page);
}

static const char *word_of(const fsdp_convert_option *row, size_t i)
{
    if (row->words)
        return row->words[(size_t)row->first_word + i];
    return row->word_at ? row->word_at(i) : NULL;
}

Test(plan_options, the_man_page_names_every_value)
{
    char *page = read_page("man/fsdp-convert.1.scd"), heading[60], spelled[60];
    const fsdp_convert_option *row;
    int count = 0;
    for (size_t i = 0; (row = fsdp_convert_option_at(i)); i++) {
        if (!row->name)
            continue;
        snprintf(heading, sizeof heading, "\n*--%s*", row->name);
        char *section = strstr(page, heading);
        cr_assert(section, "%s", row->name);
        section = fsdp_strndup(section + 1, strlen(section + 1));
        char *end = strstr(section, "\n\n*-");
        if (end)
            *end = '\0';
        const char *word;
        for (size_t k = 0; (word = word_of(row, k)); k++, count++) {
            snprintf(spelled, sizeof spelled, "*%s*", word);
            cr_expect(strstr(section, spelled), "fsdp-convert(1): --%s does not name %s", row->name,
                      word);
        }
        fsdp_free(section);
    }
    cr_expect(count > 50);
    fsdp_free(page);
}
