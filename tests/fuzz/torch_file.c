/* The archive that torch.save would put around a pickle. See torch_file.h. */
#include "tests/fuzz/torch_file.h"

#include "formats/torch/torch_internal.h"
#include "tests/fuzz/tiny_zip.h"

#include <stdio.h>
#include <string.h>

enum { MOST_STORAGES = 16, LARGEST_STORAGE = 1024, LONGEST_KEY = 20, LEGACY_MAGIC_AT = 6 };

/* Records of the archive: the pickle, storages, and what fills it up. */
typedef struct contents {
    tiny_record records[MOST_STORAGES + 2];
    char names[MOST_STORAGES][LONGEST_KEY + 10];
    size_t count;
} contents;

bool torch_file_wants(const uint8_t *data, size_t size)
{
    bool is_legacy =
        size >= LEGACY_MAGIC_AT && memcmp(data, "\x80\x02\x8a\x0a\x6c\xfc", LEGACY_MAGIC_AT) == 0;
    return !is_legacy && !(size >= 4 && memcmp(data, "PK\3\4", 4) == 0);
}

static bool has_record(const contents *made, const char *name)
{
    for (size_t i = 0; i < made->count; i++)
        if (strcmp(made->records[i].name, name) == 0)
            return true;
    return false;
}

static void add_storage(contents *made, const torch_storage_id *id)
{
    static const uint8_t bytes[LARGEST_STORAGE] = {1, 2, 3};
    size_t room = id->element_size > 0 ? LARGEST_STORAGE / id->element_size : 0;
    if (made->count > MOST_STORAGES || id->is_meta || id->key_size > LONGEST_KEY ||
        id->elements < 0 || (uint64_t)id->elements > room)
        return;
    char *name = made->names[made->count - 1];
    snprintf(name, sizeof *made->names, "a/data/%.*s", (int)id->key_size, id->key);
    if (!has_record(made, name))
        made->records[made->count++] =
            (tiny_record){name, bytes, (size_t)id->elements * id->element_size};
}

static void add_storages(contents *made, const uint8_t *data, size_t size)
{
    torch_archive archive = {.where = "fuzz"};
    const fsdp_pickle_options options = {.where = "fuzz"};
    if (fsdp_pickle_parse(&options, data, size, &archive.pickle, NULL, NULL) != FSDP_OK)
        return;
    for (size_t i = 0; i < archive.pickle.count; i++) {
        torch_storage_id id;
        if (archive.pickle.nodes[i].kind == FSDP_NODE_PERSISTENT &&
            torch_read_storage_id(&archive, (fsdp_node)i, &id, NULL) == FSDP_OK)
            add_storage(made, &id);
    }
    fsdp_pickle_release(&archive.pickle);
}

/* One more record, so that the archive gets the size wanted. */
static void fill_up(contents *made, size_t wanted)
{
    static const uint8_t zeros[LARGEST_STORAGE * 2];
    size_t room = sizeof zeros, size;
    made->records[made->count] = (tiny_record){"a/rest", zeros, 0};
    size = tiny_zip_size(made->records, made->count + 1);
    if (size > wanted || wanted - size > room)
        return;
    made->records[made->count++].size = wanted - size;
}

uint8_t *torch_file(const uint8_t *pickle, size_t size, size_t wanted, size_t *size_out)
{
    contents made = {.records = {{"a/data.pkl", pickle, size}}, .count = 1};
    add_storages(&made, pickle, size);
    fill_up(&made, wanted);
    return tiny_zip(made.records, made.count, size_out);
}
