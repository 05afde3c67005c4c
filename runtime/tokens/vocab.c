/* The tokens of a vocabulary, by their bytes and by their ids. See vocab.h. */
#include "runtime/tokens/vocab.h"

#include "runtime/tokens/unicode.h"

#include <stdlib.h>
#include <string.h>

void fsdp_vocab_release(fsdp_vocab *vocab)
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

fsdp_status fsdp_vocab_add(fsdp_vocab *vocab, const char *text, size_t size, uint32_t id,
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

fsdp_token *fsdp_vocab_find(const fsdp_vocab *vocab, const char *text, size_t size)
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

const fsdp_token *fsdp_vocab_find_bytes(const fsdp_vocab *vocab, const char *data, size_t size)
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

fsdp_status fsdp_vocab_sort(fsdp_vocab *vocab, const fsdp_token **twice_out,
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

const fsdp_token *fsdp_vocab_at(const fsdp_vocab *vocab, uint32_t id)
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

int64_t fsdp_vocab_end(const fsdp_vocab *vocab)
{
    return vocab->count > 0 ? (int64_t)vocab->tokens[vocab->by_id[vocab->count - 1]].id + 1 : 0;
}
