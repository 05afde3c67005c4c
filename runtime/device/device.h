/*
 * Devices: a device owns memory of tensors and runs work in streams. A stream does its work in order; streams
 * are independent but for events. Device "cpu" does everything at once, in the caller; "cpu-async" gives each
 * stream a worker thread, so that races and overlap show; "cuda" is a GPU.
 *
 * Work is a kernel or a copy (device_kernels.h), which every device has, or host code (submit).
 *
 * Work that fails (a collective) leaves its error in the stream for good: later work of that stream is
 * skipped, and so is that of streams which wait for it. check and sync return it to the host.
 *
 * Nothing here allocates per call but the queues of streams, which are bounded: a host that runs far ahead
 * waits.
 *
 * In: work and sizes, from the host. Out: memory, events, and the first failure of a stream. The launcher
 * opens the device; the rooms above and comm call it through the table.
 */
#ifndef FSDP_DEVICE_H
#define FSDP_DEVICE_H

#include "runtime/device/device_kernels.h"
#include <fsdp/status.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct fsdp_device fsdp_device;

/* A point in a stream: after its first `ticket` pieces of work. Zero-initialised: always reached. Copied
 * freely; not used after the stream was freed. */
typedef struct fsdp_event {
    fsdp_stream *stream;
    uint64_t ticket;
} fsdp_event;

/* args was copied when the work was given. */
typedef fsdp_status (*fsdp_work)(void *args, fsdp_error *err);
enum { FSDP_WORK_ARGS = 192 };

enum { FSDP_GPU_BUS = 32, FSDP_GPU_UUID = 16 };
typedef struct fsdp_gpu {
    int visible;               /* GPUs that this process sees */
    char bus[FSDP_GPU_BUS];    /* its PCI address, "0000:1B:00.0" */
    unsigned char uuid[FSDP_GPU_UUID]; /* of the GPU, or of the part of one (MIG) that CUDA shows as a GPU */
} fsdp_gpu;

typedef struct fsdp_device_ops {
    const char *name;
    bool is_host;              /* the host may read and write its memory */
    const fsdp_device_kernels *kernels;
    bool is_at_once;           /* work is done when submit returns: nothing overlaps */
    fsdp_status (*stream_create)(fsdp_device *device, const char *name, fsdp_stream **stream_out,
                                 fsdp_error *err);
    /* Does what is queued first. No other stream may still wait for an event of this one. */
    void (*stream_free)(fsdp_stream *stream);
    /* Host code; at most FSDP_WORK_ARGS bytes of args are copied. On a device with is_host it runs in stream
     * order, and the memory that args point to stays valid until it is done. On another it runs at once, and
     * itself gives the stream work: through kernels, or through the result of `native`. */
    void (*submit)(fsdp_stream *stream, fsdp_work work, const void *args, size_t args_size);
    /* Host code that runs at once and itself gives the stream work: a collective of the device's memory. Its
     * failure is the stream's. NULL: collectives are host code like any other, for submit. */
    void (*issue)(fsdp_stream *stream, fsdp_work work, void *args);
    fsdp_event (*record)(fsdp_stream *stream);
    /* The stream waits; the host does not. The event may be another rank's in this process, of a device of
     * the same kind, while that rank gives its stream no work. */
    void (*wait)(fsdp_stream *stream, fsdp_event event);
    fsdp_status (*sync)(fsdp_event event, fsdp_error *err);    /* the host waits; the stream's error */
    bool (*is_reached)(fsdp_event event);
    fsdp_status (*check)(fsdp_stream *stream, fsdp_error *err);        /* its error so far; does not wait */
    /* Only of a device that is watched; else NULL. A block is the stream's from what it has so far on; its
     * next work uses what lies there; the block is given back. */
    void (*own)(fsdp_stream *stream, const void *data, size_t size);
    void (*use)(fsdp_stream *stream, const void *data);
    void (*disown)(fsdp_stream *stream, const void *data);
    /* Memory is not zeroed, and aligned for every kernel: to pages on a host, to 256 bytes on a
     * GPU. NULL: none left. */
    void *(*alloc)(fsdp_device *device, size_t size);
    void (*dealloc)(fsdp_device *device, void *data, size_t size);
    /* Staging memory: the host's, which kernels reach, too, and copies reach at full speed. Page-aligned;
     * slow to allocate, so devices keep it. NULL: none left. Given back when no stream uses it any more, with
     * the size that was asked for. */
    void *(*alloc_staging)(fsdp_device *device, size_t size);
    void (*dealloc_staging)(fsdp_device *device, void *data, size_t size);
    /* Only of a GPU; else NULL. A cudaStream_t; the GPU, to which what the calling thread itself asks of CUDA
     * goes from now on. */
    void *(*native)(fsdp_stream *stream);
    const fsdp_gpu *(*choose_gpu)(fsdp_device *device);
    void (*close)(fsdp_device *device);
} fsdp_device_ops;

struct fsdp_device {
    const fsdp_device_ops *ops;
};

struct fsdp_stream {
    fsdp_device *device;
    const char *name;          /* borrowed: "compute", "all_gather", ... */
};

/* The rank that opens a device, for errors and for the choice of a GPU. */
typedef struct fsdp_device_rank {
    int rank, local_rank;      /* in the world; among the ranks of this host */
} fsdp_device_rank;

/* By the name that --device takes; rank NULL: rank 0. FSDP_ERR_USAGE lists the names, and says what is
 * missing where CUDA does not work. Call it in the process of the rank: CUDA does not survive a fork. */
fsdp_status fsdp_device_open(const char *name, const fsdp_device_rank *rank, fsdp_device **device_out,
                             fsdp_error *err);
/* Whether fsdp_device_open would find the device; opens nothing. */
fsdp_status fsdp_device_find(const char *name, fsdp_error *err);
void fsdp_device_close(fsdp_device *device);   /* accepts NULL; its streams are gone */

/* *device becomes one that does the same and watches who uses which block (--check); what it finds is an
 * error of its streams. It owns the other one. On failure *device stays. */
fsdp_status fsdp_device_watch(fsdp_device **device, fsdp_error *err);

/* The two that are always there. */
fsdp_status fsdp_device_cpu(fsdp_device **device_out, fsdp_error *err);
fsdp_status fsdp_device_cpu_async(fsdp_device **device_out, fsdp_error *err);

/* For devices whose memory is the host's: entries of their tables, and creation. */
fsdp_status fsdp_device_create_host(const fsdp_device_ops *ops, fsdp_device **device_out, fsdp_error *err);
void *fsdp_device_host_alloc(fsdp_device *device, size_t size);
void fsdp_device_host_dealloc(fsdp_device *device, void *data, size_t size);
void fsdp_device_host_close(fsdp_device *device);

#endif
