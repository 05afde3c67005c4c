/*
 * The messages between the parent and the child that runs libhdf5 on a file of another program.
 *
 *   parent                          child
 *   (forks it)               <-     READY, or FAILED
 *   LIST                     ->
 *     BYTES                  <-->   NEED: a range of the file
 *     GO_ON                  <-->   PART: some of the listing
 *                            <-     DONE, or FAILED
 *   READ a box of a dataset  ->
 *     BYTES                  <-->   NEED
 *                            <-     DONE: the box is in shared memory, or FAILED
 *
 * Messages have one size and travel over a socket that keeps their boundaries. Bytes lie in shared memory:
 * those of the file in its first part, the child's replies in its second. A crafted file may take over the
 * child, so hdf5_session.c and hdf5_listing.c check everything that it sends.
 *
 * The listing is a sequence of records:
 *   'D'  path, u8 dtype, u8 mark (a dtype that an attribute names, or 0), u8 swap, u8 ndim, i64 shape[ndim],
 *        i64 offset (of plain bytes in the file, -1: READ fetches them), i64 stored, u8 has_checksums,
 *        u8 is_chunked, i64 chunk[ndim] if so    the n-th one has the number n in READ
 *   'V'  path, value                     a dataset that is not a tensor
 *   'A'  path, name, value               an attribute of the object at the path
 *   'S'  path, target                    a soft link
 *   'E'                                  the end
 * value: u8 kind; 'c' text (a class); 'e' text (an empty attribute's type); else u8 ndim, i64 shape[ndim] and
 * the elements: 'b' u8, 'i' i64, 'u' u64, 'f' f64, 'z' 2 x f64, 's' text.
 * path, name, text: u32 size and the bytes. Numbers are in the processor's byte order.
 */
#ifndef FSDP_HDF5_PROTOCOL_H
#define FSDP_HDF5_PROTOCOL_H

#include <fsdp/box.h>
#include <fsdp/status.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    FSDP_H5_FILE_ROOM = 1 << 20,         /* part of the shared memory for bytes of the file */
    FSDP_H5_REPLY_ROOM = 4 << 20,         /* part for the child's replies */
    FSDP_H5_SHARED = FSDP_H5_FILE_ROOM + FSDP_H5_REPLY_ROOM
};

typedef enum fsdp_h5_message_kind {
    FSDP_H5_LIST = 1, FSDP_H5_READ, FSDP_H5_BYTES, FSDP_H5_GO_ON,
    FSDP_H5_READY, FSDP_H5_NEED, FSDP_H5_PART, FSDP_H5_DONE, FSDP_H5_FAILED
} fsdp_h5_message_kind;

typedef struct fsdp_h5_message {
    uint32_t kind;
    uint32_t status;           /* FAILED: an fsdp_status */
    int64_t number;            /* READ: the dataset; NEED: the offset in the file */
    int64_t size;              /* NEED, BYTES, PART, DONE, FAILED: bytes in shared memory; READ: cache */
    fsdp_box box;              /* READ */
} fsdp_h5_message;

/* Runs the child, after fork. */
void fsdp_h5_child_run(int channel, unsigned char *shared, int64_t file_size, bool limits_only)
    __attribute__((noreturn));

#endif
