/*
 * Fuzz target: maps of names. The text is read as a map and applied in both directions to a small safetensors
 * file; what comes out is read as a whole.
 */
#include "base/core/mem.h"
#include "statedict/map/map.h"
#include "tests/fuzz/memory_file.h"
#include "tests/fuzz/read_checkpoint.h"

#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static const char model[] = "\xB0\0\0\0\0\0\0\0"
                            "{\"a.0\":{\"dtype\":\"F32\",\"shape\":[2,3],\"data_offsets\":[0,24]},"
                            "\"a.1\":{\"dtype\":\"F32\",\"shape\":[2,3],\"data_offsets\":[24,48]},"
                            "\"b\":{\"dtype\":\"F32\",\"shape\":[4],\"data_offsets\":[48,64]}}"
                            "   "
                            "................................................................";

/* Names with two numbers. */
static const char stages[] =
    "\xB8\0\0\0\0\0\0\0"
    "{\"p0.l0.n\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]},"
    "\"p0.l1.n\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,8]},"
    "\"p1.l0.n\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[8,12]}}"
    "     ............";

static const char config[] = "{\"n\":2,\"text_config\":{\"m\":3}}";

static void require(bool truth)
{
    if (!truth)
        abort();
}

static void apply(const fsdp_map *map, bool from_right, const char *file, size_t size)
{
    const memory_entry files[] = {{"model.safetensors", (const uint8_t *)file, size}};
    static const char *const given[] = {"k=1"};
    fsdp_config_file numbers;
    const fsdp_map_call call = {.config = &numbers, .given = given, .given_count = 1};
    fsdp_checkpoint *checkpoint = NULL;
    fsdp_error err = {0};
    fsdp_status st = fsdp_checkpoint_open_as(memory_folder(files, 1), "fuzz/model.safetensors",
                                             NULL, &checkpoint, &err);
    require(st == FSDP_OK);
    require(fsdp_config_parse(config, sizeof config - 1, NULL, &numbers, &err) == FSDP_OK);
    st = fsdp_map_apply(map, from_right, &call, &checkpoint, &err);
    fsdp_config_release(&numbers);
    require_opened(st, checkpoint, &err);
    if (checkpoint)
        read_and_close(checkpoint);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    fsdp_map *map = NULL;
    fsdp_error err = {0};
    fsdp_status st = fsdp_map_parse(size > 0 ? (const char *)data : "", size, "m", &map, &err);
    require(st == FSDP_OK ? map != NULL : !map && err.status == st && err.text[0]);
    if (map) {
        apply(map, false, model, sizeof model - 1);
        apply(map, true, model, sizeof model - 1);
        apply(map, false, stages, sizeof stages - 1);
    }
    fsdp_map_free(map);
    return 0;
}
