/*
 * Rows of the table of docs/reliability.md, which tests of many cases print: the number of cases, how they
 * ended, and counts that must be zero.
 */
#ifndef FSDP_MATRIX_ROW_H
#define FSDP_MATRIX_ROW_H

#include <fsdp/status.h>

#include <stdbool.h>
#include <stdint.h>

typedef struct matrix_row {
    const char *what;          /* the first column */
    const char *unit;          /* "points" */
    int64_t ran;
    int64_t all;               /* cases that exist; 0 where a sample does not tell */
    int64_t every;             /* the sample: 1 for all */
} matrix_row;

/*
 * Prints the row; the format gives its rest, "how they ended | must be zero". False when a sample finds that
 * the page is not true any more: its row has a number of cases that differs from `all` by more than a
 * twentieth, or there is no such row. A run of all cases is what writes the page (./dev torture).
 */
bool matrix_row_print(const matrix_row *row, const char *format, ...) FSDP_PRINTF(2, 3);

#endif
