/* The built-in maps: the texts of builtin/, which CMake puts into map_texts.h. See map.h. */
#include "statedict/map/map_rules.h"

#include "statedict/map/map_texts.h"

#include <string.h>

const fsdp_builtin_map *fsdp_map_builtin_at(size_t i)
{
    return i < sizeof builtin_maps / sizeof *builtin_maps ? &builtin_maps[i] : NULL;
}

fsdp_status fsdp_map_builtin(const char *name, fsdp_map **map_out, fsdp_error *err)
{
    const fsdp_builtin_map *map;
    fsdp_text names = {0};
    for (size_t i = 0; (map = fsdp_map_builtin_at(i)) != NULL; i++) {
        if (strcmp(map->name, name) == 0) {
            fsdp_text_release(&names);
            FSDP_TRY(fsdp_map_parse(map->text, strlen(map->text), name, map_out, err));
            (*map_out)->types = map->types[0] ? map->types : NULL;
            return FSDP_OK;
        }
        fsdp_text_addf(&names, "%s%s", i > 0 ? ", " : "", map->name);
    }
    (void)fsdp_fail(err, FSDP_ERR_NOT_FOUND,
                    "'%s' is neither a file nor a built-in map; built-in maps are %.*s", name,
                    (int)names.size, names.data ? names.data : "");
    fsdp_text_release(&names);
    return FSDP_ERR_NOT_FOUND;
}
