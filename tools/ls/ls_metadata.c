/* The texts that lie beside the tensors (__metadata__ of safetensors), for people: see ls.h. */
#include "tools/ls/ls.h"
#include "base/text.h"

#include <string.h>

enum { TEXTS_SHOWN = 20, TEXT_MOST = 100 };

/* The next string of a JSON object of strings, with its quotes; NULL behind the last. */
static const char *next_string(const char **at, size_t *size_out)
{
    const char *start = strchr(*at, '"');
    if (!start)
        return NULL;
    const char *end = start + 1;
    while (*end != '"')
        end += *end == '\\' ? 2 : 1;
    *at = end + 1;
    *size_out = (size_t)(end + 1 - start);
    return start;
}

static size_t count_texts(const char *json)
{
    size_t count = 0, size;
    while (next_string(&json, &size))
        count++;
    return count / 2;
}

void ls_add_metadata(fsdp_text *text, const ls_listing *listing)
{
    const char *json = fsdp_checkpoint_extra(listing->checkpoint, "carried"), *string;
    char number[CLI_NUMBER], shown[TEXT_MOST];
    size_t size = 0, count = json ? count_texts(json) : 0;
    if (count == 0)
        return;
    fsdp_text_addf(text, "  %-9s  %s beside the tensors\n", "metadata",
                   cli_plural((int64_t)count, "text", number));
    for (size_t i = 0; i < 2 * count; i++) {
        if (i == 2 * (size_t)TEXTS_SHOWN) {
            fsdp_text_addf(text, "    and %zu more (--json has all)\n", count - TEXTS_SHOWN);
            return;
        }
        string = next_string(&json, &size);
        fsdp_printable_message(string, size, shown, sizeof shown);
        fsdp_text_addf(text, i % 2 == 0 ? "    %s: " : "%s\n", shown);
    }
}
