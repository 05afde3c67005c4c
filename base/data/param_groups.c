/* Hyper-parameter groups: see param_groups.h. */
#include "base/data/param_groups.h"

#include "base/data/name_path.h"
#include "base/text.h"

#include <stdlib.h>
#include <string.h>

static const char word[] = "param_groups", params_word[] = "params";
enum { WORD = sizeof word - 1 };

static fsdp_status fail_memory(fsdp_error *err)
{
    return fsdp_fail_memory(err, "the groups of an optimizer");
}

/* --- the model -------------------------------------------------------------------------------- */

void fsdp_groups_release(fsdp_param_groups *groups)
{
    fsdp_free(groups->items);
    fsdp_name_table_release(&groups->keys);
    fsdp_arena_release(&groups->arena);
    *groups = (fsdp_param_groups){0};
}

fsdp_status fsdp_groups_add(fsdp_param_groups *groups, const fsdp_param_group *group,
                            fsdp_param_group **added_out, fsdp_error *err)
{
    if (!fsdp_grow(&groups->items, &groups->capacity, groups->count + 1, sizeof *groups->items))
        return fail_memory(err);
    groups->items[groups->count] = *group;
    *added_out = &groups->items[groups->count++];
    return FSDP_OK;
}

fsdp_status fsdp_group_add(fsdp_param_groups *groups, fsdp_group_items *items, fsdp_group_item item,
                           fsdp_error *err)
{
    fsdp_group_item *added = fsdp_arena_alloc(&groups->arena, 1, sizeof *added);
    if (!added)
        return fail_memory(err);
    item.next = NULL;
    *added = item;
    if (items->last)
        items->last->next = added;
    else
        items->first = added;
    items->last = added;
    items->count++;
    return FSDP_OK;
}

const fsdp_group_item *fsdp_group_option(const fsdp_param_group *group, const char *name,
                                         size_t size)
{
    const fsdp_group_item *option = group->options.first;
    while (option &&
           !(option->name && option->size == size && memcmp(option->name, name, size) == 0))
        option = option->next;
    return option;
}

/* --- reading: names --------------------------------------------------------------------------- */

bool fsdp_group_name_split(const char *name, size_t size, fsdp_group_name *parts_out)
{
    size_t at = 0;
    while (at + WORD <= size && memcmp(name + at, word, WORD) != 0) {
        const char *dot = memchr(name + at, '.', size - at);
        if (!dot)
            return false;
        at = (size_t)(dot - name) + 1;
    }
    size_t end = at + WORD;
    if (end > size || (end < size && name[end] != '.'))
        return false;
    *parts_out = (fsdp_group_name){.prefix_size = at, .key = end, .option = end};
    if (end == size)
        return true;
    size_t dot = size;
    while (name[--dot] != '.')
        continue;
    parts_out->key = end + 1;
    parts_out->key_size = dot > end ? dot - end - 1 : 0;
    parts_out->option = dot + 1;
    parts_out->option_size = size - dot - 1;
    return dot > end && parts_out->option_size > 0;
}

/* --- reading: options and lists --------------------------------------------------------------- */

static bool is_text(const fsdp_value *value, const char *text)
{
    return value->kind == FSDP_VALUE_STRING &&
           fsdp_bytes_are(value->as.bytes.data, value->as.bytes.size, text);
}

const fsdp_value *fsdp_group_list_params(const fsdp_value *dict)
{
    for (size_t i = 0; dict->kind == FSDP_VALUE_DICT && i + 1 < dict->as.list.count; i += 2)
        if (is_text(&dict->as.list.items[i], params_word))
            return dict->as.list.items[i + 1].kind == FSDP_VALUE_LIST ? &dict->as.list.items[i + 1]
                                                                      : NULL;
    return NULL;
}

bool fsdp_group_list_fits(const fsdp_value *list)
{
    bool fits = list->kind == FSDP_VALUE_LIST;
    for (size_t i = 0; fits && i < list->as.list.count; i++) {
        const fsdp_value *dict = &list->as.list.items[i];
        fits = dict->kind == FSDP_VALUE_DICT;
        for (size_t k = 0; fits && k + 1 < dict->as.list.count; k += 2)
            fits = dict->as.list.items[k].kind == FSDP_VALUE_STRING;
    }
    return fits;
}

static fsdp_status read_params(fsdp_param_groups *groups, fsdp_param_group *group,
                               const fsdp_value *list, size_t entry, fsdp_error *err)
{
    group->is_listed = true;
    group->listed = entry;
    for (size_t i = 0; i < list->as.list.count; i++) {
        const fsdp_value *param = &list->as.list.items[i];
        fsdp_group_item item = {.value = param, .entry = entry};
        if (param->kind == FSDP_VALUE_STRING)
            item = (fsdp_group_item){
                .name = param->as.bytes.data, .size = param->as.bytes.size, .entry = entry};
        FSDP_TRY(fsdp_group_add(groups, &group->params, item, err));
    }
    return FSDP_OK;
}

static fsdp_status read_option(fsdp_param_groups *groups, fsdp_param_group *group,
                               fsdp_group_item option, fsdp_error *err)
{
    bool is_list = option.name && fsdp_bytes_are(option.name, option.size, params_word) &&
                   option.value && option.value->kind == FSDP_VALUE_LIST;
    return is_list && group->spelling != FSDP_GROUPS_NAMES
               ? read_params(groups, group, option.value, option.entry, err)
               : fsdp_group_add(groups, &group->options, option, err);
}

static fsdp_status read_list(fsdp_param_groups *groups, const fsdp_group_source *from,
                             fsdp_error *err)
{
    const fsdp_value *list = from->value;
    for (size_t i = 0; list && list->kind == FSDP_VALUE_LIST && i < list->as.list.count; i++) {
        const fsdp_value *dict = &list->as.list.items[i];
        fsdp_param_group *group = NULL;
        FSDP_TRY(fsdp_groups_add(groups,
                                 &(fsdp_param_group){.prefix = from->name,
                                                     .prefix_size = from->parts.prefix_size,
                                                     .place = i,
                                                     .entry = from->entry},
                                 &group, err));
        for (size_t k = 0; dict->kind == FSDP_VALUE_DICT && k + 1 < dict->as.list.count; k += 2) {
            const fsdp_value *key = &dict->as.list.items[k];
            fsdp_group_item option = {.value = key + 1, .entry = from->entry};
            if (key->kind == FSDP_VALUE_STRING) {
                option.name = key->as.bytes.data;
                option.size = key->as.bytes.size;
            }
            FSDP_TRY(read_option(groups, group, option, err));
        }
    }
    return FSDP_OK;
}

enum { PLACE_DIGITS = 18 };

/* Makes the group of an entry's key. A parameter's name may be any text, a place is a number. */
static fsdp_status begin_group(fsdp_param_groups *groups, const fsdp_group_source *from,
                               fsdp_error *err)
{
    const char *key = from->name + from->parts.key;
    bool is_named = from->spelling == FSDP_GROUPS_NAMES;
    size_t size = from->parts.key_size;
    if (!is_named && (size > PLACE_DIGITS || (size > 1 && key[0] == '0')))
        return fsdp_fail(err, FSDP_ERR_DAMAGED, "'%.200s': '%.*s' is not the number of a group",
                         from->name, (int)(size < 40 ? size : 40), key);
    fsdp_param_group *group = NULL;
    FSDP_TRY(fsdp_groups_add(groups,
                             &(fsdp_param_group){.prefix = from->name,
                                                 .prefix_size = from->parts.prefix_size,
                                                 .spelling = from->spelling,
                                                 .place = is_named ? 0 : strtoull(key, NULL, 10),
                                                 .entry = from->entry},
                             &group, err));
    const fsdp_group_item param = {.name = key, .size = from->parts.key_size, .entry = from->entry};
    return is_named ? fsdp_group_add(groups, &group->params, param, err) : FSDP_OK;
}

fsdp_status fsdp_groups_read(fsdp_param_groups *groups, const fsdp_group_source *from,
                             fsdp_error *err)
{
    const fsdp_group_name *parts = &from->parts;
    if (from->spelling == FSDP_GROUPS_LIST)
        return read_list(groups, from, err);
    uint64_t *found = fsdp_name_table_enter(&groups->keys, from->name, parts->key + parts->key_size,
                                            groups->count);
    if (!found)
        return fail_memory(err);
    size_t number = (size_t)*found;
    if (number == groups->count)
        FSDP_TRY(begin_group(groups, from, err));
    return read_option(groups, &groups->items[number],
                       (fsdp_group_item){.name = from->name + parts->option,
                                         .size = parts->option_size,
                                         .value = from->value,
                                         .entry = from->entry},
                       err);
}

/* --- order and equal groups ------------------------------------------------------------------- */

static int compare_groups(const void *a, const void *b)
{
    const fsdp_param_group *x = a, *y = b;
    bool x_is_named = x->spelling == FSDP_GROUPS_NAMES,
         y_is_named = y->spelling == FSDP_GROUPS_NAMES;
    if (x_is_named || y_is_named)
        return x_is_named != y_is_named ? (x_is_named ? 1 : -1)
                                        : (x->entry > y->entry) - (x->entry < y->entry);
    size_t size = x->prefix_size < y->prefix_size ? x->prefix_size : y->prefix_size;
    int order = memcmp(x->prefix, y->prefix, size);
    if (order == 0)
        order = (x->prefix_size > y->prefix_size) - (x->prefix_size < y->prefix_size);
    return order != 0 ? order : (x->place > y->place) - (x->place < y->place);
}

void fsdp_groups_sort(fsdp_param_groups *groups)
{
    fsdp_name_table_clear(&groups->keys);
    if (groups->count > 0)
        qsort(groups->items, groups->count, sizeof *groups->items, compare_groups);
}

static bool have_one_prefix(const fsdp_param_group *a, const fsdp_param_group *b)
{
    return a->prefix_size == b->prefix_size && memcmp(a->prefix, b->prefix, a->prefix_size) == 0;
}

static bool are_equal(const fsdp_param_group *a, const fsdp_param_group *b)
{
    if (!have_one_prefix(a, b) || a->options.count != b->options.count)
        return false;
    for (const fsdp_group_item *option = a->options.first; option; option = option->next) {
        const fsdp_group_item *other = fsdp_group_option(b, option->name, option->size);
        if (!other || !option->value || !other->value ||
            !fsdp_value_equal(option->value, other->value))
            return false;
    }
    return true;
}

static void number_places(fsdp_param_groups *groups)
{
    for (size_t i = 0; i < groups->count; i++) {
        groups->items[i].place = 0;
        for (size_t before = 0; before < i; before++)
            groups->items[i].place += have_one_prefix(&groups->items[before], &groups->items[i]);
    }
}

bool fsdp_groups_join(fsdp_param_groups *groups, size_t most)
{
    size_t first = 0, kept, at;
    while (first < groups->count && groups->items[first].spelling != FSDP_GROUPS_NAMES)
        first++;
    kept = first;
    for (size_t i = first; i < groups->count && kept < most; i++) {
        const fsdp_param_group *group = &groups->items[i];
        for (at = first; at < kept && !are_equal(&groups->items[at], group);)
            at++;
        if (at == kept) {
            groups->items[kept++] = *group;
            continue;
        }
        fsdp_group_items *params = &groups->items[at].params;
        params->last->next = group->params.first;
        params->last = group->params.last;
        params->count += group->params.count;
    }
    groups->count = kept;
    if (kept < most)
        number_places(groups);
    return kept < most;
}

/* --- writing ---------------------------------------------------------------------------------- */

static fsdp_status list_params(const fsdp_param_group *group, fsdp_value *list, fsdp_error *err)
{
    FSDP_TRY(fsdp_value_set_items(list, FSDP_VALUE_LIST, group->params.count, err));
    fsdp_value *item = list->as.list.items;
    for (const fsdp_group_item *param = group->params.first; param; param = param->next, item++)
        FSDP_TRY(param->name
                     ? fsdp_value_set_bytes(item, FSDP_VALUE_STRING, param->name, param->size, err)
                     : fsdp_value_copy(param->value, item, err));
    return FSDP_OK;
}

static bool has_list(const fsdp_param_group *group)
{
    return group->is_listed || group->params.count > 0;
}

typedef struct putting {
    const fsdp_param_group *group;
    fsdp_group_put_call *put;
    void *context;
    fsdp_text name;
} putting;

/* Puts "<prefix>param_groups.<key>.<option>". param NULL: the key is the group's place. */
static fsdp_status put_option(putting *work, const fsdp_group_item *param,
                              const fsdp_group_item *option, fsdp_error *err)
{
    const fsdp_param_group *group = work->group;
    fsdp_text *name = &work->name;
    int32_t path[4];
    size_t count = 0;
    name->size = 0;
    fsdp_text_add(name, group->prefix, group->prefix_size);
    fsdp_text_addf(name, "%s.", word);
    size_t key = name->size;
    if (param)
        fsdp_text_add(name, param->name, param->size);
    else
        fsdp_text_addf(name, "%zu", group->place);
    size_t key_size = name->size - key;
    fsdp_text_add(name, ".", 1);
    fsdp_text_add(name, option->name, option->size);
    if (name->failed)
        return fail_memory(err);
    if (group->prefix_size > 0)
        path[count++] = (int32_t)group->prefix_size - 1;
    path[count++] = param ? (int32_t)(name->size - group->prefix_size) : WORD;
    if (!param) {
        path[count++] = -(int32_t)key_size;
        path[count++] = (int32_t)option->size;
    }
    const fsdp_group_entry entry = {name->data, name->size,    path,
                                    count,      option->value, option->entry};
    return work->put(work->context, &entry, err);
}

static fsdp_status put_options(putting *work, const fsdp_group_item *param, fsdp_error *err)
{
    for (const fsdp_group_item *option = work->group->options.first; option; option = option->next)
        if (option->name)
            FSDP_TRY(put_option(work, param, option, err));
    return FSDP_OK;
}

static fsdp_status put_place(putting *work, fsdp_error *err)
{
    fsdp_value list = {0};
    const fsdp_group_item params = {params_word, sizeof params_word - 1, &list, work->group->entry,
                                    NULL};
    FSDP_TRY(put_options(work, NULL, err));
    if (!has_list(work->group))
        return FSDP_OK;
    fsdp_status status = list_params(work->group, &list, err);
    if (status == FSDP_OK)
        status = put_option(work, NULL, &params, err);
    fsdp_value_release(&list);
    return status;
}

fsdp_status fsdp_group_put(const fsdp_param_group *group, fsdp_group_spelling spelling,
                           fsdp_group_put_call *put, void *context, fsdp_error *err)
{
    putting work = {.group = group, .put = put, .context = context};
    fsdp_status status = FSDP_OK;
    if (spelling == FSDP_GROUPS_PLACES)
        status = put_place(&work, err);
    else
        for (const fsdp_group_item *param = group->params.first; param && status == FSDP_OK;
             param = param->next)
            status = put_options(&work, param, err);
    fsdp_text_release(&work.name);
    return status;
}

fsdp_status fsdp_group_dict(const fsdp_param_group *group, fsdp_value *dict_out, fsdp_error *err)
{
    size_t count = group->options.count + has_list(group);
    FSDP_TRY(fsdp_value_set_items(dict_out, FSDP_VALUE_DICT, 2 * count, err));
    fsdp_value *item = dict_out->as.list.items;
    for (const fsdp_group_item *option = group->options.first; option; option = option->next) {
        FSDP_TRY(fsdp_value_set_bytes(item++, FSDP_VALUE_STRING, option->name, option->size, err));
        FSDP_TRY(fsdp_value_copy(option->value, item++, err));
    }
    if (!has_list(group))
        return FSDP_OK;
    FSDP_TRY(
        fsdp_value_set_bytes(item, FSDP_VALUE_STRING, params_word, sizeof params_word - 1, err));
    return list_params(group, item + 1, err);
}
