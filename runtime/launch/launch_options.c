/* Reads the launcher's options from argv and the environment. See launch_internal.h. */
#include "runtime/launch/launch_internal.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/core/mem.h"

enum { DEADLINE_MS = 30000, LONGEST_DEADLINE_S = 1000000 };

/* --- values ----------------------------------------------------------------------------------- */

bool fsdp_parse_int(const char *text, int64_t least, int64_t most, int *value_out)
{
    char *end;
    if (text[0] != '-' && (text[0] < '0' || text[0] > '9'))
        return false;
    errno = 0;
    long long value = strtoll(text, &end, 10);
    if (errno != 0 || end == text || *end != '\0' || value < least || value > most)
        return false;
    *value_out = (int)value;
    return true;
}

static fsdp_status set_count(int *count, const char *name, const char *text, fsdp_error *err)
{
    if (fsdp_parse_int(text, 1, FSDP_MAX_LOCAL_RANKS, count))
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_USAGE, "%s '%s' is not a number of ranks from 1 to %d", name,
                     text, FSDP_MAX_LOCAL_RANKS);
}

static fsdp_status set_np(fsdp_launch_options *options, const char *name, const char *text,
                          fsdp_error *err)
{
    options->np_name = name;
    return set_count(&options->np, name, text, err);
}

static fsdp_status set_threads(fsdp_launch_options *options, const char *name, const char *text,
                               fsdp_error *err)
{
    options->threads_name = name;
    return set_count(&options->threads, name, text, err);
}

const char *fsdp_comm_choice_name(fsdp_comm_choice comm)
{
    static const char *const names[] = {"auto", "self", "threads", "shm", "mpi", "tcp", "nccl"};
    return names[comm];
}

static fsdp_status set_comm(fsdp_launch_options *options, const char *name, const char *text,
                            fsdp_error *err)
{
    options->comm_name = name;
    for (int i = FSDP_COMM_AUTO; i <= FSDP_COMM_NCCL; i++)
        if (strcmp(text, fsdp_comm_choice_name((fsdp_comm_choice)i)) == 0) {
            options->comm = (fsdp_comm_choice)i;
            return FSDP_OK;
        }
    return fsdp_fail(err, FSDP_ERR_USAGE,
                     "%s '%s' is unknown; use auto, self, threads, shm, mpi, tcp or nccl", name,
                     text);
}

static fsdp_status set_device(fsdp_launch_options *options, const char *name, const char *text,
                              fsdp_error *err)
{
    (void)name;
    (void)err;
    options->device = text;
    return FSDP_OK;
}

static fsdp_status set_deadline(fsdp_launch_options *options, const char *name, const char *text,
                                fsdp_error *err)
{
    char *end;
    double seconds = strtod(text, &end);
    if (end == text || *end != '\0' || !(seconds >= 0.001 && seconds <= LONGEST_DEADLINE_S))
        return fsdp_fail(err, FSDP_ERR_USAGE, "%s '%s' is not a number of seconds from 0.001 to %d",
                         name, text, LONGEST_DEADLINE_S);
    options->deadline_ms = (int)lround(seconds * 1000);
    return FSDP_OK;
}

static fsdp_status set_trace(fsdp_launch_options *options, const char *name, const char *text,
                             fsdp_error *err)
{
    if (text[0] == '\0')
        return fsdp_fail(err, FSDP_ERR_USAGE, "%s needs the name of a file", name);
    options->trace = text;
    return FSDP_OK;
}

static fsdp_status set_flag(bool *flag, const char *name, const char *text, fsdp_error *err)
{
    if (strcmp(text, "1") != 0 && strcmp(text, "0") != 0)
        return fsdp_fail(err, FSDP_ERR_USAGE, "%s '%s' is not 1 or 0", name, text);
    *flag = text[0] == '1';
    return FSDP_OK;
}

static fsdp_status set_check(fsdp_launch_options *options, const char *name, const char *text,
                             fsdp_error *err)
{
    return set_flag(&options->check, name, text, err);
}

/* --- sources of options ----------------------------------------------------------------------- */

typedef struct launch_option {
    const char *name, *variable;
    bool is_flag;
    fsdp_status (*set)(fsdp_launch_options *options, const char *name, const char *text,
                       fsdp_error *err);
} launch_option;

static const launch_option table[] = {
    {"--np", "FSDP_NP", false, set_np},
    {"--threads", "FSDP_THREADS", false, set_threads},
    {"--comm", "FSDP_COMM", false, set_comm},
    {"--device", "FSDP_DEVICE", false, set_device},
    {"--deadline", "FSDP_DEADLINE", false, set_deadline},
    {"--trace", "FSDP_TRACE", false, set_trace},
    {"--check", "FSDP_CHECK", true, set_check},
};
enum { OPTIONS = sizeof table / sizeof *table };

/* *value_out: what stands after '=', or NULL. */
static const launch_option *find_option(const char *argument, const char **value_out)
{
    for (int i = 0; i < OPTIONS; i++) {
        size_t length = strlen(table[i].name);
        if (strncmp(argument, table[i].name, length) != 0)
            continue;
        *value_out = argument[length] == '=' ? argument + length + 1 : NULL;
        if (*value_out || argument[length] == '\0')
            return &table[i];
    }
    return NULL;
}

/* The one at *at, and its value, which may be the next argument. */
static fsdp_status take_option(const launch_option *option, const char *value, char **argv, int *at,
                               fsdp_launch_options *options, fsdp_error *err)
{
    if (option->is_flag && value)
        return fsdp_fail(err, FSDP_ERR_USAGE, "%s takes no value", option->name);
    if (option->is_flag)
        return option->set(options, option->name, "1", err);
    if (!value)
        value = argv[++*at];
    if (!value)
        return fsdp_fail(err, FSDP_ERR_USAGE, "%s needs a value", option->name);
    return option->set(options, option->name, value, err);
}

static fsdp_status read_arguments(int argc, char **argv, fsdp_launch_options *options,
                                  fsdp_error *err)
{
    bool is_over = false;
    for (int i = 0; i < argc; i++) {
        const char *value;
        is_over = is_over || (i > 0 && strcmp(argv[i], "--") == 0);
        const launch_option *option = is_over || i == 0 ? NULL : find_option(argv[i], &value);
        if (option)
            FSDP_TRY(take_option(option, value, argv, &i, options, err));
        else
            options->argv[options->argc++] = argv[i];
    }
    return FSDP_OK;
}

static fsdp_status read_variables(fsdp_getenv get, void *context, fsdp_launch_options *options,
                                  fsdp_error *err)
{
    for (int i = 0; i < OPTIONS; i++) {
        const char *text = get(context, table[i].variable);
        if (text && text[0] != '\0')
            FSDP_TRY(table[i].set(options, table[i].variable, text, err));
    }
    const char *verbose = get(context, "FSDP_VERBOSE"), *host = get(context, "FSDP_HOST_ID");
    options->host = host && host[0] != '\0' ? host : NULL;
    options->is_quiet = verbose && strcmp(verbose, "0") == 0;
    options->is_verbose = verbose && verbose[0] != '\0' && !options->is_quiet;
    return FSDP_OK;
}

/* --np and --threads exclude each other; said on the command line, one of them beats the environment's
 * other. */
static fsdp_status choose_kind(fsdp_launch_options *options, const fsdp_launch_options *variables,
                               fsdp_error *err)
{
    bool np_is_said = options->np_name && options->np_name != variables->np_name;
    bool threads_is_said =
        options->threads_name && options->threads_name != variables->threads_name;
    if (options->np == 0 || options->threads == 0)
        return FSDP_OK;
    if (np_is_said == threads_is_said)
        return fsdp_fail(err, FSDP_ERR_USAGE, "%s and %s: ranks are either processes or threads",
                         options->np_name, options->threads_name);
    if (np_is_said)
        options->threads = 0;
    else
        options->np = 0;
    return FSDP_OK;
}

fsdp_status fsdp_launch_options_read(int argc, char **argv, fsdp_getenv get, void *context,
                                     fsdp_launch_options *options_out, fsdp_error *err)
{
    fsdp_launch_options options = {.device = "cpu", .deadline_ms = DEADLINE_MS};
    fsdp_launch_options variables;
    options.argv = fsdp_alloc((size_t)argc + 1, sizeof *options.argv);
    if (!options.argv)
        return fsdp_fail_memory(err, "the program's arguments");
    fsdp_status status = read_variables(get, context, &options, err);
    variables = options;
    if (status == FSDP_OK)
        status = read_arguments(argc, argv, &options, err);
    if (status == FSDP_OK)
        status = choose_kind(&options, &variables, err);
    if (status == FSDP_OK)
        *options_out = options;
    else
        fsdp_launch_options_release(&options);
    return status;
}

void fsdp_launch_options_release(fsdp_launch_options *options)
{
    fsdp_free(options->argv);
    options->argv = NULL;
}
