/*
 * For tests of derived tensors: a node next to the whole tensor that it should be, and their comparison in
 * random boxes.
 */
#ifndef FSDP_WHOLE_PAIR_H
#define FSDP_WHOLE_PAIR_H

#include "base/core/mix.h"
#include "kernels/kernels.h"
#include "statedict/derive/derived_checkpoint.h"
#include "statedict/sd/layout_internal.h"
#include "tests/unit/statedict/derive/stored_tensors.h"

#include <sys/mman.h>

/* --- numbers ------------------------------------------------------------------------------------- */

static uint64_t seed = 1; /* of each test */

static inline int64_t draw(int64_t below)
{
    return (int64_t)(fsdp_mix(++seed * 0x9E3779B97F4A7C15u) % (uint64_t)below);
}

/* Fills with numbers that have few bits, so that sums and products of some of them are exact. */
static inline void fill(float *values, int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        values[i] = (float)(draw(31) - 15) / 4;
}

static inline void *room_for(int64_t count, size_t size)
{
    void *memory = calloc((size_t)count + 1, size);
    cr_assert_not_null(memory);
    return memory;
}

/* --- whole tensors ------------------------------------------------------------------------------- */

/* A derived tensor, and what it should be. */
typedef struct whole_pair {
    const fsdp_derived *node;
    int ndim;
    int64_t shape[FSDP_MAX_DIMS];
    fsdp_dtype dtype;
    char *data;
} whole_pair;

static inline int64_t count_of(const whole_pair *pair)
{
    return fsdp_shape_count(pair->ndim, pair->shape);
}

static inline whole_pair pair_like(const whole_pair *old)
{
    whole_pair made = *old;
    made.node = NULL;
    made.data = NULL;
    return made;
}

static inline void give_room(whole_pair *pair)
{
    pair->data = room_for(count_of(pair), fsdp_dtype_size(pair->dtype));
}

/* The place of element `number` of the shape, by dims. */
static inline void place_of(const whole_pair *pair, int64_t number, int64_t *at)
{
    for (int d = pair->ndim - 1; d >= 0; d--) {
        at[d] = number % pair->shape[d];
        number /= pair->shape[d];
    }
}

static inline char *element(const whole_pair *pair, const int64_t *at)
{
    return pair->data +
           fsdp_box_position(pair->ndim, pair->shape, at) * (int64_t)fsdp_dtype_size(pair->dtype);
}

static inline void copy_element(const whole_pair *to, const int64_t *to_at, const whole_pair *from,
                                const int64_t *at)
{
    memcpy(element(to, to_at), element(from, at), fsdp_dtype_size(to->dtype));
}

static inline const fsdp_derived *require_made(fsdp_status st, const fsdp_derived *node,
                                               const fsdp_error *err)
{
    cr_assert_eq(st, FSDP_OK, "%s", err->text);
    return node;
}

/* Makes a node by a call, and asserts that it succeeds. */
#define MAKE(node, call)                           \
    do {                                           \
        fsdp_error err = {0};                      \
        const fsdp_derived *out = NULL;            \
        fsdp_status made_st = call;                \
        (node) = require_made(made_st, out, &err); \
    } while (0)

/* --- comparing ------------------------------------------------------------------------------------- */

static inline fsdp_box random_box(const whole_pair *pair)
{
    fsdp_box box = {.ndim = pair->ndim};
    for (int d = 0; d < pair->ndim; d++) {
        box.len[d] = pair->shape[d] ? 1 + draw(pair->shape[d]) : 0;
        box.lo[d] = draw(pair->shape[d] - box.len[d] + 1);
    }
    return box;
}

/* The derived checkpoint takes the base over. */
static inline fsdp_checkpoint *finish(fsdp_derivation *derivation, const whole_pair *pair)
{
    fsdp_checkpoint *checkpoint = NULL;
    fsdp_error err = {0};
    cr_assert_eq(
        fsdp_derivation_add(derivation, (fsdp_derived_name){"result", 6}, pair->node, &err),
        FSDP_OK, "%s", err.text);
    cr_assert_eq(fsdp_derivation_finish(derivation, &checkpoint, &err), FSDP_OK, "%s", err.text);
    return checkpoint;
}

/* Memory after which nothing may be touched: a piece that is larger than a buffer ends the test. */
static inline void *guarded_buffer(void)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    char *memory = mmap(NULL, FSDP_DERIVED_PIECE + page, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    cr_assert_neq((void *)memory, MAP_FAILED);
    cr_assert_eq(mprotect(memory + FSDP_DERIVED_PIECE, page, PROT_NONE), 0);
    return memory;
}

/* Reads a box of the node with buffers that are guarded. */
static inline void read_guarded(const fsdp_derived *node, const fsdp_box *box, void *read)
{
    fsdp_reader reader = {0};
    fsdp_error err = {0};
    for (int i = 0; i < node->levels; i++)
        reader.buffers.data[i] = guarded_buffer();
    cr_assert_eq(fsdp_derived_read(node, &reader, box, read, &err), FSDP_OK, "%s", err.text);
    cr_assert_eq(reader.buffers.used, 0);
    for (int i = 0; i < node->levels; i++) {
        munmap(reader.buffers.data[i], FSDP_DERIVED_PIECE + (size_t)sysconf(_SC_PAGESIZE));
        reader.buffers.data[i] = NULL;
    }
    fsdp_reader_release(&reader);
}

static inline void check_box(fsdp_checkpoint *checkpoint, const whole_pair *wanted,
                             const fsdp_box *box)
{
    size_t size = fsdp_dtype_size(wanted->dtype), bytes = (size_t)fsdp_box_count(box) * size;
    char *read = room_for((int64_t)bytes, 1), *cut = room_for((int64_t)bytes, 1);
    const fsdp_box whole = fsdp_box_whole(wanted->ndim, wanted->shape);
    fsdp_error err = {0};
    cr_assert_eq(fsdp_checkpoint_read(checkpoint, 0, box, read, FSDP_CHECK_OFF, &err), FSDP_OK,
                 "%s", err.text);
    fsdp_copy_shared(box, cut, &whole, wanted->data, size);
    cr_assert_arr_eq(read, cut, bytes);
    read_guarded(wanted->node, box, read);
    cr_assert_arr_eq(read, cut, bytes);
    free(read);
    free(cut);
}

static inline void check_pair(fsdp_derivation *derivation, const whole_pair *pair, int boxes)
{
    fsdp_checkpoint *checkpoint = finish(derivation, pair);
    fsdp_box box = fsdp_box_whole(pair->ndim, pair->shape);
    check_box(checkpoint, pair, &box);
    for (int i = 0; i < boxes && count_of(pair) > 0; i++) {
        box = random_box(pair);
        check_box(checkpoint, pair, &box);
    }
    fsdp_checkpoint_close(checkpoint);
}

/* A stored f32 tensor of a shape, and the derivation that owns its checkpoint. */
static inline whole_pair stored(fsdp_derivation **derivation, int ndim, const int64_t *shape)
{
    whole_pair pair = {.ndim = ndim, .dtype = FSDP_F32};
    stored_tensor tensor = {"stored", FSDP_F32, ndim, {0}, NULL};
    fsdp_error none = {0};
    memcpy(pair.shape, shape, (size_t)ndim * sizeof *shape);
    memcpy(tensor.shape, shape, (size_t)ndim * sizeof *shape);
    give_room(&pair);
    fill((float *)pair.data, count_of(&pair));
    tensor.data = pair.data;
    fsdp_checkpoint *base = stored_open(&tensor, 1);
    cr_assert_eq(fsdp_derivation_begin(base, derivation, &none), FSDP_OK);
    MAKE(pair.node, fsdp_derive_stored(fsdp_derivation_arena(*derivation), base, 0, &out, &err));
    return pair;
}

#endif
