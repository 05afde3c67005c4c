/*
 * What the hdf5_*.c files share: the lock around libhdf5, the disk under one HDF5 file, property
 * lists and types. Only these files include hdf5.h; hdf5_file.h is what others see.
 *
 * The order of things in one call: fsdp_h5_enter, libhdf5 calls, fsdp_h5_leave. Every libhdf5 call
 * that fails ends in fsdp_h5_fail, which tells the disk's own error where there is one.
 */
#ifndef FSDP_HDF5_INTERNAL_H
#define FSDP_HDF5_INTERNAL_H

#include "formats/hdf5/hdf5_file.h"

#include <fsdp/box.h>
#include <hdf5.h>

/* --- the library (hdf5_library.c) --- */

typedef struct fsdp_h5_call {
    H5E_auto2_t print;         /* what libhdf5 did with errors before this call */
    void *print_data;
} fsdp_h5_call;

/* Takes the process's lock and silences libhdf5 until fsdp_h5_leave. On failure nothing is held. */
fsdp_status fsdp_h5_enter(fsdp_h5_call *call, fsdp_error *err);
void fsdp_h5_leave(const fsdp_h5_call *call);

/* --- the disk: one file as libhdf5 and we both see it (hdf5_vfd.c) --- */

/*
 * Once a call to the file has failed, or the file is to be thrown away, the disk is dead: it takes
 * every write and drops it. libhdf5 1.10 cannot close a file whose writes fail (it leaks it and
 * tries again at exit), so it never learns; our functions look at `failure` after each call.
 */
typedef struct fsdp_h5_disk {
    fsdp_file *file;           /* NULL once closed */
    char *path;
    bool dead;
    bool adopted;              /* libhdf5 holds a pointer to this struct */
    int64_t size;              /* of the file, as far as we wrote or resized it */
    fsdp_error failure;        /* of the first call that failed */
} fsdp_h5_disk;

/* The driver's identifier, registered again if the program has closed libhdf5 meanwhile. */
hid_t fsdp_h5_driver(void);

/* A new file (exclusive), which the next H5Fcreate with this access list adopts. */
fsdp_status fsdp_h5_disk_create(fsdp_io *io, const char *path, fsdp_h5_disk **disk_out,
                                fsdp_error *err);
/* After H5Fclose. Returns the first failure of any call to the file. Accepts NULL. */
fsdp_status fsdp_h5_disk_free(fsdp_h5_disk *disk, fsdp_error *err);
herr_t fsdp_h5_disk_use(hid_t access, fsdp_h5_disk *disk);

/* --- types (hdf5_types.c) --- */

typedef struct fsdp_h5_types {
    hid_t ids[FSDP_DTYPE_COUNT];
} fsdp_h5_types;

void fsdp_h5_types_init(fsdp_h5_types *types);
void fsdp_h5_types_release(fsdp_h5_types *types);
/* The HDF5 type of a dtype, made once; negative on failure. */
hid_t fsdp_h5_type(fsdp_h5_types *types, fsdp_dtype dtype);
/* Types that HDF5 cannot express are u8 with an attribute that names them. */
herr_t fsdp_h5_mark_type(hid_t dataset, fsdp_dtype dtype);

/* --- an open file of ours (hdf5_library.c) --- */

typedef struct fsdp_h5_base {
    fsdp_h5_disk *disk;
    hid_t file;
    hid_t space;               /* one dataspace for all: its extent is set anew for each dataset */
    fsdp_h5_types types;
} fsdp_h5_base;

/* What is known before the first object, so that the file is laid out without gaps. */
typedef struct fsdp_h5_plan {
    size_t objects;
    size_t link_bytes;         /* all link names together */
    size_t metadata_bytes;     /* all of libhdf5's own structures, about */
} fsdp_h5_plan;

/* All three between enter and leave. */
fsdp_status fsdp_h5_base_create(fsdp_h5_base *base, fsdp_io *io, const char *path,
                                const fsdp_h5_plan *plan, fsdp_error *err);
/* Writes what libhdf5 still holds, closes, tells the size. base is empty afterwards in any case. */
fsdp_status fsdp_h5_base_close(fsdp_h5_base *base, int64_t *size_out, fsdp_error *err);
void fsdp_h5_base_discard(fsdp_h5_base *base);

/* The disk's failure, else what libhdf5 says, after "cannot WHAT". */
fsdp_status fsdp_h5_fail(const fsdp_h5_base *base, fsdp_error *err, const char *format, ...)
    FSDP_PRINTF(3, 4);
/* The disk's failure if it has one: libhdf5 itself reports success then. */
fsdp_status fsdp_h5_check(const fsdp_h5_base *base, fsdp_error *err);

/* A property list for new datasets: no times. */
hid_t fsdp_h5_dataset_list(void);
/* Gives base->space this extent, everything selected. ndim 0 is a scalar. */
herr_t fsdp_h5_set_extent(fsdp_h5_base *base, int ndim, const int64_t *shape);

/* --- the zstd filter (hdf5_zstd.c) --- */

enum { FSDP_H5_ZSTD = 32015 };
extern const H5Z_class2_t fsdp_h5_zstd_filter;

#endif
