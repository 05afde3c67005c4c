/*
 * fsdp-train: trains a transformer in shards, and uses a trained one: logits, the loss of data, text that
 * continues, and tokens. Read from the bottom: main parses, run_rank is what every rank does, train is the
 * loop of steps. docs/flow_train.md follows a step, a save and a resume through the files.
 */
#include "tools/train/train.h"

#include "runtime/tokens/tokenize_lines.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* === training ================================================================================= */

/* --- lines --------------------------------------------------------------------------------------- */

static void say_start(train_job *job)
{
    const fsdp_transformer_config *model = &job->model_config;
    char members[160];
    if (job->rank != 0)
        return;
    train_log_say(&job->log,
                  "%s: %" PRId64 " layers, width %" PRId64
                  ", %.2f M parameters, dropout 0, %d rank%s, kernels %s, products %s",
                  model->model_type, model->layers, model->width,
                  (double)fsdp_transformer_param_count(job->model) / 1e6, job->ranks,
                  job->ranks > 1 ? "s" : "", fsdp_nn_cpu_variant(), fsdp_nn_cpu_products());
    if (model->has_dropout)
        train_log_say(&job->log, "dropout of the model's config is treated as 0");
    if (job->resumed)
        train_log_say(&job->log, "resuming after step %" PRId64, job->step);
    snprintf(members, sizeof members, "\"ranks\": %d, \"parameters\": %" PRId64, job->ranks,
             fsdp_transformer_param_count(job->model));
    train_log_event(&job->log, "start", job->step, members);
}

static void say_step(train_job *job, const train_batch *batch, const train_result *result,
                     double seconds)
{
    const double tokens = (double)batch->sequences * (double)batch->length;
    const train_step_line line = {.step = job->step,
                                  .loss = result->loss,
                                  .grad_norm = result->grad_norm,
                                  .lr = result->lr,
                                  .tokens = job->tokens,
                                  .batch = batch->hash,
                                  .ms = seconds * 1e3,
                                  .tok_s = tokens / seconds};
    const int64_t every = job->config->log.every;
    if (job->rank != 0)
        return;
    fsdp_world_mark(job->world, "log");
    if (every > 0 && (job->step % every == 0 || job->step == job->config->train.steps))
        train_log_say(&job->log, "step %" PRId64 "  loss %.4f  norm %.3f  lr %.2e  %.0f tok/s",
                      line.step, line.loss, line.grad_norm, line.lr, line.tok_s);
    train_log_step(&job->log, &line);
}

static void say_stop(train_job *job, const char *reason)
{
    char members[96];
    if (job->rank != 0)
        return;
    snprintf(members, sizeof members, "\"reason\": \"%s\"", reason);
    train_log_event(&job->log, "stop", job->step, members);
}

/* It leaves no line in the metrics, which have that step's already. */
static fsdp_status say_done(train_job *job)
{
    char line[96];
    if (job->rank != 0)
        return FSDP_OK;
    train_log_warn(&job->log,
                   "nothing to do: step %" PRId64 " is saved, and train.steps is %" PRId64,
                   job->step, job->config->train.steps);
    snprintf(line, sizeof line, "{\"event\": \"done\", \"step\": %" PRId64 "}\n", job->step);
    if (job->log.prints_json)
        cli_put_line(line, strlen(line));
    return FSDP_OK;
}

/* --- the loop ------------------------------------------------------------------------------------ */

static fsdp_status evaluate(train_job *job, fsdp_error *err)
{
    double loss;
    int64_t tokens;
    fsdp_text members = {0};
    FSDP_TRY(train_evaluate(job, job->config->eval.batches, &loss, &tokens, err));
    if (job->rank != 0 || tokens == 0)
        return FSDP_OK;
    train_log_say(&job->log, "step %" PRId64 "  held-out loss %.4f", job->step, loss);
    train_log_scalar(&job->log, job->step, "eval/loss", loss);
    fsdp_text_addf(&members, "\"loss\": ");
    train_add_number(&members, loss);
    fsdp_text_addf(&members, ", \"tokens\": %" PRId64, tokens);
    fsdp_status st = members.failed ? fsdp_fail(err, FSDP_ERR_LIMIT, "out of memory") : FSDP_OK;
    if (st == FSDP_OK)
        train_log_event(&job->log, "eval", job->step, members.data);
    fsdp_text_release(&members);
    return st;
}

static bool is_due(int64_t step, int64_t every)
{
    return every > 0 && step % every == 0;
}

/* A signal asks for a save and exit 75; the file STOP for a save and exit 0. */
static fsdp_status stop(train_job *job, fsdp_error *err)
{
    bool is_there = false;
    const fsdp_status st =
        job->rank == 0 ? train_stop_file_take(job->opts->run, &is_there, err) : FSDP_OK;
    double was_file = is_there;
    FSDP_TRY(fsdp_world_sum(job->world, &was_file, 1, err));
    say_stop(job, was_file > 0 ? "STOP" : "signal");
    FSDP_TRY(train_agree(job, st, err));
    if (was_file > 0)
        return train_agree(job, FSDP_OK, err);
    return fsdp_fail(err, FSDP_ERR_CANCELLED,
                     "stopped by a signal after step %" PRId64
                     ", which is saved; the same command resumes from there",
                     job->step);
}

static fsdp_status fail_nan(train_job *job, const train_result *result, fsdp_error *err)
{
    say_stop(job, "nan");
    return fsdp_fail(err, FSDP_DIFFERS,
                     "step %" PRId64 ": the %s is not finite; nothing of this step is kept "
                     "(train.on_nan skip continues without it)",
                     job->step, isfinite(result->loss) ? "norm of the gradients" : "loss");
}

/* Collective. Evaluates and saves after a step, where that is due. */
static fsdp_status finish_step(train_job *job, const train_result *result, int64_t *saved,
                               fsdp_error *err)
{
    const train_config *config = job->config;
    if (result->save_is_done)
        FSDP_TRY(train_save_finish(job, false, err));
    if (is_due(job->step, config->eval.every))
        FSDP_TRY(evaluate(job, err));
    if (is_due(job->step, config->save.every) && !result->stop) {
        FSDP_TRY(train_save(job, job->step == config->train.steps, err));
        *saved = job->step;
    }
    return FSDP_OK;
}

static fsdp_status save_last(train_job *job, int64_t saved, fsdp_error *err)
{
    if (job->step != saved)
        FSDP_TRY(train_save(job, true, err));
    return train_save_finish(job, true, err);
}

static fsdp_status train(train_job *job, fsdp_error *err)
{
    const train_config *config = job->config;
    int64_t saved = job->resumed ? job->step : -1;
    train_result result = {0};
    while (job->step < config->train.steps && !result.stop) {
        train_batch batch;
        double began = cli_now();
        FSDP_TRY(train_batches_take(job, &batch, err));
        FSDP_TRY(train_step(job, &batch, &result, err));
        train_signals_step(cli_now() - began);
        say_step(job, &batch, &result, cli_now() - began);
        if (!result.is_finite && config->train.on_nan == TRAIN_NAN_STOP)
            return fail_nan(job, &result, err);
        train_signals_shield(true);
        fsdp_status st = finish_step(job, &result, &saved, err);
        train_signals_shield(false);
        FSDP_TRY(st);
    }
    train_signals_shield(true);
    FSDP_TRY(save_last(job, saved, err));
    train_signals_end();
    if (result.stop)
        return stop(job, err);
    say_stop(job, "steps");
    return train_agree(job, FSDP_OK, err);
}

/* === uses of a trained model ================================================================== */

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

/* Collective: --eval. */
static fsdp_status run_eval(train_job *job, fsdp_error *err)
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

/* Collective: --sample. */
static fsdp_status run_sample(train_job *job, fsdp_error *err)
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

/* --tokenize, without ranks; the exit code. */
static int run_tokenizer(const train_options *opts)
{
    fsdp_error err = {0};
    fsdp_tokenizer *tokenizer = NULL;
    fsdp_status st = fsdp_tokenizer_open(opts->tokenize, &tokenizer, &err);
    if (st == FSDP_OK)
        st = tokenize_lines(tokenizer, opts, &err);
    fsdp_tokenizer_free(tokenizer);
    return cli_end(st, &err);
}

/* === the program ============================================================================== */

/* --- a rank -------------------------------------------------------------------------------------- */

static fsdp_status work(train_job *job, const train_options *opts, fsdp_world *world,
                        fsdp_error *err)
{
    *job = (train_job){.opts = opts, .world = world};
    if (opts->eval)
        return run_eval(job, err);
    if (opts->sample)
        return run_sample(job, err);
    train_signals_begin(fsdp_world_rank(world) == 0);
    FSDP_TRY(train_job_begin(job, opts, world, err));
    if (train_job_is_done(job))
        return say_done(job);
    say_start(job);
    return train(job, err);
}

static int run_rank(void *context, fsdp_world *world, int argc, char **argv)
{
    train_job job;
    fsdp_error err = {0};
    (void)argc, (void)argv;
    fsdp_status st = work(&job, context, world, &err);
    (void)fsdp_world_fail(world, &err);
    train_job_end(&job);
    bool is_mine = st != FSDP_OK && err.rank == fsdp_world_rank(world);
    return is_mine || fsdp_world_rank(world) == 0 ? cli_end(st, &err) : (int)st;
}

/* --- main ---------------------------------------------------------------------------------------- */

static int print_config(const train_options *opts)
{
    fsdp_text text = {0};
    train_config_print(&opts->config, &text);
    return cli_end(cli_put_all(&text), NULL);
}

/* A rank that a signal ended was lost, unless the signal asks a program to end. */
static int exit_code(int launched)
{
    static const int asking[] = {SIGHUP, SIGINT, SIGPIPE, SIGTERM, SIGUSR1};
    for (size_t i = 0; i < sizeof asking / sizeof *asking; i++)
        if (launched == 128 + asking[i])
            return launched;
    return launched > 128 ? FSDP_ERR_PEER : launched;
}

/* The one that the launcher takes, which refuses others. */
static double deadline_of(const train_options *opts)
{
    const char *text = opts->deadline ? opts->deadline : getenv("FSDP_DEADLINE");
    const double seconds = text ? strtod(text, NULL) : 0;
    return seconds > 0 && seconds < INT32_MAX ? seconds : 30;
}

/* The launcher reads --comm, then FSDP_COMM: the command line beats the variable, which beats the file. */
static void choose_comm(const train_options *opts)
{
    const char *comm = opts->config.parallel.comm;
    const bool is_given = train_option_is_given(opts, "parallel.comm");
    if (strcmp(comm, "auto") != 0)
        setenv("FSDP_COMM", comm, is_given);
    else if (is_given)
        unsetenv("FSDP_COMM");
}

int main(int argc, char **argv)
{
    static train_options opts;
    fsdp_error err = {0};
    fsdp_status st = train_options_parse(&opts, argc, argv, &err);
    if (st != FSDP_OK)
        return cli_end(st, &err);
    if (opts.print_config)
        return print_config(&opts);
    if (opts.tokenize)
        return run_tokenizer(&opts);
    (void)fsdp_nn_cpu_products(); /* before threads */
    if (opts.run)
        train_catch_signals(deadline_of(&opts));
    choose_comm(&opts);
    return exit_code(fsdp_launch(argc, argv, run_rank, &opts));
}
