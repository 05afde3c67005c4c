/*
 * Arithmetic on buffers. A plain C version of every kernel fills the table; where the processor has
 * AVX2, files under kernels/x86 replace entries by faster ones with the same result, bit for bit.
 * The choice is made once per process.
 *
 * Rooms: bytes (copies, hashes, checksums, shuffle, codec), cast (dtypes), train (arithmetic of a training
 * step), nn (the arithmetic of models: nn.h) and x86 (variants of them). In come buffers, dtypes and counts,
 * out come buffers and counts; no kernel opens files or talks to other ranks. Layers above may call the
 * headers at the top of kernels/.
 */
#ifndef FSDP_KERNELS_H
#define FSDP_KERNELS_H

#include <fsdp/box.h>
#include "kernels/digest.h"
#include <fsdp/dtype.h>
#include <fsdp/status.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct fsdp_hash { uint8_t bytes[16]; } fsdp_hash;   /* XXH3-128, canonical (big-endian) */

/* Counts of a cast's effects on values. Zero-initialise; calls add to it. */
typedef struct fsdp_cast_tally {
    uint64_t overflows;        /* finite values that did not fit */
    uint64_t nans;             /* in the result */
    uint64_t underflows;       /* values that became zero */
    double max_rounding;       /* the largest |new - old| / |old| of all others that are finite and not 0 */
    double max_underflow;      /* the largest |old| that became zero */
} fsdp_cast_tally;

/* Values before and after a cast: see measure. */
typedef struct fsdp_cast_measure {
    size_t nans_before, nans_after, infinite_after, underflows;
    float max_rounding, max_underflow;
} fsdp_cast_measure;

typedef struct fsdp_kernels {
    const char *name;          /* "c" or "avx2" */
    /*
     * Casts count elements between real floating types (fsdp_dtype_info.is_float), rounding to
     * nearest even; NaN stays NaN. Returns how many finite values did not fit in the target; with
     * FSDP_OVERFLOW_FAIL they are written as infinity, and the caller turns the count into an error.
     */
    size_t (*cast)(void *to, fsdp_dtype to_type, const void *from, fsdp_dtype from_type, size_t count,
                   fsdp_on_overflow overflow);
    /* data[i] += factor * values[i] for numbers of a real floating type: the product and the sum are rounded
     * to f32, the result to the type. Returns how many finite numbers became infinite, or no number. */
    size_t (*add_scaled)(void *data, fsdp_dtype type, const float *values, float factor, size_t count);
    /* fsdp_blocks_from_f32 (kernels/quants.h) for the blocks of 8 bits. */
    size_t (*encode_q8_0)(const float *values, size_t count, void *blocks_out);
    /* Adds what happened to count values (fewer than 2^32) of types whose values f32 holds. */
    void (*measure)(fsdp_cast_measure *sum, const float *before, const float *after, size_t count);
    /* memcpy past the caches, for copies too large to be read again from them. */
    void (*copy_large)(void *to, const void *from, size_t size);
    /* HDF5's byte shuffle: byte i of every element together. size is a multiple of element_size. */
    void (*shuffle)(void *to, const void *from, size_t size, size_t element_size);
    void (*unshuffle)(void *to, const void *from, size_t size, size_t element_size);
    fsdp_hash (*hash)(const void *data, size_t size);
    const struct fsdp_loops *f32, *f64;        /* what kernels/train/tensor.h is made of: kernels/loops.h */
} fsdp_kernels;

/* Returns the best table for this processor. FSDP_KERNELS=c in the environment forces the plain one. */
const fsdp_kernels *fsdp_kernels_get(void);
/* Every table this processor can run, the plain C one first; for tests. */
size_t fsdp_kernels_all(const fsdp_kernels **tables_out, size_t room);

/* --- boxes --- */

/* An n-d box of elements, with strides in bytes per dim on both sides. */
typedef struct fsdp_strided_copy {
    void *to;
    const int64_t *to_strides;
    const void *from;
    const int64_t *from_strides;
    int ndim;
    const int64_t *len;
    size_t element_size;
} fsdp_strided_copy;
/* Neighbouring dims that are dense on both sides are merged into long runs. */
void fsdp_copy_box(const fsdp_strided_copy *copy);
/* The bytes of a copy that is one run on both sides; 0: it is not. */
size_t fsdp_copy_run(const fsdp_strided_copy *copy);
/* Copies the elements that two boxes of a tensor share, each of which is packed row-major in memory. */
void fsdp_copy_shared(const fsdp_box *to_box, void *to, const fsdp_box *from_box, const void *from,
                      size_t element_size);
/* That copy as a description, which points into itself. False: the boxes share nothing. */
typedef struct fsdp_shared_copy {
    fsdp_strided_copy copy;
    fsdp_box shared;
    int64_t to_strides[FSDP_MAX_DIMS], from_strides[FSDP_MAX_DIMS];
} fsdp_shared_copy;
bool fsdp_shared_copy_make(fsdp_shared_copy *made_out, const fsdp_box *to_box, void *to,
                           const fsdp_box *from_box, const void *from, size_t element_size);

/*
 * --- casts that are counted ---
 * Casts like fsdp_kernels.cast and adds the effects to the tally. Returns count; with FSDP_OVERFLOW_FAIL the
 * index of the first value that does not fit, which is *misfit_out then; no value after it is cast.
 * `to` and `from` may share memory: where `to` begins at or before `from`, and ends no later than it.
 */
typedef struct fsdp_counted_cast {
    void *to;
    fsdp_dtype to_type;
    const void *from;
    fsdp_dtype from_type;
    size_t count;
    fsdp_on_overflow overflow;
} fsdp_counted_cast;
size_t fsdp_cast_measured(const fsdp_counted_cast *job, fsdp_cast_tally *tally, double *misfit_out);
void fsdp_cast_tally_add(fsdp_cast_tally *sum, const fsdp_cast_tally *more);

/* --- streaming hash: same result as hash over all the pieces --- */
typedef struct fsdp_hasher fsdp_hasher;
fsdp_hasher *fsdp_hasher_create(void);            /* NULL when there is no memory */
void fsdp_hasher_free(fsdp_hasher *hasher);       /* accepts NULL */
void fsdp_hasher_reset(fsdp_hasher *hasher);
void fsdp_hasher_add(fsdp_hasher *hasher, const void *data, size_t size);
fsdp_hash fsdp_hasher_value(const fsdp_hasher *hasher);

/* --- CRC-32 of zip. crc is 0 for the first piece, else the checksum of the pieces before. --- */
uint32_t fsdp_crc32(uint32_t crc, const void *data, size_t size);
/* Computes the checksum of two pieces in a row from the checksums of each. */
uint32_t fsdp_crc32_join(uint32_t first, uint32_t second, uint64_t second_size);

/*
 * --- codec: byte shuffle and one zstd frame ---
 * level FSDP_CODEC_HUFFMAN: entropy coding only (fast, and on shuffled floats as small as level 1);
 * 1..19 as zstd. The frame holds its content size. Each thread needs a codec of its own.
 */
enum { FSDP_CODEC_HUFFMAN = 0 };
typedef struct fsdp_codec fsdp_codec;
fsdp_status fsdp_codec_create(int level, fsdp_codec **codec_out, fsdp_error *err);
void fsdp_codec_free(fsdp_codec *codec);          /* accepts NULL */
size_t fsdp_codec_bound(size_t size);
/* One call's memory. element_size 1: no shuffle. */
typedef struct fsdp_coding {
    const void *from;
    size_t from_size;
    void *to;
    size_t to_size;
    size_t element_size;
} fsdp_coding;
/* to_size is at least fsdp_codec_bound(from_size); size_out: the bytes of the frame. */
fsdp_status fsdp_codec_encode(fsdp_codec *codec, const fsdp_coding *coding, size_t *size_out,
                              fsdp_error *err);
/* The frame must hold exactly to_size bytes, and nothing may follow it: else FSDP_ERR_DAMAGED. */
fsdp_status fsdp_codec_decode(fsdp_codec *codec, const fsdp_coding *coding, fsdp_error *err);

#endif
