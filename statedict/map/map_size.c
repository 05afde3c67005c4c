/*
 * Sizes of a map: expressions over numbers, which the user gives, the checkpoint holds as values, or
 * config.json has as members. See map.h.
 */
#include "statedict/map/map_rules.h"

#include <ctype.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { DEPTH_MOST = 16 };

/* An expression that is being read. */
typedef struct size_reader {
    const map_sizes *sizes;
    const char *at;
    int depth; /* of parentheses */
} size_reader;

static fsdp_status read_sum(size_reader *reader, int64_t *value_out, fsdp_error *err);

/* --- names ---------------------------------------------------------------------------------------- */

static bool given_number(const fsdp_map_call *call, const char *name, size_t size,
                         int64_t *value_out)
{
    for (size_t i = 0; i < call->given_count; i++) {
        const char *given = call->given[i];
        if (strncmp(given, name, size) == 0 && given[size] == '=') {
            *value_out = strtoll(given + size + 1, NULL, 10);
            return true;
        }
    }
    return false;
}

/* A whole number among the values, or true as 1. */
static bool stored_number(const fsdp_sd *sd, const char *name, size_t size, int64_t *value_out)
{
    int64_t entry = fsdp_sd_find(sd, name, size);
    const fsdp_entry *found = entry >= 0 ? fsdp_sd_at(sd, (size_t)entry) : NULL;
    if (!found || found->kind != FSDP_ENTRY_VALUE)
        return false;
    if (found->value.kind == FSDP_VALUE_BOOL)
        *value_out = found->value.as.boolean;
    else if (found->value.kind == FSDP_VALUE_I64)
        *value_out = found->value.as.i64;
    else
        return false;
    return true;
}

/* A whole number, or true as 1, of config.json, or else of its part for text. */
static bool config_number(const fsdp_config_file *config, const char *name, size_t size,
                          int64_t *value_out)
{
    char member[128];
    if (!config || size >= sizeof member)
        return false;
    snprintf(member, sizeof member, "%.*s", (int)size, name);
    const fsdp_value *objects[] = {&config->json, fsdp_config_at(&config->json, "text_config")};
    for (size_t i = 0; i < sizeof objects / sizeof *objects; i++) {
        const fsdp_value *value = fsdp_config_at(objects[i], member);
        const bool is_flag = value && value->kind == FSDP_VALUE_BOOL;
        if (is_flag || (value && value->kind == FSDP_VALUE_I64)) {
            *value_out = is_flag ? value->as.boolean : value->as.i64;
            return true;
        }
    }
    return false;
}

static const map_size *find_size(const map_sizes *sizes, const char *name, size_t size)
{
    for (size_t i = 0; i < sizes->count; i++)
        if (strlen(sizes->sizes[i].name) == size && memcmp(sizes->sizes[i].name, name, size) == 0)
            return &sizes->sizes[i];
    return NULL;
}

/* The first of the sources that is known. */
static bool first_known(const map_sizes *sizes, const map_size *size, int64_t *value_out)
{
    for (const char *source = size->sources; source;) {
        size_reader inner = {.sizes = sizes, .at = source};
        if (read_sum(&inner, value_out, NULL) == FSDP_OK && (*inner.at == '\0' || *inner.at == '|'))
            return true;
        source = strchr(source, '|');
        source = source ? source + 1 : NULL;
    }
    return false;
}

/* Each size is computed once: sizes of sizes of sizes would take forever. */
static fsdp_status compute_size(const map_sizes *sizes, const map_size *size, int64_t *value_out,
                                fsdp_error *err)
{
    map_size_value *known = &sizes->values[size - sizes->sizes];
    if (known->state == MAP_SIZE_BUSY)
        return fsdp_fail(err, FSDP_ERR_USAGE, "size '%s' refers to itself", size->name);
    if (known->state == MAP_SIZE_NEW) {
        known->state = MAP_SIZE_BUSY;
        bool is_known = first_known(sizes, size, &known->value);
        known->state = is_known ? MAP_SIZE_KNOWN : MAP_SIZE_UNKNOWN;
    }
    *value_out = known->value;
    return known->state == MAP_SIZE_KNOWN
               ? FSDP_OK
               : fsdp_fail(err, FSDP_ERR_USAGE,
                           "the size '%s' is unknown: neither the checkpoint nor a config.json has "
                           "%s; give it with --size %s=NUMBER",
                           size->name, size->sources, size->name);
}

static fsdp_status compute_name(const map_sizes *sizes, const char *name, size_t size,
                                int64_t *value_out, fsdp_error *err)
{
    if (given_number(sizes->call, name, size, value_out))
        return FSDP_OK;
    const map_size *known = find_size(sizes, name, size);
    if (known)
        return compute_size(sizes, known, value_out, err);
    if (stored_number(sizes->sd, name, size, value_out) ||
        config_number(sizes->call->config, name, size, value_out))
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_USAGE,
                     "the number '%.*s' is unknown; give it with --size %.*s=NUMBER", (int)size,
                     name, (int)size, name);
}

/* --- expressions ---------------------------------------------------------------------------------- */

static fsdp_status refuse(const size_reader *reader, const char *why, fsdp_error *err)
{
    return fsdp_fail(err, FSDP_ERR_USAGE, "%s at '%.40s'", why, reader->at);
}

static void skip_spaces(size_reader *reader)
{
    while (*reader->at == ' ')
        reader->at++;
}

static bool take(size_reader *reader, char wanted)
{
    skip_spaces(reader);
    bool is_there = *reader->at == wanted;
    reader->at += is_there;
    return is_there;
}

/* up(A,B) */
static fsdp_status read_round_up(size_reader *reader, int64_t *value_out, fsdp_error *err)
{
    int64_t value, unit, sum;
    if (++reader->depth > DEPTH_MOST)
        return refuse(reader, "there are too many parentheses", err);
    FSDP_TRY(read_sum(reader, &value, err));
    if (!take(reader, ','))
        return refuse(reader, "a ',' is missing", err);
    FSDP_TRY(read_sum(reader, &unit, err));
    if (!take(reader, ')'))
        return refuse(reader, "a ')' is missing", err);
    if (unit <= 0 || value < 0 || fsdp_add_overflow(value, unit - 1, &sum))
        return refuse(reader, "a number cannot be rounded up", err);
    *value_out = sum / unit * unit;
    reader->depth--;
    return FSDP_OK;
}

/* dim(NAME,D): the size of a dim of a tensor of the checkpoint */
static fsdp_status read_dim(size_reader *reader, int64_t *value_out, fsdp_error *err)
{
    skip_spaces(reader);
    const char *name = reader->at;
    size_t size = strspn(name, MAP_NAME_LETTERS);
    reader->at += size;
    if (!take(reader, ','))
        return refuse(reader, "a ',' is missing", err);
    skip_spaces(reader);
    int dim = isdigit((unsigned char)*reader->at) ? *reader->at++ - '0' : FSDP_MAX_DIMS;
    if (!take(reader, ')'))
        return refuse(reader, "a ')' is missing", err);
    const fsdp_sd *sd = reader->sizes->sd;
    int64_t entry = fsdp_sd_find(sd, name, size);
    const fsdp_entry *found = entry >= 0 ? fsdp_sd_at(sd, (size_t)entry) : NULL;
    if (!found || found->kind != FSDP_ENTRY_TENSOR || dim >= found->ndim)
        return fsdp_fail(err, FSDP_ERR_USAGE, "there is no tensor '%.*s' with dim %d", (int)size,
                         name, dim);
    *value_out = found->shape[dim];
    return FSDP_OK;
}

static fsdp_status read_atom(size_reader *reader, int64_t *value_out, fsdp_error *err)
{
    skip_spaces(reader);
    const char *start = reader->at;
    if (isdigit((unsigned char)*start)) {
        size_t digits = strspn(start, "0123456789");
        if (digits > MAP_SIZE_DIGITS)
            return refuse(reader, "the number is too large", err);
        *value_out = strtoll(start, NULL, 10);
        reader->at += digits;
        return FSDP_OK;
    }
    if (take(reader, '(')) {
        if (++reader->depth > DEPTH_MOST)
            return refuse(reader, "there are too many parentheses", err);
        FSDP_TRY(read_sum(reader, value_out, err));
        reader->depth--;
        return take(reader, ')') ? FSDP_OK : refuse(reader, "a ')' is missing", err);
    }
    size_t size = strspn(start, MAP_NAME_LETTERS);
    if (size == 0)
        return refuse(reader, "a number is missing", err);
    reader->at += size;
    if (size == 2 && memcmp(start, "up", 2) == 0 && take(reader, '('))
        return read_round_up(reader, value_out, err);
    if (size == 3 && memcmp(start, "dim", 3) == 0 && take(reader, '('))
        return read_dim(reader, value_out, err);
    return compute_name(reader->sizes, start, size, value_out, err);
}

static fsdp_status divide(const size_reader *reader, char sign, int64_t *value, int64_t by,
                          fsdp_error *err)
{
    if (by <= 0 || *value < 0)
        return refuse(reader, "a division by a number that is not positive", err);
    *value = sign == '/' ? *value / by : *value % by;
    return FSDP_OK;
}

static fsdp_status read_product(size_reader *reader, int64_t *value_out, fsdp_error *err)
{
    int64_t right;
    FSDP_TRY(read_atom(reader, value_out, err));
    for (;;) {
        skip_spaces(reader);
        char sign = *reader->at;
        if (sign != '*' && sign != '/' && sign != '%')
            return FSDP_OK;
        reader->at++;
        FSDP_TRY(read_atom(reader, &right, err));
        if (sign != '*')
            FSDP_TRY(divide(reader, sign, value_out, right, err));
        else if (fsdp_mul_overflow(*value_out, right, value_out))
            return refuse(reader, "a product is too large", err);
    }
}

static fsdp_status read_sum(size_reader *reader, int64_t *value_out, fsdp_error *err)
{
    int64_t right;
    FSDP_TRY(read_product(reader, value_out, err));
    for (;;) {
        skip_spaces(reader);
        char sign = *reader->at;
        if (sign != '+' && sign != '-')
            return FSDP_OK;
        reader->at++;
        FSDP_TRY(read_product(reader, &right, err));
        if (right == INT64_MIN ||
            fsdp_add_overflow(*value_out, sign == '+' ? right : -right, value_out))
            return refuse(reader, "a sum is too large", err);
    }
}

fsdp_status map_sizes_compute(const map_sizes *sizes, const char *expression, int64_t *value_out,
                              fsdp_error *err)
{
    size_reader reader = {.sizes = sizes, .at = expression};
    FSDP_TRY(read_sum(&reader, value_out, err));
    skip_spaces(&reader);
    if (*reader.at != '\0')
        return refuse(&reader, "the expression does not end", err);
    if (*value_out < 0)
        return fsdp_fail(err, FSDP_ERR_USAGE, "'%s' is %" PRId64 ", which is not a size",
                         expression, *value_out);
    return FSDP_OK;
}
