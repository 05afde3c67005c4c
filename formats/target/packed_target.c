/* The functions of target.h for packed formats: each passes on to packed.h. */
#include "formats/target/packed.h"

#include "base/core/mem.h"
#include "base/io/io_dry.h"

#include <string.h>

struct fsdp_target {
    const fsdp_format *format;
    fsdp_packed *packed;
    size_t *numbers; /* per entry: number of its tensor */
};

static void release(fsdp_target *target)
{
    fsdp_free(target->numbers);
    fsdp_free(target);
}

static fsdp_status add_entry(fsdp_target *target, const fsdp_target_entry *entry,
                             size_t *number_out, fsdp_error *err)
{
    if (entry->value)
        return fsdp_packed_add_value(target->packed, entry->name, entry->name_size, entry->value,
                                     err);
    fsdp_packed_tensor tensor = {entry->name, entry->name_size, entry->dtype, entry->ndim,
                                 entry->shape};
    return fsdp_packed_add_tensor(target->packed, &tensor, number_out, err);
}

static fsdp_status declare(fsdp_target *target, const fsdp_target_opts *opts, fsdp_error *err)
{
    fsdp_packed_opts packed = {opts->io, opts->max_file_bytes, opts->stem, opts->sync};
    target->format = opts->format;
    target->numbers = fsdp_alloc(opts->entry_count, sizeof *target->numbers);
    if (!target->numbers)
        return fsdp_fail_memory(err, "a conversion");
    FSDP_TRY(fsdp_packed_create(opts->format, &packed, opts->path ? opts->path : "",
                                &target->packed, err));
    for (size_t i = 0; i < opts->entry_count; i++)
        FSDP_TRY(add_entry(target, &opts->entries[i], &target->numbers[i], err));
    for (size_t i = 0; i < opts->tie_count; i++)
        FSDP_TRY(fsdp_packed_add_tie(target->packed, opts->ties[i].name, opts->ties[i].name_size,
                                     target->numbers[opts->ties[i].entry], err));
    if (opts->metadata)
        FSDP_TRY(fsdp_packed_set_metadata(target->packed, opts->metadata, err));
    return opts->copied ? fsdp_packed_set_copied(target->packed, opts->copied, err) : FSDP_OK;
}

static fsdp_status create(const fsdp_target_opts *opts, fsdp_target **target_out, fsdp_error *err)
{
    fsdp_target *target = fsdp_alloc(1, sizeof *target);
    if (!target)
        return fsdp_fail_memory(err, "a conversion");
    fsdp_status st = declare(target, opts, err);
    if (st == FSDP_OK)
        st = fsdp_packed_lay_out(target->packed, err);
    if (st != FSDP_OK) {
        fsdp_packed_discard(target->packed);
        release(target);
        return st;
    }
    *target_out = target;
    return FSDP_OK;
}

/* Lays the target out without creating files. */
static fsdp_status measure(const fsdp_target_opts *opts, int64_t *files_out, int64_t *bytes_out,
                           fsdp_error *err)
{
    fsdp_target_opts dry = *opts;
    fsdp_target *target = NULL;
    dry.io = fsdp_io_dry();
    dry.sync = false;
    FSDP_TRY(create(&dry, &target, err));
    fsdp_packed_total(target->packed, files_out, bytes_out);
    fsdp_packed_discard(target->packed);
    release(target);
    return FSDP_OK;
}

/* The only box of an entry is the whole tensor. */
static fsdp_status write_elements(fsdp_target *target, const fsdp_target_piece *piece,
                                  fsdp_error *err)
{
    return fsdp_packed_write(target->packed, target->numbers[piece->entry], piece->first,
                             piece->count, piece->data, err);
}

static fsdp_status finish(fsdp_target *target, fsdp_error *err)
{
    fsdp_status st = fsdp_packed_finish(target->packed, err);
    release(target);
    return st;
}

static void discard(fsdp_target *target)
{
    fsdp_packed_discard(target->packed);
    release(target);
}

static fsdp_status place(const fsdp_target *target, size_t entry, size_t box,
                         fsdp_target_place *place_out, fsdp_error *err)
{
    fsdp_packed_place lies = fsdp_packed_place_of(target->packed, target->numbers[entry]);
    const char *name = target->format->writes_directory ? strrchr(lies.path, '/') + 1 : "";
    (void)box; /* the box is the whole tensor */
    (void)err;
    *place_out = (fsdp_target_place){name, lies.offset};
    return FSDP_OK;
}

const fsdp_target_ops fsdp_packed_ops = {measure, create, write_elements, finish, discard, place};
