/* The ids of a step: from an array of batches, or from data in its order. See train.h. */
#include "tools/train/train.h"

#include <stdlib.h>
#include <string.h>

struct train_batches {
    fsdp_value identity;       /* of the data: read once */
    train_ids given;           /* --batches: N x B x (S + 1) */
    fsdp_token_data *data;     /* NULL: given */
    int64_t sequences, length; /* of a step's batch */
    int64_t *ids;              /* one batch, of data */
};

/* --- opening ------------------------------------------------------------------------------------- */

static fsdp_status open_given(train_job *job, train_batches *batches, fsdp_error *err)
{
    FSDP_TRY(train_ids_read(job->opts->batches, 3, &batches->given, err));
    batches->sequences = batches->given.shape[1];
    batches->length = batches->given.shape[2] - 1;
    if (batches->given.shape[0] < 1)
        return fsdp_fail(err, FSDP_ERR_USAGE, "'%s' holds no batches", job->opts->batches);
    if (batches->sequences < 1 || batches->length < 1)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "'%s' has batches of %lld sequences of %lld ids; a batch needs at least 1 "
                         "sequence of 2 ids",
                         job->opts->batches, (long long)batches->given.shape[1],
                         (long long)batches->given.shape[2]);
    if (batches->given.shape[0] < job->config->train.steps)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "'%s' has batches for %lld steps, but train.steps is %lld",
                         job->opts->batches, (long long)batches->given.shape[0],
                         (long long)job->config->train.steps);
    return train_ids_check(&batches->given, job->opts->batches, job->model_config.vocab, err);
}

/* A model of a source says how long its sequences may be; an evaluation takes them as long as it can. */
static int64_t length_of(const train_job *job)
{
    enum { LONG = 1024 };
    const int64_t most = job->model_config.context;
    const int64_t wanted = job->opts->eval ? LONG : job->config->model.context;
    return (job->opts->init || job->opts->eval) && wanted > most ? most : wanted;
}

/* All of the data that an evaluation names is held out. */
static const char *val_of(const train_job *job)
{
    if (job->opts->data)
        return job->opts->data;
    return job->config->data.val[0] ? job->config->data.val : NULL;
}

static fsdp_status open_data(train_job *job, train_batches *batches, const char *path,
                             fsdp_error *err)
{
    const train_config *config = job->config;
    batches->sequences = config->train.batch;
    batches->length = length_of(job);
    if (batches->sequences < 1)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "train.batch is 0; a step needs at least one sequence");
    const fsdp_token_options opts = {.path = path,
                                     .val = val_of(job),
                                     .tokenizer = job->tokenizer,
                                     .vocab = job->model_config.vocab,
                                     .length = batches->length,
                                     .in_order = !config->data.shuffle,
                                     .seed = (uint64_t)config->data.seed};
    FSDP_TRY(fsdp_token_data_open(&opts, &batches->data, err));
    if (job->opts->run)
        FSDP_TRY(fsdp_token_data_identity(batches->data, &batches->identity, err));
    batches->ids =
        calloc((size_t)(batches->sequences * (batches->length + 1)), sizeof *batches->ids);
    return batches->ids ? FSDP_OK : fsdp_fail(err, FSDP_ERR_LIMIT, "out of memory");
}

fsdp_status train_batches_open(train_job *job, fsdp_error *err)
{
    const train_options *opts = job->opts;
    const char *path = opts->data ? opts->data : opts->config.data.path;
    bool trains = !opts->eval && !opts->sample;
    if (!trains && !opts->data)
        return FSDP_OK;
    job->batches = calloc(1, sizeof *job->batches);
    if (!job->batches)
        return fsdp_fail(err, FSDP_ERR_LIMIT, "out of memory");
    if (opts->batches)
        return open_given(job, job->batches, err);
    if (!*path)
        return fsdp_fail(
            err, FSDP_ERR_USAGE,
            "cannot train without data; set data.path, or give --data.path or --batches");
    return open_data(job, job->batches, path, err);
}

void train_batches_close(train_batches *batches)
{
    if (!batches)
        return;
    train_ids_release(&batches->given);
    fsdp_token_data_close(batches->data);
    fsdp_value_release(&batches->identity);
    free(batches->ids);
    free(batches);
}

/* --- reading ------------------------------------------------------------------------------------- */

static void finish(train_batch *batch)
{
    const size_t count = (size_t)(batch->sequences * (batch->length + 1));
    fsdp_xxh3_hex(batch->ids, count * sizeof *batch->ids, batch->hash);
}

fsdp_status train_batches_next(train_job *job, train_batch *batch_out, fsdp_error *err)
{
    train_batches *from = job->batches;
    const int64_t row = from->length + 1;
    *batch_out = (train_batch){.sequences = from->sequences, .length = from->length};
    fsdp_world_mark(job->world, "batch");
    if (!from->data) {
        batch_out->ids = from->given.data + job->step * from->sequences * row;
        finish(batch_out);
        return FSDP_OK;
    }
    const int64_t count = fsdp_token_data_count(from->data, FSDP_TOKENS_TRAIN);
    batch_out->ids = from->ids;
    for (int64_t i = 0; i < from->sequences; i++) {
        const int64_t at = job->consumed + i;
        FSDP_TRY(fsdp_token_data_read(from->data, FSDP_TOKENS_TRAIN, (uint64_t)(at / count),
                                      at % count, from->ids + i * row, err));
    }
    finish(batch_out);
    return FSDP_OK;
}

fsdp_status train_batches_held_out(train_job *job, int64_t i, train_batch *batch_out,
                                   bool *is_there_out, fsdp_error *err)
{
    train_batches *from = job->batches;
    const int64_t row = from->length + 1, first = i * from->sequences;
    const int64_t count = from->data ? fsdp_token_data_count(from->data, FSDP_TOKENS_VAL) : 0;
    *is_there_out = first < count;
    *batch_out = (train_batch){.length = from->length, .ids = from->ids};
    for (int64_t s = 0; s < from->sequences && first + s < count; s++, batch_out->sequences++)
        FSDP_TRY(fsdp_token_data_read(from->data, FSDP_TOKENS_VAL, 0, first + s,
                                      from->ids + s * row, err));
    return FSDP_OK;
}

/* --- identity ------------------------------------------------------------------------------------ */

static fsdp_status set_key(fsdp_value *dict, size_t item, const char *key, fsdp_error *err)
{
    return fsdp_value_set_bytes(&dict->as.list.items[item], FSDP_VALUE_STRING, key, strlen(key),
                                err);
}

static fsdp_status describe_given(const train_batches *batches, fsdp_value *value_out,
                                  fsdp_error *err)
{
    const train_ids *ids = &batches->given;
    char hash[FSDP_XXH3_HEX];
    const int64_t count = ids->shape[0] * ids->shape[1] * ids->shape[2];
    fsdp_xxh3_hex(ids->data, (size_t)count * sizeof *ids->data, hash);
    FSDP_TRY(fsdp_value_set_items(value_out, FSDP_VALUE_DICT, 2, err));
    FSDP_TRY(set_key(value_out, 0, "batches", err));
    return set_key(value_out, 1, hash, err);
}

static fsdp_status describe_data(const train_job *job, fsdp_value *value_out, fsdp_error *err)
{
    FSDP_TRY(fsdp_value_set_items(value_out, FSDP_VALUE_DICT, 8, err));
    fsdp_value *items = value_out->as.list.items;
    FSDP_TRY(set_key(value_out, 0, "files", err));
    FSDP_TRY(fsdp_value_copy(&job->batches->identity, &items[1], err));
    FSDP_TRY(set_key(value_out, 2, "length", err));
    items[3] = fsdp_value_i64(job->batches->length);
    FSDP_TRY(set_key(value_out, 4, "shuffle", err));
    items[5] = fsdp_value_bool(job->config->data.shuffle);
    FSDP_TRY(set_key(value_out, 6, "seed", err));
    items[7] = fsdp_value_i64(job->config->data.seed);
    return FSDP_OK;
}

fsdp_status train_batches_describe(const train_job *job, fsdp_value *value_out, fsdp_error *err)
{
    *value_out = (fsdp_value){0};
    fsdp_status st = job->batches->data ? describe_data(job, value_out, err)
                                        : describe_given(job->batches, value_out, err);
    if (st != FSDP_OK)
        fsdp_value_release(value_out);
    return st;
}
