/*
 * fsdp-train: trains a transformer in shards, saves it into a run, continues from there, evaluates and
 * samples. In: the command line and a configuration. Out: calls of the runtime, checkpoints, metrics and an
 * exit code. fsdp_train.c is the main, and does --eval, --sample and --tokenize; tests/bench measures steps
 * with train_job_make, train_config_init and train_step.
 *
 *   train_options.c   the configuration ([section] key = value), and the command line
 *   train_job.c       a job's objects: mesh, model, optimizer, tokenizer, data; one step and its ids;
 *                     evaluation; gradients in a file; requests to stop
 *   train_state.c     a checkpoint, run or directory of Hugging Face as a source; resumes, saves
 *   train_npy.c       arrays of .npy files
 *   train_log.c       metrics.jsonl, main.log, TensorBoard
 */
#ifndef FSDP_TRAIN_H
#define FSDP_TRAIN_H

#include "kernels/digest.h"
#include "runtime/tokens/token_data.h"
#include "runtime/tokens/tokenizer.h"
#include "runtime/transformer/transformer.h"
#include "tools/cli/cli.h"
#include "tools/train/train_config.h"
#include "tools/train/train_log.h"
#include "tools/train/train_npy.h"

#include <fsdp/fsdp.h>

/* --- options (train_options.c) ------------------------------------------------------------------- */

typedef enum train_resume { TRAIN_RESUME_AUTO, TRAIN_RESUME_NO, TRAIN_RESUME_PATH } train_resume;

typedef struct train_setting { const char *name, *value; } train_setting;
typedef struct train_given { const char *name; unsigned work; } train_given;

typedef struct train_options {
    cli_common common;
    const char *config_path;   /* NULL: none */
    train_setting *settings;   /* keys of the command line, in order */
    size_t setting_count;
    train_given *given;        /* options of the command line, and the kinds of work that look at them */
    size_t given_count;
    train_config config;
    const char *run, *init;
    train_resume resume;
    const char *resume_path;
    unsigned allowed_changes;
    bool print_config;
    const char *batches, *dump_grads;
    const char *eval, *sample, *tokenize;      /* SRC or TOKENIZER: other work than training */
    const char *tokens, *logits_out, *data, *prompt, *out;
    int64_t count;             /* -n */
    double temperature, top_p;
    int64_t top_k, seed;
    bool special, decode;
    const char *deadline;      /* seconds; NULL: not given */
    int argc;                  /* as the program was started: fsdp_launch takes its part */
    char **argv;
} train_options;

/* Ends the program on a usage error, and for --help; fails when the configuration makes no sense. */
fsdp_status train_options_parse(train_options *opts, int argc, char **argv, fsdp_error *err);
/* The command line has the option --NAME. */
bool train_option_is_given(const train_options *opts, const char *name);

/* --- sources (train_state.c) -------------------------------------------------------------------- */

/* What a model comes from. */
typedef struct train_source {
    char *path;                /* of the checkpoint or directory itself */
    bool is_hf;
    fsdp_transformer_config config;
    fsdp_text config_text, tokenizer_text;     /* of JSON files; "" where there is none */
    fsdp_text generation_text, tokenizer_config_text;
    const char *other_tokenizer;   /* a file of a tokenizer where there is no tokenizer.json; NULL: none */
    int64_t step;              /* FSDP_NO_STEP: none */
    fsdp_text train_config;    /* of a checkpoint of a training */
    fsdp_value data;
} train_source;

/* Local. `path` is a checkpoint, a run (its newest that is whole) or a directory with config.json. */
fsdp_status train_source_open(const char *path, train_source *source_out, fsdp_error *err);
void train_source_close(train_source *source);

/* --- a job (train_job.c) ------------------------------------------------------------------------- */

typedef struct train_batches train_batches;

/* The ids of one step, of all ranks: sequences x (length + 1). */
typedef struct train_batch {
    int64_t *ids;
    int64_t sequences, length;
    char hash[FSDP_XXH3_HEX];     /* XXH3-128 of the ids */
    bool is_agreed;               /* every rank has it, and memory for its part */
} train_batch;

/* The batch of the step after those done. Ranks read it before the exchange of the step before, which tells
 * whether all have it. */
typedef struct train_next {
    train_batch batch;
    fsdp_error failure;           /* of this rank to read it */
    bool was_read;
} train_next;

typedef struct train_job {
    const train_options *opts;
    const train_config *config;
    fsdp_world *world;
    fsdp_ctl *ctl;
    int rank, ranks;
    fsdp_mesh *mesh;
    fsdp_tokenizer *tokenizer; /* NULL: ids come from --batches or --tokens */
    train_batches *batches;
    fsdp_value data;           /* what they come from, of a run */
    train_next next;
    fsdp_transformer_config model_config;
    fsdp_text model_text;      /* config.json */
    fsdp_text generation_text, tokenizer_config_text;  /* generation_config.json and its like, of --init */
    fsdp_transformer *model;
    fsdp_root *root;
    fsdp_optim *optim;
    train_log log;             /* open on rank 0 */
    int64_t step;              /* steps done */
    int64_t tokens, consumed;  /* by them: tokens, sequences of the data */
    int64_t failed_saves;      /* that save.on_error continue passed over */
    fsdp_async_saver *saver;   /* NULL: saves are synchronous */
    bool is_saving;            /* in the background */
    bool has_changed;          /* since the last save, some step was finite and had a learning rate */
    bool resumed;
} train_job;

/* Collective. Everything but values: they come from the resumed checkpoint, from --init, or are new. */
fsdp_status train_job_begin(train_job *job, const train_options *opts, fsdp_world *world, fsdp_error *err);
void train_job_end(train_job *job);
/* True when the resumed checkpoint has all steps of the training already. */
bool train_job_is_done(const train_job *job);
/* Collective. Makes the model of SRC, without optimizer and data, for evaluation and sampling. */
fsdp_status train_job_open(train_job *job, const train_options *opts, fsdp_world *world, const char *path,
                           fsdp_error *err);
/* Collective. A new model of `config` and its optimizer, without data and run: for fsdp-bench, which brings
 * the batches. */
fsdp_status train_job_make(train_job *job, const train_options *opts, fsdp_world *world,
                           const fsdp_transformer_config *config, fsdp_error *err);

/* --- batches (train_job.c) -------------------------------------------------------------------- */

/* Collective, without an exchange where the step before has had it. The batch of the step after those done;
 * its ids are borrowed until that step has ended. */
fsdp_status train_batches_take(train_job *job, train_batch *batch_out, fsdp_error *err);
/* Local. Checks this rank's part of a batch, and makes memory for it. */
fsdp_status train_batch_prepare(train_job *job, const train_batch *batch, fsdp_error *err);

/* --- steps (train_job.c) ------------------------------------------------------------------------- */

typedef struct train_result {
    double loss, grad_norm, lr;
    bool is_finite, stop;      /* stop: some rank was asked to */
    bool save_is_done;         /* on all ranks: the one in the background */
} train_result;

/* Collective. fsdp_ctl_agree on `mine`, and on the log, which only rank 0 writes: all ranks stop with its
 * error. */
fsdp_status train_agree(const train_job *job, fsdp_status mine, fsdp_error *err);
/* Collective. Forward, backward, clipping and the optimizer's step. One exchange of all ranks carries the
 * loss, wishes to stop, saves that have ended, and whether a rank cannot continue. */
fsdp_status train_step(train_job *job, const train_batch *batch, train_result *result_out, fsdp_error *err);
/* Collective. The mean loss over held-out batches. */
fsdp_status train_evaluate(train_job *job, int64_t batches, double *loss_out, int64_t *tokens_out,
                           fsdp_error *err);

/* --- checkpoints (train_state.c) ----------------------------------------------------------------- */

/* Collective. Brings the parameters. FSDP_ERR_USAGE: the config ties the head, and the files have another one
 * next to the embedding. */
fsdp_status train_source_load_model(const train_source *source, train_job *job, fsdp_error *err);
/* Collective. Brings the model, the optimizer and the job's counters. In a run with --resume auto, a
 * checkpoint whose data turns out to be damaged is replaced by the one before it, also in `source`; damaged
 * ones are set aside. */
fsdp_status train_resume_from(train_job *job, train_source *source, fsdp_error *err);
/* Collective. Begins a save, in the background unless save.async is false, and ends the one before.
 * save.on_error decides about failures; of the last save of a training, which is also ended, it can only
 * retry. */
fsdp_status train_save(train_job *job, bool is_last, fsdp_error *err);
/* Collective. Waits for the save in the background, if there is one. */
fsdp_status train_save_finish(train_job *job, bool is_last, fsdp_error *err);

/* --- requests to stop (train_job.c) ----------------------------------------------------------- */

/* SIGTERM, SIGUSR1, SIGHUP and SIGINT from now on ask to stop; a second SIGINT ends the program with 130. A
 * step that has not ended `deadline` seconds after the signal, or at a second one, ends the program, too,
 * with 128 plus the signal's number. Steps may take four times as long as the longest one. */
void train_catch_signals(double deadline);
/* This process has ranks, and rank 0; and what a signal asks for is done. */
void train_signals_begin(bool is_first);
void train_signals_end(void);
/* Around saves and evaluations: they take longer than a step, and are waited for. */
void train_signals_shield(bool is_begin);
void train_signals_step(double seconds);       /* a step took so long */

/* Rank 0: removes the file RUN/STOP, if it is there. FSDP_ERR_EXISTS: a directory stands in its place. */
fsdp_status train_stop_file_take(const char *run, bool *was_there_out, fsdp_error *err);

#endif
