/* Other forms of hyper-parameters: see optim_form.h. */
#include "statedict/select/optim_form.h"

#include "base/core/mem.h"
#include "base/data/name_path.h"
#include "base/data/value_internal.h"
#include "base/text.h"
#include "statedict/sd/layout_internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Programs have a few groups, or one per layer. The bounds keep the search for equal groups short. */
enum { GROUPS_MOST = 4096, HYPERS_MOST = 256 };
#define NONE ((size_t)-1)

/* A hyper-parameter, or with value NULL the name of a parameter; in a list by `next`. */
typedef struct form_item {
    const char *name;
    size_t size;
    const fsdp_value *value;
    size_t entry; /* of the old description; NONE: it is new */
    size_t next;
} form_item;

typedef struct form_list {
    size_t first, last, count;
} form_list;

/* One group, or while a flat dict is read one parameter. */
typedef struct form_group {
    const char *prefix; /* "optim." */
    size_t prefix_size;
    size_t entry;  /* of the old description: its first */
    int64_t place; /* in the source's list */
    form_list hypers, params;
} form_group;

typedef struct form_groups {
    form_group *items;
    size_t count, room;
} form_groups;

typedef struct forming {
    const fsdp_sd *from;
    const size_t *old_source;
    fsdp_optim_form form;
    form_item *items;
    size_t item_count, item_room;
    form_groups lists; /* groups of the source that have lists of parameters */
    form_groups flat;  /* parameters of a flat dict */
    form_groups all;   /* lists, and the groups of flat parameters with equal members */
    fsdp_sd *index;    /* keys of groups and parameters -> their number */
    bool *is_replaced; /* per entry of from */
    bool leaves;       /* the groups stay as they are */
    fsdp_text text;
    fsdp_sd *sd;
    size_t *source;
    size_t source_room;
} forming;

static fsdp_status fail_memory(fsdp_error *err)
{
    return fsdp_fail_memory(err, "the groups of an optimizer");
}

/* --- lists ------------------------------------------------------------------------------------ */

static fsdp_status add_item(forming *work, form_list *list, form_item item, fsdp_error *err)
{
    if (!fsdp_grow(&work->items, &work->item_room, work->item_count + 1, sizeof *work->items))
        return fail_memory(err);
    item.next = NONE;
    work->items[work->item_count] = item;
    if (list->count > 0)
        work->items[list->last].next = work->item_count;
    else
        list->first = work->item_count;
    list->last = work->item_count++;
    list->count++;
    return FSDP_OK;
}

/* The next item of a list, from NULL on; NULL after the last. */
static const form_item *next_item(const forming *work, const form_list *list, const form_item *item)
{
    size_t next = item ? item->next : list->count > 0 ? list->first : NONE;
    return next == NONE ? NULL : &work->items[next];
}

static bool is_called(const form_item *item, const char *name, size_t size)
{
    return item->size == size && memcmp(item->name, name, size) == 0;
}

static const fsdp_value *find_hyper(const forming *work, const form_group *group, const char *name,
                                    size_t size)
{
    const form_item *item = NULL;
    while ((item = next_item(work, &group->hypers, item)) != NULL)
        if (is_called(item, name, size))
            return item->value;
    return NULL;
}

static fsdp_status add_group(form_groups *groups, form_group group, fsdp_error *err)
{
    if (!fsdp_grow(&groups->items, &groups->room, groups->count + 1, sizeof *groups->items))
        return fail_memory(err);
    groups->items[groups->count++] = group;
    return FSDP_OK;
}

/* --- names ------------------------------------------------------------------------------------ */

/* "optim." "param_groups" "." "layers.0.weight" "." "lr": where the parts of a name lie. */
typedef struct group_name {
    size_t prefix_size;
    size_t key, key_size; /* of the parameter or the group */
    const char *what;
    size_t what_size; /* 0: the name ends with param_groups */
} group_name;

static const char word[] = "param_groups";
enum { WORD = sizeof word - 1 };

/* Finds the first element "param_groups". */
static bool split_name(const char *name, size_t size, group_name *parts_out)
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
    *parts_out = (group_name){.prefix_size = at, .key = end, .key_size = 0};
    if (end == size)
        return true;
    size_t dot = size;
    while (name[--dot] != '.')
        continue;
    parts_out->key = end + 1;
    parts_out->key_size = dot > end ? dot - end - 1 : 0;
    parts_out->what = name + dot + 1;
    parts_out->what_size = size - dot - 1;
    return dot > end && parts_out->what_size > 0;
}

/* True for "optim.param_groups.0.lr" if there is "optim.param_groups.0.params". */
static bool is_in_list(forming *work, const fsdp_entry *entry, const group_name *parts)
{
    if (!fsdp_path_is_number(entry->name + parts->key, parts->key_size))
        return false;
    work->text.size = 0;
    fsdp_text_add(&work->text, entry->name, parts->key + parts->key_size);
    fsdp_text_addf(&work->text, ".params");
    return !work->text.failed && fsdp_sd_find(work->from, work->text.data, work->text.size) >= 0;
}

/* --- reading: the source's groups ------------------------------------------------------------- */

/* Finds the group of a name up to its key, or makes it. */
static fsdp_status take_group(forming *work, form_groups *groups, size_t number,
                              const group_name *parts, size_t *at_out, fsdp_error *err)
{
    const fsdp_entry *entry = fsdp_sd_at(work->from, number);
    size_t key_size = parts->key + parts->key_size;
    int64_t found = fsdp_sd_find(work->index, entry->name, key_size);
    if (found >= 0) {
        *at_out = (size_t)fsdp_sd_at(work->index, (size_t)found)->value.as.u64;
        return FSDP_OK;
    }
    const fsdp_value count = fsdp_value_u64(groups->count);
    const form_group group = {.prefix = entry->name,
                              .prefix_size = parts->prefix_size,
                              .entry = number,
                              .place = strtoll(entry->name + parts->key, NULL, 10)};
    *at_out = groups->count;
    FSDP_TRY(fsdp_sd_add_value(work->index, entry->name, key_size, &count, err));
    return add_group(groups, group, err);
}

/* DeepSpeed's own list, which numbers its parameters; its reader derives one with names (optim.). */
static bool is_of_deepspeed(const fsdp_entry *entry, const group_name *parts)
{
    static const char prefix[] = "optimizer_state.";
    return parts->prefix_size == sizeof prefix - 1 && parts->what_size == 0 &&
           memcmp(entry->name, prefix, parts->prefix_size) == 0;
}

/* Groups that cannot get another form stay as they are, unless the caller wants one. */
static fsdp_status leave(forming *work, const fsdp_entry *entry, const char *why, fsdp_error *err)
{
    work->leaves = true;
    return work->form == FSDP_OPTIM_FORM_DEFAULT
               ? FSDP_OK
               : fsdp_fail(err, FSDP_ERR_USAGE, "'%s' cannot take the other form: %s", entry->name,
                           why);
}

static fsdp_status add_members(forming *work, form_group *group, const fsdp_entry *entry,
                               const fsdp_value *members, fsdp_error *err)
{
    for (size_t i = 0; i < members->as.list.count && !work->leaves; i++) {
        const fsdp_value *member = &members->as.list.items[i];
        const form_item item = {member->as.bytes.data, member->as.bytes.size, NULL, NONE, NONE};
        FSDP_TRY(member->kind == FSDP_VALUE_STRING
                     ? add_item(work, &group->params, item, err)
                     : leave(work, entry,
                             "it numbers its parameters, and get_optimizer_state_dict names them",
                             err));
    }
    return FSDP_OK;
}

static fsdp_status add_hyper(forming *work, form_group *group, const fsdp_entry *entry,
                             const form_item *hyper, fsdp_error *err)
{
    bool is_list = hyper->value->kind == FSDP_VALUE_LIST;
    if (is_called(hyper, "params", 6) && is_list)
        return add_members(work, group, entry, hyper->value, err);
    if (group->hypers.count == HYPERS_MOST)
        return leave(work, entry, "its group has too many members", err);
    return add_item(work, &group->hypers, *hyper, err);
}

/* A list of groups as one value. */
static fsdp_status read_list(forming *work, const fsdp_entry *entry, size_t number,
                             const group_name *parts, fsdp_error *err)
{
    const fsdp_value *list = &entry->value;
    for (size_t i = 0; i < list->as.list.count; i++) {
        const fsdp_value *dict = &list->as.list.items[i];
        form_group group = {.prefix = entry->name,
                            .prefix_size = parts->prefix_size,
                            .entry = number,
                            .place = (int64_t)i};
        for (size_t k = 0; k + 1 < dict->as.list.count; k += 2) {
            const fsdp_value *key = &dict->as.list.items[k];
            FSDP_TRY(add_hyper(
                work, &group, entry,
                &(form_item){key->as.bytes.data, key->as.bytes.size, key + 1, number, NONE}, err));
        }
        FSDP_TRY(add_group(&work->lists, group, err));
    }
    return FSDP_OK;
}

static bool is_dict_of_names(const fsdp_value *dict)
{
    bool fits = dict->kind == FSDP_VALUE_DICT;
    for (size_t k = 0; fits && k + 1 < dict->as.list.count; k += 2)
        fits = dict->as.list.items[k].kind == FSDP_VALUE_STRING;
    return fits;
}

/* True for an entry that a group can be read from. */
static bool is_readable(const fsdp_entry *entry, const group_name *parts)
{
    const fsdp_value *value = &entry->value;
    bool fits = entry->kind == FSDP_ENTRY_VALUE && !fsdp_value_is_opaque(value);
    if (!fits || parts->what_size > 0)
        return fits;
    fits = value->kind == FSDP_VALUE_LIST;
    for (size_t i = 0; fits && i < value->as.list.count; i++)
        fits = is_dict_of_names(&value->as.list.items[i]);
    return fits;
}

static fsdp_status read_entry(forming *work, size_t number, const group_name *parts,
                              fsdp_error *err)
{
    const fsdp_entry *entry = fsdp_sd_at(work->from, number);
    size_t at;
    if (!is_readable(entry, parts))
        return leave(work, entry, "it is no plain value", err);
    work->is_replaced[number] = true;
    if (parts->what_size == 0)
        return read_list(work, entry, number, parts, err);
    bool is_list = is_in_list(work, entry, parts);
    form_groups *groups = is_list ? &work->lists : &work->flat;
    FSDP_TRY(take_group(work, groups, number, parts, &at, err));
    form_group *group = &groups->items[at];
    const form_item hyper = {parts->what, parts->what_size, &entry->value, number, NONE};
    if (is_list)
        return add_hyper(work, group, entry, &hyper, err);
    if (group->params.count == 0)
        FSDP_TRY(add_item(work, &group->params,
                          (form_item){entry->name + parts->key, parts->key_size, NULL, NONE, NONE},
                          err));
    return add_hyper(work, group, entry, &hyper, err);
}

/* Groups of one optimizer by their place in its list: entries may come in the order of names, where "10" is
 * before "2". */
static int compare_groups(const void *a, const void *b)
{
    const form_group *x = a, *y = b;
    size_t size = x->prefix_size < y->prefix_size ? x->prefix_size : y->prefix_size;
    int order = memcmp(x->prefix, y->prefix, size);
    if (order == 0)
        order = (x->prefix_size > y->prefix_size) - (x->prefix_size < y->prefix_size);
    return order != 0 ? order : (x->place > y->place) - (x->place < y->place);
}

static fsdp_status read_groups(forming *work, fsdp_error *err)
{
    group_name parts;
    for (size_t i = 0; i < fsdp_sd_count(work->from) && !work->leaves; i++) {
        const fsdp_entry *entry = fsdp_sd_at(work->from, i);
        if (split_name(entry->name, entry->name_size, &parts) && !is_of_deepspeed(entry, &parts))
            FSDP_TRY(read_entry(work, i, &parts, err));
    }
    if (work->lists.count > 0)
        qsort(work->lists.items, work->lists.count, sizeof *work->lists.items, compare_groups);
    return FSDP_OK;
}

/* --- groups of flat parameters ---------------------------------------------------------------- */

static bool is_same_prefix(const form_group *a, const form_group *b)
{
    return a->prefix_size == b->prefix_size && memcmp(a->prefix, b->prefix, a->prefix_size) == 0;
}

static bool is_equal(const forming *work, const form_group *a, const form_group *b)
{
    if (!is_same_prefix(a, b) || a->hypers.count != b->hypers.count)
        return false;
    const form_item *item = NULL;
    while ((item = next_item(work, &a->hypers, item)) != NULL) {
        const fsdp_value *other = find_hyper(work, b, item->name, item->size);
        if (!other || !fsdp_value_equal(item->value, other))
            return false;
    }
    return true;
}

/* Joins flat parameters with equal members, after the groups that the source lists. */
static fsdp_status join_groups(forming *work, fsdp_error *err)
{
    size_t lists = work->lists.count, at = 0;
    for (size_t i = 0; i < lists && i < GROUPS_MOST; i++)
        FSDP_TRY(add_group(&work->all, work->lists.items[i], err));
    for (size_t i = 0; i < work->flat.count && at < GROUPS_MOST; i++) {
        const form_group *param = &work->flat.items[i];
        for (at = lists; at < work->all.count; at++)
            if (is_equal(work, &work->all.items[at], param))
                break;
        if (at < work->all.count)
            FSDP_TRY(
                add_item(work, &work->all.items[at].params, work->items[param->params.first], err));
        else
            FSDP_TRY(add_group(&work->all, *param, err));
    }
    if (work->all.count < GROUPS_MOST)
        return FSDP_OK;
    return leave(work, fsdp_sd_at(work->from, work->all.items[0].entry),
                 "there are too many groups", err);
}

/* --- members of PyTorch's optimizers ---------------------------------------------------------- */

/* A member that PyTorch's optimizer has next to those of ours, with the value that means nothing. */
typedef struct neutral_member {
    const char *name;
    const fsdp_value *value;
} neutral_member;

/* An optimizer of optim.h: the members that fsdp_root_save stores, and PyTorch's others (torch 2.15). */
typedef struct own_kind {
    const char *const *members;
    const neutral_member *neutrals;
} own_kind;

static const fsdp_value no = {.kind = FSDP_VALUE_BOOL}, unset = {.kind = FSDP_VALUE_NULL};
static const fsdp_value yes = {.kind = FSDP_VALUE_BOOL, .as = {.boolean = true}};
static const char *const adamw_members[] = {"lr", "betas", "eps", "weight_decay", "maximize", NULL};
static const neutral_member adamw_neutrals[] = {
    {"amsgrad", &no},    {"foreach", &unset},
    {"capturable", &no}, {"differentiable", &no},
    {"fused", &unset},   {"decoupled_weight_decay", &yes},
    {NULL, NULL}};
static const char *const sgd_members[] = {"lr",       "momentum", "dampening", "weight_decay",
                                          "nesterov", "maximize", NULL};
static const neutral_member sgd_neutrals[] = {
    {"foreach", &unset}, {"differentiable", &no}, {"fused", &unset}, {NULL, NULL}};
static const own_kind own_kinds[] = {{adamw_members, adamw_neutrals}, {sgd_members, sgd_neutrals}};

static bool has_all(const forming *work, const form_group *group, const char *const *members)
{
    for (; *members; members++)
        if (!find_hyper(work, group, *members, strlen(*members)))
            return false;
    return true;
}

/* The optimizer of ours that stored the group; NULL: none. PyTorch's have `foreach` or, before 1.12, only
 * `amsgrad`. */
static const own_kind *kind_of(const forming *work, const form_group *group)
{
    if (find_hyper(work, group, "foreach", 7) || find_hyper(work, group, "amsgrad", 7))
        return NULL;
    for (size_t i = 0; i < sizeof own_kinds / sizeof *own_kinds; i++)
        if (has_all(work, group, own_kinds[i].members))
            return &own_kinds[i];
    return NULL;
}

static bool are_ours(const forming *work)
{
    for (size_t i = 0; i < work->lists.count; i++)
        if (!kind_of(work, &work->lists.items[i]))
            return false;
    for (size_t i = 0; i < work->flat.count; i++)
        if (!kind_of(work, &work->flat.items[i]))
            return false;
    return true;
}

static fsdp_status complete_groups(forming *work, fsdp_error *err)
{
    for (size_t i = 0; i < work->all.count; i++) {
        form_group *group = &work->all.items[i];
        const own_kind *kind = kind_of(work, group);
        for (const neutral_member *more = kind ? kind->neutrals : NULL; more && more->name; more++)
            FSDP_TRY(add_item(work, &group->hypers,
                              (form_item){more->name, strlen(more->name), more->value, NONE, NONE},
                              err));
    }
    return FSDP_OK;
}

/* --- writing: entries that stay --------------------------------------------------------------- */

static fsdp_status note_source(forming *work, size_t old, fsdp_error *err)
{
    size_t count = fsdp_sd_count(work->sd);
    if (!fsdp_grow(&work->source, &work->source_room, count, sizeof *work->source))
        return fail_memory(err);
    work->source[count - 1] = work->old_source[old];
    return FSDP_OK;
}

/* The size of "optim." when the name begins with "optim.state." beside "optim.param_groups"; else -1. */
static int64_t find_state(const forming *work, const fsdp_entry *entry)
{
    for (size_t i = 0; i < work->all.count; i++) {
        const form_group *group = &work->all.items[i];
        size_t size = group->prefix_size;
        if ((i == 0 || !is_same_prefix(group, &work->all.items[i - 1])) &&
            entry->name_size > size + 6 && memcmp(entry->name, group->prefix, size) == 0 &&
            memcmp(entry->name + size, "state.", 6) == 0)
            return (int64_t)size;
    }
    return -1;
}

static size_t add_element(int32_t *path, size_t count, size_t size)
{
    path[count] = (int32_t)size;
    return count + 1;
}

/* PyTorch nests state as {"state": {NAME: {KIND: ...}}}, or the flat form has one key "state.NAME.KIND". */
static fsdp_status place_state(const forming *work, const fsdp_entry *entry, size_t prefix,
                               fsdp_error *err)
{
    int32_t path[4];
    size_t count = prefix > 0 ? add_element(path, 0, prefix - 1) : 0, size = entry->name_size, dot;
    for (dot = size - 1; entry->name[dot] != '.';)
        dot--;
    bool is_nested = work->form == FSDP_OPTIM_FORM_NESTED && dot > prefix + 5;
    if (is_nested) {
        count = add_element(path, count, 5);
        count = add_element(path, count, dot - prefix - 6);
        count = add_element(path, count, size - dot - 1);
    } else {
        count = add_element(path, count, size - prefix);
    }
    return fsdp_sd_set_path(work->sd, fsdp_sd_count(work->sd) - 1, path, count, err);
}

static fsdp_status keep_entry(forming *work, size_t i, fsdp_error *err)
{
    const fsdp_entry *entry = fsdp_sd_at(work->from, i), *target;
    const fsdp_tensor tensor = {entry->dtype, entry->ndim, entry->shape, entry->layout, NULL};
    switch (entry->kind) {
    case FSDP_ENTRY_TENSOR:
        FSDP_TRY(fsdp_sd_add_tensor(work->sd, entry->name, entry->name_size, &tensor, err));
        break;
    case FSDP_ENTRY_VALUE:
        FSDP_TRY(fsdp_sd_add_value(work->sd, entry->name, entry->name_size, &entry->value, err));
        break;
    case FSDP_ENTRY_ALIAS:
        target = fsdp_sd_at(work->from, entry->target);
        FSDP_TRY(fsdp_sd_add_alias(work->sd, entry->name, entry->name_size, target->name,
                                   target->name_size, err));
        break;
    }
    FSDP_TRY(note_source(work, i, err));
    int64_t prefix = find_state(work, entry);
    if (prefix >= 0)
        return place_state(work, entry, (size_t)prefix, err);
    return entry->path ? fsdp_sd_set_path(work->sd, fsdp_sd_count(work->sd) - 1, entry->path,
                                          entry->path_count, err)
                       : FSDP_OK;
}

/* --- writing: groups -------------------------------------------------------------------------- */

/* Adds the value "<prefix>param_groups.<key>.<what>". place: the key is a position in a list. */
static fsdp_status put_value(forming *work, const form_group *group, const form_item *key,
                             bool is_place, const form_item *hyper, fsdp_error *err)
{
    int32_t path[4];
    size_t count = group->prefix_size > 0 ? add_element(path, 0, group->prefix_size - 1) : 0;
    fsdp_text *name = &work->text;
    name->size = 0;
    fsdp_text_add(name, group->prefix, group->prefix_size);
    fsdp_text_addf(name, "%s.", word);
    fsdp_text_add(name, key->name, key->size);
    fsdp_text_addf(name, ".");
    fsdp_text_add(name, hyper->name, hyper->size);
    if (name->failed)
        return fail_memory(err);
    if (is_place) {
        count = add_element(path, count, WORD);
        path[count++] = -(int32_t)key->size;
        count = add_element(path, count, hyper->size);
    } else {
        count = add_element(path, count, name->size - group->prefix_size);
    }
    FSDP_TRY(fsdp_sd_add_value(work->sd, name->data, name->size, hyper->value, err));
    FSDP_TRY(note_source(work, hyper->entry == NONE ? group->entry : hyper->entry, err));
    return fsdp_sd_set_path(work->sd, fsdp_sd_count(work->sd) - 1, path, count, err);
}

static fsdp_status put_hypers(forming *work, const form_group *group, const form_item *key,
                              bool is_place, fsdp_error *err)
{
    const form_item *hyper = NULL;
    while ((hyper = next_item(work, &group->hypers, hyper)) != NULL)
        FSDP_TRY(put_value(work, group, key, is_place, hyper, err));
    return FSDP_OK;
}

static fsdp_status list_names(const forming *work, const form_list *names, fsdp_value *list_out,
                              fsdp_error *err)
{
    const form_item *name = NULL;
    FSDP_TRY(fsdp_value_set_items(list_out, FSDP_VALUE_LIST, names->count, err));
    for (size_t i = 0; (name = next_item(work, names, name)) != NULL; i++)
        FSDP_TRY(fsdp_value_set_bytes(&list_out->as.list.items[i], FSDP_VALUE_STRING, name->name,
                                      name->size, err));
    return FSDP_OK;
}

static fsdp_status put_nested(forming *work, const form_group *group, size_t place, fsdp_error *err)
{
    char digits[24];
    fsdp_value list = {0};
    size_t size = (size_t)snprintf(digits, sizeof digits, "%zu", place);
    const form_item key = {digits, size, NULL, NONE, NONE};
    const form_item params = {"params", 6, &list, NONE, NONE};
    FSDP_TRY(put_hypers(work, group, &key, true, err));
    fsdp_status status = list_names(work, &group->params, &list, err);
    if (status == FSDP_OK)
        status = put_value(work, group, &key, true, &params, err);
    fsdp_value_release(&list);
    return status;
}

static fsdp_status put_flat(forming *work, const form_group *group, fsdp_error *err)
{
    const form_item *param = NULL;
    if (group->params.count == 0)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "a group of '%s' has no parameters, but the flat form stores groups by "
                         "their parameters",
                         fsdp_sd_at(work->from, group->entry)->name);
    while ((param = next_item(work, &group->params, param)) != NULL)
        FSDP_TRY(put_hypers(work, group, param, false, err));
    return FSDP_OK;
}

static size_t place_of(const forming *work, size_t group)
{
    size_t place = 0;
    for (size_t i = 0; i < group; i++)
        place += is_same_prefix(&work->all.items[i], &work->all.items[group]);
    return place;
}

static fsdp_status write_all(forming *work, fsdp_error *err)
{
    FSDP_TRY(fsdp_sd_create(&work->sd, err));
    for (size_t i = 0; i < fsdp_sd_count(work->from); i++)
        if (!work->is_replaced[i])
            FSDP_TRY(keep_entry(work, i, err));
    for (size_t i = 0; i < work->all.count; i++)
        FSDP_TRY(work->form == FSDP_OPTIM_FORM_FLAT
                     ? put_flat(work, &work->all.items[i], err)
                     : put_nested(work, &work->all.items[i], place_of(work, i), err));
    return FSDP_OK;
}

/* --- the call --------------------------------------------------------------------------------- */

static fsdp_status form_all(forming *work, fsdp_error *err)
{
    work->is_replaced = fsdp_alloc(fsdp_sd_count(work->from), sizeof *work->is_replaced);
    if (!work->is_replaced)
        return fail_memory(err);
    FSDP_TRY(fsdp_sd_create(&work->index, err));
    FSDP_TRY(read_groups(work, err));
    if (work->form == FSDP_OPTIM_FORM_DEFAULT && !work->leaves)
        work->leaves = !are_ours(work);
    if (work->leaves)
        return FSDP_OK;
    FSDP_TRY(join_groups(work, err));
    if (work->leaves || work->all.count == 0)
        return FSDP_OK;
    if (work->form == FSDP_OPTIM_FORM_DEFAULT)
        work->form = FSDP_OPTIM_FORM_NESTED;
    FSDP_TRY(complete_groups(work, err));
    return write_all(work, err);
}

fsdp_status fsdp_optim_form_apply(fsdp_optim_form form, fsdp_sd **sd, size_t **source,
                                  fsdp_optim_form *written_out, fsdp_error *err)
{
    forming work = {.from = *sd, .old_source = *source, .form = form};
    fsdp_status status = form_all(&work, err);
    *written_out = FSDP_OPTIM_FORM_DEFAULT;
    if (status == FSDP_OK && work.sd) {
        fsdp_free(*source);
        *source = work.source;
        fsdp_sd_free(*sd);
        *sd = work.sd;
        *written_out = work.form;
    } else {
        fsdp_sd_free(work.sd);
        fsdp_free(work.source);
    }
    fsdp_text_release(&work.text);
    fsdp_sd_free(work.index);
    fsdp_free(work.items);
    fsdp_free(work.lists.items);
    fsdp_free(work.flat.items);
    fsdp_free(work.all.items);
    fsdp_free(work.is_replaced);
    return status;
}
