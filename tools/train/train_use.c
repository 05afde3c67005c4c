/* Uses of a trained model: logits, the loss of data, text that continues, and tokens. See train.h. */
#include "tools/train/train.h"

#include "runtime/tokens/tokenize_lines.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* --- evaluation ---------------------------------------------------------------------------------- */

/* Every rank computes all sequences; rank 0 writes them. */
static fsdp_status write_logits(train_job *job, const train_ids *ids, fsdp_error *err)
{
    const int64_t shape[3] = {ids->shape[0], ids->shape[1], job->model_config.vocab};
    const fsdp_token_batch batch = {
        .ids = ids->data, .sequences = shape[0], .length = shape[1], .stride = shape[1]};
    size_t count;
    bool is_countable = !__builtin_mul_overflow(shape[0], shape[1], &count) &&
                        !__builtin_mul_overflow(count, shape[2], &count) && count < SIZE_MAX;
    float *logits = is_countable ? calloc(count + 1, sizeof *logits) : NULL;
    fsdp_status st =
        logits ? FSDP_OK : fsdp_fail(err, FSDP_ERR_LIMIT, "the logits do not fit in memory");
    st = fsdp_ctl_agree(job->ctl, st, err);
    if (st == FSDP_OK)
        st = fsdp_transformer_logits(job->model, &batch, logits, err);
    if (st == FSDP_OK && job->rank == 0)
        st = train_npy_write(job->opts->logits_out, FSDP_F32, 3, shape, logits, err);
    free(logits);
    return fsdp_ctl_agree(job->ctl, st, err);
}

static fsdp_status print_loss(const train_job *job, double loss, int64_t tokens)
{
    fsdp_text text = {0};
    if (job->rank != 0)
        return FSDP_OK;
    if (job->opts->common.json) {
        fsdp_text_addf(&text, "{\"schema\": 1, \"loss\": ");
        train_add_number(&text, loss);
        fsdp_text_addf(&text, ", \"perplexity\": ");
        train_add_number(&text, exp(loss));
        fsdp_text_addf(&text, ", \"tokens\": %" PRId64 "}\n", tokens);
    } else {
        fsdp_text_addf(&text, "loss %.6f  perplexity %.4f  tokens %" PRId64 "\n", loss, exp(loss),
                       tokens);
    }
    return cli_put_all(&text);
}

/* Next-token losses of given ids: the last id of a row is only a target. */
static fsdp_status find_given_loss(train_job *job, const train_ids *ids, fsdp_error *err)
{
    const int64_t length = ids->shape[1] - 1;
    const fsdp_token_batch batch = {
        .ids = ids->data, .sequences = ids->shape[0], .length = length, .stride = ids->shape[1]};
    const int64_t tokens = ids->shape[0] * length;
    double loss;
    if (tokens < 1)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "'%s' has no targets: its sequences have one id; --logits-out takes them",
                         job->opts->tokens);
    FSDP_TRY(fsdp_transformer_evaluate(job->model, &batch, &loss, err));
    return print_loss(job, loss / (double)tokens, tokens);
}

static fsdp_status read_tokens(const train_job *job, train_ids *ids_out, fsdp_error *err)
{
    FSDP_TRY(train_ids_read(job->opts->tokens, 2, ids_out, err));
    if (ids_out->shape[0] < 1 || ids_out->shape[1] < 1)
        return fsdp_fail(err, FSDP_ERR_USAGE, "'%s' holds no ids: its shape is [%lld, %lld]",
                         job->opts->tokens, (long long)ids_out->shape[0],
                         (long long)ids_out->shape[1]);
    return train_ids_check(ids_out, job->opts->tokens, job->model_config.vocab, err);
}

static fsdp_status evaluate_given(train_job *job, fsdp_error *err)
{
    train_ids ids;
    fsdp_status st = read_tokens(job, &ids, err);
    st = fsdp_ctl_agree(job->ctl, st, err);
    if (st == FSDP_OK)
        st = job->opts->logits_out ? write_logits(job, &ids, err) : find_given_loss(job, &ids, err);
    train_ids_release(&ids);
    return st;
}

fsdp_status train_use_eval(train_job *job, fsdp_error *err)
{
    double loss;
    int64_t tokens;
    FSDP_TRY(train_job_open(job, job->opts, job->world, job->opts->eval, err));
    if (job->opts->tokens)
        return evaluate_given(job, err);
    FSDP_TRY(train_evaluate(job, INT64_MAX, &loss, &tokens, err));
    return print_loss(job, loss, tokens);
}

/* --- sampling ------------------------------------------------------------------------------------ */

static fsdp_status take_prompt(train_job *job, train_ids *prompt, fsdp_error *err)
{
    const char *text = job->opts->prompt ? job->opts->prompt : "";
    fsdp_ids ids = {0};
    if (!job->tokenizer)
        return fsdp_fail(err, FSDP_ERR_USAGE, "'%s' has no tokenizer; give --tokens",
                         job->opts->sample);
    FSDP_TRY(fsdp_tokenizer_encode(job->tokenizer, text, strlen(text), true, &ids, err));
    int64_t begin = job->model_config.bos >= 0 ? job->model_config.bos : '\n';
    *prompt = (train_ids){.ndim = 2, .shape = {1, ids.count > 0 ? (int64_t)ids.count : 1}};
    prompt->data = malloc((size_t)prompt->shape[1] * sizeof *prompt->data);
    if (prompt->data) {
        prompt->data[0] = begin; /* of an empty prompt */
        if (ids.count > 0)
            memcpy(prompt->data, ids.ids, ids.count * sizeof *ids.ids);
    }
    fsdp_ids_release(&ids);
    return prompt->data ? FSDP_OK : fsdp_fail(err, FSDP_ERR_LIMIT, "out of memory");
}

/* The ids that the tokenizer knows: a model's vocabulary may be padded. */
static int64_t keep_known(const fsdp_tokenizer *tokenizer, int64_t *ids, int64_t count)
{
    int64_t kept = 0;
    for (int64_t i = 0; i < count; i++)
        if (ids[i] < fsdp_tokenizer_vocab(tokenizer))
            ids[kept++] = ids[i];
    return kept;
}

static fsdp_status print_text(const train_job *job, int64_t *ids, int64_t count, fsdp_error *err)
{
    fsdp_text text = {0};
    count = keep_known(job->tokenizer, ids, count);
    fsdp_status st = fsdp_tokenizer_decode(job->tokenizer, ids, (size_t)count, false, &text, err);
    if (st == FSDP_OK)
        fsdp_text_addf(&text, "\n");
    if (st == FSDP_OK)
        return cli_put_all(&text);
    fsdp_text_release(&text);
    return st;
}

static void add_ids(fsdp_text *text, const int64_t *ids, int64_t count)
{
    fsdp_text_addf(text, "[");
    for (int64_t i = 0; i < count; i++)
        fsdp_text_addf(text, "%s%" PRId64, i ? ", " : "", ids[i]);
    fsdp_text_addf(text, "]");
}

/* Ids where there is no tokenizer: a JSON array per sequence. */
static fsdp_status print_ids(const int64_t *ids, int64_t sequences, int64_t count)
{
    fsdp_text text = {0};
    for (int64_t s = 0; s < sequences; s++) {
        add_ids(&text, ids + s * count, count);
        fsdp_text_addf(&text, "\n");
    }
    return cli_put_all(&text);
}

/* {"schema": 1, "ids": [[...]], "text": "..."}; text: of the one sequence that --prompt began. */
static fsdp_status print_json(const train_job *job, int64_t *ids, const int64_t shape[2],
                              fsdp_error *err)
{
    fsdp_text text = {0}, decoded = {0};
    fsdp_status st = FSDP_OK;
    fsdp_text_addf(&text, "{\"schema\": 1, \"ids\": [");
    for (int64_t s = 0; s < shape[0]; s++) {
        fsdp_text_addf(&text, "%s", s ? ", " : "");
        add_ids(&text, ids + s * shape[1], shape[1]);
    }
    fsdp_text_addf(&text, "]");
    if (!job->opts->tokens) {
        const int64_t known = keep_known(job->tokenizer, ids, shape[1]);
        st = fsdp_tokenizer_decode(job->tokenizer, ids, (size_t)known, false, &decoded, err);
        fsdp_text_addf(&text, ", \"text\": ");
        fsdp_text_add_json_shown(&text, decoded.data ? decoded.data : "", decoded.size);
    }
    fsdp_text_addf(&text, "}\n");
    text.failed |= decoded.failed;
    fsdp_text_release(&decoded);
    if (st == FSDP_OK)
        return cli_put_all(&text);
    fsdp_text_release(&text);
    return st;
}

static fsdp_status give_sample(const train_job *job, const train_ids *prompt, int64_t *ids,
                               fsdp_error *err)
{
    const int64_t shape[2] = {prompt->shape[0], job->opts->count};
    if (job->rank != 0)
        return FSDP_OK;
    if (job->opts->out)
        return train_npy_write(job->opts->out, FSDP_I64, 2, shape, ids, err);
    if (job->opts->common.json)
        return print_json(job, ids, shape, err);
    return job->opts->tokens ? print_ids(ids, shape[0], shape[1])
                             : print_text(job, ids, shape[1], err);
}

static fsdp_status sample(train_job *job, const train_ids *prompt, fsdp_error *err)
{
    const train_options *opts = job->opts;
    const fsdp_sampling sampling = {.temperature = opts->temperature,
                                    .top_k = opts->top_k,
                                    .top_p = opts->top_p,
                                    .seed = (uint64_t)opts->seed,
                                    .count = opts->count};
    const fsdp_token_batch batch = {.ids = prompt->data,
                                    .sequences = prompt->shape[0],
                                    .length = prompt->shape[1],
                                    .stride = prompt->shape[1]};
    int64_t *ids = calloc((size_t)(prompt->shape[0] * opts->count) + 1, sizeof *ids);
    fsdp_status st = ids ? FSDP_OK : fsdp_fail(err, FSDP_ERR_LIMIT, "out of memory");
    st = fsdp_ctl_agree(job->ctl, st, err);
    if (st == FSDP_OK)
        st = fsdp_transformer_sample(job->model, &batch, &sampling, ids, err);
    if (st == FSDP_OK)
        st = give_sample(job, prompt, ids, err);
    free(ids);
    return fsdp_ctl_agree(job->ctl, st, err);
}

fsdp_status train_use_sample(train_job *job, fsdp_error *err)
{
    train_ids prompt = {0};
    FSDP_TRY(train_job_open(job, job->opts, job->world, job->opts->sample, err));
    fsdp_status st =
        job->opts->tokens ? read_tokens(job, &prompt, err) : take_prompt(job, &prompt, err);
    st = fsdp_ctl_agree(job->ctl, st, err);
    if (st == FSDP_OK)
        st = sample(job, &prompt, err);
    train_ids_release(&prompt);
    return st;
}

/* --- tokens -------------------------------------------------------------------------------------- */

static fsdp_status tokenize_line(const fsdp_tokenizer *tokenizer, const train_options *opts,
                                 const fsdp_text *line, int64_t number, fsdp_error *err)
{
    const fsdp_tokenize_options how = {.special = opts->special, .decode = opts->decode};
    fsdp_text out = {0};
    fsdp_status st = fsdp_tokenize_line(tokenizer, &how, line, number, &out, err);
    if (st == FSDP_OK) {
        fsdp_text_addf(&out, "\n");
        return cli_put_all(&out);
    }
    fsdp_text_release(&out);
    return st;
}

static fsdp_status tokenize_lines(const fsdp_tokenizer *tokenizer, const train_options *opts,
                                  fsdp_error *err)
{
    char *data = NULL;
    size_t room = 0;
    ssize_t size;
    fsdp_status st = FSDP_OK;
    for (int64_t number = 1; st == FSDP_OK && (size = getline(&data, &room, stdin)) >= 0;
         number++) {
        fsdp_text line = {.data = data, .size = (size_t)size}; /* borrowed */
        line.size -= line.size > 0 && data[line.size - 1] == '\n';
        st = tokenize_line(tokenizer, opts, &line, number, err);
    }
    if (st == FSDP_OK && ferror(stdin))
        st = fsdp_fail_errno(err, errno, "cannot read standard input");
    free(data);
    return st;
}

int train_use_tokenizer(const train_options *opts)
{
    fsdp_error err = {0};
    fsdp_tokenizer *tokenizer = NULL;
    fsdp_status st = fsdp_tokenizer_open(opts->tokenize, &tokenizer, &err);
    if (st == FSDP_OK)
        st = tokenize_lines(tokenizer, opts, &err);
    fsdp_tokenizer_free(tokenizer);
    return cli_end(st, &err);
}
