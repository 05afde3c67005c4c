/* The built-in maps: the texts of builtin/, which CMake puts into map_texts.h. See map.h. */
#include "statedict/map/map.h"

#include "statedict/map/map_texts.h"

#include <string.h>

const char *fsdp_map_builtin_at(size_t i, const char **name_out)
{
    if (i >= sizeof map_texts / sizeof *map_texts)
        return NULL;
    *name_out = map_texts[i].name;
    return map_texts[i].text;
}

fsdp_status fsdp_map_builtin(const char *name, fsdp_map **map_out, fsdp_error *err)
{
    const char *text, *known;
    fsdp_text names = {0};
    for (size_t i = 0; (text = fsdp_map_builtin_at(i, &known)) != NULL; i++) {
        if (strcmp(known, name) == 0) {
            fsdp_text_release(&names);
            return fsdp_map_parse(text, strlen(text), name, map_out, err);
        }
        fsdp_text_addf(&names, "%s%s", i > 0 ? ", " : "", known);
    }
    (void)fsdp_fail(err, FSDP_ERR_NOT_FOUND, "'%s' is no file and no built-in map; those are %.*s",
                    name, (int)names.size, names.data ? names.data : "");
    fsdp_text_release(&names);
    return FSDP_ERR_NOT_FOUND;
}
