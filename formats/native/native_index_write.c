/*
 * Writes the index of a shard file: makes the segment, puts it into its place and hashes it.
 * native_index.h has the layout; the mirror is the first half of native_read.c.
 */
#include "formats/native/native_write.h"

#include "base/data/flow.h"

#include <string.h>

int64_t fsdp_shard_index_bytes(const fsdp_shard_dataset *datasets, const fsdp_shard_box *boxes,
                               size_t box_count)
{
    uint64_t dims = 0, blocks = 0, names = 0;
    for (size_t i = 0; i < box_count; i++) {
        const fsdp_shard_dataset *dataset = &datasets[boxes[i].dataset];
        const fsdp_shard_box *box = &boxes[i];
        dims += 3 * (uint64_t)box->ndim;
        blocks += (uint64_t)fsdp_native_blocks(
            &(fsdp_blocking){box->ndim, box->len, NULL, fsdp_dtype_size(dataset->dtype)});
        names += boxes[i].name_size;
    }
    return (int64_t)(sizeof(index_head) + box_count * sizeof(index_record) +
                     dims * sizeof(int64_t) + blocks * sizeof(fsdp_hash) + (names + 7) / 8 * 8);
}

typedef struct index_sizes {
    uint64_t dims, blocks, frames, name_bytes, total;
} index_sizes;

static index_sizes measure_index(const fsdp_shard_writer *w)
{
    index_sizes sizes = {0};
    for (size_t i = 0; i < w->box_count; i++) {
        sizes.dims += 3 * (uint64_t)w->boxes[i].ndim;
        sizes.blocks += (uint64_t)w->states[i].block_count;
        sizes.frames += w->states[i].encode ? (uint64_t)w->states[i].block_count : 0;
        sizes.name_bytes += w->boxes[i].name_size;
    }
    sizes.name_bytes = (sizes.name_bytes + 7) / 8 * 8;
    sizes.total = sizeof(index_head) + w->box_count * sizeof(index_record) +
                  sizes.dims * sizeof(int64_t) + sizes.blocks * sizeof(fsdp_hash) +
                  sizes.frames * sizeof(fsdp_frame) + sizes.name_bytes;
    return sizes;
}

static void add_head(const fsdp_shard_writer *w, const index_sizes *sizes, fsdp_text *text)
{
    index_head head = {.version = 1,
                       .rank = w->id.rank,
                       .world = w->id.world,
                       .step = w->id.step,
                       .size = sizes->total,
                       .boxes = w->box_count,
                       .dims = sizes->dims,
                       .blocks = sizes->blocks,
                       .frames = sizes->frames,
                       .name_bytes = sizes->name_bytes};
    memcpy(head.magic, FSDP_INDEX_MAGIC, sizeof head.magic);
    memcpy(head.run, w->id.run, sizeof head.run);
    fsdp_text_add(text, (const char *)&head, sizeof head);
}

static void add_records(const fsdp_shard_writer *w, fsdp_text *text)
{
    index_sizes at = {0};
    for (size_t i = 0; i < w->box_count; i++) {
        const fsdp_shard_box *box = &w->boxes[i];
        const box_state *state = &w->states[i];
        const fsdp_shard_dataset *dataset = fsdp_writer_dataset(w, i);
        index_record record = {.tensor = box->tensor,
                               .part = box->part,
                               .dtype = (uint16_t)dataset->dtype,
                               .ndim = (uint16_t)box->ndim,
                               .flags = (state->encode ? FSDP_INDEX_ENCODED : 0) |
                                        (box->packed ? FSDP_INDEX_PACKED : 0),
                               .offset = state->encode ? 0 : fsdp_writer_offset(w, i),
                               .dims = at.dims,
                               .hashes = at.blocks,
                               .frames = at.frames,
                               .block_count = (uint64_t)state->block_count,
                               .name = at.name_bytes,
                               .name_size = box->name_size};
        fsdp_text_add(text, (const char *)&record, sizeof record);
        at.dims += 3 * (uint64_t)box->ndim;
        at.blocks += (uint64_t)state->block_count;
        at.frames += state->encode ? (uint64_t)state->block_count : 0;
        at.name_bytes += box->name_size;
    }
}

static void add_dims(const fsdp_shard_writer *w, fsdp_text *text)
{
    for (size_t i = 0; i < w->box_count; i++) {
        const fsdp_shard_box *box = &w->boxes[i];
        size_t size = (size_t)box->ndim * sizeof(int64_t);
        int64_t strides[FSDP_MAX_DIMS];
        fsdp_writer_strides(w, i, strides);
        fsdp_text_add(text, (const char *)box->lo, size);
        fsdp_text_add(text, (const char *)box->len, size);
        fsdp_text_add(text, (const char *)(w->states[i].encode ? w->states[i].chunk : strides),
                      size);
    }
}

fsdp_status fsdp_shard_segment(fsdp_shard_writer *w, fsdp_text *text, fsdp_error *err)
{
    for (size_t i = 0; i < w->box_count; i++)
        if (w->states[i].done != w->states[i].count)
            return fsdp_fail(err, FSDP_ERR_INTERNAL, "'%s': box %zu is incomplete", w->path, i);
    index_sizes sizes = measure_index(w);
    size_t before = text->size;
    add_head(w, &sizes, text);
    add_records(w, text);
    add_dims(w, text);
    for (size_t i = 0; i < w->box_count; i++)
        fsdp_text_add(text, (const char *)w->states[i].hashes,
                      (size_t)w->states[i].block_count * sizeof(fsdp_hash));
    for (size_t i = 0; i < w->box_count; i++)
        if (w->states[i].encode)
            fsdp_text_add(text, (const char *)w->states[i].frames,
                          (size_t)w->states[i].block_count * sizeof(fsdp_frame));
    for (size_t i = 0; i < w->box_count; i++)
        fsdp_text_add(text, w->boxes[i].name, w->boxes[i].name_size);
    while (!text->failed && text->size - before < sizes.total)
        fsdp_text_add(text, "", 1);
    return text->failed ? fsdp_fail_memory(err, "a shard index") : FSDP_OK;
}

/* Adds the index dataset of an encoded file, whose size is known only now, and closes libhdf5's
 * file. */
static fsdp_status close_layout(fsdp_shard_writer *w, int64_t index_size, fsdp_error *err)
{
    fsdp_h5_file *h5 = w->h5;
    int64_t size = 0;
    w->index_room = index_size;
    FSDP_TRY(fsdp_h5_add_index(h5, index_size, &w->index_offset, err));
    w->h5 = NULL;
    return fsdp_h5_close(h5, &size, err);
}

fsdp_status fsdp_shard_put_index(fsdp_shard_writer *w, const void *data, size_t size,
                                 fsdp_error *err)
{
    if (w->h5)
        FSDP_TRY(close_layout(w, (int64_t)size, err));
    if (w->joined || (int64_t)size > w->index_room - w->index_done)
        return fsdp_fail(err, FSDP_ERR_INTERNAL, "'%s': the index does not fit in its place",
                         w->path);
    fsdp_flow("formats/native/native_index_write.c", "index: %zu bytes", size);
    fsdp_hasher_add(w->index_hasher, data, size);
    FSDP_TRY(fsdp_io_write(w->file, w->path, data, size, w->index_offset + w->index_done, err));
    w->index_done += (int64_t)size;
    return FSDP_OK;
}

static fsdp_status put_local_index(fsdp_shard_writer *w, fsdp_error *err)
{
    fsdp_text text = {0};
    fsdp_status st = fsdp_shard_segment(w, &text, err);
    if (st == FSDP_OK)
        st = fsdp_shard_put_index(w, text.data, text.size, err);
    fsdp_text_release(&text);
    return st;
}

/* Syncs a large file part after part, which takes long, so that peers see progress. */
static fsdp_status sync_in_parts(fsdp_shard_writer *w, int64_t size, fsdp_error *err)
{
    const int64_t part = 16 << 20;
    for (int64_t at = 0; w->alive && at < size; at += part) {
        w->alive(w->alive_user, false);
        fsdp_io_await_sync(w->file, at, size - at < part ? size - at : part);
    }
    fsdp_writer_alive(w, true);
    return fsdp_io_sync(w->file, w->path, err);
}

fsdp_status fsdp_writer_close(fsdp_shard_writer *w, fsdp_file_record *record_out, fsdp_error *err)
{
    if (!w->joined && w->index_done == 0)
        FSDP_TRY(put_local_index(w, err));
    if (w->index_done != w->index_room)
        return fsdp_fail(err, FSDP_ERR_INTERNAL, "'%s': the index is incomplete", w->path);
    fsdp_file_record record = {.index_offset = w->index_offset,
                               .index_size = w->index_done,
                               .index_hash = fsdp_hasher_value(w->index_hasher)};
    int errnum = w->file->ops->size(w->file, &record.size);
    if (errnum < 0)
        return fsdp_fail_errno(err, -errnum, "cannot get the size of '%s'", w->path);
    if (w->sync)
        FSDP_TRY(sync_in_parts(w, record.size, err));
    FSDP_TRY(fsdp_io_close(&w->file, w->path, err));
    if (record_out)
        *record_out = record;
    return FSDP_OK;
}
