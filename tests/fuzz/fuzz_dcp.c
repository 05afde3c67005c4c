/*
 * Fuzz target: DCP directories. An input is a folder (bundle.h), or `.metadata`, whose items are in any case
 * small one, a tensor of six f32. A pickle in a folder that is not a metadata is an item of ITEM_SIZE bytes,
 * so that changes to it do not make the metadata wrong.
 */
#include "tests/fuzz/bundle.h"
#include "tests/fuzz/tiny_zip.h"
#include "tests/fuzz/torch_file.h"

#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { ITEM_SIZE = 1024 };

static const char item_pickle[] = "\x80\x02"
                                  "ctorch._utils\n_rebuild_tensor_v2\n"
                                  "((X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\0"
                                  "0X\x03\0\0\0cpuK\x06tQK\0K\x03K\x02\x86K\x02K\x01\x86\x89"
                                  "ccollections\nOrderedDict\n)RtR.";

static void read_metadata(const uint8_t *data, size_t size)
{
    static const uint8_t storage[24] = {1, 2, 3};
    const tiny_record records[] = {{"archive/data.pkl", item_pickle, sizeof item_pickle - 1},
                                   {"archive/data/0", storage, sizeof storage}};
    size_t item_size;
    uint8_t *item = tiny_zip(records, 2, &item_size);
    const memory_entry files[] = {{".metadata", data, size}, {NULL, item, item_size}};
    if (item)
        read_everything(memory_folder(files, sizeof files / sizeof *files));
    free(item);
}

static void read_folder(const uint8_t *data, size_t size)
{
    bundle files;
    bundle_split(data, size, &files);
    for (size_t i = 0; i < files.count; i++) {
        const memory_entry *file = &files.files[i];
        size_t zip_size;
        bool is_item = file->size > 0 && file->data[0] == 0x80;
        if (!is_item || bundle_name_ends(&files, i, ".metadata"))
            continue;
        uint8_t *zip = torch_file(file->data, file->size, ITEM_SIZE, &zip_size);
        bundle_replace(&files, i, zip, zip_size);
    }
    read_everything(memory_folder(files.files, files.count));
    bundle_release(&files);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (bundle_begins(data, size))
        read_folder(data, size);
    else
        read_metadata(data, size);
    return 0;
}
