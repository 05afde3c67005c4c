/*
 * Encodes parts of pickles again: see torch_resave.h. Every node is written as it was read, so
 * that Python makes the same objects; shared nodes stay shared. The opcodes are those of
 * protocol 4, which Python accepts in any pickle. The protocol number stays that of the file,
 * because it decides how names of Python 2 are interpreted.
 */
#include "formats/torch/torch_resave.h"

#include "base/core/mem.h"
#include "base/data/name_table.h"
#include "kernels/kernels.h"

#include <stdio.h>
#include <string.h>

enum {
    OP_GLOBAL = 'c',
    OP_BINBYTES = 'B',
    OP_BINBYTES8 = 0x8e,
    OP_BYTEARRAY8 = 0x96,
    OP_LONG1 = 0x8a,
    OP_LONG4 = 0x8b,
    OP_EMPTY_SET = 0x8f,
    OP_ADDITEMS = 0x90,
    OP_FROZENSET = 0x91,
    OP_NEWOBJ_EX = 0x92,
    MORE_SET = 3,                   /* see fsdp_pickle_call */
    DEEPEST = 3 * FSDP_PICKLE_DEPTH /* calls nest through their arguments, too */
};

typedef struct resaving {
    const torch_archive *archive;
    fsdp_pickler pickler;
    uint32_t *memo; /* per node: its memo number plus 1; 0: not written yet */
    bool *is_open;  /* per node: being written */
    fsdp_name_table keys;
    const torch_storage **storages; /* the archive's links, by number */
    size_t count, room;
    int64_t bytes; /* of all storages */
    bool is_impossible, no_memory;
} resaving;

static void emit(resaving *work, fsdp_node node, int depth);

static const fsdp_pickle_node *node_at(const resaving *work, fsdp_node node)
{
    return fsdp_pickle_at(&work->archive->pickle, node);
}

static void add_op(resaving *work, int op)
{
    fsdp_text_add(&work->pickler.text, &(char){(char)op}, 1);
}

/* Adds an opcode, a little-endian count and so many bytes. */
static void add_counted(resaving *work, int op, size_t count_bytes, const char *data, size_t size)
{
    add_op(work, op);
    for (size_t i = 0; i < count_bytes; i++)
        add_op(work, (int)((uint64_t)size >> 8 * i & 0xff));
    fsdp_text_add(&work->pickler.text, data, size);
}

static void put(resaving *work, fsdp_node node)
{
    work->memo[node] = fsdp_pickler_put(&work->pickler) + 1;
}

/* --- leaves ----------------------------------------------------------------------------------- */

static void emit_bytes(resaving *work, const fsdp_pickle_node *at)
{
    if (at->kind == FSDP_NODE_BYTEARRAY)
        add_counted(work, OP_BYTEARRAY8, 8, at->as.text, at->count);
    else
        add_counted(work, OP_BINBYTES, 4, at->as.text, at->count);
}

static void emit_bigint(resaving *work, const fsdp_pickle_node *at)
{
    bool is_short = at->count <= UINT8_MAX;
    add_counted(work, is_short ? OP_LONG1 : OP_LONG4, is_short ? 1 : 4, at->as.text, at->count);
}

static void emit_float(resaving *work, double number)
{
    const fsdp_value value = fsdp_value_f64(number);
    work->is_impossible |= fsdp_pickler_value(&work->pickler, &value, NULL) != FSDP_OK;
}

static void emit_global(resaving *work, const fsdp_pickle_node *at)
{
    const fsdp_pickle_global *global = at->as.global;
    work->is_impossible |= memchr(global->module, '\n', global->module_size) ||
                           memchr(global->name, '\n', global->name_size);
    add_op(work, OP_GLOBAL);
    fsdp_text_add(&work->pickler.text, global->module, global->module_size);
    add_op(work, '\n');
    fsdp_text_add(&work->pickler.text, global->name, global->name_size);
    add_op(work, '\n');
}

/* --- storages --------------------------------------------------------------------------------- */

static const torch_storage *find_storage(const torch_archive *archive, fsdp_node node)
{
    size_t low = 0, high = archive->link_count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (archive->links[middle].node < node)
            low = middle + 1;
        else
            high = middle;
    }
    return low < archive->link_count && archive->links[low].node == node
               ? &archive->links[low].storage
               : NULL;
}

/* The number of a storage in the new archive: equal keys are one storage. */
static size_t number_storage(resaving *work, const torch_storage_id *id,
                             const torch_storage *storage)
{
    const uint64_t *known = fsdp_name_table_find(&work->keys, id->key, id->key_size);
    if (known)
        return (size_t)*known;
    if (!fsdp_grow(&work->storages, &work->room, work->count + 1, sizeof *work->storages) ||
        !fsdp_name_table_put(&work->keys, id->key, id->key_size, work->count)) {
        work->no_memory = true;
        return 0;
    }
    work->storages[work->count] = storage;
    work->is_impossible |= fsdp_add_overflow(work->bytes, storage->size, &work->bytes);
    return work->count++;
}

static void emit_storage(resaving *work, fsdp_node node, int depth)
{
    torch_storage_id id;
    char key[24];
    const torch_storage *storage = find_storage(work->archive, node);
    fsdp_status st = torch_read_storage_id(work->archive, node, &id, NULL);
    bool is_view = st == FSDP_OK && id.view != 0 && node_at(work, id.view)->kind != FSDP_NODE_NONE;
    if (st != FSDP_OK || !storage || storage->file < 0 || is_view) {
        work->is_impossible = true;
        return;
    }
    int size = snprintf(key, sizeof key, "%zu", number_storage(work, &id, storage));
    fsdp_pickler_op(&work->pickler, FSDP_OP_MARK);
    fsdp_pickler_text(&work->pickler, "storage", strlen("storage"));
    emit(work, fsdp_pickle_element(&work->archive->pickle, node_at(work, node)->as.child, 1),
         depth);
    fsdp_pickler_text(&work->pickler, key, (size_t)size);
    fsdp_pickler_text(&work->pickler, "cpu", strlen("cpu"));
    fsdp_pickler_int(&work->pickler, id.elements);
    fsdp_pickler_op(&work->pickler, FSDP_OP_TUPLE);
    fsdp_pickler_op(&work->pickler, FSDP_OP_PERSID);
}

/* --- containers ------------------------------------------------------------------------------- */

static void emit_items(resaving *work, fsdp_node node, int closing, int depth)
{
    const fsdp_pickle_node *at = node_at(work, node);
    if (at->count == 0)
        return;
    fsdp_pickler_op(&work->pickler, FSDP_OP_MARK);
    for (uint32_t i = 0; i < at->count; i++)
        emit(work, at->as.items[i], depth);
    add_op(work, closing);
}

/* Writes a container before its items, which may contain it again. */
static void emit_container(resaving *work, fsdp_node node, int opening, int closing, int depth)
{
    add_op(work, opening);
    put(work, node);
    emit_items(work, node, closing, depth);
}

/* Writes a tuple or frozenset after its items; one that contains itself cannot be written. */
static void emit_closed(resaving *work, fsdp_node node, int closing, int depth)
{
    const fsdp_pickle_node *at = node_at(work, node);
    fsdp_pickler_op(&work->pickler, FSDP_OP_MARK);
    for (uint32_t i = 0; i < at->count; i++)
        emit(work, at->as.items[i], depth);
    add_op(work, closing);
    put(work, node);
}

/* --- calls ------------------------------------------------------------------------------------ */

static void emit_arguments(resaving *work, const fsdp_pickle_node *at, int depth)
{
    if (at->as.call->args != 0)
        emit(work, at->as.call->args, depth);
    else
        fsdp_pickler_op(&work->pickler, FSDP_OP_EMPTY_TUPLE);
}

static void emit_part(resaving *work, fsdp_node part, int closing, int depth)
{
    if (part != 0)
        emit_items(work, part, closing, depth);
}

static void emit_call(resaving *work, fsdp_node node, int depth)
{
    const fsdp_pickle *pickle = &work->archive->pickle;
    const fsdp_pickle_node *at = node_at(work, node);
    fsdp_node kwargs = fsdp_pickle_kwargs(pickle, at);
    emit(work, at->as.call->callable, depth);
    emit_arguments(work, at, depth);
    if (kwargs != 0)
        emit(work, kwargs, depth);
    add_op(work, kwargs != 0                    ? OP_NEWOBJ_EX
                 : at->flags & FSDP_NODE_OBJECT ? FSDP_OP_NEWOBJ
                                                : FSDP_OP_REDUCE);
    put(work, node);
    work->is_open[node] = false; /* the rest may contain it */
    emit_part(work, fsdp_pickle_list_items(pickle, at), FSDP_OP_APPENDS, depth);
    emit_part(work, fsdp_pickle_dict_items(pickle, at), FSDP_OP_SETITEMS, depth);
    emit_part(work, fsdp_pickle_element(pickle, at->as.call->more, MORE_SET), OP_ADDITEMS, depth);
    if (node_at(work, at->as.call->state)->kind == FSDP_NODE_ABSENT)
        return;
    emit(work, at->as.call->state, depth);
    fsdp_pickler_op(&work->pickler, FSDP_OP_BUILD);
}

/* --- all nodes -------------------------------------------------------------------------------- */

static void emit_node(resaving *work, fsdp_node node, int depth)
{
    const fsdp_pickle_node *at = node_at(work, node);
    fsdp_pickler *pickler = &work->pickler;
    switch (at->kind) {
    case FSDP_NODE_NONE: fsdp_pickler_op(pickler, FSDP_OP_NONE); break;
    case FSDP_NODE_BOOL: fsdp_pickler_op(pickler, at->as.i64 ? FSDP_OP_TRUE : FSDP_OP_FALSE); break;
    case FSDP_NODE_INT: fsdp_pickler_int(pickler, at->as.i64); break;
    case FSDP_NODE_BIGINT: emit_bigint(work, at); break;
    case FSDP_NODE_FLOAT: emit_float(work, at->as.f64); break;
    case FSDP_NODE_STR:
        fsdp_pickler_text(pickler, at->as.text, at->count);
        put(work, node);
        break;
    case FSDP_NODE_BYTES:
    case FSDP_NODE_BYTEARRAY:
        emit_bytes(work, at);
        put(work, node);
        break;
    case FSDP_NODE_TUPLE: emit_closed(work, node, FSDP_OP_TUPLE, depth); break;
    case FSDP_NODE_FROZENSET: emit_closed(work, node, OP_FROZENSET, depth); break;
    case FSDP_NODE_LIST:
        emit_container(work, node, FSDP_OP_EMPTY_LIST, FSDP_OP_APPENDS, depth);
        break;
    case FSDP_NODE_DICT:
        emit_container(work, node, FSDP_OP_EMPTY_DICT, FSDP_OP_SETITEMS, depth);
        break;
    case FSDP_NODE_SET: emit_container(work, node, OP_EMPTY_SET, OP_ADDITEMS, depth); break;
    case FSDP_NODE_GLOBAL:
        emit_global(work, at);
        put(work, node);
        break;
    case FSDP_NODE_CALL: emit_call(work, node, depth); break;
    case FSDP_NODE_PERSISTENT:
        emit_storage(work, node, depth);
        put(work, node);
        break;
    default: work->is_impossible = true;
    }
}

static bool must_exist_first(const fsdp_pickle_node *at)
{
    return at->kind == FSDP_NODE_TUPLE || at->kind == FSDP_NODE_FROZENSET ||
           at->kind == FSDP_NODE_CALL;
}

static void emit(resaving *work, fsdp_node node, int depth)
{
    if (work->memo[node] != 0) {
        fsdp_pickler_get(&work->pickler, work->memo[node] - 1);
        return;
    }
    work->is_impossible |= depth > DEEPEST || work->is_open[node];
    if (work->is_impossible || work->no_memory || work->pickler.text.failed)
        return;
    work->is_open[node] = must_exist_first(node_at(work, node));
    emit_node(work, node, depth + 1);
    work->is_open[node] = false;
}

/* --- the archive ------------------------------------------------------------------------------ */

static fsdp_status read_storage(fsdp_source *source, const torch_storage *storage, char *data,
                                fsdp_error *err)
{
    size_t size = (size_t)storage->size;
    if (storage->stream != FSDP_NO_STREAM)
        return fsdp_source_stream_pread(source, storage->stream, data, size, storage->offset, err);
    return fsdp_source_pread(source, storage->file, data, size, storage->offset, err);
}

static fsdp_status add_storage(const resaving *work, size_t i, fsdp_zip_record *record,
                               fsdp_text *out, fsdp_error *err)
{
    size_t size = (size_t)record->size;
    char *data = fsdp_realloc(NULL, size + 1, 1);
    if (!data)
        return fsdp_fail_memory(err, "a value");
    fsdp_status st =
        size > 0 ? read_storage(work->archive->source, work->storages[i], data, err) : FSDP_OK;
    record->crc = size > 0 && st == FSDP_OK ? fsdp_crc32(0, data, size) : 0;
    if (st == FSDP_OK)
        fsdp_zip_add_record(out, record, data);
    fsdp_free(data);
    return st;
}

static fsdp_status add_archive(resaving *work, size_t most, fsdp_text *out, fsdp_error *err)
{
    fsdp_zip_record *records = fsdp_alloc(work->count + TORCH_FIXED, sizeof *records);
    int64_t size;
    if (!records)
        return fsdp_fail_memory(err, "a value");
    for (size_t i = 0; i < work->count; i++)
        records[TORCH_LEADING + i].size = work->storages[i]->size;
    fsdp_status st = torch_place_archive(records, work->count, &work->pickler.text, &size, err);
    if (st == FSDP_OK && size <= (int64_t)most) {
        torch_emit_leading(out, records, &work->pickler.text);
        for (size_t i = 0; i < work->count && st == FSDP_OK; i++)
            st = add_storage(work, i, &records[TORCH_LEADING + i], out, err);
        torch_emit_closing(out, records, work->count);
    }
    fsdp_free(records);
    if (st == FSDP_OK && out->failed)
        st = fsdp_fail_memory(err, "a value");
    return st;
}

/* Python 2 has other names for its classes, which only protocols below 3 use. */
static void begin_pickle(resaving *work)
{
    const char *data = work->archive->data;
    fsdp_pickler_begin(&work->pickler);
    if (!work->pickler.text.failed && data && data[0] == '\x80' && data[1] > 2)
        work->pickler.text.data[1] = data[1];
}

static fsdp_status resave(resaving *work, fsdp_node node, size_t most, fsdp_text *out,
                          fsdp_error *err)
{
    size_t count = work->archive->pickle.count;
    if (node >= count)
        return fsdp_fail(err, FSDP_ERR_DAMAGED, "%s was changed while it was read",
                         work->archive->where);
    work->memo = fsdp_alloc(count, sizeof *work->memo);
    work->is_open = fsdp_alloc(count, sizeof *work->is_open);
    if (!work->memo || !work->is_open)
        return fsdp_fail_memory(err, "a value");
    begin_pickle(work);
    emit(work, node, 0);
    fsdp_pickler_op(&work->pickler, FSDP_OP_STOP);
    if (work->no_memory || work->pickler.text.failed)
        return fsdp_fail_memory(err, "a value");
    if (work->is_impossible || work->bytes > (int64_t)most || work->pickler.text.size > most)
        return FSDP_OK;
    return add_archive(work, most, out, err);
}

fsdp_status torch_resave_node(const torch_archive *archive, fsdp_node node, size_t most,
                              fsdp_text *out, fsdp_error *err)
{
    resaving work = {.archive = archive, .is_impossible = archive->is_swapped};
    out->size = 0;
    fsdp_status st = resave(&work, node, most, out, err);
    fsdp_pickler_release(&work.pickler);
    fsdp_name_table_release(&work.keys);
    fsdp_free(work.storages);
    fsdp_free(work.memo);
    fsdp_free(work.is_open);
    return st;
}
