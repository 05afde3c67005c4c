/*
 * The form of a transformer, from the description of its family (statedict/models) and the members of its
 * config.json: the tensors by their roles, and the words of the line `form`. A form cannot express
 * everything: the rest is refused by its name here, so that no family is trained by another's arithmetic.
 */
#include "runtime/transformer/transformer_internal.h"

#include "base/text.h"

#include <string.h>

static fsdp_status fail_tensor(const fsdp_config *values, const fsdp_tensor_row *row,
                               const char *reason, fsdp_error *err)
{
    return fsdp_fail(err, FSDP_ERR_USAGE, "'%s': this trainer cannot do model_type '%s': %s '%s'",
                     values->path, values->architecture->model_type, reason, row->name);
}

/* A tensor that some layers have and others not is refused. */
static fsdp_status find_presence(const fsdp_config *values, const fsdp_tensor_row *row,
                                 int64_t layers, bool *is_there_out, fsdp_error *err)
{
    int64_t count = 0;
    *is_there_out = row->spelling <= 1;
    if (!row->when || !*is_there_out)
        return FSDP_OK;
    for (int64_t i = 0; i < layers; i++) {
        int64_t is_there;
        FSDP_TRY(fsdp_formula_compute(values, row->when, i, &is_there, err));
        count += is_there != 0;
    }
    *is_there_out = count > 0;
    return count == 0 || count == layers ? FSDP_OK
                                         : fail_tensor(values, row, "not every layer has", err);
}

/* Tensors that are not of a layer. */
typedef enum other_tensor {
    EMBEDDING = 1,
    POSITIONS = 2,
    LAST_NORM = 4,
    LAST_BIAS = 8,
    HEAD = 16
} other_tensor;

bool fsdp_model_find_other(const fsdp_transformer_config *config, const char *role,
                           model_part *part)
{
    const struct {
        const char *role;
        model_part part;
    } others[] = {{"embed", {EMBEDDING, 2, {config->vocab, config->width}}},
                  {"position_embed", {POSITIONS, 2, {config->context, config->width}}},
                  {"final_norm", {LAST_NORM, 1, {config->width}}},
                  {"final_norm.bias", {LAST_BIAS, 1, {config->width}}},
                  {"output", {HEAD, 2, {config->vocab, config->width}}}};
    for (size_t i = 0; i < sizeof others / sizeof *others; i++)
        if (strcmp(others[i].role, role) == 0) {
            *part = others[i].part;
            return true;
        }
    return false;
}

/* A tensor of the description, as the form finds it. */
typedef struct form_maker {
    const fsdp_config *values;
    fsdp_transformer_config *config;
    uint64_t others;
    bool is_out_by_in, is_in_by_out; /* so far all weights of projections may be stored so */
} form_maker;

/* The description's shape must be the one that this room computes with. */
static fsdp_status check_shape(form_maker *maker, const fsdp_tensor_row *row,
                               const model_part *part, bool is_layer, fsdp_error *err)
{
    const char *at = row->shape;
    int64_t shape[2] = {0}, size;
    int ndim = 0;
    for (; at; ndim++) {
        FSDP_TRY(fsdp_formula_next_dim(maker->values, &at, 0, &size, err));
        if (ndim < 2)
            shape[ndim] = size;
    }
    const bool is_same =
        ndim == part->ndim && shape[0] == part->shape[0] && shape[1] == part->shape[1];
    const bool is_transposed =
        ndim == 2 && part->ndim == 2 && shape[0] == part->shape[1] && shape[1] == part->shape[0];
    if (is_layer && ndim == 2) {
        maker->is_out_by_in &= is_same;
        maker->is_in_by_out &= is_transposed;
    }
    return is_same || (is_layer && is_transposed)
               ? FSDP_OK
               : fail_tensor(maker->values, row, "it knows another shape of", err);
}

static fsdp_status take_row(form_maker *maker, const fsdp_tensor_row *row, fsdp_error *err)
{
    fsdp_transformer_config *config = maker->config;
    const bool is_layer = strstr(row->name, "{layer}") != NULL, is_head = row->name[0] != '{';
    const bool is_output = strcmp(row->role, "output") == 0;
    bool is_there = true;
    model_part part;
    if ((is_head && !is_output) || (!*row->role && row->may_lack))
        return FSDP_OK; /* heads of other classes, and buffers */
    if (!is_output)
        FSDP_TRY(find_presence(maker->values, row, is_layer ? config->layers : 1, &is_there, err));
    if (!is_there)
        return FSDP_OK;
    if (!(is_layer ? fsdp_model_find_part : fsdp_model_find_other)(config, row->role, &part))
        return fail_tensor(maker->values, row, "it has no use for", err);
    FSDP_TRY(check_shape(maker, row, &part, is_layer, err));
    *(is_layer ? &config->form.parts : &maker->others) |= part.bit;
    if (!is_layer && part.bit == EMBEDDING)
        fsdp_model_tensor_name(maker->values->architecture, row->name, 0, config->form.embedding);
    return FSDP_OK;
}

static fsdp_status take_words(const fsdp_config *values, fsdp_transformer_form *form,
                              fsdp_error *err)
{
    for (const char *word = values->architecture->form; *word;) {
        const size_t size = strcspn(word, " ");
        if (fsdp_bytes_are(word, size, "layer-norm"))
            form->has_layer_norm = true;
        else if (!fsdp_bytes_are(word, size, "rms-norm"))
            return fsdp_fail(
                err, FSDP_ERR_USAGE,
                "'%s': this trainer cannot do model_type '%s': it has no code for %.*s",
                values->path, values->architecture->model_type, (int)size, word);
        word += size + strspn(word + size, " ");
    }
    return FSDP_OK;
}

static bool has_part(const fsdp_transformer_config *config, const char *role)
{
    model_part part;
    return fsdp_model_find_part(config, role, &part) && (config->form.parts & part.bit);
}

fsdp_status fsdp_model_make_form(const fsdp_config *values, fsdp_transformer_config *config,
                                 fsdp_error *err)
{
    const fsdp_architecture *model = values->architecture;
    fsdp_transformer_form *form = &config->form;
    form_maker maker = {
        .values = values, .config = config, .is_out_by_in = true, .is_in_by_out = true};
    const uint64_t needed = EMBEDDING | LAST_NORM | HEAD | (form->is_rotary ? 0 : POSITIONS);
    FSDP_TRY(take_words(values, form, err));
    for (size_t i = 0; i < model->row_count; i++)
        FSDP_TRY(take_row(&maker, &model->rows[i], err));
    const char *missing = fsdp_model_missing_part(form->parts);
    if (missing || (maker.others & needed) != needed || !(maker.is_out_by_in || maker.is_in_by_out))
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "'%s': this trainer cannot do model_type '%s': its description has no %s",
                         values->path, model->model_type,
                         missing ? missing : "embedding, last norm or head that it knows");
    form->is_in_by_out = !maker.is_out_by_in;
    form->is_gated = has_part(config, "gate");
    config->attention_bias = has_part(config, "q_proj.bias") || has_part(config, "qkv_proj.bias");
    config->output_bias = has_part(config, "o_proj.bias");
    config->mlp_bias = has_part(config, "up.bias");
    return FSDP_OK;
}
