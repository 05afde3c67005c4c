/*
 * Limits of the looks into directories while a path is resolved: their number, and links; and patterns of
 * names. See framework_folder.h and frameworks.h.
 */
#include "formats/frameworks/framework_folder.h"

#include "base/core/mem.h"

#include <string.h>

bool fsdp_folder_may_look(const fsdp_folder *folder)
{
    if (*folder->left >= 0)
        --*folder->left;
    return *folder->left >= 0;
}

fsdp_status fsdp_folder_fail_looks(const char *path, fsdp_error *err)
{
    return fsdp_fail(err, FSDP_ERR_USAGE,
                     "%d files and folders were opened to find a checkpoint, and '%s' holds more; "
                     "name the checkpoint itself",
                     FSDP_FOLDER_LOOKS, path);
}

fsdp_status fsdp_folder_check_links(const fsdp_folder *folder, const char *name, fsdp_error *err)
{
    fsdp_status st = FSDP_OK;
    for (size_t end = 0; st == FSDP_OK && name[end] != '\0';) {
        end += strcspn(name + end, "/");
        char *own = fsdp_strndup(name, end);
        char *path = own ? fsdp_path_join(folder->path, own) : NULL;
        st = path ? fsdp_io_check_link(folder->io, path, err) : fsdp_fail_memory(err, "a path");
        fsdp_free(own);
        fsdp_free(path);
        end += name[end] == '/';
    }
    return st;
}

/* --- patterns of names ---------------------------------------------------------------------------- */

static bool is_digit(char c)
{
    return c >= '0' && c <= '9';
}

/* The pattern ends at `end`. The depth of the recursion is the number of '*' in it. */
static bool match(const char *pattern, const char *end, const char *name, int64_t *number)
{
    for (; pattern < end; pattern++) {
        if (*pattern == '*') {
            do
                if (match(pattern + 1, end, name, number))
                    return true;
            while (*name++);
            return false;
        }
        if (*pattern == '#') {
            int64_t value = 0;
            if (!is_digit(*name))
                return false;
            for (; is_digit(*name); name++)
                value = value < INT64_MAX / 10 - 1 ? value * 10 + (*name - '0') : value;
            *number = value;
            continue;
        }
        if (*pattern == '{') {
            const char *close = memchr(pattern, '}', (size_t)(end - pattern));
            size_t size = close ? (size_t)(close - pattern) + 1 : 1;
            if (!is_digit(*name) && strncmp(name, pattern, size) != 0)
                return false;
            name += is_digit(*name) ? strspn(name, "0123456789") : size;
            pattern += size - 1;
            continue;
        }
        if (*name++ != *pattern)
            return false;
    }
    return *name == '\0';
}

bool fsdp_framework_matches(const char *list, const char *name, int64_t *number_out)
{
    int64_t number = -1;
    for (const char *at = list; at;) {
        const char *bar = strchr(at, '|');
        number = -1;
        if (match(at, bar ? bar : at + strlen(at), name, &number)) {
            if (number_out)
                *number_out = number;
            return true;
        }
        at = bar ? bar + 1 : NULL;
    }
    return false;
}

/* The digits in a name that '#' stands for in one of the patterns of the list; *size_out 0: none. */
static const char *find_digits(const char *list, const char *name, size_t *size_out)
{
    const char *found = name;
    *size_out = 0;
    for (const char *at = list; at && *size_out == 0;) {
        const char *bar = strchr(at, '|'), *hash = strchr(at, '#');
        const char *end = bar ? bar : at + strlen(at);
        int64_t number;
        if (hash && hash < end && match(at, end, name, &number)) {
            found = name + (hash - at);
            *size_out = strspn(found, "0123456789");
        }
        at = bar ? bar + 1 : NULL;
    }
    return found;
}

char *fsdp_framework_spell(const char *list, const char *name, const char *pattern)
{
    size_t size;
    const char *digits = find_digits(list, name, &size), *hash = strchr(pattern, '#');
    fsdp_text text = {0};
    if (!hash || !size)
        return fsdp_strndup(pattern, strlen(pattern));
    fsdp_text_addf(&text, "%.*s%.*s%s", (int)(hash - pattern), pattern, (int)size, digits,
                   hash + 1);
    char *spelled = text.failed ? NULL : fsdp_strndup(text.data, text.size);
    fsdp_text_release(&text);
    return spelled;
}
