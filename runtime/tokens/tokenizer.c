/*
 * Opens tokenizers, from the vocabulary and the added tokens of a tokenizer.json; encodes and decodes. See
 * tokenizer.h.
 */
#include "runtime/tokens/tokenizer.h"
#include "base/core/mem.h"
#include "base/io/io.h"
#include "formats/tokenizer_json.h"
#include "runtime/tokens/pair_table.h"
#include "runtime/tokens/split.h"
#include "runtime/tokens/unicode.h"
#include "runtime/tokens/vocab.h"

#include <stdlib.h>
#include <string.h>

/* === the vocabulary =========================================================================== */

static void vocab_release(fsdp_vocab *vocab)
{
    fsdp_free(vocab->tokens);
    fsdp_name_table_release(&vocab->spelled);
    fsdp_name_table_release(&vocab->raw);
    fsdp_free(vocab->by_id);
    fsdp_arena_release(&vocab->arena);
    *vocab = (fsdp_vocab){0};
}

/* --- the alphabet of ByteLevel --- */

static bool spells_itself(uint32_t byte)
{
    return (byte >= '!' && byte <= '~') || (byte >= 0xA1 && byte <= 0xFF && byte != 0xAD);
}

/* The other 68 bytes are U+0100 and on, in their order: 0 to 32, 127 to 160, 173. */
uint32_t fsdp_alphabet_letter(uint8_t byte)
{
    if (spells_itself(byte))
        return byte;
    return 0x100u + (byte <= 32 ? byte : byte < 0xAD ? byte - 127u + 33 : 67u);
}

/* The byte that a character spells, -1 when it spells none. */
static int byte_of_letter(uint32_t c)
{
    if (c < 0x100)
        return spells_itself(c) ? (int)c : -1;
    uint32_t position = c - 0x100;
    return position <= 32   ? (int)position
           : position < 67  ? (int)position + 94
           : position == 67 ? 0xAD
                            : -1;
}

/* The bytes that a text spells, into `bytes`, which has capacity for `size`. False when it spells none. */
static bool spelled_bytes(const char *text, size_t size, char *bytes, size_t *count_out)
{
    size_t count = 0;
    for (const char *at = text, *end = text + size; at < end;) {
        int byte = byte_of_letter(fsdp_utf8_take(&at));
        if (byte < 0)
            return false;
        bytes[count++] = (char)byte;
    }
    *count_out = count;
    return true;
}

/* --- by bytes --- */

/* Tokens as a tokenizer.json writes them. *added_out is false when there is one already. */
static fsdp_status vocab_add(fsdp_vocab *vocab, const char *text, size_t size, uint32_t id,
                             bool *added_out, fsdp_error *err)
{
    *added_out = false;
    char *data = size < UINT32_MAX ? fsdp_arena_strndup(&vocab->arena, text, size) : NULL;
    if (!data || vocab->count >= UINT32_MAX - 1 ||
        !fsdp_grow(&vocab->tokens, &vocab->capacity, vocab->count + 1, sizeof *vocab->tokens))
        return fsdp_fail_memory(err, "the vocabulary");
    size_t bytes = size;
    bool is_raw = !spelled_bytes(text, size, data, &bytes);
    if (is_raw) {
        memcpy(data, text, size);
        bytes = size;
    }
    const uint64_t *number =
        fsdp_name_table_enter(is_raw ? &vocab->raw : &vocab->spelled, data, bytes, vocab->count);
    if (!number)
        return fsdp_fail_memory(err, "the vocabulary");
    if (*number < vocab->count)
        return FSDP_OK;
    vocab->tokens[vocab->count++] =
        (fsdp_token){.data = data, .size = (uint32_t)bytes, .id = id, .is_raw = is_raw};
    *added_out = true;
    return FSDP_OK;
}

static fsdp_token *find_in(const fsdp_vocab *vocab, const fsdp_name_table *table, const char *data,
                           size_t size)
{
    const uint64_t *number = fsdp_name_table_find(table, data, size);
    return number ? &vocab->tokens[*number] : NULL;
}

/* The token that is written so, NULL when there is none. */
static fsdp_token *vocab_find(const fsdp_vocab *vocab, const char *text, size_t size)
{
    char small[256];
    char *bytes = size <= sizeof small ? small : fsdp_realloc(NULL, size, 1);
    size_t count;
    fsdp_token *token = NULL;
    if (bytes && spelled_bytes(text, size, bytes, &count))
        token = find_in(vocab, &vocab->spelled, bytes, count);
    else
        token = find_in(vocab, &vocab->raw, text, size);
    if (bytes != small)
        fsdp_free(bytes);
    return token;
}

/* The token of the model that stands for these bytes. */
static const fsdp_token *vocab_find_bytes(const fsdp_vocab *vocab, const char *data, size_t size)
{
    const fsdp_token *token = find_in(vocab, &vocab->spelled, data, size);
    return token && token < vocab->tokens + vocab->model_count ? token : NULL;
}

/* --- by ids --- */

static int compare_ids(const void *a, const void *b, void *context)
{
    const fsdp_token *tokens = context;
    uint32_t x = tokens[*(const uint32_t *)a].id, y = tokens[*(const uint32_t *)b].id;
    return x < y ? -1 : x > y;
}

/* Orders the tokens by id. *twice_out is a token whose id another one (before_out) has, NULL without one. */
static fsdp_status vocab_sort(fsdp_vocab *vocab, const fsdp_token **twice_out,
                              const fsdp_token **before_out, fsdp_error *err)
{
    *twice_out = *before_out = NULL;
    fsdp_free(vocab->by_id);
    vocab->by_id = fsdp_realloc(NULL, vocab->count, sizeof *vocab->by_id);
    if (!vocab->by_id)
        return fsdp_fail_memory(err, "the vocabulary");
    for (size_t i = 0; i < vocab->count; i++)
        vocab->by_id[i] = (uint32_t)i;
    qsort_r(vocab->by_id, vocab->count, sizeof *vocab->by_id, compare_ids, vocab->tokens);
    for (size_t i = 1; i < vocab->count; i++) {
        const fsdp_token *before = &vocab->tokens[vocab->by_id[i - 1]];
        const fsdp_token *token = &vocab->tokens[vocab->by_id[i]];
        if (before->id == token->id) {
            *twice_out = token;
            *before_out = before;
            return FSDP_OK;
        }
    }
    return FSDP_OK;
}

/* After vocab_sort; NULL when no token has this id. */
static const fsdp_token *vocab_at(const fsdp_vocab *vocab, uint32_t id)
{
    size_t low = 0;
    for (size_t high = vocab->count; low < high;) {
        size_t middle = (low + high) / 2;
        if (vocab->tokens[vocab->by_id[middle]].id < id)
            low = middle + 1;
        else
            high = middle;
    }
    const fsdp_token *token = low < vocab->count ? &vocab->tokens[vocab->by_id[low]] : NULL;
    return token && token->id == id ? token : NULL;
}

/* The highest id + 1; after vocab_sort. */
static int64_t vocab_end(const fsdp_vocab *vocab)
{
    return vocab->count > 0 ? (int64_t)vocab->tokens[vocab->by_id[vocab->count - 1]].id + 1 : 0;
}

/* === merging the bytes of a word ============================================================== */

/*
 * Byte pair encoding. A word is a list of symbols, at first one per byte. The pair of
 * neighbours with the lowest rank, of those the leftmost, becomes one symbol, until no pair has a rank.
 * A heap of pairs finds it, so that a word of n bytes takes O(n log n); pairs that are gone meanwhile
 * are recognised by their rank.
 */

/* The model of a tokenizer; constant while words are merged. */
typedef struct fsdp_bpe {
    fsdp_vocab vocab;
    fsdp_pair_table merges; /* two ids -> rank << 32 | id of both together */
    int64_t byte_ids[256];  /* -1: no token is this byte */
    bool ignore_merges;     /* a word that is a token needs no merges */
} fsdp_bpe;

/* One caller's memory is reused from word to word. Zero-initialise; release when done. */
typedef struct fsdp_merging {
    struct fsdp_symbol *symbols;
    uint64_t *heap;
    size_t symbol_capacity, heap_capacity, heap_count;
    struct fsdp_word *words; /* words seen lately; NULL: none are kept */
    size_t word_mask;
} fsdp_merging;

#define NONE UINT32_MAX

typedef struct fsdp_symbol {
    uint32_t id;
    uint32_t before, next; /* NONE at the ends */
    uint32_t
        rank; /* of the pair with the next symbol; NONE: they do not merge, or this one is gone */
    uint32_t merged; /* the id of that pair */
} symbol;

enum { WORD_BYTES = 22, WORD_IDS = 10, FEWEST_WORDS = 64, MOST_WORDS = 16384 };

/* One cache line. */
typedef struct fsdp_word {
    uint8_t size, count;
    char bytes[WORD_BYTES];
    uint32_t ids[WORD_IDS];
} seen_word;

/* Words of long texts repeat: keeps the ids of some. Without memory for it nothing is kept. */
static void merging_begin(fsdp_merging *merging, size_t text_size)
{
    size_t words = FEWEST_WORDS;
    while (words < MOST_WORDS && words < text_size / 16)
        words *= 2;
    if (text_size < 1024 || merging->words)
        return;
    merging->words = fsdp_alloc(words, sizeof *merging->words);
    merging->word_mask = words - 1;
}

static void merging_release(fsdp_merging *merging)
{
    fsdp_free(merging->symbols);
    fsdp_free(merging->heap);
    fsdp_free(merging->words);
    *merging = (fsdp_merging){0};
}

fsdp_status fsdp_ids_add(fsdp_ids *ids, int64_t id, fsdp_error *err)
{
    if (!fsdp_grow(&ids->ids, &ids->capacity, ids->count + 1, sizeof *ids->ids))
        return fsdp_fail_memory(err, "token ids");
    ids->ids[ids->count++] = id;
    return FSDP_OK;
}

void fsdp_ids_release(fsdp_ids *ids)
{
    fsdp_free(ids->ids);
    *ids = (fsdp_ids){0};
}

/* --- the heap: rank << 32 | position of the left symbol, the lowest first --- */

static void push(fsdp_merging *merging, uint64_t item)
{
    uint64_t *heap = merging->heap;
    size_t at = merging->heap_count++;
    for (size_t parent; at > 0 && heap[parent = (at - 1) / 2] > item; at = parent)
        heap[at] = heap[parent];
    heap[at] = item;
}

static uint64_t pop(fsdp_merging *merging)
{
    uint64_t *heap = merging->heap, lowest = heap[0], item = heap[--merging->heap_count];
    size_t at = 0, count = merging->heap_count;
    for (size_t child; (child = 2 * at + 1) < count; at = child) {
        child += child + 1 < count && heap[child + 1] < heap[child];
        if (heap[child] >= item)
            break;
        heap[at] = heap[child];
    }
    heap[at] = item;
    return lowest;
}

/* --- symbols --- */

/* Looks up the pair of a symbol and the next one. */
static void rate_pair(const fsdp_bpe *bpe, fsdp_merging *merging, uint32_t position)
{
    symbol *left = &merging->symbols[position];
    uint64_t merge = left->next == NONE ? UINT64_MAX
                                        : fsdp_pair_table_get(&bpe->merges, left->id,
                                                              merging->symbols[left->next].id);
    left->rank = (uint32_t)(merge >> 32);
    left->merged = (uint32_t)merge;
    if (left->rank != NONE)
        push(merging, (uint64_t)left->rank << 32 | position);
}

static fsdp_status begin_word(const fsdp_bpe *bpe, fsdp_merging *merging, const char *word,
                              size_t size, fsdp_error *err)
{
    if (size >= NONE / 4)
        return fsdp_fail(err, FSDP_ERR_LIMIT, "a word of %zu bytes is too long", size);
    /* every symbol is rated once, and two are after each merge */
    if (!fsdp_grow(&merging->symbols, &merging->symbol_capacity, size, sizeof *merging->symbols) ||
        !fsdp_grow(&merging->heap, &merging->heap_capacity, 3 * size, sizeof *merging->heap))
        return fsdp_fail_memory(err, "a word");
    merging->heap_count = 0;
    uint32_t last = (uint32_t)size - 1;
    for (uint32_t i = 0; i <= last; i++) {
        int64_t id = bpe->byte_ids[(unsigned char)word[i]];
        if (id < 0)
            return fsdp_fail(err, FSDP_ERR_USAGE, "no token of the vocabulary is the byte 0x%02x",
                             (unsigned char)word[i]);
        merging->symbols[i] = (symbol){
            .id = (uint32_t)id, .before = i == 0 ? NONE : i - 1, .next = i == last ? NONE : i + 1};
    }
    for (uint32_t i = 0; i <= last; i++)
        rate_pair(bpe, merging, i);
    return FSDP_OK;
}

static void merge_all(const fsdp_bpe *bpe, fsdp_merging *merging)
{
    while (merging->heap_count > 0) {
        uint64_t item = pop(merging);
        uint32_t position = (uint32_t)item;
        symbol *left = &merging->symbols[position];
        if (left->rank != item >> 32)
            continue; /* one of the two merged with another symbol */
        symbol *right = &merging->symbols[left->next];
        left->id = left->merged;
        left->next = right->next;
        right->rank = NONE;
        if (left->next != NONE)
            merging->symbols[left->next].before = position;
        rate_pair(bpe, merging, position);
        if (left->before != NONE)
            rate_pair(bpe, merging, left->before);
    }
}

/* --- words --- */

/* A hash of few bytes. */
static uint64_t word_hash(const char *data, size_t size)
{
    uint64_t hash = size;
    for (; size >= 8; data += 8, size -= 8) {
        uint64_t word;
        memcpy(&word, data, sizeof word);
        hash = (hash ^ word) * UINT64_C(0x9E3779B97F4A7C15);
        hash ^= hash >> 32;
    }
    uint64_t last = 0;
    for (size_t i = 0; i < size; i++)
        last = last << 8 | (unsigned char)data[i];
    hash = (hash ^ last) * UINT64_C(0x9E3779B97F4A7C15);
    return hash ^ hash >> 29;
}

static seen_word *remembered(const fsdp_merging *merging, const char *word, size_t size)
{
    if (!merging->words || size > WORD_BYTES)
        return NULL;
    return &merging->words[word_hash(word, size) & merging->word_mask];
}

static void remember(seen_word *seen, const char *word, size_t size, const int64_t *ids,
                     size_t count)
{
    if (count > WORD_IDS)
        return;
    seen->size = (uint8_t)size;
    seen->count = (uint8_t)count;
    memcpy(seen->bytes, word, size);
    for (size_t i = 0; i < count; i++)
        seen->ids[i] = (uint32_t)ids[i];
}

static fsdp_status add_symbols(const fsdp_merging *merging, fsdp_ids *ids, fsdp_error *err)
{
    for (uint32_t at = 0; at != NONE; at = merging->symbols[at].next)
        FSDP_TRY(fsdp_ids_add(ids, merging->symbols[at].id, err));
    return FSDP_OK;
}

/* Appends the ids of a word of at least one byte. A byte that no token is: FSDP_ERR_USAGE. */
static fsdp_status bpe_add_word(const fsdp_bpe *bpe, fsdp_merging *merging, const char *word,
                                size_t size, fsdp_ids *ids, fsdp_error *err)
{
    seen_word *seen = remembered(merging, word, size);
    if (seen && seen->size == size && memcmp(seen->bytes, word, size) == 0) {
        for (size_t i = 0; i < seen->count; i++)
            FSDP_TRY(fsdp_ids_add(ids, seen->ids[i], err));
        return FSDP_OK;
    }
    size_t begin = ids->count;
    const fsdp_token *whole = bpe->ignore_merges ? vocab_find_bytes(&bpe->vocab, word, size) : NULL;
    if (whole) {
        FSDP_TRY(fsdp_ids_add(ids, whole->id, err));
    } else {
        FSDP_TRY(begin_word(bpe, merging, word, size, err));
        merge_all(bpe, merging);
        FSDP_TRY(add_symbols(merging, ids, err));
    }
    if (seen)
        remember(seen, word, size, ids->ids + begin, ids->count - begin);
    return FSDP_OK;
}

/* === added tokens in text ===================================================================== */

/* Added tokens are found in text before it is cut into words. */

/* Zero-initialise; release when done. */
typedef struct fsdp_added_tokens {
    fsdp_added_token *items; /* in the order of their bytes, once sorted; texts are borrowed */
    size_t count, capacity;
    bool begins[256]; /* whether one begins with this byte */
} fsdp_added_tokens;

typedef struct fsdp_added_match {
    size_t begin, end;
    int64_t id;
} fsdp_added_match;

static void added_tokens_release(fsdp_added_tokens *tokens)
{
    fsdp_free(tokens->items);
    *tokens = (fsdp_added_tokens){0};
}

static fsdp_status added_tokens_add(fsdp_added_tokens *tokens, const fsdp_added_token *token,
                                    fsdp_error *err)
{
    if (!fsdp_grow(&tokens->items, &tokens->capacity, tokens->count + 1, sizeof *tokens->items))
        return fsdp_fail_memory(err, "the added tokens");
    tokens->items[tokens->count++] = *token;
    tokens->begins[(unsigned char)token->text[0]] = true;
    return FSDP_OK;
}

static int compare_bytes(const void *a, const void *b)
{
    const fsdp_added_token *x = a, *y = b;
    int order = memcmp(x->text, y->text, x->size < y->size ? x->size : y->size);
    return order ? order : x->size < y->size ? -1 : x->size > y->size;
}

/* Once, before the search. */
static void added_tokens_sort(fsdp_added_tokens *tokens)
{
    if (tokens->count > 0)
        qsort(tokens->items, tokens->count, sizeof *tokens->items, compare_bytes);
}

/* The first of the tokens [low, high), alike up to `depth`, whose next byte is at least `byte`. A
 * token that ends there comes before all others. */
static size_t first_with(const fsdp_added_tokens *tokens, size_t low, size_t high, size_t depth,
                         unsigned byte)
{
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        const fsdp_added_token *token = &tokens->items[middle];
        if (token->size <= depth || (unsigned char)token->text[depth] < byte)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* The longest token that the text begins with, NULL without one. */
static const fsdp_added_token *longest(const fsdp_added_tokens *tokens, const char *text,
                                       size_t size)
{
    const fsdp_added_token *found = NULL;
    size_t low = 0, high = tokens->count;
    for (size_t depth = 0; low < high; depth++) {
        if (tokens->items[low].size == depth)
            found = &tokens->items[low];
        if (depth == size)
            break;
        unsigned byte = (unsigned char)text[depth];
        low = first_with(tokens, low, high, depth, byte);
        high = first_with(tokens, low, high, depth, byte + 1);
    }
    return found;
}

static unsigned bits_before(const fsdp_unicode *unicode, const char *at)
{
    const char *from = fsdp_utf8_back(at);
    return fsdp_unicode_bits(unicode, fsdp_utf8_take(&from));
}

/* False when the token must be a word and is part of one. */
static bool stands_alone(const fsdp_unicode *unicode, const char *text, size_t size, size_t begin,
                         size_t end)
{
    const char *behind = text + end;
    if (begin > 0 && (bits_before(unicode, text + begin) & FSDP_UNICODE_WORD))
        return false;
    return end == size ||
           !(fsdp_unicode_bits(unicode, fsdp_utf8_take(&behind)) & FSDP_UNICODE_WORD);
}

/* White space up to the end of the match before is not looked at again: a token may be white space itself. */
static void take_spaces(const fsdp_added_token *token, const fsdp_unicode *unicode,
                        const char *text, size_t size, fsdp_added_match *match)
{
    size_t taken = match->begin, token_begin = match->end - token->size;
    match->begin = token_begin;
    if (token->lstrip) {
        const char *at = text + token_begin, *from = text + taken;
        while (at > from && (bits_before(unicode, at) & FSDP_UNICODE_SPACE))
            at = fsdp_utf8_back(at);
        match->begin = at > from ? (size_t)(at - text) : taken;
    }
    if (token->rstrip) {
        if (match->end < taken)
            match->end = taken;
        for (const char *at = text + match->end, *next = at; at < text + size; at = next) {
            if (!(fsdp_unicode_bits(unicode, fsdp_utf8_take(&next)) & FSDP_UNICODE_SPACE))
                break;
            match->end = (size_t)(next - text);
        }
    }
}

/*
 * The next match at or after *at, the leftmost and of those the longest; *at moves past the token's own
 * bytes. *match is the match before, a zeroed one at first: white space that it took is not taken again. A
 * token in such white space is a match nevertheless, as in the library.
 */
static bool added_tokens_next(const fsdp_added_tokens *tokens, const fsdp_unicode *unicode,
                              const char *text, size_t size, size_t *at, fsdp_added_match *match)
{
    if (tokens->count == 0)
        return false;
    for (size_t begin = *at; begin < size; begin++) {
        if (!tokens->begins[(unsigned char)text[begin]])
            continue;
        const fsdp_added_token *token = longest(tokens, text + begin, size - begin);
        if (!token)
            continue;
        *at = begin + token->size;
        if (token->single_word && !stands_alone(unicode, text, size, begin, *at)) {
            begin = *at - 1;
            continue;
        }
        *match = (fsdp_added_match){.begin = match->end, .end = *at, .id = token->id};
        take_spaces(token, unicode, text, size, match);
        return true;
    }
    return false;
}

/* === reading tokenizer.json =================================================================== */

/*
 * tokenizer.json -> tokenizer: refuses models that are not byte-level BPE, and puts the tokens, merges and
 * added tokens that the file gives (formats/tokenizer_json.h) into tables for encoding.
 */

struct fsdp_tokenizer {
    char *text;
    size_t text_size;
    bool is_bytes; /* the rest is empty then */
    fsdp_bpe bpe;
    fsdp_unicode *unicode;
    fsdp_added_tokens added, added_normalized;
    fsdp_text_rules rules; /* ids of its template are tokens */
};

/* Ids are below this, which keeps pairs of them and their ranks in 64 bits. */
#define FSDP_TOKEN_ID_LIMIT (UINT32_C(1) << 31)

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
    FSDP_TRY(vocab_add(vocab, token->text, token->size, (uint32_t)token->id, &is_new, err));
    return is_new ? FSDP_OK : fsdp_json_fail(json, err, "this token comes twice");
}

/* False when a byte is not a token. */
static bool find_bytes(fsdp_bpe *bpe)
{
    bool all = true;
    for (int byte = 0; byte < 256; byte++) {
        char letter = (char)byte;
        const fsdp_token *token = vocab_find_bytes(&bpe->vocab, &letter, 1);
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
    const fsdp_token *first = vocab_find(list->vocab, from->text, from->first_size);
    const fsdp_token *second = vocab_find(list->vocab, from->text + from->first_size, rest);
    const fsdp_token *merged = vocab_find(list->vocab, from->text, from->size);
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
    fsdp_token *known = vocab_find(vocab, added->text, added->size);
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
        FSDP_TRY(vocab_add(vocab, added->text, added->size, (uint32_t)wanted, &is_new, err));
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
        status = token.text ? added_tokens_add(added->normalized ? &tokenizer->added_normalized
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
    added_tokens_sort(&tokenizer->added);
    added_tokens_sort(&tokenizer->added_normalized);
    return FSDP_OK;
}

/* --- all of it -------------------------------------------------------------------------------- */

static fsdp_status sort_tokens(const fsdp_json *json, fsdp_vocab *vocab, fsdp_error *err)
{
    const fsdp_token *twice, *before;
    FSDP_TRY(vocab_sort(vocab, &twice, &before, err));
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
        if (id < 0 || id >= FSDP_TOKEN_ID_LIMIT || !vocab_at(vocab, (uint32_t)id))
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

/* Fills the tokenizer from its text. */
static fsdp_status tokenizer_read(fsdp_tokenizer *tokenizer, const char *origin, fsdp_error *err)
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

/* === encoding and decoding ==================================================================== */

/* Larger than any that people use by far. */
enum { MOST_TEXT = 1 << 30 };

static const char BYTES[] = "bytes";

fsdp_status fsdp_tokenizer_parse(const char *text, size_t size, const char *origin,
                                 fsdp_tokenizer **tokenizer_out, fsdp_error *err)
{
    *tokenizer_out = NULL;
    fsdp_tokenizer *tokenizer = fsdp_alloc(1, sizeof *tokenizer);
    if (tokenizer)
        tokenizer->text = fsdp_strndup(text, size);
    if (!tokenizer || !tokenizer->text) {
        fsdp_tokenizer_free(tokenizer);
        return fsdp_fail_memory(err, "a tokenizer");
    }
    tokenizer->text_size = size;
    tokenizer->is_bytes = strcmp(tokenizer->text, BYTES) == 0;
    fsdp_status status = tokenizer->is_bytes ? FSDP_OK : tokenizer_read(tokenizer, origin, err);
    if (status == FSDP_OK)
        *tokenizer_out = tokenizer;
    else
        fsdp_tokenizer_free(tokenizer);
    return status;
}

static fsdp_status read_whole(fsdp_file *file, const char *path, char **text_out, size_t *size_out,
                              fsdp_error *err)
{
    int64_t size = 0;
    int result = file->ops->size(file, &size);
    if (result < 0)
        return fsdp_fail_errno(err, -result, "cannot find the size of '%s'", path);
    if (size > MOST_TEXT)
        return fsdp_fail(err, FSDP_ERR_LIMIT, "'%s' is too large for a tokenizer", path);
    *text_out = fsdp_realloc(NULL, (size_t)size, 1);
    *size_out = (size_t)size;
    if (!*text_out)
        return fsdp_fail_memory(err, "a tokenizer");
    return fsdp_io_read(file, path, *text_out, *size_out, 0, err);
}

static fsdp_status open_file(const char *path, fsdp_tokenizer **tokenizer_out, fsdp_error *err)
{
    fsdp_file *file;
    char *text = NULL;
    size_t size = 0;
    FSDP_TRY(fsdp_io_open(NULL, path, FSDP_IO_READ, &file, err));
    fsdp_status status = read_whole(file, path, &text, &size, err);
    fsdp_status closed = fsdp_io_close(&file, path, status == FSDP_OK ? err : NULL);
    status = status == FSDP_OK ? closed : status;
    if (status == FSDP_OK)
        status = fsdp_tokenizer_parse(text, size, path, tokenizer_out, err);
    fsdp_free(text);
    return status;
}

fsdp_status fsdp_tokenizer_open(const char *path, fsdp_tokenizer **tokenizer_out, fsdp_error *err)
{
    *tokenizer_out = NULL;
    if (strcmp(path, BYTES) == 0)
        return fsdp_tokenizer_parse(BYTES, strlen(BYTES), BYTES, tokenizer_out, err);
    fsdp_io *io = fsdp_io_posix();
    fsdp_file_info info;
    if (io->ops->info(io, path, &info) != 0 || info.kind != FSDP_FILE_DIRECTORY)
        return open_file(path, tokenizer_out, err);
    char *inside = fsdp_path_join(path, "tokenizer.json");
    if (!inside)
        return fsdp_fail_memory(err, "a path");
    fsdp_status status = open_file(inside, tokenizer_out, err);
    fsdp_free(inside);
    return status;
}

void fsdp_tokenizer_free(fsdp_tokenizer *tokenizer)
{
    if (!tokenizer)
        return;
    fsdp_free(tokenizer->text);
    vocab_release(&tokenizer->bpe.vocab);
    fsdp_pair_table_release(&tokenizer->bpe.merges);
    if (tokenizer->unicode)
        fsdp_unicode_release(tokenizer->unicode);
    fsdp_free(tokenizer->unicode);
    added_tokens_release(&tokenizer->added);
    added_tokens_release(&tokenizer->added_normalized);
    fsdp_free(tokenizer);
}

int64_t fsdp_tokenizer_vocab(const fsdp_tokenizer *tokenizer)
{
    return tokenizer->is_bytes ? 256 : vocab_end(&tokenizer->bpe.vocab);
}

const char *fsdp_tokenizer_text(const fsdp_tokenizer *tokenizer, size_t *size_out)
{
    *size_out = tokenizer->text_size;
    return tokenizer->text;
}

int64_t fsdp_tokenizer_end_of_text(const fsdp_tokenizer *tokenizer)
{
    static const char *const names[] = {"<|endoftext|>", "<|end_of_text|>", "</s>"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        const fsdp_token *token = vocab_find(&tokenizer->bpe.vocab, names[i], strlen(names[i]));
        if (token && token->is_special)
            return token->id;
    }
    return -1;
}

/* --- encode --- */

typedef struct encoding {
    const fsdp_tokenizer *tokenizer;
    fsdp_merging merging;
    fsdp_text spaced, normal; /* a piece with a space before it; a normalized piece */
    fsdp_ids *ids;
} encoding;

/* Cuts a piece by the steps of the pre-tokenizer from this one on, and merges the words. */
static fsdp_status add_piece(encoding *encoder, int step, const char *piece, size_t size,
                             fsdp_error *err)
{
    const fsdp_tokenizer *tokenizer = encoder->tokenizer;
    if (step == tokenizer->rules.step_count)
        return bpe_add_word(&tokenizer->bpe, &encoder->merging, piece, size, encoder->ids, err);
    const fsdp_split_step *rule = &tokenizer->rules.steps[step];
    if (rule->adds_space && piece[0] != ' ') {
        encoder->spaced.size = 0; /* the last step alone adds one: no other piece is in use */
        fsdp_text_add(&encoder->spaced, " ", 1);
        fsdp_text_add(&encoder->spaced, piece, size);
        if (encoder->spaced.failed)
            return fsdp_fail_memory(err, "a piece of text");
        piece = encoder->spaced.data;
        size = encoder->spaced.size;
    }
    fsdp_split split = fsdp_split_of(rule->pattern);
    if (!split)
        return add_piece(encoder, step + 1, piece, size, err);
    for (const char *end = piece + size; piece < end;) {
        size_t word = split(tokenizer->unicode, piece, end);
        FSDP_TRY(add_piece(encoder, step + 1, piece, word, err));
        piece += word;
    }
    return FSDP_OK;
}

static fsdp_status add_plain(encoding *encoder, const char *text, size_t size, fsdp_error *err)
{
    return size > 0 ? add_piece(encoder, 0, text, size, err) : FSDP_OK;
}

typedef fsdp_status (*add_between)(encoding *encoder, const char *text, size_t size,
                                   fsdp_error *err);

/* Adds the ids of the added tokens in the text, and of the text between them. */
static fsdp_status add_with_tokens(encoding *encoder, const fsdp_added_tokens *tokens,
                                   const char *text, size_t size, add_between between,
                                   fsdp_error *err)
{
    fsdp_added_match match = {0};
    size_t taken = 0;
    for (size_t at = 0;
         added_tokens_next(tokens, encoder->tokenizer->unicode, text, size, &at, &match);) {
        if (taken < match.begin)
            FSDP_TRY(between(encoder, text + taken, match.begin - taken, err));
        FSDP_TRY(fsdp_ids_add(encoder->ids, match.id, err));
        taken = match.end;
    }
    return between(encoder, text + taken, size - taken, err);
}

static fsdp_status add_normalized(encoding *encoder, const char *text, size_t size, fsdp_error *err)
{
    const fsdp_tokenizer *tokenizer = encoder->tokenizer;
    if (tokenizer->rules.normalizes && !fsdp_unicode_is_normal(tokenizer->unicode, text, size)) {
        encoder->normal.size = 0;
        FSDP_TRY(fsdp_unicode_add_normal(tokenizer->unicode, text, size, &encoder->normal, err));
        text = encoder->normal.data;
        size = encoder->normal.size;
    }
    return add_with_tokens(encoder, &tokenizer->added_normalized, text, size, add_plain, err);
}

static fsdp_status add_all(fsdp_ids *ids, const fsdp_template_ids *more, fsdp_error *err)
{
    for (int i = 0; i < more->count; i++)
        FSDP_TRY(fsdp_ids_add(ids, more->ids[i], err));
    return FSDP_OK;
}

static fsdp_status encode_bytes(const char *text, size_t size, fsdp_ids *ids, fsdp_error *err)
{
    if (size > SIZE_MAX - ids->count ||
        !fsdp_grow(&ids->ids, &ids->capacity, ids->count + size, sizeof *ids->ids))
        return fsdp_fail_memory(err, "token ids");
    for (size_t i = 0; i < size; i++)
        ids->ids[ids->count + i] = (unsigned char)text[i];
    ids->count += size;
    return FSDP_OK;
}

static fsdp_status encode_text(encoding *encoder, const char *text, size_t size, bool with_special,
                               fsdp_error *err)
{
    const fsdp_tokenizer *tokenizer = encoder->tokenizer;
    size_t good = fsdp_utf8_check(text, size);
    if (good < size)
        return fsdp_fail(err, FSDP_ERR_DAMAGED, "the text is not UTF-8 at byte %zu", good);
    if (with_special)
        FSDP_TRY(add_all(encoder->ids, &tokenizer->rules.before, err));
    FSDP_TRY(add_with_tokens(encoder, &tokenizer->added, text, size, add_normalized, err));
    return with_special ? add_all(encoder->ids, &tokenizer->rules.after, err) : FSDP_OK;
}

fsdp_status fsdp_tokenizer_encode(const fsdp_tokenizer *tokenizer, const char *text, size_t size,
                                  bool with_special, fsdp_ids *ids, fsdp_error *err)
{
    if (tokenizer->is_bytes)
        return encode_bytes(text, size, ids, err);
    size_t count = ids->count;
    encoding encoder = {.tokenizer = tokenizer, .ids = ids};
    merging_begin(&encoder.merging, size);
    fsdp_status status = encode_text(&encoder, text, size, with_special, err);
    merging_release(&encoder.merging);
    fsdp_text_release(&encoder.spaced);
    fsdp_text_release(&encoder.normal);
    if (status != FSDP_OK)
        ids->count = count;
    return status;
}

/* --- decode --- */

static fsdp_status add_token(const fsdp_tokenizer *tokenizer, int64_t id, bool skip_special,
                             fsdp_text *bytes, fsdp_error *err)
{
    if (id < 0 || id >= fsdp_tokenizer_vocab(tokenizer))
        return fsdp_fail(err, FSDP_ERR_USAGE, "the id %lld is not in the vocabulary of %lld ids",
                         (long long)id, (long long)fsdp_tokenizer_vocab(tokenizer));
    char byte = (char)id;
    if (tokenizer->is_bytes) {
        fsdp_text_add(bytes, &byte, 1);
        return FSDP_OK;
    }
    const fsdp_token *token = vocab_at(&tokenizer->bpe.vocab, (uint32_t)id);
    if (token && !(skip_special && token->is_special))
        fsdp_text_add(bytes, token->data, token->size);
    return FSDP_OK;
}

fsdp_status fsdp_tokenizer_decode(const fsdp_tokenizer *tokenizer, const int64_t *ids, size_t count,
                                  bool skip_special, fsdp_text *text, fsdp_error *err)
{
    fsdp_text bytes = {0};
    fsdp_status status = FSDP_OK;
    for (size_t i = 0; i < count && status == FSDP_OK; i++)
        status = add_token(tokenizer, ids[i], skip_special, &bytes, err);
    if (status == FSDP_OK) {
        fsdp_utf8_add_lossy(text, bytes.data, bytes.size);
        if (bytes.failed || text->failed)
            status = fsdp_fail_memory(err, "text");
    }
    fsdp_text_release(&bytes);
    return status;
}

/* --- the tokenizer of bytes for other programs --- */

void fsdp_tokenizer_add_bytes_json(fsdp_text *text)
{
    static const char level[] = "{\"type\":\"ByteLevel\",\"add_prefix_space\":false,"
                                "\"trim_offsets\":true,\"use_regex\":false}";
    fsdp_text_addf(text, "{\"version\":\"1.0\",\"truncation\":null,\"padding\":null,"
                         "\"added_tokens\":[],\"normalizer\":null,");
    fsdp_text_addf(text, "\"pre_tokenizer\":%s,\"post_processor\":%s,\"decoder\":%s,", level, level,
                   level);
    fsdp_text_addf(text, "\"model\":{\"type\":\"BPE\",\"dropout\":null,\"unk_token\":null,"
                         "\"continuing_subword_prefix\":null,\"end_of_word_suffix\":null,"
                         "\"fuse_unk\":false,\"byte_fallback\":false,\"ignore_merges\":false,"
                         "\"vocab\":{");
    for (int byte = 0; byte < 256; byte++) {
        char letter[4];
        size_t size = fsdp_utf8_put(fsdp_alphabet_letter((uint8_t)byte), letter);
        fsdp_text_add(text, ",", byte > 0);
        fsdp_text_add_json_string(text, letter, size);
        fsdp_text_addf(text, ":%d", byte);
    }
    fsdp_text_addf(text, "},\"merges\":[]}}\n");
}
