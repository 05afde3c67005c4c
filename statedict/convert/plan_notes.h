/* The lists of an fsdp_convert_plan. */
#ifndef FSDP_PLAN_NOTES_H
#define FSDP_PLAN_NOTES_H

#include "base/data/text_pairs.h"
#include "statedict/sd/names.h"
#include "statedict/convert/copied.h"
#include "statedict/expect/export_check.h"
#include "statedict/select/selection.h"
#include "statedict/convert/ties.h"

struct convert_job;

/* copies may be NULL. count: entries of the selection's source, without the added ones behind them.
 * notes_ties: the target records tied names that are left out. */
typedef struct fsdp_noted {
    const fsdp_selection *selection;
    size_t count;
    bool notes_ties;
    const fsdp_ties *ties;
    const fsdp_name_list *added;
    const fsdp_copies *copies;
    const fsdp_select_opts *select;    /* in effect */
    bool strips;               /* its renames were not given */
    const char *from;          /* the directory of unread */
    fsdp_name_list unread;
    fsdp_export_report model;  /* beside its config.json */
} fsdp_noted;

/* Called once; the plan is released in any case. */
fsdp_status fsdp_plan_note(fsdp_convert_plan *plan, const fsdp_noted *noted, fsdp_error *err);

/* Notes the keys of metadata that are left out. Called after fsdp_plan_note. */
fsdp_status fsdp_plan_note_metadata(fsdp_convert_plan *plan, const fsdp_text_pairs *left_out,
                                    fsdp_error *err);

/* Notes the values that are code; FSDP_ERR_USAGE when there are some and the options do not copy them.
 * Called after fsdp_plan_note. */
fsdp_status fsdp_plan_note_code(fsdp_convert_plan *plan, const struct convert_job *job,
                                const fsdp_selection *selection, fsdp_error *err);

/* Frees the lists. */
void fsdp_plan_release(fsdp_convert_plan *plan);

#endif
