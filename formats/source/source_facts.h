/*
 * Facts that several files of one checkpoint state: its step, the number of ranks, the sizes of the model.
 * Files that say different things are of different saves, and joining them makes a checkpoint that never was.
 *
 * Callers: the format rooms that read one checkpoint out of several files.
 */
#ifndef FSDP_SOURCE_FACTS_H
#define FSDP_SOURCE_FACTS_H

#include "base/core/mem.h"
#include "base/data/name_table.h"
#include <fsdp/value.h>

/* Zero-initialise; release when done. */
typedef struct fsdp_facts {
    struct fsdp_fact *items;   /* in the order in which they were said first */
    size_t count, room;
    fsdp_name_table names;
    fsdp_arena arena;
} fsdp_facts;

/* The end of a message about files that contradict one another. */
#define FSDP_TWO_SAVES "; they are from different saves; put the files of one save together"

/* True for the name of a number that all ranks have alike: a step anywhere ("state.w.step"), an iteration, an
 * epoch or a world size at the top. */
bool fsdp_fact_is_step(const char *name, size_t size);

/* True when several elements differ from the one before, so that no two ranks have them by chance: padding
 * and weights that were never trained may be equal. */
bool fsdp_fact_tells(const char *data, size_t size, size_t element);

void fsdp_facts_release(fsdp_facts *facts);

/*
 * Notes that a file says `what` ("global_steps") is this value. FSDP_ERR_DAMAGED when another file said
 * something else: the message names both files and both values. Values without a short text (dicts, objects)
 * are ignored.
 */
fsdp_status fsdp_facts_note(fsdp_facts *facts, const char *what, size_t what_size, const char *file,
                            const fsdp_value *value, fsdp_error *err);

#endif
