/* The data of a training: sequences of tokens, and their order. See token_data.h. */
#include "runtime/tokens/token_data.h"

#include "runtime/tokens/token_files.h"
#include "runtime/tokens/token_order.h"

#include <inttypes.h>
#include <string.h>

enum { VAL_PART = 20 }; /* one of so many tokens is for validation */

/* Tokens [begin, end) of files. */
typedef struct token_range {
    const fsdp_token_files *files;
    int64_t begin, end, sequences;
} token_range;

struct fsdp_token_data {
    fsdp_token_files files, val_files;
    token_range parts[2];
    bool has_val;
    int64_t vocab, length;
    bool in_order;
    uint64_t seed;
};

static fsdp_status read_files(fsdp_token_files *files, const char *path,
                              const fsdp_token_options *options, int64_t vocab, fsdp_error *err)
{
    FSDP_TRY(fsdp_token_files_find(files, path, err));
    if (!files->are_bin && !options->tokenizer)
        return fsdp_fail(err, FSDP_ERR_USAGE, "'%s' is text and needs a tokenizer", path);
    FSDP_TRY(fsdp_token_files_encode(files, options->tokenizer, vocab, err));
    if (files->tokens == 0)
        return fsdp_fail(err, FSDP_ERR_DAMAGED, "the data '%s' is empty", path);
    return FSDP_OK;
}

static token_range make_part(const fsdp_token_files *files, int64_t begin, int64_t end,
                             int64_t length)
{
    int64_t sequences = end > begin ? (end - begin - 1) / length : 0;
    return (token_range){files, begin, end, sequences};
}

static fsdp_status divide(fsdp_token_data *data, const fsdp_token_options *options, fsdp_error *err)
{
    int64_t tokens = data->files.tokens, length = data->length;
    int64_t train = data->has_val ? tokens : tokens - tokens / VAL_PART;
    data->parts[FSDP_TOKENS_TRAIN] = make_part(&data->files, 0, train, length);
    data->parts[FSDP_TOKENS_VAL] =
        data->has_val ? make_part(&data->val_files, 0, data->val_files.tokens, length)
                      : make_part(&data->files, train, tokens, length);
    if (data->parts[FSDP_TOKENS_TRAIN].sequences == 0)
        return fsdp_fail(err, FSDP_ERR_DAMAGED,
                         "the data '%s' holds %" PRId64 " tokens%s, a sequence takes %" PRId64
                         " (the context and one more)",
                         options->path, train, data->has_val ? "" : " for training", length + 1);
    if (data->has_val && data->parts[FSDP_TOKENS_VAL].sequences == 0)
        return fsdp_fail(err, FSDP_ERR_DAMAGED,
                         "the data '%s' for validation holds %" PRId64
                         " tokens, a sequence takes %" PRId64,
                         options->val, data->val_files.tokens, length + 1);
    return FSDP_OK;
}

static fsdp_status open_data(fsdp_token_data *data, const fsdp_token_options *options,
                             fsdp_error *err)
{
    FSDP_TRY(read_files(&data->files, options->path, options, data->vocab, err));
    if (data->has_val)
        FSDP_TRY(read_files(&data->val_files, options->val, options, data->vocab, err));
    return divide(data, options, err);
}

fsdp_status fsdp_token_data_open(const fsdp_token_options *options, fsdp_token_data **data_out,
                                 fsdp_error *err)
{
    *data_out = NULL;
    if (!options || !options->path || options->length < 1 || options->length >= INT64_MAX / 16)
        return fsdp_fail(err, FSDP_ERR_USAGE, "data needs a path and a length of at least 1");
    if (options->vocab < 0 || (options->vocab == 0 && !options->tokenizer))
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "data needs the size of the vocabulary, or a tokenizer");
    fsdp_token_data *data = fsdp_alloc(1, sizeof *data);
    if (!data)
        return fsdp_fail_memory(err, "the data");
    data->vocab = options->vocab ? options->vocab : fsdp_tokenizer_vocab(options->tokenizer);
    data->length = options->length;
    data->in_order = options->in_order;
    data->seed = options->seed;
    data->has_val = options->val != NULL;
    fsdp_status status = open_data(data, options, err);
    if (status == FSDP_OK)
        *data_out = data;
    else
        fsdp_token_data_close(data);
    return status;
}

void fsdp_token_data_close(fsdp_token_data *data)
{
    if (!data)
        return;
    fsdp_token_files_release(&data->files);
    fsdp_token_files_release(&data->val_files);
    fsdp_free(data);
}

int64_t fsdp_token_data_count(const fsdp_token_data *data, fsdp_token_part part)
{
    return data->parts[part].sequences;
}

int64_t fsdp_token_data_tokens(const fsdp_token_data *data, fsdp_token_part part)
{
    return data->parts[part].end - data->parts[part].begin;
}

fsdp_status fsdp_token_data_read(const fsdp_token_data *data, fsdp_token_part part, uint64_t epoch,
                                 int64_t k, int64_t *ids, fsdp_error *err)
{
    const token_range *from = &data->parts[part];
    if (k < 0 || k >= from->sequences)
        return fsdp_fail(err, FSDP_ERR_USAGE, "sequence %" PRId64 " of %" PRId64 " does not exist",
                         k, from->sequences);
    bool shuffles = part == FSDP_TOKENS_TRAIN && !data->in_order;
    int64_t i = shuffles ? (int64_t)fsdp_token_order(data->seed, epoch, (uint64_t)from->sequences,
                                                     (uint64_t)k)
                         : k;
    return fsdp_token_files_read(from->files, from->begin + i * data->length, data->length + 1,
                                 data->vocab, ids, err);
}

/* --- identity --- */

static fsdp_status set_text(fsdp_value *value, const char *text, fsdp_error *err)
{
    if (fsdp_utf8_valid(text, strlen(text)))
        return fsdp_value_set_bytes(value, FSDP_VALUE_STRING, text, strlen(text), err);
    return fsdp_value_set_bytes(value, FSDP_VALUE_BYTES, text, strlen(text), err);
}

static fsdp_status describe_file(const fsdp_token_file *file, fsdp_value *value, fsdp_error *err)
{
    fsdp_hash hash;
    fsdp_text hex = {0};
    FSDP_TRY(fsdp_token_file_hash(file, &hash, err));
    FSDP_TRY(fsdp_value_set_items(value, FSDP_VALUE_DICT, 6, err));
    fsdp_value *items = value->as.list.items;
    FSDP_TRY(set_text(&items[0], "name", err));
    FSDP_TRY(set_text(&items[1], file->name, err));
    FSDP_TRY(set_text(&items[2], "size", err));
    items[3] = fsdp_value_i64(file->size);
    FSDP_TRY(set_text(&items[4], "xxh3", err));
    fsdp_text_add_hex(&hex, hash.bytes, sizeof hash.bytes);
    fsdp_status status = hex.failed ? fsdp_fail_memory(err, "the identity of the data")
                                    : set_text(&items[5], hex.data, err);
    fsdp_text_release(&hex);
    return status;
}

static fsdp_status describe_files(const fsdp_token_files *files, fsdp_value *value, fsdp_error *err)
{
    FSDP_TRY(fsdp_value_set_items(value, FSDP_VALUE_LIST, files->count, err));
    for (size_t i = 0; i < files->count; i++)
        FSDP_TRY(describe_file(&files->items[i], &value->as.list.items[i], err));
    return FSDP_OK;
}

static fsdp_status describe(const fsdp_token_data *data, fsdp_value *value, fsdp_error *err)
{
    FSDP_TRY(fsdp_value_set_items(value, FSDP_VALUE_DICT, 4, err));
    fsdp_value *items = value->as.list.items;
    FSDP_TRY(set_text(&items[0], "train", err));
    FSDP_TRY(describe_files(&data->files, &items[1], err));
    FSDP_TRY(set_text(&items[2], "val", err));
    return data->has_val ? describe_files(&data->val_files, &items[3], err) : FSDP_OK;
}

fsdp_status fsdp_token_data_identity(const fsdp_token_data *data, fsdp_value *value_out,
                                     fsdp_error *err)
{
    *value_out = (fsdp_value){0};
    fsdp_status status = describe(data, value_out, err);
    if (status != FSDP_OK)
        fsdp_value_release(value_out);
    return status;
}
