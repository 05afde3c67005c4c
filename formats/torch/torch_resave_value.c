/*
 * Encodes fsdp_values with tensors as torch.save files: see torch_resave.h. Values that differ
 * from rank to rank are of this kind, because no file holds them in this form. An object is
 * encoded by its class name only, as the value holds it.
 */
#include "base/core/mem.h"
#include "base/data/value_internal.h"
#include "formats/torch/torch_resave.h"
#include "kernels/kernels.h"

#include <string.h>

typedef struct value_resave {
    fsdp_source *source;
    fsdp_pickler pickler;
    size_t *tensors; /* per storage: its number in the source */
    size_t count, room;
    int64_t bytes;
} value_resave;

static fsdp_status emit_value(value_resave *work, const fsdp_value *value, int depth,
                              fsdp_error *err);

/* --- the pickle ------------------------------------------------------------------------------- */

static fsdp_status emit_tensor(value_resave *work, size_t number, fsdp_error *err)
{
    const fsdp_source_tensor *tensor = fsdp_source_tensor_at(work->source, number);
    if (!fsdp_grow(&work->tensors, &work->room, work->count + 1, sizeof *work->tensors))
        return fsdp_fail_memory(err, "a value");
    work->tensors[work->count] = number;
    work->bytes += torch_bytes_of(tensor->dtype, tensor->ndim, tensor->shape);
    return torch_emit_tensor(&work->pickler, tensor->dtype, tensor->ndim, tensor->shape,
                             work->count++, err);
}

static void emit_class(value_resave *work, const fsdp_value *value)
{
    const char *name = value->as.bytes.data, *dot = strrchr(name, '.');
    fsdp_text *text = &work->pickler.text;
    fsdp_text_addf(text, "c%.*s\n%s\n", dot ? (int)(dot - name) : 0, name, dot ? dot + 1 : name);
}

static fsdp_status emit_items(value_resave *work, const fsdp_value *value, int depth,
                              fsdp_error *err)
{
    bool is_dict = value->kind == FSDP_VALUE_DICT, is_tuple = !is_dict && value->is_tuple;
    if (!is_tuple)
        fsdp_pickler_op(&work->pickler, is_dict ? FSDP_OP_EMPTY_DICT : FSDP_OP_EMPTY_LIST);
    fsdp_pickler_op(&work->pickler, FSDP_OP_MARK);
    for (size_t i = 0; i < value->as.list.count; i++)
        FSDP_TRY(emit_value(work, &value->as.list.items[i], depth + 1, err));
    fsdp_pickler_op(&work->pickler, is_dict    ? FSDP_OP_SETITEMS
                                    : is_tuple ? FSDP_OP_TUPLE
                                               : FSDP_OP_APPENDS);
    return FSDP_OK;
}

static fsdp_status emit_per_rank(value_resave *work, const fsdp_value *list, int depth,
                                 fsdp_error *err)
{
    fsdp_pickler_op(&work->pickler, FSDP_OP_EMPTY_DICT);
    fsdp_pickler_op(&work->pickler, FSDP_OP_MARK);
    fsdp_pickler_word(&work->pickler, TORCH_PER_RANK_FIRST);
    fsdp_pickler_word(&work->pickler, TORCH_PER_RANK_SECOND);
    fsdp_pickler_op(&work->pickler, FSDP_OP_TUPLE2);
    FSDP_TRY(emit_items(work, list, depth + 1, err));
    fsdp_pickler_op(&work->pickler, FSDP_OP_SETITEMS);
    return FSDP_OK;
}

static fsdp_status emit_value(value_resave *work, const fsdp_value *value, int depth,
                              fsdp_error *err)
{
    const fsdp_value *per_rank = fsdp_value_per_rank(value);
    if (depth > FSDP_VALUE_DEPTH)
        return fsdp_fail(err, FSDP_ERR_USAGE, "a value nests more than %d deep", FSDP_VALUE_DEPTH);
    if (per_rank)
        return emit_per_rank(work, per_rank, depth, err);
    if (value->kind == FSDP_VALUE_TENSOR)
        return emit_tensor(work, (size_t)value->as.tensor, err);
    if (value->kind == FSDP_VALUE_LIST || value->kind == FSDP_VALUE_DICT)
        return fsdp_value_is_opaque(value) ? emit_items(work, value, depth, err)
                                           : fsdp_pickler_value(&work->pickler, value, err);
    if (value->kind != FSDP_VALUE_CLASS)
        return fsdp_pickler_value(&work->pickler, value, err);
    emit_class(work, value);
    return FSDP_OK;
}

/* --- reading it back -------------------------------------------------------------------------- */

static fsdp_status add_tensor(const value_resave *work, size_t i, fsdp_zip_record *record,
                              fsdp_text *out, fsdp_error *err)
{
    const fsdp_source_tensor *tensor = fsdp_source_tensor_at(work->source, work->tensors[i]);
    fsdp_box whole = fsdp_box_whole(tensor->ndim, tensor->shape);
    fsdp_source_reader reader = {0};
    size_t size = (size_t)record->size;
    char *data = fsdp_realloc(NULL, size + 1, 1);
    if (!data)
        return fsdp_fail_memory(err, "a value");
    fsdp_status st =
        size > 0 ? fsdp_source_read(work->source, work->tensors[i], &whole, data, &reader, err)
                 : FSDP_OK;
    record->crc = size > 0 && st == FSDP_OK ? fsdp_crc32(0, data, size) : 0;
    if (st == FSDP_OK)
        fsdp_zip_add_record(out, record, data);
    fsdp_source_reader_release(&reader);
    fsdp_free(data);
    return st;
}

static fsdp_status add_archive(value_resave *work, size_t most, fsdp_text *out, fsdp_error *err)
{
    fsdp_zip_record *records = fsdp_alloc(work->count + TORCH_FIXED, sizeof *records);
    int64_t size;
    if (!records)
        return fsdp_fail_memory(err, "a value");
    for (size_t i = 0; i < work->count; i++) {
        const fsdp_source_tensor *tensor = fsdp_source_tensor_at(work->source, work->tensors[i]);
        records[TORCH_LEADING + i].size =
            torch_bytes_of(tensor->dtype, tensor->ndim, tensor->shape);
    }
    fsdp_status st = torch_place_archive(records, work->count, &work->pickler.text, &size, err);
    if (st == FSDP_OK && size <= (int64_t)most) {
        torch_emit_leading(out, records, &work->pickler.text);
        for (size_t i = 0; i < work->count && st == FSDP_OK; i++)
            st = add_tensor(work, i, &records[TORCH_LEADING + i], out, err);
        torch_emit_closing(out, records, work->count);
    }
    fsdp_free(records);
    if (st == FSDP_OK && out->failed)
        st = fsdp_fail_memory(err, "a value");
    return st;
}

fsdp_status torch_resave_value(fsdp_source *source, const fsdp_value *value, size_t most,
                               fsdp_text *out, fsdp_error *err)
{
    value_resave work = {.source = source};
    out->size = 0;
    fsdp_pickler_begin(&work.pickler);
    fsdp_status st = emit_value(&work, value, 0, err);
    fsdp_pickler_op(&work.pickler, FSDP_OP_STOP);
    if (st == FSDP_OK && work.pickler.text.failed)
        st = fsdp_fail_memory(err, "a value");
    if (st == FSDP_OK && work.bytes <= (int64_t)most)
        st = add_archive(&work, most, out, err);
    fsdp_pickler_release(&work.pickler);
    fsdp_free(work.tensors);
    return st;
}

/* --- back ------------------------------------------------------------------------------------- */

static bool is_text(const fsdp_value *value, const char *text)
{
    return value->kind == FSDP_VALUE_STRING && value->as.bytes.size == strlen(text) &&
           memcmp(value->as.bytes.data, text, strlen(text)) == 0;
}

static bool is_per_rank_key(const fsdp_value *key)
{
    return key->kind == FSDP_VALUE_LIST && key->as.list.count == 2 &&
           is_text(&key->as.list.items[0], TORCH_PER_RANK_FIRST) &&
           is_text(&key->as.list.items[1], TORCH_PER_RANK_SECOND);
}

fsdp_status torch_restore_per_rank(fsdp_value *value, fsdp_error *err)
{
    if (value->kind != FSDP_VALUE_DICT || value->as.list.count != 2 ||
        !is_per_rank_key(&value->as.list.items[0]) ||
        value->as.list.items[1].kind != FSDP_VALUE_LIST)
        return FSDP_OK;
    fsdp_value restored = {0}, list = value->as.list.items[1];
    FSDP_TRY(fsdp_value_set_per_rank(&restored, 0, err));
    value->as.list.items[1] = (fsdp_value){0};
    fsdp_value_release(value);
    fsdp_value_release(&restored.as.list.items[1]);
    restored.as.list.items[1] = list;
    *value = restored;
    return FSDP_OK;
}
