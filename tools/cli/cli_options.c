/*
 * Options as data: the words that options of several tools share, and searches in argp's tables for the
 * option that has a property or whose name is nearest to a text.
 */
#include "tools/cli/cli_process.h"

#include <string.h>

/* --- words that options of several tools share ------------------------------------------------- */

const char *const cli_kinds[] = {
    [FSDP_SHARDED] = "sharded", [FSDP_FULL] = "full", [FSDP_LOCAL] = "local", NULL};
const char *const cli_progress_modes[] = {
    [CLI_PROGRESS_AUTO] = "auto", [CLI_PROGRESS_JSON] = "json", [CLI_PROGRESS_OFF] = "off", NULL};
const char *const cli_sandbox_modes[] = {
    [CLI_BY_SECCOMP] = "seccomp", [CLI_BY_LIMITS] = "rlimit", NULL};

const cli_words cli_shared_words[] = {
    {"kind", cli_kinds}, {"progress", cli_progress_modes}, {"sandbox", cli_sandbox_modes}, {0}};

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

const struct argp_option *cli_find_option(const struct argp *argp, cli_option_test test,
                                          void *context)
{
    for (const struct argp_option *option = argp->options; option && option->name; option++)
        if (test(option, context))
            return option;
    for (const struct argp_child *child = argp->children; child && child->argp; child++) {
        const struct argp_option *found = cli_find_option(child->argp, test, context);
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

const char *cli_nearest_option(const struct argp *argp, const char *text, size_t size)
{
    /* of a short name some letter must be left */
    nearest_name nearest = {.text = text, .size = size, .distance = size < 3 ? (int)size : 3};
    cli_find_option(argp, keep_nearest, &nearest);
    return nearest.name;
}
