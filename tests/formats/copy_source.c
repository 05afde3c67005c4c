/*
 * Copies the tensors of a path into a format that is written, in pieces out of order, as a conversion
 * with several threads would do. What the target cannot hold is left out with --drop.
 *
 * usage: copy_source FORMAT SOURCE TARGET [--drop] [--max-shard-size N]
 */
#include "formats/source.h"
#include "formats/target.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { PIECES = 7 };

static const fsdp_target_format *format_of(const char *name)
{
    const fsdp_target_format *formats[] = {&fsdp_target_safetensors, &fsdp_target_hf,
                                           &fsdp_target_npz, &fsdp_target_npy};
    for (size_t i = 0; i < sizeof formats / sizeof *formats; i++) {
        if (strcmp(fsdp_target_format_name(formats[i]), name) == 0)
            return formats[i];
    }
    return NULL;
}

typedef struct copying {
    fsdp_source *source;
    fsdp_target *target;
    const fsdp_target_format *format;
    bool drops;
    size_t *numbers; /* of the source's tensors, by those of the target */
    size_t count;
} copying;

static fsdp_status declare(copying *copy, fsdp_error *err)
{
    for (size_t i = 0; i < fsdp_source_entry_count(copy->source); i++) {
        const fsdp_source_entry *entry = fsdp_source_entry_at(copy->source, i);
        if (!entry->is_tensor && copy->drops)
            continue;
        if (!entry->is_tensor)
            return fsdp_fail(err, FSDP_ERR_USAGE, "a value");
        const fsdp_source_tensor *from = fsdp_source_tensor_at(copy->source, entry->tensor);
        if (copy->drops && !fsdp_target_holds_dtype(copy->format, from->dtype))
            continue;
        fsdp_target_tensor to = {.name = from->name,
                                 .name_size = from->name_size,
                                 .dtype = from->dtype,
                                 .ndim = from->ndim,
                                 .shape = from->shape};
        size_t number;
        FSDP_TRY(fsdp_target_add_tensor(copy->target, &to, &number, err));
        copy->numbers[copy->count++] = entry->tensor;
    }
    return FSDP_OK;
}

/* The pieces of a tensor in an order that is neither forwards nor backwards. */
static fsdp_status copy_tensor(copying *copy, size_t number, const uint8_t *data, fsdp_error *err)
{
    const fsdp_source_tensor *tensor = fsdp_source_tensor_at(copy->source, copy->numbers[number]);
    fsdp_box whole = fsdp_box_whole(tensor->ndim, tensor->shape);
    int64_t count = fsdp_box_count(&whole), size = (int64_t)fsdp_dtype_size(tensor->dtype);
    for (int64_t i = 0; i < PIECES; i++) {
        int64_t piece = i * 3 % PIECES, first = count * piece / PIECES;
        int64_t end = count * (piece + 1) / PIECES;
        FSDP_TRY(
            fsdp_target_write(copy->target, number, first, end - first, data + first * size, err));
    }
    return FSDP_OK;
}

static fsdp_status copy_all(copying *copy, fsdp_error *err)
{
    fsdp_source_reader reader = {0};
    fsdp_status status = fsdp_target_lay_out(copy->target, err);
    for (size_t i = copy->count; i-- > 0 && status == FSDP_OK;) {
        const fsdp_source_tensor *tensor = fsdp_source_tensor_at(copy->source, copy->numbers[i]);
        fsdp_box whole = fsdp_box_whole(tensor->ndim, tensor->shape);
        uint8_t *data = malloc((size_t)fsdp_box_count(&whole) * fsdp_dtype_size(tensor->dtype) + 1);
        status = fsdp_source_read(copy->source, copy->numbers[i], &whole, data, &reader, err);
        if (status == FSDP_OK)
            status = copy_tensor(copy, i, data, err);
        free(data);
    }
    fsdp_source_reader_release(&reader);
    return status;
}

static fsdp_status run(copying *copy, const char *from, const char *to,
                       const fsdp_target_opts *opts, fsdp_error *err)
{
    FSDP_TRY(fsdp_source_open(NULL, from, &copy->source, err));
    copy->numbers = calloc(fsdp_source_entry_count(copy->source) + 1, sizeof *copy->numbers);
    FSDP_TRY(fsdp_target_create(copy->format, opts, to, &copy->target, err));
    fsdp_status status = declare(copy, err);
    if (status == FSDP_OK)
        status = copy_all(copy, err);
    if (status == FSDP_OK)
        return fsdp_target_finish(copy->target, err);
    fsdp_target_discard(copy->target);
    return status;
}

int main(int argc, char **argv)
{
    fsdp_target_opts opts = {.sync = true};
    copying copy = {.format = argc > 3 ? format_of(argv[1]) : NULL};
    for (int i = 4; i < argc; i++) {
        copy.drops = copy.drops || strcmp(argv[i], "--drop") == 0;
        if (strcmp(argv[i], "--max-shard-size") == 0 && i + 1 < argc)
            opts.max_shard_size = atoll(argv[++i]);
    }
    if (!copy.format) {
        fprintf(stderr, "usage: copy_source FORMAT SOURCE TARGET [--drop] [--max-shard-size N]\n");
        return FSDP_ERR_USAGE;
    }
    fsdp_error err = {0};
    fsdp_status status = run(&copy, argv[2], argv[3], &opts, &err);
    fsdp_source_close(copy.source);
    free(copy.numbers);
    return status == FSDP_OK ? 0 : fsdp_error_report(&err);
}
