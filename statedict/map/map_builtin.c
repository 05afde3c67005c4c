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
    for (size_t i = 0; (text = fsdp_map_builtin_at(i, &known)) != NULL; i++)
        if (strcmp(known, name) == 0)
            return fsdp_map_parse(text, strlen(text), name, map_out, err);
    return fsdp_fail(err, FSDP_ERR_NOT_FOUND, "there is no built-in map '%s'", name);
}
