/* For tests of derived tensors: a safetensors file of given tensors, opened as a checkpoint, and deleted. */
#ifndef FSDP_STORED_TENSORS_H
#define FSDP_STORED_TENSORS_H

#include "base/text.h"
#include "statedict/checkpoint/checkpoint_internal.h"

#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct stored_tensor {
    const char *name;
    fsdp_dtype dtype;
    int ndim;
    int64_t shape[FSDP_MAX_DIMS];
    const void *data;
} stored_tensor;

/* The name of a dtype in safetensors. */
static inline const char *stored_dtype(fsdp_dtype dtype)
{
    return dtype == FSDP_F32         ? "F32"
           : dtype == FSDP_F64       ? "F64"
           : dtype == FSDP_BF16      ? "BF16"
           : dtype == FSDP_F16       ? "F16"
           : dtype == FSDP_U8        ? "U8"
           : dtype == FSDP_I64       ? "I64"
           : dtype == FSDP_F8_E4M3FN ? "F8_E4M3"
                                     : NULL;
}

static inline size_t stored_bytes(const stored_tensor *tensor)
{
    return (size_t)fsdp_shape_count(tensor->ndim, tensor->shape) * fsdp_dtype_size(tensor->dtype);
}

static inline void stored_header(fsdp_text *header, const stored_tensor *tensors, size_t count)
{
    size_t at = 0;
    for (size_t i = 0; i < count; i++) {
        const stored_tensor *tensor = &tensors[i];
        fsdp_text_addf(header, "%s\"%s\":{\"dtype\":\"%s\",\"shape\":[", i ? "," : "{",
                       tensor->name, stored_dtype(tensor->dtype));
        for (int d = 0; d < tensor->ndim; d++)
            fsdp_text_addf(header, "%s%lld", d ? "," : "", (long long)tensor->shape[d]);
        fsdp_text_addf(header, "],\"data_offsets\":[%zu,%zu]}", at, at + stored_bytes(tensor));
        at += stored_bytes(tensor);
    }
    fsdp_text_addf(header, "}");
}

/* The file is deleted when it is open. alias: a second name of the first tensor; NULL: none. */
static inline fsdp_checkpoint *stored_open_tied(const stored_tensor *tensors, size_t count, const char *alias)
{
    char path[] = "stored-XXXXXX.safetensors";
    fsdp_checkpoint *checkpoint = NULL;
    fsdp_error err = {0};
    fsdp_text header = {0};
    stored_header(&header, tensors, count);
    if (alias) {
        header.size--; /* the brace */
        fsdp_text_addf(&header, ",\"__metadata__\":{\"%s\":\"%s\"}}", alias, tensors[0].name);
    }
    FILE *file = fdopen(mkstemps(path, (int)strlen(".safetensors")), "wb");
    cr_assert(file && !header.failed);
    uint64_t size = header.size;
    cr_assert_eq(fwrite(&size, sizeof size, 1, file), 1);
    cr_assert_eq(fwrite(header.data, 1, header.size, file), header.size);
    for (size_t i = 0; i < count; i++)
        cr_assert_eq(fwrite(tensors[i].data, 1, stored_bytes(&tensors[i]), file),
                     stored_bytes(&tensors[i]));
    cr_assert_eq(fclose(file), 0);
    fsdp_text_release(&header);
    fsdp_status st = fsdp_checkpoint_open_as(fsdp_io_posix(), path, NULL, &checkpoint, &err);
    unlink(path);
    cr_assert_eq(st, FSDP_OK, "%s", err.text);
    return checkpoint;
}

static inline fsdp_checkpoint *stored_open(const stored_tensor *tensors, size_t count)
{
    return stored_open_tied(tensors, count, NULL);
}

#endif
