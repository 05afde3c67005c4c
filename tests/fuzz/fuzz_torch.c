/* Fuzz target: files of torch.save. An input that is one is read as it is; any other is the pickle of one,
 * around which a zip archive with two storages is put. */
#include "tests/fuzz/memory_file.h"
#include "tests/fuzz/tiny_zip.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void read_pickle(const uint8_t *data, size_t size)
{
    static const uint8_t storage[24] = {1, 2, 3};
    const tiny_record records[] = {
        {"a/data.pkl", data, size}, {"a/data/0", storage, 24}, {"a/data/1", storage, 8}};
    size_t zip_size;
    uint8_t *zip = tiny_zip(records, sizeof records / sizeof *records, &zip_size);
    if (zip)
        read_everything(memory_io(zip, zip_size));
    free(zip);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    bool is_legacy = size >= 6 && memcmp(data, "\x80\x02\x8a\x0a\x6c\xfc", 6) == 0;
    if (is_legacy || (size >= 4 && memcmp(data, "PK\3\4", 4) == 0))
        read_everything(memory_io(data, size));
    else
        read_pickle(data, size);
    return 0;
}
