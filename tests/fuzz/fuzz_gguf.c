/* Fuzz target: GGUF, a file or a folder of its parts (bundle.h). */
#include "tests/fuzz/bundle.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (!bundle_begins(data, size)) {
        read_everything(memory_io(data, size));
        return 0;
    }
    bundle files;
    bundle_split(data, size, &files);
    read_everything(memory_folder(files.files, files.count));
    bundle_release(&files);
    return 0;
}
