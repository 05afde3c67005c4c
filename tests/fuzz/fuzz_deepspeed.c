/*
 * Fuzz target: DeepSpeed's checkpoints. An input is a folder (bundle.h) of the files of a tag, whose pickles
 * get the archive and the storages that torch.save would put around them.
 */
#include "tests/fuzz/bundle.h"
#include "tests/fuzz/torch_file.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    bundle files;
    if (!bundle_begins(data, size))
        return 0;
    bundle_split(data, size, &files);
    for (size_t i = 0; i < files.count; i++) {
        const memory_entry *file = &files.files[i];
        size_t made_size;
        if (!torch_file_wants(file->data, file->size))
            continue;
        uint8_t *made = torch_file(file->data, file->size, 0, &made_size);
        bundle_replace(&files, i, made, made_size);
    }
    read_everything(memory_folder(files.files, files.count));
    bundle_release(&files);
    return 0;
}
