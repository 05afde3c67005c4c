/*
 * The bits of every call of kernels/nn.h: one digest of all results, which is the same for 1, 2 and 3 threads
 * and for the plain kernels as for those of this processor. Another process makes the plain ones, since a
 * process chooses its kernels once.
 */
#include "tests/unit/kernels/nn/nn_values.h"

#include "kernels/kernels.h"

#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

enum { ROWS = 70, WIDTH = 66, HEADS = 6, KV_HEADS = 3, DIM = 11, WORDS = 301, COUNT = 48000 };

typedef struct run {
    fsdp_nn *nn;
    fsdp_hasher *hasher;
} run;

static void digest(const run *r, float *data, int64_t count)
{
    fsdp_hasher_add(r->hasher, data, (size_t)count * sizeof *data);
}

static void run_products(const run *r, float *x, float *w, float *out)
{
    for (int kind = 0; kind < 8; kind++) {
        fsdp_nn_product call = {.out = out,
                                .a = x,
                                .b = w,
                                .rows = ROWS,
                                .columns = WORDS,
                                .inner = WIDTH,
                                .a_is_turned = kind & 1,
                                .b_is_turned = kind & 2,
                                .adds = kind & 4,
                                .bias = kind & 4 ? NULL : x};
        r->nn->ops->product(r->nn, &call);
        digest(r, out, ROWS * WORDS);
    }
    r->nn->ops->column_sums(r->nn, w, out, ROWS, WORDS);
    digest(r, w, WORDS);
}

static void run_norms(const run *r, float *x, float *dy, float *y)
{
    float mean[ROWS], inverse[ROWS], *w = dy + 7, *dw = values("dw", WIDTH),
                                     *db = values("db", WIDTH);
    for (int is_rms = 0; is_rms < 2; is_rms++) {
        float *kept = is_rms ? NULL : mean;
        r->nn->ops->norm(
            r->nn, &(fsdp_nn_norm){x, w, is_rms ? NULL : w, y, kept, inverse, ROWS, WIDTH, 1e-5});
        digest(r, y, ROWS * WIDTH);
        r->nn->ops->norm_grad(
            r->nn, &(fsdp_nn_norm_grad){x, w, kept, inverse, dy, y, is_rms, dw, db, ROWS, WIDTH});
        digest(r, y, ROWS * WIDTH);
        digest(r, dw, WIDTH);
        digest(r, db, WIDTH);
    }
    free(dw);
    free(db);
}

static void run_activations(const run *r, float *x, float *dy, float *y)
{
    for (int64_t i = 0; i < COUNT; i++)
        x[i] *= i % 7 == 0 ? 100.0f : 5.0f;
    for (fsdp_nn_function function = FSDP_NN_GELU; function <= FSDP_NN_RELU; function++) {
        r->nn->ops->activate(r->nn, &(fsdp_nn_activation){function, x, NULL, y, COUNT});
        digest(r, y, COUNT);
        r->nn->ops->activate_grad(r->nn,
                                  &(fsdp_nn_activation_grad){function, x, dy, dy, y, NULL, COUNT});
        digest(r, y, COUNT);
    }
}

static void run_attention(const run *r, float *q, float *k, float *v)
{
    float *out = values("o", ROWS * WIDTH), *log_sum = values("ls", ROWS * HEADS);
    float *dq = values("dq", COUNT), *dk = values("dk", COUNT), *dv = values("dv", COUNT);
    for (int64_t window = 0; window < 30; window += 20) {
        fsdp_nn_attention call = {.q = q,
                                  .k = k,
                                  .v = v,
                                  .q_row = WIDTH,
                                  .k_row = KV_HEADS * DIM,
                                  .v_row = KV_HEADS * DIM,
                                  .out = out,
                                  .log_sum = log_sum,
                                  .sequences = 2,
                                  .queries = ROWS / 2,
                                  .keys = ROWS / 2,
                                  .key_room = ROWS / 2,
                                  .heads = HEADS,
                                  .kv_heads = KV_HEADS,
                                  .head_dim = DIM,
                                  .window = window,
                                  .scale = 0.3f};
        r->nn->ops->attend(r->nn, &call);
        digest(r, out, ROWS * WIDTH);
        digest(r, log_sum, ROWS * HEADS);
        r->nn->ops->attend_grad(r->nn, &(fsdp_nn_attention_grad){call, v, dq, dk, dv});
        digest(r, dq, ROWS * WIDTH);
        digest(r, dk, ROWS * KV_HEADS * DIM);
        digest(r, dv, ROWS * KV_HEADS * DIM);
    }
    float *all[] = {out, log_sum, dq, dk, dv};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        free(all[i]);
}

static void run_tokens(const run *r, float *logits, float *table)
{
    int64_t ids[ROWS];
    double losses[ROWS];
    for (int64_t i = 0; i < ROWS; i++)
        ids[i] = i * i % WORDS;
    r->nn->ops->cross_entropy(
        r->nn, &(fsdp_nn_cross_entropy){logits, ids, losses, ROWS, WORDS, 0.1, false});
    digest(r, logits, ROWS * WORDS);
    fsdp_hasher_add(r->hasher, losses, sizeof losses);
    r->nn->ops->embed_grad(r->nn, &(fsdp_nn_embedding_grad){ids, logits, table, table + COUNT / 2,
                                                            2, ROWS / 2, WIDTH});
    digest(r, table, COUNT);
    r->nn->ops->embed(r->nn,
                      &(fsdp_nn_embedding){ids, table, table, logits, 2, ROWS / 2, 0, WIDTH});
    digest(r, logits, ROWS * WIDTH);
    r->nn->ops->rotate(r->nn, &(fsdp_nn_rotation){logits, WIDTH, 2, ROWS / 2, 3, 6, 10, table,
                                                  table + 500, false});
    digest(r, logits, ROWS * WIDTH);
}

static fsdp_hash run_all(int threads)
{
    run r = {open_nn(threads), fsdp_hasher_create()};
    float *x = values("x", COUNT), *w = values("w", COUNT), *y = values("y", COUNT);
    run_products(&r, x, w, y);
    run_norms(&r, x, w, y);
    run_attention(&r, x, w, y);
    run_activations(&r, x, w, y);
    run_tokens(&r, x, w);
    fsdp_hash hash = fsdp_hasher_value(r.hasher);
    fsdp_hasher_free(r.hasher);
    free(x);
    free(w);
    free(y);
    finish_nn(r.nn);
    return hash;
}

Test(nn_bits, do_not_depend_on_the_number_of_threads)
{
    fsdp_hash one = run_all(1);
    for (int threads = 2; threads < 4; threads++)
        for (int again = 0; again < 5; again++) {
            fsdp_hash more = run_all(threads);
            cr_assert_arr_eq(one.bytes, more.bytes, sizeof one.bytes, "%d threads", threads);
        }
}

Test(nn_bits, do_not_depend_on_the_processor)
{
    int ends[2], status;
    fsdp_hash plain;
    cr_assert_eq(pipe(ends), 0);
    pid_t child = fork();
    cr_assert_neq(child, -1);
    if (child == 0) {
        setenv("FSDP_KERNELS", "c", 1);
        fsdp_hash hash = run_all(2);
        bool good =
            *fsdp_nn_cpu_variant() == 'c' && write(ends[1], &hash, sizeof hash) == sizeof hash;
        _exit(good ? 0 : 1);
    }
    cr_assert_eq(read(ends[0], &plain, sizeof plain), (ssize_t)sizeof plain);
    cr_assert_eq(waitpid(child, &status, 0), child);
    cr_assert_eq(status, 0);
    fsdp_hash best = run_all(1);
    cr_assert_arr_eq(best.bytes, plain.bytes, sizeof best.bytes, "c and %s", fsdp_nn_cpu_variant());
    close(ends[0]);
    close(ends[1]);
}
