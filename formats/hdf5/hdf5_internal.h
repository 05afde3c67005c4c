/*
 * The private interface of the hdf5_*.c files: the lock around libhdf5, the fsdp_io file under one HDF5
 * file, property lists and types. Only these files include hdf5.h; hdf5_file.h is their public face.
 *
 * One use of the library is: fsdp_h5_enter, libhdf5 calls, fsdp_h5_leave. A failed libhdf5 call ends in
 * fsdp_h5_fail, which reports the error of the file where there is one.
 */
#ifndef FSDP_HDF5_INTERNAL_H
#define FSDP_HDF5_INTERNAL_H

#include "formats/hdf5/hdf5_file.h"

#include <fsdp/box.h>
#include <hdf5.h>

/* --- the library (hdf5_library.c) --- */

typedef struct fsdp_h5_call {
    H5E_auto2_t print;         /* the error handler of the program, restored by leave */
    void *print_data;
} fsdp_h5_call;

/* Takes the process-wide lock and silences libhdf5 until fsdp_h5_leave. After a failure the lock is not
 * held. */
fsdp_status fsdp_h5_enter(fsdp_h5_call *call, fsdp_error *err);
void fsdp_h5_leave(const fsdp_h5_call *call);

/* --- the disk: the file under libhdf5's driver (hdf5_vfd.c) ---------- */

/*
 * Once a call to the file has failed, or the file is discarded, the disk is dead: it accepts every write
 * and drops it. libhdf5 1.10 cannot close a file whose writes fail (it leaks the file and tries again at
 * exit), so the driver reports success, and the functions of this room check `failure` after each call.
 */
typedef struct fsdp_h5_disk {
    fsdp_file *file;           /* NULL once closed */
    char *path;
    bool dead;
    bool adopted;              /* libhdf5 has a pointer to this struct */
    int64_t size;              /* of the file, as this struct wrote or resized it */
    fsdp_error failure;        /* of the first call that failed */
} fsdp_h5_disk;

/* The driver's identifier; the driver is registered again if the program has closed libhdf5 meanwhile. */
hid_t fsdp_h5_driver(void);

/* Creates a file (exclusive), which the next H5Fcreate with this access list adopts. */
fsdp_status fsdp_h5_disk_create(fsdp_io *io, const char *path, fsdp_h5_disk **disk_out,
                                fsdp_error *err);
/* Call after H5Fclose. Returns the first failure of any call to the file. Accepts NULL. */
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
/* Adds the attribute that names a type which HDF5 cannot express and which is stored as u8. */
herr_t fsdp_h5_mark_type(hid_t dataset, fsdp_dtype dtype);

/* --- an open native file (hdf5_library.c) ---- */

typedef struct fsdp_h5_base {
    fsdp_h5_disk *disk;
    hid_t file;
    hid_t space;               /* shared by all datasets: each sets its extent */
    fsdp_h5_types types;
} fsdp_h5_base;

/* Estimates made before the first object, so that the file is laid out without gaps. */
typedef struct fsdp_h5_plan {
    size_t objects;
    size_t link_bytes;         /* all link names together */
    size_t metadata_bytes;     /* estimate for all structures of libhdf5 */
} fsdp_h5_plan;

/* Call these three between enter and leave. */
fsdp_status fsdp_h5_base_create(fsdp_h5_base *base, fsdp_io *io, const char *path,
                                const fsdp_h5_plan *plan, fsdp_error *err);
/* Writes the metadata that libhdf5 holds, closes, returns the size. base is empty afterwards, also after a
 * failure. */
fsdp_status fsdp_h5_base_close(fsdp_h5_base *base, int64_t *size_out, fsdp_error *err);
void fsdp_h5_base_discard(fsdp_h5_base *base);

/* Reports "cannot WHAT" with the disk's failure, or else with libhdf5's reason. */
fsdp_status fsdp_h5_fail(const fsdp_h5_base *base, fsdp_error *err, const char *format, ...)
    FSDP_PRINTF(3, 4);
/* Returns the disk's failure: libhdf5 itself reports success then. */
fsdp_status fsdp_h5_check(const fsdp_h5_base *base, fsdp_error *err);

/* A property list for new datasets: no timestamps. */
hid_t fsdp_h5_dataset_list(void);
/* Sets the extent of base->space, with everything selected. ndim 0 is a scalar. */
herr_t fsdp_h5_set_extent(fsdp_h5_base *base, int ndim, const int64_t *shape);

/* --- the zstd filter (hdf5_zstd.c) --- */

enum { FSDP_H5_ZSTD = 32015 };
extern const H5Z_class2_t fsdp_h5_zstd_filter;

#endif
