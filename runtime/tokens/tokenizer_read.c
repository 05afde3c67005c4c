/*
 * tokenizer.json -> tokenizer: refuses models that are not byte-level BPE, and puts the tokens, merges and
 * added tokens that the file gives (formats/tokenizer_json.h) into tables for encoding.
 */
#include "runtime/tokens/tokenizer_internal.h"

#include "base/core/mem.h"

#include <string.h>

/* --- the model -------------------------------------------------------------------------------- */

static fsdp_status check_model(const fsdp_tokenizer_json *file, fsdp_error *err)
{
    const fsdp_tokenizer_model *model = &file->model;
    const struct {
        bool is_set;
        const char *name;
    } refused[] = {{model->has_dropout, "dropout"},
                   {model->has_prefix, "continuing_subword_prefix"},
                   {model->has_suffix, "end_of_word_suffix"},
                   {model->byte_fallback, "byte_fallback"}};
    if (!file->has_model)
        return fsdp_json_fail(&file->json, err, "there is no model");
    if (model->type[0] && strcmp(model->type, "BPE") != 0)
        return fsdp_tokenizer_refuse(&file->json, "model", model->type, err);
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++)
        if (refused[i].is_set)
            return fsdp_tokenizer_refuse(&file->json, "model's member", refused[i].name, err);
    if (!model->vocab.at || !model->merges.at)
        return fsdp_json_fail(&file->json, err, "the model has no %s",
                              model->vocab.at ? "merges" : "vocab");
    return model->is_scored ? fsdp_json_fail(&file->json, err, "the vocabulary is not an object")
                            : FSDP_OK;
}

static fsdp_status check_id(const fsdp_json *json, int64_t id, fsdp_error *err)
{
    if (id < 0 || id >= FSDP_TOKEN_ID_LIMIT)
        return fsdp_json_fail(json, err, "the id %lld is %s", (long long)id,
                              id < 0 ? "negative" : "not below 2^31");
    return FSDP_OK;
}

static fsdp_status take_token(void *context, const fsdp_json *json, const fsdp_file_token *token,
                              fsdp_error *err)
{
    fsdp_vocab *vocab = context;
    bool is_new;
    FSDP_TRY(check_id(json, token->id, err));
    FSDP_TRY(fsdp_vocab_add(vocab, token->text, token->size, (uint32_t)token->id, &is_new, err));
    return is_new ? FSDP_OK : fsdp_json_fail(json, err, "this token comes twice");
}

/* False when a byte is not a token. */
static bool find_bytes(fsdp_bpe *bpe)
{
    bool all = true;
    for (int byte = 0; byte < 256; byte++) {
        char letter = (char)byte;
        const fsdp_token *token = fsdp_vocab_find_bytes(&bpe->vocab, &letter, 1);
        bpe->byte_ids[byte] = token ? (int64_t)token->id : -1;
        all = all && token;
    }
    return all;
}

typedef struct merge {
    uint32_t first, second, merged;
} merge;

typedef struct merge_list {
    const fsdp_vocab *vocab;
    merge *items;
    size_t count, capacity;
} merge_list;

static fsdp_status take_merge(void *context, const fsdp_json *json, const fsdp_file_merge *from,
                              fsdp_error *err)
{
    char shown[100];
    merge_list *list = context;
    size_t rest = from->size - from->first_size;
    const fsdp_token *first = fsdp_vocab_find(list->vocab, from->text, from->first_size);
    const fsdp_token *second = fsdp_vocab_find(list->vocab, from->text + from->first_size, rest);
    const fsdp_token *merged = fsdp_vocab_find(list->vocab, from->text, from->size);
    if (!first || !second || !merged)
        return fsdp_json_fail(json, err, "the vocabulary lacks %s of the merge to '%s'",
                              !first    ? "the first part"
                              : !second ? "the second part"
                                        : "the result",
                              fsdp_printable(from->text, from->size, shown, sizeof shown));
    if (list->count >= UINT32_MAX - 1 ||
        !fsdp_grow(&list->items, &list->capacity, list->count + 1, sizeof *list->items))
        return fsdp_fail_memory(err, "merges");
    list->items[list->count++] = (merge){first->id, second->id, merged->id};
    return FSDP_OK;
}

/* A later merge of a pair takes the place of an earlier one, as in the library. */
static fsdp_status rank_merges(fsdp_bpe *bpe, const merge_list *list, fsdp_error *err)
{
    FSDP_TRY(fsdp_pair_table_init(&bpe->merges, list->count, err));
    for (size_t i = 0; i < list->count; i++) {
        const merge *item = &list->items[i];
        fsdp_pair_table_set(&bpe->merges, item->first, item->second,
                            (uint64_t)i << 32 | item->merged);
    }
    return FSDP_OK;
}

static fsdp_status read_model(fsdp_bpe *bpe, const fsdp_tokenizer_json *file, fsdp_error *err)
{
    FSDP_TRY(fsdp_tokenizer_json_tokens(file, take_token, &bpe->vocab, err));
    bpe->vocab.model_count = bpe->vocab.count;
    bpe->ignore_merges = file->model.ignore_merges;
    merge_list list = {.vocab = &bpe->vocab};
    fsdp_status status = fsdp_tokenizer_json_merges(file, take_merge, &list, err);
    if (status == FSDP_OK)
        status = rank_merges(bpe, &list, err);
    fsdp_free(list.items);
    if (status == FSDP_OK && !find_bytes(bpe) && file->model.has_unknown)
        status = fsdp_tokenizer_refuse(&file->json, "model's member", "unk_token", err);
    return status;
}

/* --- added tokens ----------------------------------------------------------------------------- */

typedef struct added_reader {
    fsdp_tokenizer *tokenizer;
    int64_t highest; /* id so far */
} added_reader;

/*
 * The token's place in the vocabulary. The library takes no ids from the added tokens: a token of the
 * model keeps the model's, and others get the ids that follow. A file that says otherwise is refused,
 * since its author and the library would mean different ids.
 */
static fsdp_status place_token(added_reader *reader, const fsdp_json *json,
                               const fsdp_added_token *added, fsdp_error *err)
{
    char shown[100];
    fsdp_vocab *vocab = &reader->tokenizer->bpe.vocab;
    fsdp_printable(added->text, added->size, shown, sizeof shown);
    fsdp_token *known = fsdp_vocab_find(vocab, added->text, added->size);
    if (known && known->is_added)
        return fsdp_json_fail(json, err, "the added token '%s' comes twice", shown);
    int64_t model_count = (int64_t)vocab->model_count;
    int64_t follows = reader->highest >= model_count ? reader->highest + 1 : model_count;
    int64_t wanted = known ? (int64_t)known->id : follows;
    if (wanted != added->id)
        return fsdp_json_fail(json, err,
                              "the added token '%s' has the id %lld, but its id is %lld%s", shown,
                              (long long)added->id, (long long)wanted,
                              known ? " in the vocabulary" : ", the one that follows");
    if (!known) {
        bool is_new;
        FSDP_TRY(fsdp_vocab_add(vocab, added->text, added->size, (uint32_t)wanted, &is_new, err));
        known = &vocab->tokens[vocab->count - 1];
    }
    known->is_added = true;
    known->is_special = added->special;
    reader->highest = wanted > reader->highest ? wanted : reader->highest;
    return FSDP_OK;
}

/* Tokens that stand in normalized text are looked for in their normalized form. */
static fsdp_status note_token(fsdp_tokenizer *tokenizer, const fsdp_added_token *added,
                              fsdp_error *err)
{
    fsdp_added_token token = *added;
    fsdp_text normal = {0};
    fsdp_status status = FSDP_OK;
    if (added->normalized && tokenizer->rules.normalizes) {
        status =
            fsdp_unicode_add_normal(tokenizer->unicode, added->text, added->size, &normal, err);
        token.text = normal.data;
        token.size = normal.size;
    }
    if (status == FSDP_OK) {
        token.text = fsdp_arena_strndup(&tokenizer->bpe.vocab.arena, token.text, token.size);
        status = token.text ? fsdp_added_tokens_add(added->normalized ? &tokenizer->added_normalized
                                                                      : &tokenizer->added,
                                                    &token, err)
                            : fsdp_fail_memory(err, "the added tokens");
    }
    fsdp_text_release(&normal);
    return status;
}

static fsdp_status take_added(void *context, const fsdp_json *json, const fsdp_added_token *added,
                              fsdp_error *err)
{
    added_reader *reader = context;
    if (added->id == -1)
        return fsdp_json_fail(json, err, "an added token has no id");
    FSDP_TRY(check_id(json, added->id, err));
    if (added->size == 0)
        return FSDP_OK;
    FSDP_TRY(place_token(reader, json, added, err));
    return note_token(reader->tokenizer, added, err);
}

static fsdp_status read_added(fsdp_tokenizer *tokenizer, const fsdp_tokenizer_json *file,
                              fsdp_error *err)
{
    added_reader reader = {tokenizer, -1};
    FSDP_TRY(fsdp_tokenizer_json_added(file, take_added, &reader, err));
    fsdp_added_tokens_sort(&tokenizer->added);
    fsdp_added_tokens_sort(&tokenizer->added_normalized);
    return FSDP_OK;
}

/* --- all of it -------------------------------------------------------------------------------- */

static fsdp_status sort_tokens(const fsdp_json *json, fsdp_vocab *vocab, fsdp_error *err)
{
    const fsdp_token *twice, *before;
    FSDP_TRY(fsdp_vocab_sort(vocab, &twice, &before, err));
    if (!twice)
        return FSDP_OK;
    char one[100], other[100];
    return fsdp_fail(err, FSDP_ERR_DAMAGED, "'%s': the tokens '%s' and '%s' both have the id %u",
                     json->name, fsdp_printable(before->data, before->size, one, sizeof one),
                     fsdp_printable(twice->data, twice->size, other, sizeof other), twice->id);
}

static fsdp_status check_template(const fsdp_json *json, const fsdp_vocab *vocab,
                                  const fsdp_template_ids *ids, fsdp_error *err)
{
    for (int i = 0; i < ids->count; i++) {
        int64_t id = ids->ids[i];
        if (id < 0 || id >= FSDP_TOKEN_ID_LIMIT || !fsdp_vocab_at(vocab, (uint32_t)id))
            return fsdp_fail(err, FSDP_ERR_DAMAGED,
                             "'%s': no token has the id %lld of the template", json->name,
                             (long long)id);
    }
    return FSDP_OK;
}

static fsdp_status read_file(fsdp_tokenizer *tokenizer, const fsdp_tokenizer_json *file,
                             fsdp_error *err)
{
    const fsdp_json *json = &file->json;
    fsdp_vocab *vocab = &tokenizer->bpe.vocab;
    FSDP_TRY(check_model(file, err));
    FSDP_TRY(fsdp_tokenizer_json_rules(file, &tokenizer->rules, err));
    FSDP_TRY(fsdp_unicode_init(tokenizer->unicode, tokenizer->rules.normalizes, err));
    FSDP_TRY(read_model(&tokenizer->bpe, file, err));
    FSDP_TRY(read_added(tokenizer, file, err));
    FSDP_TRY(sort_tokens(json, vocab, err));
    FSDP_TRY(check_template(json, vocab, &tokenizer->rules.before, err));
    return check_template(json, vocab, &tokenizer->rules.after, err);
}

fsdp_status fsdp_tokenizer_read(fsdp_tokenizer *tokenizer, const char *origin, fsdp_error *err)
{
    tokenizer->unicode = fsdp_alloc(1, sizeof *tokenizer->unicode);
    if (!tokenizer->unicode)
        return fsdp_fail_memory(err, "a tokenizer");
    fsdp_tokenizer_json file;
    fsdp_status status =
        fsdp_tokenizer_json_open(&file, tokenizer->text, tokenizer->text_size, origin, err);
    if (status == FSDP_OK)
        status = read_file(tokenizer, &file, err);
    fsdp_tokenizer_json_release(&file);
    return status;
}
