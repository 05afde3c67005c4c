/* Fuzz target: the metadata of a DCP directory. The input is `.metadata`; every file that it names holds the
 * same small item, a tensor of six f32, and begins with it. */
#include "tests/fuzz/memory_file.h"
#include "tests/fuzz/tiny_zip.h"

#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static const char item_pickle[] = "\x80\x02"
                                  "ctorch._utils\n_rebuild_tensor_v2\n"
                                  "((X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\0"
                                  "0X\x03\0\0\0cpuK\x06tQK\0K\x03K\x02\x86K\x02K\x01\x86\x89"
                                  "ccollections\nOrderedDict\n)RtR.";

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
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
    return 0;
}
