/*
 * One source of several: a model, its optimizer and the rest, which a framework saves side by side. The
 * joined source has their entries under the keys of the parts ("model.", "optim."), their files, streams and
 * checksums. A part stays open for what only its format can do: to find the place of elements, to read
 * storage of its own, to encode values.
 */
#include "base/data/name_path.h"
#include "formats/source/source_internal.h"

#include <string.h>

typedef struct joined_part {
    fsdp_source *source;
    const char *key;
    size_t own_size; /* bytes of the key above all of its names, which the part's key replaces */
    int *files;      /* the number of each of its files in the joined source */
    size_t tensors;  /* number of its first tensor there */
    int streams;     /* of its first stream */
} joined_part;

typedef struct joined {
    fsdp_source *source; /* the joined one, which owns this */
    joined_part *parts;
    size_t count;
    struct place_of_entry {
        size_t part, entry;
    } * entries; /* per entry of the joined source */
    size_t entry_room;
} joined;

static void close_parts(void *state)
{
    joined *all = state;
    for (size_t i = 0; i < all->count; i++) {
        fsdp_source_close(all->parts[i].source);
        fsdp_free(all->parts[i].files);
    }
    fsdp_free(all->parts);
    fsdp_free(all->entries);
    fsdp_free(all);
}

/* --- calls that go to a part -------------------------------------------------------------------- */

static joined_part *part_of(const joined *all, size_t tensor)
{
    size_t i = all->count - 1;
    while (i > 0 && all->parts[i].tensors > tensor)
        i--;
    return &all->parts[i];
}

static bool reads_itself(const fsdp_source *source)
{
    return source->ops.read && !source->ops.place;
}

static bool reads(void *state, size_t tensor)
{
    return reads_itself(part_of(state, tensor)->source);
}

static fsdp_status read_tensor(void *state, size_t tensor, const fsdp_box *box, void *data,
                               fsdp_error *err)
{
    const joined_part *part = part_of(state, tensor);
    return part->source->ops.read(part->source->state, tensor - part->tensors, box, data, err);
}

static void move_chunk(const joined_part *part, fsdp_source_chunk *chunk)
{
    chunk->file = chunk->file >= 0 ? part->files[chunk->file] : chunk->file;
    if (chunk->stream != FSDP_NO_STREAM)
        chunk->stream += part->streams;
}

static fsdp_status place(void *state, size_t tensor, fsdp_source_chunk *chunk, int64_t *strides,
                         fsdp_error *err)
{
    const joined_part *part = part_of(state, tensor);
    FSDP_TRY(
        part->source->ops.place(part->source->state, tensor - part->tensors, chunk, strides, err));
    move_chunk(part, chunk);
    return FSDP_OK;
}

static fsdp_status check_memory(void *state, size_t tensor, fsdp_error *err)
{
    const joined_part *part = part_of(state, tensor);
    const fsdp_source_ops *ops = &part->source->ops;
    return ops->check_memory ? ops->check_memory(part->source->state, tensor - part->tensors, err)
                             : FSDP_OK;
}

static size_t own_checks(const fsdp_source *source)
{
    return source->ops.check_count ? source->ops.check_count(source->state) : 0;
}

static size_t check_count(void *state)
{
    const joined *all = state;
    size_t count = 0;
    for (size_t i = 0; i < all->count; i++)
        count += own_checks(all->parts[i].source);
    return count;
}

static int64_t check_bytes(void *state)
{
    const joined *all = state;
    int64_t bytes = 0;
    for (size_t i = 0; i < all->count; i++) {
        const fsdp_source *source = all->parts[i].source;
        int64_t own = source->ops.check_bytes ? source->ops.check_bytes(source->state) : 0;
        if (__builtin_add_overflow(bytes, own, &bytes))
            return FSDP_SOURCE_CHECK_MOST;
    }
    return bytes;
}

static fsdp_status check(void *state, size_t number, fsdp_source_reader *reader, fsdp_error *err)
{
    const joined *all = state;
    size_t i = 0;
    for (; number >= own_checks(all->parts[i].source); i++)
        number -= own_checks(all->parts[i].source);
    fsdp_source *source = all->parts[i].source;
    return source->ops.check(source->state, number, reader, err);
}

static int64_t checked_bytes(void *state)
{
    const joined *all = state;
    int64_t bytes = 0;
    for (size_t i = 0; i < all->count; i++)
        bytes += fsdp_source_checked_bytes(all->parts[i].source);
    return bytes;
}

static fsdp_status save_value(void *state, size_t entry, size_t most, fsdp_text *out,
                              fsdp_error *err)
{
    const joined *all = state;
    fsdp_source *source = all->parts[all->entries[entry].part].source;
    return source->ops.save_value
               ? source->ops.save_value(source->state, all->entries[entry].entry, most, out, err)
               : FSDP_OK;
}

/* --- names -------------------------------------------------------------------------------------- */

/* The bytes of `own` and its dot when it is the key above all names of the part, else 0. Missing names may
 * have no entry and so no path. */
static size_t find_own(const fsdp_source *source, const char *own)
{
    size_t size = own ? strlen(own) : 0;
    for (size_t i = 0; size > 0 && i < source->entry_count; i++) {
        const fsdp_source_entry *entry = &source->entries[i];
        if (entry->path_count < 2 || fsdp_path_bytes(entry->path[0]) != size ||
            memcmp(entry->name, own, size) != 0)
            return 0;
    }
    for (size_t i = 0; size > 0 && i < source->missing_count; i++) {
        const missing_entry *missing = &source->missing[i];
        if (missing->size <= size || missing->name[size] != '.' ||
            memcmp(missing->name, own, size) != 0)
            return 0;
    }
    return source->entry_count > 0 && size > 0 ? size + 1 : 0;
}

typedef struct joined_name {
    fsdp_text text;
    int32_t *path; /* of the entry with the key */
} joined_name;

/* The names that are added next are nested below the key. */
static fsdp_status spell(joined *all, const joined_part *part, const fsdp_source_entry *entry,
                         joined_name *name, fsdp_error *err)
{
    size_t own = part->own_size, skipped = own > 0, count = 0, key = strlen(part->key);
    bool is_whole = fsdp_path_is_whole(entry->path, entry->path_count);
    *name = (joined_name){.path = fsdp_alloc(entry->path_count + 2, sizeof *name->path)};
    fsdp_text_add(&name->text, part->key, key);
    if (key > 0 && !is_whole)
        fsdp_text_add(&name->text, ".", 1);
    fsdp_text_add(&name->text, entry->name + own, entry->name_size - own);
    if (!name->path || name->text.failed)
        return fsdp_fail_memory(err, "the names of a checkpoint");
    if (key > 0)
        name->path[count++] = (int32_t)key;
    if (!entry->path)
        name->path[count++] = (int32_t)entry->name_size;
    for (size_t i = skipped; i < entry->path_count && !(is_whole && key > 0); i++)
        name->path[count++] = entry->path[i];
    fsdp_source_nest(all->source, name->path, entry->path || key > 0 ? count : 0);
    return FSDP_OK;
}

static void release_name(joined *all, joined_name *name)
{
    fsdp_source_nest(all->source, NULL, 0);
    fsdp_text_release(&name->text);
    fsdp_free(name->path);
}

/* --- entries ------------------------------------------------------------------------------------ */

static fsdp_status add_chunks(joined *all, const joined_part *part, size_t number, fsdp_error *err)
{
    const fsdp_source_tensor *tensor = &part->source->tensors[number];
    for (size_t i = 0; i < tensor->chunk_count; i++) {
        fsdp_source_chunk chunk = tensor->chunks[i];
        if (chunk.file < 0)
            chunk.origin = part->files[chunk.origin];
        move_chunk(part, &chunk);
        FSDP_TRY(fsdp_source_add_chunk(all->source, part->tensors + number, &chunk, err));
    }
    return FSDP_OK;
}

/* Numbers of tensors inside a value are those of the joined source. */
static void move_tensors(fsdp_value *value, size_t more)
{
    if (value->kind == FSDP_VALUE_TENSOR)
        value->as.tensor += more;
    bool is_list = value->kind == FSDP_VALUE_LIST || value->kind == FSDP_VALUE_DICT;
    for (size_t i = 0; is_list && i < value->as.list.count; i++)
        move_tensors(&value->as.list.items[i], more);
}

static fsdp_status add_value(joined *all, const joined_part *part, const fsdp_source_entry *entry,
                             const fsdp_text *name, fsdp_error *err)
{
    fsdp_value value = {0};
    fsdp_source_blob blob = entry->blob;
    blob.file = blob.file >= 0 ? part->files[blob.file] : -1;
    FSDP_TRY(fsdp_value_copy(entry->value, &value, err));
    move_tensors(&value, part->tensors);
    fsdp_status st = fsdp_source_add_value(all->source, name->data, name->size, &value, &blob, err);
    fsdp_value_release(&value);
    return st;
}

static fsdp_status add_entry(joined *all, size_t part_number, size_t number, fsdp_error *err)
{
    const joined_part *part = &all->parts[part_number];
    const fsdp_source_entry *entry = &part->source->entries[number];
    joined_name name;
    size_t at = all->source->entry_count;
    if (!fsdp_grow(&all->entries, &all->entry_room, at + 1, sizeof *all->entries))
        return fsdp_fail_memory(err, "the list of a checkpoint");
    all->entries[at] = (struct place_of_entry){part_number, number};
    fsdp_status st = spell(all, part, entry, &name, err);
    if (st == FSDP_OK && entry->is_alias)
        st = fsdp_source_add_alias(all->source, name.text.data, name.text.size,
                                   part->tensors + entry->tensor, err);
    else if (st == FSDP_OK && !entry->is_tensor)
        st = add_value(all, part, entry, &name.text, err);
    else if (st == FSDP_OK)
        st = fsdp_source_name_tensor(all->source, part->tensors + entry->tensor, name.text.data,
                                     name.text.size, err);
    release_name(all, &name);
    return st;
}

/* --- the whole ---------------------------------------------------------------------------------- */

/* Files with tensors and values come first, those of all parts, then files that were only noted. */
static fsdp_status add_files(joined *all, bool noted, fsdp_error *err)
{
    for (size_t p = 0; p < all->count; p++) {
        const fsdp_source *from = all->parts[p].source;
        size_t first = noted ? fsdp_source_content_count(from) : 0;
        size_t end = noted ? from->file_count : fsdp_source_content_count(from);
        for (size_t i = first; i < end; i++)
            FSDP_TRY(fsdp_source_take_file(all->source, &from->files[i], noted,
                                           &all->parts[p].files[i], err));
    }
    return FSDP_OK;
}

static fsdp_status add_packed(joined *all, joined_part *part, fsdp_error *err)
{
    int number;
    part->streams = (int)all->source->stream_count;
    for (size_t i = 0; i < part->source->stream_count; i++) {
        fsdp_source_stream stream = *fsdp_source_stream_at(part->source, i);
        stream.file = part->files[stream.file];
        FSDP_TRY(fsdp_source_add_stream(all->source, &stream, &number, err));
    }
    for (size_t i = 0; i < part->source->check_count; i++) {
        fsdp_source_crc crc = part->source->checks[i];
        crc.file = part->files[crc.file];
        FSDP_TRY(fsdp_source_add_crc(all->source, &crc, err));
    }
    return FSDP_OK;
}

static fsdp_status add_tensors(joined *all, joined_part *part, fsdp_error *err)
{
    size_t number;
    part->tensors = all->source->tensor_count;
    for (size_t i = 0; i < part->source->tensor_count; i++) {
        const fsdp_source_tensor *tensor = &part->source->tensors[i];
        FSDP_TRY(fsdp_source_add_inner(all->source, tensor->dtype, tensor->ndim, tensor->shape,
                                       &number, err));
        FSDP_TRY(add_chunks(all, part, i, err));
    }
    return FSDP_OK;
}

static fsdp_status add_entries(joined *all, bool aliases, fsdp_error *err)
{
    for (size_t p = 0; p < all->count; p++)
        for (size_t i = 0; i < all->parts[p].source->entry_count; i++)
            if (all->parts[p].source->entries[i].is_alias == aliases)
                FSDP_TRY(add_entry(all, p, i, err));
    return FSDP_OK;
}

/* Names without an entry; a tensor that is incomplete is found again by fsdp_source_complete. */
static fsdp_status add_missing(joined *all, const joined_part *part, fsdp_error *err)
{
    const fsdp_source *from = part->source;
    for (size_t i = 0; i < from->missing_count; i++) {
        fsdp_source_entry entry = {.name = from->missing[i].name,
                                   .name_size = from->missing[i].size};
        joined_name name;
        if (fsdp_source_has(from, entry.name, entry.name_size))
            continue;
        fsdp_status st = spell(all, part, &entry, &name, err);
        if (st == FSDP_OK)
            st = fsdp_source_add_missing(all->source, name.text.data, name.text.size, NULL, err);
        release_name(all, &name);
        FSDP_TRY(st);
    }
    return FSDP_OK;
}

/* The metadata of the first part that has some. */
static fsdp_status add_extras(joined *all, fsdp_error *err)
{
    for (size_t p = 0; p < all->count; p++) {
        const fsdp_source *from = all->parts[p].source;
        for (size_t i = 0; i < from->extra_count; i++)
            if (!fsdp_source_extra(all->source, from->extras[i].member))
                FSDP_TRY(fsdp_source_add_extra(all->source, from->extras[i].member,
                                               from->extras[i].json, strlen(from->extras[i].json),
                                               err));
    }
    return FSDP_OK;
}

static fsdp_status join(joined *all, fsdp_error *err)
{
    for (size_t p = 0; p < all->count; p++) {
        joined_part *part = &all->parts[p];
        part->files = fsdp_alloc(part->source->file_count, sizeof *part->files);
        if (!part->files)
            return fsdp_fail_memory(err, "the files of a checkpoint");
    }
    FSDP_TRY(add_files(all, false, err));
    FSDP_TRY(add_files(all, true, err));
    for (size_t p = 0; p < all->count; p++) {
        FSDP_TRY(add_packed(all, &all->parts[p], err));
        FSDP_TRY(add_tensors(all, &all->parts[p], err));
    }
    FSDP_TRY(add_entries(all, false, err));
    FSDP_TRY(add_entries(all, true, err));
    FSDP_TRY(add_extras(all, err));
    for (size_t p = 0; p < all->count; p++) {
        FSDP_TRY(add_missing(all, &all->parts[p], err));
        fsdp_source_close_files(all->parts[p].source);
    }
    atomic_store(&all->source->checked_bytes, 0); /* the parts count them */
    return fsdp_source_complete(all->source, err);
}

static joined *take_parts(const fsdp_source_part *parts, size_t count)
{
    joined *all = fsdp_alloc(1, sizeof *all);
    joined_part *taken = fsdp_alloc(count, sizeof *taken);
    if (!all || !taken) {
        fsdp_free(all);
        fsdp_free(taken);
        return NULL;
    }
    all->parts = taken;
    all->count = count;
    for (size_t i = 0; i < count; i++)
        taken[i] = (joined_part){.source = parts[i].source,
                                 .key = parts[i].key,
                                 .own_size = find_own(parts[i].source, parts[i].own_key)};
    return all;
}

fsdp_status fsdp_source_join(const char *path, const fsdp_source_part *parts, size_t count,
                             const fsdp_source_opts *opts, fsdp_source **source_out,
                             fsdp_error *err)
{
    fsdp_source_ops ops = {.save_value = save_value,
                           .check_memory = check_memory,
                           .check_count = check_count,
                           .check_bytes = check_bytes,
                           .check = check,
                           .checked_bytes = checked_bytes,
                           .close = close_parts};
    fsdp_source *source = NULL;
    joined *all = take_parts(parts, count);
    fsdp_status st =
        all ? fsdp_source_create(parts[0].source->io, path, parts[0].source->format, &source, err)
            : fsdp_fail_memory(err, path);
    for (size_t i = 0; i < count && st != FSDP_OK; i++)
        fsdp_source_close(parts[i].source);
    *source_out = NULL;
    if (st != FSDP_OK) {
        fsdp_free(all ? all->parts : NULL);
        fsdp_free(all);
        return st;
    }
    for (size_t i = 0; i < count; i++) {
        ops.read = reads_itself(parts[i].source) ? read_tensor : ops.read;
        ops.place = parts[i].source->ops.place ? place : ops.place;
    }
    ops.reads = ops.read && ops.place ? reads : NULL;
    all->source = source;
    fsdp_source_set_ops(source, &ops, all);
    fsdp_source_tolerate(source, opts);
    st = join(all, err);
    if (st == FSDP_OK)
        *source_out = source;
    else
        fsdp_source_close(source);
    return st;
}
