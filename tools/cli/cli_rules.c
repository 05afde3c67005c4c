/*
 * Options from a file (--rules FILE): lines "name = value" with the tool's long options. They become
 * arguments before those of the command line, so that argp parses all of them alike: the last value
 * of an option counts, and repeated options apply in order.
 */
#include "tools/cli/cli_process.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

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

/* With a zero byte behind it, and none in it. */
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
        cli_usage_error("%s:%d: a zero byte: this is not a text file", cli_process.rules.path,
                        line);
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
    const struct argp_option *option = cli_find_option(tool->argp, has_name, name);
    if (!option && cli_meant(alias) != alias)
        option = cli_find_option(tool->argp, has_name, (char *)(uintptr_t)(cli_meant(alias) + 2));
    if (option)
        return option;
    const char *near = cli_nearest_option(tool->argp, name, strlen(name));
    if (near)
        cli_usage_error("%s:%d: unknown option '%s'; did you mean '%s'?", cli_process.rules.path,
                        line, shown(name, text), near);
    cli_usage_error("%s:%d: unknown option '%s'", cli_process.rules.path, line, shown(name, text));
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
        cli_usage_error("%s:%d: %s is true or false, not '%s'", cli_process.rules.path, line,
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
        cli_usage_error("%s:%d: section '%s' is not of %s, whose options are below [%s]",
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
        cli_usage_error("%s:%d: 'name = value' is expected, not '%s'", cli_process.rules.path, line,
                        shown(text, name));
    *sign = '\0';
    const struct argp_option *option = find_option(tool, trim(text), line);
    char *argument = spell_argument(option, trim(sign + 1), line);
    if (argument)
        add_option(argument, line);
}

/* --- for cli_begin ---------------------------------------------------------------------------- */

void cli_rules_read(const cli_tool *tool, const char *path, int *argc, char ***argv)
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
