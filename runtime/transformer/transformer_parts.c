/*
 * This file makes the tensors of a transformer: the form of a family, from its description in
 * statedict/models; the parameters and units of a model of that form, and their first values; and the arrays
 * of a microbatch. The parts of a layer are a table; a part that the family lacks has no weight. A new part
 * is a row of `parts`, its arrays, and its arithmetic (transformer.c).
 */
#include "runtime/transformer/transformer_internal.h"
#include "base/core/fnv.h"
#include "base/core/mem.h"
#include "base/core/mix.h"
#include "base/text.h"
#include <fsdp/root_init.h>

#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

/* === roles ==================================================================================== */

/* A tensor by its role: its bit (of a layer: in form.parts) and its shape, of weights out x in. */
typedef struct model_part {
    uint64_t bit;
    int ndim;
    int64_t shape[2];
} model_part;

/* --- of a layer ------------------------------------------------------------------------------------ */

typedef enum part_size { NONE, WIDTH, INNER, HEAD, HEADS, KV_HEADS, QKV } part_size;

/* Weights of a layer have roles in statedict/models: projections, and without `out` norms. Each may
 * have a bias, whose role ends in ".bias". */
typedef struct part_row {
    const char *role;
    size_t at; /* in model_block */
    part_size in, out;
} part_row;

#define AT(member) offsetof(model_block, member)
static const part_row parts[] = {{"attention_norm", AT(norm1), WIDTH, NONE},
                                 {"qkv_proj", AT(qkv), WIDTH, QKV},
                                 {"q_proj", AT(q), WIDTH, HEADS},
                                 {"k_proj", AT(k), WIDTH, KV_HEADS},
                                 {"v_proj", AT(v), WIDTH, KV_HEADS},
                                 {"o_proj", AT(output), HEADS, WIDTH},
                                 {"q_norm", AT(q_norm), HEAD, NONE},
                                 {"k_norm", AT(k_norm), HEAD, NONE},
                                 {"mlp_norm", AT(norm2), WIDTH, NONE},
                                 {"gate", AT(gate), WIDTH, INNER},
                                 {"up", AT(up), WIDTH, INNER},
                                 {"down", AT(down), INNER, WIDTH}};
enum { PARTS = sizeof parts / sizeof *parts };

static int64_t size_of(const fsdp_transformer_config *config, part_size size)
{
    const int64_t sizes[] = {[NONE] = 0,
                             [WIDTH] = config->width,
                             [INNER] = config->inner,
                             [HEAD] = config->head_dim,
                             [HEADS] = config->heads * config->head_dim,
                             [KV_HEADS] = config->kv_heads * config->head_dim,
                             [QKV] = (config->heads + 2 * config->kv_heads) * config->head_dim};
    return sizes[size];
}

/* The row of a role, and whether it is that of the bias; NULL: none. */
static const part_row *find_row(const char *role, bool *is_bias_out)
{
    const size_t size = strcspn(role, ".");
    *is_bias_out = strcmp(role + size, ".bias") == 0;
    for (size_t i = 0; i < PARTS && (!role[size] || *is_bias_out); i++)
        if (fsdp_bytes_are(role, size, parts[i].role))
            return &parts[i];
    return NULL;
}

static uint64_t bit_of(const part_row *row, bool is_bias)
{
    return (uint64_t)1 << (2 * (row - parts) + is_bias);
}

/* False: a layer has no use for the role. */
static bool find_layer_part(const fsdp_transformer_config *config, const char *role,
                            model_part *part_out)
{
    bool is_bias;
    const part_row *row = find_row(role, &is_bias);
    if (!row)
        return false;
    const int64_t in = size_of(config, row->in), out = size_of(config, row->out);
    *part_out = (model_part){.bit = bit_of(row, is_bias), .ndim = 1, .shape = {out ? out : in}};
    if (out && !is_bias)
        *part_out = (model_part){.bit = part_out->bit, .ndim = 2, .shape = {out, in}};
    return true;
}

static bool has_part(uint64_t has, const char *role)
{
    bool is_bias;
    const part_row *row = find_row(role, &is_bias);
    return row && (has & bit_of(row, is_bias));
}

/* The role of a part without which a layer of these parts cannot be computed; NULL: none is missing. */
static const char *missing_part(uint64_t has)
{
    static const char *const always[] = {"attention_norm", "o_proj", "mlp_norm", "up", "down"};
    static const char *const apart[] = {"q_proj", "k_proj", "v_proj"};
    for (size_t i = 0; i < sizeof always / sizeof *always; i++)
        if (!has_part(has, always[i]))
            return always[i];
    for (size_t i = 0; i < sizeof apart / sizeof *apart; i++)
        if (has_part(has, apart[i]) == has_part(has, "qkv_proj"))
            return apart[i];
    if (has_part(has, "q_norm") != has_part(has, "k_norm"))
        return has_part(has, "q_norm") ? "k_norm" : "q_norm";
    if (has_part(has, "q_norm") && has_part(has, "qkv_proj"))
        return "q_proj"; /* norms need heads that lie one after another */
    return NULL;
}

/* --- outside the layers ----------------------------------------------------------------------------- */

/* Tensors that are not of a layer. */
typedef enum other_tensor {
    EMBEDDING = 1,
    POSITIONS = 2,
    LAST_NORM = 4,
    LAST_BIAS = 8,
    LOGITS = 16
} other_tensor;

/* Finds the part of a role outside the layers, as find_layer_part does. */
static bool find_other_part(const fsdp_transformer_config *config, const char *role,
                            model_part *part)
{
    const struct {
        const char *role;
        model_part part;
    } others[] = {{"embed", {EMBEDDING, 2, {config->vocab, config->width}}},
                  {"position_embed", {POSITIONS, 2, {config->context, config->width}}},
                  {"final_norm", {LAST_NORM, 1, {config->width}}},
                  {"final_norm.bias", {LAST_BIAS, 1, {config->width}}},
                  {"output", {LOGITS, 2, {config->vocab, config->width}}}};
    for (size_t i = 0; i < sizeof others / sizeof *others; i++)
        if (strcmp(others[i].role, role) == 0) {
            *part = others[i].part;
            return true;
        }
    return false;
}

/* --- names ------------------------------------------------------------------------------------------- */

/* Copies the whole name of a tensor, of `layer` where it has one per layer. */
static void write_name(const fsdp_architecture *model, const char *name, int64_t layer,
                       char name_out[FSDP_MODEL_NAME])
{
    static const char base[] = "{base}", number[] = "{layer}";
    const char *at = strstr(name, base);
    const char *rest = at ? at + strlen(base) : name, *brace = strstr(rest, number);
    const char *prefix = at ? model->bases[0] : "";
    if (brace)
        snprintf(name_out, FSDP_MODEL_NAME, "%s%.*s%lld%s", prefix, (int)(brace - rest), rest,
                 (long long)layer, brace + strlen(number));
    else
        snprintf(name_out, FSDP_MODEL_NAME, "%s%s", prefix, rest);
}

/* === the form ================================================================================= */

/*
 * Makes the form of a transformer from the description of its family (statedict/models) and the members of
 * its config.json: the tensors by their roles, and the words of the line `form`. A form cannot express
 * everything: the rest is refused by its name here, so that no family is trained by another's arithmetic.
 */

static fsdp_status fail_tensor(const fsdp_config *values, const fsdp_tensor_row *row,
                               const char *reason, fsdp_error *err)
{
    return fsdp_fail(err, FSDP_ERR_USAGE, "cannot train '%s': for model_type '%s', %s '%s'",
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
                                         : fail_tensor(values, row, "some layers lack", err);
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
               : fail_tensor(maker->values, row, "this trainer knows another shape of", err);
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
    if (!(is_layer ? find_layer_part : find_other_part)(config, row->role, &part))
        return fail_tensor(maker->values, row, "this trainer has no use for", err);
    FSDP_TRY(check_shape(maker, row, &part, is_layer, err));
    *(is_layer ? &config->form.parts : &maker->others) |= part.bit;
    if (!is_layer && part.bit == EMBEDDING)
        write_name(maker->values->architecture, row->name, 0, config->form.embedding);
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
                "cannot train '%s': for model_type '%s', this trainer has no code for %.*s",
                values->path, values->architecture->model_type, (int)size, word);
        word += size + strspn(word + size, " ");
    }
    return FSDP_OK;
}

fsdp_status fsdp_model_make_form(const fsdp_config *values, fsdp_transformer_config *config,
                                 fsdp_error *err)
{
    const fsdp_architecture *model = values->architecture;
    fsdp_transformer_form *form = &config->form;
    form_maker maker = {
        .values = values, .config = config, .is_out_by_in = true, .is_in_by_out = true};
    const uint64_t needed = EMBEDDING | LAST_NORM | LOGITS | (form->is_rotary ? 0 : POSITIONS);
    FSDP_TRY(take_words(values, form, err));
    for (size_t i = 0; i < model->row_count; i++)
        FSDP_TRY(take_row(&maker, &model->rows[i], err));
    const char *missing = missing_part(form->parts);
    if (missing || (maker.others & needed) != needed || !(maker.is_out_by_in || maker.is_in_by_out))
        return fsdp_fail(
            err, FSDP_ERR_USAGE, "cannot train '%s': the description of model_type '%s' has no %s",
            values->path, model->model_type,
            missing ? missing : "embedding, last norm or head that this trainer knows");
    form->is_in_by_out = !maker.is_out_by_in;
    form->is_gated = has_part(form->parts, "gate");
    config->attention_bias =
        has_part(form->parts, "q_proj.bias") || has_part(form->parts, "qkv_proj.bias");
    config->output_bias = has_part(form->parts, "o_proj.bias");
    config->mlp_bias = has_part(form->parts, "up.bias");
    return FSDP_OK;
}

/* === parameters and units ===================================================================== */

/* Adds a parameter of f32. */
static fsdp_status add_param(fsdp_transformer *t, const char *name, int ndim, const int64_t *shape,
                             fsdp_param **param_out, fsdp_error *err)
{
    const fsdp_param_spec spec = {.name = name, .dtype = FSDP_F32, .ndim = ndim, .shape = shape};
    FSDP_TRY(fsdp_model_add(t->model, &spec, param_out, err));
    return t->opts.is_mixed ? fsdp_param_set_grad_dtype(*param_out, FSDP_F32, err) : FSDP_OK;
}

static fsdp_status add_part(fsdp_transformer *t, const part_row *row, bool is_bias,
                            const char *name, model_block *block, fsdp_error *err)
{
    const int64_t in = size_of(&t->config, row->in), out = size_of(&t->config, row->out);
    const bool is_in_by_out = t->config.form.is_in_by_out;
    if (row->out == NONE) {
        model_norm *norm = (model_norm *)((char *)block + row->at);
        norm->columns = in;
        return add_param(t, name, 1, &in, is_bias ? &norm->bias : &norm->weight, err);
    }
    fsdp_linear *linear = (fsdp_linear *)((char *)block + row->at);
    linear->in = in;
    linear->out = out;
    linear->is_in_by_out = is_in_by_out;
    if (is_bias)
        return add_param(t, name, 1, &out, &linear->bias, err);
    const int64_t shape[2] = {is_in_by_out ? in : out, is_in_by_out ? out : in};
    return add_param(t, name, 2, shape, &linear->weight, err);
}

/* Declares the layer's parameters and its unit, in the order of the description. */
static fsdp_status declare_block(fsdp_transformer *t, const fsdp_architecture *model,
                                 model_block *block, fsdp_error *err)
{
    char name[FSDP_MODEL_NAME], prefix[FSDP_MODEL_NAME] = "";
    for (size_t i = 0; i < model->row_count; i++) {
        const fsdp_tensor_row *tensor = &model->rows[i];
        const char *number = strstr(tensor->name, "{layer}");
        bool is_bias;
        const part_row *row = find_row(tensor->role, &is_bias);
        if (!number || !row || !(t->config.form.parts & bit_of(row, is_bias)))
            continue;
        write_name(model, tensor->name, block->number, name);
        FSDP_TRY(add_part(t, row, is_bias, name, block, err));
        /* the unit has the name up to the number */
        snprintf(prefix, sizeof prefix, "%.*s", (int)(strlen(name) - strlen(number + 7)), name);
    }
    return fsdp_unit_create(t->model, prefix, &t->opts.unit, &block->unit, err);
}

/* Adds the parameter of a role outside the layers; none where the description has none. */
static fsdp_status add_other(fsdp_transformer *t, const fsdp_architecture *model, const char *role,
                             fsdp_param **param_out, fsdp_error *err)
{
    const fsdp_tensor_row *row = fsdp_architecture_role(model, role, 0);
    char name[FSDP_MODEL_NAME];
    model_part part;
    if (!row || !find_other_part(&t->config, role, &part))
        return FSDP_OK;
    write_name(model, row->name, 0, name);
    if (t->config.is_tied && *param_out)
        return fsdp_model_add_alias(t->model, name, *param_out, err);
    return add_param(t, name, part.ndim, part.shape, param_out, err);
}

static fsdp_status add_blocks(fsdp_transformer *t, const fsdp_architecture *model, fsdp_error *err)
{
    t->blocks = fsdp_alloc((size_t)t->config.layers, sizeof *t->blocks);
    if (!t->blocks)
        return fsdp_fail_memory(err, "layers");
    for (int64_t i = 0; i < t->config.layers; i++) {
        t->blocks[i].number = i;
        FSDP_TRY(declare_block(t, model, &t->blocks[i], err));
    }
    return FSDP_OK;
}

static fsdp_status declare_all(fsdp_transformer *t, const fsdp_architecture *model, fsdp_error *err)
{
    FSDP_TRY(add_other(t, model, "embed", &t->tokens, err));
    FSDP_TRY(add_other(t, model, "position_embed", &t->positions, err));
    FSDP_TRY(add_blocks(t, model, err));
    t->last_norm.columns = t->config.width;
    FSDP_TRY(add_other(t, model, "final_norm", &t->last_norm.weight, err));
    FSDP_TRY(add_other(t, model, "final_norm.bias", &t->last_norm.bias, err));
    t->head = t->tokens;
    return add_other(t, model, "output", &t->head, err);
}

fsdp_status fsdp_model_describe(const fsdp_transformer_config *config, fsdp_arena *arena,
                                const fsdp_architecture **model_out, fsdp_error *err)
{
    const char *type = config->model_type;
    FSDP_TRY(fsdp_architecture_find(arena, type, strlen(type), model_out, err));
    return *model_out ? FSDP_OK
                      : fsdp_fail(err, FSDP_ERR_USAGE, "model_type '%s' is not known", type);
}

fsdp_status fsdp_model_declare(fsdp_transformer *t, fsdp_error *err)
{
    fsdp_arena arena = {0};
    const fsdp_architecture *model;
    fsdp_status st = fsdp_model_describe(&t->config, &arena, &model, err);
    if (st == FSDP_OK)
        st = declare_all(t, model, err);
    fsdp_arena_release(&arena);
    return st;
}

/* === first values ============================================================================= */

/* Random numbers that are functions of a key and an index, so that no rank and no step keeps a state. */

static uint64_t random_key(uint64_t seed, const char *purpose)
{
    return fsdp_mix(fsdp_mix(seed) ^ fsdp_fnv(FSDP_FNV_BEGIN, purpose, strlen(purpose)));
}

/* in (0, 1) */
static double uniform(uint64_t key, uint64_t i)
{
    return ((double)(fsdp_mix(key + (i + 1) * 0x9E3779B97F4A7C15u) >> 11) + 0.5) * 0x1p-53;
}

/* Box and Muller's first number of two uniform ones. */
static double random_normal(uint64_t key, uint64_t i)
{
    const double two_pi = 6.283185307179586;
    return sqrt(-2 * log(uniform(key, 2 * i))) * cos(two_pi * uniform(key, 2 * i + 1));
}

double fsdp_model_uniform(uint64_t seed, const char *purpose, uint64_t i)
{
    return uniform(random_key(seed, purpose), i);
}

typedef struct first_values {
    const fsdp_transformer_config *config;
    uint64_t seed;
} first_values;

static float scale_of(const fsdp_transformer_config *config, const char *name)
{
    double scale = config->initializer_range;
    if (config->form.is_in_by_out && fsdp_has_suffix(name, "c_proj.weight")) /* of GPT-2 */
        scale /= sqrt(2.0 * (double)config->layers);
    return (float)scale;
}

/* Elements of a box of a tensor, row by row: their numbers in the whole tensor. */
static void fill_normal(const first_values *from, const fsdp_param_info *info, const fsdp_box *box,
                        float *data)
{
    const uint64_t key = random_key(from->seed, info->name);
    const float scale = scale_of(from->config, info->name);
    const int64_t columns = info->ndim > 1 ? info->shape[1] : 1;
    const int64_t width = info->ndim > 1 ? box->len[1] : 1, left = info->ndim > 1 ? box->lo[1] : 0;
    for (int64_t r = 0; r < box->len[0]; r++)
        for (int64_t c = 0; c < width; c++)
            *data++ = scale *
                      (float)random_normal(key, (uint64_t)((box->lo[0] + r) * columns + left + c));
}

static fsdp_status fill_param(void *context, const fsdp_param *param, const fsdp_box *box,
                              void *data, fsdp_error *err)
{
    const first_values *from = context;
    const fsdp_param_info info = fsdp_param_describe(param);
    float *to = data;
    (void)err;
    if (info.ndim > 1) {
        fill_normal(from, &info, box, to);
        return FSDP_OK;
    }
    const float value = fsdp_has_suffix(info.name, ".bias") ? 0 : 1; /* of norms */
    for (int64_t i = 0; i < box->len[0]; i++)
        to[i] = value;
    return FSDP_OK;
}

fsdp_status fsdp_transformer_init(fsdp_transformer *t, uint64_t seed, fsdp_error *err)
{
    first_values from = {&t->config, seed};
    return fsdp_root_init(t->root, fill_param, &from, err);
}

/* === arrays of a microbatch =================================================================== */

/* Their memory grows to the largest microbatch and stays. */

/* --- ids ----------------------------------------------------------------------------------------- */

static fsdp_status check_ids(const fsdp_transformer *t, const fsdp_token_batch *batch,
                             int64_t length, fsdp_error *err)
{
    for (int64_t s = 0; s < batch->sequences; s++)
        for (int64_t i = 0; i < length; i++) {
            int64_t id = batch->ids[s * batch->stride + i];
            if (id < 0 || id >= t->config.vocab)
                return fsdp_fail(err, FSDP_ERR_USAGE,
                                 "token %lld of sequence %lld is %lld, beyond the model's "
                                 "vocabulary of %lld",
                                 (long long)i, (long long)s, (long long)id,
                                 (long long)t->config.vocab);
        }
    return FSDP_OK;
}

static void take_ids(fsdp_transformer *t, const fsdp_token_batch *batch, bool with_targets)
{
    for (int64_t s = 0; s < batch->sequences; s++) {
        const int64_t *from = batch->ids + s * batch->stride;
        size_t size = (size_t)batch->length * sizeof *from;
        memcpy(t->inputs + s * batch->length, from, size);
        if (with_targets)
            memcpy(t->targets + s * batch->length, from + 1, size);
    }
}

/* --- of a layer ------------------------------------------------------------------------------------ */

static fsdp_status make_array(fsdp_transformer *t, int64_t rows, int64_t columns, float **data_out,
                              fsdp_error *err)
{
    int64_t count;
    *data_out = fsdp_mul_overflow(rows, columns, &count) ? NULL : t->ops->alloc(t->nn, count);
    return *data_out ? FSDP_OK : fsdp_fail_memory(err, "activations");
}

/* Counts the columns of q, k and v. */
static int64_t qkv_width(const fsdp_transformer_config *config)
{
    return (config->heads + 2 * config->kv_heads) * config->head_dim;
}

static fsdp_status make_layer_arrays(fsdp_transformer *t, int64_t rows, block_arrays *arrays,
                                     fsdp_error *err)
{
    const fsdp_transformer_config *config = &t->config;
    const int64_t width = config->width, attended = config->heads * config->head_dim;
    const int64_t heads = config->heads + config->kv_heads; /* of q and k */
    if (config->form.has_layer_norm) {
        FSDP_TRY(make_array(t, rows, 1, &arrays->mean1, err));
        FSDP_TRY(make_array(t, rows, 1, &arrays->mean2, err));
    }
    if (config->form.is_gated)
        FSDP_TRY(make_array(t, rows, config->inner, &arrays->gate, err));
    FSDP_TRY(make_array(t, rows, 1, &arrays->inverse1, err));
    FSDP_TRY(make_array(t, rows, width, &arrays->normed1, err));
    FSDP_TRY(make_array(t, rows, qkv_width(config), &arrays->qkv, err));
    if (t->blocks[0].q_norm.weight) {
        FSDP_TRY(make_array(t, rows, heads * config->head_dim, &arrays->heads, err));
        FSDP_TRY(make_array(t, rows, heads, &arrays->heads_inverse, err));
    }
    FSDP_TRY(make_array(t, rows, attended, &arrays->attended, err));
    FSDP_TRY(make_array(t, rows, config->heads, &arrays->log_sum, err));
    FSDP_TRY(make_array(t, rows, width, &arrays->middle, err));
    FSDP_TRY(make_array(t, rows, 1, &arrays->inverse2, err));
    FSDP_TRY(make_array(t, rows, width, &arrays->normed2, err));
    FSDP_TRY(make_array(t, rows, config->inner, &arrays->up, err));
    return make_array(t, rows, config->inner, &arrays->active, err);
}

/* All layers share them. */
static fsdp_status make_layer_grads(fsdp_transformer *t, int64_t rows, fsdp_error *err)
{
    const fsdp_transformer_config *config = &t->config;
    if (config->form.is_gated)
        FSDP_TRY(make_array(t, rows, config->inner, &t->dgate, err));
    FSDP_TRY(make_array(t, rows, config->width, &t->dnormed, err));
    FSDP_TRY(make_array(t, rows, qkv_width(config), &t->dqkv, err));
    if (t->blocks[0].q_norm.weight)
        FSDP_TRY(make_array(t, rows, (config->heads + config->kv_heads) * config->head_dim,
                            &t->dheads, err));
    FSDP_TRY(make_array(t, rows, config->heads * config->head_dim, &t->dattended, err));
    FSDP_TRY(make_array(t, rows, config->inner, &t->dactive, err));
    return make_array(t, rows, config->inner, &t->dup, err);
}

static void free_all(fsdp_transformer *t, float **const *all, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        t->ops->free(t->nn, *all[i]);
        *all[i] = NULL;
    }
}

static void free_layer_arrays(fsdp_transformer *t, block_arrays *arrays)
{
    float **const all[] = {&arrays->mean1,   &arrays->inverse1, &arrays->normed1,
                           &arrays->qkv,     &arrays->attended, &arrays->log_sum,
                           &arrays->middle,  &arrays->mean2,    &arrays->inverse2,
                           &arrays->normed2, &arrays->gate,     &arrays->up,
                           &arrays->active,  &arrays->heads,    &arrays->heads_inverse};
    free_all(t, all, sizeof all / sizeof *all);
}

static void free_layer_grads(fsdp_transformer *t)
{
    float **const all[] = {&t->dnormed, &t->dqkv,  &t->dheads, &t->dattended,
                           &t->dactive, &t->dgate, &t->dup};
    free_all(t, all, sizeof all / sizeof *all);
}

/* --- of all rows ----------------------------------------------------------------------------------- */

static void free_rows(fsdp_transformer *t)
{
    float *const all[] = {t->last_mean, t->last_inverse, t->last_normed, t->dx, t->logits};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        t->ops->free(t->nn, all[i]);
    for (int64_t i = 0; t->arrays && i < (t->opts.recompute ? 1 : t->config.layers); i++)
        free_layer_arrays(t, &t->arrays[i]);
    free_layer_grads(t);
    for (int64_t i = 0; t->block_inputs && i <= t->config.layers; i++)
        t->ops->free(t->nn, t->block_inputs[i]);
    fsdp_free(t->arrays);
    fsdp_free(t->block_inputs);
    fsdp_free(t->inputs);
    fsdp_free(t->targets);
    fsdp_free(t->losses);
    t->last_mean = t->last_inverse = t->last_normed = t->dx = t->logits = NULL;
    t->arrays = NULL;
    t->block_inputs = NULL;
    t->inputs = t->targets = NULL;
    t->losses = NULL;
    t->room_rows = 0;
}

void fsdp_model_free_arrays(fsdp_transformer *t)
{
    if (!t->nn)
        return;
    free_rows(t);
    t->ops->free(t->nn, t->cosines);
    t->ops->free(t->nn, t->sines);
}

static fsdp_status make_layers(fsdp_transformer *t, int64_t rows, fsdp_error *err)
{
    const size_t layers = (size_t)t->config.layers;
    t->arrays = fsdp_alloc(layers, sizeof *t->arrays);
    t->block_inputs = fsdp_alloc(layers + 1, sizeof *t->block_inputs);
    if (!t->arrays || !t->block_inputs)
        return fsdp_fail_memory(err, "activations");
    for (size_t i = 0; i <= layers; i++)
        FSDP_TRY(make_array(t, rows, t->config.width, &t->block_inputs[i], err));
    for (size_t i = 0; i < (t->opts.recompute ? 1 : layers); i++)
        FSDP_TRY(make_layer_arrays(t, rows, &t->arrays[i], err));
    for (size_t i = 1; t->opts.recompute && i < layers; i++)
        t->arrays[i] = t->arrays[0];
    return FSDP_OK;
}

/* Logits are made for some rows at a time, so that a large vocabulary needs no rows x vocab. */
static int64_t logit_rows_for(const fsdp_transformer *t, int64_t rows)
{
    enum { MOST = 1 << 24 }; /* elements: 64 MiB */
    int64_t some = (t->opts.logit_room > 0 ? t->opts.logit_room : MOST) / t->config.vocab;
    return some < 1 ? 1 : some < rows ? some : rows;
}

static fsdp_status make_rows(fsdp_transformer *t, int64_t rows, fsdp_error *err)
{
    const fsdp_transformer_config *config = &t->config;
    const size_t count = (size_t)(rows > 0 ? rows : 1);
    t->inputs = fsdp_alloc(count, sizeof *t->inputs);
    t->targets = fsdp_alloc(count, sizeof *t->targets);
    t->losses = fsdp_alloc(count, sizeof *t->losses);
    if (!t->inputs || !t->targets || !t->losses)
        return fsdp_fail_memory(err, "the ids of a microbatch");
    FSDP_TRY(make_layers(t, rows, err));
    if (config->form.has_layer_norm)
        FSDP_TRY(make_array(t, rows, 1, &t->last_mean, err));
    FSDP_TRY(make_array(t, rows, 1, &t->last_inverse, err));
    FSDP_TRY(make_array(t, rows, config->width, &t->last_normed, err));
    FSDP_TRY(make_array(t, rows, config->width, &t->dx, err));
    FSDP_TRY(make_layer_grads(t, rows, err));
    t->logit_rows = logit_rows_for(t, rows);
    return make_array(t, t->logit_rows, config->vocab, &t->logits, err);
}

/* --- rotary positions ---------------------------------------------------------------------------- */

/* Frequencies in f32 throughout, as transformers computes them. */
static float frequency_of(const fsdp_transformer_config *config, int64_t pair)
{
    const float exponent = (float)(2 * pair) / (float)config->head_dim;
    const float plain = 1 / powf((float)config->rope.theta, exponent);
    return (float)((double)plain / fsdp_rope_divisor(&config->rope, (double)plain));
}

static void fill_angles(const fsdp_transformer_config *config, int64_t positions, float *cosines,
                        float *sines)
{
    const int64_t pairs = config->head_dim / 2;
    for (int64_t i = 0; i < pairs; i++) {
        const float frequency = frequency_of(config, i);
        for (int64_t p = 0; p < positions; p++) {
            const float angle = (float)p * frequency;
            cosines[p * pairs + i] = cosf(angle);
            sines[p * pairs + i] = sinf(angle);
        }
    }
}

static fsdp_status make_angles(fsdp_transformer *t, int64_t positions, fsdp_error *err)
{
    const int64_t count = positions * (t->config.head_dim / 2);
    if (!t->config.form.is_rotary || positions <= t->angle_room)
        return FSDP_OK;
    t->ops->free(t->nn, t->cosines);
    t->ops->free(t->nn, t->sines);
    t->angle_room = 0;
    t->cosines = t->sines = NULL;
    FSDP_TRY(make_array(t, count, 1, &t->cosines, err));
    FSDP_TRY(make_array(t, count, 1, &t->sines, err));
    float *host = fsdp_alloc((size_t)(2 * count), sizeof *host);
    if (!host)
        return fsdp_fail_memory(err, "rotary positions");
    fill_angles(&t->config, positions, host, host + count);
    t->ops->upload(t->nn, t->cosines, host, count);
    t->ops->upload(t->nn, t->sines, host + count, count);
    fsdp_free(host);
    t->angle_room = positions;
    return FSDP_OK;
}

/* Makes arrays for that many rows, and angles of that many positions. */
static fsdp_status make_arrays(fsdp_transformer *t, int64_t rows, int64_t positions,
                               fsdp_error *err)
{
    FSDP_TRY(make_angles(t, positions, err));
    if (rows <= t->room_rows && t->inputs)
        return FSDP_OK;
    free_rows(t);
    fsdp_status st = make_rows(t, rows, err);
    if (st == FSDP_OK)
        t->room_rows = rows;
    else
        free_rows(t);
    return st;
}

/* Checks the batch, and makes arrays large enough for it, and angles of that many positions. */
static fsdp_status prepare_batch(fsdp_transformer *t, const fsdp_token_batch *batch,
                                 bool with_targets, int64_t positions, fsdp_error *err)
{
    int64_t rows;
    if (batch->sequences < 0 || batch->length < 1 ||
        batch->stride < batch->length + (with_targets ? 1 : 0) ||
        fsdp_mul_overflow(batch->sequences, batch->length, &rows))
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "cannot take a microbatch of %lld sequences of %lld tokens with a stride "
                         "of %lld: the stride must hold the tokens and the last target",
                         (long long)batch->sequences, (long long)batch->length,
                         (long long)batch->stride);
    if (batch->length > t->config.context)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "sequences of %lld tokens are longer than the model's context of %lld",
                         (long long)batch->length, (long long)t->config.context);
    FSDP_TRY(check_ids(t, batch, batch->length + (with_targets ? 1 : 0), err));
    return make_arrays(t, rows, positions, err);
}

fsdp_status fsdp_model_take_batch(fsdp_transformer *t, const fsdp_token_batch *batch,
                                  bool with_targets, int64_t positions, fsdp_error *err)
{
    FSDP_TRY(prepare_batch(t, batch, with_targets, positions, err));
    t->sequences = batch->sequences;
    t->length = batch->length;
    take_ids(t, batch, with_targets);
    return FSDP_OK;
}

fsdp_status fsdp_transformer_prepare(fsdp_transformer *t, const fsdp_token_batch *batch,
                                     fsdp_error *err)
{
    return prepare_batch(t, batch, true, batch->length, err);
}
