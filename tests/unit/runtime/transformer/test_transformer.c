/*
 * Whole tiny models: gradients against finite differences, the same numbers on any number of ranks and in any
 * way to run, first values, and sampling. Numbers of real models are compared by tests/train/models.py.
 */
#include "runtime/transformer/transformer.h"
#include "tests/unit/runtime/expect_toy.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SEQUENCES = 3, LENGTH = 7, MOST_PARAMS = 64, VOCAB = 23 };
/* Elements of logits at a time: the 7 rows of a rank's sequence are three pieces, the last one smaller. */
enum { FEW_ROWS = 3 * VOCAB + 1 };

typedef struct model_case {
    const char *text; /* config.json */
    int64_t replicate, micro;
    bool recompute;
    int threads, reshard;
    int64_t logit_room;
} model_case;

/* --- models of a rank ----------------------------------------------------------------------------- */

typedef struct made_model {
    fsdp_mesh *mesh;
    fsdp_transformer *t;
    fsdp_root *root;
    int64_t ids[SEQUENCES * (LENGTH + 1)];
} made_model;

static fsdp_transformer_config configs[8]; /* of the ranks: too large for a stack */

static fsdp_status make_mesh(fsdp_world *world, int64_t replicate, fsdp_mesh **mesh_out,
                             fsdp_error *err)
{
    static const char *const names[] = {"replicate", "dp"};
    const int64_t ranks = fsdp_world_size(world);
    if (!replicate)
        return fsdp_world_mesh(world, 1, &ranks, &names[1], mesh_out, err);
    return fsdp_world_mesh(world, 2, (int64_t[]){replicate, ranks / replicate}, names, mesh_out,
                           err);
}

static fsdp_status make(world_rank *rank, const model_case *what, made_model *made, fsdp_error *err)
{
    fsdp_transformer_config *config = &configs[fsdp_world_rank(rank->world)];
    *made = (made_model){0};
    FSDP_TRY(fsdp_transformer_config_parse(what->text, strlen(what->text), "c", config, err));
    FSDP_TRY(make_mesh(rank->world, what->replicate, &made->mesh, err));
    const fsdp_transformer_opts opts = {
        .unit = {.mesh = made->mesh, .reshard_after_forward = what->reshard},
        .recompute = what->recompute,
        .threads = what->threads,
        .logit_room = what->logit_room};
    FSDP_TRY(fsdp_transformer_create(rank->world, config, &opts, &made->t, err));
    made->root = fsdp_transformer_root(made->t);
    for (int i = 0; i < SEQUENCES * (LENGTH + 1); i++)
        made->ids[i] = (i * 7 + i * i % 5) % VOCAB;
    return fsdp_transformer_init(made->t, 5, err);
}

static void unmake(made_model *made)
{
    fsdp_transformer_free(made->t);
    fsdp_mesh_free(made->mesh);
}

static fsdp_status sum_over_ranks(fsdp_world *world, double *value, fsdp_error *err)
{
    double all[8];
    FSDP_TRY(fsdp_ctl_allgather(fsdp_world_ctl(world), value, sizeof *value, all, err));
    *value = 0;
    for (int r = 0; r < fsdp_world_size(world); r++)
        *value += all[r];
    return FSDP_OK;
}

static void share_of(const made_model *made, fsdp_world *world, int64_t *first, int64_t *count)
{
    const int rank = fsdp_world_rank(world), ranks = fsdp_world_size(world);
    (void)made;
    *first = SEQUENCES * rank / ranks;
    *count = SEQUENCES * (rank + 1) / ranks - *first;
}

static fsdp_token_batch part_of(const made_model *made, int64_t first, int64_t count)
{
    return (fsdp_token_batch){.ids = made->ids + first * (LENGTH + 1),
                              .sequences = count,
                              .length = LENGTH,
                              .stride = LENGTH + 1};
}

/* Forward and backward of all sequences, split over ranks and microbatches; the mean loss. */
static fsdp_status backward(world_rank *rank, const model_case *what, made_model *made,
                            double *loss_out, fsdp_error *err)
{
    int64_t first, count;
    share_of(made, rank->world, &first, &count);
    const int ranks = fsdp_world_size(rank->world);
    const int64_t most = (SEQUENCES + ranks - 1) / ranks, micro = what->micro ? what->micro : most;
    const int64_t rounds = (most + micro - 1) / micro;
    *loss_out = 0;
    for (int64_t i = 0; i < rounds; i++) {
        const int64_t begin = i * micro < count ? i * micro : count;
        const int64_t end = begin + micro < count ? begin + micro : count;
        const fsdp_token_batch part = part_of(made, first + begin, end - begin);
        double loss;
        FSDP_TRY(fsdp_root_begin_microbatch(fsdp_transformer_root(made->t), i, rounds, err));
        FSDP_TRY(fsdp_transformer_train(made->t, &part, 1.0 / (SEQUENCES * LENGTH), &loss, err));
        *loss_out += loss / (SEQUENCES * LENGTH);
    }
    return sum_over_ranks(rank->world, loss_out, err);
}

/* --- gradients ------------------------------------------------------------------------------------ */

/* Gathers again, since the shards were written to. */
static fsdp_status loss_of(made_model *made, double *loss_out, fsdp_error *err)
{
    const fsdp_token_batch batch = part_of(made, 0, SEQUENCES);
    for (size_t u = 0; u < fsdp_root_unit_count(made->root); u++)
        FSDP_TRY(fsdp_unit_reshard(fsdp_root_unit_at(made->root, u), err));
    FSDP_TRY(fsdp_transformer_evaluate(made->t, &batch, loss_out, err));
    *loss_out /= SEQUENCES * LENGTH;
    return FSDP_OK;
}

/* The derivative along the gradient itself: its difference quotient is |gradient|^2, far from rounding. */
static fsdp_status expect_slope(made_model *made, fsdp_param *param, const float *grad,
                                fsdp_error *err)
{
    fsdp_box box;
    float *data = fsdp_param_shard(param, &box);
    const int64_t count = fsdp_box_count(&box);
    double square = 0, up, down;
    for (int64_t i = 0; i < count; i++)
        square += (double)grad[i] * grad[i];
    if (square < 1e-10) /* the key's bias of gpt2 has no gradient but rounding */
        return FSDP_OK;
    const double step = 0.005 / sqrt(square);
    float *kept = malloc((size_t)count * sizeof *kept);
    EXPECT(kept);
    memcpy(kept, data, (size_t)count * sizeof *kept);
    for (int64_t i = 0; i < count; i++)
        data[i] = (float)(kept[i] + step * grad[i]);
    FSDP_TRY(loss_of(made, &up, err));
    data = fsdp_param_shard(param, &box);
    for (int64_t i = 0; i < count; i++)
        data[i] = (float)(kept[i] - step * grad[i]);
    FSDP_TRY(loss_of(made, &down, err));
    data = fsdp_param_shard(param, &box);
    memcpy(data, kept, (size_t)count * sizeof *kept);
    free(kept);
    const double slope = (up - down) / (2 * step);
    if (!(fabs(slope - square) <= 0.01 * square + 2e-6 / step))
        return fsdp_fail(err, FSDP_DIFFERS, "%s: the loss changes by %g, its gradient says %g",
                         fsdp_param_describe(param).name, slope, square);
    return FSDP_OK;
}

static fsdp_status expect_gradients(world_rank *rank, fsdp_error *err)
{
    made_model made;
    double loss;
    float *grads[MOST_PARAMS];
    fsdp_param *params[MOST_PARAMS];
    int n = 0;
    FSDP_TRY(make(rank, rank->user, &made, err));
    FSDP_TRY(backward(rank, rank->user, &made, &loss, err));
    for (size_t u = 0; u < fsdp_root_unit_count(made.root); u++) {
        fsdp_unit *unit = fsdp_root_unit_at(made.root, u);
        for (size_t i = 0; i < fsdp_unit_param_count(unit) && n < MOST_PARAMS; i++, n++) {
            fsdp_box box;
            params[n] = fsdp_unit_param_at(unit, i);
            fsdp_param_shard(params[n], &box);
            const size_t size = (size_t)fsdp_box_count(&box) * sizeof(float);
            grads[n] = malloc(size + 1);
            EXPECT(grads[n] && fsdp_param_shard_grad(params[n]));
            memcpy(grads[n], fsdp_param_shard_grad(params[n]), size);
        }
    }
    fsdp_root_zero_grad(made.root);
    for (int i = 0; i < n; i++) {
        FSDP_TRY(expect_slope(&made, params[i], grads[i], err));
        free(grads[i]);
    }
    EXPECT(n > 8);
    unmake(&made);
    return FSDP_OK;
}

#define GPT2                                                                                      \
    "{\"model_type\": \"gpt2\", \"n_layer\": 3, \"n_head\": 6, \"n_embd\": 36, \"n_positions\": " \
    "12, "                                                                                        \
    "\"vocab_size\": 23, \"initializer_range\": 0.3"
#define LLAMA                                                                                    \
    "\"num_hidden_layers\": 2, \"num_attention_heads\": 4, \"num_key_value_heads\": 2, "         \
    "\"hidden_size\": 24, \"intermediate_size\": 40, \"max_position_embeddings\": 12, "          \
    "\"vocab_size\": 23, \"initializer_range\": 0.3, \"bos_token_id\": null, \"eos_token_id\": " \
    "null"

static const char *const models[] = {
    GPT2 "}",
    GPT2 ", \"activation_function\": \"relu\", \"n_inner\": 50, "
         "\"scale_attn_by_inverse_layer_idx\": true}",
    GPT2 ", \"activation_function\": \"gelu\", \"scale_attn_weights\": false, "
         "\"tie_word_embeddings\": false}",
    "{\"model_type\": \"llama\", " LLAMA "}",
    "{\"model_type\": \"llama\", \"head_dim\": 10, \"attention_bias\": true, \"mlp_bias\": true, "
    "\"tie_word_embeddings\": true, " LLAMA "}",
    "{\"model_type\": \"mistral\", \"sliding_window\": 3, " LLAMA "}",
    "{\"model_type\": \"qwen2\", \"use_sliding_window\": true, \"sliding_window\": 2, "
    "\"max_window_layers\": 1, " LLAMA "}",
    "{\"model_type\": \"qwen3\", \"head_dim\": 10, \"attention_bias\": true, " LLAMA "}",
    "{\"model_type\": \"qwen3\", \"use_sliding_window\": true, \"sliding_window\": 2, "
    "\"max_window_layers\": 1, \"head_dim\": 4, \"tie_word_embeddings\": true, " LLAMA "}",
    "{\"model_type\": \"llama\", \"rope_parameters\": {\"rope_type\": \"linear\", \"factor\": 2.0, "
    "\"rope_theta\": 100.0}, " LLAMA "}"};

enum { MODELS = sizeof models / sizeof *models };

Test(transformer, gradients_are_differences_of_the_loss)
{
    for (int i = 0; i < MODELS; i++) {
        model_case what = {.text = models[i], .logit_room = i % 2 ? 0 : 2 * FEW_ROWS};
        expect_body_on(1, "cpu", expect_gradients, &what);
    }
}

/* --- ways to run ---------------------------------------------------------------------------------- */

typedef struct way {
    model_case what;
    double loss, norm; /* out, of rank 0 */
    double first_sum, first_square;
} way;

static fsdp_status run_way(world_rank *rank, fsdp_error *err)
{
    way *mine = rank->user;
    made_model made;
    double loss, norm, sum = 0;
    FSDP_TRY(make(rank, &mine->what, &made, err));
    FSDP_TRY(backward(rank, &mine->what, &made, &loss, err));
    FSDP_TRY(fsdp_root_clip_grad_norm(made.root, &(fsdp_clip_opts){0}, &norm, err));
    for (size_t u = 0; u < fsdp_root_unit_count(made.root); u++) {
        fsdp_unit *unit = fsdp_root_unit_at(made.root, u);
        for (size_t i = 0; i < fsdp_unit_param_count(unit); i++) {
            fsdp_box box;
            const float *data = fsdp_param_shard(fsdp_unit_param_at(unit, i), &box);
            for (int64_t e = 0; e < fsdp_box_count(&box); e++)
                sum += data[e];
        }
    }
    FSDP_TRY(sum_over_ranks(rank->world, &sum, err));
    if (fsdp_world_rank(rank->world) == 0)
        *mine = (way){mine->what, loss, norm,
                      sum / (mine->what.replicate ? (double)mine->what.replicate : 1), 0};
    unmake(&made);
    return FSDP_OK;
}

static way run(int ranks, model_case what)
{
    way done = {.what = what};
    expect_body_on(ranks, "cpu", run_way, &done);
    return done;
}

static void expect_close(const way *a, const way *b, const char *text)
{
    cr_expect_float_eq(a->loss, b->loss, 1e-6, "%s: losses %.9g %.9g", text, a->loss, b->loss);
    cr_expect_float_eq(a->norm, b->norm, 1e-6 * a->norm, "%s: norms %.9g %.9g", text, a->norm,
                       b->norm);
    cr_expect_float_eq(a->first_sum, b->first_sum, 1e-9 * (1 + fabs(a->first_sum)), "%s: values",
                       text);
}

/* Three sequences on 2 and 4 ranks, on which they cannot lie evenly. */
Test(transformer, ranks_do_not_change_the_loss)
{
    for (int i = 0; i < MODELS; i++) {
        const way one = run(1, (model_case){.text = models[i]});
        for (int ranks = 2; ranks <= 4; ranks++) {
            const way several = run(ranks, (model_case){.text = models[i]});
            expect_close(&one, &several, models[i]);
        }
        const way replicated = run(4, (model_case){.text = models[i], .replicate = 2});
        const way micro = run(2, (model_case){.text = models[i], .micro = 1});
        expect_close(&one, &replicated, models[i]);
        expect_close(&one, &micro, models[i]);
        for (int64_t room = FEW_ROWS; room > 0;
             room -= FEW_ROWS - 1) { /* the last one: a row at a time */
            const way pieces = run(2, (model_case){.text = models[i], .logit_room = room});
            expect_close(&one, &pieces, models[i]);
        }
    }
}

Test(transformer, ways_to_run_give_the_same_bits)
{
    for (int i = 0; i < MODELS; i++) {
        const way plain = run(2, (model_case){.text = models[i]});
        const way others[] = {run(2, (model_case){.text = models[i], .recompute = true}),
                              run(2, (model_case){.text = models[i], .threads = 2}),
                              run(2, (model_case){.text = models[i], .reshard = -1})};
        for (size_t k = 0; k < sizeof others / sizeof *others; k++) {
            cr_expect_eq(plain.loss, others[k].loss, "%s: way %zu: %.17g %.17g", models[i], k,
                         plain.loss, others[k].loss);
            cr_expect_eq(plain.norm, others[k].norm, "%s: way %zu: %.17g %.17g", models[i], k,
                         plain.norm, others[k].norm);
        }
    }
}

/* Logits of all rows, made in pieces and at once. */
static fsdp_status expect_logits(world_rank *rank, fsdp_error *err)
{
    float logits[2][SEQUENCES * LENGTH * VOCAB];
    double losses[2];
    for (int i = 0; i < 2; i++) {
        const model_case what = {.text = models[0], .logit_room = i * 2 * FEW_ROWS};
        made_model made;
        FSDP_TRY(make(rank, &what, &made, err));
        const fsdp_token_batch batch = part_of(&made, 0, SEQUENCES);
        FSDP_TRY(fsdp_transformer_logits(made.t, &batch, logits[i], err));
        FSDP_TRY(fsdp_transformer_evaluate(made.t, &batch, &losses[i], err));
        unmake(&made);
    }
    for (int i = 0; i < SEQUENCES * LENGTH * VOCAB;
         i++) /* products of other sizes may round otherwise */
        EXPECT(fabsf(logits[0][i] - logits[1][i]) <= 1e-5f);
    EXPECT(fabs(losses[0] - losses[1]) <= 1e-5);
    return FSDP_OK;
}

Test(transformer, pieces_of_the_logits_do_not_show)
{
    expect_body_on(1, "cpu", expect_logits, NULL);
}

/* The loss of the logits, whose targets are the next ids. */
static double loss_of_logits(const made_model *made, const float *logits)
{
    double loss = 0;
    for (int s = 0; s < SEQUENCES; s++)
        for (int i = 0; i < LENGTH; i++) {
            const float *row = logits + (s * LENGTH + i) * VOCAB;
            double sum = 0;
            for (int v = 0; v < VOCAB; v++)
                sum += exp((double)row[v]);
            loss += log(sum) - (double)row[made->ids[s * (LENGTH + 1) + i + 1]];
        }
    return loss;
}

/* Looking changes nothing: a step after it is like one before it. A batch with an id that no row of the
 * embedding has is refused wherever it is. */
static fsdp_status look_and_train(world_rank *rank, fsdp_error *err)
{
    const model_case *what = rank->user;
    float logits[SEQUENCES * LENGTH * VOCAB];
    double loss, norm, norm_behind, evaluated;
    made_model made;
    FSDP_TRY(make(rank, what, &made, err));
    const fsdp_token_batch batch = part_of(&made, 0, SEQUENCES);
    FSDP_TRY(backward(rank, what, &made, &loss, err));
    FSDP_TRY(fsdp_root_clip_grad_norm(made.root, &(fsdp_clip_opts){0}, &norm, err));
    fsdp_root_zero_grad(made.root);
    FSDP_TRY(fsdp_transformer_logits(made.t, &batch, logits, err));
    FSDP_TRY(fsdp_transformer_evaluate(made.t, &batch, &evaluated, err));
    EXPECT(fabs(evaluated - loss_of_logits(&made, logits)) <= 1e-4);
    FSDP_TRY(backward(rank, what, &made, &loss, err));
    FSDP_TRY(fsdp_root_clip_grad_norm(made.root, &(fsdp_clip_opts){0}, &norm_behind, err));
    EXPECT(norm == norm_behind && fabs(loss - evaluated / (SEQUENCES * LENGTH)) <= 1e-6);
    made.ids[SEQUENCES * (LENGTH + 1) - 1] = VOCAB;
    EXPECT_REFUSAL(fsdp_transformer_evaluate(made.t, &batch, &evaluated, why),
                   "token 7 of sequence 2 is 23, beyond the model's vocabulary of 23");
    unmake(&made);
    return FSDP_OK;
}

Test(transformer, looking_changes_nothing)
{
    model_case what = {.text = models[3]};
    expect_body_on(1, "cpu", look_and_train, &what);
}

/* --- forms of one model --------------------------------------------------------------------------- */

static double loss_of_text(const char *more)
{
    char text[1000];
    snprintf(text, sizeof text, "{%s, " LLAMA "}", more);
    return run(1, (model_case){.text = text}).loss;
}

static void expect_loss(const char *one, const char *other, bool is_equal)
{
    const double a = loss_of_text(one), b = loss_of_text(other);
    cr_expect((fabs(a - b) <= 1e-7) == is_equal, "%s: %.9g; %s: %.9g", one, a, other, b);
}

#define PLAIN "\"model_type\": \"llama\""
#define ROPE(type, more) \
    PLAIN ", \"rope_parameters\": {\"rope_type\": \"" type "\", \"rope_theta\": 10000.0" more "}"
#define LLAMA3(low, high, context)                                                                \
    ROPE("llama3", ", \"factor\": 4.0, \"low_freq_factor\": " low ", \"high_freq_factor\": " high \
                   ", \"original_max_position_embeddings\": " context)

/* Waves that all are long are divided, as linear positions are; short ones are not. */
Test(transformer, scaled_positions)
{
    const char *linear = ROPE("linear", ", \"factor\": 4.0"), *some = LLAMA3("1.0", "4.0", "2000");
    expect_loss(PLAIN, ROPE("linear", ", \"factor\": 1.0"), true);
    expect_loss(PLAIN, linear, false);
    expect_loss(linear, LLAMA3("1.0", "4.0", "4"), true);
    expect_loss(PLAIN, LLAMA3("1.0", "4.0", "1000000"), true);
    expect_loss(PLAIN, some, false);
    expect_loss(linear, some, false);
}

/* A window holds for the layers from max_window_layers on. */
Test(transformer, windows_of_some_layers)
{
#define QWEN2(layers)                                                                  \
    "\"model_type\": \"qwen2\", \"use_sliding_window\": true, \"sliding_window\": 2, " \
    "\"max_window_layers\": " layers
    const char *all = "\"model_type\": \"mistral\", \"sliding_window\": 2";
    expect_loss(QWEN2("2"), PLAIN, true);
    expect_loss(QWEN2("0"), all, true);
    expect_loss(QWEN2("1"), PLAIN, false);
    expect_loss(QWEN2("1"), all, false);
}

/* --- first values --------------------------------------------------------------------------------- */

static fsdp_status expect_deviation(world_rank *rank, fsdp_error *err)
{
    made_model made;
    FSDP_TRY(make(rank, rank->user, &made, err));
    for (size_t u = 0; u < fsdp_root_unit_count(made.root); u++) {
        fsdp_unit *unit = fsdp_root_unit_at(made.root, u);
        for (size_t i = 0; i < fsdp_unit_param_count(unit); i++) {
            fsdp_param *param = fsdp_unit_param_at(unit, i);
            const fsdp_param_info info = fsdp_param_describe(param);
            const char *end = strrchr(info.name, '.');
            const float *data = fsdp_param_shard(param, NULL);
            const int64_t count = info.ndim > 1 ? info.shape[0] * info.shape[1] : info.shape[0];
            double square = 0, wanted = 0.3;
            for (int64_t e = 0; e < count; e++)
                square += (double)data[e] * data[e];
            if (info.ndim == 1)
                wanted = strcmp(end, ".bias") == 0 ? 0 : 1;
            else if (strstr(info.name, "c_proj"))
                wanted = 0.3 / sqrt(6);
            EXPECT(fabs(sqrt(square / (double)count) - wanted) <=
                   (info.ndim > 1 ? 0.1 * wanted : 0));
        }
    }
    unmake(&made);
    return FSDP_OK;
}

Test(transformer, first_values_have_their_deviation)
{
    model_case gpt2 = {.text = models[0]}, llama = {.text = models[3]};
    expect_body_on(1, "cpu", expect_deviation, &gpt2);
    expect_body_on(1, "cpu", expect_deviation, &llama);
}

/* --- sampling ------------------------------------------------------------------------------------- */

enum { PROMPT = 4, NEW = 20 };

/* Greedy ids by the whole forward of the ids that a cache would hold: all so far, and after the context's
 * end those from its last half on. */
static fsdp_status expect_greedy(made_model *made, const int64_t *sampled, fsdp_error *err)
{
    enum { CONTEXT = 12 };
    int64_t ids[PROMPT + NEW], begin = 0;
    float logits[CONTEXT * VOCAB];
    memcpy(ids, made->ids, PROMPT * sizeof *ids);
    for (int64_t n = 0; n < NEW; n++) {
        const int64_t known = PROMPT + n;
        if (known - begin > CONTEXT)
            begin = known - CONTEXT / 2;
        const fsdp_token_batch batch = {
            .ids = ids + begin, .sequences = 1, .length = known - begin, .stride = known - begin};
        FSDP_TRY(fsdp_transformer_logits(made->t, &batch, logits, err));
        const float *last = logits + (known - begin - 1) * VOCAB;
        int64_t best = 0;
        for (int64_t v = 1; v < VOCAB; v++)
            best = last[v] > last[best] ? v : best;
        EXPECT(sampled[n] == best);
        ids[known] = best;
    }
    return FSDP_OK;
}

static fsdp_status sample(made_model *made, fsdp_sampling how, int64_t *ids_out, fsdp_error *err)
{
    const fsdp_token_batch prompt = {
        .ids = made->ids, .sequences = 1, .length = PROMPT, .stride = PROMPT};
    how.count = NEW;
    FSDP_TRY(fsdp_transformer_sample(made->t, &prompt, &how, ids_out, err));
    for (int i = 0; i < NEW; i++)
        EXPECT(ids_out[i] >= 0 && ids_out[i] < VOCAB);
    return FSDP_OK;
}

/* Equal prompts: each sequence draws for itself, the first one what it draws alone. */
static fsdp_status expect_own_draws(made_model *made, const int64_t *alone, fsdp_error *err)
{
    const fsdp_sampling hot = {.temperature = 1.5, .seed = 3, .count = NEW};
    int64_t prompts[SEQUENCES][PROMPT], ids[SEQUENCES][NEW];
    for (int i = 0; i < SEQUENCES; i++)
        memcpy(prompts[i], made->ids, sizeof prompts[i]);
    const fsdp_token_batch batch = {
        .ids = prompts[0], .sequences = SEQUENCES, .length = PROMPT, .stride = PROMPT};
    FSDP_TRY(fsdp_transformer_sample(made->t, &batch, &hot, ids[0], err));
    EXPECT(memcmp(ids[0], alone, sizeof ids[0]) == 0);
    EXPECT(memcmp(ids[0], ids[1], sizeof ids[0]) != 0);
    EXPECT(memcmp(ids[1], ids[2], sizeof ids[1]) != 0);
    EXPECT(memcmp(ids[0], ids[2], sizeof ids[0]) != 0);
    return FSDP_OK;
}

static fsdp_status expect_samples(world_rank *rank, fsdp_error *err)
{
    const fsdp_sampling hot = {.temperature = 1.5, .seed = 3},
                        other = {.temperature = 1.5, .seed = 4};
    const fsdp_sampling one = {.temperature = 1.5, .top_k = 1},
                        nucleus = {.temperature = 1.5, .top_p = 1e-9};
    made_model made;
    int64_t a[NEW], b[NEW];
    FSDP_TRY(make(rank, rank->user, &made, err));
    FSDP_TRY(sample(&made, (fsdp_sampling){0}, a, err)); /* 24 tokens: beyond the context of 12 */
    FSDP_TRY(expect_greedy(&made, a, err));
    FSDP_TRY(sample(&made, one, b, err));
    EXPECT(memcmp(a, b, sizeof a) == 0);
    FSDP_TRY(sample(&made, nucleus, b, err));
    EXPECT(memcmp(a, b, sizeof a) == 0);
    FSDP_TRY(sample(&made, hot, a, err));
    FSDP_TRY(sample(&made, hot, b, err));
    EXPECT(memcmp(a, b, sizeof a) == 0);
    FSDP_TRY(expect_own_draws(&made, a, err));
    FSDP_TRY(sample(&made, other, b, err));
    EXPECT(memcmp(a, b, sizeof a) != 0);
    unmake(&made);
    return FSDP_OK;
}

Test(transformer, samples_are_functions_of_the_seed)
{
    for (int i = 0; i < MODELS; i++) {
        model_case what = {.text = models[i]};
        expect_body_on(1, "cpu", expect_samples, &what);
        expect_body_on(2, "cpu", expect_samples, &what);
    }
}
