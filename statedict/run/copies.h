/* Copies of a run's steps in other formats, RUN/hf/N and RUN/dcp/N: see copies.c. For retention alone. */
#ifndef FSDP_COPIES_H
#define FSDP_COPIES_H

#include "base/io/io.h"

enum { FSDP_COPY_FORMATS = 2 };

typedef struct fsdp_run_copies {
    fsdp_io *io;
    const char *run;
    bool applies;              /* otherwise nothing is removed */
    /* Called once for each that goes, or would; name: "hf/00000100". May be NULL. */
    void (*report)(void *context, const char *name, bool is_removed, const char *reason);
    void *context;
    bool has_folder[FSDP_COPY_FORMATS];
} fsdp_run_copies;

/* Finds the folders that the run has. */
void fsdp_run_copies_look(fsdp_run_copies *copies);
/* Removes the copies of a step, which goes next. One that cannot be removed is no failure. */
void fsdp_run_copies_remove(const fsdp_run_copies *copies, int64_t step);
/* Removes what killed conversions and removals left. */
void fsdp_run_copies_clear(const fsdp_run_copies *copies);

#endif
