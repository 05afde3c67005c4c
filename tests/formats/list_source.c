/*
 * Prints what a path of any foreign format holds, as JSON in the form of docs: tensors with dtype, shape
 * and SHA-256 of their row-major little-endian bytes, and values. Checksums of the format are checked.
 *
 * usage: list_source PATH [MEMORY]     exit status: the fsdp_status
 */
#include "formats/source.h"

#include <fsdp/digest.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { PIECE_BYTES = 1 << 20 };

typedef struct listing {
    fsdp_source *source;
    fsdp_source_reader reader;
    fsdp_text text;
    uint8_t *piece;
} listing;

/* --- tensors ---------------------------------------------------------------------------------- */

static void add_hash(fsdp_text *text, const fsdp_sha256 *sha)
{
    uint8_t digest[FSDP_SHA256_SIZE];
    fsdp_sha256_value(sha, digest);
    fsdp_text_addf(text, "\"");
    fsdp_text_add_hex(text, digest, sizeof digest);
    fsdp_text_addf(text, "\"");
}

static fsdp_status hash_tensor(listing *list, size_t number, fsdp_sha256 *sha, fsdp_error *err)
{
    const fsdp_source_tensor *tensor = fsdp_source_tensor_at(list->source, number);
    fsdp_box whole = fsdp_box_whole(tensor->ndim, tensor->shape), pieces[FSDP_BOX_PIECES];
    int64_t count = fsdp_box_count(&whole), size = (int64_t)fsdp_dtype_size(tensor->dtype);
    fsdp_sha256_init(sha);
    for (int64_t first = 0; first < count; first += PIECE_BYTES / size) {
        int64_t left = count - first;
        int n = fsdp_box_cut(&whole, first, left < PIECE_BYTES / size ? left : PIECE_BYTES / size,
                             pieces);
        for (int i = 0; i < n; i++) {
            FSDP_TRY(fsdp_source_read(list->source, number, &pieces[i], list->piece, &list->reader,
                                      err));
            fsdp_sha256_add(sha, list->piece, (size_t)(fsdp_box_count(&pieces[i]) * size));
        }
    }
    return FSDP_OK;
}

static fsdp_status add_tensor(listing *list, size_t number, fsdp_error *err)
{
    const fsdp_source_tensor *tensor = fsdp_source_tensor_at(list->source, number);
    fsdp_text_addf(&list->text, "{\"dtype\": \"%s\", \"shape\": [", fsdp_dtype_name(tensor->dtype));
    bool is_six = tensor->dtype == FSDP_F6_E2M3 || tensor->dtype == FSDP_F6_E3M2;
    for (int dim = 0; dim < tensor->ndim; dim++) {
        bool is_packed = is_six && dim == tensor->ndim - 1; /* three bytes hold four elements */
        fsdp_text_addf(&list->text, "%s%" PRId64, dim > 0 ? ", " : "",
                       is_packed ? tensor->shape[dim] / 3 * 4 : tensor->shape[dim]);
    }
    fsdp_text_addf(&list->text, "], \"sha256\": ");
    fsdp_sha256 sha;
    FSDP_TRY(hash_tensor(list, number, &sha, err));
    add_hash(&list->text, &sha);
    fsdp_text_addf(&list->text, "}");
    return FSDP_OK;
}

/* --- values ----------------------------------------------------------------------------------- */

static void add_f64(fsdp_text *text, double number)
{
    if (isnan(number))
        fsdp_text_addf(text, "{\"float\": \"nan\"}");
    else if (isinf(number))
        fsdp_text_addf(text, "{\"float\": \"%sinf\"}", number < 0 ? "-" : "");
    else
        fsdp_text_add_f64(text, number);
}

static void add_bytes(fsdp_text *text, const void *data, size_t size)
{
    fsdp_sha256 sha;
    fsdp_sha256_init(&sha);
    fsdp_sha256_add(&sha, data, size);
    fsdp_text_addf(text, "{\"bytes\": %zu, \"sha256\": ", size);
    add_hash(text, &sha);
    fsdp_text_addf(text, "}");
}

static void add_unsigned(fsdp_text *text, uint64_t number)
{
    if (number > INT64_MAX)
        fsdp_text_addf(text, "{\"int\": \"%" PRIu64 "\"}", number);
    else
        fsdp_text_addf(text, "%" PRIu64, number);
}

/* Everything that holds no other value. */
static void add_scalar(fsdp_text *text, const fsdp_value *value)
{
    switch (value->kind) {
    case FSDP_VALUE_NULL: fsdp_text_addf(text, "null"); break;
    case FSDP_VALUE_BOOL: fsdp_text_addf(text, value->as.boolean ? "true" : "false"); break;
    case FSDP_VALUE_I64: fsdp_text_addf(text, "%" PRId64, value->as.i64); break;
    case FSDP_VALUE_U64: add_unsigned(text, value->as.u64); break;
    case FSDP_VALUE_F64: add_f64(text, value->as.f64); break;
    case FSDP_VALUE_STRING:
        fsdp_text_add_json_string(text, value->as.bytes.data, value->as.bytes.size);
        break;
    case FSDP_VALUE_BYTES: add_bytes(text, value->as.bytes.data, value->as.bytes.size); break;
    case FSDP_VALUE_INTEGER: fsdp_text_addf(text, "{\"int\": \"%s\"}", value->as.bytes.data); break;
    case FSDP_VALUE_COMPLEX:
        fsdp_text_addf(text, "{\"complex\": [");
        add_f64(text, value->as.complex_parts[0]);
        fsdp_text_addf(text, ", ");
        add_f64(text, value->as.complex_parts[1]);
        fsdp_text_addf(text, "]}");
        break;
    case FSDP_VALUE_CLASS:
        fsdp_text_addf(text, "{\"opaque\": ");
        fsdp_text_add_json_string(text, value->as.bytes.data, value->as.bytes.size);
        fsdp_text_addf(text, "}");
        break;
    default: fsdp_text_addf(text, "{\"opaque\": \"bytes\"}"); break;
    }
}

static fsdp_status add_value(listing *list, const fsdp_value *value, fsdp_error *err);

static fsdp_status add_items(listing *list, const fsdp_value *value, fsdp_error *err)
{
    for (size_t i = 0; i < value->as.list.count; i++) {
        fsdp_text_addf(&list->text, i > 0 ? ", " : "");
        FSDP_TRY(add_value(list, &value->as.list.items[i], err));
    }
    return FSDP_OK;
}

static fsdp_status add_dict(listing *list, const fsdp_value *value, fsdp_error *err)
{
    const fsdp_value *items = value->as.list.items;
    for (size_t i = 0; i < value->as.list.count; i += 2) {
        fsdp_text_addf(&list->text, "%s[", i > 0 ? ", " : "{\"dict\": [");
        FSDP_TRY(add_value(list, &items[i], err));
        fsdp_text_addf(&list->text, ", ");
        FSDP_TRY(add_value(list, &items[i + 1], err));
        fsdp_text_addf(&list->text, "]");
    }
    fsdp_text_addf(&list->text, value->as.list.count > 0 ? "]}" : "{}");
    return FSDP_OK;
}

/* As deep as values nest, which is bounded. */
static fsdp_status add_value(listing *list, const fsdp_value *value, fsdp_error *err)
{
    if (value->kind == FSDP_VALUE_LIST) {
        fsdp_text_addf(&list->text, "[");
        FSDP_TRY(add_items(list, value, err));
        fsdp_text_addf(&list->text, "]");
        return FSDP_OK;
    }
    if (fsdp_value_per_rank(value)) {
        fsdp_text_addf(&list->text, "{\"per_rank\": ");
        FSDP_TRY(add_value(list, fsdp_value_per_rank(value), err));
        fsdp_text_addf(&list->text, "}");
        return FSDP_OK;
    }
    if (value->kind == FSDP_VALUE_DICT)
        return add_dict(list, value, err);
    if (value->kind == FSDP_VALUE_TENSOR) {
        fsdp_text_addf(&list->text, "{\"tensor\": ");
        FSDP_TRY(add_tensor(list, (size_t)value->as.tensor, err));
        fsdp_text_addf(&list->text, "}");
        return FSDP_OK;
    }
    add_scalar(&list->text, value);
    return FSDP_OK;
}

/* --- the listing ------------------------------------------------------------------------------ */

static fsdp_status add_entries(listing *list, bool tensors, fsdp_error *err)
{
    bool is_first = true;
    for (size_t i = 0; i < fsdp_source_entry_count(list->source); i++) {
        const fsdp_source_entry *entry = fsdp_source_entry_at(list->source, i);
        if (entry->is_tensor != tensors)
            continue;
        fsdp_text_addf(&list->text, is_first ? "\n  " : ",\n  ");
        is_first = false;
        fsdp_text_add_json_string(&list->text, entry->name, entry->name_size);
        fsdp_text_addf(&list->text, ": ");
        FSDP_TRY(tensors ? add_tensor(list, entry->tensor, err)
                         : add_value(list, entry->value, err));
    }
    return FSDP_OK;
}

static fsdp_status check_sums(listing *list, fsdp_error *err)
{
    for (size_t i = 0; i < fsdp_source_check_count(list->source); i++)
        FSDP_TRY(fsdp_source_check(list->source, i, &list->reader, err));
    return FSDP_OK;
}

static fsdp_status make_listing(listing *list, fsdp_error *err)
{
    fsdp_text_addf(&list->text, "{\"format\": \"%s\",\n", fsdp_source_format(list->source));
    static const char *const members[] = {"metadata", "attributes"};
    for (size_t i = 0; i < 2; i++) {
        const char *json = fsdp_source_extra(list->source, members[i]);
        if (json)
            fsdp_text_addf(&list->text, " \"%s\": %s,\n", members[i], json);
    }
    fsdp_text_addf(&list->text, " \"tensors\": {");
    FSDP_TRY(add_entries(list, true, err));
    fsdp_text_addf(&list->text, "},\n \"values\": {");
    FSDP_TRY(add_entries(list, false, err));
    fsdp_text_addf(&list->text, "}}\n");
    FSDP_TRY(check_sums(list, err));
    return list->text.failed ? fsdp_fail_memory(err, "a listing") : FSDP_OK;
}

int main(int argc, char **argv)
{
    if (argc < 2) {
        fprintf(stderr, "usage: list_source PATH [MEMORY]\n");
        return FSDP_ERR_USAGE;
    }
    fsdp_error err = {0};
    listing list = {.piece = malloc(PIECE_BYTES)};
    fsdp_status status = fsdp_source_open(NULL, argv[1], &list.source, &err);
    if (status == FSDP_OK && argc > 2)
        fsdp_source_set_memory(list.source, atoll(argv[2]), NULL);
    if (status == FSDP_OK)
        status = make_listing(&list, &err);
    if (status == FSDP_OK)
        fwrite(list.text.data, 1, list.text.size, stdout);
    fsdp_source_reader_release(&list.reader);
    fsdp_text_release(&list.text);
    fsdp_source_close(list.source);
    free(list.piece);
    return status == FSDP_OK ? 0 : fsdp_error_report(&err);
}
