/*
 * The arithmetic of transformers, forward and backward, on dense f32 arrays: products, norms, activations,
 * rotary positions, attention, embeddings, softmax with cross entropy. Models call nothing else on their
 * arrays and never read them, so that another table (a GPU's) needs no other model code.
 *
 * Results depend neither on the number of threads nor on the processor: every sum has one order, and each
 * element of a product is one chain of fused multiply-adds in the order of the inner dimension (matrix.h).
 * They do not depend on how many other rows a call has either. Products by OpenBLAS are an exception:
 * fsdp_nn_cpu_products.
 *
 * A caller owns all arrays but the working memory of calls, which the fsdp_nn has and which grows to what
 * they need. Calls on one fsdp_nn come from one thread at a time. A call that fails for want of memory leaves
 * its result undefined and is reported by the next `finish`. Arrays of one call do not overlap unless it says
 * so; a count of 0 does nothing. Gradients of parameters are added to what is there; gradients of inputs are
 * overwritten.
 */
#ifndef FSDP_NN_H
#define FSDP_NN_H

#include <fsdp/status.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct fsdp_nn fsdp_nn;

/* --- products ------------------------------------------------------------------------------------ */

/* out (rows x columns) = a (rows x inner) times b (inner x columns), plus a bias for each column. */
typedef struct fsdp_nn_product {
    float *out;
    const float *a, *b;
    int64_t rows, columns, inner;
    bool a_is_turned;          /* a is stored inner x rows */
    bool b_is_turned;          /* b is stored columns x inner, as the weight of a linear layer is */
    bool adds;                 /* the chains start from what is in out; without bias */
    const float *bias;         /* NULL: none */
} fsdp_nn_product;

/* --- norms --------------------------------------------------------------------------------------- */

/* y = (x - mean) * inverse * weight + bias of each row, inverse = 1 / sqrt(variance + eps). RMS: without mean
 * and bias, inverse = 1 / sqrt(mean of squares + eps). */
typedef struct fsdp_nn_norm {
    const float *x, *weight;
    const float *bias;         /* NULL: none */
    float *y;
    float *mean, *inverse;     /* one per row, for backward; mean NULL: RMS */
    int64_t rows, columns;
    double eps;
} fsdp_nn_norm;

typedef struct fsdp_nn_norm_grad {
    const float *x, *weight, *mean, *inverse, *dy;
    float *dx;                 /* overwritten, or added to: adds_dx */
    bool adds_dx;
    float *dweight, *dbias;    /* added to; NULL: none */
    int64_t rows, columns;
} fsdp_nn_norm_grad;

/* --- activations --------------------------------------------------------------------------------- */

typedef enum fsdp_nn_function {
    FSDP_NN_GELU,              /* x/2 (1 + erf(x / sqrt 2)) */
    FSDP_NN_GELU_TANH,         /* gelu_new: x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) */
    FSDP_NN_SILU,              /* x / (1 + exp(-x)) */
    FSDP_NN_RELU
} fsdp_nn_function;

/* y = f(x), or f(x) * gate. y may be x. */
typedef struct fsdp_nn_activation {
    fsdp_nn_function function;
    const float *x;
    const float *gate;         /* NULL: none */
    float *y;
    int64_t count;
} fsdp_nn_activation;

/* dx = dy * f'(x) [* gate]; dgate = dy * f(x). dx may be dy, x or gate's memory; so may dgate. */
typedef struct fsdp_nn_activation_grad {
    fsdp_nn_function function;
    const float *x, *gate, *dy;
    float *dx, *dgate;
    int64_t count;
} fsdp_nn_activation_grad;

/* --- positions and attention --------------------------------------------------------------------- */

/* Rotates halves of each head in place: (a, b) -> (a cos - b sin, b cos + a sin), a and b head_dim/2 apart.
 * Row r of a sequence has position first + r. */
typedef struct fsdp_nn_rotation {
    float *x;
    int64_t row;               /* elements between rows of x */
    int64_t sequences, length, first;
    int64_t heads, head_dim;   /* head_dim is even */
    const float *cos, *sin;    /* of position p: head_dim/2 elements from p * head_dim/2 */
    bool backward;             /* the other way round */
} fsdp_nn_rotation;

/*
 * Causal attention with grouped keys: head h reads keys and values of head h / (heads / kv_heads). Query i of
 * a sequence has position keys - queries + i and reads the keys up to it, of the last `window` ones only when
 * that is not 0. Strides are elements between rows; the rows of a sequence follow each other, and so do the
 * sequences: queries rows of q and out, key_room rows of k and v, of which `keys` count.
 */
typedef struct fsdp_nn_attention {
    const float *q, *k, *v;
    int64_t q_row, k_row, v_row;
    float *out;                /* rows of heads * head_dim */
    float *log_sum;            /* sequences x heads x queries: ln of the sum of exp(scores), for backward;
                                * NULL: not kept */
    int64_t sequences, queries, keys, key_room;
    int64_t heads, kv_heads, head_dim, window;
    float scale;
} fsdp_nn_attention;

typedef struct fsdp_nn_attention_grad {
    fsdp_nn_attention forward; /* as it was called, queries == keys == key_room; out is read */
    const float *dout;
    float *dq, *dk, *dv;       /* overwritten; the strides of q, k, v */
} fsdp_nn_attention_grad;

/* --- tokens -------------------------------------------------------------------------------------- */

/* out = table[id] of each row, plus positions[first + row in its sequence]. Ids are checked by the caller. */
typedef struct fsdp_nn_embedding {
    const int64_t *ids;        /* on the host */
    const float *table;
    const float *positions;    /* NULL: none */
    float *out;
    int64_t sequences, length, first, columns;
} fsdp_nn_embedding;

typedef struct fsdp_nn_embedding_grad {
    const int64_t *ids;        /* on the host */
    const float *dout;
    float *dtable;             /* added to, in the order of rows */
    float *dpositions;         /* NULL: none */
    int64_t sequences, length, columns;
} fsdp_nn_embedding_grad;

/* losses[r] = ln(sum of exp(logits)) - logits[target], and the gradient of scale * loss in place. */
typedef struct fsdp_nn_cross_entropy {
    float *logits;             /* rows x columns; becomes its gradient unless keeps_logits */
    const int64_t *targets;    /* on the host */
    double *losses;            /* on the host, valid after finish */
    int64_t rows, columns;
    double scale;
    bool keeps_logits;
} fsdp_nn_cross_entropy;

/* --- the table ----------------------------------------------------------------------------------- */

typedef struct fsdp_nn_ops {
    const char *name;          /* "cpu" */

    /* Memory of arrays: uninitialised, aligned to 64 bytes; NULL: none left. free accepts NULL. */
    float *(*alloc)(fsdp_nn *nn, int64_t count);
    void (*free)(fsdp_nn *nn, float *data);
    void (*zero)(fsdp_nn *nn, float *data, int64_t count);
    void (*copy)(fsdp_nn *nn, float *to, const float *from, int64_t count);
    void (*upload)(fsdp_nn *nn, float *to, const float *host, int64_t count);
    void (*download)(fsdp_nn *nn, float *host, const float *from, int64_t count); /* valid after finish */

    void (*product)(fsdp_nn *nn, const fsdp_nn_product *call);
    void (*column_sums)(fsdp_nn *nn, float *sums, const float *x, int64_t rows, int64_t columns); /* adds */
    void (*add)(fsdp_nn *nn, float *to, const float *from, int64_t count);     /* to += from */
    void (*norm)(fsdp_nn *nn, const fsdp_nn_norm *call);
    void (*norm_grad)(fsdp_nn *nn, const fsdp_nn_norm_grad *call);
    void (*activate)(fsdp_nn *nn, const fsdp_nn_activation *call);
    void (*activate_grad)(fsdp_nn *nn, const fsdp_nn_activation_grad *call);
    void (*rotate)(fsdp_nn *nn, const fsdp_nn_rotation *call);
    void (*attend)(fsdp_nn *nn, const fsdp_nn_attention *call);
    void (*attend_grad)(fsdp_nn *nn, const fsdp_nn_attention_grad *call);
    void (*embed)(fsdp_nn *nn, const fsdp_nn_embedding *call);
    void (*embed_grad)(fsdp_nn *nn, const fsdp_nn_embedding_grad *call);
    void (*cross_entropy)(fsdp_nn *nn, const fsdp_nn_cross_entropy *call);

    /* Waits for all calls; the first failure since the last finish. */
    fsdp_status (*finish)(fsdp_nn *nn, fsdp_error *err);
    void (*close)(fsdp_nn *nn);
} fsdp_nn_ops;

struct fsdp_nn {
    const fsdp_nn_ops *ops;    /* of the one who made it, which has its own struct around this one */
};

/* On the host, on 1 to 1024 threads, the caller's among them. *nn_out is the caller's: nn->ops->close. The
 * best kernels of this processor; FSDP_KERNELS=c in the environment forces the plain ones. */
fsdp_status fsdp_nn_open_cpu(int threads, fsdp_nn **nn_out, fsdp_error *err);
/* "avx2" or "c": what fsdp_nn_open_cpu's kernels were made for. */
const char *fsdp_nn_cpu_variant(void);
/* "avx2", "c" or "OpenBLAS SkylakeX": what makes its products. On processors with AVX-512 that is OpenBLAS
 * where it is installed (libopenblas.so.0); FSDP_PRODUCTS=own or openblas in the environment decides
 * otherwise. The bits of OpenBLAS's products depend on the processor and the number of rows. The first call
 * in a process of this function or fsdp_nn_open_cpu may change the environment until it returns: it belongs
 * before threads. */
const char *fsdp_nn_cpu_products(void);

#endif
