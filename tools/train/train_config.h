/*
 * The configuration of a training: [section] key = value in a file, --section.key VALUE on the command line,
 * which wins. One table (train_options.c) has every key with its type and default; the file, the options and
 * --print-config come from it.
 */
#ifndef FSDP_TRAIN_CONFIG_H
#define FSDP_TRAIN_CONFIG_H

#include "base/text.h"
#include <fsdp/status.h>
#include <stdbool.h>
#include <stdint.h>

typedef enum train_dtype { TRAIN_F32, TRAIN_MIXED } train_dtype;
typedef enum train_recompute { TRAIN_RECOMPUTE_NONE, TRAIN_RECOMPUTE_BLOCK } train_recompute;
typedef enum train_on_nan { TRAIN_NAN_STOP, TRAIN_NAN_SKIP } train_on_nan;
typedef enum train_decay { TRAIN_DECAY_MATRICES, TRAIN_DECAY_ALL } train_decay;
typedef enum train_schedule { TRAIN_COSINE, TRAIN_LINEAR, TRAIN_CONSTANT } train_schedule;
typedef enum train_compress { TRAIN_RAW, TRAIN_ZSTD } train_compress;
typedef enum train_also { TRAIN_ALSO_NONE, TRAIN_ALSO_DCP, TRAIN_ALSO_HF } train_also;
typedef enum train_on_error { TRAIN_ERROR_STOP, TRAIN_ERROR_RETRY, TRAIN_ERROR_CONTINUE } train_on_error;

enum { TRAIN_TEXT = 1024, TRAIN_FAMILY = 64, TRAIN_MESH_DIMS = 2 };
typedef char train_text[TRAIN_TEXT];

typedef struct train_mesh {            /* a size of 0: absent */
    int64_t replicate, shard;
} train_mesh;

typedef struct train_config {
    struct {
        char family[TRAIN_FAMILY];     /* a model_type */
        int64_t layers, heads, kv_heads, width, inner, context;        /* kv_heads, inner 0: the family's */
        bool tie;
        double norm_eps, rope_theta;
    } model;
    struct { train_text path, val, tokenizer; bool shuffle; int64_t seed; } data;      /* val "": last 5 % */
    struct {
        int64_t steps, batch, micro, seed;
        int dtype, recompute, on_nan;
        int64_t threads;
    } train;
    struct {
        double lr, beta1, beta2, eps, weight_decay;
        int decay;
        double clip;
        int schedule;
        int64_t warmup;
        double min_lr;
    } optim;
    struct { train_mesh mesh; int64_t reshard; train_text comm; int device; } parallel;   /* reshard: as
                                                                                             fsdp_unit_opts */
    struct {
        int64_t every;
        bool async;
        int64_t keep_last, keep_every;
        int compress, also, on_error;
        int64_t mem;
    } save;
    struct { int64_t every, batches; } eval;
    struct { int64_t every; bool tensorboard; } log;
    bool has_steps;                    /* train.steps was set: else --batches says how many there are */
} train_config;

void train_config_init(train_config *config);

/* Parses text, as a checkpoint holds it, and sets other keys to their defaults; `origin` takes the place of
 * the path. */
fsdp_status train_config_parse(train_config *config, const char *text, size_t size, const char *origin,
                               fsdp_error *err);
/* The file that has every key with its value. */
void train_config_print(const train_config *config, fsdp_text *text);
/* The first key that begins with `prefix` and has another value in b; NULL: none. */
const char *train_config_find_change(const train_config *a, const train_config *b, const char *prefix);

#endif
