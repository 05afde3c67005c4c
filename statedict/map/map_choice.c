/* The map of a conversion: the one that the user names, or one that fits source and target. See map.h. */
#include "statedict/map/map.h"

#include "statedict/expect/config_members.h"
#include "statedict/select/expression.h"

#include <stdio.h>
#include <string.h>

/* --- what a map is applied with ----------------------------------------------------------------- */

typedef struct map_choice {
    const fsdp_map_request *request;
    const fsdp_checkpoint *from;
    fsdp_model_kind kind; /* of config.json */
    fsdp_map_call call;
    bool state_is_optim;
} map_choice;

static bool is_dropped(const fsdp_select_opts *select, const fsdp_entry *entry)
{
    regex_t expression;
    bool matches = false;
    for (size_t i = 0; i < select->drop_count && !matches; i++) {
        if (fsdp_expression_compile(select->drops[i], REG_NOSUB, &expression, NULL) != FSDP_OK)
            continue; /* the selection says what is wrong */
        matches = fsdp_expression_matches(&expression, entry->name, entry->name_size);
        regfree(&expression);
    }
    return matches;
}

/* A tensor may stay outside of the map if the selection leaves it out afterwards. */
static bool may_stay(void *context, const fsdp_entry *entry)
{
    const map_choice *choice = context;
    const fsdp_select_opts *select = &choice->request->opts->select;
    const fsdp_limits *limits = choice->request->limits;
    bool model_only = select->only == FSDP_ONLY_MODEL ||
                      (select->only == FSDP_ONLY_DEFAULT && limits && limits->model_only);
    return choice->request->keeps_rest ||
           (model_only && fsdp_entry_is_optim(entry, choice->state_is_optim)) ||
           is_dropped(select, entry);
}

/* --- the choice --------------------------------------------------------------------------------- */

static bool fits(const map_choice *choice, const fsdp_map *map, bool from_right)
{
    fsdp_map_match match =
        fsdp_map_compare(map, from_right, choice->from->manifest.sd, &choice->call);
    return match.taken > 0 && match.left_over == 0;
}

static bool leads_to(const fsdp_map *map, bool from_right, const char *layout)
{
    return strcmp(fsdp_map_layout(map, !from_right), layout) == 0;
}

/* The maps that take the source to the target, one behind the other. */
typedef struct map_way {
    fsdp_map *first; /* to the right, which joins the files of ranks; NULL: none is needed */
    fsdp_map *map;
    bool from_right;
} map_way;

static bool may_be_for(const map_choice *choice, const fsdp_map *map)
{
    return !choice->kind.type[0] || fsdp_map_is_for(map, choice->kind.type);
}

/* A built-in map that takes every tensor of the source to the layout of the target. Names that are
 * the target's already need none. */
static fsdp_status find_map(const map_choice *choice, map_way *way, fsdp_error *err)
{
    const char *layout = choice->request->limits->format, *name;
    for (size_t i = 0; fsdp_map_builtin_at(i, &name); i++) {
        fsdp_map *map = NULL;
        FSDP_TRY(fsdp_map_builtin(name, &map, err));
        for (int right = 0; right < 2; right++) {
            if (!leads_to(map, right, layout) || !may_be_for(choice, map) ||
                fits(choice, map, !right) || !fits(choice, map, right))
                continue;
            way->map = map;
            way->from_right = right;
            return FSDP_OK;
        }
        fsdp_map_free(map);
    }
    return FSDP_OK;
}

/* The map behind the first one: that of the user, or a built-in one to the layout of the target. */
static fsdp_status find_second(const map_choice *choice, const fsdp_map *first, map_way *way,
                               fsdp_error *err)
{
    const char *joined = fsdp_map_layout(first, true), *name;
    if (way->map) {
        way->from_right = strcmp(fsdp_map_layout(way->map, true), joined) == 0;
        return FSDP_OK;
    }
    for (size_t i = 0; fsdp_map_builtin_at(i, &name); i++) {
        fsdp_map *map = NULL;
        FSDP_TRY(fsdp_map_builtin(name, &map, err));
        for (int right = 0; right < 2; right++) {
            if (!leads_to(map, right, choice->request->limits->format) ||
                strcmp(fsdp_map_layout(map, right), joined) != 0 || !may_be_for(choice, map))
                continue;
            way->map = map;
            way->from_right = right;
            return FSDP_OK;
        }
        fsdp_map_free(map);
    }
    return FSDP_OK;
}

/* A built-in map that takes every tensor of the source to a layout from which another one goes on. */
static fsdp_status find_first(const map_choice *choice, map_way *way, fsdp_error *err)
{
    const char *name;
    for (size_t i = 0; fsdp_map_builtin_at(i, &name) && !way->first; i++) {
        fsdp_map *map = NULL, *named = way->map;
        FSDP_TRY(fsdp_map_builtin(name, &map, err));
        const char *joined = fsdp_map_layout(map, true);
        bool leads = !named || strcmp(fsdp_map_layout(named, false), joined) == 0 ||
                     strcmp(fsdp_map_layout(named, true), joined) == 0;
        bool goes_on = leads && may_be_for(choice, map) && fits(choice, map, false);
        fsdp_status st = goes_on ? find_second(choice, map, way, err) : FSDP_OK;
        if (st == FSDP_OK && goes_on && way->map)
            way->first = map;
        else
            fsdp_map_free(map);
        FSDP_TRY(st);
    }
    return FSDP_OK;
}

static fsdp_status open_named(const map_choice *choice, fsdp_map **map_out, fsdp_error *err)
{
    fsdp_io *io = choice->request->io;
    const char *name = choice->request->opts->map;
    fsdp_status st = fsdp_map_builtin(name, map_out, err);
    if (st == FSDP_ERR_NOT_FOUND && (strchr(name, '/') || fsdp_io_exists(io, name)))
        st = fsdp_map_open(io, name, map_out, err);
    return st;
}

/* The map that the user names: a built-in one, or a file. */
static fsdp_status find_named(const map_choice *choice, map_way *way, fsdp_error *err)
{
    FSDP_TRY(open_named(choice, &way->map, err));
    const fsdp_sd *sd = choice->from->manifest.sd;
    fsdp_map_match left = fsdp_map_compare(way->map, false, sd, &choice->call);
    fsdp_map_match right = fsdp_map_compare(way->map, true, sd, &choice->call);
    way->from_right = right.taken > left.taken;
    if (left.taken + right.taken > 0)
        return FSDP_OK;
    FSDP_TRY(find_first(choice, way, err));
    if (way->first)
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_USAGE, "no name in '%s' is one of the map '%s'",
                     choice->from->path, choice->request->opts->map);
}

static fsdp_status choose(const map_choice *choice, map_way *way, fsdp_error *err)
{
    const fsdp_convert_opts *opts = choice->request->opts;
    const fsdp_limits *limits = choice->request->limits;
    bool is_model = limits && !opts->select.keep_names && opts->select.only != FSDP_ONLY_OPTIM;
    if (opts->map && strcmp(opts->map, "none") != 0)
        return find_named(choice, way, err);
    if (opts->map || !is_model)
        return FSDP_OK;
    FSDP_TRY(find_map(choice, way, err));
    return way->map ? FSDP_OK : find_first(choice, way, err);
}

/* --- renaming ------------------------------------------------------------------------------------- */

static fsdp_map_sides sides_of(const map_choice *choice, const map_way *way)
{
    fsdp_map_sides sides = {0};
    const char *from = way->first ? fsdp_map_layout(way->first, false)
                                  : fsdp_map_layout(way->map, way->from_right);
    snprintf(sides.name, sizeof sides.name, "%s", fsdp_map_name(way->map));
    snprintf(sides.from, sizeof sides.from, "%s", from);
    snprintf(sides.to, sizeof sides.to, "%s", fsdp_map_layout(way->map, !way->from_right));
    sides.is_used =
        choice->request->opts->map || choice->kind.type[0] || fsdp_map_is_for(way->map, "");
    sides.needs_pairs = sides.is_used && strcmp(sides.to, "gguf") == 0;
    return sides;
}

static fsdp_status apply(const map_choice *choice, const map_way *way, fsdp_checkpoint **checkpoint,
                         fsdp_error *err)
{
    if (way->first)
        FSDP_TRY(fsdp_map_apply(way->first, false, &choice->call, checkpoint, err));
    return fsdp_map_apply(way->map, way->from_right, &choice->call, checkpoint, err);
}

fsdp_status fsdp_map_rename(const fsdp_map_request *request, fsdp_checkpoint **checkpoint,
                            fsdp_map_sides *sides_out, fsdp_error *err)
{
    map_way way = {0};
    map_choice choice = {.request = request, .from = *checkpoint};
    choice.state_is_optim = fsdp_sd_state_is_optim(choice.from->manifest.sd);
    choice.call = (fsdp_map_call){.config = request->config,
                                  .config_path = request->config_path,
                                  .config_size = request->config_size,
                                  .given = request->opts->sizes,
                                  .given_count = request->opts->size_count,
                                  .keeps_tied = request->opts->tied == FSDP_TIED_KEEP,
                                  .may_stay = may_stay,
                                  .context = &choice};
    *sides_out = (fsdp_map_sides){0};
    if (request->config && fsdp_model_kind_read(request->config, request->config_size,
                                                "config.json", &choice.kind, NULL) != FSDP_OK)
        choice.kind = (fsdp_model_kind){0};
    fsdp_status st = choose(&choice, &way, err);
    if (st == FSDP_OK && way.map) {
        *sides_out = sides_of(&choice, &way);
        if (sides_out->is_used)
            st = apply(&choice, &way, checkpoint, err);
    }
    fsdp_map_free(way.first);
    fsdp_map_free(way.map);
    return st;
}
