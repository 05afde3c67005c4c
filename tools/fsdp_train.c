/*
 * fsdp-train: trains a transformer in shards. Read from the bottom: main parses, run_rank is what every rank
 * does, train is the loop of steps. docs/flow_train.md follows a step, a save and a resume through the files.
 */
#include "tools/train/train.h"

#include <inttypes.h>
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

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

/* --- a rank -------------------------------------------------------------------------------------- */

static fsdp_status work(train_job *job, const train_options *opts, fsdp_world *world,
                        fsdp_error *err)
{
    *job = (train_job){.opts = opts, .world = world};
    if (opts->eval)
        return train_use_eval(job, err);
    if (opts->sample)
        return train_use_sample(job, err);
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
        return train_use_tokenizer(&opts);
    (void)fsdp_nn_cpu_products(); /* before threads */
    if (opts.run)
        train_catch_signals(deadline_of(&opts));
    choose_comm(&opts);
    return exit_code(fsdp_launch(argc, argv, run_rank, &opts));
}
