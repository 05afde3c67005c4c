/*
 * Options, completion and help of all tools. argp does the parsing; completion and help are printed from its
 * tables, and this file takes options from a file and refuses mistyped ones before argp parses them.
 */
#include "tools/cli/cli.h"
#include "runtime/comm_nccl/nccl_library.h"
#include "tools/cli/cli_process.h"
#include <fsdp/launch.h>

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <math.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

/* === tables of options ======================================================================== */

/*
 * Options as data: the words that options of several tools share, and searches in argp's tables for the
 * option that has a property or whose name is nearest to a text.
 */

/* --- words that options of several tools share ------------------------------------------------- */

enum { BY_SECCOMP, BY_LIMITS };
static const char *const kinds[] = {
    [FSDP_SHARDED] = "sharded", [FSDP_FULL] = "full", [FSDP_LOCAL] = "local", NULL};
static const char *const progress_modes[] = {
    [CLI_PROGRESS_AUTO] = "auto", [CLI_PROGRESS_JSON] = "json", [CLI_PROGRESS_OFF] = "off", NULL};
static const char *const sandbox_modes[] = {[BY_SECCOMP] = "seccomp", [BY_LIMITS] = "rlimit", NULL};

static const cli_words shared_words[] = {
    {"kind", kinds}, {"progress", progress_modes}, {"sandbox", sandbox_modes}, {0}};

/* Words of other programs, which are accepted and neither offered nor listed by --help: fsdp-convert(1) has
 * them in a table, which also has those of dtypes (base/data/dtype.c). */
static const struct {
    const char *typed, *meant;
} aliases[] = {{"--dry-run", "--plan"}, {"--force", "--overwrite"}, {"pt", "torch"},
               {"pth", "torch"},        {"pytorch", "torch"},       {"huggingface", "hf"},
               {"h5", "hdf5"}};

const char *cli_meant(const char *text)
{
    for (size_t i = 0; i < sizeof aliases / sizeof *aliases; i++)
        if (strcmp(text, aliases[i].typed) == 0)
            return aliases[i].meant;
    return text;
}

/* --- searches --------------------------------------------------------------------------------- */

typedef bool (*cli_option_test)(const struct argp_option *option, void *context);

/* Returns the first option in the tables that passes the test; visits all when none does. */
static const struct argp_option *find_first(const struct argp *argp, cli_option_test test,
                                            void *context)
{
    for (const struct argp_option *option = argp->options; option && option->name; option++)
        if (test(option, context))
            return option;
    for (const struct argp_child *child = argp->children; child && child->argp; child++) {
        const struct argp_option *found = find_first(child->argp, test, context);
        if (found)
            return found;
    }
    return NULL;
}

/* --- the nearest name ------------------------------------------------------------------------- */

typedef struct nearest_name {
    const char *text;
    size_t size;
    int distance; /* of the nearest option so far */
    const char *name;
} nearest_name;

static int least(int a, int b)
{
    return a < b ? a : b;
}

enum { LONGEST_OPTION = 32 };

int cli_edit_distance(const char *a, size_t size_a, const char *b, size_t size_b)
{
    int rows[LONGEST_OPTION + 1][LONGEST_OPTION + 1];
    if (size_a > LONGEST_OPTION || size_b > LONGEST_OPTION)
        return LONGEST_OPTION;
    for (size_t i = 0; i <= size_a; i++) {
        for (size_t k = 0; k <= size_b; k++) {
            if (i == 0 || k == 0) {
                rows[i][k] = (int)(i + k);
                continue;
            }
            int change = rows[i - 1][k - 1] + (a[i - 1] != b[k - 1]);
            rows[i][k] = least(change, 1 + least(rows[i - 1][k], rows[i][k - 1]));
            if (i > 1 && k > 1 && a[i - 1] == b[k - 2] && a[i - 2] == b[k - 1])
                rows[i][k] = least(rows[i][k], rows[i - 2][k - 2] + 1);
        }
    }
    return rows[size_a][size_b];
}

static bool keep_nearest(const struct argp_option *option, void *context)
{
    nearest_name *nearest = context;
    if (!option->doc || (option->flags & CLI_NEVER_GUESSED))
        return false;
    int distance =
        cli_edit_distance(nearest->text, nearest->size, option->name, strlen(option->name));
    if (distance < nearest->distance) {
        nearest->distance = distance;
        nearest->name = option->name;
    }
    return false;
}

/* The option that was probably meant, or NULL. */
static const char *nearest_option(const struct argp *argp, const char *text, size_t size)
{
    /* of a short name some letter must be left */
    nearest_name nearest = {.text = text, .size = size, .distance = size < 3 ? (int)size : 3};
    find_first(argp, keep_nearest, &nearest);
    return nearest.name;
}

/* === completion =============================================================================== */

/*
 * Completion of a tool's command line for bash, zsh and fish, printed from the same tables that parse
 * it and print its help: TOOL --completion SHELL. The build installs what is printed here.
 */

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
    return words ? words : find_words(shared_words, option);
}

static value_kind kind_of(const cli_tool *tool, const struct argp_option *option)
{
    if (!option->arg)
        return NO_VALUE;
    if (words_of(tool, option->name))
        return WORD_VALUE;
    return names_a_file(option->arg) ? FILE_VALUE : ANY_VALUE;
}

static bool has_short_form(const struct argp_option *option)
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
    if (has_short_form(option))
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
    if (has_short_form(option))
        printf("|-%c", option->key);
    printf(")\n        mapfile -t COMPREPLY < <(compgen -W '");
    print_words(words_of(print->tool, option->name));
    printf("' -- \"$word\")\n        return ;;\n");
    return false;
}

static void print_bash_group(const cli_tool *tool, value_kind kind)
{
    printing print = {.tool = tool, .kind = kind};
    find_first(tool->argp, print_bash_pattern, &print);
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
    if (has_short_form(option))
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
    find_first(tool->argp, print_bash_words, &print);
    print_bash_group(tool, FILE_VALUE);
    print_bash_group(tool, ANY_VALUE);
    printf("    esac\n"
           "    if [[ $word == -* ]]; then\n"
           "        mapfile -t COMPREPLY < <(compgen -W '");
    find_first(tool->argp, print_bash_option, NULL);
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
    if (has_short_form(option) && has_value)
        printf("    '*'{-%c+,--%s=}'[", option->key, option->name);
    else if (has_short_form(option))
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
    find_first(tool->argp, print_zsh_option, (void *)(uintptr_t)tool);
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
    if (has_short_form(option))
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
    find_first(tool->argp, print_fish_option, (void *)(uintptr_t)tool);
    if (first) {
        printf("complete -c %s -n __fish_use_subcommand -f -a '", tool->name);
        print_words(first);
        printf("'\n");
    }
}

/* --- the whole -------------------------------------------------------------------------------- */

static void print_completion(const cli_tool *tool, const char *shell)
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

/* === options from a file ====================================================================== */

/*
 * Options from a file (--rules FILE): lines "name = value" with the tool's long options. They become
 * arguments before those of the command line, so that argp parses all of them alike: the last value
 * of an option counts, and repeated options apply in order.
 */

enum { MOST_BYTES = 1 << 20, LONGEST_LINE = 16 << 10 };

static struct {
    char *data;  /* the file; freed never, as argv is not */
    char **argv; /* the program, the file's options, the arguments of the command line */
    size_t room; /* of argv and of the lines in cli_process, in options */
} rules;

/* --- the file --------------------------------------------------------------------------------- */

_Noreturn static void fail_file(const char *what)
{
    cli_usage_error("cannot read the rules '%s': %s", cli_process.rules.path, what);
}

static size_t read_all(int fd, char *data, size_t room)
{
    size_t size = 0;
    while (size < room) {
        ssize_t n = read(fd, data + size, room - size);
        if (n < 0 && errno != EINTR)
            fail_file(strerror(errno));
        if (n == 0)
            break;
        size += n > 0 ? (size_t)n : 0;
    }
    return size;
}

/* The mark of UTF-8 that some editors begin a file with. */
static size_t drop_mark(char *data, size_t size)
{
    static const char mark[] = "\xEF\xBB\xBF";
    const size_t mark_size = sizeof mark - 1;
    if (strncmp(data, mark, mark_size) != 0)
        return size;
    memmove(data, data + mark_size, size - mark_size + 1);
    return size - mark_size;
}

/* A zero byte follows it, and none is in it. */
static void read_file(void)
{
    struct stat info;
    int fd = open(cli_process.rules.path, O_RDONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK);
    if (fd < 0 || fstat(fd, &info) != 0)
        fail_file(strerror(errno));
    if (!S_ISREG(info.st_mode))
        fail_file("it is not a regular file");
    rules.data = malloc(MOST_BYTES + 2);
    if (!rules.data)
        fail_file(strerror(ENOMEM));
    size_t size = read_all(fd, rules.data, MOST_BYTES + 1);
    close(fd);
    if (size > MOST_BYTES)
        fail_file("it is larger than 1 MiB");
    rules.data[size] = '\0';
    size = drop_mark(rules.data, size);
    const char *zero = memchr(rules.data, '\0', size);
    int line = 1;
    for (const char *c = rules.data; zero && c < zero; c++)
        line += *c == '\n';
    if (zero)
        cli_usage_error("%s:%d: the line has a zero byte; this is not a text file",
                        cli_process.rules.path, line);
}

/* --- its lines -------------------------------------------------------------------------------- */

static char *trim(char *text)
{
    static const char blanks[] = " \t\r\v\f";
    text += strspn(text, blanks);
    size_t size = strlen(text);
    while (size > 0 && strchr(blanks, text[size - 1]))
        size--;
    text[size] = '\0';
    return text;
}

/* A name as a message shows it. */
static const char *shown(const char *name, char out[80])
{
    return fsdp_printable(name, strlen(name), out, 80);
}

static bool has_name(const struct argp_option *option, void *context)
{
    return option->doc && strcmp(option->name, context) == 0;
}

static const struct argp_option *find_option(const cli_tool *tool, char *name, int line)
{
    static const char *const typed[] = {"rules", "help", "version", "apply"};
    char text[80], alias[80];
    snprintf(alias, sizeof alias, "--%s", name);
    for (size_t i = 0; i < sizeof typed / sizeof *typed; i++)
        if (strcmp(name, typed[i]) == 0)
            cli_usage_error("%s:%d: '%s' is for the command line only", cli_process.rules.path,
                            line, name);
    const struct argp_option *option = find_first(tool->argp, has_name, name);
    if (!option && cli_meant(alias) != alias)
        option = find_first(tool->argp, has_name, (char *)(uintptr_t)(cli_meant(alias) + 2));
    if (option)
        return option;
    const char *near = nearest_option(tool->argp, name, strlen(name));
    if (near)
        cli_usage_error("%s:%d: there is no option '%s'; did you mean '%s'?",
                        cli_process.rules.path, line, shown(name, text), near);
    cli_usage_error("%s:%d: there is no option '%s'", cli_process.rules.path, line,
                    shown(name, text));
}

/* "--name=value"; for a flag "--name", or NULL when it is false. */
static char *spell_argument(const struct argp_option *option, const char *value, int line)
{
    char *argument = NULL, text[80];
    int size = 0;
    if (option->arg)
        size = asprintf(&argument, "--%s=%s", option->name, value);
    else if (strcmp(value, "true") == 0)
        size = asprintf(&argument, "--%s", option->name);
    else if (strcmp(value, "false") != 0)
        cli_usage_error("%s:%d: %s must be true or false, not '%s'", cli_process.rules.path, line,
                        option->name, shown(value, text));
    if (size < 0)
        fail_file(strerror(ENOMEM));
    return argument;
}

static void check_section(const cli_tool *tool, const char *text, int line)
{
    const char *section = tool->name + strlen("fsdp-");
    char name[80];
    size_t size = strlen(section);
    if (strncmp(text + 1, section, size) != 0 || strcmp(text + 1 + size, "]") != 0)
        cli_usage_error("%s:%d: section '%s' does not belong to %s; its options are below [%s]",
                        cli_process.rules.path, line, shown(text, name), tool->name, section);
}

static void add_option(char *argument, int line)
{
    size_t count = (size_t)cli_process.rules.count;
    if (count == rules.room) {
        rules.room = 2 * rules.room + 16;
        rules.argv = realloc(rules.argv, rules.room * sizeof *rules.argv);
        cli_process.rules.lines =
            realloc(cli_process.rules.lines, rules.room * sizeof *cli_process.rules.lines);
        if (!rules.argv || !cli_process.rules.lines)
            fail_file(strerror(ENOMEM));
    }
    rules.argv[cli_process.rules.count] = argument;
    cli_process.rules.lines[cli_process.rules.count++] = line;
}

static void take_line(const cli_tool *tool, char *text, int line)
{
    char name[80];
    if (strlen(text) > LONGEST_LINE)
        cli_usage_error("%s:%d: the line is longer than %d bytes", cli_process.rules.path, line,
                        LONGEST_LINE);
    text = trim(text);
    if (text[0] == '\0' || text[0] == '#' || text[0] == ';')
        return;
    if (text[0] == '[') {
        check_section(tool, text, line);
        return;
    }
    char *sign = strchr(text, '=');
    if (!sign)
        cli_usage_error("%s:%d: expected 'name = value', not '%s'", cli_process.rules.path, line,
                        shown(text, name));
    *sign = '\0';
    const struct argp_option *option = find_option(tool, trim(text), line);
    char *argument = spell_argument(option, trim(sign + 1), line);
    if (argument)
        add_option(argument, line);
}

/* --- for cli_begin ---------------------------------------------------------------------------- */

/* The option "rules" is a tool's own; this is done when it is given. Adds the file's options after the name
 * of the program. Ends the program when they make no sense. */
static void cli_rules_read(const cli_tool *tool, const char *path, int *argc, char ***argv)
{
    cli_process.rules.path = path;
    read_file();
    int line = 0;
    for (char *rest = rules.data, *text; (text = strsep(&rest, "\n")) != NULL;)
        take_line(tool, text, ++line);
    size_t count = (size_t)*argc + (size_t)cli_process.rules.count;
    char **all = calloc(count + 1, sizeof *all);
    if (!all)
        fail_file(strerror(ENOMEM));
    all[0] = (*argv)[0];
    for (int i = 0; i < cli_process.rules.count; i++)
        all[1 + i] = rules.argv[i];
    for (int i = 1; i < *argc; i++)
        all[cli_process.rules.count + i] = (*argv)[i];
    free(rules.argv);
    rules.argv = all;
    *argv = all;
    *argc = (int)count;
}

/* === options and help ========================================================================= */

enum {
    KEY_HELP = 0x1000,
    KEY_VERSION,
    KEY_PROGRESS,
    KEY_SANDBOX,
    KEY_LINKS,
    KEY_JSON,
    KEY_MEM,
    KEY_LOG
};

static const char *rules_path; /* of --rules */

/* --- values of options ------------------------------------------------------------------------ */

int64_t cli_parse_integer(const char *option, const char *text, int64_t least, int64_t most)
{
    char *end;
    errno = 0;
    int64_t value = strtoll(text, &end, 10);
    if (end == text || *end != '\0')
        cli_usage_error("%s '%s' is not a whole number", option, text);
    if (errno == ERANGE || value < least || value > most)
        cli_usage_error("%s %s is out of range: %" PRId64 " to %" PRId64, option, text, least,
                        most);
    return value;
}

double cli_parse_real(const char *option, const char *text)
{
    char *end;
    double value = strtod(text, &end);
    if (end == text || *end != '\0' || !isfinite(value) || value < 0)
        cli_usage_error("%s '%s' is not a number of at least 0", option, text);
    return value;
}

/* Powers of 1024: "4G", "4GiB" and "4GB" are the same. */
int64_t cli_parse_size(const char *option, const char *text)
{
    static const char units[] = "KMGT";
    char *end;
    errno = 0;
    int64_t value = strtoll(text, &end, 10), unit = 1;
    bool is_number = end != text && value > 0 && errno == 0;
    const char *letter = *end & ~0x20 ? strchr(units, *end & ~0x20) : NULL;
    if (letter) {
        unit = (int64_t)1 << (10 * (letter - units + 1));
        end++;
        end += strcmp(end, "iB") == 0 ? 2 : strcmp(end, "B") == 0 ? 1 : 0;
    }
    if (!is_number || *end != '\0' || __builtin_mul_overflow(value, unit, &value))
        cli_usage_error("%s '%s' is not a size such as 4G, 256M or 64K", option, text);
    return value;
}

int cli_parse_word(const char *option, const char *text, const char *const *words)
{
    fsdp_text known = {0};
    const char *meant = cli_meant(text);
    for (int i = 0; words[i]; i++) {
        if (strcmp(text, words[i]) == 0 || strcmp(meant, words[i]) == 0) {
            fsdp_text_release(&known);
            return i;
        }
        fsdp_text_addf(&known, "%s%s", i > 0 ? ", " : "", words[i]);
    }
    cli_usage_error("%s '%s' is not one of %.*s", option, text, (int)known.size, known.data);
}

const char *cli_kind(fsdp_kind kind)
{
    return kind >= FSDP_SHARDED && kind <= FSDP_LOCAL ? kinds[kind] : "unknown";
}

fsdp_kind cli_parse_kind(const char *text)
{
    return (fsdp_kind)cli_parse_word("--kind", text, kinds);
}

int cli_parse_compress(const char *text)
{
    if (strncmp(text, "zstd", 4) != 0 || (text[4] != '\0' && text[4] != ':'))
        cli_usage_error("--compress '%s' is unknown; use zstd[:LEVEL]", text);
    return text[4] == ':' ? (int)cli_parse_integer("--compress zstd:", text + 5, 0, 19) : 0;
}

/* --- help ------------------------------------------------------------------------------------- */

/* Lists options of a group, or with a flag; 0: of all. */
typedef struct listed_options {
    int group, flag;
} listed_options;

static bool print_option(const struct argp_option *option, void *context)
{
    const listed_options *listed = context;
    char names[80];
    if (!option->doc || (listed->group && option->group != listed->group) ||
        (listed->flag && !(option->flags & listed->flag)))
        return false;
    char letter[4] = "    ";
    if (option->key > 32 && option->key < 127)
        memcpy(letter, (char[]){'-', (char)option->key, ',', ' '}, 4);
    snprintf(names, sizeof names, "  %.4s--%s%s%s", letter, option->name, option->arg ? " " : "",
             option->arg ? option->arg : "");
    printf("%-27s %s\n", names, option->doc);
    return false;
}

static void print_options(listed_options listed)
{
    find_first(cli_process.tool->argp, print_option, &listed);
}

static void print_help(void)
{
    const cli_tool *tool = cli_process.tool;
    printf("usage: %s [OPTION]... %s\n%s\n\nexamples:\n%s", tool->name, tool->args, tool->summary,
           tool->examples);
    if (!tool->groups) {
        printf("\noptions:\n");
        print_options((listed_options){0});
    }
    for (int i = 1; tool->groups && tool->groups[i]; i++) {
        printf("\n%s:\n", tool->groups[i]);
        print_options((listed_options){.group = i});
    }
    printf("\nexit codes are listed in %s(1)\n", tool->name);
}

static void print_usage(void)
{
    printf("usage: %s [OPTION]... %s\n%s\n", cli_process.tool->name, cli_process.tool->args,
           cli_process.tool->summary);
    print_options((listed_options){.flag = CLI_USUAL});
    printf("'%s --help' lists examples and options.\n", cli_process.tool->name);
}

static void print_version(void)
{
    fsdp_error err = {0};
    char nccl[FSDP_ERROR_TEXT + 32];
    fsdp_nccl_describe(nccl, sizeof nccl);
    printf("%s (fsdp) %s\n%s\n", cli_process.tool->name, fsdp_version(), FSDP_FEATURES_TEXT);
    if (fsdp_launch_find_device("cuda", &err) == FSDP_OK)
        printf("device 'cuda': found\n");
    else
        printf("%s\n", err.text);
    printf("%s\n", nccl);
}

static error_t parse_general(int key, char *arg, struct argp_state *state)
{
    cli_common *common = state->input;
    switch (key) {
    case KEY_JSON:
        common->json = true;
        cli_process.wants_json = true;
        return 0;
    case ARGP_KEY_INIT: cli_process.parsing = state; return 0;
    case KEY_LOG: return 0; /* it is open by now */
    case 'q': common->quiet = true; return 0;
    case 'h': print_usage(); break;
    case KEY_HELP: print_help(); break;
    case KEY_VERSION: print_version(); break;
    default: return ARGP_ERR_UNKNOWN;
    }
    (void)arg;
    exit(cli_end(FSDP_OK, NULL));
}

static const struct argp_option general_options[] = {
    {"json", KEY_JSON, NULL, 0, "print one JSON object (member \"schema\": 1), errors too",
     FSDP_OPTIONS_RUNNING},
    {"quiet", 'q', NULL, 0, "no messages, no progress", FSDP_OPTIONS_RUNNING},
    {"log", KEY_LOG, "FILE", 0, "append all messages, with the time, to FILE",
     FSDP_OPTIONS_RUNNING},
    {"help", KEY_HELP, NULL, 0, "this text; -h is shorter", FSDP_OPTIONS_RUNNING},
    {"version", KEY_VERSION, NULL, 0, "version and build features", FSDP_OPTIONS_RUNNING},
    {"usage", 'h', NULL, 0, NULL, 0},
    {0}};
const struct argp cli_general_argp = {.options = general_options, .parser = parse_general};

static error_t parse_buffers(int key, char *arg, struct argp_state *state)
{
    cli_common *common = state->input;
    switch (key) {
    case 'j': common->jobs = (int)cli_parse_integer("--jobs", arg, 1, 1024); return 0;
    case KEY_MEM: common->memory = cli_parse_size("--mem", arg); return 0;
    case KEY_PROGRESS:
        common->progress = (cli_progress_mode)cli_parse_word("--progress", arg, progress_modes);
        return 0;
    default: return ARGP_ERR_UNKNOWN;
    }
}

static const struct argp_option buffer_options[] = {
    {"jobs", 'j', "N", 0, "threads (default: all cores)", FSDP_OPTIONS_RUNNING},
    {"mem", KEY_MEM, "SIZE", 0, "memory for buffers, such as 4G or 64M (default: 256M)",
     FSDP_OPTIONS_RUNNING},
    {"progress", KEY_PROGRESS, "MODE", 0, "auto, json (lines on standard error) or off",
     FSDP_OPTIONS_RUNNING},
    {0}};
const struct argp cli_buffers_argp = {.options = buffer_options, .parser = parse_buffers};

static error_t parse_access(int key, char *arg, struct argp_state *state)
{
    (void)state;
    switch (key) {
    case KEY_SANDBOX:
        cli_access()->limits_only = cli_parse_word("--sandbox", arg, sandbox_modes) == BY_LIMITS;
        return 0;
    case KEY_LINKS: cli_access()->follow_links = true; return 0;
    default: return ARGP_ERR_UNKNOWN;
    }
}

static const struct argp_option access_options[] = {
    {"sandbox", KEY_SANDBOX, "MODE", 0, "for others' HDF5 files: seccomp (default) or rlimit",
     FSDP_OPTIONS_SOURCE},
    {"follow-links", KEY_LINKS, NULL, 0, "read through symbolic links, wherever they lead",
     FSDP_OPTIONS_SOURCE},
    {0}};
static const struct argp access_argp = {.options = access_options, .parser = parse_access};

static error_t parse_work(int key, char *arg, struct argp_state *state)
{
    (void)arg;
    if (key != ARGP_KEY_INIT)
        return ARGP_ERR_UNKNOWN;
    state->child_inputs[0] = state->input;
    return 0;
}

static const struct argp_child work_children[] = {
    {&cli_buffers_argp, 0, NULL, 0}, {&access_argp, 0, NULL, 0}, {0}};
const struct argp cli_work_argp = {.parser = parse_work, .children = work_children};

static error_t parse_names(int key, char *arg, struct argp_state *state)
{
    cli_common *common = state->input;
    switch (key) {
    case 'I': common->include = arg; return 0;
    case 'X': common->exclude = arg; return 0;
    default: return ARGP_ERR_UNKNOWN;
    }
}

static const struct argp_option names_options[] = {
    {"include", 'I', "REGEX", 0, "only names that match (extended regular expression)",
     FSDP_OPTIONS_TAKEN},
    {"exclude", 'X', "REGEX", 0, "leave out names that match", FSDP_OPTIONS_TAKEN},
    {0}};
static const struct argp names_argp = {.options = names_options, .parser = parse_names};

const struct argp_child cli_children[CLI_CHILDREN + 1] = {
    {&names_argp, 0, NULL, 0}, {&cli_work_argp, 0, NULL, 0}, {&cli_general_argp, 0, NULL, 0}, {0}};

/* --- mistyped options ------------------------------------------------------------------------- */

typedef struct typed_name {
    const char *text;
    size_t size;
    const struct argp_option *first; /* that begins with it */
} typed_name;

static bool begins_with_typed(const struct argp_option *option, void *context)
{
    const typed_name *typed = context;
    return strncmp(option->name, typed->text, typed->size) == 0;
}

static bool is_typed(const struct argp_option *option, void *context)
{
    const typed_name *typed = context;
    return begins_with_typed(option, context) && strlen(option->name) == typed->size;
}

static bool begins_alike(const struct argp_option *option, void *context)
{
    const typed_name *typed = context;
    return option != typed->first && begins_with_typed(option, context);
}

static bool has_letter(const struct argp_option *option, void *context)
{
    return option->key == *(const char *)context;
}

static const char *checked; /* the argument at hand */

/* The end of a refusal when the argument could be a path. */
static const char *path_hint(void)
{
    return checked && access(checked, F_OK) == 0
               ? "; a path that begins with '-' goes after '--', or begins with './'"
               : "";
}

_Noreturn static void refuse_option(const struct argp *argp, const typed_name *typed)
{
    char name[80];
    const char *near = nearest_option(argp, typed->text, typed->size);
    fsdp_printable(typed->text, typed->size, name, sizeof name);
    if (near)
        cli_usage_error("there is no option '--%s'; did you mean '--%s'?", name, near);
    cli_usage_error("there is no option '--%s'%s", name, path_hint());
}

/* The option that is spelled out, or the only one that begins like that. */
static const struct argp_option *find_long(const struct argp *argp, typed_name *typed)
{
    const struct argp_option *option = find_first(argp, is_typed, typed);
    if (option)
        return option;
    typed->first = find_first(argp, begins_with_typed, typed);
    if (!typed->first || (typed->first->flags & CLI_NEVER_GUESSED))
        refuse_option(argp, typed);
    option = find_first(argp, begins_alike, typed);
    if (option)
        cli_usage_error("'--%.*s' is ambiguous; it may be '--%s' or '--%s'", (int)typed->size,
                        typed->text, typed->first->name, option->name);
    return typed->first;
}

/* Takes the options that are needed before argp parses: --log and --rules. */
static void note_option(const struct argp_option *option, const char *value)
{
    if (strcmp(option->name, "log") == 0)
        cli_process.log_path = value;
    if (strcmp(option->name, "rules") != 0)
        return;
    if (rules_path && rules_path != value)
        cli_usage_error("--rules names one file: '%s' is too many", value);
    rules_path = value;
}

/* Puts the option in place of an alias that the tool does not have itself. */
static void spell_alias(const struct argp *argp, char **argument)
{
    char name[32]; /* without a value, and as long as the longest alias */
    size_t size = strcspn(*argument, "=");
    snprintf(name, sizeof name, "%.*s", (int)(size < sizeof name ? size : 0), *argument);
    typed_name typed = {.text = *argument + 2, .size = size - 2};
    const char *meant = cli_meant(name);
    typed_name known = {.text = meant + 2, .size = strlen(meant) - 2};
    if (meant == name || find_first(argp, is_typed, &typed))
        return;
    const struct argp_option *option = find_first(argp, is_typed, &known);
    if (option && (*argument)[size] == '=')
        cli_usage_error("%s takes no value", name);
    if (option)
        *argument = (char *)(uintptr_t)meant; /* argp only reads it */
}

/* Returns 1 when the value of the option is the next argument, which is NULL after the last. */
static int check_long(const struct argp *argp, const char *text, const char *next)
{
    typed_name typed = {.text = text, .size = strcspn(text, "=")};
    bool has_value = text[typed.size] == '=';
    const struct argp_option *option = find_long(argp, &typed);
    if (option->arg && !has_value && !next)
        cli_usage_error("--%s needs a value: --%s %s", option->name, option->name, option->arg);
    if (!option->arg && has_value)
        cli_usage_error("--%s takes no value", option->name);
    note_option(option, has_value ? text + typed.size + 1 : next);
    return option->arg && !has_value;
}

static int check_letters(const struct argp *argp, const char *letters, bool is_last)
{
    for (; *letters; letters++) {
        char letter = *letters;
        const struct argp_option *option = find_first(argp, has_letter, &letter);
        if (!option)
            cli_usage_error("there is no option '-%c'%s",
                            letter >= 32 && letter < 127 ? letter : '?', path_hint());
        if (option->arg && letters[1] == '\0' && is_last)
            cli_usage_error("-%c needs a value: -%c %s", letter, letter, option->arg);
        if (option->arg)
            return letters[1] == '\0';
    }
    return 0;
}

/* Looks for --json in all arguments, since it may follow a wrong one. */
static bool has_json(int argc, char **argv)
{
    for (int i = 1; i < argc && strcmp(argv[i], "--") != 0; i++)
        if (strcmp(argv[i], "--json") == 0)
            return true;
    return false;
}

/* Refuses wrong options, and spells aliases out in argv. */
static void check_options(const struct argp *argp, int argc, char **argv)
{
    int i = 1;
    for (; i < argc && strcmp(argv[i], "--") != 0; i++) {
        const char *next = i + 1 < argc ? argv[i + 1] : NULL;
        checked = argv[i];
        if (strncmp(argv[i], "--", 2) == 0)
            spell_alias(argp, &argv[i]);
        if (strncmp(argv[i], "--", 2) == 0)
            i += check_long(argp, argv[i] + 2, next);
        else if (argv[i][0] == '-' && argv[i][1] != '\0')
            i += check_letters(argp, argv[i] + 1, !next);
        else if (cli_process.tool->runs_alone)
            cli_log_keep_out(argv[i]);
    }
    for (i++; i < argc && cli_process.tool->runs_alone; i++)
        cli_log_keep_out(argv[i]);
}

/* A checkpoint has a file per rank, and the usual soft limit is 1024. */
static void raise_file_limit(void)
{
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) == 0 && limit.rlim_cur < limit.rlim_max) {
        limit.rlim_cur = limit.rlim_max;
        (void)setrlimit(RLIMIT_NOFILE, &limit);
    }
}

/* Refuses to run under mpirun, where all ranks would write the same result at once. */
static void refuse_ranks(void)
{
    const cli_mpi mpi = cli_mpi_find();
    if (mpi.size <= 1 || !cli_process.tool->runs_alone)
        return;
    if (mpi.rank > 0)
        exit(FSDP_ERR_USAGE); /* only rank 0 reports */
    cli_usage_error("mpirun started %s %d times; run it once, without mpirun, inside a job with "
                    "'env -u %s %s ...'",
                    cli_process.tool->name, mpi.size, mpi.size_name, cli_process.tool->name);
}

/* The options of a file are in front of those that were typed, which therefore win. */
static void add_rules(const cli_tool *tool, int *argc, char ***argv)
{
    cli_rules_read(tool, rules_path, argc, argv);
    cli_process.wants_json = has_json(*argc, *argv);
    check_options(tool->argp, *argc, *argv); /* for what they name */
}

/* Messages and the log have the arguments as they were typed. */
static char **copy_arguments(int argc, char **argv)
{
    char **copy = calloc((size_t)argc + 1, sizeof *copy);
    for (int i = 0; copy && i < argc; i++)
        copy[i] = argv[i];
    return copy ? copy : argv;
}

/* Values nest 1,024 deep, and each of the threads gets a stack of this size, too. */
static fsdp_status check_stack(fsdp_error *err)
{
    enum { LEAST = 1 << 20 };
    struct rlimit limit;
    if (getrlimit(RLIMIT_STACK, &limit) != 0 || limit.rlim_cur >= LEAST)
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_LIMIT,
                     "the stack limit of %llu KiB is too small; raise it with 'ulimit -s %d'",
                     (unsigned long long)limit.rlim_cur >> 10, LEAST >> 10);
}

/* Under 'ulimit -v' a stack that has to grow later is a crash: what a tool needs is taken now. */
static fsdp_status take_stack(fsdp_error *err)
{
    enum { NEEDED = 512 << 10, PAGE = 4096 };
    void *volatile place = malloc(2 * NEEDED); /* compilers drop one that nobody looks at */
    if (!place)
        return fsdp_fail(err, FSDP_ERR_LIMIT, "cannot allocate %d KiB for the stack", NEEDED >> 10);
    free(place);
    char stack[NEEDED];
    volatile char *at = stack;
    for (size_t i = NEEDED; i > 0; i -= PAGE)
        at[i - 1] = 0;
    return FSDP_OK;
}

void cli_begin(const cli_tool *tool, int argc, char **argv, void *input)
{
    fsdp_error err = {0};
    cli_process.argc = argc;
    cli_process.argv = argv;
    cli_process.tool = tool;
    cli_catch_signals();
    raise_file_limit();
    argp_err_exit_status = FSDP_ERR_USAGE;
    if (argc == 3 && strcmp(argv[1], "--completion") == 0) { /* for the build: not in --help */
        print_completion(tool, argv[2]);
        exit(cli_end(FSDP_OK, NULL));
    }
    cli_process.wants_json = has_json(argc, argv);
    if (check_stack(&err) != FSDP_OK || take_stack(&err) != FSDP_OK)
        exit(cli_end(err.status, &err));
    argv = cli_process.arguments = copy_arguments(argc, argv);
    check_options(tool->argp, argc, argv);
    if (rules_path)
        add_rules(tool, &argc, &argv);
    if (cli_begin_log(&err) != FSDP_OK)
        exit(cli_end(err.status, &err));
    error_t failed = argp_parse(tool->argp, argc, argv, ARGP_NO_HELP, NULL, input);
    if (failed) {
        fsdp_status status = fsdp_fail_errno(&err, failed, "cannot read the command line");
        exit(cli_end(status, &err));
    }
    cli_process.parsing = NULL;
    refuse_ranks();
}
