/* Reads small files that are next to weights, such as config.json: see source.h. */
#include "formats/source.h"

#include "base/core/mem.h"

#include <string.h>

static fsdp_status read_added(fsdp_source *source, const char *path, size_t most, char **data_out,
                              size_t *size_out, fsdp_error *err)
{
    int number;
    FSDP_TRY(fsdp_source_add_file(source, path, true, &number, err));
    const int64_t size = fsdp_source_file_size(source, (size_t)number);
    if ((uint64_t)size > most)
        return fsdp_fail(err, FSDP_ERR_LIMIT, "'%s' has %lld bytes, at most %zu are allowed", path,
                         (long long)size, most);
    char *data = fsdp_realloc(NULL, (size_t)size + 1, 1);
    if (!data)
        return fsdp_fail_memory(err, path);
    fsdp_status st = fsdp_source_pread(source, number, data, (size_t)size, 0, err);
    if (st != FSDP_OK) {
        fsdp_free(data);
        return st;
    }
    data[size] = '\0';
    *data_out = data;
    *size_out = (size_t)size;
    return FSDP_OK;
}

fsdp_status fsdp_source_read_file(fsdp_io *io, const char *path, size_t most, char **data_out,
                                  size_t *size_out, fsdp_error *err)
{
    const char *slash = strrchr(path, '/');
    const size_t size = slash == path ? 1 : (size_t)(slash ? slash - path : 0);
    fsdp_source *source = NULL;
    char *dir = slash ? fsdp_strndup(path, size) : fsdp_strndup(".", 1);
    char *below = slash || !dir ? NULL : fsdp_path_join(dir, path);
    *data_out = NULL;
    *size_out = 0;
    fsdp_status st = dir && (slash || below) ? fsdp_source_create(io, dir, "files", &source, err)
                                             : fsdp_fail_memory(err, path);
    if (st == FSDP_OK)
        st = read_added(source, slash ? path : below, most, data_out, size_out, err);
    fsdp_source_close(source);
    fsdp_free(below);
    fsdp_free(dir);
    return st;
}
