/* The lists of an fsdp_convert_plan. */
#ifndef FSDP_PLAN_NOTES_H
#define FSDP_PLAN_NOTES_H

#include "statedict/copied.h"
#include "statedict/ties.h"

/* copies may be NULL. Nothing is allocated for empty lists. */
fsdp_status fsdp_plan_note(fsdp_convert_plan *plan, const fsdp_ties *ties, const fsdp_copies *copies,
                           fsdp_error *err);

#endif
