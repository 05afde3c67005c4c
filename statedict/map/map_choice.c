/*
 * The map of a conversion: the one that the user names, or one that fits source and target; and the map of an
 * opened checkpoint, for tools that read it without a conversion. See map.h.
 */
#include "base/core/given.h"
#include "statedict/checkpoint/checkpoint_internal.h"
#include "statedict/derive/element_types.h"
#include "statedict/gguf_model/gguf_values.h"
#include "statedict/map/hub_names.h"
#include "statedict/map/map_rules.h"
#include "statedict/map/map_texts.h"
#include "statedict/models/config.h"
#include "statedict/models/params_config.h"
#include "statedict/select/drop_rules.h"
#include "statedict/select/model_part.h"

#include <stdio.h>
#include <string.h>

enum { FILE_MOST = 1 << 20 };

/* === a config.json for a source without one =================================================== */

/* Loaders of Hugging Face's directories and of GGUF files ask for its numbers, and the source has them in
 * another form. */

/* Other formats may keep the pairs of GGUF, too. */
static bool has_pairs(const fsdp_sd *sd)
{
    static const char pair[] = "general.architecture";
    return fsdp_sd_find(sd, pair, sizeof pair - 1) >= 0;
}

/* Whether the user wants the tensors alone, without the pairs. */
static bool drops_pairs(const fsdp_map_request *request)
{
    const fsdp_select_opts *select = &request->opts->select;
    for (size_t i = 0; i < select->drop_count; i++)
        if (strcmp(select->drops[i], "values") == 0)
            return true;
    return false;
}

/* The pairs have all numbers but for those that tensors of scaled rotary frequencies were computed from. */
static fsdp_status from_gguf(const fsdp_map_request *request, const fsdp_checkpoint *checkpoint,
                             fsdp_text *out, fsdp_error *err)
{
    static const char *const scalings[] = {"rope_freqs.weight", "rope_factors_long.weight",
                                           "rope_factors_short.weight"};
    const fsdp_sd *sd = checkpoint->manifest.sd;
    for (size_t i = 0; i < sizeof scalings / sizeof *scalings; i++)
        if (fsdp_sd_find(sd, scalings[i], strlen(scalings[i])) >= 0)
            return fsdp_fail(
                err, FSDP_ERR_USAGE,
                "'%s' has scaled rotary frequencies ('%s'), and config.json needs their original "
                "numbers; give the directory of the model's config.json with --copy-from DIR",
                checkpoint->path, scalings[i]);
    if (!drops_pairs(request))
        return fsdp_gguf_config_text(sd, out, err);
    if (fsdp_gguf_config_text(sd, out, NULL) != FSDP_OK)
        fsdp_text_release(out);
    return FSDP_OK;
}

static fsdp_status from_params(const fsdp_map_request *request, const fsdp_checkpoint *checkpoint,
                               fsdp_text *out, fsdp_error *err)
{
    fsdp_config_file params;
    fsdp_params_find(request->io, checkpoint->path, &params);
    fsdp_status st =
        params.text ? fsdp_params_config_text(&params, checkpoint->manifest.sd, out, err) : FSDP_OK;
    fsdp_config_release(&params);
    return st;
}

/* Without a map by its name a directory keeps Meta's names, and Meta's params.json belongs to them. */
static bool wants_names_of_hf(const fsdp_map_request *request)
{
    const char *map = request->opts->map;
    return request->target->caps.needs_config ||
           (request->target->caps.for_loaders && map && strcmp(map, "meta-llama") == 0);
}

fsdp_status fsdp_map_make_config(const fsdp_map_request *request, const fsdp_checkpoint *checkpoint,
                                 fsdp_config_file *config_out, fsdp_error *err)
{
    fsdp_text text = {0};
    fsdp_status st = FSDP_OK;
    *config_out = (fsdp_config_file){0};
    if (has_pairs(checkpoint->manifest.sd) && request->target->caps.for_loaders)
        st = from_gguf(request, checkpoint, &text, err);
    else if (wants_names_of_hf(request) && fsdp_is_meta_llama(checkpoint->manifest.sd))
        st = from_params(request, checkpoint, &text, err);
    if (st == FSDP_OK && text.size > 0)
        st = fsdp_config_parse(text.data, text.size, NULL, config_out, err);
    fsdp_text_release(&text);
    return st;
}

/* Reads Meta's params.json next to the checkpoint, or where the user names a map the config.json that it
 * gives. */
static void find_params(const fsdp_map_request *request, const fsdp_checkpoint *checkpoint,
                        fsdp_config_file *config_out)
{
    const fsdp_sd *sd = checkpoint->manifest.sd;
    fsdp_config_file params;
    fsdp_text text = {0};
    fsdp_params_find(request->io, checkpoint->path, &params);
    if (params.text && request->opts->map && fsdp_is_meta_llama(sd) &&
        fsdp_params_config_text(&params, sd, &text, NULL) == FSDP_OK) {
        (void)fsdp_config_parse(text.data, text.size, params.path, config_out, NULL);
        fsdp_config_release(&params);
    } else {
        *config_out = params;
    }
    fsdp_text_release(&text);
}

/* === built-in maps ============================================================================ */

const fsdp_builtin_map *fsdp_map_builtin_at(size_t i)
{
    return i < sizeof builtin_maps / sizeof *builtin_maps ? &builtin_maps[i] : NULL;
}

fsdp_status fsdp_map_builtin(const char *name, fsdp_map **map_out, fsdp_error *err)
{
    const fsdp_builtin_map *map;
    fsdp_text names = {0};
    for (size_t i = 0; (map = fsdp_map_builtin_at(i)) != NULL; i++) {
        if (strcmp(map->name, name) == 0) {
            fsdp_text_release(&names);
            FSDP_TRY(fsdp_map_parse(map->text, strlen(map->text), name, map_out, err));
            (*map_out)->types = map->types[0] ? map->types : NULL;
            return FSDP_OK;
        }
        fsdp_text_addf(&names, "%s%s", i > 0 ? ", " : "", map->name);
    }
    (void)fsdp_fail(err, FSDP_ERR_NOT_FOUND,
                    "'%s' is neither a file nor a built-in map; built-in maps are %.*s", name,
                    (int)names.size, names.data ? names.data : "");
    fsdp_text_release(&names);
    return FSDP_ERR_NOT_FOUND;
}

/* === the names of the hub ===================================================================== */

/*
 * The map "hub": the names that transformers 5 has in memory, on its left, and those that it writes into
 * files for the hub, for the class of the model in config.json. See map.h.
 *
 * Its rules are data: hub_names.txt, which tests/peers/hub_names.py makes of transformers' own conversions. A
 * line "same CLASS ..." has classes whose names are equal; lines "for CLASS ..." begin the rules of classes.
 */

/* Whether the names that transformers has in memory are those of the hub, for a class of models. */
typedef enum fsdp_hub_names { FSDP_HUB_UNKNOWN, FSDP_HUB_SAME, FSDP_HUB_OTHERS } fsdp_hub_names;

static const char hub_name[] = "hub";

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

static fsdp_hub_names map_hub_knows(const char *class_name)
{
    size_t size;
    for (const char *line = hub_names; *line; line = next_of(line))
        if (lists(line, "same ", class_name))
            return FSDP_HUB_SAME;
    return class_name[0] && find_rules(class_name, &size) ? FSDP_HUB_OTHERS : FSDP_HUB_UNKNOWN;
}

/* The map of the class. FSDP_ERR_USAGE: it is not known, or its names are equal. */
static fsdp_status map_hub(const char *class_name, fsdp_map **map_out, fsdp_error *err)
{
    size_t size = 0;
    const char *rules = class_name[0] ? find_rules(class_name, &size) : NULL;
    fsdp_text text = {0};
    if (!rules)
        return fsdp_fail(
            err, FSDP_ERR_USAGE,
            "no names of the hub are known for the class '%s', the first of 'architectures' in "
            "config.json; give the directory of another config.json with --copy-from DIR",
            class_name);
    fsdp_text_addf(&text, "left transformers-5\nright hub\nkeep others\n");
    fsdp_text_add(&text, rules, size);
    fsdp_status st = text.failed ? fsdp_fail_memory(err, "a map")
                                 : fsdp_map_parse(text.data, text.size, hub_name, map_out, err);
    fsdp_text_release(&text);
    return st;
}

/* === names that a map takes =================================================================== */

/* True when a rule takes the name, less the key of root_size bytes that its patterns begin with. */
static bool takes_below(const fsdp_map *map, bool from_right, const char *name, size_t size,
                        size_t root_size)
{
    map_binding binding;
    const int way = from_right ? MAP_TO_LEFT : MAP_TO_RIGHT;
    for (size_t i = 0; i < map->rule_count; i++) {
        const map_rule *rule = map->rules[i];
        const map_pattern *from = from_right ? rule->right : rule->left;
        int count = from_right ? rule->right_count : rule->left_count;
        for (int k = 0; (rule->directions & way) && k < count; k++) {
            map_pattern below;
            const map_pattern *pattern = &from[k];
            if (pattern->pieces[0].text_size < root_size)
                continue;
            if (root_size > 0) { /* seldom: a pattern is large */
                below = *pattern;
                below.pieces[0].text += root_size;
                below.pieces[0].text_size -= root_size;
                pattern = &below;
            }
            if (map_pattern_matches(pattern, name, size, &binding))
                return true;
        }
    }
    return false;
}

static bool takes(const fsdp_map *map, bool from_right, const fsdp_entry *entry)
{
    return takes_below(map, from_right, entry->name, entry->name_size, 0);
}

bool fsdp_map_takes_moment(const fsdp_map *map, bool from_right, const fsdp_entry *entry,
                           size_t root_size)
{
    static const char state[] = "state.";
    const size_t size = sizeof state - 1;
    size_t end = takes(map, from_right, entry) ? 0 : entry->name_size;
    while (end > 0 && entry->name[end - 1] != '.')
        end--;
    for (size_t at = 0; at + size < end; at++) /* another key may end in the word, too */
        if ((at == 0 || entry->name[at - 1] == '.') && memcmp(entry->name + at, state, size) == 0 &&
            takes_below(map, from_right, entry->name + at + size, end - 1 - at - size, root_size))
            return true;
    return false;
}

/* Counts the tensors that a side of the map takes. */
static size_t count_taken(const fsdp_map *map, bool from_right, const fsdp_sd *sd)
{
    size_t count = 0;
    for (size_t i = 0; i < fsdp_sd_count(sd); i++) {
        const fsdp_entry *entry = fsdp_sd_at(sd, i);
        count += entry->kind != FSDP_ENTRY_VALUE && takes(map, from_right, entry);
    }
    return count;
}

bool fsdp_map_types_have(const char *types, const char *model_type)
{
    size_t size = strlen(model_type);
    if (!types[0])
        return true;
    for (const char *type = types; type; type = strchr(type, ' ') ? strchr(type, ' ') + 1 : NULL)
        if (strncmp(type, model_type, size) == 0 && (type[size] == ' ' || type[size] == '\0'))
            return true;
    return false;
}

bool fsdp_map_is_for(const fsdp_map *map, const char *model_type)
{
    return !map->types || fsdp_map_types_have(map->types, model_type);
}

/* === the map of a conversion ================================================================== */

/* --- what a map is applied with ----------------------------------------------------------------- */

typedef struct map_choice {
    const fsdp_map_request *request;
    const fsdp_checkpoint *from;
    fsdp_model_kind kind; /* of config.json; empty without one */
    fsdp_map_call call;
    fsdp_drop_rules *drops;
    bool state_is_optim;
    const char
        *root; /* of the model: "model." above all its names, which those of the map get, too */
    size_t root_size; /* 0: they are as they are */
    bool is_chosen;   /* the map is applied, and no longer compared with others */
} map_choice;

/* A tensor may stay outside of the map if the selection leaves it out afterwards. */
static bool stays(const map_choice *choice, const fsdp_entry *entry)
{
    const fsdp_select_opts *select = &choice->request->opts->select;
    bool model_only = select->only == FSDP_ONLY_MODEL || (select->only == FSDP_ONLY_DEFAULT &&
                                                          choice->request->target->caps.model_only);
    const fsdp_droppable what = {.entry = entry,
                                 .dtype = entry->dtype,
                                 .is_optim = fsdp_entry_is_optim(entry, choice->state_is_optim)};
    return (choice->is_chosen && choice->request->keeps_rest) || (model_only && what.is_optim) ||
           fsdp_drop_rules_take(choice->drops, &what);
}

static bool may_stay(void *context, const fsdp_entry *entry)
{
    return stays(context, entry);
}

/* --- the choice --------------------------------------------------------------------------------- */

/* True when a side of the map takes tensors, and all that may not stay as they are. Most maps that are tried
 * end at the first name. */
static bool fits(const map_choice *choice, const fsdp_map *map, bool from_right)
{
    const fsdp_sd *sd = choice->from->manifest.sd;
    bool has_taken = false;
    for (size_t i = 0; i < fsdp_sd_count(sd); i++) {
        const fsdp_entry *entry = fsdp_sd_at(sd, i);
        if (entry->kind == FSDP_ENTRY_VALUE)
            continue;
        bool is_taken = takes(map, from_right, entry);
        if (!is_taken && !map->keeps_others && !stays(choice, entry))
            return false;
        has_taken |= is_taken;
    }
    return has_taken;
}

/* The maps that take the source to the target, one behind the other. */
typedef struct map_way {
    fsdp_map *first; /* to the right, which joins the files of ranks; NULL: none is needed */
    fsdp_map *map;
    bool from_right;
    bool is_short;   /* the names are those of the target already */
    bool is_offered; /* the map is named in a note, and not used */
} map_way;

/* Built-in maps are parsed only where their sides fit, since most conversions need none. */
static bool may_lead(const map_choice *choice, const fsdp_builtin_map *map, const char *layout)
{
    bool is_for = !choice->kind.type[0] || fsdp_map_types_have(map->types, choice->kind.type);
    return is_for && (strcmp(map->layouts[0], layout) == 0 || strcmp(map->layouts[1], layout) == 0);
}

/* Reads a map file of at most FILE_MOST bytes. */
static fsdp_status open_file(fsdp_io *io, const char *path, fsdp_map **map_out, fsdp_error *err)
{
    char *text = NULL;
    size_t size = 0;
    FSDP_TRY(fsdp_io_read_file(io, path, FILE_MOST, &text, &size, err));
    fsdp_status st = fsdp_map_parse(text, size, path, map_out, err);
    fsdp_free(text);
    if (st == FSDP_OK)
        (*map_out)->is_file = true;
    return st;
}

/* A built-in map, or a file of the user, below the root. */
static fsdp_status open_map(const map_choice *choice, const char *name, fsdp_map **map_out,
                            fsdp_error *err)
{
    fsdp_io *io = choice->request->io;
    bool is_hub = strcmp(name, hub_name) == 0;
    fsdp_status st = is_hub ? map_hub(choice->kind.class_name, map_out, err)
                            : fsdp_map_builtin(name, map_out, err);
    if (st == FSDP_ERR_NOT_FOUND && (strchr(name, '/') || fsdp_io_exists(io, name)))
        st = open_file(io, name, map_out, err);
    if (st != FSDP_OK || choice->root_size == 0)
        return st;
    st = fsdp_map_put_below(*map_out, choice->root, choice->root_size, err);
    if (st != FSDP_OK) {
        fsdp_map_free(*map_out);
        *map_out = NULL;
    }
    return st;
}

/* A built-in map that takes every tensor of the source to the layout of the target. */
static fsdp_status find_map(const map_choice *choice, map_way *way, fsdp_error *err)
{
    const char *layout = choice->request->target->name;
    const fsdp_builtin_map *builtin;
    for (size_t i = 0; (builtin = fsdp_map_builtin_at(i)) != NULL && !way->is_short; i++) {
        fsdp_map *map = NULL;
        if (!may_lead(choice, builtin, layout))
            continue;
        FSDP_TRY(open_map(choice, builtin->name, &map, err));
        way->from_right = strcmp(builtin->layouts[0], layout) == 0;
        way->is_short = fits(choice, map, !way->from_right);
        if (!way->is_short && fits(choice, map, way->from_right)) {
            way->map = map;
            return FSDP_OK;
        }
        fsdp_map_free(map);
    }
    return FSDP_OK;
}

/* The built-in map behind a first one that leads to `joined`; NULL: none. */
static const fsdp_builtin_map *find_second(const map_choice *choice, const char *joined,
                                           bool *from_right_out)
{
    const char *layout = choice->request->target->name;
    const fsdp_builtin_map *map;
    for (size_t i = 0; (map = fsdp_map_builtin_at(i)) != NULL; i++)
        for (int right = 0; right < 2 && may_lead(choice, map, layout); right++)
            if (strcmp(map->layouts[!right], layout) == 0 &&
                strcmp(map->layouts[right], joined) == 0) {
                *from_right_out = right;
                return map;
            }
    return NULL;
}

/* True when the named map goes on from a first one, and not back to the layout of the source. */
static bool goes_on(const map_way *way, const fsdp_builtin_map *first)
{
    return strcmp(fsdp_map_layout(way->map, way->from_right), first->layouts[1]) == 0 &&
           strcmp(fsdp_map_layout(way->map, !way->from_right), first->layouts[0]) != 0;
}

/* Takes a built-in map as the first one if it fits, and the second one, unless the user names that. */
static fsdp_status try_first(const map_choice *choice, const fsdp_builtin_map *builtin,
                             map_way *way, fsdp_error *err)
{
    const char *joined = builtin->layouts[1];
    const fsdp_builtin_map *second = NULL;
    fsdp_map *first = NULL;
    if (way->map)
        way->from_right = strcmp(fsdp_map_layout(way->map, true), joined) == 0;
    else
        second = find_second(choice, joined, &way->from_right);
    if (!second && !(way->map && goes_on(way, builtin)))
        return FSDP_OK;
    FSDP_TRY(open_map(choice, builtin->name, &first, err));
    fsdp_status st = FSDP_OK;
    bool is_first = fits(choice, first, false);
    if (is_first && second)
        st = open_map(choice, second->name, &way->map, err);
    if (st == FSDP_OK && is_first)
        way->first = first;
    else
        fsdp_map_free(first);
    return st;
}

/* A built-in map that takes every tensor of the source to a layout from which another one goes on. */
static fsdp_status find_first(const map_choice *choice, map_way *way, fsdp_error *err)
{
    const fsdp_builtin_map *map;
    for (size_t i = 0; (map = fsdp_map_builtin_at(i)) != NULL && !way->first; i++)
        if (!choice->kind.type[0] || fsdp_map_types_have(map->types, choice->kind.type))
            FSDP_TRY(try_first(choice, map, way, err));
    return FSDP_OK;
}

/* --- names of the hub --------------------------------------------------------------------------- */

static bool is_for_loaders(const map_choice *choice)
{
    return choice->request->target->caps.for_loaders;
}

/* The names that transformers writes into files, where the source has those of its memory; others are those
 * of files already. */
static fsdp_status find_hub(const map_choice *choice, map_way *way, fsdp_error *err)
{
    if (map_hub_knows(choice->kind.class_name) == FSDP_HUB_SAME) {
        way->is_short = true;
        return FSDP_OK;
    }
    const fsdp_sd *sd = choice->from->manifest.sd;
    FSDP_TRY(open_map(choice, hub_name, &way->map, err));
    size_t left = count_taken(way->map, false, sd);
    size_t right = count_taken(way->map, true, sd);
    way->from_right = right > left;
    way->is_short = is_for_loaders(choice) && way->from_right;
    if (!way->is_short && left + right > 0)
        return FSDP_OK;
    fsdp_map_free(way->map);
    way->map = NULL;
    return FSDP_OK;
}

/* True when the directory of config.json has weights under the names of the hub, below no key. */
static fsdp_status has_hub_names(const map_choice *choice, bool *has_out, fsdp_error *err)
{
    const fsdp_config_file *config = choice->request->config;
    const char *slash = config && config->path ? strrchr(config->path, '/') : NULL;
    char *dir = slash ? fsdp_strndup(config->path, (size_t)(slash - config->path)) : NULL;
    fsdp_checkpoint *beside = NULL;
    fsdp_map *map = NULL;
    const fsdp_open_opts opts = {.format = "safetensors"};
    *has_out = false;
    fsdp_status st = map_hub(choice->kind.class_name, &map, err);
    if (st == FSDP_OK && dir &&
        fsdp_foreign_open(choice->request->io, dir, &opts, NULL, &beside, NULL) == FSDP_OK) {
        const fsdp_sd *sd = beside->manifest.sd;
        /* "router.layer.weight" of files is a "router.{rest:*}" of memory, too; some rules lead to
         * files only */
        size_t in_memory = count_taken(map, false, sd);
        *has_out = in_memory == 0 || count_taken(map, true, sd) > in_memory;
        fsdp_checkpoint_close(beside);
    }
    fsdp_map_free(map);
    fsdp_free(dir);
    return st;
}

/* Without a map by its name: the names of the hub, if the directory that the result is made like has them. */
static fsdp_status try_hub(const map_choice *choice, map_way *way, fsdp_error *err)
{
    if (!is_for_loaders(choice) || map_hub_knows(choice->kind.class_name) != FSDP_HUB_OTHERS)
        return FSDP_OK;
    bool has_names = false;
    FSDP_TRY(find_hub(choice, way, err)); /* maps of GGUF take names of memory, too */
    if (way->map)
        FSDP_TRY(has_hub_names(choice, &has_names, err));
    way->is_offered = way->map && !has_names;
    return FSDP_OK;
}

/* Maps of GGUF have equal names for families whose rows are in another order, so that nothing
 * would show a wrong map. */
static fsdp_status check_named(const map_choice *choice, const fsdp_map *map, fsdp_error *err)
{
    bool is_gguf = strcmp(fsdp_map_layout(map, false), "gguf") == 0;
    if (map->is_file || !is_gguf || !choice->kind.type[0] ||
        fsdp_map_is_for(map, choice->kind.type))
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_USAGE,
                     "the map '%s' is for %s, but the model is a '%s'; leave out --map to choose "
                     "the map that fits",
                     map->name, map->types, choice->kind.type);
}

/* The map that the user names: a built-in one, or a file. */
static fsdp_status find_named(const map_choice *choice, map_way *way, fsdp_error *err)
{
    if (strcmp(choice->request->opts->map, hub_name) == 0)
        return find_hub(choice, way, err);
    FSDP_TRY(open_map(choice, choice->request->opts->map, &way->map, err));
    const fsdp_sd *sd = choice->from->manifest.sd;
    size_t left = count_taken(way->map, false, sd);
    size_t right = count_taken(way->map, true, sd);
    way->from_right = right > left;
    FSDP_TRY(check_named(choice, way->map, err));
    if (fits(choice, way->map, way->from_right))
        return FSDP_OK;
    bool from_right = way->from_right;
    FSDP_TRY(find_first(choice, way, err));
    if (way->first)
        return FSDP_OK;
    way->from_right = from_right;
    if (left + right == 0) {
        fsdp_map_free(way->map);
        way->map = NULL;
    }
    return FSDP_OK;
}

static fsdp_status choose_at(const map_choice *choice, map_way *way, fsdp_error *err)
{
    const fsdp_convert_opts *opts = choice->request->opts;
    bool is_model = choice->request->target->caps.maps_names && !opts->select.keep_names &&
                    opts->select.only != FSDP_ONLY_OPTIM;
    if (opts->map && strcmp(opts->map, "none") != 0)
        return find_named(choice, way, err);
    if (opts->map || !is_model)
        return FSDP_OK;
    FSDP_TRY(find_map(choice, way, err));
    if (!way->map)
        FSDP_TRY(try_hub(choice, way, err));
    return way->map || way->is_short ? FSDP_OK : find_first(choice, way, err);
}

/* A moment whose parameter the map takes: it would keep the name of a parameter that is gone. */
static fsdp_status check_optim(const map_choice *choice, const map_way *way, fsdp_error *err)
{
    const fsdp_sd *sd = choice->from->manifest.sd;
    const fsdp_select_opts *select = &choice->request->opts->select;
    const fsdp_caps caps = choice->request->target->caps;
    bool is_whole = select->only == FSDP_ONLY_ALL ||
                    (select->only == FSDP_ONLY_DEFAULT && caps.maps_names && !caps.model_only);
    for (size_t i = 0; is_whole && i < fsdp_sd_count(sd); i++) {
        const fsdp_entry *entry = fsdp_sd_at(sd, i);
        char shown[200];
        if (entry->kind == FSDP_ENTRY_VALUE || !fsdp_entry_is_optim(entry, choice->state_is_optim))
            continue;
        if (fsdp_map_takes_moment(way->map, way->from_right, entry, choice->root_size))
            return fsdp_fail(err, FSDP_ERR_USAGE,
                             "the map '%s' changes the model but not '%s', a moment of its "
                             "optimizer; leave the optimizer out with --only model",
                             way->map->name,
                             fsdp_printable(entry->name, entry->name_size, shown, sizeof shown));
    }
    return FSDP_OK;
}

/* A map whose names are those of the source, or those below the key around its model. */
static fsdp_status choose_any(map_choice *choice, map_way *way, fsdp_error *err)
{
    const char *map = choice->request->opts->map;
    fsdp_parts parts;
    FSDP_TRY(choose_at(choice, way, err));
    if (way->map || way->is_short)
        return FSDP_OK;
    FSDP_TRY(fsdp_parts_find(choice->from->manifest.sd, (fsdp_names_known){.paths = true}, NULL,
                             &parts, err));
    if (parts.root_size > 0 && !memchr(parts.root, '{', parts.root_size) &&
        !memchr(parts.root, '*', parts.root_size)) {
        choice->root = parts.root;
        choice->root_size = parts.root_size;
        FSDP_TRY(choose_at(choice, way, err));
    }
    return way->map || way->is_short || !map || strcmp(map, "none") == 0
               ? FSDP_OK
               : fsdp_fail(err, FSDP_ERR_USAGE,
                           "no name in '%s' matches the map '%s'; fsdp-ls lists the names",
                           choice->from->path, map);
}

/* Names below a key stay below it, where llama.cpp finds none. */
static fsdp_status check_root(const map_choice *choice, const map_way *way, fsdp_error *err)
{
    const char *to = way->map ? fsdp_map_layout(way->map, !way->from_right) : "";
    if (choice->root_size == 0 || way->is_offered || strcmp(to, "gguf") != 0)
        return FSDP_OK;
    return fsdp_fail(
        err, FSDP_ERR_USAGE,
        "cannot write '%s' as GGUF: its model lies below '%.*s'; convert it to hf first, "
        "which leaves that out",
        choice->from->path, (int)choice->root_size - 1, choice->root);
}

static fsdp_status choose(map_choice *choice, map_way *way, fsdp_error *err)
{
    FSDP_TRY(choose_any(choice, way, err));
    FSDP_TRY(check_root(choice, way, err));
    return way->map && !way->is_offered ? check_optim(choice, way, err) : FSDP_OK;
}

/* --- renaming ------------------------------------------------------------------------------------- */

static fsdp_map_sides sides_of(const map_choice *choice, const map_way *way)
{
    fsdp_map_sides sides = {0};
    const char *from = way->first ? fsdp_map_layout(way->first, false)
                                  : fsdp_map_layout(way->map, way->from_right);
    snprintf(sides.name, sizeof sides.name, "%s", way->map->name);
    snprintf(sides.from, sizeof sides.from, "%s", from);
    snprintf(sides.to, sizeof sides.to, "%s", fsdp_map_layout(way->map, !way->from_right));
    sides.is_used = !way->is_offered && (choice->request->opts->map || choice->kind.type[0] ||
                                         fsdp_map_is_for(way->map, ""));
    sides.needs_pairs = sides.is_used && strcmp(sides.to, "gguf") == 0;
    return sides;
}

/* "model." of a frame "model.*" on that side; "" without one. */
static void find_below(const fsdp_map *map, bool right, char below[64])
{
    below[0] = '\0';
    for (size_t i = 0; i < map->frame_count && !below[0]; i++) {
        const char *text = map->frames[i][right], *star = strchr(text, '*');
        if (star > text && !star[1] && !strchr(text, '{'))
            snprintf(below, 64, "%.*s", (int)(star - text), text);
    }
}

/* One map of the way. see_model names every tensor that is missing; the rules stop at the first. */
static fsdp_status apply_one(const map_choice *choice, const fsdp_map *map, bool from_right,
                             fsdp_checkpoint **checkpoint, fsdp_error *err)
{
    const fsdp_map_request *request = choice->request;
    const char *from = fsdp_map_layout(map, from_right);
    bool is_hf = strcmp(from, "hf") == 0 || strncmp(from, "transformers", 12) == 0;
    fsdp_status st = FSDP_OK;
    if (is_hf && request->see_model) {
        char below[64];
        find_below(map, from_right, below);
        st = request->see_model(request->context, request, *checkpoint, below[0] ? below : NULL,
                                err);
    }
    if (st == FSDP_OK)
        return fsdp_map_apply(map, from_right, &choice->call, checkpoint, err);
    fsdp_checkpoint_close(*checkpoint);
    *checkpoint = NULL;
    return st;
}

static fsdp_status apply(const map_choice *choice, const map_way *way, fsdp_checkpoint **checkpoint,
                         fsdp_error *err)
{
    if (way->first)
        FSDP_TRY(apply_one(choice, way->first, false, checkpoint, err));
    return apply_one(choice, way->map, way->from_right, checkpoint, err);
}

/* --- without a map --------------------------------------------------------------------------------- */

/* Targets that are models under the names of their own framework. */
typedef struct named_target {
    const char *layout, *title, *others;
    const char *own; /* begin of an entry that only a source of this framework has */
} named_target;

static const named_target named_targets[] = {
    {"gguf", "GGUF",
     "convert_hf_to_gguf.py of llama.cpp knows more families and takes the result of --to hf",
     "general.architecture"},
    {"megatron", "Megatron", "--map FILE takes rules of your own, and --to dcp keeps the names",
     "common"},
};

static const named_target *find_target(const fsdp_format *target)
{
    for (size_t i = 0; i < sizeof named_targets / sizeof *named_targets; i++)
        if (strcmp(target->name, named_targets[i].layout) == 0)
            return &named_targets[i];
    return NULL;
}

static bool is_own(const map_choice *choice, const named_target *target)
{
    const fsdp_sd *sd = choice->from->manifest.sd;
    size_t size = strlen(target->own);
    for (size_t i = 0; i < fsdp_sd_count(sd); i++) {
        const fsdp_entry *entry = fsdp_sd_at(sd, i);
        if (entry->kind == FSDP_ENTRY_VALUE && entry->name_size >= size &&
            memcmp(entry->name, target->own, size) == 0)
            return true;
    }
    return false;
}

/* "gpt2, llama, mistral": the types of models that built-in maps take to the layout. */
static void list_types(const char *layout, fsdp_text *out)
{
    const fsdp_builtin_map *map;
    for (size_t i = 0; (map = fsdp_map_builtin_at(i)) != NULL; i++)
        for (const char *at = map->types; strcmp(map->layouts[0], layout) == 0 && *at;) {
            size_t size = strcspn(at, " ");
            fsdp_text_addf(out, "%s%.*s", out->size > 0 ? ", " : "", (int)size, at);
            at += size + (at[size] == ' ');
        }
}

/* The built-in map that takes models of the type to the layout; NULL: there is none. */
static const fsdp_builtin_map *map_for_type(const char *layout, const char *type)
{
    const fsdp_builtin_map *map;
    for (size_t i = 0; (map = fsdp_map_builtin_at(i)) != NULL; i++)
        if (strcmp(map->layouts[0], layout) == 0 && map->types[0] &&
            fsdp_map_types_have(map->types, type))
            return map;
    return NULL;
}

static fsdp_status refuse_type(const map_choice *choice, const named_target *target,
                               fsdp_error *err)
{
    fsdp_text types = {0};
    char type[80];
    if (choice->kind.is_quantized && !choice->request->opts->dequant)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "cannot write '%s' as %s: its config.json says that its weights are "
                         "quantized, and no map takes those; make plain ones with --dequant bf16",
                         choice->from->path, target->title);
    const fsdp_builtin_map *known = map_for_type(target->layout, choice->kind.type);
    if (known)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "cannot write '%s' as %s: the map '%s' does not take all of its tensors; "
                         "list those with --map %s, and leave out what is not needed with --drop "
                         "REGEX, or use --copy-from with the config of this model",
                         choice->from->path, target->title, known->name, known->name);
    list_types(target->layout, &types);
    fsdp_status st =
        types.failed
            ? fsdp_fail_memory(err, "a message")
            : fsdp_fail(
                  err, FSDP_ERR_USAGE,
                  "no map takes the tensors of '%s' (model_type '%s') to %s: that is "
                  "written for %s, under the names of transformers; %s",
                  choice->from->path,
                  fsdp_printable(choice->kind.type, strlen(choice->kind.type), type, sizeof type),
                  target->title, types.data, target->others);
    fsdp_text_release(&types);
    return st;
}

/* Without a map the names stay, and are those of the target only where the source is of its framework. */
static fsdp_status check_target(const map_choice *choice, const map_way *way, fsdp_error *err)
{
    const fsdp_map_request *request = choice->request;
    const named_target *target = find_target(request->target);
    if (!target || way->is_short || request->opts->map || request->opts->select.keep_names ||
        is_own(choice, target))
        return FSDP_OK;
    if (!way->map)
        return choice->kind.type[0] ? refuse_type(choice, target, err) : FSDP_OK;
    if (!request->target->caps.needs_config)
        return FSDP_OK; /* a note names the map */
    if (request->config)
        FSDP_TRY(fsdp_config_check(request->config, err));
    return fsdp_fail(err, FSDP_ERR_USAGE,
                     "a GGUF file needs the config.json of its model, with a model_type, but '%s' "
                     "has none next to it; give its directory with --copy-from DIR",
                     choice->from->path);
}

/* FSDP_ERR_USAGE names a size of the user that is not NAME=NUMBER. */
static fsdp_status check_sizes(const fsdp_map_call *call, fsdp_error *err)
{
    for (size_t i = 0; i < call->given_count; i++) {
        const char *given = call->given[i], *number = given + strspn(given, MAP_NAME_LETTERS);
        size_t digits = *number == '=' ? strspn(number + 1, "0123456789") : 0;
        if (number == given || digits == 0 || digits > MAP_SIZE_DIGITS ||
            number[1 + digits] != '\0')
            return fsdp_fail(err, FSDP_ERR_USAGE,
                             "--size '%s' is not NAME=NUMBER, such as heads=32", given);
    }
    return FSDP_OK;
}

static fsdp_status rename_with(const fsdp_map_request *request, fsdp_checkpoint **checkpoint,
                               fsdp_map_sides *sides_out, fsdp_error *err)
{
    map_way way = {0};
    map_choice choice = {.request = request, .from = *checkpoint};
    choice.state_is_optim = fsdp_sd_state_is_optim(choice.from->manifest.sd);
    choice.call = (fsdp_map_call){.config = request->config,
                                  .given = request->opts->sizes,
                                  .given_count = request->opts->size_count,
                                  .keeps_tied = request->opts->tied == FSDP_TIED_KEEP,
                                  .may_stay = may_stay,
                                  .context = &choice};
    *sides_out = (fsdp_map_sides){0};
    FSDP_TRY(check_sizes(&choice.call, err));
    FSDP_TRY(fsdp_drop_rules_create(&request->opts->select, &choice.drops, err));
    if (request->config)
        choice.kind = request->config->kind;
    fsdp_status st = choose(&choice, &way, err);
    if (st == FSDP_OK && way.map) {
        *sides_out = sides_of(&choice, &way);
        choice.is_chosen = true;
        if (sides_out->is_used)
            st = apply(&choice, &way, checkpoint, err);
    }
    if (st == FSDP_OK && !sides_out->is_used)
        st = check_target(&choice, &way, err);
    fsdp_map_free(way.first);
    fsdp_map_free(way.map);
    fsdp_drop_rules_free(choice.drops);
    return st;
}

/* Without a config.json, the numbers are those of Meta's params.json. */
fsdp_status fsdp_map_rename(const fsdp_map_request *request, fsdp_checkpoint **checkpoint,
                            fsdp_map_sides *sides_out, fsdp_error *err)
{
    fsdp_map_request with = *request;
    fsdp_config_file params = {0};
    if (!with.config)
        find_params(&with, *checkpoint, &params);
    if (params.text)
        with.config = &params;
    fsdp_status st = rename_with(&with, checkpoint, sides_out, err);
    fsdp_config_release(&params);
    return st;
}

/* === an opened checkpoint ===================================================================== */

static bool holds_elements(fsdp_dtype dtype)
{
    return fsdp_dtype_describe(dtype)->values <= 1;
}

/* Maps take the dims of numbers, and not those of blocks. */
static fsdp_status decode_blocks(fsdp_checkpoint **checkpoint, fsdp_error *err)
{
    static const fsdp_format_writer writer = {.holds_dtype = holds_elements};
    static const fsdp_format no_blocks = {.writer = &writer};
    const fsdp_target_types types = {.target = &no_blocks, .blocks = FSDP_DTYPE_NONE};
    fsdp_type_report report;
    return fsdp_derive_target_types(&types, checkpoint, &report, err);
}

static fsdp_status rename_by(const fsdp_map_opts *opts, fsdp_checkpoint **checkpoint,
                             fsdp_error *err)
{
    fsdp_io *io = (*checkpoint)->io;
    const fsdp_convert_opts convert = {
        .map = opts->map, .sizes = opts->sizes, .size_count = opts->size_count};
    fsdp_map_request request = {
        .io = io, .opts = &convert, .target = fsdp_format_to("fsdp"), .keeps_rest = true};
    fsdp_map_sides sides;
    fsdp_config_file config;
    fsdp_config_find(io, NULL, (*checkpoint)->path, &config, NULL);
    if (!config.text && opts->other) {
        fsdp_config_release(&config);
        fsdp_config_find(io, NULL, opts->other, &config, NULL);
    }
    request.config = config.text ? &config : NULL;
    fsdp_status st = fsdp_map_rename(&request, checkpoint, &sides, err);
    fsdp_config_release(&config);
    return st;
}

fsdp_status fsdp_checkpoint_map(fsdp_checkpoint **checkpoint, const fsdp_map_opts *opts,
                                fsdp_error *err)
{
    FSDP_NEED(err, checkpoint, opts);
    FSDP_NEED(err, *checkpoint);
    fsdp_status st = fsdp_checkpoint_carry_values(*checkpoint, true, err);
    if (st == FSDP_OK)
        st = decode_blocks(checkpoint, err);
    if (st == FSDP_OK && opts->map)
        st = rename_by(opts, checkpoint, err);
    if (st == FSDP_OK)
        return FSDP_OK;
    fsdp_checkpoint_close(*checkpoint);
    *checkpoint = NULL;
    return st;
}
