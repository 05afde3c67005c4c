/*
 * Byte pair encoding. See merge.h. A word is a list of symbols, at first one per byte. The pair of
 * neighbours with the lowest rank, of those the leftmost, becomes one symbol, until no pair has a rank.
 * A heap of pairs finds it, so that a word of n bytes takes O(n log n); pairs that are gone meanwhile
 * are recognised by their rank.
 */
#include "runtime/tokens/merge.h"

#include <string.h>

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

void fsdp_merging_begin(fsdp_merging *merging, size_t text_size)
{
    size_t words = FEWEST_WORDS;
    while (words < MOST_WORDS && words < text_size / 16)
        words *= 2;
    if (text_size < 1024 || merging->words)
        return;
    merging->words = fsdp_alloc(words, sizeof *merging->words);
    merging->word_mask = words - 1;
}

void fsdp_merging_release(fsdp_merging *merging)
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

fsdp_status fsdp_bpe_add_word(const fsdp_bpe *bpe, fsdp_merging *merging, const char *word,
                              size_t size, fsdp_ids *ids, fsdp_error *err)
{
    seen_word *seen = remembered(merging, word, size);
    if (seen && seen->size == size && memcmp(seen->bytes, word, size) == 0) {
        for (size_t i = 0; i < seen->count; i++)
            FSDP_TRY(fsdp_ids_add(ids, seen->ids[i], err));
        return FSDP_OK;
    }
    size_t begin = ids->count;
    const fsdp_token *whole =
        bpe->ignore_merges ? fsdp_vocab_find_bytes(&bpe->vocab, word, size) : NULL;
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
