/*
 * Completion of a tool's command line for bash, zsh and fish, printed from the same tables that parse
 * it and print its help: TOOL --completion SHELL. The build installs what is printed here.
 */
#include "tools/cli/cli.h"

#include <stdio.h>
#include <string.h>

/* Kinds of values of an option, and of arguments. */
typedef enum value_kind { NO_VALUE, ANY_VALUE, FILE_VALUE, WORD_VALUE } value_kind;

static bool names_a_file(const char *metavariable)
{
    static const char *const names[] = {"FILE", "DIR", "PATH", "PROGRAM", "MAP"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (strcmp(metavariable, names[i]) == 0)
            return true;
    return false;
}

static const char *const *find_words(const cli_words *lists, const char *option)
{
    for (; lists && lists->words; lists++)
        if (option ? lists->option && strcmp(lists->option, option) == 0 : !lists->option)
            return lists->words;
    return NULL;
}

static const char *const *words_of(const cli_tool *tool, const char *option)
{
    const char *const *words = find_words(tool->words, option);
    return words ? words : find_words(cli_shared_words, option);
}

static value_kind kind_of(const cli_tool *tool, const struct argp_option *option)
{
    if (!option->arg)
        return NO_VALUE;
    if (words_of(tool, option->name))
        return WORD_VALUE;
    return names_a_file(option->arg) ? FILE_VALUE : ANY_VALUE;
}

static bool has_letter(const struct argp_option *option)
{
    return option->key > 32 && option->key < 127;
}

/* "order name size" */
static void print_words(const char *const *words)
{
    for (size_t i = 0; words[i]; i++)
        printf("%s%s", i > 0 ? " " : "", words[i]);
}

typedef struct printing {
    const cli_tool *tool;
    value_kind kind; /* the one that is printed now, where they are in groups */
    bool any;        /* something stands before it */
} printing;

/* --- bash ------------------------------------------------------------------------------------- */

static void print_bash_files(int indent)
{
    printf("%*scompopt -o filenames 2>/dev/null\n", indent, "");
    printf("%*smapfile -t COMPREPLY < <(compgen -f -- \"$word\")\n", indent, "");
}

static void print_bash_function_name(const char *tool)
{
    printf("_");
    for (; *tool; tool++)
        printf("%c", *tool == '-' ? '_' : *tool);
}

static bool print_bash_pattern(const struct argp_option *option, void *context)
{
    printing *print = context;
    if (!option->doc || kind_of(print->tool, option) != print->kind)
        return false;
    printf("%s--%s", print->any ? "|" : "    ", option->name);
    if (has_letter(option))
        printf("|-%c", option->key);
    print->any = true;
    return false;
}

static bool print_bash_words(const struct argp_option *option, void *context)
{
    const printing *print = context;
    if (!option->doc || kind_of(print->tool, option) != WORD_VALUE)
        return false;
    printf("    --%s", option->name);
    if (has_letter(option))
        printf("|-%c", option->key);
    printf(")\n        mapfile -t COMPREPLY < <(compgen -W '");
    print_words(words_of(print->tool, option->name));
    printf("' -- \"$word\")\n        return ;;\n");
    return false;
}

static void print_bash_group(const cli_tool *tool, value_kind kind)
{
    printing print = {.tool = tool, .kind = kind};
    cli_find_option(tool->argp, print_bash_pattern, &print);
    if (!print.any)
        return;
    printf(")\n");
    if (kind == FILE_VALUE)
        print_bash_files(8);
    printf("        return ;;\n");
}

static bool print_bash_option(const struct argp_option *option, void *context)
{
    (void)context;
    if (!option->doc)
        return false;
    printf("--%s ", option->name);
    if (has_letter(option))
        printf("-%c ", option->key);
    return false;
}

/* bash splits --name=value into three words at the equals sign. */
static void print_bash(const cli_tool *tool)
{
    printing print = {.tool = tool};
    const char *const *first = words_of(tool, NULL);
    print_bash_function_name(tool->name);
    printf("() {\n"
           "    local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD - 1]}\n"
           "    COMPREPLY=()\n"
           "    if [[ $word == = ]]; then\n"
           "        word=\n"
           "    elif [[ $before == = ]]; then\n"
           "        before=${COMP_WORDS[COMP_CWORD - 2]}\n"
           "    fi\n"
           "    case $before in\n");
    cli_find_option(tool->argp, print_bash_words, &print);
    print_bash_group(tool, FILE_VALUE);
    print_bash_group(tool, ANY_VALUE);
    printf("    esac\n"
           "    if [[ $word == -* ]]; then\n"
           "        mapfile -t COMPREPLY < <(compgen -W '");
    cli_find_option(tool->argp, print_bash_option, NULL);
    printf("' -- \"$word\")\n        return\n    fi\n");
    if (first) {
        printf("    if ((COMP_CWORD == 1)); then\n"
               "        mapfile -t COMPREPLY < <(compgen -W '");
        print_words(first);
        printf("' -- \"$word\")\n        return\n    fi\n");
    }
    print_bash_files(4);
    printf("}\ncomplete -F ");
    print_bash_function_name(tool->name);
    printf(" %s\n", tool->name);
}

/* --- zsh -------------------------------------------------------------------------------------- */

/* Within single quotes, where _arguments gives some characters a meaning of their own. */
static void print_zsh_text(const char *text)
{
    for (; *text; text++) {
        if (*text == '\'')
            printf("'\\''");
        else
            printf("%s%c", strchr("[]:\\", *text) ? "\\" : "", *text);
    }
}

static void print_zsh_value(const cli_tool *tool, const struct argp_option *option)
{
    value_kind kind = kind_of(tool, option);
    if (kind == NO_VALUE)
        return;
    printf(":");
    print_zsh_text(option->arg);
    if (kind == WORD_VALUE) {
        printf(":(");
        print_words(words_of(tool, option->name));
        printf(")");
    } else {
        printf(kind == FILE_VALUE ? ":_files" : ": ");
    }
}

static bool print_zsh_option(const struct argp_option *option, void *context)
{
    const cli_tool *tool = context;
    bool has_value = option->arg != NULL;
    if (!option->doc)
        return false;
    if (has_letter(option) && has_value)
        printf("    '*'{-%c+,--%s=}'[", option->key, option->name);
    else if (has_letter(option))
        printf("    '(-%c --%s)'{-%c,--%s}'[", option->key, option->name, option->key,
               option->name);
    else
        printf("    '%s--%s%s[", has_value ? "*" : "", option->name, has_value ? "=" : "");
    print_zsh_text(option->doc);
    printf("]");
    print_zsh_value(tool, option);
    printf("' \\\n");
    return false;
}

static void print_zsh(const cli_tool *tool)
{
    const char *const *first = words_of(tool, NULL);
    printf("#compdef %s\n_arguments -s -S \\\n", tool->name);
    cli_find_option(tool->argp, print_zsh_option, (void *)(uintptr_t)tool);
    if (first) {
        printf("    '1:command:(");
        print_words(first);
        printf(")' \\\n");
    }
    printf("    '*:path:_files'\n");
}

/* --- fish ------------------------------------------------------------------------------------- */

static void print_fish_text(const char *text)
{
    for (; *text; text++)
        printf("%s%c", *text == '\'' || *text == '\\' ? "\\" : "", *text);
}

static bool print_fish_option(const struct argp_option *option, void *context)
{
    const cli_tool *tool = context;
    value_kind kind = kind_of(tool, option);
    if (!option->doc)
        return false;
    printf("complete -c %s -l %s", tool->name, option->name);
    if (has_letter(option))
        printf(" -s %c", option->key);
    if (kind == FILE_VALUE)
        printf(" -r -F");
    else if (kind != NO_VALUE)
        printf(" -x");
    if (kind == WORD_VALUE) {
        printf(" -a '");
        print_words(words_of(tool, option->name));
        printf("'");
    }
    printf(" -d '");
    print_fish_text(option->doc);
    printf("'\n");
    return false;
}

static void print_fish(const cli_tool *tool)
{
    const char *const *first = words_of(tool, NULL);
    cli_find_option(tool->argp, print_fish_option, (void *)(uintptr_t)tool);
    if (first) {
        printf("complete -c %s -n __fish_use_subcommand -f -a '", tool->name);
        print_words(first);
        printf("'\n");
    }
}

/* --- the whole -------------------------------------------------------------------------------- */

void cli_print_completion(const cli_tool *tool, const char *shell)
{
    static const struct {
        const char *name;
        void (*print)(const cli_tool *tool);
    } shells[] = {{"bash", print_bash}, {"zsh", print_zsh}, {"fish", print_fish}};
    for (size_t i = 0; i < sizeof shells / sizeof *shells; i++)
        if (strcmp(shell, shells[i].name) == 0) {
            shells[i].print(tool);
            return;
        }
    cli_usage_error("--completion '%s' is not one of bash, zsh, fish", shell);
}
