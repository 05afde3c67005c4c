/*
 * Damage on purpose: indexes and manifests whose hashes are right and whose contents lie. Each is
 * refused with a text that names the file, or holds what it says; memory stays small.
 */
#include "tests/unit/statedict/checkpoint/spoil.h"

#include <sys/resource.h>

enum { MEMORY = 512 << 20 };

/* Limits the address space, so that an allocation for a false size fails; sanitizers need that
 * space themselves. */
static void bound_memory(void)
{
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
    struct rlimit limit = {MEMORY, MEMORY};
    cr_assert_eq(setrlimit(RLIMIT_AS, &limit), 0);
#endif
    spoil_make_folder();
}

TestSuite(hostile, .init = bound_memory, .fini = spoil_remove_folder, .timeout = 120);

static int64_t peak_kib(void)
{
    struct rusage usage;
    cr_assert_eq(getrusage(RUSAGE_SELF, &usage), 0);
    return usage.ru_maxrss;
}

/* Load and deep verify; the first must fail with this status, saying `words` and where. */
static void expect(const char *dir, const char *what, fsdp_status status, const char *file,
                   const char *words)
{
    fsdp_error err = {0}, verified = {0};
    fsdp_status st = spoil_load(dir, 1, &err);
    cr_assert_eq(st, status, "%s: %d %s", what, st, err.text);
    cr_assert_not_null(strstr(err.text, words), "%s: '%s' is not in: %s", what, words, err.text);
    cr_assert_not_null(strstr(err.text, file), "%s: '%s' is not in: %s", what, file, err.text);
    fsdp_verify_opts deep = {.level = FSDP_VERIFY_DEEP, .threads = 1};
    st = fsdp_checkpoint_verify(spoil_path(dir), &deep, NULL, &verified);
    cr_assert(st == FSDP_DIFFERS || st == status, "%s: verify says %d %s", what, st, verified.text);
}

/* --- indexes ---------------------------------------------------------------------------------- */

typedef struct index_view {
    index_head *head;
    index_record *records;
    int64_t *dims; /* of record 0: lo[2], len[2], strides or chunk[2] */
    fsdp_hash *hashes;
    fsdp_frame *frames;
} index_view;

static index_view view_index(char *index)
{
    index_view view = {.head = (index_head *)(void *)index};
    view.records = (index_record *)(void *)(index + sizeof *view.head);
    view.dims = (int64_t *)(void *)(view.records + view.head->boxes);
    view.hashes = (fsdp_hash *)(void *)(view.dims + view.head->dims);
    view.frames = (fsdp_frame *)(void *)(view.hashes + view.head->blocks);
    return view;
}

typedef struct index_lie {
    const char *what;
    void (*tell)(index_view *view);
    const char *words;
} index_lie;

static int64_t shard_size; /* of the file whose index lies */

#define LIE(name, statement)           \
    static void name(index_view *view) \
    {                                  \
        statement;                     \
    }

LIE(many_boxes, view->head->boxes = UINT64_MAX)
LIE(wrapping_boxes, view->head->boxes = (uint64_t)1 << 60)
LIE(many_dims, view->head->dims = (uint64_t)1 << 61)
LIE(many_blocks, view->head->blocks = (uint64_t)1 << 60)
LIE(many_frames, view->head->frames = UINT64_MAX / 16)
LIE(many_name_bytes, view->head->name_bytes = UINT64_MAX)
LIE(fewer_boxes, view->head->boxes -= 1)
LIE(no_size, view->head->size = 0)
LIE(small_size, view->head->size = 8)
LIE(odd_size, view->head->size -= 4)
LIE(large_size, view->head->size += 8)
LIE(huge_size, view->head->size = UINT64_MAX - 7)
LIE(other_mark, view->head->magic[7] = '2')
LIE(other_rank, view->head->rank = 1)
LIE(other_world, view->head->world = 3)
LIE(other_step, view->head->step = -1)
LIE(other_run, view->head->run[15] ^= 1)
LIE(twice, view->records[1].tensor = view->records[0].tensor)
LIE(backwards, view->records[1].tensor = 3)
LIE(strange_dtype, view->records[0].dtype = FSDP_DTYPE_COUNT)
LIE(no_dtype, view->records[0].dtype = FSDP_DTYPE_NONE)
LIE(huge_dtype, view->records[0].dtype = UINT16_MAX)
LIE(many_dims_of_one, view->records[0].ndim = FSDP_MAX_DIMS + 1)
LIE(all_dims_of_one, view->records[0].ndim = UINT16_MAX)
LIE(dims_outside, view->records[0].dims = view->head->dims - 5)
LIE(dims_far_outside, view->records[0].dims = UINT64_MAX - 2)
LIE(hashes_outside, view->records[0].hashes = UINT64_MAX)
LIE(hashes_just_outside, view->records[0].hashes = view->head->blocks)
LIE(name_outside, view->records[0].name = UINT64_MAX - 3)
LIE(long_name, view->records[0].name_size = (uint64_t)1 << 40)
LIE(negative_offset, view->records[0].offset = -8)
LIE(late_offset, view->records[0].offset += 1 << 20)
LIE(next_offset, view->records[0].offset = shard_size + 1 - view->dims[2] * view->dims[4])
LIE(last_offset, view->records[0].offset = INT64_MAX)
LIE(negative_lo, view->dims[0] = -1)
LIE(huge_lo, view->dims[0] = INT64_MAX - 3)
LIE(no_rows, view->dims[2] = 0)
LIE(negative_rows, view->dims[2] = -23)
LIE(many_rows, view->dims[2] = (int64_t)1 << 40)
LIE(overflowing_rows, view->dims[2] = view->dims[3] = (int64_t)1 << 33)
LIE(more_rows, view->dims[2] += 1000)
LIE(same_row_again, view->dims[4] = 0; view->records[0].flags = 0)
LIE(overlapping_rows, view->dims[4] -= 8; view->records[0].flags = 0)
LIE(negative_stride, view->dims[4] = -240; view->records[0].flags = 0)
LIE(huge_stride, view->dims[4] = INT64_MAX / 2; view->records[0].flags = 0)
LIE(gaps, view->dims[4] += 4)
LIE(no_blocks, view->records[0].block_count = 0)
LIE(more_blocks, view->records[0].block_count = 2)
LIE(all_blocks, view->records[0].block_count = UINT64_MAX)
LIE(encoded_without_frames, view->records[0].flags |= FSDP_INDEX_ENCODED)

static const index_lie raw_lies[] = {
    {"2^64 boxes", many_boxes, "do not add up"},
    {"boxes whose bytes wrap", wrapping_boxes, "do not add up"},
    {"2^61 dims", many_dims, "do not add up"},
    {"2^60 blocks", many_blocks, "do not add up"},
    {"2^60 frames", many_frames, "do not add up"},
    {"2^64 name bytes", many_name_bytes, "do not add up"},
    {"a box less", fewer_boxes, "do not add up"},
    {"a segment of no bytes", no_size, "segment is longer"},
    {"a segment within its head", small_size, "segment is longer"},
    {"a segment of odd size", odd_size, "segment is longer"},
    {"a segment beyond the index", large_size, "segment is longer"},
    {"a segment of 2^64 bytes", huge_size, "segment is longer"},
    {"another mark", other_mark, "does not begin with its mark"},
    {"another rank", other_rank, "is the file of rank 1 of 2"},
    {"another world size", other_world, "is the file of rank 0 of 3"},
    {"another step", other_step, "a different run or step"},
    {"another run", other_run, "a different run or step"},
    {"a box twice", twice, "not in order"},
    {"boxes out of order", backwards, "not in order"},
    {"dtype 26", strange_dtype, "unknown dtype"},
    {"dtype 0", no_dtype, "unknown dtype"},
    {"dtype 65535", huge_dtype, "unknown dtype"},
    {"65 dims", many_dims_of_one, "points outside"},
    {"65535 dims", all_dims_of_one, "points outside"},
    {"dims beyond the array", dims_outside, "points outside"},
    {"dims at 2^64", dims_far_outside, "points outside"},
    {"hashes at 2^64", hashes_outside, "points outside"},
    {"hashes behind the last", hashes_just_outside, "points outside"},
    {"a name at 2^64", name_outside, "points outside"},
    {"a name of 2^40 bytes", long_name, "points outside"},
    {"a negative offset", negative_offset, "outside the file"},
    {"an offset behind the end", late_offset, "outside the file"},
    {"a byte behind the end", next_offset, "outside the file"},
    {"an offset of 2^63", last_offset, "outside the file"},
    {"a negative origin", negative_lo, "empty or has an impossible offset"},
    {"an origin near 2^63", huge_lo, "empty or has an impossible offset"},
    {"no rows", no_rows, "empty or has an impossible offset"},
    {"negative rows", negative_rows, "impossible shape"},
    {"2^40 rows", many_rows, "outside the file"},
    {"rows that overflow", overflowing_rows, "impossible shape"},
    {"1000 rows more", more_rows, "outside the file"},
    {"one row many times", same_row_again, "outside the file"},
    {"rows that overlap", overlapping_rows, "outside the file"},
    {"a negative stride", negative_stride, "outside the file"},
    {"a stride near 2^62", huge_stride, "outside the file"},
    {"a packed box with gaps", gaps, "packed box has gaps"},
    {"no blocks", no_blocks, "wrong number of blocks"},
    {"a block more", more_blocks, "wrong number of blocks"},
    {"2^64 blocks", all_blocks, "points outside"},
    {"an encoded box without frames", encoded_without_frames, "points outside"},
};

LIE(no_chunk, view->dims[4] = 0)
LIE(negative_chunk, view->dims[4] = -1)
LIE(large_chunk, view->dims[4] = 24)
LIE(huge_chunk, view->dims[4] = (int64_t)1 << 62)
LIE(torn_chunk, view->dims[5] -= 1)
LIE(thin_chunk, view->dims[4] = 1)
LIE(negative_frame, view->frames[0].offset = -1)
LIE(late_frame, view->frames[0].offset = (int64_t)1 << 40)
LIE(long_frame, view->frames[0].size += 1 << 20)
LIE(huge_frame, view->frames[0].size = INT64_MAX)
LIE(empty_frame, view->frames[0].size = 0)
LIE(negative_frame_size, view->frames[0].size = -5)
LIE(frames_outside, view->records[0].frames = UINT64_MAX)

static const index_lie encoded_lies[] = {
    {"a chunk of no rows", no_chunk, "outside the file"},
    {"a chunk of negative rows", negative_chunk, "outside the file"},
    {"a chunk larger than its box", large_chunk, "outside the file"},
    {"a chunk of 2^62 rows", huge_chunk, "outside the file"},
    {"a chunk that is no run", torn_chunk, "outside the file"},
    {"smaller chunks", thin_chunk, "wrong number of blocks"},
    {"a negative frame", negative_frame, "outside the file"},
    {"a frame behind the end", late_frame, "outside the file"},
    {"a frame that reaches beyond the end", long_frame, "outside the file"},
    {"a frame of 2^63 bytes", huge_frame, "outside the file"},
    {"an empty frame", empty_frame, "outside the file"},
    {"a frame of negative size", negative_frame_size, "outside the file"},
    {"frames at 2^64", frames_outside, "points outside"},
    {"a box less", fewer_boxes, "do not add up"},
    {"a box twice", twice, "not in order"},
    {"2^40 rows", many_rows, "wrong number of blocks"},
};

/* Both files of the checkpoint are put back afterwards. */
static void plant_lies(bool compress, const index_lie *lies, size_t count)
{
    spoil_save("c", FSDP_SHARDED, compress, 4, 1);
    const char *shard = spoil_shard("c", 0, SPOIL_WORLD), *manifest = spoil_manifest("c");
    spoil_bytes good = spoil_read(shard), text = spoil_read(manifest), bad = spoil_read(shard);
    fsdp_manifest_file file = spoil_file("c", 0);
    shard_size = file.size;
    int64_t before = peak_kib();
    for (size_t i = 0; i < count; i++) {
        memcpy(bad.data, good.data, good.size);
        char *index = malloc((size_t)file.index_size);
        memcpy(index, bad.data + file.index_offset, (size_t)file.index_size);
        index_view view = view_index(index);
        lies[i].tell(&view);
        memcpy(bad.data + file.index_offset, index, (size_t)file.index_size);
        free(index);
        spoil_write(shard, bad.data, bad.size);
        spoil_reseal("c", 0, bad.data);
        expect("c", lies[i].what, FSDP_ERR_DAMAGED, "shard-00000-of-00002.h5", lies[i].words);
        spoil_write(manifest, text.data, text.size);
    }
    fsdp_error err;
    spoil_write(shard, good.data, good.size);
    cr_assert_eq(spoil_load("c", 1, &err), FSDP_OK, "%s", err.text);
    cr_assert_lt(peak_kib() - before, 128 << 10);
    free(good.data);
    free(bad.data);
    free(text.data);
}

Test(hostile, an_index_that_lies_about_raw_boxes_is_refused)
{
    plant_lies(false, raw_lies, sizeof raw_lies / sizeof raw_lies[0]);
}

Test(hostile, an_index_that_lies_about_encoded_boxes_is_refused)
{
    plant_lies(true, encoded_lies, sizeof encoded_lies / sizeof encoded_lies[0]);
}

/* An index that is sound by itself, but not the one that the manifest speaks of. */
static void contradict(const index_lie *lie, fsdp_status status, const char *words)
{
    spoil_save(lie->what, FSDP_SHARDED, false, 4, 1);
    const char *shard = spoil_shard(lie->what, 0, SPOIL_WORLD);
    spoil_bytes bytes = spoil_read(shard);
    fsdp_manifest_file file = spoil_file(lie->what, 0);
    char *index = malloc((size_t)file.index_size);
    memcpy(index, bytes.data + file.index_offset, (size_t)file.index_size);
    index_view view = view_index(index);
    lie->tell(&view);
    memcpy(bytes.data + file.index_offset, index, (size_t)file.index_size);
    free(index);
    spoil_write(shard, bytes.data, bytes.size);
    spoil_reseal(lie->what, 0, bytes.data);
    expect(lie->what, lie->what, status, "shard-00000-of-00002.h5", words);
    free(bytes.data);
}

LIE(newer_index, view->head->version = 2)
LIE(another_dtype, view->records[0].dtype = FSDP_I32)
LIE(another_origin, view->dims[0] += 1)
LIE(another_tensor, view->records[view->head->boxes - 1].tensor = 1000)
LIE(last_tensor, view->records[view->head->boxes - 1].tensor = UINT32_MAX)
LIE(another_name, ((char *)(view->hashes + view->head->blocks))[0] = 'L')
LIE(shorter_name, view->records[0].name_size -= 1)
LIE(another_hash, view->hashes[0].bytes[3] ^= 16)

Test(hostile, an_index_that_contradicts_the_manifest_is_damaged)
{
    contradict(&(index_lie){"dtype", another_dtype, NULL}, FSDP_ERR_DAMAGED,
               "a different box than the manifest lists: tensor 'layer/weight'");
    contradict(&(index_lie){"origin", another_origin, NULL}, FSDP_ERR_DAMAGED,
               "a different box than the manifest lists: tensor 'layer/weight'");
    contradict(&(index_lie){"name", another_name, NULL}, FSDP_ERR_DAMAGED,
               "a different box than the manifest lists: tensor 'layer/weight'");
    contradict(&(index_lie){"short", shorter_name, NULL}, FSDP_ERR_DAMAGED,
               "a different box than the manifest lists: tensor 'layer/weight'");
    contradict(&(index_lie){"tensor", another_tensor, NULL}, FSDP_ERR_DAMAGED,
               "lacks a box that the manifest lists: tensor '");
    contradict(&(index_lie){"last", last_tensor, NULL}, FSDP_ERR_DAMAGED,
               "lacks a box that the manifest lists: tensor '");
    contradict(&(index_lie){"hash", another_hash, NULL}, FSDP_ERR_DAMAGED,
               "block 0 is damaged: tensor 'layer/weight'");
}

Test(hostile, a_newer_index_is_refused_by_version)
{
    contradict(&(index_lie){"newer", newer_index, NULL}, FSDP_ERR_NOT_FOUND,
               "its shard index has version 2");
}

static void keep_finding(void *context, const fsdp_finding *finding)
{
    snprintf(context, FSDP_ERROR_TEXT, "%s", finding->text);
}

/* A manifest that lacks a tensor, whose box stays in a shard file. */
Test(hostile, a_box_that_the_manifest_does_not_know_is_found)
{
    char found[FSDP_ERROR_TEXT] = "";
    const fsdp_verify_opts quick = {
        .level = FSDP_VERIFY_QUICK, .finding = keep_finding, .finding_context = found};
    static const char value[] = "\"value\": {\"i64\": 1}";
    fsdp_error err = {0};
    spoil_save("c", FSDP_SHARDED, false, 4, 1);
    cr_assert_eq(fsdp_checkpoint_verify(spoil_path("c"), &quick, NULL, &err), FSDP_OK, "%s",
                 err.text);
    spoil_edit("c", "\"dtype\": \"u16\", \"shape\": [5], \"mesh\": 0, \"placements\": [\"R\"]",
               value, sizeof value - 1);
    cr_expect_eq(fsdp_checkpoint_verify(spoil_path("c"), &quick, NULL, &err), FSDP_DIFFERS, "%s",
                 err.text);
    cr_expect(strstr(found, "boxes that the manifest does not list"), "%s", found);
}

/* --- bombs ------------------------------------------------------------------------------------ */

/* One frame of 4 MiB of zeros, many blocks: what a few kilobytes would claim to hold is 4 GiB. */
Test(hostile, a_frame_that_many_blocks_share_is_refused)
{
    enum { BLOCKS = 1024, FRAME_ROOM = 8192 };
    static const int64_t shape[] = {BLOCKS, FSDP_BLOCK_BYTES}, chunk[] = {1, FSDP_BLOCK_BYTES};
    fsdp_error err = {0};
    fsdp_codec *codec;
    char *zeros = calloc(1, FSDP_BLOCK_BYTES), *frame = malloc(fsdp_codec_bound(FSDP_BLOCK_BYTES));
    size_t frame_size;
    cr_assert_eq(fsdp_codec_create(3, &codec, &err), FSDP_OK);
    cr_assert_eq(fsdp_codec_encode(codec,
                                   &(fsdp_coding){zeros, FSDP_BLOCK_BYTES, frame,
                                                  fsdp_codec_bound(FSDP_BLOCK_BYTES), 1},
                                   &frame_size, &err),
                 FSDP_OK);
    cr_assert_lt(frame_size, (size_t)FRAME_ROOM);
    fsdp_text file = {0};
    index_head head = {.magic = "FSDPIDX",
                       .version = 1,
                       .world = 1,
                       .boxes = 1,
                       .dims = 6,
                       .blocks = BLOCKS,
                       .frames = BLOCKS,
                       .name_bytes = 0};
    memcpy(head.magic, FSDP_INDEX_MAGIC, sizeof head.magic);
    head.size = sizeof head + sizeof(index_record) + 6 * 8 + BLOCKS * 32;
    index_record record = {.dtype = FSDP_U8,
                           .ndim = 2,
                           .flags = FSDP_INDEX_ENCODED | FSDP_INDEX_PACKED,
                           .block_count = BLOCKS};
    fsdp_text_add(&file, frame, frame_size);
    while (file.size < FRAME_ROOM)
        fsdp_text_add(&file, "", 1);
    int64_t lo[] = {0, 0};
    fsdp_text_add(&file, (char *)&head, sizeof head);
    fsdp_text_add(&file, (char *)&record, sizeof record);
    fsdp_text_add(&file, (const char *)lo, sizeof lo);
    fsdp_text_add(&file, (const char *)shape, sizeof shape);
    fsdp_text_add(&file, (const char *)chunk, sizeof chunk);
    fsdp_hash hash = fsdp_kernels_get()->hash(zeros, FSDP_BLOCK_BYTES);
    for (int i = 0; i < BLOCKS; i++)
        fsdp_text_add(&file, (char *)&hash, sizeof hash);
    fsdp_frame place = {0, (int64_t)frame_size};
    for (int i = 0; i < BLOCKS; i++)
        fsdp_text_add(&file, (char *)&place, sizeof place);
    spoil_write(spoil_path("bomb.h5"), file.data, file.size);
    fsdp_file_record found = {(int64_t)file.size, FRAME_ROOM, (int64_t)head.size,
                              fsdp_kernels_get()->hash(file.data + FRAME_ROOM, (size_t)head.size),
                              false};
    fsdp_shard_id id = {.world = 1};
    fsdp_shard_reader *reader;
    cr_assert_eq(fsdp_shard_open(NULL, spoil_path("bomb.h5"), &found, &id, &reader, &err),
                 FSDP_ERR_DAMAGED);
    cr_assert_not_null(strstr(err.text, "more bytes than the file"), "%s", err.text);
    fsdp_text_release(&file);
    fsdp_codec_free(codec);
    free(frame);
    free(zeros);
}

/* A frame that says it holds 64 MiB lies where one of 5520 bytes is expected. */
Test(hostile, a_frame_that_holds_too_much_is_not_decoded)
{
    enum { LARGE = 64 << 20 };
    fsdp_error err = {0};
    fsdp_codec *codec;
    size_t size, room = fsdp_codec_bound(LARGE);
    char *zeros = calloc(1, LARGE), *frame = malloc(room);
    cr_assert_eq(fsdp_codec_create(3, &codec, &err), FSDP_OK);
    cr_assert_eq(
        fsdp_codec_encode(codec, &(fsdp_coding){zeros, LARGE, frame, room, 1}, &size, &err),
        FSDP_OK);
    spoil_save("c", FSDP_SHARDED, true, 4, 1);
    const char *shard = spoil_shard("c", 0, 2);
    spoil_bytes bytes = spoil_read(shard);
    fsdp_manifest_file file = spoil_file("c", 0);
    char *index = bytes.data + file.index_offset;
    index_head head;
    memcpy(&head, index, sizeof head);
    size_t frames =
        sizeof head + head.boxes * sizeof(index_record) + head.dims * 8 + head.blocks * 16;
    fsdp_frame place;
    memcpy(&place, index + frames, sizeof place);
    size = size < (size_t)place.size ? size : (size_t)place.size;
    memcpy(bytes.data + place.offset, frame, size);
    spoil_write(shard, bytes.data, bytes.size);
    expect("c", "a large frame", FSDP_ERR_DAMAGED, "shard-00000-of-00002.h5",
           "block 0 is damaged: tensor 'layer/weight'");
    free(bytes.data);
    fsdp_codec_free(codec);
    free(frame);
    free(zeros);
}

/* --- manifests -------------------------------------------------------------------------------- */

typedef struct manifest_lie {
    const char *what, *from, *to;
    fsdp_status status;
    const char *words;
} manifest_lie;

#define SIXTEEN "1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,"
static const manifest_lie manifest_lies[] = {
    {"a later version", "\"major\": 1", "\"major\": 2", FSDP_ERR_NOT_FOUND,
     "use an fsdp that reads version 2"},
    {"version 0", "\"major\": 1", "\"major\": 0", FSDP_ERR_DAMAGED,
     "do not give the format version"},
    {"version 2^70", "\"major\": 1", "\"major\": 1180591620717411303424", FSDP_ERR_DAMAGED,
     "manifest.json"},
    {"another kind", "\"sharded\"", "\"tiled\"", FSDP_ERR_DAMAGED, "the word 'tiled' is unknown"},
    {"another known kind", "\"sharded\"", "\"full\"", FSDP_ERR_DAMAGED,
     "a full checkpoint of 2 ranks has 1 files"},
    {"a kind that escapes", "\"sharded\"", "\"\\u001b[2J\"", FSDP_ERR_DAMAGED, "'\\x1b[2J'"},
    {"no ranks", "\"world_size\": 2", "\"world_size\": 0", FSDP_ERR_DAMAGED,
     "the world size cannot be 0"},
    {"negative ranks", "\"world_size\": 2", "\"world_size\": -2", FSDP_ERR_DAMAGED,
     "the world size cannot be -2"},
    {"2^31 ranks", "\"world_size\": 2", "\"world_size\": 2147483648", FSDP_ERR_DAMAGED,
     "the world size cannot be 2147483648"},
    {"2^31 - 1 ranks", "\"world_size\": 2", "\"world_size\": 2147483647", FSDP_ERR_DAMAGED,
     "the world size cannot be 2147483647"},
    {"a negative step", "\"step\": 4", "\"step\": -4", FSDP_ERR_DAMAGED, "the step cannot be -4"},
    {"a negative size", "\"size\": ", "\"size\": -", FSDP_ERR_DAMAGED, "negative size"},
    {"a huge size", "\"size\": ", "\"size\": 1", FSDP_ERR_DAMAGED, "the manifest says 1"},
    {"a huge index", "\"index\": [", "\"index\": [9", FSDP_ERR_DAMAGED, "beyond the end"},
    {"a negative index", "\"index\": [", "\"index\": [-", FSDP_ERR_DAMAGED, "negative"},
    {"half a hash", "\"xxh3\": \"", "\"xxh3\": \"0", FSDP_ERR_DAMAGED, "32 hexadecimal digits"},
    {"a mesh beyond the world", "\"shape\": [2]", "\"shape\": [4611686018427387904]",
     FSDP_ERR_DAMAGED, "a mesh has"},
    {"an empty mesh", "\"shape\": [2]", "\"shape\": [0]", FSDP_ERR_DAMAGED,
     "the size of a mesh dim cannot be 0"},
    {"a mesh of 5 dims", "\"shape\": [2]", "\"shape\": [1, 1, 1, 1, 2]", FSDP_ERR_DAMAGED,
     "more than 4"},
    {"an overflowing shape", "\"shape\": [46, 60]", "\"shape\": [4611686018427387904, 4]",
     FSDP_ERR_DAMAGED, "too large"},
    {"a negative shape", "\"shape\": [46, 60]", "\"shape\": [46, -60]", FSDP_ERR_DAMAGED,
     "length -60"},
    {"a shape of 2^64", "\"shape\": [46, 60]", "\"shape\": [46, 18446744073709551616]",
     FSDP_ERR_DAMAGED, "manifest.json"},
    {"a shape of 65 dims", "\"shape\": [46, 60]",
     "\"shape\": [" SIXTEEN SIXTEEN SIXTEEN SIXTEEN "1]", FSDP_ERR_DAMAGED, "more than 64"},
    {"another shape", "\"shape\": [46, 60]", "\"shape\": [46, 61]", FSDP_ERR_DAMAGED,
     "a different box than the manifest lists"},
    {"a shape of a pebibyte", "\"shape\": [46, 60]", "\"shape\": [281474976710656, 60]",
     FSDP_ERR_DAMAGED, "a different box than the manifest lists"},
    {"an unknown dtype", "\"dtype\": \"f32\"", "\"dtype\": \"f31\"", FSDP_ERR_DAMAGED,
     "the dtype 'f31' is unknown"},
    {"another dtype", "\"dtype\": \"f32\"", "\"dtype\": \"i32\"", FSDP_ERR_DAMAGED,
     "a different box than the manifest lists"},
    {"mesh 99", "\"mesh\": 0", "\"mesh\": 99", FSDP_ERR_DAMAGED, "mesh 99 is not one of 1"},
    {"mesh -1", "\"mesh\": 0", "\"mesh\": -1", FSDP_ERR_DAMAGED, "mesh -1 is not one of 1"},
    {"dim 9", "[\"S0\"]", "[\"S9\"]", FSDP_ERR_DAMAGED, "manifest.json"},
    {"dim 2^63", "[\"S0\"]", "[\"S9223372036854775808\"]", FSDP_ERR_DAMAGED, "is unknown"},
    {"no placement", "[\"S0\"]", "[]", FSDP_ERR_DAMAGED, "there are 0 placements on a mesh of 1"},
    {"a partial placement", "[\"S0\"]", "[\"P\"]", FSDP_ERR_DAMAGED,
     "the placement 'P' is unknown"},
    {"a name twice", "\"columns\"", "\"copy\"", FSDP_ERR_DAMAGED, "copy"},
    {"an alias of nothing", "{\"name\": \"seed\", \"value\": {\"i64\": 1}}",
     "{\"name\": \"seed\", \"alias\": \"gone\"}", FSDP_ERR_DAMAGED, "gone"},
    {"a name that is not UTF-8", "\"columns\"", "\"col\xff\"", FSDP_ERR_DAMAGED, "manifest.json"},
    {"half a surrogate pair", "\"columns\"", "\"\\ud800\"", FSDP_ERR_DAMAGED, "manifest.json"},
    {"a key twice", "\"step\": 4", "\"step\": 4, \"step\": 5", FSDP_ERR_DAMAGED, "step"},
    {"no entries", "\"entries\"", "\"others\"", FSDP_ERR_DAMAGED, "depends on"},
    {"members out of order", "\"kind\"", "\"kinds\"", FSDP_ERR_DAMAGED, "depends on"},
    {"boxes that overlap", "\"mesh\": 0, \"placements\": [\"S1\"]",
     "\"boxes\": [[0, [0, 0], [4, 4]], [1, [0, 3], [4, 3]]]", FSDP_ERR_DAMAGED, "overlap"},
    {"boxes with a hole", "\"mesh\": 0, \"placements\": [\"S1\"]",
     "\"boxes\": [[0, [0, 0], [4, 3]], [1, [0, 4], [4, 2]]]", FSDP_ERR_DAMAGED, "manifest.json"},
    {"a box outside", "\"mesh\": 0, \"placements\": [\"S1\"]",
     "\"boxes\": [[0, [0, 0], [4, 3]], [1, [0, 3], [4, 30]]]", FSDP_ERR_DAMAGED, "manifest.json"},
    {"a negative box", "\"mesh\": 0, \"placements\": [\"S1\"]", "\"boxes\": [[0, [0, -3], [4, 9]]]",
     FSDP_ERR_DAMAGED, "manifest.json"},
    {"a box that wraps", "\"mesh\": 0, \"placements\": [\"S1\"]",
     "\"boxes\": [[0, [0, 9223372036854775807], [4, 9223372036854775807]]]", FSDP_ERR_DAMAGED,
     "manifest.json"},
    {"a box of rank 7", "\"mesh\": 0, \"placements\": [\"S1\"]", "\"boxes\": [[7, [0, 0], [4, 6]]]",
     FSDP_ERR_DAMAGED, "rank 7 is not one of 2"},
};

Test(hostile, a_manifest_that_lies_is_refused)
{
    spoil_save("c", FSDP_SHARDED, false, 4, 1);
    const char *manifest = spoil_manifest("c");
    spoil_bytes text = spoil_read(manifest);
    int64_t before = peak_kib();
    for (size_t i = 0; i < sizeof manifest_lies / sizeof manifest_lies[0]; i++) {
        const manifest_lie *lie = &manifest_lies[i];
        spoil_write(manifest, text.data, text.size);
        spoil_edit("c", lie->from, lie->to, strlen(lie->to));
        expect("c", lie->what, lie->status, "", lie->words);
    }
    cr_assert_lt(peak_kib() - before, 64 << 10);
    free(text.data);
}

Test(hostile, a_name_of_more_than_65535_bytes_is_refused)
{
    spoil_save("c", FSDP_SHARDED, false, 4, 1);
    char *name = malloc(65536 + 2);
    memset(name, 'n', 65536 + 2);
    name[0] = name[65536 + 1] = '"';
    spoil_edit("c", "\"columns\"", name, 65536 + 2);
    expect("c", "a long name", FSDP_ERR_DAMAGED, "manifest.json", "65,535");
    free(name);
}

/* A full checkpoint has one file, so only its index tells how many ranks there can be. */
Test(hostile, a_full_checkpoint_of_too_many_ranks_costs_nothing)
{
    spoil_save("c", FSDP_FULL, false, 4, 1);
    int64_t before = peak_kib();
    spoil_edit("c", "\"world_size\": 2", "\"world_size\": 16777216",
               strlen("\"world_size\": 16777216"));
    spoil_edit("c", "\"shape\": [2]", "\"shape\": [16777216]", strlen("\"shape\": [16777216]"));
    expect("c", "2^24 ranks", FSDP_ERR_DAMAGED, "manifest.json",
           "does not fit the boxes of 16777216 ranks");
    cr_assert_lt(peak_kib() - before, 32 << 10);
}

Test(hostile, nesting_without_end_is_refused)
{
    spoil_save("c", FSDP_SHARDED, false, 4, 1);
    fsdp_text text = {0};
    for (int i = 0; i < 100000; i++)
        fsdp_text_add(&text, "[", 1);
    spoil_edit("c", "4", text.data, text.size);
    expect("c", "deep nesting", FSDP_ERR_DAMAGED, "manifest.json", "");
    fsdp_text_release(&text);
}
