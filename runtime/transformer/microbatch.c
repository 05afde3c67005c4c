/*
 * A microbatch: ids through embedding, layers, last norm and head to the loss, and back. The head runs once,
 * when backward has begun: its logits become their gradient in place, some rows at a time.
 */
#include "runtime/transformer/transformer_internal.h"

/* --- embedding ----------------------------------------------------------------------------------- */

/* Apart from the embedding of tokens: of bf16 parameters one f32 copy at a time is at hand. */
static fsdp_status add_positions(fsdp_transformer *t, int64_t first, fsdp_error *err)
{
    const int64_t count = t->length * t->config.width;
    const float *positions = fsdp_param_f32(t->positions, t->params.weight);
    if (!positions)
        return fsdp_param_error(t->positions, err);
    for (int64_t s = 0; s < t->sequences; s++)
        t->ops->add(t->nn, t->block_inputs[0] + s * count, positions + first * t->config.width,
                    count);
    return FSDP_OK;
}

static fsdp_status embed(fsdp_transformer *t, int64_t first, fsdp_error *err)
{
    fsdp_nn_embedding call = {.ids = t->inputs,
                              .out = t->block_inputs[0],
                              .sequences = t->sequences,
                              .length = t->length,
                              .first = first,
                              .columns = t->config.width};
    call.table = fsdp_param_f32(t->tokens, t->params.weight);
    if (!call.table)
        return fsdp_param_error(t->tokens, err);
    t->ops->embed(t->nn, &call);
    return t->positions ? add_positions(t, first, err) : FSDP_OK;
}

static fsdp_status embed_grad(fsdp_transformer *t, fsdp_error *err)
{
    fsdp_nn_embedding_grad call = {.ids = t->inputs,
                                   .dout = t->dx,
                                   .sequences = t->sequences,
                                   .length = t->length,
                                   .columns = t->config.width};
    call.dtable = fsdp_param_grad(t->tokens);
    if (!call.dtable)
        return fsdp_param_error(t->tokens, err);
    if (t->positions) {
        call.dpositions = fsdp_param_grad(t->positions);
        if (!call.dpositions)
            return fsdp_param_error(t->positions, err);
    }
    t->ops->embed_grad(t->nn, &call);
    return FSDP_OK;
}

/* --- forward: ids -> the last layer's result ----------------------------------------------------- */

static fsdp_status run_layers(fsdp_transformer *t, const model_caches *caches, fsdp_error *err)
{
    const int64_t first = caches ? caches->layers[0].used : 0;
    FSDP_TRY(embed(t, first, err));
    for (int64_t i = 0; i < t->config.layers; i++) {
        const model_block *block = &t->blocks[i];
        FSDP_TRY(fsdp_unit_pre_forward(block->unit, err));
        FSDP_TRY(fsdp_model_block(t, block, t->block_inputs[i], t->block_inputs[i + 1],
                                  caches ? &caches->layers[i] : NULL, err));
        FSDP_TRY(fsdp_unit_post_forward(block->unit, err));
    }
    return FSDP_OK;
}

fsdp_status fsdp_model_last_norm(fsdp_transformer *t, fsdp_error *err)
{
    return fsdp_model_norm(t, &t->last_norm,
                           &(fsdp_nn_norm){.x = t->block_inputs[t->config.layers],
                                           .y = t->last_normed,
                                           .mean = t->last_mean,
                                           .inverse = t->last_inverse,
                                           .rows = model_rows(t)},
                           err);
}

/* --- head ---------------------------------------------------------------------------------------- */

fsdp_status fsdp_model_head(fsdp_transformer *t, int64_t first, int64_t rows, fsdp_error *err)
{
    const fsdp_linear head = {.weight = t->head, .in = t->config.width, .out = t->config.vocab};
    return fsdp_linear_forward(&t->params, &head, t->last_normed + first * t->config.width,
                               t->logits, rows, err);
}

/* Losses of all rows; with a scale the gradients of the head and, in dnormed, of its input. */
static fsdp_status find_losses(fsdp_transformer *t, double scale, bool with_grads, fsdp_error *err)
{
    const fsdp_linear head = {.weight = t->head, .in = t->config.width, .out = t->config.vocab};
    const int64_t rows = model_rows(t);
    if (with_grads && rows == 0 && !fsdp_param_grad(t->head)) /* else overwritten below */
        return fsdp_param_error(t->head, err);
    for (int64_t first = 0; first < rows; first += t->logit_rows) {
        int64_t some = rows - first < t->logit_rows ? rows - first : t->logit_rows;
        FSDP_TRY(fsdp_model_head(t, first, some, err));
        t->ops->cross_entropy(t->nn, &(fsdp_nn_cross_entropy){.logits = t->logits,
                                                              .targets = t->targets + first,
                                                              .losses = t->losses + first,
                                                              .rows = some,
                                                              .columns = t->config.vocab,
                                                              .scale = scale,
                                                              .keeps_logits = !with_grads});
        if (!with_grads)
            continue;
        fsdp_linear_grad call = {.x = t->last_normed + first * t->config.width,
                                 .dy = t->logits,
                                 .dx = t->dnormed + first * t->config.width,
                                 .adds = first > 0,
                                 .rows = some};
        FSDP_TRY(fsdp_linear_backward(&t->params, &head, &call, err));
    }
    return FSDP_OK;
}

static double sum_losses(const fsdp_transformer *t)
{
    double sum = 0;
    for (int64_t r = 0; r < model_rows(t); r++)
        sum += t->losses[r];
    return sum;
}

/* --- backward ------------------------------------------------------------------------------------ */

/* dx, the gradient of the last layer's result. */
static fsdp_status run_head(fsdp_transformer *t, double scale, fsdp_error *err)
{
    FSDP_TRY(fsdp_model_last_norm(t, err));
    FSDP_TRY(find_losses(t, scale, true, err));
    return fsdp_model_norm_grad(t, &t->last_norm,
                                &(fsdp_nn_norm_grad){.x = t->block_inputs[t->config.layers],
                                                     .mean = t->last_mean,
                                                     .inverse = t->last_inverse,
                                                     .dy = t->dnormed,
                                                     .dx = t->dx,
                                                     .rows = model_rows(t)},
                                err);
}

static fsdp_status go_back(fsdp_transformer *t, double scale, fsdp_error *err)
{
    fsdp_unit *root = fsdp_root_unit(t->root);
    FSDP_TRY(fsdp_unit_pre_backward(root, err));
    FSDP_TRY(run_head(t, scale, err));
    for (int64_t i = t->config.layers - 1; i >= 0; i--) {
        const model_block *block = &t->blocks[i];
        FSDP_TRY(fsdp_unit_pre_backward(block->unit, err));
        FSDP_TRY(fsdp_model_block_grad(t, block, t->block_inputs[i], err));
        FSDP_TRY(fsdp_unit_post_backward(block->unit, err));
    }
    FSDP_TRY(embed_grad(t, err));
    FSDP_TRY(fsdp_unit_post_backward(root, err));
    return fsdp_root_end_backward(t->root, err);
}

/* --- a microbatch -------------------------------------------------------------------------------- */

/* Every rank learns that one cannot take its sequences, before any collective of the step. */
static fsdp_status take_batch(fsdp_transformer *t, const fsdp_token_batch *batch, bool with_targets,
                              fsdp_error *err)
{
    return fsdp_ctl_agree(t->ctl, fsdp_model_take_batch(t, batch, with_targets, err), err);
}

fsdp_status fsdp_model_forward(fsdp_transformer *t, const model_caches *caches, fsdp_error *err)
{
    fsdp_unit *root = fsdp_root_unit(t->root);
    FSDP_TRY(fsdp_root_begin_forward(t->root, err));
    FSDP_TRY(fsdp_unit_pre_forward(root, err));
    return run_layers(t, caches, err);
}

fsdp_status fsdp_model_end_forward(fsdp_transformer *t, fsdp_error *err)
{
    FSDP_TRY(fsdp_unit_post_forward(fsdp_root_unit(t->root), err));
    return fsdp_root_end_forward(t->root, err);
}

fsdp_status fsdp_transformer_train(fsdp_transformer *t, const fsdp_token_batch *batch, double scale,
                                   double *loss_out, fsdp_error *err)
{
    FSDP_TRY(take_batch(t, batch, true, err));
    FSDP_TRY(fsdp_model_forward(t, NULL, err));
    FSDP_TRY(fsdp_model_end_forward(t, err));
    FSDP_TRY(go_back(t, scale, err));
    FSDP_TRY(t->ops->finish(t->nn, err));
    *loss_out = sum_losses(t);
    return FSDP_OK;
}

/* Forward alone; `finish_rows` gets the rows while the root's parameters are gathered. */
typedef fsdp_status (*rows_use)(fsdp_transformer *t, void *context, fsdp_error *err);

static fsdp_status look(fsdp_transformer *t, rows_use use, void *context, fsdp_error *err)
{
    FSDP_TRY(fsdp_root_set_evaluating(t->root, true, err));
    FSDP_TRY(fsdp_model_forward(t, NULL, err));
    FSDP_TRY(fsdp_model_last_norm(t, err));
    FSDP_TRY(use(t, context, err));
    FSDP_TRY(fsdp_model_end_forward(t, err));
    FSDP_TRY(t->ops->finish(t->nn, err));
    return fsdp_root_set_evaluating(t->root, false, err);
}

static fsdp_status use_losses(fsdp_transformer *t, void *context, fsdp_error *err)
{
    (void)context;
    return find_losses(t, 0, false, err);
}

fsdp_status fsdp_transformer_evaluate(fsdp_transformer *t, const fsdp_token_batch *batch,
                                      double *loss_out, fsdp_error *err)
{
    FSDP_TRY(take_batch(t, batch, true, err));
    FSDP_TRY(look(t, use_losses, NULL, err));
    *loss_out = sum_losses(t);
    return FSDP_OK;
}

static fsdp_status use_logits(fsdp_transformer *t, void *context, fsdp_error *err)
{
    float *out = context;
    const int64_t rows = model_rows(t), vocab = t->config.vocab;
    for (int64_t first = 0; first < rows; first += t->logit_rows) {
        int64_t some = rows - first < t->logit_rows ? rows - first : t->logit_rows;
        FSDP_TRY(fsdp_model_head(t, first, some, err));
        t->ops->download(t->nn, out + first * vocab, t->logits, some * vocab);
    }
    return FSDP_OK;
}

fsdp_status fsdp_transformer_logits(fsdp_transformer *t, const fsdp_token_batch *batch,
                                    float *logits_out, fsdp_error *err)
{
    FSDP_TRY(take_batch(t, batch, false, err));
    return look(t, use_logits, logits_out, err);
}
