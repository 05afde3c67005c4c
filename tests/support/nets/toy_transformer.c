/* See transformer.h. */
#include "tests/support/nets/toy_transformer.h"

#include <math.h>
#include <string.h>

enum {
    VOCAB = TRANSFORMER_VOCAB,
    WIDTH = TRANSFORMER_WIDTH,
    HEADS = TRANSFORMER_HEADS,
    TOKENS = TRANSFORMER_TOKENS,
    HIDDEN = TRANSFORMER_HIDDEN,
    STREAM = TRANSFORMER_STREAM,
    HEAD_WIDTH = WIDTH / HEADS
};

const transformer_param transformer_root_params[ROOT_PARAMS] = {
    {"embed.weight", 2, {VOCAB, WIDTH}},
    {"places.weight", 2, {TOKENS, WIDTH}},
    {"norm.weight", 1, {WIDTH, 1}},
    {"norm.bias", 1, {WIDTH, 1}},
};

const transformer_param transformer_block_params[BLOCK_PARAMS] = {
    {"norm_1.weight", 1, {WIDTH, 1}},
    {"norm_1.bias", 1, {WIDTH, 1}},
    {"attention.qkv.weight", 2, {3 * WIDTH, WIDTH}},
    {"attention.qkv.bias", 1, {3 * WIDTH, 1}},
    {"attention.out.weight", 2, {WIDTH, WIDTH}},
    {"attention.out.bias", 1, {WIDTH, 1}},
    {"norm_2.weight", 1, {WIDTH, 1}},
    {"norm_2.bias", 1, {WIDTH, 1}},
    {"mlp.up.weight", 2, {HIDDEN, WIDTH}},
    {"mlp.up.bias", 1, {HIDDEN, 1}},
    {"mlp.down.weight", 2, {WIDTH, HIDDEN}},
    {"mlp.down.bias", 1, {WIDTH, 1}},
};

/* --- layers ----------------------------------------------------------------------------------- */

/* y = x w^T + b, for every token; b may be NULL. */
static void linear(float *y, const float *x, const float *w, const float *b, int out, int in)
{
    for (int t = 0; t < TOKENS; t++)
        for (int o = 0; o < out; o++) {
            float sum = b ? b[o] : 0;
            for (int k = 0; k < in; k++)
                sum += x[t * in + k] * w[o * in + k];
            y[t * out + o] = sum;
        }
}

/* dx is overwritten. */
static void linear_backward(float *dx, float *dw, float *db, const float *dy, const float *x,
                            const float *w, int out, int in)
{
    memset(dx, 0, (size_t)(TOKENS * in) * sizeof *dx);
    for (int t = 0; t < TOKENS; t++)
        for (int o = 0; o < out; o++) {
            float e = dy[t * out + o];
            if (db)
                db[o] += e;
            for (int k = 0; k < in; k++) {
                dx[t * in + k] += e * w[o * in + k];
                dw[o * in + k] += e * x[t * in + k];
            }
        }
}

static void norm(float *y, const float *x, const float *w, const float *b, norm_state *state)
{
    for (int t = 0; t < TOKENS; t++) {
        const float *row = x + t * WIDTH;
        float mean = 0, square = 0;
        for (int i = 0; i < WIDTH; i++)
            mean += row[i] / WIDTH;
        for (int i = 0; i < WIDTH; i++)
            square += (row[i] - mean) * (row[i] - mean) / WIDTH;
        state->scale[t] = 1 / sqrtf(square + 1e-5f);
        for (int i = 0; i < WIDTH; i++) {
            float normal = (row[i] - mean) * state->scale[t];
            state->normal[t * WIDTH + i] = normal;
            y[t * WIDTH + i] = normal * w[i] + b[i];
        }
    }
}

/* dx is added to. */
static void norm_backward(float *dx, float *dw, float *db, const float *dy, const float *w,
                          const norm_state *state)
{
    for (int t = 0; t < TOKENS; t++) {
        const float *normal = state->normal + t * WIDTH, *e = dy + t * WIDTH;
        float mean = 0, along = 0;
        for (int i = 0; i < WIDTH; i++) {
            mean += e[i] * w[i] / WIDTH;
            along += e[i] * w[i] * normal[i] / WIDTH;
            dw[i] += e[i] * normal[i];
            db[i] += e[i];
        }
        for (int i = 0; i < WIDTH; i++)
            dx[t * WIDTH + i] += (e[i] * w[i] - mean - normal[i] * along) * state->scale[t];
    }
}

static void softmax(float *row, int n)
{
    float most = row[0], sum = 0;
    for (int i = 1; i < n; i++)
        most = fmaxf(most, row[i]);
    for (int i = 0; i < n; i++) {
        row[i] = expf(row[i] - most);
        sum += row[i];
    }
    for (int i = 0; i < n; i++)
        row[i] /= sum;
}

/* --- attention -------------------------------------------------------------------------------- */

static const float *part(const float *qkv, int token, int which, int head)
{
    return qkv + token * 3 * WIDTH + which * WIDTH + head * HEAD_WIDTH;
}

static float dot(const float *a, const float *b)
{
    float sum = 0;
    for (int i = 0; i < HEAD_WIDTH; i++)
        sum += a[i] * b[i];
    return sum;
}

static float sharpness(void)
{
    return 1 / sqrtf(HEAD_WIDTH);
}

static void attend(block_state *state)
{
    memset(state->attended, 0, sizeof state->attended);
    for (int h = 0; h < HEADS; h++)
        for (int t = 0; t < TOKENS; t++) {
            float *weights = state->weights[h][t];
            for (int s = 0; s <= t; s++)
                weights[s] =
                    dot(part(state->qkv, t, 0, h), part(state->qkv, s, 1, h)) * sharpness();
            softmax(weights, t + 1);
            float *out = state->attended + t * WIDTH + h * HEAD_WIDTH;
            for (int s = 0; s <= t; s++)
                for (int i = 0; i < HEAD_WIDTH; i++)
                    out[i] += weights[s] * part(state->qkv, s, 2, h)[i];
        }
}

/* One token's query in one head. */
static void attend_backward_one(const block_state *state, const float *d_attended, float *d_qkv,
                                int h, int t)
{
    const float *weights = state->weights[h][t];
    const float *e = d_attended + t * WIDTH + h * HEAD_WIDTH;
    float dw[TOKENS], along = 0;
    for (int s = 0; s <= t; s++) {
        dw[s] = dot(e, part(state->qkv, s, 2, h));
        along += dw[s] * weights[s];
        for (int i = 0; i < HEAD_WIDTH; i++)
            d_qkv[s * 3 * WIDTH + 2 * WIDTH + h * HEAD_WIDTH + i] += weights[s] * e[i];
    }
    for (int s = 0; s <= t; s++) {
        float d = (dw[s] - along) * weights[s] * sharpness();
        for (int i = 0; i < HEAD_WIDTH; i++) {
            d_qkv[t * 3 * WIDTH + h * HEAD_WIDTH + i] += d * part(state->qkv, s, 1, h)[i];
            d_qkv[s * 3 * WIDTH + WIDTH + h * HEAD_WIDTH + i] += d * part(state->qkv, t, 0, h)[i];
        }
    }
}

/* --- blocks ----------------------------------------------------------------------------------- */

static const float curve = 0.7978845608f, bend = 0.044715f; /* of gelu */

static float gelu(float x)
{
    return 0.5f * x * (1 + tanhf(curve * (x + bend * x * x * x)));
}

static float gelu_slope(float x)
{
    float u = tanhf(curve * (x + bend * x * x * x));
    return 0.5f * (1 + u) + 0.5f * x * (1 - u * u) * curve * (1 + 3 * bend * x * x);
}

static void add_to(float *x, const float *y)
{
    for (int i = 0; i < STREAM; i++)
        x[i] += y[i];
}

void transformer_block_forward(const float *const *w, float *x, block_state *state)
{
    float y[STREAM];
    norm(state->h1, x, w[BLOCK_NORM_1], w[BLOCK_NORM_1_BIAS], &state->norm_1);
    linear(state->qkv, state->h1, w[BLOCK_QKV], w[BLOCK_QKV_BIAS], 3 * WIDTH, WIDTH);
    attend(state);
    linear(y, state->attended, w[BLOCK_OUT], w[BLOCK_OUT_BIAS], WIDTH, WIDTH);
    add_to(x, y);
    norm(state->h2, x, w[BLOCK_NORM_2], w[BLOCK_NORM_2_BIAS], &state->norm_2);
    linear(state->up, state->h2, w[BLOCK_UP], w[BLOCK_UP_BIAS], HIDDEN, WIDTH);
    for (int i = 0; i < TOKENS * HIDDEN; i++)
        state->active[i] = gelu(state->up[i]);
    linear(y, state->active, w[BLOCK_DOWN], w[BLOCK_DOWN_BIAS], WIDTH, HIDDEN);
    add_to(x, y);
}

void transformer_block_backward(const float *const *w, const block_state *state, float *const *g,
                                float *dx)
{
    float d_hidden[TOKENS * HIDDEN], dh[STREAM], d_qkv[3 * STREAM] = {0};
    linear_backward(d_hidden, g[BLOCK_DOWN], g[BLOCK_DOWN_BIAS], dx, state->active, w[BLOCK_DOWN],
                    WIDTH, HIDDEN);
    for (int i = 0; i < TOKENS * HIDDEN; i++)
        d_hidden[i] *= gelu_slope(state->up[i]);
    linear_backward(dh, g[BLOCK_UP], g[BLOCK_UP_BIAS], d_hidden, state->h2, w[BLOCK_UP], HIDDEN,
                    WIDTH);
    norm_backward(dx, g[BLOCK_NORM_2], g[BLOCK_NORM_2_BIAS], dh, w[BLOCK_NORM_2], &state->norm_2);
    linear_backward(dh, g[BLOCK_OUT], g[BLOCK_OUT_BIAS], dx, state->attended, w[BLOCK_OUT], WIDTH,
                    WIDTH);
    for (int h = 0; h < HEADS; h++)
        for (int t = 0; t < TOKENS; t++)
            attend_backward_one(state, dh, d_qkv, h, t);
    linear_backward(dh, g[BLOCK_QKV], g[BLOCK_QKV_BIAS], d_qkv, state->h1, w[BLOCK_QKV], 3 * WIDTH,
                    WIDTH);
    norm_backward(dx, g[BLOCK_NORM_1], g[BLOCK_NORM_1_BIAS], dh, w[BLOCK_NORM_1], &state->norm_1);
}

/* --- both ends -------------------------------------------------------------------------------- */

void transformer_embed(const float *const *root, const int *tokens, float *x)
{
    for (int t = 0; t < TOKENS; t++)
        for (int i = 0; i < WIDTH; i++)
            x[t * WIDTH + i] =
                root[ROOT_EMBED][tokens[t] * WIDTH + i] + root[ROOT_PLACES][t * WIDTH + i];
}

void transformer_embed_backward(const int *tokens, const float *dx, float *const *grads)
{
    for (int t = 0; t < TOKENS; t++)
        for (int i = 0; i < WIDTH; i++) {
            grads[ROOT_EMBED][tokens[t] * WIDTH + i] += dx[t * WIDTH + i];
            grads[ROOT_PLACES][t * WIDTH + i] += dx[t * WIDTH + i];
        }
}

double transformer_head_forward(const float *const *root, const float *x, const int *tokens,
                                head_state *state)
{
    double loss = 0;
    norm(state->h, x, root[ROOT_NORM], root[ROOT_NORM_BIAS], &state->norm);
    linear(state->chances, state->h, root[ROOT_EMBED], NULL, VOCAB, WIDTH);
    for (int t = 0; t < TOKENS; t++) {
        softmax(state->chances + t * VOCAB, VOCAB);
        loss -= log((double)state->chances[t * VOCAB + tokens[t + 1]]) / TOKENS;
    }
    return loss;
}

void transformer_head_backward(const float *const *root, const head_state *state, const int *tokens,
                               float *const *grads, float *dx)
{
    float d[TOKENS * VOCAB], dh[STREAM];
    for (int t = 0; t < TOKENS; t++)
        for (int v = 0; v < VOCAB; v++)
            d[t * VOCAB + v] =
                (state->chances[t * VOCAB + v] - (v == tokens[t + 1] ? 1.0f : 0.0f)) / TOKENS;
    linear_backward(dh, grads[ROOT_EMBED], NULL, d, state->h, root[ROOT_EMBED], VOCAB, WIDTH);
    memset(dx, 0, STREAM * sizeof *dx);
    norm_backward(dx, grads[ROOT_NORM], grads[ROOT_NORM_BIAS], dh, root[ROOT_NORM], &state->norm);
}
