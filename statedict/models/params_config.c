/*
 * Meta's params.json -> config.json: see params_config.h. Numbers that params.json does not have are those of
 * the release, which the vocabulary tells.
 */
#include "statedict/models/params_config.h"

#include "base/core/mem.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

enum { DIM, LAYERS, HEADS, KV_HEADS, HEAD_DIM, LENGTH, EPSILON, THETA, SCALED, PARAMS };

static const char *const names[PARAMS] = {"dim",        "n_layers",   "n_heads",
                                          "n_kv_heads", "head_dim",   "max_seq_len",
                                          "norm_eps",   "rope_theta", "use_scaled_rope"};

enum { SIZE_MOST = 1 << 28 };

typedef struct meta_params {
    const char *path;
    double numbers[PARAMS];
    bool has[PARAMS];
} meta_params;

static const char embedding[] = "tok_embeddings.weight", gate[] = "layers.0.feed_forward.w1.weight",
                  output[] = "output.weight";

/* Rows of a matrix; -1: there is none of the name. */
static int64_t rows_of(const fsdp_sd *sd, const char *name)
{
    int64_t at = fsdp_sd_find(sd, name, strlen(name));
    const fsdp_entry *entry = at < 0 ? NULL : fsdp_sd_at(sd, (size_t)at);
    return entry && entry->kind == FSDP_ENTRY_TENSOR && entry->ndim == 2 ? entry->shape[0] : -1;
}

bool fsdp_is_meta_llama(const fsdp_sd *sd)
{
    return rows_of(sd, embedding) > 0 && rows_of(sd, gate) > 0;
}

/* --- params.json -------------------------------------------------------------------------------- */

/* Anything but a number is not a number, which is refused where it counts. */
static void read_members(const fsdp_config_file *file, meta_params *params)
{
    for (int i = 0; i < PARAMS; i++) {
        const fsdp_value *value = fsdp_config_at(&file->json, names[i]);
        params->has[i] = value;
        if (value && ((value->kind == FSDP_VALUE_BOOL && i != SCALED) ||
                      !fsdp_config_real(&file->json, names[i], &params->numbers[i])))
            params->numbers[i] = NAN;
    }
}

static bool is_size(double number)
{
    return number >= 1 && number <= SIZE_MOST && floor(number) == number;
}

static fsdp_status check(const meta_params *params, fsdp_error *err)
{
    for (int i = 0; i < SCALED; i++) {
        bool is_needed = i <= HEADS, of_size = i <= LENGTH;
        double number = params->numbers[i];
        if (params->has[i] ? !(of_size ? is_size(number) : number > 0) : is_needed)
            return fsdp_fail(
                err, FSDP_ERR_USAGE,
                "'%s' has no %s '%s', which a config.json needs; --copy-from DIR names the model's",
                params->path, of_size ? "size" : "positive number", names[i]);
    }
    if (params->has[SCALED] && params->numbers[SCALED] != 0)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "'%s' asks for scaled rotary frequencies, whose numbers config.json "
                         "needs; --copy-from DIR names the model's",
                         params->path);
    return FSDP_OK;
}

/* --- config.json -------------------------------------------------------------------------------- */

static void add_size(fsdp_text *out, const char *member, double size)
{
    fsdp_text_addf(out, ",\n  \"%s\": %" PRId64, member, (int64_t)size);
}

/* A float of JSON has a point or an exponent. */
static void add_float(fsdp_text *out, const char *member, double value)
{
    fsdp_text_addf(out, ",\n  \"%s\": ", member);
    fsdp_text_add_f64(out, value);
}

/* Adds numbers that params.json leaves out. Llama 3 has another vocabulary than the releases before it. */
static void add_release(const meta_params *params, int64_t words, fsdp_text *out)
{
    enum { WORDS_OF_3 = 128256, LENGTH_OF_2 = 4096, LENGTH_OF_3 = 8192 };
    bool is_3 = words == WORDS_OF_3;
    double length = is_3 ? LENGTH_OF_3 : LENGTH_OF_2, theta = is_3 ? 500000 : 10000;
    add_size(out, "max_position_embeddings",
             params->has[LENGTH] ? params->numbers[LENGTH] : length);
    add_float(out, "rope_theta", params->has[THETA] ? params->numbers[THETA] : theta);
    add_size(out, "bos_token_id", is_3 ? 128000 : 1);
    add_size(out, "eos_token_id", is_3 ? 128001 : 2);
}

static void add_config(const meta_params *params, const fsdp_sd *sd, fsdp_text *out)
{
    const double *numbers = params->numbers;
    int64_t words = rows_of(sd, embedding);
    bool is_tied = fsdp_sd_find(sd, output, strlen(output)) < 0;
    fsdp_text_addf(out,
                   "{\n  \"architectures\": [\"LlamaForCausalLM\"],\n  \"model_type\": \"llama\"");
    add_size(out, "num_hidden_layers", numbers[LAYERS]);
    add_size(out, "hidden_size", numbers[DIM]);
    add_size(out, "intermediate_size", (double)rows_of(sd, gate));
    add_size(out, "num_attention_heads", numbers[HEADS]);
    add_size(out, "num_key_value_heads", numbers[params->has[KV_HEADS] ? KV_HEADS : HEADS]);
    if (params->has[HEAD_DIM])
        add_size(out, "head_dim", numbers[HEAD_DIM]);
    add_float(out, "rms_norm_eps", params->has[EPSILON] ? numbers[EPSILON] : 1e-5);
    add_size(out, "vocab_size", (double)words);
    add_release(params, words, out);
    fsdp_text_addf(out, ",\n  \"tie_word_embeddings\": %s\n}\n", is_tied ? "true" : "false");
}

fsdp_status fsdp_params_config_text(const fsdp_config_file *file, const fsdp_sd *sd, fsdp_text *out,
                                    fsdp_error *err)
{
    meta_params params = {.path = file->path};
    FSDP_TRY(fsdp_config_check(file, err));
    read_members(file, &params);
    FSDP_TRY(check(&params, err));
    add_config(&params, sd, out);
    return out->failed ? fsdp_fail_memory(err, "config.json") : FSDP_OK;
}
