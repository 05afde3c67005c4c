/* Scalars for TensorBoard: events.out.tfevents.* of a run, one record per scalar. */
#ifndef FSDP_TRAIN_EVENTS_H
#define FSDP_TRAIN_EVENTS_H

#include <fsdp/status.h>
#include <stdint.h>

typedef struct train_events train_events;

/* Begins a file of its own in `directory`; TensorBoard joins those of one run. The caller closes it. */
fsdp_status train_events_open(const char *directory, train_events **events_out, fsdp_error *err);
/* Local. Values that are not finite are written as they are. */
fsdp_status train_events_add(train_events *events, int64_t step, const char *tag, double value,
                             fsdp_error *err);
/* Hands what was added over to the file. */
fsdp_status train_events_flush(train_events *events, fsdp_error *err);
void train_events_close(train_events *events); /* accepts NULL */

#endif
