/* Fuzz target: the modules.json of sentence-transformers. Folders that are accepted lead down. */
#include "base/core/mem.h"
#include "formats/frameworks.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void require(bool truth)
{
    if (!truth)
        abort();
}

static void require_below(const char *folder)
{
    size_t size = strlen(folder);
    require(size > 0 && folder[0] != '/' && folder[size - 1] != '/' && !strstr(folder, "//"));
    require(strcmp(folder, "..") != 0 && strncmp(folder, "../", 3) != 0 &&
            !strstr(folder, "/../") && !(size > 3 && strcmp(folder + size - 3, "/..") == 0));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    const char *text = size > 0 ? (const char *)data : "";
    fsdp_io_names names = {0};
    fsdp_error err = {0};
    fsdp_status status = fsdp_framework_modules(text, size, "fuzz", &names, &err);
    require(status == FSDP_OK || (err.status == status && err.text[0]));
    for (size_t i = 0; i < names.count; i++)
        require_below(names.items[i]);
    fsdp_io_names_release(&names);
    return 0;
}
