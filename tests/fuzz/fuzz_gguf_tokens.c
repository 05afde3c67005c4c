/*
 * Fuzz target: the tokenizer of a model on its way into GGUF, a folder (bundle.h) of tokenizer.json,
 * tokenizer.model or spiece.model, added_tokens.json, tokenizer_config.json and config.json; data that is not
 * a folder is a tokenizer.model. The lists of tokens that are accepted have one length, and special tokens
 * are in them.
 */
#include "statedict/gguf_model/gguf_values.h"
#include "statedict/models/config.h"
#include "tests/fuzz/bundle.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { MOST_ROWS = 2000 };

static void require(bool truth)
{
    if (!truth)
        abort();
}

static const fsdp_value *find(const fsdp_named_values *pairs, const char *name)
{
    for (size_t i = 0; i < pairs->count; i++)
        if (strcmp(pairs->items[i].name, name) == 0)
            return &pairs->items[i].value;
    return NULL;
}

static size_t length_of(const fsdp_named_values *pairs, const char *name)
{
    const fsdp_value *list = find(pairs, name);
    require(list && list->kind == FSDP_VALUE_LIST);
    return list->as.list.count;
}

static void check_pairs(const fsdp_named_values *pairs, bool is_sentencepiece)
{
    size_t count = length_of(pairs, "tokenizer.ggml.tokens");
    require(count > 0 && length_of(pairs, "tokenizer.ggml.token_type") == count);
    for (size_t i = 0; i < count; i++) {
        const fsdp_value *types = find(pairs, "tokenizer.ggml.token_type");
        const fsdp_value *tokens = find(pairs, "tokenizer.ggml.tokens");
        require(types->as.list.items[i].as.i64 >= 1 && types->as.list.items[i].as.i64 <= 6);
        require(tokens->as.list.items[i].kind == FSDP_VALUE_STRING);
    }
    const fsdp_value *unknown = find(pairs, "tokenizer.ggml.unknown_token_id");
    if (!is_sentencepiece)
        return;
    require(length_of(pairs, "tokenizer.ggml.scores") == count);
    const fsdp_value *scores = find(pairs, "tokenizer.ggml.scores");
    for (size_t i = 0; i < count; i++)
        require(isfinite(scores->as.list.items[i].as.f64));
    require(unknown && unknown->as.i64 >= 0 && (size_t)unknown->as.i64 < count);
}

/* tokens borrow the file. */
static void read_config(const bundle *files, fsdp_config_file *config, fsdp_gguf_tokens *tokens)
{
    fsdp_named_values pairs = {0};
    fsdp_gguf_tokens read = *tokens;
    const fsdp_gguf_model model = {.config = config, .directory = "fuzz"};
    for (size_t i = 0; i < files->count; i++) {
        const memory_entry *file = &files->files[i];
        if (strcmp(file->name, "config.json") != 0 || file->size == 0)
            continue;
        if (fsdp_config_parse((const char *)file->data, file->size, NULL, config, NULL) ==
                FSDP_OK &&
            fsdp_gguf_config(&model, &pairs, &read, NULL) == FSDP_OK)
            *tokens = read;
        fsdp_named_values_release(&pairs);
        break;
    }
    tokens->vocab_size = tokens->vocab_size < MOST_ROWS ? tokens->vocab_size : MOST_ROWS;
}

static void read_tokenizer(bundle *files)
{
    fsdp_gguf_tokens tokens = {.pre = "default", .vocab_size = -1, .bos = -1, .eos = -1, .pad = -1};
    fsdp_named_values pairs = {0};
    fsdp_config_file config = {0};
    fsdp_gguf_found found;
    fsdp_error err = {0};
    bool has_json = false;
    for (size_t i = 0; i < files->count; i++)
        has_json = has_json || strcmp(files->files[i].name, "tokenizer.json") == 0;
    read_config(files, &config, &tokens);
    fsdp_io *io = memory_folder(files->files, files->count);
    fsdp_status st = fsdp_gguf_tokenizer(io, "fuzz", &tokens, &pairs, &found, &err);
    require(st == FSDP_OK || (err.status == st && err.text[0]));
    if (st == FSDP_OK && found == FSDP_GGUF_TOKENIZER)
        check_pairs(&pairs, !has_json);
    else if (st == FSDP_OK)
        require(pairs.count == 0);
    fsdp_config_release(&config);
    fsdp_named_values_release(&pairs);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    bundle files = {.count = 0};
    if (bundle_begins(data, size))
        bundle_split(data, size, &files);
    else
        files.files[files.count++] = (memory_entry){"tokenizer.model", data, size};
    read_tokenizer(&files);
    bundle_release(&files);
    return 0;
}
