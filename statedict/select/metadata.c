/* Chooses the texts beside the tensors that a conversion keeps: see metadata.h. */
#include "statedict/select/metadata.h"

#include "base/core/mem.h"
#include "statedict/select/drop_rules.h"

#include <inttypes.h>
#include <string.h>

void fsdp_metadata_choice_release(fsdp_metadata_choice *choice)
{
    fsdp_free(choice->kept);
    fsdp_text_pairs_release(&choice->left_out);
    *choice = (fsdp_metadata_choice){0};
}

/* Hashes of all tensors that trainers of diffusion models write beside them. */
static bool is_hash(const fsdp_text_pair *pair)
{
    static const char *const keys[] = {"sshs_model_hash", "sshs_legacy_hash",
                                       "modelspec.hash_sha256"};
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++)
        if (fsdp_bytes_are(pair->key, pair->key_size, keys[i]))
            return true;
    return false;
}

/* The keys as they are chosen. */
typedef struct choosing {
    const fsdp_metadata_from *from;
    const fsdp_drop_rules *drops;
    bool keeps; /* the format has room for them */
    fsdp_text_pairs contradicting, kept;
    fsdp_metadata_choice *choice;
} choosing;

static fsdp_status choose(choosing *work, const fsdp_text_pair *pair, fsdp_error *err)
{
    char key[160];
    if (fsdp_drop_rules_take_metadata(work->drops, pair->key, pair->key_size))
        return FSDP_OK;
    if (!work->keeps || (work->from->is_changed && is_hash(pair)))
        return fsdp_text_pairs_add(&work->choice->left_out, pair, err);
    if (work->from->renamed > 0 && fsdp_bytes_are(pair->key, pair->key_size, "tensor_names"))
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "the metadata of '%s' joins quantized tensors by their names "
                         "('tensor_names' of torchao), of which %" PRId64
                         " change: --names keep without --rename leaves them, --drop metadata "
                         "leaves the texts out",
                         work->from->path, work->from->renamed);
    const fsdp_text_pair *files =
        fsdp_text_pairs_find(&work->contradicting, pair->key, pair->key_size);
    if (files)
        return fsdp_fail(err, FSDP_ERR_DAMAGED,
                         "%s of '%s' contradict each other: '%s' of their metadata has two texts; "
                         "--drop metadata:REGEX leaves it out",
                         files->text, work->from->path,
                         fsdp_printable(pair->key, pair->key_size, key, sizeof key));
    return fsdp_text_pairs_add(&work->kept, pair, err);
}

static fsdp_status choose_all(choosing *work, fsdp_error *err)
{
    fsdp_text_pairs all = {0};
    const fsdp_metadata_from *from = work->from;
    fsdp_status st = fsdp_text_pairs_parse(&all, from->carried, from->path, err);
    if (st == FSDP_OK && from->contradicting)
        st = fsdp_text_pairs_parse(&work->contradicting, from->contradicting, from->path, err);
    if (st == FSDP_OK)
        st = fsdp_drop_rules_check_metadata(work->drops, &all, err);
    for (size_t i = 0; i < all.count && st == FSDP_OK; i++)
        st = choose(work, &all.items[i], err);
    fsdp_text_pairs_release(&all);
    return st;
}

static fsdp_status spell_kept(const choosing *work, fsdp_error *err)
{
    fsdp_text text = {0};
    if (work->kept.count == 0)
        return FSDP_OK;
    fsdp_text_pairs_spell(&work->kept, &text);
    if (text.failed) {
        fsdp_text_release(&text);
        return fsdp_fail_memory(err, "metadata");
    }
    work->choice->kept = text.data;
    return FSDP_OK;
}

fsdp_status fsdp_metadata_choose(const fsdp_metadata_from *from, const fsdp_select_opts *opts,
                                 const fsdp_format *target, fsdp_metadata_choice *choice,
                                 fsdp_error *err)
{
    fsdp_drop_rules *drops = NULL;
    choosing work = {.from = from, .keeps = target->caps.metadata, .choice = choice};
    if (!from->carried)
        return FSDP_OK;
    FSDP_TRY(fsdp_drop_rules_create(opts, &drops, err));
    work.drops = drops;
    fsdp_status st = choose_all(&work, err);
    if (st == FSDP_OK)
        st = spell_kept(&work, err);
    fsdp_text_pairs_release(&work.kept);
    fsdp_text_pairs_release(&work.contradicting);
    fsdp_drop_rules_free(drops);
    return st;
}
