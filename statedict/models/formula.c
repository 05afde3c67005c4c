/* Formulas of descriptions of models: see formula.h. A recursive descent over the text. */
#include "statedict/models/formula.h"

#include "base/text.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct formula {
    const fsdp_config *config;
    const char *at;
    int64_t layer;
    bool skips; /* after a condition that decided: values do not count, and may make no sense */
} formula;

static fsdp_status either(formula *f, int64_t *out, fsdp_error *err);

static bool take(formula *f, const char *sign)
{
    size_t size = strlen(sign);
    while (*f->at == ' ')
        f->at++;
    if (strncmp(f->at, sign, size) != 0)
        return false;
    f->at += size;
    return true;
}

static bool is_name(char c)
{
    return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '_' || c == '$';
}

static bool ends_with(const char *text, const char *end, size_t size)
{
    size_t n = text ? strlen(text) : 0;
    return n >= size && memcmp(text + n - size, end, size) == 0;
}

static const fsdp_config_value *find_value(const fsdp_config *config, const char *name, size_t size)
{
    for (size_t i = 0; i < config->count; i++)
        if (fsdp_bytes_are(name, size, config->values[i].name))
            return config->values[i].is_there ? &config->values[i] : NULL;
    return NULL;
}

/* --- atoms -------------------------------------------------------------------------------------- */

static fsdp_status member(formula *f, const char *name, size_t size, int64_t *out, fsdp_error *err)
{
    const fsdp_config_value *value = find_value(f->config, name, size);
    const fsdp_config_member *known = fsdp_architecture_member(f->config->architecture, name, size);
    if (size == 5 && memcmp(name, "layer", size) == 0)
        *out = f->layer;
    else if (f->skips)
        *out = 1;
    else if (value)
        *out = value->number;
    else if (!known || !known->otherwise || !fsdp_member_is_whole(known))
        return fsdp_fail(err, FSDP_ERR_USAGE, "'%s' has no member '%.*s'", f->config->path,
                         (int)size, name);
    else
        return fsdp_formula_compute(f->config, known->otherwise, f->layer, out, err);
    return FSDP_OK;
}

static fsdp_status atom(formula *f, int64_t *out, fsdp_error *err)
{
    if (take(f, "!")) {
        FSDP_TRY(atom(f, out, err));
        *out = !*out;
        return FSDP_OK;
    }
    if (take(f, "(")) {
        FSDP_TRY(either(f, out, err));
        (void)take(f, ")");
        return FSDP_OK;
    }
    if (take(f, "'")) {
        size_t size = strcspn(f->at, "'");
        *out = f->config->any_class || ends_with(f->config->class_name, f->at, size);
        f->at += size + 1;
        return FSDP_OK;
    }
    const char *name = f->at;
    while (is_name(*f->at))
        f->at++;
    if (*name >= '0' && *name <= '9') {
        long long number = 0;
        (void)sscanf(name, "%lld", &number);
        *out = number;
        return FSDP_OK;
    }
    return member(f, name, (size_t)(f->at - name), out, err);
}

/* --- operators, the tightest first -------------------------------------------------------------- */

static fsdp_status fail_number(const formula *f, const char *what, fsdp_error *err)
{
    return fsdp_fail(err, FSDP_ERR_USAGE, "the members of '%s' contradict one another: %s",
                     f->config->path, what);
}

static fsdp_status product(formula *f, int64_t *out, fsdp_error *err)
{
    FSDP_TRY(atom(f, out, err));
    for (;;) {
        int64_t right;
        char sign = take(f, "*") ? '*' : take(f, "/") ? '/' : take(f, "%") ? '%' : 0;
        if (!sign)
            return FSDP_OK;
        FSDP_TRY(atom(f, &right, err));
        if (f->skips)
            right = *out = 1;
        if (sign != '*' && right <= 0)
            return fail_number(f, "a divisor is 0 or less", err);
        if (sign == '*' && fsdp_mul_overflow(*out, right, out))
            return fail_number(f, "a size is too large", err);
        if (sign != '*')
            *out = sign == '/' ? *out / right : *out % right;
    }
}

static fsdp_status sum(formula *f, int64_t *out, fsdp_error *err)
{
    FSDP_TRY(product(f, out, err));
    for (;;) {
        int64_t right;
        char sign = take(f, "+") ? '+' : take(f, "-") ? '-' : 0;
        if (!sign)
            return FSDP_OK;
        FSDP_TRY(product(f, &right, err));
        if (sign == '-' && fsdp_mul_overflow(right, -1, &right))
            return fail_number(f, "a size is too large", err);
        if (fsdp_add_overflow(*out, right, out))
            return fail_number(f, "a size is too large", err);
    }
}

static int compare_numbers(const void *a, const void *b)
{
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

void fsdp_formula_sort(fsdp_config_value *list)
{
    if (list->number > 1)
        qsort(list->items, (size_t)list->number, sizeof *list->items, compare_numbers);
}

static bool is_listed(const formula *f, const char *name, size_t size, int64_t number)
{
    const fsdp_config_value *list = find_value(f->config, name, size);
    return list && list->items && list->number > 0 &&
           bsearch(&number, list->items, (size_t)list->number, sizeof number, compare_numbers);
}

static fsdp_status relation(formula *f, int64_t *out, fsdp_error *err)
{
    int64_t right;
    FSDP_TRY(sum(f, out, err));
    if (take(f, "in ")) {
        const char *name = f->at;
        while (is_name(*f->at))
            f->at++;
        *out = is_listed(f, name, (size_t)(f->at - name), *out);
        return FSDP_OK;
    }
    char sign = take(f, "==") ? '=' : take(f, "!=") ? '!' : take(f, ">") ? '>' : 0;
    if (!sign)
        return FSDP_OK;
    FSDP_TRY(sum(f, &right, err));
    *out = sign == '=' ? *out == right : sign == '!' ? *out != right : *out > right;
    return FSDP_OK;
}

/* Like Python, ignores the right side where the left one decides: it may divide by 0. */
static fsdp_status both(formula *f, int64_t *out, fsdp_error *err)
{
    bool skipped = f->skips;
    FSDP_TRY(relation(f, out, err));
    while (take(f, "&&")) {
        int64_t right;
        f->skips = f->skips || !*out;
        FSDP_TRY(relation(f, &right, err));
        *out = *out && right;
    }
    f->skips = skipped;
    return FSDP_OK;
}

static fsdp_status either(formula *f, int64_t *out, fsdp_error *err)
{
    FSDP_TRY(both(f, out, err));
    while (take(f, "||")) {
        int64_t right;
        FSDP_TRY(both(f, &right, err));
        *out = *out || right;
    }
    return FSDP_OK;
}

/* --- the calls ---------------------------------------------------------------------------------- */

fsdp_status fsdp_formula_compute(const fsdp_config *config, const char *text, int64_t layer,
                                 int64_t *value_out, fsdp_error *err)
{
    formula f = {config, text, layer, false};
    return either(&f, value_out, err);
}

fsdp_status fsdp_formula_number(const fsdp_config *config, const char *text, int64_t layer,
                                double *number_out, fsdp_error *err)
{
    char *rest = NULL;
    int64_t whole = 0;
    *number_out = strtod(text, &rest);
    if (*rest == '\0')
        return FSDP_OK;
    FSDP_TRY(fsdp_formula_compute(config, text, layer, &whole, err));
    *number_out = (double)whole;
    return FSDP_OK;
}

fsdp_status fsdp_formula_next_dim(const fsdp_config *config, const char **shape_at, int64_t layer,
                                  int64_t *value_out, fsdp_error *err)
{
    formula f = {config, *shape_at, layer, false};
    FSDP_TRY(either(&f, value_out, err));
    *shape_at = take(&f, ",") ? f.at : NULL;
    return *value_out >= 0 ? FSDP_OK : fail_number(&f, "a size is negative", err);
}

bool fsdp_formula_names_class(const fsdp_config *config, const char *text)
{
    while ((text = strchr(text, '\'')) != NULL) {
        size_t size = strcspn(text + 1, "'");
        if (ends_with(config->class_name, text + 1, size))
            return true;
        text += size + 2;
    }
    return false;
}
