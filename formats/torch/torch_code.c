/*
 * Code in torch.save files: the classes and functions outside the evaluated list (pickle.h), which
 * Python runs when it loads a file. Every opened file notes them with its source.
 */
#include "formats/torch/torch_internal.h"

static fsdp_status note_node(fsdp_source *source, int file, const fsdp_pickle *pickle,
                             fsdp_node node, fsdp_error *err)
{
    char *name = fsdp_pickle_global_name(pickle, node);
    if (!name)
        return fsdp_fail_memory(err, "a name");
    fsdp_status st = fsdp_source_note_code(source, file, name, err);
    fsdp_free(name);
    return st;
}

fsdp_status torch_note_code(const torch_opening *opening, const fsdp_pickle *pickle,
                            fsdp_error *err)
{
    fsdp_source *source = opening->source;
    for (size_t i = 0; i < pickle->count; i++) {
        if (!fsdp_pickle_is_code(pickle, (fsdp_node)i))
            continue;
        if (fsdp_source_code_at(source, (size_t)opening->file, FSDP_SOURCE_CODE - 1))
            return FSDP_OK;
        FSDP_TRY(note_node(source, opening->file, pickle, (fsdp_node)i, err));
    }
    return FSDP_OK;
}
