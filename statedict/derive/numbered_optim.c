/* Names for the parameters that an optimizer numbers: see numbered_optim.h. */
#include "statedict/derive/numbered_optim.h"

#include "base/data/name_path.h"
#include "base/data/param_groups.h"
#include "base/data/value_internal.h"
#include "base/text.h"
#include "statedict/derive/derived_checkpoint.h"
#include "statedict/select/parameter_order.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

enum { GROUPS_MOST = 4096 };
static const char state_word[] = "state.";

typedef struct naming {
    const fsdp_numbered_opts *opts;
    const fsdp_sd *sd;
    fsdp_parts parts;
    fsdp_arena arena;
    const char *prefix; /* of the optimizer: "optim." */
    size_t prefix_size;
    fsdp_param_groups groups;
    size_t total;               /* parameters of all groups: each has a place among them */
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
                     "'%s' numbers its %zu parameters, but %s; leave the optimizer out with --only "
                     "model, or keep the numbers with --names keep",
                     shown, work->total, why);
}

static bool begins(const char *name, size_t size, const char *word)
{
    return size > strlen(word) && memcmp(name, word, strlen(word)) == 0;
}

/* --- the groups ---------------------------------------------------------------------------------- */

/* Reads the lists that tell the parameters of groups: "optim.param_groups.0.params" and "param_names", which
 * optimizers have that were made from named parameters. */
static fsdp_status read_groups(naming *work, fsdp_error *err)
{
    for (size_t i = 0; i < fsdp_sd_count(work->sd); i++) {
        const fsdp_entry *entry = fsdp_sd_at(work->sd, i);
        fsdp_group_source from = {.name = entry->name,
                                  .spelling = FSDP_GROUPS_PLACES,
                                  .value = &entry->value,
                                  .entry = i};
        const fsdp_group_name *parts = &from.parts;
        if (entry->kind != FSDP_ENTRY_VALUE || entry->value.kind != FSDP_VALUE_LIST ||
            !fsdp_group_name_split(entry->name, entry->name_size, &from.parts) ||
            !fsdp_path_is_number(entry->name + parts->key, parts->key_size))
            continue;
        const char *option = entry->name + parts->option;
        if (fsdp_bytes_are(option, parts->option_size, "params") ||
            fsdp_bytes_are(option, parts->option_size, "param_names"))
            FSDP_TRY(fsdp_groups_read(&work->groups, &from, err));
    }
    fsdp_groups_sort(&work->groups);
    return FSDP_OK;
}

/* Returns false unless the groups are those of one optimizer, which numbers its parameters. */
static bool count_numbers(naming *work)
{
    const fsdp_param_group *first = work->groups.items;
    for (size_t g = 0; g < work->groups.count; g++) {
        const fsdp_param_group *group = &work->groups.items[g];
        if (g == GROUPS_MOST || group->place != g || !group->is_listed ||
            group->prefix_size != first->prefix_size ||
            memcmp(group->prefix, first->prefix, first->prefix_size) != 0)
            return false;
        for (const fsdp_group_item *one = group->params.first; one; one = one->next)
            if (one->name ||
                (one->value->kind != FSDP_VALUE_I64 && one->value->kind != FSDP_VALUE_U64))
                return false;
        work->prefix = group->prefix;
        work->prefix_size = group->prefix_size;
        work->total += group->params.count;
    }
    return work->total > 0;
}

/* Each number once. */
static fsdp_status place_numbers(naming *work, fsdp_error *err)
{
    char text[24];
    size_t next = 0;
    FSDP_TRY(fsdp_sd_create(&work->places, err));
    for (size_t g = 0; g < work->groups.count; g++) {
        const fsdp_group_item *one = work->groups.items[g].params.first;
        for (; one; one = one->next) {
            const fsdp_value place = fsdp_value_u64(next++);
            int size = snprintf(text, sizeof text, "%" PRId64, one->value->as.i64);
            if (fsdp_sd_find(work->places, text, (size_t)size) >= 0)
                return refuse(work, "a number appears twice", err);
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
    size_t at = 0, end = 0;
    if (work->groups.count > 2 || work->parameter_count != work->total)
        return false;
    for (size_t group = 0; group < work->groups.count; group++) {
        for (size_t i = 0; i < work->parameter_count; i++) {
            const fsdp_parameter *parameter = &work->parameters[i];
            if (work->groups.count == 1 || is_second(work, parameter) == (group == 1))
                named[at++] = parameter;
        }
        end += work->groups.items[group].params.count;
        if (at != end)
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
    fsdp_text_addf(&why,
                   "'%s' does not have the shape of '%s', which has its number by their order",
                   fsdp_printable(entry->name, entry->name_size, shown, sizeof shown),
                   fsdp_printable(named[place]->name, named[place]->size, name, sizeof name));
    fsdp_status st = why.failed ? fsdp_fail_memory(err, "a message") : refuse(work, why.data, err);
    fsdp_text_release(&why);
    return st;
}

static fsdp_status refuse_count(const naming *work, fsdp_error *err)
{
    char why[200];
    if (work->parameter_count == work->total && work->groups.count > 2)
        snprintf(why, sizeof why, "has %zu groups, whose parameters cannot be told apart",
                 work->groups.count);
    else
        snprintf(why, sizeof why, "the model has %zu, or different ones in its groups",
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

/* The names in "param_names" of a group; NULL: it is not there for each parameter. */
static const fsdp_value *names_of_group(const fsdp_param_group *group)
{
    const fsdp_group_item *option = fsdp_group_option(group, "param_names", 11);
    bool fits = option && option->value->as.list.count == group->params.count;
    for (size_t i = 0; fits && i < option->value->as.list.count; i++)
        fits = option->value->as.list.items[i].kind == FSDP_VALUE_STRING;
    return fits ? option->value : NULL;
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
                        : refuse(work, "a name in 'param_names' is not a name of the model", err);
}

/* Names that the groups have. named stays NULL where they have none. */
static fsdp_status name_by_names(naming *work, fsdp_error *err)
{
    const fsdp_parameter **named = fsdp_arena_alloc(&work->arena, work->total, sizeof *named);
    if (!named)
        return fsdp_fail_memory(err, "the parameters of an optimizer");
    size_t at = 0;
    for (size_t g = 0; g < work->groups.count; g++) {
        const fsdp_value *names = names_of_group(&work->groups.items[g]);
        if (!names)
            return FSDP_OK;
        for (size_t i = 0; i < names->as.list.count; i++)
            FSDP_TRY(find_parameter(work, &names->as.list.items[i], &named[at++], err));
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

/* Adds the list of a group with names in place of numbers. first: the place of its first parameter. */
static fsdp_status add_params(const naming *work, fsdp_derivation *derivation,
                              const fsdp_param_group *group, size_t first, fsdp_error *err)
{
    const fsdp_entry *entry = fsdp_sd_at(work->sd, group->listed);
    fsdp_value list = {0};
    fsdp_status st = fsdp_value_set_items(&list, FSDP_VALUE_LIST, group->params.count, err);
    for (size_t i = 0; st == FSDP_OK && i < list.as.list.count; i++) {
        const fsdp_parameter *parameter = work->named[first + i];
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
    const fsdp_param_group *group, *end = work->groups.items + work->groups.count;
    size_t place, kind;
    for (size_t i = 0; i < fsdp_sd_count(work->sd); i++) {
        size_t first = 0;
        for (group = work->groups.items; group < end && group->listed != i; group++)
            first += group->params.count;
        if (group < end)
            FSDP_TRY(add_params(work, derivation, group, first, err));
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
    if (st == FSDP_OK)
        st = read_groups(work, err);
    bool is_numbered = st == FSDP_OK && count_numbers(work);
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
    fsdp_groups_release(&work->groups);
    fsdp_sd_free(work->places);
    fsdp_free(work);
    return st;
}
