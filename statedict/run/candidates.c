/* The checkpoints that a load tries in turn: see candidates.h. */
#include "statedict/run/candidates.h"

#include "base/core/mem.h"
#include "statedict/run/run_internal.h"

#include <string.h>

fsdp_status fsdp_candidates_list(const char *path, fsdp_io *io, const fsdp_watch *watch,
                                 fsdp_candidates *list_out, fsdp_error *err)
{
    *list_out = (fsdp_candidates){.path = path};
    fsdp_access access = {.disk = io};
    FSDP_TRY(fsdp_path_is_run(path, &access, &list_out->is_run, err));
    if (list_out->is_run)
        return fsdp_run_scan(path, io, &list_out->steps, err);
    return fsdp_checkpoint_resolve(path, &(fsdp_open_opts){.access = access}, watch,
                                   &list_out->single, err);
}

void fsdp_candidates_release(fsdp_candidates *list)
{
    fsdp_run_steps_release(&list->steps);
    fsdp_free(list->single);
    list->single = NULL;
}

static void skip_others(fsdp_candidates *list)
{
    const fsdp_run_steps *steps = &list->steps;
    while (list->next < steps->count && steps->items[list->next].state != FSDP_STEP_GOOD)
        list->next++;
}

static fsdp_status set_path(fsdp_candidate *out, const char *path, fsdp_error *err)
{
    if (!path)
        return fsdp_fail_memory(err, "a path");
    if (strlen(path) >= sizeof out->path)
        return fsdp_fail(err, FSDP_ERR_USAGE, "the path '%.200s...' is too long", path);
    strcpy(out->path, path);
    return FSDP_OK;
}

static fsdp_status take_step(fsdp_candidates *list, fsdp_candidate *out, fsdp_error *err)
{
    skip_others(list);
    if (list->next == list->steps.count)
        return fsdp_fail(err, FSDP_ERR_NOT_FOUND, "no checkpoint in '%s' could be loaded",
                         list->path);
    const fsdp_run_step *step = &list->steps.items[list->next++];
    char *path = fsdp_path_join(list->path, step->name);
    fsdp_status st = set_path(out, path, err);
    fsdp_free(path);
    out->step = step->step;
    skip_others(list);
    out->is_last = list->next == list->steps.count;
    return st;
}

fsdp_status fsdp_candidates_next(fsdp_candidates *list, fsdp_candidate *candidate_out,
                                 fsdp_error *err)
{
    *candidate_out = (fsdp_candidate){.step = FSDP_NO_STEP, .is_last = true};
    return list->is_run ? take_step(list, candidate_out, err)
                        : set_path(candidate_out, list->single, err);
}

fsdp_status fsdp_candidate_refuse_newer(const fsdp_candidates *list, const fsdp_candidate *failed,
                                        fsdp_io *io, fsdp_error *err)
{
    return list->is_run ? fsdp_run_refuse_newer(failed->path, io, err) : FSDP_OK;
}

fsdp_status fsdp_candidate_check_step(const fsdp_candidate *candidate, int64_t stored_step,
                                      fsdp_error *err)
{
    if (candidate->step == FSDP_NO_STEP || candidate->step == stored_step)
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_DAMAGED, "'%s' holds step %lld: it was renamed", candidate->path,
                     (long long)stored_step);
}
