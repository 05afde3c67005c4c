/* Names for the parameters that an optimizer numbers: see numbered_optim.h. */
#include "statedict/derive/numbered_optim.h"

#include "base/data/name_path.h"
#include "base/data/value_internal.h"
#include "base/text.h"
#include "statedict/derive/derived_checkpoint.h"
#include "statedict/select/parameter_order.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

enum { GROUPS_MOST = 4096 };
static const char groups_word[] = "param_groups.", state_word[] = "state.";

/* A group of the optimizer: "optim.param_groups.0.params". */
typedef struct numbered_group {
    const fsdp_value *numbers; /* a list of integers */
    size_t entry;
    size_t first; /* place of its first parameter among those of all groups */
} numbered_group;

typedef struct naming {
    const fsdp_numbered_opts *opts;
    const fsdp_sd *sd;
    fsdp_parts parts;
    fsdp_arena arena;
    const char *prefix; /* of the optimizer: "optim." */
    size_t prefix_size;
    numbered_group groups[GROUPS_MOST];
    size_t group_count, total;
    fsdp_parameter *parameters; /* of the model, in its order */
    size_t parameter_count;
    const fsdp_parameter **named; /* per place in the groups */
    fsdp_sd *places;              /* numbers as text -> place in the groups */
} naming;

static fsdp_status refuse(const naming *work, const char *why, fsdp_error *err)
{
    static const char unnamed[] = "the optimizer"; /* the source is nothing else */
    char shown[200];
    bool has_name = work->prefix_size > 0;
    fsdp_printable(has_name ? work->prefix : unnamed,
                   has_name ? work->prefix_size - 1 : sizeof unnamed - 1, shown, sizeof shown);
    return fsdp_fail(err, FSDP_ERR_USAGE,
                     "'%s' numbers its %zu parameters, and %s; --only model leaves the optimizer "
                     "out, --names keep keeps the numbers",
                     shown, work->total, why);
}

static bool begins(const char *name, size_t size, const char *word)
{
    return size > strlen(word) && memcmp(name, word, strlen(word)) == 0;
}

/* --- the groups ---------------------------------------------------------------------------------- */

/* The place of "param_groups.N.params" in a name; -1: it is none. */
static int64_t find_params(const fsdp_entry *entry, int64_t *number_out)
{
    static const char params[] = ".params";
    if (entry->kind != FSDP_ENTRY_VALUE || entry->value.kind != FSDP_VALUE_LIST ||
        !fsdp_bytes_end(entry->name, entry->name_size, params))
        return -1;
    size_t end = entry->name_size - (sizeof params - 1), at = end;
    *number_out = 0;
    while (at > 0 && entry->name[at - 1] >= '0' && entry->name[at - 1] <= '9')
        at--;
    if (at == end || end - at > 6)
        return -1;
    for (size_t i = at; i < end; i++)
        *number_out = *number_out * 10 + (entry->name[i] - '0');
    size_t size = sizeof groups_word - 1;
    bool fits = at >= size && memcmp(entry->name + at - size, groups_word, size) == 0 &&
                (at == size || entry->name[at - size - 1] == '.');
    return fits ? (int64_t)(at - size) : -1;
}

static bool are_numbers(const fsdp_value *list)
{
    for (size_t i = 0; i < list->as.list.count; i++) {
        const fsdp_value *one = &list->as.list.items[i];
        if (one->kind != FSDP_VALUE_I64 && one->kind != FSDP_VALUE_U64)
            return false;
    }
    return true;
}

/* False: there are no groups, or not those of one optimizer that numbers parameters. */
static bool find_groups(naming *work)
{
    int64_t number;
    for (size_t i = 0; i < fsdp_sd_count(work->sd); i++) {
        const fsdp_entry *entry = fsdp_sd_at(work->sd, i);
        int64_t at = find_params(entry, &number);
        if (at < 0)
            continue;
        if (!are_numbers(&entry->value) || number >= GROUPS_MOST || work->groups[number].numbers ||
            (work->group_count > 0 && ((size_t)at != work->prefix_size ||
                                       memcmp(entry->name, work->prefix, work->prefix_size) != 0)))
            return false;
        work->prefix = entry->name;
        work->prefix_size = (size_t)at;
        work->groups[number] = (numbered_group){.numbers = &entry->value, .entry = i};
        work->group_count++;
    }
    for (size_t i = 0; i < work->group_count; i++) {
        if (!work->groups[i].numbers)
            return false;
        work->groups[i].first = work->total;
        work->total += work->groups[i].numbers->as.list.count;
    }
    return work->total > 0;
}

/* Each number once. */
static fsdp_status place_numbers(naming *work, fsdp_error *err)
{
    char text[24];
    FSDP_TRY(fsdp_sd_create(&work->places, err));
    for (size_t g = 0; g < work->group_count; g++) {
        const fsdp_value *list = work->groups[g].numbers;
        for (size_t i = 0; i < list->as.list.count; i++) {
            const fsdp_value place = fsdp_value_u64(work->groups[g].first + i);
            int size = snprintf(text, sizeof text, "%" PRId64, list->as.list.items[i].as.i64);
            if (fsdp_sd_find(work->places, text, (size_t)size) >= 0)
                return refuse(work, "one number is there twice", err);
            FSDP_TRY(fsdp_sd_add_value(work->places, text, (size_t)size, &place, err));
        }
    }
    return FSDP_OK;
}

/* "optim.state.3.exp_avg": where "3" begins and ends. False: it is not a state of the optimizer. */
static bool find_key(const naming *work, const fsdp_entry *entry, size_t *at_out, size_t *end_out)
{
    *at_out = work->prefix_size + sizeof state_word - 1;
    if (entry->name_size <= *at_out || memcmp(entry->name, work->prefix, work->prefix_size) != 0 ||
        !begins(entry->name + work->prefix_size, entry->name_size - work->prefix_size, state_word))
        return false;
    const char *dot = memchr(entry->name + *at_out, '.', entry->name_size - *at_out);
    *end_out = dot ? (size_t)(dot - entry->name) : entry->name_size;
    return true;
}

/* A number that no group has would stay a number among names. */
static fsdp_status check_states(const naming *work, fsdp_error *err)
{
    for (size_t i = 0; i < fsdp_sd_count(work->sd); i++) {
        const fsdp_entry *entry = fsdp_sd_at(work->sd, i);
        size_t at, end, digits = 0;
        if (!find_key(work, entry, &at, &end))
            continue;
        while (at + digits < end && entry->name[at + digits] >= '0' &&
               entry->name[at + digits] <= '9')
            digits++;
        if (digits > 0 && at + digits == end &&
            fsdp_sd_find(work->places, entry->name + at, digits) < 0)
            return refuse(work, "has states of a number that is in no group", err);
    }
    return FSDP_OK;
}

/* "optim.state.3.exp_avg": the place of parameter 3, and where ".exp_avg" begins. */
static bool find_state(const naming *work, const fsdp_entry *entry, size_t *place_out,
                       size_t *kind_out)
{
    size_t at, end;
    if (!find_key(work, entry, &at, &end))
        return false;
    int64_t found = fsdp_sd_find(work->places, entry->name + at, end - at);
    if (found < 0)
        return false;
    *place_out = (size_t)fsdp_sd_at(work->places, (size_t)found)->value.as.u64;
    *kind_out = end;
    return true;
}

/* --- the model ----------------------------------------------------------------------------------- */

/* Buffers whose names say so, where no order of the model does. */
static bool is_plain_buffer(const fsdp_entry *entry)
{
    return !fsdp_dtype_describe(entry->dtype)->is_float ||
           fsdp_bytes_end(entry->name, entry->name_size, ".running_mean") ||
           fsdp_bytes_end(entry->name, entry->name_size, ".running_var");
}

static fsdp_status list_parameters(naming *work, fsdp_error *err)
{
    size_t count = fsdp_sd_count(work->sd);
    work->parameters = fsdp_arena_alloc(&work->arena, count, sizeof *work->parameters);
    if (!work->parameters)
        return fsdp_fail_memory(err, "the parameters of an optimizer");
    for (size_t i = 0; i < count; i++) {
        const fsdp_entry *entry = fsdp_sd_at(work->sd, i);
        size_t root = work->parts.root_size;
        if (entry->kind != FSDP_ENTRY_TENSOR || entry->name_size <= root ||
            fsdp_part_of(&work->parts, entry) != FSDP_PART_MODEL)
            continue;
        work->parameters[work->parameter_count++] =
            (fsdp_parameter){.name = entry->name + root,
                             .size = entry->name_size - root,
                             .entry = i,
                             .is_buffer = is_plain_buffer(entry)};
    }
    return FSDP_OK;
}

static fsdp_status order_parameters(naming *work, bool *is_known_out, fsdp_error *err)
{
    const char *type = work->opts->known.model_type;
    size_t kept = 0;
    *is_known_out = false;
    if (type)
        FSDP_TRY(fsdp_parameters_sort(type, work->parameters, work->parameter_count, &work->arena,
                                      is_known_out, err));
    for (size_t i = 0; i < work->parameter_count; i++)
        if (!work->parameters[i].is_buffer)
            work->parameters[kept++] = work->parameters[i];
    work->parameter_count = kept;
    *is_known_out = *is_known_out || work->opts->keeps_order;
    return FSDP_OK;
}

/* --- which parameter has which place ------------------------------------------------------------- */

static bool has_element(const char *name, size_t size, const char *word, bool may_begin_inside)
{
    size_t n = strlen(word);
    for (size_t at = 0; at + n <= size; at++) {
        bool begins_here = may_begin_inside || at == 0 || name[at - 1] == '.';
        if (begins_here && memcmp(name + at, word, n) == 0 &&
            (at + n == size || name[at + n] == '.'))
            return true;
    }
    return false;
}

/* The parameters to which Trainer applies no decay, by names and by the class of their module. */
static bool is_plain_for_trainer(const naming *work, const fsdp_parameter *parameter)
{
    const char *name = parameter->name;
    size_t size = parameter->size;
    (void)work;
    return parameter->is_norm || memmem(name, size, "bias", 4) ||
           memmem(name, size, "layernorm", 9) || memmem(name, size, "rmsnorm", 7) ||
           has_element(name, size, "norm", false) || has_element(name, size, "_norm", true);
}

static bool is_vector(const naming *work, const fsdp_parameter *parameter)
{
    return fsdp_sd_at(work->sd, parameter->entry)->ndim < 2;
}

typedef bool (*undecayed)(const naming *work, const fsdp_parameter *parameter);

/* Fills the groups: those with decay first, then the others; or one group with all. False: the counts are
 * others. */
static bool fill_groups(const naming *work, undecayed is_second, const fsdp_parameter **named)
{
    size_t at = 0;
    if (work->group_count > 2 || work->parameter_count != work->total)
        return false;
    for (size_t group = 0; group < work->group_count; group++) {
        for (size_t i = 0; i < work->parameter_count; i++) {
            const fsdp_parameter *parameter = &work->parameters[i];
            if (work->group_count == 1 || is_second(work, parameter) == (group == 1))
                named[at++] = parameter;
        }
        if (at != work->groups[group].first + work->groups[group].numbers->as.list.count)
            return false;
    }
    return true;
}

static bool is_of_shape(const fsdp_entry *entry, const fsdp_entry *parameter)
{
    return entry->kind != FSDP_ENTRY_TENSOR || entry->ndim == 0 ||
           (entry->ndim == parameter->ndim &&
            memcmp(entry->shape, parameter->shape, (size_t)entry->ndim * sizeof *entry->shape) ==
                0);
}

/* The first state whose shape is not that of its parameter; -1: all fit. */
static int64_t find_misfit(const naming *work, const fsdp_parameter *const *named)
{
    size_t place, kind;
    for (size_t i = 0; i < fsdp_sd_count(work->sd); i++) {
        const fsdp_entry *entry = fsdp_sd_at(work->sd, i);
        if (find_state(work, entry, &place, &kind) &&
            !is_of_shape(entry, fsdp_sd_at(work->sd, named[place]->entry)))
            return (int64_t)i;
    }
    return -1;
}

static fsdp_status refuse_shape(const naming *work, int64_t misfit,
                                const fsdp_parameter *const *named, fsdp_error *err)
{
    size_t place, kind;
    fsdp_text why = {0};
    const fsdp_entry *entry = fsdp_sd_at(work->sd, (size_t)misfit);
    char shown[200], name[200];
    (void)find_state(work, entry, &place, &kind);
    fsdp_text_addf(&why, "'%s' has not the shape of '%s', whose number it has by their order",
                   fsdp_printable(entry->name, entry->name_size, shown, sizeof shown),
                   fsdp_printable(named[place]->name, named[place]->size, name, sizeof name));
    fsdp_status st = why.failed ? fsdp_fail_memory(err, "a message") : refuse(work, why.data, err);
    fsdp_text_release(&why);
    return st;
}

static fsdp_status refuse_count(const naming *work, fsdp_error *err)
{
    char why[200];
    if (work->parameter_count == work->total && work->group_count > 2)
        snprintf(why, sizeof why, "has %zu groups, whose parameters cannot be told apart",
                 work->group_count);
    else
        snprintf(why, sizeof why, "the model has %zu, or others in its groups",
                 work->parameter_count);
    return refuse(work, why, err);
}

/* Parameters by their order: of Trainer's groups and of those by dims, the ones that fit. */
static fsdp_status name_by_order(naming *work, fsdp_error *err)
{
    static const undecayed rules[] = {is_plain_for_trainer, is_vector};
    const fsdp_parameter **tried =
        fsdp_arena_alloc(&work->arena, 2 * work->total, sizeof *tried); /* one list for each rule */
    const fsdp_parameter **found = NULL, **misfit = NULL;
    int64_t entry = -1;
    if (!tried)
        return fsdp_fail_memory(err, "the parameters of an optimizer");
    for (size_t i = 0; i < sizeof rules / sizeof *rules; i++) {
        const fsdp_parameter **named = tried + i * work->total;
        if (!fill_groups(work, rules[i], named))
            continue;
        entry = find_misfit(work, named);
        misfit = entry >= 0 ? named : misfit;
        if (entry >= 0)
            continue;
        if (found && memcmp(found, named, work->total * sizeof *named) != 0)
            return refuse(work, "two ways to name them fit", err);
        found = named;
    }
    if (!found && misfit)
        return refuse_shape(work, find_misfit(work, misfit), misfit, err);
    if (!found)
        return refuse_count(work, err);
    work->named = found;
    return FSDP_OK;
}

/* "optim.param_groups.0.param_names", which optimizers have that were made from named parameters; NULL: it
 * is not there for each parameter. */
static const fsdp_value *names_of_group(const naming *work, const numbered_group *group)
{
    const fsdp_entry *entry = fsdp_sd_at(work->sd, group->entry);
    fsdp_text name = {0};
    fsdp_text_add(&name, entry->name, entry->name_size - 1);
    fsdp_text_addf(&name, "_names");
    int64_t found = name.failed ? -1 : fsdp_sd_find(work->sd, name.data, name.size);
    fsdp_text_release(&name);
    const fsdp_entry *names = found >= 0 ? fsdp_sd_at(work->sd, (size_t)found) : NULL;
    bool fits = names && names->kind == FSDP_ENTRY_VALUE && names->value.kind == FSDP_VALUE_LIST &&
                names->value.as.list.count == group->numbers->as.list.count;
    for (size_t i = 0; fits && i < names->value.as.list.count; i++)
        fits = names->value.as.list.items[i].kind == FSDP_VALUE_STRING;
    return fits ? &names->value : NULL;
}

/* The parameter of an entry; they are still in the order of entries. */
static const fsdp_parameter *parameter_of(const naming *work, size_t entry)
{
    size_t low = 0, high = work->parameter_count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (work->parameters[middle].entry < entry)
            low = middle + 1;
        else
            high = middle;
    }
    return low < work->parameter_count && work->parameters[low].entry == entry
               ? &work->parameters[low]
               : NULL;
}

static fsdp_status find_parameter(const naming *work, const fsdp_value *name,
                                  const fsdp_parameter **found_out, fsdp_error *err)
{
    fsdp_text whole = {0};
    fsdp_text_add(&whole, work->parts.root, work->parts.root_size);
    fsdp_text_add(&whole, name->as.bytes.data, name->as.bytes.size);
    int64_t entry = whole.failed ? -1 : fsdp_sd_find(work->sd, whole.data, whole.size);
    bool failed = whole.failed;
    fsdp_text_release(&whole);
    *found_out = entry >= 0 ? parameter_of(work, (size_t)entry) : NULL;
    return failed       ? fsdp_fail_memory(err, "a name")
           : *found_out ? FSDP_OK
                        : refuse(work, "a name in 'param_names' is none of the model", err);
}

/* Names that the groups have. named stays NULL where they have none. */
static fsdp_status name_by_names(naming *work, fsdp_error *err)
{
    const fsdp_parameter **named = fsdp_arena_alloc(&work->arena, work->total, sizeof *named);
    if (!named)
        return fsdp_fail_memory(err, "the parameters of an optimizer");
    for (size_t g = 0; g < work->group_count; g++) {
        const fsdp_value *names = names_of_group(work, &work->groups[g]);
        if (!names)
            return FSDP_OK;
        for (size_t i = 0; i < names->as.list.count; i++)
            FSDP_TRY(find_parameter(work, &names->as.list.items[i],
                                    &named[work->groups[g].first + i], err));
    }
    int64_t misfit = find_misfit(work, named);
    if (misfit >= 0)
        return refuse_shape(work, misfit, named, err);
    work->named = named;
    return FSDP_OK;
}

static fsdp_status name_all(naming *work, fsdp_error *err)
{
    bool is_known = false;
    FSDP_TRY(place_numbers(work, err));
    FSDP_TRY(check_states(work, err));
    FSDP_TRY(name_by_names(work, err));
    if (work->named)
        return FSDP_OK;
    FSDP_TRY(order_parameters(work, &is_known, err));
    return is_known ? name_by_order(work, err)
                    : refuse(work,
                             "no order of the parameters is known for the model_type of its "
                             "config.json",
                             err);
}

/* --- the checkpoint with names ------------------------------------------------------------------- */

static fsdp_status add_state(const naming *work, fsdp_derivation *derivation, size_t number,
                             size_t place, size_t kind, fsdp_error *err)
{
    const fsdp_entry *entry = fsdp_sd_at(work->sd, number);
    const fsdp_derived *stored = NULL;
    fsdp_text name = {0};
    fsdp_text_add(&name, entry->name, work->prefix_size + sizeof state_word - 1);
    fsdp_text_add(&name, work->named[place]->name, work->named[place]->size);
    fsdp_text_add(&name, entry->name + kind, entry->name_size - kind);
    const fsdp_derived_name as = {name.data, name.size};
    fsdp_status st = name.failed ? fsdp_fail_memory(err, "a name") : FSDP_OK;
    if (st == FSDP_OK && entry->kind == FSDP_ENTRY_VALUE) {
        st = fsdp_derivation_keep_as(derivation, number, as, err);
    } else if (st == FSDP_OK) {
        st = fsdp_derive_stored(fsdp_derivation_arena(derivation), fsdp_derivation_base(derivation),
                                number, &stored, err);
        if (st == FSDP_OK)
            st = fsdp_derivation_replace(derivation, number, as, stored, err);
    }
    fsdp_text_release(&name);
    return st;
}

/* The list of a group with names in place of numbers. */
static fsdp_status add_params(const naming *work, fsdp_derivation *derivation,
                              const numbered_group *group, fsdp_error *err)
{
    const fsdp_entry *entry = fsdp_sd_at(work->sd, group->entry);
    fsdp_value list = {0};
    fsdp_status st =
        fsdp_value_set_items(&list, FSDP_VALUE_LIST, group->numbers->as.list.count, err);
    for (size_t i = 0; st == FSDP_OK && i < list.as.list.count; i++) {
        const fsdp_parameter *parameter = work->named[group->first + i];
        st = fsdp_value_set_bytes(&list.as.list.items[i], FSDP_VALUE_STRING, parameter->name,
                                  parameter->size, err);
    }
    if (st == FSDP_OK)
        st = fsdp_derivation_add_value(
            derivation, (fsdp_derived_name){entry->name, entry->name_size}, &list, err);
    fsdp_value_release(&list);
    return st;
}

static fsdp_status add_all(const naming *work, fsdp_derivation *derivation, fsdp_error *err)
{
    size_t place, kind, group;
    for (size_t i = 0; i < fsdp_sd_count(work->sd); i++) {
        for (group = 0; group < work->group_count && work->groups[group].entry != i;)
            group++;
        if (group < work->group_count)
            FSDP_TRY(add_params(work, derivation, &work->groups[group], err));
        else if (find_state(work, fsdp_sd_at(work->sd, i), &place, &kind))
            FSDP_TRY(add_state(work, derivation, i, place, kind, err));
        else
            FSDP_TRY(fsdp_derivation_keep(derivation, i, err));
    }
    return FSDP_OK;
}

static fsdp_status rename_all(const naming *work, fsdp_checkpoint **checkpoint, fsdp_error *err)
{
    fsdp_derivation *derivation = NULL;
    fsdp_checkpoint *base = *checkpoint;
    *checkpoint = NULL;
    FSDP_TRY(fsdp_derivation_begin(base, &derivation, err));
    fsdp_status st = add_all(work, derivation, err);
    if (st == FSDP_OK)
        return fsdp_derivation_finish(derivation, checkpoint, err);
    fsdp_derivation_cancel(derivation);
    return st;
}

fsdp_status fsdp_name_numbered(const fsdp_numbered_opts *opts, fsdp_checkpoint **checkpoint,
                               int64_t *named_out, fsdp_error *err)
{
    naming *work = fsdp_alloc(1, sizeof *work);
    *named_out = 0;
    if (!work)
        return fsdp_fail_memory(err, "the parameters of an optimizer");
    work->opts = opts;
    work->sd = (*checkpoint)->manifest.sd;
    fsdp_status st = fsdp_parts_find(work->sd, opts->known, NULL, &work->parts, err);
    bool is_numbered = st == FSDP_OK && find_groups(work);
    if (is_numbered)
        st = list_parameters(work, err);
    if (st == FSDP_OK && is_numbered && work->parameter_count > 0) {
        st = name_all(work, err);
        *named_out = st == FSDP_OK ? (int64_t)work->total : 0;
        if (st == FSDP_ERR_USAGE && opts->may_stay)
            st = FSDP_OK;
    }
    if (*named_out > 0)
        st = rename_all(work, checkpoint, err);
    fsdp_arena_release(&work->arena);
    fsdp_sd_free(work->places);
    fsdp_free(work);
    return st;
}
