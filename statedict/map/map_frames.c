/*
 * Rules that hold for further names: those of frames (moments of an optimizer), those of single rows of a
 * stacked tensor, and all names below a key. See map.h.
 */
#include "statedict/map/map_rules.h"

#include <string.h>

static fsdp_status no_memory(fsdp_error *err)
{
    return fsdp_fail_memory(err, "a map");
}

/* "optimizer.state.{m:exp_avg}.*" around a name */
static fsdp_status frame_names(fsdp_map *map, map_rule *rule, const char *frame, bool right,
                               fsdp_error *err)
{
    map_pattern *names = right ? rule->right : rule->left;
    int count = right ? rule->right_count : rule->left_count;
    const char *star = strchr(frame, '*');
    for (int i = 0; i < count; i++) {
        fsdp_text text = {0};
        fsdp_text_addf(&text, "%.*s%s%s", (int)(star - frame), frame, names[i].text, star + 1);
        const char *wrong =
            text.failed ? "there is no memory for it"
                        : map_pattern_read(&map->arena, text.data, &rule->variables, &names[i]);
        fsdp_text_release(&text);
        if (wrong)
            return fsdp_fail(err, FSDP_ERR_USAGE, "%s, line %d: %s", map->path, rule->line, wrong);
    }
    return FSDP_OK;
}

static fsdp_status copy_rule(fsdp_map *map, const map_rule *rule, map_rule **copy_out,
                             fsdp_error *err)
{
    if (map->rule_count == MAP_RULES)
        return fsdp_fail(err, FSDP_ERR_LIMIT, "'%s' has more than %d rules, with those of frames",
                         map->path, MAP_RULES);
    *copy_out = fsdp_arena_alloc(&map->arena, 1, sizeof **copy_out);
    if (!*copy_out || !fsdp_grow(&map->rules, &map->rule_room, map->rule_count + 1, sizeof(void *)))
        return no_memory(err);
    **copy_out = *rule;
    map->rules[map->rule_count++] = *copy_out;
    return FSDP_OK;
}

/* Repeats every rule in every frame. */
static fsdp_status add_frames(fsdp_map *map, fsdp_error *err)
{
    size_t plain = map->rule_count;
    map_rule *copy;
    for (size_t f = 0; f < map->frame_count; f++) {
        for (size_t i = 0; i < plain; i++) {
            FSDP_TRY(copy_rule(map, map->rules[i], &copy, err));
            FSDP_TRY(frame_names(map, copy, map->frames[f][0], false, err));
            FSDP_TRY(frame_names(map, copy, map->frames[f][1], true, err));
        }
    }
    return FSDP_OK;
}

/* The names of a rule below a key. */
static fsdp_status put_below(fsdp_map *map, map_rule *rule, const char *frame, fsdp_error *err)
{
    FSDP_TRY(frame_names(map, rule, frame, false, err));
    return frame_names(map, rule, frame, true, err);
}

static fsdp_status put_tied_below(fsdp_map *map, const char *key, size_t size, fsdp_error *err)
{
    for (size_t i = 0; i < map->tied_count; i++) {
        fsdp_text text = {0};
        fsdp_text_addf(&text, "%.*s%s", (int)size, key, map->tied[i].name);
        map->tied[i].name =
            text.failed ? NULL : fsdp_arena_strndup(&map->arena, text.data, text.size);
        fsdp_text_release(&text);
        if (!map->tied[i].name)
            return no_memory(err);
    }
    return FSDP_OK;
}

fsdp_status fsdp_map_put_below(fsdp_map *map, const char *key, size_t size, fsdp_error *err)
{
    fsdp_text frame = {0};
    fsdp_text_addf(&frame, "%.*s*", (int)size, key);
    fsdp_status st = frame.failed ? no_memory(err) : FSDP_OK;
    for (size_t i = 0; i < map->rule_count && st == FSDP_OK; i++)
        st = put_below(map, map->rules[i], frame.data, err);
    fsdp_text_release(&frame);
    return st == FSDP_OK ? put_tied_below(map, key, size, err) : st;
}

/* The rule for a tensor per row, where its first step takes the rows out of one tensor. */
static fsdp_status add_unstacked_rule(fsdp_map *map, const map_rule *rule,
                                      const char *const names[2], fsdp_error *err)
{
    size_t size = strlen(names[0]);
    map_rule *copy;
    if (rule->step_count == 0 || rule->steps[0].verb != MAP_UNSTACK || rule->left_count != 1 ||
        strncmp(rule->left[0].text, names[0], size) != 0)
        return FSDP_OK;
    FSDP_TRY(copy_rule(map, rule, &copy, err));
    fsdp_text text = {0};
    fsdp_text_addf(&text, "%s%s", names[1], rule->left[0].text + size);
    const char *wrong =
        text.failed ? "there is no memory for it"
                    : map_pattern_read(&map->arena, text.data, &copy->variables, &copy->left[0]);
    fsdp_text_release(&text);
    if (wrong)
        return fsdp_fail(err, FSDP_ERR_USAGE, "%s, line %d: %s", map->path, rule->line, wrong);
    memmove(copy->steps, copy->steps + 1, (size_t)--copy->step_count * sizeof *copy->steps);
    copy->directions &= MAP_TO_RIGHT;
    return FSDP_OK;
}

static fsdp_status add_unstacked(fsdp_map *map, fsdp_error *err)
{
    size_t plain = map->rule_count;
    for (size_t u = 0; u < map->unstacked_count; u++)
        for (size_t i = 0; i < plain; i++)
            FSDP_TRY(add_unstacked_rule(map, map->rules[i], map->unstacked[u], err));
    return FSDP_OK;
}

fsdp_status map_repeat_rules(fsdp_map *map, fsdp_error *err)
{
    FSDP_TRY(add_unstacked(map, err));
    return add_frames(map, err);
}
