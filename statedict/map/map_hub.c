/*
 * The map "hub": the names that transformers 5 has in memory, on its left, and those that it writes into
 * files for the hub, for the class of the model in config.json. See map.h.
 *
 * Its rules are data: hub_names.txt, which tests/peers/hub_names.py makes of transformers' own conversions. A
 * line "same CLASS ..." has classes whose names are equal; lines "for CLASS ..." begin the rules of classes.
 */
#include "statedict/map/map.h"

#include "statedict/map/hub_names.h"

#include <string.h>

const char fsdp_map_hub_name[] = "hub";

static const char *end_of(const char *line)
{
    return line + strcspn(line, "\n");
}

static const char *next_of(const char *line)
{
    const char *end = end_of(line);
    return *end ? end + 1 : end;
}

/* True when the line begins with the word, and has the class after it. */
static bool lists(const char *line, const char *word, const char *class_name)
{
    size_t size = strlen(class_name), begin = strlen(word);
    const char *end = end_of(line);
    if (strncmp(line, word, begin) != 0)
        return false;
    for (const char *at = line + begin; at < end; at += strcspn(at, " \n") + 1)
        if (strcspn(at, " \n") == size && memcmp(at, class_name, size) == 0)
            return true;
    return false;
}

static bool begins_rules(const char *line)
{
    return strncmp(line, "for ", 4) == 0;
}

/* The rules of the class up to its end; NULL: it has none. */
static const char *find_rules(const char *class_name, size_t *size_out)
{
    const char *line = hub_names;
    while (*line && !lists(line, "for ", class_name))
        line = next_of(line);
    while (begins_rules(line))
        line = next_of(line);
    const char *end = line;
    while (*end && !begins_rules(end))
        end = next_of(end);
    *size_out = (size_t)(end - line);
    return *line ? line : NULL;
}

fsdp_hub_names fsdp_map_hub_knows(const char *class_name)
{
    size_t size;
    for (const char *line = hub_names; *line; line = next_of(line))
        if (lists(line, "same ", class_name))
            return FSDP_HUB_SAME;
    return class_name[0] && find_rules(class_name, &size) ? FSDP_HUB_OTHERS : FSDP_HUB_UNKNOWN;
}

fsdp_status fsdp_map_hub(const char *class_name, fsdp_map **map_out, fsdp_error *err)
{
    size_t size = 0;
    const char *rules = class_name[0] ? find_rules(class_name, &size) : NULL;
    fsdp_text text = {0};
    if (!rules)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "no names of the hub are known for the class '%s', the first of "
                         "'architectures' in config.json (--copy-from DIR names its directory)",
                         class_name);
    fsdp_text_addf(&text, "left transformers-5\nright hub\nkeep others\n");
    fsdp_text_add(&text, rules, size);
    fsdp_status st = text.failed
                         ? fsdp_fail_memory(err, "a map")
                         : fsdp_map_parse(text.data, text.size, fsdp_map_hub_name, map_out, err);
    fsdp_text_release(&text);
    return st;
}
