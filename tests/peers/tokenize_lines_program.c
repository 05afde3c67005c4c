/*
 * Lines of JSON on standard input through a tokenizer, for tokenizers_ids.py.
 *
 * usage: tokenize_lines_program TOKENIZER [special|decode]    a string or an array of ids per line
 *        tokenize_lines_program bytes json                    the tokenizer.json of "bytes"
 */
#include "runtime/tokens/tokenize_lines.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int tokenize(const fsdp_tokenizer *tokenizer, const fsdp_tokenize_options *options)
{
    char *line = NULL;
    size_t capacity = 0;
    fsdp_error err = {0};
    fsdp_status status = FSDP_OK;
    for (int64_t number = 1; status == FSDP_OK; number++) {
        ssize_t size = getline(&line, &capacity, stdin);
        if (size < 0)
            break;
        fsdp_text in = {.data = line, .size = (size_t)size}, out = {0};
        status = fsdp_tokenize_line(tokenizer, options, &in, number, &out, &err);
        fsdp_text_add(&out, "\n", 1);
        if (status == FSDP_OK)
            fwrite(out.data, 1, out.size, stdout);
        fsdp_text_release(&out);
    }
    free(line);
    return status == FSDP_OK ? 0 : fsdp_error_report(&err);
}

int main(int argc, char **argv)
{
    const char *mode = argc > 2 ? argv[2] : "";
    if (argc > 2 && strcmp(mode, "json") == 0) {
        fsdp_text text = {0};
        fsdp_tokenizer_add_bytes_json(&text);
        fwrite(text.data, 1, text.size, stdout);
        fsdp_text_release(&text);
        return 0;
    }
    fsdp_tokenizer *tokenizer;
    fsdp_error err = {0};
    if (argc < 2 || fsdp_tokenizer_open(argv[1], &tokenizer, &err) != FSDP_OK)
        return fsdp_error_report(&err);
    const fsdp_tokenize_options options = {.special = strcmp(mode, "special") == 0,
                                           .decode = strcmp(mode, "decode") == 0};
    int result = tokenize(tokenizer, &options);
    fsdp_tokenizer_free(tokenizer);
    return result;
}
