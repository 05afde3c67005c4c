/*
 * The state of the child process, shared by hdf5_child.c (requests, and the file as libhdf5 sees it),
 * hdf5_child_reply.c (messages), hdf5_child_object.c (groups, links, datasets and attributes),
 * hdf5_child_chunk.c (checks of stored chunks, h5py's filter) and hdf5_child_type.c (types). These files, and
 * hdf5_sandbox.c, run in the child.
 */
#ifndef FSDP_HDF5_CHILD_H
#define FSDP_HDF5_CHILD_H

#include "formats/hdf5/hdf5_internal.h"
#include "formats/hdf5_child/hdf5_protocol.h"
#include "base/text.h"

enum { FSDP_H5_PAGE = 64 << 10, FSDP_H5_PAGES = 32 };

typedef struct fsdp_h5_page {
    int64_t offset;            /* -1: empty page */
    unsigned char *data;
} fsdp_h5_page;

typedef struct fsdp_h5_child {
    int channel;
    unsigned char *file_room;  /* shared: bytes of the file */
    unsigned char *reply;       /* shared: the child's reply */
    size_t reply_size;
    int64_t file_size;
    fsdp_h5_page pages[FSDP_H5_PAGES];
    hid_t file;
    size_t cache;              /* bytes of chunks that libhdf5 keeps of one dataset */
    haddr_t *datasets;         /* addresses of the object headers of the listed tensors */
    size_t count, room;
    hid_t open;                /* dataset number `open_number`, or negative */
    size_t open_number;
    unsigned char *checked;    /* a bit per chunk of `open` that was checked; NULL: too many, or none yet */
    bool sources_checked;      /* the chunks of all datasets of the file were checked */
} fsdp_h5_child;

/* --- hdf5_child_reply.c --- */

/* Both end the process when the parent has closed the channel. */
void fsdp_h5_send(const fsdp_h5_child *child, const fsdp_h5_message *message);
void fsdp_h5_receive(const fsdp_h5_child *child, fsdp_h5_message *message_out);

/* "WHAT: libhdf5: ..." with libhdf5's innermost reason. */
fsdp_status fsdp_h5_child_fail(fsdp_error *err, const char *what, ...) FSDP_PRINTF(2, 3);

/* --- hdf5_child_object.c --- */

fsdp_status fsdp_h5_child_list(fsdp_h5_child *child, fsdp_error *err);

/* --- hdf5_child_chunk.c --- */

enum { FSDP_H5_LZF = 32000 };
extern const H5Z_class2_t fsdp_h5_lzf_filter;

typedef enum fsdp_lzf_result { FSDP_LZF_OK, FSDP_LZF_NO_ROOM, FSDP_LZF_DAMAGED } fsdp_lzf_result;

/* Decodes all of data. */
fsdp_lzf_result fsdp_lzf_decode(const unsigned char *data, size_t size, unsigned char *out, size_t room,
                                size_t *size_out);

/* Checks the stored chunks of a box (NULL: of all) of a dataset, or of the sources of a virtual one.
 * FSDP_ERR_DAMAGED for a chunk from which libhdf5 would decode more bytes than it has. */
fsdp_status fsdp_h5_child_check(fsdp_h5_child *child, hid_t dataset, const fsdp_box *box,
                                fsdp_error *err);

/* --- hdf5_child_type.c --- */

typedef enum fsdp_h5_kind {
    FSDP_H5_OTHER, FSDP_H5_INTEGER, FSDP_H5_FLOAT, FSDP_H5_BOOLEAN, FSDP_H5_ENUM, FSDP_H5_COMPLEX,
    FSDP_H5_TEXT,              /* of variable length */
    FSDP_H5_FIXED_TEXT
} fsdp_h5_kind;

typedef struct fsdp_h5_type_info {
    fsdp_h5_kind kind;
    fsdp_dtype dtype;          /* FSDP_DTYPE_NONE when no dtype has these bits */
    bool is_signed;
    bool is_swapped;           /* stored in the other byte order */
    char text[64];             /* for types that stay opaque */
    char numpy[16];            /* the name in NumPy, approximately */
} fsdp_h5_type_info;

void fsdp_h5_classify(hid_t type, fsdp_h5_type_info *out);

#endif
