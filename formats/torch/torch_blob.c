/*
 * Blobs: values that another format keeps as torch.save bytes. fsdp_source_save_value reads the
 * bytes of a value from a source; fsdp_source_open_blob opens such bytes as a value and its
 * tensors; fsdp_source_blob_code names the code in them. Values that differ from rank to rank, which no
 * file holds in this form, are encoded here as well.
 */
#include "base/io/io_memory.h"
#include "base/core/mem.h"
#include "base/data/value_internal.h"
#include "formats/source/source_internal.h"
#include "formats/torch/torch_resave.h"
#include "kernels/kernels.h"

#include <string.h>

/* === values as blobs ========================================================================== */

/*
 * Encodes fsdp_values with tensors as torch.save files. An object is encoded by its class name only,
 * as the value holds it.
 */

/* The key, a tuple of strings, of the values of all ranks: {("fsdp", "per_rank"): [...]}. */
#define TORCH_PER_RANK_FIRST "fsdp"
#define TORCH_PER_RANK_SECOND "per_rank"

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
        return fsdp_fail(err, FSDP_ERR_USAGE, "lists and dicts are nested more than %d deep",
                         FSDP_VALUE_DEPTH);
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

static fsdp_status torch_resave_value(fsdp_source *source, const fsdp_value *value, size_t most,
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

/* Restores fsdp_value_per_rank from the form that torch_resave_value gives it; any other value stays. */
static fsdp_status torch_restore_per_rank(fsdp_value *value, fsdp_error *err)
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

/* === blobs ==================================================================================== */

static const char where[] = "a stored value";

typedef struct blob_state {
    fsdp_memory_io io;
    fsdp_source *source;
    torch_memory *memory;
} blob_state;

static fsdp_status blob_read(void *state, size_t tensor, const fsdp_box *box, void *data,
                             fsdp_error *err)
{
    const blob_state *blob = state;
    return torch_memory_read(blob->memory, blob->source, tensor, box, data, err);
}

static void blob_close(void *state)
{
    blob_state *blob = state;
    torch_memory_close(blob->memory);
    fsdp_free(blob);
}

static fsdp_status add_value(blob_state *blob, size_t size, fsdp_error *err)
{
    torch_archive archive;
    torch_opening opening = {
        .source = blob->source, .memory = blob->memory, .stream = FSDP_NO_STREAM, .where = where};
    FSDP_TRY(fsdp_source_add_file(blob->source, "value", false, &opening.file, err));
    FSDP_TRY(torch_zip_open(&opening, 0, (int64_t)size, true, &archive, err));
    fsdp_value value = {0};
    fsdp_status st = torch_value_read(&archive, archive.pickle.root, &value, err);
    if (st == FSDP_OK)
        st = torch_restore_per_rank(&value, err);
    if (st == FSDP_OK)
        st = fsdp_source_add_value(blob->source, "", 0, &value, NULL, err);
    fsdp_value_release(&value);
    torch_archive_release(&archive);
    return st == FSDP_OK ? fsdp_source_complete(blob->source, err) : st;
}

fsdp_status fsdp_source_open_blob(const void *data, size_t size, fsdp_source **source_out,
                                  fsdp_error *err)
{
    static const fsdp_source_ops ops = {.read = blob_read, .close = blob_close};
    blob_state *blob = fsdp_alloc(1, sizeof *blob);
    if (!blob)
        return fsdp_fail_memory(err, "a value");
    fsdp_memory_io_borrow(&blob->io, data, size);
    fsdp_status st = torch_memory_create(&blob->memory, err);
    if (st == FSDP_OK)
        st = fsdp_source_create(&blob->io.io, "value", "torch", &blob->source, err);
    if (st != FSDP_OK) {
        blob_close(blob);
        return st;
    }
    fsdp_source *source = blob->source;
    fsdp_source_set_ops(source, &ops, blob);
    st = add_value(blob, size, err);
    if (st != FSDP_OK) {
        fsdp_source_close(source);
        return st;
    }
    *source_out = source;
    return FSDP_OK;
}

/* --- code in a blob ------------------------------------------------------------------------------ */

static void add_class(fsdp_text *names, const char *name)
{
    fsdp_text_addf(names, names->size > 0 ? ", %s" : "%s", name);
}

static fsdp_status open_file(fsdp_source *source, int *file_out, fsdp_error *err)
{
    torch_archive archive;
    torch_opening opening = {.source = source, .stream = FSDP_NO_STREAM, .where = where};
    FSDP_TRY(fsdp_source_add_file(source, "value", false, &opening.file, err));
    *file_out = opening.file;
    fsdp_status st = torch_file_open(&opening, &archive, err);
    torch_archive_release(&archive);
    return st;
}

/* A file that PyTorch may read although this reader cannot counts as code. */
static fsdp_status read_file(const void *data, size_t size, fsdp_text *names, fsdp_error *err)
{
    fsdp_memory_io io;
    fsdp_source *source = NULL;
    fsdp_error found = {0};
    int file = 0;
    fsdp_memory_io_borrow(&io, data, size);
    FSDP_TRY(fsdp_source_create(&io.io, "value", "torch", &source, err));
    fsdp_status st = open_file(source, &file, &found);
    if (st == FSDP_ERR_DAMAGED || st == FSDP_ERR_NOT_FOUND) {
        add_class(names, "bytes that cannot be read");
        st = FSDP_OK;
    } else if (st == FSDP_OK) {
        const char *name;
        for (size_t i = 0; (name = fsdp_source_code_at(source, (size_t)file, i)) != NULL; i++)
            add_class(names, name);
    } else if (err) {
        *err = found;
    }
    fsdp_source_close(source);
    return st;
}

/* A bare pickle. Other bytes that begin as one are data. */
static fsdp_status read_pickle(const void *data, size_t size, fsdp_text *names, fsdp_error *err)
{
    fsdp_pickle pickle;
    fsdp_pickle_options options = {.where = where, .depth = 1};
    fsdp_error found = {0};
    fsdp_status st = fsdp_pickle_parse(&options, data, size, &pickle, NULL, &found);
    if (st == FSDP_ERR_DAMAGED)
        return FSDP_OK;
    if (st != FSDP_OK && err)
        *err = found;
    bool is_code = false;
    for (size_t i = 0; i < pickle.count && !is_code; i++)
        is_code = fsdp_pickle_is_code(&pickle, (fsdp_node)i);
    if (is_code)
        add_class(names, "a pickle of unknown classes");
    fsdp_pickle_release(&pickle);
    return st;
}

fsdp_status fsdp_source_blob_code(const void *data, size_t size, fsdp_text *names, fsdp_error *err)
{
    const uint8_t *bytes = data;
    bool is_zip = size >= 4 && memcmp(data, "PK\3\4", 4) == 0;
    fsdp_status st = is_zip || torch_legacy_begins(bytes, size) ? read_file(data, size, names, err)
                     : size > 0 && bytes[0] == 0x80 ? read_pickle(data, size, names, err)
                                                    : FSDP_OK;
    return st == FSDP_OK && names->failed ? fsdp_fail_memory(err, "a name") : st;
}

/* --- reading the bytes of a value --------------------------------------------------------------- */

static fsdp_status copy_blob(const fsdp_source *source, const fsdp_source_blob *blob,
                             fsdp_text *out, fsdp_error *err)
{
    size_t size = (size_t)blob->size;
    char *data = fsdp_realloc(NULL, size + 1, 1);
    if (!data)
        return fsdp_fail_memory(err, "a value");
    fsdp_status st = fsdp_source_pread(source, blob->file, data, size, blob->offset, err);
    fsdp_text_add(out, data, size);
    fsdp_free(data);
    return st == FSDP_OK && out->failed ? fsdp_fail_memory(err, "a value") : st;
}

/* True for a value that contains a tensor of this source; such a value cannot be encoded by
 * itself. */
static bool holds_tensor(const fsdp_value *value)
{
    bool is_found = value->kind == FSDP_VALUE_TENSOR;
    bool is_list = value->kind == FSDP_VALUE_LIST || value->kind == FSDP_VALUE_DICT;
    for (size_t i = 0; is_list && !is_found && i < value->as.list.count; i++)
        is_found = holds_tensor(&value->as.list.items[i]);
    return is_found;
}

fsdp_status fsdp_source_save_value(fsdp_source *source, size_t entry, size_t most, fsdp_text *out,
                                   fsdp_error *err)
{
    const fsdp_source_entry *saved = &source->entries[entry];
    out->size = 0;
    if (saved->blob.file >= 0)
        return saved->blob.size <= (int64_t)most ? copy_blob(source, &saved->blob, out, err)
                                                 : FSDP_OK;
    if (source->ops.save_value)
        FSDP_TRY(source->ops.save_value(source->state, entry, most, out, err));
    if (out->size == 0 && holds_tensor(saved->value))
        return torch_resave_value(source, saved->value, most, out, err);
    return FSDP_OK;
}
