/*
 * kernels/nn.h: products against chains of fused multiply-adds, bit for bit; everything else against formulas
 * in f64, gradients against their central differences. Attention has tests of its own (test_nn_attention.c).
 * Registered twice, the second time with FSDP_KERNELS=c.
 */
#include "tests/unit/kernels/nn/nn_values.h"

#include "base/core/mem.h"
#include "kernels/matrix.h"

#include <string.h>

static const double step = 1e-5;

/* --- products --- */

static float at(const float *data, bool is_turned, int64_t rows, int64_t columns, int64_t i,
                int64_t j)
{
    return is_turned ? data[j * rows + i] : data[i * columns + j];
}

static float expected_element(const fsdp_nn_product *call, int64_t i, int64_t j, float before)
{
    float sum = call->adds ? before : 0;
    for (int64_t p = 0; p < call->inner; p++)
        sum = fmaf(at(call->a, call->a_is_turned, call->rows, call->inner, i, p),
                   at(call->b, call->b_is_turned, call->inner, call->columns, p, j), sum);
    return call->bias ? sum + call->bias[j] : sum;
}

enum { GUARD = 0x5a, GUARDED = 32 };

/* values, at an address that is not one of vectors. */
static float *guarded_values(const char *name, int64_t count)
{
    float *data = values(name, count + GUARDED);
    memmove(data + 1, data, (size_t)count * sizeof *data);
    memset(data + 1 + count, GUARD, GUARDED * sizeof *data);
    return data + 1;
}

static void free_guarded(float *data, int64_t count)
{
    const unsigned char *behind = (const unsigned char *)(data + count);
    bool is_intact = true;
    for (size_t i = 0; i < GUARDED * sizeof *data; i++)
        is_intact &= behind[i] == GUARD;
    cr_assert(is_intact, "written after the end");
    free(data - 1);
}

static void check_product(fsdp_nn *nn, fsdp_nn_product call)
{
    float *a = guarded_values("a", call.rows * call.inner);
    float *b = guarded_values("b", call.inner * call.columns);
    float *before = values("out", call.rows * call.columns);
    float *out = guarded_values("out", call.rows * call.columns);
    call.a = a;
    call.b = b;
    call.out = out;
    nn->ops->product(nn, &call);
    int64_t wrong = 0;
    for (int64_t i = 0; i < call.rows; i++)
        for (int64_t j = 0; j < call.columns; j++) {
            int64_t e = i * call.columns + j;
            wrong += out[e] != expected_element(&call, i, j, before[e]);
        }
    cr_assert_eq(wrong, 0, "%lld of %lld x %lld x %lld", (long long)wrong, (long long)call.rows,
                 (long long)call.columns, (long long)call.inner);
    free_guarded(a, call.rows * call.inner);
    free_guarded(b, call.inner * call.columns);
    free(before);
    free_guarded(out, call.rows * call.columns);
}

static void check_products(fsdp_nn *nn, int64_t rows, int64_t columns, int64_t inner)
{
    float *bias = values("bias", columns);
    for (int kind = 0; kind < 12; kind++)
        check_product(nn, (fsdp_nn_product){.rows = rows,
                                            .columns = columns,
                                            .inner = inner,
                                            .a_is_turned = kind & 1,
                                            .b_is_turned = kind & 2,
                                            .adds = kind / 4 == 1,
                                            .bias = kind / 4 == 2 ? bias : NULL});
    free(bias);
}

Test(nn, every_element_of_a_product_is_one_chain)
{
    static const int64_t odd[] = {0, 1, 2, 3, 5, 7, 8, 15, 16, 17, 33, 35};
    fsdp_nn *nn = open_nn(2);
    for (size_t r = 0; r < sizeof odd / sizeof *odd; r++)
        for (size_t c = 0; c < sizeof odd / sizeof *odd; c++)
            for (size_t k = 0; k < sizeof odd / sizeof *odd; k++)
                check_products(nn, odd[r], odd[c], odd[k]);
    finish_nn(nn);
}

Test(nn, products_of_several_blocks_and_threads)
{
    fsdp_nn *nn = open_nn(3);
    check_products(nn, 113, 18, 397);
    check_products(nn, 3, 1205, 7);
    check_products(nn, 1, 30, 801);
    finish_nn(nn);
}

/* The three products of y = x W^T. */
static void check_layer(fsdp_nn *nn, int64_t rows, int64_t in, int64_t out)
{
    check_product(
        nn, (fsdp_nn_product){.rows = rows, .columns = out, .inner = in, .b_is_turned = true});
    check_product(nn, (fsdp_nn_product){.rows = rows, .columns = in, .inner = out});
    check_product(
        nn, (fsdp_nn_product){.rows = out, .columns = in, .inner = rows, .a_is_turned = true});
}

Test(nn, blocks_of_a_linear_layer_do_not_show)
{
    fsdp_nn *nn = open_nn(1);
    check_layer(nn, FSDP_MATRIX_COLUMNS + 3, FSDP_MATRIX_INNER + 5, 7);
    check_layer(nn, 8, FSDP_MATRIX_INNER + 5, FSDP_MATRIX_ROWS + 1);
    check_layer(nn, 4, 2 * FSDP_MATRIX_INNER + 1, FSDP_MATRIX_ROWS);
    check_layer(nn, 2, FSDP_MATRIX_COLUMNS, 2 * FSDP_MATRIX_INNER);
    finish_nn(nn);
}

/* A transposed result of three chunks, the last one smaller: the bits are those of the product that is
 * made in place, from the same matrix as it is not transposed. */
static void check_chunks(int threads, int64_t rows, int64_t columns, int64_t inner)
{
    fsdp_nn *nn = open_nn(threads);
    float *a = values("a", rows * inner), *turned = values("b", columns * inner);
    float *b = values("b", columns * inner), *bias = values("bias", columns);
    float *out = guarded_values("out", rows * columns), *want = values("out", rows * columns);
    for (int64_t j = 0; j < columns; j++)
        for (int64_t p = 0; p < inner; p++)
            b[p * columns + j] = turned[j * inner + p];
    fsdp_nn_product call = {.out = want,
                            .a = a,
                            .b = b,
                            .bias = bias,
                            .rows = rows,
                            .columns = columns,
                            .inner = inner};
    nn->ops->product(nn, &call);
    call.out = out;
    call.b = turned;
    call.b_is_turned = true;
    nn->ops->product(nn, &call);
    cr_assert_arr_eq(out, want, (size_t)(rows * columns) * sizeof *out, "%lld x %lld x %lld",
                     (long long)rows, (long long)columns, (long long)inner);
    free(a);
    free(b);
    free(turned);
    free(bias);
    free(want);
    free_guarded(out, rows * columns);
    finish_nn(nn);
}

Test(nn, chunks_of_a_turned_result_do_not_show)
{
    check_chunks(1, 300, 1801, 301); /* 864 columns at a time */
    check_chunks(3, 70, 1011, 301);  /* columns are cut over threads */
}

Test(nn, sums_of_columns_are_added_in_row_order)
{
    enum { ROWS = 37, COLUMNS = 1021 };
    fsdp_nn *nn = open_nn(3);
    float *x = values("x", ROWS * COLUMNS), *sums = values("s", COLUMNS),
          *want = values("s", COLUMNS);
    nn->ops->column_sums(nn, sums, x, ROWS, COLUMNS);
    for (int64_t i = 0; i < ROWS * COLUMNS; i++)
        want[i % COLUMNS] += x[i];
    cr_assert_arr_eq(sums, want, COLUMNS * sizeof *sums);
    free(x);
    free(sums);
    free(want);
    finish_nn(nn);
}

/* --- norms --- */

/* Element j of the norm of a row, in f64. */
static double norm_element(const fsdp_nn_norm *call, const double *x, int64_t j)
{
    double mean = 0, square = 0;
    for (int64_t i = 0; call->mean && i < call->columns; i++)
        mean += x[i] / (double)call->columns;
    for (int64_t i = 0; i < call->columns; i++)
        square += (x[i] - mean) * (x[i] - mean) / (double)call->columns;
    return (x[j] - mean) / sqrt(square + call->eps) * (double)call->weight[j] +
           (call->bias ? (double)call->bias[j] : 0);
}

/* The sum of dy * norm(x) of a row with x[changed] moved by `by`. */
static double norm_loss(const fsdp_nn_norm *call, const float *x, const float *dy, int64_t changed,
                        double by)
{
    double moved[64], loss = 0;
    for (int64_t i = 0; i < call->columns; i++)
        moved[i] = (double)x[i] + (i == changed ? by : 0);
    for (int64_t j = 0; j < call->columns; j++)
        loss += (double)dy[j] * norm_element(call, moved, j);
    return loss;
}

static void check_norm_grad(fsdp_nn *nn, const fsdp_nn_norm *call, bool adds)
{
    const int64_t columns = call->columns, count = call->rows * columns;
    float *dy = values("dy", count), *dx = values("dx", count), *before = values("dx", count);
    float *dweight = values("dw", columns), *dbias = values("db", columns);
    float *dweight0 = values("dw", columns), *dbias0 = values("db", columns);
    nn->ops->norm_grad(nn, &(fsdp_nn_norm_grad){call->x, call->weight, call->mean, call->inverse,
                                                dy, dx, adds, dweight, call->bias ? dbias : NULL,
                                                call->rows, columns});
    for (int64_t r = 0; r < call->rows; r++) {
        const float *x = call->x + r * columns, *d = dy + r * columns;
        for (int64_t j = 0; j < columns; j++) {
            double slope = norm_loss(call, x, d, j, step) - norm_loss(call, x, d, j, -step);
            expect_near((double)dx[r * columns + j],
                        slope / (2 * step) + (adds ? (double)before[r * columns + j] : 0), 2e-5,
                        "dx", j);
        }
    }
    for (int64_t j = 0; j < columns; j++) {
        double sum = (double)dweight0[j], bias_sum = (double)dbias0[j];
        for (int64_t r = 0; r < call->rows; r++) {
            double mean = call->mean ? (double)call->mean[r] : 0;
            double hat = ((double)call->x[r * columns + j] - mean) * (double)call->inverse[r];
            sum += (double)dy[r * columns + j] * hat;
            bias_sum += (double)dy[r * columns + j];
        }
        expect_near((double)dweight[j], sum, 1e-5, "dweight", j);
        expect_near((double)dbias[j], call->bias ? bias_sum : (double)dbias0[j], 1e-5, "dbias", j);
    }
    free(dy);
    free(dx);
    free(before);
    free(dweight);
    free(dbias);
    free(dweight0);
    free(dbias0);
}

static void check_norm(int64_t rows, int64_t columns, bool is_rms, bool has_bias)
{
    fsdp_nn *nn = open_nn(2);
    float *x = values("x", rows * columns), *weight = values("w", columns);
    float *bias = values("b", columns), *y = values("y", rows * columns);
    float *mean = values("m", rows), *inverse = values("i", rows);
    fsdp_nn_norm call = {.x = x,
                         .weight = weight,
                         .bias = has_bias ? bias : NULL,
                         .y = y,
                         .mean = is_rms ? NULL : mean,
                         .inverse = inverse,
                         .rows = rows,
                         .columns = columns,
                         .eps = 0.01};
    nn->ops->norm(nn, &call);
    for (int64_t r = 0; r < rows; r++) {
        double row[64];
        for (int64_t j = 0; j < columns; j++)
            row[j] = (double)x[r * columns + j];
        for (int64_t j = 0; j < columns; j++)
            expect_near((double)y[r * columns + j], norm_element(&call, row, j), 1e-6, "y", j);
    }
    check_norm_grad(nn, &call, false);
    check_norm_grad(nn, &call, true);
    finish_nn(nn);
    free(x);
    free(weight);
    free(bias);
    free(y);
    free(mean);
    free(inverse);
}

Test(nn, norms_and_their_gradients)
{
    static const int64_t columns[] = {1, 2, 15, 16, 17, 36, 64};
    for (size_t c = 0; c < sizeof columns / sizeof *columns; c++)
        for (int kind = 0; kind < 3; kind++)
            check_norm(kind == 0 ? 3 : 1, columns[c], kind == 1, kind == 0);
    check_norm(0, 5, false, true);
}

/* --- activations --- */

static double function_of(fsdp_nn_function function, double x)
{
    double c = sqrt(2 / acos(-1));
    switch (function) {
    case FSDP_NN_GELU: return x / 2 * erfc(-x / sqrt(2));
    case FSDP_NN_GELU_TANH: return x / 2 * (1 + tanh(c * (x + 0.044715 * x * x * x)));
    case FSDP_NN_SILU: return x / (1 + exp(-x));
    default: return x > 0 ? x : 0;
    }
}

enum { POINTS = 4001 };

/* Points over [-12, 12], and over both ends of exp. */
static void make_points(float *x)
{
    for (int i = 0; i < POINTS; i++)
        x[i] = ((float)i - 2000) * (i % 10 == 9 ? 0.06f : 0.006f) + 1e-4f;
}

static void check_function(fsdp_nn *nn, fsdp_nn_function function)
{
    static float x[POINTS], y[POINTS], dx[POINTS], ones[POINTS];
    make_points(x);
    for (int i = 0; i < POINTS; i++)
        ones[i] = 1;
    nn->ops->activate(nn, &(fsdp_nn_activation){function, x, NULL, y, POINTS});
    nn->ops->activate_grad(nn,
                           &(fsdp_nn_activation_grad){function, x, NULL, ones, dx, NULL, POINTS});
    for (int i = 0; i < POINTS; i++) {
        double at_x = (double)x[i], want = function_of(function, at_x);
        double slope = function_of(function, at_x + step) - function_of(function, at_x - step);
        cr_assert(fabs((double)y[i] - want) <= 1e-6 * fabs(want) + 1e-9, "f(%g) = %.9g", at_x,
                  (double)y[i]);
        expect_near((double)dx[i], slope / (2 * step), 1e-6, "slope", i);
    }
}

Test(nn, activations_and_their_gradients)
{
    fsdp_nn *nn = open_nn(2);
    for (fsdp_nn_function function = FSDP_NN_GELU; function <= FSDP_NN_RELU; function++)
        check_function(nn, function);
    finish_nn(nn);
}

Test(nn, gates_multiply_and_get_their_gradient_in_any_memory)
{
    fsdp_nn *nn = open_nn(1);
    for (fsdp_nn_function function = FSDP_NN_GELU; function <= FSDP_NN_RELU; function++)
        for (int swapped = 0; swapped < 2; swapped++) {
            float *x = values("x", 77), *gate = values("gate", 77), *dy = values("dy", 77);
            float *f = values("f", 77), *slope = values("f", 77), *y = values("y", 77);
            for (int i = 0; i < 77; i++)
                slope[i] = 1;
            nn->ops->activate(nn, &(fsdp_nn_activation){function, x, NULL, f, 77});
            nn->ops->activate_grad(
                nn, &(fsdp_nn_activation_grad){function, x, NULL, slope, slope, NULL, 77});
            nn->ops->activate(nn, &(fsdp_nn_activation){function, x, gate, y, 77});
            float *dx = swapped ? gate : x, *dgate = swapped ? dy : gate;
            float *gate_before = values("gate", 77), *dy_before = values("dy", 77);
            nn->ops->activate_grad(
                nn, &(fsdp_nn_activation_grad){function, x, gate, dy, dx, dgate, 77});
            for (int i = 0; i < 77; i++) {
                cr_assert_eq(y[i], f[i] * gate_before[i]);
                cr_assert_eq(dgate[i], dy_before[i] * f[i]);
                cr_assert_eq(dx[i], dy_before[i] * gate_before[i] * slope[i]);
            }
            float *all[] = {x, gate, dy, f, slope, y, gate_before, dy_before};
            for (size_t i = 0; i < sizeof all / sizeof *all; i++)
                free(all[i]);
        }
    finish_nn(nn);
}

static void run_relu(float *x, float *dx, int64_t count)
{
    fsdp_nn *nn = open_nn(1);
    nn->ops->activate(nn, &(fsdp_nn_activation){FSDP_NN_RELU, x, NULL, x, count});
    nn->ops->activate_grad(nn,
                           &(fsdp_nn_activation_grad){FSDP_NN_RELU, x, NULL, dx, dx, NULL, count});
    finish_nn(nn);
}

Test(nn, relu_keeps_what_is_positive_and_its_gradient)
{
    float x[5] = {-1, -0.0f, 0, 2, 3e38f}, dx[5] = {1, -2, INFINITY, 4, 5};
    const float kept[5] = {0, 0, 0, 2, 3e38f}, passed[5] = {0, 0, 0, 4, 5};
    run_relu(x, dx, 5);
    cr_assert_arr_eq(x, kept, sizeof kept);
    cr_assert_arr_eq(dx, passed, sizeof passed);
}

Test(nn, relu_keeps_nan_and_its_gradient)
{
    float x[2] = {NAN, 1}, dx[2] = {2, NAN};
    run_relu(x, dx, 2);
    cr_assert(isnan(x[0]) && x[1] == 1);
    cr_assert(dx[0] == 2 && isnan(dx[1]));
}

/* A network that went wrong must not look well. */
Test(nn, nan_and_infinity_pass_activations_as_in_pytorch)
{
    static const float smooth[] = {NAN, NAN, INFINITY}, relu[] = {NAN, 0, INFINITY};
    fsdp_nn *nn = open_nn(1);
    for (fsdp_nn_function function = FSDP_NN_GELU; function <= FSDP_NN_RELU; function++) {
        const float *want = function == FSDP_NN_RELU ? relu : smooth;
        float x[3] = {NAN, -INFINITY, INFINITY}, y[3], dx[1], dy[1] = {1};
        nn->ops->activate(nn, &(fsdp_nn_activation){function, x, NULL, y, 3});
        for (int i = 0; i < 3; i++)
            cr_assert(isnan(want[i]) ? isnan(y[i]) : y[i] == want[i], "%d of %d", i, (int)function);
        nn->ops->activate_grad(nn, &(fsdp_nn_activation_grad){function, x, NULL, dy, dx, NULL, 1});
        cr_assert(function == FSDP_NN_RELU || isnan(dx[0]));
    }
    finish_nn(nn);
}

/* --- positions and tokens --- */

Test(nn, rotation_turns_halves_and_back)
{
    enum { SEQUENCES = 2, LENGTH = 3, HEADS = 3, DIM = 6, ROW = 20, FIRST = 4, HALF = DIM / 2 };
    fsdp_nn *nn = open_nn(2);
    float *x = values("x", SEQUENCES * LENGTH * ROW),
          *before = values("x", SEQUENCES * LENGTH * ROW);
    float cos_table[8 * HALF], sin_table[8 * HALF];
    for (int i = 0; i < 8 * HALF; i++) {
        cos_table[i] = cosf((float)i);
        sin_table[i] = sinf((float)i);
    }
    fsdp_nn_rotation call = {x,     ROW, SEQUENCES, LENGTH,    FIRST,
                             HEADS, DIM, cos_table, sin_table, false};
    nn->ops->rotate(nn, &call);
    for (int64_t i = 0; i < SEQUENCES * LENGTH * ROW; i++) {
        int64_t row = i / ROW, j = i % ROW % DIM, position = FIRST + row % LENGTH;
        double angle = (double)(position * HALF + j % HALF), want = (double)before[i];
        if (i % ROW < HEADS * DIM && j < HALF)
            want = want * cos(angle) - (double)before[i + HALF] * sin(angle);
        else if (i % ROW < HEADS * DIM)
            want = want * cos(angle) + (double)before[i - HALF] * sin(angle);
        expect_near((double)x[i], want, 1e-6, "x", i);
    }
    call.backward = true;
    nn->ops->rotate(nn, &call);
    for (int64_t i = 0; i < SEQUENCES * LENGTH * ROW; i++)
        expect_near((double)x[i], (double)before[i], 1e-6, "x", i);
    free(x);
    free(before);
    finish_nn(nn);
}

static void check_embeddings(int64_t columns)
{
    enum { SEQUENCES = 2, LENGTH = 5, IDS = 4, FIRST = 2, ROWS = SEQUENCES * LENGTH };
    static const int64_t ids[ROWS] = {3, 0, 0, 1, 3, 3, 1, 2, 0, 0};
    fsdp_nn *nn = open_nn(3);
    float *table = values("t", IDS * columns), *positions = values("p", (FIRST + LENGTH) * columns);
    float *out = values("o", ROWS * columns), *want_p = values("p", (FIRST + LENGTH) * columns);
    nn->ops->embed(
        nn, &(fsdp_nn_embedding){ids, table, positions, out, SEQUENCES, LENGTH, FIRST, columns});
    for (int64_t i = 0; i < ROWS * columns; i++) {
        int64_t row = i / columns, j = i % columns;
        cr_assert_eq(out[i], table[ids[row] * columns + j] +
                                 positions[(FIRST + row % LENGTH) * columns + j]);
    }
    float *want_t = values("t", IDS * columns);
    nn->ops->embed_grad(
        nn, &(fsdp_nn_embedding_grad){ids, out, table, positions, SEQUENCES, LENGTH, columns});
    for (int64_t i = 0; i < ROWS * columns; i++) {
        want_t[ids[i / columns] * columns + i % columns] += out[i];
        want_p[i / columns % LENGTH * columns + i % columns] += out[i];
    }
    cr_assert_arr_eq(table, want_t, (size_t)(IDS * columns) * sizeof *table);
    cr_assert_arr_eq(positions, want_p, (size_t)((FIRST + LENGTH) * columns) * sizeof *table);
    nn->ops->embed(nn, &(fsdp_nn_embedding){ids, table, NULL, out, 1, 3, 0, columns});
    cr_assert_arr_eq(out, table + 3 * columns, (size_t)columns * sizeof *out);
    float *all[] = {table, positions, out, want_p, want_t};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        free(all[i]);
    finish_nn(nn);
}

Test(nn, embeddings_and_their_gradients)
{
    check_embeddings(35);
    check_embeddings(2999); /* columns of gradients are cut over three threads */
}

static void check_cross_entropy(int64_t rows, int64_t columns, float spread)
{
    fsdp_nn *nn = open_nn(2);
    float *logits = values("l", rows * columns), *before = values("l", rows * columns);
    int64_t *targets = malloc(((size_t)rows + 1) * sizeof *targets);
    double *losses = malloc(((size_t)rows + 1) * sizeof *losses);
    for (int64_t i = 0; i < rows * columns; i++)
        logits[i] = before[i] = before[i] * spread;
    for (int64_t r = 0; r < rows; r++)
        targets[r] = r * 7 % columns;
    fsdp_nn_cross_entropy call = {logits, targets, losses, rows, columns, 0.125, true};
    nn->ops->cross_entropy(nn, &call);
    cr_assert_arr_eq(logits, before, (size_t)(rows * columns) * sizeof *logits);
    double kept = rows > 0 ? losses[rows - 1] : 0;
    call.keeps_logits = false;
    nn->ops->cross_entropy(nn, &call);
    cr_assert(rows == 0 || kept == losses[rows - 1]);
    for (int64_t r = 0; r < rows; r++) {
        const float *x = before + r * columns;
        double sum = 0, shift = (double)x[targets[r]];
        for (int64_t j = 0; j < columns; j++)
            sum += exp((double)x[j] - shift);
        expect_near(losses[r], log(sum), 1e-6, "loss", r);
        for (int64_t j = 0; j < columns; j++)
            expect_near((double)logits[r * columns + j],
                        0.125 * (exp((double)x[j] - shift) / sum - (j == targets[r])), 1e-6,
                        "dlogit", j);
    }
    finish_nn(nn);
    free(logits);
    free(before);
    free(targets);
    free(losses);
}

Test(nn, cross_entropy_and_its_gradient)
{
    check_cross_entropy(0, 3, 1);
    check_cross_entropy(2, 1, 1);
    check_cross_entropy(5, 17, 3);
    check_cross_entropy(2, 10257, 90);
}

/* --- arrays and failures --- */

Test(nn, arrays_are_copied_and_added)
{
    enum { COUNT = 40003 };
    fsdp_nn *nn = open_nn(3);
    float *host = values("h", COUNT), *x = nn->ops->alloc(nn, COUNT),
          *y = nn->ops->alloc(nn, COUNT);
    cr_assert(x && y && (uintptr_t)x % 64 == 0);
    nn->ops->upload(nn, x, host, COUNT);
    nn->ops->zero(nn, y, COUNT);
    nn->ops->add(nn, y, x, COUNT);
    nn->ops->add(nn, y, x, COUNT);
    nn->ops->download(nn, host, y, COUNT);
    for (int64_t i = 0; i < COUNT; i++)
        cr_assert_eq(host[i], 2 * x[i]);
    nn->ops->free(nn, x);
    nn->ops->free(nn, y);
    nn->ops->free(nn, NULL);
    cr_assert_null(nn->ops->alloc(nn, INT64_MAX / 2));
    free(host);
    finish_nn(nn);
}

Test(nn, a_lack_of_memory_is_reported_by_finish)
{
    fsdp_error err = {0};
    fsdp_nn *nn = NULL;
    for (int64_t n = 0; n < 4; n++) {
        fsdp_mem_fail_after(n, false);
        cr_assert_eq(fsdp_nn_open_cpu(1, &nn, &err), FSDP_ERR_LIMIT);
        cr_assert_null(nn);
    }
    fsdp_mem_fail_after(-1, false);
    cr_assert_eq(fsdp_nn_open_cpu(0, &nn, &err), FSDP_ERR_USAGE);
    nn = open_nn(1);
    float one[4] = {1, 1, 1, 1}, out[4];
    fsdp_nn_product call = {
        .out = out, .a = one, .b = one, .rows = 1, .columns = 1, .inner = 4, .b_is_turned = true};
    fsdp_mem_fail_after(0, false);
    nn->ops->product(nn, &call);
    fsdp_mem_fail_after(-1, false);
    cr_assert_eq(nn->ops->finish(nn, &err), FSDP_ERR_LIMIT);
    nn->ops->product(nn, &call);
    cr_assert_eq(out[0], 4);
    finish_nn(nn);
}
