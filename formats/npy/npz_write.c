/*
 * NumPy arrays as a target: members of an .npz, stored and with their data at multiples of 64
 * bytes, or one .npy. A zip stores the CRC of each member twice: in front of it, where finish
 * writes it, and in the directory after all members. The mirror of npz_read.c.
 */
#include "formats/npy/npy.h"
#include "formats/target/packed_internal.h"
#include "formats/zip/zip.h"
#include "formats/zip/zip_emit.h"
#include "kernels/kernels.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

enum {
    ALIGNMENT = 64,
    PREFIX = 10,        /* magic, version, length */
    GROWTH_DIGITS = 21, /* NumPy leaves room to lengthen the first dim */
    LONGEST_NAME = 65535,
    SUFFIX = 4 /* ".npy" */
};

static bool holds_dtype(fsdp_dtype dtype)
{
    const fsdp_dtype_info *info = fsdp_dtype_describe(dtype);
    return info && info->numpy;
}

static const char names_array[] = "%names";

/* Names of members become paths when the file is unpacked: a part "..", an absolute path, and what is one on
 * other systems (a backslash, a drive) lead out of the directory. */
static bool leaves_directory(const char *name, size_t size)
{
    if (size > 0 && name[0] == '/')
        return true;
    for (size_t i = 0; i < size; i++) {
        bool begins = i == 0 || name[i - 1] == '/';
        size_t left = size - i;
        if (name[i] == '\\' || (name[i] == ':' && i == 1) ||
            (begins && left >= 2 && name[i] == '.' && name[i + 1] == '.' &&
             (left == 2 || name[i + 2] == '/')))
            return true;
    }
    return false;
}

/* Python cuts a member's name at a NUL. */
static bool holds_name(const char *name, size_t size)
{
    bool is_ours = size == strlen(names_array) && memcmp(name, names_array, size) == 0;
    return !is_ours && size <= LONGEST_NAME - SUFFIX && !leaves_directory(name, size) &&
           (size == 0 || memchr(name, '\0', size) == NULL);
}

/* --- the header of an array ------------------------------------------------------------------- */

static int digits_of(int64_t number)
{
    char text[32];
    return snprintf(text, sizeof text, "%" PRId64, number);
}

static void add_header(fsdp_text *out, const fsdp_packed_tensor *what)
{
    fsdp_text dict = {0};
    fsdp_text_addf(&dict, "{'descr': '%s', 'fortran_order': False, 'shape': (",
                   fsdp_dtype_describe(what->dtype)->numpy);
    for (int dim = 0; dim < what->ndim; dim++)
        fsdp_text_addf(&dict, "%s%" PRId64, dim > 0 ? ", " : "", what->shape[dim]);
    fsdp_text_addf(&dict, "%s), }", what->ndim == 1 ? "," : "");
    int room = what->ndim > 0 ? GROWTH_DIGITS - digits_of(what->shape[0]) : 0;
    fsdp_text_addf(&dict, "%*s", room, "");
    size_t size = dict.size + 1;
    size += ALIGNMENT - (PREFIX + size) % ALIGNMENT;
    fsdp_text_addf(&dict, "%*s\n", (int)(size - 1 - dict.size), "");
    const char length[2] = {(char)(size & 0xFF), (char)(size >> 8)};
    fsdp_text_add(out, "\x93NUMPY\1\0", 8);
    fsdp_text_add(out, length, sizeof length);
    if (dict.failed)
        out->failed = true;
    else
        fsdp_text_add(out, dict.data, dict.size);
    fsdp_text_release(&dict);
}

/* --- the archive ------------------------------------------------------------------------------ */

/* The bytes in front of a tensor's data: the member's local header, which is at member->header, and
 * the array's. member->crc is that of the data before and that of the whole member after. */
static fsdp_status make_head(const fsdp_packed *target, const target_tensor *tensor,
                             fsdp_text *head, fsdp_zip_member *member, fsdp_error *err)
{
    fsdp_text header = {0}, name = {0};
    add_header(&header, &tensor->what);
    fsdp_text_add(&name, tensor->stored_name, tensor->stored_name_size);
    fsdp_text_add(&name, ".npy", SUFFIX);
    member->name = name.data;
    member->name_size = name.size;
    fsdp_status status =
        header.failed || name.failed ? fsdp_fail_memory(err, target->path) : FSDP_OK;
    if (status == FSDP_OK && fsdp_add_overflow(tensor->size, (int64_t)header.size, &member->size))
        status = fsdp_fail(err, FSDP_ERR_LIMIT, "'%s' would be too large", target->path);
    if (status == FSDP_OK) {
        uint32_t header_crc = fsdp_crc32(0, header.data, header.size);
        member->crc = fsdp_crc32_join(header_crc, member->crc, (uint64_t)tensor->size);
        head->size = 0;
        fsdp_zip_emit_local(head, member, ALIGNMENT);
        fsdp_text_add(head, header.data, header.size);
        if (head->failed)
            status = fsdp_fail_memory(err, target->path);
    }
    member->name = NULL;
    fsdp_text_release(&header);
    fsdp_text_release(&name);
    return status;
}

/* Computes the offsets of all members and the size of the directory; writes nothing. */
static fsdp_status place_members(fsdp_packed *target, int64_t *size_out, fsdp_error *err)
{
    fsdp_text head = {0}, directory = {0};
    fsdp_status status = FSDP_OK;
    int64_t at = 0;
    for (size_t i = 0; i < target->tensor_count && status == FSDP_OK; i++) {
        target_tensor *tensor = &target->tensors[i];
        fsdp_zip_member member = {.header = at};
        status = make_head(target, tensor, &head, &member, err);
        tensor->offset = at + (int64_t)head.size;
        tensor->file = 0;
        if (status == FSDP_OK && fsdp_add_overflow(tensor->offset, tensor->size, &at))
            status = fsdp_fail(err, FSDP_ERR_LIMIT, "'%s' would be too large", target->path);
        if (status == FSDP_OK) {
            member.name = head.data + FSDP_ZIP_NAME_AT;
            fsdp_zip_emit_central(&directory, &member);
        }
    }
    fsdp_zip_emit_end(&directory, (int64_t)target->tensor_count, at, (int64_t)directory.size);
    if (status == FSDP_OK && directory.failed)
        status = fsdp_fail_memory(err, target->path);
    *size_out = at + (int64_t)directory.size;
    fsdp_text_release(&directory);
    fsdp_text_release(&head);
    return status;
}

/* Adds the true names as one more array of the archive. */
static fsdp_status add_names(fsdp_packed *target, size_t *number_out, fsdp_error *err)
{
    int64_t size = (int64_t)target->escaped_names.size;
    fsdp_packed_tensor what = {.dtype = FSDP_U8, .ndim = 1, .shape = &size};
    FSDP_TRY(fsdp_packed_add_tensor(target, &what, number_out, err));
    target->tensors[*number_out].stored_name = names_array;
    target->tensors[*number_out].stored_name_size = strlen(names_array);
    return FSDP_OK;
}

static fsdp_status lay_out_npz(fsdp_packed *target, fsdp_error *err)
{
    bool has_names = target->escaped_names.size > 0;
    int64_t size;
    size_t names = 0;
    int file;
    if (has_names)
        FSDP_TRY(add_names(target, &names, err));
    FSDP_TRY(place_members(target, &size, err));
    FSDP_TRY(fsdp_packed_add_file(target, NULL, size, &file, err));
    return has_names ? fsdp_packed_write(target, names, 0, (int64_t)target->escaped_names.size,
                                         target->escaped_names.data, err)
                     : FSDP_OK;
}

/* Writes the headers of all members and the directory. */
static fsdp_status put_members(fsdp_packed *target, fsdp_text *head, fsdp_text *directory,
                               fsdp_error *err)
{
    int64_t at = 0;
    for (size_t i = 0; i < target->tensor_count; i++) {
        const target_tensor *tensor = &target->tensors[i];
        fsdp_zip_member member = {.header = at, .crc = fsdp_packed_crc(tensor)};
        FSDP_TRY(make_head(target, tensor, head, &member, err));
        FSDP_TRY(fsdp_packed_put(target, 0, head->data, head->size, at, err));
        at = tensor->offset + tensor->size;
        member.name = head->data + FSDP_ZIP_NAME_AT;
        fsdp_zip_emit_central(directory, &member);
    }
    int64_t size = (int64_t)directory->size;
    fsdp_zip_emit_end(directory, (int64_t)target->tensor_count, at, size);
    if (directory->failed)
        return fsdp_fail_memory(err, target->path);
    return fsdp_packed_put(target, 0, directory->data, directory->size, at, err);
}

static fsdp_status finish_npz(fsdp_packed *target, fsdp_error *err)
{
    fsdp_text head = {0}, directory = {0};
    fsdp_status status = put_members(target, &head, &directory, err);
    fsdp_text_release(&head);
    fsdp_text_release(&directory);
    return status;
}

/* --- one array -------------------------------------------------------------------------------- */

static fsdp_status lay_out_npy(fsdp_packed *target, fsdp_error *err)
{
    if (target->tensor_count != 1)
        return fsdp_fail(
            err, FSDP_ERR_USAGE,
            "an .npy file holds one tensor, not %zu; choose one with --include, or write an .npz",
            target->tensor_count);
    target_tensor *tensor = &target->tensors[0];
    fsdp_text head = {0};
    int64_t size = 0;
    add_header(&head, &tensor->what);
    fsdp_status status = head.failed ? fsdp_fail_memory(err, target->path) : FSDP_OK;
    if (status == FSDP_OK && fsdp_add_overflow(tensor->size, (int64_t)head.size, &size))
        status = fsdp_fail(err, FSDP_ERR_LIMIT, "'%s' would be too large", target->path);
    if (status == FSDP_OK)
        status = fsdp_packed_add_file(target, NULL, size, &tensor->file, err);
    if (status == FSDP_OK)
        status = fsdp_packed_put(target, tensor->file, head.data, head.size, 0, err);
    tensor->offset = (int64_t)head.size;
    fsdp_text_release(&head);
    return status;
}

const fsdp_format_writer fsdp_npz_writer = {
    .ops = &fsdp_packed_ops,
    .packed = &(const fsdp_packed_format){.has_crc = true,
                                          .holds_name = holds_name,
                                          .lay_out = lay_out_npz,
                                          .finish = finish_npz},
    .holds_dtype = holds_dtype};
const fsdp_format_writer fsdp_npy_writer = {.ops = &fsdp_packed_ops,
                                            .packed =
                                                &(const fsdp_packed_format){.lay_out = lay_out_npy},
                                            .holds_dtype = holds_dtype};
