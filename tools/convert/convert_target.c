/* The format of the result of fsdp-convert: as typed with --to, or by the name of DST. See convert_tool.h. */
#include "tools/convert/convert_tool.h"
#include "base/text.h"

#include <ctype.h>
#include <string.h>
#include <strings.h>

static void list_known(fsdp_text *known)
{
    for (size_t i = 0; fsdp_convert_format_at(i); i++)
        fsdp_text_addf(known, "%s%s", i > 0 ? ", " : "", fsdp_convert_format_at(i));
}

_Noreturn static void refuse_format_of(const char *to, const char *suffix)
{
    fsdp_text known = {0};
    list_known(&known);
    cli_usage_error("'%s': %s files cannot be written; known formats for --to: %.*s", to, suffix,
                    (int)known.size, known.data);
}

/* The format of "HF" or "HuggingFace"; NULL: none. */
static const char *format_in_small_letters(const char *text)
{
    char small[32];
    size_t size = strlen(text);
    if (size >= sizeof small)
        return NULL;
    for (size_t i = 0; i <= size; i++)
        small[i] = (char)tolower((unsigned char)text[i]);
    const fsdp_format *format = fsdp_format_to(cli_meant(small));
    return format ? format->name : NULL;
}

/* Words for programs, and the format that they load. */
static const struct {
    const char *start, *format, *why;
} loaders[] = {{"deepspeed", "universal", "a checkpoint that DeepSpeed loads at any stage"},
               {"zero", "universal", "a checkpoint that DeepSpeed loads at any stage"},
               {"fsdp1", "dcp", "a checkpoint that PyTorch's FSDP loads"},
               {"fsdp2", "dcp", "a checkpoint that PyTorch's FSDP loads"},
               {"pytorch_", "dcp", "PyTorch's distributed checkpoint"},
               {"pytorch-", "dcp", "PyTorch's distributed checkpoint"},
               {"torch_d", "dcp", "PyTorch's distributed checkpoint"},
               {"distcp", "dcp", "PyTorch's distributed checkpoint"}};

/* The format whose name is one or two letters away. */
static const char *format_nearby(const char *text)
{
    const char *near = NULL;
    int least = 3;
    for (size_t i = 0; fsdp_convert_format_at(i); i++) {
        const char *known = fsdp_convert_format_at(i);
        int distance = cli_edit_distance(text, strlen(text), known, strlen(known));
        if (distance < least && distance < (int)strlen(known) / 2) {
            least = distance;
            near = known;
        }
    }
    return near;
}

_Noreturn static void refuse_format(const char *text)
{
    fsdp_text known = {0};
    const char *near = format_in_small_letters(text);
    for (size_t i = 0; !near && i < sizeof loaders / sizeof *loaders; i++)
        if (strncasecmp(text, loaders[i].start, strlen(loaders[i].start)) == 0)
            cli_usage_error("--to '%s' cannot be written; did you mean '%s', %s?", text,
                            loaders[i].format, loaders[i].why);
    near = near ? near : format_nearby(text);
    if (near)
        cli_usage_error("--to '%s' cannot be written; did you mean '%s'?", text, near);
    list_known(&known);
    cli_usage_error("--to '%s' cannot be written; known formats: %.*s", text, (int)known.size,
                    known.data);
}

const char *convert_parse_format(const char *text)
{
    const fsdp_format *format = fsdp_format_to(cli_meant(text));
    if (format)
        return format->name;
    refuse_format(text);
}

const fsdp_format *convert_target(const convert_options *opts)
{
    return fsdp_format_to(opts->convert.format);
}

enum { NO_SLIP = 32 };

/* The distance of typed from known, if it may be known with a slip: another case, up to three wrong, missing
 * or added letters of a long one, two exchanged or one missing or added of a short one. A wrong letter of
 * a short one makes another word (".bit"), and so does a number (".v5"). */
static int slip_of(const char *typed, const char *known)
{
    size_t size = strlen(typed), size_known = strlen(known);
    int distance = cli_edit_distance(typed, size, known, size_known);
    bool is_long = size_known > 8, has_wrong = size == size_known && strspn(typed, known) < size;
    if (strcasecmp(typed, known) == 0)
        return 0;
    if (distance > (is_long ? 3 : 1) || size < 3 || typed[1] != known[1] ||
        (has_wrong && size_known <= 4) || strpbrk(typed, "0123456789/"))
        return NO_SLIP;
    return 2 * distance + (size != size_known);
}

static void refuse_slip(const char *to)
{
    const char *suffix = strrchr(to, '.'), *near = NULL;
    int least = NO_SLIP;
    for (size_t i = 0; suffix && fsdp_format_at(i); i++) {
        for (const char *const *known = fsdp_format_at(i)->suffixes; *known; known++) {
            int slip = slip_of(suffix, *known);
            near = slip < least ? *known : near;
            least = slip < least ? slip : least;
        }
    }
    if (near)
        cli_usage_error("'%s': did you mean '%.*s%s'? --to FORMAT writes to any name", to,
                        (int)(suffix - to), to, near);
}

/* Refuses a name with the suffix of a format that is not written, in place of a directory of that
 * name. */
static void refuse_suffix(const char *to)
{
    static const char *const others[] = {".ggml",    ".onnx",    ".tflite", ".pkl", ".keras",
                                         ".msgpack", ".mlmodel", ".json",   ".zip", ".tar",
                                         ".gz",      ".tgz",     ".bz2",    ".xz",  ".zst"};
    const char *suffix = strrchr(to, '.');
    for (size_t i = 0; suffix && i < sizeof others / sizeof *others; i++)
        if (strcasecmp(suffix, others[i]) == 0)
            refuse_format_of(to, suffix);
}

void convert_choose_format(convert_options *opts, bool needs_native)
{
    fsdp_convert_opts *convert = &opts->convert;
    if (strcmp(opts->to, "-") == 0)
        cli_usage_error("DST '-' would be standard output, and a result is read back: name a file "
                        "or a directory ('./-' if that is its name)");
    if (strstr(opts->to, "://"))
        cli_usage_error("DST '%s' is an address: name a file or a directory here, and upload it",
                        opts->to);
    const fsdp_format *named = fsdp_format_to(fsdp_convert_format_of(opts->to));
    if (convert->format) {
        if (named->base && strcmp(named->base, convert->format) == 0)
            convert->format = named->name; /* NumPy's, either way */
        return;
    }
    convert->format = named->name;
    refuse_suffix(opts->to);
    if (named->suffixes[0])
        return;
    refuse_slip(opts->to);
    if (needs_native)
        convert->format = "fsdp";
}
