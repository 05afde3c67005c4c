/*
 * Command lines that refusals advise: fsdp-convert with the --drop options that a refusal names, or with one
 * of several sources. See convert_tool.h.
 */
#include "tools/convert/convert_tool.h"
#include "base/text.h"

#include <stdlib.h>
#include <string.h>

static const char drop_advice[] = "; leave out with", drop_option[] = " --drop ";

/* " --drop values --drop dtype:bf16" at the end of a refusal, or NULL. Names of the source stand
 * before it. */
static char *find_drops(char *message)
{
    char *found = NULL;
    for (char *at = message; (at = strstr(at, drop_advice)) != NULL; at++)
        found = at + sizeof drop_advice - 1;
    static const char letters[] = "abcdefghijklmnopqrstuvwxyz0123456789_:- ";
    return found && strspn(found, letters) == strlen(found) ? found : NULL;
}

enum { DROPS_MOST = 20 };

/* Arguments of --drop: the user's, and those of refusals, each of which is a text in `words`. */
typedef struct drop_list {
    const char **items;
    size_t count, given;
    char *words[DROPS_MOST];
    size_t word_count;
} drop_list;

/* Takes the arguments of " --drop A --drop B"; false when they are too many. */
static bool take_drops(drop_list *list, const char *drops)
{
    while ((drops = strstr(drops, drop_option)) != NULL) {
        drops += sizeof drop_option - 1;
        char *word = list->word_count < DROPS_MOST ? strndup(drops, strcspn(drops, " ")) : NULL;
        if (!word)
            return false;
        list->words[list->word_count++] = word;
        list->items[list->count++] = word;
    }
    return true;
}

/* Plans the conversion with what refusals advise to drop, and with what the next one does. False when it is
 * refused otherwise, with the reason in other_out. */
static bool try_drops(const convert_options *opts, drop_list *list, const char *drops,
                      fsdp_error *other_out)
{
    fsdp_convert_opts dropping = opts->convert;
    dropping.watch = (fsdp_watch){0}; /* notices were given */
    while (drops && take_drops(list, drops)) {
        fsdp_conversion *conversion = NULL;
        *other_out = (fsdp_error){0};
        dropping.select.drops = list->items;
        dropping.select.drop_count = list->count;
        fsdp_status st =
            fsdp_conversion_open(opts->from, opts->to, &dropping, &conversion, other_out);
        fsdp_conversion_close(conversion);
        if (st == FSDP_OK || st == FSDP_ERR_EXISTS)
            return true;
        drops = st == FSDP_ERR_USAGE ? find_drops(other_out->text) : NULL;
    }
    return false;
}

/* ": fsdp-convert SRC DST --drop values" */
static void add_command(fsdp_text *text, const convert_options *opts, const drop_list *list)
{
    fsdp_text_addf(text, ": fsdp-convert");
    for (int i = 1; i < opts->argc; i++) {
        if (strcmp(opts->argv[i], "--") == 0)
            text->failed = true; /* what is after it is not an option */
        cli_add_argument(text, opts->argv[i]);
    }
    for (size_t i = list->given; i < list->count; i++)
        fsdp_text_addf(text, "%s%s", drop_option, list->items[i]);
}

void convert_name_drops(const convert_options *opts, fsdp_error *err)
{
    const fsdp_select_opts *select = &opts->convert.select;
    char *drops = err->status == FSDP_ERR_USAGE ? find_drops(err->text) : NULL;
    fsdp_error other = {0};
    fsdp_text text = {0};
    if (!drops || opts->apply)
        return;
    drop_list list = {.items = calloc(select->drop_count + DROPS_MOST, sizeof *list.items),
                      .given = select->drop_count};
    for (; list.items && list.count < list.given; list.count++)
        list.items[list.count] = select->drops[list.count];
    bool succeeds = list.items && try_drops(opts, &list, drops, &other);
    if (succeeds) {
        fsdp_text_addf(&text, "%s", err->text);
        add_command(&text, opts, &list);
    } else if (other.status != FSDP_OK) {
        drops[1 - (int)sizeof drop_advice] = '\0';
        fsdp_text_addf(&text, "%s; without them: %s", err->text, other.text);
    }
    if (text.size > 0 && !text.failed && text.size < FSDP_ERROR_TEXT)
        memcpy(err->text, text.data, text.size + 1);
    for (size_t i = 0; i < list.word_count; i++)
        free(list.words[i]);
    free(list.items);
    fsdp_text_release(&text);
}

/* Size of a shell's word that is quoted as fsdp_text_add_quoted does; 0 when it does not end. */
static size_t word_size(const char *word)
{
    size_t size = 0;
    while (word[size] == '\'' || word[size] == '\\' || strncmp(word + size, "$'", 2) == 0) {
        bool is_spelled = word[size] == '$';
        if (word[size] == '\\' && word[size + 1]) {
            size += 2;
            continue;
        }
        for (size += is_spelled ? 2 : 1; word[size] && word[size] != '\''; size++)
            size += is_spelled && word[size] == '\\' && word[size + 1];
        if (!word[size++])
            return 0;
    }
    return size;
}

/* " PATH"; without quotes where it needs none. */
static void add_word(fsdp_text *text, const char *word, size_t size)
{
    fsdp_text inner = {0};
    fsdp_text_add(&inner, word + 1, size - 2);
    if (word[0] != '\'' || inner.failed || strchr(inner.data, '\''))
        fsdp_text_addf(text, " %.*s", (int)size, word);
    else
        cli_add_argument(text, inner.data);
    fsdp_text_release(&inner);
}

void convert_name_source(const convert_options *opts, fsdp_error *err)
{
    static const char advice[] = "; name one of them: ";
    const char *found = err->status == FSDP_ERR_USAGE ? strstr(err->text, advice) : NULL;
    fsdp_text text = {0};
    size_t size = found ? word_size(found + strlen(advice)) : 0;
    if (size < 2 || opts->apply || !opts->from)
        return;
    fsdp_text_addf(&text, "%s: fsdp-convert", err->text);
    for (int i = 1; i < opts->argc; i++) {
        if (opts->argv[i] == opts->from)
            add_word(&text, found + strlen(advice), size);
        else
            cli_add_argument(&text, opts->argv[i]);
    }
    if (!text.failed && text.size < FSDP_ERROR_TEXT)
        memcpy(err->text, text.data, text.size + 1);
    fsdp_text_release(&text);
}
