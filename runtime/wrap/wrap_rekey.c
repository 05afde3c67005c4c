/*
 * The FSDP1 face: changes optimizer state between names and positions. Names contain dots, and some are
 * numbers: a key is the longest known name that an entry begins with, else its first number.
 */
#include "runtime/wrap/wrap_internal.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/core/given.h"
#include "base/core/mem.h"
#include "base/data/param_groups.h"
#include "base/text.h"

static const char state_prefix[] = "state.";
static const char groups_name[] = "param_groups";

typedef enum key_kind { KEY_NONE, KEY_NAME, KEY_ID } key_kind;

/* The parameter's key in an entry's name, after "state.". */
typedef struct state_key {
    key_kind kind;
    size_t position;  /* in the input; SIZE_MAX: not among it */
    const char *rest; /* ".exp_avg" */
} state_key;

typedef struct rekey_work {
    const fsdp_sd *sd;
    fsdp_wrap_key_type type;
    const fsdp_wrap_optim_input *input;
    fsdp_sd *out;
    fsdp_text name;
} rekey_work;

/* --- keys ------------------------------------------------------------------------------------- */

static bool begins_with(const fsdp_entry *entry, size_t at, const char *text, size_t size)
{
    return entry->name_size >= at + size && memcmp(entry->name + at, text, size) == 0;
}

/* Tries the longest name first: "a" and "a.b" may both be names. */
static state_key find_name(const rekey_work *work, const fsdp_entry *entry, size_t at)
{
    state_key key = {.kind = KEY_NONE, .position = SIZE_MAX};
    size_t longest = 0;
    for (size_t i = 0; i < work->input->count; i++) {
        const char *name = work->input->names[i];
        size_t size = strlen(name);
        if (size < longest || !begins_with(entry, at, name, size) ||
            !begins_with(entry, at + size, ".", 1))
            continue;
        longest = size;
        key = (state_key){.kind = KEY_NAME, .position = i, .rest = entry->name + at + size};
    }
    return key;
}

static state_key find_key(const rekey_work *work, const fsdp_entry *entry)
{
    size_t at = strlen(state_prefix);
    if (!begins_with(entry, 0, state_prefix, at))
        return (state_key){.kind = KEY_NONE};
    state_key key = find_name(work, entry, at);
    if (key.kind != KEY_NONE)
        return key;
    const char *first = entry->name + at;
    size_t digits = strspn(first, "0123456789");
    if (digits > 0 && digits < 10 && first[digits] == '.')
        return (state_key){
            .kind = KEY_ID, .position = (size_t)strtoul(first, NULL, 10), .rest = first + digits};
    return (state_key){.kind = KEY_NAME, .position = SIZE_MAX};
}

static fsdp_status find_kind(const rekey_work *work, key_kind *kind_out, fsdp_error *err)
{
    const char *first = "";
    *kind_out = KEY_NONE;
    for (size_t i = 0; i < fsdp_sd_count(work->sd); i++) {
        const fsdp_entry *entry = fsdp_sd_at(work->sd, i);
        const state_key key = find_key(work, entry);
        if (key.kind == KEY_NONE)
            continue;
        if (*kind_out == KEY_NONE)
            first = entry->name;
        else if (*kind_out != key.kind)
            return fsdp_fail(err, FSDP_ERR_USAGE,
                             "'%s' and '%s': some keys are names and some are positions", first,
                             entry->name);
        *kind_out = key.kind;
    }
    return FSDP_OK;
}

static fsdp_status check_position(const rekey_work *work, uint64_t position, fsdp_error *err)
{
    if (position < work->input->count)
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_USAGE,
                     "there is state of parameter %" PRIu64 ", but the optimizer has only %zu",
                     position, work->input->count);
}

/* --- entries ---------------------------------------------------------------------------------- */

static fsdp_status add_copy(rekey_work *work, const fsdp_entry *entry, const char *name,
                            size_t size, fsdp_error *err)
{
    if (entry->kind == FSDP_ENTRY_VALUE)
        return fsdp_sd_add_value(work->out, name, size, &entry->value, err);
    if (entry->kind == FSDP_ENTRY_ALIAS)
        entry = fsdp_sd_at(work->sd, entry->target);
    return fsdp_sd_add_tensor(
        work->out, name, size,
        &(fsdp_tensor){entry->dtype, entry->ndim, entry->shape, entry->layout, entry->data}, err);
}

static fsdp_status add_state(rekey_work *work, const fsdp_entry *entry, const state_key *key,
                             fsdp_error *err)
{
    bool is_left_out = key->kind == KEY_NAME && key->position == SIZE_MAX;
    if (is_left_out)
        return FSDP_OK;
    FSDP_TRY(check_position(work, key->position, err));
    work->name.size = 0;
    if (work->type == FSDP_WRAP_PARAM_ID)
        fsdp_text_addf(&work->name, "%s%zu%s", state_prefix, key->position, key->rest);
    else
        fsdp_text_addf(&work->name, "%s%s%s", state_prefix, work->input->names[key->position],
                       key->rest);
    if (work->name.failed)
        return fsdp_fail_memory(err, "a state dict");
    return add_copy(work, entry, work->name.data, work->name.size, err);
}

/* --- lists of parameters ---------------------------------------------------------------------- */

static bool find_position(const rekey_work *work, const fsdp_value *key, uint64_t *position_out)
{
    if (key->kind == FSDP_VALUE_I64 || key->kind == FSDP_VALUE_U64) {
        *position_out = key->as.u64;
        return true;
    }
    for (*position_out = 0; *position_out < work->input->count; ++*position_out)
        if (key->kind == FSDP_VALUE_STRING && fsdp_bytes_are(key->as.bytes.data, key->as.bytes.size,
                                                             work->input->names[*position_out]))
            return true;
    return false;
}

static fsdp_status make_key(const rekey_work *work, uint64_t position, fsdp_value *key_out,
                            fsdp_error *err)
{
    FSDP_TRY(check_position(work, position, err));
    *key_out = fsdp_value_i64((int64_t)position);
    if (work->type == FSDP_WRAP_PARAM_ID)
        return FSDP_OK;
    const char *name = work->input->names[position];
    return fsdp_value_set_bytes(key_out, FSDP_VALUE_STRING, name, strlen(name), err);
}

static int compare_keys(const void *a, const void *b)
{
    const fsdp_value *x = a, *y = b;
    if (x->kind != FSDP_VALUE_STRING)
        return x->as.i64 < y->as.i64 ? -1 : x->as.i64 > y->as.i64;
    size_t size = x->as.bytes.size < y->as.bytes.size ? x->as.bytes.size : y->as.bytes.size;
    int order = memcmp(x->as.bytes.data, y->as.bytes.data, size);
    return order ? order : (x->as.bytes.size > size) - (y->as.bytes.size > size);
}

/* Removes keys that the input lacks; the kept ones move to the front. */
static fsdp_status rekey_list(const rekey_work *work, fsdp_value *list, fsdp_error *err)
{
    fsdp_value *items = list->as.list.items;
    size_t kept = 0;
    for (size_t i = 0; i < list->as.list.count; i++) {
        fsdp_value key = items[i];
        uint64_t position;
        items[i] = (fsdp_value){0};
        bool is_known = find_position(work, &key, &position);
        fsdp_value_release(&key);
        if (is_known)
            FSDP_TRY(make_key(work, position, &items[kept++], err));
    }
    list->as.list.count = kept;
    qsort(items, kept, sizeof *items, compare_keys);
    return FSDP_OK;
}

static fsdp_status rekey_groups(const rekey_work *work, fsdp_value *groups, fsdp_error *err)
{
    for (size_t g = 0; groups->kind == FSDP_VALUE_LIST && g < groups->as.list.count; g++) {
        fsdp_value *params = (fsdp_value *)fsdp_group_list_params(&groups->as.list.items[g]);
        if (params)
            FSDP_TRY(rekey_list(work, params, err));
    }
    return FSDP_OK;
}

static fsdp_status add_groups(rekey_work *work, const fsdp_entry *entry, fsdp_error *err)
{
    fsdp_value groups = {0};
    fsdp_status status = fsdp_value_copy(&entry->value, &groups, err);
    if (status == FSDP_OK)
        status = rekey_groups(work, &groups, err);
    if (status == FSDP_OK)
        status = fsdp_sd_add_value(work->out, entry->name, entry->name_size, &groups, err);
    fsdp_value_release(&groups);
    return status;
}

/* --- the whole -------------------------------------------------------------------------------- */

static bool is_groups(const fsdp_entry *entry)
{
    return entry->kind == FSDP_ENTRY_VALUE && entry->name_size == strlen(groups_name) &&
           begins_with(entry, 0, groups_name, strlen(groups_name));
}

static fsdp_status rekey(rekey_work *work, fsdp_error *err)
{
    key_kind kind, wanted = work->type == FSDP_WRAP_PARAM_ID ? KEY_ID : KEY_NAME;
    FSDP_TRY(find_kind(work, &kind, err));
    for (size_t i = 0; i < fsdp_sd_count(work->sd); i++) {
        const fsdp_entry *entry = fsdp_sd_at(work->sd, i);
        const state_key key = find_key(work, entry);
        if (kind == wanted || (key.kind == KEY_NONE && !is_groups(entry)))
            FSDP_TRY(add_copy(work, entry, entry->name, entry->name_size, err));
        else if (is_groups(entry))
            FSDP_TRY(add_groups(work, entry, err));
        else
            FSDP_TRY(add_state(work, entry, &key, err));
    }
    return FSDP_OK;
}

fsdp_status fsdp_wrap_rekey_optim_state(const fsdp_sd *sd, fsdp_wrap_key_type type,
                                        const fsdp_wrap_optim_input *input, fsdp_sd **sd_out,
                                        fsdp_error *err)
{
    FSDP_NEED(err, sd, input, sd_out);
    rekey_work work = {.sd = sd, .type = type, .input = input};
    FSDP_TRY(fsdp_sd_create(&work.out, err));
    fsdp_status status = rekey(&work, err);
    fsdp_text_release(&work.name);
    if (status == FSDP_OK)
        *sd_out = work.out;
    else
        fsdp_sd_free(work.out);
    return status;
}
