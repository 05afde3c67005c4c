/* The rules of --dtype and --dtype-for: see cast_rules.h. */
#include "statedict/select/cast_rules.h"

#include "base/core/mem.h"
#include "statedict/select/expression.h"

#include "base/text.h"
#include <string.h>

/* One --dtype-for. */
typedef struct cast_rule {
    regex_t expression;
    fsdp_dtype dtype; /* NONE: keep */
} cast_rule;

struct fsdp_cast_rules {
    fsdp_dtype model; /* NONE: keep */
    cast_rule *items;
    size_t count;
};

static bool is_castable(fsdp_dtype dtype)
{
    const fsdp_dtype_info *info = fsdp_dtype_describe(dtype);
    return info && info->is_float;
}

const char *fsdp_castable_at(size_t i)
{
    for (int dtype = 1; dtype < FSDP_DTYPE_COUNT; dtype++)
        if (is_castable((fsdp_dtype)dtype) && i-- == 0)
            return fsdp_dtype_name((fsdp_dtype)dtype);
    return NULL;
}

/* --- reading ---------------------------------------------------------------------------------- */

/* "Q4_K_M", "iq2_xs": names of llama.cpp for files of several types of blocks. */
static bool is_mixture(const char *text)
{
    text += *text == 'i' || *text == 'I';
    return (*text == 'q' || *text == 'Q') && text[1] >= '1' && text[1] <= '8';
}

static fsdp_status fail_dtype(const char *text, const char *option, fsdp_error *err)
{
    if (is_mixture(text))
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "%s: '%.40s' is not supported; did you mean 'q8_0' or 'q4_0' (--to gguf)? "
                         "llama-quantize of llama.cpp makes it from a GGUF file in bf16",
                         option, text);
    fsdp_text known = {0};
    for (size_t i = 0; fsdp_castable_at(i); i++)
        fsdp_text_addf(&known, ", %s", fsdp_castable_at(i));
    fsdp_status st =
        fsdp_fail(err, FSDP_ERR_USAGE, "%s: '%.40s' is not a dtype to cast to; known are keep%.*s",
                  option, text, (int)known.size, known.data ? known.data : "");
    fsdp_text_release(&known);
    return st;
}

static fsdp_status parse_dtype(const char *text, const char *option, fsdp_dtype *dtype_out,
                               fsdp_error *err)
{
    bool keeps = strcmp(text, "keep") == 0;
    *dtype_out = keeps ? FSDP_DTYPE_NONE : fsdp_dtype_from_typed(text, strlen(text));
    if (keeps || is_castable(*dtype_out))
        return FSDP_OK;
    return fail_dtype(text, option, err);
}

/* "RE=T"; an expression may hold a '='. */
static fsdp_status parse_rule(const char *text, cast_rule *rule, fsdp_error *err)
{
    const char *sign = strrchr(text, '=');
    if (!sign)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "--dtype-for '%.80s' has no '='; a rule is REGEX=DTYPE, such as "
                         "'norm=f32'",
                         text);
    FSDP_TRY(parse_dtype(sign + 1, "--dtype-for", &rule->dtype, err));
    char *expression = fsdp_strndup(text, (size_t)(sign - text));
    if (!expression)
        return fsdp_fail_memory(err, "rules");
    fsdp_status st = fsdp_expression_compile(expression, REG_NOSUB, &rule->expression, err);
    fsdp_free(expression);
    return st;
}

static fsdp_status parse_all(const fsdp_select_opts *opts, fsdp_cast_rules *rules, fsdp_error *err)
{
    rules->items = fsdp_alloc(opts->dtype_rule_count, sizeof *rules->items);
    if (!rules->items)
        return fsdp_fail_memory(err, "rules");
    if (opts->dtype)
        FSDP_TRY(parse_dtype(opts->dtype, "--dtype", &rules->model, err));
    for (; rules->count < opts->dtype_rule_count; rules->count++)
        FSDP_TRY(parse_rule(opts->dtype_rules[rules->count], &rules->items[rules->count], err));
    return FSDP_OK;
}

fsdp_status fsdp_cast_rules_create(const fsdp_select_opts *opts, fsdp_cast_rules **rules_out,
                                   fsdp_error *err)
{
    FSDP_TRY(fsdp_expressions_check(opts->dtype_rules, opts->dtype_rule_count, "--dtype-for", err));
    fsdp_cast_rules *rules = fsdp_alloc(1, sizeof *rules);
    if (!rules)
        return fsdp_fail_memory(err, "rules");
    fsdp_status st = parse_all(opts, rules, err);
    if (st == FSDP_OK)
        *rules_out = rules;
    else
        fsdp_cast_rules_free(rules);
    return st;
}

void fsdp_cast_rules_free(fsdp_cast_rules *rules)
{
    if (!rules)
        return;
    for (size_t i = 0; i < rules->count; i++)
        regfree(&rules->items[i].expression);
    fsdp_free(rules->items);
    fsdp_free(rules);
}

/* --- deciding --------------------------------------------------------------------------------- */

/* A packed or quantized float: --dtype applies to it, although casts do not support it, so the
 * rule must fail. */
static bool is_packed_float(fsdp_dtype dtype)
{
    const fsdp_dtype_info *info = fsdp_dtype_describe(dtype);
    return (info && info->values > 1) || dtype == FSDP_F4_E2M1FN_X2 || dtype == FSDP_F6_E2M3 ||
           dtype == FSDP_F6_E3M2;
}

fsdp_dtype fsdp_cast_rules_decide(const fsdp_cast_rules *rules, const char *name, size_t name_size,
                                  fsdp_dtype dtype, bool is_optim)
{
    fsdp_dtype wanted = rules->model;
    for (size_t i = 0; i < rules->count; i++) {
        if (!fsdp_expression_matches(&rules->items[i].expression, name, name_size))
            continue;
        wanted = rules->items[i].dtype;
        return wanted == FSDP_DTYPE_NONE || wanted == dtype ? dtype
               : is_castable(dtype)                         ? wanted
                                                            : FSDP_DTYPE_NONE;
    }
    if (wanted == FSDP_DTYPE_NONE || is_optim)
        return dtype;
    return is_castable(dtype) ? wanted : is_packed_float(dtype) ? FSDP_DTYPE_NONE : dtype;
}
