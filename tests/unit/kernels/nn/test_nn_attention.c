/*
 * Attention of kernels/nn.h against its formula in f64, and its gradients against central differences of that
 * formula, along the axes where that is cheap and along seeded directions elsewhere. Registered twice, the
 * second time with FSDP_KERNELS=c.
 */
#include "tests/unit/kernels/nn/nn_values.h"

#include <string.h>

typedef struct shape {
    int64_t sequences, queries, keys, key_room, heads, kv_heads, head_dim, window;
} shape;

typedef struct arrays {
    shape s;
    int64_t q_count, k_count, out_count;
    float *q, *k, *v, *out, *dout, *dq, *dk, *dv, *log_sum;
} arrays;

/* Rows of q, k and v have three elements more than their heads need. */
static int64_t q_row(shape s)
{
    return s.heads * s.head_dim + 3;
}

static int64_t k_row(shape s)
{
    return s.kv_heads * s.head_dim + 3;
}

static arrays make_arrays(shape s)
{
    arrays a = {.s = s};
    a.q_count = s.sequences * s.queries * q_row(s);
    a.k_count = s.sequences * s.key_room * k_row(s);
    a.out_count = s.sequences * s.queries * s.heads * s.head_dim;
    a.q = values("q", a.q_count);
    a.k = values("k", a.k_count);
    a.v = values("v", a.k_count);
    a.out = values("out", a.out_count);
    a.dout = values("dout", a.out_count);
    a.dq = values("dq", a.q_count);
    a.dk = values("dk", a.k_count);
    a.dv = values("dv", a.k_count);
    a.log_sum = values("ls", s.sequences * s.heads * s.queries);
    return a;
}

static void free_arrays(arrays *a)
{
    float *all[] = {a->q, a->k, a->v, a->out, a->dout, a->dq, a->dk, a->dv, a->log_sum};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        free(all[i]);
}

static fsdp_nn_attention call_of(const arrays *a)
{
    shape s = a->s;
    return (fsdp_nn_attention){.q = a->q,
                               .k = a->k,
                               .v = a->v,
                               .q_row = q_row(s),
                               .k_row = k_row(s),
                               .v_row = k_row(s),
                               .out = a->out,
                               .log_sum = a->log_sum,
                               .sequences = s.sequences,
                               .queries = s.queries,
                               .keys = s.keys,
                               .key_room = s.key_room,
                               .heads = s.heads,
                               .kv_heads = s.kv_heads,
                               .head_dim = s.head_dim,
                               .window = s.window,
                               .scale = 2.5f};
}

/* --- the formula --- */

static double *in_f64(const float *from, int64_t count)
{
    double *to = malloc(((size_t)count + 1) * sizeof *to);
    for (int64_t i = 0; i < count; i++)
        to[i] = (double)from[i];
    return to;
}

/* One row of one head. Returns ln of the sum of exp(scores). */
static double attend_row(shape s, const double *q, const double *k, const double *v,
                         int64_t position, double *out)
{
    int64_t first = s.window > 0 && position >= s.window ? position - s.window + 1 : 0;
    double sum = 0;
    memset(out, 0, (size_t)s.head_dim * sizeof *out);
    for (int64_t j = first; j <= position; j++) {
        double score = 0;
        for (int64_t d = 0; d < s.head_dim; d++)
            score += q[d] * k[j * k_row(s) + d];
        double p = exp(2.5 * score);
        sum += p;
        for (int64_t d = 0; d < s.head_dim; d++)
            out[d] += p * v[j * k_row(s) + d];
    }
    for (int64_t d = 0; d < s.head_dim; d++)
        out[d] /= sum;
    return log(sum);
}

/* out and log_sum, each unless NULL; returns the sum of dout * out. */
static double attend(shape s, const double *q, const double *k, const double *v, const float *dout,
                     double *out, double *log_sum)
{
    double loss = 0, row[64];
    for (int64_t r = 0; r < s.sequences * s.queries; r++)
        for (int64_t h = 0; h < s.heads; h++) {
            int64_t sequence = r / s.queries, i = r % s.queries, kv = h / (s.heads / s.kv_heads);
            int64_t keys = sequence * s.key_room * k_row(s) + kv * s.head_dim;
            int64_t at = (r * s.heads + h) * s.head_dim;
            double log_of_sum = attend_row(s, q + r * q_row(s) + h * s.head_dim, k + keys, v + keys,
                                           s.keys - s.queries + i, row);
            if (log_sum)
                log_sum[(sequence * s.heads + h) * s.queries + i] = log_of_sum;
            for (int64_t d = 0; d < s.head_dim; d++) {
                loss += (double)dout[at + d] * row[d];
                if (out)
                    out[at + d] = row[d];
            }
        }
    return loss;
}

/* --- checks --- */

static void check_forward(fsdp_nn *nn, const arrays *a)
{
    fsdp_nn_attention call = call_of(a);
    nn->ops->attend(nn, &call);
    double *q = in_f64(a->q, a->q_count), *k = in_f64(a->k, a->k_count),
           *v = in_f64(a->v, a->k_count);
    int64_t sums = a->s.sequences * a->s.heads * a->s.queries;
    double *out = in_f64(a->out, a->out_count), *log_sum = in_f64(a->log_sum, sums);
    attend(a->s, q, k, v, a->dout, out, log_sum);
    for (int64_t i = 0; i < a->out_count; i++)
        expect_near((double)a->out[i], out[i], 3e-6, "out", i);
    for (int64_t i = 0; i < sums; i++)
        expect_near((double)a->log_sum[i], log_sum[i], 3e-6, "log_sum", i);
    free(q);
    free(k);
    free(v);
    free(out);
    free(log_sum);
}

static double *moved(const float *x, int64_t count, const char *name, int64_t axis, double by)
{
    double *to = in_f64(x, count);
    for (int64_t i = 0; i < count; i++)
        to[i] += by * (axis < 0 ? fsdp_uniform(9, name, (uint64_t)i) : i == axis);
    return to;
}

/* The derivative of the loss along an axis of one of q, k, v, or along a direction (axis -1). */
static double derivative(const arrays *a, int which, int64_t axis)
{
    const double step = 1e-5;
    double loss[2];
    for (int side = 0; side < 2; side++) {
        double by = side ? step : -step;
        double *q = moved(a->q, a->q_count, "dir", axis, which == 0 ? by : 0);
        double *k = moved(a->k, a->k_count, "dir", axis, which == 1 ? by : 0);
        double *v = moved(a->v, a->k_count, "dir", axis, which == 2 ? by : 0);
        loss[side] = attend(a->s, q, k, v, a->dout, NULL, NULL);
        free(q);
        free(k);
        free(v);
    }
    return (loss[1] - loss[0]) / (2 * step);
}

/* Elements between the rows of heads belong to nobody. */
static bool is_gap(int64_t i, int64_t row)
{
    return i % row >= row - 3;
}

static void check_array(const arrays *a, int which, const float *grad, int64_t count, int64_t row,
                        bool along_axes)
{
    static const char *const names[] = {"dq", "dk", "dv"};
    float *before = values(names[which], count);
    double along = 0;
    for (int64_t i = 0; i < count; i++) {
        if (is_gap(i, row))
            cr_assert_eq(grad[i], before[i], "%s %lld", names[which], (long long)i);
        else if (along_axes)
            expect_near((double)grad[i], derivative(a, which, i), 1e-5, names[which], i);
        if (!is_gap(i, row))
            along += (double)grad[i] * fsdp_uniform(9, "dir", (uint64_t)i);
    }
    expect_near(along, derivative(a, which, -1), 2e-5, names[which], -1);
    free(before);
}

static void check_backward(fsdp_nn *nn, const arrays *a, bool along_axes)
{
    fsdp_nn_attention_grad call = {call_of(a), a->dout, a->dq, a->dk, a->dv};
    nn->ops->attend_grad(nn, &call);
    check_array(a, 0, a->dq, a->q_count, q_row(a->s), along_axes);
    check_array(a, 1, a->dk, a->k_count, k_row(a->s), along_axes);
    check_array(a, 2, a->dv, a->k_count, k_row(a->s), along_axes);
}

static void check(shape s, bool along_axes)
{
    fsdp_nn *nn = open_nn(2);
    arrays a = make_arrays(s);
    check_forward(nn, &a);
    if (s.queries == s.key_room)
        check_backward(nn, &a, along_axes);
    free_arrays(&a);
    finish_nn(nn);
}

Test(nn_attention, heads_groups_and_windows)
{
    check((shape){1, 1, 1, 1, 1, 1, 1, 0}, true);
    check((shape){2, 5, 5, 5, 4, 2, 6, 0}, true);
    check((shape){1, 7, 7, 7, 3, 1, 3, 3}, true);
    check((shape){1, 4, 4, 4, 2, 2, 5, 1}, true);
    check((shape){1, 6, 6, 6, 2, 2, 1, 9}, true);
    check((shape){0, 3, 3, 3, 2, 2, 4, 0}, false);
}

Test(nn_attention, several_blocks)
{
    check((shape){1, 131, 131, 131, 4, 2, 6, 0}, false);
    check((shape){2, 101, 101, 101, 3, 1, 17, 20}, false);
    check((shape){1, 400, 400, 400, 2, 1, 8, 33}, false);
}

Test(nn_attention, fewer_queries_than_keys)
{
    check((shape){2, 1, 9, 11, 4, 2, 6, 0}, false);
    check((shape){2, 3, 150, 160, 4, 2, 16, 0}, false);
    check((shape){1, 100, 250, 250, 2, 2, 8, 120}, false);
}

/* Generation with a cache of keys gives the bits of the whole sequence. */
Test(nn_attention, a_row_does_not_depend_on_the_others)
{
    for (int64_t window = 0; window < 60; window += 37) {
        fsdp_nn *nn = open_nn(2);
        arrays all = make_arrays((shape){1, 203, 203, 203, 2, 1, 9, window});
        fsdp_nn_attention call = call_of(&all);
        nn->ops->attend(nn, &call);
        float last[18];
        for (int64_t i = 0; i < 203; i += 29) {
            fsdp_nn_attention one = call;
            one.q += i * call.q_row;
            one.queries = 1;
            one.keys = i + 1;
            one.out = last;
            one.log_sum = NULL;
            nn->ops->attend(nn, &one);
            cr_assert_arr_eq(last, all.out + i * 18, sizeof last);
        }
        free_arrays(&all);
        finish_nn(nn);
    }
}
