/*
 * Room hdf5_child: HDF5 files of other programs as a source, read by libhdf5 in a sandboxed child process.
 * This header is the parent's end of the connection.
 *
 * In: an HDF5 file, which may be hostile. Out: the catalog of a source (source.h), and boxes of datasets
 * that are not plain bytes.
 *
 *   parent:   hdf5_read.c     the format: bid, open, boxes; the file in a .keras file
 *             hdf5_session.c  forks the child, sends requests, checks every reply
 *             hdf5_listing.c  checks the child's listing and fills the catalog
 *   both:     hdf5_protocol.h the messages; hdf5_sandbox.h the limits
 *   child:    hdf5_sandbox.c  limits and seccomp; hdf5_child_reply.c messages
 *             hdf5_child.c    requests, and the file as libhdf5 sees it
 *             hdf5_child_object.c groups and links, datasets and attributes
 *             hdf5_child_chunk.c checks of stored chunks, h5py's filter; hdf5_child_type.c types
 *
 * A crafted file may take over the child, so the parent trusts nothing that it sends. A session serves one
 * request at a time, and every wait has a deadline. Callers: detect (the format) and native_check.c (a
 * listing of a native file). The room calls hdf5, source and zip.
 */
#ifndef FSDP_HDF5_SESSION_H
#define FSDP_HDF5_SESSION_H

#include "formats/hdf5_child/hdf5_protocol.h"
#include "base/text.h"
#include <stdbool.h>
#include <sys/types.h>

typedef struct fsdp_h5_session fsdp_h5_session;

/* The file, as the parent serves it to the child. */
typedef struct fsdp_h5_file_view {
    const char *path;          /* for messages */
    int64_t size;
    fsdp_status (*pread)(void *context, void *data, size_t size, int64_t offset, fsdp_error *err);
    void *context;
    bool limits_only;          /* confines the child by resource limits alone */
} fsdp_h5_file_view;

/* Forks the child, which opens the file. view is copied; its pointers are borrowed. */
fsdp_status fsdp_h5_session_start(const fsdp_h5_file_view *view, fsdp_h5_session **session_out,
                                  fsdp_error *err);

/* A session over an existing channel and FSDP_H5_SHARED bytes of memory, both borrowed. deadline_ms: the
 * child's time for one request, without the time in which the parent reads bytes for it. */
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
    size_t size;               /* of the box, in bytes: at most FSDP_H5_REPLY_ROOM */
    int64_t chunk;             /* bytes of one chunk of the dataset */
    int64_t cache;             /* bytes of decoded chunks that the child may keep */
} fsdp_h5_request;

fsdp_status fsdp_h5_session_read(fsdp_h5_session *session, const fsdp_h5_request *wanted, void *data,
                                 fsdp_error *err);

#endif
