/* Parses Nanotron's slices: see safetensors_slices.h. */
#include "formats/safetensors/safetensors_slices.h"

#include <string.h>

typedef struct cursor {
    const char *at, *end;
} cursor;

static bool take(cursor *from, const char *word)
{
    size_t size = strlen(word);
    if ((size_t)(from->end - from->at) < size || memcmp(from->at, word, size) != 0)
        return false;
    from->at += size;
    return true;
}

static bool is_digit(const cursor *from)
{
    return from->at < from->end && *from->at >= '0' && *from->at <= '9';
}

static bool take_number(cursor *from, int64_t *number_out)
{
    const int64_t most = INT64_MAX / 10 - 1;
    if (!is_digit(from))
        return false;
    for (*number_out = 0; is_digit(from); from->at++) {
        if (*number_out > most)
            return false;
        *number_out = *number_out * 10 + (*from->at - '0');
    }
    return true;
}

/* "32", or "np.int64(32)" */
static bool take_size(cursor *from, int64_t *size_out)
{
    int64_t bits;
    if (!take(from, "np.int"))
        return take_number(from, size_out);
    return take_number(from, &bits) && take(from, "(") && take_number(from, size_out) &&
           take(from, ")");
}

bool fsdp_slices_shape(const char *text, size_t size, int64_t shape_out[FSDP_MAX_DIMS],
                       int *ndim_out)
{
    cursor from = {text, text + size};
    *ndim_out = 0;
    if (!take(&from, "("))
        return false;
    while (!take(&from, ")")) {
        if (*ndim_out == FSDP_MAX_DIMS || !take_size(&from, &shape_out[*ndim_out]))
            return false;
        ++*ndim_out;
        if (take(&from, ","))
            (void)take(&from, " ");
        else if (from.at == from.end || *from.at != ')')
            return false;
    }
    return from.at == from.end;
}

/* "START,STOP,STEP" of a dim, as Python means it: None is all. */
static bool take_slice(cursor *from, int64_t size, int64_t *lo_out, int64_t *len_out)
{
    int64_t start = 0, stop = size, step = 1;
    if (!take(from, "None") && !take_number(from, &start))
        return false;
    if (!take(from, ",") || (!take(from, "None") && !take_number(from, &stop)))
        return false;
    if (!take(from, ",") || (!take(from, "None") && !take_number(from, &step)))
        return false;
    *lo_out = start;
    *len_out = stop - start;
    return step == 1 && start <= stop && stop <= size;
}

static bool take_slices(cursor *from, const fsdp_slices *slices, const int64_t *shape,
                        int64_t *lo_out, int64_t *len_out)
{
    for (int dim = 0; dim < slices->ndim; dim++)
        if ((dim > 0 && !take(from, "|")) ||
            !take_slice(from, shape[dim], &lo_out[dim], &len_out[dim]))
            return false;
    return true;
}

bool fsdp_slices_next(fsdp_slices *slices, fsdp_slices_pair *pair_out)
{
    int64_t part_len[FSDP_MAX_DIMS];
    cursor from = {slices->at, slices->end};
    if (!take_slices(&from, slices, slices->part, pair_out->from, part_len) || !take(&from, "#") ||
        !take_slices(&from, slices, slices->whole, pair_out->lo, pair_out->len) ||
        memcmp(part_len, pair_out->len, (size_t)slices->ndim * sizeof *part_len) != 0)
        return false;
    if (from.at < from.end && (!take(&from, ";") || from.at == from.end))
        return false;
    slices->at = from.at;
    return true;
}
