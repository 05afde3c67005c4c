/* Divisors of rotary frequencies: see rope_factors.h. */
#include "statedict/gguf_model/rope_factors.h"

#include "base/data/json.h"

#include <math.h>
#include <stdbool.h>
#include <string.h>

enum { NUMBERS = 8 };
static const double two_pi = 6.283185307179586;

/* Members of config.json, and of its rope_scaling or rope_parameters. */
static const char *const names[] = {"factor",           "low_freq_factor",
                                    "high_freq_factor", "original_max_position_embeddings",
                                    "rope_theta",       "head_dim",
                                    "hidden_size",      "num_attention_heads",
                                    "rope_type",        "type",
                                    "rope_scaling",     "rope_parameters"};
enum {
    FACTOR,
    LOW,
    HIGH,
    LENGTH,
    THETA,
    HEAD_DIM,
    HIDDEN,
    HEADS,
    ROPE_TYPE,
    TYPE,
    SCALING,
    PARAMETERS
};

typedef struct rope_config {
    double numbers[NUMBERS]; /* 0: missing */
    bool is_llama3;
} rope_config;

static fsdp_status read_type(fsdp_json *json, rope_config *config, fsdp_error *err)
{
    const char *type;
    size_t size;
    if (fsdp_json_peek(json) != FSDP_JSON_STRING)
        return fsdp_json_skip(json, err);
    FSDP_TRY(fsdp_json_string(json, &type, &size, err));
    config->is_llama3 = config->is_llama3 || (size == 6 && memcmp(type, "llama3", 6) == 0);
    return FSDP_OK;
}

/* Reads an object, and once the one inside it. */
static fsdp_status read_members(fsdp_json *json, rope_config *config, bool is_inner,
                                fsdp_error *err)
{
    fsdp_json_members members = {.names = names, .count = sizeof names / sizeof *names};
    int which;
    FSDP_TRY(fsdp_json_enter_object(json, err));
    for (;;) {
        FSDP_TRY(fsdp_json_next_member(json, &members, &which, err));
        if (which < 0)
            return FSDP_OK;
        fsdp_json_kind kind = fsdp_json_peek(json);
        if (which < NUMBERS && kind == FSDP_JSON_NUMBER)
            FSDP_TRY(fsdp_json_f64(json, &config->numbers[which], err));
        else if (is_inner && (which == ROPE_TYPE || which == TYPE))
            FSDP_TRY(read_type(json, config, err));
        else if (!is_inner && which >= SCALING && kind == FSDP_JSON_OBJECT)
            FSDP_TRY(read_members(json, config, true, err));
        else
            FSDP_TRY(fsdp_json_skip(json, err));
    }
}

/* Long waves are divided by the factor, short ones stay, those between are blended. */
static float divisor_of(const rope_config *config, double frequency)
{
    const double *numbers = config->numbers;
    double wave = two_pi / frequency;
    if (wave < numbers[LENGTH] / numbers[HIGH])
        return 1;
    if (wave > numbers[LENGTH] / numbers[LOW])
        return (float)numbers[FACTOR];
    double smooth = (numbers[LENGTH] / wave - numbers[LOW]) / (numbers[HIGH] - numbers[LOW]);
    return (float)(1 / ((1 - smooth) / numbers[FACTOR] + smooth));
}

static fsdp_status check(const rope_config *config, double width, fsdp_error *err)
{
    for (int i = FACTOR; i <= LENGTH; i++)
        if (!(config->numbers[i] > 0))
            return fsdp_fail(err, FSDP_ERR_USAGE,
                             "config.json scales rotary frequencies as Llama 3.1 and has no '%s'",
                             names[i]);
    if (!(width >= 2 && width <= 2 * FSDP_ROPE_MOST))
        return fsdp_fail(err, FSDP_ERR_USAGE, "config.json has no size of a head");
    return FSDP_OK;
}

fsdp_status fsdp_rope_factors(const char *text, size_t size, float factors[FSDP_ROPE_MOST],
                              int *count_out, fsdp_error *err)
{
    rope_config config = {0};
    fsdp_json json;
    *count_out = 0;
    fsdp_json_init(&json, text, size, "config.json");
    fsdp_status st = read_members(&json, &config, false, err);
    fsdp_json_release(&json);
    if (st != FSDP_OK || !config.is_llama3)
        return st;
    const double *numbers = config.numbers;
    double width = numbers[HEAD_DIM] > 0 ? numbers[HEAD_DIM]
                   : numbers[HEADS] > 0  ? numbers[HIDDEN] / numbers[HEADS]
                                         : 0;
    double theta = numbers[THETA] > 0 ? numbers[THETA] : 10000;
    FSDP_TRY(check(&config, width, err));
    *count_out = (int)(width / 2);
    for (int i = 0; i < *count_out; i++)
        factors[i] = divisor_of(&config, pow(theta, -2 * i / width));
    return FSDP_OK;
}
