/*
 * A config.json for a source without one: loaders of Hugging Face's directories and of GGUF files ask for its
 * numbers, and the source has them in another form. See map.h.
 */
#include "statedict/map/map_config.h"

#include "statedict/models/config.h"
#include "statedict/gguf_model/gguf_values.h"
#include "statedict/models/params_config.h"

#include <string.h>

/* Other formats may keep the pairs of GGUF, too. */
static bool has_pairs(const fsdp_sd *sd)
{
    static const char pair[] = "general.architecture";
    return fsdp_sd_find(sd, pair, sizeof pair - 1) >= 0;
}

/* Whether the user wants the tensors alone, without the pairs. */
static bool drops_pairs(const fsdp_map_request *request)
{
    const fsdp_select_opts *select = &request->opts->select;
    for (size_t i = 0; i < select->drop_count; i++)
        if (strcmp(select->drops[i], "values") == 0)
            return true;
    return false;
}

/* The pairs have all numbers but for those that tensors of scaled rotary frequencies were computed from. */
static fsdp_status from_gguf(const fsdp_map_request *request, const fsdp_checkpoint *checkpoint,
                             fsdp_text *out, fsdp_error *err)
{
    static const char *const scalings[] = {"rope_freqs.weight", "rope_factors_long.weight",
                                           "rope_factors_short.weight"};
    const fsdp_sd *sd = checkpoint->manifest.sd;
    for (size_t i = 0; i < sizeof scalings / sizeof *scalings; i++)
        if (fsdp_sd_find(sd, scalings[i], strlen(scalings[i])) >= 0)
            return fsdp_fail(
                err, FSDP_ERR_USAGE,
                "'%s' has scaled rotary frequencies ('%s'), and config.json needs their original "
                "numbers; give the directory of the model's config.json with --copy-from DIR",
                checkpoint->path, scalings[i]);
    if (!drops_pairs(request))
        return fsdp_gguf_config_text(sd, out, err);
    if (fsdp_gguf_config_text(sd, out, NULL) != FSDP_OK)
        fsdp_text_release(out);
    return FSDP_OK;
}

static fsdp_status from_params(const fsdp_map_request *request, const fsdp_checkpoint *checkpoint,
                               fsdp_text *out, fsdp_error *err)
{
    fsdp_config_file params;
    fsdp_params_find(request->io, checkpoint->path, &params);
    fsdp_status st =
        params.text ? fsdp_params_config_text(&params, checkpoint->manifest.sd, out, err) : FSDP_OK;
    fsdp_config_release(&params);
    return st;
}

/* Without a map by its name a directory keeps Meta's names, and Meta's params.json belongs to them. */
static bool wants_names_of_hf(const fsdp_map_request *request)
{
    const char *map = request->opts->map;
    return request->target->caps.needs_config ||
           (request->target->caps.for_loaders && map && strcmp(map, "meta-llama") == 0);
}

fsdp_status fsdp_map_make_config(const fsdp_map_request *request, const fsdp_checkpoint *checkpoint,
                                 fsdp_config_file *config_out, fsdp_error *err)
{
    fsdp_text text = {0};
    fsdp_status st = FSDP_OK;
    *config_out = (fsdp_config_file){0};
    if (has_pairs(checkpoint->manifest.sd) && request->target->caps.for_loaders)
        st = from_gguf(request, checkpoint, &text, err);
    else if (wants_names_of_hf(request) && fsdp_is_meta_llama(checkpoint->manifest.sd))
        st = from_params(request, checkpoint, &text, err);
    if (st == FSDP_OK && text.size > 0)
        st = fsdp_config_parse(text.data, text.size, NULL, config_out, err);
    fsdp_text_release(&text);
    return st;
}

void map_find_params(const fsdp_map_request *request, const fsdp_checkpoint *checkpoint,
                     fsdp_config_file *config_out)
{
    const fsdp_sd *sd = checkpoint->manifest.sd;
    fsdp_config_file params;
    fsdp_text text = {0};
    fsdp_params_find(request->io, checkpoint->path, &params);
    if (params.text && request->opts->map && fsdp_is_meta_llama(sd) &&
        fsdp_params_config_text(&params, sd, &text, NULL) == FSDP_OK) {
        (void)fsdp_config_parse(text.data, text.size, params.path, config_out, NULL);
        fsdp_config_release(&params);
    } else {
        *config_out = params;
    }
    fsdp_text_release(&text);
}
