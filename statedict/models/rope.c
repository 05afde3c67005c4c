/* Rotary positions: see rope.h. */
#include "statedict/models/rope.h"

#include "statedict/models/config.h"

#include <math.h>
#include <string.h>

static const double two_pi = 6.283185307179586;

/* --- reading -------------------------------------------------------------------------------------- */

static const char *const types[FSDP_ROPE_OTHER] = {
    [FSDP_ROPE_DEFAULT] = "default",   [FSDP_ROPE_LINEAR] = "linear",
    [FSDP_ROPE_DYNAMIC] = "dynamic",   [FSDP_ROPE_YARN] = "yarn",
    [FSDP_ROPE_LONGROPE] = "longrope", [FSDP_ROPE_LLAMA3] = "llama3"};

static fsdp_status fail_kind(const char *path, const char *name, const char *kind, fsdp_error *err)
{
    return fsdp_fail(err, FSDP_ERR_DAMAGED, "'%s': %s is not %s", path, name, kind);
}

/* Finds the object that has the type, if there is one. */
static fsdp_status find_own(const fsdp_value *config, const char *path, fsdp_rope *rope,
                            const fsdp_value **own_out, fsdp_error *err)
{
    static const char *const members[] = {"rope_scaling", "rope_parameters"};
    *own_out = NULL;
    for (size_t i = 0; i < sizeof members / sizeof *members; i++) {
        const fsdp_value *object = fsdp_config_at(config, members[i]);
        if (object && object->kind != FSDP_VALUE_DICT)
            return fail_kind(path, members[i], "an object", err);
        if (*own_out || !object || object->as.list.count == 0)
            continue;
        *own_out = object;
        rope->member = members[i];
    }
    for (size_t i = 1; *own_out && i < (*own_out)->as.list.count; i += 2)
        rope->differs |= (*own_out)->as.list.items[i].kind == FSDP_VALUE_DICT;
    return FSDP_OK;
}

static fsdp_status read_type(const fsdp_value *own, const char *path, fsdp_rope *rope,
                             fsdp_error *err)
{
    const char *name = fsdp_config_at(own, "rope_type") ? "rope_type" : "type";
    rope->type = fsdp_config_word(own, name);
    if (!rope->type && fsdp_config_at(own, name))
        return fail_kind(path, name, "a text", err);
    if (!rope->type)
        rope->type = types[FSDP_ROPE_DEFAULT];
    while (rope->kind < FSDP_ROPE_OTHER && strcmp(rope->type, types[rope->kind]) != 0)
        rope->kind++;
    if (rope->kind < FSDP_ROPE_OTHER)
        rope->type = types[rope->kind];
    return FSDP_OK;
}

static fsdp_status read_numbers(const fsdp_value *config, const fsdp_value *own, const char *path,
                                fsdp_rope *rope, fsdp_error *err)
{
    const struct {
        const char *name;
        double *number;
        bool is_of_model; /* in transformers 4 it lies next to rope_scaling */
    } numbers[] = {{"rope_theta", &rope->theta, true},
                   {"partial_rotary_factor", &rope->partial_factor, true},
                   {"original_max_position_embeddings", &rope->original_context, true},
                   {"factor", &rope->factor, false},
                   {"low_freq_factor", &rope->low_freq_factor, false},
                   {"high_freq_factor", &rope->high_freq_factor, false},
                   {"attention_factor", &rope->attention_factor, false},
                   {"beta_fast", &rope->beta_fast, false},
                   {"beta_slow", &rope->beta_slow, false},
                   {"mscale", &rope->mscale, false},
                   {"mscale_all_dim", &rope->mscale_all_dim, false}};
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) {
        const char *name = numbers[i].name;
        const fsdp_value *object =
            numbers[i].is_of_model && !fsdp_config_at(own, name) ? config : own;
        const fsdp_value *value = fsdp_config_at(object, name);
        *numbers[i].number = NAN;
        if (value &&
            (value->kind == FSDP_VALUE_BOOL || !fsdp_config_real(object, name, numbers[i].number)))
            return fail_kind(path, name, "a number", err);
    }
    rope->truncate = NAN;
    if (fsdp_config_at(own, "truncate") && !fsdp_config_real(own, "truncate", &rope->truncate))
        return fail_kind(path, "truncate", "true or false", err);
    return FSDP_OK;
}

/* layers: NULL for those of all types. */
fsdp_status fsdp_rope_read_of(const fsdp_value *config, const char *layers, const char *path,
                              fsdp_rope *rope, fsdp_error *err)
{
    const fsdp_value *own;
    *rope = (fsdp_rope){.kind = FSDP_ROPE_DEFAULT};
    FSDP_TRY(find_own(config, path, rope, &own, err));
    if (layers && rope->differs) {
        own = fsdp_config_at(own, layers);
        rope->differs = false;
    }
    FSDP_TRY(read_type(own, path, rope, err));
    rope->short_factor = fsdp_config_at(own, "short_factor");
    rope->long_factor = fsdp_config_at(own, "long_factor");
    return read_numbers(config, own, path, rope, err);
}

fsdp_status fsdp_rope_read(const fsdp_value *config, const char *path, fsdp_rope *rope,
                           fsdp_error *err)
{
    return fsdp_rope_read_of(config, NULL, path, rope, err);
}

/* --- scaling -------------------------------------------------------------------------------------- */

/* Llama 3.1 divides long waves by the factor, leaves short ones, and blends those between. */
double fsdp_rope_divisor(const fsdp_rope *rope, double frequency)
{
    const double wave = two_pi / frequency;
    if (rope->kind == FSDP_ROPE_DEFAULT)
        return 1;
    if (rope->kind == FSDP_ROPE_LINEAR)
        return rope->factor;
    if (wave < rope->original_context / rope->high_freq_factor)
        return 1;
    if (wave > rope->original_context / rope->low_freq_factor)
        return rope->factor;
    const double smooth = (rope->original_context / wave - rope->low_freq_factor) /
                          (rope->high_freq_factor - rope->low_freq_factor);
    return 1 / ((1 - smooth) / rope->factor + smooth);
}

/* Returns the size of a head; 0: config.json does not tell. */
static double head_width(const fsdp_value *config)
{
    double width = 0, heads = 0, all = 0;
    if (fsdp_config_real(config, "head_dim", &width) && width > 0)
        return width;
    (void)fsdp_config_real(config, "num_attention_heads", &heads);
    (void)fsdp_config_real(config, "hidden_size", &all);
    return heads > 0 ? all / heads : 0;
}

fsdp_status fsdp_rope_divisors(const fsdp_rope *rope, const fsdp_value *config,
                               float divisors[FSDP_ROPE_MOST], int *count_out, fsdp_error *err)
{
    const struct {
        const char *name;
        double number;
    } needed[] = {{"factor", rope->factor},
                  {"low_freq_factor", rope->low_freq_factor},
                  {"high_freq_factor", rope->high_freq_factor},
                  {"original_max_position_embeddings", rope->original_context}};
    const double width = head_width(config), theta = rope->theta > 0 ? rope->theta : 10000;
    *count_out = 0;
    if (rope->kind != FSDP_ROPE_LLAMA3)
        return FSDP_OK;
    for (size_t i = 0; i < sizeof needed / sizeof *needed; i++)
        if (!(needed[i].number > 0))
            return fsdp_fail(err, FSDP_ERR_USAGE,
                             "config.json scales rotary frequencies as Llama 3.1 but has no '%s'",
                             needed[i].name);
    if (!(width >= 2 && width <= 2 * FSDP_ROPE_MOST))
        return fsdp_fail(err, FSDP_ERR_USAGE, "config.json does not give the size of a head");
    *count_out = (int)(width / 2);
    for (int i = 0; i < *count_out; i++)
        divisors[i] = (float)fsdp_rope_divisor(rope, pow(theta, -2 * i / width));
    return FSDP_OK;
}
