/*
 * Matches texts with Python's expressions, for python_expressions.py: a line "MODE EXPRESSION TEXT", with
 * both in hexadecimal digits and the mode "match" or "fullmatch", gives "yes", "no", or "refused: REASON".
 */
#include "statedict/derive/python_expression.h"

#include <stdio.h>
#include <string.h>

enum { MOST = 40000 };

/* "-" is not a digit: an empty text. */
static size_t decode(const char *digits, char *out)
{
    size_t count = 0;
    unsigned byte;
    for (; sscanf(digits, "%2x", &byte) == 1; digits += 2)
        out[count++] = (char)byte;
    return count;
}

static void answer(const char *mode, const char *expression, const char *text)
{
    static char decoded[2][MOST / 2];
    fsdp_arena arena = {0};
    fsdp_python_expression compiled;
    fsdp_error err = {0};
    bool matches = false;
    size_t size = decode(expression, decoded[0]), text_size = decode(text, decoded[1]);
    fsdp_status st = fsdp_python_compile(&arena, decoded[0], size, &compiled, &err);
    if (st == FSDP_OK)
        st = fsdp_python_match(&compiled, strcmp(mode, "fullmatch") == 0, decoded[1], text_size,
                               &matches, &err);
    fsdp_arena_release(&arena);
    if (st == FSDP_OK)
        puts(matches ? "yes" : "no");
    else
        printf("refused: %s\n", err.text);
}

int main(void)
{
    static char mode[16], expression[MOST], text[MOST];
    while (scanf("%15s %39999s %39999s", mode, expression, text) == 3)
        answer(mode, expression, text);
    return 0;
}
