/* The tokens in a tokenizer.json: the model BPE with its vocabulary and merges, and the added tokens. */
#include "runtime/tokens/tokenizer_internal.h"

#include "base/core/mem.h"

#include <string.h>

typedef struct model_parts {
    fsdp_json_part vocab, merges, unknown;
} model_parts;

/* A text that must be null or empty. */
static fsdp_status expect_empty(fsdp_json *json, const char *name, fsdp_error *err)
{
    if (fsdp_json_peek(json) == FSDP_JSON_NULL)
        return fsdp_json_null(json, err);
    const char *text;
    size_t size;
    FSDP_TRY(fsdp_json_string(json, &text, &size, err));
    return size == 0 ? FSDP_OK : fsdp_tokenizer_refuse(json, "model's member", name, err);
}

static fsdp_status expect_no_dropout(fsdp_json *json, fsdp_error *err)
{
    if (fsdp_json_peek(json) == FSDP_JSON_NULL)
        return fsdp_json_null(json, err);
    double dropout;
    FSDP_TRY(fsdp_json_f64(json, &dropout, err));
    return dropout == 0 ? FSDP_OK : fsdp_tokenizer_refuse(json, "model's member", "dropout", err);
}

static fsdp_status expect_bpe(fsdp_json *json, fsdp_error *err)
{
    const char *type;
    size_t size;
    FSDP_TRY(fsdp_json_string(json, &type, &size, err));
    return strcmp(type, "BPE") == 0 ? FSDP_OK : fsdp_tokenizer_refuse(json, "model", type, err);
}

static fsdp_status expect_no_fallback(fsdp_json *json, fsdp_error *err)
{
    bool is_on;
    FSDP_TRY(fsdp_json_bool(json, &is_on, err));
    return is_on ? fsdp_tokenizer_refuse(json, "model's member", "byte_fallback", err) : FSDP_OK;
}

enum { TYPE, DROPOUT, UNKNOWN, PREFIX, SUFFIX, FALLBACK, IGNORE_MERGES, VOCAB, MERGES, MEMBERS };

static const char *const model_names[] = {"type",
                                          "dropout",
                                          "unk_token",
                                          "continuing_subword_prefix",
                                          "end_of_word_suffix",
                                          "byte_fallback",
                                          "ignore_merges",
                                          "vocab",
                                          "merges"};

static fsdp_status read_model_member(fsdp_bpe *bpe, fsdp_json *json, int which, model_parts *parts,
                                     fsdp_error *err)
{
    switch (which) {
    case TYPE: return expect_bpe(json, err);
    case DROPOUT: return expect_no_dropout(json, err);
    case UNKNOWN: return fsdp_json_take_part(json, &parts->unknown, err);
    case PREFIX:
    case SUFFIX: return expect_empty(json, model_names[which], err);
    case FALLBACK: return expect_no_fallback(json, err);
    case IGNORE_MERGES: return fsdp_json_bool(json, &bpe->ignore_merges, err);
    case VOCAB: return fsdp_json_take_part(json, &parts->vocab, err);
    default: return fsdp_json_take_part(json, &parts->merges, err);
    }
}

static fsdp_status take_id(fsdp_json *json, uint32_t *id_out, fsdp_error *err)
{
    uint64_t id;
    FSDP_TRY(fsdp_json_u64(json, &id, err));
    if (id >= FSDP_TOKEN_ID_LIMIT)
        return fsdp_json_fail(json, err, "the id %llu is not below 2^31", (unsigned long long)id);
    *id_out = (uint32_t)id;
    return FSDP_OK;
}

static fsdp_status read_vocab(fsdp_vocab *vocab, fsdp_json *json, fsdp_error *err)
{
    FSDP_TRY(fsdp_json_enter_object(json, err));
    for (;;) {
        const char *key;
        size_t size;
        bool more, added;
        FSDP_TRY(fsdp_json_next_key(json, &key, &size, &more, err));
        if (!more)
            break;
        /* the id is added later: the key does not outlive the next token */
        FSDP_TRY(fsdp_vocab_add(vocab, key, size, 0, &added, err));
        if (!added)
            return fsdp_json_fail(json, err, "this token comes twice");
        FSDP_TRY(take_id(json, &vocab->tokens[vocab->count - 1].id, err));
    }
    vocab->model_count = vocab->count;
    return FSDP_OK;
}

/* --- merges --- */

typedef struct merge {
    uint32_t first, second, merged;
} merge;

typedef struct merge_list {
    merge *items;
    size_t count, capacity;
    char *joined; /* both parts of one merge */
    size_t joined_capacity;
} merge_list;

static fsdp_status add_merge(merge_list *list, const fsdp_vocab *vocab, const fsdp_json *json,
                             size_t first_size, size_t size, fsdp_error *err)
{
    char shown[100];
    const fsdp_token *first = fsdp_vocab_find(vocab, list->joined, first_size);
    const fsdp_token *second = fsdp_vocab_find(vocab, list->joined + first_size, size - first_size);
    const fsdp_token *merged = fsdp_vocab_find(vocab, list->joined, size);
    if (!first || !second || !merged)
        return fsdp_json_fail(json, err, "the vocabulary lacks %s of the merge to '%s'",
                              !first    ? "the first part"
                              : !second ? "the second part"
                                        : "the result",
                              fsdp_printable(list->joined, size, shown, sizeof shown));
    if (list->count >= UINT32_MAX - 1 ||
        !fsdp_grow(&list->items, &list->capacity, list->count + 1, sizeof *list->items))
        return fsdp_fail_memory(err, "merges");
    list->items[list->count++] = (merge){first->id, second->id, merged->id};
    return FSDP_OK;
}

static fsdp_status take_merge_part(merge_list *list, fsdp_json *json, size_t *size, fsdp_error *err)
{
    const char *part;
    size_t part_size;
    FSDP_TRY(fsdp_json_string(json, &part, &part_size, err));
    if (!fsdp_grow(&list->joined, &list->joined_capacity, *size + part_size + 1, 1))
        return fsdp_fail_memory(err, "a merge");
    memcpy(list->joined + *size, part, part_size + 1);
    *size += part_size;
    return FSDP_OK;
}

/* ["a", "b"] */
static fsdp_status take_merge_pair(merge_list *list, const fsdp_vocab *vocab, fsdp_json *json,
                                   fsdp_error *err)
{
    size_t size = 0, first_size = 0;
    int count = 0;
    FSDP_TRY(fsdp_json_enter_array(json, err));
    for (bool more;; count++) {
        FSDP_TRY(fsdp_json_next_item(json, &more, err));
        if (!more)
            break;
        if (count == 1)
            first_size = size;
        FSDP_TRY(take_merge_part(list, json, &size, err));
    }
    if (count != 2)
        return fsdp_json_fail(json, err, "a merge has %d parts, not 2", count);
    return add_merge(list, vocab, json, first_size, size, err);
}

/* "a b", and a first line with a version, as merges.txt has it. */
static fsdp_status take_merge_line(merge_list *list, const fsdp_vocab *vocab, fsdp_json *json,
                                   fsdp_error *err)
{
    size_t size = 0;
    FSDP_TRY(take_merge_part(list, json, &size, err));
    if (strncmp(list->joined, "#version", 8) == 0)
        return FSDP_OK;
    char *space = memchr(list->joined, ' ', size);
    size_t first_size = space ? (size_t)(space - list->joined) : size;
    if (!space || memchr(space + 1, ' ', size - first_size - 1))
        return fsdp_json_fail(json, err, "a merge is not two parts with a space between");
    memmove(space, space + 1, size - first_size);
    return add_merge(list, vocab, json, first_size, size - 1, err);
}

static fsdp_status read_merges(merge_list *list, const fsdp_vocab *vocab, fsdp_json *json,
                               fsdp_error *err)
{
    FSDP_TRY(fsdp_json_enter_array(json, err));
    for (;;) {
        bool more;
        FSDP_TRY(fsdp_json_next_item(json, &more, err));
        if (!more)
            return FSDP_OK;
        if (fsdp_json_peek(json) == FSDP_JSON_ARRAY)
            FSDP_TRY(take_merge_pair(list, vocab, json, err));
        else
            FSDP_TRY(take_merge_line(list, vocab, json, err));
    }
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

/* --- the model --- */

static fsdp_status read_tokens(fsdp_bpe *bpe, const fsdp_json *json, const model_parts *parts,
                               fsdp_error *err)
{
    fsdp_json text = fsdp_json_part_open(json, parts->vocab);
    fsdp_status status = read_vocab(&bpe->vocab, &text, err);
    fsdp_json_release(&text);
    if (status != FSDP_OK)
        return status;
    merge_list list = {0};
    text = fsdp_json_part_open(json, parts->merges);
    status = read_merges(&list, &bpe->vocab, &text, err);
    if (status == FSDP_OK)
        status = rank_merges(bpe, &list, err);
    fsdp_json_release(&text);
    fsdp_free(list.items);
    fsdp_free(list.joined);
    return status;
}

/* False when a byte is no token. */
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

static fsdp_status read_model(fsdp_bpe *bpe, fsdp_json *json, model_parts *parts, fsdp_error *err)
{
    fsdp_json_members members = {model_names, MEMBERS, 0};
    FSDP_TRY(fsdp_json_enter_object(json, err));
    for (int which;;) {
        FSDP_TRY(fsdp_json_next_member(json, &members, &which, err));
        if (which < 0)
            break;
        FSDP_TRY(read_model_member(bpe, json, which, parts, err));
    }
    if (!parts->vocab.at || !parts->merges.at)
        return fsdp_json_fail(json, err, "the model has no %s",
                              parts->vocab.at ? "merges" : "vocab");
    return FSDP_OK;
}

fsdp_status fsdp_tokenizer_read_model(fsdp_tokenizer *tokenizer, const fsdp_json *json,
                                      fsdp_json_part part, fsdp_error *err)
{
    char type[FSDP_PART_TYPE];
    FSDP_TRY(fsdp_json_part_type(json, part, type, err));
    if (!part.at)
        return fsdp_json_fail(json, err, "there is no model");
    /* before the members of another model are read as those of BPE */
    if (type[0] && strcmp(type, "BPE") != 0)
        return fsdp_tokenizer_refuse(json, "model", type, err);
    fsdp_json text = fsdp_json_part_open(json, part);
    model_parts parts = {0};
    fsdp_status status = read_model(&tokenizer->bpe, &text, &parts, err);
    fsdp_json_release(&text);
    if (status == FSDP_OK)
        status = read_tokens(&tokenizer->bpe, json, &parts, err);
    if (status == FSDP_OK && !find_bytes(&tokenizer->bpe) && parts.unknown.at)
        status = fsdp_tokenizer_refuse(json, "model's member", "unk_token", err);
    return status;
}

/* --- added tokens --- */

/* A flag of an added token; absent is false. */
enum { ID, CONTENT, SINGLE_WORD, LSTRIP, RSTRIP, NORMALIZED, SPECIAL, ADDED_MEMBERS };

typedef struct added {
    fsdp_added_token token;
    bool special;
} added;

static fsdp_status read_added_member(fsdp_tokenizer *tokenizer, fsdp_json *json, int which,
                                     added *item, fsdp_error *err)
{
    switch (which) {
    case ID: return take_id(json, &item->token.id, err);
    case CONTENT: {
        const char *content;
        FSDP_TRY(fsdp_json_string(json, &content, &item->token.size, err));
        item->token.data =
            fsdp_arena_strndup(&tokenizer->bpe.vocab.arena, content, item->token.size);
        return item->token.data ? FSDP_OK : fsdp_fail_memory(err, "the added tokens");
    }
    case SINGLE_WORD: return fsdp_json_bool(json, &item->token.single_word, err);
    case LSTRIP: return fsdp_json_bool(json, &item->token.lstrip, err);
    case RSTRIP: return fsdp_json_bool(json, &item->token.rstrip, err);
    case NORMALIZED: return fsdp_json_bool(json, &item->token.normalized, err);
    default: return fsdp_json_bool(json, &item->special, err);
    }
}

static fsdp_status read_added_token(fsdp_tokenizer *tokenizer, fsdp_json *json, added *item,
                                    fsdp_error *err)
{
    static const char *const names[] = {"id",     "content",    "single_word", "lstrip",
                                        "rstrip", "normalized", "special"};
    fsdp_json_members members = {names, ADDED_MEMBERS, 0};
    FSDP_TRY(fsdp_json_enter_object(json, err));
    for (int which;;) {
        FSDP_TRY(fsdp_json_next_member(json, &members, &which, err));
        if (which < 0)
            break;
        FSDP_TRY(read_added_member(tokenizer, json, which, item, err));
    }
    if (!(members.seen & 1u << ID) || !item->token.data)
        return fsdp_json_fail(json, err, "an added token has no %s",
                              item->token.data ? "id" : "content");
    return FSDP_OK;
}

/*
 * The token's place in the vocabulary. The library takes no ids from the added tokens: a token of the
 * model keeps the model's, and others get the ids that follow. A file that says otherwise is refused,
 * since its author and the library would mean different ids.
 */
static fsdp_status place_token(fsdp_vocab *vocab, const fsdp_json *json, const added *item,
                               int64_t *highest, fsdp_error *err)
{
    char shown[100];
    const fsdp_added_token *token = &item->token;
    fsdp_printable(token->data, token->size, shown, sizeof shown);
    fsdp_token *known = fsdp_vocab_find(vocab, token->data, token->size);
    if (known && known->is_added)
        return fsdp_json_fail(json, err, "the added token '%s' comes twice", shown);
    int64_t follows =
        *highest >= (int64_t)vocab->model_count ? *highest + 1 : (int64_t)vocab->model_count;
    int64_t wanted = known ? (int64_t)known->id : follows;
    if (wanted != (int64_t)token->id)
        return fsdp_json_fail(json, err, "the added token '%s' has the id %u, but its id is %lld%s",
                              shown, token->id, (long long)wanted,
                              known ? " in the vocabulary" : ", the one that follows");
    if (!known) {
        bool is_new;
        FSDP_TRY(fsdp_vocab_add(vocab, token->data, token->size, token->id, &is_new, err));
        known = &vocab->tokens[vocab->count - 1];
    }
    known->is_added = true;
    known->is_special = item->special;
    *highest = wanted > *highest ? wanted : *highest;
    return FSDP_OK;
}

/* Tokens that stand in normalized text are looked for in their normalized form. */
static fsdp_status normalize_token(fsdp_tokenizer *tokenizer, fsdp_added_token *token,
                                   fsdp_error *err)
{
    fsdp_text normal = {0};
    fsdp_status status =
        fsdp_unicode_add_normal(tokenizer->unicode, token->data, token->size, &normal, err);
    if (status == FSDP_OK) {
        token->data = fsdp_arena_strndup(&tokenizer->bpe.vocab.arena, normal.data, normal.size);
        token->size = normal.size;
        if (!token->data)
            status = fsdp_fail_memory(err, "the added tokens");
    }
    fsdp_text_release(&normal);
    return status;
}

static fsdp_status read_added(fsdp_tokenizer *tokenizer, fsdp_json *json, fsdp_error *err)
{
    int64_t highest = -1;
    FSDP_TRY(fsdp_json_enter_array(json, err));
    for (;;) {
        bool more;
        FSDP_TRY(fsdp_json_next_item(json, &more, err));
        if (!more)
            return FSDP_OK;
        added item = {0};
        FSDP_TRY(read_added_token(tokenizer, json, &item, err));
        if (item.token.size == 0)
            continue;
        FSDP_TRY(place_token(&tokenizer->bpe.vocab, json, &item, &highest, err));
        if (item.token.normalized && tokenizer->normalizes)
            FSDP_TRY(normalize_token(tokenizer, &item.token, err));
        FSDP_TRY(fsdp_added_tokens_add(item.token.normalized ? &tokenizer->added_normalized
                                                             : &tokenizer->added,
                                       &item.token, err));
    }
}

fsdp_status fsdp_tokenizer_read_added(fsdp_tokenizer *tokenizer, const fsdp_json *json,
                                      fsdp_json_part part, fsdp_error *err)
{
    if (!part.at)
        return FSDP_OK;
    fsdp_json text = fsdp_json_part_open(json, part);
    fsdp_status status = read_added(tokenizer, &text, err);
    fsdp_json_release(&text);
    fsdp_added_tokens_sort(&tokenizer->added);
    fsdp_added_tokens_sort(&tokenizer->added_normalized);
    return status;
}
