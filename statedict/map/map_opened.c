/*
 * An opened checkpoint under the names of another framework, for tools that read it without a conversion
 * (fsdp-diff, fsdp-ls). See fsdp_checkpoint_map in convert.h.
 */
#include "statedict/map/map.h"

#include "base/core/given.h"
#include "statedict/derive/target_types.h"
#include "statedict/models/config.h"

static bool holds_elements(fsdp_dtype dtype)
{
    return fsdp_dtype_describe(dtype)->values <= 1;
}

/* Maps take the dims of numbers, and not those of blocks. */
static fsdp_status decode_blocks(fsdp_checkpoint **checkpoint, fsdp_error *err)
{
    static const fsdp_format_writer writer = {.holds_dtype = holds_elements};
    static const fsdp_format no_blocks = {.writer = &writer};
    const fsdp_target_types types = {.target = &no_blocks, .blocks = FSDP_DTYPE_NONE};
    fsdp_type_report report;
    return fsdp_derive_target_types(&types, checkpoint, &report, err);
}

static fsdp_status rename_by(const fsdp_map_opts *opts, fsdp_checkpoint **checkpoint,
                             fsdp_error *err)
{
    fsdp_io *io = (*checkpoint)->io;
    const fsdp_convert_opts convert = {
        .map = opts->map, .sizes = opts->sizes, .size_count = opts->size_count};
    fsdp_map_request request = {
        .io = io, .opts = &convert, .target = fsdp_format_to("fsdp"), .keeps_rest = true};
    fsdp_map_sides sides;
    fsdp_config_file config;
    fsdp_config_find(io, NULL, (*checkpoint)->path, &config, NULL);
    if (!config.text && opts->other) {
        fsdp_config_release(&config);
        fsdp_config_find(io, NULL, opts->other, &config, NULL);
    }
    request.config = config.text ? &config : NULL;
    fsdp_status st = fsdp_map_rename(&request, checkpoint, &sides, err);
    fsdp_config_release(&config);
    return st;
}

fsdp_status fsdp_checkpoint_map(fsdp_checkpoint **checkpoint, const fsdp_map_opts *opts,
                                fsdp_error *err)
{
    FSDP_NEED(err, checkpoint, opts);
    FSDP_NEED(err, *checkpoint);
    fsdp_status st = fsdp_checkpoint_carry_values(*checkpoint, true, err);
    if (st == FSDP_OK)
        st = decode_blocks(checkpoint, err);
    if (st == FSDP_OK && opts->map)
        st = rename_by(opts, checkpoint, err);
    if (st == FSDP_OK)
        return FSDP_OK;
    fsdp_checkpoint_close(*checkpoint);
    *checkpoint = NULL;
    return st;
}
