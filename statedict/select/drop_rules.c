/* Parses the arguments of --drop and applies them: see drop_rules.h. */
#include "statedict/select/drop_rules.h"

#include "base/core/mem.h"
#include "base/data/value_internal.h"
#include "statedict/select/expression.h"
#include "statedict/select/tensor_kinds.h"

#include <string.h>

typedef struct drop_rule {
    enum {
        DROP_VALUES,
        DROP_OPAQUE,
        DROP_OPTIM,
        DROP_DTYPE,
        DROP_TENSORS,
        DROP_METADATA,
        DROP_NAMES
    } kind;
    fsdp_dtype dtype;
    const char *tensor_kind; /* see tensor_kinds.h */
    regex_t expression;      /* DROP_NAMES, DROP_METADATA */
} drop_rule;

struct fsdp_drop_rules {
    const fsdp_select_opts *opts;
    drop_rule *items;
    size_t count;
};

static const char metadata_word[] = "metadata";

bool fsdp_drop_is_of_metadata(const char *drop)
{
    const size_t size = sizeof metadata_word - 1;
    return strncmp(drop, metadata_word, size) == 0 && (drop[size] == ':' || drop[size] == '\0');
}

/* The expression of "metadata:REGEX"; "metadata" takes all. */
static const char *metadata_expression(const char *drop)
{
    const char *colon = drop + sizeof metadata_word - 1;
    return *colon ? colon + 1 : "";
}

static fsdp_status parse_drop(const char *text, drop_rule *rule, fsdp_error *err)
{
    static const char *const words[] = {"values", "opaque", "optim"};
    for (int i = 0; i < 3; i++) {
        rule->kind = i == 0 ? DROP_VALUES : i == 1 ? DROP_OPAQUE : DROP_OPTIM;
        if (strcmp(text, words[i]) == 0)
            return FSDP_OK;
    }
    if (strncmp(text, FSDP_DROP_DTYPE, strlen(FSDP_DROP_DTYPE)) == 0) {
        rule->kind = DROP_DTYPE;
        rule->dtype = fsdp_dtype_from_typed(text + 6, strlen(text + 6));
        return rule->dtype != FSDP_DTYPE_NONE
                   ? FSDP_OK
                   : fsdp_fail(err, FSDP_ERR_USAGE, "no dtype is named '%.40s'", text + 6);
    }
    if (strncmp(text, FSDP_DROP_TENSORS, strlen(FSDP_DROP_TENSORS)) == 0) {
        rule->kind = DROP_TENSORS;
        rule->tensor_kind = fsdp_tensor_kind_named(text + strlen(FSDP_DROP_TENSORS));
        return rule->tensor_kind
                   ? FSDP_OK
                   : fsdp_fail(err, FSDP_ERR_USAGE,
                               "--drop '%.60s' names no kind of tensors; known are %s", text,
                               fsdp_tensor_kinds());
    }
    bool is_metadata = fsdp_drop_is_of_metadata(text);
    FSDP_TRY(fsdp_expression_compile(is_metadata ? metadata_expression(text) : text, REG_NOSUB,
                                     &rule->expression, err));
    rule->kind = is_metadata ? DROP_METADATA : DROP_NAMES;
    return FSDP_OK;
}

fsdp_status fsdp_drop_rules_create(const fsdp_select_opts *opts, fsdp_drop_rules **rules_out,
                                   fsdp_error *err)
{
    FSDP_TRY(fsdp_expressions_check(opts->drops, opts->drop_count, "--drop", err));
    fsdp_drop_rules *rules = fsdp_alloc(1, sizeof *rules);
    fsdp_status st = FSDP_OK;
    if (rules)
        *rules = (fsdp_drop_rules){.opts = opts,
                                   .items = fsdp_alloc(opts->drop_count, sizeof *rules->items)};
    if (!rules || !rules->items)
        st = fsdp_fail_memory(err, "rules");
    while (st == FSDP_OK && rules->count < opts->drop_count) {
        st = parse_drop(opts->drops[rules->count], &rules->items[rules->count], err);
        rules->count += st == FSDP_OK;
    }
    if (st != FSDP_OK) {
        fsdp_drop_rules_free(rules);
        return st;
    }
    *rules_out = rules;
    return FSDP_OK;
}

void fsdp_drop_rules_free(fsdp_drop_rules *rules)
{
    if (!rules)
        return;
    for (size_t i = 0; i < rules->count; i++)
        if (rules->items[i].kind == DROP_NAMES || rules->items[i].kind == DROP_METADATA)
            regfree(&rules->items[i].expression);
    fsdp_free(rules->items);
    fsdp_free(rules);
}

/* --drop values keeps tensors that a source lists as values (tensor_kinds.h). */
static bool takes(const drop_rule *rule, const fsdp_droppable *what)
{
    const fsdp_entry *entry = what->entry;
    bool is_value = entry->kind == FSDP_ENTRY_VALUE && !what->tensor_kind;
    switch (rule->kind) {
    case DROP_VALUES: return is_value && !fsdp_value_holds_tensor(&entry->value);
    case DROP_OPAQUE: return is_value && fsdp_value_is_opaque(&entry->value);
    case DROP_OPTIM: return what->is_optim;
    case DROP_DTYPE: return what->dtype == rule->dtype;
    case DROP_TENSORS: return what->tensor_kind == rule->tensor_kind;
    case DROP_METADATA: return false;
    case DROP_NAMES: break;
    }
    return fsdp_expression_matches(&rule->expression, entry->name, entry->name_size);
}

bool fsdp_drop_rules_take(const fsdp_drop_rules *rules, const fsdp_droppable *what)
{
    for (size_t i = 0; i < rules->count; i++)
        if (takes(&rules->items[i], what))
            return true;
    return false;
}

bool fsdp_drop_rules_take_metadata(const fsdp_drop_rules *rules, const char *key, size_t size)
{
    for (size_t i = 0; i < rules->count; i++)
        if (rules->items[i].kind == DROP_METADATA &&
            fsdp_expression_matches(&rules->items[i].expression, key, size))
            return true;
    return false;
}

static bool matches_some(const fsdp_sd *sd, const regex_t *expression)
{
    for (size_t i = 0; i < fsdp_sd_count(sd); i++) {
        const fsdp_entry *entry = fsdp_sd_at(sd, i);
        if (fsdp_expression_matches(expression, entry->name, entry->name_size))
            return true;
    }
    return false;
}

fsdp_status fsdp_drop_rules_check(const fsdp_drop_rules *rules, const fsdp_sd *sd, fsdp_error *err)
{
    for (size_t i = 0; i < rules->count; i++)
        if (rules->items[i].kind == DROP_NAMES && !matches_some(sd, &rules->items[i].expression))
            return fsdp_fail(err, FSDP_ERR_USAGE,
                             "--drop '%.200s' matches no name; fsdp-ls lists them",
                             rules->opts->drops[i]);
    return FSDP_OK;
}

static bool matches_some_key(const fsdp_text_pairs *metadata, const regex_t *expression)
{
    for (size_t i = 0; i < metadata->count; i++)
        if (fsdp_expression_matches(expression, metadata->items[i].key,
                                    metadata->items[i].key_size))
            return true;
    return false;
}

fsdp_status fsdp_drop_rules_check_metadata(const fsdp_drop_rules *rules,
                                           const fsdp_text_pairs *metadata, fsdp_error *err)
{
    for (size_t i = 0; i < rules->count; i++)
        if (rules->items[i].kind == DROP_METADATA &&
            !matches_some_key(metadata, &rules->items[i].expression))
            return fsdp_fail(
                err, FSDP_ERR_USAGE,
                "--drop '%.200s' matches no key of the metadata; fsdp-ls --json lists them",
                rules->opts->drops[i]);
    return FSDP_OK;
}
