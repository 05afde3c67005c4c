/* Rows of the table of docs/reliability.md: see matrix_row.h. */
#include "tests/support/matrix_row.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PAGE "docs/reliability.md"

/* The number at the start of a column, with or without commas. */
static int64_t number_at(const char *text)
{
    int64_t number = 0;
    for (; (*text >= '0' && *text <= '9') || *text == ','; text++)
        if (*text != ',')
            number = number * 10 + (*text - '0');
    return number;
}

/* The cases that exist, of a cell such as "12,240 points" or "24 of 12,240 points (1 of 510)". */
static int64_t cases_in(const char *cell)
{
    const char *rest = cell + strspn(cell, "0123456789,");
    return number_at(strncmp(rest, " of ", 4) == 0 ? rest + 4 : cell);
}

/* The number of cases in the page's row; -1 when there is none. */
static int64_t documented(const char *what)
{
    char line[1000];
    int64_t number = -1;
    size_t length = strlen(what);
    FILE *page = fopen(FSDP_SOURCE_DIR "/" PAGE, "r");
    while (page && number < 0 && fgets(line, sizeof line, page))
        if (strncmp(line, "| ", 2) == 0 && strncmp(line + 2, what, length) == 0 &&
            strncmp(line + 2 + length, " | ", 3) == 0)
            number = cases_in(line + 2 + length + 3);
    if (page)
        fclose(page);
    return number;
}

static bool is_documented(const matrix_row *row)
{
    if (row->all == 0 || row->every == 1)
        return true;
    int64_t number = documented(row->what);
    if (number >= 0 && llabs(number - row->all) <= row->all / 20)
        return true;
    fprintf(stderr,
            "%s says %" PRId64 " %s in its row '%s', and there are %" PRId64
            ": ./dev torture writes the table anew\n",
            PAGE, number, row->unit, row->what, row->all);
    return false;
}

bool matrix_row_print(const matrix_row *row, const char *format, ...)
{
    va_list args;
    printf("| %s | %" PRId64, row->what, row->ran);
    if (row->all > 0 && row->every > 1)
        printf(" of %" PRId64, row->all);
    printf(" %s", row->unit);
    if (row->every > 1)
        printf(" (1 of %" PRId64 ")", row->every);
    va_start(args, format);
    vprintf(format, args);
    va_end(args);
    printf(" |\n");
    return is_documented(row);
}
