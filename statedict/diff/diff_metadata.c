/*
 * Comparing the metadata of two checkpoints: the texts that safetensors have beside their tensors. Each is an
 * entry of its own, a value whose name is that of its key below "__metadata__".
 */
#include "statedict/diff/diff_internal.h"

#include "base/data/text_pairs.h"
#include "statedict/checkpoint/checkpoint_internal.h"

/* Files without a format are those of PyTorch: each writer of that names it, or not. */
static bool is_usual(const fsdp_text_pair *pair)
{
    return fsdp_bytes_are(pair->key, pair->key_size, "format") &&
           fsdp_bytes_are(pair->text, pair->text_size, "pt");
}

static fsdp_status add_entry(fsdp_sd *sd, const fsdp_text_pair *pair, fsdp_error *err)
{
    fsdp_text name = {0};
    fsdp_value value = {0};
    fsdp_text_addf(&name, "__metadata__.");
    fsdp_text_add(&name, pair->key, pair->key_size);
    fsdp_status st = name.failed ? fsdp_fail_memory(err, "metadata")
                                 : fsdp_value_set_bytes(&value, FSDP_VALUE_STRING, pair->text,
                                                        pair->text_size, err);
    if (st == FSDP_OK)
        st = fsdp_sd_add_value(sd, name.data, name.size, &value, err);
    fsdp_value_release(&value);
    fsdp_text_release(&name);
    return st;
}

fsdp_status fsdp_diff_metadata(fsdp_checkpoint *checkpoint, fsdp_error *err)
{
    fsdp_text_pairs pairs = {0};
    const char *text = checkpoint->manifest.metadata;
    if (checkpoint->metadata)
        return FSDP_OK;
    FSDP_TRY(fsdp_sd_create(&checkpoint->metadata, err));
    fsdp_status st = text ? fsdp_text_pairs_parse(&pairs, text, checkpoint->path, err) : FSDP_OK;
    for (size_t i = 0; i < pairs.count && st == FSDP_OK; i++)
        if (!is_usual(&pairs.items[i]))
            st = add_entry(checkpoint->metadata, &pairs.items[i], err);
    fsdp_text_pairs_release(&pairs);
    if (st != FSDP_OK) { /* the next call does not take a part for all */
        fsdp_sd_free(checkpoint->metadata);
        checkpoint->metadata = NULL;
    }
    return st;
}
