/* The message about entries that a format cannot hold: see excess.h. */
#include "statedict/select/excess.h"

#include <stdio.h>
#include <string.h>

fsdp_status fsdp_excess_add(fsdp_excess *excess, const char *drop, const char *name, size_t size,
                            fsdp_error *err)
{
    size_t i = 0;
    while (i < excess->count && strcmp(excess->groups[i].drop, drop) != 0)
        i++;
    if (i == excess->count) {
        if (!fsdp_grow(&excess->groups, &excess->room, i + 1, sizeof *excess->groups))
            return fsdp_fail_memory(err, "a list of names");
        excess->groups[i] = (fsdp_excess_group){0};
        snprintf(excess->groups[i].drop, sizeof excess->groups[i].drop, "%s", drop);
        excess->count++;
    }
    return fsdp_names_add(&excess->groups[i].names, name, size)
               ? FSDP_OK
               : fsdp_fail_memory(err, "a list of names");
}

void fsdp_excess_release(fsdp_excess *excess)
{
    for (size_t i = 0; i < excess->count; i++)
        fsdp_names_release(&excess->groups[i].names);
    fsdp_free(excess->groups);
}

/* The part of the argument after `begin`, NULL when it begins otherwise. */
static const char *behind(const char *drop, const char *begin)
{
    return strncmp(drop, begin, strlen(begin)) == 0 ? drop + strlen(begin) : NULL;
}

static bool is_cast(const fsdp_excess_group *group)
{
    return behind(group->drop, FSDP_CAST_TO) != NULL;
}

/* "2 values", "1 quantized tensor", "3 tensors of f8_e4m3fn", "1 flat parameter" */
static void add_count(const fsdp_excess_group *group, fsdp_text *text)
{
    size_t count = group->names.count;
    const char *end = count == 1 ? "" : "s", *kind = behind(group->drop, FSDP_DROP_TENSORS);
    const char *dtype = behind(group->drop, FSDP_DROP_DTYPE);
    if (kind && strcmp(kind, "flat") == 0)
        fsdp_text_addf(text, "%zu flat parameter%s", count, end);
    else if (kind)
        fsdp_text_addf(text, "%zu %s tensor%s", count, kind, end);
    else if (dtype)
        fsdp_text_addf(text, "%zu tensor%s of %s", count, end, dtype);
    else if (is_cast(group))
        fsdp_text_addf(text, "%zu tensor%s that %s %s", count, end, count == 1 ? "is" : "are",
                       group->drop);
    else if (strcmp(group->drop, "opaque") == 0)
        fsdp_text_addf(text, "%zu opaque value%s", count, end);
    else
        fsdp_text_addf(text, "%zu value%s", count, end);
}

/* The first names: the room of a message is shared by all groups. */
static void add_names(const fsdp_excess_group *group, size_t most, fsdp_text *text)
{
    size_t start = text->size;
    fsdp_text_addf(text, ":");
    for (size_t i = 0; i < group->names.count; i++) {
        if (i > 0 && text->size - start > most) {
            fsdp_text_addf(text, " and %zu more", group->names.count - i);
            return;
        }
        fsdp_text_addf(text, "%s '%s'", i ? "," : "", group->names.items[i]);
    }
}

/* Reading the whole is better than leaving out a part, where that is possible. */
static void add_other_ways(const fsdp_excess *excess, fsdp_text *text)
{
    for (size_t i = 0; i < excess->count; i++) {
        const char *kind = behind(excess->groups[i].drop, FSDP_DROP_TENSORS);
        if (kind && strcmp(kind, "void") == 0)
            fsdp_text_addf(text, "; --void-as bf16 reads elements of 2 bytes as bf16");
        if (kind && strcmp(kind, "flat") == 0 && !excess->has_pieces)
            fsdp_text_addf(text, "; rank files name its parts where the units' shard_metadata was "
                                 "saved beside it");
    }
    if (excess->has_pieces)
        fsdp_text_addf(text, "; the ranks have pieces of parameters, whose shapes --like MODEL "
                             "gives: a Hugging Face directory or a checkpoint of the model");
}

/* Leaving these out would leave no model. */
static void add_reason(const fsdp_excess *excess, fsdp_text *text)
{
    if (excess->has_units)
        fsdp_text_addf(text,
                       "; a tensor of a subclass is one unit, with its scale: in Python, save "
                       "it as a plain tensor (dequantize()), or keep it whole with --to dcp "
                       "--opaque copy");
    else
        fsdp_text_addf(text, "; without them no weights are left to convert: fsdp-ls lists what "
                             "the source holds");
}

/* Ends with the arguments: tools/convert/convert_advice.c makes a command line of them. */
static void add_advice(const fsdp_excess *excess, fsdp_text *text)
{
    bool is_first = true, may_drop = excess->has_weights && !excess->has_units;
    if (!may_drop)
        add_reason(excess, text);
    for (size_t i = 0; i < excess->count && may_drop; i++) {
        if (is_cast(&excess->groups[i]))
            continue;
        fsdp_text_addf(text, "%s --drop %s", is_first ? "; leave out with" : "",
                       excess->groups[i].drop);
        is_first = false;
    }
    for (size_t i = 0; i < excess->count; i++)
        if (is_cast(&excess->groups[i]))
            fsdp_text_addf(text,
                           "; it has no %s: choose another --dtype, or keep tensors as they "
                           "are with --dtype-for 'RE=keep'",
                           behind(excess->groups[i].drop, FSDP_CAST_TO));
}

fsdp_status fsdp_excess_fail(const fsdp_excess *excess, const char *format, fsdp_error *err)
{
    enum { SHOWN_BYTES = 300 };
    fsdp_text text = {0};
    bool only_values = excess->count == 1 && !excess->holds_values &&
                       strcmp(excess->groups[0].drop, "values") == 0;
    fsdp_text_addf(&text, only_values ? "%s holds tensors only" : "%s cannot hold everything",
                   format);
    for (size_t i = 0; i < excess->count; i++) {
        fsdp_text_addf(&text, "; ");
        add_count(&excess->groups[i], &text);
        add_names(&excess->groups[i], SHOWN_BYTES / excess->count, &text);
    }
    add_other_ways(excess, &text);
    if (!excess->has_pieces) /* what is left would have no weights */
        add_advice(excess, &text);
    fsdp_text_add(&text, "", 1);
    fsdp_status st = text.failed ? fsdp_fail_memory(err, "a message")
                                 : fsdp_fail(err, FSDP_ERR_USAGE, "%s", text.data);
    fsdp_text_release(&text);
    return st;
}
