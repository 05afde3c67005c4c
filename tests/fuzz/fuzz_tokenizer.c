/*
 * Fuzz target: a tokenizer.json. A tokenizer that is accepted encodes a text of all that patterns tell
 * apart, and the input itself; its ids decode, and where no token is added, to the same text.
 */
#include "base/core/mem.h"
#include "runtime/tokens/tokenize_lines.h"
#include "runtime/tokens/unicode.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static const char sample[] = "I'm they'LL it'\xC5\xBF a1234 x=3;\r\n\r\n  ab abab "
                             "\tq\xCC\x87\xCC\xA3 \xE1\x84\x80\xE1\x85\xA1"
                             "\xE1\x86\xA8 e\xCC\x81 <x>  <|endoftext|> \xF0\x9F\x98\x80 "
                             "\xE3\x80\x80\xEF\xA4\x80\xE0\xA5\x98 end  ";

static void require(bool truth)
{
    if (!truth)
        abort();
}

static void check_text(const fsdp_tokenizer *tokenizer, const char *text, size_t size)
{
    fsdp_ids ids = {0};
    fsdp_text back = {0};
    fsdp_error err = {0};
    fsdp_status status = fsdp_tokenizer_encode(tokenizer, text, size, true, &ids, &err);
    require(status == FSDP_OK || (err.status == status && err.text[0] && ids.count == 0));
    for (size_t i = 0; i < ids.count; i++)
        require(ids.ids[i] >= 0 && ids.ids[i] < fsdp_tokenizer_vocab(tokenizer));
    require(fsdp_tokenizer_decode(tokenizer, ids.ids, ids.count, true, &back, NULL) == FSDP_OK);
    require(fsdp_utf8_check(back.data ? back.data : "", back.size) == back.size);
    fsdp_ids_release(&ids);
    fsdp_text_release(&back);
}

/* Lines of JSON: the text as a string and the input as it is. */
static void check_lines(const fsdp_tokenizer *tokenizer, const char *text, size_t size)
{
    fsdp_text line = {0}, ids = {0}, back = {0};
    const fsdp_tokenize_options encode = {.special = true}, decode = {.decode = true};
    fsdp_text_add_json_string(&line, sample, sizeof sample - 1);
    if (fsdp_tokenize_line(tokenizer, &encode, &line, 1, &ids, NULL) == FSDP_OK)
        require(fsdp_tokenize_line(tokenizer, &decode, &ids, 1, &back, NULL) == FSDP_OK);
    line.size = 0;
    fsdp_text_add(&line, text, size);
    fsdp_error err = {0};
    fsdp_status status = fsdp_tokenize_line(tokenizer, &decode, &line, 2, &back, &err);
    require(status == FSDP_OK || (err.status == status && err.text[0]));
    fsdp_text_release(&line);
    fsdp_text_release(&ids);
    fsdp_text_release(&back);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    const char *text = size > 0 ? (const char *)data : "";
    fsdp_tokenizer *tokenizer = NULL;
    fsdp_error err = {0};
    fsdp_status status = fsdp_tokenizer_parse(text, size, "fuzz", &tokenizer, &err);
    require(status == FSDP_OK ? tokenizer != NULL
                              : !tokenizer && err.status == status && err.text[0]);
    if (status != FSDP_OK)
        return 0;
    check_text(tokenizer, sample, sizeof sample - 1);
    check_text(tokenizer, text, size);
    check_lines(tokenizer, text, size);
    fsdp_tokenizer_free(tokenizer);
    return 0;
}
