/* Divisors of rotary frequencies: see rope_factors.h. */
#include "statedict/gguf_model/rope_factors.h"

#include "statedict/models/config.h"

#include <math.h>
#include <string.h>

static const double two_pi = 6.283185307179586;

enum { FACTOR, LOW, HIGH, LENGTH, NUMBERS };
static const char *const names[NUMBERS] = {"factor", "low_freq_factor", "high_freq_factor",
                                           "original_max_position_embeddings"};

/* Long waves are divided by the factor, short ones stay, those between are blended. */
static float divisor_of(const double numbers[NUMBERS], double frequency)
{
    double wave = two_pi / frequency;
    if (wave < numbers[LENGTH] / numbers[HIGH])
        return 1;
    if (wave > numbers[LENGTH] / numbers[LOW])
        return (float)numbers[FACTOR];
    double smooth = (numbers[LENGTH] / wave - numbers[LOW]) / (numbers[HIGH] - numbers[LOW]);
    return (float)(1 / ((1 - smooth) / numbers[FACTOR] + smooth));
}

/* The size of a head; 0: config.json does not tell. */
static double head_width(const fsdp_value *config)
{
    double width = 0, heads = 0, all = 0;
    if (fsdp_config_real(config, "head_dim", &width) && width > 0)
        return width;
    (void)fsdp_config_real(config, "num_attention_heads", &heads);
    (void)fsdp_config_real(config, "hidden_size", &all);
    return heads > 0 ? all / heads : 0;
}

fsdp_status fsdp_rope_factors(const fsdp_value *config, float factors[FSDP_ROPE_MOST],
                              int *count_out, fsdp_error *err)
{
    const fsdp_rope_config rope = fsdp_config_rope(config);
    double numbers[NUMBERS] = {0}, width = head_width(config), theta = 0;
    *count_out = 0;
    if (strcmp(rope.type, "llama3") != 0)
        return FSDP_OK;
    for (int i = 0; i < NUMBERS; i++)
        if (!fsdp_rope_real(&rope, names[i], &numbers[i]) || !(numbers[i] > 0))
            return fsdp_fail(err, FSDP_ERR_USAGE,
                             "config.json scales rotary frequencies as Llama 3.1 but has no '%s'",
                             names[i]);
    if (!(width >= 2 && width <= 2 * FSDP_ROPE_MOST))
        return fsdp_fail(err, FSDP_ERR_USAGE, "config.json does not give the size of a head");
    if (!fsdp_rope_real(&rope, "rope_theta", &theta) || !(theta > 0))
        theta = 10000;
    *count_out = (int)(width / 2);
    for (int i = 0; i < *count_out; i++)
        factors[i] = divisor_of(numbers, pow(theta, -2 * i / width));
    return FSDP_OK;
}
