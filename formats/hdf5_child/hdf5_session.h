/*
 * Our end of the talk with the child (hdf5_wire.h). Everything the child says is checked: it may have been
 * taken over by the file that it reads. One request at a time; every wait has a deadline.
 */
#ifndef FSDP_HDF5_SESSION_H
#define FSDP_HDF5_SESSION_H

#include "formats/hdf5_child/hdf5_wire.h"
#include "base/text.h"
#include <stdbool.h>
#include <sys/types.h>

typedef struct fsdp_h5_session fsdp_h5_session;

/* The file as the child may see it. */
typedef struct fsdp_h5_file_view {
    const char *path;          /* for messages */
    int64_t size;
    fsdp_status (*pread)(void *user, void *data, size_t size, int64_t offset, fsdp_error *err);
    void *user;
} fsdp_h5_file_view;

/* Forks the child, which opens the file. view is copied, what it points to borrowed. */
fsdp_status fsdp_h5_session_start(const fsdp_h5_file_view *view, fsdp_h5_session **session_out,
                                  fsdp_error *err);

/* A session over a channel and memory of FSDP_H5_SHARED bytes, both borrowed. deadline_ms: what the child may
 * take for one request, the time for bringing it bytes not counted. */
fsdp_status fsdp_h5_session_adopt(const fsdp_h5_file_view *view, int channel, unsigned char *shared,
                                  int64_t deadline_ms, fsdp_h5_session **session_out, fsdp_error *err);

/* Kills the child. Accepts NULL. */
void fsdp_h5_session_stop(fsdp_h5_session *session);

/* Appends the listing, at most `most` bytes (FSDP_ERR_LIMIT). */
fsdp_status fsdp_h5_session_list(fsdp_h5_session *session, size_t most, fsdp_text *listing,
                                 fsdp_error *err);

typedef struct fsdp_h5_request {
    int64_t dataset;
    const fsdp_box *box;
    size_t size;               /* of the box, in bytes: at most FSDP_H5_SAID_ROOM */
    int64_t chunk;             /* bytes of one chunk of the dataset */
    int64_t cache;             /* bytes of unpacked chunks that the child may keep */
} fsdp_h5_request;

fsdp_status fsdp_h5_session_read(fsdp_h5_session *session, const fsdp_h5_request *wanted, void *data,
                                 fsdp_error *err);

#endif
