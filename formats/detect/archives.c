/* Recognises archives by their first bytes: see archives.h. */
#include "formats/detect/archives.h"

#include "base/text.h"

#include <string.h>

/* A way of packing, and the program that unpacks one file. */
static const struct packing {
    const char *name, *head, *command;
    size_t offset, size;
} packings[] = {
    {"tar", "ustar", "tar -xf", 257, 5},
    {"gzip", "\x1f\x8b\x08", "gzip -dk", 0, 3},
    {"zstd", "\x28\xb5\x2f\xfd", "zstd -d", 0, 4},
    {"xz",
     "\xfd"
     "7zXZ\0",
     "xz -dk", 0, 6},
    {"bzip2", "BZh", "bzip2 -dk", 0, 3},
};

static bool is_it(const struct packing *packing, const fsdp_probe *probe)
{
    return probe->head_size >= packing->offset + packing->size &&
           memcmp(probe->head + packing->offset, packing->head, packing->size) == 0;
}

/* "x.tar.gz", "x.tgz" */
static bool holds_tar(const char *path)
{
    static const char *const short_names[] = {".tgz", ".tzst", ".txz", ".tbz", ".tbz2"};
    const char *slash = strrchr(path, '/');
    for (size_t i = 0; i < sizeof short_names / sizeof *short_names; i++)
        if (fsdp_has_suffix(path, short_names[i]))
            return true;
    return strstr(slash ? slash + 1 : path, ".tar.") != NULL;
}

fsdp_status fsdp_archives_check(const fsdp_probe *probe, fsdp_error *err)
{
    for (size_t i = 0; i < sizeof packings / sizeof *packings && !probe->is_directory; i++) {
        const struct packing *packing = &packings[i];
        fsdp_text path = {0};
        if (!is_it(packing, probe))
            continue;
        bool is_tar = i == 0 || holds_tar(probe->path);
        fsdp_text_add_quoted(&path, probe->path);
        fsdp_status st =
            path.failed ? fsdp_fail_memory(err, probe->path)
                        : fsdp_fail(err, FSDP_ERR_NOT_FOUND,
                                    "'%s' is packed (%s); unpack it first with %s %s, and name the "
                                    "unpacked files",
                                    probe->path, i > 0 && is_tar ? "tar" : packing->name,
                                    is_tar ? packings[0].command : packing->command, path.data);
        fsdp_text_release(&path);
        return st;
    }
    return FSDP_OK;
}
