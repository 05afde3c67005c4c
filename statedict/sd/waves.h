/*
 * Waves: tensors of a state dict that share memory in turns. A state of a GPU which is larger than the host's
 * memory for its copy is saved so: a wave is the tensors of a range of entries, and has the memory of
 * an earlier one. A save enters the waves in order and reads only the tensors of the last one.
 *
 * The room that copies a state fills in the struct; saves (statedict/save) enter.
 */
#ifndef FSDP_WAVES_H
#define FSDP_WAVES_H

#include <fsdp/status.h>
#include <stddef.h>

typedef struct fsdp_waves {
    void *context;
    /* Waits until the tensors of this wave can be read. The save has read all earlier waves. The save's
     * thread calls it; after a failure the same wave may be entered again. */
    fsdp_status (*enter)(void *context, size_t number, fsdp_error *err);
    const size_t *first;       /* entry of each wave, ascending from 0 */
    size_t count;
    size_t entered;            /* waves 0 to entered - 1 */
} fsdp_waves;

/* The wave of an entry; waves NULL: all are in one. */
size_t fsdp_waves_find(const fsdp_waves *waves, size_t entry);
/* Enters all waves up to that of the entry. Accepts NULL. */
fsdp_status fsdp_waves_reach(fsdp_waves *waves, size_t entry, fsdp_error *err);
/* Enters the rest, of which this rank writes nothing: a wait for the last wave need not last until the save
 * ends. Accepts NULL. */
fsdp_status fsdp_waves_finish(fsdp_waves *waves, fsdp_error *err);

#endif
