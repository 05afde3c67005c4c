/* Sends lines of JSON through a tokenizer. See tokenize_lines.h. Errors name the line. */
#include "runtime/tokens/tokenize_lines.h"

#include "base/core/mem.h"
#include "base/data/json.h"
#include "runtime/tokens/tokenizer.h"

#include <inttypes.h>
#include <stdio.h>

static fsdp_status encode_line(const fsdp_tokenizer *tokenizer, bool special, fsdp_json *json,
                               fsdp_ids *ids, fsdp_error *err)
{
    const char *text;
    size_t size;
    FSDP_TRY(fsdp_json_string(json, &text, &size, err));
    fsdp_status status = fsdp_tokenizer_encode(tokenizer, text, size, special, ids, err);
    if (status == FSDP_OK)
        return fsdp_json_finish(json, err);
    fsdp_error_prefix(err, "%s", json->name);
    return status;
}

static void add_ids(const fsdp_ids *ids, fsdp_text *out)
{
    fsdp_text_add(out, "[", 1);
    for (size_t i = 0; i < ids->count; i++)
        fsdp_text_addf(out, "%s%" PRId64, i > 0 ? "," : "", ids->ids[i]);
    fsdp_text_add(out, "]", 1);
}

static fsdp_status read_ids(fsdp_json *json, fsdp_ids *ids, fsdp_error *err)
{
    FSDP_TRY(fsdp_json_enter_array(json, err));
    for (;;) {
        bool more;
        int64_t id;
        FSDP_TRY(fsdp_json_next_item(json, &more, err));
        if (!more)
            return fsdp_json_finish(json, err);
        FSDP_TRY(fsdp_json_i64(json, &id, err));
        FSDP_TRY(fsdp_ids_add(ids, id, err));
    }
}

static fsdp_status decode_line(const fsdp_tokenizer *tokenizer, fsdp_json *json, fsdp_ids *ids,
                               fsdp_text *text, fsdp_error *err)
{
    FSDP_TRY(read_ids(json, ids, err));
    fsdp_status status = fsdp_tokenizer_decode(tokenizer, ids->ids, ids->count, false, text, err);
    if (status != FSDP_OK)
        fsdp_error_prefix(err, "%s", json->name);
    return status;
}

fsdp_status fsdp_tokenize_line(const fsdp_tokenizer *tokenizer,
                               const fsdp_tokenize_options *options, const fsdp_text *line,
                               int64_t line_number, fsdp_text *out, fsdp_error *err)
{
    fsdp_json json;
    fsdp_ids ids = {0};
    fsdp_text text = {0};
    char name[40];
    snprintf(name, sizeof name, "line %" PRId64, line_number);
    fsdp_json_init(&json, line->data, line->size, name);
    fsdp_status status = options->decode
                             ? decode_line(tokenizer, &json, &ids, &text, err)
                             : encode_line(tokenizer, options->special, &json, &ids, err);
    if (status == FSDP_OK && options->decode)
        fsdp_text_add_json_shown(out, text.data, text.size);
    else if (status == FSDP_OK)
        add_ids(&ids, out);
    if (status == FSDP_OK && out->failed)
        status = fsdp_fail_memory(err, "a line");
    fsdp_json_release(&json);
    fsdp_ids_release(&ids);
    fsdp_text_release(&text);
    return status;
}
