/* Models of several modules, each in a folder of its own: see frameworks.h. */
#include "formats/frameworks.h"

#include "base/core/mem.h"
#include "base/data/json.h"

#include <string.h>

enum { MODULES_MOST = 256 };

/* "2_Dense" or "a/b": relative, and not out of the directory. */
static bool is_below(const char *name, size_t size)
{
    if (memchr(name, '\0', size) || memchr(name, '\\', size))
        return false;
    for (const char *part = name;; part++) {
        size_t n = strcspn(part, "/");
        if (n == 0 || (n == 1 && part[0] == '.') || (n == 2 && part[0] == '.' && part[1] == '.'))
            return false;
        part += n;
        if (*part == '\0')
            return true;
    }
}

static bool is_listed(const fsdp_io_names *names, const char *name)
{
    for (size_t i = 0; i < names->count; i++)
        if (strcmp(names->items[i], name) == 0)
            return true;
    return false;
}

static fsdp_status add_folder(fsdp_json *json, fsdp_io_names *names, fsdp_error *err)
{
    const char *name;
    size_t size;
    FSDP_TRY(fsdp_json_string(json, &name, &size, err));
    if (size == 0) /* the directory itself */
        return FSDP_OK;
    if (!is_below(name, size))
        return fsdp_json_fail(json, err, "the path of a module leads out of its directory");
    if (is_listed(names, name))
        return FSDP_OK;
    if (names->count == MODULES_MOST)
        return fsdp_json_fail(json, err, "there are more than %d modules", MODULES_MOST);
    char *kept = fsdp_arena_strndup(&names->arena, name, size);
    if (!kept ||
        !fsdp_grow(&names->items, &names->capacity, names->count + 1, sizeof *names->items))
        return fsdp_fail_memory(err, "a list of modules");
    names->items[names->count++] = kept;
    return FSDP_OK;
}

static fsdp_status add_module(fsdp_json *json, fsdp_io_names *names, fsdp_error *err)
{
    static const char *const known[] = {"path"};
    fsdp_json_members members = {.names = known, .count = 1};
    int which;
    FSDP_TRY(fsdp_json_enter_object(json, err));
    for (;;) {
        FSDP_TRY(fsdp_json_next_member(json, &members, &which, err));
        if (which < 0)
            return FSDP_OK;
        FSDP_TRY(add_folder(json, names, err));
    }
}

static fsdp_status add_modules(fsdp_json *json, fsdp_io_names *names, fsdp_error *err)
{
    bool more;
    FSDP_TRY(fsdp_json_enter_array(json, err));
    for (;;) {
        FSDP_TRY(fsdp_json_next_item(json, &more, err));
        if (!more)
            return fsdp_json_finish(json, err);
        FSDP_TRY(add_module(json, names, err));
    }
}

fsdp_status fsdp_framework_modules(const char *text, size_t size, const char *path,
                                   fsdp_io_names *names_out, fsdp_error *err)
{
    fsdp_json json;
    fsdp_json_init(&json, text, size, path);
    *names_out = (fsdp_io_names){0};
    fsdp_status st = add_modules(&json, names_out, err);
    fsdp_json_release(&json);
    return st;
}
