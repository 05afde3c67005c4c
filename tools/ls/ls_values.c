/* Values as listings spell them (docs/man/fsdp-ls.1.scd): JSON. fsdp-diff shows values in the same way. */
#include "tools/ls/ls.h"
#include "base/text.h"
#include "base/values_shape.h"

#include "kernels/digest.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

void ls_shape(const fsdp_entry *tensor, int64_t shape_out[FSDP_MAX_DIMS])
{
    bool six_bits = tensor->dtype == FSDP_F6_E2M3 || tensor->dtype == FSDP_F6_E3M2;
    fsdp_dtype_to_values(tensor->dtype, tensor->ndim, tensor->shape, shape_out);
    if (six_bits && tensor->ndim > 0)
        shape_out[tensor->ndim - 1] = shape_out[tensor->ndim - 1] / 3 * 4;
}

static void add_hex_digest(fsdp_text *text, const void *data, size_t size)
{
    fsdp_sha256 sha;
    uint8_t digest[FSDP_SHA256_SIZE];
    fsdp_sha256_init(&sha);
    fsdp_sha256_add(&sha, data, size);
    fsdp_sha256_value(&sha, digest);
    fsdp_text_add_hex(text, digest, sizeof digest);
}

static void add_float(fsdp_text *text, double value)
{
    if (isfinite(value))
        fsdp_text_add_f64(text, value);
    else
        fsdp_text_addf(text, "{\"float\": \"%s\"}",
                       isnan(value) ? "nan"
                       : value > 0  ? "inf"
                                    : "-inf");
}

static void add_list(ls_listing *listing, fsdp_text *text, const fsdp_value *value)
{
    bool is_named = listing->names_tuples && value->is_tuple;
    fsdp_text_addf(text, is_named ? "{\"tuple\": [" : "[");
    for (size_t i = 0; i < value->as.list.count; i++) {
        if (i > 0)
            fsdp_text_add(text, ", ", 2);
        ls_add_value(listing, text, &value->as.list.items[i]);
    }
    fsdp_text_addf(text, is_named ? "]}" : "]");
}

static bool has_text_keys(const fsdp_value *value)
{
    for (size_t i = 0; i + 1 < value->as.list.count; i += 2)
        if (value->as.list.items[i].kind != FSDP_VALUE_STRING)
            return false;
    return true;
}

static void add_plain_dict(ls_listing *listing, fsdp_text *text, const fsdp_value *value)
{
    fsdp_text_addf(text, "{");
    for (size_t i = 0; i + 1 < value->as.list.count; i += 2) {
        fsdp_text_addf(text, i > 0 ? ", " : "");
        ls_add_value(listing, text, &value->as.list.items[i]);
        fsdp_text_addf(text, ": ");
        ls_add_value(listing, text, &value->as.list.items[i + 1]);
    }
    fsdp_text_addf(text, "}");
}

static void add_dict(ls_listing *listing, fsdp_text *text, const fsdp_value *value)
{
    if (value->as.list.count == 0) {
        fsdp_text_add(text, "{}", 2);
        return;
    }
    if (listing->plain_dicts && has_text_keys(value)) {
        add_plain_dict(listing, text, value);
        return;
    }
    fsdp_text_addf(text, "{\"dict\": [");
    for (size_t i = 0; i + 1 < value->as.list.count; i += 2) {
        fsdp_text_addf(text, i > 0 ? ", [" : "[");
        ls_add_value(listing, text, &value->as.list.items[i]);
        fsdp_text_add(text, ", ", 2);
        ls_add_value(listing, text, &value->as.list.items[i + 1]);
        fsdp_text_add(text, "]", 1);
    }
    fsdp_text_addf(text, "]}");
}

static void add_per_rank(ls_listing *listing, fsdp_text *text, const fsdp_value *value)
{
    fsdp_text_addf(text, "{\"per_rank\": ");
    add_list(listing, text, fsdp_value_per_rank(value));
    fsdp_text_add(text, "}", 1);
}

static void add_bytes(fsdp_text *text, const fsdp_value *value)
{
    fsdp_text_addf(text, "{\"bytes\": %zu, \"sha256\": \"", value->as.bytes.size);
    add_hex_digest(text, value->as.bytes.data, value->as.bytes.size);
    fsdp_text_addf(text, "\"}");
}

/* Shows a value that PyTorch stored as a blob by its contents. */
static bool add_opened(ls_listing *listing, fsdp_text *text, const fsdp_value *value)
{
    ls_listing inner = {.options = listing->options,
                        .names_tuples = listing->names_tuples,
                        .plain_dicts = listing->plain_dicts};
    fsdp_error err = {0};
    if (fsdp_checkpoint_open_value(value, &inner.checkpoint, &err) != FSDP_OK)
        return false;
    ls_add_value(&inner, text, &fsdp_sd_at(fsdp_checkpoint_sd(inner.checkpoint), 0)->value);
    if (listing->failure.status == FSDP_OK)
        listing->failure = inner.failure;
    fsdp_checkpoint_close(inner.checkpoint);
    return true;
}

static void add_opaque(ls_listing *listing, fsdp_text *text, const fsdp_value *value)
{
    if (add_opened(listing, text, value))
        return;
    fsdp_text_addf(text, "{\"opaque\": ");
    if (fsdp_utf8_valid(value->as.bytes.data, value->as.bytes.size))
        fsdp_text_add_json_shown(text, value->as.bytes.data, value->as.bytes.size);
    else
        fsdp_text_addf(text, "\"%zu bytes\"", value->as.bytes.size);
    fsdp_text_add(text, "}", 1);
}

static void add_integer(fsdp_text *text, const fsdp_value *value)
{
    fsdp_text_addf(text, "{\"int\": ");
    fsdp_text_add_json_shown(text, value->as.bytes.data, value->as.bytes.size);
    fsdp_text_add(text, "}", 1);
}

static void add_complex(fsdp_text *text, const double parts[2])
{
    fsdp_text_addf(text, "{\"complex\": [");
    add_float(text, parts[0]);
    fsdp_text_add(text, ", ", 2);
    add_float(text, parts[1]);
    fsdp_text_addf(text, "]}");
}

typedef struct inner_digest {
    fsdp_sha256 sha;
    fsdp_text head; /* dtype and shape */
} inner_digest;

static fsdp_status add_inner_slab(void *context, const fsdp_entry *entry, int64_t first,
                                  int64_t count, const void *data, fsdp_error *err)
{
    inner_digest *inner = context;
    (void)err;
    fsdp_sha256_add(&inner->sha, data, (size_t)count * fsdp_dtype_size(entry->dtype));
    if (first > 0)
        return FSDP_OK;
    int64_t shape[FSDP_MAX_DIMS];
    ls_shape(entry, shape);
    fsdp_text_addf(&inner->head, "{\"dtype\": \"%s\", \"shape\": ", fsdp_dtype_name(entry->dtype));
    cli_add_shape(&inner->head, entry->ndim, shape);
    return FSDP_OK;
}

/* Keeps a failure in listing->failure, which is reported at the end of the listing. */
static void add_inner(ls_listing *listing, fsdp_text *text, uint64_t tensor)
{
    inner_digest inner = {0};
    uint8_t digest[FSDP_SHA256_SIZE];
    fsdp_sha256_init(&inner.sha);
    fsdp_error err = {0};
    if (fsdp_checkpoint_stream_inner(listing->checkpoint, tensor, listing->options->common.memory,
                                     add_inner_slab, &inner, &err) != FSDP_OK &&
        listing->failure.status == FSDP_OK)
        listing->failure = err;
    fsdp_sha256_value(&inner.sha, digest);
    fsdp_text_addf(text, "{\"tensor\": ");
    if (inner.head.size > 0)
        fsdp_text_add(text, inner.head.data, inner.head.size);
    fsdp_text_addf(text, ", \"sha256\": \"");
    fsdp_text_add_hex(text, digest, sizeof digest);
    fsdp_text_addf(text, "\"}}");
    fsdp_text_release(&inner.head);
}

void ls_add_value(ls_listing *listing, fsdp_text *text, const fsdp_value *value)
{
    switch (value->kind) {
    case FSDP_VALUE_NULL: fsdp_text_addf(text, "null"); break;
    case FSDP_VALUE_BOOL: fsdp_text_addf(text, value->as.boolean ? "true" : "false"); break;
    case FSDP_VALUE_I64: fsdp_text_addf(text, "%" PRId64, value->as.i64); break;
    case FSDP_VALUE_U64:
        fsdp_text_addf(text, value->as.u64 <= INT64_MAX ? "%" PRIu64 : "{\"int\": \"%" PRIu64 "\"}",
                       value->as.u64);
        break;
    case FSDP_VALUE_F64: add_float(text, value->as.f64); break;
    case FSDP_VALUE_STRING:
        fsdp_text_add_json_shown(text, value->as.bytes.data, value->as.bytes.size);
        break;
    case FSDP_VALUE_BYTES: add_bytes(text, value); break;
    case FSDP_VALUE_LIST: add_list(listing, text, value); break;
    case FSDP_VALUE_DICT:
        if (fsdp_value_per_rank(value))
            add_per_rank(listing, text, value);
        else
            add_dict(listing, text, value);
        break;
    case FSDP_VALUE_OPAQUE:
    case FSDP_VALUE_CLASS: add_opaque(listing, text, value); break;
    case FSDP_VALUE_INTEGER: add_integer(text, value); break;
    case FSDP_VALUE_COMPLEX: add_complex(text, value->as.complex_parts); break;
    case FSDP_VALUE_TENSOR: add_inner(listing, text, value->as.tensor); break;
    }
}
