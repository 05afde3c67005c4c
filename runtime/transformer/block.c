/*
 * A layer of a transformer: its parameters, its arrays, forward and backward: x + attention(norm(x)), then
 * the same with the MLP. Its parts are tensors of the description of the family (statedict/models) by their
 * roles; a part that the family lacks has no weight. A new part is a row of `parts`, its arrays, and its
 * arithmetic.
 */
#include "runtime/transformer/transformer_internal.h"

#include "base/text.h"

#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

/* --- parts ------------------------------------------------------------------------------------------- */

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

bool fsdp_model_find_part(const fsdp_transformer_config *config, const char *role,
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

const char *fsdp_model_missing_part(uint64_t has)
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

fsdp_status fsdp_model_add_param(fsdp_transformer *t, const char *name, int ndim,
                                 const int64_t *shape, fsdp_param **param_out, fsdp_error *err)
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
        return fsdp_model_add_param(t, name, 1, &in, is_bias ? &norm->bias : &norm->weight, err);
    }
    fsdp_linear *linear = (fsdp_linear *)((char *)block + row->at);
    linear->in = in;
    linear->out = out;
    linear->is_in_by_out = is_in_by_out;
    if (is_bias)
        return fsdp_model_add_param(t, name, 1, &out, &linear->bias, err);
    const int64_t shape[2] = {is_in_by_out ? in : out, is_in_by_out ? out : in};
    return fsdp_model_add_param(t, name, 2, shape, &linear->weight, err);
}

void fsdp_model_tensor_name(const fsdp_architecture *model, const char *name, int64_t layer,
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

fsdp_status fsdp_model_declare_block(fsdp_transformer *t, const fsdp_architecture *model,
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
        fsdp_model_tensor_name(model, tensor->name, block->number, name);
        FSDP_TRY(add_part(t, row, is_bias, name, block, err));
        /* the unit has the name up to the number */
        snprintf(prefix, sizeof prefix, "%.*s", (int)(strlen(name) - strlen(number + 7)), name);
    }
    return fsdp_unit_create(t->model, prefix, &t->opts.unit, &block->unit, err);
}

/* --- arrays ------------------------------------------------------------------------------------------ */

fsdp_status fsdp_model_alloc(fsdp_transformer *t, int64_t rows, int64_t columns, float **data_out,
                             fsdp_error *err)
{
    int64_t count;
    *data_out = fsdp_mul_overflow(rows, columns, &count) ? NULL : t->ops->alloc(t->nn, count);
    return *data_out ? FSDP_OK : fsdp_fail_memory(err, "activations");
}

fsdp_status fsdp_model_make_block_arrays(fsdp_transformer *t, int64_t rows, block_arrays *arrays,
                                         fsdp_error *err)
{
    const fsdp_transformer_config *config = &t->config;
    const int64_t width = config->width, attended = config->heads * config->head_dim;
    const int64_t heads = config->heads + config->kv_heads; /* of q and k */
    if (config->form.has_layer_norm) {
        FSDP_TRY(fsdp_model_alloc(t, rows, 1, &arrays->mean1, err));
        FSDP_TRY(fsdp_model_alloc(t, rows, 1, &arrays->mean2, err));
    }
    if (config->form.is_gated)
        FSDP_TRY(fsdp_model_alloc(t, rows, config->inner, &arrays->gate, err));
    FSDP_TRY(fsdp_model_alloc(t, rows, 1, &arrays->inverse1, err));
    FSDP_TRY(fsdp_model_alloc(t, rows, width, &arrays->normed1, err));
    FSDP_TRY(fsdp_model_alloc(t, rows, size_of(config, QKV), &arrays->qkv, err));
    if (t->blocks[0].q_norm.weight) {
        FSDP_TRY(fsdp_model_alloc(t, rows, heads * config->head_dim, &arrays->heads, err));
        FSDP_TRY(fsdp_model_alloc(t, rows, heads, &arrays->heads_inverse, err));
    }
    FSDP_TRY(fsdp_model_alloc(t, rows, attended, &arrays->attended, err));
    FSDP_TRY(fsdp_model_alloc(t, rows, config->heads, &arrays->log_sum, err));
    FSDP_TRY(fsdp_model_alloc(t, rows, width, &arrays->middle, err));
    FSDP_TRY(fsdp_model_alloc(t, rows, 1, &arrays->inverse2, err));
    FSDP_TRY(fsdp_model_alloc(t, rows, width, &arrays->normed2, err));
    FSDP_TRY(fsdp_model_alloc(t, rows, config->inner, &arrays->up, err));
    return fsdp_model_alloc(t, rows, config->inner, &arrays->active, err);
}

fsdp_status fsdp_model_make_block_grads(fsdp_transformer *t, int64_t rows, fsdp_error *err)
{
    const fsdp_transformer_config *config = &t->config;
    if (config->form.is_gated)
        FSDP_TRY(fsdp_model_alloc(t, rows, config->inner, &t->dgate, err));
    FSDP_TRY(fsdp_model_alloc(t, rows, config->width, &t->dnormed, err));
    FSDP_TRY(fsdp_model_alloc(t, rows, size_of(config, QKV), &t->dqkv, err));
    if (t->blocks[0].q_norm.weight)
        FSDP_TRY(fsdp_model_alloc(t, rows, (config->heads + config->kv_heads) * config->head_dim,
                                  &t->dheads, err));
    FSDP_TRY(fsdp_model_alloc(t, rows, config->heads * config->head_dim, &t->dattended, err));
    FSDP_TRY(fsdp_model_alloc(t, rows, config->inner, &t->dactive, err));
    return fsdp_model_alloc(t, rows, config->inner, &t->dup, err);
}

static void free_all(fsdp_transformer *t, float **const *all, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        t->ops->free(t->nn, *all[i]);
        *all[i] = NULL;
    }
}

void fsdp_model_free_block_arrays(fsdp_transformer *t, block_arrays *arrays)
{
    float **const all[] = {&arrays->mean1,   &arrays->inverse1, &arrays->normed1,
                           &arrays->qkv,     &arrays->attended, &arrays->log_sum,
                           &arrays->middle,  &arrays->mean2,    &arrays->inverse2,
                           &arrays->normed2, &arrays->gate,     &arrays->up,
                           &arrays->active,  &arrays->heads,    &arrays->heads_inverse};
    free_all(t, all, sizeof all / sizeof *all);
}

void fsdp_model_free_block_grads(fsdp_transformer *t)
{
    float **const all[] = {&t->dnormed, &t->dqkv,  &t->dheads, &t->dattended,
                           &t->dactive, &t->dgate, &t->dup};
    free_all(t, all, sizeof all / sizeof *all);
}

/* --- norms ----------------------------------------------------------------------------------------- */

fsdp_status fsdp_model_norm(fsdp_transformer *t, const model_norm *norm, const fsdp_nn_norm *call,
                            fsdp_error *err)
{
    fsdp_nn_norm whole = *call;
    whole.weight = fsdp_param_f32(norm->weight, t->params.weight);
    if (!whole.weight)
        return fsdp_param_error(norm->weight, err);
    if (norm->bias) {
        whole.bias = fsdp_param_f32(norm->bias, t->params.bias);
        if (!whole.bias)
            return fsdp_param_error(norm->bias, err);
    }
    whole.columns = norm->columns;
    whole.eps = t->config.norm_eps;
    t->ops->norm(t->nn, &whole);
    return FSDP_OK;
}

fsdp_status fsdp_model_norm_grad(fsdp_transformer *t, const model_norm *norm,
                                 const fsdp_nn_norm_grad *call, fsdp_error *err)
{
    fsdp_nn_norm_grad whole = *call;
    whole.weight = fsdp_param_f32(norm->weight, t->params.weight);
    whole.dweight = fsdp_param_grad(norm->weight);
    if (!whole.weight || !whole.dweight)
        return fsdp_param_error(norm->weight, err);
    if (norm->bias) {
        whole.dbias = fsdp_param_grad(norm->bias);
        if (!whole.dbias)
            return fsdp_param_error(norm->bias, err);
    }
    whole.columns = norm->columns;
    t->ops->norm_grad(t->nn, &whole);
    return FSDP_OK;
}

/* --- attention ----------------------------------------------------------------------------------- */

/* Queries, keys and values lie in one array: next to each other in every row (packed), or in turn. */
typedef struct qkv_view {
    float *q, *k, *v;
    int64_t q_row, k_row; /* v lies as k does */
} qkv_view;

static qkv_view view_qkv(const fsdp_transformer *t, const model_block *block, float *data)
{
    const int64_t queries = t->config.heads * t->config.head_dim;
    const int64_t keys = t->config.kv_heads * t->config.head_dim, rows = model_rows(t);
    if (block->qkv.weight) {
        const int64_t row = queries + 2 * keys;
        return (qkv_view){data, data + queries, data + queries + keys, row, row};
    }
    float *k = data + rows * queries;
    return (qkv_view){data, k, k + rows * keys, queries, keys};
}

static void rotate(fsdp_transformer *t, float *x, int64_t row, int64_t heads, int64_t first,
                   bool backward)
{
    t->ops->rotate(t->nn, &(fsdp_nn_rotation){.x = x,
                                              .row = row,
                                              .sequences = t->sequences,
                                              .length = t->length,
                                              .first = first,
                                              .heads = heads,
                                              .head_dim = t->config.head_dim,
                                              .cos = t->cosines,
                                              .sin = t->sines,
                                              .backward = backward});
}

/* Each head of q and k is a row of its norm. */
static fsdp_status norm_heads(fsdp_transformer *t, const model_block *block, const qkv_view *from,
                              const qkv_view *to, fsdp_error *err)
{
    float *const inverse = t->arrays[block->number].heads_inverse;
    const int64_t q_rows = model_rows(t) * t->config.heads;
    const fsdp_nn_norm q = {.x = from->q, .y = to->q, .inverse = inverse, .rows = q_rows};
    const fsdp_nn_norm k = {.x = from->k,
                            .y = to->k,
                            .inverse = inverse + q_rows,
                            .rows = model_rows(t) * t->config.kv_heads};
    FSDP_TRY(fsdp_model_norm(t, &block->q_norm, &q, err));
    return fsdp_model_norm(t, &block->k_norm, &k, err);
}

static fsdp_status norm_heads_grad(fsdp_transformer *t, const model_block *block,
                                   const qkv_view *grads, const qkv_view *to, fsdp_error *err)
{
    const block_arrays *arrays = &t->arrays[block->number];
    const qkv_view from = view_qkv(t, block, arrays->heads);
    const int64_t q_rows = model_rows(t) * t->config.heads;
    const fsdp_nn_norm_grad q = {
        .x = from.q, .inverse = arrays->heads_inverse, .dy = grads->q, .dx = to->q, .rows = q_rows};
    const fsdp_nn_norm_grad k = {.x = from.k,
                                 .inverse = arrays->heads_inverse + q_rows,
                                 .dy = grads->k,
                                 .dx = to->k,
                                 .rows = model_rows(t) * t->config.kv_heads};
    FSDP_TRY(fsdp_model_norm_grad(t, &block->q_norm, &q, err));
    return fsdp_model_norm_grad(t, &block->k_norm, &k, err);
}

static fsdp_status make_qkv(fsdp_transformer *t, const model_block *block, const float *normed,
                            const qkv_view *view, fsdp_error *err)
{
    const int64_t rows = model_rows(t);
    if (block->qkv.weight)
        return fsdp_linear_forward(&t->params, &block->qkv, normed, view->q, rows, err);
    const bool has_norm = block->q_norm.weight;
    const qkv_view to = has_norm ? view_qkv(t, block, t->arrays[block->number].heads) : *view;
    FSDP_TRY(fsdp_linear_forward(&t->params, &block->q, normed, to.q, rows, err));
    FSDP_TRY(fsdp_linear_forward(&t->params, &block->k, normed, to.k, rows, err));
    FSDP_TRY(fsdp_linear_forward(&t->params, &block->v, normed, view->v, rows, err));
    return has_norm ? norm_heads(t, block, &to, view, err) : FSDP_OK;
}

static float scale_of(const fsdp_transformer *t, const model_block *block)
{
    double scale = t->config.scales_attention ? 1 / sqrt((double)t->config.head_dim) : 1;
    if (t->config.scales_by_layer)
        scale /= (double)(block->number + 1);
    return (float)scale;
}

static fsdp_nn_attention describe_attention(const fsdp_transformer *t, const model_block *block,
                                            const qkv_view *view, const block_arrays *arrays)
{
    const fsdp_transformer_config *config = &t->config;
    return (fsdp_nn_attention){.q = view->q,
                               .k = view->k,
                               .v = view->v,
                               .q_row = view->q_row,
                               .k_row = view->k_row,
                               .v_row = view->k_row,
                               .out = arrays->attended,
                               .log_sum = arrays->log_sum,
                               .sequences = t->sequences,
                               .queries = t->length,
                               .keys = t->length,
                               .key_room = t->length,
                               .heads = config->heads,
                               .kv_heads = config->kv_heads,
                               .head_dim = config->head_dim,
                               .window = config->is_windowed[block->number] ? config->window : 0,
                               .scale = scale_of(t, block)};
}

/* Appends this call's keys and values, and lets attention read all. */
static void use_cache(fsdp_transformer *t, const qkv_view *view, const key_cache *cache,
                      fsdp_nn_attention *call)
{
    const int64_t width = t->config.kv_heads * t->config.head_dim;
    for (int64_t s = 0; s < t->sequences; s++)
        for (int64_t r = 0; r < t->length; r++) {
            const int64_t to = (s * cache->room + cache->used + r) * width;
            const int64_t from = (s * t->length + r) * view->k_row;
            t->ops->copy(t->nn, cache->keys + to, view->k + from, width);
            t->ops->copy(t->nn, cache->values + to, view->v + from, width);
        }
    call->k = cache->keys;
    call->v = cache->values;
    call->k_row = call->v_row = width;
    call->keys = cache->used + t->length;
    call->key_room = cache->room;
    call->log_sum = NULL;
}

static void attend(fsdp_transformer *t, const model_block *block, const qkv_view *view,
                   const key_cache *cache)
{
    const int64_t first = cache ? cache->used : 0;
    fsdp_nn_attention call = describe_attention(t, block, view, &t->arrays[block->number]);
    if (t->config.form.is_rotary) {
        rotate(t, view->q, view->q_row, t->config.heads, first, false);
        rotate(t, view->k, view->k_row, t->config.kv_heads, first, false);
    }
    if (cache)
        use_cache(t, view, cache, &call);
    t->ops->attend(t->nn, &call);
}

/* dqkv, the gradient of q, k and v before rotation, from dattended. */
static void attend_grad(fsdp_transformer *t, const model_block *block, const qkv_view *grads)
{
    block_arrays *arrays = &t->arrays[block->number];
    const qkv_view view = view_qkv(t, block, arrays->qkv);
    t->ops->attend_grad(
        t->nn, &(fsdp_nn_attention_grad){.forward = describe_attention(t, block, &view, arrays),
                                         .dout = t->dattended,
                                         .dq = grads->q,
                                         .dk = grads->k,
                                         .dv = grads->v});
    if (t->config.form.is_rotary) {
        rotate(t, grads->q, grads->q_row, t->config.heads, 0, true);
        rotate(t, grads->k, grads->k_row, t->config.kv_heads, 0, true);
    }
}

static fsdp_status make_qkv_grad(fsdp_transformer *t, const model_block *block,
                                 const qkv_view *grads, fsdp_error *err)
{
    const fsdp_linear *const linears[] = {&block->q, &block->k, &block->v};
    const bool has_norm = block->q_norm.weight;
    const qkv_view from = has_norm ? view_qkv(t, block, t->dheads) : *grads;
    const float *const dys[] = {from.q, from.k, grads->v};
    fsdp_linear_grad call = {.x = t->arrays[block->number].normed1,
                             .dy = grads->q,
                             .dx = t->dnormed,
                             .rows = model_rows(t)};
    if (block->qkv.weight)
        return fsdp_linear_backward(&t->params, &block->qkv, &call, err);
    if (has_norm)
        FSDP_TRY(norm_heads_grad(t, block, grads, &from, err));
    for (int i = 0; i < 3; i++) {
        call.dy = dys[i];
        call.adds_dx = i > 0;
        FSDP_TRY(fsdp_linear_backward(&t->params, linears[i], &call, err));
    }
    return FSDP_OK;
}

/* --- forward ------------------------------------------------------------------------------------- */

/* to = from + linear(x) */
static fsdp_status add_linear(fsdp_transformer *t, const fsdp_linear *linear, const float *x,
                              const float *from, float *to, fsdp_error *err)
{
    FSDP_TRY(fsdp_linear_forward(&t->params, linear, x, to, model_rows(t), err));
    t->ops->add(t->nn, to, from, model_rows(t) * t->config.width);
    return FSDP_OK;
}

static fsdp_status make_active(fsdp_transformer *t, const model_block *block, fsdp_error *err)
{
    block_arrays *arrays = &t->arrays[block->number];
    const int64_t rows = model_rows(t);
    fsdp_nn_activation call = {.function = t->config.activation,
                               .x = arrays->up,
                               .y = arrays->active,
                               .count = rows * t->config.inner};
    FSDP_TRY(fsdp_linear_forward(&t->params, &block->up, arrays->normed2, arrays->up, rows, err));
    if (t->config.form.is_gated) {
        FSDP_TRY(fsdp_linear_forward(&t->params, &block->gate, arrays->normed2, arrays->gate, rows,
                                     err));
        call.x = arrays->gate;
        call.gate = arrays->up;
    }
    t->ops->activate(t->nn, &call);
    return FSDP_OK;
}

fsdp_status fsdp_model_block(fsdp_transformer *t, const model_block *block, const float *x,
                             float *y, const key_cache *cache, fsdp_error *err)
{
    block_arrays *arrays = &t->arrays[block->number];
    const qkv_view view = view_qkv(t, block, arrays->qkv);
    FSDP_TRY(fsdp_model_norm(t, &block->norm1,
                             &(fsdp_nn_norm){.x = x,
                                             .y = arrays->normed1,
                                             .mean = arrays->mean1,
                                             .inverse = arrays->inverse1,
                                             .rows = model_rows(t)},
                             err));
    FSDP_TRY(make_qkv(t, block, arrays->normed1, &view, err));
    attend(t, block, &view, cache);
    FSDP_TRY(add_linear(t, &block->output, arrays->attended, x, arrays->middle, err));
    FSDP_TRY(fsdp_model_norm(t, &block->norm2,
                             &(fsdp_nn_norm){.x = arrays->middle,
                                             .y = arrays->normed2,
                                             .mean = arrays->mean2,
                                             .inverse = arrays->inverse2,
                                             .rows = model_rows(t)},
                             err));
    FSDP_TRY(make_active(t, block, err));
    return y ? add_linear(t, &block->down, arrays->active, arrays->middle, y, err) : FSDP_OK;
}

/* --- backward ------------------------------------------------------------------------------------ */

/* dnormed, the gradient of the second norm's result. */
static fsdp_status make_mlp_grad(fsdp_transformer *t, const model_block *block, fsdp_error *err)
{
    block_arrays *arrays = &t->arrays[block->number];
    const int64_t rows = model_rows(t);
    fsdp_nn_activation_grad call = {.function = t->config.activation,
                                    .x = arrays->up,
                                    .dy = t->dactive,
                                    .dx = t->dup,
                                    .count = rows * t->config.inner};
    fsdp_linear_grad down = {.x = arrays->active, .dy = t->dx, .dx = t->dactive, .rows = rows};
    fsdp_linear_grad up = {.x = arrays->normed2, .dy = t->dup, .dx = t->dnormed, .rows = rows};
    fsdp_linear_grad gate = {
        .x = arrays->normed2, .dy = t->dgate, .dx = t->dnormed, .rows = rows, .adds_dx = true};
    FSDP_TRY(fsdp_linear_backward(&t->params, &block->down, &down, err));
    if (t->config.form.is_gated) {
        call.x = arrays->gate;
        call.gate = arrays->up;
        call.dx = t->dgate;
        call.dgate = t->dup;
    }
    t->ops->activate_grad(t->nn, &call);
    FSDP_TRY(fsdp_linear_backward(&t->params, &block->up, &up, err));
    return t->config.form.is_gated ? fsdp_linear_backward(&t->params, &block->gate, &gate, err)
                                   : FSDP_OK;
}

/* Adds the gradient through a norm to dx. */
static fsdp_status add_norm_grad(fsdp_transformer *t, const model_norm *norm, const float *x,
                                 const float *mean, const float *inverse, fsdp_error *err)
{
    return fsdp_model_norm_grad(t, norm,
                                &(fsdp_nn_norm_grad){.x = x,
                                                     .mean = mean,
                                                     .inverse = inverse,
                                                     .dy = t->dnormed,
                                                     .dx = t->dx,
                                                     .adds_dx = true,
                                                     .rows = model_rows(t)},
                                err);
}

fsdp_status fsdp_model_block_grad(fsdp_transformer *t, const model_block *block, const float *x,
                                  fsdp_error *err)
{
    block_arrays *arrays = &t->arrays[block->number];
    const qkv_view grads = view_qkv(t, block, t->dqkv);
    if (t->opts.recompute)
        FSDP_TRY(fsdp_model_block(t, block, x, NULL, NULL, err));
    FSDP_TRY(make_mlp_grad(t, block, err));
    FSDP_TRY(add_norm_grad(t, &block->norm2, arrays->middle, arrays->mean2, arrays->inverse2, err));
    fsdp_linear_grad output = {
        .x = arrays->attended, .dy = t->dx, .dx = t->dattended, .rows = model_rows(t)};
    FSDP_TRY(fsdp_linear_backward(&t->params, &block->output, &output, err));
    attend_grad(t, block, &grads);
    FSDP_TRY(make_qkv_grad(t, block, &grads, err));
    return add_norm_grad(t, &block->norm1, x, arrays->mean1, arrays->inverse1, err);
}
