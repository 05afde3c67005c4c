/* Read targets in memory of the host or of a device: see read_target.h. */
#include "statedict/transfer/read_target.h"

#include "base/core/mem.h"
#include "base/data/box_internal.h"

#include <string.h>

fsdp_status fsdp_read_cast(void *to, fsdp_dtype to_type, const void *from, fsdp_dtype from_type,
                           int64_t count, fsdp_error *err)
{
    size_t lost =
        fsdp_kernels_get()->cast(to, to_type, from, from_type, (size_t)count, FSDP_OVERFLOW_FAIL);
    if (lost > 0)
        return fsdp_fail(err, FSDP_ERR_USAGE, "%zu values do not fit in %s", lost,
                         fsdp_dtype_name(to_type));
    return FSDP_OK;
}

/* --- slots ------------------------------------------------------------------------------------ */

typedef struct fsdp_given_copy {
    const fsdp_read_device *device;
    uint64_t number;
} fsdp_given_copy;

/* Waits for all copies of the slot, also after one that failed: the memory is used again. */
static fsdp_status wait_for_copies(fsdp_read_slot *slot, fsdp_error *err)
{
    fsdp_status status = FSDP_OK;
    for (size_t i = 0; i < slot->count; i++) {
        const fsdp_given_copy *given = &slot->given[i];
        fsdp_status mine = given->device->wait(given->device->context, given->number,
                                               status == FSDP_OK ? err : NULL);
        status = status == FSDP_OK ? mine : status;
    }
    slot->count = 0;
    return status;
}

/* held: the slot whose contents are needed; NULL: none. */
static fsdp_status take_slot(fsdp_read_slots *slots, const fsdp_read_device *device,
                             const fsdp_read_slot *held, fsdp_read_slot **slot_out, fsdp_error *err)
{
    if (!slots->device)
        slots->device = device;
    do
        slots->last = (slots->last + 1) % FSDP_READ_SLOTS;
    while (&slots->slots[slots->last] == held);
    fsdp_read_slot *slot = *slot_out = &slots->slots[slots->last];
    if (!slot->data)
        slot->data = slots->device->alloc(slots->device->context, FSDP_BLOCK_BYTES);
    if (!slot->data) { /* a device that has failed has no memory, either */
        FSDP_TRY(slots->device->wait(slots->device->context, 0, err));
        return fsdp_fail_memory(err, "reading into a device's memory");
    }
    return wait_for_copies(slot, err);
}

fsdp_status fsdp_read_slots_take(fsdp_read_slots *slots, const fsdp_read_device *device,
                                 char **data_out, fsdp_error *err)
{
    fsdp_read_slot *slot;
    fsdp_status status = take_slot(slots, device, NULL, &slot, err);
    *data_out = slot->data;
    return status;
}

fsdp_status fsdp_read_slots_finish(fsdp_read_slots *slots, fsdp_error *err)
{
    fsdp_status status = FSDP_OK;
    for (int i = 0; i < FSDP_READ_SLOTS; i++) {
        fsdp_status mine = wait_for_copies(&slots->slots[i], status == FSDP_OK ? err : NULL);
        status = status == FSDP_OK ? mine : status;
    }
    return status;
}

void fsdp_read_slots_release(fsdp_read_slots *slots)
{
    (void)!fsdp_read_slots_finish(slots, NULL);
    for (int i = 0; i < FSDP_READ_SLOTS; i++) {
        if (slots->slots[i].data)
            slots->device->dealloc(slots->device->context, slots->slots[i].data, FSDP_BLOCK_BYTES);
        fsdp_free(slots->slots[i].given);
    }
    *slots = (fsdp_read_slots){0};
}

/* --- copies ----------------------------------------------------------------------------------- */

/* The place for the number of the device's last copy, which is there before the copy is given. */
static fsdp_status find_given(fsdp_read_slot *slot, const fsdp_read_device *device,
                              fsdp_given_copy **given_out, fsdp_error *err)
{
    size_t i = 0;
    while (i < slot->count && slot->given[i].device != device)
        i++;
    if (!fsdp_grow(&slot->given, &slot->room, i + 1, sizeof *slot->given))
        return fsdp_fail_memory(err, "a list of copies");
    if (i == slot->count)
        slot->given[slot->count++] = (fsdp_given_copy){.device = device};
    *given_out = &slot->given[i];
    return FSDP_OK;
}

/* Elements of the target from number `at` on. */
static uint64_t copy_run(const fsdp_read_target *target, int64_t at, const char *from,
                         int64_t count)
{
    const int64_t stride = (int64_t)fsdp_dtype_size(target->dtype);
    const fsdp_strided_copy copy = {.to = target->data + at * stride,
                                    .to_strides = &stride,
                                    .from = from,
                                    .from_strides = &stride,
                                    .ndim = 1,
                                    .len = &count,
                                    .element_size = (size_t)stride};
    return target->device->copy(target->device->context, &copy);
}

/* The range has the target's type and lies in the slot. */
static fsdp_status copy_range(fsdp_read_slot *slot, const fsdp_read_range *range,
                              const fsdp_read_target *target, fsdp_error *err)
{
    const fsdp_read_device *device = target->device;
    const size_t size = fsdp_dtype_size(target->dtype);
    const char *at = range->data;
    fsdp_given_copy *given = NULL;
    FSDP_TRY(find_given(slot, device, &given, err));
    int64_t run;
    if (fsdp_box_is_run(&target->box, range->box, &run)) {
        given->number = copy_run(target, run + range->first, at, range->count);
        return FSDP_OK;
    }
    fsdp_box pieces[FSDP_BOX_PIECES];
    int count = fsdp_box_cut(range->box, range->first, range->count, pieces);
    for (int i = 0; i < count; i++) {
        fsdp_shared_copy made;
        if (fsdp_shared_copy_make(&made, &target->box, target->data, &pieces[i], at, size))
            given->number = device->copy(device->context, &made.copy);
        at += fsdp_box_count(&pieces[i]) * (int64_t)size;
    }
    return FSDP_OK;
}

static fsdp_read_slot *find_slot(fsdp_read_slots *slots, const char *data)
{
    for (int i = 0; i < FSDP_READ_SLOTS; i++) {
        uintptr_t begin = (uintptr_t)slots->slots[i].data;
        if (begin && (uintptr_t)data >= begin && (uintptr_t)data < begin + FSDP_BLOCK_BYTES)
            return &slots->slots[i];
    }
    return NULL;
}

/* The next part of a range as the target's type, in a slot; held: the slot of the range, or NULL. */
static fsdp_status place_part(fsdp_read_slots *slots, const fsdp_read_slot *held,
                              const fsdp_read_range *part, const fsdp_read_target *target,
                              fsdp_error *err)
{
    fsdp_read_slot *slot;
    fsdp_read_range staged = *part;
    FSDP_TRY(take_slot(slots, target->device, held, &slot, err));
    staged.data = slot->data;
    staged.dtype = target->dtype;
    if (part->dtype == target->dtype)
        memcpy(slot->data, part->data, (size_t)part->count * fsdp_dtype_size(part->dtype));
    else
        FSDP_TRY(
            fsdp_read_cast(slot->data, target->dtype, part->data, part->dtype, part->count, err));
    return copy_range(slot, &staged, target, err);
}

fsdp_status fsdp_read_slots_place(fsdp_read_slots *slots, const fsdp_read_range *range,
                                  const fsdp_read_target *target, fsdp_error *err)
{
    fsdp_read_slot *slot = find_slot(slots, range->data);
    if (slot && range->dtype == target->dtype)
        return copy_range(slot, range, target, err);
    const int64_t most = FSDP_BLOCK_BYTES / (int64_t)fsdp_dtype_size(target->dtype);
    const int64_t size = (int64_t)fsdp_dtype_size(range->dtype);
    fsdp_read_range part = *range;
    for (int64_t at = 0; at < range->count; at += most) {
        part.first = range->first + at;
        part.count = range->count - at < most ? range->count - at : most;
        part.data = range->data + at * size;
        FSDP_TRY(place_part(slots, slot, &part, target, err));
    }
    return FSDP_OK;
}
