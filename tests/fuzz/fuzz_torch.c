/* Fuzz target: files of torch.save. An input that is one is read as it is; a folder (bundle.h) is a directory
 * with an index; any other is the pickle of one, as are the files of a folder. */
#include "tests/fuzz/bundle.h"
#include "tests/fuzz/torch_file.h"

#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void read_pickle(const uint8_t *data, size_t size)
{
    size_t zip_size;
    uint8_t *zip = torch_file(data, size, 0, &zip_size);
    if (zip)
        read_everything(memory_io(zip, zip_size));
    free(zip);
}

static void read_folder(const uint8_t *data, size_t size)
{
    bundle files;
    bundle_split(data, size, &files);
    for (size_t i = 0; i < files.count; i++) {
        const memory_entry *file = &files.files[i];
        size_t zip_size;
        if (!bundle_name_ends(&files, i, ".bin") || !torch_file_wants(file->data, file->size))
            continue;
        uint8_t *zip = torch_file(file->data, file->size, 0, &zip_size);
        bundle_replace(&files, i, zip, zip_size);
    }
    read_everything(memory_folder(files.files, files.count));
    bundle_release(&files);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (bundle_begins(data, size))
        read_folder(data, size);
    else if (torch_file_wants(data, size))
        read_pickle(data, size);
    else
        read_everything(memory_io(data, size));
    return 0;
}
