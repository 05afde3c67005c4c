/*
 * The full state of a checkpoint in one call, for people who export: into memory, or streamed. From
 * live shards it is save.c.
 */
#include "statedict/run/candidates.h"
#include "statedict/checkpoint/checkpoint_internal.h"
#include "statedict/select/relayout.h"
#include "statedict/run/run_internal.h"

#include "base/core/given.h"

static fsdp_io *io_of(const fsdp_load_opts *opts)
{
    return fsdp_access_io(opts ? &opts->access : NULL);
}

/* Describes the selected entries as whole tensors, without memory. */
static fsdp_status describe_full(const char *path, const fsdp_load_opts *opts,
                                 fsdp_checkpoint **checkpoint_out, fsdp_sd **full_out,
                                 fsdp_error *err)
{
    fsdp_selection *selection = NULL;
    fsdp_select_opts select = {0};
    fsdp_open_opts open = {0};
    if (opts) {
        FSDP_TRY(fsdp_check_budget(opts->threads, opts->memory, err));
        open.access = opts->access;
        select = (fsdp_select_opts){.include = opts->include, .exclude = opts->exclude};
    }
    FSDP_TRY(fsdp_checkpoint_open(path, &open, checkpoint_out, err));
    const fsdp_sd *sd = (*checkpoint_out)->manifest.sd;
    fsdp_status st = fsdp_selection_create(&(fsdp_select_from){.sd = sd}, &select,
                                           fsdp_format_to("fsdp"), &selection, err);
    if (st == FSDP_DIFFERS)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "no name in '%s' matches: none of %zu names is selected", path,
                         fsdp_sd_count(sd));
    if (st == FSDP_OK)
        st = fsdp_relayout_whole(sd, selection, full_out, err);
    fsdp_selection_free(selection);
    return st;
}

/* --- into memory --- */

/* Before memory is taken for what the manifest declares: do the files hold it? */
static fsdp_status require_stored(fsdp_checkpoint *checkpoint, const fsdp_sd *full, fsdp_error *err)
{
    const fsdp_sd *declared = checkpoint->manifest.sd;
    for (size_t i = 0; i < fsdp_sd_count(full); i++) {
        const fsdp_entry *entry = fsdp_sd_at(full, i);
        if (entry->kind == FSDP_ENTRY_TENSOR)
            FSDP_TRY(fsdp_checkpoint_require(
                checkpoint, (size_t)fsdp_sd_find(declared, entry->name, entry->name_size), err));
    }
    return FSDP_OK;
}

static fsdp_status fill_full(fsdp_sd *full, const char *path, const fsdp_load_opts *opts,
                             fsdp_error *err)
{
    fsdp_ctl *self = NULL;
    fsdp_load_opts load = opts ? *opts : (fsdp_load_opts){0};
    load.cast = false;
    FSDP_TRY(fsdp_sd_allocate(full, 0, err));
    FSDP_TRY(fsdp_ctl_self(&self, err));
    fsdp_status st = fsdp_sd_load(full, self, path, &load, err);
    fsdp_ctl_free(self);
    return st;
}

static fsdp_status load_one(const fsdp_candidate *candidate, const fsdp_load_opts *opts,
                            fsdp_sd **full_out, fsdp_error *err)
{
    fsdp_checkpoint *checkpoint = NULL;
    fsdp_status st = describe_full(candidate->path, opts, &checkpoint, full_out, err);
    if (st == FSDP_OK)
        st = fsdp_candidate_check_step(candidate, checkpoint->manifest.step, err);
    if (st == FSDP_OK)
        st = require_stored(checkpoint, *full_out, err);
    if (st == FSDP_OK)
        st = fill_full(*full_out, checkpoint->path, opts, err);
    fsdp_checkpoint_close(checkpoint);
    if (st != FSDP_OK) {
        fsdp_sd_free(*full_out);
        *full_out = NULL;
    }
    return st;
}

static fsdp_status load_candidates(fsdp_candidates *list, const fsdp_load_opts *opts,
                                   fsdp_sd **full_out, fsdp_error *err)
{
    for (;;) {
        fsdp_candidate candidate;
        FSDP_TRY(fsdp_candidates_next(list, &candidate, err));
        fsdp_status st = load_one(&candidate, opts, full_out, err);
        if (!fsdp_run_may_skip(st, err))
            return st;
        FSDP_TRY(fsdp_candidate_refuse_newer(list, &candidate, io_of(opts), err));
        if (candidate.is_last)
            return st;
        fsdp_notice(opts ? &opts->watch : NULL, "skipped: %s", err->text);
        if (opts && opts->report)
            fsdp_load_report_release(opts->report);
    }
}

fsdp_status fsdp_load_full(const char *path, const fsdp_load_opts *opts, fsdp_sd **full_out,
                           fsdp_error *err)
{
    FSDP_NEED(err, full_out);
    *full_out = NULL;
    FSDP_NEED(err, path);
    fsdp_candidates list = {0};
    fsdp_error local = {0};
    err = err ? err : &local;
    fsdp_status st =
        fsdp_candidates_list(path, io_of(opts), opts ? &opts->watch : NULL, &list, err);
    if (st == FSDP_OK)
        st = load_candidates(&list, opts, full_out, err);
    if (st == FSDP_OK)
        *err = (fsdp_error){0};
    fsdp_candidates_release(&list);
    return st;
}

/* --- streamed --- */

static fsdp_status stream_entries(fsdp_checkpoint *checkpoint, const fsdp_sd *full,
                                  const fsdp_load_opts *opts, fsdp_slab_visit visit, void *context,
                                  fsdp_error *err)
{
    const fsdp_sd *stored = checkpoint->manifest.sd;
    for (size_t i = 0; i < fsdp_sd_count(full); i++) {
        const fsdp_entry *entry = fsdp_sd_at(full, i);
        if (entry->kind != FSDP_ENTRY_TENSOR)
            continue;
        int64_t at = fsdp_sd_find(stored, entry->name, entry->name_size);
        FSDP_TRY(fsdp_checkpoint_stream(checkpoint, (size_t)at, opts ? opts->memory : 0, visit,
                                        context, err));
    }
    return FSDP_OK;
}

fsdp_status fsdp_stream_full(const char *path, const fsdp_load_opts *opts, fsdp_slab_visit visit,
                             void *context, fsdp_error *err)
{
    FSDP_NEED(err, path);
    FSDP_NEED_CALL(err, visit);
    fsdp_checkpoint *checkpoint = NULL;
    fsdp_sd *full = NULL;
    fsdp_status st = describe_full(path, opts, &checkpoint, &full, err);
    if (st == FSDP_OK)
        st = stream_entries(checkpoint, full, opts, visit, context, err);
    fsdp_sd_free(full);
    fsdp_checkpoint_close(checkpoint);
    return st;
}
