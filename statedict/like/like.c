/* fsdp_checkpoint_verify_like: see expect.h and like.h. */
#include "statedict/like/like.h"

#include "base/core/given.h"
#include "statedict/models/config.h"
#include "statedict/sd/access.h"
#include "statedict/sd/names.h"

#include <stdio.h>
#include <string.h>

/* The model that is asked for: config.json, or the weights of another checkpoint. */
typedef struct like_wanted {
    fsdp_expect *expect;
    fsdp_model_kind kind; /* of a directory */
    fsdp_hf_model model;
} like_wanted;

/* --- the model that is asked for ---------------------------------------------------------------- */

static fsdp_status read_config(fsdp_io *io, const char *path, fsdp_expect **expect_out,
                               fsdp_error *err)
{
    char *text = NULL;
    size_t size;
    FSDP_TRY(fsdp_io_read_file(io, path, FSDP_CONFIG_BYTES, &text, &size, err));
    fsdp_status st = fsdp_expect_config(text, size, path, expect_out, err);
    fsdp_free(text);
    return st;
}

static bool is_config_file(fsdp_io *io, const char *path)
{
    fsdp_file_info info;
    size_t size = strlen(path);
    return size > 5 && strcmp(path + size - 5, ".json") == 0 &&
           io->ops->info(io, path, &info) >= 0 && info.kind == FSDP_FILE_REGULAR;
}

static fsdp_status expect_weights(const char *like, like_wanted *wanted, fsdp_error *err)
{
    const fsdp_checkpoint *checkpoint = wanted->model.checkpoint;
    const fsdp_expect_sd from = {.sd = wanted->model.sd,
                                 .path = like,
                                 .may_lack_head = wanted->kind.is_tied,
                                 .layers = wanted->kind.layers,
                                 .further_layers = wanted->kind.further_layers,
                                 .named = checkpoint->missing_count > 0 ? checkpoint : NULL};
    return fsdp_expect_from(&from, &wanted->expect, err);
}

/* The config.json of a directory without weights, or an index without its files. */
static fsdp_status expect_without_weights(fsdp_io *io, const char *like,
                                          const fsdp_verify_opts *opts, like_wanted *wanted,
                                          fsdp_error *err)
{
    char *config = fsdp_path_join(like, "config.json");
    const fsdp_hf_model_from any = {like, wanted->kind.type, "."};
    fsdp_error unknown = {0};
    if (!config)
        return fsdp_fail_memory(err, like);
    fsdp_status st = is_config_file(io, config) ? read_config(io, config, &wanted->expect, &unknown)
                                                : FSDP_ERR_NOT_FOUND;
    fsdp_free(config);
    if (st == FSDP_OK)
        return FSDP_OK;
    if (fsdp_hf_model_open(&any, opts, &wanted->model, NULL) == FSDP_OK)
        return expect_weights(like, wanted, err);
    if (err && st != FSDP_ERR_NOT_FOUND)
        *err = unknown;
    return st;
}

/* The weights of a directory say more than its config.json. */
static fsdp_status find_wanted(const char *like, const fsdp_verify_opts *opts, like_wanted *wanted,
                               fsdp_error *err)
{
    fsdp_io *io = fsdp_access_io(&opts->access);
    fsdp_error found = {0};
    if (is_config_file(io, like))
        return read_config(io, like, &wanted->expect, err);
    fsdp_model_kind_find(io, NULL, like, &wanted->kind);
    const fsdp_hf_model_from open = {like, wanted->kind.type, NULL};
    fsdp_status st = fsdp_hf_model_open(&open, opts, &wanted->model, &found);
    if (st == FSDP_OK && !wanted->kind.type[0])
        fsdp_model_kind_find(io, NULL, wanted->model.path,
                             &wanted->kind); /* of the step that a run stands for */
    if (st == FSDP_OK)
        return expect_weights(like, wanted, err);
    fsdp_hf_model_release(&wanted->model);
    fsdp_status without = expect_without_weights(io, like, opts, wanted, err);
    if (without == FSDP_OK || (without != FSDP_ERR_NOT_FOUND && st == FSDP_ERR_NOT_FOUND))
        return without;
    if (err)
        *err = found;
    return st;
}

/* --- the call ----------------------------------------------------------------------------------- */

static fsdp_status check_model(fsdp_like_job *job, const like_wanted *wanted, fsdp_error *err)
{
    fsdp_expect_counts counts = {0};
    fsdp_like_context context = {job, wanted->expect};
    FSDP_TRY(fsdp_expect_compare(wanted->expect, job->model.sd, fsdp_like_take_fault, &context,
                                 &counts, err));
    job->summary->expected = counts.expected - job->tied;
    job->summary->found = counts.found;
    if (job->opts->level == FSDP_VERIFY_QUICK)
        return FSDP_OK;
    FSDP_TRY(fsdp_like_check_values(job, err));
    return fsdp_like_check_step(job, err);
}

fsdp_status fsdp_checkpoint_verify_like(const char *path, const char *like,
                                        const fsdp_verify_opts *opts,
                                        fsdp_like_summary *summary_out, fsdp_error *err)
{
    fsdp_like_summary unused;
    const fsdp_verify_opts defaults = {0};
    FSDP_NEED(err, path, like);
    fsdp_like_job job = {.opts = opts ? opts : &defaults,
                         .summary = summary_out ? summary_out : &unused};
    like_wanted wanted = {0};
    *job.summary = (fsdp_like_summary){0};
    fsdp_verify_opts quiet = *job.opts;
    quiet.watch.notice = NULL; /* the verification of the path has told the way to it */
    fsdp_status st = find_wanted(like, job.opts, &wanted, err);
    if (st == FSDP_OK) {
        snprintf(job.summary->model, sizeof job.summary->model, "%s",
                 fsdp_expect_name(wanted.expect));
        job.wanted = wanted.model.sd ? &wanted.model : NULL;
        job.model_type =
            wanted.kind.type[0] ? wanted.kind.type : fsdp_expect_model_type(wanted.expect);
        const fsdp_hf_model_from open = {path, job.model_type, NULL};
        st = fsdp_hf_model_open(&open, &quiet, &job.model, err);
    }
    if (st == FSDP_OK)
        st = check_model(&job, &wanted, err);
    fsdp_hf_model_release(&job.model);
    fsdp_hf_model_release(&wanted.model);
    fsdp_expect_free(wanted.expect);
    if (st == FSDP_OK && job.summary->findings > 0)
        return fsdp_fail(err, FSDP_DIFFERS, "'%s' is not the model of '%s': %lld findings", path,
                         like, (long long)job.summary->findings);
    return st;
}
